//! The tile state (m, ℓ, Õ) of some query rows, and the step that folds packed keys into it.

use std::ops::Range;
use std::sync::Arc;

use tilewise_core::{Element, Float, Result};

use crate::buffer::{Buffer, Reserve};
use crate::head::Head;
use crate::kernel::pack::Rows;
use crate::kernel::table::Kernels;
use crate::kernel::{Ahead, Block, MAX_MR, MAX_ROWS, Modifiers, s_stride};
use crate::packed::{KeySource, Packed};
use crate::pairs::{PairScratch, PairTile};
use crate::parallel::{in_order, threads};
use crate::shape::Shape;
use crate::simd::MAX_LANES;

/// Where the state of some rows lies: Õ is `[padded rows][width]`.
#[derive(Clone, Copy)]
pub(crate) struct TileState<A> {
    pub(crate) m: *mut A,
    pub(crate) l: *mut A,
    pub(crate) acc: *mut A,
}

impl<A: Float> TileState<A> {
    /// m = −∞, ℓ = 0, Õ = 0.
    ///
    /// # Safety
    /// The pointers cover `rows` padded rows of `width`.
    pub(crate) unsafe fn begin(&self, shape: &Shape, rows: usize) {
        let padded = shape.padded(rows);
        let zero = A::from_f64(0.0);
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.m, padded).fill(A::neg_infinity());
            std::slice::from_raw_parts_mut(self.l, padded).fill(zero);
            std::slice::from_raw_parts_mut(self.acc, padded * shape.width).fill(zero);
        }
    }

    /// The state from row `row` on.
    ///
    /// # Safety
    /// The row lies inside the state.
    pub(crate) unsafe fn row(&self, shape: &Shape, row: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            TileState {
                m: self.m.add(row),
                l: self.l.add(row),
                acc: self.acc.add(row * shape.width),
            }
        }
    }
}

/// What a worker needs besides the state: packed queries and a strip of scores.
pub(crate) struct Scratch<T: Element> {
    q: Buffer<T::Acc>,
    strip: Buffer<T::Acc>,
    m: Buffer<T::Acc>,
    l: Buffer<T::Acc>,
    acc: Buffer<T::Acc>,
    live: Vec<(usize, usize)>,
    /// The packed keys that any of the rows sees.
    seen: Range<usize>,
    pairs: Option<PairScratch<T>>,
}

impl<T: Element> Scratch<T> {
    /// Bytes for tiles of `rows` rows.
    pub(crate) fn bytes(shape: &Shape, rows: usize) -> usize {
        let padded = shape.padded(rows);
        let (packed, pairs) = match shape.pairs {
            true => (0, PairScratch::<T>::bytes(shape, rows)),
            false => (padded * shape.head_dim + MAX_MR * s_stride::<T::Acc>(), 0),
        };
        let elements = packed + padded * (shape.width + 2);
        elements * size_of::<T::Acc>() + padded * size_of::<(usize, usize)>() + pairs
    }

    /// For tiles of up to `rows` rows.
    pub(crate) fn new(shape: &Shape, rows: usize, reserve: &Arc<Reserve>) -> Result<Self> {
        let padded = shape.padded(rows);
        let (q, strip) = match shape.pairs {
            true => (0, 0),
            // Packing writes whole vectors, the last one past the end.
            false => (
                padded * shape.head_dim + MAX_LANES,
                MAX_MR * s_stride::<T::Acc>(),
            ),
        };
        Ok(Scratch {
            q: reserve.buffer(q, "queries of a tile")?,
            strip: Buffer::new(strip, "scores of a tile")?,
            m: reserve.buffer(padded, "state of a tile")?,
            l: reserve.buffer(padded, "state of a tile")?,
            acc: reserve.buffer(padded * shape.width, "state of a tile")?,
            live: vec![(0, 0); rows],
            seen: 0..0,
            pairs: match shape.pairs {
                true => Some(PairScratch::new(shape, rows, reserve)?),
                false => None,
            },
        })
    }

    /// The scratch's own tile state.
    pub(crate) fn state(&self) -> TileState<T::Acc> {
        TileState {
            m: self.m.at(),
            l: self.l.at(),
            acc: self.acc.at(),
        }
    }
}

/// A call's fixed parts.
#[derive(Clone, Copy)]
pub(crate) struct Machinery<T: Element> {
    pub(crate) kernels: Kernels<T>,
    pub(crate) shape: Shape,
}

impl<T: Element> Machinery<T> {
    /// Packs the queries of `rows` and notes what each row sees of `keys` packed keys. Returns the
    /// packed keys that any of them sees.
    ///
    /// # Safety
    /// The rows belong to the head; the scratch is large enough; the processor has the kernels'
    /// instructions.
    pub(crate) unsafe fn take_rows(
        &self,
        head: &Head<T>,
        rows: &Range<usize>,
        keys: usize,
        scratch: &mut Scratch<T>,
    ) -> Range<usize> {
        let mut pointers = [std::ptr::null(); 2 * MAX_MR];
        head.ask(rows, 0..3 * MAX_MR);
        for (first, n, mr) in self.shape.blocks(rows.len()) {
            head.ask(rows, first + 3 * MAX_MR..first + 3 * MAX_MR + n);
            let ahead = (rows.len() - first).min(2 * n);
            for (row, at) in pointers.iter_mut().take(ahead).enumerate() {
                *at = head.q.moved(rows.start + first + row, 0).at;
            }
            let packing = Rows {
                rows: &pointers[..n],
                next: &pointers[n..ahead],
                step: head.q.key,
                len: self.shape.head_dim,
            };
            // SAFETY: rows of the head exist, by the checked problem; room for padded rows.
            unsafe {
                let to = scratch.q.at().add(first * self.shape.head_dim);
                (self.kernels.transposed)(&packing, mr, head.scoring.sign, to);
            }
        }
        Self::note_live(head, rows, keys, scratch)
    }

    /// Notes what each row sees of `keys` packed keys. Returns those that any of them sees.
    fn note_live(
        head: &Head<T>,
        rows: &Range<usize>,
        keys: usize,
        scratch: &mut Scratch<T>,
    ) -> Range<usize> {
        let (mut low, mut high) = (usize::MAX, 0);
        let end = head.origin + keys;
        for (row, live) in rows.clone().zip(&mut scratch.live) {
            let seen = head.rule.row(row);
            let lo = seen.start.clamp(head.origin, end) - head.origin;
            let hi = seen.end.clamp(head.origin, end) - head.origin;
            *live = if lo < hi { (lo, hi) } else { (0, 0) };
            if lo < hi {
                low = low.min(lo);
                high = high.max(hi);
            }
        }
        scratch.seen = low.min(high)..high;
        scratch.seen.clone()
    }

    /// Calls `step` for each row block and the tile `tile`, if any of the block's rows sees any of
    /// its keys. Rows must have been taken.
    ///
    /// # Safety
    /// As [`Self::take_rows`]; the tile is packed; the state covers the rows.
    #[allow(clippy::too_many_arguments)] // what one step of the algorithm is about
    pub(crate) unsafe fn blocks(
        &self,
        head: &Head<T>,
        packed: &Packed<T>,
        rows: &Range<usize>,
        tile: usize,
        scratch: &Scratch<T>,
        state: TileState<T::Acc>,
        mut step: impl FnMut(usize, &mut Block<T::Acc>, Option<&Modifiers<T>>),
    ) {
        let shape = &self.shape;
        let from = tile * shape.key_tile;
        let more = self.tiles(&scratch.seen).end > tile + 1;
        let blocks = rows
            .len()
            .div_ceil(shape.row_blocks[shape.row_blocks.len() - 1]);
        for (number, (first, n, mr)) in shape.blocks(rows.len()).enumerate() {
            let mut live = [(0, 0); MAX_ROWS];
            let (mut low, mut high) = (usize::MAX, 0);
            for (slot, &(lo, hi)) in live.iter_mut().zip(&scratch.live[first..first + n]) {
                let lo = lo.clamp(from, from + shape.key_tile) - from;
                let hi = hi.clamp(from, from + shape.key_tile) - from;
                if lo < hi {
                    *slot = (lo, hi);
                    low = low.min(lo);
                    high = high.max(hi);
                }
            }
            if high == 0 {
                continue;
            }
            // SAFETY: the caller's promise.
            let mut block = unsafe {
                let (v, v_panel) = packed.v(shape, tile);
                let TileState { m, l, acc } = state.row(shape, first);
                Block {
                    rows: n,
                    mr,
                    head_dim: shape.head_dim,
                    width: shape.width,
                    q: scratch.q.at().add(first * shape.head_dim),
                    k: packed.k(shape, tile),
                    v,
                    v_panel,
                    lo: low,
                    hi: high,
                    live,
                    s: scratch.strip.at(),
                    acc,
                    m,
                    l,
                    c: head.scoring.c,
                    careful: packed.careful(tile),
                    ahead: match more {
                        true => Ahead::share(packed.ahead(shape, tile + 1), number, blocks),
                        false => Ahead::NONE,
                    },
                }
            };
            let modifiers = head
                .modifiers
                .map(|modifiers| modifiers.moved(rows.start + first, from));
            step(first, &mut block, modifiers.as_ref());
        }
    }

    /// Folds the packed keys that `rows` see into their state: FlashAttention-2's inner loop.
    ///
    /// # Safety
    /// As [`Self::take_rows`]; all tiles that the rows see are packed, from `source`; the state covers
    /// the padded rows.
    #[allow(clippy::too_many_arguments)] // what one step of the algorithm is about
    pub(crate) unsafe fn absorb(
        &self,
        head: &Head<T>,
        source: &KeySource<'_, T>,
        packed: &Packed<T>,
        rows: &Range<usize>,
        keys: usize,
        scratch: &mut Scratch<T>,
        state: TileState<T::Acc>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if let (Some(pairs), Some(packed)) = (&self.kernels.pairs, packed.pairs()) {
                let seen = Self::note_live(head, rows, keys, scratch);
                let Some(own) = &scratch.pairs else {
                    unreachable!("scratch made for another shape");
                };
                let tile = PairTile {
                    machinery: self,
                    pairs,
                    head,
                    packed,
                    source,
                    scratch: own,
                    rows,
                    live: &scratch.live,
                    tiles: self.tiles(&seen),
                    state,
                };
                tile.take_queries();
                (pairs.begin)();
                for number in tile.tiles.clone() {
                    tile.absorb(number);
                }
                (pairs.end)();
                return;
            }
            let seen = self.take_rows(head, rows, keys, scratch);
            for tile in self.tiles(&seen) {
                self.blocks(
                    head,
                    packed,
                    rows,
                    tile,
                    scratch,
                    state,
                    |_, block, modifiers| {
                        self.kernels.absorb(block, modifiers);
                    },
                );
            }
        }
    }

    /// Rows of the largest block that the kernels multiply at once.
    pub(crate) fn row_block(&self) -> usize {
        let sizes = match &self.kernels.pairs {
            Some(pairs) => pairs.row_blocks,
            None => self.shape.row_blocks,
        };
        sizes[sizes.len() - 1]
    }

    /// Packs all `keys` keys of a source, its tiles shared out among the threads.
    ///
    /// # Safety
    /// The room was made for at least as many keys, the source has them, and nobody else reads or
    /// writes `packed` meanwhile.
    pub(crate) unsafe fn pack_all<'a>(
        &self,
        packed: &Packed<T>,
        keys: usize,
        source: impl Fn() -> KeySource<'a, T> + Sync,
    ) where
        T: 'a,
    {
        in_order(
            self.tiles(&(0..keys)).len(),
            threads(),
            || (),
            |_, (), tile| {
                // SAFETY: the caller's promise; each tile is packed by one item.
                unsafe { packed.pack(&self.kernels, &self.shape, &source(), tile) }
            },
        );
    }

    /// The tiles that hold `keys`.
    pub(crate) fn tiles(&self, keys: &Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return 0..0;
        }
        keys.start / self.shape.key_tile..keys.end.div_ceil(self.shape.key_tile)
    }
}
