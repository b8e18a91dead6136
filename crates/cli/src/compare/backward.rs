//! `compare --backward`: every backend's gradients against those of the naive definition.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::Serialize;
use tilewise::{
    Backend, BackwardInputs, Element, Error, GradientComparison, GradientJudge, Gradients, Problem,
    TensorView, judge_head,
};

use super::CompareArgs;
use crate::args::select::{Lane, pool};
use crate::cli::Verdict;
use crate::environment::Environment;
use crate::facts::ProblemFacts;
use crate::input::Loaded;
use crate::output::Outputs;
use crate::random;
use crate::reasons::{self, Outcome};
use crate::stats::{self, Samples};
use crate::ui::{self, Grid, Tone, plain, scientific, significant};

/// Everything that was found. `schema` rises when a field changes its meaning or goes.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    inputs: Vec<String>,
    environment: Environment,
    problem: ProblemFacts,
    reference: &'static str,
    /// Where the gradient at o comes from: the file, or a seed.
    dout: String,
    results: Vec<Row>,
    notes: Vec<String>,
}

/// One backend × algorithm × instruction set.
#[derive(Clone, Debug, Serialize)]
struct Row {
    backend: String,
    algorithm: &'static str,
    /// Whether the backend is on this machine.
    #[serde(skip)]
    here: bool,
    isa: Option<String>,
    status: &'static str,
    reason: Option<String>,
    gradients: Vec<Gradient>,
    pass: Option<bool>,
    median_ms: Option<f64>,
    samples_ms: Vec<f64>,
    gflops: Option<f64>,
}

/// One gradient against the reference.
#[derive(Clone, Debug, Serialize)]
struct Gradient {
    tensor: &'static str,
    /// JSON has no infinity: it is a word.
    max_abs_err: serde_json::Value,
    mean_abs_err: f64,
    max_rel_err: f64,
    tolerance: f64,
    pass: bool,
    worst: Option<[usize; 4]>,
}

impl Gradient {
    fn new(comparison: &GradientComparison) -> Self {
        let max = comparison.max_abs_err;
        Gradient {
            tensor: comparison.tensor,
            max_abs_err: match max.is_finite() {
                true => max.into(),
                false => "Infinity".into(),
            },
            mean_abs_err: comparison.mean_abs_err,
            max_rel_err: comparison.max_rel_err,
            tolerance: comparison.tolerance,
            pass: comparison.pass,
            worst: comparison.worst,
        }
    }
}

/// What one lane runs on.
struct Call<'a, T> {
    problem: &'a Problem,
    given: BackwardInputs<'a, T>,
    gradients: Gradients<T>,
}

pub(super) fn compare<T: Element>(
    args: &CompareArgs,
    loaded: &Loaded<T>,
    lanes: &[Lane],
) -> Result<Verdict> {
    let files = || loaded.source.join(" ");
    let inputs = loaded.inputs().with_context(files)?;
    let problem = Problem::new(&inputs, &loaded.options).with_context(files)?;
    let pool = pool(args.threads)?;
    let shape = problem.dims().out_shape();
    let seeded: Vec<T>;
    let (dout, source) = match loaded.dout().with_context(files)? {
        Some(dout) => {
            Error::expect_shape("do", dout.shape(), shape).with_context(files)?;
            (dout, "do of the file".to_string())
        }
        None => {
            seeded = random::normal(0, "do", random::count("do", shape)?)?;
            (TensorView::bhsd(&seeded, shape)?, "seed 0".to_string())
        }
    };
    let dlse = loaded.dlse().with_context(files)?;
    if let Some(dlse) = &dlse {
        let [batch, heads, seqlen_q] = problem.dims().lse_shape();
        let rows = [batch, heads, seqlen_q, 1];
        Error::expect_shape("dlse", dlse.shape(), rows).with_context(files)?;
    }

    let mut report = Report {
        schema: 1,
        inputs: loaded.source.clone(),
        environment: Environment::new(
            pool.current_num_threads(),
            &lanes
                .iter()
                .filter_map(|lane| Some(lane.backend.as_ref().ok()?.info()))
                .collect::<Vec<_>>(),
        ),
        problem: ProblemFacts::new(&problem),
        reference: "naive-f64",
        dout: source,
        results: Vec::new(),
        notes: loaded.notes.clone(),
    };
    let mut judge: Option<GradientJudge> = None;
    for lane in lanes {
        let mut row = Row {
            backend: lane.name.clone(),
            algorithm: lane.algorithm.name(),
            here: lane.backend.is_ok(),
            isa: lane.isa.clone(),
            status: "skipped",
            reason: None,
            gradients: Vec::new(),
            pass: None,
            median_ms: None,
            samples_ms: Vec::new(),
            gflops: None,
        };
        let backend = match runnable(args, &problem, lane) {
            Ok(backend) => backend,
            Err(reason) => {
                row.reason = Some(reason);
                report.results.push(row);
                continue;
            }
        };
        let mut outputs = Outputs::<T>::new(&problem)?;
        let result = pool.install(|| -> tilewise::Result<()> {
            let (out, lse) = outputs.views_mut()?;
            let (out, inputs) = (T::erase_mut(out), T::erase_inputs(inputs));
            backend.forward(&problem, &inputs, lane.algorithm, out, Some(lse))?;
            Ok(())
        });
        let outcome = result.map_err(anyhow::Error::from).and_then(|()| {
            let (out, lse) = (outputs.out_view()?, outputs.lse_view()?);
            let given = BackwardInputs::new(inputs, out, lse, dout).dlse(dlse);
            given.problem(&loaded.options)?;
            // The reference looks at neither out nor lse: one serves all lanes.
            let judge = judge.get_or_insert_with(|| pool.install(|| reference(&problem, &given)));
            let call = Call {
                problem: &problem,
                given,
                gradients: Gradients::filled(&problem, &inputs, f64::NAN)?,
            };
            run(args, backend, lane, call, judge, &pool, &mut row)
        });
        row.status = "ok";
        if let Err(error) = outcome {
            row.status = "failed";
            row.pass = None;
            row.reason = Some(error.to_string());
        }
        report.results.push(row);
    }
    if args.json {
        ui::print_json(&report)?;
    } else {
        ui::print(&render(&report))?;
    }
    if report.results.iter().all(|row| row.status == "skipped") {
        anyhow::bail!("nothing ran: every backend and algorithm was skipped");
    }
    let wrong = |row: &Row| row.status == "failed" || row.pass == Some(false);
    Ok(match report.results.iter().any(wrong) {
        true => Verdict::Differ,
        false => Verdict::Agree,
    })
}

/// The lane's backend, or why it is passed over.
fn runnable<'a>(
    args: &CompareArgs,
    problem: &Problem,
    lane: &'a Lane,
) -> Result<&'a dyn Backend, String> {
    let backend = lane.backend.as_ref().map_err(Clone::clone)?.as_ref();
    let say = |error: tilewise::Error| error.to_string();
    backend.supports(problem, lane.algorithm).map_err(say)?;
    backend
        .supports_backward(problem, lane.algorithm)
        .map_err(say)?;
    let workspace = backend
        .workspace_bytes(problem, lane.algorithm)
        .max(backend.backward_workspace_bytes(problem, lane.algorithm));
    match workspace > args.memory_limit {
        true => Err(ui::over_limit(workspace, args.memory_limit)),
        false => Ok(backend),
    }
}

/// The gradients by definition, heads in parallel.
fn reference<T: Element>(problem: &Problem, given: &BackwardInputs<'_, T>) -> GradientJudge {
    let heads: Vec<(usize, usize)> = GradientJudge::heads(problem).collect();
    let heads = heads
        .par_iter()
        .map(|&(sequence, head)| judge_head(problem, given, sequence, head))
        .collect();
    GradientJudge::from_heads(problem, given, heads)
}

fn run<T: Element>(
    args: &CompareArgs,
    backend: &dyn Backend,
    lane: &Lane,
    mut call: Call<'_, T>,
    judge: &GradientJudge,
    pool: &rayon::ThreadPool,
    row: &mut Row,
) -> Result<()> {
    let time = |call: &mut Call<'_, T>| -> Result<_> {
        pool.install(|| {
            let views = call.gradients.views_mut()?;
            let start = Instant::now();
            let report = backend.backward(
                call.problem,
                &T::erase_backward(call.given),
                lane.algorithm,
                T::erase_gradients(views),
            )?;
            Ok((start.elapsed(), report))
        })
    };
    let (first, report) = time(&mut call)?;
    row.isa = Some(report.isa);
    let comparisons = judge.compare(&call.gradients.views_mut()?)?;
    row.gradients = comparisons.iter().map(Gradient::new).collect();
    row.pass = Some(comparisons.iter().all(|comparison| comparison.pass));
    let mut samples = Samples::default();
    for _ in 0..stats::repeats(args.repeat.map(|n| n as usize), first, 30) {
        samples.push(time(&mut call)?.0);
    }
    row.median_ms = samples.median();
    row.samples_ms = samples.ms().to_vec();
    row.gflops = row
        .median_ms
        .map(|ms| call.problem.backward_flops() / ms / 1e6);
    Ok(())
}

fn render(report: &Report) -> String {
    let mut text = String::new();
    let (inputs, environment) = (&report.inputs, &report.environment);
    super::table::subject(&mut text, inputs, &report.problem, environment);
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "  reference: the naive gradients in f64; gradient at o: {}\n",
        report.dout
    );
    let mut errors = Grid::new(
        &[
            "backend",
            "algorithm",
            "isa",
            "gradient",
            "max\nabs err",
            "mean\nabs err",
            "max\nrel err",
            "\nbound",
            "",
        ],
        4,
    );
    let mut costs = super::table::costs(&[]);
    let ran = || (report.results.iter()).filter(|row| !row.gradients.is_empty());
    for row in ran() {
        costs.row(&[
            plain(row.backend.clone()),
            plain(row.algorithm),
            plain(row.isa.clone().unwrap_or_default()),
            plain(significant(row.median_ms)),
            plain(significant(row.gflops)),
        ]);
        for (n, gradient) in row.gradients.iter().enumerate() {
            let first = |text: String| plain(if n == 0 { text } else { String::new() });
            let max = gradient.max_abs_err.as_f64().unwrap_or(f64::INFINITY);
            errors.row(&[
                first(row.backend.clone()),
                first(row.algorithm.into()),
                first(row.isa.clone().unwrap_or_default()),
                plain(gradient.tensor),
                plain(scientific(Some(max))),
                plain(scientific(Some(gradient.mean_abs_err))),
                plain(scientific(Some(gradient.max_rel_err))),
                plain(scientific(Some(gradient.tolerance))),
                match gradient.pass {
                    true => ("pass".into(), Tone::Good),
                    false => ("FAIL".into(), Tone::Bad),
                },
            ]);
        }
    }
    text.push_str(&errors.render());
    if ran().next().is_some() {
        text.push('\n');
        text.push_str(&costs.render());
    }
    let mut notes = report.notes.clone();
    let outcomes = report.results.iter().map(|row| Outcome {
        backend: &row.backend,
        algorithm: row.algorithm,
        here: row.here,
        how: row.status,
        reason: row.reason.as_deref(),
    });
    notes.extend(reasons::lines(outcomes));
    for row in &report.results {
        for gradient in row.gradients.iter().filter(|gradient| !gradient.pass) {
            notes.push(format!(
                "{} {}: {} farthest off at {:?}",
                row.backend,
                row.algorithm,
                gradient.tensor,
                gradient.worst.unwrap_or_default()
            ));
        }
    }
    super::table::notes_below(&mut text, notes, environment);
    text
}
