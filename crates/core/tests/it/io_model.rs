//! The closed forms are what the schedules report, element for element.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::half::f16;
use tilewise_core::io_model::{
    Asked, Io, Modifiers, Tally, backward_paper_terms, io_lower_bound, paper_terms,
};
use tilewise_core::observe::Tensor;
use tilewise_core::schedule::backward::{self, RowStatistics};
use tilewise_core::schedule::{fa1, fa2, standard};
use tilewise_core::{
    Algorithm, BlockSizes, DType, Dims, Element, Gradients, Inputs, NoObserver, Options, Problem,
    TensorViewMut,
};
use tilewise_testkit::{Case, Sequences, Setting, Sizes, case, cases};

fn counted<T: Element>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sizes: BlockSizes,
    with_lse: bool,
) -> Io {
    let dims = problem.dims();
    let mut out = vec![T::default(); dims.out_shape().iter().product()];
    let mut lse = vec![0.0; dims.lse_shape().iter().product()];
    let out = TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap();
    let lse = TensorViewMut::bhs(&mut lse, dims.lse_shape()).unwrap();
    let lse = with_lse.then_some(lse);
    let mut tally = Tally::default();
    match algorithm {
        Algorithm::Standard => standard::forward(problem, inputs, sizes, &mut tally, out, lse),
        Algorithm::Fa1 => fa1::forward(problem, inputs, sizes, &mut tally, out, lse),
        _ => fa2::forward(problem, inputs, sizes, &mut tally, out, lse),
    }
    .unwrap();
    tally.into_io()
}

fn check<T: Element>(case: &Case, with_lse: bool) -> TestCaseResult {
    let data = case.data::<T>();
    let (problem, inputs) = (data.problem(), data.inputs());
    let sizes = BlockSizes::new(case.blocks.0, case.blocks.1).unwrap();
    let modifiers = Modifiers {
        bias: inputs.bias.as_ref().map(|view| view.shape()),
        mask: inputs.mask.as_ref().map(|view| view.shape()),
        keep_mask: None,
    };
    for algorithm in Algorithm::ALL {
        let counted = counted(algorithm, &problem, &inputs, sizes, with_lse);
        let formula = Io::of(&problem, algorithm, sizes, modifiers, with_lse);
        prop_assert_eq!(counted, formula, "{}", algorithm);
    }
    Ok(())
}

/// The backward pass, with and without dropout, gradients that arrive at lse, and dbias; and the
/// forward pass under the same dropout.
fn check_backward<T: Element>(case: &Case) -> TestCaseResult {
    let sizes = BlockSizes::new(case.blocks.0, case.blocks.1).unwrap();
    let setting = Setting::<T>::new(case, |problem, _| {
        let dims = problem.dims();
        let out = vec![T::default(); dims.out_shape().iter().product()];
        (out, vec![0.0; dims.lse_shape().iter().product()])
    });
    let (problem, inputs) = (setting.problem(), setting.backward());
    let modifiers = Modifiers {
        bias: inputs.inputs.bias.map(|view| view.shape()),
        mask: inputs.inputs.mask.map(|view| view.shape()),
        keep_mask: inputs.inputs.keep_mask.map(|view| view.shape()),
    };
    let asked = Asked {
        dlse: inputs.dlse.is_some(),
        dbias: case.seed.is_multiple_of(2),
    };
    let statistics = RowStatistics::new(&problem, &inputs.inputs, sizes, &mut NoObserver).unwrap();
    for algorithm in Algorithm::ALL {
        let mut gradients = Gradients::filled(&problem, &inputs.inputs, 0.0).unwrap();
        let mut views = gradients.views_mut().unwrap();
        if !asked.dbias {
            views.dbias = None;
        }
        let mut tally = Tally::default();
        match algorithm {
            Algorithm::Standard => {
                backward::standard::backward(&problem, &inputs, sizes, &mut tally, views)
            }
            Algorithm::Fa1 => {
                backward::fa1::backward(&problem, &inputs, &statistics, sizes, &mut tally, views)
            }
            _ => backward::fa2::backward(&problem, &inputs, sizes, &mut tally, views),
        }
        .unwrap();
        let formula = Io::of_backward(&problem, algorithm, sizes, modifiers, asked);
        prop_assert_eq!(tally.into_io(), formula, "{}", algorithm);
        let counted = counted(algorithm, &problem, &inputs.inputs, sizes, true);
        let formula = Io::of(&problem, algorithm, sizes, modifiers, true);
        prop_assert_eq!(counted, formula, "forward {}", algorithm);
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(1024))]

    /// Dense, used lengths, packed and paged; causal and windows; bias and mask broadcast over any axes.
    #[test]
    fn closed_forms_are_what_a_run_counts(case in case(&Sizes::tiny()), with_lse in any::<bool>()) {
        check::<f32>(&case, with_lse)?;
        check::<f16>(&case, with_lse)?;
    }

    /// Longer sequences and larger blocks, where masks leave whole tiles out.
    #[test]
    fn closed_forms_hold_where_tiles_are_left_out(
        case in case(&Sizes::tiny()),
        lengths in (0usize..150, 0usize..150),
        window in (proptest::option::of(0usize..60), proptest::option::of(0usize..60)),
        blocks in (1usize..40, 1usize..40),
    ) {
        let case = Case {
            batch: 1,
            head_dim: 2,
            head_dim_v: 3,
            seqlen_q: lengths.0,
            seqlen_k: lengths.1,
            options: case.options.clone().window_left(window.0).window_right(window.1),
            blocks,
            sequences: Sequences::Dense,
            ..case
        };
        check::<f64>(&case, true)?;
        check_backward::<f64>(&case)?;
    }
}

proptest! {
    /// Likewise backward.
    #[test]
    fn backward_closed_forms_are_what_a_run_counts(case in case(&Sizes::tiny())) {
        check_backward::<f32>(&case)?;
        check_backward::<f16>(&case)?;
    }
}

fn problem(n: usize, keys: usize, d: usize, dtype: DType) -> Problem {
    let dims = Dims {
        batch: 2,
        num_heads: 4,
        num_kv_heads: 2,
        seqlen_q: n,
        seqlen_k: keys,
        head_dim: d,
        head_dim_v: d,
    };
    Problem::dense(dims, dtype, &Options::new()).unwrap()
}

/// The terms that the papers leave out are the statistics, FA1's first and last pass over O, and
/// re-reads of K and V by the products of standard attention.
#[test]
fn papers_terms_differ_by_what_they_leave_out() {
    let problem = problem(1000, 800, 64, DType::F32);
    let sizes = BlockSizes::new(64, 96).unwrap();
    let (heads, n, keys, d) = (8u128, 1000u128, 800u128, 64u128);
    let (t_r, t_c) = (16u128, 9u128);
    let elements = |algorithm| {
        let exact = Io::of(&problem, algorithm, sizes, Modifiers::default(), true);
        (
            exact.elements(),
            paper_terms(&problem, algorithm, sizes).elements(),
        )
    };
    let (exact, paper) = elements(Algorithm::Fa1);
    assert_eq!(paper, heads * (2 * keys * d + 3 * t_c * n * d));
    assert_eq!(
        exact - paper,
        heads * (2 * n * d + 4 * (t_c + 1) * n + n * d + n)
    );
    let (exact, paper) = elements(Algorithm::Fa2);
    assert_eq!(paper, heads * (2 * n * d + 2 * t_r * keys * d));
    assert_eq!(exact - paper, heads * n);
    let (exact, paper) = elements(Algorithm::Standard);
    assert_eq!(paper, heads * (2 * n * d + 2 * keys * d + 4 * n * keys));
    assert_eq!(exact - paper, heads * (2 * (t_r - 1) * keys * d + n));
    let bound = io_lower_bound(&problem, 4096);
    assert_eq!(bound, 8.0 * 1000.0 * 800.0 * 64.0 * 64.0 / 4096.0);
}

/// Backward the papers leave out: statistics and Δ, dQ's zeros and its last pass in and out, FA2's
/// dout for nothing; of standard attention the softmax done again, and re-reads by its products.
#[test]
fn backward_papers_terms_differ_by_what_they_leave_out() {
    let problem = problem(1000, 800, 64, DType::F32);
    let sizes = BlockSizes::new(64, 96).unwrap();
    let (heads, kv_heads) = (8u128, 4u128);
    let (n, keys, d) = (1000u128, 800u128, 64u128);
    let (t_r, t_c) = (16u128, 9u128);
    let elements = |algorithm| {
        let (modifiers, asked) = (Modifiers::default(), Asked::default());
        let exact = Io::of_backward(&problem, algorithm, sizes, modifiers, asked);
        let paper = backward_paper_terms(&problem, algorithm, sizes);
        (exact.elements(), paper.elements())
    };
    // dQ of zeros out, dQ in and dq out.
    let of_dq = 3 * n * d;
    let once = kv_heads * 4 * keys * d;
    let (exact, paper) = elements(Algorithm::Fa1);
    assert_eq!(paper, once + heads * 5 * t_c * n * d);
    assert_eq!(exact - paper, heads * (2 * t_c * n + of_dq));
    let (exact, paper) = elements(Algorithm::Fa2);
    assert_eq!(paper, once + heads * (2 * n * d + 4 * t_c * n * d));
    assert_eq!(exact - paper, heads * (2 * t_c * n + n + of_dq));
    let (exact, paper) = elements(Algorithm::Standard);
    assert_eq!(paper, once + heads * (4 * n * d + 7 * n * keys));
    let reads = heads * ((t_c * n * d + 3 * t_r * keys * d) + (t_c - 1) * n * d);
    let shared = kv_heads * 2 * 2 * keys * d;
    assert_eq!(
        exact - paper,
        reads - kv_heads * 2 * keys * d + shared + heads * 3 * n * keys
    );
}

/// Three parts to two: with equal tiles FA1 moves q and O in and O out where FA2 moves K and V.
#[test]
fn equal_tiles_move_three_parts_to_two() {
    let problem = problem(1 << 16, 1 << 16, 64, DType::F32);
    let sizes = BlockSizes::new(64, 64).unwrap();
    let elements = |algorithm| {
        let io = Io::of(&problem, algorithm, sizes, Modifiers::default(), true);
        io.elements() as f64
    };
    let ratio = elements(Algorithm::Fa1) / elements(Algorithm::Fa2);
    assert!((ratio - 1.5).abs() < 0.04, "{ratio}");
}

#[test]
fn the_largest_problem_there_is_does_not_wrap_around() {
    let (rows, keys) = (1usize << 45, 1usize << 45);
    let problem = problem(rows, keys, 1, DType::F64);
    let heads = (problem.dims().batch * problem.dims().num_heads) as u128;
    let sizes = BlockSizes::new(1, 1).unwrap();
    let io = Io::of(&problem, Algorithm::Fa2, sizes, Modifiers::default(), true);
    assert_eq!(io.count(Tensor::K).unwrap().loaded, heads << 90);
    assert!(io.bytes() > (2 * 8 * heads) << 90);
}
