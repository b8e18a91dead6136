//! The judgement of gradients.
//!
//! A gradient may differ from the naive f64 definition by
//!
//! ```text
//! 3 × error of the naive backward pass run in the inputs' dtype
//!   + u · max|gradient| + smallest subnormal          one rounding of the gradient
//!   + accumulation term
//! ```
//!
//! The naive pass keeps scores and sums in the accumulator type and rounds P, dP, dS and the gradients
//! to the dtype once each. The accumulation term is the largest value over a gradient's elements of
//! the sum, over the pairs (i, j) that the element is made of, of what each pair may be off by:
//!
//! ```text
//! P:   P · (e^ε − 1), at most 1, with ε = u_acc (C1 + C2 (Σ|q·k·scale| + |L|)) and its mean over the row
//! dP:  u_acc · CG · (Σ|dO·v| + Σ P Σ|dO·v| + |dlse|) + 2 u · Σ P Σ|dO·v| + smallest subnormal · Σ|dO|
//! dS:  error of P · |dP − Δ| + P · error of dP
//! ```
//!
//! The last two parts of dP's are Δ = rowsum(dO ∘ O), which is made from an output that was rounded to
//! the dtype; beside a sink that takes nearly everything it may be below the smallest number there. Under a softcap dS may further be off by what its slope is: the slope changes by less than
//! the error of a score over the cap.

use num_traits::Float as _;

use super::{C1, C2, Errors, largest_finite, naive_scores, same, smallest_subnormal};
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::reference::{HeadGradients, Row, RowTerms, Term, head_gradients, heads_of};
use crate::view::TensorView;

/// Roundings of dP and Δ, in unit roundoffs of the accumulator, relative to the magnitudes of the
/// terms that they are sums of: the sum over head_dim_v with terms of mixed sign, the sum over keys,
/// and the difference of the two.
pub const CG: f64 = 8.0;

/// One KV head of one sequence with what bounds the error of others: made by [`judge_head`].
#[derive(Clone, Debug)]
pub struct JudgedHead {
    sequence: usize,
    kv_head: usize,
    reference: HeadGradients,
    naive: HeadGradients,
    bound: HeadGradients,
}

/// The reference, the naive run and the accumulation terms of one KV head of sequence number
/// `sequence`. Heads stand alone: a caller may take them in parallel and hand them to
/// [`GradientJudge::from_heads`].
///
/// # Panics
/// If there is no such head, or `problem` is not the one that `inputs` pose.
pub fn judge_head<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sequence: usize,
    kv_head: usize,
) -> JudgedHead {
    let mut bound = HeadGradients::of_head(problem, inputs, sequence);
    let mut naive = HeadGradients::of_head(problem, inputs, sequence);
    let reference = head_gradients(problem, inputs, sequence, kv_head, |n, i, row, terms| {
        let place = [sequence, kv_head, n, i];
        bound_row(problem, inputs, place, row, terms, &mut bound);
    });
    naive_head(problem, inputs, [sequence, kv_head], &mut naive);
    JudgedHead {
        sequence,
        kv_head,
        reference,
        naive,
        bound,
    }
}

/// Adds what the pairs of a row may be off by.
fn bound_row<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    [sequence, kv_head, n, i]: [usize; 4],
    row: &Row<'_, '_, T>,
    terms: &RowTerms,
    bound: &mut HeadGradients,
) {
    let dims = problem.dims();
    let (d, dv) = (dims.head_dim, dims.head_dim_v);
    let place = &problem.sequences()[sequence];
    let (u, u_acc) = (
        T::DTYPE.unit_roundoff(),
        T::DTYPE.accumulator().unit_roundoff(),
    );
    let (b, h, at) = (place.q_batch, kv_head * dims.group() + n, place.q_start + i);
    let q = largest_finite(inputs.inputs.q.row(b, h, at).map(Element::to_f64));
    let dout = largest_finite(inputs.dout.row(b, h, at).map(Element::to_f64));
    let lse = if terms.lse.is_finite() {
        terms.lse.abs()
    } else {
        0.0
    };
    let error_of = |term: &Term| u_acc * (C1 + C2 * (term.magnitude + lse));
    let mean: f64 = terms.terms.iter().map(|term| term.p * error_of(term)).sum();
    let arrived: f64 = (inputs.dout.row(b, h, at))
        .map(|x| x.to_f64().abs())
        .filter(|x| x.is_finite())
        .sum();
    let delta_error = u_acc * CG * (terms.delta_abs + terms.dlse.abs())
        + 2.0 * u * terms.delta_abs
        + smallest_subnormal(T::DTYPE) * arrived;
    let scale = problem.softmax_scale().abs();
    let mut scratch = Vec::new();
    for term in &terms.terms {
        let error = error_of(term);
        let p_error = (term.p * (error + mean).min(700.0).exp_m1()).min(1.0);
        let dp_error = u_acc * CG * term.factor * term.dov_abs + delta_error;
        let difference = (term.factor * term.dov - terms.delta).abs();
        let ds_error = p_error * difference + (term.p + p_error) * dp_error;
        let mut dx_error = ds_error * term.slope;
        if let Some(cap) = problem.options().get_softcap() {
            let slope_error = (u_acc * C2 + error / cap).min(1.0);
            dx_error += (term.p * difference + ds_error) * slope_error;
        }
        let j = term.j;
        for x in &mut bound.dv[j * dv..][..dv] {
            *x += p_error * term.factor * dout;
        }
        let k = row.k(j, &mut scratch).iter().map(|k| k.to_acc().to_f64());
        let k = largest_finite(k);
        for x in &mut bound.dq[(n * place.seqlen_q + i) * d..][..d] {
            *x += dx_error * scale * k;
        }
        for x in &mut bound.dk[j * d..][..d] {
            *x += dx_error * scale * q;
        }
        if let Some(at) = HeadGradients::bias_at(problem, inputs, sequence, [n, i, j]) {
            bound.dbias[at] += ds_error;
        }
    }
    let p_error = (terms.sink * (u_acc * (C1 + C2 * lse) + mean).min(700.0).exp_m1()).min(1.0);
    let sink = p_error * terms.delta.abs() + (terms.sink + p_error) * delta_error;
    // dsinks are f32 in every dtype: what the sequences bring is rounded to it before it is summed up.
    let rounding = DType::F32.unit_roundoff() * terms.sink * terms.delta.abs();
    bound.dsinks[n] += match terms.sink == 0.0 {
        true => 0.0,
        false => sink + rounding,
    };
}

/// The backward pass as it is usually written: P, dP and dS rounded to the dtype.
fn naive_head<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    [sequence, kv_head]: [usize; 2],
    sums: &mut HeadGradients,
) {
    let acc = <T::Acc as Element>::from_f64;
    let round = |x: T::Acc| T::from_acc(x).to_acc();
    let dims = problem.dims();
    let (d, dv) = (dims.head_dim, dims.head_dim_v);
    let place = &problem.sequences()[sequence];
    let zeros = |values: &[f64]| vec![acc(0.0); values.len()];
    let (mut dq, mut dk, mut d_v) = (zeros(&sums.dq), zeros(&sums.dk), zeros(&sums.dv));
    let (mut dbias, mut dsinks) = (zeros(&sums.dbias), zeros(&sums.dsinks));
    let scale = acc(problem.softmax_scale());
    let mut scratch = Vec::new();
    for n in 0..dims.group() {
        let (b, h) = (place.q_batch, kv_head * dims.group() + n);
        for i in 0..place.seqlen_q {
            let at = place.q_start + i;
            let Some(row) = Row::new(problem, &inputs.inputs, b, h, at) else {
                continue;
            };
            let q: Vec<T::Acc> = inputs.inputs.q.row(b, h, at).map(Element::to_acc).collect();
            let dout: Vec<T::Acc> = inputs.dout.row(b, h, at).map(Element::to_acc).collect();
            let dlse = inputs
                .dlse
                .map_or(0.0, |dlse| dlse.at([b, h, at, 0]).into());
            let (scores, m) = naive_scores(problem, &row, &q);
            if m == T::Acc::neg_infinity() {
                continue;
            }
            let mut l = match row.sink() {
                Some(sink) => (acc(sink) - m).exp(),
                None => acc(0.0),
            };
            let sink = l;
            for &(_, s, _) in &scores {
                l += (s - m).exp();
            }
            let mut delta = acc(-dlse);
            let mut pairs = Vec::with_capacity(scores.len());
            for &(j, s, slope) in &scores {
                let p = round((s - m).exp() / l);
                let factor = row.kept(j).map(acc);
                let mut dp = acc(0.0);
                if let Some(factor) = factor {
                    let sum = super::dot(&dout, row.v(j, &mut scratch));
                    dp = factor * round(sum);
                    for (to, &x) in d_v[j * dv..][..dv].iter_mut().zip(&dout) {
                        *to += round(p * factor) * x;
                    }
                }
                delta += p * dp;
                pairs.push((j, p, dp, slope));
            }
            for (j, p, dp, slope) in pairs {
                let ds = round(p * (dp - delta));
                let dx = round(ds * slope);
                let k = row.k(j, &mut scratch);
                for (to, k) in dq[(n * place.seqlen_q + i) * d..][..d].iter_mut().zip(k) {
                    *to += dx * k.to_acc();
                }
                for (to, &q) in dk[j * d..][..d].iter_mut().zip(&q) {
                    *to += dx * q;
                }
                if let Some(at) = HeadGradients::bias_at(problem, inputs, sequence, [n, i, j]) {
                    dbias[at] += ds;
                }
            }
            if sink != acc(0.0) {
                dsinks[n] -= sink / l * delta;
            }
        }
    }
    let store = |to: &mut [f64], from: Vec<T::Acc>, factor: T::Acc| {
        for (to, x) in to.iter_mut().zip(from) {
            *to = (x * factor).to_f64();
        }
    };
    store(&mut sums.dq, dq, scale);
    store(&mut sums.dk, dk, scale);
    store(&mut sums.dv, d_v, acc(1.0));
    store(&mut sums.dbias, dbias, acc(1.0));
    store(&mut sums.dsinks, dsinks, acc(1.0));
}

/// How far one gradient may be from the reference, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradientTolerance {
    /// For every element.
    pub bound: f64,
    /// Largest error of the naive backward pass in the inputs' dtype.
    pub naive_err: f64,
    /// Share of `bound`: one rounding.
    pub rounding: f64,
    /// Share of `bound`: the accumulation term.
    pub accumulation: f64,
}

/// How one gradient compares with the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientComparison {
    /// `dq`, `dk`, `dv`, `dbias` or `dsinks`.
    pub tensor: &'static str,
    /// Largest |x − reference|; +∞ if a value that is no number stands where the reference has
    /// another, or the other way round.
    pub max_abs_err: f64,
    /// Mean of |x − reference| over the elements where both are finite.
    pub mean_abs_err: f64,
    /// Largest |x − reference| / |reference| over those, references below a thousandth of the
    /// largest left out.
    pub max_rel_err: f64,
    /// How far elements may be off.
    pub tolerance: f64,
    /// Whether all are within it.
    pub pass: bool,
    /// Where it is farthest off.
    pub worst: Option<[usize; 4]>,
}

/// The reference gradients of a problem, and the tolerances that follow from them.
#[derive(Clone, Debug)]
pub struct GradientJudge {
    dtype: DType,
    tensors: Vec<Judged>,
}

#[derive(Clone, Debug)]
struct Judged {
    name: &'static str,
    shape: [usize; 4],
    reference: Vec<f64>,
    naive: Vec<f64>,
    tolerance: GradientTolerance,
}

impl GradientJudge {
    /// Judges every head, one after another. `problem` must be the one that `inputs` pose.
    pub fn new<T: Element>(problem: &Problem, inputs: &BackwardInputs<'_, T>) -> Self {
        let heads = Self::heads(problem)
            .map(|(sequence, kv_head)| judge_head(problem, inputs, sequence, kv_head))
            .collect();
        Self::from_heads(problem, inputs, heads)
    }

    /// The (sequence, KV head) that [`judge_head`] must be asked for.
    pub fn heads(problem: &Problem) -> impl Iterator<Item = (usize, usize)> {
        heads_of(problem)
    }

    /// From all heads of the same problem, in any order.
    pub fn from_heads<T: Element>(
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        mut heads: Vec<JudgedHead>,
    ) -> Self {
        heads.sort_by_key(|head| (head.sequence, head.kv_head));
        let joined = |part: fn(&JudgedHead) -> &HeadGradients| {
            let parts = heads.iter().map(|x| (x.sequence, x.kv_head, part(x)));
            HeadGradients::joined(problem, inputs, parts)
        };
        let reference = joined(|head| &head.reference);
        let naive = joined(|head| &head.naive);
        let bound = joined(|head| &head.bound);
        let q = inputs.inputs.q.shape();
        let mut judge = GradientJudge {
            dtype: T::DTYPE,
            tensors: Vec::new(),
        };
        let (k, v) = (problem.dk_shape(), problem.dv_shape());
        judge.add::<T>("dq", q, reference.dq, naive.dq, &bound.dq);
        judge.add::<T>("dk", k, reference.dk, naive.dk, &bound.dk);
        judge.add::<T>("dv", v, reference.dv, naive.dv, &bound.dv);
        if let Some(bias) = &inputs.inputs.bias {
            judge.add::<T>(
                "dbias",
                bias.shape(),
                reference.dbias,
                naive.dbias,
                &bound.dbias,
            );
        }
        if problem.options().get_sinks().is_some() {
            let shape = [1, 1, 1, reference.dsinks.len()];
            let (reference, naive) = (reference.dsinks, naive.dsinks);
            judge.add::<f32>("dsinks", shape, reference, naive, &bound.dsinks);
        }
        judge
    }

    fn add<T: Element>(
        &mut self,
        name: &'static str,
        shape: [usize; 4],
        reference: Vec<f64>,
        naive: Vec<f64>,
        bound: &[f64],
    ) {
        // Sums stayed in the accumulator: what is stored is rounded.
        let naive: Vec<f64> = naive.into_iter().map(|x| T::from_f64(x).to_f64()).collect();
        let errors = reference.iter().zip(&naive).map(|(x, y)| x - y);
        let naive_err = largest_finite(errors);
        let largest = largest_finite(reference.iter().copied());
        let rounding = T::DTYPE.unit_roundoff() * largest + smallest_subnormal(T::DTYPE);
        let accumulation = largest_finite(bound.iter().copied());
        self.tensors.push(Judged {
            name,
            shape,
            reference,
            naive,
            tolerance: GradientTolerance {
                bound: 3.0 * naive_err + rounding + accumulation,
                naive_err,
                rounding,
                accumulation,
            },
        });
    }

    /// Names of the gradients judged, each with how far it may be off.
    pub fn tolerances(&self) -> impl Iterator<Item = (&'static str, GradientTolerance)> {
        self.tensors.iter().map(|x| (x.name, x.tolerance))
    }

    /// The reference of a gradient, row-major.
    pub fn reference(&self, tensor: &str) -> Option<&[f64]> {
        let judged = self.tensors.iter().find(|x| x.name == tensor)?;
        Some(&judged.reference)
    }

    /// Compares gradients, one entry for each of those that the problem has; one that is not given is
    /// left out.
    ///
    /// NaN and infinities count as in [`Judge::compare`](super::Judge::compare).
    ///
    /// # Errors
    /// [`Error::Shape`] if one does not have its shape, [`Error::DType`] for another element type.
    pub fn compare<T: Element>(
        &self,
        gradients: &GradientsMut<'_, T>,
    ) -> Result<Vec<GradientComparison>> {
        if T::DTYPE != self.dtype {
            return Err(Error::DType {
                tensor: "dq".into(),
                expected: self.dtype,
                got: T::DTYPE,
            });
        }
        let mut comparisons = Vec::new();
        for judged in &self.tensors {
            let view = match judged.name {
                "dq" => gradients.dq.as_view(),
                "dk" => gradients.dk.as_view(),
                "dv" => gradients.dv.as_view(),
                "dbias" => match &gradients.dbias {
                    Some(dbias) => dbias.as_view(),
                    None => continue,
                },
                _ => {
                    if let Some(dsinks) = &gradients.dsinks {
                        let view = TensorView::bhsd(dsinks, [1, 1, 1, dsinks.len()])?;
                        comparisons.push(judged.compare(&view)?);
                    }
                    continue;
                }
            };
            comparisons.push(judged.compare(&view)?);
        }
        Ok(comparisons)
    }
}

impl Judged {
    fn compare<T: Element>(&self, view: &TensorView<'_, T>) -> Result<GradientComparison> {
        if view.shape() != self.shape {
            return Err(Error::shape(
                self.name,
                format!("{:?}", self.shape),
                format!("{:?}", view.shape()),
            ));
        }
        let negligible = 1e-3 * largest_finite(self.reference.iter().copied());
        let mut errors = Errors::default();
        let [_, heads, rows, width] = self.shape;
        for (at, (&expected, &naive)) in self.reference.iter().zip(&self.naive).enumerate() {
            let index = [
                at / width / rows / heads,
                at / width / rows % heads,
                at / width % rows,
                at % width,
            ];
            let agrees = |x: f64| {
                same(x, expected)
                    || same(x, T::from_f64(expected).to_f64())
                    || (!naive.is_finite() && same(x, naive))
            };
            errors.note(index, view.at(index).to_f64(), expected, negligible, agrees);
        }
        Ok(GradientComparison {
            tensor: self.name,
            max_abs_err: errors.max_abs,
            mean_abs_err: errors.mean(),
            max_rel_err: errors.max_rel,
            tolerance: self.tolerance.bound,
            pass: errors.max_abs <= self.tolerance.bound,
            worst: errors.worst,
        })
    }
}
