//! Attention on the CPU.
