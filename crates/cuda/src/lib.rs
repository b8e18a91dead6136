//! Attention on NVIDIA GPUs (Ampere and later), one binary for every host.
//!
//! Nothing CUDA is needed to build this crate, and nothing of it is assumed at run time: [`probe()`]
//! looks for the driver, its version, devices and NVRTC without calling anything that could panic,
//! and every lack is named in [`Device::status`] and in the error of [`CudaBackend::new`].
//!
//! Kernels are CUDA C++ sources compiled by NVRTC when first needed, specialised by element type,
//! head_dim, mask and architecture, and kept as cubins on disk ([`cache`]). A host without NVRTC
//! runs from a folder of cubins made elsewhere ([`kernels::build`]).
//!
//! Three levels, each usable by itself:
//!
//! | level | module | what it adds |
//! |---|---|---|
//! | raw | [`raw`] | the kernels' argument block and an unchecked launch |
//! | checked | [`module`], [`kernels`] | compiled variants, module cache, grids that fit the device |
//! | operations | [`ops`], [`CudaBackend`], [`CudaState`] | attention over device memory or host views |
//!
//! `cudarc` is a public dependency and re-exported: slices, views and streams of it are taken as
//! they are.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
pub mod backward;
pub mod bench;
pub mod cache;
pub mod ceilings;
pub mod decode;
pub mod error;
mod gather;
mod hopper;
pub mod kernels;
pub mod module;
pub mod nvrtc;
pub mod ops;
mod pack;
pub mod page_lock;
pub mod probe;
pub mod raw;
pub mod records;
mod rooms;
mod sequences;
mod split;
pub mod state;
mod streamed;
mod tile;
pub mod view;

pub use backend::{CudaBackend, CudaOptions};
pub use cudarc;
pub use probe::{Device, Probe, probe};
pub use state::CudaState;
pub use view::{DeviceMask, DeviceView, DeviceViewMut};

/// The name under which errors speak of this backend.
pub(crate) const NAME: &str = "cuda";
