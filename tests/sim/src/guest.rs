//! A guest's memory: the version of each page, and the log of written pages.

use crate::random::Random;

/// The copy of the VM at the source.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    /// How many times each page was written.
    pub(crate) pages: Vec<u32>,
    dirty: Vec<u64>,
    /// How many times the dirty log was read.
    pub(crate) readings: u32,
    pub(crate) running: bool,
    /// Whether the guest's owner had paused the guest before the migration.
    pub(crate) paused_by_owner: bool,
    random: Random,
}

impl Guest {
    pub(crate) fn new(seed: u64, pages: u32, paused_by_owner: bool) -> Self {
        let mut random = Random::new(seed, 1);
        // Leave some pages at version 0, as if they had never been written.
        let pages: Vec<u32> = (0..pages).map(|_| u32::from(!random.chance(20))).collect();
        Self {
            readings: 0,
            dirty: vec![0; pages.len().div_ceil(64)],
            pages,
            running: !paused_by_owner,
            paused_by_owner,
            random,
        }
    }

    /// Makes `burst` writes, most of them within a hot set.
    pub(crate) fn write(&mut self, burst: u32) {
        let hot = (self.pages.len() as u64 / 4).max(1);
        for _ in 0..burst {
            let end = if self.random.chance(80) {
                hot
            } else {
                self.pages.len() as u64
            };
            let page = self.random.below(end) as usize;
            self.pages[page] += 1;
            self.dirty[page / 64] |= 1 << (page % 64);
        }
    }

    /// Reads the dirty log, which clears it.
    pub(crate) fn fetch(&mut self) -> Vec<u64> {
        self.readings += 1;
        let empty = vec![0; self.dirty.len()];
        std::mem::replace(&mut self.dirty, empty)
    }
}
