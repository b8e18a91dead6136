//! The three schedules against the naive definition, over everything a problem can ask for.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::half::{bf16, f16};
use tilewise_core::schedule::{self, fa1, fa2, standard};
use tilewise_core::{
    Algorithm, BlockSizes, Comparison, Element, ErrorClass, Inputs, Judge, NoObserver, Options,
    Problem, RowSample, TensorView, TensorViewMut,
};
use tilewise_testkit::{Case, Data, Layout, Noise, Sequences, Sizes, Tensor, case};

struct Output<T> {
    out: Vec<T>,
    lse: Vec<f32>,
}

fn run<T: Element>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    blocks: (usize, usize),
) -> Output<T> {
    let dims = problem.dims();
    // What is not written stays NaN.
    let mut out = vec![T::from_f64(f64::NAN); dims.out_shape().iter().product()];
    let mut lse = vec![f32::NAN; dims.lse_shape().iter().product()];
    let out_view = TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap();
    let lse_view = TensorViewMut::bhs(&mut lse, dims.lse_shape()).unwrap();
    let sizes = BlockSizes::new(blocks.0, blocks.1).unwrap();
    let observer = &mut NoObserver;
    schedule::forward(
        algorithm,
        problem,
        inputs,
        sizes,
        observer,
        out_view,
        Some(lse_view),
    )
    .unwrap();
    Output { out, lse }
}

fn compare<T: Element>(judge: &Judge, problem: &Problem, output: &Output<T>) -> Comparison {
    let [b, h, s] = problem.dims().lse_shape();
    judge
        .compare(
            &TensorView::bhsd(&output.out, problem.dims().out_shape()).unwrap(),
            Some(&TensorView::bhsd(&output.lse, [b, h, s, 1]).unwrap()),
        )
        .unwrap()
}

/// All three against the reference.
fn check<T: Element>(
    inputs: &Inputs<'_, T>,
    options: &Options,
    blocks: (usize, usize),
) -> TestCaseResult {
    let problem = Problem::new(inputs, options).unwrap();
    let judge = Judge::new(&problem, inputs, &RowSample::all(&problem));
    for algorithm in Algorithm::ALL {
        let output = run(algorithm, &problem, inputs, blocks);
        let comparison = compare(&judge, &problem, &output);
        prop_assert!(comparison.pass, "{algorithm} {}: {comparison:?}", T::DTYPE);
    }
    Ok(())
}

fn check_case<T: Element>(case: &Case) -> TestCaseResult {
    let data: Data<T> = case.data();
    let (problem, inputs) = (data.problem(), data.inputs());
    // The tolerance grows with the error of the naive run: were that wrong (or the reference), the
    // judge would let everything pass. |v| is at most 2 here, and P is rounded once to the dtype.
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let tolerance = judge.tolerance();
    let u = T::DTYPE.unit_roundoff();
    prop_assert!(
        tolerance.naive_err <= 6.0 * u + tolerance.accumulation,
        "{tolerance:?}"
    );
    let rest = tolerance.lse - 2.0 * tolerance.naive_lse_err;
    prop_assert!(tolerance.naive_lse_err <= rest, "{tolerance:?}");
    check(&inputs, &data.options, case.blocks)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3 * ProptestConfig::default().cases, ..Default::default() })]
    #[test]
    fn f32_equals_the_definition(case in case(&Sizes::tiny())) {
        check_case::<f32>(&case)?;
    }

    #[test]
    fn f64_equals_the_definition(case in case(&Sizes::tiny())) {
        check_case::<f64>(&case)?;
    }

    #[test]
    fn f16_equals_the_definition(case in case(&Sizes::tiny())) {
        check_case::<f16>(&case)?;
    }

    #[test]
    fn bf16_equals_the_definition(case in case(&Sizes::tiny())) {
        check_case::<bf16>(&case)?;
    }

    /// A NaN or an infinity in q, k, v or bias: every row that must be NaN is, and no other changes.
    #[test]
    fn what_is_no_number_stays_in_its_rows(
        mut case in case(&Sizes::tiny()),
        places in proptest::collection::vec((0usize..4, any::<usize>(), any::<bool>()), 1..3),
    ) {
        case.sequences = Sequences::Dense;
        let (heads, kv) = (case.num_heads(), case.num_kv_heads);
        let shapes = [
            [case.batch, heads, case.seqlen_q, case.head_dim],
            [case.batch, kv, case.seqlen_k, case.head_dim],
            [case.batch, kv, case.seqlen_k, case.head_dim_v],
            [case.batch, heads, case.seqlen_q, case.seqlen_k],
        ];
        let mut noise = Noise(case.seed);
        let mut tensors = shapes.map(|shape| noise.tensor::<f32>(shape.iter().product(), 1.0));
        for (tensor, place, infinite) in places {
            let tensor = &mut tensors[tensor];
            if !tensor.is_empty() {
                let at = place % tensor.len();
                tensor[at] = if infinite { f32::INFINITY } else { f32::NAN };
            }
        }
        let [q, k, v, bias] = tensors;
        let inputs = Inputs::new(
            TensorView::bhsd(&q, shapes[0]).unwrap(),
            TensorView::bhsd(&k, shapes[1]).unwrap(),
            TensorView::bhsd(&v, shapes[2]).unwrap(),
        )
        .bias(TensorView::bhsd(&bias, shapes[3]).unwrap());
        check(&inputs, &case.options(), case.blocks)?;
    }
}

fn plain(seed: u64, shapes: [[usize; 4]; 3], magnitude: f64) -> [Tensor<f32>; 3] {
    let mut noise = Noise(seed);
    shapes.map(|shape| {
        let values = noise.tensor(shape.iter().product(), magnitude);
        Tensor::of(&values, shape, Layout::Bhsd, f32::NAN)
    })
}

#[test]
fn more_queries_than_keys_leave_empty_rows() {
    let [q, k, v] = plain(1, [[1, 2, 11, 5], [1, 1, 4, 5], [1, 1, 4, 3]], 1.0);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let options = Options::new().causal(true);
    let problem = Problem::new(&inputs, &options).unwrap();
    for blocks in [(1, 1), (4, 3), (16, 16)] {
        check(&inputs, &options, blocks).unwrap();
        for algorithm in Algorithm::ALL {
            let output = run(algorithm, &problem, &inputs, blocks);
            for row in 0..22 {
                let empty = row % 11 < 7;
                assert_eq!(output.lse[row] == f32::NEG_INFINITY, empty);
                assert_eq!(output.out[row * 3..][..3] == [0.0; 3], empty);
            }
        }
    }
}

/// The first block a row visits hides everything, and later scores lie far below 0: a maximum that
/// started anywhere but at −∞ would lose them.
#[test]
fn low_scores_after_an_empty_block_are_kept() {
    let shape = [1, 1, 1, 1];
    let (q, v) = ([1f32], [1f32, 2.0, 3.0, 4.0]);
    let k = [0f32, 0.0, -3e4, -3e4];
    let mask = [0u8, 0, 1, 1];
    let inputs = Inputs::new(
        TensorView::bhsd(&q, shape).unwrap(),
        TensorView::bhsd(&k, [1, 1, 4, 1]).unwrap(),
        TensorView::bhsd(&v, [1, 1, 4, 1]).unwrap(),
    )
    .mask(TensorView::bhsd(&mask, [1, 1, 1, 4]).unwrap());
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    for algorithm in Algorithm::ALL {
        let output = run(algorithm, &problem, &inputs, (1, 2));
        assert_eq!(output.out, [3.5], "{algorithm}");
        assert_eq!(output.lse, [-3e4 + 2f32.ln()], "{algorithm}");
    }
}

#[test]
fn huge_and_tiny_scores_are_exact_enough() {
    for magnitude in [1e-30, 1e4, 1e15] {
        let shapes = [[1, 2, 9, 8], [1, 2, 13, 8], [1, 2, 13, 8]];
        let [q, k, _] = plain(3, shapes, magnitude);
        let [_, _, v] = plain(3, shapes, 1.0);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        for options in [
            Options::new(),
            Options::new().causal(true),
            Options::new().softcap(30.0),
        ] {
            check(&inputs, &options, (4, 4)).unwrap();
        }
    }
}

/// A result does not depend on how it is tiled beyond rounding, nor on other rows at all.
#[test]
fn other_rows_do_not_change_a_bit() {
    let [q, k, v] = plain(4, [[2, 4, 10, 7], [2, 2, 12, 7], [2, 2, 12, 6]], 1.0);
    let options = Options::new().causal(true);
    let whole = Inputs::new(q.view(), k.view(), v.view());
    let problem = Problem::new(&whole, &options).unwrap();
    for algorithm in Algorithm::ALL {
        let all = run(algorithm, &problem, &whole, (4, 5));
        let alone = Inputs::new(
            q.view().narrow(0, 1..2),
            k.view().narrow(0, 1..2),
            v.view().narrow(0, 1..2),
        );
        let part = run(
            algorithm,
            &Problem::new(&alone, &options).unwrap(),
            &alone,
            (4, 5),
        );
        assert_eq!(all.out[4 * 10 * 6..], part.out);
        assert_eq!(all.lse[4 * 10..], part.lse);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let [q, k, v] = plain(5, [[1, 1, 3, 2], [1, 1, 4, 2], [1, 1, 4, 2]], 1.0);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let blocks = BlockSizes::new(2, 2).unwrap();
    let mut out = [0f32; 6];
    let short = TensorViewMut::bhsd(&mut out, [1, 1, 2, 2]).unwrap();
    let error = fa2::forward(&problem, &inputs, blocks, &mut NoObserver, short, None).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Shape);
    let other = Inputs::new(q.view(), k.view().narrow(2, 0..3), v.view().narrow(2, 0..3));
    for forward in [standard::forward, fa1::forward, fa2::forward] {
        let out = TensorViewMut::bhsd(&mut out, [1, 1, 3, 2]).unwrap();
        assert!(forward(&problem, &other, blocks, &mut NoObserver, out, None).is_err());
    }
    assert!(BlockSizes::new(0, 1).is_err() && BlockSizes::new(1, 0).is_err());
}

/// A weight that underflows is 0, and 0 times NaN is NaN; a key that is hidden has no weight at all.
#[test]
fn a_weight_that_underflows_is_not_a_hidden_key() {
    let (q, k) = ([1f32], [0f32, -1e4]);
    let v = [1f32, f32::NAN];
    for (mask, expected) in [([1u8, 1], f32::NAN), ([1, 0], 1.0)] {
        let inputs = Inputs::new(
            TensorView::bhsd(&q, [1, 1, 1, 1]).unwrap(),
            TensorView::bhsd(&k, [1, 1, 2, 1]).unwrap(),
            TensorView::bhsd(&v, [1, 1, 2, 1]).unwrap(),
        )
        .mask(TensorView::bhsd(&mask, [1, 1, 1, 2]).unwrap());
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        check(&inputs, &Options::new(), (1, 1)).unwrap();
        for algorithm in Algorithm::ALL {
            let [out] = run(algorithm, &problem, &inputs, (1, 2)).out[..] else {
                panic!("one element")
            };
            assert!(
                out == expected || (out.is_nan() && expected.is_nan()),
                "{algorithm}"
            );
        }
    }
}

#[test]
fn outputs_may_have_strides() {
    let [q, k, v] = plain(6, [[2, 3, 5, 4], [2, 3, 7, 4], [2, 3, 7, 2]], 1.0);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let sizes = BlockSizes::new(2, 3).unwrap();
    for algorithm in Algorithm::ALL {
        let expected = run(algorithm, &problem, &inputs, (2, 3));
        // [batch, seqlen, heads, head_dim] with a gap after each row, and every second lse.
        let (mut out, mut lse) = ([7f32; 2 * 5 * 3 * 3], [7f32; 2 * 30]);
        let out_view = TensorViewMut::from_strides(&mut out, [2, 3, 5, 2], [45, 3, 9, 1], 0);
        let lse_view = TensorViewMut::from_strides(&mut lse, [2, 3, 5, 1], [30, 10, 2, 1], 0);
        let (out_view, lse_view) = (out_view.unwrap(), Some(lse_view.unwrap()));
        let observer = &mut NoObserver;
        schedule::forward(
            algorithm, &problem, &inputs, sizes, observer, out_view, lse_view,
        )
        .unwrap();
        for row in 0..30 {
            let (b, h, i) = (row / 15, row / 5 % 3, row % 5);
            let at = b * 45 + i * 9 + h * 3;
            assert_eq!(out[at..at + 2], expected.out[row * 2..][..2]);
            assert_eq!((out[at + 2], lse[row * 2 + 1]), (7.0, 7.0));
            assert_eq!(lse[row * 2], expected.lse[row]);
        }
    }
}
