//! The page: everything in one file, no scripts, nothing from elsewhere.

use std::fmt::Write;

use anyhow::Result;
use serde_json::Value;
use tilewise::DType;

use super::correctness::{Cell, Grid};
use super::figures::{Timed, Traffic};
use super::memory::Memory;
use crate::chart::{self, Chart};
use crate::isa;
use crate::ui::{self, significant};

const STYLE: &str = include_str!("page.css");

/// What the page is made of.
pub(super) struct Content<'a> {
    pub(super) note: Option<&'a str>,
    pub(super) grid: &'a Grid,
    pub(super) speed: &'a Timed,
    pub(super) memory: &'a Memory,
    pub(super) heads: &'a Timed,
    pub(super) traffic: &'a Traffic,
    pub(super) threads: usize,
    pub(super) dtype: DType,
}

// Writing to a String cannot fail: results of write! are dropped throughout.

pub(super) fn render(content: &Content<'_>) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>tilewise report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    head(&mut page, content);
    correctness(&mut page, content.grid);
    speed(&mut page, content)?;
    memory(&mut page, content.memory)?;
    heads(&mut page, content)?;
    traffic(&mut page, content.traffic)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn head(page: &mut String, content: &Content<'_>) {
    page.push_str("<h1>Attention on this machine: backends compared</h1>\n");
    let _ = writeln!(
        page,
        "<p class=\"faint\">tilewise {}, {} {}, {} threads, made by <code>tilewise report</code>{}</p>",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
        content.threads,
        if cfg!(debug_assertions) {
            ". <strong class=\"bad\">This is a debug build: times say nothing.</strong>"
        } else {
            ""
        }
    );
    if let Some(note) = content.note {
        let _ = writeln!(page, "<p>{}</p>", escape(note));
    }
    page.push_str("<h2>Backends</h2>\n");
    for backend in tilewise::backends() {
        match backend.status {
            Ok(info) => {
                let _ = writeln!(
                    page,
                    "<p><strong>{}</strong> <span class=\"good\">available</span>: {}</p>\n<dl>",
                    backend.kind,
                    escape(&info.device)
                );
                for (name, value) in &info.details {
                    let _ = writeln!(page, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
                }
                page.push_str("</dl>\n");
            }
            Err(reason) => {
                let _ = writeln!(
                    page,
                    "<p><strong>{}</strong> not available: {}</p>",
                    backend.kind,
                    escape(&reason)
                );
            }
        }
    }
    let _ = writeln!(
        page,
        "<p class=\"faint\">Instruction sets here: {}.</p>",
        isa::available().join(", ")
    );
}

/// A table of figures, which may be wider than the page: header, then rows of cells that are HTML already.
fn table(page: &mut String, header: &[String], rows: &[Vec<String>]) {
    table_in("wide", page, header, rows);
}

fn table_in(class: &str, page: &mut String, header: &[String], rows: &[Vec<String>]) {
    let _ = write!(page, "<div class=\"{class}\"><table><thead><tr>");
    for cell in header {
        let _ = write!(page, "<th>{}</th>", escape(cell));
    }
    page.push_str("</tr></thead><tbody>\n");
    for row in rows {
        page.push_str("<tr>");
        for cell in row {
            let _ = write!(page, "<td>{cell}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

fn charts(page: &mut String, charts: &[Chart]) -> Result<()> {
    page.push_str("<div class=\"charts\">\n");
    for one in charts {
        page.push_str(&chart::svg(one)?);
    }
    page.push_str("</div>\n");
    Ok(())
}

fn made_by(page: &mut String, command: &str) {
    let _ = writeln!(
        page,
        "<p class=\"faint\">Made anew by <code>{}</code></p>",
        escape(command)
    );
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_string()).collect()
}

fn correctness(page: &mut String, grid: &Grid) {
    page.push_str(
        "<h2>Correctness</h2>\n<p>Every row of every problem against the naive definition in f64 with \
         compensated sums. A cell is the largest error of out and lse as a share of what it may be: twice \
         the error of the naive algorithm run in the same type, one rounding, and an accumulation \
         term. Above 1 is a failure.</p>\n",
    );
    let mut skipped: Vec<String> = Vec::new();
    // A lane that ran nothing has no column: its reason is said below.
    let ran: Vec<usize> = (0..grid.lanes.len())
        .filter(|&at| {
            let mut cells = grid.rows.iter().map(|row| &row.cells[at]);
            cells.any(|cell| !matches!(cell, Cell::Skipped(_)))
        })
        .collect();
    let mut header = words(&["problem", "type"]);
    header.extend(ran.iter().map(|&at| grid.lanes[at].clone()));
    // Last, where a phone cuts the table off: what was found comes first.
    header.push("sizes".into());
    let mut rows = Vec::new();
    for row in &grid.rows {
        let mut cells = vec![escape(row.name), row.dtype.to_string()];
        for (at, cell) in row.cells.iter().enumerate() {
            let said = match cell {
                Cell::Judged { share, pass: true } => {
                    format!("<span class=\"good\">{}</span>", significant(Some(*share)))
                }
                Cell::Judged { share, pass: false } => {
                    format!(
                        "<span class=\"bad\">{} FAIL</span>",
                        significant(Some(*share))
                    )
                }
                Cell::Failed(reason) => {
                    skipped.push(reason.clone());
                    "<span class=\"bad\">FAIL</span>".into()
                }
                Cell::Skipped(reason) => {
                    skipped.push(reason.clone());
                    "-".into()
                }
            };
            if ran.contains(&at) {
                cells.push(said);
            }
        }
        cells.push(escape(&row.problem));
        rows.push(cells);
    }
    if ran.is_empty() {
        page.push_str("<p class=\"bad\">Nothing ran.</p>\n");
    } else {
        table(page, &header, &rows);
    }
    skipped.sort();
    skipped.dedup();
    for line in skipped {
        let _ = writeln!(page, "<p class=\"faint\">{}</p>", escape(&line));
    }
}

fn number(value: &Value) -> String {
    significant(value.as_f64())
}

fn text(value: &Value) -> String {
    escape(value.as_str().unwrap_or("-"))
}

/// The axis of the shape that a table of timings runs over: its heading, and its name in the results.
#[derive(Clone, Copy)]
struct Axis(&'static str, &'static str);

/// Rows of timings; what they have in common is said above them, and below what did not run.
fn timings(page: &mut String, timed: &Timed, axis: Axis, ceilings: bool) {
    let ran = || {
        let rows = timed.results.iter();
        rows.filter(|row| row["median_ms"].is_number())
    };
    let one = |name: &str| {
        let mut values: Vec<String> = ran().map(|row| text(&row[name])).collect();
        values.dedup();
        (values.len() == 1).then(|| values.remove(0))
    };
    // A column of the same word would push the figures off a narrow page.
    let shared = [("backend", one("backend")), ("isa", one("isa"))];
    let mut header = words(&[axis.0]);
    header.extend(
        shared
            .iter()
            .filter(|(_, one)| one.is_none())
            .map(|(name, _)| (*name).to_string()),
    );
    header.extend(words(&["algorithm", "median ms", "GFLOP/s"]));
    if ceilings {
        header.extend(words(&["of ceiling", "bound"]));
    }
    header.extend(words(&["spread"]));
    let percent = |value: &Value| {
        let share = value.as_f64();
        share.map_or("-".into(), |share| format!("{:.0}%", 100.0 * share))
    };
    let mut rows = Vec::new();
    for row in ran() {
        let mut cells = vec![row["shape"][axis.1].to_string()];
        let own = shared.iter().filter(|(_, one)| one.is_none());
        cells.extend(own.map(|(name, _)| text(&row[*name])));
        cells.extend([
            text(&row["algorithm"]),
            number(&row["median_ms"]),
            number(&row["gflops"]),
        ]);
        if ceilings {
            cells.extend([percent(&row["ceiling_share"]), text(&row["ceiling"])]);
        }
        cells.push(percent(&row["spread"]));
        rows.push(cells);
    }
    let said = shared.into_iter().filter_map(|(_, one)| one);
    // A GPU has no instruction set to choose.
    let said: Vec<String> = said.filter(|word| word != "-").collect();
    if !said.is_empty() {
        let _ = writeln!(page, "<p class=\"faint\">All on {}.</p>", said.join(", "));
    }
    table(page, &header, &rows);
    if let Some(doubt) = doubt(&timed.results) {
        let _ = writeln!(page, "<p>{doubt}</p>");
    }
    for line in not_timed(&timed.results) {
        let _ = writeln!(page, "<p class=\"faint\">{}</p>", escape(&line));
    }
    made_by(page, &timed.command);
}

/// What did not run, and why: of a backend that is not here once, of too little memory for each shape.
fn not_timed(results: &[Value]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for row in results.iter().filter(|row| !row["median_ms"].is_number()) {
        let word = |value: &Value| value.as_str().unwrap_or("-").to_string();
        let Some(reason) = row["reason"].as_str() else {
            continue;
        };
        let (backend, algorithm) = (word(&row["backend"]), word(&row["algorithm"]));
        let line = if reason.contains("memory") {
            let shape = word(&row["shape"]["text"]);
            format!("{shape} {backend} {algorithm}: {reason}")
        } else {
            format!("{backend}: {reason}")
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// What the timings themselves say against being believed.
fn doubt(results: &[Value]) -> Option<String> {
    let most = |name: &str| {
        let values = results.iter().filter_map(|row| row[name].as_f64());
        values.fold(0.0, f64::max)
    };
    let (share, spread) = (most("ceiling_share"), most("spread"));
    if share > 1.05 {
        Some(format!(
            "Some calls took less time than the ceiling allows ({:.0}%), which cannot be: the machine's pace \
             changed between the two measurements. It was not quiet, and these figures are rough.",
            100.0 * share
        ))
    } else if spread > 0.2 {
        Some(format!(
            "Spreads of up to {:.0}% say that the machine was not quiet: these figures are rough.",
            100.0 * spread
        ))
    } else {
        None
    }
}

fn speed(page: &mut String, content: &Content<'_>) -> Result<()> {
    let _ = writeln!(
        page,
        "<h2>Speed over N</h2>\n<p>Forward in {}, seqlen_q = seqlen_k = N. The dashed line is the roof, measured \
         between the timings: products from registers alone, or the reading of K and V, whichever is slower; \
         “bound” says which. On a GPU the products are those of the matrix instruction that the algorithm \
         uses, and its bound names it. Spread is the distance between the quartiles over the median. Where a \
         backend has no dashed line, its ceiling was not measured.</p>",
        content.dtype
    );
    charts(page, &content.speed.charts)?;
    timings(page, content.speed, Axis("N", "sq"), true);
    rates(page, &content.speed.ceilings);
    Ok(())
}

/// What devices could do at most, by name.
fn rates(page: &mut String, ceilings: &[Value]) {
    if ceilings.is_empty() {
        return;
    }
    page.push_str(
        "<p>What was measured as the most that a device does, a multiply and an add counted as two. f32 is \
         made of three products of f16 or tf32 each, at a third of their rate.</p>\n",
    );
    let rows: Vec<Vec<String>> = ceilings
        .iter()
        .map(|one| {
            let rate = match (one["gflops"].as_f64(), one["gbps"].as_f64()) {
                (Some(gflops), _) => format!("{} TFLOP/s", significant(Some(gflops / 1e3))),
                (_, Some(gbps)) => format!("{} GB/s", significant(Some(gbps))),
                _ => format!("not measured: {}", text(&one["reason"])),
            };
            vec![text(&one["name"]), text(&one["backend"]), rate]
        })
        .collect();
    table(page, &words(&["ceiling", "backend", "rate"]), &rows);
}

fn memory(page: &mut String, memory: &Memory) -> Result<()> {
    let _ = writeln!(
        page,
        "<h2>Memory over N</h2>\n<p>What a call takes besides inputs and outputs ({}): standard attention \
         grows with N², FlashAttention with N or not at all. On the CPU it is the highest use of the heap during \
         the call; on a GPU, what the backend says it allocates.</p>",
        escape(&memory.problem)
    );
    charts(page, &memory.charts)?;
    let mut header = words(&["N"]);
    header.extend(memory.lanes.iter().cloned());
    let rows: Vec<Vec<String>> = memory
        .rows
        .iter()
        .map(|(n, bytes)| {
            let cell = |bytes: &Option<u64>| bytes.map_or("-".into(), ui::bytes);
            [n.to_string()]
                .into_iter()
                .chain(bytes.iter().map(cell))
                .collect()
        })
        .collect();
    table(page, &header, &rows);
    Ok(())
}

fn heads(page: &mut String, content: &Content<'_>) -> Result<()> {
    page.push_str(
        "<h2>FA1, FA2 and standard: few heads and many</h2>\n<p>FA1's loop over keys is outermost, and its rows \
         wait for each other's keys: a head is its unit of parallel work, so with fewer heads than cores or \
         multiprocessors some stand idle. FA2 cuts each head into blocks of rows, which are independent.</p>\n",
    );
    charts(page, &content.heads.charts)?;
    timings(page, content.heads, Axis("heads", "hq"), false);
    Ok(())
}

fn traffic(page: &mut String, traffic: &Traffic) -> Result<()> {
    let report = &traffic.report;
    let memory = &report["fast_memory"];
    let _ = writeln!(
        page,
        "<h2>Bytes between slow and fast memory</h2>\n<p>What the algorithms as the papers write them load and \
         store, in tiles for {} of {}: counted from a run, and by formula; the two must agree.</p>",
        ui::bytes(memory["bytes"].as_u64().unwrap_or(0)),
        text(&memory["what"])
    );
    let header = words(&[
        "algorithm",
        "tile",
        "MiB read",
        "MiB written",
        "papers' terms",
        "exp",
        "rescale O",
        "divide",
        "others a 1000 mul-adds",
        "counted",
    ]);
    let mib = |value: &Value| significant(value.as_f64().map(|bytes| bytes / f64::from(1 << 20)));
    let rows: Vec<Vec<String>> = report["algorithms"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| {
            vec![
                text(&one["algorithm"]),
                format!("{} × {}", one["block_rows"], one["block_keys"]),
                mib(&one["bytes_read"]),
                mib(&one["bytes_written"]),
                mib(&one["paper_bytes"]),
                one["work"]["exps"].to_string(),
                one["work"]["rescales"].to_string(),
                one["work"]["divisions"].to_string(),
                number(&one["work"]["others_per_1000_multiply_adds"]),
                match one["agrees"].as_bool() {
                    Some(true) => "<span class=\"good\">= formula</span>".into(),
                    Some(false) => "<span class=\"bad\">DIFFERS</span>".into(),
                    None => "not counted".into(),
                },
            ]
        })
        .collect();
    table(page, &header, &rows);
    charts(page, &traffic.charts)?;
    let rows: Vec<Vec<String>> = report["comparison"]["rows"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| vec![text(&row["what"]), text(&row["fa1"]), text(&row["fa2"])])
        .collect();
    table_in("wide words", page, &words(&["", "fa1", "fa2"]), &rows);
    made_by(page, &traffic.command);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn timings_that_cannot_be_right_are_said_to_be_rough() {
        let row = |share: f64, spread: f64| json!({"ceiling_share": share, "spread": spread});
        assert_eq!(
            doubt(&[row(0.9, 0.1), json!({"ceiling_share": null})]),
            None
        );
        assert!(
            doubt(&[row(0.9, 0.1), row(1.5, 0.0)])
                .unwrap()
                .contains("150%")
        );
        assert!(doubt(&[row(0.9, 0.4)]).unwrap().contains("40%"));
    }

    #[test]
    fn ceilings_of_a_device_are_named_with_their_units() {
        let mut page = String::new();
        rates(&mut page, &[]);
        assert!(page.is_empty());
        let one = |name: &str, gflops: Option<f64>, gbps: Option<f64>, reason: Option<&str>| json!({"backend": "cuda:0", "name": name, "gflops": gflops, "gbps": gbps, "reason": reason});
        let measured = [
            one("mma.sync bf16", Some(636e3), None, None),
            one("device memory, read", None, Some(4340.0), None),
            one("FFMA f32", None, None, Some("no <compiler>")),
        ];
        rates(&mut page, &measured);
        for part in [
            "<td>mma.sync bf16</td><td>cuda:0</td><td>636 TFLOP/s</td>",
            "<td>4340 GB/s</td>",
            "not measured: no &lt;compiler&gt;",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(escape("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
    }
}
