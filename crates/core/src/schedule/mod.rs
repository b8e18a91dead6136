//! The three algorithms as the papers write them, on [`TileMath`](crate::tile::TileMath).
//!
//! | | loops | O | leaves fast memory |
//! |---|---|---|---|
//! | [`standard`] | S, then P, then O | normalised weights P | S and P |
//! | [`fa1`] | keys outside, rows inside | normalised at every step | O, ℓ and m, at every step |
//! | [`fa2`] | rows outside, keys inside | Õ, one division at the end | out and lse, once |
//!
//! They take any problem (pages are gathered first), work in the accumulator type of the inputs'
//! dtype, and tell an [`Observer`] of every load, store and change of state.
//!
//! Each forms Σ e^(s − m) v (fa1 and fa2) or e^(s − m)/ℓ (standard) in the accumulator type, so
//! seqlen_k · max|v| must not overflow it for fa1 and fa2.
//!
//! ```
//! use tilewise_core::observe::{Observer, Tensor, Transfer};
//! use tilewise_core::schedule::{self, BlockSizes};
//! use tilewise_core::{Algorithm, Inputs, Options, Problem, TensorView, TensorViewMut};
//!
//! /// Bytes of K that are read.
//! struct Keys(usize);
//!
//! impl Observer for Keys {
//!     fn load(&mut self, transfer: Transfer) {
//!         if transfer.tensor == Tensor::K {
//!             self.0 += transfer.bytes();
//!         }
//!     }
//! }
//!
//! let data = [0.5f32; 64];
//! let view = TensorView::bhsd(&data, [1, 1, 16, 4])?;
//! let inputs = Inputs::new(view, view, view);
//! let problem = Problem::new(&inputs, &Options::new())?;
//! let mut keys = |algorithm| {
//!     let mut out = [0.0; 64];
//!     let out = TensorViewMut::bhsd(&mut out, [1, 1, 16, 4])?;
//!     let mut keys = Keys(0);
//!     let sizes = BlockSizes::new(8, 8)?;
//!     schedule::forward(algorithm, &problem, &inputs, sizes, &mut keys, out, None)?;
//!     Ok::<_, tilewise_core::Error>(keys.0)
//! };
//! // FA1 reads K once, FA2 once for every block of rows.
//! assert_eq!(keys(Algorithm::Fa1)?, 64 * 4);
//! assert_eq!(keys(Algorithm::Fa2)?, 2 * 64 * 4);
//! # Ok::<(), tilewise_core::Error>(())
//! ```

pub mod backward;
pub mod fa1;
pub mod fa2;
mod head;
pub mod standard;

use std::ops::Range;

use crate::algorithm::Algorithm;
use crate::backend::check_outputs;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::observe::{Observer, Tensor, Transfer};
use crate::paged::{Gathered, gather};
use crate::problem::Problem;
use crate::view::TensorViewMut;

pub use fa1::fa1_block_sizes;

/// Rows and keys a tile: B_r and B_c.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSizes {
    rows: usize,
    keys: usize,
}

impl BlockSizes {
    /// B_r = `rows`, B_c = `keys`. The last tile of either axis may be smaller.
    ///
    /// # Errors
    /// [`Error::Option`] if either is 0.
    pub fn new(rows: usize, keys: usize) -> Result<Self> {
        if rows == 0 || keys == 0 {
            return Err(Error::option(
                "block sizes",
                "at least one row and one key",
                format!("{rows} × {keys}"),
            ));
        }
        Ok(BlockSizes { rows, keys })
    }

    /// Sizes that are known to be above 0.
    pub(crate) fn of((rows, keys): (usize, usize)) -> Self {
        BlockSizes { rows, keys }
    }

    /// B_r.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// B_c.
    pub fn keys(&self) -> usize {
        self.keys
    }
}

/// `algorithm` by name: [`standard::forward`], [`fa1::forward`] or [`fa2::forward`], the last also
/// for [`Algorithm::Auto`].
///
/// # Errors
/// Those of the three.
pub fn forward<T: Element>(
    algorithm: Algorithm,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    sizes: BlockSizes,
    observer: &mut impl Observer,
    out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    match algorithm {
        Algorithm::Standard => standard::forward(problem, inputs, sizes, observer, out, lse),
        Algorithm::Fa1 => fa1::forward(problem, inputs, sizes, observer, out, lse),
        Algorithm::Fa2 | Algorithm::Auto => {
            fa2::forward(problem, inputs, sizes, observer, out, lse)
        }
    }
}

/// The blocks of an axis of length `n`, numbered.
fn blocks(n: usize, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..n)
        .step_by(size)
        .map(move |start| start..start.saturating_add(size).min(n))
        .enumerate()
}

/// What every schedule begins with: checks the call, gathers pages, and gives rows that belong to no
/// sequence their results.
fn prepare<'o, T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    out: TensorViewMut<'o, T>,
    lse: Option<TensorViewMut<'o, f32>>,
) -> Result<(Gathered<T>, Outputs<'o, T>)> {
    let mut outputs = Outputs { out, lse };
    problem.expect_posed(&Problem::new(inputs, problem.options())?)?;
    check_outputs(
        problem,
        &T::erase_mut(outputs.out.reborrow()),
        outputs.lse.as_ref(),
    )?;
    let gathered = gather(problem, inputs)?;
    outputs.clear_rows_of_no_sequence(gathered.problem());
    Ok((gathered, outputs))
}

/// Where results go.
struct Outputs<'a, T> {
    out: TensorViewMut<'a, T>,
    lse: Option<TensorViewMut<'a, f32>>,
}

impl<T: Element> Outputs<'_, T> {
    /// Gives the rows that belong to no sequence their 0 and −∞.
    fn clear_rows_of_no_sequence(&mut self, problem: &Problem) {
        if !problem.is_packed() {
            return;
        }
        // Packed sequences stand one after another from row 0 on.
        let first = problem
            .sequences()
            .last()
            .map_or(0, |sequence| sequence.q_start + sequence.seqlen_q);
        let [batch, heads, seqlen_q, _] = self.out.shape();
        for b in 0..batch {
            for h in 0..heads {
                for i in first..seqlen_q {
                    self.out.row_mut(b, h, i).fill(T::default());
                    if let Some(lse) = &mut self.lse {
                        lse.row_mut(b, h, i)[0] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }

    /// Rounds a block of finished rows to the dtype and stores it.
    fn store(
        &mut self,
        head: &head::Head<'_, '_, T>,
        rows: &Range<usize>,
        out: &[T::Acc],
        lse: &[T::Acc],
        observer: &mut impl Observer,
    ) {
        let (b, h) = (head.sequence().q_batch, head.index());
        let width = self.out.shape()[3];
        for (r, i) in rows.clone().enumerate() {
            let i = head.sequence().q_start + i;
            let row = self.out.row_mut(b, h, i);
            for (to, &x) in row.iter_mut().zip(&out[r * width..]) {
                *to = T::from_acc(x);
            }
            if let Some(to) = &mut self.lse {
                to.row_mut(b, h, i)[0] = lse[r].to_f64() as f32;
            }
        }
        observer.store(transfer::<T>(Tensor::Out, rows.len() * width));
        if self.lse.is_some() {
            observer.store(transfer::<f32>(Tensor::Lse, rows.len()));
        }
    }
}

fn transfer<E>(tensor: Tensor, elements: usize) -> Transfer {
    Transfer {
        tensor,
        elements,
        element_bytes: size_of::<E>(),
    }
}
