//! Container files: `files/manifest.json` and what it says of each.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::lanes::caught;
use super::report::{CaseReport, Run};
use super::verdict::Verdict;
use crate::container::{Container, ContainerError, Kind, Tensor};
use crate::memory::peak_extra_bytes;

#[derive(Deserialize)]
struct Manifest {
    schema: u32,
    files: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    file: String,
    kind: String,
    #[serde(default)]
    note: String,
    level: Option<String>,
    expect: Expect,
    #[serde(flatten)]
    tensor: Content,
    members: Option<BTreeMap<String, Content>>,
    max_alloc_bytes: Option<u64>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Expect {
    Ok,
    Error,
    OkOrError,
}

/// What a tensor should be.
#[derive(Default, Deserialize)]
struct Content {
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    /// In row-major order.
    values: Option<Vec<f64>>,
    /// Patterns of the elements, in hexadecimal.
    bits: Option<Vec<String>>,
}

/// Every file of the manifest.
///
/// # Errors
/// If the manifest is broken.
pub(super) fn run(path: &Path) -> Result<Vec<CaseReport>> {
    let name = path.display();
    let text = std::fs::read(path).with_context(|| name.to_string())?;
    let manifest: Manifest =
        serde_json::from_slice(&text).with_context(|| format!("{name}: bad manifest"))?;
    if manifest.schema != super::case::SCHEMA {
        bail!("{name}: schema {} is not known", manifest.schema);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    manifest
        .files
        .into_iter()
        .map(|entry| {
            let file = folder.join(&entry.file);
            if !file.is_file() {
                bail!("{name}: {} is missing", entry.file);
            }
            if entry.expect != Expect::Error && entry.members.is_none() && !entry.tensor.says() {
                bail!("{name}: nothing is expected of {}", entry.file);
            }
            let verdict = caught(|| verdict(&file, &entry));
            Ok(CaseReport {
                id: entry.file,
                op: "file".into(),
                kind: entry.kind,
                level: entry.level.unwrap_or_else(|| "must".into()),
                note: entry.note,
                runs: vec![Run::alone(verdict)],
            })
        })
        .collect()
}

fn verdict(file: &Path, entry: &Entry) -> Verdict {
    let (result, peak) = peak_extra_bytes(|| read(file, entry, None));
    if let Some(limit) = entry.max_alloc_bytes
        && peak > limit
    {
        return Verdict::Failed(format!("{peak} bytes were allocated, the limit is {limit}"));
    }
    match (entry.expect, result) {
        (Expect::Ok | Expect::OkOrError, Ok(Ok(()))) => Verdict::Passed,
        (Expect::Ok | Expect::OkOrError, Ok(Err(wrong))) => Verdict::Failed(wrong),
        (Expect::Ok, Err(error)) => Verdict::Failed(error.to_string()),
        (Expect::Error, Err(_)) => Verdict::Passed,
        (Expect::Error, Ok(_)) => Verdict::Failed("read without an error".into()),
        (Expect::OkOrError, Err(error)) => match raw_kind(entry, &error) {
            // Refused without being told what the bytes are; with it the values must be right.
            Some(kind) => match read(file, entry, Some(kind)) {
                Ok(Ok(())) => Verdict::Passed,
                Ok(Err(wrong)) => Verdict::Failed(wrong),
                Err(error) => Verdict::Failed(error.to_string()),
            },
            None => Verdict::Passed,
        },
    }
}

fn raw_kind(entry: &Entry, error: &ContainerError) -> Option<Kind> {
    let dtype = entry.tensor.dtype.as_deref()?;
    (error.fault.class() == "unsupported_dtype")
        .then(|| dtype.parse().ok())
        .flatten()
}

/// Reads every tensor of the file; whether they are as expected.
fn read(
    file: &Path,
    entry: &Entry,
    raw: Option<Kind>,
) -> Result<Result<(), String>, ContainerError> {
    let container = Container::open_as(file, raw)?;
    let tensors = container
        .names()
        .iter()
        .map(|name| container.tensor(name))
        .collect::<Result<Vec<_>, _>>()?;
    let Some(members) = &entry.members else {
        return Ok(match tensors.as_slice() {
            [tensor] => entry.tensor.compare(tensor),
            more => Err(format!("{} tensors, expected one", more.len())),
        });
    };
    if members.is_empty() && !tensors.is_empty() {
        return Ok(Err(format!("{} tensors, expected none", tensors.len())));
    }
    Ok(members.iter().try_for_each(|(name, content)| {
        let tensor = tensors.iter().find(|tensor| tensor.name() == name);
        let tensor = tensor.ok_or_else(|| format!("{name} is missing"))?;
        content.compare(tensor)
    }))
}

impl Content {
    /// Whether it says what the elements are.
    fn says(&self) -> bool {
        self.values.is_some() || self.bits.is_some()
    }

    fn compare(&self, tensor: &Tensor<'_>) -> Result<(), String> {
        let name = tensor.name();
        let wrong = |what: &str, got: String, expected: String| {
            Err(format!("{name}: {what} {got}, expected {expected}"))
        };
        if let Some(dtype) = &self.dtype
            && tensor.kind().name() != dtype
        {
            return wrong("dtype", tensor.kind().to_string(), dtype.clone());
        }
        if let Some(shape) = &self.shape
            && tensor.shape() != shape
        {
            return wrong(
                "shape",
                format!("{:?}", tensor.shape()),
                format!("{shape:?}"),
            );
        }
        let same = |a: &f64, b: &f64| a == b || (a.is_nan() && b.is_nan());
        if let Some(values) = &self.values {
            let got = tensor.to_f64();
            if got.len() != values.len() || !got.iter().zip(values).all(|(a, b)| same(a, b)) {
                return wrong("values", format!("{got:?}"), format!("{values:?}"));
            }
        }
        if let Some(bits) = &self.bits {
            let got = patterns(tensor);
            if &got != bits {
                return wrong("bits", format!("{got:?}"), format!("{bits:?}"));
            }
        }
        Ok(())
    }
}

/// Each element's bits in hexadecimal, the highest first.
fn patterns(tensor: &Tensor<'_>) -> Vec<String> {
    tensor
        .bytes()
        .chunks_exact(tensor.kind().size())
        .map(|element| {
            let mut bytes = element.to_vec();
            if cfg!(target_endian = "little") {
                bytes.reverse();
            }
            bytes.iter().map(|byte| format!("{byte:02x}")).collect()
        })
        .collect()
}
