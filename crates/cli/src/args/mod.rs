//! Arguments that several commands share.

pub(crate) mod problem;
pub(crate) mod select;
pub(crate) mod tensors;
