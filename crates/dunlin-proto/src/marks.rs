//! Keeps iterations apart at the destination (I4).
//!
//! A page that is sent in two iterations may travel on two lanes, and its older
//! version must not be written last. Therefore each lane carries a *mark*
//! at the end of an iteration, and no lane passes a mark before every live lane
//! has reached it. The source never waits.
//!
//! Getters: [`Marks::may_pass`], [`Marks::iteration`], [`Marks::marked`], [`Marks::live`].
//! Commands: [`Marks::open`]. Events: [`Marks::used`], [`Marks::reach`], [`Marks::end`]. The caller
//! wakes every waiting lane after [`Marks::reach`], even if it returns an error, and after
//! [`Marks::end`].

use std::collections::BTreeMap;

use thiserror::Error;

use crate::mistake::{Mistake, planted};

/// The last mark that each live lane has reached.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    live: BTreeMap<u16, Progress>,
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    reached: u32,
    /// The lane has carried nothing yet, so its first mark may have any number.
    new: bool,
    /// The lane has carried a mark.
    marked: bool,
}

/// A mark out of order, or a frame on a lane that is not open. The peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MarkError {
    /// A mark that does not follow the lane's last mark.
    #[error("lane {lane} carried the mark of iteration {found} instead of {expected}")]
    OutOfOrder {
        /// The lane.
        lane: u16,
        /// The iteration in the mark.
        found: u32,
        /// The expected iteration.
        expected: u32,
    },
    /// A frame on a lane that is not open.
    #[error("a frame arrived on lane {lane}, which is not open")]
    NotOpen {
        /// The lane.
        lane: u16,
    },
}

impl Marks {
    /// Adds a lane that was opened. From now on no other lane passes a mark that this lane has not
    /// reached. Until its first mark, the new lane counts as being at the lowest position of all
    /// lanes. The first mark shows in which iteration the new lane starts.
    pub fn open(&mut self, lane: u16) {
        let reached = self.live.values().map(|one| one.reached).min().unwrap_or(0);
        self.live.insert(
            lane,
            Progress {
                reached,
                new: true,
                marked: false,
            },
        );
    }

    /// The iteration of the next chunk on `lane`; `None` if the lane is not open.
    #[must_use]
    pub fn iteration(&self, lane: u16) -> Option<u32> {
        self.live
            .get(&lane)
            .map(|one| one.reached.saturating_add(1))
    }

    /// The last mark that `lane` has carried; `None` before its first mark, or if the lane is not
    /// open.
    #[must_use]
    pub fn marked(&self, lane: u16) -> Option<u32> {
        let progress = self.live.get(&lane)?;
        progress.marked.then_some(progress.reached)
    }

    /// Records that `lane` carried a chunk.
    pub fn used(&mut self, lane: u16) {
        if let Some(progress) = self.live.get_mut(&lane) {
            progress.new = false;
        }
    }

    /// Records that `lane` carried the mark that ends `iteration` (counted from 1).
    ///
    /// # Errors
    /// The lane is not open, or the mark is not the lane's next one. The first frame of a lane may
    /// be any mark.
    pub fn reach(&mut self, lane: u16, iteration: u32) -> Result<(), MarkError> {
        let progress = self
            .live
            .get_mut(&lane)
            .ok_or(MarkError::NotOpen { lane })?;
        let expected = progress.reached.saturating_add(1);
        if iteration != expected && !progress.new {
            return Err(MarkError::OutOfOrder {
                lane,
                found: iteration,
                expected,
            });
        }
        *progress = Progress {
            reached: iteration,
            new: false,
            marked: true,
        };
        Ok(())
    }

    /// Whether a lane that waits at the mark of `iteration` may continue.
    #[must_use]
    pub fn may_pass(&self, iteration: u32) -> bool {
        planted(Mistake::MarkPassedEarly) || self.live.values().all(|one| one.reached >= iteration)
    }

    /// Removes `lane`, which either closed without an error, or was lost and has no thread any
    /// more. In both cases nothing on the lane is in flight.
    pub fn end(&mut self, lane: u16) {
        self.live.remove(&lane);
    }

    /// Number of live lanes.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i4_no_lane_passes_a_mark_that_another_has_not_reached() {
        let mut marks = Marks::default();
        marks.open(1);
        marks.open(2);
        assert_eq!(marks.reach(1, 1), Ok(()));
        assert!(!marks.may_pass(1));
        assert_eq!(marks.reach(2, 1), Ok(()));
        assert!(marks.may_pass(1));
        assert!(!marks.may_pass(2));
    }

    #[test]
    fn i4_a_lane_given_up_does_not_block_others() {
        let mut marks = Marks::default();
        marks.open(1);
        marks.open(2);
        assert_eq!(marks.reach(1, 1), Ok(()));
        marks.end(2);
        assert!(marks.may_pass(1));
    }

    #[test]
    fn i7_a_mark_out_of_order_is_the_peers_fault() {
        let mut marks = Marks::default();
        marks.open(1);
        assert_eq!(marks.reach(1, 1), Ok(()));
        assert_eq!(
            marks.reach(1, 3),
            Err(MarkError::OutOfOrder {
                lane: 1,
                found: 3,
                expected: 2
            })
        );
        assert_eq!(marks.reach(7, 1), Err(MarkError::NotOpen { lane: 7 }));
    }

    #[test]
    fn i4_a_lane_opened_later_blocks_others_until_its_first_mark() {
        let mut marks = Marks::default();
        marks.open(1);
        assert_eq!(marks.reach(1, 1), Ok(()));
        marks.open(2);
        assert!(marks.may_pass(1));
        assert_eq!(marks.reach(1, 2), Ok(()));
        assert!(!marks.may_pass(2));
        assert_eq!(marks.reach(2, 2), Ok(()));
        assert!(marks.may_pass(2));
        assert_eq!(marks.iteration(2), Some(3));
        assert!(marks.reach(2, 7).is_err());
    }
}
