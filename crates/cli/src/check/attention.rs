//! Ops `attention` and `error`: one call, run as the case directs, on one backend by one algorithm.

use std::path::Path;

use anyhow::{Result, bail};
use rayon::ThreadPoolBuilder;
use serde_json::Value;
use tilewise::core::paged::gather;
use tilewise::{
    Algorithm, AnyKeyBlock, Backend, Element, Error, ErrorClass, Inputs, Lengths, Problem,
    RunningState, Sequence, TensorView, TensorViewMut,
};

use super::case::{Case, class_name};
use super::gradients;
use super::lanes::{OpenLane, on_each};
use super::memory::Unplaced;
use super::report::Run;
use super::setup::Setup;
use super::tensors::{Tensors, alone, cut};
use super::verdict::{Expected, Verdict};
use crate::container::{Container, Kind, Plain};

/// Runs the case on every lane.
///
/// # Errors
/// If the file is broken.
pub(super) fn run(
    path: &Path,
    case: &Case,
    container: &Container,
    lanes: &[OpenLane],
) -> Result<Vec<Run>> {
    if let Some(reason) = case.refusal() {
        return Ok(on_each(lanes, |_| Verdict::Refused(reason.clone())));
    }
    match container.tensor("q")?.kind() {
        Kind::F64 => typed::<f64>(path, case, container, lanes),
        Kind::F32 => typed::<f32>(path, case, container, lanes),
        Kind::F16 => typed::<half::f16>(path, case, container, lanes),
        Kind::BF16 => typed::<half::bf16>(path, case, container, lanes),
        other => bail!("{}: q is of {other}, expected a float type", path.display()),
    }
}

fn typed<T: Element + Plain>(
    path: &Path,
    case: &Case,
    container: &Container,
    lanes: &[OpenLane],
) -> Result<Vec<Run>> {
    let tensors = match Tensors::<T>::load(case, container) {
        Ok(tensors) => Ok(tensors),
        Err(Unplaced::Wrong(error)) => Err(error),
        Err(Unplaced::Refused(reason)) => {
            return Ok(on_each(lanes, |_| Verdict::Refused(reason.clone())));
        }
        Err(Unplaced::Broken(error)) => {
            return Err(error.context(path.display().to_string()));
        }
    };
    if case.op == "error" {
        let Some(expect) = &case.expect else {
            bail!("{}: the case does not say which error", path.display());
        };
        return Ok(on_each(lanes, |lane| {
            let error = match &tensors {
                Ok(tensors) => attempt(lane, tensors),
                Err(error) => Some(error.clone()),
            };
            expected_error(error.as_ref(), &expect.error)
        }));
    }
    let expected = Outcome {
        o: expected(path, case, container, "o")?,
        lse: expected(path, case, container, "lse")?,
    };
    let mut gradients = Vec::new();
    for name in ["dq", "dk", "dv", "dbias", "dsinks"] {
        if case.wants_gradients() && container.contains(name) {
            gradients.push(self::expected(path, case, container, name)?);
        }
    }
    if case.wants_gradients() && gradients.is_empty() {
        bail!("{}: the case has no expected gradients", path.display());
    }
    Ok(on_each(lanes, |lane| match &tensors {
        Ok(tensors) => one_lane(lane, case, tensors, &expected, &gradients),
        Err(error) => Verdict::of_error(error),
    }))
}

/// What the call comes to, if it comes to an error.
fn attempt<T: Element + Plain>(lane: &OpenLane, tensors: &Tensors<T>) -> Option<Error> {
    let call = || -> tilewise::Result<()> {
        let inputs = tensors.inputs()?;
        let problem = Problem::new(&inputs, &tensors.options)?;
        Call::new(lane, problem, inputs)?.run().map(drop)
    };
    call().err()
}

fn expected_error(error: Option<&Error>, class: &str) -> Verdict {
    match error {
        None => Verdict::Failed(format!("accepted, expected an error of class {class}")),
        Some(error) if class_name(error.class()) == class => Verdict::Passed,
        Some(error) if error.class() == ErrorClass::Unsupported => {
            Verdict::Refused(error.to_string())
        }
        Some(error) => Verdict::Failed(format!(
            "an error of class {}, expected {class}: {error}",
            class_name(error.class())
        )),
    }
}

/// What o and lse should be.
pub(super) struct Outcome {
    pub(super) o: Expected,
    pub(super) lse: Expected,
}

/// An expected tensor of the file.
///
/// # Errors
/// If it or its tolerance is missing: such a case could not fail.
pub(super) fn expected(
    path: &Path,
    case: &Case,
    container: &Container,
    name: &'static str,
) -> Result<Expected> {
    let tensor = container.tensor(name)?;
    let Some(&tolerance) = case.tolerance.get(name) else {
        bail!("{}: no tolerance for {name}", path.display());
    };
    Ok(Expected {
        name,
        shape: tensor.shape().to_vec(),
        values: tensor.to_f64(),
        tolerance,
        infinite_for_nan: name == "lse",
    })
}

/// out and lse of one call.
#[derive(Clone, PartialEq)]
pub(super) struct Output<T> {
    pub(super) out: Vec<T>,
    pub(super) lse: Vec<f32>,
}

impl<T: Element + Plain> Output<T> {
    fn bits(&self) -> (&[u8], &[u8]) {
        (
            bytemuck::cast_slice(&self.out),
            bytemuck::cast_slice(&self.lse),
        )
    }
}

/// A validated call on one backend.
pub(super) struct Call<'a, T> {
    backend: &'a dyn Backend,
    algorithm: Algorithm,
    pub(super) problem: Problem,
    inputs: Inputs<'a, T>,
}

impl<'a, T: Element + Plain> Call<'a, T> {
    pub(super) fn new(
        lane: &'a OpenLane,
        problem: Problem,
        inputs: Inputs<'a, T>,
    ) -> tilewise::Result<Self> {
        lane.backend.supports(&problem, lane.algorithm)?;
        Ok(Call {
            backend: &*lane.backend,
            algorithm: lane.algorithm,
            problem,
            inputs,
        })
    }

    /// Memory for the results, every element NaN: what the call does not write shows.
    pub(super) fn prefilled(&self) -> Output<T> {
        let dims = self.problem.dims();
        Output {
            out: vec![T::from_f64(f64::NAN); dims.out_shape().iter().product()],
            lse: vec![f32::NAN; dims.lse_shape().iter().product()],
        }
    }

    /// One call into prefilled memory.
    pub(super) fn run(&self) -> tilewise::Result<Output<T>> {
        let mut output = self.prefilled();
        self.run_into(&mut output)?;
        Ok(output)
    }

    pub(super) fn run_into(&self, output: &mut Output<T>) -> tilewise::Result<()> {
        let dims = self.problem.dims();
        let out = TensorViewMut::bhsd(&mut output.out, dims.out_shape())?;
        let lse = TensorViewMut::bhs(&mut output.lse, dims.lse_shape())?;
        self.forward(&self.problem, &self.inputs, out, lse)
    }

    fn forward(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        out: TensorViewMut<'_, T>,
        lse: TensorViewMut<'_, f32>,
    ) -> tilewise::Result<()> {
        self.backend.forward(
            problem,
            &T::erase_inputs(*inputs),
            self.algorithm,
            T::erase_mut(out),
            Some(lse),
        )?;
        Ok(())
    }

    /// Every sequence by a call of its own, its rows put in their place. Rows of no sequence are
    /// those of `whole`.
    fn each_alone(&self, whole: &Output<T>) -> tilewise::Result<Output<T>> {
        let mut output = whole.clone();
        for (n, sequence) in self.problem.sequences().iter().enumerate() {
            let inputs = alone(&self.inputs, n, sequence);
            let problem = Problem::new(&inputs, self.problem.options())?;
            let (out, lse) = self.place(&mut output, sequence)?;
            self.forward(&problem, &inputs, out, lse)?;
        }
        Ok(output)
    }

    /// The keys of every sequence in `parts` parts, each streamed into a state of its own; the
    /// states are merged. Rows of no sequence are those of `whole`.
    fn in_parts(&self, parts: usize, whole: &Output<T>) -> tilewise::Result<Output<T>> {
        let gathered = gather(&self.problem, &self.inputs)?;
        let inputs = gathered.inputs(&self.inputs);
        let mut output = whole.clone();
        for (n, sequence) in gathered.problem().sequences().iter().enumerate() {
            let mut inputs = alone(&inputs, n, sequence);
            let used = 0..sequence.seqlen_k;
            let ranges = [None, None, None, Some(used.clone())];
            inputs.k = inputs.k.narrow(2, used.clone());
            inputs.v = inputs.v.narrow(2, used);
            inputs.bias = inputs.bias.map(|bias| cut(bias, &ranges));
            inputs.mask = inputs.mask.map(|mask| cut(mask, &ranges));
            inputs.lengths = Lengths::default();
            let state = self.streamed(&inputs, parts)?;
            let (out, lse) = self.place(&mut output, sequence)?;
            state.finish(T::erase_mut(out), Some(lse))?;
        }
        Ok(output)
    }

    /// The merged state of a dense call whose keys come in `parts` parts.
    fn streamed(
        &self,
        inputs: &Inputs<'_, T>,
        parts: usize,
    ) -> tilewise::Result<Box<dyn RunningState>> {
        let dims = *Problem::new(inputs, self.problem.options())?.dims();
        let problem = Problem::dense(dims, T::DTYPE, self.problem.options())?;
        let mut states = Vec::with_capacity(parts);
        for part in 0..parts {
            let keys = part * dims.seqlen_k / parts..(part + 1) * dims.seqlen_k / parts;
            let mut state = self.backend.begin(&problem)?;
            if !keys.is_empty() {
                let ranges = [None, None, None, Some(keys.clone())];
                state.absorb(&AnyKeyBlock {
                    q: T::erase(inputs.q),
                    k: T::erase(inputs.k.narrow(2, keys.clone())),
                    v: T::erase(inputs.v.narrow(2, keys.clone())),
                    first_key: keys.start,
                    bias: inputs.bias.map(|bias| T::erase(cut(bias, &ranges))),
                    mask: inputs.mask.map(|mask| cut(mask, &ranges)),
                })?;
            }
            states.push(state);
        }
        // The last part takes in the others, so that an empty one is merged into and from.
        let mut whole = match states.pop() {
            Some(state) => state,
            None => self.backend.begin(&problem)?,
        };
        for state in states {
            whole.merge(&state.export()?)?;
        }
        Ok(whole)
    }

    /// The rows of a sequence in `output`, set to NaN.
    #[allow(clippy::type_complexity)]
    fn place<'o>(
        &self,
        output: &'o mut Output<T>,
        sequence: &Sequence,
    ) -> tilewise::Result<(TensorViewMut<'o, T>, TensorViewMut<'o, f32>)> {
        let dims = self.problem.dims();
        let (heads, seqlen, width) = (dims.num_heads, dims.seqlen_q, dims.head_dim_v);
        let first = sequence.q_batch * heads * seqlen + sequence.q_start;
        let strides = |width: usize| {
            [heads * seqlen * width, seqlen * width, width, 1].map(|stride| stride as isize)
        };
        let mut out = TensorViewMut::from_strides(
            &mut output.out,
            [1, heads, sequence.seqlen_q, width],
            strides(width),
            first * width,
        )?;
        let mut lse = TensorViewMut::from_strides(
            &mut output.lse,
            [1, heads, sequence.seqlen_q, 1],
            strides(1),
            first,
        )?;
        out.fill(T::from_f64(f64::NAN));
        lse.fill(f32::NAN);
        Ok((out, lse))
    }
}

/// Whether results are the expected ones, and the same bits as those before.
struct Judge<'a, T> {
    shapes: ([usize; 4], [usize; 3]),
    expected: &'a Outcome,
    first: Option<Output<T>>,
}

impl<T: Element + Plain> Judge<'_, T> {
    /// `how` the result came about, for the message.
    fn check(&self, how: &str, output: &Output<T>) -> Result<(), Verdict> {
        let place = if how.is_empty() {
            String::new()
        } else {
            format!("{how}: ")
        };
        let fail = |what: String| Verdict::Failed(format!("{place}{what}"));
        self.expected
            .o
            .compare(&self.shapes.0, output.out.iter().map(|x| x.to_f64()))
            .and_then(|()| {
                self.expected
                    .lse
                    .compare(&self.shapes.1, output.lse.iter().map(|&x| f64::from(x)))
            })
            .map_err(fail)
    }

    /// Like [`check`](Self::check), and the bits must be those of the first call.
    fn check_bits(&self, how: &str, output: &Output<T>) -> Result<(), Verdict> {
        self.check(how, output)?;
        match &self.first {
            Some(first) if first.bits() != output.bits() => Err(Verdict::Failed(format!(
                "{how}: within tolerance, but not the bits of the first call"
            ))),
            _ => Ok(()),
        }
    }
}

fn one_lane<T: Element + Plain>(
    lane: &OpenLane,
    case: &Case,
    tensors: &Tensors<T>,
    expected: &Outcome,
    gradients: &[Expected],
) -> Verdict {
    if let Err(verdict) = directed(lane, case, tensors, expected) {
        return verdict;
    }
    if gradients.is_empty() {
        return Verdict::Passed;
    }
    match gradients::check(lane, case, tensors, gradients) {
        Ok(()) => Verdict::Passed,
        Err(Verdict::Refused(reason)) => {
            Verdict::Refused(format!("o and lse are right; gradients: {reason}"))
        }
        Err(verdict) => verdict,
    }
}

/// The call and all that the case's run directives ask for.
fn directed<T: Element + Plain>(
    lane: &OpenLane,
    case: &Case,
    tensors: &Tensors<T>,
    expected: &Outcome,
) -> Result<(), Verdict> {
    let refuse = |error: Error| Verdict::of_error(&error);
    let inputs = tensors.inputs().map_err(refuse)?;
    let problem = Problem::new(&inputs, &tensors.options).map_err(refuse)?;
    let call = Call::new(lane, problem, inputs).map_err(refuse)?;
    let first = call.run().map_err(refuse)?;
    let mut judge = Judge {
        shapes: (
            call.problem.dims().out_shape(),
            call.problem.dims().lse_shape(),
        ),
        expected,
        first: None,
    };
    judge.check("", &first)?;
    judge.first = Some(first.clone());

    // tilewise claims that bits follow from a row's own inputs: they are compared wherever the
    // case lets the code say so.
    let run = &case.run;
    for n in 1..run.repeat.unwrap_or(1) {
        let output = call.run().map_err(refuse)?;
        let how = format!("call {}", n + 1);
        if run.bitwise_repeat.is_some() {
            judge.check_bits(&how, &output)?;
        } else {
            judge.check(&how, &output)?;
        }
    }
    for &threads in &run.threads {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(|e| Verdict::Refused(format!("{threads} threads: {e}")))?;
        let output = pool.install(|| call.run()).map_err(refuse)?;
        judge.check_bits(&format!("{threads} threads"), &output)?;
    }
    if run.each_batch_alone || run.each_sequence_alone {
        let output = call.each_alone(&first).map_err(refuse)?;
        judge.check_bits("each sequence alone", &output)?;
    }
    for &parts in &run.splits {
        let output = call.in_parts(parts, &first).map_err(refuse)?;
        judge.check(&format!("keys in {parts} parts"), &output)?;
    }
    if let Some(shape) = &run.alternate_with {
        alternate(lane, shape, &call, &judge)?;
    }
    if let Some(n) = run.concurrent_calls {
        concurrently(n, &call, &judge)?;
    }
    Ok(())
}

/// How often a call alternates with another.
const ALTERNATIONS: usize = 4;

/// `shape` is a setup, or a list of them; sizes it does not give are those of the case.
fn alternate<T: Element + Plain>(
    lane: &OpenLane,
    shape: &Value,
    call: &Call<'_, T>,
    judge: &Judge<'_, T>,
) -> Result<(), Verdict> {
    let refuse = |error: Error| Verdict::of_error(&error);
    let shapes = match shape {
        Value::Array(shapes) => shapes.as_slice(),
        one => std::slice::from_ref(one),
    };
    for shape in shapes {
        let setup = Setup::parse_over(call.problem.dims(), shape)
            .map_err(|reason| Verdict::Refused(format!("alternate_with: {reason}")))?;
        let tensors = setup.tensors::<T>(1);
        let inputs = tensors.inputs().map_err(refuse)?;
        let problem = Problem::new(&inputs, &tensors.options).map_err(refuse)?;
        let other = Call::new(lane, problem, inputs).map_err(refuse)?;
        for _ in 0..ALTERNATIONS {
            other.run().map_err(refuse)?;
            judge.check_bits(
                "after a call of another shape",
                &call.run().map_err(refuse)?,
            )?;
        }
    }
    Ok(())
}

fn concurrently<T: Element + Plain>(
    calls: usize,
    call: &Call<'_, T>,
    judge: &Judge<'_, T>,
) -> Result<(), Verdict> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..calls).map(|_| scope.spawn(|| call.run())).collect();
        threads.into_iter().try_for_each(|thread| {
            let result = thread
                .join()
                .map_err(|_| Verdict::Failed("a concurrent call panicked".into()))?;
            let output = result.map_err(|error| Verdict::of_error(&error))?;
            judge.check_bits(&format!("{calls} calls at once"), &output)
        })
    })
}

/// A view of lse as parts and states have it.
pub(super) fn lse_view(lse: &[f32], shape: [usize; 3]) -> tilewise::Result<TensorView<'_, f32>> {
    TensorView::bhsd(lse, [shape[0], shape[1], shape[2], 1])
}
