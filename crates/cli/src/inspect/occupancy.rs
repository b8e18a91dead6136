//! How many blocks of a kernel a multiprocessor holds at once.

use serde::Serialize;

/// Limits of one multiprocessor (CUDA C++ programming guide, compute capabilities).
struct Limits {
    warps: u32,
    blocks: u32,
    shared: u32,
}

const REGISTERS: u32 = 65_536;
/// Registers are handed out to a warp in this many.
const REGISTER_UNIT: u32 = 256;
/// Shared memory that the system keeps of each block.
const RESERVED: u32 = 1024;

fn limits(compute: i32) -> Limits {
    let (warps, blocks, kib) = match compute {
        80 => (64, 32, 164),
        86 => (48, 16, 100),
        87 => (48, 16, 164),
        89 => (48, 24, 100),
        90 | 100 | 101 | 103 | 110 => (64, 32, 228),
        _ => (48, 24, 100),
    };
    Limits {
        warps,
        blocks,
        shared: kib << 10,
    }
}

/// What bounds the blocks of a kernel on a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Occupancy {
    pub(super) blocks: u32,
    pub(super) warps: u32,
    pub(super) most_warps: u32,
    /// `registers`, `shared memory`, `warps` or `blocks`.
    pub(super) bound: &'static str,
}

/// For `threads` a block that use `registers` each and `shared` bytes together.
pub(super) fn of(compute: i32, threads: u32, registers: u32, shared: u32) -> Occupancy {
    let limits = limits(compute);
    let warps = threads.div_ceil(32).max(1);
    let registers_a_warp = (registers.max(1) * 32).next_multiple_of(REGISTER_UNIT);
    let (blocks, bound) = [
        (limits.blocks, "blocks"),
        (limits.warps / warps, "warps"),
        (REGISTERS / registers_a_warp / warps, "registers"),
        (
            limits.shared / (shared + RESERVED).next_multiple_of(128),
            "shared memory",
        ),
    ]
    .into_iter()
    .min_by_key(|limit| limit.0)
    .unwrap_or((0, "blocks"));
    Occupancy {
        blocks,
        warps: blocks * warps,
        most_warps: limits.warps,
        bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_resource_bounds() {
        let seen = |compute, threads, registers, shared| {
            let occupancy = of(compute, threads, registers, shared);
            (occupancy.blocks, occupancy.bound)
        };
        assert_eq!(seen(80, 128, 240, 55_296), (2, "registers"));
        assert_eq!(seen(80, 128, 64, 80_000), (2, "shared memory"));
        assert_eq!(seen(80, 1024, 32, 0), (2, "warps"));
        assert_eq!(seen(86, 32, 16, 0), (16, "blocks"));
        assert_eq!(seen(90, 128, 168, 70_000), (3, "registers"));
        assert_eq!(of(90, 128, 168, 70_000).warps, 12);
    }
}
