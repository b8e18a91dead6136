//! What each algorithm's kernels must do, and whether they do.

use serde::Serialize;
use tilewise::Algorithm;

use super::Inspected;
use super::access::{Place, Way};
use super::own::TURNS;

/// One statement about the kernels of an algorithm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) statement: String,
    /// What was found, in the same words.
    pub(super) found: String,
    pub(super) holds: bool,
}

fn same(statement: &str, found: &[&str], expected: &[&str]) -> Finding {
    let list = |names: &[&str]| {
        if names.is_empty() {
            "nothing".to_string()
        } else {
            names.join(", ")
        }
    };
    Finding {
        statement: format!("{statement}: {}", list(expected)),
        found: list(found),
        holds: found == expected,
    }
}

/// The statements for `algorithm`, of which `kernels` are all.
pub(super) fn findings(algorithm: Algorithm, kernels: &[Inspected]) -> Vec<Finding> {
    let mut all = Vec::new();
    for one in kernels {
        let kernel = &one.ptx;
        // Which row blocks are taken is counted in memory too.
        let stored = |place| {
            let mut tensors = kernel.tensors(Way::Store, place);
            tensors.retain(|tensor| *tensor != TURNS);
            tensors
        };
        let loaded = |place| kernel.tensors(Way::Load, place);
        let entry = kernel.entry.as_str();
        match (algorithm.resolve(), entry) {
            (Algorithm::Standard, "tw_standard_scores") => {
                all.push(same("the first kernel stores", &stored(None), &["S"]));
            }
            (Algorithm::Standard, "tw_standard_softmax") => {
                // A sink is one number a head.
                let mut loaded = loaded(None);
                loaded.retain(|tensor| *tensor != "sinks");
                all.push(same("the second loads", &loaded, &["S"]));
                all.push(same("and stores", &stored(None), &["P", "lse"]));
            }
            (Algorithm::Standard, _) => {
                all.push(same("the third loads", &loaded(None), &["P", "v"]));
                all.push(same("and stores", &stored(None), &["out"]));
            }
            (Algorithm::Fa1, _) => {
                let running = ["O", "l", "m"];
                let inside = Some(Place::Inside);
                let mut back = loaded(inside);
                back.retain(|tensor| running.contains(tensor));
                all.push(same("the loop over keys loads", &back, &running));
                all.push(same("and stores", &stored(inside), &running));
                all.push(same(
                    "after it are stored",
                    &stored(Some(Place::After)),
                    &["lse", "m", "out"],
                ));
            }
            _ => {
                all.push(same(
                    "the loop over keys stores",
                    &stored(Some(Place::Inside)),
                    &[],
                ));
                all.push(same(
                    "after it are stored",
                    &stored(Some(Place::After)),
                    &["lse", "out"],
                ));
                // Blocks of `tw_hopper` take several row blocks, so all of it is in a loop over those.
                if entry != "tw_hopper" {
                    all.push(same("in no loop at all", &stored_once(one), &["lse"]));
                }
                all.push(same(
                    "before it are stored",
                    &stored(Some(Place::Before)),
                    &[],
                ));
            }
        }
        all.push(in_fast_memory(one));
    }
    all
}

/// The statements about backward kernels: dQ is added to inside the loop over rows, dk and dv are stored
/// after it, and no matrix of N² numbers is stored at all; `standard` stores and loads such matrices.
pub(super) fn backward_findings(kernels: &[Inspected]) -> Vec<Finding> {
    let mut all = Vec::new();
    for one in kernels {
        let kernel = &one.ptx;
        let stored = |place| kernel.tensors(Way::Store, place);
        let entry = kernel.entry.as_str();
        let matrices: Vec<&str> = (stored(None).into_iter())
            .filter(|tensor| ["S", "P"].contains(tensor))
            .collect();
        match entry {
            "tw_bwd_fa2" | "tw_bwd_hopper" => {
                let [mut before, inside, mut after] =
                    [Place::Before, Place::Inside, Place::After].map(|place| stored(Some(place)));
                // The last share of dQ may be added while dk and dv go out.
                after.retain(|tensor| *tensor != "dQ");
                // Blocks with NaN or infinity are marked, and left out.
                before.retain(|tensor| *tensor != "marks of keys");
                all.push(same("the loop over rows adds to", &inside, &["dQ"]));
                all.push(same("after it are stored, dQ aside", &after, &["dk", "dv"]));
                all.push(same("before it are stored", &before, &[]));
                all.push(in_fast_memory(one));
            }
            "tw_bwd_fa1" => {
                // One block walks all keys of a head, so dk and dv go out inside the outer loop.
                let results = ["dQ", "dk", "dv"];
                all.push(same("the loops store", &stored(None), &results));
                all.push(in_fast_memory(one));
            }
            "tw_bwd_standard_scores" => {
                // One kernel, launched once for each.
                all.push(same("the first kernel stores", &stored(None), &["S or dP"]));
            }
            "tw_bwd_standard_weights" => {
                let mut loaded = kernel.tensors(Way::Load, None);
                loaded.retain(|tensor| ["S", "dP"].contains(tensor));
                all.push(same("the second loads", &loaded, &["S", "dP"]));
                all.push(same("and stores", &stored(None), &["P", "dX"]));
            }
            "tw_bwd_standard_rows" => {
                all.push(same("the third stores", &stored(None), &["dq"]));
            }
            // Stores dk or dv, by a pointer that it picks.
            "tw_bwd_standard_keys" => {}
            _ => all.push(same(
                &format!("{entry} stores of the matrices"),
                &matrices,
                &[],
            )),
        }
    }
    all
}

/// Tensors that every thread stores at most once to each place: all their stores stand outside loops. A row's
/// lse is one number; the row of out goes out in pieces, in a loop of its own.
fn stored_once(one: &Inspected) -> Vec<&str> {
    let looped = |tensor: &str| {
        let mut accesses = one.ptx.accesses.iter();
        accesses.any(|a| a.way == Way::Store && a.tensor == tensor && a.in_a_loop)
    };
    let mut once = one.ptx.tensors(Way::Store, None);
    // Some tiles are small enough for the compiler to write the pieces without a loop.
    once.retain(|tensor| *tensor != "out" && !looped(tensor));
    once
}

/// No array of a thread lies in local memory, and the assembler spills less than a tile's scores.
fn in_fast_memory(one: &Inspected) -> Finding {
    let kernel = &one.ptx;
    let local = kernel.local_loads + kernel.local_stores;
    // What is stored and loaded again lies there once.
    let spilled = one
        .resources
        .as_ref()
        .map(|r| r.spill_stores.max(r.spill_loads));
    // A kernel without a tile of scores has nothing to hide a spill behind.
    let scores = one.score_bytes.unwrap_or(1);
    Finding {
        statement: format!("{}: no tile in local memory", kernel.entry),
        found: format!(
            "{local} accesses, {} bytes spilled{}",
            spilled.map_or("unknown".into(), |bytes| bytes.to_string()),
            match one.score_bytes {
                Some(bytes) => format!(" (scores: {bytes})"),
                None => String::new(),
            }
        ),
        holds: local == 0 && spilled.is_none_or(|bytes| bytes < scores),
    }
}
