//! Device memory that calls leave for the next call on their stream: counters, and states of chunks of keys.
//!
//! It is allocated and freed in the order of that stream. A stream that is captured takes neither: there a
//! free would become part of the graph, of memory that is not the graph's, and break the capture, which may
//! be another thread's. So a call on such a stream has memory of its own, which the graph keeps; memory is
//! freed on a stream only by a call that is queued there, or where nobody else holds the stream any more; and
//! what a backend leaves behind while its stream is captured waits until that has ended.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdeviceptr, CUstream, CUstreamCaptureStatus};
use cudarc::driver::{CudaStream, result};
use tilewise_core::Result;

use crate::backend::make_current;
use crate::error::{allocation, driver};

/// Memory is kept for the next call on a stream up to this size.
const MOST_KEPT: u64 = 64 << 20;
/// And for so many streams.
const MOST_ROOMS: usize = 16;
/// Bytes of counters at the start of a room; all of them are 0 while nothing runs.
pub(crate) const COUNTERS: u64 = 256;
/// The handle by which each thread means a stream of its own.
const PER_THREAD: usize = 2;

/// Stream-ordered memory without cudarc's events, so that a call can be captured in a graph: taken and
/// given back on one stream.
pub(crate) struct Workspace<'a> {
    stream: &'a CudaStream,
    ptr: CUdeviceptr,
}

impl<'a> Workspace<'a> {
    pub(crate) fn new(stream: &'a CudaStream, what: &str, bytes: u64) -> Result<Workspace<'a>> {
        let ptr = allocate(stream, what, bytes.max(16))?;
        Ok(Workspace { stream, ptr })
    }

    pub(crate) fn ptr(&self) -> CUdeviceptr {
        self.ptr
    }
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated on this stream by `new`; the free is ordered after the launches that use it.
        // A failure here is a lost context, which the next call reports.
        let _ = unsafe { result::free_async(self.ptr, self.stream.cu_stream()) };
    }
}

fn allocate(stream: &CudaStream, what: &str, bytes: u64) -> Result<CUdeviceptr> {
    // SAFETY: a plain allocation on a live stream; nobody reads it before the kernels wrote it.
    unsafe { result::malloc_async(stream.cu_stream(), bytes as usize) }
        .map_err(|e| allocation(what, bytes, e))
}

/// Queues the clearing of counters.
fn clear(stream: &CudaStream, ptr: CUdeviceptr, bytes: u64) -> Result<()> {
    // SAFETY: the caller allocated that many bytes there on this stream.
    unsafe { result::memset_d8_async(ptr, 0, bytes as usize, stream.cu_stream()) }
        .map_err(|e| driver("clearing counters", e))
}

/// Memory at rest that calls on `stream` have used: whatever comes next there is ordered after them.
/// Only dropped while the stream is not captured.
#[derive(Debug)]
pub(crate) struct Room {
    stream: Arc<CudaStream>,
    ptr: CUdeviceptr,
    bytes: u64,
}

impl Room {
    /// Whether nothing is captured on its stream, as far as the driver tells.
    fn may_be_freed(&self) -> bool {
        make_current(self.stream.context());
        // SAFETY: a live stream.
        let status = unsafe { result::stream::is_capturing(self.stream.cu_stream()) };
        matches!(
            status,
            Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
        )
    }

    /// Whether nobody can begin a capture on its stream, and none has begun.
    fn is_forsaken(&self) -> bool {
        Arc::strong_count(&self.stream) == 1 && self.may_be_freed()
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        make_current(self.stream.context());
        // SAFETY: allocated on this stream, and freed in its order. A failure is a lost context, which the
        // next call reports.
        let _ = unsafe { result::free_async(self.ptr, self.stream.cu_stream()) };
    }
}

/// Rooms of backends that are gone, whose streams were captured then.
static WAITING: Mutex<Vec<Room>> = Mutex::new(Vec::new());

/// Frees those of them whose capture has ended.
fn free_waiting() {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.retain(|room| !room.may_be_freed());
}

/// The memory of one call: its own during a capture, where the graph keeps it, else a room.
pub(crate) enum States<'a> {
    Own(Workspace<'a>),
    Kept(Room),
}

impl States<'_> {
    pub(crate) fn ptr(&self) -> CUdeviceptr {
        match self {
            States::Own(own) => own.ptr,
            States::Kept(room) => room.ptr,
        }
    }
}

/// Rooms at rest. A call takes one out and puts it back when its kernels are queued, so that two
/// threads which queue on one stream never share.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Mutex<Vec<Room>>);

impl Rooms {
    /// `counters` words that are 0, as many as [`COUNTERS`] bytes at most, and `bytes` behind those.
    pub(crate) fn take<'a>(
        &self,
        stream: &'a Arc<CudaStream>,
        counters: u64,
        bytes: u64,
    ) -> Result<States<'a>> {
        let what = "the states of chunks of keys";
        let bytes = COUNTERS + bytes;
        let capturing = stream
            .capture_status()
            .map_err(|e| driver("cuStreamIsCapturing", e))?;
        let captured = capturing != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        if captured || is_per_thread(stream.cu_stream()) {
            // What a graph's memory holds when it runs is not known, and what one thread left on the
            // stream that every thread has by this handle is not ordered before another's.
            let own = Workspace::new(stream, what, bytes)?;
            if counters > 0 {
                clear(stream, own.ptr, counters * 4)?;
            }
            return Ok(States::Own(own));
        }
        let mut rest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |room: &Room| room.bytes >= bytes && Arc::ptr_eq(&room.stream, stream);
        if let Some(at) = rest.iter().position(fits) {
            return Ok(States::Kept(rest.swap_remove(at)));
        }
        // One that is too small for this stream will not be asked for again.
        rest.retain(|room| !Arc::ptr_eq(&room.stream, stream));
        drop(rest);
        free_waiting();
        let bytes = bytes.next_power_of_two();
        let room = Room {
            stream: Arc::clone(stream),
            ptr: allocate(stream, what, bytes)?,
            bytes,
        };
        clear(stream, room.ptr, COUNTERS)?;
        Ok(States::Kept(room))
    }

    /// Takes back what [`take`](Self::take) gave. A room for which there is no place is freed at once, as its
    /// call is the last that was queued on its stream.
    pub(crate) fn give(&self, states: States<'_>) {
        if let States::Kept(room) = states
            && room.bytes <= MOST_KEPT
        {
            let mut rest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            drop(keep(&mut rest, room, MOST_ROOMS, Room::is_forsaken));
        }
    }
}

impl Drop for Rooms {
    fn drop(&mut self) {
        let rest = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (free, captured): (Vec<_>, Vec<_>) = rest.drain(..).partition(Room::may_be_freed);
        drop(free);
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(captured);
        drop(waiting);
        free_waiting();
    }
}

/// Adds `one` to at most `most` that are kept; what has to go for it, which is `one` itself where no other may.
fn keep<T>(kept: &mut Vec<T>, one: T, most: usize, may_go: impl Fn(&T) -> bool) -> Option<T> {
    let gone = match kept.len() < most {
        true => None,
        false => match kept.iter().position(may_go) {
            Some(at) => Some(kept.remove(at)),
            None => return Some(one),
        },
    };
    kept.push(one);
    gone
}

fn is_per_thread(stream: CUstream) -> bool {
    stream.addr() == PER_THREAD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_go_makes_room_for_another() {
        let mut kept = Vec::new();
        for n in 1..=3 {
            assert_eq!(keep(&mut kept, n, 3, |_| true), None);
        }
        // The oldest that may go, not the oldest.
        assert_eq!(keep(&mut kept, 4, 3, |n| *n > 1), Some(2));
        assert_eq!(kept, [1, 3, 4]);
        // Where none may, the others' streams are left alone.
        assert_eq!(keep(&mut kept, 5, 3, |_| false), Some(5));
        assert_eq!(kept, [1, 3, 4]);
        assert_eq!(keep(&mut kept, 6, 3, |n| *n == 4), Some(4));
        assert_eq!(kept, [1, 3, 6]);
    }

    #[test]
    fn one_handle_means_a_stream_of_each_thread() {
        let handle = |address| std::ptr::without_provenance_mut(address);
        assert!(is_per_thread(handle(2)));
        // The default stream and one that somebody made are the same for all threads.
        assert!(!is_per_thread(handle(0)) && !is_per_thread(handle(4096)));
    }
}
