//! The backward pass of standard attention (Dao et al. 2022, appendix B.2, algorithm 3): P, dP and dS
//! are written to memory and read back, one product after another.

use std::ops::Range;

use super::super::head::{Chip, Head, for_each_group};
use super::super::standard::{is_hidden, log_sum, matrix, softmax_row};
use super::super::{BlockSizes, blocks, transfer};
use super::{Arrived, Shared, prepare, store_rows};
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::observe::{GradientRow, Observer, Operation, Product, Tensor, Tile, Transfer, Weights};
use crate::problem::Problem;
use crate::tile::{add_scaled, dot};
use crate::view::TensorViewMut;

/// The gradients of `problem`, with products in tiles of `sizes`. The softmax is done again, from
/// the scores: neither out nor lse is looked at, and Δ = rowsum(P ∘ dP) − dlse. Every element is written.
///
/// # Errors
/// As [`fa2::backward`](super::fa2::backward), and [`Error::OutOfMemory`](crate::Error::OutOfMemory)
/// if the matrices of one head cannot be had.
pub fn backward<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    mut gradients: GradientsMut<'_, T>,
) -> Result<()> {
    let gathered = prepare(problem, inputs, &mut gradients)?;
    let (problem, given) = gathered.posed(&inputs.inputs);
    let mut shared = Shared::new(problem, &given, &gradients, observer);
    let (d, dv) = (problem.dims().head_dim, problem.dims().head_dim_v);
    let capped = problem.options().get_softcap().is_some();
    for_each_group(problem, &given, |group| {
        let Some(first) = group.first() else {
            return Ok(());
        };
        let (seqlen_q, seqlen_k) = (first.sequence().seqlen_q, first.sequence().seqlen_k);
        let mut dk = Summed::new([Tensor::DKSum, Tensor::DK], seqlen_k, d);
        let mut dv = Summed::new([Tensor::DVSum, Tensor::DV], seqlen_k, dv);
        for (n, head) in group.iter().enumerate() {
            (dk.first, dv.first) = (n == 0, n == 0);
            (dk.last, dv.last) = (n + 1 == group.len(), n + 1 == group.len());
            let mut matrices = Matrices::<T>::new(seqlen_q, seqlen_k, capped)?;
            matrices.scores(head, sizes, observer)?;
            matrices.softmax(head, observer);
            matrices.dv(head, inputs, sizes, &mut dv, &mut gradients.dv, observer);
            matrices.dp(head, inputs, sizes, observer);
            matrices.ds(head, inputs, &mut shared, observer);
            matrices.dq(head, sizes, &mut gradients.dq, &mut shared, observer);
            matrices.dk(head, sizes, &mut dk, &mut gradients.dk, observer);
        }
        Ok(())
    })?;
    shared.store(&mut gradients, observer);
    Ok(())
}

/// The matrices of one head in slow memory, `[seqlen_q, seqlen_k]`.
struct Matrices<T: Element> {
    keys: usize,
    /// Whether there is a softcap.
    capped: bool,
    /// S, then the slopes under a softcap.
    s: Vec<T::Acc>,
    slopes: Vec<T::Acc>,
    p: Vec<T::Acc>,
    /// dP ∘ D, then dS.
    ds: Vec<T::Acc>,
    lse: Vec<T::Acc>,
    chip: Chip<T>,
    arrived: Arrived<T>,
}

impl<T: Element> Matrices<T> {
    fn new(rows: usize, keys: usize, capped: bool) -> Result<Self> {
        Ok(Matrices {
            keys,
            capped,
            s: matrix(rows, keys)?,
            slopes: matrix(rows, keys)?,
            p: matrix(rows, keys)?,
            ds: matrix(rows, keys)?,
            lse: vec![T::Acc::default(); rows],
            chip: Chip::default(),
            arrived: Arrived::default(),
        })
    }

    /// S = q kᵀ, tile by tile.
    fn scores(
        &mut self,
        head: &Head<'_, '_, T>,
        sizes: BlockSizes,
        observer: &mut impl Observer,
    ) -> Result<()> {
        let (mut scores, mut slopes) = (Vec::new(), Vec::new());
        for (i, rows) in blocks(head.sequence().seqlen_q, sizes.rows()) {
            head.load_q(&mut self.chip, &rows, observer);
            let spec = head.spec(&rows);
            for key_block in blocks(self.keys, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_k(&mut self.chip, &tile.keys, observer);
                head.load_modifiers(&mut self.chip, &tile, observer);
                let block = head.block(&self.chip, &tile);
                spec.score_tile(&block, &mut scores, Some(&mut slopes))?;
                head.report_scores(&tile, &scores, observer);
                observer.store(transfer::<T::Acc>(Tensor::S, scores.len()));
                self.report_slopes(scores.len(), |moved| observer.store(moved));
                for (to, from) in [(&mut self.s, &scores), (&mut self.slopes, &slopes)] {
                    for (r, row) in rows.clone().enumerate() {
                        let width = tile.keys.len();
                        to[row * self.keys..][tile.keys.clone()]
                            .copy_from_slice(&from[r * width..][..width]);
                    }
                }
            }
        }
        Ok(())
    }

    /// P = softmax(S), row by row.
    fn softmax(&mut self, head: &Head<'_, '_, T>, observer: &mut impl Observer) {
        let spec = head.spec(&(0..self.lse.len()));
        for (row, lse) in self.lse.iter_mut().enumerate() {
            let at = row * self.keys..(row + 1) * self.keys;
            observer.load(transfer::<T::Acc>(Tensor::S, self.keys));
            let p = &mut self.p[at.clone()];
            let (m, l) = softmax_row(&spec, &self.s[at], p);
            *lse = log_sum(m, l);
            observer.operations(Operation::Exp, self.keys);
            observer.operations(Operation::Divide, self.keys);
            observer.weights(&Weights {
                sequence: head.sequence_index(),
                head: head.index(),
                row,
                m,
                l,
                p,
            });
            observer.store(transfer::<T::Acc>(Tensor::P, self.keys));
        }
    }

    /// dV = (P ∘ D)ᵀ dO.
    fn dv(
        &mut self,
        head: &Head<'_, '_, T>,
        inputs: &BackwardInputs<'_, T>,
        sizes: BlockSizes,
        sum: &mut Summed<T::Acc>,
        dv: &mut TensorViewMut<'_, T>,
        observer: &mut impl Observer,
    ) {
        let width = sum.width;
        for (j, keys) in blocks(self.keys, sizes.keys()) {
            sum.load(&keys, observer);
            for (i, rows) in blocks(self.lse.len(), sizes.rows()) {
                self.arrived.load_dout(inputs, head, &rows, observer);
                let spec = head.spec(&rows);
                let tile = head.tile(&spec, i, (j, keys.clone()));
                head.load_keep(&mut self.chip, &tile, observer);
                let block = head.block(&self.chip, &tile);
                observer.load(transfer::<T::Acc>(Tensor::P, rows.len() * keys.len()));
                for (r, row) in rows.clone().enumerate() {
                    let dout = &self.arrived.dout[r * width..][..width];
                    for (key, j) in keys.clone().enumerate() {
                        let p = self.p[row * self.keys + j];
                        if let (false, Some(factor)) = (is_hidden(p), spec.kept(&block, r, key)) {
                            add_scaled(&mut sum.values[j * width..][..width], p * factor, dout);
                        }
                    }
                }
                report(&tile, Tensor::DV, [keys.len(), width, rows.len()], observer);
            }
            sum.store(dv, head, &keys, observer);
        }
    }

    /// dP = D ∘ (dO Vᵀ).
    fn dp(
        &mut self,
        head: &Head<'_, '_, T>,
        inputs: &BackwardInputs<'_, T>,
        sizes: BlockSizes,
        observer: &mut impl Observer,
    ) {
        let width = inputs.dout.shape()[3];
        for (i, rows) in blocks(self.lse.len(), sizes.rows()) {
            self.arrived.load_dout(inputs, head, &rows, observer);
            let spec = head.spec(&rows);
            for key_block in blocks(self.keys, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_v(&mut self.chip, &tile.keys, observer);
                head.load_keep(&mut self.chip, &tile, observer);
                let block = head.block(&self.chip, &tile);
                for (r, row) in rows.clone().enumerate() {
                    let dout = &self.arrived.dout[r * width..][..width];
                    for (key, j) in tile.keys.clone().enumerate() {
                        let at = row * self.keys + j;
                        let kept = spec.kept(&block, r, key);
                        if let (false, Some(factor)) = (is_hidden(self.p[at]), kept) {
                            self.ds[at] = factor * dot(dout, &block.v[key * width..][..width]);
                        }
                    }
                }
                report(
                    &tile,
                    Tensor::DP,
                    [rows.len(), tile.keys.len(), width],
                    observer,
                );
                let elements = rows.len() * tile.keys.len();
                observer.store(transfer::<T::Acc>(Tensor::DP, elements));
            }
        }
    }

    /// dS = P ∘ (dP − Δ), row by row, in place of dP.
    fn ds(
        &mut self,
        head: &Head<'_, '_, T>,
        inputs: &BackwardInputs<'_, T>,
        shared: &mut Shared<T::Acc>,
        observer: &mut impl Observer,
    ) {
        let sink = head.spec(&(0..1)).sink();
        let sink = sink.filter(|&sink| sink.to_f64() > f64::NEG_INFINITY);
        let [b, h, start] = head.q_place();
        for row in 0..self.lse.len() {
            let at = row * self.keys..(row + 1) * self.keys;
            let (p, ds) = (&self.p[at.clone()], &mut self.ds[at]);
            observer.load(transfer::<T::Acc>(Tensor::P, self.keys));
            observer.load(transfer::<T::Acc>(Tensor::DP, self.keys));
            let mut delta = T::Acc::default();
            for (&p, &dp) in p.iter().zip(ds.iter()) {
                if !is_hidden(p) {
                    delta += p * dp;
                }
            }
            if let Some(dlse) = &inputs.dlse {
                observer.load(transfer::<f32>(Tensor::DLse, 1));
                delta -= <T::Acc as Element>::from_f64(dlse.at([b, h, start + row, 0]).into());
            }
            for (&p, ds) in p.iter().zip(ds.iter_mut()) {
                if !is_hidden(p) {
                    *ds = p * (*ds - delta);
                }
            }
            if let Some(sink) = sink {
                let p = num_traits::Float::exp(sink - self.lse[row]).to_f64();
                shared.add_sink(head.index(), std::iter::once((p, delta.to_f64())));
            }
            observer.operations(Operation::DeltaTerm, self.keys);
            observer.operations(Operation::ScoreGradient, self.keys);
            observer.gradient_row(&GradientRow {
                sequence: head.sequence_index(),
                head: head.index(),
                row,
                p,
                ds,
                delta,
            });
            observer.store(transfer::<T::Acc>(Tensor::DS, self.keys));
        }
    }

    /// dQ = scale · dX K, with dX = dS under the softcap's slope.
    fn dq(
        &mut self,
        head: &Head<'_, '_, T>,
        sizes: BlockSizes,
        dq: &mut TensorViewMut<'_, T>,
        shared: &mut Shared<T::Acc>,
        observer: &mut impl Observer,
    ) {
        let (mut ds, mut sum) = (Vec::new(), Vec::new());
        for (i, rows) in blocks(self.lse.len(), sizes.rows()) {
            let spec = head.spec(&rows);
            let d = spec.head_dim();
            sum.clear();
            sum.resize(rows.len() * d, T::Acc::default());
            for key_block in blocks(self.keys, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_k(&mut self.chip, &tile.keys, observer);
                let block = head.block(&self.chip, &tile);
                ds.clear();
                for (r, row) in rows.clone().enumerate() {
                    for (key, j) in tile.keys.clone().enumerate() {
                        let at = row * self.keys + j;
                        ds.push(self.ds[at]);
                        if !is_hidden(self.p[at]) {
                            let dx = self.ds[at] * self.slopes[at] * spec.scale();
                            add_scaled(&mut sum[r * d..][..d], dx, &block.k[key * d..][..d]);
                        }
                    }
                }
                observer.load(transfer::<T::Acc>(Tensor::DS, ds.len()));
                self.report_slopes(ds.len(), |moved| observer.load(moved));
                report(
                    &tile,
                    Tensor::DQ,
                    [rows.len(), d, tile.keys.len()],
                    observer,
                );
                shared.add_bias(head, &tile, &ds, observer);
            }
            store_rows(dq, head, &rows, &sum, Tensor::DQ, observer);
        }
    }

    /// dK = scale · dXᵀ Q.
    fn dk(
        &mut self,
        head: &Head<'_, '_, T>,
        sizes: BlockSizes,
        sum: &mut Summed<T::Acc>,
        dk: &mut TensorViewMut<'_, T>,
        observer: &mut impl Observer,
    ) {
        let d = sum.width;
        for (j, keys) in blocks(self.keys, sizes.keys()) {
            sum.load(&keys, observer);
            for (i, rows) in blocks(self.lse.len(), sizes.rows()) {
                head.load_q(&mut self.chip, &rows, observer);
                let spec = head.spec(&rows);
                let tile = head.tile(&spec, i, (j, keys.clone()));
                let block = head.block(&self.chip, &tile);
                for (r, row) in rows.clone().enumerate() {
                    for j in keys.clone() {
                        let at = row * self.keys + j;
                        if !is_hidden(self.p[at]) {
                            let dx = self.ds[at] * self.slopes[at] * spec.scale();
                            let sum = &mut sum.values[j * d..][..d];
                            add_scaled(sum, dx, &block.q[r * d..][..d]);
                        }
                    }
                }
                let elements = rows.len() * keys.len();
                observer.load(transfer::<T::Acc>(Tensor::DS, elements));
                self.report_slopes(elements, |moved| observer.load(moved));
                report(&tile, Tensor::DK, [keys.len(), d, rows.len()], observer);
            }
            sum.store(dk, head, &keys, observer);
        }
    }

    /// The slopes under a softcap travel as S does; without one they are all 1, and nothing is kept.
    fn report_slopes(&self, elements: usize, report: impl FnOnce(Transfer)) {
        if self.capped {
            report(transfer::<T::Acc>(Tensor::Slope, elements));
        }
    }
}

/// dK or dV of a KV head. The heads that share it add to it one after another: between them it is in
/// slow memory in the accumulator type, after the last it is rounded.
struct Summed<A> {
    tensors: [Tensor; 2],
    width: usize,
    values: Vec<A>,
    /// Whether the head at hand is the first of its group, and the last.
    first: bool,
    last: bool,
}

impl<A: Float> Summed<A> {
    fn new(tensors: [Tensor; 2], keys: usize, width: usize) -> Self {
        Summed {
            tensors,
            width,
            values: vec![A::zero(); keys * width],
            first: true,
            last: true,
        }
    }

    fn load(&self, keys: &Range<usize>, observer: &mut impl Observer) {
        if !self.first {
            observer.load(transfer::<A>(self.tensors[0], keys.len() * self.width));
        }
    }

    fn store<T: Element<Acc = A>>(
        &self,
        to: &mut TensorViewMut<'_, T>,
        head: &Head<'_, '_, T>,
        keys: &Range<usize>,
        observer: &mut impl Observer,
    ) {
        if self.last {
            let from = &self.values[keys.start * self.width..keys.end * self.width];
            store_rows(to, head, keys, from, self.tensors[1], observer);
        } else {
            observer.store(transfer::<A>(self.tensors[0], keys.len() * self.width));
        }
    }
}

fn report(
    tile: &Tile,
    result: Tensor,
    [rows, columns, inner]: [usize; 3],
    observer: &mut impl Observer,
) {
    observer.product(
        tile,
        Product {
            result,
            rows,
            columns,
            inner,
        },
    );
}
