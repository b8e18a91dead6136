//! The kernels against the naive definition, on a GPU. Where there is none every test says so on
//! stderr and passes; `TILEWISE_REQUIRE_GPU=1` turns that into a failure.

mod common;
#[path = "gpu/options.rs"]
mod options;

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use tilewise_core::backend::Backend;
use tilewise_core::{
    Algorithm, Alignment, AnyKeyBlock, DType, Dims, Element, Error, HostState, Inputs, Judge,
    OnlineSoftmax, Options, Problem, RowSample, TensorView, TensorViewMut,
};
use tilewise_cuda::cudarc::driver::{DevicePtr, DevicePtrMut, DeviceRepr};
use tilewise_cuda::state::Outputs;
use tilewise_cuda::{CudaBackend, DeviceView, DeviceViewMut, ops};

use common::{Noise, gpu, portable};

#[path = "gpu/capture.rs"]
mod capture;
#[path = "gpu/chips.rs"]
mod chips;
#[path = "gpu/decode.rs"]
mod decode;
#[path = "gpu/hopper.rs"]
mod hopper;
#[path = "gpu/streamed.rs"]
mod streamed;

/// A problem's tensors in row-major order.
struct Data<T> {
    dims: Dims,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Element> Data<T> {
    fn new(dims: Dims, seed: u64) -> Data<T> {
        let mut noise = Noise(seed);
        let row = |heads, s, d| dims.batch * heads * s * d;
        Data {
            dims,
            q: noise.tensor(row(dims.num_heads, dims.seqlen_q, dims.head_dim)),
            k: noise.tensor(row(dims.num_kv_heads, dims.seqlen_k, dims.head_dim)),
            v: noise.tensor(row(dims.num_kv_heads, dims.seqlen_k, dims.head_dim_v)),
        }
    }

    fn wide(&self) -> [usize; 4] {
        let d = self.dims;
        [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim]
    }

    fn inputs(&self) -> Inputs<'_, T> {
        Inputs::new(
            TensorView::bhsd(&self.q, self.dims.out_shape()).unwrap(),
            TensorView::bhsd(&self.k, self.wide()).unwrap(),
            TensorView::bhsd(&self.v, self.wide()).unwrap(),
        )
    }
}

fn dims(batch: usize, heads: usize, kv: usize, sq: usize, sk: usize, d: usize) -> Dims {
    Dims {
        batch,
        num_heads: heads,
        num_kv_heads: kv,
        seqlen_q: sq,
        seqlen_k: sk,
        head_dim: d,
        head_dim_v: d,
    }
}

/// out and lse of one call; both are poisoned first, so that what is not written shows.
fn run<T: Element>(
    backend: &CudaBackend,
    inputs: &Inputs<'_, T>,
    options: &Options,
    algorithm: Algorithm,
) -> Result<(Vec<T>, Vec<f32>), Error> {
    let problem = Problem::new(inputs, options)?;
    let (shape, rows) = (problem.dims().out_shape(), problem.dims().lse_shape());
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; rows.iter().product()];
    backend.forward(
        &problem,
        &T::erase_inputs(*inputs),
        algorithm,
        T::erase_mut(TensorViewMut::bhsd(&mut out, shape)?),
        Some(TensorViewMut::bhs(&mut lse, rows)?),
    )?;
    Ok((out, lse))
}

/// The name of the instructions that a call without options used.
fn isa(backend: &CudaBackend, data: &Data<bf16>, algorithm: Algorithm) -> String {
    let inputs = data.inputs();
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let mut out = vec![bf16::ZERO; data.q.len()];
    let out = TensorViewMut::bhsd(&mut out, data.dims.out_shape()).unwrap();
    let inputs = bf16::erase_inputs(inputs);
    let report = backend.forward(&problem, &inputs, algorithm, bf16::erase_mut(out), None);
    report.unwrap().isa
}

fn verdict<T: Element>(
    inputs: &Inputs<'_, T>,
    options: &Options,
    out: &[T],
    lse: &[f32],
) -> Result<(), String> {
    let problem = Problem::new(inputs, options).map_err(|e| e.to_string())?;
    let judge = Judge::new(&problem, inputs, &RowSample::all(&problem));
    let out = TensorView::bhsd(out, problem.dims().out_shape()).map_err(|e| e.to_string())?;
    let [b, h, s] = problem.dims().lse_shape();
    let lse = TensorView::bhsd(lse, [b, h, s, 1]).map_err(|e| e.to_string())?;
    let found = judge.compare(&out, Some(&lse)).map_err(|e| e.to_string())?;
    if found.pass {
        Ok(())
    } else {
        Err(format!("{found:?}"))
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.to_f64().to_bits()).collect()
}

fn masks() -> Vec<Options> {
    vec![
        Options::new(),
        Options::new().causal(true),
        Options::new().causal(true).alignment(Alignment::TopLeft),
        Options::new().window_left(37).window_right(20),
        Options::new().causal(true).window_left(70),
    ]
}

fn sweep<T: Element>(name: &str, head_dims: &[usize]) {
    let Some(backend) = gpu(name) else { return };
    for &d in head_dims {
        for (n, shape) in [
            dims(2, 4, 2, 257, 300, d),
            dims(1, 3, 1, 64, 64, d),
            dims(1, 2, 2, 1, 513, d),
            dims(1, 2, 1, 200, 77, d),
        ]
        .into_iter()
        .enumerate()
        {
            let data = Data::<T>::new(shape, n as u64 + 1);
            for options in masks() {
                for algorithm in Algorithm::ALL {
                    let (out, lse) = run(&backend, &data.inputs(), &options, algorithm).unwrap();
                    if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
                        panic!("{algorithm} {shape:?} {options:?}: {found}");
                    }
                }
            }
        }
    }
}

#[test]
fn bf16_equals_the_definition() {
    sweep::<bf16>("bf16_equals_the_definition", &[64, 128, 256]);
}

#[test]
fn f16_equals_the_definition() {
    sweep::<f16>("f16_equals_the_definition", &[64, 128, 256]);
}

/// The bound of f32 inputs is that of f32 arithmetic: products in tf32 would miss it a thousandfold.
#[test]
fn f32_equals_the_definition_within_f32_rounding() {
    sweep::<f32>("f32_equals_the_definition", &[64, 128, 256]);
}

#[test]
fn odd_head_dims_softcaps_and_scales_equal_the_definition() {
    let name = "odd_head_dims_softcaps_and_scales_equal_the_definition";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize, options: &Options) {
        let data = Data::<T>::new(dims(1, 4, 2, 70, 131, d), d as u64);
        for algorithm in Algorithm::ALL {
            let (out, lse) = run(backend, &data.inputs(), options, algorithm).unwrap();
            if let Err(found) = verdict(&data.inputs(), options, &out, &lse) {
                panic!("{algorithm} {} d {d} {options:?}: {found}", T::DTYPE);
            }
        }
    }
    for d in [1, 33, 40, 72, 80, 96, 112, 160, 200] {
        one::<bf16>(&backend, d, &Options::new().causal(true));
    }
    for d in [5, 40, 136, 256] {
        one::<f32>(&backend, d, &Options::new());
        one::<f16>(&backend, d, &Options::new().softcap(4.0));
    }
    for scale in [-0.7, 0.0, 3.0] {
        one::<f32>(&backend, 64, &Options::new().softmax_scale(scale));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_lengths_heads_and_windows_equal_the_definition(
        (batch, kv, group) in (1usize..=2, 1usize..=2, 1usize..=3),
        (sq, sk) in (0usize..=200, 0usize..=330),
        wide in any::<bool>(),
        causal in any::<bool>(),
        top_left in any::<bool>(),
        left in proptest::option::weighted(0.4, 0usize..150),
        right in proptest::option::weighted(0.3, 0usize..150),
        algorithm in 0usize..3,
        seed in any::<u64>(),
    ) {
        let Some(backend) = gpu("any_lengths_heads_and_windows_equal_the_definition") else { return Ok(()) };
        let options = Options::new()
            .causal(causal)
            .alignment(if top_left { Alignment::TopLeft } else { Alignment::BottomRight })
            .window_left(left)
            .window_right(right);
        let data = Data::<bf16>::new(dims(batch, kv * group, kv, sq, sk, if wide { 128 } else { 64 }), seed);
        let algorithm = Algorithm::ALL[algorithm];
        let (out, lse) = run(&backend, &data.inputs(), &options, algorithm).unwrap();
        if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
            prop_assert!(false, "{} {}", algorithm, found);
        }
    }
}

#[test]
fn strided_broadcast_and_reversed_inputs_are_read_as_they_lie() {
    let name = "strided_broadcast_and_reversed_inputs_are_read_as_they_lie";
    let Some(backend) = gpu(name) else { return };
    let shape = dims(2, 4, 2, 50, 90, 64);
    let data = Data::<f16>::new(shape, 9);
    let [b, h, s, d] = shape.out_shape();
    let options = Options::new().causal(true);
    // [batch, seqlen, heads, head_dim] in memory.
    let q = TensorView::bshd(&data.q, [b, h, s, d]).unwrap();
    // One head for all, by a stride of 0; rows from last to first; every second element.
    let kshape = [2, 2, 90, 64];
    let k = TensorView::from_strides(&data.k, kshape, [2 * 90 * 64, 0, 64, 1], 0).unwrap();
    let v =
        TensorView::from_strides(&data.v, kshape, [2 * 90 * 64, 90 * 64, -64, 1], 89 * 64).unwrap();
    let narrow =
        TensorView::from_strides(&data.v, [2, 2, 90, 32], [2 * 90 * 64, 90 * 64, 64, 2], 1)
            .unwrap();
    for algorithm in Algorithm::ALL {
        let inputs = Inputs::new(q, k, v);
        let (out, lse) = run(&backend, &inputs, &options, algorithm).unwrap();
        verdict(&inputs, &options, &out, &lse).unwrap();
        let inputs = Inputs::new(narrow.narrow(2, 0..50), narrow, narrow);
        let (out, lse) = run(&backend, &inputs, &options, algorithm).unwrap();
        verdict(&inputs, &options, &out, &lse).unwrap();
    }
}

#[test]
fn nan_and_inf_reach_the_rows_that_see_them_and_no_other() {
    let name = "nan_and_inf_reach_the_rows_that_see_them_and_no_other";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize) {
        let shape = dims(1, 2, 1, 150, 150, d);
        for options in [
            Options::new().causal(true),
            Options::new().window_left(20).window_right(9),
        ] {
            for bad in [f64::NAN, f64::INFINITY] {
                let mut data = Data::<T>::new(shape, 3);
                data.v[100 * d + 7] = T::from_f64(bad);
                // In rows of 80 the last columns stand anywhere in a line of shared memory.
                data.v[149 * d + d - 1] = T::from_f64(bad);
                data.k[140 * d + 1] = T::from_f64(f64::NAN);
                data.q[20 * d + 3] = T::from_f64(f64::NAN);
                for algorithm in Algorithm::ALL {
                    let (out, lse) = run(backend, &data.inputs(), &options, algorithm).unwrap();
                    if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
                        panic!("{algorithm} {} {d} {bad} {options:?}: {found}", T::DTYPE);
                    }
                }
            }
        }
    }
    for d in [64, 80, 128] {
        one::<bf16>(&backend, d);
        one::<f32>(&backend, d);
    }
}

#[test]
fn nothing_beyond_the_tensors_is_read() {
    let Some(backend) = gpu("nothing_beyond_the_tensors_is_read") else {
        return;
    };
    // K and V are the first 45 of 60 rows a head; the rest is NaN.
    let mut noise = Noise(5);
    let q: Vec<f16> = noise.tensor(2 * 33 * 64);
    let hidden = |row: usize| row % 60 >= 45;
    let wide: Vec<f16> = (0..2 * 60 * 64)
        .map(|x| {
            if hidden(x / 64) {
                f16::NAN
            } else {
                f16::from_f64(noise.next())
            }
        })
        .collect();
    let q = TensorView::bhsd(&q, [1, 2, 33, 64]).unwrap();
    let kv = TensorView::bhsd(&wide, [1, 2, 60, 64])
        .unwrap()
        .narrow(2, 0..45);
    let inputs = Inputs::new(q, kv, kv);
    for algorithm in Algorithm::ALL {
        let (out, lse) = run(&backend, &inputs, &Options::new(), algorithm).unwrap();
        verdict(&inputs, &Options::new(), &out, &lse).unwrap();
    }
}

#[test]
fn a_hundred_runs_give_the_same_bits() {
    let Some(backend) = gpu("a_hundred_runs_give_the_same_bits") else {
        return;
    };
    let data = Data::<bf16>::new(dims(2, 4, 2, 300, 411, 128), 11);
    let options = Options::new().causal(true);
    for algorithm in Algorithm::ALL {
        let first = run(&backend, &data.inputs(), &options, algorithm).unwrap();
        for _ in 0..100 {
            let again = run(&backend, &data.inputs(), &options, algorithm).unwrap();
            assert_eq!(bits(&first.0), bits(&again.0), "{algorithm}");
            assert_eq!(bits(&first.1), bits(&again.1), "{algorithm}");
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let Some(backend) = gpu("a_row_does_not_depend_on_its_batch") else {
        return;
    };
    let shape = dims(16, 4, 2, 130, 200, 64);
    let data = Data::<bf16>::new(shape, 12);
    let options = Options::new().causal(true);
    for algorithm in Algorithm::ALL {
        let (all, all_lse) = run(&backend, &data.inputs(), &options, algorithm).unwrap();
        for b in [0, 7, 15] {
            let one = |view: TensorView<'_, bf16>| -> Vec<bf16> {
                let view = view.narrow(0, b..b + 1);
                let [_, h, s, _] = view.shape();
                let mut rows = Vec::new();
                for (h, s) in (0..h).flat_map(|h| (0..s).map(move |s| (h, s))) {
                    rows.extend(view.row(0, h, s));
                }
                rows
            };
            let whole = data.inputs();
            let alone = Data {
                dims: Dims { batch: 1, ..shape },
                q: one(whole.q),
                k: one(whole.k),
                v: one(whole.v),
            };
            let (out, lse) = run(&backend, &alone.inputs(), &options, algorithm).unwrap();
            assert_eq!(bits(&out), bits(&all[b * out.len()..][..out.len()]));
            assert_eq!(bits(&lse), bits(&all_lse[b * lse.len()..][..lse.len()]));
        }
    }
}

/// Pairs of f16 of a large f32 problem are made while its first rows are on their way, those of a small one
/// before: a head has the same bits in both, with every head's keys in its own count.
#[test]
fn f32_rows_wait_for_the_pairs_of_their_head() {
    let Some(backend) = gpu("f32_rows_wait_for_the_pairs_of_their_head") else {
        return;
    };
    for (d, sk, causal) in [(64, 1025, true), (128, 700, false), (256, 333, true)] {
        // Three times what it takes to make them beside.
        let kv = (48 << 20) / (2 * 4 * 2 * sk * d);
        let shape = dims(2, 2 * kv, kv, 65, sk, d);
        let data = Data::<f32>::new(shape, d as u64);
        let options = Options::new().causal(causal);
        let (out, lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
        let rows = |values: &[f32], n: usize, width: usize| values[n * width..][..width].to_vec();
        for (b, head) in [(0, 0), (0, kv - 1), (1, kv / 2), (1, kv - 1)] {
            let (n, kv_n) = (b * 2 * kv + 2 * head, b * kv + head);
            let alone = Data {
                dims: dims(1, 2, 1, 65, sk, d),
                q: rows(&data.q, n / 2, 2 * 65 * d),
                k: rows(&data.k, kv_n, sk * d),
                v: rows(&data.v, kv_n, sk * d),
            };
            let (one, one_lse) = run(&backend, &alone.inputs(), &options, Algorithm::Fa2).unwrap();
            verdict(&alone.inputs(), &options, &one, &one_lse).unwrap();
            assert_eq!(bits(&one), bits(&out[n * 65 * d..][..2 * 65 * d]), "d {d}");
            assert_eq!(bits(&one_lse), bits(&lse[n * 65..][..2 * 65]), "d {d}");
        }
    }
}

#[test]
fn calls_from_many_threads_do_not_disturb_each_other() {
    let name = "calls_from_many_threads_do_not_disturb_each_other";
    let Some(backend) = gpu(name) else { return };
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let backend = backend.clone();
            scope.spawn(move || {
                let d = [64, 128][thread as usize % 2];
                let shape = dims(1, 2, 1, 60 + 9 * thread as usize, 150, d);
                let data = Data::<f16>::new(shape, thread);
                for round in 0..12 {
                    let algorithm = Algorithm::ALL[(round + thread as usize) % 3];
                    let options = Options::new().causal(round % 2 == 0);
                    let (out, lse) = run(&backend, &data.inputs(), &options, algorithm).unwrap();
                    verdict(&data.inputs(), &options, &out, &lse).unwrap();
                }
            });
        }
    });
}

#[test]
fn device_memory_is_used_as_it_lies_on_the_callers_stream() {
    let name = "device_memory_is_used_as_it_lies_on_the_callers_stream";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element + DeviceRepr>(backend: &CudaBackend, algorithm: Algorithm) {
        let shape = dims(2, 4, 2, 100, 140, 64);
        let data = Data::<T>::new(shape, 21);
        let options = Options::new().causal(true);
        let problem = Problem::dense(shape, T::DTYPE, &options).unwrap();
        let stream = backend.context().new_stream().unwrap();
        let (q, k, v) = (
            stream.clone_htod(&data.q).unwrap(),
            stream.clone_htod(&data.k).unwrap(),
            stream.clone_htod(&data.v).unwrap(),
        );
        let mut out = stream
            .clone_htod(&vec![T::from_f64(f64::NAN); data.q.len()])
            .unwrap();
        let mut lse = stream.clone_htod(&vec![f32::NAN; 2 * 4 * 100]).unwrap();
        let wide = data.wide();
        ops::forward(
            backend,
            &stream,
            &problem,
            algorithm,
            &DeviceView::bhsd::<T, _>(&q, shape.out_shape()).unwrap(),
            &DeviceView::bhsd::<T, _>(&k, wide).unwrap(),
            &DeviceView::bhsd::<T, _>(&v, wide).unwrap(),
            &mut DeviceViewMut::bhsd::<T, _>(&mut out, shape.out_shape()).unwrap(),
            Some(&mut DeviceViewMut::bhsd::<f32, _>(&mut lse, [2, 4, 100, 1]).unwrap()),
        )
        .unwrap();
        let host = stream.clone_dtoh(&out).unwrap();
        let sums = stream.clone_dtoh(&lse).unwrap();
        stream.synchronize().unwrap();
        verdict(&data.inputs(), &options, &host, &sums).unwrap();

        // The same through raw addresses, out in [batch, seqlen, heads, head_dim] order.
        let mut second = stream
            .clone_htod(&vec![T::from_f64(f64::NAN); data.q.len()])
            .unwrap();
        let strides =
            |[_, h, s, d]: [usize; 4]| [(h * s * d) as isize, (s * d) as isize, d as isize, 1];
        let bshd = [100 * 4 * 64, 64, 4 * 64, 1];
        {
            let (pq, _q) = q.device_ptr(&stream);
            let (pk, _k) = k.device_ptr(&stream);
            let (pv, _v) = v.device_ptr(&stream);
            let (po, _o) = second.device_ptr_mut(&stream);
            // SAFETY: the addresses are of slices of these shapes that outlive the stream's work.
            unsafe {
                ops::forward(
                    backend,
                    &stream,
                    &problem,
                    algorithm,
                    &DeviceView::from_raw(
                        pq,
                        T::DTYPE,
                        shape.out_shape(),
                        strides(shape.out_shape()),
                    ),
                    &DeviceView::from_raw(pk, T::DTYPE, wide, strides(wide)),
                    &DeviceView::from_raw(pv, T::DTYPE, wide, strides(wide)),
                    &mut DeviceViewMut::from_raw(po, T::DTYPE, shape.out_shape(), bshd).unwrap(),
                    None,
                )
                .unwrap();
            }
        }
        let other = stream.clone_dtoh(&second).unwrap();
        stream.synchronize().unwrap();
        let first = TensorView::bhsd(&host, shape.out_shape()).unwrap();
        let second = TensorView::bshd(&other, shape.out_shape()).unwrap();
        for b in 0..2 {
            for h in 0..4 {
                for s in 0..100 {
                    let row = |view: &TensorView<'_, T>| view.row(b, h, s).collect::<Vec<_>>();
                    assert_eq!(bits(&row(&first)), bits(&row(&second)));
                }
            }
        }
        let mut tensors = [q, k];
        assert!(DeviceView::bhsd::<T, _>(&tensors[1], [2, 4, 100, 64]).is_err());
        assert!(DeviceViewMut::bhsd::<T, _>(&mut tensors[0], [2, 4, 101, 64]).is_err());
    }
    for algorithm in Algorithm::ALL {
        one::<bf16>(&backend, algorithm);
        one::<f32>(&backend, algorithm);
    }
}

/// Keys `range` of `data` as a block.
fn block<T: Element>(data: &Data<T>, range: std::ops::Range<usize>) -> AnyKeyBlock<'_> {
    let inputs = data.inputs();
    AnyKeyBlock {
        q: T::erase(inputs.q),
        k: T::erase(inputs.k.narrow(2, range.clone())),
        v: T::erase(inputs.v.narrow(2, range.clone())),
        first_key: range.start,
        bias: None,
        mask: None,
    }
}

fn finish<T: Element>(
    backend: &CudaBackend,
    state: tilewise_cuda::CudaState,
    data: &Data<T>,
) -> (Vec<T>, Vec<f32>) {
    let (shape, rows) = (data.dims.out_shape(), data.dims.lse_shape());
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; rows.iter().product()];
    OnlineSoftmax::finish(
        backend,
        state,
        Outputs {
            out: T::erase_mut(TensorViewMut::bhsd(&mut out, shape).unwrap()),
            lse: Some(TensorViewMut::bhs(&mut lse, rows).unwrap()),
        },
    )
    .unwrap();
    (out, lse)
}

#[test]
fn keys_in_any_parts_and_order_give_the_same_attention() {
    let name = "keys_in_any_parts_and_order_give_the_same_attention";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize, options: &Options) {
        let data = Data::<T>::new(dims(2, 4, 2, 90, 260, d), 31);
        let problem = Problem::dense(data.dims, T::DTYPE, options).unwrap();
        // Absorbed in chunks, last first.
        let mut state = OnlineSoftmax::begin(backend, &problem).unwrap();
        for range in [201..260, 37..201, 0..37, 37..37] {
            OnlineSoftmax::absorb(backend, &mut state, &block(&data, range)).unwrap();
        }
        let (out, lse) = finish(backend, state, &data);
        verdict(&data.inputs(), options, &out, &lse).unwrap();
        // Two states merged, one of them through the host; and the identity.
        let mut left = OnlineSoftmax::begin(backend, &problem).unwrap();
        OnlineSoftmax::absorb(backend, &mut left, &block(&data, 0..100)).unwrap();
        let mut right = OnlineSoftmax::begin(backend, &problem).unwrap();
        OnlineSoftmax::absorb(backend, &mut right, &block(&data, 100..260)).unwrap();
        let host = OnlineSoftmax::export(backend, &right).unwrap();
        let right = OnlineSoftmax::import(backend, &problem, &host).unwrap();
        OnlineSoftmax::merge(backend, &mut left, &right).unwrap();
        let before = OnlineSoftmax::export(backend, &left).unwrap();
        let empty = HostState::empty(data.dims.lse_shape(), d).unwrap();
        let empty = OnlineSoftmax::import(backend, &problem, &empty).unwrap();
        OnlineSoftmax::merge(backend, &mut left, &empty).unwrap();
        assert_eq!(OnlineSoftmax::export(backend, &left).unwrap(), before);
        let (out, lse) = finish(backend, left, &data);
        verdict(&data.inputs(), options, &out, &lse).unwrap();
    }
    for options in [
        Options::new(),
        Options::new().causal(true),
        Options::new().window_left(40).window_right(3),
        Options::new().softcap(3.0).softmax_scale(-0.4),
    ] {
        one::<bf16>(&backend, 64, &options);
        one::<f32>(&backend, 128, &options);
    }
}

#[test]
fn out_of_memory_is_an_error_after_which_the_backend_works() {
    let name = "out_of_memory_is_an_error_after_which_the_backend_works";
    let Some(backend) = gpu(name) else { return };
    let huge = Problem::dense(
        dims(64, 64, 64, 1 << 20, 16, 256),
        DType::BF16,
        &Options::new(),
    )
    .unwrap();
    match OnlineSoftmax::begin(&backend, &huge) {
        Err(Error::OutOfMemory { bytes, .. }) => assert!(bytes > 1 << 30),
        other => panic!("{other:?}"),
    }
    let data = Data::<bf16>::new(dims(1, 1, 1, 33, 65, 64), 2);
    let (out, lse) = run(&backend, &data.inputs(), &Options::new(), Algorithm::Fa2).unwrap();
    verdict(&data.inputs(), &Options::new(), &out, &lse).unwrap();
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_named() {
    let Some(backend) = gpu("shapes_and_dtypes_that_do_not_fit_are_named") else {
        return;
    };
    let shape = dims(1, 2, 1, 8, 8, 64);
    let problem = Problem::dense(shape, DType::F16, &Options::new()).unwrap();
    let stream = backend.context().new_stream().unwrap();
    let q = stream.alloc_zeros::<f16>(2 * 8 * 64).unwrap();
    let wrong = stream.alloc_zeros::<bf16>(2 * 8 * 64).unwrap();
    let mut out = stream.alloc_zeros::<f16>(2 * 8 * 64).unwrap();
    let view = DeviceView::bhsd::<f16, _>(&q, [1, 2, 8, 64]).unwrap();
    let kv = DeviceView::bhsd::<f16, _>(&q, [1, 1, 8, 64]).unwrap();
    let other = DeviceView::bhsd::<bf16, _>(&wrong, [1, 1, 8, 64]).unwrap();
    let short = DeviceView::bhsd::<f16, _>(&q, [1, 1, 7, 64]).unwrap();
    let mut target = DeviceViewMut::bhsd::<f16, _>(&mut out, [1, 2, 8, 64]).unwrap();
    for (k, v, needle) in [(&other, &kv, "k"), (&kv, &short, "v")] {
        let error = ops::forward(
            &backend,
            &stream,
            &problem,
            Algorithm::Fa2,
            &view,
            k,
            v,
            &mut target,
            None,
        )
        .unwrap_err();
        assert!(error.to_string().starts_with(needle), "{error}");
    }
}

/// Kernels and copies go up to where the problem says: one of more keys than there are would leave them.
#[test]
fn a_problem_that_other_inputs_pose_is_refused() {
    let name = "a_problem_that_other_inputs_pose_is_refused";
    let Some(backend) = gpu(name) else { return };
    let data = Data::<f16>::new(dims(1, 2, 1, 8, 8, 64), 1);
    for (sq, sk) in [(8, 800), (1, 8), (8, 0)] {
        let problem = Problem::dense(dims(1, 2, 1, sq, sk, 64), DType::F16, &Options::new());
        let mut out = vec![f16::ZERO; 2 * sq * 64];
        let out = TensorViewMut::bhsd(&mut out, [1, 2, sq, 64]).unwrap();
        let refused = backend.forward(
            &problem.unwrap(),
            &f16::erase_inputs(data.inputs()),
            Algorithm::Fa2,
            f16::erase_mut(out),
            None,
        );
        assert!(refused.is_err(), "{sq} {sk}");
    }
}

#[test]
fn a_backend_that_is_not_there_says_why() {
    let probe = tilewise_cuda::probe();
    let last = probe.devices.len();
    let error = CudaBackend::new(last).unwrap_err();
    let Error::Unavailable { backend, reason } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*backend, format!("cuda:{last}"));
    match &probe.driver {
        Err(missing) => assert_eq!(reason, missing),
        Ok(_) => assert!(reason.contains(&format!("no device {last}")), "{reason}"),
    }
    // Shared across threads as the facade needs it.
    fn shareable<T: Send + Sync>(_: Option<Arc<T>>) {}
    shareable::<CudaBackend>(None);
}
