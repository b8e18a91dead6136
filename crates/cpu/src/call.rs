//! One forward call: problem, inputs and outputs together with the machinery, as schedules see them.

use std::sync::Arc;

use tilewise_core::{Element, Inputs, Problem};

use crate::buffer::Reserve;
use crate::head::{Head, Scoring};
use crate::output::Outputs;
use crate::packed::KeySource;
use crate::tile::{Machinery, TileState};

/// One KV head of one sequence: what is packed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvHead {
    /// Number of the sequence.
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
}

/// One forward call.
pub(crate) struct Call<'a, T: Element> {
    pub(crate) machinery: Machinery<T>,
    pub(crate) problem: &'a Problem,
    pub(crate) inputs: &'a Inputs<'a, T>,
    pub(crate) outputs: &'a Outputs<'a, T>,
    pub(crate) scoring: Scoring<T::Acc>,
    pub(crate) reserve: &'a Arc<Reserve>,
}

// SAFETY: the pointers inside lead to inputs (read only) and outputs (rows written once each).
unsafe impl<T: Element> Sync for Call<'_, T> {}

impl<T: Element> Call<'_, T> {
    /// Every KV head of every sequence that has queries.
    pub(crate) fn kv_heads(&self) -> Vec<KvHead> {
        let heads = match self.problem.dims().num_heads {
            0 => 0,
            _ => self.problem.dims().num_kv_heads,
        };
        let sequences = self.problem.sequences().iter().enumerate();
        sequences
            .filter(|(_, sequence)| sequence.seqlen_q > 0)
            .flat_map(|(sequence, _)| (0..heads).map(move |kv_head| KvHead { sequence, kv_head }))
            .collect()
    }

    /// The longest sequence's used keys.
    pub(crate) fn most_keys(&self) -> usize {
        self.problem
            .sequences()
            .iter()
            .map(|s| s.seqlen_k)
            .max()
            .unwrap_or(0)
    }

    /// The most rows of a sequence.
    pub(crate) fn most_rows(&self) -> usize {
        self.problem
            .sequences()
            .iter()
            .map(|s| s.seqlen_q)
            .max()
            .unwrap_or(0)
    }

    pub(crate) fn source(&self, at: KvHead) -> KeySource<'_, T> {
        KeySource::new(
            self.inputs,
            &self.problem.sequences()[at.sequence],
            at.kv_head,
        )
    }

    /// The `n`th query head of a KV head's group.
    pub(crate) fn head(&self, at: KvHead, n: usize) -> Head<T> {
        let sequence = &self.problem.sequences()[at.sequence];
        let head = at.kv_head * self.problem.dims().group() + n;
        // Keys of bias and mask are counted along the tensors' key axis; pages have their own.
        let bias_key = sequence.k_start;
        Head::new(
            self.problem,
            self.inputs,
            at.sequence,
            head,
            self.scoring,
            0,
            bias_key,
        )
    }

    /// Finishes rows `first..first + rows` of a head from their state.
    ///
    /// # Safety
    /// The rows belong to the head and are finished by no one else; the state covers them.
    #[allow(clippy::too_many_arguments)] // which rows, their state and what it holds
    pub(crate) unsafe fn finish(
        &self,
        at: KvHead,
        n: usize,
        head: &Head<T>,
        first: usize,
        rows: usize,
        state: TileState<T::Acc>,
        normalised: bool,
    ) {
        let sequence = &self.problem.sequences()[at.sequence];
        let place = [
            sequence.q_batch,
            at.kv_head * self.problem.dims().group() + n,
            sequence.q_start + first,
        ];
        let Machinery { kernels, shape } = &self.machinery;
        // SAFETY: the caller's promise.
        unsafe {
            self.outputs.finish(
                kernels,
                shape,
                place,
                rows,
                state,
                self.scoring.unit,
                head.sink,
                normalised,
            );
        }
    }

    /// Rows of q behind the last packed sequence belong to none: out 0, lse −∞.
    pub(crate) fn write_rows_of_no_sequence(&self) {
        let dims = self.problem.dims();
        if !self.problem.is_packed() {
            return;
        }
        let end = self
            .problem
            .sequences()
            .last()
            .map_or(0, |s| s.q_start + s.seqlen_q);
        for head in 0..dims.num_heads {
            for row in end..dims.seqlen_q {
                // SAFETY: no sequence has these rows, so no one else writes them.
                unsafe {
                    self.outputs
                        .write_empty(&self.machinery.shape, [0, head, row])
                }
            }
        }
    }
}
