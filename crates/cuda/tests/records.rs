//! A kernel family that changed since the newest record needs a new record, or a reason why there is
//! none yet in `records/unmeasured.json`.

use std::io::Write as _;
use std::path::Path;

use tilewise_cuda::records::{Unmeasured, changed, newest};

#[test]
fn every_kernel_family_is_measured_or_says_why_not() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("records");
    if !folder.exists() {
        // A packed test binary away from its sources has no records to look at.
        return;
    }
    let record = newest(&folder).unwrap();
    let reasons = std::fs::read_to_string(folder.join("unmeasured.json")).unwrap();
    let unmeasured: Unmeasured = serde_json::from_str(&reasons).unwrap();
    let (silent, explained) = changed(&record, &unmeasured);
    for family in &explained {
        let _ = writeln!(
            std::io::stderr(),
            "UNMEASURED kernels of {family} since {}: {}",
            record.date,
            unmeasured[family]
        );
    }
    assert!(
        silent.is_empty(),
        "{silent:?} changed since the record of {}: run scripts/pack-gpu and check-gpu and commit the \
         record, or give the reason in records/unmeasured.json",
        record.date
    );
    for (check, outcome) in &record.checks {
        assert!(
            !outcome.starts_with("failed"),
            "{check} failed in the record of {}",
            record.date
        );
    }
}
