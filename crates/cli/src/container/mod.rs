//! Tensor files: `.safetensors`, `.npy` and `.npz`, mapped into memory and checked before use.
//!
//! A file is somebody else's: every number in its header is checked, with overflow, before
//! anything is allocated or sliced by it, and every fault is an error of one line that names the
//! file and what is wrong.

mod error;
#[allow(unsafe_code, reason = "memory mapping, the one place")]
pub mod mapped;
mod npy;
mod npz;
mod safetensors;
mod tensor;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use error::{ContainerError, Fault};
pub use npy::write_npy;
pub use safetensors::write_safetensors;
pub use tensor::{Kind, Plain, Tensor};

use mapped::Mapped;

/// An opened tensor file. Its header has been checked; data is read when asked for.
#[derive(Debug)]
pub struct Container {
    path: PathBuf,
    format: Format,
}

#[derive(Debug)]
enum Format {
    Safetensors(safetensors::File),
    Npy {
        map: Mapped,
        header: npy::Header,
        names: [String; 1],
    },
    Npz(npz::File),
}

impl Container {
    /// Opens a file by its extension, or by its first bytes if that is none of ours.
    ///
    /// # Errors
    /// [`ContainerError`], of one line.
    pub fn open(path: impl AsRef<Path>) -> Result<Container, ContainerError> {
        Container::open_as(path, None)
    }

    /// Like [`open`](Self::open). Two-byte raw elements (numpy's `V2`, as which bfloat16 is saved)
    /// are refused without `raw`, and taken for that type with it.
    ///
    /// # Errors
    /// [`ContainerError`], of one line.
    pub fn open_as(path: impl AsRef<Path>, raw: Option<Kind>) -> Result<Container, ContainerError> {
        let path = path.as_ref();
        let fail = |fault| ContainerError::new(path, fault);
        let map = Mapped::open(path).map_err(|e| fail(Fault::Io(e.to_string())))?;
        let format = match extension(path, map.as_ref()) {
            Some("safetensors") => Format::Safetensors(safetensors::File::open(path, map)?),
            Some("npy") => {
                let header = npy::Header::parse(map.as_ref(), raw).map_err(fail)?;
                let name = path
                    .file_stem()
                    .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
                // Everything that can be wrong is found now, not when the data is asked for.
                header.check_len(map.as_ref().len() as u64).map_err(fail)?;
                Format::Npy {
                    map,
                    header,
                    names: [name],
                }
            }
            Some("npz") => Format::Npz(npz::File::open(path, map, raw)?),
            _ => return Err(fail(Fault::UnknownFormat)),
        };
        Ok(Container {
            path: path.to_owned(),
            format,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the tensors, sorted. A `.npy` file holds one, named like the file without its
    /// extension.
    pub fn names(&self) -> &[String] {
        match &self.format {
            Format::Safetensors(file) => file.names(),
            Format::Npy { names, .. } => names,
            Format::Npz(file) => file.names(),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.names().iter().any(|known| known == name)
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`Fault::Missing`] if there is none of this name; whatever is wrong with it otherwise.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ContainerError> {
        let of = |fault| ContainerError::of(&self.path, name, fault);
        match &self.format {
            Format::Safetensors(file) => file.tensor(&self.path, name),
            Format::Npy { map, header, names } => {
                if names[0] != name {
                    return Err(of(missing(names)));
                }
                header
                    .tensor(&self.path, name, Cow::Borrowed(map.as_ref()))
                    .map_err(of)
            }
            Format::Npz(file) => file.tensor(&self.path, name),
        }
    }

    /// The tensor of this name, if there is one.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn optional(&self, name: &str) -> Result<Option<Tensor<'_>>, ContainerError> {
        self.contains(name).then(|| self.tensor(name)).transpose()
    }

    /// The text entries of a `.safetensors` header; empty for other formats.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        match &self.format {
            Format::Safetensors(file) => file.metadata(),
            _ => BTreeMap::new(),
        }
    }
}

/// Which format to read a file as.
fn extension(path: &Path, bytes: &[u8]) -> Option<&'static str> {
    let known = ["safetensors", "npy", "npz"];
    let given = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    if let Some(name) = known.iter().find(|name| given.eq_ignore_ascii_case(name)) {
        return Some(name);
    }
    if bytes.starts_with(npy::MAGIC) {
        Some("npy")
    } else if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"PK\x05\x06") {
        Some("npz")
    } else if bytes.get(8) == Some(&b'{') {
        Some("safetensors")
    } else {
        None
    }
}

fn missing(names: &[String]) -> Fault {
    const SHOWN: usize = 12;
    let shown: Vec<String> = names
        .iter()
        .take(SHOWN)
        .map(|name| format!("{name:?}"))
        .collect();
    Fault::Missing(match names.len() {
        0 => "none".to_owned(),
        n if n > SHOWN => format!("{} and {} more", shown.join(", "), n - SHOWN),
        _ => shown.join(", "),
    })
}

impl<'a> Tensor<'a> {
    /// A row-major tensor to be written.
    ///
    /// # Panics
    /// If `data` has another number of elements than `shape`: a mistake of the caller's.
    pub fn new<T: Plain>(name: &str, shape: &[usize], data: &'a [T]) -> Tensor<'a> {
        assert_eq!(
            shape.iter().product::<usize>(),
            data.len(),
            "elements of {name}"
        );
        Tensor {
            path: PathBuf::new(),
            name: name.to_owned(),
            kind: T::KIND,
            shape: shape.to_vec(),
            fortran: false,
            data: Cow::Borrowed(bytemuck::cast_slice(data)),
        }
    }
}
