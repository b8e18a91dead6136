//! FlashAttention-2 (Dao 2023, section 3.1, algorithm 1): rows outside, keys inside.
//!
//! Õ, m and ℓ of a block of rows stay in fast memory while the keys pass by; Õ is not normalised
//! before the end, so a step costs one factor α a row, and out and lse are stored once. Tiles with
//! no live key are passed over, and only tiles on an edge test their elements (section 3.1.1).

use super::head::{Chip, for_each_head};
use super::{BlockSizes, blocks, prepare};
use crate::dtype::Element;
use crate::error::Result;
use crate::inputs::Inputs;
use crate::mask::Live;
use crate::observe::{Observer, Operation, Step};
use crate::online::OnlineSoftmax;
use crate::problem::Problem;
use crate::tile::{TileMath, TileOutput};
use crate::view::TensorViewMut;

/// out and lse of `problem`, with tiles of `sizes`.
///
/// `out` is `[batch, num_heads, seqlen_q, head_dim_v]`, `lse` `[batch, num_heads, seqlen_q]` as a view whose
/// last axis is 1. Every element of both is written.
///
/// # Errors
/// If `problem` is not the one that `inputs` pose, or an output does not have its shape.
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
    let math = TileMath::<T::Acc>::new();
    let width = problem.dims().head_dim_v;
    let mut chip = Chip::<T>::default();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for_each_head(problem, &inputs, |head| {
        let sequence = head.sequence();
        for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
            head.load_q(&mut chip, &rows, observer);
            let spec = head.spec(&rows);
            let mut state = math.begin(&spec)?;
            for key_block in blocks(sequence.seqlen_k, sizes.keys()) {
                let tile = head.tile(&spec, i, key_block);
                if tile.live == Live::None {
                    observer.skip(&tile);
                    continue;
                }
                head.load_k(&mut chip, &tile.keys, observer);
                head.load_v(&mut chip, &tile.keys, observer);
                head.load_modifiers(&mut chip, &tile, observer);
                head.load_keep(&mut chip, &tile, observer);
                math.absorb(&mut state, head.block(&chip, &tile))?;
                head.report_tile(&tile, state.scores(), observer);
                observer.operations(Operation::Rescale, rows.len() * width);
                observer.step(&Step {
                    tile: &tile,
                    block: None,
                    alpha: state.alpha(),
                    m: state.m(),
                    l: state.l(),
                    o: state.acc(),
                });
            }
            out.resize(rows.len() * width, T::Acc::default());
            lse.resize(rows.len(), T::Acc::default());
            math.finish(
                state,
                TileOutput {
                    out: &mut out,
                    lse: &mut lse,
                },
            )?;
            observer.operations(Operation::Divide, rows.len() * width);
            head.report_finish(i, &out, &lse, observer);
            outputs.store(head, &rows, &out, &lse, observer);
        }
        Ok(())
    })
}
