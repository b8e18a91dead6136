//! docs/ALGORITHMS.md and README.md: their commands run, and what the guide quotes is what is printed.

mod common;

use common::*;

fn document(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap()
}

/// The arguments of a command line of `tilewise`, as a shell would part them; a comment ends it.
fn arguments(line: &str) -> Option<Vec<String>> {
    let line = line.strip_prefix("tilewise ")?;
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            '#' if !quoted => break,
            ' ' if !quoted => words.push(String::new()),
            _ => words.last_mut()?.push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    Some(words)
}

/// Whether a command stands for many, takes minutes or needs what is not everywhere.
fn is_left_out(words: &[String]) -> bool {
    let any = |these: &[&str]| words.iter().any(|word| these.contains(&word.as_str()));
    any(&[
        "report",
        "inspect",
        "kernels",
        "bench",
        "--measure",
        "FILE",
        "M",
        "…",
        "cuda",
    ]) || words.len() == 1 && words[0] == "io"
        || words
            .iter()
            .any(|word| word.ends_with(".npy") || word.ends_with(".npz"))
}

/// Every whole command in backticks of the guide.
#[test]
fn the_guides_commands_run() {
    let guide = document("docs/ALGORITHMS.md");
    let folder = Folder::new();
    let mut ran = Vec::new();
    for piece in guide.split('`').skip(1).step_by(2) {
        let Some(mut words) = arguments(piece) else {
            continue;
        };
        if is_left_out(&words) || ran.contains(&piece) {
            continue;
        }
        for word in &mut words {
            if word.ends_with(".html") {
                *word = folder.file(word);
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert!(!stdout(&words, 0).is_empty(), "{piece}");
        ran.push(piece);
    }
    assert!(ran.len() >= 15, "{ran:?}");
}

/// Figures and words that the guide says a command prints.
#[test]
fn the_guide_quotes_what_is_printed() {
    let guide = document("docs/ALGORITHMS.md");
    for (command, quoted) in [
        (
            "trace --softmax 1,3,2 --block 2",
            &["l - safe l", "0.1353", "1.5032"][..],
        ),
        ("trace --algorithms fa1", &["store O, l, m"]),
        ("trace --algorithms fa2", &["O~ / l = O"]),
        (
            "io --shape sq=2048,d=64 --blocks 64x64",
            &["3.12 : 2", "64 × 64"],
        ),
        (
            "io --shape sq=2048,d=64 --dtype bf16 --chip h100",
            &["0.62 : 2", "1.20 : 2", "1.93 : 2", "116736", "456"],
        ),
        (
            "io --shape sq=2048,d=64 --dtype bf16 --chip a100",
            &["1.56 : 2", "2.53 : 2", "328"],
        ),
        (
            "io --shape sq=256,d=16",
            &[
                "fa1 and fa2, figures counted from a run",
                "reads of an element of O",
                "reads of an element of q",
                "reads of one of k",
                "operations an element of O",
                "writes of one of O",
                "units of parallel work",
                "others a 1000 multiply-adds",
            ],
        ),
        (
            "trace --backward --algorithms standard --steps all",
            &["row 0: delta = "],
        ),
        (
            "trace --backward --algorithms fa1,fa2",
            &["row 0: m ", "row 0: L ", "delta = rowsum(dO * O)"],
        ),
    ] {
        let args: Vec<&str> = command.split(' ').collect();
        let text = stdout(&args, 0);
        let names = without_sizes(&text);
        for part in quoted {
            assert!(guide.contains(part), "not in the guide: {part}");
            assert!(
                text.contains(part) || names.contains(part),
                "{command}: {part}\n{text}"
            );
        }
    }
}

/// The words of a trace without the bytes that follow each tensor's name: `store O 16 B, l 8 B` is `store O, l`.
fn without_sizes(text: &str) -> String {
    let mut names = String::new();
    for word in text.split_whitespace() {
        match word {
            "B," => names.push(','),
            "B" => {}
            word if word.parse::<u64>().is_ok() => {}
            word => {
                names.push(' ');
                names.push_str(word);
            }
        }
    }
    names
}

/// The commands of the README that need no file of the reader's and no GPU.
#[test]
fn the_readmes_commands_run() {
    let readme = document("README.md");
    let folder = Folder::new();
    let file = folder.generate("x.safetensors", &["--shape", "1,2,2,40,40,16"]);
    let mut ran = 0;
    let block = readme.split("## As a command").nth(1).unwrap();
    let block = block.split("```").nth(1).unwrap();
    for line in block.lines().skip(1) {
        let mut words = arguments(line).unwrap();
        if is_left_out(&words) || ["generate", "check"].contains(&words[0].as_str()) {
            continue;
        }
        for word in &mut words {
            match word.as_str() {
                "x.safetensors" => file.clone_into(word),
                path if path.ends_with(".html") => *word = folder.file(path),
                _ => {}
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        stdout(&words, 0);
        ran += 1;
    }
    assert!(ran >= 4, "{ran}");
}
