//! Random attention problems, over everything a problem can ask for.

use proptest::option;
use proptest::prelude::*;
use tilewise_core::{Alignment, BlockTable, Element, Inputs, Options, Problem, TensorView};

/// How the elements of a tensor lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    /// `[batch, heads, seqlen, head_dim]`.
    Bhsd,
    /// `[batch, seqlen, heads, head_dim]`.
    Bshd,
    /// Every second element, rows three elements apart.
    Gaps,
    /// The seqlen axis runs backwards.
    Reversed,
}

/// What says how long the sequences are.
#[derive(Clone, Debug)]
pub(crate) enum Sequences {
    /// The shapes.
    Dense,
    /// Used lengths, one a batch entry, in percent of seqlen_k.
    Used(Vec<usize>),
    /// Packed: lengths of q and k of each sequence, and whether used lengths cut some keys off.
    Packed(Vec<(usize, usize)>, bool),
    /// Pages of so many keys; used lengths as in `Used`.
    Paged(usize, Vec<usize>),
}

/// A random problem.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) batch: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) sequences: Sequences,
    pub(crate) layouts: [Layout; 3],
    pub(crate) causal: bool,
    pub(crate) top_left: bool,
    pub(crate) window: (Option<usize>, Option<usize>),
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    /// Which axes are broadcast.
    pub(crate) bias: Option<[bool; 4]>,
    pub(crate) mask: Option<[bool; 4]>,
    /// Size of the elements of q.
    pub(crate) magnitude: f64,
    pub(crate) seed: u64,
    /// B_r and B_c.
    pub(crate) blocks: (usize, usize),
}

fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        3 => Just(Layout::Bhsd),
        1 => Just(Layout::Bshd),
        1 => Just(Layout::Gaps),
        1 => Just(Layout::Reversed),
    ]
}

fn sequences() -> impl Strategy<Value = Sequences> {
    let percent = || proptest::collection::vec(0usize..=100, 3);
    let lengths = proptest::collection::vec((0usize..9, 0usize..11), 0..4);
    prop_oneof![
        4 => Just(Sequences::Dense),
        1 => percent().prop_map(Sequences::Used),
        1 => (lengths, any::<bool>()).prop_map(|(lengths, cut)| Sequences::Packed(lengths, cut)),
        1 => (1usize..6, percent()).prop_map(|(page, used)| Sequences::Paged(page, used)),
    ]
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
    let sizes = (
        1usize..3,
        1usize..3,
        1usize..4,
        0usize..20,
        0usize..24,
        1usize..20,
        0usize..18,
    );
    let masking = (
        any::<bool>(),
        any::<bool>(),
        option::of(0usize..9),
        option::of(0usize..9),
    );
    let scores = (
        option::weighted(0.3, prop_oneof![Just(0.0), Just(-0.7), Just(3.0)]),
        option::weighted(0.3, 0.5f64..20.0),
        any::<bool>(),
        any::<bool>(),
        option::weighted(0.3, any::<[bool; 4]>()),
        option::weighted(0.3, any::<[bool; 4]>()),
        prop_oneof![6 => Just(1.0), 1 => Just(1e-3), 1 => Just(64.0)],
    );
    let run = (
        sequences(),
        [layout(), layout(), layout()],
        any::<u64>(),
        (1usize..9, 1usize..9),
    );
    (sizes, masking, scores, run).prop_map(|(sizes, masking, scores, run)| Case {
        batch: sizes.0,
        num_kv_heads: sizes.1,
        group: sizes.2,
        seqlen_q: sizes.3,
        seqlen_k: sizes.4,
        head_dim: sizes.5,
        head_dim_v: sizes.6,
        causal: masking.0,
        top_left: masking.1,
        window: (masking.2, masking.3),
        scale: scores.0,
        softcap: scores.1,
        alibi: scores.2,
        sinks: scores.3,
        bias: scores.4,
        mask: scores.5,
        magnitude: scores.6,
        sequences: run.0,
        layouts: run.1,
        seed: run.2,
        blocks: run.3,
    })
}

/// Numbers that look random, each from its place.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Between −2 and 2, mostly small.
    pub(crate) fn number(&mut self) -> f64 {
        let half = |bits: u64| (bits & 0xFFFF) as f64 / 65536.0 - 0.5;
        let bits = self.bits();
        half(bits) + half(bits >> 16) + half(bits >> 32) + half(bits >> 48)
    }

    pub(crate) fn tensor<T: Element>(&mut self, len: usize, magnitude: f64) -> Vec<T> {
        (0..len)
            .map(|_| T::from_f64(self.number() * magnitude))
            .collect()
    }
}

/// A tensor in memory of its own; what belongs to no element is NaN.
#[derive(Clone)]
pub(crate) struct Stored<T> {
    data: Vec<T>,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl<T: Element> Stored<T> {
    pub(crate) fn new(values: &[T], shape: [usize; 4], layout: Layout) -> Self {
        let [batch, heads, seqlen, width] = shape.map(|size| size as isize);
        let strides = match layout {
            Layout::Bhsd => [heads * seqlen * width, seqlen * width, width, 1],
            Layout::Bshd => [seqlen * heads * width, width, heads * width, 1],
            Layout::Gaps => {
                let row = 2 * width + 3;
                [heads * seqlen * row + 1, seqlen * row, row, 2]
            }
            Layout::Reversed => [heads * seqlen * width, seqlen * width, -width, 1],
        };
        let offset = match layout {
            Layout::Reversed => ((seqlen - 1).max(0) * width) as usize,
            _ => 0,
        };
        let len = (batch * strides[0].abs()).max(0) as usize + 8;
        let mut data = vec![T::from_f64(f64::NAN); len];
        let mut values = values.iter();
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..seqlen {
                    for d in 0..width {
                        let index = [b, h, s, d].into_iter().zip(strides);
                        let at =
                            offset as isize + index.map(|(i, stride)| i * stride).sum::<isize>();
                        data[at as usize] = *values.next().unwrap();
                    }
                }
            }
        }
        Stored {
            data,
            shape,
            strides,
            offset,
        }
    }

    pub(crate) fn view(&self) -> TensorView<'_, T> {
        TensorView::from_strides(&self.data, self.shape, self.strides, self.offset).unwrap()
    }
}

/// The tensors of a case.
pub(crate) struct Data<T> {
    pub(crate) options: Options,
    pub(crate) q: Stored<T>,
    pub(crate) k: Stored<T>,
    pub(crate) v: Stored<T>,
    bias: Option<(Vec<T>, [usize; 4])>,
    mask: Option<(Vec<u8>, [usize; 4])>,
    cu_seqlens: Option<(Vec<i32>, Vec<i32>)>,
    seqused_k: Option<Vec<i32>>,
    table: Option<(Vec<i32>, usize)>,
}

impl Case {
    pub(crate) fn options(&self) -> Options {
        let heads = self.num_kv_heads * self.group;
        let mut noise = Noise(self.seed ^ 0xA5A5);
        let mut per_head = |on: bool| {
            let values: Vec<f32> = (0..heads).map(|_| noise.number() as f32).collect();
            on.then_some(values)
        };
        Options::new()
            .causal(self.causal)
            .alignment(if self.top_left {
                Alignment::TopLeft
            } else {
                Alignment::BottomRight
            })
            .window_left(self.window.0)
            .window_right(self.window.1)
            .softmax_scale(self.scale)
            .softcap(self.softcap)
            .alibi_slopes(per_head(self.alibi))
            .sinks(per_head(self.sinks))
    }

    pub(crate) fn data<T: Element>(&self) -> Data<T> {
        let mut noise = Noise(self.seed);
        let nan = T::from_f64(f64::NAN);
        let heads = self.num_kv_heads * self.group;
        let (mut batch, mut seqlen_q, mut seqlen_k) = (self.batch, self.seqlen_q, self.seqlen_k);
        // Where k and v have their rows, and from which of them on nothing is used.
        let (mut kv_batch, mut kv_rows) = (batch, seqlen_k);
        let mut used_rows: Vec<(usize, usize, usize)> = Vec::new();
        let (mut cu_seqlens, mut seqused_k, mut table) = (None, None, None);
        match &self.sequences {
            Sequences::Dense => {}
            Sequences::Used(percent) => {
                let used: Vec<usize> = (0..batch).map(|b| seqlen_k * percent[b] / 100).collect();
                used_rows = used
                    .iter()
                    .enumerate()
                    .map(|(b, &n)| (b, n, seqlen_k))
                    .collect();
                seqused_k = Some(used.iter().map(|&n| n as i32).collect());
            }
            Sequences::Packed(lengths, cut) => {
                (batch, kv_batch) = (1, 1);
                let (mut cu_q, mut cu_k, mut used) = (vec![0], vec![0], Vec::new());
                for &(q, k) in lengths {
                    let start = cu_k[cu_k.len() - 1] as usize;
                    let kept = if *cut { k - k / 3 } else { k };
                    used_rows.push((0, start + kept, start + k));
                    used.push(kept as i32);
                    cu_q.push(cu_q[cu_q.len() - 1] + q as i32);
                    cu_k.push((start + k) as i32);
                }
                // Two rows and a key that belong to no sequence.
                seqlen_q = cu_q[cu_q.len() - 1] as usize + 2;
                seqlen_k = cu_k[cu_k.len() - 1] as usize + 1;
                kv_rows = seqlen_k;
                used_rows.push((0, seqlen_k - 1, seqlen_k));
                seqused_k = cut.then_some(used);
                cu_seqlens = Some((cu_q, cu_k));
            }
            Sequences::Paged(page, percent) => {
                let width = seqlen_k.div_ceil(*page);
                (kv_batch, kv_rows) = (batch * width + 1, *page);
                seqlen_k = width * page;
                // Pages in an order that no sequence has them in; the first belongs to none.
                let pages: Vec<i32> = (0..batch * width)
                    .map(|n| (batch * width - n) as i32)
                    .collect();
                used_rows.push((0, 0, *page));
                let mut used = Vec::new();
                for b in 0..batch {
                    let n = seqlen_k * percent[b] / 100;
                    used.push(n as i32);
                    for slot in 0..width {
                        let kept = n.saturating_sub(slot * page).min(*page);
                        used_rows.push((pages[b * width + slot] as usize, kept, *page));
                    }
                }
                seqused_k = Some(used);
                table = Some((pages, width));
            }
        }
        let q = noise.tensor(batch * heads * seqlen_q * self.head_dim, self.magnitude);
        let mut kv = |width: usize| {
            let shape = [kv_batch, self.num_kv_heads, kv_rows, width];
            let mut values: Vec<T> = noise.tensor(shape.iter().product(), 1.0);
            for &(b, from, to) in &used_rows {
                for h in 0..self.num_kv_heads {
                    let row = (b * self.num_kv_heads + h) * kv_rows;
                    values[(row + from) * width..(row + to) * width].fill(nan);
                }
            }
            (values, shape)
        };
        let (k, k_shape) = kv(self.head_dim);
        let (v, v_shape) = kv(self.head_dim_v);
        let mut extra = Noise(self.seed ^ 0x5A5A);
        let full = [batch, heads, seqlen_q, seqlen_k];
        let broadcast =
            |axes: [bool; 4]| std::array::from_fn(|n| if axes[n] { 1 } else { full[n] });
        let bias = self.bias.map(|axes| {
            let shape: [usize; 4] = broadcast(axes);
            let values = (0..shape.iter().product())
                .map(|_| match extra.bits() % 8 {
                    0 => T::from_f64(f64::NEG_INFINITY),
                    _ => T::from_f64(extra.number()),
                })
                .collect();
            (values, shape)
        });
        let mask = self.mask.map(|axes| {
            let shape: [usize; 4] = broadcast(axes);
            let values = (0..shape.iter().product())
                .map(|_| u8::from(!extra.bits().is_multiple_of(4)))
                .collect();
            (values, shape)
        });
        Data {
            options: self.options(),
            q: Stored::new(&q, [batch, heads, seqlen_q, self.head_dim], self.layouts[0]),
            k: Stored::new(&k, k_shape, self.layouts[1]),
            v: Stored::new(&v, v_shape, self.layouts[2]),
            bias,
            mask,
            cu_seqlens,
            seqused_k,
            table,
        }
    }
}

impl<T: Element> Data<T> {
    pub(crate) fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.bias = self
            .bias
            .as_ref()
            .map(|(values, shape)| TensorView::bhsd(values, *shape).unwrap());
        inputs.mask = self
            .mask
            .as_ref()
            .map(|(values, shape)| TensorView::bhsd(values, *shape).unwrap());
        if let Some((q, k)) = &self.cu_seqlens {
            inputs = inputs.packed(q, k);
        }
        inputs.lengths.seqused_k = self.seqused_k.as_deref();
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
