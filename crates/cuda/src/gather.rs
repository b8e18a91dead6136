//! Rows of host tensors on their way to the device, whole chunks at a time.
//!
//! Where a tensor lies in page-locked memory one row after another, the bus reads it in place. Else threads
//! gather pieces into page-locked memory, each thread around a ring of its own and on a stream of its own.
//! A ring is so small that the bus finds a piece in a cache: memory is read once, and not written.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, mpsc};

use cudarc::driver::sys::{self, CUdeviceptr, CUpointer_attribute};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use tilewise_core::{BlockTable, Element, Error, Result, Sequence, TensorView};

use crate::backend::{CudaBackend, make_current, wait_for};
use crate::error::{allocation, driver};

/// Bytes of a piece: eight threads with two of these each keep the bus of an H200's host at 93 % of its
/// rate, with three of a quarter 83 %; more threads gain nothing.
const PIECE: usize = 4 << 20;
/// Pieces of a ring.
const SLOTS: usize = 2;
/// Most threads that gather.
const MOST_THREADS: usize = 8;

/// Page-locked host memory.
#[derive(Debug)]
struct Pinned {
    context: Arc<CudaContext>,
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: a plain allocation that any thread may use; who writes there says why nobody else does.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Pinned> {
        // SAFETY: a plain allocation; the context is bound by the caller.
        let ptr = unsafe { result::malloc_host(bytes.max(1), 0) }
            .map_err(|e| allocation("page-locked memory for pieces of keys", bytes as u64, e))?;
        Ok(Pinned {
            context: Arc::clone(context),
            ptr: ptr.cast(),
            bytes,
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        make_current(&self.context);
        // SAFETY: allocated by `new`; whoever drops it has waited for the copies from it. A failure is
        // a lost context, which the next call reports.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
    }
}

/// Rings at rest: page-locking costs as much as moving a few times the bytes.
#[derive(Debug, Default)]
pub(crate) struct Rings(Mutex<Vec<Pinned>>);

impl Rings {
    fn take(&self, backend: &CudaBackend, bytes: usize) -> Result<Pinned> {
        let mut rest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match rest.iter().position(|ring| ring.bytes >= bytes) {
            Some(at) => Ok(rest.swap_remove(at)),
            None => Pinned::new(backend.context(), bytes),
        }
    }

    fn give(&self, rings: impl Iterator<Item = Pinned>) {
        let mut rest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rest.extend(rings);
        rest.truncate(MOST_THREADS);
    }
}

/// Whether all of `data` is page-locked memory that the driver knows.
fn page_locked<T>(data: &[T]) -> bool {
    let bytes = size_of_val(data) as u64;
    let at = data.as_ptr() as CUdeviceptr;
    let (mut start, mut size) = (0 as CUdeviceptr, 0usize);
    let mut asked = [
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut answers: [*mut c_void; 2] = [(&raw mut start).cast(), (&raw mut size).cast()];
    // SAFETY: two attributes, and for each a place of the type that the driver documents for it. Of memory
    // that it does not know the driver says a size of 0.
    let answered =
        unsafe { sys::cuPointerGetAttributes(2, asked.as_mut_ptr(), answers.as_mut_ptr(), at) };
    let begun = at.checked_sub(start);
    answered.result().is_ok()
        && bytes > 0
        && begun.is_some_and(|begun| begun.saturating_add(bytes) <= size as u64)
}

/// Rows of one of the caller's tensors, by sequence, head and key.
pub(crate) struct Source<'a, T> {
    view: &'a TensorView<'a, T>,
    /// Pages and their size.
    table: Option<(&'a BlockTable<'a>, usize)>,
}

impl<'a, T: Element> Source<'a, T> {
    pub(crate) fn new(
        view: &'a TensorView<'a, T>,
        table: Option<(&'a BlockTable<'a>, usize)>,
    ) -> Source<'a, T> {
        Source { view, table }
    }

    /// Whether the bus can read it in place.
    fn direct(&self) -> bool {
        self.dense() && page_locked(self.view.data())
    }

    fn width(&self) -> usize {
        self.view.shape()[3]
    }

    /// Whether the keys of a head lie one after another.
    fn dense(&self) -> bool {
        let strides = self.view.strides();
        self.table.is_none() && strides[3] == 1 && strides[2] == self.width() as isize
    }

    /// Keys of one head that lie one after another.
    fn run(&self, sequence: &Sequence, head: usize, keys: &Range<usize>) -> &'a [T] {
        let first = [sequence.k_batch, head, sequence.k_start + keys.start, 0];
        &self.view.data()[self.view.position(first)..][..keys.len() * self.width()]
    }

    /// Copies keys of one head to `to`, one after another.
    ///
    /// # Safety
    /// `to` has room for them, and nobody else writes there.
    unsafe fn gather(&self, sequence: &Sequence, head: usize, keys: &Range<usize>, to: *mut T) {
        let width = self.width();
        if self.dense() {
            let rows = self.run(sequence, head, keys);
            // SAFETY: the caller's promise; the slice is of as many elements.
            unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), to, rows.len()) };
            return;
        }
        for (n, key) in keys.clone().enumerate() {
            let (batch, position) = match self.table {
                Some((table, size)) => {
                    let page = table.pages[sequence.k_batch * table.width + key / size];
                    (page as usize, key % size)
                }
                None => (sequence.k_batch, sequence.k_start + key),
            };
            let to = to.wrapping_add(n * width);
            match self.view.contiguous_row(batch, head, position) {
                // SAFETY: as above.
                Some(row) => unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, width) },
                None => {
                    for (c, x) in self.view.row(batch, head, position).enumerate() {
                        // SAFETY: as above.
                        unsafe { to.wrapping_add(c).write(x) };
                    }
                }
            }
        }
    }
}

/// A chunk: keys of some heads of a sequence, and where on the device they go, head after head.
pub(crate) struct Chunk<'a> {
    pub(crate) sequence: &'a Sequence,
    pub(crate) heads: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// K's and V's.
    pub(crate) to: [CUdeviceptr; 2],
    /// Recorded when what was there before is no longer needed.
    pub(crate) free: &'a CudaEvent,
}

/// A thread's own means.
struct Gatherer {
    stream: Arc<CudaStream>,
    ring: Option<Pinned>,
    /// Passed when the copy from a slot has.
    left: Vec<CudaEvent>,
    /// Passed when this thread's copies of a chunk have, for each chunk in flight.
    copied: Vec<CudaEvent>,
}

/// The gatherers of one call.
pub(crate) struct Gatherers<'a, T> {
    backend: &'a CudaBackend,
    tensors: [Source<'a, T>; 2],
    each: Vec<Gatherer>,
    /// The next piece of a chunk that nobody has taken, for each chunk in flight.
    next: Vec<AtomicUsize>,
    stop: AtomicBool,
    failed: Mutex<Option<Error>>,
}

/// Where the gatherers that there are meet the caller: before a chunk and after it.
struct Meeting {
    start: Barrier,
    end: Barrier,
}

impl<'a, T: Element> Gatherers<'a, T> {
    /// For chunks of at most `bytes`, of which `flight` are in flight at a time. The context is bound.
    pub(crate) fn new(
        backend: &'a CudaBackend,
        tensors: [Source<'a, T>; 2],
        bytes: usize,
        flight: usize,
    ) -> Result<Gatherers<'a, T>> {
        let direct = tensors.iter().all(Source::direct);
        let threads = if direct {
            1
        } else {
            std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(bytes.div_ceil(PIECE))
                .clamp(1, MOST_THREADS)
        };
        let mut gatherers = Gatherers {
            backend,
            tensors,
            each: Vec::with_capacity(threads),
            next: (0..flight).map(|_| AtomicUsize::new(0)).collect(),
            stop: AtomicBool::new(false),
            failed: Mutex::new(None),
        };
        for _ in 0..threads {
            let events = |count| {
                (0..count)
                    .map(|_| backend.new_event())
                    .collect::<Result<Vec<_>>>()
            };
            let ring = if direct {
                None
            } else {
                Some(backend.rings().take(backend, SLOTS * PIECE)?)
            };
            gatherers.each.push(Gatherer {
                stream: backend.take_stream()?,
                ring,
                left: events(SLOTS)?,
                copied: events(flight)?,
            });
        }
        Ok(gatherers)
    }

    /// Runs `work` beside the gatherers, which take `chunks` in order as the [`Turns`] given to it say.
    pub(crate) fn beside<R>(
        &self,
        chunks: &[Chunk<'_>],
        work: impl FnOnce(&mut Turns<'_, 'a, T>) -> Result<R>,
    ) -> Result<R>
    where
        T: Send + Sync,
    {
        let done = std::thread::scope(|scope| {
            let mut team = Vec::with_capacity(self.each.len());
            for own in &self.each {
                let (tell, told) = mpsc::channel::<Arc<Meeting>>();
                let serve = move || {
                    if let Ok(meeting) = told.recv() {
                        self.serve(own, &meeting, chunks);
                    }
                };
                match std::thread::Builder::new().spawn_scoped(scope, serve) {
                    Ok(_) => team.push(tell),
                    Err(error) if team.is_empty() => {
                        return Err(Error::Backend {
                            backend: crate::NAME.into(),
                            op: "starting a thread that gathers keys".into(),
                            message: error.to_string(),
                        });
                    }
                    // As many as the system gives: they share the pieces.
                    Err(_) => break,
                }
            }
            let meeting = Arc::new(Meeting {
                start: Barrier::new(team.len() + 1),
                end: Barrier::new(team.len() + 1),
            });
            for tell in team {
                let _ = tell.send(Arc::clone(&meeting));
            }
            let mut turns = Turns {
                gatherers: self,
                meeting,
                chunks: chunks.len(),
                begun: 0,
                ended: 0,
            };
            work(&mut turns)
        })?;
        match self.failure() {
            Some(error) => Err(error),
            None => Ok(done),
        }
    }

    fn failure(&self) -> Option<Error> {
        let failed = &self.failed;
        failed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn serve(&self, own: &Gatherer, meeting: &Meeting, chunks: &[Chunk<'_>]) {
        let mut turn = 0;
        let fail = |error| {
            self.failed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(error);
        };
        if let Err(error) = self.backend.bind() {
            fail(error);
        }
        for (number, chunk) in chunks.iter().enumerate() {
            meeting.start.wait();
            if self.stop.load(Ordering::Acquire) {
                break;
            }
            if let Err(error) = self.bring(own, &mut turn, number, chunk) {
                fail(error);
            }
            meeting.end.wait();
        }
        // Nothing that these copies read or write may go before they have passed.
        if let Err(error) = wait_for(&own.stream) {
            fail(error);
        }
    }

    /// This thread's share of a chunk: pieces that no other thread has taken.
    fn bring(
        &self,
        own: &Gatherer,
        turn: &mut usize,
        number: usize,
        chunk: &Chunk<'_>,
    ) -> Result<()> {
        let stage = number % self.next.len();
        if number >= self.next.len() {
            own.stream
                .wait(chunk.free)
                .map_err(|e| driver("cuStreamWaitEvent", e))?;
        }
        let keys = chunk.keys.len();
        // Rows a piece, and pieces a head, of K and of V.
        let cut = self.tensors.each_ref().map(|source| {
            let row = source.width() * size_of::<T>();
            let rows = match (own.ring.is_some(), row) {
                (true, 1..) => (PIECE / row).max(1),
                _ => keys.max(1),
            };
            (rows, if row == 0 { 0 } else { keys.div_ceil(rows) })
        });
        let a_head = cut[0].1 + cut[1].1;
        loop {
            let piece = self.next[stage].fetch_add(1, Ordering::Relaxed);
            let (n, of_head) = match piece.checked_div(a_head) {
                Some(n) if n < chunk.heads.len() => (n, piece % a_head),
                _ => break,
            };
            let (which, index) = if of_head < cut[0].1 {
                (0, of_head)
            } else {
                (1, of_head - cut[0].1)
            };
            let source = &self.tensors[which];
            let rows = index * cut[which].0..((index + 1) * cut[which].0).min(keys);
            let row = source.width() * size_of::<T>();
            let to = chunk.to[which] + ((n * keys + rows.start) * row) as u64;
            let part = chunk.keys.start + rows.start..chunk.keys.start + rows.end;
            let head = chunk.heads.start + n;
            let copy = |from: &[u8]| {
                // SAFETY: the stage has room for all rows of the chunk, nobody uses it until `copied`
                // has passed, and `from` outlives the copy: the caller's tensor, which the end of
                // `serve` waits for, or a slot, which is not written before its event has passed.
                unsafe { result::memcpy_htod_async(to, from, own.stream.cu_stream()) }
                    .map_err(|e| driver("copying a chunk of keys", e))
            };
            let Some(ring) = &own.ring else {
                let run = source.run(chunk.sequence, head, &part);
                // SAFETY: elements are plain numbers.
                copy(unsafe {
                    std::slice::from_raw_parts(run.as_ptr().cast::<u8>(), size_of_val(run))
                })?;
                continue;
            };
            let slot = *turn % SLOTS;
            if *turn >= SLOTS {
                own.left[slot]
                    .synchronize()
                    .map_err(|e| driver("cuEventSynchronize", e))?;
            }
            *turn += 1;
            let place = ring.ptr.wrapping_add(slot * PIECE);
            // SAFETY: a slot holds a piece and is aligned for any element; this thread's alone, and the
            // copy from it has passed.
            unsafe {
                source.gather(chunk.sequence, head, &part, place.cast::<T>());
                copy(std::slice::from_raw_parts(place, rows.len() * row))?;
            }
            own.left[slot]
                .record(&own.stream)
                .map_err(|e| driver("cuEventRecord", e))?;
        }
        own.copied[stage]
            .record(&own.stream)
            .map_err(|e| driver("cuEventRecord", e))
    }
}

impl<T> Drop for Gatherers<'_, T> {
    fn drop(&mut self) {
        // The threads are gone, and waited for their copies.
        let rings = self.each.iter_mut().filter_map(|own| own.ring.take());
        self.backend.rings().give(rings);
        for own in &self.each {
            self.backend.give_stream(Arc::clone(&own.stream));
        }
    }
}

/// Whose turn it is: the gatherers bring chunk after chunk, one ahead of what the caller asks for.
pub(crate) struct Turns<'g, 'a, T> {
    gatherers: &'g Gatherers<'a, T>,
    meeting: Arc<Meeting>,
    chunks: usize,
    begun: usize,
    ended: usize,
}

impl<T: Element> Turns<'_, '_, T> {
    /// Lets the gatherers begin with a chunk; its `free` must have been recorded before.
    fn begin(&mut self) {
        if self.begun < self.chunks {
            let stage = self.begun % self.gatherers.next.len();
            self.gatherers.next[stage].store(0, Ordering::Relaxed);
            self.meeting.start.wait();
            self.begun += 1;
        }
    }

    /// Waits until all copies of the next chunk are queued, lets the gatherers go on with the one after
    /// it, and orders `stream` after the copies.
    ///
    /// # Errors
    /// The first failure of a gatherer.
    pub(crate) fn next(&mut self, stream: &CudaStream) -> Result<()> {
        if self.begun == self.ended {
            self.begin();
        }
        let stage = self.ended % self.gatherers.next.len();
        self.meeting.end.wait();
        self.ended += 1;
        self.begin();
        if let Some(error) = self.gatherers.failure() {
            return Err(error);
        }
        self.gatherers.each.iter().try_for_each(|own| {
            stream
                .wait(&own.copied[stage])
                .map_err(|e| driver("cuStreamWaitEvent", e))
        })
    }
}

impl<T> Drop for Turns<'_, '_, T> {
    // On every way out, so that no gatherer waits for ever.
    fn drop(&mut self) {
        if self.begun > self.ended {
            self.meeting.end.wait();
        }
        if self.begun < self.chunks {
            self.gatherers.stop.store(true, Ordering::Release);
            self.meeting.start.wait();
        }
    }
}
