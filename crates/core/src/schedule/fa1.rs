//! FlashAttention (Dao et al. 2022, algorithm 1): keys outside, rows inside.
//!
//! While a block of keys and values is in fast memory, every block of rows passes by with its O, ℓ
//! and m, which are loaded, joined with what the block of keys gives, normalised and stored again:
//!
//! ```text
//! m' = max(m, m̃)      α = e^(m − m')      β = e^(m̃ − m')
//! ℓ' = αℓ + βℓ̃        O' = (αℓ·O + β·P̃v) / ℓ'
//! ```
//!
//! That is [`merge`](OnlineSoftmax::merge) of the state (m, ℓ, ℓ·O) with the state of the block
//! alone, kept normalised. Here O, ℓ and m are in a workspace of the accumulator type; a last pass
//! takes sinks in and writes out and lse in the types of the call.

use super::head::{Chip, for_each_head};
use super::{BlockSizes, blocks, prepare, transfer};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::inputs::Inputs;
use crate::mask::Live;
use crate::observe::{BlockStatistics, Observer, Operation, Step, Tensor, Transfer};
use crate::online::OnlineSoftmax;
use crate::problem::Problem;
use crate::tile::{TileMath, TileOutput, TileSpec, TileState};
use crate::view::TensorViewMut;

/// The paper's block sizes for a fast memory of `on_chip_elements` numbers (M):
/// B_c = ⌈M/4d⌉ and B_r = min(⌈M/4d⌉, d), and at least 1.
///
/// ```
/// use tilewise_core::schedule::fa1_block_sizes;
/// let sizes = fa1_block_sizes(48 * 1024, 64);
/// assert_eq!((sizes.rows(), sizes.keys()), (64, 192));
/// ```
pub fn fa1_block_sizes(on_chip_elements: usize, head_dim: usize) -> BlockSizes {
    let head_dim = head_dim.max(1);
    let keys = on_chip_elements.div_ceil(head_dim.saturating_mul(4)).max(1);
    BlockSizes {
        rows: keys.min(head_dim),
        keys,
    }
}

/// out and lse of `problem`, with tiles of `sizes`.
///
/// Shapes, and that every element is written, are those of [`fa2::forward`](super::fa2::forward).
///
/// # Errors
/// Those of [`fa2::forward`](super::fa2::forward).
pub fn forward<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    let (gathered, mut outputs) = prepare(problem, inputs, out, lse)?;
    let (problem, inputs) = gathered.posed(inputs);
    let math = TileMath::<T::Acc>::new();
    let mut chip = Chip::<T>::default();
    let mut workspace = Workspace::new(problem.dims().head_dim_v);
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for_each_head(problem, &inputs, |head| {
        let sequence = head.sequence();
        workspace.initialise(sequence.seqlen_q, observer);
        for (j, keys) in blocks(sequence.seqlen_k, sizes.keys()) {
            let mut keys_are_loaded = false;
            for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
                let spec = head.spec(&rows);
                let tile = head.tile(&spec, i, (j, keys.clone()));
                if tile.live == Live::None {
                    observer.skip(&tile);
                    continue;
                }
                if !keys_are_loaded {
                    head.load_k(&mut chip, &keys, observer);
                    head.load_v(&mut chip, &keys, observer);
                    keys_are_loaded = true;
                }
                head.load_q(&mut chip, &rows, observer);
                head.load_modifiers(&mut chip, &tile, observer);
                head.load_keep(&mut chip, &tile, observer);
                let mut state = workspace.load(&spec, observer)?;
                let mut block = math.begin(&spec)?;
                math.absorb(&mut block, head.block(&chip, &tile))?;
                math.merge(&mut state, &block)?;
                head.report_tile(&tile, block.scores(), observer);
                // ℓ·O, α, and β for P̃v; then the normalisation.
                observer.operations(Operation::Rescale, 3 * state.acc().len());
                observer.operations(Operation::Divide, state.acc().len());
                let o = workspace.store(&state, observer);
                observer.step(&Step {
                    tile: &tile,
                    block: Some(BlockStatistics {
                        m: block.m(),
                        l: block.l(),
                        beta: state.beta(),
                    }),
                    alpha: state.alpha(),
                    m: state.m(),
                    l: state.l(),
                    o,
                });
            }
        }
        for (i, rows) in blocks(sequence.seqlen_q, sizes.rows()) {
            let state = workspace.load(&head.spec(&rows), observer)?;
            out.resize(state.acc().len(), T::Acc::default());
            lse.resize(rows.len(), T::Acc::default());
            let output = TileOutput {
                out: &mut out,
                lse: &mut lse,
            };
            math.finish(state, output)?;
            // ℓ·O, and the division by ℓ with the sink in it.
            observer.operations(Operation::Rescale, out.len());
            observer.operations(Operation::Divide, out.len());
            head.report_finish(i, &out, &lse, observer);
            outputs.store(head, &rows, &out, &lse, observer);
        }
        Ok(())
    })
}

/// O, ℓ and m of one head in slow memory.
struct Workspace<F> {
    width: usize,
    o: Vec<F>,
    l: Vec<F>,
    m: Vec<F>,
}

impl<F: Float> Workspace<F> {
    fn new(width: usize) -> Self {
        Workspace {
            width,
            o: Vec::new(),
            l: Vec::new(),
            m: Vec::new(),
        }
    }

    /// O = 0, ℓ = 0, m = −∞.
    fn initialise(&mut self, rows: usize, observer: &mut impl Observer) {
        for (values, len, value) in [
            (&mut self.o, rows * self.width, F::zero()),
            (&mut self.l, rows, F::zero()),
            (&mut self.m, rows, F::neg_infinity()),
        ] {
            values.clear();
            values.resize(len, value);
        }
        for transfer in self.transfers(rows) {
            observer.store(transfer);
        }
    }

    fn load(&self, spec: &TileSpec<F>, observer: &mut impl Observer) -> Result<TileState<F>> {
        let rows = spec.rows();
        for transfer in self.transfers(rows.len()) {
            observer.load(transfer);
        }
        TileState::from_normalised(
            spec,
            &self.m[rows.clone()],
            &self.l[rows.clone()],
            &self.o[rows.start * self.width..rows.end * self.width],
        )
    }

    /// Normalises and stores a block of rows, and gives its O.
    fn store(&mut self, state: &TileState<F>, observer: &mut impl Observer) -> &[F] {
        let rows = state.spec().rows();
        for transfer in self.transfers(rows.len()) {
            observer.store(transfer);
        }
        self.m[rows.clone()].copy_from_slice(state.m());
        self.l[rows.clone()].copy_from_slice(state.l());
        let o = &mut self.o[rows.start * self.width..rows.end * self.width];
        state.normalise_into(o);
        o
    }

    fn transfers(&self, rows: usize) -> [Transfer; 3] {
        [
            transfer::<F>(Tensor::O, rows * self.width),
            transfer::<F>(Tensor::L, rows),
            transfer::<F>(Tensor::M, rows),
        ]
    }
}
