//! What `bench` and `io` find, asked as their command lines would ask.

use anyhow::{Context, Result};
use clap::{Args, Command};
use serde_json::Value;
use tilewise::Algorithm;

use super::{Plan, ReportArgs};
use crate::args::select::Lane;
use crate::bench::{self, BenchArgs};
use crate::chart::{Chart, Series, colour_of};
use crate::io::{self, IoArgs};
use crate::ui;

/// Timings and their charts.
pub(super) struct Timed {
    /// The command that measures the same.
    pub(super) command: String,
    pub(super) results: Vec<Value>,
    /// What devices could do at most, by name.
    pub(super) ceilings: Vec<Value>,
    pub(super) charts: Vec<Chart>,
}

/// Traffic: what `io` prints, and its charts.
pub(super) struct Traffic {
    pub(super) command: String,
    pub(super) report: Value,
    pub(super) charts: Vec<Chart>,
}

/// Arguments as a command line gives them.
fn parse<A: Args>(words: &[String]) -> Result<A> {
    let command = A::augment_args(Command::new("tilewise").no_binary_name(true));
    let matches = command
        .try_get_matches_from(words)
        .context("the report's own arguments")?;
    Ok(A::from_arg_matches(&matches)?)
}

fn bench(args: &ReportArgs, plan: &Plan, shape: String, ceilings: bool) -> Result<Timed> {
    let mut words = vec![
        "--shapes".into(),
        shape,
        "--dtype".into(),
        args.dtype.to_string(),
    ];
    words.extend(["--memory-limit".into(), args.memory_limit.to_string()]);
    words.extend(args.select.words());
    if let Some(threads) = args.threads {
        words.extend(["--threads".into(), threads.to_string()]);
    }
    if let Some(repeat) = plan.repeat {
        words.extend(["--repeat".into(), repeat.to_string()]);
    }
    if ceilings {
        words.push("--ceilings".into());
    }
    let found = bench::figures(&parse::<BenchArgs>(&words)?)?;
    let list = |name: &str| found[name].as_array().cloned().unwrap_or_default();
    Ok(Timed {
        command: format!("tilewise bench {}", words.join(" ")),
        results: list("results"),
        ceilings: list("ceilings"),
        charts: Vec::new(),
    })
}

fn list(values: &[usize]) -> String {
    let texts: Vec<String> = values.iter().map(usize::to_string).collect();
    texts.join(":")
}

pub(super) fn speed(args: &ReportArgs, plan: &Plan) -> Result<Timed> {
    let shape = format!(
        "b=1,hq={},sq={},d={}",
        plan.heads,
        list(&plan.lengths),
        plan.head_dim
    );
    let mut timed = bench(args, plan, shape, true)?;
    timed.charts = speed_charts(&timed.results);
    Ok(timed)
}

/// A chart for each backend that was timed, with its roof where its ceilings were measured, whatever it is.
fn speed_charts(results: &[Value]) -> Vec<Chart> {
    backends(results)
        .into_iter()
        .map(|backend| {
            let mut series = lines(results, &backend, "sq", |row| row["gflops"].as_f64());
            series.extend(roofs(results, &backend));
            speed_chart(format!("{backend}: speed over N"), "N", series)
        })
        .collect()
}

/// Speeds in GFLOP/s, drawn in the unit in which their numbers are short.
fn speed_chart(title: String, x: &'static str, mut series: Vec<Series>) -> Chart {
    let points = series.iter().flat_map(|series| &series.points);
    let most = points.map(|point| point.1).fold(0.0, f64::max);
    let (unit, y) = match most >= 1e4 {
        true => (1e3, "TFLOP/s"),
        false => (1.0, "GFLOP/s"),
    };
    for series in &mut series {
        for point in &mut series.points {
            point.1 /= unit;
        }
    }
    Chart {
        title,
        x,
        y: y.into(),
        series,
        y_label: |x| match x >= 1.0 && x.fract() == 0.0 {
            true => x.to_string(),
            false => ui::significant(Some(x)),
        },
    }
}

pub(super) fn heads(args: &ReportArgs, plan: &Plan) -> Result<Timed> {
    let shape = format!(
        "b=1,hq={},sq={},d={}",
        list(&plan.head_counts),
        plan.heads_length,
        plan.head_dim
    );
    let mut timed = bench(args, plan, shape, false)?;
    let results = &timed.results;
    timed.charts = backends(results)
        .into_iter()
        .map(|backend| {
            speed_chart(
                format!("{backend}: few heads and many, N = {}", plan.heads_length),
                "heads",
                lines(results, &backend, "hq", |row| row["gflops"].as_f64()),
            )
        })
        .collect();
    Ok(timed)
}

/// Backends that were timed, in order.
fn backends(results: &[Value]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in results.iter().filter(|row| row["median_ms"].is_number()) {
        let name = row["backend"].as_str().unwrap_or_default();
        if !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
    }
    names
}

/// A line for each algorithm (and instruction set, if several were asked for), over an axis of the shape.
fn lines(
    results: &[Value],
    backend: &str,
    axis: &str,
    value: fn(&Value) -> Option<f64>,
) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    let rows = || results.iter().filter(|row| row["backend"] == backend);
    let mut isas: Vec<&str> = rows().filter_map(|row| row["isa"].as_str()).collect();
    isas.sort_unstable();
    isas.dedup();
    for row in rows() {
        let (Some(x), Some(y)) = (row["shape"][axis].as_f64(), value(row)) else {
            continue;
        };
        let algorithm = row["algorithm"].as_str().unwrap_or_default();
        let name = match row["isa"].as_str() {
            Some(isa) if isas.len() > 1 => format!("{algorithm} {isa}"),
            _ => algorithm.to_string(),
        };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push((x, y)),
            None => series.push(Series {
                name,
                colour: algorithm.parse::<Algorithm>().map_or(5, colour_of),
                dashed: false,
                points: vec![(x, y)],
            }),
        }
    }
    series
}

/// What the machine could do at most at each N, the speed over its share of the ceiling: a line for each
/// kind of products that its algorithms make.
fn roofs(results: &[Value], backend: &str) -> Vec<Series> {
    let mut roofs: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in results.iter().filter(|row| row["backend"] == backend) {
        let (Some(n), Some(speed), Some(share)) = (
            row["shape"]["sq"].as_f64(),
            row["gflops"].as_f64(),
            row["ceiling_share"].as_f64(),
        ) else {
            continue;
        };
        let words = [&row["isa"], &row["products"]].map(|word| word.as_str().unwrap_or_default());
        let name = words.join(" ").trim().to_string();
        let at = roofs.iter().position(|(known, _)| *known == name);
        let at = at.unwrap_or_else(|| {
            roofs.push((name, Vec::new()));
            roofs.len() - 1
        });
        // What makes the same products of one shape stands against the same measurement.
        let points = &mut roofs[at].1;
        if points.last().is_none_or(|last| last.0 != n) {
            points.push((n, speed / share));
        }
    }
    let several = roofs.len() > 1;
    roofs
        .into_iter()
        .map(|(name, points)| Series {
            name: match several {
                true => format!("ceiling, {name}"),
                false => "measured ceiling".into(),
            },
            colour: 4,
            dashed: true,
            points,
        })
        .collect()
}

/// For the chip that runs: an H100 or H200 by its name, otherwise this CPU's cache.
pub(super) fn traffic(args: &ReportArgs, plan: &Plan, lanes: &[Lane]) -> Result<Traffic> {
    let device = lanes
        .iter()
        .filter_map(|lane| lane.backend.as_ref().ok())
        .map(|backend| backend.info().device.to_ascii_lowercase())
        .find_map(|device| {
            ["a100", "h100", "h200"]
                .into_iter()
                .find(|chip| device.contains(chip))
        });
    let words: Vec<String> = [
        "--shape",
        &format!(
            "1,{0},{0},{1},{1},{2}",
            plan.heads, plan.heads_length, plan.head_dim
        ),
        "--dtype",
        args.dtype.name(),
        "--chip",
        device.unwrap_or("cpu"),
    ]
    .map(String::from)
    .into();
    let (report, charts) = io::figures(&parse::<IoArgs>(&words)?)?;
    Ok(Traffic {
        command: format!("tilewise io {}", words.join(" ")),
        report,
        charts,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A row of `bench`, on a backend whose ceiling at `n` is `ceiling`, if that was measured.
    fn row(backend: &str, algorithm: &str, n: u64, gflops: f64, ceiling: Option<f64>) -> Value {
        json!({
            "backend": backend, "algorithm": algorithm, "isa": null, "shape": {"sq": n, "hq": 8},
            "median_ms": 1.0, "gflops": gflops, "ceiling_share": ceiling.map(|c| gflops / c),
        })
    }

    /// The roof is what `bench` measured, on whatever backend it did.
    #[test]
    fn a_backend_has_a_roof_where_its_ceilings_were_measured() {
        let results = [
            row("cuda:0", "standard", 128, 40.0, Some(500.0)),
            row("cuda:0", "fa2", 128, 125.0, Some(500.0)),
            row("cuda:0", "standard", 256, 60.0, Some(800.0)),
            row("cuda:0", "fa2", 256, 400.0, Some(800.0)),
            row("cpu", "fa2", 128, 50.0, None),
        ];
        let charts = speed_charts(&results);
        let [gpu, cpu] = &charts[..] else {
            panic!("{charts:?}")
        };
        assert_eq!(gpu.title, "cuda:0: speed over N");
        let names: Vec<&str> = gpu.series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["standard", "fa2", "measured ceiling"]);
        assert_eq!(gpu.series[1].points, [(128.0, 125.0), (256.0, 400.0)]);
        let roof = &gpu.series[2];
        assert!(roof.dashed);
        assert_eq!(roof.points, [(128.0, 500.0), (256.0, 800.0)]);
        assert_eq!(cpu.series.len(), 1);
    }

    #[test]
    fn fast_backends_are_drawn_in_teraflops() {
        let results = [
            row("cuda:0", "fa2", 128, 2000.0, Some(600e3)),
            row("cpu", "fa2", 128, 50.0, Some(100.0)),
        ];
        let charts = speed_charts(&results);
        assert_eq!((&charts[0].y[..], &charts[1].y[..]), ("TFLOP/s", "GFLOP/s"));
        assert_eq!(charts[0].series[0].points, [(128.0, 2.0)]);
        assert_eq!(charts[0].series[1].points, [(128.0, 600.0)]);
        assert_eq!(charts[1].series[0].points, [(128.0, 50.0)]);
        assert_eq!((charts[0].y_label)(512.0), "512");
    }

    /// f32 on a GPU is made of f16 or of tf32, which have roofs of their own.
    #[test]
    fn every_kind_of_products_has_its_roof() {
        let with = |mut row: Value, products: &str| {
            row["products"] = products.into();
            row
        };
        let results = [
            with(
                row("cuda:0", "fa1", 128, 10.0, Some(100.0)),
                "mma.sync tf32 / 3",
            ),
            with(
                row("cuda:0", "fa2", 128, 50.0, Some(200.0)),
                "mma.sync f16 / 3",
            ),
        ];
        let charts = speed_charts(&results);
        let names: Vec<&str> = charts[0].series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "fa1",
                "fa2",
                "ceiling, mma.sync tf32 / 3",
                "ceiling, mma.sync f16 / 3"
            ]
        );
        assert_eq!(charts[0].series[3].points, [(128.0, 200.0)]);
    }
}
