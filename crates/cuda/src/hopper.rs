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
    // The copy engine knows no rows without a column.
    let none = dims.head_dim.min(dims.head_dim_v) == 0;
    // By measurement: the portable kernel's softmax keeps more warps busy where products are small.
    let slopes = problem.options().get_alibi_slopes().is_some();
    let slopes_alone = slopes && !problem.has_bias() && !problem.has_mask();
    let small = slopes_alone && dims.head_dim.max(dims.head_dim_v) <= 64;
    if wide || none || small || !possible(backend) {
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

/// What the copy engine brings at a time: so many rows, and columns of a type, swizzled within as many
/// bytes as a row of the box has.
#[derive(Clone, Copy, Debug)]
struct Boxes {
    rows: u32,
    columns: u32,
    data: sys::CUtensorMapDataType,
    bytes: u64,
}

impl Boxes {
    /// Panels of 64 columns of f16 or bf16.
    fn panels(dtype: DType, rows: u32) -> Boxes {
        Boxes {
            rows,
            columns: 64,
            data: match dtype {
                DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            },
            bytes: 2,
        }
    }

    /// Bytes of 64 or 128 keys.
    fn bytes(rows: u32, keys: u32) -> Boxes {
        Boxes {
            rows,
            columns: keys,
            data: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            bytes: 1,
        }
    }
}

/// The map of a `[batch, heads, seqlen, head_dim]` tensor for boxes of `rows` rows and 64 columns.
pub(crate) fn map(
    name: &'static str,
    tensor: &Tensor,
    shape: [usize; 4],
    dtype: DType,
    rows: u32,
) -> Result<TensorMap> {
    map_of(name, tensor, shape, Boxes::panels(dtype, rows))
}

/// The map of a tensor of four axes.
fn map_of(
    name: &'static str,
    tensor: &Tensor,
    shape: [usize; 4],
    boxes: Boxes,
) -> Result<TensorMap> {
    let [b, h, s, d] = shape.map(|n| n as u64);
    // The stride of an axis of one counts for nothing but must be a multiple of 16 bytes.
    let stride = |stride: i64, n: u64| {
        if n > 1 {
            stride as u64 * boxes.bytes
        } else {
            16
        }
    };
    let dims = [d, s, h, b];
    let strides = [
        stride(tensor.ss, s),
        stride(tensor.sh, h),
        stride(tensor.sb, b),
    ];
    let swizzle = match u64::from(boxes.columns) * boxes.bytes {
        64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let mut map = TensorMap::default();
    // SAFETY: every array has as many entries as the rank says, the map is 128 bytes at a multiple of
    // 128, and the call only writes there: the address is for the device.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            boxes.data,
            4,
            tensor.ptr as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            [boxes.columns, boxes.rows, 1, 1].as_ptr(),
            [1; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|e| driver(&format!("cuTensorMapEncodeTiled of {name}"), e))?;
    Ok(map)
}

/// The shape of bias or mask with axes of one where all share it (stride 0), if the copy engine can bring
/// tiles of it as it lies: elements side by side, rows at multiples of 16 bytes.
fn tiles(tensor: &Tensor, full: [usize; 4], bytes: i64) -> Option<[usize; 4]> {
    let strides = [tensor.sb, tensor.sh, tensor.ss];
    let walks = |stride: i64| (0..1 << 39).contains(&stride) && stride * bytes % 16 == 0;
    if full.contains(&0)
        || tensor.ptr == 0
        || !tensor.ptr.is_multiple_of(16)
        || tensor.sd != 1
        || !strides.into_iter().all(walks)
    {
        return None;
    }
    let own = |stride: i64, n: usize| if stride == 0 { 1 } else { n };
    Some([
        own(tensor.sb, full[0]),
        own(tensor.sh, full[1]),
        own(tensor.ss, full[2]),
        full[3],
    ])
}

/// Row blocks times columns up to which what lies between two blocks of a multiprocessor weighs more than
/// that a row block is asked for before the one ahead of it is done; by measurement on an H200.
const BRIEF: u64 = 4096;

/// How row blocks are given out. No bit of a row depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    /// Blocks of the launch. As many as there are multiprocessors stay and take one row block after
    /// another, whose loads and stores then overlap; as many as there are row blocks are given out by the
    /// device.
    grid: u64,
    /// Row blocks.
    units: u64,
    /// Blocks that stay ask for the next one, the longest first, when they have room for it; else their
    /// turns are known beforehand.
    asks: bool,
}

impl Walk {
    fn of(args: &Args, spec: &Spec, multiprocessors: u64) -> Walk {
        let units = args.row_blocks as u64 * args.pairs as u64;
        let alike = spec.mask == Mask::Full && !spec.sequences;
        let brief = args.row_blocks as u64 * u64::from(spec.padded) <= BRIEF;
        let stay = alike || brief || spec.sequences;
        let grid = if stay {
            units.min(multiprocessors)
        } else {
            units
        };
        Walk {
            grid,
            units,
            asks: !alike && units > grid,
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
    let dims = problem.dims();
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    // Each warpgroup has a tile of its own, or of the one row that all share.
    let rows = |tensor: &Tensor| if tensor.ss == 0 { 1 } else { 64 };
    let (mut bias, mut mask, mut tiled) = (q, q, 0);
    if let Some(shape) = tiles(&args.bias, full, 2) {
        let boxes = Boxes::panels(dtype, rows(&args.bias));
        bias = map_of("bias", &args.bias, shape, boxes)?;
        tiled |= 1;
    }
    if let Some(shape) = tiles(&args.mask, full, 1) {
        let boxes = Boxes::bytes(rows(&args.mask), tile.keys);
        mask = map_of("mask", &args.mask, shape, boxes)?;
        tiled |= 2;
    }
    let walk = Walk::of(&args, spec, backend.multiprocessors());
    let known = backend.known();
    let turns = walk.asks.then(|| known.counters(stream)).transpose()?;
    let args = HopperArgs {
        q,
        k,
        v,
        bias,
        mask,
        forward: args,
        turns: turns.as_ref().map_or(0, |turns| turns.ptr()),
        units: walk.units as i32,
        tiled,
    };
    ops::launch(backend, stream, variant, (walk.grid, 1), &args)?;
    if let Some(turns) = turns {
        known.counted(turns);
    }
    drop(anew);
    Ok(())
}

/// How many pairs go together of `most` whose K and V stay in the second-level cache. Where row blocks are
/// alike, no more than run at once: K and V of the next ones are then fetched from memory all the while, not
/// those of a whole group in its first round alone. By measurement on an H200.
fn together(most: i32, row_blocks: i32, mask: Mask, multiprocessors: u64) -> i32 {
    match mask {
        Mask::Full => (multiprocessors as i32 / row_blocks.max(1)).clamp(1, most.max(1)),
        _ => most,
    }
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
    let most = ops::pairs_per_group(problem, args.sk as usize, backend.l2_bytes());
    let most = together(most, args.row_blocks, spec.mask, backend.multiprocessors());
    // One pair that fills its part of the cache alone: two would read more from memory than an even end saves.
    let at_a_time = if most == 1 {
        0
    } else {
        backend.multiprocessors()
    };
    ops::group(&mut args, most, spec.mask, at_a_time);
    run(backend, stream, problem, args, spec, kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// setmaxnreg gives out what a launch starts with, the same number of registers for each thread: a
    /// warpgroup that asks for more waits for ever.
    #[test]
    fn registers_that_change_hands_are_those_of_the_launch() {
        for head_dim in crate::kernels::PADDED {
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
    fn pairs_go_together_as_they_run_at_once() {
        assert_eq!(together(96, 4, Mask::Full, 132), 33);
        assert_eq!(together(20, 4, Mask::Full, 132), 20);
        // Longer ones than there are multiprocessors for, no keys, no rows.
        assert_eq!(together(3, 200, Mask::Full, 132), 1);
        assert_eq!(together(0, 4, Mask::Full, 132), 1);
        assert_eq!(together(8, 0, Mask::Full, 132), 8);
        // Under a diagonal the longest of many go first.
        assert_eq!(together(96, 4, Mask::Upper, 132), 96);
        assert_eq!(together(96, 4, Mask::Band, 132), 96);
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
        let walk = |grid, units, asks| Walk { grid, units, asks };
        // Alike: rounds over the multiprocessors, or fewer blocks than there are.
        assert_eq!(of(32, 64, Mask::Full, false), walk(132, 2048, false));
        assert_eq!(of(3, 7, Mask::Full, false), walk(21, 21, false));
        // A diagonal, and sequences of a table: whoever is free, unless each block has one at most.
        assert_eq!(of(4, 512, Mask::Upper, false), walk(132, 2048, true));
        assert_eq!(of(5, 20, Mask::Band, false), walk(100, 100, false));
        assert_eq!(of(9, 16, Mask::Full, true), walk(132, 144, true));
        // Long ones under a diagonal: as the device sees fit.
        assert_eq!(of(128, 16, Mask::Upper, false), walk(2048, 2048, false));
    }
}
