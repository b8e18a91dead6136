//! Dropout of the weights in a strip.

use tilewise_core::Float;
use tilewise_core::dropout::Philox;

use super::{Block, Plane, s_stride};

/// Which weights of a block are kept, and what they are multiplied by.
#[derive(Clone, Copy)]
pub(crate) struct Dropping<A> {
    /// Says what is kept by position, unless `mask` does.
    pub(crate) philox: Option<Philox>,
    /// Positions of row 0 and key 0 of the block within the sequence.
    pub(crate) row: usize,
    pub(crate) key: usize,
    /// 0 drops a weight; of row 0 and key 0 of the block.
    pub(crate) mask: Option<Plane<u8>>,
    pub(crate) scale: A,
}

impl<A> Dropping<A> {
    /// The same for a block that starts `rows` rows and `keys` keys later.
    pub(crate) fn moved(self, rows: usize, keys: usize) -> Self {
        Dropping {
            row: self.row + rows,
            key: self.key + keys,
            mask: self.mask.map(|mask| mask.moved(rows, keys)),
            ..self
        }
    }
}

/// Groups of four random words that are made at once.
const GROUPS: usize = 16;

/// Multiplies what each row sees in the strip by 0 or by the scale. What is dropped becomes +0
/// whatever it was.
///
/// # Safety
/// The strip is filled where rows see keys; the mask covers the block's rows and those keys.
#[inline(always)]
pub(crate) unsafe fn drop_out<A: Float>(block: &Block<A>, dropping: &Dropping<A>) {
    for row in 0..block.rows {
        let (lo, hi) = block.live[row];
        // SAFETY: the caller's promise.
        unsafe {
            let s = block.s.add(row * s_stride::<A>());
            let multiply = |key: usize, kept: bool| {
                let x = s.add(key);
                x.write(if kept {
                    x.read() * dropping.scale
                } else {
                    A::from_f64(0.0)
                });
            };
            match (&dropping.philox, dropping.mask) {
                (Some(philox), _) => {
                    let mut key = lo;
                    while key < hi {
                        let at = dropping.key + key;
                        let many = philox.keeps_many::<GROUPS>(dropping.row + row, at / 4);
                        let mut kept = [false; 4 * GROUPS];
                        for (n, kept) in kept.iter_mut().enumerate() {
                            *kept = many[n % 4][n / 4];
                        }
                        let end = hi.min(key + kept.len() - at % 4);
                        for (key, kept) in (key..end).zip(&kept[at % 4..]) {
                            multiply(key, *kept);
                        }
                        key = end;
                    }
                }
                (None, Some(mask)) => {
                    for key in lo..hi {
                        multiply(key, mask.moved(row, key).at.read() != 0);
                    }
                }
                (None, None) => {}
            }
        }
    }
}
