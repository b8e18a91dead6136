//! Standard attention (Dao et al. 2022, algorithm 0): S is written to memory and read back, and so is
//! P. The baseline that tiling is measured against: seqlen_q × seqlen_k numbers twice, for every
//! head, whatever the mask hides.

use super::head::{Chip, for_each_head};
use super::{BlockSizes, blocks, prepare, transfer};
use crate::allocate::allocate;
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::inputs::Inputs;
use crate::observe::{Observer, Operation, Tensor, Weights};
use crate::problem::Problem;
use crate::softmax::{exponent_base, max_or_nan};
use crate::tile::TileSpec;
use crate::view::TensorViewMut;

/// out and lse of `problem`, with the two products in tiles of `sizes`.
///
/// Shapes, every element written, and errors are those of [`fa2::forward`](super::fa2::forward).
///
/// # Errors
/// Besides those: [`Error::OutOfMemory`](crate::Error::OutOfMemory) if S and P cannot be had.
pub fn forward<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    let (gathered, mut outputs) = prepare(problem, inputs, out, lse)?;
    let (problem, inputs) = gathered.posed(inputs);
    let width = problem.dims().head_dim_v;
    let mut chip = Chip::<T>::default();
    let mut tile_scores = Vec::new();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for_each_head(problem, &inputs, |head| {
        let sequence = head.sequence();
        let seqlen_k = sequence.seqlen_k;
        let mut s = matrix::<T::Acc>(sequence.seqlen_q, seqlen_k)?;
        let mut p = matrix::<T::Acc>(sequence.seqlen_q, seqlen_k)?;

        // S = q kᵀ, tile by tile.
        for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
            head.load_q(&mut chip, &rows, observer);
            let spec = head.spec(&rows);
            for key_block in blocks(seqlen_k, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_k(&mut chip, &tile.keys, observer);
                head.load_modifiers(&mut chip, &tile, observer);
                spec.scores(&head.block(&chip, &tile), &mut tile_scores)?;
                head.report_scores(&tile, &tile_scores, observer);
                for (r, row) in rows.clone().enumerate() {
                    s[row * seqlen_k..][tile.keys.clone()]
                        .copy_from_slice(&tile_scores[r * tile.keys.len()..][..tile.keys.len()]);
                }
                observer.store(transfer::<T::Acc>(Tensor::S, tile_scores.len()));
            }
        }

        // P = softmax(S), row by row.
        let spec = head.spec(&(0..sequence.seqlen_q));
        lse.resize(sequence.seqlen_q, T::Acc::default());
        for (row, lse) in lse.iter_mut().enumerate() {
            observer.load(transfer::<T::Acc>(Tensor::S, seqlen_k));
            let at = row * seqlen_k..(row + 1) * seqlen_k;
            let p = &mut p[at.clone()];
            let (m, l) = softmax_row(&spec, &s[at], p);
            *lse = log_sum(m, l);
            observer.operations(Operation::Exp, seqlen_k);
            observer.operations(Operation::Divide, seqlen_k);
            observer.weights(&Weights {
                sequence: head.sequence_index(),
                head: head.index(),
                row,
                m,
                l,
                p,
            });
            observer.store(transfer::<T::Acc>(Tensor::P, seqlen_k));
        }

        // O = P v, tile by tile.
        for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
            let spec = head.spec(&rows);
            out.clear();
            out.resize(rows.len() * width, T::Acc::default());
            for key_block in blocks(seqlen_k, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                head.load_v(&mut chip, &tile.keys, observer);
                head.load_keep(&mut chip, &tile, observer);
                let block = head.block(&chip, &tile);
                let elements = rows.len() * tile.keys.len();
                observer.load(transfer::<T::Acc>(Tensor::P, elements));
                for (r, row) in rows.clone().enumerate() {
                    let p = &p[row * seqlen_k..][tile.keys.clone()];
                    let kept = |key| spec.kept(&block, r, key);
                    add_values(p, kept, block.v, &mut out[r * width..][..width]);
                }
                head.report_values(&tile, observer);
            }
            let lse = &lse[rows.clone()];
            head.report_finish(i, &out, lse, observer);
            outputs.store(head, &rows, &out, lse, observer);
        }
        Ok(())
    })
}

/// What P holds where a key is hidden: a zero that can be told from a weight that underflowed, which
/// is +0.
fn hidden<F: Float>() -> F {
    F::neg_zero()
}

/// Three-pass softmax of one row of S; gives (m, ℓ), the sink included.
pub(super) fn softmax_row<F: Float>(spec: &TileSpec<F>, s: &[F], p: &mut [F]) -> (F, F) {
    let sink = spec.sink().unwrap_or(F::neg_infinity());
    let m = s.iter().fold(sink, |m, &s| max_or_nan(m, s));
    let base = exponent_base(m);
    let mut l = (sink - base).exp();
    for &s in s {
        l += (s - base).exp();
    }
    for (p, &s) in p.iter_mut().zip(s) {
        *p = if s == F::neg_infinity() {
            hidden()
        } else {
            (s - base).exp() / l
        };
    }
    (m, l)
}

/// L = m + ln ℓ.
pub(super) fn log_sum<F: Float>(m: F, l: F) -> F {
    if m == F::neg_infinity() {
        m
    } else {
        m + l.ln()
    }
}

/// Whether this weight is of a hidden key.
pub(super) fn is_hidden<F: Float>(p: F) -> bool {
    p == hidden() && p.is_sign_negative()
}

/// out += p v, leaving out keys that are hidden or dropped: their values may be NaN.
fn add_values<F: Float>(p: &[F], kept: impl Fn(usize) -> Option<F>, v: &[F], out: &mut [F]) {
    let width = out.len();
    for (key, &p) in p.iter().enumerate() {
        if is_hidden(p) {
            continue;
        }
        let Some(factor) = kept(key) else {
            continue;
        };
        let p = p * factor;
        for (out, &v) in out.iter_mut().zip(&v[key * width..]) {
            *out += p * v;
        }
    }
}

/// A matrix of zeros in slow memory.
pub(super) fn matrix<F: Float>(rows: usize, columns: usize) -> Result<Vec<F>> {
    allocate(&[rows, columns], "the scores of one head", F::zero())
}
