//! `.npz`: a zip archive of `.npy` files, stored or deflated.

use std::borrow::Cow;
use std::io::{Cursor, Read};
use std::path::Path;

use zip::ZipArchive;

use super::error::{ContainerError, Fault};
use super::mapped::Mapped;
use super::npy::Header;
use super::tensor::{Kind, Tensor};

const SUFFIX: &str = ".npy";
/// Longest piece by which memory grows ahead of the bytes that fill it.
const STEP: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct File {
    archive: ZipArchive<Cursor<Mapped>>,
    names: Vec<String>,
    raw: Option<Kind>,
}

/// How many entries the archive's last record announces; `None` if that is not where it should be, or if there are more
/// than it can say.
fn listed(bytes: &[u8], comment: &[u8]) -> Option<usize> {
    /// Length of the record before the comment, and where in it the count stands.
    const RECORD: usize = 22;
    const COUNT: usize = 10;
    let start = bytes.len().checked_sub(RECORD + comment.len())?;
    let record = bytes
        .get(start..)
        .filter(|r| r.starts_with(b"PK\x05\x06"))?;
    let count = u16::from_le_bytes([record[COUNT], record[COUNT + 1]]);
    (count != u16::MAX).then(|| count.into())
}

impl File {
    pub(super) fn open(
        path: &Path,
        map: Mapped,
        raw: Option<Kind>,
    ) -> Result<File, ContainerError> {
        let archive = ZipArchive::new(Cursor::new(map.clone()))
            .map_err(|e| ContainerError::new(path, Fault::BadArchive(e.to_string())))?;
        let mut names = Vec::with_capacity(archive.len());
        for name in archive.file_names() {
            let name =
                name.map_err(|e| ContainerError::new(path, Fault::BadArchive(e.to_string())))?;
            names.extend(name.strip_suffix(SUFFIX).map(str::to_owned));
        }
        names.sort_unstable();
        // Of two entries of one name the library knows the last.
        let listed = listed(map.as_ref(), archive.comment());
        if let Some(listed) = listed.filter(|&listed| listed > archive.len()) {
            return Err(ContainerError::new(
                path,
                Fault::BadArchive(format!(
                    "{listed} entries of {} names: one name appears twice",
                    archive.len()
                )),
            ));
        }
        Ok(File {
            archive,
            names,
            raw,
        })
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    pub(super) fn tensor(&self, path: &Path, name: &str) -> Result<Tensor<'_>, ContainerError> {
        self.read(path, name)
            .map_err(|fault| ContainerError::of(path, name, fault))
    }

    fn read(&self, path: &Path, name: &str) -> Result<Tensor<'_>, Fault> {
        if !self.names.iter().any(|known| known == name) {
            return Err(super::missing(&self.names));
        }
        // Clones share the mapping; each reads at a position of its own.
        let mut archive = self.archive.clone();
        let mut member = archive
            .by_name(&format!("{name}{SUFFIX}"))
            .map_err(|e| Fault::BadArchive(e.to_string()))?;
        // The announced size is not believed: memory grows with the bytes that arrive. What
        // arrives beyond the array's own size is not read.
        let announced = member.size();
        let mut bytes = Vec::with_capacity(announced.min(STEP) as usize);
        let fault = |e: std::io::Error| Fault::BadArchive(e.to_string());
        member
            .by_ref()
            .take(STEP)
            .read_to_end(&mut bytes)
            .map_err(fault)?;
        let header = Header::parse(&bytes, self.raw)?;
        let wanted = header.file_len().saturating_add(1);
        let more = wanted.saturating_sub(bytes.len() as u64);
        member.take(more).read_to_end(&mut bytes).map_err(fault)?;
        header.tensor(path, name, Cow::Owned(bytes))
    }
}
