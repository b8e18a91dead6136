//! Every option of the problem definition, alone and together, against the definition.

use half::{bf16, f16};
use proptest::prelude::*;
use tilewise_core::backend::Backend;
use tilewise_core::{
    Algorithm, Alignment, Dims, Dropout, Element, Error, Inputs, Options, Problem, TensorView,
    TensorViewMut, keep_mask,
};
use tilewise_cuda::CudaBackend;
use tilewise_testkit::{Case, Judged, Noise, Sequences, Setting, Sizes, case, cases};

use super::{Data, bits, dims, gpu, portable, run, verdict};

/// The algorithms that take every option.
const BOTH: [Algorithm; 2] = [Algorithm::Standard, Algorithm::Fa2];

/// out and lse of a problem, poisoned first.
pub(super) fn forward<T: Element>(
    backend: &CudaBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
) -> Result<(Vec<T>, Vec<f32>), Error> {
    let (shape, rows) = (problem.dims().out_shape(), problem.dims().lse_shape());
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; rows.iter().product()];
    backend.forward(
        problem,
        &T::erase_inputs(*inputs),
        algorithm,
        T::erase_mut(TensorViewMut::bhsd(&mut out, shape)?),
        Some(TensorViewMut::bhs(&mut lse, rows)?),
    )?;
    Ok((out, lse))
}

/// Problems over the tiles, of few head_dims: each combination of options at a new size is a kernel to
/// compile.
fn any_case() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: prop_oneof![6 => 1usize..90, 2 => 90usize..300, 1 => Just(0usize)].boxed(),
        seqlen_k: prop_oneof![3 => 1usize..90, 4 => 90usize..500, 1 => Just(0usize)].boxed(),
        head_dim: prop_oneof![Just(20usize), Just(64)].boxed(),
        window: 0..120,
        packed: (0..150, 0..260),
        page: 1..21,
    };
    case(&sizes)
}

/// What the definition says of a case, dropout included, this backend says too.
fn check<T: Element>(name: &str, case: &Case) -> Result<(), TestCaseError> {
    let Some(backend) = gpu(name) else {
        return Ok(());
    };
    for algorithm in BOTH {
        let mut refused = None;
        let setting = Setting::<T>::new(case, |problem, inputs| {
            let results = forward(&backend, problem, inputs, algorithm);
            results.unwrap_or_else(|error| {
                refused = Some(error);
                (Vec::new(), Vec::new())
            })
        });
        prop_assert!(refused.is_none(), "{algorithm}: {refused:?}");
        let who = format!("{algorithm} {:?}", setting.options);
        Judged::new(&setting.problem(), &setting.inputs()).agrees(
            &who,
            &setting.out,
            &setting.lse,
        )?;
    }
    Ok(())
}

/// At most 24, whatever the environment asks for: most of them are kernels to compile.
fn few() -> ProptestConfig {
    let mut config = cases(24);
    config.cases = config.cases.min(24);
    config
}

proptest! {
    #![proptest_config(few())]
    #[test]
    fn f32_with_any_options_equals_the_definition(case in any_case()) {
        check::<f32>("f32_with_any_options_equals_the_definition", &case)?;
    }

    #[test]
    fn f16_with_any_options_equals_the_definition(case in any_case()) {
        check::<f16>("f16_with_any_options_equals_the_definition", &case)?;
    }

    #[test]
    fn bf16_with_any_options_equals_the_definition(case in any_case()) {
        check::<bf16>("bf16_with_any_options_equals_the_definition", &case)?;
    }
}

/// Keys in pages where no kernel reads them there: under dropout, in wide rows, for `standard`. And a
/// packed problem of no sequence, under dropout.
#[test]
fn pages_and_packs_that_other_kernels_take() {
    let name = "pages_and_packs_that_other_kernels_take";
    for (d, seed) in (3..9).map(|seed| (64, seed)).chain([(320, 1)]) {
        let paged = Sequences::Paged(7, vec![100, 30, 0]);
        for case in [
            Case {
                sequences: paged,
                ..Case::dense(seed, dims(2, 2, 1, 37, 75, d))
            },
            Case {
                sequences: Sequences::Packed(vec![], false),
                ..Case::dense(seed, dims(1, 1, 1, 9, 9, d))
            },
        ] {
            check::<f32>(name, &case).unwrap_or_else(|e| panic!("{d} {seed}: {e}"));
        }
    }
}

/// A case with everything on that goes together.
fn crowded(seed: u64, dims: Dims, sequences: Sequences) -> Case {
    Case {
        sequences,
        options: Options::new().causal(true).window_left(100).softcap(9.0),
        alibi: true,
        sinks: true,
        bias: Some([false; 4]),
        mask: Some([true, false, false, false]),
        ..Case::dense(seed, dims)
    }
}

fn check_dims<T: Element>(name: &str, head_dim: usize, head_dim_v: usize) {
    let shape = Dims {
        head_dim_v,
        ..dims(2, 4, 2, 150, 230, head_dim)
    };
    let packed = Sequences::Packed(vec![(70, 200), (0, 9), (130, 64), (5, 0)], true);
    let mut plain = Case::dense(3, shape);
    plain.options = Options::new().causal(true);
    for case in [
        plain,
        crowded(1, shape, Sequences::Dense),
        crowded(2, shape, packed),
    ] {
        check::<T>(name, &case).unwrap_or_else(|e| panic!("{head_dim} {head_dim_v}: {e}"));
    }
}

/// Every kernel once, on little: what the sanitizers are run on.
#[test]
fn little_problems_for_every_kernel() {
    let name = "little_problems_for_every_kernel";
    for (d, dv) in [(64, 64), (33, 50), (192, 160), (320, 24)] {
        let shape = Dims {
            head_dim_v: dv,
            ..dims(2, 2, 1, 37, 75, d)
        };
        let packed = Sequences::Packed(vec![(20, 70), (0, 9), (33, 14)], true);
        for case in [
            Case::dense(1, shape),
            crowded(2, shape, Sequences::Used(vec![40, 100, 0])),
            crowded(3, shape, packed),
        ] {
            let fault = |e| panic!("{d} {dv}: {e}");
            check::<bf16>(name, &case).unwrap_or_else(fault);
            check::<f32>(name, &case).unwrap_or_else(fault);
        }
    }
}

/// A test for each type and pair of widths: kernels of different tests are compiled side by side.
macro_rules! widths {
    ($($name:ident $t:ty, $d:literal, $dv:literal;)*) => {$(
        #[test]
        fn $name() {
            check_dims::<$t>(concat!(module_path!(), "::", stringify!($name)), $d, $dv);
        }
    )*};
}

mod head_dim_v_of_its_own_equals_the_definition {
    use super::*;

    widths! {
        bf16_64_128 bf16, 64, 128;
        f32_64_128 f32, 64, 128;
        bf16_192_128 bf16, 192, 128;
        f32_192_128 f32, 192, 128;
        bf16_40_1 bf16, 40, 1;
        f32_40_1 f32, 40, 1;
        bf16_128_64 bf16, 128, 64;
        f32_128_64 f32, 128, 64;
        f16_16_256 f16, 16, 256;
    }
}

mod wide_heads_in_slices_equal_the_definition {
    use super::*;

    widths! {
        bf16_320_320 bf16, 320, 320;
        f32_320_320 f32, 320, 320;
        bf16_512_512 bf16, 512, 512;
        f32_512_512 f32, 512, 512;
        bf16_576_512 bf16, 576, 512;
        f32_576_512 f32, 576, 512;
        bf16_64_300 bf16, 64, 300;
        f32_64_300 f32, 64, 300;
        bf16_259_17 bf16, 259, 17;
        f32_259_17 f32, 259, 17;
        f16_512_512 f16, 512, 512;
    }
}

/// Rows of sequence `n`, of `count` that lie side by side along the batch axis or along seqlen.
fn part<T: Element>(
    out: &[T],
    shape: [usize; 4],
    n: usize,
    count: usize,
    packed: bool,
) -> Vec<u64> {
    let view = TensorView::bhsd(out, shape).unwrap();
    let rows = if packed { shape[2] / count } else { shape[2] };
    let mut found = Vec::new();
    for h in 0..shape[1] {
        for s in 0..rows {
            let row = if packed {
                view.row(0, h, n * rows + s).collect::<Vec<_>>()
            } else {
                view.row(n, h, s).collect()
            };
            found.extend(bits(&row));
        }
    }
    found
}

/// Law 6: a sequence alone, among 64 in a batch, and packed among 64: the same bits.
#[test]
fn a_sequence_alone_in_a_batch_and_packed_has_the_same_bits() {
    let name = "a_sequence_alone_in_a_batch_and_packed_has_the_same_bits";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize, options: &Options) {
        const N: usize = 64;
        let (h, hk, sq, sk) = (2, 1, 150, 201);
        let shape = dims(N, h, hk, sq, sk, d);
        let data = Data::<T>::new(shape, 77);
        // The same rows, one sequence after another along seqlen: [n, h, s, d] read as [1, h, n s, d].
        let spread = |values: &[T], heads: usize, rows: usize| -> Vec<T> {
            let view = TensorView::bhsd(values, [N, heads, rows, d]).unwrap();
            let mut packed = Vec::with_capacity(values.len());
            for head in 0..heads {
                for n in 0..N {
                    for s in 0..rows {
                        packed.extend(view.row(n, head, s));
                    }
                }
            }
            packed
        };
        let (q, k, v) = (
            spread(&data.q, h, sq),
            spread(&data.k, hk, sk),
            spread(&data.v, hk, sk),
        );
        let starts = |rows: usize| (0..=N).map(|n| (n * rows) as i32).collect::<Vec<_>>();
        let (cu_q, cu_k) = (starts(sq), starts(sk));
        let view = |values, heads, rows| TensorView::bhsd(values, [1, heads, N * rows, d]).unwrap();
        let packed =
            Inputs::new(view(&q, h, sq), view(&k, hk, sk), view(&v, hk, sk)).packed(&cu_q, &cu_k);
        for algorithm in BOTH {
            let batch = run(backend, &data.inputs(), options, algorithm).unwrap();
            let together = run(backend, &packed, options, algorithm).unwrap();
            for n in [0, 31, 63] {
                let whole = data.inputs();
                let narrow = |view: TensorView<'_, T>| -> Vec<T> {
                    let view = view.narrow(0, n..n + 1);
                    let [_, h, s, _] = view.shape();
                    let rows = (0..h).flat_map(|h| (0..s).map(move |s| (h, s)));
                    rows.flat_map(|(h, s)| view.row(0, h, s).collect::<Vec<_>>())
                        .collect()
                };
                let alone = Data {
                    dims: Dims { batch: 1, ..shape },
                    q: narrow(whole.q),
                    k: narrow(whole.k),
                    v: narrow(whole.v),
                };
                let single = run(backend, &alone.inputs(), options, algorithm).unwrap();
                let expected = bits(&single.0);
                let who = format!("{algorithm} {} {d} {n} {options:?}", T::DTYPE);
                let [_, h, sq, d] = shape.out_shape();
                assert_eq!(
                    expected,
                    part(&batch.0, [N, h, sq, d], n, N, false),
                    "{who}"
                );
                let long = [1, h, N * sq, d];
                assert_eq!(expected, part(&together.0, long, n, N, true), "{who}");
                let lse = bits(&single.1);
                assert_eq!(lse, part(&batch.1, [N, h, sq, 1], n, N, false), "{who}");
                assert_eq!(
                    lse,
                    part(&together.1, [1, h, N * sq, 1], n, N, true),
                    "{who}"
                );
            }
        }
    }
    for options in [
        Options::new(),
        Options::new().causal(true),
        Options::new().softcap(5.0).alignment(Alignment::TopLeft),
    ] {
        one::<bf16>(&backend, 64, &options);
        one::<f32>(&backend, 64, &options);
    }
    one::<f16>(&backend, 128, &Options::new().causal(true));
    one::<bf16>(&backend, 256, &Options::new());
}

/// The weights that are kept are those of the core, bit for bit: with V the identity, out shows them.
#[test]
fn dropout_keeps_what_the_core_keeps() {
    let name = "dropout_keeps_what_the_core_keeps";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend) {
        let shape = dims(2, 3, 1, 75, 64, 64);
        let mut data = Data::<T>::new(shape, 5);
        for (at, x) in data.v.iter_mut().enumerate() {
            *x = T::from_f64(f64::from(u8::from(at % 64 == at / 64 % 64)));
        }
        let mut noise = Noise(17);
        for p in [0.1, 0.5, 0.9] {
            let options = Options::new().dropout(Dropout::Philox {
                p,
                seed: noise.bits(),
                offset: noise.bits(),
            });
            let problem = Problem::new(&data.inputs(), &options).unwrap();
            let kept = keep_mask(&problem, &data.inputs()).unwrap().unwrap();
            for algorithm in BOTH {
                let (out, lse) = run(backend, &data.inputs(), &options, algorithm).unwrap();
                verdict(&data.inputs(), &options, &out, &lse).unwrap();
                for (at, (x, &keep)) in out.iter().zip(&kept).enumerate() {
                    assert_eq!(x.to_f64() != 0.0, keep != 0, "{algorithm} {p} {at}");
                }
            }
        }
    }
    one::<bf16>(&backend);
    one::<f32>(&backend);
}

/// What a mask, a bias or dropout takes away takes nothing with it, whatever its value holds.
#[test]
fn hidden_and_dropped_values_do_not_leak() {
    let name = "hidden_and_dropped_values_do_not_leak";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize) {
        let shape = dims(1, 2, 1, 90, 200, d);
        let mut data = Data::<T>::new(shape, 8);
        for key in [3, 64, 130, 199] {
            data.v[key * d + key % d] = T::from_f64(f64::NAN);
            data.v[key * d + 1] = T::from_f64(f64::INFINITY);
        }
        let bad = |key: usize| [3, 64, 130, 199].contains(&key);
        let mask: Vec<u8> = (0..200).map(|key| u8::from(!bad(key))).collect();
        let hide = |key| if bad(key) { f64::NEG_INFINITY } else { 0.25 };
        let bias: Vec<T> = (0..200).map(|key| T::from_f64(hide(key))).collect();
        let mask = TensorView::bhsd(&mask, [1, 1, 1, 200]).unwrap();
        let bias = TensorView::bhsd(&bias, [1, 1, 1, 200]).unwrap();
        let plain = Options::new();
        let dropped = Options::new().dropout(Dropout::Mask { p: 0.25 });
        for (inputs, options) in [
            (data.inputs().mask(mask), &plain),
            (data.inputs().bias(bias), &plain),
            (data.inputs().keep_mask(mask), &dropped),
        ] {
            for algorithm in BOTH {
                let (out, lse) = run(backend, &inputs, options, algorithm).unwrap();
                verdict(&inputs, options, &out, &lse).unwrap();
                assert!(out.iter().all(|x| x.to_f64().is_finite()), "{algorithm}");
            }
        }
        // Rows that do see them become NaN or infinite there, the others stay as they are.
        let half: Vec<u8> = (0..90 * 200)
            .map(|at| u8::from(at / 200 % 2 == 0 || !bad(at % 200)))
            .collect();
        let half = TensorView::bhsd(&half, [1, 1, 90, 200]).unwrap();
        let inputs = data.inputs().mask(half);
        for algorithm in BOTH {
            let (out, lse) = run(backend, &inputs, &plain, algorithm).unwrap();
            verdict(&inputs, &plain, &out, &lse).unwrap();
        }
    }
    one::<bf16>(&backend, 64);
    one::<f32>(&backend, 64);
}

/// Softcaps that leave scores small and softcaps that do not; bias and mask whose rows are whole chunks, are
/// of odd lengths, lie along the other axis, or are one row for all.
fn check_scores<T: Element>(name: &str, d: usize) {
    let Some(backend) = portable(name) else {
        return;
    };
    for (sq, sk) in [(150, 333), (140, 320)] {
        let data = Data::<T>::new(dims(2, 2, 1, sq, sk, d), 21);
        let values: Vec<T> = Noise(22).tensor(2 * sq * sk, 1.0);
        let live: Vec<u8> = (0..sq * sk).map(|at| u8::from(at % 7 != 3)).collect();
        let rows = [1, 2, sq, sk];
        let (high, across) = ((sq * sk) as isize, sq as isize);
        let bias = |strides| TensorView::from_strides(&values, rows, strides, 0).unwrap();
        let mask = |strides| TensorView::from_strides(&live, [1, 1, sq, sk], strides, 0).unwrap();
        let along = sk as isize;
        let causal = Options::new().causal(true);
        let plain = data.inputs();
        for (inputs, options) in [
            (plain, Options::new().softcap(30.0)),
            (plain, Options::new().softcap(1.5)),
            (plain, Options::new().softcap(1e6)),
            (plain, Options::new().alibi_slopes(vec![0.5, 0.01])),
            (plain, causal.clone().alibi_slopes(vec![-0.25, 0.0])),
            (plain.bias(bias([0, high, along, 1])), Options::new()),
            (
                plain.bias(bias([0, high, 1, across])),
                Options::new().softcap(1.5),
            ),
            (plain.bias(bias([0, high, 0, 1])), Options::new()),
            (plain.mask(mask([0, 0, along, 1])), Options::new()),
            (plain.mask(mask([0, 0, 1, across])), causal.clone()),
            (
                plain
                    .mask(mask([0, 0, along, 1]))
                    .bias(bias([0, high, along, 1])),
                causal.clone().alibi_slopes(vec![0.5, 0.01]),
            ),
        ] {
            let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
            if let Err(found) = verdict(&inputs, &options, &out, &lse) {
                panic!("{sk} {d} {options:?}: {found}");
            }
        }
    }
}

#[test]
fn what_changes_scores_equals_the_definition_in_bf16() {
    check_scores::<bf16>("what_changes_scores_equals_the_definition_in_bf16", 128);
}

#[test]
fn what_changes_scores_equals_the_definition_in_f16() {
    check_scores::<f16>("what_changes_scores_equals_the_definition_in_f16", 64);
}

#[test]
fn what_changes_scores_equals_the_definition_in_f32() {
    check_scores::<f32>("what_changes_scores_equals_the_definition_in_f32", 128);
}

#[test]
fn what_changes_scores_equals_the_definition_in_wider_rows() {
    check_scores::<bf16>(
        "what_changes_scores_equals_the_definition_in_wider_rows",
        160,
    );
    check_scores::<bf16>(
        "what_changes_scores_equals_the_definition_in_wider_rows",
        256,
    );
}

/// Chunks of a bias arrive by the copy unit, rows that do not lie on sixteen bytes by their elements: to the
/// same bits.
#[test]
fn a_bias_gives_the_same_bits_however_it_lies() {
    let Some(backend) = portable("a_bias_gives_the_same_bits_however_it_lies") else {
        return;
    };
    let (sq, sk) = (140, 320);
    let data = Data::<bf16>::new(dims(1, 2, 1, sq, sk, 128), 23);
    let values: Vec<bf16> = Noise(24).tensor(sq * sk, 2.0);
    let mut apart = vec![bf16::ZERO; sq * (sk + 1)];
    let mut turned = values.clone();
    for (at, &value) in values.iter().enumerate() {
        let (row, key) = (at / sk, at % sk);
        apart[row * (sk + 1) + key] = value;
        turned[key * sq + row] = value;
    }
    let results = [
        (&values, [0, 0, sk as isize, 1]),
        (&apart, [0, 0, sk as isize + 1, 1]),
        (&turned, [0, 0, 1, sq as isize]),
    ]
    .map(|(bias, strides)| {
        let bias = TensorView::from_strides(bias, [1, 1, sq, sk], strides, 0).unwrap();
        let inputs = data.inputs().bias(bias);
        let (out, lse) = run(&backend, &inputs, &Options::new(), Algorithm::Fa2).unwrap();
        (bits(&out), lse)
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

/// Blocks whose rows see no key write zeros, whatever of Q may have been on its way.
#[test]
fn rows_that_see_no_key_are_zero() {
    let Some(backend) = portable("rows_that_see_no_key_are_zero") else {
        return;
    };
    let data = Data::<bf16>::new(dims(2, 8, 8, 300, 100, 128), 25);
    let options = Options::new().causal(true);
    for _ in 0..8 {
        let (out, lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
        for (at, row) in out.chunks(128).enumerate().filter(|(at, _)| at % 300 < 200) {
            assert!(row.iter().all(|x| x.to_f64() == 0.0), "row {at}");
            assert_eq!(lse[at], f32::NEG_INFINITY);
        }
    }
}

/// What fa1 does not do it refuses by name, and does not do.
#[test]
fn fa1_refuses_by_name() {
    let Some(backend) = gpu("fa1_refuses_by_name") else {
        return;
    };
    let data = Data::<f16>::new(dims(1, 2, 1, 8, 8, 64), 1);
    let options = Options::new().sinks(vec![0.5; 2]);
    match run(&backend, &data.inputs(), &options, Algorithm::Fa1) {
        Err(Error::Unsupported { what, .. }) => assert!(what.contains("sinks"), "{what}"),
        other => panic!("{other:?}"),
    }
}
