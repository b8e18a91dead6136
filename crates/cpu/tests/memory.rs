//! What a call allocates, counted: packed K and V of the heads in flight and a tile a thread, never
//! N².

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewise_core::half::bf16;
use tilewise_core::{
    Algorithm, Backend, BackwardInputs, Gradients, Inputs, Options, Problem, TensorView,
    TensorViewMut,
};
use tilewise_cpu::{CpuBackend, CpuElement};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// So many threads.
fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
}

/// Peak of extra heap during each of `calls` calls of one backend, what it said beforehand, and what it
/// kept in the end.
fn peaks(
    calls: usize,
    algorithm: Algorithm,
    heads: usize,
    n: usize,
    d: usize,
    threads: usize,
) -> (Vec<usize>, usize, usize) {
    let data: Vec<f32> = (0..heads * n * d)
        .map(|i| (i % 17) as f32 * 0.1 - 0.8)
        .collect();
    let view = TensorView::bhsd(&data, [1, heads, n, d]).unwrap();
    let inputs = Inputs::new(view, view, view);
    let problem = Problem::new(&inputs, &Options::new().causal(true)).unwrap();
    let mut out = vec![0.0f32; data.len()];
    let backend = CpuBackend::new().unwrap();
    pool(threads).install(|| {
        let said = backend.workspace_bytes(&problem, algorithm) as usize;
        let start = NOW.load(Ordering::Relaxed);
        let mut call = || {
            let before = NOW.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let out = TensorViewMut::bhsd(&mut out, [1, heads, n, d]).unwrap();
            backend
                .forward_into(&problem, &inputs, algorithm, out, None)
                .unwrap();
            PEAK.load(Ordering::Relaxed) - before
        };
        let extra = (0..calls).map(|_| call()).collect();
        let kept = NOW.load(Ordering::Relaxed).saturating_sub(start);
        (extra, said, kept)
    })
}

/// Peak of extra heap during a backend's first call, and what it said beforehand.
fn peak(algorithm: Algorithm, heads: usize, n: usize, d: usize, threads: usize) -> (usize, usize) {
    let (extra, said, _) = peaks(1, algorithm, heads, n, d, threads);
    (extra[0], said)
}

/// The same of a backward pass of `fa2`.
fn backward_peak<T: CpuElement>(
    heads: usize,
    n: usize,
    d: usize,
    threads: usize,
) -> (usize, usize) {
    let data: Vec<T> = (0..heads * n * d)
        .map(|i| T::from_f64((i % 17) as f64 * 0.1 - 0.8))
        .collect();
    let lse = vec![(n as f32).ln(); heads * n];
    let view = TensorView::bhsd(&data, [1, heads, n, d]).unwrap();
    let lse = TensorView::bhsd(&lse, [1, heads, n, 1]).unwrap();
    let inputs = BackwardInputs::new(Inputs::new(view, view, view), view, lse, view);
    let problem = inputs.problem(&Options::new().causal(true)).unwrap();
    let mut gradients = Gradients::filled(&problem, &inputs.inputs, 0.0).unwrap();
    let backend = CpuBackend::new().unwrap();
    pool(threads).install(|| {
        let said = backend.backward_workspace_bytes(&problem, Algorithm::Fa2) as usize;
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let views = gradients.views_mut().unwrap();
        backend
            .backward_into(&problem, &inputs, Algorithm::Fa2, views)
            .unwrap();
        (PEAK.load(Ordering::Relaxed) - before, said)
    })
}

fn backward_is_linear<T: CpuElement>(d: usize, threads: usize) {
    backward_peak::<T>(2, 256, d, threads);
    let mut last = usize::MAX / 4;
    for n in [2048, 4096] {
        let (extra, said) = backward_peak::<T>(3, n, d, threads);
        let dtype = T::DTYPE;
        assert!(
            extra <= said + said / 8 + (64 << 10),
            "backward, {dtype}, {threads} threads, {n}: {extra} of {said} bytes"
        );
        assert!(
            extra < 2 * last + (64 << 10),
            "{dtype}: {last} then {extra}"
        );
        last = extra;
    }
}

// One test: the counters are the process's.
#[test]
fn extra_memory_is_linear_and_as_announced() {
    let d = 64;
    for threads in [1, 2] {
        for algorithm in Algorithm::ALL {
            // The first call fills what rayon and the library keep.
            peak(algorithm, 2, 256, d, threads);
            for (heads, n) in [(1, 300), (4, 1024), (3, 2048)] {
                let (extra, said) = peak(algorithm, heads, n, d, threads);
                assert!(
                    extra <= said + said / 8 + (64 << 10),
                    "{algorithm}, {threads} threads, {heads} heads, {n}: {extra} of {said} bytes"
                );
            }
        }
        let (extra, _) = peak(Algorithm::Fa2, 4, 4096, d, threads);
        let packed = 2 * 4096 * d * size_of::<f32>();
        // A head in flight a thread; half a MiB a thread besides.
        assert!(extra <= threads * (packed + (1 << 20)), "{extra}");
        assert!(
            extra < 4096 * 4096 * size_of::<f32>() / 4,
            "{extra} is like N²"
        );
        let (twice, _) = peak(Algorithm::Fa2, 4, 8192, d, threads);
        assert!(
            twice < 2 * extra + (64 << 10),
            "{extra} then {twice}: not linear"
        );
        backward_is_linear::<f32>(d, threads);
        backward_is_linear::<bf16>(d, threads);
        // The next call of the same size takes what the backend kept of the first; of large calls it
        // keeps no more than it says.
        let (extra, _, kept) = peaks(2, Algorithm::Fa2, 4, 1024, d, threads);
        assert!(extra[1] < 64 << 10, "{extra:?}, {kept} kept");
        let (.., kept) = peaks(1, Algorithm::Fa2, 2, 4096, 4 * d, threads);
        assert!(kept <= threads * (4 << 20) + (64 << 10), "{kept} kept");
    }
}
