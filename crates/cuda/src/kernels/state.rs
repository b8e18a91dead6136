//! Launches of `state.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// The kernels of the family.
pub const ENTRIES: [&str; 4] = [
    "tw_state_begin",
    "tw_state_merge",
    "tw_state_finish",
    "tw_fill_normal",
];

/// The variant of one of [`ENTRIES`] for `dtype`.
pub fn variant(entry: &'static str, dtype: DType) -> Variant {
    Variant::new(Family::State, entry, &Spec::plain(dtype, 64), &[], 256, 0)
}
