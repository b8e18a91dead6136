//! What a call costs beside the kernels, on a GPU host: `overhead [--json FILE]`.
//!
//! For a few small problems whose tensors lie on the device: host time until the call returns, time
//! from the call to the result, and time of a replay of the captured call. FILE gets what the table shows.

use std::time::Instant;

use half::bf16;
use tilewise_core::{Algorithm, DType, Dims, Options, Problem};
use tilewise_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use tilewise_cuda::cudarc::driver::{DevicePtr, DevicePtrMut};
use tilewise_cuda::{CudaBackend, DeviceView, DeviceViewMut, ops};

/// Calls between two waits: fewer than a stream queues before a launch blocks.
const QUEUED: usize = 100;
const ROUNDS: usize = 30;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = match std::env::args().collect::<Vec<_>>().as_slice() {
        [_] => None,
        [_, flag, file] if flag == "--json" => Some(file.clone()),
        _ => return Err("usage: overhead [--json FILE]".into()),
    };
    let backend = CudaBackend::new(0)?;
    let stream = backend.context().new_stream()?;
    let dims = |num_heads, num_kv_heads, seqlen_q, seqlen_k| Dims {
        batch: 1,
        num_heads,
        num_kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim: 128,
        head_dim_v: 128,
    };
    let mut rows = Vec::new();
    for (name, dims) in [
        ("decode, 512 keys", dims(32, 8, 1, 512)),
        ("decode, 8192 keys", dims(32, 8, 1, 8192)),
        ("128 rows, 128 keys", dims(8, 8, 128, 128)),
    ] {
        let problem = Problem::dense(dims, DType::BF16, &Options::new())?;
        let wide = [1, dims.num_kv_heads, dims.seqlen_k, 128];
        let values = |n: usize| -> Vec<bf16> {
            (0..n)
                .map(|i| bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0))
                .collect()
        };
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let q = stream.clone_htod(&values(count(dims.out_shape())))?;
        let k = stream.clone_htod(&values(count(wide)))?;
        let v = stream.clone_htod(&values(count(wide)))?;
        let mut out = stream.alloc_zeros::<bf16>(count(dims.out_shape()))?;
        let mut lse = stream.alloc_zeros::<f32>(dims.lse_shape().iter().product())?;
        let strides =
            |[_, h, s, d]: [usize; 4]| [(h * s * d) as isize, (s * d) as isize, d as isize, 1];
        let [b, h, s] = dims.lse_shape();
        let (pq, pk, pv) = (
            q.device_ptr(&stream).0,
            k.device_ptr(&stream).0,
            v.device_ptr(&stream).0,
        );
        let (po, pl) = (out.device_ptr_mut(&stream).0, lse.device_ptr_mut(&stream).0);
        let call = || -> tilewise_core::Result<()> {
            // SAFETY: the addresses are of the slices above, of these shapes, which outlive the
            // stream's work.
            unsafe {
                ops::forward(
                    &backend,
                    &stream,
                    &problem,
                    Algorithm::Fa2,
                    &DeviceView::from_raw(
                        pq,
                        DType::BF16,
                        dims.out_shape(),
                        strides(dims.out_shape()),
                    ),
                    &DeviceView::from_raw(pk, DType::BF16, wide, strides(wide)),
                    &DeviceView::from_raw(pv, DType::BF16, wide, strides(wide)),
                    &mut DeviceViewMut::from_raw(
                        po,
                        DType::BF16,
                        dims.out_shape(),
                        strides(dims.out_shape()),
                    )?,
                    Some(&mut DeviceViewMut::from_raw(
                        pl,
                        DType::F32,
                        [b, h, s, 1],
                        strides([b, h, s, 1]),
                    )?),
                )
            }
        };
        for _ in 0..QUEUED {
            call()?;
        }
        stream.synchronize()?;
        let mut host = Vec::new();
        let mut latency = Vec::new();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            for _ in 0..QUEUED {
                call()?;
            }
            host.push(started.elapsed().as_secs_f64() * 1e6 / QUEUED as f64);
            stream.synchronize()?;
            for _ in 0..10 {
                let started = Instant::now();
                call()?;
                stream.synchronize()?;
                latency.push(started.elapsed().as_secs_f64() * 1e6);
            }
        }
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        for _ in 0..QUEUED {
            call()?;
        }
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream
            .end_capture(flags)?
            .ok_or("the capture held nothing")?;
        graph.launch()?;
        stream.synchronize()?;
        let mut replay = Vec::new();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            graph.launch()?;
            stream.synchronize()?;
            replay.push(started.elapsed().as_secs_f64() * 1e6 / QUEUED as f64);
        }
        rows.push((name, median(host), median(latency), median(replay)));
    }
    println!(
        "{:<20} {:>10} {:>12} {:>11}",
        "µs", "host", "to result", "replayed"
    );
    for (name, host, latency, replay) in &rows {
        println!("{name:<20} {host:>10.2} {latency:>12.2} {replay:>11.2}");
    }
    if let Some(file) = file {
        let rows: Vec<_> = rows
            .iter()
            .map(|(name, host, latency, replay)| {
                serde_json::json!({
                    "case": name, "host_us": host, "latency_us": latency, "replay_us": replay
                })
            })
            .collect();
        std::fs::write(file, serde_json::to_string_pretty(&rows)? + "\n")?;
    }
    Ok(())
}
