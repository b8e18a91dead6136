//! A tile of keys: K and V packed, dK and dV while they are summed up, and the step that a tile of
//! rows takes with it.

use std::ops::Range;

use tilewise_core::{Element, Result};

use super::call::{Call, LANES, Sizes};
use super::kernel::{Collected, Weights};
use super::pairs::PairRoom;
use super::rows::RowTile;
use crate::buffer::Buffer;
use crate::call::KvHead;
use crate::head::{Head, rows_of};
use crate::kernel::pack::Rows;
use crate::kernel::pairs::DEPTH;
use crate::kernel::{Ahead, Block, MAX_MR, MAX_ROWS, Modifiers, Plane, max_key_tile, s_stride};
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
    /// What takes the place of K and V above, where products take pairs.
    pairs: Option<PairRoom>,
}

/// A tile of rows and a tile of keys of one head.
pub(super) struct Step<'a, T: Element> {
    pub(super) head: &'a Head<T>,
    /// dO of the head, from row 0 on.
    pub(super) dout: Plane<T>,
    /// K and V, from the first key of the tile on.
    pub(super) given: [Plane<T>; 2],
    pub(super) rows: &'a Range<usize>,
    pub(super) keys: &'a Range<usize>,
    pub(super) tile: RowTile<T::Acc>,
}

impl<T: Element> Step<'_, T> {
    /// What the rows from the tile's row `first` on see of the keys, counted within their tile, and
    /// from where to where any does; `None` if none sees any.
    pub(super) fn live(&self, first: usize, live: &mut [(usize, usize)]) -> Option<(usize, usize)> {
        let keys = self.keys;
        let (mut low, mut high) = (usize::MAX, 0);
        for (r, slot) in live.iter_mut().enumerate() {
            let seen = self.head.rule.row(self.rows.start + first + r);
            let lo = seen.start.clamp(keys.start, keys.end) - keys.start;
            let hi = seen.end.clamp(keys.start, keys.end) - keys.start;
            if lo < hi {
                *slot = (lo, hi);
                low = low.min(lo);
                high = high.max(hi);
            }
        }
        (high > 0).then_some((low, high))
    }
}

/// A block to score, and what happens to its scores.
type Scoring<T> = (Block<<T as Element>::Acc>, Option<Modifiers<T>>);

impl<T: Element> KeyRoom<T> {
    /// Elements of K for S, V for dP and K for dQ.
    fn parts(sizes: &Sizes) -> [usize; 3] {
        let shape = &sizes.shape;
        let keys = shape.key_tile;
        match shape.pairs {
            true => [0; 3],
            false => [
                keys * shape.head_dim + MAX_LANES,
                keys * shape.head_dim_v + MAX_LANES,
                keys * sizes.q_panels * shape.nr,
            ],
        }
    }

    /// Bytes that a room takes.
    pub(super) fn bytes(sizes: &Sizes) -> usize {
        let shape = &sizes.shape;
        let elements = Self::parts(sizes).iter().sum::<usize>()
            + (shape.key_tile + MAX_MR) * (sizes.width_q + shape.width)
            + 3 * sizes.strip::<T::Acc>();
        let pairs = match shape.pairs {
            true => PairRoom::bytes(sizes),
            false => 0,
        };
        elements * size_of::<T::Acc>() + pairs
    }

    pub(super) fn new(sizes: &Sizes, softcap: bool) -> Result<Self> {
        let shape = &sizes.shape;
        let keys = shape.key_tile;
        let [k, v, k_rows] = Self::parts(sizes);
        let strip = || Buffer::new(sizes.strip::<T::Acc>(), "weights of a tile");
        Ok(KeyRoom {
            k_columns: Buffer::new(k, "keys of a tile")?,
            v_columns: Buffer::new(v, "values of a tile")?,
            k_rows: Buffer::new(k_rows, "keys of a tile")?,
            dk: Buffer::new((keys + MAX_MR) * sizes.width_q, "dk of a tile")?,
            dv: Buffer::new((keys + MAX_MR) * shape.width, "dv of a tile")?,
            p: strip()?,
            ds: strip()?,
            slopes: if softcap { Some(strip()?) } else { None },
            careful: false,
            pairs: match shape.pairs {
                true => Some(PairRoom::new(sizes)?),
                false => None,
            },
        })
    }

    /// The strip of P.
    pub(super) fn p(&self) -> *mut T::Acc {
        self.p.at()
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

impl Reach {
    /// The same rounded outwards to whole depths of products of pairs.
    pub(super) fn depths(self) -> (usize, usize) {
        (self.lo - self.lo % DEPTH, self.hi.next_multiple_of(DEPTH))
    }
}

impl<T: Element> Call<'_, T> {
    /// The step of `rows` of the head that is a KV head's `n`th with `keys`.
    pub(super) fn step<'s>(
        &self,
        (at, n): (KvHead, usize),
        head: &'s Head<T>,
        rows: &'s Range<usize>,
        keys: &'s Range<usize>,
        tile: RowTile<T::Acc>,
    ) -> Step<'s, T> {
        Step {
            head,
            dout: self.dout(at, n),
            given: self.given(at, keys),
            rows,
            keys,
            tile,
        }
    }

    /// K and V, from the first of `keys` on.
    fn given(&self, at: KvHead, keys: &Range<usize>) -> [Plane<T>; 2] {
        let sequence = &self.problem.sequences()[at.sequence];
        let plane = |view| rows_of(view, sequence.k_batch, at.kv_head, sequence.k_start);
        [&self.inputs.inputs.k, &self.inputs.inputs.v].map(|view| plane(view).moved(keys.start, 0))
    }

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
        if let (Some(pairs), Some(own)) = (&self.kernels.pairs, &mut room.pairs) {
            let given = self.given(at, range);
            // SAFETY: the caller's promise; keys of the sequence exist, by the checked problem.
            unsafe { self.pack_pair_keys(pairs, given, range.len(), own) }
            return;
        }
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
        step: &Step<'_, T>,
        [first, n, mr]: [usize; 3],
        room: &KeyRoom<T>,
    ) -> Option<Scoring<T>> {
        let mut live = [(0, 0); MAX_ROWS];
        let (low, high) = step.live(first, &mut live[..n])?;
        let Step { head, tile, .. } = *step;
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
                acc: std::ptr::null_mut(),
                m: std::ptr::null_mut(),
                l: std::ptr::null_mut(),
                c: head.scoring.c,
                careful: room.careful,
                ahead: Ahead::NONE,
            }
        };
        let modifiers = head
            .modifiers
            .map(|modifiers| modifiers.moved(step.rows.start + first, step.keys.start));
        Some((block, modifiers))
    }

    /// P and scale · dX of a step in the room's strips, 0 outside what rows see; what of the keys any
    /// row sees. `of_scores`: dS in place of scale · dX.
    ///
    /// # Safety
    /// As [`Self::block`]; the room is no one else's; [`Self::begin`] was called on this thread.
    pub(super) unsafe fn weights(
        &self,
        step: &Step<'_, T>,
        room: &KeyRoom<T>,
        of_scores: bool,
    ) -> Reach {
        if let (Some(pairs), Some(own)) = (&self.kernels.pairs, &room.pairs) {
            // SAFETY: the caller's promise.
            return unsafe { self.pair_weights(pairs, step, room, own, of_scores) };
        }
        let Step { rows, tile, .. } = *step;
        let shape = &self.sizes.shape;
        let stride = s_stride::<T::Acc>();
        let acc = <T::Acc as Element>::from_f64;
        // SAFETY: the caller's promise.
        unsafe {
            let block_of = |block| self.block(step, block, room);
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
                let weights = self.weights_of(step, first, room, of_scores);
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

    /// What makes weights of the scores of the rows from the tile's row `first` on.
    ///
    /// # Safety
    /// As [`Self::block`].
    pub(super) unsafe fn weights_of(
        &self,
        step: &Step<'_, T>,
        first: usize,
        room: &KeyRoom<T>,
        of_scores: bool,
    ) -> Weights<T::Acc> {
        let [l, l_low, delta] = step.tile.statistics();
        let softcap = step.head.modifiers.and_then(|modifiers| modifiers.softcap);
        let at = first * s_stride::<T::Acc>();
        let scale = if of_scores {
            1.0
        } else {
            self.problem.softmax_scale()
        };
        // SAFETY: the caller's promise.
        unsafe {
            Weights {
                l: l.add(first),
                l_low: l_low.add(first),
                delta: delta.add(first),
                ds: room.ds.at().add(at),
                slopes: match &room.slopes {
                    Some(slopes) if !of_scores => Some(slopes.at().add(at)),
                    _ => None,
                },
                scale: <T::Acc as Element>::from_f64(scale),
                softcap,
            }
        }
    }

    /// dV += (P ∘ D)ᵀ dO and dK += scale · dXᵀ q.
    ///
    /// # Safety
    /// [`Self::weights`] has made the strips; the room is no one else's.
    pub(super) unsafe fn collect(&self, step: &Step<'_, T>, reach: Reach, room: &KeyRoom<T>) {
        if let (Some(pairs), Some(own)) = (&self.kernels.pairs, &room.pairs) {
            // SAFETY: the caller's promise.
            unsafe { self.pair_collect(pairs, step, reach, room, own) }
            return;
        }
        let (rows, tile) = (step.rows.len(), step.tile);
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

    /// A sum of dQ += scale · dX K.
    ///
    /// # Safety
    /// As [`Self::collect`]; that sum is no one else's.
    pub(super) unsafe fn add_to_rows(&self, step: &Step<'_, T>, lane: usize, room: &KeyRoom<T>) {
        if let (Some(pairs), Some(own)) = (&self.kernels.pairs, &room.pairs) {
            // SAFETY: the caller's promise.
            unsafe { self.add_to_pair_rows(pairs, step, lane, room, own) }
            return;
        }
        for (first, n, mr) in self.sizes.shape.blocks(step.rows.len()) {
            // SAFETY: the caller's promise.
            unsafe {
                if let Some((mut block, _)) = self.block(step, [first, n, mr], room) {
                    block.s = room.ds.at().add(first * s_stride::<T::Acc>());
                    block.acc = step.tile.dq(lane).add(first * self.sizes.width_q);
                    (self.kernels.tile.weighted)(&block);
                }
            }
        }
    }

    /// Adds the sums of dQ that `key_tiles` tiles of keys have added to, in their order, to the first.
    ///
    /// # Safety
    /// The tile's dQ is no one else's; the processor has the kernels' instructions.
    pub(super) unsafe fn join(&self, rows: usize, key_tiles: usize, tile: RowTile<T::Acc>) {
        let one = <T::Acc as Element>::from_f64(1.0);
        for lane in 1..key_tiles.min(LANES) {
            let len = rows * self.sizes.width_q;
            // SAFETY: the caller's promise; each sum has whole vectors of all rows.
            unsafe { (self.kernels.tile.combine)(len, one, tile.dq(0), one, tile.dq(lane)) }
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
