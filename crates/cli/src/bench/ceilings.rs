//! What the machine could do at most, measured between the timings it is compared with.

use anyhow::Result;
use tilewise::cpu::{Isa, ceilings};
use tilewise::{DType, Problem};

use super::device::{DeviceRates, Devices, Products};
use crate::stats::median;

/// Rates of one instruction set of the CPU, for one problem and number of threads.
pub(super) struct Ceilings {
    isa: Isa,
    dtype: DType,
    threads: usize,
    /// K and V, as each thread's share.
    bytes: usize,
    fma: Vec<f64>,
    read: Vec<f64>,
}

/// The name of the CPU's rate of products: by the instructions that `isa` has for the type.
const FMA: &str = "fma";
/// The name of the rate of reading.
const READ: &str = "read";

/// The rates, and which of them bounds a problem.
#[derive(Clone, Debug)]
pub(super) struct Ceiling {
    /// Whose rate the first is: `fma`, or an instruction of a device, such as `mma.sync bf16`.
    pub(super) products: String,
    pub(super) fma_gflops: f64,
    pub(super) read_gbps: f64,
}

/// Rates of devices on one problem, each taken several times.
#[derive(Default)]
pub(super) struct DeviceCeilings {
    taken: Vec<Taken>,
}

/// One device and kind of products.
struct Taken {
    ordinal: usize,
    products: String,
    fma: Vec<f64>,
    read: Vec<f64>,
}

impl DeviceCeilings {
    /// Measures each of these once more. Where one cannot be measured, the list of all rates says why.
    pub(super) fn measure(&mut self, devices: &mut Devices, bounds: &[(usize, Products)]) {
        for (ordinal, products) in bounds {
            if let Ok(rates) = devices.rates(*ordinal, *products) {
                self.add(*ordinal, rates);
            }
        }
    }

    /// Adds one measurement of both rates, those of `products` and of reading.
    fn add(&mut self, ordinal: usize, rates: DeviceRates) {
        let DeviceRates {
            products,
            flops,
            bytes,
        } = rates;
        let known = |one: &Taken| one.ordinal == ordinal && one.products == products;
        let at = self.taken.iter().position(known).unwrap_or_else(|| {
            self.taken.push(Taken {
                ordinal,
                products: products.clone(),
                fma: Vec::new(),
                read: Vec::new(),
            });
            self.taken.len() - 1
        });
        self.taken[at].fma.push(flops / 1e9);
        self.taken[at].read.push(bytes / 1e9);
    }

    /// The medians, where they were measured.
    pub(super) fn ceiling(&self, ordinal: usize, products: &str) -> Option<Ceiling> {
        let mut taken = self.taken.iter();
        let taken = taken.find(|one| one.ordinal == ordinal && one.products == products)?;
        Some(Ceiling {
            products: taken.products.clone(),
            fma_gflops: median(&taken.fma)?,
            read_gbps: median(&taken.read)?,
        })
    }
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
            products: FMA.into(),
            fma_gflops: median(&self.fma)?,
            read_gbps: median(&self.read)?,
        })
    }
}

impl Ceiling {
    /// The least time in which the problem's multiplications could be done and its K and V be read,
    /// as a share of `ms`; and which of the two takes that time.
    pub(super) fn share(&self, problem: &Problem, ms: f64) -> (f64, &str) {
        let fma_ms = problem.flops() / self.fma_gflops / 1e6;
        let read_ms = super::kv_bytes(problem) / self.read_gbps / 1e6;
        if fma_ms >= read_ms {
            (fma_ms / ms, &self.products)
        } else {
            (read_ms / ms, READ)
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
            products: FMA.into(),
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

    #[test]
    fn a_device_has_a_ceiling_for_each_kind_of_products() {
        let mut ceilings = DeviceCeilings::default();
        for (ordinal, products, flops) in [
            (0, "mma.sync bf16", 3e12),
            (0, "mma.sync bf16", 1e12),
            (0, "mma.sync tf32 / 3", 5e12),
            (1, "mma.sync bf16", 7e12),
        ] {
            ceilings.add(
                ordinal,
                DeviceRates {
                    products: products.into(),
                    flops,
                    bytes: 4e9,
                },
            );
        }
        let found = ceilings.ceiling(0, "mma.sync bf16").unwrap();
        assert_eq!((found.fma_gflops, found.read_gbps), (2000.0, 4.0));
        let found = ceilings.ceiling(0, "mma.sync tf32 / 3").unwrap();
        assert_eq!(found.fma_gflops, 5000.0);
        assert_eq!(found.products, "mma.sync tf32 / 3");
        assert!(ceilings.ceiling(2, "mma.sync bf16").is_none());
    }
}
