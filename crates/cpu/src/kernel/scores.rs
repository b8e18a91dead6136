//! S = q kᵀ of a block, and what options do to it before the softmax.

use num_traits::Float as _;
use tilewise_core::Element;

use super::gemm::{gemm, with_mr};
use super::{Block, Modifiers, s_stride};
use crate::exp::tanh;
use crate::simd::{Convert, MAX_LANES, Vector};

/// S = q kᵀ: fills the columns of the strip from `lo` to `hi`, both rounded outwards to whole vectors.
///
/// # Safety
/// The processor has V's instructions; the block's pointers cover what its sizes say.
#[inline(always)]
pub(crate) unsafe fn products<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe { with_mr!(V, block.mr, MR => dot_products::<V, MR>(block)) }
}

/// −∞ where a row does not see a key, in the columns that [`products`] fills.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(crate) unsafe fn hide<V: Vector>(block: &Block<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let from = block.lo - block.lo % V::LANES;
        let to = block.hi.next_multiple_of(V::LANES);
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            hide_row(s, from, to, block.live[row]);
        }
    }
}

/// −∞ in the columns from..to of a row that it does not see.
///
/// # Safety
/// The columns are the row's.
#[inline(always)]
pub(crate) unsafe fn hide_row<E: tilewise_core::Float>(
    s: *mut E,
    from: usize,
    to: usize,
    (lo, hi): (usize, usize),
) {
    for hidden in [from..lo.min(to), hi.max(from)..to] {
        for key in hidden {
            // SAFETY: the caller's promise.
            unsafe { s.add(key).write(E::neg_infinity()) }
        }
    }
}

#[inline(always)]
unsafe fn dot_products<V: Vector, const MR: usize>(block: &Block<V::E>) {
    // SAFETY: the caller's promise: panels from lo/NR to hi/NR lie in k, their columns in s.
    unsafe {
        for panel in block.lo / V::NR..block.hi.div_ceil(V::NR) {
            let first = panel * V::NR;
            let k = block.k.add(first * block.head_dim);
            let s = block.s.add(first);
            block.ahead.k(panel);
            // The last panel's second half may hold no live key.
            if V::NRV == 2 && block.hi - first > V::LANES {
                let mut acc = [[V::splat(V::E::from_f64(0.0)); 2]; MR];
                gemm::<V, MR, 2, true>(block.head_dim, block.q, k, &mut acc);
                for (r, row) in acc.iter().enumerate() {
                    for (n, x) in row.iter().enumerate() {
                        x.store(s.add(r * s_stride::<V::E>() + n * V::LANES));
                    }
                }
            } else {
                let mut acc = [[V::splat(V::E::from_f64(0.0)); 1]; MR];
                gemm::<V, MR, 1, true>(block.head_dim, block.q, k, &mut acc);
                for (r, row) in acc.iter().enumerate() {
                    row[0].store(s.add(r * s_stride::<V::E>()));
                }
            }
        }
    }
}

/// Scale, softcap, bias, ALiBi and mask, on exactly the keys `lo..hi` of each row.
///
/// # Safety
/// As [`products`], which must have run; bias and mask cover the block's rows and those keys.
#[inline(always)]
pub(crate) unsafe fn modify<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    modifiers: &Modifiers<T>,
) {
    for row in 0..block.rows {
        // SAFETY: the caller's promise.
        unsafe { modify_row::<T, V>(block, modifiers, row) }
    }
}

#[inline(always)]
unsafe fn modify_row<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    block: &Block<V::E>,
    modifiers: &Modifiers<T>,
    row: usize,
) {
    // SAFETY: the caller's promise; bias and mask are touched at the keys lo..hi only.
    unsafe {
        let s = block.s.add(row * s_stride::<V::E>());
        let scale = V::splat(modifiers.scale);
        let mut key = block.lo;
        while key < block.hi {
            let n = V::LANES.min(block.hi - key);
            // The strip has room for a whole vector behind any key of the tile.
            let mut x = V::load(s.add(key)).mul(scale);
            if let Some(cap) = modifiers.softcap {
                let cap = V::splat(cap);
                x = tanh(x.div(cap)).mul(cap);
            }
            if let Some(bias) = modifiers.bias {
                let at = bias.moved(row, key).at;
                let b: V = if bias.key == 1 && n == V::LANES {
                    V::load_from(at)
                } else {
                    let mut lanes = [T::default(); MAX_LANES];
                    for (lane, slot) in lanes.iter_mut().take(n).enumerate() {
                        *slot = at.wrapping_offset(lane as isize * bias.key).read();
                    }
                    V::load_from(lanes.as_ptr())
                };
                // A bias of −∞ hides the key whatever its score: NaN − ∞ would not.
                let sum = x.add(b);
                x = V::select_lt(b, V::splat(V::E::min_value()), b, sum);
            }
            if let Some((slope, diagonal)) = modifiers.alibi {
                let at = diagonal + row as i64 - key as i64;
                let distance = V::splat(V::E::from_f64(at as f64)).sub(V::iota()).abs();
                x = x.sub(V::splat(slope).mul(distance));
            }
            x.store(s.add(key));
            if let Some(mask) = modifiers.mask {
                let at = mask.moved(row, key).at;
                for lane in 0..n {
                    if at.wrapping_offset(lane as isize * mask.key).read() == 0 {
                        s.add(key + lane).write(V::E::neg_infinity());
                    }
                }
            }
            key += n;
        }
    }
}
