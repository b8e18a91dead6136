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
pub(super) const BIG: u16 = (127 + 56) << 7;

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
    const HALF: usize = DEPTH / 2;
    let n = DEPTH.min(len - first);
    let mut piece = [0; DEPTH];
    // SAFETY: the caller vouches for `len` elements, `step` apart.
    unsafe {
        let mut done = 0;
        if step == 1 {
            let row = row.add(first);
            if n == DEPTH {
                return whole_piece(row);
            }
            if n >= HALF {
                piece[..HALF].copy_from_slice(&row.cast::<[u16; HALF]>().read_unaligned());
                done = HALF;
            }
        }
        for (n, slot) in piece.iter_mut().enumerate().take(n).skip(done) {
            *slot = row.wrapping_offset((first + n) as isize * step).read();
        }
    }
    piece
}

/// The next [`DEPTH`] elements, which are neighbours.
#[inline(always)]
unsafe fn whole_piece(at: *const u16) -> [u16; DEPTH] {
    // SAFETY: the caller vouches for them.
    unsafe { at.cast::<[u16; DEPTH]>().read_unaligned() }
}

/// Whether any of some rows may hold an odd number: the quick look at all of them, of which hardly any
/// ever does. Rows whose elements are not neighbours may.
#[inline(always)]
unsafe fn may_be_odd(rows: &[*const u16], step: isize, len: usize, value: bool) -> bool {
    if step != 1 {
        return true;
    }
    let (mut most, mut least) = ([0u16; DEPTH], [u16::MAX; DEPTH]);
    let mut look = |piece: [u16; DEPTH]| {
        for ((x, most), least) in piece.iter().zip(&mut most).zip(&mut least) {
            let magnitude = x & 0x7fff;
            *most = (*most).max(magnitude);
            if value {
                // 0, which is not odd, becomes the greatest.
                *least = (*least).min(magnitude.wrapping_sub(1));
            }
        }
    };
    for &row in rows {
        // SAFETY: the caller's promise.
        unsafe {
            for first in (0..len - len % DEPTH).step_by(DEPTH) {
                look(whole_piece(row.add(first)));
            }
            if len > DEPTH && !len.is_multiple_of(DEPTH) {
                // Looked at in part already, but quicker than what is left.
                look(whole_piece(row.add(len - DEPTH)));
            } else if len < DEPTH {
                look(piece(row, 1, 0, len));
            }
        }
    }
    let mut odd = false;
    for (&most, &least) in most.iter().zip(&least) {
        odd |= most > BIG || least < TINY - 1;
    }
    odd
}

/// Whether a row holds an odd number.
#[inline(always)]
pub(super) unsafe fn is_odd(row: *const u16, step: isize, len: usize, value: bool) -> bool {
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
    // SAFETY: the caller's promise.
    let some_odd = unsafe { may_be_odd(rows.rows, rows.step, rows.len, false) };
    for (index, &row) in rows.rows.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let is_odd = some_odd && is_odd(row, rows.step, rows.len, false);
            odd.add(index).write(u8::from(is_odd));
            let (keep, turn) = if is_odd { (0, 0) } else { (u16::MAX, sign) };
            let to = to.add(index * ROW_STRIDE);
            let put = |first: usize, mut piece: [u16; DEPTH]| {
                for x in &mut piece {
                    *x = *x & keep ^ turn;
                }
                let to = to.add(first / CHUNK * chunk + first % CHUNK);
                to.cast::<[u16; DEPTH]>().write_unaligned(piece);
            };
            let whole = match rows.step {
                1 => rows.len - rows.len % DEPTH,
                _ => 0,
            };
            for first in (0..whole).step_by(DEPTH) {
                put(first, whole_piece(row.add(first)));
            }
            for first in (whole..rows.len).step_by(DEPTH) {
                put(first, piece(row, rows.step, first, rows.len));
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
        // All rows as they stand, if there are no others.
        let mut plain = <&[*const u16; COLUMNS]>::try_from(rows.rows).ok();
        if may_be_odd(rows.rows, rows.step, rows.len, false) {
            for (index, &row) in rows.rows.iter().enumerate() {
                is_odd_row[index] = is_odd(row, rows.step, rows.len, false);
                if is_odd_row[index] {
                    *odd.add(index) |= ODD_KEY;
                    plain = None;
                }
            }
        }
        for first in (0..rows.len).step_by(DEPTH) {
            let to = to.add(first * COLUMNS).cast::<f32>();
            let left = rows.len - first;
            if let Some(rows_of_panel) = plain
                && rows.step == 1
                && rows.len >= DEPTH
                && (left >= DEPTH || left.is_multiple_of(2))
            {
                // Of what is left, if it is less than a whole piece, the last whole piece.
                let start = first.min(rows.len - DEPTH);
                columns::<V>(rows_of_panel, start, (first - start) / 2, to);
                continue;
            }
            let mut pieces = [[0; DEPTH]; COLUMNS];
            for (index, &row) in rows.rows.iter().enumerate() {
                if !is_odd_row[index] {
                    pieces[index] = piece(row, rows.step, first, rows.len);
                }
            }
            columns::<V>(&pieces.each_ref().map(|piece| piece.as_ptr()), 0, 0, to);
        }
    }
}

/// Packs a piece of each row, from `start` on, without its first `skip` pairs, and 0 in place of them
/// behind it.
#[inline(always)]
unsafe fn columns<V: Vector<E = f32>>(
    rows: &[*const u16; COLUMNS],
    start: usize,
    skip: usize,
    to: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(0.0);
        for column in (0..COLUMNS).step_by(V::LANES) {
            for pair in (0..DEPTH / 2).step_by(V::LANES) {
                let mut square = [zero; MAX_LANES];
                for (lane, register) in square.iter_mut().take(V::LANES).enumerate() {
                    // A pair moves as one f32: nothing computes with it.
                    *register = V::load(rows[column + lane].add(start).cast::<f32>().add(pair));
                }
                V::transpose(&mut square);
                for (lane, register) in square.iter().take(V::LANES).enumerate() {
                    let pair = (pair + lane).wrapping_sub(skip);
                    if pair < DEPTH / 2 {
                        register.store(to.add(pair * COLUMNS + column));
                    }
                }
            }
            for pair in DEPTH / 2 - skip..DEPTH / 2 {
                zero.store(to.add(pair * COLUMNS + column));
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
    for (number, group) in rows.rows.chunks(DEPTH).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(number * DEPTH * COLUMNS);
            let odd = odd.add(number * DEPTH);
            let may_be_odd = may_be_odd(group, rows.step, rows.len, true);
            if !may_be_odd && group.len() == DEPTH && rows.len.is_multiple_of(COLUMNS) {
                plain_values(group, rows.len, panel, to);
                continue;
            }
            for pair in 0..DEPTH / 2 {
                let row = |index: usize| -> Option<*const u16> {
                    let row = *group.get(index)?;
                    if may_be_odd && is_odd(row, rows.step, rows.len, true) {
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
}

/// [`values`] of a whole depth of rows of whole panels, none of them odd.
#[inline(always)]
unsafe fn plain_values(rows: &[*const u16], len: usize, panel: usize, to: *mut u16) {
    // SAFETY: the caller's promise.
    unsafe {
        for (pair, rows) in rows.chunks_exact(2).enumerate() {
            for first in (0..len).step_by(COLUMNS) {
                let a = rows[0].add(first).cast::<[u16; COLUMNS]>().read_unaligned();
                let b = rows[1].add(first).cast::<[u16; COLUMNS]>().read_unaligned();
                let mut pairs = [0u32; COLUMNS];
                for (slot, (&a, &b)) in pairs.iter_mut().zip(a.iter().zip(&b)) {
                    *slot = u32::from(a) | u32::from(b) << 16;
                }
                let at = first / COLUMNS * panel + pair * 2 * COLUMNS;
                to.add(at).cast::<[u32; COLUMNS]>().write_unaligned(pairs);
            }
        }
    }
}
