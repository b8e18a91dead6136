//! One backward call, and the sizes of its tiles.

use std::ops::Range;
use std::sync::Arc;

use tilewise_core::{BackwardInputs, Element, Problem};

use super::kernel::BackwardKernels;
use super::pairs;
use crate::backend::CpuBackend;
use crate::buffer::Reserve;
use crate::call::KvHead;
use crate::head::{Head, Scoring, rows_of};
use crate::kernel::pairs::{COLUMNS, DEPTH};
use crate::kernel::table::{CpuElement, Kernels};
use crate::kernel::{MAX_MR, Plane, max_key_tile, s_stride};
use crate::shape::Shape;
use crate::simd::MAX_LANES;

/// Sizes that follow from head dims, element type and caches alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Of the forward pass, with the backward pass's tiles.
    pub(super) shape: Shape,
    /// head_dim in whole vectors.
    pub(super) width_q: usize,
    pub(super) q_panels: usize,
    /// Sums of dQ that a tile of rows has: [`LANES`], or fewer where no sequence has as many tiles of
    /// keys.
    pub(super) lanes: usize,
}

impl Sizes {
    pub(super) fn new<T: CpuElement>(backend: &CpuBackend, problem: &Problem) -> Sizes {
        let (kernels, dims) = (T::kernels(backend.isa()), problem.dims());
        let scale = problem.softmax_scale();
        if kernels.pairs.is_some() && pairs::fits(dims.head_dim, dims.head_dim_v, scale) {
            return Self::for_pairs(backend, problem, &kernels);
        }
        let tile = &kernels.tile;
        let mut shape = Shape::new(dims, tile, backend.caches());
        let size = size_of::<T::Acc>();
        let width_q = dims.head_dim.next_multiple_of(tile.lanes);
        // A tile of keys with K twice, V, dK and dV takes at most half of L2; a tile of rows with q
        // and dO twice, dQ and two strips passes by in the other half.
        let key_bytes = (dims.head_dim + dims.head_dim_v + 2 * width_q + shape.width).max(1) * size;
        shape.key_tile = (backend.caches().l2 / 2 / key_bytes / tile.nr * tile.nr)
            .clamp(2 * tile.nr, max_key_tile::<T::Acc>());
        let mr = tile.row_blocks[tile.row_blocks.len() - 1];
        shape.q_tile = (ROWS / mr).max(1) * mr;
        Sizes {
            shape,
            width_q,
            q_panels: width_q.div_ceil(tile.nr),
            lanes: dims.seqlen_k.div_ceil(shape.key_tile).clamp(1, LANES),
        }
    }

    /// The same for products of pairs.
    fn for_pairs<T: CpuElement>(
        backend: &CpuBackend,
        problem: &Problem,
        kernels: &Kernels<T>,
    ) -> Sizes {
        let (dims, caches) = (problem.dims(), backend.caches());
        let mut shape = Shape::new(dims, &kernels.tile, caches).for_pairs(caches);
        let width_q = dims.head_dim.next_multiple_of(COLUMNS);
        // K twice and V in 16 bits, dK and dV in 32.
        let key_bytes = 2 * (2 * dims.head_dim.next_multiple_of(DEPTH) + shape.width)
            + 4 * (width_q + shape.width);
        shape.key_tile =
            (caches.l2 / 2 / key_bytes / DEPTH * DEPTH).clamp(DEPTH, max_key_tile::<f32>());
        shape.q_tile = PAIR_ROWS;
        Sizes {
            shape,
            width_q,
            q_panels: width_q.div_ceil(shape.nr),
            lanes: dims.seqlen_k.div_ceil(shape.key_tile).clamp(1, LANES),
        }
    }

    /// Elements of a strip for all rows of a tile.
    pub(super) fn strip<A>(&self) -> usize {
        // Products with a strip transposed read a register block past its end.
        self.shape.padded(self.shape.q_tile) * s_stride::<A>() + MAX_MR
    }

    /// The tiles of `rows` rows.
    pub(super) fn row_tiles(&self, rows: usize) -> usize {
        rows.div_ceil(self.shape.q_tile)
    }

    /// Rows of tile `tile` of `rows`.
    pub(super) fn rows(&self, tile: usize, rows: usize) -> Range<usize> {
        let first = tile * self.shape.q_tile;
        first..(first + self.shape.q_tile).min(rows)
    }

    /// Keys of tile `tile` of `keys`.
    pub(super) fn keys(&self, tile: usize, keys: usize) -> Range<usize> {
        let first = tile * self.shape.key_tile;
        first..(first + self.shape.key_tile).min(keys)
    }

    /// The key tiles that hold `keys`.
    pub(super) fn key_tiles(&self, keys: &Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return 0..0;
        }
        keys.start / self.shape.key_tile..keys.end.div_ceil(self.shape.key_tile)
    }

    /// Where the parts of a tile of rows lie in its room.
    pub(super) fn room(&self) -> Room {
        let shape = &self.shape;
        let padded = shape.padded(shape.q_tile);
        let [q_columns, dout_columns, q_rows, dout_rows] = match shape.pairs {
            // 16 bits each: rows as they are, and packed in pairs.
            true => [
                shape.q_tile * pairs::depth(shape.head_dim) / 2,
                shape.q_tile * pairs::depth(shape.head_dim_v) / 2,
                shape.q_tile * self.width_q / 2,
                shape.q_tile * shape.width / 2,
            ],
            // Packing writes whole vectors, the last one past the end.
            false => [
                padded * shape.head_dim + MAX_LANES,
                padded * shape.head_dim_v + MAX_LANES,
                self.q_panels * shape.nr * shape.q_tile,
                shape.v_panels * shape.nr * shape.q_tile,
            ],
        };
        let mut end = 0;
        let mut take = |elements: usize| {
            let start = end;
            end += elements.next_multiple_of(MAX_LANES);
            start
        };
        let dq_lane = (padded * self.width_q).next_multiple_of(MAX_LANES);
        Room {
            q_columns: take(q_columns),
            dout_columns: take(dout_columns),
            q_rows: take(q_rows),
            dout_rows: take(dout_rows),
            dq: take(self.lanes * dq_lane),
            dq_lane,
            lanes: self.lanes,
            l: take(padded),
            l_low: take(padded),
            delta: take(padded),
            flags: 2 + shape.q_tile,
            elements: end,
        }
    }
}

/// The smallest softmax_scale that may be a unit of the strip.
const LEAST_UNIT: f64 = 1e-12;

/// Tiles of keys add to dQ in turns, each to every `LANES`th sum alone: those that follow one another
/// need not wait for each other where one has less to do than the one before it.
pub(super) const LANES: usize = 2;

/// Rows of a tile, about.
const ROWS: usize = 48;

/// Rows of a tile of products of pairs: whole blocks of 12 and of 32, whole depths.
const PAIR_ROWS: usize = 96;

/// Offsets of the parts of a tile of rows, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) q_columns: usize,
    pub(super) dout_columns: usize,
    pub(super) q_rows: usize,
    pub(super) dout_rows: usize,
    pub(super) dq: usize,
    /// From one sum of dQ to the next, and how many there are.
    pub(super) dq_lane: usize,
    pub(super) lanes: usize,
    pub(super) l: usize,
    pub(super) l_low: usize,
    pub(super) delta: usize,
    pub(super) elements: usize,
    /// Bytes besides: whether q and dO need care, and a mark for each row.
    pub(super) flags: usize,
}

/// One backward call. Pages have been gathered.
pub(super) struct Call<'a, T: Element> {
    pub(super) kernels: Kernels<T>,
    pub(super) more: BackwardKernels<T>,
    pub(super) sizes: Sizes,
    pub(super) problem: &'a Problem,
    pub(super) inputs: &'a BackwardInputs<'a, T>,
    pub(super) scoring: Scoring<T::Acc>,
    pub(super) reserve: &'a Arc<Reserve>,
}

// SAFETY: what is shared is read only.
unsafe impl<T: Element> Sync for Call<'_, T> {}

impl<'a, T: CpuElement> Call<'a, T> {
    pub(super) fn new(
        backend: &'a CpuBackend,
        problem: &'a Problem,
        inputs: &'a BackwardInputs<'a, T>,
    ) -> Self {
        let sizes = Sizes::new::<T>(backend, problem);
        // The builder made sure that the processor has the instruction set.
        let mut kernels = T::kernels(backend.isa());
        if !sizes.shape.pairs {
            kernels.pairs = None;
        }
        Call {
            reserve: backend.reserve(),
            kernels,
            more: T::backward_kernels(backend.isa()),
            sizes,
            problem,
            inputs,
            // L is kept in units of the strip: where these are tiny it would not fit.
            scoring: Scoring::new(problem, problem.softmax_scale().abs() < LEAST_UNIT),
        }
    }
}

impl<T: Element> Call<'_, T> {
    /// Every KV head of every sequence that has keys or queries.
    pub(super) fn kv_heads(&self) -> Vec<KvHead> {
        let heads = self.problem.dims().num_kv_heads;
        let sequences = self.problem.sequences().iter().enumerate();
        sequences
            .filter(|(_, sequence)| sequence.seqlen_q > 0 || sequence.seqlen_k > 0)
            .flat_map(|(sequence, _)| (0..heads).map(move |kv_head| KvHead { sequence, kv_head }))
            .collect()
    }

    /// The `n`th query head of a KV head's group.
    pub(super) fn head(&self, at: KvHead, n: usize) -> Head<T> {
        let sequence = &self.problem.sequences()[at.sequence];
        Head::new(
            self.problem,
            &self.inputs.inputs,
            at.sequence,
            self.index(at, n),
            self.scoring,
            0,
            sequence.k_start,
        )
    }

    /// dO of that head.
    pub(super) fn dout(&self, at: KvHead, n: usize) -> Plane<T> {
        let sequence = &self.problem.sequences()[at.sequence];
        rows_of(
            &self.inputs.dout,
            sequence.q_batch,
            self.index(at, n),
            sequence.q_start,
        )
    }

    /// Before the steps of an item, on its thread.
    ///
    /// # Safety
    /// The processor has the kernels' instructions.
    pub(super) unsafe fn begin(&self) {
        if let Some(pairs) = &self.kernels.pairs {
            // SAFETY: the caller's promise.
            unsafe { (pairs.begin)() }
        }
    }

    /// After them.
    ///
    /// # Safety
    /// As [`Self::begin`], which was called.
    pub(super) unsafe fn end(&self) {
        if let Some(pairs) = &self.kernels.pairs {
            // SAFETY: the caller's promise.
            unsafe { (pairs.end)() }
        }
    }

    /// Number of that head.
    pub(super) fn index(&self, at: KvHead, n: usize) -> usize {
        at.kv_head * self.problem.dims().group() + n
    }
}
