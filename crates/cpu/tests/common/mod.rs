//! Random problems of every kind, and the run that compares a backend with the definition.

#![allow(dead_code)] // each test binary uses a part of it

use proptest::prelude::*;
use tilewise_core::half::{bf16, f16};
use tilewise_core::{
    Algorithm, Alignment, BlockTable, DType, Inputs, Judge, Options, Problem, RowSample,
    TensorView, TensorViewMut,
};
use tilewise_cpu::{CpuBackend, CpuElement, Isa};

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// About normal, mean 0, variance 1.
    pub(crate) fn normal(&mut self) -> f64 {
        let sum: f64 = (0..12)
            .map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64)
            .sum();
        sum - 6.0
    }
}

/// A tensor with its memory: elements of its shape where its strides say, NaN everywhere else.
#[derive(Clone, Debug)]
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

    /// Axes in a random memory order, gaps and reversals included.
    pub(crate) fn random(
        shape: [usize; 4],
        plain: bool,
        rng: &mut Rng,
        hole: T,
        mut element: impl FnMut(&mut Rng) -> T,
    ) -> Self {
        let mut order = [0, 1, 2, 3];
        let mut gap = [0; 4];
        let mut reversed = [false; 4];
        if !plain {
            for i in (1..4).rev() {
                order.swap(i, rng.below(i + 1));
            }
            gap = [rng.below(3), rng.below(3), rng.below(3), rng.below(2)];
            reversed = [(); 4].map(|()| rng.below(4) == 0);
        }
        let mut strides = [0isize; 4];
        let mut step = 1usize;
        for &axis in order.iter().rev() {
            let stride = step + if plain { 0 } else { gap[axis] };
            strides[axis] = stride as isize;
            step = stride * shape[axis].max(1);
        }
        let mut offset = rng.below(2);
        let mut data = vec![hole; step + offset + 1];
        for axis in 0..4 {
            if reversed[axis] && shape[axis] > 0 {
                offset += (shape[axis] - 1) * strides[axis] as usize;
                strides[axis] = -strides[axis];
            }
        }
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for s in 0..shape[2] {
                    for d in 0..shape[3] {
                        let steps = b as isize * strides[0]
                            + h as isize * strides[1]
                            + s as isize * strides[2]
                            + d as isize * strides[3];
                        data[(offset as isize + steps) as usize] = element(rng);
                    }
                }
            }
        }
        Tensor {
            data,
            shape,
            strides,
            offset,
        }
    }
}

/// What kind of problem; its data follow from the seed.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) dtype: DType,
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) options: Options,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    /// Axes of size 1, as bits; `None`: not given.
    pub(crate) bias: Option<u8>,
    pub(crate) mask: Option<u8>,
    pub(crate) lengths: LengthsKind,
    pub(crate) plain_strides: bool,
    pub(crate) magnitude: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LengthsKind {
    All,
    Used,
    Packed,
    Paged,
}

pub(crate) fn options() -> impl Strategy<Value = Options> {
    (
        any::<bool>(),
        any::<bool>(),
        prop_oneof![3 => Just(None), 1 => (0usize..80).prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => (0usize..80).prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => (0.5f64..60.0).prop_map(Some)],
        prop_oneof![
            4 => Just(None),
            1 => Just(Some(0.0)),
            1 => Just(Some(-0.4)),
            1 => (0.01f64..2.0).prop_map(Some)
        ],
    )
        .prop_map(|(causal, top_left, left, right, cap, scale)| {
            Options::new()
                .causal(causal)
                .alignment(if top_left {
                    Alignment::TopLeft
                } else {
                    Alignment::BottomRight
                })
                .window_left(left)
                .window_right(right)
                .softcap(cap)
                .softmax_scale(scale)
        })
}

pub(crate) fn setup() -> impl Strategy<Value = Setup> {
    let sizes = (
        1usize..3,
        1usize..3,
        1usize..4,
        prop_oneof![6 => 1usize..40, 2 => 40usize..200, 1 => Just(0usize)],
        prop_oneof![4 => 1usize..70, 4 => 70usize..600, 1 => Just(0usize)],
        prop_oneof![4 => 1usize..40, 2 => 40usize..140],
        prop_oneof![4 => 1usize..40, 2 => 40usize..140],
    );
    let kinds = (
        prop_oneof![
            Just(DType::F64),
            Just(DType::F32),
            Just(DType::F16),
            Just(DType::BF16)
        ],
        prop::option::weighted(0.3, 0u8..16),
        prop::option::weighted(0.3, 0u8..16),
        prop_oneof![
            3 => Just(LengthsKind::All),
            1 => Just(LengthsKind::Used),
            1 => Just(LengthsKind::Packed),
            1 => Just(LengthsKind::Paged)
        ],
        any::<bool>(),
        prop_oneof![4 => Just(1.0), 1 => Just(8.0), 1 => Just(1e-3)],
        prop::bool::weighted(0.25),
        prop::bool::weighted(0.25),
    );
    (any::<u64>(), sizes, options(), kinds).prop_map(
        |(
            seed,
            (batch, kv_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v),
            options,
            (dtype, bias, mask, lengths, plain_strides, magnitude, alibi, sinks),
        )| Setup {
            seed,
            dtype,
            batch,
            kv_heads,
            group,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim_v,
            options,
            alibi,
            sinks,
            bias,
            mask,
            lengths,
            plain_strides,
            magnitude,
        },
    )
}

/// A setup's data.
pub(crate) struct Data<T> {
    pub(crate) q: Tensor<T>,
    pub(crate) k: Tensor<T>,
    pub(crate) v: Tensor<T>,
    pub(crate) bias: Option<Tensor<T>>,
    pub(crate) mask: Option<Tensor<u8>>,
    pub(crate) cu_q: Option<Vec<i32>>,
    pub(crate) cu_k: Option<Vec<i32>>,
    pub(crate) used: Option<Vec<i32>>,
    pub(crate) table: Option<(Vec<i32>, usize)>,
    pub(crate) options: Options,
}

impl<T: CpuElement> Data<T> {
    pub(crate) fn new(setup: &Setup) -> Self {
        let mut rng = Rng(setup.seed);
        let heads = setup.kv_heads * setup.group;
        let packed = setup.lengths == LengthsKind::Packed;
        let batch = if packed { 1 } else { setup.batch };
        let plain = setup.plain_strides;
        let nan = T::from_f64(f64::NAN);
        let m = setup.magnitude;
        let mut options = setup.options.clone();
        if setup.alibi {
            options = options.alibi_slopes(tilewise_core::alibi_slopes(heads));
        }
        if setup.sinks {
            options = options.sinks((0..heads).map(|_| rng.normal() as f32).collect::<Vec<_>>());
        }
        let (mut cu_q, mut cu_k, mut used, mut table) = (None, None, None, None);
        let (mut k_shape, mut v_shape) = (
            [batch, setup.kv_heads, setup.seqlen_k, setup.head_dim],
            [batch, setup.kv_heads, setup.seqlen_k, setup.head_dim_v],
        );
        let mut seqlen_k = setup.seqlen_k;
        match setup.lengths {
            LengthsKind::All => {}
            LengthsKind::Used => {
                used = Some(
                    (0..batch)
                        .map(|_| rng.below(setup.seqlen_k + 1) as i32)
                        .collect(),
                );
            }
            LengthsKind::Packed => {
                let cuts = |n: usize, rng: &mut Rng| {
                    let mut cuts: Vec<i32> = (0..3).map(|_| rng.below(n + 1) as i32).collect();
                    cuts.sort_unstable();
                    cuts.insert(0, 0);
                    cuts
                };
                cu_q = Some(cuts(setup.seqlen_q, &mut rng));
                cu_k = Some(cuts(setup.seqlen_k, &mut rng));
            }
            LengthsKind::Paged => {
                let page = 1 + rng.below(20);
                let width = setup.seqlen_k.div_ceil(page);
                let pages = batch * width + 2;
                seqlen_k = width * page;
                // Each used page once, in random order.
                let mut order: Vec<i32> = (0..pages as i32).collect();
                for i in (1..pages).rev() {
                    order.swap(i, rng.below(i + 1));
                }
                table = Some((order[..batch * width].to_vec(), width));
                used = Some((0..batch).map(|_| rng.below(seqlen_k + 1) as i32).collect());
                k_shape = [pages, setup.kv_heads, page, setup.head_dim];
                v_shape = [pages, setup.kv_heads, page, setup.head_dim_v];
            }
        }
        let full = [batch, heads, setup.seqlen_q, seqlen_k];
        let broadcast = |bits: u8| {
            let mut shape = full;
            for (axis, size) in shape.iter_mut().enumerate() {
                if bits & (1 << axis) != 0 {
                    *size = 1;
                }
            }
            shape
        };
        let q_shape = [batch, heads, setup.seqlen_q, setup.head_dim];
        let element = |scale: f64| move |rng: &mut Rng| T::from_f64(rng.normal() * scale);
        Data {
            q: Tensor::random(q_shape, plain, &mut rng, nan, element(m)),
            k: Tensor::random(k_shape, plain, &mut rng, nan, element(m)),
            v: Tensor::random(v_shape, plain, &mut rng, nan, element(1.0)),
            bias: setup.bias.map(|bits| {
                Tensor::random(broadcast(bits), plain, &mut rng, nan, |rng| {
                    let hidden = rng.below(6) == 0;
                    T::from_f64(if hidden {
                        f64::NEG_INFINITY
                    } else {
                        rng.normal()
                    })
                })
            }),
            mask: setup.mask.map(|bits| {
                Tensor::random(broadcast(bits), plain, &mut rng, 0, |rng| {
                    u8::from(rng.below(4) != 0)
                })
            }),
            cu_q,
            cu_k,
            used,
            table,
            options,
        }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view())
            .bias(self.bias.as_ref().map(Tensor::view))
            .mask(self.mask.as_ref().map(Tensor::view));
        inputs.lengths.cu_seqlens_q = self.cu_q.as_deref();
        inputs.lengths.cu_seqlens_k = self.cu_k.as_deref();
        inputs.lengths.seqused_k = self.used.as_deref();
        inputs.block_table = self.table.as_ref().map(|(pages, width)| BlockTable {
            pages,
            width: *width,
        });
        inputs
    }

    pub(crate) fn problem(&self) -> Problem {
        Problem::new(&self.inputs(), &self.options).unwrap()
    }
}

/// Runs and returns out and lse, which held rubbish before.
pub(crate) fn run<T: CpuElement>(
    backend: &CpuBackend,
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
) -> (Vec<T>, Vec<f32>) {
    let shape = problem.dims().out_shape();
    let lse_shape = problem.dims().lse_shape();
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; lse_shape.iter().product()];
    backend
        .forward_into(
            problem,
            inputs,
            algorithm,
            TensorViewMut::bhsd(&mut out, shape).unwrap(),
            Some(TensorViewMut::bhs(&mut lse, lse_shape).unwrap()),
        )
        .unwrap();
    (out, lse)
}

pub(crate) fn backends() -> Vec<CpuBackend> {
    Isa::available()
        .into_iter()
        .map(|isa| CpuBackend::builder().isa(isa).build().unwrap())
        .collect()
}

/// Every algorithm and instruction set against the definition.
pub(crate) fn check<T: CpuElement>(setup: &Setup) -> Result<(), TestCaseError> {
    let data = Data::<T>::new(setup);
    let (problem, inputs) = (data.problem(), data.inputs());
    let judge = Judge::new(&problem, &inputs, &RowSample::all(&problem));
    for backend in backends() {
        for algorithm in Algorithm::ALL {
            let (out, lse) = run(&backend, &problem, &inputs, algorithm);
            let [b, h, s] = problem.dims().lse_shape();
            let verdict = judge
                .compare(
                    &TensorView::bhsd(&out, problem.dims().out_shape()).unwrap(),
                    Some(&TensorView::bhsd(&lse, [b, h, s, 1]).unwrap()),
                )
                .unwrap();
            prop_assert!(
                verdict.pass,
                "{} {algorithm} {}: {verdict:?}",
                backend.isa(),
                setup.dtype
            );
        }
    }
    Ok(())
}

/// [`check`] in the setup's dtype.
pub(crate) fn check_any(setup: &Setup) -> Result<(), TestCaseError> {
    match setup.dtype {
        DType::F64 => check::<f64>(setup),
        DType::F32 => check::<f32>(setup),
        DType::F16 => check::<f16>(setup),
        _ => check::<bf16>(setup),
    }
}
