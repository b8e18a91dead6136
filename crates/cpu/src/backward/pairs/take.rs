//! Rows and keys as they come in: copied, odd ones found, packed in pairs.

use std::ops::Range;

use tilewise_core::Element;

use super::{ODD, PairRoom, depth};
use crate::backward::call::Call;
use crate::backward::keys::MOST_ROWS;
use crate::backward::rows::RowTile;
use crate::kernel::Plane;
use crate::kernel::pack::Rows;
use crate::kernel::pairs::{COLUMNS, DEPTH, PairKernels};

/// Bits of 2⁵⁶: a row with a larger number is odd.
const BIG: u16 = (127 + 56) << 7;

/// Bits of 2⁻¹⁰⁰: what is smaller is 0 beside its row's largest number.
const TINY: u16 = (127 - 100) << 7;

/// The least magnitude, as bits, that the largest number of a row has unless the row is odd or 0.
#[derive(Clone, Copy)]
struct Least(u16);

impl Least {
    /// Of q, k and v: 2⁻²⁰.
    const GIVEN: Least = Least((127 - 20) << 7);
    /// Of dO, which is small where a loss is a mean over much: 2⁻⁶⁰.
    const ARRIVED: Least = Least((127 - 60) << 7);
}

/// Copies rows of bf16 to `to`, `depth(len)` apart with 0 behind `len`; odd rows become 0 and get the
/// mark. Whether there is an odd one.
///
/// # Safety
/// Every row has `len` elements, `to` has room for all, `marks` for a mark each.
unsafe fn take<T>(
    rows: &Rows<'_, T>,
    least: Least,
    to: *mut u16,
    marks: *mut u8,
    mark: u8,
) -> bool {
    let mut any = false;
    for (index, &row) in rows.rows.iter().enumerate() {
        // SAFETY: the caller's promise; a bf16 is a u16.
        let to = unsafe {
            let row = row.cast::<u16>();
            let to =
                std::slice::from_raw_parts_mut(to.add(index * depth(rows.len)), depth(rows.len));
            if rows.step == 1 {
                let row = std::slice::from_raw_parts(row, rows.len);
                to[..rows.len].copy_from_slice(row);
            } else {
                for (element, to) in to[..rows.len].iter_mut().enumerate() {
                    *to = row.wrapping_offset(element as isize * rows.step).read();
                }
            }
            to[rows.len..].fill(0);
            to
        };
        let largest = to
            .iter()
            .fold(0, |max: i16, &x| max.max((x & 0x7fff) as i16)) as u16;
        if largest > BIG || (largest != 0 && largest < least.0) {
            to.fill(0);
            // SAFETY: the caller's promise.
            unsafe { *marks.add(index) |= mark }
            any = true;
            continue;
        }
        for x in to {
            *x = if *x & 0x7fff < TINY { 0 } else { *x };
        }
    }
    any
}

/// Pointers to rows that stand `depth(len)` apart, as packing takes them.
fn dense_rows<T>(pointers: &mut [*const T], at: *const u16, len: usize) {
    for (row, to) in pointers.iter_mut().enumerate() {
        // Inside the room that the rows were copied to.
        *to = at.wrapping_add(row * depth(len)).cast();
    }
}

impl<T: Element> Call<'_, T> {
    /// Takes rows of q (`which` 0) or of dO (1) into their tile.
    ///
    /// # Safety
    /// As [`Self::prepare`]; the kernels have products of pairs.
    pub(in crate::backward) unsafe fn take_pair_rows(
        &self,
        pairs: &PairKernels<T>,
        plane: &Plane<T>,
        rows: &Range<usize>,
        which: usize,
        tile: RowTile<T::Acc>,
    ) {
        let shape = &self.sizes.shape;
        let (len, least, dense, packed) = match which {
            0 => (
                shape.head_dim,
                Least::GIVEN,
                tile.q_columns(),
                tile.q_rows(),
            ),
            _ => (
                shape.head_dim_v,
                Least::ARRIVED,
                tile.dout_columns(),
                tile.dout_rows(),
            ),
        };
        let mut pointers = [std::ptr::null(); MOST_ROWS];
        let pointers = &mut pointers[..rows.len()];
        for (to, row) in pointers.iter_mut().zip(rows.clone()) {
            *to = plane.moved(row, 0).at;
        }
        let given = Rows {
            rows: pointers,
            next: &[],
            step: plane.key,
            len,
        };
        // SAFETY: the caller's promise; the tile's room was made for pairs.
        unsafe {
            let any = take(&given, least, dense.cast(), tile.marks(), ODD[which]);
            tile.set_careful(which, any);
            dense_rows(pointers, dense.cast_const().cast(), len);
            let taken = Rows {
                rows: pointers,
                next: &[],
                step: 1,
                len,
            };
            (pairs.values)(&taken, shape.q_tile * COLUMNS, packed.cast(), tile.marks());
        }
    }

    /// Packs K and V of a tile, given as planes from its first key on.
    ///
    /// # Safety
    /// As [`Self::pack_keys`].
    pub(in crate::backward) unsafe fn pack_pair_keys(
        &self,
        pairs: &PairKernels<T>,
        given: [Plane<T>; 2],
        keys: usize,
        room: &mut PairRoom,
    ) {
        let shape = &self.sizes.shape;
        room.any = 0;
        let marks = room.marks.at();
        // SAFETY: the caller's promise; the room was made for a tile of keys.
        unsafe {
            std::slice::from_raw_parts_mut(marks, shape.key_tile).fill(0);
            for (which, len) in [(0, shape.head_dim), (1, shape.head_dim_v)] {
                let mut pointers = [std::ptr::null(); 256];
                let pointers = &mut pointers[..keys];
                for (j, to) in pointers.iter_mut().enumerate() {
                    *to = given[which].moved(j, 0).at;
                }
                let rows = Rows {
                    rows: pointers,
                    next: &[],
                    step: given[which].key,
                    len,
                };
                let dense = room.dense.at();
                if take(&rows, Least::GIVEN, dense, marks, ODD[which]) {
                    room.any |= ODD[which];
                }
                dense_rows(pointers, dense, len);
                let taken = |from: usize, to: usize| Rows {
                    rows: &pointers[from.min(keys)..to.min(keys)],
                    next: &[],
                    step: 1,
                    len,
                };
                for first in (0..keys.next_multiple_of(DEPTH)).step_by(COLUMNS) {
                    let to = room.columns[which].at().add(first * depth(len));
                    (pairs.keys)(
                        &taken(first, first + COLUMNS),
                        to,
                        marks.add(first.min(keys)),
                    );
                }
                if which == 0 {
                    let panel = shape.key_tile * COLUMNS;
                    (pairs.values)(&taken(0, keys), panel, room.k_rows.at(), marks);
                }
            }
        }
    }
}
