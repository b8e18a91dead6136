//! Options of a conformance case, as `tests/conformance/SCHEMA.md` defines them: what `check` runs, and what a case that is
//! read as a file of tensors brings along.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use tilewise::{Alignment, Dropout, Options};

/// What must not be done silently without: every field is known, or the case is refused.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct CaseOptions {
    #[serde(default)]
    pub(crate) layout: Layout,
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    causal_align: Align,
    /// Negative: no bound.
    window_left: Option<i64>,
    window_right: Option<i64>,
    softmax_scale: Option<f64>,
    #[serde(default)]
    softcap: f64,
    #[serde(default)]
    pub(crate) dropout_p: f64,
    #[serde(flatten)]
    pub(crate) rest: BTreeMap<String, Value>,
}

/// Options that follow from the tensors.
const IMPLIED: [&str; 5] = [
    "dtype",
    "group",
    "page_size",
    "max_seqlen_q",
    "max_seqlen_k",
];

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Layout {
    #[default]
    Bhsd,
    Varlen,
    Paged,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Align {
    #[default]
    BottomRight,
    TopLeft,
}

impl CaseOptions {
    /// The first option that the schema does not know.
    pub(crate) fn unknown(&self) -> Option<&str> {
        let mut names = self.rest.keys().map(String::as_str);
        names.find(|name| !IMPLIED.contains(name))
    }

    /// The options that do not come as tensors.
    pub(crate) fn to_options(&self) -> Options {
        let bound = |bound: Option<i64>| bound.and_then(|bound| usize::try_from(bound).ok());
        Options::new()
            .causal(self.causal)
            .alignment(match self.causal_align {
                Align::BottomRight => Alignment::BottomRight,
                Align::TopLeft => Alignment::TopLeft,
            })
            .window_left(bound(self.window_left))
            .window_right(bound(self.window_right))
            .softmax_scale(self.softmax_scale)
            .softcap((self.softcap > 0.0).then_some(self.softcap))
            .dropout((self.dropout_p != 0.0).then_some(Dropout::Mask { p: self.dropout_p }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_no_bound() {
        let parse = |text: &str| serde_json::from_str::<CaseOptions>(text).unwrap();
        for none in [CaseOptions::default(), parse("{}")] {
            assert_eq!(none.to_options(), Options::new());
        }
        let text = r#"{"causal": true, "causal_align": "top_left", "window_left": -1, "window_right": 3,
            "softcap": 0.0, "softmax_scale": null, "dropout_p": 0.0, "group": 2}"#;
        let options = parse(text);
        assert_eq!(options.unknown(), None);
        assert_eq!(
            options.to_options(),
            Options::new()
                .causal(true)
                .alignment(Alignment::TopLeft)
                .window_right(3)
        );
        let dropped = parse(r#"{"dropout_p": 0.5}"#).to_options();
        assert_eq!(dropped.get_dropout(), Some(Dropout::Mask { p: 0.5 }));
        assert_eq!(parse(r#"{"dropout": 1}"#).unknown(), Some("dropout"));
    }
}
