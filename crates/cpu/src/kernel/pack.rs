//! Packing: widening to the accumulator type, into the order in which the microkernel reads.

use tilewise_core::Element;

use crate::simd::{Convert, MAX_LANES, Vector, prefetch};

/// Rows of a tensor that are packed together.
pub(crate) struct Rows<'a, T> {
    /// First element of each row.
    pub(crate) rows: &'a [*const T],
    /// Rows that will be packed next: asked for while these are packed, because a dozen rows side
    /// by side are more than hardware prefetchers follow.
    pub(crate) next: &'a [*const T],
    /// Step from one element of a row to the next.
    pub(crate) step: isize,
    /// Elements of a row.
    pub(crate) len: usize,
}

/// `n` elements from `at` on, the other lanes 0.
#[inline(always)]
pub(crate) unsafe fn chunk<T: Element, V: Convert<T>>(at: *const T, step: isize, n: usize) -> V {
    // SAFETY: the caller vouches for n ≤ LANES elements, `step` apart.
    unsafe {
        if step == 1 && n == V::LANES {
            return V::load_from(at);
        }
        let mut lanes = [T::default(); MAX_LANES];
        for (lane, slot) in lanes.iter_mut().take(n).enumerate() {
            *slot = at.wrapping_offset(lane as isize * step).read();
        }
        V::load_from(lanes.as_ptr())
    }
}

/// Transposes rows into `to[element][column]`, columns `stride` apart; columns past the rows get 0.
/// Every element is multiplied by `sign`.
///
/// # Safety
/// The processor has V's instructions; every row has `len` elements behind it, `to` has room for
/// `len` × `stride` and a vector more, and there are at most `stride` rows.
#[inline(always)]
pub(crate) unsafe fn transposed<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    rows: &Rows<'_, T>,
    stride: usize,
    sign: V::E,
    to: *mut V::E,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(V::E::from_f64(0.0));
        let sign = V::splat(sign);
        for column in (0..stride).step_by(V::LANES) {
            // A group narrower than a vector spills into the next element's columns, which are
            // written later: right only if it is the first group.
            let whole = column == 0 || stride - column >= V::LANES;
            for first in (0..rows.len).step_by(V::LANES) {
                let n = V::LANES.min(rows.len - first);
                let mut square = [zero; MAX_LANES];
                for (lane, register) in square.iter_mut().take(V::LANES).enumerate() {
                    if let Some(row) = rows.next.get(column + lane) {
                        prefetch(row.wrapping_offset(first as isize * rows.step));
                    }
                    if let Some(row) = rows.rows.get(column + lane) {
                        let at = row.wrapping_offset(first as isize * rows.step);
                        *register = chunk::<T, V>(at, rows.step, n).mul(sign);
                    }
                }
                V::transpose(&mut square);
                for (element, register) in square.iter().take(n).enumerate() {
                    let to = to.add((first + element) * stride + column);
                    if whole {
                        register.store(to);
                    } else {
                        let mut lanes = [V::E::from_f64(0.0); MAX_LANES];
                        register.store(lanes.as_mut_ptr());
                        std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, stride - column);
                    }
                }
            }
        }
    }
}

/// Copies rows into panels of `NR` columns, `to[panel][row][NR]`, panels `panel_stride` apart; columns
/// past `len` get 0. Returns whether every element is finite.
///
/// # Safety
/// The processor has V's instructions; every row has `len` elements behind it, `to` has room for
/// ⌈len / NR⌉ panels.
#[inline(always)]
pub(crate) unsafe fn panels<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    rows: &Rows<'_, T>,
    panel_stride: usize,
    to: *mut V::E,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(V::E::from_f64(0.0));
        // 0 · x is 0 unless x is NaN or infinite: the sum tells whether any is.
        let mut poison = zero;
        for (index, &row) in rows.rows.iter().enumerate() {
            let mut first = 0;
            while first < rows.len.next_multiple_of(V::NR) {
                let n = V::LANES.min(rows.len.saturating_sub(first));
                let x = if n == 0 {
                    zero
                } else {
                    let at = row.wrapping_offset(first as isize * rows.step);
                    chunk::<T, V>(at, rows.step, n)
                };
                poison = x.fma(zero, poison);
                let panel = to.add(first / V::NR * panel_stride + index * V::NR);
                x.store(panel.add(first % V::NR));
                first += V::LANES;
            }
        }
        poison.reduce_add() == V::E::from_f64(0.0)
    }
}
