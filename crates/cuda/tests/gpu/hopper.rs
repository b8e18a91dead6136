//! `hopper.cu` and, on the same device, `fa2.cu`: both equal the definition, and no bit of a row depends
//! on how rows are cut. Elsewhere the same tests run the portable kernels alone.

use tilewise_core::Dropout;
use tilewise_testkit::{Case, Judged, Sequences, Setting};

use super::*;

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
        isa(backend, &Data::new(dims(1, 1, 1, 70, 70, d), 1), algorithm)
    };
    let plain = format!("sm_{}", backend.compute());
    let own = if backend.compute() == 90 {
        "sm_90a"
    } else {
        &plain
    };
    assert_eq!(isa(&backend, Algorithm::Fa2, 128), own);
    assert_eq!(isa(&backend, Algorithm::Fa2, 80), own);
    assert_eq!(isa(&backend, Algorithm::Fa2, 300), plain);
    assert_eq!(isa(&backend, Algorithm::Fa1, 128), plain);
    let portable = portable("a_report_names_the_instructions").unwrap();
    assert_eq!(isa(&portable, Algorithm::Fa2, 128), plain);
}

/// Blocks of fewer rows serve shorter sequences: the rows they share have the same bits.
#[test]
fn a_row_does_not_depend_on_how_many_follow() {
    let name = "a_row_does_not_depend_on_how_many_follow";
    let Some(backend) = gpu(name) else { return };
    // Of 128 so many that the device gives row blocks out.
    for (d, most) in [(64, 1300), (128, 4300)] {
        let data = Data::<f16>::new(dims(1, 2, 1, most, 400, d), 5);
        let options = Options::new().causal(true).alignment(Alignment::TopLeft);
        let whole = data.inputs();
        let (all, all_lse) = run(&backend, &whole, &options, Algorithm::Fa2).unwrap();
        for rows in [65, 200, 1024] {
            let first = Inputs::new(whole.q.narrow(2, 0..rows), whole.k, whole.v);
            let (out, lse) = run(&backend, &first, &options, Algorithm::Fa2).unwrap();
            for h in 0..2 {
                let (long, short) = (&all[h * most * d..], &out[h * rows * d..]);
                assert_eq!(
                    bits(&long[..rows * d]),
                    bits(&short[..rows * d]),
                    "{d} {rows}"
                );
                let (long, short) = (&all_lse[h * most..], &lse[h * rows..]);
                assert_eq!(bits(&long[..rows]), bits(&short[..rows]), "{d} {rows}");
            }
        }
    }
}

/// Portable row blocks of half the rows where there are few, others in an order of their own where all run
/// at once: neither shows in a row's bits. Scores that are far apart move the maximum from tile to tile.
#[test]
fn a_row_does_not_depend_on_how_many_row_blocks_there_are() {
    let name = "a_row_does_not_depend_on_how_many_row_blocks_there_are";
    let Some(backend) = portable(name) else {
        return;
    };
    for d in [64, 96, 128] {
        let data = Data::<bf16>::new(dims(40, 4, 2, 130, 300, d), 5);
        let whole = data.inputs();
        let far = Options::new().causal(true).softmax_scale(1.5);
        for options in masks().into_iter().chain([far]) {
            let (all, all_lse) = run(&backend, &whole, &options, Algorithm::Fa2).unwrap();
            for batch in [1, 25] {
                let part = 0..batch;
                let first = Inputs::new(
                    whole.q.narrow(0, part.clone()),
                    whole.k.narrow(0, part.clone()),
                    whole.v.narrow(0, part),
                );
                let (out, lse) = run(&backend, &first, &options, Algorithm::Fa2).unwrap();
                if batch == 1
                    && let Err(found) = verdict(&first, &options, &out, &lse)
                {
                    panic!("{d} {options:?}: {found}");
                }
                assert_eq!(
                    bits(&out),
                    bits(&all[..out.len()]),
                    "{d} {options:?} {batch}"
                );
                assert_eq!(
                    bits(&lse),
                    bits(&all_lse[..lse.len()]),
                    "{d} {options:?} {batch}"
                );
            }
        }
    }
}

/// What changes a score, alone and together: tiles of bias and mask that lie on 16 bytes and that do not,
/// written out and broadcast, of sequences that are packed and that are not.
fn options_over_tiles(name: &str, d: usize, sk: usize) {
    let Some(backend) = gpu(name) else { return };
    fn one<T: Element>(backend: &CudaBackend, case: &Case) {
        let setting = Setting::<T>::new(case, |problem, inputs| {
            super::options::forward(backend, problem, inputs, Algorithm::Fa2).unwrap()
        });
        let who = format!("{} {case:?}", T::DTYPE);
        let judged = Judged::new(&setting.problem(), &setting.inputs());
        let agrees = judged.agrees(&who, &setting.out, &setting.lse);
        agrees.unwrap_or_else(|e| panic!("{e}"));
    }
    let packed = Sequences::Packed(vec![(150, 300), (70, 64), (0, 9), (130, 201)], true);
    let dropped = Options::new().causal(true).dropout(Dropout::Philox {
        p: 0.3,
        seed: 17,
        offset: 5,
    });
    let plain = |sk| Case::dense(d as u64, dims(2, 4, 2, 150, sk, d));
    let everything = |sequences| Case {
        sequences,
        options: Options::new().causal(true).window_left(140).softcap(9.0),
        alibi: true,
        sinks: true,
        bias: Some([false; 4]),
        mask: Some([true, false, false, false]),
        ..plain(sk)
    };
    let cases = [
        Case {
            options: Options::new().softcap(2.0),
            ..plain(sk)
        },
        Case {
            alibi: true,
            options: Options::new().causal(true),
            ..plain(sk)
        },
        Case {
            bias: Some([true, false, false, false]),
            ..plain(sk)
        },
        Case {
            bias: Some([false, true, true, false]),
            ..plain(sk + 3)
        },
        Case {
            mask: Some([false; 4]),
            options: Options::new().causal(true),
            ..plain(sk)
        },
        Case {
            mask: Some([false, false, false, true]),
            bias: Some([false, true, false, false]),
            ..plain(sk - 5)
        },
        Case {
            options: dropped.clone(),
            ..plain(sk)
        },
        everything(Sequences::Dense),
        everything(packed.clone()),
    ];
    // All of them at one head_dim; each is a kernel to compile.
    let some = if d == 64 { &cases[..] } else { &cases[4..] };
    for case in some {
        one::<bf16>(&backend, case);
    }
    if d == 64 {
        one::<f16>(&backend, &everything(packed.clone()));
    }
}

#[test]
fn options_over_tiles_of_keys_equal_the_definition() {
    let name = "options_over_tiles_of_keys_equal_the_definition";
    options_over_tiles(name, 64, 384);
}

#[test]
fn options_at_head_dim_128_equal_the_definition() {
    options_over_tiles("options_at_head_dim_128_equal_the_definition", 128, 384);
}

#[test]
fn options_at_head_dim_200_equal_the_definition() {
    options_over_tiles("options_at_head_dim_200_equal_the_definition", 200, 320);
}

/// Blocks that ask for row block after row block take each once, call after call, whoever is first.
#[test]
fn row_blocks_beyond_one_each_are_all_done() {
    let Some(backend) = gpu("row_blocks_beyond_one_each_are_all_done") else {
        return;
    };
    let data = Data::<bf16>::new(dims(1, 48, 8, 500, 500, 64), 12);
    for options in [
        Options::new().causal(true),
        Options::new().window_left(90).window_right(40),
    ] {
        let (out, lse) = run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
        verdict(&data.inputs(), &options, &out, &lse).unwrap();
        for _ in 0..4 {
            let (again, lse_again) =
                run(&backend, &data.inputs(), &options, Algorithm::Fa2).unwrap();
            assert_eq!(bits(&out), bits(&again), "{options:?}");
            assert_eq!(bits(&lse), bits(&lse_again), "{options:?}");
        }
    }
}

/// Tiles that a mask, a bias or a bound hides in part hold NaN and infinity: rows that do not see them stay
/// as they are, at every warpgroup's place.
#[test]
fn hidden_values_of_many_tiles_do_not_leak() {
    let name = "hidden_values_of_many_tiles_do_not_leak";
    let Some(backend) = gpu(name) else { return };
    let (rows, keys) = (260, 520);
    for d in [64, 128, 192] {
        let mut data = Data::<bf16>::new(dims(1, 2, 1, rows, keys, d), 4);
        let bad = |key: usize| key % 97 == 5;
        for key in (0..keys).filter(|&key| bad(key)) {
            data.v[key * d + key % d] = bf16::NAN;
            data.v[key * d + 1] = bf16::INFINITY;
        }
        // Every third row sees them.
        let seen = |at: usize| (at / keys).is_multiple_of(3) || !bad(at % keys);
        let mask: Vec<u8> = (0..rows * keys).map(|at| u8::from(seen(at))).collect();
        let hide = |at| if seen(at) { 0.5 } else { f64::NEG_INFINITY };
        let bias: Vec<bf16> = (0..rows * keys)
            .map(|at| bf16::from_f64(hide(at)))
            .collect();
        let mask = TensorView::bhsd(&mask, [1, 1, rows, keys]).unwrap();
        let bias = TensorView::bhsd(&bias, [1, 1, rows, keys]).unwrap();
        for inputs in [data.inputs().mask(mask), data.inputs().bias(bias)] {
            for options in [Options::new(), Options::new().causal(true)] {
                let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
                if let Err(found) = verdict(&inputs, &options, &out, &lse) {
                    panic!("{d} {options:?}: {found}");
                }
                let clean = |row: usize| out[row * d..][..d].iter().all(|x| x.is_finite());
                assert!((0..2 * rows).all(|row| (row % rows).is_multiple_of(3) || clean(row)));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Any head_dim, padded ones and those of values apart among them, any bounds, softcaps, sinks, and rows laid out
    /// by heads, by rows or backwards.
    #[test]
    fn any_problem_of_tiles_by_the_copy_engine_equals_the_definition(
        (batch, kv, group) in (1usize..=2, 1usize..=2, 1usize..=3),
        (sq, sk) in (65usize..=300, 0usize..=420),
        (d, dv) in prop_oneof![
            4 => prop_oneof![Just(64usize), Just(128), Just(56), Just(80), Just(232)].prop_map(|d| (d, d)),
            1 => prop_oneof![Just((192usize, 128usize)), Just((40, 150))],
        ],
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
        let shape = Dims {
            head_dim_v: dv,
            ..dims(batch, kv * group, kv, sq, sk, d)
        };
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
            lay(&data.q, [batch, kv * group, sq, d]),
            lay(&data.k, wide),
            lay(&data.v, [batch, kv, sk, dv]),
        );
        let (out, lse) = run(&backend, &inputs, &options, Algorithm::Fa2).unwrap();
        if let Err(found) = verdict(&inputs, &options, &out, &lse) {
            prop_assert!(false, "{}", found);
        }
    }
}
