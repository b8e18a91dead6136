//! The case files on core's own schedules, and on backends that are wrong: a check that cannot
//! fail says nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewise::core::observe::NoObserver;
use tilewise::core::schedule::{self, BlockSizes};
use tilewise::core::with_typed;
use tilewise::{
    Algorithm, AnyBackwardInputs, AnyGradientsMut, AnyInputs, AnyTensorMut, Backend, BackendInfo,
    BackwardInputs, BackwardReport, Element, Error, ForwardReport, Inputs, Problem, RunningState,
    TensorViewMut,
};

use super::lanes::OpenLane;
use super::report::CaseReport;
use super::verdict::Verdict;
use super::{files, with_tensors, without_tensors};

/// How a backend is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The first element of o is off by this much.
    Off(f64),
    /// The last row of o and lse is not written.
    Unwritten,
    /// NaN is replaced by 0.
    HidesNan,
    /// The second call of two differs in a last bit.
    Unsteady,
    Panics,
    /// lse is base 2.
    Log2,
    /// There is no backward pass.
    NoGradients,
    /// An element of dv is off by this much.
    GradientOff(f64),
}

/// Core's schedules as a backend, without streaming.
#[derive(Debug)]
struct Schedules {
    fault: Fault,
    calls: AtomicUsize,
}

impl Backend for Schedules {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "schedules".into(),
            device: "core".into(),
            details: Vec::new(),
        }
    }

    fn supports(&self, _: &Problem, _: Algorithm) -> tilewise::Result<()> {
        Ok(())
    }

    fn workspace_bytes(&self, _: &Problem, _: Algorithm) -> u64 {
        0
    }

    fn forward(
        &self,
        problem: &Problem,
        inputs: &AnyInputs<'_>,
        algorithm: Algorithm,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> tilewise::Result<ForwardReport> {
        with_typed!(AnyInputs, inputs, inputs => {
            self.typed(problem, inputs, algorithm, out, lse)
        })?;
        Ok(ForwardReport {
            algorithm,
            isa: "none".into(),
        })
    }

    fn supports_backward(&self, problem: &Problem, _: Algorithm) -> tilewise::Result<()> {
        match self.fault {
            Fault::NoGradients => Err(Error::unsupported("schedules", "backward")),
            _ => self.supports(problem, Algorithm::Auto),
        }
    }

    fn backward(
        &self,
        problem: &Problem,
        inputs: &AnyBackwardInputs<'_>,
        algorithm: Algorithm,
        gradients: AnyGradientsMut<'_>,
    ) -> tilewise::Result<BackwardReport> {
        match inputs {
            AnyBackwardInputs::F64(inputs) => self.back(problem, inputs, algorithm, gradients),
            AnyBackwardInputs::F32(inputs) => self.back(problem, inputs, algorithm, gradients),
            AnyBackwardInputs::F16(inputs) => self.back(problem, inputs, algorithm, gradients),
            AnyBackwardInputs::BF16(inputs) => self.back(problem, inputs, algorithm, gradients),
        }
    }

    fn begin(&self, _: &Problem) -> tilewise::Result<Box<dyn RunningState>> {
        Err(Error::unsupported("schedules", "streaming"))
    }
}

impl Schedules {
    fn back<T: Element>(
        &self,
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        algorithm: Algorithm,
        gradients: AnyGradientsMut<'_>,
    ) -> tilewise::Result<BackwardReport> {
        let mut gradients = T::typed_gradients(gradients).unwrap();
        let (sizes, views) = (BlockSizes::new(4, 7)?, gradients.reborrow());
        schedule::backward::backward(algorithm, problem, inputs, sizes, &mut NoObserver, views)?;
        if let Fault::GradientOff(by) = self.fault {
            let last = gradients.dv.row_mut(0, 0, 0).last_mut().unwrap();
            *last = T::from_f64(last.to_f64() + by);
        }
        Ok(BackwardReport {
            algorithm,
            isa: "none".into(),
        })
    }

    fn typed<T: Element>(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        algorithm: Algorithm,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> tilewise::Result<()> {
        let (mut out, mut lse) = (T::typed_mut(out).unwrap(), lse.unwrap());
        let [b, h, s, _] = out.shape();
        let rows = b * h * s;
        let last = (rows > 0).then(|| {
            let row = out.row_mut(b - 1, h - 1, s - 1).to_vec();
            (row, lse.row_mut(b - 1, h - 1, s - 1).to_vec())
        });
        let sizes = BlockSizes::new(4, 7)?;
        let forward = match algorithm {
            Algorithm::Standard => schedule::standard::forward,
            Algorithm::Fa1 => schedule::fa1::forward,
            _ => schedule::fa2::forward,
        };
        forward(
            problem,
            inputs,
            sizes,
            &mut NoObserver,
            out.reborrow(),
            Some(lse.reborrow()),
        )?;
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match (self.fault, last) {
            (Fault::None | Fault::NoGradients | Fault::GradientOff(_), _) | (_, None) => {}
            (Fault::Panics, _) => panic!("as asked"),
            (Fault::Unwritten, Some((row, l))) => {
                out.row_mut(b - 1, h - 1, s - 1).copy_from_slice(&row);
                lse.row_mut(b - 1, h - 1, s - 1).copy_from_slice(&l);
            }
            (Fault::Off(by), _) => {
                let first = &mut out.row_mut(0, 0, 0)[0];
                *first = T::from_f64(first.to_f64() + by);
            }
            (Fault::Unsteady, _) => {
                if call % 2 == 1 {
                    let first = &mut lse.row_mut(0, 0, 0)[0];
                    *first = first.next_up();
                }
            }
            (Fault::HidesNan | Fault::Log2, _) => {
                for row in 0..rows {
                    let (b, h, s) = (row / (h * s), row / s % h, row % s);
                    for x in out.row_mut(b, h, s) {
                        if self.fault == Fault::HidesNan && x.to_f64().is_nan() {
                            *x = T::default();
                        }
                    }
                    if self.fault == Fault::Log2 {
                        lse.row_mut(b, h, s)[0] *= std::f32::consts::LOG2_E;
                    }
                }
            }
        }
        Ok(())
    }
}

fn conformance() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance")
}

fn lanes(fault: Fault) -> Vec<OpenLane> {
    Algorithm::ALL
        .into_iter()
        .map(|algorithm| OpenLane {
            name: "schedules".into(),
            isa: None,
            algorithm,
            backend: Arc::new(Schedules {
                fault,
                calls: AtomicUsize::new(0),
            }),
        })
        .collect()
}

fn case(id: &str, fault: Fault) -> CaseReport {
    let path = conformance().join(format!("attn/{id}.safetensors"));
    with_tensors(&path, &lanes(fault)).unwrap()
}

fn assert_fails(id: &str, fault: Fault, because: &str) {
    let report = case(id, fault);
    for run in &report.runs {
        let Verdict::Failed(reason) = &run.verdict else {
            panic!("{id} on {fault:?}: {:?}", run.verdict);
        };
        assert!(reason.contains(because), "{id}: {reason}");
    }
    assert!(matches!(report.verdict(), Verdict::Failed(_)));
}

#[test]
fn the_schedules_of_core_pass_every_case() {
    let lanes = lanes(Fault::None);
    let (mut passed, mut failed) = (0, Vec::new());
    for entry in std::fs::read_dir(conformance().join("attn")).unwrap() {
        let report = with_tensors(&entry.unwrap().path(), &lanes).unwrap();
        match report.verdict() {
            Verdict::Passed => passed += 1,
            Verdict::Refused(reason) => {
                assert!(reason.contains("streaming"), "{}: {reason}", report.id)
            }
            Verdict::Failed(reason) => failed.push(format!("{}: {reason}", report.id)),
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(passed >= 100, "{passed}");
}

#[test]
fn a_wrong_element_fails() {
    assert_fails("d-tail-02", Fault::Off(1e-4), "o[0, 0, 0, 0] is");
    assert_fails("d-lay-02", Fault::Off(0.1), "(1 of");
    assert_fails("d-lse-02", Fault::Log2, "lse[0, 0, 0] is");
}

#[test]
fn a_row_that_is_not_written_fails() {
    assert_fails("d-sta-01", Fault::Unwritten, "is NaN, expected");
    assert_fails("d-few-01", Fault::Unwritten, "is NaN, expected");
}

#[test]
fn nan_must_meet_nan() {
    assert_fails("d-nan-01", Fault::HidesNan, "expected NaN");
    assert_fails("d-nan-01", Fault::Off(f64::NAN), "is NaN, expected");
}

#[test]
fn results_that_change_from_call_to_call_fail_where_bits_are_asked_for() {
    assert_fails(
        "d-det-01",
        Fault::Unsteady,
        "call 2: within tolerance, but not the bits",
    );
    assert_fails("d-det-02", Fault::Unsteady, "not the bits");
    assert_eq!(
        case("d-tail-02", Fault::Unsteady).verdict(),
        Verdict::Passed
    );
}

#[test]
fn a_panic_fails_its_case_only() {
    assert_fails("d-tail-02", Fault::Panics, "panicked at");
    // Inconsistent inputs are found before the backend is asked.
    assert_eq!(case("d-val-02", Fault::Panics).verdict(), Verdict::Passed);
}

#[test]
fn gradients_are_compared_and_their_absence_is_a_refusal() {
    assert_fails("d-grd-01", Fault::Off(1e-3), "o[0, 0, 0, 0]");
    assert_fails("d-grd-01", Fault::GradientOff(1e-3), "dv[0, 0, 0, 7]");
    assert_fails("d-drp-01", Fault::GradientOff(f64::NAN), "is NaN");
    assert_eq!(case("d-grd-01", Fault::None).verdict(), Verdict::Passed);
    let Verdict::Refused(reason) = case("d-grd-01", Fault::NoGradients).verdict() else {
        panic!("gradients were not computed");
    };
    assert!(reason.contains("gradients"), "{reason}");
}

#[test]
fn specifications_are_refused_unless_they_can_be_measured() {
    let lanes = lanes(Fault::None);
    let spec = |id: &str, budgets| {
        let path = conformance().join(format!("spec/{id}.json"));
        without_tensors(&path, &lanes, budgets).unwrap()
    };
    assert!(matches!(
        spec("d-bud-01", false).verdict(),
        Verdict::Refused(_)
    ));
    assert!(matches!(
        spec("d-sta-02", true).verdict(),
        Verdict::Refused(_)
    ));
}

#[test]
fn every_container_file_passes() {
    for report in files::run(&conformance().join("files/manifest.json")).unwrap() {
        assert_eq!(report.verdict(), Verdict::Passed, "{}", report.id);
    }
}

#[test]
fn large_cases_are_generated_and_compared_row_by_row() {
    let lanes = lanes(Fault::None);
    // Scores are constant, so each row is the mean of the values it sees.
    let text = r#"{"schema": 1, "id": "x", "kind": "large", "op": "large", "level": "must", "seed": 1,
        "setup": {"B": 2, "Hq": 2, "Hk": 1, "Sq": 3, "Sk": 4, "D": 2, "causal": true},
        "fill": {"q": 0.0, "k": 1.0, "v": [{"rows": [0, 2], "value": 1.0}, {"rows": [2, 4], "value": 3.0}]},
        "expected": [{"rows": [0, 1], "o": 1.0, "lse": 0.6931471805599453},
            {"rows": [1, 2], "o": [1.6666666666666667, 1.6666666666666667], "lse": 1.0986122886681098},
            {"rows": [2, 3], "o": 2.0, "lse": 1.3862943611198906}],
        "tolerance": {"o": {"atol": 1e-6, "rtol": 0}, "lse": {"atol": 1e-6, "rtol": 0}}}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.json");
    let verdict = |text: &str| {
        std::fs::write(&path, text).unwrap();
        without_tensors(&path, &lanes, false).unwrap().verdict()
    };
    assert_eq!(verdict(text), Verdict::Passed);
    for wrong in [
        text.replace("\"o\": 2.0", "\"o\": 2.1"),
        text.replace("[2, 3]", "[3, 4]"),
        text.replace("1.0986122886681098", "1.1"),
    ] {
        assert!(matches!(verdict(&wrong), Verdict::Failed(_)), "{wrong}");
    }
    let strange = verdict(&text.replace("\"value\": 3.0", "\"worth\": 3.0"));
    assert!(matches!(strange, Verdict::Refused(_)), "{strange:?}");
}

#[test]
fn generated_numbers_are_those_of_the_case_files() {
    let path = conformance().join("attn/d-tail-02.safetensors");
    let container = crate::container::Container::open(path).unwrap();
    let case: super::case::Case = serde_json::from_str(&container.metadata()["case"]).unwrap();
    for name in ["q", "k", "v"] {
        let tensor = container.tensor(name).unwrap();
        let numbers = super::numbers::grid::<f32>(case.seed, name, tensor.len());
        assert_eq!(*tensor.as_slice::<f32>().unwrap(), numbers, "{name}");
    }
}
