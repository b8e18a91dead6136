//! The laws of the blockwise mathematics, at problem grain: merging, partitions, shifts, and the bits
//! that must not depend on threads, batch or chance.

mod common;

use common::{any_case, backends, run};
use proptest::prelude::*;
use tilewise_core::half::{bf16, f16};
use tilewise_core::{
    Algorithm, Backend, DType, Finished, Judge, KeyBlock, OnlineSoftmax, Problem, RowSample,
    TensorView, TensorViewMut,
};
use tilewise_cpu::{CpuBackend, CpuElement, CpuState};
use tilewise_testkit::{Case, Data, Noise, Sequences, cases};

/// Bits, so that NaN equals itself.
fn bits<T: CpuElement>(out: &[T]) -> Vec<u64> {
    out.iter().map(|x| x.to_f64().to_bits()).collect()
}

fn in_pool<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
        .install(work)
}

/// Law 6, threads and repetition.
fn same_bits_for_any_threads<T: CpuElement>(case: &Case) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let (problem, inputs) = (data.problem(), data.inputs());
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let results = [1, 2, 3, 1].map(|threads| {
                let (out, lse) = in_pool(threads, || run(&backend, &problem, &inputs, algorithm));
                (bits(&out), bits(&lse))
            });
            for result in &results[1..] {
                prop_assert!(result == &results[0], "{} {algorithm}", backend.isa());
            }
        }
    }
    Ok(())
}

/// Law 6, batch: an entry alone gives the bits it gave among others.
fn same_bits_in_any_batch<T: CpuElement>(case: &Case) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let (problem, inputs) = (data.problem(), data.inputs());
    let rows = problem.dims().num_heads * problem.dims().seqlen_q;
    let width = problem.dims().head_dim_v;
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let (out, lse) = run(&backend, &problem, &inputs, algorithm);
            for b in 0..problem.dims().batch {
                let mut alone = inputs;
                alone.q = inputs.q.narrow(0, b..b + 1);
                alone.k = inputs.k.narrow(0, b..b + 1);
                alone.v = inputs.v.narrow(0, b..b + 1);
                let part = |shape: [usize; 4]| if shape[0] == 1 { 0..1 } else { b..b + 1 };
                alone.bias = inputs.bias.map(|x| x.narrow(0, part(x.shape())));
                alone.mask = inputs.mask.map(|x| x.narrow(0, part(x.shape())));
                alone.lengths.seqused_k = inputs.lengths.seqused_k.map(|used| &used[b..b + 1]);
                let one = Problem::new(&alone, problem.options()).unwrap();
                let (out_alone, lse_alone) = run(&backend, &one, &alone, algorithm);
                prop_assert_eq!(
                    bits(&out_alone),
                    bits(&out[b * rows * width..][..rows * width])
                );
                prop_assert_eq!(bits(&lse_alone), bits(&lse[b * rows..][..rows]));
            }
        }
    }
    Ok(())
}

/// A problem whose keys can be streamed: all of them used, nothing packed or paged.
fn streamable(mut case: Case) -> Case {
    case.sequences = Sequences::Dense;
    case
}

/// The keys `keys` of the data.
fn block<'a, T: CpuElement>(data: &'a Data<T>, keys: std::ops::Range<usize>) -> KeyBlock<'a, T> {
    let inputs = data.inputs();
    let mut block = KeyBlock::new(
        inputs.q,
        inputs.k.narrow(2, keys.clone()),
        inputs.v.narrow(2, keys.clone()),
        keys.start,
    );
    let part = |size: usize| if size == 1 { 0..1 } else { keys.clone() };
    block.bias = inputs.bias.map(|x| x.narrow(3, part(x.shape()[3])));
    block.mask = inputs.mask.map(|x| x.narrow(3, part(x.shape()[3])));
    block
}

/// Laws 1 and 2: any partition of the keys, in any order, joined in any order, is the definition; the
/// empty state is neutral, and a state survives export and import.
fn any_partition<T: CpuElement>(case: &Case, cuts: &[usize]) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let (problem, inputs) = (data.problem(), data.inputs());
    let n = problem.dims().seqlen_k;
    let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut % (n + 1)).collect();
    bounds.extend([0, n]);
    bounds.sort_unstable();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let mut noise = Noise(case.seed ^ 1);
    for backend in backends() {
        let online = backend.online::<T>();
        let mut states: Vec<CpuState<T>> = vec![online.begin(&problem).unwrap()];
        for pair in bounds.windows(2) {
            // A new state, or a further chunk for one that exists.
            if noise.below(2) == 0 {
                states.push(online.begin(&problem).unwrap());
            }
            let at = noise.below(states.len());
            online
                .absorb(&mut states[at], block(&data, pair[0]..pair[1]))
                .unwrap();
        }
        while states.len() > 1 {
            let other = states.swap_remove(noise.below(states.len()));
            let at = noise.below(states.len());
            if noise.below(2) == 0 {
                online.merge(&mut states[at], &other).unwrap();
            } else {
                let host = online.export(&other).unwrap();
                let back = online.import(&problem, &host).unwrap();
                prop_assert_eq!(
                    format!("{:?}", online.export(&back).unwrap()),
                    format!("{host:?}")
                );
                online.merge_host(&mut states[at], &host).unwrap();
            }
        }
        let shape = problem.dims().out_shape();
        let [b, h, s] = problem.dims().lse_shape();
        let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
        let mut lse = vec![f32::NAN; b * h * s];
        let output = Finished {
            out: TensorViewMut::bhsd(&mut out, shape).unwrap(),
            lse: Some(TensorViewMut::bhs(&mut lse, [b, h, s]).unwrap()),
        };
        online.finish(states.remove(0), output).unwrap();
        let verdict = judge
            .compare(
                &TensorView::bhsd(&out, shape).unwrap(),
                Some(&TensorView::bhsd(&lse, [b, h, s, 1]).unwrap()),
            )
            .unwrap();
        prop_assert!(verdict.pass, "{}: {verdict:?}", backend.isa());
    }
    Ok(())
}

/// Law 3: a constant on every score of a row moves L by it and leaves O.
fn a_constant_bias_moves_only_lse(case: &Case, shift: f64) -> Result<(), TestCaseError> {
    let data = case.data::<f64>();
    let inputs = data.inputs();
    let mut options = data.options.clone();
    options = options.sinks(None);
    let shifts = [shift];
    let constant = TensorView::bhsd(&shifts, [1, 1, 1, 1]).unwrap();
    let zero = [0.0];
    let nothing = TensorView::bhsd(&zero, [1, 1, 1, 1]).unwrap();
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let run = |bias| {
                let inputs = inputs.bias(bias);
                let problem = Problem::new(&inputs, &options).unwrap();
                run(&backend, &problem, &inputs, algorithm)
            };
            let (plain, plain_lse) = run(nothing);
            let (moved, moved_lse) = run(constant);
            for (a, b) in plain.iter().zip(&moved) {
                prop_assert!((a - b).abs() < 1e-10, "{a} {b}");
            }
            for (&a, &b) in plain_lse.iter().zip(&moved_lse) {
                if a == f32::NEG_INFINITY {
                    prop_assert_eq!(b, a);
                } else {
                    let moved = f64::from(b) - f64::from(a);
                    prop_assert!((moved - shift).abs() < 1e-4 * (1.0 + f64::from(a).abs()));
                }
            }
        }
    }
    Ok(())
}

macro_rules! in_dtype {
    ($case:expr, $function:ident $(, $more:expr)*) => {
        match $case.dtype {
            DType::F64 => $function::<f64>(&$case $(, $more)*),
            DType::F32 => $function::<f32>(&$case $(, $more)*),
            DType::F16 => $function::<f16>(&$case $(, $more)*),
            _ => $function::<bf16>(&$case $(, $more)*),
        }
    };
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn bits_do_not_depend_on_threads(case in any_case()) {
        in_dtype!(case, same_bits_for_any_threads)?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch(mut case in any_case()) {
        if matches!(case.sequences, Sequences::Packed(..) | Sequences::Paged(..)) {
            case.sequences = Sequences::Used(vec![70, 100, 3]);
        }
        in_dtype!(case, same_bits_in_any_batch)?;
    }

    #[test]
    fn any_partition_is_the_definition(
        case in any_case().prop_map(streamable),
        cuts in prop::collection::vec(0usize..600, 0..6),
    ) {
        in_dtype!(case, any_partition, &cuts)?;
    }

    #[test]
    fn constants_move_only_lse(case in any_case(), shift in -50.0f64..50.0) {
        a_constant_bias_moves_only_lse(&case, shift)?;
    }
}

/// A block of keys brings no mask of its own: it would be left out without a word.
#[test]
fn dropout_by_a_mask_cannot_be_streamed() {
    let (q, keep) = ([0.0f32; 8], [0u8; 4]);
    let view = TensorView::bhsd(&q, [1, 1, 2, 4]).unwrap();
    let inputs = tilewise_core::Inputs::new(view, view, view)
        .keep_mask(TensorView::bhsd(&keep, [1, 1, 2, 2]).unwrap());
    let dropout = tilewise_core::Dropout::Mask { p: 0.5 };
    let problem = Problem::new(&inputs, &tilewise_core::Options::new().dropout(dropout)).unwrap();
    let error = Backend::begin(&CpuBackend::new().unwrap(), &problem)
        .err()
        .expect("a state");
    assert!(error.to_string().contains("dropout by a mask"), "{error}");
}

#[test]
fn packed_sequences_cannot_be_streamed_and_other_dtypes_neither() {
    let (q, cu) = ([0.0f32; 8], [0, 2]);
    let view = TensorView::bhsd(&q, [1, 1, 2, 4]).unwrap();
    let inputs = tilewise_core::Inputs::new(view, view, view).packed(&cu, &cu);
    let options = tilewise_core::Options::new();
    let problem = Problem::new(&inputs, &options).unwrap();
    let backend = CpuBackend::new().unwrap();
    assert!(backend.online::<f32>().begin(&problem).is_err());
    let inputs = tilewise_core::Inputs::new(view, view, view);
    let problem = Problem::new(&inputs, &options).unwrap();
    assert!(backend.online::<f64>().begin(&problem).is_err());
    assert!(Backend::begin(&backend, &problem).is_ok());
}
