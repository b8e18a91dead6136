//! Attention over more keys and values than the device may hold, on a GPU host:
//!     streamed [GIB_OF_KV] [GIB_OF_BUDGET]        (16 and 1 by default)
//!
//! Streams K and V from host memory within the budget, as it is and then page-locked, and judges the result
//! by the same attention merged from pieces that fit. Prints the times, their share of what the bus gives
//! to one page-locked buffer, and the device memory that was in use at most.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use tilewise_core::{
    Algorithm, Backend, DType, Dims, Element, Inputs, Options, Part, Problem, TensorView,
    TensorViewMut, merge_parts,
};
use tilewise_cuda::page_lock::PageLocked;
use tilewise_cuda::{CudaBackend, CudaOptions};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const QUERIES: usize = 16;
const DIM: usize = 128;
const PIECES: usize = 8;

/// Values from −2 to 2 that do not repeat, by all processors.
fn fill(values: &mut [bf16], seed: u64) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = values.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (n, part) in values.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                let mut z = seed ^ ((n as u64 + 1) << 32);
                for x in part {
                    z = z
                        .wrapping_mul(0x5851_F42D_4C95_7F2D)
                        .wrapping_add(0x1405_7B7E_F767_814F);
                    *x = bf16::from_f32((z >> 48) as f32 / 16384.0 - 2.0);
                }
            });
        }
    });
}

/// Best rate of copies from one page-locked buffer, in bytes a second.
fn bus(backend: &CudaBackend) -> Result<f64, Box<dyn std::error::Error>> {
    let stream = backend.context().new_stream()?;
    let len = 256 << 20;
    // SAFETY: what is copied has no meaning.
    let host = unsafe { backend.context().alloc_pinned::<u8>(len)? };
    let mut device = stream.alloc_zeros::<u8>(len)?;
    let mut best = 0f64;
    for _ in 0..6 {
        stream.synchronize()?;
        let started = Instant::now();
        stream.memcpy_htod(&host, &mut device)?;
        stream.synchronize()?;
        best = best.max(len as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1).map(|word| word.parse::<f64>());
    let kv = words.next().transpose()?.unwrap_or(16.0);
    let budget = words.next().transpose()?.unwrap_or(1.0);
    let gib = (1u64 << 30) as f64;
    let keys = (kv * gib) as usize / (2 * KV_HEADS * DIM * 2) / PIECES * PIECES;
    let (shape, wide) = ([1, HEADS, QUERIES, DIM], [1, KV_HEADS, keys, DIM]);
    let mut q = vec![bf16::ZERO; HEADS * QUERIES * DIM];
    let mut k = vec![bf16::ZERO; KV_HEADS * keys * DIM];
    let mut v = vec![bf16::ZERO; KV_HEADS * keys * DIM];
    for (values, seed) in [(&mut q, 1), (&mut k, 2), (&mut v, 3)] {
        fill(values, seed);
    }
    let options = Options::new();
    let q = TensorView::bhsd(&q, shape)?;
    let (k, v) = (TensorView::bhsd(&k, wide)?, TensorView::bhsd(&v, wide)?);
    let whole = CudaBackend::new(0)?;
    let within = CudaBackend::with(CudaOptions {
        device_memory: Some((budget * gib) as u64),
        ..CudaOptions::default()
    })?;
    let rate = bus(&whole)?;

    let mut out = vec![bf16::NAN; q.len()];
    let mut lse = vec![f32::NAN; HEADS * QUERIES];
    let run = |backend: &CudaBackend, k, v, out: &mut [bf16], lse: &mut [f32]| {
        let inputs = Inputs::new(q, k, v);
        let problem = Problem::new(&inputs, &options)?;
        backend
            .forward(
                &problem,
                &bf16::erase_inputs(inputs),
                Algorithm::Fa2,
                bf16::erase_mut(TensorViewMut::bhsd(out, shape)?),
                Some(TensorViewMut::bhs(lse, [1, HEADS, QUERIES])?),
            )
            .map(|_| ())
    };
    // Kernels first, so that none is compiled while the clock runs.
    let first = (
        k.narrow(2, 0..keys.min(1 << 19)),
        v.narrow(2, 0..keys.min(1 << 19)),
    );
    run(&within, first.0, first.1, &mut out, &mut lse)?;
    let context = whole.context();
    let (before, _) = context.mem_get_info()?;
    let (least, over) = (AtomicUsize::new(before), AtomicBool::new(false));
    let bytes = (k.len() + v.len()) as f64 * DType::BF16.size() as f64;
    let timed = |how: &str,
                 out: &mut [bf16],
                 lse: &mut [f32]|
     -> Result<(), Box<dyn std::error::Error>> {
        let mut best = f64::INFINITY;
        for _ in 0..2 {
            let started = Instant::now();
            run(&within, k, v, out, lse)?;
            best = best.min(started.elapsed().as_secs_f64());
        }
        println!(
            "{:.2} GiB of {how} K and V within {budget} GiB: {best:.3} s, {:.2} GB/s, {:.0} % of the bus ({:.2} GB/s)",
            bytes / gib,
            bytes / best / 1e9,
            100.0 * bytes / best / rate,
            rate / 1e9
        );
        Ok(())
    };
    let mut in_place = out.clone();
    let mut in_place_lse = lse.clone();
    std::thread::scope(|scope| -> Result<(), Box<dyn std::error::Error>> {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if let Ok((free, _)) = context.mem_get_info() {
                    least.fetch_min(free, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let both = (|| {
            timed("pageable", &mut out, &mut lse)?;
            let started = Instant::now();
            let locked = (
                PageLocked::new(&within, k.data())?,
                PageLocked::new(&within, v.data())?,
            );
            println!(
                "page-locking them: {:.3} s",
                started.elapsed().as_secs_f64()
            );
            timed("page-locked", &mut in_place, &mut in_place_lse)?;
            drop(locked);
            Ok(())
        })();
        over.store(true, Ordering::Relaxed);
        both
    })?;
    if in_place != out || in_place_lse != lse {
        return Err("page-locked memory gave other bits".into());
    }
    let used = before - least.load(Ordering::Relaxed);

    // The same from pieces that fit, each a call of its own, merged by their lse.
    let piece = keys / PIECES;
    let mut parts = Vec::new();
    for n in 0..PIECES {
        let range = n * piece..(n + 1) * piece;
        let mut out = vec![bf16::NAN; q.len()];
        let mut lse = vec![f32::NAN; HEADS * QUERIES];
        run(
            &whole,
            k.narrow(2, range.clone()),
            v.narrow(2, range),
            &mut out,
            &mut lse,
        )?;
        parts.push((out, lse));
    }
    let views = parts
        .iter()
        .map(|(out, lse)| {
            let lse = TensorView::bhsd(lse, [1, HEADS, QUERIES, 1])?;
            Ok(Part::new(TensorView::bhsd(out, shape)?, lse))
        })
        .collect::<tilewise_core::Result<Vec<_>>>()?;
    let mut merged = vec![bf16::NAN; q.len()];
    let mut sums = vec![f32::NAN; lse.len()];
    merge_parts(
        &views,
        TensorViewMut::bhsd(&mut merged, shape)?,
        Some(TensorViewMut::bhs(&mut sums, [1, HEADS, QUERIES])?),
    )?;
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = || {
        out.iter()
            .zip(&merged)
            .map(|(a, b)| (a.to_f64(), b.to_f64()))
    };
    let error = norm(&mut pairs().map(|(a, b)| a - b)) / norm(&mut pairs().map(|(_, b)| b));
    let lse_error = lse
        .iter()
        .zip(&sums)
        .map(|(a, b)| f64::from((a - b).abs()))
        .fold(0.0, f64::max);
    let dims = Dims {
        batch: 1,
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        seqlen_q: QUERIES,
        seqlen_k: keys,
        head_dim: DIM,
        head_dim_v: DIM,
    };
    println!("{dims:?}");
    println!("device memory in use at most: {:.3} GiB", used as f64 / gib);
    println!(
        "against {PIECES} pieces merged: out {error:.2e} (relative), lse {lse_error:.2e} (absolute)"
    );
    // Over millions of keys of equal weight the output is about as small as the roundings of P to bf16 are.
    if !(error < 2e-2 && lse_error < 1e-3) || used as f64 > (budget + 0.1) * gib {
        return Err("the result or the memory is not what it should be".into());
    }
    Ok(())
}
