//! FlashAttention-2's backward pass (Dao 2023, section 3.1.2, algorithm 2).
//!
//! One number a row, L, is all that is left of the softmax: P = exp(S − L). Δ is made once, before
//! the loops, and stored. dK and dV of a block of keys stay in fast memory while the rows pass by;
//! dQ is loaded, added to and stored at every step.

use super::super::head::{Chip, Head, for_each_group};
use super::super::{BlockSizes, blocks, transfer};
use super::statistics::RowStatistics;
use super::tile::{Recomputed, Rows, Sums};
use super::{Arrived, Shared, prepare, store_rows};
use crate::algorithm::Algorithm;
use crate::backward::{BackwardInputs, GradientsMut};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::mask::Live;
use crate::observe::{Delta, NoObserver, Observer, Operation, Tensor};
use crate::problem::Problem;

/// The gradients of `problem`, with tiles of `sizes`. Every element is written.
///
/// lse is f32 whatever the dtype: in f64 it is made again first, by [`RowStatistics`], or P would be
/// good to f32 only.
///
/// # Errors
/// If `problem` is not the one that `inputs` pose, or a gradient does not have its shape.
pub fn backward<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    gradients: GradientsMut<'_, T>,
) -> Result<()> {
    let [_, heads, seqlen_q] = problem.dims().lse_shape();
    let exact = match T::DTYPE {
        DType::F64 => Some(RowStatistics::<T::Acc>::new(
            problem,
            &inputs.inputs,
            sizes,
            &mut NoObserver,
        )?),
        _ => None,
    };
    let lse = |head: &Head<'_, '_, T>, i: usize| {
        let [b, h, start] = head.q_place();
        let lse = match &exact {
            Some(exact) => exact.lse((b * heads + h) * seqlen_q + start + i),
            None => <T::Acc as Element>::from_f64(inputs.lse.at([b, h, start + i, 0]).into()),
        };
        (lse, num_traits::One::one())
    };
    let weight = |(lse, _): (T::Acc, T::Acc), s: T::Acc| num_traits::Float::exp(s - lse);
    tiled(
        problem,
        inputs,
        sizes,
        observer,
        gradients,
        lse,
        weight,
        Algorithm::Fa2,
    )
}

/// The loops that FA1 and FA2 share. `statistic` is what a row's weights are made from, `weight` how.
/// FA2 makes Δ before the loops, FA1 in every tile.
#[allow(clippy::too_many_arguments)] // a call, and in what two algorithms differ
pub(super) fn tiled<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    mut gradients: GradientsMut<'_, T>,
    statistic: impl Fn(&Head<'_, '_, T>, usize) -> (T::Acc, T::Acc),
    weight: impl Fn((T::Acc, T::Acc), T::Acc) -> T::Acc,
    algorithm: Algorithm,
) -> Result<()> {
    let delta_once = algorithm == Algorithm::Fa2;
    let gathered = prepare(problem, inputs, &mut gradients)?;
    let (problem, given) = gathered.posed(&inputs.inputs);
    let mut shared = Shared::new(problem, &given, &gradients, observer);
    let (d, dv) = (problem.dims().head_dim, problem.dims().head_dim_v);
    let zero = T::Acc::default();
    let mut chip = Chip::<T>::default();
    let mut arrived = Arrived::<T>::default();
    let mut recomputed = Recomputed::default();
    let (mut delta, mut statistics) = (Vec::new(), Vec::new());
    for_each_group(problem, &given, |group| {
        let Some(first) = group.first() else {
            return Ok(());
        };
        let (seqlen_q, seqlen_k) = (first.sequence().seqlen_q, first.sequence().seqlen_k);
        // In slow memory: dQ in the accumulator type, and Δ.
        let mut dq = vec![zero; group.len() * seqlen_q * d];
        let mut deltas = vec![zero; group.len() * seqlen_q];
        observer.store(transfer::<T::Acc>(Tensor::DQSum, dq.len()));
        for (n, head) in group.iter().enumerate() {
            for (i, rows) in blocks(seqlen_q, sizes.rows()) {
                // The sinks' gradients need Δ whoever makes it when; FA1 makes it in the loops.
                let silent = &mut NoObserver;
                if delta_once {
                    arrived.load_dout(inputs, head, &rows, observer);
                    arrived.delta(inputs, head, &rows, observer, &mut delta)?;
                    observer.delta(&Delta {
                        sequence: head.sequence_index(),
                        head: head.index(),
                        row_block: i,
                        values: &delta,
                    });
                    observer.store(transfer::<T::Acc>(Tensor::Delta, rows.len()));
                } else {
                    arrived.load_dout(inputs, head, &rows, silent);
                    arrived.delta(inputs, head, &rows, silent, &mut delta)?;
                }
                deltas[n * seqlen_q + rows.start..][..rows.len()].copy_from_slice(&delta);
            }
            let sink = head.spec(&(0..seqlen_q)).sink();
            if let Some(sink) = sink.filter(|&sink| sink.to_f64() > f64::NEG_INFINITY) {
                shared.add_sink(
                    head.index(),
                    (0..seqlen_q).map(|i| {
                        let p = weight(statistic(head, i), sink).to_f64();
                        (p, deltas[n * seqlen_q + i].to_f64())
                    }),
                );
            }
        }
        for (j, keys) in blocks(seqlen_k, sizes.keys()) {
            let (mut dk_tile, mut dv_tile) =
                (vec![zero; keys.len() * d], vec![zero; keys.len() * dv]);
            let mut keys_are_loaded = false;
            for (n, head) in group.iter().enumerate() {
                for (i, rows) in blocks(seqlen_q, sizes.rows()) {
                    let spec = head.spec(&rows);
                    let tile = head.tile(&spec, i, (j, keys.clone()));
                    if tile.live == Live::None {
                        observer.skip(&tile);
                        continue;
                    }
                    if !keys_are_loaded {
                        head.load_k(&mut chip, &keys, observer);
                        head.load_v(&mut chip, &keys, observer);
                        keys_are_loaded = true;
                    }
                    head.load_q(&mut chip, &rows, observer);
                    arrived.load_dout(inputs, head, &rows, observer);
                    head.load_modifiers(&mut chip, &tile, observer);
                    head.load_keep(&mut chip, &tile, observer);
                    if delta_once {
                        delta.clear();
                        delta.extend_from_slice(&deltas[n * seqlen_q + rows.start..][..rows.len()]);
                        observer.load(transfer::<T::Acc>(Tensor::Delta, rows.len()));
                        observer.load(transfer::<f32>(Tensor::Lse, rows.len()));
                    } else {
                        arrived.delta(inputs, head, &rows, observer, &mut delta)?;
                        observer.load(transfer::<T::Acc>(Tensor::M, rows.len()));
                        observer.load(transfer::<T::Acc>(Tensor::L, rows.len()));
                        // P = e^(S − m)/ℓ.
                        observer.operations(Operation::Divide, rows.len() * keys.len());
                    }
                    statistics.clear();
                    statistics.extend(rows.clone().map(|i| statistic(head, i)));
                    let dq = &mut dq[(n * seqlen_q + rows.start) * d..][..rows.len() * d];
                    observer.load(transfer::<T::Acc>(Tensor::DQSum, dq.len()));
                    recomputed.step(
                        head,
                        &spec,
                        &chip,
                        &tile,
                        Rows {
                            weight: &weight,
                            statistics: &statistics,
                            dout: &arrived.dout,
                            delta: &delta,
                        },
                        Sums {
                            dq,
                            dk: &mut dk_tile,
                            dv: &mut dv_tile,
                        },
                        observer,
                    )?;
                    shared.add_bias(head, &tile, &recomputed.ds, observer);
                    observer.store(transfer::<T::Acc>(Tensor::DQSum, rows.len() * d));
                }
            }
            let (dk, dv) = (&mut gradients.dk, &mut gradients.dv);
            store_rows(dk, first, &keys, &dk_tile, Tensor::DK, observer);
            store_rows(dv, first, &keys, &dv_tile, Tensor::DV, observer);
        }
        for (n, head) in group.iter().enumerate() {
            for (_, rows) in blocks(seqlen_q, sizes.rows()) {
                let from = &dq[(n * seqlen_q + rows.start) * d..][..rows.len() * d];
                observer.load(transfer::<T::Acc>(Tensor::DQSum, from.len()));
                store_rows(&mut gradients.dq, head, &rows, from, Tensor::DQ, observer);
            }
        }
        Ok(())
    })?;
    shared.store(&mut gradients, observer);
    Ok(())
}
