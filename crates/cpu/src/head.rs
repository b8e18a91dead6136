//! One sequence and query head of a call: where its rows lie and what happens to its scores.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use tilewise_core::{Element, Inputs, MaskRule, Problem};

use crate::kernel::dropout::Dropping;
use crate::kernel::pack::Rows;
use crate::kernel::{Modifiers, Plane};

/// Scores as the kernels see them: which factor is where.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<A> {
    /// Every element of q is multiplied by this, ±1, when it is packed.
    pub(crate) sign: A,
    /// log₂e times `unit`.
    pub(crate) c: A,
    /// Natural-log units of one unit of the strip: softmax_scale's magnitude where the strip holds
    /// raw dot products, 1 where modifiers have made them scores.
    pub(crate) unit: f64,
    /// The strip holds scores, made by modifiers.
    pub(crate) modified: bool,
}

impl<A: tilewise_core::Float> Scoring<A> {
    /// `natural`: the strip must hold scores in natural-log units whatever the options.
    pub(crate) fn new(problem: &Problem, natural: bool) -> Self {
        let options = problem.options();
        let scale = problem.softmax_scale();
        let c = A::from_f64(scale.abs() * LOG2_E);
        // A factor of 0 (or one that rounds to it) times −∞ would not be −∞.
        let plain = c.is_normal()
            && options.get_softcap().is_none()
            && options.get_alibi_slopes().is_none()
            && !problem.has_bias()
            && !problem.has_mask()
            && options.get_dropout().is_none();
        if plain && !natural {
            Scoring {
                sign: A::from_f64(1f64.copysign(scale)),
                c,
                unit: scale.abs(),
                modified: false,
            }
        } else {
            Scoring {
                sign: A::from_f64(1.0),
                c: A::from_f64(LOG2_E),
                unit: 1.0,
                modified: true,
            }
        }
    }
}

/// One sequence and query head.
#[derive(Clone, Copy)]
pub(crate) struct Head<T: Element> {
    pub(crate) rule: MaskRule,
    /// Position on the sequence's key axis of the first packed key.
    pub(crate) origin: usize,
    pub(crate) q: Plane<T>,
    pub(crate) head_dim: usize,
    pub(crate) scoring: Scoring<T::Acc>,
    /// For row 0 and packed key 0.
    pub(crate) modifiers: Option<Modifiers<T>>,
    pub(crate) sink: Option<f32>,
}

/// First element and steps of the rows of `[b, h, from.., ..]`.
pub(crate) fn rows_of<T: Copy>(
    view: &tilewise_core::TensorView<'_, T>,
    b: usize,
    h: usize,
    from: usize,
) -> Plane<T> {
    let strides = view.strides();
    let at = view.offset() as isize
        + b as isize * strides[0]
        + h as isize * strides[1]
        + from as isize * strides[2];
    Plane {
        // Wrapping: of an empty view not even the first element need exist.
        at: view.data().as_ptr().wrapping_offset(at),
        row: strides[2],
        key: strides[3],
    }
}

impl<T: Element> Head<T> {
    /// Head `head` of sequence number `number`. `bias_key` is the key on the key axis of bias and mask at
    /// which the packed keys start.
    pub(crate) fn new(
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        number: usize,
        head: usize,
        scoring: Scoring<T::Acc>,
        origin: usize,
        bias_key: usize,
    ) -> Self {
        let options = problem.options();
        let sequence = &problem.sequences()[number];
        let acc = <T::Acc as Element>::from_f64;
        let (b, row) = (sequence.q_batch, sequence.q_start);
        let rule = problem.mask_rule(sequence);
        let modifiers = scoring.modified.then(|| Modifiers {
            scale: acc(problem.softmax_scale()),
            softcap: options.get_softcap().map(acc),
            bias: inputs
                .bias
                .as_ref()
                .map(|bias| element_plane(bias, b, head, row, bias_key)),
            alibi: options
                .get_alibi_slopes()
                .map(|slopes| (acc(slopes[head].into()), rule.diagonal(0) - origin as i64)),
            mask: inputs
                .mask
                .as_ref()
                .map(|mask| element_plane(mask, b, head, row, bias_key)),
            dropout: options.get_dropout().map(|dropout| Dropping {
                philox: dropout.philox(number, head, problem.dims().num_heads),
                row: 0,
                key: origin,
                mask: inputs
                    .keep_mask
                    .as_ref()
                    .map(|mask| element_plane(mask, b, head, row, bias_key)),
                scale: acc(dropout.scale()),
            }),
        });
        Head {
            rule,
            origin,
            q: rows_of(&inputs.q, b, head, row),
            head_dim: problem.dims().head_dim,
            scoring,
            modifiers,
            sink: options.get_sinks().map(|sinks| sinks[head]),
        }
    }
}

impl<T: Element> Head<T> {
    /// Asks for those of `rows` numbered `range` that there are, before they are packed.
    pub(crate) fn ask(&self, rows: &Range<usize>, range: Range<usize>) {
        for row in range.start.min(rows.len())..range.end.min(rows.len()) {
            let at = [self.q.moved(rows.start + row, 0).at];
            let rows = Rows {
                rows: &at,
                next: &[],
                step: self.q.key,
                len: self.head_dim,
            };
            rows.ask(0..1);
        }
    }
}

/// Like [`rows_of`], with steps of 0 along the axes of size 1.
fn element_plane<T: Copy>(
    view: &tilewise_core::TensorView<'_, T>,
    b: usize,
    h: usize,
    row: usize,
    key: usize,
) -> Plane<T> {
    let shape = view.shape();
    let mut strides = view.strides();
    for axis in 0..4 {
        if shape[axis] == 1 {
            strides[axis] = 0;
        }
    }
    let at = view.offset() as isize
        + b as isize * strides[0]
        + h as isize * strides[1]
        + row as isize * strides[2]
        + key as isize * strides[3];
    Plane {
        at: view.data().as_ptr().wrapping_offset(at),
        row: strides[2],
        key: strides[3],
    }
}
