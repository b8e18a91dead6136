//! What was measured on a GPU, and for which kernels: the committed records.
//!
//! No GPU is at hand where changes are checked, so a record names the hash of each kernel family it
//! was made with. A family whose hash differs from the newest record must be recorded anew, or be
//! named in `records/unmeasured.json` with the reason.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::kernels::Family;

/// A record's header; the figures beside it are free in form.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record {
    /// Date of the run, `YYYY-MM-DD`.
    pub date: String,
    /// The GPU.
    pub device: String,
    /// CUDA version of the driver.
    pub driver: String,
    /// The compiler that made the kernels.
    pub compiler: String,
    /// Family name to [`Family::hash`].
    pub families: BTreeMap<String, String>,
    /// What ran, name to outcome.
    pub checks: BTreeMap<String, String>,
}

/// Families that changed since the newest record, with the reason given.
pub type Unmeasured = BTreeMap<String, String>;

/// The hash of each family as it stands.
pub fn hashes() -> BTreeMap<String, String> {
    Family::ALL
        .iter()
        .map(|family| (family.name().to_owned(), family.hash()))
        .collect()
}

/// The newest record in `folder`, by file name: `YYYY-MM-DD-*.json`.
///
/// # Errors
/// If there is none, or it cannot be read.
pub fn newest(folder: &Path) -> Result<Record, String> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .map_err(|e| format!("{}: {e}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension().is_some_and(|kind| kind == "json")
                && path
                    .file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(|name| name.starts_with("20"))
        })
        .collect();
    files.sort();
    let file = files
        .pop()
        .ok_or_else(|| format!("no record in {}", folder.display()))?;
    let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))
}

/// Families whose kernels are not those of `record` and that `unmeasured` does not explain; then those
/// that it does explain.
pub fn changed(record: &Record, unmeasured: &Unmeasured) -> (Vec<String>, Vec<String>) {
    hashes()
        .into_iter()
        .filter(|(name, hash)| record.families.get(name) != Some(hash))
        .map(|(name, _)| name)
        .partition(|name| !unmeasured.contains_key(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_family_needs_a_record_or_a_reason() {
        let mut record = Record {
            date: "2026-01-01".into(),
            device: "GPU".into(),
            driver: "13.0".into(),
            compiler: "NVRTC 13.0".into(),
            families: hashes(),
            checks: BTreeMap::new(),
        };
        assert_eq!(changed(&record, &Unmeasured::new()), (vec![], vec![]));
        record.families.insert("fa2".into(), "0".repeat(64));
        assert_eq!(
            changed(&record, &Unmeasured::new()),
            (vec!["fa2".to_owned()], vec![])
        );
        let reasons = Unmeasured::from([("fa2".to_owned(), "no GPU at hand".to_owned())]);
        assert_eq!(changed(&record, &reasons), (vec![], vec!["fa2".to_owned()]));
    }
}
