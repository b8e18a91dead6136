//! Work on the caller's rayon pool: items taken in order by as many workers as the pool has threads.
//!
//! rayon's own splitting is not used because order matters here: the heaviest tiles come first, and
//! a tile may wait for the packing of its keys, which must already have been taken by a running
//! worker.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Threads a call may use.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads().max(1)
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
    let crew = Crew::default();
    let next = AtomicUsize::new(0);
    let worker = || {
        let _guard = Guard(&crew.failed);
        let mut scratch = scratch();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items || crew.failed.load(Ordering::Relaxed) {
                break;
            }
            work(&crew, &mut scratch, item);
        }
    };
    match workers.min(items) {
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
        let mut spins = 0u32;
        while count.load(Ordering::Acquire) != 0 {
            // A worker that panicked will not bring it down: rayon passes the panic on.
            if self.failed.load(Ordering::Relaxed) {
                return;
            }
            spins += 1;
            if spins < 200 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
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
