//! Tiles and launches of `fa2_halves.cu`: 16-bit rows of more than 128 columns.

use tilewise_core::DType;

use super::{Family, Spec, Variant, pitch};

const WARPS: u32 = 4;
/// Query rows a block.
pub const ROWS: u32 = WARPS * 16;
/// Keys a tile.
const KEYS: u32 = 64;

/// The variant for `spec` within `limit` bytes of shared memory; `None` where another kernel serves.
pub fn variant(spec: &Spec, limit: u32) -> Option<Variant> {
    if spec.dtype == DType::F32 || spec.padded.max(spec.padded_v) <= 128 {
        return None;
    }
    // Each half of the output is whole fragments of sixteen columns.
    let spec = Spec {
        padded_v: spec.padded_v.next_multiple_of(32),
        ..*spec
    };
    let [k, v] = [spec.padded, spec.padded_v].map(|columns| pitch(spec.dtype, columns));
    let shared = ROWS * k.max(v) + KEYS * (k + v) + ROWS * pitch(spec.dtype, KEYS);
    // What the two halves know of a row is static.
    (shared + 2 * ROWS * 4 <= limit).then(|| {
        Variant::new(
            Family::Fa2Halves,
            "tw_fa2_halves",
            &spec,
            &[("WARPS", WARPS as i32), ("BN", KEYS as i32), ("MINB", 2)],
            WARPS * 32,
            shared,
        )
    })
}
