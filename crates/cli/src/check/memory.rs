//! Tensors of a case in memory: as the file has them, as views into storage, or as views into
//! address space that is mostly untouched.

use std::borrow::Cow;

use memmap2::MmapMut;
use tilewise::{Error, TensorView};

use super::case::ViewSpec;
use crate::container::{Container, ContainerError, Plain, Tensor, mapped};

/// Where the elements are.
enum Memory<T> {
    Held(Vec<T>),
    /// Zero wherever nothing was written.
    Lazy(MmapMut),
}

/// A tensor of four axes.
pub(super) struct Placed<T> {
    memory: Memory<T>,
    shape: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

/// Why a tensor is not in memory.
pub(super) enum Unplaced {
    /// Not the case's fault: it is to be counted as refused.
    Refused(String),
    /// The case's tensors do not fit together: what an error case wants to see.
    Wrong(Error),
    /// The file is broken.
    Broken(anyhow::Error),
}

impl From<ContainerError> for Unplaced {
    fn from(error: ContainerError) -> Self {
        Unplaced::Broken(error.into())
    }
}

impl<T: Plain> Placed<T> {
    /// The tensor called `name`, as its view says if it has one.
    pub(super) fn load(
        container: &Container,
        name: &'static str,
        view: Option<&ViewSpec>,
    ) -> Result<Self, Unplaced> {
        let plain = container.tensor(name)?;
        let four = |shape: &[usize]| {
            <[usize; 4]>::try_from(shape)
                .map_err(|_| Unplaced::Wrong(Error::shape(name, "four axes", format!("{shape:?}"))))
        };
        let shape = four(plain.shape())?;
        let Some(view) = view else {
            return Ok(Placed {
                memory: Memory::Held(held(&plain)?),
                shape,
                strides: row_major(shape),
                offset: 0,
            });
        };
        let strides = <[isize; 4]>::try_from(view.strides.as_slice());
        let (Ok(strides), true) = (strides, view.shape == shape) else {
            return Err(broken(name, "the view is not one of the tensor"));
        };
        let memory = match (&view.storage, view.lazy) {
            (Some(storage), false) => Memory::Held(held(&container.tensor(storage)?)?),
            (None, true) => {
                let values = held::<T>(&plain)?;
                Memory::Lazy(lazy(name, view, shape, strides, &values)?)
            }
            _ => return Err(broken(name, "the view has neither storage nor is it lazy")),
        };
        let placed = Placed {
            memory,
            shape,
            strides,
            offset: view.offset,
        };
        // The view is another form of the tensor, not another tensor.
        let seen = placed.view(name).map_err(|e| broken(name, e.to_string()))?;
        let mut plain = held::<T>(&plain)?.into_iter();
        for index in indices(shape) {
            let expected = plain.next();
            let same = expected
                .is_some_and(|x| bytemuck::bytes_of(&x) == bytemuck::bytes_of(&seen.at(index)));
            if !same {
                return Err(broken(
                    name,
                    format!("the view differs from it at {index:?}"),
                ));
            }
        }
        Ok(placed)
    }

    /// A contiguous tensor.
    pub(super) fn contiguous(values: Vec<T>, shape: [usize; 4]) -> Self {
        Placed {
            memory: Memory::Held(values),
            shape,
            strides: row_major(shape),
            offset: 0,
        }
    }

    /// Sets rows `from..to` of the seqlen axis of a contiguous tensor, in every batch entry and
    /// head; rows beyond its end are none of it.
    pub(super) fn fill_rows(&mut self, from: usize, to: usize, value: T) {
        let [_, _, seqlen, width] = self.shape;
        let Memory::Held(values) = &mut self.memory else {
            return;
        };
        let (from, to) = (from.min(seqlen), to.min(seqlen));
        if width == 0 || from >= to {
            return;
        }
        for rows in values.chunks_exact_mut(seqlen * width) {
            rows[from * width..to * width].fill(value);
        }
    }

    /// The elements through their view.
    pub(super) fn view(&self, name: &'static str) -> tilewise::Result<TensorView<'_, T>> {
        let data = match &self.memory {
            Memory::Held(values) => values.as_slice(),
            // Mappings start at a page and hold whole elements.
            Memory::Lazy(map) => bytemuck::cast_slice(map),
        };
        TensorView::from_strides(data, self.shape, self.strides, self.offset)
            .map_err(|e| e.named(name))
    }
}

fn broken(name: &str, what: impl std::fmt::Display) -> Unplaced {
    Unplaced::Broken(anyhow::anyhow!("{name}: {what}"))
}

/// A tensor's elements, aligned.
fn held<T: Plain>(tensor: &Tensor<'_>) -> Result<Vec<T>, Unplaced> {
    tensor.as_slice::<T>().map(Cow::into_owned).map_err(|_| {
        Unplaced::Wrong(Error::shape(
            tensor.name().to_owned(),
            format!("elements of {}", T::KIND),
            tensor.kind().name(),
        ))
    })
}

/// Address space for a lazy view, with `values` written through it.
fn lazy<T: Plain>(
    name: &str,
    view: &ViewSpec,
    shape: [usize; 4],
    strides: [isize; 4],
    values: &[T],
) -> Result<MmapMut, Unplaced> {
    if view.fill != 0.0 {
        return Err(Unplaced::Refused(format!(
            "a lazy view of {name} filled with {} would take all of its memory",
            view.fill
        )));
    }
    let bytes = view
        .storage_elements
        .and_then(|elements| elements.checked_mul(size_of::<T>()))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| {
            broken(
                name,
                "the lazy view's storage_elements are missing or too many",
            )
        })?;
    let mut map = mapped::zeroed(bytes).map_err(|e| {
        Unplaced::Refused(format!("{bytes} bytes of address space for {name}: {e}"))
    })?;
    let memory: &mut [T] = bytemuck::cast_slice_mut(&mut map);
    let positions = TensorView::from_strides(memory, shape, strides, view.offset)
        .map(|seen| {
            indices(shape)
                .map(move |index| seen.position(index))
                .collect::<Vec<_>>()
        })
        .map_err(|e| broken(name, e))?;
    for (position, &value) in positions.into_iter().zip(values) {
        memory[position] = value;
    }
    Ok(map)
}

fn row_major(shape: [usize; 4]) -> [isize; 4] {
    let mut strides = [1isize; 4];
    for axis in (0..3).rev() {
        strides[axis] = strides[axis + 1].saturating_mul(shape[axis + 1].max(1) as isize);
    }
    strides
}

/// Every index of a shape, row-major.
fn indices(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [b, h, s, d] = shape;
    (0..b).flat_map(move |b| {
        (0..h).flat_map(move |h| (0..s).flat_map(move |s| (0..d).map(move |d| [b, h, s, d])))
    })
}

/// Fails unless the tensor has one axis.
pub(super) fn vector(tensor: &Tensor<'_>) -> Result<(), Unplaced> {
    match tensor.shape().len() {
        1 => Ok(()),
        _ => Err(Unplaced::Refused(format!(
            "{} of shape {:?} is not supported, one axis is",
            tensor.name(),
            tensor.shape()
        ))),
    }
}
