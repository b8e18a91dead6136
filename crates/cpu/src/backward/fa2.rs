//! The order of work over threads.
//!
//! Of each KV head first its tiles of rows are made, then its tiles of keys are worked off. All heads
//! form one list that workers take from in order, with rows made some heads ahead. A tile of keys goes
//! through the rows from last to first: under causality tiles of keys then start together, and none
//! waits longer than a step for the one before it.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewise_core::{Element, GradientsMut, Problem, Result};

use super::bias;
use super::call::{Call, LANES, Sizes};
use super::keys::KeyRoom;
use super::rows::RowTile;
use super::target::Target;
use crate::buffer::Buffer;
use crate::call::KvHead;
use crate::kernel::table::CpuElement;
use crate::parallel::{Crew, in_order, threads};
use crate::schedule::fa2::heads_in_flight;

/// Tiles of rows that one item makes.
const TILES_A_PREPARATION: usize = 8;

enum Item {
    /// Tiles of rows of a KV head's `n`th query head.
    Prepare {
        head: usize,
        n: usize,
        tiles: Range<usize>,
    },
    /// A tile of keys of a KV head.
    Keys { head: usize, tile: usize },
}

/// How far a KV head has come.
struct Progress {
    preparations_left: AtomicUsize,
    key_tiles_left: AtomicUsize,
}

/// Room for the rows of one KV head: all tiles of all query heads of its group.
struct HeadRoom<T: Element> {
    tiles: Buffer<T::Acc>,
    flags: Buffer<u8>,
    turns: Vec<Turns>,
}

/// How far dQ of a tile of rows has come.
#[derive(Default)]
struct Turns {
    /// Tiles of keys that have added to each of its sums.
    of: [AtomicUsize; LANES],
    /// Tiles of keys that have yet to add to any.
    left: AtomicUsize,
}

/// Tiles of rows of a KV head, of the longest sequence.
fn most_tiles(sizes: &Sizes, problem: &Problem) -> usize {
    let rows = problem.sequences().iter().map(|s| s.seqlen_q).max();
    problem.dims().group() * sizes.row_tiles(rows.unwrap_or(0))
}

/// Heads whose rows are alive at once.
fn slots(sizes: &Sizes, problem: &Problem, threads: usize, heads: usize) -> usize {
    let keys = problem.sequences().iter().map(|s| s.seqlen_k).min();
    heads_in_flight(
        threads,
        heads,
        keys.unwrap_or(1).div_ceil(sizes.shape.key_tile),
    )
}

/// Memory besides inputs and outputs.
pub(super) fn workspace_bytes<T: Element>(sizes: &Sizes, problem: &Problem) -> u64 {
    let threads = threads();
    let heads = problem.sequences().len() * problem.dims().num_kv_heads;
    let rooms = slots(sizes, problem, threads, heads) * most_tiles(sizes, problem);
    let room = sizes.room();
    let of_rows = rooms * (room.elements * size_of::<T::Acc>() + room.flags + size_of::<Turns>());
    (of_rows + threads * KeyRoom::<T>::bytes(sizes)) as u64
}

/// Where the gradients of a call go.
struct Targets<'a, T> {
    dq: Target<'a, T>,
    dk: Target<'a, T>,
    dv: Target<'a, T>,
}

/// Runs the call.
pub(super) fn backward<T: CpuElement>(
    call: &Call<'_, T>,
    gradients: GradientsMut<'_, T>,
) -> Result<()> {
    let (sizes, problem) = (&call.sizes, call.problem);
    let threads = threads();
    let heads = call.kv_heads();
    let slots = slots(sizes, problem, threads, heads.len());
    let tiles = most_tiles(sizes, problem);
    let room = sizes.room();
    // Preparation writes what is read, so that all workers share in the first touch of these pages.
    let rooms = (0..slots)
        .map(|_| {
            Ok(HeadRoom::<T> {
                tiles: call
                    .reserve
                    .buffer(tiles * room.elements, "rows of a head")?,
                flags: call.reserve.buffer(tiles * room.flags, "tile flags")?,
                turns: (0..tiles).map(|_| Turns::default()).collect(),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let (items, progress) = plan(call, &heads, slots.saturating_sub(2));
    let workers = threads.min(items.len());
    let softcap = problem.options().get_softcap().is_some();
    let scratches = (0..workers.max(1))
        .map(|_| KeyRoom::new(sizes, softcap))
        .collect::<Result<Vec<_>>>()?;
    // A sum for each tile of rows: added up in order in the end.
    let sinks = Buffer::<f64>::new(heads.len() * tiles, "gradients of sinks")?;
    let targets = Targets {
        dq: Target::new(gradients.dq),
        dk: Target::new(gradients.dk),
        dv: Target::new(gradients.dv),
    };
    // SAFETY: no item writes rows that belong to no sequence.
    unsafe {
        targets.dq.clear_rows_of_no_sequence(problem, true);
        targets.dk.clear_rows_of_no_sequence(problem, false);
        targets.dv.clear_rows_of_no_sequence(problem, false);
    }

    let work = Work {
        call,
        heads: &heads,
        rooms: &rooms,
        progress: &progress,
        targets: &targets,
        sinks: &sinks,
        tiles,
    };
    let pool = Mutex::new(scratches);
    in_order(
        items.len(),
        workers,
        || {
            let mut pool = pool.lock().unwrap_or_else(|e| e.into_inner());
            pool.pop().expect("one scratch was made for each worker")
        },
        |crew, scratch, item| match &items[item] {
            Item::Prepare { head, n, tiles } => work.prepare(crew, scratch, *head, *n, tiles),
            Item::Keys { head, tile } => {
                crew.wait_for(&progress[*head].preparations_left);
                if crew.failed() {
                    return;
                }
                // SAFETY: the processor has the kernels' instructions.
                unsafe {
                    call.begin();
                    work.keys(crew, scratch, *head, *tile);
                    call.end();
                }
            }
        },
    );

    if let Some(dsinks) = gradients.dsinks {
        let mut sums = vec![0.0; dsinks.len()];
        for (number, at) in heads.iter().enumerate() {
            let rows = problem.sequences()[at.sequence].seqlen_q;
            let each = sizes.row_tiles(rows);
            for n in 0..problem.dims().group() {
                for tile in 0..each {
                    // SAFETY: inside the buffer; written by the preparation of this tile.
                    let sum = unsafe { sinks.at().add(number * tiles + n * each + tile).read() };
                    sums[call.index(*at, n)] += sum;
                }
            }
        }
        for (to, sum) in dsinks.iter_mut().zip(sums) {
            *to = sum as f32;
        }
    }
    if let Some(dbias) = gradients.dbias {
        bias::backward(call, dbias)?;
    }
    Ok(())
}

struct Work<'a, T: Element> {
    call: &'a Call<'a, T>,
    heads: &'a [KvHead],
    rooms: &'a [HeadRoom<T>],
    progress: &'a [Progress],
    targets: &'a Targets<'a, T>,
    sinks: &'a Buffer<f64>,
    /// Tiles of rows a room has.
    tiles: usize,
}

impl<T: CpuElement> Work<'_, T> {
    /// The tile number `tile` of a room.
    fn tile(&self, slot: usize, tile: usize) -> RowTile<T::Acc> {
        let (room, rooms) = (self.call.sizes.room(), &self.rooms[slot]);
        assert!(tile < self.tiles);
        // SAFETY: the buffers were made for this many tiles.
        unsafe {
            RowTile::new(
                rooms.tiles.at().add(tile * room.elements),
                room,
                rooms.flags.at().add(tile * room.flags),
            )
        }
    }

    fn prepare(
        &self,
        crew: &Crew,
        scratch: &mut KeyRoom<T>,
        head: usize,
        n: usize,
        tiles: &Range<usize>,
    ) {
        let slots = self.rooms.len();
        if head >= slots {
            crew.wait_for(&self.progress[head - slots].key_tiles_left);
        }
        if crew.failed() {
            return;
        }
        let (call, at) = (self.call, self.heads[head]);
        let sequence = &call.problem.sequences()[at.sequence];
        let each = call.sizes.row_tiles(sequence.seqlen_q);
        let rule = call.problem.mask_rule(sequence);
        for tile in tiles.clone() {
            let rows = call.sizes.rows(tile, sequence.seqlen_q);
            let number = n * each + tile;
            let seen = call.sizes.key_tiles(&rule.keys(rows.clone()));
            let turns = &self.rooms[head % slots].turns[number];
            turns.left.store(seen.len(), Ordering::Relaxed);
            for turn in &turns.of {
                turn.store(0, Ordering::Relaxed);
            }
            let room = self.tile(head % slots, number);
            // SAFETY: the head that had this slot is done with; each tile is made by one item; the
            // scratch is this worker's; a tile's sum is its own.
            unsafe {
                let sink = call.prepare(at, n, &rows, room, scratch);
                self.sinks.at().add(head * self.tiles + number).write(sink);
            }
            if seen.is_empty() {
                for row in rows {
                    let place = [sequence.q_batch, call.index(at, n), sequence.q_start + row];
                    // SAFETY: no tile of keys meets these rows, so no one else writes them.
                    unsafe { self.targets.dq.clear(place) }
                }
            }
        }
        self.progress[head]
            .preparations_left
            .fetch_sub(1, Ordering::Release);
    }

    /// # Safety
    /// The rows of the head are made, and [`Call::begin`] was called.
    unsafe fn keys(&self, crew: &Crew, scratch: &mut KeyRoom<T>, head: usize, key_tile: usize) {
        let (call, at) = (self.call, self.heads[head]);
        let sequence = &call.problem.sequences()[at.sequence];
        let each = call.sizes.row_tiles(sequence.seqlen_q);
        let range = call.sizes.keys(key_tile, sequence.seqlen_k);
        let rule = call.problem.mask_rule(sequence);
        let slot = head % self.rooms.len();
        // SAFETY: the head's rows are made and stay so until this item is counted down; the scratch
        // is this worker's; dQ of a tile is this item's while it has the turn; the keys are handed
        // out once.
        unsafe {
            call.pack_keys(at, &range, scratch);
            call.begin_keys(scratch);
            for n in 0..call.problem.dims().group() {
                let query = call.head(at, n);
                for tile in (0..each).rev() {
                    let rows = call.sizes.rows(tile, sequence.seqlen_q);
                    let seen = call.sizes.key_tiles(&rule.keys(rows.clone()));
                    if !seen.contains(&key_tile) {
                        continue;
                    }
                    let number = n * each + tile;
                    let room = self.tile(slot, number);
                    let step = call.step((at, n), &query, &rows, &range, room);
                    let reach = call.weights(&step, scratch, false);
                    call.collect(&step, reach, scratch);
                    let turns = &self.rooms[slot].turns[number];
                    let (turn, lane) = (
                        (key_tile - seen.start) / LANES,
                        (key_tile - seen.start) % LANES,
                    );
                    if !wait_for_turn(crew, &turns.of[lane], turn) {
                        return;
                    }
                    call.add_to_rows(&step, lane, scratch);
                    turns.of[lane].store(turn + 1, Ordering::Release);
                    // The last to add, of all sums, rounds what they come to.
                    if turns.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                        let place = |row| [sequence.q_batch, call.index(at, n), row];
                        call.join(rows.len(), seen.len(), room);
                        for (r, row) in rows.enumerate() {
                            let from = room.dq(0).add(r * call.sizes.width_q);
                            self.store(&self.targets.dq, place(sequence.q_start + row), from);
                        }
                    }
                }
            }
            let [dk, dv] = scratch.sums();
            for (r, key) in range.enumerate() {
                let place = [sequence.k_batch, at.kv_head, sequence.k_start + key];
                self.store(&self.targets.dk, place, dk.add(r * call.sizes.width_q));
                self.store(&self.targets.dv, place, dv.add(r * call.sizes.shape.width));
            }
        }
        self.progress[head]
            .key_tiles_left
            .fetch_sub(1, Ordering::Release);
    }

    /// Rounds a row of sums to T.
    ///
    /// # Safety
    /// The row lies inside the target and no one else writes it; the processor has the kernels'
    /// instructions.
    unsafe fn store(&self, target: &Target<'_, T>, place: [usize; 3], from: *const T::Acc) {
        let one = <T::Acc as Element>::from_f64(1.0);
        let width = target.width();
        if width > 0 {
            // SAFETY: the caller's promise; an output row is contiguous.
            unsafe { (self.call.kernels.finish)(from, one, width, target.at(place)) }
        }
    }
}

/// Waits until `turn` earlier tiles of keys have added to the tile of rows: they are held by workers
/// that run. Whether they did; not, if one of them panicked.
fn wait_for_turn(crew: &Crew, turns: &AtomicUsize, turn: usize) -> bool {
    let mut spins = 0u32;
    while turns.load(Ordering::Acquire) != turn {
        if crew.failed() {
            return false;
        }
        spins += 1;
        if spins < 200 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
    true
}

/// The list of items: rows `ahead` heads before their keys.
fn plan<T: CpuElement>(
    call: &Call<'_, T>,
    heads: &[KvHead],
    ahead: usize,
) -> (Vec<Item>, Vec<Progress>) {
    let group = call.problem.dims().group();
    let mut items = Vec::new();
    let mut progress = Vec::with_capacity(heads.len());
    let mut preparations: Vec<Vec<Item>> = Vec::with_capacity(heads.len());
    let mut key_tiles = Vec::with_capacity(heads.len());
    for (head, at) in heads.iter().enumerate() {
        let sequence = &call.problem.sequences()[at.sequence];
        let each = call.sizes.row_tiles(sequence.seqlen_q);
        preparations.push(
            (0..group)
                .flat_map(|n| {
                    (0..each)
                        .step_by(TILES_A_PREPARATION)
                        .map(move |first| (n, first))
                })
                .map(|(n, first)| Item::Prepare {
                    head,
                    n,
                    tiles: first..(first + TILES_A_PREPARATION).min(each),
                })
                .collect(),
        );
        key_tiles.push(sequence.seqlen_k.div_ceil(call.sizes.shape.key_tile));
        progress.push(Progress {
            preparations_left: AtomicUsize::new(preparations[head].len()),
            key_tiles_left: AtomicUsize::new(key_tiles[head]),
        });
    }
    for preparation in preparations.iter_mut().take(ahead) {
        items.append(preparation);
    }
    for (head, &tiles) in key_tiles.iter().enumerate() {
        if let Some(preparation) = preparations.get_mut(head + ahead) {
            items.append(preparation);
        }
        items.extend((0..tiles).map(|tile| Item::Keys { head, tile }));
    }
    (items, progress)
}
