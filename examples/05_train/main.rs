//! A small attention model is trained on the CPU with the gradients of `Engine::backward`.
//!
//! The task is recall: a sequence holds pairs of a key and a value, then asks for one of the keys
//! again. The model embeds tokens, projects them to q and k, and reads the answer off the attention
//! output: nothing but attention can solve it.
//!
//! ```sh
//! cargo run --release --example 05_train
//! ```

mod training;

use tilewise::Engine;
use training::{SYMBOLS, train};

fn main() -> tilewise::Result<()> {
    let engine = Engine::named("cpu")?;
    println!("guessing costs {:.3}", (SYMBOLS as f32).ln());
    for steps in [10, 100, 200, 400] {
        let (first, last) = train(&engine, steps)?;
        println!("{steps:4} steps: loss from {first:.3} to {last:.3}");
    }
    Ok(())
}
