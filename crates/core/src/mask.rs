//! The one place that says which keys position and length leave live: causality, window and
//! sequence length. Every schedule and backend asks here.
//!
//! All three are bounds on j − i, so the live keys of a row are one interval, and both its ends
//! never move left as i grows. A boolean mask or a bias of −∞ can hide further keys inside it.

use std::ops::Range;

use crate::options::{Alignment, Options};

/// How much of a tile of rows × keys is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// No row sees a key: the tile is skipped.
    None,
    /// Every row sees every key: no element needs a test.
    All,
    /// The tile lies on an edge.
    Some,
}

/// Causality and window of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskRule {
    seqlen_q: usize,
    seqlen_k: usize,
    off: i128,
    left: Option<i128>,
    right: Option<i128>,
}

impl MaskRule {
    /// The rule for a sequence of `seqlen_q` rows and `seqlen_k` (used) keys.
    pub fn new(options: &Options, seqlen_q: usize, seqlen_k: usize) -> Self {
        let right = match (options.causal, options.window_right) {
            (true, _) => Some(0),
            (false, right) => right.map(|x| x as i128),
        };
        MaskRule {
            seqlen_q,
            seqlen_k,
            off: match options.alignment {
                Alignment::BottomRight => seqlen_k as i128 - seqlen_q as i128,
                Alignment::TopLeft => 0,
            },
            left: options.window_left.map(|x| x as i128),
            right,
        }
    }

    /// Rows of the sequence.
    pub fn seqlen_q(&self) -> usize {
        self.seqlen_q
    }

    /// Keys of the sequence.
    pub fn seqlen_k(&self) -> usize {
        self.seqlen_k
    }

    /// The key at which query `i` stands, i + off: may lie outside the keys.
    pub fn diagonal(&self, i: usize) -> i64 {
        (i as i128 + self.off) as i64
    }

    /// Whether every row sees every key.
    pub fn is_full(&self) -> bool {
        self.tile(0..self.seqlen_q, 0..self.seqlen_k) != Live::Some
    }

    /// The live keys of row `i`; empty (and starting at 0) if there is none.
    pub fn row(&self, i: usize) -> Range<usize> {
        let at = i as i128 + self.off;
        let n = self.seqlen_k as i128;
        let low = self.left.map_or(0, |left| (at - left).clamp(0, n));
        let high = self.right.map_or(n, |right| (at + right + 1).clamp(0, n));
        if low < high {
            low as usize..high as usize
        } else {
            0..0
        }
    }

    /// The keys that at least one of `rows` sees: the union of their intervals, gaps between them
    /// included.
    pub fn keys(&self, rows: Range<usize>) -> Range<usize> {
        // Only rows from `first` to `last` see anything: both interval ends move right with i.
        let live = |i: &usize| !self.row(*i).is_empty();
        if rows.is_empty() {
            return 0..0;
        }
        let (first, last) = self.live_rows(&rows);
        match first {
            Some(first) if live(&first) => self.row(first).start..self.row(last).end,
            _ => 0..0,
        }
    }

    /// First and last of `rows` that see a key.
    fn live_rows(&self, rows: &Range<usize>) -> (Option<usize>, usize) {
        // Row i is live iff at − left < n, at + right ≥ 0 (and n > 0, left + right ≥ 0): an interval.
        let n = self.seqlen_k as i128;
        if n == 0 || self.left.unwrap_or(0) + self.right.unwrap_or(0) < 0 {
            return (None, 0);
        }
        let mut first = rows.start as i128;
        let mut last = rows.end as i128 - 1;
        if let Some(right) = self.right {
            first = first.max(-self.off - right);
        }
        if let Some(left) = self.left {
            last = last.min(n - 1 + left - self.off);
        }
        if first > last {
            (None, 0)
        } else {
            (Some(first as usize), last as usize)
        }
    }

    /// How much of the tile is live.
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> Live {
        if rows.is_empty() || keys.is_empty() {
            return Live::None;
        }
        let union = self.keys(rows.clone());
        if union.is_empty() || union.start >= keys.end || union.end <= keys.start {
            return Live::None;
        }
        // The last row has the rightmost start, the first row the leftmost end.
        let (top, bottom) = (self.row(rows.start), self.row(rows.end - 1));
        if !top.is_empty()
            && !bottom.is_empty()
            && bottom.start <= keys.start
            && top.end >= keys.end
        {
            Live::All
        } else {
            Live::Some
        }
    }

    /// Number of live (row, key) pairs, in a time that does not depend on it.
    pub fn live_pairs(&self) -> u128 {
        let (Some(first), last) = self.live_rows(&(0..self.seqlen_q)) else {
            return 0;
        };
        let ends = match self.right {
            Some(right) => self.sum_of_places(first, last, self.off + right + 1),
            None => (last - first + 1) as u128 * self.seqlen_k as u128,
        };
        let starts = self
            .left
            .map(|left| self.sum_of_places(first, last, self.off - left));
        ends - starts.unwrap_or(0)
    }

    /// Σ of i + c, no less than 0 and no more than the keys, over the rows `first..=last`.
    fn sum_of_places(&self, first: usize, last: usize, c: i128) -> u128 {
        let (first, last, n) = (first as i128, last as i128, self.seqlen_k as i128);
        // Below `rise` the places are 0, from `level` on they are n.
        let (rise, level) = (first.max(1 - c), (n - c).clamp(first, last + 1));
        let count = (level - rise).max(0) as u128;
        let risen = match count {
            0 => 0,
            _ => {
                let both = (rise + c + level - 1 + c) as u128;
                // One of the two is even.
                if count.is_multiple_of(2) {
                    count / 2 * both
                } else {
                    count * (both / 2)
                }
            }
        };
        risen + (last + 1 - level) as u128 * n as u128
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options() -> impl Strategy<Value = Options> {
        (
            any::<bool>(),
            any::<bool>(),
            proptest::option::of(0usize..12),
            proptest::option::of(0usize..12),
        )
            .prop_map(|(causal, top_left, left, right)| {
                Options::new()
                    .causal(causal)
                    .alignment(if top_left {
                        Alignment::TopLeft
                    } else {
                        Alignment::BottomRight
                    })
                    .window_left(left)
                    .window_right(right)
            })
    }

    /// The definition, key by key.
    fn visible(options: &Options, sq: usize, sk: usize, i: usize, j: usize) -> bool {
        let off = match options.alignment {
            Alignment::BottomRight => sk as i64 - sq as i64,
            Alignment::TopLeft => 0,
        };
        let at = i as i64 + off;
        let j = j as i64;
        (!options.causal || j <= at)
            && options.window_left.is_none_or(|l| j >= at - l as i64)
            && options.window_right.is_none_or(|r| j <= at + r as i64)
    }

    /// Counting row by row would take years.
    #[test]
    fn pairs_of_any_lengths_are_counted_at_once() {
        let n = usize::MAX >> 1;
        let pairs = |options: &Options, rows, keys| MaskRule::new(options, rows, keys).live_pairs();
        let causal = Options::new().causal(true);
        let wide = n as u128;
        assert_eq!(pairs(&Options::new(), n, n), wide * wide);
        assert_eq!(pairs(&causal, n, n), wide * (wide + 1) / 2);
        assert_eq!(pairs(&causal, 3, n), 3 * wide - 3);
        assert_eq!(pairs(&causal.clone().window_left(1), n, n), 2 * wide - 1);
        assert_eq!(
            pairs(&Options::new().window_left(0).window_right(0), 5, n),
            5
        );
        let whole = Options::new()
            .window_left(usize::MAX)
            .window_right(usize::MAX);
        assert_eq!(
            pairs(&whole, usize::MAX, usize::MAX),
            (usize::MAX as u128).pow(2)
        );
        assert_eq!(pairs(&causal, n, 0) + pairs(&causal, 0, n), 0);
    }

    proptest! {
        #[test]
        fn rows_and_tiles_agree_with_the_definition(
            options in options(),
            sq in 1usize..20,
            sk in 0usize..20,
            cuts in (0usize..20, 0usize..20, 0usize..20, 0usize..20),
        ) {
            let rule = MaskRule::new(&options, sq, sk);
            for i in 0..sq {
                for j in 0..sk {
                    prop_assert_eq!(rule.row(i).contains(&j), visible(&options, sq, sk, i, j));
                }
            }
            let rows = cuts.0.min(cuts.1).min(sq)..cuts.0.max(cuts.1).min(sq);
            let keys = cuts.2.min(cuts.3).min(sk)..cuts.2.max(cuts.3).min(sk);
            let count = rows.clone()
                .flat_map(|i| keys.clone().map(move |j| (i, j)))
                .filter(|&(i, j)| visible(&options, sq, sk, i, j))
                .count();
            let union = rule.keys(rows.clone());
            let any: Vec<usize> = (0..sk).filter(|&j| rows.clone().any(|i| visible(&options, sq, sk, i, j))).collect();
            prop_assert_eq!(union.is_empty(), any.is_empty());
            if !any.is_empty() {
                prop_assert_eq!(union, any[0]..any[any.len() - 1] + 1);
            }
            match rule.tile(rows.clone(), keys.clone()) {
                Live::None => prop_assert_eq!(count, 0),
                Live::All => prop_assert_eq!(count, rows.len() * keys.len()),
                // A tile inside a gap between two rows' intervals may be called Some with no live key.
                Live::Some => prop_assert!(count < rows.len() * keys.len()),
            }
            let total: usize = (0..sq).map(|i| rule.row(i).len()).sum();
            prop_assert_eq!(rule.live_pairs(), total as u128);
        }
    }
}
