//! FlashAttention (Dao et al. 2022, Algorithm 1): outer loop over K/V blocks, inner over Q blocks. O
//! stays normalised and goes through memory with ℓ and m at every step.
//!
//! The step is the trait's: O = finish(merge(state, absorb(begin, block))), line by line
//!
//! ```text
//! m_new = max(m, m̃)      ℓ_new = e^(m − m_new) ℓ + e^(m̃ − m_new) ℓ̃
//! O = (ℓ e^(m − m_new) O + e^(m̃ − m_new) P̃ V) / ℓ_new
//! ```
//!
//! The papers run one head on one processor; where there are fewer heads than threads, stretches of
//! query rows run apart, each with its own outer loop.

use std::ops::Range;
use std::sync::Arc;

use num_traits::Float as _;
use tilewise_core::{Element, Result};

use crate::buffer::{Buffer, Reserve};
use crate::call::{Call, KvHead};
use crate::packed::Packed;
use crate::parallel::{in_order, threads};
use crate::shape::Shape;
use crate::tile::{Scratch, TileState};

/// Memory besides inputs and outputs.
pub(crate) fn workspace_bytes<T: Element>(
    shape: &Shape,
    group: usize,
    rows: usize,
    keys: usize,
) -> u64 {
    let (k, v) = Packed::<T>::elements(shape, keys);
    let padded = group * (shape.padded(rows) + threads() * shape.q_tile);
    // Q packed and the step's own state, and O, ℓ and m as the algorithm keeps them.
    let elements = k + v + padded * (shape.head_dim + 2 * (shape.width + 2));
    elements as u64 * size_of::<T::Acc>() as u64
}

/// Runs the call.
pub(crate) fn forward<T: Element>(call: &Call<'_, T>) -> Result<()> {
    let machinery = &call.machinery;
    let shape = &machinery.shape;
    let group = call.problem.dims().group();
    let threads = threads();
    let packed = Packed::<T>::new(shape, call.most_keys(), call.reserve)?;
    for at in call.kv_heads() {
        let keys = call.source(at).keys;
        // SAFETY: the room fits the longest sequence, and whoever read the last head is done.
        unsafe { machinery.pack_all(&packed, keys, || call.source(at)) };
        let seqlen_q = call.problem.sequences()[at.sequence].seqlen_q;
        let stretch = seqlen_q
            .div_ceil(threads.div_ceil(group))
            .next_multiple_of(shape.q_tile)
            .min(seqlen_q);
        let stretches: Vec<(usize, Range<usize>)> = (0..group)
            .flat_map(|n| (0..seqlen_q).step_by(stretch).map(move |first| (n, first)))
            .map(|(n, first)| (n, first..(first + stretch).min(seqlen_q)))
            .collect();
        // Memory for all stretches before any work: running out of it is an error, not a panic.
        let workspaces = stretches
            .iter()
            .map(|(_, rows)| {
                Workspace::new(shape, rows.len(), call.reserve)
                    .map(|w| std::sync::Mutex::new(Some(w)))
            })
            .collect::<Result<Vec<_>>>()?;
        in_order(
            stretches.len(),
            threads,
            || (),
            |_, (), item| {
                let (n, rows) = &stretches[item];
                let mut slot = workspaces[item].lock().unwrap_or_else(|e| e.into_inner());
                if let Some(mut workspace) = slot.take() {
                    // SAFETY: the head is packed; rows are handed out once.
                    unsafe { head(call, at, *n, rows, &packed, &mut workspace) }
                }
            },
        );
    }
    Ok(())
}

/// What the algorithm keeps in memory for some rows of a head.
struct Workspace<T: Element> {
    /// Packed Q and the state of one step, (m̃, ℓ̃, P̃ V).
    step: Scratch<T>,
    o: Buffer<T::Acc>,
    m: Buffer<T::Acc>,
    l: Buffer<T::Acc>,
}

impl<T: Element> Workspace<T> {
    fn new(shape: &Shape, rows: usize, reserve: &Arc<Reserve>) -> Result<Self> {
        let padded = shape.padded(rows);
        Ok(Workspace {
            step: Scratch::new(shape, rows, reserve)?,
            o: Buffer::new(padded * shape.width, "normalised output")?,
            m: Buffer::new(padded, "row maxima")?,
            l: Buffer::new(padded, "denominators")?,
        })
    }
}

/// One head: the algorithm's two loops.
///
/// # Safety
/// The rows belong to the head, whose keys are packed, and are written by no one else.
unsafe fn head<T: Element>(
    call: &Call<'_, T>,
    at: KvHead,
    n: usize,
    rows: &Range<usize>,
    packed: &Packed<T>,
    workspace: &mut Workspace<T>,
) {
    let machinery = &call.machinery;
    let shape = &machinery.shape;
    let head = call.head(at, n);
    let keys = call.problem.sequences()[at.sequence].seqlen_k;
    let kept = TileState {
        m: workspace.m.at(),
        l: workspace.l.at(),
        acc: workspace.o.at(),
    };
    // SAFETY: the workspace was made for these rows; the rest is the caller's promise.
    unsafe {
        kept.begin(shape, rows.len());
        let seen = machinery.take_rows(&head, rows, keys, &mut workspace.step);
        let scratch = &workspace.step;
        let step = scratch.state();
        for tile in machinery.tiles(&seen) {
            machinery.blocks(
                &head,
                packed,
                rows,
                tile,
                scratch,
                step,
                |first, block, modifiers| {
                    let state = step.row(shape, first);
                    state.begin(shape, block.rows);
                    machinery.kernels.absorb(block, modifiers);
                    let kept = kept.row(shape, first);
                    for row in 0..block.rows {
                        let (kept, state) = (kept.row(shape, row), state.row(shape, row));
                        fold(call, kept, state, block.c);
                    }
                },
            );
        }
        call.finish(at, n, &head, rows.start, rows.len(), kept, true);
    }
}

/// Lines 11 to 13 of the algorithm for one row.
///
/// # Safety
/// Both states cover a row.
unsafe fn fold<T: Element>(
    call: &Call<'_, T>,
    kept: TileState<T::Acc>,
    step: TileState<T::Acc>,
    c: T::Acc,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (m, m_step) = (kept.m.read(), step.m.read());
        let (l, l_step) = (kept.l.read(), step.l.read());
        if l_step == <T::Acc as Element>::from_f64(0.0) {
            return;
        }
        let m_new = m.max(m_step);
        let base = if m_new == T::Acc::neg_infinity() {
            <T::Acc as Element>::from_f64(0.0)
        } else {
            m_new
        };
        let old = ((m - base) * c).exp2() * l;
        let new = ((m_step - base) * c).exp2();
        let l_new = old + new * l_step;
        kept.m.write(m_new);
        kept.l.write(l_new);
        let width = call.machinery.shape.width;
        (call.machinery.kernels.tile.combine)(width, old / l_new, kept.acc, new / l_new, step.acc);
    }
}
