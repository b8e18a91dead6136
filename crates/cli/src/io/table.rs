//! The figures of `io`, as people read them.

use std::fmt::Write;

use super::measure::Measured;
use super::model::{Line, Report, Traffic};
use super::pass::Pass;
use super::plot;
use crate::ui::{self, Grid, Tone, plain, significant};

pub(super) fn render(report: &Report) -> String {
    let mut text = String::new();
    head(&mut text, report);
    tensors(&mut text, report);
    totals(&mut text, report);
    over_n(&mut text, report);
    comparison(&mut text, report);
    measured(&mut text, &report.measured);
    text
}

// Writing to a String cannot fail: results of writeln! are dropped throughout.

fn head(text: &mut String, report: &Report) {
    let memory = &report.fast_memory;
    text.push_str(&ui::wrap(&report.inputs.join(" "), 2));
    if report.pass == Pass::Backward {
        let _ = writeln!(text, "  the backward pass: dq, dk and dv from dout");
    }
    let _ = writeln!(text, "  {}", report.problem.sizes());
    let _ = writeln!(text, "  {}", report.problem.options());
    let fast = format!(
        "  {}: {} of {}, M = {} numbers of {}",
        memory.chip,
        ui::bytes(memory.bytes as u64),
        memory.what,
        memory.elements,
        report.problem.dtype
    );
    text.push_str(&ui::wrap(&fast, 4));
    for traffic in &report.algorithms {
        let _ = writeln!(
            text,
            "  {:9}{} rows × {} keys a tile ({})",
            traffic.algorithm, traffic.block_rows, traffic.block_keys, traffic.blocks_from
        );
    }
    text.push('\n');
}

fn mib(bytes: u128) -> String {
    significant(Some(bytes as f64 / f64::from(1 << 20)))
}

fn micro(ms: Option<f64>) -> String {
    significant(ms.map(|ms| ms * 1e3))
}

fn counted(x: Option<u128>) -> String {
    x.map_or("-".into(), |x| x.to_string())
}

fn tensors(text: &mut String, report: &Report) {
    let _ = writeln!(text, "elements read and written, counted and by formula");
    let mut grid = Grid::new(
        &[
            "algorithm",
            "tensor",
            "read\ncounted",
            "\nformula",
            "written\ncounted",
            "\nformula",
            "\nMiB",
            "papers'\nterm",
            "",
        ],
        2,
    );
    for traffic in &report.algorithms {
        for (at, line) in traffic.tensors.iter().enumerate() {
            let name = if at == 0 { traffic.algorithm } else { "" };
            grid.row(&cells(name, line));
        }
    }
    text.push_str(&grid.render());
    for traffic in &report.algorithms {
        let said = match traffic.counted_heads {
            "none" => format!(
                "{}: not counted: a run takes {:.1e} multiply-adds (--count-limit)",
                traffic.algorithm, traffic.work.multiply_adds as f64
            ),
            "one head" if report.pass == Pass::Backward => format!(
                "{}: one head of k and v with its query heads was run and stands for all",
                traffic.algorithm
            ),
            "one head" => format!("{}: one head was run and stands for all", traffic.algorithm),
            _ => continue,
        };
        text.push_str(&ui::wrap(&said, 2));
    }
    text.push('\n');
}

fn cells(name: &str, line: &Line) -> Vec<(String, Tone)> {
    let (read, written) = (line.read, line.written);
    let differs = [read, written]
        .iter()
        .any(|pair| pair.counted.is_some_and(|counted| counted != pair.formula));
    let verdict = match (differs, read.counted) {
        (true, _) => ("DIFFER".into(), Tone::Bad),
        (false, Some(_)) => ("=".into(), Tone::Good),
        (false, None) => plain(""),
    };
    vec![
        plain(name),
        plain(line.tensor),
        plain(counted(read.counted)),
        plain(read.formula.to_string()),
        plain(counted(written.counted)),
        plain(written.formula.to_string()),
        plain(mib(line.bytes)),
        plain(line.paper.to_string()),
        verdict,
    ]
}

fn totals(text: &mut String, report: &Report) {
    let _ = writeln!(text, "in all");
    let mut grid = Grid::new(
        &[
            "algorithm",
            "MiB\nread",
            "MiB\nwritten",
            "MiB\nmoved",
            "MiB by\npapers",
            "differ\nby",
            "memory\nµs",
            "products\nµs",
        ],
        1,
    );
    for traffic in &report.algorithms {
        let difference = traffic.bytes() as f64 / traffic.paper_bytes as f64 - 1.0;
        grid.row(&[
            plain(traffic.algorithm),
            plain(mib(traffic.bytes_read)),
            plain(mib(traffic.bytes_written)),
            plain(mib(traffic.bytes())),
            plain(mib(traffic.paper_bytes)),
            plain(if difference.is_finite() {
                format!("{:+.1}%", 100.0 * difference)
            } else {
                "-".into()
            }),
            plain(micro(traffic.traffic_ms)),
            plain(micro(traffic.product_ms)),
        ]);
    }
    text.push_str(&grid.render());
    for traffic in &report.algorithms {
        let _ = writeln!(
            text,
            "  {:9}papers: {}",
            traffic.algorithm, traffic.paper_term
        );
        let beyond = format!("{:11}beyond them: {} elements", "", left_out(traffic));
        text.push_str(&ui::wrap(&beyond, 13));
    }
    let size = report.algorithms[0]
        .tensors
        .first()
        .map_or(4, |l| l.element_bytes);
    let _ = writeln!(
        text,
        "  bound    N²d²/M = {:.3e} elements = {} MiB, up to a constant factor",
        report.lower_bound_elements,
        significant(Some(
            report.lower_bound_elements * size as f64 / f64::from(1 << 20)
        ))
    );
    for equal in &report.equal_tiles {
        let ratio = |a: u128, b: u128| 2.0 * a as f64 / (b as f64).max(1.0);
        let said = format!(
            "  both with tiles of {} × {}: fa1 : fa2 = {:.2} : 2 in elements, {:.2} : 2 in bytes",
            equal.rows,
            equal.keys,
            ratio(equal.fa1_elements, equal.fa2_elements),
            ratio(equal.fa1_bytes, equal.fa2_bytes)
        );
        text.push_str(&ui::wrap(&said, 4));
    }
    let [_, fa1, fa2] = &report.algorithms[..] else {
        return;
    };
    if (fa1.block_rows, fa1.block_keys) != (fa2.block_rows, fa2.block_keys) {
        let _ = writeln!(
            text,
            "  each with its own tiles: fa1 : fa2 = {:.2} : 2 in elements, {:.2} : 2 in bytes",
            2.0 * fa1.elements() as f64 / (fa2.elements() as f64).max(1.0),
            2.0 * fa1.bytes() as f64 / (fa2.bytes() as f64).max(1.0)
        );
    }

    let _ = writeln!(text, "\narithmetic");
    let backward = report.pass == Pass::Backward;
    let mut header = vec![
        "\n\nalgorithm",
        "\n\ntiles",
        "\ntiles\nskipped",
        "\nmultiply-\nadds",
        "\n\nexp",
    ];
    header.extend(match report.pass {
        Pass::Forward => &["\nrescale\nO", "\n\ndivide"][..],
        Pass::Backward => &["\n\ndivide", "\nelements\nof dS", "\nterms\nof Δ"],
    });
    header.push("others\na 1000\nmul-adds");
    let mut grid = Grid::new(&header, 1);
    for traffic in &report.algorithms {
        let work = traffic.work;
        let mut cells = vec![plain(traffic.algorithm)];
        let counts = [
            work.tiles,
            work.skipped_tiles,
            work.multiply_adds,
            work.exps,
        ];
        cells.extend(counts.map(|count| plain(count.to_string())));
        let others = [
            (!backward, work.rescales),
            (true, work.divisions),
            (backward, work.score_gradients),
            (backward, work.delta_terms),
        ];
        let shown = others.iter().filter(|(shown, _)| *shown);
        cells.extend(shown.map(|(_, count)| plain(count.to_string())));
        cells.push(plain(significant(Some(work.others_per_1000_multiply_adds))));
        grid.row(&cells);
    }
    text.push_str(&grid.render());
    for traffic in &report.algorithms {
        let a_tile = |x: u128| match x {
            0 => "0".into(),
            x => significant(Some(x as f64 / (traffic.work.tiles as f64).max(1.0))),
        };
        let work = traffic.work;
        let mut listed = format!(
            "{} multiply-adds, {} exp",
            a_tile(work.multiply_adds),
            a_tile(work.exps)
        );
        for (count, name) in [
            (work.rescales, "rescale"),
            (work.divisions, "divide"),
            (work.score_gradients, "dS"),
            (work.delta_terms, "Δ"),
        ] {
            // A kind of operation that the pass does not have is no news.
            let forward = ["rescale", "divide"].contains(&name);
            if count > 0 || forward != backward {
                let _ = write!(listed, ", {} {name}", a_tile(count));
            }
        }
        let said = format!(
            "  {:9}a tile on average: {} products, {listed}",
            traffic.algorithm, report.products_a_tile
        );
        text.push_str(&ui::wrap(&said, 11));
    }
    text.push('\n');
}

/// The tensors of which the papers' terms do not have everything.
fn left_out(traffic: &Traffic) -> String {
    let lines = traffic.tensors.iter().filter_map(|line| {
        let exact = line.read.formula + line.written.formula;
        let more = exact as f64 - line.paper as f64;
        (more != 0.0).then(|| format!("{} {more:+.1e}", line.tensor))
    });
    let said: Vec<String> = lines.collect();
    if said.is_empty() {
        "nothing".into()
    } else {
        said.join(", ")
    }
}

fn over_n(text: &mut String, report: &Report) {
    let timed = report.over_n.iter().any(|p| p.predicted_ms[0].is_some());
    let _ = writeln!(
        text,
        "over N (seqlen_q = seqlen_k): bytes moved, also on a logarithmic axis{}",
        if timed { "; time" } else { "" }
    );
    let header = [
        "N",
        "standard",
        "fa1",
        "fa2",
        "S standard, 1 fa1, 2 fa2",
        "standard",
        "fa1",
        "fa2",
    ];
    let shown = if timed { 8 } else { 5 };
    let mut grid = Grid::new(&header[..shown], 1);
    for (point, (n, strip)) in report.over_n.iter().zip(plot::strips(&report.over_n)) {
        let size = |bytes: u128| ui::bytes(u64::try_from(bytes).unwrap_or(u64::MAX));
        let mut cells = vec![plain(n)];
        cells.extend(point.bytes.map(|bytes| plain(size(bytes))));
        // Padded here, since columns after the first are set right.
        cells.push(plain(format!("|{strip:width$}|", width = plot::STRIP)));
        cells.extend(point.predicted_ms.map(|ms| plain(ui::time(ms))));
        cells.truncate(shown);
        grid.row(&cells);
    }
    text.push_str(&grid.render());
    text.push_str("  *: algorithms that fall on one place of the axis\n");
    if timed {
        let said = format!(
            "  time: the longer of the bytes at {} GB/s and the products at {} GFLOP/s{}",
            significant(report.fast_memory.bandwidth_gbps),
            significant(report.fast_memory.product_gflops),
            match products_decide(report) {
                true => "; here that is the products, which are the same for all",
                false => "",
            }
        );
        text.push_str(&ui::wrap(&said, 4));
    } else {
        let _ = writeln!(
            text,
            "  no time is predicted without a bandwidth (--bandwidth)"
        );
    }
    text.push('\n');
}

/// Whether the products take longer than the bytes of every algorithm, at every N.
fn products_decide(report: &Report) -> bool {
    let mut points = report.over_n.iter();
    points.all(|point| {
        point
            .predicted_ms
            .iter()
            .all(|&ms| ms == point.predicted_ms[0])
    })
}

fn comparison(text: &mut String, report: &Report) {
    let comparison = &report.comparison;
    let _ = writeln!(
        text,
        "fa1 and fa2{}",
        if comparison.from_a_run {
            ", figures counted from a run (· is a fact, not a figure)"
        } else {
            ", figures by formula: nothing was run"
        }
    );
    let mut grid = Grid::new(&["", "", "fa1", "fa2"], 4);
    for row in &comparison.rows {
        let mark = if row.countable { " " } else { "·" };
        grid.row(&[
            plain(mark),
            plain(row.what),
            plain(row.fa1.clone()),
            plain(row.fa2.clone()),
        ]);
    }
    text.push_str(&grid.render());
}

fn measured(text: &mut String, measured: &[Measured]) {
    if measured.is_empty() {
        return;
    }
    let _ = writeln!(text, "\nmeasured");
    let mut said = Vec::new();
    for one in measured {
        text.push_str(&one.text(&mut said));
    }
}
