//! Whether a result is the expected one.

use tilewise::{Error, ErrorClass};

use super::case::Tolerance;

/// How one run of a case ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    Passed,
    Refused(String),
    Failed(String),
}

impl Verdict {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Verdict::Passed => "passed",
            Verdict::Refused(_) => "refused",
            Verdict::Failed(_) => "failed",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Verdict::Passed => None,
            Verdict::Refused(reason) | Verdict::Failed(reason) => Some(reason),
        }
    }

    /// What an error means where a result was expected: a refusal is clear about something not
    /// being supported, or about memory; anything else is wrong.
    pub(super) fn of_error(error: &Error) -> Verdict {
        match error {
            Error::OutOfMemory { .. } => Verdict::Refused(error.to_string()),
            _ if error.class() == ErrorClass::Unsupported => Verdict::Refused(error.to_string()),
            _ => Verdict::Failed(error.to_string()),
        }
    }

    /// Failed before refused before passed.
    fn rank(&self) -> u8 {
        match self {
            Verdict::Passed => 0,
            Verdict::Refused(_) => 1,
            Verdict::Failed(_) => 2,
        }
    }

    /// The gravest of several; of equals, the first.
    pub(super) fn worst<'a>(verdicts: impl IntoIterator<Item = &'a Verdict>) -> Verdict {
        let mut worst = Verdict::Passed;
        for verdict in verdicts {
            if verdict.rank() > worst.rank() {
                worst = verdict.clone();
            }
        }
        worst
    }
}

/// An expected tensor.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub(super) name: &'static str,
    pub(super) shape: Vec<usize>,
    /// Row-major.
    pub(super) values: Vec<f64>,
    pub(super) tolerance: Tolerance,
    /// Whether +∞ may stand for NaN, as in lse.
    pub(super) infinite_for_nan: bool,
}

impl Expected {
    /// What is wrong with `got`, if anything. Infinities must be equal, NaN must meet NaN, and NaN
    /// against a number is wrong.
    pub(super) fn compare(
        &self,
        shape: &[usize],
        got: impl ExactSizeIterator<Item = f64>,
    ) -> Result<(), String> {
        if shape != self.shape || got.len() != self.values.len() {
            return Err(format!(
                "{} has shape {shape:?}, expected {:?}",
                self.name, self.shape
            ));
        }
        let mut wrong = 0;
        let mut first = None;
        for (at, (x, &reference)) in got.zip(&self.values).enumerate() {
            if !self.agrees(x, reference) {
                wrong += 1;
                first.get_or_insert((at, x, reference));
            }
        }
        match first {
            None => Ok(()),
            Some((at, x, reference)) => Err(format!(
                "{}{:?} is {x:e}, expected {reference:e} within {:.1e} ({wrong} of {} differ)",
                self.name,
                self.index(at),
                self.allowance(reference),
                self.values.len()
            )),
        }
    }

    fn allowance(&self, reference: f64) -> f64 {
        self.tolerance.atol + self.tolerance.rtol * reference.abs()
    }

    fn agrees(&self, x: f64, reference: f64) -> bool {
        if reference.is_nan() {
            return x.is_nan() || (self.infinite_for_nan && x == f64::INFINITY);
        }
        if reference.is_infinite() {
            return x == reference;
        }
        // False for a NaN.
        (x - reference).abs() <= self.allowance(reference)
    }

    fn index(&self, mut at: usize) -> Vec<usize> {
        let mut index = vec![0; self.shape.len()];
        for (i, &size) in index.iter_mut().zip(&self.shape).rev() {
            *i = at % size;
            at /= size;
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(values: &[f64], infinite_for_nan: bool) -> Expected {
        Expected {
            name: "o",
            shape: vec![values.len()],
            values: values.to_vec(),
            tolerance: Tolerance {
                atol: 0.1,
                rtol: 0.1,
            },
            infinite_for_nan,
        }
    }

    fn agrees(reference: f64, x: f64, infinite_for_nan: bool) -> bool {
        expected(&[reference], infinite_for_nan)
            .compare(&[1], [x].into_iter())
            .is_ok()
    }

    #[test]
    fn nan_never_passes_for_a_number_nor_a_number_for_nan() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(!agrees(0.0, nan, true));
        assert!(!agrees(inf, nan, true));
        assert!(!agrees(nan, 0.0, true));
        assert!(!agrees(nan, -inf, true));
        assert!(agrees(nan, nan, false));
        assert!(agrees(nan, inf, true));
        assert!(!agrees(nan, inf, false));
        assert!(agrees(-inf, -inf, false));
        assert!(!agrees(-inf, inf, false));
        assert!(!agrees(-inf, -1e30, false));
        assert!(!agrees(1.0, inf, false));
    }

    #[test]
    fn the_bound_is_absolute_plus_relative() {
        assert!(agrees(10.0, 11.05, false));
        assert!(!agrees(10.0, 11.2, false));
        assert!(agrees(0.0, -0.1, false));
        let message = expected(&[1.0, 2.0], false)
            .compare(&[2], [1.0, 3.0].into_iter())
            .unwrap_err();
        assert!(
            message.starts_with("o[1] is 3e0, expected 2e0"),
            "{message}"
        );
        assert!(
            expected(&[1.0], false)
                .compare(&[1, 1], [1.0].into_iter())
                .is_err()
        );
    }
}
