//! FA1 and FA2, figure by figure.

use serde::Serialize;
use tilewise::core::io_model::Io;
use tilewise::core::observe::Tensor;
use tilewise::core::schedule::BlockSizes;
use tilewise::{Algorithm, Problem};

use super::watch::Counted;
use crate::ui::{self, significant};

/// Rows of the table. Figures are counted from a run of the schedules where `counted` is true.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// Whether the figures come from a run; otherwise they come from the formulas.
    pub(super) from_a_run: bool,
    pub(super) rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) what: &'static str,
    pub(super) fa1: String,
    pub(super) fa2: String,
    /// The numbers in the two texts, where there are any.
    pub(super) figures: Option<[f64; 2]>,
    /// A figure that a run can count, and not a fact about how a kernel is written.
    pub(super) countable: bool,
}

pub(super) type Run = (Algorithm, BlockSizes, Io, Option<Counted>);

/// Elements a row or key of a head that all figures are relative to.
struct Per {
    q: f64,
    k: f64,
    v: f64,
    o: f64,
    rows: f64,
}

impl Per {
    fn new(problem: &Problem) -> Per {
        let dims = problem.dims();
        let heads = dims.num_heads as f64;
        let sum = |of: fn(&tilewise::Sequence) -> usize| -> f64 {
            problem.sequences().iter().map(|s| of(s) as f64).sum()
        };
        let rows = heads * sum(|s| s.seqlen_q);
        let keys = heads * sum(|s| s.seqlen_k);
        Per {
            q: rows * dims.head_dim as f64,
            k: keys * dims.head_dim as f64,
            v: keys * dims.head_dim_v as f64,
            o: rows * dims.head_dim_v as f64,
            rows,
        }
    }
}

fn share(x: u128, of: f64) -> f64 {
    if of > 0.0 { x as f64 / of } else { 0.0 }
}

impl Comparison {
    pub(super) fn new(problem: &Problem, runs: &[Run]) -> Comparison {
        let both: Vec<&Run> = runs
            .iter()
            .filter(|run| run.0 != Algorithm::Standard)
            .collect();
        let per = Per::new(problem);
        let io = |run: &Run| {
            run.3
                .as_ref()
                .map_or_else(|| run.2.clone(), |c| c.io.clone())
        };
        let mut rows = Vec::new();
        let mut words = |what, countable, of: &dyn Fn(&Run) -> String| {
            rows.push(Row {
                what,
                fa1: of(both[0]),
                fa2: of(both[1]),
                figures: None,
                countable,
            });
        };
        words("loop order", true, &|run| loop_order(run));
        words("rows × keys a block", false, &|run| {
            format!("{} × {}", run.1.rows(), run.1.keys())
        });
        let mut times = |what, of: &dyn Fn(&Run) -> f64| {
            let figures = [of(both[0]), of(both[1])];
            let text = |x: f64| format!("{}×", short(x));
            rows.push(Row {
                what,
                fa1: text(figures[0]),
                fa2: text(figures[1]),
                figures: Some(figures),
                countable: true,
            });
        };
        let loaded = |run: &Run, tensor| io(run).count(tensor).map_or(0, |c| c.loaded);
        let stored = |run: &Run, tensor| io(run).count(tensor).map_or(0, |c| c.stored);
        times("reads of an element of q", &|run| {
            share(loaded(run, Tensor::Q), per.q)
        });
        times("reads of one of k, a query head", &|run| {
            share(loaded(run, Tensor::K), per.k)
        });
        times("reads of one of v, a query head", &|run| {
            share(loaded(run, Tensor::V), per.v)
        });
        times("reads of an element of O", &|run| {
            share(loaded(run, Tensor::O), per.o)
        });
        times("writes of one of O, out included", &|run| {
            share(stored(run, Tensor::O) + stored(run, Tensor::Out), per.o)
        });
        times("statistics read, a row", &|run| {
            share(loaded(run, Tensor::M) + loaded(run, Tensor::L), per.rows)
        });
        times("statistics written, a row", &|run| {
            let all = [Tensor::M, Tensor::L, Tensor::Lse];
            share(all.map(|t| stored(run, t)).iter().sum(), per.rows)
        });
        let dv = problem.dims().head_dim_v as f64;
        times("operations an element of O", &|run| {
            let work = io(run).work;
            share(work.rescales + work.divisions, per.o)
        });
        let mut figure = |what, of: &dyn Fn(&Run) -> (f64, String)| {
            let (a, b) = (of(both[0]), of(both[1]));
            rows.push(Row {
                what,
                fa1: a.1,
                fa2: b.1,
                figures: Some([a.0, b.0]),
                countable: true,
            });
        };
        figure("rescale factors, a row and block", &|run| factors(run));
        figure("units of parallel work", &|run| parallel(problem, run));
        figure("extra memory of a call", &|run| {
            let size = problem.dtype().accumulator().size() as f64;
            let bytes = match run.0 {
                Algorithm::Fa1 => per.rows * (dv + 2.0) * size,
                _ => 0.0,
            };
            let text = match run.0 {
                Algorithm::Fa1 => format!("{}: O, l and m", ui::bytes(bytes as u64)),
                _ => "none".into(),
            };
            (bytes, text)
        });
        let mut fact = |what, fa1: &str, fa2: &str| {
            rows.push(Row {
                what,
                fa1: fa1.into(),
                fa2: fa2.into(),
                figures: None,
                countable: false,
            });
        };
        fact("statistics kept", "l and m", "L = m + ln l");
        fact(
            "split over warps",
            "keys: results added up",
            "rows: nothing to add",
        );
        Comparison {
            from_a_run: both.iter().all(|run| run.3.is_some()),
            rows,
        }
    }
}

/// What changed from one step to the next.
fn loop_order(run: &Run) -> String {
    let steps = run
        .3
        .as_ref()
        .map(|c| (c.watch.next_rows, c.watch.next_keys));
    match steps {
        Some((0, 0)) => "one block".into(),
        Some((rows, keys)) if rows > keys => "keys outer, rows inner".into(),
        Some(_) => "rows outer, keys inner".into(),
        None => "not counted".into(),
    }
}

fn factors(run: &Run) -> (f64, String) {
    let Some(counted) = &run.3 else {
        return (f64::NAN, "not counted".into());
    };
    let each = counted.watch.factors as f64 / counted.watch.steps.max(1) as f64;
    let names = if each > 1.0 { "α and β" } else { "α" };
    (each, format!("{}: {names}", short(each)))
}

/// Heads for FA1, whose rows wait for each other's keys; blocks of rows for FA2.
fn parallel(problem: &Problem, run: &Run) -> (f64, String) {
    let all = problem.sequences().len() as f64 * problem.dims().num_heads as f64;
    let Some(counted) = &run.3 else {
        return (f64::NAN, "not counted".into());
    };
    let repeats = if counted.one_head { all } else { 1.0 };
    match run.0 {
        Algorithm::Fa1 => {
            let units = repeats * counted.watch.heads as f64;
            (units, format!("{units}: a head"))
        }
        _ => {
            let units = repeats * counted.watch.finished as f64;
            (units, format!("{units}: a block of rows"))
        }
    }
}

/// Whole numbers as such.
fn short(x: f64) -> String {
    if x.fract() == 0.0 {
        format!("{x}")
    } else {
        significant(Some(x))
    }
}
