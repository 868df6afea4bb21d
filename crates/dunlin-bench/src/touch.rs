//! Prepares physical memory before a measurement.

use std::fs;

use anyhow::{Context, Result};
use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, advise_huge_pages, allocate, layout};
use vm_memory::{Bytes, GuestAddress};

use crate::process::bytes_of;

/// Bytes that stay free for the kernel and other programs.
const RESERVE_BYTES: u64 = 1 << 30;
const AVAILABLE: &str = "MemAvailable:";

/// Allocates `bytes` bytes of memory, in huge pages if possible, writes to all of them, and frees
/// them. Allocates at most the available memory minus a reserve of 1 GiB.
///
/// If this host is itself a guest, its hypervisor allocates memory when the host first touches it,
/// and may take it back after the host has freed it. Without this call, the measurement of the next
/// variant would include the time of that allocation. After this call, the kernel usually gives
/// that variant the blocks that were freed last, and the hypervisor has already allocated these
/// blocks.
///
/// # Errors
/// `/proc/meminfo` cannot be read, or the memory cannot be mapped.
pub fn touch_physical_memory(bytes: u64) -> Result<()> {
    let most = available_bytes()?.saturating_sub(RESERVE_BYTES);
    let bytes = bytes.min(most) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if bytes == 0 {
        return Ok(());
    }
    let memory = allocate(bytes, Backing::Private)?;
    advise_huge_pages(&memory);
    let piece = vec![0; HUGE_PAGE_BYTES as usize];
    for (start, length) in layout(bytes) {
        for offset in (0..length).step_by(piece.len()) {
            memory.write_slice(&piece, GuestAddress(start + offset))?;
        }
    }
    Ok(())
}

/// Returns the amount of memory that a process can still use.
///
/// # Errors
/// `/proc/meminfo` cannot be read.
pub fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = bytes_of(&text, AVAILABLE).context("/proc/meminfo has no MemAvailable")?;
    // In a container the control group limits the memory. The value "max" means that there is no
    // limit.
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    Ok(available.min(limit.trim().parse().unwrap_or(u64::MAX)))
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
