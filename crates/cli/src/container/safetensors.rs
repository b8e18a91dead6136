//! `.safetensors`: an 8-byte length, a JSON header, data.
//!
//! The safetensors crate decides what is sound. A pass of our own goes before it, for three
//! reasons: the crate keeps the last of two tensors of one name without a word, it adds header
//! numbers without checking for overflow when it compares them with the file's length, and its
//! errors do not say which tensor is to blame.

use std::borrow::Cow;
use std::collections::HashSet;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, View};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};

use super::error::{ContainerError, Fault};
use super::mapped::{Mapped, regular};
use super::tensor::{Kind, Tensor, checked_bytes, swap_bytes};

/// The longest header that the format's reference library reads.
const HEADER_LIMIT: u64 = 100_000_000;
const PREFIX: usize = 8;

#[derive(Debug)]
pub(super) struct File {
    map: Mapped,
    data_start: usize,
    metadata: Metadata,
    names: Vec<String>,
}

impl File {
    pub(super) fn open(path: &Path, map: Mapped) -> Result<File, ContainerError> {
        let bytes = map.as_ref();
        let header = header(bytes).map_err(|fault| ContainerError::new(path, fault))?;
        let data_len = (bytes.len() - PREFIX - header.len()) as u64;
        inspect(path, header, data_len)?;
        let (header_len, metadata) = SafeTensors::read_metadata(bytes)
            .map_err(|e| ContainerError::new(path, Fault::BadHeader(e.to_string())))?;
        let mut names = metadata.offset_keys();
        names.sort_unstable();
        Ok(File {
            data_start: PREFIX + header_len,
            map,
            metadata,
            names,
        })
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        self.metadata
            .metadata()
            .iter()
            .flatten()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    }

    pub(super) fn tensor(&self, path: &Path, name: &str) -> Result<Tensor<'_>, ContainerError> {
        let of = |fault| ContainerError::of(path, name, fault);
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| of(super::missing(&self.names)))?;
        let kind = kind(info.dtype).ok_or_else(|| {
            of(Fault::UnsupportedDtype {
                dtype: info.dtype.to_string(),
                hint: "",
            })
        })?;
        let (start, end) = info.data_offsets;
        let mut data = Cow::Borrowed(&self.map.as_ref()[self.data_start..][start..end]);
        if cfg!(target_endian = "big") {
            swap_bytes(data.to_mut(), kind.size());
        }
        Ok(Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            kind,
            shape: info.shape.clone(),
            fortran: false,
            data,
        })
    }
}

/// The header's bytes.
fn header(bytes: &[u8]) -> Result<&[u8], Fault> {
    let (prefix, rest) = bytes
        .split_first_chunk::<PREFIX>()
        .ok_or(Fault::HeaderTooSmall(bytes.len()))?;
    let announced = u64::from_le_bytes(*prefix);
    if announced > HEADER_LIMIT {
        return Err(Fault::HeaderTooLarge {
            bytes: announced,
            limit: HEADER_LIMIT,
        });
    }
    // Below the limit, so it fits any usize.
    rest.get(..announced as usize).ok_or(Fault::Truncated {
        what: "the header",
        needed: announced,
        available: rest.len() as u64,
    })
}

/// One tensor as the header describes it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's entries in their order, repeated names included.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Walk;
        impl<'de> Visitor<'de> for Walk {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Walk)
    }
}

/// Finds what is wrong and says with which tensor.
fn inspect(path: &Path, header: &[u8], data_len: u64) -> Result<(), ContainerError> {
    let Entries(mut entries) = serde_json::from_slice(header).map_err(|e| {
        ContainerError::new(path, Fault::BadHeader(e.to_string().replace('\n', " ")))
    })?;
    let mut seen = HashSet::with_capacity(entries.len());
    for (name, entry) in &entries {
        let of = |fault| Err(ContainerError::of(path, name, fault));
        if !seen.insert(name) {
            return of(Fault::DuplicateKey);
        }
        let known: Result<Dtype, _> = serde_json::from_value(entry.dtype.clone().into());
        let Ok(dtype) = known else {
            return of(Fault::UnsupportedDtype {
                dtype: entry.dtype.clone(),
                hint: "",
            });
        };
        let (start, end) = entry.data_offsets;
        if end < start {
            return of(Fault::BadOffsets(format!("[{start}, {end}] run backwards")));
        }
        // Eight elements of the narrowest (sub-byte) types at a time, so in bits.
        let bits = checked_bytes(&entry.shape, dtype.bitsize())
            .map_err(|fault| ContainerError::of(path, name, fault))?;
        if bits.div_ceil(8) != end - start {
            return of(Fault::ShapeMismatch {
                shape: entry.shape.clone(),
                dtype: entry.dtype.clone(),
                needed: bits.div_ceil(8),
                available: end - start,
            });
        }
        if end > data_len {
            return of(Fault::Truncated {
                what: "the data",
                needed: end,
                available: data_len,
            });
        }
    }
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut covered = 0;
    for (name, entry) in &entries {
        let (start, end) = entry.data_offsets;
        if start != covered {
            return Err(ContainerError::of(
                path,
                name,
                Fault::BadOffsets(format!(
                    "[{start}, {end}] should start at {covered}, where the tensor before ends"
                )),
            ));
        }
        covered = end;
    }
    if covered != data_len {
        return Err(ContainerError::new(
            path,
            Fault::TrailingData(data_len - covered),
        ));
    }
    Ok(())
}

fn kind(dtype: Dtype) -> Option<Kind> {
    Some(match dtype {
        Dtype::F64 => Kind::F64,
        Dtype::F32 => Kind::F32,
        Dtype::F16 => Kind::F16,
        Dtype::BF16 => Kind::BF16,
        Dtype::I64 => Kind::I64,
        Dtype::I32 => Kind::I32,
        Dtype::I16 => Kind::I16,
        Dtype::I8 => Kind::I8,
        Dtype::U64 => Kind::U64,
        Dtype::U32 => Kind::U32,
        Dtype::U16 => Kind::U16,
        Dtype::U8 => Kind::U8,
        Dtype::BOOL => Kind::Bool,
        _ => return None,
    })
}

fn dtype(kind: Kind) -> Dtype {
    match kind {
        Kind::F64 => Dtype::F64,
        Kind::F32 => Dtype::F32,
        Kind::F16 => Dtype::F16,
        Kind::BF16 => Dtype::BF16,
        Kind::I64 => Dtype::I64,
        Kind::I32 => Dtype::I32,
        Kind::I16 => Dtype::I16,
        Kind::I8 => Dtype::I8,
        Kind::U64 => Dtype::U64,
        Kind::U32 => Dtype::U32,
        Kind::U16 => Dtype::U16,
        Kind::U8 => Dtype::U8,
        Kind::Bool => Dtype::BOOL,
    }
}

struct Written<'a>(&'a Tensor<'a>);

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        dtype(self.0.kind)
    }

    fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut data = Cow::Borrowed(&self.0.data[..]);
        if cfg!(target_endian = "big") {
            swap_bytes(data.to_mut(), self.0.kind.size());
        }
        data
    }

    fn data_len(&self) -> usize {
        self.0.data.len()
    }
}

/// Writes row-major tensors, widest element type first, then by name, as the format's own library
/// does: every tensor is aligned and the bytes do not depend on the order given.
///
/// A link is followed. What is there and no regular file is left as it is.
///
/// # Errors
/// [`Fault::Io`], also for a device or a pipe; [`Fault::DuplicateKey`]; [`Fault::Type`] for column-major tensors.
pub fn write_safetensors(
    path: &Path,
    tensors: &[Tensor<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), ContainerError> {
    let mut seen = HashSet::new();
    for tensor in tensors {
        if tensor.fortran && tensor.shape.len() > 1 {
            return Err(ContainerError::of(
                path,
                &tensor.name,
                Fault::Type {
                    expected: "row-major order",
                    got: "column-major order",
                },
            ));
        }
        if !seen.insert(&tensor.name) {
            return Err(ContainerError::of(path, &tensor.name, Fault::DuplicateKey));
        }
    }
    let metadata: Option<HashMap<_, _>> =
        (!metadata.is_empty()).then(|| metadata.clone().into_iter().collect());
    let views = tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), Written(tensor)));
    // The library writes a private temporary file beside the target and renames it: a device would be
    // gone, and so would a link. Opening the target first names the right file if that cannot be, and
    // gives it the permissions of any new file.
    let io = |e: std::io::Error| ContainerError::new(path, Fault::Io(e.to_string()));
    let target = replaceable(path).map_err(io)?;
    let permissions = std::fs::metadata(&target).map_err(io)?.permissions();
    safetensors::serialize_to_file(views, metadata, &target)
        .map_err(|e| ContainerError::new(path, Fault::Io(e.to_string())))?;
    std::fs::set_permissions(&target, permissions).map_err(io)
}

/// The regular file that `path` leads to, made if there is nothing.
fn replaceable(path: &Path) -> std::io::Result<PathBuf> {
    // Asked before opening: a pipe would wait for its reader.
    if let Ok(metadata) = std::fs::metadata(path) {
        regular(&metadata)?;
    }
    let mut open = std::fs::OpenOptions::new();
    regular(&open.create(true).append(true).open(path)?.metadata()?)?;
    std::fs::canonicalize(path)
}
