//! bf16 where products take pairs: AMX, `vdpbf16ps`, and the emulation of AMX that runs anywhere.

mod common;

use proptest::prelude::*;
use tilewise_core::half::bf16;
use tilewise_core::{Algorithm, DType, Inputs, Judge, Options, Problem, RowSample, TensorView};
use tilewise_cpu::{CpuBackend, Isa};
use tilewise_testkit::{Case, Sizes, case, cases};

/// Problems with more rows than the schedule for few of them takes.
fn many_rows() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: prop_oneof![3 => 65usize..86, 1 => 190usize..230].boxed(),
        ..Sizes::of_tiles()
    };
    case(&sizes)
}

/// Problems that the schedule for few rows takes.
fn few_rows() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: (1usize..17).boxed(),
        ..Sizes::of_tiles()
    };
    case(&sizes)
}

/// As few keys and columns as there can be: nothing to average errors over.
fn few_keys() -> impl Strategy<Value = Case> {
    let sizes = Sizes {
        seqlen_q: (12usize..40).boxed(),
        seqlen_k: (1usize..6).boxed(),
        head_dim: (1usize..5).boxed(),
        ..Sizes::of_tiles()
    };
    case(&sizes)
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn products_of_pairs_equal_the_definition(case in many_rows()) {
        common::check_any(&Case { dtype: DType::BF16, ..case })?;
    }

    #[test]
    fn products_of_pairs_of_few_rows_equal_the_definition(case in few_rows()) {
        common::check_any(&Case { dtype: DType::BF16, ..case })?;
    }

    #[test]
    fn rounded_weights_of_few_keys_stay_within_the_tolerance(case in few_keys()) {
        common::check_any(&Case { dtype: DType::BF16, group: 3, ..case })?;
    }
}

/// More rows than the schedule for few of them takes.
const SHAPE: [usize; 4] = [1, 2, 136, 40];

/// Tensors of [`SHAPE`] as they go into a call.
struct Tensors {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Tensors {
    fn new() -> Self {
        let numbers = |seed: u64| {
            // Sums of a few uniform numbers: near enough to normal.
            let mut state = seed;
            let mut uniform = move || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(seed | 1);
                (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
            };
            (0..SHAPE.iter().product())
                .map(|_| bf16::from_f32((0..4).map(|_| uniform()).sum::<f32>() * 1.7))
                .collect::<Vec<_>>()
        };
        Tensors {
            q: numbers(1),
            k: numbers(2),
            v: numbers(3),
        }
    }

    fn inputs(&self) -> Inputs<'_, bf16> {
        let [q, k, v] =
            [&self.q, &self.k, &self.v].map(|data| TensorView::bhsd(data, SHAPE).unwrap());
        Inputs::new(q, k, v)
    }

    fn run(&self, backend: &CpuBackend, options: &Options) -> (Vec<bf16>, Vec<f32>) {
        let inputs = self.inputs();
        let problem = Problem::new(&inputs, options).unwrap();
        common::run(backend, &problem, &inputs, Algorithm::Fa2)
    }

    fn judge(&self, options: &Options) -> Judge {
        let inputs = self.inputs();
        let problem = Problem::new(&inputs, options).unwrap();
        Judge::new(&problem, &inputs, &RowSample::all(&problem))
    }
}

/// First element of a head's row.
fn at(head: usize, row: usize) -> usize {
    (head * SHAPE[2] + row) * SHAPE[3]
}

fn bits(row: &[bf16]) -> Vec<u16> {
    row.iter().map(|x| x.to_bits()).collect()
}

/// Numbers that the instructions take for others, or that would spoil what does not see them.
const ODD: [f32; 8] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    3e38,
    -1e18,
    1e-39,
    -3e-35,
    9.2e-41,
];

#[test]
fn odd_queries_are_as_defined_and_change_no_other_row() {
    for backend in common::backends() {
        let mut tensors = Tensors::new();
        let options = Options::new().causal(true);
        let clean = tensors.run(&backend, &options);
        for (n, &odd) in ODD.iter().enumerate() {
            tensors.q[at(0, 5 * n + 3) + n] = bf16::from_f32(odd);
        }
        let (out, lse) = tensors.run(&backend, &options);
        agree(&backend, &tensors, &options, &out, &lse);
        for (row, lse) in lse.iter().enumerate() {
            if row < 5 * ODD.len() && row % 5 == 3 {
                continue;
            }
            let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
            assert_eq!(
                bits(&out[part.clone()]),
                bits(&clean.0[part]),
                "{} {row}",
                backend.isa()
            );
            assert_eq!(*lse, clean.1[row]);
        }
    }
}

#[test]
fn odd_keys_and_values_are_as_defined_and_change_no_row_that_does_not_see_them() {
    for backend in common::backends() {
        for &odd in &ODD {
            for (in_k, in_v) in [(true, false), (false, true), (true, true)] {
                let mut tensors = Tensors::new();
                let options = Options::new().causal(true);
                let clean = tensors.run(&backend, &options);
                let key = 41;
                for head in 0..2 {
                    if in_k {
                        tensors.k[at(head, key) + 7] = bf16::from_f32(odd);
                    }
                    if in_v {
                        tensors.v[at(head, key) + 9] = bf16::from_f32(odd);
                    }
                }
                let (out, lse) = tensors.run(&backend, &options);
                agree(&backend, &tensors, &options, &out, &lse);
                for row in (0..2 * SHAPE[2]).filter(|row| row % SHAPE[2] < key) {
                    let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
                    assert_eq!(bits(&out[part.clone()]), bits(&clean.0[part]));
                    assert_eq!(lse[row], clean.1[row]);
                }
            }
        }
    }
}

#[test]
fn values_that_are_all_tiny_or_huge_are_as_defined() {
    for backend in common::backends() {
        for scale in [1e-36f32, 1e-39, 1e30, 2e37] {
            let mut tensors = Tensors::new();
            for x in &mut tensors.v {
                *x = bf16::from_f32(x.to_f32() * scale);
            }
            let (out, lse) = tensors.run(&backend, &Options::new());
            agree(&backend, &tensors, &Options::new(), &out, &lse);
        }
    }
}

#[test]
fn bits_depend_neither_on_threads_nor_on_the_rows_that_are_there() {
    for backend in common::backends() {
        let tensors = Tensors::new();
        let (out, lse) = tensors.run(&backend, &Options::new());
        for threads in [1, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let again = pool.install(|| tensors.run(&backend, &Options::new()));
            assert_eq!((bits(&out), &lse), (bits(&again.0), &again.1));
        }
        // Rows 3 to 135 by themselves.
        let inputs = tensors.inputs();
        let some = Inputs::new(inputs.q.narrow(2, 3..135), inputs.k, inputs.v);
        let problem = Problem::new(&some, &Options::new()).unwrap();
        let (part, _) = common::run(&backend, &problem, &some, Algorithm::Fa2);
        for head in 0..2 {
            let all = &out[at(head, 3)..at(head, 135)];
            let part = &part[head * all.len()..(head + 1) * all.len()];
            assert_eq!(bits(all), bits(part), "{}", backend.isa());
        }
    }
}

/// The rows `rows` of [`SHAPE`] by themselves, against the definition.
fn few(
    backend: &CpuBackend,
    tensors: &Tensors,
    options: &Options,
    rows: std::ops::Range<usize>,
) -> (Vec<bf16>, Vec<f32>) {
    let inputs = tensors.inputs();
    let inputs = Inputs::new(inputs.q.narrow(2, rows), inputs.k, inputs.v);
    let problem = Problem::new(&inputs, options).unwrap();
    let (out, lse) = common::run(backend, &problem, &inputs, Algorithm::Fa2);
    let [b, h, s] = problem.dims().lse_shape();
    let verdict = Judge::new(&problem, &inputs, &RowSample::all(&problem))
        .compare(
            &TensorView::bhsd(&out, problem.dims().out_shape()).unwrap(),
            Some(&TensorView::bhsd(&lse, [b, h, s, 1]).unwrap()),
        )
        .unwrap();
    assert!(verdict.pass, "{}: {verdict:?}", backend.isa());
    (out, lse)
}

#[test]
fn odd_queries_among_few_are_as_defined_and_change_no_other_row() {
    for backend in common::backends() {
        let options = Options::new();
        let clean = few(&backend, &Tensors::new(), &options, 30..46);
        for (n, &odd) in ODD.iter().enumerate() {
            let mut tensors = Tensors::new();
            tensors.q[at(0, 30 + n) + n] = bf16::from_f32(odd);
            let (out, lse) = few(&backend, &tensors, &options, 30..46);
            for row in (0..2 * 16).filter(|&row| row != n) {
                let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
                assert_eq!(bits(&out[part.clone()]), bits(&clean.0[part]));
                assert_eq!(lse[row], clean.1[row]);
            }
        }
    }
}

#[test]
fn odd_keys_and_values_change_none_of_few_rows_that_do_not_see_them() {
    for backend in common::backends() {
        let options = Options::new().causal(true);
        let clean = few(&backend, &Tensors::new(), &options, SHAPE[2] - 13..SHAPE[2]);
        for &odd in &ODD {
            for (in_k, in_v) in [(true, false), (false, true)] {
                let mut tensors = Tensors::new();
                // An even key and an odd one, which stand in different halves of pairs; seen from rows
                // 5 and 8 on.
                for (head, key) in [(0, SHAPE[2] - 8), (1, SHAPE[2] - 5)] {
                    if in_k {
                        tensors.k[at(head, key) + 7] = bf16::from_f32(odd);
                    }
                    if in_v {
                        tensors.v[at(head, key) + 9] = bf16::from_f32(odd);
                    }
                }
                let (out, lse) = few(&backend, &tensors, &options, SHAPE[2] - 13..SHAPE[2]);
                for row in (0..5).chain(13..13 + 8) {
                    let part = row * SHAPE[3]..(row + 1) * SHAPE[3];
                    assert_eq!(
                        bits(&out[part.clone()]),
                        bits(&clean.0[part]),
                        "{} {row} {odd}",
                        backend.isa()
                    );
                    assert_eq!(lse[row], clean.1[row]);
                }
            }
        }
    }
}

#[test]
fn values_of_few_rows_that_are_all_tiny_or_huge_are_as_defined() {
    for backend in common::backends() {
        for scale in [0.0, 1e-36f32, 1e-39, 1e-13, 1e30, 2e37] {
            let mut tensors = Tensors::new();
            for x in &mut tensors.v {
                *x = bf16::from_f32(x.to_f32() * scale);
            }
            few(&backend, &tensors, &Options::new(), 20..27);
        }
    }
}

fn agree(backend: &CpuBackend, tensors: &Tensors, options: &Options, out: &[bf16], lse: &[f32]) {
    let [b, h, s, _] = SHAPE;
    let verdict = tensors
        .judge(options)
        .compare(
            &TensorView::bhsd(out, SHAPE).unwrap(),
            Some(&TensorView::bhsd(lse, [b, h, s, 1]).unwrap()),
        )
        .unwrap();
    assert!(verdict.pass, "{}: {verdict:?}", backend.isa());
}

#[test]
fn the_emulation_is_named_but_not_offered() {
    assert_eq!("amx-emulated".parse::<Isa>().unwrap(), Isa::AmxEmulated);
    assert!(!Isa::available().contains(&Isa::AmxEmulated));
    assert_ne!(Isa::best(), Isa::AmxEmulated);
}
