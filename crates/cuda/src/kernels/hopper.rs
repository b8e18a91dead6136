//! Tiles and launches of `hopper.cu`.

use tilewise_core::DType;

use super::{Family, Score, Spec, Variant};

/// The only compute capability that has these instructions.
pub const COMPUTE: i32 = 90;

/// How a block of `tw_hopper` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// head_dim it is for.
    pub head_dim: u32,
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

    /// Shared memory of a block in bytes: Q, the rings, the output, barriers and a spare word.
    const fn shared(&self) -> u32 {
        let rows = self.rows() * self.head_dim * 2;
        let rings = self.stages * 2 * self.keys * self.head_dim * 2;
        rows + rings + if self.own { rows } else { 0 } + 16 + self.stages * 32 + 16
    }
}

/// Rows up to which blocks of fewer of them are used, where there is a choice: the last one is then less
/// often half empty.
const SHORT: usize = 1024;

/// All registers of a multiprocessor are given out: those of the producer's threads and of the others'. By
/// measurement on an H200; of one head_dim the tiles differ in rows alone, on which no bit depends.
const TILES: [Tile; 4] = [
    Tile {
        head_dim: 64,
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [24, 240],
        own: true,
    },
    Tile {
        head_dim: 64,
        groups: 3,
        keys: 128,
        stages: 2,
        registers: [32, 160],
        own: true,
    },
    Tile {
        head_dim: 128,
        groups: 2,
        keys: 128,
        stages: 2,
        registers: [24, 240],
        own: true,
    },
    Tile {
        head_dim: 256,
        groups: 2,
        keys: 80,
        stages: 2,
        registers: [24, 240],
        own: false,
    },
];

/// The tile for `spec` and sequences of up to `rows` rows, where this family serves it. Whether it does
/// depends on neither lengths nor batch, so a row's bits do not.
pub fn tile(spec: &Spec, rows: usize) -> Option<Tile> {
    let served = matches!(spec.dtype, DType::F16 | DType::BF16)
        && spec.padded == spec.padded_v
        && spec.score != Score::Modified
        && !spec.dropout
        && spec.aligned;
    let mut fit = TILES
        .into_iter()
        .filter(|tile| served && tile.head_dim == spec.padded);
    match rows <= SHORT {
        true => fit.next(),
        false => fit.next_back(),
    }
}

/// The variant for `spec` and sequences of up to `rows` rows on a device of compute capability `compute`
/// with `limit` bytes of shared memory a block; `None` where `fa2.cu` is to serve.
pub fn variant(spec: &Spec, rows: usize, compute: i32, limit: u32) -> Option<(Variant, Tile)> {
    let tile = tile(spec, rows).filter(|tile| compute == COMPUTE && tile.shared() <= limit)?;
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
        tile.shared(),
    );
    Some((variant, tile))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_hopper() {
        for tile in TILES {
            let [give, take] = tile.registers;
            // setmaxnreg takes multiples of 8 from 24 to 256; a launch gets 65536 registers at most.
            for n in [give, take] {
                assert!(n % 8 == 0 && (24..=256).contains(&n));
            }
            assert!((give + tile.groups * take) * 128 <= 65536, "{tile:?}");
            assert!(tile.shared() <= super::super::shared_limit(COMPUTE));
            // Panels start at multiples of 1024 bytes, and sixteen keys are one step of a product.
            assert!((tile.keys * 128) % 1024 == 0 && tile.keys % 16 == 0);
        }
    }

    /// Law 6: where rows are cut differently, keys are not.
    #[test]
    fn tiles_of_keys_do_not_depend_on_lengths() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for padded in super::super::PADDED {
                let spec = Spec::plain(dtype, padded);
                let of = |rows, compute| variant(&spec, rows, compute, 227 << 10);
                assert!(of(512, 80).is_none() && of(512, 100).is_none());
                let keys = |rows| of(rows, COMPUTE).map(|(_, tile)| tile.keys);
                assert_eq!(keys(1), keys(1 << 20));
                let served = dtype != DType::F32 && [64, 128, 256].contains(&padded);
                assert_eq!(keys(512).is_some(), served);
            }
        }
    }
}
