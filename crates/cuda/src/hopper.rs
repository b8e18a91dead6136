//! Host side of `hopper.cu`: the tensor maps that its copy engine works by, and the launch.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, sys};
use tilewise_core::{Algorithm, DType, Error, Problem, Result};

use crate::backend::CudaBackend;
use crate::error::driver;
use crate::kernels::hopper::{self, Tile};
use crate::kernels::{Mask, Spec, Variant, pad};
use crate::ops;
use crate::raw::{Args, HopperArgs, Tensor, TensorMap};
use crate::{decode, pack, sequences};

/// Least driver that fills in tensor maps.
const MAPS_DRIVER: i32 = 12_000;

/// Whether this family's kernels can run on this device, and may.
pub(crate) fn possible(backend: &CudaBackend) -> bool {
    backend.compute() == hopper::COMPUTE
        && backend.driver_version() >= MAPS_DRIVER
        && !backend.portable()
        && backend.modules().has_native()
}

/// The kernel that serves `spec` on this device, if it is this family's. A folder of kernels built ahead
/// for earlier chips alone, or a compiler that knows no others, is no reason to refuse: `fa2.cu` serves
/// then.
pub(crate) fn serves(
    backend: &CudaBackend,
    problem: &Problem,
    spec: &Spec,
) -> Result<Option<(Variant, Tile)>> {
    let dims = problem.dims();
    let wide = pad(dims.head_dim.max(dims.head_dim_v)).is_none();
    if wide || !possible(backend) {
        return Ok(None);
    }
    let lengths = problem.sequences().iter().map(|s| s.seqlen_q);
    let rows = lengths.max().unwrap_or(0);
    let Some(kernel) = hopper::variant(spec, rows, backend.compute(), backend.shared_limit())
    else {
        return Ok(None);
    };
    let found = backend.modules().serves(&kernel.0)?;
    Ok(found.then_some(kernel))
}

/// The tile of this family's kernel, if that is what a call of `algorithm` on device memory runs.
pub(crate) fn tile_of(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
) -> Option<Tile> {
    if algorithm.resolve() != Algorithm::Fa2 || decode::serves(problem, algorithm) {
        return None;
    }
    let mut spec = ops::plan(problem, 0, problem.dims().seqlen_k).ok()?.spec;
    spec.mask = sequences::mask(problem);
    spec.sequences = sequences::needed(problem);
    Some(serves(backend, problem, &spec).ok()??.1)
}

/// A tensor the copy engine can walk, the memory of what had to be laid out anew, and its shape.
pub(crate) fn walkable(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    tensor: Tensor,
    shape: [usize; 4],
    dtype: DType,
) -> Result<(Tensor, Option<CudaSlice<u8>>)> {
    let far = 1i64 << 39;
    let steps = [
        (tensor.sb, shape[0]),
        (tensor.sh, shape[1]),
        (tensor.ss, shape[2]),
    ];
    let walks = |&(stride, n): &(i64, usize)| n <= 1 || (1..far).contains(&stride);
    if shape.contains(&0) || steps.iter().all(walks) {
        return Ok((tensor, None));
    }
    pack::anew(backend, stream, tensor, shape, dtype, false)
}

/// The map of a `[batch, heads, seqlen, head_dim]` tensor for boxes of `rows` rows and 64 columns.
pub(crate) fn map(
    name: &'static str,
    tensor: &Tensor,
    shape: [usize; 4],
    dtype: DType,
    rows: u32,
) -> Result<TensorMap> {
    let size = dtype.size() as u64;
    let [b, h, s, d] = shape.map(|n| n as u64);
    // The stride of an axis of one counts for nothing but must be a multiple of 16 bytes.
    let stride = |stride: i64, n: u64| {
        if n > 1 { stride as u64 * size } else { 16 }
    };
    let dims = [d, s, h, b];
    let strides = [
        stride(tensor.ss, s),
        stride(tensor.sh, h),
        stride(tensor.sb, b),
    ];
    let mut map = TensorMap::default();
    // SAFETY: every array has as many entries as the rank says, the map is 128 bytes at a multiple of
    // 128, and the call only writes there: the address is for the device.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            match dtype {
                DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            },
            4,
            tensor.ptr as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            [64, rows, 1, 1].as_ptr(),
            [1; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|e| driver(&format!("cuTensorMapEncodeTiled of {name}"), e))?;
    Ok(map)
}

/// Row blocks times columns up to which what lies between two blocks of a multiprocessor weighs more than
/// that its share of the work is settled beforehand; by measurement on an H200.
const BRIEF: u64 = 1536;

/// How row blocks are given out. No bit of a row depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    /// Blocks of the launch.
    grid: u64,
    /// What they take one after another.
    units: u64,
    /// A unit is two row blocks, from either end.
    folded: bool,
}

impl Walk {
    /// As many blocks as there are multiprocessors take one unit after another, whose loads and stores
    /// then overlap, where units are alike and fill the rounds; else the device gives each
    /// multiprocessor the next row block when it is free, the longest first.
    fn of(args: &Args, spec: &Spec, multiprocessors: u64) -> Walk {
        let (blocks, pairs) = (args.row_blocks as u64, args.pairs as u64);
        let folded = spec.mask != Mask::Full;
        let units = pairs * if folded { blocks.div_ceil(2) } else { blocks };
        let rounds = units.div_ceil(multiprocessors);
        let full = units * 10 >= rounds * multiprocessors * 9;
        let brief = blocks * u64::from(spec.padded) <= BRIEF;
        if !spec.sequences && (!folded || brief && full) {
            return Walk {
                grid: units.min(multiprocessors),
                units,
                folded,
            };
        }
        Walk {
            grid: blocks * pairs,
            units: blocks * pairs,
            folded: false,
        }
    }
}

/// Row blocks of `args` by `variant`, which [`serves`] gave: `args` names tensors with aligned rows and
/// how many row blocks there are, by table or not.
pub(crate) fn run(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
    (variant, tile): &(Variant, Tile),
) -> Result<()> {
    let dtype = spec.dtype;
    let (q_shape, k_shape, v_shape) = (
        ops::q_shape(problem),
        ops::k_shape(problem),
        ops::v_shape(problem),
    );
    let mut anew = Vec::new();
    let mut walk = |tensor: &mut Tensor, shape| -> Result<(), Error> {
        let (walkable, memory) = walkable(backend, stream, *tensor, shape, dtype)?;
        *tensor = walkable;
        anew.extend(memory);
        Ok(())
    };
    walk(&mut args.q, q_shape)?;
    walk(&mut args.k, k_shape)?;
    walk(&mut args.v, v_shape)?;
    let q = map("q", &args.q, q_shape, dtype, tile.rows())?;
    // Without keys nothing of K and V is fetched.
    let (k, v) = if k_shape.contains(&0) {
        (q, q)
    } else {
        (
            map("k", &args.k, k_shape, dtype, tile.keys)?,
            map("v", &args.v, v_shape, dtype, tile.keys)?,
        )
    };
    let walk = Walk::of(&args, spec, backend.multiprocessors());
    let args = HopperArgs {
        q,
        k,
        v,
        forward: args,
        units: walk.units as i32,
        folded: i32::from(walk.folded),
    };
    ops::launch(backend, stream, variant, (walk.grid, 1), &args)?;
    drop(anew);
    Ok(())
}

/// Row blocks of all pairs, where rows and keys are those of a batch entry.
pub(crate) fn run_dense(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
    kernel: &(Variant, Tile),
) -> Result<()> {
    debug_assert!(!sequences::needed(problem));
    args.row_blocks = (args.sq as u32).div_ceil(kernel.1.rows()) as i32;
    args.pairs_per_group = ops::pairs_per_group(problem, args.sk as usize, backend.l2_bytes());
    run(backend, stream, problem, args, spec, kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// setmaxnreg gives out what a launch starts with, the same number of registers for each thread: a
    /// warpgroup that asks for more waits for ever.
    #[test]
    fn registers_that_change_hands_are_those_of_the_launch() {
        for head_dim in [64, 128, 256] {
            for rows in [1, usize::MAX] {
                let spec = Spec::plain(DType::F16, head_dim);
                let (variant, tile) = hopper::variant(&spec, rows, 90, 227 << 10).unwrap();
                let launched = 65536 / variant.threads / 8 * 8 * variant.threads;
                let [give, take] = tile.registers;
                assert!((give + tile.groups * take) * 128 <= launched, "{tile:?}");
            }
        }
    }

    #[test]
    fn units_are_all_row_blocks_whichever_way_they_are_given_out() {
        let of = |row_blocks, pairs, mask, sequences| {
            let args = Args {
                row_blocks,
                pairs,
                ..Args::default()
            };
            let spec = Spec {
                mask,
                sequences,
                ..Spec::plain(DType::BF16, 128)
            };
            Walk::of(&args, &spec, 132)
        };
        let walk = |grid, units, folded| Walk {
            grid,
            units,
            folded,
        };
        // Alike: rounds over the multiprocessors, or fewer blocks than there are.
        assert_eq!(of(32, 64, Mask::Full, false), walk(132, 2048, false));
        assert_eq!(of(3, 7, Mask::Full, false), walk(21, 21, false));
        // A diagonal: two by two, an odd one in the middle alone.
        assert_eq!(of(4, 512, Mask::Upper, false), walk(132, 1024, true));
        assert_eq!(of(5, 512, Mask::Band, false), walk(132, 1536, true));
        // Long ones, too few to fill the rounds, and sequences of a table: as the device sees fit.
        assert_eq!(of(128, 16, Mask::Upper, false), walk(2048, 2048, false));
        assert_eq!(of(10, 14, Mask::Upper, false), walk(140, 140, false));
        assert_eq!(of(9, 16, Mask::Full, true), walk(144, 144, false));
    }
}
