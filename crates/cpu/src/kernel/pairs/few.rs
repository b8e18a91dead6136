//! Few query rows on products of pairs, against bf16 as they lie in memory.
//!
//! Pairs along head_dim are neighbours in a row of K: S = q kᵀ is [`spread`](crate::kernel::spread)
//! over words of two elements. Pairs along keys are not: for Õ += P v the rows of V of two keys are
//! interleaved in registers, even and odd columns apart, so that Õ has the order of
//! [`few::place`](crate::kernel::few::place) with whole groups of 2 · `LANES` elements.
//!
//! K and V are not looked through for *odd* numbers (see [`pack`](super::pack)) before they are
//! multiplied. What the instructions take for 0 cannot matter in a score if no element of q is
//! subnormal and none is above BIG: other queries have their scores made apart. Whether an odd value
//! mattered shows in Õ: see [`trusted`].

use tilewise_core::Element;

use super::pack::{BIG, is_odd};
use super::{ROW_STRIDE, emulated::Emulated};
use crate::kernel::few::{Unpacked, ask_for, keys_ahead};
use crate::kernel::spread::{self, Multiply};
use crate::kernel::{Block, Plane, s_stride};
use crate::simd::{MAX_LANES, Vector};

/// Keys whose values all columns are taken of before the next: they stay in L1 between columns.
const KEYS_TOGETHER: usize = 32;

/// Õ of a row, in magnitude, from which on what was taken for 0 on the way cannot be seen: n keys lost
/// less than n · 2⁻¹²⁶, and the largest value that they saw is above 2⁻⁴⁰/n, of which an error of
/// 2⁻²⁰ is allowed; so n may be 2³³.
const LARGE: f32 = 1.0 / (1u64 << 40) as f32;

/// Bits of the least bf16 that is not subnormal.
const NORMAL: u16 = 1 << 7;

/// What multiplies words of two bf16.
///
/// # Safety
/// As [`Multiply`].
pub(crate) unsafe trait PairsInPlace: Multiply<V: Vector<E = f32>> {
    /// Registers of 2 · `LANES` columns of two keys' values as words of both: even columns, odd ones.
    unsafe fn interleave(first: Self::V, second: Self::V) -> [Self::V; 2];
    /// [`Pairs::round`](super::Pairs::round).
    ///
    /// # Safety
    /// As there.
    unsafe fn round(low: Self::V, high: Self::V, to: *mut u16);
}

/// The functions for inputs of type T.
#[derive(Clone, Copy)]
pub(crate) struct FewPairs<T: Element> {
    /// [`query`].
    pub(crate) query: unsafe fn(Plane<T>, usize, bool, spread::Place, *mut T::Acc) -> bool,
    /// [`spread::products`].
    pub(crate) products: unsafe fn(&Block<T::Acc>, &Unpacked<T>),
    /// [`round`].
    pub(crate) round: unsafe fn(&Block<T::Acc>),
    /// [`weighted_values`].
    pub(crate) weighted: unsafe fn(&Block<T::Acc>, &Unpacked<T>),
    /// [`trusted`].
    pub(crate) trusted: unsafe fn(&Block<T::Acc>) -> bool,
    /// Whether a value, so many elements from a pointer on, is odd.
    pub(crate) is_odd: unsafe fn(*const T, usize) -> bool,
    /// Of [`few::place`](crate::kernel::few::place).
    pub(crate) interleaved: usize,
}

/// Puts `len` elements of a query, with the other sign if `negate`, where [`spread::products`] looks for
/// them, or nothing if it returns true: the query is odd.
///
/// # Safety
/// The query has `len` elements, `to` has room for the rows of the block.
#[inline(always)]
pub(crate) unsafe fn query(
    from: Plane<u16>,
    len: usize,
    negate: bool,
    place: spread::Place,
    to: *mut f32,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let element = |d: usize| from.at.wrapping_offset(d as isize * from.key).read();
        let is_odd = (0..len).map(element).any(|x| {
            let magnitude = x & 0x7fff;
            magnitude > BIG || (magnitude != 0 && magnitude < NORMAL)
        });
        if is_odd {
            return true;
        }
        let sign = if negate { 0x8000 } else { 0 };
        for d in 0..len {
            let (word, half) = place.of(d, 2);
            to.add(word)
                .cast::<u16>()
                .add(half)
                .write(element(d) ^ sign);
        }
        false
    }
}

/// Whether a value is odd.
///
/// # Safety
/// It has `len` elements.
#[inline(always)]
pub(crate) unsafe fn is_odd_value(at: *const u16, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { is_odd(at, 1, len, true) }
}

/// Rounds P to bf16, from the start of each row on.
///
/// # Safety
/// The processor has the instructions; the strip is filled in whole vectors around `lo..hi`.
#[inline(always)]
pub(crate) unsafe fn round<D: PairsInPlace>(block: &Block<f32>) {
    let both = 2 * D::V::LANES;
    for row in 0..block.rows {
        // SAFETY: the caller's promise; a tile is a multiple of `both`. What is written lies before what is
        // read next.
        unsafe {
            let s = block.s.add(row * s_stride::<f32>());
            for column in (block.lo - block.lo % both..block.hi).step_by(both) {
                let low = D::V::load(s.add(column));
                let high = D::V::load(s.add(column + D::V::LANES));
                D::round(low, high, s.cast::<u16>().add(column));
            }
        }
    }
}

/// Whether Õ of every row that saw some key is finite, and large enough somewhere for nothing that was
/// taken for 0 to matter.
///
/// # Safety
/// The processor has the instructions; the block's pointers cover what its sizes say.
#[inline(always)]
pub(crate) unsafe fn trusted<V: Vector<E = f32>>(block: &Block<f32>) -> bool {
    for row in 0..block.rows {
        if block.live[row].0 == block.live[row].1 {
            continue;
        }
        // SAFETY: the caller's promise; Õ has whole vectors.
        unsafe {
            let zero = V::splat(0.0);
            let (mut poison, mut max) = (zero, zero);
            for column in (0..block.width).step_by(V::LANES) {
                let x = V::load(block.acc.add(row * block.width + column));
                // 0 · x is NaN for what is not finite.
                poison = x.fma(zero, poison);
                max = max.max(x.abs());
            }
            if poison.reduce_add() != 0.0 || max.reduce_max() < LARGE {
                return false;
            }
        }
    }
    true
}

/// Õ += P v over the keys `lo..hi`, pairs of keys (2n, 2n + 1) of the tile ascending: a pair of which one
/// is not among them adds the other alone, to the same bits as if its weight were 0.
///
/// # Safety
/// As [`trusted`]; the strip holds P as bf16, 0 for what a row does not see.
#[inline(always)]
pub(crate) unsafe fn weighted_values<T: Element, D: PairsInPlace>(
    block: &Block<f32>,
    unpacked: &Unpacked<T>,
) {
    let group = 2 * D::V::LANES;
    let whole = unpacked.head_dim_v - unpacked.head_dim_v % group;
    let mut key = block.lo - block.lo % 2;
    while key < block.hi {
        let end = (key + KEYS_TOGETHER).min(block.hi);
        let mut row = 0;
        while row < block.rows {
            let rows = match block.rows - row {
                8.. => 8,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let at = (row, key, end);
            // SAFETY: the caller's promise; all these rows, keys and columns are inside the block.
            unsafe {
                let mut column = 0;
                while column < whole {
                    let groups = match (rows, (whole - column) / group) {
                        (1 | 2, 4..) => 4,
                        (4, 2..) => 2,
                        _ => 1,
                    };
                    match (rows, groups) {
                        (8, _) => some_values::<T, D, 8, 1>(block, unpacked, at, column),
                        (4, 2) => some_values::<T, D, 4, 2>(block, unpacked, at, column),
                        (4, _) => some_values::<T, D, 4, 1>(block, unpacked, at, column),
                        (2, 4) => some_values::<T, D, 2, 4>(block, unpacked, at, column),
                        (2, _) => some_values::<T, D, 2, 1>(block, unpacked, at, column),
                        (_, 4) => some_values::<T, D, 1, 4>(block, unpacked, at, column),
                        (_, _) => some_values::<T, D, 1, 1>(block, unpacked, at, column),
                    }
                    column += groups * group;
                }
                if column < unpacked.head_dim_v {
                    for row in row..row + rows {
                        last_columns::<T, D>(block, unpacked, (row, key, end), column);
                    }
                }
            }
            row += rows;
        }
        key = end;
    }
}

/// `ROWS` rows and `GROUPS` × 2 · `LANES` columns from `column` on, over the keys of `(row, key, end)`.
#[inline(always)]
unsafe fn some_values<T: Element, D: PairsInPlace, const ROWS: usize, const GROUPS: usize>(
    block: &Block<f32>,
    unpacked: &Unpacked<T>,
    (row, key, end): (usize, usize, usize),
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = D::V::LANES;
        let zero = D::V::splat(0.0);
        let out = block.acc.add(row * block.width + column);
        let out =
            |r: usize, group: usize, n: usize| out.add(r * block.width + (2 * group + n) * lanes);
        let p = block.s.add(row * s_stride::<f32>()).cast::<u16>();
        let mut acc = [[[zero; 2]; GROUPS]; ROWS];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (group, acc) in acc.iter_mut().enumerate() {
                *acc = [D::V::load(out(r, group, 0)), D::V::load(out(r, group, 1))];
            }
        }
        let asks = block.rows > 1 && row == 0;
        let mut key = key;
        if key < block.lo {
            let there = (false, key + 1 < block.hi);
            add_pair::<T, D, ROWS, GROUPS>(unpacked, p, key, column, there, asks, &mut acc);
            key += 2;
        }
        while key + 1 < end {
            add_pair::<T, D, ROWS, GROUPS>(unpacked, p, key, column, (true, true), asks, &mut acc);
            key += 2;
        }
        if key < end {
            add_pair::<T, D, ROWS, GROUPS>(unpacked, p, key, column, (true, false), asks, &mut acc);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (group, acc) in acc.iter().enumerate() {
                acc[0].store(out(r, group, 0));
                acc[1].store(out(r, group, 1));
            }
        }
    }
}

/// The keys `key` and `key + 1`, those of them that are `there`.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // where it is, and what it adds to
unsafe fn add_pair<T: Element, D: PairsInPlace, const ROWS: usize, const GROUPS: usize>(
    unpacked: &Unpacked<T>,
    p: *const u16,
    key: usize,
    column: usize,
    there: (bool, bool),
    asks: bool,
    acc: &mut [[[D::V; 2]; GROUPS]; ROWS],
) {
    // SAFETY: the caller's promise: keys that are there have values.
    unsafe {
        let both = 2 * D::V::LANES;
        let zero = D::V::splat(0.0);
        let first = unpacked.v.wrapping_offset(key as isize * unpacked.v_step);
        let first = first.wrapping_add(column);
        let second = first.wrapping_offset(unpacked.v_step);
        if asks {
            let ahead = keys_ahead::<T>(unpacked.head_dim_v) as isize * unpacked.v_step;
            ask_for(first.wrapping_offset(ahead), GROUPS * both);
            ask_for(second.wrapping_offset(ahead), GROUPS * both);
        }
        let mut words = [[zero; 2]; GROUPS];
        for (group, words) in words.iter_mut().enumerate() {
            let (mut low, mut high) = (zero, zero);
            if there.0 {
                low = D::V::load(first.wrapping_add(group * both).cast());
            }
            if there.1 {
                high = D::V::load(second.wrapping_add(group * both).cast());
            }
            *words = D::interleave(low, high);
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = D::V::repeat(p.add(r * ROW_STRIDE + key).cast::<f32>(), 1);
            for (acc, words) in acc.iter_mut().zip(words) {
                acc[0] = D::add_product(x, words[0], acc[0]);
                acc[1] = D::add_product(x, words[1], acc[1]);
            }
        }
    }
}

/// The columns behind the last whole group, in order.
#[inline(always)]
unsafe fn last_columns<T: Element, D: PairsInPlace>(
    block: &Block<f32>,
    unpacked: &Unpacked<T>,
    (row, key, end): (usize, usize, usize),
    column: usize,
) {
    // SAFETY: the caller's promise; Õ has whole vectors.
    unsafe {
        let lanes = D::V::LANES;
        let left = unpacked.head_dim_v - column;
        let vectors = left.div_ceil(lanes);
        let out = block.acc.add(row * block.width + column);
        let p = block.s.add(row * s_stride::<f32>()).cast::<u16>();
        let mut acc = [D::V::splat(0.0); 2];
        for (n, acc) in acc.iter_mut().take(vectors).enumerate() {
            *acc = D::V::load(out.add(n * lanes));
        }
        for key in (key..end).step_by(2) {
            // Such that even columns are the first vector, and odd ones the second.
            let mut values = [[0u16; 2 * MAX_LANES]; 2];
            for (n, values) in values.iter_mut().enumerate() {
                let key = key + n;
                if key < block.lo || key >= block.hi {
                    continue;
                }
                let v = unpacked.v.wrapping_offset(key as isize * unpacked.v_step);
                let v = v.add(column).cast::<u16>();
                for c in 0..left {
                    (*values)[2 * (c % lanes) + c / lanes] = v.add(c).read();
                }
            }
            let first = D::V::load(values[0].as_ptr().cast::<f32>());
            let second = D::V::load(values[1].as_ptr().cast::<f32>());
            let words = D::interleave(first, second);
            let x = D::V::repeat(p.add(key).cast::<f32>(), 1);
            for (acc, words) in acc.iter_mut().zip(words) {
                *acc = D::add_product(x, words, *acc);
            }
        }
        for (n, acc) in acc.iter().take(vectors).enumerate() {
            acc.store(out.add(n * lanes));
        }
    }
}

// SAFETY: plain Rust.
unsafe impl Multiply for Emulated {
    type V = <Emulated as super::Pairs>::V;
    const ELEMENTS: usize = 2;

    unsafe fn add_product(q: Self::V, k: Self::V, sum: Self::V) -> Self::V {
        let mut lanes = [[0f32; MAX_LANES]; 3];
        // SAFETY: the arrays have room for a register.
        unsafe {
            for (lanes, register) in lanes.iter_mut().zip([q, k, sum]) {
                register.store(lanes.as_mut_ptr());
            }
            let [q, k, mut sum] = lanes;
            for (lane, sum) in sum.iter_mut().enumerate() {
                *sum = Emulated::add_pair(q[lane].to_bits(), k[lane].to_bits(), *sum);
            }
            Self::V::load(sum.as_ptr())
        }
    }
}

// SAFETY: plain Rust.
unsafe impl PairsInPlace for Emulated {
    unsafe fn interleave(first: Self::V, second: Self::V) -> [Self::V; 2] {
        let mut words = [[0f32; MAX_LANES]; 2];
        // SAFETY: the arrays have room for a register.
        unsafe {
            first.store(words[0].as_mut_ptr());
            second.store(words[1].as_mut_ptr());
            let [first, second] = words.map(|words| words.map(f32::to_bits));
            let even = |n: usize| f32::from_bits(first[n] & 0xffff | second[n] << 16);
            let odd = |n: usize| f32::from_bits(first[n] >> 16 | second[n] & 0xffff_0000);
            let words: [[f32; MAX_LANES]; 2] =
                [std::array::from_fn(even), std::array::from_fn(odd)];
            words.map(|words| Self::V::load(words.as_ptr()))
        }
    }

    #[inline(always)]
    unsafe fn round(low: Self::V, high: Self::V, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { <Emulated as super::Pairs>::round(low, high, to) }
    }
}
