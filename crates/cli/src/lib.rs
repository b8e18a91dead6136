//! The commands of the `tilewise` binary, as a library so that its tests can reach them.

#![deny(unsafe_code)]

pub mod container;
pub mod memory;
