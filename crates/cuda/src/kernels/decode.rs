//! Tiles and launches of `decode.cu`.

use tilewise_core::DType;

use super::{Family, Mask, Spec, Variant, pitch};

/// Keys a step: what a warp takes at a time.
const STEP: u32 = 16;
/// Keys a chunk, but for sequences so long that they would have more than [`most_chunks`].
pub const CHUNK: usize = 512;
/// Longer chunks are multiples of this, and so of what all warps of any variant take at a time.
const CHUNK_UNIT: usize = 128;

/// Chunks of the longest sequences, which have longer ones instead: enough for two blocks on each
/// multiprocessor to have one of a single sequence, and few to join. MOST_CHUNKS in `decode.cu` is the most of them.
pub fn most_chunks(kv_heads: usize) -> usize {
    match kv_heads {
        8.. => 32,
        4..8 => 64,
        _ => 128,
    }
}

/// Keys of each chunk of a sequence of `seqlen_k` keys with so many heads of K and V: the cuts follow from
/// these alone, so that a row's bits depend on nothing else.
pub fn chunk_keys(seqlen_k: usize, kv_heads: usize) -> usize {
    seqlen_k
        .div_ceil(most_chunks(kv_heads))
        .next_multiple_of(CHUNK_UNIT)
        .max(CHUNK)
}

/// How a block of `tw_decode` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Largest padded head_dim it is for.
    up_to: u32,
    /// Groups of sixteen rows a block.
    wm: u32,
    /// Warps a block.
    warps: u32,
    /// Steps of sixteen keys in a warp's pipeline.
    stages: u32,
    /// Q stays in registers.
    qreg: bool,
    /// Blocks that should fit a multiprocessor.
    blocks: u32,
}

/// `cut` is row groups, warps, stages.
const fn tile(up_to: u32, cut: [u32; 3], qreg: bool, blocks: u32) -> Tile {
    let [wm, warps, stages] = cut;
    Tile {
        up_to,
        wm,
        warps,
        stages,
        qreg,
        blocks,
    }
}

// In order of preference; the first that is wide enough, has the row groups and fits the shared memory
// is taken. What counts is bytes in flight a multiprocessor. At head_dim 128 two blocks with one step under
// way for each warp ask memory for enough, and more steps make it slower; a block that has a
// multiprocessor for itself needs them.
const HALF: &[Tile] = &[
    tile(64, [1, 4, 5], true, 2),
    tile(112, [1, 4, 3], true, 2),
    tile(128, [1, 4, 2], true, 2),
    tile(256, [1, 4, 3], false, 1),
    tile(256, [1, 2, 2], false, 1),
    tile(64, [2, 4, 5], true, 2),
    tile(64, [2, 4, 3], true, 1),
    tile(128, [2, 4, 5], false, 1),
    tile(128, [2, 4, 2], false, 1),
];
// Of f16 and bf16 at head_dim 128 where a block has a multiprocessor for itself.
const ALONE: Tile = tile(128, [1, 4, 3], true, 2);
const SINGLE: &[Tile] = &[
    tile(64, [1, 4, 5], false, 1),
    tile(64, [1, 4, 2], false, 1),
    tile(128, [1, 4, 3], false, 1),
    tile(128, [1, 2, 2], false, 1),
    tile(256, [1, 2, 3], false, 1),
    tile(256, [1, 1, 2], false, 1),
];

impl Tile {
    /// Columns of Õ exchanged at a time: four a thread, and a divisor of the padded head_dim.
    fn exchanged(&self, padded: u32) -> u32 {
        (8 * self.warps / self.wm).min(if padded.is_multiple_of(32) { 32 } else { 16 })
    }

    /// Shared memory of a block, as laid out in `decode.cu`.
    fn shared(&self, spec: &Spec) -> u32 {
        let pitch = pitch(spec.dtype, spec.padded);
        // Rows of whole 128-byte lines stand one after another.
        let row = spec.padded * spec.dtype.size() as u32;
        let kv_pitch = if row.is_multiple_of(128) { row } else { pitch };
        let rows = self.wm * 16;
        let exchange = self.warps * rows * (self.exchanged(spec.padded) + 8) * 4;
        let q = rows * pitch;
        let after = if self.qreg {
            exchange.max(q)
        } else {
            exchange + q
        };
        self.warps * self.stages * 2 * STEP * kv_pitch + after + self.warps * rows * 8
    }
}

fn choose(spec: &Spec, limit: u32, wm: u32, alone: bool) -> Option<(Tile, u32)> {
    let half = spec.dtype != DType::F32;
    let deep = (half && alone && spec.padded > 112).then_some(ALONE);
    let table = if half { HALF } else { SINGLE };
    deep.iter()
        .chain(table)
        .filter(|tile| spec.padded <= tile.up_to && tile.wm == wm)
        .map(|tile| (*tile, tile.shared(spec)))
        .find(|&(_, shared)| shared <= limit)
}

/// The kernels for one problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Everything, or but for joining states.
    pub variant: Variant,
    /// Joins the states of a head whose keys blocks have shared.
    pub merge: Variant,
    /// Rows a block.
    pub rows: u32,
    /// Blocks that fit a multiprocessor.
    pub blocks: u32,
}

/// What the host knows of the blocks of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// K and V come in pages.
    pub paged: bool,
    /// There are no more of them than multiprocessors.
    pub alone: bool,
    /// K and V are read once, and are not much more than the second-level cache holds: it keeps what it
    /// has. Heeded where [`may_be_once`], for up to 16 rows.
    pub once: bool,
}

impl Blocks {
    /// Every kind.
    pub fn all() -> impl Iterator<Item = Blocks> {
        (0..8).map(|n| Blocks {
            paged: n & 1 != 0,
            alone: n & 2 != 0,
            once: n & 4 != 0,
        })
    }
}

/// Whether kernels for `spec` can leave the second-level cache to others: where it was measured to pay.
pub fn may_be_once(spec: &Spec, paged: bool) -> bool {
    spec.dtype != DType::F32 && spec.padded == 128 && spec.aligned && !paged
}

/// The variant for `spec` within `limit` bytes of shared memory, for groups of up to `rows` rows.
/// The spec's mask is not looked at: bounds are tested at run time.
pub fn variant(spec: &Spec, limit: u32, rows: usize, blocks: Blocks) -> Option<Chosen> {
    let Blocks { paged, alone, once } = blocks;
    let two = (rows > 16).then(|| choose(spec, limit, 2, alone)).flatten();
    let (tile, shared) = two.or_else(|| choose(spec, limit, 1, alone))?;
    let spec = Spec {
        mask: Mask::Band,
        ..*spec
    };
    let (wm, chunk) = (("WM", tile.wm as i32), ("CHUNK", CHUNK as i32));
    let mut macros = vec![
        wm,
        ("WARPS", tile.warps as i32),
        ("STEP", STEP as i32),
        ("STAGES", tile.stages as i32),
        chunk,
        ("XC", tile.exchanged(spec.padded) as i32),
        ("QREG", i32::from(tile.qreg)),
        ("MINB", tile.blocks as i32),
        ("PAGED", i32::from(paged)),
        ("MERGE", 0),
    ];
    if once && tile.wm == 1 && may_be_once(&spec, paged) {
        macros.push(("ONCE", 1));
    }
    Some(Chosen {
        variant: Variant::new(
            Family::Decode,
            "tw_decode",
            &spec,
            &macros,
            tile.warps * 32,
            shared,
        ),
        merge: Variant::new(
            Family::Decode,
            "tw_decode_merge",
            &spec,
            &[wm, chunk, ("MERGE", 1)],
            128,
            0,
        ),
        rows: tile.wm * 16,
        blocks: tile.blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_grow_with_the_sequence_and_stay_few() {
        assert_eq!(chunk_keys(0, 8), CHUNK);
        for heads in [1, 2, 4, 8, 40] {
            let most = most_chunks(heads);
            assert_eq!(chunk_keys(CHUNK * most, heads), CHUNK);
            assert!(heads.min(8) * most >= 128 && most <= 128);
            for keys in [1, 65_537, 131_072, 1 << 20, (1 << 30) - 7] {
                let chunk = chunk_keys(keys, heads);
                assert!(keys.div_ceil(chunk) <= most && chunk.is_multiple_of(CHUNK_UNIT));
            }
        }
    }
}
