//! Memory mapping: the only unsafe code of this crate.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut, MmapOptions};

/// A file's bytes, mapped read only. Clones share the mapping.
#[derive(Clone, Debug)]
pub struct Mapped(Option<Arc<Mmap>>);

impl Mapped {
    /// Maps a regular file.
    pub fn open(path: &Path) -> io::Result<Mapped> {
        // Asked before opening, because opening a pipe waits for its writer, and again of what was
        // opened.
        regular(&std::fs::metadata(path)?)?;
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        regular(&metadata)?;
        // Some systems refuse empty mappings.
        if metadata.len() == 0 {
            return Ok(Mapped(None));
        }
        // SAFETY: the mapping is read only and of the length that the file has now; its bytes are
        // only seen as `&[u8]` and as numbers, for which every bit pattern is valid. What cannot be
        // ruled out is that another process changes the file meanwhile. If it truncates it, the
        // kernel ends this process (SIGBUS) before anything wrong is read. If it rewrites it,
        // results change but no access leaves the mapping: headers, lengths and block tables are
        // copied into owned values before they are checked (`Tensor::to_i32`), and what stays in
        // the mapping (q, k, v, bias, mask) is data that no index is made of.
        let map = unsafe { MmapOptions::new().map(&file)? };
        Ok(Mapped(Some(Arc::new(map))))
    }
}

/// Refuses devices, pipes and the like, and says of a directory that it is one.
pub(super) fn regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(io::Error::from(io::ErrorKind::IsADirectory))
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.0.as_deref().map_or(&[], |map| map)
    }
}

/// `bytes` zero bytes of address space that take memory only where they are written.
///
/// # Errors
/// What the system says if the address space cannot be had.
pub fn zeroed(bytes: usize) -> io::Result<MmapMut> {
    MmapOptions::new().len(bytes).no_reserve_swap().map_anon()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_maps_to_no_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Mapped::open(file.path()).unwrap().as_ref().is_empty());
        assert!(Mapped::open(Path::new("/")).is_err());
    }

    #[test]
    fn untouched_address_space_is_zero() {
        let map = zeroed(1 << 33).unwrap();
        assert_eq!(map[(1 << 33) - 1], 0);
    }
}
