//! Tensors as they lie: q, k and v interleaved in one projection's output, without a copy.
//!
//! `cargo run --release --example 02_strided`

use tilewise::{Algorithm, Engine, Inputs, Options, TensorView, TensorViewMut};

fn main() -> tilewise::Result<()> {
    // What a fused projection leaves: [batch, seqlen, 3, heads, head_dim].
    let (batch, tokens, heads, head_dim) = (2, 50, 4, 32);
    let qkv: Vec<f32> = (0..batch * tokens * 3 * heads * head_dim)
        .map(|x| (x as f32 * 0.11).cos())
        .collect();
    let token = (3 * heads * head_dim) as isize;
    let part = |which: usize| {
        TensorView::from_strides(
            &qkv,
            [batch, heads, tokens, head_dim],
            [tokens as isize * token, head_dim as isize, token, 1],
            which * heads * head_dim,
        )
    };
    let inputs = Inputs::new(part(0)?, part(1)?, part(2)?);

    // The output in [batch, seqlen, heads, head_dim], in the caller's memory.
    let mut out = vec![0f32; batch * tokens * heads * head_dim];
    let info = Engine::auto()?.forward_into(
        Algorithm::Auto,
        &inputs,
        &Options::new().window_left(15).causal(true),
        TensorViewMut::bshd(&mut out, [batch, heads, tokens, head_dim])?,
        None,
    )?;

    println!("ran on {}: {:.4?} …", info.backend, &out[..4]);
    Ok(())
}
