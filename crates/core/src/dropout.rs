//! Dropout of attention weights: which are kept.
//!
//! A weight is kept or dropped by what its position alone decides, so that forward, backward, every
//! backend and any tiling agree bit for bit without a mask being stored. The numbers are those of
//! Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2,
//! 3"): a counter of four 32-bit words is mixed with a key of two into four random words.
//!
//! | word | holds |
//! |---|---|
//! | counter 0 | key position / 4; the remainder says which of the four results is taken |
//! | counter 1 | row, within the sequence |
//! | counter 2 | sequence · num_heads + query head |
//! | counter 3 | low half of `offset` |
//! | key 0, 1 | low half of `seed`; its high half plus the high half of `offset` |
//!
//! Positions count within the sequence, which is the batch entry unless sequences are packed: a packed
//! batch drops what the same sequences padded drop. A weight is dropped if its word is below p · 2³².

use crate::allocate::allocate;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::problem::Problem;

/// Dropout of weights: after the softmax each is multiplied by 0 or by 1/(1 − p). lse is not touched.
///
/// A dropped key brings nothing to its row's output, whatever its value holds; its score counts in
/// lse as ever.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Dropout {
    /// Random numbers from position and seed; see the [module](self).
    Philox {
        /// Share of weights that is dropped, from 0 to below 1.
        p: f64,
        /// Seed.
        seed: u64,
        /// Which of a seed's sequences of masks: another for every layer and step, for example.
        offset: u64,
    },
    /// What [`Inputs::keep_mask`] keeps.
    Mask {
        /// Says how kept weights are scaled, from 0 to below 1; the mask says which are kept.
        p: f64,
    },
}

impl Dropout {
    /// The share of weights that is dropped.
    pub fn p(&self) -> f64 {
        match *self {
            Dropout::Philox { p, .. } | Dropout::Mask { p } => p,
        }
    }

    /// 1/(1 − p): what kept weights are multiplied by.
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.p())
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if (0.0..1.0).contains(&self.p()) {
            return Ok(());
        }
        Err(Error::option(
            "dropout",
            "p from 0 to below 1",
            self.p().to_string(),
        ))
    }

    /// What decides the weights of query head `head` of sequence number `sequence`; `None` if a mask
    /// does.
    pub fn philox(&self, sequence: usize, head: usize, num_heads: usize) -> Option<Philox> {
        match *self {
            Dropout::Philox { p, seed, offset } => Some(Philox {
                key: [
                    seed as u32,
                    ((seed >> 32) as u32).wrapping_add((offset >> 32) as u32),
                ],
                head: (sequence as u32)
                    .wrapping_mul(num_heads as u32)
                    .wrapping_add(head as u32),
                offset: offset as u32,
                threshold: (p * 4_294_967_296.0).round() as u64,
            }),
            Dropout::Mask { .. } => None,
        }
    }
}

/// [`Dropout::Philox`] of one head of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    head: u32,
    offset: u32,
    /// p · 2³².
    threshold: u64,
}

impl Philox {
    /// Whether keys `4·group .. 4·group + 4` are kept in row `row`.
    #[inline(always)]
    pub fn keeps_four(&self, row: usize, group: usize) -> [bool; 4] {
        philox4x32([group as u32, row as u32, self.head, self.offset], self.key)
            .map(|word| u64::from(word) >= self.threshold)
    }

    /// [`Self::keeps_four`] of the `N` groups from `group` on: element `[w][n]` is key `w` of group
    /// `group + n`. A register holds one word of each group, where the compiler makes vectors of it.
    #[inline(always)]
    pub fn keeps_many<const N: usize>(&self, row: usize, group: usize) -> [[bool; N]; 4] {
        let (mut a, mut b) = ([0; N], [row as u32; N]);
        let (mut c, mut d) = ([self.head; N], [self.offset; N]);
        for (n, a) in a.iter_mut().enumerate() {
            *a = (group as u32).wrapping_add(n as u32);
        }
        let mut key = self.key;
        for round in 0..10 {
            if round > 0 {
                key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
            }
            for n in 0..N {
                [a[n], b[n], c[n], d[n]] = philox_round([a[n], b[n], c[n], d[n]], key);
            }
        }
        [a, b, c, d].map(|words| words.map(|word| u64::from(word) >= self.threshold))
    }

    /// Whether key `key` is kept in row `row`.
    pub fn keeps(&self, row: usize, key: usize) -> bool {
        self.keeps_four(row, key / 4)[key % 4]
    }
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox4x32 with ten rounds.
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter = philox_round(counter, key);
    }
    counter
}

#[inline(always)]
fn philox_round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let wide = |n: usize, x: u32| u64::from(MULTIPLIERS[n]) * u64::from(x);
    let (a, b) = (wide(0, counter[0]), wide(1, counter[2]));
    [
        (b >> 32) as u32 ^ counter[1] ^ key[0],
        b as u32,
        (a >> 32) as u32 ^ counter[3] ^ key[1],
        a as u32,
    ]
}

/// The mask that the dropout of `problem` stands for: 1 = kept.
/// `[batch, num_heads, seqlen_q, seqlen_k]`, row-major; positions of no sequence hold 0.
/// `None` if there is no dropout.
///
/// # Errors
/// [`Error::OutOfMemory`] if the mask cannot be had, [`Error::Shape`] if `problem` is not the one
/// that `inputs` pose.
pub fn keep_mask<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>) -> Result<Option<Vec<u8>>> {
    problem.expect_posed(&Problem::new(inputs, problem.options())?)?;
    let Some(dropout) = problem.options().get_dropout() else {
        return Ok(None);
    };
    let dims = problem.dims();
    let (rows, keys) = (dims.seqlen_q, dims.seqlen_k);
    let shape = [dims.batch, dims.num_heads, rows, keys];
    let mut mask = allocate(&shape, "the dropout mask", 0u8)?;
    for (number, sequence) in problem.sequences().iter().enumerate() {
        for head in 0..dims.num_heads {
            let philox = dropout.philox(number, head, dims.num_heads);
            for i in 0..sequence.seqlen_q {
                let row = sequence.q_start + i;
                let at = ((sequence.q_batch * dims.num_heads + head) * rows + row) * keys
                    + sequence.k_start;
                for (j, to) in mask[at..][..sequence.seqlen_k].iter_mut().enumerate() {
                    *to = match (&philox, &inputs.keep_mask) {
                        (Some(philox), _) => philox.keeps(i, j).into(),
                        (None, Some(mask)) => {
                            let at = [sequence.q_batch, head, row, sequence.k_start + j];
                            u8::from(mask.at_broadcast(at) != 0)
                        }
                        (None, None) => 1,
                    };
                }
            }
        }
    }
    Ok(Some(mask))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_groups_are_what_each_is() {
        let dropout = Dropout::Philox {
            p: 0.4,
            seed: 0x1234_5678_9abc,
            offset: 7,
        };
        let philox = dropout.philox(2, 3, 8).unwrap();
        for (row, group) in [(0, 0), (17, 5), (1 << 20, u32::MAX as usize - 3)] {
            let many = philox.keeps_many::<9>(row, group);
            for n in 0..9 {
                assert_eq!(
                    many.map(|word| word[n]),
                    philox.keeps_four(row, group + n),
                    "{row} {group} {n}"
                );
            }
        }
    }

    /// Known answers of Random123's kat_vectors.
    #[test]
    fn philox_gives_the_published_numbers() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]
        );
        assert_eq!(
            philox4x32(
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0]
            ),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn the_share_dropped_is_p_and_other_seeds_drop_others() {
        let keeps = |p, seed, offset, head| {
            let dropout = Dropout::Philox { p, seed, offset };
            let philox = dropout.philox(1, head, 4).unwrap();
            (0..20_000).map(move |n| philox.keeps(n / 100, n % 100))
        };
        for p in [0.0, 0.1, 0.5, 0.9] {
            let kept = keeps(p, 7, 0, 0).filter(|&kept| kept).count() as f64 / 20_000.0;
            assert!((kept - (1.0 - p)).abs() < 0.012, "{p}: {kept}");
        }
        assert!(keeps(0.0, 7, 0, 0).all(|kept| kept));
        for (seed, offset, head) in [
            (8, 0, 0),
            (7, 1, 0),
            (7, 1 << 32, 0),
            (7 + (1 << 40), 0, 0),
            (7, 0, 1),
        ] {
            let differ = keeps(0.5, 7, 0, 0)
                .zip(keeps(0.5, seed, offset, head))
                .filter(|(a, b)| a != b)
                .count();
            assert!((9_000..11_000).contains(&differ), "{differ}");
        }
        assert!(Dropout::Mask { p: 1.0 }.validate().is_err());
        assert!(Dropout::Mask { p: f64::NAN }.validate().is_err());
        assert_eq!(Dropout::Mask { p: 0.75 }.scale(), 4.0);
    }
}
