//! Fast memories that block sizes are chosen for.

use std::fmt;
use std::str::FromStr;

use tilewise::DType;

/// A processor: how much fast memory a tile may have, and how fast bytes come and products go.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chip {
    pub(crate) name: String,
    /// What the fast memory is.
    pub(crate) what: String,
    pub(crate) fast_bytes: usize,
    /// Of the slow memory, in bytes/s.
    pub(crate) bandwidth: Option<f64>,
    /// Products in 16 bits and in f32, in FLOP/s.
    flops: Option<(f64, f64)>,
}

/// Shared memory of one multiprocessor, bandwidth of the device memory, dense tensor-core FLOP/s in 16 bits
/// and plain FLOP/s in f32, from NVIDIA's data sheets of the SXM modules.
const GPUS: [(&str, &str, usize, f64, f64, f64); 3] = [
    ("a100", "A100 80 GB", 164, 2.039e12, 312e12, 19.5e12),
    ("h100", "H100", 228, 3.35e12, 989e12, 67e12),
    ("h200", "H200", 228, 4.8e12, 989e12, 67e12),
];

impl Chip {
    /// Fast memory of this size, and nothing else known.
    pub(crate) fn of_size(bytes: usize) -> Chip {
        Chip {
            name: "--memory".into(),
            what: "fast memory".into(),
            fast_bytes: bytes,
            bandwidth: None,
            flops: None,
        }
    }

    /// This machine's CPU: its second-level cache is what a core has for itself.
    pub(crate) fn cpu() -> Chip {
        let caches = tilewise::cpu::Caches::detect();
        Chip {
            name: "cpu".into(),
            what: "second-level cache of a core".into(),
            fast_bytes: caches.l2,
            bandwidth: None,
            flops: None,
        }
    }

    pub(crate) fn flops(&self, dtype: DType) -> Option<f64> {
        let (half, single) = self.flops?;
        match dtype {
            DType::F16 | DType::BF16 => Some(half),
            DType::F32 => Some(single),
            _ => None,
        }
    }
}

impl FromStr for Chip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.to_ascii_lowercase();
        if name == "cpu" {
            return Ok(Chip::cpu());
        }
        GPUS.iter()
            .find(|gpu| gpu.0 == name)
            .map(|&(_, name, kib, bandwidth, half, single)| Chip {
                name: name.into(),
                what: "shared memory of a multiprocessor".into(),
                fast_bytes: kib << 10,
                bandwidth: Some(bandwidth),
                flops: Some((half, single)),
            })
            .ok_or_else(|| format!("{text}: expected a100, h100, h200 or cpu"))
    }
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
