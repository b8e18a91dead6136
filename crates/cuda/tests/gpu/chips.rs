//! What a call says of the kernels that ran, and which tiles they walk.

use super::*;
use tilewise_cuda::cache::Store;
use tilewise_cuda::kernels::{Selection, Variant, list};
use tilewise_cuda::{CudaOptions, nvrtc::Nvrtc};

#[test]
fn a_streamed_call_runs_kernels_for_all_chips_and_says_so() {
    let Some(whole) = gpu("a_streamed_call_runs_kernels_for_all_chips_and_says_so") else {
        return;
    };
    let with = |options| CudaBackend::with(options).unwrap();
    let streaming = with(CudaOptions {
        device_memory: Some(1 << 20),
        ..CudaOptions::default()
    });
    let portable = with(CudaOptions {
        portable: Some(true),
        ..CudaOptions::default()
    });
    let data = Data::<bf16>::new(dims(1, 2, 2, 100, 3000, 128), 3);
    let plain = format!("sm_{}", whole.compute());
    assert_eq!(isa(&streaming, &data, Algorithm::Fa2), plain);
    assert_eq!(isa(&portable, &data, Algorithm::Fa2), plain);
    // Enough row blocks that none of them is halved, which a running state's never are.
    let many = dims(4, 64, 64, 1024, 3000, 128);
    let problem = Problem::dense(many, DType::BF16, &Options::new()).unwrap();
    let tile = |backend: &CudaBackend| backend.tile(&problem, Algorithm::Fa2).unwrap();
    assert_eq!(tile(&streaming), tile(&portable));
}

/// A folder that gets its Hopper kernels while a backend looks into it.
#[test]
fn a_backend_stays_with_the_kernels_it_began_with() {
    let name = "a_backend_stays_with_the_kernels_it_began_with";
    let Some(found) = gpu(name) else { return };
    let nvrtc = match Nvrtc::find(None) {
        Ok(nvrtc) if found.compute() == 90 && nvrtc.supports("sm_90a") => nvrtc,
        _ => return eprintln!("{name}: needs compute capability 9.0 and a compiler for sm_90a"),
    };
    let folder = tempfile::tempdir().unwrap();
    let selection = Selection {
        dtypes: vec![DType::BF16],
        head_dims: vec![64],
        score: false,
        strided: false,
        options: false,
    };
    let variants = list(90, &selection);
    let keep = |start: &str| {
        let wanted = |variant: &&Variant| variant.name.starts_with(start);
        for variant in variants.iter().filter(wanted) {
            let image = variant.compile(&nvrtc, "sm_90a").unwrap().image;
            let store = Store::at(folder.path());
            store.save(variant, "sm_90a", None, &image).unwrap();
        }
    };
    let open = || {
        CudaBackend::with(CudaOptions {
            kernels: Some(folder.path().into()),
            nvrtc: Some("/nonexistent".into()),
            portable: Some(false),
            ..CudaOptions::default()
        })
        .unwrap()
    };
    let data = Data::<bf16>::new(dims(1, 1, 1, 100, 100, 64), 4);
    keep("fa2-bf16-d64-full-");
    let first = open();
    assert_eq!(isa(&first, &data, Algorithm::Fa2), "sm_90");
    keep("hopper-bf16-d64-full-");
    assert_eq!(isa(&first, &data, Algorithm::Fa2), "sm_90");
    assert_eq!(isa(&open(), &data, Algorithm::Fa2), "sm_90a");
}
