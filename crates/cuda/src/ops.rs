//! Operations over device memory: checked, asynchronous, on the caller's stream.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use tilewise_core::{Algorithm, DType, Error, Problem, Result};

use crate::backend::CudaBackend;
use crate::error::{allocation, driver, unsupported};
use crate::kernels::{Mask, Score, Spec, Variant, fa1, fa2, pad, standard};
use crate::raw::{self, Args, Shape};
use crate::view::{DeviceView, DeviceViewMut, aligned};

/// Blocks that one launch may have along x.
const GRID_X: u64 = i32::MAX as u64;
/// And along y.
const GRID_Y: u64 = 65_535;

/// Whether this backend can do `problem` with `algorithm`.
///
/// # Errors
/// [`Error::Unsupported`] naming the first thing it cannot do.
pub fn supports(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    let (dims, options) = (problem.dims(), problem.options());
    let refuse = |what: String| Err(unsupported(format!("{what} with {}", algorithm.resolve())));
    match problem.dtype() {
        DType::F16 | DType::BF16 | DType::F32 => {}
        other => return refuse(format!("dtype {other}")),
    }
    if problem.is_packed() {
        return refuse("packed sequences (cu_seqlens)".into());
    }
    if problem.page_size().is_some() {
        return refuse("paged keys (block_table)".into());
    }
    if problem.has_bias() {
        return refuse("a bias".into());
    }
    if problem.has_mask() {
        return refuse("a boolean mask".into());
    }
    if options.get_dropout().is_some() {
        return refuse("dropout".into());
    }
    if options.get_alibi_slopes().is_some() {
        return refuse("alibi_slopes".into());
    }
    if options.get_sinks().is_some() {
        return refuse("sinks".into());
    }
    if problem
        .sequences()
        .iter()
        .any(|sequence| sequence.seqlen_k != dims.seqlen_k)
    {
        return refuse("seqused_k".into());
    }
    if dims.head_dim_v != dims.head_dim {
        return refuse(format!(
            "head_dim_v {} other than head_dim {}",
            dims.head_dim_v, dims.head_dim
        ));
    }
    if pad(dims.head_dim).is_none() {
        return refuse(format!("head_dim {} (at most 256)", dims.head_dim));
    }
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

/// Kernel arguments and compile-time needs that follow from a problem and where its tensors lie.
pub(crate) struct Plan {
    pub(crate) args: Args,
    pub(crate) spec: Spec,
}

/// `first_key` and `keys` narrow the problem's keys for a state that takes them in parts.
pub(crate) fn plan(problem: &Problem, first_key: usize, keys: usize) -> Result<Plan> {
    let (dims, options) = (problem.dims(), problem.options());
    let padded = pad(dims.head_dim).ok_or_else(|| unsupported("head_dim above 256"))?;
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
    let args = Args {
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
    Ok(Plan {
        args,
        spec: Spec {
            mask,
            score,
            ..Spec::plain(problem.dtype(), padded)
        },
    })
}

/// (batch, head) pairs whose K and V together stay in a good part of the second-level cache.
pub(crate) fn pairs_per_group(problem: &Problem, keys: usize, cache: u64) -> i32 {
    let dims = problem.dims();
    let head = 2 * keys as u64 * dims.head_dim as u64 * problem.dtype().size() as u64;
    let fit = (cache * 2 / 5) * dims.group() as u64 / head.max(1);
    fit.clamp(1, (dims.batch * dims.num_heads).max(1) as u64) as i32
}

fn expect(name: &'static str, got: [usize; 4], wanted: [usize; 4]) -> Result<()> {
    if got == wanted {
        Ok(())
    } else {
        Err(Error::shape(
            name,
            format!("{wanted:?}"),
            format!("{got:?}"),
        ))
    }
}

fn expect_dtype(name: &'static str, got: DType, wanted: DType) -> Result<()> {
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
    expect("lse", lse.shape(), [b, h, s, 1])?;
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

/// Attention over device memory.
///
/// Asynchronous: everything is queued on `stream` (of this backend's context, the caller's own for
/// instance) and the call returns at once. Inputs are read as they lie; `out` is
/// `[batch, num_heads, seqlen_q, head_dim]`, `lse` f32 `[batch, num_heads, seqlen_q, 1]`, contiguous.
/// Concurrent calls from several threads and on several streams are safe. `standard` and `fa1` take
/// workspace from the stream's memory pool.
///
/// # Errors
/// Shapes and dtypes that do not fit `problem`, what [`supports`] refuses, and failures of the driver.
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
    supports(problem, algorithm)?;
    let dims = problem.dims();
    let wide = [dims.batch, dims.num_kv_heads, dims.seqlen_k, dims.head_dim];
    for (name, view, shape) in [("q", q, dims.out_shape()), ("k", k, wide), ("v", v, wide)] {
        expect_dtype(name, view.dtype(), problem.dtype())?;
        expect(name, view.shape(), shape)?;
    }
    expect_dtype("out", out.dtype(), problem.dtype())?;
    expect("out", out.shape(), dims.out_shape())?;
    if let Some(lse) = &lse {
        check_lse(problem, lse)?;
    }
    if dims.batch * dims.num_heads * dims.seqlen_q == 0 {
        return Ok(());
    }
    backend.bind()?;
    let Plan { mut args, mut spec } = plan(problem, 0, dims.seqlen_k)?;
    let mut guards = Vec::with_capacity(5);
    let mut take = |(tensor, guard): (raw::Tensor, Option<_>)| {
        guards.extend(guard);
        tensor
    };
    args.q = take(q.acquire(stream));
    args.k = take(k.acquire(stream));
    args.v = take(v.acquire(stream));
    args.o = take(out.acquire(stream));
    if let Some(lse) = lse {
        args.lse = take(lse.acquire(stream)).ptr;
    }
    spec.aligned = [
        (&args.q, dims.out_shape()),
        (&args.k, wide),
        (&args.v, wide),
        (&args.o, dims.out_shape()),
    ]
    .into_iter()
    .all(|(tensor, shape)| aligned(tensor, shape, spec.dtype));

    match algorithm.resolve() {
        Algorithm::Standard => run_standard(backend, stream, problem, args, &spec),
        Algorithm::Fa1 => run_fa1(backend, stream, problem, args, &spec),
        _ => run_fa2(backend, stream, problem, args, &spec, false),
    }
}

fn missing(spec: &Spec) -> Error {
    unsupported(format!(
        "head_dim {} in {} within this device's shared memory",
        spec.padded, spec.dtype
    ))
}

fn launch(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    variant: &Variant,
    grid: (u64, u64),
    args: &Args,
) -> Result<()> {
    let function = backend.modules().get(variant)?;
    let shape = Shape {
        grid: (grid.0 as u32, grid.1 as u32),
        threads: variant.threads,
        shared: variant.shared,
    };
    // SAFETY: `function` was compiled from this variant's source and takes one `Args`. The callers in
    // this module checked shapes, so that every address the kernel forms lies in the tensors and
    // workspaces named in `args`; those are kept alive by the views' guards, or are freed on this
    // same stream and so after the launch.
    unsafe { raw::launch(stream, &function, shape, args) }
        .map_err(|e| driver(&format!("launching {}", variant.name), e))
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
    let variant = fa2::variant(spec, limit, state).ok_or_else(|| missing(spec))?;
    let rows = fa2::rows(spec, limit).ok_or_else(|| missing(spec))?;
    args.row_blocks = (args.sq as u32).div_ceil(rows) as i32;
    if spec.mask != Mask::Full {
        args.pairs_per_group = pairs_per_group(problem, args.sk as usize, backend.l2_bytes());
    }
    let blocks = args.row_blocks as u64 * args.pairs as u64;
    launch(backend, stream, &variant, (blocks, 1), &args)
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

fn address(memory: &mut CudaSlice<u8>, stream: &CudaStream) -> u64 {
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

/// How `standard` cuts a call so that S and P stay within `budget` bytes: pairs a chunk, rows a chunk.
pub(crate) fn standard_chunks(problem: &Problem, budget: u64) -> (u64, u64, u64) {
    let dims = problem.dims();
    let ld = (dims.seqlen_k as u64).next_multiple_of(8);
    let row = (ld * (4 + problem.dtype().size() as u64)).max(1);
    let pairs = dims.batch as u64 * dims.num_heads as u64;
    let sq = dims.seqlen_q as u64;
    let whole = row * sq.max(1);
    if whole <= budget {
        ((budget / whole).clamp(1, pairs.clamp(1, GRID_Y)), sq, ld)
    } else {
        // Rows in multiples of every tile's height.
        let rows = (budget / row / 128 * 128).clamp(128, sq.max(128));
        (1, rows.min(sq), ld)
    }
}

fn run_standard(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    mut args: Args,
    spec: &Spec,
) -> Result<()> {
    let dims = problem.dims();
    let limit = backend.shared_limit();
    let [scores, softmax, out] = standard::variants(spec, limit, dims.seqlen_k);
    let (Some(scores), Some(softmax), Some(out)) = (scores, softmax, out) else {
        return Err(missing(spec));
    };
    let tile = standard::scores_tile(spec, limit).ok_or_else(|| missing(spec))?;
    let out_rows = u64::from(standard::out_rows(spec, limit).ok_or_else(|| missing(spec))?);
    let (pairs, rows, ld) = standard_chunks(problem, backend.standard_budget());
    let cells = pairs * rows * ld;
    let mut s = scratch(stream, "the score matrix", cells * 4)?;
    let mut p = scratch(
        stream,
        "the probability matrix",
        cells * spec.dtype.size() as u64,
    )?;
    args.s = address(&mut s, stream);
    args.p = address(&mut p, stream);
    args.ld_s = ld as i64;
    args.ld_p = ld as i64;
    let all = args.pairs as u64;
    let sq = args.sq as u64;
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
            let blocks = height.div_ceil(u64::from(standard::softmax_rows(dims.seqlen_k)));
            launch(backend, stream, &softmax, (blocks, here), &args)?;
            launch(
                backend,
                stream,
                &out,
                (height.div_ceil(out_rows), here),
                &args,
            )?;
        }
    }
    Ok(())
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
    // Grid-stride loops: enough blocks to fill the device, whatever the size.
    let blocks = work.div_ceil(256).clamp(1, 132 * 16);
    launch(backend, stream, &variant, (blocks, 1), args)
}

#[cfg(test)]
mod tests {
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
    fn what_is_not_there_yet_is_refused_by_name() {
        let refused = |dims: Dims, dtype, options: Options| {
            let problem = Problem::dense(dims, dtype, &options).unwrap();
            supports(&problem, Algorithm::Fa2).unwrap_err().to_string()
        };
        assert!(refused(dims(), DType::F64, Options::new()).contains("f64"));
        let wide = Dims {
            head_dim_v: 32,
            ..dims()
        };
        assert!(refused(wide, DType::F32, Options::new()).contains("head_dim_v"));
        let large = Dims {
            head_dim: 320,
            head_dim_v: 320,
            ..dims()
        };
        assert!(refused(large, DType::F32, Options::new()).contains("320"));
        assert!(refused(dims(), DType::F32, Options::new().sinks(vec![0.0; 4])).contains("sinks"));
        assert!(
            refused(
                dims(),
                DType::F32,
                Options::new().alibi_slopes(vec![0.5; 4])
            )
            .contains("alibi")
        );
        let problem = Problem::dense(dims(), DType::BF16, &Options::new().causal(true)).unwrap();
        for algorithm in Algorithm::ALL {
            assert!(supports(&problem, algorithm).is_ok());
        }
    }

    #[test]
    fn standard_stays_within_its_budget() {
        let problem = Problem::dense(dims(), DType::F16, &Options::new()).unwrap();
        for budget in [1 << 16, 1 << 20, 5 << 20, 1 << 30] {
            let (pairs, rows, ld) = standard_chunks(&problem, budget);
            assert!(ld >= 777 && ld % 8 == 0);
            assert!((1..=8).contains(&pairs) && (1..=1000).contains(&rows));
            let floor = 128 * ld * 6;
            assert!(pairs * rows * ld * 6 <= budget.max(floor));
            assert!(rows == 1000 || rows % 128 == 0);
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
