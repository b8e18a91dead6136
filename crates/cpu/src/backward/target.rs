//! Gradients that several threads write.

use std::marker::PhantomData;

use tilewise_core::{Element, Problem, TensorViewMut};

/// Rows of a gradient. Whoever writes a row must be the only one to do so: the schedule hands out
/// each once. The view was checked when made, so distinct rows share no element.
pub(super) struct Target<'a, T> {
    base: *mut T,
    strides: [isize; 4],
    shape: [usize; 4],
    borrows: PhantomData<&'a mut T>,
}

// SAFETY: see `Target`: rows are disjoint, each is written by one thread.
unsafe impl<T: Send> Send for Target<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Target<'_, T> {}

impl<'a, T: Element> Target<'a, T> {
    pub(super) fn new(mut view: TensorViewMut<'a, T>) -> Self {
        let (offset, strides, shape) = (view.offset(), view.strides(), view.shape());
        Target {
            base: view.data_mut().as_mut_ptr().wrapping_add(offset),
            strides,
            shape,
            borrows: PhantomData,
        }
    }

    /// Elements of a row.
    pub(super) fn width(&self) -> usize {
        self.shape[3]
    }

    pub(super) fn at(&self, [b, h, i]: [usize; 3]) -> *mut T {
        let steps = b as isize * self.strides[0]
            + h as isize * self.strides[1]
            + i as isize * self.strides[2];
        self.base.wrapping_offset(steps)
    }

    /// Sets a row to 0.
    ///
    /// # Safety
    /// The row lies inside the shape and no one else touches it.
    pub(super) unsafe fn clear(&self, at: [usize; 3]) {
        if self.shape[3] > 0 {
            // SAFETY: the caller's promise; an output row is contiguous.
            unsafe {
                std::slice::from_raw_parts_mut(self.at(at), self.shape[3]).fill(T::default());
            }
        }
    }

    /// Sets the rows to 0 that belong to no sequence: along q, or else along k.
    ///
    /// # Safety
    /// No one else touches those rows.
    pub(super) unsafe fn clear_rows_of_no_sequence(&self, problem: &Problem, along_q: bool) {
        // Sorted once: a look through all sequences for each batch is quadratic in them.
        let mut taken: Vec<(usize, usize, usize)> = problem
            .sequences()
            .iter()
            .map(|s| match along_q {
                true => (s.q_batch, s.q_start, s.q_start + s.seqlen_q),
                false => (s.k_batch, s.k_start, s.k_start + s.seqlen_k),
            })
            .collect();
        taken.sort_unstable();
        let mut rest = &taken[..];
        for b in 0..self.shape[0] {
            let (here, later) = rest.split_at(rest.partition_point(|one| one.0 == b));
            rest = later;
            let last = (b, self.shape[2], self.shape[2]);
            let mut next = 0;
            for &(_, start, end) in here.iter().chain([&last]) {
                for row in next..start {
                    for h in 0..self.shape[1] {
                        // SAFETY: the caller's promise.
                        unsafe { self.clear([b, h, row]) }
                    }
                }
                next = next.max(end);
            }
        }
    }
}
