//! `vdpbf16ps` on 512 bits.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::few::PairsInPlace;
use super::{CHAINS, COLUMNS, Pairs, Product, ROW_STRIDE};
use crate::kernel::ask;
use crate::kernel::spread::Multiply;
use crate::simd::Vector;
use crate::simd::avx512::F32x16;

/// AVX512_BF16.
pub(crate) struct Dot512;

// SAFETY: instructions of AVX-512 F and AVX512_BF16 alone.
unsafe impl Pairs for Dot512 {
    type V = F32x16;
    const ROW_BLOCKS: &'static [usize] = &[1, 2, 4, 8, 12];

    // Three registers a chain: twelve sums, as many as cover latency × ports.
    const PROBE_FLOPS: usize = 3 * 4 * COLUMNS;

    const GRAIN: usize = COLUMNS;

    // Where this is chosen by itself: on AMD's processors.
    const SUBNORMALS: bool = true;

    #[inline(always)]
    unsafe fn probe(rounds: usize) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            // 1 and 2⁻⁷, hidden from the compiler.
            let one = _mm512_set1_epi32(black_box(0x3f80_3f80));
            let one = std::mem::transmute::<__m512i, __m512bh>(one);
            let small = _mm512_set1_epi32(black_box(0x3c00_3c00));
            let small = std::mem::transmute::<__m512i, __m512bh>(small);
            let mut sums = [_mm512_setzero_ps(); 3 * CHAINS];
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_set1_ps(black_box(n as f32));
            }
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_dpbf16_ps(*sum, one, small);
                }
            }
            let sums = sums.map(|sum| f64::from(_mm512_reduce_add_ps(sum)));
            sums.iter().sum()
        }
    }

    #[inline(always)]
    unsafe fn multiply(product: &Product) {
        // SAFETY: the caller's promise.
        unsafe {
            match product.rows {
                1 => rows::<1>(product),
                2 => rows::<2>(product),
                4 => rows::<4>(product),
                8 => rows::<8>(product),
                12 => rows::<12>(product),
                other => unreachable!("row block of {other}"),
            }
        }
    }

    #[inline(always)]
    unsafe fn round(low: F32x16, high: F32x16, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(high.register(), low.register());
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
        }
    }
}

// SAFETY: as above.
unsafe impl Multiply for Dot512 {
    type V = F32x16;
    const ELEMENTS: usize = 2;

    #[inline(always)]
    unsafe fn add_product(q: F32x16, k: F32x16, sum: F32x16) -> F32x16 {
        // SAFETY: the caller's promise. Registers are bits.
        unsafe {
            // No closures: the instructions would not be inlined into them.
            let q = std::mem::transmute::<__m512, __m512bh>(q.register());
            let k = std::mem::transmute::<__m512, __m512bh>(k.register());
            F32x16::from_register(_mm512_dpbf16_ps(sum.register(), q, k))
        }
    }
}

// SAFETY: as above.
unsafe impl PairsInPlace for Dot512 {
    #[inline(always)]
    unsafe fn interleave(first: F32x16, second: F32x16) -> [F32x16; 2] {
        // Element n of the second register is number 32 + n.
        const fn numbers(odd: u16) -> [u16; 32] {
            let mut numbers = [0; 32];
            let mut n = 0;
            while n < 32 {
                numbers[n] = n as u16 / 2 * 2 + odd + n as u16 % 2 * 32;
                n += 1;
            }
            numbers
        }
        // SAFETY: the caller's promise. Registers are bits.
        unsafe {
            let first = _mm512_castps_si512(first.register());
            let second = _mm512_castps_si512(second.register());
            let even = const { numbers(0) };
            let even = _mm512_loadu_si512(even.as_ptr().cast());
            let even = _mm512_permutex2var_epi16(first, even, second);
            let odd = const { numbers(1) };
            let odd = _mm512_loadu_si512(odd.as_ptr().cast());
            let odd = _mm512_permutex2var_epi16(first, odd, second);
            [
                F32x16::from_register(_mm512_castsi512_ps(even)),
                F32x16::from_register(_mm512_castsi512_ps(odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn round(low: F32x16, high: F32x16, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { <Dot512 as Pairs>::round(low, high, to) }
    }
}

#[inline(always)]
unsafe fn rows<const MR: usize>(product: &Product) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut panel = 0;
        while panel + 2 <= product.panels {
            ask(product.ahead.0, panel, product.ahead.1);
            ask(product.ahead.0, panel + 1, product.ahead.1);
            block::<MR, 2>(product, panel);
            panel += 2;
        }
        if panel < product.panels {
            ask(product.ahead.0, panel, product.ahead.1);
            block::<MR, 1>(product, panel);
        }
    }
}

/// `MR` rows × `N` panels.
#[inline(always)]
unsafe fn block<const MR: usize, const N: usize>(product: &Product, panel: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let c = |r: usize, n: usize| product.c.add(r * product.c_stride + (panel + n) * COLUMNS);
        let mut acc = [[F32x16::splat(0.0); N]; MR];
        if product.add {
            for (r, acc) in acc.iter_mut().enumerate() {
                for (n, acc) in acc.iter_mut().enumerate() {
                    *acc = F32x16::load(c(r, n));
                }
            }
        }
        let mut a = product.a;
        let mut b = product.b.add(panel * product.panel);
        for _ in 0..product.depth.div_ceil(2) {
            let mut columns = [load(b); N];
            for (n, column) in columns.iter_mut().enumerate().skip(1) {
                *column = load(b.add(n * product.panel));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let pair = a.add(r * ROW_STRIDE).cast::<i32>().read_unaligned();
                let x = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair));
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = F32x16::from_register(_mm512_dpbf16_ps(acc.register(), x, column));
                }
            }
            a = a.add(2);
            b = b.add(2 * COLUMNS);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                acc.store(c(r, n));
            }
        }
    }
}

#[inline(always)]
unsafe fn load(from: *const u16) -> __m512bh {
    // SAFETY: the caller vouches for 32 elements.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(from.cast())) }
}
