//! Which pass is counted: forward or backward.

use serde::Serialize;
use tilewise::core::io_model::{Asked, Io, Modifiers, backward_paper_terms, paper_terms};
use tilewise::core::schedule::BlockSizes;
use tilewise::{Algorithm, Problem};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Pass {
    /// Traffic and arithmetic by formula; lse is asked for, and the gradient of a bias that is there.
    pub(super) fn formula(
        self,
        problem: &Problem,
        algorithm: Algorithm,
        sizes: BlockSizes,
        modifiers: Modifiers,
    ) -> Io {
        match self {
            Pass::Forward => Io::of(problem, algorithm, sizes, modifiers, true),
            Pass::Backward => {
                let asked = Asked {
                    dlse: false,
                    dbias: problem.has_bias(),
                };
                Io::of_backward(problem, algorithm, sizes, modifiers, asked)
            }
        }
    }

    /// The papers' leading terms.
    pub(super) fn papers(self, problem: &Problem, algorithm: Algorithm, sizes: BlockSizes) -> Io {
        match self {
            Pass::Forward => paper_terms(problem, algorithm, sizes),
            Pass::Backward => backward_paper_terms(problem, algorithm, sizes),
        }
    }

    /// Those terms as the papers write them.
    pub(super) fn paper_term(self, algorithm: Algorithm) -> &'static str {
        match (self, algorithm.resolve()) {
            (Pass::Forward, Algorithm::Standard) => "4Nd + 4N²",
            (Pass::Forward, Algorithm::Fa1) => "2Nd + T_c·Nd + 2T_c·Nd",
            (Pass::Forward, _) => "Nd + 2T_r·Nd + Nd",
            (Pass::Backward, Algorithm::Standard) => "8Nd + 7N²",
            (Pass::Backward, Algorithm::Fa1) => "4Nd + 5T_c·Nd",
            (Pass::Backward, _) => "4Nd + 2Nd + 4T_c·Nd",
        }
    }

    /// What the names of its CUDA kernels go on with after `tw_`: alternatives of a regular expression.
    pub(super) fn kernels(self) -> &'static str {
        match self {
            Pass::Forward => "standard|fa|hopper|decode|split",
            Pass::Backward => "bwd",
        }
    }

    /// Products of matrices a tile.
    pub(super) fn products(self) -> u128 {
        match self {
            Pass::Forward => 2,
            Pass::Backward => 5,
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use tilewise::cuda::kernels::{Family, Selection, list};

    use super::*;

    /// A kernel that no pass names would be left out of what is counted.
    #[test]
    fn every_kernel_of_a_pass_is_named() {
        let named = |entry: &str, pass: Pass| {
            let rest = entry.trim_start_matches("tw_");
            pass.kernels().split('|').any(|name| rest.starts_with(name))
        };
        let selection = Selection {
            head_dims: vec![64, 128, 256, 512],
            ..Selection::default()
        };
        for variant in list(90, &selection) {
            let pass = match variant.family {
                Family::BackwardFa1
                | Family::BackwardFa2
                | Family::BackwardHopper
                | Family::BackwardWide
                | Family::BackwardStandard => Pass::Backward,
                // They lay inputs out, keep running states and measure the chip.
                Family::Pack | Family::State | Family::Ceilings => continue,
                _ => Pass::Forward,
            };
            assert!(named(variant.entry, pass), "{}", variant.entry);
        }
    }
}
