//! Few queries (decoding): FlashAttention-2 with its keys split, the heads of a group as rows of one
//! block, keys and values read once, from where they lie.
//!
//! The keys are cut at absolute positions that follow from seqlen_k alone, each part has a state of
//! its own, and whoever finishes a head's last part joins them in order: bits depend neither on
//! the number of threads nor on who was first. ("Split-K", or flash decoding: Dao, Haziza, Massa and
//! Sizov 2023.)

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use num_traits::Float as _;
use tilewise_core::{Element, Float, Result};

use crate::buffer::Buffer;
use crate::call::{Call, KvHead};
use crate::head::Head;
use crate::kernel::few::{Unpacked, place};
use crate::kernel::{Ahead, Block, MAX_MR, Modifiers, max_key_tile, s_stride};
use crate::packed::KeySource;
use crate::parallel::{in_order, threads};
use crate::shape::Shape;
use crate::tile::TileState;

/// Rows of a group up to which this schedule is the faster one.
pub(crate) const MOST_ROWS: usize = 32;

/// Keys of a part: enough to make up for the joining, few enough to give all threads work.
const KEYS_A_PART: usize = 512;

/// Parts of the longest sequences, which have longer ones instead.
const MOST_PARTS: usize = 128;

/// Whether the rows of `at` are few, and its keys such that they can be read in place.
pub(crate) fn is_for<T: Element>(call: &Call<'_, T>, at: KvHead) -> bool {
    let rows = call.problem.dims().group() * call.problem.sequences()[at.sequence].seqlen_q;
    rows <= MOST_ROWS && call.source(at).is_contiguous(&call.machinery.shape)
}

/// Keys of each part of a sequence but the last.
fn part_keys<A>(keys: usize) -> usize {
    let part = keys
        .div_ceil(MOST_PARTS)
        .next_multiple_of(max_key_tile::<A>());
    part.max(KEYS_A_PART)
}

/// One part of one head.
struct Part {
    head: usize,
    keys: Range<usize>,
    /// Row of the state buffers at which its state stands.
    row: usize,
}

/// What a worker needs.
struct Scratch<T: Element> {
    strip: Buffer<T::Acc>,
    /// Queries of a group, and Õ as it was before a tile.
    q: Buffer<T::Acc>,
    saved: Buffer<T::Acc>,
}

/// Memory besides inputs and outputs, for `rows` rows a group.
pub(crate) fn workspace_bytes<T: Element>(
    shape: &Shape,
    heads: usize,
    rows: usize,
    keys: usize,
) -> u64 {
    let parts = keys.div_ceil(part_keys::<T::Acc>(keys)).max(1) * heads;
    let states = parts * rows * (shape.width + 2);
    let q = rows * shape.head_dim.next_multiple_of(crate::simd::MAX_LANES);
    let scratch = threads() * (q + rows * shape.width + MAX_MR * s_stride::<T::Acc>());
    ((states + scratch) * size_of::<T::Acc>() + parts * size_of::<Part>() + heads * 64) as u64
}

/// Runs the heads in `heads`.
pub(crate) fn forward<T: Element>(call: &Call<'_, T>, heads: &[KvHead]) -> Result<()> {
    let shape = &call.machinery.shape;
    let group = call.problem.dims().group();
    let rows_of = |at: &KvHead| group * call.problem.sequences()[at.sequence].seqlen_q;
    let mut parts = Vec::new();
    let mut left = Vec::with_capacity(heads.len());
    let mut firsts = Vec::with_capacity(heads.len());
    let mut rows = 0;
    for (head, at) in heads.iter().enumerate() {
        let sequence = &call.problem.sequences()[at.sequence];
        let seen = call.problem.mask_rule(sequence).keys(0..sequence.seqlen_q);
        let step = part_keys::<T::Acc>(sequence.seqlen_k);
        let before = parts.len();
        firsts.push(before);
        // A head that sees nothing still has rows to write: one part without keys.
        let numbers = if seen.is_empty() {
            0..1
        } else {
            seen.start / step..seen.end.div_ceil(step)
        };
        for number in numbers {
            let keys = (number * step).max(seen.start)..((number + 1) * step).min(seen.end);
            parts.push(Part {
                head,
                keys,
                row: rows,
            });
            rows += rows_of(at);
        }
        left.push(AtomicUsize::new(parts.len() - before));
    }
    firsts.push(parts.len());
    let m = Buffer::<T::Acc>::new(rows, "states of parts")?;
    let l = Buffer::<T::Acc>::new(rows, "states of parts")?;
    let acc = Buffer::<T::Acc>::new(rows * shape.width, "states of parts")?;
    let state = |part: &Part| TileState {
        m: m.at().wrapping_add(part.row),
        l: l.at().wrapping_add(part.row),
        acc: acc.at().wrapping_add(part.row * shape.width),
    };

    let most_rows = heads.iter().map(rows_of).max().unwrap_or(0);
    let q_stride = shape
        .head_dim
        .next_multiple_of(call.machinery.kernels.tile.lanes);
    let workers = threads().min(parts.len());
    let scratches = (0..workers)
        .map(|_| {
            Ok(Scratch {
                strip: Buffer::new(MAX_MR * s_stride::<T::Acc>(), "scores of a tile")?,
                q: Buffer::new(most_rows * q_stride, "queries of a group")?,
                saved: Buffer::new(MAX_MR * shape.width, "state of a tile")?,
            })
        })
        .collect::<Result<Vec<Scratch<T>>>>()?;
    let scratches = Mutex::new(scratches);

    in_order(
        parts.len(),
        workers,
        || {
            let mut scratches = scratches.lock().unwrap_or_else(|e| e.into_inner());
            scratches
                .pop()
                .expect("one scratch was made for each worker")
        },
        |_, scratch, item| {
            let part = &parts[item];
            let group = Group::new(call, heads[part.head]);
            // SAFETY: each part's state is its own until the head's last part is counted down, and
            // then that of the worker which did so; rows of a head are finished once.
            unsafe {
                group.absorb(part.keys.clone(), scratch, q_stride, state(part));
                if left[part.head].fetch_sub(1, Ordering::AcqRel) == 1 {
                    let (first, others) =
                        parts[firsts[part.head]..firsts[part.head + 1]].split_at(1);
                    for other in others {
                        group.join(state(&first[0]), state(other));
                    }
                    group.finish(state(&first[0]), scratch.saved.at());
                }
            }
        },
    );
    Ok(())
}

/// The query heads that share a KV head, as rows of one block: row n · seqlen_q + i.
struct Group<'a, 'c, T: Element> {
    call: &'a Call<'c, T>,
    at: KvHead,
    source: KeySource<'a, T>,
    seqlen_q: usize,
    heads: usize,
}

impl<'a, 'c, T: Element> Group<'a, 'c, T> {
    fn new(call: &'a Call<'c, T>, at: KvHead) -> Self {
        Group {
            call,
            at,
            source: call.source(at),
            seqlen_q: call.problem.sequences()[at.sequence].seqlen_q,
            heads: call.problem.dims().group(),
        }
    }

    fn rows(&self) -> usize {
        self.heads * self.seqlen_q
    }

    fn head(&self, n: usize) -> Head<T> {
        self.call.head(self.at, n)
    }

    /// Begins the state and folds `keys` into it.
    ///
    /// # Safety
    /// The state covers the group's rows and is this worker's; the processor has the kernels'
    /// instructions.
    unsafe fn absorb(
        &self,
        keys: Range<usize>,
        scratch: &mut Scratch<T>,
        q_stride: usize,
        state: TileState<T::Acc>,
    ) {
        let shape = &self.call.machinery.shape;
        let interleaved = self.call.machinery.kernels.interleaved;
        let zero = <T::Acc as Element>::from_f64(0.0);
        // SAFETY: the caller's promise; queries of the group exist, and q has room for them.
        unsafe {
            std::slice::from_raw_parts_mut(state.m, self.rows()).fill(T::Acc::neg_infinity());
            std::slice::from_raw_parts_mut(state.l, self.rows()).fill(zero);
            std::slice::from_raw_parts_mut(state.acc, self.rows() * shape.width).fill(zero);
            for n in 0..self.heads {
                let head = self.head(n);
                for i in 0..self.seqlen_q {
                    let to = scratch.q.at().add((n * self.seqlen_q + i) * q_stride);
                    let from = head.q.moved(i, 0);
                    for d in 0..shape.head_dim {
                        let x = from.at.wrapping_offset(d as isize * from.key).read();
                        let to = to.add(place(d, shape.head_dim, interleaved));
                        to.write(x.to_acc() * head.scoring.sign);
                    }
                }
            }
        }
        let tile = max_key_tile::<T::Acc>();
        for first in (keys.start / tile * tile..keys.end).step_by(tile) {
            let within = first.max(keys.start)..(first + tile).min(keys.end);
            for row in (0..self.rows()).step_by(MAX_MR) {
                let rows = row..(row + MAX_MR).min(self.rows());
                // SAFETY: as above.
                unsafe { self.absorb_tile(rows, first, &within, q_stride, scratch, state) }
            }
        }
    }

    /// Folds `keys`, of the tile that starts at key `first`, into the state of some rows.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn absorb_tile(
        &self,
        rows: Range<usize>,
        first: usize,
        keys: &Range<usize>,
        q_stride: usize,
        scratch: &Scratch<T>,
        state: TileState<T::Acc>,
    ) {
        let (kernels, shape) = (&self.call.machinery.kernels, &self.call.machinery.shape);
        let rule = self.head(0).rule;
        let (from, to) = (keys.start, keys.end);
        let mut live = [(0, 0); MAX_MR];
        let (mut low, mut high) = (usize::MAX, 0);
        for (row, slot) in rows.clone().zip(&mut live) {
            let seen = rule.row(row % self.seqlen_q);
            let lo = seen.start.clamp(from, to) - first;
            let hi = seen.end.clamp(from, to) - first;
            if lo < hi {
                *slot = (lo, hi);
                low = low.min(lo);
                high = high.max(hi);
            }
        }
        if high == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let at = state.row(shape, rows.start);
            let q = scratch.q.at().add(rows.start * q_stride);
            let mut block = Block {
                rows: rows.len(),
                mr: rows.len(),
                head_dim: shape.head_dim,
                width: shape.width,
                q,
                k: std::ptr::null(),
                v: std::ptr::null(),
                v_panel: 0,
                lo: low,
                hi: high,
                live,
                s: scratch.strip.at(),
                acc: at.acc,
                m: at.m,
                l: at.l,
                c: self.call.scoring.c,
                careful: false,
                ahead: Ahead::NONE,
            };
            self.scores(&rows, first, &block, q_stride);
            (kernels.tile.online)(&block);
            self.drop_out(&rows, first, &block);
            let elements = rows.len() * shape.width;
            std::ptr::copy_nonoverlapping(at.acc, scratch.saved.at(), elements);
            self.each_run(first, &block, q_stride, |run, unpacked| {
                (kernels.few_weighted)(run, unpacked);
            });
            if (kernels.tile.all_finite)(elements, at.acc) {
                return;
            }
            // Some value is NaN or infinite, or will be. Again, leaving out what is hidden: P anew,
            // such that 0 means hidden, from the maxima that are known.
            std::ptr::copy_nonoverlapping(scratch.saved.at(), at.acc, elements);
            let mut unused = [<T::Acc as Element>::from_f64(0.0); MAX_MR];
            block.careful = true;
            block.l = unused.as_mut_ptr();
            self.scores(&rows, first, &block, q_stride);
            (kernels.tile.exponentiate)(&block);
            self.drop_out(&rows, first, &block);
            self.each_run(first, &block, q_stride, |run, unpacked| {
                Self::weighted_by_element(run, unpacked, kernels.interleaved);
            });
        }
    }

    /// Calls `step` for each row of keys in `block`, whose key 0 is key `first`, that lie evenly in
    /// memory: one, or one a page.
    fn each_run(
        &self,
        first: usize,
        block: &Block<T::Acc>,
        q_stride: usize,
        step: impl Fn(&Block<T::Acc>, &Unpacked<T>),
    ) {
        let mut lo = block.lo;
        while lo < block.hi {
            let (end, [k, v]) = self.source.run(first + lo, first + block.hi);
            let to_first =
                |(at, step): (*const T, isize)| at.wrapping_offset(first as isize * step);
            let unpacked = Unpacked {
                q: block.q,
                q_stride,
                k: to_first(k),
                k_step: k.1,
                v: to_first(v),
                v_step: v.1,
                head_dim_v: self.call.machinery.shape.head_dim_v,
            };
            step(
                &Block {
                    lo,
                    hi: end - first,
                    ..*block
                },
                &unpacked,
            );
            lo = end - first;
        }
    }

    /// Fills the strip with the scores of `rows` and the tile at key `first`.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn scores(
        &self,
        rows: &Range<usize>,
        first: usize,
        block: &Block<T::Acc>,
        q_stride: usize,
    ) {
        let kernels = &self.call.machinery.kernels;
        // SAFETY: the caller's promise.
        unsafe {
            self.each_run(first, block, q_stride, |run, unpacked| {
                (kernels.few_products)(run, unpacked);
            });
            // Each head has modifiers of its own.
            for n in rows.start / self.seqlen_q..rows.end.div_ceil(self.seqlen_q) {
                let Some(modifiers) = self.head(n).modifiers else {
                    break;
                };
                let from = rows.start.max(n * self.seqlen_q);
                let to = rows.end.min((n + 1) * self.seqlen_q);
                let modifiers: Modifiers<T> = modifiers.moved(from - n * self.seqlen_q, first);
                let part = Block {
                    rows: to - from,
                    s: block.s.add((from - rows.start) * s_stride::<T::Acc>()),
                    ..*block
                };
                (kernels.modify)(&part, &modifiers);
            }
            (kernels.tile.hide)(block);
        }
    }

    /// Dropout of the block's weights, each head's by its own positions.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn drop_out(&self, rows: &Range<usize>, first: usize, block: &Block<T::Acc>) {
        for n in rows.start / self.seqlen_q..rows.end.div_ceil(self.seqlen_q) {
            let Some(dropping) = self.head(n).modifiers.and_then(|m| m.dropout) else {
                break;
            };
            let from = rows.start.max(n * self.seqlen_q);
            let to = rows.end.min((n + 1) * self.seqlen_q);
            let skipped = from - rows.start;
            let mut live = [(0, 0); MAX_MR];
            live[..to - from].copy_from_slice(&block.live[skipped..][..to - from]);
            let part = Block {
                rows: to - from,
                // Inside the strip: a row of the block.
                s: block.s.wrapping_add(skipped * s_stride::<T::Acc>()),
                live,
                ..*block
            };
            // SAFETY: the caller's promise.
            unsafe {
                (self.call.machinery.kernels.tile.drop_out)(
                    &part,
                    &dropping.moved(from - n * self.seqlen_q, first),
                )
            }
        }
    }

    /// Õ += P v without the keys of weight 0.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn weighted_by_element(
        block: &Block<T::Acc>,
        unpacked: &Unpacked<T>,
        interleaved: usize,
    ) {
        for row in 0..block.rows {
            for key in block.lo..block.hi {
                // SAFETY: the caller's promise.
                unsafe {
                    let p = block.s.add(row * s_stride::<T::Acc>() + key).read();
                    if p == <T::Acc as Element>::from_f64(0.0) {
                        continue;
                    }
                    for column in 0..unpacked.head_dim_v {
                        let at = place(column, unpacked.head_dim_v, interleaved);
                        let acc = block.acc.add(row * block.width + at);
                        let v = unpacked.v.wrapping_offset(key as isize * unpacked.v_step);
                        let v = v.add(column).read().to_acc();
                        acc.write(p.mul_add(v, acc.read()));
                    }
                }
            }
        }
    }

    /// Joins the state of later keys into `state`.
    ///
    /// # Safety
    /// Both cover the group's rows and are this worker's.
    unsafe fn join(&self, state: TileState<T::Acc>, other: TileState<T::Acc>) {
        let machinery = &self.call.machinery;
        let shape = &machinery.shape;
        for row in 0..self.rows() {
            // SAFETY: the caller's promise.
            unsafe {
                let (a, b) = (state.row(shape, row), other.row(shape, row));
                join_row(
                    a,
                    b,
                    self.call.scoring.c,
                    shape.width,
                    machinery.kernels.tile.combine,
                );
            }
        }
    }

    /// # Safety
    /// The state covers the group's rows, which nobody else finishes; `room` has a row of Õ.
    unsafe fn finish(&self, state: TileState<T::Acc>, room: *mut T::Acc) {
        let machinery = &self.call.machinery;
        let (width, len) = (machinery.shape.width, machinery.shape.head_dim_v);
        if machinery.kernels.interleaved != 0 {
            for row in 0..self.rows() {
                // SAFETY: the caller's promise; places of `len` elements are below `len`.
                unsafe {
                    let acc = state.acc.add(row * width);
                    std::ptr::copy_nonoverlapping(acc, room, len);
                    for column in 0..len {
                        let from = room.add(place(column, len, machinery.kernels.interleaved));
                        acc.add(column).write(from.read());
                    }
                }
            }
        }
        for n in 0..self.heads {
            // SAFETY: the caller's promise.
            unsafe {
                let at = state.row(&machinery.shape, n * self.seqlen_q);
                self.call
                    .finish(self.at, n, &self.head(n), 0, self.seqlen_q, at, false);
            }
        }
    }
}

/// The trait's merge, for one row whose m is in units of 1/c powers of two.
///
/// # Safety
/// Both states cover a row of `width`; the processor has `combine`'s instructions.
unsafe fn join_row<A: Float>(
    kept: TileState<A>,
    other: TileState<A>,
    c: A,
    width: usize,
    combine: unsafe fn(usize, A, *mut A, A, *const A),
) {
    let zero = A::from_f64(0.0);
    // SAFETY: the caller's promise.
    unsafe {
        let (l1, l2) = (kept.l.read(), other.l.read());
        if l2 == zero {
            return;
        }
        let (m1, m2) = (kept.m.read(), other.m.read());
        let m = if m1 > m2 { m1 } else { m2 };
        let base = if m == A::neg_infinity() { zero } else { m };
        let a = if l1 == zero {
            zero
        } else {
            ((m1 - base) * c).exp2()
        };
        let b = ((m2 - base) * c).exp2();
        kept.m.write(m);
        kept.l.write(a * l1 + b * l2);
        combine(width, a, kept.acc, b, other.acc);
    }
}
