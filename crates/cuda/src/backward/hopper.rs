//! Host side of `kernels/backward/hopper.cu`.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use tilewise_core::{Problem, Result};

use super::Sums;
use crate::backend::CudaBackend;
use crate::hopper::{map, possible, walkable};
use crate::kernels::backward::fa2;
use crate::kernels::backward::hopper::{self, Tile};
use crate::kernels::backward::widths;
use crate::kernels::{Spec, Variant, pad};
use crate::ops;
use crate::pack;
use crate::raw::{BackwardArgs, BackwardHopperArgs, Tensor};

/// The kernel that serves `spec` on this device, if it is this family's; see
/// [`serves`](crate::hopper::serves) of the forward pass.
pub(super) fn serves(
    backend: &CudaBackend,
    problem: &Problem,
    spec: &Spec,
    sums: Sums,
) -> Result<Option<(Variant, Tile)>> {
    let dims = problem.dims();
    let widest = dims.head_dim.max(dims.head_dim_v);
    // The copy engine knows no rows without a column.
    let served = pad(widest).is_some() && dims.head_dim.min(dims.head_dim_v) > 0;
    if !served || !possible(backend) {
        return Ok(None);
    }
    let (limit, compute) = (backend.shared_limit(), backend.compute());
    let sums = hopper::sums(spec, sums);
    let Some(kernel) = hopper::gradients(spec, limit, compute, sums) else {
        return Ok(None);
    };
    // A folder of kernels built ahead may hold this one and not those that go with it.
    let tile = kernel.1;
    let others = [
        tile.careful(spec, sums),
        fa2::prepare(&tile.laid(spec), limit, compute),
        Some(tile.store_dq(spec)),
    ];
    for variant in std::iter::once(&kernel.0).chain(others.iter().flatten()) {
        if !backend.modules().serves(variant)? {
            return Ok(None);
        }
    }
    Ok(Some(kernel))
}

/// Most columns that a row of dQ's sums has for `problem`, in which a portable kernel has none if they are ordered.
pub(crate) fn sum_columns(backend: &CudaBackend, problem: &Problem, sums: Sums) -> u64 {
    let dims = problem.dims();
    let padded = |head_dim| pad(head_dim).unwrap_or(0);
    let own = padded(dims.head_dim);
    let spec = widths(&Spec {
        padded_v: padded(dims.head_dim_v),
        ..Spec::plain(problem.dtype(), own)
    });
    let own = spec.padded;
    let hopper = hopper::tile(&spec).filter(|_| possible(backend));
    u64::from(match (hopper, sums) {
        (Some(tile), _) => tile.columns(own),
        (None, Sums::Atomic) => own,
        (None, Sums::Ordered) => 0,
    })
}

/// The gradients of dense sequences of one length, which `all` names. Inputs that the copy engine cannot
/// walk are laid out anew.
pub(super) fn run(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    mut all: BackwardArgs,
    spec: &Spec,
    (variant, tile): &(Variant, Tile),
    sums: Sums,
) -> Result<()> {
    let dtype = spec.dtype;
    let forward = &mut all.forward;
    let [b, sq, sk] = [forward.batch, forward.sq, forward.sk].map(|n| n as usize);
    let [d, dv] = [forward.d, forward.dv].map(|n| n as usize);
    let (heads, kv_heads) = (forward.heads as usize, all.kv_heads as usize);
    let mut anew = Vec::new();
    let mut mapped = |name, tensor: &mut Tensor, shape: [usize; 4], rows| {
        for lay in [pack::aligned, walkable] {
            let (there, memory) = lay(backend, stream, *tensor, shape, dtype)?;
            *tensor = there;
            anew.extend(memory);
        }
        map(name, tensor, shape, dtype, rows)
    };
    let q = mapped("q", &mut forward.q, [b, heads, sq, d], tile.rows)?;
    let k = mapped("k", &mut forward.k, [b, kv_heads, sk, d], tile.keys)?;
    let v = mapped("v", &mut forward.v, [b, kv_heads, sk, dv], tile.keys)?;
    let dout = mapped("dout", &mut all.dout, [b, heads, sq, dv], tile.rows)?;
    let args = BackwardHopperArgs {
        q,
        k,
        v,
        dout,
        backward: all,
    };
    let blocks = all.key_blocks as u64 * all.kv_pairs as u64;
    ops::launch(backend, stream, variant, (blocks, 1), &args)?;
    if let Some(careful) = tile.careful(spec, hopper::sums(spec, sums)) {
        // Mostly nothing is left to it: no more blocks than run at a time, which look for some.
        let blocks = blocks.min(backend.multiprocessors());
        ops::launch(backend, stream, &careful, (blocks, 1), &args)?;
    }
    drop(anew);
    Ok(())
}
