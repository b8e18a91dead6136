//! What can be wrong with a tensor file, in one line that names the file and the fault.

use std::fmt;
use std::path::{Path, PathBuf};

/// A file that cannot be read as tensors, or a tensor that cannot be had from it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}{fault}", path.display(), Member(member))]
pub struct ContainerError {
    /// The file.
    pub path: PathBuf,
    /// The tensor inside the file, if one is to blame.
    pub member: Option<String>,
    /// What is wrong.
    pub fault: Fault,
}

impl ContainerError {
    pub(super) fn new(path: &Path, fault: Fault) -> Self {
        ContainerError {
            path: path.to_owned(),
            member: None,
            fault,
        }
    }

    pub(super) fn of(path: &Path, member: &str, fault: Fault) -> Self {
        ContainerError {
            path: path.to_owned(),
            member: Some(member.to_owned()),
            fault,
        }
    }
}

struct Member<'a>(&'a Option<String>);

impl fmt::Display for Member<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // Debug form: a hostile name must not break the line or the terminal.
            Some(name) => write!(f, "tensor {name:?}: "),
            None => Ok(()),
        }
    }
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The operating system could not open, map or write it.
    #[error("{0}")]
    Io(String),
    /// Neither the extension nor the first bytes tell a known format.
    #[error("not a .safetensors, .npy or .npz file")]
    UnknownFormat,
    /// The first bytes are not those of the format.
    #[error("does not start as a {expected} file does")]
    BadMagic {
        /// The format that the extension promises.
        expected: &'static str,
    },
    /// A format version that no document describes.
    #[error("format version {major}.{minor} is not known (1.0, 2.0 and 3.0 are)")]
    UnsupportedVersion {
        /// First version byte.
        major: u8,
        /// Second version byte.
        minor: u8,
    },
    /// Elements of a type that is not read.
    #[error("element type {dtype} is not read{hint}")]
    UnsupportedDtype {
        /// As the file spells it.
        dtype: String,
        /// What to do about it: empty, or text that starts with a separator.
        hint: &'static str,
    },
    /// The header cannot be understood.
    #[error("bad header: {0}")]
    BadHeader(String),
    /// Shorter than the shortest header.
    #[error("the file has {0} bytes, too few for a header")]
    HeaderTooSmall(usize),
    /// The announced header is longer than any sound one.
    #[error("a header of {bytes} bytes is announced, more than the limit of {limit}")]
    HeaderTooLarge {
        /// As announced.
        bytes: u64,
        /// As documented.
        limit: u64,
    },
    /// The file ends early.
    #[error("truncated: {needed} bytes announced for {what}, {available} present")]
    Truncated {
        /// What ends early.
        what: &'static str,
        /// Bytes announced.
        needed: u64,
        /// Bytes present.
        available: u64,
    },
    /// Bytes that belong to nothing.
    #[error("{0} bytes after the end of the data")]
    TrailingData(u64),
    /// One name, two tensors.
    #[error("the name appears twice")]
    DuplicateKey,
    /// Data ranges that overlap, leave holes or run backwards.
    #[error("bad offsets: {0}")]
    BadOffsets(String),
    /// Shape and number of bytes contradict each other.
    #[error("shape {shape:?} of {dtype} needs {needed} bytes, {available} are given")]
    ShapeMismatch {
        /// As the file gives it.
        shape: Vec<u64>,
        /// As the file spells it.
        dtype: String,
        /// Bytes that the shape asks for.
        needed: u64,
        /// Bytes that the offsets span.
        available: u64,
    },
    /// The number of bytes is beyond what can be counted.
    #[error("shape {0:?} has more bytes than can be counted")]
    SizeOverflow(Vec<u64>),
    /// The archive is damaged, encrypted or compressed by a method that is not read.
    #[error("bad archive: {0}")]
    BadArchive(String),
    /// No tensor of this name.
    #[error("no such tensor (the file holds {0})")]
    Missing(String),
    /// The tensor is of another type than the one asked for.
    #[error("expected {expected}, got {got}")]
    Type {
        /// What would have been right.
        expected: &'static str,
        /// What the file holds.
        got: &'static str,
    },
    /// A value does not fit the type it is wanted in.
    #[error("{value} does not fit {target}")]
    Range {
        /// The value.
        value: String,
        /// The type wanted.
        target: &'static str,
    },
}

impl Fault {
    /// The family of the fault, in the words of the conformance manifest.
    pub fn class(&self) -> &'static str {
        match self {
            Fault::Io(_) => "io",
            Fault::UnknownFormat | Fault::BadMagic { .. } => "bad_magic",
            Fault::UnsupportedVersion { .. } => "unsupported_version",
            Fault::UnsupportedDtype { .. } => "unsupported_dtype",
            Fault::BadHeader(_) => "bad_header",
            Fault::HeaderTooSmall(_) => "header_too_small",
            Fault::HeaderTooLarge { .. } => "header_too_large",
            Fault::Truncated { .. } => "truncated",
            Fault::TrailingData(_) => "trailing_data",
            Fault::DuplicateKey => "duplicate_key",
            Fault::BadOffsets(_) => "bad_offsets",
            Fault::ShapeMismatch { .. } => "shape_mismatch",
            Fault::SizeOverflow(_) => "size_overflow",
            Fault::BadArchive(_) => "bad_archive",
            Fault::Missing(_) => "missing",
            Fault::Type { .. } => "type",
            Fault::Range { .. } => "range",
        }
    }
}
