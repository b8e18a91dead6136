//! What a timed problem is posed with beside q, k and v.

use anyhow::{Result, anyhow, bail};
use clap::Args;
use tilewise::{Dims, Element, Inputs, Options, Problem, TensorView};

use crate::args::problem::ProblemArgs;
use crate::random;
use crate::shapes::Shape;

/// Options of every shape.
#[derive(Args, Clone, Debug)]
pub(super) struct PosedArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    /// Pack the sequences of the batch one after another, their lengths rising evenly to sq and sk
    #[arg(long, help_heading = "Problem")]
    packed: bool,

    /// Add a bias for each head, the same for the whole batch
    #[arg(long, help_heading = "Problem")]
    bias: bool,

    /// Apply a boolean mask that hides nothing, so that the operations stay those of the shape
    #[arg(long, help_heading = "Problem")]
    mask: bool,
}

/// One shape with all of it.
pub(super) struct Posed {
    dims: Dims,
    options: Options,
    bias: bool,
    mask: bool,
    /// cu_seqlens of q and of k where sequences are packed.
    starts: Option<[Vec<i32>; 2]>,
}

/// Where sequences of `longest`·1/n, `longest`·2/n, … `longest` begin and end.
fn starts(longest: usize, n: usize) -> Result<Vec<i32>> {
    // Known before anything is counted out: the lengths add up to this much at least.
    let most = i32::MAX as usize;
    if n >= most || longest.saturating_mul(n.div_ceil(2)).max(n) > most && longest > 0 {
        bail!(TOO_MANY);
    }
    let mut starts = Vec::new();
    if starts.try_reserve_exact(n + 1).is_err() {
        bail!("--packed: no memory for the starts of {n} sequences");
    }
    let mut at = 0usize;
    starts.push(0);
    for i in 1..=n {
        at = at.saturating_add(longest.saturating_mul(i).div_ceil(n));
        starts.push(i32::try_from(at).map_err(|_| anyhow!(TOO_MANY))?);
    }
    Ok(starts)
}

const TOO_MANY: &str = "--packed: at most 2^31 - 1 sequences, rows and keys in all";

/// What is beside q, k and v on the host.
pub(super) struct Extras<T> {
    bias: Vec<T>,
    mask: Vec<u8>,
}

impl PosedArgs {
    /// `shape` with these options.
    pub(super) fn pose(&self, shape: &Shape) -> Result<Posed> {
        let mut dims = shape.dims;
        let starts = match self.packed {
            true => {
                let q = starts(dims.seqlen_q, dims.batch)?;
                let k = starts(dims.seqlen_k, dims.batch)?;
                dims.seqlen_q = q.last().map_or(0, |&rows| rows as usize);
                dims.seqlen_k = k.last().map_or(0, |&keys| keys as usize);
                dims.batch = 1;
                Some([q, k])
            }
            false => None,
        };
        Ok(Posed {
            dims,
            options: self.problem.apply(shape.options(), dims.num_heads),
            bias: self.bias,
            mask: self.mask,
            starts,
        })
    }

    /// The options in the words of the command line, or nothing.
    pub(super) fn words(&self) -> String {
        let mut words = self.problem.words();
        for (name, given) in [
            ("packed", self.packed),
            ("bias", self.bias),
            ("mask", self.mask),
        ] {
            if given {
                words.push(name.to_owned());
            }
        }
        words.join(" ")
    }
}

impl Posed {
    pub(super) fn dims(&self) -> &Dims {
        &self.dims
    }

    /// Shapes of bias and mask.
    fn full(&self) -> [[usize; 4]; 2] {
        let (q, k) = (self.dims.seqlen_q, self.dims.seqlen_k);
        [[1, self.dims.num_heads, q, k], [1, 1, q, k]]
    }

    fn with<'a, T: Element>(
        &'a self,
        mut inputs: Inputs<'a, T>,
        bias: TensorView<'a, T>,
        mask: TensorView<'a, u8>,
    ) -> Inputs<'a, T> {
        if let Some([q, k]) = &self.starts {
            inputs = inputs.packed(q, k);
        }
        inputs
            .bias(self.bias.then_some(bias))
            .mask(self.mask.then_some(mask))
    }

    /// The problem, from sizes alone.
    pub(super) fn problem<T: Element>(&self) -> tilewise::Result<Problem> {
        // One element stands for all: nobody reads it.
        let (one, byte) = ([T::default()], [1]);
        let view = |shape| TensorView::from_strides(&one, shape, [0; 4], 0);
        let [q, k, v] = random::shapes(&self.dims).map(|(_, shape)| view(shape));
        let [bias, mask] = self.full();
        let mask = TensorView::from_strides(&byte, mask, [0; 4], 0)?;
        let inputs = self.with(Inputs::new(q?, k?, v?), view(bias)?, mask);
        Problem::new(&inputs, &self.options)
    }

    /// Bias and mask on the host, if there are any.
    pub(super) fn extras<T: Element>(&self, seed: u64) -> Result<Extras<T>> {
        let [bias, mask] = self.full();
        let live = || {
            let count = random::count("mask", mask)?;
            let mut live = random::room("mask", count)?;
            live.resize(count, 1);
            anyhow::Ok(live)
        };
        Ok(Extras {
            mask: if self.mask { live()? } else { Vec::new() },
            bias: match self.bias {
                true => random::normal(seed, "bias", random::count("bias", bias)?)?,
                false => Vec::new(),
            },
        })
    }

    /// q, k and v with all that comes beside them.
    pub(super) fn inputs<'a, T: Element>(
        &'a self,
        inputs: Inputs<'a, T>,
        extras: &'a Extras<T>,
    ) -> tilewise::Result<Inputs<'a, T>> {
        let [bias, mask] = self.full();
        // What is not there has no elements either.
        let shape = |shape: [usize; 4], given| if given { shape } else { [0; 4] };
        Ok(self.with(
            inputs,
            TensorView::bhsd(&extras.bias, shape(bias, self.bias))?,
            TensorView::bhsd(&extras.mask, shape(mask, self.mask))?,
        ))
    }
}
