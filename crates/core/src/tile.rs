//! The tile grain of [`OnlineSoftmax`]: the state of a block of rows of one head, in plain vectors.
//!
//! This is the algebra on which [`schedule`](crate::schedule) writes the papers' algorithms, in f32
//! or f64. It is written to be read and to be judged against, not for speed.

use std::marker::PhantomData;
use std::ops::Range;

use crate::dropout::Philox;
use crate::dtype::{Element, Float};
use crate::error::{Error, Result};
use crate::mask::{Live, MaskRule};
use crate::online::{HostState, OnlineSoftmax};
use crate::problem::{Problem, Sequence};
use crate::softmax::{exponent_base, max_or_nan};

/// [`OnlineSoftmax`] for a block of rows of one head, in `F`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TileMath<F>(PhantomData<F>);

impl<F> TileMath<F> {
    /// The mathematics has no settings.
    pub fn new() -> Self {
        TileMath(PhantomData)
    }
}

/// Which rows a state is of, and how their scores are made.
#[derive(Clone, Debug, PartialEq)]
pub struct TileSpec<F> {
    rows: Range<usize>,
    head_dim: usize,
    head_dim_v: usize,
    scale: F,
    softcap: Option<F>,
    alibi_slope: Option<F>,
    sink: Option<F>,
    dropout: Option<TileDropout<F>>,
    mask: MaskRule,
}

/// Dropout of one head of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TileDropout<F> {
    /// `None`: what is kept comes with the block.
    philox: Option<Philox>,
    scale: F,
}

impl<F: Float> TileSpec<F> {
    /// Rows `rows` of `sequence` (counted within it) of query head `head`.
    ///
    /// # Panics
    /// If `head` is not below num_heads and slopes or sinks are set.
    pub fn new(problem: &Problem, sequence: &Sequence, head: usize, rows: Range<usize>) -> Self {
        let of_head = |values: Option<&[f32]>| values.map(|values| number(values[head].into()));
        let options = problem.options();
        TileSpec {
            rows,
            head_dim: problem.dims().head_dim,
            head_dim_v: problem.dims().head_dim_v,
            scale: number(problem.softmax_scale()),
            softcap: options.get_softcap().map(number),
            alibi_slope: of_head(options.get_alibi_slopes()),
            sink: of_head(options.get_sinks()),
            dropout: options.get_dropout().map(|dropout| {
                // Two equal sequences can only be two without rows.
                let sequences = problem.sequences();
                let number = sequences.iter().position(|s| s == sequence).unwrap_or(0);
                TileDropout {
                    philox: dropout.philox(number, head, problem.dims().num_heads),
                    scale: self::number(dropout.scale()),
                }
            }),
            mask: problem.mask_rule(sequence),
        }
    }

    /// The rows, counted within the sequence.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Size of a row of q and k.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Size of a row of Õ.
    pub fn head_dim_v(&self) -> usize {
        self.head_dim_v
    }

    /// The sink of the head.
    pub fn sink(&self) -> Option<F> {
        self.sink
    }

    /// The factor of q·k.
    pub(crate) fn scale(&self) -> F {
        self.scale
    }

    /// How much of rows × `keys` position and length leave live.
    pub fn live(&self, keys: Range<usize>) -> Live {
        self.mask.tile(self.rows.clone(), keys)
    }

    /// S of the block, `[rows, keys]`, −∞ where a key is hidden. Hidden keys are not read, and
    /// neither is v.
    ///
    /// # Errors
    /// [`Error::Shape`] if a tile does not have the size it should.
    pub fn scores(&self, block: &TileBlock<'_, F>, scores: &mut Vec<F>) -> Result<()> {
        self.score_tile(block, scores, None)
    }

    /// [`scores`](Self::scores), and the slope of each score in its scaled product: 1, or
    /// 1 − tanh² under a softcap.
    pub(crate) fn score_tile(
        &self,
        block: &TileBlock<'_, F>,
        scores: &mut Vec<F>,
        mut slopes: Option<&mut Vec<F>>,
    ) -> Result<()> {
        self.check_scores(block)?;
        if let Some(slopes) = &mut slopes {
            slopes.clear();
            slopes.resize(self.rows.len() * block.keys.len(), F::one());
        }
        let width = block.keys.len();
        scores.clear();
        scores.resize(self.rows.len() * width, F::neg_infinity());
        let live = self.live(block.keys.clone());
        if live == Live::None {
            return Ok(());
        }
        for (r, i) in self.rows.clone().enumerate() {
            let visible = match live {
                Live::All => block.keys.clone(),
                _ => intersect(&self.mask.row(i), &block.keys),
            };
            let diagonal = self.mask.diagonal(i);
            let q = &block.q[r * self.head_dim..][..self.head_dim];
            for j in visible {
                let key = j - block.keys.start;
                let at = r * width + key;
                if block.mask.is_some_and(|mask| mask[at] == 0) {
                    continue;
                }
                let mut s = dot(q, &block.k[key * self.head_dim..][..self.head_dim]) * self.scale;
                if let Some(cap) = self.softcap {
                    let tanh = (s / cap).tanh();
                    s = cap * tanh;
                    if let Some(slopes) = &mut slopes {
                        slopes[at] = F::one() - tanh * tanh;
                    }
                }
                if let Some(bias) = block.bias {
                    s += bias[at];
                }
                if let Some(slope) = self.alibi_slope {
                    s -= slope * number((diagonal - j as i64).unsigned_abs() as f64);
                }
                scores[at] = s;
            }
        }
        Ok(())
    }

    /// What dropout multiplies the weight of row `r` and key `key` of a block by; `None` if it drops
    /// the key.
    #[inline]
    pub(crate) fn kept(&self, block: &TileBlock<'_, F>, r: usize, key: usize) -> Option<F> {
        let Some(dropout) = &self.dropout else {
            return Some(F::one());
        };
        let kept = match (&dropout.philox, block.keep) {
            (Some(philox), _) => philox.keeps(self.rows.start + r, block.keys.start + key),
            (None, Some(keep)) => keep[r * block.keys.len() + key] != 0,
            (None, None) => true,
        };
        kept.then_some(dropout.scale)
    }

    fn check_scores(&self, block: &TileBlock<'_, F>) -> Result<()> {
        let (rows, keys) = (self.rows.len(), block.keys.len());
        check_tile("q", block.q.len(), [rows, self.head_dim])?;
        check_tile("k", block.k.len(), [keys, self.head_dim])?;
        if let Some(bias) = block.bias {
            check_tile("bias", bias.len(), [rows, keys])?;
        }
        if let Some(mask) = block.mask {
            check_tile("mask", mask.len(), [rows, keys])?;
        }
        if block.keys.end > self.mask.seqlen_k() {
            return Err(Error::lengths(
                "k",
                format!("keys inside 0..{}", self.mask.seqlen_k()),
                format!("{:?}", block.keys),
            ));
        }
        Ok(())
    }
}

fn check_tile(tensor: &'static str, len: usize, expected: [usize; 2]) -> Result<()> {
    if expected[0].checked_mul(expected[1]) == Some(len) {
        return Ok(());
    }
    Err(Error::shape(
        tensor,
        format!("a tile of {expected:?}"),
        format!("{len} elements"),
    ))
}

fn number<F: Float>(x: f64) -> F {
    <F as Element>::from_f64(x)
}

fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Σ x_d y_d in eight partial sums, so that the compiler can use vector registers.
pub(crate) fn dot<F: Float>(x: &[F], y: &[F]) -> F {
    const LANES: usize = 8;
    let mut sums = [F::zero(); LANES];
    for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    sums.into_iter().sum()
}

/// Keys that arrive at a [`TileState`], with the queries they meet; all tiles row-major.
#[derive(Clone, Debug)]
pub struct TileBlock<'a, F> {
    /// `[rows, head_dim]`: the rows of the state.
    pub q: &'a [F],
    /// `[keys, head_dim]`.
    pub k: &'a [F],
    /// `[keys, head_dim_v]`.
    pub v: &'a [F],
    /// Positions of the keys within the sequence.
    pub keys: Range<usize>,
    /// `[rows, keys]`, added to scores.
    pub bias: Option<&'a [F]>,
    /// `[rows, keys]`, 0 = hidden.
    pub mask: Option<&'a [u8]>,
    /// `[rows, keys]`, 0 = dropped; for [`Dropout::Mask`](crate::Dropout::Mask).
    pub keep: Option<&'a [u8]>,
}

/// (m, ℓ, Õ) of a block of rows.
#[derive(Clone, Debug)]
pub struct TileState<F> {
    spec: TileSpec<F>,
    m: Vec<F>,
    l: Vec<F>,
    acc: Vec<F>,
    alpha: Vec<F>,
    beta: Vec<F>,
    /// S of the block being absorbed: kept to be used again.
    scores: Vec<F>,
}

impl<F: Float> TileState<F> {
    fn empty(spec: &TileSpec<F>) -> Self {
        let rows = spec.rows.len();
        TileState {
            spec: spec.clone(),
            m: vec![F::neg_infinity(); rows],
            l: vec![F::zero(); rows],
            acc: vec![F::zero(); rows * spec.head_dim_v],
            alpha: vec![F::one(); rows],
            beta: vec![F::one(); rows],
            scores: Vec::new(),
        }
    }

    /// FA1 keeps O normalised between steps: this is the state again, Õ = ℓ·O.
    ///
    /// # Errors
    /// [`Error::Shape`] if an array does not have the size that `spec` asks for.
    pub fn from_normalised(spec: &TileSpec<F>, m: &[F], l: &[F], o: &[F]) -> Result<Self> {
        let mut state = TileState::empty(spec);
        if m.len() != state.m.len() || l.len() != m.len() || o.len() != state.acc.len() {
            return Err(Error::shape(
                "state",
                format!("{} rows of {}", state.m.len(), spec.head_dim_v),
                format!("{}, {} and {} elements", m.len(), l.len(), o.len()),
            ));
        }
        state.m.copy_from_slice(m);
        state.l.copy_from_slice(l);
        state.acc.copy_from_slice(o);
        for (acc, &l) in state.rows_mut().zip(l) {
            scale(acc, l);
        }
        Ok(state)
    }

    /// O = Õ/ℓ, sinks not counted; 0 where no key was seen. `[rows, head_dim_v]`.
    ///
    /// # Panics
    /// If `o` has another size.
    pub fn normalise_into(&self, o: &mut [F]) {
        o.copy_from_slice(&self.acc);
        let width = self.spec.head_dim_v.max(1);
        for ((o, &l), &m) in o.chunks_exact_mut(width).zip(&self.l).zip(&self.m) {
            if m != F::neg_infinity() {
                for o in o {
                    *o /= l;
                }
            }
        }
    }

    /// What the state is of.
    pub fn spec(&self) -> &TileSpec<F> {
        &self.spec
    }

    /// Row maxima; −∞ where no key was seen.
    pub fn m(&self) -> &[F] {
        &self.m
    }

    /// Denominators relative to m.
    pub fn l(&self) -> &[F] {
        &self.l
    }

    /// Õ, `[rows, head_dim_v]`.
    pub fn acc(&self) -> &[F] {
        &self.acc
    }

    /// By what the last [`absorb`](OnlineSoftmax::absorb) or [`merge`](OnlineSoftmax::merge)
    /// multiplied ℓ and Õ of each row: e^(m before − m).
    pub fn alpha(&self) -> &[F] {
        &self.alpha
    }

    /// By what the last [`merge`](OnlineSoftmax::merge) multiplied the other state's ℓ and Õ:
    /// e^(its m − m).
    pub fn beta(&self) -> &[F] {
        &self.beta
    }

    /// S of the block that the last [`absorb`](OnlineSoftmax::absorb) folded in, `[rows, keys]`, −∞
    /// where a key is hidden; empty before the first.
    pub fn scores(&self) -> &[F] {
        &self.scores
    }

    /// The rows of Õ (none if they have no element: then there is nothing to do to them).
    fn rows_mut(&mut self) -> impl Iterator<Item = &mut [F]> {
        self.acc.chunks_exact_mut(self.spec.head_dim_v.max(1))
    }
}

fn scale<F: Float>(row: &mut [F], factor: F) {
    for x in row {
        *x *= factor;
    }
}

pub(crate) fn add_scaled<F: Float>(row: &mut [F], factor: F, other: &[F]) {
    for (x, &y) in row.iter_mut().zip(other) {
        *x += factor * y;
    }
}

/// What a tile state is finished into.
#[derive(Debug)]
pub struct TileOutput<'a, F> {
    /// O, `[rows, head_dim_v]`.
    pub out: &'a mut [F],
    /// L, `[rows]`.
    pub lse: &'a mut [F],
}

impl<F: Float> OnlineSoftmax for TileMath<F> {
    type Spec<'a> = &'a TileSpec<F>;
    type State = TileState<F>;
    type Block<'a> = TileBlock<'a, F>;
    type Output<'a> = TileOutput<'a, F>;
    type Error = Error;

    fn begin(&self, spec: &TileSpec<F>) -> Result<TileState<F>> {
        Ok(TileState::empty(spec))
    }

    fn absorb(&self, state: &mut TileState<F>, block: TileBlock<'_, F>) -> Result<()> {
        let (width, width_v) = (block.keys.len(), state.spec.head_dim_v);
        check_tile("v", block.v.len(), [width, width_v])?;
        if let Some(keep) = block.keep {
            check_tile("keep_mask", keep.len(), [state.m.len(), width])?;
        }
        let mut scores = std::mem::take(&mut state.scores);
        state.spec.scores(&block, &mut scores)?;
        for r in 0..state.m.len() {
            let scores = &scores[r * width..][..width];
            let m = scores.iter().fold(state.m[r], |m, &s| max_or_nan(m, s));
            let base = exponent_base(m);
            let alpha = (state.m[r] - base).exp();
            let acc = &mut state.acc[r * width_v..][..width_v];
            scale(acc, alpha);
            let mut l = alpha * state.l[r];
            for (key, &s) in scores.iter().enumerate() {
                // A hidden key is left out, not multiplied by 0: its value may be NaN.
                if s == F::neg_infinity() {
                    continue;
                }
                let p = (s - base).exp();
                l += p;
                let Some(factor) = state.spec.kept(&block, r, key) else {
                    continue;
                };
                add_scaled(acc, p * factor, &block.v[key * width_v..][..width_v]);
            }
            state.m[r] = m;
            state.l[r] = l;
            state.alpha[r] = alpha;
        }
        state.scores = scores;
        Ok(())
    }

    fn merge(&self, state: &mut TileState<F>, other: &TileState<F>) -> Result<()> {
        if state.spec != other.spec {
            return Err(Error::shape(
                "state",
                format!("the rows of {:?}", state.spec),
                format!("{:?}", other.spec),
            ));
        }
        let width_v = state.spec.head_dim_v;
        for r in 0..state.m.len() {
            (state.alpha[r], state.beta[r]) = (F::one(), F::zero());
            if other.m[r] == F::neg_infinity() {
                continue;
            }
            let m = max_or_nan(state.m[r], other.m[r]);
            let base = exponent_base(m);
            let (alpha, beta) = ((state.m[r] - base).exp(), (other.m[r] - base).exp());
            let acc = &mut state.acc[r * width_v..][..width_v];
            scale(acc, alpha);
            add_scaled(acc, beta, &other.acc[r * width_v..][..width_v]);
            state.l[r] = alpha * state.l[r] + beta * other.l[r];
            state.m[r] = m;
            (state.alpha[r], state.beta[r]) = (alpha, beta);
        }
        Ok(())
    }

    fn finish(&self, state: TileState<F>, output: TileOutput<'_, F>) -> Result<()> {
        let (rows, width_v) = (state.m.len(), state.spec.head_dim_v);
        for (tensor, len, expected) in [
            ("out", output.out.len(), rows * width_v),
            ("lse", output.lse.len(), rows),
        ] {
            if len != expected {
                return Err(Error::shape(
                    tensor,
                    format!("{expected} elements"),
                    len.to_string(),
                ));
            }
        }
        for r in 0..rows {
            let (mut m, mut l, mut factor) = (state.m[r], state.l[r], F::one());
            if let Some(sink) = state.spec.sink {
                // The sink is a state (sink, 1, 0).
                m = max_or_nan(m, sink);
                let base = exponent_base(m);
                factor = (state.m[r] - base).exp();
                l = factor * l + (sink - base).exp();
            }
            let out = &mut output.out[r * width_v..][..width_v];
            if state.m[r] == F::neg_infinity() {
                out.fill(F::zero());
            } else {
                for (out, &acc) in out.iter_mut().zip(&state.acc[r * width_v..]) {
                    *out = factor * acc / l;
                }
            }
            output.lse[r] = if m == F::neg_infinity() {
                m
            } else {
                m + l.ln()
            };
        }
        Ok(())
    }

    fn export(&self, state: &TileState<F>) -> Result<HostState> {
        let wide = |values: &[F]| values.iter().map(|&x| Element::to_f64(x)).collect();
        Ok(HostState {
            shape: [1, 1, state.m.len()],
            head_dim_v: state.spec.head_dim_v,
            m: wide(&state.m),
            l: wide(&state.l),
            acc: wide(&state.acc),
        })
    }

    fn import(&self, spec: &TileSpec<F>, host: &HostState) -> Result<TileState<F>> {
        let mut state = TileState::empty(spec);
        let sizes = |m, l, acc| format!("{m}, {l} and {acc} elements in m, l and acc");
        let expected = sizes(state.m.len(), state.l.len(), state.acc.len());
        let got = sizes(host.m.len(), host.l.len(), host.acc.len());
        if got != expected {
            return Err(Error::shape("state", expected, got));
        }
        for (to, from) in [
            (&mut state.m, &host.m),
            (&mut state.l, &host.l),
            (&mut state.acc, &host.acc),
        ] {
            for (to, &from) in to.iter_mut().zip(from) {
                *to = number(from);
            }
        }
        // Where no key was seen, whatever else the arrays hold has no meaning.
        for r in 0..state.m.len() {
            if state.m[r] == F::neg_infinity() {
                state.l[r] = F::zero();
                state.acc[r * spec.head_dim_v..][..spec.head_dim_v].fill(F::zero());
            }
        }
        Ok(state)
    }
}
