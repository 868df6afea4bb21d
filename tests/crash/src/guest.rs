//! A guest that detects whether it runs twice, has lost a write or went back in
//! time.
//!
//! The guest counts. Step `n` fills one of its hot pages with `n`, then writes `n` into the first
//! word of its memory. The pages that are not hot never change. A witness file, which every process
//! with a guest maps, contains the highest count that the guest has reached in any process. A guest
//! that starts must have the count of the witness file, and each of its pages must match this
//! count. While a guest runs, its process holds two locks, one for running and one for the guest's
//! disk. Only one process at a time can hold each lock.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use dunlin::engine::memory::MappedMemory;
use dunlin::engine::vmm::DirtyLog;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::files::Files;

/// Guest memory: a file that is mapped by every process that runs or migrates the guest.
pub type Memory = GuestMemoryMmap<()>;

const PAGE_BYTES: u64 = 4096;
/// The number of pages of guest memory.
const PAGES: u64 = 256;
/// The number of hot pages. Page 0 contains the count; the guest's steps write the other hot pages
/// in turn.
const HOT_PAGES: u64 = 16;
/// The time between two steps of the guest.
const STEP: Duration = Duration::from_micros(300);

const COUNT: GuestAddress = GuestAddress(0);

/// A guest in this process.
pub struct Guest {
    files: Files,
    side: &'static str,
    memory: Arc<Memory>,
    witness: Arc<Memory>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    writer: Option<Writer>,
    disk: Option<File>,
    destroyed: bool,
}

struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    /// The lock that the process holds as long as the guest runs.
    lock: Option<File>,
}

impl Guest {
    /// Creates a paused guest with its memory in the file of `side`. A new file reads as
    /// zeros.
    ///
    /// # Errors
    /// A file cannot be created or mapped.
    pub fn new(files: &Files, side: &'static str) -> io::Result<Self> {
        Ok(Self {
            files: files.clone(),
            side,
            memory: map(&files.memory(side), PAGES * PAGE_BYTES)?,
            witness: map(&files.witness(), PAGE_BYTES)?,
            state: Mutex::default(),
        })
    }

    /// Writes the initial content of memory and acquires the disk.
    ///
    /// # Errors
    /// The memory cannot be written, or the disk cannot be acquired (see [`Guest::acquire`]).
    pub fn create(&self) -> io::Result<()> {
        for page in HOT_PAGES..PAGES {
            write(&self.memory, page, page)?;
        }
        self.acquire()
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Runs the guest, unless it runs already.
    ///
    /// # Errors
    /// A file cannot be opened, locked, read or written, or the thread cannot be started. A
    /// violation does not cause an error: it is recorded in the notes.
    pub fn resume(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.writer.is_some() {
            return Ok(());
        }
        let lock = self.files.take("runs", self.side)?;
        if state.destroyed {
            self.note("runs although it was destroyed")?;
        }
        if state.disk.is_none() {
            self.note("runs without its disk")?;
        }
        self.check()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (memory, witness) = (Arc::clone(&self.memory), Arc::clone(&self.witness));
        let (files, side, stopped) = (self.files.clone(), self.side, Arc::clone(&stop));
        let thread = std::thread::Builder::new().spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                if let Err(error) = step(&memory, &witness) {
                    // The guest ends, and the test finds the reason in the notes.
                    let _ = files.note(&format!("the guest at the {side}: {error}"));
                    return;
                }
                std::thread::sleep(STEP);
            }
        })?;
        state.writer = Some(Writer { stop, thread, lock });
        Ok(())
    }

    /// Stops the guest between two steps.
    pub fn pause(&self) {
        if let Some(writer) = self.lock().writer.take() {
            writer.stop.store(true, Ordering::SeqCst);
            // Ignore a panic: the thread has printed its message on standard error.
            let _ = writer.thread.join();
            drop(writer.lock);
        }
    }

    /// Acquires the disk, unless the guest has it already.
    ///
    /// # Errors
    /// Another process holds the disk, or a file cannot be opened, locked or written.
    pub fn acquire(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.disk.is_none() {
            state.disk = self.files.take("disk", self.side)?;
        }
        match state.disk {
            Some(_) => Ok(()),
            None => Err(io::Error::other("another process has the disk")),
        }
    }

    /// Releases the disk.
    pub fn deactivate(&self) {
        self.lock().disk = None;
    }

    /// Stops the guest and releases its disk. The guest must not run here again.
    pub fn destroy(&self) {
        self.pause();
        let mut state = self.lock();
        state.disk = None;
        state.destroyed = true;
    }

    /// The guest's state.
    #[must_use]
    pub fn state(&self) -> &'static str {
        let state = self.lock();
        match (&state.writer, state.destroyed) {
            (Some(writer), _) if writer.thread.is_finished() => "broken",
            (Some(_), _) => "running",
            (None, true) => "destroyed",
            (None, false) => "paused",
        }
    }

    /// Executes the request in `line` and returns the answer.
    pub fn obey(&self, line: &str) -> String {
        let done = match line {
            "state" => return self.state().into(),
            "resume" => self.resume(),
            "acquire" => self.acquire(),
            "pause" => {
                self.pause();
                Ok(())
            }
            "deactivate" => {
                self.deactivate();
                Ok(())
            }
            "destroy" => {
                self.destroy();
                Ok(())
            }
            other => Err(io::Error::other(format!("no such command: {other}"))),
        };
        done.map_or_else(|error| format!("error {error}"), |()| "done".into())
    }

    /// Compares the count with the witness file, and three words of every page except page 0 with
    /// the content that follows from the count. Notes every difference.
    fn check(&self) -> io::Result<()> {
        let count = read(&self.memory, COUNT)?;
        let witness = read(&self.witness, COUNT)?;
        if count != witness {
            self.note(&format!(
                "continues from step {count} although it had reached {witness}"
            ))?;
        }
        for page in 1..PAGES {
            let expected = if page < HOT_PAGES {
                last_step_on(page, count)
            } else {
                page
            };
            for word in [0, PAGE_BYTES / 2, PAGE_BYTES - 8] {
                let found = read(&self.memory, GuestAddress(page * PAGE_BYTES + word))?;
                if found != expected {
                    self.note(&format!(
                        "page {page} holds {found} and not {expected} after step {count}"
                    ))?;
                }
            }
        }
        Ok(())
    }

    fn note(&self, what: &str) -> io::Result<()> {
        self.files
            .note(&format!("the guest at the {}: {what}", self.side))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A dirty log that reports all hot pages as written on every fetch, so it never misses a
/// write.
pub struct HotPages;

impl DirtyLog for HotPages {
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        found(0, &[(1 << HOT_PAGES) - 1]);
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The guest memory of `side`, mapped for the migration.
///
/// # Errors
/// The file cannot be created, resized or mapped.
pub fn mapped(files: &Files, side: &str) -> io::Result<MappedMemory<()>> {
    let memory = map(&files.memory(side), PAGES * PAGE_BYTES)?;
    Ok(MappedMemory::new(memory, 4096))
}

fn map(path: &Path, bytes: u64) -> io::Result<Arc<Memory>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    file.set_len(bytes)?;
    let length = usize::try_from(bytes).map_err(io::Error::other)?;
    let range = (GuestAddress(0), length, Some(FileOffset::new(file, 0)));
    let memory = GuestMemoryMmap::from_ranges_with_files([range]).map_err(io::Error::other)?;
    Ok(Arc::new(memory))
}

fn step(memory: &Memory, witness: &Memory) -> io::Result<()> {
    let before = read(memory, COUNT)?;
    let witnessed = read(witness, COUNT)?;
    if before != witnessed {
        return Err(io::Error::other(format!(
            "it is at step {before}, but another copy has reached {witnessed}"
        )));
    }
    let number = before + 1;
    write(memory, page_of(number), number)?;
    for counter in [memory, witness] {
        let stored = counter.store(number, COUNT, Ordering::SeqCst);
        stored.map_err(io::Error::other)?;
    }
    Ok(())
}

fn page_of(step: u64) -> u64 {
    1 + step % (HOT_PAGES - 1)
}

/// The last step up to `count` that wrote this page; 0 if none did.
fn last_step_on(page: u64, count: u64) -> u64 {
    let cycle = HOT_PAGES - 1;
    let back = (count % cycle + cycle - (page - 1)) % cycle;
    count.saturating_sub(back)
}

fn read(memory: &Memory, at: GuestAddress) -> io::Result<u64> {
    memory.load(at, Ordering::SeqCst).map_err(io::Error::other)
}

fn write(memory: &Memory, page: u64, value: u64) -> io::Result<()> {
    let bytes = value.to_ne_bytes().repeat(512);
    memory
        .write_slice(&bytes, GuestAddress(page * PAGE_BYTES))
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_page_holds_follows_from_the_count() {
        let mut pages = [0; HOT_PAGES as usize];
        for step in 1..100 {
            pages[page_of(step) as usize] = step;
            for page in 1..HOT_PAGES {
                assert_eq!(last_step_on(page, step), pages[page as usize], "{step}");
            }
        }
    }
}
