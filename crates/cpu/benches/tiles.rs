//! The parts of a step: q kᵀ, softmax and P v of one row block against one tile of keys, in L1 and L2.
//! Throughput is in scores; 2 · head_dim operations make a score in each product.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tilewise_core::half::bf16;
use tilewise_cpu::tiles::TileBench;
use tilewise_cpu::{CpuElement, Isa};

/// What is measured of a tile.
type Part<T> = (&'static str, fn(&mut TileBench<T>));

fn tiles<T: CpuElement>(criterion: &mut Criterion) {
    let parts: [Part<T>; 4] = [
        ("qk", TileBench::qk),
        ("softmax", TileBench::softmax),
        ("pv", TileBench::pv),
        ("absorb", TileBench::absorb),
    ];
    for (name, part) in parts {
        let mut group = criterion.benchmark_group(format!("{name}/{}", T::DTYPE));
        for isa in Isa::available() {
            for head_dim in [64, 128] {
                let mut tile = TileBench::<T>::new(isa, 256, head_dim).expect("an available ISA");
                group.throughput(Throughput::Elements(tile.scores() as u64));
                let id = BenchmarkId::new(isa.name(), head_dim);
                group.bench_function(id, |bencher| bencher.iter(|| part(&mut tile)));
            }
        }
        group.finish();
    }
}

criterion_group!(benches, tiles::<f32>, tiles::<f64>, tiles::<bf16>);
criterion_main!(benches);
