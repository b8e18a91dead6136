//! The three ways to one softmax.

use proptest::prelude::*;
use tilewise_core::softmax::{Softmax, online, online_blocks, safe};

const EMPTY: f64 = f64::NEG_INFINITY;

proptest! {
    #[test]
    fn all_three_are_the_same(
        scores in proptest::collection::vec(
            prop_oneof![8 => -30f64..30.0, 1 => Just(EMPTY), 1 => -1e5f64..1e5],
            0..40,
        ),
        block in 0usize..12,
    ) {
        let safe = safe(&scores);
        let mut seen = 0;
        let online = online(&scores, |step| {
            assert_eq!(step.scores, seen..seen + 1);
            seen += 1;
        });
        prop_assert_eq!(seen, scores.len());
        let mut steps = 0;
        let blocks = online_blocks(&scores, block, |step| {
            steps += 1;
            assert_eq!(step.m, scores[..step.scores.end].iter().copied().fold(EMPTY, f64::max));
        });
        prop_assert_eq!(steps, scores.len().div_ceil(block.max(1)));
        for other in [online, blocks] {
            prop_assert_eq!(other.m, safe.m);
            prop_assert!((other.l - safe.l).abs() <= 1e-14 * safe.l);
            for (a, b) in other.weights.iter().zip(&safe.weights) {
                prop_assert!((a - b).abs() <= 1e-14 * b);
            }
        }
        if safe.m > EMPTY {
            prop_assert!((safe.weights.iter().sum::<f64>() - 1.0).abs() < 1e-14);
        }
        for (score, weight) in scores.iter().zip(&safe.weights) {
            prop_assert!((*weight == 0.0) || *score > EMPTY);
        }
    }
}

#[test]
fn one_three_two() {
    let mut steps = Vec::new();
    let Softmax { m, l, weights } = online(&[1.0f64, 3.0, 2.0], |step| {
        steps.push((step.m, step.l, step.correction));
    });
    let e = |x: f64| x.exp();
    assert_eq!(steps[0], (1.0, 1.0, 0.0));
    assert_eq!(steps[1], (3.0, 1.0 * e(-2.0) + 1.0, e(-2.0)));
    assert_eq!(steps[2], (3.0, e(-2.0) + 1.0 + e(-1.0), 1.0));
    assert_eq!((m, l), (3.0, steps[2].1));
    assert_eq!(weights, [e(-2.0) / l, 1.0 / l, e(-1.0) / l]);
}

#[test]
fn rows_without_a_number_or_without_a_score() {
    for scores in [&[][..], &[EMPTY], &[EMPTY; 5]] {
        for softmax in [
            safe(scores),
            online(scores, |_| {}),
            online_blocks(scores, 2, |_| {}),
        ] {
            assert_eq!((softmax.m, softmax.l), (EMPTY, 0.0));
            assert!(softmax.weights.iter().all(|&weight| weight == 0.0));
        }
    }
    for bad in [f64::NAN, f64::INFINITY] {
        for at in 0..3 {
            let mut scores = [0.0, EMPTY, 1.0];
            scores[at] = bad;
            for softmax in [
                safe(&scores),
                online(&scores, |_| {}),
                online_blocks(&scores, 2, |_| {}),
            ] {
                assert!(softmax.l.is_nan() && softmax.weights.iter().all(|w| w.is_nan()));
            }
        }
    }
}
