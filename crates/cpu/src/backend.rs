//! The backend: [`tilewise_core::Backend`] over the kernels, and its typed form.

use std::sync::Arc;

use tilewise_core::backend::check_outputs;
use tilewise_core::half::{bf16, f16};
use tilewise_core::{
    Algorithm, AnyBackwardInputs, AnyGradientsMut, AnyInputs, AnyTensorMut, Backend, BackendInfo,
    BackwardInputs, BackwardReport, DType, Error, ForwardReport, GradientsMut, Inputs,
    OnlineSoftmax, Problem, Result, RunningState, TensorViewMut, with_typed,
};

use crate::backward;
use crate::buffer::Reserve;
use crate::call::Call;
use crate::head::Scoring;
use crate::isa::Isa;
use crate::kernel::pairs::pack::MOST_SCALE;
use crate::kernel::table::CpuElement;
use crate::machine::{Caches, processor};
use crate::output::Outputs;
use crate::parallel::threads;
use crate::schedule::{fa1, fa2, standard};
use crate::shape::Shape;
use crate::state::{CpuOnline, Running};
use crate::tile::Machinery;

/// Attention on the CPU.
///
/// Calls run on the caller's current rayon pool: the global one, or the pool inside whose `install`
/// the call is made. Results do not depend on the number of threads, bit for bit, nor on the batch a
/// sequence comes in.
///
/// The backend keeps up to 4 MiB a thread of its calls' scratch memory for the next ones; its clones
/// share it, and it is freed with the last of them.
///
/// ```
/// use tilewise_core::{Algorithm, Inputs, Options, Problem, TensorView, TensorViewMut};
/// use tilewise_cpu::CpuBackend;
///
/// let (q, k, v) = ([1.0f32; 8], [1.0f32; 12], [2.0f32; 12]);
/// let inputs = Inputs::new(
///     TensorView::bhsd(&q, [1, 1, 2, 4])?,
///     TensorView::bhsd(&k, [1, 1, 3, 4])?,
///     TensorView::bhsd(&v, [1, 1, 3, 4])?,
/// );
/// let problem = Problem::new(&inputs, &Options::new().causal(true))?;
/// let mut out = [0.0f32; 8];
/// let report = CpuBackend::new()?.forward_into(
///     &problem,
///     &inputs,
///     Algorithm::Auto,
///     TensorViewMut::bhsd(&mut out, [1, 1, 2, 4])?,
///     None,
/// )?;
/// assert_eq!(report.algorithm, Algorithm::Fa2);
/// assert!(out.iter().all(|x| (x - 2.0).abs() < 1e-6));
/// # Ok::<(), tilewise_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CpuBackend {
    isa: Isa,
    caches: Caches,
    reserve: Arc<Reserve>,
}

/// Equal if they compute in the same way.
impl PartialEq for CpuBackend {
    fn eq(&self, other: &Self) -> bool {
        (self.isa, self.caches) == (other.isa, other.caches)
    }
}

impl Eq for CpuBackend {}

/// Makes a [`CpuBackend`] that differs from the default.
#[derive(Clone, Debug, Default)]
pub struct CpuBackendBuilder {
    isa: Option<Isa>,
    caches: Option<Caches>,
}

impl CpuBackendBuilder {
    /// Uses this instruction set, whatever `TILEWISE_ISA` says.
    pub fn isa(mut self, isa: impl Into<Option<Isa>>) -> Self {
        self.isa = isa.into();
        self
    }

    /// Cuts tiles for these caches instead of the machine's.
    pub fn caches(mut self, caches: Caches) -> Self {
        self.caches = Some(caches);
        self
    }

    /// # Errors
    /// [`Error::Unavailable`] if the processor lacks the instruction set asked for, here or in
    /// `TILEWISE_ISA`; [`Error::Option`] if that holds no instruction set's name.
    pub fn build(self) -> Result<CpuBackend> {
        Ok(CpuBackend {
            isa: match self.isa {
                Some(isa) => isa.checked()?,
                None => Isa::from_env()?,
            },
            caches: self.caches.unwrap_or_else(Caches::detect),
            reserve: Arc::default(),
        })
    }
}

impl CpuBackend {
    /// With the instruction set that `TILEWISE_ISA` asks for, or else the best there is.
    ///
    /// # Errors
    /// As [`CpuBackendBuilder::build`].
    pub fn new() -> Result<CpuBackend> {
        Self::builder().build()
    }

    /// To choose the instruction set in code.
    pub fn builder() -> CpuBackendBuilder {
        CpuBackendBuilder::default()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The caches that tiles are cut for.
    pub fn caches(&self) -> Caches {
        self.caches
    }

    /// Where calls take packed memory from.
    pub(crate) fn reserve(&self) -> &Arc<Reserve> {
        &self.reserve
    }

    /// The blockwise mathematics at problem grain: begin, absorb keys in chunks of any size, merge,
    /// finish.
    pub fn online<T: CpuElement>(&self) -> CpuOnline<T> {
        CpuOnline::new(self.clone())
    }

    /// The kernels and tiles for `algorithm`. FlashAttention-2 takes products of pairs where there are
    /// any; the baselines widen.
    pub(crate) fn machinery<T: CpuElement>(
        &self,
        problem: &Problem,
        algorithm: Algorithm,
    ) -> Machinery<T> {
        // The builder made sure that the processor has the instruction set.
        let mut kernels = T::kernels(self.isa);
        let dims = problem.dims();
        let magnitude = problem.softmax_scale().abs() * dims.head_dim as f64;
        let pairs =
            algorithm.resolve() == Algorithm::Fa2 && magnitude <= MOST_SCALE && dims.head_dim > 0;
        if !pairs {
            kernels.pairs = None;
        }
        let mut shape = Shape::new(dims, &kernels.tile, self.caches);
        if kernels.pairs.is_some() {
            shape = shape.for_pairs(self.caches);
        }
        Machinery { kernels, shape }
    }

    /// [`Backend::forward`] for one element type.
    ///
    /// `out` is `[batch, num_heads, seqlen_q, head_dim_v]`, `lse` `[batch, num_heads, seqlen_q, 1]`.
    /// Every element of both is written.
    ///
    /// # Errors
    /// Those of [`Problem::new`], [`Error::Shape`] if `problem` is not the one that `inputs` pose or
    /// an output has another shape, [`Error::OutOfMemory`].
    pub fn forward_into<T: CpuElement>(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        algorithm: Algorithm,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardReport> {
        T::forward(self, problem, inputs, algorithm, out, lse)
    }

    /// [`Backend::backward`] for one element type.
    ///
    /// [`Algorithm::Fa2`] runs on the kernels of the forward pass; [`Algorithm::Standard`] and
    /// [`Algorithm::Fa1`] run core's schedules, one KV head of one sequence a thread.
    ///
    /// # Errors
    /// Those of [`BackwardInputs::problem`], [`Error::Shape`] if `problem` is not the one that `inputs`
    /// pose or a gradient has another shape, [`Error::OutOfMemory`].
    pub fn backward_into<T: CpuElement>(
        &self,
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        algorithm: Algorithm,
        gradients: GradientsMut<'_, T>,
    ) -> Result<BackwardReport> {
        T::backward(self, problem, inputs, algorithm, gradients)
    }

    fn workspace<T: CpuElement>(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        let shape = self.machinery::<T>(problem, algorithm).shape;
        let dims = problem.dims();
        let rows = problem
            .sequences()
            .iter()
            .map(|s| s.seqlen_q)
            .max()
            .unwrap_or(0);
        let keys = problem
            .sequences()
            .iter()
            .map(|s| s.seqlen_k)
            .max()
            .unwrap_or(0);
        let heads = problem.sequences().len() * dims.num_kv_heads;
        match algorithm.resolve() {
            Algorithm::Standard => standard::workspace_bytes::<T>(&shape, rows, keys),
            Algorithm::Fa1 => fa1::workspace_bytes::<T>(&shape, dims.group(), rows, keys),
            _ => {
                let sequences = problem.sequences().len();
                fa2::workspace_bytes::<T>(&shape, sequences, heads, dims.group(), rows, keys)
            }
        }
    }
}

/// [`CpuBackend::forward_into`], to be compiled once for each type.
pub(crate) fn forward<T: CpuElement>(
    backend: &CpuBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
    mut out: TensorViewMut<'_, T>,
    lse: Option<TensorViewMut<'_, f32>>,
) -> Result<ForwardReport> {
    // The kernels read through raw pointers, up to where `problem` says: it must be the tensors'.
    problem.expect_posed(&Problem::new(inputs, problem.options())?)?;
    check_outputs(problem, &T::erase_mut(out.reborrow()), lse.as_ref())?;
    let outputs = Outputs::new(out, lse);
    let call = Call {
        machinery: backend.machinery::<T>(problem, algorithm),
        problem,
        inputs,
        outputs: &outputs,
        scoring: Scoring::new(problem, false),
        reserve: &backend.reserve,
    };
    let algorithm = algorithm.resolve();
    match algorithm {
        Algorithm::Standard => standard::forward(&call)?,
        Algorithm::Fa1 => fa1::forward(&call)?,
        Algorithm::Fa2 => fa2::forward(&call)?,
        other => return Err(Error::unsupported("cpu", format!("algorithm {other}"))),
    }
    call.write_rows_of_no_sequence();
    Ok(ForwardReport {
        algorithm,
        isa: backend.isa.name().into(),
    })
}

impl Backend for CpuBackend {
    fn info(&self) -> BackendInfo {
        let kib = |bytes: usize| format!("{} KiB", bytes >> 10);
        let mut details = vec![
            ("isa".to_string(), self.isa.to_string()),
            (
                "isas available".to_string(),
                Isa::available()
                    .iter()
                    .map(|isa| isa.name())
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
            ("threads".to_string(), threads().to_string()),
            ("L1d".to_string(), kib(self.caches.l1d)),
            ("L2".to_string(), kib(self.caches.l2)),
        ];
        if self.caches.l3 > 0 {
            details.push(("L3".to_string(), kib(self.caches.l3)));
        }
        BackendInfo {
            name: "cpu".into(),
            device: format!("{} ({})", processor(), self.isa),
            details,
        }
    }

    fn supports(&self, _problem: &Problem, algorithm: Algorithm) -> Result<()> {
        match algorithm.resolve() {
            Algorithm::Standard | Algorithm::Fa1 | Algorithm::Fa2 => Ok(()),
            other => Err(Error::unsupported("cpu", format!("algorithm {other}"))),
        }
    }

    fn workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        match problem.dtype() {
            DType::F64 => self.workspace::<f64>(problem, algorithm),
            DType::F16 => self.workspace::<f16>(problem, algorithm),
            DType::BF16 => self.workspace::<bf16>(problem, algorithm),
            _ => self.workspace::<f32>(problem, algorithm),
        }
    }

    fn forward(
        &self,
        problem: &Problem,
        inputs: &AnyInputs<'_>,
        algorithm: Algorithm,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardReport> {
        check_outputs(problem, &out, lse.as_ref())?;
        with_typed!(AnyInputs, inputs, inputs => {
            let got = out.dtype();
            let expected = problem.dtype();
            let out = typed(inputs, out).ok_or(Error::DType { tensor: "out".into(), expected, got })?;
            self.forward_into(problem, inputs, algorithm, out, lse)
        })
    }

    fn supports_backward(&self, problem: &Problem, algorithm: Algorithm) -> Result<()> {
        self.supports(problem, algorithm)
    }

    fn backward_workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        match problem.dtype() {
            DType::F64 => backward::workspace_bytes::<f64>(self, problem, algorithm),
            DType::F16 => backward::workspace_bytes::<f16>(self, problem, algorithm),
            DType::BF16 => backward::workspace_bytes::<bf16>(self, problem, algorithm),
            _ => backward::workspace_bytes::<f32>(self, problem, algorithm),
        }
    }

    fn backward(
        &self,
        problem: &Problem,
        inputs: &AnyBackwardInputs<'_>,
        algorithm: Algorithm,
        gradients: AnyGradientsMut<'_>,
    ) -> Result<BackwardReport> {
        fn typed<T: CpuElement>(
            backend: &CpuBackend,
            problem: &Problem,
            inputs: &BackwardInputs<'_, T>,
            algorithm: Algorithm,
            gradients: AnyGradientsMut<'_>,
        ) -> Result<BackwardReport> {
            let got = gradients.dtype();
            let gradients = T::typed_gradients(gradients).ok_or(Error::DType {
                tensor: "dq".into(),
                expected: T::DTYPE,
                got,
            })?;
            backend.backward_into(problem, inputs, algorithm, gradients)
        }
        match inputs {
            AnyBackwardInputs::F64(inputs) => typed(self, problem, inputs, algorithm, gradients),
            AnyBackwardInputs::F32(inputs) => typed(self, problem, inputs, algorithm, gradients),
            AnyBackwardInputs::F16(inputs) => typed(self, problem, inputs, algorithm, gradients),
            AnyBackwardInputs::BF16(inputs) => typed(self, problem, inputs, algorithm, gradients),
        }
    }

    fn begin(&self, problem: &Problem) -> Result<Box<dyn RunningState>> {
        fn boxed<T: CpuElement>(
            backend: &CpuBackend,
            problem: &Problem,
        ) -> Result<Box<dyn RunningState>> {
            let online = backend.online::<T>();
            let state = online.begin(problem)?;
            Ok(Box::new(Running { online, state }))
        }
        match problem.dtype() {
            DType::F64 => boxed::<f64>(self, problem),
            DType::F32 => boxed::<f32>(self, problem),
            DType::F16 => boxed::<f16>(self, problem),
            DType::BF16 => boxed::<bf16>(self, problem),
            other => Err(Error::unsupported("cpu", format!("dtype {other}"))),
        }
    }
}

/// The output as a view of the inputs' element type, if it is of that type.
fn typed<'a, T: CpuElement>(
    _: &Inputs<'_, T>,
    out: AnyTensorMut<'a>,
) -> Option<TensorViewMut<'a, T>> {
    T::typed_mut(out)
}
