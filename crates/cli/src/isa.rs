//! Instruction sets of the CPU backend, by name.

use std::sync::Arc;

use anyhow::Result;
use tilewise::Backend;
use tilewise::cpu::{CpuBackend, Isa};

/// What the CPU backend can be forced to here, the widest first.
pub(crate) fn available() -> Vec<String> {
    Isa::available().iter().map(Isa::to_string).collect()
}

/// The names asked for, `all` replaced by all that are available.
pub(crate) fn expand(asked: &[String]) -> Vec<String> {
    let mut names = Vec::new();
    for name in asked {
        if name == "all" {
            names.extend(available());
        } else {
            names.push(name.clone());
        }
    }
    names
}

/// The CPU backend with this instruction set.
///
/// # Errors
/// If there is none of this name, or this processor does not have it.
pub(crate) fn open_cpu(name: &str) -> Result<Arc<dyn Backend>> {
    let isa: Isa = name.parse()?;
    Ok(Arc::new(CpuBackend::builder().isa(isa).build()?))
}
