//! Numbers that look random, each from its place.

use tilewise_core::Element;

/// SplitMix64, from a seed.
#[derive(Clone, Debug)]
pub struct Noise(pub u64);

impl Noise {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below `n`; 0 where `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Between −2 and 2, mostly small: variance 1/3.
    pub fn number(&mut self) -> f64 {
        let half = |bits: u64| (bits & 0xFFFF) as f64 / 65536.0 - 0.5;
        let bits = self.bits();
        half(bits) + half(bits >> 16) + half(bits >> 32) + half(bits >> 48)
    }

    /// About normal: mean 0, variance 1, nothing beyond 3.5.
    pub fn normal(&mut self) -> f64 {
        self.number() * 3f64.sqrt()
    }

    /// `len` of [`number`](Self::number), times `magnitude`.
    pub fn tensor<T: Element>(&mut self, len: usize, magnitude: f64) -> Vec<T> {
        (0..len)
            .map(|_| T::from_f64(self.number() * magnitude))
            .collect()
    }
}
