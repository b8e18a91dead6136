//! What the processor says of itself: its name and its caches.

use std::fs;
use std::sync::OnceLock;

/// Data caches of one core, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caches {
    /// First level, data.
    pub l1d: usize,
    /// Second level.
    pub l2: usize,
    /// Third level, shared; 0 if unknown.
    pub l3: usize,
}

impl Caches {
    /// Those of this machine (from Linux's sysfs), read once; 32 KiB, 1 MiB and unknown elsewhere.
    pub fn detect() -> Caches {
        static CACHES: OnceLock<Caches> = OnceLock::new();
        *CACHES.get_or_init(|| {
            let mut caches = Caches {
                l1d: 32 << 10,
                l2: 1 << 20,
                l3: 0,
            };
            for index in 0..8 {
                let read = |name: &str| {
                    let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}");
                    fs::read_to_string(path).ok().map(|s| s.trim().to_string())
                };
                let (Some(level), Some(kind), Some(size)) = (
                    read("level"),
                    read("type"),
                    read("size").and_then(|s| bytes(&s)),
                ) else {
                    continue;
                };
                match (level.as_str(), kind.as_str()) {
                    ("1", "Data" | "Unified") => caches.l1d = size,
                    ("2", "Data" | "Unified") => caches.l2 = size,
                    ("3", "Data" | "Unified") => caches.l3 = size,
                    _ => {}
                }
            }
            caches
        })
    }
}

/// sysfs writes `32K` or `1M`.
fn bytes(size: &str) -> Option<usize> {
    let (digits, factor) = match size.as_bytes().last()? {
        b'K' => (&size[..size.len() - 1], 1 << 10),
        b'M' => (&size[..size.len() - 1], 1 << 20),
        b'G' => (&size[..size.len() - 1], 1 << 30),
        _ => (size, 1),
    };
    digits
        .parse::<usize>()
        .ok()?
        .checked_mul(factor)
        .filter(|&n| n > 0)
}

/// The processor's name, as the system gives it.
pub(crate) fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|line| {
            line.strip_prefix("model name")?
                .split_once(':')
                .map(|x| x.1)
        })
        .map_or_else(
            || std::env::consts::ARCH.to_string(),
            |name| name.trim().to_string(),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(bytes("32K"), Some(32 << 10));
        assert_eq!(bytes("2M"), Some(2 << 20));
        assert_eq!(bytes("512"), Some(512));
        assert_eq!(bytes("K"), None);
        assert_eq!(bytes(""), None);
    }
}
