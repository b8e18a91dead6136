//! Tensors whose element type is known at run time only: what [`Backend`](crate::Backend) takes.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::inputs::Inputs;
use crate::view::{TensorView, TensorViewMut};

macro_rules! erased {
    ($(#[$doc:meta])* $name:ident, $inner:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub enum $name<'a> {
            /// Of f64.
            F64($inner<'a, f64>),
            /// Of f32.
            F32($inner<'a, f32>),
            /// Of f16.
            F16($inner<'a, f16>),
            /// Of bf16.
            BF16($inner<'a, bf16>),
        }

        impl $name<'_> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self {
                    $name::F64(_) => DType::F64,
                    $name::F32(_) => DType::F32,
                    $name::F16(_) => DType::F16,
                    $name::BF16(_) => DType::BF16,
                }
            }
        }

        erased!(@from $name, $inner, F64, f64);
        erased!(@from $name, $inner, F32, f32);
        erased!(@from $name, $inner, F16, f16);
        erased!(@from $name, $inner, BF16, bf16);
    };
    (@from $name:ident, $inner:ident, $variant:ident, $t:ty) => {
        impl<'a> From<$inner<'a, $t>> for $name<'a> {
            fn from(inner: $inner<'a, $t>) -> Self {
                $name::$variant(inner)
            }
        }
    };
}

erased!(
    /// A [`TensorView`] of any element type.
    #[derive(Clone, Copy)]
    AnyTensor,
    TensorView
);
erased!(
    /// A [`TensorViewMut`] of any element type.
    AnyTensorMut,
    TensorViewMut
);
erased!(
    /// [`Inputs`] of any element type.
    #[derive(Clone, Copy)]
    AnyInputs,
    Inputs
);

/// Runs `$body` with `$inner` bound to the typed value inside an erased one.
///
/// ```
/// use tilewise_core::{AnyTensor, TensorView, with_typed};
/// let data = [0.0f32; 8];
/// let any = AnyTensor::from(TensorView::bhsd(&data, [1, 1, 2, 4]).unwrap());
/// assert_eq!(with_typed!(AnyTensor, any, view => view.shape()), [1, 1, 2, 4]);
/// ```
#[macro_export]
macro_rules! with_typed {
    ($any:ident, $value:expr, $inner:pat => $body:expr) => {
        match $value {
            $crate::$any::F64($inner) => $body,
            $crate::$any::F32($inner) => $body,
            $crate::$any::F16($inner) => $body,
            $crate::$any::BF16($inner) => $body,
        }
    };
}

impl AnyTensor<'_> {
    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        with_typed!(AnyTensor, self, view => view.shape())
    }
}

impl AnyTensorMut<'_> {
    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        with_typed!(AnyTensorMut, self, view => view.shape())
    }
}
