//! FlashAttention's backward pass (Dao et al. 2022, appendix B.4, algorithm 4).
//!
//! P = exp(S − m)/ℓ from the two statistics of each row. Δ is made from dO and O in every tile, so O
//! is loaded as often as dO.

use super::super::BlockSizes;
use super::super::head::Head;
use super::fa2::tiled;
use super::statistics::RowStatistics;
use crate::algorithm::Algorithm;
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::observe::Observer;
use crate::problem::Problem;

/// The gradients of `problem`, with tiles of `sizes`, from `statistics` of the forward pass; lse is
/// not looked at. Every element is written.
///
/// # Errors
/// As [`fa2::backward`](super::fa2::backward), and [`Error::Shape`] for statistics of another size.
pub fn backward<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    statistics: &RowStatistics<T::Acc>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    gradients: GradientsMut<'_, T>,
) -> Result<()> {
    let [batch, heads, seqlen_q] = problem.dims().lse_shape();
    let rows = batch * heads * seqlen_q;
    if statistics.m.len() != rows || statistics.l.len() != rows {
        return Err(Error::shape(
            "statistics",
            format!("{rows} rows in m and l"),
            format!("{} and {}", statistics.m.len(), statistics.l.len()),
        ));
    }
    let row = |head: &Head<'_, '_, T>, i: usize| {
        let [b, h, start] = head.q_place();
        let n = (b * heads + h) * seqlen_q + start + i;
        (statistics.m[n], statistics.l[n])
    };
    let weight = |(m, l): (T::Acc, T::Acc), s: T::Acc| num_traits::Float::exp(s - m) / l;
    tiled(
        problem,
        inputs,
        sizes,
        observer,
        gradients,
        row,
        weight,
        Algorithm::Fa1,
    )
}
