//! Keys and values that stay in host memory: a forward that streams them through the device in chunks,
//! within a budget of device memory.
//!
//! The rows of a few heads keep their state (m, ℓ, Õ) on the device while chunk after chunk of their keys
//! passes by: `gather` brings a chunk over while another is folded in. Chunks are cut at absolute positions
//! that follow from the budget and the shape of one head alone: a row's bits do not depend on the batch
//! or on how many heads go together.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtrMut as _, DeviceRepr, ValidAsZeroBits,
};
use tilewise_core::{
    Dims, Element, Error, Inputs, Problem, Result, Sequence, TensorViewMut, reserve,
};

use crate::backend::{CudaBackend, device_zeros, fetch};
use crate::error::{allocation, driver, unsupported};
use crate::gather::{Chunk, Gatherers, Source, Turns};
use crate::state::{CudaState, DeviceBlock, stateless};
use crate::view::{DeviceView, contiguous, tensor};

/// K of one head in a chunk has at most this many bytes: long enough for the bus, short enough to start.
const MOST_BYTES: usize = 8 << 20;
/// K and V of a chunk, all its heads together.
const MOST_STAGED: usize = 128 << 20;
/// Chunks are multiples of this, which every tile divides.
const KEYS: usize = 128;
/// Chunks in flight.
const STAGES: usize = 2;

/// Whether a problem can be streamed.
///
/// # Errors
/// [`Error::Unsupported`] naming the first thing that stands against it.
pub(crate) fn supports(problem: &Problem) -> Result<()> {
    if problem.has_bias() || problem.has_mask() {
        return Err(unsupported(
            "a bias or a boolean mask where keys are streamed from host memory",
        ));
    }
    if problem.options().get_dropout().is_some() {
        return Err(unsupported(
            "dropout where keys are streamed from host memory",
        ));
    }
    // Rows are held as a running state.
    problem
        .sequences()
        .iter()
        .try_for_each(|sequence| stateless(&part(problem, sequence, 1)?))
}

/// The problem of `heads` K and V heads of one sequence.
fn part(problem: &Problem, sequence: &Sequence, heads: usize) -> Result<Problem> {
    let dims = problem.dims();
    let dims = Dims {
        batch: 1,
        num_heads: dims.group() * heads,
        num_kv_heads: heads,
        seqlen_q: sequence.seqlen_q,
        seqlen_k: sequence.seqlen_k,
        ..*dims
    };
    let options = problem.options();
    if options.get_alibi_slopes().is_some() || options.get_sinks().is_some() {
        return Err(unsupported(
            "alibi_slopes or sinks where keys are streamed from host memory",
        ));
    }
    Problem::dense(dims, problem.dtype(), options)
}

/// How one sequence is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Keys a chunk.
    keys: usize,
    /// K and V heads that go together.
    heads: usize,
}

/// Bytes of device memory that rows of `heads` K and V heads take while keys pass by: q, (m, ℓ, Õ), and
/// two sets of out and lse, one of which is on its way back.
fn rows_bytes(dims: &Dims, size: usize, heads: usize) -> u64 {
    let rows = (dims.group() * heads) as u64 * dims.seqlen_q as u64;
    let state = (dims.head_dim_v as u64 + 2) * 4;
    let out = dims.head_dim_v as u64 * size as u64 + 4;
    rows * (dims.head_dim as u64 * size as u64 + state + 2 * out)
}

/// The cut of a sequence with these sizes within `budget` bytes.
fn cut(dims: &Dims, size: usize, budget: u64) -> Result<Cut> {
    let key = ((dims.head_dim + dims.head_dim_v) * size).max(1);
    let rows = rows_bytes(dims, size, 1);
    let room = budget.saturating_sub(rows) / (STAGES * key) as u64;
    let most = MOST_BYTES * 2 / key;
    let keys = (room.min(most as u64) as usize / KEYS * KEYS)
        .min(dims.seqlen_k.next_multiple_of(KEYS).max(KEYS));
    if keys == 0 {
        return Err(Error::OutOfMemory {
            backend: crate::NAME.into(),
            what: format!(
                "the rows of one head and {STAGES} chunks of {KEYS} keys within a device-memory budget of {budget} bytes"
            ),
            bytes: rows + (STAGES * KEYS * key) as u64,
        });
    }
    let heads = (1..=dims.num_kv_heads)
        .take_while(|&heads| {
            let staged = heads * keys * key;
            heads == 1
                || staged <= MOST_STAGED
                    && rows_bytes(dims, size, heads) + (STAGES * staged) as u64 <= budget
        })
        .last()
        .unwrap_or(1);
    Ok(Cut { keys, heads })
}

/// Some heads of a sequence, with the keys that its rows see.
struct Unit<'p> {
    sequence: &'p Sequence,
    heads: Range<usize>,
    problem: Problem,
    cut: Cut,
}

/// A chunk of a unit's keys.
struct Job {
    unit: usize,
    keys: Range<usize>,
    /// First of the unit.
    first: bool,
    /// Last of the unit.
    last: bool,
}

fn units<'p>(problem: &'p Problem, budget: u64) -> Result<(Vec<Unit<'p>>, Vec<Job>)> {
    let (dims, size) = (problem.dims(), problem.dtype().size());
    let (mut units, mut jobs) = (Vec::new(), Vec::new());
    for sequence in problem.sequences() {
        if sequence.seqlen_q == 0 || dims.num_heads == 0 {
            continue;
        }
        let own = Dims {
            seqlen_q: sequence.seqlen_q,
            seqlen_k: sequence.seqlen_k,
            ..*dims
        };
        let cut = cut(&own, size, budget)?;
        let live = problem.mask_rule(sequence).keys(0..sequence.seqlen_q);
        let chunks = live.start / cut.keys..live.end.div_ceil(cut.keys);
        for first in (0..dims.num_kv_heads).step_by(cut.heads) {
            let heads = first..(first + cut.heads).min(dims.num_kv_heads);
            for chunk in chunks.clone() {
                jobs.push(Job {
                    unit: units.len(),
                    keys: (chunk * cut.keys).max(live.start)
                        ..((chunk + 1) * cut.keys).min(live.end),
                    first: chunk == chunks.start,
                    last: chunk + 1 == chunks.end,
                });
            }
            units.push(Unit {
                sequence,
                problem: part(problem, sequence, heads.len())?,
                heads,
                cut,
            });
        }
    }
    // Rows that see nothing need no job: out 0 and lse −∞ are written beforehand.
    Ok((units, jobs))
}

/// Device buffers of one stage and when they are free.
struct Stage {
    k: CudaSlice<u8>,
    v: CudaSlice<u8>,
    free: CudaEvent,
}

impl Stage {
    /// `bytes` of K and of V.
    fn new(backend: &CudaBackend, stream: &Arc<CudaStream>, bytes: [usize; 2]) -> Result<Stage> {
        Ok(Stage {
            k: device_zeros(stream, "a chunk of keys", bytes[0])?,
            v: device_zeros(stream, "a chunk of values", bytes[1])?,
            free: backend.new_event()?,
        })
    }

    /// Addresses alone: the events of this module and of `gather` order the streams.
    fn addresses(&mut self, stream: &Arc<CudaStream>) -> [CUdeviceptr; 2] {
        [&mut self.k, &mut self.v].map(|memory| {
            let (ptr, guard) = memory.device_ptr_mut(stream);
            std::mem::forget(guard);
            ptr
        })
    }
}

/// A unit whose rows are finished on the device and travel back.
struct Finished<T> {
    unit: usize,
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
    done: CudaEvent,
}

/// Attention with K and V streamed from host memory within `budget` bytes of device memory.
pub(crate) fn forward<T: Element + DeviceRepr + ValidAsZeroBits>(
    backend: &CudaBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    mut out: TensorViewMut<'_, T>,
    mut lse: Option<TensorViewMut<'_, f32>>,
    budget: u64,
) -> Result<()> {
    supports(problem)?;
    let (units, jobs) = units(problem, budget)?;
    out.fill(T::default());
    if let Some(lse) = &mut lse {
        lse.fill(f32::NEG_INFINITY);
    }
    if jobs.is_empty() {
        return Ok(());
    }
    let most = |width: usize| {
        let bytes = |unit: &Unit<'_>| unit.cut.keys * unit.heads.len() * width * size_of::<T>();
        units.iter().map(bytes).max().unwrap_or(0)
    };
    let dims = problem.dims();
    // Each its own: the budget was cut for their sum.
    let bytes = [most(dims.head_dim), most(dims.head_dim_v)];
    let table = inputs
        .block_table
        .as_ref()
        .zip(problem.page_size().filter(|&size| size > 0));
    // What is found page-locked must stay so until its copies have passed.
    let _in_place = crate::page_lock::in_place();
    // Streams of kernels and of results on their way back. `on_stream` waits for each, also after an
    // error, before anything that was queued on it is freed.
    backend.on_stream(|back| {
        backend.on_stream(|compute| {
            let mut stages = (0..STAGES)
                .map(|_| Stage::new(backend, compute, bytes))
                .collect::<Result<Vec<Stage>>>()?;
            let memory: Vec<_> = stages
                .iter_mut()
                .map(|stage| stage.addresses(compute))
                .collect();
            // Others write there now.
            compute
                .synchronize()
                .map_err(|e| driver("cuStreamSynchronize", e))?;
            let chunks: Vec<Chunk<'_>> = jobs
                .iter()
                .enumerate()
                .map(|(number, job)| {
                    let unit = &units[job.unit];
                    Chunk {
                        sequence: unit.sequence,
                        heads: unit.heads.clone(),
                        keys: job.keys.clone(),
                        to: memory[number % STAGES],
                        free: &stages[number % STAGES].free,
                    }
                })
                .collect();
            let (k, v) = (Source::new(&inputs.k, table), Source::new(&inputs.v, table));
            let gatherers = Gatherers::new(backend, [k, v], bytes[0] + bytes[1], STAGES)?;
            gatherers.beside(&chunks, |turns| {
                let mut rows = Rows {
                    backend,
                    inputs,
                    units: &units,
                    out: &mut out,
                    lse: &mut lse,
                };
                rows.fold(compute, back, &jobs, &chunks, turns)
            })
        })
    })
}

/// The rows' side of a call.
struct Rows<'c, 'i, 'o, 'l, T> {
    backend: &'c CudaBackend,
    inputs: &'c Inputs<'i, T>,
    units: &'c [Unit<'c>],
    out: &'c mut TensorViewMut<'o, T>,
    lse: &'c mut Option<TensorViewMut<'l, f32>>,
}

impl<T: Element + DeviceRepr + ValidAsZeroBits> Rows<'_, '_, '_, '_, T> {
    /// Folds chunk after chunk in and brings each unit's rows back when its last has been.
    fn fold(
        &mut self,
        compute: &Arc<CudaStream>,
        back: &Arc<CudaStream>,
        jobs: &[Job],
        chunks: &[Chunk<'_>],
        turns: &mut Turns<'_, '_, T>,
    ) -> Result<()> {
        let mut state: Option<(CudaState, CudaSlice<T>)> = None;
        let mut finished: Option<Finished<T>> = None;
        for (job, chunk) in jobs.iter().zip(chunks) {
            let unit = &self.units[job.unit];
            turns.next(compute)?;
            if job.first {
                let q = rows_of(self.inputs, unit)?;
                let q = compute
                    .clone_htod(&q)
                    .map_err(|e| allocation("q", (q.len() * size_of::<T>()) as u64, e))?;
                state = Some((self.backend.begin_on(compute, &unit.problem)?, q));
            }
            let Some((running, q)) = &mut state else {
                unreachable!("a unit's first job comes first")
            };
            let dims = unit.problem.dims();
            let shape = |width| [1, dims.num_kv_heads, job.keys.len(), width];
            let q_shape = [1, dims.num_heads, dims.seqlen_q, dims.head_dim];
            let dense = |ptr, shape| {
                // SAFETY: the stage's memory, filled in this shape by copies that `compute` was
                // ordered after, and kept until `free` is recorded.
                unsafe { DeviceView::from_raw(ptr, T::DTYPE, shape, contiguous(shape)) }
            };
            self.backend.absorb_on(
                compute,
                running,
                &DeviceBlock {
                    q: DeviceView::bhsd::<T, _>(q, q_shape)?,
                    k: dense(chunk.to[0], shape(dims.head_dim)),
                    v: dense(chunk.to[1], shape(dims.head_dim_v)),
                    first_key: job.keys.start,
                },
            )?;
            chunk
                .free
                .record(compute)
                .map_err(|e| driver("cuEventRecord", e))?;
            // While this chunk is under way: the rows of the unit before it.
            if let Some(done) = finished.take() {
                bring(back, &done, self.units, self.out, self.lse)?;
            }
            if job.last
                && let Some((state, _q)) = state.take()
            {
                finished = Some(finish(self.backend, compute, job.unit, state)?);
            }
        }
        match finished {
            Some(done) => bring(back, &done, self.units, self.out, self.lse),
            None => Ok(()),
        }
    }
}

/// q of a unit, row after row.
///
/// # Errors
/// [`Error::OutOfMemory`] if the host has no room for them.
fn rows_of<T: Element>(inputs: &Inputs<'_, T>, unit: &Unit<'_>) -> Result<Vec<T>> {
    let dims = unit.problem.dims();
    let first = unit.heads.start * dims.group();
    let mut rows = reserve(&[dims.num_heads, dims.seqlen_q, dims.head_dim], "rows of q")?;
    for head in first..first + dims.num_heads {
        for i in 0..dims.seqlen_q {
            let (batch, at) = (unit.sequence.q_batch, unit.sequence.q_start + i);
            match inputs.q.contiguous_row(batch, head, at) {
                Some(row) => rows.extend_from_slice(row),
                None => rows.extend(inputs.q.row(batch, head, at)),
            }
        }
    }
    Ok(rows)
}

fn finish<T: Element + DeviceRepr + ValidAsZeroBits>(
    backend: &CudaBackend,
    compute: &Arc<CudaStream>,
    unit: usize,
    mut state: CudaState,
) -> Result<Finished<T>> {
    let dims = *state.problem().dims();
    let shape = dims.out_shape();
    let mut out = device_zeros::<T>(compute, "out", shape.iter().product())?;
    let mut lse = device_zeros::<f32>(compute, "lse", dims.lse_shape().iter().product())?;
    {
        let (ptr, _out) = out.device_ptr_mut(compute);
        let (sums, _lse) = lse.device_ptr_mut(compute);
        backend.finish_on(compute, &mut state, tensor(ptr, contiguous(shape)), sums)?;
    }
    let done = backend.new_event()?;
    done.record(compute)
        .map_err(|e| driver("cuEventRecord", e))?;
    Ok(Finished {
        unit,
        out,
        lse,
        done,
    })
}

/// Brings the rows of a finished unit back.
fn bring<T: Element + DeviceRepr>(
    back: &Arc<CudaStream>,
    done: &Finished<T>,
    units: &[Unit<'_>],
    out: &mut TensorViewMut<'_, T>,
    lse: &mut Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    let unit = &units[done.unit];
    let dims = unit.problem.dims();
    back.wait(&done.done)
        .map_err(|e| driver("cuStreamWaitEvent", e))?;
    let count = dims.lse_shape().iter().product::<usize>();
    let rows = fetch(back, "rows of out", &done.out, count * dims.head_dim_v)?;
    let sums = match lse {
        Some(_) => fetch(back, "rows of lse", &done.lse, count)?,
        None => Vec::new(),
    };
    let first = unit.heads.start * dims.group();
    for head in 0..dims.num_heads {
        for i in 0..dims.seqlen_q {
            let (batch, at) = (unit.sequence.q_batch, unit.sequence.q_start + i);
            let row = head * dims.seqlen_q + i;
            out.row_mut(batch, first + head, at)
                .copy_from_slice(&rows[row * dims.head_dim_v..][..dims.head_dim_v]);
            if let Some(lse) = lse {
                lse.row_mut(batch, first + head, at)[0] = sums[row];
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use tilewise_core::{DType, Options, TensorView};

    fn dims(batch: usize, seqlen_q: usize, seqlen_k: usize) -> Dims {
        Dims {
            batch,
            num_heads: 8,
            num_kv_heads: 4,
            seqlen_q,
            seqlen_k,
            head_dim: 128,
            head_dim_v: 128,
        }
    }

    #[test]
    fn a_cut_stays_within_its_budget_and_heads_do_not_move_it() {
        for budget in [400_000, 1 << 20, 50 << 20, 1 << 30] {
            let own = dims(1, 64, 1 << 20);
            let cut = cut(&own, 2, budget).unwrap();
            let staged = (STAGES * cut.heads * cut.keys * 512) as u64;
            assert!(rows_bytes(&own, 2, cut.heads) + staged <= budget, "{cut:?}");
            assert!(cut.keys.is_multiple_of(KEYS) && cut.heads >= 1);
            let alone = Dims {
                num_heads: 2,
                num_kv_heads: 1,
                ..own
            };
            assert_eq!(super::cut(&alone, 2, budget).unwrap().keys, cut.keys);
        }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_what_it_would_take() {
        match cut(&dims(1, 1 << 20, 1 << 20), 2, 1 << 20) {
            Err(Error::OutOfMemory { bytes, what, .. }) => {
                assert!(
                    bytes > 1 << 30 && what.contains("budget of 1048576"),
                    "{what}"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chunks_cover_the_live_keys_once() {
        let options = Options::new().window_left(1000).window_right(0);
        let problem = Problem::dense(dims(2, 10, 5000), DType::F16, &options).unwrap();
        let (units, jobs) = units(&problem, 2 << 20).unwrap();
        for (n, unit) in units.iter().enumerate() {
            let own: Vec<_> = jobs.iter().filter(|job| job.unit == n).collect();
            assert!(own[0].first && own[own.len() - 1].last);
            assert_eq!(own[0].keys.start, 5000 - 10 - 1000);
            assert_eq!(own[own.len() - 1].keys.end, 5000);
            assert_eq!(
                own.len(),
                5000usize.div_ceil(unit.cut.keys) - 3990 / unit.cut.keys
            );
            assert!(
                own.windows(2)
                    .all(|pair| pair[0].keys.end == pair[1].keys.start)
            );
        }
    }

    /// One row of memory, broadcast to more rows than any host could hold.
    #[test]
    fn rows_that_the_host_cannot_hold_are_an_error() {
        let own = dims(1, 1 << 36, 16);
        let (row, keys) = ([bf16::ONE; 128], [bf16::ONE; 4 * 16 * 128]);
        let q = TensorView::from_strides(&row, [1, 8, 1 << 36, 128], [0, 0, 0, 1], 0).unwrap();
        let k = TensorView::bhsd(&keys, [1, 4, 16, 128]).unwrap();
        let inputs = Inputs::new(q, k, k);
        let problem = Problem::new(&inputs, &Options::new()).unwrap();
        let unit = Unit {
            sequence: &problem.sequences()[0],
            heads: 0..4,
            problem: problem.clone(),
            cut: Cut {
                keys: 128,
                heads: 4,
            },
        };
        match rows_of(&inputs, &unit) {
            Err(Error::OutOfMemory { what, bytes, .. }) => {
                assert_eq!((what.as_str(), bytes), ("rows of q", 8 << 44));
            }
            other => panic!("{:?}", other.map(|rows| rows.len())),
        }
        assert_eq!(own, *problem.dims());
    }
}
