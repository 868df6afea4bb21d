//! Keeping iterations apart at the destination (I4).
//!
//! A page that is sent in two iterations may travel on two lanes. The second
//! version must not be overtaken by the first, so each lane carries a *mark*
//! at an iteration's end, and no lane goes past a mark before every live lane
//! has reached it. The source never waits.
//!
//! Getters: [`Marks::may_pass`]. Commands: [`Marks::open`]. Events:
//! [`Marks::reach`], [`Marks::end`], [`Marks::give_up`]. The caller wakes
//! every waiting lane after each event, an error included.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::mistake::{Mistake, planted};

/// How far each live lane has come.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    live: BTreeMap<u16, Standing>,
}

#[derive(Clone, Copy, Debug)]
struct Standing {
    reached: u32,
    /// It has carried nothing yet: its first mark may be any.
    new: bool,
    /// It has carried a mark.
    marked: bool,
}

/// A lane that did not keep to the order of marks. The peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MarkError {
    /// A mark that is not the one after the lane's last.
    #[error(
        "lane {lane} carried the mark of iteration {found} where {expected} comes next: the source does not keep the protocol"
    )]
    OutOfOrder {
        /// The lane.
        lane: u16,
        /// The iteration that the mark named.
        found: u32,
        /// The iteration that had to come.
        expected: u32,
    },
    /// A mark on a lane that is not open.
    #[error("lane {lane} is not open")]
    NotOpen {
        /// The lane.
        lane: u16,
    },
}

impl Marks {
    /// A new lane takes part: from now on no other passes a mark without it.
    /// It stands where the last of the others does; the source, which knows
    /// what iteration it is, says by the lane's first mark where it begins.
    pub fn open(&mut self, lane: u16) {
        let reached = self.live.values().map(|one| one.reached).min().unwrap_or(0);
        self.live.insert(
            lane,
            Standing {
                reached,
                new: true,
                marked: false,
            },
        );
    }

    /// The iteration to which the chunks of `lane` belong now.
    #[must_use]
    pub fn iteration(&self, lane: u16) -> Option<u32> {
        self.live
            .get(&lane)
            .map(|one| one.reached.saturating_add(1))
    }

    /// The last mark that `lane` has carried; `None` before its first.
    #[must_use]
    pub fn marked(&self, lane: u16) -> Option<u32> {
        let standing = self.live.get(&lane)?;
        standing.marked.then_some(standing.reached)
    }

    /// `lane` has carried a chunk.
    pub fn used(&mut self, lane: u16) {
        if let Some(standing) = self.live.get_mut(&lane) {
            standing.new = false;
        }
    }

    /// `lane` has read the mark that ends `iteration` (counted from 1).
    ///
    /// # Errors
    /// The lane is not open, or the mark is not its next one.
    pub fn reach(&mut self, lane: u16, iteration: u32) -> Result<(), MarkError> {
        let standing = self
            .live
            .get_mut(&lane)
            .ok_or(MarkError::NotOpen { lane })?;
        let expected = standing.reached.saturating_add(1);
        if iteration != expected && !standing.new {
            return Err(MarkError::OutOfOrder {
                lane,
                found: iteration,
                expected,
            });
        }
        *standing = Standing {
            reached: iteration,
            new: false,
            marked: true,
        };
        Ok(())
    }

    /// Whether a lane that stands at the mark of `iteration` may go on.
    #[must_use]
    pub fn may_pass(&self, iteration: u32) -> bool {
        planted(Mistake::MarkPassedEarly) || self.live.values().all(|one| one.reached >= iteration)
    }

    /// `lane` ended in order: nothing of it is under way.
    pub fn end(&mut self, lane: u16) {
        self.live.remove(&lane);
    }

    /// `lane` was given up, and its thread is joined: it can write no more.
    pub fn give_up(&mut self, lane: u16) {
        self.live.remove(&lane);
    }

    /// How many lanes are live.
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
    fn i4_a_lane_given_up_holds_nobody_back() {
        let mut marks = Marks::default();
        marks.open(1);
        marks.open(2);
        assert_eq!(marks.reach(1, 1), Ok(()));
        marks.give_up(2);
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
    fn i4_a_lane_opened_later_holds_the_others_until_it_says_where_it_begins() {
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
