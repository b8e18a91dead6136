//! The files on the command line, as one set of named tensors.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use tilewise::DType;

use crate::args::tensors::{TENSORS, TensorArgs};
use crate::container::{Container, Kind, Tensor};

/// Opened input files.
pub(super) struct Source<'a> {
    args: &'a TensorArgs,
    /// One file that holds everything, if there is one.
    whole: Option<Container>,
    /// Files that hold one tensor each.
    single: Vec<(String, Container)>,
}

impl<'a> Source<'a> {
    pub(super) fn open(args: &'a TensorArgs) -> Result<Self> {
        let mut source = Source {
            args,
            whole: None,
            single: Vec::new(),
        };
        // numpy knows no bf16: its two raw bytes are taken for it only if the user says so.
        let raw = (args.read.dtype == Some(DType::BF16)).then_some(Kind::BF16);
        let mut unnamed = Vec::new();
        for input in &args.inputs {
            match named(input) {
                Some((tensor, file)) => source.add(tensor, Container::open_as(file, raw)?)?,
                None => unnamed.push(input),
            }
        }
        match unnamed.as_slice() {
            [] => {}
            [file] if !is_npy(file) => source.whole = Some(Container::open_as(file, raw)?),
            [q, k, v] if [q, k, v].into_iter().all(|file| is_npy(file)) => {
                for (tensor, file) in ["q", "k", "v"].into_iter().zip([q, k, v]) {
                    source.add(tensor, Container::open_as(file, raw)?)?;
                }
            }
            files => bail!(
                "expected one .safetensors or .npz file, or three .npy files (q, k, v), got {}",
                files
                    .iter()
                    .map(|file| file.display().to_string())
                    .collect::<Vec<_>>()
                    .join(" ")
            ),
        }
        Ok(source)
    }

    fn add(&mut self, tensor: &str, file: Container) -> Result<()> {
        if file.names().len() != 1 {
            bail!(
                "{}: expected one tensor for {tensor}, the file holds {}",
                file.path().display(),
                file.names().len()
            );
        }
        if self.single.iter().any(|(known, _)| known == tensor) {
            bail!("{}: {tensor} is given twice", file.path().display());
        }
        self.single.push((tensor.to_string(), file));
        Ok(())
    }

    /// Whether the tensor is to be left aside.
    fn ignored(&self, tensor: &str) -> bool {
        self.args.read.ignore.iter().any(|name| name == tensor)
    }

    /// The tensor, if a file holds it and it is not to be left aside.
    ///
    /// # Errors
    /// If it cannot be read, or was given a name that the file does not hold.
    pub(super) fn optional(&self, tensor: &str) -> Result<Option<Tensor<'_>>> {
        if self.ignored(tensor) {
            return Ok(None);
        }
        if let Some((_, file)) = self.single.iter().find(|(known, _)| known == tensor) {
            return Ok(Some(file.tensor(&file.names()[0])?));
        }
        let Some(whole) = &self.whole else {
            return Ok(None);
        };
        let name = self.args.read.name_of(tensor);
        if name != tensor {
            // Asked for by name, so its absence is no accident to pass over.
            return Ok(Some(whole.tensor(name)?));
        }
        Ok(whole.optional(name)?)
    }

    /// The tensor, which must be there.
    pub(super) fn required(&self, tensor: &str) -> Result<Tensor<'_>> {
        if self.ignored(tensor) {
            bail!("--ignore {tensor}: attention needs it");
        }
        if let Some(found) = self.optional(tensor)? {
            return Ok(found);
        }
        match &self.whole {
            // The container's own error names the file and what it holds.
            Some(whole) => {
                let name = self.args.read.name_of(tensor);
                whole.tensor(name).map_err(|error| {
                    anyhow!(
                        "{error}; --name {tensor}=NAME reads {tensor} from a tensor of that name"
                    )
                })
            }
            None => bail!("{tensor}: no file given for it (say {tensor}=FILE.npy)"),
        }
    }

    /// One text entry of the file's header.
    pub(super) fn metadata(&self, key: &str) -> Option<String> {
        self.whole.as_ref()?.metadata().remove(key)
    }

    /// The files, for reports.
    pub(super) fn describe(&self) -> Vec<String> {
        self.args
            .inputs
            .iter()
            .map(|path| path.display().to_string())
            .collect()
    }

    /// The file that an error about `tensor` is about.
    pub(super) fn file_of(&self, tensor: &str) -> String {
        let single = self.single.iter().find(|(known, _)| known == tensor);
        match single.map(|(_, file)| file).or(self.whole.as_ref()) {
            Some(file) => file.path().display().to_string(),
            None => self.describe().join(" "),
        }
    }
}

/// `TENSOR=FILE`.
fn named(input: &Path) -> Option<(&str, PathBuf)> {
    let (tensor, file) = input.to_str()?.split_once('=')?;
    TENSORS.contains(&tensor).then(|| (tensor, file.into()))
}

fn is_npy(file: &Path) -> bool {
    file.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("npy"))
}
