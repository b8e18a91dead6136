//! Order statistics of timings.

use std::time::Duration;

/// The timed calls of one measurement, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e3);
    }

    /// Times measured elsewhere, in milliseconds.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_ms(ms: Vec<f64>) -> Self {
        Samples(ms)
    }

    /// Milliseconds, in the order in which they were taken.
    pub(crate) fn ms(&self) -> &[f64] {
        &self.0
    }

    fn quantile(&self, p: f64) -> Option<f64> {
        quantile(&self.0, p)
    }

    pub(crate) fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    pub(crate) fn min(&self) -> Option<f64> {
        self.quantile(0.0)
    }

    pub(crate) fn max(&self) -> Option<f64> {
        self.quantile(1.0)
    }

    /// Distance between the quartiles as a share of the median.
    pub(crate) fn spread(&self) -> Option<f64> {
        let median = self.median()?;
        Some((self.quantile(0.75)? - self.quantile(0.25)?) / median)
    }
}

/// The `p`-quantile, linear between neighbours; `None` without samples.
fn quantile(samples: &[f64], p: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = p * sorted.len().checked_sub(1)? as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(low + (high - low) * at.fract())
}

pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    quantile(samples, 0.5)
}

/// How often a call is timed.
///
/// A count asked for is kept. Otherwise about a second is spent, on 3 to `most` calls; a call of
/// more than five seconds is timed once.
pub(crate) fn repeats(asked: Option<usize>, first: Duration, most: usize) -> usize {
    let first = first.as_secs_f64().max(1e-6);
    let fit = if first > 5.0 {
        1
    } else {
        ((1.0 / first) as usize).clamp(3, most)
    };
    asked.unwrap_or(fit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_samples() {
        let mut samples = Samples::default();
        assert_eq!(samples.median(), None);
        assert_eq!(samples.spread(), None);
        for ms in [4, 1, 3, 2] {
            samples.push(Duration::from_millis(ms));
        }
        let close = |x: Option<f64>, y: f64| (x.unwrap() - y).abs() < 1e-9;
        assert!(close(samples.median(), 2.5));
        assert!(close(samples.min(), 1.0));
        assert!(close(samples.max(), 4.0));
        assert!(close(samples.spread(), 1.5 / 2.5));
        assert_eq!(samples.ms(), [4.0, 1.0, 3.0, 2.0]);
    }

    #[test]
    fn slow_calls_are_repeated_less_and_a_count_asked_for_is_kept() {
        assert_eq!(repeats(Some(7), Duration::from_secs(100), 30), 7);
        assert_eq!(repeats(None, Duration::from_secs(100), 30), 1);
        assert_eq!(repeats(None, Duration::from_millis(1800), 30), 3);
        assert_eq!(repeats(None, Duration::from_millis(100), 30), 10);
        assert_eq!(repeats(None, Duration::from_micros(1), 30), 30);
    }
}
