//! A journal: the record on disk, and the record that is being written.

use crate::random::Random;

/// One side's record of the session.
#[derive(Clone, Debug)]
pub(crate) struct Journal<T> {
    /// What a restarted process would read.
    pub(crate) durable: Option<T>,
    writing: Option<T>,
    /// Whether the next write fails.
    pub(crate) fails: bool,
}

impl<T> Default for Journal<T> {
    fn default() -> Self {
        Self {
            durable: None,
            writing: None,
            fails: false,
        }
    }
}

impl<T: Copy> Journal<T> {
    pub(crate) fn begin(&mut self, record: T) {
        self.writing = Some(record);
    }

    /// The write has ended; returns whether it succeeded. A failed write may
    /// still have reached the disk.
    pub(crate) fn end(&mut self, random: &mut Random) -> bool {
        let failed = std::mem::take(&mut self.fails);
        let written = self.writing.take();
        if written.is_some() && (!failed || random.chance(50)) {
            self.durable = written;
        }
        !failed
    }

    /// The process that writes the record dies.
    pub(crate) fn crash(&mut self, random: &mut Random) {
        let written = self.writing.take();
        if written.is_some() && random.chance(50) {
            self.durable = written;
        }
    }
}
