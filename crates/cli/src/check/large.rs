//! Op `large`: inputs too large for a file, generated, with expected values over row ranges.
//!
//! What the schema leaves open is read thus, and anything else is refused with its name: `fill`
//! gives for each of `q`, `k`, `v` and `bias` nothing (then the numbers of the case's seed stand
//! there), one number, or a list of `{rows: [a, b], value}` that is laid over those numbers along
//! the seqlen axis. `expected` lists `{rows: [a, b], o, lse}` with rows of q, the same in every
//! batch entry and head; `o` is one number or head_dim_v of them. Rows in no range are wrong: all
//! are compared.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use tilewise::{DType, Element, Problem};

use super::attention::Call;
use super::case::{Case, Tolerance};
use super::lanes::{OpenLane, on_each};
use super::report::Run;
use super::setup::Setup;
use super::verdict::{Expected, Verdict};
use crate::container::Plain;

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Fill {
    Constant(f64),
    Rows(Vec<FilledRows>),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FilledRows {
    rows: [usize; 2],
    value: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectedRows {
    rows: [usize; 2],
    o: OneOrMany,
    lse: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(f64),
    Many(Vec<f64>),
}

struct Large {
    setup: Setup,
    seed: u64,
    fill: BTreeMap<String, Fill>,
    expected: Vec<ExpectedRows>,
    o: Tolerance,
    lse: Tolerance,
}

/// Runs the case on every lane.
pub(super) fn run(case: &Case, lanes: &[OpenLane]) -> Vec<Run> {
    let large = match case.refusal().map_or_else(|| parse(case), Err) {
        Ok(large) => large,
        Err(reason) => return on_each(lanes, |_| Verdict::Refused(reason.clone())),
    };
    match large.setup.dtype() {
        Ok(DType::F64) => typed::<f64>(&large, lanes),
        Ok(DType::F32) => typed::<f32>(&large, lanes),
        Ok(DType::F16) => typed::<half::f16>(&large, lanes),
        Ok(DType::BF16) => typed::<half::bf16>(&large, lanes),
        Ok(other) => on_each(lanes, |_| Verdict::Refused(format!("dtype {other}"))),
        Err(reason) => on_each(lanes, |_| Verdict::Refused(reason.clone())),
    }
}

fn parse(case: &Case) -> Result<Large, String> {
    let field = |name: &str| {
        case.rest
            .get(name)
            .ok_or_else(|| format!("{name} is missing"))
    };
    let understood = |name: &str, e: serde_json::Error| format!("{name} is not understood: {e}");
    let tolerance = |name: &str| {
        case.tolerance
            .get(name)
            .copied()
            .ok_or_else(|| format!("no tolerance for {name}"))
    };
    let fill = case.rest.get("fill").cloned().unwrap_or(Value::Null);
    Ok(Large {
        setup: Setup::parse(field("setup")?)
            .map_err(|e| format!("setup is not understood: {e}"))?,
        seed: case.seed,
        fill: serde_json::from_value::<Option<_>>(fill)
            .map_err(|e| understood("fill", e))?
            .unwrap_or_default(),
        expected: serde_json::from_value(field("expected")?.clone())
            .map_err(|e| understood("expected", e))?,
        o: tolerance("o")?,
        lse: tolerance("lse")?,
    })
}

fn typed<T: Element + Plain>(large: &Large, lanes: &[OpenLane]) -> Vec<Run> {
    let mut tensors = large.setup.tensors::<T>(large.seed);
    for (name, fill) in &large.fill {
        let tensor = match name.as_str() {
            "q" => &mut tensors.q,
            "k" => &mut tensors.k,
            "v" => &mut tensors.v,
            other => {
                return on_each(lanes, |_| {
                    Verdict::Refused(format!("a fill of {other:?} is not supported"))
                });
            }
        };
        match fill {
            Fill::Constant(value) => tensor.fill_rows(0, usize::MAX, T::from_f64(*value)),
            Fill::Rows(list) => {
                for FilledRows { rows, value } in list {
                    tensor.fill_rows(rows[0], rows[1], T::from_f64(*value));
                }
            }
        }
    }
    on_each(lanes, |lane| {
        let call = || -> tilewise::Result<Result<(), String>> {
            let inputs = tensors.inputs()?;
            let problem = Problem::new(&inputs, &tensors.options)?;
            let call = Call::new(lane, problem, inputs)?;
            let dims = *call.problem.dims();
            let output = call.run()?;
            let (o, lse) = match expand(large, dims.out_shape()) {
                Ok(expected) => expected,
                Err(reason) => return Ok(Err(reason)),
            };
            Ok(
                o.compare(&dims.out_shape(), output.out.iter().map(|x| x.to_f64()))
                    .and_then(|()| match lse {
                        Some(lse) => {
                            lse.compare(&dims.lse_shape(), output.lse.iter().map(|&x| f64::from(x)))
                        }
                        None => Ok(()),
                    }),
            )
        };
        match call() {
            Err(error) => Verdict::of_error(&error),
            Ok(Err(reason)) => Verdict::Failed(reason),
            Ok(Ok(())) => Verdict::Passed,
        }
    })
}

/// The expected tensors in full; lse only if every range gives it.
fn expand(
    large: &Large,
    [batch, heads, seqlen, width]: [usize; 4],
) -> Result<(Expected, Option<Expected>), String> {
    let mut o = Vec::with_capacity(batch * heads * seqlen * width);
    let mut lse = Vec::with_capacity(batch * heads * seqlen);
    for row in (0..batch * heads).flat_map(|_| 0..seqlen) {
        let range = large
            .expected
            .iter()
            .find(|range| (range.rows[0]..range.rows[1]).contains(&row))
            .ok_or_else(|| format!("nothing is expected of row {row}"))?;
        match &range.o {
            OneOrMany::One(value) => o.extend(std::iter::repeat_n(*value, width)),
            OneOrMany::Many(values) if values.len() == width => o.extend(values),
            OneOrMany::Many(values) => {
                return Err(format!(
                    "{} values expected of a row of {width}",
                    values.len()
                ));
            }
        }
        lse.extend(range.lse);
    }
    let expected = |name, shape: &[usize], values, tolerance| Expected {
        name,
        shape: shape.to_vec(),
        values,
        tolerance,
        infinite_for_nan: name == "lse",
    };
    let lse = (lse.len() == batch * heads * seqlen)
        .then(|| expected("lse", &[batch, heads, seqlen], lse, large.lse));
    Ok((
        expected("o", &[batch, heads, seqlen, width], o, large.o),
        lse,
    ))
}
