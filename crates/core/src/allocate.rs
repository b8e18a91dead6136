//! Memory whose size comes from a caller's shapes.

use crate::error::{Error, Result};

/// A vector for a tensor of this shape, every element `fill`.
///
/// # Errors
/// [`Error::OutOfMemory`] if its size cannot be counted or had; `what` names the tensor there.
pub fn allocate<T: Clone>(shape: &[usize], what: &str, fill: T) -> Result<Vec<T>> {
    let len = shape
        .iter()
        .try_fold(1usize, |len, &size| len.checked_mul(size));
    let mut memory = Vec::new();
    match len {
        Some(len) if memory.try_reserve_exact(len).is_ok() => {
            memory.resize(len, fill);
            Ok(memory)
        }
        _ => Err(Error::OutOfMemory {
            backend: "host".into(),
            what: what.into(),
            bytes: shape.iter().fold(size_of::<T>() as u64, |bytes, &size| {
                bytes.saturating_mul(size as u64)
            }),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_be_had_are_refused_by_name() {
        assert_eq!(allocate(&[2, 3], "out", 1u8).unwrap(), [1; 6]);
        assert!(allocate(&[5, 0], "out", 0f32).unwrap().is_empty());
        for shape in [[usize::MAX, 2], [1 << 61, 1]] {
            let error = allocate(&shape, "lse", 0f32).unwrap_err().to_string();
            assert!(error.contains("lse"), "{error}");
        }
    }
}
