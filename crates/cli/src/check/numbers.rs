//! The input numbers of the conformance set: SplitMix64 in counter form, small binary fractions.

use tilewise::Element;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    })
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// `count` elements of tensor `name` under `seed`: bell-shaped multiples of 1/64 below 2, which
/// every element type holds exactly.
pub(super) fn grid<T: Element>(seed: u64, name: &str, count: usize) -> Vec<T> {
    let start = fnv1a(&format!("{seed}/{name}"));
    (1..=count as u64)
        .map(|n| {
            let x = mix(start.wrapping_add(n.wrapping_mul(GOLDEN)));
            let sum: u64 = (0..4).map(|field| (x >> (6 * field)) & 63).sum();
            T::from_f64((sum as f64 - 126.0) / 64.0)
        })
        .collect()
}
