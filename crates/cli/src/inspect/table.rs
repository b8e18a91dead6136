//! What was found, as people read it.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::access::Way;
use super::{Group, Inspected, Report};
use crate::ui::{self, Grid, Tone, plain};

// Writing to a String cannot fail: results of writeln! are dropped throughout.

pub(super) fn render(report: &Report) -> String {
    let mut text = String::new();
    if let (Some(arch), Some(compiler)) = (&report.arch, &report.compiler) {
        text.push_str(&ui::wrap(&format!("{arch}, {compiler}"), 2));
    }
    if let Some(tool) = &report.disassembler {
        text.push_str(&ui::wrap(&format!("machine code by {tool}"), 2));
    }
    for group in &report.algorithms {
        let _ = writeln!(text, "\n{}", group.name);
        for kernel in &group.kernels {
            one(&mut text, kernel);
        }
        findings(&mut text, group);
    }
    if !report.notes.is_empty() {
        text.push('\n');
    }
    for note in &report.notes {
        text.push_str(&ui::wrap(note, 2));
    }
    text
}

fn one(text: &mut String, kernel: &Inspected) {
    for (n, part) in ui::break_name(&kernel.name, 74).lines().enumerate() {
        let _ = writeln!(text, "  {}{part}", if n > 0 { "  " } else { "" });
    }
    let mut said = Vec::new();
    if !kernel.ptx.accesses.is_empty() {
        let mut grid = Grid::new(
            &[
                "   ",
                "tensor",
                "loop over keys",
                "instructions",
                "bytes a thread",
            ],
            3,
        );
        for access in &kernel.ptx.accesses {
            let way = match access.way {
                Way::Load => "    load",
                Way::Store => "    store",
            };
            grid.row(&[
                plain(way),
                plain(access.tensor.clone()),
                plain(access.place.name()),
                plain(access.instructions.to_string()),
                plain(access.bytes.to_string()),
            ]);
        }
        text.push_str(&grid.render());
        let ptx = &kernel.ptx;
        said.push(format!(
            "PTX: {} matrix products{}, {} exponentials{}; shared memory: {} loads, {} stores; local memory: \
             {} loads, {} stores",
            ptx.matrix,
            by_name(&ptx.matrix_by),
            ptx.exponentials,
            match (ptx.bulk_loads, ptx.bulk_stores) {
                (0, 0) => String::new(),
                (loads, stores) => format!("; copy engine (TMA): {loads} loads, {stores} stores"),
            },
            ptx.shared_loads,
            ptx.shared_stores,
            ptx.local_loads,
            ptx.local_stores
        ));
    }
    if let Some(sass) = &kernel.sass {
        said.push(format!(
            "machine code: {} instructions, {} matrix products{}, {} exponentials; global: {} loads, {} \
             stores, {} copies to shared, {} from there{}; shared: {} loads, {} stores; local: {} loads, {} \
             stores",
            sass.instructions,
            sass.matrix,
            by_name(&sass.matrix_by),
            sass.exponentials,
            sass.global_loads,
            sass.global_stores,
            sass.global_to_shared,
            sass.shared_to_global,
            by_name(&sass.copies_by),
            sass.shared_loads,
            sass.shared_stores,
            sass.local_loads,
            sass.local_stores
        ));
    }
    if let Some(r) = &kernel.resources {
        said.push(format!(
            "{} registers, {} threads, {} of shared memory a block; {} bytes of stack, {} + {} spilled",
            r.registers,
            r.threads,
            ui::bytes(u64::from(r.static_shared + r.dynamic_shared)),
            r.stack,
            r.spill_stores,
            r.spill_loads
        ));
    }
    if let Some(o) = &kernel.occupancy {
        said.push(format!(
            "occupancy: blocks a multiprocessor {}, warps {} of {}, bounded by {}",
            o.blocks, o.warps, o.most_warps, o.bound
        ));
    }
    for line in said {
        text.push_str(&ui::wrap(&format!("    {line}"), 6));
    }
}

/// ` (HMMA)`, ` (HGMMA 32, HMMA 4)`.
fn by_name(counts: &BTreeMap<String, u32>) -> String {
    let one = counts.len() == 1;
    let names = counts.iter().map(|(name, count)| match one {
        true => name.clone(),
        false => format!("{name} {count}"),
    });
    match counts.is_empty() {
        true => String::new(),
        false => format!(" ({})", names.collect::<Vec<_>>().join(", ")),
    }
}

fn findings(text: &mut String, group: &Group) {
    if group.findings.is_empty() {
        return;
    }
    let mut grid = Grid::new(&["", "must hold", "found"], 3);
    for finding in &group.findings {
        let verdict = if finding.holds {
            ("  holds".to_string(), Tone::Good)
        } else {
            ("  FAILS".to_string(), Tone::Bad)
        };
        grid.row(&[
            verdict,
            plain(finding.statement.clone()),
            plain(finding.found.clone()),
        ]);
    }
    text.push_str(&grid.render());
}
