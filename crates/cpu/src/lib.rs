//! Attention on the CPU: SIMD kernels chosen at run time, tiles cut for the caches, rayon over
//! (sequence, KV head, query tile).
//!
//! [`CpuBackend`] is the entry: [`forward_into`](CpuBackend::forward_into) for one call,
//! [`online`](CpuBackend::online) to stream keys through a running state.
//!
//! How it is built, from the outside in:
//!
//! * `backend`, `state`: the interface; everything is checked here, inside are raw pointers.
//! * `schedule`: the three algorithms as orders of work over threads.
//! * `tile`, `packed`, `head`, `shape`, `output`: what schedules are made of.
//! * `kernel`: what runs inside one instruction set, generic over a small vector trait (`simd`);
//!   `kernel::table` is the dispatcher, and the only place with `#[target_feature]`.

#![warn(missing_docs)]

mod backend;
mod backward;
mod buffer;
mod call;
pub mod ceilings;
mod compiled;
mod exp;
mod head;
mod isa;
mod kernel;
mod machine;
mod output;
mod packed;
mod pairs;
mod parallel;
mod schedule;
mod shape;
mod simd;
mod state;
mod tile;
#[doc(hidden)]
pub mod tiles;

pub use backend::{CpuBackend, CpuBackendBuilder};
pub use isa::{ISA_VARIABLE, Isa};
pub use kernel::table::CpuElement;
pub use machine::Caches;
pub use state::{CpuOnline, CpuState};
