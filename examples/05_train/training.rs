//! The model of the example, its data and its training: nothing but attention can solve its task.

use tilewise::{BackwardInputs, Engine, Inputs, Options, TensorView};

/// Sequences a step.
const BATCH: usize = 32;
/// Pairs a sequence.
const PAIRS: usize = 6;
/// Different keys, and different values.
pub(crate) const SYMBOLS: usize = 8;
const HEADS: usize = 2;
const DIM: usize = 8;

/// A matrix that is trained by Adam (Kingma and Ba 2015).
struct Matrix {
    columns: usize,
    values: Vec<f32>,
    gradient: Vec<f32>,
    moments: Vec<[f32; 2]>,
}

impl Matrix {
    fn new(rows: usize, columns: usize, random: &mut Random) -> Self {
        let scale = 1.0 / (columns as f32).sqrt();
        let len = rows * columns;
        Matrix {
            columns,
            values: (0..len).map(|_| random.symmetric() * scale).collect(),
            gradient: vec![0.0; len],
            moments: vec![[0.0; 2]; len],
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }

    fn add_gradient(&mut self, row: usize, gradient: &[f32]) {
        let to = &mut self.gradient[row * self.columns..][..self.columns];
        for (to, x) in to.iter_mut().zip(gradient) {
            *to += x;
        }
    }

    fn step(&mut self, number: i32) {
        const RATE: f32 = 0.02;
        for (n, x) in self.values.iter_mut().enumerate() {
            let (gradient, [first, second]) = (self.gradient[n], &mut self.moments[n]);
            *first += 0.1 * (gradient - *first);
            *second += 0.001 * (gradient * gradient - *second);
            let mean = *first / (1.0 - 0.9f32.powi(number));
            let size = (*second / (1.0 - 0.999f32.powi(number))).sqrt();
            *x -= RATE * mean / (size + 1e-8);
        }
        self.gradient.fill(0.0);
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    fn symmetric(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0
    }
}

/// Mean loss of the first and of the last ten of `steps` steps.
pub(crate) fn train(engine: &Engine, steps: usize) -> tilewise::Result<(f32, f32)> {
    let mut random = Random(1);
    let width = HEADS * DIM;
    // One row a symbol, all heads side by side.
    let mut asked = Matrix::new(SYMBOLS, width, &mut random);
    let mut keys = Matrix::new(SYMBOLS, width, &mut random);
    let mut values = Matrix::new(SYMBOLS, width, &mut random);
    let mut answers = Matrix::new(SYMBOLS, width, &mut random);
    let options = Options::new();
    let (q_shape, k_shape) = ([BATCH, HEADS, 1, DIM], [BATCH, HEADS, PAIRS, DIM]);
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        // Keys of a sequence differ, values may not.
        let mut tokens = Vec::new();
        for _ in 0..BATCH {
            let mut symbols: Vec<usize> = (0..SYMBOLS).collect();
            for n in (1..SYMBOLS).rev() {
                symbols.swap(n, random.below(n + 1));
            }
            let pairs: Vec<(usize, usize)> = symbols[..PAIRS]
                .iter()
                .map(|&key| (key, random.below(SYMBOLS)))
                .collect();
            tokens.push((pairs, random.below(PAIRS)));
        }
        // Memory order is [batch, seqlen, heads, head_dim], as a row of a matrix has it.
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for (pairs, question) in &tokens {
            q.extend_from_slice(asked.row(pairs[*question].0));
            for &(key, value) in pairs {
                k.extend_from_slice(keys.row(key));
                v.extend_from_slice(values.row(value));
            }
        }
        let inputs = Inputs::new(
            TensorView::bshd(&q, q_shape)?,
            TensorView::bshd(&k, k_shape)?,
            TensorView::bshd(&v, k_shape)?,
        );
        let attention = engine.forward(&inputs, &options)?;

        // Cross entropy of softmax(out · answers), and its gradient at out. With one query a
        // sequence [batch, heads, 1, dim] lies in memory as [batch, 1, heads, dim] does.
        let mut loss = 0.0;
        let mut dout = vec![0.0; attention.out.len()];
        for (b, (pairs, question)) in tokens.iter().enumerate() {
            let right = pairs[*question].1;
            let out = &attention.out[b * width..][..width];
            let logits: Vec<f32> = (0..SYMBOLS).map(|n| dot(out, answers.row(n))).collect();
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|x| (x - most).exp()).sum();
            loss += (most + sum.ln() - logits[right]) / BATCH as f32;
            for (n, logit) in logits.iter().enumerate() {
                let wanted = if n == right { 1.0 } else { 0.0 };
                let d = ((logit - most).exp() / sum - wanted) / BATCH as f32;
                for (to, x) in dout[b * width..].iter_mut().zip(answers.row(n)) {
                    *to += d * x;
                }
                let gradient: Vec<f32> = out.iter().map(|x| d * x).collect();
                answers.add_gradient(n, &gradient);
            }
        }

        let gradients = engine.backward(
            &BackwardInputs::new(
                inputs,
                TensorView::bhsd(&attention.out, q_shape)?,
                TensorView::bhsd(&attention.lse, [BATCH, HEADS, 1, 1])?,
                TensorView::bhsd(&dout, q_shape)?,
            ),
            &options,
        )?;
        // Gradients come as [batch, heads, seqlen, head_dim].
        let row = |values: &[f32], b: usize, position: usize, of: usize| -> Vec<f32> {
            (0..HEADS)
                .flat_map(|h| values[((b * HEADS + h) * of + position) * DIM..][..DIM].to_vec())
                .collect()
        };
        for (b, (pairs, question)) in tokens.iter().enumerate() {
            asked.add_gradient(pairs[*question].0, &row(&gradients.dq, b, 0, 1));
            for (position, &(key, value)) in pairs.iter().enumerate() {
                keys.add_gradient(key, &row(&gradients.dk, b, position, PAIRS));
                values.add_gradient(value, &row(&gradients.dv, b, position, PAIRS));
            }
        }
        for matrix in [&mut asked, &mut keys, &mut values, &mut answers] {
            matrix.step(step as i32 + 1);
        }
        losses.push(loss);
    }
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len().max(1) as f32;
    let ten = losses.len().min(10);
    Ok((mean(&losses[..ten]), mean(&losses[losses.len() - ten..])))
}

fn dot(x: &[f32], y: &[f32]) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
