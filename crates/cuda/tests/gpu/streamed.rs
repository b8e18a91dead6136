//! Keys and values streamed from host memory within a budget of device memory.

use super::*;
use tilewise_cuda::CudaOptions;
use tilewise_cuda::page_lock::PageLocked;

/// A backend whose calls may take `budget` bytes.
fn within(name: &str, budget: u64) -> Option<CudaBackend> {
    gpu(name)?;
    Some(
        CudaBackend::with(CudaOptions {
            device_memory: Some(budget),
            ..CudaOptions::default()
        })
        .unwrap(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn streamed_keys_give_the_attention_of_resident_ones(
        (batch, kv, group) in (1usize..=2, 1usize..=3, 1usize..=3),
        (sq, sk) in (1usize..=150, 1500usize..=4000),
        causal in any::<bool>(),
        left in proptest::option::weighted(0.3, 0usize..2000),
        softcap in proptest::option::weighted(0.3, 2.0f64..9.0),
        (packed, uneven) in (any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) {
        // Rows of 150 × 3 heads and a chunk or two of one head.
        let Some(backend) = within("streamed_keys_give_the_attention_of_resident_ones", 900 << 10) else { return Ok(()) };
        let options = Options::new().causal(causal).window_left(left).softcap(softcap);
        let batch = if packed { 1 } else { batch };
        let data = Data::<bf16>::new(dims(batch, kv * group, kv, sq, sk, 128), seed);
        let used: Vec<i32> = (0..batch).map(|b| (sk - 700 * b) as i32).collect();
        let (cu_q, cu_k) = ([0, (sq / 3) as i32, sq as i32], [0, 500, sk as i32]);
        let inputs = match (packed, uneven) {
            (true, _) => data.inputs().packed(&cu_q, &cu_k),
            (false, true) => data.inputs().seqused_k(&used),
            (false, false) => data.inputs(),
        };
        let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
        if let Err(found) = verdict(&inputs, &options, &out, &lse) {
            prop_assert!(false, "{}", found);
        }
    }
}

#[test]
fn streamed_pages_and_strides_are_gathered() {
    let name = "streamed_pages_and_strides_are_gathered";
    let Some(backend) = within(name, 700 << 10) else {
        return;
    };
    let data = Data::<f32>::new(dims(2, 4, 2, 30, 3000, 64), 4);
    let used = [3000, 1234];
    let pages = decode::Pages::new(&data, &used, 80, 5);
    let inputs = pages.inputs(&data, &used);
    let options = Options::new().causal(true);
    let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
    verdict(&inputs, &options, &out, &lse).unwrap();

    // [batch, seqlen, heads, head_dim] in memory, and every second element.
    let k = TensorView::bshd(&data.k, data.wide()).unwrap();
    let v = TensorView::from_strides(
        &data.v,
        [2, 2, 3000, 32],
        [2 * 3000 * 64, 3000 * 64, 64, 2],
        1,
    )
    .unwrap();
    let q = TensorView::bhsd(&data.q, [2, 4, 30, 64]).unwrap();
    for inputs in [
        Inputs::new(q, k, k),
        Inputs::new(
            TensorView::from_strides(&data.q, [2, 4, 30, 32], [4 * 30 * 64, 30 * 64, 64, 2], 0)
                .unwrap(),
            v,
            v,
        ),
    ] {
        let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
        verdict(&inputs, &options, &out, &lse).unwrap();
    }
}

/// Read in place or gathered piece by piece: the same bits.
#[test]
fn page_locked_keys_are_read_in_place() {
    let name = "page_locked_keys_are_read_in_place";
    let Some(backend) = within(name, 24 << 20) else {
        return;
    };
    // 8 MiB of K a head: two chunks, the first of two pieces.
    let data = Data::<bf16>::new(dims(1, 4, 2, 20, 33_333, 128), 8);
    let options = Options::new().causal(true);
    let (out, lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
    verdict(&data.inputs(), &options, &out, &lse).unwrap();
    let locked = [&data.k, &data.v].map(|x| PageLocked::new(&backend, x).unwrap());
    assert!(locked[0].as_ptr() == data.k.as_ptr() && locked[1].len() == data.v.len());
    let (in_place, in_place_lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
    assert_eq!(bits(&in_place), bits(&out));
    assert_eq!(bits(&in_place_lse), bits(&lse));
    // One of the two alone is gathered with the other.
    let [_, v] = locked;
    drop(v);
    let (half, half_lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
    assert_eq!(bits(&half), bits(&out));
    assert_eq!(bits(&half_lse), bits(&lse));
}

/// Law 6: chunks follow from one head's shape and the budget.
#[test]
fn a_streamed_row_does_not_depend_on_its_batch() {
    let name = "a_streamed_row_does_not_depend_on_its_batch";
    let Some(backend) = within(name, 1 << 20) else {
        return;
    };
    let shape = dims(4, 6, 3, 50, 5000, 64);
    let data = Data::<f16>::new(shape, 6);
    let options = Options::new().causal(true);
    let (all, all_lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
    let (q, kv) = (6 * 50 * 64, 3 * 5000 * 64);
    for b in [0, 3] {
        // One head of K and V and its two query heads.
        let alone = Data {
            dims: Dims {
                batch: 1,
                num_heads: 2,
                num_kv_heads: 1,
                ..shape
            },
            q: data.q[b * q + q / 3..b * q + 2 * q / 3].to_vec(),
            k: data.k[b * kv + kv / 3..b * kv + 2 * kv / 3].to_vec(),
            v: data.v[b * kv + kv / 3..b * kv + 2 * kv / 3].to_vec(),
        };
        let (out, lse) = run(&backend, &alone.inputs(), &options, Algorithm::Fa2).unwrap();
        assert_eq!(bits(&out), bits(&all[b * q + q / 3..b * q + 2 * q / 3]));
        assert_eq!(bits(&lse), bits(&all_lse[b * 300 + 100..b * 300 + 200]));
    }
}

#[test]
fn a_budget_too_small_for_one_chunk_is_an_error() {
    let name = "a_budget_too_small_for_one_chunk_is_an_error";
    let Some(backend) = within(name, 100 << 10) else {
        return;
    };
    let data = Data::<bf16>::new(dims(1, 1, 1, 20, 2000, 128), 7);
    match run(&backend, &data.inputs(), &Options::new(), Algorithm::Fa2) {
        Err(Error::OutOfMemory { what, bytes, .. }) => {
            assert!(
                what.contains("budget of 102400 bytes") && bytes > 102_400,
                "{what} {bytes}"
            );
        }
        other => panic!("{other:?}"),
    }
    let error = run(
        &backend,
        &data.inputs(),
        &Options::new(),
        Algorithm::Standard,
    )
    .unwrap_err();
    assert!(error.to_string().contains("device memory"), "{error}");
    // What fits is computed as ever.
    let small = Data::<bf16>::new(dims(1, 1, 1, 20, 100, 128), 7);
    let (out, lse) = run(
        &backend,
        &small.inputs(),
        &Options::new(),
        Algorithm::Standard,
    )
    .unwrap();
    verdict(&small.inputs(), &Options::new(), &out, &lse).unwrap();
}
