//! Traffic and predicted time over N.

use anyhow::Result;
use serde::Serialize;
use tilewise::core::io_model::Modifiers;
use tilewise::{Algorithm, Dims, Problem};

use super::model::{Blocks, predicted_ms};
use super::{Chip, IoArgs};
use crate::chart::{Chart, Series, colour_of, count_label};
use crate::ui;

/// The three algorithms on seqlen_q = seqlen_k = N, everything else as the problem has it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    pub(super) n: usize,
    /// Standard, FA1, FA2.
    pub(super) bytes: [u128; 3],
    /// The larger of what the bytes take at the chip's bandwidth and the products at its peak.
    pub(super) predicted_ms: [Option<f64>; 3],
}

const FIRST: usize = 256;
const LAST: usize = 65536;

/// Powers of two, from formulas; bias, mask and lengths of a file are left out.
pub(super) fn over_n(args: &IoArgs, chip: &Chip, problem: &Problem) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    let mut n = FIRST;
    while n <= LAST {
        let dims = Dims {
            seqlen_q: n,
            seqlen_k: n,
            ..*problem.dims()
        };
        let at_n = Problem::dense(dims, problem.dtype(), problem.options())?;
        let blocks = Blocks::choose(args, chip, &at_n);
        let io = Algorithm::ALL.map(|algorithm| {
            let sizes = blocks.of(algorithm).0;
            args.pass()
                .formula(&at_n, algorithm, sizes, Modifiers::default())
        });
        points.push(Point {
            n,
            bytes: [0, 1, 2].map(|at| io[at].bytes()),
            predicted_ms: [0, 1, 2].map(|at| {
                let (traffic, products) = predicted_ms(&at_n, chip, &io[at]);
                match (traffic, products) {
                    (Some(a), Some(b)) => Some(a.max(b)),
                    (a, b) => a.or(b),
                }
            }),
        });
        n *= 2;
    }
    Ok(points)
}

pub(super) fn charts(points: &[Point]) -> Vec<Chart> {
    let series = |value: fn(&Point, usize) -> Option<f64>| -> Vec<Series> {
        Algorithm::ALL
            .into_iter()
            .enumerate()
            .map(|(at, algorithm)| Series {
                name: algorithm.name().into(),
                colour: colour_of(algorithm),
                dashed: false,
                points: points
                    .iter()
                    .filter_map(|point| Some((point.n as f64, value(point, at)?)))
                    .collect(),
            })
            .collect()
    };
    let mut charts = vec![Chart {
        title: "Bytes between slow and fast memory".into(),
        x: "N",
        y: "bytes".into(),
        series: series(|point, at| Some(point.bytes[at] as f64)),
        y_label: |x| ui::bytes(x as u64),
    }];
    if points.iter().any(|point| point.predicted_ms[0].is_some()) {
        charts.push(Chart {
            title: "Predicted time".into(),
            x: "N",
            y: "ms".into(),
            series: series(|point, at| point.predicted_ms[at]),
            y_label: |x| ui::significant(Some(x)),
        });
    }
    charts
}

/// Columns of the strip on which a letter stands for each algorithm.
pub(super) const STRIP: usize = 22;

/// A line for each N: S, 1 and 2 on a logarithmic axis of bytes; `*` where two fall together.
pub(super) fn strips(points: &[Point]) -> Vec<(String, String)> {
    let all = points.iter().flat_map(|point| point.bytes);
    let logs: Vec<f64> = all.map(|x| (x.max(1) as f64).ln()).collect();
    let (low, high) = logs.iter().fold((f64::MAX, f64::MIN), |(low, high), &x| {
        (low.min(x), high.max(x))
    });
    points
        .iter()
        .map(|point| {
            let mut strip = vec![' '; STRIP];
            for (bytes, letter) in point.bytes.into_iter().zip(['S', '1', '2']) {
                let share = ((bytes.max(1) as f64).ln() - low) / (high - low).max(1e-9);
                let cell = &mut strip[(share * (STRIP - 1) as f64).round() as usize];
                *cell = if *cell == ' ' { letter } else { '*' };
            }
            let strip: String = strip.into_iter().collect();
            (count_label(point.n as f64), strip.trim_end().to_string())
        })
        .collect()
}
