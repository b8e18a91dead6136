//! Loops that do one thing as fast as the processor can.

use std::hint::black_box;

use tilewise_core::Element;

use crate::simd::Vector;

/// Independent chains of multiply-adds: enough to cover latency × ports, few enough for 16 registers.
pub(crate) const CHAINS: usize = 12;

/// `rounds` × [`CHAINS`] multiply-adds of whole registers, none of which waits for memory.
///
/// # Safety
/// The processor has V's instructions.
#[inline(always)]
pub(crate) unsafe fn fma<V: Vector>(rounds: usize) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        let number = V::E::from_f64;
        // Near 1, so that the numbers neither grow nor become subnormal.
        // Hidden from the compiler, which would see that 1 stays 1 and drop that chain.
        let (x, y) = (black_box(0.999_999), black_box(1e-6));
        let (x, y) = (V::splat(number(x)), V::splat(number(y)));
        let mut chains = [x; CHAINS];
        for (n, chain) in chains.iter_mut().enumerate() {
            *chain = V::splat(number(black_box(2.0 + n as f64)));
        }
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = chain.fma(x, y);
            }
        }
        let mut sum = V::splat(number(0.0));
        for chain in chains {
            sum = sum.add(chain);
        }
        sum.reduce_add().to_f64()
    }
}

/// Reads `len` bytes once, a multiple of 8 registers.
///
/// # Safety
/// The processor has V's instructions; `from` holds `len` bytes that are numbers.
#[inline(always)]
pub(crate) unsafe fn read<V: Vector>(from: *const u8, len: usize) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        let from = from.cast::<V::E>();
        let mut chains = [V::splat(V::E::from_f64(0.0)); 8];
        for first in (0..len / size_of::<V::E>()).step_by(8 * V::LANES) {
            for (n, chain) in chains.iter_mut().enumerate() {
                *chain = chain.max(V::load(from.add(first + n * V::LANES)));
            }
        }
        let mut max = chains[0];
        for chain in &chains[1..] {
            max = max.max(*chain);
        }
        max.reduce_max().to_f64()
    }
}
