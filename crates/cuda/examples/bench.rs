//! Times one kernel on device-resident data: `bench ALGORITHM DTYPE b,hq,hkv,sq,sk,d[,causal]`.
//!
//! Prints JSON whose `results[0]` has `median_ms`, `gflops` (4·b·hq·sq·sk·d, half of it when causal)
//! and `gbps` (K and V read once).

use tilewise_core::{Algorithm, DType, Dims, Options, Problem};
use tilewise_cuda::CudaBackend;
use tilewise_cuda::bench::{Effort, time};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [algorithm, dtype, shape] = args.as_slice() else {
        return Err("usage: bench ALGORITHM DTYPE b,hq,hkv,sq,sk,d[,causal]".into());
    };
    let algorithm: Algorithm = algorithm.parse()?;
    let dtype: DType = dtype.parse()?;
    let (numbers, causal) = match shape.strip_suffix(",causal") {
        Some(numbers) => (numbers, true),
        None => (shape.as_str(), false),
    };
    let numbers: Vec<usize> = numbers
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let [batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim] = numbers[..] else {
        return Err("a shape is b,hq,hkv,sq,sk,d".into());
    };
    let dims = Dims {
        batch,
        num_heads,
        num_kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v: head_dim,
    };
    let problem = Problem::dense(dims, dtype, &Options::new().causal(causal))?;
    let backend = CudaBackend::new(0)?;
    let timing = time(&backend, &problem, algorithm, Effort::default())?;
    let ms = timing.median_ms();
    let area = (batch * num_heads) as f64 * seqlen_q as f64 * seqlen_k as f64;
    let flops = 4.0 * area * head_dim as f64 / if causal { 2.0 } else { 1.0 };
    let bytes = 2.0 * (batch * num_kv_heads * seqlen_k * head_dim * dtype.size()) as f64;
    println!(
        "{}",
        serde_json::json!({"results": [{
            "algorithm": algorithm.name(),
            "shape": shape,
            "median_ms": ms,
            "first_ms": timing.first_ms,
            "samples": timing.samples_ms.len(),
            "gflops": flops / ms / 1e6,
            "gbps": bytes / ms / 1e6,
        }]})
    );
    Ok(())
}
