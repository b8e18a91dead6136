//! What the machine could do at most: the denominators of every share this project states.
//!
//! Both run on threads of their own, one a core if the system places them so, and take the time
//! of the slowest.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use tilewise_core::{DType, Result};

use crate::buffer::Buffer;
use crate::isa::Isa;
use crate::kernel::table::{Probe, probe};

/// Time after which a measurement has seen enough.
const LONG_ENOUGH: Duration = Duration::from_millis(60);

/// Fused multiply-adds from registers only, in FLOP/s of all `threads` together (a multiply and an
/// add counted as two), by the instructions that `isa` has for the products of `dtype`: those of its
/// accumulator type, or products of pairs of bf16, of tiles even.
///
/// # Errors
/// [`Error::Unavailable`](tilewise_core::Error::Unavailable) if the processor lacks `isa`.
pub fn fma(isa: Isa, dtype: DType, threads: usize) -> Result<f64> {
    let isa = isa.checked()?;
    let Probe {
        begin,
        fma,
        end,
        flops_a_round,
        ..
    } = probe(isa, dtype);
    let rounds = 20_000;
    Ok(rate(threads, || {
        // SAFETY: the processor has the instruction set.
        unsafe {
            begin();
            black_box(fma(rounds));
            end();
        }
        rounds as f64 * flops_a_round
    }))
}

/// Reading, in bytes/s of all `threads` together, each from `bytes` of its own, again and again: give
/// the size of a working set to learn what its cache level delivers.
///
/// # Errors
/// [`Error::Unavailable`](tilewise_core::Error::Unavailable) if the processor lacks `isa`,
/// [`Error::OutOfMemory`](tilewise_core::Error::OutOfMemory) if there is no room for `threads` × `bytes`.
pub fn read(isa: Isa, threads: usize, bytes: usize) -> Result<f64> {
    let isa = isa.checked()?;
    let Probe { read, .. } = probe(isa, DType::F32);
    let floats = (bytes / size_of::<f32>()).next_multiple_of(1024).max(1024);
    let buffers = (0..threads.max(1))
        .map(|_| Buffer::<f32>::new(floats, "bandwidth measurement"))
        .collect::<Result<Vec<_>>>()?;
    let next = std::sync::atomic::AtomicUsize::new(0);
    thread_local! {
        static MINE: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
    }
    Ok(rate(threads, || {
        if MINE.get() == usize::MAX {
            let mine = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            MINE.set(mine);
            // Pages that were never written are one and the same page of zeros.
            for page in (0..floats).step_by(1024) {
                // SAFETY: the buffer is this thread's and `page` lies inside.
                unsafe { buffers[mine].at().add(page).write(1.0) }
            }
        }
        // SAFETY: the processor has the instruction set; the buffer holds `floats` numbers.
        black_box(unsafe { read(buffers[MINE.get()].at().cast(), floats * size_of::<f32>()) });
        (floats * size_of::<f32>()) as f64
    }))
}

/// Units of work a second, of `threads` threads that call `work` until it has been long enough. The
/// first call of each thread warms up.
fn rate(threads: usize, work: impl Fn() -> f64 + Sync) -> f64 {
    let threads = threads.max(1);
    let barrier = Barrier::new(threads);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let run = || {
            scope.spawn(|| {
                work();
                barrier.wait();
                let start = Instant::now();
                let mut done = 0.0;
                while start.elapsed() < LONG_ENOUGH {
                    done += work();
                }
                done / start.elapsed().as_secs_f64()
            })
        };
        let running: Vec<_> = (0..threads).map(|_| run()).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or(0.0))
            .collect()
    });
    rates.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_ceilings() {
        for isa in Isa::available() {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                assert!(fma(isa, dtype, 1).unwrap() > 1e8);
            }
            assert!(read(isa, 1, 1 << 14).unwrap() > 1e8);
        }
    }
}
