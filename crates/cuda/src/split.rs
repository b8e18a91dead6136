//! k and v of f32 as pairs of f16, made once for a call of `fa2`: see `pairs.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use tilewise_core::{Problem, Result};

use crate::backend::CudaBackend;
use crate::kernels::{Spec, pad, split};
use crate::ops::{address, launch, scratch};
use crate::raw::{Args, Tensor};

/// Rows of a tensor as pairs: `columns` of the high parts, then as many of the low ones. Axes that the
/// source repeats (stride 0) are made once.
fn layout(from: &Tensor, shape: [usize; 3], columns: usize) -> (Tensor, u64) {
    let axes = [
        (from.sb, shape[0]),
        (from.sh, shape[1]),
        (from.ss, shape[2]),
    ];
    let [b, h, s] = axes.map(|(stride, n)| if stride == 0 { 1 } else { n });
    let row = 2 * columns as i64;
    let step = |(stride, n): (i64, usize), rows: usize| {
        // The kernel asks the stride whether rows are repeated; an axis of one row has none to tell.
        if stride == 0 && n > 1 {
            0
        } else {
            rows as i64 * row
        }
    };
    let to = Tensor {
        ptr: 0,
        sb: step(axes[0], h * s),
        sh: step(axes[1], s),
        ss: step(axes[2], 1),
        sd: 1,
    };
    (to, b as u64 * h as u64 * s as u64)
}

/// Bytes that the pairs of a problem take, where no input repeats rows.
pub(crate) fn bytes(problem: &Problem) -> u64 {
    let d = problem.dims();
    let padded = |columns: usize| pad(columns).map_or(0, u64::from);
    let (columns, columns_v) = (padded(d.head_dim), padded(d.head_dim_v));
    let k_rows = d.batch as u64 * d.num_kv_heads as u64 * d.seqlen_k as u64;
    k_rows * (columns + columns_v + 2) * 4
}

/// Puts pairs of k and v, with their factors, in their place in `args`; the memory that holds them
/// must live until the launch that reads it is queued.
pub(crate) fn pairs(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    args: &mut Args,
    spec: &Spec,
) -> Result<CudaSlice<u8>> {
    let [batch, heads, sk] = [args.batch, args.heads, args.sk].map(|n| n as usize);
    let kv_heads = heads / args.group_size as usize;
    let (columns, columns_v) = (spec.padded as usize, spec.padded_v as usize);
    let (mut k, k_rows) = layout(&args.k, [batch, kv_heads, sk], columns);
    let (mut v, v_rows) = layout(&args.v, [batch, kv_heads, sk], columns_v);
    // Two halves of two bytes an element, then the factors.
    let rows = [(k_rows, columns), (v_rows, columns_v)];
    let elements = rows
        .iter()
        .map(|&(rows, columns)| rows * columns as u64 * 4);
    let bytes = elements.sum::<u64>() + (k_rows + v_rows) * 4;
    let mut memory = scratch(stream, "k and v as pairs of f16", bytes)?;
    let mut at = address(&mut memory, stream);
    for (tensor, (rows, columns)) in [&mut k, &mut v].into_iter().zip(rows) {
        tensor.ptr = at;
        at += rows * columns as u64 * 4;
    }
    let factors = [at, at + k_rows * 4];
    let making = Args {
        bias: k,
        mask: v,
        l: factors[0],
        acc: factors[1],
        ld_s: columns as i64,
        ld_p: columns_v as i64,
        ..*args
    };
    // Eight threads a row; each of the two tensors has its own blocks.
    let blocks = (k_rows.max(v_rows) * 8).div_ceil(256);
    let blocks = blocks.clamp(1, 132 * 8);
    let variant = split::variant(spec.padded.max(spec.padded_v));
    launch(backend, stream, &variant, (blocks, 2), &making)?;
    (args.k, args.v) = (k, v);
    [args.l, args.acc] = factors;
    Ok(memory)
}
