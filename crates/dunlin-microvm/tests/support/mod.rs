//! Functions that the tests of the machine share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod moves;

use std::time::{Duration, Instant};

use dunlin::engine::vmm::DirtyLog;
use dunlin_linux::mapping::PAGE_BYTES;
use dunlin_microvm::{Config, DEVICE_START, HostOptions, Vm, VmDescription, VmState};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// A machine's dirty logs, combined into one log.
pub struct Logs(Vec<Box<dyn DirtyLog>>);

impl Logs {
    /// Starts the logs.
    pub fn start(vm: &Vm) -> Self {
        let mut logs = vm.dirty_logs();
        logs.iter_mut().for_each(|log| log.start().unwrap());
        Self(logs)
    }

    /// Returns the pages that were written since the start or the last call, as one bitmap per
    /// region.
    pub fn fetch(&mut self) -> Vec<Vec<u64>> {
        let mut maps: Vec<Vec<u64>> = Vec::new();
        let mut add = |region: usize, words: &[u64]| match maps.get_mut(region) {
            Some(map) => {
                assert_eq!(map.len(), words.len(), "region {region}");
                map.iter_mut()
                    .zip(words)
                    .for_each(|(all, word)| *all |= word);
            }
            None => maps.push(words.to_vec()),
        };
        for log in &mut self.0 {
            log.fetch(&mut add).unwrap();
        }
        maps
    }

    /// Stops the logs and returns them.
    pub fn stop(mut self) -> Vec<Box<dyn DirtyLog>> {
        self.0.iter_mut().for_each(|log| log.stop().unwrap());
        self.0
    }
}

/// Creates a machine that has not started, with the default options.
pub fn fresh(config: Config) -> Vm {
    Vm::with_options(config, HostOptions::default()).unwrap()
}

/// Creates a machine, fills its memory and starts it.
pub fn running(config: Config) -> Vm {
    let vm = fresh(config);
    vm.fill().unwrap();
    vm.start().unwrap();
    vm
}

/// Builds the machine that a source has described, with the default options.
pub fn built(description: &VmDescription) -> Vm {
    Vm::from_description(description, HostOptions::default()).unwrap()
}

/// Returns the last TSC that each vCPU of a KVM guest read. It is a word of the vCPU's parameter
/// block (`src/layout.rs`).
pub fn guest_tscs(vm: &Vm) -> Vec<u64> {
    const BLOCKS: u64 = 0x7_0000;
    const LAST_TSC: u64 = 0xc8;
    let last = |vcpu| GuestAddress(BLOCKS + vcpu * PAGE_BYTES + LAST_TSC);
    (0..u64::from(vm.config().vcpus))
        .map(|vcpu| vm.memory().read_obj(last(vcpu)).unwrap())
        .collect()
}

/// Returns CLOCK_MONOTONIC at the last beat of a paused machine. The value is at byte 9 of the
/// section `heart`, after the largest gap (8 bytes) and a flag (1 byte).
pub fn last_beat_ns(vm: &Vm) -> u64 {
    let sections = vm.save().unwrap();
    let heart = sections.iter().find(|section| section.name == "heart");
    u64::from_le_bytes(*heart.unwrap().bytes[9..].first_chunk().unwrap())
}

/// Writes as a device would, to the pages at [`DEVICE_START`], which the guest does not touch.
pub fn vmm_write(vm: &Vm, offset: u64, bytes: &[u8]) {
    let address = GuestAddress(DEVICE_START + offset);
    vm.memory().write_slice(bytes, address).unwrap();
}

/// Reads what [`vmm_write`] wrote.
pub fn vmm_read(vm: &Vm, offset: u64, bytes: &mut [u8]) {
    let address = GuestAddress(DEVICE_START + offset);
    vm.memory().read_slice(bytes, address).unwrap();
}

/// Waits until `done` returns true, for at most ten seconds, while the machine runs.
pub fn wait_for(vm: &Vm, what: &str, done: impl Fn(&Vm) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done(vm) {
        assert_eq!(vm.state(), VmState::Running, "while waiting for {what}");
        assert!(Instant::now() < deadline, "no {what}: {:?}", vm.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The rate, in visits per second, at which the guest makes its next `visits` visits.
pub fn rate_of(vm: &Vm, visits: u64) -> f64 {
    let (start, before) = (Instant::now(), vm.stats().pages_checked);
    wait_for(vm, "visits", |vm| {
        vm.stats().pages_checked >= before + visits
    });
    let made = vm.stats().pages_checked - before;
    made as f64 / start.elapsed().as_secs_f64()
}

/// Measures visits per second over a short time. Without a dirty rate, the number of visits in that
/// time depends on the host.
pub fn rate_now(vm: &Vm) -> f64 {
    let (start, before) = (Instant::now(), vm.stats().pages_checked);
    std::thread::sleep(Duration::from_millis(400));
    (vm.stats().pages_checked - before) as f64 / start.elapsed().as_secs_f64()
}

/// Copies the pages that are marked in `maps`, or all pages if `maps` is `None`, and returns their
/// number. Both machines have the same regions.
pub fn copy_pages(from: &Vm, to: &Vm, maps: Option<&[Vec<u64>]>) -> u64 {
    let mut copied = 0;
    let mut bytes = [0; PAGE_BYTES as usize];
    for (index, (source, target)) in from.memory().iter().zip(to.memory().iter()).enumerate() {
        for page in 0..source.len() / PAGE_BYTES {
            let wanted =
                maps.is_none_or(|maps| maps[index][(page / 64) as usize] >> (page % 64) & 1 == 1);
            if wanted {
                let address = MemoryRegionAddress(page * PAGE_BYTES);
                source.read_slice(&mut bytes, address).unwrap();
                target.write_slice(&bytes, address).unwrap();
                copied += 1;
            }
        }
    }
    copied
}

/// Returns the number of pages that differ between two machines.
pub fn different_pages(one: &Vm, other: &Vm) -> u64 {
    let mut different = 0;
    let (mut left, mut right) = ([0; PAGE_BYTES as usize], [0; PAGE_BYTES as usize]);
    for (a, b) in one.memory().iter().zip(other.memory().iter()) {
        for page in 0..a.len() / PAGE_BYTES {
            let address = MemoryRegionAddress(page * PAGE_BYTES);
            a.read_slice(&mut left, address).unwrap();
            b.read_slice(&mut right, address).unwrap();
            different += u64::from(left != right);
        }
    }
    different
}

/// Returns the number of set bits.
pub fn dirty_pages(maps: &[Vec<u64>]) -> u64 {
    maps.iter()
        .flatten()
        .map(|word| u64::from(word.count_ones()))
        .sum()
}
