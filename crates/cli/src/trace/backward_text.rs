//! The events of a backward pass for a terminal of 80 columns.

use std::fmt::{Result, Write};

use super::attention::AttentionTrace;
use super::numbers::{Number, short};
use super::record::{Event, Moved, TileAt};
use super::text::{count, name, numbers};
use crate::ui::{self, Grid, Tone, plain};

/// What of a group of events only a backward pass has.
#[derive(Default)]
pub(super) struct Part<'a> {
    /// The products of a tile that gave no scores: what they are of, and where.
    product: Option<(&'static str, usize, usize)>,
    /// The tile, Δ of some rows, or a row of dS.
    event: Option<&'a Event>,
    /// What was finished: dq, or dk and dv.
    finished: Vec<&'a Event>,
}

impl<'a> Part<'a> {
    pub(super) fn take(&mut self, event: &'a Event) {
        match event {
            // Forward, the products of a tile are told by what becomes of its rows.
            Event::Product {
                result,
                row_block,
                key_block,
                ..
            } => {
                if ["dv", "dP", "dq", "dk"].contains(result) {
                    self.product = Some((result, *row_block, *key_block));
                }
            }
            Event::GradientFinish { .. } => self.finished.push(event),
            _ => self.event = Some(event),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.event.is_some() || !self.finished.is_empty()
    }

    /// Whether what is finished belongs to this group: dv follows dk, and products without scores
    /// end in what they give.
    pub(super) fn joins(&self, event: &Event, stores: &[&Moved]) -> bool {
        let tensor = |event: &Event| match event {
            Event::GradientFinish { tensor, .. } => *tensor,
            _ => "",
        };
        let after_dk = self.finished.len() == 1 && tensor(self.finished[0]) == "dk";
        let gave = self.event.is_none() && self.finished.is_empty() && stores.is_empty();
        (after_dk && tensor(event) == "dv") || gave
    }

    pub(super) fn speaks(&self) -> bool {
        self.product.is_some() || self.is_closed()
    }

    pub(super) fn title(&self, out: &mut String) -> Result {
        match (self.event, self.finished.first()) {
            (Some(Event::BackwardStep { tile, .. }), _) => {
                let edge = if tile.live == "some" {
                    ", partly hidden"
                } else {
                    ""
                };
                writeln!(out, "\n  {}{edge}", name(*tile, true))
            }
            (
                Some(Event::Delta {
                    row_block, rows, ..
                }),
                _,
            ) => {
                let [start, end] = rows;
                writeln!(
                    out,
                    "\n  i={row_block} (rows {start}..{end}): delta = rowsum(dO * O)"
                )
            }
            (Some(Event::GradientRow { row, delta, .. }), _) => writeln!(
                out,
                "\n  row {row}: delta = rowsum(P * dP) = {}, dS = P (dP - delta)",
                short(delta.to_f64()).trim()
            ),
            (
                _,
                Some(Event::GradientFinish {
                    tensor,
                    block,
                    rows,
                    ..
                }),
            ) => {
                let [start, end] = rows;
                match *tensor {
                    "dq" => writeln!(out, "\n  i={block} (rows {start}..{end}) done: dq"),
                    "dk" if self.finished.len() == 2 => {
                        writeln!(out, "\n  j={block} (keys {start}..{end}) done: dk and dv")
                    }
                    other => writeln!(out, "\n  j={block} (keys {start}..{end}) done: {other}"),
                }
            }
            _ => match self.product {
                Some((result, i, j)) => writeln!(out, "\n  i={i}, j={j}: {result}"),
                None => Ok(()),
            },
        }
    }

    pub(super) fn numbers(&self, out: &mut String, keys: usize) -> Result {
        match self.event {
            Some(Event::Delta { rows_shown, .. }) => {
                let deltas: Vec<Number> = rows_shown.iter().map(|row| row.delta).collect();
                numbers(out, "delta", &deltas, 0)?;
            }
            Some(Event::GradientRow { ds, .. }) if !ds.is_empty() => {
                numbers(out, "dS", ds, keys)?;
            }
            Some(Event::BackwardStep {
                tile,
                rows_shown,
                keys_shown,
            }) => {
                let width = width(tile);
                for row in rows_shown {
                    let at = |name: &str| format!("{name} row {}", row.row);
                    let from = match (row.pair, row.lse) {
                        (Some(pair), _) => {
                            format!("m {}, l {}", wide(pair.m), wide(pair.l))
                        }
                        (None, lse) => format!("L {}", lse.map_or(String::new(), wide)),
                    };
                    writeln!(
                        out,
                        "    row {}: {from}, delta {}",
                        row.row,
                        wide(row.delta)
                    )?;
                    numbers(out, &at("S"), &row.s, width)?;
                    numbers(out, &at("P"), &row.p, width)?;
                    numbers(out, &at("dP"), &row.dp, width)?;
                    numbers(out, &at("dS"), &row.ds, width)?;
                    numbers(out, &at("dQ"), &row.dq, 0)?;
                }
                for key in keys_shown {
                    numbers(out, &format!("dK key {}", key.key), &key.dk, 0)?;
                    numbers(out, &format!("dV key {}", key.key), &key.dv, 0)?;
                }
            }
            _ => {}
        }
        for event in &self.finished {
            if let Event::GradientFinish {
                tensor, rows_shown, ..
            } = event
            {
                let what = if *tensor == "dq" { "row" } else { "key" };
                for line in rows_shown {
                    let name = format!("{tensor} {what} {}", line.row);
                    numbers(out, &name, &line.values, 0)?;
                }
            }
        }
        Ok(())
    }
}

fn width(tile: &TileAt) -> usize {
    tile.keys[1] - tile.keys[0]
}

fn wide(x: Number) -> String {
    short(x.to_f64()).trim().to_string()
}

/// One row an algorithm, and a line for each of its gradients.
pub(super) fn results(trace: &AttentionTrace) -> String {
    let mut grid = Grid::new(
        &["algorithm", "multiply-adds", "exp", "divide", "dS", "delta"],
        1,
    );
    let mut judged = Grid::new(&["algorithm", "gradient", "max abs err", "bound", ""], 2);
    for run in trace.runs.iter().filter(|run| run.skipped.is_none()) {
        let totals = &run.totals;
        grid.row(&[
            plain(run.algorithm),
            plain(totals.multiply_adds.to_string()),
            plain(count(totals.exponentials)),
            plain(count(totals.divisions)),
            plain(count(totals.score_gradients)),
            plain(count(totals.delta_terms)),
        ]);
        for (n, one) in run.gradients.iter().enumerate() {
            judged.row(&[
                plain(if n == 0 { run.algorithm } else { "" }),
                plain(one.tensor),
                plain(ui::scientific(Some(one.max_abs_err.to_f64()))),
                plain(ui::scientific(Some(one.tolerance.to_f64()))),
                if one.pass {
                    ("pass".into(), Tone::Good)
                } else {
                    ("FAIL".into(), Tone::Bad)
                },
            ]);
        }
    }
    format!("{}\n{}", grid.render(), judged.render())
}
