//! The online softmax of a block: Algorithm 1 of FlashAttention-2 (Dao 2023), lines 9 and 10, and
//! its parts for the schedules that take them one at a time.

use std::mem::MaybeUninit;

use num_traits::Float as _;
use tilewise_core::Element;

use super::pairs::Pairs;
use super::{Block, max_key_tile, s_stride};
use crate::exp::exp2_nonpositive;
use crate::simd::Vector;

/// Columns of the strip that hold scores: whole vectors.
#[inline(always)]
fn columns<V: Vector>(block: &Block<V::E>) -> (usize, usize) {
    (
        block.lo - block.lo % V::LANES,
        block.hi.next_multiple_of(V::LANES),
    )
}

/// m' = max(m, rowmax S), α = e^(m − m'), P = e^(S − m') in place of S, ℓ' = αℓ + rowsum P, Õ' = αÕ.
///
/// A score of NaN or +∞ makes ℓ NaN, and with it the row, whatever the maximum does with NaN:
/// e^(NaN − m') and e^(∞ − ∞) are NaN.
///
/// # Safety
/// The processor has V's instructions; the block's pointers cover what its sizes say, and the
/// strip is filled from `lo` to `hi`, rounded outwards to whole vectors.
#[inline(always)]
pub(crate) unsafe fn online<V: Vector>(block: &Block<V::E>) {
    let (from, to) = columns::<V>(block);
    // SAFETY: the caller's promise.
    unsafe { online_columns::<V, Stay>(block, from, to) }
}

/// [`online`] over the columns from..to, whole depths of products of pairs, which leaves P rounded to
/// bf16, from the start of each row on.
///
/// # Safety
/// As [`online`].
#[inline(always)]
pub(crate) unsafe fn online_rounded<D: Pairs>(block: &Block<f32>, from: usize, to: usize) {
    // SAFETY: the caller's promise.
    unsafe { online_columns::<D::V, Rounded<D>>(block, from, to) }
}

/// Where weights go.
trait Put<V: Vector> {
    /// Two neighbouring registers of the row `s`, from `column` on.
    ///
    /// # Safety
    /// The columns are the row's and will not be read as scores again.
    unsafe fn put(s: *mut V::E, column: usize, low: V, high: V);
}

/// In place of the scores.
struct Stay;

impl<V: Vector> Put<V> for Stay {
    #[inline(always)]
    unsafe fn put(s: *mut V::E, column: usize, low: V, high: V) {
        // SAFETY: the caller's promise.
        unsafe {
            low.store(s.add(column));
            high.store(s.add(column + V::LANES));
        }
    }
}

/// As bf16, half as far from the start of the row.
struct Rounded<D>(std::marker::PhantomData<D>);

impl<D: Pairs> Put<D::V> for Rounded<D> {
    #[inline(always)]
    unsafe fn put(s: *mut f32, column: usize, low: D::V, high: D::V) {
        // SAFETY: the caller's promise.
        unsafe { D::round(low, high, s.cast::<u16>().add(column)) }
    }
}

#[inline(always)]
unsafe fn online_columns<V: Vector, P: Put<V>>(block: &Block<V::E>, from: usize, to: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            let before = block.m.add(row).read();
            let max = row_max::<V>(s, from, to, before);
            block.m.add(row).write(max);
            let base = finite_base(max);
            let sum = exponentiate_row::<V, P>(block, s, from, to, base);
            let l = block.l.add(row);
            // Before the first live key Õ is 0 and ℓ is 0: nothing to rescale.
            if before == max || before == V::E::neg_infinity() {
                l.write(l.read() + sum);
                continue;
            }
            let shift = V::splat((before - base) * block.c);
            let alpha = exp2_nonpositive(shift);
            let mut lanes = [V::E::from_f64(0.0); crate::simd::MAX_LANES];
            alpha.store(lanes.as_mut_ptr());
            l.write(l.read() * lanes[0] + sum);
            let acc = block.acc.add(row * block.width);
            for column in (0..block.width).step_by(V::LANES) {
                V::load(acc.add(column)).mul(alpha).store(acc.add(column));
            }
        }
    }
}

/// m' = max(m, rowmax S) alone.
///
/// # Safety
/// As [`online`].
#[inline(always)]
pub(crate) unsafe fn maxima<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, to) = columns::<V>(block);
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            let m = block.m.add(row);
            m.write(row_max::<V>(s, from, to, m.read()));
        }
    }
}

/// P = e^(S − m) in place of S, with m final; ℓ' = ℓ + rowsum P.
///
/// # Safety
/// As [`online`].
#[inline(always)]
pub(crate) unsafe fn exponentiate<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, to) = columns::<V>(block);
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            let base = finite_base(block.m.add(row).read());
            let sum = exponentiate_row::<V, Stay>(block, s, from, to, base);
            let l = block.l.add(row);
            l.write(l.read() + sum);
        }
    }
}

/// P' = P/ℓ, with ℓ final.
///
/// # Safety
/// As [`online`].
#[inline(always)]
pub(crate) unsafe fn normalise<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, to) = columns::<V>(block);
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            let l = block.l.add(row).read();
            // A row without a live key has P = 0 already.
            let l = if l == V::E::from_f64(0.0) {
                V::E::from_f64(1.0)
            } else {
                l
            };
            let l = V::splat(l);
            for column in (from..to).step_by(V::LANES) {
                V::load(s.add(column)).div(l).store(s.add(column));
            }
        }
    }
}

/// What is subtracted from scores: −∞ (no live key yet) would turn S − m into NaN.
#[inline(always)]
fn finite_base<E: tilewise_core::Float>(m: E) -> E {
    if m == E::neg_infinity() {
        E::from_f64(0.0)
    } else {
        m
    }
}

#[inline(always)]
unsafe fn row_max<V: Vector>(s: *const V::E, from: usize, to: usize, m: V::E) -> V::E {
    // SAFETY: the caller's promise: columns from..to of the row are filled.
    unsafe {
        let mut max = V::splat(m);
        let mut second = max;
        let mut column = from;
        while column + 2 * V::LANES <= to {
            max = max.max(V::load(s.add(column)));
            second = second.max(V::load(s.add(column + V::LANES)));
            column += 2 * V::LANES;
        }
        if column < to {
            max = max.max(V::load(s.add(column)));
        }
        max.max(second).reduce_max()
    }
}

#[inline(always)]
unsafe fn exponentiate_row<V: Vector, P: Put<V>>(
    block: &Block<V::E>,
    s: *mut V::E,
    from: usize,
    to: usize,
    base: V::E,
) -> V::E {
    // SAFETY: the caller's promise: columns from..to of the row are filled.
    unsafe {
        let (base, c) = (V::splat(base), V::splat(block.c));
        let zero = V::splat(V::E::from_f64(0.0));
        let mut scores = [const { MaybeUninit::<V::E>::uninit() }; 256];
        if block.careful {
            debug_assert!(to <= max_key_tile::<V::E>());
            std::ptr::copy_nonoverlapping(s.add(from), scores.as_mut_ptr().cast(), to - from);
        }
        // Columns are summed in lanes by their position in the tile, two chains of them.
        let (mut sum, mut second) = (zero, zero);
        let mut column = from;
        if !column.is_multiple_of(2 * V::LANES) {
            let p = exp2_nonpositive(V::load(s.add(column)).sub(base).mul(c));
            p.store(s.add(column));
            second = second.add(p);
            column += V::LANES;
        }
        while column + 2 * V::LANES <= to {
            let p = exp2_nonpositive(V::load(s.add(column)).sub(base).mul(c));
            let p2 = exp2_nonpositive(V::load(s.add(column + V::LANES)).sub(base).mul(c));
            P::put(s, column, p, p2);
            sum = sum.add(p);
            second = second.add(p2);
            column += 2 * V::LANES;
        }
        if column < to {
            let p = exp2_nonpositive(V::load(s.add(column)).sub(base).mul(c));
            p.store(s.add(column));
            sum = sum.add(p);
        }
        if block.careful {
            // From here on P = 0 means hidden: a live weight that underflowed gets the least number
            // that is not 0, so that NaN · P is NaN as defined.
            for column in from..to {
                let p = s.add(column);
                if p.read() == V::E::from_f64(0.0)
                    && scores[column - from].assume_init() != V::E::neg_infinity()
                {
                    p.write(V::E::min_positive_value());
                }
            }
        }
        sum.add(second).reduce_add()
    }
}
