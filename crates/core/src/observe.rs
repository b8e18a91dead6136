//! What a schedule does, told as it happens: every element that crosses between slow and fast
//! memory, every product, and every change of the running state.
//!
//! The schedules in [`schedule`](crate::schedule) keep tensors where the papers keep them (inputs,
//! outputs and workspace in slow memory, one tile of each in fast memory) and report exactly what
//! they copy between the two. So one and the same code explains, counts and computes.

use std::ops::Range;

use crate::dtype::Float;
use crate::mask::Live;

/// What is loaded and stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tensor {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Additive bias; an element that is broadcast over a tile counts once a tile.
    Bias,
    /// Boolean mask; likewise.
    Mask,
    /// The weights that dropout keeps, likewise.
    KeepMask,
    /// Scores, of [`standard`](crate::schedule::standard) only.
    S,
    /// Weights, of [`standard`](crate::schedule::standard) only.
    P,
    /// FA1's O, normalised after every step, in the accumulator type.
    O,
    /// FA1's row maxima, in the accumulator type.
    M,
    /// FA1's denominators, in the accumulator type.
    L,
    /// The output, in the inputs' dtype.
    Out,
    /// ln Σ e^s, f32.
    Lse,
    /// The gradient that arrives at the output.
    DOut,
    /// The gradient that arrives at lse, f32.
    DLse,
    /// rowsum(dO ∘ O) − dlse, in the accumulator type.
    Delta,
    /// The slope of the softcap at every score, of [`standard`](crate::schedule::standard) only, in the
    /// accumulator type as the next two.
    Slope,
    /// Gradient of P, of [`standard`](crate::schedule::standard) only.
    DP,
    /// Gradient of S, of [`standard`](crate::schedule::standard) only.
    DS,
    /// Gradient of q while it is summed up, in the accumulator type as the next three.
    DQSum,
    /// Gradient of k while it is summed up over the query heads that share a head, of
    /// [`standard`](crate::schedule::standard) only.
    DKSum,
    /// Gradient of v likewise.
    DVSum,
    /// Gradient of the bias while it is summed up.
    DBiasSum,
    /// Gradient of q, in the inputs' dtype as the next three.
    DQ,
    /// Gradient of k.
    DK,
    /// Gradient of v.
    DV,
    /// Gradient of the bias.
    DBias,
}

impl Tensor {
    /// Every tensor, in the order of the enum.
    pub const ALL: [Tensor; 27] = [
        Tensor::Q,
        Tensor::K,
        Tensor::V,
        Tensor::Bias,
        Tensor::Mask,
        Tensor::KeepMask,
        Tensor::S,
        Tensor::P,
        Tensor::O,
        Tensor::M,
        Tensor::L,
        Tensor::Out,
        Tensor::Lse,
        Tensor::DOut,
        Tensor::DLse,
        Tensor::Delta,
        Tensor::Slope,
        Tensor::DP,
        Tensor::DS,
        Tensor::DQSum,
        Tensor::DKSum,
        Tensor::DVSum,
        Tensor::DBiasSum,
        Tensor::DQ,
        Tensor::DK,
        Tensor::DV,
        Tensor::DBias,
    ];

    /// The name in the papers' notation, lower case where it is an input or output of a call.
    pub fn name(self) -> &'static str {
        match self {
            Tensor::Q => "q",
            Tensor::K => "k",
            Tensor::V => "v",
            Tensor::Bias => "bias",
            Tensor::Mask => "mask",
            Tensor::S => "S",
            Tensor::P => "P",
            Tensor::O => "O",
            Tensor::M => "m",
            Tensor::L => "l",
            Tensor::Out => "out",
            Tensor::Lse => "lse",
            Tensor::KeepMask => "keep_mask",
            Tensor::DOut => "dout",
            Tensor::DLse => "dlse",
            Tensor::Delta => "delta",
            Tensor::DP => "dP",
            Tensor::DS => "dS",
            Tensor::Slope => "slope",
            Tensor::DQSum => "dQ",
            Tensor::DKSum => "dK",
            Tensor::DVSum => "dV",
            Tensor::DBiasSum => "dBias",
            Tensor::DQ => "dq",
            Tensor::DK => "dk",
            Tensor::DV => "dv",
            Tensor::DBias => "dbias",
        }
    }
}

/// Elements that cross between slow and fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Of which tensor.
    pub tensor: Tensor,
    /// How many.
    pub elements: usize,
    /// Bytes of one element.
    pub element_bytes: usize,
}

impl Transfer {
    /// Bytes that cross.
    pub fn bytes(&self) -> usize {
        self.elements * self.element_bytes
    }
}

/// A block of rows and a block of keys of one head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Position in [`Problem::sequences`](crate::Problem::sequences): the batch entry unless packed.
    pub sequence: usize,
    /// Query head.
    pub head: usize,
    /// Which block of rows, i in the papers.
    pub row_block: usize,
    /// Which block of keys, j in the papers.
    pub key_block: usize,
    /// The rows, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub keys: Range<usize>,
    /// How much of it causality, window and lengths leave live.
    pub live: Live,
}

/// A product of two matrices, rows × inner by inner × columns: rows·columns·inner multiply-adds.
/// Whole tiles, hidden elements included, as a matrix unit does them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// What it gives or is a share of: S or O; backward S, dV, dP, dQ or dK.
    pub result: Tensor,
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result.
    pub columns: usize,
    /// What is summed over.
    pub inner: usize,
}

/// Arithmetic besides the two products, which matrix units do not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Operation {
    /// An exponential of a score or weight.
    Exp,
    /// A multiplication of an element of O or Õ by a factor of its row (α, β, ℓ).
    Rescale,
    /// A division of an element of O or P by ℓ.
    Divide,
    /// An element of dS = P ∘ (dP − Δ).
    ScoreGradient,
    /// A term of Δ = rowsum(dO ∘ O), or of rowsum(P ∘ dP), which is the same.
    DeltaTerm,
}

/// A row of P, made of a row of S ([`standard`](crate::schedule::standard)): safe softmax.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, F> {
    /// Position in [`Problem::sequences`](crate::Problem::sequences).
    pub sequence: usize,
    /// Query head.
    pub head: usize,
    /// The row, within the sequence.
    pub row: usize,
    /// m: its largest score, or the sink where that is larger.
    pub m: F,
    /// ℓ: the denominator relative to m, the sink included.
    pub l: F,
    /// P, `[keys]`: normalised, −0 where a key is hidden.
    pub p: &'a [F],
}

/// The running state of a tile's rows after a step over it; everything per row.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a, F> {
    /// Where.
    pub tile: &'a Tile,
    /// The statistics of this block of keys alone, which FA1 merges (FA2 has none).
    pub block: Option<BlockStatistics<'a, F>>,
    /// e^(m before − m): what ℓ and Õ were multiplied by.
    pub alpha: &'a [F],
    /// m.
    pub m: &'a [F],
    /// ℓ.
    pub l: &'a [F],
    /// FA1: O, normalised. FA2: Õ. `[rows, head_dim_v]`.
    pub o: &'a [F],
}

/// FA1's m̃, ℓ̃ and β.
#[derive(Clone, Copy, Debug)]
pub struct BlockStatistics<'a, F> {
    /// m̃: row maxima over this block's keys.
    pub m: &'a [F],
    /// ℓ̃: their denominators, relative to m̃.
    pub l: &'a [F],
    /// β = e^(m̃ − m).
    pub beta: &'a [F],
}

/// A block of rows that is done.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a, F> {
    /// Position in [`Problem::sequences`](crate::Problem::sequences).
    pub sequence: usize,
    /// Query head.
    pub head: usize,
    /// Which block of rows.
    pub row_block: usize,
    /// O before it is rounded to the output's dtype. `[rows, head_dim_v]`.
    pub out: &'a [F],
    /// L. `[rows]`.
    pub lse: &'a [F],
}

/// A tile of a backward schedule, made again (FA1, FA2).
#[derive(Clone, Copy, Debug)]
pub struct BackwardStep<'a, F> {
    /// Where.
    pub tile: &'a Tile,
    /// S, −∞ where a key is hidden. `[rows, keys]`.
    pub s: &'a [F],
    /// P, 0 where a key is hidden. `[rows, keys]`.
    pub p: &'a [F],
    /// dP = dO Vᵀ, times dropout's factors. `[rows, keys]`.
    pub dp: &'a [F],
    /// dS, of the final scores. `[rows, keys]`.
    pub ds: &'a [F],
    /// What P is made from, a pair of each row: FA1's m and ℓ. FA2: L, and 1.
    pub statistics: &'a [(F, F)],
    /// Δ of the rows.
    pub delta: &'a [F],
    /// dQ of the rows, this tile's share included. `[rows, head_dim]`.
    pub dq: &'a [F],
    /// dK of the keys so far. `[keys, head_dim]`.
    pub dk: &'a [F],
    /// dV of the keys so far. `[keys, head_dim_v]`.
    pub dv: &'a [F],
}

/// Δ of a block of rows, made before the loops ([`fa2`](crate::schedule::backward::fa2)).
#[derive(Clone, Copy, Debug)]
pub struct Delta<'a, F> {
    /// Position in [`Problem::sequences`](crate::Problem::sequences).
    pub sequence: usize,
    /// Query head.
    pub head: usize,
    /// Which block of rows.
    pub row_block: usize,
    /// `[rows]`.
    pub values: &'a [F],
}

/// A row of S, P, dP and dS of [`standard`](crate::schedule::standard)'s backward pass.
#[derive(Clone, Copy, Debug)]
pub struct GradientRow<'a, F> {
    /// Position in [`Problem::sequences`](crate::Problem::sequences).
    pub sequence: usize,
    /// Query head.
    pub head: usize,
    /// The row, within the sequence.
    pub row: usize,
    /// P, `[keys]`: −0 where a key is hidden.
    pub p: &'a [F],
    /// dS, `[keys]`.
    pub ds: &'a [F],
    /// Δ.
    pub delta: F,
}

/// A block of rows of dQ, or of keys of dK and dV, that is done, before it is rounded to the dtype.
#[derive(Clone, Debug)]
pub struct GradientFinish<'a, F> {
    /// Which tensor: [`Tensor::DQ`], [`Tensor::DK`] or [`Tensor::DV`].
    pub tensor: Tensor,
    /// Position in [`Problem::sequences`](crate::Problem::sequences).
    pub sequence: usize,
    /// Its head: a query head for dQ, a head of k and v otherwise.
    pub head: usize,
    /// The rows or keys, within the sequence.
    pub rows: Range<usize>,
    /// `[rows, head_dim]`, or `[rows, head_dim_v]`.
    pub values: &'a [F],
}

/// Sees what a schedule does. Every method does nothing unless it is overridden, so that an
/// observer that is not there costs nothing.
pub trait Observer {
    /// Elements were copied from slow to fast memory.
    fn load(&mut self, transfer: Transfer) {
        let _ = transfer;
    }

    /// Elements were copied from fast to slow memory.
    fn store(&mut self, transfer: Transfer) {
        let _ = transfer;
    }

    /// A tile with no live key was passed over.
    fn skip(&mut self, tile: &Tile) {
        let _ = tile;
    }

    /// A product was computed in a tile: first S = q kᵀ, then P v; backward S, dV, dP, dQ and dK.
    fn product(&mut self, tile: &Tile, product: Product) {
        let _ = (tile, product);
    }

    /// The scores of a tile are in fast memory (forward): S, `[rows, keys]`, after scale, softcap and bias,
    /// −∞ where a key is hidden. In [`fa1`](crate::schedule::fa1) and
    /// [`fa2`](crate::schedule::fa2) they leave it no more.
    fn scores<F: Float>(&mut self, tile: &Tile, scores: &[F]) {
        let _ = (tile, scores);
    }

    /// A row of S became a row of P ([`standard`](crate::schedule::standard)).
    fn weights<F: Float>(&mut self, weights: &Weights<'_, F>) {
        let _ = weights;
    }

    /// `count` operations besides products were done, counted for whole tiles.
    fn operations(&mut self, operation: Operation, count: usize) {
        let _ = (operation, count);
    }

    /// The state of a tile's rows has changed (FA1, FA2).
    fn step<F: Float>(&mut self, step: &Step<'_, F>) {
        let _ = step;
    }

    /// A tile has given its share of dQ, dK and dV (backward).
    fn backward_step<F: Float>(&mut self, step: &BackwardStep<'_, F>) {
        let _ = step;
    }

    /// Δ of a block of rows was made, before the loops ([`fa2`](crate::schedule::backward::fa2)).
    fn delta<F: Float>(&mut self, delta: &Delta<'_, F>) {
        let _ = delta;
    }

    /// A row of dP became a row of dS ([`standard`](crate::schedule::standard), backward).
    fn gradient_row<F: Float>(&mut self, row: &GradientRow<'_, F>) {
        let _ = row;
    }

    /// A block of dQ, dK or dV is done (backward).
    fn gradient_finish<F: Float>(&mut self, finish: &GradientFinish<'_, F>) {
        let _ = finish;
    }

    /// A block of rows is done.
    fn finish<F: Float>(&mut self, finish: &Finish<'_, F>) {
        let _ = finish;
    }
}

/// Looks at nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {}
