//! `hopper.cu` and, on the same device, `fa2.cu`: both equal the definition, and no bit of a row depends
//! on how rows are cut. Elsewhere the same tests run the portable kernels alone.

use tilewise_cuda::CudaOptions;

use super::*;

/// The first GPU with kernels that every chip can run.
pub(super) fn portable(test: &str) -> Option<CudaBackend> {
    gpu(test)?;
    let options = CudaOptions {
        portable: Some(true),
        ..CudaOptions::default()
    };
    Some(CudaBackend::with(options).unwrap())
}

#[test]
fn the_portable_kernels_equal_the_definition_too() {
    let name = "the_portable_kernels_equal_the_definition_too";
    let Some(backend) = portable(name) else {
        return;
    };
    for d in [64, 128, 256] {
        let data = Data::<bf16>::new(dims(1, 2, 1, 200, 333, d), d as u64);
        for options in masks() {
            let (out, lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
            if let Err(found) = verdict(&data.inputs(), &options, &out, &lse) {
                panic!("{d} {options:?}: {found}");
            }
        }
    }
}

#[test]
fn a_report_names_the_instructions() {
    let Some(backend) = gpu("a_report_names_the_instructions") else {
        return;
    };
    let isa = |backend: &CudaBackend, algorithm, d| {
        let data = Data::<bf16>::new(dims(1, 1, 1, 70, 70, d), 1);
        let inputs = data.inputs();
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        let mut out = vec![bf16::ZERO; data.q.len()];
        let out = TensorViewMut::bhsd(&mut out, data.dims.out_shape()).unwrap();
        let report = backend.forward(
            &problem,
            &bf16::erase_inputs(inputs),
            algorithm,
            bf16::erase_mut(out),
            None,
        );
        report.unwrap().isa
    };
    let plain = format!("sm_{}", backend.compute());
    let own = if backend.compute() == 90 {
        "sm_90a"
    } else {
        &plain
    };
    assert_eq!(isa(&backend, Algorithm::Fa2, 128), own);
    assert_eq!(isa(&backend, Algorithm::Fa2, 80), plain);
    assert_eq!(isa(&backend, Algorithm::Fa1, 128), plain);
    let portable = portable("a_report_names_the_instructions").unwrap();
    assert_eq!(isa(&portable, Algorithm::Fa2, 128), plain);
}

/// Blocks of fewer rows serve shorter sequences: the rows they share have the same bits.
#[test]
fn a_row_does_not_depend_on_how_many_follow() {
    let name = "a_row_does_not_depend_on_how_many_follow";
    let Some(backend) = gpu(name) else { return };
    for d in [64, 128] {
        let data = Data::<f16>::new(dims(1, 2, 1, 1300, 400, d), 5);
        let options = Options::new().causal(true).alignment(Alignment::TopLeft);
        let whole = data.inputs();
        let (all, all_lse) = run(&backend, &whole, &options, Algorithm::Fa2).unwrap();
        for rows in [65, 200, 1024] {
            let first = Inputs::new(whole.q.narrow(2, 0..rows), whole.k, whole.v);
            let (out, lse) = run(&backend, &first, &options, Algorithm::Fa2).unwrap();
            for h in 0..2 {
                let (long, short) = (&all[h * 1300 * d..], &out[h * rows * d..]);
                assert_eq!(
                    bits(&long[..rows * d]),
                    bits(&short[..rows * d]),
                    "{d} {rows}"
                );
                let (long, short) = (&all_lse[h * 1300..], &lse[h * rows..]);
                assert_eq!(bits(&long[..rows]), bits(&short[..rows]), "{d} {rows}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Any head_dim that is served, padded ones among them, any bounds, softcaps, sinks, and rows laid out
    /// by heads, by rows or backwards.
    #[test]
    fn any_problem_of_tiles_by_the_copy_engine_equals_the_definition(
        (batch, kv, group) in (1usize..=2, 1usize..=2, 1usize..=3),
        (sq, sk) in (65usize..=300, 0usize..=420),
        d in prop_oneof![Just(64usize), Just(128), Just(256), Just(56), Just(120), Just(232)],
        causal in any::<bool>(),
        top_left in any::<bool>(),
        left in proptest::option::weighted(0.3, 0usize..200),
        right in proptest::option::weighted(0.3, 0usize..200),
        softcap in proptest::option::weighted(0.2, 1.0f64..8.0),
        sinks in any::<bool>(),
        layout in 0usize..3,
        seed in any::<u64>(),
    ) {
        let name = "any_problem_of_tiles_by_the_copy_engine_equals_the_definition";
        let Some(backend) = gpu(name) else { return Ok(()) };
        let shape = dims(batch, kv * group, kv, sq, sk, d);
        let mut options = Options::new()
            .causal(causal)
            .alignment(if top_left { Alignment::TopLeft } else { Alignment::BottomRight })
            .window_left(left)
            .window_right(right);
        if let Some(cap) = softcap {
            options = options.softcap(cap);
        }
        if sinks {
            options = options.sinks(vec![0.25; kv * group]);
        }
        let data = Data::<f16>::new(shape, seed);
        let lay = |values, [b, h, s, d]: [usize; 4]| match layout {
            0 => TensorView::bhsd(values, [b, h, s, d]).unwrap(),
            1 => TensorView::bshd(values, [b, h, s, d]).unwrap(),
            _ if s == 0 => TensorView::bhsd(values, [b, h, s, d]).unwrap(),
            _ => {
                let row = d as isize;
                let strides = [(h * s * d) as isize, (s * d) as isize, -row, 1];
                TensorView::from_strides(values, [b, h, s, d], strides, (s - 1) * d).unwrap()
            }
        };
        let wide = data.wide();
        let inputs = Inputs::new(
            lay(&data.q, shape.out_shape()),
            lay(&data.k, wide),
            lay(&data.v, wide),
        );
        let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
        if let Err(found) = verdict(&inputs, &options, &out, &lse) {
            prop_assert!(false, "{}", found);
        }
    }
}
