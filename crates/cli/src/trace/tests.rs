//! Traces against the definition, and pages against traces.

use clap::Parser;
use proptest::prelude::*;
use serde_json::Value;

use super::attention::{self, AttentionTrace};
use super::record::Event;
use super::{TraceArgs, page, softmax};
use crate::input::{AnyLoaded, Matrix};

/// The arguments of `tilewise trace ARGS`.
#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: TraceArgs,
}

fn args(words: &[&str]) -> TraceArgs {
    Command::parse_from(["trace"].iter().chain(words)).args
}

fn traced(words: &[&str], [q, k, v]: [&Matrix; 3]) -> AttentionTrace {
    let args = args(words);
    let loaded = crate::input::direct("test", [q, k, v], None, tilewise::DType::F64, &args.problem);
    match loaded.unwrap() {
        AnyLoaded::F64(loaded) => attention::trace(&args, &loaded).unwrap(),
        _ => unreachable!("asked for f64"),
    }
}

/// Softmax attention of one head by definition; `None` where no key is seen.
fn naive(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], causal: bool) -> Vec<Option<Vec<f64>>> {
    let scale = 1.0 / (q[0].len() as f64).sqrt();
    let last = |i: usize| (i + k.len()).checked_sub(q.len()).map(|last| last + 1);
    (q.iter().enumerate())
        .map(|(i, q)| {
            let seen = if causal { last(i)? } else { k.len() };
            let dot = |k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
            let weights: Vec<f64> = k[..seen].iter().map(|k| (dot(k) * scale).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let column = |d: usize| {
                let products = weights.iter().zip(v).map(|(w, v)| w * v[d]);
                products.sum::<f64>() / sum
            };
            Some((0..v[0].len()).map(column).collect())
        })
        .collect()
}

fn matrix(rows: &[Vec<f64>]) -> Matrix {
    Matrix::new(rows.len(), rows[0].len(), rows.concat())
}

fn rows(count: usize, width: usize) -> impl Strategy<Value = Vec<Vec<f64>>> {
    proptest::collection::vec(proptest::collection::vec(-3.0..3.0, width), count)
}

type Case = ([Vec<Vec<f64>>; 3], [usize; 2], bool);

fn case() -> impl Strategy<Value = Case> {
    (1..9usize, 1..9usize, 1..4usize, 1..4usize).prop_flat_map(|(n, nk, d, dv)| {
        let tensors = (rows(n, d), rows(nk, d), rows(nk, dv));
        let blocks = [1..n + 2, 1..nk + 2];
        (
            tensors.prop_map(|(q, k, v)| [q, k, v]),
            blocks,
            any::<bool>(),
        )
    })
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs().max(1.0)
}

proptest! {
    /// What the last recorded event says of every row, and the last recorded state behind it, are
    /// the definition's result; and what was recorded adds up to the totals.
    #[test]
    fn the_traced_final_state_is_the_naive_result((tensors, blocks, causal) in case()) {
        let [q, k, v] = &tensors;
        let expected = naive(q, k, v, causal);
        let words = [
            format!("--block-q={}", blocks[0]),
            format!("--block-k={}", blocks[1]),
            format!("--causal={causal}"),
            format!("--rows=0..{}", q.len()),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let trace = traced(&words, [&matrix(q), &matrix(k), &matrix(v)]);
        prop_assert!(trace.agrees());
        prop_assert_eq!(trace.runs.len(), 3);
        for run in &trace.runs {
            let mut states = vec![None; q.len()];
            let mut finished = 0;
            let (mut loaded, mut stored) = (0, 0);
            for event in &run.events {
                match event {
                    Event::Load(moved) => {
                        prop_assert!(moved.row_block.is_some() || moved.key_block.is_some());
                        loaded += moved.bytes;
                    }
                    Event::Store(moved) => stored += moved.bytes,
                    Event::Step { rows_shown, .. } => {
                        for row in rows_shown {
                            states[row.row] = Some(row);
                        }
                    }
                    Event::Finish { rows_shown, .. } => for row in rows_shown {
                        finished += 1;
                        let Some(expected) = &expected[row.row] else {
                            prop_assert_eq!(row.lse.to_f64(), f64::NEG_INFINITY);
                            continue;
                        };
                        for (out, &expected) in row.out.iter().zip(expected) {
                            prop_assert!(near(out.to_f64(), expected));
                        }
                        let Some(state) = &states[row.row] else {
                            prop_assert_eq!(run.algorithm, "standard");
                            continue;
                        };
                        let divisor = if run.algorithm == "fa2" { state.l.to_f64() } else { 1.0 };
                        prop_assert_eq!(state.block.is_some(), run.algorithm == "fa1");
                        for (o, &expected) in state.o.iter().zip(expected) {
                            prop_assert!(near(o.to_f64() / divisor, expected));
                        }
                        let lse = state.m.to_f64() + state.l.to_f64().ln();
                        prop_assert!(near(lse, row.lse.to_f64()));
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(finished, q.len());
            prop_assert_eq!(run.events_left_out, 0);
            prop_assert_eq!((loaded, stored), (run.totals.loaded_bytes, run.totals.stored_bytes));
        }
    }

    /// What is recorded of a backward pass adds up: every tile's dS sums to 0 over a row's keys, the
    /// finished gradients are complete and pass, and FA1 and FA2 agree about every tile.
    #[test]
    fn the_traced_gradients_are_the_naive_ones((tensors, blocks, causal) in case()) {
        let [q, k, v] = &tensors;
        let words = [
            format!("--block-q={}", blocks[0]),
            format!("--block-k={}", blocks[1]),
            format!("--causal={causal}"),
            format!("--rows=0..{}", q.len()),
            "--backward".into(),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let trace = traced(&words, [&matrix(q), &matrix(k), &matrix(v)]);
        prop_assert!(trace.agrees());
        let mut tiles: Vec<Vec<f64>> = vec![Vec::new(); 3];
        for (run, tiles) in trace.runs.iter().zip(&mut tiles) {
            prop_assert_eq!(run.gradients.len(), 3);
            let (mut loaded, mut stored, mut finished) = (0, 0, [0; 3]);
            let mut sums = vec![0.0; q.len()];
            for event in &run.events {
                match event {
                    Event::Load(moved) => loaded += moved.bytes,
                    Event::Store(moved) => stored += moved.bytes,
                    Event::BackwardStep { rows_shown, .. } => for row in rows_shown {
                        prop_assert_eq!(row.pair.is_some(), run.algorithm == "fa1");
                        for (ds, p) in row.ds.iter().zip(&row.p) {
                            sums[row.row] += ds.to_f64();
                            tiles.extend([ds.to_f64(), p.to_f64()]);
                        }
                    }
                    Event::GradientRow { row, ds, .. } => {
                        sums[*row] += ds.iter().map(|x| x.to_f64()).sum::<f64>();
                    }
                    Event::GradientFinish { tensor, rows, .. } => {
                        let at = ["dq", "dk", "dv"].iter().position(|name| name == tensor);
                        finished[at.unwrap()] += rows[1] - rows[0];
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(finished, [q.len(), k.len(), k.len()]);
            prop_assert_eq!((loaded, stored), (run.totals.loaded_bytes, run.totals.stored_bytes));
            if k.len() <= super::record::COLUMNS {
                prop_assert!(sums.iter().all(|sum| sum.abs() < 1e-10), "{:?}", sums);
            }
        }
        prop_assert_eq!(tiles[1].len(), tiles[2].len());
        for (a, b) in tiles[1].iter().zip(&tiles[2]) {
            prop_assert!((a - b).abs() <= 1e-10 * b.abs().max(1.0), "{a} {b}");
        }
    }

    /// However the scores come, ℓ ends as the safe denominator.
    #[test]
    fn every_softmax_ends_with_the_safe_denominator(
        scores in proptest::collection::vec(
            prop_oneof![9 => -50.0..50.0, 1 => Just(f64::NEG_INFINITY)],
            1..40,
        ),
        block in 1..12usize,
    ) {
        let [safe, online, blocks] = softmax::trace(&scores, block).denominators();
        prop_assert!(near(online, safe), "{} {}", online, safe);
        prop_assert!(near(blocks, safe), "{} {}", blocks, safe);
        let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let direct: f64 = (scores.iter())
            .filter(|&&s| s > f64::NEG_INFINITY)
            .map(|s| (s - m).exp())
            .sum();
        prop_assert!(near(safe, direct));
    }

    /// The page holds the recorded events, all of them and nothing else.
    #[test]
    fn the_page_holds_the_recorded_trace((tensors, blocks, causal) in case()) {
        let words = [
            format!("--block-q={}", blocks[0]),
            format!("--block-k={}", blocks[1]),
            format!("--causal={causal}"),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let [q, k, v] = &tensors;
        let trace = traced(&words, [&matrix(q), &matrix(k), &matrix(v)]);
        let page = page::html(&trace).unwrap();
        let opening = "<script type=\"application/json\" id=\"trace\">";
        let (_, rest) = page.split_once(opening).unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        let held: Value = serde_json::from_str(data).unwrap();
        let recorded: Value = serde_json::from_str(&serde_json::to_string(&trace).unwrap()).unwrap();
        prop_assert_eq!(held, recorded);
    }
}

/// No address, no import, no request: the page works where there is no network.
#[test]
fn the_page_needs_nothing_else() {
    let one = Matrix::new(1, 1, vec![1.0]);
    let page = page::html(&traced(&[], [&one, &one, &one])).unwrap();
    // The namespace of SVG is a name, not an address that is read.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for word in [
        "http:", "https:", "//cdn", "<link", "@import", "src=", "fetch(", "url(h",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'"));
}

/// A text from a file's name cannot end the element that holds the trace.
#[test]
fn the_page_keeps_markup_in_names_as_text() {
    let one = Matrix::new(1, 1, vec![1.0]);
    let mut trace = traced(&[], [&one, &one, &one]);
    let elements = page::html(&trace).unwrap().matches("<script").count();
    trace.inputs = vec!["</script><script>alert(1)</script>".into()];
    let page = page::html(&trace).unwrap();
    assert_eq!(page.matches("<script").count(), elements);
}

#[test]
fn what_goes_beyond_the_recorded_events_is_counted() {
    let n = 40;
    let wide = Matrix::new(n, 1, (0..n).map(|x| (x % 7) as f64).collect());
    let trace = traced(&["--block-q=1", "--block-k=1"], [&wide, &wide, &wide]);
    for run in &trace.runs {
        let elements: usize = (run.totals.tensors["q"].loaded_bytes) / 8;
        assert_eq!(elements, if run.algorithm == "fa1" { n * n } else { n });
        assert_eq!(
            run.events_left_out > 0,
            run.algorithm == "fa1",
            "{}",
            run.algorithm
        );
    }
}
