//! The backward schedules on one head, recorded and compared with the definition.

use anyhow::{Context, Result, bail};
use tilewise::core::schedule;
use tilewise::core::{BlockSizes, GradientJudge, Gradients, NoObserver};
use tilewise::{Algorithm, BackwardInputs, Element, Inputs, Problem, Sequence, TensorView};

use super::attention::{GradientDifference, Run};
use super::numbers::Number;
use super::one_head::{self, Place};
use super::record::{Recorder, Rows};
use crate::input::Loaded;
use crate::output::Outputs;
use crate::random;

/// What arrives at the head's output and lse.
pub(super) struct Arriving<'a, T> {
    loaded: &'a Loaded<T>,
    /// Of all heads, where no file brings it.
    seeded: Option<Vec<T>>,
    shape: [usize; 4],
    sequence: Sequence,
    head: usize,
}

/// A head's backward pass, ready to be run by each algorithm.
pub(super) struct Backward<'a, T> {
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    outputs: Outputs<T>,
    dout: TensorView<'a, T>,
    dlse: Option<TensorView<'a, f32>>,
    sizes: BlockSizes,
}

impl<'a, T: Element> Arriving<'a, T> {
    /// # Errors
    /// If `do` of the files does not have the shape of the output, or there is no memory for one.
    pub(super) fn new(loaded: &'a Loaded<T>, whole: &Problem, place: Place) -> Result<Self> {
        let shape = whole.dims().out_shape();
        let seeded = match loaded.dout()? {
            Some(_) => None,
            None => Some(random::normal(0, "do", random::count("do", shape)?)?),
        };
        let sequence = whole.sequences().get(place.batch);
        Ok(Arriving {
            loaded,
            seeded,
            shape,
            sequence: *sequence.context("the sequence that is traced")?,
            head: place.head,
        })
    }

    /// Runs the forward pass by FA2, which leaves what a backward pass starts from.
    pub(super) fn pass<'b>(
        &'b self,
        problem: &'b Problem,
        inputs: Inputs<'b, T>,
        sizes: BlockSizes,
    ) -> Result<Backward<'b, T>> {
        let dout = match (&self.seeded, self.loaded.dout()?) {
            (Some(seeded), _) => TensorView::bhsd(seeded, self.shape)?,
            (None, given) => given.context("do")?,
        };
        let dlse = self.loaded.dlse()?;
        let [b, h, s, _] = self.shape;
        for (name, got, expected) in [
            ("dout", Some(dout.shape()), self.shape),
            ("dlse", dlse.map(|dlse| dlse.shape()), [b, h, s, 1]),
        ] {
            if got.is_some_and(|got| got != expected) {
                bail!(
                    "{name}: expected {expected:?}, got {:?}",
                    got.unwrap_or_default()
                );
            }
        }
        let mut outputs = Outputs::<T>::new(problem)?;
        let (out, lse) = outputs.views_mut()?;
        let (lse, silent) = (Some(lse), &mut NoObserver);
        schedule::forward(Algorithm::Fa2, problem, &inputs, sizes, silent, out, lse)?;
        Ok(Backward {
            problem,
            inputs,
            outputs,
            dout: one_head::rows(dout, &self.sequence, self.head),
            dlse: dlse.map(|dlse| one_head::rows(dlse, &self.sequence, self.head)),
            sizes,
        })
    }
}

impl<T: Element> Backward<'_, T> {
    fn given(&self) -> Result<BackwardInputs<'_, T>> {
        let (out, lse) = (self.outputs.out_view()?, self.outputs.lse_view()?);
        Ok(BackwardInputs::new(self.inputs, out, lse, self.dout).dlse(self.dlse))
    }

    pub(super) fn run(&self, algorithm: Algorithm, rows: Rows) -> Result<Run> {
        let (problem, given) = (self.problem, self.given()?);
        let mut recorder = Recorder::new(algorithm, self.sizes, rows);
        let mut gradients = Gradients::filled(problem, &given.inputs, f64::NAN)?;
        schedule::backward::backward(
            algorithm,
            problem,
            &given,
            self.sizes,
            &mut recorder,
            gradients.views_mut()?,
        )?;
        let judge = GradientJudge::new(problem, &given);
        let compared = judge.compare(&gradients.views_mut()?)?;
        Ok(Run {
            gradients: (compared.iter())
                .map(|one| GradientDifference {
                    tensor: one.tensor,
                    max_abs_err: Number::F64(one.max_abs_err),
                    tolerance: Number::F64(one.tolerance),
                    pass: one.pass,
                })
                .collect(),
            ..Run::recorded(algorithm, recorder)
        })
    }
}
