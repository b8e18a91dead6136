//! The command line: commands, exit status, errors.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::args::select;
use crate::{
    bench, check, compare, devices, generate, io as io_command, peer_worker, report, run, trace,
};
#[cfg(feature = "cuda")]
use crate::{inspect, kernels};

/// Exact attention, one tile at a time, on whichever processor is there
#[derive(Debug, Parser)]
#[command(
    name = "tilewise",
    version,
    max_term_width = 100,
    after_help = "\
Exit status: 0 if all that was compared agrees, 1 if something differs, 2 on an error.

New to FlashAttention? docs/ALGORITHMS.md goes step by step, from
  tilewise trace --softmax 1,3,2"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Compare(compare::CompareArgs),
    Trace(Box<trace::TraceArgs>),
    Run(run::RunArgs),
    Generate(generate::GenerateArgs),
    Bench(bench::BenchArgs),
    Check(check::CheckArgs),
    Report(report::ReportArgs),
    Io(Box<io_command::IoArgs>),
    Devices(devices::DevicesArgs),
    #[cfg(feature = "cuda")]
    Inspect(inspect::InspectArgs),
    #[cfg(feature = "cuda")]
    Kernels(kernels::KernelsArgs),
    #[command(hide = true)]
    PeerWorker(peer_worker::PeerWorkerArgs),
}

/// What a command that compares found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Agree,
    Differ,
}

/// Runs the command line of this process.
///
/// Exit status: 0 on success and if everything compared agrees, 1 if something differs, 2 on any error.
pub fn main() -> ExitCode {
    let command = Cli::parse().command;
    let result = select::check_environment().and_then(|()| run(command));
    report(result)
}

fn run(command: Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Compare(args) => compare::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Io(args) => io_command::run(&args),
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "cuda")]
        Command::Inspect(args) => inspect::run(&args),
        #[cfg(feature = "cuda")]
        Command::Kernels(args) => kernels::run(&args),
        Command::PeerWorker(args) => peer_worker::run(&args),
    }
}

fn report(result: anyhow::Result<Verdict>) -> ExitCode {
    match result {
        Ok(Verdict::Agree) => ExitCode::SUCCESS,
        Ok(Verdict::Differ) => ExitCode::from(1),
        // Whoever read our output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever an error brings along.
            let text = format!("{error:#}").replace('\n', " ");
            let _ = writeln!(io::stderr(), "error: {text}");
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
