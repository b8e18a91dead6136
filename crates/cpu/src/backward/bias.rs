//! dbias: dS, summed up over the axes along which the bias was broadcast.
//!
//! A pass of its own, which makes S and dP again: two products more, and no more memory than dbias
//! itself. Heads come one after another in a fixed order; of a head, tiles of rows run in parallel, or
//! tiles of keys where all rows share a bias.

use std::ops::Range;
use std::sync::Mutex;

use tilewise_core::{Result, TensorViewMut};

use super::call::Call;
use super::keys::KeyRoom;
use super::rows::RowTile;
use crate::buffer::Buffer;
use crate::call::KvHead;
use crate::kernel::s_stride;
use crate::kernel::table::CpuElement;
use crate::parallel::{in_order, threads};

struct Scratch<T: CpuElement> {
    keys: KeyRoom<T>,
    rows: Buffer<T::Acc>,
    flags: Buffer<u8>,
}

/// Writes dbias.
pub(super) fn backward<T: CpuElement>(
    call: &Call<'_, T>,
    mut dbias: TensorViewMut<'_, T>,
) -> Result<()> {
    dbias.fill(T::default());
    let Some(shape) = call.inputs.inputs.bias.map(|bias| bias.shape()) else {
        return Ok(());
    };
    let (sizes, problem) = (&call.sizes, call.problem);
    let sums = Buffer::<f64>::new(shape.iter().product(), "dbias")?;
    let threads = threads();
    let mut scratches = (0..threads)
        .map(|_| {
            Ok(Scratch {
                keys: KeyRoom::new(sizes, false)?,
                rows: Buffer::new(sizes.room().elements, "rows of a tile")?,
                flags: Buffer::new(sizes.room().flags, "tile flags")?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let by_keys = shape[2] == 1 && shape[3] != 1;
    for at in call.kv_heads() {
        for n in 0..problem.dims().group() {
            let sequence = &problem.sequences()[at.sequence];
            let (rows, keys) = (
                sizes.row_tiles(sequence.seqlen_q),
                sequence.seqlen_k.div_ceil(sizes.shape.key_tile),
            );
            let items = if by_keys { keys } else { rows };
            // Where everything is summed up to one number, each item has its own.
            let alone = shape[2] == 1 && shape[3] == 1;
            let partial = Buffer::<f64>::new(if alone { items } else { 0 }, "dbias")?;
            let pool = Mutex::new(std::mem::take(&mut scratches));
            let used = Mutex::new(Vec::new());
            in_order(
                items,
                threads,
                || Returned {
                    scratch: pool.lock().unwrap_or_else(|e| e.into_inner()).pop(),
                    to: &used,
                },
                |_, scratch, item| {
                    let Some(scratch) = &mut scratch.scratch else {
                        return;
                    };
                    let (row_tiles, key_tiles) = match by_keys {
                        true => (0..rows, item..item + 1),
                        false => (item..item + 1, 0..keys),
                    };
                    let sum = Sum {
                        shape,
                        to: if alone {
                            // Inside the buffer: one number an item.
                            partial.at().wrapping_add(item)
                        } else {
                            sums.at()
                        },
                        alone,
                    };
                    // SAFETY: the scratch is this worker's; items of a head reach different sums.
                    unsafe {
                        call.begin();
                        add(call, at, n, row_tiles, key_tiles, scratch, &sum);
                        call.end();
                    }
                },
            );
            scratches = used.into_inner().unwrap_or_else(|e| e.into_inner());
            scratches.append(&mut pool.into_inner().unwrap_or_else(|e| e.into_inner()));
            if alone {
                let axis = |axis: usize, at: usize| if shape[axis] == 1 { 0 } else { at };
                let to = axis(0, sequence.q_batch) * shape[1] + axis(1, call.index(at, n));
                for item in 0..items {
                    // SAFETY: inside both buffers; no item is at work any more.
                    unsafe { *sums.at().add(to) += partial.at().add(item).read() }
                }
            }
        }
    }
    for row in 0..shape[0] * shape[1] * shape[2] {
        let (b, h, i) = (
            row / shape[2] / shape[1],
            row / shape[2] % shape[1],
            row % shape[2],
        );
        let to = dbias.row_mut(b, h, i);
        for (j, to) in to.iter_mut().take(shape[3]).enumerate() {
            // SAFETY: inside the buffer.
            *to = T::from_f64(unsafe { sums.at().add(row * shape[3] + j).read() });
        }
    }
    Ok(())
}

/// Gives a worker's scratch back when it is done.
struct Returned<'a, T: CpuElement> {
    scratch: Option<Scratch<T>>,
    to: &'a Mutex<Vec<Scratch<T>>>,
}

impl<T: CpuElement> Drop for Returned<'_, T> {
    fn drop(&mut self) {
        if let Some(scratch) = self.scratch.take() {
            let mut to = self.to.lock().unwrap_or_else(|e| e.into_inner());
            to.push(scratch);
        }
    }
}

/// Where dS is added.
struct Sum {
    shape: [usize; 4],
    to: *mut f64,
    /// `to` is one number for all.
    alone: bool,
}

/// Adds dS of some tiles of a head.
///
/// # Safety
/// The tiles belong to the head; no one else adds to the sums that they reach; the scratch is no one
/// else's; the processor has the kernels' instructions.
unsafe fn add<T: CpuElement>(
    call: &Call<'_, T>,
    at: KvHead,
    n: usize,
    row_tiles: Range<usize>,
    key_tiles: Range<usize>,
    scratch: &mut Scratch<T>,
    sum: &Sum,
) {
    let sequence = &call.problem.sequences()[at.sequence];
    let (sizes, head) = (&call.sizes, call.head(at, n));
    let axis = |axis: usize, at: usize| if sum.shape[axis] == 1 { 0 } else { at };
    let first = axis(0, sequence.q_batch) * sum.shape[1] + axis(1, call.index(at, n));
    // SAFETY: the caller's promise; rows and keys of the sequence lie inside the bias's shape.
    unsafe {
        let tile = RowTile::new(scratch.rows.at(), sizes.room(), scratch.flags.at());
        for row_tile in row_tiles {
            let rows = sizes.rows(row_tile, sequence.seqlen_q);
            let seen = sizes.key_tiles(&head.rule.keys(rows.clone()));
            if !key_tiles.clone().any(|tile| seen.contains(&tile)) {
                continue;
            }
            call.prepare(at, n, &rows, tile, &mut scratch.keys);
            for key_tile in key_tiles.clone().filter(|tile| seen.contains(tile)) {
                let range = sizes.keys(key_tile, sequence.seqlen_k);
                call.pack_keys(at, &range, &mut scratch.keys);
                let step = call.step((at, n), &head, &rows, &range, tile);
                let reach = call.weights(&step, &scratch.keys, true);
                for (r, i) in rows.clone().enumerate() {
                    let ds = scratch.keys.ds().add(r * s_stride::<T::Acc>());
                    let row = first * sum.shape[2] + axis(2, sequence.q_start + i);
                    for key in reach.lo..reach.hi {
                        let column = axis(3, sequence.k_start + range.start + key);
                        let to = if sum.alone {
                            sum.to
                        } else {
                            sum.to.add(row * sum.shape[3] + column)
                        };
                        *to += tilewise_core::Element::to_f64(ds.add(key).read());
                    }
                }
            }
        }
    }
}

// SAFETY: items share the pointer but not what they reach through it: see `add`.
unsafe impl Sync for Sum {}
