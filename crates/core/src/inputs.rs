//! The tensors of one call.

use crate::dtype::Element;
use crate::view::TensorView;

/// How many rows of q and keys of k belong to which sequence. Empty: every row and key does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths<'a> {
    /// Packed sequences: sequence n holds rows `cu_seqlens_q[n]..cu_seqlens_q[n + 1]` of the
    /// seqlen axis of q. `[N + 1]`, first entry 0. Batch must be 1.
    pub cu_seqlens_q: Option<&'a [i32]>,
    /// The same for the seqlen axis of k and v.
    pub cu_seqlens_k: Option<&'a [i32]>,
    /// Used keys of each sequence (`[batch]`, or `[N]` when packed): what lies beyond is never read.
    pub seqused_k: Option<&'a [i32]>,
}

/// Where the pages of each sequence lie: `[batch, width]`, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockTable<'a> {
    /// Page numbers; entries that no used key needs are not looked at.
    pub pages: &'a [i32],
    /// Entries a sequence.
    pub width: usize,
}

/// q, k, v and what belongs to them element by element.
///
/// | tensor | shape |
/// |---|---|
/// | q | `[batch, num_heads, seqlen_q, head_dim]` |
/// | k | `[batch, num_kv_heads, seqlen_k, head_dim]` |
/// | v | `[batch, num_kv_heads, seqlen_k, head_dim_v]` |
/// | bias, mask, keep_mask | `[batch, num_heads, seqlen_q, seqlen_k]`, any axis may be 1 |
///
/// Packed sequences stand one after another along the seqlen axis of a batch of 1; bias and mask
/// are then indexed by those packed positions. With a block table, k and v are pages:
/// `[pages, num_kv_heads, page_size, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// Queries.
    pub q: TensorView<'a, T>,
    /// Keys, or pages of keys.
    pub k: TensorView<'a, T>,
    /// Values, or pages of values.
    pub v: TensorView<'a, T>,
    /// Added to scaled (and capped) scores. Only −∞ hides a key.
    pub bias: Option<TensorView<'a, T>>,
    /// 0 hides a key, anything else leaves it visible.
    pub mask: Option<TensorView<'a, u8>>,
    /// Which weights [`Dropout::Mask`](crate::Dropout::Mask) keeps: 0 drops a weight.
    pub keep_mask: Option<TensorView<'a, u8>>,
    /// Sequence lengths.
    pub lengths: Lengths<'a>,
    /// Set if k and v are pages; needs `lengths.seqused_k`.
    pub block_table: Option<BlockTable<'a>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Plain q, k and v.
    pub fn new(q: TensorView<'a, T>, k: TensorView<'a, T>, v: TensorView<'a, T>) -> Self {
        Inputs {
            q,
            k,
            v,
            bias: None,
            mask: None,
            keep_mask: None,
            lengths: Lengths::default(),
            block_table: None,
        }
    }

    /// With an additive bias.
    pub fn bias(mut self, bias: impl Into<Option<TensorView<'a, T>>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// With a boolean mask, 0 = hidden.
    pub fn mask(mut self, mask: impl Into<Option<TensorView<'a, u8>>>) -> Self {
        self.mask = mask.into();
        self
    }

    /// With the weights that dropout keeps, 0 = dropped; for [`Dropout::Mask`](crate::Dropout::Mask).
    pub fn keep_mask(mut self, keep_mask: impl Into<Option<TensorView<'a, u8>>>) -> Self {
        self.keep_mask = keep_mask.into();
        self
    }

    /// With packed sequences.
    pub fn packed(mut self, cu_seqlens_q: &'a [i32], cu_seqlens_k: &'a [i32]) -> Self {
        self.lengths.cu_seqlens_q = Some(cu_seqlens_q);
        self.lengths.cu_seqlens_k = Some(cu_seqlens_k);
        self
    }

    /// With used lengths of k and v.
    pub fn seqused_k(mut self, used: &'a [i32]) -> Self {
        self.lengths.seqused_k = Some(used);
        self
    }

    /// With k and v in pages.
    pub fn paged(mut self, table: BlockTable<'a>, seqused_k: &'a [i32]) -> Self {
        self.block_table = Some(table);
        self.lengths.seqused_k = Some(seqused_k);
        self
    }
}
