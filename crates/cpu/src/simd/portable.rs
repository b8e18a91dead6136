//! The portable binding, through the `wide` crate: NEON, wasm SIMD or SSE2, whatever the target
//! enables at compile time. On x86-64 it is the fallback below AVX2 (a multiply and an add in place
//! of an FMA); on other architectures it is written to work but has not been run by its authors.

use tilewise_core::half::{bf16, f16};
use wide::{f32x8, f64x4, i32x8, i64x4};

use super::{Convert, MAX_LANES, Vector, load_by_element, store_by_element};

/// 8 lanes of f32.
#[derive(Clone, Copy)]
pub(crate) struct F32x8(f32x8);

/// 4 lanes of f64.
#[derive(Clone, Copy)]
pub(crate) struct F64x4(f64x4);

macro_rules! portable {
    ($name:ident, $wide:ident, $int:ident, $e:ty, $i:ty, $lanes:expr, $iota:expr,
     $magic:expr, $mantissa:expr) => {
        // SAFETY: array-sized unaligned reads and writes touch exactly LANES elements.
        unsafe impl Vector for $name {
            type E = $e;
            const LANES: usize = $lanes;
            // Eight lanes are two 128-bit registers: 4 rows fill 8 of 16.
            const MR: usize = 4;
            const NRV: usize = 1;
            const FUSED: bool = cfg!(target_feature = "fma");

            #[inline(always)]
            unsafe fn splat(x: $e) -> Self {
                $name($wide::splat(x))
            }
            #[inline(always)]
            unsafe fn load(from: *const $e) -> Self {
                // SAFETY: the caller vouches for LANES elements behind `from`.
                $name($wide::new(unsafe { from.cast::<[$e; $lanes]>().read_unaligned() }))
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $e) {
                // SAFETY: the caller vouches for LANES elements behind `to`.
                unsafe { to.cast::<[$e; $lanes]>().write_unaligned(self.0.to_array()) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                $name(self.0 + other.0)
            }
            #[inline(always)]
            unsafe fn sub(self, other: Self) -> Self {
                $name(self.0 - other.0)
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                $name(self.0 * other.0)
            }
            #[inline(always)]
            unsafe fn div(self, other: Self) -> Self {
                $name(self.0 / other.0)
            }
            #[inline(always)]
            unsafe fn fma(self, a: Self, b: Self) -> Self {
                $name(self.0.mul_add(a.0, b.0))
            }
            #[inline(always)]
            unsafe fn max(self, other: Self) -> Self {
                $name(self.0.fast_max(other.0))
            }
            // Adding 1.5 · 2^mantissa leaves no bits below one: the sum is the rounded number.
            #[inline(always)]
            unsafe fn round(self) -> Self {
                let magic = $wide::splat($magic);
                $name((self.0 + magic) - magic)
            }
            #[inline(always)]
            unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: $e) -> Self {
                let low = x.0.simd_lt($wide::splat(min));
                // n + magic holds n in its low mantissa bits, where the shift takes it from.
                let exponent: $int = wide::bytemuck::cast(n.0 + $wide::splat($magic));
                let bits: $int = wide::bytemuck::cast(p.0);
                let scaled: $wide = wide::bytemuck::cast(bits + (exponent << $mantissa));
                let kept = low.bitselect($wide::splat(0.0), scaled);
                $name(x.0.is_nan().bitselect(x.0, kept))
            }
            #[inline(always)]
            unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self {
                $name(a.0.simd_lt(b.0).bitselect(then.0, other.0))
            }
            #[inline(always)]
            unsafe fn abs(self) -> Self {
                $name(self.0.abs())
            }
            #[inline(always)]
            unsafe fn copysign(self, sign: Self) -> Self {
                $name(self.0.copysign(sign.0))
            }
            #[inline(always)]
            unsafe fn reduce_max(self) -> $e {
                let lanes = self.0.to_array();
                lanes.iter().fold(<$e>::NEG_INFINITY, |max, &x| if x > max { x } else { max })
            }
            #[inline(always)]
            unsafe fn reduce_add(self) -> $e {
                self.0.to_array().iter().sum()
            }
            #[inline(always)]
            unsafe fn iota() -> Self {
                $name($wide::new($iota))
            }
            #[inline(always)]
            unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self {
                let mut square = [$wide::splat(0.0); $lanes];
                for (to, from) in square.iter_mut().zip(rows.iter()) {
                    *to = from.0;
                }
                let columns = $wide::transpose(square);
                let mut sum = columns[0];
                for column in &columns[1..] {
                    sum += *column;
                }
                $name(sum)
            }
            #[inline(always)]
            unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
                let mut square = [$wide::splat(0.0); $lanes];
                for (to, from) in square.iter_mut().zip(rows.iter()) {
                    *to = from.0;
                }
                for (to, from) in rows.iter_mut().zip($wide::transpose(square)) {
                    to.0 = from;
                }
            }
        }
    };
}

portable!(
    F32x8,
    f32x8,
    i32x8,
    f32,
    i32,
    8,
    [0., 1., 2., 3., 4., 5., 6., 7.],
    12_582_912.0,
    23
);
portable!(
    F64x4,
    f64x4,
    i64x4,
    f64,
    i64,
    4,
    [0., 1., 2., 3.],
    6_755_399_441_055_744.0,
    52
);

// SAFETY: as `Vector`.
unsafe impl Convert<f64> for F64x4 {
    const SAME: bool = true;
    #[inline(always)]
    unsafe fn load_from(from: *const f64) -> Self {
        // SAFETY: the caller's promise is this method's.
        unsafe { Self::load(from) }
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f64) {
        // SAFETY: the caller's promise is this method's.
        unsafe { self.store(to) }
    }
}

// SAFETY: as `Vector`.
unsafe impl Convert<f32> for F32x8 {
    const SAME: bool = true;
    #[inline(always)]
    unsafe fn load_from(from: *const f32) -> Self {
        // SAFETY: the caller's promise is this method's.
        unsafe { Self::load(from) }
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f32) {
        // SAFETY: the caller's promise is this method's.
        unsafe { self.store(to) }
    }
}

macro_rules! by_element {
    ($t:ty) => {
        // SAFETY: element by element, LANES of them.
        unsafe impl Convert<$t> for F32x8 {
            #[inline(always)]
            unsafe fn load_from(from: *const $t) -> Self {
                // SAFETY: the caller's promise is this method's.
                unsafe { load_by_element(from) }
            }
            #[inline(always)]
            unsafe fn store_to(self, to: *mut $t) {
                // SAFETY: the caller's promise is this method's.
                unsafe { store_by_element(self, to) }
            }
        }
    };
}

by_element!(f16);
by_element!(bf16);
