//! What each case runs on: a backend, an instruction set, an algorithm.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};

use tilewise::{Algorithm, Backend};

use super::report::Run;
use super::verdict::Verdict;

/// A backend that is there, and how to run it.
#[derive(Clone, Debug)]
pub(super) struct OpenLane {
    pub(super) name: String,
    pub(super) isa: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) backend: Arc<dyn Backend>,
}

impl OpenLane {
    /// `cpu fa2 avx2`
    pub(super) fn label(&self) -> String {
        let mut label = format!("{} {}", self.name, self.algorithm);
        if let Some(isa) = &self.isa {
            label += &format!(" {isa}");
        }
        label
    }
}

/// Runs `work` for every lane; a panic in it is a failure of that lane.
pub(super) fn on_each(lanes: &[OpenLane], work: impl Fn(&OpenLane) -> Verdict) -> Vec<Run> {
    lanes
        .iter()
        .map(|lane| Run {
            backend: Some(lane.name.clone()),
            algorithm: Some(lane.algorithm.to_string()),
            isa: lane.isa.clone(),
            verdict: caught(|| work(lane)),
        })
        .collect()
}

thread_local! {
    /// Where the last panic of this thread was, while panics are caught.
    static PANIC_PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
    static CATCHING: RefCell<bool> = const { RefCell::new(false) };
}

/// The verdict of `work`, or a failure that says how it panicked.
pub(super) fn caught(work: impl FnOnce() -> Verdict) -> Verdict {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // Panics of other threads (of the pool) reach this thread when it joins them, but
            // are reported where they happen.
            if CATCHING.with_borrow(|catching| *catching) {
                let place = info.location().map(|place| format!(" at {place}"));
                PANIC_PLACE.with_borrow_mut(|last| *last = place);
            } else {
                usual(info);
            }
        }));
    });
    CATCHING.set(true);
    PANIC_PLACE.set(None);
    // Nothing that a panic could leave half done is used afterwards: outputs are dropped, inputs
    // are only read, and a backend must stand a panic in another caller's call.
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(false);
    result.unwrap_or_else(|panic| {
        let place = PANIC_PLACE.take().unwrap_or_default();
        Verdict::Failed(format!("panicked{place}: {}", message(&*panic)))
    })
}

fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "without a message".into())
        .replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_failure_that_says_where() {
        let verdict = caught(|| panic!("index {}", 7));
        let Verdict::Failed(reason) = verdict else {
            panic!("{verdict:?}");
        };
        assert!(
            reason.contains("lanes.rs") && reason.ends_with("index 7"),
            "{reason}"
        );
        assert_eq!(caught(|| Verdict::Passed), Verdict::Passed);
    }
}
