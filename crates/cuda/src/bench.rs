//! Timing on the device: inputs that lie there, CUDA events, second-level cache flushed before each call.

use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut};
use tilewise_core::{Algorithm, DType, Error, Problem, Result, allocate};

use crate::backend::{CudaBackend, device_zeros};
use crate::backward::{self, DeviceBackward, DeviceGradients, Sums};
use crate::error::{allocation, driver};
use crate::ops::{self, DeviceInputs, run_state, scratch};
use crate::raw::Args;
use crate::view::{DeviceMask, DeviceView, DeviceViewMut, contiguous};

/// Least driver whose event times the bindings can read.
const EVENTS_DRIVER: i32 = 12_080;

/// Times of one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Each timed call, in milliseconds, in order.
    pub samples_ms: Vec<f64>,
    /// First call of the process for this case: finding, compiling or loading the kernel included.
    pub first_ms: f64,
}

impl Timing {
    /// Median of the samples in milliseconds.
    pub fn median_ms(&self) -> f64 {
        let mut sorted = self.samples_ms.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        }
    }
}

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Warm-up time in milliseconds, at least one call.
    pub warmup_ms: f64,
    /// Measured time in milliseconds, at least five calls.
    pub measure_ms: f64,
    /// Most calls.
    pub most: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Effort {
            warmup_ms: 10.0,
            measure_ms: 40.0,
            most: 1000,
        }
    }
}

fn normal(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    dtype: DType,
    len: usize,
    seed: i32,
) -> Result<CudaSlice<u8>> {
    let mut memory = scratch(stream, "inputs", (len * dtype.size()) as u64)?;
    let mut args = Args {
        ld_s: len as i64,
        row0: seed,
        ..Args::default()
    };
    {
        let (ptr, _guard) = memory.device_ptr_mut(stream);
        args.o.ptr = ptr;
        run_state(backend, stream, "tw_fill_normal", dtype, len as u64, &args)?;
    }
    Ok(memory)
}

/// Times `algorithm` on `problem` with standard normal inputs made on the device. A bias is one for each
/// head and the same for the whole batch; a boolean mask is the same for all heads and hides nothing.
///
/// # Errors
/// What the backend refuses, a driver too old to time with, and failures of the driver.
pub fn time(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
    effort: Effort,
) -> Result<Timing> {
    ops::supports(problem, algorithm)?;
    timeable(backend)?;
    let dims = *problem.dims();
    let dtype = problem.dtype();
    backend.on_stream(|stream| {
        let rows = [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim];
        let wide = [dims.batch, dims.num_kv_heads, dims.seqlen_k, dims.head_dim];
        let wide_v = [
            dims.batch,
            dims.num_kv_heads,
            dims.seqlen_k,
            dims.head_dim_v,
        ];
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let make = |shape, seed| normal(backend, stream, dtype, count(shape), seed);
        let (mut q, mut k, mut v) = (make(rows, 1)?, make(wide, 2)?, make(wide_v, 3)?);
        let mut out = scratch(
            stream,
            "out",
            (count(dims.out_shape()) * dtype.size()) as u64,
        )?;
        let mut lse = device_zeros::<f32>(stream, "lse", dims.lse_shape().iter().product())?;
        let address = |memory: &mut CudaSlice<u8>| memory.device_ptr_mut(stream).0;
        let (pq, pk, pv, po) = (
            address(&mut q),
            address(&mut k),
            address(&mut v),
            address(&mut out),
        );
        let [b, h, s] = dims.lse_shape();
        let per_head = [1, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
        let shared = [1, 1, dims.seqlen_q, dims.seqlen_k];
        let mut bias = match problem.has_bias() {
            true => Some(make(per_head, 4)?),
            false => None,
        };
        let mut mask = match problem.has_mask() {
            true => Some(
                stream
                    .clone_htod(&allocate(&shared, "mask", 1u8)?)
                    .map_err(|e| allocation("mask", count(shared) as u64, e))?,
            ),
            false => None,
        };
        let (pb, pm) = (bias.as_mut().map(address), mask.as_mut().map(address));
        // SAFETY: the addresses are of the allocations above, of the sizes the shapes say; they
        // outlive the stream's work, which `on_stream` waits for.
        let inputs = unsafe {
            DeviceInputs {
                bias: pb.map(|at| DeviceView::from_raw(at, dtype, per_head, contiguous(per_head))),
                mask: pm.map(|at| DeviceMask::from_raw(at, shared, contiguous(shared))),
                ..DeviceInputs::new(
                    DeviceView::from_raw(pq, dtype, rows, contiguous(rows)),
                    DeviceView::from_raw(pk, dtype, wide, contiguous(wide)),
                    DeviceView::from_raw(pv, dtype, wide_v, contiguous(wide_v)),
                )
            }
        };
        let call = || -> Result<()> {
            // SAFETY: as above.
            let mut vo = unsafe {
                DeviceViewMut::from_raw(po, dtype, dims.out_shape(), contiguous(dims.out_shape()))?
            };
            let mut sums = DeviceViewMut::bhsd::<f32, _>(&mut lse, [b, h, s, 1])?;
            ops::forward_with(
                backend,
                stream,
                problem,
                algorithm,
                &inputs,
                &mut vo,
                Some(&mut sums),
            )
        };
        measure(backend, stream, effort, Cache::Flushed, call)
    })
}

/// Times the gradients of `problem` with standard normal inputs made on the device; out and lse are
/// those of its own forward pass, which is not timed. The calls of `sums` are timed as they stand:
/// with [`Sums::Atomic`] the zeros and the conversion of dQ's sums are in the time.
///
/// # Errors
/// As [`time`].
pub fn time_backward(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
    sums: Sums,
    effort: Effort,
) -> Result<Timing> {
    ops::supports(problem, algorithm)?;
    backward::supports(problem, algorithm)?;
    timeable(backend)?;
    let dims = *problem.dims();
    let dtype = problem.dtype();
    let (out, [b, h, s]) = (dims.out_shape(), dims.lse_shape());
    let q = [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim];
    let (k, v) = (problem.dk_shape(), problem.dv_shape());
    backend.on_stream(|stream| {
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        // q, k, v, dout; then what is written: out, dq, dk, dv.
        let shapes = [q, k, v, out, out, q, k, v];
        let mut memory = Vec::with_capacity(shapes.len());
        for (n, &shape) in shapes.iter().enumerate() {
            memory.push(match n < 4 {
                true => normal(backend, stream, dtype, count(shape), n as i32 + 1)?,
                false => scratch(stream, "outputs", (count(shape) * dtype.size()) as u64)?,
            });
        }
        let mut lse = device_zeros::<f32>(stream, "lse", b * h * s)?;
        let places: Vec<u64> = memory
            .iter_mut()
            .map(|memory| memory.device_ptr_mut(stream).0)
            .collect();
        // SAFETY: the addresses are of the allocations above, of the sizes the shapes say; they
        // outlive the stream's work, which `on_stream` waits for, and what is written is not read by
        // the same call.
        let read = |n: usize| unsafe {
            DeviceView::from_raw(places[n], dtype, shapes[n], contiguous(shapes[n]))
        };
        // SAFETY: as above.
        let write = |n: usize| unsafe {
            DeviceViewMut::from_raw(places[n], dtype, shapes[n], contiguous(shapes[n]))
        };
        ops::forward(
            backend,
            stream,
            problem,
            algorithm,
            &read(0),
            &read(1),
            &read(2),
            &mut write(4)?,
            Some(&mut DeviceViewMut::bhsd::<f32, _>(&mut lse, [b, h, s, 1])?),
        )?;
        let inputs = DeviceBackward {
            inputs: DeviceInputs::new(read(0), read(1), read(2)),
            out: read(4),
            lse: DeviceView::bhsd::<f32, _>(&lse, [b, h, s, 1])?,
            dout: read(3),
            dlse: None,
        };
        measure(backend, stream, effort, Cache::Flushed, || {
            let mut gradients = DeviceGradients {
                dq: write(5)?,
                dk: write(6)?,
                dv: write(7)?,
                dbias: None,
                dsinks: None,
            };
            backward::backward(
                backend,
                stream,
                problem,
                algorithm,
                sums,
                &inputs,
                &mut gradients,
            )
        })
    })
}

pub(crate) fn timeable(backend: &CudaBackend) -> Result<()> {
    if backend.driver_version() < EVENTS_DRIVER {
        return Err(Error::Unavailable {
            backend: crate::NAME.into(),
            reason: "event timing needs a driver for CUDA 12.8 or later".into(),
        });
    }
    Ok(())
}

/// The second-level cache before each timed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    /// Holds nothing that the call reads.
    Flushed,
    /// As the call before left it: a flush leaves zeros there that are written back meanwhile.
    AsItIs,
}

/// Times `call`, which queues work on `stream`.
pub(crate) fn measure(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    effort: Effort,
    cache: Cache,
    mut call: impl FnMut() -> Result<()>,
) -> Result<Timing> {
    let mut flush = match cache {
        Cache::Flushed => {
            let bytes = 4 * backend.l2_bytes().max(1 << 20);
            Some(scratch(stream, "the cache flush", bytes)?)
        }
        Cache::AsItIs => None,
    };
    let wait = || {
        stream
            .synchronize()
            .map_err(|e| driver("cuStreamSynchronize", e))
    };
    wait()?;
    let started = std::time::Instant::now();
    call()?;
    wait()?;
    let first_ms = started.elapsed().as_secs_f64() * 1e3;
    let started = std::time::Instant::now();
    call()?;
    wait()?;
    let one = (started.elapsed().as_secs_f64() * 1e3).max(1e-3);
    for _ in 0..(effort.warmup_ms / one).clamp(1.0, effort.most as f64) as usize {
        call()?;
    }
    let n = ((effort.measure_ms / one) as usize).clamp(5, effort.most.max(5));
    let event = || {
        backend
            .context()
            .new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(|e| driver("cuEventCreate", e))
    };
    let mut pairs = Vec::with_capacity(n);
    for _ in 0..n {
        if let Some(flush) = &mut flush {
            stream
                .memset_zeros(flush)
                .map_err(|e| driver("cuMemsetD8Async", e))?;
        }
        let (start, end) = (event()?, event()?);
        start
            .record(stream)
            .map_err(|e| driver("cuEventRecord", e))?;
        call()?;
        end.record(stream).map_err(|e| driver("cuEventRecord", e))?;
        pairs.push((start, end));
    }
    wait()?;
    let samples_ms = pairs
        .iter()
        .map(|(start, end)| {
            start
                .elapsed_ms(end)
                .map(f64::from)
                .map_err(|e| driver("cuEventElapsedTime", e))
        })
        .collect::<Result<_>>()?;
    Ok(Timing {
        samples_ms,
        first_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let timing = |samples: &[f64]| Timing {
            samples_ms: samples.to_vec(),
            first_ms: 0.0,
        };
        assert_eq!(timing(&[3.0, 1.0, 2.0]).median_ms(), 2.0);
        assert_eq!(timing(&[4.0, 1.0, 2.0, 3.0]).median_ms(), 2.5);
        assert!(timing(&[]).median_ms().is_nan());
    }
}
