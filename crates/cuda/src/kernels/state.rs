//! Launches of `state.cu`.

use tilewise_core::DType;

use super::{Family, Score, Spec, Variant};

/// The kernels of the family.
pub const ENTRIES: [&str; 4] = [
    "tw_state_begin",
    "tw_state_merge",
    "tw_state_finish",
    "tw_fill_normal",
];

/// The variant of one of [`ENTRIES`] for `dtype`.
pub fn variant(entry: &'static str, dtype: DType) -> Variant {
    // A state's m is in natural units.
    let spec = Spec {
        score: Score::Applied,
        ..Spec::plain(dtype, 64)
    };
    Variant::new(Family::State, entry, &spec, &[], 256, 0)
}
