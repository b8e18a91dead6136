//! The binary `tilewise`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tilewise_cli::main()
}
