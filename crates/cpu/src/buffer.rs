//! Scratch memory: aligned to cache lines, and an error instead of an abort when there is none.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

use tilewise_core::{Error, Result};

/// `len` numbers on a cache line's boundary.
pub(crate) struct Buffer<E> {
    start: NonNull<E>,
    layout: Option<Layout>,
    owns: PhantomData<E>,
}

// SAFETY: a buffer owns plain numbers; what threads may do with its pointer is up to those who
// dereference it.
unsafe impl<E: Send> Send for Buffer<E> {}
// SAFETY: as above; the buffer itself gives out nothing but its address.
unsafe impl<E: Sync> Sync for Buffer<E> {}

impl<E: Copy> Buffer<E> {
    /// Zero at first. E must be a type for which zero bytes are a value: numbers.
    pub(crate) fn new(len: usize, what: &'static str) -> Result<Self>
    where
        E: num_traits::Zero,
    {
        Self::allocated(len, what, alloc_zeroed)
    }

    /// For what is written before it is read. The memory is touched by whoever writes it first: many
    /// workers at once, where zeros would come from the caller's thread alone.
    pub(crate) fn unfilled(len: usize, what: &'static str) -> Result<Self>
    where
        E: num_traits::Zero,
    {
        Self::allocated(len, what, alloc)
    }

    fn allocated(
        len: usize,
        what: &'static str,
        allocate: unsafe fn(Layout) -> *mut u8,
    ) -> Result<Self> {
        if len == 0 {
            return Ok(Buffer {
                start: NonNull::dangling(),
                layout: None,
                owns: PhantomData,
            });
        }
        let refuse = || Error::OutOfMemory {
            backend: "cpu".into(),
            what: what.into(),
            bytes: (len as u64).saturating_mul(size_of::<E>() as u64),
        };
        let layout = Layout::array::<E>(len)
            .and_then(|layout| layout.align_to(64))
            .map_err(|_| refuse())?;
        // SAFETY: the layout has a size above 0, for len is not 0 and E is a number.
        let start = unsafe { allocate(layout) };
        Ok(Buffer {
            start: NonNull::new(start.cast()).ok_or_else(refuse)?,
            layout: Some(layout),
            owns: PhantomData,
        })
    }

    pub(crate) fn at(&self) -> *mut E {
        self.start.as_ptr()
    }
}

impl<E> Drop for Buffer<E> {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `allocated` with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) }
        }
    }
}
