//! The backward kernels: FlashAttention-2's, the same on Hopper, and the two it is measured against.

use super::{Spec, Variant};

pub mod fa1;
pub mod fa2;
pub mod hopper;
pub mod standard;

/// Every kernel of `standard` and `fa1` that `spec` may need.
pub fn baselines(spec: &Spec, limit: u32, compute: i32) -> Vec<Option<Variant>> {
    use standard::Part;
    let mut all = match fa1::variants(spec, limit) {
        Some(([statistics, gradients], tile)) => {
            let store = tile.store_dq(spec, compute);
            vec![Some(statistics), Some(gradients), Some(store)]
        }
        None => vec![None],
    };
    let parts = [
        (Part::Scores, spec.padded),
        (Part::Scores, spec.padded_v),
        (Part::Weights, spec.padded),
        (Part::Rows, spec.padded),
        (Part::Keys, spec.padded),
        (Part::Keys, spec.padded_v),
    ];
    all.extend(
        parts
            .into_iter()
            .map(|(part, wide)| standard::variant(spec, limit, part, wide)),
    );
    for broadcast in [false, true] {
        all.extend(standard::bias(spec, broadcast).map(Some));
    }
    all
}
