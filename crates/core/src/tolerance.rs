//! The one judgement of results: how far they are from the reference, and how far they may be.
//!
//! An output may differ from the naive f64 definition by
//!
//! ```text
//! 2 × error of the naive algorithm run in the inputs' dtype
//!   + u · max|out| + smallest subnormal          one rounding of the output
//!   + max (u_acc · (C1 + C2 · Σ|q·k·scale|) · max(|v|, |out|))
//! ```
//!
//! with u and u_acc the unit roundoffs of the dtype and of its accumulator, and the maxima taken
//! over the rows judged. The naive algorithm keeps scores and sums in the accumulator type, rounds P
//! once to the dtype and the output once: the factor 2 is that of FlashAttention's own tests. The
//! last term keeps tiny cases, on which the naive run happens to be exact, from failing every other
//! order of summation. lse may differ by
//!
//! ```text
//! 2 × error of the naive lse + u_f32 · max|lse| + u_acc · (C1 + C2 · max Σ|q·k·scale|)
//! ```
//!
//! In both, Σ|q·k·scale| of a key includes |bias| and ALiBi's |slope · distance|, since the final
//! score is rounded with them in it; and a key whose weight P is below the mean 1/n counts only
//! n·P times (see [`RowFacts`](crate::RowFacts)). Without that one huge value or score of no weight
//! would let everything pass. For the same reason u_acc · (C1 + C2 · …) is at most 2 for out: an
//! average of values cannot be farther off than they are apart.
//!
//! What [`C1`] and [`C2`] stand for is said there.
//!
//! ```
//! use tilewise_core::{Inputs, Judge, Options, Problem, RowSample, TensorView};
//! let q = [1.0f32, 2.0];
//! let k = [0.0f32; 4];
//! let v = [1.0f32, 3.0, 5.0, 7.0];
//! let inputs = Inputs::new(
//!     TensorView::bhsd(&q, [1, 1, 2, 1])?,
//!     TensorView::bhsd(&k, [1, 1, 4, 1])?,
//!     TensorView::bhsd(&v, [1, 1, 4, 1])?,
//! );
//! let problem = Problem::new(&inputs, &Options::new())?;
//! let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
//! let good = [4.0f32, 4.0];
//! assert!(judge.compare(&TensorView::bhsd(&good, [1, 1, 2, 1])?, None)?.pass);
//! let bad = [4.0f32, 4.1];
//! assert!(!judge.compare(&TensorView::bhsd(&bad, [1, 1, 2, 1])?, None)?.pass);
//! # Ok::<(), tilewise_core::Error>(())
//! ```

mod gradients;

use std::sync::Arc;

use num_traits::Float as _;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::problem::{Dims, Problem};
use crate::reference::{self, Row};
use crate::view::TensorView;

pub use gradients::{
    CG, GradientComparison, GradientJudge, GradientTolerance, JudgedHead, judge_head,
};

/// Roundings that do not grow with the scores, in unit roundoffs of the accumulator, relative to
/// max|v|.
///
/// An exponential is good to about 2 units and enters numerator and denominator (4); a rescaling
/// by α costs an exponential and a product in each of Õ and ℓ (6 for the one that matters: older
/// ones have been scaled down); the sums over keys, the division and the cast to the output
/// (4). That makes 14; 16 is the power of two above it.
pub const C1: f64 = 16.0;

/// Roundings proportional to the scores, in unit roundoffs of the accumulator.
///
/// A score's error is at most about u·Σ|q·k·scale| for each of: the sum over head_dim (errors of
/// the single additions are of mixed sign and mostly at smaller partial sums), the factor
/// softmax_scale, the difference s − m, and the change to base 2 where 2^x replaces e^x. The
/// four enter numerator and denominator: 8.
pub const C2: f64 = 8.0;

/// The error that a score made of terms of this size may have in the accumulator of `dtype`.
pub(crate) fn score_error(dtype: DType, magnitude: f64) -> f64 {
    dtype.accumulator().unit_roundoff() * (C2 / 2.0) * magnitude
}

/// The relative error that the weight of such a score may have, normalised: that of its exponential
/// and of the denominator.
pub(crate) fn weight_error(dtype: DType, magnitude: f64) -> f64 {
    dtype.accumulator().unit_roundoff() * (C1 + C2 * magnitude)
}

/// Which rows of the output are judged, as positions (b · num_heads + h) · seqlen_q + i.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSample {
    rows: Arc<[usize]>,
    total: usize,
}

impl RowSample {
    /// Every row.
    pub fn all(problem: &Problem) -> Self {
        let total = total_rows(problem);
        RowSample {
            rows: (0..total).collect(),
            total,
        }
    }

    /// At most `count` rows (at least two, the first and the last): one at a pseudo-random place in
    /// each of as many equal stretches, the same ones every time. Every row if there are no more.
    pub fn at_most(problem: &Problem, count: usize) -> Self {
        let total = total_rows(problem);
        let count = count.max(2);
        if total <= count {
            return Self::all(problem);
        }
        let edge = |n: usize| (n as u128 * total as u128 / count as u128) as usize;
        let rows = (0..count)
            .map(|n| match n {
                0 => 0,
                n if n == count - 1 => total - 1,
                // At a random place: equally spaced rows would keep one position in every tile.
                n => edge(n) + (mix(n as u64) % (edge(n + 1) - edge(n)) as u64) as usize,
            })
            .collect();
        RowSample { rows, total }
    }

    /// The positions, in order.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Rows of the problem.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Whether no row is left out.
    pub fn is_complete(&self) -> bool {
        self.rows.len() == self.total
    }
}

fn total_rows(problem: &Problem) -> usize {
    problem.dims().lse_shape().iter().product()
}

/// SplitMix64's output function.
fn mix(n: u64) -> u64 {
    let mut x = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// One row of the reference with what bounds the error of others: made by [`judge_row`].
#[derive(Clone, Debug)]
pub struct JudgedRow {
    row: usize,
    out: Vec<f64>,
    lse: f64,
    /// What the naive run gave where it is not finite.
    naive_not_finite: Vec<(usize, f64)>,
    naive_lse: f64,
    naive_err: f64,
    naive_lse_err: f64,
    abs_scores: f64,
    out_error: f64,
}

/// The reference and the naive run of one row. Rows stand alone: a caller may take them in parallel
/// and hand them to [`Judge::from_rows`].
///
/// # Panics
/// If `row` is not below the product of [`Dims::lse_shape`], or `problem` is not the one that
/// `inputs` pose.
pub fn judge_row<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>, row: usize) -> JudgedRow {
    let dims = problem.dims();
    let [b, h, i] = unravel(dims, row);
    let mut out = vec![0.0; dims.head_dim_v];
    let facts = reference::row(problem, inputs, b, h, i, &mut out);
    let mut judged = JudgedRow {
        row,
        lse: facts.lse,
        naive_not_finite: Vec::new(),
        naive_lse: 0.0,
        naive_err: 0.0,
        naive_lse_err: 0.0,
        abs_scores: facts.abs_scores,
        out_error: facts.out_error,
        out,
    };
    let mut naive = vec![T::default(); dims.head_dim_v];
    judged.naive_lse = naive_row(problem, inputs, [b, h, i], &mut naive).into();
    for (d, (x, &expected)) in naive.into_iter().zip(&judged.out).enumerate() {
        let x = x.to_f64();
        if !x.is_finite() {
            judged.naive_not_finite.push((d, x));
        } else if expected.is_finite() {
            judged.naive_err = judged.naive_err.max((x - expected).abs());
        }
    }
    if judged.naive_lse.is_finite() && judged.lse.is_finite() {
        judged.naive_lse_err = (judged.naive_lse - judged.lse).abs();
    }
    judged
}

fn unravel(dims: &Dims, row: usize) -> [usize; 3] {
    let [_, heads, seqlen_q] = dims.lse_shape();
    [
        row / seqlen_q / heads,
        row / seqlen_q % heads,
        row % seqlen_q,
    ]
}

/// Softmax as it is usually written, in the accumulator type: S in full, P normalised and rounded
/// to the dtype, P v. Fills `out` and gives lse.
fn naive_row<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    [b, h, i]: [usize; 3],
    out: &mut [T],
) -> f32 {
    let acc = <T::Acc as Element>::from_f64;
    out.fill(T::default());
    let Some(row) = Row::new(problem, inputs, b, h, i) else {
        return f32::NEG_INFINITY;
    };
    let q: Vec<T::Acc> = inputs.q.row(b, h, i).map(Element::to_acc).collect();
    let mut scratch = Vec::new();
    let (mut scores, m) = naive_scores(problem, &row, &q);
    if m == T::Acc::neg_infinity() {
        return f32::NEG_INFINITY;
    }
    let mut l = match row.sink() {
        Some(sink) => (acc(sink) - m).exp(),
        None => acc(0.0),
    };
    for (_, s, _) in &mut scores {
        *s = (*s - m).exp();
        l += *s;
    }
    let mut sums = vec![acc(0.0); out.len()];
    for &(j, e, _) in &scores {
        let Some(factor) = row.kept(j) else {
            continue;
        };
        let p = T::from_acc(e / l * acc(factor)).to_acc();
        for (sum, v) in sums.iter_mut().zip(row.v(j, &mut scratch)) {
            *sum += p * v.to_acc();
        }
    }
    for (to, sum) in out.iter_mut().zip(sums) {
        *to = T::from_acc(sum);
    }
    (m + l.ln()).to_f64() as f32
}

/// A live key, its score, and the score's slope under a softcap.
type NaiveScore<A> = (usize, A, A);

/// The live keys of a row with their scores and the slopes of these under a softcap, in the
/// accumulator type; and the largest, the sink counted.
fn naive_scores<T: Element>(
    problem: &Problem,
    row: &Row<'_, '_, T>,
    q: &[T::Acc],
) -> (Vec<NaiveScore<T::Acc>>, T::Acc) {
    let acc = <T::Acc as Element>::from_f64;
    let scale = acc(problem.softmax_scale());
    let cap = problem.options().get_softcap().map(acc);
    let mut scratch = Vec::new();
    let mut scores = Vec::new();
    let mut m = acc(row.sink().unwrap_or(f64::NEG_INFINITY));
    for j in row.candidates().filter(|&j| row.visible(j)) {
        let mut s = dot(q, row.k(j, &mut scratch)) * scale;
        let mut slope = acc(1.0);
        if let Some(cap) = cap {
            let tanh = (s / cap).tanh();
            s = cap * tanh;
            slope -= tanh * tanh;
        }
        if let Some(bias) = row.bias(j) {
            s += bias.to_acc();
        }
        if let Some((slope, distance)) = row.alibi(j) {
            s -= acc(slope.into()) * acc(distance);
        }
        if s != T::Acc::neg_infinity() {
            // NaN must not be lost in a comparison.
            m = if s > m || s.is_nan() { s } else { m };
            scores.push((j, s, slope));
        }
    }
    (scores, m)
}

/// Σ q_d k_d in eight partial sums, as a plain vectorised product adds them up.
fn dot<T: Element>(q: &[T::Acc], k: &[T]) -> T::Acc {
    const LANES: usize = 8;
    let mut sums = [T::Acc::default(); LANES];
    for (q, k) in q.chunks(LANES).zip(k.chunks(LANES)) {
        for ((sum, &q), &k) in sums.iter_mut().zip(q).zip(k) {
            *sum += q * k.to_acc();
        }
    }
    sums.into_iter().sum()
}

/// How far a result may be from the reference, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// For every element of out.
    pub out: f64,
    /// For every element of lse.
    pub lse: f64,
    /// Largest error of the naive algorithm in the inputs' dtype.
    pub naive_err: f64,
    /// The same for its lse.
    pub naive_lse_err: f64,
    /// Share of `out`: one rounding of the output.
    pub rounding: f64,
    /// Share of `out`: the accumulation term.
    pub accumulation: f64,
}

/// The reference of some rows, and the tolerance that follows from them.
#[derive(Clone, Debug)]
pub struct Judge {
    dims: Dims,
    rows: Vec<JudgedRow>,
    tolerance: Tolerance,
}

/// How a result compares with the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Largest |x − reference| in out; +∞ if a value that is no number stands where the reference
    /// has another, or the other way round.
    pub max_abs_err: f64,
    /// Mean of |x − reference| over the elements of out where both are finite.
    pub mean_abs_err: f64,
    /// Largest |x − reference| / |reference| over those elements, leaving out references below a
    /// thousandth of the largest: there terms have cancelled and the ratio says nothing.
    pub max_rel_err: f64,
    /// As `max_abs_err`, of lse; `None` if lse was not given.
    pub lse_max_abs_err: Option<f64>,
    /// How far elements of out may be off.
    pub tolerance: f64,
    /// How far elements of lse may be off.
    pub lse_tolerance: f64,
    /// Elements of out that are not finite although the reference is, and were let pass because the
    /// naive algorithm run in this dtype leaves its range there too: nothing was judged at them.
    pub beyond_range: usize,
    /// Whether everything is within its tolerance, and not all of it beyond the dtype's range.
    pub pass: bool,
    /// Where out is farthest off: `[b, h, i, d]`.
    pub worst: Option<[usize; 4]>,
    /// Where lse is farthest off: `[b, h, i]`.
    pub lse_worst: Option<[usize; 3]>,
    /// Rows compared.
    pub rows: usize,
}

impl Judge {
    /// Judges the rows of `sample`, one after another.
    ///
    /// `problem` must be the one that `inputs` pose.
    pub fn new<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>, sample: &RowSample) -> Judge {
        let rows = sample
            .rows()
            .iter()
            .map(|&row| judge_row(problem, inputs, row))
            .collect();
        Judge::from_rows(problem, rows)
    }

    /// From rows that were made by [`judge_row`] for the same problem, in any order.
    pub fn from_rows(problem: &Problem, rows: Vec<JudgedRow>) -> Judge {
        let tolerance = tolerance(problem.dtype(), &rows);
        Judge {
            dims: *problem.dims(),
            rows,
            tolerance,
        }
    }

    /// How far results may be off.
    pub fn tolerance(&self) -> &Tolerance {
        &self.tolerance
    }

    /// Rows judged.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The reference of the `n`th row judged: its position, out and lse.
    ///
    /// # Panics
    /// If `n` is not below [`rows`](Self::rows).
    pub fn reference_row(&self, n: usize) -> (usize, &[f64], f64) {
        let row = &self.rows[n];
        (row.row, &row.out, row.lse)
    }

    /// Compares the judged rows of a result.
    ///
    /// NaN agrees with NaN, and an infinity with the same infinity. Where the reference does not
    /// fit the dtype, what the dtype makes of it agrees too: the reference rounded, or what the
    /// naive run in that dtype gave. An lse of +∞ agrees with NaN. Anything else that is not a number
    /// disagrees with everything.
    ///
    /// # Errors
    /// [`Error::Shape`] if out or lse do not have the problem's shapes.
    pub fn compare<T: Element>(
        &self,
        out: &TensorView<'_, T>,
        lse: Option<&TensorView<'_, f32>>,
    ) -> Result<Comparison> {
        Error::expect_shape("out", out.shape(), self.dims.out_shape())?;
        if let Some(lse) = lse {
            let [b, h, s] = self.dims.lse_shape();
            Error::expect_shape("lse", lse.shape(), [b, h, s, 1])?;
        }
        let negligible = 1e-3 * self.largest_out();
        let mut outs = Errors::default();
        let mut lses = Errors::default();
        for row in &self.rows {
            let [b, h, i] = unravel(&self.dims, row.row);
            let mut naive = row.naive_not_finite.iter().peekable();
            for (d, x) in out.row(b, h, i).enumerate() {
                let expected = row.out[d];
                let naive = naive.next_if(|&&(at, _)| at == d).map(|&(_, x)| x);
                let agrees = |x: f64| {
                    same(x, expected)
                        || same(x, T::from_f64(expected).to_f64())
                        || naive.is_some_and(|naive| same(x, naive))
                };
                outs.note([b, h, i, d], x.to_f64(), expected, negligible, agrees);
            }
            if let Some(lse) = lse {
                let agrees = |x: f64| {
                    same(x, row.lse)
                        || same(x, (row.lse as f32).into())
                        || (row.lse.is_nan() && x == f64::INFINITY)
                        || (!row.naive_lse.is_finite() && same(x, row.naive_lse))
                };
                let x = lse.at([b, h, i, 0]).to_f64();
                lses.note([b, h, i, 0], x, row.lse, 0.0, agrees);
            }
        }
        Ok(Comparison {
            max_abs_err: outs.max_abs,
            mean_abs_err: outs.mean(),
            max_rel_err: outs.max_rel,
            lse_max_abs_err: lse.map(|_| lses.max_abs),
            tolerance: self.tolerance.out,
            lse_tolerance: self.tolerance.lse,
            beyond_range: outs.beyond_range,
            pass: outs.max_abs <= self.tolerance.out
                && lses.max_abs <= self.tolerance.lse
                && (outs.beyond_range == 0 || outs.count > 0),
            worst: outs.worst,
            lse_worst: lses.worst.map(|[b, h, i, _]| [b, h, i]),
            rows: self.rows.len(),
        })
    }

    fn largest_out(&self) -> f64 {
        largest_finite(self.rows.iter().flat_map(|row| &row.out).copied())
    }
}

/// Equal numbers, the same infinity, or both NaN.
fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

pub(crate) fn largest_finite(values: impl Iterator<Item = f64>) -> f64 {
    values
        .map(f64::abs)
        .filter(|x| x.is_finite())
        .fold(0.0, f64::max)
}

fn smallest_subnormal(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::from_bits(1),
        DType::F32 => 2f64.powi(-149),
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
    }
}

fn tolerance(dtype: DType, rows: &[JudgedRow]) -> Tolerance {
    let max = |f: fn(&JudgedRow) -> f64| largest_finite(rows.iter().map(f));
    let naive_err = max(|row| row.naive_err);
    let naive_lse_err = max(|row| row.naive_lse_err);
    let max_out = largest_finite(rows.iter().flat_map(|row| &row.out).copied());
    let max_lse = max(|row| row.lse);
    let rounding = dtype.unit_roundoff() * max_out + smallest_subnormal(dtype);
    let accumulation = max(|row| row.out_error);
    Tolerance {
        out: 2.0 * naive_err + rounding + accumulation,
        lse: 2.0 * naive_lse_err
            + DType::F32.unit_roundoff() * max_lse
            + weight_error(dtype, max(|row| row.abs_scores)),
        naive_err,
        naive_lse_err,
        rounding,
        accumulation,
    }
}

/// What [`Judge::compare`] keeps of one tensor.
#[derive(Default)]
struct Errors {
    max_abs: f64,
    max_rel: f64,
    sum: f64,
    count: usize,
    beyond_range: usize,
    worst: Option<[usize; 4]>,
}

impl Errors {
    fn note(
        &mut self,
        at: [usize; 4],
        x: f64,
        expected: f64,
        negligible: f64,
        agrees: impl Fn(f64) -> bool,
    ) {
        let err = if x.is_finite() && expected.is_finite() {
            let err = (x - expected).abs();
            self.sum += err;
            self.count += 1;
            if expected.abs() >= negligible && expected != 0.0 {
                self.max_rel = self.max_rel.max(err / expected.abs());
            }
            err
        } else if agrees(x) {
            self.beyond_range += usize::from(expected.is_finite());
            0.0
        } else {
            f64::INFINITY
        };
        if err > self.max_abs || self.worst.is_none() {
            self.max_abs = self.max_abs.max(err);
            self.worst = Some(at);
        }
    }

    fn mean(&self) -> f64 {
        if self.count == 0 {
            0.0
        } else {
            self.sum / self.count as f64
        }
    }
}
