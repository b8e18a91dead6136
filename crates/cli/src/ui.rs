//! What is printed, and where: results on stdout, progress and errors on stderr.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use comfy_table::{
    Cell, CellAlignment, Color, ContentArrangement, ContentLineStyle, LineStyle, Table, TableStyle,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Writes `text` to stdout.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes `value` to stdout as indented JSON.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(print(&text)?)
}

/// A note for people, on stderr. Losing it is no error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "note: {text}");
}

/// Whether stdout takes colours: a terminal that knows them, and <https://no-color.org> not asked for.
fn colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    io::stdout().is_terminal() && !refused && !dumb
}

/// Columns that text fits into, as terminals have.
const COLUMNS: usize = 80;

/// `line`, broken at spaces where it is too long for a terminal, what follows `indent` columns in; ended.
pub(crate) fn wrap(line: &str, indent: usize) -> String {
    let lead = line.len() - line.trim_start().len();
    let mut text = " ".repeat(lead);
    let mut used = lead;
    for (at, word) in line.trim_start().split(' ').enumerate() {
        let width = word.chars().count();
        if at > 0 && used + 1 + width > COLUMNS {
            text.push('\n');
            text.push_str(&" ".repeat(indent));
            used = indent;
        } else if at > 0 {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += width;
    }
    text.push('\n');
    text
}

/// `name`, whose words are joined by hyphens, broken behind one of them wherever `width` columns are used up.
#[cfg(feature = "cuda")] // whose kernels have such names
pub(crate) fn break_name(name: &str, width: usize) -> String {
    let mut text = String::new();
    let mut used = 0;
    for word in name.split_inclusive('-') {
        let long = word.chars().count();
        if used > 0 && used + long > width {
            text.push('\n');
            used = 0;
        }
        text.push_str(word);
        used += long;
    }
    text
}

/// Progress over `steps`, on stderr; hidden unless stderr is a terminal.
pub(crate) fn progress(steps: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// How a cell is meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Bad,
}

/// A table of text columns, the first `left` of them aligned left and the others right.
pub(crate) struct Grid {
    table: Table,
    left: usize,
    /// Lines across all columns, where [`HEADING`] stands.
    headings: Vec<String>,
}

/// Holds the place of a heading while columns find their widths: a character that no text has.
const HEADING: char = '\u{e000}';

impl Grid {
    pub(crate) fn new(header: &[&str], left: usize) -> Grid {
        let mut table = Table::new();
        table.load_style(
            TableStyle::new()
                .header_lines(ContentLineStyle::none())
                .header_separator(LineStyle::none().fill('-').junction('-'))
                .content_lines(ContentLineStyle::none()),
        );
        // Sentences that are too long for a terminal are broken within their column.
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(COLUMNS as u16);
        table.force_no_tty();
        if colours() {
            table.enforce_styling();
        }
        let mut grid = Grid {
            table,
            left,
            headings: Vec::new(),
        };
        let cells: Vec<Cell> = header
            .iter()
            .enumerate()
            .map(|(column, text)| grid.cell(column, text, Tone::Plain))
            .collect();
        grid.table.set_header(cells);
        grid
    }

    fn cell(&self, column: usize, text: &str, tone: Tone) -> Cell {
        let cell = Cell::new(text).set_alignment(if column < self.left {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        });
        match tone {
            Tone::Plain => cell,
            Tone::Good => cell.fg(Color::Green),
            Tone::Bad => cell.fg(Color::Red),
        }
    }

    pub(crate) fn row(&mut self, cells: &[(String, Tone)]) {
        let cells: Vec<Cell> = cells
            .iter()
            .enumerate()
            .map(|(column, (text, tone))| self.cell(column, text, *tone))
            .collect();
        self.table.add_row(cells);
    }

    /// A line across all columns, which says what the rows after it have in common.
    pub(crate) fn heading(&mut self, text: String) {
        self.headings.push(text);
        self.table.add_row([HEADING]);
    }

    /// The table, one space between columns, every line ended.
    pub(crate) fn render(mut self) -> String {
        for column in self.table.column_iter_mut() {
            column.set_padding((0, 0));
        }
        let mut headings = self.headings.into_iter();
        let mut text = String::new();
        for line in self.table.trim_fmt().lines() {
            match line.starts_with(HEADING) {
                true => text.push_str(&wrap(&headings.next().unwrap_or_default(), 2)),
                false => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }
}

/// A plain cell.
pub(crate) fn plain(text: impl Into<String>) -> (String, Tone) {
    (text.into(), Tone::Plain)
}

/// An error or bound in seven columns; `-` where there is none.
pub(crate) fn scientific(x: Option<f64>) -> String {
    match x {
        None => "-".into(),
        Some(0.0) => "0".into(),
        Some(x) if !x.is_finite() => format!("{x}"),
        Some(x) => format!("{x:.1e}"),
    }
}

/// Three significant digits, without an exponent.
pub(crate) fn significant(x: Option<f64>) -> String {
    match x {
        None => "-".into(),
        Some(x) if !x.is_finite() => format!("{x}"),
        Some(x) if x.abs() >= 99.95 => format!("{x:.0}"),
        Some(x) if x.abs() >= 9.995 => format!("{x:.1}"),
        Some(x) if x.abs() >= 0.9995 => format!("{x:.2}"),
        Some(x) => format!("{x:.3}"),
    }
}

/// A time in the unit in which it has three digits; `-` where there is none.
pub(crate) fn time(ms: Option<f64>) -> String {
    let Some(ms) = ms else { return "-".into() };
    let (in_unit, unit) = match ms {
        ms if ms < 0.9995e-3 => (ms * 1e6, "ns"),
        ms if ms < 0.9995 => (ms * 1e3, "µs"),
        ms if ms < 999.5 => (ms, "ms"),
        ms => (ms / 1e3, "s"),
    };
    format!("{} {unit}", significant(Some(in_unit)))
}

/// A size in binary units.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut size = n as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1023.5 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let digits = significant(Some(size));
    format!("{} {}", digits.trim_end_matches(".00"), UNITS[unit])
}

/// Why something that needs `needed` bytes is skipped.
pub(crate) fn over_limit(needed: u64, limit: u64) -> String {
    format!(
        "needs {} of memory, above --memory-limit {}",
        bytes(needed),
        bytes(limit)
    )
}

/// A size such as `4GiB`, `512M`, `1e9` or a plain number of bytes. Units are binary.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| c.is_ascii_alphabetic() && c != 'e' && c != 'E')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("{text}: expected a size such as 512MiB or 4GiB")),
    };
    match number.trim().parse::<f64>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok((x * (1u64 << shift) as f64) as u64),
        _ => Err(format!("{text}: expected a size such as 512MiB or 4GiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        assert_eq!(parse_bytes("4GiB"), Ok(4 << 30));
        assert_eq!(parse_bytes("512m"), Ok(512 << 20));
        assert_eq!(parse_bytes("1.5 KiB"), Ok(1536));
        assert_eq!(parse_bytes("1000"), Ok(1000));
        assert_eq!(parse_bytes("1e9"), Ok(1_000_000_000));
        for wrong in ["", "GiB", "-1", "4 apples", "inf"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1 << 30), "1 GiB");
        assert_eq!(bytes(1023 << 10), "1023 KiB");
        assert_eq!(bytes(14_900_000), "14.2 MiB");
    }

    #[test]
    fn long_lines_are_broken_at_spaces() {
        assert_eq!(wrap("  short", 4), "  short\n");
        let long = format!("  {}", ["words", "and", "µ"].repeat(12).join(" "));
        let text = wrap(&long, 4);
        assert!(text.lines().count() > 1);
        assert!(text.lines().all(|line| line.chars().count() <= 80));
        assert!(
            text.lines()
                .skip(1)
                .all(|line| line.starts_with("    ") && !line.starts_with("     "))
        );
        let words = |text: &str| {
            text.split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&text), words(&long));
        // A word that fits nowhere stands alone.
        assert_eq!(wrap(&format!("a {}", "b".repeat(90)), 2).lines().count(), 2);
    }

    #[test]
    fn tables_fit_a_terminal() {
        let sentence = "the loop over keys stores nothing of S and P ".repeat(3);
        let mut grid = Grid::new(&["", "must hold", "found"], 3);
        grid.row(&[plain("  holds"), plain(&sentence), plain(&sentence)]);
        grid.row(&[plain("  FAILS"), plain("short"), plain("1 of 2")]);
        let text = grid.render();
        assert!(text.lines().count() > 6, "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= COLUMNS),
            "{text}"
        );
        assert_eq!(text.matches("stores").count(), 6, "{text}");
        // A heading takes no column's room.
        let mut grid = Grid::new(&["a", "b"], 1);
        grid.heading("x".repeat(60));
        grid.row(&[plain("first"), plain("1")]);
        grid.heading("second".into());
        grid.row(&[plain("third"), plain("2")]);
        let lines: Vec<String> = grid.render().lines().map(String::from).collect();
        assert_eq!(lines[1], "-------");
        assert_eq!(lines[2].len(), 60);
        assert_eq!(lines[3..], ["first 1", "second", "third 2"]);
        // What fits stays in one line.
        let mut grid = Grid::new(&["a", "b"], 1);
        grid.row(&[plain("x".repeat(50)), plain("1.00 MiB")]);
        assert_eq!(grid.render().lines().count(), 3);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn names_are_broken_behind_hyphens() {
        assert_eq!(break_name("fa2-bf16-d64", 80), "fa2-bf16-d64");
        assert_eq!(break_name("fa2-bf16-d64-full", 9), "fa2-bf16-\nd64-full");
        assert_eq!(break_name("abcdefgh-i", 3), "abcdefgh-\ni");
    }

    #[test]
    fn times_have_three_digits() {
        for (ms, text) in [
            (0.0, "0.000 ns"),
            (5.9e-5, "59.0 ns"),
            (8.6e-4, "860 ns"),
            (0.9996e-3, "1.00 µs"),
            (0.0227, "22.7 µs"),
            (0.9996, "1.00 ms"),
            (110.0, "110 ms"),
            (999.7, "1.00 s"),
            (4.5e6, "4500 s"),
        ] {
            assert_eq!(time(Some(ms)), text);
        }
        assert_eq!(time(None), "-");
    }

    #[test]
    fn numbers_keep_their_width() {
        assert_eq!(scientific(Some(1.26e-7)), "1.3e-7");
        assert_eq!(scientific(None), "-");
        assert_eq!(significant(Some(0.12345)), "0.123");
        assert_eq!(significant(Some(9.996)), "10.0");
        assert_eq!(significant(Some(1234.5)), "1234");
    }
}
