//! The results of `compare`, as its JSON has them.

use serde::{Serialize, Serializer};
use tilewise::core::tolerance::Comparison;
use tilewise::{ForwardReport, Problem};

use crate::args::select::Lane;
use crate::cli::Verdict;
use crate::environment::Environment;
use crate::facts::ProblemFacts;
use crate::stats::Samples;

/// Everything that `compare` found. `schema` rises when a field changes its meaning or goes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) schema: u32,
    pub(super) inputs: Vec<String>,
    pub(super) environment: Environment,
    pub(super) problem: ProblemFacts,
    pub(super) reference: &'static str,
    pub(super) reference_rows: ReferenceRows,
    pub(super) results: Vec<ResultRow>,
    /// The o and lse that the file holds, against the reference.
    pub(super) file: Option<FileResult>,
    pub(super) notes: Vec<String>,
}

/// How many rows of the output were judged.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ReferenceRows {
    pub(super) checked: usize,
    pub(super) total: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// Ran; whether it passed is another matter.
    Ok,
    /// Not run, for the reason given.
    Skipped,
    /// The backend reported an error.
    Failed,
}

/// One backend × algorithm × instruction set.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ResultRow {
    pub(super) backend: String,
    pub(super) algorithm: &'static str,
    /// Whether the backend is on this machine.
    #[serde(skip)]
    pub(super) here: bool,
    pub(super) isa: Option<String>,
    pub(super) status: Status,
    pub(super) reason: Option<String>,
    #[serde(serialize_with = "number")]
    pub(super) max_abs_err: Option<f64>,
    pub(super) mean_abs_err: Option<f64>,
    pub(super) max_rel_err: Option<f64>,
    #[serde(serialize_with = "number")]
    pub(super) lse_max_abs_err: Option<f64>,
    pub(super) tolerance: Option<f64>,
    pub(super) lse_tolerance: Option<f64>,
    pub(super) pass: Option<bool>,
    /// Where out is farthest off: `[b, h, i, d]`.
    pub(super) worst: Option<[usize; 4]>,
    /// Elements that are beyond the dtype's range and were not judged.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) beyond_range: usize,
    pub(super) median_ms: Option<f64>,
    pub(super) samples_ms: Vec<f64>,
    pub(super) gflops: Option<f64>,
    pub(super) speedup_vs_standard: Option<f64>,
    pub(super) peak_extra_bytes: Option<u64>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// JSON has no infinity, and `null` says that there is no figure: the word says what it is.
fn number<S: Serializer>(x: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match x {
        Some(x) if !x.is_finite() => serializer.serialize_str("Infinity"),
        other => other.serialize(serializer),
    }
}

impl ResultRow {
    pub(super) fn new(lane: &Lane) -> Self {
        ResultRow {
            backend: lane.name.clone(),
            algorithm: lane.algorithm.name(),
            here: lane.backend.is_ok(),
            isa: lane.isa.clone(),
            status: Status::Ok,
            reason: None,
            max_abs_err: None,
            mean_abs_err: None,
            max_rel_err: None,
            lse_max_abs_err: None,
            tolerance: None,
            lse_tolerance: None,
            pass: None,
            worst: None,
            beyond_range: 0,
            median_ms: None,
            samples_ms: Vec::new(),
            gflops: None,
            speedup_vs_standard: None,
            peak_extra_bytes: None,
        }
    }

    pub(super) fn skipped(lane: &Lane, reason: String) -> Self {
        ResultRow {
            status: Status::Skipped,
            reason: Some(reason),
            ..Self::new(lane)
        }
    }

    pub(super) fn judged(&mut self, report: &ForwardReport, comparison: &Comparison) {
        self.isa = Some(report.isa.clone());
        self.max_abs_err = Some(comparison.max_abs_err);
        self.mean_abs_err = Some(comparison.mean_abs_err);
        self.max_rel_err = Some(comparison.max_rel_err);
        self.lse_max_abs_err = comparison.lse_max_abs_err;
        self.tolerance = Some(comparison.tolerance);
        self.lse_tolerance = Some(comparison.lse_tolerance);
        self.pass = Some(comparison.pass);
        self.worst = comparison.worst;
        self.beyond_range = comparison.beyond_range;
    }

    pub(super) fn timed(&mut self, problem: &Problem, samples: &Samples) {
        self.median_ms = samples.median();
        self.samples_ms = samples.ms().to_vec();
        self.gflops = self.median_ms.map(|ms| problem.flops() / ms / 1e6);
    }

    pub(super) fn ran(&self) -> bool {
        self.status != Status::Skipped
    }
}

/// The file's own results against the reference.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FileResult {
    #[serde(serialize_with = "number")]
    pub(super) max_abs_err: Option<f64>,
    pub(super) mean_abs_err: f64,
    pub(super) max_rel_err: f64,
    #[serde(serialize_with = "number")]
    pub(super) lse_max_abs_err: Option<f64>,
    pub(super) tolerance: f64,
    pub(super) lse_tolerance: f64,
    pub(super) pass: bool,
    /// Where o is farthest off: `[b, h, i, d]`.
    pub(super) worst: Option<[usize; 4]>,
}

impl FileResult {
    pub(super) fn new(comparison: &Comparison) -> Self {
        FileResult {
            max_abs_err: Some(comparison.max_abs_err),
            mean_abs_err: comparison.mean_abs_err,
            max_rel_err: comparison.max_rel_err,
            lse_max_abs_err: comparison.lse_max_abs_err,
            tolerance: comparison.tolerance,
            lse_tolerance: comparison.lse_tolerance,
            pass: comparison.pass,
            worst: comparison.worst,
        }
    }
}

impl Report {
    /// Whether everything that ran agrees with the reference.
    pub(super) fn verdict(&self) -> Verdict {
        let agrees = |row: &ResultRow| match row.status {
            Status::Ok => row.pass == Some(true),
            Status::Skipped => true,
            Status::Failed => false,
        };
        if self.results.iter().all(agrees) && self.file.as_ref().is_none_or(|file| file.pass) {
            Verdict::Agree
        } else {
            Verdict::Differ
        }
    }
}
