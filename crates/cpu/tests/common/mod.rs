//! Problems over the tiles of the kernels, and the run that compares a backend with the definition.

#![allow(dead_code)] // each test binary uses a part of it

use proptest::prelude::*;
use tilewise_core::half::{bf16, f16};
use tilewise_core::{Algorithm, DType, Inputs, Problem, TensorViewMut};
use tilewise_cpu::{CpuBackend, CpuElement, Isa};
use tilewise_testkit::{Case, Data, Sizes, case};

/// Any problem.
pub(crate) fn any_case() -> impl Strategy<Value = Case> {
    case(&Sizes::of_tiles())
}

/// Runs and returns out and lse, which held rubbish before.
pub(crate) fn run<T: CpuElement>(
    backend: &CpuBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
) -> (Vec<T>, Vec<f32>) {
    let shape = problem.dims().out_shape();
    let lse_shape = problem.dims().lse_shape();
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; lse_shape.iter().product()];
    backend
        .forward_into(
            problem,
            inputs,
            algorithm,
            TensorViewMut::bhsd(&mut out, shape).unwrap(),
            Some(TensorViewMut::bhs(&mut lse, lse_shape).unwrap()),
        )
        .unwrap();
    (out, lse)
}

pub(crate) fn backends() -> Vec<CpuBackend> {
    Isa::available()
        .into_iter()
        .chain([Isa::AmxEmulated])
        .map(|isa| CpuBackend::builder().isa(isa).build().unwrap())
        .collect()
}

/// Every algorithm and instruction set against the definition.
pub(crate) fn check<T: CpuElement>(case: &Case) -> Result<(), TestCaseError> {
    let data: Data<T> = case.data();
    let (problem, inputs) = (data.problem(), data.inputs());
    let judged = data.judge();
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let (out, lse) = run(&backend, &problem, &inputs, algorithm);
            judged.agrees(&format!("{} {algorithm}", backend.isa()), &out, &lse)?;
        }
    }
    Ok(())
}

/// [`check`] in the case's dtype.
pub(crate) fn check_any(case: &Case) -> Result<(), TestCaseError> {
    match case.dtype {
        DType::F64 => check::<f64>(case),
        DType::F32 => check::<f32>(case),
        DType::F16 => check::<f16>(case),
        _ => check::<bf16>(case),
    }
}
