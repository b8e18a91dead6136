//! Gradients on every algorithm, instruction set and element type equal the naive definition, and
//! their bits follow from the inputs alone.

mod common;

use common::backends;
use proptest::prelude::*;
use tilewise_core::half::{bf16, f16};
use tilewise_core::schedule::backward::keeps_a_key;
use tilewise_core::{
    Algorithm, BackwardInputs, DType, Dims, Dropout, GradientComparison, GradientJudge, Gradients,
    Inputs, Options, Problem, keep_mask,
};
use tilewise_cpu::{CpuBackend, CpuElement};
use tilewise_testkit::{Case, Judged, Sequences, Setting, Sizes, case, cases};

/// A case with the results of the backend's forward pass.
fn setting<T: CpuElement>(case: &Case) -> Setting<T> {
    Setting::new(case, forward)
}

/// By one instruction set or another, as the problem falls out.
fn forward<T: CpuElement>(problem: &Problem, inputs: &Inputs<'_, T>) -> (Vec<T>, Vec<f32>) {
    let backends = backends();
    let backend = &backends[problem.dims().seqlen_k % backends.len()];
    common::run(backend, problem, inputs, Algorithm::Fa2)
}

/// Runs into memory that held NaN before.
fn run<T: CpuElement>(
    backend: &CpuBackend,
    options: &Options,
    inputs: &BackwardInputs<'_, T>,
    algorithm: Algorithm,
) -> Gradients<T> {
    let problem = inputs.problem(options).unwrap();
    let mut gradients = Gradients::filled(&problem, &inputs.inputs, f64::NAN).unwrap();
    backend
        .backward_into(&problem, inputs, algorithm, gradients.views_mut().unwrap())
        .unwrap();
    gradients
}

fn bits<T: CpuElement>(gradients: &Gradients<T>) -> Vec<u64> {
    let tensors = [&gradients.dq, &gradients.dk, &gradients.dv];
    let values = tensors.into_iter().chain(&gradients.dbias).flatten();
    let sinks = gradients.dsinks.iter().flatten();
    values
        .map(|x| x.to_f64().to_bits())
        .chain(sinks.map(|x| u64::from(x.to_bits())))
        .collect()
}

/// Every algorithm and instruction set against the definition.
fn equal_the_definition<T: CpuElement>(
    setting: &Setting<T>,
    passes: impl Fn(&GradientComparison) -> bool,
) -> Result<(), TestCaseError> {
    let (problem, inputs) = (setting.problem(), setting.backward());
    let judge = GradientJudge::new(&problem, &inputs);
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let mut gradients = run(&backend, &setting.options, &inputs, algorithm);
            for comparison in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
                prop_assert!(
                    passes(&comparison),
                    "{} {algorithm} {}: {comparison:?}",
                    backend.isa(),
                    T::DTYPE
                );
            }
        }
    }
    Ok(())
}

fn check<T: CpuElement>(case: &Case) -> Result<(), TestCaseError> {
    let setting = setting::<T>(case);
    equal_the_definition(&setting, |found| found.pass)?;
    let (problem, inputs) = (setting.problem(), setting.backward());
    // Dropout in the forward pass: `definition` has none.
    let forward = Judged::new(&problem, &inputs.inputs);
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let (out, lse) = common::run(&backend, &problem, &inputs.inputs, algorithm);
            forward.agrees(&format!("{} {algorithm}", backend.isa()), &out, &lse)?;
        }
        // Law 6: bits follow from the inputs alone.
        let whole = run(&backend, &setting.options, &inputs, Algorithm::Fa2);
        for threads in 1..=3 {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let again = pool.install(|| run(&backend, &setting.options, &inputs, Algorithm::Fa2));
            prop_assert_eq!(bits(&again), bits(&whole), "{} threads", threads);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn every_kernel_equals_the_definition(case in common::any_case()) {
        match case.dtype {
            DType::F64 => check::<f64>(&case)?,
            DType::F32 => check::<f32>(&case)?,
            DType::F16 => check::<f16>(&case)?,
            _ => check::<bf16>(&case)?,
        }
    }
}

fn check_poisoned<T: CpuElement>(case: &Case) -> Result<(), TestCaseError> {
    let mut setting = setting::<T>(case).poisoned(case.seed);
    setting.run_forward(forward);
    // Of halves the places of NaN alone: where dropout leaves few weights and large ones, the naive pass that the
    // tolerance is made from may happen to round better.
    let is_half = matches!(T::DTYPE, DType::F16 | DType::BF16);
    let places_agree = |found: &GradientComparison| is_half && found.max_abs_err.is_finite();
    equal_the_definition(&setting, |found| found.pass || places_agree(found))
}

proptest! {
    #![proptest_config(cases(64))]

    /// To the element, and nothing else. Scores are not so far apart that a weight is 0 in one dtype and above it
    /// in another: 0 · NaN is NaN by definition, but the kernels take a weight of 0 for that of a hidden key.
    #[test]
    fn nan_reaches_what_sees_it(case in prop_oneof![common::any_case(), few_keys()]) {
        let case = Case {
            magnitude: case.magnitude.min(1.0),
            options: case.options.clone().softmax_scale(None),
            alibi: false,
            ..case
        };
        match case.dtype {
            DType::F64 => check_poisoned::<f64>(&case)?,
            DType::F32 => check_poisoned::<f32>(&case)?,
            DType::F16 => check_poisoned::<f16>(&case)?,
            _ => check_poisoned::<bf16>(&case)?,
        }
    }
}

/// As few keys and columns as there can be: nothing to average errors over.
fn few_keys() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: (1usize..40).boxed(),
        seqlen_k: (1usize..6).boxed(),
        head_dim: (1usize..5).boxed(),
        ..Sizes::of_tiles()
    };
    case(&sizes)
}

/// Several tiles of products of pairs along rows and keys.
fn many_rows_and_keys() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: (90usize..300).boxed(),
        seqlen_k: (200usize..600).boxed(),
        ..Sizes::of_tiles()
    };
    case(&sizes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rounded_weights_of_few_keys_stay_within_the_tolerance(case in few_keys()) {
        check::<bf16>(&Case { dtype: DType::BF16, ..case })?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn tiles_of_pairs_equal_the_definition(case in many_rows_and_keys()) {
        check::<bf16>(&Case { dtype: DType::BF16, ..case })?;
    }
}

fn plain(seed: u64) -> Case {
    let dims = Dims {
        batch: 2,
        num_heads: 4,
        num_kv_heads: 2,
        seqlen_q: 150,
        seqlen_k: 420,
        head_dim: 24,
        head_dim_v: 40,
    };
    Case {
        options: Options::new().causal(true),
        ..Case::dense(seed, dims)
    }
}

/// A batch entry alone has the bits that it has in the batch.
#[test]
fn a_batch_entry_has_its_own_bits() {
    let mut setting = setting::<f32>(&plain(3));
    (setting.options, setting.keep) = (Options::new().causal(true), None);
    let inputs = setting.backward();
    for backend in backends() {
        let whole = run(&backend, &setting.options, &inputs, Algorithm::Fa2);
        for b in 0..2 {
            let mut alone = inputs;
            alone.inputs.q = alone.inputs.q.narrow(0, b..b + 1);
            alone.inputs.k = alone.inputs.k.narrow(0, b..b + 1);
            alone.inputs.v = alone.inputs.v.narrow(0, b..b + 1);
            alone.out = alone.out.narrow(0, b..b + 1);
            alone.lse = alone.lse.narrow(0, b..b + 1);
            alone.dout = alone.dout.narrow(0, b..b + 1);
            alone.dlse = alone.dlse.map(|dlse| dlse.narrow(0, b..b + 1));
            let one = run(&backend, &setting.options, &alone, Algorithm::Fa2);
            let part = |values: &[f32]| {
                let half = values.len() / 2;
                values[b * half..(b + 1) * half].to_vec()
            };
            assert_eq!(one.dq, part(&whole.dq));
            assert_eq!(one.dk, part(&whole.dk));
            assert_eq!(one.dv, part(&whole.dv));
        }
    }
}

/// The mask that Philox stands for is the same on every instruction set, and given as a mask it
/// changes no bit.
#[test]
fn dropout_is_the_same_mask_everywhere() {
    let mut setting = setting::<f32>(&plain(5));
    setting.keep = None;
    setting.options = Options::new().dropout(Dropout::Philox {
        p: 0.3,
        seed: 9,
        offset: 1 << 33,
    });
    let dims = *setting.problem().dims();
    let keep = keep_mask(&setting.problem(), &setting.inputs())
        .unwrap()
        .unwrap();
    let philox: Vec<_> = backends()
        .iter()
        .map(|backend| {
            run(
                backend,
                &setting.options,
                &setting.backward(),
                Algorithm::Fa2,
            )
        })
        .collect();
    setting.keep = Some((
        keep,
        [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k],
    ));
    setting.options = Options::new().dropout(Dropout::Mask { p: 0.3 });
    for (backend, philox) in backends().iter().zip(philox) {
        let masked = run(
            backend,
            &setting.options,
            &setting.backward(),
            Algorithm::Fa2,
        );
        assert_eq!(bits(&masked), bits(&philox), "{}", backend.isa());
    }
}

/// NaN and infinity in what a mask hides change nothing, wherever they stand.
#[test]
fn what_is_hidden_never_leaks() {
    nothing_leaks::<f32>();
    nothing_leaks::<bf16>();
}

fn nothing_leaks<T: CpuElement>() {
    let mut case = plain(7);
    case.options = Options::new().window_left(60).window_right(60);
    let mut setting = setting::<T>(&case);
    (setting.options, setting.keep) = (case.options.clone(), None);
    setting.run_forward(forward);
    let clean: Vec<_> = backends()
        .iter()
        .map(|backend| {
            run(
                backend,
                &setting.options,
                &setting.backward(),
                Algorithm::Fa2,
            )
        })
        .collect();
    // Row 100 of q and dO, which stands at key 370; key 5 of k, key 400 of v.
    for head in 0..8 {
        let (row, k, v) = (
            (head * 150 + 100),
            (head / 2 * 420 + 5),
            (head / 2 * 420 + 400),
        );
        let q = &mut setting.data.q;
        q.data[q.offset + row * 24] = T::from_f64(f64::NAN);
        setting.dout[row * 40 + 7] = T::from_f64(f64::INFINITY);
        setting.lse[row] = f32::NAN;
        let k_tensor = &mut setting.data.k;
        k_tensor.data[k_tensor.offset + k * 24 + 3] = T::from_f64(f64::INFINITY);
        let v_tensor = &mut setting.data.v;
        v_tensor.data[v_tensor.offset + v * 40 + 9] = T::from_f64(f64::NAN);
    }
    for (backend, clean) in backends().iter().zip(clean) {
        let dirty = run(
            backend,
            &setting.options,
            &setting.backward(),
            Algorithm::Fa2,
        );
        for head in 0..8 {
            for row in 0..150 {
                // Queries stand at row + 270 and see 60 keys to either side.
                let sees = |key: usize| (row + 210..=row + 330).contains(&key);
                let at = (head * 150 + row) * 24;
                let same = dirty.dq[at..at + 24] == clean.dq[at..at + 24];
                let touched = row == 100 || sees(5) || sees(400);
                assert_eq!(same, !touched, "{} dq {row}", backend.isa());
            }
        }
        for head in 0..4 {
            for key in 0..420 {
                let reached = |row: usize| (row + 210..=row + 330).contains(&key);
                let at = (head * 420 + key) * 40;
                let same = dirty.dv[at..at + 40] == clean.dv[at..at + 40];
                assert_eq!(same, !reached(100), "{} dv {key}", backend.isa());
            }
        }
    }
}

/// Rows that keep no key, because all are hidden or dropped, have no part of dO in any gradient: it may be NaN.
#[test]
fn rows_that_keep_no_key_take_nothing_of_dout() {
    let windowed = Options::new().causal(true).window_left(2);
    let dropped = windowed.clone().dropout(Dropout::Philox {
        p: 0.7,
        seed: 5,
        offset: 6,
    });
    // Rows above the diagonal see nothing, those of a sequence without keys neither.
    let sinks = Options::new().causal(true).sinks(vec![0.5, -1.0]);
    for options in [sinks, dropped.clone(), dropped.sinks(vec![0.5, -1.0])] {
        nothing_of_dout::<f64>(&options);
        nothing_of_dout::<f32>(&options);
        nothing_of_dout::<bf16>(&options);
    }
}

fn nothing_of_dout<T: CpuElement>(options: &Options) {
    let dims = Dims {
        batch: 2,
        num_heads: 2,
        num_kv_heads: 1,
        seqlen_q: 70,
        seqlen_k: 50,
        head_dim: 24,
        head_dim_v: 40,
    };
    let case = Case {
        sequences: Sequences::Used(vec![0, 80, 100]),
        ..Case::dense(7, dims)
    };
    let mut setting = setting::<T>(&case);
    (setting.options, setting.keep) = (options.clone(), None);
    setting.run_forward(forward);
    let keeps: Vec<bool> = (0..280)
        .map(|row| (row / 140, row / 70 % 2, row % 70))
        .map(|(b, h, i)| keeps_a_key(&setting.problem(), &setting.inputs(), b, h, i).unwrap())
        .collect();
    // Some of the batch entry that has keys, and not all.
    assert!(keeps[140..].contains(&false) && keeps.contains(&true));
    for (row, _) in keeps.iter().enumerate().filter(|(_, keeps)| !**keeps) {
        setting.dout[row * 40..][..40].fill(T::from_f64(f64::NAN));
    }
    let inputs = setting.backward();
    let judge = GradientJudge::new(&setting.problem(), &inputs);
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let mut gradients = run(&backend, options, &inputs, algorithm);
            for found in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
                assert!(
                    found.pass,
                    "{} {algorithm} {options:?}: {found:?}",
                    backend.isa()
                );
            }
            let tensors = [&gradients.dq, &gradients.dk, &gradients.dv];
            assert!(
                tensors
                    .into_iter()
                    .flatten()
                    .all(|x| x.to_f64().is_finite())
            );
            assert!(gradients.dsinks.iter().flatten().all(|x| x.is_finite()));
        }
    }
}

/// A setting of bf16 without options but causality, and the tensor of it that `which` says.
fn small(which: usize, change: impl Fn(usize, &mut bf16)) -> Setting<bf16> {
    let dims = Dims {
        batch: 1,
        num_heads: 2,
        num_kv_heads: 1,
        seqlen_q: 70,
        seqlen_k: 90,
        head_dim: 24,
        head_dim_v: 40,
    };
    let options = Options::new().causal(true);
    let case = Case {
        options: options.clone(),
        ..Case::dense(11, dims)
    };
    let mut setting = setting::<bf16>(&case);
    (setting.options, setting.keep, setting.dlse) = (options, None, None);
    let data = &mut setting.data;
    let tensor = match which {
        0 => &mut data.q.data,
        1 => &mut data.k.data,
        2 => &mut data.v.data,
        _ => &mut setting.dout,
    };
    for (at, x) in tensor.iter_mut().enumerate() {
        change(at, x);
    }
    setting.run_forward(forward);
    setting
}

fn agree(setting: &Setting<bf16>, what: &str) {
    let inputs = setting.backward();
    let judge = GradientJudge::new(&setting.problem(), &inputs);
    for backend in backends() {
        let mut gradients = run(&backend, &setting.options, &inputs, Algorithm::Fa2);
        for comparison in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
            assert!(comparison.pass, "{} {what}: {comparison:?}", backend.isa());
        }
    }
}

/// What instructions that multiply pairs of bf16 would take for something else: NaN, infinity, what is
/// huge, what is tiny.
#[test]
fn odd_numbers_of_bf16_are_as_defined() {
    for odd in [f32::NAN, f32::INFINITY, 1e18, -3e-35, 9.2e-41] {
        for which in 0..4 {
            // Δ of an infinite dO is no sum that every order of summation gives; lse of a huge score, in
            // f32, does not say what its weight is.
            if (which == 3 && odd == f32::INFINITY) || (which < 2 && odd == 1e18) {
                continue;
            }
            let setting = small(which, |at, x| {
                if at == 24 * 40 + 7 {
                    *x = bf16::from_f32(odd);
                }
            });
            agree(&setting, &format!("{odd} in tensor {which}"));
        }
    }
}

#[test]
fn tensors_of_bf16_that_are_all_tiny_are_as_defined() {
    for scale in [1e-38, 1e-33, 1e-20, 1e-12] {
        for which in 0..4 {
            let setting = small(which, |_, x| *x = bf16::from_f32(x.to_f32() * scale));
            agree(&setting, &format!("tensor {which} times {scale}"));
        }
    }
}
