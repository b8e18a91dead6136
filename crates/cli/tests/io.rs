//! `io`: counts and formulas, tables, plots.

mod common;

use common::*;
use serde_json::Value;

const SMALL: [&str; 3] = ["io", "--shape", "1,4,2,100,130,16,24,causal"];

fn traffic<'a>(report: &'a Value, algorithm: &str) -> &'a Value {
    let all = report["algorithms"].as_array().unwrap();
    all.iter().find(|t| t["algorithm"] == algorithm).unwrap()
}

fn bytes(traffic: &Value) -> f64 {
    traffic["bytes_read"].as_f64().unwrap() + traffic["bytes_written"].as_f64().unwrap()
}

fn assert_agrees(report: &Value, heads: &str) {
    for traffic in report["algorithms"].as_array().unwrap() {
        assert_eq!(traffic["agrees"], true, "{traffic:#}");
        assert_eq!(traffic["counted_heads"], heads);
        for line in traffic["tensors"].as_array().unwrap() {
            assert_eq!(line["read"]["counted"], line["read"]["formula"], "{line}");
            assert_eq!(
                line["written"]["counted"], line["written"]["formula"],
                "{line}"
            );
        }
    }
}

#[test]
fn the_whole_output() {
    let text = stdout(
        &[&SMALL[..], &["--blocks", "32x48", "--dtype", "bf16"]].concat(),
        0,
    );
    assert_narrow(&text);
    insta::assert_snapshot!(text);
}

/// Every line fits a terminal of 80 columns.
fn assert_narrow(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn the_output_fits_a_terminal() {
    for args in [
        &["io"][..],
        &["io", "--backward"],
        &["io", REAL, "--chip", "h100"],
    ] {
        assert_narrow(&stdout(args, 0));
    }
    assert_narrow(&stdout(&[&SMALL[..], &["--measure"]].concat(), 0));
    let text = stdout(&["io", "--shape", "sq=64,d=64"], 0);
    assert_narrow(&text);
    // An A100's f32 is slower than its memory, whatever the algorithm.
    assert!(text.contains("here that is the products"), "{text}");
    assert!(text.contains(" µs"), "{text}");
}

#[test]
fn the_whole_output_backward() {
    let args = ["--blocks", "32x48", "--dtype", "bf16", "--backward"];
    let text = stdout(&[&SMALL[..], &args].concat(), 0);
    assert_narrow(&text);
    insta::assert_snapshot!(text);
}

#[test]
fn counts_are_the_formulas_on_shapes_and_options() {
    for extra in [
        &["--dtype", "f64"][..],
        &["--backward"],
        &[
            "--backward",
            "--dtype",
            "f16",
            "--softcap",
            "3",
            "--blocks",
            "16x32",
        ],
        &["--backward", "--window-left", "20", "--memory", "16KiB"],
        &["--dtype", "f16", "--chip", "h200"],
        &["--memory", "16KiB", "--alignment", "top-left"],
        &[
            "--window-left",
            "20",
            "--window-right",
            "3",
            "--blocks",
            "16x16",
            "--causal=false",
        ],
        &["--fa1-blocks", "7x9", "--fa2-blocks", "13x5", "--alibi"],
        &["--chip", "cpu", "--softcap", "3"],
    ] {
        assert_agrees(&json(&[&SMALL[..], extra].concat(), 0), "all");
    }
}

#[test]
fn counts_are_the_formulas_on_files() {
    for file in [REAL, PACKED] {
        for pass in [&[][..], &["--backward"]] {
            let args = [&["io", file, "--blocks", "64x64"], pass].concat();
            let report = json(&args, 0);
            assert_agrees(&report, "all");
            assert_eq!(report["inputs"][0], file);
        }
    }
    let folder = Folder::new();
    let path = folder.file("mask.safetensors");
    let numbers = vec![0.5f32; 2 * 20 * 8];
    write(
        &path,
        &[
            ("q", &[1, 2, 20, 8], &numbers),
            ("k", &[1, 2, 20, 8], &numbers),
            ("v", &[1, 2, 20, 8], &numbers),
            ("bias", &[1, 1, 1, 20], &numbers[..20]),
        ],
    );
    let report = json(&["io", &path, "--blocks", "8x8"], 0);
    assert_agrees(&report, "all");
    let lines = traffic(&report, "fa2")["tensors"].as_array().unwrap();
    let bias = lines.iter().find(|line| line["tensor"] == "bias").unwrap();
    // A row of 20 for each of 3 blocks of rows and 2 heads.
    assert_eq!(bias["read"]["formula"], 120);
}

#[test]
fn one_head_stands_for_all_where_all_take_too_long_and_nothing_is_counted_where_one_does() {
    // 100 × 130 × 40 multiply-adds a head.
    let args =
        |limit: &'static str| [&SMALL[..], &["--causal=false", "--count-limit", limit]].concat();
    assert_agrees(&json(&args("1e6"), 0), "one head");
    let group = [&args("4e6")[..], &["--backward"]].concat();
    assert_agrees(&json(&group, 0), "one head");
    let report = json(&args("1e4"), 0);
    for traffic in report["algorithms"].as_array().unwrap() {
        assert_eq!(traffic["agrees"], Value::Null);
        assert_eq!(traffic["counted_heads"], "none");
    }
    let text = stdout(&args("1e4"), 0);
    assert!(text.contains("not counted: a run takes"), "{text}");
}

/// Every figure of the comparison is the same by formula as from a run, over sizes, tiles, masks, types
/// and both passes.
#[test]
fn the_comparison_by_formula_is_what_a_run_counts() {
    let shapes = [
        "1,8,8,128,128,16",
        "2,4,2,33,70,8",
        "1,6,3,50,20,12,20,causal",
        "1,2,2,9,300,8,causal",
        "3,2,2,64,16,8",
        "1,1,1,8,8,8",
    ];
    for shape in shapes {
        for more in [
            &["--blocks", "16x16"][..],
            &["--blocks", "8x64", "--dtype", "bf16"],
            &[
                "--fa1-blocks",
                "64x16",
                "--fa2-blocks",
                "16x32",
                "--dtype",
                "f64",
            ],
            &["--backward", "--blocks", "16x16", "--dtype", "bf16"],
            &["--backward", "--blocks", "32x8"],
        ] {
            let of = |limit: &str| {
                let args = [&["io", "--shape", shape, "--count-limit", limit], more].concat();
                json(&args, 0)["comparison"].clone()
            };
            let (counted, formula) = (of("1e9"), of("1"));
            assert_eq!(counted["from_a_run"], true);
            assert_eq!(formula["from_a_run"], false);
            assert_eq!(counted["rows"], formula["rows"], "{shape} {more:?}");
        }
    }
}

/// Equal tiles: 3 to 2. FA1's own tiles are larger and reverse it.
#[test]
fn equal_tiles_give_three_to_two_and_own_tiles_reverse_it() {
    let shape = [
        "io",
        "--shape",
        "sq=16384,d=64",
        "--count-limit",
        "1",
        "--chip",
        "h100",
    ];
    let report = json(&[&shape[..], &["--blocks", "64x64"]].concat(), 0);
    let equal = &report["equal_tiles"][0];
    let ratio = equal["fa1_elements"].as_f64().unwrap() / equal["fa2_elements"].as_f64().unwrap();
    assert!((ratio - 1.5).abs() < 0.06, "{ratio}");
    let report = json(&[&shape[..], &["--dtype", "bf16"]].concat(), 0);
    let own = [traffic(&report, "fa1"), traffic(&report, "fa2")];
    assert!(own[0]["block_keys"].as_f64() > own[1]["block_rows"].as_f64());
    let elements = own.map(|traffic| {
        let lines = traffic["tensors"].as_array().unwrap().iter();
        let of = |line: &Value, way: &str| line[way]["formula"].as_f64().unwrap();
        lines
            .map(|line| of(line, "read") + of(line, "written"))
            .sum::<f64>()
    });
    assert!(elements[0] < elements[1], "{elements:?}");
    assert!(bytes(traffic(&report, "standard")) > 5.0 * bytes(own[1]));
}

/// Backward FA1 and FA2 move the same but for O, which FA1 reads in every tile, and what FA2 keeps
/// for it: dP and dS never leave the chip in either.
#[test]
fn backward_fa2_reads_out_once() {
    let shape = ["io", "--shape", "sq=2048,d=64", "--count-limit", "1"];
    let report = json(
        &[&shape[..], &["--blocks", "64x64", "--backward"]].concat(),
        0,
    );
    let read = |algorithm, tensor| {
        let lines = traffic(&report, algorithm)["tensors"].as_array().unwrap();
        let line = lines.iter().find(|line| line["tensor"] == tensor);
        line.map_or(0, |line| line["read"]["formula"].as_u64().unwrap())
    };
    assert_eq!(read("fa1", "out"), 32 * read("fa2", "out"));
    assert_eq!(read("fa1", "dQ"), read("fa2", "dQ"));
    for tensor in ["S", "P", "dP", "dS"] {
        assert_eq!((read("fa1", tensor), read("fa2", tensor)), (0, 0));
        assert!(read("standard", tensor) >= 2048 * 2048);
    }
    let terms = |algorithm| traffic(&report, algorithm)["work"]["delta_terms"].as_u64();
    assert_eq!(terms("fa1").unwrap(), 32 * terms("fa2").unwrap());
}

#[test]
fn traffic_over_n_grows_as_the_papers_say() {
    let report = json(&SMALL, 0);
    let points = report["over_n"].as_array().unwrap();
    let at = |n: u64, which: usize| {
        let point = points.iter().find(|point| point["n"] == n).unwrap();
        point["bytes"][which].as_f64().unwrap()
    };
    for which in 0..3 {
        assert!(at(65536, which) / at(32768, which) > 3.5);
    }
    assert!(at(65536, 2) < at(65536, 0));
}

#[test]
fn the_plot_is_written_as_svg() {
    let folder = Folder::new();
    let path = folder.file("plot.svg");
    stdout(&[&SMALL[..], &["--svg", &path]].concat(), 0);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("<svg xmlns="), "{text}");
    for word in [
        "Bytes between slow and fast memory",
        "Predicted time",
        "fa1",
        "standard",
    ] {
        assert!(text.contains(word), "{word}");
    }
}

/// Whatever this machine lets one measure: a figure, or the reason why there is none.
#[test]
fn what_cannot_be_measured_is_said() {
    let report = json(&[&SMALL[..], &["--measure"]].concat(), 0);
    let measured = report["measured"].as_array().unwrap();
    let cpu: Vec<&Value> = measured.iter().filter(|m| m["backend"] == "cpu").collect();
    assert_eq!(cpu.len(), 3);
    for one in measured {
        let how = one["how"].as_str().unwrap();
        let said = how.starts_with("not ");
        assert_eq!(one["bytes_read"].is_null(), said, "{one:#}");
        assert!(one["formula_bytes"].as_f64().unwrap() > 0.0);
    }
    for one in cpu {
        assert!(one["note"].as_str().unwrap().contains("caches: "), "{one}");
    }
}

#[test]
fn what_io_cannot_take_is_refused() {
    for (args, says) in [
        (&["--shape", "1,3,2,4,4,8"][..], "num_heads"),
        (
            &["--shape", "1,1,1,99999999999999,99999999999999,99999999"],
            "more elements",
        ),
        (&["missing.safetensors"], "missing.safetensors"),
        (&[REAL, "--measure"], "--measure"),
    ] {
        let text = error(&[&["io"], args].concat());
        assert!(text.contains(says), "{text}");
    }
    for args in [
        &["--blocks", "0x4"][..],
        &["--blocks", "4"],
        &["--chip", "abacus"],
        &["--bandwidth", "-1"],
    ] {
        let output = tilewise().arg("io").args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}
