//! Instruction sets: which there are, and which one a call uses.

use std::fmt;
use std::str::FromStr;

use tilewise_core::{Error, Result};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::kernel::pairs::amx;

/// The instruction set of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// AMX tiles for the products of bf16, AVX-512 for the rest: where Linux lets the process use them,
    /// which it is asked for once.
    Amx,
    /// `vdpbf16ps` for the products of bf16, AVX-512 for the rest.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// What the `wide` crate makes of the target's baseline: NEON, wasm SIMD, SSE2.
    Portable,
    /// AMX's products and arithmetic without AMX: slow, here to be tested wherever tests run.
    AmxEmulated,
}

/// Forces the instruction set of every [`CpuBackend`](crate::CpuBackend) that does not name one.
pub const ISA_VARIABLE: &str = "TILEWISE_ISA";

impl Isa {
    /// Every instruction set, best first: but see [`best`](Self::best).
    pub const ALL: [Isa; 5] = [
        Isa::Amx,
        Isa::Avx512Bf16,
        Isa::Avx512,
        Isa::Avx2,
        Isa::Portable,
    ];

    /// The name as accepted by [`FromStr`].
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::AmxEmulated => "amx-emulated",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }

    /// The set that has the vectors: what everything but the products of bf16 is made with.
    pub(crate) fn vectors(self) -> Isa {
        match self {
            Isa::Amx | Isa::Avx512Bf16 => Isa::Avx512,
            Isa::AmxEmulated => Isa::Portable,
            other => other,
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => Isa::Avx512Bf16.is_available() && amx::is_available(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Isa::Portable | Isa::AmxEmulated => true,
            #[allow(unreachable_patterns)] // which there are depends on the target
            _ => false,
        }
    }

    /// Those that this processor has, best first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL
            .into_iter()
            .filter(|isa| isa.is_available())
            .collect()
    }

    /// The best that this processor has.
    ///
    /// [`Avx512Bf16`](Self::Avx512Bf16) only where `vdpbf16ps` is faster than widening bf16 and
    /// multiplying in f32. That is known of the processor, not measured: one machine gives the same
    /// bits every time.
    pub fn best() -> Isa {
        let best = |isa: &Isa| *isa != Isa::Avx512Bf16 || has_fast_bf16();
        let available = Isa::available().into_iter().find(best);
        available.unwrap_or(Isa::Portable)
    }

    /// This instruction set, if the processor has it.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: there is no falling back from what was asked for.
    pub fn checked(self) -> Result<Isa> {
        if self.is_available() {
            Ok(self)
        } else {
            let has: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            Err(Error::Unavailable {
                backend: "cpu".into(),
                reason: format!("this processor has no {self}, it has {}", has.join(", ")),
            })
        }
    }

    /// What `TILEWISE_ISA` asks for, or the best.
    ///
    /// # Errors
    /// [`Error::Option`] if it is no name, [`Error::Unavailable`] if the processor lacks it.
    pub fn from_env() -> Result<Isa> {
        // What is no text is no name either, but it was asked for.
        let asked = std::env::var_os(ISA_VARIABLE).unwrap_or_default();
        if asked.is_empty() {
            return Ok(Isa::best());
        }
        let name = asked.to_string_lossy();
        match name.parse::<Isa>() {
            Ok(isa) => isa.checked(),
            Err(_) => Err(Error::option(
                ISA_VARIABLE,
                "amx, avx512bf16, avx512, avx2 or portable",
                name,
            )),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "amx" => Ok(Isa::Amx),
            "avx512bf16" => Ok(Isa::Avx512Bf16),
            "amx-emulated" => Ok(Isa::AmxEmulated),
            "avx512" => Ok(Isa::Avx512),
            "avx2" => Ok(Isa::Avx2),
            "portable" => Ok(Isa::Portable),
            _ => Err(Error::option(
                "isa",
                "amx, avx512bf16, avx512, avx2 or portable",
                s,
            )),
        }
    }
}

/// Whether `vdpbf16ps`, where there is one, multiplies twice as much as an FMA in the same time: AMD's
/// do, Intel's take twice as long as an FMA (Emerald Rapids: 90 against 184 GFLOP/s a thread).
#[cfg(target_arch = "x86_64")]
fn has_fast_bf16() -> bool {
    use std::arch::x86_64::__cpuid_count;
    // Unsafe in earlier versions of Rust.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has leaf 0.
    let leaf = unsafe { __cpuid_count(0, 0) };
    let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    vendor.as_flattened() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fast_bf16() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways_and_the_portable_one_is_always_there() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
            assert_eq!(isa.checked().is_ok(), Isa::available().contains(&isa));
        }
        assert!(Isa::available().contains(&Isa::Portable));
        assert!("sse9".parse::<Isa>().is_err());
    }
}
