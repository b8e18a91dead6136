//! The backend the facade holds: one GPU, host views in and out (copies, and says so), device memory
//! through [`ops`] and [`state`](crate::state).

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr as _, DeviceRepr, SyncOnDrop,
    ValidAsZeroBits, result,
};
use half::{bf16, f16};
use tilewise_core::backend::check_outputs;
use tilewise_core::{
    Algorithm, AnyBackwardInputs, AnyGradientsMut, AnyInputs, AnyTensorMut, Backend, BackendInfo,
    BackwardInputs, BackwardReport, BlockSizes, DType, Dims, Element, Error, ForwardReport,
    GradientsMut, Inputs, Problem, Result, RunningState, TensorView, TensorViewMut, allocate,
    gather, reserve,
};

use crate::backward::{self, DeviceBackward, DeviceGradients, Sums};
use crate::cache::Store;
use crate::decode;
use crate::error::{allocation, driver, unavailable, unsupported};
use crate::module::Modules;
use crate::ops::{self, DeviceInputs};
use crate::probe::{probe, version_name};
use crate::raw;
use crate::streamed;
use crate::view::{DeviceMask, DeviceView, DeviceViewMut};

/// Device memory that `standard` may take for S and P at once, if more is free.
const STANDARD_BUDGET: u64 = 8 << 30;

/// The setting that asks for kernels that are made for no chip in particular; unset, empty and 0 do not.
pub const PORTABLE_SETTING: &str = "TILEWISE_PORTABLE_KERNELS";

/// Whether this value of [`PORTABLE_SETTING`] asks for them.
fn asks_for_portable(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !value.is_empty() && value != "0")
}

/// Chips that have the instructions of the kernels that a call ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chips {
    /// All that this backend serves.
    All,
    /// Those of one compute capability.
    One,
}

impl Chips {
    /// Those that have what both are made for.
    pub(crate) fn and(self, other: Chips) -> Chips {
        match (self, other) {
            (Chips::All, Chips::All) => Chips::All,
            _ => Chips::One,
        }
    }

    /// As compilers name it: with an `a`, instructions of that chip alone.
    pub(crate) fn isa(self, compute: i32) -> String {
        match self {
            Chips::All => format!("sm_{compute}"),
            Chips::One => format!("sm_{compute}a"),
        }
    }
}

/// Where kernels come from, and which GPU to use.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// N of `cuda:N`.
    pub ordinal: usize,
    /// Folder of the kernel cache; `None`: `TILEWISE_CACHE_DIR`, else the user's cache folder.
    pub cache: Option<PathBuf>,
    /// Folder of kernels built ahead; `None`: `TILEWISE_KERNELS_DIR`.
    pub kernels: Option<PathBuf>,
    /// Bytes of device memory that q, k, v, out and lse of one call on host tensors may take; `None`: what
    /// the device has. Where they are more, `fa2` streams k and v through the device in chunks; the
    /// other algorithms refuse.
    pub device_memory: Option<u64>,
    /// NVRTC, or its folder; `None`: `TILEWISE_NVRTC`, else the usual places.
    pub nvrtc: Option<PathBuf>,
    /// Only kernels that every chip from compute capability 8.0 on can run: `fa2.cu` where
    /// `hopper.cu` would serve, forward and backward. `None`: what [`PORTABLE_SETTING`] says.
    pub portable: Option<bool>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    device: String,
    compute: i32,
    driver: i32,
    context: Arc<CudaContext>,
    modules: Modules,
    shared_limit: u32,
    l2: u64,
    multiprocessors: i32,
    memory: u64,
    budget: u64,
    portable: bool,
    /// Decode kernels by what they serve.
    known: crate::decode::Known,
    /// Streams at rest: each host call takes one, so that calls from several threads overlap.
    streams: Mutex<Vec<Arc<CudaStream>>>,
    /// Page-locked memory at rest, which keys from host memory pass through.
    rings: crate::gather::Rings,
}

/// Attention on one GPU. Cheap to clone; all clones share kernels and streams.
#[derive(Clone, Debug)]
pub struct CudaBackend {
    shared: Arc<Shared>,
    sums: Sums,
}

impl CudaBackend {
    /// The GPU `cuda:ordinal`, with everything else by settings.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the exact reason: no driver, too old a driver, no such device, too
    /// low a compute capability.
    pub fn new(ordinal: usize) -> Result<CudaBackend> {
        Self::with(CudaOptions {
            ordinal,
            ..CudaOptions::default()
        })
    }

    /// A GPU with these options.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(options: CudaOptions) -> Result<CudaBackend> {
        let name = format!("cuda:{}", options.ordinal);
        let found = probe();
        let device = found
            .usable(options.ordinal)
            .map_err(|reason| unavailable(&name, reason))?;
        let version = found.driver.clone().unwrap_or_default();
        let context =
            CudaContext::new(options.ordinal).map_err(|e| driver("opening the device", e))?;
        let attribute = |which| {
            context
                .attribute(which)
                .map_err(|e| driver("cuDeviceGetAttribute", e))
        };
        let limit = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let l2 = attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let compute = device.compute.0 * 10 + device.compute.1;
        let modules = Modules::new(
            Arc::clone(&context),
            compute,
            options.cache.map(Store::at).or_else(Store::cache),
            options.kernels.map(Store::at).or_else(Store::prebuilt),
            options.nvrtc,
        );
        tracing::debug!(device = %device.name, compute, driver = version, "CUDA device opened");
        Ok(CudaBackend {
            shared: Arc::new(Shared {
                name,
                device: device.name.clone(),
                compute,
                driver: version,
                context,
                modules,
                shared_limit: limit.max(0) as u32,
                l2: l2.max(0) as u64,
                multiprocessors,
                memory: device.memory,
                budget: options.device_memory.unwrap_or(device.memory),
                portable: options.portable.unwrap_or_else(|| {
                    asks_for_portable(std::env::var_os(PORTABLE_SETTING).as_deref())
                }),
                known: crate::decode::Known::default(),
                streams: Mutex::default(),
                rings: crate::gather::Rings::default(),
            }),
            sums: Sums::default(),
        })
    }

    /// The same device; [`Backend::backward`] sums dQ up in this way. Without it the bits of gradients
    /// do not change from call to call.
    pub fn sums(mut self, sums: Sums) -> CudaBackend {
        self.sums = sums;
        self
    }

    /// Compute capability, major × 10 + minor.
    pub fn compute(&self) -> i32 {
        self.shared.compute
    }

    /// The primary context of the device, shared with other libraries of the process.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.shared.context
    }

    /// The checked level's kernels.
    pub fn modules(&self) -> &Modules {
        &self.shared.modules
    }

    /// Whether kernels made for one chip are left aside.
    pub fn portable(&self) -> bool {
        self.shared.portable
    }

    /// Shared memory a block may have, in bytes.
    pub fn shared_limit(&self) -> u32 {
        self.shared.shared_limit
    }

    pub(crate) fn multiprocessors(&self) -> u64 {
        self.shared.multiprocessors.max(1) as u64
    }

    /// Bytes of second-level cache.
    pub fn l2_bytes(&self) -> u64 {
        self.shared.l2
    }

    /// The CUDA version of the driver, as 13000 for 13.0.
    pub fn driver_version(&self) -> i32 {
        self.shared.driver
    }

    /// Whether a kernel may be launched before the one ahead of it has ended.
    pub(crate) fn launches_dependents(&self) -> bool {
        self.shared.compute >= 90
    }

    pub(crate) fn known(&self) -> &crate::decode::Known {
        &self.shared.known
    }

    /// Whether a call on host tensors would take more device memory than it may.
    pub(crate) fn streams(&self, problem: &Problem) -> bool {
        problem.bytes() > self.shared.budget as f64
    }

    /// What streaming may take: a tenth of a whole device stays for what else lives there.
    fn streaming_budget(&self) -> u64 {
        let shared = &self.shared;
        shared.budget.min(shared.memory / 10 * 9)
    }

    pub(crate) fn standard_budget(&self) -> u64 {
        // What the pool holds may be reused, so half of what is there is a cautious bound.
        STANDARD_BUDGET.min(self.shared.memory / 2)
    }

    pub(crate) fn bind(&self) -> Result<()> {
        self.shared
            .context
            .bind_to_thread()
            .map_err(|e| driver("cuCtxSetCurrent", e))
    }

    /// Runs `work` on a stream of its own and waits for it.
    pub(crate) fn on_stream<R>(
        &self,
        work: impl FnOnce(&Arc<CudaStream>) -> Result<R>,
    ) -> Result<R> {
        self.bind()?;
        let stream = self.take_stream()?;
        let result = work(&stream);
        // Also after an error: whatever was queued must have passed before its memory is reused.
        let passed = wait_for(&stream);
        self.give_stream(stream);
        let result = result?;
        passed?;
        Ok(result)
    }

    /// A stream that nobody else uses until it is given back. The context is bound.
    pub(crate) fn take_stream(&self) -> Result<Arc<CudaStream>> {
        let rest = &self.shared.streams;
        let kept = rest.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept {
            Some(stream) => Ok(stream),
            None => self
                .shared
                .context
                .new_stream()
                .map_err(|e| driver("cuStreamCreate", e)),
        }
    }

    /// Nothing is under way there any more.
    pub(crate) fn give_stream(&self, stream: Arc<CudaStream>) {
        let rest = &self.shared.streams;
        rest.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(stream);
    }

    /// An event that marks a place in a stream and takes no time.
    pub(crate) fn new_event(&self) -> Result<CudaEvent> {
        self.shared
            .context
            .new_event(None)
            .map_err(|e| driver("cuEventCreate", e))
    }

    /// Page-locked memory at rest.
    pub(crate) fn rings(&self) -> &crate::gather::Rings {
        &self.shared.rings
    }

    fn forward_typed<T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        algorithm: Algorithm,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<Chips> {
        // Kernels and copies go up to where `problem` says: it must be the tensors'.
        problem.expect_posed(&Problem::new(inputs, problem.options())?)?;
        if self.streams(problem) {
            streamed::forward(self, problem, inputs, out, lse, self.streaming_budget())?;
            return Ok(Chips::All);
        }
        if problem.page_size().is_some() && !decode::reads_pages(problem, algorithm) {
            let gathered = gather(problem, inputs)?;
            let (problem, inputs) = gathered.posed(inputs);
            return self.forward_resident(problem, &inputs, algorithm, out, lse);
        }
        self.forward_resident(problem, inputs, algorithm, out, lse)
    }

    fn forward_resident<T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_, T>,
        algorithm: Algorithm,
        out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<Chips> {
        if decode::serves(problem, algorithm) {
            decode::forward_host(self, problem, inputs, out, lse)?;
            return Ok(Chips::All);
        }
        let dims = *problem.dims();
        self.on_stream(|stream| {
            let q = Uploaded::new(stream, "q", &inputs.q)?;
            let k = Uploaded::new(stream, "k", &inputs.k)?;
            let v = Uploaded::new(stream, "v", &inputs.v)?;
            let bias = Uploaded::maybe(stream, "bias", &inputs.bias)?;
            let mask = Uploaded::maybe(stream, "mask", &inputs.mask)?;
            let keep_mask = Uploaded::maybe(stream, "keep_mask", &inputs.keep_mask)?;
            let shape = dims.out_shape();
            let [b, h, s] = dims.lse_shape();
            let mut results = Results::<T>::new(stream, &dims)?;
            let given = DeviceInputs {
                q: q.view()?,
                k: k.view()?,
                v: v.view()?,
                bias: bias.as_ref().map(Uploaded::view).transpose()?,
                mask: mask.as_ref().map(Uploaded::mask).transpose()?,
                keep_mask: keep_mask.as_ref().map(Uploaded::mask).transpose()?,
            };
            let chips = ops::run_forward(
                self,
                stream,
                problem,
                algorithm,
                &given,
                &mut DeviceViewMut::bhsd::<T, _>(&mut results.out, shape)?,
                Some(&mut DeviceViewMut::bhsd::<f32, _>(
                    &mut results.lse,
                    [b, h, s, 1],
                )?),
            )?;
            results.download(stream, out, lse)?;
            Ok(chips)
        })
    }
}

impl CudaBackend {
    fn backward_typed<T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        problem: &Problem,
        inputs: &BackwardInputs<'_, T>,
        algorithm: Algorithm,
        gradients: GradientsMut<'_, T>,
    ) -> Result<Chips> {
        problem.expect_posed(&inputs.problem(problem.options())?)?;
        gradients.check(problem, &inputs.inputs)?;
        let gathered = gather(problem, &inputs.inputs)?;
        let (problem, given) = (gathered.problem(), gathered.inputs(&inputs.inputs));
        self.on_stream(|stream| {
            let up = |name, view| Uploaded::<T>::new(stream, name, view);
            let (q, k, v) = (up("q", &given.q)?, up("k", &given.k)?, up("v", &given.v)?);
            let (out, dout) = (up("out", &inputs.out)?, up("dout", &inputs.dout)?);
            let bias = Uploaded::maybe(stream, "bias", &given.bias)?;
            let mask = Uploaded::maybe(stream, "mask", &given.mask)?;
            let keep_mask = Uploaded::maybe(stream, "keep_mask", &given.keep_mask)?;
            let lse = Uploaded::<f32>::new(stream, "lse", &inputs.lse)?;
            let dlse = match &inputs.dlse {
                Some(dlse) => Some(Uploaded::<f32>::new(stream, "dlse", dlse)?),
                None => None,
            };
            let shapes = [given.q.shape(), problem.dk_shape(), problem.dv_shape()];
            let memory =
                |name, n: usize| device_zeros::<T>(stream, name, shapes[n].iter().product());
            let (mut dq, mut dk, mut dv) = (memory("dq", 0)?, memory("dk", 1)?, memory("dv", 2)?);
            let bias_shape = given.bias.map_or([0; 4], |bias| bias.shape());
            let mut dbias = match &gradients.dbias {
                Some(_) => {
                    let len = bias_shape.iter().product();
                    Some(device_zeros::<T>(stream, "dbias", len)?)
                }
                None => None,
            };
            let sinks = [1, 1, 1, problem.dims().num_heads];
            let mut dsinks = match &gradients.dsinks {
                Some(_) => Some(device_zeros::<f32>(stream, "dsinks", sinks[3])?),
                None => None,
            };
            let chips = backward::run_backward(
                self,
                stream,
                problem,
                algorithm,
                self.sums,
                &DeviceBackward {
                    inputs: DeviceInputs {
                        q: q.view()?,
                        k: k.view()?,
                        v: v.view()?,
                        bias: bias.as_ref().map(Uploaded::view).transpose()?,
                        mask: mask.as_ref().map(Uploaded::mask).transpose()?,
                        keep_mask: keep_mask.as_ref().map(Uploaded::mask).transpose()?,
                    },
                    out: out.view()?,
                    lse: lse.view()?,
                    dout: dout.view()?,
                    dlse: match &dlse {
                        Some(dlse) => Some(dlse.view()?),
                        None => None,
                    },
                },
                &mut DeviceGradients {
                    dq: DeviceViewMut::bhsd::<T, _>(&mut dq, shapes[0])?,
                    dk: DeviceViewMut::bhsd::<T, _>(&mut dk, shapes[1])?,
                    dv: DeviceViewMut::bhsd::<T, _>(&mut dv, shapes[2])?,
                    dbias: match &mut dbias {
                        Some(dbias) => Some(DeviceViewMut::bhsd::<T, _>(dbias, bias_shape)?),
                        None => None,
                    },
                    dsinks: match &mut dsinks {
                        Some(dsinks) => Some(DeviceViewMut::bhsd::<f32, _>(dsinks, sinks)?),
                        None => None,
                    },
                },
            )?;
            let GradientsMut {
                dq: mut to_q,
                dk: mut to_k,
                dv: mut to_v,
                dbias: to_bias,
                dsinks: to_sinks,
            } = gradients;
            download(stream, "dq", &dq, &mut to_q)?;
            download_keys(stream, "dk", &dk, shapes[1], &mut to_k)?;
            download_keys(stream, "dv", &dv, shapes[2], &mut to_v)?;
            if let (Some(memory), Some(mut to)) = (&dbias, to_bias) {
                // Keys gathered from pages may be fewer than the bias has.
                download_keys_of_bias(stream, memory, bias_shape, &mut to)?;
            }
            if let (Some(memory), Some(to)) = (&dsinks, to_sinks) {
                let mut view = TensorViewMut::bhsd(to, sinks)?;
                download(stream, "dsinks", memory, &mut view)?;
            }
            Ok(chips)
        })
    }
}

/// [`download`] into a tensor that may have more rows than `shape` says: keys of pages that no
/// sequence uses get 0.
fn download_keys<T: Element + DeviceRepr>(
    stream: &Arc<CudaStream>,
    what: &str,
    memory: &CudaSlice<T>,
    shape: [usize; 4],
    view: &mut TensorViewMut<'_, T>,
) -> Result<()> {
    let [batch, heads, keys, _] = view.shape();
    if keys > shape[2] {
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for s in shape[2]..keys {
                view.row_mut(b, h, s).fill(T::default());
            }
        }
    }
    let (strides, offset) = (view.strides(), view.offset());
    let mut used = TensorViewMut::from_strides(view.data_mut(), shape, strides, offset)?;
    download(stream, what, memory, &mut used)
}

/// [`download`] into a dbias that may have more keys than `shape` says: those get 0.
fn download_keys_of_bias<T: Element + DeviceRepr>(
    stream: &Arc<CudaStream>,
    memory: &CudaSlice<T>,
    shape: [usize; 4],
    view: &mut TensorViewMut<'_, T>,
) -> Result<()> {
    if view.shape() == shape {
        return download(stream, "dbias", memory, view);
    }
    view.fill(T::default());
    let (strides, offset) = (view.strides(), view.offset());
    let mut used = TensorViewMut::from_strides(view.data_mut(), shape, strides, offset)?;
    download(stream, "dbias", memory, &mut used)
}

/// Makes `context` the thread's. cudarc's own way passes a failure on that some drop left for it to report,
/// with another context still current: a drop, which has nobody to tell, would then free nothing.
pub(crate) fn make_current(context: &CudaContext) {
    // SAFETY: a live context. A failure is a lost one, which the next call reports.
    let _ = unsafe { result::ctx::set_current(context.cu_ctx()) };
}

/// Waits until all that is queued on `stream` has passed. cudarc's own wait may return at once, with a
/// failure that some drop left for it to report.
pub(crate) fn wait_for(stream: &CudaStream) -> Result<()> {
    // SAFETY: a live stream.
    unsafe { result::stream::synchronize(stream.cu_stream()) }
        .map_err(|e| driver("cuStreamSynchronize", e))
}

/// Device memory for `len` elements, at least one.
pub(crate) fn device_zeros<T: DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    what: &str,
    len: usize,
) -> Result<CudaSlice<T>> {
    stream
        .alloc_zeros::<T>(len.max(1))
        .map_err(|e| allocation(what, (len * size_of::<T>()) as u64, e))
}

/// What a call on host tensors gives, while it is on the device: contiguous.
pub(crate) struct Results<T> {
    pub(crate) out: CudaSlice<T>,
    pub(crate) lse: CudaSlice<f32>,
}

impl<T: Copy + Default + DeviceRepr + ValidAsZeroBits> Results<T> {
    pub(crate) fn new(stream: &Arc<CudaStream>, dims: &Dims) -> Result<Results<T>> {
        Ok(Results {
            out: device_zeros(stream, "out", dims.out_shape().iter().product())?,
            lse: device_zeros(stream, "lse", dims.lse_shape().iter().product())?,
        })
    }

    /// Copies them to where the caller has them.
    pub(crate) fn download(
        &self,
        stream: &Arc<CudaStream>,
        mut out: TensorViewMut<'_, T>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<()> {
        download(stream, "out", &self.out, &mut out)?;
        match lse {
            Some(mut lse) => download(stream, "lse", &self.lse, &mut lse),
            None => Ok(()),
        }
    }
}

/// A host tensor on the device: as it lies where that is compact, packed where it is not.
pub(crate) struct Uploaded<T> {
    memory: CudaSlice<T>,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl<T: Copy + Default + DeviceRepr> Uploaded<T> {
    /// What may be there.
    pub(crate) fn maybe(
        stream: &Arc<CudaStream>,
        name: &'static str,
        view: &Option<TensorView<'_, T>>,
    ) -> Result<Option<Uploaded<T>>> {
        let uploaded = view.as_ref().map(|view| Uploaded::new(stream, name, view));
        uploaded.transpose()
    }

    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        name: &'static str,
        view: &TensorView<'_, T>,
    ) -> Result<Uploaded<T>> {
        let (shape, strides) = (view.shape(), view.strides());
        let len = view.len();
        if len == 0 {
            return Ok(Uploaded {
                memory: upload(stream, name, &[T::default()])?,
                shape,
                strides: [0; 4],
                offset: 0,
            });
        }
        let (mut low, mut high) = (view.offset() as isize, view.offset() as isize);
        for axis in 0..4 {
            let reach = (shape[axis] as isize - 1) * strides[axis];
            low += reach.min(0);
            high += reach.max(0);
        }
        let covered = (high - low) as usize + 1;
        if covered <= len.saturating_mul(2) {
            return Ok(Uploaded {
                memory: upload(stream, name, &view.data()[low as usize..=high as usize])?,
                shape,
                strides,
                offset: view.offset() - low as usize,
            });
        }
        // Scattered over much more memory than it has elements: those alone travel.
        let mut packed = reserve(&shape, name)?;
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for s in 0..shape[2] {
                    match view.contiguous_row(b, h, s) {
                        Some(row) => packed.extend_from_slice(row),
                        None => packed.extend(view.row(b, h, s)),
                    }
                }
            }
        }
        Ok(Uploaded {
            memory: upload(stream, name, &packed)?,
            shape,
            strides: crate::view::contiguous(shape),
            offset: 0,
        })
    }

    /// Where it lies, for use on `stream`.
    pub(crate) fn place<'s>(&'s self, stream: &'s CudaStream) -> (raw::Tensor, SyncOnDrop<'s>) {
        let (base, guard) = self.memory.device_ptr(stream);
        let ptr = base + (self.offset * size_of::<T>()) as u64;
        (crate::view::tensor(ptr, self.strides), guard)
    }

    pub(crate) fn view(&self) -> Result<DeviceView<'_>>
    where
        T: Element,
    {
        DeviceView::from_strides::<T, _>(&self.memory, self.shape, self.strides, self.offset)
    }
}

impl Uploaded<u8> {
    pub(crate) fn mask(&self) -> Result<DeviceMask<'_>> {
        DeviceMask::from_strides(&self.memory, self.shape, self.strides, self.offset)
    }
}

pub(crate) fn upload<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    name: &str,
    data: &[T],
) -> Result<CudaSlice<T>> {
    stream
        .clone_htod(data)
        .map_err(|e| allocation(name, size_of_val(data) as u64, e))
}

/// The first `len` elements of device memory, which have arrived when this returns.
pub(crate) fn fetch<T: Copy + Default + DeviceRepr>(
    stream: &Arc<CudaStream>,
    what: &str,
    memory: &CudaSlice<T>,
    len: usize,
) -> Result<Vec<T>> {
    let mut host = allocate(&[len], what, T::default())?;
    fetch_into(stream, what, memory, &mut host)?;
    Ok(host)
}

/// As many elements as `target` has.
fn fetch_into<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    what: &str,
    memory: &CudaSlice<T>,
    target: &mut [T],
) -> Result<()> {
    if target.is_empty() {
        return Ok(());
    }
    let copied = stream.memcpy_dtoh(&memory.slice(..target.len()), target);
    // Also after an error: the target is borrowed only for this call.
    let passed = wait_for(stream);
    copied.map_err(|e| driver(&format!("copying {what} to the host"), e))?;
    passed
}

/// Copies a contiguous device tensor into a host view of any strides.
pub(crate) fn download<T: Copy + Default + DeviceRepr>(
    stream: &Arc<CudaStream>,
    what: &str,
    memory: &CudaSlice<T>,
    view: &mut TensorViewMut<'_, T>,
) -> Result<()> {
    if view.is_empty() {
        return Ok(());
    }
    let shape = view.shape();
    let len: usize = shape.iter().product();
    let dense = crate::view::contiguous(shape);
    if (0..4).all(|axis| shape[axis] <= 1 || view.strides()[axis] == dense[axis]) {
        let offset = view.offset();
        return fetch_into(
            stream,
            what,
            memory,
            &mut view.data_mut()[offset..offset + len],
        );
    }
    let whole = fetch(stream, what, memory, len)?;
    let mut rows = whole.chunks_exact(shape[3]);
    for b in 0..shape[0] {
        for h in 0..shape[1] {
            for s in 0..shape[2] {
                if let Some(row) = rows.next() {
                    view.row_mut(b, h, s).copy_from_slice(row);
                }
            }
        }
    }
    Ok(())
}

pub(crate) fn wrong_dtype(tensor: &'static str, expected: DType, got: DType) -> Error {
    Error::DType {
        tensor: tensor.into(),
        expected,
        got,
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> BackendInfo {
        let shared = &self.shared;
        BackendInfo {
            name: shared.name.clone(),
            device: shared.device.clone(),
            details: vec![
                (
                    "compute capability".into(),
                    format!("{}.{}", shared.compute / 10, shared.compute % 10),
                ),
                (
                    "driver".into(),
                    format!("CUDA {}", version_name(shared.driver)),
                ),
                ("multiprocessors".into(), shared.multiprocessors.to_string()),
                ("memory".into(), format!("{} MiB", shared.memory >> 20)),
                ("L2".into(), format!("{} MiB", shared.l2 >> 20)),
                (
                    "fa2 forward".into(),
                    match crate::hopper::possible(self) && shared.modules.has_native_of("hopper-") {
                        true => "sm_90a: warpgroup products, bulk copies (f16, bf16; head_dim up to 256)",
                        false => "mma.sync, cp.async",
                    }
                    .into(),
                ),
                (
                    "fa2 backward".into(),
                    match crate::hopper::possible(self) && shared.modules.has_native_of("bwd-hopper-") {
                        true => "sm_90a: warpgroup products, bulk copies (f16, bf16; head_dim up to 256; no softcap, bias, ALiBi, mask or dropout)",
                        false => "mma.sync, cp.async",
                    }
                    .into(),
                ),
                (
                    "compiler".into(),
                    match shared.modules.nvrtc() {
                        Ok(nvrtc) => nvrtc.to_string(),
                        Err(reason) => reason.to_owned(),
                    },
                ),
            ],
        }
    }

    fn supports(&self, problem: &Problem, algorithm: Algorithm) -> Result<()> {
        if !self.streams(problem) {
            return match problem.page_size() {
                Some(_) if !decode::reads_pages(problem, algorithm) => {
                    ops::supports_gathered(problem, algorithm)
                }
                _ => ops::supports(problem, algorithm),
            };
        }
        match algorithm.resolve() {
            Algorithm::Fa2 => streamed::supports(problem),
            other => Err(unsupported(format!(
                "{other} where inputs and outputs take more than {} bytes of device memory (fa2 streams them)",
                self.shared.budget
            ))),
        }
    }

    /// Without copies of inputs that are laid out anew, the matrices of dbias and the states of decoding.
    fn workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        match algorithm.resolve() {
            Algorithm::Standard => ops::standard_bytes(problem, self.standard_budget()),
            Algorithm::Fa1 => ops::fa1_bytes(problem),
            _ => ops::fa2_bytes(problem),
        }
    }

    fn tile(&self, problem: &Problem, algorithm: Algorithm) -> Option<BlockSizes> {
        crate::tile::on(self, problem, algorithm)
    }

    /// Copies q, k and v to the device and out and lse back; device memory goes through
    /// [`ops::forward`]. Pages travel as they lie where `fa2` reads them there; under dropout, in rows
    /// wider than 256 and for the other algorithms their keys are gathered first.
    fn forward(
        &self,
        problem: &Problem,
        inputs: &AnyInputs<'_>,
        algorithm: Algorithm,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<ForwardReport> {
        check_outputs(problem, &out, lse.as_ref())?;
        self.supports(problem, algorithm)?;
        let dtype = out.dtype();
        let chips = match (inputs, out) {
            (AnyInputs::F32(inputs), AnyTensorMut::F32(out)) => {
                self.forward_typed::<f32>(problem, inputs, algorithm, out, lse)?
            }
            (AnyInputs::F16(inputs), AnyTensorMut::F16(out)) => {
                self.forward_typed::<f16>(problem, inputs, algorithm, out, lse)?
            }
            (AnyInputs::BF16(inputs), AnyTensorMut::BF16(out)) => {
                self.forward_typed::<bf16>(problem, inputs, algorithm, out, lse)?
            }
            _ => return Err(wrong_dtype("q", problem.dtype(), dtype)),
        };
        Ok(ForwardReport {
            algorithm: algorithm.resolve(),
            isa: chips.isa(self.shared.compute),
        })
    }

    fn supports_backward(&self, problem: &Problem, algorithm: Algorithm) -> Result<()> {
        backward::supports(problem, algorithm)
    }

    /// Without copies of inputs that are laid out anew, the matrices of dbias and the states of decoding.
    fn backward_workspace_bytes(&self, problem: &Problem, algorithm: Algorithm) -> u64 {
        backward::workspace_bytes(self, problem, algorithm, self.sums)
    }

    /// Copies what the gradients are made from to the device and the gradients back; device memory
    /// goes through [`backward::backward`].
    fn backward(
        &self,
        problem: &Problem,
        inputs: &AnyBackwardInputs<'_>,
        algorithm: Algorithm,
        gradients: AnyGradientsMut<'_>,
    ) -> Result<BackwardReport> {
        backward::supports(problem, algorithm)?;
        let dtype = gradients.dtype();
        let chips = match (inputs, gradients) {
            (AnyBackwardInputs::F32(inputs), AnyGradientsMut::F32(gradients)) => {
                self.backward_typed(problem, inputs, algorithm, gradients)?
            }
            (AnyBackwardInputs::F16(inputs), AnyGradientsMut::F16(gradients)) => {
                self.backward_typed(problem, inputs, algorithm, gradients)?
            }
            (AnyBackwardInputs::BF16(inputs), AnyGradientsMut::BF16(gradients)) => {
                self.backward_typed(problem, inputs, algorithm, gradients)?
            }
            _ => return Err(wrong_dtype("dq", problem.dtype(), dtype)),
        };
        Ok(BackwardReport {
            algorithm: algorithm.resolve(),
            isa: chips.isa(self.shared.compute),
        })
    }

    fn begin(&self, problem: &Problem) -> Result<Box<dyn RunningState>> {
        crate::state::running(self, problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_for_portable_kernels_can_say_no() {
        let asks = |value: &str| asks_for_portable(Some(OsStr::new(value)));
        assert!(asks("1") && asks("yes"));
        assert!(!asks("0") && !asks("") && !asks_for_portable(None));
    }

    /// Packed sequences have kernels each: one that is of one chip alone names the call.
    #[test]
    fn a_call_is_for_the_chips_that_have_all_of_its_kernels() {
        use Chips::{All, One};
        assert_eq!(All.and(All).isa(90), "sm_90");
        for (a, b) in [(All, One), (One, All), (One, One)] {
            assert_eq!(a.and(b).isa(90), "sm_90a");
        }
    }
}
