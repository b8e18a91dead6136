//! What the device could do at most: the denominators of every share that is stated of its kernels.
//!
//! Loops of one instruction from registers alone, and streams through device memory (`ceilings.cu`),
//! timed by CUDA events like the calls that they stand beside.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use tilewise_core::{Algorithm, DType, Problem, Result};

use crate::backend::CudaBackend;
use crate::backward::{self, Sums};
use crate::bench::{self, Effort};
use crate::kernels::{Variant, ceilings as kernels, dtype_code, hopper};
use crate::ops::{self, address, scratch};
use crate::raw::Args;

/// Blocks a multiprocessor of the loops over registers: eight warps each.
const BLOCKS: u64 = 4;
/// Rounds of a loop over registers: some tenths of a millisecond on the fastest devices.
const ROUNDS: u64 = 4096;
/// Device memory that a stream goes through, in second-level caches: what stays in one from one
/// launch to the next is little of it.
const CACHES: u64 = 24;
/// And at least.
const LEAST_BYTES: u64 = 256 << 20;

/// Long enough that some launch finds the device at its full pace.
const EFFORT: Effort = Effort {
    warmup_ms: 2.0,
    measure_ms: 6.0,
    most: 20,
};

/// An instruction that makes products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Instruction {
    /// `mma.sync` of a warp, m16n8k16, of f32 m16n8k8 in tf32.
    Mma,
    /// `wgmma` of four warps, m64n128k16, of f32 m64n128k8 in tf32: compute capability 9.0.
    Wgmma,
    /// `fma` of a thread in f32.
    Fma,
}

/// Products as a kernel makes them: by which instruction, of which type, and how many of them stand
/// for one product of the problem's own type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Products {
    /// By what.
    pub instruction: Instruction,
    /// f16, bf16 or, as tf32, f32.
    pub dtype: DType,
    /// Three where f32 is taken apart into a high and a low half.
    pub each: u32,
}

impl Products {
    /// One product of `dtype` by `instruction`.
    pub fn plain(instruction: Instruction, dtype: DType) -> Products {
        Products {
            instruction,
            dtype,
            each: 1,
        }
    }

    /// What a call of `algorithm` on device memory makes of `problem`: of [`ops::forward`], or, where dQ is
    /// summed up in some way, of [`backward::backward`]. Where several kernels make gradients, what the one
    /// of dK and dV makes.
    pub fn of(
        backend: &CudaBackend,
        problem: &Problem,
        algorithm: Algorithm,
        gradients: Option<Sums>,
    ) -> Products {
        let warpgroups = match gradients {
            Some(sums) => backward::by_warpgroups(backend, problem, algorithm, sums),
            None => crate::hopper::tile_of(backend, problem, algorithm).is_some(),
        };
        Self::by(problem, algorithm, gradients.is_some(), warpgroups)
    }

    fn by(problem: &Problem, algorithm: Algorithm, backward: bool, warpgroups: bool) -> Products {
        let pairs = !backward
            && ops::splits(problem, algorithm)
            && !crate::decode::serves(problem, algorithm);
        let dtype = problem.dtype();
        Products {
            instruction: match warpgroups {
                true => Instruction::Wgmma,
                false => Instruction::Mma,
            },
            dtype: if pairs { DType::F16 } else { dtype },
            each: if dtype == DType::F32 { 3 } else { 1 },
        }
    }

    /// Multiply-adds a second in FLOP/s (two each), counted as products of the problem's own type.
    ///
    /// # Errors
    /// [`Error::Unavailable`](tilewise_core::Error::Unavailable) where the device lacks the
    /// instruction, the driver is too old to time with or the kernel can neither be found nor
    /// compiled; failures of the driver.
    pub fn rate(&self, backend: &CudaBackend) -> Result<f64> {
        let code = dtype_code(self.dtype);
        // Depth of a product: 32 bytes of a row, of which tf32 takes four each.
        let depth = if code == 2 { 8 } else { 16 };
        let warps = u64::from(kernels::THREADS) / 32;
        let (variant, flops) = match self.instruction {
            Instruction::Mma => {
                let flops = warps * kernels::CHAINS * 2 * 16 * 8 * depth;
                (kernels::mma(self.dtype), flops)
            }
            Instruction::Wgmma => {
                if backend.compute() != hopper::COMPUTE {
                    return Err(crate::error::unavailable(
                        crate::NAME,
                        "wgmma is an instruction of compute capability 9.0",
                    ));
                }
                let flops = warps / 4 * kernels::CHAINS * 2 * 64 * 128 * depth;
                (kernels::wgmma(self.dtype), flops)
            }
            Instruction::Fma => {
                let flops = u64::from(kernels::THREADS) * kernels::FMAS * 2;
                (kernels::fma(), flops)
            }
        };
        let blocks = BLOCKS * backend.multiprocessors();
        let args = Args {
            ld_s: ROUNDS as i64,
            // Factor and summand of the FMAs: neither may be known to the compiler.
            scale: 1.000_001,
            softcap: 1e-7,
            ..Args::default()
        };
        let seconds = backend.on_stream(|stream| time(backend, stream, &variant, blocks, args))?;
        Ok((blocks * ROUNDS * flops) as f64 / seconds / f64::from(self.each))
    }
}

/// As in `mma.sync f16 / 3`: three f16 products make one of f32.
impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = match self.dtype {
            DType::F32 if self.instruction != Instruction::Fma => "tf32",
            dtype => dtype.name(),
        };
        let instruction = match self.instruction {
            Instruction::Mma => "mma.sync",
            Instruction::Wgmma => "wgmma",
            Instruction::Fma => "FFMA",
        };
        write!(f, "{instruction} {dtype}")?;
        match self.each {
            1 => Ok(()),
            each => write!(f, " / {each}"),
        }
    }
}

/// Reading device memory, in bytes a second.
///
/// # Errors
/// As [`Products::rate`], and [`Error::OutOfMemory`](tilewise_core::Error::OutOfMemory).
pub fn read(backend: &CudaBackend) -> Result<f64> {
    stream(backend, &kernels::read(), false)
}

/// Copying within device memory, in bytes a second, those read and those written.
///
/// # Errors
/// As [`read`].
pub fn copy(backend: &CudaBackend) -> Result<f64> {
    stream(backend, &kernels::copy(), true)
}

fn stream(backend: &CudaBackend, variant: &Variant, writes: bool) -> Result<f64> {
    let step = kernels::STREAM * 16;
    let bytes = (CACHES * backend.l2_bytes()).max(LEAST_BYTES) / step * step;
    // Several times as many as fit at once: those that are served sooner take more.
    let blocks = 32 * backend.multiprocessors();
    let seconds = backend.on_stream(|stream| {
        let memory = || scratch(stream, "bandwidth measurement", bytes);
        let mut from = memory()?;
        let mut to = if writes { Some(memory()?) } else { None };
        // Memory that was never written may be read at another rate.
        stream
            .memset_zeros(&mut from)
            .map_err(|e| crate::error::driver("cuMemsetD8Async", e))?;
        let mut args = Args {
            ld_s: (bytes / 16) as i64,
            ..Args::default()
        };
        args.q.ptr = address(&mut from, stream);
        if let Some(to) = &mut to {
            args.o.ptr = address(to, stream);
        }
        let seconds = time(backend, stream, variant, blocks, args);
        drop((from, to));
        seconds
    })?;
    Ok(bytes as f64 * if writes { 2.0 } else { 1.0 } / seconds)
}

/// Least time of a launch in seconds: what is asked for is what the device can do, not what it does
/// when other work has just made it hot.
fn time(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    variant: &Variant,
    blocks: u64,
    mut args: Args,
) -> Result<f64> {
    bench::timeable(backend)?;
    // Where a result would go that no run gives.
    let mut sink = scratch(stream, "a measurement's result", 16)?;
    args.acc = address(&mut sink, stream);
    let timing = bench::measure(backend, stream, EFFORT, bench::Cache::AsItIs, || {
        ops::launch(backend, stream, variant, (blocks, 1), &args)
    })?;
    drop(sink);
    let least = timing.samples_ms.iter().copied().fold(f64::NAN, f64::min);
    Ok(least / 1e3)
}

#[cfg(test)]
mod tests {
    use tilewise_core::{Dims, Options};

    use super::*;

    fn posed(dtype: DType, seqlen_q: usize, head_dim: usize) -> Problem {
        let dims = Dims {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            seqlen_q,
            seqlen_k: 512,
            head_dim,
            head_dim_v: head_dim,
        };
        Problem::dense(dims, dtype, &Options::new()).unwrap()
    }

    fn products(dtype: DType, seqlen_q: usize, head_dim: usize, algorithm: Algorithm) -> String {
        let problem = posed(dtype, seqlen_q, head_dim);
        Products::by(&problem, algorithm, false, false).to_string()
    }

    #[test]
    fn a_ceiling_is_named_by_what_the_kernels_do() {
        let of = products;
        assert_eq!(of(DType::BF16, 512, 128, Algorithm::Fa2), "mma.sync bf16");
        assert_eq!(of(DType::F16, 512, 128, Algorithm::Fa1), "mma.sync f16");
        // f32: pairs of f16 in fa2, three tf32 products elsewhere.
        assert_eq!(of(DType::F32, 512, 64, Algorithm::Fa2), "mma.sync f16 / 3");
        assert_eq!(of(DType::F32, 512, 64, Algorithm::Fa1), "mma.sync tf32 / 3");
        assert_eq!(
            of(DType::F32, 512, 512, Algorithm::Fa2),
            "mma.sync tf32 / 3"
        );
        assert_eq!(of(DType::F32, 1, 64, Algorithm::Fa2), "mma.sync tf32 / 3");
        let problem = posed(DType::BF16, 512, 128);
        let hopper = Products::by(&problem, Algorithm::Fa2, false, true);
        assert_eq!(hopper.to_string(), "wgmma bf16");
        let plain = Products::plain(Instruction::Fma, DType::F32);
        assert_eq!(plain.to_string(), "FFMA f32");
        let plain = Products::plain(Instruction::Wgmma, DType::F32);
        assert_eq!(plain.to_string(), "wgmma tf32");
    }
}
