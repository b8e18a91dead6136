//! `tilewise report`: one page for a machine.

mod correctness;
mod figures;
mod memory;
mod page;

use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use tilewise::DType;

use crate::args::select::{self, Lane, SelectArgs};
use crate::cli::Verdict;
use crate::ui;

/// Write one HTML page about this machine: backends, correctness, speed, memory, traffic
///
/// Everything is measured now, by the other commands of this program: the page says which. It is one file
/// that needs no network.
///
/// Exit status: 0 if everything that ran is correct, 1 if something is not, 2 on an error.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  tilewise report -o report.html
  tilewise report -o quick.html --quick
  tilewise report -o gpu.html --backends cuda:0 --dtype bf16 --max-n 16384")]
pub(crate) struct ReportArgs {
    /// File to write
    #[arg(short, long, value_name = "OUT.html")]
    output: PathBuf,

    #[command(flatten)]
    select: SelectArgs,

    /// Element type of what is timed
    #[arg(long, default_value_t = DType::F32)]
    dtype: DType,

    /// Threads of the CPU backend [default: RAYON_NUM_THREADS, then all]
    #[arg(long, value_name = "N", value_parser = select::parse_threads, help_heading = "Selection")]
    threads: Option<NonZeroUsize>,

    /// Longest sequence that is timed
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_t = 4096,
        help_heading = "Measurement"
    )]
    max_n: u32,

    /// Skip what would need more memory than this besides inputs and outputs
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = ui::parse_bytes, help_heading = "Measurement")]
    memory_limit: u64,

    /// Small sizes and few calls: seconds in place of minutes
    #[arg(long, help_heading = "Measurement")]
    quick: bool,

    /// A sentence for the reader, for example about what else ran on the machine
    #[arg(long, value_name = "TEXT", help_heading = "Output")]
    note: Option<String>,
}

/// What is timed.
struct Plan {
    /// Lengths, doubling.
    lengths: Vec<usize>,
    /// Heads of the problems over N.
    heads: usize,
    head_dim: usize,
    /// Numbers of heads, and the length at which they are compared.
    head_counts: Vec<usize>,
    heads_length: usize,
    repeat: Option<usize>,
}

impl Plan {
    fn new(args: &ReportArgs) -> Plan {
        let max_n = args.max_n as usize;
        let (first, last) = if args.quick {
            (64.min(max_n), max_n.min(256))
        } else {
            (128.min(max_n), max_n)
        };
        let lengths = std::iter::successors(Some(first), |n| n.checked_mul(2));
        let lengths = lengths.take_while(|&n| n <= last).collect();
        Plan {
            lengths,
            heads: if args.quick { 2 } else { 8 },
            head_dim: 64,
            head_counts: if args.quick {
                vec![1, 4]
            } else {
                vec![1, 2, 4, 8, 16, 32]
            },
            heads_length: if args.quick {
                max_n.min(128)
            } else {
                max_n.min(1024)
            },
            repeat: args.quick.then_some(2),
        }
    }
}

pub(crate) fn run(args: &ReportArgs) -> Result<Verdict> {
    let lanes: Vec<Lane> = args.select.lanes()?;
    select::all_available(&lanes)?;
    // Before the minutes of measuring, not after them.
    let mut file = File::create(&args.output).with_context(|| args.output.display().to_string())?;
    let pool = select::pool(args.threads)?;
    let plan = Plan::new(args);

    ui::note("correctness over a grid of problems");
    let grid = correctness::grid(&lanes, &pool)?;
    ui::note("speed over N");
    let speed = figures::speed(args, &plan)?;
    ui::note("memory over N");
    let memory = memory::over_n(args, &plan, &lanes, &pool)?;
    ui::note("few heads and many");
    let heads = figures::heads(args, &plan)?;
    let traffic = figures::traffic(args, &plan, &lanes)?;

    let text = page::render(&page::Content {
        note: args.note.as_deref(),
        grid: &grid,
        speed: &speed,
        memory: &memory,
        heads: &heads,
        traffic: &traffic,
        threads: pool.current_num_threads(),
        dtype: args.dtype,
    })?;
    file.write_all(text.as_bytes())
        .with_context(|| args.output.display().to_string())?;
    ui::print(&format!("{}\n", args.output.display()))?;
    Ok(if grid.passes() {
        Verdict::Agree
    } else {
        Verdict::Differ
    })
}
