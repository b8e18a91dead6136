//! Õ += P v of a block.

use num_traits::Float as _;
use tilewise_core::Element;

use super::gemm::{gemm, with_mr};
use super::{Block, s_stride};
use crate::simd::Vector;

/// Adds the weighted values of the keys `lo..hi` to Õ, keys ascending.
///
/// # Safety
/// The processor has V's instructions; the block's pointers cover what its sizes say.
#[inline(always)]
pub(crate) unsafe fn weighted_values<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        if !block.careful {
            with_mr!(V, block.mr, MR => range::<V, MR>(block, block.lo, block.hi));
            return;
        }
        // Keys with a NaN or infinite value are added apart, to the rows that see them only.
        let mut from = block.lo;
        for key in block.lo..block.hi {
            if is_finite::<V>(block, key) {
                continue;
            }
            if from < key {
                with_mr!(V, block.mr, MR => range::<V, MR>(block, from, key));
            }
            one_key::<V>(block, key);
            from = key + 1;
        }
        if from < block.hi {
            with_mr!(V, block.mr, MR => range::<V, MR>(block, from, block.hi));
        }
    }
}

#[inline(always)]
unsafe fn range<V: Vector, const MR: usize>(block: &Block<V::E>, from: usize, to: usize) {
    // SAFETY: the caller's promise: keys from..to lie in the strip and in v, columns in Õ.
    unsafe {
        let p = block.s.add(from);
        for panel in 0..block.width.div_ceil(V::NR) {
            let first = panel * V::NR;
            let v = block.v.add(panel * block.v_panel + from * V::NR);
            let out = block.acc.add(first);
            block.ahead.v(panel);
            if V::NRV == 2 && block.width - first > V::LANES {
                let mut acc = [[V::splat(V::E::from_f64(0.0)); 2]; MR];
                for (r, row) in acc.iter_mut().enumerate() {
                    for (n, x) in row.iter_mut().enumerate() {
                        *x = V::load(out.add(r * block.width + n * V::LANES));
                    }
                }
                gemm::<V, MR, 2, false>(to - from, p, v, &mut acc);
                for (r, row) in acc.iter().enumerate() {
                    for (n, x) in row.iter().enumerate() {
                        x.store(out.add(r * block.width + n * V::LANES));
                    }
                }
            } else {
                let mut acc = [[V::splat(V::E::from_f64(0.0)); 1]; MR];
                for (r, row) in acc.iter_mut().enumerate() {
                    row[0] = V::load(out.add(r * block.width));
                }
                gemm::<V, MR, 1, false>(to - from, p, v, &mut acc);
                for (r, row) in acc.iter().enumerate() {
                    row[0].store(out.add(r * block.width));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn is_finite<V: Vector>(block: &Block<V::E>, key: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (0..block.width).all(|column| value::<V>(block, key, column).is_finite()) }
}

#[inline(always)]
unsafe fn value<V: Vector>(block: &Block<V::E>, key: usize, column: usize) -> V::E {
    let at = column / V::NR * block.v_panel + key * V::NR + column % V::NR;
    // SAFETY: the caller's promise.
    unsafe { block.v.add(at).read() }
}

#[inline(always)]
unsafe fn one_key<V: Vector>(block: &Block<V::E>, key: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..block.rows {
            let p = block.s.add(row * s_stride::<V::E>() + key).read();
            if p == V::E::from_f64(0.0) {
                continue;
            }
            for column in 0..block.width {
                let acc = block.acc.add(row * block.width + column);
                acc.write(acc.read() + p * value::<V>(block, key, column));
            }
        }
    }
}
