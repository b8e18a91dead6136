//! The five products of a tile, and what stands between them.

use super::super::head::{Chip, Head};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::observe::{BackwardStep, Observer, Operation, Product, Tensor, Tile};
use crate::tile::{TileBlock, TileSpec, add_scaled, dot};

/// What a tile's rows bring: P = `weight(statistic, s)`, dO and Δ.
pub(super) struct Rows<'c, F, W> {
    pub(super) weight: W,
    pub(super) statistics: &'c [(F, F)],
    pub(super) dout: &'c [F],
    pub(super) delta: &'c [F],
}

/// Where a tile's shares are added: dQ of its rows, dK and dV of its keys.
pub(super) struct Sums<'c, F> {
    pub(super) dq: &'c mut [F],
    pub(super) dk: &'c mut [F],
    pub(super) dv: &'c mut [F],
}

/// P and dS of a tile, made again.
#[derive(Default)]
pub(super) struct Recomputed<F> {
    scores: Vec<F>,
    slopes: Vec<F>,
    p: Vec<F>,
    dp: Vec<F>,
    pub(super) ds: Vec<F>,
}

impl<F: Float> Recomputed<F> {
    /// Adds the tile's shares. Keys that are hidden are left out, not multiplied by 0: their k and v
    /// may be NaN. So is the value of a dropped key.
    #[allow(clippy::too_many_arguments)] // the tile, what it is made of, and where it goes
    pub(super) fn step<T: Element<Acc = F>, W: Fn((F, F), F) -> F>(
        &mut self,
        head: &Head<'_, '_, T>,
        spec: &TileSpec<F>,
        chip: &Chip<T>,
        tile: &Tile,
        rows: Rows<'_, F, W>,
        sums: Sums<'_, F>,
        observer: &mut impl Observer,
    ) -> Result<()> {
        let block = head.block(chip, tile);
        spec.score_tile(&block, &mut self.scores, Some(&mut self.slopes))?;
        let width = tile.keys.len();
        for tensor in [&mut self.p, &mut self.dp, &mut self.ds] {
            tensor.clear();
            tensor.resize(self.scores.len(), F::zero());
        }
        let (d, dv) = (spec.head_dim(), spec.head_dim_v());
        for r in 0..tile.rows.len() {
            let dout = &rows.dout[r * dv..][..dv];
            let q = &block.q[r * d..][..d];
            let dq = &mut sums.dq[r * d..][..d];
            for key in 0..width {
                let at = r * width + key;
                let s = self.scores[at];
                if s == F::neg_infinity() {
                    continue;
                }
                let p = (rows.weight)(rows.statistics[r], s);
                let mut dp = F::zero();
                if let Some(factor) = spec.kept(&block, r, key) {
                    dp = factor * dot(dout, &block.v[key * dv..][..dv]);
                    add_scaled(&mut sums.dv[key * dv..][..dv], p * factor, dout);
                }
                let ds = p * (dp - rows.delta[r]);
                let dx = ds * self.slopes[at] * spec.scale();
                add_scaled(dq, dx, &block.k[key * d..][..d]);
                add_scaled(&mut sums.dk[key * d..][..d], dx, q);
                (self.p[at], self.dp[at], self.ds[at]) = (p, dp, ds);
            }
        }
        report(&block, tile, [d, dv], observer);
        observer.operations(Operation::Exp, self.p.len());
        observer.operations(Operation::ScoreGradient, self.p.len());
        observer.backward_step(&BackwardStep {
            tile,
            s: &self.scores,
            p: &self.p,
            dp: &self.dp,
            ds: &self.ds,
            statistics: rows.statistics,
            delta: rows.delta,
            dq: sums.dq,
            dk: sums.dk,
            dv: sums.dv,
        });
        Ok(())
    }
}

/// S, dV, dP, dQ and dK, in the order of the papers.
fn report<F>(
    block: &TileBlock<'_, F>,
    tile: &Tile,
    [d, dv]: [usize; 2],
    observer: &mut impl Observer,
) {
    let (rows, keys) = (tile.rows.len(), block.keys.len());
    for (result, rows, columns, inner) in [
        (Tensor::S, rows, keys, d),
        (Tensor::DV, keys, dv, rows),
        (Tensor::DP, rows, keys, dv),
        (Tensor::DQ, rows, d, keys),
        (Tensor::DK, keys, d, rows),
    ] {
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
}
