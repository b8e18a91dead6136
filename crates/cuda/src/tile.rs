//! The tiles that a forward call's kernels walk: what its traffic by formula is counted in.

use tilewise_core::{Algorithm, BlockSizes, Problem};

use crate::backend::CudaBackend;
use crate::kernels::{fa1, fa2, standard};
use crate::{hopper, ops};

/// As [`of`], on the device of `backend`.
pub(crate) fn on(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
) -> Option<BlockSizes> {
    match hopper::tile_of(backend, problem, algorithm) {
        Some(tile) => BlockSizes::new(tile.rows() as usize, tile.keys as usize).ok(),
        None => of(problem, algorithm, backend.shared_limit()),
    }
}

/// Rows and keys a tile, within `limit` bytes of shared memory; of `standard`, the tile of S.
pub(crate) fn of(problem: &Problem, algorithm: Algorithm, limit: u32) -> Option<BlockSizes> {
    let mut spec = ops::plan(problem, 0, problem.dims().seqlen_k).ok()?.spec;
    spec.pairs = ops::splits(problem, algorithm.resolve());
    let (rows, keys) = match algorithm.resolve() {
        Algorithm::Standard => {
            let tile = standard::scores_tile(&spec, limit)?;
            (tile.rows, tile.columns)
        }
        Algorithm::Fa1 => fa1::tile_of(&spec, limit)?,
        _ => fa2::tile_of(&spec, limit)?,
    };
    BlockSizes::new(rows as usize, keys as usize).ok()
}

#[cfg(test)]
mod tests {
    use tilewise_core::{DType, Dims, Options};

    use super::*;

    /// The published cut of FA1, and FA2's list.
    #[test]
    fn tiles_are_those_of_the_kernels() {
        let dims = Dims {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            seqlen_q: 512,
            seqlen_k: 512,
            head_dim: 64,
            head_dim_v: 64,
        };
        let problem = Problem::dense(dims, DType::BF16, &Options::new()).unwrap();
        let tile = |algorithm| {
            let sizes = of(&problem, algorithm, 227 << 10).unwrap();
            (sizes.rows(), sizes.keys())
        };
        assert_eq!(tile(Algorithm::Fa1), (16, 256));
        assert_eq!(tile(Algorithm::Fa2).0 % 16, 0);
        assert!(tile(Algorithm::Standard).1 >= 32);
    }
}
