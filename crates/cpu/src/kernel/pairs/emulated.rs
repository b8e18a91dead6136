//! What `tdpbf16ps` does, in plain arithmetic: for tests on processors without AMX.

use super::{CHAINS, COLUMNS, DEPTH, MOST_ROWS, Pairs, Product, ROW_STRIDE};
use crate::simd::{Convert, Vector, portable};
use tilewise_core::half::bf16;

/// AMX's arithmetic without AMX.
pub(crate) struct Emulated;

// SAFETY: plain Rust.
unsafe impl Pairs for Emulated {
    type V = portable::F32x8;
    const ROW_BLOCKS: &'static [usize] = &[16, MOST_ROWS];

    const PROBE_FLOPS: usize = 2 * DEPTH * COLUMNS;

    unsafe fn probe(rounds: usize) -> f64 {
        let (a, b) = ([0x3f80; DEPTH], [0x3c00; DEPTH * COLUMNS]);
        let mut sums = [[0f32; COLUMNS]; CHAINS];
        for _ in 0..rounds {
            for sums in &mut sums {
                // SAFETY: a whole depth of both.
                unsafe { step(sums, a.as_ptr(), b.as_ptr()) }
            }
        }
        sums.iter().flatten().map(|&x| f64::from(x)).sum()
    }

    unsafe fn multiply(product: &Product) {
        // SAFETY: the caller's promise.
        unsafe {
            for panel in 0..product.panels {
                let b = product.b.add(panel * product.panel);
                for row in 0..product.rows {
                    let a = product.a.add(row * ROW_STRIDE);
                    let c = product.c.add(row * product.c_stride + panel * COLUMNS);
                    let mut sums = [0f32; COLUMNS];
                    if product.add {
                        sums.copy_from_slice(std::slice::from_raw_parts(c, COLUMNS));
                    }
                    for first in (0..product.depth).step_by(DEPTH) {
                        step(&mut sums, a.add(first), b.add(first * COLUMNS));
                    }
                    std::slice::from_raw_parts_mut(c, COLUMNS).copy_from_slice(&sums);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn round(low: Self::V, high: Self::V, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.cast::<bf16>();
            low.store_to(to);
            high.store_to(to.add(portable::F32x8::LANES));
        }
    }
}

impl Emulated {
    /// sum + the products of two words of two bf16, as `vdpbf16ps` adds them up: the second elements
    /// first.
    pub(super) fn add_pair(a: u32, b: u32, sum: f32) -> f32 {
        let half = |x: u32, n: u32| widen((x >> (16 * n)) as u16);
        let sum = flush(flush(sum) + half(a, 1) * half(b, 1));
        flush(sum + half(a, 0) * half(b, 0))
    }
}

/// One row of a tile, as Intel's manual defines it: pairs in order, first and second elements in sums
/// of their own, their sum added to c.
unsafe fn step(c: &mut [f32; COLUMNS], a: *const u16, b: *const u16) {
    let mut sums = [[0f32; COLUMNS]; 2];
    for pair in 0..DEPTH / 2 {
        for (n, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for a whole depth of both.
            let x = widen(unsafe { a.add(2 * pair + n).read() });
            for (column, sum) in sums.iter_mut().enumerate() {
                // SAFETY: as above.
                let y = widen(unsafe { b.add(2 * (pair * COLUMNS + column) + n).read() });
                // The product of two bf16 is exact, so this rounds once, like the fused step.
                *sum = flush(*sum + x * y);
            }
        }
    }
    for (column, c) in c.iter_mut().enumerate() {
        *c = flush(flush(sums[0][column] + sums[1][column]) + flush(*c));
    }
}

/// Subnormals count as 0.
fn widen(x: u16) -> f32 {
    flush(f32::from_bits(u32::from(x) << 16))
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}
