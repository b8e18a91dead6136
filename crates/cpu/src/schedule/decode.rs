//! Few queries (decoding): FlashAttention-2 with its keys split, the heads of a group as rows of one
//! block, keys and values read once, from where they lie.
//!
//! The keys are cut at absolute positions that follow from seqlen_k and the number of rows alone, each
//! part has a state of its own, and whoever finishes a head's last part joins them in order: bits
//! depend neither on the number of threads nor on who was first. ("Split-K", or flash decoding: Dao,
//! Haziza, Massa and Sizov 2023.)

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use num_traits::Float as _;
use tilewise_core::{Element, Float, Result};

use crate::buffer::Buffer;
use crate::call::{Call, KvHead};
use crate::head::Head;
use crate::kernel::few::{self, Unpacked};
use crate::kernel::pairs::few::FewPairs;
use crate::kernel::spread::Place;
use crate::kernel::table::Kernels;
use crate::kernel::{Ahead, Block, MAX_ROWS, Modifiers, Plane, max_key_tile, s_stride};
use crate::packed::KeySource;
use crate::parallel::{in_order, threads};
use crate::shape::Shape;
use crate::tile::{Machinery, TileState};

/// Rows of a group up to which this schedule is the faster one, where q is spread over lanes.
pub(crate) const MOST_ROWS: usize = 64;

/// Likewise where keys are widened for every four rows again.
const MOST_ROWS_WIDENED: usize = 32;

/// Keys of a part: enough to make up for the joining, few enough to give all threads work.
const KEYS_A_PART: usize = 512;

/// Keys of a part for each of its rows, where that is more.
const KEYS_A_ROW: usize = 16;

/// Parts of the longest sequences, which have longer ones instead.
const MOST_PARTS: usize = 128;

/// Whether the rows of `at` are few, and its keys such that they can be read in place.
pub(crate) fn is_for<T: Element>(call: &Call<'_, T>, at: KvHead) -> bool {
    let rows = call.problem.dims().group() * call.problem.sequences()[at.sequence].seqlen_q;
    let kernels = &call.machinery.kernels;
    let most = match kernels.spread || few_pairs(kernels).is_some() {
        true => MOST_ROWS,
        false => MOST_ROWS_WIDENED,
    };
    rows <= most && call.source(at).is_contiguous(&call.machinery.shape)
}

/// What few rows are multiplied with, if products take pairs.
fn few_pairs<T: Element>(kernels: &Kernels<T>) -> Option<FewPairs<T>> {
    kernels.pairs.and_then(|pairs| pairs.few)
}

/// Keys of each part of a sequence but the last, for `rows` rows: more where states are larger, which
/// are written and joined.
fn part_keys<A>(keys: usize, rows: usize) -> usize {
    let part = keys.div_ceil(MOST_PARTS).max(KEYS_A_ROW * rows);
    part.next_multiple_of(max_key_tile::<A>()).max(KEYS_A_PART)
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
    /// 1 for each query of the group whose scores are made apart.
    odd: Buffer<u8>,
}

/// Memory besides inputs and outputs, for `rows` rows a group.
pub(crate) fn workspace_bytes<T: Element>(
    shape: &Shape,
    heads: usize,
    rows: usize,
    keys: usize,
) -> u64 {
    let parts = keys.div_ceil(part_keys::<T::Acc>(keys, rows)).max(1) * heads;
    let states = parts * rows * (shape.width + 2);
    let q =
        rows.next_multiple_of(MAX_ROWS) * shape.head_dim.next_multiple_of(crate::simd::MAX_LANES);
    let scratch = threads() * (q + rows * shape.width + MAX_ROWS * s_stride::<T::Acc>());
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
        let step = part_keys::<T::Acc>(sequence.seqlen_k, rows_of(at));
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
                strip: Buffer::new(MAX_ROWS * s_stride::<T::Acc>(), "scores of a tile")?,
                q: Buffer::new(
                    most_rows.next_multiple_of(MAX_ROWS) * q_stride,
                    "queries of a group",
                )?,
                saved: Buffer::new(MAX_ROWS * shape.width, "state of a tile")?,
                odd: Buffer::new(most_rows, "marks of queries")?,
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
        let zero = <T::Acc as Element>::from_f64(0.0);
        // SAFETY: the caller's promise; queries of the group exist, and q has room for them.
        unsafe {
            std::slice::from_raw_parts_mut(state.m, self.rows()).fill(T::Acc::neg_infinity());
            std::slice::from_raw_parts_mut(state.l, self.rows()).fill(zero);
            std::slice::from_raw_parts_mut(state.acc, self.rows() * shape.width).fill(zero);
            // Zeros where there is no element.
            let words = self.rows().next_multiple_of(MAX_ROWS) * q_stride;
            std::slice::from_raw_parts_mut(scratch.q.at(), words).fill(zero);
            std::slice::from_raw_parts_mut(scratch.odd.at(), self.rows()).fill(0);
            for n in 0..self.heads {
                let head = self.head(n);
                for i in 0..self.seqlen_q {
                    self.take_query(
                        n * self.seqlen_q + i,
                        head.q.moved(i, 0),
                        &head,
                        scratch,
                        q_stride,
                    );
                }
            }
        }
        let tile = max_key_tile::<T::Acc>();
        for first in (keys.start / tile * tile..keys.end).step_by(tile) {
            let within = first.max(keys.start)..(first + tile).min(keys.end);
            for row in (0..self.rows()).step_by(MAX_ROWS) {
                let rows = row..(row + MAX_ROWS).min(self.rows());
                // SAFETY: as above.
                unsafe { self.absorb_tile(rows, first, &within, q_stride, scratch, state) }
            }
        }
    }

    /// Puts the query of row `row` where the products look for it.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn take_query(
        &self,
        row: usize,
        from: Plane<T>,
        head: &Head<T>,
        scratch: &mut Scratch<T>,
        q_stride: usize,
    ) {
        let Machinery { kernels, shape } = &self.call.machinery;
        let (first, within) = (row - row % MAX_ROWS, row % MAX_ROWS);
        let rows = (self.rows() - first).min(MAX_ROWS);
        let place = Place::new(within, rows, q_stride, kernels.tile.lanes);
        // SAFETY: the caller's promise.
        unsafe {
            let to = scratch.q.at().add(first * q_stride);
            if let Some(few) = few_pairs(kernels) {
                let negate = head.scoring.sign < <T::Acc as Element>::from_f64(0.0);
                let is_odd = (few.query)(from, shape.head_dim, negate, place, to);
                scratch.odd.at().add(row).write(u8::from(is_odd));
                return;
            }
            for d in 0..shape.head_dim {
                let at = match kernels.spread {
                    true => place.of(d, 1).0,
                    false => within * q_stride + few::place(d, shape.head_dim, kernels.interleaved),
                };
                let x = from.at.wrapping_offset(d as isize * from.key).read();
                to.add(at).write(x.to_acc() * head.scoring.sign);
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
        let mut live = [(0, 0); MAX_ROWS];
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
            self.scores(&rows, first, &block, q_stride, scratch);
            (kernels.tile.online)(&block);
            self.drop_out(&rows, first, &block);
            let elements = rows.len() * shape.width;
            std::ptr::copy_nonoverlapping(at.acc, scratch.saved.at(), elements);
            let few = few_pairs(kernels);
            if let Some(few) = &few {
                (few.round)(&block);
                self.each_run(first, &block, q_stride, |run, unpacked| {
                    (few.weighted)(run, unpacked);
                });
                if (few.trusted)(&block) {
                    return;
                }
            } else {
                self.each_run(first, &block, q_stride, |run, unpacked| {
                    (kernels.few_weighted)(run, unpacked);
                });
                if (kernels.tile.all_finite)(elements, at.acc) {
                    return;
                }
            }
            // Some value is NaN or infinite, or will be, or too small for the instructions. Again, leaving
            // out what is hidden: P anew, such that 0 means hidden, from the maxima that are known.
            std::ptr::copy_nonoverlapping(scratch.saved.at(), at.acc, elements);
            let mut unused = [<T::Acc as Element>::from_f64(0.0); MAX_ROWS];
            block.careful = true;
            block.l = unused.as_mut_ptr();
            self.scores(&rows, first, &block, q_stride, scratch);
            (kernels.tile.exponentiate)(&block);
            self.drop_out(&rows, first, &block);
            self.weighted_apart(first, &block, q_stride);
        }
    }

    /// Õ += P v, values that are NaN, infinite or odd by element: the others by the kernels as always, to
    /// the bits that rows have which do not see such values. P holds f32.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn weighted_apart(&self, first: usize, block: &Block<T::Acc>, q_stride: usize) {
        let Machinery { kernels, shape } = &self.call.machinery;
        let few = few_pairs(kernels);
        // SAFETY: the caller's promise; keys of the block exist.
        unsafe {
            let mut odd = [false; max_key_tile::<f32>()];
            for (key, odd) in odd.iter_mut().enumerate().take(block.hi).skip(block.lo) {
                let v = self.source.value(first + key).0;
                *odd = match &few {
                    Some(few) => (few.is_odd)(v, shape.head_dim_v),
                    None => (0..shape.head_dim_v)
                        .any(|d| !v.wrapping_add(d).read().to_acc().is_finite()),
                };
            }
            let interleaved = self.interleaved();
            self.each_run_of(first, block, q_stride, (&odd, true), |run, unpacked| {
                Self::weighted_by_element(run, unpacked, interleaved);
            });
            if let Some(few) = &few {
                (few.round)(block);
            }
            let weighted = few.map_or(kernels.few_weighted, |few| few.weighted);
            self.each_run_of(first, block, q_stride, (&odd, false), |run, unpacked| {
                weighted(run, unpacked);
            });
        }
    }

    /// Of [`few::place`], in Õ.
    fn interleaved(&self) -> usize {
        let kernels = &self.call.machinery.kernels;
        few_pairs(kernels).map_or(kernels.interleaved, |few| few.interleaved)
    }

    /// [`Self::each_run`] of the keys whose mark is as given.
    fn each_run_of(
        &self,
        first: usize,
        block: &Block<T::Acc>,
        q_stride: usize,
        (marks, mark): (&[bool], bool),
        step: impl Fn(&Block<T::Acc>, &Unpacked<T>),
    ) {
        let mut key = block.lo;
        while key < block.hi {
            let lo = key;
            while key < block.hi && marks[key] == marks[lo] {
                key += 1;
            }
            if marks[lo] == mark {
                let hi = key;
                self.each_run(first, &Block { lo, hi, ..*block }, q_stride, &step);
            }
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
        scratch: &Scratch<T>,
    ) {
        let kernels = &self.call.machinery.kernels;
        // SAFETY: the caller's promise.
        unsafe {
            let products = few_pairs(kernels).map_or(kernels.few_products, |few| few.products);
            self.each_run(first, block, q_stride, |run, unpacked| {
                products(run, unpacked);
            });
            self.odd_scores(rows, first, block, scratch);
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

    /// Scores of odd queries.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn odd_scores(
        &self,
        rows: &Range<usize>,
        first: usize,
        block: &Block<T::Acc>,
        scratch: &Scratch<T>,
    ) {
        for row in rows.clone() {
            // SAFETY: the caller's promise: rows and keys of the block exist.
            unsafe {
                if scratch.odd.at().add(row).read() == 0 {
                    continue;
                }
                let head = self.head(row / self.seqlen_q);
                let q = head.q.moved(row % self.seqlen_q, 0);
                for key in block.lo..block.hi {
                    let (k, step) = self.source.key(first + key);
                    let mut score = <T::Acc as Element>::from_f64(0.0);
                    for d in 0..block.head_dim as isize {
                        let q = q.at.wrapping_offset(d * q.key).read().to_acc();
                        score += q * k.wrapping_offset(d * step).read().to_acc();
                    }
                    let row = (row - rows.start) * s_stride::<T::Acc>();
                    block.s.add(row + key).write(score * head.scoring.sign);
                }
            }
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
            let mut live = [(0, 0); MAX_ROWS];
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
                        let at = few::place(column, unpacked.head_dim_v, interleaved);
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
        let interleaved = self.interleaved();
        if interleaved != 0 {
            for row in 0..self.rows() {
                // SAFETY: the caller's promise; places of `len` elements are below `len`.
                unsafe {
                    let acc = state.acc.add(row * width);
                    std::ptr::copy_nonoverlapping(acc, room, len);
                    for column in 0..len {
                        let from = room.add(few::place(column, len, interleaved));
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
