//! The axes of a file's tensor, as the four that attention has.

use anyhow::{Result, bail};

use crate::args::tensors::Layout;

/// Shape and strides of `[batch, heads, seqlen, head_dim]` from those of two to four axes.
pub(super) fn attention(
    tensor: &str,
    shape: &[usize],
    strides: &[isize],
    layout: Layout,
) -> Result<([usize; 4], [isize; 4])> {
    // The axes that are there, as places in [batch, heads, seqlen, head_dim].
    let places: &[usize] = match (shape.len(), layout) {
        (4, Layout::Bhsd) => &[0, 1, 2, 3],
        (4, Layout::Bshd) => &[0, 2, 1, 3],
        (3, Layout::Bhsd) => &[1, 2, 3],
        (3, Layout::Bshd) => &[2, 1, 3],
        (2, _) => &[2, 3],
        _ => bail!("{tensor}: expected 2, 3 or 4 axes, got shape {shape:?}"),
    };
    Ok(placed(places, shape, strides))
}

/// Shape and strides of a bias or mask: axes that are missing in front count as 1, as numpy
/// broadcasts.
pub(super) fn broadcast(
    tensor: &str,
    shape: &[usize],
    strides: &[isize],
) -> Result<([usize; 4], [isize; 4])> {
    match shape.len() {
        rank @ 0..=4 => {
            let places: Vec<usize> = (4 - rank..4).collect();
            Ok(placed(&places, shape, strides))
        }
        _ => bail!("{tensor}: expected at most 4 axes, got shape {shape:?}"),
    }
}

/// The shape `[batch, heads, seqlen]` of lse from one to three axes.
pub(super) fn lse(tensor: &str, shape: &[usize]) -> Result<[usize; 3]> {
    match *shape {
        [b, h, s] => Ok([b, h, s]),
        [h, s] => Ok([1, h, s]),
        [s] => Ok([1, 1, s]),
        _ => bail!("{tensor}: expected 1, 2 or 3 axes, got shape {shape:?}"),
    }
}

/// Refuses numbers that stand along more than one axis where a list is wanted: one a head, or one a sequence.
pub(super) fn list(tensor: &str, shape: &[usize]) -> Result<()> {
    if shape.iter().filter(|&&size| size != 1).count() > 1 {
        bail!("{tensor}: expected one axis, got shape {shape:?}");
    }
    Ok(())
}

fn placed(places: &[usize], shape: &[usize], strides: &[isize]) -> ([usize; 4], [isize; 4]) {
    let (mut wide_shape, mut wide_strides) = ([1; 4], [0; 4]);
    for ((&place, &size), &stride) in places.iter().zip(shape).zip(strides) {
        wide_shape[place] = size;
        wide_strides[place] = stride;
    }
    (wide_shape, wide_strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_axes_count_as_one_and_order_follows_the_layout() {
        let (shape, strides) = attention("q", &[5, 3, 8], &[24, 8, 1], Layout::Bshd).unwrap();
        assert_eq!((shape, strides), ([1, 3, 5, 8], [0, 8, 24, 1]));
        let (shape, _) = attention("q", &[5, 3, 8], &[24, 8, 1], Layout::Bhsd).unwrap();
        assert_eq!(shape, [1, 5, 3, 8]);
        let (shape, strides) =
            attention("q", &[2, 5, 3, 8], &[120, 24, 8, 1], Layout::Bshd).unwrap();
        assert_eq!((shape, strides), ([2, 3, 5, 8], [120, 8, 24, 1]));
        assert!(attention("q", &[8], &[1], Layout::Bhsd).is_err());
        assert_eq!(
            broadcast("mask", &[4, 5], &[5, 1]).unwrap(),
            ([1, 1, 4, 5], [0, 0, 5, 1])
        );
        assert!(broadcast("mask", &[1; 5], &[1; 5]).is_err());
        assert_eq!(lse("lse", &[3, 4]).unwrap(), [1, 3, 4]);
        let error = lse("dlse", &[1; 4]).unwrap_err().to_string();
        assert!(error.starts_with("dlse: "), "{error}");
        for shape in [&[][..], &[7], &[1, 7], &[7, 1, 1]] {
            assert!(list("sinks", shape).is_ok(), "{shape:?}");
        }
        assert!(list("sinks", &[2, 2]).is_err());
    }
}
