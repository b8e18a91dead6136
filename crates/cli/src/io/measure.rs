//! The backends' real traffic, as far as this machine lets one measure it.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tilewise::core::io_model::{Count, Modifiers};
use tilewise::core::observe::Tensor;
use tilewise::half::{bf16, f16};
use tilewise::{
    Algorithm, Backend, BackendKind, BackwardInputs, DType, Element, Gradients, Problem, TensorView,
};

use super::model::Blocks;
use super::pass::Pass;
use super::{Chip, IoArgs, ncu};
use crate::output::Outputs;
use crate::random;
use crate::ui::{self, Grid, plain};

/// One backend and algorithm.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) backend: String,
    pub(super) algorithm: &'static str,
    /// What counted, or why nothing did.
    pub(super) how: String,
    /// Whether the backend is not here at all: then this is said once, not for each algorithm.
    #[serde(skip)]
    pub(super) absent: bool,
    pub(super) bytes_read: Option<u64>,
    pub(super) bytes_written: Option<u64>,
    pub(super) l2_bytes_read: Option<u64>,
    pub(super) l2_bytes_written: Option<u64>,
    /// What the multiprocessors received of what they read.
    pub(super) received_bytes: Option<u64>,
    pub(super) kernels: Vec<ncu::Kernel>,
    /// The formula, read and written, in the tiles that follow.
    pub(super) formula_bytes: u128,
    pub(super) formula_bytes_read: u128,
    pub(super) formula_bytes_written: u128,
    /// Of the formula's reads, those of q, k and v.
    #[serde(skip)]
    pub(super) formula_inputs: u128,
    pub(super) tile_rows: usize,
    pub(super) tile_keys: usize,
    /// Whether the backend walks these tiles; otherwise they are chosen for its fast memory.
    pub(super) tiles_of_the_backend: bool,
    /// Why measurement and formula differ.
    #[serde(rename = "note", serialize_with = "joined")]
    pub(super) notes: Vec<String>,
}

/// One text of them.
fn joined<S: serde::Serializer>(notes: &[String], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&notes.join("; "))
}

/// Bytes as MiB.
fn mib(bytes: f64) -> String {
    ui::significant(Some(bytes / f64::from(1 << 20)))
}

/// Read and written.
fn pair(read: f64, written: f64) -> String {
    format!("{} + {}", mib(read), mib(written))
}

impl Measured {
    /// What `said` holds was said before, of another algorithm, and is not said again.
    pub(super) fn text(&self, said: &mut Vec<String>) -> String {
        if self.absent {
            return ui::wrap(&format!("  {}: {}", self.backend, self.how), 4);
        }
        let how = match said.contains(&self.how) {
            true => "likewise",
            false => &self.how,
        };
        let head = format!("  {} {}: {how}", self.backend, self.algorithm);
        let mut text = ui::wrap(&head, 4);
        said.push(self.how.clone());
        let mut grid = Grid::new(&["", "device memory", "L2", "received"], 1);
        for kernel in &self.kernels {
            grid.row(&[
                plain(&kernel.name),
                plain(pair(kernel.dram_read, kernel.dram_written)),
                plain(pair(kernel.l2_read, kernel.l2_written)),
                plain(mib(kernel.received)),
            ]);
        }
        if !self.kernels.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "    MiB, read + written; received by the multiprocessors"
            );
            for line in grid.render().lines() {
                let _ = writeln!(text, "    {line}");
            }
        }
        let (read, written) = (self.formula_bytes_read, self.formula_bytes_written);
        let formula = format!(
            "    by formula {} MiB, in tiles of {} × {}{}",
            pair(read as f64, written as f64),
            self.tile_rows,
            self.tile_keys,
            match self.tiles_of_the_backend {
                true => ", which are the kernel's",
                false => ", chosen for its fast memory",
            }
        );
        text.push_str(&ui::wrap(&formula, 6));
        for (what, read, written) in [
            ("slow memory", self.bytes_read, self.bytes_written),
            ("L2", self.l2_bytes_read, self.l2_bytes_written),
        ] {
            let Some(read) = read else { continue };
            let _ = write!(
                text,
                "    {what}: {} the formula's reads",
                times(read as f64, self.formula_bytes_read)
            );
            let _ = match written {
                Some(written) => writeln!(
                    text,
                    ", {} its writes",
                    times(written as f64, self.formula_bytes_written)
                ),
                None => writeln!(text, " and writes"),
            };
        }
        for note in &self.notes {
            if !said.contains(note) {
                text.push_str(&ui::wrap(&format!("    {note}"), 6));
                said.push(note.clone());
            }
        }
        text
    }
}

/// So many times the formula.
fn times(measured: f64, formula: u128) -> String {
    format!(
        "{} ×",
        ui::significant(Some(measured / (formula as f64).max(1.0)))
    )
}

/// Every backend of this machine on the problem.
pub(super) fn all(args: &IoArgs, problem: &Problem) -> Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for known in tilewise::backends() {
        let name = known.kind.to_string();
        for algorithm in Algorithm::ALL {
            let chip = match known.kind {
                BackendKind::Cpu => Chip::cpu(),
                _ => args.chip(problem)?,
            };
            let own = match args.pass() {
                Pass::Forward => (known.status.as_ref().ok())
                    .and_then(|_| tilewise::open(known.kind).ok())
                    .and_then(|backend| backend.tile(problem, algorithm)),
                Pass::Backward => None,
            };
            let sizes = own.unwrap_or_else(|| Blocks::choose(args, &chip, problem).of(algorithm).0);
            let formula = args
                .pass()
                .formula(problem, algorithm, sizes, Modifiers::default());
            let mut one = Measured {
                backend: name.clone(),
                algorithm: algorithm.name(),
                how: String::new(),
                absent: known.status.is_err(),
                bytes_read: None,
                bytes_written: None,
                l2_bytes_read: None,
                l2_bytes_written: None,
                received_bytes: None,
                kernels: Vec::new(),
                formula_bytes: formula.bytes(),
                formula_bytes_read: formula.loaded_bytes(),
                formula_bytes_written: formula.stored_bytes(),
                formula_inputs: [Tensor::Q, Tensor::K, Tensor::V]
                    .iter()
                    .filter_map(|&tensor| formula.count(tensor))
                    .map(Count::loaded_bytes)
                    .sum(),
                tile_rows: sizes.rows(),
                tile_keys: sizes.keys(),
                tiles_of_the_backend: own.is_some(),
                notes: vec![format!(
                    "fast memory: {} of {}",
                    ui::bytes(chip.fast_bytes as u64),
                    chip.what
                )],
            };
            match (&known.status, known.kind) {
                (Err(reason), _) => one.how = format!("not available: {reason}"),
                (Ok(_), BackendKind::Cpu) => cpu(args.pass(), problem, algorithm, &mut one)?,
                (Ok(_), _) => gpu(args.pass(), &name, algorithm, &mut one)?,
            }
            measured.push(one);
            if known.status.is_err() {
                break;
            }
        }
    }
    Ok(measured)
}

fn cpu(pass: Pass, problem: &Problem, algorithm: Algorithm, one: &mut Measured) -> Result<()> {
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
    match cache_misses(|| call(pass, backend.as_ref(), problem, algorithm))? {
        Ok(misses) => {
            one.how = "last-level cache misses from the processor's counters, 64 bytes each".into();
            one.bytes_read = Some(misses * 64);
            one.notes.push(found);
            one.notes.push(
                "a third level that holds q, k and v makes the count smaller than the formula"
                    .into(),
            );
        }
        Err(reason) => {
            one.how = format!("not measured: {reason}");
            one.notes.push(found);
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

fn gpu(pass: Pass, backend: &str, algorithm: Algorithm, one: &mut Measured) -> Result<()> {
    match ncu::find() {
        Ok(ncu) => profile(pass, &ncu, backend, algorithm, one),
        Err(reason) => {
            one.how = format!("not measured: {reason}");
            Ok(())
        }
    }
}

/// Starts this program again under the profiler, to run one algorithm once.
fn profile(
    pass: Pass,
    ncu: &Path,
    backend: &str,
    algorithm: Algorithm,
    one: &mut Measured,
) -> Result<()> {
    let own = std::env::args_os()
        .skip(1)
        .filter(|arg| arg != "--measure" && arg != "--json");
    let output = Command::new(ncu)
        .args(ncu::arguments(pass.kernels()))
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
    one.received_bytes = sum(|k| k.received);
    one.notes = why(pass, algorithm, one);
    one.kernels = kernels;
    Ok(())
}

/// Why the counters and the formula differ: what the kernels do otherwise is known, what caches did is not
/// counted and said with that reserve.
fn why(pass: Pass, algorithm: Algorithm, one: &Measured) -> Vec<String> {
    let all = |read: Option<u64>, written: Option<u64>| {
        read.unwrap_or(0) as f64 + written.unwrap_or(0) as f64
    };
    let formula = (one.formula_bytes as f64).max(1.0);
    let memory = all(one.bytes_read, one.bytes_written) / formula;
    let mut reasons = vec![if memory < 1.0 {
        "device memory sees less than the formula, which has no cache: what many blocks read can come from \
         L2, and what is still in L2 when a kernel ends is written later"
    } else {
        "device memory sees more than the formula: memory moves in whole sectors, and what L2 drops is \
         brought again"
    }];
    reasons.push(match (pass, algorithm.resolve()) {
        (Pass::Forward, Algorithm::Standard) => {
            "the kernels keep S in f32 and P in the inputs' type, where the formula has f32 for both, and \
             walk P v and the softmax in other tiles than S"
        }
        (Pass::Forward, Algorithm::Fa1) => {
            "O, l and m travel between the multiprocessor and L2, which is the formula's traffic"
        }
        (Pass::Forward, _) => {
            "K and V travel from L2, once a block of rows, which is the formula's traffic"
        }
        (Pass::Backward, Algorithm::Standard) => "the kernels walk other tiles than the formula",
        (Pass::Backward, Algorithm::Fa1) => {
            "the kernels walk other tiles than the formula and make m and l in a pass of their own"
        }
        (Pass::Backward, _) => {
            "the kernels walk other tiles than the formula, and dQ is made by a kernel of its own, which \
             reads q, k, v and dout again, where the formula adds to it in memory"
        }
    });
    let mut reasons: Vec<String> = reasons.into_iter().map(String::from).collect();
    reasons.extend(reads(one));
    reasons
}

/// What L2's counters and the multiprocessors' say together of how reads compare with the formula.
fn reads(one: &Measured) -> Vec<String> {
    let (Some(l2), Some(received)) = (one.l2_bytes_read, one.received_bytes) else {
        return Vec::new();
    };
    let (l2, received) = (l2 as f64, received as f64);
    let formula = (one.formula_bytes_read as f64).max(1.0);
    let of = |x: f64| times(x, one.formula_bytes_read);
    if l2 > 1.05 * received {
        return vec![format!(
            "of what L2 counts as read the multiprocessors received {} MiB, {} the formula: the rest moved \
             within L2 or was counted twice",
            mib(received),
            of(received)
        )];
    }
    let mut said = Vec::new();
    // Each row of a tile lies an odd number of 16 bytes after the one before.
    let halves = formula + one.formula_inputs as f64 / 2.0;
    if received < 1.05 * formula {
        if received > 0.95 * formula && one.tiles_of_the_backend {
            said.push(format!(
                "the multiprocessors received {} what the formula has them read: nothing was fetched twice",
                of(received)
            ));
        }
    } else if (received / halves - 1.0).abs() < 0.02 {
        said.push(format!(
            "the multiprocessors did receive {} the formula, so L2 counts nothing twice; it is as much as if \
             each 32-byte sector of every second row of q, k and v were fetched for both its halves ({} MiB \
             in all): such rows are copied to shared memory 16 bytes off a multiple of 32, which the padding \
             that keeps its banks apart does",
            of(received),
            mib(halves)
        ));
    } else {
        said.push(format!(
            "the multiprocessors did receive {} the formula, so L2 counts nothing twice: the kernels fetch \
             more than the formula's tiles hold",
            of(received)
        ));
    }
    if received > 1.05 * l2 {
        said.push(format!(
            "L2 counts {} MiB as read, {} what the multiprocessors received: what several of them ask for at \
             the same moment is read from L2 once and sent to each",
            mib(l2),
            times(l2, received as u128)
        ));
    }
    said
}

fn last_line(stdout: &str, stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    let mut lines = stdout.lines().chain(stderr.lines());
    // What this program says, if it is what failed; else what the profiler does.
    let own = lines.clone().find(|line| line.starts_with("error: "));
    let error = own.or_else(|| lines.clone().find(|line| line.contains("ERROR")));
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
    call(args.pass(), backend.as_ref(), &problem, algorithm.parse()?)
}

/// One call; backward with the forward call that it starts from.
fn call(pass: Pass, backend: &dyn Backend, problem: &Problem, algorithm: Algorithm) -> Result<()> {
    match problem.dtype() {
        DType::F64 => call_as::<f64>(pass, backend, problem, algorithm),
        DType::F32 => call_as::<f32>(pass, backend, problem, algorithm),
        DType::F16 => call_as::<f16>(pass, backend, problem, algorithm),
        DType::BF16 => call_as::<bf16>(pass, backend, problem, algorithm),
        other => bail!("--dtype: {other} cannot be run"),
    }
}

fn call_as<T: Element>(
    pass: Pass,
    backend: &dyn Backend,
    problem: &Problem,
    algorithm: Algorithm,
) -> Result<()> {
    let d = problem.dims();
    let qkv = random::Qkv::<T>::new(0, d)?;
    let inputs = qkv.inputs()?;
    let mut outputs = Outputs::<T>::new(problem)?;
    let (out, lse) = outputs.views_mut()?;
    backend.forward(
        problem,
        &T::erase_inputs(inputs),
        algorithm,
        T::erase_mut(out),
        Some(lse),
    )?;
    if pass == Pass::Backward {
        let dout: Vec<T> = random::normal(0, "do", random::count("do", d.out_shape())?)?;
        let given = BackwardInputs::new(
            inputs,
            outputs.out_view()?,
            outputs.lse_view()?,
            TensorView::bhsd(&dout, d.out_shape())?,
        );
        let mut gradients = Gradients::filled(problem, &inputs, 0.0)?;
        backend.backward(
            problem,
            &T::erase_backward(given),
            algorithm,
            T::erase_gradients(gradients.views_mut()?),
        )?;
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What no counter says is not stated, and the backward pass is explained by what travels there.
    #[test]
    fn the_note_says_what_is_known() {
        let mut one = nothing();
        one.bytes_read = Some(1 << 18);
        one.l2_bytes_written = Some(1 << 19);
        let note = |one: &Measured, pass| why(pass, Algorithm::Fa2, one).join("; ");
        assert!(note(&one, Pass::Forward).contains("less than the formula"));
        assert!(!note(&one, Pass::Forward).contains("received"));
        let formula = one.formula_bytes_read as f64;
        for (l2, received, part) in [
            (1.5, 1.5, "for both its halves"),
            (2.0, 2.0, "more than the formula's tiles hold"),
            (1.5, 1.0, "within L2 or was counted twice"),
            (1.0, 1.0, "nothing was fetched twice"),
        ] {
            one.l2_bytes_read = Some((l2 * formula) as u64);
            one.received_bytes = Some((received * formula) as u64);
            let said = note(&one, Pass::Forward);
            assert!(said.contains(part), "{part}: {said}");
            assert!(said.contains("K and V travel"), "{said}");
        }
        // Of 16 heads of 4096 × 128 and of 8 heads of 1024 × 64 on an H200, in MiB; what was received with
        // no more than L2 counts is no sign of anything.
        for (l2, received, formula, share) in [
            (911.0, 1048.0, 1040.0, Some("0.869 ×")),
            (6.87, 17.5, 17.0, Some("0.393 ×")),
            (1048.0, 1048.0, 1040.0, None),
            (1049.0, 1048.0, 1040.0, None),
        ] {
            let bytes = |mib: f64| (mib * f64::from(1 << 20)) as u64;
            one.l2_bytes_read = Some(bytes(l2));
            one.received_bytes = Some(bytes(received));
            one.formula_bytes_read = bytes(formula).into();
            let said = note(&one, Pass::Forward);
            assert!(said.contains("nothing was fetched twice"), "{said}");
            let sent = said.contains("read from L2 once and sent to each");
            assert_eq!(sent, share.is_some(), "{said}");
            assert!(share.is_none_or(|share| said.contains(share)), "{said}");
        }
        let back = note(&one, Pass::Backward);
        assert!(back.contains("a kernel of its own") && !back.contains("K and V travel"));
    }

    /// What holds of several algorithms is said once.
    #[test]
    fn nothing_is_said_twice() {
        let mut one = nothing();
        one.how = "not measured: no ncu".into();
        let mut said = Vec::new();
        let first = one.text(&mut said);
        assert!(
            first.contains("no ncu") && first.contains("a note"),
            "{first}"
        );
        let second = one.text(&mut said);
        assert!(second.contains("fa2: likewise"), "{second}");
        assert!(
            !second.contains("a note") && second.contains("by formula"),
            "{second}"
        );
    }

    fn nothing() -> Measured {
        Measured {
            backend: "cuda:0".into(),
            algorithm: "fa2",
            how: String::new(),
            absent: false,
            bytes_read: None,
            bytes_written: None,
            l2_bytes_read: None,
            l2_bytes_written: None,
            received_bytes: None,
            kernels: Vec::new(),
            formula_bytes: 1 << 20,
            formula_bytes_read: 1 << 19,
            formula_bytes_written: 1 << 19,
            formula_inputs: 1 << 19,
            tile_rows: 128,
            tile_keys: 64,
            tiles_of_the_backend: true,
            notes: vec!["a note".into()],
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
        profile(Pass::Forward, &tool, "cuda:0", Algorithm::Fa2, &mut one).unwrap();
        one
    }

    #[test]
    fn counts_of_the_profiler_stand_beside_the_formula() {
        let one = profiled(ncu::EXAMPLE);
        assert_eq!(one.bytes_read, Some(4_202_508));
        assert_eq!(one.bytes_written, Some(33_554_432));
        assert_eq!(one.l2_bytes_read, Some(8_388_656));
        let text = one.text(&mut Vec::new());
        for part in [
            "slow memory: 8.02 × the formula's reads, 64.0 × its writes",
            "L2: 16.0 × the formula's reads",
            "in tiles of 128 × 64, which are the kernel's",
            "tw_fa2",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// What ncu says in a sandbox that keeps the driver's counters from programs.
    #[test]
    fn a_profiler_without_the_drivers_library_is_explained() {
        let one = profiled("==ERROR== LibraryNotLoaded");
        assert!(one.how.contains("LibraryNotLoaded") && one.how.contains("sandbox"));
        let text = one.text(&mut Vec::new());
        assert!(text.contains("by formula"), "{text}");
    }

    #[test]
    fn a_profiler_that_may_not_count_is_quoted() {
        let one =
            profiled("==ERROR== ERR_NVGPUCTRPERM: no permission to access performance counters");
        assert!(one.how.starts_with("not measured") && one.how.contains("ERR_NVGPUCTRPERM"));
        assert_eq!(one.bytes_read, None);
    }
}
