//! Numbers of a trace, in the type in which they were computed.

use serde::{Serialize, Serializer};
use tilewise::{DType, Element, core::Float};

/// A number of the accumulator type. In JSON it has that type's shortest digits; what is not finite
/// is the text `NaN`, `inf` or `-inf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    F32(f32),
    F64(f64),
}

impl Number {
    pub(super) fn of<F: Float>(x: F) -> Number {
        let wide = Element::to_f64(x);
        match F::DTYPE {
            DType::F64 => Number::F64(wide),
            // Exact: the accumulator of every other type is f32.
            _ => Number::F32(wide as f32),
        }
    }

    pub(super) fn to_f64(self) -> f64 {
        match self {
            Number::F32(x) => x.into(),
            Number::F64(x) => x,
        }
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Number::F32(x) if x.is_finite() => serializer.serialize_f32(x),
            Number::F64(x) if x.is_finite() => serializer.serialize_f64(x),
            Number::F32(x) => serializer.collect_str(&x),
            Number::F64(x) => serializer.collect_str(&x),
        }
    }
}

/// The first numbers of a row, as they are.
pub(super) fn first<F: Float>(values: &[F], count: usize) -> Vec<Number> {
    values.iter().take(count).map(|&x| Number::of(x)).collect()
}

/// A number in eight columns.
pub(super) fn short(x: f64) -> String {
    let text = match x.abs() {
        0.0 => "0".into(),
        a if !a.is_finite() => x.to_string(),
        a if !(0.00005..9999.5).contains(&a) => format!("{x:.1e}"),
        a if a >= 99.995 => format!("{x:.2}"),
        _ => format!("{x:.4}"),
    };
    format!("{text:>8}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_type_and_width() {
        let json = |x| serde_json::to_string(&x).unwrap();
        assert_eq!(json(Number::of(0.1f32)), "0.1");
        assert_eq!(json(Number::of(f64::NEG_INFINITY)), "\"-inf\"");
        assert_eq!(json(Number::of(f32::NAN)), "\"NaN\"");
        for x in [
            0.0,
            -1.0,
            99.99499,
            -99.995,
            9999.49,
            -9999.5,
            1e-5,
            -1e300,
            f64::INFINITY,
        ] {
            assert_eq!(short(x).chars().count(), 8, "{x}");
        }
    }
}
