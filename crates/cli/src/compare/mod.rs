//! `tilewise compare`: every backend and algorithm against the naive definition, on files.

mod backward;
mod lane;
mod report;
mod table;

use std::num::NonZeroUsize;

use anyhow::{Context, Result, bail};
use clap::Args;
use rayon::prelude::*;
use tilewise::core::tolerance::{Judge, RowSample, judge_row};
use tilewise::{Element, Inputs, Problem};

use crate::args::problem::ProblemArgs;
use crate::args::select::{self, DeviceArgs, Lane, SelectArgs};
use crate::args::tensors::TensorArgs;
use crate::cli::Verdict;
use crate::environment::Environment;
use crate::facts::ProblemFacts;
use crate::input::{self, AnyLoaded, Loaded};
use crate::ui;
use report::{FileResult, ReferenceRows, Report, ResultRow};

/// Compare backends and algorithms with the naive definition, and with each other, on input files
///
/// The reference is softmax attention in f64 with compensated sums. A result passes if it is within
/// the stated bound: twice the error of the naive algorithm run in the inputs' dtype, one rounding
/// of the output, and an accumulation term.
///
/// With --backward, gradients are compared in the same way: each within three times the error of the
/// naive backward pass in the inputs' dtype, one rounding, and an accumulation term.
///
/// Exit status: 0 if everything that ran agrees, 1 if something differs, 2 on an error.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    tensors: TensorArgs,
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    device: DeviceArgs,

    /// Threads of the CPU backend [default: RAYON_NUM_THREADS, then all]
    #[arg(long, value_name = "N", value_parser = select::parse_threads, help_heading = "Selection")]
    threads: Option<NonZeroUsize>,

    /// Timed calls of each [default: about a second's worth, 3 to 30]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Measurement")]
    repeat: Option<u32>,

    /// Skip what would need more memory than this besides inputs and outputs
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = ui::parse_bytes, help_heading = "Measurement")]
    memory_limit: u64,

    /// Rows of the output that are judged: a number, or all [default: as many as take seconds]
    #[arg(long, value_name = "N", value_parser = parse_rows, help_heading = "Measurement")]
    reference_rows: Option<RowCount>,

    /// Compare gradients: of do in the file, or of a seeded one
    #[arg(long, help_heading = "Problem")]
    backward: bool,

    /// Print JSON instead of a table
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Clone, Copy, Debug)]
enum RowCount {
    All,
    AtMost(usize),
}

fn parse_rows(text: &str) -> Result<RowCount, String> {
    match text {
        "all" => Ok(RowCount::All),
        _ => match text.parse() {
            Ok(n) if n >= 2 => Ok(RowCount::AtMost(n)),
            _ => Err("expected all, or a number of at least 2".into()),
        },
    }
}

/// Multiplications that the reference may take if no number of rows is asked for: a few seconds.
const REFERENCE_WORK: f64 = 1e9;

pub(crate) fn run(args: &CompareArgs) -> Result<Verdict> {
    let lanes = args.select.lanes_with(&args.device.settings())?;
    let available = || select::all_available(&lanes);
    if lanes.iter().all(|lane| lane.backend.is_err()) {
        available()?;
        select::any_available(&lanes)?;
    }
    let loaded = input::load(&args.tensors, &args.problem)?;
    if args.backward {
        let verdict = match &loaded {
            AnyLoaded::F64(loaded) => backward::compare(args, loaded, &lanes),
            AnyLoaded::F32(loaded) => backward::compare(args, loaded, &lanes),
            AnyLoaded::F16(loaded) => backward::compare(args, loaded, &lanes),
            AnyLoaded::BF16(loaded) => backward::compare(args, loaded, &lanes),
        }?;
        available()?;
        return Ok(verdict);
    }
    let report = match &loaded {
        AnyLoaded::F64(loaded) => compare(args, loaded, &lanes),
        AnyLoaded::F32(loaded) => compare(args, loaded, &lanes),
        AnyLoaded::F16(loaded) => compare(args, loaded, &lanes),
        AnyLoaded::BF16(loaded) => compare(args, loaded, &lanes),
    }?;
    if args.json {
        ui::print_json(&report)?;
    } else {
        ui::print(&table::render(&report))?;
    }
    if report.results.iter().all(|row| !row.ran()) {
        bail!("nothing ran: every backend and algorithm was skipped");
    }
    // Those that are here were compared; that one asked for by name is missing stays an error.
    available()?;
    Ok(report.verdict())
}

fn compare<T: Element>(args: &CompareArgs, loaded: &Loaded<T>, lanes: &[Lane]) -> Result<Report> {
    let files = || loaded.source.join(" ");
    let inputs = loaded.inputs().with_context(files)?;
    let problem = Problem::new(&inputs, &loaded.options).with_context(files)?;
    let pool = select::pool(args.threads)?;

    let sample = sample(args.reference_rows, &problem);
    let judge = pool.install(|| judge(&problem, &inputs, &sample));

    let results = lane::run_all(args, &problem, &inputs, &judge, lanes, &pool)?;
    let file = match &loaded.expected {
        Some(expected) => {
            let lse = expected.lse_view().with_context(files)?;
            let comparison = judge
                .compare(&expected.o_view().with_context(files)?, lse.as_ref())
                .with_context(files)?;
            Some(FileResult::new(&comparison))
        }
        None => None,
    };
    let mut notes = loaded.notes.clone();
    notes.extend(limits(&judge, results.iter().map(|(row, _)| row)));
    Ok(Report {
        schema: 1,
        inputs: loaded.source.clone(),
        environment: Environment::new(
            pool.current_num_threads(),
            results.iter().filter_map(|(_, info)| info.as_ref()),
        ),
        problem: ProblemFacts::new(&problem),
        reference: "naive-f64",
        reference_rows: ReferenceRows {
            checked: sample.rows().len(),
            total: sample.total(),
        },
        results: results.into_iter().map(|(row, _)| row).collect(),
        file,
        notes,
    })
}

/// What a `pass` does not say: elements beyond the dtype's range, and a bound that lets everything
/// pass.
fn limits<'a>(judge: &Judge, rows: impl Iterator<Item = &'a ResultRow>) -> Vec<String> {
    let mut notes: Vec<String> = rows
        .filter(|row| row.beyond_range > 0)
        .map(|row| {
            format!(
                "{} {}: {} elements of out are not finite where the definition is; the naive \
                 algorithm leaves the type's range there too, so they were not judged",
                row.backend, row.algorithm, row.beyond_range
            )
        })
        .collect();
    let largest = (0..judge.rows())
        .flat_map(|n| judge.reference_row(n).1)
        .filter(|x| x.is_finite())
        .fold(0.0, |largest: f64, x| largest.max(x.abs()));
    if largest > 0.0 && judge.tolerance().out >= largest {
        notes.push(
            "the bound is as large as the outputs: with scores of this size the type cannot tell \
             right from wrong, and a pass says nothing"
                .into(),
        );
    }
    notes
}

fn sample(asked: Option<RowCount>, problem: &Problem) -> RowSample {
    match asked {
        Some(RowCount::All) => RowSample::all(problem),
        Some(RowCount::AtMost(count)) => RowSample::at_most(problem, count),
        None => {
            let rows: usize = problem.dims().lse_shape().iter().product();
            let share = REFERENCE_WORK / problem.flops().max(1.0);
            // Enough rows that a fault of one tile or one head in a long input is met.
            RowSample::at_most(problem, ((share * rows as f64) as usize).max(1024))
        }
    }
}

/// The reference of the sampled rows, in parallel.
fn judge<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>, sample: &RowSample) -> Judge {
    let bar = ui::progress(sample.rows().len() as u64);
    bar.set_message("rows of the reference");
    let rows = sample
        .rows()
        .par_iter()
        .map(|&row| {
            let judged = judge_row(problem, inputs, row);
            bar.inc(1);
            judged
        })
        .collect();
    bar.finish_and_clear();
    Judge::from_rows(problem, rows)
}
