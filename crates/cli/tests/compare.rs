//! `tilewise compare` as its users see it.

mod common;

use common::*;

use std::collections::BTreeMap;

/// Figures depend on the machine and the instruction set, names of processors too: what is left is
/// the table's form.
fn redacted() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    for (pattern, with) in [
        (r"(?m)^  cpu: .*$", "  cpu: [processor]"),
        (r"(?m)^  cuda:\d+: .*\n", ""),
        (r"(?m)^cuda:0 skipped: .*$", "cuda:0 skipped: [reason]"),
        (r"(?m)^this is a debug build.*\n", ""),
        (
            r"\b(amx-emulated|amx|avx512bf16|avx512|avx2|portable)\b",
            "[isa]",
        ),
        (r"\d\.\de-\d+", "[err]"),
        (
            r"(\[isa\])\s+[\d.]+\s+[\d.]+\s+([\d.]+x|-)\s+[\d.]+ [KMG]?i?B",
            "$1 [ms] [gflops] [speed] [memory]",
        ),
        (r"-{20,}", "[rule]"),
        (r" +", " "),
    ] {
        settings.add_filter(pattern, with);
    }
    settings
}

#[test]
fn the_real_file_passes_and_prints_a_table() {
    let table = stdout(&["compare", REAL, "--backends", "cpu"], 0);
    redacted().bind(|| insta::assert_snapshot!("real_file_table", table));
}

#[test]
fn the_real_file_passes_as_json() {
    let report = json(&["compare", REAL, "--backends", "cpu", "--repeat", "3"], 0);
    assert_passes(&report);
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let samples: Vec<f64> = row["samples_ms"]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap())
            .collect();
        assert_eq!(samples.len(), 3);
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        assert_eq!(row["median_ms"].as_f64(), Some(sorted[1]));
        let gflops = report["problem"]["flops"].as_f64().unwrap() / sorted[1] / 1e6;
        assert!((row["gflops"].as_f64().unwrap() / gflops - 1.0).abs() < 1e-9);
    }
    assert_eq!(rows[0]["speedup_vs_standard"], 1.0);
    insta::assert_json_snapshot!("real_file_json", report, {
        ".environment.version" => "[version]",
        ".environment.os" => "[os]",
        ".environment.arch" => "[arch]",
        ".environment.debug_build" => "[debug_build]",
        ".environment.threads" => "[threads]",
        ".environment.backends" => "[backends]",
        ".results[].isa" => "[isa]",
        ".results[].max_abs_err" => "[err]",
        ".results[].mean_abs_err" => "[err]",
        ".results[].max_rel_err" => "[err]",
        ".results[].lse_max_abs_err" => "[err]",
        ".results[].tolerance" => "[bound]",
        ".results[].lse_tolerance" => "[bound]",
        ".results[].median_ms" => "[ms]",
        ".results[].samples_ms" => "[ms]",
        ".results[].gflops" => "[gflops]",
        ".results[].speedup_vs_standard" => "[speed]",
        ".results[].peak_extra_bytes" => "[bytes]",
        ".results[].worst" => "[place]",
        ".file.worst" => "[place]",
        ".file.max_abs_err" => "[err]",
        ".file.mean_abs_err" => "[err]",
        ".file.max_rel_err" => "[err]",
        ".file.lse_max_abs_err" => "[err]",
        ".file.tolerance" => "[bound]",
        ".file.lse_tolerance" => "[bound]",
    });
}

#[test]
fn without_a_choice_every_backend_is_listed() {
    let report = json(&["compare", REAL, "--repeat", "1"], 0);
    assert_passes(&report);
    let rows = report["results"].as_array().unwrap();
    for backend in ["cpu", "cuda:0"] {
        let of: Vec<_> = rows
            .iter()
            .filter(|row| row["backend"] == backend)
            .collect();
        assert_eq!(of.len(), 3, "{report:#}");
        for row in of {
            let ran = row["status"] == "ok";
            assert_eq!(ran, row["reason"].is_null(), "{row:#}");
        }
    }
}

#[test]
fn a_backend_that_is_missing_hinders_no_other_but_is_an_error() {
    let args = [
        "compare",
        REAL,
        "--backends",
        "cpu,cuda:77",
        "--repeat",
        "1",
    ];
    let report = json(&args, 2);
    assert_passes(&report);
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in &rows[3..] {
        assert_eq!(row["status"], "skipped");
        assert!(!row["reason"].as_str().unwrap().is_empty());
    }
    assert!(error(&args).contains("backend cuda:77 is not available"));
}

#[test]
fn packed_sequences_pass() {
    let report = json(
        &["compare", PACKED, "--backends", "cpu", "--repeat", "1"],
        0,
    );
    assert_passes(&report);
    assert_eq!(report["problem"]["packed_sequences"], 4);
    assert_eq!(report["file"]["pass"], true);
}

#[test]
fn each_instruction_set_passes() {
    let report = json(
        &[
            "compare",
            REAL,
            "--backends",
            "cpu",
            "--isa",
            "all",
            "--repeat",
            "1",
        ],
        0,
    );
    assert_passes(&report);
    let isas = json(&["devices"], 0)["isas"].as_array().unwrap().clone();
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * isas.len());
    for isa in isas {
        assert_eq!(rows.iter().filter(|row| row["isa"] == isa).count(), 3);
    }
}

#[test]
fn a_wrong_o_is_found() {
    let folder = Folder::new();
    let path = folder.file("wrong.safetensors");
    let read = |name| read(REAL, name);
    let ((q_shape, q), (_, k), (_, v), (_, mut o)) = (read("q"), read("k"), read("v"), read("o"));
    o[12345] += 1e-4;
    write(
        &path,
        &[
            ("q", &q_shape, &q),
            ("k", &q_shape, &k),
            ("v", &q_shape, &v),
            ("o", &q_shape, &o),
        ],
    );
    let args = ["compare", &path, "--backends", "cpu", "--algorithms", "fa2"];
    let report = json(&args, 1);
    assert_passes(&report);
    assert_eq!(report["file"]["pass"], false);
    let error = report["file"]["max_abs_err"].as_f64().unwrap();
    assert!((0.9e-4..1.1e-4).contains(&error), "{error}");
    assert_eq!(report["file"]["worst"], serde_json::json!([0, 1, 189, 25]));
    let table = stdout(&args, 1);
    let words: Vec<&str> = table.split_whitespace().collect();
    let words = words.join(" ");
    assert!(
        words.contains("FAIL") && words.contains("[0, 1, 189, 25]"),
        "{table}"
    );
    // Left aside, it does no harm.
    json(&["compare", &path, "--backends", "cpu", "--ignore", "o"], 0);
}

#[test]
fn what_needs_too_much_memory_is_skipped_and_says_so() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "1,1,1,2048,2048,8"]);
    let limited = |limit: &'static str, algorithms: &'static str| {
        [
            "compare",
            &inputs,
            "--backends",
            "cpu",
            "--repeat",
            "1",
            "--reference-rows",
            "64",
            // Scratch grows with the threads, of which a machine may have many.
            "--threads",
            "2",
            "--memory-limit",
            limit,
            "--algorithms",
            algorithms,
        ]
    };
    let report = json(&limited("8MiB", "standard,fa2"), 0);
    let [standard, fa2] = [0, 1].map(|row| &report["results"][row]);
    assert_eq!(standard["status"], "skipped", "{standard:#}");
    let reason = standard["reason"].as_str().unwrap();
    assert!(reason.contains("above --memory-limit 8 MiB"), "{reason}");
    assert!(standard["pass"].is_null() && standard["median_ms"].is_null());
    assert_eq!(fa2["status"], "ok");
    assert!(
        fa2["peak_extra_bytes"].as_u64().unwrap() < 8 << 20,
        "{fa2:#}"
    );
    assert!(fa2["speedup_vs_standard"].is_null());
    // The scores and nothing else are what makes the difference, and they are seen if allowed.
    let report = json(&limited("1GiB", "standard"), 0);
    let extra = report["results"][0]["peak_extra_bytes"].as_u64().unwrap();
    assert!(extra >= 2048 * 2048 * 4, "{report:#}");
    // If nothing is left to run, nothing was compared.
    let error = error(&limited("0", "standard"));
    assert!(error.contains("nothing ran"), "{error}");
    // It is the algorithm that lacks room, and not the backend that is missing.
    let bench =
        "bench --backends cpu --algorithms standard --memory-limit 1MiB --shapes 1,1,1,2048,2048,8";
    let said = stdout(&bench.split(' ').collect::<Vec<_>>(), 2);
    assert!(said.contains("cpu standard skipped: needs"), "{said}");
}

#[test]
fn alignment_tells_top_left_from_bottom_right() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "1,2,1,5,9,16"]);
    let outputs = folder.file("out.safetensors");
    stdout(
        &[
            "run",
            &inputs,
            "--causal",
            "--backend",
            "cpu",
            "-o",
            &outputs,
        ],
        0,
    );
    let both = folder.file("both.safetensors");
    let [(qs, q), (ks, k), (_, v)] = ["q", "k", "v"].map(|name| read(&inputs, name));
    let [(_, o), (ls, lse)] = ["o", "lse"].map(|name| read(&outputs, name));
    write(
        &both,
        &[
            ("q", &qs, &q),
            ("k", &ks, &k),
            ("v", &ks, &v),
            ("o", &qs, &o),
            ("lse", &ls, &lse),
        ],
    );
    let compare = |options: &[&str], status| {
        let args: Vec<&str> = ["compare", &both, "--backends", "cpu", "--repeat", "1"]
            .into_iter()
            .chain(options.iter().copied())
            .collect();
        let report = json(&args, status);
        assert_passes(&report);
        report["problem"]["alignment"].clone()
    };
    assert_eq!(compare(&["--causal"], 0), "bottom-right");
    assert_eq!(
        compare(&["--causal", "--alignment", "top-left"], 1),
        "top-left"
    );
    assert_eq!(compare(&[], 1), "bottom-right");
}

#[test]
fn every_option_reaches_the_problem() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "2,4,2,33,47,24,40"]);
    let report = json(
        &[
            "compare",
            &inputs,
            "--backends",
            "cpu",
            "--repeat",
            "1",
            "--causal",
            "--alignment",
            "top-left",
            "--window-left",
            "9",
            "--window-right",
            "3",
            "--softcap",
            "20",
            "--softmax-scale",
            "-0.25",
            "--alibi",
        ],
        0,
    );
    assert_passes(&report);
    insta::assert_json_snapshot!("every_option", report["problem"]);
    // Not only accepted: each of them changes what is computed.
    let plain = json(
        &["compare", &inputs, "--backends", "cpu", "--repeat", "1"],
        0,
    );
    assert_passes(&plain);
}

#[test]
fn every_dtype_passes_and_inputs_can_be_rounded() {
    let folder = Folder::new();
    for dtype in ["f64", "f32", "f16", "bf16"] {
        let name = format!("{dtype}.safetensors");
        let inputs = folder.generate(&name, &["--shape", "1,3,3,40,40,20", "--dtype", dtype]);
        let report = json(
            &["compare", &inputs, "--backends", "cpu", "--repeat", "1"],
            0,
        );
        assert_passes(&report);
        assert_eq!(report["problem"]["dtype"], dtype);
    }
    let report = json(
        &[
            "compare",
            REAL,
            "--backends",
            "cpu",
            "--repeat",
            "1",
            "--dtype",
            "bf16",
        ],
        0,
    );
    assert_passes(&report);
    assert_eq!(report["problem"]["dtype"], "bf16");
    assert!(report["file"].is_null());
    assert!(
        report["notes"][0]
            .as_str()
            .unwrap()
            .contains("converted to bf16")
    );
}

#[test]
fn a_sample_of_rows_is_stated() {
    let args = [
        "compare",
        REAL,
        "--backends",
        "cpu",
        "--algorithms",
        "fa2",
        "--reference-rows",
        "64",
    ];
    let report = json(&args, 0);
    assert_passes(&report);
    assert_eq!(report["reference_rows"]["checked"], 64);
    assert_eq!(report["reference_rows"]["total"], 12 * 196);
    assert!(stdout(&args, 0).contains("64 of 2352 rows"));
}

#[test]
fn options_of_a_case_file_are_taken_and_can_be_overridden() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "1,2,2,12,12,8"]);
    let path = folder.file("case.safetensors");
    let [(shape, q), (_, k), (_, v)] = ["q", "k", "v"].map(|name| read(&inputs, name));
    let case =
        r#"{"options": {"causal": true, "window_left": 4, "window_right": -1, "softcap": 2.0}}"#;
    write_with(
        &path,
        &[("q", &shape, &q), ("k", &shape, &k), ("v", &shape, &v)],
        &BTreeMap::from([("case".to_string(), case.to_string())]),
    );
    let report = json(&["compare", &path, "--backends", "cpu", "--repeat", "1"], 0);
    assert_passes(&report);
    assert_eq!(report["problem"]["causal"], true);
    assert_eq!(report["problem"]["window_left"], 4);
    assert!(report["problem"]["window_right"].is_null());
    assert_eq!(report["problem"]["softcap"], 2.0);
    let report = json(
        &["compare", &path, "--backends", "cpu", "--causal=false"],
        0,
    );
    assert_eq!(report["problem"]["causal"], false);
}

#[test]
fn conformance_cases_are_inputs_too() {
    for (case, fact) in [
        ("d-pag-01", "page_size"),
        ("d-ali-01", "alibi"),
        ("d-aln-01", "bias"),
        ("d-msk-01", "mask"),
    ] {
        let path = format!("tests/conformance/attn/{case}.safetensors");
        let report = json(&["compare", &path, "--backends", "cpu", "--repeat", "1"], 0);
        assert_passes(&report);
        assert_eq!(report["file"]["pass"], true, "{case}");
        let fact = &report["problem"][fact];
        assert!(fact == true || fact.is_u64(), "{case}: {fact}");
    }
}

#[test]
fn faults_are_one_line_and_status_2() {
    let folder = Folder::new();
    let path = folder.file("half.safetensors");
    write(
        &path,
        &[
            ("q", &[1, 1, 2, 4], &[0.0; 8]),
            ("k", &[1, 1, 2, 4], &[0.0; 8]),
        ],
    );
    let text = error(&["compare", &path]);
    assert!(
        text.contains("half.safetensors") && text.contains("\"v\""),
        "{text}"
    );

    let text = error(&["compare", "no/such/file.safetensors"]);
    assert!(text.contains("no/such/file.safetensors"), "{text}");

    let text = error(&["compare", REAL, "--backends", "cuda:77"]);
    assert!(text.contains("cuda:77"), "{text}");

    let text = error(&["compare", REAL, "--isa", "mmx"]);
    assert!(text.contains("mmx"), "{text}");

    let text = error(&["compare", REAL, "--softcap", "0"]);
    assert!(text.contains(REAL) && text.contains("softcap"), "{text}");

    let text = error(&["compare", REAL, PACKED]);
    assert!(text.contains("three .npy files"), "{text}");

    write(
        &path,
        &[
            ("q", &[1, 1, 2, 4], &[0.0; 8]),
            ("k", &[1, 1, 2, 3], &[0.0; 6]),
            ("v", &[1, 1, 2, 3], &[0.0; 6]),
        ],
    );
    let text = error(&["compare", &path]);
    assert!(
        text.contains("half.safetensors: k: expected head_dim 4"),
        "{text}"
    );
}

#[test]
fn nothing_but_the_result_is_on_stdout_and_no_colour_off_a_terminal() {
    let output = tilewise()
        .args(["compare", REAL, "--backends", "cpu", "--repeat", "1"])
        .output()
        .unwrap();
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!output.stdout.contains(&0x1b));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewise"))
        .args([
            "compare",
            REAL,
            "--backends",
            "cpu",
            "--repeat",
            "1",
            "--json",
        ])
        .current_dir(root())
        .env_remove("TILEWISE_BACKEND")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn gradients_are_compared_one_by_one() {
    let report = json(
        &[
            "compare",
            "tests/conformance/attn/d-dbi-01.safetensors",
            "--backward",
            "--backends",
            "cpu",
            "--repeat",
            "1",
        ],
        0,
    );
    assert_eq!(report["dout"], "do of the file");
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row["status"], "ok", "{row}");
        assert!(row["median_ms"].as_f64().unwrap() > 0.0);
        let gradients = row["gradients"].as_array().unwrap();
        let names: Vec<_> = gradients
            .iter()
            .map(|x| x["tensor"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["dq", "dk", "dv", "dbias"]);
        for gradient in gradients {
            assert_eq!(gradient["pass"], true, "{gradient}");
            assert!(gradient["max_abs_err"].as_f64().unwrap() < 1e-5);
        }
    }
    // Without do in the file, a seeded one.
    let text = stdout(
        &[
            "compare",
            "tests/conformance/attn/d-dbi-01.safetensors",
            "--backward",
            "--ignore",
            "do",
            "--backends",
            "cpu",
            "--repeat",
            "1",
        ],
        0,
    );
    assert!(text.contains("seed 0") && text.contains("dbias"), "{text}");
}

/// What would be refused on every backend is an error of the input, and no difference between backends.
#[test]
fn gradients_of_another_shape_are_refused_before_anything_runs() {
    let folder = Folder::new();
    let file = folder.file("x.safetensors");
    let data = [0.5f32; 24];
    let qkv = ["q", "k", "v"].map(|name| (name, &[1, 1, 3, 8][..], &data[..]));
    for (name, shape, expected) in [
        (
            "do",
            &[1, 1, 2, 8][..],
            "do: expected [1, 1, 3, 8], got [1, 1, 2, 8]",
        ),
        (
            "dlse",
            &[1, 2],
            "dlse: expected [1, 1, 3, 1], got [1, 1, 2, 1]",
        ),
        ("dlse", &[1, 1, 3, 1], "dlse: expected 1, 2 or 3 axes"),
        (
            "sinks",
            &[2, 3],
            "sinks: expected one axis, got shape [2, 3]",
        ),
    ] {
        let count = shape.iter().product();
        let tensors: Vec<_> = qkv
            .into_iter()
            .chain([(name, shape, &data[..count])])
            .collect();
        write(&file, &tensors);
        let text = error(&["compare", &file, "--backward", "--backends", "cpu"]);
        assert!(text.contains(expected), "{text}");
    }
}

/// A pass must not hide that nothing was judged, or that the bound lets everything pass.
#[test]
fn what_a_pass_does_not_say_is_noted() {
    let common = ["compare", REAL, "--backends", "cpu", "--repeat", "1"];
    let with = |more: &[&'static str]| [&common[..], more].concat();
    let vacuous = stdout(&with(&["--ignore", "o,lse", "--softmax-scale", "1e7"]), 0);
    assert!(
        vacuous.contains("the bound is as large as the outputs"),
        "{vacuous}"
    );
    let needed = error(&with(&["--ignore", "q"]));
    assert!(needed.contains("--ignore q"), "{needed}");
    let lse_alone = stdout(&with(&["--ignore", "o"]), 0);
    assert!(
        lse_alone.contains("lse of the file is not compared"),
        "{lse_alone}"
    );
}

/// Like any file that a program writes: not private, as a temporary file would be.
#[cfg(unix)]
#[test]
fn written_files_have_ordinary_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (out, plain) = (dir.path().join("out.safetensors"), dir.path().join("plain"));
    stdout(
        &["run", REAL, "--backend", "cpu", "-o", out.to_str().unwrap()],
        0,
    );
    std::fs::write(&plain, "").unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&out), mode(&plain));
}
