//! The online softmax of a block: Algorithm 1 of FlashAttention-2 (Dao 2023), lines 9 and 10, and
//! its parts for the schedules that take them one at a time.

use std::mem::MaybeUninit;

use num_traits::Float as _;
use tilewise_core::Element;

use super::pairs::Pairs;
use super::{Block, max_key_tile, s_stride};
use crate::exp::{exp2_nonpositive, exp2_or_subnormal};
use crate::simd::{MAX_LANES, Vector};

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

/// [`online`] over the columns from..to, whole grains of products of pairs, which leaves P rounded to
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
    /// Whether weights may be subnormal.
    const SUBNORMALS: bool = false;
    /// Two neighbouring registers of the row `s`, from `column` on.
    ///
    /// # Safety
    /// The columns are the row's and will not be read as scores again.
    unsafe fn put(s: *mut V::E, column: usize, low: V, high: V);
    /// One register.
    ///
    /// # Safety
    /// As [`Self::put`].
    unsafe fn put_one(s: *mut V::E, column: usize, weights: V);
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

    #[inline(always)]
    unsafe fn put_one(s: *mut V::E, column: usize, weights: V) {
        // SAFETY: the caller's promise.
        unsafe { weights.store(s.add(column)) }
    }
}

/// As bf16, half as far from the start of the row.
struct Rounded<D>(std::marker::PhantomData<D>);

impl<D: Pairs> Put<D::V> for Rounded<D> {
    // They are rounded to 0, and in ℓ they weigh nothing beside the maximum's 1.
    const SUBNORMALS: bool = D::SUBNORMALS;

    #[inline(always)]
    unsafe fn put(s: *mut f32, column: usize, low: D::V, high: D::V) {
        // SAFETY: the caller's promise.
        unsafe { D::round(low, high, s.cast::<u16>().add(column)) }
    }

    // The half behind it is written by the next ones, or not read.
    #[inline(always)]
    unsafe fn put_one(s: *mut f32, column: usize, weights: D::V) {
        // SAFETY: the caller's promise.
        unsafe { Self::put(s, column, weights, D::V::splat(0.0)) }
    }
}

#[inline(always)]
unsafe fn online_columns<V: Vector, P: Put<V>>(block: &Block<V::E>, from: usize, to: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for first in (0..block.rows).step_by(V::LANES) {
            let rows = (block.rows - first).min(V::LANES);
            online_rows::<V, P>(block, first, rows, from, to);
        }
    }
}

/// [`online_columns`] for as many rows as a register has lanes: what is once a row (m, α, ℓ) is done for
/// all of them together.
#[inline(always)]
unsafe fn online_rows<V: Vector, P: Put<V>>(
    block: &Block<V::E>,
    first: usize,
    rows: usize,
    from: usize,
    to: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (zero, one) = (V::E::from_f64(0.0), V::E::from_f64(1.0));
        let at = |row: usize| block.s.wrapping_add((first + row) * s_stride::<V::E>());
        let (m, l) = (block.m.add(first), block.l.add(first));
        let mut tops = [V::E::neg_infinity(); MAX_LANES];
        for row in (0..rows).step_by(TOGETHER) {
            let tops = &mut tops[row..row + TOGETHER];
            row_maxima::<V>(at(row), (rows - row).min(TOGETHER), from, to, tops);
        }
        let old = V::load_first(m, rows);
        let new = old.max(V::load(tops.as_ptr()));
        new.store_first(m, rows);
        // −∞, no live key yet, would turn S − m into NaN.
        let base = V::select_lt(new, V::splat(V::E::min_value()), V::splat(zero), new);
        let c = V::splat(block.c);
        let scaled = base.mul(c);
        let mut offsets = [zero; MAX_LANES];
        scaled.store(offsets.as_mut_ptr());
        // α, of the same rounded m·c that weights are made with.
        let mut alphas = [zero; MAX_LANES];
        exp2_nonpositive(old.mul(c).sub(scaled)).store(alphas.as_mut_ptr());
        let (mut before, mut bases) = ([zero; MAX_LANES], [zero; MAX_LANES]);
        old.store(before.as_mut_ptr());
        base.store(bases.as_mut_ptr());

        let mut totals = [zero; MAX_LANES];
        for row in (0..rows).step_by(TOGETHER) {
            let mut sums = [V::splat(zero); TOGETHER];
            for (n, sum) in sums.iter_mut().enumerate().take(rows - row) {
                let shift = (bases[row + n], offsets[row + n]);
                *sum = exponentiate_row::<V, P>(block, at(row + n), from, to, shift);
                if !in_one_step::<V>(shift.1) {
                    let mut lanes = [zero; MAX_LANES];
                    let exponent = (before[row + n] - shift.0) * block.c;
                    exp2_nonpositive(V::splat(exponent)).store(lanes.as_mut_ptr());
                    alphas[row + n] = lanes[0];
                }
            }
            V::reduce_add4(sums, &mut totals[row..row + TOGETHER]);
        }
        let (alpha, total) = (V::load(alphas.as_ptr()), V::load(totals.as_ptr()));
        V::load_first(l, rows)
            .fma(alpha, total)
            .store_first(l, rows);

        for (row, &alpha) in alphas.iter().enumerate().take(rows) {
            // Before the first live key Õ is 0: nothing to rescale.
            if alpha == one || before[row] == V::E::neg_infinity() {
                continue;
            }
            let alpha = V::splat(alpha);
            let acc = block.acc.add((first + row) * block.width);
            for column in (0..block.width).step_by(V::LANES) {
                V::load(acc.add(column)).mul(alpha).store(acc.add(column));
            }
        }
    }
}

/// Rows of which maxima and sums are taken at once.
const TOGETHER: usize = 4;

/// The maxima of up to four rows, the first of which is `s`.
#[inline(always)]
unsafe fn row_maxima<V: Vector>(
    s: *const V::E,
    rows: usize,
    from: usize,
    to: usize,
    tops: &mut [V::E],
) {
    // SAFETY: the caller's promise: columns from..to of the rows are filled.
    unsafe {
        if rows < TOGETHER {
            for (row, top) in tops.iter_mut().take(rows).enumerate() {
                let s = s.add(row * s_stride::<V::E>());
                *top = row_max::<V>(s, from, to, V::E::neg_infinity());
            }
            return;
        }
        let mut max = [V::splat(V::E::neg_infinity()); TOGETHER];
        for column in (from..to).step_by(V::LANES) {
            for (row, max) in max.iter_mut().enumerate() {
                *max = max.max(V::load(s.add(row * s_stride::<V::E>() + column)));
            }
        }
        V::reduce_max4(max, tops);
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
            let shift = (base, base * block.c);
            let sum = exponentiate_row::<V, Stay>(block, s, from, to, shift);
            let l = block.l.add(row);
            l.write(l.read() + sum.reduce_add());
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

/// Whether c·S − c·base may take the place of c·(S − base), which costs one operation more: rounded once,
/// its error is half a unit in the last place of c·base, the same for all keys, as scores of that size
/// have it anyway; but where they are huge that is a number above 0 with a power out of range. Rounded
/// twice it would add an error of each key's own.
#[inline(always)]
fn in_one_step<V: Vector>(offset: V::E) -> bool {
    V::FUSED && offset.abs() <= V::E::from_f64(1024.0)
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

/// P = 2^(c·(S − base)) in place of S, or where `P` puts it; the sums of P in lanes. `offset` is c · base.
#[inline(always)]
unsafe fn exponentiate_row<V: Vector, P: Put<V>>(
    block: &Block<V::E>,
    s: *mut V::E,
    from: usize,
    to: usize,
    (base, offset): (V::E, V::E),
) -> V {
    // SAFETY: the caller's promise: columns from..to of the row are filled.
    unsafe {
        let mut scores = [const { MaybeUninit::<V::E>::uninit() }; 256];
        if block.careful {
            debug_assert!(to <= max_key_tile::<V::E>());
            std::ptr::copy_nonoverlapping(s.add(from), scores.as_mut_ptr().cast(), to - from);
        }
        let c = V::splat(block.c);
        let sum = if in_one_step::<V>(offset) {
            let offset = V::splat(V::E::from_f64(0.0) - offset);
            weights::<V, P, true>(s, from, to, c, offset)
        } else {
            weights::<V, P, false>(s, from, to, c, V::splat(base))
        };
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
        sum
    }
}

/// e^(S − m) of one register; what `shift` is depends on `FUSED`: see [`in_one_step`].
#[inline(always)]
unsafe fn weight<V: Vector, P: Put<V>, const FUSED: bool>(s: *const V::E, c: V, shift: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let s = V::load(s);
        let x = if FUSED {
            s.fma(c, shift)
        } else {
            s.sub(shift).mul(c)
        };
        if P::SUBNORMALS {
            exp2_or_subnormal(x)
        } else {
            exp2_nonpositive(x)
        }
    }
}

/// P of a row, and the sums of it in lanes.
#[inline(always)]
unsafe fn weights<V: Vector, P: Put<V>, const FUSED: bool>(
    s: *mut V::E,
    from: usize,
    to: usize,
    c: V,
    shift: V,
) -> V {
    // SAFETY: the caller's promise: columns from..to of the row are filled.
    unsafe {
        let zero = V::splat(V::E::from_f64(0.0));
        // Columns are summed in lanes by their position in the tile, two chains of them.
        let (mut sum, mut second) = (zero, zero);
        let mut column = from;
        if !column.is_multiple_of(2 * V::LANES) {
            let p = weight::<V, P, FUSED>(s.add(column), c, shift);
            P::put_one(s, column, p);
            second = second.add(p);
            column += V::LANES;
        }
        while column + 2 * V::LANES <= to {
            let p = weight::<V, P, FUSED>(s.add(column), c, shift);
            let p2 = weight::<V, P, FUSED>(s.add(column + V::LANES), c, shift);
            P::put(s, column, p, p2);
            sum = sum.add(p);
            second = second.add(p2);
            column += 2 * V::LANES;
        }
        if column < to {
            let p = weight::<V, P, FUSED>(s.add(column), c, shift);
            P::put_one(s, column, p);
            sum = sum.add(p);
        }
        sum.add(second)
    }
}
