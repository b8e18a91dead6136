//! A trace for a terminal of 80 columns.

use std::collections::BTreeMap;
use std::fmt::{Result, Write};

use super::attention::{AttentionTrace, Run, Traced};
use super::backward_text::results as backward_results;
use super::numbers::{Number, short};
use super::record::{Event, FinalRow, Moved, ScoreRow, StateRow, TileAt};
use crate::ui::{self, Grid, Tone, plain};

/// The trace with at most `steps` steps of each algorithm.
pub(super) fn render(trace: &AttentionTrace, steps: usize) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write(&mut text, trace, steps);
    text
}

fn write(out: &mut String, trace: &AttentionTrace, steps: usize) -> Result {
    let traced = &trace.traced;
    writeln!(out, "{}", trace.inputs.join(" "))?;
    writeln!(out, "{}", trace.problem.sizes())?;
    writeln!(out, "{}", trace.problem.options())?;
    writeln!(
        out,
        "traced: batch {}, head {}; tiles of {} rows x {} keys: {} x {} of them",
        traced.batch,
        traced.head,
        traced.block_q,
        traced.block_k,
        traced.row_blocks,
        traced.key_blocks
    )?;
    if let Some(sink) = traced.sink {
        writeln!(
            out,
            "sink {sink}: joins m and l of every row in the end, once"
        )?;
    }
    for note in &trace.notes {
        writeln!(out, "note: {note}")?;
    }
    let backward = trace.pass == "backward";
    if backward {
        writeln!(out, "backward: from dout to dq, dk and dv")?;
    }
    for run in &trace.runs {
        self::run(out, run, traced, steps, backward)?;
    }
    writeln!(out, "\nBytes between slow and fast memory, this head")?;
    out.push_str(&traffic(trace));
    writeln!(
        out,
        "\nArithmetic, and the difference to the naive definition"
    )?;
    if backward {
        out.push_str(&backward_results(trace));
        return Ok(());
    }
    out.push_str(&results(trace));
    for run in &trace.runs {
        if let Some(naive) = run.naive.filter(|naive| naive.rows_checked < naive.rows) {
            writeln!(
                out,
                "{}: {} of {} rows compared",
                run.algorithm, naive.rows_checked, naive.rows
            )?;
        }
    }
    Ok(())
}

/// What the algorithm does, in two lines.
fn idea(algorithm: &str) -> [&'static str; 2] {
    match algorithm {
        "standard" => [
            "standard attention: S = q k^T is stored, loaded for P = softmax(S), P is",
            "stored, loaded for O = P v",
        ],
        "fa1" => [
            "fa1 (FlashAttention): keys outside (j), rows inside (i); O is normalised and",
            "travels at every step: l' = alpha l + beta l~, O' = (alpha l O + beta P~ v)/l'",
        ],
        _ => [
            "fa2 (FlashAttention-2): rows outside (i), keys inside (j); O~ stays on chip:",
            "l' = alpha l + rowsum P, O~' = alpha O~ + P v; in the end O = O~/l, L = m + ln l",
        ],
    }
}

/// Likewise backward.
fn backward_idea(algorithm: &str) -> [&'static str; 2] {
    match algorithm {
        "standard" => [
            "standard attention: S, P again; dV = P^T dO, dP = dO V^T, dS = P (dP - delta),",
            "dQ = scale dS K, dK = scale dS^T Q, one after another: P, dP, dS are stored",
        ],
        "fa1" => [
            "fa1: keys outside (j), rows inside (i); P = e^(S - m)/l again in every tile, and",
            "delta = rowsum(dO * O) too: O is loaded with dO; dQ travels, dK and dV stay",
        ],
        _ => [
            "fa2: delta = rowsum(dO * O) once; then keys outside (j), rows inside (i):",
            "P = e^(S - L) again, dP = dO V^T, dS = P (dP - delta); dQ travels, dK, dV stay",
        ],
    }
}

fn run(out: &mut String, run: &Run, traced: &Traced, steps: usize, backward: bool) -> Result {
    let idea = if backward {
        backward_idea(run.algorithm)
    } else {
        idea(run.algorithm)
    };
    writeln!(out, "\n{}\n{}", idea[0], idea[1])?;
    if let Some(reason) = &run.skipped {
        return writeln!(out, "skipped: {reason}");
    }
    let groups = groups(&run.events);
    let (mut loaded, mut stored) = (0, 0);
    // The last state of every row shown: what a finish divides.
    let mut last = BTreeMap::new();
    for (n, group) in groups.iter().enumerate() {
        loaded += group.loads.iter().map(|moved| moved.bytes).sum::<usize>();
        stored += group.stores.iter().map(|moved| moved.bytes).sum::<usize>();
        for row in group.state {
            last.insert(row.row, row);
        }
        if n < steps {
            self::group(out, run.algorithm, group, traced, &last)?;
            writeln!(
                out,
                "    so far: loaded {}, stored {}",
                size(loaded),
                size(stored)
            )?;
        }
    }
    if groups.len() > steps {
        writeln!(
            out,
            "  ... {} more steps are not shown (--steps all)",
            groups.len() - steps
        )?;
    }
    if run.events_left_out > 0 {
        writeln!(
            out,
            "  {} more events were counted and not recorded: larger tiles make fewer",
            run.events_left_out
        )?;
    }
    Ok(())
}

/// Loads, what was done with them, and the stores that followed.
#[derive(Default)]
struct Group<'a> {
    loads: Vec<&'a Moved>,
    stores: Vec<&'a Moved>,
    skip: Option<TileAt>,
    scores: Option<(TileAt, &'a [ScoreRow])>,
    weights: Option<&'a Event>,
    tile: Option<TileAt>,
    state: &'a [StateRow],
    finish: Option<(usize, [usize; 2], &'a [FinalRow])>,
    backward: super::backward_text::Part<'a>,
}

impl Group<'_> {
    /// Whether what comes next is of another group.
    fn is_closed(&self) -> bool {
        self.skip.is_some()
            || self.tile.is_some()
            || self.finish.is_some()
            || self.backward.is_closed()
            || !self.stores.is_empty()
    }
}

fn groups(events: &[Event]) -> Vec<Group<'_>> {
    let mut groups = Vec::new();
    let mut group = Group::default();
    for event in events {
        let opens = match event {
            Event::Load(_) | Event::Skip(_) => group.is_closed() || group.scores.is_some(),
            Event::Finish { .. } => group.is_closed(),
            Event::GradientFinish { .. } => {
                group.is_closed() && !group.backward.joins(event, &group.stores)
            }
            _ => false,
        };
        if opens {
            groups.push(std::mem::take(&mut group));
        }
        match event {
            Event::Load(moved) => group.loads.push(moved),
            Event::Store(moved) => group.stores.push(moved),
            Event::Skip(tile) => group.skip = Some(*tile),
            Event::Scores { tile, rows_shown } => group.scores = Some((*tile, rows_shown)),
            Event::Weights { .. } => group.weights = Some(event),
            Event::Step { tile, rows_shown } => {
                group.tile = Some(*tile);
                group.state = rows_shown;
            }
            Event::Finish {
                row_block,
                rows,
                rows_shown,
            } => group.finish = Some((*row_block, *rows, rows_shown)),
            Event::Operations { .. } => {}
            Event::Product { .. }
            | Event::Delta { .. }
            | Event::GradientRow { .. }
            | Event::BackwardStep { .. }
            | Event::GradientFinish { .. } => group.backward.take(event),
        }
    }
    if group.is_closed() || !group.loads.is_empty() {
        groups.push(group);
    }
    groups
}

fn group(
    out: &mut String,
    algorithm: &str,
    group: &Group<'_>,
    traced: &Traced,
    last: &BTreeMap<usize, &StateRow>,
) -> Result {
    let keys_outside = algorithm == "fa1";
    if group.backward.speaks() {
        group.backward.title(out)?;
        moves(out, "load", &group.loads)?;
        group.backward.numbers(out, traced.seqlen_k)?;
        return moves(out, "store", &group.stores);
    }
    if let Some(tile) = group.skip {
        writeln!(
            out,
            "\n  {}: no live key, skipped",
            name(tile, keys_outside)
        )?;
    } else if let Some(tile) = group.tile.or(group.scores.map(|(tile, _)| tile)) {
        let edge = if tile.live == "some" {
            ", partly hidden"
        } else {
            ""
        };
        writeln!(out, "\n  {}{edge}", name(tile, keys_outside))?;
    } else if let Some(Event::Weights { row, m, l, .. }) = group.weights {
        writeln!(
            out,
            "\n  row {row} of S: m = {}, l = {}",
            short(m.to_f64()).trim(),
            short(l.to_f64()).trim()
        )?;
    } else if let Some((i, rows, _)) = group.finish {
        writeln!(out, "\n  i={i} (rows {}..{}) done", rows[0], rows[1])?;
    } else if group.loads.is_empty() {
        let zeros = match group.stores.first() {
            Some(moved) if moved.tensor == "dQ" => "dQ = 0 for every row, in slow memory",
            _ => "O = 0, l = 0, m = -inf for every row, in slow memory",
        };
        writeln!(out, "\n  {zeros}")?;
    }
    moves(out, "load", &group.loads)?;
    if let Some((_, rows)) = group.scores {
        for row in rows {
            numbers(out, &format!("S row {}", row.row), &row.s, 0)?;
        }
    }
    if let Some(Event::Weights { p, .. }) = group.weights
        && !p.is_empty()
    {
        numbers(out, "P", p, traced.seqlen_k)?;
    }
    state(out, group.state, keys_outside)?;
    if let Some((_, _, rows)) = group.finish {
        finish(out, algorithm, rows, last)?;
    }
    moves(out, "store", &group.stores)
}

pub(super) fn name(tile: TileAt, keys_outside: bool) -> String {
    let ([rows, rows_end], [keys, keys_end]) = (tile.rows, tile.keys);
    let (i, j) = (tile.row_block, tile.key_block);
    if keys_outside {
        format!("j={j} (keys {keys}..{keys_end}), i={i} (rows {rows}..{rows_end})")
    } else {
        format!("i={i} (rows {rows}..{rows_end}), j={j} (keys {keys}..{keys_end})")
    }
}

pub(super) fn size(bytes: usize) -> String {
    if bytes < 100_000 {
        format!("{bytes} B")
    } else {
        ui::bytes(bytes as u64)
    }
}

/// What is moved, transfers of one tensor together.
fn moves(out: &mut String, verb: &str, moved: &[&Moved]) -> Result {
    if moved.is_empty() {
        return Ok(());
    }
    let mut sums: Vec<(&str, usize)> = Vec::new();
    for moved in moved {
        match sums.iter_mut().find(|(tensor, _)| *tensor == moved.tensor) {
            Some((_, bytes)) => *bytes += moved.bytes,
            None => sums.push((moved.tensor, moved.bytes)),
        }
    }
    let list: Vec<String> = sums
        .into_iter()
        .map(|(tensor, bytes)| format!("{tensor} {}", size(bytes)))
        .collect();
    let mut line = format!("    {verb:<5} ");
    for (n, moved) in list.iter().enumerate() {
        let more = if n + 1 < list.len() { ", " } else { "" };
        if line.chars().count() + moved.chars().count() + more.trim().len() > 80 {
            writeln!(out, "{}", line.trim_end())?;
            line = " ".repeat(10);
        }
        write!(line, "{moved}{more}")?;
    }
    writeln!(out, "{line}")
}

/// A named row of numbers; `of` is how many there are, where that is known.
pub(super) fn numbers(out: &mut String, name: &str, values: &[Number], of: usize) -> Result {
    let listed: String = (values.iter())
        .map(|x| format!(" {}", short(x.to_f64())))
        .take(7)
        .collect();
    let rest = if values.len() > 7 || of > values.len() {
        " .."
    } else {
        ""
    };
    writeln!(out, "    {name:<10}{listed}{rest}")
}

/// The running state of the rows shown.
fn state(out: &mut String, rows: &[StateRow], fa1: bool) -> Result {
    let Some(first) = rows.first() else {
        return Ok(());
    };
    let columns = if fa1 { 2 } else { 4 };
    let more = if first.o.len() > columns { " .." } else { "" };
    if fa1 {
        writeln!(
            out,
            "  {:>4} {:>8} {:>8} {:>6} {:>6} {:>8} {:>8} |  O, normalised",
            "row", "m~", "l~", "alpha", "beta", "m", "l"
        )?;
    } else {
        writeln!(
            out,
            "  {:>4} {:>6} {:>8} {:>8} |  O~, not normalised",
            "row", "alpha", "m", "l"
        )?;
    }
    for row in rows {
        write!(out, "  {:>4}", row.row)?;
        if let Some(block) = row.block {
            write!(out, " {} {}", wide(block.m_block), wide(block.l_block))?;
        }
        write!(out, " {}", narrow(row.alpha))?;
        if let Some(block) = row.block {
            write!(out, " {}", narrow(block.beta))?;
        }
        write!(out, " {} {} |", wide(row.m), wide(row.l))?;
        for x in row.o.iter().take(columns) {
            write!(out, " {}", wide(*x))?;
        }
        writeln!(out, "{more}")?;
    }
    Ok(())
}

fn wide(x: Number) -> String {
    short(x.to_f64())
}

/// A factor, which is between 0 and 1: six columns.
fn narrow(x: Number) -> String {
    let text = short(x.to_f64());
    match text.trim_start() {
        text if text.len() > 6 => format!("{:6.0e}", x.to_f64()),
        text => format!("{text:>6}"),
    }
}

fn finish(
    out: &mut String,
    algorithm: &str,
    rows: &[FinalRow],
    last: &BTreeMap<usize, &StateRow>,
) -> Result {
    let Some(first) = rows.first() else {
        return Ok(());
    };
    let more = if first.out.len() > 2 { " .." } else { "" };
    let width = 17 + more.len();
    let division = algorithm == "fa2";
    if division {
        writeln!(
            out,
            "  {:>4} {:<width$} / {:>8} = {:<width$} {:>8}",
            "row", "      O~", "l", "      O", "L"
        )?;
    } else {
        writeln!(out, "  {:>4} {:<width$} {:>8}", "row", "      O", "L")?;
    }
    for row in rows {
        let pair = |values: &[Number]| {
            let pair: Vec<String> = values.iter().take(2).map(|&x| wide(x)).collect();
            format!("{:<17}{more}", pair.join(" "))
        };
        write!(out, "  {:>4} ", row.row)?;
        if division {
            match last.get(&row.row) {
                Some(state) => write!(out, "{} / {} = ", pair(&state.o), wide(state.l))?,
                None => write!(out, "{:<width$} / {:>8} = ", "  no live key", "0")?,
            }
        }
        writeln!(out, "{} {}", pair(&row.out), wide(row.lse))?;
    }
    Ok(())
}

/// Bytes by tensor, an algorithm's loads beside its stores.
fn traffic(trace: &AttentionTrace) -> String {
    let runs: Vec<&Run> = (trace.runs.iter())
        .filter(|run| run.skipped.is_none())
        .collect();
    let mut header = vec!["tensor".to_string()];
    for run in &runs {
        header.push(format!("{} in", run.algorithm));
        header.push("out".into());
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut grid = Grid::new(&header, 1);
    for tensor in tilewise::core::observe::Tensor::ALL {
        let traffic: Vec<_> = (runs.iter())
            .map(|run| run.totals.tensors.get(tensor.name()).copied())
            .collect();
        if traffic.iter().all(Option::is_none) {
            continue;
        }
        let mut cells = vec![plain(tensor.name())];
        for traffic in traffic {
            let traffic = traffic.unwrap_or_default();
            for bytes in [traffic.loaded_bytes, traffic.stored_bytes] {
                cells.push(plain(if bytes == 0 { "-".into() } else { size(bytes) }));
            }
        }
        grid.row(&cells);
    }
    let mut cells = vec![plain("all")];
    for run in &runs {
        cells.push(plain(size(run.totals.loaded_bytes)));
        cells.push(plain(size(run.totals.stored_bytes)));
    }
    grid.row(&cells);
    grid.render()
}

/// A count in at most seven columns.
pub(super) fn count(n: usize) -> String {
    if n < 10_000_000 {
        n.to_string()
    } else {
        format!("{:.2e}", n as f64)
    }
}

/// One row an algorithm.
fn results(trace: &AttentionTrace) -> String {
    let header = [
        "algorithm",
        "multiply-adds",
        "exp",
        "rescale",
        "divide",
        "max abs err",
        "L err",
        "bound",
        "",
    ];
    let mut grid = Grid::new(&header, 1);
    for run in &trace.runs {
        let Some(naive) = run.naive else {
            continue;
        };
        let totals = &run.totals;
        grid.row(&[
            plain(run.algorithm),
            plain(totals.multiply_adds.to_string()),
            plain(count(totals.exponentials)),
            plain(count(totals.rescales)),
            plain(count(totals.divisions)),
            plain(ui::scientific(Some(naive.max_abs_err.to_f64()))),
            plain(ui::scientific(naive.lse_max_abs_err.map(Number::to_f64))),
            plain(ui::scientific(Some(naive.tolerance.to_f64()))),
            if naive.pass {
                ("pass".into(), Tone::Good)
            } else {
                ("FAIL".into(), Tone::Bad)
            },
        ]);
    }
    grid.render()
}
