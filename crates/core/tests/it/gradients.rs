//! Gradients: the definition against differences, the schedules against the definition.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::half::{bf16, f16};
use tilewise_core::schedule;
use tilewise_core::schedule::backward::{self, RowStatistics, fa1, fa2};
use tilewise_core::{
    Algorithm, BackwardInputs, BlockSizes, Dims, Dropout, Element, Error, GradientJudge, Gradients,
    Inputs, Judge, NoObserver, Options, Problem, RowSample, TensorView, TensorViewMut, keep_mask,
    reference,
};
use tilewise_testkit::{Case, Layout, Noise, Sequences, Setting, Sizes, Tensor, case};

/// The forward schedule's results.
fn forward<T: Element>(
    algorithm: Algorithm,
    sizes: BlockSizes,
) -> impl Fn(&Problem, &Inputs<'_, T>) -> (Vec<T>, Vec<f32>) {
    move |problem, inputs| {
        let dims = problem.dims();
        let mut out = vec![T::default(); dims.out_shape().iter().product()];
        let mut lse = vec![0.0; dims.lse_shape().iter().product()];
        let out_view = TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap();
        let lse_view = Some(TensorViewMut::bhs(&mut lse, dims.lse_shape()).unwrap());
        let observer = &mut NoObserver;
        schedule::forward(
            algorithm, problem, inputs, sizes, observer, out_view, lse_view,
        )
        .unwrap();
        (out, lse)
    }
}

fn sizes(case: &Case) -> BlockSizes {
    BlockSizes::new(case.blocks.0, case.blocks.1).unwrap()
}

fn setting<T: Element>(case: &Case) -> Setting<T> {
    Setting::new(case, forward(Algorithm::Fa2, sizes(case)))
}

fn run<T: Element>(setting: &Setting<T>, algorithm: Algorithm, sizes: BlockSizes) -> Gradients<T> {
    let (problem, inputs) = (setting.problem(), setting.backward());
    // What is not written stays NaN.
    let mut gradients = Gradients::filled(&problem, &inputs.inputs, f64::NAN).unwrap();
    let views = gradients.views_mut().unwrap();
    let observer = &mut NoObserver;
    backward::backward(algorithm, &problem, &inputs, sizes, observer, views).unwrap();
    gradients
}

fn check_case<T: Element>(case: &Case) -> TestCaseResult {
    let setting = setting::<T>(case);
    let (problem, inputs) = (setting.problem(), setting.backward());
    let judge = GradientJudge::new(&problem, &inputs);
    // The tolerance grows with the error of the naive run: were that wrong (or the reference), the
    // judge would let everything pass.
    for (name, tolerance) in judge.tolerances() {
        let sum: f64 = judge.reference(name).unwrap().iter().map(|x| x.abs()).sum();
        let u = match name {
            "dsinks" => T::DTYPE.unit_roundoff().max(f32::DTYPE.unit_roundoff()),
            _ => T::DTYPE.unit_roundoff(),
        };
        let rough = 40.0 * u * (1.0 + sum) + 2.0 * tolerance.accumulation;
        prop_assert!(tolerance.naive_err <= rough, "{name} {tolerance:?}, {sum}");
    }
    for algorithm in Algorithm::ALL {
        let mut gradients = run(&setting, algorithm, sizes(case));
        for comparison in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
            prop_assert!(comparison.pass, "{algorithm} {}: {comparison:?}", T::DTYPE);
        }
    }
    // The forward pass with dropout is judged here too: other cases have none.
    let judge = Judge::new(&problem, &inputs.inputs, &RowSample::all(&problem));
    for algorithm in Algorithm::ALL {
        let (out, lse) = forward(algorithm, sizes(case))(&problem, &inputs.inputs);
        let out = TensorView::bhsd(&out, problem.dims().out_shape()).unwrap();
        let lse = TensorView::bhsd(&lse, inputs.lse.shape()).unwrap();
        let comparison = judge.compare(&out, Some(&lse)).unwrap();
        prop_assert!(comparison.pass, "{algorithm} {}: {comparison:?}", T::DTYPE);
    }
    Ok(())
}

proptest! {
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

    /// Two statistics a row, or the one they make: the same weights.
    #[test]
    fn both_statistics_give_the_same_gradients(case in case(&Sizes::tiny())) {
        let setting = setting::<f64>(&case);
        let (problem, inputs, sizes) = (setting.problem(), setting.backward(), sizes(&case));
        let statistics = RowStatistics::new(&problem, &inputs.inputs, sizes, &mut NoObserver).unwrap();
        let empty = || Gradients::filled(&problem, &inputs.inputs, f64::NAN).unwrap();
        let (mut a, mut b) = (empty(), empty());
        let observer = &mut NoObserver;
        fa1::backward(&problem, &inputs, &statistics, sizes, observer, a.views_mut().unwrap()).unwrap();
        fa2::backward(&problem, &inputs, sizes, observer, b.views_mut().unwrap()).unwrap();
        close("dq", &a.dq, &b.dq, 1e-9)?;
        close("dk", &a.dk, &b.dk, 1e-9)?;
        close("dv", &a.dv, &b.dv, 1e-9)?;
    }

    #[test]
    fn gradients_are_linear_in_what_arrives(case in case(&Sizes::tiny()), factor in -3.0..3.0f64) {
        let mut setting = setting::<f64>(&case);
        let one = run(&setting, Algorithm::Fa2, sizes(&case));
        let (first, first_lse) = (setting.dout.clone(), setting.dlse.clone());
        let mut noise = Noise(case.seed ^ 0x1111);
        setting.dout = noise.tensor(first.len(), 1.0);
        setting.dlse = first_lse.as_ref().map(|x| noise.tensor(x.len(), 1.0));
        let other = run(&setting, Algorithm::Fa2, sizes(&case));
        for (x, first) in setting.dout.iter_mut().zip(&first) {
            *x = first + factor * *x;
        }
        for (x, first) in setting.dlse.iter_mut().flatten().zip(first_lse.iter().flatten()) {
            *x = (f64::from(*first) + factor * f64::from(*x)) as f32;
        }
        let sum = run(&setting, Algorithm::Fa2, sizes(&case));
        for (name, one, other, sum) in [
            ("dq", &one.dq, &other.dq, &sum.dq),
            ("dk", &one.dk, &other.dk, &sum.dk),
            ("dv", &one.dv, &other.dv, &sum.dv),
        ] {
            let expected: Vec<f64> = one.iter().zip(other).map(|(a, b)| a + factor * b).collect();
            // dlse is f32, so its sum is rounded.
            close(name, sum, &expected, 1e-5)?;
        }
    }

    /// The mask that Philox stands for, given as a mask, changes no bit; nor does the tiling.
    #[test]
    fn dropout_follows_from_positions_alone(case in case(&Sizes::tiny()), seed in any::<u64>(), rows in 1usize..9) {
        let mut setting = setting::<f32>(&case);
        setting.keep = None;
        setting.options = setting.options.dropout(Dropout::Philox { p: 0.4, seed, offset: 3 });
        setting.run_forward(forward(Algorithm::Fa2, sizes(&case)));
        let philox = run(&setting, Algorithm::Fa2, sizes(&case));
        let problem = setting.problem();
        let keep = keep_mask(&problem, &setting.inputs()).unwrap().unwrap();
        let dims = *problem.dims();
        setting.keep = Some((keep, [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k]));
        setting.options = setting.options.dropout(Dropout::Mask { p: 0.4 });
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let masked = run(&setting, Algorithm::Fa2, sizes(&case));
        prop_assert_eq!(bits(&philox.dq), bits(&masked.dq));
        prop_assert_eq!(bits(&philox.dk), bits(&masked.dk));
        let judge = GradientJudge::new(&setting.problem(), &setting.backward());
        let other = BlockSizes::new(rows, case.blocks.1).unwrap();
        let mut tiled = run(&setting, Algorithm::Fa2, other);
        for comparison in judge.compare(&tiled.views_mut().unwrap()).unwrap() {
            prop_assert!(comparison.pass, "{comparison:?}");
        }
    }
}

fn close(name: &str, a: &[f64], b: &[f64], relative: f64) -> TestCaseResult {
    let largest = b.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
    for (at, (x, y)) in a.iter().zip(b).enumerate() {
        prop_assert!(
            (x - y).abs() <= relative * largest,
            "{name}[{at}]: {x} and {y}"
        );
    }
    Ok(())
}

/// The loss whose gradients are asked for.
fn loss(problem: &Problem, inputs: &Inputs<'_, f64>, dout: &[f64], dlse: &[f64]) -> f64 {
    let reference = reference::forward(problem, inputs);
    let out: f64 = reference.out.iter().zip(dout).map(|(x, d)| x * d).sum();
    let finite = |x: &f64| if x.is_finite() { *x } else { 0.0 };
    let lse: f64 = reference
        .lse
        .iter()
        .zip(dlse)
        .map(|(x, d)| finite(x) * d)
        .sum();
    out + lse
}

#[test]
fn the_definition_equals_central_differences() {
    const STEP: f64 = 1e-5;
    let shapes = [[1, 4, 5, 3], [1, 2, 6, 3], [1, 2, 6, 2], [1, 4, 5, 1]];
    let mut noise = Noise(11);
    let keep: Vec<u8> = (0..4 * 5 * 6).map(|_| (noise.bits() % 4) as u8).collect();
    for (n, options) in [
        Options::new(),
        Options::new().softcap(2.0).sinks(vec![0.3, -1.0, 2.0, 0.0]),
        Options::new()
            .causal(true)
            .softmax_scale(-0.8)
            .sinks(vec![0.1; 4])
            .dropout(Dropout::Philox {
                p: 0.3,
                seed: 5,
                offset: 0,
            }),
        Options::new()
            .window_left(1)
            .alibi_slopes(vec![0.5, 0.25, 0.1, 1.0])
            .dropout(Dropout::Mask { p: 0.25 }),
    ]
    .into_iter()
    .enumerate()
    {
        let mut tensors: Vec<Vec<f64>> = shapes
            .iter()
            .map(|shape| noise.tensor(shape.iter().product(), 1.0))
            .collect();
        let dout: Vec<f64> = noise.tensor(40, 1.0);
        let dlse: Vec<f32> = noise.tensor(20, 1.0);
        let dlse_wide: Vec<f64> = dlse.iter().map(|&x| x.into()).collect();
        let inputs = |tensors: &[Vec<f64>], then: &mut dyn FnMut(Inputs<'_, f64>)| {
            let view = |n: usize| TensorView::bhsd(&tensors[n], shapes[n]).unwrap();
            let mask = matches!(options.get_dropout(), Some(Dropout::Mask { .. }));
            then(
                Inputs::new(view(0), view(1), view(2))
                    .bias(view(3))
                    .keep_mask(mask.then(|| TensorView::bhsd(&keep, [1, 4, 5, 6]).unwrap())),
            );
        };
        let evaluate = |tensors: &[Vec<f64>], options: &Options| {
            let mut value = 0.0;
            inputs(tensors, &mut |inputs| {
                let problem = Problem::new(&inputs, options).unwrap();
                value = loss(&problem, &inputs, &dout, &dlse_wide);
            });
            value
        };
        let mut analytic = Default::default();
        inputs(&tensors, &mut |inputs| {
            let lse = TensorView::bhsd(&dlse, [1, 4, 5, 1]).unwrap();
            let out = TensorView::bhsd(&dout, [1, 4, 5, 2]).unwrap();
            // Neither out nor lse is looked at by the definition.
            let backward = BackwardInputs::new(inputs, out, lse, out).dlse(lse);
            let problem = backward.problem(&options).unwrap();
            analytic = reference::gradients(&problem, &backward);
        });
        let expected = [&analytic.dq, &analytic.dk, &analytic.dv, &analytic.dbias];
        for (tensor, expected) in expected.into_iter().enumerate() {
            assert_eq!(expected.len(), tensors[tensor].len());
            for (at, &expected) in expected.iter().enumerate() {
                let kept = tensors[tensor][at];
                let mut side = |step: f64| {
                    tensors[tensor][at] = kept + step;
                    evaluate(&tensors, &options)
                };
                let slope = (side(STEP) - side(-STEP)) / (2.0 * STEP);
                tensors[tensor][at] = kept;
                assert!(
                    (slope - expected).abs() < 1e-7,
                    "{n} {tensor} {at}: {slope} {expected}"
                );
            }
        }
        if let Some(sinks) = options.get_sinks() {
            for head in 0..4 {
                let side = |step: f32| {
                    let mut sinks = sinks.to_vec();
                    sinks[head] += step;
                    (
                        f64::from(sinks[head]),
                        evaluate(&tensors, &options.clone().sinks(sinks)),
                    )
                };
                let ((x0, y0), (x1, y1)) = (side(-1e-3), side(1e-3));
                let slope = (y1 - y0) / (x1 - x0);
                let expected = analytic.dsinks[head];
                assert!(
                    (slope - expected).abs() < 1e-5,
                    "{n} sink {head}: {slope} {expected}"
                );
            }
        }
    }
}

fn plain_case() -> Case {
    let dims = Dims {
        batch: 1,
        num_heads: 4,
        num_kv_heads: 2,
        seqlen_q: 0,
        seqlen_k: 0,
        head_dim: 7,
        head_dim_v: 5,
    };
    Case {
        sequences: Sequences::Packed(vec![(5, 8), (0, 3), (9, 6), (4, 0)], false),
        options: Options::new().causal(true),
        ..Case::dense(77, dims)
    }
}

/// Nothing to do, on pages: once this failed.
#[test]
fn pages_without_rows_have_gradients() {
    let dims = Dims {
        num_heads: 1,
        num_kv_heads: 1,
        seqlen_k: 1,
        head_dim: 1,
        head_dim_v: 0,
        ..plain_case().dims()
    };
    let case = Case {
        sequences: Sequences::Paged(2, vec![0; 3]),
        bias: Some([false, false, true, false]),
        blocks: (1, 1),
        ..Case::dense(
            0,
            Dims {
                seqlen_q: 0,
                ..dims
            },
        )
    };
    check_case::<f32>(&case).unwrap();
}

/// Sinks that take nearly everything leave an output below the smallest f16, and Δ is made from it.
#[test]
fn an_output_below_its_types_smallest_number_is_allowed_for() {
    let dims = Dims {
        batch: 1,
        num_heads: 4,
        num_kv_heads: 2,
        seqlen_q: 11,
        seqlen_k: 6,
        head_dim: 9,
        head_dim_v: 11,
    };
    let case = Case {
        sinks: true,
        magnitude: 12.0,
        blocks: (1, 1),
        ..Case::dense(4455114292547043615, dims)
    };
    check_case::<f16>(&case).unwrap();
}

/// A packed batch has the gradients of its sequences, bit for bit.
#[test]
fn packed_sequences_have_their_own_gradients() {
    let case = Case {
        seed: 79,
        ..plain_case()
    };
    let mut setting = setting::<f32>(&case);
    setting.options = setting.options.dropout(None);
    setting.keep = None;
    setting.run_forward(forward(Algorithm::Fa2, sizes(&case)));
    let packed = run(&setting, Algorithm::Fa2, sizes(&case));
    let (problem, inputs) = (setting.problem(), setting.backward());
    let mut compared = 0;
    for sequence in problem.sequences() {
        let rows = sequence.q_start..sequence.q_start + sequence.seqlen_q;
        let keys = sequence.k_start..sequence.k_start + sequence.seqlen_k;
        let given = inputs.inputs;
        let alone = Inputs::new(
            given.q.narrow(2, rows.clone()),
            given.k.narrow(2, keys.clone()),
            given.v.narrow(2, keys.clone()),
        );
        let alone = BackwardInputs::new(
            alone,
            inputs.out.narrow(2, rows.clone()),
            inputs.lse.narrow(2, rows.clone()),
            inputs.dout.narrow(2, rows.clone()),
        )
        .dlse(inputs.dlse.map(|dlse| dlse.narrow(2, rows.clone())));
        let part = alone.problem(&setting.options).unwrap();
        let mut gradients = Gradients::filled(&part, &alone.inputs, f64::NAN).unwrap();
        let views = gradients.views_mut().unwrap();
        let observer = &mut NoObserver;
        fa2::backward(&part, &alone, sizes(&case), observer, views).unwrap();
        for (whole, part, heads, range, total, width) in [
            (
                &packed.dq,
                &gradients.dq,
                4,
                &rows,
                problem.dims().seqlen_q,
                7,
            ),
            (
                &packed.dk,
                &gradients.dk,
                2,
                &keys,
                problem.dims().seqlen_k,
                7,
            ),
            (
                &packed.dv,
                &gradients.dv,
                2,
                &keys,
                problem.dims().seqlen_k,
                5,
            ),
        ] {
            for head in 0..heads {
                let of = |values: &[f32], rows: usize, start: usize| {
                    values[(head * rows + start) * width..][..range.len() * width].to_vec()
                };
                assert_eq!(of(whole, total, range.start), of(part, range.len(), 0));
                compared += range.len();
            }
        }
    }
    assert!(compared > 100);
    // Rows and keys of no sequence.
    assert!(packed.dq[18 * 7..20 * 7].iter().all(|&x| x == 0.0));
    assert!(packed.dk[17 * 7..18 * 7].iter().all(|&x| x == 0.0));
}

/// Scores near −120: e^(−L) overflows f32, and so would the weight of a padded key.
#[test]
fn low_scores_beside_padding_stay_finite() {
    let q = Tensor::of(&[-11f32; 10], [1, 1, 5, 2], Layout::Bhsd, 0.0);
    let k = Tensor::of(&[5.5f32; 14], [1, 1, 7, 2], Layout::Bhsd, 0.0);
    let v: Vec<f32> = (0..14).map(|x| x as f32 / 7.0).collect();
    let v = Tensor::of(&v, [1, 1, 7, 2], Layout::Bhsd, 0.0);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let options = Options::new().causal(true).softmax_scale(1.0);
    let problem = Problem::new(&inputs, &options).unwrap();
    let sizes = BlockSizes::new(2, 4).unwrap();
    let (mut out, mut lse) = ([0f32; 10], [0f32; 5]);
    let out_view = TensorViewMut::bhsd(&mut out, [1, 1, 5, 2]).unwrap();
    let lse_view = TensorViewMut::bhs(&mut lse, [1, 1, 5]).unwrap();
    schedule::fa2::forward(
        &problem,
        &inputs,
        sizes,
        &mut NoObserver,
        out_view,
        Some(lse_view),
    )
    .unwrap();
    assert!(lse.iter().all(|&lse| lse < -88.0), "{lse:?}");
    let dout = [1f32; 10];
    let view = TensorView::bhsd(&out, [1, 1, 5, 2]).unwrap();
    let lse = TensorView::bhsd(&lse, [1, 1, 5, 1]).unwrap();
    let dout = TensorView::bhsd(&dout, [1, 1, 5, 2]).unwrap();
    let inputs = BackwardInputs::new(inputs, view, lse, dout);
    let judge = GradientJudge::new(&problem, &inputs);
    for algorithm in Algorithm::ALL {
        let mut gradients = Gradients::filled(&problem, &inputs.inputs, f64::NAN).unwrap();
        let observer = &mut NoObserver;
        let views = gradients.views_mut().unwrap();
        backward::backward(algorithm, &problem, &inputs, sizes, observer, views).unwrap();
        assert!(
            gradients
                .dq
                .iter()
                .chain(&gradients.dk)
                .all(|x| x.is_finite())
        );
        for comparison in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
            assert!(comparison.pass, "{algorithm}: {comparison:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let setting = setting::<f32>(&plain_case());
    let (problem, inputs) = (setting.problem(), setting.backward());
    let mut short = inputs;
    short.dout = short.dout.narrow(2, 0..3);
    assert!(matches!(
        short.problem(&setting.options),
        Err(Error::Shape { tensor, .. }) if tensor == "dout"
    ));
    let mut gradients = Gradients::filled(&problem, &inputs.inputs, 0.0).unwrap();
    let mut sinks = [0f32; 4];
    let mut views = gradients.views_mut().unwrap();
    views.dsinks = Some(&mut sinks);
    let error = views.check(&problem, &inputs.inputs).unwrap_err();
    assert!(error.to_string().starts_with("dsinks"), "{error}");
    // A mask without Dropout::Mask, Dropout::Mask without a mask, a share of one.
    let keep = [1u8];
    let masked = inputs
        .inputs
        .keep_mask(TensorView::bhsd(&keep, [1, 1, 1, 1]).unwrap());
    let with = |dropout| Options::new().dropout(dropout);
    assert!(Problem::new(&masked, &with(None)).is_err());
    let plain = inputs.inputs.keep_mask(None);
    assert!(Problem::new(&plain, &with(Some(Dropout::Mask { p: 0.5 }))).is_err());
    assert!(Problem::new(&masked, &with(Some(Dropout::Mask { p: 1.0 }))).is_err());
    assert!(Problem::new(&masked, &with(Some(Dropout::Mask { p: 0.5 }))).is_ok());
}

/// A judge that lets anything pass says nothing.
#[test]
fn a_wrong_gradient_does_not_pass() {
    let case = Case {
        bias: Some([true, false, true, false]),
        sinks: true,
        ..plain_case()
    };
    let setting = setting::<f32>(&case);
    let judge = GradientJudge::new(&setting.problem(), &setting.backward());
    let names: Vec<_> = judge.tolerances().map(|(name, _)| name).collect();
    assert_eq!(names, ["dq", "dk", "dv", "dbias", "dsinks"]);
    let good = run(&setting, Algorithm::Fa2, sizes(&case));
    for name in names {
        let mut bad = good.clone();
        let x = match name {
            "dq" => &mut bad.dq[3],
            "dk" => &mut bad.dk[3],
            "dv" => &mut bad.dv[3],
            "dbias" => &mut bad.dbias.as_mut().unwrap()[3],
            _ => &mut bad.dsinks.as_mut().unwrap()[3],
        };
        *x += 1e-4;
        for comparison in judge.compare(&bad.views_mut().unwrap()).unwrap() {
            assert_eq!(comparison.pass, comparison.tensor != name, "{comparison:?}");
            assert!(comparison.tolerance < 5e-5, "{comparison:?}");
        }
    }
}
