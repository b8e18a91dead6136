//! Standard attention (Dao et al. 2022, Algorithm 0): S is written to memory, P takes its place, and
//! P V is a third pass. The products run on the same microkernel as the fused schedules, so that what
//! differs is what tiling saves.
//!
//! S lies in strips as the kernels write them, `[tile of keys][row][s_stride]`: N² numbers a head.

use std::ops::Range;

use tilewise_core::{Element, Result};

use crate::buffer::Buffer;
use crate::call::{Call, KvHead};
use crate::kernel::{Block, MAX_MR, Modifiers, s_stride};
use crate::packed::Packed;
use crate::parallel::{in_order, threads};
use crate::shape::Shape;
use crate::tile::Scratch;

/// Elements of S for one head.
fn score_elements<T: Element>(shape: &Shape, rows: usize, keys: usize) -> Option<usize> {
    let padded = shape.padded(rows).checked_add(MAX_MR)?;
    keys.div_ceil(shape.key_tile)
        .checked_mul(padded)?
        .checked_mul(s_stride::<T::Acc>())
}

/// Memory besides inputs and outputs.
pub(crate) fn workspace_bytes<T: Element>(shape: &Shape, rows: usize, keys: usize) -> u64 {
    let (k, v) = Packed::<T>::elements(shape, keys);
    let padded = shape.padded(rows) as u64;
    let scores = (keys.div_ceil(shape.key_tile) as u64)
        .saturating_mul(padded)
        .saturating_mul(s_stride::<T::Acc>() as u64);
    let state = padded * (shape.head_dim + shape.width + 2) as u64;
    scores
        .saturating_add((k + v) as u64 + state)
        .saturating_mul(size_of::<T::Acc>() as u64)
}

/// Runs the call: one head after another, the rows of a head in parallel.
pub(crate) fn forward<T: Element>(call: &Call<'_, T>) -> Result<()> {
    let machinery = &call.machinery;
    let shape = &machinery.shape;
    let threads = threads();
    let (rows, keys) = (call.most_rows(), call.most_keys());
    let packed = Packed::<T>::new(shape, keys, call.reserve)?;
    let too_large = tilewise_core::Error::OutOfMemory {
        backend: "cpu".into(),
        what: "scores of a head".into(),
        bytes: u64::MAX,
    };
    let scores = Buffer::new(
        score_elements::<T>(shape, rows, keys).ok_or(too_large)?,
        "scores of a head",
    )?;
    let tiles = rows.div_ceil(shape.q_tile);
    let stripes = (0..tiles)
        .map(|_| {
            Scratch::new(shape, rows.min(shape.q_tile), call.reserve).map(std::sync::Mutex::new)
        })
        .collect::<Result<Vec<_>>>()?;
    for at in call.kv_heads() {
        let keys = call.source(at).keys;
        // SAFETY: the room fits the longest sequence, and whoever read the last head is done.
        unsafe { machinery.pack_all(&packed, keys, || call.source(at)) };
        let seqlen_q = call.problem.sequences()[at.sequence].seqlen_q;
        for n in 0..call.problem.dims().group() {
            let stripe = |tile: usize| Stripe {
                at,
                n,
                rows: tile * shape.q_tile..((tile + 1) * shape.q_tile).min(seqlen_q),
                padded: shape.padded(seqlen_q),
            };
            let count = seqlen_q.div_ceil(shape.q_tile);
            // Three passes over all of S, each ended before the next begins.
            for pass in [Pass::Scores, Pass::Softmax, Pass::Values] {
                in_order(
                    count,
                    threads,
                    || (),
                    |_, (), tile| {
                        let mut scratch = stripes[tile].lock().unwrap_or_else(|e| e.into_inner());
                        // SAFETY: the head is packed; a stripe's rows of S, scratch and outputs are its own.
                        unsafe { stripe(tile).run(call, &packed, &scores, &mut scratch, pass) }
                    },
                );
            }
        }
    }
    Ok(())
}

/// What a pass does with a block.
type Step<'a, T> = &'a dyn Fn(&Block<<T as Element>::Acc>, Option<&Modifiers<T>>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// S = q kᵀ.
    Scores,
    /// P = softmax S.
    Softmax,
    /// O = P V.
    Values,
}

/// Some rows of a head.
struct Stripe {
    at: KvHead,
    n: usize,
    rows: Range<usize>,
    /// Rows of S a tile of keys.
    padded: usize,
}

impl Stripe {
    /// # Safety
    /// The head is packed, earlier passes have run, and no one else has these rows.
    unsafe fn run<T: Element>(
        &self,
        call: &Call<'_, T>,
        packed: &Packed<T>,
        scores: &Buffer<T::Acc>,
        scratch: &mut Scratch<T>,
        pass: Pass,
    ) {
        let machinery = &call.machinery;
        let (shape, kernels) = (&machinery.shape, &machinery.kernels);
        let head = call.head(self.at, self.n);
        let keys = call.problem.sequences()[self.at.sequence].seqlen_k;
        let state = scratch.state();
        let rows = &self.rows;
        // SAFETY: the caller's promise; S has room for all tiles of all rows.
        unsafe {
            if pass == Pass::Scores {
                state.begin(shape, rows.len());
            }
            let seen = machinery.take_rows(&head, rows, keys, scratch);
            let scratch = &*scratch;
            let each = |step: Step<'_, T>| {
                for tile in machinery.tiles(&seen) {
                    machinery.blocks(
                        &head,
                        packed,
                        rows,
                        tile,
                        scratch,
                        state,
                        |first, block, modifiers| {
                            let row = tile * self.padded + rows.start + first;
                            block.s = scores.at().add(row * s_stride::<T::Acc>());
                            step(block, modifiers);
                        },
                    );
                }
            };
            match pass {
                Pass::Scores => each(&|block, modifiers| kernels.scores(block, modifiers)),
                Pass::Softmax => {
                    each(&|block, _| (kernels.tile.maxima)(block));
                    each(&|block, _| (kernels.tile.exponentiate)(block));
                    each(&|block, _| (kernels.tile.normalise)(block));
                }
                Pass::Values => {
                    each(&|block, modifiers| kernels.values(block, modifiers));
                    // P is normalised, so Õ is O.
                    call.finish(self.at, self.n, &head, rows.start, rows.len(), state, true);
                }
            }
        }
    }
}
