//! The naive definition against numbers worked out by hand.

use tilewise_core::half::f16;
use tilewise_core::reference::{self, Reference};
use tilewise_core::{Alignment, BlockTable, Element, Inputs, Options, Problem, TensorView, gather};

fn view<T: Copy>(data: &[T], shape: [usize; 4]) -> TensorView<'_, T> {
    TensorView::bhsd(data, shape).unwrap()
}

fn attention<T: Element>(inputs: &Inputs<'_, T>, options: &Options) -> Reference {
    reference::forward(&Problem::new(inputs, options).unwrap(), inputs)
}

fn near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (x, y) in got.iter().zip(expected) {
        assert!(
            (x - y).abs() <= 4e-16 * y.abs().max(1.0) || x == y,
            "{got:?} is not {expected:?}"
        );
    }
}

#[test]
fn weights_two_to_one() {
    let (q, k, v) = ([1.0f64], [2f64.ln(), 0.0], [3.0, 0.0]);
    let inputs = Inputs::new(
        view(&q, [1, 1, 1, 1]),
        view(&k, [1, 1, 2, 1]),
        view(&v, [1, 1, 2, 1]),
    );
    let full = attention(&inputs, &Options::new());
    near(&full.out, &[2.0]);
    near(&full.lse, &[3f64.ln()]);
    // A sink of ln 3 takes half of the weight.
    let sink = Options::new().sinks(vec![3f32.ln()]);
    let got = attention(&inputs, &sink);
    assert!((got.out[0] - 1.0).abs() < 1e-7 && (got.lse[0] - 6f64.ln()).abs() < 1e-7);
    // scale 2: weights 4 : 1. scale 0: mean. scale −1: weights 1/2 : 1.
    for (scale, out) in [(2.0, 2.4), (0.0, 1.5), (-1.0, 1.0)] {
        near(
            &attention(&inputs, &Options::new().softmax_scale(scale)).out,
            &[out],
        );
    }
    // ALiBi: the query stands at key 1, so key 0 is one away.
    let alibi = Options::new().alibi_slopes(vec![1.0]);
    near(
        &attention(&inputs, &alibi).lse,
        &[(2.0 / 1f64.exp() + 1.0).ln()],
    );
    // Top left it stands at key 0.
    let alibi = alibi.alignment(Alignment::TopLeft);
    near(
        &attention(&inputs, &alibi).lse,
        &[(2.0 + (-1f64).exp()).ln()],
    );
    let cap = 0.5;
    let capped = cap * (2f64.ln() / cap).tanh();
    near(
        &attention(&inputs, &Options::new().softcap(cap)).lse,
        &[(capped.exp() + 1.0).ln()],
    );
    let bias = [0.0, 2f64.ln()];
    let biased = inputs.bias(view(&bias, [1, 1, 1, 2]));
    near(&attention(&biased, &Options::new()).out, &[1.5]);
    let bias = [f64::NEG_INFINITY];
    let hidden = inputs.bias(view(&bias, [1, 1, 1, 1]));
    let got = attention(&hidden, &Options::new());
    assert_eq!((got.out[0], got.lse[0]), (0.0, f64::NEG_INFINITY));
}

#[test]
fn causality_windows_and_masks_intersect() {
    // Equal scores: a row is the mean of the values it sees.
    let (q, k) = ([0f32; 3], [0f32; 5]);
    let v = [1f32, 2.0, 4.0, 8.0, 16.0];
    let inputs = Inputs::new(
        view(&q, [1, 1, 3, 1]),
        view(&k, [1, 1, 5, 1]),
        view(&v, [1, 1, 5, 1]),
    );
    let causal = Options::new().causal(true);
    near(
        &attention(&inputs, &causal).out,
        &[7.0 / 3.0, 15.0 / 4.0, 31.0 / 5.0],
    );
    let top = causal.clone().alignment(Alignment::TopLeft);
    near(&attention(&inputs, &top).out, &[1.0, 1.5, 7.0 / 3.0]);
    let window = Options::new().window_left(1).window_right(0);
    near(&attention(&inputs, &window).out, &[3.0, 6.0, 12.0]);
    let mask = [1u8, 1, 0, 1, 1];
    let masked = inputs.mask(view(&mask, [1, 1, 1, 5]));
    near(&attention(&masked, &window).out, &[2.0, 8.0, 12.0]);
    let used = [2];
    let short = inputs.seqused_k(&used);
    // Bottom right: the last query stands at key 1, the first before all keys.
    let got = attention(&short, &causal);
    near(&got.out, &[0.0, 1.0, 1.5]);
    near(&got.lse, &[f64::NEG_INFINITY, 0.0, 2f64.ln()]);
}

#[test]
fn query_heads_share_key_heads_in_order() {
    let q = [0f32; 4];
    let k = [0f32; 2];
    let v = [1f32, 2.0, 3.0, 4.0];
    let inputs = Inputs::new(
        view(&q, [1, 4, 1, 1]),
        view(&k, [1, 2, 1, 1]),
        view(&v, [1, 2, 1, 2]),
    );
    let got = attention(&inputs, &Options::new());
    assert_eq!(got.out, [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
}

#[test]
fn packed_rows_without_a_sequence_are_empty() {
    let q = [0f32; 4];
    let k = [0f32; 4];
    let v = [1f32, 3.0, f32::NAN, 5.0];
    let (cu_q, cu_k, used) = ([0, 1, 3], [0, 3, 4], [2, 1]);
    let inputs = Inputs::new(
        view(&q, [1, 1, 4, 1]),
        view(&k, [1, 1, 4, 1]),
        view(&v, [1, 1, 4, 1]),
    )
    .packed(&cu_q, &cu_k)
    .seqused_k(&used);
    let got = attention(&inputs, &Options::new());
    assert_eq!(got.out, [2.0, 5.0, 5.0, 0.0]);
    assert_eq!(got.lse, [2f64.ln(), 0.0, 0.0, f64::NEG_INFINITY]);
}

#[test]
fn nan_and_infinity_stay_in_rows_that_see_them() {
    let nan = f32::NAN;
    let (q, v) = ([0f32, nan, 1.0], [1f32, 2.0, nan]);
    let k = [0f32, f32::INFINITY, nan];
    let inputs = Inputs::new(
        view(&q, [1, 1, 3, 1]),
        view(&k, [1, 1, 3, 1]),
        view(&v, [1, 1, 3, 1]),
    );
    let got = attention(&inputs, &Options::new().causal(true));
    assert_eq!((got.out[0], got.lse[0]), (1.0, 0.0));
    assert!(got.out[1].is_nan() && got.lse[1].is_nan());
    assert!(got.out[2].is_nan() && got.lse[2].is_nan());
    let mask = [1u8, 0, 0];
    let got = attention(&inputs.mask(view(&mask, [1, 1, 1, 3])), &Options::new());
    assert_eq!((got.out[0], got.out[2]), (1.0, 1.0));
    assert!(got.out[1].is_nan());
}

#[test]
fn sums_are_better_than_plain_f64() {
    // Plain summation in f64 gives a score of 0; the true one is ln 2.
    let big = 2f64.powi(60);
    let q = [big, 2f64.ln(), -big];
    let k = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0];
    let v = [3.0, 0.0];
    let inputs = Inputs::new(
        view(&q, [1, 1, 1, 3]),
        view(&k, [1, 1, 2, 3]),
        view(&v, [1, 1, 2, 1]),
    );
    near(
        &attention(&inputs, &Options::new().softmax_scale(1.0)).out,
        &[2.0],
    );
}

#[test]
fn pages_are_followed_through_the_table_and_gathered() {
    let x = |values: &[f32]| values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
    let nan = f32::NAN;
    // Pages of two keys; sequence 0 uses pages 2, 0 (three keys), sequence 1 page 1 (one key).
    let q = x(&[1.0, 1.0]);
    let k = x(&[2.0, nan, 3.0, nan, 0.0, 1.0]);
    let v = x(&[30.0, nan, 40.0, nan, 10.0, 20.0]);
    let table = BlockTable {
        pages: &[2, 0, 1, -7],
        width: 2,
    };
    let used = [3, 1];
    let bias = x(&[0.0, -1.0, -2.0, nan]);
    let inputs = Inputs::new(
        view(&q, [2, 1, 1, 1]),
        view(&k, [3, 1, 2, 1]),
        view(&v, [3, 1, 2, 1]),
    )
    .bias(view(&bias, [1, 1, 1, 4]))
    .paged(table, &used);
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let got = reference::forward(&problem, &inputs);
    near(&got.out, &[20.0, 40.0]);
    near(&got.lse, &[3f64.ln(), 3.0]);
    let gathered = gather(&problem, &inputs).unwrap();
    let contiguous = gathered.inputs(&inputs);
    assert_eq!(contiguous.k.shape(), [2, 1, 3, 1]);
    assert!(contiguous.v.data().iter().all(|v| !v.is_nan()));
    assert_eq!(reference::forward(gathered.problem(), &contiguous), got);
}

#[test]
fn nothing_at_all_is_fine() {
    let none: [f32; 0] = [];
    for shape in [[0, 1, 3, 2], [1, 0, 3, 2], [1, 1, 0, 2]] {
        let view = view(&none, shape);
        let got = attention(&Inputs::new(view, view, view), &Options::new());
        assert!(got.out.is_empty() && got.lse.is_empty());
    }
    let q = [1f32; 2];
    let empty = view(&none, [1, 1, 0, 2]);
    let inputs = Inputs::new(view(&q, [1, 1, 1, 2]), empty, empty);
    let got = attention(&inputs, &Options::new());
    assert_eq!((got.out, got.lse), (vec![0.0; 2], vec![f64::NEG_INFINITY]));
    let got = attention(&inputs, &Options::new().sinks(vec![2.5]));
    assert_eq!((got.out, got.lse), (vec![0.0; 2], vec![2.5]));
}
