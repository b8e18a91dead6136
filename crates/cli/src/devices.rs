//! `tilewise devices`: what this machine and this build can run on.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;

use crate::cli::Verdict;
use crate::{isa, ui};

/// List backends with their status, or exactly what is missing
#[derive(Args, Clone, Debug)]
pub(crate) struct DevicesArgs {
    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Devices {
    schema: u32,
    backends: Vec<Entry>,
    /// Instruction sets that the CPU backend can be forced to here, the widest first.
    isas: Vec<String>,
    threads: usize,
    /// What was found of CUDA: driver, every device, compiler.
    cuda: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    available: bool,
    reason: Option<String>,
    device: Option<String>,
    details: BTreeMap<String, String>,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<Verdict> {
    let backends = tilewise::backends()
        .into_iter()
        .map(|backend| match backend.status {
            Ok(info) => Entry {
                name: backend.kind.to_string(),
                available: true,
                reason: None,
                device: Some(info.device),
                details: info.details.into_iter().collect(),
            },
            Err(reason) => Entry {
                name: backend.kind.to_string(),
                available: false,
                reason: Some(reason),
                device: None,
                details: BTreeMap::new(),
            },
        })
        .collect();
    let devices = Devices {
        schema: 1,
        backends,
        isas: isa::available(),
        threads: rayon::current_num_threads(),
        cuda: cuda(),
    };
    if args.json {
        ui::print_json(&devices)?;
    } else {
        ui::print(&render(&devices))?;
    }
    Ok(Verdict::Agree)
}

#[cfg(feature = "cuda")]
fn cuda() -> Vec<String> {
    tilewise::cuda::probe::report()
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Vec<String> {
    Vec::new()
}

fn render(devices: &Devices) -> String {
    let mut text = String::new();
    for entry in &devices.backends {
        let (state, said) = match (&entry.device, &entry.reason) {
            (Some(device), _) => ("available", device.as_str()),
            (None, reason) => ("not available", reason.as_deref().unwrap_or_default()),
        };
        let line = format!("{:8} {state:14} {said}", entry.name);
        text.push_str(&ui::wrap(&line, 24));
        for (name, value) in &entry.details {
            text.push_str(&ui::wrap(&format!("{:8} {name}: {value}", ""), 11));
        }
    }
    if !devices.cuda.is_empty() {
        text.push_str("\nCUDA\n");
    }
    for line in &devices.cuda {
        text.push_str(&ui::wrap(&format!("  {line}"), 4));
    }
    text
}
