//! The mathematics and the vocabulary of tilewise: what an attention problem is, the blockwise
//! online softmax that solves it, and the naive definition that judges every result.
//!
//! Attention is `out = softmax(q kᵀ · softmax_scale) v`. [`Problem`] says which one, apart from the
//! data; [`TensorView`] says where the data lies; [`OnlineSoftmax`] states the running state
//! (m, ℓ, Õ) with which a tile of keys can be folded in and forgotten; [`Backend`] is what a
//! processor implements.
//!
//! No unsafe code, no threads, no SIMD and no GPU in this crate: it is the part to read first.

#![forbid(unsafe_code)]

pub mod algorithm;
pub mod alibi;
mod allocate;
pub mod any;
pub mod backend;
pub mod backward;
pub mod dropout;
pub mod dtype;
pub mod error;
pub mod inputs;
pub mod io_model;
pub mod mask;
pub mod merge;
pub mod observe;
pub mod online;
pub mod options;
pub mod paged;
pub mod problem;
pub mod reference;
pub mod schedule;
pub mod softmax;
pub mod tile;
pub mod tolerance;
pub mod view;

pub use algorithm::Algorithm;
pub use alibi::alibi_slopes;
pub use allocate::{allocate, is_installed, reserve};
pub use any::{AnyInputs, AnyTensor, AnyTensorMut};
pub use backend::{AnyKeyBlock, Backend, BackendInfo, ForwardReport, RunningState};
pub use backward::{
    AnyBackwardInputs, AnyGradientsMut, BackwardInputs, BackwardReport, Gradients, GradientsMut,
};
pub use dropout::{Dropout, keep_mask};
pub use dtype::{DType, Element, Float};
pub use error::{Error, ErrorClass, Result};
pub use inputs::{BlockTable, Inputs, Lengths};
pub use mask::{Live, MaskRule};
pub use merge::{Part, merge_outputs, merge_parts};
pub use observe::{NoObserver, Observer};
pub use online::{Finished, HostState, KeyBlock, OnlineSoftmax};
pub use options::{Alignment, Options};
pub use paged::{Gathered, gather};
pub use problem::{Dims, Problem, Sequence};
pub use reference::{Reference, RowFacts};
pub use schedule::{BlockSizes, fa1_block_sizes};
pub use tolerance::{Comparison, Judge, JudgedRow, RowSample, Tolerance, judge_row};
pub use tolerance::{GradientComparison, GradientJudge, GradientTolerance, JudgedHead, judge_head};
pub use view::{TensorView, TensorViewMut};

// Public because `f16` and `bf16` are element types of the API.
pub use half;
