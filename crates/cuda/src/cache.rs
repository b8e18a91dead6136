//! Compiled kernels on disk: the cache that first uses fill, and folders built ahead of time.
//!
//! A file is the compiled image followed by one line with a key and the image's SHA-256. The key
//! covers source, options, architecture and, in the cache, the compiler's version; the hash guards
//! against torn and foreign files. Files appear by rename, so concurrent processes see whole ones
//! or none; whoever finds a bad one writes it anew.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::kernels::{Variant, hex};

/// The setting that names the cache folder; empty turns the cache off.
pub const CACHE_SETTING: &str = "TILEWISE_CACHE_DIR";
/// The setting that names a folder of kernels built ahead of time.
pub const KERNELS_SETTING: &str = "TILEWISE_KERNELS_DIR";

const MAGIC: &str = "\ntilewise-kernel-1 ";

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The folder, which need not exist yet.
    pub fn at(folder: impl Into<PathBuf>) -> Store {
        Store {
            folder: folder.into(),
        }
    }

    /// The cache: `TILEWISE_CACHE_DIR`, else the user's cache folder; `None` if there is neither.
    pub fn cache() -> Option<Store> {
        if let Some(folder) = std::env::var_os(CACHE_SETTING) {
            return (!folder.is_empty()).then(|| Store::at(folder));
        }
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
        Some(Store::at(base.join("tilewise").join("kernels")))
    }

    /// The folder that `TILEWISE_KERNELS_DIR` names.
    pub fn prebuilt() -> Option<Store> {
        std::env::var_os(KERNELS_SETTING)
            .filter(|folder| !folder.is_empty())
            .map(Store::at)
    }

    /// Where the folder is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, variant: &Variant, arch: &str, key: &str) -> PathBuf {
        let kind = if arch.starts_with("compute_") {
            "ptx"
        } else {
            "cubin"
        };
        self.folder
            .join(format!("{}.{arch}.{}.{kind}", variant.name, &key[..16]))
    }

    /// Whether a file is here that by its name is of a kernel whose name begins with `start`, for `arch`.
    pub(crate) fn names(&self, start: &str, arch: &str) -> bool {
        let part = format!(".{arch}.");
        let files = std::fs::read_dir(&self.folder).into_iter().flatten();
        files.flatten().any(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with(start) && name.contains(&part)
        })
    }

    /// The image of `variant` for `arch`, if it is here and whole.
    pub fn load(
        &self,
        variant: &Variant,
        arch: &str,
        compiler: Option<(i32, i32)>,
    ) -> Option<Vec<u8>> {
        let key = key(variant, arch, compiler);
        let path = self.path(variant, arch, &key);
        let mut file = std::fs::read(&path).ok()?;
        let tail = trailer(&key, &[]).len();
        let whole = file.len().checked_sub(tail).filter(|&len| {
            let (image, found) = file.split_at(len);
            found == trailer(&key, image).as_bytes()
        });
        match whole {
            Some(len) => {
                file.truncate(len);
                Some(file)
            }
            None => {
                tracing::warn!(path = %path.display(), "a cached kernel is damaged and is made anew");
                None
            }
        }
    }

    /// Keeps `image`.
    ///
    /// # Errors
    /// If the folder cannot be made or written.
    pub fn save(
        &self,
        variant: &Variant,
        arch: &str,
        compiler: Option<(i32, i32)>,
        image: &[u8],
    ) -> std::io::Result<PathBuf> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.folder)?;
        let key = key(variant, arch, compiler);
        let path = self.path(variant, arch, &key);
        let draft = self.folder.join(format!(
            ".{}-{}.tmp",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        let written = std::fs::File::create(&draft).and_then(|mut file| {
            file.write_all(image)?;
            file.write_all(trailer(&key, image).as_bytes())
        });
        written
            .and_then(|()| std::fs::rename(&draft, &path))
            .inspect_err(|_| {
                // The draft is of no use to anyone; that it cannot be removed changes nothing.
                let _ = std::fs::remove_file(&draft);
            })?;
        Ok(path)
    }
}

fn key(variant: &Variant, arch: &str, compiler: Option<(i32, i32)>) -> String {
    let compiler = compiler.map_or(String::new(), |(major, minor)| format!("{major}.{minor}"));
    hex(&[&variant.hash(), arch, &compiler])
}

fn trailer(key: &str, image: &[u8]) -> String {
    let mut line = format!("{MAGIC}{key} ");
    for byte in Sha256::digest(image) {
        line += &format!("{byte:02x}");
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Spec, fa2};
    use tilewise_core::DType;

    fn variant() -> Variant {
        let spec = Spec::plain(DType::BF16, 64);
        fa2::variant(&spec, 99 * 1024, false).unwrap()
    }

    #[test]
    fn what_is_saved_is_found_and_only_by_the_same_key() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path().join("deep").join("er"));
        let v = variant();
        assert_eq!(store.load(&v, "sm_80", None), None);
        assert!(!store.names("", "sm_80"));
        store.save(&v, "sm_80", Some((13, 0)), b"code").unwrap();
        assert!(store.names("", "sm_80") && store.names("fa2-", "sm_80"));
        assert!(!store.names("fa2-", "sm_8") && !store.names("hopper-", "sm_80"));
        assert_eq!(store.load(&v, "sm_80", Some((13, 0))).unwrap(), b"code");
        assert_eq!(store.load(&v, "sm_80", Some((12, 9))), None);
        assert_eq!(store.load(&v, "sm_90a", Some((13, 0))), None);
        assert_eq!(store.load(&v, "sm_80", None), None);
    }

    #[test]
    fn torn_and_foreign_files_are_ignored_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path());
        let v = variant();
        let path = store.save(&v, "sm_80", None, b"machine code").unwrap();
        let whole = std::fs::read(&path).unwrap();
        for damaged in [
            &whole[..whole.len() - 1],
            &whole[1..],
            b"",
            b"not ours at all",
        ] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(store.load(&v, "sm_80", None), None);
        }
        let mut flipped = whole.clone();
        flipped[3] ^= 1;
        std::fs::write(&path, &flipped).unwrap();
        assert_eq!(store.load(&v, "sm_80", None), None);
        store.save(&v, "sm_80", None, b"machine code").unwrap();
        assert_eq!(store.load(&v, "sm_80", None).unwrap(), b"machine code");
    }

    #[test]
    fn writers_at_once_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let v = variant();
        let image = vec![7u8; 1 << 16];
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let store = Store::at(folder.path());
                    for _ in 0..20 {
                        store.save(&v, "sm_80", None, &image).unwrap();
                        assert_eq!(store.load(&v, "sm_80", None).unwrap(), image);
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
