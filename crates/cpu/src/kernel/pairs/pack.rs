//! Packing of bf16 for products of pairs.
//!
//! Numbers that the instructions would not treat as defined are *odd*: NaN, infinity, and what is so
//! large that a score could overflow ([`BIG`]), and in values also what is so small that its
//! products could be subnormal ([`TINY`]). A query, key or value with such a number is packed as 0 and
//! marked; whoever multiplies makes its products apart. What of q and k is small is not odd: where the
//! rest is below BIG and softmax_scale below [`MOST_SCALE`], a product that is taken for 0 would have
//! moved the score by less than 2⁻³⁰, which no weight and no lse shows.

use super::{CHUNK, COLUMNS, DEPTH, ROW_STRIDE};
use crate::kernel::pack::Rows;
use crate::simd::{MAX_LANES, Vector};

/// Bits of 2⁵⁶.
const BIG: u16 = (127 + 56) << 7;

/// Bits of 2⁻¹⁰⁰.
const TINY: u16 = (127 - 100) << 7;

/// head_dim · |softmax_scale| up to which small numbers of q and k do not matter:
/// 2⁻¹²⁶ · 2⁵⁶ · 2⁴⁰ = 2⁻³⁰.
pub(crate) const MOST_SCALE: f64 = (1u64 << 40) as f64;

/// Marks of a key: its k is odd, its v is odd.
pub(crate) const ODD_KEY: u8 = 1;
/// See [`ODD_KEY`].
pub(crate) const ODD_VALUE: u8 = 2;

/// 32 elements of a row from `first` on, 0 behind its end.
#[inline(always)]
unsafe fn piece(row: *const u16, step: isize, first: usize, len: usize) -> [u16; DEPTH] {
    let n = DEPTH.min(len - first);
    let mut piece = [0; DEPTH];
    // SAFETY: the caller vouches for `len` elements, `step` apart.
    unsafe {
        if step == 1 && n == DEPTH {
            return row.add(first).cast::<[u16; DEPTH]>().read_unaligned();
        }
        for (n, slot) in piece.iter_mut().take(n).enumerate() {
            *slot = row.wrapping_offset((first + n) as isize * step).read();
        }
    }
    piece
}

/// Whether a row holds an odd number.
#[inline(always)]
unsafe fn is_odd(row: *const u16, step: isize, len: usize, value: bool) -> bool {
    let mut odd = 0u16;
    for first in (0..len).step_by(DEPTH) {
        // SAFETY: the caller's promise.
        for x in unsafe { piece(row, step, first, len) } {
            let magnitude = x & 0x7fff;
            odd |= u16::from(magnitude > BIG);
            if value {
                odd |= u16::from(magnitude != 0) & u16::from(magnitude < TINY);
            }
        }
    }
    odd != 0
}

/// Copies up to as many rows as there are, [`ROW_STRIDE`] apart, in chunks of [`CHUNK`] elements that
/// stand `chunk` apart; 0 behind `len` up to a whole [`DEPTH`]. `negate` turns the sign. Writes into
/// `odd`, for each row, whether it is.
///
/// # Safety
/// Every row has `len` elements behind it, `to` has room for the rows' chunks, `odd` for the rows.
#[inline(always)]
pub(crate) unsafe fn queries(
    rows: &Rows<'_, u16>,
    negate: bool,
    to: *mut u16,
    chunk: usize,
    odd: *mut u8,
) {
    let sign = if negate { 0x8000 } else { 0 };
    for (index, &row) in rows.rows.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let is_odd = is_odd(row, rows.step, rows.len, false);
            odd.add(index).write(u8::from(is_odd));
            for first in (0..rows.len).step_by(DEPTH) {
                let mut piece = piece(row, rows.step, first, rows.len);
                for x in &mut piece {
                    *x = if is_odd { 0 } else { *x ^ sign };
                }
                let to = to.add(first / CHUNK * chunk + index * ROW_STRIDE + first % CHUNK);
                to.cast::<[u16; DEPTH]>().write_unaligned(piece);
            }
        }
    }
}

/// Packs up to [`COLUMNS`] rows as the columns of one panel, `to[element / 2][column][2]`; 0 in columns
/// without a row and behind `len` up to a whole [`DEPTH`]. Adds to `odd` which are.
///
/// # Safety
/// The processor has V's instructions; every row has `len` elements behind it, `to` has room for the
/// panel, `odd` for the rows.
#[inline(always)]
pub(crate) unsafe fn keys<V: Vector<E = f32>>(rows: &Rows<'_, u16>, to: *mut u16, odd: *mut u8) {
    debug_assert!(rows.rows.len() <= COLUMNS);
    // SAFETY: the caller's promise.
    unsafe {
        let mut is_odd_row = [false; COLUMNS];
        for (index, &row) in rows.rows.iter().enumerate() {
            is_odd_row[index] = is_odd(row, rows.step, rows.len, false);
            if is_odd_row[index] {
                *odd.add(index) |= ODD_KEY;
            }
        }
        for first in (0..rows.len).step_by(DEPTH) {
            // A pair moves as one f32: nothing computes with it.
            let mut pieces = [[0u16; DEPTH]; COLUMNS];
            for (index, &row) in rows.rows.iter().enumerate() {
                if !is_odd_row[index] {
                    pieces[index] = piece(row, rows.step, first, rows.len);
                }
            }
            let to = to.add(first * COLUMNS).cast::<f32>();
            for column in (0..COLUMNS).step_by(V::LANES) {
                for pair in (0..DEPTH / 2).step_by(V::LANES) {
                    let mut square = [V::splat(0.0); MAX_LANES];
                    for (lane, register) in square.iter_mut().take(V::LANES).enumerate() {
                        let from = pieces[column + lane].as_ptr().cast::<f32>().add(pair);
                        *register = V::load(from);
                    }
                    V::transpose(&mut square);
                    for (lane, register) in square.iter().take(V::LANES).enumerate() {
                        register.store(to.add((pair + lane) * COLUMNS + column));
                    }
                }
            }
        }
    }
}

/// Packs rows as pairs of them, `to[panel][row / 2][column][2]`, panels of [`COLUMNS`] columns `panel`
/// apart; 0 behind `len` up to a whole panel and behind the rows up to a whole [`DEPTH`]. Adds to
/// `odd` which are.
///
/// # Safety
/// Every row has `len` elements behind it, `to` has room for the panels, `odd` for the rows.
#[inline(always)]
pub(crate) unsafe fn values(rows: &Rows<'_, u16>, panel: usize, to: *mut u16, odd: *mut u8) {
    for pair in 0..rows.rows.len().next_multiple_of(DEPTH) / 2 {
        // SAFETY: the caller's promise.
        unsafe {
            let row = |index: usize| -> Option<*const u16> {
                let row = *rows.rows.get(index)?;
                if is_odd(row, rows.step, rows.len, true) {
                    *odd.add(index) |= ODD_VALUE;
                    return None;
                }
                Some(row)
            };
            let (even, uneven) = (row(2 * pair), row(2 * pair + 1));
            for first in (0..rows.len).step_by(DEPTH) {
                let take = |row: Option<*const u16>| match row {
                    Some(row) => piece(row, rows.step, first, rows.len),
                    None => [0; DEPTH],
                };
                let (a, b) = (take(even), take(uneven));
                for half in 0..(rows.len - first).min(DEPTH).div_ceil(COLUMNS) {
                    let mut pairs = [0u32; COLUMNS];
                    for (column, slot) in pairs.iter_mut().enumerate() {
                        let at = half * COLUMNS + column;
                        *slot = u32::from(a[at]) | u32::from(b[at]) << 16;
                    }
                    let at = (first / COLUMNS + half) * panel + pair * 2 * COLUMNS;
                    to.add(at).cast::<[u32; COLUMNS]>().write_unaligned(pairs);
                }
            }
        }
    }
}
