//! What "In short" of docs/PERFORMANCE.md says, row by row, is what the line or the table that the row is
//! of says: a table made anew takes its summary along.

mod common;

use common::root;

fn performance() -> String {
    std::fs::read_to_string(root().join("docs/PERFORMANCE.md")).unwrap()
}

/// How a heading is linked to.
fn slug(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let kept: String = heading.to_lowercase().chars().filter(kept).collect();
    kept.replace(' ', "-")
}

/// The text under the heading that `anchor` names, up to the next one.
fn section<'a>(document: &'a str, anchor: &str) -> Option<&'a str> {
    let mut parts = document.split("\n#").skip(1);
    parts.find(|part| {
        let heading = part.lines().next().unwrap_or_default();
        slug(heading.trim_start_matches(['#', ' '])) == anchor
    })
}

/// Numbers with decimals, as they stand.
fn decimals(text: &str) -> Vec<f64> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.')
        .map(|word| word.trim_matches('.'))
        .filter(|word| word.contains('.'))
        .filter_map(|word| word.parse().ok())
        .collect()
}

fn cells(row: &str) -> Vec<&str> {
    let row = row.trim().trim_start_matches('|').trim_end_matches('|');
    row.split('|').map(str::trim).collect()
}

/// Least and most of the numbers of a column of the first table of `text`: of the `nth` with that heading.
fn extremes(text: &str, heading: &str, nth: usize) -> Option<[f64; 2]> {
    let mut table = text.lines().skip_while(|line| !line.starts_with('|'));
    let headings = cells(table.next()?);
    let at = headings.iter().enumerate().filter(|(_, h)| **h == heading);
    let (at, _) = at.clone().nth(nth)?;
    let rows = table.skip(1).take_while(|line| line.starts_with('|'));
    let column: Option<Vec<f64>> = rows.map(|row| cells(row).get(at)?.parse().ok()).collect();
    let column = column?;
    let fold = |pick: fn(f64, f64) -> f64| column.iter().copied().reduce(pick);
    Some([fold(f64::min)?, fold(f64::max)?])
}

/// A row of the summary; what a cell leaves open is what the one above it says.
#[derive(Clone, Debug, Default)]
struct Row<'a> {
    place: &'a str,
    threads: &'a str,
    what: &'a str,
    beside: &'a str,
    ratio: &'a str,
    link: &'a str,
}

impl<'a> Row<'a> {
    fn below(&self, row: &'a str) -> Row<'a> {
        let cells = cells(row);
        assert_eq!(cells.len(), 5, "{row}");
        let or = |cell: &'a str, above| if cell.is_empty() { above } else { cell };
        let threads = ["1 thread", "2 threads"]
            .into_iter()
            .find(|threads| cells[0].ends_with(threads));
        let link = cells[4].split_once("(#").map(|(_, link)| link);
        Row {
            // How many threads is said of the place above.
            place: match threads {
                Some(threads) if cells[0] == threads => self.place,
                _ => or(cells[0], self.place),
            },
            threads: threads.unwrap_or(self.threads),
            what: or(cells[1], self.what),
            beside: or(cells[2], self.beside),
            ratio: cells[3],
            link: link.map_or(self.link, |link| link.trim_end_matches(')')),
        }
    }

    /// Mean, least and most, or the last two, where the row links to.
    fn source(&self, document: &str) -> Option<Vec<f64>> {
        let text = section(document, self.link)?;
        let labelled = |label: &str, until: &str| {
            let (_, rest) = text.split_once(label)?;
            Some(decimals(rest.split(until).next()?))
        };
        if self.link == "many-cores-and-amx" {
            let [means, _] = text.split_once("\n\n|")?.into();
            let of = ["forward, f32", "forward, bf16"];
            let nth = of.iter().position(|what| *what == self.what)?;
            let mean = *decimals(means.rsplit_once("ahead of torch")?.1).get(nth)?;
            return Some([vec![mean], extremes(text, "× torch", nth)?.to_vec()].concat());
        }
        if self.link.starts_with("decoding") {
            return Some(extremes(text, "/ fastest", 0)?.to_vec());
        }
        if self.place.starts_with("CPU") {
            let rows = match self.what.contains("few rows") {
                true => "few rows",
                false => "prefill",
            };
            return labelled(&format!("{}, {rows}: ", self.threads), "shapes");
        }
        let ours = match self.what.contains("portable") {
            true => "Geometric mean of the ratio, portable: ",
            false => "Geometric mean of the ratio, tilewise fa2: ",
        };
        labelled(
            match self.beside {
                "cuDNN" => "To cudnn: ",
                "FlashAttention-3" => "To fa3: ",
                _ => ours,
            },
            "\n",
        )
    }
}

/// The rows that say something else than what they are of, and how many figures were held to it.
fn disagreements(document: &str) -> (Vec<String>, usize) {
    let summary = section(document, "in-short").unwrap();
    let (mut row, mut wrong, mut held) = (Row::default(), Vec::new(), 0);
    let rows = summary.lines().filter(|line| line.starts_with('|')).skip(2);
    for line in rows {
        row = row.below(line);
        let (said, source) = (decimals(row.ratio), row.source(document));
        held += said.len();
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 0.0051;
        let same = source.as_ref().is_some_and(|source| {
            said.len() >= 2 && said.len() == source.len() && said.iter().zip(source).all(near)
        });
        if !same {
            wrong.push(format!("{line}: {source:?} in #{}", row.link));
        }
    }
    (wrong, held)
}

#[test]
fn each_row_of_the_summary_is_what_its_table_says() {
    let (wrong, held) = disagreements(&performance());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(held > 50, "{held}");
}

/// The paragraph below the summary: FA2 over standard attention on both processors.
#[test]
fn what_the_algorithms_gain_is_what_their_tables_say() {
    let document = performance();
    let summary = section(&document, "in-short").unwrap();
    let gains = summary.lines().find(|line| line.starts_with("What the "));
    let said = decimals(gains.unwrap());
    let papers = section(
        &document,
        "16k-tokens-a-batch-the-papers-setting-bf16-tflops",
    )
    .unwrap();
    let (_, means) = papers.split_once("fa2/standard: ").unwrap();
    let tiling = section(&document, "what-tiling-gains-f32-milliseconds").unwrap();
    let [least, most] = extremes(tiling, "standard / fa2", 0).unwrap();
    let tenth = |x: f64| (x * 10.0).round() / 10.0;
    assert_eq!(said, [decimals(means)[0], tenth(least), tenth(most)]);
}

/// A figure of another row, of another table, or one that stands anywhere else in the section is seen.
#[test]
fn a_row_that_says_something_else_is_found() {
    let document = performance();
    let summary = section(&document, "in-short").unwrap();
    let rows: Vec<&str> = summary
        .lines()
        .filter(|line| line.starts_with('|'))
        .collect();
    for (n, row) in rows.iter().enumerate().skip(2) {
        let own = cells(row)[3];
        for other in rows.iter().skip(2) {
            let others = cells(other)[3];
            if others == own {
                continue;
            }
            let changed = document.replacen(row, &row.replace(own, others), 1);
            let (wrong, _) = disagreements(&changed);
            assert!(wrong.len() == 1, "row {n} with {others}: {wrong:?}");
        }
    }
    let unlinked = document.replacen("(#many-cores-and-amx)", "(#many-cores)", 1);
    assert!(!disagreements(&unlinked).0.is_empty());
}
