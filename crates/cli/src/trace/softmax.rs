//! Softmax of one row of scores: safe, online element by element, online block by block.

use std::fmt::Write;

use serde::Serialize;
use tilewise::core::softmax::{self, Softmax, Step};

use super::numbers::{Number, short};

/// The three ways, step by step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SoftmaxTrace {
    schema: u32,
    kind: &'static str,
    scores: Vec<Number>,
    safe: Safe,
    online: Online,
    blocks: Online,
}

/// Safe softmax, pass by pass.
#[derive(Clone, Debug, Serialize)]
struct Safe {
    m: Number,
    /// e^(score − m): what ℓ is the sum of.
    terms: Vec<Number>,
    l: Number,
    weights: Vec<Number>,
}

/// Online softmax.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Online {
    /// Scores a step.
    block: usize,
    steps: Vec<OnlineStep>,
    m: Number,
    pub(super) l: Number,
    /// ℓ − the safe ℓ.
    l_minus_safe: Number,
    weights: Vec<Number>,
}

#[derive(Clone, Debug, Serialize)]
struct OnlineStep {
    /// Positions of the scores folded in, the second not included.
    scores: [usize; 2],
    m: Number,
    correction: Number,
    /// Σ e^(score − m) over the scores folded in.
    sum: Number,
    /// correction · (ℓ before) + sum.
    l: Number,
}

pub(super) fn trace(scores: &[f64], block: usize) -> SoftmaxTrace {
    let safe = softmax::safe(scores);
    SoftmaxTrace {
        schema: 1,
        kind: "softmax",
        scores: numbers(scores),
        online: online(scores, 1, &safe),
        blocks: online(scores, block, &safe),
        safe: Safe {
            m: Number::F64(safe.m),
            terms: scores
                .iter()
                .map(|&s| {
                    let hidden = s == f64::NEG_INFINITY;
                    Number::F64(if hidden { 0.0 } else { (s - safe.m).exp() })
                })
                .collect(),
            l: Number::F64(safe.l),
            weights: numbers(&safe.weights),
        },
    }
}

fn numbers(values: &[f64]) -> Vec<Number> {
    values.iter().copied().map(Number::F64).collect()
}

fn online(scores: &[f64], block: usize, safe: &Softmax<f64>) -> Online {
    let mut steps = Vec::new();
    let online = softmax::online_blocks(scores, block, |step: &Step<f64>| {
        steps.push(OnlineStep {
            scores: [step.scores.start, step.scores.end],
            m: Number::F64(step.m),
            correction: Number::F64(step.correction),
            sum: Number::F64(step.sum),
            l: Number::F64(step.l),
        });
    });
    Online {
        block,
        steps,
        m: Number::F64(online.m),
        l: Number::F64(online.l),
        l_minus_safe: Number::F64(online.l - safe.l),
        weights: numbers(&online.weights),
    }
}

impl SoftmaxTrace {
    #[cfg(test)]
    pub(super) fn denominators(&self) -> [f64; 3] {
        [self.safe.l, self.online.l, self.blocks.l].map(Number::to_f64)
    }

    /// For a terminal of 80 columns.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        row(out, "scores s", &self.scores)?;
        writeln!(out, "\nsafe softmax: three passes over the scores")?;
        row(out, "1  m = max s", &[self.safe.m])?;
        row(out, "2  e^(s - m)", &self.safe.terms)?;
        row(out, "   l = their sum", &[self.safe.l])?;
        row(out, "3  p = e^(s - m) / l", &self.safe.weights)?;

        writeln!(
            out,
            "\nonline softmax: m and l in one pass, element by element"
        )?;
        self.online.write(out, &self.scores)?;
        writeln!(
            out,
            "\nonline softmax by blocks of {}: what a tile of keys does",
            self.blocks.block
        )?;
        self.blocks.write(out, &self.scores)?;
        writeln!(
            out,
            "\ncorrection = e^(m before - m): what l (and in attention O~) gathered so far is\n\
             multiplied by, so that it is relative to the new m. 1 where m stays."
        )
    }
}

impl Online {
    fn write(&self, out: &mut String, scores: &[Number]) -> std::fmt::Result {
        writeln!(
            out,
            "  {:<9}{:<16}{:>8}  {:>10} x {:>8} + {:>8} = {:>8}",
            "elements", "scores", "m", "correction", "l before", "sum", "l"
        )?;
        let mut before = 0.0;
        for step in &self.steps {
            let [start, end] = step.scores;
            let elements = if end - start == 1 {
                start.to_string()
            } else {
                format!("{start}..{end}")
            };
            let seen = &scores[start..end];
            let listed_of = if seen.len() > 2 { 1 } else { 2 };
            let mut listed: Vec<String> = seen
                .iter()
                .take(listed_of)
                .map(|s| short(s.to_f64()).trim().to_string())
                .collect();
            if seen.len() > listed.len() {
                listed.push("..".into());
            }
            writeln!(
                out,
                "  {elements:<9}{:<16}{}  {:>10} x {} + {} = {}",
                listed.join(" "),
                short(step.m.to_f64()),
                short(step.correction.to_f64()),
                short(before),
                short(step.sum.to_f64()),
                short(step.l.to_f64()),
            )?;
            before = step.l.to_f64();
        }
        writeln!(
            out,
            "  l - safe l = {}",
            crate::ui::scientific(Some(self.l_minus_safe.to_f64()))
        )?;
        row(out, "p = e^(s - m) / l", &self.weights)
    }
}

/// A named row of numbers, six a line.
fn row(out: &mut String, name: &str, values: &[Number]) -> std::fmt::Result {
    for (line, part) in values.chunks(6).enumerate() {
        let name = if line == 0 { name } else { "" };
        let numbers: String = part
            .iter()
            .map(|x| format!(" {}", short(x.to_f64())))
            .collect();
        writeln!(out, "  {name:<22}{numbers}")?;
    }
    Ok(())
}
