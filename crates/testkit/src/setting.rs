//! What a backward pass is given.

use tilewise_core::{BackwardInputs, Dropout, Element, Inputs, Options, Problem, TensorView};

use crate::{Case, Data, Noise};

/// A case with dropout, the results of its forward pass, and the gradients that arrive at them.
pub struct Setting<T> {
    /// The tensors of the forward pass.
    pub data: Data<T>,
    /// The case's, and dropout.
    pub options: Options,
    /// The mask of [`Dropout::Mask`], and its shape.
    pub keep: Option<(Vec<u8>, [usize; 4])>,
    /// What arrives at out.
    pub dout: Vec<T>,
    /// What arrives at lse.
    pub dlse: Option<Vec<f32>>,
    /// The forward pass's result.
    pub out: Vec<T>,
    /// The forward pass's statistics.
    pub lse: Vec<f32>,
    /// Of out and dout.
    pub out_shape: [usize; 4],
}

impl<T: Element> Setting<T> {
    /// `forward` gives out and lse of a problem.
    pub fn new(
        case: &Case,
        forward: impl FnOnce(&Problem, &Inputs<'_, T>) -> (Vec<T>, Vec<f32>),
    ) -> Self {
        let data: Data<T> = case.data();
        let mut noise = Noise(case.seed ^ 0xD0D0);
        let dims = *data.problem().dims();
        let p = 0.25 * noise.below(4) as f64;
        let dropout = match noise.below(4) {
            0 => Some(Dropout::Philox {
                p,
                seed: noise.bits(),
                offset: noise.bits(),
            }),
            1 => Some(Dropout::Mask { p }),
            _ => None,
        };
        let keep = matches!(dropout, Some(Dropout::Mask { .. })).then(|| {
            let full = [dims.batch, dims.num_heads, dims.seqlen_q, dims.seqlen_k];
            let shape = full.map(|size| if noise.below(3) == 0 { 1 } else { size });
            let bits = (0..shape.iter().product()).map(|_| noise.below(3) as u8);
            (bits.collect(), shape)
        });
        let rows: usize = dims.lse_shape().iter().product();
        let mut setting = Setting {
            options: data.options.clone().dropout(dropout),
            data,
            keep,
            dout: noise.tensor(rows * dims.head_dim_v, 1.5),
            dlse: (noise.below(2) == 0).then(|| noise.tensor(rows, 1.5)),
            out: Vec::new(),
            lse: Vec::new(),
            out_shape: dims.out_shape(),
        };
        setting.run_forward(forward);
        setting
    }

    /// Makes out and lse anew, after a change of options or tensors.
    pub fn run_forward(
        &mut self,
        forward: impl FnOnce(&Problem, &Inputs<'_, T>) -> (Vec<T>, Vec<f32>),
    ) {
        (self.out, self.lse) = forward(&self.problem(), &self.inputs());
    }

    /// With NaN in a few places of q, k and v and in every eighth row of dout, and with dropout, where there
    /// is any, so strong that rows with few keys keep none. The forward pass is to be run anew.
    pub fn poisoned(mut self, seed: u64) -> Self {
        let mut noise = Noise(seed ^ 0xBAD0);
        let nan = T::from_f64(f64::NAN);
        let hides = self.data.bias.is_some();
        for (tensor, scored) in [
            (&mut self.data.q, true),
            (&mut self.data.k, true),
            (&mut self.data.v, false),
        ] {
            // A bias of −∞ on a score of NaN hides nothing by definition, and to some kernels does.
            if tensor.shape.contains(&0) || (scored && hides) {
                continue;
            }
            for _ in 0..noise.below(3) {
                let at = tensor.at(tensor.shape.map(|size| noise.below(size)));
                tensor.data[at] = nan;
            }
        }
        let width = self.out_shape[3];
        for row in self.dout.chunks_mut(width.max(1)) {
            if noise.below(8) == 0 {
                row[noise.below(width)] = nan;
            }
        }
        self.options = match self.options.get_dropout() {
            Some(Dropout::Philox { seed, offset, .. }) => {
                let p = 0.8;
                self.options.dropout(Dropout::Philox { p, seed, offset })
            }
            _ => self.options,
        };
        if let Some((keep, _)) = &mut self.keep {
            for kept in keep {
                *kept &= u8::from(noise.below(4) == 0);
            }
        }
        self
    }

    /// The tensors of the forward pass, the keep mask included.
    pub fn inputs(&self) -> Inputs<'_, T> {
        let keep = self.keep.as_ref();
        self.data
            .inputs()
            .keep_mask(keep.map(|(keep, shape)| TensorView::bhsd(keep, *shape).expect("a mask")))
    }

    /// The problem that they pose.
    pub fn problem(&self) -> Problem {
        Problem::new(&self.inputs(), &self.options).expect("a valid problem")
    }

    /// The tensors of the backward pass.
    pub fn backward(&self) -> BackwardInputs<'_, T> {
        let [b, h, s, _] = self.out_shape;
        let row = |values| TensorView::bhsd(values, [b, h, s, 1]).expect("a value a row");
        let out = |values| TensorView::bhsd(values, self.out_shape).expect("out's shape");
        BackwardInputs::new(
            self.inputs(),
            out(&self.out),
            row(&self.lse),
            out(&self.dout),
        )
        .dlse(self.dlse.as_deref().map(row))
    }
}
