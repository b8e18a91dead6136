//! The gradients of a case: made from the backend's own forward results, and compared.

use tilewise::{BackwardInputs, Element, Error, Gradients, Problem};

use super::attention::{Call, lse_view};
use super::case::Case;
use super::lanes::OpenLane;
use super::tensors::Tensors;
use super::verdict::{Expected, Verdict};
use crate::container::Plain;

/// Runs backward as often as the case says and compares every expected gradient; bits must not change
/// where the case asks for them.
pub(super) fn check<T: Element + Plain>(
    lane: &OpenLane,
    case: &Case,
    tensors: &Tensors<T>,
    expected: &[Expected],
) -> Result<(), Verdict> {
    let refuse = |error: Error| Verdict::of_error(&error);
    let inputs = tensors.inputs().map_err(refuse)?;
    let problem = Problem::new(&inputs, &tensors.options).map_err(refuse)?;
    let (backend, algorithm) = (&*lane.backend, lane.algorithm);
    backend
        .supports_backward(&problem, algorithm)
        .map_err(refuse)?;
    let Some(dout) = &tensors.dout else {
        return Err(Verdict::Failed("the case has gradients but no do".into()));
    };
    let call = Call::new(lane, problem, inputs).map_err(refuse)?;
    let forward = call.run().map_err(refuse)?;
    let dims = *call.problem.dims();
    let backward = || -> tilewise::Result<Gradients<T>> {
        let out = tilewise::TensorView::bhsd(&forward.out, dims.out_shape())?;
        let lse = lse_view(&forward.lse, dims.lse_shape())?;
        let dlse = match &tensors.dlse {
            Some((values, shape)) => Some(tilewise::TensorView::bhsd(values, *shape)?),
            None => None,
        };
        let given = BackwardInputs::new(inputs, out, lse, dout.view("do")?).dlse(dlse);
        // The backend is given a checked problem.
        let problem = given.problem(&tensors.options)?;
        // What is not written stays NaN.
        let mut gradients = Gradients::filled(&problem, &inputs, f64::NAN)?;
        backend.backward(
            &problem,
            &T::erase_backward(given),
            algorithm,
            T::erase_gradients(gradients.views_mut()?),
        )?;
        Ok(gradients)
    };
    let mut first: Option<Vec<u64>> = None;
    for n in 0..case.run.repeat.unwrap_or(1).max(1) {
        let gradients = backward().map_err(refuse)?;
        for expected in expected {
            let values: Vec<f64> = match expected.name {
                "dq" => wide(&gradients.dq),
                "dk" => wide(&gradients.dk),
                "dv" => wide(&gradients.dv),
                "dbias" => wide(gradients.dbias.as_deref().unwrap_or_default()),
                _ => wide(gradients.dsinks.as_deref().unwrap_or_default()),
            };
            // The shape is the tensor's own: sizes were checked when the call was.
            expected
                .compare(&expected.shape, values.into_iter())
                .map_err(Verdict::Failed)?;
        }
        let bits: Vec<u64> = [&gradients.dq, &gradients.dk, &gradients.dv]
            .into_iter()
            .flatten()
            .map(|x| x.to_f64().to_bits())
            .collect();
        match &first {
            Some(first) if case.run.bitwise_repeat.is_some() && *first != bits => {
                return Err(Verdict::Failed(format!(
                    "gradients of call {}: within tolerance, but not the bits of the first call",
                    n + 1
                )));
            }
            _ => first = Some(bits),
        }
    }
    Ok(())
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}
