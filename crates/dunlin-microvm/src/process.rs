//! A guest without a hypervisor: threads of this process that visit memory like the program of the
//! KVM guest (`guest/workload.S`, which defines a page's content).
//!
//! Each thread replaces a vCPU. It sends beats and is paced, throttled and parked like a vCPU, and
//! reads and checks every page before it writes to it. The thread counts its passes over its pages,
//! and each page contains the number of passes over it. The count is migrated as the section
//! `visitor`. If a page's number does not match the count, the machine stops.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use dunlin::lane::sync::lock;
use dunlin_linux::mapping::PAGE_BYTES;
use dunlin_linux::memory::untracked;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::common::Common;
use crate::config::{Config, Workload};
use crate::control::{Stop, StopCode, VmState};
use crate::layout::{self, PageSet};
use crate::pace::Pacer;
use crate::state::{self, HEART, LoadError, Own, Section, VMM};
use crate::wire::{DecodeError, Reader, Writer, bad_value};

/// Name of the section with the state of one thread.
const VISITOR: &str = "visitor";

/// Offset of a page's last word. Each visit adjusts this word so that the page's signature stays
/// the same.
const LAST_WORD: usize = PAGE_BYTES as usize - 8;

/// State shared by the threads of a process guest.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) common: Common,
    config: Config,
    visitors: Vec<Visitor>,
}

/// The state of one thread.
#[derive(Debug)]
struct Visitor {
    visits: AtomicU64,
    beats: AtomicU64,
    /// The thread holds the lock during a batch of visits.
    progress: Mutex<Progress>,
}

/// A thread's progress through its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    sets: [Walk; 2],
    /// Percentage of visits to the first set.
    share: u64,
    share_sum: u64,
}

/// A thread's progress through one set of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    set: PageSet,
    cursor: u64,
    /// Visits left in this pass.
    left: u64,
    /// Completed passes.
    pass: u64,
}

impl Visitor {
    fn new(config: &Config, index: u8) -> Self {
        let (sets, share) = layout::page_sets(config, index);
        let sets = sets.map(|set| Walk {
            set,
            cursor: 0,
            left: set.count(),
            pass: 0,
        });
        Self {
            visits: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            progress: Mutex::new(Progress {
                sets,
                share,
                share_sum: 0,
            }),
        }
    }
}

impl Shared {
    pub(crate) fn new(common: Common, config: &Config) -> Self {
        let visitors = (0..config.vcpus)
            .map(|index| Visitor::new(config, index))
            .collect();
        Self {
            common,
            config: config.clone(),
            visitors,
        }
    }

    /// Number of visits by all threads.
    pub(crate) fn visits(&self) -> u64 {
        let visits = |visitor: &Visitor| visitor.visits.load(Ordering::Relaxed);
        self.visitors.iter().map(visits).fold(0, u64::wrapping_add)
    }

    /// Number of beats by all threads.
    pub(crate) fn beats(&self) -> u64 {
        let beats = |visitor: &Visitor| visitor.beats.load(Ordering::Relaxed);
        self.visitors.iter().map(beats).fold(0, u64::wrapping_add)
    }

    /// The number of complete passes over all pages: the lowest number of passes of any thread over
    /// any of its page sets.
    pub(crate) fn full_passes(&self) -> u64 {
        let sets = match self.config.workload {
            Workload::HotSet { .. } => 2,
            Workload::Idle | Workload::Sequential | Workload::Random => 1,
        };
        let passes = |visitor: &Visitor| {
            let progress = *lock(&visitor.progress);
            progress.sets[..sets].iter().map(|walk| walk.pass).min()
        };
        self.visitors.iter().filter_map(passes).min().unwrap_or(0)
    }

    /// Saves the state of a paused guest, without its memory.
    pub(crate) fn save(&self, own: Own) -> Vec<Section> {
        let mut sections = vec![
            state::section(VMM, 0, own.encode()),
            state::section(HEART, 0, self.common.heart.encode()),
        ];
        for (instance, visitor) in (0..).zip(&self.visitors) {
            let progress = *lock(&visitor.progress);
            let mut bytes = Vec::new();
            let mut writer = Writer::new(&mut bytes);
            writer
                .u64(visitor.visits.load(Ordering::Relaxed))
                .u64(visitor.beats.load(Ordering::Relaxed))
                .u64(progress.share_sum);
            for walk in progress.sets {
                writer.u64(walk.cursor).u64(walk.left).u64(walk.pass);
            }
            sections.push(state::section(VISITOR, instance, bytes));
        }
        sections
    }

    /// Loads a source's state. After an error, a part of the state may have been loaded.
    pub(crate) fn load(&self, sections: &[Section]) -> Result<Own, LoadError> {
        state::check_names(sections, |name| match name {
            VMM | HEART => 1,
            VISITOR => self.visitors.len() as u32,
            _ => 0,
        })?;
        let own = Own::decode(state::find(sections, VMM, 0)?);
        let own = state::decoded(VMM, 0, own)?;
        let heart = self.common.heart.load(state::find(sections, HEART, 0)?);
        state::decoded(HEART, 0, heart)?;
        for (instance, visitor) in (0..).zip(&self.visitors) {
            let loaded = visitor.load(state::find(sections, VISITOR, instance)?);
            state::decoded(VISITOR, instance, loaded)?;
        }
        Ok(own)
    }
}

impl Visitor {
    /// Loads a thread's state. Rejects values out of range (I7).
    fn load(&self, bytes: &[u8]) -> Result<(), DecodeError> {
        let mut reader = Reader::new(bytes);
        let (visits, beats) = (reader.u64("visits")?, reader.u64("beats")?);
        let mut progress = lock(&self.progress);
        progress.share_sum = reader.u64("share")?;
        if progress.share_sum >= 100 {
            return Err(bad_value(&reader, "share", progress.share_sum));
        }
        for walk in &mut progress.sets {
            walk.cursor = reader.u64("cursor")?;
            walk.left = reader.u64("visits left")?;
            walk.pass = reader.u64("passes")?;
            if walk.cursor >= walk.set.count() {
                return Err(bad_value(&reader, "cursor", walk.cursor));
            }
            if !(1..=walk.set.count()).contains(&walk.left) {
                return Err(bad_value(&reader, "visits left", walk.left));
            }
        }
        reader.finish("visitor")?;
        self.visits.store(visits, Ordering::Relaxed);
        self.beats.store(beats, Ordering::Relaxed);
        Ok(())
    }
}

/// The main function of a thread.
pub(crate) fn thread(shared: &Shared, index: u8) {
    let common = &shared.common;
    let mut pacer = Pacer::new(common.pace, Instant::now());
    while common.control.wait_to_run() {
        pacer.restart(Instant::now());
        while common.control.may_run() {
            if let Err(ended) = shared.turn(index, &mut pacer) {
                common.control.end(ended, || ());
            }
        }
        common.control.park();
    }
}

impl Shared {
    /// Sends one beat and makes the visits that follow it. An error ends the guest.
    fn turn(&self, index: u8, pacer: &mut Pacer) -> Result<(), VmState> {
        let visitor = &self.visitors[usize::from(index)];
        visitor.beats.fetch_add(1, Ordering::Relaxed);
        let visits = self
            .common
            .beat(index, clock_ns(), || self.visits(), pacer)
            .ok_or(VmState::PoweredOff)?;
        let mut progress = lock(&visitor.progress);
        for _ in 0..visits {
            let walk = progress.choose();
            self.visit(walk).map_err(|wrong| {
                VmState::Stopped(Stop {
                    vcpu: index,
                    ..wrong
                })
            })?;
            walk.advance();
            visitor.visits.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads the next page, checks it, and writes to it.
    fn visit(&self, walk: &Walk) -> Result<(), Stop> {
        let page = walk.set.page(walk.cursor);
        let frame = layout::frame(page);
        let wrong = |code, expected, found| Stop {
            vcpu: 0,
            code,
            frame,
            expected,
            found,
        };
        let slice = self
            .common
            .memory
            .get_slice(GuestAddress(frame * PAGE_BYTES), PAGE_BYTES as usize)
            .expect("the workload's pages lie within the configured memory");
        // The guest's writes must not appear in the log of the VMM's own writes.
        let slice = untracked(&slice);
        let mut bytes = [0; PAGE_BYTES as usize];
        slice.copy_to(&mut bytes);
        let (words, _) = bytes.as_chunks::<8>();
        let pass = u64::from_le_bytes(words[0]);
        if pass != walk.pass {
            return Err(wrong(StopCode::WrongPass, walk.pass, pass));
        }
        let sum = words
            .iter()
            .fold(0, |sum, word| sum ^ u64::from_le_bytes(*word));
        let filled = page < layout::fill_end(&self.config);
        let signature = filled
            .then(|| layout::signature(self.config.fill, self.config.seed, frame))
            .flatten()
            .unwrap_or(0);
        if sum != signature {
            return Err(wrong(StopCode::WrongContent, signature, sum));
        }
        let next = pass.wrapping_add(1);
        let last = u64::from_le_bytes(words[LAST_WORD / 8]) ^ pass ^ next;
        for (word, offset) in [(next, 0), (last, LAST_WORD)] {
            slice
                .write_obj(word.to_le(), offset)
                .expect("both words lie within the page");
        }
        Ok(())
    }
}

impl Progress {
    /// Chooses the set for the next visit. Of every hundred visits, `share` go to the first set,
    /// evenly spread.
    fn choose(&mut self) -> &mut Walk {
        self.share_sum += self.share;
        if self.share_sum < 100 {
            return &mut self.sets[1];
        }
        self.share_sum -= 100;
        &mut self.sets[0]
    }
}

impl Walk {
    /// Advances to the next page. A pass visits every page of the set once, and the next pass
    /// starts at the same page.
    fn advance(&mut self) {
        self.left -= 1;
        if self.left > 0 {
            self.cursor = self.set.next(self.cursor);
        } else {
            self.left = self.set.count();
            self.pass = self.pass.wrapping_add(1);
            self.cursor = 0;
        }
    }
}

/// Returns the guest's clock: nanoseconds since 1970. During a migration, it jumps by the
/// difference between the clocks of the two hosts.
fn clock_ns() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}
