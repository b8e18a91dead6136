//! A trace as an animation: one HTML file that needs nothing else.

use std::path::Path;

use anyhow::{Context, Result};

use super::attention::AttentionTrace;

/// The page around the trace: markup, style and the script that plays the recorded events.
const PAGE: &str = include_str!("page.html");

/// Where the trace goes.
const PLACE: &str = "{{trace}}";

/// Writes the page.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write(path: &Path, trace: &AttentionTrace) -> Result<()> {
    std::fs::write(path, html(trace)?).with_context(|| path.display().to_string())
}

/// The page as text. The trace stands in it as the same JSON that `--json` prints.
pub(super) fn html(trace: &AttentionTrace) -> Result<String> {
    // Inside a script element only `<` could end the element or open a comment.
    let json = serde_json::to_string(trace)?.replace('<', "\\u003c");
    Ok(PAGE.replacen(PLACE, &json, 1))
}
