//! What this host has: driver, devices, NVRTC. Never panics and never loads more than it must.
//!
//! The CUDA driver library is opened here with `libloading`, before any call into cudarc: cudarc
//! panics where the library or one of its symbols is missing.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::nvrtc::Nvrtc;

/// The least driver that the bindings in use can be trusted with, as `cuDriverGetVersion` counts.
pub const LEAST_DRIVER: i32 = 12_000;
/// The least compute capability: `mma.sync` on bf16, `cp.async`.
pub const LEAST_COMPUTE: (i32, i32) = (8, 0);

/// One GPU as the driver shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// As in `cuda:N`.
    pub ordinal: usize,
    /// The vendor's name.
    pub name: String,
    /// Compute capability.
    pub compute: (i32, i32),
    /// Bytes of device memory.
    pub memory: u64,
    /// `Err` says why the device cannot be used.
    pub status: Result<(), String>,
}

/// What the probe found.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Version of the driver's CUDA, as 13000 for 13.0, or why there is none.
    pub driver: Result<i32, String>,
    /// The GPUs; empty where the driver is missing.
    pub devices: Vec<Device>,
    /// Version of the NVRTC found and where, or why there is none.
    pub nvrtc: Result<String, String>,
}

impl Probe {
    /// Why device `ordinal` cannot be used, if it cannot.
    pub fn usable(&self, ordinal: usize) -> Result<&Device, String> {
        self.driver.as_ref().map_err(Clone::clone)?;
        let device = self.devices.get(ordinal).ok_or_else(|| {
            format!(
                "no device {ordinal}: the driver shows {}",
                match self.devices.len() {
                    0 => "none".to_owned(),
                    1 => "one, number 0".to_owned(),
                    n => format!("{n}, numbers 0 to {}", n - 1),
                }
            )
        })?;
        device.status.clone()?;
        Ok(device)
    }
}

/// `13.0` for 13000.
pub fn version_name(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Looks once and remembers.
pub fn probe() -> &'static Probe {
    static PROBE: OnceLock<Probe> = OnceLock::new();
    PROBE.get_or_init(|| {
        let (driver, devices) = match Driver::open().and_then(|driver| driver.look()) {
            Ok((version, devices)) => (Ok(version), devices),
            Err(reason) => (Err(reason), Vec::new()),
        };
        let nvrtc = Nvrtc::find(None).map(|nvrtc| nvrtc.to_string());
        Probe {
            driver,
            devices,
            nvrtc,
        }
    })
}

/// The few entry points the probe needs, held with the library they come from.
struct Driver {
    library: libloading::Library,
}

#[cfg(windows)]
const NAMES: &[&str] = &["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

const ATTRIBUTE_MAJOR: c_int = 75;
const ATTRIBUTE_MINOR: c_int = 76;

impl Driver {
    fn open() -> Result<Driver, String> {
        for name in NAMES {
            // SAFETY: opening the CUDA driver library runs its initialisers, which are made for
            // being loaded by any process; no other library bears this name.
            if let Ok(library) = unsafe { libloading::Library::new(*name) } {
                return Ok(Driver { library });
            }
        }
        Err(format!("no NVIDIA driver: {} cannot be loaded", NAMES[0]))
    }

    fn look(&self) -> Result<(i32, Vec<Device>), String> {
        let library = &self.library;
        // SAFETY: the types are those of the CUDA driver API, unchanged since CUDA 4; the symbols
        // are used while `library` is open.
        let (init, version, count, get, name, attribute, memory) = unsafe {
            (
                symbol::<unsafe extern "C" fn(c_uint) -> c_int>(library, "cuInit")?,
                symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(library, "cuDriverGetVersion")?,
                symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(library, "cuDeviceGetCount")?,
                symbol::<unsafe extern "C" fn(*mut c_int, c_int) -> c_int>(library, "cuDeviceGet")?,
                symbol::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(
                    library,
                    "cuDeviceGetName",
                )?,
                symbol::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(
                    library,
                    "cuDeviceGetAttribute",
                )?,
                symbol::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(
                    library,
                    "cuDeviceTotalMem_v2",
                )?,
            )
        };
        // SAFETY: every pointer is to a live local of the type the call writes, and `cuInit`
        // precedes the device calls. `cuDriverGetVersion` is allowed before it.
        unsafe {
            let mut found = 0;
            check(version(&mut found), "cuDriverGetVersion")?;
            if found < LEAST_DRIVER {
                return Err(format!(
                    "the NVIDIA driver is too old: it supports CUDA {}, at least {} is needed",
                    version_name(found),
                    version_name(LEAST_DRIVER)
                ));
            }
            match init(0) {
                0 => {}
                100 => return Ok((found, Vec::new())),
                code => check(code, "cuInit")?,
            }
            let mut devices = 0;
            check(count(&mut devices), "cuDeviceGetCount")?;
            let mut list = Vec::new();
            for ordinal in 0..devices {
                let mut device = 0;
                check(get(&mut device, ordinal), "cuDeviceGet")?;
                let mut text = [0 as c_char; 256];
                check(
                    name(text.as_mut_ptr(), text.len() as c_int - 1, device),
                    "cuDeviceGetName",
                )?;
                let bytes: Vec<u8> = text
                    .iter()
                    .map(|&c| c as u8)
                    .take_while(|&c| c != 0)
                    .collect();
                let (mut major, mut minor, mut total) = (0, 0, 0);
                check(
                    attribute(&mut major, ATTRIBUTE_MAJOR, device),
                    "cuDeviceGetAttribute",
                )?;
                check(
                    attribute(&mut minor, ATTRIBUTE_MINOR, device),
                    "cuDeviceGetAttribute",
                )?;
                check(memory(&mut total, device), "cuDeviceTotalMem")?;
                let status = if (major, minor) < LEAST_COMPUTE {
                    Err(format!(
                        "compute capability {major}.{minor} is too low: at least {}.{} is needed",
                        LEAST_COMPUTE.0, LEAST_COMPUTE.1
                    ))
                } else {
                    Ok(())
                };
                list.push(Device {
                    ordinal: ordinal as usize,
                    name: String::from_utf8_lossy(&bytes).into_owned(),
                    compute: (major, minor),
                    memory: total as u64,
                    status,
                });
            }
            Ok((found, list))
        }
    }
}

fn check(code: c_int, call: &str) -> Result<(), String> {
    match code {
        0 => Ok(()),
        100 => Err(format!("{call}: the driver shows no device")),
        code => Err(format!("{call} failed with CUDA error {code}")),
    }
}

/// # Safety
/// `T` must be the symbol's type, and must not be used after `library` is closed.
pub(crate) unsafe fn symbol<T: Copy>(
    library: &libloading::Library,
    name: &str,
) -> Result<T, String> {
    // SAFETY: the caller vouches for the type and the lifetime.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|_| format!("{name} is missing: this is no working CUDA library"))
}

/// Lines for people: the driver, each device, the compiler; what is missing by name.
pub fn report() -> Vec<String> {
    let probe = probe();
    let mut lines = Vec::new();
    match &probe.driver {
        Ok(version) => lines.push(format!("driver: CUDA {}", version_name(*version))),
        Err(reason) => lines.push(reason.clone()),
    }
    if probe.driver.is_ok() && probe.devices.is_empty() {
        lines.push("no device: the driver shows none".into());
    }
    for device in &probe.devices {
        let state = match &device.status {
            Ok(()) => "usable".to_owned(),
            Err(reason) => reason.clone(),
        };
        lines.push(format!(
            "cuda:{}: {}, compute capability {}.{}, {} MiB: {state}",
            device.ordinal,
            device.name,
            device.compute.0,
            device.compute.1,
            device.memory >> 20
        ));
    }
    lines.push(match &probe.nvrtc {
        Ok(found) => format!("compiler: {found}"),
        Err(reason) => format!(
            "{reason}; without it, kernels must be built ahead ({})",
            crate::cache::KERNELS_SETTING
        ),
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_never_panics_and_names_what_is_missing() {
        let probe = probe();
        match &probe.driver {
            Err(reason) => {
                assert!(
                    reason.contains("driver") || reason.contains("cu"),
                    "{reason}"
                );
                assert!(probe.devices.is_empty());
                assert_eq!(probe.usable(0).unwrap_err(), *reason);
            }
            Ok(version) => assert!(*version >= LEAST_DRIVER),
        }
        assert!(!report().is_empty());
    }

    #[test]
    fn devices_that_are_not_there_are_named() {
        let probe = Probe {
            driver: Ok(13_000),
            devices: vec![Device {
                ordinal: 0,
                name: "GPU".into(),
                compute: (7, 5),
                memory: 1 << 30,
                status: Err("compute capability 7.5 is too low: at least 8.0 is needed".into()),
            }],
            nvrtc: Err("no NVRTC".into()),
        };
        assert!(probe.usable(0).unwrap_err().contains("7.5"));
        assert!(probe.usable(3).unwrap_err().contains("no device 3"));
    }
}
