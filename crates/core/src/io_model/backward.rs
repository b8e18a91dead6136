//! What the backward schedules move.
//!
//! Per query head, in the notation of [`io_model`](super); K and V, dK and dV per head of k and v:
//!
//! | | standard | fa1 | fa2 |
//! |---|---|---|---|
//! | q loaded | N·d + T_c·N·d | T_c·N·d | T_c·N·d |
//! | k loaded | 2T_r·M·d, each query head | M·d | M·d |
//! | v loaded | T_r·M·d_v, each query head | M·d_v | M·d_v |
//! | dout loaded | T_c·N·d_v + N·d_v | T_c·N·d_v | T_c·N·d_v + N·d_v |
//! | out loaded | | T_c·N·d_v | N·d_v |
//! | m, ℓ loaded | | T_c·N each | |
//! | lse, Δ loaded | | | T_c·N each |
//! | Δ stored | | | N |
//! | S: stored, loaded | N·M, N·M | | |
//! | P: stored, loaded | N·M, 2N·M | | |
//! | dP: stored, loaded | N·M, N·M | | |
//! | dS: stored, loaded | N·M, 2N·M | | |
//! | dQ: stored, and loaded | | (T_c + 1)·N·d | (T_c + 1)·N·d |
//! | dq stored | N·d | N·d | N·d |
//! | dk, dv stored | M·d, M·d_v | M·d, M·d_v | M·d, M·d_v |
//!
//! What the sinks' gradients take is left out: two numbers a row.

use super::{Count, Io, Modifiers, Tiles, keep_mask, times};
use crate::algorithm::Algorithm;
use crate::observe::Tensor;
use crate::problem::{Problem, Sequence};
use crate::schedule::BlockSizes;

/// What a backward call is given and asked for besides the tensors of every call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Whether a gradient arrives at lse.
    pub dlse: bool,
    /// Whether the gradient of the bias is asked for; then [`Modifiers::bias`] must be its shape.
    pub dbias: bool,
}

/// The sums of one sequence, by head.
struct Sums<'p> {
    problem: &'p Problem,
    modifiers: Modifiers,
    asked: Asked,
    element: usize,
    accumulator: usize,
    n: u128,
    keys: u128,
    d: u128,
    dv: u128,
}

impl Io {
    /// What the backward pass of `algorithm` in tiles of `sizes` moves and computes: what
    /// [`schedule::backward`](crate::schedule::backward) reports, FA1 from statistics that are there.
    pub fn of_backward(
        problem: &Problem,
        algorithm: Algorithm,
        sizes: BlockSizes,
        modifiers: Modifiers,
        asked: Asked,
    ) -> Io {
        let dims = problem.dims();
        let mut io = Io::default();
        for sequence in problem.sequences() {
            let sums = Sums::new(problem, sequence, modifiers, asked);
            match algorithm.resolve() {
                Algorithm::Standard => sums.standard(&mut io, sizes),
                other => sums.tiled(&mut io, other, sequence, sizes),
            }
        }
        if asked.dbias && problem.has_bias() {
            let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
            let mut shape = modifiers.bias.unwrap_or(full);
            if problem.page_size().is_some() && shape[3] != 1 {
                // Pages are gathered first, as many keys as the longest sequence has.
                let used = problem.sequences().iter().map(|sequence| sequence.seqlen_k);
                shape[3] = used.max().unwrap_or(0);
            }
            let all = times(&shape.map(|size| size as u128));
            let accumulator = problem.dtype().accumulator().size();
            // Zeros in the beginning, and the pass that rounds.
            io.moved(Tensor::DBiasSum, accumulator, all, all);
            io.moved(Tensor::DBias, problem.dtype().size(), 0, all);
        }
        io
    }

    fn moved(&mut self, tensor: Tensor, element_bytes: usize, loaded: u128, stored: u128) {
        self.add(Count {
            tensor,
            element_bytes,
            loaded,
            stored,
        });
    }
}

impl<'p> Sums<'p> {
    fn new(problem: &'p Problem, sequence: &Sequence, modifiers: Modifiers, asked: Asked) -> Self {
        let dims = problem.dims();
        Sums {
            problem,
            modifiers,
            asked,
            element: problem.dtype().size(),
            accumulator: problem.dtype().accumulator().size(),
            n: sequence.seqlen_q as u128,
            keys: sequence.seqlen_k as u128,
            d: dims.head_dim as u128,
            dv: dims.head_dim_v as u128,
        }
    }

    /// Adds what every query head moves.
    fn each(&self, io: &mut Io, tensor: Tensor, bytes: usize, loaded: u128, stored: u128) {
        let heads = self.problem.dims().num_heads as u128;
        io.moved(
            tensor,
            bytes,
            times(&[heads, loaded]),
            times(&[heads, stored]),
        );
    }

    /// Adds what is moved once for the query heads that share a head, `times` times.
    fn shared(&self, io: &mut Io, tensor: Tensor, bytes: usize, loaded: u128, stored: u128) {
        let heads = self.problem.dims().num_kv_heads as u128;
        io.moved(
            tensor,
            bytes,
            times(&[heads, loaded]),
            times(&[heads, stored]),
        );
    }

    /// What both kinds of schedule have: bias and mask once a tile, the keep mask as often as asked,
    /// the running sum of dbias, and the results.
    fn common(&self, io: &mut Io, tiles: &Tiles, keeps: u128) {
        let (d, dv, modifiers) = (self.d, self.dv, self.modifiers);
        if self.problem.has_bias() {
            let read = tiles.of(modifiers.bias);
            self.each(io, Tensor::Bias, self.element, read, 0);
            if self.asked.dbias {
                self.each(io, Tensor::DBiasSum, self.accumulator, read, read);
            }
        }
        if self.problem.has_mask() {
            self.each(io, Tensor::Mask, 1, tiles.of(modifiers.mask), 0);
        }
        if keep_mask(self.problem) {
            let read = times(&[keeps, tiles.of(modifiers.keep_mask)]);
            self.each(io, Tensor::KeepMask, 1, read, 0);
        }
        self.each(io, Tensor::DQ, self.element, 0, times(&[self.n, d]));
        self.shared(io, Tensor::DK, self.element, 0, times(&[self.keys, d]));
        self.shared(io, Tensor::DV, self.element, 0, times(&[self.keys, dv]));
    }

    fn standard(&self, io: &mut Io, sizes: BlockSizes) {
        let (n, d, dv) = (self.n, self.d, self.dv);
        let all = Tiles::all(n, self.keys, sizes);
        let (rows, keys) = (all.row_visits, all.key_visits);
        let scores = times(&[n, self.keys]);
        let twice = times(&[2, scores]);
        self.common(io, &all, 2);
        let q = times(&[rows.saturating_add(n), d]);
        let dout = times(&[rows.saturating_add(n), dv]);
        self.each(io, Tensor::Q, self.element, q, 0);
        self.each(io, Tensor::K, self.element, times(&[2, keys, d]), 0);
        self.each(io, Tensor::V, self.element, times(&[keys, dv]), 0);
        self.each(io, Tensor::DOut, self.element, dout, 0);
        self.each(io, Tensor::S, self.accumulator, scores, scores);
        self.each(io, Tensor::P, self.accumulator, twice, scores);
        self.each(io, Tensor::DP, self.accumulator, scores, scores);
        self.each(io, Tensor::DS, self.accumulator, twice, scores);
        if self.problem.options().get_softcap().is_some() {
            self.each(io, Tensor::Slope, self.accumulator, twice, scores);
        }
        if self.asked.dlse {
            self.each(io, Tensor::DLse, size_of::<f32>(), n, 0);
        }
        // Between the heads of a group.
        let between = self.problem.dims().group().saturating_sub(1) as u128;
        for (tensor, width) in [(Tensor::DKSum, d), (Tensor::DVSum, dv)] {
            let sum = times(&[between, self.keys, width]);
            self.shared(io, tensor, self.accumulator, sum, sum);
        }
        self.work(io, &all, |work| {
            (work.divisions, work.delta_terms) = (scores, scores);
        });
    }

    fn tiled(&self, io: &mut Io, algorithm: Algorithm, sequence: &Sequence, sizes: BlockSizes) {
        let (n, d, dv) = (self.n, self.d, self.dv);
        let tiles = Tiles::live(&self.problem.mask_rule(sequence), sizes);
        let visits = tiles.row_visits;
        let f32s = size_of::<f32>();
        self.common(io, &tiles, 1);
        self.each(io, Tensor::Q, self.element, times(&[visits, d]), 0);
        self.shared(io, Tensor::K, self.element, times(&[tiles.keys, d]), 0);
        self.shared(io, Tensor::V, self.element, times(&[tiles.keys, dv]), 0);
        let sums = times(&[visits.saturating_add(n), d]);
        self.each(io, Tensor::DQSum, self.accumulator, sums, sums);
        // Rows for which Δ is made, and for which dO is loaded.
        let (deltas, dout) = match algorithm {
            Algorithm::Fa1 => {
                self.each(io, Tensor::M, self.accumulator, visits, 0);
                self.each(io, Tensor::L, self.accumulator, visits, 0);
                (visits, visits)
            }
            _ => {
                self.each(io, Tensor::Delta, self.accumulator, visits, n);
                self.each(io, Tensor::Lse, f32s, visits, 0);
                (n, visits.saturating_add(n))
            }
        };
        self.each(io, Tensor::DOut, self.element, times(&[dout, dv]), 0);
        self.each(io, Tensor::Out, self.element, times(&[deltas, dv]), 0);
        if self.asked.dlse {
            self.each(io, Tensor::DLse, f32s, deltas, 0);
        }
        let skipped = Tiles::all(n, self.keys, sizes).count - tiles.count;
        self.work(io, &tiles, |work| {
            work.skipped_tiles = skipped;
            work.delta_terms = times(&[deltas, dv]);
            if algorithm == Algorithm::Fa1 {
                work.divisions = tiles.pairs;
            }
        });
    }

    /// The five products of a tile, and what stands between them.
    fn work(&self, io: &mut Io, tiles: &Tiles, rest: impl FnOnce(&mut super::Work)) {
        let mut head = super::Work {
            products: times(&[5, tiles.count]),
            multiply_adds: times(&[tiles.pairs, 3 * self.d + 2 * self.dv]),
            exps: tiles.pairs,
            score_gradients: tiles.pairs,
            ..Default::default()
        };
        rest(&mut head);
        io.work.add(&head, self.problem.dims().num_heads as u128);
    }
}
