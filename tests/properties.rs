//! Every backend, algorithm and instruction set equals the naive definition, within the one
//! tolerance, whatever the sizes, strides, types, masks and options.

use proptest::prelude::*;
use tilewise::half::{bf16, f16};
use tilewise::{Algorithm, DType, Element, Problem};

use crate::support::{Case, case, cases, engines, unless_refused};

fn equals_naive<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let inputs = data.inputs();
    let judged = data.judge();
    let problem = Problem::new(&inputs, &data.options).unwrap();
    for (name, engine) in engines() {
        for algorithm in Algorithm::ALL {
            let supported = engine.backend().supports(&problem, algorithm);
            if unless_refused(&name, supported).is_none() {
                continue;
            }
            let attention = engine
                .forward_with(algorithm, &inputs, &data.options)
                .unwrap();
            judged.agrees(
                &format!("{name} {algorithm}"),
                &attention.out,
                &attention.lse,
            )?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(160))]

    #[test]
    fn f32_equals_naive(case in case(DType::F32)) {
        equals_naive::<f32>(&case)?;
    }

    #[test]
    fn f64_equals_naive(case in case(DType::F64)) {
        equals_naive::<f64>(&case)?;
    }

    #[test]
    fn f16_equals_naive(case in case(DType::F16)) {
        equals_naive::<f16>(&case)?;
    }

    #[test]
    fn bf16_equals_naive(case in case(DType::BF16)) {
        equals_naive::<bf16>(&case)?;
    }
}

/// NaN and ∞ in one key's value, or in one query, stay in the rows that see them.
#[test]
fn not_a_number_stays_in_its_rows() {
    for (name, engine) in engines() {
        for algorithm in Algorithm::ALL {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (sq, sk, d) = (70usize, 150usize, 24usize);
                let wave = |n: usize| {
                    (0..n)
                        .map(|x| ((x * 37 % 101) as f32 - 50.0) / 40.0)
                        .collect::<Vec<_>>()
                };
                let (mut q, k, mut v) = (wave(2 * sq * d), wave(2 * sk * d), wave(2 * sk * d));
                // Row 11 of head 1; key 100 of head 0, which causality hides from rows before 20.
                q[(sq + 11) * d + 3] = poison;
                v[100 * d + 5] = poison;
                let shape = |s| [1, 2, s, d];
                let inputs = tilewise::Inputs::new(
                    tilewise::TensorView::bhsd(&q, shape(sq)).unwrap(),
                    tilewise::TensorView::bhsd(&k, shape(sk)).unwrap(),
                    tilewise::TensorView::bhsd(&v, shape(sk)).unwrap(),
                );
                let options = tilewise::Options::new().causal(true);
                let made = engine.forward_with(algorithm, &inputs, &options);
                let Some(attention) = unless_refused(&name, made) else {
                    continue;
                };
                for (at, x) in attention.out.iter().enumerate() {
                    let (head, row, column) = (at / (sq * d), at / d % sq, at % d);
                    let seen = (head == 1 && row == 11) || (head == 0 && row >= 20 && column == 5);
                    assert_eq!(
                        !x.is_finite(),
                        seen,
                        "{name} {algorithm} {poison}: head {head} row {row} column {column}: {x}"
                    );
                }
            }
        }
    }
}
