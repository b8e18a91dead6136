//! Tensors, however they lie in memory.

use proptest::prelude::*;
use tilewise_core::TensorView;

use crate::Noise;

/// How the elements of a tensor lie in memory.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// `[batch, heads, seqlen, head_dim]`.
    Bhsd,
    /// `[batch, seqlen, heads, head_dim]`.
    Bshd,
    /// Rows and heads further apart than they need be, from an odd offset on.
    Spread,
    /// Rows from last to first.
    Reversed,
    /// Every second element of a row.
    Strided,
    /// Axes in any order, with gaps and reversals, as the seed has it.
    Shuffled(u64),
}

/// Any layout; the plain ones more often.
pub fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        4 => Just(Layout::Bhsd),
        2 => Just(Layout::Bshd),
        1 => Just(Layout::Spread),
        1 => Just(Layout::Reversed),
        1 => Just(Layout::Strided),
        3 => any::<u64>().prop_map(Layout::Shuffled),
    ]
}

impl Layout {
    /// Strides, where the first element lies, and how many slots there are.
    fn place(self, shape: [usize; 4]) -> ([isize; 4], usize, usize) {
        let [b, h, s, d] = shape;
        let signed = |strides: [usize; 4]| strides.map(|stride| stride as isize);
        let size = b * h * s * d;
        match self {
            Layout::Bhsd => (signed([h * s * d, s * d, d, 1]), 0, size),
            Layout::Bshd => (signed([s * h * d, d, h * d, 1]), 0, size),
            Layout::Spread => {
                let row = d + 3;
                let head = s * row + 5;
                (signed([h * head, head, row, 1]), 3, 3 + b * h * head)
            }
            Layout::Reversed => {
                let mut strides = signed([h * s * d, s * d, d, 1]);
                strides[2] = -strides[2];
                (strides, s.saturating_sub(1) * d, size)
            }
            Layout::Strided => (
                signed([2 * h * s * d, 2 * s * d, 2 * d, 2]),
                1,
                1 + 2 * size,
            ),
            Layout::Shuffled(seed) => shuffled(shape, &mut Noise(seed)),
        }
    }
}

fn shuffled(shape: [usize; 4], noise: &mut Noise) -> ([isize; 4], usize, usize) {
    let mut order = [0, 1, 2, 3];
    for n in (1..4).rev() {
        order.swap(n, noise.below(n + 1));
    }
    let mut strides = [0isize; 4];
    let mut step = 1usize;
    for &axis in order.iter().rev() {
        let stride = step + noise.below(3);
        strides[axis] = stride as isize;
        step = stride * shape[axis].max(1);
    }
    let mut offset = noise.below(2);
    let len = step + offset + 1;
    for axis in 0..4 {
        if noise.below(4) == 0 {
            offset += shape[axis].saturating_sub(1) * strides[axis] as usize;
            strides[axis] = -strides[axis];
        }
    }
    (strides, offset, len)
}

/// A tensor with its memory. Slots that belong to no element hold what it was given for gaps.
#[derive(Clone, Debug)]
pub struct Tensor<T> {
    /// All slots.
    pub data: Vec<T>,
    /// `[batch, heads, seqlen, head_dim]`.
    pub shape: [usize; 4],
    /// In elements, of the axes of `shape`.
    pub strides: [isize; 4],
    /// Where the first element lies.
    pub offset: usize,
}

impl<T: Copy> Tensor<T> {
    /// `element` is called for each element, in row-major order.
    pub fn new(shape: [usize; 4], layout: Layout, gap: T, mut element: impl FnMut() -> T) -> Self {
        let (strides, offset, len) = layout.place(shape);
        let mut tensor = Tensor {
            data: vec![gap; len],
            shape,
            strides,
            offset: if shape.contains(&0) { 0 } else { offset },
        };
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for s in 0..shape[2] {
                    for d in 0..shape[3] {
                        let at = tensor.at([b, h, s, d]);
                        tensor.data[at] = element();
                    }
                }
            }
        }
        tensor
    }

    /// The elements `values`, in row-major order.
    pub fn of(values: &[T], shape: [usize; 4], layout: Layout, gap: T) -> Self {
        let mut values = values.iter();
        Tensor::new(shape, layout, gap, || {
            *values.next().expect("a value for each element")
        })
    }

    /// Where the element of that index lies in `data`.
    pub fn at(&self, index: [usize; 4]) -> usize {
        let steps = index.into_iter().zip(self.strides);
        let steps: isize = steps.map(|(i, stride)| i as isize * stride).sum();
        (self.offset as isize + steps) as usize
    }

    /// The tensor as the crates take it.
    pub fn view(&self) -> TensorView<'_, T> {
        TensorView::from_strides(&self.data, self.shape, self.strides, self.offset)
            .expect("strides that fit")
    }
}
