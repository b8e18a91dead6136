//! The register-blocked microkernel of both products.

use crate::kernel::s_stride;
use crate::simd::Vector;

/// acc\[r\]\[n\] += Σₖ A(r, k) · B(k, n), one rounding a step, k ascending: the order is the same for
/// every block size, so an element's bits do not depend on the block it falls into.
///
/// A is packed `[k][MR]` (`PACKED`) or rows [`s_stride`] apart; B is rows of `V::NR`, of which the
/// first NRV vectors are used.
///
/// # Safety
/// The processor has V's instructions; `a` and `b` cover `depth` steps.
#[inline(always)]
pub(crate) unsafe fn gemm<V: Vector, const MR: usize, const NRV: usize, const PACKED: bool>(
    depth: usize,
    a: *const V::E,
    b: *const V::E,
    acc: &mut [[V; NRV]; MR],
) {
    // SAFETY: steps k < depth of `a` and `b` are covered, by the caller's promise.
    unsafe {
        let (row, step) = if PACKED {
            (1, MR)
        } else {
            (s_stride::<V::E>(), 1)
        };
        let (mut a, mut b) = (a, b);
        for _ in 0..depth {
            let mut columns = [V::load(b); NRV];
            for (n, column) in columns.iter_mut().enumerate().skip(1) {
                *column = V::load(b.add(n * V::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(a.add(r * row).read());
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = x.fma(column, *acc);
                }
            }
            a = a.add(step);
            b = b.add(V::NR);
        }
    }
}

/// Runs `$body` with `$MR` bound to the constant that `$mr` holds. The sizes are those of
/// `row_blocks` in [`crate::kernel::table`].
macro_rules! with_mr {
    ($V:ident, $mr:expr, $MR:ident => $body:expr) => {
        match $mr {
            1 => {
                const $MR: usize = 1;
                $body
            }
            2 => {
                const $MR: usize = 2;
                $body
            }
            4 if $V::MR >= 4 => {
                const $MR: usize = 4;
                $body
            }
            6 if $V::MR == 6 => {
                const $MR: usize = 6;
                $body
            }
            8 if $V::MR >= 8 => {
                const $MR: usize = 8;
                $body
            }
            12 if $V::MR >= 12 => {
                const $MR: usize = 12;
                $body
            }
            other => unreachable!("row block of {other}"),
        }
    };
}
pub(crate) use with_mr;
