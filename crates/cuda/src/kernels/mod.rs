//! The kernel families, their compile-time variants, and how to build them ahead of time.
//!
//! Beside each family's `.cu` stands a Rust file with its tile table: which variant serves a problem
//! within an architecture's shared memory, and what a launch of it needs.

pub mod backward;
pub mod ceilings;
pub mod decode;
pub mod fa1;
pub mod fa2;
pub mod fa2_wide;
pub mod hopper;
pub mod pack;
pub mod split;
pub mod standard;
pub mod state;

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};
use tilewise_core::{DType, MaskRule};

use crate::cache::Store;
use crate::nvrtc::Nvrtc;

/// What every kernel is compiled after: types and tiles, scores and dropout, a block's place, the
/// online softmax of a tile, f32 as pairs of f16.
const PRELUDE: &str = concat!(
    include_str!("prelude.cu"),
    "\n",
    include_str!("score.cu"),
    "\n",
    include_str!("place.cu"),
    "\n",
    include_str!("online.cu"),
    "\n",
    include_str!("pairs.cu"),
);

/// A kernel source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// S, softmax and P V as separate kernels.
    Standard,
    /// FlashAttention-1.
    Fa1,
    /// FlashAttention-2, also in the form that absorbs keys into a state.
    Fa2,
    /// FlashAttention-2 for head_dims above 256.
    Fa2Wide,
    /// FlashAttention-2 on Hopper: products of warpgroups, tiles by the copy engine.
    Hopper,
    /// Few queries over many keys: FlashAttention-2 with the keys split.
    Decode,
    /// Begin, merge and finish of a state; random inputs for benchmarks.
    State,
    /// Tensors laid out anew, rows of no sequence cleared.
    Pack,
    /// f32 as pairs of f16.
    Split,
    /// The gradients as FlashAttention-2 makes them.
    BackwardFa2,
    /// The same on Hopper: products of warpgroups, tiles by the copy engine.
    BackwardHopper,
    /// For head_dims above 256.
    BackwardWide,
    /// As FlashAttention-1 makes them.
    BackwardFa1,
    /// By whole matrices.
    BackwardStandard,
    /// What the device could do at most.
    Ceilings,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 15] = [
        Family::Standard,
        Family::Fa1,
        Family::Fa2,
        Family::Fa2Wide,
        Family::Hopper,
        Family::Decode,
        Family::State,
        Family::Pack,
        Family::Split,
        Family::BackwardFa2,
        Family::BackwardHopper,
        Family::BackwardWide,
        Family::BackwardFa1,
        Family::BackwardStandard,
        Family::Ceilings,
    ];

    /// Its name, as in file names.
    pub fn name(self) -> &'static str {
        match self {
            Family::Standard => "standard",
            Family::Fa1 => "fa1",
            Family::Fa2 => "fa2",
            Family::Fa2Wide => "fa2-wide",
            Family::Hopper => "hopper",
            Family::Decode => "decode",
            Family::State => "state",
            Family::Pack => "pack",
            Family::Split => "split",
            Family::BackwardFa2 => "backward-fa2",
            Family::BackwardHopper => "backward-hopper",
            Family::BackwardWide => "backward-wide",
            Family::BackwardFa1 => "backward-fa1",
            Family::BackwardStandard => "backward-standard",
            Family::Ceilings => "ceilings",
        }
    }

    fn texts(self) -> (&'static str, &'static str) {
        match self {
            Family::Standard => (include_str!("standard.cu"), include_str!("standard.rs")),
            Family::Fa1 => (include_str!("fa1.cu"), include_str!("fa1.rs")),
            Family::Fa2 => (include_str!("fa2.cu"), include_str!("fa2.rs")),
            Family::Fa2Wide => (include_str!("fa2_wide.cu"), include_str!("fa2_wide.rs")),
            Family::Hopper => (
                concat!(include_str!("wgmma.cu"), "\n", include_str!("hopper.cu")),
                include_str!("hopper.rs"),
            ),
            Family::Decode => (include_str!("decode.cu"), include_str!("decode.rs")),
            Family::State => (include_str!("state.cu"), include_str!("state.rs")),
            Family::Pack => (include_str!("pack.cu"), include_str!("pack.rs")),
            Family::Split => (include_str!("split.cu"), include_str!("split.rs")),
            Family::BackwardFa2 => (
                concat!(
                    include_str!("backward/common.cu"),
                    "\n",
                    include_str!("backward/fa2.cu"),
                    "\n",
                    include_str!("backward/dq.cu"),
                    "\n",
                    include_str!("backward/rows.cu")
                ),
                include_str!("backward/fa2.rs"),
            ),
            Family::BackwardHopper => (
                concat!(
                    include_str!("backward/common.cu"),
                    "\n",
                    include_str!("wgmma.cu"),
                    "\n",
                    include_str!("backward/hopper.cu")
                ),
                include_str!("backward/hopper.rs"),
            ),
            Family::BackwardWide => (
                concat!(
                    include_str!("backward/common.cu"),
                    "\n",
                    include_str!("backward/wide.cu")
                ),
                include_str!("backward/wide.rs"),
            ),
            Family::BackwardFa1 => (
                concat!(
                    include_str!("backward/common.cu"),
                    "\n",
                    include_str!("backward/fa1.cu")
                ),
                concat!(
                    include_str!("backward/fa1.rs"),
                    include_str!("backward/fa2.rs")
                ),
            ),
            Family::BackwardStandard => (
                concat!(
                    include_str!("backward/common.cu"),
                    "\n",
                    include_str!("backward/standard.cu")
                ),
                include_str!("backward/standard.rs"),
            ),
            Family::Ceilings => (include_str!("ceilings.cu"), include_str!("ceilings.rs")),
        }
    }

    /// What the compiler sees.
    pub fn source(self) -> String {
        format!("{PRELUDE}\n{}", self.texts().0)
    }

    /// Changes with the kernels and with their tile table: what a measured record is tied to.
    pub fn hash(self) -> String {
        let (source, table) = self.texts();
        hex(&[PRELUDE, source, table])
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// SHA-256 of the parts, each preceded by its length.
pub(crate) fn hex(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Which bounds a row's live keys have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mask {
    /// Every key is live.
    Full = 0,
    /// An upper bound that moves with the row: causality.
    Upper = 1,
    /// A lower and an upper bound: a window.
    Band = 2,
}

impl Mask {
    /// The kinds.
    pub const ALL: [Mask; 3] = [Mask::Full, Mask::Upper, Mask::Band];

    /// The kind that `rule` needs, and its bounds as key − row: `lo..=hi`, clamped to what 32 bits
    /// and the lengths leave of them.
    pub fn of(rule: &MaskRule, left: Option<usize>, right: Option<usize>) -> (Mask, i32, i32) {
        let (sq, sk) = (rule.seqlen_q() as i64, rule.seqlen_k() as i64);
        let off = rule.diagonal(0);
        // Beyond these a bound hides nothing (lo) or nothing more (hi), whichever row asks.
        let clamp = |x: i128, low: i64, high: i64| x.clamp(low as i128, high as i128) as i32;
        let lo = left.map_or(-sq, |left| {
            i64::from(clamp(off as i128 - left as i128, -sq, sk))
        });
        let hi = right.map_or(sk, |right| {
            i64::from(clamp(off as i128 + right as i128, -sq, sk))
        });
        let kind = if lo > 1 - sq {
            Mask::Band
        } else if hi < sk - 1 {
            Mask::Upper
        } else {
            Mask::Full
        };
        (kind, lo as i32, hi as i32)
    }

    fn name(self) -> &'static str {
        match self {
            Mask::Full => "full",
            Mask::Upper => "causal",
            Mask::Band => "band",
        }
    }
}

/// What becomes of a score between the product and the softmax, SCORE of `score.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Score {
    /// The scale is folded into the exponent.
    Folded = 0,
    /// Scale and softcap are applied to each score: with a softcap, and with a scale that is not
    /// above 0.
    Applied = 1,
    /// Also bias, ALiBi and mask, whichever the call has.
    Modified = 2,
}

impl Score {
    /// The kinds.
    pub const ALL: [Score; 3] = [Score::Folded, Score::Applied, Score::Modified];
}

/// What a problem asks of a kernel at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// head_dim as the tiles hold it; see [`pad`].
    pub padded: u32,
    /// head_dim_v likewise.
    pub padded_v: u32,
    /// Bounds on live keys.
    pub mask: Mask,
    /// What becomes of scores.
    pub score: Score,
    /// A bias or a boolean mask lies in memory; only where scores are [`Score::Modified`].
    pub extras: bool,
    /// Weights are dropped.
    pub dropout: bool,
    /// Rows and keys are those of sequences in a table: packed, or with used lengths.
    pub sequences: bool,
    /// Rows of 16-byte multiples at 16-byte addresses.
    pub aligned: bool,
    /// f32 as pairs of f16, made beforehand; see `pairs.cu`.
    pub pairs: bool,
    /// No multiprocessor has two row blocks: smaller ones keep more of them busy. Of `fa2.cu` alone.
    pub few: bool,
}

impl Spec {
    /// Every key live, no option, aligned rows.
    pub const fn plain(dtype: DType, padded: u32) -> Spec {
        Spec {
            dtype,
            padded,
            padded_v: padded,
            mask: Mask::Full,
            score: Score::Folded,
            extras: false,
            dropout: false,
            sequences: false,
            aligned: true,
            pairs: false,
            few: false,
        }
    }
}

/// The head_dims that tiles come in.
pub const PADDED: [u32; 11] = [32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256];

/// The padded size that serves `head_dim`; `None` above 256.
pub fn pad(head_dim: usize) -> Option<u32> {
    PADDED.into_iter().find(|&p| p as usize >= head_dim)
}

pub(crate) fn dtype_code(dtype: DType) -> i32 {
    match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        _ => 2,
    }
}

/// Bytes of a tile row in shared memory, as PITCH in `prelude.cu`.
pub(crate) fn pitch(dtype: DType, columns: u32) -> u32 {
    columns * dtype.size() as u32 + 16
}

/// Bytes of a row of K or V in `fa2`: DENSE_PITCH in `prelude.cu`, but for f32 that is not
/// taken apart.
pub(crate) fn key_pitch(dtype: DType, columns: u32, pairs: bool) -> u32 {
    if dtype == DType::F32 && !pairs {
        pitch(dtype, columns)
    } else {
        (columns * dtype.size() as u32).next_multiple_of(128)
    }
}

/// One compilation of a family.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The source.
    pub family: Family,
    /// The kernel's symbol.
    pub entry: &'static str,
    /// The macros, in the order in which they stand in the name.
    pub defines: Vec<(&'static str, i32)>,
    /// Unique among variants, and fit for a file name.
    pub name: String,
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory a block, in bytes.
    pub shared: u32,
}

impl Variant {
    pub(crate) fn new(
        family: Family,
        entry: &'static str,
        spec: &Spec,
        tile: &[(&'static str, i32)],
        threads: u32,
        shared: u32,
    ) -> Variant {
        let mut defines = Vec::with_capacity(10 + tile.len());
        defines.extend([
            ("DTYPE", dtype_code(spec.dtype)),
            ("DP", spec.padded as i32),
            ("MASK", spec.mask as i32),
            ("SCORE", spec.score as i32),
            ("VEC", i32::from(spec.aligned)),
            ("DV", spec.padded_v as i32),
            ("DROPOUT", i32::from(spec.dropout)),
            ("SEQS", i32::from(spec.sequences)),
            ("PAIRS", i32::from(spec.pairs)),
        ]);
        defines.extend_from_slice(tile);
        // Calls make it anew to look their kernel up: one allocation, whatever its parts. Writing to a
        // String cannot fail.
        let mut name = String::with_capacity(192);
        let entry_name = entry.trim_start_matches("tw_").chars();
        name.extend(entry_name.map(|c| if c == '_' { '-' } else { c }));
        let _ = write!(
            name,
            "-{}-d{}-{}",
            spec.dtype,
            spec.padded,
            spec.mask.name()
        );
        if spec.padded_v != spec.padded {
            let _ = write!(name, "-dv{}", spec.padded_v);
        }
        if spec.pairs {
            name += "-pairs";
        }
        match spec.score {
            Score::Folded => {}
            Score::Applied => name += "-score",
            Score::Modified => name += "-modified",
        }
        if spec.dropout {
            name += "-dropout";
        }
        if spec.sequences {
            name += "-sequences";
        }
        if !spec.aligned {
            name += "-strided";
        }
        for (key, value) in tile {
            name.push('-');
            let letters = key.chars().filter(|&c| c != '_');
            name.extend(letters.map(|c| c.to_ascii_lowercase()));
            let _ = write!(name, "{value}");
        }
        Variant {
            family,
            entry,
            defines,
            name,
            threads,
            shared,
        }
    }

    /// The compiler's options, architecture excepted.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec![
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
        ];
        options.extend(
            self.defines
                .iter()
                .map(|(key, value)| format!("-D{key}={value}")),
        );
        options
    }

    /// What the compiled code depends on besides architecture and compiler.
    pub fn hash(&self) -> String {
        hex(&[&self.family.source(), &self.options().join(" ")])
    }

    /// Whether `arch` has its instructions: `sm_90a` has some that `sm_90` and PTX do not.
    pub fn compiles_for(&self, arch: &str) -> bool {
        let hopper = matches!(self.family, Family::Hopper | Family::BackwardHopper)
            || self.entry == "tw_ceiling_wgmma";
        !hopper || arch.ends_with("90a")
    }

    /// Compiles it; the log names registers and spills.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, nvrtc: &Nvrtc, arch: &str) -> Result<crate::nvrtc::Compiled, String> {
        let mut options = self.options();
        if arch.starts_with("sm_") {
            options.push("--ptxas-options=-v".into());
        }
        nvrtc.compile(&self.family.source(), arch, &options)
    }
}

/// Shared memory that one block may have, by compute capability (major × 10 + minor).
pub fn shared_limit(compute: i32) -> u32 {
    match compute {
        80 | 87 => 163 * 1024,
        90 | 100 | 101 | 103 | 110 => 227 * 1024,
        _ => 99 * 1024,
    }
}

/// Compute capability of `sm_90a`, `sm_80`, `compute_80`: major × 10 + minor.
pub fn compute_of(arch: &str) -> Option<i32> {
    arch.strip_prefix("sm_")
        .or_else(|| arch.strip_prefix("compute_"))?
        .trim_end_matches(['a', 'f'])
        .parse()
        .ok()
        .filter(|&compute| compute >= 80)
}

/// Which variants to build.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Element types.
    pub dtypes: Vec<DType>,
    /// head_dims; each is padded.
    pub head_dims: Vec<usize>,
    /// Also those for softcap and for scales that are not above 0.
    pub score: bool,
    /// Also those of running states and of the backward pass for rows that do not lie on 16 bytes.
    pub strided: bool,
    /// Also those for bias, mask and ALiBi, for dropout, and for packed sequences and used lengths.
    pub options: bool,
}

impl Default for Selection {
    fn default() -> Self {
        Selection {
            dtypes: vec![DType::BF16, DType::F16, DType::F32],
            head_dims: vec![64, 128, 256],
            score: true,
            strided: true,
            options: false,
        }
    }
}

/// What a selection asks of kernels for one element type and head_dim.
fn specs(dtype: DType, head_dim: usize, selection: &Selection) -> Vec<Spec> {
    let widest = PADDED[PADDED.len() - 1];
    let plain = Spec::plain(dtype, pad(head_dim).unwrap_or(widest));
    let mut specs = Vec::new();
    for mask in Mask::ALL {
        for score in Score::ALL {
            let wanted = match score {
                Score::Folded => true,
                Score::Applied => selection.score,
                Score::Modified => selection.options,
            };
            let extras = if score == Score::Modified {
                &[false, true][..]
            } else {
                &[false][..]
            };
            for (&extras, dropout) in extras
                .iter()
                .flat_map(|extras| [false, true].map(|dropout| (extras, dropout)))
            {
                for sequences in [false, true] {
                    if wanted && (selection.options || !(dropout || sequences)) {
                        specs.push(Spec {
                            mask,
                            score,
                            extras,
                            dropout,
                            sequences,
                            ..plain
                        });
                    }
                }
            }
        }
    }
    specs
}

/// The variants of a selection for an architecture, each once.
pub fn list(compute: i32, selection: &Selection) -> Vec<Variant> {
    let limit = shared_limit(compute);
    let mut all: Vec<Variant> = Vec::new();
    let mut add = |variant: Option<Variant>| {
        if let Some(variant) = variant
            && !all.iter().any(|known| known.name == variant.name)
        {
            all.push(variant);
        }
    };
    let flags = |on: bool| if on { &[false, true][..] } else { &[false][..] };
    for &dtype in &selection.dtypes {
        for &head_dim in &selection.head_dims {
            if let Some(padded) = pad(head_dim).filter(|_| dtype == DType::F32) {
                add(Some(split::variant(padded, limit)));
            }
            for spec in specs(dtype, head_dim, selection) {
                let bare = !spec.dropout && !spec.sequences;
                if pad(head_dim).is_some() {
                    let whole = Spec {
                        pairs: dtype == DType::F32,
                        ..spec
                    };
                    for few in [false, true] {
                        add(fa2::variant(&Spec { few, ..whole }, limit, false));
                    }
                    for rows in [1, usize::MAX] {
                        add(hopper::variant(&spec, rows, compute, limit).map(|found| found.0));
                    }
                } else {
                    let tile = fa2_wide::tile(dtype, head_dim);
                    add(fa2_wide::variant(&spec, tile, limit));
                    if bare && spec.score != Score::Modified {
                        for &strided in flags(selection.strided) {
                            let spec = Spec {
                                aligned: !strided,
                                ..spec
                            };
                            for part in backward::wide_variants(&spec, head_dim, limit, compute) {
                                add(part);
                            }
                        }
                    }
                }
                if bare && pad(head_dim).is_some() {
                    for &strided in flags(selection.strided) {
                        let state = Spec {
                            score: spec.score.max(Score::Applied),
                            aligned: !strided,
                            ..spec
                        };
                        add(fa2::variant(&state, limit, true));
                    }
                    for part in backward::hopper::variants(&spec, limit, compute) {
                        add(Some(part));
                    }
                    if spec.score != Score::Modified {
                        add(fa1::variant(&spec, limit));
                        for &strided in flags(selection.strided) {
                            let spec = Spec {
                                aligned: !strided,
                                ..spec
                            };
                            for part in backward::fa2::variants(&spec, limit, compute) {
                                add(part);
                            }
                            for part in backward::baselines(&spec, limit, compute) {
                                add(part);
                            }
                        }
                    }
                }
                for seqlen_k in [1, 1 << 20] {
                    for part in standard::variants(&spec, limit, seqlen_k) {
                        add(part);
                    }
                }
            }
        }
        for &head_dim in &selection.head_dims {
            let Some(padded) = pad(head_dim) else {
                continue;
            };
            for &score in flags(selection.score) {
                for &strided in flags(selection.strided) {
                    let spec = Spec {
                        mask: Mask::Band,
                        score: if score {
                            Score::Modified
                        } else {
                            Score::Folded
                        },
                        aligned: !strided,
                        ..Spec::plain(dtype, padded)
                    };
                    for (rows, blocks) in [16, 17]
                        .iter()
                        .flat_map(|&rows| decode::Blocks::all().map(move |blocks| (rows, blocks)))
                    {
                        if let Some(found) = decode::variant(&spec, limit, rows, blocks) {
                            add(Some(found.variant));
                            add(Some(found.merge));
                        }
                    }
                }
            }
        }
        for entry in state::ENTRIES {
            add(Some(state::variant(entry, dtype)));
        }
        for entry in pack::ENTRIES {
            add(Some(pack::variant(entry, dtype)));
        }
        for entry in backward::fa2::ROWS {
            add(Some(backward::fa2::rows(dtype, entry)));
        }
        for variant in ceilings::list(compute, dtype) {
            add(Some(variant));
        }
    }
    all
}

/// One kernel that [`build`] made.
#[derive(Clone, Debug)]
pub struct Built {
    /// The variant's name.
    pub name: String,
    /// For which architecture.
    pub arch: String,
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
}

/// Compiles `selection` for each of `archs` (`sm_80`, `sm_90a`; `compute_80` gives PTX, which the
/// driver of a later chip can finish) into `folder`, from which a host with a driver alone runs.
/// Needs NVRTC, but no GPU; works on all processors. `progress` is told of each kernel.
///
/// # Errors
/// An architecture that the compiler does not know, a kernel that does not compile, or a folder that
/// cannot be written.
pub fn build(
    archs: &[String],
    folder: &Path,
    selection: &Selection,
    nvrtc: &Nvrtc,
    progress: impl Fn(&Built) + Sync,
) -> Result<Vec<Built>, String> {
    let mut work = Vec::new();
    for arch in archs {
        let compute = compute_of(arch).ok_or_else(|| {
            format!("{arch}: expected an architecture such as sm_80, sm_90a or compute_80")
        })?;
        if !nvrtc.supports(arch) {
            return Err(format!("{arch}: {nvrtc} does not know it"));
        }
        work.extend(
            list(compute, selection)
                .into_iter()
                .filter(|variant| variant.compiles_for(arch))
                .map(|variant| (arch, variant)),
        );
    }
    let store = Store::at(folder);
    let next = AtomicUsize::new(0);
    let one = |arch: &str, variant: &Variant| -> Result<Built, String> {
        let compiled = variant.compile(nvrtc, arch)?;
        let path = store
            .save(variant, arch, None, &compiled.image)
            .map_err(|e| format!("{}: {e}", folder.display()))?;
        let built = Built {
            name: variant.name.clone(),
            arch: arch.to_owned(),
            path,
            bytes: compiled.image.len() as u64,
        };
        progress(&built);
        Ok(built)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut built = Vec::new();
                    while let Some((arch, variant)) = work.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        built.push(one(arch, variant)?);
                    }
                    Ok::<_, String>(built)
                })
            })
            .collect();
        let mut built = Vec::with_capacity(work.len());
        for worker in workers {
            match worker.join() {
                Ok(part) => built.extend(part?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        built.sort_by(|a, b| (&a.arch, &a.name).cmp(&(&b.arch, &b.name)));
        Ok(built)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewise_core::Options;

    /// Files of kernels built ahead are found by it.
    #[test]
    fn a_name_tells_all_that_a_kernel_is_compiled_for() {
        let spec = Spec {
            mask: Mask::Upper,
            score: Score::Applied,
            dropout: true,
            sequences: true,
            aligned: false,
            padded_v: 64,
            ..Spec::plain(DType::BF16, 128)
        };
        let tile = [("BN", 64), ("P_REG", 1)];
        let made = Variant::new(Family::Fa2, "tw_a_kernel", &spec, &tile, 128, 0);
        assert_eq!(
            made.name,
            "a-kernel-bf16-d128-causal-dv64-score-dropout-sequences-strided-bn64-preg1"
        );
        assert!(made.defines.ends_with(&tile));
    }

    #[test]
    fn every_architecture_has_a_variant_of_everything_within_its_shared_memory() {
        for compute in [80, 86, 87, 89, 90, 100, 120] {
            let limit = shared_limit(compute);
            for dtype in [DType::F16, DType::BF16, DType::F32] {
                for padded in PADDED {
                    for (mask, extras) in Mask::ALL.map(|mask| (mask, mask == Mask::Band)) {
                        for aligned in [false, true] {
                            let spec = Spec {
                                extras: extras && !aligned,
                                mask,
                                score: if aligned {
                                    Score::Folded
                                } else {
                                    Score::Modified
                                },
                                aligned,
                                ..Spec::plain(dtype, padded)
                            };
                            let mut found = vec![
                                fa2::variant(&spec, limit, false),
                                fa2::variant(&Spec { few: true, ..spec }, limit, false),
                                fa2::variant(&spec, limit, true),
                                fa1::variant(&spec, limit),
                            ];
                            found.extend(standard::variants(&spec, limit, 4096));
                            found.extend(backward::fa2::variants(&spec, limit, compute));
                            found.extend(backward::baselines(&spec, limit, compute));
                            let wide = Spec {
                                padded: 256,
                                padded_v: 256,
                                ..spec
                            };
                            for width in [257, 512, 1100] {
                                let all = backward::wide_variants(&wide, width, limit, compute);
                                found.extend(all);
                            }
                            for (rows, blocks) in [1, 64].iter().flat_map(|&rows| {
                                decode::Blocks::all().map(move |blocks| (rows, blocks))
                            }) {
                                let chosen = decode::variant(&spec, limit, rows, blocks);
                                found.push(chosen.map(|chosen| chosen.variant));
                            }
                            for variant in found {
                                let variant =
                                    variant.unwrap_or_else(|| panic!("{compute} {spec:?}"));
                                assert!(variant.shared <= limit, "{} on {compute}", variant.name);
                                assert!(variant.threads <= 1024 && variant.threads % 32 == 0);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn names_tell_variants_apart() {
        let all = list(90, &Selection::default());
        let mut names: Vec<_> = all.iter().map(|v| &v.name).collect();
        let mut defines: Vec<_> = all.iter().map(|v| (v.entry, &v.defines)).collect();
        names.sort();
        names.dedup();
        defines.sort();
        defines.dedup();
        assert_eq!(names.len(), all.len());
        assert_eq!(defines.len(), all.len());
    }

    #[test]
    fn every_family_is_built_and_warpgroups_for_hopper_alone() {
        let all = list(90, &Selection::default());
        for variant in &all {
            let wgmma = matches!(
                variant.entry,
                "tw_ceiling_wgmma" | "tw_hopper" | "tw_bwd_hopper"
            );
            assert!(variant.compiles_for("sm_90a"));
            for other in ["sm_90", "compute_90", "sm_80", "sm_120"] {
                assert_eq!(variant.compiles_for(other), !wgmma, "{}", variant.name);
            }
        }
        assert!(all.iter().any(|v| v.entry == "tw_ceiling_wgmma"));
        let before = list(80, &Selection::default());
        assert!(!before.iter().any(|v| v.entry == "tw_ceiling_wgmma"));
        let wide = Selection {
            head_dims: vec![64, 512],
            ..Selection::default()
        };
        let built = list(90, &wide);
        for family in Family::ALL {
            assert!(built.iter().any(|v| v.family == family), "{family}");
        }
    }

    #[test]
    fn mask_bounds_are_those_of_the_rule() {
        for (sq, sk) in [(1, 7), (5, 5), (9, 4), (4, 9)] {
            for left in [None, Some(0), Some(2), Some(usize::MAX)] {
                for right in [None, Some(0), Some(3), Some(usize::MAX)] {
                    let options = Options::new().window_left(left).window_right(right);
                    let rule = MaskRule::new(&options, sq, sk);
                    let (kind, lo, hi) = Mask::of(&rule, left, right);
                    for i in 0..sq {
                        for j in 0..sk {
                            let at = j as i64 - i as i64;
                            let live = (kind < Mask::Band || at >= i64::from(lo))
                                && (kind < Mask::Upper || at <= i64::from(hi));
                            assert_eq!(
                                live,
                                rule.row(i).contains(&j),
                                "{sq} {sk} {left:?} {right:?} {i} {j} {kind:?} {lo} {hi}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn architectures_are_read() {
        assert_eq!(compute_of("sm_90a"), Some(90));
        assert_eq!(compute_of("compute_80"), Some(80));
        assert_eq!(compute_of("sm_75"), None);
        assert_eq!(compute_of("h100"), None);
    }
}
