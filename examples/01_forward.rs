//! Attention on host tensors, with the backend chosen at run time.
//!
//! `cargo run --release --example 01_forward`; `TILEWISE_BACKEND=cpu` or `cuda:0` forces a backend.

use tilewise::{Engine, Inputs, Options, TensorView, backends};

fn main() -> tilewise::Result<()> {
    for backend in backends() {
        match backend.status {
            Ok(info) => println!("{:8} {}", info.name, info.device),
            Err(reason) => println!("{:8} not here: {reason}", backend.kind),
        }
    }

    // batch 1, 8 query heads that share 2 key heads, 128 tokens, head_dim 64
    let (heads, kv_heads, tokens, head_dim) = (8, 2, 128, 64);
    let q = wave(heads * tokens * head_dim);
    let k = wave(kv_heads * tokens * head_dim);
    let v = wave(kv_heads * tokens * head_dim);
    let inputs = Inputs::new(
        TensorView::bhsd(&q, [1, heads, tokens, head_dim])?,
        TensorView::bhsd(&k, [1, kv_heads, tokens, head_dim])?,
        TensorView::bhsd(&v, [1, kv_heads, tokens, head_dim])?,
    );

    let attention = Engine::auto()?.forward(&inputs, &Options::new().causal(true))?;

    println!(
        "ran {} on {}",
        attention.info.report.algorithm, attention.info.backend
    );
    println!("first row of out: {:.4?} …", &attention.out[..4]);
    println!("its log-sum-exp:  {:.4}", attention.lse[0]);
    // Under causality the first query sees the first key only: its output is that key's value.
    assert_eq!(attention.out[..head_dim], v[..head_dim]);
    Ok(())
}

fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|x| (x as f32 * 0.37).sin()).collect()
}
