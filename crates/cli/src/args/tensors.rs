//! Where the tensors come from.

use std::path::{Path, PathBuf};

use clap::Args;
use tilewise::DType;

/// Input files and how to read them.
#[derive(Args, Clone, Debug)]
pub(crate) struct TensorArgs {
    /// One .safetensors or .npz file that holds q, k and v, or three .npy files in that order;
    /// further .npy files as NAME=FILE, for example mask=mask.npy
    #[arg(required = true, value_name = "INPUT")]
    pub(crate) inputs: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) read: ReadArgs,
}

/// How to read input files.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReadArgs {
    /// Order of the axes of q, k, v and o. Three axes lack the batch, two the heads also
    #[arg(long, value_enum, default_value_t = Layout::Bhsd, help_heading = "Input")]
    pub(crate) layout: Layout,

    /// Names of tensors in the file, for example q=query,k=key,v=value
    #[arg(long, value_name = "TENSOR=NAME", value_delimiter = ',', value_parser = parse_name, help_heading = "Input")]
    pub(crate) name: Vec<(String, String)>,

    /// Tensors of the file to leave aside, for example mask,o
    #[arg(long, value_name = "TENSOR", value_delimiter = ',', value_parser = parse_tensor, help_heading = "Input")]
    pub(crate) ignore: Vec<String>,

    /// Round inputs to f64, f32, f16 or bf16 first; also names the type of bf16 saved by numpy
    #[arg(long, help_heading = "Input")]
    pub(crate) dtype: Option<DType>,
}

/// Order of the axes in a file.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// [batch, heads, seqlen, head_dim]
    Bhsd,
    /// [batch, seqlen, heads, head_dim]
    Bshd,
}

/// Every tensor a file may bring.
pub(crate) const TENSORS: [&str; 18] = [
    "q",
    "k",
    "v",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "k_pages",
    "v_pages",
    "block_table",
    "o",
    "lse",
    "keep_mask",
    "do",
    "dlse",
];

/// A file to write is of the one kind that is written: under the name of another no command would read it again.
pub(crate) fn expect_safetensors(path: &Path) -> anyhow::Result<()> {
    let extension = path.extension();
    if extension.is_none_or(|extension| !extension.eq_ignore_ascii_case("safetensors")) {
        anyhow::bail!(
            "{}: expected a name that ends in .safetensors",
            path.display()
        );
    }
    Ok(())
}

fn parse_tensor(text: &str) -> Result<String, String> {
    if TENSORS.contains(&text) {
        Ok(text.to_string())
    } else {
        Err(format!("expected one of {}", TENSORS.join(", ")))
    }
}

fn parse_name(text: &str) -> Result<(String, String), String> {
    let (tensor, name) = text
        .split_once('=')
        .ok_or("expected TENSOR=NAME, for example q=query")?;
    Ok((parse_tensor(tensor)?, name.to_string()))
}

impl ReadArgs {
    /// What the file calls `tensor`.
    pub(crate) fn name_of<'a>(&'a self, tensor: &'a str) -> &'a str {
        self.name
            .iter()
            .rev()
            .find(|(known, _)| known == tensor)
            .map_or(tensor, |(_, name)| name)
    }
}
