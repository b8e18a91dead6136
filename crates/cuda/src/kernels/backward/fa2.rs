//! Tiles and launches of `fa2.cu`, `dq.cu` and `rows.cu`.

use tilewise_core::DType;

use super::super::{Family, Mask, Score, Spec, Variant, pitch};

/// Rows of L, Δ and dQ's sums are padded to a multiple of this: of every tile's height.
pub const ROW_PADDING: usize = 128;

/// How a block of `tw_bwd_fa2` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Largest padded head_dim it is for.
    up_to: u32,
    /// Warps a block.
    pub(super) warps: u32,
    /// Query rows a step.
    pub(super) bm: u32,
    /// Keys a block.
    pub(super) bn: u32,
    /// Warps over keys and rows of S and dP.
    s: (u32, u32),
    /// Warps over keys and columns of dK and dV.
    kv: (u32, u32),
    /// Warps over rows and columns of dQ.
    q: (u32, u32),
    /// Tiles of Q and of dO in shared memory at a time.
    stages: (u32, u32),
    /// Fragments of K and V stay in registers.
    kv_in_registers: bool,
    /// P and dS stay in the registers of the warp that made them.
    p_in_registers: bool,
    /// A tile's dQ is made during the next tile.
    late_dq: bool,
    /// What a warp made of P and dS it takes from its registers.
    own_in_registers: bool,
    /// Blocks that should fit a multiprocessor.
    blocks: u32,
}

const PLAIN: Tile = Tile {
    up_to: 256,
    warps: 4,
    bm: 64,
    bn: 64,
    s: (2, 2),
    kv: (2, 2),
    q: (2, 2),
    stages: (1, 1),
    kv_in_registers: false,
    p_in_registers: false,
    late_dq: false,
    own_in_registers: false,
    blocks: 1,
};

// In order of preference, by measurement on an H200 (docs/PERFORMANCE.md); the first that divides head_dim and fits the shared
// memory is taken.
const HALF: &[Tile] = &[
    Tile {
        up_to: 64,
        bm: 32,
        bn: 128,
        s: (4, 1),
        kv: (4, 1),
        stages: (2, 2),
        p_in_registers: true,
        late_dq: true,
        blocks: 2,
        ..PLAIN
    },
    Tile {
        up_to: 128,
        warps: 8,
        bn: 128,
        s: (4, 2),
        kv: (4, 2),
        q: (2, 4),
        stages: (2, 2),
        own_in_registers: true,
        ..PLAIN
    },
    Tile {
        up_to: 128,
        warps: 8,
        bn: 128,
        s: (4, 2),
        kv: (4, 2),
        q: (2, 4),
        stages: (2, 1),
        own_in_registers: true,
        ..PLAIN
    },
    Tile {
        up_to: 128,
        stages: (2, 2),
        ..PLAIN
    },
    Tile {
        up_to: 128,
        kv: (4, 1),
        q: (4, 1),
        stages: (2, 2),
        ..PLAIN
    },
    Tile {
        up_to: 128,
        kv: (4, 1),
        q: (4, 1),
        ..PLAIN
    },
    Tile {
        warps: 8,
        s: (4, 2),
        kv: (4, 2),
        q: (4, 2),
        ..PLAIN
    },
    Tile {
        bm: 32,
        bn: 32,
        ..PLAIN
    },
];
const SINGLE: &[Tile] = &[
    Tile {
        up_to: 128,
        bm: 32,
        bn: 32,
        stages: (2, 2),
        ..PLAIN
    },
    Tile {
        bm: 32,
        bn: 32,
        ..PLAIN
    },
    Tile {
        warps: 2,
        bm: 16,
        bn: 16,
        s: (1, 1),
        kv: (1, 2),
        q: (1, 2),
        ..PLAIN
    },
];

fn table(dtype: DType) -> &'static [Tile] {
    match dtype {
        DType::F32 => SINGLE,
        _ => HALF,
    }
}

impl Tile {
    /// Those whose P and dS both go through shared memory, at most 64 keys a block.
    pub(super) fn plain(dtype: DType) -> impl Iterator<Item = Tile> {
        table(dtype).iter().copied().filter(|tile| {
            tile.bn <= 64 && !(tile.p_in_registers || tile.own_in_registers || tile.late_dq)
        })
    }

    /// Whether each warp's columns are whole fragments: sixteen of 16-bit operands, eight of f32.
    pub(super) fn divides(&self, spec: &Spec) -> bool {
        let step = if spec.dtype == DType::F32 { 8 } else { 16 };
        spec.padded.max(spec.padded_v) <= self.up_to
            && [
                spec.padded / self.kv.1,
                spec.padded_v / self.kv.1,
                spec.padded / self.q.1,
            ]
            .iter()
            .all(|columns| columns % step == 0)
    }

    fn shared(&self, spec: &Spec) -> u32 {
        let (k, v) = (
            pitch(spec.dtype, spec.padded),
            pitch(spec.dtype, spec.padded_v),
        );
        let strips = 2 - u32::from(self.p_in_registers) + u32::from(self.late_dq);
        self.bn * (k + v)
            + self.bm * (self.stages.0 * k + self.stages.1 * v)
            + strips * self.bn * pitch(spec.dtype, self.bm)
            + self.stages.0 * 8 * self.bm
            + self.bm
            + self.bn.div_ceil(32) * 4
    }

    pub(super) fn defines(&self, part: i32, dq: bool, compute: i32) -> [(&'static str, i32); 19] {
        [
            ("PART", part),
            ("WARPS", self.warps as i32),
            ("BM", self.bm as i32),
            ("BN", self.bn as i32),
            ("SK", self.s.0 as i32),
            ("SR", self.s.1 as i32),
            ("GK", self.kv.0 as i32),
            ("GD", self.kv.1 as i32),
            ("QR", self.q.0 as i32),
            ("QD", self.q.1 as i32),
            ("QST", self.stages.0 as i32),
            ("DST", self.stages.1 as i32),
            ("KVREG", i32::from(self.kv_in_registers)),
            ("PREG", i32::from(self.p_in_registers)),
            ("RED4", i32::from(compute >= 90)),
            ("DQ", i32::from(dq)),
            ("DEFER", i32::from(self.late_dq)),
            ("OWN", i32::from(self.own_in_registers)),
            ("MINB", self.blocks as i32),
        ]
    }
}

fn choose(spec: &Spec, limit: u32) -> Option<Tile> {
    table(spec.dtype)
        .iter()
        .find(|tile| tile.divides(spec) && tile.shared(spec) <= limit)
        .copied()
}

/// Keys a block of the gradients kernel and rows a step.
pub fn tile(spec: &Spec, limit: u32) -> Option<(u32, u32)> {
    choose(spec, limit).map(|tile| (tile.bn, tile.bm))
}

/// Makes L, Δ and the zeros of dQ's sums.
pub fn prepare(spec: &Spec, limit: u32, compute: i32) -> Option<Variant> {
    let tile = choose(spec, limit)?;
    Some(Variant::new(
        Family::BackwardFa2,
        "tw_bwd_prepare",
        &without_scores(spec),
        &tile.defines(0, true, compute),
        256,
        0,
    ))
}

/// Threads a row of `tw_bwd_prepare`, LANES there.
pub fn prepare_lanes(spec: &Spec) -> u32 {
    (spec.padded_v * spec.dtype.size() as u32 / 16)
        .next_power_of_two()
        .clamp(4, 32)
}

/// What depends on neither scores nor masks.
fn without_scores(spec: &Spec) -> Spec {
    Spec {
        mask: Mask::Full,
        score: Score::Folded,
        dropout: false,
        ..*spec
    }
}

/// The gradients; without `dq` only those of k and v.
pub fn gradients(spec: &Spec, limit: u32, compute: i32, dq: bool) -> Option<Variant> {
    let tile = choose(spec, limit)?;
    Some(Variant::new(
        Family::BackwardFa2,
        "tw_bwd_fa2",
        spec,
        &tile.defines(1, dq, compute),
        tile.warps * 32,
        tile.shared(spec),
    ))
}

/// dQ's sums to dq.
pub fn store_dq(spec: &Spec, limit: u32, compute: i32) -> Option<Variant> {
    Some(choose(spec, limit)?.store_dq(spec, compute))
}

impl Tile {
    /// The layout of dQ's sums that eight warps make in blocks of `rows` rows, `over` rows and columns.
    pub(super) fn of_sums(rows: u32, over: (u32, u32)) -> Tile {
        Tile {
            warps: 8,
            bm: rows,
            q: over,
            ..PLAIN
        }
    }

    /// Query rows a block of dQ's sums.
    pub fn rows(&self) -> u32 {
        self.bm
    }

    /// dQ's sums as this tile lays them, to dq.
    pub fn store_dq(&self, spec: &Spec, compute: i32) -> Variant {
        Variant::new(
            Family::BackwardFa2,
            "tw_bwd_store_dq",
            &without_scores(spec),
            &self.defines(2, true, compute),
            256,
            self.bm * pitch(spec.dtype, spec.padded),
        )
    }
}

/// Warps, keys a tile, stages and blocks a multiprocessor of `tw_bwd_dq`, up to which head_dim.
const DQ_HALF: &[(u32, [u32; 4])] = &[
    (128, [4, 64, 2, 2]),
    (128, [4, 64, 1, 1]),
    (256, [4, 32, 2, 1]),
    (256, [4, 16, 1, 1]),
];
const DQ_SINGLE: &[(u32, [u32; 4])] = &[
    (128, [4, 16, 2, 1]),
    (128, [4, 16, 1, 1]),
    (256, [4, 16, 1, 1]),
    (256, [2, 16, 1, 1]),
];

/// dQ by a kernel of its own, whose bits do not change, and its rows a block.
pub fn dq(spec: &Spec, limit: u32) -> Option<(Variant, u32)> {
    let table = if spec.dtype == DType::F32 {
        DQ_SINGLE
    } else {
        DQ_HALF
    };
    let (k, v) = (
        pitch(spec.dtype, spec.padded),
        pitch(spec.dtype, spec.padded_v),
    );
    let widest = spec.padded.max(spec.padded_v);
    table
        .iter()
        .filter(|&&(up_to, _)| widest <= up_to)
        .map(|&(_, [warps, keys, stages, blocks])| {
            let rows = warps * 16;
            let tile = Tile {
                warps,
                bm: rows,
                bn: keys,
                s: (1, 1),
                kv: (1, 1),
                q: (1, 1),
                stages: (stages, 1),
                blocks,
                ..PLAIN
            };
            let shared = (rows + stages * keys) * (k + v);
            (tile, shared)
        })
        .find(|&(_, shared)| shared <= limit)
        .map(|(tile, shared)| {
            let variant = Variant::new(
                Family::BackwardFa2,
                "tw_bwd_dq",
                spec,
                &tile.defines(3, true, 80),
                tile.warps * 32,
                shared,
            );
            (variant, tile.bm)
        })
}

/// Every kernel that `spec` may need, [`rows`] excepted.
pub fn variants(spec: &Spec, limit: u32, compute: i32) -> [Option<Variant>; 5] {
    [
        prepare(spec, limit, compute),
        gradients(spec, limit, compute, true),
        gradients(spec, limit, compute, false),
        store_dq(spec, limit, compute),
        dq(spec, limit).map(|(variant, _)| variant),
    ]
}

/// The kernels of [`rows`].
pub const ROWS: [&str; 2] = ["tw_bwd_sinks", "tw_bwd_zero"];

/// The gradients of the sinks (`tw_bwd_sinks`) and rows of zeros (`tw_bwd_zero`).
pub fn rows(dtype: DType, entry: &'static str) -> Variant {
    let part = if entry == "tw_bwd_sinks" { 4 } else { 5 };
    Variant::new(
        Family::BackwardFa2,
        entry,
        &Spec::plain(dtype, 64),
        &PLAIN.defines(part, true, 80),
        256,
        0,
    )
}
