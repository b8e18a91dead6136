//! Options of the attention problem.

use clap::Args;
use tilewise::{Alignment, Options, alibi_slopes};

/// What attention is asked for.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Problem")]
pub(crate) struct ProblemArgs {
    /// Hide keys that come after the query
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) causal: Option<bool>,

    /// Where causality, windows and ALiBi are measured from when seqlen_q and seqlen_k differ:
    /// bottom-right (the last query sees the last key) or top-left
    #[arg(long, value_enum)]
    alignment: Option<AlignmentArg>,

    /// Keys visible to the left of the query's own position, inclusive [default: no bound]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    window_left: Option<usize>,

    /// Keys visible to the right of the query's own position, inclusive [default: no bound]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    window_right: Option<usize>,

    /// Cap scores smoothly: softcap * tanh(score / softcap)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    softcap: Option<f64>,

    /// Factor of q·k [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    softmax_scale: Option<f64>,

    /// Linear biases with the ALiBi paper's slopes (a tensor alibi_slopes in the file is used anyway)
    #[arg(long)]
    alibi: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum AlignmentArg {
    BottomRight,
    TopLeft,
}

impl ProblemArgs {
    /// `options` with what the command line says put over it.
    pub(crate) fn apply(&self, mut options: Options, num_heads: usize) -> Options {
        if let Some(causal) = self.causal {
            options = options.causal(causal);
        }
        match self.alignment {
            Some(AlignmentArg::BottomRight) => options = options.alignment(Alignment::BottomRight),
            Some(AlignmentArg::TopLeft) => options = options.alignment(Alignment::TopLeft),
            None => {}
        }
        if self.window_left.is_some() {
            options = options.window_left(self.window_left);
        }
        if self.window_right.is_some() {
            options = options.window_right(self.window_right);
        }
        if self.softcap.is_some() {
            options = options.softcap(self.softcap);
        }
        if self.softmax_scale.is_some() {
            options = options.softmax_scale(self.softmax_scale);
        }
        if self.alibi && options.get_alibi_slopes().is_none() {
            options = options.alibi_slopes(alibi_slopes(num_heads));
        }
        options
    }

    /// What the command line says, in its words.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        match self.causal {
            Some(true) => words.push("causal".to_owned()),
            Some(false) => words.push("full".to_owned()),
            None => {}
        }
        match self.alignment {
            Some(AlignmentArg::BottomRight) => words.push("bottom-right".to_owned()),
            Some(AlignmentArg::TopLeft) => words.push("top-left".to_owned()),
            None => {}
        }
        let mut value = |name: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("{name}={value}")));
        };
        value("window-left", self.window_left.map(|n| n.to_string()));
        value("window-right", self.window_right.map(|n| n.to_string()));
        value("softcap", self.softcap.map(|x| x.to_string()));
        value("softmax-scale", self.softmax_scale.map(|x| x.to_string()));
        if self.alibi {
            words.push("alibi".to_owned());
        }
        words
    }
}
