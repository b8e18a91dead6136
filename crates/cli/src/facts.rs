//! A problem in the words of reports.

use serde::Serialize;
use tilewise::{Alignment, Problem};

/// Sizes and options of a problem.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ProblemFacts {
    pub(crate) batch: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) dtype: &'static str,
    pub(crate) softmax_scale: f64,
    pub(crate) causal: bool,
    pub(crate) alignment: &'static str,
    pub(crate) window_left: Option<usize>,
    pub(crate) window_right: Option<usize>,
    pub(crate) softcap: Option<f64>,
    pub(crate) bias: bool,
    pub(crate) mask: bool,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    /// Number of packed sequences; `null` if not packed.
    pub(crate) packed_sequences: Option<usize>,
    /// Keys a page; `null` if not paged.
    pub(crate) page_size: Option<usize>,
    /// Of the two products, over live pairs.
    pub(crate) flops: f64,
    /// Of q, k, v, out and lse, each once.
    pub(crate) bytes: f64,
}

impl ProblemFacts {
    pub(crate) fn new(problem: &Problem) -> Self {
        let (dims, options) = (problem.dims(), problem.options());
        ProblemFacts {
            batch: dims.batch,
            num_heads: dims.num_heads,
            num_kv_heads: dims.num_kv_heads,
            seqlen_q: dims.seqlen_q,
            seqlen_k: dims.seqlen_k,
            head_dim: dims.head_dim,
            head_dim_v: dims.head_dim_v,
            dtype: problem.dtype().name(),
            softmax_scale: problem.softmax_scale(),
            causal: options.is_causal(),
            alignment: match options.get_alignment() {
                Alignment::BottomRight => "bottom-right",
                Alignment::TopLeft => "top-left",
            },
            window_left: options.get_window_left(),
            window_right: options.get_window_right(),
            softcap: options.get_softcap(),
            bias: problem.has_bias(),
            mask: problem.has_mask(),
            alibi: options.get_alibi_slopes().is_some(),
            sinks: options.get_sinks().is_some(),
            packed_sequences: problem.is_packed().then_some(problem.sequences().len()),
            page_size: problem.page_size(),
            flops: problem.flops(),
            bytes: problem.bytes(),
        }
    }

    /// The sizes in one line.
    pub(crate) fn sizes(&self) -> String {
        let pair = |a: usize, b: usize| {
            if a == b {
                a.to_string()
            } else {
                format!("{a}/{b}")
            }
        };
        format!(
            "batch {}, heads {}, seqlen {}, head_dim {}, {}",
            self.batch,
            pair(self.num_heads, self.num_kv_heads),
            pair(self.seqlen_q, self.seqlen_k),
            pair(self.head_dim, self.head_dim_v),
            self.dtype
        )
    }

    /// The options that are not defaults, in one line.
    pub(crate) fn options(&self) -> String {
        let mut said = Vec::new();
        if let Some(n) = self.packed_sequences {
            said.push(format!("{n} packed sequences"));
        }
        if let Some(page) = self.page_size {
            said.push(format!("pages of {page}"));
        }
        if self.causal {
            said.push("causal".into());
        }
        let bound = |bound: Option<usize>| bound.map_or("inf".to_string(), |b| b.to_string());
        if self.window_left.is_some() || self.window_right.is_some() {
            said.push(format!(
                "window {}..{}",
                bound(self.window_left),
                bound(self.window_right)
            ));
        }
        let positional = !said.is_empty() || self.alibi;
        if positional && self.alignment == "top-left" {
            said.push("top-left aligned".into());
        }
        if let Some(cap) = self.softcap {
            said.push(format!("softcap {cap}"));
        }
        for (set, word) in [
            (self.bias, "bias"),
            (self.mask, "mask"),
            (self.alibi, "ALiBi"),
            (self.sinks, "sinks"),
        ] {
            if set {
                said.push(word.into());
            }
        }
        said.push(format!("softmax_scale {:.6}", self.softmax_scale));
        said.join(", ")
    }
}
