//! Timing every lane on one shape.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tilewise::cpu::Isa;
use tilewise::{
    Backend, BackendKind, BackwardInputs, Element, Gradients, Inputs, Problem, TensorView,
};

use super::BenchArgs;
use super::ceilings::{Ceilings, DeviceCeilings};
use super::device::{Devices, Pass};
use super::posed::Posed;
use super::report::Row;
use crate::args::select::Lane;
use crate::output::Outputs;
use crate::shapes::Shape;
use crate::stats::{self, Samples};
use crate::{random, ui};

/// A lane on the host that is warm.
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
    devices: &mut Devices,
    pool: &rayon::ThreadPool,
) -> Result<Vec<Row>> {
    let posed = args.posed.pose(shape)?;
    let problem = posed
        .problem::<T>()
        .with_context(|| format!("--shapes {shape}"))?;
    let threads = pool.current_num_threads();
    let mut rows: Vec<Row> = lanes
        .iter()
        .map(|lane| Row::new(shape, args.posed.words(), lane, T::DTYPE, threads))
        .collect();
    let pass = match (args.backward, args.deterministic) {
        (false, _) => Pass::Forward,
        (true, false) => Pass::Backward,
        (true, true) => Pass::BackwardInOrder,
    };
    let mut host = Vec::new();
    let mut on_device = Vec::new();
    for (at, lane) in lanes.iter().enumerate() {
        let refusal = match &lane.backend {
            Ok(backend) => refusal(args, backend.as_ref(), &problem, lane),
            Err(reason) => Some(reason.clone()),
        };
        if refusal.is_some() {
            rows[at].reason = refusal;
        } else if let BackendKind::Cuda { ordinal } = lane.kind {
            let products = match args.ceilings {
                true => devices.products(ordinal, &problem, lane.algorithm, pass),
                false => None,
            };
            on_device.push((at, ordinal, products));
        } else {
            host.push((at, lane));
        }
    }
    // Once before and once after the timings, each kind of products: the device's pace may change.
    let mut bounds: Vec<_> = on_device
        .iter()
        .filter_map(|(_, ordinal, products)| Some((*ordinal, (*products)?)))
        .collect();
    let mut seen = Vec::new();
    bounds.retain(|one| {
        let new = !seen.contains(one);
        seen.push(*one);
        new
    });
    let mut ceilings = DeviceCeilings::default();
    ceilings.measure(devices, &bounds);
    for (at, ordinal, _) in &on_device {
        match devices.time(*ordinal, &problem, lanes[*at].algorithm, args.repeat, pass) {
            Ok(samples) => rows[*at].measured(&problem, &samples, args.backward),
            Err(reason) => rows[*at].reason = Some(reason),
        }
    }
    ceilings.measure(devices, &bounds);
    for (at, ordinal, products) in on_device {
        let ceiling = products.and_then(|one| ceilings.ceiling(ordinal, &one.to_string()));
        rows[at].related(&problem, ceiling, args.backward);
    }
    if !host.is_empty() {
        on_host::<T>(args, &posed, &problem, &host, &mut rows, pool)?;
    }
    Ok(rows)
}

/// Why a lane is not run.
fn refusal(
    args: &BenchArgs,
    backend: &dyn Backend,
    problem: &Problem,
    lane: &Lane,
) -> Option<String> {
    if let Err(error) = backend.supports(problem, lane.algorithm) {
        return Some(error.to_string());
    }
    let mut workspace = backend.workspace_bytes(problem, lane.algorithm);
    if args.backward {
        if let Err(error) = backend.supports_backward(problem, lane.algorithm) {
            return Some(error.to_string());
        }
        workspace = workspace.max(backend.backward_workspace_bytes(problem, lane.algorithm));
    }
    (workspace > args.memory_limit).then(|| ui::over_limit(workspace, args.memory_limit))
}

fn on_host<T: Element>(
    args: &BenchArgs,
    posed: &Posed,
    problem: &Problem,
    lanes: &[(usize, &Lane)],
    rows: &mut [Row],
    pool: &rayon::ThreadPool,
) -> Result<()> {
    // The largest first: where they cannot be had, nothing else is drawn.
    let extras = posed.extras(args.seed)?;
    let qkv = random::Qkv::<T>::new(args.seed, posed.dims())?;
    let inputs = posed.inputs(qkv.inputs()?, &extras)?;
    let mut outputs = Outputs::<T>::new(problem)?;
    let shape = problem.dims().out_shape();
    let mut backward = match args.backward {
        true => Some(Backward {
            dout: random::normal(args.seed, "do", random::count("do", shape)?)?,
            gradients: Gradients::filled(problem, &inputs, 0.0)?,
        }),
        false => None,
    };

    let mut timed = Vec::new();
    for &(row, lane) in lanes {
        let Ok(backend) = &lane.backend else { continue };
        let backend = backend.as_ref();
        // Two calls that do not count: the second found caches, threads and memory ready.
        let forward = match args.backward {
            // A backward call needs the results of a forward call by the same lane.
            true => forward_once(backend, problem, &inputs, lane, &mut outputs, pool),
            false => Ok(()),
        };
        let mut warm = || {
            time(
                backend,
                problem,
                &inputs,
                lane,
                &mut outputs,
                &mut backward,
                pool,
            )
        };
        match forward.and_then(|()| warm()).and_then(|_| warm()) {
            Ok((time, isa)) => {
                rows[row].isa = Some(isa);
                timed.push(Timed {
                    row,
                    lane,
                    backend,
                    left: stats::repeats(args.repeat.map(|n| n as usize), time, 100),
                    samples: Samples::default(),
                });
            }
            Err(error) => rows[row].reason = Some(error.to_string()),
        }
    }
    let mut ceilings = ceilings(args, problem, rows, pool.current_num_threads());
    let rounds = timed.iter().map(|lane| lane.left).max().unwrap_or(0);
    for round in 0..rounds {
        // Before, amid and after the timings: the machine's pace may change meanwhile.
        if round == 0 || round == rounds / 2 {
            ceilings.iter_mut().try_for_each(Ceilings::measure)?;
        }
        if !ceilings.is_empty() {
            settle(pool);
        }
        for lane in timed.iter_mut().filter(|lane| lane.left > 0) {
            let call = time(
                lane.backend,
                problem,
                &inputs,
                lane.lane,
                &mut outputs,
                &mut backward,
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
    ceilings.iter_mut().try_for_each(Ceilings::measure)?;
    for lane in timed {
        let row = &mut rows[lane.row];
        if row.reason.is_none() {
            row.measured(problem, &lane.samples, args.backward);
            let of_its_isa = |c: &&Ceilings| Some(c.isa().name()) == row.isa.as_deref();
            if let Some(ceiling) = ceilings.iter().find(of_its_isa) {
                row.related(problem, ceiling.ceiling(), args.backward);
            }
        }
    }
    Ok(())
}

/// Spreads the pool's threads over the processors again. Ceilings are measured by threads of their own,
/// after which the system may wake both of two workers on one processor, and calls that are shorter than
/// its scheduler's tick would leave them there: busy together for some ticks they are moved apart.
fn settle(pool: &rayon::ThreadPool) {
    pool.broadcast(|_| {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
    });
}

/// What is to be measured for the instruction sets of `rows`.
fn ceilings(args: &BenchArgs, problem: &Problem, rows: &[Row], threads: usize) -> Vec<Ceilings> {
    let isas = Isa::ALL.into_iter().filter(|isa| {
        rows.iter()
            .any(|row| row.backend == "cpu" && row.isa.as_deref() == Some(isa.name()))
    });
    isas.filter(|_| args.ceilings)
        .map(|isa| Ceilings::new(isa, problem, threads))
        .collect()
}

/// What a backward call needs besides.
struct Backward<T> {
    dout: Vec<T>,
    gradients: Gradients<T>,
}

fn forward_once<T: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    lane: &Lane,
    outputs: &mut Outputs<T>,
    pool: &rayon::ThreadPool,
) -> tilewise::Result<()> {
    time(backend, problem, inputs, lane, outputs, &mut None, pool).map(drop)
}

fn time<T: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    lane: &Lane,
    outputs: &mut Outputs<T>,
    backward: &mut Option<Backward<T>>,
    pool: &rayon::ThreadPool,
) -> tilewise::Result<(Duration, String)> {
    if let Some(backward) = backward {
        let (out, lse) = (outputs.out_view()?, outputs.lse_view()?);
        let dout = TensorView::bhsd(&backward.dout, problem.dims().out_shape())?;
        let given = T::erase_backward(BackwardInputs::new(*inputs, out, lse, dout));
        let gradients = T::erase_gradients(backward.gradients.views_mut()?);
        return pool.install(|| {
            let start = Instant::now();
            let report = backend.backward(problem, &given, lane.algorithm, gradients)?;
            Ok((start.elapsed(), report.isa))
        });
    }
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
