//! Packing: widening to the accumulator type, into the order in which the microkernel reads.

use std::ops::Range;

use tilewise_core::Element;

use super::LINE;
use crate::simd::{Convert, MAX_LANES, Vector, prefetch, prefetch_far};

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

/// Rows are asked for this far ahead of their packing: further than from a dozen rows side by side the
/// hardware would, in the time that memory takes.
const BYTES_AHEAD: usize = 8 << 10;

impl<T> Rows<'_, T> {
    /// How many rows ahead to ask for.
    pub(crate) fn ahead(&self) -> usize {
        BYTES_AHEAD.div_ceil((self.len * size_of::<T>()).max(1))
    }

    /// Asks for those of the rows numbered `range` that there are, in the second level.
    pub(crate) fn ask(&self, range: Range<usize>) {
        let end = range.end.min(self.rows.len());
        if self.step != 1 || self.len == 0 {
            return;
        }
        let last = self.len - 1;
        for row in &self.rows[range.start.min(end)..end] {
            for element in (0..last).step_by(LINE / size_of::<T>()).chain([last]) {
                prefetch_far(row.wrapping_add(element));
            }
        }
    }
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
        // Elements that are read as whole vectors.
        let whole = match rows.step {
            1 => rows.len - rows.len % V::LANES,
            _ => 0,
        };
        for column in (0..stride).step_by(V::LANES) {
            let here = rows.rows.get(column..).unwrap_or_default();
            let here = &here[..here.len().min(V::LANES)];
            let next = rows.next.get(column..).unwrap_or_default();
            for first in (0..whole).step_by(V::LANES) {
                let mut square = [zero; MAX_LANES];
                for (lane, register) in square.iter_mut().take(V::LANES).enumerate() {
                    // A number of steps known when compiled keeps the square in registers.
                    if lane < here.len() {
                        let row = here.as_ptr().add(lane).read();
                        *register = V::load_from(row.add(first)).mul(sign);
                    }
                }
                for row in next.iter().take(V::LANES) {
                    prefetch(row.wrapping_add(first));
                }
                put_square(&mut square, first, V::LANES, column, stride, to);
            }
            for first in (whole..rows.len).step_by(V::LANES) {
                let n = V::LANES.min(rows.len - first);
                let mut square = [zero; MAX_LANES];
                for (register, row) in square.iter_mut().zip(here) {
                    let at = row.wrapping_offset(first as isize * rows.step);
                    *register = chunk::<T, V>(at, rows.step, n).mul(sign);
                }
                for row in next.iter().take(V::LANES) {
                    prefetch(row.wrapping_offset(first as isize * rows.step));
                }
                put_square(&mut square, first, n, column, stride, to);
            }
        }
    }
}

/// Puts elements `first..first + n` of as many rows as a register has lanes into the columns from
/// `column` on.
#[inline(always)]
unsafe fn put_square<V: Vector>(
    square: &mut [V; MAX_LANES],
    first: usize,
    n: usize,
    column: usize,
    stride: usize,
    to: *mut V::E,
) {
    // SAFETY: the caller's promise is that of `transposed`.
    unsafe {
        V::transpose(square);
        // A group narrower than a vector spills into the next element's columns, which are written
        // later: right only if it is the first group.
        let whole = column == 0 || stride - column >= V::LANES;
        for (element, register) in square.iter().take(n).enumerate() {
            let to = to.add((first + element) * stride + column);
            if whole {
                register.store(to);
            } else {
                register.store_first(to, stride - column);
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
        // 0 · x is 0 unless x is NaN or infinite: the sums tell whether any is.
        let mut poison = [zero; 2];
        let whole = match rows.step {
            1 => rows.len - rows.len % V::NR,
            _ => 0,
        };
        for (index, &row) in rows.rows.iter().enumerate() {
            let to = to.add(index * V::NR);
            for first in (0..whole).step_by(V::NR) {
                let panel = to.add(first / V::NR * panel_stride);
                for (n, poison) in poison.iter_mut().enumerate().take(V::NRV) {
                    let x = V::load_from(row.add(first + n * V::LANES));
                    *poison = x.fma(zero, *poison);
                    x.store(panel.add(n * V::LANES));
                }
            }
            for first in (whole..rows.len.next_multiple_of(V::NR)).step_by(V::LANES) {
                let n = V::LANES.min(rows.len.saturating_sub(first));
                let x = if n == 0 {
                    zero
                } else {
                    let at = row.wrapping_offset(first as isize * rows.step);
                    chunk::<T, V>(at, rows.step, n)
                };
                poison[0] = x.fma(zero, poison[0]);
                let panel = to.add(first / V::NR * panel_stride);
                x.store(panel.add(first % V::NR));
            }
        }
        poison[0].add(poison[1]).reduce_add() == V::E::from_f64(0.0)
    }
}
