//! What odd rows and keys enter, made apart.

use std::ops::Range;

use tilewise_core::Element;

use super::{ODD, PairRoom};
use crate::backward::call::Call;
use crate::backward::keys::Step;
use crate::kernel::{Block, Plane, s_stride};

impl<T: Element> Call<'_, T> {
    /// S (`which` 0) or dP (1) of odd rows, and of odd keys.
    ///
    /// # Safety
    /// As [`Self::pair_weights`].
    pub(super) unsafe fn odd_dots(
        &self,
        step: &Step<'_, T>,
        first: usize,
        block: &Block<T::Acc>,
        own: &PairRoom,
        which: usize,
        sign: T::Acc,
    ) {
        // SAFETY: the caller's promise: rows and keys of the block exist.
        unsafe {
            if own.any & ODD[which] == 0 && !step.tile.careful()[which] {
                return;
            }
            for row in 0..block.rows {
                let odd = step.tile.marks().add(first + row).read() & ODD[which] != 0;
                let x = step.row(which, first + row);
                for key in block.lo..block.hi {
                    if !odd && own.marks.at().add(key).read() & ODD[which] == 0 {
                        continue;
                    }
                    let y = step.given[which].moved(key, 0);
                    let mut sum = <T::Acc as Element>::from_f64(0.0);
                    for element in 0..block.head_dim {
                        let (x, y) = (x.moved(0, element), y.moved(0, element));
                        sum += x.at.read().to_acc() * y.at.read().to_acc();
                    }
                    let to = block.s.add(row * s_stride::<T::Acc>() + key);
                    to.write(sum * sign);
                }
            }
        }
    }
}

/// Calls `pair` with those rows and keys of a step whose products are made apart: where any tensor has
/// an odd row or key, for what is made of tiny numbers is itself tiny.
///
/// # Safety
/// The keys are packed, the tile is prepared.
pub(super) unsafe fn apart<T: Element>(
    step: &Step<'_, T>,
    own: &PairRoom,
    rows: Range<usize>,
    keys: Range<usize>,
    mut pair: impl FnMut(usize, usize),
) {
    // SAFETY: the caller's promise: there is a mark for each row and key.
    unsafe {
        if own.any == 0 && step.tile.careful() == [false; 2] {
            return;
        }
        for row in rows {
            let odd = step.tile.marks().add(row).read() != 0;
            for key in keys.clone() {
                if odd || own.marks.at().add(key).read() != 0 {
                    pair(row, key);
                }
            }
        }
    }
}

/// Whether all pairs of these rows and keys are made apart. Sums go through the instructions too: not
/// where these have nothing to add to them, for sums may be as tiny as what was added apart.
///
/// # Safety
/// As [`apart`].
pub(super) unsafe fn nothing_else<T: Element>(
    step: &Step<'_, T>,
    own: &PairRoom,
    rows: Range<usize>,
    keys: Range<usize>,
) -> bool {
    // SAFETY: the caller's promise: there is a mark for each row and key.
    unsafe {
        let all = |marks: *const u8, mut of: Range<usize>| of.all(|n| marks.add(n).read() != 0);
        (step.tile.careful() != [false; 2] && all(step.tile.marks(), rows))
            || (own.any != 0 && all(own.marks.at(), keys))
    }
}

/// sums += weight · x: nothing where the weight is 0, whatever x is.
///
/// # Safety
/// Both have `len` elements.
pub(super) unsafe fn add<T: Element>(weight: T::Acc, x: Plane<T>, len: usize, sums: *mut T::Acc) {
    if weight == <T::Acc as Element>::from_f64(0.0) {
        return;
    }
    for element in 0..len {
        // SAFETY: the caller's promise.
        unsafe {
            let to = sums.add(element);
            to.write(to.read() + weight * x.moved(0, element).at.read().to_acc());
        }
    }
}

impl<T: Element> Step<'_, T> {
    /// Row `row` of the tile, of q (`which` 0) or dO (1), as it was given.
    pub(super) fn row(&self, which: usize, row: usize) -> Plane<T> {
        let planes: [&Plane<T>; 2] = [&self.head.q, &self.dout];
        planes[which].moved(self.rows.start + row, 0)
    }
}
