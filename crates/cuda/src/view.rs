//! Tensors in device memory as they lie: cudarc slices or raw pointers, with strides.

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    SyncOnDrop,
};
use tilewise_core::{DType, Element, Error, Result};

use crate::raw;

/// cudarc memory that can be read, its element type forgotten.
pub trait Source: std::fmt::Debug {
    /// The address for use on `stream`; the guard keeps cudarc's book of which stream reads it.
    fn acquire<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>);
}

/// cudarc memory that can be written, its element type forgotten.
pub trait Target: std::fmt::Debug {
    /// As [`Source::acquire`].
    fn acquire_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>);
}

impl<T: std::fmt::Debug> Source for CudaSlice<T> {
    fn acquire<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.device_ptr(stream)
    }
}
impl<T: std::fmt::Debug> Source for CudaView<'_, T> {
    fn acquire<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.device_ptr(stream)
    }
}
impl<T: std::fmt::Debug> Target for CudaSlice<T> {
    fn acquire_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.device_ptr_mut(stream)
    }
}
impl<T: std::fmt::Debug> Target for CudaViewMut<'_, T> {
    fn acquire_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.device_ptr_mut(stream)
    }
}

/// Row-major strides of a `[batch, heads, seqlen, head_dim]` tensor.
pub fn contiguous(shape: [usize; 4]) -> [isize; 4] {
    let [_, h, s, d] = shape.map(|n| n as isize);
    [h * s * d, s * d, d, 1]
}

/// Checks that every element lies in `len` elements from `offset` on.
fn check(shape: [usize; 4], strides: [isize; 4], offset: usize, len: usize) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (dim, stride) in shape.into_iter().zip(strides) {
        let reach = (dim as i128 - 1) * stride as i128;
        low = low.saturating_add(reach.min(0));
        high = high.saturating_add(reach.max(0));
    }
    if low < 0 || high >= len as i128 {
        return Err(Error::View {
            tensor: "tensor".into(),
            problem: "the view reaches outside its memory",
            shape,
            strides,
            offset,
            len,
        });
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    Raw(u64),
    Slice(&'a dyn Source),
}

impl Place<'_> {
    fn acquire<'s>(&'s self, stream: &'s CudaStream) -> (u64, Option<SyncOnDrop<'s>>) {
        match *self {
            Place::Raw(ptr) => (ptr, None),
            Place::Slice(memory) => {
                let (ptr, guard) = memory.acquire(stream);
                (ptr, Some(guard))
            }
        }
    }
}

/// An input in device memory: any strides, 0 and negative included.
///
/// Rows whose address and strides are multiples of 16 bytes, with neighbouring elements, are read as
/// they lie at full speed; others are read element by element.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    place: Place<'a>,
    dtype: DType,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl<'a> DeviceView<'a> {
    /// Row-major `[batch, heads, seqlen, head_dim]` in a cudarc slice or view.
    ///
    /// # Errors
    /// [`Error::View`] if it is too short.
    pub fn bhsd<T, S>(memory: &'a S, shape: [usize; 4]) -> Result<Self>
    where
        T: Element + DeviceRepr,
        S: Source + DeviceSlice<T>,
    {
        Self::from_strides(memory, shape, contiguous(shape), 0)
    }

    /// Any strides, in elements, from element `offset` of a cudarc slice or view on.
    ///
    /// # Errors
    /// [`Error::View`] if an element would lie outside.
    pub fn from_strides<T, S>(
        memory: &'a S,
        shape: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self>
    where
        T: Element + DeviceRepr,
        S: Source + DeviceSlice<T>,
    {
        check(shape, strides, offset, memory.len())?;
        Ok(DeviceView {
            place: Place::Slice(memory),
            dtype: T::DTYPE,
            shape,
            strides,
            offset,
        })
    }

    /// A device address, for memory of other libraries.
    ///
    /// # Safety
    /// Every element that shape and strides (in elements) reach from `ptr` must be readable by the
    /// device until the work that takes this view has passed on its stream, and nothing may write
    /// there meanwhile.
    pub unsafe fn from_raw(
        ptr: u64,
        dtype: DType,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> DeviceView<'static> {
        DeviceView {
            place: Place::Raw(ptr),
            dtype,
            shape,
            strides,
            offset: 0,
        }
    }

    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn acquire<'s>(
        &'s self,
        stream: &'s CudaStream,
    ) -> (raw::Tensor, Option<SyncOnDrop<'s>>) {
        let (base, guard) = self.place.acquire(stream);
        let ptr = base + (self.offset * self.dtype.size()) as u64;
        (tensor(ptr, self.strides), guard)
    }
}

#[derive(Debug)]
enum PlaceMut<'a> {
    Raw(u64),
    Slice(&'a mut dyn Target),
}

/// An output in device memory: neighbouring elements in a row, no two elements in one place.
#[derive(Debug)]
pub struct DeviceViewMut<'a> {
    place: PlaceMut<'a>,
    dtype: DType,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl<'a> DeviceViewMut<'a> {
    /// Row-major `[batch, heads, seqlen, head_dim]` in a cudarc slice or view.
    ///
    /// # Errors
    /// [`Error::View`] if it is too short.
    pub fn bhsd<T, S>(memory: &'a mut S, shape: [usize; 4]) -> Result<Self>
    where
        T: Element + DeviceRepr,
        S: Target + DeviceSlice<T>,
    {
        Self::from_strides(memory, shape, contiguous(shape), 0)
    }

    /// Positive strides, in elements, the last one 1, from element `offset` on.
    ///
    /// # Errors
    /// [`Error::View`] if an element would lie outside, rows are not contiguous, or elements share
    /// memory.
    pub fn from_strides<T, S>(
        memory: &'a mut S,
        shape: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self>
    where
        T: Element + DeviceRepr,
        S: Target + DeviceSlice<T>,
    {
        let len = memory.len();
        check(shape, strides, offset, len)?;
        check_output(shape, strides, offset, len)?;
        Ok(DeviceViewMut {
            place: PlaceMut::Slice(memory),
            dtype: T::DTYPE,
            shape,
            strides,
            offset,
        })
    }

    /// A device address, for memory of other libraries.
    ///
    /// # Errors
    /// [`Error::View`] if rows are not contiguous or elements share memory.
    ///
    /// # Safety
    /// Every element that shape and strides (in elements) reach from `ptr` must be writable by the
    /// device, and nothing else may touch it, until the work that takes this view has passed on its
    /// stream.
    pub unsafe fn from_raw(
        ptr: u64,
        dtype: DType,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<DeviceViewMut<'static>> {
        check_output(shape, strides, 0, usize::MAX)?;
        Ok(DeviceViewMut {
            place: PlaceMut::Raw(ptr),
            dtype,
            shape,
            strides,
            offset: 0,
        })
    }

    /// `[batch, heads, seqlen, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn acquire<'s>(
        &'s mut self,
        stream: &'s CudaStream,
    ) -> (raw::Tensor, Option<SyncOnDrop<'s>>) {
        let (base, guard) = match &mut self.place {
            PlaceMut::Raw(ptr) => (*ptr, None),
            PlaceMut::Slice(memory) => {
                let (ptr, guard) = memory.acquire_mut(stream);
                (ptr, Some(guard))
            }
        };
        let ptr = base + (self.offset * self.dtype.size()) as u64;
        (tensor(ptr, self.strides), guard)
    }
}

/// A boolean tensor in device memory, a byte an element, 0 = false; any strides, 0 included.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMask<'a> {
    place: Place<'a>,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl<'a> DeviceMask<'a> {
    /// Any strides from element `offset` of a cudarc slice or view on.
    ///
    /// # Errors
    /// [`Error::View`] if an element would lie outside.
    pub fn from_strides<S>(
        memory: &'a S,
        shape: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self>
    where
        S: Source + DeviceSlice<u8>,
    {
        check(shape, strides, offset, memory.len())?;
        Ok(DeviceMask {
            place: Place::Slice(memory),
            shape,
            strides,
            offset,
        })
    }

    /// A device address, for memory of other libraries.
    ///
    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub unsafe fn from_raw(
        ptr: u64,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> DeviceMask<'static> {
        DeviceMask {
            place: Place::Raw(ptr),
            shape,
            strides,
            offset: 0,
        }
    }

    /// `[batch, num_heads, seqlen_q, seqlen_k]`, or 1 in any axis.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    pub(crate) fn acquire<'s>(
        &'s self,
        stream: &'s CudaStream,
    ) -> (raw::Tensor, Option<SyncOnDrop<'s>>) {
        let (base, guard) = self.place.acquire(stream);
        (tensor(base + self.offset as u64, self.strides), guard)
    }
}

/// `t` of shape `shape` read as one of shape `full`: axes of size 1 get stride 0. `None` where an axis
/// fits neither.
pub(crate) fn broadcast(
    mut t: raw::Tensor,
    shape: [usize; 4],
    full: [usize; 4],
) -> Option<raw::Tensor> {
    let strides = [&mut t.sb, &mut t.sh, &mut t.ss, &mut t.sd];
    for ((stride, n), wanted) in strides.into_iter().zip(shape).zip(full) {
        match n {
            1 => *stride = 0,
            n if n == wanted => {}
            _ => return None,
        }
    }
    Some(t)
}

fn check_output(shape: [usize; 4], strides: [isize; 4], offset: usize, len: usize) -> Result<()> {
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
    if shape.contains(&0) {
        return Ok(());
    }
    if shape[3] > 1 && strides[3] != 1 {
        return refuse("an output's last stride must be 1");
    }
    let mut axes: Vec<(isize, usize)> = (0..4)
        .filter(|&axis| shape[axis] > 1)
        .map(|axis| (strides[axis], shape[axis]))
        .collect();
    axes.sort_unstable();
    let mut covered = 1i128;
    for (stride, dim) in axes {
        if (stride as i128) < covered {
            return refuse("an output's elements must not share memory");
        }
        covered += stride as i128 * (dim as i128 - 1);
    }
    Ok(())
}

pub(crate) fn tensor(ptr: u64, strides: [isize; 4]) -> raw::Tensor {
    let [sb, sh, ss, sd] = strides.map(|s| s as i64);
    raw::Tensor {
        ptr,
        sb,
        sh,
        ss,
        sd,
    }
}

/// Whether rows can be moved sixteen bytes at a time.
pub(crate) fn aligned(t: &raw::Tensor, shape: [usize; 4], dtype: DType) -> bool {
    let size = dtype.size() as i64;
    let fits = |x: i64| x * size % 16 == 0;
    t.ptr.is_multiple_of(16)
        && (t.sd == 1 || shape[3] <= 1)
        && (shape[3] * dtype.size()).is_multiple_of(16)
        && [(t.sb, shape[0]), (t.sh, shape[1]), (t.ss, shape[2])]
            .iter()
            .all(|&(stride, n)| n <= 1 || fits(stride))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_outputs_that_overlap_or_are_strided_are_refused() {
        // SAFETY: the address is never used.
        let make =
            |strides| unsafe { DeviceViewMut::from_raw(16, DType::F32, [2, 2, 4, 8], strides) };
        assert!(make([64, 32, 8, 1]).is_ok());
        assert!(make([64, 8, 16, 1]).is_ok());
        assert!(make([64, 32, 4, 1]).is_err());
        assert!(make([64, 32, 1, 4]).is_err());
        assert!(make([0, 32, 8, 1]).is_err());
    }

    #[test]
    fn alignment_is_of_address_strides_and_rows() {
        let t = tensor(1 << 20, [4096, 1024, 64, 1]);
        assert!(aligned(&t, [2, 4, 16, 64], DType::F16));
        assert!(!aligned(&t, [2, 4, 16, 60], DType::F16));
        assert!(!aligned(
            &tensor((1 << 20) + 2, [4096, 1024, 64, 1]),
            [2, 4, 16, 64],
            DType::F16
        ));
        assert!(!aligned(
            &tensor(1 << 20, [4096, 1024, 65, 1]),
            [2, 4, 16, 64],
            DType::F16
        ));
        assert!(aligned(
            &tensor(1 << 20, [4096, 1024, 65, 1]),
            [2, 4, 1, 64],
            DType::F16
        ));
        assert!(!aligned(
            &tensor(1 << 20, [4096, 1024, 64, 2]),
            [2, 4, 16, 64],
            DType::F16
        ));
    }
}
