//! A tile of query rows: what is made of it once, before keys pass by.

use std::ops::Range;

use num_traits::Float as _;
use tilewise_core::Element;
use tilewise_core::schedule::backward::keeps_a_key;

use super::call::{Call, Room};
use super::kernel::Weights;
use super::keys::KeyRoom;
use crate::call::KvHead;
use crate::head::{Head, rows_of};
use crate::kernel::pack::Rows;
use crate::kernel::{MAX_MR, Plane, s_stride};

/// A tile of rows in its room.
#[derive(Clone, Copy)]
pub(super) struct RowTile<A> {
    at: *mut A,
    room: Room,
    /// Whether a value of q, and of dO, is NaN or infinite (for products of pairs, whether a row is
    /// odd), and marks of the rows.
    flags: *mut u8,
}

impl<A> RowTile<A> {
    /// # Safety
    /// `at` has the room's elements, `flags` its flags.
    pub(super) unsafe fn new(at: *mut A, room: Room, flags: *mut u8) -> Self {
        RowTile { at, room, flags }
    }

    fn part(&self, offset: usize) -> *mut A {
        // Inside the room, by its making.
        self.at.wrapping_add(offset)
    }

    /// q, `[block][head_dim][mr]`; for products of pairs `[row][whole depths]`, in 16 bits.
    pub(super) fn q_columns(&self) -> *mut A {
        self.part(self.room.q_columns)
    }

    /// dO, likewise.
    pub(super) fn dout_columns(&self) -> *mut A {
        self.part(self.room.dout_columns)
    }

    /// q, `[panel][row][NR]`; for products of pairs `[panel][row / 2][COLUMNS][2]`, in 16 bits.
    pub(super) fn q_rows(&self) -> *mut A {
        self.part(self.room.q_rows)
    }

    /// dO, likewise.
    pub(super) fn dout_rows(&self) -> *mut A {
        self.part(self.room.dout_rows)
    }

    /// Sum number `lane` of dQ, `[row][width_q]`.
    pub(super) fn dq(&self, lane: usize) -> *mut A {
        assert!(lane < self.room.lanes);
        self.part(self.room.dq + lane * self.room.dq_lane)
    }

    /// L in units of the strip, its low part, and Δ.
    pub(super) fn statistics(&self) -> [*mut A; 3] {
        [self.room.l, self.room.l_low, self.room.delta].map(|offset| self.part(offset))
    }

    /// # Safety
    /// The tile has been prepared.
    pub(super) unsafe fn careful(&self) -> [bool; 2] {
        // SAFETY: the caller's promise.
        unsafe { [0, 1].map(|which| self.flags.add(which).read() != 0) }
    }

    /// # Safety
    /// The tile is no one else's.
    pub(super) unsafe fn set_careful(&self, which: usize, careful: bool) {
        // SAFETY: the caller's promise; there are two of these flags.
        unsafe { self.flags.add(which).write(u8::from(careful)) }
    }

    /// A mark for each row.
    pub(super) fn marks(&self) -> *mut u8 {
        // Inside the room's flags, by its making.
        self.flags.wrapping_add(2)
    }
}

/// L of a row in two parts. A row without a live key gets 0: all its weights are 0 then.
fn split<A: Element<Acc = A>>(lse: f64, unit: f64) -> [A; 2] {
    let l = match lse == f64::NEG_INFINITY {
        true => 0.0,
        false => lse / unit,
    };
    let high = A::from_f64(l);
    [high, A::from_f64(l - high.to_f64())]
}

impl<T: Element> Call<'_, T> {
    /// Makes a tile of rows and gives its share of the sink's gradient.
    ///
    /// # Safety
    /// The rows belong to the head; the tile is no one else's; the processor has the kernels'
    /// instructions; the room for keys is no one else's.
    pub(super) unsafe fn prepare(
        &self,
        at: KvHead,
        n: usize,
        rows: &Range<usize>,
        tile: RowTile<T::Acc>,
        keys: &mut KeyRoom<T>,
    ) -> f64 {
        let sequence = &self.problem.sequences()[at.sequence];
        let (b, h) = (sequence.q_batch, self.index(at, n));
        let head = self.head(at, n);
        let dout = self.dout(at, n);
        let out = rows_of(&self.inputs.out, b, h, sequence.q_start);
        let shape = &self.sizes.shape;
        let one = <T::Acc as Element>::from_f64(1.0);
        let sign = self.scoring.sign;
        // SAFETY: the caller's promise; rows of the head exist, by the checked problem and shapes.
        unsafe {
            std::slice::from_raw_parts_mut(tile.marks(), shape.q_tile).fill(0);
            let (q_columns, dout_columns) = (tile.q_columns(), tile.dout_columns());
            let (d, dv) = (shape.head_dim, shape.head_dim_v);
            self.pack(&head.q, rows, d, sign, q_columns, tile.q_rows(), 0, tile);
            self.pack(
                &dout,
                rows,
                dv,
                one,
                dout_columns,
                tile.dout_rows(),
                1,
                tile,
            );
            let padded = shape.padded(rows.len()) * self.sizes.width_q;
            for lane in 0..self.sizes.lanes {
                std::slice::from_raw_parts_mut(tile.dq(lane), padded).fill(T::Acc::default());
            }
            let [l, l_low, delta] = tile.statistics();
            for (r, row) in rows.clone().enumerate() {
                let (x, y) = (dout.moved(row, 0), out.moved(row, 0));
                let mut sum = match dv {
                    0 => T::Acc::default(),
                    _ => (self.more.row_dot)(dv, x.at, x.key, y.at, y.key),
                };
                // out may be 0 because the row keeps no key, and 0 · NaN is not. The call has been checked.
                if !sum.is_finite() {
                    let given = &self.inputs.inputs;
                    if let Ok(false) = keeps_a_key(self.problem, given, at.sequence, h, row) {
                        sum = T::Acc::default();
                    }
                }
                let place = [b, h, sequence.q_start + row, 0];
                if let Some(dlse) = &self.inputs.dlse {
                    sum -= <T::Acc as Element>::from_f64(dlse.at(place).into());
                }
                delta.add(r).write(sum);
                let [high, low] =
                    split::<T::Acc>(self.inputs.lse.at(place).into(), self.scoring.unit);
                l.add(r).write(high);
                l_low.add(r).write(low);
            }
            if T::DTYPE == tilewise_core::DType::F64 {
                self.correct((at, n), &head, rows, tile, keys);
            }
            let Some(sink) = head.sink.filter(|&sink| sink != f32::NEG_INFINITY) else {
                return 0.0;
            };
            (0..rows.len())
                .map(|r| {
                    let l = l.add(r).read().to_f64() + l_low.add(r).read().to_f64();
                    let p = (f64::from(sink) - l * self.scoring.unit).exp();
                    -p * delta.add(r).read().to_f64()
                })
                .sum()
        }
    }

    /// Packs rows of a tensor in blocks of columns and in panels of rows.
    ///
    /// # Safety
    /// As [`Self::prepare`].
    #[allow(clippy::too_many_arguments)] // one tensor and where it goes
    unsafe fn pack(
        &self,
        plane: &Plane<T>,
        rows: &Range<usize>,
        len: usize,
        sign: T::Acc,
        columns: *mut T::Acc,
        panels: *mut T::Acc,
        which: usize,
        tile: RowTile<T::Acc>,
    ) {
        if let Some(pairs) = &self.kernels.pairs {
            // SAFETY: the caller's promise.
            unsafe { self.take_pair_rows(pairs, plane, rows, which, tile) }
            return;
        }
        let shape = &self.sizes.shape;
        let mut pointers = [std::ptr::null(); super::keys::MOST_ROWS];
        for (to, row) in pointers.iter_mut().zip(rows.clone()) {
            *to = plane.moved(row, 0).at;
        }
        let pointers = &pointers[..rows.len()];
        let rows_of = |first: usize, n: usize| Rows {
            rows: &pointers[first..first + n],
            next: &pointers[first + n..(first + 2 * n).min(pointers.len())],
            step: plane.key,
            len,
        };
        // SAFETY: the caller's promise.
        unsafe {
            for (first, n, mr) in shape.blocks(rows.len()) {
                let to = columns.add(first * len);
                (self.kernels.transposed)(&rows_of(first, n), mr, sign, to);
            }
            let stride = shape.q_tile * shape.nr;
            let finite = (self.kernels.panels)(&rows_of(0, rows.len()), stride, panels);
            tile.set_careful(which, !finite);
        }
    }

    /// In f64, lse as f32 is too coarse: what it lost is ln Σ e^(S − lse), and added here.
    ///
    /// # Safety
    /// As [`Self::prepare`].
    unsafe fn correct(
        &self,
        (at, n): (KvHead, usize),
        head: &Head<T>,
        rows: &Range<usize>,
        tile: RowTile<T::Acc>,
        keys: &mut KeyRoom<T>,
    ) {
        let sequence = &self.problem.sequences()[at.sequence];
        let [l, l_low, delta] = tile.statistics();
        let sink = head.sink.map_or(f64::NEG_INFINITY, f64::from);
        // SAFETY: the caller's promise.
        unsafe {
            let unit = self.scoring.unit;
            let lse = |r: usize| (l.add(r).read().to_f64() + l_low.add(r).read().to_f64()) * unit;
            let mut sums = [0.0; super::keys::MOST_ROWS];
            for (r, sum) in sums[..rows.len()].iter_mut().enumerate() {
                *sum = (sink - lse(r)).exp();
            }
            for key_tile in self.sizes.key_tiles(&head.rule.keys(rows.clone())) {
                let range = self.sizes.keys(key_tile, sequence.seqlen_k);
                self.pack_keys(at, &range, keys);
                let step = self.step((at, n), head, rows, &range, tile);
                for (first, n, mr) in self.sizes.shape.blocks(rows.len()) {
                    let block = self.block(&step, [first, n, mr], keys);
                    let Some((mut block, modifiers)) = block else {
                        continue;
                    };
                    self.kernels.scores(&block, modifiers.as_ref());
                    let weights = Weights {
                        l: l.add(first),
                        l_low: l_low.add(first),
                        delta,
                        ds: keys.ds(),
                        slopes: None,
                        scale: self.scoring.c,
                        softcap: None,
                    };
                    (self.more.weigh)(&block, &weights);
                    for r in 0..n {
                        block.s =
                            block
                                .s
                                .wrapping_add(if r == 0 { 0 } else { s_stride::<T::Acc>() });
                        let (lo, hi) = block.live[r];
                        for key in lo..hi {
                            sums[first + r] += block.s.add(key).read().to_f64();
                        }
                    }
                }
            }
            for (r, sum) in sums[..rows.len()].iter().enumerate() {
                // 0: no live key. Not a number: neither is the row.
                if *sum != 0.0 {
                    l_low.add(r).write(<T::Acc as Element>::from_f64(
                        l_low.add(r).read().to_f64() + sum.ln() / unit,
                    ));
                }
            }
        }
    }
}

const _: () = assert!(super::keys::MOST_ROWS >= 4 * MAX_MR);
