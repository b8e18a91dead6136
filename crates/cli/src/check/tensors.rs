//! The tensors of one attention call, loaded from a case.

use tilewise::{BlockTable, Element, Inputs, Options, Sequence, TensorView};

use super::case::Case;
use super::memory::{Placed, Unplaced, vector};
use crate::case::Layout;
use crate::container::{Container, Plain, Tensor};

/// q, k, v and what goes with them.
pub(super) struct Tensors<T> {
    pub(super) q: Placed<T>,
    pub(super) k: Placed<T>,
    pub(super) v: Placed<T>,
    pub(super) bias: Option<Placed<T>>,
    pub(super) mask: Option<Placed<u8>>,
    /// What dropout keeps.
    pub(super) keep: Option<Placed<u8>>,
    /// What arrives at o and lse.
    pub(super) dout: Option<Placed<T>>,
    pub(super) dlse: Option<(Vec<f32>, [usize; 4])>,
    pub(super) cu_seqlens: Option<(Vec<i32>, Vec<i32>)>,
    pub(super) seqused_k: Option<Vec<i32>>,
    /// Pages, and how many a sequence.
    pub(super) block_table: Option<(Vec<i32>, usize)>,
    pub(super) options: Options,
}

impl<T: Element + Plain> Tensors<T> {
    pub(super) fn load(case: &Case, container: &Container) -> Result<Self, Unplaced> {
        let paged = case.options.layout == Layout::Paged;
        let (k, v) = if paged {
            ("k_pages", "v_pages")
        } else {
            ("k", "v")
        };
        let placed = |name| Placed::<T>::load(container, name, case.views.get(name));
        let lengths = |name| -> Result<Option<Vec<i32>>, Unplaced> {
            let Some(tensor) = container.optional(name)? else {
                return Ok(None);
            };
            vector(&tensor)?;
            Ok(Some(tensor.to_i32()?))
        };
        let heads = |name| -> Result<Option<Vec<f32>>, Unplaced> {
            let Some(tensor) = container.optional(name)? else {
                return Ok(None);
            };
            vector(&tensor)?;
            Ok(Some(tensor.to_f32()?))
        };
        let given = |name| container.contains(name);
        let cu_seqlens = match case.options.layout {
            Layout::Varlen => Some((
                lengths("cu_seqlens_q")?.unwrap_or_default(),
                lengths("cu_seqlens_k")?.unwrap_or_default(),
            )),
            _ => None,
        };
        let block_table = paged
            .then(|| container.tensor("block_table"))
            .transpose()?
            .map(|table| table_rows(&table))
            .transpose()?;
        if case.options.dropout_p != 0.0 && !given("keep_mask") {
            return Err(Unplaced::Refused("dropout without a keep_mask".into()));
        }
        let dlse = match container.optional("dlse")? {
            None => None,
            Some(tensor) => match *tensor.shape() {
                [b, h, s] => Some((tensor.to_f32()?, [b, h, s, 1])),
                ref other => {
                    return Err(Unplaced::Wrong(tilewise::Error::shape(
                        "dlse",
                        "three axes",
                        format!("{other:?}"),
                    )));
                }
            },
        };
        let bytes = |name: &'static str| Placed::<u8>::load(container, name, case.views.get(name));
        Ok(Tensors {
            keep: (case.options.dropout_p != 0.0)
                .then(|| bytes("keep_mask"))
                .transpose()?,
            dout: given("do").then(|| placed("do")).transpose()?,
            dlse,
            q: placed("q")?,
            k: placed(k)?,
            v: placed(v)?,
            bias: given("bias").then(|| placed("bias")).transpose()?,
            mask: given("mask")
                .then(|| Placed::<u8>::load(container, "mask", case.views.get("mask")))
                .transpose()?,
            cu_seqlens,
            seqused_k: lengths("seqused_k")?,
            block_table,
            options: case
                .options
                .to_options()
                .alibi_slopes(heads("alibi_slopes")?)
                .sinks(heads("sinks")?),
        })
    }

    /// The inputs of the call.
    pub(super) fn inputs(&self) -> tilewise::Result<Inputs<'_, T>> {
        let mut inputs = Inputs::new(self.q.view("q")?, self.k.view("k")?, self.v.view("v")?)
            .bias(
                self.bias
                    .as_ref()
                    .map(|bias| bias.view("bias"))
                    .transpose()?,
            )
            .mask(
                self.mask
                    .as_ref()
                    .map(|mask| mask.view("mask"))
                    .transpose()?,
            );
        inputs.keep_mask = match &self.keep {
            Some(keep) => Some(keep.view("keep_mask")?),
            None => None,
        };
        if let Some((q, k)) = &self.cu_seqlens {
            inputs = inputs.packed(q, k);
        }
        inputs.lengths.seqused_k = self.seqused_k.as_deref();
        inputs.block_table = self.block_table.as_ref().map(|(pages, width)| BlockTable {
            pages,
            width: *width,
        });
        Ok(inputs)
    }
}

fn table_rows(table: &Tensor<'_>) -> Result<(Vec<i32>, usize), Unplaced> {
    match *table.shape() {
        [_, width] => Ok((table.to_i32()?, width)),
        _ => Err(Unplaced::Wrong(tilewise::Error::Table {
            expected: "two axes".into(),
            got: format!("{:?}", table.shape()),
        })),
    }
}

/// The inputs of one of the sequences alone: a call of batch 1 without packing.
pub(super) fn alone<'a, T: Element>(
    inputs: &Inputs<'a, T>,
    n: usize,
    sequence: &Sequence,
) -> Inputs<'a, T> {
    let packed = inputs.lengths.cu_seqlens_q.is_some();
    let batch = sequence.q_batch..sequence.q_batch + 1;
    let rows = sequence.q_start..sequence.q_start + sequence.seqlen_q;
    let keys = sequence.k_start..sequence.k_start + sequence.seqlen_k;
    let mut one = *inputs;
    one.q = inputs.q.narrow(0, batch.clone()).narrow(2, rows.clone());
    if inputs.block_table.is_none() {
        let k_batch = sequence.k_batch..sequence.k_batch + 1;
        one.k = inputs.k.narrow(0, k_batch.clone());
        one.v = inputs.v.narrow(0, k_batch);
        if packed {
            one.k = one.k.narrow(2, keys.clone());
            one.v = one.v.narrow(2, keys.clone());
        }
    }
    let ranges = if packed {
        [Some(batch), None, Some(rows), Some(keys)]
    } else {
        [Some(batch), None, None, None]
    };
    one.bias = inputs.bias.map(|bias| cut(bias, &ranges));
    one.mask = inputs.mask.map(|mask| cut(mask, &ranges));
    one.keep_mask = inputs.keep_mask.map(|mask| cut(mask, &ranges));
    one.lengths.cu_seqlens_q = None;
    one.lengths.cu_seqlens_k = None;
    // Packed keys are cut to their used length already.
    one.lengths.seqused_k = match inputs.lengths.seqused_k {
        Some(used) if !packed => Some(&used[n..n + 1]),
        _ => None,
    };
    one.block_table = inputs.block_table.map(|table| BlockTable {
        pages: &table.pages[n * table.width..(n + 1) * table.width],
        width: table.width,
    });
    one
}

/// The part of a broadcastable view that lies in `ranges`; axes of size 1 stay.
pub(super) fn cut<'a, T: Copy>(
    view: TensorView<'a, T>,
    ranges: &[Option<std::ops::Range<usize>>; 4],
) -> TensorView<'a, T> {
    let mut part = view;
    for (axis, range) in ranges.iter().enumerate() {
        if let Some(range) = range
            && view.shape()[axis] > 1
        {
            part = part.narrow(axis, range.clone());
        }
    }
    part
}
