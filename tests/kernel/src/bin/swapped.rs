//! Swapped-out pages (private or memfd) count as populated, keep their dirty state and migrate.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
use dunlin_linux::memory::untracked;
use dunlin_linux::pagemap::{data, populated};
use dunlin_linux::uffd::{Behind, WriteWatch};
use dunlin_microvm::{Config, Fill, GuestKind, Movable, Vm, Workload};
use dunlin_rig::linux::swap::page_out;
use support::different_pages;
use support::moves::{Tls, movable, relocate, verified};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

#[path = "../../../../crates/dunlin-microvm/tests/support/mod.rs"]
mod support;

const PAGE: usize = 4096;
const PAGES: usize = 2048;

/// The time limit for events that are certain to occur.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let needs = Needs {
        limit_seconds: 120,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        let _swap = Swap::on(guest);
        // Disable huge pages, because a huge page would be swapped out as a whole.
        let _small = guest.set("/sys/kernel/mm/transparent_hugepage/enabled", "never");
        for backing in [Backing::Private, Backing::Memfd] {
            println!("{backing:?}");
            a_page_that_is_swapped_out_is_populated(backing);
            i4_a_page_that_is_written_and_swapped_out_is_in_the_log(backing);
            i3_a_guest_that_is_swapped_out_moves(backing);
        }
    })
}

fn a_page_that_is_swapped_out_is_populated(backing: Backing) {
    let memory = memory(backing);
    let whole = whole(&memory);
    let written = [3, 4, 40, 600, PAGES - 1];
    for page in written {
        write(&memory, page, 1);
    }
    swap_out(&memory, &written);
    let mut found = Vec::new();
    let region = memory.iter().next().expect("the memory has a region");
    match region.file_offset() {
        None => populated(&whole, |range| found.extend(pages_of(&range))),
        Some(file) => data(file.file(), 0..region.len(), |range| {
            found.extend(pages_of(&range));
        }),
    }
    .expect("the kernel scans the memory");
    assert_eq!(found, written, "{backing:?}");
    assert!(are_out(&memory, &written), "the scan swapped a page in");
}

fn i4_a_page_that_is_written_and_swapped_out_is_in_the_log(backing: Backing) {
    let behind = match backing {
        Backing::Private => Behind::Anonymous,
        _ => Behind::File,
    };
    let memory = memory(backing);
    let whole = whole(&memory);
    for page in [5, 9, 700] {
        write(&memory, page, 1);
    }
    let watch = WriteWatch::new().expect("the kernel watches writes");
    watch
        .register(&whole, behind)
        .expect("the kernel watches the memory");
    let taken = |what: &str, expected: &[usize]| {
        let mut pages = Vec::new();
        let taken = watch.take(&whole, behind, |range| pages.extend(pages_of(&range)));
        taken.expect("the kernel scans the memory");
        assert_eq!(pages, expected, "{behind:?}: {what}");
    };
    // Pages 5 and 1000 are written during tracking, the other pages only before tracking.
    for page in [5, 1000] {
        write(&memory, page, 2);
    }
    swap_out(&memory, &[5, 9, 700, 1000]);
    taken("written, then swapped out", &[5, 1000]);
    taken("nothing since", &[]);
    assert!(
        are_out(&memory, &[5, 9, 700, 1000]),
        "the log swapped a page in"
    );
    // Writing swaps these pages in.
    for page in [9, 1000] {
        write(&memory, page, 3);
    }
    taken("swapped out, then written", &[9, 1000]);
    write(&memory, 9, 4);
    swap_out(&memory, &[9, 1000]);
    taken("and again swapped out", &[9]);
    for page in [5, 9, 700, 1000] {
        let _: u64 = memory
            .read_obj(at(page))
            .expect("the range is inside the memory");
    }
    taken("swapped in to be read", &[]);
}

/// Migrates an idle guest. Most of its populated memory is swapped out before the migration.
fn i3_a_guest_that_is_swapped_out_moves(backing: Backing) {
    let source = guest(backing);
    page_out_all(source.vm());
    let before = swapped_kib(source.vm().memory());
    println!("{before} KiB are swapped out");
    // 4 MiB of the guest's 8 MiB are populated. The kernel may keep some of these pages in memory.
    assert!(before >= 3 << 10, "only {before} KiB are swapped out");
    let (there, ..) = relocate(&source, &Tls::new(), &verified(2));
    assert_eq!(different_pages(source.vm(), there.vm()), 0, "{backing:?}");
}

fn guest(backing: Backing) -> Arc<Movable> {
    movable(Config {
        guest: GuestKind::Process,
        memory_bytes: 8 << 20,
        workload: Workload::Idle,
        backing,
        fill: Fill::Random,
        dirty_rate: 5_000,
        ..Config::default()
    })
}

fn page_out_all(vm: &Vm) {
    for region in vm.memory().iter() {
        let whole = region.as_volatile_slice().expect("the memory is mapped");
        page_out(&untracked(&whole)).expect("there is swap");
    }
}

fn memory(backing: Backing) -> TrackedMemory {
    allocate((PAGES * PAGE) as u64, backing).expect("there is memory")
}

fn whole(memory: &TrackedMemory) -> VolatileSlice<'_> {
    let whole = memory.get_slice(GuestAddress(0), PAGES * PAGE);
    untracked(&whole.expect("the memory is one region"))
}

fn at(page: usize) -> GuestAddress {
    GuestAddress((page * PAGE) as u64)
}

fn write(memory: &TrackedMemory, page: usize, number: u64) {
    memory
        .write_obj(number, at(page))
        .expect("the range is inside the memory");
}

fn pages_of(range: &Range<u64>) -> Range<usize> {
    range.start as usize / PAGE..range.end as usize / PAGE
}

/// Asks the kernel to swap out the whole memory until these pages are swapped out.
fn swap_out(memory: &TrackedMemory, pages: &[usize]) {
    let begun = Instant::now();
    loop {
        page_out(&whole(memory)).expect("there is swap");
        if are_out(memory, pages) {
            return;
        }
        assert!(
            begun.elapsed() < LIMIT,
            "the kernel leaves some of {pages:?}"
        );
    }
}

/// Whether all of these pages, which contain data, are swapped out.
fn are_out(memory: &TrackedMemory, pages: &[usize]) -> bool {
    let region = memory.iter().next().expect("the memory has a region");
    if region.file_offset().is_some() {
        // For a page of a file, the page table entry does not show whether the page is swapped out.
        // Compare the total size that is swapped out instead.
        return swapped_kib(memory) as usize >= (pages.len() * PAGE) >> 10;
    }
    // Bit 62 of an entry: the page is swapped (Documentation/admin-guide/mm/pagemap.rst).
    let entries = File::open("/proc/self/pagemap").expect("proc is mounted");
    let start = region.as_ptr() as u64 / PAGE as u64;
    pages.iter().all(|page| {
        let mut entry = [0; 8];
        let at = (start + *page as u64) * 8;
        entries
            .read_exact_at(&mut entry, at)
            .expect("the memory is mapped");
        u64::from_ne_bytes(entry) >> 62 & 1 == 1
    })
}

/// Returns the size in KiB of the part of the mapping that is swapped out.
fn swapped_kib(memory: &TrackedMemory) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").expect("proc is mounted");
    let mut within = false;
    let mut swapped = 0;
    for line in smaps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((from, to)) = first.split_once('-') {
            let number = |text| u64::from_str_radix(text, 16).expect("an address");
            let mapped = number(from)..number(to);
            within = memory
                .iter()
                .any(|region| mapped.contains(&(region.as_ptr() as u64)));
        } else if within && first == "Swap:" {
            let kib = rest.trim().trim_end_matches(" kB");
            swapped += kib.parse::<u64>().expect("a number");
        }
    }
    swapped
}

/// A swap device in compressed memory, which is disabled when this value is dropped.
struct Swap;

impl Swap {
    const DEVICE: &str = "/dev/zram0";

    fn on(guest: &Guest) -> Self {
        guest.command("modprobe", &["zram"]);
        assert!(Path::new(Self::DEVICE).exists(), "zram created no device");
        fs::write("/sys/block/zram0/disksize", "64M").expect("the file is not in use");
        guest.command("mkswap", &[Self::DEVICE]);
        guest.command("swapon", &[Self::DEVICE]);
        Self
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let done = Command::new("swapoff").arg(Self::DEVICE).status();
        println!("swapoff: {done:?}");
        if let Err(error) = fs::write("/sys/block/zram0/reset", "1") {
            println!("zram: {error}");
        }
    }
}
