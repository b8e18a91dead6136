//! Timing on devices: inputs made where they are used, so that no copy over the bus is timed.

#[cfg(feature = "cuda")]
use std::collections::btree_map::{BTreeMap, Entry};

#[cfg(feature = "cuda")]
use tilewise::cuda::ceilings::{self, Instruction};
#[cfg(feature = "cuda")]
use tilewise::cuda::kernels::hopper::COMPUTE;
#[cfg(feature = "cuda")]
use tilewise::cuda::{CudaBackend, backward::Sums, bench};
use tilewise::{Algorithm, DType, Problem};

use super::report::Rate;
#[cfg(feature = "cuda")]
pub(super) use tilewise::cuda::ceilings::Products;

/// Products of no device.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Products {}

#[cfg(not(feature = "cuda"))]
impl std::fmt::Display for Products {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {}
    }
}

use crate::stats::Samples;

/// What bounds an algorithm on a device, each measured once.
pub(super) struct DeviceRates {
    /// Of what the first is the rate: `mma.sync bf16`, say.
    pub(super) products: String,
    /// Products of the problem's type in FLOP/s.
    pub(super) flops: f64,
    /// Reading device memory in bytes/s.
    pub(super) bytes: f64,
}

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    Forward,
    /// On a GPU with sums in the order in which they come.
    Backward,
    /// With sums whose bits do not change from run to run.
    BackwardInOrder,
}

#[cfg(feature = "cuda")]
impl Pass {
    /// How gradients are timed, and so which kernels are: their ceiling must be of the same.
    fn sums(self) -> Option<Sums> {
        match self {
            Pass::Forward => None,
            Pass::Backward => Some(Sums::Atomic),
            Pass::BackwardInOrder => Some(Sums::Ordered),
        }
    }
}

/// The devices in use, each opened once: it keeps the kernels it has loaded.
#[derive(Default)]
pub(super) struct Devices {
    #[cfg(feature = "cuda")]
    open: BTreeMap<usize, CudaBackend>,
}

impl Devices {
    #[cfg(feature = "cuda")]
    fn open(&mut self, ordinal: usize) -> Result<&CudaBackend, String> {
        Ok(match self.open.entry(ordinal) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => {
                place.insert(CudaBackend::new(ordinal).map_err(|error| error.to_string())?)
            }
        })
    }

    /// Products that `algorithm` makes on a device, by name; `None` where it cannot be opened.
    #[cfg(feature = "cuda")]
    pub(super) fn products(
        &mut self,
        ordinal: usize,
        problem: &Problem,
        algorithm: Algorithm,
        pass: Pass,
    ) -> Option<Products> {
        let device = self.open(ordinal).ok()?;
        Some(Products::of(device, problem, algorithm, pass.sums()))
    }

    /// What bounds an algorithm that makes these products on a device.
    #[cfg(feature = "cuda")]
    pub(super) fn rates(
        &mut self,
        ordinal: usize,
        products: Products,
    ) -> Result<DeviceRates, String> {
        let device = self.open(ordinal)?;
        let rates = || {
            Ok(DeviceRates {
                products: products.to_string(),
                flops: products.rate(device)?,
                bytes: ceilings::read(device)?,
            })
        };
        rates().map_err(|error: tilewise::Error| error.to_string())
    }

    /// Everything that is measured of a device for these types, by name.
    #[cfg(feature = "cuda")]
    pub(super) fn every_rate(
        &mut self,
        backend: &str,
        ordinal: usize,
        dtypes: &[DType],
    ) -> Vec<Rate> {
        let device = match self.open(ordinal) {
            Ok(device) => device,
            Err(reason) => return vec![Rate::missing(backend, "every ceiling".into(), reason)],
        };
        // f32 is made of products of either f16 or tf32.
        let all = [DType::BF16, DType::F16, DType::F32];
        let made_of = all.into_iter().filter(|dtype| {
            let halves = *dtype == DType::F16 && dtypes.contains(&DType::F32);
            halves || dtypes.contains(dtype)
        });
        let made_of: Vec<DType> = made_of.collect();
        let mut products = vec![Products::plain(Instruction::Fma, DType::F32)];
        for instruction in [Instruction::Mma, Instruction::Wgmma] {
            // Last what takes most power, after which a device is slower for a while.
            if instruction == Instruction::Mma || device.compute() == COMPUTE {
                let plain = |&dtype: &DType| Products::plain(instruction, dtype);
                products.extend(made_of.iter().map(plain));
            }
        }
        let mut rates = Vec::new();
        let mut take = |name: String, rate: tilewise::Result<f64>, flops: bool| {
            rates.push(match rate {
                Ok(rate) => Rate::of(backend, name, rate, flops),
                Err(error) => Rate::missing(backend, name, error.to_string()),
            });
        };
        for one in products {
            take(one.to_string(), one.rate(device), true);
        }
        take("device memory, read".into(), ceilings::read(device), false);
        take(
            "device memory, copied".into(),
            ceilings::copy(device),
            false,
        );
        rates
    }

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
        let device = self.open(ordinal)?;
        let effort = match repeat {
            Some(count) => bench::Effort {
                measure_ms: f64::INFINITY,
                most: count as usize,
                ..bench::Effort::default()
            },
            None => bench::Effort::default(),
        };
        let timing = match pass.sums() {
            None => bench::time(device, problem, algorithm, effort),
            Some(sums) => bench::time_backward(device, problem, algorithm, sums, effort),
        }
        .map_err(say)?;
        Ok(Samples::from_ms(timing.samples_ms))
    }

    /// There is no device in a build without CUDA.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn products(
        &mut self,
        _: usize,
        _: &Problem,
        _: Algorithm,
        _: Pass,
    ) -> Option<Products> {
        None
    }

    /// Nor a rate of one.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn rates(&mut self, _: usize, products: Products) -> Result<DeviceRates, String> {
        match products {}
    }

    /// Nor anything to measure.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn every_rate(&mut self, _: &str, _: usize, _: &[DType]) -> Vec<Rate> {
        Vec::new()
    }

    /// Nor anything to time.
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
