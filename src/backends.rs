//! The backends of this build and of this machine.

use std::sync::Arc;

use tilewise_core::{Backend, BackendInfo, Error, Result};

use crate::kind::BackendKind;

/// A backend and whether it can be used here.
#[derive(Clone, Debug)]
pub struct BackendStatus {
    /// Which backend.
    pub kind: BackendKind,
    /// What it says of itself, or exactly what is missing.
    pub status: Result<BackendInfo, String>,
}

/// Every backend this build knows, in the order in which [`Engine::auto`](crate::Engine::auto)
/// prefers them.
pub fn backends() -> Vec<BackendStatus> {
    known()
        .into_iter()
        .map(|kind| BackendStatus {
            kind,
            status: open(kind).map(|backend| backend.info()).map_err(reason),
        })
        .collect()
}

/// What is missing, without the name of the backend that the caller gives anyway.
pub(crate) fn reason(error: Error) -> String {
    match error {
        Error::Unavailable { reason, .. } => reason,
        other => other.to_string(),
    }
}

/// The kinds to try, the most preferred first.
pub(crate) fn known() -> Vec<BackendKind> {
    vec![BackendKind::Cuda { ordinal: 0 }, BackendKind::Cpu]
}

/// Opens one backend by name.
///
/// # Errors
/// [`Error::Unavailable`] with the exact reason; [`Error::Option`] for [`BackendKind::Auto`], which
/// is a choice among backends and no backend.
pub fn open(kind: BackendKind) -> Result<Arc<dyn Backend>> {
    match kind {
        BackendKind::Auto => Err(Error::option(
            "backend",
            "one backend's name: cpu or cuda:N",
            "auto",
        )),
        BackendKind::Cpu => open_cpu(),
        BackendKind::Cuda { ordinal } => open_cuda(ordinal),
    }
}

#[cfg(feature = "cpu")]
fn open_cpu() -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(tilewise_cpu::CpuBackend::new()?))
}

#[cfg(not(feature = "cpu"))]
fn open_cpu() -> Result<Arc<dyn Backend>> {
    Err(not_built(BackendKind::Cpu))
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(tilewise_cuda::CudaBackend::new(ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(ordinal: usize) -> Result<Arc<dyn Backend>> {
    Err(not_built(BackendKind::Cuda { ordinal }))
}

#[cfg(not(all(feature = "cpu", feature = "cuda")))]
fn not_built(kind: BackendKind) -> Error {
    Error::Unavailable {
        backend: kind.to_string(),
        reason: "this build does not contain it".into(),
    }
}
