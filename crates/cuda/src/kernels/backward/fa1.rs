//! Tiles and launches of `fa1.cu`.

use super::super::{Family, Spec, Variant, pitch};
use super::fa2::Tile;

/// The tile for `spec`: that of `fa2.cu`'s plain ones that leaves room for O, one stage of each; more
/// warps of the same tile where dK and dV alone would take half of a thread's registers.
fn choose(spec: &Spec, limit: u32) -> Option<(Tile, u32)> {
    let fit = || {
        Tile::plain(spec.dtype)
            .filter(|tile| tile.divides(spec))
            .map(|tile| {
                let (k, v) = (
                    pitch(spec.dtype, spec.padded),
                    pitch(spec.dtype, spec.padded_v),
                );
                let shared = tile.bn * (k + v)
                    + tile.bm * (k + 2 * v)
                    + 2 * tile.bn * pitch(spec.dtype, tile.bm)
                    + 4 * tile.bm
                    // A bit for each key.
                    + 4 * tile.bn.div_ceil(32);
                (tile, shared)
            })
            .filter(|&(_, shared)| shared <= limit)
    };
    let (first, shared) = fit().next()?;
    let sums = first.bn * (spec.padded + spec.padded_v) / (first.warps * 32);
    let same = |tile: &Tile| (tile.bm, tile.bn) == (first.bm, first.bn);
    fit()
        .find(|(tile, _)| sums >= 128 && same(tile) && tile.warps > first.warps)
        .or(Some((first, shared)))
}

/// m and 1/ℓ, with the rows of a block; the gradients; the layout of dQ's sums is that of the tile.
pub fn variants(spec: &Spec, limit: u32) -> Option<([Variant; 2], Tile)> {
    let (tile, shared) = choose(spec, limit)?;
    let defines = |part| tile.defines(part, true, 80);
    let statistics = Variant::new(
        Family::BackwardFa1,
        "tw_bwd_fa1_statistics",
        &Spec {
            dropout: false,
            ..*spec
        },
        &defines(0),
        tile.bm * 2,
        (tile.bm + tile.bn) * pitch(spec.dtype, spec.padded),
    );
    let gradients = Variant::new(
        Family::BackwardFa1,
        "tw_bwd_fa1",
        spec,
        &defines(1),
        tile.warps * 32,
        shared,
    );
    Some(([statistics, gradients], tile))
}
