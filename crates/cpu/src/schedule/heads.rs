//! Many KV heads shared out among workers.
//!
//! A worker opens a head, packs its keys and takes its tiles of rows, heaviest first: keys that one
//! core has packed are read by that core, and nobody waits for anybody. One that finds no head to open
//! helps with those that are open, packing included. A head's packed keys lie in one of a number of
//! slots until its last rows are done: memory for no more heads than are in flight.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::parallel::{Crew, on_each};

/// Some rows of a KV head's `n`th query head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowTile {
    pub(crate) n: usize,
    pub(crate) rows: Range<usize>,
    /// Pairs of query and key to be worked off.
    pub(crate) weight: usize,
}

/// What is to be done for a KV head.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    /// Tiles of keys to be packed.
    pub(crate) key_tiles: Range<usize>,
    /// The heaviest first.
    rows: Vec<RowTile>,
}

impl Parts {
    pub(crate) fn new(key_tiles: Range<usize>, mut rows: Vec<RowTile>) -> Self {
        rows.sort_by_key(|tile| Reverse(tile.weight));
        Parts { key_tiles, rows }
    }

    pub(crate) fn weight(&self) -> usize {
        self.rows.iter().map(|tile| tile.weight).sum()
    }

    /// The same for a head that is among the last, on which `workers` work: towards its end the tiles
    /// shrink, down to two steps of `step` rows, so that nobody has much to do when the others have
    /// nothing. A row's bits do not depend on the tile it falls into.
    pub(crate) fn shrinking(&self, workers: usize, step: usize) -> Parts {
        let mut left = self.weight();
        let mut rows = Vec::with_capacity(self.rows.len() + 8);
        for RowTile {
            n,
            rows: all,
            weight,
        } in self.rows.iter().cloned()
        {
            let a_row = weight / all.len().max(1);
            let mut first = all.start;
            while first < all.end {
                let share = left / (2 * workers);
                let fair = share.checked_div(a_row).unwrap_or(all.len());
                let fair = (fair / step).max(2) * step;
                // No sliver at the end.
                let end = match all.end - first < fair + step {
                    true => all.end,
                    false => first + fair,
                };
                left = left.saturating_sub(a_row * (end - first));
                rows.push(RowTile {
                    n,
                    rows: first..end,
                    weight: a_row * (end - first),
                });
                first = end;
            }
        }
        Parts {
            key_tiles: self.key_tiles.clone(),
            rows,
        }
    }

    pub(crate) fn rows(&self) -> &[RowTile] {
        &self.rows
    }

    /// Items there are.
    pub(crate) fn len(&self) -> usize {
        self.key_tiles.len() + self.rows.len()
    }
}

/// How far a head has come. A cache line of its own: other heads are other workers'.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Progress {
    slot: AtomicUsize,
    next_key_tile: AtomicUsize,
    key_tiles_left: AtomicUsize,
    next_rows: AtomicUsize,
    rows_left: AtomicUsize,
    workers: AtomicUsize,
}

/// Heads that are not open yet.
struct Unopened {
    next: usize,
    free_slots: Vec<usize>,
}

/// The heads of a call, in the order in which they are opened.
pub(crate) struct Heads<'a> {
    parts: &'a [&'a Parts],
    progress: Vec<Progress>,
    unopened: Mutex<Unopened>,
    /// Heads 0..opened are open or done.
    opened: AtomicUsize,
    /// All rows of those before are taken.
    first: AtomicUsize,
}

impl<'a> Heads<'a> {
    pub(crate) fn new(parts: &'a [&'a Parts], slots: usize) -> Self {
        let progress = parts.iter().map(|parts| Progress {
            key_tiles_left: parts.key_tiles.len().into(),
            rows_left: parts.rows.len().into(),
            ..Progress::default()
        });
        Heads {
            parts,
            progress: progress.collect(),
            unopened: Mutex::new(Unopened {
                next: 0,
                free_slots: (0..slots).collect(),
            }),
            opened: AtomicUsize::new(0),
            first: AtomicUsize::new(0),
        }
    }

    /// Works all of it off. `pack` gets head, slot and a tile of keys, `attend` head, slot and rows:
    /// after all of the head's tiles are packed, and before another head gets the slot.
    pub(crate) fn work_off<S>(
        &self,
        workers: usize,
        scratch: impl Fn() -> S + Sync,
        pack: impl Fn(usize, usize, usize) + Sync,
        attend: impl Fn(&mut S, usize, usize, &RowTile) + Sync,
    ) {
        on_each(workers, |crew| {
            let mut scratch = scratch();
            let mut head = None;
            let mut spins = 0;
            // The slot whose memory is in this core's cache, from head to head and from call to call.
            let own = rayon::current_thread_index().unwrap_or(0);
            while !crew.failed() {
                let found = head.is_some_and(|head| {
                    self.step(head, &pack, |slot, rows| {
                        attend(&mut scratch, head, slot, rows);
                    })
                });
                if found {
                    spins = 0;
                    continue;
                }
                if let Some(head) = head {
                    self.progress[head].workers.fetch_sub(1, Ordering::Relaxed);
                }
                head = self.open(own).or_else(|| self.neediest());
                if let Some(head) = head {
                    self.progress[head].workers.fetch_add(1, Ordering::Relaxed);
                } else {
                    if self.all_taken() {
                        return;
                    }
                    Crew::pause(&mut spins);
                }
            }
        });
    }

    /// Does one item of a head. Returns whether there was one: all may be taken, or others packing.
    fn step(
        &self,
        head: usize,
        pack: impl Fn(usize, usize, usize),
        attend: impl FnOnce(usize, &RowTile),
    ) -> bool {
        let (parts, progress) = (self.parts[head], &self.progress[head]);
        let slot = progress.slot.load(Ordering::Relaxed);
        if let Some(n) = take(&progress.next_key_tile, parts.key_tiles.len()) {
            pack(head, slot, parts.key_tiles.start + n);
            progress.key_tiles_left.fetch_sub(1, Ordering::Release);
            return true;
        }
        if progress.key_tiles_left.load(Ordering::Acquire) != 0 {
            return false;
        }
        let Some(n) = take(&progress.next_rows, parts.rows.len()) else {
            return false;
        };
        attend(slot, &parts.rows[n]);
        // Whoever gets the slot next sees that all have read its keys.
        if progress.rows_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.unopened().free_slots.push(slot);
        }
        true
    }

    /// Opens the next head, if there is one and a slot for it, `own` before others.
    fn open(&self, own: usize) -> Option<usize> {
        if self.opened.load(Ordering::Relaxed) == self.parts.len() {
            return None;
        }
        let mut unopened = self.unopened();
        let head = unopened.next;
        if head == self.parts.len() {
            return None;
        }
        let free = &mut unopened.free_slots;
        let at = free.iter().position(|&slot| slot == own);
        let slot = free.swap_remove(at.or_else(|| free.len().checked_sub(1))?);
        unopened.next += 1;
        self.progress[head].slot.store(slot, Ordering::Relaxed);
        self.opened.store(head + 1, Ordering::Release);
        Some(head)
    }

    /// The open head with the most tiles of rows a worker that nobody has taken, among those with
    /// something to do now.
    fn neediest(&self) -> Option<usize> {
        let opened = self.opened.load(Ordering::Acquire);
        let untaken = |head: usize| {
            let next = self.progress[head].next_rows.load(Ordering::Relaxed);
            self.parts[head].rows.len().saturating_sub(next)
        };
        let mut first = self.first.load(Ordering::Relaxed);
        while first < opened && untaken(first) == 0 {
            first += 1;
        }
        self.first.fetch_max(first, Ordering::Relaxed);
        let ready = |&head: &usize| {
            let progress = &self.progress[head];
            progress.next_key_tile.load(Ordering::Relaxed) < self.parts[head].key_tiles.len()
                || progress.key_tiles_left.load(Ordering::Relaxed) == 0
        };
        (first..opened)
            .filter(|&head| untaken(head) > 0)
            .filter(ready)
            .max_by_key(|&head| {
                let workers = 1 + self.progress[head].workers.load(Ordering::Relaxed);
                (untaken(head) << 16) / workers
            })
    }

    /// Whether no head is left to open, nor rows of an open one to take.
    fn all_taken(&self) -> bool {
        self.first.load(Ordering::Relaxed) == self.parts.len()
    }

    fn unopened(&self) -> std::sync::MutexGuard<'_, Unopened> {
        self.unopened.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The next of `len` items, if there is one.
fn take(next: &AtomicUsize, len: usize) -> Option<usize> {
    if next.load(Ordering::Relaxed) >= len {
        return None;
    }
    let n = next.fetch_add(1, Ordering::Relaxed);
    (n < len).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(group: usize, rows: usize, tile: usize, weight: impl Fn(usize) -> usize) -> Parts {
        let rows = (0..rows).step_by(tile).flat_map(|first| {
            let rows = first..(first + tile).min(rows);
            let weight = rows.clone().map(&weight).sum();
            (0..group).map(move |n| RowTile {
                n,
                rows: rows.clone(),
                weight,
            })
        });
        Parts::new(0..5, rows.collect())
    }

    #[test]
    fn shrinking_tiles_hold_every_row_once_and_end_small() {
        for (group, rows) in [(1, 1000), (3, 64), (4, 16), (2, 4096)] {
            for workers in [1, 2, 5] {
                let causal = tiles(group, rows, 192, |row| row + 1);
                let cut = causal.shrinking(workers, 12);
                let mut seen = vec![0; group * rows];
                for tile in cut.rows() {
                    assert!(tile.rows.len() <= 192 && !tile.rows.is_empty());
                    assert!(tile.rows.start.is_multiple_of(12) || tile.rows.start % 192 % 12 == 0);
                    for row in tile.rows.clone() {
                        seen[tile.n * rows + row] += 1;
                    }
                }
                assert!(
                    seen.iter().all(|&times| times == 1),
                    "{group} {rows} {workers}"
                );
                assert!(cut.rows().last().unwrap().rows.len() < 3 * 12);
                assert_eq!(cut.key_tiles, causal.key_tiles);
            }
        }
        // Rows that see nothing have no weight, and are there all the same.
        let nothing = tiles(1, 300, 192, |_| 0).shrinking(2, 12);
        assert_eq!(
            nothing.rows().iter().map(|t| t.rows.len()).sum::<usize>(),
            300
        );
    }

    /// Heads and workers in several proportions: all is done once, rows after the keys of their head
    /// alone, and no slot is packed anew before its rows are done.
    #[test]
    fn slots_are_reused_only_when_their_rows_are_done() {
        for (heads, slots, workers) in [(1, 1, 1), (1, 1, 4), (7, 2, 2), (9, 2, 5), (64, 4, 4)] {
            let parts: Vec<Parts> = (0..heads)
                .map(|head| tiles(1 + head % 2, 40 + head, 10, |_| 1))
                .collect();
            let refs: Vec<&Parts> = parts.iter().collect();
            // Head in a slot, tiles packed, rows done: of each slot.
            let state = Mutex::new(vec![(usize::MAX, 0, 0); slots]);
            let done = Mutex::new(vec![0; heads]);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(workers);
            pool.build().unwrap().install(|| {
                Heads::new(&refs, slots).work_off(
                    workers,
                    || (),
                    |head, slot, _| {
                        let at = &mut state.lock().unwrap()[slot];
                        if at.0 != head {
                            let before = parts.get(at.0).map_or(0, |parts| parts.rows().len());
                            assert!(at.0 == usize::MAX || (at.1, at.2) == (5, before));
                            *at = (head, 0, 0);
                        }
                        at.1 += 1;
                    },
                    |(), head, slot, tile| {
                        let at = state.lock().unwrap()[slot];
                        assert_eq!((at.0, at.1), (head, 5));
                        std::thread::yield_now();
                        done.lock().unwrap()[head] += tile.rows.len();
                        let at = &mut state.lock().unwrap()[slot];
                        assert_eq!(at.0, head);
                        at.2 += 1;
                    },
                );
            });
            for (head, rows) in done.into_inner().unwrap().into_iter().enumerate() {
                assert_eq!(rows, (1 + head % 2) * (40 + head));
            }
        }
    }
}
