//! The tiles that a forward call's kernels walk: what its traffic by formula is counted in.

use tilewise_core::{Algorithm, BlockSizes, Problem};

use crate::backend::CudaBackend;
use crate::kernels::{fa1, fa2, standard};
use crate::{hopper, ops, sequences};

/// Rows and keys a tile on the device of `backend`.
pub(crate) fn on(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
) -> Option<BlockSizes> {
    let limit = backend.shared_limit();
    if backend.streams(problem) {
        return streamed(problem, algorithm, limit);
    }
    match hopper::tile_of(backend, problem, algorithm) {
        Some(tile) => sizes((tile.rows(), tile.keys)),
        None => of(problem, algorithm, limit, Some(backend.multiprocessors())),
    }
}

/// Within `limit` bytes of shared memory, where there are so many multiprocessors if that is known; of
/// `standard`, the tile of S.
pub(crate) fn of(
    problem: &Problem,
    algorithm: Algorithm,
    limit: u32,
    multiprocessors: Option<u64>,
) -> Option<BlockSizes> {
    let mut spec = ops::plan(problem, 0, problem.dims().seqlen_k).ok()?.spec;
    spec.pairs = ops::splits(problem, algorithm.resolve());
    sizes(match algorithm.resolve() {
        Algorithm::Standard => {
            let tile = standard::scores_tile(&spec, limit)?;
            (tile.rows, tile.columns)
        }
        Algorithm::Fa1 => fa1::tile_of(&spec, limit)?,
        _ => {
            let dims = problem.dims();
            let extent = [dims.seqlen_q as u64, (dims.batch * dims.num_heads) as u64];
            spec.few = !sequences::needed(problem)
                && multiprocessors.is_some_and(|n| fa2::few(&spec, limit, extent, n));
            fa2::tile_of(&spec, limit)?
        }
    })
}

/// Of a running state, which `fa2.cu` keeps whatever the chip, while keys are streamed from the host.
fn streamed(problem: &Problem, algorithm: Algorithm, limit: u32) -> Option<BlockSizes> {
    if algorithm.resolve() != Algorithm::Fa2 {
        return None;
    }
    let spec = ops::plan(problem, 0, problem.dims().seqlen_k).ok()?.spec;
    sizes(fa2::tile_of(&spec, limit)?)
}

fn sizes((rows, keys): (u32, u32)) -> Option<BlockSizes> {
    BlockSizes::new(rows as usize, keys as usize).ok()
}

#[cfg(test)]
mod tests {
    use tilewise_core::{DType, Dims, Options};

    use super::*;

    fn problem(dtype: DType) -> Problem {
        let dims = Dims {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            seqlen_q: 512,
            seqlen_k: 512,
            head_dim: 64,
            head_dim_v: 64,
        };
        Problem::dense(dims, dtype, &Options::new()).unwrap()
    }

    /// The published cut of FA1, and FA2's list.
    #[test]
    fn tiles_are_those_of_the_kernels() {
        let problem = problem(DType::BF16);
        let tile = |algorithm| {
            let sizes = of(&problem, algorithm, 227 << 10, None).unwrap();
            (sizes.rows(), sizes.keys())
        };
        assert_eq!(tile(Algorithm::Fa1), (16, 256));
        assert_eq!(tile(Algorithm::Fa2).0 % 16, 0);
        assert!(tile(Algorithm::Standard).1 >= 32);
        // Four row blocks of 128 rows are few for five multiprocessors.
        let few = |n| of(&problem, Algorithm::Fa2, 227 << 10, Some(n)).unwrap();
        assert_eq!([few(3).rows(), few(5).rows()], [128, 64]);
        assert_eq!(few(3).keys(), few(5).keys());
    }

    /// A running state takes f32 as it is, where a call on device memory takes it apart.
    #[test]
    fn streamed_tiles_are_those_of_the_running_state() {
        let limit = 227 << 10;
        let half = problem(DType::BF16);
        let tile = streamed(&half, Algorithm::Fa2, limit);
        assert_eq!(tile, of(&half, Algorithm::Fa2, limit, None));
        let single = problem(DType::F32);
        let spec = ops::plan(&single, 0, 512).unwrap().spec;
        assert!(!spec.pairs && ops::splits(&single, Algorithm::Fa2));
        let tile = streamed(&single, Algorithm::Fa2, limit).unwrap();
        let kernel = fa2::tile_of(&spec, limit).unwrap();
        assert_eq!((tile.rows() as u32, tile.keys() as u32), kernel);
        assert_eq!(streamed(&single, Algorithm::Fa1, limit), None);
    }
}
