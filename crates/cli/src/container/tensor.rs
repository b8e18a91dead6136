//! One tensor of a file: type, shape, memory order, bytes.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use half::{bf16, f16};

use super::error::{ContainerError, Fault};

/// Element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it all")]
pub enum Kind {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl Kind {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Kind::F64 | Kind::I64 | Kind::U64 => 8,
            Kind::F32 | Kind::I32 | Kind::U32 => 4,
            Kind::F16 | Kind::BF16 | Kind::I16 | Kind::U16 => 2,
            Kind::I8 | Kind::U8 | Kind::Bool => 1,
        }
    }

    /// The name as accepted by [`FromStr`].
    pub fn name(self) -> &'static str {
        match self {
            Kind::F64 => "f64",
            Kind::F32 => "f32",
            Kind::F16 => "f16",
            Kind::BF16 => "bf16",
            Kind::I64 => "i64",
            Kind::I32 => "i32",
            Kind::I16 => "i16",
            Kind::I8 => "i8",
            Kind::U64 => "u64",
            Kind::U32 => "u32",
            Kind::U16 => "u16",
            Kind::U8 => "u8",
            Kind::Bool => "bool",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s.to_ascii_lowercase().as_str() {
            "f64" | "float64" => Kind::F64,
            "f32" | "float32" => Kind::F32,
            "f16" | "float16" | "half" => Kind::F16,
            "bf16" | "bfloat16" => Kind::BF16,
            "i64" | "int64" => Kind::I64,
            "i32" | "int32" => Kind::I32,
            "i16" | "int16" => Kind::I16,
            "i8" | "int8" => Kind::I8,
            "u64" | "uint64" => Kind::U64,
            "u32" | "uint32" => Kind::U32,
            "u16" | "uint16" => Kind::U16,
            "u8" | "uint8" => Kind::U8,
            "bool" => Kind::Bool,
            _ => return Err(format!("{s} is no element type")),
        })
    }
}

/// A Rust type whose slices can be made of a tensor's bytes.
pub trait Plain: bytemuck::AnyBitPattern + bytemuck::NoUninit {
    /// The element type it stands for.
    const KIND: Kind;
}

macro_rules! plain {
    ($($t:ty => $kind:ident),*) => {
        $(impl Plain for $t {
            const KIND: Kind = Kind::$kind;
        })*
    };
}

plain!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, i16 => I16,
       i8 => I8, u64 => U64, u32 => U32, u16 => U16, u8 => U8);

/// A tensor of a [`Container`](super::Container): bytes in this machine's order, borrowed from the
/// mapped file where they can be.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    pub(super) path: PathBuf,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) shape: Vec<usize>,
    pub(super) fortran: bool,
    pub(super) data: Cow<'a, [u8]>,
}

impl<'a> Tensor<'a> {
    /// Name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Distance of neighbours along each axis, in elements: row-major (C), or column-major for
    /// arrays that numpy saved in Fortran order.
    pub fn strides(&self) -> Vec<isize> {
        let mut strides = vec![0; self.shape.len()];
        let mut step = 1isize;
        let mut visit = |axis: usize| {
            strides[axis] = step;
            // Cannot overflow where there is an element: the bytes exist.
            step = step.saturating_mul(isize::try_from(self.shape[axis]).unwrap_or(isize::MAX));
        };
        if self.fortran {
            (0..self.shape.len()).for_each(&mut visit);
        } else {
            (0..self.shape.len()).rev().for_each(&mut visit);
        }
        strides
    }

    /// Whether the elements lie in row-major (C) order.
    pub fn is_row_major(&self) -> bool {
        !self.fortran
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.data.len() / self.kind.size()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements' bytes, in memory order and this machine's byte order.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// This tensor, with `fault`: for callers that find one later.
    pub fn error(&self, fault: Fault) -> ContainerError {
        ContainerError::of(&self.path, &self.name, fault)
    }

    /// The elements in memory order ([`strides`](Self::strides)). Copies only if the file holds
    /// them at an address that `T` cannot have. Bools are read as `u8`.
    ///
    /// # Errors
    /// [`Fault::Type`] if the elements are no `T`.
    pub fn as_slice<T: Plain>(&self) -> Result<Cow<'_, [T]>, ContainerError> {
        let kind = if self.kind == Kind::Bool {
            Kind::U8
        } else {
            self.kind
        };
        if kind != T::KIND {
            return Err(self.error(Fault::Type {
                expected: T::KIND.name(),
                got: self.kind.name(),
            }));
        }
        Ok(match bytemuck::try_cast_slice(&self.data) {
            Ok(elements) => Cow::Borrowed(elements),
            // Length is a multiple of the size by construction, so only alignment is left.
            Err(_) => Cow::Owned(self.elements().collect()),
        })
    }

    /// The elements in memory order, read one at a time from any address.
    pub(super) fn elements<T: Plain>(&self) -> impl Iterator<Item = T> + '_ {
        self.data
            .chunks_exact(size_of::<T>())
            .map(bytemuck::pod_read_unaligned)
    }

    /// The elements in row-major order, widened to f64. 64-bit integers beyond 2^53 are rounded.
    pub fn to_f64(&self) -> Vec<f64> {
        fn widen<T: Plain>(tensor: &Tensor<'_>, to: impl Fn(T) -> f64) -> Vec<f64> {
            tensor.elements().map(to).collect()
        }
        let values = match self.kind {
            Kind::F64 => widen::<f64>(self, |x| x),
            Kind::F32 => widen::<f32>(self, f64::from),
            Kind::F16 => widen::<f16>(self, f64::from),
            Kind::BF16 => widen::<bf16>(self, f64::from),
            Kind::I64 => widen::<i64>(self, |x| x as f64),
            Kind::I32 => widen::<i32>(self, f64::from),
            Kind::I16 => widen::<i16>(self, f64::from),
            Kind::I8 => widen::<i8>(self, f64::from),
            Kind::U64 => widen::<u64>(self, |x| x as f64),
            Kind::U32 => widen::<u32>(self, f64::from),
            Kind::U16 => widen::<u16>(self, f64::from),
            Kind::U8 | Kind::Bool => widen::<u8>(self, f64::from),
        };
        self.row_major(values)
    }

    /// The elements of a float tensor in row-major order, as f32 (f64 is rounded).
    ///
    /// # Errors
    /// [`Fault::Type`] if the elements are no floats.
    pub fn to_f32(&self) -> Result<Vec<f32>, ContainerError> {
        match self.kind {
            Kind::F64 | Kind::F32 | Kind::F16 | Kind::BF16 => {
                Ok(self.to_f64().into_iter().map(|x| x as f32).collect())
            }
            other => Err(self.error(Fault::Type {
                expected: "a float type",
                got: other.name(),
            })),
        }
    }

    /// The elements of an integer tensor in row-major order, as i32: lengths and block tables.
    ///
    /// # Errors
    /// [`Fault::Type`] if the elements are no integers, [`Fault::Range`] if one does not fit.
    pub fn to_i32(&self) -> Result<Vec<i32>, ContainerError> {
        fn narrow<T>(tensor: &Tensor<'_>) -> Result<Vec<i32>, ContainerError>
        where
            T: Plain + TryInto<i32> + fmt::Display,
        {
            tensor
                .elements::<T>()
                .map(|x| {
                    x.try_into().map_err(|_| {
                        tensor.error(Fault::Range {
                            value: x.to_string(),
                            target: "i32",
                        })
                    })
                })
                .collect()
        }
        let values = match self.kind {
            Kind::I64 => narrow::<i64>(self),
            Kind::I32 => narrow::<i32>(self),
            Kind::I16 => narrow::<i16>(self),
            Kind::I8 => narrow::<i8>(self),
            Kind::U64 => narrow::<u64>(self),
            Kind::U32 => narrow::<u32>(self),
            Kind::U16 => narrow::<u16>(self),
            Kind::U8 => narrow::<u8>(self),
            other => Err(self.error(Fault::Type {
                expected: "an integer type",
                got: other.name(),
            })),
        }?;
        Ok(self.row_major(values))
    }

    /// Values in memory order, put into row-major order.
    fn row_major<T: Copy>(&self, values: Vec<T>) -> Vec<T> {
        if !self.fortran || self.shape.len() < 2 {
            return values;
        }
        let strides = self.strides();
        let mut index = vec![0usize; self.shape.len()];
        let mut position = 0isize;
        let mut ordered = Vec::with_capacity(values.len());
        for _ in 0..values.len() {
            ordered.push(values[position as usize]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                position += strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                position -= strides[axis] * index[axis] as isize;
                index[axis] = 0;
            }
        }
        ordered
    }
}

/// Elements of `size` bytes, each reversed.
pub(super) fn swap_bytes(data: &mut [u8], size: usize) {
    if size > 1 {
        data.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
}

/// Number of elements and bytes of `shape`.
///
/// # Errors
/// [`Fault::SizeOverflow`].
pub(super) fn checked_bytes(shape: &[u64], size: usize) -> Result<u64, Fault> {
    let overflow = || Fault::SizeOverflow(shape.to_vec());
    // An axis of size 0 must not hide that the others overflow: strides are made of them.
    let bytes = shape
        .iter()
        .filter(|&&dim| dim != 0)
        .try_fold(size as u64, |product, &dim| product.checked_mul(dim))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(overflow)?;
    Ok(if shape.contains(&0) { 0 } else { bytes })
}
