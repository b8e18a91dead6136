//! The closed forms are what the schedules report, element for element.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::half::f16;
use tilewise_core::io_model::{Io, Modifiers, Tally, io_lower_bound, paper_terms};
use tilewise_core::observe::Tensor;
use tilewise_core::schedule::{fa1, fa2, standard};
use tilewise_core::{
    Algorithm, BlockSizes, DType, Dims, Element, Inputs, Options, Problem, TensorViewMut,
};
use tilewise_testkit::{Case, Sequences, Sizes, case};

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
    };
    for algorithm in Algorithm::ALL {
        let counted = counted(algorithm, &problem, &inputs, sizes, with_lse);
        let formula = Io::of(&problem, algorithm, sizes, modifiers, with_lse);
        prop_assert_eq!(counted, formula, "{}", algorithm);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

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
