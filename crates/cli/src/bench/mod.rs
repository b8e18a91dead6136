//! `tilewise bench`: timings over shapes, dtypes, backends, algorithms, instruction sets, threads.

mod ceilings;
mod device;
mod measure;
mod posed;
mod report;

use std::num::NonZeroUsize;

use anyhow::{Result, bail};
use clap::Args;
use tilewise::half::{bf16, f16};
use tilewise::{BackendKind, DType, Problem};

use crate::args::select::{self, Lane, SelectArgs};
use crate::cli::Verdict;
use crate::environment::Environment;
use crate::shapes::{self, Shape};
use crate::ui;
use report::{Format, Report};

/// Time backends and algorithms over shapes
///
/// Inputs are standard normal. Each call is the whole of attention, outputs preallocated. Every
/// combination is warmed up, then those of one shape are timed in turn (A B C, A B C, …), and the
/// median is reported with its spread: the distance between the quartiles over the median. On
/// CUDA, inputs lie on the device and its events time the kernels, with its cache flushed before.
/// GFLOP/s counts 2·(d + dv) operations for each live pair of query and key; GB/s counts K and V
/// read once.
#[derive(Args, Clone, Debug)]
#[command(after_help = shapes::HELP)]
pub(crate) struct BenchArgs {
    /// Shapes: b,hq,hkv,sq,sk,d[,dv][,causal], each with lists and ranges (see below)
    #[arg(
        long,
        value_name = "SHAPE",
        num_args = 1..,
        value_parser = shapes::parse,
        default_values = ["1,8,8,1024,1024,64", "1,8,8,4096,4096,128", "1,8,8,4096,4096,128,causal", "1,32,8,1,8192,128"]
    )]
    shapes: Vec<Vec<Shape>>,

    /// Element types: f64, f32, f16, bf16
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "f32"
    )]
    dtype: Vec<DType>,

    #[command(flatten)]
    posed: posed::PosedArgs,

    #[command(flatten)]
    select: SelectArgs,

    /// Threads of the CPU backend, a list [default: RAYON_NUM_THREADS, then all]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        value_parser = select::parse_threads,
        help_heading = "Selection"
    )]
    threads: Vec<NonZeroUsize>,

    /// Timed calls of each [default: about a second's worth, 3 to 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Measurement")]
    repeat: Option<u32>,

    /// Skip what would need more memory than this besides inputs and outputs
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = ui::parse_bytes, help_heading = "Measurement")]
    memory_limit: u64,

    /// Measure what the machine could do at most between the timings: fused multiply-adds from
    /// registers, and reading as many bytes as K and V have; on CUDA the matrix instruction that
    /// the algorithm uses, and reading device memory. `ceiling_share` is the time that the slower
    /// of the two would take at that rate over the median time, and `ceiling` names it. f32 on
    /// CUDA is made of three products of f16 or tf32 each: its ceiling is a third of theirs
    #[arg(long, help_heading = "Measurement")]
    ceilings: bool,

    /// Time the backward pass: 2·(3·d + 2·dv) operations for each live pair
    #[arg(long, help_heading = "Measurement")]
    backward: bool,

    /// With --backward on a GPU: sum dQ up in an order that does not change, so that the bits of
    /// gradients do not either
    #[arg(long, requires = "backward")]
    deterministic: bool,

    /// Seed of the inputs
    #[arg(long, default_value_t = 0, help_heading = "Measurement")]
    seed: u64,

    /// Print JSON
    #[arg(long, group = "format", help_heading = "Output")]
    json: bool,

    /// Print CSV
    #[arg(long, group = "format", help_heading = "Output")]
    csv: bool,

    /// Print a Markdown table
    #[arg(long, group = "format", help_heading = "Output")]
    markdown: bool,
}

/// Bytes of K and V.
fn kv_bytes(problem: &Problem) -> f64 {
    let dims = problem.dims();
    (dims.batch * dims.num_kv_heads) as f64
        * dims.seqlen_k as f64
        * (dims.head_dim + dims.head_dim_v) as f64
        * problem.dtype().size() as f64
}

impl BenchArgs {
    fn format(&self) -> Format {
        match (self.json, self.csv, self.markdown) {
            (true, ..) => Format::Json,
            (_, true, _) => Format::Csv,
            (_, _, true) => Format::Markdown,
            _ => Format::Text,
        }
    }
}

pub(crate) fn run(args: &BenchArgs) -> Result<Verdict> {
    let report = collect(args)?;
    ui::print(&report.render(args.format())?)?;
    if !report.results.iter().any(report::Row::timed) {
        bail!("nothing ran: every combination was skipped or failed");
    }
    Ok(Verdict::Agree)
}

/// What `--json` prints.
pub(crate) fn figures(args: &BenchArgs) -> Result<serde_json::Value> {
    Ok(serde_json::to_value(collect(args)?)?)
}

fn collect(args: &BenchArgs) -> Result<Report> {
    let shapes: Vec<Shape> = args.shapes.iter().flatten().copied().collect();
    let lanes = args.select.lanes()?;
    select::all_available(&lanes)?;
    let threads: Vec<Option<NonZeroUsize>> = if args.threads.is_empty() {
        vec![None]
    } else {
        args.threads.iter().copied().map(Some).collect()
    };

    let bar = ui::progress((shapes.len() * args.dtype.len() * threads.len()) as u64);
    let mut results = Vec::new();
    let mut devices = device::Devices::default();
    for &threads in &threads {
        let pool = select::pool(threads)?;
        for shape in &shapes {
            for &dtype in &args.dtype {
                bar.set_message(format!(
                    "{shape} {dtype}, {} threads",
                    pool.current_num_threads()
                ));
                let rows = match dtype {
                    DType::F64 => measure::shape::<f64>(args, shape, &lanes, &mut devices, &pool),
                    DType::F32 => measure::shape::<f32>(args, shape, &lanes, &mut devices, &pool),
                    DType::F16 => measure::shape::<f16>(args, shape, &lanes, &mut devices, &pool),
                    DType::BF16 => measure::shape::<bf16>(args, shape, &lanes, &mut devices, &pool),
                    other => bail!("--dtype: {other} cannot be timed"),
                }?;
                results.extend(rows);
                bar.inc(1);
            }
        }
    }
    let rates = match args.ceilings {
        true => device_rates(args, &lanes, &results, &mut devices),
        false => Vec::new(),
    };
    bar.finish_and_clear();

    let infos: Vec<_> = lanes
        .iter()
        .filter_map(|lane| lane.backend.as_ref().ok())
        .map(|backend| backend.info())
        .collect();
    Ok(Report {
        schema: 1,
        environment: Environment::new(rayon::current_num_threads(), &infos),
        ceilings: rates,
        results,
    })
}

/// What was measured of every device that something was timed on.
fn device_rates(
    args: &BenchArgs,
    lanes: &[Lane],
    results: &[report::Row],
    devices: &mut device::Devices,
) -> Vec<report::Rate> {
    let mut rates = Vec::new();
    let mut seen = Vec::new();
    for lane in lanes {
        let BackendKind::Cuda { ordinal } = lane.kind else {
            continue;
        };
        let timed = results
            .iter()
            .any(|row| row.backend == lane.name && row.timed());
        if timed && !seen.contains(&ordinal) {
            seen.push(ordinal);
            rates.extend(devices.every_rate(&lane.name, ordinal, &args.dtype));
        }
    }
    rates
}
