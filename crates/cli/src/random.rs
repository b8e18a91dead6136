//! Seeded inputs.

use anyhow::{Result, bail};
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand_distr::{Distribution, StandardNormal};
use tilewise::{Dims, Element, Inputs, TensorView};

/// `count` standard normal numbers, drawn in f32 and rounded to `T`: the same for a seed and a
/// tensor's name on every machine.
pub(crate) fn normal<T: Element>(seed: u64, tensor: &str, count: usize) -> Result<Vec<T>> {
    // FNV-1a, so that tensors of one seed are independent of each other and of their order.
    let stream = tensor.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ stream);
    let mut values = room(tensor, count)?;
    for _ in 0..count {
        let x: f32 = StandardNormal.sample(&mut rng);
        values.push(T::from_f64(f64::from(x)));
    }
    Ok(values)
}

/// An empty vector with room for the elements of a tensor.
pub(crate) fn room<T>(tensor: &str, count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    if values.try_reserve_exact(count).is_err() {
        bail!("{tensor}: no memory for {count} elements");
    }
    Ok(values)
}

/// q, k and v of a problem, row-major.
#[derive(Debug)]
pub(crate) struct Qkv<T> {
    tensors: [(Vec<T>, [usize; 4]); 3],
}

impl<T: Element> Qkv<T> {
    /// Standard normal numbers of this seed.
    ///
    /// # Errors
    /// If they cannot be counted, or memory cannot be had.
    pub(crate) fn new(seed: u64, dims: &Dims) -> Result<Self> {
        let tensor = |(name, shape)| -> Result<(Vec<T>, [usize; 4])> {
            Ok((normal(seed, name, count(name, shape)?)?, shape))
        };
        let [q, k, v] = shapes(dims);
        Ok(Qkv {
            tensors: [tensor(q)?, tensor(k)?, tensor(v)?],
        })
    }

    /// The tensors, as attention takes them.
    pub(crate) fn inputs(&self) -> tilewise::Result<Inputs<'_, T>> {
        let view = |n: usize| TensorView::bhsd(&self.tensors[n].0, self.tensors[n].1);
        Ok(Inputs::new(view(0)?, view(1)?, view(2)?))
    }
}

/// Names and shapes of q, k and v.
pub(crate) fn shapes(dims: &Dims) -> [(&'static str, [usize; 4]); 3] {
    let keys = |width| [dims.batch, dims.num_kv_heads, dims.seqlen_k, width];
    [
        (
            "q",
            [dims.batch, dims.num_heads, dims.seqlen_q, dims.head_dim],
        ),
        ("k", keys(dims.head_dim)),
        ("v", keys(dims.head_dim_v)),
    ]
}

/// Number of elements of a shape.
///
/// # Errors
/// If it cannot be counted.
pub(crate) fn count(tensor: &str, shape: [usize; 4]) -> Result<usize> {
    let bytes = shape
        .iter()
        .try_fold(size_of::<f64>(), |n, &size| n.checked_mul(size));
    match bytes {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(bytes / size_of::<f64>()),
        _ => bail!("{tensor}: shape {shape:?} has more elements than can be counted"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_from_seed_and_name() {
        let q: Vec<f32> = normal(1, "q", 1000).unwrap();
        assert_eq!(q, normal::<f32>(1, "q", 1000).unwrap());
        assert_ne!(q, normal::<f32>(1, "k", 1000).unwrap());
        assert_ne!(q, normal::<f32>(2, "q", 1000).unwrap());
        let mean = q.iter().sum::<f32>() / 1000.0;
        let variance = q.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 1000.0;
        assert!(
            mean.abs() < 0.15 && (variance - 1.0).abs() < 0.2,
            "{mean} {variance}"
        );
        let half: Vec<tilewise::half::bf16> = normal(1, "q", 10).unwrap();
        for (x, h) in q.iter().zip(half) {
            assert_eq!(h, tilewise::half::bf16::from_f32(*x));
        }
    }

    #[test]
    fn uncountable_shapes_are_refused() {
        assert_eq!(count("q", [1, 2, 3, 4]).unwrap(), 24);
        assert!(count("q", [usize::MAX, 2, 3, 4]).is_err());
        assert!(count("q", [1 << 61, 1, 1, 1]).is_err());
    }
}
