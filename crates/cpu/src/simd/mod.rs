//! The small vector trait that the kernels are written over, and its three bindings.
//!
//! A kernel is generic over [`Vector`] and `#[inline(always)]` down to the last method; only the
//! outermost function of each binding (in [`crate::kernel::table`]) carries `#[target_feature]`, so
//! the whole kernel is compiled for that instruction set and the choice is made once a call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

use tilewise_core::{DType, Element, Float};

/// The most lanes of any binding: sizes stack buffers.
pub(crate) const MAX_LANES: usize = 16;

/// A register of f32 or f64 lanes.
///
/// # Safety
/// Implementors promise that `load` and `store` touch exactly `LANES` consecutive elements, which
/// need no more than element alignment.
///
/// Every method may be called only where the processor has the binding's instructions.
pub(crate) unsafe trait Vector: Copy {
    /// Lane type.
    type E: Float;
    /// Lanes a register.
    const LANES: usize;
    /// Rows of the widest register block of the microkernel; see [`crate::kernel::gemm`].
    const MR: usize;
    /// Registers across the register block.
    const NRV: usize;
    /// Columns of a packed panel.
    const NR: usize = Self::NRV * Self::LANES;
    /// Whether [`fma`](Self::fma) rounds once.
    const FUSED: bool;

    unsafe fn splat(x: Self::E) -> Self;
    unsafe fn load(from: *const Self::E) -> Self;
    unsafe fn store(self, to: *mut Self::E);
    /// The first `n` lanes, at most `LANES`; the others are 0.
    #[inline(always)]
    unsafe fn load_first(from: *const Self::E, n: usize) -> Self {
        let mut lanes = [Self::E::from_f64(0.0); MAX_LANES];
        // SAFETY: the caller vouches for n ≤ LANES elements behind `from`.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n);
            Self::load(lanes.as_ptr())
        }
    }
    /// The reverse.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut Self::E, n: usize) {
        let mut lanes = [Self::E::from_f64(0.0); MAX_LANES];
        // SAFETY: the caller vouches for room for n ≤ LANES elements.
        unsafe {
            self.store(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n);
        }
    }
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// self · a + b, rounded once or twice: see [`FUSED`](Self::FUSED).
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// The larger of each pair. Which of a number and a NaN is open.
    unsafe fn max(self, other: Self) -> Self;
    /// To the nearest whole number, ties to even. Open outside ±2²².
    unsafe fn round(self) -> Self;
    /// p · 2ⁿ, where n holds whole numbers; 0 in lanes where x < `min`. NaN in x gives NaN.
    unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: Self::E) -> Self;
    /// p · 2ⁿ, where n = x rounded; what is below the smallest normal number may be subnormal or 0, and is
    /// 0 for x = −∞. NaN in x gives NaN.
    #[inline(always)]
    unsafe fn scale(p: Self, n: Self, x: Self) -> Self {
        let min = match Self::E::DTYPE {
            DType::F32 => -126.0,
            _ => -1022.0,
        };
        // SAFETY: the caller has the instructions.
        unsafe { Self::scale_or_zero(p, n, x, Self::E::from_f64(min)) }
    }
    /// Lane by lane: if a < b then `then`, else `other` (also for NaN).
    unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Magnitude of self, sign of `sign`.
    unsafe fn copysign(self, sign: Self) -> Self;
    /// The largest lane. Which of numbers and NaN is open.
    unsafe fn reduce_max(self) -> Self::E;
    /// The largest lane of each into the first four of `to`.
    #[inline(always)]
    unsafe fn reduce_max4(rows: [Self; 4], to: &mut [Self::E]) {
        for (row, to) in rows.into_iter().zip(to) {
            // SAFETY: the caller has the instructions.
            *to = unsafe { row.reduce_max() };
        }
    }
    /// [`Self::reduce_add`] of each, in an order of its own.
    #[inline(always)]
    unsafe fn reduce_add4(rows: [Self; 4], to: &mut [Self::E]) {
        for (row, to) in rows.into_iter().zip(to) {
            // SAFETY: the caller has the instructions.
            *to = unsafe { row.reduce_add() };
        }
    }
    /// The sum of the lanes, in an order that depends on nothing but `LANES`.
    unsafe fn reduce_add(self) -> Self::E;
    /// 0, 1, 2, …
    unsafe fn iota() -> Self;
    /// Lane n of the result is the sum of the lanes of `rows[n]`, each summed up in the same order.
    unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self;
    /// Transposes the square that `LANES` registers are: `rows` has that many.
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]);
    /// Lane n holds element n mod `count`; `count` divides `LANES`. No alignment is asked for.
    #[inline(always)]
    unsafe fn repeat(from: *const Self::E, count: usize) -> Self {
        let mut lanes = [Self::E::from_f64(0.0); MAX_LANES];
        // SAFETY: the caller vouches for `count` elements behind `from`.
        unsafe {
            for (lane, slot) in lanes.iter_mut().take(Self::LANES).enumerate() {
                *slot = from.add(lane % count).read_unaligned();
            }
            Self::load(lanes.as_ptr())
        }
    }
    /// Takes each of `LANES` registers for groups of `len` neighbours: lane n of register g becomes
    /// the sum of group g of register n, every one summed up in the same order.
    #[inline(always)]
    unsafe fn group_sums(rows: &mut [Self; MAX_LANES], len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if len == Self::LANES {
                rows[0] = Self::sums(rows);
                return;
            }
            Self::transpose(rows);
            for group in 0..Self::LANES / len {
                let mut sum = rows[group * len];
                for n in 1..len {
                    sum = sum.add(rows[group * len + n]);
                }
                rows[group] = sum;
            }
        }
    }
}

/// Asks for the cache line at `at`, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is sound.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for the cache line at `at`, which need not be readable, in the second level: unlike those of
/// [`prefetch`], such requests do not hold the few buffers that loads wait in.
#[inline(always)]
pub(crate) fn prefetch_far<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is sound.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// A vector that can be filled from and stored to elements of another type.
///
/// # Safety
/// As [`Vector`]: exactly `LANES` consecutive elements are touched.
pub(crate) unsafe trait Convert<T: Element>: Vector {
    /// Whether T is the lane type.
    const SAME: bool = false;
    /// Whether [`Self::load_two`] sets even and odd elements apart.
    const INTERLEAVED: bool = false;
    /// Widens 2 · `LANES` elements: in order, or, if `INTERLEAVED`, the even ones into the first vector
    /// and the odd ones into the second, which is cheaper where a narrow element is the high half of
    /// a wide one.
    #[inline(always)]
    unsafe fn load_two(from: *const T) -> [Self; 2] {
        // SAFETY: the caller vouches for 2 · LANES elements behind `from`.
        unsafe {
            [
                Self::load_from(from),
                Self::load_from(from.add(Self::LANES)),
            ]
        }
    }
    /// Widens `LANES` elements, exactly.
    unsafe fn load_from(from: *const T) -> Self;
    /// Rounds to nearest even.
    unsafe fn store_to(self, to: *mut T);
}

/// Fallback for bindings without conversion instructions: element by element.
#[inline(always)]
unsafe fn load_by_element<T: Element, V: Vector<E = T::Acc>>(from: *const T) -> V {
    let mut wide = [V::E::from_f64(0.0); MAX_LANES];
    // SAFETY: the caller vouches for LANES ≤ MAX_LANES elements behind `from`.
    unsafe {
        for (lane, slot) in wide.iter_mut().take(V::LANES).enumerate() {
            *slot = from.add(lane).read().to_acc();
        }
        V::load(wide.as_ptr())
    }
}

/// The reverse of [`load_by_element`].
#[inline(always)]
unsafe fn store_by_element<T: Element, V: Vector<E = T::Acc>>(vector: V, to: *mut T) {
    let mut wide = [V::E::from_f64(0.0); MAX_LANES];
    // SAFETY: the caller vouches for LANES ≤ MAX_LANES elements behind `to`.
    unsafe {
        vector.store(wide.as_mut_ptr());
        for (lane, slot) in wide.iter().take(V::LANES).enumerate() {
            to.add(lane).write(T::from_acc(*slot));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// # Safety
    /// The processor has V's instructions.
    unsafe fn groups<V: Vector>() {
        let number = V::E::from_f64;
        // Whole numbers: sums are exact in any order.
        let value = |row: usize, lane: usize| (row * 31 + lane * lane) as f64;
        let mut len = 1;
        while len <= V::LANES {
            // SAFETY: the arrays have room for a register each.
            unsafe {
                let mut rows = [V::splat(number(0.0)); MAX_LANES];
                for (n, row) in rows.iter_mut().take(V::LANES).enumerate() {
                    let lanes: [V::E; MAX_LANES] =
                        std::array::from_fn(|lane| number(value(n, lane)));
                    *row = V::load(lanes.as_ptr());
                }
                V::group_sums(&mut rows, len);
                for (group, sums) in rows.iter().take(V::LANES / len).enumerate() {
                    let mut lanes = [number(0.0); MAX_LANES];
                    sums.store(lanes.as_mut_ptr());
                    for (n, &sum) in lanes.iter().take(V::LANES).enumerate() {
                        let whole: f64 = (0..len).map(|p| value(n, group * len + p)).sum();
                        assert_eq!(sum.to_f64(), whole, "group {group} of {len} in {n}");
                    }
                }
                let some: [V::E; MAX_LANES] = std::array::from_fn(|n| number(n as f64 + 1.0));
                let mut lanes = [number(0.0); MAX_LANES];
                V::repeat(some.as_ptr(), len).store(lanes.as_mut_ptr());
                for (lane, &x) in lanes.iter().take(V::LANES).enumerate() {
                    assert_eq!(x.to_f64(), (lane % len + 1) as f64);
                }
            }
            len *= 2;
        }
    }

    #[test]
    fn groups_of_neighbours_are_summed_and_repeated() {
        // SAFETY: what the processor has.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                groups::<avx512::F32x16>();
                groups::<avx512::F64x8>();
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.is_available() {
                groups::<avx2::F32x8>();
                groups::<avx2::F64x4>();
            }
            assert!(Isa::Portable.is_available());
            groups::<portable::F32x8>();
            groups::<portable::F64x4>();
        }
    }
}
