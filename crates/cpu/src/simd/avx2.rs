//! AVX2, FMA and F16C: 8 lanes of f32, 4 of f64, 16 registers.

use std::arch::x86_64::*;

use tilewise_core::half::{bf16, f16};

use super::{Convert, MAX_LANES, Vector};

/// Wraps one expression of intrinsics.
macro_rules! isa {
    ($($body:tt)*) => {{
        // SAFETY: `Vector`'s contract says that this is called only where the processor has the
        // binding's instructions, and that pointers cover the lanes touched.
        unsafe { $($body)* }
    }};
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// 8 lanes of f32.
#[derive(Clone, Copy)]
pub(crate) struct F32x8(__m256);

/// 4 lanes of f64.
#[derive(Clone, Copy)]
pub(crate) struct F64x4(__m256d);

// SAFETY: the unaligned 256-bit loads and stores touch exactly 8 f32.
unsafe impl Vector for F32x8 {
    type E = f32;
    const LANES: usize = 8;
    // 6 × 2 accumulators, two registers of B and one of A: 15 of the 16 registers.
    const MR: usize = 6;
    const NRV: usize = 2;
    const FUSED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        isa!(F32x8(_mm256_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        isa!(F32x8(_mm256_loadu_ps(from)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        isa!(_mm256_storeu_ps(to, self.0))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        isa!(F32x8(_mm256_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        isa!(F32x8(_mm256_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        isa!(F32x8(_mm256_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        isa!(F32x8(_mm256_div_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        isa!(F32x8(_mm256_fmadd_ps(self.0, a.0, b.0)))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        isa!(F32x8(_mm256_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        isa!(F32x8(_mm256_round_ps::<NEAREST>(self.0)))
    }
    #[inline(always)]
    unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: f32) -> Self {
        isa!({
            let keep = _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, _mm256_set1_ps(min));
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x.0, x.0);
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n.0));
            let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.0), exponent));
            F32x8(_mm256_or_ps(_mm256_and_ps(scaled, keep), nan))
        })
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self {
        isa!({
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0);
            F32x8(_mm256_blendv_ps(other.0, then.0, less))
        })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        isa!(F32x8(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)))
    }
    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        isa!({
            let mask = _mm256_set1_ps(-0.0);
            F32x8(_mm256_or_ps(
                _mm256_andnot_ps(mask, self.0),
                _mm256_and_ps(mask, sign.0),
            ))
        })
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        isa!({
            let half = _mm_max_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        })
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        isa!({
            let half = _mm_add_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        })
    }
    #[inline(always)]
    unsafe fn iota() -> Self {
        isa!(F32x8(_mm256_setr_ps(0., 1., 2., 3., 4., 5., 6., 7.)))
    }

    #[inline(always)]
    unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self {
        isa!({
            let mut t = [_mm256_setzero_ps(); 4];
            for (i, t) in t.iter_mut().enumerate() {
                let (a, b) = (rows[2 * i].0, rows[2 * i + 1].0);
                *t = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            }
            let pairs = |a, b| {
                let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                _mm256_add_ps(
                    _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)),
                )
            };
            let (a, b) = (pairs(t[0], t[1]), pairs(t[2], t[3]));
            F32x8(_mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x31>(a, b),
            ))
        })
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
        isa!({
            let mut t = [_mm256_setzero_ps(); 8];
            for i in (0..8).step_by(2) {
                t[i] = _mm256_unpacklo_ps(rows[i].0, rows[i + 1].0);
                t[i + 1] = _mm256_unpackhi_ps(rows[i].0, rows[i + 1].0);
            }
            let pd = |x| _mm256_castps_pd(x);
            let ps = |x| _mm256_castpd_ps(x);
            let mut u = [_mm256_setzero_ps(); 8];
            for i in (0..8).step_by(4) {
                u[i] = ps(_mm256_unpacklo_pd(pd(t[i]), pd(t[i + 2])));
                u[i + 1] = ps(_mm256_unpackhi_pd(pd(t[i]), pd(t[i + 2])));
                u[i + 2] = ps(_mm256_unpacklo_pd(pd(t[i + 1]), pd(t[i + 3])));
                u[i + 3] = ps(_mm256_unpackhi_pd(pd(t[i + 1]), pd(t[i + 3])));
            }
            for i in 0..4 {
                rows[i] = F32x8(_mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]));
                rows[i + 4] = F32x8(_mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]));
            }
        })
    }
    #[inline(always)]
    unsafe fn repeat(from: *const f32, count: usize) -> Self {
        isa!(F32x8(match count {
            1 => _mm256_set1_ps(from.read_unaligned()),
            2 => _mm256_castpd_ps(_mm256_set1_pd(from.cast::<f64>().read_unaligned())),
            4 => {
                let four = _mm_loadu_ps(from);
                _mm256_set_m128(four, four)
            }
            _ => _mm256_loadu_ps(from),
        }))
    }
}

// SAFETY: the unaligned 256-bit loads and stores touch exactly 4 f64.
unsafe impl Vector for F64x4 {
    type E = f64;
    const LANES: usize = 4;
    const MR: usize = 6;
    const NRV: usize = 2;
    const FUSED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        isa!(F64x4(_mm256_set1_pd(x)))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        isa!(F64x4(_mm256_loadu_pd(from)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        isa!(_mm256_storeu_pd(to, self.0))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        isa!(F64x4(_mm256_add_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        isa!(F64x4(_mm256_sub_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        isa!(F64x4(_mm256_mul_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        isa!(F64x4(_mm256_div_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        isa!(F64x4(_mm256_fmadd_pd(self.0, a.0, b.0)))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        isa!(F64x4(_mm256_max_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        isa!(F64x4(_mm256_round_pd::<NEAREST>(self.0)))
    }
    #[inline(always)]
    unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: f64) -> Self {
        isa!({
            let keep = _mm256_cmp_pd::<_CMP_NLT_UQ>(x.0, _mm256_set1_pd(min));
            let nan = _mm256_cmp_pd::<_CMP_UNORD_Q>(x.0, x.0);
            let whole = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n.0));
            let exponent = _mm256_slli_epi64::<52>(whole);
            let scaled = _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p.0), exponent));
            F64x4(_mm256_or_pd(_mm256_and_pd(scaled, keep), nan))
        })
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self {
        isa!({
            let less = _mm256_cmp_pd::<_CMP_LT_OQ>(a.0, b.0);
            F64x4(_mm256_blendv_pd(other.0, then.0, less))
        })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        isa!(F64x4(_mm256_andnot_pd(_mm256_set1_pd(-0.0), self.0)))
    }
    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        isa!({
            let mask = _mm256_set1_pd(-0.0);
            F64x4(_mm256_or_pd(
                _mm256_andnot_pd(mask, self.0),
                _mm256_and_pd(mask, sign.0),
            ))
        })
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f64 {
        isa!({
            let half = _mm_max_pd(
                _mm256_castpd256_pd128(self.0),
                _mm256_extractf128_pd::<1>(self.0),
            );
            _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)))
        })
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f64 {
        isa!({
            let half = _mm_add_pd(
                _mm256_castpd256_pd128(self.0),
                _mm256_extractf128_pd::<1>(self.0),
            );
            _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)))
        })
    }
    #[inline(always)]
    unsafe fn iota() -> Self {
        isa!(F64x4(_mm256_setr_pd(0., 1., 2., 3.)))
    }

    #[inline(always)]
    unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self {
        isa!({
            let pair = |a, b| _mm256_add_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            let (a, b) = (pair(rows[0].0, rows[1].0), pair(rows[2].0, rows[3].0));
            F64x4(_mm256_add_pd(
                _mm256_permute2f128_pd::<0x20>(a, b),
                _mm256_permute2f128_pd::<0x31>(a, b),
            ))
        })
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
        isa!({
            let a = _mm256_unpacklo_pd(rows[0].0, rows[1].0);
            let b = _mm256_unpackhi_pd(rows[0].0, rows[1].0);
            let c = _mm256_unpacklo_pd(rows[2].0, rows[3].0);
            let d = _mm256_unpackhi_pd(rows[2].0, rows[3].0);
            rows[0] = F64x4(_mm256_permute2f128_pd::<0x20>(a, c));
            rows[1] = F64x4(_mm256_permute2f128_pd::<0x20>(b, d));
            rows[2] = F64x4(_mm256_permute2f128_pd::<0x31>(a, c));
            rows[3] = F64x4(_mm256_permute2f128_pd::<0x31>(b, d));
        })
    }
    #[inline(always)]
    unsafe fn repeat(from: *const f64, count: usize) -> Self {
        isa!(F64x4(match count {
            1 => _mm256_set1_pd(from.read_unaligned()),
            2 => {
                let two = _mm_loadu_pd(from);
                _mm256_set_m128d(two, two)
            }
            _ => _mm256_loadu_pd(from),
        }))
    }
}

// SAFETY: as `Vector`.
unsafe impl Convert<f64> for F64x4 {
    const SAME: bool = true;
    #[inline(always)]
    unsafe fn load_from(from: *const f64) -> Self {
        isa!(Self::load(from))
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f64) {
        isa!(self.store(to))
    }
}

// SAFETY: as `Vector`.
unsafe impl Convert<f32> for F32x8 {
    const SAME: bool = true;
    #[inline(always)]
    unsafe fn load_from(from: *const f32) -> Self {
        isa!(Self::load(from))
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f32) {
        isa!(self.store(to))
    }
}

// SAFETY: 128 bits are 8 f16.
unsafe impl Convert<f16> for F32x8 {
    #[inline(always)]
    unsafe fn load_from(from: *const f16) -> Self {
        isa!(F32x8(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f16) {
        isa!(_mm_storeu_si128(
            to.cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)
        ))
    }
}

// SAFETY: 128 bits are 8 bf16.
unsafe impl Convert<bf16> for F32x8 {
    const INTERLEAVED: bool = true;
    #[inline(always)]
    unsafe fn load_two(from: *const bf16) -> [Self; 2] {
        isa!({
            let both = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_slli_epi32::<16>(both), odd].map(|bits| F32x8(_mm256_castsi256_ps(bits)))
        })
    }
    #[inline(always)]
    unsafe fn load_from(from: *const bf16) -> Self {
        isa!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        })
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut bf16) {
        isa!({
            let bits = _mm256_castps_si256(self.0);
            let high = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
            let result = _mm256_blendv_epi8(rounded, quiet, nan);
            let packed = _mm256_packus_epi32(result, result);
            let ordered = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(ordered))
        })
    }
}
