//! `tilewise check` on the conformance cases, on cases that cannot pass, and on broken files.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use common::*;
use serde_json::{Value, json};
use tilewise_cli::container::{Container, Tensor, write_safetensors};

const CASES: &str = "tests/conformance";

/// Ids of the cases of the index that have one of these features or ops.
fn listed(choose: impl Fn(&[&str], &str) -> bool) -> BTreeSet<String> {
    let text = std::fs::read(root().join(CASES).join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&text).unwrap();
    index["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| {
            let requires: Vec<&str> = case["requires"]
                .as_array()
                .unwrap()
                .iter()
                .map(|feature| feature.as_str().unwrap())
                .collect();
            choose(&requires, case["op"].as_str().unwrap())
        })
        .map(|case| case["id"].as_str().unwrap().to_owned())
        .collect()
}

fn ids(report: &Value, status: &str) -> BTreeSet<String> {
    report["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| case["status"] == status)
        .map(|case| case["id"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_case_passes_on_every_algorithm_and_instruction_set() {
    let report = json(&["check", CASES, "--backends", "cpu", "--isa", "all"], 0);
    assert_eq!(report["failed"], 0);
    assert_eq!(ids(&report, "failed"), BTreeSet::new());
    // Refused is exactly what is not there yet or not asked for, and nothing else.
    let unsupported = listed(|_, op| ["device", "budget"].contains(&op));
    assert_eq!(ids(&report, "refused"), unsupported);
    let all = listed(|_, _| true).len() + 30;
    assert_eq!(report["cases"].as_array().unwrap().len(), all);
    assert_eq!(report["refused"], unsupported.len());
    assert_eq!(report["passed"], all - unsupported.len());

    let lanes = report["lanes"].as_array().unwrap();
    assert!(
        lanes.len() >= 3 && lanes.len().is_multiple_of(3),
        "{lanes:?}"
    );
    for case in report["cases"].as_array().unwrap() {
        if case["op"] == "attention" {
            assert_eq!(
                case["runs"].as_array().unwrap().len(),
                lanes.len(),
                "{case}"
            );
        }
    }
}

#[test]
fn the_totals_come_first() {
    let text = stdout(
        &[
            "check",
            "tests/conformance/attn/d-ali-03.safetensors",
            "--json",
            "--backends",
            "cpu",
        ],
        0,
    );
    let head: String = text.split_whitespace().take(7).collect();
    assert_eq!(head, r#"{"schema":1,"passed":1,"refused":0,"#);
    let text = stdout(
        &["check", "tests/conformance/files", "--backends", "cpu"],
        0,
    );
    assert!(text.contains("passed   d-fortran.npy\n"), "{text}");
    assert!(text.contains("30 passed, 0 refused, 0 failed"), "{text}");
}

/// A copy of a case file, its description and its tensors changed.
struct Copy {
    case: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    source: PathBuf,
}

impl Copy {
    fn of(id: &str) -> Copy {
        let source = root().join(CASES).join(format!("attn/{id}.safetensors"));
        let container = Container::open(&source).unwrap();
        Copy {
            case: serde_json::from_str(&container.metadata()["case"]).unwrap(),
            tensors: BTreeMap::new(),
            source,
        }
    }

    /// Changes an expected tensor.
    fn with(mut self, name: &str, change: impl Fn(&mut [f64])) -> Copy {
        let container = Container::open(&self.source).unwrap();
        let tensor = container.tensor(name).unwrap();
        let mut values = tensor.to_f64();
        change(&mut values);
        self.tensors
            .insert(name.to_owned(), (tensor.shape().to_vec(), values));
        self
    }

    fn write(&self, folder: &Folder) -> String {
        let path = folder.file("case.safetensors");
        let container = Container::open(&self.source).unwrap();
        let tensors: Vec<Tensor<'_>> = container
            .names()
            .iter()
            .map(|name| match self.tensors.get(name) {
                Some((shape, values)) => Tensor::new(name, shape, values),
                None => container.tensor(name).unwrap(),
            })
            .collect();
        let metadata = BTreeMap::from([("case".to_owned(), self.case.to_string())]);
        write_safetensors(Path::new(&path), &tensors, &metadata).unwrap();
        path
    }

    fn check(&self, status: i32) -> Value {
        let folder = Folder::new();
        let path = self.write(&folder);
        json(&["check", &path, "--backends", "cpu"], status)
    }
}

#[test]
fn a_wrong_expected_value_is_a_failure() {
    for id in ["d-caus-01", "d-low-03", "d-pag-01", "d-lay-06", "d-mrg-02"] {
        assert_eq!(Copy::of(id).check(0)["passed"], 1, "{id}");
        for name in ["o", "lse"] {
            let report = Copy::of(id)
                .with(name, |values| *values.last_mut().unwrap() += 0.1)
                .check(1);
            assert_eq!(report["failed"], 1, "{id}");
            let case = &report["cases"][0];
            for run in case["runs"].as_array().unwrap() {
                assert_eq!(run["status"], "failed", "{run}");
                assert!(
                    run["reason"].as_str().unwrap().contains("expected"),
                    "{run}"
                );
            }
        }
    }
    let report = Copy::of("d-ali-04")
        .with("slopes", |slopes| slopes[3] *= 1.001)
        .check(1);
    assert_eq!(report["failed"], 1);
}

#[test]
fn nan_and_infinity_are_not_within_any_tolerance() {
    let loose = |id: &str| {
        let mut copy = Copy::of(id);
        copy.case["tolerance"]["o"]["atol"] = json!(1e300);
        copy.case["tolerance"]["lse"]["atol"] = json!(1e300);
        copy
    };
    assert_eq!(loose("d-nan-01").check(0)["passed"], 1);
    for (name, value) in [("o", 0.0), ("lse", 0.0), ("o", f64::INFINITY)] {
        let replaced = loose("d-nan-01").with(name, |values| {
            for x in values.iter_mut().filter(|x| x.is_nan()) {
                *x = value;
            }
        });
        assert_eq!(replaced.check(1)["failed"], 1, "{name} {value}");
    }
    let everything = loose("d-caus-01").with("o", |values| values[0] = f64::NAN);
    assert_eq!(everything.check(1)["failed"], 1);
    let empty = loose("d-lse-01").with("lse", |values| {
        for x in values.iter_mut().filter(|x| x.is_infinite()) {
            *x = -1e30;
        }
    });
    assert_eq!(empty.check(1)["failed"], 1);
}

#[test]
fn errors_must_come_and_be_of_the_class_expected() {
    let mut copy = Copy::of("d-val-03");
    copy.case["expect"]["error"] = json!("heads");
    assert_eq!(copy.check(1)["failed"], 1);
    // Sound inputs of which an error is expected.
    let mut copy = Copy::of("d-caus-01");
    copy.case["op"] = json!("error");
    copy.case["expect"] = json!({"error": "shape"});
    assert_eq!(copy.check(1)["failed"], 1);
}

#[test]
fn what_a_case_asks_for_and_is_not_known_is_refused_never_left_out() {
    for change in [
        json!({"requires": ["telepathy"]}),
        json!({"options": {"causal": true, "sliding_sink": 3}}),
        json!({"run": {"on_mondays": true}}),
        json!({"options": {"dropout_p": 0.5}}),
        json!({"op": "divide"}),
    ] {
        let mut copy = Copy::of("d-few-01");
        for (key, value) in change.as_object().unwrap() {
            copy.case[key] = value.clone();
        }
        let report = copy.check(0);
        assert_eq!(report["refused"], 1, "{change}: {report:#}");
    }
}

#[test]
fn run_directives_are_followed() {
    // Four sequences, one without keys and one without queries, each called alone.
    let mut copy = Copy::of("d-zero-02");
    copy.case["run"] = json!({"each_sequence_alone": true, "concurrent_calls": 4});
    assert_eq!(copy.check(0)["passed"], 1);
    let mut copy = Copy::of("d-pag-01");
    copy.case["run"] = json!({
        "each_batch_alone": true,
        "alternate_with": {"B": 2, "Hq": 3, "Sq": 5, "Sk": 40, "D": 8, "causal": true},
        "repeat": 3,
        "bitwise_repeat": "if_claimed",
        "threads": [1, 3],
    });
    assert_eq!(copy.check(0)["passed"], 1);
    // Keys with bias, mask, lengths, packing and pages, in more parts than there are keys.
    for id in [
        "d-mask-02",
        "d-cap-04",
        "d-gqa-03",
        "d-lay-03",
        "d-zero-01",
        "d-caus-03",
        "d-leak-05",
        "d-sta-01",
        "d-pag-02",
        "d-snk-02",
    ] {
        let mut copy = Copy::of(id);
        copy.case["run"] = json!({"splits": [1, 2, 3, 50]});
        assert_eq!(copy.check(0)["passed"], 1, "{id}");
    }
}

#[test]
fn memory_budgets_are_measured() {
    let report = json(
        &[
            "check",
            "tests/conformance/spec/d-bud-01.json",
            "tests/conformance/spec/d-bud-02.json",
            "--budgets",
            "--backends",
            "cpu",
            "--algorithms",
            "fa2",
        ],
        0,
    );
    assert_eq!(report["passed"], 2, "{report:#}");
    // A budget that nothing can keep.
    let folder = Folder::new();
    let path = folder.file("tight.json");
    let spec = std::fs::read(root().join("tests/conformance/spec/d-bud-02.json")).unwrap();
    let mut spec: Value = serde_json::from_slice(&spec).unwrap();
    spec["limit_bytes"] = json!(1);
    std::fs::write(&path, spec.to_string()).unwrap();
    let report = json(
        &[
            "check",
            &path,
            "--budgets",
            "--backends",
            "cpu",
            "--algorithms",
            "fa2",
        ],
        1,
    );
    assert_eq!(report["failed"], 1, "{report:#}");
    let standard = json(
        &[
            "check",
            &path,
            "--budgets",
            "--backends",
            "cpu",
            "--algorithms",
            "standard",
        ],
        0,
    );
    assert_eq!(standard["refused"], 1, "{standard:#}");
}

#[test]
fn broken_files_end_the_command_in_one_line() {
    let folder = Folder::new();
    let case = root().join("tests/conformance/attn/d-caus-01.safetensors");
    let bytes = std::fs::read(case).unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = folder.file(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let mut no_tolerance = Copy::of("d-caus-01");
    no_tolerance.case["tolerance"] = json!({});
    let mut new_schema = Copy::of("d-caus-01");
    new_schema.case["schema"] = json!(2);
    let (empty, first, second) = (Folder::new(), Folder::new(), Folder::new());
    let manifest =
        json!({"schema": 1, "files": [{"file": "gone.npy", "kind": "npy", "expect": "error"}]});
    for (path, fault) in [
        (
            file("cut.safetensors", &bytes[..bytes.len() - 1]),
            "truncated",
        ),
        (file("empty.safetensors", b""), "too few"),
        (
            file("plain.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
            "no conformance case",
        ),
        (file("bad.json", b"{"), "bad JSON"),
        (file("odd.json", b"{\"schema\": 1}"), "bad case"),
        (
            file("manifest.json", manifest.to_string().as_bytes()),
            "gone.npy is missing",
        ),
        (
            file("q.npy", b"\x93NUMPY"),
            "a case is a .safetensors or .json file",
        ),
        (folder.file("gone.safetensors"), "gone.safetensors"),
        (empty.file(""), "no cases"),
        (no_tolerance.write(&first), "no tolerance for o"),
        (new_schema.write(&second), "schema 2"),
    ] {
        let line = error(&["check", &path, "--backends", "cpu"]);
        assert!(line.contains(fault), "{line}");
    }
    let line = error(&["check", CASES, "--backends", "cuda:99"]);
    assert!(line.contains("cuda:99"), "{line}");
}
