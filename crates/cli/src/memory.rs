//! How much heap a piece of work takes: the binary and its tests allocate through a counter.

use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Runs `work` and returns its result with the highest heap use above that at its start, in bytes.
///
/// Counts the whole process: nothing else should run meanwhile. Mapped memory is not heap.
pub fn peak_extra_bytes<R>(work: impl FnOnce() -> R) -> (R, u64) {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let result = work();
    (result, HEAP.peak_usage().saturating_sub(before) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_what_was_freed_again() {
        let (len, peak) = peak_extra_bytes(|| {
            let block = std::hint::black_box(vec![1u8; 3 << 20]);
            block.len()
        });
        assert_eq!(len, 3 << 20);
        assert!((3 << 20..4 << 20).contains(&peak), "{peak}");
    }
}
