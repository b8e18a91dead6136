//! Keys that arrive in chunks: the running state (m, ℓ, Õ) absorbs them and forgets them, and
//! states of different keys merge, wherever each was computed.
//!
//! `cargo run --release --example 04_streaming`

use tilewise::{
    AnyKeyBlock, AnyTensor, DType, Dims, Element, Engine, Inputs, Options, Problem, TensorView,
    TensorViewMut,
};

fn main() -> tilewise::Result<()> {
    let dims = Dims {
        batch: 1,
        num_heads: 2,
        num_kv_heads: 1,
        seqlen_q: 3,
        seqlen_k: 1000,
        head_dim: 32,
        head_dim_v: 32,
    };
    let wave = |n: usize, step: f32| (0..n).map(|x| (x as f32 * step).sin()).collect::<Vec<_>>();
    let (q, k, v) = (
        wave(2 * 3 * 32, 0.3),
        wave(1000 * 32, 0.7),
        wave(1000 * 32, 1.1),
    );
    let q = TensorView::bhsd(&q, [1, 2, 3, 32])?;
    let k = TensorView::bhsd(&k, [1, 1, 1000, 32])?;
    let v = TensorView::bhsd(&v, [1, 1, 1000, 32])?;
    let chunk = |keys: std::ops::Range<usize>| AnyKeyBlock {
        q: AnyTensor::from(q),
        k: AnyTensor::from(k.narrow(2, keys.clone())),
        v: AnyTensor::from(v.narrow(2, keys.clone())),
        first_key: keys.start,
        bias: None,
        mask: None,
    };

    // The problem fixes the total number of keys, so that causality knows where a chunk stands.
    let problem = Problem::dense(dims, DType::F32, &Options::new().causal(true))?;
    let engine = Engine::auto()?;
    let mut first = engine.begin(&problem)?;
    first.absorb(&chunk(0..300))?;
    first.absorb(&chunk(300..512))?;
    let mut second = engine.begin(&problem)?; // perhaps on another machine
    second.absorb(&chunk(512..1000))?;
    first.merge(&second.export()?)?;

    let (mut out, mut lse) = (vec![0f32; 2 * 3 * 32], vec![0f32; 2 * 3]);
    first.finish(
        f32::erase_mut(TensorViewMut::bhsd(&mut out, dims.out_shape())?),
        Some(TensorViewMut::bhs(&mut lse, dims.lse_shape())?),
    )?;

    let whole = engine.forward(&Inputs::new(q, k, v), &Options::new().causal(true))?;
    let difference = out
        .iter()
        .zip(&whole.out)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    println!("streamed in three chunks against one call: largest difference {difference:e}");
    assert!(difference < 1e-6);
    Ok(())
}
