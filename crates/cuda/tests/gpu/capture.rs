//! Calls that a stream records for a graph, and what others do meanwhile.

use std::sync::Arc;

use tilewise_cuda::CudaOptions;
use tilewise_cuda::cudarc::driver::sys::{
    CUdeviceptr, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use tilewise_cuda::cudarc::driver::{CudaGraph, CudaSlice, CudaStream};

use super::*;

/// Inputs on the device, and what a call on host tensors makes of them.
struct Posed {
    shape: Dims,
    problem: Problem,
    algorithm: Algorithm,
    /// Held as long as the addresses are used.
    _inputs: [CudaSlice<bf16>; 3],
    addresses: [CUdeviceptr; 3],
    views: [[usize; 4]; 3],
    expected: Vec<bf16>,
}

struct Out {
    memory: CudaSlice<bf16>,
    address: CUdeviceptr,
}

impl Posed {
    fn new(backend: &CudaBackend, shape: Dims, algorithm: Algorithm) -> Posed {
        let options = Options::new().causal(true);
        let data = Data::<bf16>::new(shape, 50);
        let (expected, _) = run(backend, &data.inputs(), &options, algorithm).unwrap();
        let stream = backend.context().new_stream().unwrap();
        let inputs = [&data.q, &data.k, &data.v].map(|x| stream.clone_htod(x).unwrap());
        stream.synchronize().unwrap();
        let addresses = [0, 1, 2].map(|n| inputs[n].device_ptr(&stream).0);
        Posed {
            shape,
            problem: Problem::dense(shape, DType::BF16, &options).unwrap(),
            algorithm,
            _inputs: inputs,
            addresses,
            views: [shape.out_shape(), data.wide(), data.wide()],
            expected,
        }
    }

    /// Room for the output, which no call has written.
    fn out(&self, stream: &Arc<CudaStream>) -> Out {
        let mut memory = stream
            .clone_htod(&vec![bf16::NAN; self.expected.len()])
            .unwrap();
        stream.synchronize().unwrap();
        let address = memory.device_ptr_mut(stream).0;
        Out { memory, address }
    }

    /// Queues the call, with raw addresses: it allocates and orders by the stream alone.
    fn queue(&self, backend: &CudaBackend, stream: &Arc<CudaStream>, out: &Out) {
        let dense =
            |[_, h, s, d]: [usize; 4]| [(h * s * d) as isize, (s * d) as isize, d as isize, 1];
        // SAFETY: the addresses are of slices of these shapes, which outlive a graph's last replay.
        unsafe {
            let view = |n: usize| {
                let (address, shape) = (self.addresses[n], self.views[n]);
                DeviceView::from_raw(address, DType::BF16, shape, dense(shape))
            };
            let shape = self.views[0];
            ops::forward(
                backend,
                stream,
                &self.problem,
                self.algorithm,
                &view(0),
                &view(1),
                &view(2),
                &mut DeviceViewMut::from_raw(out.address, DType::BF16, shape, dense(shape))
                    .unwrap(),
                None,
            )
            .unwrap();
        }
    }

    fn holds(&self, stream: &Arc<CudaStream>, out: &Out) {
        let host = stream.clone_dtoh(&out.memory).unwrap();
        stream.synchronize().unwrap();
        let (algorithm, shape) = (self.algorithm, self.shape);
        assert_eq!(bits(&host), bits(&self.expected), "{algorithm} {shape:?}");
    }

    fn replays(&self, stream: &Arc<CudaStream>, graph: &CudaGraph, out: &mut Out) {
        for _ in 0..3 {
            stream
                .memcpy_htod(&vec![bf16::NAN; self.expected.len()], &mut out.memory)
                .unwrap();
            graph.launch().unwrap();
            self.holds(stream, out);
        }
    }
}

fn end(stream: &Arc<CudaStream>) -> CudaGraph {
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).unwrap().unwrap()
}

#[test]
fn a_captured_graph_replays_the_same_bits() {
    let Some(backend) = gpu("a_captured_graph_replays_the_same_bits") else {
        return;
    };
    let stream = backend.context().new_stream().unwrap();
    for (shape, algorithm) in [
        (dims(2, 8, 2, 1, 3000, 128), Algorithm::Fa2),
        (dims(2, 4, 2, 300, 300, 128), Algorithm::Fa2),
        // More row blocks than any device has multiprocessors.
        (dims(2, 26, 2, 500, 500, 128), Algorithm::Fa2),
        (dims(1, 2, 1, 100, 150, 64), Algorithm::Standard),
        (dims(1, 2, 1, 100, 150, 64), Algorithm::Fa1),
    ] {
        let posed = Posed::new(&backend, shape, algorithm);
        let mut out = posed.out(&stream);
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .unwrap();
        posed.queue(&backend, &stream, &out);
        let graph = end(&stream);
        posed.replays(&stream, &graph, &mut out);
    }
}

/// The memory that an earlier call left for a stream is not freed there while it is captured: neither for
/// calls on more streams than memory is kept for, nor with the backend that kept it.
#[test]
fn what_is_kept_for_a_captured_stream_waits_for_the_end_of_the_capture() {
    let Some(backend) = gpu("what_is_kept_for_a_captured_stream_waits") else {
        return;
    };
    // Few enough heads that several blocks share each, through memory that is kept.
    let posed = Posed::new(&backend, dims(1, 8, 2, 1, 3000, 128), Algorithm::Fa2);
    let context = backend.context();
    let captured = context.new_stream().unwrap();
    let mut out = posed.out(&captured);
    posed.queue(&backend, &captured, &out);
    let passing = CudaBackend::with(CudaOptions::default()).unwrap();
    posed.queue(&passing, &captured, &out);
    let others: Vec<_> = (0..24).map(|_| context.new_stream().unwrap()).collect();
    let outs: Vec<_> = others.iter().map(|stream| posed.out(stream)).collect();
    captured.synchronize().unwrap();
    captured
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    for (stream, out) in others.iter().zip(&outs) {
        posed.queue(&backend, stream, out);
    }
    posed.queue(&backend, &captured, &out);
    drop(passing);
    let graph = end(&captured);
    posed.replays(&captured, &graph, &mut out);
    for (stream, out) in others.iter().zip(&outs) {
        posed.holds(stream, out);
    }
    // By a stream that every thread means itself by, too, and once more by one that has been captured.
    let own = context.per_thread_stream();
    for stream in [&own, &captured] {
        let out = posed.out(stream);
        for _ in 0..2 {
            posed.queue(&backend, stream, &out);
            posed.holds(stream, &out);
        }
    }
}
