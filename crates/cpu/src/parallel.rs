//! Work on the caller's rayon pool: items taken in order by as many workers as the pool has threads.
//!
//! rayon's own splitting is not used because order matters here: the heaviest tiles come first, and
//! a tile may wait for the packing of its keys, which must already have been taken by a running
//! worker.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Threads a call may use.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads().max(1)
}

/// One of `things`, preferring the one that has the number of the calling thread in its pool: what a
/// call keeps by thread is then in the cache of that thread's core when the next call comes.
///
/// # Panics
/// If there is none.
pub(crate) fn own<T>(things: &Mutex<Vec<Option<T>>>) -> T {
    let mut things = things.lock().unwrap_or_else(|e| e.into_inner());
    let number = rayon::current_thread_index().unwrap_or(0);
    let own = things.get_mut(number).and_then(Option::take);
    own.or_else(|| things.iter_mut().find_map(Option::take))
        .expect("one was made for each worker")
}

/// Gives items 0, 1, 2, … to workers, each with its own scratch; ends when all are done.
///
/// `work` gets the [`Crew`], with which it can wait for what an earlier item does.
pub(crate) fn in_order<S>(
    items: usize,
    workers: usize,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&Crew, &mut S, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    on_each(workers.min(items), |crew| {
        let mut scratch = scratch();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items || crew.failed() {
                break;
            }
            work(crew, &mut scratch, item);
        }
    });
}

/// Runs `worker` that many times at once, if the pool has the threads. The caller's thread takes part
/// if it is one of the pool's.
pub(crate) fn on_each(workers: usize, worker: impl Fn(&Crew) + Sync) {
    let crew = Crew::default();
    let worker = || {
        let _guard = Guard(&crew.failed);
        worker(&crew);
    };
    match workers {
        0 => {}
        1 => worker(),
        workers => rayon::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|_| worker());
            }
        }),
    }
}

/// The workers of one call, as an item sees them.
#[derive(Default)]
pub(crate) struct Crew {
    failed: AtomicBool,
}

impl Crew {
    /// Waits until `count`, which earlier items bring to 0, is 0. Earlier items are held by workers
    /// that run, so the wait is short and ends.
    pub(crate) fn wait_for(&self, count: &AtomicUsize) {
        let mut spins = 0;
        while count.load(Ordering::Acquire) != 0 {
            // A worker that panicked will not bring it down: rayon passes the panic on.
            if self.failed() {
                return;
            }
            Self::pause(&mut spins);
        }
    }

    /// A moment of a wait, of which there were `spins`.
    pub(crate) fn pause(spins: &mut u32) {
        *spins += 1;
        if *spins < 200 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Whether some worker panicked: what was waited for may not be there.
    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}

/// Tells the other workers if this one unwinds.
struct Guard<'a>(&'a AtomicBool);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
