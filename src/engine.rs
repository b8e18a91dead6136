//! The run-time choice of a backend, and attention through it.

use std::sync::Arc;

use tilewise_core::backend::check_outputs;
use tilewise_core::{
    Algorithm, Backend, BackwardInputs, BackwardReport, Element, Error, ForwardReport, Gradients,
    GradientsMut, Inputs, Options, Problem, Result, RunningState, TensorViewMut, allocate,
};

use crate::backends::{Settings, known, open_with, reason};
use crate::kind::BackendKind;

/// Environment variable that [`Engine::auto`] reads.
const BACKEND_VARIABLE: &str = "TILEWISE_BACKEND";

/// One or more backends, and attention on them. Cheap to clone and to share between threads.
#[derive(Clone, Debug)]
pub struct Engine {
    /// In order of preference; never empty.
    candidates: Vec<(BackendKind, Arc<dyn Backend>)>,
    /// Backends that could not be opened, and why. Empty unless chosen automatically.
    missing: Vec<(BackendKind, String)>,
}

/// A result of [`Engine::forward`]: contiguous `[batch, num_heads, seqlen_q, …]`.
#[derive(Clone, Debug)]
pub struct Attention<T> {
    /// `[batch, num_heads, seqlen_q, head_dim_v]`, row-major.
    pub out: Vec<T>,
    /// ln Σ e^score of each row, natural log; −∞ where no key was live.
    /// `[batch, num_heads, seqlen_q]`, row-major.
    pub lse: Vec<f32>,
    /// What ran.
    pub info: ForwardInfo,
}

/// Which backend and schedule ran.
#[derive(Clone, Debug)]
pub struct ForwardInfo {
    /// The backend.
    pub backend: BackendKind,
    /// Schedule and instruction set.
    pub report: ForwardReport,
    /// Backends that would have been preferred, with the reason why each did not run. Always empty
    /// for a backend asked for by name.
    pub passed_over: Vec<(BackendKind, String)>,
}

/// Which backend and schedule made gradients.
#[derive(Clone, Debug)]
pub struct BackwardInfo {
    /// The backend.
    pub backend: BackendKind,
    /// Schedule and instruction set.
    pub report: BackwardReport,
    /// As [`ForwardInfo::passed_over`].
    pub passed_over: Vec<(BackendKind, String)>,
}

impl Engine {
    /// The backend that the environment variable `TILEWISE_BACKEND` names; unset or `auto`, all
    /// backends of this machine, each problem going to the first that supports it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the variable names a backend that cannot be used here, or if there
    /// is none at all; [`Error::Option`] if it names nothing known.
    pub fn auto() -> Result<Engine> {
        // What is no text is no name either, but it was asked for.
        match std::env::var_os(BACKEND_VARIABLE) {
            Some(name) if !name.is_empty() => Engine::named(&name.to_string_lossy()),
            _ => Engine::new(BackendKind::Auto),
        }
    }

    /// The backend called `auto`, `cpu`, `cuda` or `cuda:N`. Unlike [`Engine::auto`], the
    /// environment is not asked: an argument goes before it.
    ///
    /// # Errors
    /// [`Error::Option`] if it is none of these; as [`Engine::new`].
    pub fn named(name: &str) -> Result<Engine> {
        Engine::new(name.parse()?)
    }

    /// The backend of this kind.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the exact reason. A backend asked for by name is never replaced
    /// by another.
    pub fn new(kind: BackendKind) -> Result<Engine> {
        Engine::with(kind, &Settings::default())
    }

    /// The backend of this kind, opened with settings.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with(kind: BackendKind, settings: &Settings) -> Result<Engine> {
        if kind != BackendKind::Auto {
            return Ok(Engine {
                candidates: vec![(kind, open_with(kind, settings)?)],
                missing: Vec::new(),
            });
        }
        let (mut candidates, mut missing) = (Vec::new(), Vec::new());
        for kind in known() {
            match open_with(kind, settings) {
                Ok(backend) => candidates.push((kind, backend)),
                Err(error) => {
                    tracing::info!(%kind, %error, "backend passed over");
                    missing.push((kind, reason(error)));
                }
            }
        }
        if candidates.is_empty() {
            let reasons: Vec<String> = missing
                .into_iter()
                .map(|(kind, reason)| format!("{kind}: {reason}"))
                .collect();
            return Err(Error::Unavailable {
                backend: "auto".into(),
                reason: reasons.join("; "),
            });
        }
        Ok(Engine {
            candidates,
            missing,
        })
    }

    /// An engine on a backend made elsewhere, for example a CPU backend with a forced instruction
    /// set. `kind` is the name to report it under.
    pub fn with_backend(kind: BackendKind, backend: Arc<dyn Backend>) -> Engine {
        Engine {
            candidates: vec![(kind, backend)],
            missing: Vec::new(),
        }
    }

    /// The backend preferred, before any problem is known.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.candidates[0].1
    }

    /// Kind of [`Engine::backend`].
    pub fn kind(&self) -> BackendKind {
        self.candidates[0].0
    }

    /// The first backend that supports the problem, and those passed over.
    #[allow(clippy::type_complexity)]
    fn choose(
        &self,
        problem: &Problem,
        algorithm: Algorithm,
    ) -> Result<(BackendKind, &Arc<dyn Backend>, Vec<(BackendKind, String)>)> {
        self.choose_by(|backend| backend.supports(problem, algorithm))
    }

    /// The first backend that supports what is asked, and those passed over.
    #[allow(clippy::type_complexity)]
    fn choose_by(
        &self,
        supports: impl Fn(&dyn Backend) -> Result<()>,
    ) -> Result<(BackendKind, &Arc<dyn Backend>, Vec<(BackendKind, String)>)> {
        let mut passed_over = self.missing.clone();
        let mut last = None;
        for (kind, backend) in &self.candidates {
            match supports(backend.as_ref()) {
                Ok(()) => return Ok((*kind, backend, passed_over)),
                Err(error) => {
                    if self.candidates.len() > 1 {
                        tracing::info!(%kind, %error, "backend passed over");
                    }
                    passed_over.push((*kind, error.to_string()));
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| Error::Unavailable {
            backend: "auto".into(),
            reason: "no backend".into(),
        }))
    }

    /// Attention with outputs allocated here.
    ///
    /// # Errors
    /// Everything [`Problem::new`] finds; [`Error::Unsupported`] if no backend of this engine can do
    /// the problem; [`Error::OutOfMemory`] and [`Error::Backend`] from the backend.
    pub fn forward<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        options: &Options,
    ) -> Result<Attention<T>> {
        self.forward_with(Algorithm::Auto, inputs, options)
    }

    /// [`Engine::forward`] by a given schedule.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_with<T: Element>(
        &self,
        algorithm: Algorithm,
        inputs: &Inputs<'_, T>,
        options: &Options,
    ) -> Result<Attention<T>> {
        let problem = Problem::new(inputs, options)?;
        let (out_shape, lse_shape) = (problem.dims().out_shape(), problem.dims().lse_shape());
        let mut out = allocate(&out_shape, "out", T::default())?;
        let mut lse = allocate(&lse_shape, "lse", 0f32)?;
        let info = self.run(
            &problem,
            algorithm,
            inputs,
            TensorViewMut::bhsd(&mut out, out_shape).map_err(|e| e.named("out"))?,
            Some(TensorViewMut::bhs(&mut lse, lse_shape).map_err(|e| e.named("lse"))?),
        )?;
        Ok(Attention { out, lse, info })
    }

    /// Attention into the caller's memory: the primitive, which allocates nothing of the size of
    /// the problem. Every element of `out` and `lse` is written.
    ///
    /// `out` is `[batch, num_heads, seqlen_q, head_dim_v]`, `lse` `[batch, num_heads, seqlen_q, 1]`
    /// ([`TensorViewMut::bhs`]).
    ///
    /// # Errors
    /// As [`Engine::forward`], and [`Error::Shape`] for outputs that do not fit.
    pub fn forward_into<T: Element>(
        &self,
        algorithm: Algorithm,
        inputs: &Inputs<'_, T>,
        options: &Options,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardInfo> {
        let problem = Problem::new(inputs, options)?;
        self.run(&problem, algorithm, inputs, out, lse)
    }

    fn run<T: Element>(
        &self,
        problem: &Problem,
        algorithm: Algorithm,
        inputs: &Inputs<'_, T>,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardInfo> {
        let out = T::erase_mut(out);
        check_outputs(problem, &out, lse.as_ref())?;
        let (kind, backend, passed_over) = self.choose(problem, algorithm)?;
        let report = backend.forward(problem, &T::erase_inputs(*inputs), algorithm, out, lse)?;
        Ok(ForwardInfo {
            backend: kind,
            report,
            passed_over,
        })
    }

    /// The gradients of a loss from those that arrive at out and lse: what [`BackwardInputs`] holds
    /// and [`tilewise_core::backward`] defines.
    ///
    /// ```
    /// use tilewise::{BackwardInputs, Engine, Inputs, Options, TensorView};
    ///
    /// let (q, k, v) = ([0.5f32; 8], [0.25f32; 12], [1.0f32; 12]);
    /// let inputs = Inputs::new(
    ///     TensorView::bhsd(&q, [1, 1, 2, 4])?,
    ///     TensorView::bhsd(&k, [1, 1, 3, 4])?,
    ///     TensorView::bhsd(&v, [1, 1, 3, 4])?,
    /// );
    /// # if Engine::named("cpu").is_err() { return Ok(()); }
    /// let engine = Engine::named("cpu")?;
    /// let options = Options::new().causal(true);
    /// let forward = engine.forward(&inputs, &options)?;
    /// let dout = [1.0f32; 8];
    /// let out = TensorView::bhsd(&forward.out, [1, 1, 2, 4])?;
    /// let lse = TensorView::bhsd(&forward.lse, [1, 1, 2, 1])?;
    /// let dout = TensorView::bhsd(&dout, [1, 1, 2, 4])?;
    /// let gradients = engine.backward(&BackwardInputs::new(inputs, out, lse, dout), &options)?;
    /// assert_eq!(gradients.dk.len(), 12);
    /// // Every value has the weights of the rows that see it.
    /// assert!((gradients.dv.iter().sum::<f32>() - 8.0).abs() < 1e-5);
    /// # Ok::<(), tilewise::Error>(())
    /// ```
    ///
    /// # Errors
    /// Everything [`BackwardInputs::problem`] finds; [`Error::Unsupported`] if no backend of this engine
    /// has the gradients of the problem; [`Error::OutOfMemory`] and [`Error::Backend`] from the backend.
    pub fn backward<T: Element>(
        &self,
        inputs: &BackwardInputs<'_, T>,
        options: &Options,
    ) -> Result<Gradients<T>> {
        let problem = inputs.problem(options)?;
        let mut gradients = Gradients::filled(&problem, &inputs.inputs, 0.0)?;
        self.backward_into(Algorithm::Auto, inputs, options, gradients.views_mut()?)?;
        Ok(gradients)
    }

    /// [`Engine::backward`] by a given schedule into the caller's memory. Every element is written.
    ///
    /// # Errors
    /// As [`Engine::backward`], and [`Error::Shape`] for gradients that do not fit.
    pub fn backward_into<T: Element>(
        &self,
        algorithm: Algorithm,
        inputs: &BackwardInputs<'_, T>,
        options: &Options,
        gradients: GradientsMut<'_, T>,
    ) -> Result<BackwardInfo> {
        let problem = inputs.problem(options)?;
        gradients.check(&problem, &inputs.inputs)?;
        let (kind, backend, passed_over) =
            self.choose_by(|backend| backend.supports_backward(&problem, algorithm))?;
        let inputs = T::erase_backward(*inputs);
        let gradients = T::erase_gradients(gradients);
        let report = backend.backward(&problem, &inputs, algorithm, gradients)?;
        Ok(BackwardInfo {
            backend: kind,
            report,
            passed_over,
        })
    }

    /// A running state (m, ℓ, Õ) for `problem`, through which keys can be streamed in chunks and
    /// states of other backends merged. Make the problem with [`Problem::dense`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if no backend of this engine can stream the problem.
    pub fn begin(&self, problem: &Problem) -> Result<Box<dyn RunningState>> {
        let mut last = None;
        for (kind, backend) in &self.candidates {
            let supported = backend.supports(problem, Algorithm::Auto);
            // A backend may attend to more than it can stream, and says so when asked to begin.
            match supported.and_then(|()| backend.begin(problem)) {
                Err(error @ Error::Unsupported { .. }) => {
                    if self.candidates.len() > 1 {
                        tracing::info!(%kind, %error, "backend passed over");
                    }
                    last = Some(error);
                }
                begun => return begun,
            }
        }
        Err(last.unwrap_or_else(|| Error::Unavailable {
            backend: "auto".into(),
            reason: "no backend".into(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use tilewise_core::{AnyInputs, AnyTensorMut, BackendInfo, DType, Dims};

    use super::*;

    /// Supports everything, and cannot stream.
    #[derive(Debug)]
    struct Stateless;

    impl Backend for Stateless {
        fn info(&self) -> BackendInfo {
            BackendInfo {
                name: "stateless".into(),
                device: "none".into(),
                details: Vec::new(),
            }
        }

        fn supports(&self, _: &Problem, _: Algorithm) -> Result<()> {
            Ok(())
        }

        fn workspace_bytes(&self, _: &Problem, _: Algorithm) -> u64 {
            0
        }

        fn forward(
            &self,
            _: &Problem,
            _: &AnyInputs<'_>,
            _: Algorithm,
            _: AnyTensorMut<'_>,
            _: Option<TensorViewMut<'_, f32>>,
        ) -> Result<ForwardReport> {
            Err(Error::unsupported("stateless", "a forward pass"))
        }

        fn begin(&self, _: &Problem) -> Result<Box<dyn RunningState>> {
            Err(Error::unsupported("stateless", "a running state"))
        }
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn a_state_is_begun_by_the_first_that_can() {
        let dims = Dims {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            seqlen_q: 1,
            seqlen_k: 1,
            head_dim: 4,
            head_dim_v: 4,
        };
        let problem = Problem::dense(dims, DType::F32, &Options::new()).unwrap();
        let mut engine = Engine::with_backend(BackendKind::Auto, Arc::new(Stateless));
        let error = engine.begin(&problem).err().expect("a state");
        assert!(error.to_string().contains("a running state"), "{error}");
        let cpu = Engine::new(BackendKind::Cpu).unwrap();
        engine.candidates.extend(cpu.candidates);
        assert_eq!(engine.begin(&problem).unwrap().export().unwrap().m.len(), 1);
    }
}
