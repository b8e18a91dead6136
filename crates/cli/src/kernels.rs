//! `tilewise kernels`: CUDA kernels compiled ahead of time, for hosts that have a driver alone.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use tilewise::DType;
use tilewise::cuda::cache::Store;
use tilewise::cuda::kernels::{self, Selection};
use tilewise::cuda::nvrtc::Nvrtc;

use crate::cli::Verdict;
use crate::ui::{self, Grid, plain};

/// Compile CUDA kernels ahead of time, or list them
///
/// Kernels are compiled when first needed and kept in the cache folder (TILEWISE_CACHE_DIR). A host
/// without NVRTC runs from a folder made by `kernels build` that TILEWISE_KERNELS_DIR names.
#[derive(Args, Clone, Debug)]
pub(crate) struct KernelsArgs {
    #[command(subcommand)]
    command: KernelsCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum KernelsCommand {
    /// Compile kernels into a folder. Needs NVRTC, but no GPU
    Build(BuildArgs),
    /// List kernels, and whether a folder holds them
    List(ListArgs),
}

/// Which kernels.
#[derive(Args, Clone, Debug)]
struct Which {
    /// Architectures: sm_80, sm_90a, …; compute_80 gives PTX, which drivers of later chips finish
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    arch: Vec<String>,

    /// Element types
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "bf16,f16,f32"
    )]
    dtype: Vec<DType>,

    /// head_dims, each rounded up to the next that kernels come in
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "64,128,256"
    )]
    head_dim: Vec<usize>,

    /// Leave out the kernels for softcap and for scales that are not above 0
    #[arg(long)]
    no_score: bool,

    /// Leave out the kernels of running states and of the backward pass for rows that do not lie on 16 bytes
    #[arg(long)]
    no_strided: bool,

    /// Also the kernels for bias, mask and ALiBi, for dropout, and for packed sequences and used lengths
    #[arg(long)]
    options: bool,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Args, Clone, Debug)]
struct BuildArgs {
    #[command(flatten)]
    which: Which,

    /// Folder to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// NVRTC library or its folder [default: TILEWISE_NVRTC, then the usual places]
    #[arg(long, value_name = "PATH")]
    nvrtc: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
struct ListArgs {
    #[command(flatten)]
    which: Which,

    /// Folder made by `kernels build`: say of each kernel whether it is there
    #[arg(
        long,
        value_name = "DIR",
        env = "TILEWISE_KERNELS_DIR",
        hide_env_values = true
    )]
    folder: Option<PathBuf>,
}

impl Which {
    fn selection(&self) -> Result<Selection> {
        if self.head_dim.contains(&0) {
            bail!("--head-dim: no kernel for 0");
        }
        if self.dtype.contains(&DType::F64) {
            bail!("--dtype: no kernel for f64");
        }
        Ok(Selection {
            dtypes: self.dtype.clone(),
            head_dims: self.head_dim.clone(),
            score: !self.no_score,
            strided: !self.no_strided,
            options: self.options,
        })
    }
}

pub(crate) fn run(args: &KernelsArgs) -> Result<Verdict> {
    match &args.command {
        KernelsCommand::Build(args) => build(args),
        KernelsCommand::List(args) => list(args),
    }?;
    Ok(Verdict::Agree)
}

fn build(args: &BuildArgs) -> Result<()> {
    let selection = args.which.selection()?;
    let nvrtc = Nvrtc::find(args.nvrtc.as_deref()).map_err(|reason| anyhow!(reason))?;
    let count = args.which.arch.iter().try_fold(0, |count, arch| {
        Ok::<_, anyhow::Error>(count + kernels::list(compute(arch)?, &selection).len())
    })?;
    let bar = ui::progress(count as u64);
    let built = kernels::build(&args.which.arch, &args.output, &selection, &nvrtc, |one| {
        bar.set_message(format!("{} {}", one.arch, one.name));
        bar.inc(1);
    })
    .map_err(|reason| anyhow!(reason))?;
    bar.finish_and_clear();
    let bytes = built.iter().map(|one| one.bytes).sum();
    if args.which.json {
        let kernels: Vec<_> = built
            .iter()
            .map(|one| {
                json!({"name": one.name, "arch": one.arch, "file": one.path, "bytes": one.bytes})
            })
            .collect();
        let report = json!({"schema": 1, "compiler": nvrtc.to_string(), "kernels": kernels});
        return ui::print_json(&report);
    }
    let said = format!(
        "{}: {} kernels, {}, by {nvrtc}",
        args.output.display(),
        built.len(),
        ui::bytes(bytes)
    );
    Ok(ui::print(&ui::wrap(&said, 2))?)
}

/// What the other columns leave for a kernel's name.
const NAME_COLUMNS: usize = 30;

fn list(args: &ListArgs) -> Result<()> {
    let selection = args.which.selection()?;
    let store = args.folder.as_ref().map(Store::at);
    let mut rows = Vec::new();
    for arch in &args.which.arch {
        for variant in kernels::list(compute(arch)?, &selection) {
            let built = store
                .as_ref()
                .map(|store| store.load(&variant, arch, None).is_some());
            rows.push((arch, variant, built));
        }
    }
    if args.which.json {
        let kernels: Vec<_> = rows
            .iter()
            .map(|(arch, variant, built)| {
                json!({
                    "name": variant.name,
                    "arch": arch,
                    "family": variant.family.name(),
                    "threads": variant.threads,
                    "shared_bytes": variant.shared,
                    "built": built,
                })
            })
            .collect();
        return ui::print_json(&json!({"schema": 1, "kernels": kernels}));
    }
    let mut grid = Grid::new(
        &[
            "kernel",
            "arch",
            "family",
            "threads",
            "shared\nmemory",
            "built",
        ],
        3,
    );
    for (arch, variant, built) in rows {
        grid.row(&[
            plain(ui::break_name(&variant.name, NAME_COLUMNS)),
            plain(arch.clone()),
            plain(variant.family.name()),
            plain(variant.threads.to_string()),
            plain(ui::bytes(variant.shared.into())),
            plain(match built {
                Some(true) => "yes",
                Some(false) => "no",
                None => "-",
            }),
        ]);
    }
    Ok(ui::print(&grid.render())?)
}

/// Compute capability of an architecture.
fn compute(arch: &str) -> Result<i32> {
    kernels::compute_of(arch).ok_or_else(|| {
        anyhow!("{arch}: expected an architecture such as sm_80, sm_90a or compute_80")
    })
}
