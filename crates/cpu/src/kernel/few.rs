//! Few query rows against keys as they lie in memory: packing them would cost more than it saves.
//!
//! A score is a sum over lanes. Registers of partial sums, as many as a register has lanes, are taken
//! together (4 rows × 4 keys, or 1 row × 16) and summed into one register by a tree of half as many
//! additions each time. Each sum is taken in the same order wherever it stands, so bits do not depend
//! on the rows or keys that it is taken together with.

use std::hint::black_box;

use tilewise_core::Element;

use super::pack::chunk;
use super::{Block, s_stride};
use crate::simd::{Convert, MAX_LANES, Vector};

/// Keys whose values all columns are taken of before the next: they stay in L1 between columns.
const KEYS_TOGETHER: usize = 32;

/// Queries, keys and values of a block, not packed for the microkernel.
#[derive(Clone, Copy)]
pub(crate) struct Unpacked<T: Element> {
    /// `[rows][q_stride]`, zero behind head_dim up to a whole vector.
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

/// S = q kᵀ in the columns `lo..hi` of the strip.
///
/// # Safety
/// The processor has V's instructions; the pointers cover what the sizes say.
#[inline(always)]
pub(crate) unsafe fn products<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
) {
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
            let sums = if ROWS > 1 && count == together {
                // Written out: the sums stay in registers.
                let mut sums = [V::splat(V::E::from_f64(0.0)); MAX_LANES];
                for n in 0..together {
                    let acc =
                        one_key::<T, V, ROWS>(key_at(n), q, unpacked.q_stride, block.head_dim);
                    for (r, acc) in acc.into_iter().enumerate() {
                        sums[r * together + n] = acc;
                    }
                }
                V::sums(&sums)
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
                V::sums(&sums)
            };
            let mut scores = [V::E::from_f64(0.0); MAX_LANES];
            sums.store(scores.as_mut_ptr());
            let valid = together.min(end - first);
            for r in 0..ROWS {
                let from = scores.as_ptr().add(r * together);
                let to = block.s.add((row + r) * s_stride::<V::E>() + first);
                if valid == together {
                    std::ptr::copy_nonoverlapping(from, to, together);
                } else {
                    std::ptr::copy_nonoverlapping(from, to, valid);
                }
            }
        }
    }
}

/// Registers of partial sums of `ROWS` rows of q with one key.
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
        let whole = head_dim - head_dim % V::LANES;
        let mut element = 0;
        while element + 4 * V::LANES <= whole {
            for element in (element..element + 4 * V::LANES).step_by(V::LANES) {
                let k = V::load_from(key.add(element));
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = V::load(q.add(r * q_stride + element)).fma(k, *acc);
                }
            }
            element += 4 * V::LANES;
        }
        while element < whole {
            let k = V::load_from(key.add(element));
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(q.add(r * q_stride + element)).fma(k, *acc);
            }
            element += V::LANES;
        }
        if whole < head_dim {
            let k: V = chunk(key.add(whole), 1, head_dim - whole);
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(q.add(r * q_stride + whole)).fma(k, *acc);
            }
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
    let whole = unpacked.head_dim_v - unpacked.head_dim_v % V::LANES;
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
                let mut column = 0;
                while column < whole {
                    let vectors = match (whole - column) / V::LANES {
                        8.. if rows <= 2 => 8,
                        4.. => 4,
                        2.. => 2,
                        _ => 1,
                    };
                    match (rows, vectors) {
                        (2, 8) => some_values::<T, V, 2, 8>(block, unpacked, row, column, key, end),
                        (1, 8) => some_values::<T, V, 1, 8>(block, unpacked, row, column, key, end),
                        (4, 4) => some_values::<T, V, 4, 4>(block, unpacked, row, column, key, end),
                        (4, 2) => some_values::<T, V, 4, 2>(block, unpacked, row, column, key, end),
                        (4, _) => some_values::<T, V, 4, 1>(block, unpacked, row, column, key, end),
                        (2, 4) => some_values::<T, V, 2, 4>(block, unpacked, row, column, key, end),
                        (2, 2) => some_values::<T, V, 2, 2>(block, unpacked, row, column, key, end),
                        (2, _) => some_values::<T, V, 2, 1>(block, unpacked, row, column, key, end),
                        (_, 4) => some_values::<T, V, 1, 4>(block, unpacked, row, column, key, end),
                        (_, 2) => some_values::<T, V, 1, 2>(block, unpacked, row, column, key, end),
                        (_, _) => some_values::<T, V, 1, 1>(block, unpacked, row, column, key, end),
                    }
                    column += vectors * V::LANES;
                }
                if whole < unpacked.head_dim_v {
                    for row in row..row + rows {
                        last_columns::<T, V>(block, unpacked, row, whole, key, end);
                    }
                }
                row += rows;
            }
        }
        key = end;
    }
}

#[inline(always)]
unsafe fn some_values<
    T: Element,
    V: Convert<T> + Vector<E = T::Acc>,
    const ROWS: usize,
    const VECTORS: usize,
>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
    row: usize,
    column: usize,
    key: usize,
    end: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let out = block.acc.add(row * block.width + column);
        let p = block.s.add(row * s_stride::<V::E>());
        let mut acc = [[V::splat(V::E::from_f64(0.0)); VECTORS]; ROWS];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(out.add(r * block.width + n * V::LANES));
            }
        }
        for key in key..end {
            let v = unpacked
                .v
                .wrapping_offset(key as isize * unpacked.v_step)
                .add(column);
            let mut columns = [V::load_from(v); VECTORS];
            for (n, column) in columns.iter_mut().enumerate().skip(1) {
                *column = V::load_from(v.add(n * V::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(p.add(r * s_stride::<V::E>() + key).read());
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = x.fma(column, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                acc.store(out.add(r * block.width + n * V::LANES));
            }
        }
    }
}

/// The columns behind the last whole vector.
#[inline(always)]
unsafe fn last_columns<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    unpacked: &Unpacked<T>,
    row: usize,
    column: usize,
    key: usize,
    end: usize,
) {
    // SAFETY: the caller's promise; Õ has whole vectors.
    unsafe {
        let out = block.acc.add(row * block.width + column);
        let p = block.s.add(row * s_stride::<V::E>());
        let mut acc = V::load(out);
        for key in key..end {
            let v = unpacked
                .v
                .wrapping_offset(key as isize * unpacked.v_step)
                .add(column);
            let v: V = chunk(v, 1, unpacked.head_dim_v - column);
            acc = V::splat(p.add(key).read()).fma(v, acc);
        }
        acc.store(out);
    }
}
