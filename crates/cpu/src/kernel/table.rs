//! The dispatcher: one table of functions for each (element type, instruction set), each a thin
//! `#[target_feature]` wrapper of a generic kernel.

use tilewise_core::Element;
use tilewise_core::half::{bf16, f16};

use super::pack::Rows;
use super::{Block, pack, rows, scores, softmax, weighted};
use crate::isa::Isa;
use crate::simd::{Vector, portable};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// The kernels of one instruction set for inputs of type T.
///
/// Every function may be called only where the processor has that instruction set: a table is
/// handed out by [`CpuElement::kernels`] for an [`Isa`] found at run time only.
#[derive(Clone, Copy)]
pub(crate) struct Kernels<T: Element> {
    /// Lanes a register.
    pub(crate) lanes: usize,
    /// Columns of a packed panel.
    pub(crate) nr: usize,
    /// The sizes of row blocks, ascending.
    pub(crate) row_blocks: &'static [usize],
    /// [`pack::transposed`]: rows, stride, sign, to.
    pub(crate) transposed: unsafe fn(&Rows<'_, T>, usize, T::Acc, *mut T::Acc),
    /// [`pack::panels`]: rows, panel stride, to.
    pub(crate) panels: unsafe fn(&Rows<'_, T>, usize, *mut T::Acc) -> bool,
    /// Scores, online softmax and weighted values: one step of FlashAttention-2.
    pub(crate) absorb: unsafe fn(&Block<T>),
    /// [`scores::scores`].
    pub(crate) scores: unsafe fn(&Block<T>),
    /// [`softmax::maxima`].
    pub(crate) maxima: unsafe fn(&Block<T>),
    /// [`softmax::exponentiate`].
    pub(crate) exponentiate: unsafe fn(&Block<T>),
    /// [`softmax::normalise`].
    pub(crate) normalise: unsafe fn(&Block<T>),
    /// [`weighted::weighted_values`].
    pub(crate) weighted: unsafe fn(&Block<T>),
    /// [`rows::finish`]: acc, divisor, length, out.
    pub(crate) finish: unsafe fn(*const T::Acc, T::Acc, usize, *mut T),
    /// [`rows::combine`]: length, a, x, b, y.
    pub(crate) combine: Combine<T::Acc>,
}

/// The type of [`rows::combine`].
type Combine<A> = unsafe fn(usize, A, *mut A, A, *const A);

/// Row blocks of a binding whose largest has `mr` rows.
const fn row_blocks(mr: usize) -> &'static [usize] {
    match mr {
        12 => &[1, 2, 4, 8, 12],
        6 => &[1, 2, 4, 6],
        4 => &[1, 2, 4],
        _ => &[1, 2],
    }
}

macro_rules! table {
    ($T:ty, $V:ty $(, $features:literal)?) => {{
        type T = $T;
        type V = $V;
        type Acc = <$T as Element>::Acc;
        $(#[target_feature(enable = $features)])?
        unsafe fn transposed(rows: &Rows<'_, T>, stride: usize, sign: Acc, to: *mut Acc) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { pack::transposed::<T, V>(rows, stride, sign, to) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn panels(rows: &Rows<'_, T>, panel_stride: usize, to: *mut Acc) -> bool {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { pack::panels::<T, V>(rows, panel_stride, to) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn absorb(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernels.
            unsafe {
                scores::scores::<T, V>(block);
                softmax::online::<T, V>(block);
                weighted::weighted_values::<T, V>(block);
            }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn scores(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { scores::scores::<T, V>(block) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn maxima(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { softmax::maxima::<T, V>(block) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn exponentiate(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { softmax::exponentiate::<T, V>(block) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn normalise(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { softmax::normalise::<T, V>(block) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn weighted(block: &Block<T>) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { weighted::weighted_values::<T, V>(block) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn finish(acc: *const Acc, divisor: Acc, len: usize, out: *mut T) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { rows::finish::<T, V>(acc, divisor, len, out) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn combine(len: usize, a: Acc, x: *mut Acc, b: Acc, y: *const Acc) {
            // SAFETY: the caller's promise is that of the generic kernel.
            unsafe { rows::combine::<V>(len, a, x, b, y) }
        }
        Kernels {
            lanes: <V as Vector>::LANES,
            nr: <V as Vector>::NR,
            row_blocks: row_blocks(<V as Vector>::MR),
            transposed,
            panels,
            absorb,
            scores,
            maxima,
            exponentiate,
            normalise,
            weighted,
            finish,
            combine,
        }
    }};
}

mod sealed {
    use super::{Isa, Kernels};
    use tilewise_core::Element;

    /// Keeps the kernels out of the public interface.
    pub trait HasKernels: Element {
        #[doc(hidden)]
        #[allow(private_interfaces)] // the trait is sealed, the table internal
        fn kernels(isa: Isa) -> Kernels<Self>;
    }
}

/// An element type that this backend has kernels for: f64, f32, f16 and bf16. Sealed.
pub trait CpuElement: sealed::HasKernels {}

macro_rules! element {
    ($T:ty, $avx512:ty, $avx2:ty, $portable:ty) => {
        impl sealed::HasKernels for $T {
            #[allow(private_interfaces)] // the trait is sealed, the table internal
            fn kernels(isa: Isa) -> Kernels<$T> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => table!(
                        $T,
                        $avx512,
                        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
                    ),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => table!($T, $avx2, "avx2,fma,f16c"),
                    _ => table!($T, $portable),
                }
            }
        }
        impl CpuElement for $T {}
    };
}

element!(f64, avx512::F64x8, avx2::F64x4, portable::F64x4);
element!(f32, avx512::F32x16, avx2::F32x8, portable::F32x8);
element!(f16, avx512::F32x16, avx2::F32x8, portable::F32x8);
element!(bf16, avx512::F32x16, avx2::F32x8, portable::F32x8);
