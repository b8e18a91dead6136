//! FlashAttention-2 (Dao 2023, Algorithm 1): for each tile of query rows, one pass over the keys with
//! Õ, m and ℓ on chip, one division at the end.
//!
//! K and V of a KV head are packed once and shared by the query tiles of its group; who does what,
//! and when, is the subject of [`super::heads`].

use tilewise_core::{Element, Result};

use crate::call::{Call, KvHead};
use crate::packed::Packed;
use crate::parallel::{own, threads};
use crate::schedule::decode;
use crate::schedule::heads::{Heads, Parts, Progress, RowTile};
use crate::shape::Shape;
use crate::tile::Scratch;

/// Bytes of a packed head up to which each worker has one of its own. Where heads are larger, many
/// workers share some: what it costs to read keys that other cores have packed is lost in their rows,
/// and the memory is not.
const SMALL_HEAD: usize = 2 << 20;

/// Heads whose packed keys are alive at once.
pub(crate) fn heads_in_flight(threads: usize, heads: usize, tiles_a_head: usize) -> usize {
    if threads == 1 {
        return heads.min(1);
    }
    // One head finishing, those that the workers' tiles spread over, and one being packed.
    heads.min(2 + threads.div_ceil(tiles_a_head.max(1)))
}

/// Heads of a forward call whose packed keys are alive at once.
fn slots(workers: usize, heads: usize, tiles_a_head: usize, packed_bytes: usize) -> usize {
    let own = heads.min(workers);
    match packed_bytes <= SMALL_HEAD {
        true => own,
        false => own.min(heads_in_flight(workers, heads, tiles_a_head)),
    }
}

/// Memory besides inputs and outputs.
pub(crate) fn workspace_bytes<T: Element>(
    shape: &Shape,
    sequences: usize,
    heads: usize,
    group: usize,
    rows: usize,
    keys: usize,
) -> u64 {
    // Few rows may take the other schedule: whichever needs more.
    let few = decode::workspace_bytes::<T>(shape, heads, group * rows.min(decode::MOST_ROWS), keys);
    let threads = threads();
    let tiles = group * rows.div_ceil(shape.q_tile);
    let packed = Packed::<T>::bytes(shape, keys);
    let slots = slots(threads, heads, tiles, packed);
    let scratch = Scratch::<T>::bytes(shape, rows.min(shape.q_tile)) as u64;
    let many = slots as u64 * packed as u64
        + threads as u64 * scratch
        + (heads * size_of::<(Progress, KvHead)>()) as u64
        // The last heads' tiles are cut into up to some dozens more.
        + ((sequences + slots) * tiles * size_of::<RowTile>()) as u64
        + (slots * group * 64 * size_of::<RowTile>()) as u64;
    if group * rows <= decode::MOST_ROWS {
        many.max(few)
    } else {
        many
    }
}

/// Runs the call.
pub(crate) fn forward<T: Element>(call: &Call<'_, T>) -> Result<()> {
    let shape = &call.machinery.shape;
    let (few, heads): (Vec<_>, Vec<_>) = call
        .kv_heads()
        .into_iter()
        .partition(|&at| decode::is_for(call, at));
    decode::forward(call, &few)?;
    if heads.is_empty() {
        return Ok(());
    }
    let keys = call.most_keys();
    let plan = Plan::new(call, &heads, threads(), Packed::<T>::bytes(shape, keys));
    let packed: Vec<Packed<T>> = (0..plan.slots)
        .map(|_| Packed::new(shape, keys, call.reserve))
        .collect::<Result<_>>()?;
    let scratches = (0..plan.workers)
        .map(|_| {
            let rows = call.most_rows().min(shape.q_tile);
            Scratch::new(shape, rows, call.reserve).map(Some)
        })
        .collect::<Result<Vec<_>>>()?;
    let scratches = std::sync::Mutex::new(scratches);

    let parts: Vec<&Parts> = plan.order.iter().map(|&(_, n)| &plan.parts[n]).collect();
    Heads::new(&parts, plan.slots).work_off(
        plan.workers,
        || own(&scratches),
        |head, slot, tile| {
            let source = call.source(heads[plan.order[head].0]);
            let kernels = &call.machinery.kernels;
            // SAFETY: no other head has the slot, and each of its tiles is packed once; the slot has
            // room for the longest sequence.
            unsafe { packed[slot].pack(kernels, shape, &source, tile) }
        },
        |scratch, head, slot, RowTile { n, rows, .. }| {
            let at = heads[plan.order[head].0];
            let query = call.head(at, *n);
            let keys = call.problem.sequences()[at.sequence].seqlen_k;
            let state = scratch.state();
            // SAFETY: the head's tiles are packed and stay so until these rows are done; the scratch
            // is this worker's, and the rows are handed out once.
            unsafe {
                state.begin(shape, rows.len());
                let source = call.source(at);
                call.machinery
                    .absorb(&query, &source, &packed[slot], rows, keys, scratch, state);
                call.finish(at, *n, &query, rows.start, rows.len(), state, false);
            }
        },
    );
    Ok(())
}

/// What is to be done for each head, in which order, by how many.
struct Plan {
    workers: usize,
    slots: usize,
    /// Of heads that differ.
    parts: Vec<Parts>,
    /// Heads as they are opened: the heaviest first, so that no long one is left for the end; and
    /// their parts.
    order: Vec<(usize, usize)>,
}

impl Plan {
    fn new<T: Element>(
        call: &Call<'_, T>,
        heads: &[KvHead],
        threads: usize,
        packed_bytes: usize,
    ) -> Self {
        let mut parts: Vec<Parts> = Vec::new();
        let mut order = Vec::with_capacity(heads.len());
        let mut last = None;
        for (head, at) in heads.iter().enumerate() {
            let sequence = &call.problem.sequences()[at.sequence];
            let lengths = (sequence.seqlen_q, sequence.seqlen_k);
            if last != Some(lengths) {
                last = Some(lengths);
                parts.push(parts_of(call, *at));
            }
            order.push((head, parts.len() - 1));
        }
        order.sort_by_key(|&(_, n)| std::cmp::Reverse(parts[n].weight()));
        let items = order.iter().map(|&(_, n)| parts[n].len()).sum();
        let workers = threads.min(items);
        let fewest_tiles = parts.iter().map(|parts| parts.rows().len()).min();
        let slots = slots(
            workers,
            heads.len(),
            fewest_tiles.unwrap_or(1),
            packed_bytes,
        );
        if workers > 1 {
            let step = call.machinery.row_block();
            let first = order.len() - slots;
            let mut cut = None;
            for (_, n) in &mut order[first..] {
                if cut != Some(*n) {
                    cut = Some(*n);
                    let shrinking = parts[*n].shrinking(workers.div_ceil(slots), step);
                    parts.push(shrinking);
                }
                *n = parts.len() - 1;
            }
        }
        Plan {
            workers,
            slots,
            parts,
            order,
        }
    }
}

/// What is to be done for a head.
fn parts_of<T: Element>(call: &Call<'_, T>, at: KvHead) -> Parts {
    let sequence = &call.problem.sequences()[at.sequence];
    let rule = call.problem.mask_rule(sequence);
    let tile = call.machinery.shape.q_tile;
    let rows = (0..sequence.seqlen_q).step_by(tile).flat_map(|first| {
        let rows = first..(first + tile).min(sequence.seqlen_q);
        let weight = rule.keys(rows.clone()).len() * rows.len();
        (0..call.problem.dims().group()).map(move |n| RowTile {
            n,
            rows: rows.clone(),
            weight,
        })
    });
    let key_tiles = call.machinery.tiles(&rule.keys(0..sequence.seqlen_q));
    Parts::new(key_tiles, rows.collect())
}
