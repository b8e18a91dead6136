//! Memory whose size comes from a caller's shapes.

use crate::error::{Error, Result};

/// Bytes up to which memory counts as there.
const LOOKED_FROM: u64 = 16 << 20;

/// Whether this machine has memory and swap for `bytes`, used or not.
///
/// A system that overcommits grants any size that its addresses can count, and ends the process at the
/// touch of the last page there is. Where a system does not say what it has, it counts as having all.
pub fn is_installed(bytes: u64) -> bool {
    // What every machine has is not worth a look.
    bytes <= LOOKED_FROM || installed().is_none_or(|installed| bytes <= installed)
}

/// Bytes of memory and swap, where Linux says so. Asked anew each time, for a machine may get more, and
/// reading it is nothing beside touching what it is asked for.
fn installed() -> Option<u64> {
    total(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// Memory and swap of a table of `Name:  number kB`.
fn total(table: &str) -> Option<u64> {
    let line = |name| table.lines().find_map(|line| line.strip_prefix(name));
    let bytes = |name| {
        let kibibytes = line(name)?.trim().strip_suffix(" kB")?;
        kibibytes.parse::<u64>().ok()?.checked_mul(1024)
    };
    bytes("MemTotal:")?.checked_add(bytes("SwapTotal:").unwrap_or(0))
}

/// A vector for a tensor of this shape, every element `fill`.
///
/// # Errors
/// [`Error::OutOfMemory`] if its size cannot be counted or had, before any of it is touched; `what`
/// names the tensor there.
pub fn allocate<T: Clone>(shape: &[usize], what: &str, fill: T) -> Result<Vec<T>> {
    let mut memory = reserve(shape, what)?;
    // The product that `reserve` has counted.
    memory.resize(shape.iter().product(), fill);
    Ok(memory)
}

/// An empty vector with room for a tensor of this shape, for what is written element after element.
///
/// # Errors
/// As [`allocate`].
pub fn reserve<T>(shape: &[usize], what: &str) -> Result<Vec<T>> {
    let len = shape
        .iter()
        .try_fold(1usize, |len, &size| len.checked_mul(size));
    let bytes = (shape.iter()).fold(size_of::<T>() as u64, |bytes, &size| {
        bytes.saturating_mul(size as u64)
    });
    let mut memory = Vec::new();
    match len {
        Some(len) if is_installed(bytes) && memory.try_reserve_exact(len).is_ok() => Ok(memory),
        _ => Err(Error::OutOfMemory {
            backend: "host".into(),
            what: what.into(),
            bytes,
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
        let room = reserve::<u8>(&[2, 3], "q").unwrap();
        assert!(room.is_empty() && room.capacity() >= 6);
        for shape in [[usize::MAX, 2], [1 << 61, 1]] {
            let error = allocate(&shape, "lse", 0f32).unwrap_err();
            assert!(error.to_string().contains("lse"), "{error}");
            assert_eq!(error, reserve::<f32>(&shape, "lse").unwrap_err());
        }
    }

    #[test]
    fn memory_and_swap_are_read_in_kibibytes() {
        let table = "MemTotal:       24576 kB\nMemFree: 1 kB\nSwapTotal:   1024 kB\n";
        assert_eq!(total(table), Some(25 << 20));
        assert_eq!(total("MemTotal: 2 kB"), Some(2048));
        assert_eq!(total("MemTotal: 2 MB\nSwapTotal: 1 kB"), None);
        assert_eq!(total(""), None);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_untouched() {
        assert!(is_installed(LOOKED_FROM));
        let Some(installed) = installed() else { return };
        assert!(installed > LOOKED_FROM, "{installed}");
        assert!(is_installed(installed) && !is_installed(installed + 1));
        // With overcommitment a system would grant it.
        let error = allocate(&[installed as usize / 8 + 1], "row maxima", 1f64).unwrap_err();
        assert!(error.to_string().contains("row maxima"), "{error}");
    }
}
