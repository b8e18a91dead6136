//! The dispatcher: one table of functions for each (element type, instruction set), each a thin
//! `#[target_feature]` wrapper of a generic kernel.

use tilewise_core::half::{bf16, f16};
use tilewise_core::{DType, Element};

use super::few::{self, Unpacked};
use super::pack::Rows;
use super::pairs::few::FewPairs;
use super::pairs::{self, PairBlock, PairKernels, Pairs};
use super::spread::{self, Place};
use super::{Block, Modifiers, Plane, dropout, pack, probe, rows, scores, softmax, weighted};
use crate::backward::kernel::HasBackwardKernels;
use crate::compiled::Compiled;
use crate::isa::Isa;
use crate::simd::{Convert, Vector, portable};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// The kernels of one instruction set that work in the accumulator type alone.
///
/// Every function of this table and of [`Kernels`] may be called only where the processor has that
/// instruction set: a table is handed out for an [`Isa`] found at run time only.
#[derive(Clone, Copy)]
pub(crate) struct TileKernels<A> {
    /// Lanes a register.
    pub(crate) lanes: usize,
    /// Columns of a packed panel.
    pub(crate) nr: usize,
    /// The sizes of row blocks, ascending.
    pub(crate) row_blocks: &'static [usize],
    /// One step of FlashAttention-2 without modifiers: the four functions below, in order.
    pub(crate) absorb: unsafe fn(&Block<A>),
    /// [`scores::products`].
    pub(crate) products: unsafe fn(&Block<A>),
    /// [`scores::hide`].
    pub(crate) hide: unsafe fn(&Block<A>),
    /// [`softmax::online`].
    pub(crate) online: unsafe fn(&Block<A>),
    /// [`weighted::weighted_values`].
    pub(crate) weighted: unsafe fn(&Block<A>),
    /// [`softmax::maxima`].
    pub(crate) maxima: unsafe fn(&Block<A>),
    /// [`softmax::exponentiate`].
    pub(crate) exponentiate: unsafe fn(&Block<A>),
    /// [`softmax::normalise`].
    pub(crate) normalise: unsafe fn(&Block<A>),
    /// [`dropout::drop_out`].
    pub(crate) drop_out: unsafe fn(&Block<A>, &dropout::Dropping<A>),
    /// [`rows::combine`]: length, a, x, b, y.
    pub(crate) combine: Combine<A>,
    /// [`rows::all_finite`]: length, x.
    pub(crate) all_finite: unsafe fn(usize, *const A) -> bool,
    /// What measures the instruction set's ceilings.
    pub(crate) probe: Probe,
}

/// The kernels of one instruction set for inputs of type T.
#[derive(Clone, Copy)]
pub(crate) struct Kernels<T: Element> {
    pub(crate) tile: TileKernels<T::Acc>,
    /// [`pack::transposed`]: rows, stride, sign, to.
    pub(crate) transposed: unsafe fn(&Rows<'_, T>, usize, T::Acc, *mut T::Acc),
    /// [`pack::panels`]: rows, panel stride, to.
    pub(crate) panels: unsafe fn(&Rows<'_, T>, usize, *mut T::Acc) -> bool,
    /// [`few::products`].
    pub(crate) few_products: unsafe fn(&Block<T::Acc>, &Unpacked<T>),
    /// [`few::weighted_values`].
    pub(crate) few_weighted: unsafe fn(&Block<T::Acc>, &Unpacked<T>),
    /// Whether `few_products` takes queries spread over lanes, see [`Place`].
    pub(crate) spread: bool,
    /// How many elements those two widen with even and odd ones apart, or 0; see [`few::place`].
    pub(crate) interleaved: usize,
    /// [`scores::modify`].
    pub(crate) modify: unsafe fn(&Block<T::Acc>, &Modifiers<T>),
    /// [`rows::finish`]: acc, divisor, length, out.
    pub(crate) finish: unsafe fn(*const T::Acc, T::Acc, usize, *mut T),
    /// Products of pairs, where the instruction set has them for T.
    pub(crate) pairs: Option<PairKernels<T>>,
}

impl<T: Element> Kernels<T> {
    /// Fills the strip with scores, −∞ where a row does not see a key.
    ///
    /// # Safety
    /// Of [`scores::products`] and [`scores::modify`].
    pub(crate) unsafe fn scores(&self, block: &Block<T::Acc>, modifiers: Option<&Modifiers<T>>) {
        // SAFETY: the caller's promise.
        unsafe {
            (self.tile.products)(block);
            if let Some(modifiers) = modifiers {
                (self.modify)(block, modifiers);
            }
            (self.tile.hide)(block);
        }
    }

    /// Adds the weighted values, with dropout.
    ///
    /// # Safety
    /// Of [`weighted::weighted_values`] and [`dropout::drop_out`].
    pub(crate) unsafe fn values(&self, block: &Block<T::Acc>, modifiers: Option<&Modifiers<T>>) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(dropping) = modifiers.and_then(|modifiers| modifiers.dropout.as_ref()) {
                (self.tile.drop_out)(block, dropping);
            }
            (self.tile.weighted)(block);
        }
    }

    /// Scores, online softmax and weighted values: one step of FlashAttention-2.
    ///
    /// # Safety
    /// As [`Self::scores`].
    pub(crate) unsafe fn absorb(&self, block: &Block<T::Acc>, modifiers: Option<&Modifiers<T>>) {
        // SAFETY: the caller's promise.
        unsafe {
            if modifiers.is_none() {
                (self.tile.absorb)(block);
                return;
            }
            self.scores(block, modifiers);
            (self.tile.online)(block);
            self.values(block, modifiers);
        }
    }
}

/// What measures an instruction set's ceilings; see [`crate::ceilings`].
#[derive(Clone, Copy)]
pub(crate) struct Probe {
    /// Before the first `fma` of a thread.
    pub(crate) begin: unsafe fn(),
    /// After the last.
    pub(crate) end: unsafe fn(),
    /// [`probe::fma`].
    pub(crate) fma: unsafe fn(usize) -> f64,
    /// Floating-point operations of a round of `fma`.
    pub(crate) flops_a_round: f64,
    /// [`probe::read`].
    pub(crate) read: unsafe fn(*const u8, usize) -> f64,
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

/// A thin function for each generic kernel named, compiled for the features in brackets, if any.
macro_rules! thin {
    ($features:tt $($name:ident($($argument:ident: $t:ty),*) $(-> $r:ty)? = $body:expr;)*) => {
        $(thin! { @one $features $name($($argument: $t),*) $(-> $r)? = $body })*
    };
    (@one [$($features:literal)?]
        $name:ident($($argument:ident: $t:ty),*) $(-> $r:ty)? = $body:expr) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $name($($argument: $t),*) $(-> $r)? {
            // SAFETY: the caller's promise is that of the generic kernels.
            unsafe { $body }
        }
    };
}

macro_rules! tile_table {
    ($V:ty, $features:tt) => {{
        type V = $V;
        type A = <$V as Vector>::E;
        thin! { $features
            absorb(block: &Block<A>) = {
                scores::products::<V>(block);
                scores::hide::<V>(block);
                softmax::online::<V>(block);
                weighted::weighted_values::<V>(block);
            };
            products(block: &Block<A>) = scores::products::<V>(block);
            hide(block: &Block<A>) = scores::hide::<V>(block);
            online(block: &Block<A>) = softmax::online::<V>(block);
            weighted(block: &Block<A>) = weighted::weighted_values::<V>(block);
            maxima(block: &Block<A>) = softmax::maxima::<V>(block);
            exponentiate(block: &Block<A>) = softmax::exponentiate::<V>(block);
            normalise(block: &Block<A>) = softmax::normalise::<V>(block);
            drop_out(block: &Block<A>, dropping: &dropout::Dropping<A>) =
                dropout::drop_out(block, dropping);
            combine(len: usize, a: A, x: *mut A, b: A, y: *const A) =
                rows::combine::<V>(len, a, x, b, y);
            all_finite(len: usize, x: *const A) -> bool = rows::all_finite::<V>(len, x);
            fma(rounds: usize) -> f64 = probe::fma::<V>(rounds);
            read(from: *const u8, len: usize) -> f64 = probe::read::<V>(from, len);
        }
        TileKernels {
            lanes: <V as Vector>::LANES,
            nr: <V as Vector>::NR,
            row_blocks: row_blocks(<V as Vector>::MR),
            absorb,
            products,
            hide,
            online,
            weighted,
            maxima,
            exponentiate,
            normalise,
            drop_out,
            combine,
            all_finite,
            probe: Probe {
                begin: || (),
                end: || (),
                fma,
                flops_a_round: (2 * probe::CHAINS * <V as Vector>::LANES) as f64,
                read,
            },
        }
    }};
}

macro_rules! table {
    ($T:ty, $V:ty, $features:tt) => {{
        type T = $T;
        type V = $V;
        type A = <$T as Element>::Acc;
        thin! { $features
            transposed(rows: &Rows<'_, T>, stride: usize, sign: A, to: *mut A) =
                pack::transposed::<T, V>(rows, stride, sign, to);
            panels(rows: &Rows<'_, T>, panel_stride: usize, to: *mut A) -> bool =
                pack::panels::<T, V>(rows, panel_stride, to);
            few_products(block: &Block<A>, unpacked: &Unpacked<T>) =
                few::products::<T, V>(block, unpacked);
            few_weighted(block: &Block<A>, unpacked: &Unpacked<T>) =
                few::weighted_values::<T, V>(block, unpacked);
            modify(block: &Block<A>, modifiers: &Modifiers<T>) =
                scores::modify::<T, V>(block, modifiers);
            finish(acc: *const A, divisor: A, len: usize, out: *mut T) =
                rows::finish::<T, V>(acc, divisor, len, out);
        }
        Kernels {
            tile: <V as TileTable>::TABLE,
            transposed,
            panels,
            few_products,
            few_weighted,
            spread: <V as Convert<T>>::SAME,
            interleaved: if <V as Convert<T>>::INTERLEAVED {
                2 * <V as Vector>::LANES
            } else {
                0
            },
            modify,
            finish,
            pairs: None,
        }
    }};
}

/// The kernels of bf16 that multiply pairs as `$D` does.
macro_rules! pair_table {
    ($D:ty, $features:tt, $few:expr) => {{
        type D = $D;
        type V = <$D as Pairs>::V;
        type T = bf16;
        /// Rows of bf16 as rows of their bits.
        fn bits<'a>(rows: &Rows<'a, T>) -> Rows<'a, u16> {
            // SAFETY: a bf16 is a u16, and so are lists of pointers to them.
            let cast = |list: &'a [*const T]| unsafe {
                std::slice::from_raw_parts(list.as_ptr().cast::<*const u16>(), list.len())
            };
            Rows {
                rows: cast(rows.rows),
                next: cast(rows.next),
                step: rows.step,
                len: rows.len,
            }
        }
        thin! { $features
            begin() = <D as Pairs>::begin();
            end() = <D as Pairs>::end();
            queries(rows: &Rows<'_, T>, negate: bool, to: *mut u16, chunk: usize, odd: *mut u8) =
                pairs::pack::queries(&bits(rows), negate, to, chunk, odd);
            keys(rows: &Rows<'_, T>, to: *mut u16, odd: *mut u8) =
                pairs::pack::keys::<V>(&bits(rows), to, odd);
            values(rows: &Rows<'_, T>, panel: usize, to: *mut u16, odd: *mut u8) =
                pairs::pack::values(&bits(rows), panel, to, odd);
            absorb(block: &PairBlock<f32>) = pairs::step::absorb::<D>(block);
            products(block: &PairBlock<f32>) = pairs::step::products::<D>(block);
            hide(block: &PairBlock<f32>) = pairs::step::hide(block);
            softmax(block: &PairBlock<f32>) = pairs::step::softmax::<D>(block);
            round(block: &PairBlock<f32>) = pairs::step::round::<D>(block);
            weighted(block: &PairBlock<f32>) = pairs::step::weighted_values::<D>(block);
            probe(rounds: usize) -> f64 = <D as Pairs>::probe(rounds);
        }
        Some(PairKernels {
            row_blocks: <D as Pairs>::ROW_BLOCKS,
            grain: <D as Pairs>::GRAIN,
            begin,
            end,
            queries,
            keys,
            values,
            absorb,
            products,
            hide,
            softmax,
            round,
            weighted,
            few: $few,
            probe,
            flops_a_round: (pairs::CHAINS * <D as Pairs>::PROBE_FLOPS) as f64,
        })
    }};
}

/// Those for few rows.
macro_rules! few_pairs {
    ($D:ty, $features:tt) => {{
        type D = $D;
        type V = <$D as Pairs>::V;
        type T = bf16;
        thin! { $features
            query(from: Plane<T>, len: usize, negate: bool, place: Place, to: *mut f32) -> bool = {
                let from = Plane { at: from.at.cast::<u16>(), row: from.row, key: from.key };
                pairs::few::query(from, len, negate, place, to)
            };
            products(block: &Block<f32>, unpacked: &Unpacked<T>) =
                spread::products::<T, D>(block, unpacked);
            round(block: &Block<f32>) = pairs::few::round::<D>(block);
            weighted(block: &Block<f32>, unpacked: &Unpacked<T>) =
                pairs::few::weighted_values::<T, D>(block, unpacked);
            trusted(block: &Block<f32>) -> bool = pairs::few::trusted::<V>(block);
            is_odd(at: *const T, len: usize) -> bool = pairs::few::is_odd_value(at.cast(), len);
        }
        Some(FewPairs {
            query,
            products,
            round,
            weighted,
            trusted,
            is_odd,
            interleaved: 2 * <V as Vector>::LANES,
        })
    }};
}

/// The products of pairs of an instruction set, for T = bf16.
fn pairs_of_bf16(isa: Isa) -> Option<PairKernels<bf16>> {
    match isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => pair_table!(
            pairs::amx::Amx,
            ["avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"],
            None
        ),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => pair_table!(
            pairs::dot512::Dot512,
            ["avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"],
            few_pairs!(
                pairs::dot512::Dot512,
                ["avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"]
            )
        ),
        Isa::AmxEmulated => pair_table!(
            pairs::emulated::Emulated,
            [],
            few_pairs!(pairs::emulated::Emulated, [])
        ),
        _ => None,
    }
}

/// Makes each binding's table once, shared by the element types that accumulate in its type.
trait TileTable: Vector {
    const TABLE: TileKernels<Self::E>;
}

macro_rules! tile_tables {
    ($($V:ty, $features:tt;)*) => {
        $(
            impl TileTable for $V {
                const TABLE: TileKernels<Self::E> = tile_table!($V, $features);
            }
        )*
    };
}

#[cfg(target_arch = "x86_64")]
tile_tables! {
    avx512::F32x16, ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"];
    avx512::F64x8, ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"];
    avx2::F32x8, ["avx2,fma,f16c"];
    avx2::F64x4, ["avx2,fma,f16c"];
}
tile_tables! {
    portable::F32x8, [];
    portable::F64x4, [];
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
pub trait CpuElement: sealed::HasKernels + HasBackwardKernels + Compiled {}

macro_rules! element {
    ($T:ty, $avx512:ty, $avx2:ty, $portable:ty, $pairs:expr) => {
        impl sealed::HasKernels for $T {
            #[allow(private_interfaces)] // the trait is sealed, the table internal
            fn kernels(isa: Isa) -> Kernels<$T> {
                let pairs: Option<PairKernels<$T>> = $pairs(isa);
                let kernels = match isa.vectors() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => table!(
                        $T,
                        $avx512,
                        ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"]
                    ),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => table!($T, $avx2, ["avx2,fma,f16c"]),
                    _ => table!($T, $portable, []),
                };
                Kernels { pairs, ..kernels }
            }
        }
        impl CpuElement for $T {}
    };
}

/// Calls a macro for every element type: with the type, its vectors of each binding, and what its products
/// of pairs are made with, `$of_bf16` for bf16.
macro_rules! for_each_element {
    ($element:ident, $of_bf16:ident) => {
        $element!(f64, avx512::F64x8, avx2::F64x4, portable::F64x4, |_| None);
        $element!(f32, avx512::F32x16, avx2::F32x8, portable::F32x8, |_| None);
        $element!(f16, avx512::F32x16, avx2::F32x8, portable::F32x8, |_| None);
        $element!(bf16, avx512::F32x16, avx2::F32x8, portable::F32x8, $of_bf16);
    };
}
pub(crate) use for_each_element;

for_each_element!(element, pairs_of_bf16);

/// The probes of an instruction set that the processor must have, for the products of `dtype`.
pub(crate) fn probe(isa: Isa, dtype: DType) -> Probe {
    use sealed::HasKernels;
    let probe = match dtype {
        DType::F64 => f64::kernels(isa).tile.probe,
        _ => f32::kernels(isa).tile.probe,
    };
    match pairs_of_bf16(isa) {
        Some(pairs) if dtype == DType::BF16 => Probe {
            begin: pairs.begin,
            fma: pairs.probe,
            end: pairs.end,
            flops_a_round: pairs.flops_a_round,
            ..probe
        },
        _ => probe,
    }
}
