//! Timing every lane on one shape.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tilewise::{Backend, Element, Inputs, Problem, TensorView};

use super::BenchArgs;
use super::report::Row;
use crate::args::select::Lane;
use crate::output::Outputs;
use crate::shapes::Shape;
use crate::stats::{self, Samples};
use crate::{random, ui};

struct Timed<'a> {
    row: usize,
    lane: &'a Lane,
    backend: &'a dyn Backend,
    left: usize,
    samples: Samples,
}

/// One row for every lane.
pub(super) fn shape<T: Element>(
    args: &BenchArgs,
    shape: &Shape,
    lanes: &[Lane],
    pool: &rayon::ThreadPool,
) -> Result<Vec<Row>> {
    let d = shape.dims;
    let tensor = |name: &str, shape: [usize; 4]| -> Result<Vec<T>> {
        random::normal(args.seed, name, random::count(name, shape)?)
    };
    let q_shape = [d.batch, d.num_heads, d.seqlen_q, d.head_dim];
    let k_shape = [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim];
    let v_shape = [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim_v];
    let (q, k, v) = (
        tensor("q", q_shape)?,
        tensor("k", k_shape)?,
        tensor("v", v_shape)?,
    );
    let inputs = Inputs::new(
        TensorView::bhsd(&q, q_shape)?,
        TensorView::bhsd(&k, k_shape)?,
        TensorView::bhsd(&v, v_shape)?,
    );
    let problem =
        Problem::new(&inputs, &shape.options()).with_context(|| format!("--shapes {shape}"))?;
    let mut outputs = Outputs::<T>::new(&problem)?;

    let mut rows = Vec::new();
    let mut timed = Vec::new();
    for (at, lane) in lanes.iter().enumerate() {
        let mut row = Row::new(shape, lane, T::DTYPE, pool.current_num_threads());
        match warm_up(args, &problem, &inputs, lane, &mut outputs, pool) {
            Ok(warm) => {
                row.isa = Some(warm.isa);
                timed.push(Timed {
                    row: at,
                    lane,
                    backend: warm.backend,
                    left: stats::repeats(args.repeat.map(|n| n as usize), warm.time, 100),
                    samples: Samples::default(),
                });
            }
            Err(reason) => row.reason = Some(reason),
        }
        rows.push(row);
    }
    while timed.iter().any(|lane| lane.left > 0) {
        for lane in timed.iter_mut().filter(|lane| lane.left > 0) {
            let call = time(
                lane.backend,
                &problem,
                &inputs,
                lane.lane,
                &mut outputs,
                pool,
            );
            lane.left -= 1;
            match call {
                Ok((time, _)) => lane.samples.push(time),
                Err(error) => {
                    rows[lane.row].reason = Some(error.to_string());
                    lane.left = 0;
                }
            }
        }
    }
    for lane in timed {
        let row = &mut rows[lane.row];
        if row.reason.is_none() {
            row.measured(&problem, &lane.samples);
        }
    }
    Ok(rows)
}

struct Warm<'a> {
    backend: &'a dyn Backend,
    isa: String,
    /// Of the second call, which found caches, threads and memory ready.
    time: Duration,
}

/// Two calls that do not count; or why there is nothing to time.
fn warm_up<'a, T: Element>(
    args: &BenchArgs,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    lane: &'a Lane,
    outputs: &mut Outputs<T>,
    pool: &rayon::ThreadPool,
) -> Result<Warm<'a>, String> {
    let backend = lane.backend.as_ref().map_err(Clone::clone)?.as_ref();
    let say = |error: tilewise::Error| error.to_string();
    backend.supports(problem, lane.algorithm).map_err(say)?;
    let workspace = backend.workspace_bytes(problem, lane.algorithm);
    if workspace > args.memory_limit {
        return Err(ui::over_limit(workspace, args.memory_limit));
    }
    let (_, isa) = time(backend, problem, inputs, lane, outputs, pool).map_err(say)?;
    let (time, _) = time(backend, problem, inputs, lane, outputs, pool).map_err(say)?;
    Ok(Warm { backend, isa, time })
}

fn time<T: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    lane: &Lane,
    outputs: &mut Outputs<T>,
    pool: &rayon::ThreadPool,
) -> tilewise::Result<(Duration, String)> {
    let (out, lse) = outputs.views_mut()?;
    pool.install(|| {
        let start = Instant::now();
        let report = backend.forward(
            problem,
            &T::erase_inputs(*inputs),
            lane.algorithm,
            T::erase_mut(out),
            Some(lse),
        )?;
        Ok((start.elapsed(), report.isa))
    })
}
