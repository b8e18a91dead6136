//! Counting a run.

use super::{Count, Io};
use crate::observe::{Observer, Operation, Product, Tile, Transfer};

/// Counts what a schedule really loads, stores and computes: give it to
/// [`fa2::forward`](crate::schedule::fa2::forward) or another, then ask for [`Tally::io`].
#[derive(Clone, Debug, Default)]
pub struct Tally {
    io: Io,
}

impl Tally {
    /// What has been counted.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// What has been counted.
    pub fn into_io(self) -> Io {
        self.io
    }
}

fn count(transfer: &Transfer) -> Count {
    Count {
        tensor: transfer.tensor,
        element_bytes: transfer.element_bytes,
        loaded: 0,
        stored: 0,
    }
}

impl Observer for Tally {
    fn load(&mut self, transfer: Transfer) {
        self.io.add(Count {
            loaded: transfer.elements as u128,
            ..count(&transfer)
        });
    }

    fn store(&mut self, transfer: Transfer) {
        self.io.add(Count {
            stored: transfer.elements as u128,
            ..count(&transfer)
        });
    }

    fn skip(&mut self, _: &Tile) {
        self.io.work.skipped_tiles += 1;
    }

    fn product(&mut self, _: &Tile, product: Product) {
        let Product {
            rows,
            columns,
            inner,
            ..
        } = product;
        self.io.work.products += 1;
        self.io.work.multiply_adds += rows as u128 * columns as u128 * inner as u128;
    }

    fn operations(&mut self, operation: Operation, count: usize) {
        let work = &mut self.io.work;
        *match operation {
            Operation::Exp => &mut work.exps,
            Operation::Rescale => &mut work.rescales,
            Operation::Divide => &mut work.divisions,
            Operation::ScoreGradient => &mut work.score_gradients,
            Operation::DeltaTerm => &mut work.delta_terms,
        } += count as u128;
    }
}
