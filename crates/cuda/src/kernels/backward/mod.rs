//! The backward kernels: FlashAttention-2's, the same on Hopper, and the two it is measured against.

use super::{Spec, Variant, pad};

pub mod fa1;
pub mod fa2;
pub mod hopper;
pub mod standard;
pub mod wide;

/// head_dims as the tiles of the backward pass hold them. Where they differ they are multiples of 32,
/// which every tile divides into fragments.
pub(crate) fn widths(spec: &Spec) -> Spec {
    let even = |padded: u32| match spec.padded == spec.padded_v {
        true => padded,
        false => padded.next_multiple_of(32),
    };
    Spec {
        padded: even(spec.padded),
        padded_v: even(spec.padded_v),
        ..*spec
    }
}

/// Every kernel that `fa2` and `standard` may need for heads of `head_dim` columns, more than 256.
pub fn wide_variants(
    spec: &Spec,
    head_dim: usize,
    limit: u32,
    compute: i32,
) -> Vec<Option<Variant>> {
    use standard::Part;
    let mut all = vec![fa2::prepare(spec, limit, compute)];
    match wide::cut(spec, [head_dim; 2], limit) {
        Some(cut) => all.extend([Some(cut.keys), Some(cut.rows)]),
        None => all.push(None),
    }
    all.push(standard::variant(spec, limit, Part::Weights, spec.padded));
    let mut widths = vec![standard::SLICE.min(head_dim), head_dim % standard::SLICE];
    widths.retain(|&width| width > 0);
    for wide in widths {
        for part in [Part::Scores, Part::Rows, Part::Keys] {
            all.push(pad(wide).and_then(|wide| standard::variant(spec, limit, part, wide)));
        }
    }
    all
}

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
