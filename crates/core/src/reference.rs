//! The naive definition of attention, in f64: what every other result is judged by.
//!
//! One row at a time, key by key, straight from the formulas in [`Options`](crate::Options): it
//! shares nothing with the schedules and not even the mask module with them. Sums are compensated
//! (double-double: Knuth's two-sum, and Dekker's exact product where f64 inputs need it), so that
//! what remains is the rounding of single exponentials, and f64 results can be judged too.

mod gradients;

use crate::dtype::{DType, Element};
use crate::inputs::Inputs;
use crate::options::Alignment;
use crate::problem::{Problem, Sequence};
use crate::tolerance::{largest_finite, score_error, weight_error};
use crate::view::TensorView;

pub use gradients::{HeadGradients, gradients};
pub(crate) use gradients::{RowTerms, Term, head_gradients, heads_of};

/// Attention by definition.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[batch, num_heads, seqlen_q, head_dim_v]`, row-major.
    pub out: Vec<f64>,
    /// `[batch, num_heads, seqlen_q]`, natural log, sinks included.
    pub lse: Vec<f64>,
}

/// What [`row`] learned of a row besides its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowFacts {
    /// ln Z; −∞ if nothing is live, NaN if a live score is NaN or +∞.
    pub lse: f64,
    /// Largest Σ_d |q_d k_d softmax_scale| + |bias| + |ALiBi| over live keys: rounding errors of
    /// scores are proportional to it. A key whose weight P is below the mean 1/n counts n·P times
    /// as much, with P as large as such an error could make it.
    pub abs_scores: f64,
    /// What roundings in the accumulator may change in out: the largest of
    /// min(2, u_acc · ([`C1`](crate::tolerance::C1) + [`C2`](crate::tolerance::C2) · the key's own magnitude as above)) ·
    /// max(|v|, |out|) over live keys, each counted min(1, n·P) times, likewise. Errors of weights
    /// move out by Σ P ε (v − out), which is at most a small multiple of this.
    pub out_error: f64,
    /// Number of live keys.
    pub live: usize,
}

/// Every row by [`row`].
///
/// `problem` must be the one that `inputs` pose ([`Problem::new`]).
pub fn forward<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>) -> Reference {
    let dims = problem.dims();
    let [batch, heads, seqlen_q] = dims.lse_shape();
    let width = dims.head_dim_v;
    let rows = batch * heads * seqlen_q;
    let mut out = vec![0.0; rows * width];
    let mut lse = Vec::with_capacity(rows);
    for index in 0..rows {
        let (b, h, i) = (
            index / seqlen_q / heads,
            index / seqlen_q % heads,
            index % seqlen_q,
        );
        let facts = row(problem, inputs, b, h, i, &mut out[index * width..][..width]);
        lse.push(facts.lse);
    }
    Reference { out, lse }
}

/// One row of out (`[head_dim_v]`, overwritten) and its facts; `i` counts along the seqlen axis of q.
///
/// Rows stand alone, so callers may take them in parallel, or only some of them. A row that belongs
/// to no sequence, or has nothing live, gives 0 and −∞ (the sink, if there is one and the row
/// belongs to a sequence).
///
/// # Panics
/// If the row is outside the problem, `out` is not `[head_dim_v]`, or `problem` is not the one that
/// `inputs` pose.
pub fn row<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    b: usize,
    h: usize,
    i: usize,
    out: &mut [f64],
) -> RowFacts {
    assert_eq!(out.len(), problem.dims().head_dim_v, "out is one row");
    out.fill(0.0);
    let mut facts = RowFacts {
        lse: f64::NEG_INFINITY,
        abs_scores: 0.0,
        out_error: 0.0,
        live: 0,
    };
    let Some(row) = Row::new(problem, inputs, b, h, i) else {
        return facts;
    };
    let sink = row.sink().unwrap_or(f64::NEG_INFINITY);
    let q: Vec<f64> = inputs.q.row(b, h, i).map(Element::to_f64).collect();
    let mut scratch = Vec::new();
    let mut keys = Vec::new();
    let mut m = Dd::from(sink);
    let mut poisoned = false;
    for j in row.candidates().filter(|&j| row.visible(j)) {
        let (score, magnitude) = row.score(j, &q, &mut scratch);
        if score.hi == f64::NEG_INFINITY {
            continue;
        }
        poisoned |= score.hi.is_nan() || score.hi == f64::INFINITY;
        if (score.hi, score.lo) > (m.hi, m.lo) {
            m = score;
        }
        keys.push(LiveKey {
            j,
            score,
            magnitude,
            abs_v: 0.0,
        });
    }
    facts.live = keys.len();
    if poisoned {
        out.fill(f64::NAN);
        facts.lse = f64::NAN;
        return facts;
    }
    if m.hi == f64::NEG_INFINITY {
        return facts;
    }
    let mut z = Dd::from(0.0);
    z.add(m.exp_of_difference(Dd::from(sink)), 0.0);
    let mut low = vec![0.0; out.len()];
    let mut values = Vec::new();
    for key in &mut keys {
        let p = m.exp_of_difference(key.score);
        z.add(p, 0.0);
        let Some(factor) = row.kept(key.j) else {
            continue;
        };
        values.clear();
        values.extend(
            row.v(key.j, &mut scratch)
                .iter()
                .map(|v| v.to_acc().to_f64() * factor),
        );
        key.abs_v = largest_finite(values.iter().copied());
        for ((hi, lo), &v) in out.iter_mut().zip(&mut low).zip(&values) {
            // The weight already carries the rounding of one exponential: an exact product would
            // add nothing.
            let sum = Dd::sum(*hi, p * v);
            *hi = sum.hi;
            *lo += sum.lo;
        }
    }
    let z = z.value();
    for (hi, lo) in out.iter_mut().zip(low) {
        *hi = Dd { hi: *hi, lo }.value() / z;
    }
    facts.lse = m.hi + (m.lo + z.ln());
    let log_n = (keys.len() as f64).ln();
    let max_abs_out = largest_finite(out.iter().copied());
    for key in &keys {
        let error = score_error(T::DTYPE, key.magnitude);
        let log_share = log_n + (key.score.hi - facts.lse);
        let share = (log_share + error).min(0.0).exp();
        let value = share * key.abs_v.max(max_abs_out);
        facts.abs_scores = facts.abs_scores.max(key.magnitude * share);
        facts.out_error = facts
            .out_error
            .max(weight_error(T::DTYPE, key.magnitude).min(2.0) * value);
    }
    facts
}

/// What [`row`] remembers of a live key.
struct LiveKey {
    j: usize,
    score: Dd,
    /// The sum of the magnitudes that the score was made of.
    magnitude: f64,
    /// Largest finite |v|.
    abs_v: f64,
}

/// One row of q with all that decides what it sees.
#[derive(Clone, Copy)]
pub(crate) struct Row<'p, 'a, T> {
    problem: &'p Problem,
    inputs: &'p Inputs<'a, T>,
    sequence: Sequence,
    /// Position of the sequence in the problem's.
    number: usize,
    b: usize,
    h: usize,
    /// Row on the seqlen axis of q.
    i: usize,
    /// i + off within the sequence: the key at which the query stands.
    at: i128,
}

impl<'p, 'a, T: Element> Row<'p, 'a, T> {
    /// `None` if the row belongs to no sequence.
    pub(crate) fn new(
        problem: &'p Problem,
        inputs: &'p Inputs<'a, T>,
        b: usize,
        h: usize,
        i: usize,
    ) -> Option<Self> {
        let (number, &sequence) =
            problem.sequences().iter().enumerate().find(|(_, s)| {
                s.q_batch == b && (s.q_start..s.q_start + s.seqlen_q).contains(&i)
            })?;
        let off = match problem.options().get_alignment() {
            Alignment::BottomRight => sequence.seqlen_k as i128 - sequence.seqlen_q as i128,
            Alignment::TopLeft => 0,
        };
        Some(Row {
            problem,
            inputs,
            sequence,
            number,
            b,
            h,
            i,
            at: (i - sequence.q_start) as i128 + off,
        })
    }

    pub(crate) fn sink(&self) -> Option<f64> {
        Some(self.problem.options().get_sinks()?[self.h].to_f64())
    }

    /// Keys of the sequence outside which causality and window hide everything: only to skip them
    /// cheaply, each key inside is still tested by [`visible`](Self::visible).
    pub(crate) fn candidates(&self) -> std::ops::Range<usize> {
        let options = self.problem.options();
        let n = self.sequence.seqlen_k as i128;
        let mut low = 0;
        let mut high = n;
        if let Some(left) = options.get_window_left() {
            low = (self.at - left as i128).clamp(0, n);
        }
        if let Some(right) = options.get_window_right() {
            high = (self.at + right as i128 + 1).clamp(0, n);
        }
        if options.is_causal() {
            high = high.min(self.at + 1).clamp(0, n);
        }
        low as usize..high as usize
    }

    /// Whether key `j` of the sequence is visible by position, length and mask.
    pub(crate) fn visible(&self, j: usize) -> bool {
        let options = self.problem.options();
        let key = j as i128;
        if j >= self.sequence.seqlen_k {
            return false;
        }
        if options.is_causal() && key > self.at {
            return false;
        }
        if options
            .get_window_left()
            .is_some_and(|left| key < self.at - left as i128)
        {
            return false;
        }
        if options
            .get_window_right()
            .is_some_and(|right| key > self.at + right as i128)
        {
            return false;
        }
        self.inputs
            .mask
            .as_ref()
            .is_none_or(|mask| self.broadcast(mask, j) != 0)
    }

    /// The bias of key `j`.
    pub(crate) fn bias(&self, j: usize) -> Option<T> {
        self.inputs
            .bias
            .as_ref()
            .map(|bias| self.broadcast(bias, j))
    }

    /// (slope, |i + off − j|).
    pub(crate) fn alibi(&self, j: usize) -> Option<(f32, f64)> {
        let slopes = self.problem.options().get_alibi_slopes()?;
        Some((slopes[self.h], (self.at - j as i128).unsigned_abs() as f64))
    }

    /// What dropout multiplies the weight of key `j` by; `None` if it drops the key.
    pub(crate) fn kept(&self, j: usize) -> Option<f64> {
        let Some(dropout) = self.problem.options().get_dropout() else {
            return Some(1.0);
        };
        let heads = self.problem.dims().num_heads;
        let kept = match (
            dropout.philox(self.number, self.h, heads),
            &self.inputs.keep_mask,
        ) {
            (Some(philox), _) => philox.keeps(self.i - self.sequence.q_start, j),
            (None, Some(mask)) => self.broadcast(mask, j) != 0,
            (None, None) => true,
        };
        kept.then(|| dropout.scale())
    }

    fn broadcast<U: Copy>(&self, view: &TensorView<'_, U>, j: usize) -> U {
        view.at_broadcast([self.b, self.h, self.i, self.sequence.k_start + j])
    }

    /// Row `j` of k.
    pub(crate) fn k<'s>(&self, j: usize, scratch: &'s mut Vec<T>) -> &'s [T]
    where
        'a: 's,
    {
        self.kv_row(&self.inputs.k, j, scratch)
    }

    /// Row `j` of v.
    pub(crate) fn v<'s>(&self, j: usize, scratch: &'s mut Vec<T>) -> &'s [T]
    where
        'a: 's,
    {
        self.kv_row(&self.inputs.v, j, scratch)
    }

    fn kv_row<'s>(&self, view: &TensorView<'a, T>, j: usize, scratch: &'s mut Vec<T>) -> &'s [T]
    where
        'a: 's,
    {
        let head = self.h / self.problem.dims().group();
        let (batch, position) = match &self.inputs.block_table {
            Some(table) => {
                let page_size = view.shape()[2];
                let page = table.pages[self.sequence.k_batch * table.width + j / page_size];
                (page as usize, j % page_size)
            }
            None => (self.sequence.k_batch, self.sequence.k_start + j),
        };
        if let Some(row) = view.contiguous_row(batch, head, position) {
            return row;
        }
        scratch.clear();
        scratch.extend(view.row(batch, head, position));
        scratch
    }

    /// How much the score of key `j` changes with its scaled product: 1, or 1 − tanh² under a softcap.
    fn slope(&self, j: usize, q: &[f64], scratch: &mut Vec<T>) -> f64 {
        let Some(cap) = self.problem.options().get_softcap() else {
            return 1.0;
        };
        let (product, _) = dot(q, self.k(j, scratch));
        let tanh = (product.hi * self.problem.softmax_scale() / cap).tanh();
        1.0 - tanh * tanh
    }

    /// The final score of key `j`, and the sum of the magnitudes it was made of.
    fn score(&self, j: usize, q: &[f64], scratch: &mut Vec<T>) -> (Dd, f64) {
        let scale = self.problem.softmax_scale();
        let (dot, dot_abs) = dot(q, self.k(j, scratch));
        let mut score = dot.scaled(scale);
        let mut magnitude = dot_abs * scale.abs();
        if let Some(cap) = self.problem.options().get_softcap() {
            let tanh = (score.hi / cap).tanh();
            // First order in the low part: d/ds cap·tanh(s/cap) = 1 − tanh².
            score = Dd {
                hi: cap * tanh,
                lo: score.lo * (1.0 - tanh * tanh),
            };
        }
        if let Some(bias) = self.bias(j) {
            let bias = bias.to_f64();
            score.add(bias, 0.0);
            magnitude += bias.abs();
        }
        if let Some((slope, distance)) = self.alibi(j) {
            let (product, error) = two_prod(-slope.to_f64(), distance);
            score.add(product, error);
            magnitude += product.abs();
        }
        (score.cleaned(), magnitude)
    }
}

/// An unevaluated sum hi + lo. If hi is not finite it stands alone, and lo means nothing.
#[derive(Clone, Copy, Debug)]
struct Dd {
    hi: f64,
    lo: f64,
}

impl From<f64> for Dd {
    fn from(hi: f64) -> Self {
        Dd { hi, lo: 0.0 }
    }
}

impl Dd {
    /// a + b exactly (Knuth's two-sum).
    #[inline]
    fn sum(a: f64, b: f64) -> Dd {
        let hi = a + b;
        let b_part = hi - a;
        let lo = (a - (hi - b_part)) + (b - b_part);
        Dd { hi, lo }
    }

    #[inline]
    fn add(&mut self, x: f64, error: f64) {
        let sum = Dd::sum(self.hi, x);
        self.hi = sum.hi;
        self.lo += sum.lo + error;
    }

    fn scaled(self, factor: f64) -> Dd {
        let (hi, error) = two_prod(self.hi, factor);
        Dd {
            hi,
            lo: self.lo * factor + error,
        }
    }

    /// Normalised, and with no low part where the high one is not finite.
    fn cleaned(self) -> Dd {
        if self.hi.is_finite() && self.lo.is_finite() {
            Dd::sum(self.hi, self.lo)
        } else {
            Dd::from(self.hi)
        }
    }

    /// e^(x − self), for an x that is not above self.
    fn exp_of_difference(self, x: Dd) -> f64 {
        if x.hi == f64::NEG_INFINITY {
            return 0.0;
        }
        let mut difference = Dd::sum(x.hi, -self.hi);
        difference.lo += x.lo - self.lo;
        // Normalised: what is left below half a unit of hi is so small that e^lo = 1 + lo.
        let Dd { hi, lo } = difference.cleaned();
        hi.exp() * (1.0 + lo)
    }

    fn value(self) -> f64 {
        self.cleaned().hi
    }
}

/// (a·b rounded, its rounding error), exactly, by Dekker's splitting: no fused multiply-add is
/// needed. Where splitting would overflow, the error is left out.
#[inline]
fn two_prod(a: f64, b: f64) -> (f64, f64) {
    const SPLITTER: f64 = 134_217_729.0; // 2^27 + 1
    const LIMIT: f64 = 1e290;
    fn split(x: f64) -> (f64, f64) {
        let c = SPLITTER * x;
        let hi = c - (c - x);
        (hi, x - hi)
    }
    let product = a * b;
    // Written so that NaN takes this way too.
    if !(a.abs() < LIMIT && b.abs() < LIMIT && product.abs() < LIMIT) {
        return (product, 0.0);
    }
    let ((a_hi, a_lo), (b_hi, b_lo)) = (split(a), split(b));
    let error = ((a_hi * b_hi - product) + a_hi * b_lo + a_lo * b_hi) + a_lo * b_lo;
    (product, error)
}

/// Σ q_d k_d, and Σ |q_d k_d|.
fn dot<T: Element>(q: &[f64], k: &[T]) -> (Dd, f64) {
    // Independent lanes, so that the compiler can use vector registers.
    const LANES: usize = 4;
    let mut hi = [0.0; LANES];
    let mut lo = [0.0; LANES];
    let mut magnitude = [0.0; LANES];
    let mut fold = |q: &[f64; LANES], k: &[f64; LANES]| {
        for lane in 0..LANES {
            // Products of two f32 (24 bits each) or narrower numbers are exact in f64.
            let (product, error) = if T::DTYPE == DType::F64 {
                two_prod(q[lane], k[lane])
            } else {
                (q[lane] * k[lane], 0.0)
            };
            let sum = Dd::sum(hi[lane], product);
            hi[lane] = sum.hi;
            lo[lane] += sum.lo + error;
            magnitude[lane] += product.abs();
        }
    };
    let wide = |k: T| k.to_acc().to_f64();
    let ((q, q_rest), (k, k_rest)) = (q.as_chunks(), k.as_chunks::<LANES>());
    for (q, k) in q.iter().zip(k) {
        fold(q, &k.map(wide));
    }
    // Zeros change no sum.
    let (mut q, mut k) = ([0.0; LANES], [0.0; LANES]);
    for lane in 0..q_rest.len() {
        (q[lane], k[lane]) = (q_rest[lane], wide(k_rest[lane]));
    }
    fold(&q, &k);
    let mut total = Dd::from(0.0);
    for lane in 0..LANES {
        total.add(hi[lane], lo[lane]);
    }
    (total.cleaned(), magnitude.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn products_and_sums_are_exact() {
        let (a, b) = (1.0 + 2f64.powi(-40), 1.0 - 2f64.powi(-39));
        let (product, error) = two_prod(a, b);
        // (1 + x)(1 − 2x) = 1 − x − 2x² with x = 2^−40.
        assert_eq!(product, 1.0 - 2f64.powi(-40));
        assert_eq!(error, -(2f64.powi(-79)));
        let mut sum = Dd::from(1e16);
        for _ in 0..8 {
            sum.add(0.125, 0.0);
        }
        sum.add(-1e16, 0.0);
        assert_eq!(sum.value(), 1.0);
        let (dot, magnitude) = dot(&[1e200, 1.0, -1e200], &[1e100, 3.0, 1e100]);
        assert_eq!((dot.value(), magnitude), (3.0, 2e300));
    }

    #[test]
    fn infinities_come_out_as_ieee_says() {
        assert_eq!(
            dot(&[f64::INFINITY, 1.0], &[1.0f64, 1.0]).0.hi,
            f64::INFINITY
        );
        assert!(
            dot(&[f64::INFINITY, f64::INFINITY], &[1.0f64, -1.0])
                .0
                .hi
                .is_nan()
        );
        assert!(dot(&[f64::NAN; 9], &[1.0f32; 9]).0.hi.is_nan());
    }

    #[test]
    fn skipped_keys_are_those_that_are_not_visible() {
        let data = [0f32; 16];
        for (sq, sk) in [(5, 9), (9, 5), (4, 4), (3, 0)] {
            for code in 0..36 {
                let options = Options::new()
                    .causal(code % 2 == 1)
                    .alignment(if code % 4 > 1 {
                        Alignment::TopLeft
                    } else {
                        Alignment::BottomRight
                    })
                    .window_left([None, Some(0), Some(2)][code / 4 % 3])
                    .window_right([None, Some(0), Some(3)][code / 12 % 3]);
                let inputs = Inputs::new(
                    TensorView::bhsd(&data, [1, 1, sq, 1]).unwrap(),
                    TensorView::bhsd(&data, [1, 1, sk, 1]).unwrap(),
                    TensorView::bhsd(&data, [1, 1, sk, 1]).unwrap(),
                );
                let problem = Problem::new(&inputs, &options).unwrap();
                for i in 0..sq {
                    let row = Row::new(&problem, &inputs, 0, 0, i).unwrap();
                    for j in (0..sk).filter(|j| !row.candidates().contains(j)) {
                        assert!(!row.visible(j), "{options:?} {i} {j}");
                    }
                }
            }
        }
    }
}
