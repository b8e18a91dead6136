//! FA1 and FA2, figure by figure.

use serde::Serialize;
use tilewise::core::io_model::Io;
use tilewise::core::observe::Tensor;
use tilewise::core::schedule::BlockSizes;
use tilewise::{Algorithm, Problem, Sequence};

use super::pass::Pass;
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
    /// k and v as they are, not as each query head reads them.
    kv: (f64, f64),
    rows: f64,
    pairs: f64,
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
            kv: (
                keys / dims.group() as f64 * dims.head_dim as f64,
                keys / dims.group() as f64 * dims.head_dim_v as f64,
            ),
            rows,
            pairs: heads
                * problem
                    .sequences()
                    .iter()
                    .map(|s| s.seqlen_q as f64 * s.seqlen_k as f64)
                    .sum::<f64>(),
        }
    }
}

fn share(x: u128, of: f64) -> f64 {
    if of > 0.0 { x as f64 / of } else { 0.0 }
}

impl Comparison {
    pub(super) fn new(pass: Pass, problem: &Problem, runs: &[Run]) -> Comparison {
        let both: Vec<&Run> = runs
            .iter()
            .filter(|run| run.0 != Algorithm::Standard)
            .collect();
        let mut table = Table {
            both: [both[0], both[1]],
            rows: Vec::new(),
        };
        let per = Per::new(problem);
        table.words("loop order", true, |run| loop_order(problem, pass, run));
        table.words("rows × keys a block", false, |run| {
            format!("{} × {}", run.1.rows(), run.1.keys())
        });
        match pass {
            Pass::Forward => forward(&mut table, problem, &per),
            Pass::Backward => backward(&mut table, problem, &per),
        }
        Comparison {
            from_a_run: both.iter().all(|run| run.3.is_some()),
            rows: table.rows,
        }
    }
}

/// Rows as they are added.
struct Table<'a> {
    both: [&'a Run; 2],
    rows: Vec<Row>,
}

impl Table<'_> {
    fn words(&mut self, what: &'static str, countable: bool, of: impl Fn(&Run) -> String) {
        let [fa1, fa2] = self.both.map(of);
        self.rows.push(Row {
            what,
            fa1,
            fa2,
            figures: None,
            countable,
        });
    }

    fn figure(&mut self, what: &'static str, of: impl Fn(&Run) -> (f64, String)) {
        let [fa1, fa2] = self.both.map(of);
        self.rows.push(Row {
            what,
            figures: Some([fa1.0, fa2.0]),
            fa1: fa1.1,
            fa2: fa2.1,
            countable: true,
        });
    }

    /// So many times what it is relative to.
    fn times(&mut self, what: &'static str, of: impl Fn(&Io) -> u128, relative: f64) {
        self.figure(what, |run| {
            let times = share(of(io(run)), relative);
            (times, format!("{}×", short(times)))
        });
    }

    fn reads(&mut self, what: &'static str, tensors: &[Tensor], relative: f64) {
        self.times(what, |io| loaded(io, tensors), relative);
    }

    fn writes(&mut self, what: &'static str, tensors: &[Tensor], relative: f64) {
        self.times(what, |io| stored(io, tensors), relative);
    }

    fn fact(&mut self, what: &'static str, fa1: &str, fa2: &str) {
        self.rows.push(Row {
            what,
            fa1: fa1.into(),
            fa2: fa2.into(),
            figures: None,
            countable: false,
        });
    }
}

/// What was counted, or the formula where nothing was.
fn io(run: &Run) -> &Io {
    run.3.as_ref().map_or(&run.2, |counted| &counted.io)
}

fn loaded(io: &Io, tensors: &[Tensor]) -> u128 {
    let of = |&tensor| io.count(tensor).map_or(0, |count| count.loaded);
    tensors.iter().map(of).sum()
}

fn stored(io: &Io, tensors: &[Tensor]) -> u128 {
    let of = |&tensor| io.count(tensor).map_or(0, |count| count.stored);
    tensors.iter().map(of).sum()
}

fn forward(table: &mut Table<'_>, problem: &Problem, per: &Per) {
    table.reads("reads of an element of q", &[Tensor::Q], per.q);
    table.reads("reads of one of k, a query head", &[Tensor::K], per.k);
    table.reads("reads of one of v, a query head", &[Tensor::V], per.v);
    table.reads("reads of an element of O", &[Tensor::O], per.o);
    table.writes(
        "writes of one of O, out included",
        &[Tensor::O, Tensor::Out],
        per.o,
    );
    let statistics = [Tensor::M, Tensor::L, Tensor::Lse];
    table.reads("statistics read, a row", &statistics, per.rows);
    table.writes("statistics written, a row", &statistics, per.rows);
    table.times(
        "operations an element of O",
        |io| io.work.rescales + io.work.divisions,
        per.o,
    );
    table.figure("rescale factors, a row and block", factors);
    table.figure("others a 1000 multiply-adds", others);
    table.figure("units of parallel work", |run| {
        let name = ["a head", "a block of rows"];
        parallel(problem, Pass::Forward, run, name)
    });
    table.figure("extra memory of a call", |run| {
        extra(problem, Pass::Forward, run, "O, l and m")
    });
    table.fact("statistics kept", "l and m", "L = m + ln l");
    table.fact(
        "split over warps",
        "keys: results added up",
        "rows: nothing to add",
    );
}

fn backward(table: &mut Table<'_>, problem: &Problem, per: &Per) {
    table.reads("reads of an element of q", &[Tensor::Q], per.q);
    table.reads("reads of one of dout", &[Tensor::DOut], per.o);
    table.reads("reads of one of out", &[Tensor::Out], per.o);
    table.reads("reads of one of k", &[Tensor::K], per.kv.0);
    table.reads("reads of one of v", &[Tensor::V], per.kv.1);
    table.reads("reads of an element of dQ", &[Tensor::DQSum], per.q);
    table.writes(
        "writes of one of dQ, dq included",
        &[Tensor::DQSum, Tensor::DQ],
        per.q,
    );
    table.writes("writes of one of dk", &[Tensor::DK], per.kv.0);
    table.writes("writes of one of dv", &[Tensor::DV], per.kv.1);
    let statistics = [Tensor::M, Tensor::L, Tensor::Lse, Tensor::Delta];
    table.reads("statistics read, a row", &statistics, per.rows);
    table.writes("statistics written, a row", &statistics, per.rows);
    table.times(
        "exponentials, a pair of q and k",
        |io| io.work.exps,
        per.pairs,
    );
    table.times(
        "divisions, a pair of q and k",
        |io| io.work.divisions,
        per.pairs,
    );
    table.times(
        "terms of Δ, an element of O",
        |io| io.work.delta_terms,
        per.o,
    );
    table.figure("others a 1000 multiply-adds", others);
    table.figure("units of parallel work", |run| {
        let name = ["a head of k and v", "a block of keys"];
        parallel(problem, Pass::Backward, run, name)
    });
    table.figure("extra memory of a call", |run| {
        extra(
            problem,
            Pass::Backward,
            run,
            if run.0 == Algorithm::Fa1 {
                "dQ"
            } else {
                "dQ and Δ"
            },
        )
    });
    table.fact("P is made from", "l and m: e^(S-m) / l", "L: e^(S-L)");
    table.fact("Δ is made", "in every tile", "once, before the loops");
    table.fact(
        "shares of dQ are added",
        "one after another",
        "atomically, or in turn",
    );
}

/// Operations besides the products, for a thousand multiply-adds.
fn others(run: &Run) -> (f64, String) {
    let work = io(run).work;
    let each = 1e3 * work.others() as f64 / (work.multiply_adds as f64).max(1.0);
    (each, significant(Some(each)))
}

/// What was stored before the first tile of each head; by formula, what the algorithm keeps of each row
/// outside fast memory.
fn extra(problem: &Problem, pass: Pass, run: &Run, what: &str) -> (f64, String) {
    let bytes = match &run.3 {
        Some(counted) => u128::from(counted.watch.workspace) * counted.repeats,
        None => {
            let dims = problem.dims();
            let kept: &[(Tensor, usize)] = match (pass, run.0) {
                (Pass::Forward, Algorithm::Fa1) => {
                    &[(Tensor::O, dims.head_dim_v), (Tensor::M, 1), (Tensor::L, 1)]
                }
                (Pass::Forward, _) => &[],
                (Pass::Backward, Algorithm::Fa1) => &[(Tensor::DQSum, dims.head_dim)],
                (Pass::Backward, _) => &[(Tensor::DQSum, dims.head_dim), (Tensor::Delta, 1)],
            };
            let rows: u128 = (problem.sequences().iter())
                .map(|s| (s.seqlen_q * dims.num_heads) as u128)
                .sum();
            let of = |&(tensor, columns): &(Tensor, usize)| {
                let size = run.2.count(tensor).map_or(0, |count| count.element_bytes);
                rows * (columns * size) as u128
            };
            kept.iter().map(of).sum()
        }
    };
    let text = match bytes {
        0 => "none".into(),
        _ => format!(
            "{}: {what}",
            ui::bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
        ),
    };
    (bytes as f64, text)
}

/// What changed from one step to the next; by formula, what the algorithm says.
fn loop_order(problem: &Problem, pass: Pass, run: &Run) -> String {
    let steps = match &run.3 {
        Some(counted) => (counted.watch.next_rows, counted.watch.next_keys),
        None => {
            let several = |of: fn(&Sequence) -> usize, block: usize| {
                u64::from(problem.sequences().iter().any(|s| of(s) > block))
            };
            let (rows, keys) = (
                several(|s| s.seqlen_q, run.1.rows()),
                several(|s| s.seqlen_k, run.1.keys()),
            );
            match (run.0, pass) {
                (Algorithm::Fa1, _) | (_, Pass::Backward) => (2 * rows, keys),
                _ => (rows, 2 * keys),
            }
        }
    };
    match steps {
        (0, 0) => "one block".into(),
        (rows, keys) if rows > keys => "keys outer, rows inner".into(),
        _ => "rows outer, keys inner".into(),
    }
}

/// α, and for FA1, whose blocks have statistics of their own, β.
fn factors(run: &Run) -> (f64, String) {
    let each = match (&run.3, run.0) {
        (Some(counted), _) => counted.watch.factors as f64 / counted.watch.steps.max(1) as f64,
        (None, Algorithm::Fa1) => 2.0,
        (None, _) => 1.0,
    };
    let names = if each > 1.0 { "α and β" } else { "α" };
    (each, format!("{}: {names}", short(each)))
}

/// Heads for FA1, whose blocks wait for each other; for FA2 blocks of rows, backward blocks of keys.
fn parallel(problem: &Problem, pass: Pass, run: &Run, [fa1, fa2]: [&str; 2]) -> (f64, String) {
    let dims = problem.dims();
    let name = if run.0 == Algorithm::Fa1 { fa1 } else { fa2 };
    let units = match &run.3 {
        Some(counted) => {
            let units = match run.0 {
                Algorithm::Fa1 => counted.watch.heads,
                _ => counted.watch.finished,
            };
            // A head of k and v is what was run backward, and dQ is finished once for each of its query
            // heads.
            let shared = match (pass, run.0) {
                (Pass::Backward, Algorithm::Fa1) => dims.group().max(1) as u128,
                _ => 1,
            };
            u128::from(units) * counted.repeats / shared
        }
        None => {
            let heads = match pass {
                Pass::Forward => dims.num_heads,
                Pass::Backward => dims.num_kv_heads,
            };
            let blocks = |s: &Sequence| match (run.0, pass) {
                (Algorithm::Fa1, _) => usize::from(s.seqlen_q > 0),
                (_, Pass::Forward) => s.seqlen_q.div_ceil(run.1.rows()),
                (_, Pass::Backward) => s.seqlen_k.div_ceil(run.1.keys()),
            };
            let all: usize = problem.sequences().iter().map(blocks).sum();
            (heads * all) as u128
        }
    };
    (units as f64, format!("{units}: {name}"))
}

/// Whole numbers as such.
fn short(x: f64) -> String {
    if x.fract() == 0.0 {
        format!("{x}")
    } else {
        significant(Some(x))
    }
}
