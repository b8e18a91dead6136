//! Counting a run of the core schedules.

use tilewise::core::io_model::{Io, Tally};
use tilewise::core::observe::{Finish, Observer, Operation, Product, Step, Tile, Transfer};
use tilewise::core::schedule::{BlockSizes, fa1, fa2, standard};
use tilewise::half::{bf16, f16};
use tilewise::{
    Algorithm, DType, Dims, Element, Error, Inputs, Options, Problem, Result, TensorView,
};

use crate::output::Outputs;

/// What a run did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    tally: Tally,
    last: Option<Tile>,
    /// Steps after which the next was at other rows and the same keys, and the reverse.
    pub(crate) next_rows: u64,
    pub(crate) next_keys: u64,
    pub(crate) steps: u64,
    /// Factors of a row that a step had: α, and β where a block has statistics of its own.
    pub(crate) factors: u64,
    /// Blocks of rows that were finished, and heads.
    pub(crate) finished: u64,
    pub(crate) heads: u64,
}

/// The run of one algorithm.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    pub(crate) watch: Watch,
    /// What was counted, of all heads.
    pub(crate) io: Io,
    /// Whether one head was run and stands for all.
    pub(crate) one_head: bool,
}

impl Observer for Watch {
    fn load(&mut self, transfer: Transfer) {
        self.tally.load(transfer);
    }

    fn store(&mut self, transfer: Transfer) {
        self.tally.store(transfer);
    }

    fn skip(&mut self, tile: &Tile) {
        self.tally.skip(tile);
    }

    fn product(&mut self, tile: &Tile, product: Product) {
        self.tally.product(tile, product);
    }

    fn operations(&mut self, operation: Operation, count: usize) {
        self.tally.operations(operation, count);
    }

    fn step<F: tilewise::core::Float>(&mut self, step: &Step<'_, F>) {
        self.steps += 1;
        self.factors += 1 + u64::from(step.block.is_some());
        if let Some(last) = &self.last
            && (last.sequence, last.head) == (step.tile.sequence, step.tile.head)
        {
            let rows = last.row_block != step.tile.row_block;
            let keys = last.key_block != step.tile.key_block;
            self.next_rows += u64::from(rows && !keys);
            self.next_keys += u64::from(keys && !rows);
        }
        self.last = Some(step.tile.clone());
    }

    fn finish<F: tilewise::core::Float>(&mut self, finish: &Finish<'_, F>) {
        self.finished += 1;
        self.heads += u64::from(finish.row_block == 0);
    }
}

/// Runs `algorithm` on these inputs and counts.
pub(crate) fn inputs<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
    sizes: BlockSizes,
) -> Result<Counted> {
    let mut outputs = Outputs::<T>::new(problem)?;
    let (out, lse) = outputs.views_mut()?;
    let mut watch = Watch::default();
    match algorithm.resolve() {
        Algorithm::Standard => {
            standard::forward(problem, inputs, sizes, &mut watch, out, Some(lse))
        }
        Algorithm::Fa1 => fa1::forward(problem, inputs, sizes, &mut watch, out, Some(lse)),
        _ => fa2::forward(problem, inputs, sizes, &mut watch, out, Some(lse)),
    }?;
    Ok(Counted {
        io: watch.tally.io().clone(),
        watch,
        one_head: false,
    })
}

/// Runs `algorithm` on a problem without data of its own. What is counted does not depend on values:
/// every element is the same number in memory. With `one_head`, one head of one batch entry is run,
/// and counted as often as there are heads.
pub(crate) fn shape(
    problem: &Problem,
    algorithm: Algorithm,
    sizes: BlockSizes,
    one_head: bool,
) -> Result<Counted> {
    match problem.dtype() {
        DType::F64 => shape_as::<f64>(problem, algorithm, sizes, one_head),
        DType::F32 => shape_as::<f32>(problem, algorithm, sizes, one_head),
        DType::F16 => shape_as::<f16>(problem, algorithm, sizes, one_head),
        DType::BF16 => shape_as::<bf16>(problem, algorithm, sizes, one_head),
        other => Err(Error::unsupported("tilewise", format!("dtype {other}"))),
    }
}

fn shape_as<T: Element>(
    problem: &Problem,
    algorithm: Algorithm,
    sizes: BlockSizes,
    one_head: bool,
) -> Result<Counted> {
    let whole = *problem.dims();
    let mut options: Options = problem.options().clone();
    let mut dims = whole;
    if one_head {
        dims = Dims {
            batch: whole.batch.min(1),
            num_heads: whole.num_heads.min(1),
            num_kv_heads: whole.num_kv_heads.min(1),
            ..whole
        };
        // Values of one head: they change nothing that is counted.
        let first = |values: &[f32]| values.iter().take(dims.num_heads).copied().collect();
        let slopes: Option<Vec<f32>> = options.get_alibi_slopes().map(first);
        options = options.alibi_slopes(slopes);
    }
    let element = [T::default()];
    let tensor = |heads, rows, width| {
        let strides = [0; 4];
        TensorView::from_strides(&element, [dims.batch, heads, rows, width], strides, 0)
    };
    let given = Inputs::new(
        tensor(dims.num_heads, dims.seqlen_q, dims.head_dim)?,
        tensor(dims.num_kv_heads, dims.seqlen_k, dims.head_dim)?,
        tensor(dims.num_kv_heads, dims.seqlen_k, dims.head_dim_v)?,
    );
    let problem = Problem::new(&given, &options)?;
    let mut counted = inputs(&problem, &given, algorithm, sizes)?;
    if one_head {
        counted.io = counted
            .io
            .repeated(whole.batch as u128 * whole.num_heads as u128);
        counted.one_head = true;
    }
    Ok(counted)
}
