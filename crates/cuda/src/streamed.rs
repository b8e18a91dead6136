//! Keys and values that stay in host memory: a forward that streams them through the device in chunks,
//! within a budget of device memory.
//!
//! The rows of a few heads keep their state (m, ℓ, Õ) on the device while chunk after chunk of their keys
//! passes by: threads gather a chunk into page-locked memory, one stream copies it over, another folds it
//! in, and there are two of everything, so that all three overlap. Chunks are cut at absolute positions
//! that follow from the budget and the shape of one head alone: a row's bits do not depend on the batch
//! or on how many heads go together.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtrMut as _, DeviceRepr, ValidAsZeroBits, result,
};
use tilewise_core::{
    Algorithm, BlockTable, Dims, Element, Error, Inputs, Problem, Result, Sequence, TensorView,
    TensorViewMut,
};

use crate::backend::{CudaBackend, device_zeros};
use crate::error::{allocation, driver, unsupported};
use crate::ops::supports_tiled;
use crate::state::{CudaState, DeviceBlock};
use crate::view::{DeviceView, contiguous, tensor};

/// K of one head in a chunk has at most this many bytes: long enough for the bus, short enough to start.
const MOST_BYTES: usize = 8 << 20;
/// K and V of a chunk, all its heads together.
const MOST_STAGED: usize = 128 << 20;
/// Chunks are multiples of this, which every tile divides.
const KEYS: usize = 128;
/// Chunks in flight.
const STAGES: usize = 2;
/// Most threads that gather a chunk; eight of them came to less than half of what the bus takes.
const MOST_THREADS: usize = 16;

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
    problem
        .sequences()
        .iter()
        .try_for_each(|sequence| supports_tiled(&part(problem, sequence, 1)?, Algorithm::Fa2))
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

/// Page-locked host memory.
struct Pinned {
    ptr: *mut u8,
}

impl Pinned {
    fn new(bytes: usize) -> Result<Pinned> {
        // SAFETY: a plain allocation; the context is bound by the caller.
        let ptr = unsafe { result::malloc_host(bytes.max(1), 0) }
            .map_err(|e| allocation("page-locked memory for chunks of keys", bytes as u64, e))?;
        Ok(Pinned { ptr: ptr.cast() })
    }
}

// SAFETY: gatherers write disjoint parts between two barriers, and the main thread hands the memory to the
// device only after the second.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; whoever drops it has waited for the copies from it. A failure is
        // a lost context, which the next call reports.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
    }
}

/// Some heads of a sequence, with the keys that its rows see.
struct Unit<'p> {
    sequence: &'p Sequence,
    heads: Range<usize>,
    problem: Problem,
    cut: Cut,
}

/// A chunk on its way: where the gatherers put what.
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

/// Copies rows `keys` of one head of k or v to `to`, one after another.
///
/// # Safety
/// `to` has room for them, and nobody else writes there.
unsafe fn gather<T: Element>(
    view: &TensorView<'_, T>,
    table: Option<(&BlockTable<'_>, usize)>,
    sequence: &Sequence,
    head: usize,
    keys: Range<usize>,
    to: *mut T,
) {
    let width = view.shape()[3];
    if keys.is_empty() || width == 0 {
        return;
    }
    let place = |key: usize| match table {
        Some((table, size)) => {
            let page = table.pages[sequence.k_batch * table.width + key / size];
            (page as usize, key % size)
        }
        None => (sequence.k_batch, sequence.k_start + key),
    };
    let dense = view.strides()[3] == 1 && view.strides()[2] == width as isize;
    if table.is_none() && dense {
        let at = view.position([sequence.k_batch, head, sequence.k_start + keys.start, 0]);
        let rows = &view.data()[at..][..keys.len() * width];
        // SAFETY: the caller's promise; the slice is of as many elements.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), to, rows.len()) };
        return;
    }
    for (n, key) in keys.enumerate() {
        let (batch, position) = place(key);
        let to = to.wrapping_add(n * width);
        match view.contiguous_row(batch, head, position) {
            // SAFETY: as above.
            Some(row) => unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, width) },
            None => {
                for (c, x) in view.row(batch, head, position).enumerate() {
                    // SAFETY: as above.
                    unsafe { to.wrapping_add(c).write(x) };
                }
            }
        }
    }
}

/// What the gatherers share.
struct Staging {
    buffers: Vec<Pinned>,
    /// Of K and of V in a buffer, in bytes.
    half: usize,
}

/// Device buffers of one stage and when they are filled and free.
struct Stage {
    k: CudaSlice<u8>,
    v: CudaSlice<u8>,
    copied: CudaEvent,
    free: CudaEvent,
}

fn event(backend: &CudaBackend) -> Result<CudaEvent> {
    backend
        .context()
        .new_event(None)
        .map_err(|e| driver("cuEventCreate", e))
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
    let half = most(dims.head_dim.max(dims.head_dim_v));
    backend.bind()?;
    let staging = Staging {
        buffers: (0..STAGES)
            .map(|_| Pinned::new(2 * half))
            .collect::<Result<_>>()?,
        half,
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .clamp(1, MOST_THREADS);
    let (start, end) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let stop = AtomicBool::new(false);
    let table = inputs
        .block_table
        .as_ref()
        .zip(problem.page_size().filter(|&size| size > 0));
    let work = |thread: usize| {
        for (number, job) in jobs.iter().enumerate() {
            start.wait();
            if stop.load(Ordering::Acquire) {
                return;
            }
            let unit = &units[job.unit];
            let len = job.keys.len();
            let own = job.keys.start + len * thread / threads
                ..job.keys.start + len * (thread + 1) / threads;
            let buffer = staging.buffers[number % STAGES].ptr;
            for (n, head) in unit.heads.clone().enumerate() {
                for (view, base) in [(&inputs.k, 0), (&inputs.v, staging.half)] {
                    let row = n * len + (own.start - job.keys.start);
                    let at = base + row * view.shape()[3] * size_of::<T>();
                    // SAFETY: `half` bytes hold a chunk of all heads of any unit; threads have rows of
                    // their own. The buffer is aligned for any element.
                    unsafe {
                        let to = buffer.wrapping_add(at).cast::<T>();
                        gather(view, table, unit.sequence, head, own.clone(), to);
                    }
                }
            }
            end.wait();
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
        // Set on every way out before the last job, so that no gatherer waits for ever.
        let mut released = 0;
        let mut gathered = |number: usize| {
            debug_assert_eq!(released, number);
            start.wait();
            end.wait();
            released = number + 1;
        };
        let result = drive(
            backend,
            inputs,
            &units,
            &jobs,
            &staging,
            &mut gathered,
            &mut out,
            &mut lse,
        );
        if released < jobs.len() {
            stop.store(true, Ordering::Release);
            start.wait();
        }
        result
    })
}

/// The device's side: everything is queued as soon as its chunk is gathered.
#[allow(clippy::too_many_arguments)]
fn drive<T: Element + DeviceRepr + ValidAsZeroBits>(
    backend: &CudaBackend,
    inputs: &Inputs<'_, T>,
    units: &[Unit<'_>],
    jobs: &[Job],
    staging: &Staging,
    gathered: &mut dyn FnMut(usize),
    out: &mut TensorViewMut<'_, T>,
    lse: &mut Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    // Three streams: copies, kernels, and results on their way back. `on_stream` waits for each, also
    // after an error, before anything that was queued on it is freed.
    backend.on_stream(|copies| {
        backend.on_stream(|back| {
            backend.on_stream(|compute| {
                let mut stages = (0..STAGES)
                    .map(|_| {
                        Ok(Stage {
                            k: device_zeros::<u8>(compute, "a chunk of keys", staging.half)?,
                            v: device_zeros::<u8>(compute, "a chunk of values", staging.half)?,
                            copied: event(backend)?,
                            free: event(backend)?,
                        })
                    })
                    .collect::<Result<Vec<Stage>>>()?;
                copies
                    .join(compute)
                    .map_err(|e| driver("cuStreamWaitEvent", e))?;
                let mut state: Option<(CudaState, CudaSlice<T>)> = None;
                let mut finished: Option<Finished<T>> = None;
                for (number, job) in jobs.iter().enumerate() {
                    let unit = &units[job.unit];
                    let stage = &mut stages[number % STAGES];
                    if number >= STAGES {
                        // The copy from this page-locked buffer, two chunks ago.
                        stage
                            .copied
                            .synchronize()
                            .map_err(|e| driver("cuEventSynchronize", e))?;
                    }
                    gathered(number);
                    if job.first {
                        let q = rows_of(inputs, unit);
                        let q = compute
                            .clone_htod(&q)
                            .map_err(|e| allocation("q", (q.len() * size_of::<T>()) as u64, e))?;
                        state = Some((backend.begin_on(compute, &unit.problem)?, q));
                    }
                    let Some((running, q)) = &mut state else {
                        unreachable!("a unit's first job comes first")
                    };
                    if number >= STAGES {
                        copies
                            .wait(&stage.free)
                            .map_err(|e| driver("cuStreamWaitEvent", e))?;
                    }
                    let (k, v) = copy(copies, stage, staging, number, unit, job, inputs)?;
                    stage
                        .copied
                        .record(copies)
                        .map_err(|e| driver("cuEventRecord", e))?;
                    compute
                        .wait(&stage.copied)
                        .map_err(|e| driver("cuStreamWaitEvent", e))?;
                    let dims = unit.problem.dims();
                    let shape = |width| [1, dims.num_kv_heads, job.keys.len(), width];
                    let q_shape = [1, dims.num_heads, dims.seqlen_q, dims.head_dim];
                    let dense = |ptr, shape| {
                        // SAFETY: the stage's memory, filled in this shape before the event that
                        // `compute` waits for, and kept until `free` is recorded.
                        unsafe { DeviceView::from_raw(ptr, T::DTYPE, shape, contiguous(shape)) }
                    };
                    backend.absorb_on(
                        compute,
                        running,
                        &DeviceBlock {
                            q: DeviceView::bhsd::<T, _>(q, q_shape)?,
                            k: dense(k, shape(dims.head_dim)),
                            v: dense(v, shape(dims.head_dim_v)),
                            first_key: job.keys.start,
                        },
                    )?;
                    stage
                        .free
                        .record(compute)
                        .map_err(|e| driver("cuEventRecord", e))?;
                    // While this chunk is under way: the rows of the unit before it.
                    if let Some(done) = finished.take() {
                        fetch(back, &done, units, out, lse)?;
                    }
                    if job.last
                        && let Some((state, _q)) = state.take()
                    {
                        finished = Some(finish(backend, compute, job.unit, state)?);
                    }
                }
                match finished {
                    Some(done) => fetch(back, &done, units, out, lse),
                    None => Ok(()),
                }
            })
        })
    })
}

/// q of a unit, row after row.
fn rows_of<T: Element>(inputs: &Inputs<'_, T>, unit: &Unit<'_>) -> Vec<T> {
    let dims = unit.problem.dims();
    let first = unit.heads.start * dims.group();
    let mut rows = Vec::with_capacity(dims.num_heads * dims.seqlen_q * dims.head_dim);
    for head in first..first + dims.num_heads {
        for i in 0..dims.seqlen_q {
            let (batch, at) = (unit.sequence.q_batch, unit.sequence.q_start + i);
            match inputs.q.contiguous_row(batch, head, at) {
                Some(row) => rows.extend_from_slice(row),
                None => rows.extend(inputs.q.row(batch, head, at)),
            }
        }
    }
    rows
}

/// Queues the copies of a gathered chunk; where K and V will lie.
fn copy<T: Element>(
    copies: &Arc<CudaStream>,
    stage: &mut Stage,
    staging: &Staging,
    number: usize,
    unit: &Unit<'_>,
    job: &Job,
    inputs: &Inputs<'_, T>,
) -> Result<(CUdeviceptr, CUdeviceptr)> {
    let buffer = staging.buffers[number % STAGES].ptr;
    let mut at = [0; 2];
    for (n, (view, memory)) in [(&inputs.k, &mut stage.k), (&inputs.v, &mut stage.v)]
        .into_iter()
        .enumerate()
    {
        let bytes = unit.heads.len() * job.keys.len() * view.shape()[3] * size_of::<T>();
        // Only the address: the events of this module order the streams.
        let (ptr, guard) = memory.device_ptr_mut(copies);
        std::mem::forget(guard);
        // SAFETY: gathered, and not written again before `copied` has passed; `half` bytes on both sides.
        unsafe {
            let from = std::slice::from_raw_parts(buffer.wrapping_add(n * staging.half), bytes);
            result::memcpy_htod_async(ptr, from, copies.cu_stream())
        }
        .map_err(|e| driver("copying a chunk of keys", e))?;
        at[n] = ptr;
    }
    Ok((at[0], at[1]))
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
    let done = event(backend)?;
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
fn fetch<T: Element + DeviceRepr>(
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
    let rows = back
        .clone_dtoh(&done.out)
        .map_err(|e| driver("copying the result", e))?;
    let sums = back
        .clone_dtoh(&done.lse)
        .map_err(|e| driver("copying the result", e))?;
    back.synchronize()
        .map_err(|e| driver("cuStreamSynchronize", e))?;
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
    use tilewise_core::{DType, Options};

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
}
