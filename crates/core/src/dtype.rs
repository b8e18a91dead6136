//! Element types and the arithmetic they accumulate in.

use std::fmt;
use std::iter::Sum;
use std::ops::{AddAssign, DivAssign, MulAssign, SubAssign};
use std::str::FromStr;

use half::{bf16, f16};

use crate::any::{AnyInputs, AnyTensor, AnyTensorMut};
use crate::backward::{AnyBackwardInputs, AnyGradientsMut, BackwardInputs, GradientsMut};
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::view::{TensorView, TensorViewMut};

/// Element type of q, k, v and out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary64, accumulated in f64.
    F64,
    /// IEEE binary32, accumulated in f32.
    F32,
    /// IEEE binary16, accumulated in f32.
    F16,
    /// bfloat16, accumulated in f32.
    BF16,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// Half a unit in the last place of 1: the largest relative error of one rounding to this type.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            DType::F64 => 2f64.powi(-53),
            DType::F32 => 2f64.powi(-24),
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
        }
    }

    /// The type in which scores, sums and Õ are kept for inputs of this type.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The name as accepted by [`FromStr`].
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "f64" | "float64" => Ok(DType::F64),
            "f32" | "float32" => Ok(DType::F32),
            "f16" | "float16" | "half" => Ok(DType::F16),
            "bf16" | "bfloat16" => Ok(DType::BF16),
            _ => Err(Error::option("dtype", "f64, f32, f16 or bf16", s)),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f64 {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of q, k, v and out. Sealed: the backends know these four.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + PartialEq + fmt::Debug + 'static
{
    /// The type's run-time name.
    const DTYPE: DType;
    /// What its products are accumulated in: f64 for f64, f32 for the others.
    type Acc: Float;
    /// Exact widening.
    fn to_acc(self) -> Self::Acc;
    /// Rounds to nearest even.
    fn from_acc(x: Self::Acc) -> Self;
    /// Exact widening.
    fn to_f64(self) -> f64;
    /// Rounds to nearest even, once.
    fn from_f64(x: f64) -> Self;

    /// Forgets the element type.
    fn erase(view: TensorView<'_, Self>) -> AnyTensor<'_>;
    /// Forgets the element type.
    fn erase_mut(view: TensorViewMut<'_, Self>) -> AnyTensorMut<'_>;
    /// Forgets the element type.
    fn erase_inputs<'a>(inputs: Inputs<'a, Self>) -> AnyInputs<'a>;
    /// Forgets the element type.
    fn erase_backward<'a>(inputs: BackwardInputs<'a, Self>) -> AnyBackwardInputs<'a>;
    /// Forgets the element type.
    fn erase_gradients<'a>(gradients: GradientsMut<'a, Self>) -> AnyGradientsMut<'a>;
    /// The typed gradients, if they are of this type.
    fn typed_gradients<'a>(gradients: AnyGradientsMut<'a>) -> Option<GradientsMut<'a, Self>>;
    /// The typed view, if it is of this type.
    fn typed(view: AnyTensor<'_>) -> Option<TensorView<'_, Self>>;
    /// The typed view, if it is of this type.
    fn typed_mut(view: AnyTensorMut<'_>) -> Option<TensorViewMut<'_, Self>>;
}

/// The conversions between typed and erased tensors, the same for each element type.
macro_rules! erasure {
    ($variant:ident) => {
        fn erase(view: TensorView<'_, Self>) -> AnyTensor<'_> {
            AnyTensor::$variant(view)
        }
        fn erase_mut(view: TensorViewMut<'_, Self>) -> AnyTensorMut<'_> {
            AnyTensorMut::$variant(view)
        }
        fn erase_inputs<'a>(inputs: Inputs<'a, Self>) -> AnyInputs<'a> {
            AnyInputs::$variant(inputs)
        }
        fn erase_backward<'a>(inputs: BackwardInputs<'a, Self>) -> AnyBackwardInputs<'a> {
            AnyBackwardInputs::$variant(inputs)
        }
        fn erase_gradients<'a>(gradients: GradientsMut<'a, Self>) -> AnyGradientsMut<'a> {
            AnyGradientsMut::$variant(gradients)
        }
        fn typed_gradients<'a>(gradients: AnyGradientsMut<'a>) -> Option<GradientsMut<'a, Self>> {
            match gradients {
                AnyGradientsMut::$variant(gradients) => Some(gradients),
                _ => None,
            }
        }
        fn typed(view: AnyTensor<'_>) -> Option<TensorView<'_, Self>> {
            match view {
                AnyTensor::$variant(view) => Some(view),
                _ => None,
            }
        }
        fn typed_mut(view: AnyTensorMut<'_>) -> Option<TensorViewMut<'_, Self>> {
            match view {
                AnyTensorMut::$variant(view) => Some(view),
                _ => None,
            }
        }
    };
}

/// An accumulation type: f32 or f64.
pub trait Float:
    Element<Acc = Self>
    + num_traits::Float
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + fmt::Display
{
}

impl Float for f32 {}
impl Float for f64 {}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
    type Acc = f64;
    fn to_acc(self) -> f64 {
        self
    }
    fn from_acc(x: f64) -> f64 {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(x: f64) -> f64 {
        x
    }
    erasure!(F64);
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    type Acc = f32;
    fn to_acc(self) -> f32 {
        self
    }
    fn from_acc(x: f32) -> f32 {
        x
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
    erasure!(F32);
}

macro_rules! half_element {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            const DTYPE: DType = DType::$variant;
            type Acc = f32;
            fn to_acc(self) -> f32 {
                self.to_f32()
            }
            fn from_acc(x: f32) -> $t {
                <$t>::from_f32(x)
            }
            fn to_f64(self) -> f64 {
                <$t>::to_f64(self)
            }
            fn from_f64(x: f64) -> $t {
                <$t>::from_f64(x)
            }
            erasure!($variant);
        }
    };
}

half_element!(f16, F16);
half_element!(bf16, BF16);
