//! Random attention problems with their data: what the tests of the workspace's crates share.
//!
//! [`case`] draws a [`Case`] over everything that a problem can ask for, of one of three [`Sizes`];
//! [`Case::data`] makes its tensors, with NaN wherever no element is and in every key that no
//! sequence uses; [`Setting`] adds what a backward pass needs.

mod case;
mod data;
mod noise;
mod setting;
mod tensor;

pub use case::{Case, Sequences, Sizes, case, cases};
pub use data::{Data, Judged};
pub use noise::Noise;
pub use setting::Setting;
pub use tensor::{Layout, Tensor, layout};
