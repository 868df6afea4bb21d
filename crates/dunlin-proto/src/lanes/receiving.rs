//! The lanes at the destination.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::control::{ChunkSet, Final, Position, Reached};
use crate::marks::{MarkError, Marks};
use crate::mistake::{Mistake, planted};
use crate::received::{ChunkError, Received};

/// Reasons to refuse a lane. The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LaneRefusal {
    /// The lane number was used before (I4).
    #[error("lane number {lane} was used before")]
    Used {
        /// The lane.
        lane: u16,
    },
    /// The maximum number of lanes is open.
    #[error("the lane limit is reached: {open} lanes are open")]
    Limit {
        /// Number of open lanes.
        open: usize,
    },
    /// All memory has arrived, so no further lane is needed.
    #[error("no lane is needed: all memory of the session has arrived")]
    Complete,
}

/// Something invalid arrived on a lane. The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CourseError {
    /// See [`MarkError`].
    #[error(transparent)]
    Mark(#[from] MarkError),
    /// See [`ChunkError`].
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The chunk belongs to an iteration other than the lane's current iteration.
    #[error(
        "lane {lane} carried a chunk of iteration {found}, but the lane is in iteration {expected}"
    )]
    Iteration {
        /// The lane.
        lane: u16,
        /// The chunk's iteration.
        found: u32,
        /// The lane's iteration.
        expected: u32,
    },
    /// The count in *end* is wrong.
    #[error("the end of lane {lane} announces {counted} chunks, but {carried} arrived")]
    Count {
        /// The lane.
        lane: u16,
        /// The count in *end*.
        counted: u64,
        /// The chunks that arrived.
        carried: u64,
    },
}

/// The counts in *final* do not match what has arrived, although nothing more can arrive. The
/// source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{chunks} chunks with {pages} pages arrived, but the source announced {counted_chunks} chunks with {counted_pages} pages"
)]
pub struct Incomplete {
    /// Chunks that arrived.
    pub chunks: u64,
    /// Pages in these chunks.
    pub pages: u64,
    /// Chunks according to *final*.
    pub counted_chunks: u64,
    /// Pages according to *final*.
    pub counted_pages: u64,
}

/// What the caller does after *fence*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Closes the lane's connection, wakes its thread, joins it, and calls
    /// [`Receiving::gone`].
    Close,
    /// Sends *fenced* immediately, because the lane is not open at the destination.
    Answer,
}

/// The lanes of one attempt, at the destination.
///
/// The lanes' threads call [`Receiving::check_chunk`], [`Receiving::written`],
/// [`Receiving::mark`], [`Receiving::may_pass`] and [`Receiving::ended`].
/// Events: [`Receiving::admit`], [`Receiving::fence`], [`Receiving::gone`],
/// [`Receiving::finish`]. Reports for the source: [`Receiving::take_reports`],
/// and [`Receiving::repeat`] on a new control lane.
#[derive(Debug, Default)]
pub struct Receiving {
    lanes_max: usize,
    marks: Marks,
    /// The number of chunks that each open lane has carried.
    lanes: BTreeMap<u16, u64>,
    used: BTreeSet<u16>,
    /// Lanes that were open when the source asked to fence them, until [`Receiving::gone`].
    asked: BTreeSet<u16>,
    fenced: BTreeSet<u16>,
    received: Received,
    pages: u64,
    acks: Vec<u64>,
    reached: BTreeMap<u16, Position>,
    last: Option<Final>,
    complete: bool,
}

impl Receiving {
    /// Creates the state without lanes. At most `lanes_max` may be open at the same time.
    #[must_use]
    pub fn new(lanes_max: u16) -> Self {
        Self {
            lanes_max: usize::from(lanes_max),
            ..Self::default()
        }
    }

    /// Lanes that are open, in ascending order.
    pub fn open(&self) -> impl Iterator<Item = u16> + '_ {
        self.lanes.keys().copied()
    }

    /// The numbers of chunks and pages that have arrived.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        (self.received.count(), self.pages)
    }

    /// Admits a lane with a valid proof. The caller then sends *lane up*.
    ///
    /// # Errors
    /// The lane is not admitted. The caller sends *lane refused* and closes the lane.
    pub fn admit(&mut self, lane: u16) -> Result<(), LaneRefusal> {
        if self.complete {
            return Err(LaneRefusal::Complete);
        }
        if self.used.contains(&lane) {
            return Err(LaneRefusal::Used { lane });
        }
        if self.lanes.len() >= self.lanes_max {
            let open = self.lanes.len();
            return Err(LaneRefusal::Limit { open });
        }
        self.used.insert(lane);
        self.lanes.insert(lane, 0);
        self.marks.open(lane);
        Ok(())
    }

    /// Checks that a chunk may be written to guest memory. The lane's thread calls this when the
    /// chunk's header has arrived on `lane`.
    ///
    /// # Errors
    /// The chunk must not be written, and the caller closes the lane.
    pub fn check_chunk(&self, lane: u16, number: u64, iteration: u32) -> Result<(), CourseError> {
        let expected = self
            .marks
            .iteration(lane)
            .ok_or(MarkError::NotOpen { lane })?;
        if iteration != expected {
            return Err(CourseError::Iteration {
                lane,
                found: iteration,
                expected,
            });
        }
        if self.received.contains(number) {
            return Err(ChunkError::Twice { number }.into());
        }
        Ok(())
    }

    /// Records that the chunk was written to guest memory.
    ///
    /// # Errors
    /// See [`ChunkError`].
    pub fn written(&mut self, lane: u16, number: u64, pages: u64) -> Result<(), CourseError> {
        self.received.insert(number)?;
        self.marks.used(lane);
        self.pages += pages;
        if let Some(carried) = self.lanes.get_mut(&lane) {
            *carried += 1;
        }
        let wrong = u64::from(planted(Mistake::WrongChunkAcknowledged));
        self.acks.push(number + wrong);
        Ok(())
    }

    /// Records that the mark of `iteration` was read on `lane`. The caller then wakes the lanes
    /// that wait at a mark.
    ///
    /// # Errors
    /// See [`MarkError`].
    pub fn mark(&mut self, lane: u16, iteration: u32) -> Result<(), CourseError> {
        self.marks.reach(lane, iteration)?;
        self.reached.insert(lane, Position::Mark(iteration));
        Ok(())
    }

    /// Whether a lane that waits at the mark of `iteration` may continue.
    #[must_use]
    pub fn may_pass(&self, iteration: u32) -> bool {
        self.marks.may_pass(iteration)
    }

    /// Whether `lane` is being closed or is not open, so that its thread must end.
    #[must_use]
    pub fn is_closing(&self, lane: u16) -> bool {
        self.asked.contains(&lane) || !self.lanes.contains_key(&lane)
    }

    /// Records that *end* was read on `lane`, so the lane closed without an error. The caller then
    /// wakes the lanes that wait at a mark.
    ///
    /// # Errors
    /// The count in *end* is wrong, or the lane is not open.
    pub fn ended(&mut self, lane: u16, chunks: u64) -> Result<(), CourseError> {
        let &carried = self.lanes.get(&lane).ok_or(MarkError::NotOpen { lane })?;
        if carried != chunks {
            return Err(CourseError::Count {
                lane,
                counted: chunks,
                carried,
            });
        }
        self.lanes.remove(&lane);
        self.marks.end(lane);
        self.reached.insert(lane, Position::End);
        Ok(())
    }

    /// Handles *fence* for `lane`. The lane's number is never accepted again.
    pub fn fence(&mut self, lane: u16) -> Fence {
        self.used.insert(lane);
        if self.lanes.contains_key(&lane) {
            self.asked.insert(lane);
            return Fence::Close;
        }
        self.fenced.insert(lane);
        Fence::Answer
    }

    /// Records that the connection of `lane` was closed and its thread joined. If this returns
    /// true, the caller sends *fenced* with the content of [`Receiving::take_reports`]. It returns
    /// false if the lane closed without an error and no fence was requested. In both cases the
    /// caller wakes the lanes that wait at a mark.
    pub fn gone(&mut self, lane: u16) -> bool {
        let asked = self.asked.remove(&lane);
        let open = self.lanes.remove(&lane).is_some();
        if open {
            self.marks.end(lane);
        }
        if asked || open {
            self.fenced.insert(lane);
        }
        asked || open
    }

    /// Records *final*. Until everything has arrived, a later *final* replaces an earlier one.
    pub fn finish(&mut self, last: Final) {
        if !self.complete {
            self.last = Some(last);
        }
    }

    /// Whether everything has arrived: every lane has ended or is fenced, and the counts of *final*
    /// match. Once true, it stays true.
    ///
    /// # Errors
    /// The counts differ and nothing more can arrive.
    pub fn is_complete(&mut self) -> Result<bool, Incomplete> {
        if self.complete {
            return Ok(true);
        }
        let fenced = u32::try_from(self.fenced.len()).unwrap_or(u32::MAX);
        let Some(last) = &self.last else {
            return Ok(false);
        };
        if !self.lanes.is_empty() || last.fenced != fenced {
            return Ok(false);
        }
        let (chunks, pages) = self.totals();
        if (chunks, pages) != (last.chunks, last.pages) {
            return Err(Incomplete {
                chunks,
                pages,
                counted_chunks: last.chunks,
                counted_pages: last.pages,
            });
        }
        self.complete = true;
        Ok(true)
    }

    /// The newest *final*; `None` until one has arrived.
    #[must_use]
    pub fn last(&self) -> Option<&Final> {
        self.last.as_ref()
    }

    /// Whether there are chunks or positions to report.
    #[must_use]
    pub fn has_reports(&self) -> bool {
        !self.acks.is_empty() || !self.reached.is_empty()
    }

    /// Returns the chunks that have arrived since the last call, as sets in ascending order, and
    /// the positions that lanes have reached since then.
    pub fn take_reports(&mut self) -> (Vec<ChunkSet>, Vec<Reached>) {
        self.acks.sort_unstable();
        let mut sets: Vec<ChunkSet> = Vec::new();
        for number in self.acks.drain(..) {
            match sets.last_mut() {
                Some(last)
                    if last.first + u64::from(last.count) == number && last.count < u32::MAX =>
                {
                    last.count += 1;
                }
                _ => sets.push(ChunkSet {
                    first: number,
                    count: 1,
                }),
            }
        }
        (sets, self.take_reached())
    }

    /// Returns the reports to repeat on a new control lane: all chunks that have arrived, the last
    /// marks of the open lanes, and the positions that were not reported yet. The caller also
    /// repeats *lane up* for each open lane.
    pub fn repeat(&mut self) -> (Vec<ChunkSet>, Vec<Reached>) {
        self.acks.clear();
        for &lane in self.lanes.keys() {
            if let Some(mark) = self.marks.marked(lane) {
                self.reached.insert(lane, Position::Mark(mark));
            }
        }
        (self.received.sets().collect(), self.take_reached())
    }

    fn take_reached(&mut self) -> Vec<Reached> {
        let reached = std::mem::take(&mut self.reached).into_iter();
        reached
            .map(|(lane, position)| Reached { lane, position })
            .collect()
    }
}

#[cfg(test)]
mod tests;
