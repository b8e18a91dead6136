//! `standard` and `fa1`: core's schedules, one KV head of one sequence an item. Baselines to compare
//! with, not made for speed.

use std::ops::Range;

use tilewise_core::observe::NoObserver;
use tilewise_core::schedule::backward::backward as run;
use tilewise_core::{
    Algorithm, BackwardInputs, BlockSizes, Dropout, Element, Error, Gradients, GradientsMut,
    Inputs, Options, Problem, Result, Sequence, TensorView, keep_mask,
};

use crate::parallel::{in_order, threads};

/// Rows and keys of a tile.
const TILE: usize = 64;

/// Memory besides inputs and outputs.
pub(super) fn workspace_bytes<T: Element>(problem: &Problem, algorithm: Algorithm) -> u64 {
    let longest = problem
        .sequences()
        .iter()
        .map(|s| (s.seqlen_q as u64).saturating_mul(s.seqlen_k as u64))
        .max()
        .unwrap_or(0);
    let size = size_of::<T::Acc>() as u64;
    let (group, threads) = (problem.dims().group() as u64, threads() as u64);
    let mut bytes = match algorithm {
        Algorithm::Standard => 4 * longest.saturating_mul(size),
        _ => 0,
    };
    if problem.has_bias() {
        bytes = bytes.saturating_add(2 * group * longest.saturating_mul(size));
    }
    if problem.options().get_dropout().is_some() {
        bytes = bytes.saturating_add(group * longest);
    }
    bytes.saturating_mul(threads)
}

/// Runs the call. Pages have been gathered.
pub(super) fn backward<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    algorithm: Algorithm,
    mut gradients: GradientsMut<'_, T>,
) -> Result<()> {
    let kv_heads = problem.dims().num_kv_heads;
    let count = problem.sequences().len() * kv_heads;
    // The mask of the whole problem: positions of a part are not those of the whole.
    let keep = match problem.options().get_dropout() {
        Some(Dropout::Philox { .. }) => keep_mask(problem, &inputs.inputs)?,
        _ => None,
    };
    let parts: Vec<std::sync::Mutex<Option<Result<Gradients<T>>>>> =
        (0..count).map(|_| std::sync::Mutex::new(None)).collect();
    in_order(
        count,
        threads(),
        || (),
        |_, (), item| {
            let (sequence, kv_head) = (item / kv_heads, item % kv_heads);
            let part = one(
                problem,
                inputs,
                keep.as_deref(),
                sequence,
                kv_head,
                algorithm,
            );
            *parts[item].lock().unwrap_or_else(|e| e.into_inner()) = Some(part);
        },
    );
    gradients.dq.fill(T::default());
    gradients.dk.fill(T::default());
    gradients.dv.fill(T::default());
    let shape = inputs.inputs.bias.map_or([0; 4], |bias| bias.shape());
    let mut dbias = vec![0.0; shape.iter().product()];
    let mut dsinks = vec![0.0; problem.dims().num_heads];
    for (item, part) in parts.into_iter().enumerate() {
        let part = part.into_inner().unwrap_or_else(|e| e.into_inner());
        let Some(part) = part else { continue };
        let (part, at) = (part?, Place::new(problem, item / kv_heads, item % kv_heads));
        at.join(part, &mut gradients, (&mut dbias, shape), &mut dsinks);
    }
    if let Some(view) = &mut gradients.dbias {
        view.fill(T::default());
        for row in 0..shape[0] * shape[1] * shape[2] {
            let (b, h, i) = (
                row / shape[2] / shape[1],
                row / shape[2] % shape[1],
                row % shape[2],
            );
            let sums = &dbias[row * shape[3]..][..shape[3]];
            for (to, &sum) in view.row_mut(b, h, i).iter_mut().zip(sums) {
                *to = T::from_f64(sum);
            }
        }
    }
    if let Some(to) = gradients.dsinks {
        for (to, sum) in to.iter_mut().zip(dsinks) {
            *to = sum as f32;
        }
    }
    Ok(())
}

/// One KV head of one sequence, with the query heads that share it.
struct Place<'p> {
    sequence: &'p Sequence,
    kv_head: usize,
    heads: Range<usize>,
}

impl<'p> Place<'p> {
    fn new(problem: &'p Problem, sequence: usize, kv_head: usize) -> Self {
        let group = problem.dims().group();
        Place {
            sequence: &problem.sequences()[sequence],
            kv_head,
            heads: kv_head * group..(kv_head + 1) * group,
        }
    }

    fn rows(&self) -> Range<usize> {
        self.sequence.q_start..self.sequence.q_start + self.sequence.seqlen_q
    }

    fn keys(&self) -> Range<usize> {
        self.sequence.k_start..self.sequence.k_start + self.sequence.seqlen_k
    }

    /// Rows of q, or of what is shaped like it.
    fn queries<'a, U: Copy>(&self, view: &TensorView<'a, U>) -> TensorView<'a, U> {
        view.narrow(0, self.sequence.q_batch..self.sequence.q_batch + 1)
            .narrow(1, self.heads.clone())
            .narrow(2, self.rows())
    }

    fn kv<'a, U: Copy>(&self, view: &TensorView<'a, U>) -> TensorView<'a, U> {
        view.narrow(0, self.sequence.k_batch..self.sequence.k_batch + 1)
            .narrow(1, self.kv_head..self.kv_head + 1)
            .narrow(2, self.keys())
    }

    /// Bias or mask: broadcast axes stay as they are.
    fn pairs<'a, U: Copy>(&self, view: &TensorView<'a, U>) -> TensorView<'a, U> {
        let batch = self.sequence.q_batch..self.sequence.q_batch + 1;
        let mut part = *view;
        for (axis, range) in [batch, self.heads.clone(), self.rows(), self.keys()]
            .into_iter()
            .enumerate()
        {
            if view.shape()[axis] != 1 {
                part = part.narrow(axis, range);
            }
        }
        part
    }

    fn join<T: Element>(
        &self,
        part: Gradients<T>,
        gradients: &mut GradientsMut<'_, T>,
        (dbias, shape): (&mut [f64], [usize; 4]),
        dsinks: &mut [f64],
    ) {
        let sequence = self.sequence;
        let copy = |to: &mut [T], from: &[T], row: usize| {
            let width = to.len();
            to.copy_from_slice(&from[row * width..][..width]);
        };
        for (row, (h, i)) in (self.heads.clone())
            .flat_map(|h| self.rows().map(move |i| (h, i)))
            .enumerate()
        {
            copy(gradients.dq.row_mut(sequence.q_batch, h, i), &part.dq, row);
        }
        for (row, j) in self.keys().enumerate() {
            let (b, h) = (sequence.k_batch, self.kv_head);
            copy(gradients.dk.row_mut(b, h, j), &part.dk, row);
            copy(gradients.dv.row_mut(b, h, j), &part.dv, row);
        }
        for (to, from) in dsinks[self.heads.clone()]
            .iter_mut()
            .zip(part.dsinks.iter().flatten())
        {
            *to += f64::from(*from);
        }
        let Some(from) = &part.dbias else { return };
        let mut from = from.iter();
        let start = [
            sequence.q_batch,
            self.heads.start,
            sequence.q_start,
            sequence.k_start,
        ];
        let len = [1, self.heads.len(), sequence.seqlen_q, sequence.seqlen_k];
        let axis = |axis: usize| {
            if shape[axis] == 1 {
                0..1
            } else {
                start[axis]..start[axis] + len[axis]
            }
        };
        for b in axis(0) {
            for h in axis(1) {
                for i in axis(2) {
                    for j in axis(3) {
                        let at = ((b * shape[1] + h) * shape[2] + i) * shape[3] + j;
                        dbias[at] += from.next().map_or(0.0, |x| x.to_f64());
                    }
                }
            }
        }
    }
}

/// The gradients of one KV head of one sequence.
fn one<T: Element>(
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    keep: Option<&[u8]>,
    sequence: usize,
    kv_head: usize,
    algorithm: Algorithm,
) -> Result<Gradients<T>> {
    let at = Place::new(problem, sequence, kv_head);
    let (given, dims) = (&inputs.inputs, problem.dims());
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    let of_heads = |values: Option<&[f32]>| values.map(|values| values[at.heads.clone()].to_vec());
    let mut options: Options = problem.options().clone();
    options = options
        .softmax_scale(problem.softmax_scale())
        .alibi_slopes(of_heads(problem.options().get_alibi_slopes()))
        .sinks(of_heads(problem.options().get_sinks()));
    let keep = match keep {
        Some(keep) => {
            let p = problem.options().get_dropout().map_or(0.0, |d| d.p());
            options = options.dropout(Dropout::Mask { p });
            Some(TensorView::bhsd(keep, full).map_err(|e: Error| e.named("keep_mask"))?)
        }
        None => given.keep_mask,
    };
    let part = Inputs::new(at.queries(&given.q), at.kv(&given.k), at.kv(&given.v))
        .bias(given.bias.as_ref().map(|bias| at.pairs(bias)))
        .mask(given.mask.as_ref().map(|mask| at.pairs(mask)))
        .keep_mask(keep.as_ref().map(|keep| at.pairs(keep)));
    let part = BackwardInputs::new(
        part,
        at.queries(&inputs.out),
        at.queries(&inputs.lse),
        at.queries(&inputs.dout),
    )
    .dlse(inputs.dlse.as_ref().map(|dlse| at.queries(dlse)));
    let problem = part.problem(&options)?;
    let mut gradients = Gradients::filled(&problem, &part.inputs, 0.0)?;
    let sizes = BlockSizes::new(TILE, TILE)?;
    let views = gradients.views_mut()?;
    run(algorithm, &problem, &part, sizes, &mut NoObserver, views)?;
    Ok(gradients)
}
