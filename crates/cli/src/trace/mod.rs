//! `tilewise trace`: the running state step by step.

mod attention;
mod backward;
mod backward_text;
mod numbers;
mod one_head;
mod page;
mod record;
mod softmax;
#[cfg(test)]
mod tests;
mod text;

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use tilewise::{Algorithm, DType};

use crate::args::problem::ProblemArgs;
use crate::args::tensors::{ReadArgs, TensorArgs};
use crate::cli::Verdict;
use crate::input::{self, AnyLoaded, Matrix};
use crate::ui;
use attention::AttentionTrace;

/// Show the running state step by step: of softmax, and of standard attention, FA1 and FA2, forward and
/// backward
///
/// One head is traced: what each step loads, what the state (m, l, O) becomes, what it stores, and
/// in the end how far the result is from the naive definition. Without an input, a tiny example of
/// 4 queries and 6 keys.
///
/// Exit status: 0 if what was traced agrees with the definition, 1 if it differs, 2 on an error.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  tilewise trace --softmax 1,3,2         # safe, online, by blocks
  tilewise trace                         # the tiny example
  tilewise trace --backward              # its gradients
  tilewise trace --q '1,0;0,1' --k '1,2;3,1;0,1' --v '1,0;0,1;1,1' --block-k 1
  tilewise trace testdata/minilm_layer5_s196.safetensors --html trace.html")]
pub(crate) struct TraceArgs {
    /// Scores of one row, for example 1,3,2: trace their softmax instead of attention
    #[arg(
        long,
        value_name = "NUMBERS",
        value_delimiter = ',',
        value_parser = parse_score,
        allow_hyphen_values = true,
        conflicts_with_all = ["inputs", "q", "k", "v", "html", "algorithms", "backward"],
        help_heading = "Softmax"
    )]
    softmax: Vec<f64>,

    /// Scores a block
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_size,
        default_value = "2",
        requires = "softmax",
        help_heading = "Softmax"
    )]
    block: usize,

    /// Input files, as `compare` takes them
    #[arg(value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    #[command(flatten)]
    read: ReadArgs,

    /// Queries of one head as numbers, rows apart by semicolons: '1,0; 0,1' (f32 unless --dtype says otherwise)
    #[arg(long, value_name = "MATRIX", allow_hyphen_values = true, conflicts_with = "inputs", requires_all = ["k", "v"], help_heading = "Input")]
    q: Option<Matrix>,

    /// Keys likewise
    #[arg(long, value_name = "MATRIX", allow_hyphen_values = true, conflicts_with = "inputs", requires_all = ["q", "v"], help_heading = "Input")]
    k: Option<Matrix>,

    /// Values likewise
    #[arg(long, value_name = "MATRIX", allow_hyphen_values = true, conflicts_with = "inputs", requires_all = ["q", "k"], help_heading = "Input")]
    v: Option<Matrix>,

    /// Trace the backward pass: from dout, the gradient that arrives at the output, to dq, dk and dv
    #[arg(long)]
    backward: bool,

    /// The gradient that arrives, likewise [default: `do` of the files, or seeded numbers]
    #[arg(long, value_name = "MATRIX", allow_hyphen_values = true, conflicts_with = "inputs", requires_all = ["backward", "q", "k", "v"], help_heading = "Input")]
    dout: Option<Matrix>,

    #[command(flatten)]
    problem: ProblemArgs,

    /// Algorithms: standard, fa1, fa2
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "standard,fa1,fa2",
        help_heading = "Selection"
    )]
    algorithms: Vec<Algorithm>,

    /// Batch entry, or packed sequence, to trace
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        help_heading = "Selection"
    )]
    batch: usize,

    /// Query head to trace
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        help_heading = "Selection"
    )]
    head: usize,

    /// Rows of q whose numbers are shown, A..B [default: the first of every tile]
    #[arg(long, value_name = "A..B", value_parser = parse_range, help_heading = "Selection")]
    rows: Option<Range<usize>>,

    /// Rows a tile, B_r [default: an eighth of all, at least 2]
    #[arg(long, value_name = "N", value_parser = parse_size, help_heading = "Tiles")]
    block_q: Option<usize>,

    /// Keys a tile, B_c [default: an eighth of all, at least 2]
    #[arg(long, value_name = "N", value_parser = parse_size, help_heading = "Tiles")]
    block_k: Option<usize>,

    /// Numbers that fast memory holds, M: tiles as FA1 sizes them, B_c = ceil(M / 4 head_dim) and
    /// B_r = min(B_c, head_dim)
    #[arg(long, value_name = "M", value_parser = parse_size, conflicts_with_all = ["block_q", "block_k"], help_heading = "Tiles")]
    on_chip: Option<usize>,

    /// Skip standard attention where its S and P would need more memory than this
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = ui::parse_bytes, help_heading = "Selection")]
    memory_limit: u64,

    /// Steps of each algorithm that are printed: a number, or all [default: 12; backward 32]. JSON and HTML
    /// have every step
    #[arg(long, value_name = "N", value_parser = parse_steps, help_heading = "Output")]
    steps: Option<usize>,

    /// Also write an animation: one HTML file that needs nothing else
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    html: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
}

fn parse_score(text: &str) -> Result<f64, String> {
    text.trim()
        .parse()
        .map_err(|_| "expected a number, for example 1.5 or -inf".into())
}

fn parse_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a number of at least 1".into()),
    }
}

fn parse_steps(text: &str) -> Result<usize, String> {
    match text {
        "all" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "expected a number, or all".into()),
    }
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let range = text
        .split_once("..")
        .and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
    range
        .filter(|range: &Range<usize>| !range.is_empty())
        .ok_or_else(|| "expected A..B with A below B, for example 0..4".into())
}

/// The example without an input: m grows from tile to tile in some rows and stays in others.
const EXAMPLE: [&str; 3] = [
    "1,0; 0,1; 1,1; 2,-1",
    "1,0; 0,1; 2,1; -1,1; 3,0; 1,2",
    "1,0; 0,1; 1,1; 2,0; 0,2; 1,-1",
];

const EXAMPLE_DOUT: &str = "1,0; 0,1; 1,-1; -1,2";

pub(crate) fn run(args: &TraceArgs) -> Result<Verdict> {
    if !args.softmax.is_empty() {
        let trace = softmax::trace(&args.softmax, args.block);
        if args.json {
            ui::print_json(&trace)?;
        } else {
            ui::print(&trace.render())?;
        }
        return Ok(Verdict::Agree);
    }
    let trace = trace(args)?;
    if let Some(path) = &args.html {
        page::write(path, &trace)?;
        ui::note(&format!("the animation is in {}", path.display()));
    }
    if args.json {
        ui::print_json(&trace)?;
    } else {
        let steps = args.steps.unwrap_or(if args.backward { 32 } else { 12 });
        ui::print(&text::render(&trace, steps))?;
    }
    if trace.runs.iter().all(|run| run.skipped.is_some()) {
        bail!("nothing ran: every algorithm was skipped");
    }
    Ok(if trace.agrees() {
        Verdict::Agree
    } else {
        Verdict::Differ
    })
}

fn trace(args: &TraceArgs) -> Result<AttentionTrace> {
    match &load(args)? {
        AnyLoaded::F64(loaded) => attention::trace(args, loaded),
        AnyLoaded::F32(loaded) => attention::trace(args, loaded),
        AnyLoaded::F16(loaded) => attention::trace(args, loaded),
        AnyLoaded::BF16(loaded) => attention::trace(args, loaded),
    }
}

fn load(args: &TraceArgs) -> Result<AnyLoaded> {
    let dtype = args.read.dtype.unwrap_or(DType::F32);
    if let (Some(q), Some(k), Some(v)) = (&args.q, &args.k, &args.v) {
        let dout = args.dout.as_ref();
        return input::direct("command line", [q, k, v], dout, dtype, &args.problem);
    }
    if args.inputs.is_empty() {
        let parse = |text: &str| -> Result<Matrix> { text.parse().map_err(anyhow::Error::msg) };
        let [q, k, v] = [parse(EXAMPLE[0])?, parse(EXAMPLE[1])?, parse(EXAMPLE[2])?];
        let dout = parse(EXAMPLE_DOUT)?;
        let name = "built-in example";
        return input::direct(name, [&q, &k, &v], Some(&dout), dtype, &args.problem);
    }
    let tensors = TensorArgs {
        inputs: args.inputs.clone(),
        read: args.read.clone(),
    };
    input::load(&tensors, &args.problem)
}
