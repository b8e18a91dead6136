//! The checked level's store of loaded kernels: each variant is found or compiled once per context.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::Ptx;
use tilewise_core::{Error, Result};

use crate::NAME;
use crate::cache::Store;
use crate::error::{driver, unavailable};
use crate::kernels::Variant;
use crate::nvrtc::{Nvrtc, native};

/// Loaded kernels of one context.
#[derive(Debug)]
pub struct Modules {
    context: Arc<CudaContext>,
    compute: i32,
    cache: Option<Store>,
    prebuilt: Option<Store>,
    nvrtc_at: Option<PathBuf>,
    nvrtc: OnceLock<std::result::Result<Nvrtc, String>>,
    /// What [`has_native`](Self::has_native) found.
    native: OnceLock<bool>,
    loaded: RwLock<HashMap<String, CudaFunction>>,
    /// What [`serves`](Self::serves) did not find.
    absent: RwLock<HashSet<String>>,
    /// A lock for each variant that was ever made, held meanwhile: threads which need the same one wait,
    /// others compile beside it.
    making: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

impl Modules {
    pub(crate) fn new(
        context: Arc<CudaContext>,
        compute: i32,
        cache: Option<Store>,
        prebuilt: Option<Store>,
        nvrtc_at: Option<PathBuf>,
    ) -> Modules {
        Modules {
            context,
            compute,
            cache,
            prebuilt,
            nvrtc_at,
            nvrtc: OnceLock::new(),
            native: OnceLock::new(),
            loaded: RwLock::default(),
            absent: RwLock::default(),
            making: Mutex::default(),
        }
    }

    /// The compiler, if there is one.
    pub fn nvrtc(&self) -> std::result::Result<&Nvrtc, &str> {
        self.nvrtc
            .get_or_init(|| Nvrtc::find(self.nvrtc_at.as_deref()))
            .as_ref()
            .map_err(String::as_str)
    }

    /// Number of kernels loaded so far.
    pub fn len(&self) -> usize {
        self.loaded
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Whether none is loaded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn known(&self, variant: &Variant) -> Option<CudaFunction> {
        self.loaded
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&variant.name)
            .cloned()
    }

    /// The kernel, ready to launch: loaded before, built ahead, cached on disk, or compiled now.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where it is nowhere and there is no compiler for it; [`Error::Backend`] where
    /// it does not compile or load.
    pub fn get(&self, variant: &Variant) -> Result<CudaFunction> {
        if let Some(function) = self.known(variant) {
            return Ok(function);
        }
        let turn = {
            let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(making.entry(variant.name.clone()).or_default())
        };
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = self.known(variant) {
            return Ok(function);
        }
        let function = self.make(variant)?;
        self.loaded
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(variant.name.clone(), function.clone());
        Ok(function)
    }

    /// Whether there is this kernel, in whose place another can serve. What once was nowhere stays so: the
    /// bits of a call do not change because somebody filled a folder meanwhile, and nobody looks again.
    ///
    /// # Errors
    /// As [`get`](Self::get), [`Error::Unavailable`] apart.
    pub(crate) fn serves(&self, variant: &Variant) -> Result<bool> {
        if self.known(variant).is_some() {
            return Ok(true);
        }
        let absent = |names: &HashSet<String>| names.contains(&variant.name);
        if absent(&self.absent.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(false);
        }
        match self.get(variant) {
            Ok(_) => Ok(true),
            Err(Error::Unavailable { reason, .. }) => {
                tracing::debug!(reason, "another kernel serves instead");
                let mut names = self.absent.write().unwrap_or_else(PoisonError::into_inner);
                names.insert(variant.name.clone());
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether kernels with the features of this chip alone may be found or made.
    pub(crate) fn has_native(&self) -> bool {
        // Asked at every call.
        *self.native.get_or_init(|| self.has_native_of(""))
    }

    /// The same of kernels whose names begin with `start`. Looks into the folder of those built ahead.
    pub(crate) fn has_native_of(&self, start: &str) -> bool {
        let native = native(self.compute);
        let ahead = self.prebuilt.as_ref();
        ahead.is_some_and(|folder| folder.names(start, &native))
            || self.nvrtc().is_ok_and(|nvrtc| nvrtc.supports(&native))
    }

    fn make(&self, variant: &Variant) -> Result<CudaFunction> {
        let started = std::time::Instant::now();
        let exact = native(self.compute);
        if let Some(prebuilt) = &self.prebuilt {
            // Code of the same major version and a lower minor one runs; PTX of any lower one does.
            let mut archs = vec![exact.clone(), format!("sm_{}", self.compute)];
            let major = self.compute / 10 * 10;
            archs.extend((major..self.compute).rev().map(|c| format!("sm_{c}")));
            archs.extend((80..=self.compute).rev().map(|c| format!("compute_{c}")));
            for arch in &archs {
                if let Some(image) = prebuilt.load(variant, arch, None) {
                    return self.load(variant, image, arch);
                }
            }
        }
        let nvrtc = match self.nvrtc() {
            Ok(nvrtc) => nvrtc,
            Err(reason) => {
                let place = match &self.prebuilt {
                    Some(store) => format!("not in {}", store.folder().display()),
                    None => format!("{} is not set", crate::cache::KERNELS_SETTING),
                };
                return Err(Error::Unavailable {
                    backend: NAME.into(),
                    reason: format!(
                        "kernel {} is not built ahead for {exact} ({place}), and {reason}",
                        variant.name
                    ),
                });
            }
        };
        let arch = nvrtc.target(self.compute);
        if !variant.compiles_for(&arch) {
            return Err(unavailable(
                NAME,
                format!(
                    "kernel {} needs more than {arch}, all that {nvrtc} compiles for",
                    variant.name
                ),
            ));
        }
        let version = Some(nvrtc.version());
        if let Some(cache) = &self.cache
            && let Some(image) = cache.load(variant, &arch, version)
        {
            return self.load(variant, image, &arch);
        }
        let compiled = variant
            .compile(nvrtc, &arch)
            .map_err(|message| Error::Backend {
                backend: NAME.into(),
                op: format!("compiling {} for {arch}", variant.name),
                message,
            })?;
        tracing::debug!(kernel = %variant.name, %arch, ms = started.elapsed().as_millis(), "compiled");
        if let Some(cache) = &self.cache
            && let Err(error) = cache.save(variant, &arch, version, &compiled.image)
        {
            tracing::warn!(folder = %cache.folder().display(), %error, "a kernel could not be kept");
        }
        self.load(variant, compiled.image, &arch)
    }

    fn load(&self, variant: &Variant, mut image: Vec<u8>, arch: &str) -> Result<CudaFunction> {
        if arch.starts_with("compute_") {
            image.push(0); // PTX is read as a C string
        }
        let module = self
            .context
            .load_module(Ptx::from_binary(image))
            .map_err(|e| driver(&format!("loading {}", variant.name), e))?;
        let function = module
            .load_function(variant.entry)
            .map_err(|e| driver(&format!("finding {}", variant.entry), e))?;
        if variant.shared > 48 * 1024 {
            function
                .set_attribute(
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    variant.shared as i32,
                )
                .map_err(|e| driver("cuFuncSetAttribute", e))?;
        }
        if matches!(variant.entry, "tw_split" | "tw_decode_merge") {
            // A multiprocessor divides its memory between cache and shared memory for all blocks it has: these
            // kernels run beside others that take most of it as shared memory, and must agree.
            function
                .set_attribute(
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    100,
                )
                .map_err(|e| driver("cuFuncSetAttribute", e))?;
        }
        Ok(function)
    }
}
