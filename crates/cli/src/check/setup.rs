//! Problems that a specification describes by their sizes, with generated inputs.

use serde::Deserialize;
use serde_json::{Value, json};
use tilewise::{DType, Dims, Element};

use super::memory::Placed;
use super::numbers::grid;
use super::tensors::Tensors;
use crate::case::CaseOptions;
use crate::container::Plain;

/// `setup`, `baseline` or `alternate_with`, in the names of the schema.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Setup {
    #[serde(rename = "B", default = "one")]
    batch: usize,
    #[serde(rename = "Hq", default = "one")]
    num_heads: usize,
    #[serde(rename = "Hk")]
    num_kv_heads: Option<usize>,
    #[serde(rename = "Sq")]
    seqlen_q: usize,
    #[serde(rename = "Sk")]
    seqlen_k: Option<usize>,
    #[serde(rename = "D")]
    head_dim: usize,
    #[serde(rename = "Dv")]
    head_dim_v: Option<usize>,
    #[serde(default = "f32_name")]
    dtype: String,
    bias: Option<[usize; 4]>,
    bias_fill: Option<BiasFill>,
    pub(super) threads: Option<usize>,
    #[serde(flatten)]
    options: CaseOptions,
}

/// 0 before key `from`, `value` from there on.
#[derive(Clone, Copy, Debug, Deserialize)]
struct BiasFill {
    from: usize,
    value: f64,
}

/// Elements of the largest tensor that is generated: 8 GiB of f32.
const MOST_ELEMENTS: usize = 1 << 31;

fn one() -> usize {
    1
}

fn f32_name() -> String {
    "f32".into()
}

impl Setup {
    /// Reads a setup.
    ///
    /// # Errors
    /// What in it is not understood.
    pub(super) fn parse(value: &Value) -> Result<Setup, String> {
        let setup: Setup = serde_json::from_value(value.clone()).map_err(|e| e.to_string())?;
        if let Some(name) = setup.options.rest.keys().next() {
            return Err(format!("{name:?} is not supported"));
        }
        if setup.options.dropout_p != 0.0 {
            return Err("dropout is not supported".into());
        }
        let most = [
            Some([setup.batch, setup.num_heads, setup.seqlen_q, setup.widest()]),
            Some([setup.batch, setup.kv_heads(), setup.keys(), setup.widest()]),
            setup.bias,
        ];
        for shape in most.into_iter().flatten() {
            let elements = shape
                .iter()
                .try_fold(1usize, |n, &size| n.checked_mul(size));
            if elements.is_none_or(|n| n > MOST_ELEMENTS) {
                return Err(format!(
                    "a tensor of shape {shape:?} is too large to be generated"
                ));
            }
        }
        Ok(setup)
    }

    /// Reads a setup whose missing sizes are those of `dims`.
    ///
    /// # Errors
    /// What in it is not understood.
    pub(super) fn parse_over(dims: &Dims, value: &Value) -> Result<Setup, String> {
        let mut whole = json!({
            "B": dims.batch, "Hq": dims.num_heads, "Hk": dims.num_kv_heads, "Sq": dims.seqlen_q,
            "Sk": dims.seqlen_k, "D": dims.head_dim, "Dv": dims.head_dim_v,
        });
        let given = value
            .as_object()
            .ok_or_else(|| format!("{value} is no setup"))?;
        for (name, value) in given {
            whole[name] = value.clone();
        }
        // What a setup does not say follows from what it does, not from the case.
        for (follower, leader) in [("Hk", "Hq"), ("Dv", "D")] {
            if given.contains_key(leader) && !given.contains_key(follower) {
                whole[follower] = Value::Null;
            }
        }
        Setup::parse(&whole)
    }

    fn kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    fn keys(&self) -> usize {
        self.seqlen_k.unwrap_or(self.seqlen_q)
    }

    fn widest(&self) -> usize {
        self.head_dim.max(self.head_dim_v.unwrap_or(0))
    }

    /// Element type.
    ///
    /// # Errors
    /// If its name is unknown.
    pub(super) fn dtype(&self) -> Result<DType, String> {
        self.dtype
            .parse()
            .map_err(|e: tilewise::Error| e.to_string())
    }

    /// The tensors, from the numbers of `seed`.
    pub(super) fn tensors<T: Element + Plain>(&self, seed: u64) -> Tensors<T> {
        let (kv_heads, seqlen_k) = (self.kv_heads(), self.keys());
        let placed = |name: &str, shape: [usize; 4]| {
            Placed::contiguous(grid::<T>(seed, name, shape.iter().product()), shape)
        };
        let bias = self.bias.map(|shape| match self.bias_fill {
            None => placed("bias", shape),
            Some(fill) => {
                let row = (0..shape[3])
                    .map(|key| T::from_f64(if key < fill.from { 0.0 } else { fill.value }));
                let row: Vec<T> = row.collect();
                let rows = shape[..3].iter().product();
                Placed::contiguous(row.repeat(rows), shape)
            }
        });
        Tensors {
            q: placed(
                "q",
                [self.batch, self.num_heads, self.seqlen_q, self.head_dim],
            ),
            k: placed("k", [self.batch, kv_heads, seqlen_k, self.head_dim]),
            v: placed(
                "v",
                [
                    self.batch,
                    kv_heads,
                    seqlen_k,
                    self.head_dim_v.unwrap_or(self.head_dim),
                ],
            ),
            bias,
            mask: None,
            keep: None,
            dout: None,
            dlse: None,
            cu_seqlens: None,
            seqused_k: None,
            block_table: None,
            options: self.options.to_options(),
        }
    }
}
