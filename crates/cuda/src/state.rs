//! The running state (m, ℓ, Õ) in device memory: the trait of the core, on the GPU.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use half::{bf16, f16};
use tilewise_core::backend::check_outputs;
use tilewise_core::{
    Algorithm, AnyKeyBlock, AnyTensor, AnyTensorMut, DType, Element, Error, HostState, KeyBlock,
    OnlineSoftmax, Problem, Result, RunningState, TensorView, TensorViewMut, reserve,
};

use crate::backend::{CudaBackend, Results, Uploaded, device_zeros, fetch, wait_for, wrong_dtype};
use crate::error::{driver, unsupported};
use crate::kernels::Score;
use crate::ops::{self, Plan, run_fa2, run_state, supports_tiled};
use crate::raw::{self, Args};
use crate::view::{DeviceView, aligned};

const ROW_MAXIMA: &str = "the state's m";
const DENOMINATORS: &str = "the state's l";
const ACCUMULATOR: &str = "the state's accumulator";

/// (m, ℓ, Õ) of a problem's rows in device memory: f32 `[batch, num_heads, seqlen_q]` twice and
/// `[batch, num_heads, seqlen_q, head_dim]`, m in natural-log units of the final score.
#[derive(Debug)]
pub struct CudaState {
    problem: Problem,
    m: CudaSlice<f32>,
    l: CudaSlice<f32>,
    acc: CudaSlice<f32>,
}

impl CudaState {
    /// The problem it was begun with.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    fn rows(&self) -> u64 {
        self.problem.dims().lse_shape().iter().product::<usize>() as u64
    }

    /// The arguments that name this state, with the guards that say it is written.
    fn args<'s>(
        &'s mut self,
        stream: &'s CudaStream,
        mut args: Args,
    ) -> (Args, [cudarc::driver::SyncOnDrop<'s>; 3]) {
        let (m, guard_m) = self.m.device_ptr_mut(stream);
        let (l, guard_l) = self.l.device_ptr_mut(stream);
        let (acc, guard_acc) = self.acc.device_ptr_mut(stream);
        args.m = m;
        args.l = l;
        args.acc = acc;
        (args, [guard_m, guard_l, guard_acc])
    }
}

/// Keys of a block that already lie in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBlock<'a> {
    /// All queries.
    pub q: DeviceView<'a>,
    /// Some keys.
    pub k: DeviceView<'a>,
    /// Their values.
    pub v: DeviceView<'a>,
    /// Absolute position of the first of these keys.
    pub first_key: usize,
}

/// Whether a running state can hold `problem`.
pub(crate) fn stateless(problem: &Problem) -> Result<()> {
    supports_tiled(problem, Algorithm::Fa2)?;
    let refuse = |what: &str| Err(unsupported(format!("{what} with a running state")));
    if crate::sequences::needed(problem) {
        return refuse("packed sequences or used lengths");
    }
    if problem.has_bias() || problem.has_mask() {
        return refuse("a bias or a boolean mask");
    }
    if problem.options().get_dropout().is_some() {
        return refuse("dropout");
    }
    let dims = problem.dims();
    if crate::kernels::pad(dims.head_dim.max(dims.head_dim_v)).is_none() {
        return refuse("head_dim or head_dim_v above 256");
    }
    Ok(())
}

fn allocate(stream: &Arc<CudaStream>, problem: &Problem) -> Result<CudaState> {
    let rows: usize = problem.dims().lse_shape().iter().product();
    Ok(CudaState {
        problem: problem.clone(),
        m: device_zeros(stream, ROW_MAXIMA, rows)?,
        l: device_zeros(stream, DENOMINATORS, rows)?,
        acc: device_zeros(stream, ACCUMULATOR, rows * problem.dims().head_dim_v)?,
    })
}

impl CudaBackend {
    /// A state that has seen no key, on `stream`.
    ///
    /// # Errors
    /// What [`supports`](ops::supports) refuses, and failures of the driver.
    pub fn begin_on(&self, stream: &Arc<CudaStream>, problem: &Problem) -> Result<CudaState> {
        stateless(problem)?;
        self.bind()?;
        let mut state = allocate(stream, problem)?;
        if state.rows() > 0 {
            let base = ops::plan(problem, 0, problem.dims().seqlen_k)?.args;
            let work = state.rows() * problem.dims().head_dim_v.max(1) as u64;
            let (args, _guards) = state.args(stream, base);
            run_state(self, stream, "tw_state_begin", problem.dtype(), work, &args)?;
        }
        Ok(state)
    }

    /// Folds keys that lie in device memory into `state`, asynchronously on `stream`.
    ///
    /// # Errors
    /// Shapes that do not fit the state's problem, and failures of the driver.
    pub fn absorb_on(
        &self,
        stream: &Arc<CudaStream>,
        state: &mut CudaState,
        block: &DeviceBlock<'_>,
    ) -> Result<()> {
        let problem = state.problem.clone();
        let dims = problem.dims();
        let keys = block.k.shape()[2];
        let rows = ops::q_shape(&problem);
        let wide = [dims.batch, dims.num_kv_heads, keys, dims.head_dim];
        let wide_v = [dims.batch, dims.num_kv_heads, keys, dims.head_dim_v];
        for (name, view, shape) in [
            ("q", &block.q, rows),
            ("k", &block.k, wide),
            ("v", &block.v, wide_v),
        ] {
            ops::expect_dtype(name, view.dtype(), problem.dtype())?;
            Error::expect_shape(name, view.shape(), shape)?;
        }
        if block
            .first_key
            .checked_add(keys)
            .is_none_or(|end| end > dims.seqlen_k)
        {
            return Err(Error::lengths(
                "k",
                format!("keys inside 0..{}", dims.seqlen_k),
                format!("{keys} keys from {}", block.first_key),
            ));
        }
        if keys == 0 || state.rows() == 0 {
            return Ok(());
        }
        self.bind()?;
        let Plan { args, mut spec } = ops::plan(&problem, block.first_key, keys)?;
        // The state's m is in natural units, so the scale cannot hide in the exponent.
        spec.score = spec.score.max(Score::Applied);
        let (mut args, _state) = state.args(stream, args);
        let (q, _q) = block.q.acquire(stream);
        let (k, _k) = block.k.acquire(stream);
        let (v, _v) = block.v.acquire(stream);
        spec.aligned = aligned(&q, rows, spec.dtype)
            && aligned(&k, wide, spec.dtype)
            && aligned(&v, wide_v, spec.dtype);
        (args.q, args.k, args.v) = (q, k, v);
        let slopes = match problem.options().get_alibi_slopes() {
            Some(slopes) => Some(ops::upload_per_head(stream, "alibi_slopes", slopes)?),
            None => None,
        };
        args.alibi = slopes.as_ref().map_or(0, |s| s.device_ptr(stream).0);
        run_fa2(self, stream, &problem, args, &spec, true)
    }

    /// Joins the state of other keys of the same rows, asynchronously on `stream`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the states are of different problems, and failures of the driver.
    pub fn merge_on(
        &self,
        stream: &Arc<CudaStream>,
        state: &mut CudaState,
        other: &CudaState,
    ) -> Result<()> {
        let dims = *state.problem.dims();
        let others = other.problem.dims();
        Error::expect_shape("state", others.out_shape(), dims.out_shape())?;
        if state.rows() == 0 {
            return Ok(());
        }
        self.bind()?;
        let dtype = state.problem.dtype();
        let work = state.rows() * 32;
        let base = ops::plan(&state.problem, 0, dims.seqlen_k)?.args;
        let (mut args, _guards) = state.args(stream, base);
        let (m, _m) = other.m.device_ptr(stream);
        let (l, _l) = other.l.device_ptr(stream);
        let (acc, _acc) = other.acc.device_ptr(stream);
        (args.s, args.p, args.lse) = (m, l, acc);
        run_state(self, stream, "tw_state_merge", dtype, work, &args)
    }

    /// The state as host arrays; waits for `stream`.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn export_on(&self, stream: &Arc<CudaStream>, state: &CudaState) -> Result<HostState> {
        self.bind()?;
        let dims = state.problem.dims();
        let rows = state.rows() as usize;
        let wide = |what: &str, memory: &CudaSlice<f32>, len: usize| -> Result<Vec<f64>> {
            let single = fetch(stream, what, memory, len)?;
            let mut double = reserve(&[len], what)?;
            double.extend(single.into_iter().map(f64::from));
            Ok(double)
        };
        Ok(HostState {
            shape: dims.lse_shape(),
            head_dim_v: dims.head_dim_v,
            m: wide(ROW_MAXIMA, &state.m, rows)?,
            l: wide(DENOMINATORS, &state.l, rows)?,
            acc: wide(ACCUMULATOR, &state.acc, rows * dims.head_dim_v)?,
        })
    }

    /// A state from host arrays, whichever backend exported them. f64 values are rounded to f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if the arrays do not fit, and failures of the driver.
    pub fn import_on(
        &self,
        stream: &Arc<CudaStream>,
        problem: &Problem,
        host: &HostState,
    ) -> Result<CudaState> {
        stateless(problem)?;
        host.check(problem)?;
        self.bind()?;
        let mut state = allocate(stream, problem)?;
        for (what, memory, values) in [
            (ROW_MAXIMA, &mut state.m, &host.m),
            (DENOMINATORS, &mut state.l, &host.l),
            (ACCUMULATOR, &mut state.acc, &host.acc),
        ] {
            if values.is_empty() {
                continue;
            }
            let mut single = reserve(&[values.len()], what)?;
            single.extend(values.iter().map(|&x| x as f32));
            let copied = stream.memcpy_htod(&single, &mut memory.slice_mut(..single.len()));
            // Also after an error: the host values live only to the end of this turn.
            let passed = wait_for(stream);
            copied.map_err(|e| driver(&format!("copying {what}"), e))?;
            passed?;
        }
        Ok(state)
    }

    fn absorb_typed<T: Element + DeviceRepr>(
        &self,
        state: &mut CudaState,
        [q, k, v]: [TensorView<'_, T>; 3],
        first_key: usize,
    ) -> Result<()> {
        KeyBlock::new(q, k, v, first_key).check(&state.problem)?;
        self.on_stream(|stream| {
            let q = Uploaded::new(stream, "q", &q)?;
            let k = Uploaded::new(stream, "k", &k)?;
            let v = Uploaded::new(stream, "v", &v)?;
            let block = DeviceBlock {
                q: q.view()?,
                k: k.view()?,
                v: v.view()?,
                first_key,
            };
            self.absorb_on(stream, state, &block)
        })
    }

    /// Queues O = Õ/ℓ and L = m + ln ℓ into out at `o` and lse at address `lse`, which the caller keeps.
    pub(crate) fn finish_on(
        &self,
        stream: &Arc<CudaStream>,
        state: &mut CudaState,
        o: raw::Tensor,
        lse: u64,
    ) -> Result<()> {
        let work = state.rows() * 32;
        if work == 0 {
            return Ok(());
        }
        let problem = state.problem.clone();
        let base = ops::plan(&problem, 0, problem.dims().seqlen_k)?.args;
        let (mut args, _guards) = state.args(stream, base);
        args.o = o;
        args.lse = lse;
        let sinks = match problem.options().get_sinks() {
            Some(sinks) => Some(ops::upload_per_head(stream, "sinks", sinks)?),
            None => None,
        };
        args.sinks = sinks.as_ref().map_or(0, |s| s.device_ptr(stream).0);
        let dtype = problem.dtype();
        run_state(self, stream, "tw_state_finish", dtype, work, &args)
    }

    fn finish_typed<T: Element + DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        &self,
        mut state: CudaState,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<()> {
        let dims = *state.problem.dims();
        self.on_stream(|stream| {
            let mut results = Results::<T>::new(stream, &dims)?;
            {
                let (ptr, _out) = results.out.device_ptr_mut(stream);
                let (sum, _sums) = results.lse.device_ptr_mut(stream);
                let o = crate::view::tensor(ptr, crate::view::contiguous(dims.out_shape()));
                self.finish_on(stream, &mut state, o, sum)?;
            }
            results.download(stream, out, lse)
        })
    }
}

/// What a state is finished into: out in the problem's dtype, lse in f32.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[batch, num_heads, seqlen_q, head_dim]`.
    pub out: AnyTensorMut<'a>,
    /// `[batch, num_heads, seqlen_q]` as a view whose last axis is 1.
    pub lse: Option<TensorViewMut<'a, f32>>,
}

/// Host blocks are copied to the device, states stay there. Device blocks go through
/// [`absorb_on`](CudaBackend::absorb_on).
impl OnlineSoftmax for CudaBackend {
    type Spec<'a> = &'a Problem;
    type State = CudaState;
    type Block<'a> = &'a AnyKeyBlock<'a>;
    type Output<'a> = Outputs<'a>;
    type Error = Error;

    fn begin(&self, problem: &Problem) -> Result<CudaState> {
        self.on_stream(|stream| self.begin_on(stream, problem))
    }

    fn absorb(&self, state: &mut CudaState, block: &AnyKeyBlock<'_>) -> Result<()> {
        if block.bias.is_some() {
            return Err(unsupported("a bias with fa2"));
        }
        if block.mask.is_some() {
            return Err(unsupported("a boolean mask with fa2"));
        }
        let first = block.first_key;
        match (block.q, block.k, block.v) {
            (AnyTensor::F32(q), AnyTensor::F32(k), AnyTensor::F32(v)) => {
                self.absorb_typed::<f32>(state, [q, k, v], first)
            }
            (AnyTensor::F16(q), AnyTensor::F16(k), AnyTensor::F16(v)) => {
                self.absorb_typed::<f16>(state, [q, k, v], first)
            }
            (AnyTensor::BF16(q), AnyTensor::BF16(k), AnyTensor::BF16(v)) => {
                self.absorb_typed::<bf16>(state, [q, k, v], first)
            }
            (q, k, v) => {
                let wanted = state.problem.dtype();
                let (name, got) = [("q", q.dtype()), ("k", k.dtype()), ("v", v.dtype())]
                    .into_iter()
                    .find(|&(_, got)| got != wanted)
                    .unwrap_or(("q", q.dtype()));
                Err(wrong_dtype(name, wanted, got))
            }
        }
    }

    fn merge(&self, state: &mut CudaState, other: &CudaState) -> Result<()> {
        self.on_stream(|stream| self.merge_on(stream, state, other))
    }

    fn finish(&self, state: CudaState, output: Outputs<'_>) -> Result<()> {
        check_outputs(&state.problem, &output.out, output.lse.as_ref())?;
        match output.out {
            AnyTensorMut::F32(out) => self.finish_typed::<f32>(state, out, output.lse),
            AnyTensorMut::F16(out) => self.finish_typed::<f16>(state, out, output.lse),
            AnyTensorMut::BF16(out) => self.finish_typed::<bf16>(state, out, output.lse),
            AnyTensorMut::F64(_) => Err(wrong_dtype("out", state.problem.dtype(), DType::F64)),
        }
    }

    fn export(&self, state: &CudaState) -> Result<HostState> {
        self.on_stream(|stream| self.export_on(stream, state))
    }

    fn import(&self, problem: &Problem, host: &HostState) -> Result<CudaState> {
        self.on_stream(|stream| self.import_on(stream, problem, host))
    }
}

struct Running {
    backend: CudaBackend,
    state: CudaState,
}

pub(crate) fn running(backend: &CudaBackend, problem: &Problem) -> Result<Box<dyn RunningState>> {
    Ok(Box::new(Running {
        state: OnlineSoftmax::begin(backend, problem)?,
        backend: backend.clone(),
    }))
}

impl RunningState for Running {
    fn absorb(&mut self, block: &AnyKeyBlock<'_>) -> Result<()> {
        OnlineSoftmax::absorb(&self.backend, &mut self.state, block)
    }

    fn merge(&mut self, other: &HostState) -> Result<()> {
        let other = OnlineSoftmax::import(&self.backend, &self.state.problem, other)?;
        OnlineSoftmax::merge(&self.backend, &mut self.state, &other)
    }

    fn export(&self) -> Result<HostState> {
        OnlineSoftmax::export(&self.backend, &self.state)
    }

    fn finish(
        self: Box<Self>,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<()> {
        OnlineSoftmax::finish(&self.backend, self.state, Outputs { out, lse })
    }
}
