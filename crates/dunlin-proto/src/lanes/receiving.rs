//! The lanes at the destination.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::control::{ChunkSet, Final, Position, Reached};
use crate::marks::{MarkError, Marks};
use crate::mistake::{Mistake, planted};
use crate::received::{ChunkError, Received};

/// Why a lane is not let in. The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LaneRefusal {
    /// Lane numbers are never used twice (I4).
    #[error("the number of lane {lane} has been used before")]
    Used {
        /// The lane.
        lane: u16,
    },
    /// As many as are allowed are open.
    #[error("{open} lanes are open already")]
    Limit {
        /// How many.
        open: usize,
    },
    /// Everything has come.
    #[error("the session's memory is complete")]
    Complete,
}

/// Something came on a lane that cannot come there. The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CourseError {
    /// See [`MarkError`].
    #[error(transparent)]
    Mark(#[from] MarkError),
    /// See [`ChunkError`].
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A chunk of another iteration than the lane's marks say.
    #[error(
        "lane {lane} carried a chunk of iteration {found} in iteration {expected}: the source does not keep the protocol"
    )]
    Iteration {
        /// The lane.
        lane: u16,
        /// What the chunk says.
        found: u32,
        /// Where the lane stands.
        expected: u32,
    },
    /// *end* counts otherwise.
    #[error("lane {lane} ends with {counted} chunks and has brought {brought}")]
    Count {
        /// The lane.
        lane: u16,
        /// What *end* says.
        counted: u64,
        /// What came.
        brought: u64,
    },
}

/// *final* counts otherwise than what has come, although no lane is missing.
/// The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{chunks} chunks of {pages} pages came where the source counts {counted_chunks} of {counted_pages}: the source does not keep the protocol"
)]
pub struct Incomplete {
    /// Chunks that came.
    pub chunks: u64,
    /// Pages in them.
    pub pages: u64,
    /// Chunks that *final* counts.
    pub counted_chunks: u64,
    /// Pages that it counts.
    pub counted_pages: u64,
}

/// What *fence* asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Close the lane's connection, wake its thread and join it; then
    /// [`Receiving::gone`].
    Close,
    /// Nothing of it is here: answer at once.
    Answer,
}

#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    chunks: u64,
}

/// The lanes of one attempt, as they come in.
///
/// From the lanes' threads: [`Receiving::check_chunk`],
/// [`Receiving::written`], [`Receiving::mark`] and [`Receiving::may_pass`],
/// [`Receiving::ended`]. Events: [`Receiving::admit`],
/// [`Receiving::fence`], [`Receiving::gone`], [`Receiving::finish`]. What has
/// to be told to the source: [`Receiving::take_reports`], and on a new
/// control lane [`Receiving::repeat`].
#[derive(Debug, Default)]
pub struct Receiving {
    lanes_max: usize,
    marks: Marks,
    lanes: BTreeMap<u16, Carried>,
    used: BTreeSet<u16>,
    /// Lanes that the source has asked to fence and that are still here.
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
    /// No lane yet; at most `lanes_max` at the same time.
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

    /// Chunks and pages that have come.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        (self.received.count(), self.pages)
    }

    /// A lane has proved that it belongs here; tell the source *lane up*.
    ///
    /// # Errors
    /// Tell the source *lane refused* and close it.
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
        self.lanes.insert(lane, Carried::default());
        self.marks.open(lane);
        Ok(())
    }

    /// A chunk's header has come on `lane`: whether it may be written.
    ///
    /// # Errors
    /// It may not; the lane must be closed.
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

    /// The chunk is in guest memory.
    ///
    /// # Errors
    /// See [`ChunkError`].
    pub fn written(&mut self, lane: u16, number: u64, pages: u64) -> Result<(), CourseError> {
        self.received.insert(number)?;
        self.marks.used(lane);
        self.pages += pages;
        if let Some(carried) = self.lanes.get_mut(&lane) {
            carried.chunks += 1;
        }
        let wrong = u64::from(planted(Mistake::WrongChunkAcknowledged));
        self.acks.push(number + wrong);
        Ok(())
    }

    /// `lane` has read the mark of `iteration`; wake those that wait at one.
    ///
    /// # Errors
    /// See [`MarkError`].
    pub fn mark(&mut self, lane: u16, iteration: u32) -> Result<(), CourseError> {
        self.marks.reach(lane, iteration)?;
        self.reached.insert(lane, Position::Mark(iteration));
        Ok(())
    }

    /// Whether a lane that stands at the mark of `iteration` may go on.
    #[must_use]
    pub fn may_pass(&self, iteration: u32) -> bool {
        self.marks.may_pass(iteration)
    }

    /// Whether `lane` is being closed: its thread shall end.
    #[must_use]
    pub fn is_closing(&self, lane: u16) -> bool {
        self.asked.contains(&lane) || !self.lanes.contains_key(&lane)
    }

    /// `lane` has ended in order; wake those that wait at a mark.
    ///
    /// # Errors
    /// It counts otherwise.
    pub fn ended(&mut self, lane: u16, chunks: u64) -> Result<(), CourseError> {
        let carried = self.lanes.get(&lane).ok_or(MarkError::NotOpen { lane })?;
        if carried.chunks != chunks {
            return Err(CourseError::Count {
                lane,
                counted: chunks,
                brought: carried.chunks,
            });
        }
        self.lanes.remove(&lane);
        self.marks.end(lane);
        self.reached.insert(lane, Position::End);
        Ok(())
    }

    /// The source asks to fence `lane`. Its number can never be used again.
    pub fn fence(&mut self, lane: u16) -> Fence {
        self.used.insert(lane);
        if self.lanes.contains_key(&lane) {
            self.asked.insert(lane);
            return Fence::Close;
        }
        self.fenced.insert(lane);
        Fence::Answer
    }

    /// The thread of `lane` is joined and its connection closed. Tell the
    /// source *fenced*, with what [`Receiving::take_reports`] has, and wake
    /// those that wait at a mark. False if the lane had ended in order and
    /// nobody asked for a fence: nothing is to be told then.
    pub fn gone(&mut self, lane: u16) -> bool {
        let asked = self.asked.remove(&lane);
        let open = self.lanes.remove(&lane).is_some();
        if open {
            self.marks.give_up(lane);
        }
        if asked || open {
            self.fenced.insert(lane);
        }
        asked || open
    }

    /// *final* has come; a later one replaces it.
    pub fn finish(&mut self, last: Final) {
        if !self.complete {
            self.last = Some(last);
        }
    }

    /// Whether everything has come: every lane has ended and the counts of
    /// *final* agree. Once it has, it stays so.
    ///
    /// # Errors
    /// The counts differ and nothing can still come.
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

    /// *final*, once it has come.
    #[must_use]
    pub fn last(&self) -> Option<&Final> {
        self.last.as_ref()
    }

    /// Whether there is something to acknowledge.
    #[must_use]
    pub fn has_reports(&self) -> bool {
        !self.acks.is_empty() || !self.reached.is_empty()
    }

    /// What has come since the last call, as sets in ascending order.
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
        let reached = std::mem::take(&mut self.reached)
            .into_iter()
            .map(|(lane, position)| Reached { lane, position })
            .collect();
        (sets, reached)
    }

    /// Everything that a new control lane has to repeat: the chunks that have
    /// come and where the open lanes stand. For each open lane *lane up* is
    /// repeated too.
    pub fn repeat(&mut self) -> (Vec<ChunkSet>, Vec<Reached>) {
        self.acks.clear();
        let mut reached = std::mem::take(&mut self.reached);
        for &lane in self.lanes.keys() {
            if let Some(mark) = self.marks.marked(lane) {
                reached.insert(lane, Position::Mark(mark));
            }
        }
        let reached = reached
            .into_iter()
            .map(|(lane, position)| Reached { lane, position })
            .collect();
        (self.received.sets().collect(), reached)
    }
}

#[cfg(test)]
mod tests;
