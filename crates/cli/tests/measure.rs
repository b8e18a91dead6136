//! `bench`, `devices` and the worker of benchmark harnesses.

mod common;

use common::*;
use serde_json::{Value, json};

const SHAPES: [&str; 6] = [
    "bench",
    "--backends",
    "cpu",
    "--shapes",
    "1,2,1,sq=16..64*2,sk=sq,8:16,causal",
    "--repeat",
];

fn bench(extra: &[&str]) -> Vec<&'static str> {
    let mut args: Vec<&'static str> = SHAPES.to_vec();
    args.push("2");
    for &arg in extra {
        args.push(Box::leak(arg.to_string().into_boxed_str()));
    }
    args
}

#[test]
fn bench_measures_every_combination() {
    let args = bench(&[
        "--algorithms",
        "fa2,standard",
        "--dtype",
        "f32,bf16",
        "--threads",
        "1,2",
    ]);
    let report = json(&args, 0);
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 6 * 2 * 2 * 2);
    for row in rows {
        let ms = row["median_ms"].as_f64().unwrap();
        let [hq, s, d] = ["hq", "sq", "d"].map(|name| row["shape"][name].as_f64().unwrap());
        let flops = 4.0 * hq * (s * (s + 1.0) / 2.0) * d;
        assert!((row["gflops"].as_f64().unwrap() / (flops / ms / 1e6) - 1.0).abs() < 1e-9);
        let bytes = s * 2.0 * d * if row["dtype"] == "f32" { 4.0 } else { 2.0 };
        assert!((row["gbps"].as_f64().unwrap() / (bytes / ms / 1e6) - 1.0).abs() < 1e-9);
        assert_eq!(row["samples_ms"].as_array().unwrap().len(), 2);
        assert!(row["min_ms"].as_f64() <= row["median_ms"].as_f64());
    }
    assert_eq!(rows[0]["shape"]["text"], "1,2,1,16,16,8,causal");
    assert_eq!(rows.last().unwrap()["threads"], 2);
}

#[test]
fn bench_poses_windows_packed_sequences_biases_and_masks() {
    let rows = |extra: &[&str]| -> Vec<Value> {
        let mut args = vec!["bench", "--backends", "cpu", "--repeat", "1"];
        args.extend(["--algorithms", "fa2"]);
        args.extend(extra);
        json(&args, 0)["results"].as_array().unwrap().clone()
    };
    // Live pairs of every head, from the figures.
    let pairs = |row: &Value| {
        let number = |x: &Value| x.as_f64().unwrap();
        let [hq, d] = ["hq", "d"].map(|name| number(&row["shape"][name]));
        number(&row["gflops"]) * number(&row["median_ms"]) * 1e6 / (4.0 * hq * d)
    };
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
    // Rows of 1, 2, … 8 keys, then of 8.
    let window = rows(&["--shapes", "1,2,2,32,32,8,causal", "--window-left", "7"]);
    near(pairs(&window[0]), 36.0 + 24.0 * 8.0);
    assert_eq!(window[0]["shape"]["options"], "window-left=7");
    assert_eq!(window[0]["shape"]["text"], "1,2,2,32,32,8,causal");
    // Sequences of 3, 5 and 8.
    let packed = rows(&["--shapes", "3,2,1,8,8,8", "--packed"]);
    near(pairs(&packed[0]), 9.0 + 36.0 + 64.0);
    assert_eq!(packed[0]["shape"]["options"], "packed");
    let all = rows(&[
        "--shapes",
        "2,2,2,16,24,8",
        "--bias",
        "--mask",
        "--softcap",
        "5",
        "--alibi",
        "--dtype",
        "f32,bf16",
    ]);
    assert_eq!(all.len(), 2);
    for row in &all {
        near(pairs(row), 2.0 * 16.0 * 24.0);
        assert_eq!(row["shape"]["options"], "softcap=5 alibi bias mask");
    }
    let mut args = bench(&["--algorithms", "fa2", "--bias"]);
    assert!(stdout(&args, 0).contains("1,2,1,16,16,8,causal bias"));
    args.push("--csv");
    for line in stdout(&args, 0).lines().skip(1) {
        assert!(line.ends_with(",bias"), "{line}");
    }
}

#[test]
fn bench_writes_csv_and_markdown() {
    let csv = stdout(&bench(&["--algorithms", "fa2", "--csv"]), 0);
    let mut lines = csv.lines();
    let columns = lines.next().unwrap().split(',').count();
    let rows: Vec<&str> = lines.collect();
    assert_eq!(rows.len(), 6);
    for row in rows {
        assert_eq!(row.split(',').count(), columns, "{row}");
        assert!(row.starts_with("1,2,1,"), "{row}");
    }
    let markdown = stdout(&bench(&["--algorithms", "fa2", "--markdown"]), 0);
    let table: Vec<&str> = markdown
        .lines()
        .filter(|line| line.starts_with('|'))
        .collect();
    assert_eq!(table.len(), 2 + 6);
    assert!(table[2].contains("1,2,1,16,16,8,causal"), "{}", table[2]);
}

#[test]
fn bench_relates_to_measured_ceilings() {
    let shapes = [
        "bench",
        "--backends",
        "cpu",
        "--algorithms",
        "fa2",
        "--repeat",
        "3",
        "--ceilings",
    ];
    let with = |extra: &[&'static str]| -> Vec<&'static str> {
        shapes.iter().chain(extra).copied().collect()
    };
    let report = json(
        &with(&["--shapes", "1,4,4,256,256,64", "1,4,1,1,4096,64"]),
        0,
    );
    let rows = report["results"].as_array().unwrap();
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        let fma = number("gflops") / number("fma_gflops");
        let read = number("gbps") / number("read_gbps");
        assert!(
            (number("ceiling_share") / fma.max(read) - 1.0).abs() < 1e-9,
            "{row:#}"
        );
        assert_eq!(row["ceiling"], if fma >= read { "fma" } else { "read" });
        assert!(number("ceiling_share") > 0.0);
    }
    let text = stdout(&with(&["--shapes", "1,1,1,64,64,64"]), 0);
    assert!(text.contains("of ceiling"), "{text}");
}

/// A GPU's ceilings are those of the instruction that the algorithm uses, and all are listed by name; where
/// there is none, it is still not replaced.
#[test]
fn bench_relates_a_gpu_to_its_own_ceilings() {
    let args = [
        "bench",
        "--backends",
        "cuda:0",
        "--algorithms",
        "fa2",
        "--dtype",
        "bf16,f32",
        "--ceilings",
        "--shapes",
        "1,16,16,4096,4096,64",
        "1,32,8,1,16384,128",
    ];
    let devices = json(&["devices"], 0);
    let mut backends = devices["backends"].as_array().unwrap().iter();
    if !backends.any(|one| one["name"] == "cuda:0" && one["available"] == true) {
        let text = error(&args);
        assert!(text.contains("cuda:0 is not available"), "{text}");
        return;
    }
    let report = json(&args, 0);
    let rows = report["results"].as_array().unwrap();
    let of = |row: &Value| row["ceiling"].as_str().unwrap().to_string();
    assert_eq!(of(&rows[1]), "mma.sync f16 / 3");
    assert_eq!((of(&rows[2]), of(&rows[3])), ("read".into(), "read".into()));
    for row in rows {
        let share = row["ceiling_share"].as_f64().unwrap();
        assert!(share > 0.02 && share < 1.05, "{row:#}");
    }
    let rate = |name: &str| {
        let mut all = report["ceilings"].as_array().unwrap().iter();
        let one = all
            .find(|one| one["name"] == name)
            .unwrap_or_else(|| panic!("{name}"));
        let figure = one["gflops"].as_f64().or(one["gbps"].as_f64());
        figure.unwrap_or_else(|| panic!("{one:#}"))
    };
    // bf16 and f16 are one pipe; tf32 is half of it, FFMA slower than either.
    let bf16 = rate("mma.sync bf16");
    assert!((rate("mma.sync f16") / bf16 - 1.0).abs() < 0.1);
    assert!((rate("mma.sync tf32") / bf16 - 0.5).abs() < 0.1);
    assert!(rate("FFMA f32") < bf16);
    let (read, copied) = (rate("device memory, read"), rate("device memory, copied"));
    assert!((copied / read - 1.0).abs() < 0.3, "{read} {copied}");
}

#[test]
fn bench_refuses_shapes_that_are_none() {
    let output = tilewise()
        .args(["bench", "--shapes", "1,2,3"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = tilewise()
        .args(["bench", "--threads", "99999"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = error(&["bench", "--backends", "cpu", "--shapes", "1,3,2,4,4,8"]);
    assert!(
        text.contains("1,3,2,4,4,8") && text.contains("num_heads"),
        "{text}"
    );
    // 2^48 bytes, which no address space has.
    let text = error(&[
        "bench",
        "--backends",
        "cpu",
        "--algorithms",
        "fa2",
        "--mask",
        "--shapes",
        "1,1,1,16777216,16777216,1",
    ]);
    assert!(text.contains("mask: no memory"), "{text}");
    // Refused at once, not after so many sequences have been listed.
    for shape in ["18446744073709551615,1,1,0,1,1", "9,1,1,1,4000000000,1"] {
        let text = error(&["bench", "--backends", "cpu", "--packed", "--shapes", shape]);
        assert!(text.contains("2^31"), "{text}");
    }
}

#[test]
fn devices_are_listed_with_status() {
    let devices = json(&["devices"], 0);
    let backends = devices["backends"].as_array().unwrap();
    let cpu = backends
        .iter()
        .find(|backend| backend["name"] == "cpu")
        .unwrap();
    assert_eq!(cpu["available"], true);
    for backend in backends {
        assert_eq!(
            backend["available"] == true,
            backend["reason"].is_null(),
            "{backend}"
        );
    }
    let isas = devices["isas"].as_array().unwrap();
    assert_eq!(isas.last().unwrap(), "portable");
    let text = stdout(&["devices"], 0);
    for isa in isas {
        assert!(text.contains(isa.as_str().unwrap()), "{text}");
    }
}

#[test]
fn the_peer_worker_speaks_the_harness_protocol() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "1,2,1,6,6,8"]);
    for name in ["q", "k", "v"] {
        let (_, data) = read(&inputs, name);
        std::fs::write(folder.file(&format!("{name}.f32")), le_bytes(&data)).unwrap();
    }
    let (_, q) = read(&inputs, "q");
    std::fs::write(folder.file("do.f32"), le_bytes(&q)).unwrap();
    let out = folder.file("o.f32");
    let dq = folder.file("dq.f32");
    let dir = folder.file("");
    let shape = json!({"b": 1, "hq": 2, "hkv": 1, "sq": 6, "sk": 6, "d": 8, "causal": true});
    let setup = |dtype: &str, backward: bool| {
        json!({"op": "setup", "contender": "tilewise-fa2", "shape": shape, "dtype": dtype, "dir": dir,
               "backward": backward})
    };
    let requests = [
        json!({"op": "hello"}),
        json!({"op": "run", "n": 1}),
        setup("f32", false),
        json!({"op": "run", "n": 3}),
        json!({"op": "output", "path": out}),
        setup("f32", true),
        json!({"op": "run", "n": 2}),
        json!({"op": "output", "path": dq}),
        setup("bf16", false),
        json!({"op": "run", "n": 1}),
        json!({"op": "free"}),
        json!({"op": "dance"}),
    ];
    let stdin: String = requests
        .iter()
        .map(|request| format!("{request}\n"))
        .collect();
    let output = tilewise()
        .arg("peer-worker")
        .write_stdin(stdin)
        .output()
        .unwrap();
    assert!(output.status.success());
    let answers: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(answers.len(), requests.len());
    assert_eq!(answers[0]["name"], "tilewise");
    let ok: Vec<bool> = answers[1..]
        .iter()
        .map(|answer| answer["ok"] == true)
        .collect();
    assert_eq!(
        ok,
        [
            false, true, true, true, true, true, true, true, true, true, false
        ]
    );
    assert_eq!(answers[3]["seconds"].as_array().unwrap().len(), 3);

    let reference = folder.file("ref.safetensors");
    stdout(
        &[
            "run",
            &inputs,
            "--causal",
            "--backend",
            "cpu",
            "-o",
            &reference,
        ],
        0,
    );
    let (_, expected) = read(&reference, "o");
    assert_eq!(std::fs::read(&out).unwrap(), le_bytes(&expected));

    let dq: Vec<f32> = std::fs::read(&dq)
        .unwrap()
        .chunks_exact(4)
        .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]))
        .collect();
    assert_eq!(dq.len(), 2 * 6 * 8);
    // The first row sees one key, whose weight is 1 whatever q is; the others see more.
    for head in dq.chunks(6 * 8) {
        assert!(head[..8].iter().all(|x| x.abs() < 1e-6), "{head:?}");
        assert!(
            head[8..]
                .chunks(8)
                .all(|row| row.iter().any(|x| x.abs() > 1e-4)),
            "{head:?}"
        );
    }
}

#[test]
fn the_backward_pass_is_timed() {
    let report = json(
        &[
            "bench",
            "--backward",
            "--shapes",
            "1,2,1,33,40,8",
            "--backends",
            "cpu",
            "--repeat",
            "2",
        ],
        0,
    );
    for row in report["results"].as_array().unwrap() {
        let ms = row["median_ms"].as_f64().unwrap();
        // Five products over 2 heads of 33 × 40 pairs.
        let flops = 2.0 * 5.0 * 8.0 * 2.0 * 33.0 * 40.0;
        let expected = flops / ms / 1e6;
        assert!(
            (row["gflops"].as_f64().unwrap() / expected - 1.0).abs() < 1e-6,
            "{row}"
        );
    }
}
