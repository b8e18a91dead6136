//! The results of `bench` as text, Markdown, CSV and JSON.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;
use tilewise::{DType, Problem};

use super::ceilings::Ceiling;
use crate::args::select::Lane;
use crate::environment::Environment;
use crate::reasons::{self, Outcome};
use crate::shapes::Shape;
use crate::stats::Samples;
use crate::ui::{self, Grid, plain, significant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    Markdown,
    Csv,
    Json,
}

/// Everything that `bench` measured. `schema` rises when a field changes its meaning or goes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) schema: u32,
    pub(super) environment: Environment,
    /// Everything that was measured of what devices could do at most.
    pub(super) ceilings: Vec<Rate>,
    pub(super) results: Vec<Row>,
}

/// What a device could do at most at one thing.
#[derive(Debug, Serialize)]
pub(super) struct Rate {
    backend: String,
    name: String,
    /// For products, a multiply and an add counted as two.
    gflops: Option<f64>,
    /// For memory.
    gbps: Option<f64>,
    /// Why there is no figure.
    reason: Option<String>,
}

#[cfg(feature = "cuda")]
impl Rate {
    /// `rate` in FLOP/s or bytes/s.
    pub(super) fn of(backend: &str, name: String, rate: f64, flops: bool) -> Rate {
        let rate = Some(rate / 1e9);
        Rate {
            backend: backend.into(),
            name,
            gflops: rate.filter(|_| flops),
            gbps: rate.filter(|_| !flops),
            reason: None,
        }
    }

    /// What could not be measured.
    pub(super) fn missing(backend: &str, name: String, reason: String) -> Rate {
        Rate {
            backend: backend.into(),
            name,
            gflops: None,
            gbps: None,
            reason: Some(reason),
        }
    }
}

impl Rate {
    fn text(&self) -> String {
        let Rate { backend, name, .. } = self;
        match (self.gflops, self.gbps, &self.reason) {
            (Some(gflops), ..) => format!(
                "{backend} {name}: {} TFLOP/s",
                significant(Some(gflops / 1e3))
            ),
            (_, Some(_), _) => format!("{backend} {name}: {} GB/s", significant(self.gbps)),
            (.., reason) => format!(
                "{backend} {name}: not measured: {}",
                reason.as_deref().unwrap_or_default()
            ),
        }
    }
}

/// One backend × algorithm × instruction set on one shape, dtype and number of threads.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) shape: ShapeFacts,
    pub(super) dtype: &'static str,
    pub(super) backend: String,
    pub(super) algorithm: &'static str,
    /// Whether the backend is on this machine.
    #[serde(skip)]
    pub(super) here: bool,
    pub(super) isa: Option<String>,
    pub(super) threads: usize,
    /// Why there are no figures.
    pub(super) reason: Option<String>,
    pub(super) median_ms: Option<f64>,
    pub(super) min_ms: Option<f64>,
    pub(super) max_ms: Option<f64>,
    /// Distance between the quartiles over the median.
    pub(super) spread: Option<f64>,
    pub(super) samples_ms: Vec<f64>,
    pub(super) gflops: Option<f64>,
    /// K and V, each read once, over the median time.
    pub(super) gbps: Option<f64>,
    /// What the machine could do at most, if that was measured: products as the algorithm makes them, and
    /// reading.
    pub(super) fma_gflops: Option<f64>,
    pub(super) read_gbps: Option<f64>,
    /// Whose rate `fma_gflops` is: `fma`, on a device the instruction such as `mma.sync bf16`.
    pub(super) products: Option<String>,
    /// The least time at the slower of the two rates, over the median time.
    pub(super) ceiling_share: Option<f64>,
    /// The slower of the two: what `products` says, or `read`.
    pub(super) ceiling: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct ShapeFacts {
    text: String,
    b: usize,
    hq: usize,
    hkv: usize,
    sq: usize,
    sk: usize,
    d: usize,
    dv: usize,
    causal: bool,
    /// What the command line adds to every shape, in its words.
    options: String,
}

impl Row {
    pub(super) fn new(
        shape: &Shape,
        options: String,
        lane: &Lane,
        dtype: DType,
        threads: usize,
    ) -> Self {
        let dims = shape.dims;
        Row {
            shape: ShapeFacts {
                text: shape.to_string(),
                b: dims.batch,
                hq: dims.num_heads,
                hkv: dims.num_kv_heads,
                sq: dims.seqlen_q,
                sk: dims.seqlen_k,
                d: dims.head_dim,
                dv: dims.head_dim_v,
                causal: shape.causal,
                options,
            },
            dtype: dtype.name(),
            backend: lane.name.clone(),
            algorithm: lane.algorithm.name(),
            here: lane.backend.is_ok(),
            isa: lane.isa.clone(),
            threads,
            reason: None,
            median_ms: None,
            min_ms: None,
            max_ms: None,
            spread: None,
            samples_ms: Vec::new(),
            gflops: None,
            gbps: None,
            fma_gflops: None,
            read_gbps: None,
            products: None,
            ceiling_share: None,
            ceiling: None,
        }
    }

    pub(super) fn measured(&mut self, problem: &Problem, samples: &Samples, backward: bool) {
        let flops = match backward {
            true => problem.backward_flops(),
            false => problem.flops(),
        };
        self.median_ms = samples.median();
        self.min_ms = samples.min();
        self.max_ms = samples.max();
        self.spread = samples.spread();
        self.samples_ms = samples.ms().to_vec();
        self.gflops = self.median_ms.map(|ms| flops / ms / 1e6);
        self.gbps = self.median_ms.map(|ms| super::kv_bytes(problem) / ms / 1e6);
    }

    /// Sets the figures in relation to what the machine could do at most.
    pub(super) fn related(&mut self, problem: &Problem, ceiling: Option<Ceiling>, backward: bool) {
        let (Some(ceiling), Some(ms)) = (ceiling, self.median_ms) else {
            return;
        };
        let (mut share, mut bound) = ceiling.share(problem, ms);
        if backward {
            (share, bound) = (
                problem.backward_flops() / ms / 1e6 / ceiling.fma_gflops,
                &ceiling.products,
            );
        }
        self.fma_gflops = Some(ceiling.fma_gflops);
        self.read_gbps = Some(ceiling.read_gbps);
        self.ceiling_share = Some(share);
        self.ceiling = Some(bound.into());
        self.products = Some(ceiling.products);
    }

    pub(super) fn timed(&self) -> bool {
        self.median_ms.is_some()
    }

    /// As many as [`HEADER`] has.
    fn cells(&self) -> [String; 11] {
        [
            match self.shape.options.as_str() {
                "" => self.shape.text.clone(),
                options => format!("{} {options}", self.shape.text),
            },
            self.dtype.into(),
            self.backend.clone(),
            self.algorithm.into(),
            self.isa.clone().unwrap_or_default(),
            self.threads.to_string(),
            significant(self.median_ms),
            match self.spread {
                Some(spread) => format!("{:.0}%", spread * 100.0),
                None => "-".into(),
            },
            significant(self.gflops),
            significant(self.gbps),
            match (self.ceiling_share, &self.ceiling) {
                (Some(share), Some(ceiling)) => format!("{:.0}% {ceiling}", share * 100.0),
                _ => "-".into(),
            },
        ]
    }
}

const HEADER: [&str; 11] = [
    "b,hq,hkv,sq,sk,d",
    "dtype",
    "backend",
    "algorithm",
    "isa",
    "threads",
    "median ms",
    "spread",
    "GFLOP/s",
    "GB/s",
    "of ceiling",
];
/// Columns that are aligned left.
const LEFT: usize = 5;
/// Columns that text has above the rows: the shape, the type, the threads.
const ABOVE: [usize; 3] = [0, 1, 5];

impl Report {
    pub(super) fn render(&self, format: Format) -> Result<String> {
        Ok(match format {
            Format::Json => serde_json::to_string_pretty(self)? + "\n",
            Format::Csv => self.csv(),
            Format::Markdown => self.markdown(),
            Format::Text => self.text(),
        })
    }

    /// What machine and build this was, and what was skipped.
    fn head(&self) -> String {
        let mut text = String::new();
        for device in &self.environment.backends {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}: {}", device.name, device.device);
        }
        if self.environment.debug_build {
            text.push_str("this is a debug build: times say nothing\n");
        }
        if !self.ceilings.is_empty() {
            text.push_str("at most:\n");
        }
        for rate in &self.ceilings {
            text.push_str(&format!("  {}\n", rate.text()));
        }
        text
    }

    /// Columns to show: the last stays away where no ceiling was measured.
    fn columns(&self) -> usize {
        let related = self.results.iter().any(|row| row.ceiling_share.is_some());
        HEADER.len() - usize::from(!related)
    }

    fn tail(&self) -> String {
        let outcomes = self.results.iter().map(|row| Outcome {
            backend: &row.backend,
            algorithm: row.algorithm,
            here: row.here,
            how: "skipped",
            reason: row.reason.as_deref(),
        });
        let lines = reasons::lines(outcomes);
        lines.iter().map(|line| ui::wrap(line, 2)).collect()
    }

    /// Problem, type and threads stand above the rows that they are the same for: a terminal has no room
    /// for them beside the figures.
    fn text(&self) -> String {
        let columns = self.columns();
        let beside = |column: &usize| !ABOVE.contains(column);
        let header: Vec<&str> = (0..columns)
            .filter(beside)
            .map(|column| HEADER[column])
            .collect();
        let mut grid = Grid::new(&header, LEFT - 2);
        let mut said = String::new();
        for row in self.results.iter().filter(|row| row.timed()) {
            let cells = row.cells();
            let above = format!(
                "{}: {}, {}, {} {}",
                HEADER[0],
                cells[ABOVE[0]],
                cells[ABOVE[1]],
                cells[ABOVE[2]],
                if row.threads == 1 {
                    "thread"
                } else {
                    "threads"
                }
            );
            if above != said {
                grid.heading(above.clone());
                said = above;
            }
            let shown = (0..columns).filter(beside);
            grid.row(
                &shown
                    .map(|column| plain(cells[column].clone()))
                    .collect::<Vec<_>>(),
            );
        }
        let tail = self.tail();
        let gap = if tail.is_empty() { "" } else { "\n" };
        format!("{}\n{}{gap}{tail}", self.head(), grid.render())
    }

    fn markdown(&self) -> String {
        let mut text = self.head();
        text.push('\n');
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let columns = self.columns();
        text.push_str(&line(&HEADER.map(String::from)[..columns]));
        let rule: Vec<String> = (0..columns)
            .map(|column| if column < LEFT { "---" } else { "---:" }.into())
            .collect();
        text.push_str(&line(&rule));
        for row in self.results.iter().filter(|row| row.timed()) {
            text.push_str(&line(&row.cells()[..columns]));
        }
        let tail = self.tail();
        if !tail.is_empty() {
            text.push('\n');
            text.push_str(&tail);
        }
        text
    }

    fn csv(&self) -> String {
        let mut text = String::from(
            "b,hq,hkv,sq,sk,d,dv,causal,dtype,backend,algorithm,isa,threads,\
             median_ms,min_ms,max_ms,spread,samples,gflops,gbps,\
             fma_gflops,read_gbps,ceiling_share,ceiling,reason,options\n",
        );
        let number = |x: Option<f64>| x.map(|x| x.to_string()).unwrap_or_default();
        for row in &self.results {
            let s = &row.shape;
            let cells = [
                s.b.to_string(),
                s.hq.to_string(),
                s.hkv.to_string(),
                s.sq.to_string(),
                s.sk.to_string(),
                s.d.to_string(),
                s.dv.to_string(),
                s.causal.to_string(),
                row.dtype.to_string(),
                row.backend.clone(),
                row.algorithm.to_string(),
                row.isa.clone().unwrap_or_default(),
                row.threads.to_string(),
                number(row.median_ms),
                number(row.min_ms),
                number(row.max_ms),
                number(row.spread),
                row.samples_ms.len().to_string(),
                number(row.gflops),
                number(row.gbps),
                number(row.fma_gflops),
                number(row.read_gbps),
                number(row.ceiling_share),
                row.ceiling.clone().unwrap_or_default(),
                quoted(row.reason.as_deref().unwrap_or_default()),
                s.options.clone(),
            ];
            text.push_str(&cells.join(","));
            text.push('\n');
        }
        text
    }
}

/// A CSV field (RFC 4180).
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_commas_and_quotes_are_quoted() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
    }
}
