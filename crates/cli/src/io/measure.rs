//! The backends' real traffic, as far as this machine lets one measure it.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tilewise::core::io_model::{Io, Modifiers};
use tilewise::half::{bf16, f16};
use tilewise::{Algorithm, Backend, BackendKind, DType, Element, Inputs, Problem, TensorView};

use super::model::Blocks;
use super::{Chip, IoArgs, ncu};
use crate::output::Outputs;
use crate::{random, ui};

/// One backend and algorithm.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) backend: String,
    pub(super) algorithm: &'static str,
    /// What counted, or why nothing did.
    pub(super) how: String,
    pub(super) bytes_read: Option<u64>,
    pub(super) bytes_written: Option<u64>,
    pub(super) l2_bytes_read: Option<u64>,
    pub(super) l2_bytes_written: Option<u64>,
    pub(super) kernels: Vec<ncu::Kernel>,
    /// The formula, in tiles as they would be for this processor.
    pub(super) formula_bytes: u128,
    /// Why the two differ.
    pub(super) note: String,
}

impl Measured {
    pub(super) fn text(&self) -> String {
        let mut text = format!("  {} {}: {}\n", self.backend, self.algorithm, self.how);
        let formula = self.formula_bytes as f64;
        let mib = |bytes: f64| ui::significant(Some(bytes / f64::from(1 << 20)));
        let read = self.bytes_read.unwrap_or(0);
        let written = self.bytes_written.unwrap_or(0);
        // Writing to a String cannot fail.
        let _ = if self.bytes_read.is_some() {
            let all = (read + written) as f64;
            writeln!(
                text,
                "    {} MiB read and {} MiB written in slow memory, {} MiB by formula: {} times it",
                mib(read as f64),
                self.bytes_written
                    .map_or("unknown".into(), |x| mib(x as f64)),
                mib(formula),
                ui::significant(Some(all / formula.max(1.0)))
            )
        } else {
            writeln!(text, "    {} MiB by formula", mib(formula))
        };
        if let (Some(read), Some(written)) = (self.l2_bytes_read, self.l2_bytes_written) {
            let _ = writeln!(
                text,
                "    {} MiB read and {} MiB written in L2: {} times the formula",
                mib(read as f64),
                mib(written as f64),
                ui::significant(Some((read + written) as f64 / formula.max(1.0)))
            );
        }
        for kernel in &self.kernels {
            let _ = writeln!(
                text,
                "    {}: {} + {} MiB of device memory, {} + {} MiB of L2 (read + written)",
                kernel.name,
                mib(kernel.dram_read),
                mib(kernel.dram_written),
                mib(kernel.l2_read),
                mib(kernel.l2_written)
            );
        }
        let _ = writeln!(text, "    {}", self.note);
        text
    }
}

/// Every backend of this machine on the problem.
pub(super) fn all(args: &IoArgs, problem: &Problem) -> Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for known in tilewise::backends() {
        let name = known.kind.to_string();
        for algorithm in Algorithm::ALL {
            let chip = match known.kind {
                BackendKind::Cpu => Chip::cpu(),
                _ => args.chip()?,
            };
            let sizes = Blocks::choose(args, &chip, problem).of(algorithm).0;
            let io = Io::of(problem, algorithm, sizes, Modifiers::default(), true);
            let mut one = Measured {
                backend: name.clone(),
                algorithm: algorithm.name(),
                how: String::new(),
                bytes_read: None,
                bytes_written: None,
                l2_bytes_read: None,
                l2_bytes_written: None,
                kernels: Vec::new(),
                formula_bytes: io.bytes(),
                note: format!(
                    "the formula is for tiles of {} × {} in {} of {}",
                    sizes.rows(),
                    sizes.keys(),
                    ui::bytes(chip.fast_bytes as u64),
                    chip.what
                ),
            };
            match (&known.status, known.kind) {
                (Err(reason), _) => one.how = format!("not available: {reason}"),
                (Ok(_), BackendKind::Cpu) => cpu(problem, algorithm, &mut one)?,
                (Ok(_), _) => gpu(&name, algorithm, &mut one)?,
            }
            let absent = known.status.is_err();
            measured.push(one);
            // One line for a backend that is not here, not one for each of its algorithms.
            if absent {
                break;
            }
        }
    }
    Ok(measured)
}

fn cpu(problem: &Problem, algorithm: Algorithm, one: &mut Measured) -> Result<()> {
    let caches = tilewise::cpu::Caches::detect();
    let found = format!(
        "caches: {} L1, {} L2 a core, {} L3",
        ui::bytes(caches.l1d as u64),
        ui::bytes(caches.l2 as u64),
        match caches.l3 {
            0 => "unknown".into(),
            bytes => ui::bytes(bytes as u64),
        }
    );
    let backend = tilewise::open(BackendKind::Cpu)?;
    match cache_misses(|| forward(backend.as_ref(), problem, algorithm))? {
        Ok(misses) => {
            one.how = "last-level cache misses from the processor's counters, 64 bytes each".into();
            one.bytes_read = Some(misses * 64);
            one.note = format!(
                "{found}; a third level that holds q, k and v makes the count smaller than the \
                 formula; {}",
                one.note
            );
        }
        Err(reason) => {
            one.how = format!("not measured: {reason}");
            one.note = format!("{found}; {}", one.note);
        }
    }
    Ok(())
}

/// Misses of the last cache level during `run`, its threads included; or why they cannot be had.
#[cfg(target_os = "linux")]
fn cache_misses(run: impl FnOnce() -> Result<()> + Send) -> Result<Result<u64, String>> {
    use perf_event::Builder;
    use perf_event::events::Hardware;

    let opened = Builder::new(Hardware::CACHE_MISSES)
        .inherit(true)
        .build()
        .and_then(|mut counter| counter.enable().map(|()| counter));
    let mut counter = match opened {
        Ok(counter) => counter,
        Err(error) => {
            return Ok(Err(format!(
                "the kernel gives no performance counters ({error})"
            )));
        }
    };
    // Only threads that start now are counted with this one.
    let pool = rayon::ThreadPoolBuilder::new().build()?;
    pool.install(run)?;
    drop(pool);
    let count = counter.disable().and_then(|()| counter.read());
    Ok(count.map_err(|error| format!("the performance counter cannot be read ({error})")))
}

#[cfg(not(target_os = "linux"))]
fn cache_misses(_: impl FnOnce() -> Result<()> + Send) -> Result<Result<u64, String>> {
    Ok(Err("performance counters are read on Linux only".into()))
}

fn gpu(backend: &str, algorithm: Algorithm, one: &mut Measured) -> Result<()> {
    match ncu::find() {
        Ok(ncu) => profile(&ncu, backend, algorithm, one),
        Err(reason) => {
            one.how = format!("not measured: {reason}");
            Ok(())
        }
    }
}

/// Starts this program again under the profiler, to run one algorithm once.
fn profile(ncu: &Path, backend: &str, algorithm: Algorithm, one: &mut Measured) -> Result<()> {
    let own = std::env::args_os()
        .skip(1)
        .filter(|arg| arg != "--measure" && arg != "--json");
    let output = Command::new(ncu)
        .args(ncu::ARGUMENTS)
        .arg(std::env::current_exe().context("this program's own path")?)
        .args(own)
        .arg("--worker")
        .arg(format!("{backend}/{algorithm}"))
        .output()
        .with_context(|| ncu.display().to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let kernels = match ncu::parse(&text) {
        Ok(kernels) if !kernels.is_empty() => kernels,
        other => {
            let said = match other {
                Err(error) => error.to_string(),
                Ok(_) => last_line(&text, &output.stderr),
            };
            one.how = match ncu::explain(&said) {
                Some(meaning) => {
                    format!("not measured: {} says {said:?}: {meaning}", ncu.display())
                }
                None => format!("not measured: {} gave no counts: {said}", ncu.display()),
            };
            return Ok(());
        }
    };
    let sum = |of: fn(&ncu::Kernel) -> f64| Some(kernels.iter().map(of).sum::<f64>() as u64);
    one.how = "hardware counters of the kernels, through ncu".into();
    one.bytes_read = sum(|k| k.dram_read);
    one.bytes_written = sum(|k| k.dram_written);
    one.l2_bytes_read = sum(|k| k.l2_read);
    one.l2_bytes_written = sum(|k| k.l2_written);
    one.note = format!(
        "the formula has no cache between device memory and the multiprocessors: what L2 holds comes \
         from device memory once and from L2 each time; {}",
        one.note
    );
    one.kernels = kernels;
    Ok(())
}

fn last_line(stdout: &str, stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    let mut lines = stdout.lines().chain(stderr.lines());
    let error = lines.clone().find(|line| line.contains("ERROR"));
    let line = error.or_else(|| lines.rfind(|line| !line.trim().is_empty()));
    line.unwrap_or("it said nothing").trim().to_string()
}

/// One call on one backend: `--worker cuda:0/fa2`.
pub(super) fn worker(args: &IoArgs, worker: &str) -> Result<()> {
    let Some((backend, algorithm)) = worker.split_once('/') else {
        bail!("--worker: expected BACKEND/ALGORITHM, got {worker}");
    };
    let backend = tilewise::open(backend.parse()?)?;
    let problem = super::problem_of_shape(args)?;
    forward(backend.as_ref(), &problem, algorithm.parse()?)
}

fn forward(backend: &dyn Backend, problem: &Problem, algorithm: Algorithm) -> Result<()> {
    match problem.dtype() {
        DType::F64 => forward_as::<f64>(backend, problem, algorithm),
        DType::F32 => forward_as::<f32>(backend, problem, algorithm),
        DType::F16 => forward_as::<f16>(backend, problem, algorithm),
        DType::BF16 => forward_as::<bf16>(backend, problem, algorithm),
        other => bail!("--dtype: {other} cannot be run"),
    }
}

fn forward_as<T: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    algorithm: Algorithm,
) -> Result<()> {
    let d = problem.dims();
    let make = |name: &str, shape: [usize; 4]| -> Result<Vec<T>> {
        random::normal(0, name, random::count(name, shape)?)
    };
    let q_shape = [d.batch, d.num_heads, d.seqlen_q, d.head_dim];
    let k_shape = [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim];
    let v_shape = [d.batch, d.num_kv_heads, d.seqlen_k, d.head_dim_v];
    let (q, k, v) = (
        make("q", q_shape)?,
        make("k", k_shape)?,
        make("v", v_shape)?,
    );
    let inputs = Inputs::new(
        TensorView::bhsd(&q, q_shape)?,
        TensorView::bhsd(&k, k_shape)?,
        TensorView::bhsd(&v, v_shape)?,
    );
    let mut outputs = Outputs::<T>::new(problem)?;
    let (out, lse) = outputs.views_mut()?;
    backend.forward(
        problem,
        &T::erase_inputs(inputs),
        algorithm,
        T::erase_mut(out),
        Some(lse),
    )?;
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn nothing() -> Measured {
        Measured {
            backend: "cuda:0".into(),
            algorithm: "fa2",
            how: String::new(),
            bytes_read: None,
            bytes_written: None,
            l2_bytes_read: None,
            l2_bytes_written: None,
            kernels: Vec::new(),
            formula_bytes: 1 << 20,
            note: "a note".into(),
        }
    }

    /// `ncu` that prints this in place of profiling.
    fn profiled(prints: &str) -> Measured {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("report");
        std::fs::write(&report, prints).unwrap();
        let tool = folder.path().join("ncu");
        // It is started with its own arguments, then this program and `--worker cuda:0/fa2`.
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in --csv*--worker\\ cuda:0/fa2) cat {} ;; *) exit 3 ;; esac\n",
            report.display()
        );
        std::fs::write(&tool, script).unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut one = nothing();
        profile(&tool, "cuda:0", Algorithm::Fa2, &mut one).unwrap();
        one
    }

    #[test]
    fn counts_of_the_profiler_stand_beside_the_formula() {
        let one = profiled(ncu::EXAMPLE);
        assert_eq!(one.bytes_read, Some(4_202_508));
        assert_eq!(one.bytes_written, Some(33_554_432));
        assert_eq!(one.l2_bytes_read, Some(8_388_656));
        let text = one.text();
        for part in [
            "4.01 MiB read and 32.0 MiB written",
            "36.0 times it",
            "in L2",
            "tw_fa2",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_profiler_that_may_not_count_is_quoted() {
        let one =
            profiled("==ERROR== ERR_NVGPUCTRPERM: no permission to access performance counters");
        assert!(one.how.starts_with("not measured") && one.how.contains("ERR_NVGPUCTRPERM"));
        assert_eq!(one.bytes_read, None);
    }
}
