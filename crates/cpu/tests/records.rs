//! Where changes are checked there is no AMX: its kernels need a record of a run on a host that has
//! it, or a reason in `records/unmeasured.json` why there is none yet.

use std::io::Write as _;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// What `scripts/amx-hash` hashes.
const SOURCES: [&str; 5] = [
    include_str!("../src/kernel/pairs/amx.rs"),
    include_str!("../src/kernel/pairs/mod.rs"),
    include_str!("../src/kernel/pairs/pack.rs"),
    include_str!("../src/kernel/pairs/step.rs"),
    include_str!("../src/pairs.rs"),
];

fn hash() -> String {
    let digest = Sha256::digest(SOURCES.concat());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_amx_kernels_are_measured_or_say_why_not() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("records");
    if !folder.exists() {
        // A packed test binary away from its sources has no records to look at.
        return;
    }
    let json = |path: &Path| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    let mut records: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with("-amx.json"))
        .collect();
    records.sort();
    let newest = json(records.last().expect("a record"));
    let unmeasured = json(&folder.join("unmeasured.json"));
    if newest["amx"] != hash() {
        let reason = unmeasured["amx"].as_str().unwrap_or_else(|| {
            panic!(
                "the AMX kernels changed since the record of {}: run scripts/pack-amx and check-amx and \
                 commit the record, or give the reason as \"amx\" in records/unmeasured.json",
                newest["date"]
            )
        });
        let _ = writeln!(std::io::stderr(), "UNMEASURED AMX kernels: {reason}");
    }
    let checks = newest["checks"].as_object().unwrap();
    assert!(checks.contains_key("pairs") && checks.contains_key("amx-is-there"));
    for (check, outcome) in checks {
        let outcome = outcome.as_str().unwrap();
        assert!(outcome.starts_with("ok"), "{check}: {outcome}");
    }
}
