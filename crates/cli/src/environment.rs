//! Where results were measured.

use serde::Serialize;
use std::collections::BTreeMap;

use tilewise::BackendInfo;

/// The machine and the build.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Environment {
    pub(crate) version: &'static str,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
    pub(crate) debug_build: bool,
    /// Threads of the CPU backend.
    pub(crate) threads: usize,
    pub(crate) backends: Vec<Device>,
}

/// A backend that ran, in its own words.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) device: String,
    pub(crate) details: BTreeMap<String, String>,
}

impl From<&BackendInfo> for Device {
    fn from(info: &BackendInfo) -> Self {
        Device {
            name: info.name.clone(),
            device: info.device.clone(),
            details: info.details.iter().cloned().collect(),
        }
    }
}

impl Environment {
    pub(crate) fn new<'a>(
        threads: usize,
        infos: impl IntoIterator<Item = &'a BackendInfo>,
    ) -> Self {
        let mut backends: Vec<Device> = Vec::new();
        for info in infos {
            let device = Device::from(info);
            if !backends.contains(&device) {
                backends.push(device);
            }
        }
        Environment {
            version: env!("CARGO_PKG_VERSION"),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            debug_build: cfg!(debug_assertions),
            threads,
            backends,
        }
    }
}
