//! What a schedule did, kept event by event as its observer was told.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use tilewise::Algorithm;
use tilewise::core::mask::Live;
use tilewise::core::observe::{
    BackwardStep, Delta, Finish, GradientFinish, GradientRow, Operation, Product, Step, Tensor,
    Tile, Transfer, Weights,
};
use tilewise::core::{BlockSizes, Float, Observer};

use super::numbers::{Number, first};

/// One thing that a schedule did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// From slow to fast memory.
    Load(Moved),
    /// From fast to slow memory.
    Store(Moved),
    /// A tile with no live key was passed over.
    Skip(TileAt),
    /// S of a tile.
    Scores {
        #[serde(flatten)]
        tile: TileAt,
        rows_shown: Vec<ScoreRow>,
    },
    /// A product of a tile: S and O; backward S, dv, dP, dq and dk.
    Product {
        result: &'static str,
        row_block: usize,
        key_block: usize,
        rows: usize,
        columns: usize,
        inner: usize,
    },
    /// Arithmetic besides products.
    Operations {
        operation: &'static str,
        count: usize,
    },
    /// A row of P (standard attention).
    Weights {
        row_block: usize,
        row: usize,
        m: Number,
        l: Number,
        p: Vec<Number>,
    },
    /// The running state after a tile (FA1, FA2).
    Step {
        #[serde(flatten)]
        tile: TileAt,
        rows_shown: Vec<StateRow>,
    },
    /// A block of rows is done.
    Finish {
        row_block: usize,
        rows: [usize; 2],
        rows_shown: Vec<FinalRow>,
    },
    /// Δ of a block of rows, before the loops (FA2, backward).
    Delta {
        row_block: usize,
        rows: [usize; 2],
        rows_shown: Vec<DeltaRow>,
    },
    /// A row of dP became one of dS (standard attention, backward).
    GradientRow {
        row_block: usize,
        row: usize,
        delta: Number,
        ds: Vec<Number>,
    },
    /// P and dS of a tile were made again, and dQ, dK and dV have its shares (FA1, FA2).
    BackwardStep {
        #[serde(flatten)]
        tile: TileAt,
        rows_shown: Vec<GradientState>,
        keys_shown: Vec<KeyState>,
    },
    /// A block of dq, dk or dv is done.
    GradientFinish {
        tensor: &'static str,
        block: usize,
        /// Rows of dq, keys of dk and dv.
        rows: [usize; 2],
        rows_shown: Vec<GradientLine>,
    },
}

/// Elements that crossed between slow and fast memory, and which.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Moved {
    pub(super) tensor: &'static str,
    pub(super) elements: usize,
    pub(super) bytes: usize,
    /// The block of rows, where they are of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) row_block: Option<usize>,
    /// The block of keys, where they are of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key_block: Option<usize>,
    /// The single row, where they are of one (a row of S or P).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) row: Option<usize>,
}

/// A tile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct TileAt {
    pub(super) row_block: usize,
    pub(super) key_block: usize,
    /// First row, and the one after the last.
    pub(super) rows: [usize; 2],
    pub(super) keys: [usize; 2],
    /// How much of it causality, window and lengths leave live: none, some, all.
    pub(super) live: &'static str,
}

impl From<&Tile> for TileAt {
    fn from(tile: &Tile) -> Self {
        TileAt {
            row_block: tile.row_block,
            key_block: tile.key_block,
            rows: [tile.rows.start, tile.rows.end],
            keys: [tile.keys.start, tile.keys.end],
            live: match tile.live {
                Live::None => "none",
                Live::Some => "some",
                Live::All => "all",
            },
        }
    }
}

/// A row of S.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ScoreRow {
    pub(super) row: usize,
    pub(super) s: Vec<Number>,
}

/// The state of a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct StateRow {
    pub(super) row: usize,
    /// FA1's statistics of the block alone.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) block: Option<BlockRow>,
    pub(super) alpha: Number,
    pub(super) m: Number,
    pub(super) l: Number,
    /// FA1: O, normalised. FA2: Õ.
    pub(super) o: Vec<Number>,
}

/// m̃, ℓ̃ and β of a row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct BlockRow {
    pub(super) m_block: Number,
    pub(super) l_block: Number,
    pub(super) beta: Number,
}

/// A finished row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FinalRow {
    pub(super) row: usize,
    pub(super) out: Vec<Number>,
    pub(super) lse: Number,
}

/// Δ of a row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct DeltaRow {
    pub(super) row: usize,
    pub(super) delta: Number,
}

/// A row of a tile, backward.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct GradientState {
    pub(super) row: usize,
    /// FA1's m and ℓ: P = e^(S − m)/ℓ.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) pair: Option<PairRow>,
    /// FA2's L: P = e^(S − L).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lse: Option<Number>,
    pub(super) delta: Number,
    pub(super) s: Vec<Number>,
    pub(super) p: Vec<Number>,
    pub(super) dp: Vec<Number>,
    pub(super) ds: Vec<Number>,
    /// dQ with this tile's share.
    pub(super) dq: Vec<Number>,
}

/// m and ℓ of a row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct PairRow {
    pub(super) m: Number,
    pub(super) l: Number,
}

/// dK and dV of a key with this tile's share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct KeyState {
    pub(super) key: usize,
    pub(super) dk: Vec<Number>,
    pub(super) dv: Vec<Number>,
}

/// A row of a finished gradient.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct GradientLine {
    pub(super) row: usize,
    pub(super) values: Vec<Number>,
}

/// What crossed between slow and fast memory of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Traffic {
    pub(super) loads: usize,
    pub(super) loaded_bytes: usize,
    pub(super) stores: usize,
    pub(super) stored_bytes: usize,
}

/// Counts of a whole run, whatever of it is listed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Totals {
    pub(super) loaded_bytes: usize,
    pub(super) stored_bytes: usize,
    pub(super) tensors: BTreeMap<&'static str, Traffic>,
    pub(super) multiply_adds: u128,
    pub(super) exponentials: usize,
    pub(super) rescales: usize,
    pub(super) divisions: usize,
    /// Elements of dS, and terms of the sums that Δ is (backward).
    pub(super) score_gradients: usize,
    pub(super) delta_terms: usize,
    /// Tiles computed and tiles passed over (FA1, FA2).
    pub(super) tiles: usize,
    pub(super) tiles_skipped: usize,
}

/// Which rows' numbers are kept.
#[derive(Clone, Debug)]
pub(super) enum Rows {
    /// These.
    These(Range<usize>),
    /// The first ones of every block.
    FirstOfBlock(usize),
}

/// Numbers kept of a row of S, P, O or out.
pub(super) const COLUMNS: usize = 8;

/// Events kept of a run.
const EVENTS: usize = 20_000;

/// Where the events are that come next.
#[derive(Clone, Copy, Debug, Default)]
struct Where {
    row_block: Option<usize>,
    key_block: Option<usize>,
    row: Option<usize>,
}

/// Keeps the events of one run over one head.
pub(super) struct Recorder {
    algorithm: Algorithm,
    sizes: BlockSizes,
    shown: Rows,
    pub(super) events: Vec<Event>,
    /// Events beyond those kept.
    pub(super) left_out: usize,
    pub(super) totals: Totals,
    /// Events from here on may be loads whose place is told by what comes next.
    unplaced: usize,
    at: Where,
}

impl Recorder {
    pub(super) fn new(algorithm: Algorithm, sizes: BlockSizes, shown: Rows) -> Recorder {
        Recorder {
            algorithm,
            sizes,
            shown,
            events: Vec::new(),
            left_out: 0,
            totals: Totals::default(),
            unplaced: 0,
            at: Where::default(),
        }
    }

    fn push(&mut self, event: Event) {
        if self.events.len() < EVENTS {
            self.events.push(event);
        } else {
            self.left_out += 1;
        }
    }

    /// What comes next is of this place, and so are the loads that were for it.
    fn enter(&mut self, at: Where) {
        for event in &mut self.events[self.unplaced..] {
            if let Event::Load(moved) = event {
                place(moved, at);
            }
        }
        self.unplaced = self.events.len();
        self.at = at;
    }

    fn enter_tile(&mut self, tile: &Tile) {
        self.enter(Where {
            row_block: Some(tile.row_block),
            key_block: Some(tile.key_block),
            row: None,
        });
    }

    fn enter_rows(&mut self, row_block: usize, row: Option<usize>) {
        self.enter(Where {
            row_block: Some(row_block),
            key_block: None,
            row,
        });
    }

    /// Whether the row is among those shown of its block.
    fn shows(&self, row: usize) -> bool {
        let start = row / self.sizes.rows() * self.sizes.rows();
        let shown = self.shown(start..start + self.sizes.rows());
        shown.contains(&(row - start))
    }

    /// Which of a tile's keys are shown: as many as of its rows, however those were chosen.
    fn keys_shown(&self, keys: usize) -> Range<usize> {
        let count = match &self.shown {
            Rows::FirstOfBlock(count) => *count,
            Rows::These(_) => 2,
        };
        0..keys.min(count)
    }

    /// Which of `rows` are shown, counted from the first of them.
    fn shown(&self, rows: Range<usize>) -> Range<usize> {
        match &self.shown {
            Rows::FirstOfBlock(count) => 0..rows.len().min(*count),
            Rows::These(these) => {
                let start = these.start.clamp(rows.start, rows.end);
                let end = these.end.clamp(start, rows.end);
                start - rows.start..end - rows.start
            }
        }
    }
}

fn moved(transfer: Transfer) -> Moved {
    Moved {
        tensor: transfer.tensor.name(),
        elements: transfer.elements,
        bytes: transfer.bytes(),
        row_block: None,
        key_block: None,
        row: None,
    }
}

/// Names the blocks that elements of this tensor lie in: not every tensor has rows and keys.
fn place(moved: &mut Moved, at: Where) {
    let keys_only = ["k", "v", "dk", "dv", "dK", "dV"].contains(&moved.tensor);
    let rows_and_keys = [
        "S",
        "P",
        "dP",
        "dS",
        "slope",
        "bias",
        "mask",
        "keep_mask",
        "dBias",
    ]
    .contains(&moved.tensor);
    if !keys_only {
        moved.row_block = at.row_block;
        moved.row = at.row;
    }
    if keys_only || rows_and_keys {
        moved.key_block = at.key_block;
    }
}

/// Row `r` of a row-major matrix of `rows` rows.
fn row<F>(values: &[F], r: usize, rows: usize) -> &[F] {
    let width = values.len() / rows.max(1);
    &values[r * width..][..width]
}

impl Observer for Recorder {
    fn load(&mut self, transfer: Transfer) {
        self.totals.loaded_bytes += transfer.bytes();
        let traffic = self
            .totals
            .tensors
            .entry(transfer.tensor.name())
            .or_default();
        traffic.loads += 1;
        traffic.loaded_bytes += transfer.bytes();
        self.push(Event::Load(moved(transfer)));
    }

    fn store(&mut self, transfer: Transfer) {
        self.totals.stored_bytes += transfer.bytes();
        let traffic = self
            .totals
            .tensors
            .entry(transfer.tensor.name())
            .or_default();
        traffic.stores += 1;
        traffic.stored_bytes += transfer.bytes();
        let mut moved = moved(transfer);
        place(&mut moved, self.at);
        self.push(Event::Store(moved));
    }

    fn skip(&mut self, tile: &Tile) {
        self.totals.tiles_skipped += 1;
        self.enter_tile(tile);
        self.push(Event::Skip(tile.into()));
    }

    fn product(&mut self, tile: &Tile, product: Product) {
        let Product {
            result,
            rows,
            columns,
            inner,
        } = product;
        self.totals.multiply_adds += rows as u128 * columns as u128 * inner as u128;
        self.enter_tile(tile);
        self.push(Event::Product {
            result: result.name(),
            row_block: tile.row_block,
            key_block: tile.key_block,
            rows,
            columns,
            inner,
        });
    }

    fn scores<F: Float>(&mut self, tile: &Tile, scores: &[F]) {
        let rows_shown = self
            .shown(tile.rows.clone())
            .map(|r| ScoreRow {
                row: tile.rows.start + r,
                s: first(row(scores, r, tile.rows.len()), COLUMNS),
            })
            .collect();
        self.push(Event::Scores {
            tile: tile.into(),
            rows_shown,
        });
    }

    fn weights<F: Float>(&mut self, weights: &Weights<'_, F>) {
        let row_block = weights.row / self.sizes.rows();
        self.enter_rows(row_block, Some(weights.row));
        let shown = self.shows(weights.row);
        self.push(Event::Weights {
            row_block,
            row: weights.row,
            m: Number::of(weights.m),
            l: Number::of(weights.l),
            p: first(weights.p, if shown { COLUMNS } else { 0 }),
        });
    }

    fn operations(&mut self, operation: Operation, count: usize) {
        let (operation, total) = match operation {
            Operation::Exp => ("exp", &mut self.totals.exponentials),
            Operation::Rescale => ("rescale", &mut self.totals.rescales),
            Operation::Divide => ("divide", &mut self.totals.divisions),
            Operation::ScoreGradient => ("score_gradient", &mut self.totals.score_gradients),
            Operation::DeltaTerm => ("delta_term", &mut self.totals.delta_terms),
            // Named here as soon as a schedule does another.
            _ => return,
        };
        *total += count;
        self.push(Event::Operations { operation, count });
    }

    fn step<F: Float>(&mut self, step: &Step<'_, F>) {
        self.totals.tiles += 1;
        let rows = step.tile.rows.clone();
        let rows_shown = self
            .shown(rows.clone())
            .map(|r| StateRow {
                row: rows.start + r,
                block: step.block.map(|block| BlockRow {
                    m_block: Number::of(block.m[r]),
                    l_block: Number::of(block.l[r]),
                    beta: Number::of(block.beta[r]),
                }),
                alpha: Number::of(step.alpha[r]),
                m: Number::of(step.m[r]),
                l: Number::of(step.l[r]),
                o: first(row(step.o, r, rows.len()), COLUMNS),
            })
            .collect();
        self.push(Event::Step {
            tile: step.tile.into(),
            rows_shown,
        });
    }

    fn finish<F: Float>(&mut self, finish: &Finish<'_, F>) {
        self.enter_rows(finish.row_block, None);
        let start = finish.row_block * self.sizes.rows();
        let rows = start..start + finish.lse.len();
        let rows_shown = self
            .shown(rows.clone())
            .map(|r| FinalRow {
                row: rows.start + r,
                out: first(row(finish.out, r, rows.len()), COLUMNS),
                lse: Number::of(finish.lse[r]),
            })
            .collect();
        self.push(Event::Finish {
            row_block: finish.row_block,
            rows: [rows.start, rows.end],
            rows_shown,
        });
    }

    fn delta<F: Float>(&mut self, delta: &Delta<'_, F>) {
        self.enter_rows(delta.row_block, None);
        let start = delta.row_block * self.sizes.rows();
        let rows = start..start + delta.values.len();
        let rows_shown = self
            .shown(rows.clone())
            .map(|r| DeltaRow {
                row: start + r,
                delta: Number::of(delta.values[r]),
            })
            .collect();
        self.push(Event::Delta {
            row_block: delta.row_block,
            rows: [rows.start, rows.end],
            rows_shown,
        });
    }

    fn gradient_row<F: Float>(&mut self, row: &GradientRow<'_, F>) {
        let row_block = row.row / self.sizes.rows();
        self.enter_rows(row_block, Some(row.row));
        let shown = self.shows(row.row);
        self.push(Event::GradientRow {
            row_block,
            row: row.row,
            delta: Number::of(row.delta),
            ds: first(row.ds, if shown { COLUMNS } else { 0 }),
        });
    }

    fn backward_step<F: Float>(&mut self, step: &BackwardStep<'_, F>) {
        self.totals.tiles += 1;
        let (rows, keys) = (step.tile.rows.clone(), step.tile.keys.clone());
        let of_row = |values, r| first(row(values, r, rows.len()), COLUMNS);
        let rows_shown = self
            .shown(rows.clone())
            .map(|r| {
                let (a, b) = step.statistics[r];
                let fa1 = self.algorithm == Algorithm::Fa1;
                GradientState {
                    row: rows.start + r,
                    pair: fa1.then(|| PairRow {
                        m: Number::of(a),
                        l: Number::of(b),
                    }),
                    lse: (!fa1).then(|| Number::of(a)),
                    delta: Number::of(step.delta[r]),
                    s: of_row(step.s, r),
                    p: of_row(step.p, r),
                    dp: of_row(step.dp, r),
                    ds: of_row(step.ds, r),
                    dq: of_row(step.dq, r),
                }
            })
            .collect();
        let keys_shown = self
            .keys_shown(keys.len())
            .map(|key| KeyState {
                key: keys.start + key,
                dk: first(row(step.dk, key, keys.len()), COLUMNS),
                dv: first(row(step.dv, key, keys.len()), COLUMNS),
            })
            .collect();
        self.push(Event::BackwardStep {
            tile: step.tile.into(),
            rows_shown,
            keys_shown,
        });
    }

    fn gradient_finish<F: Float>(&mut self, finish: &GradientFinish<'_, F>) {
        let of_keys = finish.tensor != Tensor::DQ;
        let size = if of_keys {
            self.sizes.keys()
        } else {
            self.sizes.rows()
        };
        let (rows, block) = (finish.rows.clone(), finish.rows.start / size);
        self.enter(Where {
            row_block: (!of_keys).then_some(block),
            key_block: of_keys.then_some(block),
            row: None,
        });
        let shown = if of_keys {
            self.keys_shown(rows.len())
        } else {
            self.shown(rows.clone())
        };
        let rows_shown = shown
            .map(|r| GradientLine {
                row: rows.start + r,
                values: first(row(finish.values, r, rows.len()), COLUMNS),
            })
            .collect();
        self.push(Event::GradientFinish {
            tensor: finish.tensor.name(),
            block,
            rows: [rows.start, rows.end],
            rows_shown,
        });
    }
}
