//! The forward step of bf16 on instructions that multiply pairs of bf16 into f32: AMX tiles and
//! `vdpbf16ps`.
//!
//! Both want the right operand packed in pairs along the depth, `[panel][depth / 2][16 columns][2]`,
//! and the left one in rows; so S = q kᵀ takes q as rows and k packed in pairs of elements, and
//! Õ += P v takes P as rows, rounded to bf16 where it stands in the strip, and v packed in pairs of
//! keys. Everything between the products works on f32, as in the other kernels, and ℓ sums the
//! weights before they are rounded.
//!
//! The instructions take subnormals for 0, and a row without products need not meet a NaN. So
//! *odd* numbers are packed as 0 and their products made apart, element by element (see
//! [`pack`]): what the instructions see is such that no bit of a row depends on an odd number that it
//! does not see, and what they take for 0 is too small to be seen in any result.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot512;
pub(crate) mod emulated;
pub(crate) mod few;
pub(crate) mod pack;
pub(crate) mod step;

use tilewise_core::Element;
use tilewise_core::half::bf16;

use super::pack::Rows;
use super::{Block, STRIP_BYTES};
use crate::simd::{Convert, Vector};

/// bf16 between two rows of a left operand: those of the strip, and of packed queries.
pub(crate) const ROW_STRIDE: usize = STRIP_BYTES / 2;

/// Columns of a packed panel: f32 in a row of a tile.
pub(crate) const COLUMNS: usize = 16;

/// Depths and keys are packed in multiples of this: bf16 in a row of a tile.
pub(crate) const DEPTH: usize = 32;

/// Elements of a query that one product takes: they fit into a row. Longer ones are cut.
pub(crate) const CHUNK: usize = 512;

/// The most rows of a block.
pub(crate) const MOST_ROWS: usize = 32;

/// c (+)= a · b: `a` of `rows` × `depth`, rows [`ROW_STRIDE`] apart; `b` packed, `panels` panels of
/// [`COLUMNS`] columns `panel` elements apart; rows of `c` `c_stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// One of [`Pairs::ROW_BLOCKS`].
    pub(crate) rows: usize,
    /// At least 1. Up to the next multiple of [`DEPTH`], `a` and `b` hold numbers whose product is 0.
    pub(crate) depth: usize,
    pub(crate) a: *const u16,
    pub(crate) b: *const u16,
    pub(crate) panel: usize,
    pub(crate) panels: usize,
    pub(crate) c: *mut f32,
    pub(crate) c_stride: usize,
    /// Adds to `c` instead of overwriting it.
    pub(crate) add: bool,
    /// What each panel asks for on the way: see [`Ahead`](super::Ahead).
    pub(crate) ahead: (*const u8, usize),
}

/// Independent sums of [`Pairs::probe`].
pub(crate) const CHAINS: usize = 4;

/// What multiplies pairs.
///
/// Every product and sum is in f32, numbers of `a` and `b` that are subnormal count as 0. The order in
/// which an element of `c` is summed up depends on the depth alone.
///
/// # Safety
/// Every method may be called only where the processor has the instructions.
pub(crate) unsafe trait Pairs {
    /// What the rest of the step is made with.
    type V: Vector<E = f32> + Convert<bf16>;
    /// The sizes of row blocks, ascending.
    const ROW_BLOCKS: &'static [usize];
    /// Before the first of some products on this thread.
    unsafe fn begin() {}
    /// After the last.
    unsafe fn end() {}
    /// # Safety
    /// The pointers cover what the sizes say, `a` and `b` up to a whole multiple of [`DEPTH`]; `begin`
    /// was called.
    unsafe fn multiply(product: &Product);
    /// `rounds` × [`CHAINS`] products of whole registers or tiles, none of which waits for memory.
    unsafe fn probe(rounds: usize) -> f64;
    /// Floating-point operations of one of them.
    const PROBE_FLOPS: usize;
    /// Columns of the strip are filled in multiples of this, a divisor of [`DEPTH`] and a whole number of
    /// panels: depths of P v are.
    const GRAIN: usize = DEPTH;
    /// Whether [`Self::round`] takes subnormal numbers, for 0, and a processor that has these instructions
    /// computes with them as fast as with others.
    const SUBNORMALS: bool = false;
    /// Rounds two registers to nearest even. Their numbers are not subnormal, unless
    /// [`Self::SUBNORMALS`].
    ///
    /// # Safety
    /// `to` has room for twice as many elements as `V` has lanes.
    unsafe fn round(low: Self::V, high: Self::V, to: *mut u16);
}

/// Some query rows against one tile of keys.
pub(crate) struct PairBlock<A> {
    /// Rows, state and strip. Its operands and `live` are not used, and `lo..hi` is what any row sees.
    pub(crate) block: Block<A>,
    /// What each row sees of the tile.
    pub(crate) live: [(usize, usize); MOST_ROWS],
    /// Queries, `[⌈head_dim / CHUNK⌉][..][ROW_STRIDE]`, chunks `q_chunk` apart.
    pub(crate) q: *const u16,
    pub(crate) q_chunk: usize,
    /// Keys, panels `k_panel` apart.
    pub(crate) k: *const u16,
    pub(crate) k_panel: usize,
    /// Values, panels `v_panel` apart.
    pub(crate) v: *const u16,
    pub(crate) v_panel: usize,
    /// [`Pairs::GRAIN`].
    pub(crate) grain: usize,
}

impl<A> PairBlock<A> {
    /// The columns of the strip that are filled: `lo..hi` rounded outwards to whole grains.
    #[inline(always)]
    pub(crate) fn columns(&self) -> (usize, usize) {
        let Block { lo, hi, .. } = self.block;
        (lo - lo % self.grain, hi.next_multiple_of(self.grain))
    }
}

/// The functions of one way to multiply pairs, for inputs of type T.
#[derive(Clone, Copy)]
pub(crate) struct PairKernels<T: Element> {
    /// [`Pairs::ROW_BLOCKS`].
    pub(crate) row_blocks: &'static [usize],
    /// [`Pairs::GRAIN`].
    pub(crate) grain: usize,
    /// [`Pairs::begin`].
    pub(crate) begin: unsafe fn(),
    /// [`Pairs::end`].
    pub(crate) end: unsafe fn(),
    /// [`pack::queries`].
    pub(crate) queries: unsafe fn(&Rows<'_, T>, bool, *mut u16, usize, *mut u8),
    /// [`pack::keys`].
    pub(crate) keys: unsafe fn(&Rows<'_, T>, *mut u16, *mut u8),
    /// [`pack::values`].
    pub(crate) values: unsafe fn(&Rows<'_, T>, usize, *mut u16, *mut u8),
    /// The functions below from `products` on, without what is between them for special cases.
    pub(crate) absorb: unsafe fn(&PairBlock<T::Acc>),
    /// [`step::products`].
    pub(crate) products: unsafe fn(&PairBlock<T::Acc>),
    /// [`step::hide`].
    pub(crate) hide: unsafe fn(&PairBlock<T::Acc>),
    /// [`softmax::online_rounded`](super::softmax::online_rounded) of a block.
    pub(crate) softmax: unsafe fn(&PairBlock<T::Acc>),
    /// [`step::round`].
    pub(crate) round: unsafe fn(&PairBlock<T::Acc>),
    /// [`step::weighted_values`].
    pub(crate) weighted: unsafe fn(&PairBlock<T::Acc>),
    /// What few rows take instead, if that is faster than widening.
    pub(crate) few: Option<few::FewPairs<T>>,
    /// [`Pairs::probe`].
    pub(crate) probe: unsafe fn(usize) -> f64,
    /// Floating-point operations of a round of `probe`.
    pub(crate) flops_a_round: f64,
}
