//! What the tests on a GPU share.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Mutex, OnceLock};

use tilewise_core::Element;
use tilewise_cuda::{CudaBackend, CudaOptions};

/// The first GPU, opened once; `None` where there is none, said once a test.
pub(crate) fn gpu(test: &str) -> Option<CudaBackend> {
    static GPU: OnceLock<Result<CudaBackend, String>> = OnceLock::new();
    match GPU.get_or_init(|| CudaBackend::new(0).map_err(|e| e.to_string())) {
        Ok(backend) => Some(backend.clone()),
        Err(reason) => {
            assert!(
                std::env::var_os("TILEWISE_REQUIRE_GPU").is_none(),
                "{test} needs a GPU: {reason}"
            );
            static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
            if SAID.lock().unwrap().insert(test.to_owned()) {
                // Not through eprintln: the test harness would hide it.
                let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
            }
            None
        }
    }
}

/// The first GPU with kernels that every chip can run.
pub(crate) fn portable(test: &str) -> Option<CudaBackend> {
    gpu(test)?;
    let options = CudaOptions {
        portable: Some(true),
        ..CudaOptions::default()
    };
    Some(CudaBackend::with(options).unwrap())
}

/// Reproducible values from −2 to 2, exact in no particular type.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 51) as f64 - 2.0
    }

    pub(crate) fn tensor<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| T::from_f64(self.next())).collect()
    }
}
