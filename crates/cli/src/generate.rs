//! `tilewise generate`: seeded inputs of a given shape.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use tilewise::half::{bf16, f16};
use tilewise::{DType, Element, Problem};

use crate::args::tensors::expect_safetensors;
use crate::cli::Verdict;
use crate::container::{Plain, Tensor, write_safetensors};
use crate::shapes::{self, Shape};
use crate::{random, ui};

/// Write standard normal q, k and v of a given shape: the same for a seed on every machine
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  tilewise generate --shape 1,8,8,4096,4096,128 --dtype bf16 -o x.safetensors
  tilewise generate --shape hq=8,sq=60,d=64 --packed 37,23 -o p.safetensors")]
pub(crate) struct GenerateArgs {
    /// b,hq,hkv,sq,sk,d[,dv]: batch, query heads, key and value heads, queries, keys, head_dim, head_dim of v
    #[arg(long, value_parser = shapes::parse_one)]
    shape: Shape,

    /// Element type: f64, f32, f16 or bf16. Numbers are drawn in f32 and rounded
    #[arg(long, default_value_t = DType::F32)]
    dtype: DType,

    /// Seed
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Lengths of packed sequences, N or QUERIES:KEYS each, that stand one after another along
    /// seqlen. Batch must be 1; rows beyond their sum belong to no sequence
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = parse_length)]
    packed: Vec<(i32, i32)>,

    /// File to write
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,

    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
}

fn parse_length(text: &str) -> Result<(i32, i32), String> {
    let number = |text: &str| match text.parse::<i32>() {
        Ok(n) if n >= 0 => Ok(n),
        _ => Err("expected a length, or QUERIES:KEYS".to_string()),
    };
    match text.split_once(':') {
        Some((queries, keys)) => Ok((number(queries)?, number(keys)?)),
        None => number(text).map(|n| (n, n)),
    }
}

pub(crate) fn run(args: &GenerateArgs) -> Result<Verdict> {
    expect_safetensors(&args.output)?;
    if args.shape.causal {
        bail!("--shape: causal is said when attention is computed, not in the file");
    }
    // What is written is what the other commands read.
    let options = args.shape.options();
    Problem::dense(args.shape.dims, args.dtype, &options)
        .with_context(|| format!("--shape {}", args.shape))?;
    match args.dtype {
        DType::F64 => write::<f64>(args),
        DType::F32 => write::<f32>(args),
        DType::F16 => write::<f16>(args),
        DType::BF16 => write::<bf16>(args),
        other => bail!("--dtype: {other} cannot be written"),
    }?;
    Ok(Verdict::Agree)
}

fn write<T: Element + Plain>(args: &GenerateArgs) -> Result<()> {
    let cumulative = cumulative(args)?;
    let shapes = random::shapes(&args.shape.dims);
    let mut data = Vec::new();
    for (name, shape) in shapes {
        let count = random::count(name, shape)?;
        data.push((name, shape, random::normal::<T>(args.seed, name, count)?));
    }
    let mut tensors: Vec<Tensor<'_>> = data
        .iter()
        .map(|(name, shape, data)| Tensor::new(name, shape, data))
        .collect();
    if let Some((queries, keys)) = &cumulative {
        tensors.push(Tensor::new("cu_seqlens_q", &[queries.len()], queries));
        tensors.push(Tensor::new("cu_seqlens_k", &[keys.len()], keys));
    }
    // One entry: the order of several would differ from run to run.
    let source = format!(
        "tilewise generate {} --seed {}",
        env!("CARGO_PKG_VERSION"),
        args.seed
    );
    let metadata = BTreeMap::from([("source".to_string(), source)]);
    write_safetensors(&args.output, &tensors, &metadata)?;
    let shapes: BTreeMap<&str, [usize; 4]> = shapes.into_iter().collect();
    if args.json {
        return ui::print_json(&json!({
            "schema": 1,
            "output": args.output.display().to_string(),
            "dtype": T::DTYPE.name(),
            "seed": args.seed,
            "shapes": shapes,
            "packed_sequences": cumulative.map(|(queries, _)| queries.len() - 1),
        }));
    }
    let [q, k, v] = ["q", "k", "v"].map(|name| shapes[name]);
    Ok(ui::print(&format!(
        "{}: q {q:?}, k {k:?}, v {v:?}, {}\n",
        args.output.display(),
        T::DTYPE
    ))?)
}

/// cu_seqlens of q and of k.
fn cumulative(args: &GenerateArgs) -> Result<Option<(Vec<i32>, Vec<i32>)>> {
    if args.packed.is_empty() {
        return Ok(None);
    }
    let dims = args.shape.dims;
    if dims.batch != 1 {
        bail!("--packed: expected batch 1, got {}", dims.batch);
    }
    let (mut queries, mut keys) = (vec![0i32], vec![0i32]);
    for &(q, k) in &args.packed {
        for (cumulative, length, rows, axis) in [
            (&mut queries, q, dims.seqlen_q, "sq"),
            (&mut keys, k, dims.seqlen_k, "sk"),
        ] {
            let last = cumulative.last().copied().unwrap_or(0);
            let next = last
                .checked_add(length)
                .context("--packed: lengths beyond 31 bits")?;
            if next as usize > rows {
                bail!("--packed: lengths add up to {next} or more, {axis} is {rows}");
            }
            cumulative.push(next);
        }
    }
    Ok(Some((queries, keys)))
}
