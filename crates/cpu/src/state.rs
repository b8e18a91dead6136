//! The running state of a whole problem, through which keys are streamed: [`OnlineSoftmax`] at
//! problem grain. The state of a head is its tile states, the same that FlashAttention-2's loop holds.

use std::marker::PhantomData;

use num_traits::Float as _;
use tilewise_core::backend::check_outputs;
use tilewise_core::{
    Algorithm, AnyKeyBlock, AnyTensorMut, Dropout, Element, Error, Finished, HostState, Inputs,
    KeyBlock, OnlineSoftmax, Problem, Result, RunningState, Sequence, TensorViewMut,
};

use crate::CpuBackend;
use crate::buffer::Buffer;
use crate::head::{Head, Scoring};
use crate::kernel::table::CpuElement;
use crate::output::Outputs;
use crate::packed::{KeySource, Packed};
use crate::parallel::{in_order, threads};
use crate::tile::{Machinery, Scratch, TileState};

/// [`OnlineSoftmax`] over whole problems with inputs of type T: made by [`CpuBackend::online`].
#[derive(Clone, Debug)]
pub struct CpuOnline<T> {
    backend: CpuBackend,
    element: PhantomData<T>,
}

/// (m, ℓ, Õ) of every row of a problem, in the accumulator type of T.
pub struct CpuState<T: Element> {
    problem: Problem,
    machinery: Machinery<T>,
    m: Buffer<T::Acc>,
    l: Buffer<T::Acc>,
    acc: Buffer<T::Acc>,
}

impl<T: Element> std::fmt::Debug for CpuState<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuState")
            .field("problem", &self.problem)
            .finish_non_exhaustive()
    }
}

impl<T: Element> CpuState<T> {
    /// Rows of a head, padded.
    fn padded(&self) -> usize {
        self.machinery.shape.padded(self.problem.dims().seqlen_q)
    }

    /// Heads that have rows, counted through the batch: without rows there may be more than can be gone through.
    fn heads(&self) -> usize {
        let dims = self.problem.dims();
        match dims.seqlen_q {
            0 => 0,
            _ => dims.batch * dims.num_heads,
        }
    }

    /// The state of a head, counted through the batch.
    fn head(&self, head: usize) -> TileState<T::Acc> {
        let row = head * self.padded();
        TileState {
            m: self.m.at().wrapping_add(row),
            l: self.l.at().wrapping_add(row),
            acc: self.acc.at().wrapping_add(row * self.machinery.shape.width),
        }
    }

    /// Calls `each` with the number of every row, heads and batch counted through, and its state.
    fn rows(&self, mut each: impl FnMut(usize, TileState<T::Acc>)) {
        let seqlen_q = self.problem.dims().seqlen_q;
        for head in 0..self.heads() {
            for row in 0..seqlen_q {
                // SAFETY: the row lies inside the head's state.
                let state = unsafe { self.head(head).row(&self.machinery.shape, row) };
                each(head * seqlen_q + row, state);
            }
        }
    }
}

impl<T: CpuElement> CpuOnline<T> {
    pub(crate) fn new(backend: CpuBackend) -> Self {
        CpuOnline {
            backend,
            element: PhantomData,
        }
    }

    /// Joins row by row; `other` gives (m, ℓ, Õ) of a row by number.
    fn merge_rows(
        &self,
        state: &mut CpuState<T>,
        mut other: impl FnMut(usize, &mut [T::Acc]) -> (T::Acc, T::Acc),
    ) {
        let width = state.machinery.shape.width;
        let mut row = vec![T::Acc::default(); width];
        let zero = <T::Acc as Element>::from_f64(0.0);
        state.rows(|index, kept| {
            let (m2, l2) = other(index, &mut row);
            if l2 == zero {
                return;
            }
            // SAFETY: `rows` yields states of existing rows; nobody else has them, for `state` is
            // borrowed mutably.
            unsafe {
                let (m1, l1) = (kept.m.read(), kept.l.read());
                // A NaN maximum marks a NaN row; ℓ carries it on.
                let m = if m1 > m2 { m1 } else { m2 };
                let base = if m == T::Acc::neg_infinity() { zero } else { m };
                let (a, b) = ((m1 - base).exp(), (m2 - base).exp());
                // Nothing seen yet: e^(−∞) · 0 would do, were 0 · Õ not NaN for an infinite Õ.
                let a = if l1 == zero { zero } else { a };
                kept.m.write(m);
                kept.l.write(a * l1 + b * l2);
                (state.machinery.kernels.tile.combine)(width, a, kept.acc, b, row.as_ptr());
            }
        });
    }
}

impl<T: CpuElement> OnlineSoftmax for CpuOnline<T> {
    type Spec<'a> = &'a Problem;
    type State = CpuState<T>;
    type Block<'a> = KeyBlock<'a, T>;
    type Output<'a> = Finished<'a, T>;
    type Error = Error;

    /// # Errors
    /// [`Error::DType`] if the problem is of another element type, [`Error::Unsupported`] for packed
    /// sequences (stream each sequence by itself) and for dropout by a mask (a block of keys brings
    /// none), [`Error::OutOfMemory`].
    fn begin(&self, problem: &Problem) -> Result<CpuState<T>> {
        if problem.dtype() != T::DTYPE {
            return Err(Error::DType {
                tensor: "q".into(),
                expected: T::DTYPE,
                got: problem.dtype(),
            });
        }
        if problem.is_packed() {
            return Err(Error::unsupported(
                "cpu",
                "streaming keys of packed sequences",
            ));
        }
        if let Some(Dropout::Mask { .. }) = problem.options().get_dropout() {
            return Err(Error::unsupported(
                "cpu",
                "streaming keys with dropout by a mask",
            ));
        }
        let machinery = self.backend.machinery::<T>(problem, Algorithm::Fa2);
        let dims = problem.dims();
        let rows = dims.batch * dims.num_heads * machinery.shape.padded(dims.seqlen_q);
        let state = CpuState {
            problem: problem.clone(),
            machinery,
            m: Buffer::new(rows, "running maxima")?,
            l: Buffer::new(rows, "running denominators")?,
            acc: Buffer::new(rows * machinery.shape.width, "running output")?,
        };
        for head in 0..state.heads() {
            // SAFETY: the buffers have room for every head's padded rows.
            unsafe { state.head(head).begin(&machinery.shape, dims.seqlen_q) }
        }
        Ok(state)
    }

    fn absorb(&self, state: &mut CpuState<T>, block: KeyBlock<'_, T>) -> Result<()> {
        T::absorb(&self.backend, state, block)
    }

    fn merge(&self, state: &mut CpuState<T>, other: &CpuState<T>) -> Result<()> {
        if state.problem.dims() != other.problem.dims() {
            return Err(Error::shape(
                "state",
                format!("{:?}", state.problem.dims()),
                format!("{:?}", other.problem.dims()),
            ));
        }
        let seqlen_q = state.problem.dims().seqlen_q;
        let (padded, width) = (other.padded(), other.machinery.shape.width);
        // Another instruction set pads rows differently.
        let shared = width.min(state.machinery.shape.width);
        self.merge_rows(state, |index, row| {
            let at = index / seqlen_q * padded + index % seqlen_q;
            // SAFETY: the row lies inside the other state.
            unsafe {
                let acc = other.acc.at().add(at * width);
                std::ptr::copy_nonoverlapping(acc, row.as_mut_ptr(), shared);
                (other.m.at().add(at).read(), other.l.at().add(at).read())
            }
        });
        Ok(())
    }

    fn finish(&self, state: CpuState<T>, output: Finished<'_, T>) -> Result<()> {
        let Finished { mut out, lse } = output;
        let dims = *state.problem.dims();
        let erased = T::erase_mut(out.reborrow());
        check_outputs(&state.problem, &erased, lse.as_ref())?;
        let outputs = Outputs::new(out, lse);
        let Machinery { kernels, shape } = &state.machinery;
        for head in 0..state.heads() {
            let (b, h) = (head / dims.num_heads, head % dims.num_heads);
            let sink = state.problem.options().get_sinks().map(|sinks| sinks[h]);
            let at = state.head(head);
            // SAFETY: the outputs have the problem's shape; each row is written once.
            unsafe {
                outputs.finish(
                    kernels,
                    shape,
                    [b, h, 0],
                    dims.seqlen_q,
                    at,
                    1.0,
                    sink,
                    false,
                );
            }
        }
        Ok(())
    }

    fn export(&self, state: &CpuState<T>) -> Result<HostState> {
        let dims = state.problem.dims();
        let mut host = HostState::empty(dims.lse_shape(), dims.head_dim_v)?;
        state.rows(|index, kept| {
            // SAFETY: `rows` yields states of existing rows.
            unsafe {
                host.m[index] = kept.m.read().to_f64();
                host.l[index] = kept.l.read().to_f64();
                let acc = std::slice::from_raw_parts(kept.acc, dims.head_dim_v);
                let to = &mut host.acc[index * dims.head_dim_v..][..dims.head_dim_v];
                for (to, x) in to.iter_mut().zip(acc) {
                    *to = x.to_f64();
                }
            }
        });
        Ok(host)
    }

    fn import(&self, problem: &Problem, host: &HostState) -> Result<CpuState<T>> {
        let mut state = self.begin(problem)?;
        self.merge_host(&mut state, host)?;
        Ok(state)
    }
}

/// [`OnlineSoftmax::absorb`], to be compiled once for each type.
pub(crate) fn absorb<T: CpuElement>(
    backend: &CpuBackend,
    state: &mut CpuState<T>,
    block: KeyBlock<'_, T>,
) -> Result<()> {
    block.check(&state.problem)?;
    let state = &*state;
    let (machinery, dims) = (&state.machinery, state.problem.dims());
    let shape = &machinery.shape;
    let keys = block.k.shape()[2];
    if keys == 0 || dims.num_heads == 0 {
        return Ok(());
    }
    let mut inputs = Inputs::new(block.q, block.k, block.v);
    inputs.bias = block.bias;
    inputs.mask = block.mask;
    let scoring = Scoring::new(&state.problem, true);
    let group = dims.group();
    let packed = Packed::<T>::new(shape, keys, backend.reserve())?;
    let tiles = dims.seqlen_q.div_ceil(shape.q_tile);
    let workers = threads().min(group * tiles);
    let scratches = (0..workers)
        .map(|_| Scratch::new(shape, dims.seqlen_q.min(shape.q_tile), backend.reserve()))
        .collect::<Result<Vec<Scratch<T>>>>()?;
    let scratches = std::sync::Mutex::new(scratches);
    for (number, sequence) in state.problem.sequences().iter().enumerate() {
        // The chunk, as a sequence of its own.
        let chunk = Sequence {
            k_start: 0,
            seqlen_k: keys,
            ..*sequence
        };
        for kv_head in 0..dims.num_kv_heads {
            let source = || KeySource::new(&inputs, &chunk, kv_head);
            // SAFETY: the room is for `keys` keys, and whoever read the last head is done.
            unsafe { machinery.pack_all(&packed, keys, source) };
            in_order(
                group * tiles,
                workers,
                || (),
                |_, (), item| {
                    let (n, tile) = (item / tiles, item % tiles);
                    let first = tile * shape.q_tile;
                    let rows = first..(first + shape.q_tile).min(dims.seqlen_q);
                    let head = kv_head * group + n;
                    let query = Head::new(
                        &state.problem,
                        &inputs,
                        number,
                        head,
                        scoring,
                        block.first_key,
                        0,
                    );
                    let lock = || scratches.lock().unwrap_or_else(|e| e.into_inner());
                    let mut scratch = lock().pop().expect("one scratch was made for each worker");
                    // SAFETY: the chunk is packed; each item has rows of its own.
                    unsafe {
                        let at = state.head(sequence.q_batch * dims.num_heads + head);
                        let at = at.row(shape, first);
                        let source = KeySource::new(&inputs, &chunk, kv_head);
                        machinery.absorb(&query, &source, &packed, &rows, keys, &mut scratch, at);
                    }
                    lock().push(scratch);
                },
            );
        }
    }
    Ok(())
}

impl<T: CpuElement> CpuOnline<T> {
    /// Joins the exported state of other keys of the same rows, from any backend.
    ///
    /// # Errors
    /// [`Error::Shape`] if it is of another size.
    pub fn merge_host(&self, state: &mut CpuState<T>, host: &HostState) -> Result<()> {
        host.check(&state.problem)?;
        self.merge_rows(state, |index, row| {
            let acc = &host.acc[index * host.head_dim_v..][..host.head_dim_v];
            for (to, &x) in row.iter_mut().zip(acc) {
                *to = <T::Acc as Element>::from_f64(x);
            }
            let acc = <T::Acc as Element>::from_f64;
            (acc(host.m[index]), acc(host.l[index]))
        });
        Ok(())
    }
}

/// A state behind [`RunningState`].
pub(crate) struct Running<T: Element> {
    pub(crate) online: CpuOnline<T>,
    pub(crate) state: CpuState<T>,
}

impl<T: CpuElement> RunningState for Running<T> {
    fn absorb(&mut self, block: &AnyKeyBlock<'_>) -> Result<()> {
        let wrong = |tensor: &'static str, got| Error::DType {
            tensor: tensor.into(),
            expected: T::DTYPE,
            got,
        };
        let bias = match block.bias {
            Some(bias) => Some(T::typed(bias).ok_or_else(|| wrong("bias", bias.dtype()))?),
            None => None,
        };
        let block = KeyBlock {
            q: T::typed(block.q).ok_or_else(|| wrong("q", block.q.dtype()))?,
            k: T::typed(block.k).ok_or_else(|| wrong("k", block.k.dtype()))?,
            v: T::typed(block.v).ok_or_else(|| wrong("v", block.v.dtype()))?,
            first_key: block.first_key,
            bias,
            mask: block.mask,
        };
        self.online.absorb(&mut self.state, block)
    }

    fn merge(&mut self, other: &HostState) -> Result<()> {
        self.online.merge_host(&mut self.state, other)
    }

    fn export(&self) -> Result<HostState> {
        self.online.export(&self.state)
    }

    fn finish(
        self: Box<Self>,
        out: AnyTensorMut<'_>,
        lse: Option<TensorViewMut<'_, f32>>,
    ) -> Result<()> {
        check_outputs(&self.state.problem, &out, lse.as_ref())?;
        let got = out.dtype();
        let out = T::typed_mut(out).ok_or(Error::DType {
            tensor: "out".into(),
            expected: T::DTYPE,
            got,
        })?;
        let Running { online, state } = *self;
        online.finish(state, Finished { out, lse })
    }
}
