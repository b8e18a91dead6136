//! Every backend of this machine against the naive definition, the laws, and bad input.

mod engine;
mod errors;
mod gradients;
mod laws;
mod properties;
mod support;
