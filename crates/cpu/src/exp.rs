//! The exponential and the hyperbolic tangent of the softmax, over any [`Vector`].

use tilewise_core::{DType, Element};

use crate::simd::Vector;

/// 2^r on [−½, ½] as 1 + c₁r + c₂r² + …: minimax in relative error (Remez), degree 6; 2.6e-9.
const EXP2_F32: [f64; 6] = [
    0.693147214968,
    0.240226527829,
    0.0555031055101,
    0.00961769297299,
    0.00134066439024,
    0.000155946781613,
];

/// The same of degree 11; 1.8e-17.
const EXP2_F64: [f64; 11] = [
    0.6931471805599457,
    0.24022650695910097,
    0.05550410866479039,
    0.009618129107607003,
    0.0013333558153439966,
    0.0001540353044157213,
    1.5252727385193868e-05,
    1.3215442675329823e-06,
    1.0180647659234139e-07,
    7.072570412814423e-09,
    4.078071929588337e-10,
];

/// c₀ + x(c₁ + x(c₂ + …)), highest coefficient last.
#[inline(always)]
unsafe fn horner<V: Vector>(x: V, coefficients: &[f64]) -> V {
    // SAFETY: the caller has the instructions of V.
    unsafe {
        let mut sum = V::splat(V::E::from_f64(coefficients[coefficients.len() - 1]));
        for &c in coefficients[..coefficients.len() - 1].iter().rev() {
            sum = sum.fma(x, V::splat(V::E::from_f64(c)));
        }
        sum
    }
}

/// 2^x for x ≤ 0, as the softmax needs it: −∞ gives 0, NaN gives NaN, 0 gives exactly 1, and what
/// would be below the smallest normal number gives exactly 0, so that no subnormal ever appears
/// (they cost a hundred cycles each on some processors, and weigh nothing beside the maximum's 1).
///
/// Error: below 1.1 ULP of the result in f32 and 1.5 in f64 with a fused multiply-add, below 2 and
/// 2.5 without; measured over the whole range by the tests.
/// The source is x = n + r with n whole and |r| ≤ ½, and 2^x = 2^n · 2^r.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2_nonpositive<V: Vector>(x: V) -> V {
    // SAFETY: the caller has the instructions of V.
    unsafe {
        let n = x.round();
        let r = x.sub(n);
        let one = V::splat(V::E::from_f64(1.0));
        if V::E::DTYPE == DType::F32 {
            let p = horner(r, &EXP2_F32).fma(r, one);
            V::scale_or_zero(p, n, x, V::E::from_f64(-126.0))
        } else {
            let p = horner(r, &EXP2_F64).fma(r, one);
            V::scale_or_zero(p, n, x, V::E::from_f64(-1022.0))
        }
    }
}

/// [`exp2_nonpositive`], but what would be below the smallest normal number is subnormal or 0, which is
/// cheaper where [`Vector::scale`] is one instruction that is no slower for it.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2_or_subnormal<V: Vector>(x: V) -> V {
    // SAFETY: the caller has the instructions of V.
    unsafe {
        let n = x.round();
        let r = x.sub(n);
        let one = V::splat(V::E::from_f64(1.0));
        if V::E::DTYPE == DType::F32 {
            V::scale(horner(r, &EXP2_F32).fma(r, one), n, x)
        } else {
            V::scale(horner(r, &EXP2_F64).fma(r, one), n, x)
        }
    }
}

/// tanh x: an odd polynomial (f32) or rational (f64) approximation below 0.625 in magnitude
/// (coefficients of Cephes, Moshier 1989), (1 − e)/(1 + e) with e = e^(−2|x|) above.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: Vector>(x: V) -> V {
    // SAFETY: the caller has the instructions of V.
    unsafe {
        let one = V::splat(V::E::from_f64(1.0));
        let size = x.abs();
        let z = x.mul(x);
        let small = if V::E::DTYPE == DType::F32 {
            const P: [f64; 5] = [
                -3.33332819422e-1,
                1.33314422036e-1,
                -5.37397155531e-2,
                2.06390887954e-2,
                -5.70498872745e-3,
            ];
            horner(z, &P).mul(z).fma(x, x)
        } else {
            const P: [f64; 3] = [
                -1.614_687_684_417_084_5e3,
                -9.928_772_310_019_186e1,
                -9.643_991_794_250_523e-1,
            ];
            const Q: [f64; 4] = [
                4.844_063_053_251_255e3,
                2.235_488_390_601_004_5e3,
                1.128_116_784_916_329_3e2,
                1.0,
            ];
            let ratio = horner(z, &P).div(horner(z, &Q));
            ratio.mul(z).fma(x, x)
        };
        let e =
            exp2_nonpositive(size.mul(V::splat(V::E::from_f64(-2.0 * std::f64::consts::LOG2_E))));
        let large = one.sub(e).div(one.add(e)).copysign(x);
        V::select_lt(size, V::splat(V::E::from_f64(0.625)), small, large)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{MAX_LANES, portable};
    #[cfg(target_arch = "x86_64")]
    use crate::simd::{avx2, avx512};

    /// A function of whole vectors, as a function of a slice.
    #[inline(always)]
    unsafe fn map<V: Vector>(function: Function, x: &mut [V::E]) {
        for chunk in x.chunks_mut(V::LANES) {
            let mut lanes = [V::E::from_f64(0.0); MAX_LANES];
            lanes[..chunk.len()].copy_from_slice(chunk);
            // SAFETY: the caller has the instructions of V; `lanes` holds a vector.
            unsafe {
                let x = V::load(lanes.as_ptr());
                let y = match function {
                    Function::Exp2 => exp2_nonpositive(x),
                    Function::Exp2OrSubnormal => exp2_or_subnormal(x),
                    Function::Tanh => tanh(x),
                };
                y.store(lanes.as_mut_ptr());
            }
            chunk.copy_from_slice(&lanes[..chunk.len()]);
        }
    }

    #[derive(Clone, Copy)]
    enum Function {
        Exp2,
        Exp2OrSubnormal,
        Tanh,
    }

    macro_rules! on_every_isa {
        ($name:ident, $e:ty, $avx512:ty, $avx2:ty, $portable:ty) => {
            /// One result a line for each instruction set of this machine.
            fn $name(function: Function, x: &[$e]) -> Vec<(Isa, Vec<$e>)> {
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                unsafe fn with_avx512(function: Function, x: &mut [$e]) {
                    // SAFETY: the caller has AVX-512.
                    unsafe { map::<$avx512>(function, x) }
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn with_avx2(function: Function, x: &mut [$e]) {
                    // SAFETY: the caller has AVX2.
                    unsafe { map::<$avx2>(function, x) }
                }
                Isa::available()
                    .into_iter()
                    .map(|isa| {
                        let mut x = x.to_vec();
                        // SAFETY: the instruction set is available.
                        unsafe {
                            match isa.vectors() {
                                #[cfg(target_arch = "x86_64")]
                                Isa::Avx512 => with_avx512(function, &mut x),
                                #[cfg(target_arch = "x86_64")]
                                Isa::Avx2 => with_avx2(function, &mut x),
                                _ => map::<$portable>(function, &mut x),
                            }
                        }
                        (isa, x)
                    })
                    .collect()
            }
        };
    }
    on_every_isa!(f32s, f32, avx512::F32x16, avx2::F32x8, portable::F32x8);
    on_every_isa!(f64s, f64, avx512::F64x8, avx2::F64x4, portable::F64x4);

    #[test]
    fn exp2_of_f32_is_within_its_ulps_over_the_whole_range() {
        // Every 31st number from −0 to −126, all of those near both ends.
        let end = 126f32.to_bits();
        let x: Vec<f32> = (0..=end)
            .step_by(31)
            .chain(end - 1000..=end)
            .chain(0..1000)
            .map(|bits| -f32::from_bits(bits))
            .collect();
        for (isa, y) in f32s(Function::Exp2, &x) {
            let mut worst = 0.0f64;
            for (&x, &y) in x.iter().zip(&y) {
                let exact = f64::from(x).exp2();
                let ulp = f64::from(f32::EPSILON) * exact.log2().floor().exp2();
                worst = worst.max((f64::from(y) - exact).abs() / ulp);
                assert!(y >= f32::MIN_POSITIVE, "{isa}: 2^{x} = {y}");
            }
            let bound = if isa == Isa::Portable { 2.0 } else { 1.1 };
            assert!(worst < bound, "{isa}: {worst} ULP");
        }
    }

    #[test]
    fn exp2_of_f64_is_within_its_ulps() {
        let x: Vec<f64> = (0..2_000_000)
            .map(|i| -(i as f64) * (1022.0 / 2e6) - (i as f64 * 0.754_877_666).fract() * 1e-4)
            .chain((0..60).map(|i| -(-f64::from(i)).exp2()))
            .filter(|x| *x >= -1022.0)
            .collect();
        for (isa, y) in f64s(Function::Exp2, &x) {
            let mut worst = 0.0f64;
            for (&x, &y) in x.iter().zip(&y) {
                let exact = x.exp2();
                let ulp = f64::EPSILON * exact.log2().floor().exp2();
                worst = worst.max((y - exact).abs() / ulp);
            }
            // The library's own exp2 is good to about half an ULP.
            let bound = if isa == Isa::Portable { 2.5 } else { 1.5 };
            assert!(worst < bound, "{isa}: {worst} ULP");
        }
    }

    #[test]
    fn exp2_has_no_subnormals_and_keeps_nan() {
        let odd_nan = f32::from_bits(0xffc0_0155);
        let x = [
            0.0,
            -0.0,
            -126.0,
            -126.000_01,
            -126.5,
            -149.0,
            -1e9,
            f32::MIN,
            f32::NEG_INFINITY,
            f32::NAN,
            odd_nan,
            -f32::MIN_POSITIVE,
            -1e-45,
        ];
        for (isa, y) in f32s(Function::Exp2, &x) {
            assert_eq!(y[..3], [1.0, 1.0, f32::MIN_POSITIVE], "{isa}");
            assert_eq!(y[3..9], [0.0; 6], "{isa}");
            assert!(y[9].is_nan() && y[10].is_nan(), "{isa}");
            assert_eq!(y[11..], [1.0, 1.0], "{isa}");
        }
        let x = [
            0.0,
            -1022.0,
            -1022.001,
            -1e300,
            f64::NEG_INFINITY,
            f64::NAN,
            -f64::NAN,
        ];
        for (isa, y) in f64s(Function::Exp2, &x) {
            assert_eq!(y[..5], [1.0, f64::MIN_POSITIVE, 0.0, 0.0, 0.0], "{isa}");
            assert!(y[5].is_nan() && y[6].is_nan(), "{isa}");
        }
    }

    #[test]
    fn exp2_or_subnormal_differs_in_subnormals_alone() {
        let end = 160f32.to_bits();
        let x: Vec<f32> = (0..=end)
            .step_by(97)
            .map(|bits| -f32::from_bits(bits))
            .chain([-126.0, -126.000_01, -1e9, f32::MIN, f32::NEG_INFINITY])
            .collect();
        let normal = f32s(Function::Exp2, &x);
        for ((isa, y), (_, normal)) in f32s(Function::Exp2OrSubnormal, &x).iter().zip(&normal) {
            for ((&x, &y), &normal) in x.iter().zip(y).zip(normal) {
                if x >= -126.0 {
                    assert_eq!(y.to_bits(), normal.to_bits(), "{isa}: 2^{x}");
                } else {
                    let exact = f64::from(x).exp2();
                    let error = (f64::from(y) - exact).abs();
                    let smallest = f64::from(f32::from_bits(1));
                    assert!(y == 0.0 || error <= 1.5 * smallest, "{isa}: 2^{x} = {y}");
                }
            }
            assert_eq!(y.last(), Some(&0.0), "{isa}");
        }
        let nan = f32s(Function::Exp2OrSubnormal, &[f32::NAN, -f32::NAN]);
        assert!(nan.iter().all(|(_, y)| y.iter().all(|y| y.is_nan())));
    }

    #[test]
    fn tanh_is_accurate_near_zero_and_far_from_it() {
        let mut x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.005).collect();
        x.extend((0..80).flat_map(|e| [1.3, -1.7].map(|m: f32| m * (-(e as f32)).exp2())));
        x.extend([f32::INFINITY, f32::NEG_INFINITY, 1e30, 0.0, -0.0]);
        for (isa, y) in f32s(Function::Tanh, &x) {
            for (&x, &y) in x.iter().zip(&y) {
                let exact = f64::from(x).tanh();
                let error = (f64::from(y) - exact).abs();
                assert!(error <= 4e-7 * exact.abs(), "{isa}: tanh {x} = {y}");
            }
            let nan = f32s(Function::Tanh, &[f32::NAN]);
            assert!(nan.iter().all(|(_, y)| y[0].is_nan()), "{isa}");
        }
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for (isa, y) in f64s(Function::Tanh, &x) {
            for (&x, &y) in x.iter().zip(&y) {
                assert!(
                    (y - x.tanh()).abs() <= 1e-15 * x.tanh().abs(),
                    "{isa}: tanh {x} = {y}"
                );
            }
        }
    }
}
