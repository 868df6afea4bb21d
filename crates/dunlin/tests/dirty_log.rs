//! The conformance test of dirty logs: the logs of this crate pass it, and a log that breaks a
//! promise of `DirtyLog` fails it.
#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use dunlin::engine::dirty::WriteProtectLog;
use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::vmm::{DirtyLog, GuestMemory, VmmError};
use dunlin::testing::{Effort, Seen, Violation, Writer, check_dirty_log};
use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
use dunlin_linux::memory::untracked;
use dunlin_test_base::huge_pages::HugePages;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

const PAGE: u64 = 4096;
const BYTES: u64 = 16 << 20;

/// How a [`Scribbler`] writes to one region, at an offset.
type Write = dyn Fn(&TrackedMemory, usize, u64, u64) + Send + Sync;

/// A thread that writes to memory: half of the time to a few pages, otherwise anywhere.
struct Scribbler {
    memory: Arc<TrackedMemory>,
    write: Arc<Write>,
    running: Mutex<Option<(Arc<AtomicBool>, JoinHandle<u64>)>>,
    state: Mutex<u64>,
}

impl Scribbler {
    fn new(memory: &Arc<TrackedMemory>, write: Arc<Write>) -> Self {
        Self {
            memory: Arc::clone(memory),
            write,
            running: Mutex::new(None),
            state: Mutex::new(1),
        }
    }
}

impl Writer for Scribbler {
    fn resume(&self) -> Result<(), VmmError> {
        let mut running = self.running.lock().unwrap();
        if running.is_some() {
            return Ok(());
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (memory, write) = (Arc::clone(&self.memory), Arc::clone(&self.write));
        let (until, mut state) = (Arc::clone(&stop), *self.state.lock().unwrap());
        let thread = std::thread::spawn(move || {
            let regions: Vec<u64> = memory.iter().map(GuestMemoryRegion::len).collect();
            while !until.load(Ordering::Relaxed) {
                for _ in 0..20 {
                    // Knuth's MMIX generator. Its high bits are the most random.
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let region = (state >> 60) as usize % regions.len();
                    let words = regions[region] / 8;
                    let word = if state >> 40 & 1 == 0 {
                        (state >> 16) % (4 * PAGE / 8)
                    } else {
                        (state >> 16) % words
                    };
                    write(&memory, region, word * 8, state);
                }
                // Write slowly: the test copies every written page in each round, so many pages
                // would make it slow.
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            state
        });
        *running = Some((stop, thread));
        Ok(())
    }

    fn pause(&self) -> Result<(), VmmError> {
        if let Some((stop, thread)) = self.running.lock().unwrap().take() {
            stop.store(true, Ordering::Relaxed);
            *self.state.lock().unwrap() = thread.join().unwrap();
        }
        Ok(())
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        let _ = self.pause();
    }
}

/// Writes as the guest does: without an entry in vm-memory's bitmap.
fn as_guest() -> Arc<Write> {
    Arc::new(|memory, region, offset, value| {
        let region = memory.iter().nth(region).unwrap();
        let slice = region.get_slice(MemoryRegionAddress(offset), 8).unwrap();
        untracked(&slice).copy_from(&value.to_ne_bytes());
    })
}

/// Writes as the VMM does: with an entry in vm-memory's bitmap.
fn as_vmm() -> Arc<Write> {
    Arc::new(|memory, region, offset, value| {
        let region = memory.iter().nth(region).unwrap();
        region
            .write_obj(value, MemoryRegionAddress(offset))
            .unwrap();
    })
}

fn check(
    memory: &Arc<TrackedMemory>,
    backing_page_bytes: u32,
    log: &mut dyn DirtyLog,
    write: Arc<Write>,
) -> Result<Seen, Violation> {
    let mapped = MappedMemory::new(Arc::clone(memory), backing_page_bytes);
    let writer = Scribbler::new(memory, write);
    check_dirty_log(
        &mapped as &dyn GuestMemory,
        log,
        &writer,
        &Effort::default(),
    )
}

#[test]
fn i5_the_vmms_own_writes_conform() {
    let memory = Arc::new(allocate(BYTES, Backing::Private).unwrap());
    let mut log = OwnWrites::new(Arc::clone(&memory));
    let seen = check(&memory, 4096, &mut log, as_vmm()).unwrap();
    assert!(seen.pages > 1000, "{seen:?}");
}

#[test]
fn i5_write_protection_conforms_on_private_and_shared_memory() {
    for backing in [Backing::Private, Backing::Memfd] {
        for write in [as_guest(), as_vmm()] {
            let memory = Arc::new(allocate(BYTES, backing).unwrap());
            let mut log = WriteProtectLog::new(Arc::clone(&memory));
            let seen = check(&memory, 4096, &mut log, write).unwrap();
            assert!(seen.pages > 1000, "{backing:?}: {seen:?}");
        }
    }
}

#[test]
fn i5_write_protection_conforms_on_several_regions() {
    let ranges = [
        (GuestAddress(0), 1 << 20),
        (GuestAddress(1 << 21), 7 * PAGE as usize),
        (GuestAddress(1 << 22), 1 << 21),
    ];
    let memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
    let mut log = WriteProtectLog::new(Arc::clone(&memory));
    check(&memory, 4096, &mut log, as_guest()).unwrap();
}

#[test]
fn i5_write_protection_conforms_on_huge_pages() {
    let Some(_huge) = HugePages::reserve(BYTES / (2 << 20)) else {
        return;
    };
    let memory = Arc::new(allocate(BYTES, Backing::Huge).unwrap());
    let mut log = WriteProtectLog::new(Arc::clone(&memory));
    check(&memory, 2 << 20, &mut log, as_guest()).unwrap();
}

/// How a broken log changes the reports of a correct one.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The log omits one page in five hundred.
    Forgets,
    /// The log reports each page one fetch late.
    Lags,
    /// The log reports each page in every later fetch too.
    Keeps,
    /// The log reports pages that were written before the start.
    StartsFull,
    /// The log reports a page beyond the last.
    Outside,
    /// The log never reports a page.
    Silent,
    /// Every fetch fails.
    Fails,
}

struct Broken {
    log: OwnWrites,
    fault: Fault,
    kept: Vec<u64>,
    forgotten: u32,
}

impl DirtyLog for Broken {
    fn start(&mut self) -> io::Result<()> {
        self.kept.clear();
        match self.fault {
            Fault::StartsFull => Ok(()),
            _ => self.log.start(),
        }
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        let (fault, kept, forgotten) = (self.fault, &mut self.kept, &mut self.forgotten);
        if matches!(fault, Fault::Fails) {
            return Err(io::Error::other("no"));
        }
        self.log.fetch(&mut |index, words| {
            let mut words = words.to_vec();
            kept.resize(words.len(), 0);
            match fault {
                Fault::Forgets => {
                    for word in words.iter_mut().filter(|word| **word != 0) {
                        *forgotten += word.count_ones();
                        if *forgotten >= 500 {
                            *forgotten = 0;
                            *word &= *word - 1;
                        }
                    }
                }
                Fault::Lags => std::mem::swap(kept, &mut words),
                Fault::Keeps => {
                    for (kept, word) in kept.iter_mut().zip(&mut words) {
                        *kept |= *word;
                        *word = *kept;
                    }
                }
                Fault::Outside => words.push(1),
                Fault::Silent => words.fill(0),
                Fault::StartsFull | Fault::Fails => {}
            }
            found(index, &words);
        })
    }

    fn stop(&mut self) -> io::Result<()> {
        self.log.stop()
    }
}

#[test]
fn i5_a_log_that_breaks_any_promise_is_found_out() {
    for fault in [
        Fault::Forgets,
        Fault::Lags,
        Fault::Keeps,
        Fault::StartsFull,
        Fault::Outside,
        Fault::Silent,
        Fault::Fails,
    ] {
        let memory = Arc::new(allocate(BYTES, Backing::Private).unwrap());
        let mut log = Broken {
            log: OwnWrites::new(Arc::clone(&memory)),
            fault,
            kept: Vec::new(),
            forgotten: 0,
        };
        let violation = check(&memory, 4096, &mut log, as_vmm()).unwrap_err();
        let found = match fault {
            Fault::Forgets | Fault::Silent => matches!(violation, Violation::Missed { .. }),
            // A late report breaks two promises. The test may find either of them first.
            Fault::Lags => matches!(
                violation,
                Violation::Missed { .. } | Violation::NotCleared { .. }
            ),
            Fault::Keeps => matches!(violation, Violation::NotCleared { .. }),
            Fault::StartsFull => matches!(violation, Violation::NotEmpty { .. }),
            Fault::Outside => matches!(
                violation,
                Violation::Outside {
                    region: 0,
                    page: 4096
                }
            ),
            Fault::Fails => matches!(
                violation,
                Violation::Failed {
                    method: "DirtyLog::fetch",
                    ..
                }
            ),
        };
        assert!(found, "{fault:?}: {violation:?}");
    }
}

#[test]
fn i5_a_writer_that_another_log_sees_is_missed() {
    // The log of the VMM's own writes does not contain the guest's writes.
    let memory = Arc::new(allocate(BYTES, Backing::Private).unwrap());
    let mut log = OwnWrites::new(Arc::clone(&memory));
    let violation = check(&memory, 4096, &mut log, as_guest()).unwrap_err();
    assert!(matches!(violation, Violation::Missed { .. }), "{violation}");
}

#[test]
fn without_a_writer_nothing_is_proved() {
    let memory = Arc::new(allocate(BYTES, Backing::Private).unwrap());
    let mut log = WriteProtectLog::new(Arc::clone(&memory));
    let idle: Arc<Write> = Arc::new(|_, _, _, _| ());
    let violation = check(&memory, 4096, &mut log, idle).unwrap_err();
    assert!(
        matches!(violation, Violation::NothingWritten),
        "{violation}"
    );
}
