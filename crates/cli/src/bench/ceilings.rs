//! What the machine could do at most, measured between the timings it is compared with.

use anyhow::Result;
use tilewise::cpu::{Isa, ceilings};
use tilewise::{DType, Problem};

use crate::stats::median;

/// Rates of one instruction set, for one problem and number of threads.
pub(super) struct Ceilings {
    isa: Isa,
    dtype: DType,
    threads: usize,
    /// K and V, as each thread's share.
    bytes: usize,
    fma: Vec<f64>,
    read: Vec<f64>,
}

/// The rates, and which of them bounds a problem.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceiling {
    pub(super) fma_gflops: f64,
    pub(super) read_gbps: f64,
}

impl Ceilings {
    pub(super) fn new(isa: Isa, problem: &Problem, threads: usize) -> Self {
        Ceilings {
            isa,
            dtype: problem.dtype(),
            threads,
            bytes: (super::kv_bytes(problem) / threads as f64) as usize,
            fma: Vec::new(),
            read: Vec::new(),
        }
    }

    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// Takes one measurement of each rate.
    pub(super) fn measure(&mut self) -> Result<()> {
        self.fma
            .push(ceilings::fma(self.isa, self.dtype, self.threads)? / 1e9);
        self.read
            .push(ceilings::read(self.isa, self.threads, self.bytes)? / 1e9);
        Ok(())
    }

    /// The medians.
    pub(super) fn ceiling(&self) -> Option<Ceiling> {
        Some(Ceiling {
            fma_gflops: median(&self.fma)?,
            read_gbps: median(&self.read)?,
        })
    }
}

impl Ceiling {
    /// The least time in which the problem's multiplications could be done and its K and V be read,
    /// as a share of `ms`; and which of the two takes that time.
    pub(super) fn share(&self, problem: &Problem, ms: f64) -> (f64, &'static str) {
        let fma_ms = problem.flops() / self.fma_gflops / 1e6;
        let read_ms = super::kv_bytes(problem) / self.read_gbps / 1e6;
        if fma_ms >= read_ms {
            (fma_ms / ms, "fma")
        } else {
            (read_ms / ms, "read")
        }
    }
}

#[cfg(test)]
mod tests {
    use tilewise::{Dims, Options};

    use super::*;

    #[test]
    fn the_slower_of_computing_and_reading_is_the_ceiling() {
        let ceiling = Ceiling {
            fma_gflops: 100.0,
            read_gbps: 10.0,
        };
        let problem = |seqlen_q| {
            let dims = Dims {
                batch: 1,
                num_heads: 1,
                num_kv_heads: 1,
                seqlen_q,
                seqlen_k: 1000,
                head_dim: 50,
                head_dim_v: 50,
            };
            Problem::dense(dims, DType::F32, &Options::new()).unwrap()
        };
        // 2 · 100 · 1000 FLOP a row, 400 kB of K and V.
        let (share, bound) = ceiling.share(&problem(1000), 4.0);
        assert_eq!(bound, "fma");
        assert!((share - 0.5).abs() < 1e-12, "{share}");
        let (share, bound) = ceiling.share(&problem(1), 0.08);
        assert_eq!(bound, "read");
        assert!((share - 0.5).abs() < 1e-12, "{share}");
    }
}
