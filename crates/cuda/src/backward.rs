//! Gradients over device memory: checked, asynchronous, on the caller's stream.

mod hopper;

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use tilewise_core::{Algorithm, DType, Error, Problem, Result, Sequence};

use crate::backend::{Chips, CudaBackend, device_zeros};
use crate::error::unsupported;
use crate::kernels::backward::standard::{self, Part};
use crate::kernels::backward::{fa1, fa2, wide, widths};
use crate::kernels::{self, Mask, Spec, Variant, pad};
use crate::ops::{DeviceInputs, check_lengths, scratch};
use crate::ops::{
    Plan, address, expect_dtype, launch, missing, pairs_per_group, plan, upload_per_head,
};
use crate::raw::{self, BackwardArgs};
use crate::sequences;
use crate::view::{DeviceView, DeviceViewMut, aligned, broadcast, contiguous};

/// How dQ is summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sums {
    /// In an order that does not change, and so do the bits not from run to run: on Hopper blocks of keys
    /// add to sums in device memory by turns, from the last keys to the first; elsewhere, and for what that
    /// kernel does not serve, a kernel of its own sums up in registers, seven products a tile in place of five.
    #[default]
    Ordered,
    /// In device memory, as blocks of keys come to it: mostly faster, and the last bits of dq may change from
    /// run to run. Those of the other gradients do not. Only of `fa2` and up to head_dim 256, and on Hopper not
    /// without a mask up to head_dim 64, where turns are faster; the rest is as [`Sums::Ordered`] says.
    Atomic,
}

/// What gradients are made from, in device memory; shapes as in
/// [`BackwardInputs`](tilewise_core::BackwardInputs).
#[derive(Clone, Copy, Debug)]
pub struct DeviceBackward<'a> {
    /// What the forward call was given.
    pub inputs: DeviceInputs<'a>,
    /// Its output.
    pub out: DeviceView<'a>,
    /// Its ln Σ e^score: f32 `[batch, num_heads, seqlen_q, 1]`.
    pub lse: DeviceView<'a>,
    /// The gradient at out.
    pub dout: DeviceView<'a>,
    /// The gradient at lse; `None`: 0.
    pub dlse: Option<DeviceView<'a>>,
}

/// Where gradients go, in device memory; every element is written.
#[derive(Debug)]
pub struct DeviceGradients<'a> {
    /// As q.
    pub dq: DeviceViewMut<'a>,
    /// As k.
    pub dk: DeviceViewMut<'a>,
    /// As v.
    pub dv: DeviceViewMut<'a>,
    /// As the bias, broadcast axes of size 1 included; only with a bias. It costs two products more,
    /// which take memory as `standard` does.
    pub dbias: Option<DeviceViewMut<'a>>,
    /// f32 `[1, 1, 1, num_heads]`, only with sinks.
    pub dsinks: Option<DeviceViewMut<'a>>,
}

/// Whether this backend can make the gradients of `problem` with `algorithm`.
///
/// # Errors
/// [`Error::Unsupported`] naming the first thing it cannot do.
pub fn supports(problem: &Problem, algorithm: Algorithm) -> Result<()> {
    let dims = problem.dims();
    let refuse = |what: String| {
        let algorithm = algorithm.resolve();
        Err(unsupported(format!("{what} backward with {algorithm}")))
    };
    match problem.dtype() {
        DType::F16 | DType::BF16 | DType::F32 => {}
        other => return refuse(format!("dtype {other}")),
    }
    let widest = dims.head_dim.max(dims.head_dim_v);
    if pad(widest).is_none() && algorithm.resolve() == Algorithm::Fa1 {
        return refuse(format!("head_dim {widest} (at most 256)"));
    }
    if dims.head_dim_v == 0 {
        return refuse("head_dim_v 0".into());
    }
    check_lengths(problem, algorithm)
}

/// Whether a call of `algorithm` with these `sums` runs Hopper's own kernel.
pub(crate) fn by_warpgroups(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
    sums: Sums,
) -> bool {
    let dims = problem.dims();
    let Ok(Plan { spec, .. }) = plan(problem, 0, dims.seqlen_k) else {
        return false;
    };
    let mut spec = widths(&spec);
    spec.mask = sequences::mask(problem);
    // A problem without rows runs no kernel.
    dims.batch * dims.num_heads * dims.seqlen_q > 0
        && algorithm.resolve() == Algorithm::Fa2
        && matches!(hopper::serves(backend, problem, &spec, sums), Ok(Some(_)))
}

/// Bytes of workspace that a call takes, without copies of inputs that are laid out anew and the matrices of
/// dbias; of `standard`'s matrices, what its budget allows, if more than one KV head's fit.
pub(crate) fn workspace_bytes(
    backend: &CudaBackend,
    problem: &Problem,
    algorithm: Algorithm,
    sums: Sums,
) -> u64 {
    let dims = problem.dims();
    let budget = backend.standard_budget();
    // FA1 adds in memory, in the order of its one block a head, whatever was asked for.
    let sums = match algorithm.resolve() {
        Algorithm::Fa1 => Sums::Atomic,
        _ => sums,
    };
    let in_memory = match is_wide(problem) {
        false => 4 * hopper::sum_columns(backend, problem, sums),
        true => 0,
    };
    // L, Δ and marks; the sums of dQ; FA1's m and 1/ℓ.
    let row = match algorithm.resolve() {
        Algorithm::Fa1 => 9 + in_memory + 8,
        Algorithm::Fa2 => 9 + in_memory,
        _ => 9,
    };
    let batch = if is_dense(problem) { dims.batch } else { 1 };
    let bytes = |sequence: &Sequence| {
        let rows = sequence.seqlen_q.next_multiple_of(fa2::ROW_PADDING) as u64;
        let matrices = match algorithm.resolve() {
            Algorithm::Standard => {
                let (pairs, pair, _) = matrices(problem, sequence, batch, budget);
                pairs * dims.group() as u64 * pair
            }
            _ => 0,
        };
        let keys = (batch * dims.num_kv_heads) as u64 * marks_of_keys(sequence.seqlen_k);
        let cells = rows * batch as u64 * dims.num_heads as u64;
        let turns = kernels::backward::hopper::turns(cells);
        cells * row + keys + matrices + turns
    };
    problem.sequences().iter().map(bytes).max().unwrap_or(0)
}

/// Bytes of the marks of one head's keys, one of four bytes for sixteen.
fn marks_of_keys(seqlen_k: usize) -> u64 {
    seqlen_k.div_ceil(128) as u64 * 32
}

/// How `standard` cuts a sequence: (batch, KV head) pairs at a time, bytes of the matrices of one
/// query head, elements of one of their rows.
fn matrices(problem: &Problem, sequence: &Sequence, batch: usize, budget: u64) -> (u64, u64, u64) {
    let dims = problem.dims();
    let ld = (sequence.seqlen_k as u64).next_multiple_of(8);
    // S and dP in f32, P and dX in the dtype.
    let pair = sequence.seqlen_q as u64 * ld * (8 + 2 * problem.dtype().size() as u64);
    let group = dims.group().max(1) as u64;
    let most = (batch * dims.num_kv_heads).max(1) as u64;
    let pairs = budget / (pair * group).max(1);
    (pairs.clamp(1, most.min(65_535 / group).max(1)), pair, ld)
}

/// Whether rows come in slices: of `fa2`, which then has no dQ in memory, and of `standard`.
fn is_wide(problem: &Problem) -> bool {
    let dims = problem.dims();
    pad(dims.head_dim.max(dims.head_dim_v)).is_none()
}

/// Whether every sequence is a whole entry of the batch.
fn is_dense(problem: &Problem) -> bool {
    !problem.is_packed()
        && problem
            .sequences()
            .iter()
            .all(|sequence| sequence.seqlen_k == problem.dims().seqlen_k)
}

/// The tensors of a call as the kernels see them.
#[derive(Clone, Copy, Debug, Default)]
struct Tensors {
    q: raw::Tensor,
    k: raw::Tensor,
    v: raw::Tensor,
    out: raw::Tensor,
    lse: raw::Tensor,
    dlse: raw::Tensor,
    dout: raw::Tensor,
    dq: raw::Tensor,
    dk: raw::Tensor,
    dv: raw::Tensor,
    /// Of every pair of a row and a key; broadcast axes have a stride of 0.
    bias: raw::Tensor,
    mask: raw::Tensor,
    keep: raw::Tensor,
}

impl Tensors {
    /// Those of one sequence, as a batch of one.
    fn of(&self, sequence: &Sequence, dtype: DType) -> Tensors {
        let from = |tensor: raw::Tensor, size: usize, batch: usize, start: usize| raw::Tensor {
            ptr: match tensor.ptr {
                0 => 0,
                ptr => ptr.wrapping_add_signed(
                    (batch as i64 * tensor.sb + start as i64 * tensor.ss) * size as i64,
                ),
            },
            ..tensor
        };
        let rows = |tensor, size| from(tensor, size, sequence.q_batch, sequence.q_start);
        let keys = |tensor| from(tensor, dtype.size(), sequence.k_batch, sequence.k_start);
        let pairs = |tensor: raw::Tensor, size: usize| {
            let tensor = rows(tensor, size);
            raw::Tensor {
                ptr: match tensor.ptr {
                    0 => 0,
                    ptr => {
                        ptr.wrapping_add_signed(sequence.k_start as i64 * tensor.sd * size as i64)
                    }
                },
                ..tensor
            }
        };
        Tensors {
            bias: pairs(self.bias, dtype.size()),
            mask: pairs(self.mask, 1),
            keep: pairs(self.keep, 1),
            q: rows(self.q, dtype.size()),
            k: keys(self.k),
            v: keys(self.v),
            out: rows(self.out, dtype.size()),
            lse: rows(self.lse, 4),
            dlse: rows(self.dlse, 4),
            dout: rows(self.dout, dtype.size()),
            dq: rows(self.dq, dtype.size()),
            dk: keys(self.dk),
            dv: keys(self.dv),
        }
    }
}

/// Gradients over device memory.
///
/// Asynchronous, as [`ops::forward`](crate::ops::forward) is; inputs are read as they lie, but where
/// Hopper's kernel serves and its copy engine cannot walk them (rows that are no 16-byte multiples at
/// 16-byte addresses, strides of 0 or below), which takes a copy of that input. out and lse must be what a
/// forward call of the same problem gave. Workspace comes from the stream's pool.
///
/// NaN and infinity of pairs that are hidden do not reach gradients. Infinity in q or k under a softcap, where
/// scores and outputs stay finite, is the exception: what it makes of dq, dk and dv (a number, or NaN, also of
/// hidden keys) depends on the algorithm and on the tiles.
///
/// # Errors
/// Shapes and dtypes that do not fit `problem`, what [`supports`] refuses, pages (which have to be
/// gathered first), alibi_slopes and sinks while `stream` is captured, and failures of the driver.
pub fn backward(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    algorithm: Algorithm,
    sums: Sums,
    inputs: &DeviceBackward<'_>,
    gradients: &mut DeviceGradients<'_>,
) -> Result<()> {
    run_backward(backend, stream, problem, algorithm, sums, inputs, gradients).map(|_| ())
}

/// [`backward`], and what its kernels are made for.
pub(crate) fn run_backward(
    backend: &CudaBackend,
    stream: &Arc<CudaStream>,
    problem: &Problem,
    algorithm: Algorithm,
    sums: Sums,
    inputs: &DeviceBackward<'_>,
    gradients: &mut DeviceGradients<'_>,
) -> Result<Chips> {
    supports(problem, algorithm)?;
    if problem.page_size().is_some() {
        return Err(unsupported("paged keys (block_table) backward"));
    }
    let dims = *problem.dims();
    let (out, [b, h, s]) = (dims.out_shape(), dims.lse_shape());
    let q = [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim];
    let (dk, dv) = (problem.dk_shape(), problem.dv_shape());
    let lse = [b, h, s, 1];
    let dtype = problem.dtype();
    let given = &inputs.inputs;
    given.check(problem)?;
    let read = [
        ("out", &inputs.out, out, dtype),
        ("dout", &inputs.dout, out, dtype),
        ("lse", &inputs.lse, lse, DType::F32),
    ];
    let more = inputs.dlse.iter().map(|x| ("dlse", x, lse, DType::F32));
    for (name, view, shape, dtype) in read.into_iter().chain(more) {
        expect_dtype(name, view.dtype(), dtype)?;
        Error::expect_shape(name, view.shape(), shape)?;
    }
    let written = [
        ("dq", &gradients.dq, q, dtype),
        ("dk", &gradients.dk, dk, dtype),
        ("dv", &gradients.dv, dv, dtype),
    ];
    let sinks = [1, 1, 1, dims.num_heads];
    let more = gradients.dsinks.iter();
    let more = more.map(|x| ("dsinks", x, sinks, DType::F32));
    for (name, view, shape, dtype) in written.into_iter().chain(more) {
        expect_dtype(name, view.dtype(), dtype)?;
        Error::expect_shape(name, view.shape(), shape)?;
    }
    if gradients.dsinks.is_some() && problem.options().get_sinks().is_none() {
        return Err(Error::shape(
            "dsinks",
            "none: there are no sinks",
            "a tensor",
        ));
    }
    if let Some(dbias) = &gradients.dbias {
        let bias = given.bias.as_ref().map(DeviceView::shape);
        let bias =
            bias.ok_or_else(|| Error::shape("dbias", "none: there is no bias", "a tensor"))?;
        expect_dtype("dbias", dbias.dtype(), dtype)?;
        Error::expect_shape("dbias", dbias.shape(), bias)?;
    }
    backend.bind()?;
    let mut guards = Vec::new();
    let mut take = |(tensor, guard): (raw::Tensor, Option<_>)| {
        guards.extend(guard);
        tensor
    };
    let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
    let spread = |tensor, shape| broadcast(tensor, shape, full).unwrap_or_default();
    let tensors = Tensors {
        q: take(given.q.acquire(stream)),
        k: take(given.k.acquire(stream)),
        v: take(given.v.acquire(stream)),
        out: take(inputs.out.acquire(stream)),
        lse: take(inputs.lse.acquire(stream)),
        dlse: match &inputs.dlse {
            Some(dlse) => take(dlse.acquire(stream)),
            None => raw::Tensor::default(),
        },
        dout: take(inputs.dout.acquire(stream)),
        dq: take(gradients.dq.acquire(stream)),
        dk: take(gradients.dk.acquire(stream)),
        dv: take(gradients.dv.acquire(stream)),
        bias: match &given.bias {
            Some(bias) => spread(take(bias.acquire(stream)), bias.shape()),
            None => raw::Tensor::default(),
        },
        mask: match &given.mask {
            Some(mask) => spread(take(mask.acquire(stream)), mask.shape()),
            None => raw::Tensor::default(),
        },
        keep: match &given.keep_mask {
            Some(keep) => spread(take(keep.acquire(stream)), keep.shape()),
            None => raw::Tensor::default(),
        },
    };
    let dsinks = match &mut gradients.dsinks {
        Some(dsinks) => take(dsinks.acquire(stream)).ptr,
        None => 0,
    };
    let dbias = match &mut gradients.dbias {
        Some(dbias) => {
            let shape = dbias.shape();
            Some((take(dbias.acquire(stream)), shape))
        }
        None => None,
    };
    let is_aligned = [
        (&tensors.q, q),
        (&tensors.k, dk),
        (&tensors.v, dv),
        (&tensors.out, out),
        (&tensors.dout, out),
        (&tensors.dq, q),
        (&tensors.dk, dk),
        (&tensors.dv, dv),
    ]
    .into_iter()
    .all(|(tensor, shape)| aligned(tensor, shape, dtype));
    let call = Call {
        backend,
        stream,
        problem,
        algorithm: algorithm.resolve(),
        sums,
        is_aligned,
    };
    call.run(&tensors, dsinks, dbias)
}

struct Call<'a> {
    backend: &'a CudaBackend,
    stream: &'a Arc<CudaStream>,
    problem: &'a Problem,
    algorithm: Algorithm,
    sums: Sums,
    is_aligned: bool,
}

impl Call<'_> {
    fn run(
        &self,
        tensors: &Tensors,
        dsinks: u64,
        dbias: Option<(raw::Tensor, [usize; 4])>,
    ) -> Result<Chips> {
        let (problem, dims) = (self.problem, *self.problem.dims());
        let options = problem.options();
        let per_head = |name, values: Option<&[f32]>| {
            let upload = |values| upload_per_head(self.stream, name, values);
            values.map(upload).transpose()
        };
        let slopes = per_head("alibi_slopes", options.get_alibi_slopes())?;
        let sinks = per_head("sinks", options.get_sinks())?;
        let bytes = workspace_bytes(self.backend, problem, self.algorithm, self.sums);
        let mut workspace = scratch(self.stream, "the workspace of backward", bytes)?;
        let place = |memory: &Option<CudaSlice<f32>>| {
            memory
                .as_ref()
                .map_or(0, |memory| memory.device_ptr(self.stream).0)
        };
        let mut sums = match &dbias {
            Some((_, shape)) => {
                let len = shape.iter().product();
                Some(device_zeros::<f32>(self.stream, "sums of dbias", len)?)
            }
            None => None,
        };
        let given = Given {
            alibi: place(&slopes),
            sinks: place(&sinks),
            workspace: address(&mut workspace, self.stream),
            workspace_bytes: bytes,
            dsinks,
            dbias: match (&mut sums, &dbias) {
                (Some(sums), Some((_, shape))) => {
                    let strides = contiguous(*shape);
                    let stride = |axis: usize| match shape[axis] {
                        1 => 0,
                        _ => strides[axis] as i64,
                    };
                    raw::Tensor {
                        ptr: sums.device_ptr_mut(self.stream).0,
                        sb: stride(0),
                        sh: stride(1),
                        ss: stride(2),
                        sd: stride(3),
                    }
                }
                _ => raw::Tensor::default(),
            },
        };
        if dsinks != 0 {
            // One row of num_heads f32 values, which every sequence adds to.
            let row = raw::Tensor {
                ptr: dsinks,
                ..raw::Tensor::default()
            };
            self.fill(DType::F32, row, [1, 1, dims.num_heads], 0..1)?;
        }
        let chips = self.sequences(tensors, &given)?;
        if let Some((to, shape)) = dbias {
            let [_, store] = standard::bias(&Spec::plain(problem.dtype(), 64), false);
            let mut args = BackwardArgs {
                dbias: to,
                ..BackwardArgs::default()
            };
            let sizes = shape.map(|size| size as i32);
            args.forward.s = given.dbias.ptr;
            [args.forward.batch, args.forward.heads] = [sizes[0], sizes[1]];
            [args.forward.sq, args.forward.sk] = [sizes[2], sizes[3]];
            let elements = shape.iter().product::<usize>() as u64;
            if elements > 0 {
                self.launch(&store, elements.div_ceil(256).min(132 * 16), &args)?;
            }
        }
        Ok(chips)
    }

    fn sequences(&self, tensors: &Tensors, given: &Given) -> Result<Chips> {
        let (problem, dims) = (self.problem, *self.problem.dims());
        if is_dense(problem) {
            let sequence = Sequence {
                q_batch: 0,
                q_start: 0,
                seqlen_q: dims.seqlen_q,
                k_batch: 0,
                k_start: 0,
                seqlen_k: dims.seqlen_k,
            };
            return self.sequence(tensors, given, &sequence, dims.batch, 0);
        }
        let (mut rows, mut keys) = (0, 0);
        let mut chips = Chips::All;
        for (number, sequence) in problem.sequences().iter().enumerate() {
            let of = tensors.of(sequence, problem.dtype());
            chips = chips.and(self.sequence(&of, given, sequence, 1, number)?);
            if !problem.is_packed() {
                let end = sequence.seqlen_k..dims.seqlen_k;
                self.zero_keys(&of, 1, end)?;
            } else {
                self.zero_keys(tensors, 1, keys..sequence.k_start)?;
                rows = sequence.q_start + sequence.seqlen_q;
                keys = sequence.k_start + sequence.seqlen_k;
            }
        }
        if problem.is_packed() {
            self.zero_keys(tensors, 1, keys..dims.seqlen_k)?;
            let (heads, d) = (dims.num_heads, dims.head_dim);
            self.zero(tensors.dq, [1, heads, d], rows..dims.seqlen_q)?;
        }
        Ok(chips)
    }

    fn zero_keys(
        &self,
        tensors: &Tensors,
        batch: usize,
        keys: std::ops::Range<usize>,
    ) -> Result<()> {
        let dims = self.problem.dims();
        let heads = dims.num_kv_heads;
        self.zero(tensors.dk, [batch, heads, dims.head_dim], keys.clone())?;
        self.zero(tensors.dv, [batch, heads, dims.head_dim_v], keys)
    }

    /// Zeros in `rows` of every head of `tensor`.
    fn zero(
        &self,
        tensor: raw::Tensor,
        sizes: [usize; 3],
        rows: std::ops::Range<usize>,
    ) -> Result<()> {
        self.fill(self.problem.dtype(), tensor, sizes, rows)
    }

    fn fill(
        &self,
        dtype: DType,
        tensor: raw::Tensor,
        [batch, heads, width]: [usize; 3],
        rows: std::ops::Range<usize>,
    ) -> Result<()> {
        if rows.is_empty() || batch * heads == 0 {
            return Ok(());
        }
        let mut args = BackwardArgs {
            dq: tensor,
            ..BackwardArgs::default()
        };
        args.forward.batch = batch as i32;
        args.forward.heads = heads as i32;
        args.forward.d = width as i32;
        args.forward.row0 = rows.start as i32;
        args.forward.rows = rows.len() as i32;
        let variant = fa2::rows(dtype, "tw_bwd_zero");
        let blocks = (batch * heads * rows.len()).div_ceil(256).min(132 * 16);
        launch(
            self.backend,
            self.stream,
            &variant,
            (blocks as u64, 1),
            &args,
        )
    }

    /// The gradients of `batch` entries that are sequences of the same lengths, the first of them
    /// number `number`.
    fn sequence(
        &self,
        tensors: &Tensors,
        given: &Given,
        sequence: &Sequence,
        batch: usize,
        number: usize,
    ) -> Result<Chips> {
        let (problem, dims) = (self.problem, self.problem.dims());
        let (sq, sk) = (sequence.seqlen_q, sequence.seqlen_k);
        let (heads, kv_heads) = (dims.num_heads, dims.num_kv_heads);
        if batch * heads * sq == 0 {
            self.zero_keys(tensors, batch, 0..sk)?;
            return Ok(Chips::All);
        }
        let Plan { mut args, spec } = plan(problem, 0, sk)?;
        let mut spec = widths(&spec);
        (spec.mask, args.lo_off, args.hi_off, args.diag) = sequences::bounds(problem, sequence);
        spec.aligned = self.is_aligned;
        spec.sequences = false;
        args.batch = batch as i32;
        args.sq = sq as i32;
        args.sk = sk as i32;
        args.seq0 = number as i32;
        args.pairs = (batch * heads) as i32;
        args.q = tensors.q;
        args.k = tensors.k;
        args.v = tensors.v;
        args.o = tensors.out;
        args.bias = tensors.bias;
        args.mask = tensors.mask;
        args.keep = tensors.keep;
        args.alibi = given.alibi;
        args.sinks = given.sinks;

        let own = match self.algorithm {
            Algorithm::Fa2 => hopper::serves(self.backend, problem, &spec, self.sums)?,
            _ => None,
        };
        let in_memory = match self.algorithm {
            Algorithm::Fa1 => true,
            Algorithm::Fa2 => own.is_some() || (self.sums == Sums::Atomic && !is_wide(problem)),
            _ => false,
        };
        let rows = sq.next_multiple_of(fa2::ROW_PADDING);
        let cells = (batch * heads * rows) as u64;
        let mut all = BackwardArgs {
            forward: args,
            lse: tensors.lse,
            dlse: tensors.dlse,
            dout: tensors.dout,
            dq: tensors.dq,
            dk: tensors.dk,
            dv: tensors.dv,
            // dQ's sums first: they are read in sixteen-byte pieces.
            dq_acc: if in_memory { given.workspace } else { 0 },
            dsinks: given.dsinks,
            rows_padded: rows as i32,
            kv_pairs: (batch * kv_heads) as i32,
            kv_heads: kv_heads as i32,
            ..BackwardArgs::default()
        };
        // What stands in memory for the kernel of the gradients is laid out as its tiles are.
        let laid = match &own {
            Some((_, tile)) => tile.laid(&spec),
            None => spec,
        };
        let sums = match in_memory {
            true => cells * u64::from(laid.padded) * 4,
            false => 0,
        };
        all.lse2 = given.workspace + sums;
        all.delta = all.lse2 + cells * 4;
        // At most four bytes for eight rows: one byte a row is more than enough.
        all.odd_rows = all.delta + cells * 4;
        all.odd_keys = all.odd_rows + cells;
        let rest = all.odd_keys + all.kv_pairs as u64 * marks_of_keys(sk);
        if own.is_some() && kernels::backward::hopper::sums(&spec, self.sums) == Sums::Ordered {
            all.turns = rest;
        }
        // Nothing is launched that would write behind what was allocated.
        let last = match self.algorithm {
            Algorithm::Fa1 => cells * 8,
            _ if all.turns != 0 => kernels::backward::hopper::turns(cells),
            _ => 0,
        };
        let placed = rest + last - given.workspace;
        if placed > given.workspace_bytes {
            return Err(Error::Backend {
                backend: crate::NAME.into(),
                op: "placing what backward keeps beside its outputs".into(),
                message: format!("{placed} bytes of {} allocated", given.workspace_bytes),
            });
        }
        let (limit, compute) = (self.backend.shared_limit(), self.backend.compute());
        let prepare = fa2::prepare(&laid, limit, compute).ok_or_else(|| missing(&spec))?;
        let lanes = u64::from(fa2::prepare_lanes(&laid));
        self.launch(&prepare, (cells * lanes).div_ceil(256), &all)?;
        if given.dsinks != 0 {
            let variant = fa2::rows(problem.dtype(), "tw_bwd_sinks");
            self.launch(&variant, heads as u64, &all)?;
        }
        if sk == 0 {
            self.zero(tensors.dq, [batch, heads, dims.head_dim], 0..sq)?;
            return Ok(Chips::All);
        }
        match self.algorithm {
            Algorithm::Standard => self.standard(all, &spec, sequence, batch, rest)?,
            Algorithm::Fa1 => self.fa1(all, &spec, rest)?,
            _ if is_wide(problem) => self.wide(all, &spec)?,
            _ => self.fa2(all, &spec, own.as_ref(), batch)?,
        }
        if given.dbias.ptr != 0 {
            self.bias(all, &spec, given.dbias, sequence, batch)?;
        }
        Ok(match own {
            Some(_) => Chips::One,
            None => Chips::All,
        })
    }

    /// Adds the sequence's dS to the sums of dbias.
    fn bias(
        &self,
        mut all: BackwardArgs,
        spec: &Spec,
        sums: raw::Tensor,
        sequence: &Sequence,
        batch: usize,
    ) -> Result<()> {
        let limit = self.backend.shared_limit();
        let (sq, sk) = (sequence.seqlen_q as u64, sequence.seqlen_k as u64);
        let (rows, keys) = standard::tile(spec, limit).ok_or_else(|| missing(spec))?;
        let budget = self.backend.standard_budget();
        let (at_once, _, ld) = matrices(self.problem, sequence, batch, budget);
        let group = all.forward.group_size as u64;
        let cells = at_once * group * sq * ld;
        let mut memory = scratch(self.stream, "S and dP for dbias", cells * 8)?;
        all.forward.s = address(&mut memory, self.stream);
        all.dq_acc = all.forward.s + cells * 4;
        all.forward.ld_s = ld as i64;
        let first = sequence.q_batch as i64 * sums.sb
            + sequence.q_start as i64 * sums.ss
            + sequence.k_start as i64 * sums.sd;
        all.dbias = raw::Tensor {
            ptr: sums.ptr.wrapping_add_signed(first * 4),
            ..sums
        };
        let broadcast = sums.ss == 0 || sums.sd == 0;
        let [add, _] = standard::bias(spec, broadcast);
        let full = |stride: i64, size: u64| if stride == 0 { 1 } else { size };
        let elements = full(sums.sb, batch as u64)
            * full(sums.sh, all.forward.heads as u64)
            * full(sums.ss, sq)
            * full(sums.sd, sk);
        let blocks = elements.div_ceil(if broadcast { 1 } else { 256 });
        for kv in (0..all.kv_pairs as u64).step_by(at_once as usize) {
            let here = at_once.min(all.kv_pairs as u64 - kv);
            all.forward.pair0 = (kv * group) as i32;
            all.forward.pairs = (here * group) as i32;
            let tiles = sq.div_ceil(u64::from(rows)) * sk.div_ceil(u64::from(keys));
            for side in [Side::K, Side::V] {
                self.by_slices(&all, spec, Part::Scores, side, (tiles, here * group))?;
            }
            self.launch(&add, blocks.min(132 * 64), &all)?;
        }
        Ok(())
    }

    fn launch(&self, variant: &Variant, blocks: u64, args: &BackwardArgs) -> Result<()> {
        launch(self.backend, self.stream, variant, (blocks, 1), args)
    }

    /// `own`: the kernel of the gradients, if it is Hopper's.
    fn fa2(
        &self,
        mut all: BackwardArgs,
        spec: &Spec,
        own: Option<&(Variant, kernels::backward::hopper::Tile)>,
        batch: usize,
    ) -> Result<()> {
        let (limit, compute) = (self.backend.shared_limit(), self.backend.compute());
        let none = || missing(spec);
        let (sq, sk) = (all.forward.sq as usize, all.forward.sk as usize);
        let in_memory = all.dq_acc != 0;
        let (keys, step) = match own {
            Some((_, tile)) => (tile.keys, tile.rows),
            None => fa2::tile(spec, limit).ok_or_else(none)?,
        };
        all.key_blocks = sk.div_ceil(keys as usize) as i32;
        if spec.mask != Mask::Full || all.turns != 0 {
            let blocks = all.key_blocks as usize;
            let most = match all.turns {
                0 => pairs_at_once(self.backend, self.problem, sq, blocks),
                _ => pairs_by_turns(self.backend, self.problem, sq, blocks, spec),
            };
            let pairs = (batch * self.problem.dims().num_kv_heads).max(1) as u64;
            let groups = pairs.div_ceil(most.clamp(1, pairs));
            all.forward.pairs_per_group = pairs.div_ceil(groups) as i32;
        }
        if let Some(kernel) = own {
            hopper::run(self.backend, self.stream, all, spec, kernel, self.sums)?;
        } else {
            let gradients = fa2::gradients(spec, limit, compute, in_memory).ok_or_else(none)?;
            let blocks = all.key_blocks as u64 * all.kv_pairs as u64;
            self.launch(&gradients, blocks, &all)?;
        }
        if in_memory {
            let store = match own {
                Some((_, tile)) => tile.store_dq(spec),
                None => fa2::store_dq(spec, limit, compute).ok_or_else(none)?,
            };
            let blocks = sq.div_ceil(step as usize) as u64 * all.forward.pairs as u64;
            return self.launch(&store, blocks, &all);
        }
        let (dq, height) = fa2::dq(spec, limit).ok_or_else(none)?;
        all.forward.row_blocks = sq.div_ceil(height as usize) as i32;
        all.forward.pairs_per_group = match spec.mask {
            Mask::Full => all.forward.group_size,
            _ => pairs_per_group(self.problem, sk, self.backend.l2_bytes()),
        };
        let blocks = all.forward.row_blocks as u64 * all.forward.pairs as u64;
        self.launch(&dq, blocks, &all)
    }

    /// `fa2` above head_dim 256: dK and dV, then dQ, every block on its own.
    fn wide(&self, mut all: BackwardArgs, spec: &Spec) -> Result<()> {
        let dims = self.problem.dims();
        let widths = [dims.head_dim, dims.head_dim_v];
        let cut = wide::cut(spec, widths, self.backend.shared_limit());
        let cut = cut.ok_or_else(|| missing(spec))?;
        let blocks = |len: i32| (len as u32).div_ceil(wide::OWN);
        all.key_blocks = blocks(all.forward.sk) as i32;
        all.forward.row_blocks = blocks(all.forward.sq) as i32;
        let [dk, dv, dq] = cut.slices;
        let launch = |variant, blocks: i32, pairs: i32, slices| {
            let grid = (blocks as u64 * pairs as u64, slices);
            launch(self.backend, self.stream, variant, grid, &all)
        };
        launch(&cut.keys, all.key_blocks, all.kv_pairs, dk + dv)?;
        launch(&cut.rows, all.forward.row_blocks, all.forward.pairs, dq)
    }

    /// `rest`: memory for m and 1/ℓ.
    fn fa1(&self, mut all: BackwardArgs, spec: &Spec, rest: u64) -> Result<()> {
        let limit = self.backend.shared_limit();
        let ([statistics, gradients], tile) =
            fa1::variants(spec, limit).ok_or_else(|| missing(spec))?;
        let (pairs, rows) = (all.forward.pairs as u64, all.rows_padded as u64);
        all.forward.m = rest;
        all.forward.l = rest + pairs * rows * 4;
        let height = u64::from(tile.rows());
        self.launch(&statistics, pairs * rows / height, &all)?;
        self.launch(&gradients, all.kv_pairs as u64, &all)?;
        let blocks = (all.forward.sq as u64).div_ceil(height) * pairs;
        self.launch(&tile.store_dq(spec, self.backend.compute()), blocks, &all)
    }

    /// `rest`: memory for the matrices.
    fn standard(
        &self,
        mut all: BackwardArgs,
        spec: &Spec,
        sequence: &Sequence,
        batch: usize,
        rest: u64,
    ) -> Result<()> {
        let limit = self.backend.shared_limit();
        let weights = standard::variant(spec, limit, Part::Weights, spec.padded);
        let weights = weights.ok_or_else(|| missing(spec))?;
        let (rows, keys) = standard::tile(spec, limit).ok_or_else(|| missing(spec))?;
        let (sq, sk) = (sequence.seqlen_q as u64, sequence.seqlen_k as u64);
        let (row_blocks, key_blocks) = (sq.div_ceil(u64::from(rows)), sk.div_ceil(u64::from(keys)));
        let budget = self.backend.standard_budget();
        let (at_once, _, ld) = matrices(self.problem, sequence, batch, budget);
        let group = all.forward.group_size as u64;
        let cells = at_once * group * sq * ld;
        // S and dP, then P and dX: all in multiples of sixteen bytes, as ld is of eight elements.
        all.forward.s = rest;
        all.dq_acc = rest + cells * 4;
        all.forward.p = rest + cells * 8;
        all.forward.acc = all.forward.p + cells * spec.dtype.size() as u64;
        all.forward.ld_s = ld as i64;
        for kv in (0..all.kv_pairs as u64).step_by(at_once as usize) {
            let here = at_once.min(all.kv_pairs as u64 - kv);
            let mut args = all;
            args.forward.pair0 = (kv * group) as i32;
            let tiles = row_blocks * key_blocks;
            let pairs = here * group;
            let run = |part, side, grid| self.by_slices(&args, spec, part, side, grid);
            run(Part::Scores, Side::K, (tiles, pairs))?;
            run(Part::Scores, Side::V, (tiles, pairs))?;
            launch(self.backend, self.stream, &weights, (sq, pairs), &args)?;
            run(Part::Rows, Side::K, (row_blocks, pairs))?;
            run(Part::Keys, Side::K, (key_blocks, here))?;
            run(Part::Keys, Side::V, (key_blocks, here))?;
        }
        Ok(())
    }

    /// One product of `standard` for all columns of a side, at most 256 of them a launch: slices of the
    /// scores are added up, those of the gradients stand beside each other.
    fn by_slices(
        &self,
        all: &BackwardArgs,
        spec: &Spec,
        part: Part,
        side: Side,
        grid: (u64, u64),
    ) -> Result<()> {
        let limit = self.backend.shared_limit();
        let columns = match side {
            Side::K => all.forward.d,
            Side::V => all.forward.dv,
        };
        for first in (0..columns).step_by(standard::SLICE) {
            let width = (columns - first).min(standard::SLICE as i32);
            let wide = pad(width as usize).ok_or_else(|| missing(spec))?;
            let variant =
                standard::variant(spec, limit, part, wide).ok_or_else(|| missing(spec))?;
            let mut args = *all;
            let shift = |tensors: &mut [&mut raw::Tensor]| {
                for tensor in tensors {
                    let bytes = i64::from(first) * tensor.sd * spec.dtype.size() as i64;
                    tensor.ptr = tensor.ptr.wrapping_add_signed(bytes);
                }
            };
            let forward = &mut args.forward;
            match side {
                Side::K => {
                    shift(&mut [&mut forward.q, &mut forward.k, &mut args.dq, &mut args.dk]);
                    forward.d = width;
                }
                Side::V => {
                    shift(&mut [&mut forward.v, &mut args.dout, &mut args.dv]);
                    forward.dv = width;
                }
            }
            forward.row0 = i32::from(side == Side::V);
            if part == Part::Scores && first > 0 {
                forward.row0 += 2;
            }
            launch(self.backend, self.stream, &variant, grid, &args)?;
        }
        Ok(())
    }
}

/// Whose columns a product runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// head_dim: q, k, dq and dk.
    K,
    /// head_dim_v: v, dout and dv.
    V,
}

/// Addresses that every sequence shares; 0 = none.
struct Given {
    alibi: u64,
    sinks: u64,
    workspace: u64,
    workspace_bytes: u64,
    dsinks: u64,
    /// f32 sums; broadcast axes have a stride of 0.
    dbias: raw::Tensor,
}

/// (batch, KV head) pairs that run together under a mask, in groups of one size: enough blocks that the
/// long ones of a group end beside the short ones, Q and dO of all in a good part of the second-level cache.
fn pairs_at_once(backend: &CudaBackend, problem: &Problem, rows: usize, key_blocks: usize) -> u64 {
    let fit = backend.l2_bytes() * 3 / 5 / pair_bytes(problem, rows, 0);
    let wanted = (2 * backend.multiprocessors() / key_blocks.max(1) as u64).max(4);
    wanted.min(fit)
}

/// The same where blocks add to dQ by turns, by measurement on an H200. Without a mask blocks of one pair
/// follow one another over its rows: as many pairs as fill the device. Under a mask few, since blocks stand at
/// rows far apart: so many that dQ fits as well.
fn pairs_by_turns(
    backend: &CudaBackend,
    problem: &Problem,
    rows: usize,
    key_blocks: usize,
    spec: &Spec,
) -> u64 {
    match spec.mask {
        Mask::Full => (backend.multiprocessors() / key_blocks.max(1) as u64).max(4),
        _ => {
            let sums = spec.padded as usize * 4;
            (backend.l2_bytes() / 2 / pair_bytes(problem, rows, sums)).min(8)
        }
    }
}

/// Bytes of Q and dO of `rows` rows of a group's query heads, with `more` a row, and at least one.
fn pair_bytes(problem: &Problem, rows: usize, more: usize) -> u64 {
    let dims = problem.dims();
    let width = (dims.head_dim + dims.head_dim_v) * problem.dtype().size() + more;
    (dims.group() * rows * width).max(1) as u64
}
