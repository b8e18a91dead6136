//! A tile of keys: K and V packed, dK and dV while they are summed up, and the step that a tile of
//! rows takes with it.

use std::ops::Range;

use tilewise_core::{Element, Result};

use super::call::{Call, Sizes};
use super::kernel::{Collected, Weights};
use super::rows::RowTile;
use crate::buffer::Buffer;
use crate::call::KvHead;
use crate::head::{Head, rows_of};
use crate::kernel::pack::Rows;
use crate::kernel::{Ahead, Block, MAX_MR, Modifiers, max_key_tile, s_stride};
use crate::simd::MAX_LANES;

/// The most rows of a tile.
pub(super) const MOST_ROWS: usize = 128;

/// A worker's room for one tile of keys, and for what a tile of rows makes with it.
pub(super) struct KeyRoom<T: Element> {
    /// K, `[panel][head_dim][NR]`: for S.
    k_columns: Buffer<T::Acc>,
    /// V, likewise: for dP.
    v_columns: Buffer<T::Acc>,
    /// K, `[panel][key][NR]`: for dQ.
    k_rows: Buffer<T::Acc>,
    dk: Buffer<T::Acc>,
    dv: Buffer<T::Acc>,
    /// P, and scale · dX, of all rows of a tile.
    p: Buffer<T::Acc>,
    ds: Buffer<T::Acc>,
    slopes: Option<Buffer<T::Acc>>,
    /// A value of K is NaN or infinite.
    careful: bool,
}

/// A block to score, and what happens to its scores.
type Scoring<T> = (Block<<T as Element>::Acc>, Option<Modifiers<T>>);

impl<T: Element> KeyRoom<T> {
    /// Elements that a room takes.
    pub(super) fn elements(sizes: &Sizes) -> usize {
        let shape = &sizes.shape;
        let keys = shape.key_tile;
        keys * (shape.head_dim + shape.head_dim_v + sizes.q_panels * shape.nr)
            + (keys + MAX_MR) * (sizes.width_q + shape.width)
            + 3 * sizes.strip::<T::Acc>()
            + 2 * MAX_LANES
    }

    pub(super) fn new(sizes: &Sizes, softcap: bool) -> Result<Self> {
        let shape = &sizes.shape;
        let keys = shape.key_tile;
        let strip = || Buffer::new(sizes.strip::<T::Acc>(), "weights of a tile");
        Ok(KeyRoom {
            k_columns: Buffer::new(keys * shape.head_dim + MAX_LANES, "keys of a tile")?,
            v_columns: Buffer::new(keys * shape.head_dim_v + MAX_LANES, "values of a tile")?,
            k_rows: Buffer::new(keys * sizes.q_panels * shape.nr, "keys of a tile")?,
            dk: Buffer::new((keys + MAX_MR) * sizes.width_q, "dk of a tile")?,
            dv: Buffer::new((keys + MAX_MR) * shape.width, "dv of a tile")?,
            p: strip()?,
            ds: strip()?,
            slopes: if softcap { Some(strip()?) } else { None },
            careful: false,
        })
    }

    /// The strip of scale · dX.
    pub(super) fn ds(&self) -> *mut T::Acc {
        self.ds.at()
    }

    /// dK and dV, `[key][width]`.
    pub(super) fn sums(&self) -> [*mut T::Acc; 2] {
        [self.dk.at(), self.dv.at()]
    }
}

/// What of a tile of rows and a tile of keys is live: keys counted within their tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    pub(super) lo: usize,
    pub(super) hi: usize,
}

impl<T: Element> Call<'_, T> {
    /// Packs K and V of `range`.
    ///
    /// # Safety
    /// The keys belong to the sequence; the room is no one else's; the processor has the kernels'
    /// instructions.
    pub(super) unsafe fn pack_keys(&self, at: KvHead, range: &Range<usize>, room: &mut KeyRoom<T>) {
        let sequence = &self.problem.sequences()[at.sequence];
        let shape = &self.sizes.shape;
        let one = <T::Acc as Element>::from_f64(1.0);
        let inputs = &self.inputs.inputs;
        let plane = |view| rows_of(view, sequence.k_batch, at.kv_head, sequence.k_start);
        let mut pointers = [std::ptr::null(); 256];
        const { assert!(max_key_tile::<f32>() <= 256) };
        for (view, len, to, rows) in [
            (
                &inputs.k,
                shape.head_dim,
                &room.k_columns,
                Some(&room.k_rows),
            ),
            (&inputs.v, shape.head_dim_v, &room.v_columns, None),
        ] {
            let plane = plane(view);
            for (to, j) in pointers.iter_mut().zip(range.clone()) {
                *to = plane.moved(j, 0).at;
            }
            let pointers = &pointers[..range.len()];
            for (panel, rows) in pointers.chunks(shape.nr).enumerate() {
                let rows = Rows {
                    rows,
                    next: &[],
                    step: plane.key,
                    len,
                };
                // SAFETY: the caller's promise; keys of the sequence exist, by the checked problem.
                unsafe {
                    let to = to.at().add(panel * shape.nr * len);
                    (self.kernels.transposed)(&rows, shape.nr, one, to);
                }
            }
            if let Some(to) = rows {
                let rows = Rows {
                    rows: pointers,
                    next: &[],
                    step: plane.key,
                    len,
                };
                // SAFETY: as above.
                let finite =
                    unsafe { (self.kernels.panels)(&rows, shape.key_tile * shape.nr, to.at()) };
                room.careful = !finite;
            }
        }
    }

    /// dK = dV = 0.
    ///
    /// # Safety
    /// The room is no one else's.
    pub(super) unsafe fn begin_keys(&self, room: &KeyRoom<T>) {
        let keys = self.sizes.shape.key_tile + MAX_MR;
        let widths = [self.sizes.width_q, self.sizes.shape.width];
        for (sum, width) in room.sums().into_iter().zip(widths) {
            // SAFETY: the caller's promise.
            unsafe {
                std::slice::from_raw_parts_mut(sum, keys * width).fill(T::Acc::default());
            }
        }
    }

    /// The row block `first`, of `n` rows and `mr` with padding, against the tile of keys, for its
    /// scores, with what is done to them; `None` if none of its rows sees any of the keys.
    ///
    /// # Safety
    /// The keys are packed, the tile is prepared.
    pub(super) unsafe fn block(
        &self,
        head: &Head<T>,
        rows: &Range<usize>,
        range: &Range<usize>,
        [first, n, mr]: [usize; 3],
        tile: RowTile<T::Acc>,
        room: &KeyRoom<T>,
    ) -> Option<Scoring<T>> {
        let mut live = [(0, 0); MAX_MR];
        let (mut low, mut high) = (usize::MAX, 0);
        for (r, slot) in live.iter_mut().take(n).enumerate() {
            let seen = head.rule.row(rows.start + first + r);
            let lo = seen.start.clamp(range.start, range.end) - range.start;
            let hi = seen.end.clamp(range.start, range.end) - range.start;
            if lo < hi {
                *slot = (lo, hi);
                low = low.min(lo);
                high = high.max(hi);
            }
        }
        if high == 0 {
            return None;
        }
        let shape = &self.sizes.shape;
        // SAFETY: the caller's promise.
        let block = unsafe {
            Block {
                rows: n,
                mr,
                head_dim: shape.head_dim,
                width: self.sizes.width_q,
                q: tile.q_columns().add(first * shape.head_dim),
                k: room.k_columns.at(),
                v: room.k_rows.at(),
                v_panel: shape.key_tile * shape.nr,
                lo: low,
                hi: high,
                live,
                s: room.p.at().add(first * s_stride::<T::Acc>()),
                acc: tile.dq().add(first * self.sizes.width_q),
                m: std::ptr::null_mut(),
                l: std::ptr::null_mut(),
                c: head.scoring.c,
                careful: room.careful,
                ahead: Ahead::NONE,
            }
        };
        let modifiers = head
            .modifiers
            .map(|modifiers| modifiers.moved(rows.start + first, range.start));
        Some((block, modifiers))
    }

    /// P and scale · dX of a tile in the room's strips, 0 outside what rows see; what of the keys any
    /// row sees. `of_scores`: dS in place of scale · dX.
    ///
    /// # Safety
    /// As [`Self::block`]; the room is no one else's.
    pub(super) unsafe fn weights(
        &self,
        head: &Head<T>,
        rows: &Range<usize>,
        range: &Range<usize>,
        tile: RowTile<T::Acc>,
        room: &KeyRoom<T>,
        of_scores: bool,
    ) -> Reach {
        let shape = &self.sizes.shape;
        let stride = s_stride::<T::Acc>();
        let [l, l_low, delta] = tile.statistics();
        let softcap = head.modifiers.and_then(|modifiers| modifiers.softcap);
        let scale = self.problem.softmax_scale();
        let acc = <T::Acc as Element>::from_f64;
        // SAFETY: the caller's promise.
        unsafe {
            let block_of = |block| self.block(head, rows, range, block, tile, room);
            let mut reach = Reach {
                lo: usize::MAX,
                hi: 0,
            };
            let blocks = || {
                shape
                    .blocks(rows.len())
                    .map(|(first, n, mr)| [first, n, mr])
            };
            for block in blocks() {
                if let Some((block, _)) = block_of(block) {
                    reach.lo = reach.lo.min(block.lo);
                    reach.hi = reach.hi.max(block.hi);
                }
            }
            if reach.hi == 0 {
                return Reach { lo: 0, hi: 0 };
            }
            // Products with the strips transposed read whole register blocks of keys.
            let end = (reach.hi + MAX_MR).min(stride);
            let from = reach.lo - reach.lo % MAX_LANES;
            for at @ [first, n, _] in blocks() {
                let strips = [room.p.at(), room.ds.at()].map(|strip| strip.add(first * stride));
                let clear = |from: usize, to: usize| {
                    for strip in strips {
                        for row in 0..n {
                            let row = strip.add(row * stride);
                            for key in from..to {
                                row.add(key).write(acc(0.0));
                            }
                        }
                    }
                };
                let Some((mut block, modifiers)) = block_of(at) else {
                    clear(from, end);
                    continue;
                };
                let [p, ds] = strips;
                let weights = Weights {
                    l: l.add(first),
                    l_low: l_low.add(first),
                    delta: delta.add(first),
                    ds,
                    slopes: match &room.slopes {
                        Some(slopes) if !of_scores => Some(slopes.at().add(first * stride)),
                        _ => None,
                    },
                    scale: acc(if of_scores { 1.0 } else { scale }),
                    softcap,
                };
                (self.kernels.tile.products)(&block);
                if weights.slopes.is_some() {
                    (self.more.slopes)(&block, &weights);
                }
                if let Some(modifiers) = &modifiers {
                    (self.kernels.modify)(&block, modifiers);
                }
                (self.kernels.tile.hide)(&block);
                (self.more.weigh)(&block, &weights);
                block.head_dim = shape.head_dim_v;
                block.q = tile.dout_columns().add(first * shape.head_dim_v);
                block.k = room.v_columns.at();
                block.s = ds;
                (self.kernels.tile.products)(&block);
                let dropping = modifiers.and_then(|modifiers| modifiers.dropout);
                if let Some(dropping) = &dropping {
                    (self.kernels.tile.drop_out)(&block, dropping);
                }
                block.s = p;
                (self.more.grade)(&block, &weights);
                if let Some(dropping) = &dropping {
                    (self.kernels.tile.drop_out)(&block, dropping);
                }
                // Whole vectors of any instruction set: what lies outside was not written.
                let lanes = self.kernels.tile.lanes;
                clear(from, block.lo - block.lo % lanes);
                clear(block.hi.next_multiple_of(lanes).min(end), end);
            }
            reach
        }
    }

    /// dV += (P ∘ D)ᵀ dO and dK += scale · dXᵀ q.
    ///
    /// # Safety
    /// [`Self::weights`] has made the strips; the room is no one else's.
    pub(super) unsafe fn collect(
        &self,
        rows: usize,
        reach: Reach,
        tile: RowTile<T::Acc>,
        room: &KeyRoom<T>,
    ) {
        let shape = &self.sizes.shape;
        // SAFETY: the caller's promise.
        let [q_careful, dout_careful] = unsafe { tile.careful() };
        let of = |strip, b, acc, width, careful| Collected {
            strip,
            rows,
            lo: reach.lo,
            hi: reach.hi,
            b,
            b_panel: shape.q_tile * shape.nr,
            acc,
            width,
            row_blocks: shape.row_blocks,
            careful,
        };
        let dv = of(
            room.p.at(),
            tile.dout_rows(),
            room.dv.at(),
            shape.width,
            dout_careful,
        );
        let dk = of(
            room.ds.at(),
            tile.q_rows(),
            room.dk.at(),
            self.sizes.width_q,
            q_careful,
        );
        // SAFETY: the caller's promise.
        unsafe {
            (self.more.collect)(&dv);
            (self.more.collect)(&dk);
        }
    }

    /// dQ += scale · dX K.
    ///
    /// # Safety
    /// As [`Self::collect`]; the tile's dQ is no one else's.
    pub(super) unsafe fn add_to_rows(
        &self,
        head: &Head<T>,
        rows: &Range<usize>,
        range: &Range<usize>,
        tile: RowTile<T::Acc>,
        room: &KeyRoom<T>,
    ) {
        for (first, n, mr) in self.sizes.shape.blocks(rows.len()) {
            // SAFETY: the caller's promise.
            unsafe {
                let block = self.block(head, rows, range, [first, n, mr], tile, room);
                if let Some((mut block, _)) = block {
                    block.s = room.ds.at().add(first * s_stride::<T::Acc>());
                    (self.kernels.tile.weighted)(&block);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_has_room_for_the_keys_of_a_tile() {
        assert!(max_key_tile::<f32>() + MAX_MR <= s_stride::<f32>());
        assert!(max_key_tile::<f64>() <= s_stride::<f64>());
    }
}
