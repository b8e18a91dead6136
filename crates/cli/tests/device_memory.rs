//! `--device-memory`: a bound on a GPU's memory, and nothing to any other backend.

mod common;

use common::*;

/// K and V take 4.4 MiB; a rowful of q and a chunk of one head fit the budget.
const SHAPE: [&str; 4] = ["--shape", "1,6,3,100,3000,128", "--dtype", "bf16"];
const BUDGET: [&str; 2] = ["--device-memory", "900KiB"];

fn available(backend: &str) -> bool {
    let devices = json(&["devices"], 0);
    let backends = devices["backends"].as_array().unwrap();
    let mut known = backends.iter().filter(|one| one["name"] == backend);
    known.any(|one| one["available"] == true)
}

/// On a GPU keys and values are streamed within it, and nothing differs; where there is none, a backend
/// asked for by name is still not replaced.
#[test]
fn a_gpu_streams_within_it() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &SHAPE);
    let compare = [
        &["compare", &inputs, "--causal", "--algorithms", "fa2"][..],
        &["--backends", "cuda:0", "--repeat", "1"],
        &BUDGET,
    ]
    .concat();
    let out = folder.file("out.safetensors");
    let run = [
        &["run", &inputs, "--backend", "cuda:0", "-o", &out][..],
        &BUDGET,
    ]
    .concat();
    if available("cuda:0") {
        assert_passes(&json(&compare, 0));
        stdout(&run, 0);
        assert_eq!(read(&out, "o").0, [1, 6, 100, 128]);
        return;
    }
    for args in [compare, run] {
        let text = error(&args);
        assert!(text.contains("backend cuda:0 is not available: "), "{text}");
    }
    assert!(!std::path::Path::new(&out).exists());
}

/// A budget that nothing fits into changes nothing on the CPU.
#[test]
fn the_cpu_knows_no_such_bound() {
    let folder = Folder::new();
    let inputs = folder.generate("in.safetensors", &["--shape", "1,4,2,37,90,16"]);
    let outputs = [&[][..], &["--device-memory", "1KiB"]].map(|extra| {
        let out = folder.file("out.safetensors");
        let args = ["run", &inputs, "--backend", "cpu", "-o", &out];
        stdout(&[&args[..], extra].concat(), 0);
        (read(&out, "o").1, read(&out, "lse").1)
    });
    let bits = |(o, lse): &(Vec<f32>, Vec<f32>)| (le_bytes(o), le_bytes(lse));
    assert_eq!(bits(&outputs[0]), bits(&outputs[1]));
    let compare = ["compare", &inputs, "--backends", "cpu", "--repeat", "1"];
    assert_passes(&json(
        &[&compare[..], &["--device-memory", "1KiB"]].concat(),
        0,
    ));
}

#[test]
fn what_is_no_size_is_refused() {
    for size in ["", "lots", "1 parsec"] {
        for command in ["run", "compare"] {
            let output = tilewise()
                .args([command, REAL, "--device-memory", size])
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(2), "{command} {size}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains("--device-memory"), "{said}");
        }
    }
}
