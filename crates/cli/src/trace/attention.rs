//! The schedules on one head, recorded and compared with the definition.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tilewise::core::schedule;
use tilewise::core::{BlockSizes, Judge, RowSample, fa1_block_sizes, gather};
use tilewise::{Algorithm, Dropout, Element, Inputs, Problem, keep_mask};

use super::backward::Arriving;
use super::one_head::{self, Place};
use super::record::{COLUMNS, Event, Recorder, Rows, Totals};
use super::{TraceArgs, numbers::Number};
use crate::facts::ProblemFacts;
use crate::input::Loaded;
use crate::output::Outputs;
use crate::ui;

/// One head, traced by each algorithm.
#[derive(Debug, Serialize)]
pub(super) struct AttentionTrace {
    schema: u32,
    kind: &'static str,
    /// forward, or backward.
    pub(super) pass: &'static str,
    pub(super) inputs: Vec<String>,
    /// The whole problem.
    pub(super) problem: ProblemFacts,
    pub(super) traced: Traced,
    pub(super) runs: Vec<Run>,
    pub(super) notes: Vec<String>,
}

/// What of the problem is traced, and how it is cut into tiles.
#[derive(Debug, Serialize)]
pub(super) struct Traced {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) seqlen_q: usize,
    pub(super) seqlen_k: usize,
    /// Rows a tile, B_r.
    pub(super) block_q: usize,
    /// Keys a tile, B_c.
    pub(super) block_k: usize,
    /// T_r.
    pub(super) row_blocks: usize,
    /// T_c.
    pub(super) key_blocks: usize,
    /// ln of the sink that joins the denominator in the end.
    pub(super) sink: Option<f32>,
    /// Numbers kept of every row of S, P, O and out.
    pub(super) columns_shown: usize,
}

/// What one algorithm did.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    pub(super) algorithm: &'static str,
    /// Why it did not run.
    pub(super) skipped: Option<String>,
    pub(super) events: Vec<Event>,
    /// Events beyond those listed.
    pub(super) events_left_out: usize,
    pub(super) totals: Totals,
    pub(super) naive: Option<Difference>,
    /// How far each gradient is from the naive definition's (backward).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) gradients: Vec<GradientDifference>,
}

/// How far a gradient is from the naive definition's.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct GradientDifference {
    pub(super) tensor: &'static str,
    pub(super) max_abs_err: Number,
    pub(super) tolerance: Number,
    pub(super) pass: bool,
}

impl Run {
    /// What was recorded, and nothing of the result yet.
    pub(super) fn recorded(algorithm: Algorithm, recorder: Recorder) -> Run {
        Run {
            algorithm: algorithm.name(),
            skipped: None,
            events: recorder.events,
            events_left_out: recorder.left_out,
            totals: recorder.totals,
            naive: None,
            gradients: Vec::new(),
        }
    }
}

/// How far the result is from the naive definition.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Difference {
    pub(super) max_abs_err: Number,
    pub(super) tolerance: Number,
    pub(super) lse_max_abs_err: Option<Number>,
    pub(super) lse_tolerance: Number,
    pub(super) rows_checked: usize,
    pub(super) rows: usize,
    pub(super) pass: bool,
}

impl AttentionTrace {
    /// Whether everything that ran agrees with the definition.
    pub(super) fn agrees(&self) -> bool {
        let mut forward = self.runs.iter().filter_map(|run| run.naive);
        let mut backward = self.runs.iter().flat_map(|run| &run.gradients);
        forward.all(|naive| naive.pass) && backward.all(|one| one.pass)
    }
}

/// Multiplications that the reference may take: a few seconds.
const REFERENCE_WORK: f64 = 1e9;

/// Blocks an axis is cut into if no size is asked for.
const BLOCKS: usize = 8;

pub(super) fn trace<T: Element>(args: &TraceArgs, loaded: &Loaded<T>) -> Result<AttentionTrace> {
    let files = || loaded.source.join(" ");
    let inputs = loaded.inputs().with_context(files)?;
    let whole = Problem::new(&inputs, &loaded.options).with_context(files)?;
    let gathered = gather(&whole, &inputs)?;
    let place = Place {
        batch: args.batch,
        head: args.head,
    };
    let (whole, given) = gathered.posed(&inputs);
    // Which weights are dropped depends on the head's place: so it is written down before it is cut out.
    let kept = match whole.options().get_dropout() {
        Some(Dropout::Philox { .. }) => keep_mask(whole, &given)?,
        _ => None,
    };
    let (inputs, options) = one_head::cut(whole, &given, kept.as_deref(), place)?;
    let problem = Problem::new(&inputs, &options)?;
    let dims = *problem.dims();
    let sizes = sizes(args, &problem)?;
    let rows = rows(args, sizes, dims.seqlen_q)?;

    let backward = match args.backward {
        true => Some(Arriving::new(loaded, whole, place)?),
        false => None,
    };
    let backward = match &backward {
        Some(arriving) => Some(arriving.pass(&problem, inputs, sizes)?),
        None => None,
    };

    let share = REFERENCE_WORK / problem.flops().max(1.0);
    let judged = ((share * dims.seqlen_q as f64) as usize).max(64);
    let judge = Judge::new(&problem, &inputs, &RowSample::at_most(&problem, judged));
    let mut runs = Vec::new();
    for algorithm in &args.algorithms {
        let algorithm = algorithm.resolve();
        let matrices = if args.backward { 4 } else { 2 };
        let needed = scores_bytes(&problem, matrices);
        let skipped = (algorithm == Algorithm::Standard && needed > args.memory_limit)
            .then(|| ui::over_limit(needed, args.memory_limit));
        runs.push(match skipped {
            Some(reason) => Run {
                algorithm: algorithm.name(),
                skipped: Some(reason),
                events: Vec::new(),
                events_left_out: 0,
                totals: Totals::default(),
                naive: None,
                gradients: Vec::new(),
            },
            None if args.backward => match &backward {
                Some(backward) => backward.run(algorithm, rows.clone())?,
                None => continue,
            },
            None => run(algorithm, &problem, &inputs, sizes, rows.clone(), &judge)?,
        });
    }
    let mut notes = loaded.notes.clone();
    let group = whole.dims().group();
    if args.backward && group > 1 {
        notes.push(format!(
            "dk and dv are this query head's share: {group} query heads add to those of their head of k \
             and v"
        ));
    }
    Ok(AttentionTrace {
        schema: 1,
        kind: "attention",
        pass: if args.backward { "backward" } else { "forward" },
        inputs: loaded.source.clone(),
        problem: ProblemFacts::new(whole),
        traced: Traced {
            batch: place.batch,
            head: place.head,
            seqlen_q: dims.seqlen_q,
            seqlen_k: dims.seqlen_k,
            block_q: sizes.rows(),
            block_k: sizes.keys(),
            row_blocks: dims.seqlen_q.div_ceil(sizes.rows()),
            key_blocks: dims.seqlen_k.div_ceil(sizes.keys()),
            sink: options.get_sinks().map(|sinks| sinks[0]),
            columns_shown: COLUMNS,
        },
        runs,
        notes,
    })
}

/// What `standard` keeps besides inputs and outputs: S and P; backward the slopes and dS too.
fn scores_bytes(problem: &Problem, matrices: u64) -> u64 {
    let dims = problem.dims();
    let element = problem.dtype().accumulator().size() as u64;
    (matrices * element)
        .saturating_mul(dims.seqlen_q as u64)
        .saturating_mul(dims.seqlen_k as u64)
}

fn sizes(args: &TraceArgs, problem: &Problem) -> Result<BlockSizes> {
    let dims = problem.dims();
    let by_default = |n: usize| n.div_ceil(BLOCKS).max(2);
    let (rows, keys) = match args.on_chip {
        Some(elements) => {
            let least = dims.head_dim.max(dims.head_dim_v).saturating_mul(4);
            if elements < least {
                bail!(
                    "--on-chip: expected room for a row each of q, k, v and O, {least} numbers, got {elements}"
                );
            }
            let sizes = fa1_block_sizes(elements, dims.head_dim);
            (sizes.rows(), sizes.keys())
        }
        None => (by_default(dims.seqlen_q), by_default(dims.seqlen_k)),
    };
    Ok(BlockSizes::new(
        args.block_q.unwrap_or(rows),
        args.block_k.unwrap_or(keys),
    )?)
}

/// Whose numbers are shown: of small tiles all, of large ones the first two rows.
fn rows(args: &TraceArgs, sizes: BlockSizes, seqlen_q: usize) -> Result<Rows> {
    match &args.rows {
        Some(rows) if rows.end <= seqlen_q => Ok(Rows::These(rows.clone())),
        Some(rows) => bail!(
            "--rows: expected rows of 0..{seqlen_q}, got {}..{}",
            rows.start,
            rows.end
        ),
        None if sizes.rows() <= 4 => Ok(Rows::FirstOfBlock(4)),
        None => Ok(Rows::FirstOfBlock(2)),
    }
}

fn run<T: Element>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sizes: BlockSizes,
    rows: Rows,
    judge: &Judge,
) -> Result<Run> {
    let mut recorder = Recorder::new(algorithm, sizes, rows);
    let mut outputs = Outputs::<T>::new(problem)?;
    outputs.poison();
    let (out, lse) = outputs.views_mut()?;
    schedule::forward(
        algorithm,
        problem,
        inputs,
        sizes,
        &mut recorder,
        out,
        Some(lse),
    )?;
    let comparison = judge.compare(&outputs.out_view()?, Some(&outputs.lse_view()?))?;
    Ok(Run {
        naive: Some(Difference {
            max_abs_err: Number::F64(comparison.max_abs_err),
            tolerance: Number::F64(comparison.tolerance),
            lse_max_abs_err: comparison.lse_max_abs_err.map(Number::F64),
            lse_tolerance: Number::F64(comparison.lse_tolerance),
            rows_checked: comparison.rows,
            rows: problem.dims().seqlen_q,
            pass: comparison.pass,
        }),
        ..Run::recorded(algorithm, recorder)
    })
}
