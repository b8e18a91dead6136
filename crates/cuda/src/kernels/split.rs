//! Launches of `split.cu`.

use tilewise_core::DType;

use super::{Family, Spec, Variant};

/// The kernel that makes pairs of q, k and v.
pub fn variant() -> Variant {
    let spec = Spec::plain(DType::F32, 64);
    Variant::new(Family::Split, "tw_split", &spec, &[], 256, 0)
}
