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
/// Error: below 1.0 ULP of the result in f32 and f64 with a fused multiply-add, below 2 without.
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
