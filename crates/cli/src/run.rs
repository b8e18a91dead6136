//! `tilewise run`: attention of the input files, written to a file.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use tilewise::{Algorithm, BackendKind, Element, Engine, ForwardReport, Problem, TensorViewMut};

use crate::args::problem::ProblemArgs;
use crate::args::select::{self, DeviceArgs};
use crate::args::tensors::{Layout, TensorArgs, expect_safetensors};
use crate::cli::Verdict;
use crate::container::{Plain, Tensor, write_safetensors};
use crate::input::{self, AnyLoaded, Loaded};
use crate::{isa, ui};

/// Compute attention of the input files and write o and lse
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    tensors: TensorArgs,
    #[command(flatten)]
    problem: ProblemArgs,

    /// Backend: auto, cpu, cuda or cuda:N. One asked for by name is never replaced by another [default:
    /// TILEWISE_BACKEND, then auto]
    #[arg(long)]
    backend: Option<BackendKind>,

    /// Algorithm: auto, standard, fa1 or fa2
    #[arg(long, default_value = "auto")]
    algorithm: Algorithm,

    /// Instruction set of the CPU backend [default: TILEWISE_ISA, then the widest]
    #[arg(long, value_name = "NAME")]
    isa: Option<String>,

    /// Threads of the CPU backend [default: RAYON_NUM_THREADS, then all]
    #[arg(long, value_name = "N", value_parser = select::parse_threads)]
    threads: Option<NonZeroUsize>,

    #[command(flatten)]
    device: DeviceArgs,

    /// File to write: o with the axes of q, lse without the last of them
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,

    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(args: &RunArgs) -> Result<Verdict> {
    expect_safetensors(&args.output)?;
    match &input::load(&args.tensors, &args.problem)? {
        AnyLoaded::F64(loaded) => forward(args, loaded),
        AnyLoaded::F32(loaded) => forward(args, loaded),
        AnyLoaded::F16(loaded) => forward(args, loaded),
        AnyLoaded::BF16(loaded) => forward(args, loaded),
    }?;
    Ok(Verdict::Agree)
}

fn engine(args: &RunArgs) -> Result<Engine> {
    let backend = match args.backend {
        Some(backend) => backend,
        None => match select::backends_of_environment()?[..] {
            [] => BackendKind::Auto,
            [one] => one,
            _ => bail!("TILEWISE_BACKEND: expected one backend, got several"),
        },
    };
    match &args.isa {
        None => Ok(Engine::with(backend, &args.device.settings())?),
        Some(name) => match backend {
            BackendKind::Auto | BackendKind::Cpu => {
                Ok(Engine::with_backend(BackendKind::Cpu, isa::open_cpu(name)?))
            }
            other => bail!("--isa is for the cpu backend, not for {other}"),
        },
    }
}

fn forward<T: Element + Plain>(args: &RunArgs, loaded: &Loaded<T>) -> Result<()> {
    let files = || loaded.source.join(" ");
    let inputs = loaded.inputs().with_context(files)?;
    let problem = Problem::new(&inputs, &loaded.options).with_context(files)?;
    let engine = engine(args)?;
    let dims = *problem.dims();
    let [b, h, s, d] = dims.out_shape();
    let mut out = vec![T::default(); b * h * s * d];
    let mut lse = vec![0f32; b * h * s];
    let out_view = match args.tensors.read.layout {
        Layout::Bhsd => TensorViewMut::bhsd(&mut out, [b, h, s, d]),
        Layout::Bshd => TensorViewMut::bshd(&mut out, [b, h, s, d]),
    }?;
    let lse_view = TensorViewMut::bhs(&mut lse, [b, h, s])?;
    let start = Instant::now();
    let info = select::pool(args.threads)?.install(|| {
        engine.forward_into(
            args.algorithm,
            &inputs,
            &loaded.options,
            out_view,
            Some(lse_view),
        )
    })?;
    let ms = start.elapsed().as_secs_f64() * 1e3;

    let (o_shape, lse_shape) = shapes(args.tensors.read.layout, loaded.rank, [b, h, s, d]);
    let tensors = [
        Tensor::new("o", &o_shape, &out),
        Tensor::new("lse", &lse_shape, &lse),
    ];
    let ForwardReport { algorithm, isa, .. } = &info.report;
    let source = format!(
        "tilewise run {}: {} {algorithm} {isa}",
        env!("CARGO_PKG_VERSION"),
        info.backend
    );
    let metadata = BTreeMap::from([("source".to_string(), source)]);
    write_safetensors(&args.output, &tensors, &metadata)?;

    let passed_over: Vec<String> = info
        .passed_over
        .iter()
        .map(|(kind, reason)| format!("{kind}: {reason}"))
        .collect();
    if args.json {
        return ui::print_json(&json!({
            "schema": 1,
            "output": args.output.display().to_string(),
            "backend": info.backend.to_string(),
            "algorithm": algorithm.name(),
            "isa": isa,
            "passed_over": passed_over,
            "o_shape": o_shape,
            "lse_shape": lse_shape,
            "dtype": T::DTYPE.name(),
            "ms": ms,
        }));
    }
    for (kind, reason) in &info.passed_over {
        ui::note(&format!("{kind} passed over: {reason}"));
    }
    let said = format!(
        "{}: o {o_shape:?} {}, lse {lse_shape:?} f32 ({} {algorithm} {isa}, {} ms)",
        args.output.display(),
        T::DTYPE,
        info.backend,
        ui::significant(Some(ms)),
    );
    Ok(ui::print(&ui::wrap(&said, 2))?)
}

/// Shapes of o and lse with as many axes as q had.
fn shapes(layout: Layout, rank: usize, [b, h, s, d]: [usize; 4]) -> (Vec<usize>, Vec<usize>) {
    let o = match (layout, rank) {
        (_, 2) => vec![s, d],
        (Layout::Bhsd, 3) => vec![h, s, d],
        (Layout::Bshd, 3) => vec![s, h, d],
        (Layout::Bhsd, _) => vec![b, h, s, d],
        (Layout::Bshd, _) => vec![b, s, h, d],
    };
    let lse = match rank {
        2 => vec![s],
        3 => vec![h, s],
        _ => vec![b, h, s],
    };
    (o, lse)
}
