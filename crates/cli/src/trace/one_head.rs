//! One head of one sequence, cut out of a problem.

use anyhow::{Result, bail};
use tilewise::{Dropout, Element, Inputs, Options, Problem, Sequence, TensorView};

/// Which head is traced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Batch entry, or number of the packed sequence.
    pub(super) batch: usize,
    /// Query head.
    pub(super) head: usize,
}

/// The inputs and options of that head alone: a problem of batch 1 and one head, with the same
/// scores. `inputs` must not be paged; `kept` is the mask that stands for their dropout, if that is
/// not given as one.
///
/// # Errors
/// If there is no such sequence or head.
pub(super) fn cut<'a, T: Element>(
    problem: &Problem,
    inputs: &Inputs<'a, T>,
    kept: Option<&'a [u8]>,
    place: Place,
) -> Result<(Inputs<'a, T>, Options)> {
    let (dims, sequences) = (problem.dims(), problem.sequences());
    let Some(sequence) = sequences.get(place.batch) else {
        bail!(
            "--batch: expected a batch entry or sequence of 0..{}, got {}",
            sequences.len(),
            place.batch
        );
    };
    let head = place.head;
    if head >= dims.num_heads {
        bail!(
            "--head: expected a head of 0..{}, got {head}",
            dims.num_heads
        );
    }
    let kv_head = head / dims.group();
    let kv = |view: TensorView<'a, T>| {
        let (start, keys) = (sequence.k_start, sequence.seqlen_k);
        view.narrow(0, sequence.k_batch..sequence.k_batch + 1)
            .narrow(1, kv_head..kv_head + 1)
            .narrow(2, start..start + keys)
    };
    let q = rows(inputs.q, sequence, head);
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    let kept = kept.map(|kept| TensorView::bhsd(kept, full)).transpose()?;
    let keep_mask = kept.or(inputs.keep_mask);
    let cut = Inputs::new(q, kv(inputs.k), kv(inputs.v))
        .bias(inputs.bias.map(|bias| tile(bias, sequence, head)))
        .mask(inputs.mask.map(|mask| tile(mask, sequence, head)))
        .keep_mask(keep_mask.map(|mask| tile(mask, sequence, head)));
    let all = problem.options();
    let of_head = |values: Option<&[f32]>| values.map(|values| vec![values[head]]);
    let options = (all.clone())
        .alibi_slopes(of_head(all.get_alibi_slopes()))
        .sinks(of_head(all.get_sinks()))
        .dropout(match all.get_dropout() {
            Some(Dropout::Philox { p, .. }) => Some(Dropout::Mask { p }),
            other => other,
        });
    Ok((cut, options))
}

/// The head's rows of a tensor that is as large as out, or has a number a row.
pub(super) fn rows<'a, U: Copy>(
    view: TensorView<'a, U>,
    sequence: &Sequence,
    head: usize,
) -> TensorView<'a, U> {
    view.narrow(0, sequence.q_batch..sequence.q_batch + 1)
        .narrow(1, head..head + 1)
        .narrow(2, sequence.q_start..sequence.q_start + sequence.seqlen_q)
}

/// The head's part of a bias or mask; axes that are broadcast stay so.
fn tile<'a, U: Copy>(
    mut view: TensorView<'a, U>,
    sequence: &Sequence,
    head: usize,
) -> TensorView<'a, U> {
    let parts = [
        (sequence.q_batch, 1),
        (head, 1),
        (sequence.q_start, sequence.seqlen_q),
        (sequence.k_start, sequence.seqlen_k),
    ];
    for (axis, (start, len)) in parts.into_iter().enumerate() {
        if view.shape()[axis] != 1 {
            view = view.narrow(axis, start..start + len);
        }
    }
    view
}
