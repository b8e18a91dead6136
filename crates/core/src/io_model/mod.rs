//! What the schedules move between slow and fast memory, from formulas: exactly, and as the papers
//! count it.
//!
//! [`Io::of`] gives what [`schedule`](crate::schedule) reports to an observer without running it:
//! every tensor's loads and stores, products and other operations, with statistics, ragged last
//! tiles, tiles that causality and windows leave out, grouped heads and the bytes of each type.
//! [`Tally`] counts the same from a run; the two are equal, element for element.
//! [`Io::of_backward`] is the backward pass's. [`paper_terms`] and [`backward_paper_terms`] are the
//! leading terms as the papers state them.
//!
//! Per head, with N = seqlen_q rows and M = seqlen_k keys, T_r = ⌈N/B_r⌉ and T_c = ⌈M/B_c⌉, where
//! nothing is hidden:
//!
//! | | standard | fa1 | fa2 |
//! |---|---|---|---|
//! | q loaded | N·d | T_c·N·d | N·d |
//! | k loaded | T_r·M·d | M·d | T_r·M·d |
//! | v loaded | T_r·M·d_v | M·d_v | T_r·M·d_v |
//! | S, P stored and loaded | N·M each | | |
//! | O loaded, and stored | | (T_c + 1)·N·d_v | |
//! | ℓ, m loaded, and stored | | (T_c + 1)·N each | |
//! | out, lse stored | N·d_v, N | N·d_v, N | N·d_v, N |
//!
//! FA1's extra one is the zeros it begins with and the pass that rounds O to the output's type. With
//! a mask, Σ over live tiles takes the place of T_r and T_c.

mod backward;
mod blocks;
mod papers;
mod tally;

pub use backward::Asked;
pub use blocks::{BlockChoice, FA2_BLOCK_SIZES, fa2_block_sizes};
pub use papers::{backward_paper_terms, io_lower_bound, paper_terms};
pub use tally::Tally;

use crate::algorithm::Algorithm;
use crate::dropout::Dropout;
use crate::mask::{Live, MaskRule};
use crate::observe::Tensor;
use crate::problem::Problem;
use crate::schedule::BlockSizes;

/// Elements of one tensor that cross between slow and fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count {
    /// The tensor.
    pub tensor: Tensor,
    /// Bytes of one element.
    pub element_bytes: usize,
    /// Elements read from slow memory.
    pub loaded: u128,
    /// Elements written to slow memory.
    pub stored: u128,
}

impl Count {
    /// Bytes read.
    pub fn loaded_bytes(&self) -> u128 {
        times(&[self.loaded, self.element_bytes as u128])
    }

    /// Bytes written.
    pub fn stored_bytes(&self) -> u128 {
        times(&[self.stored, self.element_bytes as u128])
    }
}

/// Arithmetic of a call, whole tiles counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Products of matrices, two a tile: S = q kᵀ and P v. Backward five: S, dV, dP, dQ and dK.
    pub products: u128,
    /// Multiply-adds of the products.
    pub multiply_adds: u128,
    /// Tiles passed over because nothing in them is live.
    pub skipped_tiles: u128,
    /// Exponentials of scores.
    pub exps: u128,
    /// Multiplications of elements of O or Õ by a factor of their row.
    pub rescales: u128,
    /// Divisions of elements of O or P.
    pub divisions: u128,
    /// Elements of dS = P ∘ (dP − Δ).
    pub score_gradients: u128,
    /// Terms of the sums that Δ is.
    pub delta_terms: u128,
}

/// What one call of a schedule moves and computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Io {
    /// Tensors that are moved, in the order of [`Tensor`].
    pub counts: Vec<Count>,
    /// Arithmetic.
    pub work: Work,
}

/// Shapes in which bias and masks are given; a broadcast axis has 1. `None`: as large as the scores.
/// They matter only for problems that have a bias or mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modifiers {
    /// Of the bias.
    pub bias: Option<[usize; 4]>,
    /// Of the mask.
    pub mask: Option<[usize; 4]>,
    /// Of the mask that says what dropout keeps.
    pub keep_mask: Option<[usize; 4]>,
}

impl Io {
    /// What `algorithm` in tiles of `sizes` moves and computes, with lse asked for or not.
    ///
    /// Takes a step for each block of rows of each sequence that a mask cuts, none otherwise.
    pub fn of(
        problem: &Problem,
        algorithm: Algorithm,
        sizes: BlockSizes,
        modifiers: Modifiers,
        lse: bool,
    ) -> Io {
        let dims = problem.dims();
        let (d, dv) = (dims.head_dim as u128, dims.head_dim_v as u128);
        let heads = dims.num_heads as u128;
        let element = problem.dtype().size();
        let accumulator = problem.dtype().accumulator().size();
        let mut io = Io::default();
        for sequence in problem.sequences() {
            let rule = problem.mask_rule(sequence);
            let (n, keys) = (sequence.seqlen_q as u128, sequence.seqlen_k as u128);
            let all = Tiles::all(n, keys, sizes);
            let tiles = match algorithm.resolve() {
                Algorithm::Standard => all,
                _ => Tiles::live(&rule, sizes),
            };
            let mut moved = |tensor, element_bytes, loaded: &[u128], stored: &[u128]| {
                io.add(Count {
                    tensor,
                    element_bytes,
                    loaded: times(&[heads, times(loaded)]),
                    stored: times(&[heads, times(stored)]),
                });
            };
            match algorithm.resolve() {
                Algorithm::Standard => {
                    moved(Tensor::Q, element, &[n, d], &[0]);
                    moved(Tensor::K, element, &[all.key_visits, d], &[0]);
                    moved(Tensor::V, element, &[all.key_visits, dv], &[0]);
                    moved(Tensor::S, accumulator, &[n, keys], &[n, keys]);
                    moved(Tensor::P, accumulator, &[n, keys], &[n, keys]);
                }
                Algorithm::Fa1 => {
                    moved(Tensor::Q, element, &[tiles.row_visits, d], &[0]);
                    moved(Tensor::K, element, &[tiles.keys, d], &[0]);
                    moved(Tensor::V, element, &[tiles.keys, dv], &[0]);
                    // Every visit, and the zeros of the beginning or the pass of the end.
                    let visits = tiles.row_visits.saturating_add(n);
                    moved(Tensor::O, accumulator, &[visits, dv], &[visits, dv]);
                    moved(Tensor::M, accumulator, &[visits], &[visits]);
                    moved(Tensor::L, accumulator, &[visits], &[visits]);
                }
                _ => {
                    moved(Tensor::Q, element, &[n, d], &[0]);
                    moved(Tensor::K, element, &[tiles.key_visits, d], &[0]);
                    moved(Tensor::V, element, &[tiles.key_visits, dv], &[0]);
                }
            }
            if problem.has_bias() {
                moved(Tensor::Bias, element, &[tiles.of(modifiers.bias)], &[0]);
            }
            if problem.has_mask() {
                moved(Tensor::Mask, 1, &[tiles.of(modifiers.mask)], &[0]);
            }
            if keep_mask(problem) {
                moved(Tensor::KeepMask, 1, &[tiles.of(modifiers.keep_mask)], &[0]);
            }
            moved(Tensor::Out, element, &[0], &[n, dv]);
            if lse {
                moved(Tensor::Lse, size_of::<f32>(), &[0], &[n]);
            }

            let visited = times(&[tiles.row_visits, dv]);
            let once = times(&[n, dv]);
            let (rescales, divisions) = match algorithm.resolve() {
                Algorithm::Standard => (0, tiles.pairs),
                // ℓ·O, α and β a visit, and ℓ·O once more at the end.
                Algorithm::Fa1 => (
                    times(&[3, visited]).saturating_add(once),
                    visited.saturating_add(once),
                ),
                _ => (visited, once),
            };
            let of_one_head = Work {
                products: times(&[2, tiles.count]),
                multiply_adds: times(&[tiles.pairs, d + dv]),
                skipped_tiles: all.count - tiles.count,
                exps: tiles.pairs,
                rescales,
                divisions,
                ..Work::default()
            };
            io.work.add(&of_one_head, heads);
        }
        io
    }

    /// The same call `n` times: the heads of a problem without bias and mask are all alike.
    pub fn repeated(mut self, n: u128) -> Io {
        for count in &mut self.counts {
            count.loaded = times(&[count.loaded, n]);
            count.stored = times(&[count.stored, n]);
        }
        let one = std::mem::take(&mut self.work);
        self.work.add(&one, n);
        self
    }

    /// Bytes read from slow memory.
    pub fn loaded_bytes(&self) -> u128 {
        let bytes = self.counts.iter().map(Count::loaded_bytes);
        bytes.fold(0, u128::saturating_add)
    }

    /// Bytes written to slow memory.
    pub fn stored_bytes(&self) -> u128 {
        let bytes = self.counts.iter().map(Count::stored_bytes);
        bytes.fold(0, u128::saturating_add)
    }

    /// Bytes read and written.
    pub fn bytes(&self) -> u128 {
        self.loaded_bytes().saturating_add(self.stored_bytes())
    }

    /// Elements read and written.
    pub fn elements(&self) -> u128 {
        let elements = self
            .counts
            .iter()
            .map(|c| c.loaded.saturating_add(c.stored));
        elements.fold(0, u128::saturating_add)
    }

    /// What is moved of `tensor`, if anything.
    pub fn count(&self, tensor: Tensor) -> Option<&Count> {
        self.counts.iter().find(|count| count.tensor == tensor)
    }

    /// Adds to the line of the tensor, in its place; nothing moved leaves no line.
    fn add(&mut self, count: Count) {
        if count.loaded == 0 && count.stored == 0 {
            return;
        }
        match self
            .counts
            .binary_search_by_key(&count.tensor, |line| line.tensor)
        {
            Ok(at) => {
                let line = &mut self.counts[at];
                line.loaded = line.loaded.saturating_add(count.loaded);
                line.stored = line.stored.saturating_add(count.stored);
            }
            Err(at) => self.counts.insert(at, count),
        }
    }
}

impl Work {
    /// Adds `other` so many times.
    fn add(&mut self, other: &Work, n: u128) {
        for (sum, one) in [
            (&mut self.products, other.products),
            (&mut self.multiply_adds, other.multiply_adds),
            (&mut self.skipped_tiles, other.skipped_tiles),
            (&mut self.exps, other.exps),
            (&mut self.rescales, other.rescales),
            (&mut self.divisions, other.divisions),
            (&mut self.score_gradients, other.score_gradients),
            (&mut self.delta_terms, other.delta_terms),
        ] {
            *sum = sum.saturating_add(times(&[n, one]));
        }
    }

    /// Everything besides the products.
    pub fn others(&self) -> u128 {
        [
            self.exps,
            self.rescales,
            self.divisions,
            self.score_gradients,
            self.delta_terms,
        ]
        .into_iter()
        .fold(0, u128::saturating_add)
    }
}

/// Whether a mask says what dropout keeps.
fn keep_mask(problem: &Problem) -> bool {
    matches!(problem.options().get_dropout(), Some(Dropout::Mask { .. }))
}

/// Sums over the tiles of one head that are visited.
#[derive(Clone, Copy)]
struct Tiles {
    count: u128,
    /// Σ rows · keys.
    pairs: u128,
    /// Σ rows.
    row_visits: u128,
    /// Σ keys.
    key_visits: u128,
    /// Keys in blocks that at least one block of rows visits.
    keys: u128,
}

impl Tiles {
    fn all(rows: u128, keys: u128, sizes: BlockSizes) -> Self {
        let t_r = rows.div_ceil(sizes.rows() as u128);
        let t_c = keys.div_ceil(sizes.keys() as u128);
        Tiles {
            count: times(&[t_r, t_c]),
            pairs: times(&[rows, keys]),
            row_visits: times(&[rows, t_c]),
            key_visits: times(&[keys, t_r]),
            keys: if rows == 0 { 0 } else { keys },
        }
    }

    /// Those in which a key is live. The blocks of keys that a block of rows sees are neighbours, and
    /// neither the first nor the last of them moves back from one block of rows to the next.
    fn live(rule: &MaskRule, sizes: BlockSizes) -> Self {
        let (rows, keys) = (rule.seqlen_q(), rule.seqlen_k());
        if rule.tile(0..rows, 0..keys) == Live::All {
            return Tiles::all(rows as u128, keys as u128, sizes);
        }
        let mut tiles = Tiles::all(0, 0, sizes);
        // First block of keys that no block of rows has visited.
        let mut fresh = 0;
        let start_of = |block: usize| block.saturating_mul(sizes.keys()).min(keys) as u128;
        for start in (0..rows).step_by(sizes.rows()) {
            let block = start..start.saturating_add(sizes.rows()).min(rows);
            let live = rule.keys(block.clone());
            if live.is_empty() {
                continue;
            }
            let (first, end) = (live.start / sizes.keys(), (live.end - 1) / sizes.keys() + 1);
            let (height, width) = (block.len() as u128, start_of(end) - start_of(first));
            let count = (end - first) as u128;
            tiles.count += count;
            tiles.pairs += height * width;
            tiles.row_visits += height * count;
            tiles.key_visits += width;
            if end > fresh {
                tiles.keys += start_of(end) - start_of(first.max(fresh));
                fresh = end;
            }
        }
        tiles
    }

    /// Elements of a bias or mask of this shape that the tiles read, each once a tile.
    fn of(&self, shape: Option<[usize; 4]>) -> u128 {
        match shape.map(|[_, _, rows, keys]| (rows == 1, keys == 1)) {
            None | Some((false, false)) => self.pairs,
            Some((false, true)) => self.row_visits,
            Some((true, false)) => self.key_visits,
            Some((true, true)) => self.count,
        }
    }
}

/// The product, at most what a u128 holds: sizes that no memory has must not wrap around.
fn times(factors: &[u128]) -> u128 {
    factors.iter().copied().fold(1, u128::saturating_mul)
}
