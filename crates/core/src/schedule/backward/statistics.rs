//! What the forward pass keeps of each row for the backward pass.

use super::super::head::{Chip, for_each_head};
use super::super::{BlockSizes, blocks};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::inputs::Inputs;
use crate::mask::Live;
use crate::observe::Observer;
use crate::paged::gather;
use crate::problem::Problem;
use crate::softmax::{exponent_base, max_or_nan};

/// FA1's m and ℓ of every row, sinks included: `[batch, num_heads, seqlen_q]`, row-major. A row that
/// saw no key (and has no sink) has m = −∞ and ℓ = 0.
#[derive(Clone, Debug, PartialEq)]
pub struct RowStatistics<F> {
    /// Row maxima.
    pub m: Vec<F>,
    /// Σ e^(s − m).
    pub l: Vec<F>,
}

impl<F: Float> RowStatistics<F> {
    /// One pass over the keys, without values.
    ///
    /// # Errors
    /// If `problem` is not the one that `inputs` pose, or pages cannot be gathered.
    pub fn new<T: Element<Acc = F>>(
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        sizes: BlockSizes,
        observer: &mut impl Observer,
    ) -> Result<Self> {
        let gathered = gather(problem, inputs)?;
        let (problem, inputs) = gathered.posed(inputs);
        let [batch, heads, seqlen_q] = problem.dims().lse_shape();
        let rows = batch * heads * seqlen_q;
        let mut statistics = RowStatistics {
            m: vec![F::neg_infinity(); rows],
            l: vec![F::zero(); rows],
        };
        let mut chip = Chip::<T>::default();
        let mut scores = Vec::new();
        for_each_head(problem, &inputs, |head| {
            let sequence = head.sequence();
            let [b, h, start] = head.q_place();
            let first = (b * heads + h) * seqlen_q + start;
            for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
                head.load_q(&mut chip, &rows, observer);
                let spec = head.spec(&rows);
                let at = first + rows.start..first + rows.end;
                let (m, l) = (&mut statistics.m[at.clone()], &mut statistics.l[at]);
                if let Some(sink) = spec.sink().filter(|&sink| sink != F::neg_infinity()) {
                    m.fill(sink);
                    l.fill(F::one());
                }
                for key_block in blocks(sequence.seqlen_k, sizes.keys()) {
                    let tile = head.tile(&spec, i, key_block);
                    if tile.live == Live::None {
                        observer.skip(&tile);
                        continue;
                    }
                    head.load_k(&mut chip, &tile.keys, observer);
                    head.load_modifiers(&mut chip, &tile, observer);
                    spec.scores(&head.block(&chip, &tile), &mut scores)?;
                    head.report_scores(&tile, &scores, observer);
                    let rows = scores.chunks(tile.keys.len());
                    for (scores, (m, l)) in rows.zip(m.iter_mut().zip(l.iter_mut())) {
                        let new = scores.iter().fold(*m, |m, &s| max_or_nan(m, s));
                        let base = exponent_base(new);
                        let sum: F = scores.iter().map(|&s| (s - base).exp()).sum();
                        *l = *l * (*m - base).exp() + sum;
                        *m = new;
                    }
                }
            }
            Ok(())
        })?;
        Ok(statistics)
    }

    /// L = m + ln ℓ of row `n`; −∞ where no key was seen.
    pub fn lse(&self, n: usize) -> F {
        if self.m[n] == F::neg_infinity() {
            self.m[n]
        } else {
            self.m[n] + self.l[n].ln()
        }
    }
}
