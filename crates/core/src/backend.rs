//! What a processor implements: object-safe, over tensors whose element type is known at run time.

use std::fmt::Debug;

use crate::algorithm::Algorithm;
use crate::any::{AnyInputs, AnyTensor, AnyTensorMut};
use crate::backward::{AnyBackwardInputs, AnyGradientsMut, BackwardReport};
use crate::error::{Error, Result};
use crate::online::HostState;
use crate::problem::Problem;
use crate::schedule::BlockSizes;
use crate::view::{TensorView, TensorViewMut};

/// What a backend says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// As accepted by the facade: `cpu`, `cuda:0`.
    pub name: String,
    /// The processor, for people: its name and instruction set.
    pub device: String,
    /// Further facts, (name, value): caches, threads, driver.
    pub details: Vec<(String, String)>,
}

/// What a call did.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardReport {
    /// The schedule that ran.
    pub algorithm: Algorithm,
    /// The instruction set or kernel that ran, for example `avx512`.
    pub isa: String,
}

/// A processor that computes attention.
///
/// Calls are complete when they return. All methods may be called from several threads at once.
pub trait Backend: Send + Sync + Debug {
    /// What the backend says of itself.
    fn info(&self) -> BackendInfo;

    /// Whether the backend can do this problem with this algorithm.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what it cannot do.
    fn supports(&self, problem: &Problem, algorithm: Algorithm) -> Result<()>;

    /// Memory that a call would take besides inputs and outputs, in bytes (an upper estimate):
    /// O(N²) for [`Algorithm::Standard`], small otherwise.
    fn workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64;

    /// Rows and keys of the tiles in which a forward call walks the scores, where the backend says.
    fn tile(&self, problem: &Problem, algorithm: Algorithm) -> Option<BlockSizes> {
        let _ = (problem, algorithm);
        None
    }

    /// out = softmax(q kᵀ · scale …) v and lse = ln Σ e^s.
    ///
    /// `problem` must be the one that `inputs` pose ([`Problem::new`]); `out` is
    /// `[batch, num_heads, seqlen_q, head_dim_v]` in the inputs' dtype, `lse`
    /// `[batch, num_heads, seqlen_q]` as a view whose last axis is 1. Every element of both is written.
    ///
    /// # Errors
    /// Those of [`supports`](Self::supports); [`Error::DType`] and [`Error::Shape`] for tensors that do not
    /// fit; [`Error::OutOfMemory`]; [`Error::Backend`] where a device fails.
    fn forward(
        &self,
        problem: &Problem,
        inputs: &AnyInputs<'_>,
        algorithm: Algorithm,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardReport>;

    /// Whether the backend can compute the gradients of this problem with this algorithm.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what it cannot do: unless a backend says otherwise, all of it.
    fn supports_backward(&self, problem: &Problem, algorithm: Algorithm) -> Result<()> {
        let _ = (problem, algorithm);
        Err(Error::unsupported(self.info().name, "backward"))
    }

    /// Memory that a backward call would take besides inputs and outputs, in bytes (an upper
    /// estimate).
    fn backward_workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        let _ = (problem, algorithm);
        0
    }

    /// The gradients that [`backward`](crate::backward) defines.
    ///
    /// `problem` must be the one that `inputs` pose
    /// ([`BackwardInputs::problem`](crate::BackwardInputs::problem)), out and lse what
    /// [`forward`](Self::forward) gave for it. Every element of `gradients` is written.
    ///
    /// # Errors
    /// Those of [`supports_backward`](Self::supports_backward); [`Error::DType`] and [`Error::Shape`]
    /// for tensors that do not fit; [`Error::OutOfMemory`].
    fn backward(
        &self,
        problem: &Problem,
        inputs: &AnyBackwardInputs<'_>,
        algorithm: Algorithm,
        gradients: AnyGradientsMut<'_>,
    ) -> Result<BackwardReport> {
        let _ = (inputs, gradients);
        self.supports_backward(problem, algorithm)?;
        Err(Error::unsupported(self.info().name, "backward"))
    }

    /// A running state for `problem`, through which keys can be streamed in chunks.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what cannot be streamed; [`Error::OutOfMemory`].
    fn begin(&self, problem: &Problem) -> Result<Box<dyn RunningState>>;
}

/// Keys that arrive at a [`RunningState`]; see [`KeyBlock`](crate::KeyBlock) for the shapes.
#[derive(Clone, Copy, Debug)]
pub struct AnyKeyBlock<'a> {
    /// All queries.
    pub q: AnyTensor<'a>,
    /// Some keys.
    pub k: AnyTensor<'a>,
    /// Their values.
    pub v: AnyTensor<'a>,
    /// Absolute position of the first of these keys.
    pub first_key: usize,
    /// Bias of these keys.
    pub bias: Option<AnyTensor<'a>>,
    /// Mask of these keys.
    pub mask: Option<TensorView<'a, u8>>,
}

/// [`OnlineSoftmax`](crate::OnlineSoftmax) at problem grain, erased: (m, ℓ, Õ) wherever the backend
/// keeps it.
pub trait RunningState: Send {
    /// Folds keys into the state.
    ///
    /// # Errors
    /// Those of [`KeyBlock::check`](crate::KeyBlock::check) for keys that do not fit the problem: the state then
    /// stays as it was. [`Error::OutOfMemory`]; [`Error::Backend`] where a device fails.
    fn absorb(&mut self, block: &AnyKeyBlock<'_>) -> Result<()>;

    /// Joins the state of other keys of the same rows, from any backend.
    ///
    /// # Errors
    /// Those of [`HostState::check`]; [`Error::OutOfMemory`]; [`Error::Backend`] where a device fails.
    fn merge(&mut self, other: &HostState) -> Result<()>;

    /// The state as host arrays.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Backend`] where a device fails.
    fn export(&self) -> Result<HostState>;

    /// Writes O = Õ/ℓ, `[batch, num_heads, seqlen_q, head_dim_v]` in the problem's dtype, and L = m + ln ℓ,
    /// `[batch, num_heads, seqlen_q]` as a view whose last axis is 1. A row that saw no key gives 0 and −∞.
    ///
    /// # Errors
    /// [`Error::DType`] and [`Error::Shape`] for outputs that do not fit; [`Error::OutOfMemory`];
    /// [`Error::Backend`] where a device fails.
    fn finish(
        self: Box<Self>,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<()>;
}

/// Checks that outputs have the shapes and the dtype that `problem` asks for.
///
/// # Errors
/// [`Error::DType`] or [`Error::Shape`].
pub fn check_outputs(
    problem: &Problem,
    out: &AnyTensorMut<'_>,
    lse: Option<&TensorViewMut<'_, f32>>,
) -> Result<()> {
    let dims = problem.dims();
    if out.dtype() != problem.dtype() {
        return Err(Error::DType {
            tensor: "out".into(),
            expected: problem.dtype(),
            got: out.dtype(),
        });
    }
    Error::expect_shape("out", out.shape(), dims.out_shape())?;
    if let Some(lse) = lse {
        let [b, h, s] = dims.lse_shape();
        Error::expect_shape("lse", lse.shape(), [b, h, s, 1])?;
    }
    Ok(())
}
