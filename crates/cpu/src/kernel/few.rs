//! Few query rows against keys as they lie in memory: packing them would cost more than it saves.
//!
//! A score is a sum over lanes. Registers of partial sums, as many as a register has lanes, are taken
//! together (4 rows × 4 keys, or 1 row × 16) and summed into one register by a tree of half as many
//! additions each time. Each sum is taken in the same order wherever it stands, so bits do not depend
//! on the rows or keys that it is taken together with.
//!
//! Elements are widened two vectors at a time, in the order of [`Convert::load_two`]: q is stored in
//! that order and Õ comes in it, see [`place`].

use std::hint::black_box;

use tilewise_core::Element;

use super::pack::chunk;
use super::{Block, s_stride, spread};
use crate::simd::{Convert, MAX_LANES, Vector, prefetch_far};

/// Keys whose values all columns are taken of before the next: they stay in L1 between columns.
const KEYS_TOGETHER: usize = 16;

/// How far ahead keys are asked for, where there are several rows: their products with a key keep the
/// processor from running ahead by itself as far as memory is away.
const BYTES_AHEAD: usize = 8 << 10;

/// Queries, keys and values of a block, not packed for the microkernel.
#[derive(Clone, Copy)]
pub(crate) struct Unpacked<T: Element> {
    /// `[rows][q_stride]`, zero behind head_dim up to a whole vector.
    ///
    /// Elements stand at their [`place`].
    pub(crate) q: *const T::Acc,
    pub(crate) q_stride: usize,
    /// First element of the tile's key 0; the elements of a key are neighbours.
    pub(crate) k: *const T,
    /// From a key to the next. (A list of pointers would do for pages too, but halves the rate at
    /// which memory is read: the processor runs less far ahead.)
    pub(crate) k_step: isize,
    /// Likewise.
    pub(crate) v: *const T,
    pub(crate) v_step: isize,
    /// Elements of a value; [`Block::width`] is this in whole vectors.
    pub(crate) head_dim_v: usize,
}

/// [`BYTES_AHEAD`] in keys of `len` elements.
#[inline(always)]
pub(crate) fn keys_ahead<T>(len: usize) -> usize {
    BYTES_AHEAD / (len * size_of::<T>()).max(64)
}

/// Asks for the cache lines of `len` elements.
#[inline(always)]
pub(crate) fn ask_for<T>(at: *const T, len: usize) {
    for element in (0..len).step_by(64 / size_of::<T>()) {
        prefetch_far(at.wrapping_add(element));
    }
}

/// Where element `element` of `len` stands in q and Õ, if `interleaved` elements are widened together
/// (0: none are), the even ones into one vector and the odd ones into the next.
pub(crate) fn place(element: usize, len: usize, interleaved: usize) -> usize {
    if interleaved == 0 || element >= len - len % interleaved {
        return element;
    }
    let within = element % interleaved;
    element - within + within / 2 + within % 2 * (interleaved / 2)
}

/// S = q kᵀ in the columns `lo..hi` of the strip.
///
/// # Safety
/// The processor has V's instructions; the pointers cover what the sizes say.
#[inline(always)]
pub(crate) unsafe fn products<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
) {
    if V::SAME {
        // SAFETY: the caller's promise.
        unsafe { spread::products::<T, spread::Elements<V>>(block, unpacked) }
        return;
    }
    let mut key = block.lo;
    while key < block.hi {
        let end = (key + V::LANES).min(block.hi);
        // SAFETY: the caller's promise; all these rows and keys are inside the block.
        unsafe {
            let mut row = 0;
            while row < block.rows {
                row += match block.rows - row {
                    4.. if V::LANES >= 4 => {
                        some_products::<T, V, 4>(block, unpacked, row, key, end);
                        4
                    }
                    2.. => {
                        some_products::<T, V, 2>(block, unpacked, row, key, end);
                        2
                    }
                    _ => {
                        some_products::<T, V, 1>(block, unpacked, row, key, end);
                        1
                    }
                };
            }
        }
        key = end;
    }
}

/// `ROWS` rows from `row` on against keys from `key` to `end`, LANES / ROWS at a time.
#[inline(always)]
unsafe fn some_products<T: Element, V: Convert<T> + Vector<E = T::Acc>, const ROWS: usize>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
    row: usize,
    key: usize,
    end: usize,
) {
    let together = V::LANES / ROWS;
    // SAFETY: the caller's promise.
    unsafe {
        let q = unpacked.q.add(row * unpacked.q_stride);
        for first in (key..end).step_by(together) {
            let key_at = |n: usize| {
                unpacked
                    .k
                    .wrapping_offset((first + n) as isize * unpacked.k_step)
            };
            let count = together.min(end - first);
            if ROWS > 1 && row == 0 {
                let ahead = keys_ahead::<T>(block.head_dim);
                for n in 0..count {
                    ask_for(key_at(n + ahead), block.head_dim);
                }
            }
            let sums = if ROWS > 1 && count == together {
                square::<T, V, ROWS>(key_at(0), unpacked.k_step, q, unpacked.q_stride, block)
            } else {
                // A single row waits for memory alone: all keys by the same few load instructions, in
                // steps that the processor's prefetcher recognises. The count is hidden from the
                // compiler, which would give each key instructions of its own.
                let mut sums = [V::splat(V::E::from_f64(0.0)); MAX_LANES];
                for n in 0..black_box(count) {
                    let acc =
                        one_key::<T, V, ROWS>(key_at(n), q, unpacked.q_stride, block.head_dim);
                    for (r, acc) in acc.into_iter().enumerate() {
                        sums[r * together + n] = acc;
                    }
                }
                sums
            };
            let mut scores = [V::E::from_f64(0.0); MAX_LANES];
            V::sums(&sums).store(scores.as_mut_ptr());
            for r in 0..ROWS {
                let from = scores.as_ptr().add(r * together);
                let to = block.s.add((row + r) * s_stride::<V::E>() + first);
                if count == together {
                    std::ptr::copy_nonoverlapping(from, to, together);
                } else {
                    std::ptr::copy_nonoverlapping(from, to, count);
                }
            }
        }
    }
}

/// Registers of partial sums of `ROWS` rows of q with LANES / ROWS keys, which stay in registers:
/// each piece of q and of a key is loaded once for all of its products.
#[inline(always)]
unsafe fn square<T: Element, V: Convert<T> + Vector<E = T::Acc>, const ROWS: usize>(
    key: *const T,
    step: isize,
    q: *const V::E,
    q_stride: usize,
    block: &Block<V::E>,
) -> [V; MAX_LANES] {
    let together = V::LANES / ROWS;
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(V::E::from_f64(0.0));
        let mut sums = [zero; MAX_LANES];
        let mut element = 0;
        while element + 2 * V::LANES <= block.head_dim {
            let mut rows = [[zero; 2]; ROWS];
            for (r, row) in rows.iter_mut().enumerate() {
                let q = q.add(r * q_stride + element);
                *row = [V::load(q), V::load(q.add(V::LANES))];
            }
            for n in 0..together {
                let k = V::load_two(key.wrapping_offset(n as isize * step).add(element));
                for (r, row) in rows.iter().enumerate() {
                    let sum = &mut sums[r * together + n];
                    *sum = row[1].fma(k[1], row[0].fma(k[0], *sum));
                }
            }
            element += 2 * V::LANES;
        }
        while element < block.head_dim {
            let left = V::LANES.min(block.head_dim - element);
            for n in 0..together {
                let k: V = chunk(key.wrapping_offset(n as isize * step).add(element), 1, left);
                for r in 0..ROWS {
                    let sum = &mut sums[r * together + n];
                    *sum = V::load(q.add(r * q_stride + element)).fma(k, *sum);
                }
            }
            element += V::LANES;
        }
        sums
    }
}

/// Registers of partial sums of `ROWS` rows of q with one key: the same sums as [`square`]'s.
#[inline(always)]
unsafe fn one_key<T: Element, V: Convert<T> + Vector<E = T::Acc>, const ROWS: usize>(
    key: *const T,
    q: *const V::E,
    q_stride: usize,
    head_dim: usize,
) -> [V; ROWS] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [V::splat(V::E::from_f64(0.0)); ROWS];
        let mut element = 0;
        while element + 2 * V::LANES <= head_dim {
            let k = V::load_two(key.add(element));
            for (r, acc) in acc.iter_mut().enumerate() {
                let q = q.add(r * q_stride + element);
                *acc = V::load(q).fma(k[0], *acc);
                *acc = V::load(q.add(V::LANES)).fma(k[1], *acc);
            }
            element += 2 * V::LANES;
        }
        while element < head_dim {
            let k: V = chunk(key.add(element), 1, V::LANES.min(head_dim - element));
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(q.add(r * q_stride + element)).fma(k, *acc);
            }
            element += V::LANES;
        }
        acc
    }
}

/// Õ += P v over the keys `lo..hi`, keys ascending.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(crate) unsafe fn weighted_values<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
) {
    let whole = unpacked.head_dim_v - unpacked.head_dim_v % (2 * V::LANES);
    // As many accumulators as the microkernel of packed tiles has.
    let registers = V::MR * V::NRV;
    let mut key = block.lo;
    while key < block.hi {
        let end = (key + KEYS_TOGETHER).min(block.hi);
        // SAFETY: the caller's promise; all these rows, keys and columns are inside the block.
        unsafe {
            let mut row = 0;
            while row < block.rows {
                let rows = match block.rows - row {
                    4.. => 4,
                    2.. => 2,
                    _ => 1,
                };
                let at = (row, key, end);
                let mut column = 0;
                while column < whole {
                    let pairs = match (whole - column) / (2 * V::LANES) {
                        4.. if 8 * rows <= registers => 4,
                        2.. if 4 * rows <= registers => 2,
                        _ => 1,
                    };
                    match (rows, pairs) {
                        (4, 2) => some_values::<T, V, 4, 2>(block, unpacked, at, column),
                        (4, _) => some_values::<T, V, 4, 1>(block, unpacked, at, column),
                        (2, 4) => some_values::<T, V, 2, 4>(block, unpacked, at, column),
                        (2, 2) => some_values::<T, V, 2, 2>(block, unpacked, at, column),
                        (2, _) => some_values::<T, V, 2, 1>(block, unpacked, at, column),
                        (_, 4) => some_values::<T, V, 1, 4>(block, unpacked, at, column),
                        (_, 2) => some_values::<T, V, 1, 2>(block, unpacked, at, column),
                        (_, _) => some_values::<T, V, 1, 1>(block, unpacked, at, column),
                    }
                    column += 2 * pairs * V::LANES;
                }
                while column < unpacked.head_dim_v {
                    match rows {
                        4 => last_columns::<T, V, 4>(block, unpacked, at, column),
                        2 => last_columns::<T, V, 2>(block, unpacked, at, column),
                        _ => last_columns::<T, V, 1>(block, unpacked, at, column),
                    }
                    column += V::LANES;
                }
                row += rows;
            }
        }
        key = end;
    }
}

/// `ROWS` rows and `PAIRS` pairs of vectors from `column` on, over the keys of `(row, key, end)`.
#[inline(always)]
unsafe fn some_values<
    T: Element,
    V: Convert<T> + Vector<E = T::Acc>,
    const ROWS: usize,
    const PAIRS: usize,
>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
    (row, key, end): (usize, usize, usize),
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let out = block.acc.add(row * block.width + column);
        let out =
            |r: usize, pair: usize, n: usize| out.add(r * block.width + (2 * pair + n) * V::LANES);
        let p = block.s.add(row * s_stride::<V::E>());
        let mut acc = [[[V::splat(V::E::from_f64(0.0)); 2]; PAIRS]; ROWS];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (pair, acc) in acc.iter_mut().enumerate() {
                *acc = [V::load(out(r, pair, 0)), V::load(out(r, pair, 1))];
            }
        }
        let ahead = keys_ahead::<T>(unpacked.head_dim_v) as isize * unpacked.v_step;
        for key in key..end {
            let v = unpacked
                .v
                .wrapping_offset(key as isize * unpacked.v_step)
                .add(column);
            if ROWS > 1 && row == 0 {
                ask_for(v.wrapping_offset(ahead), 2 * PAIRS * V::LANES);
            }
            let mut columns = [V::load_two(v); PAIRS];
            for (pair, columns) in columns.iter_mut().enumerate().skip(1) {
                *columns = V::load_two(v.add(2 * pair * V::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(p.add(r * s_stride::<V::E>() + key).read());
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = [x.fma(column[0], acc[0]), x.fma(column[1], acc[1])];
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (pair, acc) in acc.iter().enumerate() {
                acc[0].store(out(r, pair, 0));
                acc[1].store(out(r, pair, 1));
            }
        }
    }
}

/// One vector or less behind the last pair of them.
#[inline(always)]
unsafe fn last_columns<T: Element, V: Convert<T> + Vector<E = T::Acc>, const ROWS: usize>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
    (row, key, end): (usize, usize, usize),
    column: usize,
) {
    // SAFETY: the caller's promise; Õ has whole vectors.
    unsafe {
        let out = block.acc.add(row * block.width + column);
        let p = block.s.add(row * s_stride::<V::E>());
        let left = V::LANES.min(unpacked.head_dim_v - column);
        let mut acc = [V::splat(V::E::from_f64(0.0)); ROWS];
        for (r, acc) in acc.iter_mut().enumerate() {
            *acc = V::load(out.add(r * block.width));
        }
        for key in key..end {
            let v = unpacked
                .v
                .wrapping_offset(key as isize * unpacked.v_step)
                .add(column);
            let v: V = chunk(v, 1, left);
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = V::splat(p.add(r * s_stride::<V::E>() + key).read()).fma(v, *acc);
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            acc.store(out.add(r * block.width));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_has_a_place_of_its_own() {
        for interleaved in [0, 16, 32] {
            for len in [1, 7, 16, 32, 40, 64, 80, 96, 129] {
                let mut places: Vec<usize> = (0..len).map(|d| place(d, len, interleaved)).collect();
                if interleaved > 0 && len >= interleaved {
                    assert_eq!(places[..4], [0, interleaved / 2, 1, interleaved / 2 + 1]);
                }
                places.sort_unstable();
                assert_eq!(places, (0..len).collect::<Vec<_>>());
            }
        }
    }
}
