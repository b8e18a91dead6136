//! The laws of the online softmax (ARCHITECTURE.md), on every backend and across backends.

use std::ops::Range;

use proptest::prelude::*;
use tilewise::{
    Algorithm, AnyKeyBlock, DType, Element, Engine, HostState, Inputs, Options, Problem,
    RunningState, TensorView, TensorViewMut,
};

use crate::support::{Case, Data, Sequences, case, cases, engines, unless_refused};

/// Problems whose keys can be streamed: one length for all.
fn streamable(dtype: DType) -> impl Strategy<Value = Case> {
    case(dtype).prop_map(|mut case| {
        case.sequences = Sequences::Dense;
        case
    })
}

/// Cuts 0..n at the given shares.
fn parts(n: usize, cuts: &[usize]) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = cuts.iter().map(|c| n * c / 100).chain([n]).collect();
    ends.sort_unstable();
    let mut start = 0;
    ends.into_iter()
        .map(|end| {
            let part = start..end;
            start = end;
            part
        })
        .collect()
}

/// The keys of one part, with their share of bias and mask.
fn block<'a, T: Element>(data: &'a Data<T>, keys: Range<usize>) -> AnyKeyBlock<'a> {
    fn slice<'a, U: Copy>(view: TensorView<'a, U>, keys: &Range<usize>) -> TensorView<'a, U> {
        if view.shape()[3] == 1 {
            view // broadcast over keys
        } else {
            view.narrow(3, keys.clone())
        }
    }
    let bias = data.bias.as_ref().map(|b| T::erase(slice(b.view(), &keys)));
    let mask = data.mask.as_ref().map(|m| slice(m.view(), &keys));
    AnyKeyBlock {
        q: T::erase(data.q.view()),
        k: T::erase(data.k.view().narrow(2, keys.clone())),
        v: T::erase(data.v.view().narrow(2, keys.clone())),
        first_key: keys.start,
        bias,
        mask,
    }
}

fn finish<T: Element>(problem: &Problem, state: Box<dyn RunningState>) -> (Vec<T>, Vec<f32>) {
    let dims = problem.dims();
    let mut out = vec![T::default(); dims.out_shape().iter().product()];
    let mut lse = vec![0f32; dims.lse_shape().iter().product()];
    state
        .finish(
            T::erase_mut(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap()),
            Some(TensorViewMut::bhs(&mut lse, dims.lse_shape()).unwrap()),
        )
        .unwrap();
    (out, lse)
}

/// Laws 1 and 2: keys in parts, some absorbed one after another, some in states of their own, on
/// whichever engine, in any order, merged: naive softmax attention.
fn partition<T: Element>(case: &Case, cuts: &[usize], order: u64) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let judged = data.judge();
    let problem = Problem::dense(case.dims(), case.dtype, &data.options).unwrap();
    // A backend may refuse a state, or bias and mask in one, though it computes the whole; the CPU refuses nothing here.
    let takes = |name: &str, engine: &Engine| {
        let all = block(&data, 0..case.seqlen_k);
        let tried = engine.begin(&problem).and_then(|mut s| s.absorb(&all));
        unless_refused(name, tried).is_some()
    };
    let engines: Vec<_> = engines()
        .into_iter()
        .filter(|(name, engine)| takes(name, engine))
        .collect();
    let mut parts = parts(case.seqlen_k, cuts);
    let turn = order as usize % parts.len();
    parts.rotate_left(turn);
    if order % 2 == 1 {
        parts.reverse();
    }
    for (n, (name, engine)) in engines.iter().enumerate() {
        let mut state = engine.begin(&problem).unwrap();
        for (p, keys) in parts.iter().enumerate() {
            if (order >> p) & 2 == 0 {
                state.absorb(&block(&data, keys.clone())).unwrap();
            } else {
                // A state of its own, on the next engine of the list.
                let (_, other) = &engines[(n + p) % engines.len()];
                let mut part = other.begin(&problem).unwrap();
                part.absorb(&block(&data, keys.clone())).unwrap();
                state.merge(&part.export().unwrap()).unwrap();
            }
        }
        // begin is the identity of merge, from either side.
        let dims = case.dims();
        state
            .merge(&HostState::empty(dims.lse_shape(), dims.head_dim_v).unwrap())
            .unwrap();
        let mut whole = engine.begin(&problem).unwrap();
        whole.merge(&state.export().unwrap()).unwrap();
        let (out, lse) = finish::<T>(&problem, whole);
        judged.agrees(name, &out, &lse)?;
    }
    Ok(())
}

/// Law 3: a constant on every score changes L by it, and O not at all.
fn shift(case: &Case, constant: f64) -> Result<(), TestCaseError> {
    let mut case = case.clone();
    case.bias = None;
    case.sinks = false;
    let data = case.data::<f64>();
    let constants = [constant];
    let bias = TensorView::bhsd(&constants, [1, 1, 1, 1]).unwrap();
    for (name, engine) in engines() {
        for algorithm in Algorithm::ALL {
            let plain = data.inputs();
            if supported(&name, &engine, algorithm, &plain.bias(bias), &data.options).is_none() {
                continue;
            }
            let a = engine
                .forward_with(algorithm, &plain, &data.options)
                .unwrap();
            let b = engine
                .forward_with(algorithm, &plain.bias(bias), &data.options)
                .unwrap();
            for (x, y) in a.out.iter().zip(&b.out) {
                prop_assert!(
                    (x - y).abs() <= 1e-11 || x.is_nan() && y.is_nan(),
                    "{name} {algorithm}: {x} {y}"
                );
            }
            for (x, y) in a.lse.iter().zip(&b.lse) {
                let moved = f64::from(*x) + constant;
                let close = (moved - f64::from(*y)).abs() <= 1e-5 * (1.0 + moved.abs());
                prop_assert!(
                    close || (x == y && x.is_infinite()),
                    "{name} {algorithm}: {x} {y}"
                );
            }
        }
    }
    Ok(())
}

fn supported<T: Element>(
    name: &str,
    engine: &Engine,
    algorithm: Algorithm,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Option<Problem> {
    let problem = Problem::new(inputs, options).unwrap();
    let supported = engine.backend().supports(&problem, algorithm);
    unless_refused(name, supported).map(|()| problem)
}

/// Law 5: the weights of a row sum to one, less the sink's share; to 0 where nothing is live.
fn weights(case: &Case) -> Result<(), TestCaseError> {
    let mut data = case.data::<f32>();
    for x in &mut data.v.data {
        if !x.is_nan() {
            *x = 1.0;
        }
    }
    let inputs = data.inputs();
    let [_, heads, rows] = case.dims().lse_shape();
    for (name, engine) in engines() {
        for algorithm in Algorithm::ALL {
            if supported(&name, &engine, algorithm, &inputs, &data.options).is_none() {
                continue;
            }
            let attention = engine
                .forward_with(algorithm, &inputs, &data.options)
                .unwrap();
            for (row, lse) in attention.lse.iter().enumerate() {
                let head = row / rows.max(1) % heads.max(1);
                let sink = data
                    .options
                    .get_sinks()
                    .map_or(f32::NEG_INFINITY, |s| s[head]);
                let expected = if *lse == f32::NEG_INFINITY {
                    0.0
                } else {
                    1.0 - (sink - lse).exp()
                };
                let out = &attention.out[row * case.head_dim_v..][..case.head_dim_v];
                for x in out {
                    prop_assert!(
                        (x - expected).abs() < 1e-4,
                        "{name} {algorithm}: row {row} sums to {x}, not {expected}"
                    );
                }
            }
        }
    }
    Ok(())
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.to_f64().to_bits()).collect()
}

/// Law 6: run twice, on one, two and three threads, alone or in a batch: the same bits.
fn same_bits<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let inputs = data.inputs();
    for (name, engine) in engines() {
        for algorithm in Algorithm::ALL {
            if supported(&name, &engine, algorithm, &inputs, &data.options).is_none() {
                continue;
            }
            let run = |inputs: &Inputs<'_, T>| {
                engine
                    .forward_with(algorithm, inputs, &data.options)
                    .unwrap()
            };
            let whole = run(&inputs);
            let (out, lse) = (bits(&whole.out), bits(&whole.lse));
            for threads in 1..=3 {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                let again = pool.install(|| run(&inputs));
                prop_assert_eq!(
                    &bits(&again.out),
                    &out,
                    "{} {}: {} threads",
                    name,
                    algorithm,
                    threads
                );
                prop_assert_eq!(
                    &bits(&again.lse),
                    &lse,
                    "{} {}: {} threads",
                    name,
                    algorithm,
                    threads
                );
            }
            if case.dims().batch < 2 || matches!(case.sequences, Sequences::Paged(..)) {
                continue;
            }
            for b in 0..case.batch {
                let mut alone = inputs;
                let entry = b..b + 1;
                alone.q = alone.q.narrow(0, entry.clone());
                alone.k = alone.k.narrow(0, entry.clone());
                alone.v = alone.v.narrow(0, entry.clone());
                let mine = |view: TensorView<'_, T>| view.shape()[0] > 1;
                alone.bias = alone.bias.map(|x| {
                    if mine(x) {
                        x.narrow(0, entry.clone())
                    } else {
                        x
                    }
                });
                alone.mask = alone.mask.map(|x| {
                    if x.shape()[0] > 1 {
                        x.narrow(0, entry.clone())
                    } else {
                        x
                    }
                });
                alone.lengths.seqused_k = alone.lengths.seqused_k.map(|u| &u[entry.clone()]);
                let one = run(&alone);
                let (n, m) = (one.out.len(), one.lse.len());
                prop_assert_eq!(
                    &bits(&one.out)[..],
                    &out[b * n..][..n],
                    "{} {}: entry {} alone",
                    name,
                    algorithm,
                    b
                );
                prop_assert_eq!(
                    &bits(&one.lse)[..],
                    &lse[b * m..][..m],
                    "{} {}: entry {} alone",
                    name,
                    algorithm,
                    b
                );
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_partition_of_the_keys_f32(case in streamable(DType::F32), cuts in proptest::collection::vec(0usize..=100, 0..5), order in any::<u64>()) {
        partition::<f32>(&case, &cuts, order)?;
    }

    #[test]
    fn any_partition_of_the_keys_f64(case in streamable(DType::F64), cuts in proptest::collection::vec(0usize..=100, 0..5), order in any::<u64>()) {
        partition::<f64>(&case, &cuts, order)?;
    }

    #[test]
    fn any_partition_of_the_keys_bf16(case in streamable(DType::BF16), cuts in proptest::collection::vec(0usize..=100, 0..5), order in any::<u64>()) {
        partition::<tilewise::half::bf16>(&case, &cuts, order)?;
    }

    #[test]
    fn a_constant_on_every_score_moves_only_lse(case in case(DType::F64), constant in -50.0..50.0f64) {
        shift(&case, constant)?;
    }

    #[test]
    fn the_weights_of_a_row_sum_to_one(case in case(DType::F32)) {
        weights(&case)?;
    }

    #[test]
    fn the_same_bits_whatever_threads_and_batch_f32(case in case(DType::F32)) {
        same_bits::<f32>(&case)?;
    }

    #[test]
    fn the_same_bits_whatever_threads_and_batch_f16(case in case(DType::F16)) {
        same_bits::<tilewise::half::f16>(&case)?;
    }
}

/// A problem posed with a mask cannot be streamed without it.
#[test]
fn a_mask_cannot_be_forgotten_on_the_way() {
    let (zeros, hidden) = ([0f32; 8], [0u8; 1]);
    let view = TensorView::bhsd(&zeros, [1, 1, 2, 4]).unwrap();
    let mask = TensorView::bhsd(&hidden, [1, 1, 1, 1]).unwrap();
    let inputs = Inputs::new(view, view, view).mask(mask);
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let block = |mask| AnyKeyBlock {
        q: f32::erase(view),
        k: f32::erase(view),
        v: f32::erase(view),
        first_key: 0,
        bias: None,
        mask,
    };
    for (name, engine) in engines() {
        let Some(mut state) = unless_refused(&name, engine.begin(&problem)) else {
            continue;
        };
        let error = state.absorb(&block(None)).unwrap_err();
        assert!(error.to_string().contains("mask"), "{name}: {error}");
        state.absorb(&block(Some(mask))).unwrap();
        let (out, lse) = finish::<f32>(&problem, state);
        assert_eq!((out, lse), (vec![0.0; 8], vec![f32::NEG_INFINITY; 2]));
    }
}
