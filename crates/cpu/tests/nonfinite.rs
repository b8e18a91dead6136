//! NaN, infinities, and numbers at the ends of their range.

mod common;

use common::{backends, run};
use tilewise_core::{Algorithm, Inputs, Options, Problem, TensorView};
use tilewise_cpu::{CpuBackend, CpuElement};
use tilewise_testkit::Noise;

const SHAPE: [usize; 4] = [1, 2, 40, 24];

fn numbers(seed: u64) -> Vec<f32> {
    let mut noise = Noise(seed);
    (0..SHAPE.iter().product())
        .map(|_| noise.normal() as f32)
        .collect()
}

fn each(mut test: impl FnMut(&CpuBackend, Algorithm)) {
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            test(&backend, algorithm);
        }
    }
}

fn forward<T: CpuElement>(
    backend: &CpuBackend,
    algorithm: Algorithm,
    options: &Options,
    [q, k, v]: [&[T]; 3],
    mask: Option<&[u8]>,
) -> (Vec<T>, Vec<f32>) {
    let [b, h, s, _] = SHAPE;
    let view = |data| TensorView::bhsd(data, SHAPE).unwrap();
    let mask = mask.map(|mask| TensorView::bhsd(mask, [b, 1, 1, s]).unwrap());
    assert_eq!(h, 2);
    let inputs = Inputs::new(view(q), view(k), view(v)).mask(mask);
    let problem = Problem::new(&inputs, options).unwrap();
    run(backend, &problem, &inputs, algorithm)
}

#[test]
fn nan_in_a_query_stays_in_its_row() {
    let (mut q, k, v) = (numbers(1), numbers(2), numbers(3));
    each(|backend, algorithm| {
        let clean = forward(backend, algorithm, &Options::new(), [&q, &k, &v], None);
        let at = 17 * SHAPE[3] + 5;
        let before = std::mem::replace(&mut q[at], f32::NAN);
        let (out, lse) = forward(backend, algorithm, &Options::new(), [&q, &k, &v], None);
        q[at] = before;
        for (row, lse) in lse.iter().enumerate() {
            let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
            if row == 17 {
                assert!(out[part].iter().all(|x| x.is_nan()) && lse.is_nan());
            } else {
                assert_eq!(out[part.clone()], clean.0[part]);
                assert_eq!(*lse, clean.1[row]);
            }
        }
    });
}

#[test]
fn what_is_hidden_does_not_leak_even_if_it_is_nan() {
    let (q, mut k, mut v) = (numbers(1), numbers(2), numbers(3));
    let mask: Vec<u8> = (0..SHAPE[2]).map(|j| u8::from(j != 9 && j != 30)).collect();
    let hidden = [
        (None, 33..40, true),
        (Some(&mask[..]), 9..10, false),
        (Some(&mask[..]), 30..31, false),
    ];
    for (mask, keys, causal) in hidden {
        let options = Options::new().causal(causal);
        each(|backend, algorithm| {
            let clean = forward(backend, algorithm, &options, [&q, &k, &v], mask);
            for poison in [f32::NAN, f32::INFINITY] {
                let (old_k, old_v) = (k.clone(), v.clone());
                for head in 0..2 {
                    for key in keys.clone() {
                        let at = (head * SHAPE[2] + key) * SHAPE[3];
                        k[at..at + SHAPE[3]].fill(poison);
                        v[at..at + SHAPE[3]].fill(poison);
                    }
                }
                let (out, _) = forward(backend, algorithm, &options, [&q, &k, &v], mask);
                (k, v) = (old_k, old_v);
                for row in 0..2 * SHAPE[2] {
                    let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
                    // Causal rows before the poisoned keys; with a mask, all rows.
                    if !causal || row % SHAPE[2] < keys.start {
                        assert_eq!(out[part.clone()], clean.0[part], "{algorithm} row {row}");
                    } else {
                        assert!(
                            out[part].iter().all(|x| x.is_nan()),
                            "{algorithm} row {row}"
                        );
                    }
                }
            }
        });
    }
}

#[test]
fn nan_in_a_visible_value_reaches_that_component_only() {
    let (q, k, mut v) = (numbers(1), numbers(2), numbers(3));
    v[3 * SHAPE[3] + 7] = f32::NAN;
    v[5 * SHAPE[3] + 8] = f32::INFINITY;
    each(|backend, algorithm| {
        let (out, lse) = forward(backend, algorithm, &Options::new(), [&q, &k, &v], None);
        assert!(lse.iter().all(|x| x.is_finite()));
        for (at, x) in out.iter().enumerate() {
            let (row, component) = (at / SHAPE[3], at % SHAPE[3]);
            match (row < SHAPE[2], component) {
                (true, 7) => assert!(x.is_nan()),
                (true, 8) => assert_eq!(*x, f32::INFINITY),
                _ => assert!(x.is_finite()),
            }
        }
    });
}

#[test]
fn an_infinite_score_makes_its_row_nan() {
    let (mut q, mut k, v) = (numbers(1), numbers(2), numbers(3));
    // Rows see key 12 through one component only.
    for (row, q) in q.chunks_mut(SHAPE[3]).enumerate() {
        q[0] = if row % SHAPE[2] == 4 { 1.0 } else { 0.0 };
    }
    k[12 * SHAPE[3]] = 3e38;
    let options = Options::new().softmax_scale(2.0);
    each(|backend, algorithm| {
        let (out, _) = forward(backend, algorithm, &options, [&q, &k, &v], None);
        for (row, out) in out.chunks(SHAPE[3]).enumerate() {
            let expected = row == 4;
            // 3e38 itself is a number and takes all the weight; times the scale it is not.
            if expected {
                assert!(
                    out.iter()
                        .zip(&v[12 * SHAPE[3]..])
                        .all(|(x, v)| x == v || x.is_nan())
                );
            } else {
                assert!(out.iter().all(|x| x.is_finite()));
            }
        }
        q[4 * SHAPE[3]] = f32::INFINITY;
        k[12 * SHAPE[3]] = 1.0;
        let (out, lse) = forward(backend, algorithm, &options, [&q, &k, &v], None);
        q[4 * SHAPE[3]] = 1.0;
        k[12 * SHAPE[3]] = 3e38;
        assert!(lse[4].is_nan() || lse[4] == f32::INFINITY);
        assert!(out[4 * SHAPE[3]..5 * SHAPE[3]].iter().all(|x| x.is_nan()));
        assert!(out[5 * SHAPE[3]..].iter().all(|x| x.is_finite()));
    });
}

#[test]
fn huge_scores_pick_the_largest_and_tiny_scales_average() {
    let (q, k, v) = (numbers(1), numbers(2), numbers(3));
    let [_, _, s, d] = SHAPE;
    each(|backend, algorithm| {
        let options = Options::new().softmax_scale(1e30);
        let (out, _) = forward(backend, algorithm, &options, [&q, &k, &v], None);
        for row in 0..s {
            let dot = |key: usize| -> f64 {
                (0..d)
                    .map(|x| f64::from(q[row * d + x]) * f64::from(k[key * d + x]))
                    .sum()
            };
            let best = (0..s).max_by(|&a, &b| dot(a).total_cmp(&dot(b))).unwrap();
            assert_eq!(out[row * d..(row + 1) * d], v[best * d..(best + 1) * d]);
        }
        for scale in [0.0, 1e-44, -1e-44, 1e-300] {
            let options = Options::new().softmax_scale(scale);
            let (out, lse) = forward(backend, algorithm, &options, [&q, &k, &v], None);
            for component in 0..d {
                let mean = (0..s)
                    .map(|key| f64::from(v[key * d + component]))
                    .sum::<f64>()
                    / s as f64;
                assert!(
                    (f64::from(out[component]) - mean).abs() < 1e-6,
                    "{algorithm} {scale}"
                );
            }
            assert!((f64::from(lse[0]) - (s as f64).ln()).abs() < 1e-5);
        }
    });
}

#[test]
fn few_queries_neither_read_nor_leak_what_is_hidden() {
    let (q, mut k, mut v) = (numbers(1), numbers(2), numbers(3));
    let [_, heads, keys, d] = SHAPE;
    let mask: Vec<u8> = (0..keys).map(|j| u8::from(j != 9)).collect();
    let mask = TensorView::bhsd(&mask, [1, 1, 1, keys]).unwrap();
    let used = [37];
    let rows = 3;
    let run = |backend: &CpuBackend, algorithm, k: &[f32], v: &[f32]| {
        let view = |data| TensorView::bhsd(data, SHAPE).unwrap();
        let q = view(&q).narrow(2, 0..rows);
        let inputs = Inputs::new(q, view(k), view(v)).mask(mask).seqused_k(&used);
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        run(backend, &problem, &inputs, algorithm)
    };
    each(|backend, algorithm| {
        let (clean, clean_lse) = run(backend, algorithm, &k, &v);
        assert!(clean.iter().all(|x| x.is_finite()));
        let (old_k, old_v) = (k.clone(), v.clone());
        for head in 0..heads {
            for key in [9, 37, 38, 39] {
                let at = (head * keys + key) * d;
                k[at..at + d].fill(f32::NAN);
                v[at..at + d].fill(f32::NAN);
            }
        }
        let (out, lse) = run(backend, algorithm, &k, &v);
        // The careful way adds in another order of the same steps: bits may differ by rounding.
        for (a, b) in out.iter().zip(&clean) {
            assert!((a - b).abs() < 1e-6, "{algorithm}: {a} {b}");
        }
        assert_eq!(lse, clean_lse);
        // A visible NaN does reach its component, in its head only.
        v[(keys + 20) * d + 4] = f32::NAN;
        let (out, _) = run(backend, algorithm, &k, &v);
        for (at, x) in out.iter().enumerate() {
            assert_eq!(
                x.is_nan(),
                at / (rows * d) == 1 && at % d == 4,
                "{algorithm}"
            );
        }
        (k, v) = (old_k, old_v);
    });
}
