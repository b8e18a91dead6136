//! The inner loop of FlashAttention-2 on products of pairs (see [`crate::kernel::pairs`]): what
//! [`Machinery::absorb`] does where the kernels have them.

use std::ops::Range;
use std::sync::Arc;

use tilewise_core::{Element, Result};

use crate::buffer::{Buffer, Reserve};
use crate::head::Head;
use crate::kernel::pack::Rows;
use crate::kernel::pairs::pack::{ODD_KEY, ODD_VALUE};
use crate::kernel::pairs::{CHUNK, COLUMNS, DEPTH, MOST_ROWS, PairBlock, PairKernels, ROW_STRIDE};
use crate::kernel::{Ahead, Block, MAX_MR, MAX_ROWS, Modifiers, s_stride};
use crate::packed::KeySource;
use crate::shape::{Shape, blocks_of};
use crate::tile::{Machinery, TileState};

/// Room for K and V of one KV head, packed in pairs.
pub(crate) struct PackedPairs {
    k: Buffer<u16>,
    v: Buffer<u16>,
    /// Marks of every key, [`ODD_KEY`] and [`ODD_VALUE`].
    odd: Buffer<u8>,
    /// All marks of a tile.
    odd_in_tile: Buffer<u8>,
    /// Rows of a panel of V.
    v_rows: usize,
}

/// head_dim in whole depths.
fn depth(shape: &Shape) -> usize {
    shape.head_dim.next_multiple_of(DEPTH)
}

impl PackedPairs {
    fn v_rows(shape: &Shape, keys: usize) -> usize {
        shape.key_tile.min(keys.next_multiple_of(DEPTH))
    }

    fn elements(shape: &Shape, keys: usize) -> (usize, usize) {
        let k = keys.next_multiple_of(DEPTH) * depth(shape);
        let v = keys.div_ceil(shape.key_tile) * Self::v_rows(shape, keys) * shape.width;
        (k, v)
    }

    /// Bytes for `keys` keys.
    pub(crate) fn bytes(shape: &Shape, keys: usize) -> usize {
        let (k, v) = Self::elements(shape, keys);
        (k + v) * size_of::<u16>() + keys + keys.div_ceil(shape.key_tile)
    }

    pub(crate) fn new(shape: &Shape, keys: usize, reserve: &Arc<Reserve>) -> Result<Self> {
        let (k, v) = Self::elements(shape, keys);
        Ok(PackedPairs {
            k: reserve.buffer(k, "packed keys")?,
            v: reserve.buffer(v, "packed values")?,
            odd: reserve.buffer(keys, "marks of keys")?,
            odd_in_tile: reserve.buffer(keys.div_ceil(shape.key_tile), "tile flags")?,
            v_rows: Self::v_rows(shape, keys),
        })
    }

    /// Packs one tile: `k` and `v` are the rows of its keys, the first of which is key `first`.
    ///
    /// # Safety
    /// Of [`Packed::pack`](crate::packed::Packed::pack).
    pub(crate) unsafe fn pack<T: Element>(
        &self,
        kernels: &PairKernels<T>,
        shape: &Shape,
        tile: usize,
        k: &Rows<'_, T>,
        v: &Rows<'_, T>,
    ) {
        let keys = k.rows.len();
        // SAFETY: the tile lies inside the room, by the caller's promise.
        unsafe {
            let odd = self.odd.at().add(tile * shape.key_tile);
            std::slice::from_raw_parts_mut(odd, keys).fill(0);
            for first in (0..keys.next_multiple_of(DEPTH)).step_by(COLUMNS) {
                k.ask(first + k.ahead()..first + k.ahead() + COLUMNS);
                v.ask(first..first + COLUMNS);
                let panel = Rows {
                    rows: &k.rows[first.min(keys)..(first + COLUMNS).min(keys)],
                    next: &[],
                    ..*k
                };
                (kernels.keys)(&panel, self.k(shape, tile, first), odd.add(first.min(keys)));
            }
            let panel = self.v_rows * COLUMNS;
            (kernels.values)(v, panel, self.v(shape, tile), odd);
            let marks = std::slice::from_raw_parts(odd, keys);
            let all = marks.iter().fold(0, |all, &mark| all | mark);
            self.odd_in_tile.at().add(tile).write(all);
        }
    }

    /// K and V of a tile as they are asked for ahead of time: where, bytes, panels.
    fn ahead(&self, shape: &Shape, tile: usize) -> [(*const u8, usize, usize); 2] {
        let k = self
            .k
            .at()
            .wrapping_add(tile * shape.key_tile * depth(shape));
        let v = self.v.at().wrapping_add(tile * self.v_rows * shape.width);
        [
            (
                k.cast_const().cast(),
                shape.key_tile * depth(shape) * size_of::<u16>(),
                shape.key_tile / COLUMNS,
            ),
            (
                v.cast_const().cast(),
                self.v_rows * shape.width * size_of::<u16>(),
                shape.width / COLUMNS,
            ),
        ]
    }

    /// The panel of `key` in a tile's K.
    unsafe fn k(&self, shape: &Shape, tile: usize, key: usize) -> *mut u16 {
        // SAFETY: the tile and key lie inside the room, by the caller's promise.
        unsafe {
            self.k
                .at()
                .add((tile * shape.key_tile + key) * depth(shape))
        }
    }

    /// V of a tile.
    unsafe fn v(&self, shape: &Shape, tile: usize) -> *mut u16 {
        // SAFETY: as above.
        unsafe { self.v.at().add(tile * self.v_rows * shape.width) }
    }
}

/// What a worker needs: packed queries and a strip of scores.
pub(crate) struct PairScratch<T: Element> {
    q: Buffer<u16>,
    /// 1 for each odd query.
    odd: Buffer<u8>,
    /// Rows that there is room for.
    rows: usize,
    strip: Buffer<T::Acc>,
}

impl<T: Element> PairScratch<T> {
    fn chunk(rows: usize) -> usize {
        rows * ROW_STRIDE
    }

    /// Bytes for tiles of `rows` rows.
    pub(crate) fn bytes(shape: &Shape, rows: usize) -> usize {
        let rows = shape.padded(rows);
        let q = shape.head_dim.div_ceil(CHUNK) * Self::chunk(rows);
        q * size_of::<u16>() + rows + MOST_ROWS * s_stride::<T::Acc>() * size_of::<T::Acc>()
    }

    pub(crate) fn new(shape: &Shape, rows: usize, reserve: &Arc<Reserve>) -> Result<Self> {
        let rows = shape.padded(rows);
        let q = shape.head_dim.div_ceil(CHUNK) * Self::chunk(rows);
        Ok(PairScratch {
            q: reserve.buffer(q, "queries of a tile")?,
            odd: reserve.buffer(rows, "marks of queries")?,
            rows,
            strip: Buffer::new(MOST_ROWS * s_stride::<T::Acc>(), "scores of a tile")?,
        })
    }
}

/// A tile of keys and a tile of rows, while they are multiplied.
pub(crate) struct PairTile<'a, T: Element> {
    pub(crate) machinery: &'a Machinery<T>,
    pub(crate) pairs: &'a PairKernels<T>,
    pub(crate) head: &'a Head<T>,
    pub(crate) packed: &'a PackedPairs,
    pub(crate) source: &'a KeySource<'a, T>,
    pub(crate) scratch: &'a PairScratch<T>,
    /// Rows of the sequence.
    pub(crate) rows: &'a Range<usize>,
    /// What each sees of the packed keys.
    pub(crate) live: &'a [(usize, usize)],
    /// The tiles of keys that any row sees.
    pub(crate) tiles: Range<usize>,
    pub(crate) state: TileState<T::Acc>,
}

impl<T: Element> PairTile<'_, T> {
    /// Packs the queries.
    ///
    /// # Safety
    /// The rows belong to the head and the scratch is large enough.
    pub(crate) unsafe fn take_queries(&self) {
        let mut pointers = [std::ptr::null(); MOST_ROWS];
        let negate = self.head.scoring.sign < <T::Acc as Element>::from_f64(0.0);
        self.head.ask(self.rows, 0..2 * MOST_ROWS);
        for first in (0..self.rows.len()).step_by(MOST_ROWS) {
            let next = first + 2 * MOST_ROWS;
            self.head.ask(self.rows, next..next + MOST_ROWS);
            let n = (self.rows.len() - first).min(MOST_ROWS);
            for (row, at) in pointers.iter_mut().take(n).enumerate() {
                *at = self.head.q.moved(self.rows.start + first + row, 0).at;
            }
            let rows = Rows {
                rows: &pointers[..n],
                next: &[],
                step: self.head.q.key,
                len: self.machinery.shape.head_dim,
            };
            // SAFETY: rows of the head exist, by the checked problem; the scratch has room for them.
            unsafe {
                let to = self.scratch.q.at().add(first * ROW_STRIDE);
                let odd = self.scratch.odd.at().add(first);
                let chunk = PairScratch::<T>::chunk(self.scratch.rows);
                (self.pairs.queries)(&rows, negate, to, chunk, odd);
                // Rows that a block has beyond the last: numbers, whichever.
                for row in n..self.machinery.shape.padded(n) {
                    for cut in (0..rows.len).step_by(CHUNK) {
                        let at = to.add(cut / CHUNK * chunk + row * ROW_STRIDE);
                        let len = (rows.len - cut).min(CHUNK).next_multiple_of(DEPTH);
                        std::slice::from_raw_parts_mut(at, len).fill(0);
                    }
                }
            }
        }
    }

    /// Folds tile number `tile` into the state.
    ///
    /// # Safety
    /// The queries are taken, the tile is packed, the state covers the padded rows and is this
    /// worker's; the processor has the kernels' instructions, which have begun.
    pub(crate) unsafe fn absorb(&self, tile: usize) {
        let shape = &self.machinery.shape;
        let from = tile * shape.key_tile;
        let sizes = self.pairs.row_blocks;
        let blocks = self.rows.len().div_ceil(sizes[sizes.len() - 1]);
        for (number, (first, n, mr)) in blocks_of(sizes, self.rows.len()).enumerate() {
            let mut live = [(0, 0); MOST_ROWS];
            let (mut low, mut high) = (usize::MAX, 0);
            for (slot, &(lo, hi)) in live.iter_mut().zip(&self.live[first..first + n]) {
                let lo = lo.clamp(from, from + shape.key_tile) - from;
                let hi = hi.clamp(from, from + shape.key_tile) - from;
                if lo < hi {
                    *slot = (lo, hi);
                    low = low.min(lo);
                    high = high.max(hi);
                }
            }
            if high == 0 {
                continue;
            }
            // SAFETY: the caller's promise.
            unsafe {
                let TileState { m, l, acc } = self.state.row(shape, first);
                let odd_in_tile = self.packed.odd_in_tile.at().add(tile).read();
                let pairs = PairBlock {
                    block: Block {
                        rows: n,
                        mr,
                        head_dim: shape.head_dim,
                        width: shape.width,
                        q: std::ptr::null(),
                        k: std::ptr::null(),
                        v: std::ptr::null(),
                        v_panel: 0,
                        lo: low,
                        hi: high,
                        live: [(0, 0); MAX_ROWS],
                        s: self.scratch.strip.at(),
                        acc,
                        m,
                        l,
                        c: self.head.scoring.c,
                        careful: odd_in_tile & ODD_VALUE != 0,
                        ahead: match tile + 1 < self.tiles.end {
                            true => {
                                Ahead::share(self.packed.ahead(shape, tile + 1), number, blocks)
                            }
                            false => Ahead::NONE,
                        },
                    },
                    live,
                    q: self.scratch.q.at().add(first * ROW_STRIDE),
                    q_chunk: PairScratch::<T>::chunk(self.scratch.rows),
                    k: self.packed.k(shape, tile, 0),
                    k_panel: COLUMNS * depth(shape),
                    v: self.packed.v(shape, tile),
                    v_panel: self.packed.v_rows * COLUMNS,
                    grain: self.pairs.grain,
                };
                let modifiers = self
                    .head
                    .modifiers
                    .map(|modifiers| modifiers.moved(self.rows.start + first, from));
                let odd_rows =
                    std::slice::from_raw_parts(self.scratch.odd.at().add(first), n).contains(&1);
                if odd_in_tile == 0 && !odd_rows && modifiers.is_none() {
                    (self.pairs.absorb)(&pairs);
                } else {
                    self.absorb_in_parts(&pairs, first, from, modifiers.as_ref());
                }
            }
        }
    }

    /// One step with all that may be between the products: scores of odd keys and queries, options,
    /// weighted odd values.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn absorb_in_parts(
        &self,
        pairs: &PairBlock<T::Acc>,
        first: usize,
        from: usize,
        modifiers: Option<&Modifiers<T>>,
    ) {
        let (kernels, block) = (&self.machinery.kernels, &pairs.block);
        let (lo, hi) = pairs.columns();
        // SAFETY: the caller's promise.
        unsafe {
            (self.pairs.products)(pairs);
            self.odd_scores(block, first, from);
            if let Some(modifiers) = modifiers {
                (kernels.modify)(block, modifiers);
            }
            (self.pairs.hide)(pairs);
            (kernels.tile.online)(&Block { lo, hi, ..*block });
            if let Some(dropping) = modifiers.and_then(|modifiers| modifiers.dropout.as_ref()) {
                // Blocks of the other kernels note fewer rows' keys.
                for row in (0..block.rows).step_by(MAX_MR) {
                    let rows = (block.rows - row).min(MAX_MR);
                    let mut live = [(0, 0); MAX_ROWS];
                    live[..rows].copy_from_slice(&pairs.live[row..row + rows]);
                    let some = Block {
                        rows,
                        live,
                        s: block.s.add(row * s_stride::<T::Acc>()),
                        ..*block
                    };
                    (kernels.tile.drop_out)(&some, &dropping.moved(row, 0));
                }
            }
            if block.careful {
                self.odd_values(block, from);
            }
            // Õ goes through the instructions too: not where they have nothing to add to it, for it may
            // be subnormal, like values that are all odd.
            let marks = self.packed.odd.at().add(from + block.lo);
            let mut marks = std::slice::from_raw_parts(marks, block.hi - block.lo).iter();
            if marks.any(|mark| mark & ODD_VALUE == 0) {
                (self.pairs.round)(pairs);
                (self.pairs.weighted)(pairs);
            }
        }
    }

    /// Scores of odd queries, and of odd keys.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn odd_scores(&self, block: &Block<T::Acc>, first: usize, from: usize) {
        for row in 0..block.rows {
            // SAFETY: the caller's promise: rows and keys of the block exist.
            unsafe {
                let odd_row = self.scratch.odd.at().add(first + row).read() != 0;
                let q = self.head.q.moved(self.rows.start + first + row, 0);
                for key in block.lo..block.hi {
                    let mark = self.packed.odd.at().add(from + key).read();
                    if !odd_row && mark & ODD_KEY == 0 {
                        continue;
                    }
                    let (k, step) = self.source.key(from + key);
                    let mut score = <T::Acc as Element>::from_f64(0.0);
                    for d in 0..block.head_dim as isize {
                        let q = q.at.wrapping_offset(d * q.key).read().to_acc();
                        score += q * k.wrapping_offset(d * step).read().to_acc();
                    }
                    let s = block.s.add(row * s_stride::<T::Acc>() + key);
                    s.write(score * self.head.scoring.sign);
                }
            }
        }
    }

    /// Õ += P v of odd values: those of weight 0 are hidden.
    ///
    /// # Safety
    /// As [`Self::absorb`].
    unsafe fn odd_values(&self, block: &Block<T::Acc>, from: usize) {
        for key in block.lo..block.hi {
            // SAFETY: the caller's promise: rows and keys of the block exist.
            unsafe {
                if self.packed.odd.at().add(from + key).read() & ODD_VALUE == 0 {
                    continue;
                }
                let (v, step) = self.source.value(from + key);
                for row in 0..block.rows {
                    let p = block.s.add(row * s_stride::<T::Acc>() + key).read();
                    if p == <T::Acc as Element>::from_f64(0.0) {
                        continue;
                    }
                    for column in 0..self.machinery.shape.head_dim_v {
                        let v = v.wrapping_offset(column as isize * step).read().to_acc();
                        let acc = block.acc.add(row * block.width + column);
                        acc.write(acc.read() + p * v);
                    }
                }
            }
        }
    }
}
