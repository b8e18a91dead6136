//! Running and timing one backend and algorithm after another.

use std::time::Instant;

use anyhow::Result;
use tilewise::core::tolerance::Judge;
use tilewise::{Backend, BackendInfo, Element, ForwardReport, Inputs, Problem};

use super::CompareArgs;
use super::report::{ResultRow, Status};
use crate::args::select::Lane;
use crate::memory::peak_extra_bytes;
use crate::output::Outputs;
use crate::stats::{self, Samples};
use crate::ui;

/// A lane that ran once and is to be timed.
struct Timed<'a> {
    row: usize,
    backend: &'a dyn Backend,
    lane: &'a Lane,
    left: usize,
    samples: Samples,
}

/// A row for every lane, with what its backend says of itself.
///
/// Every lane runs once, is judged, and has its memory measured; then lanes are timed in turn
/// (A B C, A B C, …), so that a change of the machine's pace meets them all.
pub(super) fn run_all<T: Element>(
    args: &CompareArgs,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    judge: &Judge,
    lanes: &[Lane],
    pool: &rayon::ThreadPool,
) -> Result<Vec<(ResultRow, Option<BackendInfo>)>> {
    let mut outputs = Outputs::<T>::new(problem)?;
    let bar = ui::progress(lanes.len() as u64);
    let mut rows = Vec::new();
    let mut timed = Vec::new();
    for (at, lane) in lanes.iter().enumerate() {
        bar.set_message(format!("{} {}", lane.name, lane.algorithm));
        let backend = match &lane.backend {
            Ok(backend) => backend,
            Err(reason) => {
                rows.push((ResultRow::skipped(lane, reason.clone()), None));
                continue;
            }
        };
        let info = Some(backend.info());
        if let Err(error) = backend.supports(problem, lane.algorithm) {
            rows.push((ResultRow::skipped(lane, error.to_string()), info));
            continue;
        }
        let workspace = backend.workspace_bytes(problem, lane.algorithm);
        if workspace > args.memory_limit {
            let reason = ui::over_limit(workspace, args.memory_limit);
            rows.push((ResultRow::skipped(lane, reason), info));
            continue;
        }
        // What a call leaves unwritten must not pass for its result.
        outputs.poison();
        let start = Instant::now();
        let (result, heap) = pool.install(|| {
            peak_extra_bytes(|| forward(backend.as_ref(), problem, inputs, lane, &mut outputs))
        });
        let first = start.elapsed();
        let mut row = ResultRow::new(lane);
        match result {
            Ok(report) => {
                let comparison = judge.compare(&outputs.out_view()?, Some(&outputs.lse_view()?))?;
                row.judged(&report, &comparison);
                // Device memory is not on this heap: there the backend's own figure has to do.
                row.peak_extra_bytes = Some(if lane.name == "cpu" { heap } else { workspace });
                timed.push(Timed {
                    row: at,
                    backend: backend.as_ref(),
                    lane,
                    left: stats::repeats(args.repeat.map(|n| n as usize), first, 30),
                    samples: Samples::default(),
                });
            }
            Err(error) => {
                row.status = Status::Failed;
                row.reason = Some(error.to_string());
            }
        }
        rows.push((row, info));
        bar.inc(1);
    }

    bar.set_length(timed.iter().map(|lane| lane.left as u64).sum());
    bar.set_position(0);
    while timed.iter().any(|lane| lane.left > 0) {
        for lane in timed.iter_mut().filter(|lane| lane.left > 0) {
            bar.set_message(format!("timing {} {}", lane.lane.name, lane.lane.algorithm));
            let (time, result) = pool.install(|| {
                let start = Instant::now();
                let result = forward(lane.backend, problem, inputs, lane.lane, &mut outputs);
                (start.elapsed(), result)
            });
            lane.left -= 1;
            match result {
                Ok(_) => lane.samples.push(time),
                Err(error) => {
                    let row = &mut rows[lane.row].0;
                    row.status = Status::Failed;
                    row.reason = Some(error.to_string());
                    lane.left = 0;
                }
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    for lane in &timed {
        rows[lane.row].0.timed(problem, &lane.samples);
    }
    relate_to_standard(&mut rows);
    Ok(rows)
}

fn forward<T: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    lane: &Lane,
    outputs: &mut Outputs<T>,
) -> tilewise::Result<ForwardReport> {
    let (out, lse) = outputs.views_mut()?;
    backend.forward(
        problem,
        &T::erase_inputs(*inputs),
        lane.algorithm,
        T::erase_mut(out),
        Some(lse),
    )
}

/// Speed relative to `standard` on the same backend and instruction set.
fn relate_to_standard(rows: &mut [(ResultRow, Option<BackendInfo>)]) {
    let standards: Vec<_> = rows
        .iter()
        .filter(|(row, _)| row.algorithm == "standard")
        .map(|(row, _)| (row.backend.clone(), row.isa.clone(), row.median_ms))
        .collect();
    for (row, _) in rows {
        let standard = standards
            .iter()
            .find(|(backend, isa, _)| *backend == row.backend && *isa == row.isa);
        if let (Some((_, _, Some(standard))), Some(own)) = (standard, row.median_ms) {
            row.speedup_vs_standard = Some(standard / own);
        }
    }
}
