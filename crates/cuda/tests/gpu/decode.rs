//! Few queries over many keys, and keys in pages.

use super::*;
use tilewise_core::BlockTable;
use tilewise_cuda::decode::{self, DeviceTable};

/// out and lse of fa2.
fn fa2<T: Element>(
    backend: &CudaBackend,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> (Vec<T>, Vec<f32>) {
    let problem = Problem::new(inputs, options).unwrap();
    assert!(decode::serves(&problem, Algorithm::Fa2), "{problem:?}");
    run(backend, inputs, options, Algorithm::Fa2).unwrap()
}

fn sweep<T: Element>(name: &str, head_dims: &[usize]) {
    let Some(backend) = gpu(name) else { return };
    for &d in head_dims {
        for (n, shape) in [
            dims(1, 8, 2, 1, 2000, d),
            dims(3, 2, 2, 1, 1100, d),
            dims(2, 4, 4, 2, 700, d),
            dims(1, 32, 1, 1, 900, d),
            dims(1, 8, 2, 5, 1300, d),
            dims(1, 2, 1, 30, 77, d),
        ]
        .into_iter()
        .enumerate()
        {
            let data = Data::<T>::new(shape, n as u64 + 1);
            // All masks at the first head_dim, a window at the others.
            let skipped = if d == head_dims[0] { 0 } else { 3 };
            for options in masks().into_iter().skip(skipped) {
                let (out, lse) = fa2(&backend, &data.inputs(), &options);
                if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
                    panic!("{shape:?} {options:?}: {found}");
                }
            }
        }
    }
}

#[test]
fn few_queries_in_bf16_equal_the_definition() {
    sweep::<bf16>("few_queries_in_bf16_equal_the_definition", &[128, 64, 256]);
}

#[test]
fn few_queries_in_f16_equal_the_definition() {
    sweep::<f16>("few_queries_in_f16_equal_the_definition", &[112, 40, 128]);
}

#[test]
fn few_queries_in_f32_equal_the_definition() {
    sweep::<f32>(
        "few_queries_in_f32_equal_the_definition",
        &[64, 33, 128, 256],
    );
}

/// K and V of `data` in pages of `size` keys, in an order that `seed` decides; what no key uses is NaN.
pub(super) struct Pages<T> {
    k: Vec<T>,
    v: Vec<T>,
    table: Vec<i32>,
    count: usize,
    size: usize,
    width: usize,
    dims: Dims,
}

impl<T: Element> Pages<T> {
    pub(super) fn new(data: &Data<T>, used: &[i32], size: usize, seed: u64) -> Pages<T> {
        let d = data.dims;
        let width = d.seqlen_k.div_ceil(size).max(1);
        let count = d.batch * width + 3;
        let mut order: Vec<i32> = (0..count as i32).collect();
        let mut noise = Noise(seed);
        for i in (1..count).rev() {
            let j = ((noise.next() + 2.0) / 4.0 * (i + 1) as f64) as usize;
            order.swap(i, j.min(i));
        }
        let mut pages = Pages {
            k: vec![T::from_f64(f64::NAN); count * d.num_kv_heads * size * d.head_dim],
            v: vec![T::from_f64(f64::NAN); count * d.num_kv_heads * size * d.head_dim_v],
            table: vec![-1; d.batch * width],
            count,
            size,
            width,
            dims: d,
        };
        let inputs = data.inputs();
        for b in 0..d.batch {
            for key in 0..used[b] as usize {
                let page = order[b * width + key / size];
                pages.table[b * width + key / size] = page;
                for h in 0..d.num_kv_heads {
                    let at = (page as usize * d.num_kv_heads + h) * size + key % size;
                    for (c, x) in inputs.k.row(b, h, key).enumerate() {
                        pages.k[at * d.head_dim + c] = x;
                    }
                    for (c, x) in inputs.v.row(b, h, key).enumerate() {
                        pages.v[at * d.head_dim_v + c] = x;
                    }
                }
            }
        }
        pages
    }

    pub(super) fn inputs<'a>(&'a self, data: &'a Data<T>, used: &'a [i32]) -> Inputs<'a, T> {
        let d = self.dims;
        let shape = |width| [self.count, d.num_kv_heads, self.size, width];
        Inputs::new(
            data.inputs().q,
            TensorView::bhsd(&self.k, shape(d.head_dim)).unwrap(),
            TensorView::bhsd(&self.v, shape(d.head_dim_v)).unwrap(),
        )
        .paged(
            BlockTable {
                pages: &self.table,
                width: self.width,
            },
            used,
        )
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_few_queries_with_any_options_equal_the_definition(
        (batch, kv, group, sq) in (1usize..=3, 1usize..=2, 1usize..=6, 1usize..=9),
        (sk, size, d) in (0usize..=1500, 1usize..=70, 0usize..4),
        (paged, causal, top_left) in (any::<bool>(), any::<bool>(), any::<bool>()),
        left in proptest::option::weighted(0.3, 0usize..700),
        right in proptest::option::weighted(0.3, 0usize..700),
        softcap in proptest::option::weighted(0.2, 1.0f64..20.0),
        (slopes, sinks, bias, mask) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) {
        let Some(backend) = gpu("any_few_queries_with_any_options_equal_the_definition") else { return Ok(()) };
        let heads = kv * group;
        let mut noise = Noise(seed);
        let per_head = |on: bool, noise: &mut Noise| on.then(|| (0..heads).map(|_| noise.next() as f32 * 0.1).collect::<Vec<f32>>());
        let options = Options::new()
            .causal(causal)
            .alignment(if top_left { Alignment::TopLeft } else { Alignment::BottomRight })
            .window_left(left)
            .window_right(right)
            .softcap(softcap)
            .alibi_slopes(per_head(slopes, &mut noise))
            .sinks(per_head(sinks, &mut noise));
        let data = Data::<bf16>::new(dims(batch, heads, kv, sq, sk, [64, 128, 72, 20][d]), seed);
        let used: Vec<i32> = (0..batch).map(|_| ((noise.next() + 2.0) / 4.0 * (sk + 1) as f64) as i32).collect();
        let pages = Pages::new(&data, &used, size, seed);
        let mut inputs = if paged { pages.inputs(&data, &used) } else { data.inputs().seqused_k(&used) };
        let keys = if paged { pages.width * size } else { sk };
        let biases: Vec<bf16> = noise.tensor(heads * keys);
        let masks: Vec<u8> = (0..batch * sq * keys).map(|_| u8::from(noise.next() > -1.0)).collect();
        if bias {
            inputs = inputs.bias(TensorView::bhsd(&biases, [1, heads, 1, keys]).unwrap());
        }
        if mask {
            inputs = inputs.mask(TensorView::bhsd(&masks, [batch, 1, sq, keys]).unwrap());
        }
        let (out, lse) = fa2(&backend, &inputs, &options);
        if let Err(found) = verdict(&inputs, &options, &out, &lse) {
            prop_assert!(false, "{}", found);
        }
    }
}

/// Law 6 where keys are split: alone, in a batch of 64, packed, and in pages, a row has the same bits.
#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_packed_and_in_pages() {
    let name = "a_row_has_the_same_bits_alone_in_a_batch_packed_and_in_pages";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize, sq: usize, group: usize) {
        let shape = dims(64, 2 * group, 2, sq, 1700, d);
        let data = Data::<T>::new(shape, 40);
        let options = Options::new().causal(true);
        let (all, all_lse) = fa2(backend, &data.inputs(), &options);
        let rows = |view: TensorView<'_, T>, b: usize| -> Vec<T> {
            let [_, heads, s, _] = view.shape();
            let mut rows = Vec::new();
            for (h, i) in (0..heads).flat_map(|h| (0..s).map(move |i| (h, i))) {
                rows.extend(view.row(b, h, i));
            }
            rows
        };
        let whole = data.inputs();
        for b in [0, 31, 63] {
            let alone = Data {
                dims: Dims { batch: 1, ..shape },
                q: rows(whole.q, b),
                k: rows(whole.k, b),
                v: rows(whole.v, b),
            };
            let (out, lse) = fa2(backend, &alone.inputs(), &options);
            assert_eq!(bits(&out), bits(&all[b * out.len()..][..out.len()]));
            assert_eq!(bits(&lse), bits(&all_lse[b * lse.len()..][..lse.len()]));
            let used = [1700];
            let pages = Pages::new(&alone, &used, 48, 7);
            let (paged, paged_lse) = fa2(backend, &pages.inputs(&alone, &used), &options);
            assert_eq!(bits(&paged), bits(&out));
            assert_eq!(bits(&paged_lse), bits(&lse));

            // Second of three packed sequences of other lengths: keys 300..2000, rows sq..2 sq.
            let (heads, kv) = (shape.num_heads, shape.num_kv_heads);
            let mut noise = Noise(3);
            let pad = |heads: usize,
                       before: usize,
                       own: &[T],
                       n: usize,
                       after: usize,
                       noise: &mut Noise| {
                let mut packed = Vec::new();
                for h in 0..heads {
                    packed.extend(noise.tensor::<T>(before * d));
                    packed.extend_from_slice(&own[h * n * d..(h + 1) * n * d]);
                    packed.extend(noise.tensor::<T>(after * d));
                }
                packed
            };
            let q = pad(heads, 1, &alone.q, sq, 2, &mut noise);
            let k = pad(kv, 300, &alone.k, 1700, 40, &mut noise);
            let v = pad(kv, 300, &alone.v, 1700, 40, &mut noise);
            let total = 1 + sq + 2;
            let (cu_q, cu_k) = ([0, 1, 1 + sq as i32, total as i32], [0, 300, 2000, 2040]);
            let inputs = Inputs::new(
                TensorView::bhsd(&q, [1, heads, total, d]).unwrap(),
                TensorView::bhsd(&k, [1, kv, 2040, d]).unwrap(),
                TensorView::bhsd(&v, [1, kv, 2040, d]).unwrap(),
            )
            .packed(&cu_q, &cu_k);
            let (packed, packed_lse) = fa2(backend, &inputs, &options);
            verdict(&inputs, &options, &packed, &packed_lse).unwrap();
            for h in 0..heads {
                assert_eq!(
                    bits(&packed[(h * total + 1) * d..][..sq * d]),
                    bits(&out[h * sq * d..][..sq * d])
                );
                assert_eq!(
                    bits(&packed_lse[h * total + 1..][..sq]),
                    bits(&lse[h * sq..][..sq])
                );
            }
        }
    }
    one::<bf16>(&backend, 128, 1, 4);
    one::<f16>(&backend, 64, 3, 8);
    one::<f32>(&backend, 64, 2, 2);
}

#[test]
fn few_queries_meet_no_nan_that_is_hidden_from_them() {
    let name = "few_queries_meet_no_nan_that_is_hidden_from_them";
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, d: usize) {
        for options in [
            Options::new().causal(true),
            Options::new().window_left(300).window_right(2),
        ] {
            for bad in [f64::NAN, f64::INFINITY] {
                let mut data = Data::<T>::new(dims(1, 2, 1, 4, 1200, d), 3);
                // Hidden from the first rows, or by the window, or not at all.
                data.v[1198 * d + 7] = T::from_f64(bad);
                data.v[100 * d] = T::from_f64(bad);
                data.k[1199 * d + 1] = T::from_f64(f64::NAN);
                data.q[2 * d + 3] = T::from_f64(f64::NAN);
                let (out, lse) = fa2(backend, &data.inputs(), &options);
                if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
                    panic!("{} {d} {bad} {options:?}: {found}", T::DTYPE);
                }
            }
        }
    }
    for d in [64, 128] {
        one::<bf16>(&backend, d);
        one::<f32>(&backend, d);
    }
}

#[test]
fn rows_of_no_sequence_and_sequences_without_keys_are_written() {
    let name = "rows_of_no_sequence_and_sequences_without_keys_are_written";
    let Some(backend) = gpu(name) else { return };
    let data = Data::<f16>::new(dims(1, 4, 2, 7, 900, 64), 8);
    let (cu_q, cu_k) = ([0, 2, 2, 4], [0, 0, 300, 900]);
    let inputs = data.inputs().packed(&cu_q, &cu_k);
    for options in [Options::new(), Options::new().sinks(vec![0.5; 4])] {
        let (out, lse) = fa2(&backend, &inputs, &options);
        verdict(&inputs, &options, &out, &lse).unwrap();
    }
}

#[test]
fn an_entry_of_a_device_table_that_names_no_page_gives_nan() {
    let name = "an_entry_of_a_device_table_that_names_no_page_gives_nan";
    let Some(backend) = gpu(name) else { return };
    let data = Data::<bf16>::new(dims(2, 4, 1, 1, 640, 128), 5);
    let used = [640, 640];
    let pages = Pages::new(&data, &used, 64, 1);
    let inputs = pages.inputs(&data, &used);
    let problem = Problem::new(&inputs, &Options::new()).unwrap();
    let (expected, _) = fa2(&backend, &inputs, &Options::new());
    let stream = backend.context().new_stream().unwrap();
    let (q, k, v) = (
        stream.clone_htod(&data.q).unwrap(),
        stream.clone_htod(&pages.k).unwrap(),
        stream.clone_htod(&pages.v).unwrap(),
    );
    let kv = [pages.count, 1, 64, 128];
    for broken in [None, Some(-5), Some(i32::MAX)] {
        let mut entries = pages.table.clone();
        if let Some(page) = broken {
            entries[pages.width + 2] = page;
        }
        let table = stream.clone_htod(&entries).unwrap();
        let mut out = stream.clone_htod(&vec![bf16::ZERO; data.q.len()]).unwrap();
        {
            let (ptr, _table) = table.device_ptr(&stream);
            decode::forward_paged(
                &backend,
                &stream,
                &problem,
                &DeviceView::bhsd::<bf16, _>(&q, data.dims.out_shape()).unwrap(),
                &DeviceView::bhsd::<bf16, _>(&k, kv).unwrap(),
                &DeviceView::bhsd::<bf16, _>(&v, kv).unwrap(),
                // SAFETY: `table` holds two rows of that width and outlives the stream's work.
                unsafe { DeviceTable::from_raw(ptr, pages.width) },
                &mut DeviceViewMut::bhsd::<bf16, _>(&mut out, data.dims.out_shape()).unwrap(),
                None,
            )
            .unwrap();
        }
        let host = stream.clone_dtoh(&out).unwrap();
        stream.synchronize().unwrap();
        let half = host.len() / 2;
        assert_eq!(bits(&host[..half]), bits(&expected[..half]));
        if broken.is_some() {
            assert!(host[half..].iter().all(|x| x.is_nan()));
        } else {
            assert_eq!(bits(&host[half..]), bits(&expected[half..]));
        }
    }
}

/// Parts follow from the longest sequence: a short one has the same bits beside one that many blocks share.
#[test]
fn a_row_has_the_same_bits_beside_a_sequence_of_many_chunks() {
    let Some(backend) = gpu("a_row_has_the_same_bits_beside_a_sequence_of_many_chunks") else {
        return;
    };
    let data = Data::<bf16>::new(dims(2, 4, 1, 1, 20_000, 64), 31);
    let options = Options::new();
    let inputs = data.inputs().seqused_k(&[3000, 20_000]);
    let (both, both_lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
    let keys = [1, 1, 3000, 64];
    let alone = Inputs::new(
        TensorView::bhsd(&data.q[..4 * 64], [1, 4, 1, 64]).unwrap(),
        TensorView::bhsd(&data.k[..3000 * 64], keys).unwrap(),
        TensorView::bhsd(&data.v[..3000 * 64], keys).unwrap(),
    );
    let (out, lse) = run(&backend, &alone, &options, Algorithm::Fa2).unwrap();
    assert_eq!(bits(&both[..4 * 64]), bits(&out));
    assert_eq!(both_lse[..4], lse[..]);
}
