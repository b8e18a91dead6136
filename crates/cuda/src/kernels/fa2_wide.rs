//! Tiles and launches of `fa2_wide.cu`: head_dim or head_dim_v above 256.

use tilewise_core::DType;

use super::{Family, Spec, Variant, key_pitch, pad, pitch};

/// Columns of Q and K a slice.
const SLICE: u32 = 64;
const WARPS: u32 = 4;

/// How a block of `tw_fa2_wide` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Query rows a block.
    pub rows: u32,
    /// Columns of the output a block.
    pub columns: u32,
    keys: u32,
}

/// The cut for rows of `head_dim_v` columns.
pub fn tile(dtype: DType, head_dim_v: usize) -> Tile {
    let (keys, most) = if dtype == DType::F32 {
        (32, 128)
    } else {
        (64, 256)
    };
    Tile {
        rows: WARPS * 16,
        columns: pad(head_dim_v.min(most as usize)).unwrap_or(most),
        keys,
    }
}

/// The variant for `spec` within `limit` bytes of shared memory.
pub fn variant(spec: &Spec, tile: Tile, limit: u32) -> Option<Variant> {
    let spec = Spec {
        padded: SLICE,
        padded_v: tile.columns,
        ..*spec
    };
    let key = |columns| key_pitch(spec.dtype, columns, false);
    let slice = tile.rows * pitch(spec.dtype, SLICE) + tile.keys * key(SLICE);
    // Slices and V, then the output.
    let shared = (2 * slice + tile.keys * key(tile.columns))
        .max(tile.rows * pitch(spec.dtype, tile.columns));
    (shared <= limit).then(|| {
        Variant::new(
            Family::Fa2Wide,
            "tw_fa2_wide",
            &spec,
            &[
                ("WARPS", WARPS as i32),
                ("WM", 1),
                ("BN", tile.keys as i32),
                ("MINB", 1),
            ],
            WARPS * 32,
            shared,
        )
    })
}
