//! One block of rows against one tile of keys, for the benches of the kernels' parts. Not part of
//! the interface.

use tilewise_core::{Element, Result};

use crate::buffer::Buffer;
use crate::isa::Isa;
use crate::kernel::pack::Rows;
use crate::kernel::pairs::{CHUNK, COLUMNS, DEPTH, MOST_ROWS, PairBlock, PairKernels, ROW_STRIDE};
use crate::kernel::table::{CpuElement, Kernels, TileKernels};
use crate::kernel::{Ahead, Block, MAX_ROWS, s_stride};
use crate::simd::MAX_LANES;

/// The largest row block of an instruction set against `keys` keys, packed.
pub struct TileBench<T: Element> {
    kernels: Kernels<T>,
    block: Block<T::Acc>,
    /// The same where products take pairs.
    pairs: Option<PairBlock<T::Acc>>,
    /// The memory that the blocks point to.
    _memory: [Buffer<T::Acc>; 7],
    _pairs: [Buffer<u16>; 3],
}

impl<T: CpuElement> TileBench<T> {
    /// # Errors
    /// If the processor lacks `isa`, or there is no memory.
    pub fn new(isa: Isa, keys: usize, head_dim: usize) -> Result<Self> {
        let kernels = T::kernels(isa.checked()?);
        let row_blocks = match &kernels.pairs {
            Some(pairs) => pairs.row_blocks,
            None => kernels.tile.row_blocks,
        };
        let mr = row_blocks[row_blocks.len() - 1];
        let width = match kernels.pairs {
            Some(_) => head_dim.next_multiple_of(COLUMNS),
            None => head_dim.next_multiple_of(kernels.tile.lanes),
        };
        let keys = keys
            .min(crate::kernel::max_key_tile::<T::Acc>())
            .next_multiple_of(kernels.tile.nr.max(DEPTH));
        let columns = width.next_multiple_of(kernels.tile.nr);
        let buffer = |len| Buffer::<T::Acc>::new(len, "a bench");
        let memory = [
            buffer(mr * head_dim + MAX_LANES)?,
            buffer(keys * head_dim)?,
            buffer(keys * columns)?,
            buffer(MOST_ROWS * s_stride::<T::Acc>())?,
            buffer(mr * width)?,
            buffer(mr)?,
            buffer(mr)?,
        ];
        let [q, k, v, s, acc, m, l] = &memory;
        // Eighths: products and sums of them are exact, whatever the order.
        let elements: Vec<T> = (0..keys.max(mr) * head_dim)
            .map(|i| T::from_f64(eighths(i)))
            .collect();
        let rows: Vec<*const T> = elements.chunks(head_dim).map(|row| row.as_ptr()).collect();
        let pack = |rows| Rows {
            rows,
            next: &[],
            step: 1,
            len: head_dim,
        };
        let one = <T::Acc as Element>::from_f64(1.0);
        // SAFETY: the processor has the instructions, and the buffers were made for these sizes.
        unsafe {
            if kernels.pairs.is_none() {
                (kernels.transposed)(&pack(&rows[..mr]), mr, one, q.at());
            }
            for panel in 0..keys / kernels.tile.nr {
                let to = k.at().add(panel * kernels.tile.nr * head_dim);
                let rows = &rows[panel * kernels.tile.nr..][..kernels.tile.nr];
                (kernels.transposed)(&pack(rows), kernels.tile.nr, one, to);
            }
            (kernels.panels)(&pack(&rows[..keys]), keys * kernels.tile.nr, v.at());
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
            live: [(0, keys); MAX_ROWS],
            s: s.at(),
            acc: acc.at(),
            m: m.at(),
            l: l.at(),
            c: one,
            careful: false,
            ahead: Ahead::NONE,
        };
        let depth = head_dim.next_multiple_of(DEPTH);
        let chunk = MOST_ROWS * ROW_STRIDE;
        let bits = |len| Buffer::<u16>::new(len, "a bench");
        let packed = [
            bits(depth.div_ceil(CHUNK) * chunk)?,
            bits(keys * depth)?,
            bits(keys * width)?,
        ];
        let pairs = if let Some(kernels) = &kernels.pairs {
            let [q, k, v] = &packed;
            let mut marks = [0; 256];
            // SAFETY: as above.
            unsafe {
                let marks = marks.as_mut_ptr();
                (kernels.queries)(&pack(&rows[..mr]), false, q.at(), chunk, marks);
                for first in (0..keys).step_by(COLUMNS) {
                    let to = k.at().add(first * depth);
                    (kernels.keys)(&pack(&rows[first..first + COLUMNS]), to, marks);
                }
                (kernels.values)(&pack(&rows[..keys]), keys * COLUMNS, v.at(), marks);
            }
            Some(PairBlock {
                block: Block { ..block },
                live: [(0, keys); MOST_ROWS],
                q: q.at(),
                q_chunk: chunk,
                k: k.at(),
                k_panel: depth * COLUMNS,
                v: v.at(),
                v_panel: keys * COLUMNS,
                grain: kernels.grain,
            })
        } else {
            None
        };
        Ok(TileBench {
            kernels,
            block,
            pairs,
            _memory: memory,
            _pairs: packed,
        })
    }

    /// Scores of the block: rows × keys.
    pub fn scores(&self) -> usize {
        self.block.rows * self.block.hi
    }

    /// Runs `pairs` where products take them, else `widened`.
    fn run(
        &mut self,
        pairs: impl Fn(&PairKernels<T>) -> unsafe fn(&PairBlock<T::Acc>),
        widened: impl Fn(&TileKernels<T::Acc>) -> unsafe fn(&Block<T::Acc>),
    ) {
        // SAFETY: made for the instruction set, over buffers of its own.
        unsafe {
            match (&self.kernels.pairs, &self.pairs) {
                (Some(kernels), Some(block)) => {
                    (kernels.begin)();
                    pairs(kernels)(block);
                    (kernels.end)();
                }
                _ => widened(&self.kernels.tile)(&self.block),
            }
        }
    }

    /// S = q kᵀ.
    pub fn qk(&mut self) {
        self.run(|pairs| pairs.products, |tile| tile.products);
    }

    /// The online softmax of S, in place.
    pub fn softmax(&mut self) {
        self.run(|pairs| pairs.softmax, |tile| tile.online);
    }

    /// Õ += P v.
    pub fn pv(&mut self) {
        self.run(|pairs| pairs.weighted, |tile| tile.weighted);
    }

    /// All three.
    pub fn absorb(&mut self) {
        self.run(|pairs| pairs.absorb, |tile| tile.absorb);
    }
}

/// Element `i` of the tile's rows.
fn eighths(i: usize) -> f64 {
    (i * 7 % 13) as f64 / 8.0 - 0.75
}

#[cfg(test)]
mod tests {
    use super::*;

    fn products_are_exact<T: CpuElement>() {
        for isa in Isa::available().into_iter().chain([Isa::AmxEmulated]) {
            for (keys, head_dim) in [(64, 24), (64, 7), (32, 65)] {
                let mut tile = TileBench::<T>::new(isa, keys, head_dim).unwrap();
                let (rows, keys) = (tile.block.rows, tile.block.hi);
                let row = |n: usize| (0..head_dim).map(move |d| eighths(n * head_dim + d));
                let score =
                    |r: usize, j: usize| row(r).zip(row(j)).map(|(q, k)| q * k).sum::<f64>();
                tile.qk();
                for r in 0..rows {
                    for j in 0..keys {
                        // SAFETY: inside the strip, which `qk` filled.
                        let s = unsafe { tile.block.s.add(r * s_stride::<T::Acc>() + j).read() };
                        assert_eq!(s.to_f64(), score(r, j), "{isa} S[{r}][{j}]");
                    }
                }
                // The scores as they are for weights, which products of pairs want rounded.
                let rounds = tile.pairs.is_some();
                if let (Some(kernels), Some(block)) = (&tile.kernels.pairs, &tile.pairs) {
                    // SAFETY: the strip is the tile's own.
                    unsafe { (kernels.round)(block) }
                }
                let score = |r, j| match rounds {
                    true => tilewise_core::half::bf16::from_f64(score(r, j)).to_f64(),
                    false => score(r, j),
                };
                tile.pv();
                for r in 0..rows {
                    for d in 0..head_dim {
                        // SAFETY: inside Õ, which was 0.
                        let o = unsafe { tile.block.acc.add(r * tile.block.width + d).read() };
                        let exact: f64 = (0..keys)
                            .map(|j| score(r, j) * eighths(j * head_dim + d))
                            .sum();
                        assert_eq!(o.to_f64(), exact, "{isa} O[{r}][{d}]");
                    }
                }
            }
        }
    }

    #[test]
    fn the_microkernels_put_every_product_where_it_belongs() {
        products_are_exact::<f32>();
        products_are_exact::<f64>();
        products_are_exact::<tilewise_core::half::f16>();
        products_are_exact::<tilewise_core::half::bf16>();
    }
}
