//! Names of backends.

use std::fmt;
use std::str::FromStr;

use tilewise_core::{Error, Result};

/// A backend by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The first available backend that supports the problem.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda {
        /// As `nvidia-smi` counts them.
        ordinal: usize,
    },
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendKind::Auto => f.pad("auto"),
            BackendKind::Cpu => f.pad("cpu"),
            BackendKind::Cuda { ordinal } => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

impl FromStr for BackendKind {
    type Err = Error;

    /// `auto`, `cpu`, `cuda` (device 0) or `cuda:N`.
    fn from_str(s: &str) -> Result<Self> {
        let name = s.trim().to_ascii_lowercase();
        match name.as_str() {
            "auto" => Ok(BackendKind::Auto),
            "cpu" => Ok(BackendKind::Cpu),
            "cuda" => Ok(BackendKind::Cuda { ordinal: 0 }),
            other => other
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(|ordinal| BackendKind::Cuda { ordinal })
                .ok_or_else(|| Error::option("backend", "auto, cpu, cuda or cuda:N", s)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for kind in [
            BackendKind::Auto,
            BackendKind::Cpu,
            BackendKind::Cuda { ordinal: 3 },
        ] {
            assert_eq!(kind.to_string().parse::<BackendKind>().unwrap(), kind);
        }
        assert_eq!(
            "CUDA".parse::<BackendKind>().unwrap(),
            BackendKind::Cuda { ordinal: 0 }
        );
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1"] {
            let error = wrong.parse::<BackendKind>().unwrap_err();
            assert!(error.to_string().contains("auto, cpu, cuda"), "{error}");
        }
    }
}
