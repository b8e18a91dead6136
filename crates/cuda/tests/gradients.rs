//! The backward kernels against the gradients by definition, on a GPU. Where there is none every test
//! says so on stderr and passes; `TILEWISE_REQUIRE_GPU=1` turns that into a failure.

mod common;
#[path = "gradients/hopper.rs"]
mod hopper;

use half::{bf16, f16};
use proptest::prelude::*;
use tilewise_core::backend::Backend;
use tilewise_core::observe::NoObserver;
use tilewise_core::schedule::backward::keeps_a_key;
use tilewise_core::schedule::{self, BlockSizes};
use tilewise_core::{
    Algorithm, Alignment, BackwardInputs, Dropout, Element, Error, GradientJudge, Gradients,
    Inputs, Options, Problem, TensorView, TensorViewMut,
};
use tilewise_cuda::backward::{self, DeviceBackward, DeviceGradients, Sums};
use tilewise_cuda::cudarc::driver::DeviceRepr;
use tilewise_cuda::ops::DeviceInputs;
use tilewise_cuda::{CudaBackend, DeviceView, DeviceViewMut};

use common::{Noise, gpu, portable};

/// Sizes of a setting: batch, heads, KV heads, queries, keys, head_dim, head_dim_v.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    b: usize,
    h: usize,
    kv: usize,
    sq: usize,
    sk: usize,
    d: usize,
    dv: usize,
}

fn sizes([b, h, kv]: [usize; 3], [sq, sk]: [usize; 2], d: usize) -> Sizes {
    Sizes {
        b,
        h,
        kv,
        sq,
        sk,
        d,
        dv: d,
    }
}

/// Lengths of sequences.
#[derive(Clone, Debug, Default)]
struct Parts {
    cu: Option<(Vec<i32>, Vec<i32>)>,
    used: Option<Vec<i32>>,
}

/// A problem with the results of its forward pass and what arrives at them.
struct Setting<T> {
    sizes: Sizes,
    options: Options,
    parts: Parts,
    bias: Option<(Vec<T>, [usize; 4])>,
    mask: Option<(Vec<u8>, [usize; 4])>,
    keep: Option<(Vec<u8>, [usize; 4])>,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dout: Vec<T>,
    dlse: Option<Vec<f32>>,
    out: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Element> Setting<T> {
    fn new(s: Sizes, options: Options, parts: Parts, seed: u64) -> Self {
        let mut noise = Noise(seed);
        let rows = s.b * s.h * s.sq;
        let mut setting = Setting {
            sizes: s,
            options,
            parts,
            bias: None,
            mask: None,
            keep: None,
            q: noise.tensor(rows * s.d),
            k: noise.tensor(s.b * s.kv * s.sk * s.d),
            v: noise.tensor(s.b * s.kv * s.sk * s.dv),
            dout: noise.tensor(rows * s.dv),
            dlse: (seed % 2 == 1).then(|| noise.tensor(rows)),
            out: Vec::new(),
            lse: Vec::new(),
        };
        setting.forward();
        setting
    }

    /// With a bias, a mask, and dropout by a mask in place of random numbers, each or not as `seed`
    /// says and broadcast over some axes.
    fn modified(mut self, seed: u64) -> Self {
        let s = self.sizes;
        let mut noise = Noise(seed);
        let mut shape = || {
            let full = [s.b, s.h, s.sq, s.sk];
            full.map(|size| if noise.next() < -1.0 { 1 } else { size })
        };
        let (bias, mask, keep) = (shape(), shape(), shape());
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        if seed.is_multiple_of(3) {
            self.bias = Some((noise.tensor(count(bias)), bias));
        }
        let mut bytes = |shape: [usize; 4], least: f64| -> Vec<u8> {
            let bits = (0..count(shape)).map(|_| u8::from(noise.next() > least));
            bits.collect()
        };
        if seed.is_multiple_of(4) {
            self.mask = Some((bytes(mask, -1.0), mask));
        }
        if let Some(dropout) = self.options.get_dropout().filter(|_| seed % 5 < 2) {
            self.options = self.options.dropout(Dropout::Mask { p: dropout.p() });
            self.keep = Some((bytes(keep, 0.0), keep));
        }
        self.forward();
        self
    }

    /// out and lse by the schedule of the core, so that nothing of the device is in them.
    fn forward(&mut self) {
        let problem = Problem::new(&self.inputs(), &self.options).unwrap();
        let (shape, [b, h, s]) = (problem.dims().out_shape(), problem.dims().lse_shape());
        let mut out = vec![T::default(); shape.iter().product()];
        let mut lse = vec![0f32; b * h * s];
        schedule::forward(
            Algorithm::Fa2,
            &problem,
            &self.inputs(),
            BlockSizes::new(64, 64).unwrap(),
            &mut NoObserver,
            TensorViewMut::bhsd(&mut out, shape).unwrap(),
            Some(TensorViewMut::bhs(&mut lse, [b, h, s]).unwrap()),
        )
        .unwrap();
        (self.out, self.lse) = (out, lse);
    }

    fn inputs(&self) -> Inputs<'_, T> {
        let s = self.sizes;
        let mut inputs = Inputs::new(
            TensorView::bhsd(&self.q, [s.b, s.h, s.sq, s.d]).unwrap(),
            TensorView::bhsd(&self.k, [s.b, s.kv, s.sk, s.d]).unwrap(),
            TensorView::bhsd(&self.v, [s.b, s.kv, s.sk, s.dv]).unwrap(),
        );
        fn view<X: Copy>((values, shape): &(Vec<X>, [usize; 4])) -> TensorView<'_, X> {
            TensorView::bhsd(values, *shape).unwrap()
        }
        inputs = inputs
            .bias(self.bias.as_ref().map(view))
            .mask(self.mask.as_ref().map(view))
            .keep_mask(self.keep.as_ref().map(view));
        if let Some((q, k)) = &self.parts.cu {
            inputs = inputs.packed(q, k);
        }
        if let Some(used) = &self.parts.used {
            inputs = inputs.seqused_k(used);
        }
        inputs
    }

    fn backward(&self) -> BackwardInputs<'_, T> {
        let s = self.sizes;
        let (out, row) = ([s.b, s.h, s.sq, s.dv], [s.b, s.h, s.sq, 1]);
        let row = |values| TensorView::bhsd(values, row).unwrap();
        BackwardInputs::new(
            self.inputs(),
            TensorView::bhsd(&self.out, out).unwrap(),
            row(&self.lse),
            TensorView::bhsd(&self.dout, out).unwrap(),
        )
        .dlse(self.dlse.as_deref().map(row))
    }

    fn run(&self, backend: &CudaBackend, algorithm: Algorithm) -> Result<Gradients<T>, Error> {
        run(backend, &self.options, &self.backward(), algorithm)
    }

    /// Runs every way there is and compares.
    fn check(&self, backend: &CudaBackend, algorithms: &[(Algorithm, Sums)]) -> Result<(), String> {
        let inputs = self.backward();
        let problem = inputs.problem(&self.options).map_err(|e| e.to_string())?;
        let judge = GradientJudge::new(&problem, &inputs);
        for &(algorithm, sums) in algorithms {
            let backend = backend.clone().sums(sums);
            let mut gradients = self
                .run(&backend, algorithm)
                .map_err(|e| format!("{algorithm} {sums:?} {:?}: {e}", self.sizes))?;
            let views = gradients.views_mut().map_err(|e| e.to_string())?;
            for found in judge.compare(&views).map_err(|e| e.to_string())? {
                if !found.pass {
                    return Err(format!(
                        "{algorithm} {sums:?} {} {:?} {:?} {:?}: {found:?}",
                        T::DTYPE,
                        self.sizes,
                        self.options,
                        self.parts
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Into memory that held NaN before.
fn run<T: Element>(
    backend: &CudaBackend,
    options: &Options,
    inputs: &BackwardInputs<'_, T>,
    algorithm: Algorithm,
) -> Result<Gradients<T>, Error> {
    let problem = inputs.problem(options)?;
    let mut gradients = Gradients::filled(&problem, &inputs.inputs, f64::NAN)?;
    let views = gradients.views_mut()?;
    backend.backward(
        &problem,
        &T::erase_backward(*inputs),
        algorithm,
        T::erase_gradients(views),
    )?;
    Ok(gradients)
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.to_f64().to_bits()).collect()
}

fn all_bits<T: Element>(gradients: &Gradients<T>) -> Vec<u64> {
    let sinks = gradients.dsinks.iter().flatten();
    [&gradients.dq, &gradients.dk, &gradients.dv]
        .into_iter()
        .flat_map(|values| bits(values))
        .chain(sinks.map(|x| u64::from(x.to_bits())))
        .collect()
}

/// Every gradient of `given` is within its bound, made in any of `ways`.
fn all_pass<T: Element>(
    backend: &CudaBackend,
    options: &Options,
    given: &BackwardInputs<'_, T>,
    ways: &[(Algorithm, Sums)],
) {
    let judge = GradientJudge::new(&given.problem(options).unwrap(), given);
    for &(algorithm, sums) in ways {
        let mut gradients = run(&backend.clone().sums(sums), options, given, algorithm).unwrap();
        for found in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
            assert!(found.pass, "{algorithm} {sums:?} {found:?}");
        }
    }
}

/// Every way to make gradients.
const WAYS: &[(Algorithm, Sums)] = &[
    (Algorithm::Fa2, Sums::Ordered),
    (Algorithm::Fa2, Sums::Atomic),
    (Algorithm::Fa1, Sums::Ordered),
    (Algorithm::Standard, Sums::Ordered),
];

/// And for heads wider than 256.
const WIDE_WAYS: &[(Algorithm, Sums)] = &[
    (Algorithm::Fa2, Sums::Ordered),
    (Algorithm::Fa2, Sums::Atomic),
    (Algorithm::Standard, Sums::Ordered),
];

fn masks() -> Vec<Options> {
    vec![
        Options::new(),
        Options::new().causal(true),
        Options::new().causal(true).alignment(Alignment::TopLeft),
        Options::new().window_left(37).window_right(20),
        Options::new().causal(true).window_left(70),
    ]
}

fn sweep<T: Element>(name: &str, d: usize) {
    let Some(backend) = gpu(name) else { return };
    for (n, shape) in [
        sizes([2, 4, 2], [137, 180], d),
        sizes([1, 3, 1], [64, 64], d),
        sizes([1, 2, 2], [1, 300], d),
        sizes([1, 2, 1], [200, 77], d),
    ]
    .into_iter()
    .enumerate()
    {
        for options in masks() {
            let setting = Setting::<T>::new(shape, options, Parts::default(), n as u64);
            setting.check(&backend, WAYS).unwrap();
        }
    }
}

/// A test for each type and head_dim: kernels of different tests are compiled side by side.
macro_rules! sweeps {
    ($($name:ident $t:ty, $d:literal;)*) => {$(
        #[test]
        fn $name() {
            sweep::<$t>(stringify!($name), $d);
        }
    )*};
}

sweeps! {
    bf16_d64_equals_the_definition bf16, 64;
    bf16_d128_equals_the_definition bf16, 128;
    bf16_d256_equals_the_definition bf16, 256;
    f16_d64_equals_the_definition f16, 64;
    f16_d128_equals_the_definition f16, 128;
    f16_d256_equals_the_definition f16, 256;
    f32_d64_equals_the_definition f32, 64;
    f32_d128_equals_the_definition f32, 128;
    f32_d256_equals_the_definition f32, 256;
}

fn one<T: Element>(backend: &CudaBackend, [d, dv]: [usize; 2], options: Options) {
    let shape = Sizes {
        dv,
        ..sizes([1, 4, 2], [70, 131], d)
    };
    Setting::<T>::new(shape, options, Parts::default(), d as u64)
        .check(backend, WAYS)
        .unwrap();
}

/// A test for each line, on the first GPU: kernels of different tests are compiled side by side, those of one
/// test one after another.
macro_rules! on_gpu {
    ($($name:ident: $check:ident::<$t:ty>($($argument:expr),*);)*) => {$(
        #[test]
        fn $name() {
            let Some(backend) = gpu(concat!(module_path!(), "::", stringify!($name))) else {
                return;
            };
            $check::<$t>(&backend, $($argument),*);
        }
    )*};
}

mod odd_head_dims_in_bf16 {
    use super::*;

    on_gpu! {
        d1: one::<bf16>([1, 1], Options::new().causal(true));
        d40: one::<bf16>([40, 40], Options::new().causal(true));
        d72: one::<bf16>([72, 72], Options::new().causal(true));
        d96: one::<bf16>([96, 96], Options::new().causal(true));
        d112: one::<bf16>([112, 112], Options::new().causal(true));
        d200: one::<bf16>([200, 200], Options::new().causal(true));
        d64_dv128: one::<bf16>([64, 128], Options::new());
        d192_dv128: one::<bf16>([192, 128], Options::new());
        d7_dv33: one::<bf16>([7, 33], Options::new());
        d80_dv200: one::<bf16>([80, 200], Options::new());
    }
}

mod odd_head_dims_in_f32 {
    use super::*;

    on_gpu! {
        d5: one::<f32>([5, 5], Options::new());
        d80: one::<f32>([80, 80], Options::new());
        d136: one::<f32>([136, 136], Options::new());
        d128_dv64: one::<f32>([128, 64], Options::new().causal(true));
        d40_dv8: one::<f32>([40, 8], Options::new().causal(true));
    }
}

fn wide<T: Element>(backend: &CudaBackend, [d, dv]: [usize; 2], options: Options, seed: u64) {
    let shape = Sizes {
        dv,
        ..sizes([1, 4, 2], [70, 91], d)
    };
    Setting::<T>::new(shape, options, Parts::default(), seed)
        .modified(seed)
        .check(backend, WIDE_WAYS)
        .unwrap();
}

mod wide_heads_come_in_slices {
    use super::*;

    on_gpu! {
        causal: wide::<bf16>([512, 512], Options::new().causal(true), 1);
        of_narrow_values: wide::<f16>([576, 64], Options::new(), 2);
        // With a bias and a mask, and rows that are no multiple of sixteen bytes.
        of_any_row_length: wide::<f32>([300, 259], Options::new().causal(true), 12);
        with_everything: wide::<bf16>([65, 517], everything(), 12);
    }

    fn everything() -> Options {
        let all = Options::new().window_left(50).window_right(9).softcap(4.0);
        let all = all.dropout(Dropout::Philox {
            p: 0.4,
            seed: 3,
            offset: 1,
        });
        all.sinks(vec![0.5; 4])
    }
}

/// NaN and infinity on either side of what hides them, as of narrow heads.
mod hidden_values_do_not_leak_into_gradients_of_wide_heads {
    use super::*;

    on_gpu! {
        causal: poisoned_in_places::<bf16>(320, Options::new().causal(true), 1, WIDE_WAYS);
        of_bias_and_mask: poisoned_in_places::<f32>(272, Options::new(), 12, WIDE_WAYS);
    }
}

mod softcaps_and_scales {
    use super::*;

    on_gpu! {
        softcap_d33: one::<f16>([33, 33], Options::new().softcap(4.0));
        softcap_d160: one::<f16>([160, 160], Options::new().softcap(4.0));
        negative_scale: one::<f32>([64, 64], Options::new().softmax_scale(-0.7));
        no_scale: one::<f32>([64, 64], Options::new().softmax_scale(0.0));
        large_scale: one::<f32>([64, 64], Options::new().softmax_scale(3.0));
        softcap_in_a_window_in_f32: one::<f32>([64, 64], capped_window());
        softcap_in_a_window_in_bf16: one::<bf16>([128, 128], capped_window());
    }

    fn capped_window() -> Options {
        Options::new().softcap(3.0).causal(true).window_left(40)
    }
}

/// A value a head.
fn each(x: f32, heads: usize) -> Vec<f32> {
    (0..heads).map(|h| x * (h + 1) as f32 / 2.0).collect()
}

/// An option of the score, of the sums or of the weights.
fn modifiers(heads: usize) -> impl Strategy<Value = Options> {
    (
        proptest::option::weighted(0.3, 1.0f64..20.0),
        proptest::option::weighted(0.3, 0.0f32..1.0),
        proptest::option::weighted(0.3, -3.0f32..3.0),
        proptest::option::weighted(0.4, (0.0f64..0.9, any::<u64>(), any::<u64>())),
    )
        .prop_map(move |(cap, slope, sink, drop)| {
            let each = move |x: f32| each(x, heads);
            Options::new()
                .softcap(cap)
                .alibi_slopes(slope.map(each))
                .sinks(sink.map(each))
                .dropout(drop.map(|(p, seed, offset)| Dropout::Philox { p, seed, offset }))
        })
}

fn lengths(kind: usize, b: usize, sq: usize, sk: usize) -> (usize, Parts) {
    match kind {
        0 => {
            // A sequence without rows, one without keys, keys that belong to none.
            let q = vec![0, (sq / 3) as i32, (sq / 3) as i32, sq as i32];
            let k = vec![0, (sk / 2) as i32, (sk / 2) as i32, (sk - sk / 5) as i32];
            let parts = Parts {
                cu: Some((q, k)),
                used: None,
            };
            (1, parts)
        }
        1 => {
            let used = (0..b).map(|n| (sk * n / b.max(1)) as i32).collect();
            let parts = Parts {
                cu: None,
                used: Some(used),
            };
            (b, parts)
        }
        _ => (b, Parts::default()),
    }
}

impl<T: Element> Setting<T> {
    /// With NaN in a few places of q, k, v and dout, by `seed`.
    fn poisoned(mut self, seed: u64) -> Self {
        let mut noise = Noise(seed);
        for tensor in [&mut self.q, &mut self.k, &mut self.v, &mut self.dout] {
            let mut place = |len: usize| (noise.next().abs() * 1e6) as usize % len;
            for _ in 0..place(3) {
                if !tensor.is_empty() {
                    let at = place(tensor.len());
                    tensor[at] = T::from_f64(f64::NAN);
                }
            }
        }
        self.forward();
        self
    }
}

/// Sizes, options and lengths of a problem of any kind.
fn problems() -> impl Strategy<Value = (Sizes, Options, Parts, u64)> {
    (
        (1usize..=2, 1usize..=2, 1usize..=3),
        (0usize..=150, 0usize..=250),
        any::<[bool; 3]>(),
        proptest::option::weighted(0.4, 0usize..150),
        proptest::option::weighted(0.3, 0usize..150),
        modifiers(6),
        0usize..5,
        any::<u64>(),
    )
        .prop_map(
            |((b, kv, group), (sq, sk), [wide, causal, top], left, right, options, kind, seed)| {
                let heads = kv * group;
                let cut = |values: Option<&[f32]>| values.map(|values| values[..heads].to_vec());
                let (slopes, sinks) = (options.get_alibi_slopes(), options.get_sinks());
                let (slopes, sinks) = (cut(slopes), cut(sinks));
                let options = options
                    .alibi_slopes(slopes)
                    .sinks(sinks)
                    .causal(causal)
                    .alignment(match top {
                        true => Alignment::TopLeft,
                        false => Alignment::BottomRight,
                    })
                    .window_left(left)
                    .window_right(right);
                let (b, parts) = lengths(kind, b, sq, sk);
                let d = if wide { 128 } else { 64 };
                (sizes([b, heads, kv], [sq, sk], d), options, parts, seed)
            },
        )
}

/// Those of one head_dim. Each is picked from the same stream of draws: where one seed serves every test, those
/// of different head_dims still meet different problems.
fn problems_of(d: usize) -> impl Strategy<Value = Drawn> {
    problems().prop_filter("the other test's", move |(sizes, ..)| sizes.d == d)
}

type Drawn = (Sizes, Options, Parts, u64);

fn any_problem<T: Element>(
    test: &str,
    way: (Algorithm, Sums),
    drawn: Drawn,
) -> Result<(), TestCaseError> {
    drawn_passes::<T>(test, way, drawn, |setting, _| setting)
}

/// NaN anywhere reaches what sees it, to the element, and nothing else.
fn any_poisoned_problem<T: Element>(
    test: &str,
    way: (Algorithm, Sums),
    drawn: Drawn,
) -> Result<(), TestCaseError> {
    drawn_passes::<T>(test, way, drawn, |setting, seed| setting.poisoned(seed / 3))
}

fn drawn_passes<T: Element>(
    test: &str,
    way: (Algorithm, Sums),
    (sizes, options, parts, seed): Drawn,
    change: impl Fn(Setting<T>, u64) -> Setting<T>,
) -> Result<(), TestCaseError> {
    let Some(backend) = gpu(test) else {
        return Ok(());
    };
    let setting = Setting::<T>::new(sizes, options, parts, seed).modified(seed / 2);
    change(setting, seed)
        .check(&backend, &[way])
        .map_err(TestCaseError::fail)
}

/// At most 8, whatever the environment asks for: most of them are kernels to compile.
fn few() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig {
        cases: config.cases.min(8),
        ..config
    }
}

/// A test for each of [`WAYS`] and each head_dim of [`problems`], for the reason of `on_gpu`.
macro_rules! in_each_way {
    ($check:ident::<$t:ty>) => {
        in_each_way! { $check::<$t>;
            fa2_d64 Fa2, Ordered, 64;
            fa2_d128 Fa2, Ordered, 128;
            fa2_atomic_d64 Fa2, Atomic, 64;
            fa2_atomic_d128 Fa2, Atomic, 128;
            fa1_d64 Fa1, Ordered, 64;
            fa1_d128 Fa1, Ordered, 128;
            standard_d64 Standard, Ordered, 64;
            standard_d128 Standard, Ordered, 128;
        }
    };
    ($check:ident::<$t:ty>; $($name:ident $algorithm:ident, $sums:ident, $d:literal;)*) => {
        proptest! {
            #![proptest_config(few())]
            $(
                #[test]
                fn $name(problem in problems_of($d)) {
                    let test = concat!(module_path!(), "::", stringify!($name));
                    $check::<$t>(test, (Algorithm::$algorithm, Sums::$sums), problem)?;
                }
            )*
        }
    };
}

mod nan_reaches_what_sees_it_in_bf16 {
    use super::*;

    in_each_way!(any_poisoned_problem::<bf16>);
}

mod nan_reaches_what_sees_it_in_f32 {
    use super::*;

    in_each_way!(any_poisoned_problem::<f32>);
}

/// What a problem is made with: options, used lengths, and the seed of the rest.
type Asked = (Options, Option<Vec<i32>>, u64);

/// NaN throughout dO of the rows that keep no key, because all are hidden or dropped.
fn nan_where_no_key_is_kept<T: Element>(d: usize, (options, used, seed): Asked) -> Setting<T> {
    let (shape, parts) = (sizes([2, 2, 1], [70, 50], d), Parts { cu: None, used });
    let mut setting = Setting::<T>::new(shape, options, parts, seed).modified(seed);
    let problem = Problem::new(&setting.inputs(), &setting.options).unwrap();
    let keeps = |row: usize| {
        let (b, h, i) = (row / 140, row / 70 % 2, row % 70);
        keeps_a_key(&problem, &setting.inputs(), b, h, i).unwrap()
    };
    let rows: Vec<usize> = (0..280).filter(|&row| !keeps(row)).collect();
    assert!(!rows.is_empty() && rows.len() < 280, "{} rows", rows.len());
    for row in rows {
        setting.dout[row * d..][..d].fill(T::from_f64(f64::NAN));
    }
    setting
}

/// No gradient has any of it.
fn takes_no_nan<T: Element>(
    backend: &CudaBackend,
    d: usize,
    asked: Asked,
    ways: &[(Algorithm, Sums)],
) {
    let setting = nan_where_no_key_is_kept::<T>(d, asked);
    setting.check(backend, ways).unwrap();
    for &(algorithm, sums) in ways {
        let gradients = setting.run(&backend.clone().sums(sums), algorithm).unwrap();
        assert!(is_finite(&gradients), "{algorithm} {sums:?}");
    }
}

fn is_finite<T: Element>(gradients: &Gradients<T>) -> bool {
    let all = [&gradients.dq, &gradients.dk, &gradients.dv];
    let mut sinks = gradients.dsinks.iter().flatten();
    let mut all = all.into_iter().flatten();
    all.all(|x| x.to_f64().is_finite()) && sinks.all(|x| x.is_finite())
}

mod rows_that_keep_no_key_take_nothing_of_dout {
    use super::*;

    on_gpu! {
        beside_sinks_in_bf16: takes_no_nan::<bf16>(64, sinks(), WAYS);
        beside_sinks_in_f32: takes_no_nan::<f32>(64, sinks(), WAYS);
        beside_sinks_d128: takes_no_nan::<f16>(128, sinks(), WAYS);
        beside_sinks_d256: takes_no_nan::<bf16>(256, sinks(), WAYS);
        beside_sinks_d272: takes_no_nan::<f32>(272, sinks(), WIDE_WAYS);
        dropout_in_bf16: takes_no_nan::<bf16>(64, dropout(7), WAYS);
        dropout_in_f32: takes_no_nan::<f32>(64, dropout(7), WAYS);
        dropout_d320: takes_no_nan::<bf16>(320, dropout(7), WIDE_WAYS);
        dropout_by_a_mask: takes_no_nan::<bf16>(64, dropout(1), WAYS);
        bias_mask_and_dropout: takes_no_nan::<bf16>(64, dropout(12), WAYS);
        bias_mask_and_dropout_d33: takes_no_nan::<f32>(33, dropout(12), WAYS);
    }

    #[test]
    fn beside_sinks_by_portable_kernels() {
        let name = "rows_that_keep_no_key_take_nothing_of_dout::beside_sinks_by_portable_kernels";
        let Some(backend) = portable(name) else {
            return;
        };
        takes_no_nan::<bf16>(&backend, 64, sinks(), &WAYS[..2]);
    }

    /// By the schedules of the core, which need no GPU.
    #[test]
    fn as_the_papers_write_it() {
        for asked in [sinks(), dropout(7), dropout(1), dropout(12)] {
            let setting = nan_where_no_key_is_kept::<f32>(33, asked);
            let given = setting.backward();
            let problem = given.problem(&setting.options).unwrap();
            let judge = GradientJudge::new(&problem, &given);
            for algorithm in Algorithm::ALL {
                let mut gradients = Gradients::filled(&problem, &given.inputs, f64::NAN).unwrap();
                let views = gradients.views_mut().unwrap();
                let blocks = BlockSizes::new(16, 16).unwrap();
                schedule::backward::backward(
                    algorithm,
                    &problem,
                    &given,
                    blocks,
                    &mut NoObserver,
                    views,
                )
                .unwrap();
                assert!(is_finite(&gradients), "{algorithm}");
                for found in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
                    assert!(found.pass, "{algorithm} {found:?}");
                }
            }
        }
    }

    /// Rows above the diagonal, and those of a sequence without keys.
    fn sinks() -> Asked {
        let options = Options::new().causal(true).sinks(vec![0.5, -1.0]);
        (options, Some(vec![0, 40]), 1)
    }

    /// By Philox, or by a mask where `seed` leaves a remainder of 0 or 1 by 5.
    fn dropout(seed: u64) -> Asked {
        let dropout = Dropout::Philox {
            p: 0.7,
            seed: 5,
            offset: 6,
        };
        let options = Options::new().causal(true).window_left(2);
        (options.dropout(dropout), None, seed)
    }
}

/// Drawn by `nan_reaches_what_sees_it` once: a NaN in dO of a row that keeps no key became one of dsinks, or of
/// dq through Δ.
mod drawn_rows_that_keep_no_key {
    use super::*;

    macro_rules! drawn {
        ($($name:ident: $t:ty, $algorithm:ident, $sums:ident, $problem:expr;)*) => {$(
            #[test]
            fn $name() {
                let test = concat!(module_path!(), "::", stringify!($name));
                any_poisoned_problem::<$t>(test, (Algorithm::$algorithm, Sums::$sums), $problem).unwrap();
            }
        )*};
    }

    drawn! {
        sinks_alone: bf16, Fa1, Ordered, (
            sizes([1, 6, 2], [66, 113], 64),
            Options::new()
                .alignment(Alignment::TopLeft)
                .alibi_slopes(each(0.0017033309, 6))
                .sinks(each(1.9711297, 6)),
            used(&[0]),
            9313066669234129343,
        );
        sinks_of_some: bf16, Fa2, Ordered, (
            sizes([2, 2, 1], [115, 158], 64),
            Options::new()
                .causal(true)
                .sinks(each(-0.6592258, 2))
                .dropout(philox(0.333186282604313, 14392734148936500833, 11202544257282789910)),
            used(&[0, 79]),
            12728249981160234235,
        );
        sinks_in_a_window: bf16, Fa2, Atomic, (
            sizes([1, 4, 2], [73, 173], 128),
            top_left()
                .window_left(30)
                .sinks(each(-1.6951197, 4))
                .dropout(philox(0.526725750491101, 9373132153708130369, 6978516944063362956)),
            used(&[0]),
            15448212352459714868,
        );
        sinks_and_softcap: bf16, Fa1, Ordered, (
            sizes([2, 1, 1], [134, 223], 64),
            top_left()
                .softcap(14.6922854411449)
                .sinks(each(1.501_254_1, 1))
                .dropout(philox(0.6982680685019921, 15157963571840975065, 6572408677394206809)),
            used(&[0, 111]),
            15893977233229070972,
        );
        packed_by_a_mask: bf16, Fa1, Ordered, (
            sizes([1, 6, 2], [58, 65], 128),
            Options::new()
                .causal(true)
                .window_left(38)
                .window_right(92)
                .dropout(philox(0.7914539600680319, 8302207285544471656, 7519604140544700214)),
            packed(&[0, 19, 19, 58], &[0, 32, 32, 52]),
            13781970138625233943,
        );
        packed_in_a_window: bf16, Fa1, Ordered, (
            sizes([1, 4, 2], [32, 27], 64),
            Options::new()
                .alignment(Alignment::TopLeft)
                .window_left(11)
                .alibi_slopes(each(0.74533564, 4))
                .dropout(philox(0.8191227249997867, 10911834309424945540, 13505037708267887120)),
            packed(&[0, 10, 10, 32], &[0, 13, 13, 22]),
            15605726680819617074,
        );
        four_rows: bf16, Standard, Ordered, (
            sizes([1, 4, 2], [4, 42], 64),
            top_left()
                .window_left(51)
                .dropout(philox(0.7875585288716387, 14788859756024217247, 14975027486103883097)),
            Parts::default(),
            13565156854394158759,
        );
        rows_before_the_keys: bf16, Fa2, Atomic, (
            sizes([1, 2, 2], [117, 83], 64),
            top_left().dropout(philox(0.7241371430545506, 8692075772000672556, 15857249826568478410)),
            Parts::default(),
            12168583562759641661,
        );
        a_mask_of_one_byte: f32, Fa2, Ordered, (
            sizes([2, 4, 2], [120, 186], 64),
            Options::new()
                .alibi_slopes(each(0.99713004, 4))
                .dropout(philox(0.8964111114651542, 9352467869324973244, 10993846707434692670)),
            Parts::default(),
            4800376144529865423,
        );
        used_by_a_mask: bf16, Fa2, Ordered, (
            sizes([2, 2, 2], [129, 166], 128),
            Options::new()
                .causal(true)
                .alibi_slopes(each(0.42989117, 2))
                .dropout(philox(0.6324957540486547, 15606775345073534081, 17268636897864897192)),
            used(&[0, 83]),
            12340170884577715491,
        );
    }

    fn top_left() -> Options {
        Options::new().causal(true).alignment(Alignment::TopLeft)
    }

    fn philox(p: f64, seed: u64, offset: u64) -> Dropout {
        Dropout::Philox { p, seed, offset }
    }

    fn used(used: &[i32]) -> Parts {
        Parts {
            cu: None,
            used: Some(used.to_vec()),
        }
    }

    fn packed(q: &[i32], k: &[i32]) -> Parts {
        Parts {
            cu: Some((q.to_vec(), k.to_vec())),
            used: None,
        }
    }
}

mod any_problem_in_bf16 {
    use super::*;

    in_each_way!(any_problem::<bf16>);
}

mod any_problem_in_f16 {
    use super::*;

    in_each_way!(any_problem::<f16>);
}

mod any_problem_in_f32 {
    use super::*;

    in_each_way!(any_problem::<f32>);
}

/// Rows that see nothing, and scores so low that a padded key's would be e^100 times theirs.
#[test]
fn empty_rows_and_low_scores_stay_finite() {
    let Some(backend) = gpu("empty_rows_and_low_scores_stay_finite") else {
        return;
    };
    let mut setting = Setting::<f32>::new(
        sizes([1, 2, 1], [90, 50], 64),
        Options::new().causal(true),
        Parts::default(),
        3,
    );
    setting.check(&backend, WAYS).unwrap();
    assert!(setting.lse.contains(&f32::NEG_INFINITY));
    let mut low = Setting::<bf16>::new(
        sizes([1, 1, 1], [40, 37], 64),
        Options::new(),
        Parts::default(),
        2,
    );
    for (tensor, side) in [(&mut low.q, 1.0), (&mut low.k, -1.0)] {
        for x in tensor.iter_mut() {
            *x = bf16::from_f64(side * (8.0 + x.to_f64().abs()));
        }
    }
    low.forward();
    assert!(low.lse.iter().all(|&lse| lse < -200.0));
    low.check(&backend, WAYS).unwrap();
    setting.dout.fill(0.0);
    setting.dlse = None;
    let zero = setting.run(&backend, Algorithm::Fa2).unwrap();
    assert!(
        zero.dq
            .iter()
            .chain(&zero.dk)
            .chain(&zero.dv)
            .all(|&x| x == 0.0)
    );
}

#[test]
fn gradients_of_nothing_are_nothing_or_zero() {
    let Some(backend) = gpu("gradients_of_nothing_are_nothing_or_zero") else {
        return;
    };
    for lengths in [[0, 0], [0, 5], [5, 0]] {
        for seed in [0, 24] {
            let shape = sizes([2, 2, 1], lengths, 64);
            let options = Options::new().sinks(vec![0.5; 2]);
            Setting::<f32>::new(shape, options, Parts::default(), seed)
                .modified(seed)
                .check(&backend, WAYS)
                .unwrap();
        }
    }
}

/// With a value that is not finite in each input.
fn poisoned_in_places<T: Element>(
    backend: &CudaBackend,
    d: usize,
    options: Options,
    seed: u64,
    ways: &[(Algorithm, Sums)],
) {
    let shape = sizes([1, 4, 2], [150, 190], d);
    let setting = Setting::<T>::new(shape, options, Parts::default(), seed);
    let mut setting = setting.modified(seed);
    let mut put = |tensor: fn(&mut Setting<T>) -> &mut Vec<T>, row: usize, value: f64| {
        tensor(&mut setting)[row * d + row % d] = T::from_f64(value);
    };
    put(|s| &mut s.q, 71, f64::NAN);
    put(|s| &mut s.k, 190 + 60, f64::NAN);
    put(|s| &mut s.v, 3, f64::NAN);
    put(|s| &mut s.v, 190 + 188, f64::NAN);
    put(|s| &mut s.dout, 150 + 100, f64::NAN);
    put(|s| &mut s.dout, 149, f64::INFINITY);
    setting.forward();
    setting.check(backend, ways).unwrap();
}

/// Keys that no row sees and rows that see no key, infinite throughout.
fn infinite_where_nothing_looks<T: Element>(backend: &CudaBackend, options: Options) {
    let shape = sizes([1, 2, 1], [70, 90], 64);
    let mut setting = Setting::<T>::new(shape, options, Parts::default(), 2);
    let mask = |i: usize, j: usize| u8::from(!i.is_multiple_of(5) && !j.is_multiple_of(7));
    let bytes = (0..70 * 90).map(|at| mask(at / 90, at % 90)).collect();
    setting.mask = Some((bytes, [1, 1, 70, 90]));
    for row in 0..140 {
        for tensor in [&mut setting.q, &mut setting.dout] {
            if row % 70 % 5 == 0 {
                tensor[row * 64..][..64].fill(T::from_f64(f64::INFINITY));
            }
        }
    }
    for key in (0..90).step_by(7) {
        for tensor in [&mut setting.k, &mut setting.v] {
            tensor[key * 64..][..64].fill(T::from_f64(f64::NEG_INFINITY));
        }
    }
    setting.forward();
    setting.check(backend, WAYS).unwrap();
    let gradients = setting.run(backend, Algorithm::Fa2).unwrap();
    let all = [&gradients.dq, &gradients.dk, &gradients.dv];
    assert!(all.into_iter().flatten().all(|x| x.to_f64().is_finite()));
}

/// One kernel of each kind, with NaN on either side of what hides it, and infinity where all hides it.
mod hidden_values_do_not_leak_into_gradients {
    use super::*;

    on_gpu! {
        causal_in_bf16: poisoned_in_places::<bf16>(64, Options::new().causal(true), 1, WAYS);
        causal_in_f32: poisoned_in_places::<f32>(64, Options::new().causal(true), 1, WAYS);
        window_in_bf16: poisoned_in_places::<bf16>(64, capped_window(), 1, WAYS);
        window_in_f32: poisoned_in_places::<f32>(64, capped_window(), 1, WAYS);
        dropout_in_bf16: poisoned_in_places::<bf16>(64, dropout(), 1, WAYS);
        dropout_in_f32: poisoned_in_places::<f32>(64, dropout(), 1, WAYS);
        bias_and_mask_in_bf16: poisoned_in_places::<bf16>(64, Options::new(), 12, WAYS);
        bias_and_mask_in_f32: poisoned_in_places::<f32>(64, Options::new(), 12, WAYS);
        // Of other tiles.
        causal_d128: poisoned_in_places::<bf16>(128, Options::new().causal(true), 1, WAYS);
        bias_and_mask_d96: poisoned_in_places::<bf16>(96, Options::new().causal(true), 12, WAYS);
        infinite: infinite_where_nothing_looks::<bf16>(Options::new());
        infinite_with_sinks: infinite_where_nothing_looks::<bf16>(Options::new().sinks(vec![0.5; 2]));
    }

    fn capped_window() -> Options {
        Options::new().window_left(30).window_right(9).softcap(5.0)
    }

    fn dropout() -> Options {
        Options::new().dropout(Dropout::Philox {
            p: 0.3,
            seed: 5,
            offset: 6,
        })
    }
}

/// The gradients in several `ways` of views with strides of their own, of what core's schedule makes of them.
fn pass_as_they_lie<T: Element>(
    backend: &CudaBackend,
    options: &Options,
    inputs: Inputs<'_, T>,
    dout: TensorView<'_, T>,
    ways: &[(Algorithm, Sums)],
) {
    let problem = Problem::new(&inputs, options).unwrap();
    let (shape, [b, h, s]) = (problem.dims().out_shape(), problem.dims().lse_shape());
    let mut out = vec![T::from_f64(0.0); shape.iter().product()];
    let mut lse = vec![0f32; b * h * s];
    schedule::forward(
        Algorithm::Fa2,
        &problem,
        &inputs,
        BlockSizes::new(64, 64).unwrap(),
        &mut NoObserver,
        TensorViewMut::bhsd(&mut out, shape).unwrap(),
        Some(TensorViewMut::bhs(&mut lse, [b, h, s]).unwrap()),
    )
    .unwrap();
    let given = BackwardInputs::new(
        inputs,
        TensorView::bhsd(&out, shape).unwrap(),
        TensorView::bhsd(&lse, [b, h, s, 1]).unwrap(),
        dout,
    );
    all_pass(backend, options, &given, ways);
}

#[test]
fn gradients_of_strided_tensors() {
    let Some(backend) = gpu("gradients_of_strided_tensors") else {
        return;
    };
    let setting = Setting::<f16>::new(
        sizes([2, 4, 2], [50, 90], 64),
        Options::new().causal(true),
        Parts::default(),
        8,
    );
    // One KV head for all by a stride of 0, rows from last to first, every second element.
    let kshape = [2, 2, 90, 32];
    let k = TensorView::from_strides(&setting.k, kshape, [2 * 90 * 64, 0, 64, 2], 0).unwrap();
    let v = TensorView::from_strides(&setting.v, kshape, [2 * 90 * 64, 90 * 64, -64, 1], 89 * 64)
        .unwrap();
    let q = TensorView::from_strides(&setting.q, [2, 4, 50, 32], [50 * 64, 0, 64, 2], 1).unwrap();
    let dout = TensorView::bshd(&setting.dout[..2 * 50 * 4 * 32], [2, 4, 50, 32]).unwrap();
    pass_as_they_lie(&backend, &setting.options, Inputs::new(q, k, v), dout, WAYS);
}

#[test]
fn a_hundred_backward_runs_give_the_same_bits() {
    let Some(backend) = gpu("a_hundred_backward_runs_give_the_same_bits") else {
        return;
    };
    let options = Options::new().causal(true).sinks(vec![0.5; 4]);
    let setting = Setting::<bf16>::new(
        sizes([2, 4, 2], [300, 411], 128),
        options,
        Parts::default(),
        11,
    );
    let first = setting.run(&backend, Algorithm::Fa2).unwrap();
    let atomic = backend.clone().sums(Sums::Atomic);
    for _ in 0..100 {
        let again = setting.run(&backend, Algorithm::Fa2).unwrap();
        assert_eq!(all_bits(&again), all_bits(&first));
        // Only dq is summed up in memory.
        let again = setting.run(&atomic, Algorithm::Fa2).unwrap();
        assert_eq!(bits(&again.dk), bits(&first.dk));
        assert_eq!(bits(&again.dv), bits(&first.dv));
    }
}

/// The gradients of a packed batch are, bit for bit, those of its sequences alone.
#[test]
fn packed_gradients_are_those_of_the_parts() {
    let Some(backend) = gpu("packed_gradients_are_those_of_the_parts") else {
        return;
    };
    let (cu_q, cu_k) = (vec![0, 70, 200], vec![0, 130, 250]);
    let parts = Parts {
        cu: Some((cu_q.clone(), cu_k.clone())),
        used: None,
    };
    let options = Options::new().causal(true);
    let packed = Setting::<bf16>::new(sizes([1, 2, 1], [200, 250], 64), options.clone(), parts, 4);
    let whole = packed.run(&backend, Algorithm::Fa2).unwrap();
    let given = packed.backward();
    for n in 0..2 {
        let rows = cu_q[n] as usize..cu_q[n + 1] as usize;
        let keys = cu_k[n] as usize..cu_k[n + 1] as usize;
        let inputs = Inputs::new(
            given.inputs.q.narrow(2, rows.clone()),
            given.inputs.k.narrow(2, keys.clone()),
            given.inputs.v.narrow(2, keys.clone()),
        );
        let alone = BackwardInputs::new(
            inputs,
            given.out.narrow(2, rows.clone()),
            given.lse.narrow(2, rows.clone()),
            given.dout.narrow(2, rows.clone()),
        );
        let alone = run(&backend, &options, &alone, Algorithm::Fa2).unwrap();
        let part = |values: &[bf16], heads: usize, all: usize, range: std::ops::Range<usize>| {
            (0..heads)
                .flat_map(|h| {
                    bits(&values[(h * all + range.start) * 64..(h * all + range.end) * 64])
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(part(&whole.dq, 2, 200, rows), bits(&alone.dq));
        assert_eq!(part(&whole.dk, 1, 250, keys.clone()), bits(&alone.dk));
        assert_eq!(part(&whole.dv, 1, 250, keys), bits(&alone.dv));
    }
}

#[test]
fn device_memory_is_used_as_it_lies() {
    let Some(backend) = gpu("device_memory_is_used_as_it_lies") else {
        return;
    };
    fn one<T: Element + DeviceRepr>(backend: &CudaBackend, sums: Sums) {
        let setting = Setting::<T>::new(
            sizes([2, 4, 2], [100, 140], 64),
            Options::new().causal(true),
            Parts::default(),
            20,
        );
        let given = setting.backward();
        let problem = given.problem(&setting.options).unwrap();
        let stream = backend.context().new_stream().unwrap();
        let up = |values: &[T]| stream.clone_htod(values).unwrap();
        let (q, k, v) = (up(&setting.q), up(&setting.k), up(&setting.v));
        let (out, dout) = (up(&setting.out), up(&setting.dout));
        let lse = stream.clone_htod(&setting.lse).unwrap();
        let nan = |len: usize| up(&vec![T::from_f64(f64::NAN); len]);
        let (mut dq, mut dk, mut dv) = (
            nan(setting.q.len()),
            nan(setting.k.len()),
            nan(setting.v.len()),
        );
        let (wide, narrow) = ([2, 4, 100, 64], [2, 2, 140, 64]);
        // dk in [batch, seqlen, heads, head_dim] order.
        let bshd = [140 * 2 * 64, 64, 2 * 64, 1];
        let read = |memory, shape| DeviceView::bhsd::<T, _>(memory, shape).unwrap();
        backward::backward(
            backend,
            &stream,
            &problem,
            Algorithm::Fa2,
            sums,
            &DeviceBackward {
                inputs: DeviceInputs::new(read(&q, wide), read(&k, narrow), read(&v, narrow)),
                out: read(&out, wide),
                lse: DeviceView::bhsd::<f32, _>(&lse, [2, 4, 100, 1]).unwrap(),
                dout: read(&dout, wide),
                dlse: None,
            },
            &mut DeviceGradients {
                dq: DeviceViewMut::bhsd::<T, _>(&mut dq, wide).unwrap(),
                dk: DeviceViewMut::from_strides::<T, _>(&mut dk, narrow, bshd, 0).unwrap(),
                dv: DeviceViewMut::bhsd::<T, _>(&mut dv, narrow).unwrap(),
                dbias: None,
                dsinks: None,
            },
        )
        .unwrap();
        let mut down = [&dq, &dk, &dv].map(|memory| stream.clone_dtoh(memory).unwrap());
        stream.synchronize().unwrap();
        let [dq, dk, dv] = &mut down;
        let judge = GradientJudge::new(&problem, &given);
        let views = tilewise_core::GradientsMut::new(
            TensorViewMut::bhsd(dq, wide).unwrap(),
            TensorViewMut::bshd(dk, narrow).unwrap(),
            TensorViewMut::bhsd(dv, narrow).unwrap(),
        );
        for found in judge.compare(&views).unwrap() {
            assert!(found.pass, "{sums:?} {found:?}");
        }
    }
    for sums in [Sums::Ordered, Sums::Atomic] {
        one::<bf16>(&backend, sums);
        one::<f32>(&backend, sums);
    }
}

#[test]
fn what_has_no_backward_kernel_is_refused_by_name() {
    let shape = sizes([1, 2, 1], [8, 8], 320);
    let setting = Setting::<f32>::new(shape, Options::new(), Parts::default(), 1);
    let problem = Problem::new(&setting.inputs(), &setting.options).unwrap();
    let refused = backward::supports(&problem, Algorithm::Fa1).unwrap_err();
    assert!(refused.to_string().contains("320"), "{refused}");
    for algorithm in [Algorithm::Fa2, Algorithm::Standard] {
        backward::supports(&problem, algorithm).unwrap();
    }
    let setting = Setting::<f64>::new(
        sizes([1, 2, 1], [8, 8], 16),
        Options::new(),
        Parts::default(),
        1,
    );
    let problem = Problem::new(&setting.inputs(), &setting.options).unwrap();
    let refused = backward::supports(&problem, Algorithm::Fa2).unwrap_err();
    assert!(refused.to_string().contains("f64"), "{refused}");
}
