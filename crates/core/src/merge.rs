//! Joining finished outputs: attention over a union of keys from attention over its parts.
//!
//! An output O with its L = ln Σ e^s is the state (m, ℓ, Õ) = (L, 1, O), so the rule of
//! [`OnlineSoftmax::merge`](crate::OnlineSoftmax::merge) applies to it (Dao et al. 2022, section
//! 3.1; "split-KV" or "ring" attention).

use crate::allocate::allocate;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::view::{TensorView, TensorViewMut};

/// Attention over some of the keys.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, T> {
    /// `[batch, num_heads, seqlen_q, head_dim_v]`.
    pub out: TensorView<'a, T>,
    /// `[batch, num_heads, seqlen_q]`, natural log, as a view whose last axis is 1. At most one of
    /// the parts may have a sink in it.
    pub lse: TensorView<'a, f32>,
}

impl<'a, T> Part<'a, T> {
    /// An output and its lse.
    pub fn new(out: TensorView<'a, T>, lse: TensorView<'a, f32>) -> Self {
        Part { out, lse }
    }
}

/// Joins two parts; see [`merge_parts`].
///
/// # Errors
/// Those of [`merge_parts`].
pub fn merge_outputs<T: Element>(
    a: Part<'_, T>,
    b: Part<'_, T>,
    out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    merge_parts(&[a, b], out, lse)
}

/// out = Σ e^(Lᵢ − L) Oᵢ and L = ln Σ e^Lᵢ, row by row, computed in f64 and rounded once.
///
/// A part whose L is −∞ saw no key of that row: it is neutral, whatever its output holds. A row
/// that no part saw gives 0 and −∞; a row with an L of NaN or +∞ gives NaN.
///
/// # Errors
/// [`Error::Shape`] if a part does not have the shapes of `out` and `lse`; [`Error::OutOfMemory`].
pub fn merge_parts<T: Element>(
    parts: &[Part<'_, T>],
    mut out: TensorViewMut<'_, T>,
    mut lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    let out_shape = out.shape();
    let [batch, heads, seqlen_q, width] = out_shape;
    let lse_shape = [batch, heads, seqlen_q, 1];
    for (n, part) in parts.iter().enumerate() {
        Error::expect_shape(format!("out of part {n}"), part.out.shape(), out_shape)?;
        Error::expect_shape(format!("lse of part {n}"), part.lse.shape(), lse_shape)?;
    }
    if let Some(lse) = &lse {
        Error::expect_shape("lse", lse.shape(), lse_shape)?;
    }
    // Of no rows the width says nothing: it need not be one that memory can have.
    let rows = !lse_shape.contains(&0);
    let mut sum = allocate(&[if rows { width } else { 0 }], "a row of out", 0.0)?;
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..seqlen_q {
                let total = merge_row(parts, [b, h, i], &mut sum);
                for (to, &x) in out.row_mut(b, h, i).iter_mut().zip(&sum) {
                    *to = T::from_f64(x);
                }
                if let Some(lse) = &mut lse {
                    lse.row_mut(b, h, i)[0] = total as f32;
                }
            }
        }
    }
    Ok(())
}

/// Fills `sum` with one row of the union, and gives its L.
fn merge_row<T: Element>(parts: &[Part<'_, T>], [b, h, i]: [usize; 3], sum: &mut [f64]) -> f64 {
    sum.fill(0.0);
    let seen = || {
        parts
            .iter()
            .map(|part| (part, part.lse.at([b, h, i, 0]).to_f64()))
            .filter(|&(_, lse)| lse != f64::NEG_INFINITY)
    };
    let m = seen().fold(f64::NEG_INFINITY, |m, (_, lse)| {
        if lse.is_nan() {
            lse
        } else if m.is_nan() {
            m
        } else {
            m.max(lse)
        }
    });
    if m == f64::NEG_INFINITY {
        return m;
    }
    if !m.is_finite() {
        sum.fill(f64::NAN);
        return f64::NAN;
    }
    let mut l = 0.0;
    for (part, lse) in seen() {
        let weight = (lse - m).exp();
        l += weight;
        for (sum, x) in sum.iter_mut().zip(part.out.row(b, h, i)) {
            *sum += weight * x.to_f64();
        }
    }
    for sum in sum {
        *sum /= l;
    }
    m + l.ln()
}
