//! k and v of f32 as pairs of f16, made once for a call of `fa2`: see `pairs.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, result};
use tilewise_core::{Problem, Result};

use crate::backend::CudaBackend;
use crate::error::{driver, unsupported};
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
    k_rows * (columns + columns_v + 2) * 4 + d.batch as u64 * d.num_kv_heads as u64 * 4
}

/// Bytes of k and v from which on row blocks begin while pairs of later heads are made: it costs clearing
/// the heads' counts.
const BESIDE: u64 = 16 << 20;

/// Puts pairs of k and v, with their factors, in their place in `args`; the memory that holds them
/// must live until the launch that reads it is queued.
///
/// Where `args.s` is not 0 afterwards, that launch may begin before the pairs are made
/// ([`raw::launch_dependent`](crate::raw::launch_dependent)): its blocks wait until `args.p` pieces of their head are.
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
    // Two halves of two bytes an element, then the factors, then the heads' counts.
    let rows = [(k_rows, columns), (v_rows, columns_v)];
    let elements = rows
        .iter()
        .map(|&(rows, columns)| rows * columns as u64 * 4);
    let elements = elements.sum::<u64>();
    let counts = batch as u64 * kv_heads as u64 * 4;
    let whole = (batch * kv_heads * sk) as u64;
    let beside = backend.launches_dependents()
        && !spec.sequences
        && k_rows.min(v_rows) == whole
        && elements >= BESIDE;
    let bytes = elements + (k_rows + v_rows) * 4 + counts;
    let mut memory = scratch(stream, "k and v as pairs of f16", bytes)?;
    let mut at = address(&mut memory, stream);
    for (tensor, (rows, columns)) in [&mut k, &mut v].into_iter().zip(rows) {
        tensor.ptr = at;
        at += rows * columns as u64 * 4;
    }
    let factors = [at, at + k_rows * 4];
    let at_counts = factors[1] + v_rows * 4;
    let padded = spec.padded.max(spec.padded_v);
    let variant = split::variant(padded, backend.shared_limit());
    let pieces = |rows: u64| rows.div_ceil(u64::from(split::piece_rows(padded)));
    let of_head = 2 * pieces(sk as u64);
    let all = batch as u64 * kv_heads as u64 * of_head;
    if all > i32::MAX as u64 / 2 {
        return Err(unsupported(format!("{all} pieces of k and v in f32")));
    }
    let blocks = all.div_ceil(u64::from(variant.threads / 32));
    let blocks = blocks.clamp(1, backend.multiprocessors());
    // All blocks make what the first row blocks ask for; then most of them leave their place to more of those.
    let (shared, stay) = if beside {
        let head = (elements / (counts / 4)).max(1);
        let first = (backend.l2_bytes() * 2 / 5 / head).max(1) * of_head;
        (first.min(all), (blocks / 32 * 8).max(1))
    } else {
        (all, blocks)
    };
    let making = Args {
        bias: k,
        mask: v,
        l: factors[0],
        acc: factors[1],
        s: if beside { at_counts } else { 0 },
        ld_s: columns as i64,
        ld_p: columns_v as i64,
        row0: shared as i32,
        rows: stay as i32,
        ..*args
    };
    if beside {
        // SAFETY: the scratch memory has that many bytes there, and the work that used it before has passed
        // on this stream.
        unsafe { result::memset_d8_async(at_counts, 0, counts as usize, stream.cu_stream()) }
            .map_err(|e| driver("clearing counts of pairs", e))?;
        (args.s, args.p) = (at_counts, of_head);
    }
    launch(backend, stream, &variant, (blocks, 1), &making)?;
    (args.k, args.v) = (k, v);
    [args.l, args.acc] = factors;
    Ok(memory)
}
