//! A grid of problems on every backend and algorithm, judged by the naive definition.

use anyhow::Result;
use tilewise::core::tolerance::{Judge, RowSample};
use tilewise::half::{bf16, f16};
use tilewise::{
    Algorithm, Alignment, DType, Dims, Element, Inputs, Options, Problem, alibi_slopes,
};

use crate::args::select::Lane;
use crate::output::Outputs;
use crate::random;

/// Lanes, and a row for each problem.
pub(super) struct Grid {
    pub(super) lanes: Vec<String>,
    pub(super) rows: Vec<Row>,
}

pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) dtype: DType,
    pub(super) problem: String,
    /// One for each lane.
    pub(super) cells: Vec<Cell>,
}

pub(super) enum Cell {
    /// Largest error over the bound, of out or lse, whichever is larger.
    Judged {
        share: f64,
        pass: bool,
    },
    /// Who, and why.
    Skipped(String),
    Failed(String),
}

impl Grid {
    pub(super) fn passes(&self) -> bool {
        let mut cells = self.rows.iter().flat_map(|row| &row.cells);
        cells.all(|cell| match cell {
            Cell::Judged { pass, .. } => *pass,
            Cell::Skipped(_) => true,
            Cell::Failed(_) => false,
        })
    }
}

/// Sizes b, hq, hkv, sq, sk, d, dv.
type Sizes = [usize; 7];

fn cases() -> Vec<(&'static str, Sizes, Options)> {
    let new = Options::new;
    let heads = 4;
    let sinks: Vec<f32> = (0..heads).map(|h| h as f32 - 1.5).collect();
    vec![
        ("every key", [2, 4, 4, 128, 128, 64, 64], new()),
        ("ragged sizes", [1, 4, 4, 197, 203, 40, 40], new()),
        ("causal", [1, 4, 4, 150, 150, 64, 64], new().causal(true)),
        (
            "causal, fewer queries",
            [1, 4, 4, 33, 170, 64, 64],
            new().causal(true),
        ),
        (
            "causal, aligned top left",
            [1, 4, 4, 33, 170, 64, 64],
            new().causal(true).alignment(Alignment::TopLeft),
        ),
        (
            "rows that see no key",
            [1, 4, 4, 120, 70, 32, 32],
            new().causal(true),
        ),
        (
            "sliding window",
            [1, 4, 4, 200, 200, 64, 64],
            new().window_left(63).window_right(0),
        ),
        (
            "grouped heads",
            [1, 4, 2, 96, 160, 64, 64],
            new().causal(true),
        ),
        ("one KV head", [1, 4, 1, 96, 160, 128, 128], new()),
        ("head_dim_v of its own", [1, 4, 4, 64, 96, 80, 48], new()),
        (
            "softcap",
            [1, 4, 4, 96, 96, 64, 64],
            new().softcap(5.0).causal(true),
        ),
        (
            "ALiBi",
            [1, 4, 4, 96, 130, 64, 64],
            new().alibi_slopes(alibi_slopes(heads)).causal(true),
        ),
        (
            "attention sinks",
            [1, 4, 4, 96, 96, 64, 64],
            new().sinks(sinks),
        ),
        ("one query (decode)", [2, 4, 2, 1, 777, 128, 128], new()),
    ]
}

/// Every problem in f32, and those that test it most in the 16-bit types too.
pub(super) fn grid(lanes: &[Lane], pool: &rayon::ThreadPool) -> Result<Grid> {
    let mut rows = Vec::new();
    for (name, sizes, options) in cases() {
        rows.push(row::<f32>(name, sizes, &options, lanes, pool)?);
    }
    for (name, sizes, options) in cases().into_iter().take(3) {
        rows.push(row::<bf16>(name, sizes, &options, lanes, pool)?);
        rows.push(row::<f16>(name, sizes, &options, lanes, pool)?);
    }
    Ok(Grid {
        lanes: lanes.iter().map(label).collect(),
        rows,
    })
}

pub(super) fn label(lane: &Lane) -> String {
    match &lane.isa {
        Some(isa) => format!("{} {isa} {}", lane.name, lane.algorithm),
        None => format!("{} {}", lane.name, lane.algorithm),
    }
}

fn row<T: Element>(
    name: &'static str,
    [
        batch,
        num_heads,
        num_kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
    ]: Sizes,
    options: &Options,
    lanes: &[Lane],
    pool: &rayon::ThreadPool,
) -> Result<Row> {
    let dims = Dims {
        batch,
        num_heads,
        num_kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
    };
    let qkv = random::Qkv::<T>::new(6, &dims)?;
    let inputs = qkv.inputs()?;
    let problem = Problem::new(&inputs, options)?;
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    let mut outputs = Outputs::<T>::new(&problem)?;
    let mut cells = Vec::new();
    for lane in lanes {
        cells.push(cell(&problem, &inputs, &judge, lane, &mut outputs, pool)?);
    }
    Ok(Row {
        name,
        dtype: T::DTYPE,
        problem: format!(
            "b {batch}, heads {num_heads}/{num_kv_heads}, {seqlen_q} × {seqlen_k}, d {}",
            if head_dim == head_dim_v {
                head_dim.to_string()
            } else {
                format!("{}/{}", dims.head_dim, dims.head_dim_v)
            }
        ),
        cells,
    })
}

fn cell<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    judge: &Judge,
    lane: &Lane,
    outputs: &mut Outputs<T>,
    pool: &rayon::ThreadPool,
) -> Result<Cell> {
    let backend = match &lane.backend {
        Ok(backend) => backend,
        // Said once for a backend, not for each of its algorithms.
        Err(reason) => return Ok(Cell::Skipped(format!("{}: {reason}", lane.name))),
    };
    let algorithm: Algorithm = lane.algorithm;
    if let Err(error) = backend.supports(problem, algorithm) {
        return Ok(Cell::Skipped(format!("{} skipped: {error}", label(lane))));
    }
    // What a call leaves unwritten must not pass for its result.
    outputs.poison();
    let (out, lse) = outputs.views_mut()?;
    let ran = pool.install(|| {
        backend.forward(
            problem,
            &T::erase_inputs(*inputs),
            algorithm,
            T::erase_mut(out),
            Some(lse),
        )
    });
    if let Err(error) = ran {
        return Ok(Cell::Failed(format!("{} failed: {error}", label(lane))));
    }
    let comparison = judge.compare(&outputs.out_view()?, Some(&outputs.lse_view()?))?;
    let share = |error: f64, bound: f64| match (error, bound) {
        (0.0, _) => 0.0,
        (error, bound) => error / bound,
    };
    let lse = comparison.lse_max_abs_err.unwrap_or(0.0);
    Ok(Cell::Judged {
        share: share(comparison.max_abs_err, comparison.tolerance)
            .max(share(lse, comparison.lse_tolerance)),
        pass: comparison.pass,
    })
}
