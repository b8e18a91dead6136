//! Sequences of unequal length, packed one after another: no padding, no mask.
//!
//! `cargo run --release --example 03_packed`

use tilewise::{Engine, Inputs, Options, TensorView};

fn main() -> tilewise::Result<()> {
    let (heads, head_dim) = (2, 16);
    // Three sequences of 5, 0 and 9 tokens.
    let cu_seqlens = [0, 5, 5, 14];
    let total = 14;
    let x: Vec<f32> = (0..heads * total * head_dim)
        .map(|x| (x as f32 * 0.7).sin())
        .collect();
    let all = TensorView::bhsd(&x, [1, heads, total, head_dim])?;

    let engine = Engine::auto()?;
    let options = Options::new().causal(true);
    let packed = engine.forward(
        &Inputs::new(all, all, all).packed(&cu_seqlens, &cu_seqlens),
        &options,
    )?;

    // The third sequence by itself gives the same rows.
    let third = all.narrow(2, 5..14);
    let alone = engine.forward(&Inputs::new(third, third, third), &options)?;
    for head in 0..heads {
        let rows = &packed.out[(head * total + 5) * head_dim..][..9 * head_dim];
        assert_eq!(rows, &alone.out[head * 9 * head_dim..][..9 * head_dim]);
    }
    println!("the third of three packed sequences equals itself alone, bit for bit");
    Ok(())
}
