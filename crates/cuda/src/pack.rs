//! Inputs whose rows no kernel can move sixteen bytes at a time, laid out anew on the device.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use tilewise_core::{DType, Result};

use crate::backend::CudaBackend;
use crate::kernels::pack;
use crate::ops::{address, launch_grid_stride, scratch};
use crate::raw::{Args, Tensor};
use crate::view;

/// `tensor` as it lies if its rows are aligned; else a copy whose rows are, and the memory that holds it.
/// Axes of stride 0 stay so.
pub(crate) fn aligned(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    tensor: Tensor,
    shape: [usize; 4],
    dtype: DType,
) -> Result<(Tensor, Option<CudaSlice<u8>>)> {
    if shape.contains(&0) || view::aligned(&tensor, shape, dtype) {
        return Ok((tensor, None));
    }
    anew(backend, stream, tensor, shape, dtype, true)
}

/// A copy of `tensor` with aligned rows and no gaps; axes of stride 0 stay so if `broadcast` says so, or
/// are written out.
pub(crate) fn anew(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    tensor: Tensor,
    shape: [usize; 4],
    dtype: DType,
    broadcast: bool,
) -> Result<(Tensor, Option<CudaSlice<u8>>)> {
    let kept = |stride: i64, n: usize| if broadcast && stride == 0 { 1 } else { n };
    let (b, h, s) = (
        kept(tensor.sb, shape[0]),
        kept(tensor.sh, shape[1]),
        kept(tensor.ss, shape[2]),
    );
    let row = shape[3].next_multiple_of(16 / dtype.size());
    let elements = b as u64 * h as u64 * s as u64 * row as u64;
    let mut memory = scratch(
        stream,
        "an input laid out anew",
        elements * dtype.size() as u64,
    )?;
    let step = |n: usize, stride: usize| if n == 1 { 0 } else { stride as i64 };
    let packed = Tensor {
        ptr: address(&mut memory, stream),
        sb: step(b, h * s * row),
        sh: step(h, s * row),
        ss: step(s, row),
        sd: 1,
    };
    let args = Args {
        q: tensor,
        o: packed,
        batch: b as i32,
        heads: h as i32,
        sq: s as i32,
        d: shape[3] as i32,
        ld_s: row as i64,
        ..Args::default()
    };
    launch_grid_stride(
        backend,
        stream,
        &pack::variant("tw_pack", dtype),
        elements,
        &args,
    )?;
    Ok((packed, Some(memory)))
}
