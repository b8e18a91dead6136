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
    let dims = problem.dims();
    let (d, dv) = (dims.head_dim as u128, dims.head_dim_v as u128);
    let heads = dims.num_heads as u128;
    let element = problem.dtype().size();
    let accumulator = problem.dtype().accumulator().size();
    let mut io = Io::default();
    for sequence in problem.sequences() {
        let (n, keys) = (sequence.seqlen_q as u128, sequence.seqlen_k as u128);
        let t_r = n.div_ceil(sizes.rows() as u128);
        let t_c = keys.div_ceil(sizes.keys() as u128);
        let (q, k, v, o) = (
            times(&[heads, n, d]),
            times(&[heads, keys, d]),
            times(&[heads, keys, dv]),
            times(&[heads, n, dv]),
        );
        let scores = times(&[heads, n, keys]);
        let lines: &[(Tensor, usize, u128, u128)] = match algorithm.resolve() {
            Algorithm::Standard => &[
                (Tensor::Q, element, q, 0),
                (Tensor::K, element, k, 0),
                (Tensor::V, element, v, 0),
                (Tensor::S, accumulator, scores, scores),
                (Tensor::P, accumulator, scores, scores),
                (Tensor::Out, element, 0, o),
            ],
            Algorithm::Fa1 => &[
                (Tensor::Q, element, times(&[t_c, q]), 0),
                (Tensor::K, element, k, 0),
                (Tensor::V, element, v, 0),
                (Tensor::O, accumulator, times(&[t_c, o]), times(&[t_c, o])),
            ],
            _ => &[
                (Tensor::Q, element, q, 0),
                (Tensor::K, element, times(&[t_r, k]), 0),
                (Tensor::V, element, times(&[t_r, v]), 0),
                (Tensor::Out, element, 0, o),
            ],
        };
        for &(tensor, element_bytes, loaded, stored) in lines {
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
