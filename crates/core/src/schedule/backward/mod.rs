//! The three backward passes as the papers write them.
//!
//! | | P comes from | loops | leaves fast memory |
//! |---|---|---|---|
//! | [`standard`] | memory | products one after another | P, dP and dS |
//! | [`fa1`] | exp(S − m)/ℓ | keys outside, rows inside; Δ made again in every tile | dQ, at every step |
//! | [`fa2`] | exp(S − L) | keys outside, rows inside; Δ made once | dQ, at every step |
//!
//! (Dao et al. 2022, algorithm 4 and appendix B; Dao 2023, algorithm 2.) The query heads that share a
//! KV head pass one after another while its keys stay, so dK and dV of a group are summed up in fast
//! memory.

pub mod fa1;
pub mod fa2;
pub mod standard;
mod statistics;
mod tile;

use std::ops::Range;

use num_traits::Float as _;

use super::head::{Head, copy_rows};
use super::{BlockSizes, transfer};
use crate::algorithm::Algorithm;
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::Element;
use crate::error::Result;
use crate::inputs::Inputs;
use crate::observe::{GradientFinish, NoObserver, Observer, Operation, Tensor};
use crate::paged::{Gathered, gather};
use crate::problem::Problem;
use crate::view::TensorViewMut;

pub use statistics::RowStatistics;

/// The gradients by `algorithm`: [`standard::backward`], [`fa1::backward`] from statistics made
/// anew, or [`fa2::backward`], the last also for [`Algorithm::Auto`].
///
/// # Errors
/// Those of the three.
pub fn backward<T: Element>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    gradients: GradientsMut<'_, T>,
) -> Result<()> {
    match algorithm {
        Algorithm::Standard => standard::backward(problem, inputs, sizes, observer, gradients),
        Algorithm::Fa1 => {
            let statistics = RowStatistics::new(problem, &inputs.inputs, sizes, &mut NoObserver)?;
            fa1::backward(problem, inputs, &statistics, sizes, observer, gradients)
        }
        Algorithm::Fa2 | Algorithm::Auto => {
            fa2::backward(problem, inputs, sizes, observer, gradients)
        }
    }
}

/// Checks the call, gathers pages, and sets to 0 what no sequence reaches.
fn prepare<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    gradients: &mut GradientsMut<'_, T>,
) -> Result<Gathered<T>> {
    problem.expect_posed(&inputs.problem(problem.options())?)?;
    gradients.check(problem, &inputs.inputs)?;
    gradients.dq.fill(T::default());
    gradients.dk.fill(T::default());
    gradients.dv.fill(T::default());
    if let Some(dbias) = &mut gradients.dbias {
        dbias.fill(T::default());
    }
    gather(problem, &inputs.inputs)
}

/// Tiles of the forward pass's results and of what arrives there, row-major in fast memory.
#[derive(Default)]
struct Arrived<T: Element> {
    out: Vec<T::Acc>,
    dout: Vec<T::Acc>,
    dlse: Vec<T::Acc>,
}

impl<T: Element> Arrived<T> {
    fn load_dout(
        &mut self,
        inputs: &BackwardInputs<'_, T>,
        head: &Head<'_, '_, T>,
        rows: &Range<usize>,
        observer: &mut impl Observer,
    ) {
        copy_rows(&inputs.dout, head.q_place(), rows, &mut self.dout);
        observer.load(transfer::<T>(Tensor::DOut, self.dout.len()));
    }

    /// Δ = rowsum(dO ∘ O) − dlse, or −dlse alone of a row that keeps no key; dO must have been loaded.
    fn delta(
        &mut self,
        inputs: &BackwardInputs<'_, T>,
        head: &Head<'_, '_, T>,
        rows: &Range<usize>,
        observer: &mut impl Observer,
        delta: &mut Vec<T::Acc>,
    ) -> Result<()> {
        let place @ [b, h, start] = head.q_place();
        copy_rows(&inputs.out, place, rows, &mut self.out);
        observer.load(transfer::<T>(Tensor::Out, self.out.len()));
        self.dlse.clear();
        if let Some(dlse) = &inputs.dlse {
            let wide = |i| <T::Acc as Element>::from_f64(dlse.at([b, h, start + i, 0]).into());
            self.dlse.extend(rows.clone().map(wide));
            observer.load(transfer::<f32>(Tensor::DLse, rows.len()));
        }
        let width = inputs.out.shape()[3];
        observer.operations(Operation::DeltaTerm, rows.len() * width);
        delta.clear();
        for (r, i) in rows.clone().enumerate() {
            let row = r * width..(r + 1) * width;
            let mut sum = crate::tile::dot(&self.dout[row.clone()], &self.out[row]);
            // out may be 0 because the row has no part of any value, and 0 · NaN is not.
            if !sum.is_finite() && !head.keeps_a_key(i)? {
                sum = T::Acc::default();
            }
            delta.push(match self.dlse.get(r) {
                Some(&dlse) => sum - dlse,
                None => sum,
            });
        }
        Ok(())
    }
}

/// Whether row `row` of sequence number `sequence` keeps a key of `head`: sees it, with a score above −∞,
/// and dropout leaves it. Of a row that keeps none no gradient depends on dO: see
/// [`backward`](crate::backward). Backends ask where Δ = rowsum(dO ∘ O) is not finite.
///
/// `problem` must be the one that `inputs` pose, and pages have been [gathered](crate::gather).
///
/// # Errors
/// If they do not fit each other.
///
/// # Panics
/// If there is no such sequence, head or row.
pub fn keeps_a_key<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sequence: usize,
    head: usize,
    row: usize,
) -> Result<bool> {
    Head::new(problem, inputs, sequence, head)?.keeps_a_key(row)
}

/// dbias and dsinks while they are summed up.
struct Shared<A> {
    /// In the bias's shape, row-major.
    dbias: Option<(Vec<A>, [usize; 4])>,
    dsinks: Vec<f64>,
}

impl<A: crate::dtype::Float> Shared<A> {
    fn new<T: Element<Acc = A>>(
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        gradients: &GradientsMut<'_, T>,
        observer: &mut impl Observer,
    ) -> Self {
        let dbias = match (&gradients.dbias, &inputs.bias) {
            (Some(_), Some(bias)) => {
                let shape = bias.shape();
                let sums = vec![A::zero(); shape.iter().product()];
                observer.store(transfer::<A>(Tensor::DBiasSum, sums.len()));
                Some((sums, shape))
            }
            _ => None,
        };
        Shared {
            dbias,
            dsinks: vec![0.0; problem.dims().num_heads],
        }
    }

    /// Adds dS of a tile to dbias.
    fn add_bias<T: Element<Acc = A>>(
        &mut self,
        head: &Head<'_, '_, T>,
        tile: &crate::observe::Tile,
        ds: &[A],
        observer: &mut impl Observer,
    ) {
        let Some((dbias, shape)) = &mut self.dbias else {
            return;
        };
        let [b, h, q_start] = head.q_place();
        let k_start = head.sequence().k_start;
        let axis = |n: usize, at: usize| if shape[n] == 1 { 0 } else { at };
        for (r, i) in tile.rows.clone().enumerate() {
            let row = (axis(0, b) * shape[1] + axis(1, h)) * shape[2] + axis(2, q_start + i);
            for (c, j) in tile.keys.clone().enumerate() {
                dbias[row * shape[3] + axis(3, k_start + j)] += ds[r * tile.keys.len() + c];
            }
        }
        let given = head.bias_shape().unwrap_or(*shape);
        let elements = super::head::distinct(&given, tile);
        observer.load(transfer::<A>(Tensor::DBiasSum, elements));
        observer.store(transfer::<A>(Tensor::DBiasSum, elements));
    }

    /// dsink −= e^(sink − L) Δ, for pairs of the two.
    fn add_sink(&mut self, head: usize, sink_weights: impl Iterator<Item = (f64, f64)>) {
        for (p, delta) in sink_weights {
            if p != 0.0 {
                self.dsinks[head] -= p * delta;
            }
        }
    }

    fn store<T: Element<Acc = A>>(
        &self,
        gradients: &mut GradientsMut<'_, T>,
        observer: &mut impl Observer,
    ) {
        if let (Some((sums, shape)), Some(dbias)) = (&self.dbias, &mut gradients.dbias) {
            observer.load(transfer::<A>(Tensor::DBiasSum, sums.len()));
            observer.store(transfer::<T>(Tensor::DBias, sums.len()));
            for row in 0..shape[0] * shape[1] * shape[2] {
                let (b, h, i) = (
                    row / shape[2] / shape[1],
                    row / shape[2] % shape[1],
                    row % shape[2],
                );
                let sums = &sums[row * shape[3]..][..shape[3]];
                for (to, &sum) in dbias.row_mut(b, h, i).iter_mut().zip(sums) {
                    *to = T::from_acc(sum);
                }
            }
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            for (to, &sum) in dsinks.iter_mut().zip(&self.dsinks) {
                *to = sum as f32;
            }
        }
    }
}

/// Rounds finished rows of dQ, dK or dV to the dtype and stores them.
fn store_rows<T: Element>(
    view: &mut TensorViewMut<'_, T>,
    head: &Head<'_, '_, T>,
    rows: &Range<usize>,
    from: &[T::Acc],
    tensor: Tensor,
    observer: &mut impl Observer,
) {
    let [b, h, start] = match tensor {
        Tensor::DQ => head.q_place(),
        _ => head.kv_place(),
    };
    let width = view.shape()[3];
    observer.gradient_finish(&GradientFinish {
        tensor,
        sequence: head.sequence_index(),
        head: h,
        rows: rows.clone(),
        values: &from[..rows.len() * width],
    });
    for (r, i) in rows.clone().enumerate() {
        let row = view.row_mut(b, h, start + i);
        for (to, &x) in row.iter_mut().zip(&from[r * width..]) {
            *to = T::from_acc(x);
        }
    }
    observer.store(transfer::<T>(tensor, rows.len() * width));
}
