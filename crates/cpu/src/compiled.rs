//! What this crate compiles for each element type. A generic function is compiled again by every crate that calls it, and
//! the schedules behind a call are most of this one.

use tilewise_core::half::{bf16, f16};
use tilewise_core::{
    Algorithm, BackwardInputs, BackwardReport, Element, ForwardReport, GradientsMut, Inputs,
    KeyBlock, Problem, Result, TensorViewMut,
};

use crate::backend::{self, CpuBackend};
use crate::backward;
use crate::state::{self, CpuState};

/// The calls that a [`CpuElement`](crate::CpuElement) has code for, of its own type.
pub trait Compiled: Element {
    #[doc(hidden)]
    fn forward(
        backend: &CpuBackend,
        problem: &Problem,
        inputs: &Inputs<'_, Self>,
        algorithm: Algorithm,
        out: TensorViewMut<'_, Self>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardReport>;

    #[doc(hidden)]
    fn backward(
        backend: &CpuBackend,
        problem: &Problem,
        inputs: &BackwardInputs<'_, Self>,
        algorithm: Algorithm,
        gradients: GradientsMut<'_, Self>,
    ) -> Result<BackwardReport>;

    #[doc(hidden)]
    fn absorb(
        backend: &CpuBackend,
        state: &mut CpuState<Self>,
        block: KeyBlock<'_, Self>,
    ) -> Result<()>;
}

macro_rules! compiled {
    ($($T:ty),*) => {$(
        impl Compiled for $T {
            fn forward(
                backend: &CpuBackend,
                problem: &Problem,
                inputs: &Inputs<'_, $T>,
                algorithm: Algorithm,
                out: TensorViewMut<'_, $T>,
                lse: Option<TensorViewMut<'_, f32>>,
            ) -> Result<ForwardReport> {
                backend::forward(backend, problem, inputs, algorithm, out, lse)
            }

            fn backward(
                backend: &CpuBackend,
                problem: &Problem,
                inputs: &BackwardInputs<'_, $T>,
                algorithm: Algorithm,
                gradients: GradientsMut<'_, $T>,
            ) -> Result<BackwardReport> {
                backward::backward(backend, problem, inputs, algorithm, gradients)
            }

            fn absorb(
                backend: &CpuBackend,
                state: &mut CpuState<$T>,
                block: KeyBlock<'_, $T>,
            ) -> Result<()> {
                state::absorb(backend, state, block)
            }
        }
    )*};
}

compiled!(f64, f32, f16, bf16);
