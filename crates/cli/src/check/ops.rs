//! Ops `merge` and `alibi_slopes`.

use std::path::Path;

use anyhow::{Result, bail};
use tilewise::{
    Dims, Element, HostState, Options, Part, Problem, TensorView, TensorViewMut, alibi_slopes,
    merge_parts,
};

use super::attention::{Outcome, expected, lse_view};
use super::case::Case;
use super::lanes::{OpenLane, caught, on_each};
use super::report::Run;
use super::verdict::Verdict;
use crate::container::Container;

/// Attention over parts of the keys, all of f32.
struct Parts {
    shape: [usize; 4],
    o: Vec<Vec<f32>>,
    lse: Vec<Vec<f32>>,
}

impl Parts {
    fn load(path: &Path, container: &Container) -> Result<Parts> {
        let (o, lse) = (container.tensor("parts_o")?, container.tensor("parts_lse")?);
        let (&[n, b, h, s, d], lse_shape) = (o.shape(), lse.shape()) else {
            bail!(
                "{}: parts_o has shape {:?}, expected five axes",
                path.display(),
                o.shape()
            );
        };
        if lse_shape != [n, b, h, s] {
            bail!(
                "{}: parts_lse has shape {lse_shape:?}, expected {:?}",
                path.display(),
                [n, b, h, s]
            );
        }
        // A part without elements is a part all the same.
        let split = |values: Vec<f32>, size: usize| -> Vec<Vec<f32>> {
            (0..n)
                .map(|part| values[part * size..(part + 1) * size].to_vec())
                .collect()
        };
        Ok(Parts {
            shape: [b, h, s, d],
            o: split(o.to_f32()?, b * h * s * d),
            lse: split(lse.to_f32()?, b * h * s),
        })
    }

    fn lse_shape(&self) -> [usize; 3] {
        [self.shape[0], self.shape[1], self.shape[2]]
    }
}

/// The merge of finished outputs, then that of running states on every lane.
///
/// # Errors
/// If the file is broken.
pub(super) fn merge(
    path: &Path,
    case: &Case,
    container: &Container,
    lanes: &[OpenLane],
) -> Result<Vec<Run>> {
    if let Some(reason) = case.refusal() {
        return Ok(vec![Run::alone(Verdict::Refused(reason))]);
    }
    let parts = Parts::load(path, container)?;
    let expected = Outcome {
        o: expected(path, case, container, "o")?,
        lse: expected(path, case, container, "lse")?,
    };
    let judge = |result: tilewise::Result<(Vec<f32>, Vec<f32>)>| match result {
        Err(error) => Verdict::of_error(&error),
        Ok((o, lse)) => expected
            .o
            .compare(&parts.shape, o.iter().map(|&x| f64::from(x)))
            .and_then(|()| {
                expected
                    .lse
                    .compare(&parts.lse_shape(), lse.iter().map(|&x| f64::from(x)))
            })
            .map_or_else(Verdict::Failed, |()| Verdict::Passed),
    };
    let mut runs = vec![Run::alone(caught(|| judge(merge_finished(&parts))))];
    runs.extend(on_each(lanes, |lane| judge(merge_states(&parts, lane))));
    Ok(runs)
}

fn merge_finished(parts: &Parts) -> tilewise::Result<(Vec<f32>, Vec<f32>)> {
    let views = parts
        .o
        .iter()
        .zip(&parts.lse)
        .map(|(o, lse)| {
            Ok(Part::new(
                TensorView::bhsd(o, parts.shape)?,
                lse_view(lse, parts.lse_shape())?,
            ))
        })
        .collect::<tilewise::Result<Vec<_>>>()?;
    written(parts, |out, lse| merge_parts(&views, out, Some(lse)))
}

/// The same through (m, ℓ, Õ) = (L, 1, O) on a backend.
fn merge_states(parts: &Parts, lane: &OpenLane) -> tilewise::Result<(Vec<f32>, Vec<f32>)> {
    let [batch, num_heads, seqlen_q, head_dim_v] = parts.shape;
    let dims = Dims {
        batch,
        num_heads,
        num_kv_heads: num_heads,
        seqlen_q,
        seqlen_k: 0,
        head_dim: 1,
        head_dim_v,
    };
    let problem = Problem::dense(dims, f32::DTYPE, &Options::new())?;
    let mut state = lane.backend.begin(&problem)?;
    for (o, lse) in parts.o.iter().zip(&parts.lse) {
        let mut part = HostState::empty(parts.lse_shape(), head_dim_v)?;
        for (row, &l) in lse.iter().enumerate() {
            // A row that saw no key is the empty state, whatever its output holds.
            if l == f32::NEG_INFINITY {
                continue;
            }
            part.m[row] = f64::from(l);
            part.l[row] = 1.0;
            let elements = row * head_dim_v..(row + 1) * head_dim_v;
            for (to, &x) in part.acc[elements.clone()].iter_mut().zip(&o[elements]) {
                *to = f64::from(x);
            }
        }
        state.merge(&part)?;
    }
    written(parts, |out, lse| {
        state.finish(f32::erase_mut(out), Some(lse))
    })
}

fn written(
    parts: &Parts,
    write: impl FnOnce(TensorViewMut<'_, f32>, TensorViewMut<'_, f32>) -> tilewise::Result<()>,
) -> tilewise::Result<(Vec<f32>, Vec<f32>)> {
    let mut o = vec![f32::NAN; parts.shape.iter().product()];
    let mut lse = vec![f32::NAN; parts.lse_shape().iter().product()];
    write(
        TensorViewMut::bhsd(&mut o, parts.shape)?,
        TensorViewMut::bhs(&mut lse, parts.lse_shape())?,
    )?;
    Ok((o, lse))
}

/// The slopes of the ALiBi paper.
///
/// # Errors
/// If the file is broken.
pub(super) fn slopes(path: &Path, case: &Case, container: &Container) -> Result<Vec<Run>> {
    let Some(n_heads) = case.n_heads else {
        bail!("{}: n_heads is missing", path.display());
    };
    let expected = expected(path, case, container, "slopes")?;
    let verdict = caught(|| {
        let slopes = alibi_slopes(n_heads);
        expected
            .compare(&[slopes.len()], slopes.iter().map(|&x| f64::from(x)))
            .map_or_else(Verdict::Failed, |()| Verdict::Passed)
    });
    Ok(vec![Run::alone(verdict)])
}
