//! Borrowed tensors of four axes, `[batch, heads, seqlen, head_dim]`, in any memory order.
//!
//! A view is checked once, when it is made: after that every index inside its shape lies inside
//! the memory it borrows. Offsets and strides are in elements and 64 bits wide.

use std::ops::Range;

use crate::error::{Error, Result};

/// Lowest and highest element a shape, strides and offset can reach; `None` if there is no element.
fn extent(shape: [usize; 4], strides: [isize; 4], offset: usize) -> Option<(i128, i128)> {
    if shape.contains(&0) {
        return None;
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (dim, stride) in shape.into_iter().zip(strides) {
        // A product of two 64-bit numbers fits; the sum of four may not.
        let reach = (dim as i128 - 1) * stride as i128;
        low = low.saturating_add(reach.min(0));
        high = high.saturating_add(reach.max(0));
    }
    Some((low, high))
}

fn check_inside(
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
    len: usize,
) -> Result<(), Error> {
    let refuse = |problem| {
        Err(Error::View {
            tensor: "tensor".into(),
            problem,
            shape,
            strides,
            offset,
            len,
        })
    };
    match extent(shape, strides, offset) {
        Some((low, high)) if low < 0 || high >= len as i128 => {
            refuse("the view reaches outside its memory")
        }
        Some(_) if !countable(shape) => refuse("the view's elements cannot be counted"),
        _ => Ok(()),
    }
}

/// The strides, with 0 in place of those that nobody steps along and that lead out of the memory: any are allowed there, and
/// who multiplies with them must not overflow.
fn tame(shape: [usize; 4], mut strides: [isize; 4], len: usize) -> [isize; 4] {
    let empty = shape.contains(&0);
    for (stride, dim) in strides.iter_mut().zip(shape) {
        if (empty || dim == 1) && stride.unsigned_abs() > len {
            *stride = 0;
        }
    }
    strides
}

/// Whether the number of elements fits a `usize`: strides of 0 can describe any shape.
fn countable(shape: [usize; 4]) -> bool {
    shape
        .into_iter()
        .try_fold(1usize, |product, dim| product.checked_mul(dim))
        .is_some()
}

/// Row-major strides of the axes in the order `order` (outermost first).
fn packed_strides(shape: [usize; 4], order: [usize; 4]) -> [isize; 4] {
    let mut strides = [0; 4];
    let mut step = 1isize;
    for axis in order.into_iter().rev() {
        strides[axis] = step;
        // Saturating: an overflowing product can only belong to a shape that `check_inside` refuses
        // or that has no element.
        step = step.saturating_mul(isize::try_from(shape[axis].max(1)).unwrap_or(isize::MAX));
    }
    strides
}

const BHSD: [usize; 4] = [0, 1, 2, 3];
const BSHD: [usize; 4] = [0, 2, 1, 3];

/// A borrowed input: `shape[axis]` elements along each axis, `strides[axis]` elements apart.
///
/// Strides may be anything, 0 (broadcast) and negative included.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a, T> {
    data: &'a [T],
    offset: usize,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<'a, T: Copy> TensorView<'a, T> {
    /// Row-major `[batch, heads, seqlen, head_dim]`.
    ///
    /// # Errors
    /// [`Error::View`] if `data` holds fewer elements.
    pub fn bhsd(data: &'a [T], shape: [usize; 4]) -> Result<Self> {
        Self::from_strides(data, shape, packed_strides(shape, BHSD), 0)
    }

    /// Row-major `[batch, seqlen, heads, head_dim]` in memory. `shape` is given in the order of the
    /// view, `[batch, heads, seqlen, head_dim]`.
    ///
    /// # Errors
    /// [`Error::View`] if `data` holds fewer elements.
    pub fn bshd(data: &'a [T], shape: [usize; 4]) -> Result<Self> {
        Self::from_strides(data, shape, packed_strides(shape, BSHD), 0)
    }

    /// Any strides, in elements, from element `offset` on.
    ///
    /// # Errors
    /// [`Error::View`] if an element would lie outside `data`.
    pub fn from_strides(
        data: &'a [T],
        shape: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self> {
        check_inside(shape, strides, offset, data.len())?;
        Ok(TensorView {
            data,
            offset,
            shape,
            strides: tame(shape, strides, data.len()),
        })
    }

    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Distance of neighbours along each axis, in elements. Along an axis without neighbours, what was given, or 0 if that
    /// led out of the memory.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// Position of element `[0, 0, 0, 0]` in [`data`](Self::data).
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The memory behind the view.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        // Without an axis of size 0 the product was found countable; with one, a part of it may
        // not be.
        if self.is_empty() {
            0
        } else {
            self.shape.iter().product()
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Position in [`data`](Self::data) of the element at `index`.
    ///
    /// # Panics
    /// If `index` is outside the shape.
    #[inline]
    pub fn position(&self, index: [usize; 4]) -> usize {
        let mut position = self.offset as isize;
        for (axis, &at) in index.iter().enumerate() {
            assert!(at < self.shape[axis], "index outside the view");
            position += at as isize * self.strides[axis];
        }
        position as usize
    }

    /// The element at `index`.
    ///
    /// # Panics
    /// If `index` is outside the shape.
    #[inline]
    pub fn at(&self, index: [usize; 4]) -> T {
        self.data[self.position(index)]
    }

    /// The element at `index`, where axes of size 1 are repeated.
    ///
    /// # Panics
    /// If `index` is outside the shape along another axis.
    pub fn at_broadcast(&self, mut index: [usize; 4]) -> T {
        for (at, size) in index.iter_mut().zip(self.shape) {
            if size == 1 {
                *at = 0;
            }
        }
        self.at(index)
    }

    /// The elements of one row, `[b, h, s, ..]`.
    ///
    /// # Panics
    /// If the row is outside the shape.
    pub fn row(&self, b: usize, h: usize, s: usize) -> impl ExactSizeIterator<Item = T> + 'a {
        let (data, stride, width) = (self.data, self.strides[3], self.shape[3]);
        let start = if width == 0 {
            0
        } else {
            self.position([b, h, s, 0]) as isize
        };
        (0..width).map(move |d| data[(start + d as isize * stride) as usize])
    }

    /// One row as a slice, if its elements are neighbours in memory.
    ///
    /// # Panics
    /// If the row is outside the shape.
    pub fn contiguous_row(&self, b: usize, h: usize, s: usize) -> Option<&'a [T]> {
        if self.shape[3] == 0 {
            return Some(&[]);
        }
        if self.shape[3] > 1 && self.strides[3] != 1 {
            return None;
        }
        let start = self.position([b, h, s, 0]);
        Some(&self.data[start..start + self.shape[3]])
    }

    /// The part of `axis` in `range`.
    ///
    /// # Panics
    /// If `range` is outside the axis.
    pub fn narrow(&self, axis: usize, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.shape[axis],
            "range outside the view"
        );
        let mut part = *self;
        part.shape[axis] = range.end - range.start;
        if !part.is_empty() {
            part.offset =
                (self.offset as isize + range.start as isize * self.strides[axis]) as usize;
        }
        part
    }

    /// The same elements seen as `shape`: axes of size 1 are repeated by a stride of 0.
    ///
    /// # Errors
    /// [`Error::Shape`] if an axis is neither 1 nor the size wanted; [`Error::View`] if there are more elements than
    /// can be counted.
    pub fn broadcast_to(&self, shape: [usize; 4]) -> Result<Self> {
        let mut wide = *self;
        for (axis, &size) in shape.iter().enumerate() {
            if self.shape[axis] == size {
                continue;
            }
            if self.shape[axis] != 1 {
                return Err(Error::shape(
                    "tensor",
                    format!("{shape:?} or 1 in any axis"),
                    format!("{:?}", self.shape),
                ));
            }
            wide.shape[axis] = size;
            wide.strides[axis] = 0;
        }
        check_inside(wide.shape, wide.strides, wide.offset, wide.data.len())?;
        Ok(wide)
    }
}

/// A borrowed output: like [`TensorView`], but rows are contiguous (last stride 1) and no two
/// elements share memory.
#[derive(Debug)]
pub struct TensorViewMut<'a, T> {
    data: &'a mut [T],
    offset: usize,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<'a, T: Copy> TensorViewMut<'a, T> {
    /// Row-major `[batch, heads, seqlen, head_dim]`.
    ///
    /// # Errors
    /// [`Error::View`] if `data` holds fewer elements.
    pub fn bhsd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self> {
        Self::from_strides(data, shape, packed_strides(shape, BHSD), 0)
    }

    /// Row-major `[batch, seqlen, heads, head_dim]` in memory; `shape` in the order of the view.
    ///
    /// # Errors
    /// [`Error::View`] if `data` holds fewer elements.
    pub fn bshd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self> {
        Self::from_strides(data, shape, packed_strides(shape, BSHD), 0)
    }

    /// Row-major `[batch, heads, seqlen]`, as lse is: a view whose last axis is 1.
    ///
    /// # Errors
    /// [`Error::View`] if `data` holds fewer elements.
    pub fn bhs(data: &'a mut [T], shape: [usize; 3]) -> Result<Self> {
        Self::bhsd(data, [shape[0], shape[1], shape[2], 1])
    }

    /// Positive strides, in elements; the last one 1.
    ///
    /// # Errors
    /// [`Error::View`] if an element would lie outside `data`, if the last stride is not 1, or if
    /// two elements would share memory.
    pub fn from_strides(
        data: &'a mut [T],
        shape: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self> {
        check_inside(shape, strides, offset, data.len())?;
        let refuse = |problem| {
            Err(Error::View {
                tensor: "tensor".into(),
                problem,
                shape,
                strides,
                offset,
                len: data.len(),
            })
        };
        if shape[3] > 1 && strides[3] != 1 {
            return refuse("an output's last stride must be 1");
        }
        // Sorted by stride, each axis must step over everything the narrower axes cover.
        let mut axes: Vec<(isize, usize)> = (0..4)
            .filter(|&axis| shape[axis] > 1)
            .map(|axis| (strides[axis], shape[axis]))
            .collect();
        axes.sort_unstable();
        let mut covered = 1i128;
        if !shape.contains(&0) {
            for (stride, dim) in axes {
                if (stride as i128) < covered {
                    return refuse("an output's elements must not share memory");
                }
                covered += stride as i128 * (dim as i128 - 1);
            }
        }
        let mut tamed = tame(shape, strides, data.len());
        if shape[3] > 1 {
            // 1 is more than no memory holds; without it the same strides would not make this view again.
            tamed[3] = 1;
        }
        Ok(TensorViewMut {
            data,
            offset,
            shape,
            strides: tamed,
        })
    }

    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Distance of neighbours along each axis, in elements; the last one is 1 where the last axis has neighbours. Along an axis
    /// without any, what was given, or 0 if that led out of the memory.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// Position of element `[0, 0, 0, 0]` in [`data_mut`](Self::data_mut).
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The memory behind the view.
    pub fn data_mut(&mut self) -> &mut [T] {
        self.data
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> TensorViewMut<'_, T> {
        TensorViewMut {
            data: self.data,
            offset: self.offset,
            shape: self.shape,
            strides: self.strides,
        }
    }

    /// The view, read only.
    pub fn as_view(&self) -> TensorView<'_, T> {
        TensorView {
            data: self.data,
            offset: self.offset,
            shape: self.shape,
            strides: self.strides,
        }
    }

    /// One row, `[b, h, s, ..]`.
    ///
    /// # Panics
    /// If the row is outside the shape.
    pub fn row_mut(&mut self, b: usize, h: usize, s: usize) -> &mut [T] {
        let width = self.shape[3];
        if width == 0 {
            return &mut [];
        }
        let start = self.as_view().position([b, h, s, 0]);
        &mut self.data[start..start + width]
    }

    /// Sets every element of the view.
    pub fn fill(&mut self, value: T) {
        let [batch, heads, seqlen, _] = self.shape;
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..seqlen {
                    self.row_mut(b, h, s).fill(value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_outside_its_memory_is_refused() {
        let data = [0f32; 23];
        assert!(TensorView::bhsd(&data, [1, 2, 3, 4]).is_err());
        assert!(TensorView::bhsd(&data[..0], [1, 0, 3, 4]).is_ok());
        assert!(TensorView::from_strides(&data, [1, 1, 2, 4], [0, 0, -4, 1], 3).is_err());
        assert!(TensorView::from_strides(&data, [1, 1, 2, 4], [0, 0, -4, 1], 4).is_ok());
        let huge = [usize::MAX, usize::MAX, usize::MAX, 2];
        assert!(TensorView::bhsd(&data, huge).is_err());
    }

    #[test]
    fn negative_and_zero_strides_read_what_they_say() {
        let data: Vec<f32> = (0..8).map(|x| x as f32).collect();
        let reversed = TensorView::from_strides(&data, [1, 1, 2, 4], [0, 0, -4, -1], 7).unwrap();
        assert_eq!(reversed.row(0, 0, 0).collect::<Vec<_>>(), [7., 6., 5., 4.]);
        let one = TensorView::bhsd(&data[..1], [1, 1, 1, 1]).unwrap();
        let wide = one.broadcast_to([2, 3, 4, 5]).unwrap();
        assert_eq!(wide.at([1, 2, 3, 4]), 0.0);
        assert!(reversed.broadcast_to([1, 1, 2, 5]).is_err());
    }

    /// numpy and others leave anything where there is nothing to step to.
    #[test]
    fn strides_that_nobody_steps_along_are_tame() {
        let mut data = [0f32; 8];
        let strides = [isize::MIN, isize::MAX, 4, 1];
        let view = TensorView::from_strides(&data, [1, 1, 2, 4], strides, 0).unwrap();
        assert_eq!(view.strides(), [0, 0, 4, 1]);
        let bhsd = TensorView::bhsd(&data, [1, 1, 2, 4]).unwrap();
        assert_eq!(bhsd.strides(), [8, 8, 4, 1]);
        let view = TensorViewMut::from_strides(&mut data, [1, 1, 2, 4], strides, 0).unwrap();
        assert_eq!(view.strides(), [0, 0, 4, 1]);
        let none = TensorView::from_strides(&[0f32; 0], [3, 0, 2, 4], [isize::MAX; 4], 7).unwrap();
        assert_eq!(none.strides(), [0; 4]);
    }

    #[test]
    fn strides_of_an_output_make_it_again() {
        let mut data = [0f32; 64];
        for shape in [
            [1, 1, 0, 64],
            [0, 2, 3, 4],
            [2, 3, 4, 0],
            [1, 1, 1, 1],
            [2, 2, 4, 4],
        ] {
            for len in [shape.iter().product(), 64] {
                let mut view = TensorViewMut::bhsd(&mut data[..len], shape).unwrap();
                let (strides, offset) = (view.strides(), view.offset());
                let again = TensorViewMut::from_strides(view.data_mut(), shape, strides, offset);
                assert_eq!(again.unwrap().strides(), strides);
            }
        }
    }

    #[test]
    fn outputs_that_overlap_are_refused() {
        let mut data = [0f32; 64];
        assert!(TensorViewMut::from_strides(&mut data, [2, 2, 2, 4], [0, 16, 8, 1], 0).is_err());
        assert!(TensorViewMut::from_strides(&mut data, [1, 2, 4, 4], [0, 2, 8, 1], 0).is_err());
        assert!(TensorViewMut::from_strides(&mut data, [1, 1, 4, 4], [0, 0, 1, 4], 0).is_err());
        assert!(TensorViewMut::bshd(&mut data, [2, 2, 4, 4]).is_ok());
    }
}
