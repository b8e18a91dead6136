//! FlashAttention-2 (Dao 2023, Algorithm 1): for each tile of query rows, one pass over the keys with
//! Õ, m and ℓ on chip, one division at the end.
//!
//! K and V of a KV head are packed once and shared by the query tiles of its group. Packing and
//! tiles of all heads form one list that workers take from in order, with packing some heads ahead:
//! no barrier between heads, and packed memory for no more heads than are in flight.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewise_core::{Element, Result};

use crate::call::{Call, KvHead};
use crate::packed::Packed;
use crate::parallel::{in_order, threads};
use crate::schedule::decode;
use crate::shape::Shape;
use crate::tile::Scratch;

/// Keys that one item packs, at most: fewer where more workers would wait for it.
const KEYS_A_PACKING: usize = 1024;

/// What is left for the last workers is cut into this many parts of a tile of rows.
const LAST_PARTS: usize = 4;

enum Item {
    /// Tiles of keys of a KV head.
    Pack { head: usize, tiles: Range<usize> },
    /// Rows of a KV head's `n`th query head.
    Rows {
        head: usize,
        n: usize,
        rows: Range<usize>,
    },
}

/// How far a KV head has come.
struct Progress {
    packings_left: AtomicUsize,
    tiles_left: AtomicUsize,
}

/// Heads whose packed keys are alive at once.
pub(crate) fn heads_in_flight(threads: usize, heads: usize, tiles_a_head: usize) -> usize {
    if threads == 1 {
        return heads.min(1);
    }
    // One head finishing, those that the workers' tiles spread over, and one being packed.
    heads.min(2 + threads.div_ceil(tiles_a_head.max(1)))
}

/// Memory besides inputs and outputs.
pub(crate) fn workspace_bytes<T: Element>(
    shape: &Shape,
    heads: usize,
    group: usize,
    rows: usize,
    keys: usize,
) -> u64 {
    // Few rows may take the other schedule: whichever needs more.
    let few = decode::workspace_bytes::<T>(shape, heads, group * rows.min(decode::MOST_ROWS), keys);
    let threads = threads();
    let tiles = group * rows.div_ceil(shape.q_tile);
    let packed = Packed::<T>::bytes(shape, keys) as u64;
    let scratch = Scratch::<T>::bytes(shape, rows.min(shape.q_tile)) as u64;
    let many = heads_in_flight(threads, heads, tiles) as u64 * packed
        + threads as u64 * scratch
        + (heads * (tiles + keys.div_ceil(KEYS_A_PACKING)) * size_of::<Item>()) as u64;
    if group * rows <= decode::MOST_ROWS {
        many.max(few)
    } else {
        many
    }
}

/// Runs the call.
pub(crate) fn forward<T: Element>(call: &Call<'_, T>) -> Result<()> {
    let shape = &call.machinery.shape;
    let group = call.problem.dims().group();
    let (few, heads): (Vec<_>, Vec<_>) = call
        .kv_heads()
        .into_iter()
        .partition(|&at| decode::is_for(call, at));
    decode::forward(call, &few)?;
    if heads.is_empty() {
        return Ok(());
    }
    let threads = threads();
    let fewest_tiles = heads
        .iter()
        .map(|at| {
            group
                * call.problem.sequences()[at.sequence]
                    .seqlen_q
                    .div_ceil(shape.q_tile)
        })
        .min()
        .unwrap_or(1);
    let slots = heads_in_flight(threads, heads.len(), fewest_tiles);
    let ahead = slots.saturating_sub(2);
    let (items, progress) = plan(call, &heads, group, ahead, threads);

    let keys = call.most_keys();
    let packed: Vec<Packed<T>> = (0..slots)
        .map(|_| Packed::new(shape, keys))
        .collect::<Result<_>>()?;
    let workers = threads.min(items.len());
    let scratches = (0..workers)
        .map(|_| Scratch::new(shape, call.most_rows().min(shape.q_tile)).map(Some))
        .collect::<Result<Vec<_>>>()?;
    let scratches = std::sync::Mutex::new(scratches);

    in_order(
        items.len(),
        workers,
        || {
            let mut scratches = scratches.lock().unwrap_or_else(|e| e.into_inner());
            scratches
                .pop()
                .flatten()
                .expect("one scratch was made for each worker")
        },
        |crew, scratch, item| match &items[item] {
            Item::Pack { head, tiles } => {
                if *head >= slots {
                    crew.wait_for(&progress[head - slots].tiles_left);
                }
                if crew.failed() {
                    return;
                }
                let source = call.source(heads[*head]);
                // SAFETY: the head that had this slot is done with, and each tile is packed by one
                // item; the slot has room for the longest sequence.
                unsafe {
                    let machinery = &call.machinery;
                    packed[head % slots].pack(&machinery.kernels, shape, &source, tiles.clone());
                }
                progress[*head]
                    .packings_left
                    .fetch_sub(1, Ordering::Release);
            }
            Item::Rows { head, n, rows } => {
                crew.wait_for(&progress[*head].packings_left);
                if crew.failed() {
                    return;
                }
                let at = heads[*head];
                let query = call.head(at, *n);
                let keys = call.problem.sequences()[at.sequence].seqlen_k;
                let state = scratch.state();
                // SAFETY: the head's tiles are packed and stay so until this item is counted down;
                // the scratch is this worker's, and the rows are handed out once.
                unsafe {
                    state.begin(shape, rows.len());
                    let packed = &packed[head % slots];
                    let source = call.source(at);
                    call.machinery
                        .absorb(&query, &source, packed, rows, keys, scratch, state);
                    call.finish(at, *n, &query, rows.start, rows.len(), state, false);
                }
                progress[*head].tiles_left.fetch_sub(1, Ordering::Release);
            }
        },
    );
    Ok(())
}

/// The list of items: packing `ahead` heads before their rows, the heaviest rows of a head first.
fn plan<T: Element>(
    call: &Call<'_, T>,
    heads: &[KvHead],
    group: usize,
    ahead: usize,
    threads: usize,
) -> (Vec<Item>, Vec<Progress>) {
    let shape = &call.machinery.shape;
    let mut items = Vec::new();
    let mut progress = Vec::with_capacity(heads.len());
    let mut packings: Vec<Vec<Item>> = Vec::with_capacity(heads.len());
    let mut tiles: Vec<Vec<Item>> = Vec::with_capacity(heads.len());
    for (head, at) in heads.iter().enumerate() {
        let sequence = &call.problem.sequences()[at.sequence];
        let rule = call.problem.mask_rule(sequence);
        let seen = call.machinery.tiles(&rule.keys(0..sequence.seqlen_q));
        // The first heads are packed by as many workers as wait for them.
        let share = (seen.len() * ahead.max(1)).div_ceil(threads);
        let chunk = share.clamp(1, KEYS_A_PACKING.div_ceil(shape.key_tile));
        packings.push(
            seen.clone()
                .step_by(chunk)
                .map(|first| Item::Pack {
                    head,
                    tiles: first..(first + chunk).min(seen.end),
                })
                .collect(),
        );
        let mut rows: Vec<Range<usize>> = (0..sequence.seqlen_q)
            .step_by(shape.q_tile)
            .map(|first| first..(first + shape.q_tile).min(sequence.seqlen_q))
            .collect();
        rows.sort_by_key(|rows| std::cmp::Reverse(rule.keys(rows.clone()).len() * rows.len()));
        tiles.push(
            rows.iter()
                .flat_map(|rows| {
                    (0..group).map(|n| Item::Rows {
                        head,
                        n,
                        rows: rows.clone(),
                    })
                })
                .collect(),
        );
    }
    cut_the_last(&mut tiles, shape.q_tile.div_ceil(LAST_PARTS), threads);
    for (packings, tiles) in packings.iter().zip(&tiles) {
        progress.push(Progress {
            packings_left: AtomicUsize::new(packings.len()),
            tiles_left: AtomicUsize::new(tiles.len()),
        });
    }
    for packing in packings.iter_mut().take(ahead) {
        items.append(packing);
    }
    for (head, tiles) in tiles.iter_mut().enumerate() {
        if let Some(packing) = packings.get_mut(head + ahead) {
            items.append(packing);
        }
        items.append(tiles);
    }
    (items, progress)
}

/// Cuts the last `threads` tiles of rows, so that no worker still has a whole one when the others have
/// none. A row's bits do not depend on the tile it falls into.
fn cut_the_last(tiles: &mut [Vec<Item>], rows_a_part: usize, threads: usize) {
    if threads == 1 {
        return;
    }
    let mut left = threads;
    for tiles in tiles.iter_mut().rev() {
        let kept = tiles.len() - tiles.len().min(left);
        left -= tiles.len() - kept;
        for tile in tiles.split_off(kept) {
            let Item::Rows { head, n, rows } = tile else {
                unreachable!("only rows are cut");
            };
            tiles.extend(rows.clone().step_by(rows_a_part).map(|first| Item::Rows {
                head,
                n,
                rows: first..(first + rows_a_part).min(rows.end),
            }));
        }
        if left == 0 {
            return;
        }
    }
}
