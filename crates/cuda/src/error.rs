//! cudarc's errors as the errors of the core, with the operation's name.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use tilewise_core::Error;

use crate::NAME;

/// The error of operation `op`.
pub fn driver(op: &str, error: DriverError) -> Error {
    // Name and text come from the driver itself; the code stands beside them for those who search.
    let text = |found: Result<&std::ffi::CStr, DriverError>| {
        found
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    Error::Backend {
        backend: NAME.into(),
        op: op.into(),
        message: format!(
            "{} ({}): {}",
            text(error.error_name()),
            error.0 as i32,
            text(error.error_string())
        ),
    }
}

/// The error of an allocation of `bytes` for `what`.
pub fn allocation(what: &str, bytes: u64, error: DriverError) -> Error {
    if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        Error::OutOfMemory {
            backend: NAME.into(),
            what: what.into(),
            bytes,
        }
    } else {
        driver("cuMemAlloc", error)
    }
}

/// A refusal by this backend.
pub(crate) fn unsupported(what: impl Into<String>) -> Error {
    Error::unsupported(NAME, what)
}

/// The backend cannot be used.
pub(crate) fn unavailable(name: &str, reason: impl Into<String>) -> Error {
    Error::Unavailable {
        backend: name.into(),
        reason: reason.into(),
    }
}
