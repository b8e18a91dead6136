//! Whole calls for each element type, instruction set and algorithm. Throughput is in floating-point
//! operations of the two products.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tilewise_core::half::{bf16, f16};
use tilewise_core::{Algorithm, Inputs, Options, Problem, TensorView, TensorViewMut};
use tilewise_cpu::{CpuBackend, CpuElement, Isa};

/// (name, heads, KV heads, queries, keys, head_dim, causal, softmax_scale)
type Case = (
    &'static str,
    usize,
    usize,
    usize,
    usize,
    usize,
    bool,
    Option<f64>,
);

const CASES: [Case; 6] = [
    ("prefill-1k-d64", 4, 4, 1024, 1024, 64, false, None),
    // Weights from 1 down to what underflows: takes as long as the one above, or there is a cliff.
    (
        "prefill-1k-d64-underflow",
        4,
        4,
        1024,
        1024,
        64,
        false,
        Some(8.0),
    ),
    ("prefill-1k-d128-causal", 4, 4, 1024, 1024, 128, true, None),
    ("decode-8k-gqa", 8, 2, 1, 8192, 128, false, None),
    ("few-8k-gqa", 8, 2, 4, 8192, 128, false, None),
    ("odd", 2, 2, 1000, 777, 80, false, None),
];

fn forward<T: CpuElement>(criterion: &mut Criterion) {
    for (name, heads, kv_heads, queries, keys, d, causal, scale) in CASES {
        let numbers = |len: usize| -> Vec<T> {
            (0..len)
                .map(|i| T::from_f64((i * 7919 % 1013) as f64 / 506.5 - 1.0))
                .collect()
        };
        let (q, kv) = (numbers(heads * queries * d), numbers(kv_heads * keys * d));
        let key_view = TensorView::bhsd(&kv, [1, kv_heads, keys, d]).expect("a view");
        let query_view = TensorView::bhsd(&q, [1, heads, queries, d]).expect("a view");
        let inputs = Inputs::new(query_view, key_view, key_view);
        let options = Options::new().causal(causal).softmax_scale(scale);
        let problem = Problem::new(&inputs, &options).expect("a problem");
        let mut out = numbers(q.len());
        let mut group = criterion.benchmark_group(format!("{name}/{}", T::DTYPE));
        group.sample_size(10);
        group.throughput(Throughput::Elements(problem.flops() as u64));
        for isa in Isa::available() {
            let backend = CpuBackend::builder()
                .isa(isa)
                .build()
                .expect("an available ISA");
            for algorithm in Algorithm::ALL {
                group.bench_function(BenchmarkId::new(algorithm.name(), isa), |bencher| {
                    bencher.iter(|| {
                        let out = TensorViewMut::bhsd(&mut out, [1, heads, queries, d])?;
                        backend.forward_into(&problem, &inputs, algorithm, out, None)
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(
    benches,
    forward::<f32>,
    forward::<f64>,
    forward::<f16>,
    forward::<bf16>
);
criterion_main!(benches);
