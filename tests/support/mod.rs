//! Random attention problems with their data, and the backends to try them on.

use std::sync::Arc;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tilewise::cpu::{CpuBackend, Isa};
use tilewise::{
    Alignment, BackendKind, DType, Dims, Element, Engine, Inputs, Judge, Options, Problem,
    RowSample, TensorView, open,
};

/// Every backend of this machine, and the CPU once with each of its instruction sets.
pub(crate) fn engines() -> Vec<(String, Engine)> {
    let mut engines: Vec<(String, Engine)> = Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| {
            let backend = CpuBackend::builder().isa(isa).build().unwrap();
            let engine = Engine::with_backend(BackendKind::Cpu, Arc::new(backend));
            (format!("cpu/{isa}"), engine)
        })
        .collect();
    let cuda = BackendKind::Cuda { ordinal: 0 };
    match open(cuda) {
        Ok(backend) => engines.push((cuda.to_string(), Engine::with_backend(cuda, backend))),
        // Said once a run: a machine without a GPU must not look like one that passed on it.
        Err(error) => {
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| eprintln!("not tested on {cuda}: {error}"));
        }
    }
    engines
}

/// `PROPTEST_CASES` cases, or `n` where it is unset.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let mut config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = n;
    }
    config
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    Bhsd,
    Bshd,
    /// Rows and heads further apart than they need be, from an odd offset on.
    Spread,
    /// Rows from last to first.
    Reversed,
    /// Every second element of a row.
    Strided,
}

pub(crate) fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        4 => Just(Layout::Bhsd),
        2 => Just(Layout::Bshd),
        1 => Just(Layout::Spread),
        1 => Just(Layout::Reversed),
        1 => Just(Layout::Strided),
    ]
}

/// A tensor with its memory. Slots that belong to no element hold NaN.
pub(crate) struct Tensor<T> {
    pub(crate) data: Vec<T>,
    pub(crate) shape: [usize; 4],
    pub(crate) strides: [isize; 4],
    pub(crate) offset: usize,
}

impl<T: Copy> Tensor<T> {
    pub(crate) fn view(&self) -> TensorView<'_, T> {
        TensorView::from_strides(&self.data, self.shape, self.strides, self.offset).unwrap()
    }

    /// `value` is called with each index, in row-major order.
    pub(crate) fn new(
        shape: [usize; 4],
        layout: Layout,
        gap: T,
        mut value: impl FnMut([usize; 4]) -> T,
    ) -> Self {
        let [b, h, s, d] = shape.map(|x| x as isize);
        let (strides, offset, len) = match layout {
            Layout::Bhsd => ([h * s * d, s * d, d, 1], 0, b * h * s * d),
            Layout::Bshd => ([s * h * d, d, h * d, 1], 0, b * h * s * d),
            Layout::Spread => {
                let row = d + 3;
                let head = s * row + 5;
                ([h * head, head, row, 1], 3, 3 + b * h * head)
            }
            Layout::Reversed => ([h * s * d, s * d, -d, 1], (s - 1).max(0) * d, b * h * s * d),
            Layout::Strided => (
                [2 * h * s * d, 2 * s * d, 2 * d, 2],
                1,
                1 + 2 * b * h * s * d,
            ),
        };
        let mut tensor = Tensor {
            data: vec![gap; len as usize],
            shape,
            strides,
            offset: if shape.contains(&0) {
                0
            } else {
                offset as usize
            },
        };
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for s in 0..shape[2] {
                    for d in 0..shape[3] {
                        let at = tensor.view().position([b, h, s, d]);
                        tensor.data[at] = value([b, h, s, d]);
                    }
                }
            }
        }
        tensor
    }
}

/// Which keys belong to whom.
#[derive(Clone, Debug)]
pub(crate) enum LengthCase {
    Padded,
    /// Used share of the keys, in 1/8, by batch entry.
    Used(Vec<usize>),
    /// Rows and keys of each sequence, and keys that belong to none.
    Packed(Vec<(usize, usize)>, usize),
}

/// A random problem.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) dims: Dims,
    pub(crate) dtype: DType,
    pub(crate) options: Options,
    pub(crate) bias: Option<[bool; 4]>,
    pub(crate) mask: Option<[bool; 4]>,
    pub(crate) lengths: LengthCase,
    pub(crate) layouts: [Layout; 3],
    pub(crate) magnitude: f64,
    pub(crate) seed: u64,
}

fn head_dim() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 1usize..=40,
        2 => prop_oneof![Just(32usize), Just(64), Just(80), Just(96), Just(128)],
        1 => 41usize..=140,
    ]
}

fn seqlen() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0usize), 2 => Just(1usize), 8 => 2usize..=70, 2 => 71usize..=330]
}

/// Any problem, with `dtype` as given.
pub(crate) fn case(dtype: DType) -> impl Strategy<Value = Case> {
    let dims = (
        1usize..=3,
        1usize..=2,
        1usize..=3,
        seqlen(),
        seqlen(),
        head_dim(),
        head_dim(),
        any::<bool>(),
    )
        .prop_map(|(batch, kv, group, sq, sk, d, dv, same)| Dims {
            batch,
            num_heads: kv * group,
            num_kv_heads: kv,
            seqlen_q: sq,
            seqlen_k: sk,
            head_dim: d,
            head_dim_v: if same { d } else { dv },
        });
    let bound = || proptest::option::weighted(0.3, 0usize..90);
    let options = (
        any::<bool>(),
        any::<bool>(),
        bound(),
        bound(),
        proptest::option::weighted(
            0.2,
            prop_oneof![Just(0.0), Just(-0.4), Just(1.0), 0.01..2.0f64],
        ),
        proptest::option::weighted(0.25, 0.5..60.0f64),
        any::<(bool, bool)>(),
    );
    let broadcast = || proptest::option::weighted(0.3, any::<[bool; 4]>());
    let lengths = prop_oneof![
        3 => Just(LengthCase::Padded),
        1 => proptest::collection::vec(0usize..=8, 3).prop_map(LengthCase::Used),
        1 => (proptest::collection::vec((0usize..60, 0usize..90), 1..4), 0usize..4)
            .prop_map(|(parts, spare)| LengthCase::Packed(parts, spare)),
    ];
    let magnitude = prop_oneof![6 => Just(1.0), 1 => Just(12.0), 1 => Just(1e-3)];
    (
        (dims, options, any::<(u8, u8)>()),
        (
            broadcast(),
            broadcast(),
            lengths,
            [layout(), layout(), layout()],
        ),
        (magnitude, any::<u64>()),
    )
        .prop_map(
            move |((mut dims, o, rare), (bias, mask, lengths, layouts), (magnitude, seed))| {
                if let LengthCase::Packed(parts, spare) = &lengths {
                    dims.batch = 1;
                    dims.seqlen_q = parts.iter().map(|p| p.0).sum();
                    dims.seqlen_k = parts.iter().map(|p| p.1).sum::<usize>() + spare;
                }
                let (causal, top_left, left, right, scale, softcap, (alibi, sinks)) = o;
                let heads = dims.num_heads;
                let alibi = (alibi && rare.0 < 90).then(|| tilewise::alibi_slopes(heads));
                let sinks = (sinks && rare.1 < 90)
                    .then(|| (0..heads).map(|h| h as f32 * 0.7 - 1.0).collect::<Vec<_>>());
                let options = Options::new()
                    .causal(causal)
                    .alignment(if top_left {
                        Alignment::TopLeft
                    } else {
                        Alignment::BottomRight
                    })
                    .window_left(left)
                    .window_right(right)
                    .softmax_scale(scale)
                    .softcap(softcap)
                    .alibi_slopes(alibi)
                    .sinks(sinks);
                Case {
                    dims,
                    dtype,
                    options,
                    bias,
                    mask,
                    lengths,
                    layouts,
                    magnitude,
                    seed,
                }
            },
        )
}

/// A case's tensors.
pub(crate) struct Data<T> {
    pub(crate) q: Tensor<T>,
    pub(crate) k: Tensor<T>,
    pub(crate) v: Tensor<T>,
    pub(crate) bias: Option<Tensor<T>>,
    pub(crate) mask: Option<Tensor<u8>>,
    pub(crate) cu_seqlens: Option<(Vec<i32>, Vec<i32>)>,
    pub(crate) seqused_k: Option<Vec<i32>>,
}

impl Case {
    /// The tensors, whose unused keys hold NaN.
    pub(crate) fn data<T: Element>(&self) -> Data<T> {
        let d = &self.dims;
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut number = |scale: f64| T::from_f64(rng.random_range(-1.7..1.7f64) * scale);
        let nan = T::from_f64(f64::NAN);
        let used: Vec<usize> = match &self.lengths {
            LengthCase::Used(shares) => (0..d.batch).map(|b| d.seqlen_k * shares[b] / 8).collect(),
            LengthCase::Packed(_, spare) => vec![d.seqlen_k - spare],
            LengthCase::Padded => vec![d.seqlen_k; d.batch],
        };
        let kv = |width| [d.batch, d.num_kv_heads, d.seqlen_k, width];
        let q_shape = [d.batch, d.num_heads, d.seqlen_q, d.head_dim];
        let q = Tensor::new(q_shape, self.layouts[0], nan, |_| number(self.magnitude));
        let k = Tensor::new(kv(d.head_dim), self.layouts[1], nan, |[b, _, s, _]| {
            if s < used[b] {
                number(self.magnitude)
            } else {
                nan
            }
        });
        let v = Tensor::new(kv(d.head_dim_v), self.layouts[2], nan, |[b, _, s, _]| {
            if s < used[b] { number(1.0) } else { nan }
        });
        let full = [d.batch, d.num_heads, d.seqlen_q, d.seqlen_k];
        let shrink = |axes: [bool; 4]| {
            let mut shape = full;
            for axis in 0..4 {
                if axes[axis] {
                    shape[axis] = 1;
                }
            }
            shape
        };
        let bias = self.bias.map(|axes| {
            let mut n = 0u32;
            Tensor::new(shrink(axes), self.layouts[0], nan, |_| {
                n += 1;
                if n % 7 == 3 {
                    T::from_f64(f64::NEG_INFINITY)
                } else {
                    number(2.0)
                }
            })
        });
        let mut rng = StdRng::seed_from_u64(!self.seed);
        let mask = self.mask.map(|axes| {
            Tensor::new(shrink(axes), self.layouts[1], 1, |_| {
                u8::from(rng.random_bool(0.7))
            })
        });
        let cu_seqlens = match &self.lengths {
            LengthCase::Packed(parts, _) => {
                let sums = |part: fn(&(usize, usize)) -> usize| {
                    let mut total = 0;
                    std::iter::once(0)
                        .chain(parts.iter().map(|p| {
                            total += part(p) as i32;
                            total
                        }))
                        .collect::<Vec<_>>()
                };
                Some((sums(|p| p.0), sums(|p| p.1)))
            }
            _ => None,
        };
        let seqused_k = matches!(self.lengths, LengthCase::Used(_))
            .then(|| used.iter().map(|&u| u as i32).collect());
        Data {
            q,
            k,
            v,
            bias,
            mask,
            cu_seqlens,
            seqused_k,
        }
    }
}

impl<T: Element> Data<T> {
    pub(crate) fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view())
            .bias(self.bias.as_ref().map(Tensor::view))
            .mask(self.mask.as_ref().map(Tensor::view));
        if let Some((q, k)) = &self.cu_seqlens {
            inputs = inputs.packed(q, k);
        }
        if let Some(used) = &self.seqused_k {
            inputs = inputs.seqused_k(used);
        }
        inputs
    }
}

/// The reference of a case, ready to judge results.
pub(crate) struct Judged {
    judge: Judge,
    dims: Dims,
}

pub(crate) fn judge<T: Element>(case: &Case, data: &Data<T>) -> Judged {
    let inputs = data.inputs();
    let problem = Problem::new(&inputs, &case.options).unwrap();
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    Judged {
        judge,
        dims: case.dims,
    }
}

impl Judged {
    /// Whether contiguous results agree with the reference.
    pub(crate) fn agrees<T: Element>(
        &self,
        who: &str,
        out: &[T],
        lse: &[f32],
    ) -> Result<(), TestCaseError> {
        let out = TensorView::bhsd(out, self.dims.out_shape()).unwrap();
        let [b, h, s] = self.dims.lse_shape();
        let lse = TensorView::bhsd(lse, [b, h, s, 1]).unwrap();
        let comparison = self.judge.compare(&out, Some(&lse)).unwrap();
        prop_assert!(comparison.pass, "{who}: {comparison:?}");
        Ok(())
    }
}
