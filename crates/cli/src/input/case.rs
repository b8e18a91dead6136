//! Options that a conformance case keeps in its header.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tilewise::Options;

use crate::case::CaseOptions;

/// The part of `__metadata__["case"]` that says what attention is asked for.
#[derive(Debug, Deserialize)]
struct Case {
    options: CaseOptions,
}

/// The options of the case described by `text`.
///
/// # Errors
/// If it is no case, or has an option that is not known: its results would be those of another problem.
pub(super) fn options(text: &str) -> Result<Options> {
    let Case { options } = serde_json::from_str(text).context("header entry \"case\"")?;
    if let Some(name) = options.unknown() {
        bail!("header entry \"case\": option {name:?} is not supported");
    }
    Ok(options.to_options())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_brings_its_options_or_is_refused() {
        let read = options(r#"{"id": "x", "options": {"causal": true}}"#).unwrap();
        assert_eq!(read, Options::new().causal(true));
        for text in ["{", "{}", r#"{"options": {"causal_align": "middle"}}"#] {
            assert!(options(text).is_err(), "{text}");
        }
        let unknown = options(r#"{"options": {"dropout": {"p": 0.5}}}"#).unwrap_err();
        assert!(unknown.to_string().contains("dropout"), "{unknown}");
    }
}
