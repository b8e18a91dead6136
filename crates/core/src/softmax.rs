//! Softmax of one row of scores, three ways: in three passes, online one element at a time, and
//! online block by block (Milakov and Gimelshein 2018, algorithms 2 and 3).
//!
//! A score of −∞ has weight 0; a row of nothing else has m = −∞, ℓ = 0 and all weights 0. A score
//! of NaN or +∞ makes every weight NaN.

use std::ops::Range;

use crate::dtype::{Element, Float};

/// The weights of a row, with the statistics they were made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Softmax<F> {
    /// Largest score.
    pub m: F,
    /// Σ e^(score − m).
    pub l: F,
    /// e^(score − m) / ℓ.
    pub weights: Vec<F>,
}

/// The running state after some of the scores.
#[derive(Clone, Debug, PartialEq)]
pub struct Step<F> {
    /// The scores that were just folded in.
    pub scores: Range<usize>,
    /// Largest score so far.
    pub m: F,
    /// Denominator so far, relative to m.
    pub l: F,
    /// e^(m before − m): what the denominator before was multiplied by. 0 in the first step.
    pub correction: F,
    /// Σ e^(score − m) over the scores folded in: what was then added to the denominator.
    pub sum: F,
}

/// The larger one; NaN if either is.
#[inline]
pub(crate) fn max_or_nan<F: Float>(a: F, b: F) -> F {
    if a > b || a.is_nan() { a } else { b }
}

/// What scores are taken relative to in an exponent: m, or 0 where m is −∞, since −∞ − (−∞) is no
/// number. The substitute is for exponents only: m itself must stay −∞, or it would outweigh scores
/// that are yet to come.
#[inline]
pub(crate) fn exponent_base<F: Float>(m: F) -> F {
    if m == F::neg_infinity() { F::zero() } else { m }
}

/// Safe softmax: a pass for m, a pass for ℓ, a pass for the weights.
pub fn safe<F: Float>(scores: &[F]) -> Softmax<F> {
    let m = scores
        .iter()
        .fold(F::neg_infinity(), |m, &score| max_or_nan(m, score));
    let base = exponent_base(m);
    let l = scores.iter().map(|&score| (score - base).exp()).sum();
    weigh(scores, m, l)
}

/// Online softmax, one element at a time: m and ℓ in one pass, a second pass for the weights.
/// `observe` sees the state after each element.
pub fn online<F: Float>(scores: &[F], observe: impl FnMut(&Step<F>)) -> Softmax<F> {
    online_blocks(scores, 1, observe)
}

/// Online softmax, `block` elements at a time (0 is taken as 1); the last block may be shorter.
/// `observe` sees the state after each block.
///
/// ```
/// let scores = [1.0f64, 3.0, 2.0];
/// let mut corrections = Vec::new();
/// let online = tilewise_core::softmax::online_blocks(&scores, 1, |step| corrections.push(step.correction));
/// assert_eq!(corrections, [0.0, (-2f64).exp(), 1.0]);
/// assert!((online.l - tilewise_core::softmax::safe(&scores).l).abs() < 1e-15);
/// ```
pub fn online_blocks<F: Float>(
    scores: &[F],
    block: usize,
    mut observe: impl FnMut(&Step<F>),
) -> Softmax<F> {
    let mut m = F::neg_infinity();
    let mut l = <F as Element>::from_f64(0.0);
    let mut first = 0;
    for part in scores.chunks(block.max(1)) {
        let m_new = part.iter().fold(m, |m, &score| max_or_nan(m, score));
        let base = exponent_base(m_new);
        let correction = (m - base).exp();
        let sum: F = part.iter().map(|&score| (score - base).exp()).sum();
        l = l * correction + sum;
        m = m_new;
        let end = first + part.len();
        observe(&Step {
            scores: first..end,
            m,
            l,
            correction,
            sum,
        });
        first = end;
    }
    weigh(scores, m, l)
}

fn weigh<F: Float>(scores: &[F], m: F, l: F) -> Softmax<F> {
    let weights = if m == F::neg_infinity() {
        vec![F::zero(); scores.len()]
    } else {
        scores.iter().map(|&score| (score - m).exp() / l).collect()
    };
    Softmax { m, l, weights }
}
