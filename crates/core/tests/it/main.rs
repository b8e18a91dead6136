//! tilewise-core from outside: the definition, the laws, the schedules.

mod gradients;
mod io_model;
mod laws;
mod merge;
mod observe;
mod reference;
mod schedules;
mod softmax;
mod tolerance;
