//! A case file's description, as `tests/conformance/SCHEMA.md` defines it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use tilewise::ErrorClass;

use crate::case::CaseOptions;

/// `__metadata__["case"]`, or a whole file of `spec/`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Case {
    pub(super) schema: u32,
    pub(super) id: String,
    pub(super) kind: String,
    pub(super) op: String,
    pub(super) level: String,
    #[serde(default)]
    pub(super) note: String,
    #[serde(default)]
    pub(super) seed: u64,
    #[serde(default)]
    pub(super) requires: Vec<String>,
    #[serde(default)]
    /// What must not be done silently without: every option is known, or the case is refused.
    pub(super) options: CaseOptions,
    #[serde(default)]
    pub(super) tolerance: BTreeMap<String, Tolerance>,
    #[serde(default)]
    pub(super) views: BTreeMap<String, ViewSpec>,
    #[serde(default)]
    pub(super) run: RunSpec,
    pub(super) expect: Option<Expect>,
    pub(super) n_heads: Option<usize>,
    /// What only some ops have.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

/// The version of the schema that is read here.
pub(super) const SCHEMA: u32 = 1;

/// |x − ref| ≤ atol + rtol·|ref|.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub(super) struct Tolerance {
    pub(super) atol: f64,
    pub(super) rtol: f64,
}

/// How a tensor lies in memory, in elements.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ViewSpec {
    /// The tensor that is the memory; none for lazy views.
    pub(super) storage: Option<String>,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<isize>,
    pub(super) offset: usize,
    #[serde(default)]
    pub(super) lazy: bool,
    pub(super) storage_elements: Option<usize>,
    #[serde(default)]
    pub(super) fill: f64,
}

/// How the case is to be run.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct RunSpec {
    pub(super) repeat: Option<usize>,
    pub(super) bitwise_repeat: Option<Value>,
    #[serde(default)]
    pub(super) threads: Vec<usize>,
    #[serde(default)]
    pub(super) splits: Vec<usize>,
    #[serde(default)]
    pub(super) each_batch_alone: bool,
    #[serde(default)]
    pub(super) each_sequence_alone: bool,
    /// Done for every case, asked for or not.
    #[serde(rename = "prefill_output")]
    pub(super) _prefill_output: Option<Value>,
    pub(super) alternate_with: Option<Value>,
    pub(super) concurrent_calls: Option<usize>,
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Expect {
    pub(super) error: String,
}

/// Features that cases may require and that are claimed. A backend without gradients refuses a case
/// that wants them, after its forward part has been checked.
const CLAIMED: [&str; 22] = [
    "f64",
    "f32",
    "f16",
    "bf16",
    "varlen",
    "seqused_k",
    "paged",
    "bias",
    "mask",
    "softcap",
    "alibi",
    "sinks",
    "views",
    "lazy_views",
    "window",
    "causal",
    "top_left",
    "gqa",
    "dv",
    "grad",
    "dlse",
    "dropout_mask",
];
const GRADIENT: [&str; 2] = ["grad", "dlse"];

impl Case {
    /// Whether gradients are expected too.
    pub(super) fn wants_gradients(&self) -> bool {
        self.requires
            .iter()
            .any(|feature| GRADIENT.contains(&feature.as_str()))
    }

    /// Why the case cannot be run as it asks, if it cannot.
    pub(super) fn refusal(&self) -> Option<String> {
        let unknown =
            |what, name: Option<&str>| name.map(|name| format!("{what} {name:?} is not supported"));
        let mut features = self.requires.iter().map(String::as_str);
        unknown("feature", features.find(|name| !CLAIMED.contains(name)))
            .or_else(|| unknown("option", self.options.unknown()))
            .or_else(|| {
                unknown(
                    "run directive",
                    self.run.rest.keys().map(String::as_str).next(),
                )
            })
    }
}

/// The schema's name of an error's class.
pub(super) fn class_name(class: ErrorClass) -> &'static str {
    match class {
        ErrorClass::Shape => "shape",
        ErrorClass::Heads => "heads",
        ErrorClass::Lengths => "lengths",
        ErrorClass::Table => "table",
        ErrorClass::Option => "option",
        ErrorClass::Unsupported => "unsupported",
        _ => "backend",
    }
}
