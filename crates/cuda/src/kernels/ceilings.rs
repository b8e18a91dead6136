//! Launches of `ceilings.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// Threads a block of every kernel here.
pub(crate) const THREADS: u32 = 256;
/// Instructions of a warp and round of `tw_ceiling_mma`, of a warpgroup and round of
/// `tw_ceiling_wgmma`: CHAINS there.
pub(crate) const CHAINS: u64 = 8;
/// Fused multiply-adds of a thread and round.
pub(crate) const FMAS: u64 = 2 * CHAINS;
/// 16-byte words that a block has on their way at once.
pub(crate) const STREAM: u64 = 8 * THREADS as u64;

fn of(entry: &'static str, dtype: DType, wgmma: bool) -> Variant {
    Variant::new(
        Family::Ceilings,
        entry,
        &Spec::plain(dtype, 64),
        &[("WGMMA", i32::from(wgmma))],
        THREADS,
        0,
    )
}

/// `mma.sync` of bf16 or f16, of f32 as tf32.
pub fn mma(dtype: DType) -> Variant {
    of("tw_ceiling_mma", dtype, false)
}

/// `wgmma` of the same types: an instruction of compute capability 9.0 alone.
pub fn wgmma(dtype: DType) -> Variant {
    of("tw_ceiling_wgmma", dtype, true)
}

/// FFMA.
pub fn fma() -> Variant {
    of("tw_ceiling_fma", DType::F32, false)
}

/// Reading device memory.
pub fn read() -> Variant {
    of("tw_ceiling_read", DType::F32, false)
}

/// Reading and writing it.
pub fn copy() -> Variant {
    of("tw_ceiling_copy", DType::F32, false)
}

/// Those that concern `dtype` on a compute capability.
pub(crate) fn list(compute: i32, dtype: DType) -> Vec<Variant> {
    let mut all = vec![mma(dtype), fma(), read(), copy()];
    if compute == 90 {
        all.push(wgmma(dtype));
    }
    all
}
