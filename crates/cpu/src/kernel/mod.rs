//! The tile kernels: everything that runs inside one instruction set.
//!
//! A kernel works on a [`Block`]: a few query rows (at most [`Vector::MR`]) against one tile of
//! packed keys. Its scores and probabilities live in a strip of `MR` × [`s_stride`] numbers that
//! stays in L1; Õ, m and ℓ of the rows are updated in place.

pub(crate) mod dropout;
pub(crate) mod few;
pub(crate) mod gemm;
pub(crate) mod pack;
pub(crate) mod pairs;
pub(crate) mod probe;
pub(crate) mod rows;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod spread;
pub(crate) mod table;
pub(crate) mod turned;
pub(crate) mod weighted;

use tilewise_core::Element;

#[cfg(doc)]
use crate::simd::Vector;

/// Bytes between two rows of a strip of scores. A constant, so that the microkernel reaches all its
/// rows from one pointer; 17 cache lines, so that rows do not fall into the same sets.
const STRIP_BYTES: usize = 1088;

/// Most keys of a tile in bytes of accumulator type.
const TILE_BYTES: usize = 1024;

/// Elements between two rows of a strip.
pub(crate) const fn s_stride<E>() -> usize {
    STRIP_BYTES / size_of::<E>()
}

/// The most keys a tile may have.
pub(crate) const fn max_key_tile<E>() -> usize {
    TILE_BYTES / size_of::<E>()
}

/// The most rows of a register block of any binding.
pub(crate) const MAX_MR: usize = 12;

/// The most rows of a block: where queries are few, so many are taken together.
pub(crate) const MAX_ROWS: usize = 16;

/// What happens to q·k before the softmax, for the rows and keys of one block. Without it the
/// strip holds raw dot products and the scale is folded into [`Block::c`].
#[derive(Clone, Copy)]
pub(crate) struct Modifiers<T: Element> {
    pub(crate) scale: T::Acc,
    pub(crate) softcap: Option<T::Acc>,
    /// Bias of row 0 and key 0 of the block.
    pub(crate) bias: Option<Plane<T>>,
    /// (slope, position of row 0 on the key axis less the position of key 0).
    pub(crate) alibi: Option<(T::Acc, i64)>,
    /// Mask of row 0 and key 0 of the block.
    pub(crate) mask: Option<Plane<u8>>,
    /// What happens to the weights after the softmax.
    pub(crate) dropout: Option<dropout::Dropping<T::Acc>>,
}

impl<T: Element> Modifiers<T> {
    /// The same for a block that starts `rows` rows and `keys` keys later.
    pub(crate) fn moved(self, rows: usize, keys: usize) -> Self {
        Modifiers {
            bias: self.bias.map(|bias| bias.moved(rows, keys)),
            mask: self.mask.map(|mask| mask.moved(rows, keys)),
            alibi: self
                .alibi
                .map(|(slope, at)| (slope, at + rows as i64 - keys as i64)),
            dropout: self.dropout.map(|dropout| dropout.moved(rows, keys)),
            ..self
        }
    }
}

/// A pointer into a tensor with the steps to the next row and key.
#[derive(Clone, Copy)]
pub(crate) struct Plane<T> {
    pub(crate) at: *const T,
    pub(crate) row: isize,
    pub(crate) key: isize,
}

impl<T> Plane<T> {
    /// The same plane from another row and key on.
    pub(crate) fn moved(self, rows: usize, keys: usize) -> Self {
        let steps = rows as isize * self.row + keys as isize * self.key;
        Plane {
            at: self.at.wrapping_offset(steps),
            ..self
        }
    }
}

/// Some query rows against one tile of packed keys.
pub(crate) struct Block<A> {
    /// Rows, 1 ..= mr.
    pub(crate) rows: usize,
    /// Rows of the register block: one of the sizes in [`table::TileKernels::row_blocks`].
    pub(crate) mr: usize,
    pub(crate) head_dim: usize,
    /// head_dim_v rounded up to whole vectors.
    pub(crate) width: usize,
    /// Packed queries, `[head_dim][mr]`.
    pub(crate) q: *const A,
    /// Packed keys of the tile, `[panel][head_dim][NR]`.
    pub(crate) k: *const A,
    /// Packed values of the tile, `[panel][..][NR]`, panels `v_panel` apart.
    pub(crate) v: *const A,
    pub(crate) v_panel: usize,
    /// The keys of the tile that any row sees: lo < hi.
    pub(crate) lo: usize,
    pub(crate) hi: usize,
    /// What each row sees of them.
    pub(crate) live: [(usize, usize); MAX_ROWS],
    /// The strip, `[mr][s_stride]`.
    pub(crate) s: *mut A,
    /// Õ, `[mr][width]`.
    pub(crate) acc: *mut A,
    /// `[rows]`, in units of the strip.
    pub(crate) m: *mut A,
    /// `[rows]`.
    pub(crate) l: *mut A,
    /// log₂e times the natural-log units of one unit of the strip; above 0.
    pub(crate) c: A,
    /// A value of the tile is NaN or infinite: 0 · v is not 0, so hidden keys must be left out.
    pub(crate) careful: bool,
    /// What the products ask for on the way.
    pub(crate) ahead: Ahead,
}

/// A part of the next tile of keys, asked for into the second-level cache while this one is multiplied:
/// all at once when the tile begins, as the hardware would fetch it, is more than a core gets when
/// all cores want theirs.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) k: *const u8,
    /// Cache lines of K for each panel of keys.
    pub(crate) k_lines: usize,
    pub(crate) v: *const u8,
    /// Cache lines of V for each panel of its columns.
    pub(crate) v_lines: usize,
}

impl Ahead {
    /// Nothing.
    pub(crate) const NONE: Ahead = Ahead {
        k: std::ptr::null(),
        k_lines: 0,
        v: std::ptr::null(),
        v_lines: 0,
    };

    /// Block number `block` of `blocks` asks for its share of `k_bytes` and `v_bytes`, in as many
    /// parts as its products have panels.
    pub(crate) fn share(
        [k, v]: [(*const u8, usize, usize); 2],
        block: usize,
        blocks: usize,
    ) -> Ahead {
        let lines = |bytes: usize, panels: usize| bytes.div_ceil(LINE * blocks * panels.max(1));
        let (k_lines, v_lines) = (lines(k.1, k.2), lines(v.1, v.2));
        Ahead {
            k: k.0.wrapping_add(block * k_lines * k.2 * LINE),
            k_lines,
            v: v.0.wrapping_add(block * v_lines * v.2 * LINE),
            v_lines,
        }
    }

    /// Asks for what panel number `panel` of K is to ask for.
    #[inline(always)]
    pub(crate) fn k(&self, panel: usize) {
        ask(self.k, panel, self.k_lines);
    }

    /// Likewise of V.
    #[inline(always)]
    pub(crate) fn v(&self, panel: usize) {
        ask(self.v, panel, self.v_lines);
    }
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Panel number `panel` asks for its `lines` lines of what stands at `at`.
#[inline(always)]
pub(crate) fn ask(at: *const u8, panel: usize, lines: usize) {
    for line in panel * lines..(panel + 1) * lines {
        crate::simd::prefetch_far(at.wrapping_add(line * LINE));
    }
}
