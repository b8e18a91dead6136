//! Tiles and launches of `decode.cu`.

use tilewise_core::DType;

use super::{Family, Mask, Spec, Variant, pitch};

/// Keys a step: what a warp takes at a time.
const STEP: u32 = 16;
/// Keys a chunk, but for sequences so long that they would have more than [`MOST_CHUNKS`].
pub const CHUNK: usize = 512;
/// Chunks of the longest sequences, which have longer ones instead.
pub const MOST_CHUNKS: usize = 128;
/// Longer chunks are multiples of this, and so of what all warps of any variant take at a time.
const CHUNK_UNIT: usize = 128;

/// Keys of each chunk of a sequence of `seqlen_k` keys: the cuts follow from it alone, so that a row's
/// bits depend on nothing else.
pub fn chunk_keys(seqlen_k: usize) -> usize {
    seqlen_k
        .div_ceil(MOST_CHUNKS)
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
// is taken. What counts is bytes in flight a multiprocessor: about 100 KiB a block or two.
const HALF: &[Tile] = &[
    tile(64, [1, 4, 5], true, 2),
    tile(128, [1, 4, 3], true, 2),
    tile(128, [1, 4, 2], true, 1),
    tile(256, [1, 4, 3], false, 1),
    tile(256, [1, 2, 2], false, 1),
    tile(64, [2, 4, 5], true, 2),
    tile(64, [2, 4, 3], true, 1),
    tile(128, [2, 4, 5], false, 1),
    tile(128, [2, 4, 2], false, 1),
];
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
        let pipelines = self.warps * self.stages * 2 * STEP * kv_pitch + after;
        // In the end two factors and an ℓ of each row and chunk stand there, the rows' m, and sixteen bytes
        // twice for each thread.
        let joining = rows * (MOST_CHUNKS as u32 * 12 + 4) + 2 * self.warps * 32 * 16;
        (pipelines + self.warps * rows * 8).max(joining)
    }
}

fn choose(spec: &Spec, limit: u32, wm: u32) -> Option<(Tile, u32)> {
    let table = if spec.dtype == DType::F32 {
        SINGLE
    } else {
        HALF
    };
    table
        .iter()
        .filter(|tile| spec.padded <= tile.up_to && tile.wm == wm)
        .map(|tile| (*tile, tile.shared(spec)))
        .find(|&(_, shared)| shared <= limit)
}

/// The kernels for one problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Everything, or but for joining many states.
    pub variant: Variant,
    /// Joins many states.
    pub merge: Variant,
    /// Rows a block.
    pub rows: u32,
    /// Blocks that fit a multiprocessor.
    pub blocks: u32,
}

/// The variant for `spec` within `limit` bytes of shared memory, for groups of up to `rows` rows.
/// The spec's mask is not looked at: bounds are tested at run time.
pub fn variant(spec: &Spec, limit: u32, rows: usize, paged: bool) -> Option<Chosen> {
    let two = (rows > 16).then(|| choose(spec, limit, 2)).flatten();
    let (tile, shared) = two.or_else(|| choose(spec, limit, 1))?;
    let spec = Spec {
        mask: Mask::Band,
        ..*spec
    };
    let (wm, chunk) = (("WM", tile.wm as i32), ("CHUNK", CHUNK as i32));
    let macros = [
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
        assert_eq!(chunk_keys(0), CHUNK);
        assert_eq!(chunk_keys(CHUNK * MOST_CHUNKS), CHUNK);
        for keys in [1, 65_537, 131_072, 1 << 20, (1 << 30) - 7] {
            let chunk = chunk_keys(keys);
            assert!(keys.div_ceil(chunk) <= MOST_CHUNKS && chunk.is_multiple_of(CHUNK_UNIT));
        }
    }
}
