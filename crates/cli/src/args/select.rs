//! Which backends, algorithms, instruction sets and how many threads.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use tilewise::{Algorithm, Backend, BackendKind, Engine, Error, Settings};

use crate::{isa, ui};

/// What is to be run.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SelectArgs {
    /// Backends: auto, cpu, cuda, cuda:N [default: TILEWISE_BACKEND, then all that this machine has]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    backends: Vec<BackendKind>,

    /// Algorithms: standard, fa1, fa2
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "standard,fa1,fa2"
    )]
    algorithms: Vec<Algorithm>,

    /// Instruction sets of the CPU, for example avx512,avx2,portable, or all [default: TILEWISE_ISA, then the widest]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    isa: Vec<String>,
}

/// How devices are used.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Selection")]
pub(crate) struct DeviceArgs {
    /// Memory of a GPU that inputs and outputs may take; beyond it fa2 streams keys and values from host memory [default: all it has]
    #[arg(long, value_name = "SIZE", value_parser = ui::parse_bytes)]
    device_memory: Option<u64>,
}

impl DeviceArgs {
    pub(crate) fn settings(&self) -> Settings {
        Settings::new().device_memory(self.device_memory)
    }
}

/// One thing to run: a backend, perhaps with a forced instruction set, and an algorithm.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    pub(crate) kind: BackendKind,
    /// Name of the backend, as the command line takes it.
    pub(crate) name: String,
    /// Instruction set asked for.
    pub(crate) isa: Option<String>,
    pub(crate) algorithm: Algorithm,
    /// The backend, or why it is passed over.
    pub(crate) backend: Result<Arc<dyn Backend>, String>,
    /// Whether the backend was asked for by name, so that passing it over is an error.
    pub(crate) named: bool,
}

impl SelectArgs {
    /// The words of a command line that select the same.
    pub(crate) fn words(&self) -> Vec<String> {
        fn list<T: ToString>(values: &[T]) -> String {
            let texts: Vec<String> = values.iter().map(T::to_string).collect();
            texts.join(",")
        }
        let mut words = vec!["--algorithms".into(), list(&self.algorithms)];
        if !self.backends.is_empty() {
            words.extend(["--backends".into(), list(&self.backends)]);
        }
        if !self.isa.is_empty() {
            words.extend(["--isa".into(), list(&self.isa)]);
        }
        words
    }

    /// Every combination asked for, with those of backends that are not available.
    ///
    /// # Errors
    /// If an instruction set is not available here.
    pub(crate) fn lanes(&self) -> Result<Vec<Lane>> {
        self.lanes_with(&Settings::new())
    }

    /// [`lanes`](Self::lanes) whose backends are opened with settings.
    ///
    /// # Errors
    /// If an instruction set is not available here.
    pub(crate) fn lanes_with(&self, settings: &Settings) -> Result<Vec<Lane>> {
        let asked = match self.backends.is_empty() {
            true => backends_of_environment()?,
            false => self.backends.clone(),
        };
        let named = !asked.is_empty();
        let mut kinds = Vec::new();
        for &kind in &asked {
            kinds.push(match kind {
                BackendKind::Auto => Engine::new(kind)?.kind(),
                named => named,
            });
        }
        if !named {
            let mut known = tilewise::backends();
            // What can be used first: the sort is stable.
            known.sort_by_key(|backend| backend.status.is_err());
            kinds.extend(known.into_iter().map(|backend| backend.kind));
        }

        let isas = isa::expand(&self.isa);
        let mut lanes = Vec::new();
        for kind in kinds {
            let forced: Vec<Option<String>> = if kind == BackendKind::Cpu && !isas.is_empty() {
                isas.iter().cloned().map(Some).collect()
            } else {
                vec![None]
            };
            for isa in forced {
                let backend = match &isa {
                    Some(isa) => Ok(isa::open_cpu(isa)?),
                    None => tilewise::open_with(kind, settings).map_err(|error| match error {
                        Error::Unavailable { reason, .. } => reason,
                        other => other.to_string(),
                    }),
                };
                lanes.extend(self.algorithms.iter().map(|algorithm| Lane {
                    kind,
                    name: kind.to_string(),
                    isa: isa.clone(),
                    algorithm: algorithm.resolve(),
                    backend: backend.clone(),
                    named,
                }));
            }
        }
        Ok(lanes)
    }
}

/// What `TILEWISE_BACKEND` names; nothing if it is unset or empty.
///
/// # Errors
/// If it names something that is no backend.
pub(crate) fn backends_of_environment() -> Result<Vec<BackendKind>> {
    let listed = std::env::var_os("TILEWISE_BACKEND").unwrap_or_default();
    let listed = listed.to_string_lossy();
    let names = listed.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(|name| name.parse().context("TILEWISE_BACKEND"))
        .collect()
}

/// Fails if nothing can run, with each backend's reason.
pub(crate) fn any_available(lanes: &[Lane]) -> Result<()> {
    if lanes.iter().any(|lane| lane.backend.is_ok()) {
        return Ok(());
    }
    let mut reasons: Vec<String> = lanes
        .iter()
        .filter_map(|lane| Some(format!("{}: {}", lane.name, lane.backend.as_ref().err()?)))
        .collect();
    reasons.dedup();
    bail!("no backend can be used here: {}", reasons.join("; "))
}

/// Fails if a backend that was asked for by name is not available.
pub(crate) fn all_available(lanes: &[Lane]) -> Result<()> {
    let mut missing: Vec<String> = lanes
        .iter()
        .filter(|lane| lane.named)
        .filter_map(|lane| {
            let reason = lane.backend.as_ref().err()?;
            Some(format!("backend {} is not available: {reason}", lane.name))
        })
        .collect();
    missing.dedup();
    if missing.is_empty() {
        Ok(())
    } else {
        bail!("{}", missing.join("; "))
    }
}

/// A number of threads that a machine could have: the system would be asked for each of them.
pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<NonZeroUsize>() {
        Ok(n) if n.get() <= 4096 => Ok(n),
        _ => Err("expected a number from 1 to 4096".into()),
    }
}

/// Refuses a `RAYON_NUM_THREADS` that would not do what it says: rayon takes what is no number for
/// unset, and starts as many threads as it is told.
///
/// # Errors
/// If it is set to anything but a number up to 4096.
pub(crate) fn check_environment() -> Result<()> {
    let Some(text) = std::env::var_os("RAYON_NUM_THREADS") else {
        return Ok(());
    };
    let text = text.to_string_lossy();
    match text.parse::<usize>() {
        // 0 and nothing are rayon's own words for as many as there are processors.
        Ok(n) if n <= 4096 => Ok(()),
        Err(_) if text.is_empty() => Ok(()),
        _ => bail!("RAYON_NUM_THREADS: expected a number up to 4096, got {text:?}"),
    }
}

/// A pool of `threads` threads, or of as many as rayon makes by default.
pub(crate) fn pool(threads: Option<NonZeroUsize>) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.map_or(0, NonZeroUsize::get))
        .build()
        .context("cannot start threads")
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn a_bound_on_device_memory_reaches_the_backend() {
        for (args, expected) in [
            (vec![], None),
            (vec!["--device-memory", "2MiB"], Some(2 << 20)),
        ] {
            let command = DeviceArgs::augment_args(clap::Command::new("x").no_binary_name(true));
            let matches = command.try_get_matches_from(args).unwrap();
            let device = DeviceArgs::from_arg_matches(&matches).unwrap();
            assert_eq!(device.settings(), Settings::new().device_memory(expected));
        }
    }
}
