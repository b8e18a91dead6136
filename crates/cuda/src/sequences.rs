//! Packed sequences and used lengths on the device: the table of sequences, and the row blocks that a
//! launch takes, heaviest first.

use std::cmp::Reverse;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use tilewise_core::problem::Sequence;
use tilewise_core::{Error, Problem, Result};

use crate::error::{allocation, unsupported};
use crate::kernels::Mask;
use crate::raw::{Args, Tensor};

/// One sequence, as `Sequence` in `place.cu` mirrors it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    q_batch: i32,
    q_row: i32,
    k_batch: i32,
    k_row: i32,
    sq: i32,
    sk: i32,
    lo_off: i32,
    hi_off: i32,
    diag: i32,
}

// SAFETY: repr(C) of integers only, the layout `struct Sequence` of place.cu has.
unsafe impl DeviceRepr for Entry {}

/// A row block of a sequence: numbers of both.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    sequence: i32,
    block: i32,
}

// SAFETY: repr(C) of integers only, read by the kernels as `int2`.
unsafe impl DeviceRepr for Work {}

/// Whether `problem` has rows or keys that a kernel must look up: it is packed, or uses fewer keys than
/// there are.
pub(crate) fn needed(problem: &Problem) -> bool {
    let all = problem.dims().seqlen_k;
    problem.is_packed() || problem.sequences().iter().any(|s| s.seqlen_k != all)
}

/// Bounds on live keys of one sequence: the kind, key − row of the first and the last, and the key at
/// which row 0 stands.
pub(crate) fn bounds(problem: &Problem, sequence: &Sequence) -> (Mask, i32, i32, i32) {
    let options = problem.options();
    let right = if options.is_causal() {
        Some(0)
    } else {
        options.get_window_right()
    };
    let rule = problem.mask_rule(sequence);
    let (mask, lo, hi) = Mask::of(&rule, options.get_window_left(), right);
    (mask, lo, hi, rule.diagonal(0) as i32)
}

/// The kind of bounds that serves every sequence.
pub(crate) fn mask(problem: &Problem) -> Mask {
    let kinds = problem.sequences().iter().map(|s| bounds(problem, s).0);
    kinds.max().unwrap_or(Mask::Full)
}

fn entry(problem: &Problem, sequence: &Sequence) -> Entry {
    let (_, lo_off, hi_off, diag) = bounds(problem, sequence);
    Entry {
        q_batch: sequence.q_batch as i32,
        q_row: sequence.q_start as i32,
        k_batch: sequence.k_batch as i32,
        k_row: sequence.k_start as i32,
        sq: sequence.seqlen_q as i32,
        sk: sequence.seqlen_k as i32,
        lo_off,
        hi_off,
        diag,
    }
}

/// The row blocks of `rows` rows of every sequence that is `taken`, those with the most live keys first.
fn work(problem: &Problem, rows: usize, taken: impl Fn(&Sequence) -> bool) -> Vec<Work> {
    let mut blocks = Vec::new();
    let own = |(_, sequence): &(usize, &Sequence)| taken(sequence);
    for (number, sequence) in problem.sequences().iter().enumerate().filter(own) {
        let rule = problem.mask_rule(sequence);
        for block in 0..sequence.seqlen_q.div_ceil(rows) {
            let first = block * rows;
            let keys = rule.keys(first..(first + rows).min(sequence.seqlen_q));
            let work = Work {
                sequence: number as i32,
                block: block as i32,
            };
            blocks.push((Reverse(keys.len()), work));
        }
    }
    // Equal ones stay in order, so that blocks of one sequence stand together.
    blocks.sort_by_key(|&(keys, _)| keys);
    blocks.into_iter().map(|(_, work)| work).collect()
}

/// Table and row blocks in device memory.
pub(crate) struct OnDevice {
    entries: CudaSlice<Entry>,
    work: CudaSlice<Work>,
    /// Row blocks.
    pub(crate) blocks: usize,
}

impl OnDevice {
    /// Those of `problem`'s sequences that are `taken`, for blocks of `rows` rows; `None` if there is no row.
    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        problem: &Problem,
        rows: usize,
        taken: impl Fn(&Sequence) -> bool,
    ) -> Result<Option<OnDevice>> {
        let work = work(problem, rows, taken);
        if work.is_empty() {
            return Ok(None);
        }
        let entries: Vec<Entry> = problem
            .sequences()
            .iter()
            .map(|sequence| entry(problem, sequence))
            .collect();
        crate::ops::uncaptured(stream, || "packed sequences and used lengths")?;
        let failed = |bytes| move |e| allocation("the table of sequences", bytes, e);
        Ok(Some(OnDevice {
            entries: stream
                .clone_htod(&entries)
                .map_err(failed(size_of_val(&entries[..]) as u64))?,
            work: stream
                .clone_htod(&work)
                .map_err(failed(size_of_val(&work[..]) as u64))?,
            blocks: work.len(),
        }))
    }

    /// Names them in a kernel's arguments.
    pub(crate) fn place(&self, stream: &CudaStream, args: &mut Args) -> Result<()> {
        args.seqs = self.entries.device_ptr(stream).0;
        args.work = self.work.device_ptr(stream).0;
        args.row_blocks = i32::try_from(self.blocks)
            .map_err(|_| unsupported("so many row blocks in one call"))?;
        Ok(())
    }
}

/// The arguments of a call that takes `sequence` alone, as batch entry 0 of tensors that start with it.
pub(crate) fn alone(problem: &Problem, number: usize, args: &Args) -> Args {
    let sequence = &problem.sequences()[number];
    let size = problem.dtype().size() as i64;
    let at = |t: Tensor, batch: usize, rows: usize, keys: usize, size: i64| {
        let elements = batch as i64 * t.sb + rows as i64 * t.ss + keys as i64 * t.sd;
        Tensor {
            ptr: if t.ptr == 0 {
                0
            } else {
                t.ptr.wrapping_add_signed(elements * size)
            },
            ..t
        }
    };
    let q = |t, size| at(t, sequence.q_batch, sequence.q_start, 0, size);
    let k = |t| at(t, sequence.k_batch, sequence.k_start, 0, size);
    let pair = |t, size| {
        at(
            t,
            sequence.q_batch,
            sequence.q_start,
            sequence.k_start,
            size,
        )
    };
    let (_, lo_off, hi_off, diag) = bounds(problem, sequence);
    let rows = sequence.q_batch as u64 * args.heads as u64 * args.lse_ld as u64;
    Args {
        q: q(args.q, size),
        o: q(args.o, size),
        k: k(args.k),
        v: k(args.v),
        bias: pair(args.bias, size),
        mask: pair(args.mask, 1),
        keep: pair(args.keep, 1),
        lse: if args.lse == 0 {
            0
        } else {
            args.lse + (rows + sequence.q_start as u64) * 4
        },
        batch: 1,
        sq: sequence.seqlen_q as i32,
        sk: sequence.seqlen_k as i32,
        lo_off,
        hi_off,
        diag,
        pairs: args.heads,
        seq0: number as i32,
        ..*args
    }
}

/// Rows along the seqlen axis that belong to no sequence: those after the last of a packed call.
pub(crate) fn rows_beyond(problem: &Problem) -> std::ops::Range<usize> {
    let rows = problem.dims().seqlen_q;
    let used = if problem.is_packed() {
        let ends = problem.sequences().iter().map(|s| s.q_start + s.seqlen_q);
        ends.max().unwrap_or(0)
    } else {
        rows
    };
    used..rows
}

/// Refuses sequences whose positions the kernels cannot count.
pub(crate) fn check(problem: &Problem) -> Result<(), Error> {
    if problem.sequences().len() > i32::MAX as usize {
        return Err(unsupported("so many sequences"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewise_core::{Inputs, Options, TensorView};

    #[test]
    fn heavy_blocks_come_first_and_each_comes_once() {
        let data = vec![0f32; 700 * 8];
        let view = TensorView::bhsd(&data, [1, 1, 700, 8]).unwrap();
        let (cu_q, cu_k) = ([0, 100, 100, 400], [0, 300, 310, 700]);
        let inputs = Inputs::new(view, view, view).packed(&cu_q, &cu_k);
        let problem = Problem::new(&inputs, &Options::new().causal(true)).unwrap();
        assert!(needed(&problem));
        assert_eq!(rows_beyond(&problem), 400..700);
        let blocks = work(&problem, 64, |_| true);
        assert_eq!(blocks.len(), 2 + 5);
        let keys = |w: &Work| {
            let sequence = &problem.sequences()[w.sequence as usize];
            let first = w.block as usize * 64;
            let rule = problem.mask_rule(sequence);
            rule.keys(first..(first + 64).min(sequence.seqlen_q)).len()
        };
        assert!(blocks.is_sorted_by_key(|w| Reverse(keys(w))));
        let mut numbers: Vec<_> = blocks.iter().map(|w| (w.sequence, w.block)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 7);
        assert_eq!(mask(&problem), Mask::Upper);
    }

    #[test]
    fn one_sequence_alone_starts_where_it_lies() {
        let data = vec![0f32; 20 * 4];
        let view = TensorView::bhsd(&data, [1, 1, 20, 4]).unwrap();
        let (cu_q, cu_k) = ([0, 5, 20], [0, 7, 15]);
        let inputs = Inputs::new(view, view, view).packed(&cu_q, &cu_k);
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        let dense = |ptr| Tensor {
            ptr,
            sb: 80,
            sh: 80,
            ss: 4,
            sd: 1,
        };
        let args = Args {
            q: dense(1000),
            k: dense(2000),
            heads: 1,
            lse: 4000,
            lse_ld: 20,
            ..Args::default()
        };
        let second = alone(&problem, 1, &args);
        assert_eq!((second.q.ptr, second.k.ptr), (1000 + 80, 2000 + 112));
        assert_eq!((second.lse, second.bias.ptr), (4000 + 20, 0));
        assert_eq!((second.sq, second.sk, second.seq0), (15, 8, 1));
    }
}
