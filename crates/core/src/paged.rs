//! Keys and values in pages, gathered into contiguous tensors.

use crate::allocate::allocate;
use crate::dtype::Element;
use crate::error::Result;
use crate::inputs::Inputs;
use crate::problem::Problem;
use crate::view::TensorView;

/// k and v with their pages in order, and the same problem posed on them.
#[derive(Clone, Debug)]
pub struct Gathered<T> {
    problem: Problem,
    pages: Option<Contiguous<T>>,
}

#[derive(Clone, Debug)]
struct Contiguous<T> {
    k: Vec<T>,
    v: Vec<T>,
    /// `[batch, num_kv_heads, longest used length, head_dim]`.
    k_shape: [usize; 4],
    v_shape: [usize; 4],
}

/// Copies the used keys and values of every sequence out of their pages. Inputs that are not paged
/// are left where they are, so that a caller need not ask.
///
/// Slots beyond a sequence's used length are not read; in the copy they are 0. The problem of the
/// copy has seqlen_k = the longest used length.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the copy cannot be had: sequences may share pages, so it can be larger
/// than the pages are.
pub fn gather<T: Element>(problem: &Problem, inputs: &Inputs<'_, T>) -> Result<Gathered<T>> {
    if inputs.block_table.is_none() {
        return Ok(Gathered {
            problem: problem.clone(),
            pages: None,
        });
    }
    let dims = problem.dims();
    let longest = problem
        .sequences()
        .iter()
        .map(|sequence| sequence.seqlen_k)
        .max()
        .unwrap_or(0);
    let shape = |width| [dims.batch, dims.num_kv_heads, longest, width];
    let mut gathered = Gathered {
        problem: problem.clone(),
        pages: Some(Contiguous {
            k: gather_one(problem, inputs, &inputs.k, shape(dims.head_dim))?,
            v: gather_one(problem, inputs, &inputs.v, shape(dims.head_dim_v))?,
            k_shape: shape(dims.head_dim),
            v_shape: shape(dims.head_dim_v),
        }),
    };
    gathered.problem = Problem::new(&gathered.inputs(inputs), problem.options())?;
    Ok(gathered)
}

fn gather_one<T: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, T>,
    pages: &TensorView<'_, T>,
    shape: [usize; 4],
) -> Result<Vec<T>> {
    let Some(table) = &inputs.block_table else {
        return Ok(Vec::new());
    };
    let page_size = pages.shape()[2];
    let [_, heads, longest, width] = shape;
    let what = "keys and values gathered from pages";
    let mut copy = allocate(&shape, what, T::default())?;
    if width == 0 {
        return Ok(copy);
    }
    for sequence in problem.sequences() {
        let b = sequence.k_batch;
        for h in 0..heads {
            for j in 0..sequence.seqlen_k {
                let page = table.pages[b * table.width + j / page_size] as usize;
                let target = &mut copy[((b * heads + h) * longest + j) * width..][..width];
                for (to, from) in target.iter_mut().zip(pages.row(page, h, j % page_size)) {
                    *to = from;
                }
            }
        }
    }
    Ok(copy)
}

impl<T: Element> Gathered<T> {
    /// The problem of [`inputs`](Self::inputs).
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// `original` with k and v replaced, and bias and mask cut to the keys that are left.
    ///
    /// # Panics
    /// If `original` is not what was gathered from.
    pub fn inputs<'a>(&'a self, original: &Inputs<'a, T>) -> Inputs<'a, T> {
        let mut inputs = *original;
        let Some(pages) = &self.pages else {
            return inputs;
        };
        let longest = pages.k_shape[2];
        let whole = "the copy has the shape it was made with";
        inputs.k = TensorView::bhsd(&pages.k, pages.k_shape).expect(whole);
        inputs.v = TensorView::bhsd(&pages.v, pages.v_shape).expect(whole);
        inputs.bias = original.bias.map(|bias| cut(bias, longest));
        inputs.mask = original.mask.map(|mask| cut(mask, longest));
        inputs.keep_mask = original.keep_mask.map(|mask| cut(mask, longest));
        inputs.block_table = None;
        inputs
    }

    /// [`problem`](Self::problem) and [`inputs`](Self::inputs).
    ///
    /// # Panics
    /// As `inputs`.
    pub fn posed<'a>(&'a self, original: &Inputs<'a, T>) -> (&'a Problem, Inputs<'a, T>) {
        (&self.problem, self.inputs(original))
    }
}

/// The first `keys` of the key axis, unless that is broadcast.
fn cut<U: Copy>(view: TensorView<'_, U>, keys: usize) -> TensorView<'_, U> {
    if view.shape()[3] == 1 {
        view
    } else {
        view.narrow(3, 0..keys)
    }
}
