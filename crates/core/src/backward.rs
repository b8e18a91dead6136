//! The tensors of a backward call: what the gradients are made from, and where they go.
//!
//! Gradients are those of a loss whose gradient at `out` is `dout` and at `lse` is `dlse`. With
//! S the final scores, P the weights and D the factors of dropout (1 without),
//!
//! ```text
//! dV = (P ∘ D)ᵀ dO        dP = D ∘ (dO Vᵀ)        Δ = rowsum(dO ∘ O) − dlse
//! dS = P ∘ (dP − Δ)       dX = dS ∘ (1 − (S_capped/softcap)²)      (dS without a softcap)
//! dQ = scale · dX K       dK = scale · dXᵀ Q      dbias = Σ dS     dsink = −Σ e^(sink − L) Δ
//! ```
//!
//! A row keeps a key if it sees it, with a score above −∞, and dropout leaves it. rowsum(dO ∘ O) stands for
//! rowsum(P ∘ dP), the sum over the keys that the row keeps (Dao et al. 2022, appendix B.4): where it keeps
//! none, because all are hidden or dropped, out is 0 whatever dO is, and Δ = −dlse even if dO is NaN or
//! infinite. dO is then in no gradient. Otherwise NaN in dO, or in a value that the row keeps, makes Δ NaN, and
//! with it dq of the row and dk of all keys that it sees, dropped ones too; dv has NaN of dO where the row keeps
//! the key.
//!
//! P is not stored by the forward pass: it is made again from `lse`, P = e^(S − L) (Dao 2023,
//! section 3.1.2). dK and dV are summed over the query heads that share a head, dbias over the axes
//! along which the bias was broadcast.

use half::{bf16, f16};

use crate::algorithm::Algorithm;
use crate::allocate::allocate;
use crate::any::AnyInputs;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::options::Options;
use crate::problem::Problem;
use crate::view::{TensorView, TensorViewMut};

/// The inputs of a forward call, what it gave, and the gradients that arrive there.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a, T> {
    /// q, k, v and what else the forward call was given.
    pub inputs: Inputs<'a, T>,
    /// Its output, `[batch, num_heads, seqlen_q, head_dim_v]`.
    pub out: TensorView<'a, T>,
    /// Its ln Σ e^score, `[batch, num_heads, seqlen_q]` as a view whose last axis is 1.
    pub lse: TensorView<'a, f32>,
    /// The gradient that arrives at out, in its shape.
    pub dout: TensorView<'a, T>,
    /// The gradient that arrives at lse, in its shape; `None`: 0.
    pub dlse: Option<TensorView<'a, f32>>,
}

impl<'a, T: Element> BackwardInputs<'a, T> {
    /// Without a gradient at lse.
    pub fn new(
        inputs: Inputs<'a, T>,
        out: TensorView<'a, T>,
        lse: TensorView<'a, f32>,
        dout: TensorView<'a, T>,
    ) -> Self {
        BackwardInputs {
            inputs,
            out,
            lse,
            dout,
            dlse: None,
        }
    }

    /// With the gradient that arrives at lse.
    pub fn dlse(mut self, dlse: impl Into<Option<TensorView<'a, f32>>>) -> Self {
        self.dlse = dlse.into();
        self
    }

    /// The problem posed, if all tensors fit it.
    ///
    /// # Errors
    /// Those of [`Problem::new`], and [`Error::Shape`] for out, lse, dout and dlse.
    pub fn problem(&self, options: &Options) -> Result<Problem> {
        let problem = Problem::new(&self.inputs, options)?;
        let [b, h, s] = problem.dims().lse_shape();
        let (out, lse) = (problem.dims().out_shape(), [b, h, s, 1]);
        Error::expect_shape("out", self.out.shape(), out)?;
        Error::expect_shape("dout", self.dout.shape(), out)?;
        Error::expect_shape("lse", self.lse.shape(), lse)?;
        if let Some(dlse) = &self.dlse {
            Error::expect_shape("dlse", dlse.shape(), lse)?;
        }
        Ok(problem)
    }
}

/// Where gradients go. Every element is written; keys that no query may see get 0.
#[derive(Debug)]
pub struct GradientsMut<'a, T> {
    /// As q: `[batch, num_heads, seqlen_q, head_dim]`.
    pub dq: TensorViewMut<'a, T>,
    /// As k; of pages, as k with its pages in order: see [`Problem::dk_shape`].
    pub dk: TensorViewMut<'a, T>,
    /// As v, likewise.
    pub dv: TensorViewMut<'a, T>,
    /// As the bias was given, broadcast axes of size 1 included. Only with a bias.
    pub dbias: Option<TensorViewMut<'a, T>>,
    /// `[num_heads]`. Only with sinks.
    pub dsinks: Option<&'a mut [f32]>,
}

impl<'a, T: Element> GradientsMut<'a, T> {
    /// Without those of bias and sinks.
    pub fn new(
        dq: TensorViewMut<'a, T>,
        dk: TensorViewMut<'a, T>,
        dv: TensorViewMut<'a, T>,
    ) -> Self {
        GradientsMut {
            dq,
            dk,
            dv,
            dbias: None,
            dsinks: None,
        }
    }

    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> GradientsMut<'_, T> {
        GradientsMut {
            dq: self.dq.reborrow(),
            dk: self.dk.reborrow(),
            dv: self.dv.reborrow(),
            dbias: self.dbias.as_mut().map(TensorViewMut::reborrow),
            dsinks: self.dsinks.as_deref_mut(),
        }
    }

    /// Checks shapes against the problem that `inputs` pose.
    ///
    /// # Errors
    /// [`Error::Shape`], also where a gradient is asked for of a bias or of sinks that are not there.
    pub fn check(&self, problem: &Problem, inputs: &Inputs<'_, T>) -> Result<()> {
        let dims = problem.dims();
        Error::expect_shape("dq", self.dq.shape(), inputs.q.shape())?;
        Error::expect_shape("dk", self.dk.shape(), problem.dk_shape())?;
        Error::expect_shape("dv", self.dv.shape(), problem.dv_shape())?;
        if let Some(dbias) = &self.dbias {
            let bias = inputs
                .bias
                .as_ref()
                .ok_or_else(|| Error::shape("dbias", "none: there is no bias", "a tensor"))?;
            Error::expect_shape("dbias", dbias.shape(), bias.shape())?;
        }
        if let Some(dsinks) = &self.dsinks {
            if problem.options().get_sinks().is_none() {
                return Err(Error::shape(
                    "dsinks",
                    "none: there are no sinks",
                    "a tensor",
                ));
            }
            if dsinks.len() != dims.num_heads {
                return Err(Error::shape(
                    "dsinks",
                    format!("[{}]", dims.num_heads),
                    format!("[{}]", dsinks.len()),
                ));
            }
        }
        Ok(())
    }
}

/// Gradients with memory of their own, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// `[batch, num_heads, seqlen_q, head_dim]`.
    pub dq: Vec<T>,
    /// [`Problem::dk_shape`].
    pub dk: Vec<T>,
    /// [`Problem::dv_shape`].
    pub dv: Vec<T>,
    /// In the shape of the bias; `None` without one.
    pub dbias: Option<Vec<T>>,
    /// `[num_heads]`; `None` without sinks.
    pub dsinks: Option<Vec<f32>>,
    shapes: [[usize; 4]; 4],
}

impl<T: Element> Gradients<T> {
    /// Memory for every gradient of `problem`, each element `fill`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn filled(problem: &Problem, inputs: &Inputs<'_, T>, fill: f64) -> Result<Self> {
        let bias = inputs.bias.map_or([0; 4], |bias| bias.shape());
        let shapes = [
            inputs.q.shape(),
            problem.dk_shape(),
            problem.dv_shape(),
            bias,
        ];
        let tensor = |n: usize, name: &'static str| allocate(&shapes[n], name, T::from_f64(fill));
        Ok(Gradients {
            dq: tensor(0, "dq")?,
            dk: tensor(1, "dk")?,
            dv: tensor(2, "dv")?,
            dbias: match inputs.bias {
                Some(_) => Some(tensor(3, "dbias")?),
                None => None,
            },
            dsinks: problem
                .options()
                .get_sinks()
                .map(|sinks| vec![fill as f32; sinks.len()]),
            shapes,
        })
    }

    /// Where the gradients are to be written.
    ///
    /// # Errors
    /// [`Error::View`] if a vector was replaced by a shorter one.
    pub fn views_mut(&mut self) -> Result<GradientsMut<'_, T>> {
        let [q, k, v, bias] = self.shapes;
        Ok(GradientsMut {
            dq: TensorViewMut::bhsd(&mut self.dq, q).map_err(|e| e.named("dq"))?,
            dk: TensorViewMut::bhsd(&mut self.dk, k).map_err(|e| e.named("dk"))?,
            dv: TensorViewMut::bhsd(&mut self.dv, v).map_err(|e| e.named("dv"))?,
            dbias: match &mut self.dbias {
                Some(dbias) => {
                    Some(TensorViewMut::bhsd(dbias, bias).map_err(|e| e.named("dbias"))?)
                }
                None => None,
            },
            dsinks: self.dsinks.as_deref_mut(),
        })
    }
}

/// What a backward call did.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardReport {
    /// The schedule that ran.
    pub algorithm: Algorithm,
    /// The instruction set or kernel that ran.
    pub isa: String,
}

/// [`BackwardInputs`] of any element type.
#[derive(Clone, Copy, Debug)]
pub enum AnyBackwardInputs<'a> {
    /// Of f64.
    F64(BackwardInputs<'a, f64>),
    /// Of f32.
    F32(BackwardInputs<'a, f32>),
    /// Of f16.
    F16(BackwardInputs<'a, f16>),
    /// Of bf16.
    BF16(BackwardInputs<'a, bf16>),
}

/// [`GradientsMut`] of any element type.
#[derive(Debug)]
pub enum AnyGradientsMut<'a> {
    /// Of f64.
    F64(GradientsMut<'a, f64>),
    /// Of f32.
    F32(GradientsMut<'a, f32>),
    /// Of f16.
    F16(GradientsMut<'a, f16>),
    /// Of bf16.
    BF16(GradientsMut<'a, bf16>),
}

impl AnyBackwardInputs<'_> {
    /// The inputs of the forward call.
    pub fn inputs(&self) -> AnyInputs<'_> {
        match self {
            AnyBackwardInputs::F64(x) => AnyInputs::F64(x.inputs),
            AnyBackwardInputs::F32(x) => AnyInputs::F32(x.inputs),
            AnyBackwardInputs::F16(x) => AnyInputs::F16(x.inputs),
            AnyBackwardInputs::BF16(x) => AnyInputs::BF16(x.inputs),
        }
    }
}

impl AnyGradientsMut<'_> {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            AnyGradientsMut::F64(_) => DType::F64,
            AnyGradientsMut::F32(_) => DType::F32,
            AnyGradientsMut::F16(_) => DType::F16,
            AnyGradientsMut::BF16(_) => DType::BF16,
        }
    }
}

macro_rules! erase {
    ($($variant:ident $t:ty),*) => {$(
        impl<'a> From<BackwardInputs<'a, $t>> for AnyBackwardInputs<'a> {
            fn from(inputs: BackwardInputs<'a, $t>) -> Self {
                AnyBackwardInputs::$variant(inputs)
            }
        }
        impl<'a> From<GradientsMut<'a, $t>> for AnyGradientsMut<'a> {
            fn from(gradients: GradientsMut<'a, $t>) -> Self {
                AnyGradientsMut::$variant(gradients)
            }
        }
    )*};
}

erase!(F64 f64, F32 f32, F16 f16, BF16 bf16);
