//! Operations over device memory: checked, asynchronous, on the caller's stream.

use std::fmt::Display;
use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureStatus;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use tilewise_core::{Algorithm, DType, Dropout, Error, Problem, Result, Sequence};

use crate::backend::{Chips, CudaBackend};
use crate::decode::{self, Placed};
use crate::error::{allocation, driver, unsupported};
use crate::hopper;
use crate::kernels::{
    Mask, PADDED, Score, Spec, Variant, fa1, fa2, fa2_wide, pack as packing, pad, standard,
};
use crate::raw::{self, Args, Shape, Tensor};
use crate::sequences::{self, OnDevice};
use crate::view::{DeviceMask, DeviceView, DeviceViewMut, broadcast};

/// Blocks that one launch may have along x.
const GRID_X: u64 = i32::MAX as u64;
/// And along y.
const GRID_Y: u64 = 65_535;

/// Whether this backend can do `problem` with `algorithm`.
///
/// # Errors
/// [`Error::Unsupported`] naming the first thing it cannot do.
pub fn supports(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    if decode::serves(problem, algorithm) {
        decode::supports(problem)
    } else {
        supports_tiled(problem, algorithm)
    }
}

/// Whether the kernels that take rows in tiles of their own can do `problem`; those that hold a
/// running state are among them.
pub(crate) fn supports_tiled(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    supports_gathered(problem, algorithm)?;
    match problem.page_size() {
        Some(_) => Err(unsupported(format!(
            "paged keys (block_table) with {}",
            algorithm.resolve()
        ))),
        None => Ok(()),
    }
}

/// [`supports_tiled`] of a problem whose pages, if it has any, are gathered first.
pub(crate) fn supports_gathered(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    let refuse = |what: String| Err(unsupported(format!("{what} with {}", algorithm.resolve())));
    match problem.dtype() {
        DType::F16 | DType::BF16 | DType::F32 => {}
        other => return refuse(format!("dtype {other}")),
    }
    if algorithm.resolve() == Algorithm::Fa1 {
        fa1_supports(problem)?;
    }
    check_lengths(problem, algorithm)
}

/// That rows, keys and blocks can be counted in 32 bits.
pub(crate) fn check_lengths(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    let dims = problem.dims();
    let refuse = |what: String| Err(unsupported(format!("{what} with {}", algorithm.resolve())));
    sequences::check(problem)?;
    // The kernels count rows and keys, and sums of both, in 32 bits; everything else is 64 bits wide.
    if dims.seqlen_q.saturating_add(dims.seqlen_k) > (1 << 30) {
        return refuse(format!(
            "seqlen_q {} and seqlen_k {} (together at most 2^30)",
            dims.seqlen_q, dims.seqlen_k
        ));
    }
    let pairs = dims.batch as u64 * dims.num_heads as u64;
    if pairs.saturating_mul(dims.seqlen_q.div_ceil(16) as u64) > GRID_X {
        return refuse(format!(
            "{} batch entries × {} heads × {} rows in one call",
            dims.batch, dims.num_heads, dims.seqlen_q
        ));
    }
    Ok(())
}

/// The published FlashAttention-1 kernels know causality and scale, and so does this one.
fn fa1_supports(problem: &Problem) -> Result<()> {
    let (dims, options) = (problem.dims(), problem.options());
    let refuse = |what: &str| Err(unsupported(format!("{what} with {}", Algorithm::Fa1)));
    if problem.is_packed() {
        return refuse("packed sequences (cu_seqlens)");
    }
    if problem.has_bias() {
        return refuse("a bias");
    }
    if problem.has_mask() {
        return refuse("a boolean mask");
    }
    if options.get_dropout().is_some() {
        return refuse("dropout");
    }
    if options.get_alibi_slopes().is_some() {
        return refuse("alibi_slopes");
    }
    if options.get_sinks().is_some() {
        return refuse("sinks");
    }
    if sequences::needed(problem) {
        return refuse("seqused_k");
    }
    if dims.head_dim_v != dims.head_dim {
        return refuse(&format!(
            "head_dim_v {} other than head_dim {}",
            dims.head_dim_v, dims.head_dim
        ));
    }
    if pad(dims.head_dim).is_none() {
        return refuse(&format!("head_dim {} (at most 256)", dims.head_dim));
    }
    Ok(())
}

/// Kernel arguments and compile-time needs that follow from a problem and where its tensors lie.
pub(crate) struct Plan {
    pub(crate) args: Args,
    pub(crate) spec: Spec,
}

/// `first_key` and `keys` narrow the problem's keys for a state that takes them in parts.
pub(crate) fn plan(problem: &Problem, first_key: usize, keys: usize) -> Result<Plan> {
    let (dims, options) = (problem.dims(), problem.options());
    // Wider rows are taken in slices, which the families cut as they see fit.
    let most = PADDED[PADDED.len() - 1];
    let rule = tilewise_core::MaskRule::new(options, dims.seqlen_q, dims.seqlen_k);
    let right = if options.is_causal() {
        Some(0)
    } else {
        options.get_window_right()
    };
    let (mask, lo, hi) = Mask::of(&rule, options.get_window_left(), right);
    let scale = problem.softmax_scale() as f32;
    let modified = problem.has_bias() || problem.has_mask() || options.get_alibi_slopes().is_some();
    let score = if modified {
        Score::Modified
    } else if options.get_softcap().is_some() || scale <= 0.0 {
        Score::Applied
    } else {
        Score::Folded
    };
    let mut args = Args {
        batch: dims.batch as i32,
        heads: dims.num_heads as i32,
        group_size: dims.group().max(1) as i32,
        sq: dims.seqlen_q as i32,
        sk: keys as i32,
        d: dims.head_dim as i32,
        dv: dims.head_dim_v as i32,
        lo_off: lo.saturating_sub(first_key as i32),
        hi_off: hi.saturating_sub(first_key as i32),
        diag: (rule.diagonal(0) - first_key as i64) as i32,
        lse_ld: dims.seqlen_q as i32,
        pairs_per_group: 1,
        pairs: (dims.batch * dims.num_heads) as i32,
        scale,
        softcap: options.get_softcap().unwrap_or(0.0) as f32,
        ..Args::default()
    };
    if let Some(dropout) = options.get_dropout() {
        dropped(&mut args, dropout);
    }
    Ok(Plan {
        args,
        spec: Spec {
            mask,
            score,
            extras: problem.has_bias() || problem.has_mask(),
            padded_v: pad(dims.head_dim_v).unwrap_or(most),
            dropout: options.get_dropout().is_some(),
            ..Spec::plain(problem.dtype(), pad(dims.head_dim).unwrap_or(most))
        },
    })
}

/// Names `dropout` in a kernel's arguments; a mask of kept weights is named apart.
pub(crate) fn dropped(args: &mut Args, dropout: Dropout) {
    args.drop_scale = dropout.scale() as f32;
    // As `tilewise_core::dropout` words the key and the threshold.
    if let Dropout::Philox { p, seed, offset } = dropout {
        args.drop_key0 = seed as u32;
        args.drop_key1 = ((seed >> 32) as u32).wrapping_add((offset >> 32) as u32);
        args.drop_offset = offset as u32;
        args.drop_threshold = (p * 4_294_967_296.0).round() as u64;
    }
}

/// (batch, head) pairs whose K and V together stay in a good part of the second-level cache, the same
/// number in each group as far as that goes.
pub(crate) fn pairs_per_group(problem: &Problem, keys: usize, cache: u64) -> i32 {
    let dims = problem.dims();
    let head = 2 * keys as u64 * dims.head_dim as u64 * problem.dtype().size() as u64;
    let fit = (cache * 2 / 5) * dims.group() as u64 / head.max(1);
    let all = (dims.batch * dims.num_heads).max(1) as u64;
    all.div_ceil(all.div_ceil(fit.clamp(1, all))) as i32
}

/// How `place.cu` groups the pairs of `args`, of which `most` together stay in the second-level cache.
///
/// Where row blocks are not alike, a launch should not end with the long ones of a last group alone.
/// `at_a_time` of them run at once; twice as many, the longest first, end evenly, so the last groups become
/// one of so many.
pub(crate) fn group(args: &mut Args, most: i32, mask: Mask, at_a_time: u64) {
    let width = most.clamp(1, args.pairs.max(1)) as u64;
    let (pairs, row_blocks) = (args.pairs.max(1) as u64, args.row_blocks as u64);
    let alike = mask == Mask::Full;
    let mut last = (pairs - 1) / width;
    while !alike && last > 0 && (pairs - last * width) * row_blocks < 2 * at_a_time {
        last -= 1;
    }
    args.pairs_per_group = width as i32;
    args.last_group = last as i32;
}

pub(crate) fn expect_dtype(name: &'static str, got: DType, wanted: DType) -> Result<()> {
    if got == wanted {
        Ok(())
    } else {
        Err(Error::DType {
            tensor: name.into(),
            expected: wanted,
            got,
        })
    }
}

/// lse as the kernels write it: contiguous f32 `[batch, num_heads, seqlen_q, 1]`.
pub(crate) fn check_lse(problem: &Problem, lse: &DeviceViewMut<'_>) -> Result<()> {
    let [b, h, s] = problem.dims().lse_shape();
    expect_dtype("lse", lse.dtype(), DType::F32)?;
    Error::expect_shape("lse", lse.shape(), [b, h, s, 1])?;
    let [sb, sh, ss, _] = lse.strides();
    let dense = [(sb, b, (h * s) as isize), (sh, h, s as isize), (ss, s, 1)];
    if b * h * s > 0
        && dense
            .iter()
            .any(|&(stride, n, want)| n > 1 && stride != want)
    {
        return Err(Error::shape(
            "lse",
            "contiguous rows",
            format!("strides {:?}", lse.strides()),
        ));
    }
    Ok(())
}

/// The tensors of a call in device memory: [`tilewise_core::Inputs`] without lengths, which the
/// [`Problem`] holds.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInputs<'a> {
    /// `[batch, num_heads, seqlen_q, head_dim]`.
    pub q: DeviceView<'a>,
    /// `[batch, num_kv_heads, seqlen_k, head_dim]`.
    pub k: DeviceView<'a>,
    /// `[batch, num_kv_heads, seqlen_k, head_dim_v]`.
    pub v: DeviceView<'a>,
    /// `[batch, num_heads, seqlen_q, seqlen_k]` or 1 in any axis.
    pub bias: Option<DeviceView<'a>>,
    /// The same of bytes, 0 = hidden.
    pub mask: Option<DeviceMask<'a>>,
    /// The same of bytes, 0 = dropped.
    pub keep_mask: Option<DeviceMask<'a>>,
}

impl<'a> DeviceInputs<'a> {
    /// Plain q, k and v.
    pub fn new(q: DeviceView<'a>, k: DeviceView<'a>, v: DeviceView<'a>) -> Self {
        DeviceInputs {
            q,
            k,
            v,
            bias: None,
            mask: None,
            keep_mask: None,
        }
    }

    /// Whether shapes and dtypes are those of `problem`, and what it is posed with is there.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        let dims = problem.dims();
        for (name, view, shape) in [
            ("q", &self.q, q_shape(problem)),
            ("k", &self.k, k_shape(problem)),
            ("v", &self.v, v_shape(problem)),
        ] {
            expect_dtype(name, view.dtype(), problem.dtype())?;
            Error::expect_shape(name, view.shape(), shape)?;
        }
        if let Some(bias) = &self.bias {
            expect_dtype("bias", bias.dtype(), problem.dtype())?;
        }
        let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
        let by_mask = matches!(problem.options().get_dropout(), Some(Dropout::Mask { .. }));
        let (bias, mask, keep) = (
            self.bias.map(|view| view.shape()),
            self.mask.map(|view| view.shape()),
            self.keep_mask.map(|view| view.shape()),
        );
        for (name, wanted, shape) in [
            ("bias", problem.has_bias(), bias),
            ("mask", problem.has_mask(), mask),
            ("keep_mask", by_mask, keep),
        ] {
            let fits = match shape {
                Some(shape) => broadcast(Tensor::default(), shape, full).is_some(),
                None => true,
            };
            if wanted != shape.is_some() || !fits {
                return Err(Error::shape(
                    name,
                    if wanted {
                        format!("{full:?} or 1 in any axis, as the problem was posed with one")
                    } else {
                        "none, as the problem was posed without".into()
                    },
                    shape.map_or("none".into(), |shape| format!("{shape:?}")),
                ));
            }
        }
        Ok(())
    }
}

/// Values of each head, in device memory.
pub(crate) fn upload_per_head(
    stream: &Arc<CudaStream>,
    name: &'static str,
    values: &[f32],
) -> Result<CudaSlice<f32>> {
    uncaptured(stream, || name)?;
    stream
        .clone_htod(values)
        .map_err(|e| allocation(name, size_of_val(values) as u64, e))
}

/// Refuses a copy from memory of this call while `stream` is captured: each replay would read there again.
///
/// # Errors
/// [`Error::Unsupported`] naming `what`, and failures of the driver.
pub(crate) fn uncaptured<S: Display>(stream: &CudaStream, what: impl FnOnce() -> S) -> Result<()> {
    let status = stream
        .capture_status()
        .map_err(|e| driver("cuStreamIsCapturing", e))?;
    if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(());
    }
    Err(unsupported(format!(
        "{} while the stream is captured (a replay would read the host memory of the captured call)",
        what()
    )))
}

pub(crate) fn q_shape(problem: &Problem) -> [usize; 4] {
    let d = problem.dims();
    [d.batch, d.num_heads, d.seqlen_q, d.head_dim]
}

pub(crate) fn k_shape(problem: &Problem) -> [usize; 4] {
    let d = problem.dims();
    [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim]
}

pub(crate) fn v_shape(problem: &Problem) -> [usize; 4] {
    let d = problem.dims();
    [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim_v]
}

/// Attention over device memory, without bias, mask and dropout by a mask: [`forward_with`] of q, k and
/// v alone.
///
/// # Errors
/// As [`forward_with`].
#[allow(clippy::too_many_arguments)]
pub fn forward(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    algorithm: Algorithm,
    q: &DeviceView<'_>,
    k: &DeviceView<'_>,
    v: &DeviceView<'_>,
    out: &mut DeviceViewMut<'_>,
    lse: Option<&mut DeviceViewMut<'_>>,
) -> Result<()> {
    let inputs = DeviceInputs::new(*q, *k, *v);
    forward_with(backend, stream, problem, algorithm, &inputs, out, lse)
}

/// Attention over device memory.
///
/// Asynchronous: everything is queued on `stream` (of this backend's context, the caller's own for
/// instance) and the call returns at once. Inputs are read as they lie; those whose rows are not of
/// 16-byte multiples at 16-byte addresses are first laid out anew in memory of the stream's pool, and
/// `standard`, `fa1` and `fa2` for few queries take workspace from there. `out` is `[batch, num_heads, seqlen_q, head_dim_v]`,
/// `lse` f32 `[batch, num_heads, seqlen_q, 1]`, contiguous. Concurrent calls from several threads and on
/// several streams are safe.
///
/// The backend keeps `stream` with up to 64 MiB of memory for the next call there, for 16 streams at most. So
/// a stream that another library owns and that was wrapped for this has to outlive the backend. The memory is
/// not touched while the stream is captured, by whichever thread, unless a capture begins there just as the
/// last clone of the backend is dropped.
///
/// The kernels are the backend's, and are unloaded with its last clone: one has to live until `stream` has passed
/// what was queued, and as long as a graph that the call was captured in is launched.
///
/// # Errors
/// Shapes and dtypes that do not fit `problem`, what [`supports`] refuses, lengths of sequences, alibi_slopes
/// and sinks while `stream` is captured, and failures of the driver.
pub fn forward_with(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    algorithm: Algorithm,
    inputs: &DeviceInputs<'_>,
    out: &mut DeviceViewMut<'_>,
    lse: Option<&mut DeviceViewMut<'_>>,
) -> Result<()> {
    run_forward(backend, stream, problem, algorithm, inputs, out, lse).map(|_| ())
}

/// [`forward_with`], and what its kernels are made for.
pub(crate) fn run_forward(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    algorithm: Algorithm,
    inputs: &DeviceInputs<'_>,
    out: &mut DeviceViewMut<'_>,
    lse: Option<&mut DeviceViewMut<'_>>,
) -> Result<Chips> {
    supports(problem, algorithm)?;
    let dims = problem.dims();
    if problem.page_size().is_some() {
        return Err(unsupported(
            "keys in pages without their table (decode::forward_paged takes it)",
        ));
    }
    inputs.check(problem)?;
    expect_dtype("out", out.dtype(), problem.dtype())?;
    Error::expect_shape("out", out.shape(), dims.out_shape())?;
    if let Some(lse) = &lse {
        check_lse(problem, lse)?;
    }
    if dims.batch * dims.num_heads * dims.seqlen_q == 0 {
        return Ok(Chips::All);
    }
    backend.bind()?;
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    let spread = |tensor, shape| broadcast(tensor, shape, full).unwrap_or_default();
    if decode::serves(problem, algorithm) {
        let (bias, _bias) = inputs.bias.as_ref().map(|x| x.acquire(stream)).unzip();
        let (mask, _mask) = inputs.mask.as_ref().map(|x| x.acquire(stream)).unzip();
        let (q, _q) = inputs.q.acquire(stream);
        let (k, _k) = inputs.k.acquire(stream);
        let (v, _v) = inputs.v.acquire(stream);
        let (o, _o) = out.acquire(stream);
        let (lse, _lse) = lse.map(|lse| lse.acquire(stream)).unzip();
        let placed = Placed {
            q,
            k,
            v,
            o,
            bias: bias
                .zip(inputs.bias)
                .map_or(Tensor::default(), |(t, view)| spread(t, view.shape())),
            mask: mask
                .zip(inputs.mask)
                .map_or(Tensor::default(), |(t, view)| spread(t, view.shape())),
            lse: lse.map_or(0, |lse| lse.ptr),
            ..Placed::default()
        };
        decode::run(backend, stream, problem, &placed)?;
        return Ok(Chips::All);
    }
    let Plan { mut args, mut spec } = plan(problem, 0, dims.seqlen_k)?;
    let mut guards = Vec::with_capacity(8);
    let mut take = |(tensor, guard): (Tensor, Option<_>)| {
        guards.extend(guard);
        tensor
    };
    // fa2 takes f32 apart anyway, however it lies.
    let split = splits(problem, algorithm);
    // What is laid out anew lives to the end of this call; its memory is freed on the stream.
    let mut anew = Vec::new();
    let mut rows = |tensor: Tensor, shape| -> Result<Tensor> {
        if split {
            return Ok(tensor);
        }
        let (tensor, memory) = crate::pack::aligned(backend, stream, tensor, shape, spec.dtype)?;
        anew.extend(memory);
        Ok(tensor)
    };
    args.q = rows(take(inputs.q.acquire(stream)), q_shape(problem))?;
    args.k = rows(take(inputs.k.acquire(stream)), k_shape(problem))?;
    args.v = rows(take(inputs.v.acquire(stream)), v_shape(problem))?;
    args.o = take(out.acquire(stream));
    if let Some(lse) = lse {
        args.lse = take(lse.acquire(stream)).ptr;
    }
    if let Some(bias) = &inputs.bias {
        args.bias = spread(take(bias.acquire(stream)), bias.shape());
    }
    if let Some(mask) = &inputs.mask {
        args.mask = spread(take(mask.acquire(stream)), mask.shape());
    }
    if let Some(keep) = &inputs.keep_mask {
        args.keep = spread(take(keep.acquire(stream)), keep.shape());
    }
    let options = problem.options();
    let mut per_head = Vec::new();
    for (name, values, place) in [
        ("alibi_slopes", options.get_alibi_slopes(), &mut args.alibi),
        ("sinks", options.get_sinks(), &mut args.sinks),
    ] {
        if let Some(values) = values {
            let memory = upload_per_head(stream, name, values)?;
            *place = memory.device_ptr(stream).0;
            per_head.push(memory);
        }
    }
    let beyond = sequences::rows_beyond(problem);
    if !beyond.is_empty() {
        let args = Args {
            row0: beyond.start as i32,
            rows: beyond.len() as i32,
            ..args
        };
        let elements = (dims.batch * dims.num_heads * beyond.len() * dims.head_dim_v.max(1)) as u64;
        let clear = packing::variant("tw_clear_rows", spec.dtype);
        launch_grid_stride(backend, stream, &clear, elements, &args)?;
    }
    if algorithm.resolve() == Algorithm::Fa2 {
        // The sequences with few rows, if they are packed with others.
        let placed = Placed {
            q: args.q,
            k: args.k,
            v: args.v,
            o: args.o,
            bias: args.bias,
            mask: args.mask,
            lse: args.lse,
            ..Placed::default()
        };
        decode::run(backend, stream, problem, &placed)?;
    }
    spec.mask = sequences::mask(problem);
    let result = match algorithm.resolve() {
        Algorithm::Standard => {
            run_standard(backend, stream, problem, args, &spec).map(|()| Chips::All)
        }
        Algorithm::Fa1 => run_fa1(backend, stream, problem, args, &spec).map(|()| Chips::All),
        _ => run_fa2_forward(backend, stream, problem, args, &spec),
    };
    drop((anew, per_head));
    result
}

pub(crate) fn missing(spec: &Spec) -> Error {
    unsupported(format!(
        "head_dim {} and {} in {} within this device's shared memory",
        spec.padded, spec.padded_v, spec.dtype
    ))
}

pub(crate) fn launch<B: raw::Block>(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    variant: &Variant,
    grid: (u64, u64),
    args: &B,
) -> Result<()> {
    let function = backend.modules().get(variant)?;
    let shape = shape(variant, grid);
    // SAFETY: `function` was compiled from this variant's source and takes one `B`. The callers in
    // this crate checked shapes, so that every address the kernel forms lies in the tensors and
    // workspaces named in `args`; those are kept alive by the views' guards, or are freed on this
    // same stream and so after the launch.
    unsafe { raw::launch(stream, &function, shape, args) }
        .map_err(|e| driver(&format!("launching {}", variant.name), e))
}

fn shape(variant: &Variant, grid: (u64, u64)) -> Shape {
    Shape {
        grid: (grid.0 as u32, grid.1 as u32),
        threads: variant.threads,
        shared: variant.shared,
    }
}

/// As [`launch`], for `fa2` behind the kernel that makes pairs of f16: where `args.s` says so, blocks wait
/// for their head's pairs themselves.
fn launch_beside(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    variant: &Variant,
    blocks: u64,
    args: &Args,
) -> Result<()> {
    if args.s == 0 {
        return launch(backend, stream, variant, (blocks, 1), args);
    }
    let function = backend.modules().get(variant)?;
    // SAFETY: as in `launch`. A block waits for the counts of the pairs that it reads, and the last one for the
    // end of the kernel that makes them.
    unsafe {
        let shape = shape(variant, (blocks, 1));
        raw::launch_dependent(stream, function.cu_function(), shape, args)
    }
    .map_err(|e| driver(&format!("launching {}", variant.name), e))
}

/// Bytes of workspace that `fa2` takes.
pub(crate) fn fa2_bytes(problem: &Problem) -> u64 {
    if splits(problem, Algorithm::Fa2) {
        crate::split::bytes(problem)
    } else {
        0
    }
}

/// Whether k and v become pairs of f16 first; the kernel makes those of q.
pub(crate) fn splits(problem: &Problem, algorithm: Algorithm) -> bool {
    let dims = problem.dims();
    algorithm.resolve() == Algorithm::Fa2
        && problem.dtype() == DType::F32
        && pad(dims.head_dim.max(dims.head_dim_v)).is_some()
}

/// `fa2` for every problem: rows of up to 256 columns, or wider ones in slices; all of a batch entry's
/// rows and keys, or those of sequences in a table.
fn run_fa2_forward(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
) -> Result<Chips> {
    let dims = problem.dims();
    let limit = backend.shared_limit();
    let wide = pad(dims.head_dim.max(dims.head_dim_v)).is_none();
    let mut spec = *spec;
    spec.sequences = sequences::needed(problem);
    let pairs = if splits(problem, Algorithm::Fa2) {
        spec.pairs = true;
        Some(crate::split::pairs(backend, stream, &mut args, &spec)?)
    } else {
        None
    };
    let hopper = hopper::serves(backend, problem, &spec)?;
    if let Some(kernel) = hopper.as_ref().filter(|_| !spec.sequences) {
        hopper::run_dense(backend, stream, problem, args, &spec, kernel)?;
        return Ok(Chips::One);
    }
    if !wide && !spec.sequences {
        run_fa2(backend, stream, problem, args, &spec, false)?;
        drop(pairs);
        return Ok(Chips::All);
    }
    let tile = fa2_wide::tile(spec.dtype, dims.head_dim_v);
    let rows = if let Some((_, tile)) = &hopper {
        tile.rows()
    } else if wide {
        tile.rows
    } else {
        fa2::rows(&spec, limit).ok_or_else(|| missing(&spec))?
    };
    let table = if spec.sequences {
        let own = |sequence: &Sequence| !decode::takes(problem, sequence);
        let Some(table) = OnDevice::new(stream, problem, rows as usize, own)? else {
            return Ok(Chips::All);
        };
        table.place(stream, &mut args)?;
        args.pairs = args.heads;
        let keys = problem.sequences().iter().map(|s| s.seqlen_k).sum();
        let most = pairs_per_group(problem, keys, backend.l2_bytes()).min(args.heads);
        let at_a_time = match wide || hopper.is_some() {
            true => 1,
            false => fa2::at_a_time(&spec, limit).unwrap_or(1),
        };
        let at_a_time = backend.multiprocessors() * u64::from(at_a_time);
        group(&mut args, most, spec.mask, at_a_time);
        Some(table)
    } else {
        args.row_blocks = (args.sq as u32).div_ceil(rows) as i32;
        let most = pairs_per_group(problem, dims.seqlen_k, backend.l2_bytes());
        group(&mut args, most, spec.mask, backend.multiprocessors());
        None
    };
    let blocks = args.row_blocks as u64 * args.pairs as u64;
    if blocks > GRID_X {
        return Err(unsupported(format!("{blocks} row blocks in one call")));
    }
    if let Some(kernel) = &hopper {
        hopper::run(backend, stream, problem, args, &spec, kernel)?;
        drop(table);
        return Ok(Chips::One);
    }
    let (variant, columns) = if wide {
        let columns = dims.head_dim_v.div_ceil(tile.columns as usize).max(1) as u64;
        (fa2_wide::variant(&spec, tile, limit), columns)
    } else {
        (fa2::variant(&spec, limit, false), 1)
    };
    let variant = variant.ok_or_else(|| missing(&spec))?;
    launch(backend, stream, &variant, (blocks, columns), &args)?;
    drop((table, pairs));
    Ok(Chips::All)
}

pub(crate) fn run_fa2(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
    state: bool,
) -> Result<()> {
    let limit = backend.shared_limit();
    let mut spec = *spec;
    let multiprocessors = backend.multiprocessors();
    let extent = [args.sq as u64, args.pairs as u64];
    spec.few = !state && fa2::few(&spec, limit, extent, multiprocessors);
    let spec = &spec;
    let variant = fa2::variant(spec, limit, state).ok_or_else(|| missing(spec))?;
    let rows = fa2::rows(spec, limit).ok_or_else(|| missing(spec))?;
    args.row_blocks = (args.sq as u32).div_ceil(rows) as i32;
    let most = match spec.mask {
        Mask::Full => 1,
        _ => pairs_per_group(problem, args.sk as usize, backend.l2_bytes()),
    };
    let at_a_time = multiprocessors * u64::from(fa2::at_a_time(spec, limit).unwrap_or(1));
    group(&mut args, most, spec.mask, at_a_time);
    let blocks = args.row_blocks as u64 * args.pairs as u64;
    if spec.mask != Mask::Full && (multiprocessors + 1..=at_a_time).contains(&blocks) {
        (args.pairs_per_group, args.last_group) = (args.pairs, 0);
        args.turn = multiprocessors as i32;
    }
    launch_beside(backend, stream, &variant, blocks, &args)
}

/// Memory on the stream, freed on it.
pub(crate) fn scratch(stream: &Arc<CudaStream>, what: &str, bytes: u64) -> Result<CudaSlice<u8>> {
    let len = usize::try_from(bytes)
        .map_err(|_| Error::OutOfMemory {
            backend: crate::NAME.into(),
            what: what.into(),
            bytes,
        })?
        .max(16);
    // SAFETY: the kernels write what they read of it.
    unsafe { stream.alloc::<u8>(len) }.map_err(|e| allocation(what, bytes, e))
}

pub(crate) fn address(memory: &mut CudaSlice<u8>, stream: &CudaStream) -> u64 {
    use cudarc::driver::DevicePtrMut;
    let (ptr, _guard) = memory.device_ptr_mut(stream);
    ptr
}

/// Bytes of workspace that `fa1` takes: O in f32, m and l.
pub(crate) fn fa1_bytes(problem: &Problem) -> u64 {
    let dims = problem.dims();
    let rows = dims.batch as u64 * dims.num_heads as u64 * dims.seqlen_q as u64;
    rows * (pad(dims.head_dim).map_or(0, u64::from) + 2) * 4
}

fn run_fa1(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
) -> Result<()> {
    let variant = fa1::variant(spec, backend.shared_limit()).ok_or_else(|| missing(spec))?;
    let rows = args.pairs as u64 * args.sq as u64;
    let mut memory = scratch(stream, "the workspace of fa1", fa1_bytes(problem))?;
    // O first: its rows are read in sixteen-byte pieces.
    args.acc = address(&mut memory, stream);
    args.m = args.acc + rows * u64::from(spec.padded) * 4;
    args.l = args.m + rows * 4;
    launch(backend, stream, &variant, (args.pairs as u64, 1), &args)
}

/// How `standard` cuts one call of its kernels so that S and P stay within `budget` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunks {
    /// (batch, head) pairs a chunk.
    pairs: u64,
    /// Rows a chunk.
    rows: u64,
    /// Length of a row of S and P in elements.
    ld: u64,
}

impl Chunks {
    fn of(pairs: u64, seqlen_q: u64, seqlen_k: u64, dtype: DType, budget: u64) -> Chunks {
        let ld = seqlen_k.next_multiple_of(8);
        let row = (ld * (4 + dtype.size() as u64)).max(1);
        let whole = row.saturating_mul(seqlen_q.max(1));
        let (pairs, rows) = if whole <= budget {
            ((budget / whole).clamp(1, pairs.clamp(1, GRID_Y)), seqlen_q)
        } else {
            // Rows in multiples of every tile's height.
            let rows = (budget / row / 128 * 128).clamp(128, seqlen_q.max(128));
            (1, rows.min(seqlen_q))
        };
        Chunks { pairs, rows, ld }
    }

    fn cells(&self) -> u64 {
        self.pairs * self.rows * self.ld
    }
}

/// The calls of `standard`'s kernels: one for the whole batch, or one for each sequence that has rows.
fn standard_calls(problem: &Problem, args: &Args) -> Vec<Args> {
    if !sequences::needed(problem) {
        return vec![*args];
    }
    (0..problem.sequences().len())
        .filter(|&number| problem.sequences()[number].seqlen_q > 0)
        .map(|number| sequences::alone(problem, number, args))
        .collect()
}

/// Bytes of workspace that `standard` takes.
pub(crate) fn standard_bytes(problem: &Problem, budget: u64) -> u64 {
    let dims = problem.dims();
    let pairs = if sequences::needed(problem) {
        1
    } else {
        dims.batch
    } as u64
        * dims.num_heads as u64;
    let cells = |s: &tilewise_core::problem::Sequence| {
        let (sq, sk) = (s.seqlen_q as u64, s.seqlen_k as u64);
        Chunks::of(pairs, sq, sk, problem.dtype(), budget).cells()
    };
    let most = problem.sequences().iter().map(cells).max().unwrap_or(0);
    most * (4 + problem.dtype().size() as u64)
}

fn run_standard(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    args: Args,
    spec: &Spec,
) -> Result<()> {
    let budget = backend.standard_budget();
    let bytes = standard_bytes(problem, budget);
    let size = spec.dtype.size() as u64;
    let cells = bytes / (4 + size);
    let mut s = scratch(stream, "the score matrix", cells * 4)?;
    let mut p = scratch(stream, "the probability matrix", cells * size)?;
    for mut call in standard_calls(problem, &args) {
        call.s = address(&mut s, stream);
        call.p = address(&mut p, stream);
        standard_call(backend, stream, call, spec, budget)?;
    }
    Ok(())
}

fn standard_call(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    mut args: Args,
    spec: &Spec,
    budget: u64,
) -> Result<()> {
    let limit = backend.shared_limit();
    let seqlen_k = args.sk as usize;
    let [scores, softmax, out] = standard::variants(spec, limit, seqlen_k);
    let (Some(scores), Some(softmax), Some(out)) = (scores, softmax, out) else {
        return Err(missing(spec));
    };
    let tile = standard::scores_tile(spec, limit).ok_or_else(|| missing(spec))?;
    let out_rows = u64::from(standard::out_rows(spec, limit).ok_or_else(|| missing(spec))?);
    let parts = (args.dv as u64).div_ceil(u64::from(spec.padded_v)).max(1);
    let all = args.pairs as u64;
    let sq = args.sq as u64;
    let Chunks { pairs, rows, ld } = Chunks::of(all, sq, seqlen_k as u64, spec.dtype, budget);
    args.ld_s = ld as i64;
    args.ld_p = ld as i64;
    let columns = (args.sk as u64).div_ceil(u64::from(tile.columns));
    for pair0 in (0..all).step_by(pairs as usize) {
        let here = pairs.min(all - pair0);
        for row0 in (0..sq).step_by(rows as usize) {
            let height = rows.min(sq - row0);
            args.pair0 = pair0 as i32;
            args.row0 = row0 as i32;
            args.rows = height as i32;
            if columns > 0 {
                let blocks = height.div_ceil(u64::from(tile.rows)) * columns;
                launch(backend, stream, &scores, (blocks, here), &args)?;
            }
            let blocks = height.div_ceil(u64::from(standard::softmax_rows(seqlen_k)));
            launch(backend, stream, &softmax, (blocks, here), &args)?;
            let blocks = height.div_ceil(out_rows) * parts;
            launch(backend, stream, &out, (blocks, here), &args)?;
        }
    }
    Ok(())
}

/// Launches a kernel whose threads stride over `work` items.
pub(crate) fn launch_grid_stride(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    variant: &Variant,
    work: u64,
    args: &Args,
) -> Result<()> {
    // Enough blocks to fill the device, whatever the size.
    let blocks = work.div_ceil(256).clamp(1, 132 * 16);
    launch(backend, stream, variant, (blocks, 1), args)
}

/// Launches one of the state kernels over `rows` rows.
pub(crate) fn run_state(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    entry: &'static str,
    dtype: DType,
    work: u64,
    args: &Args,
) -> Result<()> {
    let variant = crate::kernels::state::variant(entry, dtype);
    launch_grid_stride(backend, stream, &variant, work, args)
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use super::*;
    use tilewise_core::{Dims, Options};

    fn dims() -> Dims {
        Dims {
            batch: 2,
            num_heads: 4,
            num_kv_heads: 2,
            seqlen_q: 1000,
            seqlen_k: 777,
            head_dim: 64,
            head_dim_v: 64,
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        let refused = |dims: Dims, dtype, options: Options, algorithm| {
            let problem = Problem::dense(dims, dtype, &options).unwrap();
            supports(&problem, algorithm).unwrap_err().to_string()
        };
        let plain = Options::new;
        for algorithm in Algorithm::ALL {
            assert!(refused(dims(), DType::F64, plain(), algorithm).contains("f64"));
        }
        let wide = Dims {
            head_dim_v: 32,
            ..dims()
        };
        let large = Dims {
            head_dim: 320,
            head_dim_v: 320,
            ..dims()
        };
        for (dims, options, word) in [
            (wide, plain(), "head_dim_v"),
            (large, plain(), "320"),
            (dims(), plain().sinks(vec![0.0; 4]), "sinks"),
            (dims(), plain().alibi_slopes(vec![0.5; 4]), "alibi"),
        ] {
            let text = refused(dims, DType::F32, options.clone(), Algorithm::Fa1);
            assert!(text.contains(word) && text.contains("fa1"), "{text}");
            let problem = Problem::dense(dims, DType::F32, &options).unwrap();
            for algorithm in [Algorithm::Standard, Algorithm::Fa2] {
                assert!(supports(&problem, algorithm).is_ok());
            }
        }
        let problem = Problem::dense(dims(), DType::BF16, &Options::new().causal(true)).unwrap();
        for algorithm in Algorithm::ALL {
            assert!(supports(&problem, algorithm).is_ok());
        }
    }

    #[test]
    fn standard_stays_within_its_budget() {
        for budget in [1 << 16, 1 << 20, 5 << 20, 1 << 30] {
            let Chunks { pairs, rows, ld } = Chunks::of(8, 1000, 777, DType::F16, budget);
            assert!(ld >= 777 && ld.is_multiple_of(8));
            assert!((1..=8).contains(&pairs) && (1..=1000).contains(&rows));
            let floor = 128 * ld * 6;
            assert!(pairs * rows * ld * 6 <= budget.max(floor));
            assert!(rows == 1000 || rows % 128 == 0);
        }
    }

    /// Row block and pair of each block of a launch, as `place_of` in `place.cu` has them, under a diagonal.
    fn places(args: &Args) -> Vec<(i32, i32)> {
        let per = args.row_blocks * args.pairs_per_group;
        let place = |mut block: i32| {
            if args.turn > 0 && block >= args.turn {
                block = args.row_blocks * args.pairs - 1 - (block - args.turn);
            }
            let g = (block / per).min(args.last_group);
            let width = if g < args.last_group {
                args.pairs_per_group
            } else {
                args.pairs - g * args.pairs_per_group
            };
            let r = block - g * per;
            let item = r / width;
            let pair = g * args.pairs_per_group + r - item * width;
            (args.row_blocks - 1 - item, pair)
        };
        (0..args.row_blocks * args.pairs).map(place).collect()
    }

    fn grouped(pairs: i32, most: i32, row_blocks: i32, mask: Mask, at_a_time: u64) -> Args {
        let mut args = Args {
            pairs,
            row_blocks,
            ..Args::default()
        };
        group(&mut args, most, mask, at_a_time);
        args
    }

    #[test]
    fn groups_hold_every_row_block_once() {
        let each: Vec<_> = (1..8)
            .map(|most| (7, most))
            .chain([(1, 1), (16, 3), (5, 9)])
            .collect();
        for (pairs, most) in each {
            for (mask, turn) in [(Mask::Full, 0), (Mask::Upper, 0), (Mask::Band, 3)] {
                let mut args = grouped(pairs, most, 5, mask, 8);
                args.turn = turn;
                let mut all = places(&args);
                assert_eq!(all[0].0, 4, "the longest first");
                all.sort_unstable();
                let once = (0..5).flat_map(|rb| (0..pairs).map(move |pair| (rb, pair)));
                assert!(all.into_iter().eq(once), "{args:?}");
            }
        }
    }

    #[test]
    fn row_blocks_that_run_at_once_are_a_long_and_a_short_one() {
        let mut args = grouped(1, 1, 200, Mask::Upper, 264);
        args.turn = 132;
        let all = places(&args);
        assert_eq!(
            (all[0].0, all[131].0, all[132].0, all[199].0),
            (199, 68, 0, 67)
        );
    }

    /// Blocks given out in order to whoever is free, where a row block takes as long as the keys it sees.
    #[test]
    fn a_causal_launch_ends_on_all_multiprocessors_at_about_the_same_time() {
        for slots in [132, 216, 264, 288] {
            for (pairs, most, row_blocks) in [(64, 12, 32), (32, 6, 64), (16, 3, 128), (8, 1, 256)]
            {
                let mut free = std::collections::BinaryHeap::from(vec![Reverse(0u64); slots]);
                let mut work = 0;
                for (rb, _) in places(&grouped(pairs, most, row_blocks, Mask::Upper, slots as u64))
                {
                    let Reverse(at) = free.pop().unwrap();
                    work += rb as u64 + 1;
                    free.push(Reverse(at + rb as u64 + 1));
                }
                let end = free.into_iter().map(|Reverse(at)| at).max().unwrap();
                let even = work as f64 / slots as f64;
                assert!(
                    end as f64 <= 1.03 * even,
                    "{slots} {pairs} {most}: {end} where {even}"
                );
            }
        }
    }

    #[test]
    fn scale_and_softcap_decide_where_the_scale_is_applied() {
        let spec = |options: Options| {
            let problem = Problem::dense(dims(), DType::F32, &options).unwrap();
            plan(&problem, 0, 777).unwrap().spec
        };
        assert_eq!(spec(Options::new()).score, Score::Folded);
        assert_eq!(spec(Options::new().softcap(5.0)).score, Score::Applied);
        assert_eq!(
            spec(Options::new().softmax_scale(-1.0)).score,
            Score::Applied
        );
        assert_eq!(
            spec(Options::new().softmax_scale(0.0)).score,
            Score::Applied
        );
        assert_eq!(spec(Options::new().causal(true)).mask, Mask::Upper);
        assert_eq!(spec(Options::new().window_left(3)).mask, Mask::Band);
    }
}
