//! What attention is asked for, apart from tensors and their shapes.

use crate::dropout::Dropout;
use crate::error::{Error, Result};

/// Which corner the causal diagonal, the window and ALiBi are measured from when seqlen_q and
/// seqlen_k differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Query i stands at key i + seqlen_k − seqlen_q: the last query sees the last key
    /// (FlashAttention since 2.1).
    #[default]
    BottomRight,
    /// Query i stands at key i (PyTorch's `is_causal`).
    TopLeft,
}

/// Options of one attention call; a builder.
///
/// With `off` = seqlen_k − seqlen_q ([`Alignment::BottomRight`]) or 0 ([`Alignment::TopLeft`]), the
/// score of query i and key j is
///
/// ```text
/// s = softmax_scale · (q_i · k_j)
/// s = softcap · tanh(s / softcap)          if a softcap is set
/// s = s + bias[i, j]                       if a bias is given with the inputs
/// s = s − slope[head] · |i + off − j|      if ALiBi slopes are set
/// ```
///
/// and key j is hidden if any of causality, window, mask and lengths hides it, or if s is −∞.
///
/// ```
/// use tilewise_core::Options;
/// let options = Options::new().causal(true).window_left(255).softcap(50.0);
/// assert!(options.validate().is_ok());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub(crate) softmax_scale: Option<f64>,
    pub(crate) causal: bool,
    pub(crate) alignment: Alignment,
    pub(crate) window_left: Option<usize>,
    pub(crate) window_right: Option<usize>,
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi_slopes: Option<Vec<f32>>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) dropout: Option<Dropout>,
}

impl Options {
    /// Full attention with softmax_scale 1/√head_dim.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor of q·k; any finite number, 0 and negative included. Default: 1/√head_dim.
    pub fn softmax_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.softmax_scale = scale.into();
        self
    }

    /// Key j is visible to query i only if j ≤ i + off.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Where causality, windows and ALiBi are measured from.
    pub fn alignment(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Key j is visible only if j ≥ i + off − left. `None`: no bound. A window of w keys that
    /// includes the query's own is `left = w − 1`.
    pub fn window_left(mut self, left: impl Into<Option<usize>>) -> Self {
        self.window_left = left.into();
        self
    }

    /// Key j is visible only if j ≤ i + off + right. `None`: no bound.
    pub fn window_right(mut self, right: impl Into<Option<usize>>) -> Self {
        self.window_right = right.into();
        self
    }

    /// Caps scaled scores smoothly to (−cap, cap), before bias and mask. Must be above 0.
    pub fn softcap(mut self, cap: impl Into<Option<f64>>) -> Self {
        self.softcap = cap.into();
        self
    }

    /// ALiBi slopes, one a query head; see [`alibi_slopes`](crate::alibi_slopes()).
    pub fn alibi_slopes(mut self, slopes: impl Into<Option<Vec<f32>>>) -> Self {
        self.alibi_slopes = slopes.into();
        self
    }

    /// Attention sinks, one a query head: e^sink joins the denominator and brings no value.
    pub fn sinks(mut self, sinks: impl Into<Option<Vec<f32>>>) -> Self {
        self.sinks = sinks.into();
        self
    }

    /// Drops weights after the softmax, for training.
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout>>) -> Self {
        self.dropout = dropout.into();
        self
    }

    /// The factor of q·k for this head_dim.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.softmax_scale
            .unwrap_or_else(|| 1.0 / (head_dim.max(1) as f64).sqrt())
    }

    /// Whether causal masking is on.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The alignment set.
    pub fn get_alignment(&self) -> Alignment {
        self.alignment
    }

    /// The softmax_scale set; `None` stands for 1/√head_dim.
    pub fn get_softmax_scale(&self) -> Option<f64> {
        self.softmax_scale
    }

    /// The window's left bound.
    pub fn get_window_left(&self) -> Option<usize> {
        self.window_left
    }

    /// The window's right bound, causality not counted in.
    pub fn get_window_right(&self) -> Option<usize> {
        self.window_right
    }

    /// The softcap set.
    pub fn get_softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// The ALiBi slopes set.
    pub fn get_alibi_slopes(&self) -> Option<&[f32]> {
        self.alibi_slopes.as_deref()
    }

    /// The sinks set.
    pub fn get_sinks(&self) -> Option<&[f32]> {
        self.sinks.as_deref()
    }

    /// The dropout set.
    pub fn get_dropout(&self) -> Option<Dropout> {
        self.dropout
    }

    /// Checks what needs no shapes: the scale is finite, the cap finite and above 0, slopes and
    /// sinks are numbers, a share dropped is below 1.
    ///
    /// # Errors
    /// [`Error::Option`], naming the first that is outside its domain.
    pub fn validate(&self) -> Result<()> {
        if let Some(scale) = self.softmax_scale
            && !scale.is_finite()
        {
            return Err(Error::option(
                "softmax_scale",
                "a finite number",
                format!("{scale:e}"),
            ));
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::option(
                "softcap",
                "a finite number above 0",
                format!("{cap:e}"),
            ));
        }
        if let Some(dropout) = &self.dropout {
            dropout.validate()?;
        }
        for slope in self.alibi_slopes.iter().flatten() {
            if !slope.is_finite() {
                return Err(Error::option(
                    "alibi_slopes",
                    "finite numbers",
                    slope.to_string(),
                ));
            }
        }
        for sink in self.sinks.iter().flatten() {
            // −∞ is a sink that is not there; +∞ would leave no probability to any key.
            if sink.is_nan() || *sink == f32::INFINITY {
                return Err(Error::option(
                    "sinks",
                    "numbers below +inf",
                    sink.to_string(),
                ));
            }
        }
        Ok(())
    }
}
