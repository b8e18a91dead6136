//! The commands of the `tilewise` binary, as a library so that its tests can reach them.

#![deny(unsafe_code)]

mod args;
mod bench;
mod case;
mod chart;
mod check;
mod cli;
mod compare;
pub mod container;
mod devices;
mod environment;
mod facts;
mod generate;
mod input;
#[cfg(feature = "cuda")]
mod inspect;
mod io;
mod isa;
#[cfg(feature = "cuda")]
mod kernels;
pub mod memory;
mod output;
mod peer_worker;
mod random;
mod reasons;
mod report;
mod run;
mod shapes;
mod stats;
mod trace;
mod ui;

pub use cli::main;
