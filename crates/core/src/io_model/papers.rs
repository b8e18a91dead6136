//! The papers' leading terms.

use super::{Count, Io, times};
use crate::algorithm::Algorithm;
use crate::observe::Tensor;
use crate::problem::Problem;
use crate::schedule::BlockSizes;

/// Traffic as the papers count it: no statistics, nothing hidden, every input read once where a
/// schedule holds it.
///
/// * standard, Θ(Nd + N²): q, k, v and O once, S and P written and read (Dao et al. 2022, algorithm 0).
/// * FA1 ≈ 2Nd + T_c·Nd + 2T_c·Nd: k and v once, q once and O in and out for each block of keys
///   (Dao et al. 2022, theorem 2).
/// * FA2 ≈ Nd + 2T_r·Nd + Nd: q once, k and v once for each block of rows, O once (Dao 2023, section 3.1).
///
/// Elements are given the bytes that the schedules give them, so that the difference to [`Io::of`] is
/// one of counting alone.
pub fn paper_terms(problem: &Problem, algorithm: Algorithm, sizes: BlockSizes) -> Io {
    sum(problem, sizes, |sizes, of| match algorithm.resolve() {
        Algorithm::Standard => vec![
            (Tensor::Q, sizes.element, of.q, 0),
            (Tensor::K, sizes.element, of.k, 0),
            (Tensor::V, sizes.element, of.v, 0),
            (Tensor::S, sizes.accumulator, of.scores, of.scores),
            (Tensor::P, sizes.accumulator, of.scores, of.scores),
            (Tensor::Out, sizes.element, 0, of.o),
        ],
        Algorithm::Fa1 => vec![
            (Tensor::Q, sizes.element, times(&[of.t_c, of.q]), 0),
            (Tensor::K, sizes.element, of.k, 0),
            (Tensor::V, sizes.element, of.v, 0),
            (
                Tensor::O,
                sizes.accumulator,
                times(&[of.t_c, of.o]),
                times(&[of.t_c, of.o]),
            ),
        ],
        _ => vec![
            (Tensor::Q, sizes.element, of.q, 0),
            (Tensor::K, sizes.element, times(&[of.t_r, of.k]), 0),
            (Tensor::V, sizes.element, times(&[of.t_r, of.v]), 0),
            (Tensor::Out, sizes.element, 0, of.o),
        ],
    })
}

/// Traffic of the backward pass as the papers count it, in the manner of [`paper_terms`].
///
/// * standard, Θ(Nd + N²): P, dP and dS written and read as each product needs them, P being there
///   already: 7N² (Dao et al. 2022, algorithm 3); q twice, k, v and dout, dq, dk and dv once each.
/// * FA1 ≈ 4Nd + 5T_c·Nd: k, v, dk and dv once; q, out, dout and dQ in and dQ out for each block of
///   keys (Dao et al. 2022, algorithm 4).
/// * FA2 ≈ 6Nd + 4T_c·Nd: k, v, dk and dv once, out and dout once for Δ; q, dout and dQ in and dQ out
///   for each block of keys (Dao 2023, algorithm 2, less the O that its line 8 lists and no later line
///   uses).
pub fn backward_paper_terms(problem: &Problem, algorithm: Algorithm, sizes: BlockSizes) -> Io {
    sum(problem, sizes, |sizes, of| {
        let (element, accumulator) = (sizes.element, sizes.accumulator);
        let often = |x: u128| times(&[of.t_c, x]);
        let mut lines = vec![
            (Tensor::K, element, of.kv.0, 0),
            (Tensor::V, element, of.kv.1, 0),
            (Tensor::DK, element, 0, of.kv.0),
            (Tensor::DV, element, 0, of.kv.1),
        ];
        match algorithm.resolve() {
            Algorithm::Standard => lines.extend([
                (Tensor::Q, element, of.q, 0),
                (Tensor::DOut, element, times(&[2, of.o]), 0),
                (Tensor::P, accumulator, times(&[2, of.scores]), 0),
                (Tensor::DP, accumulator, of.scores, of.scores),
                (Tensor::DS, accumulator, times(&[2, of.scores]), of.scores),
                (Tensor::DQ, element, 0, of.q),
            ]),
            Algorithm::Fa1 => lines.extend([
                (Tensor::Q, element, often(of.q), 0),
                (Tensor::Out, element, often(of.o), 0),
                (Tensor::DOut, element, often(of.o), 0),
                (Tensor::DQSum, accumulator, often(of.q), often(of.q)),
            ]),
            _ => lines.extend([
                (Tensor::Q, element, often(of.q), 0),
                (Tensor::Out, element, of.o, 0),
                (Tensor::DOut, element, often(of.o).saturating_add(of.o), 0),
                (Tensor::DQSum, accumulator, often(of.q), often(of.q)),
            ]),
        }
        lines
    })
}

/// Bytes of an element.
struct Sizes {
    element: usize,
    accumulator: usize,
}

/// Elements of the tensors of one sequence, every query head counted.
struct Of {
    t_r: u128,
    t_c: u128,
    q: u128,
    /// k and v as each query head reads them.
    k: u128,
    v: u128,
    /// k and v as they are.
    kv: (u128, u128),
    o: u128,
    scores: u128,
}

type Line = (Tensor, usize, u128, u128);

fn sum(problem: &Problem, blocks: BlockSizes, lines: impl Fn(&Sizes, &Of) -> Vec<Line>) -> Io {
    let dims = problem.dims();
    let (d, dv) = (dims.head_dim as u128, dims.head_dim_v as u128);
    let (heads, kv_heads) = (dims.num_heads as u128, dims.num_kv_heads as u128);
    let sizes = Sizes {
        element: problem.dtype().size(),
        accumulator: problem.dtype().accumulator().size(),
    };
    let mut io = Io::default();
    for sequence in problem.sequences() {
        let (n, keys) = (sequence.seqlen_q as u128, sequence.seqlen_k as u128);
        let of = Of {
            t_r: n.div_ceil(blocks.rows() as u128),
            t_c: keys.div_ceil(blocks.keys() as u128),
            q: times(&[heads, n, d]),
            k: times(&[heads, keys, d]),
            v: times(&[heads, keys, dv]),
            kv: (times(&[kv_heads, keys, d]), times(&[kv_heads, keys, dv])),
            o: times(&[heads, n, dv]),
            scores: times(&[heads, n, keys]),
        };
        for (tensor, element_bytes, loaded, stored) in lines(&sizes, &of) {
            io.add(Count {
                tensor,
                element_bytes,
                loaded,
                stored,
            });
        }
    }
    io
}

/// N²d²/M elements, summed over heads: what tiled exact attention moves up to a constant factor, and what
/// no exact algorithm undercuts for every M between d and Nd (Dao et al. 2022, theorem 2 and
/// proposition 3). `fast_elements` is M.
pub fn io_lower_bound(problem: &Problem, fast_elements: usize) -> f64 {
    let dims = problem.dims();
    let pairs: f64 = problem
        .sequences()
        .iter()
        .map(|sequence| sequence.seqlen_q as f64 * sequence.seqlen_k as f64)
        .sum();
    let (d, dv) = (dims.head_dim as f64, dims.head_dim_v as f64);
    dims.num_heads as f64 * pairs * d * dv / fast_elements.max(1) as f64
}
