//! Sizes of tiles, from head dims, the element type and the caches.

use tilewise_core::Dims;

use crate::kernel::max_key_tile;
use crate::kernel::pairs::{CHUNK, COLUMNS, DEPTH, ROW_STRIDE};
use crate::kernel::table::TileKernels;
use crate::machine::Caches;

/// Sizes that all heads of a call share.
///
/// None of them depends on the number of threads, on the batch or on values, so neither do results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    /// head_dim_v in whole vectors.
    pub(crate) width: usize,
    /// Panels that `width` fills.
    pub(crate) v_panels: usize,
    /// Columns of a panel.
    pub(crate) nr: usize,
    /// Keys of a tile, a multiple of `nr`.
    pub(crate) key_tile: usize,
    /// Query rows of a tile, a multiple of the largest row block.
    pub(crate) q_tile: usize,
    /// The sizes of row blocks, ascending.
    pub(crate) row_blocks: &'static [usize],
    /// For products of pairs: tiles of whole depths, states of whole tiles of rows.
    pub(crate) pairs: bool,
}

/// Rows of a tile of products of pairs: whole blocks of 12 and of 32.
const PAIR_Q_TILE: usize = 96;

impl Shape {
    pub(crate) fn new<A>(dims: &Dims, kernels: &TileKernels<A>, caches: Caches) -> Shape {
        let size = size_of::<A>();
        let width = dims.head_dim_v.next_multiple_of(kernels.lanes);
        let v_panels = width.div_ceil(kernels.nr);
        let mr = kernels.row_blocks[kernels.row_blocks.len() - 1];
        // K and V of a tile take at most a third of L2, q and Õ of the rows another third: every
        // row block reads all of the tile, from L2.
        let third = caches.l2 / 3;
        let row_bytes = (dims.head_dim + width).max(1) * size;
        let key_tile = (third / row_bytes / kernels.nr * kernels.nr)
            .clamp(2 * kernels.nr, max_key_tile::<A>());
        let q_tile = (third / row_bytes / mr * mr).clamp(mr, 16 * mr);
        Shape {
            head_dim: dims.head_dim,
            head_dim_v: dims.head_dim_v,
            width,
            v_panels,
            nr: kernels.nr,
            key_tile,
            q_tile,
            row_blocks: kernels.row_blocks,
            pairs: false,
        }
    }

    /// The same for products of pairs.
    pub(crate) fn for_pairs(self, caches: Caches) -> Shape {
        let width = self.head_dim_v.next_multiple_of(COLUMNS);
        let third = caches.l2 / 3;
        let key_bytes = (self.head_dim.next_multiple_of(DEPTH) + width) * size_of::<u16>();
        let row_bytes = self.head_dim.div_ceil(CHUNK) * ROW_STRIDE * size_of::<u16>()
            + width * size_of::<f32>();
        Shape {
            width,
            v_panels: width.div_ceil(self.nr),
            key_tile: (third / key_bytes / DEPTH * DEPTH).clamp(DEPTH, max_key_tile::<f32>()),
            q_tile: (third / row_bytes / PAIR_Q_TILE * PAIR_Q_TILE)
                .clamp(PAIR_Q_TILE, 2 * PAIR_Q_TILE),
            pairs: true,
            ..self
        }
    }

    /// Splits `rows` into row blocks, (first row, rows, rows of the block with padding): blocks of the
    /// largest size, and one that holds the rest.
    pub(crate) fn blocks(&self, rows: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        blocks_of(self.row_blocks, rows)
    }

    /// Rows with the padding of the last block.
    pub(crate) fn padded(&self, rows: usize) -> usize {
        if self.pairs {
            // A tile of rows; it holds the padding of all other blocks too.
            return rows.next_multiple_of(16);
        }
        let mr = self.row_blocks[self.row_blocks.len() - 1];
        match rows % mr {
            0 => rows,
            rest => rows - rest + block_for(self.row_blocks, rest),
        }
    }
}

/// [`Shape::blocks`] for any sizes.
pub(crate) fn blocks_of(
    sizes: &'static [usize],
    rows: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let mr = sizes[sizes.len() - 1];
    (0..rows).step_by(mr).map(move |first| {
        let rest = (rows - first).min(mr);
        (first, rest, block_for(sizes, rest))
    })
}

/// The smallest block that holds `rows` rows, at most the largest size.
fn block_for(sizes: &[usize], rows: usize) -> usize {
    let fits = sizes.iter().copied().find(|&size| size >= rows);
    fits.unwrap_or(sizes[sizes.len() - 1])
}
