//! This project's kernels: compiled, and the names of what their argument block points to.

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;
use tilewise::Algorithm;
use tilewise::cuda::backward::Sums;
use tilewise::cuda::kernels::{self, Family, Mask, Selection, Variant};
use tilewise::cuda::nvrtc::Nvrtc;
use tilewise::cuda::raw::{Args, BackwardArgs, BackwardHopperArgs, HopperArgs, Tensor};

use super::ptx::Pointer;
use super::{
    Group, InspectArgs, Inspected, MaskArg, Report, access, occupancy, ptx, sass, verdict,
};

/// What the assembler says of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Resources {
    pub(super) registers: u32,
    /// Static shared memory of a block, in bytes.
    pub(super) static_shared: u32,
    /// That asked for at launch.
    pub(super) dynamic_shared: u32,
    pub(super) threads: u32,
    /// Bytes of a thread.
    pub(super) stack: u32,
    pub(super) spill_stores: u32,
    pub(super) spill_loads: u32,
}

impl Resources {
    /// From the remarks of `--ptxas-options=-v`.
    fn read(log: &str, variant: &Variant) -> Option<Resources> {
        let before = |what: &str| -> Option<u32> {
            let end = log.find(what)?;
            log[..end].split_whitespace().next_back()?.parse().ok()
        };
        Some(Resources {
            registers: before(" registers")?,
            static_shared: before(" bytes smem").unwrap_or(0),
            dynamic_shared: variant.shared,
            threads: variant.threads,
            stack: before(" bytes stack frame")?,
            spill_stores: before(" bytes spill stores")?,
            spill_loads: before(" bytes spill loads")?,
        })
    }
}

/// Names of the pointers in the argument block, as the papers name the tensors.
const POINTERS: [(usize, &str); 17] = [
    (
        std::mem::offset_of!(Args, q) + std::mem::offset_of!(Tensor, ptr),
        "q",
    ),
    (
        std::mem::offset_of!(Args, k) + std::mem::offset_of!(Tensor, ptr),
        "k",
    ),
    (
        std::mem::offset_of!(Args, v) + std::mem::offset_of!(Tensor, ptr),
        "v",
    ),
    (
        std::mem::offset_of!(Args, o) + std::mem::offset_of!(Tensor, ptr),
        "out",
    ),
    (
        std::mem::offset_of!(Args, bias) + std::mem::offset_of!(Tensor, ptr),
        "bias",
    ),
    (
        std::mem::offset_of!(Args, mask) + std::mem::offset_of!(Tensor, ptr),
        "mask",
    ),
    (
        std::mem::offset_of!(Args, keep) + std::mem::offset_of!(Tensor, ptr),
        "keep mask",
    ),
    (std::mem::offset_of!(Args, alibi), "slopes"),
    (std::mem::offset_of!(Args, sinks), "sinks"),
    (std::mem::offset_of!(Args, seqs), "sequences"),
    (std::mem::offset_of!(Args, work), "row blocks"),
    (std::mem::offset_of!(Args, lse), "lse"),
    (std::mem::offset_of!(Args, m), "m"),
    (std::mem::offset_of!(Args, l), "l"),
    (std::mem::offset_of!(Args, acc), "O"),
    (std::mem::offset_of!(Args, s), "S"),
    (std::mem::offset_of!(Args, p), "P"),
];

const fn tensor(offset: usize) -> usize {
    offset + std::mem::offset_of!(Tensor, ptr)
}

/// Names of the pointers that the backward kernels' argument block has after the forward call's, which
/// stands first in it.
const BACKWARD_POINTERS: [(usize, &str); 13] = [
    (tensor(std::mem::offset_of!(BackwardArgs, lse)), "lse"),
    (tensor(std::mem::offset_of!(BackwardArgs, dlse)), "dlse"),
    (tensor(std::mem::offset_of!(BackwardArgs, dout)), "dout"),
    (tensor(std::mem::offset_of!(BackwardArgs, dq)), "dq"),
    (tensor(std::mem::offset_of!(BackwardArgs, dk)), "dk"),
    (tensor(std::mem::offset_of!(BackwardArgs, dv)), "dv"),
    (std::mem::offset_of!(BackwardArgs, lse2), "L"),
    (std::mem::offset_of!(BackwardArgs, delta), "delta"),
    (std::mem::offset_of!(BackwardArgs, dq_acc), "dQ"),
    (std::mem::offset_of!(BackwardArgs, dsinks), "dsinks"),
    (
        std::mem::offset_of!(BackwardArgs, odd_rows),
        "marks of rows",
    ),
    (
        std::mem::offset_of!(BackwardArgs, odd_keys),
        "marks of keys",
    ),
    (std::mem::offset_of!(BackwardArgs, turns), TURNS),
];

/// Where `tw_hopper` has its tensor maps, and what its blocks take their turns by.
const MAPS: [(usize, &str); 6] = [
    (std::mem::offset_of!(HopperArgs, bias), "bias"),
    (std::mem::offset_of!(HopperArgs, mask), "mask"),
    (std::mem::offset_of!(HopperArgs, turns), TURNS),
    (std::mem::offset_of!(HopperArgs, q), "q"),
    (std::mem::offset_of!(HopperArgs, k), "k"),
    (std::mem::offset_of!(HopperArgs, v), "v"),
];

/// Where `tw_bwd_hopper` has its.
const BACKWARD_MAPS: [(usize, &str); 4] = [
    (std::mem::offset_of!(BackwardHopperArgs, q), "q"),
    (std::mem::offset_of!(BackwardHopperArgs, k), "k"),
    (std::mem::offset_of!(BackwardHopperArgs, v), "v"),
    (std::mem::offset_of!(BackwardHopperArgs, dout), "dout"),
];

/// Two words that say which row blocks are taken: no part of attention.
pub(super) const TURNS: &str = "turns";

/// Names for the kernel `entry`; of kernels that are not this project's, none are known.
pub(super) fn namer(entry: &str) -> impl Fn(Pointer) -> Option<&'static str> {
    let own = entry.starts_with("tw_");
    let more: &[_] = match entry.starts_with("tw_bwd") {
        true => &BACKWARD_POINTERS,
        false => &[],
    };
    // Its tensor maps stand first, which the copy engine reads by their own addresses.
    let (forward, maps): (usize, &[_]) = match entry {
        "tw_hopper" => (std::mem::offset_of!(HopperArgs, forward), &MAPS),
        "tw_bwd_hopper" => (
            std::mem::offset_of!(BackwardHopperArgs, backward),
            &BACKWARD_MAPS,
        ),
        _ => (0, &[]),
    };
    // Its matrices stand where other kernels have their sums.
    let matrices = entry.starts_with("tw_bwd_standard");
    move |pointer| {
        let offset = usize::try_from(pointer.offset)
            .ok()
            .filter(|_| own && pointer.param == 0)?;
        let at = |known: &&(usize, &'static str), offset| known.0 == offset;
        let of_forward = offset.checked_sub(forward);
        let mut maps = maps.iter();
        let mut pointers = POINTERS.iter().chain(more);
        maps.find(|known| at(known, offset))
            .or_else(|| pointers.find(|known| of_forward.is_some_and(|offset| at(known, offset))))
            .map(|known| match known.1 {
                "dQ" if matrices => "dP",
                "O" if matrices => "dX",
                name => name,
            })
    }
}

/// The algorithm whose kernels these are, if PTX of this project was read.
pub(super) fn algorithm_of(kernels: &[Inspected]) -> Option<Algorithm> {
    let all = |start: &str| kernels.iter().all(|one| one.ptx.entry.starts_with(start));
    if all("tw_hopper") {
        return Some(Algorithm::Fa2);
    }
    Algorithm::ALL
        .into_iter()
        .find(|algorithm| all(&format!("tw_{algorithm}")))
}

fn family(algorithm: Algorithm) -> Family {
    match algorithm.resolve() {
        Algorithm::Standard => Family::Standard,
        Algorithm::Fa1 => Family::Fa1,
        _ => Family::Fa2,
    }
}

impl InspectArgs {
    /// The variants that a backward call of `algorithm` launches; zeros, sinks and Hopper's
    /// kernel for blocks with NaN or infinity excepted.
    fn backward_variants(&self, algorithm: Algorithm) -> Result<Vec<Variant>> {
        use kernels::backward::{fa1, fa2, hopper, standard};
        let compute = self.compute()?;
        let limit = kernels::shared_limit(compute);
        let none = || {
            format!(
                "no backward {algorithm} kernel for {} with head_dim {}",
                self.dtype, self.head_dim
            )
        };
        let padded = kernels::pad(self.head_dim).with_context(none)?;
        let spec = kernels::Spec {
            mask: self.mask(),
            ..kernels::Spec::plain(self.dtype, padded)
        };
        let variants: Vec<Option<Variant>> = match algorithm.resolve() {
            Algorithm::Standard => {
                use standard::Part;
                [Part::Scores, Part::Weights, Part::Rows, Part::Keys]
                    .map(|part| standard::variant(&spec, limit, part, padded))
                    .into()
            }
            Algorithm::Fa1 => {
                let (variants, _) = fa1::variants(&spec, limit).with_context(none)?;
                variants.map(Some).into()
            }
            _ => {
                let mut all = vec![
                    fa2::prepare(&spec, limit, compute),
                    fa2::gradients(&spec, limit, compute, true),
                    fa2::store_dq(&spec, limit, compute),
                ];
                let sums = hopper::sums(&spec, Sums::Atomic);
                let own = hopper::gradients(&spec, limit, compute, sums)
                    .filter(|(variant, _)| variant.compiles_for(&self.arch));
                if let Some((gradients, tile)) = own {
                    all.extend([Some(gradients), Some(tile.store_dq(&spec))]);
                }
                all
            }
        };
        let variants: Option<Vec<Variant>> = variants.into_iter().collect();
        variants.with_context(none)
    }

    fn mask(&self) -> Mask {
        match self.mask {
            MaskArg::Full => Mask::Full,
            MaskArg::Causal => Mask::Upper,
            MaskArg::Band => Mask::Band,
        }
    }

    /// The variants that a call of `algorithm` launches.
    fn variants(&self, algorithm: Algorithm) -> Result<Vec<Variant>> {
        let compute = self.compute()?;
        let selection = Selection {
            dtypes: vec![self.dtype],
            head_dims: vec![self.head_dim],
            score: false,
            strided: false,
            options: false,
        };
        let mask = self.mask();
        let has = |variant: &Variant, name: &str, value: i32| {
            variant
                .defines
                .iter()
                .any(|&(n, v)| n == name && v == value)
        };
        let chosen: Vec<Variant> = kernels::list(compute, &selection)
            .into_iter()
            .filter(|variant| {
                variant.family == family(algorithm)
                    || algorithm.resolve() == Algorithm::Fa2 && variant.family == Family::Hopper
            })
            // What no call launches on `--arch`, and no compiler takes for it: Hopper's own on plain sm_90.
            .filter(|variant| variant.compiles_for(&self.arch))
            // Absorbing into a running state is another operation.
            .filter(|variant| !has(variant, "STATE", 1))
            .filter(|variant| {
                has(variant, "MASK", mask as i32) || variant.entry == "tw_standard_scores"
            })
            // Rows that one warp takes; a block takes longer ones by the same code.
            .filter(|variant| variant.entry != "tw_standard_softmax" || has(variant, "RT", 32))
            .collect();
        if chosen.is_empty() {
            bail!(
                "no {algorithm} kernel for {} with head_dim {}",
                self.dtype,
                self.head_dim
            );
        }
        Ok(chosen)
    }

    fn compute(&self) -> Result<i32> {
        kernels::compute_of(&self.arch)
            .filter(|_| self.arch.starts_with("sm_"))
            .with_context(|| {
                format!(
                    "--arch {}: expected an architecture such as sm_80 or sm_90a",
                    self.arch
                )
            })
    }
}

/// Bytes of a tile's scores that one thread holds: MT or WM groups of sixteen rows by KW or BN keys, over
/// the 32 threads of a warp; in the backward pass BM rows by BN keys, over the threads of a block.
fn score_bytes(variant: &Variant) -> Option<u32> {
    let define = |name: &str| {
        let found = variant.defines.iter().find(|define| define.0 == name);
        found.and_then(|define| u32::try_from(define.1).ok())
    };
    let (groups, keys) = match variant.family {
        Family::Fa1 => (define("MT")?, define("KW")?),
        Family::Fa2 => (define("WM")?, define("BN")?),
        Family::Hopper => (1, define("BN")?),
        Family::BackwardFa1 | Family::BackwardFa2 => {
            return Some(define("BM")? * define("BN")? * 4 / variant.threads);
        }
        // A warpgroup brings the tiles.
        Family::BackwardHopper => {
            return Some(define("BM")? * define("BN")? * 4 / (variant.threads - 128));
        }
        _ => return None,
    };
    Some(groups * 16 * keys * 4 / 32)
}

pub(super) fn inspect(args: &InspectArgs) -> Result<Report> {
    let compute = args.compute()?;
    let nvrtc = Nvrtc::find(None).map_err(anyhow::Error::msg)?;
    let tool = sass::find(Some(nvrtc.path()));
    let folder = match &args.keep {
        Some(folder) => Folder::Kept(folder.clone()),
        None => {
            Folder::Passing(std::env::temp_dir().join(format!("tilewise-{}", std::process::id())))
        }
    };
    std::fs::create_dir_all(folder.path()).with_context(|| folder.path().display().to_string())?;
    let mut report = Report {
        schema: 1,
        arch: Some(args.arch.clone()),
        compiler: Some(nvrtc.to_string()),
        disassembler: tool.as_ref().map(|tool| tool.display().to_string()),
        algorithms: Vec::new(),
        notes: Vec::new(),
    };
    if tool.is_none() {
        report.notes.push(
            "machine code is not counted: no nvdisasm or cuobjdump on PATH, in CUDA_HOME or beside NVRTC \
             (pip install nvidia-cuda-nvdisasm brings one; TILEWISE_DISASSEMBLER names one)"
                .into(),
        );
    }
    for &algorithm in &args.algorithms {
        let algorithm = algorithm.resolve();
        let mut inspected = Vec::new();
        let variants = match args.backward {
            true => args.backward_variants(algorithm)?,
            false => args.variants(algorithm)?,
        };
        for variant in variants {
            let text = compile(&nvrtc, &variant, &args.arch.replace("sm_", "compute_"))?.image;
            let text = String::from_utf8_lossy(&text).into_owned();
            let cubin = compile(&nvrtc, &variant, &args.arch)?;
            let file = folder.path().join(format!("{}.cubin", variant.name));
            std::fs::write(&file, &cubin.image).with_context(|| file.display().to_string())?;
            if args.keep.is_some() {
                let file = file.with_extension("ptx");
                std::fs::write(&file, &text).with_context(|| file.display().to_string())?;
            }
            let functions =
                ptx::parse(&text).map_err(|error| anyhow!("{}: {error}", variant.name))?;
            let function = functions
                .iter()
                .find(|function| function.name == variant.entry)
                .with_context(|| format!("{}: PTX without {}", variant.name, variant.entry))?;
            let sass = match &tool {
                Some(tool) => {
                    let text = sass::disassemble(tool, &file).map_err(|error| anyhow!(error))?;
                    sass::parse(&text).remove(variant.entry)
                }
                None => None,
            };
            let resources = Resources::read(&cubin.log, &variant);
            inspected.push(Inspected {
                ptx: access::kernel(function, namer(variant.entry)),
                sass,
                occupancy: resources.as_ref().map(|r| {
                    let shared = r.static_shared + r.dynamic_shared;
                    occupancy::of(compute, r.threads, r.registers, shared)
                }),
                resources,
                score_bytes: score_bytes(&variant),
                name: variant.name,
            });
        }
        let findings = match args.backward {
            true => verdict::backward_findings(&inspected),
            false => verdict::findings(algorithm, &inspected),
        };
        report.algorithms.push(Group {
            name: match args.backward {
                true => format!("{algorithm} backward"),
                false => algorithm.name().into(),
            },
            kernels: inspected,
            holds: findings.iter().all(|finding| finding.holds),
            findings,
        });
    }
    Ok(report)
}

fn compile(
    nvrtc: &Nvrtc,
    variant: &Variant,
    arch: &str,
) -> Result<tilewise::cuda::nvrtc::Compiled> {
    variant
        .compile(nvrtc, arch)
        .map_err(|log| anyhow!("{} for {arch}: {log}", variant.name))
}

/// Where cubins lie while they are read.
enum Folder {
    Kept(std::path::PathBuf),
    /// Removed in the end.
    Passing(std::path::PathBuf),
}

impl Folder {
    fn path(&self) -> &std::path::Path {
        match self {
            Folder::Kept(path) | Folder::Passing(path) => path,
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Folder::Passing(path) = self {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}
