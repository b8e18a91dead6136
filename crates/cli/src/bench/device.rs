//! Timing on devices: inputs made where they are used, so that no copy over the bus is timed.

#[cfg(feature = "cuda")]
use std::collections::btree_map::{BTreeMap, Entry};

#[cfg(feature = "cuda")]
use tilewise::cuda::{CudaBackend, backward::Sums, bench};
use tilewise::{Algorithm, Problem};

use crate::stats::Samples;

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    Forward,
    /// With or without sums whose bits do not change from run to run.
    Backward {
        deterministic: bool,
    },
}

/// The devices in use, each opened once: it keeps the kernels it has loaded.
#[derive(Default)]
pub(super) struct Devices {
    #[cfg(feature = "cuda")]
    open: BTreeMap<usize, CudaBackend>,
}

impl Devices {
    /// Times of `algorithm` by the device's own clock, the second-level cache flushed before each
    /// call; or why there are none.
    #[cfg(feature = "cuda")]
    pub(super) fn time(
        &mut self,
        ordinal: usize,
        problem: &Problem,
        algorithm: Algorithm,
        repeat: Option<u32>,
        pass: Pass,
    ) -> Result<Samples, String> {
        let say = |error: tilewise::Error| error.to_string();
        let device = match self.open.entry(ordinal) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => place.insert(CudaBackend::new(ordinal).map_err(say)?),
        };
        let effort = match repeat {
            Some(count) => bench::Effort {
                measure_ms: f64::INFINITY,
                most: count as usize,
                ..bench::Effort::default()
            },
            None => bench::Effort::default(),
        };
        let timing = match pass {
            Pass::Forward => bench::time(device, problem, algorithm, effort),
            Pass::Backward { deterministic } => {
                let sums = match deterministic {
                    true => Sums::Ordered,
                    false => Sums::Atomic,
                };
                bench::time_backward(device, problem, algorithm, sums, effort)
            }
        }
        .map_err(say)?;
        Ok(Samples::from_ms(timing.samples_ms))
    }

    /// There is no device in a build without CUDA.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn time(
        &mut self,
        ordinal: usize,
        _: &Problem,
        _: Algorithm,
        _: Option<u32>,
        _: Pass,
    ) -> Result<Samples, String> {
        Err(format!("this build has no CUDA for cuda:{ordinal}"))
    }
}
