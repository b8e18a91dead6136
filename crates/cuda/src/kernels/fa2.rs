//! Tiles and launches of `fa2.cu`.

use tilewise_core::DType;

use super::{Family, Score, Spec, Variant, key_pitch, pitch};

/// How a block of `tw_fa2` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Largest padded head_dim it is for.
    up_to: u32,
    /// Warps a block.
    warps: u32,
    /// Groups of sixteen query rows a warp.
    wm: u32,
    /// Keys a tile.
    bn: u32,
    /// K and V tiles in shared memory at a time.
    stages: u32,
    /// Q stays in registers.
    qreg: bool,
    /// Tiles that no edge crosses have a loop of their own.
    peel: bool,
    /// Blocks that should fit a multiprocessor.
    blocks: u32,
}

/// `cut` is warps, row groups a warp, keys a tile, stages; `ways` are `qreg` and `peel`.
const fn tile(up_to: u32, cut: [u32; 4], ways: [bool; 2], blocks: u32) -> Tile {
    let [warps, wm, bn, stages] = cut;
    let [qreg, peel] = ways;
    Tile {
        up_to,
        warps,
        wm,
        bn,
        stages,
        qreg,
        peel,
        blocks,
    }
}

// In order of preference, by measurement on an H200 (docs/PERFORMANCE.md); the first that is wide enough and fits the shared memory is taken. Two row
// groups a warp halve the shared-memory traffic a product needs, as long as the output fits the registers.
const HALF: &[Tile] = &[
    tile(64, [4, 2, 64, 2], [true, true], 2),
    tile(96, [4, 2, 64, 2], [false, false], 2),
    tile(128, [4, 2, 64, 1], [false, false], 2),
    tile(160, [4, 2, 32, 2], [false, false], 2),
    tile(224, [4, 1, 64, 1], [false, false], 2),
    tile(256, [4, 1, 64, 1], [false, true], 2),
    tile(256, [4, 1, 32, 1], [false, false], 1),
];
// Half the rows a warp, of Q in registers; as many keys as the tile above, so that no row's bits depend on which of the two it is in.
const FEW: &[Tile] = &[
    tile(64, [4, 1, 64, 2], [true, false], 3),
    tile(96, [4, 1, 64, 2], [true, false], 2),
    tile(128, [4, 1, 64, 2], [true, false], 2),
];
const SINGLE: &[Tile] = &[
    tile(64, [4, 2, 32, 2], [false, false], 1),
    tile(128, [8, 1, 32, 2], [false, false], 1),
    tile(128, [4, 1, 32, 2], [false, false], 1),
    tile(256, [4, 1, 16, 2], [false, false], 1),
    tile(256, [2, 1, 16, 2], [false, false], 1),
];

// f32 as pairs of f16: rows of as many bytes, products of twice the rate.
const PAIRS: &[Tile] = &[
    tile(64, [4, 2, 32, 2], [false, false], 2),
    tile(128, [4, 1, 64, 1], [false, false], 2),
    tile(128, [4, 1, 32, 1], [false, false], 1),
    tile(256, [8, 1, 32, 1], [false, false], 1),
    tile(256, [4, 1, 16, 1], [false, false], 1),
    tile(256, [2, 1, 16, 1], [false, false], 1),
];

// With tiles of bias and mask beside those of K and V.
const EXTRAS: &[Tile] = &[
    tile(128, [4, 2, 64, 1], [false, false], 2),
    tile(160, [4, 2, 32, 1], [false, false], 2),
    tile(256, [4, 1, 64, 1], [false, false], 2),
    tile(256, [4, 1, 32, 1], [false, false], 1),
];

/// Whether tiles of bias and mask come through shared memory, which `EXTRAS` of `score.cu` calls 2.
fn brings_extras(spec: &Spec) -> bool {
    spec.extras && spec.dtype != DType::F32
}

fn choose(spec: &Spec, limit: u32) -> Option<(Tile, u32)> {
    let (few, table) = match (spec.pairs, spec.dtype) {
        (true, _) => (&[][..], PAIRS),
        (false, DType::F32) => (&[][..], SINGLE),
        (false, _) if spec.extras => (&[][..], EXTRAS),
        (false, _) => (if spec.few { FEW } else { &[] }, HALF),
    };
    few.iter()
        .chain(table)
        .filter(|tile| spec.padded.max(spec.padded_v) <= tile.up_to)
        .map(|tile| {
            // Q's rows carry the output in the end.
            let rows =
                tile.warps * tile.wm * 16 * pitch(spec.dtype, spec.padded.max(spec.padded_v));
            let key: u32 = [spec.padded, spec.padded_v]
                .map(|columns| key_pitch(spec.dtype, columns, spec.pairs))
                .iter()
                .sum();
            let extras = if brings_extras(spec) {
                tile.warps * tile.wm * 16 * (pitch(spec.dtype, tile.bn) + tile.bn + 16)
            } else {
                0
            };
            (*tile, rows + tile.stages * tile.bn * key + extras)
        })
        .find(|&(_, shared)| shared <= limit)
}

/// The variant for `spec` within `limit` bytes of shared memory; `state` for the one that absorbs
/// keys into a running state.
pub fn variant(spec: &Spec, limit: u32, state: bool) -> Option<Variant> {
    let (tile, shared) = choose(spec, limit)?;
    let mut macros = vec![
        ("WARPS", tile.warps as i32),
        ("WM", tile.wm as i32),
        ("BN", tile.bn as i32),
        ("STAGES", tile.stages as i32),
        ("QREG", i32::from(tile.qreg)),
        ("PEEL", i32::from(tile.peel)),
        ("MINB", tile.blocks as i32),
        ("STATE", i32::from(state)),
    ];
    if spec.score == Score::Modified {
        let extras = i32::from(spec.extras) + i32::from(brings_extras(spec));
        macros.push(("EXTRAS", extras));
    }
    Some(Variant::new(
        Family::Fa2,
        "tw_fa2",
        spec,
        &macros,
        tile.warps * 32,
        shared,
    ))
}

/// Query rows a block of the variant for `spec`.
pub fn rows(spec: &Spec, limit: u32) -> Option<u32> {
    choose(spec, limit).map(|(tile, _)| tile.warps * tile.wm * 16)
}

/// Whether `spec` over `pairs` batch entries and heads of `seqlen_q` rows leaves each of
/// `multiprocessors` one row block at most.
pub fn few(spec: &Spec, limit: u32, [seqlen_q, pairs]: [u64; 2], multiprocessors: u64) -> bool {
    let many = Spec {
        few: false,
        ..*spec
    };
    rows(&many, limit).is_some_and(|rows| {
        seqlen_q.div_ceil(u64::from(rows)).saturating_mul(pairs) <= multiprocessors
    })
}

/// Blocks of the variant for `spec` that a multiprocessor has room for at a time.
pub fn at_a_time(spec: &Spec, limit: u32) -> Option<u32> {
    choose(spec, limit).map(|(tile, shared)| tile.blocks.min(limit / shared).max(1))
}

/// Query rows a block and keys a tile of the variant for `spec`.
pub fn tile_of(spec: &Spec, limit: u32) -> Option<(u32, u32)> {
    choose(spec, limit).map(|(tile, _)| (tile.warps * tile.wm * 16, tile.bn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::PADDED;

    #[test]
    fn keys_are_cut_alike_whether_row_blocks_are_few_or_many() {
        for limit in [99 << 10, 163 << 10, 227 << 10] {
            for padded in PADDED {
                let many = Spec::plain(DType::BF16, padded);
                let few = Spec { few: true, ..many };
                let [(many_rows, many_keys), (few_rows, few_keys)] =
                    [many, few].map(|spec| tile_of(&spec, limit).unwrap());
                assert_eq!(few_keys, many_keys, "{padded}");
                assert_eq!(
                    few_rows * if padded <= 128 { 2 } else { 1 },
                    many_rows,
                    "{padded}"
                );
            }
        }
    }

    #[test]
    fn few_row_blocks_are_one_a_multiprocessor_at_most() {
        let spec = Spec::plain(DType::F16, 128);
        let few = |seqlen_q, pairs| few(&spec, 227 << 10, [seqlen_q, pairs], 132);
        assert!(few(16384, 1) && few(128, 132) && few(0, 5));
        assert!(!few(16385 + 4 * 128, 1) && !few(129, 67) && !few(1, u64::MAX));
    }
}
