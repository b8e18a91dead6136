//! ALiBi slopes (Press, Smith and Lewis 2022, "Train Short, Test Long", section 3).

/// The paper's slopes for `num_heads` heads.
///
/// For a power of two n they are 2^(−8/n), 2^(−16/n), …; for any other count, those of the next
/// lower power of two p, followed by every other slope of 2p.
pub fn alibi_slopes(num_heads: usize) -> Vec<f32> {
    fn geometric(n: usize) -> impl Iterator<Item = f64> {
        (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2())
    }
    if num_heads == 0 {
        return Vec::new();
    }
    let lower = if num_heads.is_power_of_two() {
        num_heads
    } else {
        num_heads.next_power_of_two() / 2
    };
    geometric(lower)
        .chain(geometric(2 * lower).step_by(2))
        .take(num_heads)
        .map(|slope| slope as f32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_geometric() {
        assert_eq!(
            alibi_slopes(8),
            (1..=8).map(|i| 0.5f32.powi(i)).collect::<Vec<_>>()
        );
        assert!(alibi_slopes(0).is_empty());
        assert_eq!(alibi_slopes(1), [2f32.powi(-8)]);
    }

    #[test]
    fn other_counts_interleave_the_doubled_list() {
        let twelve = alibi_slopes(12);
        assert_eq!(twelve[..8], alibi_slopes(8)[..]);
        let sixteen = alibi_slopes(16);
        assert_eq!(
            twelve[8..],
            [sixteen[0], sixteen[2], sixteen[4], sixteen[6]]
        );
    }
}
