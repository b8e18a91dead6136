//! Tiles and launches of `standard.cu`.

use super::super::{Family, Mask, Score, Spec, Variant, pitch};

/// Columns that a product takes at most; wider rows come in slices.
pub const SLICE: usize = 256;

/// Rows and keys of a tile of the matrices for `spec`.
pub fn tile(spec: &Spec, limit: u32) -> Option<(u32, u32)> {
    let widest = spec.padded.max(spec.padded_v).next_multiple_of(32);
    let widest = pitch(spec.dtype, widest);
    [64, 32]
        .into_iter()
        .map(|side| (side, side))
        .find(|&(m, n)| {
            // The kernel has a bit for each row besides.
            let product = m * pitch(spec.dtype, n) + m.max(n) * widest + m.div_ceil(32) * 4;
            ((m + n) * widest).max(product) <= limit
        })
}

/// Which kernel of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// S and dP, by the width of q and of v.
    Scores,
    /// P and dX.
    Weights,
    /// dQ.
    Rows,
    /// dK and dV.
    Keys,
}

/// The gradient of a bias: dS summed up, `broadcast` if over rows or keys; then the sums to dbias.
pub fn bias(spec: &Spec, broadcast: bool) -> [Variant; 2] {
    let variant = |entry, part, threads, spec: &Spec| {
        let defines = [
            ("PART", part),
            ("BM", 32),
            ("BN", 32),
            ("WIDE", 64),
            ("RT", threads),
        ];
        Variant::new(Family::BackwardStandard, entry, spec, &defines, 256, 0)
    };
    let threads = if broadcast { 256 } else { 1 };
    let sums = Spec {
        padded: 64,
        padded_v: 64,
        aligned: true,
        ..*spec
    };
    [
        variant("tw_bwd_standard_bias", 4, threads, &sums),
        variant(
            "tw_bwd_standard_store_bias",
            5,
            1,
            &Spec::plain(spec.dtype, 64),
        ),
    ]
}

/// The kernel of `part` whose products are `wide` columns wide.
pub fn variant(spec: &Spec, limit: u32, part: Part, wide: u32) -> Option<Variant> {
    let (m, n) = tile(spec, limit)?;
    // Each of two warps takes half of the columns, in sixteens.
    let wide = wide.next_multiple_of(32);
    let row = pitch(spec.dtype, wide);
    let (number, entry, shared) = match part {
        Part::Scores => (0, "tw_bwd_standard_scores", (m + n) * row),
        Part::Weights => (1, "tw_bwd_standard_weights", 0),
        Part::Rows => (
            2,
            "tw_bwd_standard_rows",
            m * pitch(spec.dtype, n) + m.max(n) * row,
        ),
        Part::Keys => (
            3,
            "tw_bwd_standard_keys",
            m * pitch(spec.dtype, n) + m.max(n) * row,
        ),
    };
    // Only the weights depend on masks and scores.
    let spec = match part {
        Part::Weights => Spec {
            padded: 64,
            padded_v: 64,
            aligned: true,
            ..*spec
        },
        _ => Spec {
            padded: wide,
            padded_v: wide,
            mask: Mask::Full,
            score: Score::Folded,
            dropout: false,
            ..*spec
        },
    };
    let (threads, wide) = match part {
        Part::Weights => (256, 64),
        _ => (128, wide),
    };
    let defines = [
        ("PART", number),
        ("BM", m as i32),
        ("BN", n as i32),
        ("WIDE", wide as i32),
    ];
    Some(Variant::new(
        Family::BackwardStandard,
        entry,
        &spec,
        &defines,
        threads,
        shared,
    ))
}
