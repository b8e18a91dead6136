//! What the backward pass adds to the tile kernels: weights from their L, gradients of scores, and
//! products with a strip transposed. S, dP and dQ are made by the kernels of the forward pass.

use num_traits::Float as _;
use tilewise_core::Element;
use tilewise_core::half::{bf16, f16};

use crate::exp::{exp2_nonpositive, tanh};
use crate::isa::Isa;
use crate::kernel::gemm::with_mr;
use crate::kernel::pack::chunk;
use crate::kernel::table::for_each_element;
use crate::kernel::turned::{TurnedKernels, turned_of_bf16};
use crate::kernel::{Block, s_stride};
use crate::simd::{Convert, Vector, portable};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// What turns a strip of scores into weights and their gradients.
pub(crate) struct Weights<A> {
    /// L of the block's rows in units of the strip, in two parts, high and low.
    pub(super) l: *const A,
    pub(super) l_low: *const A,
    /// Δ of the block's rows.
    pub(super) delta: *const A,
    /// The strip of dP.
    pub(super) ds: *mut A,
    /// The strip of the scores' slopes, under a softcap.
    pub(super) slopes: Option<*mut A>,
    /// softmax_scale: dQ and dK are made from scale · dS.
    pub(super) scale: A,
    pub(super) softcap: Option<A>,
}

/// acc\[key\] += Σ strip\[row\]\[key\] · b\[row\].
pub(crate) struct Collected<A> {
    /// Row 0 and key 0 of the strip.
    pub(super) strip: *const A,
    pub(super) rows: usize,
    pub(super) lo: usize,
    pub(super) hi: usize,
    /// `[panel][row][NR]`, panels `b_panel` apart.
    pub(super) b: *const A,
    pub(super) b_panel: usize,
    /// `[key][width]`.
    pub(super) acc: *mut A,
    pub(super) width: usize,
    pub(super) row_blocks: &'static [usize],
    /// An element of b is NaN or infinite: 0 · b is not 0, so hidden pairs must be left out.
    pub(super) careful: bool,
}

/// The kernels of one instruction set for inputs of type T.
///
/// As with [`crate::kernel::table::Kernels`], every function may be called only where the processor
/// has that instruction set.
#[derive(Clone, Copy)]
pub(crate) struct BackwardKernels<T: Element> {
    /// [`slopes`].
    pub(super) slopes: unsafe fn(&Block<T::Acc>, &Weights<T::Acc>),
    /// [`weigh`].
    pub(super) weigh: unsafe fn(&Block<T::Acc>, &Weights<T::Acc>),
    /// [`grade`].
    pub(super) grade: unsafe fn(&Block<T::Acc>, &Weights<T::Acc>),
    /// [`collect`].
    pub(super) collect: unsafe fn(&Collected<T::Acc>),
    /// [`row_dot`]: length, x, its step, y, its step.
    pub(super) row_dot: unsafe fn(usize, *const T, isize, *const T, isize) -> T::Acc,
    /// What products of pairs take besides, where the instruction set has them for T.
    pub(super) turned: Option<TurnedKernels<T::Acc>>,
}

/// Columns of the strip that hold scores: whole vectors.
#[inline(always)]
fn columns<V: Vector>(block: &Block<V::E>) -> (usize, usize) {
    (
        block.lo - block.lo % V::LANES,
        block.hi.next_multiple_of(V::LANES),
    )
}

/// 1 − tanh²(scale · S / cap) of raw products S.
///
/// # Safety
/// The processor has V's instructions; both strips cover what the block says.
#[inline(always)]
unsafe fn slopes<V: Vector>(block: &Block<V::E>, weights: &Weights<V::E>) {
    let (Some(to), Some(cap)) = (weights.slopes, weights.softcap) else {
        return;
    };
    // SAFETY: the caller's promise.
    unsafe {
        let (from, end) = columns::<V>(block);
        let (scale, cap) = (V::splat(weights.scale), V::splat(cap));
        let one = V::splat(V::E::from_f64(1.0));
        for row in 0..block.rows {
            let at = row * s_stride::<V::E>();
            for column in (from..end).step_by(V::LANES) {
                let t = tanh(V::load(block.s.add(at + column)).mul(scale).div(cap));
                one.sub(t.mul(t)).store(to.add(at + column));
            }
        }
    }
}

/// P = 2^(c·(S − L)) in place of S, with L in units of the strip: the difference of two large numbers
/// that lie close is exact, and only then multiplied. −∞ gives 0.
///
/// # Safety
/// As [`slopes`]; L covers the block's rows.
#[inline(always)]
unsafe fn weigh<V: Vector>(block: &Block<V::E>, weights: &Weights<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, end) = columns::<V>(block);
        let c = V::splat(block.c);
        let zero = V::splat(V::E::from_f64(0.0));
        let lowest = V::splat(V::E::min_value());
        for row in 0..block.rows {
            let s = block.s.add(row * s_stride::<V::E>());
            let high = V::splat(weights.l.add(row).read());
            let low = V::splat(weights.l_low.add(row).read());
            for column in (from..end).step_by(V::LANES) {
                let score = V::load(s.add(column));
                let p = exp2_nonpositive(score.sub(high).sub(low).mul(c));
                // A hidden key has no weight, also where L is no number.
                V::select_lt(score, lowest, zero, p).store(s.add(column));
            }
        }
    }
}

/// scale · dX in place of dP: P (dP − Δ) · slope · scale; 0 where P is 0, whatever dP is.
///
/// # Safety
/// As [`weigh`], which must have run.
#[inline(always)]
unsafe fn grade<V: Vector>(block: &Block<V::E>, weights: &Weights<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, end) = columns::<V>(block);
        let scale = V::splat(weights.scale);
        let zero = V::splat(V::E::from_f64(0.0));
        let least = V::splat(V::E::min_positive_value());
        for row in 0..block.rows {
            let at = row * s_stride::<V::E>();
            let delta = V::splat(weights.delta.add(row).read());
            for column in (from..end).step_by(V::LANES) {
                let p = V::load(block.s.add(at + column));
                let dp = V::load(weights.ds.add(at + column));
                let mut ds = dp.sub(delta).mul(p).mul(scale);
                if let Some(slopes) = weights.slopes {
                    ds = ds.mul(V::load(slopes.add(at + column)));
                }
                V::select_lt(p, least, zero, ds).store(weights.ds.add(at + column));
            }
        }
    }
}

/// Adds Σ strip · b to the keys `lo..hi` of acc, rows ascending.
///
/// # Safety
/// The processor has V's instructions; the pointers cover what the sizes say, the strip and acc a
/// register block's rows more.
#[inline(always)]
unsafe fn collect<V: Vector>(c: &Collected<V::E>) {
    // SAFETY: the caller's promise.
    unsafe {
        if !c.careful {
            rows::<V>(c, 0, c.rows);
            return;
        }
        // Rows with a NaN or infinite element are added apart, to the keys that they see only.
        let mut from = 0;
        for row in 0..c.rows {
            if (0..c.width).all(|column| element::<V>(c, row, column).is_finite()) {
                continue;
            }
            rows::<V>(c, from, row);
            for key in c.lo..c.hi {
                let x = c.strip.add(row * s_stride::<V::E>() + key).read();
                if x == V::E::from_f64(0.0) {
                    continue;
                }
                for column in 0..c.width {
                    let to = c.acc.add(key * c.width + column);
                    to.write(to.read() + x * element::<V>(c, row, column));
                }
            }
            from = row + 1;
        }
        rows::<V>(c, from, c.rows);
    }
}

#[inline(always)]
unsafe fn element<V: Vector>(c: &Collected<V::E>, row: usize, column: usize) -> V::E {
    let at = column / V::NR * c.b_panel + row * V::NR + column % V::NR;
    // SAFETY: the caller's promise.
    unsafe { c.b.add(at).read() }
}

#[inline(always)]
unsafe fn rows<V: Vector>(c: &Collected<V::E>, from: usize, to: usize) {
    if from == to {
        return;
    }
    let largest = c.row_blocks[c.row_blocks.len() - 1];
    let mut key = c.lo;
    while key < c.hi {
        let rest = (c.hi - key).min(largest);
        let mut mr = largest;
        for &size in c.row_blocks.iter().rev() {
            if size >= rest {
                mr = size;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { with_mr!(V, mr, MR => keys::<V, MR>(c, key, from, to)) }
        key += mr;
    }
}

#[inline(always)]
unsafe fn keys<V: Vector, const MR: usize>(
    c: &Collected<V::E>,
    key: usize,
    from: usize,
    to: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let strip = c.strip.add(from * s_stride::<V::E>() + key);
        for panel in 0..c.width.div_ceil(V::NR) {
            let first = panel * V::NR;
            let b = c.b.add(panel * c.b_panel + from * V::NR);
            let acc = c.acc.add(key * c.width + first);
            if V::NRV == 2 && c.width - first > V::LANES {
                block::<V, MR, 2>(to - from, strip, b, acc, c.width);
            } else {
                block::<V, MR, 1>(to - from, strip, b, acc, c.width);
            }
        }
    }
}

/// One register block: the strip is read along its rows' heads, column by column.
#[inline(always)]
unsafe fn block<V: Vector, const MR: usize, const NRV: usize>(
    depth: usize,
    a: *const V::E,
    b: *const V::E,
    to: *mut V::E,
    width: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(V::E::from_f64(0.0)); NRV]; MR];
        for (r, row) in acc.iter_mut().enumerate() {
            for (n, x) in row.iter_mut().enumerate() {
                *x = V::load(to.add(r * width + n * V::LANES));
            }
        }
        let (mut a, mut b) = (a, b);
        for _ in 0..depth {
            let mut columns = [V::load(b); NRV];
            for (n, column) in columns.iter_mut().enumerate().skip(1) {
                *column = V::load(b.add(n * V::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(a.add(r).read());
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = x.fma(column, *acc);
                }
            }
            a = a.add(s_stride::<V::E>());
            b = b.add(V::NR);
        }
        for (r, row) in acc.iter().enumerate() {
            for (n, x) in row.iter().enumerate() {
                x.store(to.add(r * width + n * V::LANES));
            }
        }
    }
}

/// Σ x_d y_d, in lanes.
///
/// # Safety
/// The processor has V's instructions; both rows have `len` elements.
#[inline(always)]
unsafe fn row_dot<T: Element, V: Convert<T> + Vector<E = T::Acc>>(
    len: usize,
    x: *const T,
    x_step: isize,
    y: *const T,
    y_step: isize,
) -> V::E {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = V::splat(V::E::from_f64(0.0));
        for first in (0..len).step_by(V::LANES) {
            let n = V::LANES.min(len - first);
            let x: V = chunk::<T, V>(x.wrapping_offset(first as isize * x_step), x_step, n);
            let y: V = chunk::<T, V>(y.wrapping_offset(first as isize * y_step), y_step, n);
            sum = x.fma(y, sum);
        }
        sum.reduce_add()
    }
}

macro_rules! backward_table {
    ($T:ty, $V:ty $(, $features:literal)?) => {{
        type T = $T;
        type V = $V;
        type A = <$T as Element>::Acc;
        $(#[target_feature(enable = $features)])?
        unsafe fn slopes_of(block: &Block<A>, weights: &Weights<A>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { slopes::<V>(block, weights) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn weigh_of(block: &Block<A>, weights: &Weights<A>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { weigh::<V>(block, weights) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn grade_of(block: &Block<A>, weights: &Weights<A>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { grade::<V>(block, weights) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn collect_of(collected: &Collected<A>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { collect::<V>(collected) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn row_dot_of(len: usize, x: *const T, x_step: isize, y: *const T, y_step: isize) -> A {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { row_dot::<T, V>(len, x, x_step, y, y_step) }
        }
        BackwardKernels {
            slopes: slopes_of,
            weigh: weigh_of,
            grade: grade_of,
            collect: collect_of,
            row_dot: row_dot_of,
            turned: None,
        }
    }};
}

/// An element type that the backward pass has kernels for.
pub trait HasBackwardKernels: Element {
    #[doc(hidden)]
    #[allow(private_interfaces)] // the trait is reached through a sealed one, the table internal
    fn backward_kernels(isa: Isa) -> BackwardKernels<Self>;
}

macro_rules! element {
    ($T:ty, $avx512:ty, $avx2:ty, $portable:ty, $turned:expr) => {
        impl HasBackwardKernels for $T {
            #[allow(private_interfaces)] // the trait is reached through a sealed one, the table internal
            fn backward_kernels(isa: Isa) -> BackwardKernels<$T> {
                let kernels = match isa.vectors() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => backward_table!(
                        $T,
                        $avx512,
                        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
                    ),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => backward_table!($T, $avx2, "avx2,fma,f16c"),
                    _ => backward_table!($T, $portable),
                };
                BackwardKernels {
                    turned: $turned(isa),
                    ..kernels
                }
            }
        }
    };
}

for_each_element!(element, turned_of_bf16);
