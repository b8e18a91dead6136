//! Memory that a call takes besides inputs and outputs, over N.

use anyhow::Result;
use tilewise::half::{bf16, f16};
use tilewise::{BackendKind, DType, Dims, Element, Options, Problem};

use super::{Plan, ReportArgs, correctness};
use crate::args::select::Lane;
use crate::chart::{Chart, Series, colour_of};
use crate::memory::peak_extra_bytes;
use crate::output::Outputs;
use crate::{random, ui};

/// A line for each lane that ran.
pub(super) struct Memory {
    pub(super) charts: Vec<Chart>,
    /// N, and bytes of each lane: measured heap on the CPU, the backend's own figure elsewhere.
    pub(super) rows: Vec<(usize, Vec<Option<u64>>)>,
    pub(super) lanes: Vec<String>,
    pub(super) problem: String,
}

pub(super) fn over_n(
    args: &ReportArgs,
    plan: &Plan,
    lanes: &[Lane],
    pool: &rayon::ThreadPool,
) -> Result<Memory> {
    let lanes: Vec<&Lane> = lanes.iter().filter(|lane| lane.backend.is_ok()).collect();
    let mut rows = Vec::new();
    for &n in &plan.lengths {
        let dims = Dims {
            batch: 1,
            num_heads: plan.heads,
            num_kv_heads: plan.heads,
            seqlen_q: n,
            seqlen_k: n,
            head_dim: plan.head_dim,
            head_dim_v: plan.head_dim,
        };
        let problem = Problem::dense(dims, args.dtype, &Options::new())?;
        let mut bytes = Vec::new();
        for lane in &lanes {
            bytes.push(match args.dtype {
                DType::F64 => one::<f64>(args, &problem, lane, pool)?,
                DType::F32 => one::<f32>(args, &problem, lane, pool)?,
                DType::F16 => one::<f16>(args, &problem, lane, pool)?,
                _ => one::<bf16>(args, &problem, lane, pool)?,
            });
        }
        rows.push((n, bytes));
    }
    let mut charts = Vec::new();
    let mut kinds: Vec<&str> = lanes.iter().map(|lane| lane.name.as_str()).collect();
    kinds.dedup();
    for kind in kinds {
        let mut series: Vec<Series> = lanes
            .iter()
            .enumerate()
            .filter(|(_, lane)| lane.name == kind)
            .map(|(at, lane)| Series {
                name: lane.algorithm.to_string(),
                colour: colour_of(lane.algorithm),
                dashed: false,
                points: rows
                    .iter()
                    .filter_map(|(n, bytes)| {
                        Some((*n as f64, bytes[at].filter(|&b| b > 0)? as f64))
                    })
                    .collect(),
            })
            .collect();
        let size = args.dtype.accumulator().size() as f64;
        let scores = |n: usize| (n as f64, n as f64 * n as f64 * size);
        series.push(Series {
            name: "N² numbers (one head's S)".into(),
            colour: 4,
            dashed: true,
            points: plan.lengths.iter().copied().map(scores).collect(),
        });
        charts.push(Chart {
            title: format!("{kind}: memory besides inputs and outputs"),
            x: "N",
            y: "bytes".into(),
            series,
            y_label: |x| ui::bytes(x as u64),
        });
    }
    Ok(Memory {
        charts,
        rows,
        lanes: lanes.iter().map(|lane| correctness::label(lane)).collect(),
        problem: format!(
            "batch 1, {} heads, head_dim {}, {}",
            plan.heads, plan.head_dim, args.dtype
        ),
    })
}

fn one<T: Element>(
    args: &ReportArgs,
    problem: &Problem,
    lane: &Lane,
    pool: &rayon::ThreadPool,
) -> Result<Option<u64>> {
    let Ok(backend) = &lane.backend else {
        return Ok(None);
    };
    let workspace = backend.workspace_bytes(problem, lane.algorithm);
    if backend.supports(problem, lane.algorithm).is_err() || workspace > args.memory_limit {
        return Ok(None);
    }
    // Device memory is not on this heap: there the backend's own figure has to do.
    if lane.kind != BackendKind::Cpu {
        return Ok(Some(workspace));
    }
    let qkv = random::Qkv::<T>::new(0, problem.dims())?;
    let inputs = qkv.inputs()?;
    let mut outputs = Outputs::<T>::new(problem)?;
    let (out, lse) = outputs.views_mut()?;
    let (ran, heap) = pool.install(|| {
        peak_extra_bytes(|| {
            backend.forward(
                problem,
                &T::erase_inputs(inputs),
                lane.algorithm,
                T::erase_mut(out),
                Some(lse),
            )
        })
    });
    ran?;
    Ok(Some(heap))
}
