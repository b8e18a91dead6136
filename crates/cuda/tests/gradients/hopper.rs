//! `backward/hopper.cu` and, on the same device, `backward/fa2.cu`. Elsewhere the same tests run the
//! portable kernels alone.

use tilewise_cuda::ceilings::{Instruction, Products};

use super::*;

/// What the two families have of their own.
const BOTH: &[(Algorithm, Sums)] = &[
    (Algorithm::Fa2, Sums::Atomic),
    (Algorithm::Fa2, Sums::Ordered),
];

#[test]
fn the_portable_kernels_equal_the_definition_too() {
    let Some(backend) = portable("the_portable_kernels_equal_the_definition_too") else {
        return;
    };
    for d in [64, 128, 256] {
        for options in masks() {
            let shape = sizes([1, 4, 2], [137, 180], d);
            Setting::<bf16>::new(shape, options, Parts::default(), d as u64)
                .check(&backend, BOTH)
                .unwrap();
        }
    }
}

/// Tiles of 64 rows, of 128 or of 64 keys: lengths at their edges and far from them.
#[test]
fn tiles_end_anywhere() {
    let Some(backend) = gpu("tiles_end_anywhere") else {
        return;
    };
    for d in [64, 128, 256] {
        for lengths in [
            [1, 1],
            [63, 129],
            [65, 127],
            [128, 128],
            [513, 64],
            [40, 700],
        ] {
            for options in masks() {
                let shape = sizes([1, 2, 1], lengths, d);
                Setting::<bf16>::new(shape, options, Parts::default(), 1)
                    .check(&backend, BOTH)
                    .unwrap();
            }
        }
    }
}

/// Panels of 64 columns that are not full, and sides of different widths.
#[test]
fn head_dims_need_not_fill_the_panels() {
    let Some(backend) = gpu("head_dims_need_not_fill_the_panels") else {
        return;
    };
    for pair in [
        [8, 8],
        [48, 48],
        [72, 72],
        [96, 96],
        [64, 128],
        [128, 64],
        [192, 128],
        [160, 160],
        [24, 200],
        // Rows that are no whole chunks.
        [60, 60],
        [100, 35],
    ] {
        let [d, dv] = pair;
        let shape = Sizes {
            dv,
            ..sizes([2, 4, 2], [150, 131], d)
        };
        for causal in [false, true] {
            let options = Options::new().causal(causal);
            Setting::<f16>::new(shape, options, Parts::default(), 3)
                .check(&backend, BOTH)
                .unwrap();
        }
    }
}

/// The copy engine knows no row stride of 0 and none that goes back.
#[test]
fn strides_that_the_copy_engine_does_not_know() {
    let Some(backend) = gpu("strides_that_the_copy_engine_does_not_know") else {
        return;
    };
    let setting = Setting::<bf16>::new(
        sizes([2, 4, 2], [70, 150], 64),
        Options::new().causal(true),
        Parts::default(),
        2,
    );
    let (wide, narrow) = ([2, 4, 70, 64], [2, 2, 150, 64]);
    // Keys from last to first, one row of values for all, queries of the second head for every head.
    let k = TensorView::from_strides(
        &setting.k,
        narrow,
        [2 * 150 * 64, 150 * 64, -64, 1],
        149 * 64,
    );
    let v = TensorView::from_strides(&setting.v, narrow, [2 * 150 * 64, 150 * 64, 0, 1], 64);
    let q = TensorView::from_strides(&setting.q, wide, [4 * 70 * 64, 0, 64, 1], 70 * 64);
    let inputs = Inputs::new(q.unwrap(), k.unwrap(), v.unwrap());
    let dout = TensorView::bhsd(&setting.dout, wide).unwrap();
    pass_as_they_lie(&backend, &setting.options, inputs, dout, BOTH);
}

/// NaN and infinity where a bound hides them, in every tile and panel.
#[test]
fn hidden_values_stay_out_of_the_products_of_warpgroups() {
    let Some(backend) = gpu("hidden_values_stay_out_of_the_products_of_warpgroups") else {
        return;
    };
    for d in [64, 128, 256] {
        // Seeds that bring neither a bias nor a mask.
        for (seed, options) in [1, 2, 5, 7, 11].into_iter().zip(masks()) {
            poisoned_in_places::<bf16>(&backend, d, options, seed, BOTH);
        }
    }
}

/// The kernel is chosen by what is asked for alone, not by how it lies or how much there is of it.
#[test]
fn the_kernel_follows_from_the_problem() {
    let Some(backend) = gpu("the_kernel_follows_from_the_problem") else {
        return;
    };
    let report = |backend: &CudaBackend, shape, options: &Options| {
        let setting = Setting::<bf16>::new(shape, options.clone(), Parts::default(), 2);
        let inputs = setting.backward();
        let problem = inputs.problem(options).unwrap();
        let mut gradients = Gradients::filled(&problem, &inputs.inputs, f64::NAN).unwrap();
        let views = gradients.views_mut().unwrap();
        let inputs = bf16::erase_backward(inputs);
        let views = bf16::erase_gradients(views);
        let done = backend.backward(&problem, &inputs, Algorithm::Fa2, views);
        done.unwrap().isa
    };
    let every = format!("sm_{}", backend.compute());
    let own = match backend.compute() {
        90 => "sm_90a",
        _ => &every,
    };
    let plain = Options::new();
    for d in [64, 60, 128, 200] {
        for b in [1, 2] {
            for sums in [Sums::Ordered, Sums::Atomic] {
                let shape = sizes([b, 1, 1], [70, 70], d);
                // A bench divides by the rate of the instruction of what it times, whatever sums the
                // backend itself is set to.
                let problem = Setting::<bf16>::new(shape, plain.clone(), Parts::default(), 2);
                let problem = problem.backward().problem(&plain).unwrap();
                let by = Products::of(&backend, &problem, Algorithm::Fa2, Some(sums)).instruction;
                assert_eq!(by == Instruction::Wgmma, own.ends_with('a'), "{sums:?}");
                assert_eq!(report(&backend.clone().sums(sums), shape, &plain), own);
            }
        }
    }
    let shape = sizes([1, 1, 1], [70, 70], 64);
    let softcap = Options::new().softcap(5.0);
    assert_eq!(report(&backend, shape, &softcap), every);
    let portable = portable("the_kernel_follows_from_the_problem").unwrap();
    assert_eq!(report(&portable, shape, &plain), every);
}

/// Blocks of keys add to dQ by turns, many at a time, with and without some that are left to the kernel which
/// takes care with NaN: neither runs nor the rest of a batch change a bit.
#[test]
fn turns_keep_their_order() {
    let Some(backend) = gpu("turns_keep_their_order") else {
        return;
    };
    let (h, kv, sq, sk) = (4, 2, 500, 1100);
    for (d, options) in [64, 128, 256, 128, 256].into_iter().zip(masks()) {
        let shape = sizes([2, h, kv], [sq, sk], d);
        let mut setting = Setting::<bf16>::new(shape, options.clone(), Parts::default(), 2);
        for odd in [false, true] {
            if odd {
                for key in [70, 600, 900, sk - 1] {
                    setting.k[((kv + 1) * sk + key) * d] = bf16::NAN;
                }
                setting.forward();
            }
            let first = setting.run(&backend, Algorithm::Fa2).unwrap();
            for _ in 0..20 {
                let again = setting.run(&backend, Algorithm::Fa2).unwrap();
                assert_eq!(all_bits(&again), all_bits(&first), "{d} {options:?}");
            }
            let given = setting.backward();

            let alone = BackwardInputs::new(
                Inputs::new(
                    given.inputs.q.narrow(0, 1..2),
                    given.inputs.k.narrow(0, 1..2),
                    given.inputs.v.narrow(0, 1..2),
                ),
                given.out.narrow(0, 1..2),
                given.lse.narrow(0, 1..2),
                given.dout.narrow(0, 1..2),
            );
            let alone = run(&backend, &options, &alone, Algorithm::Fa2).unwrap();
            assert_eq!(bits(&alone.dq), bits(&first.dq[h * sq * d..]));
            assert_eq!(bits(&alone.dk), bits(&first.dk[kv * sk * d..]));
        }
    }
}
