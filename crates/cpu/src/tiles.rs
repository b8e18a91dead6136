//! One block of rows against one tile of keys, for the benches of the kernels' parts. Not part of
//! the interface.

use tilewise_core::{Element, Result};

use crate::buffer::Buffer;
use crate::isa::Isa;
use crate::kernel::pack::Rows;
use crate::kernel::table::{CpuElement, Kernels};
use crate::kernel::{Block, MAX_MR, s_stride};
use crate::simd::MAX_LANES;

/// The largest row block of an instruction set against `keys` keys, packed.
pub struct TileBench<T: Element> {
    kernels: Kernels<T>,
    block: Block<T::Acc>,
    /// The memory that `block` points to.
    _memory: [Buffer<T::Acc>; 7],
}

impl<T: CpuElement> TileBench<T> {
    /// # Errors
    /// If the processor lacks `isa`, or there is no memory.
    pub fn new(isa: Isa, keys: usize, head_dim: usize) -> Result<Self> {
        let kernels = T::kernels(isa.checked()?);
        let mr = kernels.tile.row_blocks[kernels.tile.row_blocks.len() - 1];
        let width = head_dim.next_multiple_of(kernels.tile.lanes);
        let keys = keys
            .min(crate::kernel::max_key_tile::<T::Acc>())
            .next_multiple_of(kernels.tile.nr);
        let columns = width.next_multiple_of(kernels.tile.nr);
        let buffer = |len| Buffer::<T::Acc>::new(len, "a bench");
        let memory = [
            buffer(mr * head_dim + MAX_LANES)?,
            buffer(keys * head_dim)?,
            buffer(keys * columns)?,
            buffer(MAX_MR * s_stride::<T::Acc>())?,
            buffer(mr * width)?,
            buffer(mr)?,
            buffer(mr)?,
        ];
        let [q, k, v, s, acc, m, l] = &memory;
        let elements: Vec<T> = (0..head_dim)
            .map(|d| T::from_f64((d % 7) as f64 * 0.125 - 0.375))
            .collect();
        let rows = vec![elements.as_ptr(); keys];
        let pack = |rows| Rows {
            rows,
            next: &[],
            step: 1,
            len: head_dim,
        };
        let one = <T::Acc as Element>::from_f64(1.0);
        // SAFETY: the processor has the instructions, and the buffers were made for these sizes.
        unsafe {
            (kernels.transposed)(&pack(&rows[..mr]), mr, one, q.at());
            for panel in 0..keys / kernels.tile.nr {
                let to = k.at().add(panel * kernels.tile.nr * head_dim);
                (kernels.transposed)(&pack(&rows[..kernels.tile.nr]), kernels.tile.nr, one, to);
            }
            (kernels.panels)(&pack(&rows), keys * kernels.tile.nr, v.at());
        }
        let block = Block {
            rows: mr,
            mr,
            head_dim,
            width,
            q: q.at(),
            k: k.at(),
            v: v.at(),
            v_panel: keys * kernels.tile.nr,
            lo: 0,
            hi: keys,
            live: [(0, keys); MAX_MR],
            s: s.at(),
            acc: acc.at(),
            m: m.at(),
            l: l.at(),
            c: one,
            careful: false,
        };
        Ok(TileBench {
            kernels,
            block,
            _memory: memory,
        })
    }

    /// Scores of the block: rows × keys.
    pub fn scores(&self) -> usize {
        self.block.rows * self.block.hi
    }

    /// S = q kᵀ.
    pub fn qk(&mut self) {
        // SAFETY: made for the instruction set, over buffers of its own.
        unsafe { (self.kernels.tile.products)(&self.block) }
    }

    /// The online softmax of S, in place.
    pub fn softmax(&mut self) {
        // SAFETY: as above.
        unsafe { (self.kernels.tile.online)(&self.block) }
    }

    /// Õ += P v.
    pub fn pv(&mut self) {
        // SAFETY: as above.
        unsafe { (self.kernels.tile.weighted)(&self.block) }
    }

    /// All three.
    pub fn absorb(&mut self) {
        // SAFETY: as above.
        unsafe { (self.kernels.tile.absorb)(&self.block) }
    }
}
