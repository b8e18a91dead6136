//! Tiles and launches of `hopper.cu`.

use tilewise_core::DType;

use super::{Family, Score, Spec, Variant};

/// The only compute capability that has these instructions.
pub const COMPUTE: i32 = 90;

/// How a block of `tw_hopper` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Most columns of q and k, and of v, that it is for.
    pub columns: [u32; 2],
    /// Warpgroups that multiply, 64 query rows each; one more brings the tiles.
    pub groups: u32,
    /// Keys a tile.
    pub keys: u32,
    /// Tiles of K, and of V, in shared memory.
    pub stages: u32,
    /// Registers a thread of the warpgroup that brings tiles, and of the others.
    pub registers: [u32; 2],
    /// The output is staged in memory of its own.
    pub own: bool,
}

impl Tile {
    /// Query rows a block.
    pub const fn rows(&self) -> u32 {
        self.groups * 64
    }

    /// Threads a block.
    const fn threads(&self) -> u32 {
        (self.groups + 1) * 128
    }

    /// Shared memory of a block for `spec` in bytes: Q, the rings, the output, tiles of bias and
    /// mask, barriers and what stands beside them.
    fn shared(&self, spec: &Spec) -> u32 {
        // The copy engine brings panels of 64 columns.
        let [k, v] = [spec.padded, spec.padded_v].map(|columns| columns.next_multiple_of(64) * 2);
        let rows = self.rows() * if self.own { k + v } else { k.max(v) };
        let pieces = if spec.score == Score::Modified {
            self.rows() * self.keys * 4
        } else {
            0
        };
        let bars = 32 + self.stages * 56 + self.groups * 32 + 48;
        rows + self.stages * self.keys * (k + v) + pieces + bars
    }
}

/// Rows up to which blocks of fewer of them are used, where there is a choice: the last one is then less
/// often half empty.
const SHORT: usize = 1024;

/// In order of preference; those for the same columns differ in rows alone, on which no bit depends. All
/// registers of a multiprocessor are given out: those of the producer's threads and of the others'. By
/// measurement on an H200.
const TILES: [Tile; 6] = [
    Tile {
        columns: [64, 64],
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [24, 240],
        own: true,
    },
    Tile {
        columns: [64, 64],
        groups: 3,
        keys: 128,
        stages: 2,
        registers: [32, 160],
        own: true,
    },
    Tile {
        columns: [128, 128],
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [24, 240],
        own: true,
    },
    Tile {
        columns: [192, 128],
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [24, 240],
        own: false,
    },
    Tile {
        columns: [192, 192],
        groups: 2,
        keys: 112,
        stages: 2,
        registers: [24, 240],
        own: false,
    },
    Tile {
        columns: [256, 256],
        groups: 2,
        keys: 80,
        stages: 2,
        registers: [24, 240],
        own: false,
    },
];

/// The same where tiles of bias and mask take room too.
const MODIFIED: [Tile; 3] = [
    Tile {
        columns: [64, 64],
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [40, 232],
        own: true,
    },
    Tile {
        columns: [128, 128],
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [40, 232],
        own: false,
    },
    Tile {
        columns: [256, 256],
        groups: 2,
        keys: 64,
        stages: 2,
        registers: [40, 232],
        own: false,
    },
];

/// The tile for `spec` and sequences of up to `rows` rows, where this family serves it. Whether it does
/// depends on neither lengths nor batch, so a row's bits do not.
pub fn tile(spec: &Spec, rows: usize) -> Option<Tile> {
    // Where products are small, drawing what is dropped takes so long that `fa2.cu`, which keeps more warps
    // at it, is no slower (by measurement on an H200).
    let drawing = spec.dropout && spec.padded.max(spec.padded_v) <= 64;
    if !matches!(spec.dtype, DType::F16 | DType::BF16) || drawing || !spec.aligned {
        return None;
    }
    let tiles: &[Tile] = match spec.score {
        Score::Modified => &MODIFIED,
        _ => &TILES,
    };
    let fits = |tile: &&Tile| spec.padded <= tile.columns[0] && spec.padded_v <= tile.columns[1];
    let first = tiles.iter().find(fits)?;
    let mut alike = tiles.iter().filter(|tile| tile.columns == first.columns);
    // Capping scores and drawing what is dropped take registers that three groups have not.
    let few = rows <= SHORT || spec.score == Score::Applied || spec.dropout;
    let chosen = match few {
        true => alike.next(),
        false => alike.next_back(),
    };
    chosen.copied()
}

/// The variant for `spec` and sequences of up to `rows` rows on a device of compute capability `compute`
/// with `limit` bytes of shared memory a block; `None` where `fa2.cu` is to serve.
pub fn variant(spec: &Spec, rows: usize, compute: i32, limit: u32) -> Option<(Variant, Tile)> {
    let tile = tile(spec, rows).filter(|tile| compute == COMPUTE && tile.shared(spec) <= limit)?;
    let variant = Variant::new(
        Family::Hopper,
        "tw_hopper",
        spec,
        &[
            ("GROUPS", tile.groups as i32),
            ("BN", tile.keys as i32),
            ("STAGES", tile.stages as i32),
            ("GIVE", tile.registers[0] as i32),
            ("TAKE", tile.registers[1] as i32),
            ("OWN", i32::from(tile.own)),
        ],
        tile.threads(),
        tile.shared(spec),
    );
    Some((variant, tile))
}

#[cfg(test)]
mod tests {
    use super::super::PADDED;
    use super::*;

    #[test]
    fn tiles_fit_hopper() {
        for tile in TILES.into_iter().chain(MODIFIED) {
            let [give, take] = tile.registers;
            // setmaxnreg takes multiples of 8 from 24 to 256; a launch gets 65536 registers at most.
            for n in [give, take] {
                assert!(n % 8 == 0 && (24..=256).contains(&n));
            }
            assert!((give + tile.groups * take) * 128 <= 65536, "{tile:?}");
            // Panels start at multiples of 1024 bytes, and sixteen keys are one step of a product.
            assert!((tile.keys * 128) % 1024 == 0 && tile.keys % 16 == 0);
        }
    }

    /// Every pair of head_dims has a tile within the chip's shared memory, and accumulators within its
    /// threads' registers beside scores and weights.
    #[test]
    fn every_pair_of_head_dims_is_served() {
        for padded in PADDED {
            for padded_v in PADDED {
                for (score, rows) in [
                    (Score::Applied, 1),
                    (Score::Folded, usize::MAX),
                    (Score::Modified, usize::MAX),
                ] {
                    let spec = Spec {
                        score,
                        padded_v,
                        ..Spec::plain(DType::BF16, padded)
                    };
                    let limit = super::super::shared_limit(COMPUTE);
                    let (variant, tile) = variant(&spec, rows, COMPUTE, limit).unwrap();
                    assert!(variant.shared <= limit);
                    let held = padded_v / 2 + tile.keys / 2 + tile.keys / 4;
                    assert!(held + 24 <= tile.registers[1], "{tile:?} {padded_v}");
                }
            }
        }
    }

    /// Law 6: where rows are cut differently, keys are not.
    #[test]
    fn tiles_of_keys_do_not_depend_on_lengths() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for padded in PADDED {
                let spec = Spec::plain(dtype, padded);
                let of = |rows, compute| variant(&spec, rows, compute, 227 << 10);
                assert!(of(512, 80).is_none() && of(512, 100).is_none());
                let keys = |rows| of(rows, COMPUTE).map(|(_, tile)| tile.keys);
                assert_eq!(keys(1), keys(1 << 20));
                assert_eq!(keys(512).is_some(), dtype != DType::F32);
            }
        }
    }
}
