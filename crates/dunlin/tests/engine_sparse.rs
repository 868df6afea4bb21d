//! Tests the cost of `--verify` for a large, sparse guest: the comparison takes almost no memory
//! (invariant I8). The test is alone in its process, because it measures the process's memory.
//! `--nocapture` prints the figures and the CPU time.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::ops::Range;
use std::sync::Arc;

use dunlin::engine::memory::{MappedMemory, digest};
use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const MIB: u64 = 1 << 20;
const GUEST_BYTES: u64 = 10 << 30;
/// Tolerance for the measurement itself.
const NOISE_BYTES: u64 = 4 * MIB;
/// Content of the guest, in pieces of 1 MiB spread over its memory.
const CONTENT_BYTES: u64 = 256 * MIB;

/// Resident bytes of the regions' mappings.
fn resident_bytes(memory: &TrackedMemory) -> u64 {
    let regions: Vec<Range<u64>> = memory
        .iter()
        .map(|region| {
            let start = region.as_ptr() as u64;
            start..start + region.len()
        })
        .collect();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut bytes, mut ours) = (0, false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-')
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            let overlaps = |region: &Range<u64>| region.start < to && from < region.end;
            ours = regions.iter().any(overlaps);
        } else if first == "Rss:" && ours {
            bytes += words.next().unwrap().parse::<u64>().unwrap() << 10;
        }
    }
    bytes
}

/// Bytes of this process's page tables. A read of a hole adds an entry for the kernel's
/// zero page, which does not count as resident.
fn page_table_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPTE:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

#[test]
fn i8_the_digest_of_a_sparse_guest_populates_nothing() {
    for backing in [Backing::Private, Backing::Memfd] {
        let memory = Arc::new(allocate(GUEST_BYTES, backing).unwrap());
        let piece = vec![7; MIB as usize];
        let apart = GUEST_BYTES / (CONTENT_BYTES / MIB);
        let mut written = 0;
        for region in memory.iter() {
            for offset in (0..region.len()).step_by(apart as usize) {
                let address = GuestAddress(region.start_addr().0 + offset);
                memory.write_slice(&piece, address).unwrap();
                written += MIB;
            }
        }
        assert!(written >= CONTENT_BYTES);
        let mapped = MappedMemory::new(Arc::clone(&memory), 4096);
        let (before, tables_before) = (resident_bytes(&memory), page_table_bytes());
        let began = thread_cpu_time();
        digest(&mapped, 1).unwrap();
        let took = thread_cpu_time() - began;
        let (after, tables_after) = (resident_bytes(&memory), page_table_bytes());
        println!(
            "digest of {} GiB of {backing:?} memory with {} MiB written: {took:?} of CPU time, \
             {} MiB resident before and {} after",
            GUEST_BYTES >> 30,
            written / MIB,
            before / MIB,
            after / MIB
        );
        assert!(before >= written, "the measurement misses written pages");
        // If the digest read the holes, all of a memfd would become resident, and the page tables
        // of 10 GiB would take 20 MiB.
        assert!(
            after < before + NOISE_BYTES,
            "{backing:?}: {before}, {after}"
        );
        assert!(
            tables_after < tables_before + NOISE_BYTES,
            "{backing:?}: {tables_before}, {tables_after}"
        );
    }
}
