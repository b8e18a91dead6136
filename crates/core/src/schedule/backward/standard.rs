//! The backward pass of standard attention (Dao et al. 2022, appendix B.2, algorithm 3): P, dP and dS
//! are written to memory and read back, one product after another.

use super::super::head::{Chip, Head, for_each_group};
use super::super::standard::{is_hidden, log_sum, matrix, softmax_row};
use super::super::{BlockSizes, blocks, transfer};
use super::{Arrived, Shared, prepare, store_rows};
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::Element;
use crate::error::Result;
use crate::observe::{Observer, Operation, Product, Tensor, Tile};
use crate::problem::Problem;
use crate::tile::{add_scaled, dot};

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
    let mut shared = Shared::new(problem, &given, &gradients);
    let (d, dv) = (problem.dims().head_dim, problem.dims().head_dim_v);
    let zero = T::Acc::default();
    for_each_group(problem, &given, |group| {
        let Some(first) = group.first() else {
            return Ok(());
        };
        let (seqlen_q, seqlen_k) = (first.sequence().seqlen_q, first.sequence().seqlen_k);
        let (mut dk_sum, mut dv_sum) = (vec![zero; seqlen_k * d], vec![zero; seqlen_k * dv]);
        for head in group {
            let mut matrices = Matrices::<T>::new(seqlen_q, seqlen_k)?;
            matrices.scores(head, sizes, observer)?;
            matrices.softmax(head, observer);
            let mut dq_sum = vec![zero; seqlen_q * d];
            matrices.values(head, inputs, sizes, &mut dv_sum, observer);
            matrices.gradients_of_scores(head, inputs, &mut shared, observer);
            matrices.products(head, sizes, &mut dq_sum, &mut dk_sum, &mut shared, observer);
            let rows = 0..seqlen_q;
            store_rows(
                &mut gradients.dq,
                head.q_place(),
                &rows,
                &dq_sum,
                Tensor::DQ,
                observer,
            );
        }
        let (place, keys) = (first.kv_place(), 0..seqlen_k);
        store_rows(
            &mut gradients.dk,
            place,
            &keys,
            &dk_sum,
            Tensor::DK,
            observer,
        );
        store_rows(
            &mut gradients.dv,
            place,
            &keys,
            &dv_sum,
            Tensor::DV,
            observer,
        );
        Ok(())
    })?;
    shared.store(&mut gradients);
    Ok(())
}

/// The matrices of one head in slow memory, `[seqlen_q, seqlen_k]`.
struct Matrices<T: Element> {
    keys: usize,
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
    fn new(rows: usize, keys: usize) -> Result<Self> {
        Ok(Matrices {
            keys,
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
            let (m, l) = softmax_row(&spec, &self.s[at.clone()], &mut self.p[at]);
            *lse = log_sum(m, l);
            observer.operations(Operation::Exp, self.keys);
            observer.operations(Operation::Divide, self.keys);
            observer.store(transfer::<T::Acc>(Tensor::P, self.keys));
        }
    }

    /// dV = (P ∘ D)ᵀ dO, and dP = D ∘ (dO Vᵀ).
    fn values(
        &mut self,
        head: &Head<'_, '_, T>,
        inputs: &BackwardInputs<'_, T>,
        sizes: BlockSizes,
        dv_sum: &mut [T::Acc],
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
                let elements = rows.len() * tile.keys.len();
                observer.load(transfer::<T::Acc>(Tensor::P, elements));
                for (r, row) in rows.clone().enumerate() {
                    let dout = &self.arrived.dout[r * width..][..width];
                    for (key, j) in tile.keys.clone().enumerate() {
                        let at = row * self.keys + j;
                        let kept = spec.kept(&block, r, key);
                        let (false, Some(factor)) = (is_hidden(self.p[at]), kept) else {
                            continue;
                        };
                        add_scaled(&mut dv_sum[j * width..][..width], self.p[at] * factor, dout);
                        self.ds[at] = factor * dot(dout, &block.v[key * width..][..width]);
                    }
                }
                for product in [
                    [tile.keys.len(), width, rows.len()],
                    [rows.len(), tile.keys.len(), width],
                ] {
                    report(&tile, product, observer);
                }
                observer.store(transfer::<T::Acc>(Tensor::DP, elements));
            }
        }
    }

    /// dS = P ∘ (dP − Δ), row by row, in place of dP.
    fn gradients_of_scores(
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
            observer.store(transfer::<T::Acc>(Tensor::DS, self.keys));
        }
    }

    /// dQ = scale · dX K and dK = scale · dXᵀ Q, with dX = dS under the softcap's slope.
    fn products(
        &mut self,
        head: &Head<'_, '_, T>,
        sizes: BlockSizes,
        dq_sum: &mut [T::Acc],
        dk_sum: &mut [T::Acc],
        shared: &mut Shared<T::Acc>,
        observer: &mut impl Observer,
    ) {
        let mut ds = Vec::new();
        for (i, rows) in blocks(self.lse.len(), sizes.rows()) {
            head.load_q(&mut self.chip, &rows, observer);
            let spec = head.spec(&rows);
            let d = spec.head_dim();
            for key_block in blocks(self.keys, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_k(&mut self.chip, &tile.keys, observer);
                let block = head.block(&self.chip, &tile);
                ds.clear();
                for (r, row) in rows.clone().enumerate() {
                    for (key, j) in tile.keys.clone().enumerate() {
                        let at = row * self.keys + j;
                        ds.push(self.ds[at]);
                        if is_hidden(self.p[at]) {
                            continue;
                        }
                        let dx = self.ds[at] * self.slopes[at] * spec.scale();
                        add_scaled(&mut dq_sum[row * d..][..d], dx, &block.k[key * d..][..d]);
                        add_scaled(&mut dk_sum[j * d..][..d], dx, &block.q[r * d..][..d]);
                    }
                }
                observer.load(transfer::<T::Acc>(Tensor::DS, ds.len()));
                for product in [
                    [rows.len(), d, tile.keys.len()],
                    [tile.keys.len(), d, rows.len()],
                ] {
                    report(&tile, product, observer);
                }
                shared.add_bias(head, &tile, &ds, observer);
            }
        }
    }
}

fn report(tile: &Tile, [rows, columns, inner]: [usize; 3], observer: &mut impl Observer) {
    observer.product(
        tile,
        Product {
            rows,
            columns,
            inner,
        },
    );
}
