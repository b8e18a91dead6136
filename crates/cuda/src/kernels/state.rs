//! Launches of `state.cu`.

use tilewise_core::DType;

use super::{Family, Mask, Spec, Variant};

/// The kernels of the family.
pub const ENTRIES: [&str; 4] = [
    "tw_state_begin",
    "tw_state_merge",
    "tw_state_finish",
    "tw_fill_normal",
];

/// The variant of one of [`ENTRIES`] for `dtype`.
pub fn variant(entry: &'static str, dtype: DType) -> Variant {
    Variant::new(
        Family::State,
        entry,
        &Spec {
            dtype,
            padded: 64,
            mask: Mask::Full,
            score: false,
            aligned: true,
        },
        &[],
        256,
        0,
    )
}
