//! Why some of what was asked for did not run, for people.

/// One backend × algorithm and what became of it.
#[derive(Clone, Copy)]
pub(crate) struct Outcome<'a> {
    pub(crate) backend: &'a str,
    pub(crate) algorithm: &'a str,
    /// The backend is here: what it lacks is its algorithm's.
    pub(crate) here: bool,
    /// `skipped` or `failed`.
    pub(crate) how: &'a str,
    /// `None` where it ran.
    pub(crate) reason: Option<&'a str>,
}

/// A line for each reason, said once: a backend that is not here keeps all its algorithms from running.
pub(crate) fn lines<'a>(outcomes: impl Iterator<Item = Outcome<'a>>) -> Vec<String> {
    let outcomes: Vec<Outcome<'_>> = outcomes.collect();
    let mut lines = Vec::new();
    for one in &outcomes {
        let Some(reason) = one.reason else { continue };
        let mut own = outcomes.iter().filter(|other| other.backend == one.backend);
        let whole = !one.here && own.all(|other| other.reason == one.reason);
        let line = match whole {
            true => format!("{} {}: {reason}", one.backend, one.how),
            false => format!("{} {} {}: {reason}", one.backend, one.algorithm, one.how),
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_backend_is_named_once_and_an_algorithm_by_its_name() {
        let of = |backend, algorithm, here, reason| Outcome {
            backend,
            algorithm,
            here,
            how: "skipped",
            reason,
        };
        let outcomes = [
            of("cuda:0", "fa1", false, Some("no driver")),
            of("cuda:0", "fa2", false, Some("no driver")),
            of("cpu", "standard", true, Some("too large")),
            of("cpu", "fa2", true, None),
        ];
        assert_eq!(
            lines(outcomes.into_iter()),
            [
                "cuda:0 skipped: no driver",
                "cpu standard skipped: too large"
            ]
        );
        // Alone, an algorithm of a backend that is here is still no backend.
        assert_eq!(
            lines(outcomes[2..3].iter().copied()),
            ["cpu standard skipped: too large"]
        );
    }
}
