//! Which of the papers' schedules to run.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The schedule by which attention is computed. It is chosen apart from the backend, so that two
/// schedules can be compared on one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// The backend's fastest: [`Algorithm::Fa2`].
    #[default]
    Auto,
    /// S and P are written to memory and read back: the baseline of the papers.
    Standard,
    /// FlashAttention (Dao et al. 2022, algorithm 1): outer loop over K/V blocks, inner over Q;
    /// O stays normalised and travels through memory, with ℓ and m, at every step.
    Fa1,
    /// FlashAttention-2 (Dao 2023, algorithm 1): outer loop over Q blocks, inner over K/V; Õ stays
    /// on chip unnormalised, one division at the end.
    Fa2,
}

impl Algorithm {
    /// The three schedules, in the order in which the papers came.
    pub const ALL: [Algorithm; 3] = [Algorithm::Standard, Algorithm::Fa1, Algorithm::Fa2];

    /// The name as accepted by [`FromStr`].
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Standard => "standard",
            Algorithm::Fa1 => "fa1",
            Algorithm::Fa2 => "fa2",
        }
    }

    /// The schedule that will run: `Auto` resolved.
    pub fn resolve(self) -> Algorithm {
        match self {
            Algorithm::Auto => Algorithm::Fa2,
            other => other,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "auto" => Ok(Algorithm::Auto),
            "standard" | "naive" => Ok(Algorithm::Standard),
            "fa1" | "flash1" => Ok(Algorithm::Fa1),
            "fa2" | "flash2" => Ok(Algorithm::Fa2),
            _ => Err(Error::option(
                "algorithm",
                "auto, standard, fa1 or fa2",
                s.to_string(),
            )),
        }
    }
}
