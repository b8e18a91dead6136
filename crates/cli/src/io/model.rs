//! The figures of `io`, as its JSON has them.

use anyhow::Result;
use serde::Serialize;
use tilewise::core::io_model::{Io, Modifiers, fa2_block_sizes, io_lower_bound};
use tilewise::core::observe::Tensor;
use tilewise::core::schedule::{BlockSizes, fa1_block_sizes};
use tilewise::{Algorithm, Problem};

use super::compare::Comparison;
use super::measure::Measured;
use super::pass::Pass;
use super::plot::Point;
use super::watch::{self, Counted};
use super::{Chip, IoArgs};
use crate::cli::Verdict;
use crate::facts::ProblemFacts;

/// Everything that `io` found. `schema` rises when a field changes its meaning or goes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) schema: u32,
    pub(super) inputs: Vec<String>,
    pub(super) pass: Pass,
    pub(super) problem: ProblemFacts,
    pub(super) fast_memory: FastMemory,
    /// S and P v; backward S, dV, dP, dQ and dK.
    pub(super) products_a_tile: u128,
    pub(super) algorithms: Vec<Traffic>,
    /// N²d²/M in elements.
    pub(super) lower_bound_elements: f64,
    pub(super) equal_tiles: Vec<EqualTiles>,
    pub(super) over_n: Vec<Point>,
    pub(super) comparison: Comparison,
    pub(super) measured: Vec<Measured>,
}

#[derive(Debug, Serialize)]
pub(super) struct FastMemory {
    pub(super) chip: String,
    pub(super) what: String,
    pub(super) bytes: usize,
    /// M: numbers of the inputs' type.
    pub(super) elements: usize,
    pub(super) bandwidth_gbps: Option<f64>,
    pub(super) product_gflops: Option<f64>,
}

/// One algorithm.
#[derive(Debug, Serialize)]
pub(super) struct Traffic {
    pub(super) algorithm: &'static str,
    pub(super) block_rows: usize,
    pub(super) block_keys: usize,
    /// Where the block sizes come from.
    pub(super) blocks_from: &'static str,
    pub(super) tensors: Vec<Line>,
    pub(super) bytes_read: u128,
    pub(super) bytes_written: u128,
    pub(super) paper_bytes: u128,
    pub(super) paper_term: &'static str,
    pub(super) work: WorkFacts,
    /// `all`, `one head` (backward: of k and v, with its query heads), or `none`: which were run to count.
    pub(super) counted_heads: &'static str,
    /// Whether counts and formulas are equal; `null` if nothing was counted.
    pub(super) agrees: Option<bool>,
    pub(super) traffic_ms: Option<f64>,
    pub(super) product_ms: Option<f64>,
}

/// One tensor: elements read and written.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    pub(super) tensor: &'static str,
    pub(super) element_bytes: usize,
    pub(super) read: Pair,
    pub(super) written: Pair,
    pub(super) bytes: u128,
    /// What the papers' terms have of it, read and written, in elements.
    pub(super) paper: u128,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Pair {
    pub(super) counted: Option<u128>,
    pub(super) formula: u128,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct WorkFacts {
    pub(super) tiles: u128,
    pub(super) skipped_tiles: u128,
    pub(super) multiply_adds: u128,
    pub(super) exps: u128,
    pub(super) rescales: u128,
    pub(super) divisions: u128,
    /// Elements of dS, and terms of the sums that Δ is (backward).
    pub(super) score_gradients: u128,
    pub(super) delta_terms: u128,
    /// All operations besides the products, for a thousand multiply-adds.
    pub(super) others_per_1000_multiply_adds: f64,
}

/// FA1 and FA2 with tiles of one size.
#[derive(Debug, Serialize)]
pub(super) struct EqualTiles {
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) fa1_elements: u128,
    pub(super) fa2_elements: u128,
    pub(super) fa1_bytes: u128,
    pub(super) fa2_bytes: u128,
}

/// What is run to count.
pub(super) enum Source<'a> {
    /// No data: any will do.
    Shape,
    Files(&'a dyn Fn(Algorithm, BlockSizes) -> tilewise::Result<Counted>),
}

impl Source<'_> {
    /// `None` if a run would take more than `limit` multiply-adds.
    fn count(
        &self,
        pass: Pass,
        problem: &Problem,
        algorithm: Algorithm,
        sizes: BlockSizes,
        work: f64,
        limit: f64,
    ) -> tilewise::Result<Option<Counted>> {
        let heads = watch::repeats(pass, problem.dims()).max(1) as f64;
        match self {
            Source::Files(count) if work <= limit => count(algorithm, sizes).map(Some),
            Source::Files(_) => Ok(None),
            Source::Shape if work <= limit => {
                watch::shape(pass, problem, algorithm, sizes, false).map(Some)
            }
            Source::Shape if work / heads <= limit => {
                watch::shape(pass, problem, algorithm, sizes, true).map(Some)
            }
            Source::Shape => Ok(None),
        }
    }
}

/// Block sizes of the three algorithms and where each comes from.
pub(super) struct Blocks {
    pub(super) standard: (BlockSizes, &'static str),
    pub(super) fa1: (BlockSizes, &'static str),
    pub(super) fa2: (BlockSizes, &'static str),
}

impl Blocks {
    pub(super) fn choose(args: &IoArgs, chip: &Chip, problem: &Problem) -> Blocks {
        let dims = problem.dims();
        let size = problem.dtype().size();
        let asked = |own: Option<BlockSizes>| own.or(args.blocks).map(|sizes| (sizes, "asked for"));
        let list = fa2_block_sizes(
            chip.fast_bytes,
            problem.dtype(),
            dims.head_dim,
            dims.head_dim_v,
        );
        let listed = if list.of_the_list {
            "FA2's list"
        } else {
            "what fits: none of FA2's list does"
        };
        let fa2 = asked(args.fa2_blocks).unwrap_or((list.sizes, listed));
        let formula = fa1_block_sizes(chip.fast_bytes / size, dims.head_dim);
        Blocks {
            standard: (fa2.0, "those of fa2"),
            fa1: asked(args.fa1_blocks).unwrap_or((formula, "FA1's formula")),
            fa2,
        }
    }

    pub(super) fn of(&self, algorithm: Algorithm) -> (BlockSizes, &'static str) {
        match algorithm.resolve() {
            Algorithm::Standard => self.standard,
            Algorithm::Fa1 => self.fa1,
            _ => self.fa2,
        }
    }
}

impl Report {
    pub(super) fn new(
        args: &IoArgs,
        problem: &Problem,
        inputs: Vec<String>,
        modifiers: Modifiers,
        source: &Source<'_>,
    ) -> Result<Report> {
        let (chip, pass) = (args.chip(problem)?, args.pass());
        let blocks = Blocks::choose(args, &chip, problem);
        let elements = chip.fast_bytes / problem.dtype().size();
        let mut algorithms = Vec::new();
        let mut runs = Vec::new();
        for algorithm in Algorithm::ALL {
            let (sizes, from) = blocks.of(algorithm);
            let exact = pass.formula(problem, algorithm, sizes, modifiers);
            let work = exact.work.multiply_adds as f64;
            let counted = source.count(pass, problem, algorithm, sizes, work, args.count_limit)?;
            let mut traffic = Traffic::new(
                pass,
                problem,
                &chip,
                algorithm,
                sizes,
                &exact,
                counted.as_ref(),
            );
            traffic.blocks_from = from;
            algorithms.push(traffic);
            runs.push((algorithm, sizes, exact, counted));
        }
        let equal_tiles = [blocks.fa1.0, blocks.fa2.0].map(|sizes| {
            let io = |algorithm| pass.formula(problem, algorithm, sizes, modifiers);
            let (fa1, fa2) = (io(Algorithm::Fa1), io(Algorithm::Fa2));
            EqualTiles {
                rows: sizes.rows(),
                keys: sizes.keys(),
                fa1_elements: fa1.elements(),
                fa2_elements: fa2.elements(),
                fa1_bytes: fa1.bytes(),
                fa2_bytes: fa2.bytes(),
            }
        });
        let mut equal_tiles = Vec::from(equal_tiles);
        if blocks.fa1.0 == blocks.fa2.0 {
            equal_tiles.truncate(1);
        }
        Ok(Report {
            schema: 1,
            inputs,
            pass,
            problem: ProblemFacts::new(problem),
            fast_memory: FastMemory {
                elements,
                bytes: chip.fast_bytes,
                bandwidth_gbps: chip.bandwidth.map(|x| x / 1e9),
                product_gflops: chip.flops(problem.dtype()).map(|x| x / 1e9),
                what: chip.what.clone(),
                chip: chip.name.clone(),
            },
            products_a_tile: pass.products(),
            algorithms,
            lower_bound_elements: io_lower_bound(problem, elements),
            equal_tiles,
            over_n: super::plot::over_n(args, &chip, problem)?,
            comparison: Comparison::new(pass, problem, &runs),
            measured: Vec::new(),
        })
    }

    /// Whether every count is what the formula says.
    pub(super) fn verdict(&self) -> Verdict {
        if self
            .algorithms
            .iter()
            .any(|traffic| traffic.agrees == Some(false))
        {
            Verdict::Differ
        } else {
            Verdict::Agree
        }
    }
}

impl Traffic {
    fn new(
        pass: Pass,
        problem: &Problem,
        chip: &Chip,
        algorithm: Algorithm,
        sizes: BlockSizes,
        exact: &Io,
        counted: Option<&Counted>,
    ) -> Traffic {
        let papers = pass.papers(problem, algorithm, sizes);
        let lines = Tensor::ALL.into_iter().filter_map(|tensor| {
            let formula = exact.count(tensor);
            let seen = counted.map(|counted| counted.io.count(tensor));
            let paper = papers.count(tensor).map_or(0, |c| c.loaded + c.stored);
            let any = formula.or(seen.flatten())?;
            Some(Line {
                tensor: tensor.name(),
                element_bytes: any.element_bytes,
                read: Pair {
                    counted: seen.map(|seen| seen.map_or(0, |c| c.loaded)),
                    formula: formula.map_or(0, |c| c.loaded),
                },
                written: Pair {
                    counted: seen.map(|seen| seen.map_or(0, |c| c.stored)),
                    formula: formula.map_or(0, |c| c.stored),
                },
                bytes: formula.map_or(0, |c| c.loaded_bytes() + c.stored_bytes()),
                paper,
            })
        });
        let work = exact.work;
        let others = work.others();
        let (traffic_ms, product_ms) = predicted_ms(problem, chip, exact);
        Traffic {
            algorithm: algorithm.name(),
            block_rows: sizes.rows(),
            block_keys: sizes.keys(),
            blocks_from: "",
            tensors: lines.collect(),
            bytes_read: exact.loaded_bytes(),
            bytes_written: exact.stored_bytes(),
            paper_bytes: papers.bytes(),
            paper_term: pass.paper_term(algorithm),
            work: WorkFacts {
                tiles: work.products / pass.products(),
                skipped_tiles: work.skipped_tiles,
                multiply_adds: work.multiply_adds,
                exps: work.exps,
                rescales: work.rescales,
                divisions: work.divisions,
                score_gradients: work.score_gradients,
                delta_terms: work.delta_terms,
                others_per_1000_multiply_adds: 1e3 * others as f64
                    / (work.multiply_adds as f64).max(1.0),
            },
            counted_heads: match counted {
                None => "none",
                Some(counted) if counted.repeats > 1 => "one head",
                Some(_) => "all",
            },
            agrees: counted.map(|counted| counted.io == *exact),
            traffic_ms,
            product_ms,
        }
    }

    pub(super) fn elements(&self) -> u128 {
        let of = |line: &Line| line.read.formula + line.written.formula;
        self.tensors.iter().map(of).sum()
    }

    pub(super) fn bytes(&self) -> u128 {
        self.bytes_read + self.bytes_written
    }
}

/// What the bytes take at the chip's bandwidth, and the products at its peak.
pub(super) fn predicted_ms(problem: &Problem, chip: &Chip, io: &Io) -> (Option<f64>, Option<f64>) {
    let traffic = chip.bandwidth.map(|rate| io.bytes() as f64 / rate * 1e3);
    let flops = 2.0 * io.work.multiply_adds as f64;
    let products = chip.flops(problem.dtype()).map(|rate| flops / rate * 1e3);
    (traffic, products)
}

#[cfg(test)]
mod tests {
    use tilewise::{DType, Dims, Options};

    use super::*;

    #[test]
    fn a_count_that_is_not_what_the_formula_says_is_seen() {
        let dims = Dims {
            batch: 1,
            num_heads: 2,
            num_kv_heads: 1,
            seqlen_q: 9,
            seqlen_k: 11,
            head_dim: 4,
            head_dim_v: 4,
        };
        let problem = Problem::dense(dims, DType::F32, &Options::new()).unwrap();
        let sizes = BlockSizes::new(4, 4).unwrap();
        let chip: Chip = "h100".parse().unwrap();
        for pass in [Pass::Forward, Pass::Backward] {
            for algorithm in Algorithm::ALL {
                let exact = pass.formula(&problem, algorithm, sizes, Modifiers::default());
                let mut counted = watch::shape(pass, &problem, algorithm, sizes, false).unwrap();
                let agrees = |counted: &Counted| {
                    let counted = Some(counted);
                    Traffic::new(pass, &problem, &chip, algorithm, sizes, &exact, counted).agrees
                };
                assert_eq!(agrees(&counted), Some(true));
                counted.io.counts[0].loaded += 1;
                assert_eq!(agrees(&counted), Some(false));
                let one = watch::shape(pass, &problem, algorithm, sizes, true).unwrap();
                assert_eq!(agrees(&one), Some(true));
            }
        }
    }
}
