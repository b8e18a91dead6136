//! The results of `compare`, as people read them.

use std::fmt::Write;

use super::report::{FileResult, Report, ResultRow, Status};
use crate::environment::Environment;
use crate::facts::ProblemFacts;
use crate::reasons::{self, Outcome};
use crate::ui::{self, Grid, Tone, plain, scientific, significant};

/// Columns that are aligned left: backend, algorithm, instruction set.
const LEFT: usize = 3;

pub(super) fn render(report: &Report) -> String {
    let mut text = String::new();
    head(&mut text, report);
    let mut errors = Grid::new(
        &[
            "backend",
            "algorithm",
            "isa",
            "max\nabs err",
            "mean\nabs err",
            "max\nrel err",
            "lse\nerr",
            "\nbound",
            "",
        ],
        LEFT,
    );
    let mut costs = costs(&["vs\nstd", "extra\nmemory"]);
    for row in report.results.iter().filter(|row| row.ran()) {
        errors.row(&error_cells(row));
        costs.row(&cost_cells(row));
    }
    if let Some(file) = &report.file {
        errors.row(&file_cells(file));
    }
    let ran = report.results.iter().any(ResultRow::ran);
    if report.file.is_some() || ran {
        text.push_str(&errors.render());
    }
    if ran {
        text.push('\n');
        text.push_str(&costs.render());
    }
    tail(&mut text, report);
    text
}

fn head(text: &mut String, report: &Report) {
    subject(text, &report.inputs, &report.problem, &report.environment);
    let rows = report.reference_rows;
    let which = if rows.checked == rows.total {
        format!("all {} rows", rows.total)
    } else {
        format!(
            "{} of {} rows, first and last among them",
            rows.checked, rows.total
        )
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  reference: the naive definition in f64, {which}\n");
}

/// What is compared, and on what.
pub(super) fn subject(
    text: &mut String,
    inputs: &[String],
    problem: &ProblemFacts,
    environment: &Environment,
) {
    let _ = writeln!(text, "{}", inputs.join(" "));
    let _ = writeln!(text, "  {}", problem.sizes());
    let _ = writeln!(text, "  {}", problem.options());
    for device in &environment.backends {
        let _ = writeln!(text, "  {}: {}", device.name, device.device);
    }
}

fn tail(text: &mut String, report: &Report) {
    let mut notes: Vec<String> = report.notes.clone();
    let outcomes = report.results.iter().map(|row| Outcome {
        backend: &row.backend,
        algorithm: row.algorithm,
        here: row.here,
        how: match row.status {
            Status::Failed => "failed",
            _ => "skipped",
        },
        reason: row.reason.as_deref().filter(|_| row.status != Status::Ok),
    });
    notes.extend(reasons::lines(outcomes));
    for row in report.results.iter().filter(|row| row.pass == Some(false)) {
        // Without one, nothing could be judged, and a note says so already.
        if let Some(worst) = row.worst {
            notes.push(format!(
                "{} {}: farthest off at [b, h, i, d] = {worst:?}",
                row.backend, row.algorithm
            ));
        }
    }
    if let Some(file) = report.file.as_ref().filter(|file| !file.pass) {
        notes.push(format!(
            "file: o is not what these options give, farthest off at [b, h, i, d] = {:?} \
             (files do not say --causal, --softmax-scale, --layout, …)",
            file.worst.unwrap_or_default()
        ));
    }
    notes_below(text, notes, &report.environment);
}

/// Ends a report's text with its notes, and with what build the times are of.
pub(super) fn notes_below(text: &mut String, mut notes: Vec<String>, environment: &Environment) {
    if environment.debug_build {
        notes.push("this is a debug build: times say nothing".into());
    }
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        text.push_str(&ui::wrap(&note, 2));
    }
}

fn verdict(pass: Option<bool>) -> (String, Tone) {
    match pass {
        Some(true) => ("pass".into(), Tone::Good),
        Some(false) => ("FAIL".into(), Tone::Bad),
        None => ("-".into(), Tone::Plain),
    }
}

fn error_cells(row: &ResultRow) -> Vec<(String, Tone)> {
    vec![
        plain(row.backend.clone()),
        plain(row.algorithm),
        plain(row.isa.clone().unwrap_or_default()),
        plain(scientific(row.max_abs_err)),
        plain(scientific(row.mean_abs_err)),
        plain(scientific(row.max_rel_err)),
        plain(scientific(row.lse_max_abs_err)),
        plain(scientific(row.tolerance)),
        if row.status == Status::Failed {
            ("FAIL".into(), Tone::Bad)
        } else {
            verdict(row.pass)
        },
    ]
}

/// What a call costs, a table of its own: with the errors beside it neither would fit a terminal.
pub(super) fn costs(more: &[&str]) -> Grid {
    let mut header = vec!["backend", "algorithm", "isa", "median\nms", "\nGFLOP/s"];
    header.extend(more);
    Grid::new(&header, LEFT)
}

fn cost_cells(row: &ResultRow) -> Vec<(String, Tone)> {
    vec![
        plain(row.backend.clone()),
        plain(row.algorithm),
        plain(row.isa.clone().unwrap_or_default()),
        plain(significant(row.median_ms)),
        plain(significant(row.gflops)),
        plain(match row.speedup_vs_standard {
            Some(x) => format!("{}x", significant(Some(x))),
            None => "-".into(),
        }),
        plain(row.peak_extra_bytes.map_or("-".into(), ui::bytes)),
    ]
}

fn file_cells(file: &FileResult) -> Vec<(String, Tone)> {
    let what = if file.lse_max_abs_err.is_some() {
        "o, lse"
    } else {
        "o"
    };
    vec![
        plain("file"),
        plain(what),
        plain(""),
        plain(scientific(file.max_abs_err)),
        plain(scientific(Some(file.mean_abs_err))),
        plain(scientific(Some(file.max_rel_err))),
        plain(scientific(file.lse_max_abs_err)),
        plain(scientific(Some(file.tolerance))),
        verdict(Some(file.pass)),
    ]
}
