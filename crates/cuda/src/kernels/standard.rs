//! Tiles and launches of `standard.cu`.

use tilewise_core::DType;

use super::{Family, Score, Spec, Variant, pitch};

/// A grid of warps over a tile of the scores: rows and columns of warps, row groups of sixteen and
/// column groups of eight a warp.
type Cut = (u32, u32, u32, u32);

const SCORES_HALF: &[Cut] = &[(4, 2, 2, 8), (2, 2, 2, 4)];
const SCORES_SINGLE: &[Cut] = &[(2, 2, 2, 4), (1, 1, 2, 4)];

/// Longest row that one warp takes in the softmax; a whole block takes longer ones.
const WARP_ROW: usize = 1024;

/// Rows and columns of S that one block of the scores kernel makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoresTile {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub columns: u32,
}

fn scores_cut(spec: &Spec, limit: u32) -> Option<(Cut, ScoresTile, u32)> {
    let table = if spec.dtype == DType::F32 {
        SCORES_SINGLE
    } else {
        SCORES_HALF
    };
    table
        .iter()
        .map(|&(wm, wn, mt, nt)| {
            let tile = ScoresTile {
                rows: wm * mt * 16,
                columns: wn * nt * 8,
            };
            let shared = (tile.rows + tile.columns) * pitch(spec.dtype, spec.padded);
            ((wm, wn, mt, nt), tile, shared)
        })
        .find(|&(_, _, shared)| shared <= limit)
}

/// Tile of the scores kernel for `spec`.
pub fn scores_tile(spec: &Spec, limit: u32) -> Option<ScoresTile> {
    scores_cut(spec, limit).map(|(_, tile, _)| tile)
}

/// Warps over rows and columns, row groups a warp, keys a step.
fn out_cut(spec: &Spec, limit: u32) -> Option<(u32, u32, u32, u32, u32)> {
    let single = spec.dtype == DType::F32;
    // A warp's columns come in sixteens for 16-bit operands and in eights for f32.
    let (wm, wn, mt) = match (single, spec.padded_v % 32) {
        (true, _) => (2, 2, 2),
        (false, 0) => (4, 2, 2),
        (false, _) => (8, 1, 1),
    };
    let rows = wm * mt * 16;
    let steps: &[u32] = if single { &[32, 16] } else { &[64, 32] };
    steps.iter().find_map(|&step| {
        let shared = 2 * (rows * pitch(spec.dtype, step) + step * pitch(spec.dtype, spec.padded_v));
        (shared <= limit).then_some((wm, wn, mt, step, shared))
    })
}

/// Rows of O that one block of the last kernel makes.
pub fn out_rows(spec: &Spec, limit: u32) -> Option<u32> {
    out_cut(spec, limit).map(|(wm, _, mt, ..)| wm * mt * 16)
}

/// Rows that one block of the softmax kernel takes.
pub fn softmax_rows(seqlen_k: usize) -> u32 {
    256 / softmax_threads(seqlen_k)
}

fn softmax_threads(seqlen_k: usize) -> u32 {
    if seqlen_k <= WARP_ROW { 32 } else { 256 }
}

fn tile(part: i32, cut: Cut, step: u32, threads: u32) -> [(&'static str, i32); 7] {
    [
        ("PART", part),
        ("WARPS_M", cut.0 as i32),
        ("WARPS_N", cut.1 as i32),
        ("MT", cut.2 as i32),
        ("NTW", cut.3 as i32),
        ("BK", step as i32),
        ("RT", threads as i32),
    ]
}

/// Scores, softmax and output kernels for `spec`. Each depends on as little of it as it can, so that
/// problems share them.
pub fn variants(spec: &Spec, limit: u32, seqlen_k: usize) -> [Option<Variant>; 3] {
    let scores = scores_cut(spec, limit).map(|(cut, _, shared)| {
        Variant::new(
            Family::Standard,
            "tw_standard_scores",
            &Spec {
                aligned: spec.aligned,
                ..Spec::plain(spec.dtype, spec.padded)
            },
            &tile(0, cut, 32, 32),
            cut.0 * cut.1 * 32,
            shared,
        )
    });
    let softmax = Variant::new(
        Family::Standard,
        "tw_standard_softmax",
        &Spec {
            padded: 64,
            padded_v: 64,
            sequences: false,
            aligned: true,
            ..*spec
        },
        &tile(1, (1, 1, 1, 1), 32, softmax_threads(seqlen_k)),
        256,
        0,
    );
    let out = out_cut(spec, limit).map(|(wm, wn, mt, step, shared)| {
        Variant::new(
            Family::Standard,
            "tw_standard_out",
            &Spec {
                padded: spec.padded_v,
                // Which keys count matters here only where a mask or a bias may hide some.
                score: match spec.score {
                    Score::Modified => Score::Modified,
                    _ => Score::Folded,
                },
                sequences: false,
                ..*spec
            },
            &tile(2, (wm, wn, mt, 2), step, 32),
            wm * wn * 32,
            shared,
        )
    });
    [scores, Some(softmax), out]
}
