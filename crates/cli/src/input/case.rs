//! Options that a conformance case keeps in its header.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tilewise::{Alignment, Dropout, Options};

/// The part of `__metadata__["case"]` that says what attention is asked for.
#[derive(Debug, Deserialize)]
struct Case {
    options: CaseOptions,
}

#[derive(Debug, Deserialize)]
struct CaseOptions {
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    causal_align: Option<String>,
    /// Negative: no bound.
    #[serde(default)]
    window_left: Option<i64>,
    #[serde(default)]
    window_right: Option<i64>,
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default)]
    softmax_scale: Option<f64>,
    #[serde(default)]
    dropout_p: f64,
}

/// The options of the case described by `text`.
pub(super) fn options(text: &str) -> Result<Options> {
    let Case { options } = serde_json::from_str(text).context("header entry \"case\"")?;
    let bound = |bound: Option<i64>| bound.and_then(|bound| usize::try_from(bound).ok());
    let alignment = match options.causal_align.as_deref() {
        None | Some("bottom_right") => Alignment::BottomRight,
        Some("top_left") => Alignment::TopLeft,
        Some(other) => bail!("header entry \"case\": unknown causal_align {other:?}"),
    };
    Ok(Options::new()
        .causal(options.causal)
        .alignment(alignment)
        .window_left(bound(options.window_left))
        .window_right(bound(options.window_right))
        .softcap(options.softcap.filter(|&cap| cap > 0.0))
        .softmax_scale(options.softmax_scale)
        .dropout((options.dropout_p != 0.0).then_some(Dropout::Mask {
            p: options.dropout_p,
        })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_below_zero_are_none() {
        let text = r#"{"id": "x", "options": {"causal": true, "causal_align": "top_left", "window_left": -1,
            "window_right": 3, "softcap": 0.0, "softmax_scale": null, "dropout_p": 0.0}}"#;
        assert_eq!(
            options(text).unwrap(),
            Options::new()
                .causal(true)
                .alignment(Alignment::TopLeft)
                .window_right(3)
        );
        let dropped = options(r#"{"options": {"dropout_p": 0.5}}"#).unwrap();
        assert_eq!(dropped.get_dropout(), Some(Dropout::Mask { p: 0.5 }));
        assert!(options("{").is_err());
    }
}
