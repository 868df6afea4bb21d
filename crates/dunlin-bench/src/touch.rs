//! Prepares physical memory before a measurement.

use std::fs;

use anyhow::{Context, Result};
use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, TrackedMemory, advise_huge_pages, allocate};
use vm_memory::{Bytes, GuestAddress};

use crate::process::bytes_of;

/// Bytes that stay free for the kernel and other programs.
const RESERVE_BYTES: u64 = 1 << 30;
const AVAILABLE: &str = "MemAvailable:";

/// The unit in which [`TouchedMemory`] is freed.
const PIECE_BYTES: u64 = 32 * HUGE_PAGE_BYTES;

/// Allocates `bytes` bytes of memory, in huge pages if possible, writes to all of them, and frees
/// them. Rounds down to a multiple of 64 MiB, and allocates at most the available memory minus a
/// reserve of 1 GiB.
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
    TouchedMemory::new(bytes).map(drop)
}

/// Memory that was written to, as by [`touch_physical_memory`], and is freed in parts. A measurement
/// of many seconds needs this: a hypervisor may take free memory back after two seconds
/// (`virtio_balloon`'s free page reporting).
#[derive(Debug)]
pub struct TouchedMemory(Vec<TrackedMemory>);

impl TouchedMemory {
    /// Allocates `bytes` bytes, rounded down to a multiple of 64 MiB, and writes to all of them.
    ///
    /// # Errors
    /// See [`touch_physical_memory`].
    pub fn new(bytes: u64) -> Result<Self> {
        let most = available_bytes()?.saturating_sub(RESERVE_BYTES);
        let count = bytes.min(most) / PIECE_BYTES;
        (0..count)
            .map(|_| touched_piece())
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Frees memory until at most `bytes` bytes are left.
    pub fn free_to(&mut self, bytes: u64) {
        let pieces = bytes / PIECE_BYTES;
        self.0
            .truncate(usize::try_from(pieces).unwrap_or(usize::MAX));
    }
}

fn touched_piece() -> Result<TrackedMemory> {
    let memory = allocate(PIECE_BYTES, Backing::Private)?;
    advise_huge_pages(&memory);
    let page = vec![0; HUGE_PAGE_BYTES as usize];
    for offset in (0..PIECE_BYTES).step_by(page.len()) {
        memory.write_slice(&page, GuestAddress(offset))?;
    }
    Ok(memory)
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn touched_memory_is_freed_in_pieces() {
        let pieces = (0..3).map(|_| touched_piece().unwrap());
        let mut memory = TouchedMemory(pieces.collect());
        assert_eq!(memory.0.len(), 3);
        memory.free_to(4 * PIECE_BYTES);
        assert_eq!(memory.0.len(), 3);
        memory.free_to(2 * PIECE_BYTES - 1);
        assert_eq!(memory.0.len(), 1);
        memory.free_to(0);
        assert_eq!(memory.0.len(), 0);
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:       24576 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(bytes_of(text, AVAILABLE), Some(1 << 20));
        assert_eq!(bytes_of("MemTotal: 1 kB\n", AVAILABLE), None);
    }
}
