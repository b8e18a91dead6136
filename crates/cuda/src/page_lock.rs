//! Host memory that the bus may read in place.

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use cudarc::driver::{CudaContext, sys};
use tilewise_core::Result;

use crate::backend::{CudaBackend, make_current};
use crate::error::{allocation, driver};

/// Held by calls that may read page-locked memory in place, and by the end of a lock alone: the borrow of a
/// [`PageLocked`] is not what keeps its pages, for the slice that it was made of can be streamed as well.
static IN_PLACE: RwLock<()> = RwLock::new(());

/// No lock ends while this lives.
pub(crate) fn in_place() -> RwLockReadGuard<'static, ()> {
    IN_PLACE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of the caller's, page-locked for as long as this lives.
///
/// K and V that are streamed from host memory (`CudaOptions::device_memory`) and lie in such memory one
/// row after another are read in place at the rate of the bus; what is not page-locked is gathered first.
/// Locking a GiB takes about as long as moving two or three, so it pays for what is used again. Memory
/// that was allocated page-locked needs none of this: it is recognised as it is.
///
/// Its end waits for calls that are streaming meanwhile.
///
/// A lock that is leaked keeps the pages, and what is allocated at these addresses later must not be
/// streamed.
#[derive(Debug)]
pub struct PageLocked<'a, T> {
    data: &'a [T],
    context: Arc<CudaContext>,
}

impl<'a, T> PageLocked<'a, T> {
    /// Locks `data` where it lies.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](tilewise_core::Error::OutOfMemory) where the system locks no more, else the driver's refusal: of memory that
    /// is locked already, for one.
    pub fn new(backend: &CudaBackend, data: &'a [T]) -> Result<PageLocked<'a, T>> {
        backend.bind()?;
        let bytes = size_of_val(data);
        let lock = |flags| {
            // SAFETY: `data` is borrowed for as long as it stays locked. The device only reads it.
            unsafe { sys::cuMemHostRegister_v2(data.as_ptr() as *mut c_void, bytes, flags) }
                .result()
        };
        if bytes > 0 {
            // A file that is mapped for reading can only be locked so, which not every system knows.
            lock(0)
                .or_else(|error| lock(sys::CU_MEMHOSTREGISTER_READ_ONLY).map_err(|_| error))
                .map_err(|e| match e.0 {
                    sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                        allocation("page-locking memory in place", bytes as u64, e)
                    }
                    _ => driver("cuMemHostRegister", e),
                })?;
        }
        Ok(PageLocked {
            data,
            context: Arc::clone(backend.context()),
        })
    }
}

impl<T> Deref for PageLocked<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.data
    }
}

impl<T> Drop for PageLocked<'_, T> {
    fn drop(&mut self) {
        if size_of_val(self.data) > 0 {
            let _none = IN_PLACE.write().unwrap_or_else(PoisonError::into_inner);
            make_current(&self.context);
            // SAFETY: locked by `new`; no call reads it in place now. A failure is a lost context, which
            // the next call reports.
            let _ = unsafe { sys::cuMemHostUnregister(self.data.as_ptr() as *mut c_void) }.result();
        }
    }
}
