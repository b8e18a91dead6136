//! Scratch memory: aligned to cache lines, and an error instead of an abort when there is none.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use tilewise_core::{Error, Result, is_installed};

use crate::parallel::threads;

/// Bytes a thread that a backend keeps between calls at most.
///
/// Enough for what calls of a few milliseconds pack: a call that packs more takes so long that the
/// faults of new pages are lost in it.
const MOST_KEPT: usize = 4 << 20;

/// Smaller memory is not kept: the allocator has it at hand.
const LEAST_KEPT: usize = 16 << 10;

/// Memory as the allocator gave it.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block owns its memory, which nothing else points to.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// What a backend keeps of its calls' memory for those to come.
///
/// The allocator gives large blocks back to the system, and then each page of the next call's faults
/// at its first touch: 1.5 MiB in each call of 10 ms, by as many threads as there are.
#[derive(Default)]
pub(crate) struct Reserve {
    /// The longest unused first.
    kept: Mutex<Vec<Block>>,
}

impl std::fmt::Debug for Reserve {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reserve").finish_non_exhaustive()
    }
}

impl Reserve {
    /// A buffer for what is written before it is read, whose memory comes back here in the end.
    pub(crate) fn buffer<E: Copy + num_traits::Zero>(
        self: &Arc<Self>,
        len: usize,
        what: &'static str,
    ) -> Result<Buffer<E>> {
        let mut buffer: Buffer<E> = match self.take(len.saturating_mul(size_of::<E>())) {
            Some(block) => Buffer {
                start: block.start.cast(),
                block: Some(block),
                home: None,
                owns: PhantomData,
            },
            None => Buffer::unfilled(len, what)?,
        };
        buffer.home = Some(Arc::clone(self));
        // Whatever is read without having been written is NaN where assertions are compiled.
        #[cfg(debug_assertions)]
        // SAFETY: the block has at least this size; any bytes are a value of a number.
        unsafe {
            buffer
                .at()
                .cast::<u8>()
                .write_bytes(0xff, len * size_of::<E>());
        }
        Ok(buffer)
    }

    /// The smallest block that holds `bytes`, unless most of it would lie idle.
    fn take(&self, bytes: usize) -> Option<Block> {
        let mut kept = self.kept.lock().unwrap_or_else(|e| e.into_inner());
        let fits =
            |block: &&Block| (bytes..=bytes.saturating_mul(2)).contains(&block.layout.size());
        let size = kept.iter().filter(fits).map(|b| b.layout.size()).min()?;
        // In the order in which they came back: the next call of the same kind gives each of its
        // threads the memory that this thread's core has in its cache.
        let at = kept.iter().position(|b| b.layout.size() == size)?;
        Some(kept.remove(at))
    }

    fn keep(&self, block: Block) {
        let most = MOST_KEPT * threads();
        if !(LEAST_KEPT..=most).contains(&block.layout.size()) {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(|e| e.into_inner());
        kept.push(block);
        let mut sum: usize = kept.iter().map(|b| b.layout.size()).sum();
        let surplus = kept
            .iter()
            .take_while(|block| {
                let over = sum > most;
                sum -= block.layout.size();
                over
            })
            .count();
        kept.drain(..surplus);
    }
}

/// `len` numbers on a cache line's boundary.
pub(crate) struct Buffer<E> {
    start: NonNull<E>,
    block: Option<Block>,
    /// Who takes the memory back.
    home: Option<Arc<Reserve>>,
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
                block: None,
                home: None,
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
        if !is_installed(layout.size() as u64) {
            return Err(refuse());
        }
        // SAFETY: the layout has a size above 0, for len is not 0 and E is a number.
        let start = unsafe { allocate(layout) };
        let start = NonNull::new(start).ok_or_else(refuse)?;
        Ok(Buffer {
            start: start.cast(),
            block: Some(Block { start, layout }),
            home: None,
            owns: PhantomData,
        })
    }

    pub(crate) fn at(&self) -> *mut E {
        self.start.as_ptr()
    }
}

impl<E> Drop for Buffer<E> {
    fn drop(&mut self) {
        if let (Some(home), Some(block)) = (self.home.take(), self.block.take()) {
            home.keep(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(reserve: &Reserve) -> Vec<usize> {
        let kept = reserve.kept.lock().unwrap();
        kept.iter().map(|block| block.layout.size()).collect()
    }

    #[test]
    fn memory_comes_back_and_is_taken_again() {
        let reserve = Arc::new(Reserve::default());
        let first = reserve.buffer::<f32>(1 << 16, "a test").unwrap();
        let at = first.at();
        drop(first);
        assert_eq!(kept(&reserve), [4 << 16]);
        // Not by what would leave most of it idle, nor by what does not fit.
        let small = reserve.buffer::<f32>((1 << 15) - 1, "a test").unwrap();
        let large = reserve.buffer::<f32>((1 << 16) + 1, "a test").unwrap();
        assert_eq!(kept(&reserve), [4 << 16]);
        let again = reserve.buffer::<u16>(1 << 17, "a test").unwrap();
        assert_eq!(again.at().cast(), at);
        assert_eq!(kept(&reserve), []);
        drop((small, large, again));
        assert_eq!(kept(&reserve).len(), 3);
        let none = reserve.buffer::<f32>(0, "a test").unwrap();
        drop(none);
        assert_eq!(kept(&reserve).len(), 3);
    }

    #[test]
    fn no_more_is_kept_than_the_bound() {
        let reserve = Arc::new(Reserve::default());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2);
        pool.build().unwrap().install(|| {
            let megabytes = |n: usize| reserve.buffer::<u8>(n << 20, "a test").unwrap();
            let buffers: Vec<_> = [2, 3, 1, 4, 9].map(megabytes).into();
            buffers.into_iter().for_each(drop);
            // 9 MiB never; 2 MiB had to go for 4.
            assert_eq!(kept(&reserve), [3 << 20, 1 << 20, 4 << 20]);
            drop(reserve.buffer::<u8>(LEAST_KEPT - 1, "a test").unwrap());
            assert_eq!(kept(&reserve).len(), 3);
        });
    }
}
