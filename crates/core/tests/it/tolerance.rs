//! The judge: what it lets pass and what it does not.

use tilewise_core::half::{bf16, f16};
use tilewise_core::{
    DType, Element, Inputs, Judge, Options, Problem, RowSample, TensorView, judge_row,
};

fn view<T: Copy>(data: &[T], shape: [usize; 4]) -> TensorView<'_, T> {
    TensorView::bhsd(data, shape).unwrap()
}

/// Numbers in (−1, 1) that look random.
fn noise<T: Element>(n: usize, seed: u64) -> Vec<T> {
    let mut x = seed;
    (0..n)
        .map(|_| {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            T::from_f64((x >> 40) as f64 / (1u64 << 23) as f64 - 1.0)
        })
        .collect()
}

const SHAPE: [usize; 4] = [1, 2, 9, 16];

/// A judge of random attention, and the reference rounded to T.
fn judged<T: Element>() -> (Judge, Vec<T>, Vec<f32>) {
    let (q, k, v) = (noise::<T>(288, 1), noise::<T>(288, 2), noise::<T>(288, 3));
    let inputs = Inputs::new(view(&q, SHAPE), view(&k, SHAPE), view(&v, SHAPE));
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let reference = tilewise_core::reference::forward(&problem, &inputs);
    (
        judge,
        reference.out.iter().map(|&x| T::from_f64(x)).collect(),
        reference.lse.iter().map(|&x| x as f32).collect(),
    )
}

fn rounding_passes_and_more_does_not<T: Element>() {
    let (judge, mut out, mut lse) = judged::<T>();
    let compare = |out: &[T], lse: &[f32]| {
        judge
            .compare(&view(out, SHAPE), Some(&view(lse, [1, 2, 9, 1])))
            .unwrap()
    };
    let good = compare(&out, &lse);
    assert!(good.pass, "{good:?}");
    assert_eq!(good.rows, 18);
    assert!(good.mean_abs_err <= good.max_abs_err && good.max_abs_err <= T::DTYPE.unit_roundoff());
    // Between a few units of the dtype and what would be noticed.
    let u = T::DTYPE.unit_roundoff();
    assert!(good.tolerance < 12.0 * u.max(T::DTYPE.accumulator().unit_roundoff() * 8.0));
    assert!(good.lse_tolerance < 3e-6);
    out[200] = T::from_f64(out[200].to_f64() + 2.0 * judge.tolerance().out + u);
    let bad = compare(&out, &lse);
    assert!(!bad.pass);
    assert_eq!(bad.worst, Some([0, 1, 3, 8]));
    out[200] = T::from_f64(f64::NAN);
    let bad = compare(&out, &lse);
    assert!(!bad.pass && bad.max_abs_err == f64::INFINITY && bad.mean_abs_err.is_finite());
    let (_, out, _) = judged::<T>();
    lse[17] += 4e-6;
    let bad = compare(&out, &lse);
    assert!(!bad.pass);
    assert_eq!(bad.lse_worst, Some([0, 1, 8]));
    lse[17] = f32::NEG_INFINITY;
    assert!(!compare(&out, &lse).pass);
}

#[test]
fn rounding_passes_and_more_does_not_in_every_dtype() {
    rounding_passes_and_more_does_not::<f64>();
    rounding_passes_and_more_does_not::<f32>();
    rounding_passes_and_more_does_not::<f16>();
    rounding_passes_and_more_does_not::<bf16>();
}

#[test]
fn nan_agrees_with_nan_only() {
    let (q, k) = ([f32::NAN, 1.0], [1f32]);
    let v = [f32::INFINITY];
    let inputs = Inputs::new(
        view(&q, [1, 1, 2, 1]),
        view(&k, [1, 1, 1, 1]),
        view(&v, [1, 1, 1, 1]),
    );
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let pass = |out: [f32; 2], lse: [f32; 2]| {
        let (out, lse) = (view(&out, [1, 1, 2, 1]), view(&lse, [1, 1, 2, 1]));
        judge.compare(&out, Some(&lse)).unwrap().pass
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert!(pass([nan, inf], [nan, 1.0]));
    assert!(pass([nan, inf], [inf, 1.0]));
    assert!(!pass([0.0, inf], [nan, 1.0]));
    assert!(!pass([inf, inf], [nan, 1.0]));
    assert!(!pass([nan, -inf], [nan, 1.0]));
    assert!(!pass([nan, nan], [nan, 1.0]));
    assert!(!pass([nan, 1.0], [nan, 1.0]));
    assert!(!pass([nan, inf], [0.0, 1.0]));
    assert!(!pass([nan, inf], [nan, nan]));
    assert!(!pass([nan, inf], [-inf, 1.0]));
}

#[test]
fn what_the_dtype_cannot_hold_may_be_what_it_makes_of_it() {
    // 65504 fits f16, so infinity is no excuse; a score of 1e60 does not fit f32.
    let (q, k) = ([f16::ZERO], [f16::ZERO]);
    let v = [f16::MAX];
    let inputs = Inputs::new(
        view(&q, [1, 1, 1, 1]),
        view(&k, [1, 1, 1, 1]),
        view(&v, [1, 1, 1, 1]),
    );
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let out = [f16::INFINITY];
    assert!(!judge.compare(&view(&out, [1, 1, 1, 1]), None).unwrap().pass);
    let (q, k, v) = ([1e30f32, 0.0], [1e30f32], [2f32]);
    let inputs = Inputs::new(
        view(&q, [1, 1, 2, 1]),
        view(&k, [1, 1, 1, 1]),
        view(&v, [1, 1, 1, 1]),
    );
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    for (out, beyond, pass) in [
        ([2.0, 2.0], 0, true),
        ([f32::NAN, 2.0], 1, true),
        ([f32::INFINITY, 2.0], 0, false),
        ([f32::NAN, f32::NAN], 1, false),
    ] {
        let comparison = judge.compare(&view(&out, [1, 1, 2, 1]), None).unwrap();
        assert_eq!((comparison.beyond_range, comparison.pass), (beyond, pass));
    }
}

/// Where nothing could be judged, nothing passes.
#[test]
fn a_result_wholly_beyond_its_dtype_does_not_pass() {
    let (q, k, v) = ([1e30f32], [1e30f32], [2f32]);
    let inputs = Inputs::new(
        view(&q, [1, 1, 1, 1]),
        view(&k, [1, 1, 1, 1]),
        view(&v, [1, 1, 1, 1]),
    );
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let comparison = judge
        .compare(&view(&[f32::NAN], [1, 1, 1, 1]), None)
        .unwrap();
    assert_eq!((comparison.beyond_range, comparison.pass), (1, false));
}

#[test]
fn a_sample_judges_its_rows_and_no_others() {
    let (q, k, v) = (
        noise::<f32>(288, 1),
        noise::<f32>(288, 2),
        noise::<f32>(288, 3),
    );
    let inputs = Inputs::new(view(&q, SHAPE), view(&k, SHAPE), view(&v, SHAPE));
    let problem = Problem::new(&inputs, &Options::new().causal(true)).unwrap();
    let sample = RowSample::at_most(&problem, 5);
    assert_eq!(
        (sample.rows().len(), sample.total(), sample.is_complete()),
        (5, 18, false)
    );
    assert!(sample.rows().is_sorted() && sample.rows()[0] == 0 && sample.rows()[4] == 17);
    assert!(RowSample::at_most(&problem, 18).is_complete());
    let rows = sample
        .rows()
        .iter()
        .rev()
        .map(|&row| judge_row(&problem, &inputs, row))
        .collect();
    let judge = Judge::from_rows(&problem, rows);
    assert_eq!(judge.rows(), 5);
    let mut out = vec![f32::NAN; 288];
    for n in 0..5 {
        let (row, values, lse) = judge.reference_row(n);
        assert!(lse.is_finite());
        for (to, &x) in out[row * 16..][..16].iter_mut().zip(values) {
            *to = x as f32;
        }
    }
    assert!(judge.compare(&view(&out, SHAPE), None).unwrap().pass);
    out[3] += 1e-3;
    assert!(!judge.compare(&view(&out, SHAPE), None).unwrap().pass);
    assert!(judge.compare(&view(&out, [1, 2, 16, 9]), None).is_err());
}

#[test]
fn what_has_no_weight_loosens_nothing() {
    let judge = |k: [f32; 3], v: [f32; 3]| {
        let q = [1f32];
        let inputs = Inputs::new(
            view(&q, [1, 1, 1, 1]),
            view(&k, [1, 1, 3, 1]),
            view(&v, [1, 1, 3, 1]),
        );
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        *Judge::new(&problem, &inputs, &RowSample::all(&problem)).tolerance()
    };
    let plain = judge([0.5, 0.25, 0.0], [1.0, 2.0, 3.0]);
    assert!(plain.out < 4e-6 && plain.lse < 3e-6, "{plain:?}");
    // A huge value under a weight of e^-200, and a huge score far below the others.
    assert!(judge([0.5, 0.25, -200.0], [1.0, 2.0, 1e30]).out <= plain.out);
    let far = judge([0.5, 0.25, -1e5], [1.0, 2.0, 3.0]);
    assert!(far.out <= plain.out && far.lse <= plain.lse, "{far:?}");
    // But they do count where they weigh.
    assert!(judge([0.5, 0.25, -20.0], [1.0, 2.0, 1e30]).out > 1e14);
    assert!(judge([1e5, 1e5 - 1.0, 0.0], [1.0, 2.0, 3.0]).out > 1e-2);
    // An average of values is off by no more than their size.
    assert!(judge([1e30, 1e30, 0.0], [1.0, 2.0, 3.0]).out < 7.0);
}

#[test]
fn the_error_of_a_large_score_counts_where_its_weight_is_small() {
    // Alone beside a sink: out is the key's weight, e^-10, which is as good as its score of 60.
    let (q, k, v) = ([60f32], [1f32], [1f32]);
    let shape = [1, 1, 1, 1];
    let inputs = Inputs::new(view(&q, shape), view(&k, shape), view(&v, shape));
    let options = Options::new().softmax_scale(1.0).sinks(vec![70.0]);
    let problem = Problem::new(&inputs, &options).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let (_, out, _) = judge.reference_row(0);
    let off = |score: f64| {
        let out = [(out[0] * (1.0 + score)) as f32];
        judge.compare(&view(&out, shape), None).unwrap().pass
    };
    let rounding = 60.0 * DType::F32.unit_roundoff();
    assert!(off(4.0 * rounding) && !off(40.0 * rounding));
}
