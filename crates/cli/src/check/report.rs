//! What `tilewise check` says.

use serde::Serialize;

use super::verdict::Verdict;

/// One run of a case.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) backend: Option<String>,
    pub(super) algorithm: Option<String>,
    pub(super) isa: Option<String>,
    pub(super) verdict: Verdict,
}

impl Run {
    /// A run of something that no backend computes.
    pub(super) fn alone(verdict: Verdict) -> Self {
        Run {
            backend: None,
            algorithm: None,
            isa: None,
            verdict,
        }
    }

    /// `cpu fa2 avx2`; empty for what no backend computes.
    fn label(&self) -> String {
        [&self.backend, &self.algorithm, &self.isa]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// All runs of one case.
#[derive(Clone, Debug)]
pub(super) struct CaseReport {
    pub(super) id: String,
    pub(super) op: String,
    pub(super) kind: String,
    pub(super) level: String,
    pub(super) note: String,
    pub(super) runs: Vec<Run>,
}

impl CaseReport {
    /// Failed if a run failed, else refused if a run was refused.
    pub(super) fn verdict(&self) -> Verdict {
        Verdict::worst(self.runs.iter().map(|run| &run.verdict))
    }

    /// One line, and one for each run that did not pass if they do not all say the same.
    fn text(&self) -> String {
        let verdict = self.verdict();
        let mut text = format!("{:<8} {}", verdict.name(), self.id);
        let Some(reason) = verdict.reason() else {
            return text + "\n";
        };
        if self.runs.iter().all(|run| run.verdict == verdict) {
            return format!("{text}: {reason}\n");
        }
        text.push('\n');
        for run in &self.runs {
            if let Some(reason) = run.verdict.reason() {
                text += &format!(
                    "         {} {}: {reason}\n",
                    run.label(),
                    run.verdict.name()
                );
            }
        }
        text
    }
}

/// How many passed, were refused and failed.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) passed: usize,
    pub(super) refused: usize,
    pub(super) failed: usize,
}

impl Totals {
    pub(super) fn of<'a>(verdicts: impl IntoIterator<Item = &'a Verdict>) -> Self {
        let mut totals = Totals::default();
        for verdict in verdicts {
            *match verdict {
                Verdict::Passed => &mut totals.passed,
                Verdict::Refused(_) => &mut totals.refused,
                Verdict::Failed(_) => &mut totals.failed,
            } += 1;
        }
        totals
    }
}

/// Everything that was checked.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) cases: Vec<CaseReport>,
    /// What each case ran on.
    pub(super) lanes: Vec<String>,
    /// Backends that this machine does not have, and why.
    pub(super) passed_over: Vec<(String, String)>,
}

impl Report {
    pub(super) fn totals(&self) -> Totals {
        let verdicts: Vec<_> = self.cases.iter().map(CaseReport::verdict).collect();
        Totals::of(&verdicts)
    }

    /// Totals of cases first, then of single runs, then every case.
    pub(super) fn json(&self) -> impl Serialize + '_ {
        ReportJson {
            schema: 1,
            totals: self.totals(),
            runs: Totals::of(
                self.cases
                    .iter()
                    .flat_map(|case| &case.runs)
                    .map(|run| &run.verdict),
            ),
            lanes: &self.lanes,
            passed_over: self
                .passed_over
                .iter()
                .map(|(backend, reason)| PassedOverJson { backend, reason })
                .collect(),
            cases: self.cases.iter().map(CaseJson::from).collect(),
        }
    }

    pub(super) fn text(&self) -> String {
        let mut text: String = self.cases.iter().map(CaseReport::text).collect();
        let Totals {
            passed,
            refused,
            failed,
        } = self.totals();
        text += &format!("{passed} passed, {refused} refused, {failed} failed");
        if self.lanes.is_empty() {
            text.push('\n');
        } else {
            text += &format!(" (each case on {})\n", self.lanes.join(", "));
        }
        text
    }
}

#[derive(Serialize)]
struct ReportJson<'a> {
    schema: u32,
    #[serde(flatten)]
    totals: Totals,
    runs: Totals,
    lanes: &'a [String],
    passed_over: Vec<PassedOverJson<'a>>,
    cases: Vec<CaseJson<'a>>,
}

#[derive(Serialize)]
struct PassedOverJson<'a> {
    backend: &'a str,
    reason: &'a str,
}

#[derive(Serialize)]
struct CaseJson<'a> {
    id: &'a str,
    op: &'a str,
    kind: &'a str,
    level: &'a str,
    note: &'a str,
    status: &'static str,
    reason: Option<String>,
    runs: Vec<RunJson<'a>>,
}

impl<'a> From<&'a CaseReport> for CaseJson<'a> {
    fn from(case: &'a CaseReport) -> Self {
        let verdict = case.verdict();
        CaseJson {
            id: &case.id,
            op: &case.op,
            kind: &case.kind,
            level: &case.level,
            note: &case.note,
            status: verdict.name(),
            reason: verdict.reason().map(str::to_owned),
            runs: case.runs.iter().map(RunJson::from).collect(),
        }
    }
}

#[derive(Serialize)]
struct RunJson<'a> {
    backend: Option<&'a str>,
    algorithm: Option<&'a str>,
    isa: Option<&'a str>,
    status: &'static str,
    reason: Option<&'a str>,
}

impl<'a> From<&'a Run> for RunJson<'a> {
    fn from(run: &'a Run) -> Self {
        RunJson {
            backend: run.backend.as_deref(),
            algorithm: run.algorithm.as_deref(),
            isa: run.isa.as_deref(),
            status: run.verdict.name(),
            reason: run.verdict.reason(),
        }
    }
}
