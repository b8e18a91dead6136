//! Formats, layouts and memory orders: the same numbers, however they lie in files.

mod common;

use std::io::Write;

use common::*;

/// q, k, v of [2, 3, 7, 8] / [2, 3, 11, 8], and what `run` makes of them.
struct Sample {
    folder: Folder,
    tensors: [(&'static str, Vec<usize>, Vec<f32>); 3],
    o: Vec<f32>,
}

impl Sample {
    fn new() -> Self {
        Self::of("2,3,3,7,11,8")
    }

    fn of(shape: &str) -> Self {
        let folder = Folder::new();
        let inputs = folder.generate("inputs.safetensors", &["--shape", shape, "--seed", "5"]);
        let tensors = ["q", "k", "v"].map(|name| {
            let (shape, data) = read(&inputs, name);
            (name, shape, data)
        });
        let o = run(&folder, &[&inputs]).1;
        Sample { folder, tensors, o }
    }

    /// Writes each tensor as a `.npy` file.
    fn npys(&self, bytes: impl Fn(&[usize], &[f32]) -> Vec<u8>) -> [String; 3] {
        self.tensors.each_ref().map(|(name, shape, data)| {
            let path = self.folder.file(&format!("{name}.npy"));
            std::fs::write(&path, bytes(shape, data)).unwrap();
            path
        })
    }

    /// `compare` passes on these arguments, and `run` gives the same o as from the plain file.
    fn assert_same(&self, args: &[&str]) -> Vec<usize> {
        let compare: Vec<&str> = ["compare", "--backends", "cpu", "--repeat", "1"]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        assert_passes(&json(&compare, 0));
        let (shape, o) = run(&self.folder, args);
        let mut wide = shape.clone();
        let mut o = o;
        if args.contains(&"bshd") {
            let axes: &[usize] = if shape.len() == 4 {
                &[0, 2, 1, 3]
            } else {
                &[1, 0, 2]
            };
            (wide, o) = transpose(&shape, &o, axes);
        }
        assert_eq!(o.len(), self.o.len(), "{wide:?}");
        for (a, b) in o.iter().zip(&self.o) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        shape
    }
}

/// o of `tilewise run`.
fn run(folder: &Folder, args: &[&str]) -> (Vec<usize>, Vec<f32>) {
    let out = folder.file("out.safetensors");
    let args: Vec<&str> = ["run", "--backend", "cpu", "-o", &out]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    stdout(&args, 0);
    read(&out, "o")
}

#[test]
fn three_npy_files() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(npy_f32);
    assert_eq!(sample.assert_same(&[&q, &k, &v]), [2, 3, 7, 8]);
}

#[test]
fn fortran_order() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(|shape, data| {
        let reversed: Vec<usize> = (0..shape.len()).rev().collect();
        let (_, data) = transpose(shape, data, &reversed);
        npy("<f4", true, shape, &le_bytes(&data))
    });
    sample.assert_same(&[&q, &k, &v]);
}

#[test]
fn big_endian_and_f64() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(|shape, data| {
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_be_bytes()).collect();
        npy(">f4", false, shape, &bytes)
    });
    sample.assert_same(&[&q, &k, &v]);
    let [q, k, v] = sample.npys(|shape, data| {
        let bytes: Vec<u8> = data
            .iter()
            .flat_map(|&x| f64::from(x).to_le_bytes())
            .collect();
        npy("<f8", false, shape, &bytes)
    });
    sample.assert_same(&[&q, &k, &v]);
}

#[test]
fn bshd_layout() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(|shape, data| {
        let (shape, data) = transpose(shape, data, &[0, 2, 1, 3]);
        npy_f32(&shape, &data)
    });
    assert_eq!(
        sample.assert_same(&[&q, &k, &v, "--layout", "bshd"]),
        [2, 7, 3, 8]
    );
}

#[test]
fn three_axes_and_two() {
    let sample = Sample::of("1,3,3,7,11,8");
    let [q, k, v] = sample.npys(|shape, data| npy_f32(&shape[1..], data));
    assert_eq!(sample.assert_same(&[&q, &k, &v]), [3, 7, 8]);
    let [q, k, v] = sample.npys(|shape, data| {
        let (shape, data) = transpose(&shape[1..], data, &[1, 0, 2]);
        npy_f32(&shape, &data)
    });
    assert_eq!(
        sample.assert_same(&[&q, &k, &v, "--layout", "bshd"]),
        [7, 3, 8]
    );

    let sample = Sample::of("1,1,1,7,11,8");
    let [q, k, v] = sample.npys(|shape, data| npy_f32(&shape[2..], data));
    assert_eq!(sample.assert_same(&[&q, &k, &v]), [7, 8]);
}

#[test]
fn npz_stored_and_deflated() {
    let sample = Sample::new();
    for (name, method) in [
        ("stored.npz", zip::CompressionMethod::Stored),
        ("deflated.npz", zip::CompressionMethod::Deflated),
    ] {
        let path = sample.folder.file(name);
        let mut archive = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        for (name, shape, data) in &sample.tensors {
            archive.start_file(format!("{name}.npy"), options).unwrap();
            archive.write_all(&npy_f32(shape, data)).unwrap();
        }
        archive.finish().unwrap();
        sample.assert_same(&[&path]);
    }
}

#[test]
fn names_can_be_set() {
    let sample = Sample::new();
    let path = sample.folder.file("named.safetensors");
    let [(_, qs, q), (_, ks, k), (_, vs, v)] = &sample.tensors;
    write(&path, &[("query", qs, q), ("key", ks, k), ("value", vs, v)]);
    sample.assert_same(&[&path, "--name", "q=query,k=key", "--name", "v=value"]);
    let text = error(&["compare", &path, "--name", "q=queries"]);
    assert!(
        text.contains("queries") && text.contains("\"query\""),
        "{text}"
    );
}

#[test]
fn masks_and_biases_beside_npy_files() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(npy_f32);
    let mask: Vec<u8> = (0..7 * 11).map(|n| u8::from(n % 3 != 0)).collect();
    let mask_file = sample.folder.file("m.npy");
    std::fs::write(&mask_file, npy("|b1", false, &[7, 11], &mask)).unwrap();
    let bias: Vec<f32> = mask
        .iter()
        .map(|&visible| if visible == 1 { 0.0 } else { f32::NEG_INFINITY })
        .collect();
    let bias_file = sample.folder.file("b.npy");
    std::fs::write(&bias_file, npy_f32(&[1, 1, 7, 11], &bias)).unwrap();

    let masked = format!("mask={mask_file}");
    let biased = format!("bias={bias_file}");
    let report = json(
        &[
            "compare",
            &q,
            &k,
            &v,
            &masked,
            "--backends",
            "cpu",
            "--repeat",
            "1",
        ],
        0,
    );
    assert_passes(&report);
    assert_eq!(report["problem"]["mask"], true);
    let by_mask = run(&sample.folder, &[&q, &k, &v, &masked]).1;
    let by_bias = run(&sample.folder, &[&q, &k, &v, &biased]).1;
    assert_ne!(by_mask, sample.o);
    for (a, b) in by_mask.iter().zip(&by_bias) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
    // A float mask is nobody's boolean mask.
    let text = error(&["compare", &q, &k, &v, &format!("mask={bias_file}")]);
    assert!(text.contains("b.npy: mask: expected bools"), "{text}");
}

/// A path need not be text; the JSON that names it must.
#[cfg(target_os = "linux")]
#[test]
fn paths_that_are_no_text_are_read_and_written() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    let odd = |name: &[u8]| {
        let mut path = std::ffi::OsString::from(folder.file(""));
        path.push(std::ffi::OsStr::from_bytes(name));
        path
    };
    let (inputs, out) = (odd(b"\xff.safetensors"), odd(b"\xfe.safetensors"));
    let run = |args: &[&str], paths: &[&std::ffi::OsStr]| {
        let output = tilewise().args(args).args(paths).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    run(
        &["generate", "--shape", "1,1,1,2,3,4", "--json", "-o"],
        &[&inputs],
    );
    let text = run(
        &["run", "--backend", "cpu", "--json", "-o"],
        &[&out, &inputs],
    );
    assert!(
        text["output"]
            .as_str()
            .unwrap()
            .ends_with("\u{fffd}.safetensors")
    );
    // A name that is no text names no backend: it is not passed over as if nothing had been asked for.
    for (variable, backend) in [
        ("TILEWISE_BACKEND", &[][..]),
        ("TILEWISE_ISA", &["--backend", "cpu"]),
    ] {
        let output = tilewise()
            .env(variable, std::ffi::OsStr::from_bytes(b"\xff"))
            .arg("run")
            .args(backend)
            .arg("-o")
            .args([&out, &inputs])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{variable}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(variable), "{text}");
    }
}

#[test]
fn mixed_dtypes_are_refused_unless_rounding_is_asked_for() {
    let sample = Sample::new();
    let [q, k, v] = sample.npys(npy_f32);
    let (_, shape, data) = &sample.tensors[1];
    let wide: Vec<u8> = data
        .iter()
        .flat_map(|&x| f64::from(x).to_le_bytes())
        .collect();
    std::fs::write(&k, npy("<f8", false, shape, &wide)).unwrap();
    let text = error(&["compare", &q, &k, &v]);
    assert!(
        text.contains("k.npy") && text.contains("expected f32, got f64"),
        "{text}"
    );
    sample.assert_same(&[&q, &k, &v, "--dtype", "f32"]);
}

#[test]
fn packed_inputs_are_generated_and_pass() {
    let folder = Folder::new();
    let inputs = folder.generate(
        "packed.safetensors",
        &["--shape", "1,4,2,20,31,16", "--packed", "3:9,0:4,16:17"],
    );
    let report = json(
        &[
            "compare",
            &inputs,
            "--backends",
            "cpu",
            "--repeat",
            "1",
            "--causal",
        ],
        0,
    );
    assert_passes(&report);
    assert_eq!(report["problem"]["packed_sequences"], 3);
    let text = error(&[
        "generate",
        "--shape",
        "1,1,1,4,4,8",
        "--packed",
        "3,2",
        "-o",
        &folder.file("x.safetensors"),
    ]);
    assert!(text.contains("lengths add up to 5"), "{text}");
}

/// What is written is safetensors whatever its name: under that of another kind no command would read it.
#[test]
fn files_are_written_under_the_name_of_what_they_are() {
    let folder = Folder::new();
    let inputs = folder.generate("x.safetensors", &["--shape", "1,1,1,2,3,4"]);
    for name in ["x.npz", "x.npy", "x", "safetensors", ".safetensors"] {
        let out = folder.file(name);
        for args in [
            &["generate", "--shape", "1,1,1,2,3,4", "-o", &out][..],
            &["run", &inputs, "--backend", "cpu", "-o", &out],
        ] {
            let said = error(args);
            assert!(said.ends_with("a name that ends in .safetensors"), "{said}");
            assert!(!std::path::Path::new(&out).exists(), "{out}");
        }
    }
    let out = folder.file("X.SafeTensors");
    stdout(&["generate", "--shape", "1,1,1,2,3,4", "-o", &out], 0);
    stdout(&["compare", &out, "--backends", "cpu", "--repeat", "1"], 0);
}

#[test]
fn generated_inputs_follow_from_the_seed() {
    let folder = Folder::new();
    let shape = ["--shape", "1,2,1,3,4,8,5", "--seed"];
    let bytes = |name: &str, seed: &str| {
        let args: Vec<&str> = shape.iter().copied().chain([seed]).collect();
        std::fs::read(folder.generate(name, &args)).unwrap()
    };
    assert_eq!(bytes("a.safetensors", "1"), bytes("b.safetensors", "1"));
    assert_ne!(bytes("a.safetensors", "1"), bytes("c.safetensors", "2"));
    let (shape, v) = read(&folder.file("a.safetensors"), "v");
    assert_eq!((shape, v.len()), (vec![1, 1, 4, 5], 20));
}

#[test]
fn run_says_what_ran_and_writes_lse() {
    let folder = Folder::new();
    let out = folder.file("out.safetensors");
    let report = json(
        &[
            "run",
            REAL,
            "--backend",
            "cpu",
            "--algorithm",
            "fa1",
            "-o",
            &out,
        ],
        0,
    );
    assert_eq!(report["backend"], "cpu");
    assert_eq!(report["algorithm"], "fa1");
    let ((shape, lse), (_, expected)) = (read(&out, "lse"), read(REAL, "lse"));
    assert_eq!(shape, [1, 12, 196]);
    for (a, b) in lse.iter().zip(&expected) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
    let text = error(&["run", REAL, "--backend", "cuda:77", "-o", &out]);
    assert!(text.contains("cuda:77"), "{text}");
    let text = error(&["run", REAL, "-o", "out.npy"]);
    assert!(text.contains(".safetensors"), "{text}");
}
