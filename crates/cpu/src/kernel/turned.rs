//! What the backward pass needs of products of pairs beside the forward pass's kernels: a strip turned
//! round, as the left operand of products along its rows.

use tilewise_core::Element;
use tilewise_core::half::bf16;

use super::pairs::emulated::Emulated;
use super::pairs::{DEPTH, Pairs, Product, ROW_STRIDE};
use super::s_stride;
use crate::isa::Isa;
use crate::simd::{MAX_LANES, Vector};

/// The functions of one way to multiply pairs.
#[derive(Clone, Copy)]
pub(crate) struct TurnedKernels<A> {
    /// [`turned`]: strip, rows, columns from and to, to.
    pub(crate) turned: unsafe fn(*const A, usize, usize, usize, *mut u16),
    /// [`Pairs::multiply`].
    pub(crate) multiply: unsafe fn(&Product),
}

/// Pairs of rows, rounded.
///
/// # Safety
/// As [`Pairs`].
pub(crate) unsafe trait PairUp: Pairs {
    /// Rounds both to nearest even, into lanes of a pair each: `first` in the low half. Their numbers
    /// are not subnormal.
    unsafe fn pair_up(first: Self::V, second: Self::V) -> Self::V;
}

/// Rounds the columns `from..end` of `rows` rows of a strip to bf16 and turns them:
/// `to[column][row]`, columns [`ROW_STRIDE`] apart. `rows`, `from` and `end` are whole depths.
///
/// # Safety
/// The processor has D's instructions; the strip and `to` cover the rows and columns.
#[inline(always)]
pub(crate) unsafe fn turned<D: PairUp>(
    strip: *const f32,
    rows: usize,
    from: usize,
    end: usize,
    to: *mut u16,
) {
    debug_assert!([rows, from, end].iter().all(|n| n.is_multiple_of(DEPTH)));
    let lanes = D::V::LANES;
    for first in (0..rows).step_by(2 * lanes) {
        for column in (from..end).step_by(lanes) {
            // SAFETY: the caller's promise.
            unsafe {
                // A pair of rows moves as one f32: nothing computes with it.
                let mut square = [D::V::splat(0.0); MAX_LANES];
                for (pair, register) in square.iter_mut().take(lanes).enumerate() {
                    let row = strip.add((first + 2 * pair) * s_stride::<f32>() + column);
                    let next = row.add(s_stride::<f32>());
                    *register = D::pair_up(D::V::load(row), D::V::load(next));
                }
                D::V::transpose(&mut square);
                for (lane, register) in square.iter().take(lanes).enumerate() {
                    let to = to.add((column + lane) * ROW_STRIDE + first);
                    register.store(to.cast());
                }
            }
        }
    }
}

// SAFETY: plain Rust.
unsafe impl PairUp for Emulated {
    #[inline(always)]
    unsafe fn pair_up(first: Self::V, second: Self::V) -> Self::V {
        const LANES: usize = <Emulated as Pairs>::V::LANES;
        let mut rounded = [0u16; 2 * LANES];
        // SAFETY: both arrays hold what is written and read.
        unsafe {
            Self::round(first, second, rounded.as_mut_ptr());
            let mut pairs = [0u32; LANES];
            for (lane, pair) in pairs.iter_mut().enumerate() {
                *pair = u32::from(rounded[lane]) | u32::from(rounded[LANES + lane]) << 16;
            }
            Self::V::load(pairs.as_ptr().cast())
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::PairUp;
    #[cfg(target_os = "linux")]
    use crate::kernel::pairs::amx::Amx;
    use crate::kernel::pairs::dot512::Dot512;
    use crate::simd::avx512::F32x16;

    /// Lane by lane, the one of the first register, then the one of the second.
    const INTERLEAVED: [u16; 32] = {
        let mut order = [0; 32];
        let mut lane = 0;
        while lane < 16 {
            order[2 * lane] = lane as u16;
            order[2 * lane + 1] = 16 + lane as u16;
            lane += 1;
        }
        order
    };

    #[inline(always)]
    unsafe fn pair_up(first: F32x16, second: F32x16) -> F32x16 {
        // SAFETY: the caller has AVX-512 F and BW and AVX512_BF16; the table is one register.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(second.register(), first.register());
            let rounded = std::mem::transmute::<__m512bh, __m512i>(rounded);
            let order = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
            let pairs = _mm512_permutexvar_epi16(order, rounded);
            F32x16::from_register(_mm512_castsi512_ps(pairs))
        }
    }

    // SAFETY: instructions of AVX-512 F and BW and of AVX512_BF16 alone.
    unsafe impl PairUp for Dot512 {
        #[inline(always)]
        unsafe fn pair_up(first: F32x16, second: F32x16) -> F32x16 {
            // SAFETY: the caller's promise.
            unsafe { pair_up(first, second) }
        }
    }

    // SAFETY: as above, which every processor with AMX has.
    #[cfg(target_os = "linux")]
    unsafe impl PairUp for Amx {
        #[inline(always)]
        unsafe fn pair_up(first: F32x16, second: F32x16) -> F32x16 {
            // SAFETY: the caller's promise.
            unsafe { pair_up(first, second) }
        }
    }
}

macro_rules! turned_table {
    ($D:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn turned_of(strip: *const f32, rows: usize, from: usize, end: usize, to: *mut u16) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { turned::<$D>(strip, rows, from, end, to) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_of(product: &Product) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { <$D as Pairs>::multiply(product) }
        }
        Some(TurnedKernels {
            turned: turned_of,
            multiply: multiply_of,
        })
    }};
}

/// Those of an instruction set for T = bf16: there where [`PairKernels`](super::pairs::PairKernels) are.
pub(crate) fn turned_of_bf16(isa: Isa) -> Option<TurnedKernels<<bf16 as Element>::Acc>> {
    match isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => turned_table!(
            super::pairs::amx::Amx,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
        ),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => turned_table!(
            super::pairs::dot512::Dot512,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
        ),
        Isa::AmxEmulated => turned_table!(Emulated),
        _ => None,
    }
}
