//! The gradients by definition, in f64: weights from the whole row of scores, no statistics of a
//! forward pass, no tiles.

use std::ops::Range;

use super::{Dd, Row};
use crate::backward::BackwardInputs;
use crate::dtype::Element;
use crate::problem::Problem;

/// Gradients in f64: of one KV head of one sequence, or of a whole problem; row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadGradients {
    /// `[batch, num_heads, seqlen_q, head_dim]`; of one KV head `[group, seqlen_q, head_dim]`.
    pub dq: Vec<f64>,
    /// [`Problem::dk_shape`]; `[seqlen_k, head_dim]`.
    pub dk: Vec<f64>,
    /// [`Problem::dv_shape`]; `[seqlen_k, head_dim_v]`.
    pub dv: Vec<f64>,
    /// In the bias's shape; `[group, seqlen_q, seqlen_k]`, the last two 1 where the bias has 1.
    /// Empty without a bias.
    pub dbias: Vec<f64>,
    /// `[num_heads]`; `[group]`. 0 without sinks.
    pub dsinks: Vec<f64>,
}

impl HeadGradients {
    /// Zeros for one KV head of sequence number `sequence`.
    pub(crate) fn of_head<T: Element>(
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        sequence: usize,
    ) -> Self {
        let dims = problem.dims();
        let sequence = &problem.sequences()[sequence];
        let (rows, keys) = (dims.group() * sequence.seqlen_q, sequence.seqlen_k);
        let dbias = inputs.inputs.bias.map_or(0, |bias| {
            let [_, _, i, j] = bias.shape();
            let rows = if i == 1 { 1 } else { sequence.seqlen_q };
            let keys = if j == 1 { 1 } else { keys };
            dims.group() * rows * keys
        });
        HeadGradients {
            dq: vec![0.0; rows * dims.head_dim],
            dk: vec![0.0; keys * dims.head_dim],
            dv: vec![0.0; keys * dims.head_dim_v],
            dbias: vec![0.0; dbias],
            dsinks: vec![0.0; dims.group()],
        }
    }

    /// Position of an element of `dbias` of one KV head.
    pub(crate) fn bias_at<T: Element>(
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        sequence: usize,
        [n, i, j]: [usize; 3],
    ) -> Option<usize> {
        let [_, _, rows, keys] = inputs.inputs.bias?.shape();
        let sequence = &problem.sequences()[sequence];
        let (i, rows) = if rows == 1 {
            (0, 1)
        } else {
            (i, sequence.seqlen_q)
        };
        let (j, keys) = if keys == 1 {
            (0, 1)
        } else {
            (j, sequence.seqlen_k)
        };
        Some((n * rows + i) * keys + j)
    }

    /// Joins the heads of `problem`, each with its sequence and KV head, in the given order.
    pub(crate) fn joined<'h, T: Element>(
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        heads: impl Iterator<Item = (usize, usize, &'h HeadGradients)>,
    ) -> Self {
        let dims = problem.dims();
        let bias = inputs.inputs.bias.map_or([0; 4], |bias| bias.shape());
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let mut all = HeadGradients {
            dq: vec![0.0; count(inputs.inputs.q.shape())],
            dk: vec![0.0; count(problem.dk_shape())],
            dv: vec![0.0; count(problem.dv_shape())],
            dbias: vec![0.0; count(bias)],
            dsinks: vec![0.0; dims.num_heads],
        };
        let copy = |to: &mut [f64], first: usize, from: &[f64]| {
            to[first..first + from.len()].copy_from_slice(from);
        };
        for (number, kv_head, head) in heads {
            let sequence = &problem.sequences()[number];
            let group = dims.group();
            let (sq, sk) = (sequence.seqlen_q, sequence.seqlen_k);
            for n in 0..group {
                let h = kv_head * group + n;
                let row =
                    (sequence.q_batch * dims.num_heads + h) * dims.seqlen_q + sequence.q_start;
                let d = dims.head_dim;
                copy(&mut all.dq, row * d, &head.dq[n * sq * d..][..sq * d]);
                all.dsinks[h] += head.dsinks[n];
                let axis = |n: usize, at: usize| if bias[n] == 1 { 0 } else { at };
                let (rows, keys) = (
                    if bias[2] == 1 { 1 } else { sq },
                    if bias[3] == 1 { 1 } else { sk },
                );
                for at in 0..head.dbias.len() / group.max(1) {
                    let (i, j) = (at / keys, at % keys);
                    let to = ((axis(0, sequence.q_batch) * bias[1] + axis(1, h)) * bias[2]
                        + axis(2, sequence.q_start + i))
                        * bias[3]
                        + axis(3, sequence.k_start + j);
                    all.dbias[to] += head.dbias[n * rows * keys + at];
                }
            }
            let row =
                (sequence.k_batch * dims.num_kv_heads + kv_head) * dims.seqlen_k + sequence.k_start;
            copy(&mut all.dk, row * dims.head_dim, &head.dk);
            copy(&mut all.dv, row * dims.head_dim_v, &head.dv);
        }
        all
    }
}

/// (sequence, KV head) of every head of `problem`.
pub(crate) fn heads_of(problem: &Problem) -> impl Iterator<Item = (usize, usize)> {
    let heads = problem.dims().num_kv_heads;
    (0..problem.sequences().len()).flat_map(move |sequence| (0..heads).map(move |h| (sequence, h)))
}

/// Every gradient of `problem`, whose results and statistics of a forward pass are not looked at.
///
/// `problem` must be the one that `inputs` pose.
pub fn gradients<T: Element>(problem: &Problem, inputs: &BackwardInputs<'_, T>) -> HeadGradients {
    let heads: Vec<_> = heads_of(problem)
        .map(|(sequence, kv_head)| {
            let head = head_gradients(problem, inputs, sequence, kv_head, |_, _, _, _| {});
            (sequence, kv_head, head)
        })
        .collect();
    HeadGradients::joined(
        problem,
        inputs,
        heads.iter().map(|(s, h, head)| (*s, *h, head)),
    )
}

/// What a live key brings to the gradients of its row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Term {
    pub(crate) j: usize,
    /// The sum of the magnitudes that the score was made of.
    pub(crate) magnitude: f64,
    pub(crate) slope: f64,
    pub(crate) p: f64,
    /// What dropout multiplies the weight by, 0 included.
    pub(crate) factor: f64,
    /// dO · v, and the sum of its terms' magnitudes; 0 if the key is dropped.
    pub(crate) dov: f64,
    pub(crate) dov_abs: f64,
}

impl Term {
    /// dS.
    pub(crate) fn ds(&self, delta: f64) -> f64 {
        self.p * (self.factor * self.dov - delta)
    }
}

/// The terms of a row.
#[derive(Clone, Debug)]
pub(crate) struct RowTerms {
    pub(crate) terms: Vec<Term>,
    pub(crate) lse: f64,
    /// rowsum(P ∘ dP) − dlse.
    pub(crate) delta: f64,
    /// Σ P |dP|, with the magnitudes of the terms of dP.
    pub(crate) delta_abs: f64,
    pub(crate) dlse: f64,
    /// e^(sink − L).
    pub(crate) sink: f64,
}

/// The gradients of one KV head; `each` sees the terms of every row: n of the group, i, q and terms.
pub(crate) fn head_gradients<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sequence: usize,
    kv_head: usize,
    mut each: impl FnMut(usize, usize, &Row<'_, '_, T>, &RowTerms),
) -> HeadGradients {
    let mut sums = HeadGradients::of_head(problem, inputs, sequence);
    let dims = problem.dims();
    let (d, dv, scale) = (dims.head_dim, dims.head_dim_v, problem.softmax_scale());
    let place = &problem.sequences()[sequence];
    let (mut scratch, mut values) = (Vec::new(), Vec::new());
    for n in 0..dims.group() {
        let h = kv_head * dims.group() + n;
        for i in 0..place.seqlen_q {
            let (b, at) = (place.q_batch, place.q_start + i);
            let Some(row) = Row::new(problem, &inputs.inputs, b, h, at) else {
                continue;
            };
            let q: Vec<f64> = inputs.inputs.q.row(b, h, at).map(Element::to_f64).collect();
            let dout: Vec<f64> = inputs.dout.row(b, h, at).map(Element::to_f64).collect();
            let dlse = inputs
                .dlse
                .map_or(0.0, |dlse| dlse.at([b, h, at, 0]).into());
            let terms = row_terms(&row, &q, &dout, dlse);
            each(n, i, &row, &terms);
            for term in &terms.terms {
                let j = term.j;
                if term.factor != 0.0 {
                    add(&mut sums.dv[j * dv..][..dv], term.p * term.factor, &dout);
                }
                let ds = term.ds(terms.delta);
                let dx = ds * term.slope * scale;
                values.clear();
                values.extend(row.k(j, &mut scratch).iter().map(|x| x.to_acc().to_f64()));
                let first = (n * place.seqlen_q + i) * d;
                add(&mut sums.dq[first..][..d], dx, &values);
                add(&mut sums.dk[j * d..][..d], dx, &q);
                if let Some(at) = HeadGradients::bias_at(problem, inputs, sequence, [n, i, j]) {
                    sums.dbias[at] += ds;
                }
            }
            if terms.sink != 0.0 {
                sums.dsinks[n] -= terms.sink * terms.delta;
            }
        }
    }
    sums
}

fn add(row: &mut [f64], factor: f64, other: &[f64]) {
    for (x, &y) in row.iter_mut().zip(other) {
        *x += factor * y;
    }
}

fn row_terms<T: Element>(row: &Row<'_, '_, T>, q: &[f64], dout: &[f64], dlse: f64) -> RowTerms {
    let sink = row.sink().unwrap_or(f64::NEG_INFINITY);
    let mut scratch = Vec::new();
    let mut m = Dd::from(sink);
    let mut live = Vec::new();
    let mut poisoned = false;
    let candidates: Range<usize> = row.candidates();
    for j in candidates.filter(|&j| row.visible(j)) {
        let (score, magnitude) = row.score(j, q, &mut scratch);
        if score.hi == f64::NEG_INFINITY {
            continue;
        }
        poisoned |= score.hi.is_nan() || score.hi == f64::INFINITY;
        if (score.hi, score.lo) > (m.hi, m.lo) {
            m = score;
        }
        live.push((j, score, magnitude));
    }
    let mut z = Dd::from(0.0);
    if m.hi != f64::NEG_INFINITY {
        z.add(m.exp_of_difference(Dd::from(sink)), 0.0);
    }
    for &(_, score, _) in &live {
        z.add(m.exp_of_difference(score), 0.0);
    }
    let z = if poisoned { f64::NAN } else { z.value() };
    let mut terms = RowTerms {
        terms: Vec::with_capacity(live.len()),
        lse: m.hi + (m.lo + z.ln()),
        delta: -dlse,
        delta_abs: 0.0,
        dlse,
        sink: match sink == f64::NEG_INFINITY {
            true => 0.0,
            false => m.exp_of_difference(Dd::from(sink)) / z,
        },
    };
    for (j, score, magnitude) in live {
        let p = m.exp_of_difference(score) / z;
        let (mut dov, mut dov_abs) = (0.0, 0.0);
        let factor = row.kept(j);
        if factor.is_some() {
            for (&x, &v) in dout.iter().zip(row.v(j, &mut scratch)) {
                let product = x * v.to_f64();
                dov += product;
                dov_abs += product.abs();
            }
        }
        let factor = factor.unwrap_or(0.0);
        terms.delta += p * factor * dov;
        terms.delta_abs += p * factor * dov_abs;
        terms.terms.push(Term {
            j,
            magnitude,
            slope: row.slope(j, q, &mut scratch),
            p,
            factor,
            dov,
            dov_abs,
        });
    }
    terms
}
