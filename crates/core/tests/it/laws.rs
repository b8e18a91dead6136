//! The laws of the online softmax, at the grain of a tile.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::observe::{Finish, Step};
use tilewise_core::schedule::{fa1, fa2};
use tilewise_core::tile::{TileBlock, TileMath, TileOutput, TileSpec, TileState};
use tilewise_core::{
    BlockSizes, Element, Float, Inputs, Judge, Observer, OnlineSoftmax, Options, Problem,
    RowSample, TensorView, TensorViewMut,
};
use tilewise_testkit::Noise;

/// One head: sizes, options, and where the keys are cut.
#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    keys: usize,
    head_dim: usize,
    head_dim_v: usize,
    options: Options,
    biased: bool,
    masked: bool,
    seed: u64,
    cuts: Vec<usize>,
}

fn case() -> impl Strategy<Value = Case> {
    let options = (
        any::<bool>(),
        proptest::option::of(0usize..6),
        proptest::option::of(0usize..6),
        proptest::option::weighted(0.3, 1f64..30.0),
        proptest::option::weighted(0.3, -1f32..1.0),
    )
        .prop_map(|(causal, left, right, cap, slope)| {
            Options::new()
                .causal(causal)
                .window_left(left)
                .window_right(right)
                .softcap(cap)
                .alibi_slopes(slope.map(|slope| vec![slope]))
        });
    (
        (1usize..7, 1usize..16, 1usize..10, 1usize..10),
        options,
        (any::<bool>(), any::<bool>(), any::<u64>()),
        proptest::collection::vec(0usize..16, 0..5),
    )
        .prop_map(|(sizes, options, (biased, masked, seed), cuts)| Case {
            rows: sizes.0,
            keys: sizes.1,
            head_dim: sizes.2,
            head_dim_v: sizes.3,
            options,
            biased,
            masked,
            seed,
            cuts,
        })
}

struct Head<F> {
    case: Case,
    q: Vec<F>,
    k: Vec<F>,
    v: Vec<F>,
    bias: Option<Vec<F>>,
    mask: Option<Vec<u8>>,
}

impl<F: Float> Head<F> {
    fn new(case: &Case) -> Self {
        let mut noise = Noise(case.seed);
        let pairs = case.rows * case.keys;
        Head {
            q: noise.tensor(case.rows * case.head_dim, 2.0),
            k: noise.tensor(case.keys * case.head_dim, 2.0),
            v: noise.tensor(case.keys * case.head_dim_v, 1.0),
            bias: case.biased.then(|| noise.tensor(pairs, 1.0)),
            mask: case.masked.then(|| {
                (0..pairs)
                    .map(|_| u8::from(!noise.bits().is_multiple_of(3)))
                    .collect()
            }),
            case: case.clone(),
        }
    }

    fn inputs(&self) -> Inputs<'_, F> {
        let case = &self.case;
        let pairs = [1, 1, case.rows, case.keys];
        let view = |data, shape| TensorView::bhsd(data, shape).unwrap();
        let mut inputs = Inputs::new(
            view(&self.q, [1, 1, case.rows, case.head_dim]),
            view(&self.k, [1, 1, case.keys, case.head_dim]),
            view(&self.v, [1, 1, case.keys, case.head_dim_v]),
        );
        inputs.bias = self.bias.as_ref().map(|bias| view(bias, pairs));
        inputs.mask = self
            .mask
            .as_ref()
            .map(|mask| TensorView::bhsd(mask, pairs).unwrap());
        inputs
    }

    fn problem(&self) -> Problem {
        Problem::new(&self.inputs(), &self.case.options).unwrap()
    }

    fn spec(&self) -> TileSpec<F> {
        let problem = self.problem();
        TileSpec::new(&problem, &problem.sequences()[0], 0, 0..self.case.rows)
    }

    /// The columns of a `[rows, keys]` tensor.
    fn columns<U: Copy>(&self, values: &[U], keys: &std::ops::Range<usize>) -> Vec<U> {
        values
            .chunks(self.case.keys)
            .flat_map(|row| &row[keys.clone()])
            .copied()
            .collect()
    }

    fn with_block<R>(
        &self,
        keys: std::ops::Range<usize>,
        then: impl FnOnce(TileBlock<'_, F>) -> R,
    ) -> R {
        let bias = self.bias.as_ref().map(|bias| self.columns(bias, &keys));
        let mask = self.mask.as_ref().map(|mask| self.columns(mask, &keys));
        then(TileBlock {
            q: &self.q,
            k: &self.k[keys.start * self.case.head_dim..keys.end * self.case.head_dim],
            v: &self.v[keys.start * self.case.head_dim_v..keys.end * self.case.head_dim_v],
            keys,
            bias: bias.as_deref(),
            mask: mask.as_deref(),
            keep: None,
        })
    }

    fn state(&self, keys: std::ops::Range<usize>) -> TileState<F> {
        let math = TileMath::new();
        let mut state = math.begin(&self.spec()).unwrap();
        self.with_block(keys, |block| math.absorb(&mut state, block))
            .unwrap();
        state
    }

    /// The keys cut into parts, in an order that is not theirs.
    fn parts(&self) -> Vec<std::ops::Range<usize>> {
        let mut cuts: Vec<usize> = self
            .case
            .cuts
            .iter()
            .map(|cut| cut % self.case.keys)
            .collect();
        cuts.extend([0, self.case.keys]);
        cuts.sort_unstable();
        let mut parts: Vec<_> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let mut noise = Noise(self.case.seed);
        for n in (1..parts.len()).rev() {
            parts.swap(n, noise.bits() as usize % (n + 1));
        }
        parts
    }
}

fn merged<F: Float>(a: &TileState<F>, b: &TileState<F>) -> TileState<F> {
    let mut state = a.clone();
    TileMath::new().merge(&mut state, b).unwrap();
    state
}

fn finished<F: Float>(state: TileState<F>) -> (Vec<F>, Vec<F>) {
    let mut out = vec![F::nan(); state.acc().len()];
    let mut lse = vec![F::nan(); state.m().len()];
    let output = TileOutput {
        out: &mut out,
        lse: &mut lse,
    };
    TileMath::new().finish(state, output).unwrap();
    (out, lse)
}

fn f64s<F: Float>(values: &[F]) -> Vec<f64> {
    values.iter().map(|&x| Element::to_f64(x)).collect()
}

/// Equal up to `units` roundings of numbers of size `scale`.
fn near<F: Float>(a: &[F], b: &[F], units: f64, scale: f64) -> TestCaseResult {
    prop_assert_eq!(a.len(), b.len());
    let bound = units * F::DTYPE.unit_roundoff() * scale;
    for (x, y) in f64s(a).into_iter().zip(f64s(b)) {
        prop_assert!(
            x == y || (x - y).abs() <= bound * y.abs().max(1.0),
            "{x} is not {y}"
        );
    }
    Ok(())
}

/// The same state up to rounding. Sums here have at most 16 terms of size e^0 · 2.
fn same_state<F: Float>(a: &TileState<F>, b: &TileState<F>) -> TestCaseResult {
    prop_assert_eq!(f64s(a.m()), f64s(b.m()));
    near(a.l(), b.l(), 40.0, 4.0)?;
    near(a.acc(), b.acc(), 40.0, 8.0)
}

/// Law 1.
fn merge_is_a_commutative_monoid<F: Float>(case: &Case) -> TestCaseResult {
    let head = Head::<F>::new(case);
    let third = case.keys / 3;
    let [a, b, c] = [0..third, third..2 * third, 2 * third..case.keys].map(|keys| head.state(keys));
    same_state(&merged(&merged(&a, &b), &c), &merged(&a, &merged(&b, &c)))?;
    same_state(&merged(&a, &b), &merged(&b, &a))?;
    let empty = TileMath::new().begin(&head.spec()).unwrap();
    for state in [&a, &c, &empty] {
        // Not only up to rounding.
        for neutral in [merged(state, &empty), merged(&empty, state)] {
            prop_assert_eq!(f64s(neutral.m()), f64s(state.m()));
            prop_assert_eq!(f64s(neutral.l()), f64s(state.l()));
            prop_assert_eq!(f64s(neutral.acc()), f64s(state.acc()));
        }
    }
    // Through the host and back nothing is lost.
    let math = TileMath::<F>::new();
    let host = math.export(&a).unwrap();
    let back = math.import(&head.spec(), &host).unwrap();
    prop_assert_eq!(math.export(&back).unwrap(), host);
    Ok(())
}

/// Law 2: parts absorbed or merged in any order.
fn any_partition_gives_attention<F: Float>(case: &Case) -> TestCaseResult {
    let head = Head::<F>::new(case);
    let problem = head.problem();
    let math = TileMath::new();
    let judge = Judge::new(&problem, &head.inputs(), &RowSample::all(&problem));
    let mut absorbed = math.begin(&head.spec()).unwrap();
    let mut joined = math.begin(&head.spec()).unwrap();
    for (n, part) in head.parts().into_iter().enumerate() {
        head.with_block(part.clone(), |block| math.absorb(&mut absorbed, block))
            .unwrap();
        let state = head.state(part);
        joined = if n % 2 == 0 {
            merged(&joined, &state)
        } else {
            merged(&state, &joined)
        };
    }
    for state in [absorbed, joined] {
        let (out, lse) = finished(state);
        let lse: Vec<f32> = lse.iter().map(|&x| Element::to_f64(x) as f32).collect();
        let comparison = judge
            .compare(
                &TensorView::bhsd(&out, [1, 1, case.rows, case.head_dim_v]).unwrap(),
                Some(&TensorView::bhsd(&lse, [1, 1, case.rows, 1]).unwrap()),
            )
            .unwrap();
        prop_assert!(comparison.pass, "{comparison:?}");
    }
    Ok(())
}

/// Law 3.
fn a_constant_bias_moves_lse_only<F: Float>(case: &Case, constant: f64) -> TestCaseResult {
    let mut head = Head::<F>::new(case);
    let (out, lse) = finished(head.state(0..case.keys));
    let bias = head
        .bias
        .get_or_insert_with(|| vec![F::zero(); case.rows * case.keys]);
    let constant = <F as Element>::from_f64(constant);
    bias.iter_mut().for_each(|bias| *bias += constant);
    let (moved_out, moved_lse) = finished(head.state(0..case.keys));
    let moved: Vec<F> = lse.iter().map(|&lse| lse + constant).collect();
    let size = 32.0 + Element::to_f64(constant).abs();
    near(&moved_lse, &moved, 8.0, size)?;
    near(&moved_out, &out, 16.0, size)
}

/// The last state of every block of rows.
struct Last<F> {
    states: Vec<[Vec<F>; 3]>,
    rows: usize,
}

impl<F: Float> Observer for Last<F> {
    fn step<G: Float>(&mut self, step: &Step<'_, G>) {
        let block = step.tile.rows.start / self.rows;
        self.states[block] = [step.m, step.l, step.o].map(|values| {
            let convert = |&x: &G| <F as Element>::from_f64(Element::to_f64(x));
            values.iter().map(convert).collect()
        });
    }

    fn finish<G: Float>(&mut self, finish: &Finish<'_, G>) {
        assert!(finish.row_block < self.states.len());
    }
}

/// Law 4.
fn fa1_keeps_the_same_state_normalised<F: Float>(
    case: &Case,
    rows: usize,
    keys: usize,
) -> TestCaseResult {
    let head = Head::<F>::new(case);
    let problem = head.problem();
    let sizes = BlockSizes::new(rows, keys).unwrap();
    let last = || Last::<F> {
        states: vec![Default::default(); case.rows.div_ceil(rows)],
        rows,
    };
    let (mut first, mut second) = (last(), last());
    let mut out = vec![F::zero(); case.rows * case.head_dim_v];
    let shape = problem.dims().out_shape();
    let view = TensorViewMut::bhsd(&mut out, shape).unwrap();
    fa1::forward(&problem, &head.inputs(), sizes, &mut first, view, None).unwrap();
    let view = TensorViewMut::bhsd(&mut out, shape).unwrap();
    fa2::forward(&problem, &head.inputs(), sizes, &mut second, view, None).unwrap();
    for ([m1, l1, o], [m2, l2, acc]) in first.states.iter().zip(&second.states) {
        prop_assert_eq!(f64s(m1), f64s(m2));
        near(l1, l2, 40.0, 4.0)?;
        let scaled: Vec<F> = o
            .chunks(case.head_dim_v)
            .zip(l1)
            .flat_map(|(row, &l)| row.iter().map(move |&o| o * l))
            .collect();
        near(&scaled, acc, 80.0, 8.0)?;
    }
    Ok(())
}

/// Law 5.
fn weights_sum_to_one<F: Float>(case: &Case, sink: Option<f32>) -> TestCaseResult {
    let mut case = case.clone();
    case.options = case.options.clone().sinks(sink.map(|sink| vec![sink]));
    let head = Head::<F>::new(&case);
    let mut scores = Vec::new();
    head.with_block(0..case.keys, |block| {
        head.spec().scores(&block, &mut scores)
    })
    .unwrap();
    let (_, lse) = finished(head.state(0..case.keys));
    for (scores, &lse) in scores.chunks(case.keys).zip(&lse) {
        let lse = Element::to_f64(lse);
        let live = scores.iter().any(|&s| s != F::neg_infinity());
        let sum: f64 = scores
            .iter()
            .filter(|&&s| s != F::neg_infinity())
            .map(|&s| (Element::to_f64(s) - lse).exp())
            .sum();
        let expected = match (live, sink) {
            (false, _) => 0.0,
            (true, Some(sink)) => 1.0 - (f64::from(sink) - lse).exp(),
            (true, None) => 1.0,
        };
        prop_assert!(
            (sum - expected).abs() < 300.0 * F::DTYPE.unit_roundoff(),
            "{sum} {expected}"
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn law_1(case in case()) {
        merge_is_a_commutative_monoid::<f32>(&case)?;
        merge_is_a_commutative_monoid::<f64>(&case)?;
    }

    #[test]
    fn law_2(case in case(), sink in proptest::option::of(-2f32..2.0)) {
        let mut case = case;
        case.options = case.options.clone().sinks(sink.map(|sink| vec![sink]));
        any_partition_gives_attention::<f32>(&case)?;
        any_partition_gives_attention::<f64>(&case)?;
    }

    #[test]
    fn law_3(case in case(), constant in -50f64..50.0) {
        a_constant_bias_moves_lse_only::<f32>(&case, constant)?;
        a_constant_bias_moves_lse_only::<f64>(&case, constant)?;
    }

    #[test]
    fn law_4(case in case(), rows in 1usize..5, keys in 1usize..7) {
        fa1_keeps_the_same_state_normalised::<f32>(&case, rows, keys)?;
        fa1_keeps_the_same_state_normalised::<f64>(&case, rows, keys)?;
    }

    #[test]
    fn law_5(case in case(), sink in proptest::option::of(-2f32..2.0)) {
        weights_sum_to_one::<f32>(&case, sink)?;
        weights_sum_to_one::<f64>(&case, sink)?;
    }
}

#[test]
fn states_of_other_rows_do_not_merge() {
    let case = |rows| Case {
        rows,
        keys: 3,
        head_dim: 2,
        head_dim_v: 2,
        options: Options::new(),
        biased: false,
        masked: false,
        seed: 1,
        cuts: Vec::new(),
    };
    let (a, b) = (Head::<f32>::new(&case(2)), Head::<f32>::new(&case(3)));
    let math = TileMath::new();
    let mut state = a.state(0..3);
    assert!(math.merge(&mut state, &b.state(0..3)).is_err());
    let host = math.export(&state).unwrap();
    assert!(math.import(&b.spec(), &host).is_err());
    // Tiles of the wrong size, or beyond the keys.
    let block = |k: &[f32], keys| {
        let mut state = math.begin(&a.spec()).unwrap();
        let block = TileBlock {
            q: &a.q,
            k,
            v: &a.v,
            keys,
            bias: None,
            mask: None,
            keep: None,
        };
        math.absorb(&mut state, block)
    };
    assert!(block(&a.k, 0..3).is_ok());
    assert!(block(&a.k[1..], 0..3).is_err());
    assert!(block(&a.k, 1..4).is_err());
}
