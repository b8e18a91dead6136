//! Random attention problems, and the backends to try them on.

use std::sync::Arc;

use proptest::prelude::*;
use tilewise::cpu::{CpuBackend, Isa};
use tilewise::{BackendKind, DType, Engine, Error, Result, open};
use tilewise_testkit::Sizes;
pub(crate) use tilewise_testkit::{Case, Data, Noise, Sequences, cases};

/// Every backend of this machine, and the CPU once with each of its instruction sets.
pub(crate) fn engines() -> Vec<(String, Engine)> {
    let mut engines: Vec<(String, Engine)> = Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| {
            let backend = CpuBackend::builder().isa(isa).build().unwrap();
            let engine = Engine::with_backend(BackendKind::Cpu, Arc::new(backend));
            (format!("cpu/{isa}"), engine)
        })
        .collect();
    let cuda = BackendKind::Cuda { ordinal: 0 };
    match open(cuda) {
        Ok(backend) => engines.push((cuda.to_string(), Engine::with_backend(cuda, backend))),
        // Said once a run: a machine without a GPU must not look like one that passed on it.
        Err(error) => {
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| eprintln!("not tested on {cuda}: {error}"));
        }
    }
    engines
}

/// What a backend made, or `None` where it refused by name what it does not have. Only the CPU has everything,
/// and no other error is a refusal: a kernel that fails must not look like one that is not there.
pub(crate) fn unless_refused<T>(name: &str, result: Result<T>) -> Option<T> {
    match result {
        Ok(made) => Some(made),
        Err(Error::Unsupported { .. }) if !name.starts_with("cpu") => None,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Any problem of that dtype.
pub(crate) fn case(dtype: DType) -> impl Strategy<Value = Case> {
    tilewise_testkit::case(&Sizes::of_models()).prop_map(move |case| Case { dtype, ..case })
}
