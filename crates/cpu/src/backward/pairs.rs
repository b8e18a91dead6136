//! The step of a tile of rows and a tile of keys on products of pairs (see [`crate::kernel::pairs`]):
//! what [`keys`](super::keys) does where the kernels have them.
//!
//! S = q kᵀ and dP = dO vᵀ take q and dO as rows, and k and v packed in pairs of elements; dQ += dS k
//! takes dS as rows, rounded to bf16, and k packed in pairs of keys. dV += Pᵀ dO and dK += dSᵀ q take
//! the strips transposed and rounded, `[key][row]`, and dO and q packed in pairs of rows. Weights and
//! sums stay f32.
//!
//! Rows and keys that the instructions would not multiply as defined are *odd*: packed as 0, and all
//! that they enter is made apart, element by element. Besides NaN, infinity and what is huge these are
//! rows of nothing but tiny numbers (see `take`): products of gradients and values are smaller than
//! either, and below 2⁻¹²⁶ the instructions have 0.

mod odd;
mod take;

use tilewise_core::{Element, Result};

use super::call::{Call, Sizes};
use super::kernel::Weights;
use super::keys::{KeyRoom, Reach, Step};
use crate::buffer::Buffer;
use crate::kernel::dropout::Dropping;
use crate::kernel::pairs::{
    CHUNK, COLUMNS, DEPTH, MOST_ROWS as MOST_BLOCK, PairBlock, PairKernels, Product, ROW_STRIDE,
};
use crate::kernel::{Ahead, Block, MAX_MR, MAX_ROWS, Modifiers, s_stride};
use crate::shape::blocks_of;
use odd::{add, apart, nothing_else};

/// Marks of a row: its q is odd, its dO is odd; of a key: its k is, its v is.
const ODD: [u8; 2] = [1, 2];

/// A block to score, and what happens to its scores.
type Scoring<T> = (PairBlock<<T as Element>::Acc>, Option<Modifiers<T>>);

/// `len` in whole depths.
pub(super) fn depth(len: usize) -> usize {
    len.next_multiple_of(DEPTH)
}

/// A worker's room for one tile of keys.
pub(super) struct PairRoom {
    /// K and V, `[panel][element / 2][COLUMNS][2]`: for S and dP.
    columns: [Buffer<u16>; 2],
    /// K, `[panel][key / 2][COLUMNS][2]`: for dQ.
    k_rows: Buffer<u16>,
    /// K, then V, as rows that are not packed yet.
    dense: Buffer<u16>,
    /// Marks of the keys, and all of them together.
    marks: Buffer<u8>,
    any: u8,
    /// q and dO of a tile of rows, `[chunk][row][ROW_STRIDE]`.
    left: [Buffer<u16>; 2],
    /// P, then dS, `[key][ROW_STRIDE]`.
    turned: Buffer<u16>,
}

impl PairRoom {
    /// Numbers of 16 bits in each buffer.
    fn parts(sizes: &Sizes) -> [usize; 7] {
        let shape = &sizes.shape;
        let (keys, d, dv) = (shape.key_tile, shape.head_dim, shape.head_dim_v);
        let left = |len: usize| len.div_ceil(CHUNK) * shape.q_tile * ROW_STRIDE;
        [
            keys * depth(d),
            keys * depth(dv),
            keys * sizes.width_q,
            keys * depth(d.max(dv)),
            left(d),
            left(dv),
            keys * ROW_STRIDE,
        ]
    }

    /// Bytes that a room takes.
    pub(super) fn bytes(sizes: &Sizes) -> usize {
        Self::parts(sizes).iter().sum::<usize>() * size_of::<u16>() + sizes.shape.key_tile
    }

    pub(super) fn new(sizes: &Sizes) -> Result<Self> {
        let [k, v, k_rows, dense, q, dout, turned] = Self::parts(sizes);
        Ok(PairRoom {
            columns: [
                Buffer::new(k, "keys of a tile")?,
                Buffer::new(v, "values of a tile")?,
            ],
            k_rows: Buffer::new(k_rows, "keys of a tile")?,
            dense: Buffer::new(dense, "keys of a tile")?,
            marks: Buffer::new(sizes.shape.key_tile, "marks of keys")?,
            any: 0,
            left: [
                Buffer::new(q, "queries of a tile")?,
                Buffer::new(dout, "dout of a tile")?,
            ],
            turned: Buffer::new(turned, "weights of a tile")?,
        })
    }
}

impl<T: Element> Call<'_, T> {
    /// The row block `first`, of `n` rows and `mr` with padding, against the tile of keys, for its
    /// scores; `None` if none of its rows sees any of the keys.
    ///
    /// # Safety
    /// The keys are packed, the tile is prepared and laid out.
    unsafe fn pair_block(
        &self,
        pairs: &PairKernels<T>,
        step: &Step<'_, T>,
        (first, n, mr): (usize, usize, usize),
        room: &KeyRoom<T>,
        own: &PairRoom,
    ) -> Option<Scoring<T>> {
        let mut live = [(0, 0); MOST_BLOCK];
        let (lo, hi) = step.live(first, &mut live[..n])?;
        let shape = &self.sizes.shape;
        // SAFETY: the caller's promise.
        let block = unsafe {
            PairBlock {
                block: Block {
                    rows: n,
                    mr,
                    head_dim: shape.head_dim,
                    width: self.sizes.width_q,
                    q: std::ptr::null(),
                    k: std::ptr::null(),
                    v: std::ptr::null(),
                    v_panel: 0,
                    lo,
                    hi,
                    live: [(0, 0); MAX_ROWS],
                    s: room.p().add(first * s_stride::<T::Acc>()),
                    acc: std::ptr::null_mut(),
                    m: std::ptr::null_mut(),
                    l: std::ptr::null_mut(),
                    c: step.head.scoring.c,
                    careful: false,
                    ahead: Ahead::NONE,
                },
                live,
                q: own.left[0].at().add(first * ROW_STRIDE),
                q_chunk: shape.q_tile * ROW_STRIDE,
                k: own.columns[0].at(),
                k_panel: COLUMNS * depth(shape.head_dim),
                v: own.k_rows.at(),
                v_panel: shape.key_tile * COLUMNS,
                grain: pairs.grain,
            }
        };
        let modifiers = step
            .head
            .modifiers
            .map(|modifiers| modifiers.moved(step.rows.start + first, step.keys.start));
        Some((block, modifiers))
    }

    /// [`Self::weights`].
    ///
    /// # Safety
    /// As there; the products' instructions have begun.
    pub(super) unsafe fn pair_weights(
        &self,
        pairs: &PairKernels<T>,
        step: &Step<'_, T>,
        room: &KeyRoom<T>,
        own: &PairRoom,
        of_scores: bool,
    ) -> Reach {
        let shape = &self.sizes.shape;
        let (rows, tile) = (step.rows.len(), step.tile);
        let stride = s_stride::<T::Acc>();
        let blocks = || blocks_of(pairs.row_blocks, rows);
        let zero = <T::Acc as Element>::from_f64(0.0);
        // SAFETY: the caller's promise.
        unsafe {
            let mut reach = Reach {
                lo: usize::MAX,
                hi: 0,
            };
            for (first, n, _) in blocks() {
                if let Some((lo, hi)) = step.live(first, &mut [(0, 0); MOST_BLOCK][..n]) {
                    reach.lo = reach.lo.min(lo);
                    reach.hi = reach.hi.max(hi);
                }
            }
            if reach.hi == 0 {
                return Reach { lo: 0, hi: 0 };
            }
            let (from, end) = reach.depths();
            let clear = |row: usize, rows: usize, from: usize, to: usize| {
                for strip in [room.p(), room.ds()] {
                    for row in row..row + rows {
                        let row = strip.add(row * stride + from);
                        std::slice::from_raw_parts_mut(row, to - from).fill(zero);
                    }
                }
            };
            let negate = step.head.scoring.sign < zero;
            let lay = |from: *mut T::Acc, len: usize, negate: bool, to: &Buffer<u16>| {
                lay(from.cast(), rows, len, negate, to.at(), shape.q_tile);
            };
            lay(tile.q_columns(), shape.head_dim, negate, &own.left[0]);
            lay(tile.dout_columns(), shape.head_dim_v, false, &own.left[1]);
            for at @ (first, n, _) in blocks() {
                let Some((mut block, modifiers)) = self.pair_block(pairs, step, at, room, own)
                else {
                    clear(first, n, from, end);
                    continue;
                };
                let weights = self.weights_of(step, first, room, of_scores);
                self.pair_strips(pairs, step, first, &mut block, modifiers, &weights, own);
                let (lo, hi) = block.columns();
                clear(first, n, from, lo);
                clear(first, n, hi, end);
            }
            // Whole depths of rows are multiplied.
            clear(rows, depth(rows) - rows, from, end);
            reach
        }
    }

    /// The strips of one block.
    ///
    /// # Safety
    /// As [`Self::pair_weights`].
    #[allow(clippy::too_many_arguments)] // a block and what becomes of it
    unsafe fn pair_strips(
        &self,
        pairs: &PairKernels<T>,
        step: &Step<'_, T>,
        first: usize,
        block: &mut PairBlock<T::Acc>,
        modifiers: Option<Modifiers<T>>,
        weights: &Weights<T::Acc>,
        own: &PairRoom,
    ) {
        let shape = &self.sizes.shape;
        let one = <T::Acc as Element>::from_f64(1.0);
        let (lo, hi) = block.columns();
        let p = block.block.s;
        // SAFETY: the caller's promise.
        unsafe {
            (pairs.products)(block);
            let sign = step.head.scoring.sign;
            self.odd_dots(step, first, &block.block, own, 0, sign);
            let whole = Block {
                lo,
                hi,
                ..block.block
            };
            if weights.slopes.is_some() {
                (self.more.slopes)(&whole, weights);
            }
            if let Some(modifiers) = &modifiers {
                (self.kernels.modify)(&block.block, modifiers);
            }
            (pairs.hide)(block);
            (self.more.weigh)(&whole, weights);
            block.block.head_dim = shape.head_dim_v;
            block.block.s = weights.ds;
            block.q = own.left[1].at().add(first * ROW_STRIDE);
            block.k = own.columns[1].at();
            block.k_panel = COLUMNS * depth(shape.head_dim_v);
            (pairs.products)(block);
            self.odd_dots(step, first, &block.block, own, 1, one);
            let dropping = modifiers.and_then(|modifiers| modifiers.dropout);
            if let Some(dropping) = &dropping {
                self.drop_out(block, weights.ds, dropping);
            }
            (self.more.grade)(&whole, weights);
            if let Some(dropping) = &dropping {
                self.drop_out(block, p, dropping);
            }
        }
    }

    /// Dropout of a strip: blocks of the other kernels note fewer rows' keys.
    ///
    /// # Safety
    /// As [`Self::pair_weights`].
    unsafe fn drop_out(
        &self,
        pairs: &PairBlock<T::Acc>,
        strip: *mut T::Acc,
        dropping: &Dropping<T::Acc>,
    ) {
        for row in (0..pairs.block.rows).step_by(MAX_MR) {
            let rows = (pairs.block.rows - row).min(MAX_MR);
            let mut live = [(0, 0); MAX_ROWS];
            live[..rows].copy_from_slice(&pairs.live[row..row + rows]);
            // SAFETY: the caller's promise.
            unsafe {
                let some = Block {
                    rows,
                    live,
                    s: strip.add(row * s_stride::<T::Acc>()),
                    ..pairs.block
                };
                (self.kernels.tile.drop_out)(&some, &dropping.moved(row, 0));
            }
        }
    }

    /// [`Self::collect`].
    ///
    /// # Safety
    /// As there; the products' instructions have begun.
    pub(super) unsafe fn pair_collect(
        &self,
        pairs: &PairKernels<T>,
        step: &Step<'_, T>,
        reach: Reach,
        room: &KeyRoom<T>,
        own: &PairRoom,
    ) {
        let Some(turned) = &self.more.turned else {
            unreachable!("products of pairs without strips turned");
        };
        if reach.hi == 0 {
            return;
        }
        let shape = &self.sizes.shape;
        let (from, end) = reach.depths();
        let (rows, tile) = (step.rows.len(), step.tile);
        let [dk, dv] = room.sums();
        let (p, ds) = (room.p(), room.ds());
        for (which, strip, packed, acc, len, width) in [
            (1, p, tile.dout_rows(), dv, shape.head_dim_v, shape.width),
            (0, ds, tile.q_rows(), dk, shape.head_dim, self.sizes.width_q),
        ] {
            // SAFETY: the caller's promise; sums have whole depths of keys.
            unsafe {
                let weights = own.turned.at();
                (turned.turned)(strip, depth(rows), from, end, weights);
                apart(step, own, 0..rows, reach.lo..reach.hi, |row, key| {
                    let weight = strip.add(row * s_stride::<T::Acc>() + key).read();
                    add(weight, step.row(which, row), len, acc.add(key * width));
                    weights.add(key * ROW_STRIDE + row).write(0);
                });
                for (first, _, mr) in blocks_of(pairs.row_blocks, end - from) {
                    let key = from + first;
                    if nothing_else(step, own, 0..rows, key..(key + mr).min(step.keys.len())) {
                        continue;
                    }
                    (turned.multiply)(&Product {
                        rows: mr,
                        depth: rows,
                        a: weights.add(key * ROW_STRIDE),
                        b: packed.cast(),
                        panel: shape.q_tile * COLUMNS,
                        panels: width / COLUMNS,
                        c: acc.add(key * width).cast(),
                        c_stride: width,
                        add: true,
                        ahead: (std::ptr::null(), 0),
                    });
                }
            }
        }
    }

    /// [`Self::add_to_rows`]. Leaves dS rounded.
    ///
    /// # Safety
    /// As there; the products' instructions have begun.
    pub(super) unsafe fn add_to_pair_rows(
        &self,
        pairs: &PairKernels<T>,
        step: &Step<'_, T>,
        lane: usize,
        room: &KeyRoom<T>,
        own: &PairRoom,
    ) {
        let width = self.sizes.width_q;
        for at @ (first, n, _) in blocks_of(pairs.row_blocks, step.rows.len()) {
            // SAFETY: the caller's promise.
            unsafe {
                let Some((mut pair, _)) = self.pair_block(pairs, step, at, room, own) else {
                    continue;
                };
                let block = &mut pair.block;
                block.s = room.ds().add(first * s_stride::<T::Acc>());
                block.acc = step.tile.dq(lane).add(first * width);
                let (rows, keys) = (first..first + n, block.lo..block.hi);
                apart(step, own, rows.clone(), keys.clone(), |row, key| {
                    let weight = block.s.add((row - first) * s_stride::<T::Acc>() + key);
                    let sums = block.acc.add((row - first) * width);
                    add(
                        weight.read(),
                        step.given[0].moved(key, 0),
                        block.head_dim,
                        sums,
                    );
                    weight.write(<T::Acc as Element>::from_f64(0.0));
                });
                if !nothing_else(step, own, rows, keys) {
                    (pairs.round)(&pair);
                    (pairs.weighted)(&pair);
                }
            }
        }
    }
}

/// Lays rows that stand `depth(len)` apart out as left operands, in chunks of `most` rows.
///
/// # Safety
/// `from` has the rows, `to` room for their chunks.
unsafe fn lay(from: *const u16, rows: usize, len: usize, negate: bool, to: *mut u16, most: usize) {
    let sign = if negate { 0x8000 } else { 0 };
    for row in 0..rows {
        for cut in (0..depth(len)).step_by(CHUNK) {
            let n = (depth(len) - cut).min(CHUNK);
            // SAFETY: the caller's promise.
            unsafe {
                let from = std::slice::from_raw_parts(from.add(row * depth(len) + cut), n);
                let to = to.add((cut / CHUNK * most + row) * ROW_STRIDE);
                let to = std::slice::from_raw_parts_mut(to, n);
                for (to, &from) in to.iter_mut().zip(from) {
                    *to = from ^ sign;
                }
            }
        }
    }
}

/// Whether a call of these sizes and this softmax_scale takes products of pairs.
pub(super) fn fits(head_dim: usize, head_dim_v: usize, scale: f64) -> bool {
    let magnitude = head_dim as f64 * scale.abs();
    head_dim > 0 && head_dim_v > 0 && magnitude <= crate::kernel::pairs::pack::MOST_SCALE
}
