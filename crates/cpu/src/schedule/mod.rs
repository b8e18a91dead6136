//! The three algorithms, as schedules of the tile kernels over the machine's threads.

pub(crate) mod decode;
pub(crate) mod fa1;
pub(crate) mod fa2;
mod heads;
pub(crate) mod standard;
