//! What the schedules report: every element moved, every tile, every state.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tilewise_core::half::bf16;
use tilewise_core::observe::{Finish, Operation, Product, Step, Tensor, Tile, Transfer, Weights};
use tilewise_core::schedule;
use tilewise_core::{
    Algorithm, BlockSizes, Element, Float, Inputs, Live, Observer, Options, Problem, TensorView,
    TensorViewMut,
};
use tilewise_testkit::{Case, Sequences, Sizes, case};

/// Counts everything.
#[derive(Default)]
struct Counter {
    loads: BTreeMap<Tensor, usize>,
    stores: BTreeMap<Tensor, usize>,
    bytes: usize,
    element_bytes: BTreeMap<Tensor, usize>,
    steps: Vec<Tile>,
    skips: Vec<Tile>,
    multiply_adds: usize,
    operations: BTreeMap<Operation, usize>,
    finished: usize,
}

impl Observer for Counter {
    fn load(&mut self, transfer: Transfer) {
        *self.loads.entry(transfer.tensor).or_default() += transfer.elements;
        self.element_bytes
            .insert(transfer.tensor, transfer.element_bytes);
        self.bytes += transfer.bytes();
    }

    fn store(&mut self, transfer: Transfer) {
        *self.stores.entry(transfer.tensor).or_default() += transfer.elements;
        self.element_bytes
            .insert(transfer.tensor, transfer.element_bytes);
        self.bytes += transfer.bytes();
    }

    fn skip(&mut self, tile: &Tile) {
        self.skips.push(tile.clone());
    }

    fn product(&mut self, _: &Tile, product: Product) {
        self.multiply_adds += product.rows * product.columns * product.inner;
    }

    fn operations(&mut self, operation: Operation, count: usize) {
        *self.operations.entry(operation).or_default() += count;
    }

    fn step<F: Float>(&mut self, step: &Step<'_, F>) {
        assert_eq!(step.alpha.len(), step.tile.rows.len());
        assert_eq!(step.m.len(), step.tile.rows.len());
        self.steps.push(step.tile.clone());
    }

    fn finish<F: Float>(&mut self, finish: &Finish<'_, F>) {
        self.finished += finish.lse.len();
    }
}

fn run<T: Element, O: Observer>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    (rows, keys): (usize, usize),
    mut observer: O,
) -> O {
    let dims = problem.dims();
    let sizes = BlockSizes::new(rows, keys).unwrap();
    let mut out = vec![T::default(); dims.out_shape().iter().product()];
    let mut lse = vec![0.0; dims.lse_shape().iter().product()];
    let out = TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap();
    let lse = Some(TensorViewMut::bhs(&mut lse, dims.lse_shape()).unwrap());
    schedule::forward(algorithm, problem, inputs, sizes, &mut observer, out, lse).unwrap();
    observer
}

fn check_dense<T: Element>(case: &Case) -> TestCaseResult {
    let data = case.data::<T>();
    let (problem, inputs) = (data.problem(), data.inputs());
    let dims = problem.dims();
    let (d, dv) = (dims.head_dim, dims.head_dim_v);
    let (n, nk) = (dims.seqlen_q, dims.seqlen_k);
    let heads = dims.batch * dims.num_heads;
    let (t_r, t_c) = (n.div_ceil(case.blocks.0), nk.div_ceil(case.blocks.1));
    for algorithm in Algorithm::ALL {
        let counter = run(
            algorithm,
            &problem,
            &inputs,
            case.blocks,
            Counter::default(),
        );
        let (loads, stores) = match algorithm {
            Algorithm::Standard => (
                vec![
                    (Tensor::Q, n * d),
                    (Tensor::K, t_r * nk * d),
                    (Tensor::V, t_r * nk * dv),
                    (Tensor::S, n * nk),
                    (Tensor::P, n * nk),
                ],
                vec![(Tensor::S, n * nk), (Tensor::P, n * nk)],
            ),
            Algorithm::Fa1 => (
                vec![
                    (Tensor::Q, t_c * n * d),
                    (Tensor::K, if n > 0 { nk * d } else { 0 }),
                    (Tensor::V, if n > 0 { nk * dv } else { 0 }),
                    // Once a step, and once in the end.
                    (Tensor::O, (t_c + 1) * n * dv),
                    (Tensor::M, (t_c + 1) * n),
                    (Tensor::L, (t_c + 1) * n),
                ],
                // Once a step, and once in the beginning.
                vec![
                    (Tensor::O, (t_c + 1) * n * dv),
                    (Tensor::M, (t_c + 1) * n),
                    (Tensor::L, (t_c + 1) * n),
                ],
            ),
            _ => (
                vec![
                    (Tensor::Q, n * d),
                    (Tensor::K, t_r * nk * d),
                    (Tensor::V, t_r * nk * dv),
                ],
                Vec::new(),
            ),
        };
        let mut stores = stores;
        stores.extend([(Tensor::Out, n * dv), (Tensor::Lse, n)]);
        let expected = |counts: Vec<(Tensor, usize)>| {
            let counts = counts
                .into_iter()
                .map(|(tensor, count)| (tensor, count * heads));
            counts
                .filter(|&(_, count)| count > 0)
                .collect::<BTreeMap<_, _>>()
        };
        let got = |counts: &BTreeMap<Tensor, usize>| {
            let counts = counts.clone().into_iter();
            counts
                .filter(|&(_, count)| count > 0)
                .collect::<BTreeMap<_, _>>()
        };
        prop_assert_eq!(got(&counter.loads), expected(loads), "{}", algorithm);
        prop_assert_eq!(got(&counter.stores), expected(stores), "{}", algorithm);
        prop_assert_eq!(counter.multiply_adds, heads * n * nk * (d + dv));
        prop_assert_eq!(counter.finished, heads * n);
        let total = counter.loads.iter().chain(&counter.stores);
        let bytes: usize = total
            .map(|(tensor, n)| counter.element_bytes[tensor] * n)
            .sum();
        prop_assert_eq!(counter.bytes, bytes);
        for (tensor, &bytes) in &counter.element_bytes {
            let expected = match tensor {
                Tensor::Q | Tensor::K | Tensor::V | Tensor::Out => T::DTYPE.size(),
                Tensor::Lse => 4,
                _ => T::DTYPE.accumulator().size(),
            };
            prop_assert_eq!(bytes, expected);
        }
        let operations = |operation| counter.operations.get(&operation).copied().unwrap_or(0);
        prop_assert_eq!(operations(Operation::Exp), heads * n * nk);
        let rescales = match algorithm {
            Algorithm::Standard => 0,
            Algorithm::Fa1 => (3 * t_c + 1) * n * dv,
            _ => t_c * n * dv,
        };
        prop_assert_eq!(operations(Operation::Rescale), heads * rescales);
        let divisions = match algorithm {
            Algorithm::Standard => n * nk,
            Algorithm::Fa1 => (t_c + 1) * n * dv,
            _ => n * dv,
        };
        prop_assert_eq!(operations(Operation::Divide), heads * divisions);
    }
    Ok(())
}

proptest! {
    #[test]
    fn dense_traffic_is_as_the_papers_count_it(case in case(&Sizes::tiny())) {
        let case = Case {
            sequences: Sequences::Dense,
            options: Options::new(),
            bias: None,
            mask: None,
            ..case
        };
        check_dense::<f32>(&case)?;
        check_dense::<bf16>(&case)?;
    }

    /// Every tile is stepped over once or skipped once, and only those with no live key are skipped.
    #[test]
    fn tiles_are_visited_once(case in case(&Sizes::tiny())) {
        let data = case.data::<f32>();
        let (problem, inputs) = (data.problem(), data.inputs());
        for algorithm in [Algorithm::Fa1, Algorithm::Fa2] {
            let counter = run(algorithm, &problem, &inputs, case.blocks, Counter::default());
            let mut tiles = BTreeMap::new();
            for (tile, stepped) in counter
                .steps
                .iter()
                .map(|tile| (tile, true))
                .chain(counter.skips.iter().map(|tile| (tile, false)))
            {
                let sequence = &problem.sequences()[tile.sequence];
                let rule = problem.mask_rule(sequence);
                let live = rule.tile(tile.rows.clone(), tile.keys.clone());
                prop_assert_eq!(live, tile.live);
                prop_assert_eq!(live != Live::None, stepped);
                let place = (tile.sequence, tile.head, tile.row_block, tile.key_block);
                prop_assert!(tiles.insert(place, tile.rows.len() * tile.keys.len()).is_none());
            }
            let pairs: usize = problem.sequences().iter().map(|s| s.seqlen_q * s.seqlen_k).sum();
            prop_assert_eq!(tiles.values().sum::<usize>(), pairs * problem.dims().num_heads);
        }
    }
}

/// Keeps what one row goes through.
#[derive(Default)]
struct Diary {
    steps: Vec<[f64; 4]>,
    blocks: Vec<[f64; 3]>,
    scores: Vec<f64>,
    weights: Vec<[f64; 2]>,
    p: Vec<f64>,
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Observer for Diary {
    fn scores<F: Float>(&mut self, tile: &Tile, scores: &[F]) {
        assert_eq!(scores.len(), tile.rows.len() * tile.keys.len());
        self.scores
            .extend(scores.iter().map(|&x| Element::to_f64(x)));
    }

    fn weights<F: Float>(&mut self, weights: &Weights<'_, F>) {
        self.weights
            .push([weights.m, weights.l].map(Element::to_f64));
        self.p.extend(weights.p.iter().map(|&x| Element::to_f64(x)));
    }

    fn step<F: Float>(&mut self, step: &Step<'_, F>) {
        let first = |values: &[F]| Element::to_f64(values[0]);
        self.steps.push([
            first(step.alpha),
            first(step.m),
            first(step.l),
            first(step.o),
        ]);
        if let Some(block) = &step.block {
            self.blocks
                .push([first(block.m), first(block.l), first(block.beta)]);
        }
    }

    fn finish<F: Float>(&mut self, finish: &Finish<'_, F>) {
        self.out
            .extend(finish.out.iter().map(|&x| Element::to_f64(x)));
        self.lse
            .extend(finish.lse.iter().map(|&x| Element::to_f64(x)));
    }
}

#[test]
fn scores_one_three_two_step_by_step() {
    let (q, k, v) = ([1.0f64], [1.0, 3.0, 2.0], [10.0, 20.0, 30.0]);
    let inputs = Inputs::new(
        TensorView::bhsd(&q, [1, 1, 1, 1]).unwrap(),
        TensorView::bhsd(&k, [1, 1, 3, 1]).unwrap(),
        TensorView::bhsd(&v, [1, 1, 3, 1]).unwrap(),
    );
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let e = |x: f64| x.exp();
    let l = [1.0, e(-2.0) + 1.0, e(-2.0) + 1.0 + e(-1.0)];
    let acc = [
        10.0,
        10.0 * e(-2.0) + 20.0,
        10.0 * e(-2.0) + 20.0 + 30.0 * e(-1.0),
    ];
    let (m, alpha) = ([1.0, 3.0, 3.0], [0.0, e(-2.0), 1.0]);
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-14 * b.abs().max(1.0), "{a} {b}");
    let fa2 = run(Algorithm::Fa2, &problem, &inputs, (1, 1), Diary::default());
    let fa1 = run(Algorithm::Fa1, &problem, &inputs, (1, 1), Diary::default());
    assert!(fa2.blocks.is_empty());
    for n in 0..3 {
        for (got, expected) in fa2.steps[n].into_iter().zip([alpha[n], m[n], l[n], acc[n]]) {
            near(got, expected);
        }
        let expected = [alpha[n], m[n], l[n], acc[n] / l[n]];
        for (got, expected) in fa1.steps[n].into_iter().zip(expected) {
            near(got, expected);
        }
        let beta = [1.0, 1.0, e(-1.0)];
        for (got, expected) in fa1.blocks[n].into_iter().zip([k[n], 1.0, beta[n]]) {
            near(got, expected);
        }
    }
    let standard = run(
        Algorithm::Standard,
        &problem,
        &inputs,
        (1, 1),
        Diary::default(),
    );
    assert_eq!(standard.weights.len(), 1);
    near(standard.weights[0][0], 3.0);
    near(standard.weights[0][1], l[2]);
    for (&p, s) in standard.p.iter().zip(k) {
        near(p, e(s - 3.0) / l[2]);
    }
    assert!(fa1.weights.is_empty() && fa2.weights.is_empty());
    for diary in [standard, fa1, fa2] {
        assert_eq!(diary.scores, k);
        near(diary.out[0], acc[2] / l[2]);
        near(diary.lse[0], 3.0 + l[2].ln());
    }
}
