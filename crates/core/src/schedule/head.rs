//! One head of one sequence in slow memory, and the tiles of it in fast memory.

use std::ops::Range;

use num_traits::Float as _;

use super::transfer;
use crate::dtype::Element;
use crate::error::Result;
use crate::inputs::Inputs;
use crate::observe::{Finish, NoObserver, Observer, Operation, Product, Tensor, Tile};
use crate::problem::{Problem, Sequence};
use crate::tile::{TileBlock, TileSpec};
use crate::view::TensorView;

/// Keys of a row that are scored at once to find one that it keeps.
const KEYS_ASKED: usize = 64;

/// One query head of one sequence, as it lies in slow memory.
pub(super) struct Head<'p, 'a, T> {
    problem: &'p Problem,
    inputs: &'p Inputs<'a, T>,
    /// Broadcast to `[batch, num_heads, seqlen_q, seqlen_k]`, with the shape each was given in.
    bias: Option<(TensorView<'a, T>, [usize; 4])>,
    mask: Option<(TensorView<'a, u8>, [usize; 4])>,
    keep: Option<(TensorView<'a, u8>, [usize; 4])>,
    sequence: &'p Sequence,
    sequence_index: usize,
    index: usize,
}

/// Calls `each` for every head of every sequence.
pub(super) fn for_each_head<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    mut each: impl FnMut(&Head<'_, '_, T>) -> Result<()>,
) -> Result<()> {
    for_each_group(problem, inputs, |heads| {
        heads.iter().try_for_each(&mut each)
    })
}

/// Calls `each` for every KV head of every sequence, with the query heads that share it.
pub(super) fn for_each_group<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    mut each: impl FnMut(&[Head<'_, '_, T>]) -> Result<()>,
) -> Result<()> {
    let dims = problem.dims();
    let group = dims.group();
    for sequence in 0..problem.sequences().len() {
        for kv_head in 0..dims.num_kv_heads {
            let heads = (kv_head * group..(kv_head + 1) * group)
                .map(|index| Head::new(problem, inputs, sequence, index))
                .collect::<Result<Vec<_>>>()?;
            each(&heads)?;
        }
    }
    Ok(())
}

/// Fast memory for inputs: one tile of each, row-major.
#[derive(Default)]
pub(super) struct Chip<T: Element> {
    q: Vec<T::Acc>,
    k: Vec<T::Acc>,
    v: Vec<T::Acc>,
    bias: Vec<T::Acc>,
    mask: Vec<u8>,
    keep: Vec<u8>,
}

impl<'p, 'a, T: Element> Head<'p, 'a, T> {
    /// Query head `index` of sequence number `sequence_index`. Pages have been gathered.
    pub(super) fn new(
        problem: &'p Problem,
        inputs: &'p Inputs<'a, T>,
        sequence_index: usize,
        index: usize,
    ) -> Result<Self> {
        let dims = problem.dims();
        let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
        fn spread<U: Copy>(
            view: Option<TensorView<'_, U>>,
            full: [usize; 4],
        ) -> Result<Option<(TensorView<'_, U>, [usize; 4])>> {
            view.map(|view| Ok((view.broadcast_to(full)?, view.shape())))
                .transpose()
        }
        Ok(Head {
            problem,
            inputs,
            bias: spread(inputs.bias, full)?,
            mask: spread(inputs.mask, full)?,
            keep: spread(inputs.keep_mask, full)?,
            sequence: &problem.sequences()[sequence_index],
            sequence_index,
            index,
        })
    }
}

impl<T: Element> Head<'_, '_, T> {
    pub(super) fn sequence(&self) -> &Sequence {
        self.sequence
    }

    /// Query head.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn spec(&self, rows: &Range<usize>) -> TileSpec<T::Acc> {
        TileSpec::new(self.problem, self.sequence, self.index, rows.clone())
    }

    pub(super) fn tile(
        &self,
        spec: &TileSpec<T::Acc>,
        row_block: usize,
        (key_block, keys): (usize, Range<usize>),
    ) -> Tile {
        Tile {
            sequence: self.sequence_index,
            head: self.index,
            row_block,
            key_block,
            rows: spec.rows(),
            live: spec.live(keys.clone()),
            keys,
        }
    }

    pub(super) fn load_q(
        &self,
        chip: &mut Chip<T>,
        rows: &Range<usize>,
        observer: &mut impl Observer,
    ) {
        let place = [self.sequence.q_batch, self.index, self.sequence.q_start];
        copy_rows(&self.inputs.q, place, rows, &mut chip.q);
        observer.load(transfer::<T>(Tensor::Q, chip.q.len()));
    }

    pub(super) fn load_k(
        &self,
        chip: &mut Chip<T>,
        keys: &Range<usize>,
        observer: &mut impl Observer,
    ) {
        copy_rows(&self.inputs.k, self.kv_place(), keys, &mut chip.k);
        observer.load(transfer::<T>(Tensor::K, chip.k.len()));
    }

    pub(super) fn load_v(
        &self,
        chip: &mut Chip<T>,
        keys: &Range<usize>,
        observer: &mut impl Observer,
    ) {
        copy_rows(&self.inputs.v, self.kv_place(), keys, &mut chip.v);
        observer.load(transfer::<T>(Tensor::V, chip.v.len()));
    }

    /// The place of row 0 of q, out and lse: batch, head, row.
    pub(super) fn q_place(&self) -> [usize; 3] {
        [self.sequence.q_batch, self.index, self.sequence.q_start]
    }

    /// The shape in which the bias was given.
    pub(super) fn bias_shape(&self) -> Option<[usize; 4]> {
        Some(self.bias.as_ref()?.1)
    }

    pub(super) fn kv_place(&self) -> [usize; 3] {
        [
            self.sequence.k_batch,
            self.index / self.problem.dims().group(),
            self.sequence.k_start,
        ]
    }

    /// Bias and mask of a tile, if there are any.
    pub(super) fn load_modifiers(
        &self,
        chip: &mut Chip<T>,
        tile: &Tile,
        observer: &mut impl Observer,
    ) {
        let place = [
            self.sequence.q_batch,
            self.index,
            self.sequence.q_start,
            self.sequence.k_start,
        ];
        if let Some((bias, given)) = &self.bias {
            copy_tile(bias, place, tile, &mut chip.bias, Element::to_acc);
            observer.load(transfer::<T>(Tensor::Bias, distinct(given, tile)));
        }
        if let Some((mask, given)) = &self.mask {
            copy_tile(mask, place, tile, &mut chip.mask, |x| x);
            observer.load(transfer::<u8>(Tensor::Mask, distinct(given, tile)));
        }
    }

    /// What dropout keeps of a tile, if a mask says it.
    pub(super) fn load_keep(&self, chip: &mut Chip<T>, tile: &Tile, observer: &mut impl Observer) {
        if let Some((keep, given)) = &self.keep {
            let (sequence, head) = (self.sequence, self.index);
            let place = [sequence.q_batch, head, sequence.q_start, sequence.k_start];
            copy_tile(keep, place, tile, &mut chip.keep, |x| x);
            observer.load(transfer::<u8>(Tensor::KeepMask, distinct(given, tile)));
        }
    }

    /// What is in fast memory, as the block of `tile`.
    pub(super) fn block<'c>(&self, chip: &'c Chip<T>, tile: &Tile) -> TileBlock<'c, T::Acc> {
        TileBlock {
            q: &chip.q,
            k: &chip.k,
            v: &chip.v,
            keys: tile.keys.clone(),
            bias: self.bias.is_some().then_some(&chip.bias[..]),
            mask: self.mask.is_some().then_some(&chip.mask[..]),
            keep: self.keep.is_some().then_some(&chip.keep[..]),
        }
    }

    /// Whether row `row` of the sequence keeps a key: sees it, with a score above −∞, and dropout leaves it.
    pub(super) fn keeps_a_key(&self, row: usize) -> Result<bool> {
        let rows = row..row + 1;
        let spec = self.spec(&rows);
        let seen = self.problem.mask_rule(self.sequence).row(row);
        let (mut chip, observer) = (Chip::default(), &mut NoObserver);
        self.load_q(&mut chip, &rows, observer);
        let (hidden, mut scores) = (T::Acc::neg_infinity(), Vec::new());
        // The first key decides as a rule, and all rows ask where dO is lost throughout.
        for first in seen.clone().step_by(KEYS_ASKED) {
            let keys = first..seen.end.min(first + KEYS_ASKED);
            let tile = self.tile(&spec, row, (first / KEYS_ASKED, keys));
            self.load_k(&mut chip, &tile.keys, observer);
            self.load_modifiers(&mut chip, &tile, observer);
            self.load_keep(&mut chip, &tile, observer);
            let block = self.block(&chip, &tile);
            spec.scores(&block, &mut scores)?;
            let mut found = scores.iter().enumerate();
            if found.any(|(key, &s)| s != hidden && spec.kept(&block, 0, key).is_some()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Position in [`Problem::sequences`].
    pub(super) fn sequence_index(&self) -> usize {
        self.sequence_index
    }

    /// S = q kᵀ of a tile.
    pub(super) fn report_scores(
        &self,
        tile: &Tile,
        scores: &[T::Acc],
        observer: &mut impl Observer,
    ) {
        observer.product(
            tile,
            Product {
                result: Tensor::S,
                rows: tile.rows.len(),
                columns: tile.keys.len(),
                inner: self.problem.dims().head_dim,
            },
        );
        observer.scores(tile, scores);
    }

    /// P v of a tile.
    pub(super) fn report_values(&self, tile: &Tile, observer: &mut impl Observer) {
        observer.product(
            tile,
            Product {
                result: Tensor::O,
                rows: tile.rows.len(),
                columns: self.problem.dims().head_dim_v,
                inner: tile.keys.len(),
            },
        );
    }

    /// The two products of a tile and the exponentials between them.
    pub(super) fn report_tile(&self, tile: &Tile, scores: &[T::Acc], observer: &mut impl Observer) {
        self.report_scores(tile, scores, observer);
        observer.operations(Operation::Exp, tile.rows.len() * tile.keys.len());
        self.report_values(tile, observer);
    }

    /// A block of rows is done.
    pub(super) fn report_finish(
        &self,
        row_block: usize,
        out: &[T::Acc],
        lse: &[T::Acc],
        observer: &mut impl Observer,
    ) {
        observer.finish(&Finish {
            sequence: self.sequence_index,
            head: self.index,
            row_block,
            out,
            lse,
        });
    }
}

pub(super) fn copy_rows<T: Element>(
    view: &TensorView<'_, T>,
    [b, h, start]: [usize; 3],
    rows: &Range<usize>,
    to: &mut Vec<T::Acc>,
) {
    to.clear();
    for i in rows.clone() {
        to.extend(view.row(b, h, start + i).map(Element::to_acc));
    }
}

fn copy_tile<U: Copy, A>(
    view: &TensorView<'_, U>,
    [b, h, q_start, k_start]: [usize; 4],
    tile: &Tile,
    to: &mut Vec<A>,
    widen: impl Fn(U) -> A,
) {
    to.clear();
    for i in tile.rows.clone() {
        let row = tile.keys.clone();
        to.extend(row.map(|j| widen(view.at([b, h, q_start + i, k_start + j]))));
    }
}

/// Elements of a broadcast tensor that a tile reads, each once.
pub(super) fn distinct(given: &[usize; 4], tile: &Tile) -> usize {
    let rows = if given[2] == 1 { 1 } else { tile.rows.len() };
    let keys = if given[3] == 1 { 1 } else { tile.keys.len() };
    rows * keys
}
