//! What every command does alike: its help, its JSON, its exit status, and a reader that goes away.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use common::*;

const COMMANDS: [&str; 10] = [
    "compare", "trace", "run", "generate", "bench", "check", "report", "io", "devices", "inspect",
];

/// Commands that end at once, without a file of their own.
const QUICK: [&[&str]; 8] = [
    &["trace", "--softmax", "1,3,2"],
    &["trace"],
    &["trace", "--backward"],
    &["io", "--shape", "sq=64,d=16"],
    &["io", "--shape", "sq=64,d=16", "--backward"],
    &["devices"],
    &["compare", REAL, "--backends", "cpu", "--repeat", "1"],
    &[
        "bench",
        "--backends",
        "cpu",
        "--shapes",
        "1,1,1,16,16,8",
        "--repeat",
        "1",
    ],
];

fn in_columns(columns: &str, args: &[&str]) -> String {
    let output = tilewise()
        .env("COLUMNS", columns)
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Help fits a terminal of 80 columns, and no line of an example is broken there.
#[test]
fn help_fits_a_terminal() {
    for command in COMMANDS {
        if command == "inspect" && cfg!(not(feature = "cuda")) {
            continue;
        }
        let text = in_columns("80", &[command, "--help"]);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{command}: {line}");
        }
        if let Some((_, examples)) = text.split_once("Examples:\n") {
            for line in examples.lines() {
                assert!(line.starts_with("  tilewise "), "{command}: {line}");
            }
        }
        let short = in_columns("80", &[command, "-h"]);
        assert!(short.lines().count() <= text.lines().count());
    }
    let text = in_columns("80", &["--help"]);
    for word in COMMANDS
        .iter()
        .chain(&["Exit status: 0", "tilewise trace --softmax 1,3,2"])
    {
        assert!(text.contains(word), "{word}");
    }
}

/// Tables and all other lines fit a terminal of 80 columns; a path or a processor's name may be longer than
/// any line.
#[test]
fn output_fits_a_terminal() {
    let fixture = |name: &str| format!("crates/cli/tests/fixtures/inspect/{name}.ptx");
    let (fa1, fa2, standard) = (fixture("fa1"), fixture("fa2"), fixture("standard"));
    let one = ["--backends", "cpu", "--repeat", "1"];
    let mut all: Vec<Vec<&str>> = QUICK.iter().map(|args| args.to_vec()).collect();
    all.push([&["compare", REAL, "--backward"], &one[..]].concat());
    all.push(vec![
        "compare",
        REAL,
        "--algorithms",
        "fa2",
        "--repeat",
        "1",
    ]);
    let shapes = [
        "bench",
        "--shapes",
        "2,16,4,128,256,64,causal",
        "1,1,1,16,16,8",
    ];
    for more in [&["--backward"][..], &["--ceilings", "--algorithms", "fa2"]] {
        all.push([&shapes, &one[..], more].concat());
    }
    all.push(vec!["trace", REAL]);
    all.push(vec!["trace", REAL, "--backward"]);
    all.push(vec!["io"]);
    all.push(vec!["io", "--measure"]);
    all.push(vec!["io", "--chip", "h200", "--dtype", "bf16"]);
    if cfg!(feature = "cuda") {
        all.push(vec!["inspect", &fa1]);
        all.push(vec!["inspect", &fa2]);
        all.push(vec!["inspect", &standard]);
        all.push(vec![
            "kernels",
            "list",
            "--arch",
            "sm_90a",
            "--head-dim",
            "64",
        ]);
    }
    for args in all {
        let output = tilewise().args(&args).output().unwrap();
        assert!(output.status.success(), "{args:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.lines().count() > 1, "{args:?}");
        for line in text.lines().filter(|line| line.chars().count() > 80) {
            let words = || line.split_whitespace();
            let longest = words().map(|word| word.chars().count()).max();
            let processor = line.trim_start().starts_with("cpu: ") || line.starts_with("cpu ");
            assert!(longest > Some(76) || processor, "{args:?}:\n{text}");
        }
    }
}

/// Nothing but text goes to a pipe: no colours, whatever else the surroundings say.
#[test]
fn a_pipe_gets_no_colours() {
    for args in QUICK {
        let text = stdout(args, 0);
        assert!(!text.contains('\u{1b}'), "{args:?}");
    }
}

#[test]
fn every_command_speaks_json() {
    for args in QUICK {
        let value = json(args, 0);
        assert!(value.is_object(), "{args:?}");
    }
    // What JSON has no number for is a string.
    let trace = json(&["trace", "--softmax", "nan,inf,1"], 0);
    assert_eq!(trace["safe"]["m"], "NaN");
}

/// A reader that has seen enough, as `| head -1` has: no error, and nothing on stderr.
#[test]
fn a_reader_may_go_away() {
    for args in [
        &["trace", REAL, "--steps", "all"][..],
        &["trace", REAL, "--json"],
        &["io", "--shape", "sq=64,d=16", "--json"],
        &["trace", "--help"],
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tilewise"))
            .current_dir(root())
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        reader.read_line(&mut line).unwrap();
        drop(reader);
        let mut said = String::new();
        let mut stderr = child.stderr.take().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}: {said}");
        assert!(said.is_empty() && !line.is_empty(), "{args:?}: {said}");
    }
}

/// Values out of range are named with what was expected and what came.
#[test]
fn errors_name_what_was_expected_and_what_came() {
    for (args, says) in [
        (
            &["trace", "--head", "9"][..],
            "--head: expected a head of 0..1, got 9",
        ),
        (
            &["trace", "--batch", "2"],
            "--batch: expected a batch entry or sequence of 0..1, got 2",
        ),
        (
            &["trace", "--rows", "2..99"],
            "--rows: expected rows of 0..4, got 2..99",
        ),
        (&["trace", "--on-chip", "7"], "8 numbers, got 7"),
        (&["io", "--memory", "1000"], "1 KiB, got 1000 B"),
        (
            &["io", "--memory", "511", "--dtype", "bf16"],
            "512 B, got 511 B",
        ),
        (
            &["trace", "--q", "1,0", "--k", "1,0,0", "--v", "1"],
            "k: expected head_dim 2",
        ),
    ] {
        let text = error(args);
        assert!(text.contains(says), "{text}");
    }
    for (args, says) in [
        (&["trace", "--softmax", "1,two"][..], "expected a number"),
        (
            &["trace", "--softmax", "1", "--block", "0"],
            "expected a number of at least 1",
        ),
        (&["report", "-o", "x.html", "--max-n", "0"], "--max-n"),
    ] {
        let output = tilewise().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(says), "{text}");
    }
}
