//! Few queries over many keys, and keys in pages: `decode.cu` over device memory.
//!
//! Chosen within `fa2` by shape alone ([`serves`]). The heads of a group are rows of one tile, so K and V
//! are read once for all of them; the keys are cut where [`chunk_keys`] says, several blocks share a head
//! where heads are few, and the states of their chunks are folded in order. How many blocks share a head
//! follows from the device, but no bit of the result does.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, ValidAsZeroBits, result};
use tilewise_core::{
    Algorithm, Alignment, DType, Element, Error, Inputs, Problem, Result, Sequence, TensorViewMut,
};

use crate::backend::{CudaBackend, Results, Uploaded, upload};
use crate::error::{driver, unsupported};
use crate::kernels::decode::{Blocks, Chosen, chunk_keys, may_be_once, variant};
use crate::kernels::{Mask, Score, Spec, pad};
use crate::raw::{self, Shape};
use crate::rooms::{COUNTERS, Rooms, States, Workspace};
use crate::view::{DeviceView, DeviceViewMut, aligned};

/// Rows of a group (its heads times seqlen_q) up to which keys are split.
pub const MOST_ROWS: usize = 64;

/// Beyond this a window bounds nothing.
const FAR: usize = 1 << 30;

/// Whether this schedule takes `sequence` of a problem that `fa2` is asked for: few rows a group, or keys
/// in pages. Neither batch nor lengths of keys matter, so a sequence alone is computed as in any company.
pub(crate) fn takes(problem: &Problem, sequence: &Sequence) -> bool {
    let few = problem.dims().group().saturating_mul(sequence.seqlen_q) <= MOST_ROWS;
    (few && suits(problem)) || problem.page_size().is_some()
}

/// Whether the kernels can do what `problem` asks for, however many rows it has.
fn suits(problem: &Problem) -> bool {
    let dims = problem.dims();
    pad(dims.head_dim.max(dims.head_dim_v)).is_some() && problem.options().get_dropout().is_none()
}

/// Whether this schedule takes all of `problem`.
pub fn serves(problem: &Problem, algorithm: Algorithm) -> bool {
    // A packed problem may have no sequence at all.
    let all = || suits(problem) && problem.sequences().iter().all(|s| takes(problem, s));
    algorithm.resolve() == Algorithm::Fa2 && (problem.page_size().is_some() || all())
}

/// Whether the pages of `problem` can be read where they lie.
pub(crate) fn reads_pages(problem: &Problem, algorithm: Algorithm) -> bool {
    problem.page_size().is_some() && serves(problem, algorithm) && supports(problem).is_ok()
}

/// Whether the kernels can do a problem that [`serves`] claims.
///
/// # Errors
/// [`Error::Unsupported`] naming the first thing they cannot do.
pub fn supports(problem: &Problem) -> Result<()> {
    let dims = problem.dims();
    match problem.dtype() {
        DType::F16 | DType::BF16 | DType::F32 => {}
        other => return Err(unsupported(format!("dtype {other} with fa2"))),
    }
    if problem.options().get_dropout().is_some() {
        return Err(unsupported("dropout over keys in pages"));
    }
    let width = dims.head_dim.max(dims.head_dim_v);
    if pad(width).is_none() {
        return Err(unsupported(format!(
            "head_dim {width} (at most 256) over keys in pages"
        )));
    }
    if dims.seqlen_q.saturating_add(dims.seqlen_k) > FAR
        || dims.batch.max(problem.sequences().len()) > FAR
    {
        return Err(unsupported(format!(
            "seqlen_q {} and seqlen_k {} (together at most 2^30) with fa2",
            dims.seqlen_q, dims.seqlen_k
        )));
    }
    let pairs = problem.sequences().len() as u64 * dims.num_kv_heads as u64;
    let rows = dims.group() as u64 * dims.seqlen_q as u64;
    if pairs.saturating_mul(rows.max(1)) > 1 << 24 {
        return Err(unsupported(format!(
            "{} sequences × {} heads × {} rows in one call with fa2 for few queries",
            problem.sequences().len(),
            dims.num_heads,
            dims.seqlen_q
        )));
    }
    Ok(())
}

/// Pages of each sequence in device memory: i32 `[batch, width]`, row-major.
///
/// Its entries are not looked at on the host. One that names no page makes the rows that need it NaN.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTable {
    ptr: CUdeviceptr,
    width: usize,
}

impl DeviceTable {
    /// A table of `width` entries a sequence at a device address.
    ///
    /// # Safety
    /// `[batch, width]` i32 entries from `ptr` on must be readable by the device until the work that
    /// takes this table has passed on its stream, and nothing may write there meanwhile.
    pub unsafe fn from_raw(ptr: CUdeviceptr, width: usize) -> DeviceTable {
        DeviceTable { ptr, width }
    }
}

/// Where the tensors of a call lie. Those that are not given have address 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placed {
    pub(crate) q: raw::Tensor,
    pub(crate) k: raw::Tensor,
    pub(crate) v: raw::Tensor,
    pub(crate) o: raw::Tensor,
    pub(crate) bias: raw::Tensor,
    pub(crate) mask: raw::Tensor,
    pub(crate) lse: CUdeviceptr,
    pub(crate) table: CUdeviceptr,
    pub(crate) width: usize,
    pub(crate) pages: usize,
}

/// The kernels of one kind of call, loaded.
#[derive(Debug)]
pub(crate) struct Ready {
    chosen: Chosen,
    function: CudaFunction,
    merge: CudaFunction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    spec: Spec,
    two: bool,
    blocks: Blocks,
}

/// Keys and values of so many times the second-level cache pass it by, as far as it lets them: what it holds
/// else need not be written back first. Of more than that they make it slower (docs/PERFORMANCE.md).
const ONCE_CACHES: u64 = 5;
/// Heads up to which several blocks may share one: more of them fill any device.
const MOST_SHARED: u64 = 1 << 14;

/// What one call leaves for the next: kernels, found without making their names, and memory.
#[derive(Debug, Default)]
pub(crate) struct Known {
    kernels: RwLock<HashMap<Key, Arc<Ready>>>,
    rooms: Rooms,
}

impl Known {
    /// Two words that are 0 when what comes next on `stream` begins, and must be 0 again when it has
    /// ended: they go back by [`Known::counted`] once it is queued.
    pub(crate) fn counters<'a>(&self, stream: &'a Arc<CudaStream>) -> Result<States<'a>> {
        self.rooms.take(stream, 2, 0)
    }

    /// What [`Known::counters`] gave.
    pub(crate) fn counted(&self, counters: States<'_>) {
        self.rooms.give(counters);
    }

    fn get(&self, backend: &CudaBackend, key: Key, rows: usize) -> Result<Arc<Ready>> {
        let known = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(ready) = known.get(&key) {
            return Ok(Arc::clone(ready));
        }
        drop(known);
        let limit = backend.shared_limit();
        let chosen = variant(&key.spec, limit, rows, key.blocks).ok_or_else(|| {
            unsupported(format!(
                "head_dim {} in {} within this device's shared memory",
                key.spec.padded, key.spec.dtype
            ))
        })?;
        let ready = Arc::new(Ready {
            function: backend.modules().get(&chosen.variant)?,
            merge: backend.modules().get(&chosen.merge)?,
            chosen,
        });
        self.kernels
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key, Arc::clone(&ready));
        Ok(ready)
    }
}

/// Blocks that share a head's keys: as many as finish first, if each chunk takes as long as any other.
/// `heads` blocks there would be without sharing, `room` fit the device at once.
fn parts(heads: u64, chunks: usize, room: u64) -> usize {
    let cost = |parts: usize| {
        let waves = (heads * parts as u64).div_ceil(room.max(1)) as f64;
        // A quarter of a chunk to fill the pipeline, and about one to join what the blocks leave.
        waves * (chunks.div_ceil(parts) as f64 + 0.25) + if parts > 1 { 1.0 } else { 0.0 }
    };
    (1..=chunks.max(1))
        .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
        .unwrap_or(1)
}

/// What the kernels must be told of the sequences that this schedule [`takes`]: one length for all, or a list.
enum Lengths {
    Uniform(usize),
    Each(Vec<raw::Sequence>),
}

fn lengths(problem: &Problem) -> Lengths {
    let dims = problem.dims();
    let sequences = problem.sequences();
    // Sequences that are not packed have their seqlen_q in common: this schedule takes all or none.
    let first = sequences.first().filter(|s| takes(problem, s));
    let longest = first.map_or(0, |s| s.seqlen_k);
    let uniform = sequences.iter().all(|s| s.seqlen_k == longest);
    if !problem.is_packed() && first.is_some() && uniform {
        return Lengths::Uniform(longest);
    }
    let mut list: Vec<raw::Sequence> = sequences
        .iter()
        .filter(|s| takes(problem, s))
        .map(|s| raw::Sequence {
            q_batch: s.q_batch as i32,
            q_start: s.q_start as i32,
            sq: s.seqlen_q as i32,
            k_batch: s.k_batch as i32,
            k_start: s.k_start as i32,
            sk: s.seqlen_k as i32,
        })
        .collect();
    // The heaviest first, so that no long one starts last.
    list.sort_by_key(|s| std::cmp::Reverse(s.sk));
    let covered = sequences.last().map_or(0, |s| s.q_start + s.seqlen_q);
    let all = suits(problem) && list.len() == sequences.len();
    if all && problem.is_packed() && covered < dims.seqlen_q {
        // Rows of no sequence see nothing, not even a sink.
        list.push(raw::Sequence {
            q_start: covered as i32,
            sq: (dims.seqlen_q - covered) as i32,
            k_batch: -1,
            ..raw::Sequence::default()
        });
    }
    Lengths::Each(list)
}

/// Queues the kernels for the sequences that this schedule [`takes`]. The caller checked shapes and dtypes against `problem` and binds the context.
pub(crate) fn run(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    placed: &Placed,
) -> Result<()> {
    let (dims, options, dtype) = (problem.dims(), problem.options(), problem.dtype());
    if dims.batch * dims.num_heads * dims.seqlen_q == 0 {
        return Ok(());
    }
    let lengths = lengths(problem);
    let (count, most_rows, longest) = match &lengths {
        Lengths::Uniform(sk) => (dims.batch, dims.seqlen_q, *sk),
        Lengths::Each(list) => (
            list.len(),
            list.iter().map(|s| s.sq).max().unwrap_or(0) as usize,
            list.iter().map(|s| s.sk).max().unwrap_or(0) as usize,
        ),
    };
    if count == 0 {
        return Ok(());
    }
    let most_rows = most_rows * dims.group();
    let width = dims.head_dim.max(dims.head_dim_v);
    let padded = pad(width).ok_or_else(|| unsupported(format!("head_dim {width} above 256")))?;
    let scale = problem.softmax_scale() as f32;
    let paged = placed.table != 0;
    let k_shape = |d| match problem.page_size() {
        Some(size) => [placed.pages, dims.num_kv_heads, size, d],
        None => [dims.batch, dims.num_kv_heads, dims.seqlen_k, d],
    };
    let q_shape = [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim];
    let modified = options.get_softcap().is_some()
        || options.get_alibi_slopes().is_some()
        || placed.bias.ptr != 0
        || placed.mask.ptr != 0
        || scale <= 0.0;
    let spec = Spec {
        mask: Mask::Band,
        score: if modified {
            Score::Modified
        } else {
            Score::Folded
        },
        aligned: aligned(&placed.q, q_shape, dtype)
            && aligned(&placed.k, k_shape(dims.head_dim), dtype)
            && aligned(&placed.v, k_shape(dims.head_dim_v), dtype)
            && aligned(&placed.o, dims.out_shape(), dtype),
        ..Spec::plain(dtype, padded)
    };
    let pairs = count * dims.num_kv_heads;
    // Sequences may share pages: all of them together can be more than there is memory for anywhere.
    let key_bytes = [
        pairs,
        longest,
        dims.head_dim + dims.head_dim_v,
        dtype.size(),
    ]
    .into_iter()
    .fold(1u64, |bytes, n| bytes.saturating_mul(n as u64));
    let chunks = longest.div_ceil(chunk_keys(longest, dims.num_kv_heads));
    let key = Key {
        spec,
        // Of no consequence for any bit: both have the same warps, and a row meets the same operations.
        two: most_rows > 16,
        blocks: Blocks {
            paged,
            alone: (pairs * most_rows.div_ceil(16) * chunks) as u64 <= backend.multiprocessors(),
            once: most_rows <= 16
                && may_be_once(&spec, paged)
                && key_bytes <= ONCE_CACHES * backend.l2_bytes(),
        },
    };
    let ready = backend.known().get(backend, key, most_rows)?;
    let block_rows = ready.chosen.rows as usize;
    let row_blocks = most_rows.div_ceil(block_rows).max(1);
    let heads = (pairs * row_blocks) as u64;
    let room = backend.multiprocessors() * u64::from(ready.chosen.blocks);
    let parts = match heads <= MOST_SHARED {
        true => parts(heads, chunks, room),
        false => 1,
    };
    let most_chunks = match &lengths {
        Lengths::Uniform(_) => chunks,
        Lengths::Each(list) => list
            .iter()
            .map(|s| (s.sk as usize).div_ceil(chunk_keys(s.sk as usize, dims.num_kv_heads)))
            .max()
            .unwrap_or(0),
    };
    let right = if options.is_causal() {
        Some(0)
    } else {
        options.get_window_right()
    };
    let far = |bound: Option<usize>| bound.map_or(FAR, |x| x.min(FAR)) as i32;
    let mut args = raw::Decode {
        q: placed.q,
        k: placed.k,
        v: placed.v,
        o: placed.o,
        bias: placed.bias,
        mask: placed.mask,
        lse: placed.lse,
        table: placed.table,
        kv_heads: dims.num_kv_heads as i32,
        group: dims.group() as i32,
        sq: dims.seqlen_q as i32,
        sk: longest as i32,
        d: dims.head_dim as i32,
        dv: dims.head_dim_v as i32,
        left: far(options.get_window_left()),
        right: far(right),
        bottom_right: i32::from(options.get_alignment() == Alignment::BottomRight),
        parts: parts as i32,
        slots: most_chunks as i32,
        rows: most_rows.min(block_rows) as i32,
        row_blocks: row_blocks as i32,
        lse_rows: dims.seqlen_q as i32,
        page_size: problem.page_size().unwrap_or(1).max(1) as i32,
        width: placed.width as i32,
        pages: placed.pages as i32,
        most_rows: most_rows as i32,
        scale,
        softcap: options.get_softcap().unwrap_or(0.0) as f32,
        ..raw::Decode::default()
    };

    // Small host arrays travel in one piece; the driver has copied them when the call returns.
    let mut small = Vec::new();
    let mut append = |bytes: &[u8]| {
        let at = small.len();
        small.extend_from_slice(bytes);
        at as u64
    };
    let at_sequences = match &lengths {
        Lengths::Uniform(_) => None,
        Lengths::Each(list) => {
            let mut bytes = Vec::with_capacity(list.len() * 24);
            for s in list {
                for word in [s.q_batch, s.q_start, s.sq, s.k_batch, s.k_start, s.sk] {
                    bytes.extend_from_slice(&word.to_ne_bytes());
                }
            }
            Some(append(&bytes))
        }
    };
    let mut per_head = |values: Option<&[f32]>| {
        values.map(|values| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
            append(&bytes)
        })
    };
    let at_slopes = per_head(options.get_alibi_slopes());
    let at_sinks = per_head(options.get_sinks());
    let small_room = if small.is_empty() {
        None
    } else {
        crate::ops::uncaptured(stream, || {
            let held = [
                (at_sequences, "lengths of sequences"),
                (at_slopes, "alibi_slopes"),
                (at_sinks, "sinks"),
            ];
            let held = held.into_iter().filter_map(|(at, name)| at.map(|_| name));
            held.collect::<Vec<_>>().join(", ")
        })?;
        let room = Workspace::new(stream, "the lengths of sequences", small.len() as u64)?;
        // SAFETY: `room` holds that many bytes; the source is pageable, so the driver copies it before
        // it returns.
        unsafe { result::memcpy_htod_async(room.ptr(), &small, stream.cu_stream()) }
            .map_err(|e| driver("copying the lengths of sequences", e))?;
        Some(room)
    };
    let base = small_room.as_ref().map_or(0, Workspace::ptr);
    let within = |at: Option<u64>| at.map_or(0, |at| base + at);
    args.sequences = within(at_sequences);
    args.slopes = within(at_slopes);
    args.sinks = within(at_sinks);

    let rooms = &backend.known().rooms;
    let states = if parts > 1 {
        let slots = heads * most_chunks as u64 * args.rows as u64;
        let room = rooms.take(stream, 0, slots * (u64::from(padded) + 2) * 4)?;
        // Õ first: its rows are read in sixteen-byte pieces.
        args.acc = room.ptr() + COUNTERS;
        args.m = args.acc + slots * u64::from(padded) * 4;
        args.l = args.m + slots * 4;
        Some(room)
    } else {
        None
    };
    let variant = &ready.chosen.variant;
    let shape = Shape {
        grid: ((heads * parts as u64) as u32, 1),
        threads: variant.threads,
        shared: variant.shared,
    };
    // SAFETY: the function was compiled from this crate's source and takes one `Decode`. The caller
    // checked shapes against the problem, so that every address the kernel forms lies in the tensors and
    // workspaces named in `args`; those outlive the launch on this stream.
    unsafe { raw::launch(stream, &ready.function, shape, &args) }
        .map_err(|e| driver(&format!("launching {}", variant.name), e))?;
    if let Some(states) = states {
        let blocks = (pairs * most_rows) as u64 * u64::from(padded.div_ceil(32));
        let shape = Shape {
            grid: (blocks as u32, 1),
            threads: ready.chosen.merge.threads,
            shared: 0,
        };
        // SAFETY: as above; every block of the dependent kernel waits for the end of the one before it.
        let launched = unsafe {
            if backend.launches_dependents() {
                raw::launch_dependent(stream, ready.merge.cu_function(), shape, &args)
            } else {
                raw::launch(stream, &ready.merge, shape, &args)
            }
        };
        launched.map_err(|e| driver(&format!("launching {}", ready.chosen.merge.name), e))?;
        rooms.give(states);
    }
    drop(small_room);
    Ok(())
}

/// Attention over keys in pages that lie in device memory, read in place.
///
/// k and v are `[pages, num_kv_heads, page_size, head_dim]` with any strides; otherwise as
/// [`ops::forward`](crate::ops::forward) with `fa2`. `problem` is what the same inputs pose on the host:
/// its used lengths are taken, entries of `table` are not looked at before the kernel does.
///
/// # Errors
/// Shapes and dtypes that do not fit `problem`, what [`supports`] refuses, and failures of the driver.
#[allow(clippy::too_many_arguments)]
pub fn forward_paged(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    q: &DeviceView<'_>,
    k: &DeviceView<'_>,
    v: &DeviceView<'_>,
    table: DeviceTable,
    out: &mut DeviceViewMut<'_>,
    lse: Option<&mut DeviceViewMut<'_>>,
) -> Result<()> {
    supports(problem)?;
    let dims = problem.dims();
    let size = problem.page_size().ok_or_else(|| Error::Table {
        expected: "a problem with keys in pages".into(),
        got: "one without a block table".into(),
    })?;
    if table.width.checked_mul(size) != Some(dims.seqlen_k) {
        return Err(Error::Table {
            expected: format!("width × {size} = {}", dims.seqlen_k),
            got: format!("width {}", table.width),
        });
    }
    if problem.has_bias() || problem.has_mask() {
        return Err(unsupported(
            "a bias or a boolean mask with pages on the device",
        ));
    }
    let pages = k.shape()[0];
    let q_shape = [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim];
    for (name, view, shape) in [
        ("q", q, q_shape),
        ("k", k, [pages, dims.num_kv_heads, size, dims.head_dim]),
        ("v", v, [pages, dims.num_kv_heads, size, dims.head_dim_v]),
    ] {
        crate::ops::expect_dtype(name, view.dtype(), problem.dtype())?;
        Error::expect_shape(name, view.shape(), shape)?;
    }
    crate::ops::expect_dtype("out", out.dtype(), problem.dtype())?;
    Error::expect_shape("out", out.shape(), dims.out_shape())?;
    if let Some(lse) = &lse {
        crate::ops::check_lse(problem, lse)?;
    }
    backend.bind()?;
    let (q, _q) = q.acquire(stream);
    let (k, _k) = k.acquire(stream);
    let (v, _v) = v.acquire(stream);
    let (o, _o) = out.acquire(stream);
    let (lse, _lse) = lse.map(|lse| lse.acquire(stream)).unzip();
    run(
        backend,
        stream,
        problem,
        &Placed {
            q,
            k,
            v,
            o,
            lse: lse.map_or(0, |lse| lse.ptr),
            table: table.ptr,
            width: table.width,
            pages,
            ..Placed::default()
        },
    )
}

/// Copies the inputs to the device, runs, and copies the outputs back.
pub(crate) fn forward_host<T: Element + DeviceRepr + ValidAsZeroBits>(
    backend: &CudaBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<()> {
    let dims = *problem.dims();
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    backend.on_stream(|stream| {
        let q = Uploaded::new(stream, "q", &inputs.q)?;
        let k = Uploaded::new(stream, "k", &inputs.k)?;
        let v = Uploaded::new(stream, "v", &inputs.v)?;
        let bias = inputs
            .bias
            .map(|bias| Uploaded::new(stream, "bias", &bias.broadcast_to(full)?))
            .transpose()?;
        let mask = inputs
            .mask
            .map(|mask| Uploaded::new(stream, "mask", &mask.broadcast_to(full)?))
            .transpose()?;
        let table = inputs
            .block_table
            .filter(|table| !table.pages.is_empty())
            .map(|table| upload(stream, "block_table", table.pages))
            .transpose()?;
        let shape = dims.out_shape();
        let mut results = Results::<T>::new(stream, &dims)?;
        {
            use cudarc::driver::{DevicePtr as _, DevicePtrMut as _};
            let (q, _q) = q.place(stream);
            let (k, _k) = k.place(stream);
            let (v, _v) = v.place(stream);
            let (bias, _bias) = bias.as_ref().map(|x| x.place(stream)).unzip();
            let (mask, _mask) = mask.as_ref().map(|x| x.place(stream)).unzip();
            let (table, _table) = table.as_ref().map(|x| x.device_ptr(stream)).unzip();
            let (o, _o) = results.out.device_ptr_mut(stream);
            let (lse, _lse) = results.lse.device_ptr_mut(stream);
            run(
                backend,
                stream,
                problem,
                &Placed {
                    q,
                    k,
                    v,
                    o: crate::view::tensor(o, crate::view::contiguous(shape)),
                    bias: bias.unwrap_or_default(),
                    mask: mask.unwrap_or_default(),
                    lse,
                    table: table.unwrap_or(0),
                    width: inputs.block_table.map_or(0, |table| table.width),
                    pages: inputs.k.shape()[0],
                },
            )?;
        }
        results.download(stream, out, lse)
    })
}

#[cfg(test)]
mod tests {
    use tilewise_core::{Dropout, Inputs, Options, TensorView};

    use super::*;

    #[test]
    fn heads_are_shared_only_where_they_are_few() {
        // 264 blocks fit an H200; chunks of 512 keys.
        assert_eq!(parts(8, 16, 264), 16);
        assert_eq!(parts(64, 16, 264), 4);
        assert_eq!(parts(256, 8, 264), 1);
        assert_eq!(parts(2048, 4, 264), 1);
        assert_eq!(parts(1024, 16, 264), 1);
        assert_eq!(parts(1, 0, 264), 1);
        assert!(parts(8, 128, 264) >= 16);
    }

    /// Two sequences, 4 heads a group: 16 rows each are 64, the most that one tile takes.
    fn problem(seqlen_q: usize, seqused_k: Option<&[i32]>) -> Problem {
        let (q, kv) = (
            vec![0f32; 2 * 8 * seqlen_q * 64],
            vec![0f32; 2 * 2 * 300 * 64],
        );
        let q = TensorView::bhsd(&q, [2, 8, seqlen_q, 64]).unwrap();
        let kv = TensorView::bhsd(&kv, [2, 2, 300, 64]).unwrap();
        let mut inputs = Inputs::new(q, kv, kv);
        if let Some(lengths) = seqused_k {
            inputs = inputs.seqused_k(lengths);
        }
        Problem::new(&inputs, &Options::new()).unwrap()
    }

    /// Nothing to refuse where there is no sequence: rows of none are 0 whatever the options.
    #[test]
    fn a_packed_problem_without_sequences_is_left_to_others_with_what_they_alone_can_do() {
        let data = vec![0f32; 5 * 320];
        let posed = |head_dim: usize, options: &Options| {
            let view = TensorView::bhsd(&data, [1, 1, 5, head_dim]).unwrap();
            let inputs = Inputs::new(view, view, view).packed(&[0], &[0]);
            Problem::new(&inputs, options).unwrap()
        };
        let dropout = Options::new().dropout(Dropout::Philox {
            p: 0.5,
            seed: 1,
            offset: 2,
        });
        assert!(serves(&posed(64, &Options::new()), Algorithm::Fa2));
        for problem in [posed(64, &dropout), posed(320, &Options::new())] {
            assert!(problem.sequences().is_empty());
            assert!(!serves(&problem, Algorithm::Fa2));
            crate::ops::supports(&problem, Algorithm::Fa2).unwrap();
        }
    }

    #[test]
    fn sequences_with_many_rows_are_left_to_others() {
        let (few, many) = (problem(16, None), problem(17, None));
        assert!(serves(&few, Algorithm::Fa2) && !serves(&many, Algorithm::Fa2));
        assert!(matches!(lengths(&few), Lengths::Uniform(300)));
        assert!(matches!(lengths(&many), Lengths::Each(list) if list.is_empty()));
        let used = Some([300, 200].as_slice());
        assert!(matches!(lengths(&problem(16, used)), Lengths::Each(list) if list.len() == 2));
        assert!(matches!(lengths(&problem(17, used)), Lengths::Each(list) if list.is_empty()));
    }
}
