//! Physical memory before a measurement.

use std::fs;

use anyhow::{Context, Result};

use crate::process::bytes_of;

/// Bytes that stay free for the kernel and other programs.
const RESERVE_BYTES: u64 = 1 << 30;
const AVAILABLE: &str = "MemAvailable:";
const PIECE_BYTES: usize = 64 << 20;

/// Writes to `bytes` of memory that nothing uses and frees them, or to what is available, if that is
/// less.
///
/// A host that is itself a guest gets its memory when it first touches it, and may lose it again when
/// it frees it. That cost would be charged to the variant that runs next. The kernel hands out first
/// what was freed last, so that a few times the memory of one migration is enough.
///
/// # Errors
/// `/proc/meminfo` cannot be read.
pub fn touch_physical_memory(bytes: u64) -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = bytes_of(&text, AVAILABLE).context("/proc/meminfo has no MemAvailable")?;
    // In a container the limit is that of its control group, "max" if there is none.
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    let limit = limit.trim().parse().unwrap_or(u64::MAX);
    let mut pieces = Vec::new();
    let mut left = available
        .min(limit)
        .saturating_sub(RESERVE_BYTES)
        .min(bytes);
    while left >= PIECE_BYTES as u64 {
        // A nonzero value: the allocator would map zeros without touching them.
        pieces.push(std::hint::black_box(vec![1_u8; PIECE_BYTES]));
        left -= PIECE_BYTES as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:       24576 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(bytes_of(text, AVAILABLE), Some(1 << 20));
        assert_eq!(bytes_of("MemTotal: 1 kB\n", AVAILABLE), None);
    }
}
