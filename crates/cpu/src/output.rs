//! Outputs that several threads write: rows of out and lse.

use std::marker::PhantomData;

use tilewise_core::{Element, TensorViewMut};

use crate::kernel::table::Kernels;
use crate::shape::Shape;
use crate::tile::TileState;

/// out and lse of a call.
///
/// Whoever writes a row must be the only one to do so: the schedules hand out each (batch, head, row)
/// once. The views were checked when made, so that distinct rows share no element.
pub(crate) struct Outputs<'a, T> {
    out: Rows<T>,
    lse: Option<Rows<f32>>,
    borrows: PhantomData<&'a mut T>,
}

#[derive(Clone, Copy)]
struct Rows<T> {
    base: *mut T,
    strides: [isize; 4],
}

// SAFETY: see `Outputs`: rows are disjoint, each is written by one thread.
unsafe impl<T: Send> Send for Outputs<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Outputs<'_, T> {}

impl<T: Copy> Rows<T> {
    fn new(mut view: TensorViewMut<'_, T>) -> Self {
        let (offset, strides) = (view.offset(), view.strides());
        Rows {
            base: view.data_mut().as_mut_ptr().wrapping_add(offset),
            strides,
        }
    }

    fn at(&self, b: usize, h: usize, i: usize) -> *mut T {
        let steps = b as isize * self.strides[0]
            + h as isize * self.strides[1]
            + i as isize * self.strides[2];
        self.base.wrapping_offset(steps)
    }
}

/// O = Õ/divisor and L of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ending {
    /// 0 for a row that saw nothing.
    pub(crate) divisor: f64,
    pub(crate) lse: f64,
}

/// The end of a row: `m` in natural-log units. Sinks enter here and only here.
pub(crate) fn end(m: f64, l: f64, sink: Option<f32>) -> Ending {
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    if l == 0.0 {
        return Ending {
            divisor: 0.0,
            lse: sink,
        };
    }
    if sink == f64::NEG_INFINITY {
        return Ending {
            divisor: l,
            lse: m + l.ln(),
        };
    }
    let top = m.max(sink);
    Ending {
        divisor: l + (sink - m).exp(),
        lse: top + (l * (m - top).exp() + (sink - top).exp()).ln(),
    }
}

impl<'a, T: Element> Outputs<'a, T> {
    /// The shapes must have been checked against the problem.
    pub(crate) fn new(out: TensorViewMut<'a, T>, lse: Option<TensorViewMut<'a, f32>>) -> Self {
        Outputs {
            out: Rows::new(out),
            lse: lse.map(Rows::new),
            borrows: PhantomData,
        }
    }

    /// Writes out = Õ/divisor and lse of one row.
    ///
    /// # Safety
    /// The row lies inside the outputs and no one else touches it; `acc` has `width` elements; the
    /// processor has the kernels' instructions.
    pub(crate) unsafe fn write(
        &self,
        kernels: &Kernels<T>,
        shape: &Shape,
        [b, h, i]: [usize; 3],
        acc: *const T::Acc,
        ending: Ending,
    ) {
        let out = self.out.at(b, h, i);
        // SAFETY: the caller's promise; an output row is contiguous.
        unsafe {
            if shape.head_dim_v == 0 {
                // There is no element to point at.
            } else if ending.divisor == 0.0 {
                std::slice::from_raw_parts_mut(out, shape.head_dim_v).fill(T::default());
            } else {
                let divisor = <T::Acc as Element>::from_f64(ending.divisor);
                (kernels.finish)(acc, divisor, shape.head_dim_v, out);
            }
            if let Some(lse) = &self.lse {
                lse.at(b, h, i).write(ending.lse as f32);
            }
        }
    }

    /// Finishes `rows` rows from their state: O = Õ/ℓ, L = m + ln ℓ. `at` is the first row's place.
    /// `normalised`: the state holds Õ/ℓ in place of Õ.
    ///
    /// # Safety
    /// As [`Self::write`], for each of the rows; the state covers them.
    #[allow(clippy::too_many_arguments)] // a tile's state, its place and its units
    pub(crate) unsafe fn finish(
        &self,
        kernels: &Kernels<T>,
        shape: &Shape,
        [b, h, first]: [usize; 3],
        rows: usize,
        state: TileState<T::Acc>,
        unit: f64,
        sink: Option<f32>,
        normalised: bool,
    ) {
        for row in 0..rows {
            // SAFETY: the caller's promise.
            unsafe {
                let m = state.m.add(row).read().to_f64() * unit;
                let l = state.l.add(row).read().to_f64();
                let acc = state.acc.add(row * shape.width);
                let mut ending = end(m, l, sink);
                if normalised && l != 0.0 {
                    ending.divisor /= l;
                }
                self.write(kernels, shape, [b, h, first + row], acc, ending);
            }
        }
    }

    /// Writes what a row that belongs to no sequence gives.
    ///
    /// # Safety
    /// As [`Self::write`].
    pub(crate) unsafe fn write_empty(&self, shape: &Shape, at: [usize; 3]) {
        let [b, h, i] = at;
        // SAFETY: the caller's promise; an output row is contiguous.
        unsafe {
            let out = self.out.at(b, h, i);
            if shape.head_dim_v > 0 {
                std::slice::from_raw_parts_mut(out, shape.head_dim_v).fill(T::default());
            }
            if let Some(lse) = &self.lse {
                lse.at(b, h, i).write(f32::NEG_INFINITY);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_joins_the_denominator_once() {
        let plain = end(1.0, 2.0, None);
        assert_eq!(plain.divisor, 2.0);
        assert!((plain.lse - (1.0 + 2f64.ln())).abs() < 1e-15);
        let sunk = end(1.0, 2.0, Some(3.0));
        let z = 2.0 * 1f64.exp() + 3f64.exp();
        assert!((sunk.lse - z.ln()).abs() < 1e-15);
        assert!((sunk.divisor * 1f64.exp() - z).abs() < 1e-12);
        assert_eq!(end(1.0, 2.0, Some(f32::NEG_INFINITY)), plain);
    }

    #[test]
    fn a_row_that_saw_nothing_has_no_divisor() {
        assert_eq!(
            end(f64::NEG_INFINITY, 0.0, None),
            Ending {
                divisor: 0.0,
                lse: f64::NEG_INFINITY
            }
        );
        assert_eq!(end(f64::NEG_INFINITY, 0.0, Some(0.5)).lse, 0.5);
        assert!(end(f64::INFINITY, f64::NAN, Some(0.5)).lse.is_nan());
    }
}
