//! The backward pass: FlashAttention-2's (Dao 2023, algorithm 2), keys outside and rows inside, with
//! five products a tile.
//!
//! * `kernel`: what it adds to the tile kernels of the forward pass.
//! * `call`: one call; sizes of tiles.
//! * `rows`: a tile of query rows with all that is made of it once: q and dO packed both ways, L, Δ
//!   and dQ while it is summed up.
//! * `keys`: a tile of keys, its dK and dV, and the step that a tile of rows takes with it.
//! * `pairs`: that step where the processor multiplies pairs of bf16.
//! * `fa2`: the order of work over threads.
//! * `bias`: dbias, which has an order of its own.
//! * `baseline`: `standard` and `fa1`, on core's schedules.
//!
//! dK and dV of a tile of keys are summed up by one worker, over the query heads of the group too. dQ
//! of a tile of rows is added to by the tiles of keys in their order, each waiting for the one before
//! the last: there are two sums, taken in turns, that become one in the end. No locks, and the same
//! bits whatever the number of threads.

mod baseline;
mod bias;
mod call;
mod fa2;
pub(crate) mod kernel;
mod keys;
mod pairs;
mod rows;
mod target;

use tilewise_core::{
    Algorithm, BackwardInputs, BackwardReport, Error, GradientsMut, Problem, Result, gather,
};

use crate::backend::CpuBackend;
use crate::kernel::table::CpuElement;
use call::{Call, Sizes};

/// The gradients of one call; see [`tilewise_core::Backend::backward`].
pub(crate) fn backward<T: CpuElement>(
    backend: &CpuBackend,
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    algorithm: Algorithm,
    gradients: GradientsMut<'_, T>,
) -> Result<BackwardReport> {
    // The kernels read through raw pointers, up to where `problem` says: it must be the tensors'.
    problem.expect_posed(&inputs.problem(problem.options())?)?;
    gradients.check(problem, &inputs.inputs)?;
    let gathered = gather(problem, &inputs.inputs)?;
    let given = BackwardInputs {
        inputs: gathered.inputs(&inputs.inputs),
        ..*inputs
    };
    let algorithm = algorithm.resolve();
    let isa = match algorithm {
        Algorithm::Fa2 => {
            let call = Call::new(backend, gathered.problem(), &given);
            fa2::backward(&call, gradients)?;
            backend.isa().name()
        }
        Algorithm::Standard | Algorithm::Fa1 => {
            baseline::backward(gathered.problem(), &given, algorithm, gradients)?;
            "portable"
        }
        other => return Err(Error::unsupported("cpu", format!("algorithm {other}"))),
    };
    Ok(BackwardReport {
        algorithm,
        isa: isa.into(),
    })
}

/// Memory besides inputs and outputs, an upper estimate.
pub(crate) fn workspace_bytes<T: CpuElement>(
    backend: &CpuBackend,
    problem: &Problem,
    algorithm: Algorithm,
) -> u64 {
    match algorithm.resolve() {
        Algorithm::Fa2 => {
            let sizes = Sizes::new::<T>(backend, problem);
            fa2::workspace_bytes::<T>(&sizes, problem)
        }
        other => baseline::workspace_bytes::<T>(problem, other),
    }
}
