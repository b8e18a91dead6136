//! Exact attention, one tile at a time, on whichever processor is there.
//!
//! Causal masks are **bottom-right aligned** unless asked otherwise: the last query sees the last
//! key, as in FlashAttention since 2.1 (PyTorch's `is_causal` is [`Alignment::TopLeft`]).
//!
//! ```
//! use tilewise::{Engine, Inputs, Options, TensorView};
//!
//! // batch 1, 4 query heads that share 2 key heads, 8 queries over 32 keys, head_dim 16
//! let q: Vec<f32> = (0..4 * 8 * 16).map(|x| (x % 13) as f32 / 13.0).collect();
//! let k: Vec<f32> = (0..2 * 32 * 16).map(|x| (x % 7) as f32 / 7.0).collect();
//! let v: Vec<f32> = (0..2 * 32 * 16).map(|x| (x % 11) as f32 / 11.0).collect();
//!
//! let inputs = Inputs::new(
//!     TensorView::bhsd(&q, [1, 4, 8, 16])?,
//!     TensorView::bhsd(&k, [1, 2, 32, 16])?,
//!     TensorView::bhsd(&v, [1, 2, 32, 16])?,
//! );
//! # if Engine::auto().is_err() { return Ok(()); }
//! let engine = Engine::auto()?; // or Engine::named("cpu")?, Engine::named("cuda:1")?
//! let attention = engine.forward(&inputs, &Options::new().causal(true))?;
//!
//! assert_eq!(attention.out.len(), 4 * 8 * 16); // [batch, num_heads, seqlen_q, head_dim]
//! assert_eq!(attention.lse.len(), 4 * 8); // [batch, num_heads, seqlen_q], natural log
//! # Ok::<(), tilewise::Error>(())
//! ```
//!
//! # Which backend runs
//!
//! An [`Engine`] made by [`Engine::named`] or [`Engine::new`] runs on that backend or fails: it never
//! falls back. [`Engine::auto`] asks the environment variable `TILEWISE_BACKEND` first; unset or
//! `auto`, it takes the first backend of this machine that supports the problem, the GPU before
//! the CPU, and [`ForwardInfo::passed_over`] says which it passed over and why.
//!
//! # Features
//!
//! * `cpu` (default): rayon and SIMD chosen at run time. `TILEWISE_ISA` forces an instruction set.
//! * `cuda` (default): NVIDIA GPUs, found at run time; nothing of CUDA is needed to build or to start.
//!   `TILEWISE_PORTABLE_KERNELS=1` keeps it to the kernels that run on every chip since compute
//!   capability 8.0; unset, empty and `0` do not.
//!
//! # Where to read on
//!
//! [`Options`] defines a score exactly, [`Inputs`] the shapes, [`OnlineSoftmax`] the running state
//! (m, ℓ, Õ) through which keys can be streamed; [`Engine::begin`] gives such a state.

#![forbid(unsafe_code)]

mod backends;
mod engine;
mod kind;

pub use backends::{BackendStatus, Settings, backends, open, open_with};
pub use engine::{Attention, BackwardInfo, Engine, ForwardInfo};
pub use kind::BackendKind;

pub use tilewise_core as core;
pub use tilewise_core::{
    Algorithm, Alignment, AnyBackwardInputs, AnyGradientsMut, AnyInputs, AnyKeyBlock, AnyTensor,
    AnyTensorMut, Backend, BackendInfo, BackwardInputs, BackwardReport, BlockTable, Comparison,
    DType, Dims, Dropout, Element, Error, ErrorClass, Finished, ForwardReport, GradientComparison,
    GradientJudge, Gradients, GradientsMut, HostState, Inputs, Judge, JudgedRow, KeyBlock, Lengths,
    OnlineSoftmax, Options, Part, Problem, Result, RowSample, RunningState, Sequence, TensorView,
    TensorViewMut, Tolerance, alibi_slopes, half, judge_head, judge_row, keep_mask, merge_outputs,
    merge_parts,
};

#[cfg(feature = "cpu")]
pub use tilewise_cpu as cpu;
#[cfg(feature = "cuda")]
pub use tilewise_cuda as cuda;
