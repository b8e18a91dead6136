//! Launches of `split.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// The kernel that makes pairs of k and v, whose wider rows have `padded` columns.
pub fn variant(padded: u32) -> Variant {
    let spec = Spec::plain(DType::F32, padded);
    Variant::new(Family::Split, "tw_split", &spec, &[], 256, 0)
}
