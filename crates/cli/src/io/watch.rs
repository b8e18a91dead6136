//! Counting a run of the core schedules.

use tilewise::core::Float;
use tilewise::core::io_model::{Io, Tally};
use tilewise::core::observe::{
    BackwardStep, Finish, GradientFinish, Observer, Operation, Product, Step, Tensor, Tile,
    Transfer,
};
use tilewise::core::schedule::backward::{self, RowStatistics};
use tilewise::core::schedule::{self, BlockSizes};
use tilewise::half::{bf16, f16};
use tilewise::{
    Algorithm, BackwardInputs, DType, Dims, Element, Error, Gradients, Inputs, Options, Problem,
    Result, TensorView,
};

use super::pass::Pass;
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
    /// Blocks of rows that were finished, and heads; backward, blocks of keys and heads.
    pub(crate) finished: u64,
    pub(crate) heads: u64,
    /// Bytes of workspace that were stored before a head's first tile: memory that a call needs besides
    /// its tensors, if all heads run at once.
    pub(crate) workspace: u64,
    /// Whether a tile was seen since something was finished.
    begun: bool,
}

/// What FA1 and FA2 keep in slow memory besides inputs and results.
const WORKSPACE: [Tensor; 5] = [
    Tensor::O,
    Tensor::M,
    Tensor::L,
    Tensor::DQSum,
    Tensor::Delta,
];

/// The run of one algorithm.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    pub(crate) watch: Watch,
    /// What was counted, of all heads.
    pub(crate) io: Io,
    /// How many times what was run stands for: 1 if all of it was.
    pub(crate) repeats: u128,
}

impl Watch {
    fn at(&mut self, tile: &Tile) {
        self.begun = true;
        self.steps += 1;
        if let Some(last) = &self.last
            && (last.sequence, last.head) == (tile.sequence, tile.head)
        {
            let rows = last.row_block != tile.row_block;
            let keys = last.key_block != tile.key_block;
            self.next_rows += u64::from(rows && !keys);
            self.next_keys += u64::from(keys && !rows);
        }
        self.last = Some(tile.clone());
    }
}

impl Observer for Watch {
    fn load(&mut self, transfer: Transfer) {
        self.tally.load(transfer);
    }

    fn store(&mut self, transfer: Transfer) {
        if !self.begun && WORKSPACE.contains(&transfer.tensor) {
            self.workspace += transfer.bytes() as u64;
        }
        self.tally.store(transfer);
    }

    fn skip(&mut self, tile: &Tile) {
        self.tally.skip(tile);
    }

    fn product(&mut self, tile: &Tile, product: Product) {
        self.begun = true;
        self.tally.product(tile, product);
    }

    fn operations(&mut self, operation: Operation, count: usize) {
        self.tally.operations(operation, count);
    }

    fn step<F: Float>(&mut self, step: &Step<'_, F>) {
        self.factors += 1 + u64::from(step.block.is_some());
        self.at(step.tile);
    }

    fn finish<F: Float>(&mut self, finish: &Finish<'_, F>) {
        self.finished += 1;
        self.heads += u64::from(finish.row_block == 0);
        self.begun = false;
    }

    fn backward_step<F: Float>(&mut self, step: &BackwardStep<'_, F>) {
        self.at(step.tile);
    }

    fn gradient_finish<F: Float>(&mut self, finish: &GradientFinish<'_, F>) {
        self.finished += u64::from(finish.tensor == Tensor::DK);
        self.heads += u64::from(finish.tensor == Tensor::DQ && finish.rows.start == 0);
        self.begun = false;
    }
}

/// Runs `algorithm` on these inputs and counts.
pub(crate) fn inputs<T: Element>(
    pass: Pass,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
    sizes: BlockSizes,
) -> Result<Counted> {
    let mut watch = Watch::default();
    match pass {
        Pass::Forward => {
            let mut outputs = Outputs::<T>::new(problem)?;
            let (out, lse) = outputs.views_mut()?;
            let lse = Some(lse);
            schedule::forward(algorithm, problem, inputs, sizes, &mut watch, out, lse)?;
        }
        Pass::Backward => run_backward(problem, inputs, algorithm, sizes, &mut watch)?,
    }
    Ok(Counted {
        io: watch.tally.io().clone(),
        watch,
        repeats: 1,
    })
}

/// What is counted does not depend on values: out, lse and dout are one number each.
fn run_backward<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
    sizes: BlockSizes,
    watch: &mut Watch,
) -> Result<()> {
    let (element, lse) = ([T::default()], [0f32]);
    let shape = problem.dims().out_shape();
    let [b, h, s, _] = shape;
    let out = TensorView::from_strides(&element, shape, [0; 4], 0)?;
    let lse = TensorView::from_strides(&lse, [b, h, s, 1], [0; 4], 0)?;
    let given = BackwardInputs::new(*inputs, out, lse, out);
    let mut gradients = Gradients::filled(problem, inputs, 0.0)?;
    let views = gradients.views_mut()?;
    if algorithm.resolve() == Algorithm::Fa1 {
        // FA1's forward pass leaves m and ℓ: here they are numbers of no meaning.
        let rows = b * h * s;
        let one = <T::Acc as Element>::from_f64(1.0);
        let statistics = RowStatistics {
            m: vec![T::Acc::default(); rows],
            l: vec![one; rows],
        };
        return backward::fa1::backward(problem, &given, &statistics, sizes, watch, views);
    }
    backward::backward(algorithm, problem, &given, sizes, watch, views)
}

/// How often the part that stands for all is repeated: heads; backward, heads of k and v, each with
/// the query heads that share it.
pub(crate) fn repeats(pass: Pass, dims: &Dims) -> usize {
    match pass {
        Pass::Forward => dims.batch * dims.num_heads,
        Pass::Backward => dims.batch * dims.num_kv_heads,
    }
}

/// Runs `algorithm` on a problem without data of its own. What is counted does not depend on values:
/// every element is the same number in memory. With `one_head`, only the part that [`repeats`] says
/// is run, and counted as often.
pub(crate) fn shape(
    pass: Pass,
    problem: &Problem,
    algorithm: Algorithm,
    sizes: BlockSizes,
    one_head: bool,
) -> Result<Counted> {
    match problem.dtype() {
        DType::F64 => shape_as::<f64>(pass, problem, algorithm, sizes, one_head),
        DType::F32 => shape_as::<f32>(pass, problem, algorithm, sizes, one_head),
        DType::F16 => shape_as::<f16>(pass, problem, algorithm, sizes, one_head),
        DType::BF16 => shape_as::<bf16>(pass, problem, algorithm, sizes, one_head),
        other => Err(Error::unsupported("tilewise", format!("dtype {other}"))),
    }
}

fn shape_as<T: Element>(
    pass: Pass,
    problem: &Problem,
    algorithm: Algorithm,
    sizes: BlockSizes,
    one_head: bool,
) -> Result<Counted> {
    let whole = *problem.dims();
    let mut options: Options = problem.options().clone();
    let mut dims = whole;
    if one_head {
        let heads = match pass {
            Pass::Forward => 1,
            Pass::Backward => whole.group(),
        };
        dims = Dims {
            batch: whole.batch.min(1),
            num_heads: whole.num_heads.min(heads),
            num_kv_heads: whole.num_kv_heads.min(1),
            ..whole
        };
        // Values of the first heads: they change nothing that is counted.
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
    let mut counted = inputs(pass, &problem, &given, algorithm, sizes)?;
    if one_head {
        counted.repeats = repeats(pass, &whole) as u128;
        counted.io = counted.io.repeated(counted.repeats);
    }
    Ok(counted)
}
