//! Tiles and launches of `fa1.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant, pitch};

/// The published kernels' cut: 16 query rows a step, 256 keys a block up to head_dim 64 and 128 above,
/// keys split over four warps; fewer keys where shared memory is short.
struct Tile {
    up_to: u32,
    warps: u32,
    /// Keys a warp.
    keys: u32,
    /// K and V fragments stay in registers.
    kvreg: bool,
}

const fn tile(up_to: u32, warps: u32, keys: u32, kvreg: bool) -> Tile {
    Tile {
        up_to,
        warps,
        keys,
        kvreg,
    }
}

const ROWS: u32 = 16;

const HALF: &[Tile] = &[
    tile(64, 4, 64, true),
    tile(128, 4, 32, true),
    tile(128, 4, 16, true),
    tile(256, 4, 16, false),
    tile(256, 2, 16, false),
];
const SINGLE: &[Tile] = &[
    tile(64, 4, 32, false),
    tile(128, 4, 16, false),
    tile(128, 2, 16, false),
    tile(256, 2, 16, false),
    tile(256, 1, 16, false),
];

fn choose(spec: &Spec, limit: u32) -> Option<(&'static Tile, u32)> {
    let table = if spec.dtype == DType::F32 {
        SINGLE
    } else {
        HALF
    };
    let row = pitch(spec.dtype, spec.padded);
    // The maxima and sums of each warp stand in static shared memory.
    let shared = |tile: &Tile| {
        2 * (tile.warps * tile.keys + ROWS) * row + tile.warps * ROWS * (spec.padded + 4) * 4
    };
    table
        .iter()
        .map(|tile| (tile, shared(tile)))
        .find(|&(tile, shared)| {
            spec.padded <= tile.up_to && shared + tile.warps * ROWS * 8 <= limit
        })
}

/// Query rows a step and keys a block of the variant for `spec`.
pub fn tile_of(spec: &Spec, limit: u32) -> Option<(u32, u32)> {
    choose(spec, limit).map(|(tile, _)| (ROWS, tile.warps * tile.keys))
}

/// The variant for `spec` within `limit` bytes of shared memory.
pub fn variant(spec: &Spec, limit: u32) -> Option<Variant> {
    let (tile, shared) = choose(spec, limit)?;
    Some(Variant::new(
        Family::Fa1,
        "tw_fa1",
        spec,
        &[
            ("MT", (ROWS / 16) as i32),
            ("KW", tile.keys as i32),
            ("WARPS", tile.warps as i32),
            ("KVREG", i32::from(tile.kvreg)),
        ],
        tile.warps * 32,
        shared,
    ))
}
