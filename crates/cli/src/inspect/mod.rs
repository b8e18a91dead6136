//! `tilewise inspect`: what compiled kernels do with memory.

mod access;
mod flow;
mod occupancy;
mod own;
mod ptx;
mod sass;
mod table;
mod verdict;

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::Serialize;
use tilewise::{Algorithm, DType};

use crate::cli::Verdict;
use crate::ui;

/// Show what compiled CUDA kernels do: where each global store goes, what stays on chip
///
/// Compiles this project's kernels (NVRTC is needed, a GPU is not) and reads their PTX: each global load
/// and store is attributed to its tensor, and to its place before, inside or after the loop over keys. With
/// a disassembler (nvdisasm or cuobjdump, also from PyPI) the machine code is counted too. The verdict:
/// standard stores S and P and loads them again; fa1 loads and stores O, l and m inside the loop; fa2 stores
/// out and lse once, after it, and nothing else. With --backward: fa1 and fa2 add to dQ inside the loop
/// over rows, store dk and dv after it, and keep S, P, dP and dS; standard stores matrices.
///
/// Given files, PTX or cubins of any origin, it shows the same of them.
///
/// Exit status: 0 if every statement holds, 1 if one does not, 2 on an error.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    /// PTX or cubin files, in place of this project's kernels
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Algorithms: standard, fa1, fa2
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "standard,fa1,fa2",
        help_heading = "Kernels"
    )]
    algorithms: Vec<Algorithm>,

    /// The kernels of the backward pass
    #[arg(long, conflicts_with = "files", help_heading = "Kernels")]
    backward: bool,

    /// Architecture: sm_80, sm_90a, …
    #[arg(long, default_value = "sm_80", help_heading = "Kernels")]
    arch: String,

    /// Element type: bf16, f16 or f32
    #[arg(long, default_value_t = DType::BF16, help_heading = "Kernels")]
    dtype: DType,

    /// head_dim, rounded up to the next that kernels come in
    #[arg(long, default_value_t = 64, help_heading = "Kernels")]
    head_dim: usize,

    /// Bounds on live keys
    #[arg(long, value_enum, default_value_t = MaskArg::Causal, help_heading = "Kernels")]
    mask: MaskArg,

    /// Write the PTX and cubin of each kernel into this folder
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    keep: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum MaskArg {
    /// Every key is live
    Full,
    /// An upper bound that moves with the row
    Causal,
    /// A window
    Band,
}

/// Everything that `inspect` found. `schema` rises when a field changes its meaning or goes.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    arch: Option<String>,
    compiler: Option<String>,
    disassembler: Option<String>,
    algorithms: Vec<Group>,
    notes: Vec<String>,
}

/// The kernels of one algorithm, or of one file.
#[derive(Debug, Serialize)]
struct Group {
    name: String,
    kernels: Vec<Inspected>,
    findings: Vec<verdict::Finding>,
    holds: bool,
}

/// One kernel.
#[derive(Debug, Default, Serialize)]
struct Inspected {
    /// The variant, or the file.
    name: String,
    ptx: access::Kernel,
    sass: Option<sass::Counts>,
    resources: Option<own::Resources>,
    occupancy: Option<occupancy::Occupancy>,
    /// Bytes of scores of one tile that a thread holds.
    score_bytes: Option<u32>,
}

pub(crate) fn run(args: &InspectArgs) -> Result<Verdict> {
    let report = if args.files.is_empty() {
        own::inspect(args)?
    } else {
        of_files(&args.files)?
    };
    if args.json {
        ui::print_json(&report)?;
    } else {
        ui::print(&table::render(&report))?;
    }
    Ok(if report.algorithms.iter().all(|group| group.holds) {
        Verdict::Agree
    } else {
        Verdict::Differ
    })
}

fn of_files(files: &[PathBuf]) -> Result<Report> {
    let mut report = Report {
        schema: 1,
        arch: None,
        compiler: None,
        disassembler: None,
        algorithms: Vec::new(),
        notes: Vec::new(),
    };
    for file in files {
        let name = file.display().to_string();
        let bytes = read(file).with_context(|| name.clone())?;
        let kernels = if bytes.starts_with(b"\x7fELF") {
            let tool = sass::find(None).with_context(|| {
                format!("{name}: a cubin, and no disassembler is here: nvdisasm or cuobjdump on PATH or in \
                         CUDA_HOME, or named by TILEWISE_DISASSEMBLER")
            })?;
            report.disassembler = Some(tool.display().to_string());
            of_cubin(&tool, file)?
        } else {
            let text =
                String::from_utf8(bytes).map_err(|_| anyhow!("{name}: neither PTX nor a cubin"))?;
            of_ptx(&name, &text)?
        };
        // Kernels of this project are held to what is said of them, whoever compiled them.
        let findings = own::algorithm_of(&kernels).map_or(Vec::new(), |algorithm| {
            verdict::findings(algorithm, &kernels)
        });
        report.algorithms.push(Group {
            name,
            holds: findings.iter().all(|finding| finding.holds),
            kernels,
            findings,
        });
    }
    Ok(report)
}

/// The bytes of a file, or of a pipe: what a compiler writes may be looked at as it comes.
fn read(file: &Path) -> Result<Vec<u8>> {
    /// Far more than PTX or a cubin has; a device may never end.
    const LIMIT: u64 = 1 << 28;
    let mut bytes = Vec::new();
    std::fs::File::open(file)?
        .take(LIMIT + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LIMIT {
        bail!("expected PTX or a cubin of at most {LIMIT} bytes, got more");
    }
    Ok(bytes)
}

fn of_ptx(name: &str, text: &str) -> Result<Vec<Inspected>> {
    let functions = ptx::parse(text).map_err(|error| anyhow!("{name}: {error}"))?;
    if functions.is_empty() {
        bail!("{name}: it has no kernel");
    }
    Ok(functions
        .iter()
        .map(|function| Inspected {
            name: function.name.clone(),
            ptx: access::kernel(function, own::namer(&function.name)),
            ..Inspected::default()
        })
        .collect())
}

fn of_cubin(tool: &Path, file: &Path) -> Result<Vec<Inspected>> {
    let text = sass::disassemble(tool, file).map_err(|error| anyhow!(error))?;
    let functions = sass::parse(&text);
    if functions.is_empty() {
        bail!("{}: the disassembler shows no kernel", file.display());
    }
    Ok(functions
        .into_iter()
        .map(|(name, counts)| Inspected {
            name,
            sass: Some(counts),
            ..Inspected::default()
        })
        .collect())
}
