//! What the tests of the command line share.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;
use tilewise_cli::container::{Container, Tensor, write_safetensors};

/// The binary, started in the workspace's root, with nothing of the caller's choice of backend.
pub(crate) fn tilewise() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewise"));
    command
        .current_dir(root())
        .env_remove("TILEWISE_BACKEND")
        .env_remove("NO_COLOR");
    command
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) const REAL: &str = "testdata/minilm_layer5_s196.safetensors";
pub(crate) const PACKED: &str = "testdata/minilm_layer3_packed.safetensors";

/// Runs `tilewise ARGS`, expecting this exit status; its stdout.
pub(crate) fn stdout(args: &[&str], status: i32) -> String {
    let output = tilewise().args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        output.status.code(),
        Some(status),
        "tilewise {args:?}\n{stdout}\n{stderr}"
    );
    stdout
}

/// Runs `tilewise ARGS --json`, expecting this exit status.
pub(crate) fn json(args: &[&str], status: i32) -> Value {
    let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&stdout(&args, status)).unwrap()
}

/// Runs `tilewise ARGS`, expecting an error: the one line it says.
pub(crate) fn error(args: &[&str]) -> String {
    let output = tilewise().args(args).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "tilewise {args:?}\n{stderr}");
    assert!(stderr.starts_with("error: "), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    stderr.trim_end().to_string()
}

/// Every row of a comparison that ran passed, there is at least one, and each is within its bound.
pub(crate) fn assert_passes(report: &Value) {
    let rows: Vec<&Value> = report["results"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["status"] == "ok")
        .collect();
    assert!(!rows.is_empty(), "{report:#}");
    for row in rows {
        assert_eq!(row["pass"], true, "{row:#}");
        assert!(row["max_abs_err"].as_f64() <= row["tolerance"].as_f64());
        assert!(row["lse_max_abs_err"].as_f64() <= row["lse_tolerance"].as_f64());
    }
}

/// A folder for the files of one test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    /// The path of a file in it, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_string()
    }

    /// Inputs made by `tilewise generate`.
    pub(crate) fn generate(&self, name: &str, args: &[&str]) -> String {
        let path = self.file(name);
        let args: Vec<&str> = ["generate", "-o", &path]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        stdout(&args, 0);
        path
    }
}

/// Row-major f32 values and shape of a tensor in a file.
pub(crate) fn read(path: &str, name: &str) -> (Vec<usize>, Vec<f32>) {
    let file = Container::open(Path::new(&root()).join(path)).unwrap();
    let tensor = file.tensor(name).unwrap();
    (tensor.shape().to_vec(), tensor.to_f32().unwrap())
}

/// Writes f32 tensors.
pub(crate) fn write(path: &str, tensors: &[(&str, &[usize], &[f32])]) {
    write_with(path, tensors, &BTreeMap::new());
}

/// Writes f32 tensors and header entries.
pub(crate) fn write_with(
    path: &str,
    tensors: &[(&str, &[usize], &[f32])],
    metadata: &BTreeMap<String, String>,
) {
    let tensors: Vec<Tensor<'_>> = tensors
        .iter()
        .map(|(name, shape, data)| Tensor::new(name, shape, data))
        .collect();
    write_safetensors(Path::new(path), &tensors, metadata).unwrap();
}

/// The bytes of a `.npy` file, written here from the format's description and not by the crate.
pub(crate) fn npy(descr: &str, fortran: bool, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let shape: Vec<String> = shape.iter().map(|n| format!("{n},")).collect();
    let fortran = if fortran { "True" } else { "False" };
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({}), }}",
        shape.concat()
    );
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// The bytes of a C-ordered f32 `.npy` file.
pub(crate) fn npy_f32(shape: &[usize], data: &[f32]) -> Vec<u8> {
    npy("<f4", false, shape, &le_bytes(data))
}

pub(crate) fn le_bytes(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// `data` of shape `[a, b, …]` with axes in the order `axes`.
pub(crate) fn transpose(shape: &[usize], data: &[f32], axes: &[usize]) -> (Vec<usize>, Vec<f32>) {
    let strides: Vec<usize> = (0..shape.len())
        .map(|axis| shape[axis + 1..].iter().product())
        .collect();
    let new_shape: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
    let mut out = Vec::with_capacity(data.len());
    for mut place in 0..data.len() {
        let mut from = 0;
        for (&axis, &size) in axes.iter().zip(&new_shape).rev() {
            from += place % size * strides[axis];
            place /= size;
        }
        out.push(data[from]);
    }
    (new_shape, out)
}
