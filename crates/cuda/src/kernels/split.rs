//! Launches of `split.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// SLOTS and TURNS in `split.cu`.
const SLOTS: u32 = 3;
const TURNS: u32 = 8;

/// AT_ONCE in `split.cu`.
fn at_once(padded: u32) -> u32 {
    match padded {
        129.. => 1,
        65..=128 => 2,
        _ => 4,
    }
}

/// The kernel that makes pairs of k and v, whose wider rows have `padded` columns, within `limit` bytes of
/// shared memory.
pub fn variant(padded: u32, limit: u32) -> Variant {
    let spec = Spec::plain(DType::F32, padded);
    let slots = |threads| SLOTS * at_once(padded) * padded.div_ceil(32) * threads * 16;
    // Half of that is less than any device has.
    let threads = if slots(512) <= limit { 512 } else { 256 };
    let macros = [("THREADS", threads as i32)];
    let shared = slots(threads);
    Variant::new(Family::Split, "tw_split", &spec, &macros, threads, shared)
}

/// Rows that a warp makes at a time: PIECE in `split.cu`.
pub fn piece_rows(padded: u32) -> u32 {
    4 * at_once(padded) * TURNS
}
