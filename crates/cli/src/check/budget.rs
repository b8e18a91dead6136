//! Op `budget`: time against a baseline, and memory.
//!
//! Times only mean something on a quiet machine, so budgets are measured on request. They are
//! promises of the default algorithm: `standard` and `fa1` are the papers' baselines and exceed
//! them by design.

use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tilewise::{Algorithm, DType, Element, Problem};

use super::attention::Call;
use super::case::Case;
use super::lanes::{OpenLane, on_each};
use super::report::Run;
use super::setup::Setup;
use super::tensors::Tensors;
use super::verdict::Verdict;
use crate::container::Plain;
use crate::memory::peak_extra_bytes;

/// Alternating timed calls of each of the two problems in one measurement.
const RUNS: usize = 9;
/// Short calls are timed together until a sample is this long: clocks and wake-ups of threads
/// would drown them.
const SAMPLE: Duration = Duration::from_millis(2);
/// One bad measurement is no verdict.
const ATTEMPTS: usize = 3;

enum Measure {
    /// Median time of the setup over that of the baseline, at most.
    TimeRatio { baseline: Setup, limit: f64 },
    /// The same of times per floating-point operation.
    TimePerFlopRatio { baseline: Setup, limit: f64 },
    /// Heap beyond inputs and outputs, at most.
    PeakExtraBytes { limit: u64 },
}

/// Measures the case on every lane of the default algorithm, if asked to.
pub(super) fn run(case: &Case, lanes: &[OpenLane], asked: bool) -> Vec<Run> {
    if !asked {
        let reason = "budgets are measured only with --budgets";
        return on_each(lanes, |_| Verdict::Refused(reason.into()));
    }
    let parsed = case.refusal().map_or_else(|| parse(case), Err);
    on_each(lanes, |lane| {
        if lane.algorithm != Algorithm::Auto.resolve() {
            return Verdict::Refused(format!(
                "budgets are those of the default algorithm, {}",
                Algorithm::Auto.resolve()
            ));
        }
        let (setup, measure) = match &parsed {
            Ok(parsed) => parsed,
            Err(reason) => return Verdict::Refused(reason.clone()),
        };
        let attempt = || match setup.dtype()? {
            DType::F64 => measured::<f64>(case, lane, setup, measure),
            DType::F32 => measured::<f32>(case, lane, setup, measure),
            DType::F16 => measured::<half::f16>(case, lane, setup, measure),
            DType::BF16 => measured::<half::bf16>(case, lane, setup, measure),
            other => Err(format!("dtype {other} is not supported")),
        };
        let mut verdict = Verdict::Passed;
        for _ in 0..ATTEMPTS {
            verdict = attempt().unwrap_or_else(Verdict::Refused);
            if !matches!(verdict, Verdict::Failed(_)) {
                break;
            }
        }
        verdict
    })
}

fn parse(case: &Case) -> Result<(Setup, Measure), String> {
    let setup = |name: &str| {
        let value = case
            .rest
            .get(name)
            .ok_or_else(|| format!("{name} is missing"))?;
        Setup::parse(value).map_err(|e| format!("{name} is not understood: {e}"))
    };
    let number = |name: &str| {
        case.rest
            .get(name)
            .and_then(|limit| limit.as_f64())
            .ok_or_else(|| format!("{name} is missing"))
    };
    let measure = match case
        .rest
        .get("measure")
        .and_then(|measure| measure.as_str())
    {
        Some("time_ratio") => Measure::TimeRatio {
            baseline: setup("baseline")?,
            limit: number("limit")?,
        },
        Some("time_per_flop_ratio") => Measure::TimePerFlopRatio {
            baseline: setup("baseline")?,
            limit: number("limit")?,
        },
        Some("peak_extra_bytes") => Measure::PeakExtraBytes {
            limit: number("limit_bytes")? as u64,
        },
        other => return Err(format!("measure {other:?} is not supported")),
    };
    Ok((setup("setup")?, measure))
}

fn measured<T: Element + Plain>(
    case: &Case,
    lane: &OpenLane,
    setup: &Setup,
    measure: &Measure,
) -> Result<Verdict, String> {
    let threads = setup.threads.or_else(|| {
        let threads = case.rest.get("threads")?.as_u64()?;
        usize::try_from(threads).ok()
    });
    // A pool of its own: nothing that earlier calls left in its threads' memory is reused.
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.unwrap_or(0))
        .build()
        .map_err(|e| e.to_string())?;
    // Threads that are still starting would count as use of the call.
    pool.broadcast(|_| ());
    let tensors = setup.tensors::<T>(case.seed);
    let call = prepare(lane, &tensors)?;
    let (got, limit, what) = match measure {
        Measure::PeakExtraBytes { limit } => {
            let mut output = call.prefilled();
            let (result, peak) = peak_extra_bytes(|| pool.install(|| call.run_into(&mut output)));
            result.map_err(|e| e.to_string())?;
            (peak as f64, *limit as f64, "bytes of heap at the peak")
        }
        Measure::TimeRatio { baseline, limit } => {
            let baseline = baseline.tensors::<T>(case.seed);
            let baseline = prepare(lane, &baseline)?;
            let ratio = time_ratio(&pool, &call, &baseline)?;
            (ratio, *limit, "times the baseline's time")
        }
        Measure::TimePerFlopRatio { baseline, limit } => {
            let baseline = baseline.tensors::<T>(case.seed);
            let baseline = prepare(lane, &baseline)?;
            let work = call.problem.flops() / baseline.problem.flops();
            let ratio = time_ratio(&pool, &call, &baseline)? / work;
            (ratio, *limit, "times the baseline's time for an operation")
        }
    };
    Ok(if got < limit {
        Verdict::Passed
    } else {
        Verdict::Failed(format!("{got:.3} {what}, the limit is {limit}"))
    })
}

fn prepare<'a, T: Element + Plain>(
    lane: &'a OpenLane,
    tensors: &'a Tensors<T>,
) -> Result<Call<'a, T>, String> {
    let call = || {
        let inputs = tensors.inputs()?;
        let problem = Problem::new(&inputs, &tensors.options)?;
        Call::new(lane, problem, inputs)
    };
    call().map_err(|e: tilewise::Error| e.to_string())
}

/// Median time of `call` over that of `baseline`, taken in turn.
fn time_ratio<T: Element + Plain>(
    pool: &ThreadPool,
    call: &Call<'_, T>,
    baseline: &Call<'_, T>,
) -> Result<f64, String> {
    pool.install(|| {
        let mut both = [Timed::new(call)?, Timed::new(baseline)?];
        for _ in 0..RUNS {
            for timed in &mut both {
                timed.sample()?;
            }
        }
        let [call, baseline] = both.map(Timed::median);
        Ok(call / baseline)
    })
}

struct Timed<'a, T> {
    call: &'a Call<'a, T>,
    output: super::attention::Output<T>,
    calls: u32,
    seconds: Vec<f64>,
}

impl<'a, T: Element + Plain> Timed<'a, T> {
    /// Warms up and finds how many calls make a sample.
    fn new(call: &'a Call<'a, T>) -> Result<Self, String> {
        let mut timed = Timed {
            call,
            output: call.prefilled(),
            calls: 1,
            seconds: Vec::with_capacity(RUNS),
        };
        timed.elapsed()?;
        let once = timed.elapsed()?.max(Duration::from_nanos(100));
        timed.calls = (SAMPLE.as_nanos() / once.as_nanos()).clamp(1, 10_000) as u32;
        Ok(timed)
    }

    fn elapsed(&mut self) -> Result<Duration, String> {
        let start = Instant::now();
        for _ in 0..self.calls {
            self.call
                .run_into(&mut self.output)
                .map_err(|e| e.to_string())?;
        }
        Ok(start.elapsed())
    }

    fn sample(&mut self) -> Result<(), String> {
        let elapsed = self.elapsed()?;
        self.seconds
            .push(elapsed.as_secs_f64() / f64::from(self.calls));
        Ok(())
    }

    fn median(mut self) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        self.seconds[self.seconds.len() / 2]
    }
}
