//! `tilewise io`: bytes between slow and fast memory, counted and from formulas.

mod chip;
mod compare;
mod measure;
mod model;
mod ncu;
mod pass;
mod plot;
mod table;
mod watch;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use tilewise::core::io_model::Modifiers;
use tilewise::core::schedule::BlockSizes;
use tilewise::{DType, Element, Options, Problem};

use crate::args::problem::ProblemArgs;
use crate::args::tensors::{ReadArgs, TensorArgs};
use crate::chart::Chart;
use crate::cli::Verdict;
use crate::input::{self, AnyLoaded, Loaded};
use crate::shapes::{self, Shape};
use crate::ui;
use chip::Chip;
use model::{Report, Source};
use pass::Pass;

/// Count the bytes that standard attention, FA1 and FA2 move between slow and fast memory
///
/// Counted from a run of the algorithms as the papers write them, and from exact formulas: the two must
/// agree. Beside them the papers' leading terms, traffic and predicted time over N, and FA1 and FA2
/// compared figure by figure.
///
/// Exit status: 0 if counts and formulas agree, 1 if they differ, 2 on an error.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  tilewise io                          # 8 heads of 1024 × 64 on an A100
  tilewise io --shape 1,32,8,2048,2048,128,causal --dtype bf16 --chip h100
  tilewise io --shape sq=2048,d=64 --blocks 64x64     # equal tiles: 3 to 2
  tilewise io --backward               # the gradients' pass
  tilewise io testdata/minilm_layer5_s196.safetensors --chip cpu
  tilewise io --svg traffic.svg        # the plot over N as a file")]
pub(crate) struct IoArgs {
    /// Input files, as `compare` takes them, in place of --shape
    #[arg(value_name = "INPUT", conflicts_with = "shape")]
    inputs: Vec<PathBuf>,

    /// Sizes: b,hq,hkv,sq,sk,d[,dv][,causal], or by name: sq=1000,d=64
    #[arg(long, visible_alias = "dims", value_parser = shapes::parse_one, default_value = "1,8,8,1024,1024,64")]
    shape: Shape,

    /// The backward pass: what the gradients of q, k and v take
    #[arg(long)]
    backward: bool,

    #[command(flatten)]
    read: ReadArgs,

    #[command(flatten)]
    problem: ProblemArgs,

    /// Whose fast memory the block sizes are for: a100, h100, h200 (shared memory of a multiprocessor) or
    /// cpu (this machine's second-level cache)
    #[arg(long, default_value = "a100", help_heading = "Fast memory")]
    chip: Chip,

    /// Size of the fast memory, M, in place of --chip
    #[arg(long, value_name = "SIZE", value_parser = ui::parse_bytes, conflicts_with = "chip", help_heading = "Fast memory")]
    memory: Option<u64>,

    /// Bandwidth of the slow memory in GB/s, for the predicted time [default: the chip's]
    #[arg(long, value_name = "GBPS", value_parser = positive, help_heading = "Fast memory")]
    bandwidth: Option<f64>,

    /// Rows × keys a tile for all algorithms, as 64x64 [default: FA1's formula and FA2's list]
    #[arg(long, value_name = "RxC", value_parser = parse_blocks, help_heading = "Fast memory")]
    blocks: Option<BlockSizes>,

    /// Rows × keys a tile of FA1
    #[arg(long, value_name = "RxC", value_parser = parse_blocks, help_heading = "Fast memory")]
    fa1_blocks: Option<BlockSizes>,

    /// Rows × keys a tile of FA2 and of the products of standard attention
    #[arg(long, value_name = "RxC", value_parser = parse_blocks, help_heading = "Fast memory")]
    fa2_blocks: Option<BlockSizes>,

    /// Multiply-adds that a run to count may take: where all heads take more, one head is run and stands
    /// for all; where that takes more too, nothing is counted, and the output says so
    #[arg(long, value_name = "N", default_value_t = 2e9, value_parser = positive, help_heading = "Measurement")]
    count_limit: f64,

    /// Measure the backends' real traffic on this machine too, as far as it lets one
    #[arg(long, help_heading = "Measurement")]
    measure: bool,

    /// Write the plot of traffic and predicted time over N
    #[arg(long, value_name = "OUT.svg", help_heading = "Output")]
    svg: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Run one algorithm on one backend once: what `--measure` starts under a profiler
    #[arg(long, hide = true, value_name = "BACKEND/ALGORITHM")]
    worker: Option<String>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x.is_finite() => Ok(x),
        _ => Err("expected a number above 0".into()),
    }
}

fn parse_blocks(text: &str) -> Result<BlockSizes, String> {
    let expected = || format!("{text}: expected rows and keys a tile, as 64x128");
    let (rows, keys) = text.split_once(['x', '×']).ok_or_else(expected)?;
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| expected());
    BlockSizes::new(number(rows)?, number(keys)?).map_err(|error| error.to_string())
}

impl IoArgs {
    fn pass(&self) -> Pass {
        if self.backward {
            Pass::Backward
        } else {
            Pass::Forward
        }
    }

    /// The chip, with what is said of it put over it, on which `problem` is to run.
    fn chip(&self, problem: &Problem) -> Result<Chip> {
        let mut chip = match self.memory {
            Some(bytes) => Chip::of_size(usize::try_from(bytes).context("--memory")?),
            None => self.chip.clone(),
        };
        let dims = problem.dims();
        let widest = dims.head_dim.max(dims.head_dim_v);
        let least = widest.saturating_mul(4 * problem.dtype().size());
        if self.memory.is_some() && chip.fast_bytes < least {
            bail!(
                "--memory: expected room for a row each of q, k, v and O, {}, got {}",
                ui::bytes(least as u64),
                ui::bytes(chip.fast_bytes as u64)
            );
        }
        if let Some(gbps) = self.bandwidth {
            chip.bandwidth = Some(gbps * 1e9);
        }
        Ok(chip)
    }
}

pub(crate) fn run(args: &IoArgs) -> Result<Verdict> {
    if let Some(worker) = &args.worker {
        measure::worker(args, worker)?;
        return Ok(Verdict::Agree);
    }
    let mut report = collect(args)?;
    if args.measure {
        if !args.inputs.is_empty() {
            bail!("--measure: expected --shape, got files");
        }
        report.measured = measure::all(args, &problem_of_shape(args)?)?;
    }
    if let Some(path) = &args.svg {
        let text = crate::chart::svg_file(&plot::charts(&report.over_n))?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    if args.json {
        ui::print_json(&report)?;
    } else {
        ui::print(&table::render(&report))?;
    }
    Ok(report.verdict())
}

/// What `--json` prints, and the charts of `--svg`.
pub(crate) fn figures(args: &IoArgs) -> Result<(serde_json::Value, Vec<Chart>)> {
    let report = collect(args)?;
    Ok((serde_json::to_value(&report)?, plot::charts(&report.over_n)))
}

fn collect(args: &IoArgs) -> Result<Report> {
    if args.inputs.is_empty() {
        let problem = problem_of_shape(args)?;
        let inputs = vec![format!("--shape {}", args.shape)];
        Report::new(args, &problem, inputs, Modifiers::default(), &Source::Shape)
    } else {
        let tensors = TensorArgs {
            inputs: args.inputs.clone(),
            read: args.read.clone(),
        };
        match input::load(&tensors, &args.problem)? {
            AnyLoaded::F64(loaded) => of_file(args, &loaded),
            AnyLoaded::F32(loaded) => of_file(args, &loaded),
            AnyLoaded::F16(loaded) => of_file(args, &loaded),
            AnyLoaded::BF16(loaded) => of_file(args, &loaded),
        }
    }
}

/// The problem of `--shape`.
fn problem_of_shape(args: &IoArgs) -> Result<Problem> {
    let dims = args.shape.dims;
    for (tensor, shape) in crate::random::shapes(&dims) {
        crate::random::count(tensor, shape)?;
    }
    let options = Options::new().causal(args.shape.causal);
    let options = args.problem.apply(options, dims.num_heads);
    let dtype = args.read.dtype.unwrap_or(DType::F32);
    Problem::dense(dims, dtype, &options).with_context(|| format!("--shape {}", args.shape))
}

fn of_file<T: Element>(args: &IoArgs, loaded: &Loaded<T>) -> Result<Report> {
    let files = || loaded.source.join(" ");
    let inputs = loaded.inputs().with_context(files)?;
    let problem = Problem::new(&inputs, &loaded.options).with_context(files)?;
    let modifiers = Modifiers {
        bias: inputs.bias.as_ref().map(|bias| bias.shape()),
        mask: inputs.mask.as_ref().map(|mask| mask.shape()),
        keep_mask: inputs.keep_mask.as_ref().map(|mask| mask.shape()),
    };
    let pass = args.pass();
    let count = |algorithm, sizes| watch::inputs(pass, &problem, &inputs, algorithm, sizes);
    Report::new(
        args,
        &problem,
        loaded.source.clone(),
        modifiers,
        &Source::Files(&count),
    )
}
