//! What an attention problem is, apart from its data.

use crate::dropout::Dropout;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::inputs::{BlockTable, Inputs, Lengths};
use crate::mask::MaskRule;
use crate::options::Options;

/// Sizes of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Entries of the batch axis; 1 for packed sequences.
    pub batch: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`. Query head h uses head h / (num_heads / num_kv_heads).
    pub num_kv_heads: usize,
    /// Rows of q (all sequences together when packed).
    pub seqlen_q: usize,
    /// Rows of k and v (all sequences together when packed; table width × page size when paged).
    pub seqlen_k: usize,
    /// Size of a row of q and k.
    pub head_dim: usize,
    /// Size of a row of v and out.
    pub head_dim_v: usize,
}

impl Dims {
    /// Query heads that share one key and value head.
    pub fn group(&self) -> usize {
        self.num_heads.checked_div(self.num_kv_heads).unwrap_or(1)
    }

    /// Shape of out.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.head_dim_v]
    }

    /// Shape of lse.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.num_heads, self.seqlen_q]
    }
}

/// Most elements of q, or of k, that a problem may have (an axis of size 0 counting as 1).
const MOST_ELEMENTS: u64 = 1 << 48;

/// One sequence: which rows of q attend to which keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Entry of the batch axis of q (and out, lse, bias, mask).
    pub q_batch: usize,
    /// First row on the seqlen axis of q.
    pub q_start: usize,
    /// Rows.
    pub seqlen_q: usize,
    /// Entry of the batch axis of k and v, or row of the block table.
    pub k_batch: usize,
    /// First key on the seqlen axis of k and v.
    pub k_start: usize,
    /// Used keys.
    pub seqlen_k: usize,
}

/// A validated attention problem: sizes, element type, options and sequences.
///
/// Made by [`Problem::new`] from tensors, or by [`Problem::dense`] from sizes alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    dims: Dims,
    dtype: DType,
    options: Options,
    sequences: Vec<Sequence>,
    packed: bool,
    /// Keys a page, if k and v are pages.
    page_size: Option<usize>,
    bias: bool,
    mask: bool,
}

impl Problem {
    /// The problem that these tensors and options pose.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Heads`], [`Error::Lengths`], [`Error::Table`] or
    /// [`Error::Option`]: everything that does not fit is found here, before any computation.
    /// [`Error::Unsupported`] for packed sequences with a block table, [`Error::OutOfMemory`] for more sequences than can
    /// be listed.
    pub fn new<T: Element>(inputs: &Inputs<'_, T>, options: &Options) -> Result<Problem> {
        options.validate()?;
        let [batch, num_heads, seqlen_q, head_dim] = inputs.q.shape();
        let [k_batch, num_kv_heads, k_seqlen, k_dim] = inputs.k.shape();
        let [v_batch, v_heads, v_seqlen, head_dim_v] = inputs.v.shape();
        if k_dim != head_dim {
            return Err(Error::shape(
                "k",
                format!("head_dim {head_dim} as q has"),
                format!("shape {:?}", inputs.k.shape()),
            ));
        }
        if [v_batch, v_heads, v_seqlen] != [k_batch, num_kv_heads, k_seqlen] {
            return Err(Error::shape(
                "v",
                format!("shape [{k_batch}, {num_kv_heads}, {k_seqlen}, head_dim_v] as k has"),
                format!("{:?}", inputs.v.shape()),
            ));
        }
        let seqlen_k = match inputs.block_table {
            Some(table) => table
                .width
                .checked_mul(k_seqlen)
                .ok_or_else(|| Error::Table {
                    expected: "a width whose keys can be counted".into(),
                    got: format!("width {}", table.width),
                })?,
            None => k_seqlen,
        };
        let packed = inputs.lengths.cu_seqlens_q.is_some() || inputs.lengths.cu_seqlens_k.is_some();
        if inputs.block_table.is_none() && k_batch != batch {
            return Err(Error::shape(
                "k",
                format!("batch {batch} as q has"),
                format!("shape {:?}", inputs.k.shape()),
            ));
        }
        let dims = Dims {
            batch,
            num_heads,
            num_kv_heads,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim_v,
        };
        let full = [batch, num_heads, seqlen_q, seqlen_k];
        if let Some(bias) = &inputs.bias {
            bias.broadcast_to(full).map_err(|e| e.named("bias"))?;
        }
        if let Some(mask) = &inputs.mask {
            mask.broadcast_to(full).map_err(|e| e.named("mask"))?;
        }
        if let Some(keep) = &inputs.keep_mask {
            keep.broadcast_to(full).map_err(|e| e.named("keep_mask"))?;
        }
        match (options.get_dropout(), &inputs.keep_mask) {
            (Some(Dropout::Mask { .. }), None) => {
                return Err(Error::shape(
                    "keep_mask",
                    format!("{full:?} or 1 in any axis, for dropout by a mask"),
                    "none",
                ));
            }
            (Some(Dropout::Mask { .. }), Some(_)) | (_, None) => {}
            (_, Some(_)) => {
                return Err(Error::option(
                    "dropout",
                    "Dropout::Mask, since keep_mask is given",
                    format!("{:?}", options.get_dropout()),
                ));
            }
        }
        let page_size = inputs.block_table.map(|_| k_seqlen);
        let sequences = if packed {
            if inputs.block_table.is_some() {
                return Err(Error::unsupported(
                    "tilewise",
                    "packed sequences with a block table",
                ));
            }
            packed_sequences(&dims, &inputs.lengths)?
        } else {
            padded_sequences(
                &dims,
                &inputs.lengths,
                inputs.block_table,
                k_batch,
                page_size,
            )?
        };
        Problem {
            dims,
            dtype: T::DTYPE,
            options: options.clone(),
            sequences,
            packed,
            page_size,
            bias: inputs.bias.is_some(),
            mask: inputs.mask.is_some(),
        }
        .checked()
    }

    /// A problem without packing, bias or mask, from its sizes: for planning and for states that
    /// keys are streamed through.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Heads`] or [`Error::Option`], as of [`Problem::new`]; [`Error::OutOfMemory`] for more
    /// sequences than can be listed.
    pub fn dense(dims: Dims, dtype: DType, options: &Options) -> Result<Problem> {
        options.validate()?;
        if let Some(Dropout::Mask { .. }) = options.get_dropout() {
            return Err(Error::option(
                "dropout",
                "Dropout::Philox: sizes alone bring no keep_mask",
                "Dropout::Mask",
            ));
        }
        Problem {
            dims,
            dtype,
            options: options.clone(),
            sequences: padded_sequences(&dims, &Lengths::default(), None, dims.batch, None)?,
            packed: false,
            page_size: None,
            bias: false,
            mask: false,
        }
        .checked()
    }

    /// The checks that need sizes only.
    fn checked(self) -> Result<Problem> {
        let Dims {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = self.dims;
        if head_dim == 0 {
            return Err(Error::shape("q", "head_dim of at least 1", "0"));
        }
        self.countable()?;
        self.representable()?;
        let divides = match num_kv_heads {
            0 => num_heads == 0,
            n => num_heads.is_multiple_of(n),
        };
        if !divides {
            return Err(Error::Heads {
                num_heads,
                num_kv_heads,
            });
        }
        for (name, values) in [
            ("alibi_slopes", &self.options.alibi_slopes),
            ("sinks", &self.options.sinks),
        ] {
            if let Some(values) = values
                && values.len() != num_heads
            {
                return Err(Error::shape(
                    name,
                    format!("[{num_heads}], one a query head"),
                    format!("[{}]", values.len()),
                ));
            }
        }
        Ok(self)
    }

    /// That sizes can be multiplied: strides of 0 can describe tensors larger than any memory, and
    /// a backend must be able to compute what it needs for them without overflow.
    fn countable(&self) -> Result<()> {
        let d = &self.dims;
        let width = d.head_dim.max(d.head_dim_v);
        for (tensor, heads, seqlen) in [
            ("q", d.num_heads, d.seqlen_q),
            ("k", d.num_kv_heads, d.seqlen_k),
        ] {
            let elements = [d.batch, heads, seqlen, width]
                .into_iter()
                .try_fold(1u64, |product, dim| product.checked_mul(dim.max(1) as u64));
            if elements.is_none_or(|elements| elements > MOST_ELEMENTS) {
                return Err(Error::shape(
                    tensor,
                    "at most 2^48 elements",
                    format!("{} × {heads} × {seqlen} × {width}", d.batch),
                ));
            }
        }
        Ok(())
    }

    /// That the options are numbers of the type they are computed in.
    fn representable(&self) -> Result<()> {
        if self.dtype.accumulator() == DType::F64 {
            return Ok(());
        }
        if let Some(scale) = self.options.softmax_scale
            && !(scale as f32).is_finite()
        {
            return Err(Error::option(
                "softmax_scale",
                "a finite number in f32, the type scores are computed in",
                format!("{scale:e}"),
            ));
        }
        if let Some(cap) = self.options.softcap
            && !((cap as f32).is_finite() && cap as f32 > 0.0)
        {
            return Err(Error::option(
                "softcap",
                "a finite number above 0 in f32, the type scores are computed in",
                format!("{cap:e}"),
            ));
        }
        Ok(())
    }

    /// Sizes.
    pub fn dims(&self) -> &Dims {
        &self.dims
    }

    /// Element type of q, k, v and out.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The sequences, in order. Rows of q that belong to none get out 0 and lse −∞.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Refuses inputs that pose another problem than this: kernels read up to where it says.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn expect_posed(&self, posed: &Problem) -> Result<()> {
        if posed == self {
            return Ok(());
        }
        Err(Error::shape(
            "problem",
            "the problem that the inputs pose",
            "another one",
        ))
    }

    /// Whether sequences are packed along the seqlen axis.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// Keys a page, if k and v are pages.
    pub fn page_size(&self) -> Option<usize> {
        self.page_size
    }

    /// Whether an additive bias is given.
    pub fn has_bias(&self) -> bool {
        self.bias
    }

    /// Whether a boolean mask is given.
    pub fn has_mask(&self) -> bool {
        self.mask
    }

    /// The factor of q·k.
    pub fn softmax_scale(&self) -> f64 {
        self.options.scale_for(self.dims.head_dim)
    }

    /// Which keys position and length leave live in `sequence`.
    pub fn mask_rule(&self, sequence: &Sequence) -> MaskRule {
        MaskRule::new(&self.options, sequence.seqlen_q, sequence.seqlen_k)
    }

    /// Shape of dk: that of k, or `[batch, num_kv_heads, seqlen_k, head_dim]` if k comes in pages, since
    /// sequences may share pages.
    pub fn dk_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim]
    }

    /// Shape of dv, likewise.
    pub fn dv_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim_v]
    }

    /// Floating-point operations of the backward pass: five products over live pairs, 2.5 times
    /// [`flops`](Self::flops) where head_dim_v = head_dim.
    pub fn backward_flops(&self) -> f64 {
        let d = &self.dims;
        2.0 * (3 * d.head_dim + 2 * d.head_dim_v) as f64 * self.live_pairs() as f64
    }

    /// Live (query, key) pairs of all sequences and heads.
    pub fn live_pairs(&self) -> u128 {
        let pairs: u128 = self
            .sequences
            .iter()
            .map(|sequence| self.mask_rule(sequence).live_pairs())
            .sum();
        pairs * self.dims.num_heads as u128
    }

    /// Floating-point operations of the two products over live pairs:
    /// 2·(head_dim + head_dim_v) a pair, a multiply and an add counted as two. This is the
    /// field's 4·b·h·sq·sk·d, with exactly the live half under causality.
    pub fn flops(&self) -> f64 {
        2.0 * (self.dims.head_dim + self.dims.head_dim_v) as f64 * self.live_pairs() as f64
    }

    /// Bytes of q, k, v, out and lse, each counted once: the least any algorithm can move.
    pub fn bytes(&self) -> f64 {
        let d = &self.dims;
        let rows_q = (d.batch * d.num_heads) as f64 * d.seqlen_q as f64;
        let used: usize = self.sequences.iter().map(|s| s.seqlen_k).sum();
        let rows_k = used as f64 * d.num_kv_heads as f64;
        let width = (d.head_dim + d.head_dim_v) as f64;
        (rows_q + rows_k) * width * self.dtype.size() as f64 + 4.0 * rows_q
    }
}

fn length(tensor: &'static str, value: i32, limit: usize) -> Result<usize> {
    usize::try_from(value)
        .ok()
        .filter(|&x| x <= limit)
        .ok_or_else(|| {
            Error::lengths(
                tensor,
                format!("lengths from 0 to {limit}"),
                value.to_string(),
            )
        })
}

fn padded_sequences(
    dims: &Dims,
    lengths: &Lengths<'_>,
    table: Option<BlockTable<'_>>,
    pages: usize,
    page_size: Option<usize>,
) -> Result<Vec<Sequence>> {
    if let Some(used) = lengths.seqused_k
        && used.len() != dims.batch
    {
        return Err(Error::shape(
            "seqused_k",
            format!("[{}], one a batch entry", dims.batch),
            format!("[{}]", used.len()),
        ));
    }
    let mut sequences = Vec::new();
    sequences
        .try_reserve_exact(dims.batch)
        .map_err(|_| Error::OutOfMemory {
            backend: "host".into(),
            what: "the list of sequences".into(),
            bytes: (dims.batch as u64).saturating_mul(size_of::<Sequence>() as u64),
        })?;
    for b in 0..dims.batch {
        let seqlen_k = match lengths.seqused_k {
            Some(used) => length("seqused_k", used[b], dims.seqlen_k)?,
            None => dims.seqlen_k,
        };
        sequences.push(Sequence {
            q_batch: b,
            q_start: 0,
            seqlen_q: dims.seqlen_q,
            k_batch: b,
            k_start: 0,
            seqlen_k,
        });
    }
    if let (Some(table), Some(page_size)) = (table, page_size) {
        if lengths.seqused_k.is_none() {
            return Err(Error::lengths(
                "seqused_k",
                "used lengths with a block table",
                "none",
            ));
        }
        check_table(&table, &sequences, pages, page_size)?;
    }
    Ok(sequences)
}

fn check_table(
    table: &BlockTable<'_>,
    sequences: &[Sequence],
    pages: usize,
    page_size: usize,
) -> Result<()> {
    if table.pages.len() != sequences.len() * table.width {
        return Err(Error::Table {
            expected: format!("{} rows of {} entries", sequences.len(), table.width),
            got: format!("{} entries", table.pages.len()),
        });
    }
    for sequence in sequences {
        let row = &table.pages[sequence.k_batch * table.width..][..table.width];
        // seqlen_k ≤ width × page_size was checked with the lengths, so the row is wide enough.
        let needed = sequence.seqlen_k.div_ceil(page_size.max(1));
        for &page in &row[..needed] {
            if usize::try_from(page).map_or(true, |page| page >= pages) {
                return Err(Error::Table {
                    expected: format!("page numbers below {pages}"),
                    got: format!("{page} for sequence {}", sequence.k_batch),
                });
            }
        }
    }
    Ok(())
}

/// Checks one cumulative length array against its axis and yields its ranges.
fn cumulative(
    tensor: &'static str,
    cu: &[i32],
    rows: usize,
) -> Result<impl ExactSizeIterator<Item = (usize, usize)>> {
    if cu.first() != Some(&0) {
        return Err(Error::lengths(
            tensor,
            "[N + 1] entries that start with 0",
            format!("{:?}", &cu[..cu.len().min(4)]),
        ));
    }
    for pair in cu.windows(2) {
        if pair[1] < pair[0] {
            return Err(Error::lengths(
                tensor,
                "entries that never fall",
                format!("{} after {}", pair[1], pair[0]),
            ));
        }
    }
    length(tensor, cu[cu.len() - 1], rows)?;
    let ranges: Vec<_> = cu
        .windows(2)
        .map(|pair| (pair[0] as usize, (pair[1] - pair[0]) as usize))
        .collect();
    Ok(ranges.into_iter())
}

fn packed_sequences(dims: &Dims, lengths: &Lengths<'_>) -> Result<Vec<Sequence>> {
    let missing =
        |tensor: &'static str| Error::lengths(tensor, "both cu_seqlens_q and cu_seqlens_k", "none");
    let cu_q = lengths
        .cu_seqlens_q
        .ok_or_else(|| missing("cu_seqlens_q"))?;
    let cu_k = lengths
        .cu_seqlens_k
        .ok_or_else(|| missing("cu_seqlens_k"))?;
    if dims.batch != 1 {
        return Err(Error::shape(
            "q",
            "batch 1 for packed sequences",
            format!("batch {}", dims.batch),
        ));
    }
    let queries = cumulative("cu_seqlens_q", cu_q, dims.seqlen_q)?;
    let keys = cumulative("cu_seqlens_k", cu_k, dims.seqlen_k)?;
    if queries.len() != keys.len() {
        return Err(Error::lengths(
            "cu_seqlens_k",
            format!("{} sequences as cu_seqlens_q has", queries.len()),
            keys.len().to_string(),
        ));
    }
    if let Some(used) = lengths.seqused_k
        && used.len() != keys.len()
    {
        return Err(Error::shape(
            "seqused_k",
            format!("[{}], one a sequence", keys.len()),
            format!("[{}]", used.len()),
        ));
    }
    queries
        .zip(keys)
        .enumerate()
        .map(|(n, ((q_start, seqlen_q), (k_start, seqlen_k)))| {
            let seqlen_k = match lengths.seqused_k {
                Some(used) => length("seqused_k", used[n], seqlen_k)?,
                None => seqlen_k,
            };
            Ok(Sequence {
                q_batch: 0,
                q_start,
                seqlen_q,
                k_batch: 0,
                k_start,
                seqlen_k,
            })
        })
        .collect()
}
