//! K and V of one KV head, packed for the microkernel.

use std::sync::Arc;

use tilewise_core::{Element, Inputs, Result, Sequence};

use crate::buffer::{Buffer, Reserve};
use crate::head::rows_of;
use crate::kernel::pack::Rows;
use crate::kernel::table::Kernels;
use crate::kernel::{Plane, max_key_tile};
use crate::pairs::PackedPairs;
use crate::shape::Shape;

/// Where the keys (or values) of one sequence and KV head lie.
#[derive(Clone, Copy)]
struct Axis<T> {
    plane: Plane<T>,
    /// Step from page to page.
    page: isize,
}

/// Where K and V of one sequence and KV head lie.
#[derive(Clone, Copy)]
pub(crate) struct KeySource<'a, T> {
    k: Axis<T>,
    v: Axis<T>,
    /// The sequence's row of the block table, and the keys a page.
    pages: Option<(&'a [i32], usize)>,
    /// Keys there are.
    pub(crate) keys: usize,
}

impl<'a, T: Element> KeySource<'a, T> {
    pub(crate) fn new(inputs: &Inputs<'a, T>, sequence: &Sequence, kv_head: usize) -> Self {
        let axis = |view: &tilewise_core::TensorView<'a, T>| match inputs.block_table {
            None => Axis {
                plane: rows_of(view, sequence.k_batch, kv_head, sequence.k_start),
                page: 0,
            },
            Some(_) => Axis {
                plane: rows_of(view, 0, kv_head, 0),
                page: view.strides()[0],
            },
        };
        KeySource {
            k: axis(&inputs.k),
            v: axis(&inputs.v),
            pages: inputs.block_table.map(|table| {
                let row = &table.pages[sequence.k_batch * table.width..][..table.width];
                (row, inputs.k.shape()[2])
            }),
            keys: sequence.seqlen_k,
        }
    }

    /// Whether the elements of a key, and of a value, are neighbours in memory.
    pub(crate) fn is_contiguous(&self, shape: &Shape) -> bool {
        (shape.head_dim <= 1 || self.k.plane.key == 1)
            && (shape.head_dim_v <= 1 || self.v.plane.key == 1)
    }

    /// The keys from `from` on that lie one `step` behind the other, up to `to` at most: their end,
    /// and for K and V the first element that key 0 would have in that row of keys, and the step.
    pub(crate) fn run(&self, from: usize, to: usize) -> (usize, [(*const T, isize); 2]) {
        let end = match self.pages {
            None => to,
            Some((_, size)) => to.min((from / size + 1) * size),
        };
        let axis = |axis: &Axis<T>| {
            let step = axis.plane.row;
            (
                self.at(axis, from).wrapping_offset(-(from as isize * step)),
                step,
            )
        };
        (end, [axis(&self.k), axis(&self.v)])
    }

    /// First element of key `j`'s k, and the step to the next.
    pub(crate) fn key(&self, j: usize) -> (*const T, isize) {
        (self.at(&self.k, j), self.k.plane.key)
    }

    /// Likewise of its v.
    pub(crate) fn value(&self, j: usize) -> (*const T, isize) {
        (self.at(&self.v, j), self.v.plane.key)
    }

    /// First element of key `j` on `axis`.
    fn at(&self, axis: &Axis<T>, j: usize) -> *const T {
        let (page, slot) = match self.pages {
            None => (0, j),
            Some((table, size)) => (table[j / size] as isize, j % size),
        };
        let step = page * axis.page + slot as isize * axis.plane.row;
        axis.plane.at.wrapping_offset(step)
    }
}

/// Room for packed K and V of one KV head.
pub(crate) struct Packed<T: Element> {
    k: Buffer<T::Acc>,
    v: Buffer<T::Acc>,
    /// One a tile: 1 if a value is NaN or infinite.
    careful: Buffer<u8>,
    /// Rows of a panel of V.
    v_rows: usize,
    /// What is packed instead, where products take pairs.
    pairs: Option<PackedPairs>,
}

impl<T: Element> Packed<T> {
    /// Bytes that `keys` keys take.
    pub(crate) fn bytes(shape: &Shape, keys: usize) -> usize {
        if shape.pairs {
            return PackedPairs::bytes(shape, keys);
        }
        let (k, v) = Self::elements(shape, keys);
        (k + v) * size_of::<T::Acc>() + keys.div_ceil(shape.key_tile)
    }

    /// Elements of K and V.
    pub(crate) fn elements(shape: &Shape, keys: usize) -> (usize, usize) {
        let v_rows = Self::v_rows(shape, keys);
        let k = keys.next_multiple_of(shape.nr) * shape.head_dim;
        let v = keys.div_ceil(shape.key_tile) * v_rows * shape.v_panels * shape.nr;
        (k, v)
    }

    fn v_rows(shape: &Shape, keys: usize) -> usize {
        shape.key_tile.min(keys)
    }

    pub(crate) fn new(shape: &Shape, keys: usize, reserve: &Arc<Reserve>) -> Result<Self> {
        let pairs = match shape.pairs {
            true => Some(PackedPairs::new(shape, keys, reserve)?),
            false => None,
        };
        let (k, v) = match shape.pairs {
            true => (0, 0),
            false => Self::elements(shape, keys),
        };
        Ok(Packed {
            k: reserve.buffer(k, "packed keys")?,
            v: reserve.buffer(v, "packed values")?,
            careful: reserve.buffer(keys.div_ceil(shape.key_tile), "tile flags")?,
            v_rows: Self::v_rows(shape, keys),
            pairs,
        })
    }

    /// Where keys are packed in pairs.
    pub(crate) fn pairs(&self) -> Option<&PackedPairs> {
        self.pairs.as_ref()
    }

    /// Packs the tile numbered `tile` of the source.
    ///
    /// # Safety
    /// The room was made for at least as many keys as the source has; nobody else reads or writes
    /// the tile meanwhile; the processor has the kernels' instructions.
    pub(crate) unsafe fn pack(
        &self,
        kernels: &Kernels<T>,
        shape: &Shape,
        source: &KeySource<'_, T>,
        tile: usize,
    ) {
        let mut rows = [std::ptr::null(); 256];
        let mut values = [std::ptr::null(); 256];
        const { assert!(max_key_tile::<f32>() <= 256) };
        let first = tile * shape.key_tile;
        let keys = shape.key_tile.min(source.keys - first);
        for (j, (k, v)) in rows.iter_mut().zip(&mut values).take(keys).enumerate() {
            *k = source.at(&source.k, first + j);
            *v = source.at(&source.v, first + j);
        }
        let k = Rows {
            rows: &rows[..keys],
            next: &[],
            step: source.k.plane.key,
            len: shape.head_dim,
        };
        let v = Rows {
            rows: &values[..keys],
            next: &[],
            step: source.v.plane.key,
            len: shape.head_dim_v,
        };
        k.ask(0..k.ahead());
        if let (Some(kernels), Some(pairs)) = (&kernels.pairs, &self.pairs) {
            // SAFETY: keys below source.keys exist, by the checked problem and views; the tile
            // lies inside the room.
            unsafe { pairs.pack(kernels, shape, tile, &k, &v) }
            return;
        }
        for (panel, here) in k.rows.chunks(shape.nr).enumerate() {
            let column = panel * shape.nr;
            k.ask(column + k.ahead()..column + k.ahead() + shape.nr);
            v.ask(column..column + shape.nr);
            let rows = Rows { rows: here, ..k };
            let at = (first + column) * shape.head_dim;
            let one = <T::Acc as Element>::from_f64(1.0);
            // SAFETY: keys below source.keys exist, by the checked problem and views; the panel
            // lies inside the room.
            unsafe { (kernels.transposed)(&rows, shape.nr, one, self.k.at().add(at)) }
        }
        // SAFETY: as above, for V.
        unsafe {
            let to = self.v.at().add(self.v_tile(shape, tile));
            let finite = (kernels.panels)(&v, self.v_rows * shape.nr, to);
            self.careful.at().add(tile).write(u8::from(!finite));
        }
    }

    fn v_tile(&self, shape: &Shape, tile: usize) -> usize {
        tile * self.v_rows * shape.v_panels * shape.nr
    }

    /// K of a tile.
    ///
    /// # Safety
    /// The tile lies inside the room.
    pub(crate) unsafe fn k(&self, shape: &Shape, tile: usize) -> *const T::Acc {
        // SAFETY: the caller's promise.
        unsafe { self.k.at().add(tile * shape.key_tile * shape.head_dim) }
    }

    /// V of a tile and the step between its panels.
    ///
    /// # Safety
    /// The tile lies inside the room.
    pub(crate) unsafe fn v(&self, shape: &Shape, tile: usize) -> (*const T::Acc, usize) {
        // SAFETY: the caller's promise.
        let at = unsafe { self.v.at().add(self.v_tile(shape, tile)) };
        (at, self.v_rows * shape.nr)
    }

    /// K and V of a tile as they are asked for ahead of time: where, bytes, panels.
    pub(crate) fn ahead(&self, shape: &Shape, tile: usize) -> [(*const u8, usize, usize); 2] {
        let size = size_of::<T::Acc>();
        let k = self
            .k
            .at()
            .wrapping_add(tile * shape.key_tile * shape.head_dim);
        let v = self.v.at().wrapping_add(self.v_tile(shape, tile));
        [
            (
                k.cast_const().cast(),
                shape.key_tile * shape.head_dim * size,
                shape.key_tile / shape.nr,
            ),
            (
                v.cast_const().cast(),
                self.v_rows * shape.v_panels * shape.nr * size,
                shape.v_panels,
            ),
        ]
    }

    /// Whether a value of the tile is NaN or infinite.
    ///
    /// # Safety
    /// The tile is packed.
    pub(crate) unsafe fn careful(&self, tile: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.careful.at().add(tile).read() != 0 }
    }
}
