//! The raw level: the kernels' argument block, bit for bit, and an unchecked launch.

use cudarc::driver::{
    CudaFunction, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, sys,
};

/// A `[batch, heads, seqlen, head_dim]` tensor in device memory; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensor {
    /// Address of element `[0, 0, 0, 0]`.
    pub ptr: u64,
    /// Stride of the batch axis.
    pub sb: i64,
    /// Stride of the heads axis.
    pub sh: i64,
    /// Stride of the seqlen axis.
    pub ss: i64,
    /// Stride of the head_dim axis.
    pub sd: i64,
}

/// What every kernel takes, by value; the fields are described in `prelude.cu`, which mirrors it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // documented where the kernels read them
pub struct Args {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub o: Tensor,
    pub bias: Tensor,
    pub mask: Tensor,
    pub keep: Tensor,
    pub lse: u64,
    pub m: u64,
    pub l: u64,
    pub acc: u64,
    pub s: u64,
    pub p: u64,
    pub alibi: u64,
    pub sinks: u64,
    pub seqs: u64,
    pub work: u64,
    pub drop_threshold: u64,
    pub ld_s: i64,
    pub ld_p: i64,
    pub batch: i32,
    pub heads: i32,
    pub group_size: i32,
    pub sq: i32,
    pub sk: i32,
    pub d: i32,
    pub dv: i32,
    pub lo_off: i32,
    pub hi_off: i32,
    pub diag: i32,
    pub row_blocks: i32,
    pub pairs_per_group: i32,
    pub last_group: i32,
    pub turn: i32,
    pub pair0: i32,
    pub pairs: i32,
    pub row0: i32,
    pub rows: i32,
    pub lse_ld: i32,
    pub seq0: i32,
    pub drop_key0: u32,
    pub drop_key1: u32,
    pub drop_offset: u32,
    pub scale: f32,
    pub softcap: f32,
    pub drop_scale: f32,
}

// SAFETY: repr(C) of integers and floats only, the layout `struct Args` of prelude.cu has.
unsafe impl DeviceRepr for Args {}

/// Rows of q and the keys they attend to, as `Sequence` in `decode.cu`; the fields are those of
/// [`tilewise_core::problem::Sequence`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sequence {
    pub q_batch: i32,
    pub q_start: i32,
    pub sq: i32,
    pub k_batch: i32,
    pub k_start: i32,
    pub sk: i32,
}

// SAFETY: repr(C) of integers only.
unsafe impl DeviceRepr for Sequence {}

/// What the decode kernels take, by value; the fields are described in `decode.cu`, which mirrors it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // documented where the kernels read them
pub struct Decode {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub o: Tensor,
    pub bias: Tensor,
    pub mask: Tensor,
    pub lse: u64,
    pub sequences: u64,
    pub table: u64,
    pub slopes: u64,
    pub sinks: u64,
    pub m: u64,
    pub l: u64,
    pub acc: u64,
    pub kv_heads: i32,
    pub group: i32,
    pub sq: i32,
    pub sk: i32,
    pub d: i32,
    pub dv: i32,
    pub left: i32,
    pub right: i32,
    pub bottom_right: i32,
    pub parts: i32,
    pub slots: i32,
    pub rows: i32,
    pub row_blocks: i32,
    pub lse_rows: i32,
    pub page_size: i32,
    pub width: i32,
    pub pages: i32,
    pub most_rows: i32,
    pub scale: f32,
    pub softcap: f32,
}

// SAFETY: repr(C) of integers and floats only, the layout `struct Decode` of decode.cu has; its tail is
// padded on both sides alike.
unsafe impl DeviceRepr for Decode {}

/// What the backward kernels take, by value; mirrored by `Grads` in `backward/common.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // documented where the kernels read them
pub struct BackwardArgs {
    pub forward: Args,
    pub lse: Tensor,
    pub dlse: Tensor,
    pub dout: Tensor,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub dbias: Tensor,
    pub lse2: u64,
    pub delta: u64,
    pub dq_acc: u64,
    pub dsinks: u64,
    pub odd_rows: u64,
    pub odd_keys: u64,
    pub turns: u64,
    pub rows_padded: i32,
    pub key_blocks: i32,
    pub kv_pairs: i32,
    pub kv_heads: i32,
}

// SAFETY: repr(C) of integers and floats only, the layout `struct Grads` of backward/common.cu has.
unsafe impl DeviceRepr for BackwardArgs {}

/// Where a tensor lies and in which boxes the copy engine walks it: `CUtensorMap` of the driver.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMap {
    /// Filled in by `cuTensorMapEncodeTiled`.
    pub opaque: [u64; 16],
}

/// What `hopper.cu` takes, by value, and mirrors.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // documented where the kernels read them
pub struct HopperArgs {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub bias: TensorMap,
    pub mask: TensorMap,
    pub forward: Args,
    pub turns: u64,
    pub units: i32,
    pub tiled: i32,
}

// SAFETY: repr(C) of integers and floats only, the layout `struct HopperArgs` of hopper.cu has; its tail is
// padded on both sides alike.
unsafe impl DeviceRepr for HopperArgs {}

/// What `backward/hopper.cu` takes, by value, and mirrors.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // documented where the kernels read them
pub struct BackwardHopperArgs {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
    pub backward: BackwardArgs,
}

// SAFETY: repr(C) of integers and floats only, the layout `struct BackwardHopperArgs` of backward/hopper.cu has;
// its tail is padded on both sides alike.
unsafe impl DeviceRepr for BackwardHopperArgs {}

/// An argument block: what some kernel takes as its only argument.
pub trait Block: DeviceRepr {}
impl Block for Args {}
impl Block for BackwardArgs {}
impl Block for Decode {}
impl Block for HopperArgs {}
impl Block for BackwardHopperArgs {}

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks along x and y.
    pub grid: (u32, u32),
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

/// Launches `function` on `stream` and returns at once.
///
/// # Safety
/// `function` must be a kernel of this crate that takes a `B`, and `args` must describe memory that is valid for what
/// that kernel reads and writes until the stream has passed this launch.
pub unsafe fn launch<B: Block>(
    stream: &CudaStream,
    function: &CudaFunction,
    shape: Shape,
    args: &B,
) -> Result<(), DriverError> {
    let mut builder = stream.launch_builder(function);
    builder.arg(args);
    // SAFETY: the kernel takes exactly one `B`; the rest is the caller's promise.
    unsafe {
        builder.launch(LaunchConfig {
            grid_dim: (shape.grid.0, shape.grid.1, 1),
            block_dim: (shape.threads, 1, 1),
            shared_mem_bytes: shape.shared,
        })
    }
    .map(|_| ())
}

/// As [`launch`], but the kernel may start before the one ahead of it on `stream` has ended, where the
/// device can do that (compute capability 9.0 and later); it must wait for that one by itself.
///
/// # Safety
/// As [`launch`], and where the kernel is compiled for such a device it must wait by itself for what it reads of
/// the one ahead of it, and one of its blocks until that one has ended (`griddepcontrol.wait`).
pub unsafe fn launch_dependent<B: Block>(
    stream: &CudaStream,
    function: sys::CUfunction,
    shape: Shape,
    args: &B,
) -> Result<(), DriverError> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: shape.grid.0,
        gridDimY: shape.grid.1,
        gridDimZ: 1,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared,
        hStream: stream.cu_stream(),
        attrs: &mut attribute,
        numAttrs: 1,
    };
    let mut params = [std::ptr::from_ref(args)
        .cast_mut()
        .cast::<std::ffi::c_void>()];
    // SAFETY: the configuration and the one parameter live to the end of the call, which copies them;
    // the rest is the caller's promise.
    unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) }
        .result()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_block_has_the_layout_of_the_kernels() {
        // 7 tensors of 40 bytes, 13 words of 8 bytes, 26 of 4 bytes: no padding anywhere.
        let words = 7 * 40 + 13 * 8;
        assert_eq!(size_of::<Args>(), words + 26 * 4);
        assert_eq!(std::mem::offset_of!(Args, batch), words);
        assert_eq!(std::mem::offset_of!(Args, scale), words + 23 * 4);
        // 6 tensors, 8 words of 8 bytes, 20 of 4 bytes.
        assert_eq!(std::mem::offset_of!(Decode, kv_heads), 6 * 40 + 8 * 8);
        assert_eq!(std::mem::offset_of!(Decode, scale), 6 * 40 + 8 * 8 + 18 * 4);
        assert_eq!(size_of::<Decode>(), 6 * 40 + 8 * 8 + 20 * 4);
    }

    #[test]
    fn tensor_maps_are_the_drivers() {
        assert_eq!(size_of::<TensorMap>(), size_of::<sys::CUtensorMap>());
        assert!(align_of::<TensorMap>() >= align_of::<sys::CUtensorMap>());
        assert_eq!(std::mem::offset_of!(HopperArgs, forward), 5 * 128);
        assert_eq!(
            std::mem::offset_of!(HopperArgs, turns),
            5 * 128 + size_of::<Args>()
        );
        assert_eq!(size_of::<HopperArgs>() % 128, 0);
        assert_eq!(std::mem::offset_of!(BackwardHopperArgs, backward), 4 * 128);
        assert_eq!(size_of::<BackwardHopperArgs>() % 128, 0);
    }

    #[test]
    fn the_backward_block_follows_the_forward_one() {
        assert_eq!(
            size_of::<BackwardArgs>(),
            size_of::<Args>() + 7 * 40 + 7 * 8 + 4 * 4
        );
        assert_eq!(
            std::mem::offset_of!(BackwardArgs, lse2),
            size_of::<Args>() + 7 * 40
        );
    }
}
