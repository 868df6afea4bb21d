//! PAGEMAP_SCAN tracks a writer: it reports all pages written since the last scan.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
use dunlin_linux::memory::untracked;
use dunlin_linux::uffd::{Behind, WriteWatch};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileSlice};

const PAGE: usize = 4096;
const PAGES: usize = 16 << 20 >> 12;

/// The number of pages in a huge page.
const HUGE: usize = 512;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        for (huge_pages, granularity) in [("never", 1), ("always", HUGE)] {
            let _chosen = guest.set("/sys/kernel/mm/transparent_hugepage/enabled", huge_pages);
            for (backing, behind) in [
                (Backing::Private, Behind::Anonymous),
                (Backing::Memfd, Behind::File),
            ] {
                let memory = allocate((PAGES * PAGE) as u64, backing).expect("there is memory");
                let whole = memory
                    .get_slice(GuestAddress(0), PAGES * PAGE)
                    .expect("the memory is one region");
                let watched = untracked(&whole);
                let watch = WriteWatch::new().expect("the kernel watches writes");
                watch
                    .register(&watched, behind)
                    .expect("the kernel watches the memory");
                reports_what_was_written(&memory, &watch, &watched, behind, granularity);
                loses_nothing_to_a_writer(&memory, &watch, &watched, behind);
            }
        }
    })
}

/// Asserts that every written page is reported. Of the other pages, only those in the same
/// transparent huge page as a written page can be reported.
fn reports_what_was_written(
    memory: &TrackedMemory,
    watch: &WriteWatch,
    watched: &VolatileSlice<'_>,
    behind: Behind,
    granularity: usize,
) {
    for written in [vec![0, 7, 8, 600, PAGES - 1], vec![8], vec![]] {
        for page in &written {
            write(memory, *page, 1);
        }
        let taken = taken(watch, watched, behind);
        let missed = written.iter().find(|page| !taken.contains(page));
        assert_eq!(missed, None, "{behind:?} {granularity}");
        let near = |page: &&usize| {
            written
                .iter()
                .any(|near| near / granularity == *page / granularity)
        };
        let stray = taken.iter().find(|page| !near(page));
        assert_eq!(stray, None, "{behind:?} {granularity}");
    }
}

/// Updates a copy of the memory from the reported pages. At the end, the copy must equal the
/// memory.
fn loses_nothing_to_a_writer(
    memory: &TrackedMemory,
    watch: &WriteWatch,
    watched: &VolatileSlice<'_>,
    behind: Behind,
) {
    let mut copy = vec![0_u64; PAGES];
    let mut look = |of: &[usize]| {
        for page in of {
            copy[*page] = memory
                .read_obj(GuestAddress((page * PAGE) as u64))
                .expect("the range is inside the memory");
        }
    };
    look(&(0..PAGES).collect::<Vec<_>>());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut page = 1;
            for number in 2.. {
                // This sequence visits every page once in 4,096 writes. It has a full period,
                // because 5 - 1 is divisible by 4 and 3 is odd.
                page = (page * 5 + 3) % PAGES;
                write(memory, page, number);
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..20 {
            look(&taken(watch, watched, behind));
        }
        stop.store(true, Ordering::Relaxed);
    });
    look(&taken(watch, watched, behind));
    for (page, copied) in copy.iter().enumerate() {
        let now: u64 = memory
            .read_obj(GuestAddress((page * PAGE) as u64))
            .expect("the range is inside the memory");
        assert_eq!(*copied, now, "page {page}, {behind:?}");
    }
}

fn write(memory: &TrackedMemory, page: usize, number: u64) {
    memory
        .write_obj(number, GuestAddress((page * PAGE) as u64))
        .expect("the range is inside the memory");
}

fn taken(watch: &WriteWatch, watched: &VolatileSlice<'_>, behind: Behind) -> Vec<usize> {
    let mut pages = Vec::new();
    watch
        .take(watched, behind, |range| {
            pages.extend(range.start as usize / PAGE..range.end as usize / PAGE);
        })
        .expect("the kernel scans the memory");
    pages
}
