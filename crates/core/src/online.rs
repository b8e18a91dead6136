//! The online softmax (Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1) as a trait.
//!
//! After some of the keys, all that must be known of a query row is its state (m, ℓ, Õ): the
//! largest score m, the denominator ℓ = Σ e^(s − m), and the unnormalised output Õ = Σ e^(s − m) v.
//! Folding in more keys, and joining two states, is one rule:
//!
//! ```text
//! m' = max(m₁, m₂)      αᵢ = e^(mᵢ − m')
//! ℓ' = α₁ℓ₁ + α₂ℓ₂      Õ' = α₁Õ₁ + α₂Õ₂
//! ```
//!
//! and in the end O = Õ/ℓ, L = m + ln ℓ.

use std::ops::Range;

use crate::allocate::allocate;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::view::{TensorView, TensorViewMut};

/// The blockwise mathematics of attention, whoever does it and at whatever grain: one tile of rows
/// in registers, or a whole `[batch, heads, seqlen_q]` in device memory.
///
/// m is in natural-log units of the final score (after scale, softcap and bias), on every backend.
/// Implementations obey, up to rounding: [`merge`](Self::merge) is associative and commutative and
/// [`begin`](Self::begin) is its identity, so any partition of the keys in any order gives the same
/// result as the naive softmax.
pub trait OnlineSoftmax {
    /// What fixes the size of a state and the meaning of its positions.
    type Spec<'a>;
    /// (m, ℓ, Õ) of some rows.
    type State;
    /// Some keys and values, with the queries they meet.
    type Block<'a>;
    /// What the finished rows are written to, or returned as.
    type Output<'a>;
    /// What can go wrong in any of the methods: what was handed over does not fit the spec, or memory or a
    /// device fails.
    type Error;

    /// m = −∞, ℓ = 0, Õ = 0: no key seen yet.
    fn begin(&self, spec: Self::Spec<'_>) -> Result<Self::State, Self::Error>;

    /// Folds a block of keys into the state.
    fn absorb(&self, state: &mut Self::State, block: Self::Block<'_>) -> Result<(), Self::Error>;

    /// Joins the state of other keys of the same rows into `state`.
    fn merge(&self, state: &mut Self::State, other: &Self::State) -> Result<(), Self::Error>;

    /// O = Õ/ℓ and L = m + ln ℓ. A row that saw no key gives 0 and −∞. Attention sinks enter here
    /// and only here: anywhere earlier a merge would count them twice.
    fn finish(&self, state: Self::State, output: Self::Output<'_>) -> Result<(), Self::Error>;

    /// The state as host arrays.
    fn export(&self, state: &Self::State) -> Result<HostState, Self::Error>;

    /// A state from host arrays, whichever backend exported them.
    fn import(&self, spec: Self::Spec<'_>, host: &HostState) -> Result<Self::State, Self::Error>;
}

/// (m, ℓ, Õ) on the host: how states of different backends meet.
///
/// Held in f64, which represents the f32 states of every backend exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct HostState {
    /// `[batch, num_heads, seqlen_q]`.
    pub shape: [usize; 3],
    /// Size of a row of Õ.
    pub head_dim_v: usize,
    /// Row maxima, natural-log units; −∞ where no key was seen. `[batch, num_heads, seqlen_q]`.
    pub m: Vec<f64>,
    /// Denominators relative to m. `[batch, num_heads, seqlen_q]`.
    pub l: Vec<f64>,
    /// Unnormalised outputs relative to m. `[batch, num_heads, seqlen_q, head_dim_v]`.
    pub acc: Vec<f64>,
}

impl HostState {
    /// The state of rows that saw no key.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn empty(shape: [usize; 3], head_dim_v: usize) -> Result<Self> {
        let [batch, heads, seqlen_q] = shape;
        // The largest first: where it is too large nothing has been touched.
        let acc = [batch, heads, seqlen_q, head_dim_v];
        let acc = allocate(&acc, "unnormalised outputs", 0.0)?;
        Ok(HostState {
            shape,
            head_dim_v,
            m: allocate(&shape, "row maxima", f64::NEG_INFINITY)?,
            l: allocate(&shape, "denominators", 0.0)?,
            acc,
        })
    }

    /// Checks that the arrays have the sizes that `problem` asks for.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `state`.
    pub fn check(&self, problem: &Problem) -> Result<()> {
        let dims = problem.dims();
        if self.shape != dims.lse_shape() || self.head_dim_v != dims.head_dim_v {
            return Err(Error::shape(
                "state",
                format!("{:?} × {}", dims.lse_shape(), dims.head_dim_v),
                format!("{:?} × {}", self.shape, self.head_dim_v),
            ));
        }
        // Those of a problem can be multiplied.
        let rows: usize = self.shape.iter().product();
        if self.m.len() != rows || self.l.len() != rows || self.acc.len() != rows * self.head_dim_v
        {
            return Err(Error::shape(
                "state",
                format!("{rows} rows in m, l and acc"),
                format!(
                    "{}, {} and {} elements",
                    self.m.len(),
                    self.l.len(),
                    self.acc.len()
                ),
            ));
        }
        Ok(())
    }
}

/// Keys that arrive at a running state of problem grain, with the queries they meet.
#[derive(Clone, Copy, Debug)]
pub struct KeyBlock<'a, T> {
    /// All queries, `[batch, num_heads, seqlen_q, head_dim]`.
    pub q: TensorView<'a, T>,
    /// `[batch, num_kv_heads, n, head_dim]`.
    pub k: TensorView<'a, T>,
    /// `[batch, num_kv_heads, n, head_dim_v]`.
    pub v: TensorView<'a, T>,
    /// Absolute position of the first of these n keys in the problem's seqlen_k.
    pub first_key: usize,
    /// For these keys: `[batch, num_heads, seqlen_q, n]`, any axis may be 1.
    pub bias: Option<TensorView<'a, T>>,
    /// Likewise.
    pub mask: Option<TensorView<'a, u8>>,
}

impl<'a, T: Element> KeyBlock<'a, T> {
    /// Keys `first_key..` without bias or mask.
    pub fn new(
        q: TensorView<'a, T>,
        k: TensorView<'a, T>,
        v: TensorView<'a, T>,
        first_key: usize,
    ) -> Self {
        KeyBlock {
            q,
            k,
            v,
            first_key,
            bias: None,
            mask: None,
        }
    }

    /// The absolute positions of the keys. Those beyond what can be counted, which [`check`](Self::check)
    /// refuses, are cut off.
    pub fn keys(&self) -> Range<usize> {
        self.first_key..self.first_key.saturating_add(self.k.shape()[2])
    }

    /// Checks the block against the problem that its state was begun with.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`] or [`Error::Lengths`].
    pub fn check(&self, problem: &Problem) -> Result<()> {
        let d = problem.dims();
        if T::DTYPE != problem.dtype() {
            return Err(Error::DType {
                tensor: "q".into(),
                expected: problem.dtype(),
                got: T::DTYPE,
            });
        }
        let n = self.k.shape()[2];
        let full = [d.batch, d.num_heads, d.seqlen_q, n];
        for (name, shape, expected) in [
            (
                "q",
                self.q.shape(),
                [d.batch, d.num_heads, d.seqlen_q, d.head_dim],
            ),
            (
                "k",
                self.k.shape(),
                [d.batch, d.num_kv_heads, n, d.head_dim],
            ),
            (
                "v",
                self.v.shape(),
                [d.batch, d.num_kv_heads, n, d.head_dim_v],
            ),
        ] {
            Error::expect_shape(name, shape, expected)?;
        }
        if self
            .first_key
            .checked_add(n)
            .is_none_or(|end| end > d.seqlen_k)
        {
            return Err(Error::lengths(
                "k",
                format!("keys inside 0..{}", d.seqlen_k),
                format!("{n} keys from {}", self.first_key),
            ));
        }
        // A problem posed with a bias or a mask must not be streamed without: the keys' share of
        // it belongs to every block.
        for (name, posed, given) in [
            ("bias", problem.has_bias(), self.bias.is_some()),
            ("mask", problem.has_mask(), self.mask.is_some()),
        ] {
            if posed && !given {
                return Err(Error::shape(
                    name,
                    format!("the {name} of these keys, {full:?}, as the problem has one"),
                    "none",
                ));
            }
        }
        if let Some(bias) = &self.bias {
            bias.broadcast_to(full).map_err(|e| e.named("bias"))?;
        }
        if let Some(mask) = &self.mask {
            mask.broadcast_to(full).map_err(|e| e.named("mask"))?;
        }
        Ok(())
    }
}

/// What a state of problem grain is finished into.
#[derive(Debug)]
pub struct Finished<'a, T> {
    /// `[batch, num_heads, seqlen_q, head_dim_v]`.
    pub out: TensorViewMut<'a, T>,
    /// `[batch, num_heads, seqlen_q]`, natural log.
    pub lse: Option<TensorViewMut<'a, f32>>,
}
