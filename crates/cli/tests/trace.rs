//! `tilewise trace` as its users see it.

mod common;

use common::*;
use serde_json::Value;

/// Every line fits a terminal of 80 columns.
fn assert_narrow(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

/// Rounding errors, which may differ between processors.
fn rounded() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"-?\d\.\de-\d+", "[tiny]");
    settings.add_filter(r"(l - safe l = ).*", "$1[tiny]");
    settings.add_filter(r" +\n", "\n");
    settings
}

#[test]
fn one_three_two_is_traced_three_ways() {
    let text = stdout(&["trace", "--softmax", "1,3,2"], 0);
    assert_narrow(&text);
    rounded().bind(|| insta::assert_snapshot!("softmax", text));
    let hidden = stdout(
        &[
            "trace",
            "--softmax",
            "-inf,-1.5,1000,2,-inf",
            "--block",
            "3",
        ],
        0,
    );
    assert_narrow(&hidden);
    rounded().bind(|| insta::assert_snapshot!("softmax_blocks", hidden));
}

#[test]
fn one_three_two_is_traced_as_json() {
    let trace = json(&["trace", "--softmax", "1,3,2"], 0);
    let safe = trace["safe"]["l"].as_f64().unwrap();
    for way in ["online", "blocks"] {
        let online = &trace[way];
        assert!((online["l"].as_f64().unwrap() - safe).abs() < 1e-15);
        let difference = online["l"].as_f64().unwrap() - safe;
        assert_eq!(online["l_minus_safe"].as_f64().unwrap(), difference);
    }
    let corrections: Vec<f64> = trace["online"]["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| step["correction"].as_f64().unwrap())
        .collect();
    assert_eq!(corrections, [0.0, (-2f64).exp(), 1.0]);
    insta::assert_json_snapshot!("softmax_json", trace, {
        ".**.l_minus_safe" => "[tiny]",
        ".**" => insta::rounded_redaction(6),
    });
}

#[test]
fn the_example_is_traced_by_every_algorithm() {
    let text = stdout(&["trace"], 0);
    assert_narrow(&text);
    rounded().bind(|| insta::assert_snapshot!("example", text));
}

#[test]
fn the_example_is_traced_as_json() {
    let trace = json(&["trace", "--algorithms", "fa2", "--causal"], 0);
    insta::assert_json_snapshot!("example_json", trace, {
        ".runs[].naive.max_abs_err" => "[tiny]",
        ".runs[].naive.tolerance" => "[tiny]",
        ".runs[].naive.lse_max_abs_err" => "[tiny]",
        ".runs[].naive.lse_tolerance" => "[tiny]",
        ".**" => insta::rounded_redaction(5),
    });
}

#[test]
fn the_examples_gradients_are_traced_by_every_algorithm() {
    let text = stdout(&["trace", "--backward"], 0);
    assert_narrow(&text);
    rounded().bind(|| insta::assert_snapshot!("example_backward", text));
    let file = stdout(&["trace", REAL, "--backward", "--head", "3", "--causal"], 0);
    assert_narrow(&file);
    let given = ["--q", "1,0;0,1", "--k", "1,2;3,1", "--v", "1,0;0,1"];
    let args = [&["trace", "--backward"], &given[..], &["--dout", "1,0;0,0"]].concat();
    let trace = json(&args, 0);
    assert_eq!(trace["pass"], "backward");
    for run in trace["runs"].as_array().unwrap() {
        let gradients = run["gradients"].as_array().unwrap();
        let names: Vec<&str> = gradients
            .iter()
            .map(|g| g["tensor"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["dq", "dk", "dv"]);
        assert!(gradients.iter().all(|gradient| gradient["pass"] == true));
    }
    let wrong = [&["trace", "--backward"], &given[..], &["--dout", "1,0,2"]].concat();
    assert!(error(&wrong).contains("dout"));
}

/// A window leaves tiles with no live key and rows with none.
#[test]
fn hidden_tiles_and_rows_are_told() {
    let args = [
        "trace",
        "--causal",
        "--alignment",
        "top-left",
        "--window-left",
        "1",
    ];
    let text = stdout(&[&args[..], &["--algorithms", "fa1,fa2"]].concat(), 0);
    assert_narrow(&text);
    assert!(text.contains("no live key, skipped"));
    rounded().bind(|| insta::assert_snapshot!("window", text));
}

#[test]
fn a_real_file_is_traced_in_part_and_says_so() {
    let text = stdout(&["trace", REAL, "--head", "3", "--steps", "2"], 0);
    assert_narrow(&text);
    assert!(text.contains("more steps are not shown (--steps all)"));
    assert!(text.contains("traced: batch 0, head 3"));
    let all = stdout(&["trace", REAL, "--steps", "all"], 0);
    assert_narrow(&all);
    assert!(!all.contains("not shown"));
}

#[test]
fn numbers_on_the_command_line_are_inputs() {
    let args = [
        "trace",
        "--q",
        "-1,0",
        "--k",
        "1 0; 0 1",
        "--v",
        "1;2",
        "--softmax-scale",
        "1",
    ];
    let trace = json(&[&args[..], &["--dtype", "f64"]].concat(), 0);
    let (a, b) = ((-1f64).exp(), 1.0);
    for run in trace["runs"].as_array().unwrap() {
        let events = run["events"].as_array().unwrap();
        let finish = events.iter().find(|event| event["event"] == "finish");
        let row = &finish.unwrap()["rows_shown"][0];
        let out = row["out"][0].as_f64().unwrap();
        assert!((out - (a + 2.0 * b) / (a + b)).abs() < 1e-15);
        assert!((row["lse"].as_f64().unwrap() - (a + b).ln()).abs() < 1e-15);
    }
}

/// The finished rows of a trace, as (row, out).
fn finished(run: &Value) -> Vec<(usize, Vec<f64>)> {
    let events = run["events"].as_array().unwrap();
    events
        .iter()
        .filter(|event| event["event"] == "finish")
        .flat_map(|event| event["rows_shown"].as_array().unwrap())
        .map(|row| {
            let out = row["out"].as_array().unwrap();
            let out = out.iter().map(|x| x.as_f64().unwrap()).collect();
            (row["row"].as_u64().unwrap() as usize, out)
        })
        .collect()
}

/// One head cut out of a problem gives that head's rows of the whole: heads that share keys, packed
/// sequences, pages, biases, masks, slopes, sinks and used lengths.
#[test]
fn a_traced_head_is_that_head_of_the_whole() {
    let folder = Folder::new();
    let mut traced = 0;
    for name in [
        "d-ali-01",
        "d-aln-01",
        "d-caus-03",
        "d-dv-01",
        "d-gqa-01",
        "d-gqa-03",
        "d-mask-01",
        "d-msk-01",
        "d-pag-01",
        "d-snk-01",
        "d-win-01",
    ] {
        let path = root().join(format!("tests/conformance/attn/{name}.safetensors"));
        let whole = folder.file(&format!("{name}.safetensors"));
        let path = path.to_str().unwrap();
        stdout(
            &[
                "run",
                path,
                "--dtype",
                "f32",
                "--backend",
                "cpu",
                "-o",
                &whole,
            ],
            0,
        );
        let (shape, out) = read(&whole, "o");
        let [_, heads, seqlen, width] = shape[..] else {
            panic!("{name}: {shape:?}");
        };
        for (batch, head) in [(0, 0), (1, heads - 1)] {
            let (batch, head) = (batch.to_string(), head.to_string());
            let args = [
                "trace", path, "--dtype", "f32", "--batch", &batch, "--head", &head, "--json",
            ];
            let output = tilewise().args(args).output().unwrap();
            if output.status.code() == Some(2) {
                let stderr = String::from_utf8(output.stderr).unwrap();
                assert!(
                    batch == "1" && stderr.contains("sequence of 0..1, got 1"),
                    "{name}: {stderr}"
                );
                continue;
            }
            assert!(output.status.success(), "{name}");
            let trace: Value = serde_json::from_slice(&output.stdout).unwrap();
            let (b, h): (usize, usize) = (batch.parse().unwrap(), head.parse().unwrap());
            let start = match trace["problem"]["packed_sequences"].as_u64() {
                None => b * heads * seqlen,
                Some(_) if b == 0 => 0,
                // Where the second of the packed sequences starts.
                Some(_) => packed_start(path, b),
            };
            for run in trace["runs"].as_array().unwrap() {
                for (row, values) in finished(run) {
                    let at = (start + h * seqlen + row) * width;
                    for (x, &expected) in values.iter().zip(&out[at..at + width]) {
                        let expected = f64::from(expected);
                        assert!(
                            (x - expected).abs() <= 1e-4 * expected.abs().max(1.0),
                            "{name} {} batch {b} head {h} row {row}: {x} {expected}",
                            run["algorithm"]
                        );
                        traced += 1;
                    }
                }
            }
        }
    }
    assert!(traced > 500, "{traced}");
}

fn packed_start(path: &str, sequence: usize) -> usize {
    let file = tilewise_cli::container::Container::open(std::path::Path::new(path)).unwrap();
    file.tensor("cu_seqlens_q").unwrap().to_i32().unwrap()[sequence] as usize
}

#[test]
fn the_animation_is_written_and_holds_what_json_prints() {
    let folder = Folder::new();
    let page = folder.file("trace.html");
    let printed = json(&["trace", "--html", &page], 0);
    let page = std::fs::read_to_string(page).unwrap();
    let opening = "<script type=\"application/json\" id=\"trace\">";
    let data = page.split_once(opening).unwrap().1;
    let data = data.split_once("</script>").unwrap().0;
    assert_eq!(serde_json::from_str::<Value>(data).unwrap(), printed);
}

#[test]
fn wrong_arguments_are_named() {
    for (args, part) in [
        (
            &["trace", REAL, "--head", "12"][..],
            "--head: expected a head of 0..12, got 12",
        ),
        (&["trace", REAL, "--batch", "1"], "of 0..1, got 1"),
        (&["trace", "--rows", "0..5"], "rows of 0..4, got 0..5"),
        (
            &["trace", "--q", "1,2", "--k", "1", "--v", "1"],
            "head_dim 2 as q has",
        ),
        (
            &[
                "trace",
                REAL,
                "--algorithms",
                "standard",
                "--memory-limit",
                "1k",
            ],
            "every algorithm was skipped",
        ),
    ] {
        let said = error(args);
        assert!(said.contains(part), "{said}");
    }
    for args in [
        &["trace", "--q", "1,2;3", "--k", "1", "--v", "1"][..],
        &["trace", "--q", "1,2"],
        &["trace", "--softmax", "1,x"],
        &["trace", "--softmax", "1", REAL],
        &["trace", "--block-q", "0"],
        &["trace", "--rows", "3..3"],
    ] {
        assert_eq!(
            tilewise().args(args).output().unwrap().status.code(),
            Some(2),
            "{args:?}"
        );
    }
}
