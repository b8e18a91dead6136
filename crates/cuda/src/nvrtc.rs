//! NVRTC, the run-time compiler: found wherever a toolkit or pip put it, opened by path.
//!
//! Own bindings of its ten functions: cudarc's look only on the loader's path and panic where the
//! library is missing. No GPU is needed to compile.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

use crate::kernels::compute_of;
use crate::probe::symbol;

/// The setting that names the library or its folder.
pub const SETTING: &str = "TILEWISE_NVRTC";

/// Where to get one.
const REMEDY: &str = "pip install nvidia-cuda-nvrtc brings it; no GPU is needed";

type Program = *mut c_void;

/// An open NVRTC.
pub struct Nvrtc {
    // Order of drop does not matter for the functions, but the builtins must outlive the library's use.
    _builtins: Option<libloading::Library>,
    _library: libloading::Library,
    path: PathBuf,
    version: (i32, i32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    archs: Vec<i32>,
}

/// What a compilation gave.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code for a real architecture, PTX text for a virtual one.
    pub image: Vec<u8>,
    /// The compiler's remarks.
    pub log: String,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc")
            .field("version", &self.version)
            .field("path", &self.path)
            .finish()
    }
}

impl fmt::Display for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "NVRTC {}.{} ({})",
            self.version.0,
            self.version.1,
            self.path.display()
        )
    }
}

impl Nvrtc {
    /// Opens the first NVRTC found: `given` (a library or its folder), then the setting
    /// `TILEWISE_NVRTC`, then the loader's path, toolkits and Python environments.
    ///
    /// # Errors
    /// Where it was looked for and what went wrong. A place that was named and has none is an
    /// error; it is not passed over.
    pub fn find(given: Option<&Path>) -> Result<Nvrtc, String> {
        let named = given
            .map(Path::to_path_buf)
            .or_else(|| std::env::var_os(SETTING).map(PathBuf::from));
        if let Some(place) = named {
            let file = if place.is_dir() {
                library_in(&place)
                    .ok_or_else(|| format!("no NVRTC: none in {} ({REMEDY})", place.display()))?
            } else {
                place
            };
            return Nvrtc::open(&file);
        }
        let mut tried = Vec::new();
        for name in loader_names() {
            match Nvrtc::open(Path::new(&name)) {
                Ok(found) => return Ok(found),
                Err(reason) => tried.push(reason),
            }
        }
        for folder in usual_places() {
            if let Some(file) = library_in(&folder) {
                match Nvrtc::open(&file) {
                    Ok(found) => return Ok(found),
                    Err(reason) => tracing::debug!(%reason, "an NVRTC that cannot be used"),
                }
            }
        }
        Err(format!(
            "no NVRTC: neither on the loader's path nor in a CUDA toolkit or Python environment; \
             {SETTING} names the library or its folder ({REMEDY})"
        ))
    }

    /// Opens this library.
    ///
    /// # Errors
    /// If it cannot be loaded or lacks a function.
    pub fn open(path: &Path) -> Result<Nvrtc, String> {
        // NVRTC opens its builtins by soname, which the loader finds only on its own path or among
        // what is already open: so open them first from the folder they share.
        let builtins = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .and_then(|folder| find_file(folder, "libnvrtc-builtins.so."))
            // SAFETY: a data library of the same distribution; its initialisers do nothing else.
            .and_then(|file| unsafe { libloading::Library::new(file) }.ok());
        // SAFETY: opening NVRTC runs its initialisers, which are made for being loaded by any
        // process.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|e| format!("no NVRTC: {} cannot be loaded: {e}", path.display()))?;
        // SAFETY: the types are those of nvrtc.h; the functions are kept together with the library.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                symbol(&library, "nvrtcVersion")?;
            let (mut major, mut minor) = (0, 0);
            if version(&mut major, &mut minor) != 0 {
                return Err(format!("no NVRTC: {} does not answer", path.display()));
            }
            let number: unsafe extern "C" fn(*mut c_int) -> c_int =
                symbol(&library, "nvrtcGetNumSupportedArchs")?;
            let supported: unsafe extern "C" fn(*mut c_int) -> c_int =
                symbol(&library, "nvrtcGetSupportedArchs")?;
            let mut count = 0;
            let mut archs = Vec::new();
            if number(&mut count) == 0 && count > 0 {
                archs = vec![0; count as usize];
                if supported(archs.as_mut_ptr()) != 0 {
                    archs.clear();
                }
            }
            Ok(Nvrtc {
                create: symbol(&library, "nvrtcCreateProgram")?,
                compile: symbol(&library, "nvrtcCompileProgram")?,
                destroy: symbol(&library, "nvrtcDestroyProgram")?,
                log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
                log: symbol(&library, "nvrtcGetProgramLog")?,
                cubin_size: symbol(&library, "nvrtcGetCUBINSize")?,
                cubin: symbol(&library, "nvrtcGetCUBIN")?,
                ptx_size: symbol(&library, "nvrtcGetPTXSize")?,
                ptx: symbol(&library, "nvrtcGetPTX")?,
                _builtins: builtins,
                _library: library,
                path: path.to_path_buf(),
                version: (major, minor),
                archs,
            })
        }
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The library's file, or the name by which the loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it makes code for `arch`: `sm_90a`, `compute_80`, …
    pub fn supports(&self, arch: &str) -> bool {
        knows(&self.archs, self.version, arch)
    }

    /// What it is asked to compile for a chip of compute capability major × 10 + minor: with the features of
    /// that chip alone where it knows them; PTX of an earlier one, which the driver finishes, where it is
    /// older than the chip.
    pub fn target(&self, compute: i32) -> String {
        target(&self.archs, self.version, compute)
    }

    /// Compiles `source` for `arch`: `sm_90a` gives a cubin, `compute_80` PTX.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(
        &self,
        source: &str,
        arch: &str,
        options: &[String],
    ) -> Result<Compiled, String> {
        let text = CString::new(source).map_err(|_| "the source holds a NUL".to_owned())?;
        let options: Vec<CString> = std::iter::once(format!("--gpu-architecture={arch}"))
            .chain(options.iter().cloned())
            .map(|option| CString::new(option).map_err(|_| "an option holds a NUL".to_owned()))
            .collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all pointers are to live C strings and to locals of the types nvrtc.h gives;
        // buffers have the sizes that the preceding size calls reported. NVRTC allows concurrent
        // use with a program each.
        unsafe {
            if (self.create)(
                &mut program,
                text.as_ptr(),
                c"tilewise.cu".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            ) != 0
            {
                return Err("nvrtcCreateProgram failed".into());
            }
            let code = (self.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let read = |size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
                        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int|
             -> Option<Vec<u8>> {
                let mut len = 0;
                if size(program, &mut len) != 0 {
                    return None;
                }
                let mut bytes = vec![0u8; len.max(1)];
                (get(program, bytes.as_mut_ptr().cast()) == 0).then_some(bytes)
            };
            let mut log = read(self.log_size, self.log).unwrap_or_default();
            log.retain(|&byte| byte != 0);
            let log = String::from_utf8_lossy(&log).into_owned();
            let image = if code != 0 {
                Err(format!("NVRTC error {code}: {log}"))
            } else if arch.starts_with("sm_") {
                read(self.cubin_size, self.cubin).ok_or_else(|| "nvrtcGetCUBIN failed".to_owned())
            } else {
                read(self.ptx_size, self.ptx)
                    .map(|mut text| {
                        text.retain(|&byte| byte != 0);
                        text
                    })
                    .ok_or_else(|| "nvrtcGetPTX failed".to_owned())
            };
            (self.destroy)(&mut program);
            Ok(Compiled { image: image?, log })
        }
    }
}

/// Architecture with all that a chip can do.
pub(crate) fn native(compute: i32) -> String {
    match compute {
        90 => "sm_90a".into(),
        other => format!("sm_{other}"),
    }
}

/// Compilers list compute capabilities without the letters that stand for the features of one chip (`a`)
/// or one family of chips (`f`, since 12.9). Hopper's `a` is older than 12.1, but kernels for it add four
/// floats in memory at once, which PTX knows since then.
fn knows(archs: &[i32], version: (i32, i32), arch: &str) -> bool {
    let Some(compute) = compute_of(arch).filter(|compute| archs.contains(compute)) else {
        return false;
    };
    match arch.chars().next_back() {
        Some('a') => compute >= 90 && version >= (12, 1),
        Some('f') => compute >= 100 && version >= (12, 9),
        _ => true,
    }
}

fn target(archs: &[i32], version: (i32, i32), compute: i32) -> String {
    let exact = [native(compute), format!("sm_{compute}")];
    if let Some(arch) = exact.iter().find(|arch| knows(archs, version, arch)) {
        return arch.clone();
    }
    match archs.iter().filter(|&&arch| arch <= compute).max() {
        Some(lower) => format!("compute_{lower}"),
        None => native(compute),
    }
}

fn loader_names() -> Vec<String> {
    if cfg!(windows) {
        ["130_0", "120_0"]
            .iter()
            .map(|v| format!("nvrtc64_{v}.dll"))
            .collect()
    } else {
        [".13", ".12", ""]
            .iter()
            .map(|v| format!("libnvrtc.so{v}"))
            .collect()
    }
}

/// The highest-numbered file whose name begins so.
fn find_file(folder: &Path, start: &str) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(start) && !name.contains(".alt."))
        })
        .collect();
    found.sort();
    found.pop()
}

fn library_in(folder: &Path) -> Option<PathBuf> {
    let start = if cfg!(windows) {
        "nvrtc64_"
    } else {
        "libnvrtc.so"
    };
    find_file(folder, start)
}

/// Folders in which toolkits and pip put the library.
fn usual_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
        if let Some(root) = std::env::var_os(name).map(PathBuf::from) {
            places.push(root.join("lib64"));
            places.push(root.join("bin"));
        }
    }
    places.push("/usr/local/cuda/lib64".into());
    places.extend(
        subfolders(Path::new("/usr/local"), "cuda-")
            .into_iter()
            .rev()
            .map(|root| root.join("lib64")),
    );
    let mut roots: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|name| std::env::var_os(name).map(PathBuf::from))
        .collect();
    if let Some(conda) = std::env::var_os("CONDA_PREFIX").map(PathBuf::from) {
        places.push(conda.join("lib"));
    }
    // The environments of the Pythons on the path.
    for folder in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
        if folder.join("python3").exists()
            && let Some(root) = folder.parent()
        {
            roots.push(root.to_path_buf());
        }
    }
    if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
        roots.push(home.join(".local"));
    }
    roots.push("/usr/local".into());
    roots.push("/usr".into());
    for root in roots {
        let lib = root.join("lib");
        let mut pythons = subfolders(&lib, "python3");
        pythons.reverse();
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.join(packages).join("nvidia");
                places.push(nvidia.join("cu13").join("lib"));
                places.push(nvidia.join("cuda_nvrtc").join("lib"));
            }
        }
    }
    places
}

fn subfolders(folder: &Path, start: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(start))
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_has_none_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let reason = Nvrtc::find(Some(folder.path())).unwrap_err();
        assert!(reason.contains(&folder.path().display().to_string()));
        let file = folder.path().join("libnvrtc.so.99");
        std::fs::write(&file, b"not a library").unwrap();
        let reason = Nvrtc::find(Some(folder.path())).unwrap_err();
        assert!(reason.contains("libnvrtc.so.99"), "{reason}");
    }

    /// The lists are those of the releases.
    #[test]
    fn a_compiler_is_asked_for_what_it_knows() {
        let eleven = [
            35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90,
        ];
        let twelve = [50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90];
        let of = |archs: &[i32], version, compute| target(archs, version, compute);
        // 11.8 lists 90 and refuses sm_90a; 12.0's has no red.v4.
        assert_eq!(of(&eleven, (11, 8), 90), "sm_90");
        assert_eq!(of(&twelve, (12, 0), 90), "sm_90");
        assert_eq!(of(&twelve, (12, 1), 90), "sm_90a");
        assert_eq!(of(&twelve, (12, 0), 80), "sm_80");
        // Younger chips than the compiler, and an older one.
        assert_eq!(of(&twelve, (12, 0), 100), "compute_90");
        assert_eq!(of(&[75, 80, 86], (11, 1), 90), "compute_86");
        assert_eq!(of(&[90, 100], (13, 0), 80), "sm_80");
        assert!(!knows(&eleven, (11, 8), "sm_90a") && knows(&eleven, (11, 8), "compute_90"));
        assert!(knows(&[90, 100], (12, 9), "sm_100f") && !knows(&[90, 100], (12, 8), "sm_100f"));
        assert!(!knows(&twelve, (12, 0), "sm_80a") && !knows(&twelve, (12, 0), "sm90"));
    }
}
