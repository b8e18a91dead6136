//! Whole rows: the end of a row's state, and the joining of two.

use tilewise_core::Element;

use crate::simd::{Convert, MAX_LANES, Vector};

/// out = Õ/divisor, rounded to T.
///
/// # Safety
/// The processor has V's instructions; `acc` has `len` elements rounded up to whole vectors, `out`
/// has `len`.
#[inline(always)]
pub(crate) unsafe fn finish<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    acc: *const V::E,
    divisor: V::E,
    len: usize,
    out: *mut T,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let divisor = V::splat(divisor);
        let mut first = 0;
        while first + V::LANES <= len {
            V::load(acc.add(first))
                .div(divisor)
                .store_to(out.add(first));
            first += V::LANES;
        }
        if first < len {
            let mut lanes = [T::default(); MAX_LANES];
            V::load(acc.add(first))
                .div(divisor)
                .store_to(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out.add(first), len - first);
        }
    }
}

/// x = a·x + b·y, element by element.
///
/// # Safety
/// The processor has V's instructions; `x` and `y` have `len` elements, a whole number of vectors.
#[inline(always)]
pub(crate) unsafe fn combine<V: Vector>(
    len: usize,
    a: V::E,
    x: *mut V::E,
    b: V::E,
    y: *const V::E,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (V::splat(a), V::splat(b));
        for first in (0..len).step_by(V::LANES) {
            let scaled = V::load(x.add(first)).mul(a);
            b.fma(V::load(y.add(first)), scaled).store(x.add(first));
        }
    }
}

/// Whether none of `len` elements is NaN or infinite.
///
/// # Safety
/// The processor has V's instructions; `x` has `len` elements, a whole number of vectors.
#[inline(always)]
pub(crate) unsafe fn all_finite<V: Vector>(len: usize, x: *const V::E) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(V::E::from_f64(0.0));
        // 0 · x is NaN for what is not finite.
        let mut poison = [zero; 4];
        for first in (0..len).step_by(V::LANES) {
            let sum = &mut poison[first / V::LANES % 4];
            *sum = V::load(x.add(first)).fma(zero, *sum);
        }
        let sum = poison[0].add(poison[1]).add(poison[2].add(poison[3]));
        sum.reduce_add() == V::E::from_f64(0.0)
    }
}
