//! Scores of few query rows against keys as they lie in memory, without a sum over lanes for each:
//! the rows are spread over the lanes of a register.
//!
//! A register of q holds a few neighbouring *words* of each of some rows: 4 words of each of 4 rows, or 1
//! word of each of 16. It is multiplied by as many words of a key, repeated once for each row: such
//! loads cost no more than others. So what is left of a score are 4 numbers or 1, not 16, and each
//! word of q is loaded once for several keys.
//!
//! A word is what a lane multiplies: an element, or a pair of bf16 (see
//! [`pairs::few`](super::pairs::few)).

use std::hint::black_box;
use std::marker::PhantomData;

use tilewise_core::Element;

use super::few::{Unpacked, keys_ahead};
use super::{Block, LINE, s_stride};
use crate::simd::{MAX_LANES, Vector, prefetch_far};

/// Keys whose sums stay in registers together.
const KEYS: usize = 4;

/// What multiplies words.
///
/// # Safety
/// As [`Vector`]'s methods.
pub(crate) unsafe trait Multiply {
    type V: Vector;
    /// Elements of a word.
    const ELEMENTS: usize;
    /// sum + q · k, word by word.
    unsafe fn add_product(q: Self::V, k: Self::V, sum: Self::V) -> Self::V;
}

/// Words that are elements.
pub(crate) struct Elements<V>(PhantomData<V>);

// SAFETY: one method of `Vector`.
unsafe impl<V: Vector> Multiply for Elements<V> {
    type V = V;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    unsafe fn add_product(q: V, k: V, sum: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { q.fma(k, sum) }
    }
}

/// The next rows that are spread together, of `left` rows.
#[inline(always)]
fn block_for(left: usize, lanes: usize) -> usize {
    // A larger block than there are rows, if less than a quarter of it stays empty.
    let whole = left.min(lanes).next_power_of_two();
    if whole <= left || 4 * (whole - left) < whole || left == 3 {
        whole
    } else {
        whole / 2
    }
}

/// Where the elements of a row stand in the queries that [`products`] takes.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Word of the row's block that is its first.
    first: usize,
    /// Words of the row that are neighbours.
    phases: usize,
    lanes: usize,
}

impl Place {
    /// Of row `row` of `rows`, at most [`MAX_ROWS`](super::MAX_ROWS), `q_stride` words apart.
    pub(crate) fn new(row: usize, rows: usize, q_stride: usize, lanes: usize) -> Self {
        let mut first = 0;
        loop {
            let block = block_for(rows - first, lanes);
            if row < first + block {
                let phases = lanes / block;
                return Place {
                    first: first * q_stride + (row - first) * phases,
                    phases,
                    lanes,
                };
            }
            first += block;
        }
    }

    /// The word of element `d`, and its place among the `elements` of the word.
    pub(crate) fn of(&self, d: usize, elements: usize) -> (usize, usize) {
        let word = d / elements;
        let at = self.first + word / self.phases * self.lanes + word % self.phases;
        (at, d % elements)
    }
}

/// S = q kᵀ in the columns `lo..hi` of the strip. Of the strip's rows as many are written as the last
/// block of rows has, filled or not.
///
/// # Safety
/// The processor has the instructions; the pointers cover what the sizes say, q up to whole registers,
/// with zeros where there is no element.
#[inline(always)]
pub(crate) unsafe fn products<T: Element, M: Multiply<V: Vector<E = T::Acc>>>(
    block: &Block<T::Acc>,
    unpacked: &Unpacked<T>,
) {
    let lanes = M::V::LANES;
    for key in (block.lo..block.hi).step_by(lanes) {
        let end = (key + lanes).min(block.hi);
        let mut row = 0;
        while row < block.rows {
            let rows = block_for(block.rows - row, lanes);
            // SAFETY: the caller's promise; all these rows and keys are inside the block.
            unsafe {
                match rows {
                    16 if lanes >= 16 => some_rows::<T, M, 16>(block, unpacked, row, key, end),
                    8 if lanes >= 8 => some_rows::<T, M, 8>(block, unpacked, row, key, end),
                    4 => some_rows::<T, M, 4>(block, unpacked, row, key, end),
                    2 => some_rows::<T, M, 2>(block, unpacked, row, key, end),
                    _ => some_rows::<T, M, 1>(block, unpacked, row, key, end),
                }
            }
            row += rows;
        }
    }
}

/// `ROWS` rows from `row` on against keys from `key` to `end`, at most a register of them.
#[inline(always)]
unsafe fn some_rows<T: Element, M: Multiply<V: Vector<E = T::Acc>>, const ROWS: usize>(
    block: &Block<T::Acc>,
    unpacked: &Unpacked<T>,
    row: usize,
    key: usize,
    end: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let q = unpacked.q.add(row * unpacked.q_stride);
        let step = unpacked.k_step;
        let at = |n: usize| unpacked.k.wrapping_offset((key + n) as isize * step);
        let mut sums = [M::V::splat(T::Acc::from_f64(0.0)); MAX_LANES];
        let mut n = 0;
        if ROWS > 1 {
            let ahead = match row {
                0 => Some(keys_ahead::<T>(block.head_dim) as isize * step),
                _ => None,
            };
            while n + KEYS <= end - key {
                let some = some_keys::<T, M, ROWS, KEYS>(at(n), step, q, block.head_dim, ahead);
                sums[n..n + KEYS].copy_from_slice(&some);
                n += KEYS;
            }
        }
        // A single row waits for memory alone: all keys by the same few load instructions, in steps
        // that the processor's prefetcher recognises. The count is hidden from the compiler, which
        // would give each key instructions of its own.
        let count = black_box(end - key);
        while n < count {
            [sums[n]] = some_keys::<T, M, ROWS, 1>(at(n), step, q, block.head_dim, None);
            n += 1;
        }
        M::V::group_sums(&mut sums, M::V::LANES / ROWS);
        for (r, scores) in sums.iter().take(ROWS).enumerate() {
            // The strip has room for a whole register behind any key of the tile.
            scores.store(block.s.add((row + r) * s_stride::<T::Acc>() + key));
        }
    }
}

/// The sums, still apart in lanes, of `ROWS` rows with `N` keys, and a request for what stands `ahead`
/// elements behind each of them.
#[inline(always)]
unsafe fn some_keys<
    T: Element,
    M: Multiply<V: Vector<E = T::Acc>>,
    const ROWS: usize,
    const N: usize,
>(
    key: *const T,
    step: isize,
    q: *const T::Acc,
    head_dim: usize,
    ahead: Option<isize>,
) -> [M::V; N] {
    let zero = T::Acc::from_f64(0.0);
    let phases = (M::V::LANES / ROWS).max(1);
    let taken = phases * M::ELEMENTS;
    let line = (LINE / size_of::<T>()).max(2 * taken);
    // SAFETY: the caller's promise.
    unsafe {
        let at = |n: usize| key.wrapping_offset(n as isize * step);
        // Two sums each, which need not wait for one another.
        let mut sums = [[M::V::splat(zero); 2]; N];
        let (mut element, mut q) = (0, q);
        while element + line <= head_dim {
            if let Some(ahead) = ahead {
                for n in 0..N {
                    prefetch_far(at(n).wrapping_offset(ahead).wrapping_add(element));
                }
            }
            let end = element + line;
            while element < end {
                let (even, odd) = (M::V::load(q), M::V::load(q.add(M::V::LANES)));
                q = q.add(2 * M::V::LANES);
                for (n, sums) in sums.iter_mut().enumerate() {
                    let k = at(n).add(element);
                    let next = M::V::repeat(k.add(taken).cast(), phases);
                    let k = M::V::repeat(k.cast(), phases);
                    sums[0] = M::add_product(even, k, sums[0]);
                    sums[1] = M::add_product(odd, next, sums[1]);
                }
                element += 2 * taken;
            }
        }
        while element < head_dim {
            let row = M::V::load(q);
            q = q.add(M::V::LANES);
            for (n, sums) in sums.iter_mut().enumerate() {
                let k = at(n).add(element);
                let k = if element + taken <= head_dim {
                    M::V::repeat(k.cast::<T::Acc>(), phases)
                } else {
                    let mut words = [zero; MAX_LANES];
                    std::ptr::copy_nonoverlapping(
                        k,
                        words.as_mut_ptr().cast::<T>(),
                        head_dim - element,
                    );
                    M::V::repeat(words.as_ptr(), phases)
                };
                sums[0] = M::add_product(row, k, sums[0]);
            }
            element += taken;
        }
        let mut whole = [M::V::splat(zero); N];
        for (whole, [a, b]) in whole.iter_mut().zip(sums) {
            *whole = a.add(b);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_of_each_row_has_a_place_of_its_own() {
        for lanes in [4, 8, 16] {
            for rows in 1..=16 {
                for head_dim in [1, 2, 7, 16, 40] {
                    let q_stride = usize::next_multiple_of(head_dim, lanes);
                    let mut places: Vec<_> = (0..rows)
                        .flat_map(|row| (0..head_dim).map(move |d| (row, d)))
                        .map(|(row, d)| Place::new(row, rows, q_stride, lanes).of(d, 1).0)
                        .collect();
                    places.sort_unstable();
                    places.dedup();
                    assert_eq!(places.len(), rows * head_dim);
                    assert!(places[places.len() - 1] < 16 * q_stride);
                }
            }
        }
    }

    #[test]
    fn blocks_of_rows_are_at_most_a_quarter_empty() {
        for lanes in [4, 8, 16] {
            for left in 1..=16 {
                let block = block_for(left, lanes);
                assert!(block.is_power_of_two() && block <= lanes);
                assert!(4 * left >= 3 * block, "{left} rows in a block of {block}");
            }
        }
    }
}
