//! AVX-512 (F, BW, DQ, VL): 16 lanes of f32, 8 of f64, 32 registers.

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

/// Folds four registers into four numbers: 16 → 8 → 4 lanes of each, side by side, then halves of all.
macro_rules! reduce4 {
    ($rows:ident, $to:ident, $fold512:ident, $fold256:ident, $fold128:ident) => {{
        let [a, b, c, d] = [$rows[0].0, $rows[1].0, $rows[2].0, $rows[3].0];
        let ab = $fold512(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = $fold512(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let quads = $fold512(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
        );
        let (low, high) = (
            _mm512_castps512_ps256(quads),
            _mm512_extractf32x8_ps::<1>(quads),
        );
        let halves = $fold256(low, high);
        let (low, high) = (
            _mm256_castps256_ps128(halves),
            _mm256_extractf128_ps::<1>(halves),
        );
        _mm_storeu_ps($to[..4].as_mut_ptr(), $fold128(low, high));
    }};
}

/// 16 lanes of f32.
#[derive(Clone, Copy)]
pub(crate) struct F32x16(__m512);

impl F32x16 {
    /// What the intrinsics take.
    #[inline(always)]
    pub(crate) fn register(self) -> __m512 {
        self.0
    }

    /// Block b of 128 bits of each of four registers into register b.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[inline(always)]
    unsafe fn blocks(u: [__m512; 4]) -> [Self; 4] {
        isa!({
            let a = _mm512_shuffle_f32x4::<0x88>(u[0], u[1]);
            let b = _mm512_shuffle_f32x4::<0xdd>(u[0], u[1]);
            let c = _mm512_shuffle_f32x4::<0x88>(u[2], u[3]);
            let d = _mm512_shuffle_f32x4::<0xdd>(u[2], u[3]);
            [
                F32x16(_mm512_shuffle_f32x4::<0x88>(a, c)),
                F32x16(_mm512_shuffle_f32x4::<0x88>(b, d)),
                F32x16(_mm512_shuffle_f32x4::<0xdd>(a, c)),
                F32x16(_mm512_shuffle_f32x4::<0xdd>(b, d)),
            ]
        })
    }

    /// The reverse of [`Self::register`].
    #[inline(always)]
    pub(crate) fn from_register(register: __m512) -> Self {
        F32x16(register)
    }
}

/// 8 lanes of f64.
#[derive(Clone, Copy)]
pub(crate) struct F64x8(__m512d);

// SAFETY: the unaligned 512-bit loads and stores touch exactly 16 f32.
unsafe impl Vector for F32x16 {
    type E = f32;
    const LANES: usize = 16;
    // 12 × 2 accumulators: 24 of the 32 registers, and a panel that stays in L1 for head_dim 128.
    const MR: usize = 12;
    const NRV: usize = 2;
    const FUSED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        isa!(F32x16(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        isa!(F32x16(_mm512_loadu_ps(from)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        isa!(_mm512_storeu_ps(to, self.0))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        isa!(F32x16(_mm512_maskz_loadu_ps(
            ((1u32 << n) - 1) as __mmask16,
            from
        )))
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        isa!(_mm512_mask_storeu_ps(
            to,
            ((1u32 << n) - 1) as __mmask16,
            self.0
        ))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        isa!(F32x16(_mm512_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        isa!(F32x16(_mm512_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        isa!(F32x16(_mm512_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        isa!(F32x16(_mm512_div_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        isa!(F32x16(_mm512_fmadd_ps(self.0, a.0, b.0)))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        isa!(F32x16(_mm512_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        isa!(F32x16(_mm512_roundscale_ps::<NEAREST>(self.0)))
    }
    #[inline(always)]
    unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: f32) -> Self {
        isa!({
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(min));
            F32x16(_mm512_maskz_scalef_ps(keep, p.0, n.0))
        })
    }
    // For n = −∞ it is 0 whatever p is, NaN included.
    #[inline(always)]
    unsafe fn scale(p: Self, n: Self, _: Self) -> Self {
        isa!(F32x16(_mm512_scalef_ps(p.0, n.0)))
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self {
        isa!({
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0);
            F32x16(_mm512_mask_blend_ps(less, other.0, then.0))
        })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        isa!(F32x16(_mm512_abs_ps(self.0)))
    }
    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        isa!({
            let mask = _mm512_set1_ps(-0.0);
            F32x16(_mm512_or_ps(
                _mm512_andnot_ps(mask, self.0),
                _mm512_and_ps(mask, sign.0),
            ))
        })
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        isa!(_mm512_reduce_max_ps(self.0))
    }
    #[inline(always)]
    unsafe fn reduce_max4(rows: [Self; 4], to: &mut [f32]) {
        isa!(reduce4!(rows, to, _mm512_max_ps, _mm256_max_ps, _mm_max_ps))
    }
    #[inline(always)]
    unsafe fn reduce_add4(rows: [Self; 4], to: &mut [f32]) {
        isa!(reduce4!(rows, to, _mm512_add_ps, _mm256_add_ps, _mm_add_ps))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        isa!(_mm512_reduce_add_ps(self.0))
    }
    #[inline(always)]
    unsafe fn iota() -> Self {
        isa!(F32x16(_mm512_setr_ps(
            0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.
        )))
    }

    #[inline(always)]
    unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self {
        isa!({
            // Each step adds halves of two registers into one: 16 → 8 → 4 → 2 → 1.
            let mut t = [_mm512_setzero_ps(); 8];
            for (i, t) in t.iter_mut().enumerate() {
                let (a, b) = (rows[2 * i].0, rows[2 * i + 1].0);
                *t = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            let mut u = [_mm512_setzero_ps(); 4];
            for (i, u) in u.iter_mut().enumerate() {
                let a = _mm512_castps_pd(t[2 * i]);
                let b = _mm512_castps_pd(t[2 * i + 1]);
                *u = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
                );
            }
            let halves = |a, b| {
                let even = _mm512_shuffle_f32x4::<0x88>(a, b);
                _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b))
            };
            F32x16(halves(halves(u[0], u[1]), halves(u[2], u[3])))
        })
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
        isa!({
            // Pairs, then quadruples of rows, within 128 bits; then the 4 × 4 square of those.
            let mut t = [_mm512_setzero_ps(); 16];
            for i in (0..16).step_by(2) {
                t[i] = _mm512_unpacklo_ps(rows[i].0, rows[i + 1].0);
                t[i + 1] = _mm512_unpackhi_ps(rows[i].0, rows[i + 1].0);
            }
            let pd = |x| _mm512_castps_pd(x);
            let ps = |x| _mm512_castpd_ps(x);
            let mut u = [_mm512_setzero_ps(); 16];
            for i in (0..16).step_by(4) {
                u[i] = ps(_mm512_unpacklo_pd(pd(t[i]), pd(t[i + 2])));
                u[i + 1] = ps(_mm512_unpackhi_pd(pd(t[i]), pd(t[i + 2])));
                u[i + 2] = ps(_mm512_unpacklo_pd(pd(t[i + 1]), pd(t[i + 3])));
                u[i + 3] = ps(_mm512_unpackhi_pd(pd(t[i + 1]), pd(t[i + 3])));
            }
            for i in 0..4 {
                let a = _mm512_shuffle_f32x4::<0x88>(u[i], u[i + 4]);
                let b = _mm512_shuffle_f32x4::<0xdd>(u[i], u[i + 4]);
                let c = _mm512_shuffle_f32x4::<0x88>(u[i + 8], u[i + 12]);
                let d = _mm512_shuffle_f32x4::<0xdd>(u[i + 8], u[i + 12]);
                rows[i] = F32x16(_mm512_shuffle_f32x4::<0x88>(a, c));
                rows[i + 4] = F32x16(_mm512_shuffle_f32x4::<0x88>(b, d));
                rows[i + 8] = F32x16(_mm512_shuffle_f32x4::<0xdd>(a, c));
                rows[i + 12] = F32x16(_mm512_shuffle_f32x4::<0xdd>(b, d));
            }
        })
    }
    #[inline(always)]
    unsafe fn repeat(from: *const f32, count: usize) -> Self {
        isa!(F32x16(match count {
            1 => _mm512_set1_ps(from.read_unaligned()),
            2 => _mm512_castpd_ps(_mm512_set1_pd(from.cast::<f64>().read_unaligned())),
            4 => _mm512_broadcast_f32x4(_mm_loadu_ps(from)),
            8 => _mm512_broadcast_f32x8(_mm256_loadu_ps(from)),
            _ => _mm512_loadu_ps(from),
        }))
    }
    #[inline(always)]
    unsafe fn group_sums(rows: &mut [Self; MAX_LANES], len: usize) {
        isa!({
            // As in `transpose`, with neighbours added up on the way.
            let pd = |x| _mm512_castps_pd(x);
            let ps = |x| _mm512_castpd_ps(x);
            match len {
                1 => Self::transpose(rows),
                2 => {
                    let mut t = [_mm512_setzero_ps(); 8];
                    for (i, t) in t.iter_mut().enumerate() {
                        let (a, b) = (rows[2 * i].0, rows[2 * i + 1].0);
                        *t = _mm512_add_ps(
                            _mm512_shuffle_ps::<0x88>(a, b),
                            _mm512_shuffle_ps::<0xdd>(a, b),
                        );
                    }
                    // Of a pair of groups that shared a block, the first and the second.
                    let (mut first, mut second) =
                        ([_mm512_setzero_ps(); 4], [_mm512_setzero_ps(); 4]);
                    for i in 0..4 {
                        first[i] = _mm512_shuffle_ps::<0x88>(t[2 * i], t[2 * i + 1]);
                        second[i] = _mm512_shuffle_ps::<0xdd>(t[2 * i], t[2 * i + 1]);
                    }
                    let (first, second) = (Self::blocks(first), Self::blocks(second));
                    for i in 0..4 {
                        rows[2 * i] = first[i];
                        rows[2 * i + 1] = second[i];
                    }
                }
                4 | 8 => {
                    let mut u = [_mm512_setzero_ps(); 4];
                    for (i, u) in u.iter_mut().enumerate() {
                        let mut t = [_mm512_setzero_ps(); 2];
                        for (j, t) in t.iter_mut().enumerate() {
                            let (a, b) = (rows[4 * i + 2 * j].0, rows[4 * i + 2 * j + 1].0);
                            *t = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                        }
                        let (a, b) = (pd(t[0]), pd(t[1]));
                        *u = _mm512_add_ps(
                            ps(_mm512_unpacklo_pd(a, b)),
                            ps(_mm512_unpackhi_pd(a, b)),
                        );
                    }
                    if len == 4 {
                        rows[..4].copy_from_slice(&Self::blocks(u));
                        return;
                    }
                    let mut halves = [_mm512_setzero_ps(); 2];
                    for (i, half) in halves.iter_mut().enumerate() {
                        let (a, b) = (u[2 * i], u[2 * i + 1]);
                        let even = _mm512_shuffle_f32x4::<0x88>(a, b);
                        *half = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b));
                    }
                    let [a, b] = halves;
                    rows[0] = F32x16(_mm512_shuffle_f32x4::<0x88>(a, b));
                    rows[1] = F32x16(_mm512_shuffle_f32x4::<0xdd>(a, b));
                }
                _ => rows[0] = Self::sums(rows),
            }
        })
    }
}

// SAFETY: the unaligned 512-bit loads and stores touch exactly 8 f64.
unsafe impl Vector for F64x8 {
    type E = f64;
    const LANES: usize = 8;
    const MR: usize = 12;
    const NRV: usize = 2;
    const FUSED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        isa!(F64x8(_mm512_set1_pd(x)))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        isa!(F64x8(_mm512_loadu_pd(from)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        isa!(_mm512_storeu_pd(to, self.0))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f64, n: usize) -> Self {
        isa!(F64x8(_mm512_maskz_loadu_pd(
            ((1u32 << n) - 1) as __mmask8,
            from
        )))
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f64, n: usize) {
        isa!(_mm512_mask_storeu_pd(
            to,
            ((1u32 << n) - 1) as __mmask8,
            self.0
        ))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        isa!(F64x8(_mm512_add_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        isa!(F64x8(_mm512_sub_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        isa!(F64x8(_mm512_mul_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        isa!(F64x8(_mm512_div_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        isa!(F64x8(_mm512_fmadd_pd(self.0, a.0, b.0)))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        isa!(F64x8(_mm512_max_pd(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        isa!(F64x8(_mm512_roundscale_pd::<NEAREST>(self.0)))
    }
    #[inline(always)]
    unsafe fn scale_or_zero(p: Self, n: Self, x: Self, min: f64) -> Self {
        isa!({
            let keep = _mm512_cmp_pd_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_pd(min));
            F64x8(_mm512_maskz_scalef_pd(keep, p.0, n.0))
        })
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self, b: Self, then: Self, other: Self) -> Self {
        isa!({
            let less = _mm512_cmp_pd_mask::<_CMP_LT_OQ>(a.0, b.0);
            F64x8(_mm512_mask_blend_pd(less, other.0, then.0))
        })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        isa!(F64x8(_mm512_abs_pd(self.0)))
    }
    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        isa!({
            let mask = _mm512_set1_pd(-0.0);
            F64x8(_mm512_or_pd(
                _mm512_andnot_pd(mask, self.0),
                _mm512_and_pd(mask, sign.0),
            ))
        })
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f64 {
        isa!(_mm512_reduce_max_pd(self.0))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f64 {
        isa!(_mm512_reduce_add_pd(self.0))
    }
    #[inline(always)]
    unsafe fn iota() -> Self {
        isa!(F64x8(_mm512_setr_pd(0., 1., 2., 3., 4., 5., 6., 7.)))
    }

    #[inline(always)]
    unsafe fn sums(rows: &[Self; MAX_LANES]) -> Self {
        isa!({
            let mut t = [_mm512_setzero_pd(); 4];
            for (i, t) in t.iter_mut().enumerate() {
                let (a, b) = (rows[2 * i].0, rows[2 * i + 1].0);
                *t = _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            }
            let halves = |a, b| {
                let even = _mm512_shuffle_f64x2::<0x88>(a, b);
                _mm512_add_pd(even, _mm512_shuffle_f64x2::<0xdd>(a, b))
            };
            F64x8(halves(halves(t[0], t[1]), halves(t[2], t[3])))
        })
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
        isa!({
            let mut t = [_mm512_setzero_pd(); 8];
            for i in (0..8).step_by(2) {
                t[i] = _mm512_unpacklo_pd(rows[i].0, rows[i + 1].0);
                t[i + 1] = _mm512_unpackhi_pd(rows[i].0, rows[i + 1].0);
            }
            for i in 0..2 {
                let a = _mm512_shuffle_f64x2::<0x88>(t[i], t[i + 2]);
                let b = _mm512_shuffle_f64x2::<0xdd>(t[i], t[i + 2]);
                let c = _mm512_shuffle_f64x2::<0x88>(t[i + 4], t[i + 6]);
                let d = _mm512_shuffle_f64x2::<0xdd>(t[i + 4], t[i + 6]);
                rows[i] = F64x8(_mm512_shuffle_f64x2::<0x88>(a, c));
                rows[i + 2] = F64x8(_mm512_shuffle_f64x2::<0x88>(b, d));
                rows[i + 4] = F64x8(_mm512_shuffle_f64x2::<0xdd>(a, c));
                rows[i + 6] = F64x8(_mm512_shuffle_f64x2::<0xdd>(b, d));
            }
        })
    }
    #[inline(always)]
    unsafe fn repeat(from: *const f64, count: usize) -> Self {
        isa!(F64x8(match count {
            1 => _mm512_set1_pd(from.read_unaligned()),
            2 => _mm512_broadcast_f64x2(_mm_loadu_pd(from)),
            4 => _mm512_broadcast_f64x4(_mm256_loadu_pd(from)),
            _ => _mm512_loadu_pd(from),
        }))
    }
}

// SAFETY: as `Vector`.
unsafe impl Convert<f64> for F64x8 {
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
unsafe impl Convert<f32> for F32x16 {
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

// SAFETY: 256 bits are 16 f16.
unsafe impl Convert<f16> for F32x16 {
    #[inline(always)]
    unsafe fn load_from(from: *const f16) -> Self {
        isa!(F32x16(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store_to(self, to: *mut f16) {
        isa!(_mm256_storeu_si256(
            to.cast(),
            _mm512_cvtps_ph::<NEAREST>(self.0)
        ))
    }
}

// SAFETY: 256 bits are 16 bf16.
unsafe impl Convert<bf16> for F32x16 {
    const INTERLEAVED: bool = true;
    #[inline(always)]
    unsafe fn load_two(from: *const bf16) -> [Self; 2] {
        isa!({
            let both = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_slli_epi32::<16>(both), odd].map(|bits| F32x16(_mm512_castsi512_ps(bits)))
        })
    }
    #[inline(always)]
    unsafe fn load_from(from: *const bf16) -> Self {
        isa!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        })
    }
    // Not vcvtneps2bf16: it takes subnormals for zero.
    #[inline(always)]
    unsafe fn store_to(self, to: *mut bf16) {
        isa!({
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let result = _mm512_mask_blend_epi32(nan, rounded, quiet);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(result))
        })
    }
}
