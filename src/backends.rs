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

/// How backends are opened; a builder.
///
/// ```
/// use tilewise::{Engine, BackendKind, Settings};
/// let settings = Settings::new().device_memory(1 << 30);
/// # if Engine::named("cpu").is_err() { return Ok(()); }
/// let engine = Engine::with(BackendKind::Cpu, &settings)?;
/// # Ok::<(), tilewise::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    device_memory: Option<u64>,
}

impl Settings {
    /// What [`Engine::new`](crate::Engine::new) opens with.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of a device's memory that inputs and outputs of one call may take; default: what the
    /// device has. Where they are more, a GPU's `fa2` streams keys and values from host memory in
    /// chunks; its other algorithms refuse. The CPU has no such memory and no such bound.
    pub fn device_memory(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.device_memory = bytes.into();
        self
    }
}

/// Opens one backend by name.
///
/// # Errors
/// [`Error::Unavailable`] with the exact reason; [`Error::Option`] for [`BackendKind::Auto`], which
/// is a choice among backends and no backend.
pub fn open(kind: BackendKind) -> Result<Arc<dyn Backend>> {
    open_with(kind, &Settings::default())
}

/// [`open`] with settings.
///
/// # Errors
/// As [`open`].
pub fn open_with(kind: BackendKind, settings: &Settings) -> Result<Arc<dyn Backend>> {
    match kind {
        BackendKind::Auto => Err(Error::option(
            "backend",
            "one backend's name: cpu or cuda:N",
            "auto",
        )),
        BackendKind::Cpu => open_cpu(),
        BackendKind::Cuda { ordinal } => open_cuda(ordinal, settings),
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
fn open_cuda(ordinal: usize, settings: &Settings) -> Result<Arc<dyn Backend>> {
    let backend = tilewise_cuda::CudaBackend::with(tilewise_cuda::CudaOptions {
        ordinal,
        device_memory: settings.device_memory,
        ..tilewise_cuda::CudaOptions::default()
    })?;
    Ok(Arc::new(backend))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(ordinal: usize, _: &Settings) -> Result<Arc<dyn Backend>> {
    Err(not_built(BackendKind::Cuda { ordinal }))
}

#[cfg(not(all(feature = "cpu", feature = "cuda")))]
fn not_built(kind: BackendKind) -> Error {
    Error::Unavailable {
        backend: kind.to_string(),
        reason: "this build does not contain it".into(),
    }
}
