//! `tilewise check`: runs conformance cases and counts what passed, was refused and failed.
//!
//! The cases and what they mean are described in `tests/conformance/SCHEMA.md`. What the schema
//! leaves to the code that is checked:
//!
//! * A case runs once for every backend, algorithm and instruction set asked for. It has failed if
//!   one of these runs failed, else it is refused if one was refused.
//! * Output memory always holds NaN before a call, asked for (`prefill_output`) or not.
//! * tilewise claims that the bits of a row follow from that row's inputs alone, whatever the
//!   thread count, the batch and the calls around it: bits are compared wherever a case says
//!   "if claimed".
//! * Cases with expected gradients run forward, then backward from the backend's own o and lse. A
//!   backend without gradients refuses them, unless its o or lse is wrong already. Device cases, and
//!   anything in a case file that is not known here, are refused with the reason.
//! * Every panic is caught and is a failure.
//! * `merge` runs on finished outputs, and on the running states of every backend.
//! * `budget` cases are measured only with `--budgets`.

mod attention;
mod budget;
mod case;
mod files;
mod gradients;
mod lanes;
mod large;
mod memory;
mod numbers;
mod ops;
mod report;
mod setup;
mod sources;
mod tensors;
#[cfg(test)]
mod tests;
mod verdict;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::args::select::{self, SelectArgs};
use crate::cli;
use crate::container::Container;
use crate::ui;
use case::Case;
use lanes::{OpenLane, on_each};
use report::{CaseReport, Report, Run};
use sources::Source;
use verdict::Verdict;

/// Run conformance cases and report which pass, are refused or fail
///
/// Exit status: 0 if none failed, 1 if one did, 2 on errors such as a broken case file.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckArgs {
    /// Case files, a manifest of container files, or directories of them
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    #[command(flatten)]
    select: SelectArgs,

    /// Measure time and memory budgets too; needs a quiet machine and a release build
    #[arg(long)]
    budgets: bool,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CheckArgs) -> Result<cli::Verdict> {
    let sources = sources::find(&args.paths)?;
    let (mut lanes, mut passed_over) = (Vec::new(), Vec::new());
    let selected = args.select.lanes()?;
    select::all_available(&selected)?;
    select::any_available(&selected)?;
    for lane in selected {
        match lane.backend {
            Ok(backend) => lanes.push(OpenLane {
                name: lane.name,
                isa: lane.isa,
                algorithm: lane.algorithm,
                backend,
            }),
            Err(reason) => {
                if !passed_over.contains(&(lane.name.clone(), reason.clone())) {
                    passed_over.push((lane.name, reason));
                }
            }
        }
    }
    let progress = ui::progress(sources.len() as u64);
    let mut cases = Vec::with_capacity(sources.len());
    for source in &sources {
        match source {
            Source::Manifest(path) => cases.extend(files::run(path)?),
            Source::Tensors(path) => cases.push(with_tensors(path, &lanes)?),
            Source::Spec(path) => cases.push(without_tensors(path, &lanes, args.budgets)?),
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = Report {
        cases,
        lanes: lanes.iter().map(OpenLane::label).collect(),
        passed_over,
    };
    if args.json {
        ui::print_json(&report.json())?;
    } else {
        for (backend, reason) in &report.passed_over {
            ui::note(&format!("{backend} passed over: {reason}"));
        }
        ui::print(&report.text())?;
    }
    Ok(match report.totals().failed {
        0 => cli::Verdict::Agree,
        _ => cli::Verdict::Differ,
    })
}

fn with_tensors(path: &Path, lanes: &[OpenLane]) -> Result<CaseReport> {
    let container = Container::open(path)?;
    let metadata = container.metadata();
    let Some(text) = metadata.get("case") else {
        bail!(
            "{}: no conformance case: the header has no entry \"case\"",
            path.display()
        );
    };
    let case = described(path, text)?;
    let runs = match case.op.as_str() {
        "attention" | "error" => attention::run(path, &case, &container, lanes)?,
        "merge" => ops::merge(path, &case, &container, lanes)?,
        "alibi_slopes" => ops::slopes(path, &case, &container)?,
        _ => unknown_op(&case),
    };
    Ok(reported(case, runs))
}

fn without_tensors(path: &Path, lanes: &[OpenLane], budgets: bool) -> Result<CaseReport> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let case = described(path, &text)?;
    let runs = match case.op.as_str() {
        "budget" => budget::run(&case, lanes, budgets),
        "large" => large::run(&case, lanes),
        "device" => on_each(lanes, |lane| {
            Verdict::Refused(format!(
                "steps for several GPUs and streams are not taken on {}",
                lane.name
            ))
        }),
        _ => unknown_op(&case),
    };
    Ok(reported(case, runs))
}

fn unknown_op(case: &Case) -> Vec<Run> {
    vec![Run::alone(Verdict::Refused(format!(
        "op {:?} is not supported",
        case.op
    )))]
}

fn described(path: &Path, text: &str) -> Result<Case> {
    let name = path.display();
    let case: Case = serde_json::from_str(text).with_context(|| format!("{name}: bad case"))?;
    if case.schema != case::SCHEMA {
        bail!("{name}: schema {} is not known", case.schema);
    }
    Ok(case)
}

fn reported(case: Case, runs: Vec<Run>) -> CaseReport {
    CaseReport {
        id: case.id,
        op: case.op,
        kind: case.kind,
        level: case.level,
        note: case.note,
        runs,
    }
}
