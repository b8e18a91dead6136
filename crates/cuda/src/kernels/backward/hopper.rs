//! Tiles and launches of `backward/hopper.cu`.

use tilewise_core::DType;

use crate::backward::Sums;

use super::super::hopper::COMPUTE;
use super::super::{Family, Mask, Score, Spec, Variant};
use super::fa2;

/// Words before those of `turns` that each row block of a head has: TURN_WORDS in `common.cu`.
const TURN_WORDS: u64 = 32;

/// Bytes of `turns` for `cells` rows, those of all heads: a word for each row block of dQ's sums.
pub fn turns(cells: u64) -> u64 {
    (TURN_WORDS + cells / u64::from(TURN_ROWS)) * 4
}

/// Rows a word of `turns`: TURN_ROWS in `common.cu`, and those of every tile.
const TURN_ROWS: u32 = 64;

/// How a block of `tw_bwd_hopper` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Widest head_dim it is for.
    up_to: u32,
    /// Query rows a step.
    pub rows: u32,
    /// Keys a block.
    pub keys: u32,
    /// Tiles of Q and of dO in shared memory.
    stages: (u32, u32),
    /// Warpgroups share the columns of the gradients, not the keys.
    wide: bool,
    /// dV is begun before dP is awaited.
    early: bool,
}

/// Warpgroups that multiply; one more brings the tiles.
const GROUPS: u32 = 2;

/// Threads a block.
const THREADS: u32 = (GROUPS + 1) * 128;

/// Registers a thread of the warpgroup that brings tiles, and of the others: all of a multiprocessor.
const REGISTERS: [u32; 2] = [24, 240];

/// By measurement on an H200.
const TILES: [Tile; 3] = [
    Tile {
        up_to: 64,
        rows: 64,
        keys: 128,
        stages: (2, 2),
        wide: false,
        early: true,
    },
    Tile {
        up_to: 128,
        rows: 64,
        keys: 128,
        stages: (2, 2),
        wide: false,
        early: false,
    },
    Tile {
        up_to: 256,
        rows: 64,
        keys: 64,
        stages: (2, 2),
        wide: true,
        early: false,
    },
];

impl Tile {
    /// Columns that `padded` ones take in shared memory and in dQ's sums: TP and TV in `hopper.cu`.
    pub fn columns(&self, padded: u32) -> u32 {
        padded.next_multiple_of(if self.wide { 128 } else { 64 })
    }

    /// Shared memory of a block in bytes, with or without [`Sums::turns`]: K, V, the rings, what passes through of P
    /// and dS, L and Δ, barriers, a bit for each key and two words more.
    fn shared(&self, spec: &Spec, sums: Sums) -> u32 {
        let [k, v] = [spec.padded, spec.padded_v].map(|padded| self.columns(padded) * 2);
        let (q, go) = self.stages;
        let strips = if self.wide { 2 } else { 1 };
        self.keys * (k + v)
            + self.rows * (q * k + go * v)
            + 2 * strips * self.keys * self.rows * 2
            + (q + go) * self.rows * 4
            + 16
            + (q + go) * 16
            + if sums == Sums::Ordered { 32 } else { 0 }
            + self.keys / 8
            + 8
    }

    /// `spec` with dQ's sums as wide as this tile's.
    pub fn laid(&self, spec: &Spec) -> Spec {
        Spec {
            padded: self.columns(spec.padded),
            ..*spec
        }
    }

    /// dQ's sums as this tile lays them, to dq: blocks of 64 rows, of which each of four warps has sixteen
    /// and each of two warpgroups half the columns.
    pub fn store_dq(&self, spec: &Spec) -> Variant {
        fa2::Tile::of_sums(self.rows, (4, 2)).store_dq(&self.laid(spec), COMPUTE)
    }
}

/// The tile for `spec`, where this family serves it. Whether it does depends on neither lengths, batch nor
/// how tensors lie, so no bit does.
pub fn tile(spec: &Spec) -> Option<Tile> {
    let served = matches!(spec.dtype, DType::F16 | DType::BF16)
        && spec.score == Score::Folded
        && !spec.dropout;
    let widest = spec.padded.max(spec.padded_v);
    TILES
        .into_iter()
        .find(|tile| served && widest <= tile.up_to)
}

/// How a call that asks for `sums` sums dQ up: by turns also where that is the faster way (as measured on
/// an H200), without a mask up to head_dim 64.
pub fn sums(spec: &Spec, sums: Sums) -> Sums {
    let fast = spec.mask == Mask::Full && spec.padded.max(spec.padded_v) <= 64;
    if fast { Sums::Ordered } else { sums }
}

/// The gradients for `spec` with dQ's sums as `sums` says, on a device of compute capability
/// `compute` with `limit` bytes of shared memory a block; `None` where `fa2.cu` is to serve.
pub fn gradients(spec: &Spec, limit: u32, compute: i32, sums: Sums) -> Option<(Variant, Tile)> {
    let tile = tile(spec).filter(|tile| compute == COMPUTE && tile.shared(spec, sums) <= limit)?;
    Some((tile.variant(spec, sums, false), tile))
}

impl Tile {
    /// The kernel for blocks that [`gradients`]' leaves out because it found NaN or infinity in them: where
    /// a bound may hide such a value.
    pub fn careful(&self, spec: &Spec, sums: Sums) -> Option<Variant> {
        (spec.mask != Mask::Full).then(|| self.variant(spec, sums, true))
    }

    fn variant(&self, spec: &Spec, sums: Sums, careful: bool) -> Variant {
        let tile = self;
        // Inputs that are not aligned are laid out anew, and outputs may lie anyhow.
        let spec = Spec {
            aligned: true,
            ..*spec
        };
        Variant::new(
            Family::BackwardHopper,
            "tw_bwd_hopper",
            &spec,
            &[
                ("BM", tile.rows as i32),
                ("BN", tile.keys as i32),
                ("QST", tile.stages.0 as i32),
                ("DST", tile.stages.1 as i32),
                ("TURNS", i32::from(sums == Sums::Ordered)),
                ("WIDE", i32::from(tile.wide)),
                ("EARLY", i32::from(tile.early)),
                ("CARE", i32::from(careful)),
                ("GIVE", REGISTERS[0] as i32),
                ("TAKE", REGISTERS[1] as i32),
            ],
            THREADS,
            tile.shared(&spec, sums),
        )
    }
}

/// Every kernel that `spec` may need where this family serves it.
pub fn variants(spec: &Spec, limit: u32, compute: i32) -> Vec<Variant> {
    let ways = [Sums::Atomic, Sums::Ordered].map(|asked| sums(spec, asked));
    let both = ways.map(|sums| gradients(spec, limit, compute, sums));
    let Some((_, tile)) = both[0] else {
        return Vec::new();
    };
    let mut all: Vec<_> = both.into_iter().flatten().map(|found| found.0).collect();
    all.extend(ways.into_iter().filter_map(|sums| tile.careful(spec, sums)));
    for aligned in [true, false] {
        let spec = Spec { aligned, ..*spec };
        all.push(tile.store_dq(&spec));
        all.extend(fa2::prepare(&tile.laid(&spec), limit, compute));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::super::{PADDED, shared_limit};
    use super::*;

    #[test]
    fn tiles_fit_hopper() {
        let [give, take] = REGISTERS;
        // setmaxnreg takes multiples of 8 from 24 to 256, and gives out what the launch starts with.
        for n in [give, take] {
            assert!(n % 8 == 0 && (24..=256).contains(&n));
        }
        let launched = 65536 / THREADS / 8 * 8 * THREADS;
        assert!((give + GROUPS * take) * 128 <= launched);
        for tile in TILES {
            let spec = Spec::plain(DType::F16, tile.up_to);
            assert!(tile.shared(&spec, Sums::Ordered) <= shared_limit(COMPUTE));
            // Panels start at multiples of 1024 bytes, and sixteen keys or rows are one step of a product.
            assert_eq!(tile.rows, TURN_ROWS);
            assert_eq!(fa2::ROW_PADDING % tile.rows as usize, 0);
            assert_eq!(tile.keys, if tile.wide { 64 } else { GROUPS * 64 });
            // A tile's last products must not wait for a tile that waits for them.
            assert!(!tile.wide || tile.stages.1 > 1);
        }
    }

    #[test]
    fn halves_are_served_on_hopper_alone() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for padded in PADDED {
                for mask in Mask::ALL {
                    let spec = Spec {
                        mask,
                        ..Spec::plain(dtype, padded)
                    };
                    let of = |compute| variants(&spec, shared_limit(compute), compute).len();
                    let kernels = if mask == Mask::Full { 6 } else { 8 };
                    let served = dtype != DType::F32;
                    assert_eq!(of(COMPUTE), if served { kernels } else { 0 });
                    assert_eq!(of(80) + of(100) + of(120), 0);
                    let strided = Spec {
                        aligned: false,
                        ..spec
                    };
                    assert_eq!(tile(&strided), tile(&spec));
                }
            }
        }
    }
}
