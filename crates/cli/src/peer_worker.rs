//! `tilewise peer-worker`: a worker of benchmark harnesses that time several systems in turn.
//!
//! One JSON object a line on stdin, one a line on stdout:
//!
//! | request | answer |
//! |---|---|
//! | `{"op":"hello"}` | name, version, contenders with their dtypes |
//! | `{"op":"setup","contender","shape":{b,hq,hkv,sq,sk,d,causal},"dtype","dir","backward"}` | `{"ok":true}` |
//! | `{"op":"run","n"}` | `{"ok":true,"seconds":[…]}` |
//! | `{"op":"output","path"}` | `{"ok":true}`, the output written as raw f32 |
//! | `{"op":"free"}` | `{"ok":true}` |
//!
//! `dir` holds `q.f32`, `k.f32` and `v.f32`, raw little-endian in (batch, heads, rows, head_dim)
//! order, and `do.f32`, the output's gradient, for `backward`: then `run` times the backward pass
//! alone, and the output is dQ. A shape may have a `window`: the keys that a row sees before its own,
//! as `window_left`. What cannot be done is answered by `{"ok":false,"error"}`.

use std::io::{self, BufRead, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use tilewise::half::{bf16, f16};
use tilewise::{
    Algorithm, Backend, BackendKind, BackwardInputs, DType, Element, Gradients, Inputs, Options,
    Problem, TensorView,
};

use crate::args::select;
use crate::cli::Verdict;
use crate::output::Outputs;

/// Serve a benchmark harness on stdin and stdout
#[derive(Args, Clone, Debug)]
pub(crate) struct PeerWorkerArgs {
    /// Backend: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,

    /// Threads
    #[arg(long, env = "BENCH_THREADS", value_parser = select::parse_threads)]
    threads: Option<NonZeroUsize>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
enum Request {
    Hello,
    Setup {
        contender: String,
        shape: WireShape,
        dtype: String,
        dir: String,
        #[serde(default)]
        backward: bool,
    },
    Run {
        n: usize,
    },
    Output {
        path: String,
    },
    Free,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct WireShape {
    b: usize,
    hq: usize,
    hkv: usize,
    sq: usize,
    sk: usize,
    d: usize,
    causal: bool,
    #[serde(default)]
    window: Option<usize>,
}

/// One prepared problem.
trait Case {
    /// Runs attention once. The first call allocates the outputs, later ones write them anew: the
    /// library's primitive takes the caller's memory.
    fn call(&mut self) -> Result<()>;
    /// The last output.
    fn output(&self) -> Result<Vec<f32>>;
}

pub(crate) fn run(args: &PeerWorkerArgs) -> Result<Verdict> {
    let backend = tilewise::open(args.backend)?;
    let pool = select::pool(args.threads)?;
    let mut case: Option<Box<dyn Case + Send>> = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = serde_json::from_str(&line)
            .map_err(anyhow::Error::from)
            .and_then(|request| answer(&backend, &pool, &mut case, request))
            .unwrap_or_else(|error| json!({"ok": false, "error": format!("{error:#}")}));
        let mut out = io::stdout().lock();
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(Verdict::Agree)
}

fn answer(
    backend: &Arc<dyn Backend>,
    pool: &rayon::ThreadPool,
    case: &mut Option<Box<dyn Case + Send>>,
    request: Request,
) -> Result<Value> {
    match request {
        Request::Hello => Ok(hello()),
        Request::Setup {
            contender,
            shape,
            dtype,
            dir,
            backward,
        } => {
            // The old case's memory goes before the new one's comes.
            *case = None;
            *case = Some(prepare(
                backend.clone(),
                &contender,
                shape,
                &dtype,
                Path::new(&dir),
                backward,
            )?);
            Ok(json!({"ok": true}))
        }
        Request::Run { n } => {
            let case = case.as_mut().context("no case is set up")?;
            let mut seconds = Vec::with_capacity(n.min(1 << 16));
            for _ in 0..n {
                // Measured inside the pool: a caller's threads are there already.
                let time = pool.install(|| {
                    let start = Instant::now();
                    case.call().map(|()| start.elapsed())
                })?;
                seconds.push(time.as_secs_f64());
            }
            Ok(json!({"ok": true, "seconds": seconds}))
        }
        Request::Output { path } => {
            let output = case.as_ref().context("no case is set up")?.output()?;
            let bytes: Vec<u8> = output.iter().flat_map(|x| x.to_le_bytes()).collect();
            std::fs::write(&path, bytes).with_context(|| path.clone())?;
            Ok(json!({"ok": true}))
        }
        Request::Free => {
            *case = None;
            Ok(json!({"ok": true}))
        }
    }
}

fn hello() -> Value {
    let contenders: Vec<Value> = Algorithm::ALL
        .iter()
        .map(|algorithm| {
            json!({
                "id": format!("tilewise-{algorithm}"),
                "dtypes": ["f32", "bf16", "f16"],
                // The others run core's schedules, which are made to be read: no contenders.
                "backward": *algorithm == Algorithm::Fa2,
            })
        })
        .collect();
    json!({"name": "tilewise", "version": env!("CARGO_PKG_VERSION"), "contenders": contenders})
}

fn prepare(
    backend: Arc<dyn Backend>,
    contender: &str,
    shape: WireShape,
    dtype: &str,
    dir: &Path,
    backward: bool,
) -> Result<Box<dyn Case + Send>> {
    let algorithm: Algorithm = contender
        .strip_prefix("tilewise-")
        .with_context(|| format!("unknown contender {contender:?}"))?
        .parse()?;
    match dtype.parse()? {
        DType::F32 => Prepared::<f32>::boxed(backend, algorithm, shape, dir, backward),
        DType::F16 => Prepared::<f16>::boxed(backend, algorithm, shape, dir, backward),
        DType::BF16 => Prepared::<bf16>::boxed(backend, algorithm, shape, dir, backward),
        other => bail!("no inputs of dtype {other}"),
    }
}

struct Prepared<T> {
    backend: Arc<dyn Backend>,
    algorithm: Algorithm,
    shape: WireShape,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    last: Option<Outputs<T>>,
}

impl<T: Element> Prepared<T> {
    fn boxed(
        backend: Arc<dyn Backend>,
        algorithm: Algorithm,
        shape: WireShape,
        dir: &Path,
        backward: bool,
    ) -> Result<Box<dyn Case + Send>> {
        let mut prepared: Prepared<T> = Prepared {
            backend,
            algorithm,
            shape,
            q: read(dir, "q")?,
            k: read(dir, "k")?,
            v: read(dir, "v")?,
            last: None,
        };
        let (problem, _) = prepared.problem()?;
        prepared.backend.supports(&problem, algorithm)?;
        if !backward {
            return Ok(Box::new(prepared));
        }
        prepared.backend.supports_backward(&problem, algorithm)?;
        prepared.call()?;
        Ok(Box::new(PreparedBackward {
            dout: read(dir, "do")?,
            forward: prepared,
            last: None,
        }))
    }

    fn problem(&self) -> tilewise::Result<(Problem, Inputs<'_, T>)> {
        let s = self.shape;
        let kv_shape = [s.b, s.hkv, s.sk, s.d];
        let inputs = Inputs::new(
            TensorView::bhsd(&self.q, [s.b, s.hq, s.sq, s.d]).map_err(|e| e.named("q"))?,
            TensorView::bhsd(&self.k, kv_shape).map_err(|e| e.named("k"))?,
            TensorView::bhsd(&self.v, kv_shape).map_err(|e| e.named("v"))?,
        );
        let options = Options::new().causal(s.causal).window_left(s.window);
        let problem = Problem::new(&inputs, &options)?;
        Ok((problem, inputs))
    }
}

impl<T: Element> Case for Prepared<T> {
    fn call(&mut self) -> Result<()> {
        let last = self.last.take();
        let (problem, inputs) = self.problem()?;
        let mut outputs = match last {
            Some(outputs) => outputs,
            None => Outputs::new(&problem)?,
        };
        let (out, lse) = outputs.views_mut()?;
        self.backend.forward(
            &problem,
            &T::erase_inputs(inputs),
            self.algorithm,
            T::erase_mut(out),
            Some(lse),
        )?;
        self.last = Some(outputs);
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        let outputs = self.last.as_ref().context("nothing has run")?;
        Ok(outputs.out.iter().map(|x| x.to_f64() as f32).collect())
    }
}

/// A backward pass: the forward one has run.
struct PreparedBackward<T> {
    forward: Prepared<T>,
    dout: Vec<T>,
    last: Option<Gradients<T>>,
}

impl<T: Element> Case for PreparedBackward<T> {
    fn call(&mut self) -> Result<()> {
        let last = self.last.take();
        let (problem, inputs) = self.forward.problem()?;
        let outputs = self.forward.last.as_ref().context("forward has not run")?;
        let dout = TensorView::bhsd(&self.dout, problem.dims().out_shape());
        let given = BackwardInputs::new(
            inputs,
            outputs.out_view()?,
            outputs.lse_view()?,
            dout.map_err(|e| e.named("do"))?,
        );
        let mut gradients = match last {
            Some(gradients) => gradients,
            None => Gradients::filled(&problem, &given.inputs, 0.0)?,
        };
        self.forward.backend.backward(
            &problem,
            &T::erase_backward(given),
            self.forward.algorithm,
            T::erase_gradients(gradients.views_mut()?),
        )?;
        self.last = Some(gradients);
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        let gradients = self.last.as_ref().context("nothing has run")?;
        Ok(gradients.dq.iter().map(|x| x.to_f64() as f32).collect())
    }
}

fn read<T: Element>(dir: &Path, name: &str) -> Result<Vec<T>> {
    let path = dir.join(format!("{name}.f32"));
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    Ok(bytes
        .chunks_exact(4)
        .map(|chunk| f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]))
        .map(|x| T::from_f64(x.into()))
        .collect())
}
