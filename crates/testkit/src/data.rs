//! The tensors of a case, and the verdict on results.

use proptest::prelude::*;
use tilewise_core::{
    BlockTable, Dims, Element, Inputs, Judge, Options, Problem, RowSample, TensorView,
};

use crate::{Case, Noise, Sequences, Tensor};

/// The tensors of a case. Keys that no sequence uses are NaN.
#[derive(Clone, Debug)]
pub struct Data<T> {
    /// The case's, slopes and sinks included.
    pub options: Options,
    /// Queries.
    pub q: Tensor<T>,
    /// Keys; of pages, where there is a table.
    pub k: Tensor<T>,
    /// Values, laid out as the keys.
    pub v: Tensor<T>,
    /// Added to the scores; −∞ here and there.
    pub bias: Option<Tensor<T>>,
    /// 0 hides a key.
    pub mask: Option<Tensor<u8>>,
    /// Where the packed sequences of q and of k begin.
    pub cu_seqlens: Option<(Vec<i32>, Vec<i32>)>,
    /// Keys used.
    pub seqused_k: Option<Vec<i32>>,
    /// Pages, and how many a sequence has.
    pub table: Option<(Vec<i32>, usize)>,
}

/// How k and v lie, and what of them nobody uses.
struct Keys {
    batch: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    /// Entries and rows of k and v.
    kv: [usize; 2],
    /// Entry, and rows from where to where.
    unused: Vec<(usize, usize, usize)>,
    cu_seqlens: Option<(Vec<i32>, Vec<i32>)>,
    seqused_k: Option<Vec<i32>>,
    table: Option<(Vec<i32>, usize)>,
}

impl Keys {
    fn new(case: &Case) -> Self {
        let mut keys = Keys {
            batch: case.batch,
            seqlen_q: case.seqlen_q,
            seqlen_k: case.seqlen_k,
            kv: [case.batch, case.seqlen_k],
            unused: Vec::new(),
            cu_seqlens: None,
            seqused_k: None,
            table: None,
        };
        match &case.sequences {
            Sequences::Dense => {}
            Sequences::Used(percent) => keys.used(percent),
            Sequences::Packed(lengths, cut) => keys.packed(lengths, *cut),
            Sequences::Paged(page, percent) => keys.paged(*page, percent),
        }
        keys
    }

    fn used(&mut self, percent: &[usize]) {
        let used = (0..self.batch).map(|b| self.seqlen_k * percent[b] / 100);
        let used: Vec<usize> = used.collect();
        let rows = used.iter().enumerate();
        self.unused = rows.map(|(b, &n)| (b, n, self.seqlen_k)).collect();
        self.seqused_k = Some(used.iter().map(|&n| n as i32).collect());
    }

    fn packed(&mut self, lengths: &[(usize, usize)], cut: bool) {
        let (mut cu_q, mut cu_k, mut used) = (vec![0], vec![0], Vec::new());
        for &(q, k) in lengths {
            let start = cu_k[cu_k.len() - 1] as usize;
            let kept = if cut { k - k / 3 } else { k };
            self.unused.push((0, start + kept, start + k));
            used.push(kept as i32);
            cu_q.push(cu_q[cu_q.len() - 1] + q as i32);
            cu_k.push((start + k) as i32);
        }
        // Two rows and a key that belong to no sequence.
        self.batch = 1;
        self.seqlen_q = cu_q[cu_q.len() - 1] as usize + 2;
        self.seqlen_k = cu_k[cu_k.len() - 1] as usize + 1;
        self.kv = [1, self.seqlen_k];
        self.unused.push((0, self.seqlen_k - 1, self.seqlen_k));
        self.seqused_k = cut.then_some(used);
        self.cu_seqlens = Some((cu_q, cu_k));
    }

    fn paged(&mut self, page: usize, percent: &[usize]) {
        let width = self.seqlen_k.div_ceil(page);
        let count = self.batch * width;
        self.kv = [count + 1, page];
        self.seqlen_k = width * page;
        // Pages in an order that no sequence has them in; the first belongs to none.
        let pages: Vec<i32> = (0..count).map(|n| (count - n) as i32).collect();
        self.unused.push((0, 0, page));
        let mut used = Vec::new();
        for b in 0..self.batch {
            let n = self.seqlen_k * percent[b] / 100;
            used.push(n as i32);
            for slot in 0..width {
                let kept = n.saturating_sub(slot * page).min(page);
                self.unused
                    .push((pages[b * width + slot] as usize, kept, page));
            }
        }
        self.seqused_k = Some(used);
        self.table = Some((pages, width));
    }
}

impl Case {
    /// The sizes of the problem that the case's tensors pose.
    pub fn dims(&self) -> Dims {
        let keys = Keys::new(self);
        Dims {
            batch: keys.batch,
            num_heads: self.num_heads(),
            num_kv_heads: self.num_kv_heads,
            seqlen_q: keys.seqlen_q,
            seqlen_k: keys.seqlen_k,
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
        }
    }

    /// The tensors.
    pub fn data<T: Element>(&self) -> Data<T> {
        let keys = Keys::new(self);
        let mut noise = Noise(self.seed);
        let nan = T::from_f64(f64::NAN);
        let heads = self.num_heads();
        let q = [keys.batch, heads, keys.seqlen_q, self.head_dim];
        let q = Tensor::new(q, self.layouts[0], nan, || {
            T::from_f64(noise.normal() * self.magnitude)
        });
        let mut kv = |width: usize, layout, magnitude: f64| {
            let shape = [keys.kv[0], self.num_kv_heads, keys.kv[1], width];
            let mut tensor = Tensor::new(shape, layout, nan, || {
                T::from_f64(noise.number() * magnitude)
            });
            for &(b, from, to) in &keys.unused {
                for h in 0..self.num_kv_heads {
                    for s in from..to {
                        for d in 0..width {
                            let at = tensor.at([b, h, s, d]);
                            tensor.data[at] = nan;
                        }
                    }
                }
            }
            tensor
        };
        let k = kv(self.head_dim, self.layouts[1], 3f64.sqrt() * self.magnitude);
        let v = kv(self.head_dim_v, self.layouts[2], 1.0);
        let mut extra = Noise(self.seed ^ 0x5A5A);
        let full = [keys.batch, heads, keys.seqlen_q, keys.seqlen_k];
        let broadcast =
            |axes: [bool; 4]| std::array::from_fn(|n| if axes[n] { 1 } else { full[n] });
        let bias = self.bias.map(|axes| {
            Tensor::new(broadcast(axes), self.layouts[0], nan, || {
                match extra.below(8) {
                    0 => T::from_f64(f64::NEG_INFINITY),
                    _ => T::from_f64(extra.number()),
                }
            })
        });
        let mask = self.mask.map(|axes| {
            Tensor::new(broadcast(axes), self.layouts[1], 1, || {
                u8::from(extra.below(4) > 0)
            })
        });
        Data {
            options: self.options(),
            q,
            k,
            v,
            bias,
            mask,
            cu_seqlens: keys.cu_seqlens,
            seqused_k: keys.seqused_k,
            table: keys.table,
        }
    }
}

impl<T: Element> Data<T> {
    /// The tensors as the crates take them.
    pub fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view())
            .bias(self.bias.as_ref().map(Tensor::view))
            .mask(self.mask.as_ref().map(Tensor::view));
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

    /// The problem that they pose.
    pub fn problem(&self) -> Problem {
        Problem::new(&self.inputs(), &self.options).expect("a valid problem")
    }

    /// The definition's results, to hold others against.
    pub fn judge(&self) -> Judged {
        Judged::new(&self.problem(), &self.inputs())
    }
}

/// The definition's results for one problem.
pub struct Judged {
    judge: Judge,
    dims: Dims,
}

impl Judged {
    /// Of every row.
    pub fn new<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>) -> Self {
        Judged {
            judge: Judge::new(problem, inputs, &RowSample::all(problem)),
            dims: *problem.dims(),
        }
    }

    /// Whether contiguous results are within the tolerance.
    pub fn agrees<T: Element>(
        &self,
        who: &str,
        out: &[T],
        lse: &[f32],
    ) -> Result<(), TestCaseError> {
        let out = TensorView::bhsd(out, self.dims.out_shape()).expect("out's shape");
        let [b, h, s] = self.dims.lse_shape();
        let lse = TensorView::bhsd(lse, [b, h, s, 1]).expect("lse's shape");
        let comparison = self.judge.compare(&out, Some(&lse)).expect("comparable");
        prop_assert!(comparison.pass, "{who} {}: {comparison:?}", T::DTYPE);
        Ok(())
    }
}
