//! Launches of `pack.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// The kernels of the family.
pub const ENTRIES: [&str; 2] = ["tw_pack", "tw_clear_rows"];

/// The variant of one of [`ENTRIES`] for `dtype`.
pub fn variant(entry: &'static str, dtype: DType) -> Variant {
    Variant::new(Family::Pack, entry, &Spec::plain(dtype, 64), &[], 256, 0)
}
