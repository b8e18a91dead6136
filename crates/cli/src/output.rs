//! Memory that results are written to.

use tilewise::core::allocate;
use tilewise::{Dims, Element, Problem, Result, TensorView, TensorViewMut};

/// out and lse of one problem.
pub(crate) struct Outputs<T> {
    dims: Dims,
    pub(crate) out: Vec<T>,
    pub(crate) lse: Vec<f32>,
}

impl<T: Element> Outputs<T> {
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(problem: &Problem) -> Result<Self> {
        let dims = *problem.dims();
        Ok(Outputs {
            dims,
            out: allocate(&dims.out_shape(), "out", T::default())?,
            lse: allocate(&dims.lse_shape(), "lse", 0.0)?,
        })
    }

    /// Sets every element to NaN.
    pub(crate) fn poison(&mut self) {
        self.out.fill(T::from_f64(f64::NAN));
        self.lse.fill(f32::NAN);
    }

    pub(crate) fn views_mut(&mut self) -> Result<(TensorViewMut<'_, T>, TensorViewMut<'_, f32>)> {
        Ok((
            TensorViewMut::bhsd(&mut self.out, self.dims.out_shape())?,
            TensorViewMut::bhs(&mut self.lse, self.dims.lse_shape())?,
        ))
    }

    pub(crate) fn out_view(&self) -> Result<TensorView<'_, T>> {
        TensorView::bhsd(&self.out, self.dims.out_shape())
    }

    pub(crate) fn lse_view(&self) -> Result<TensorView<'_, f32>> {
        let [b, h, s] = self.dims.lse_shape();
        TensorView::bhsd(&self.lse, [b, h, s, 1])
    }
}
