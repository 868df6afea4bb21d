//! Which channel is read next.
//!
//! Channels with much to send take turns, a chunk each. One that had nothing
//! to send for a while goes before them, so that a few bytes of a dialogue do
//! not wait for a chunk of everybody else; but never so often that the others
//! stand still.

use std::collections::VecDeque;

/// How many channels may go first before one of the others has its turn.
///
/// Drawback: many channels that each send now and then wait behind one chunk
/// for every four of them. Alternative: no bound; then they could starve the
/// others altogether.
const FIRST_IN_A_ROW: u32 = 4;

/// The channels that have something to send and may.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns {
    first: VecDeque<u32>,
    others: VecDeque<u32>,
    in_a_row: u32,
}

impl Turns {
    /// `channel`, which is in neither row, waits for its turn: `bulk` says
    /// that it had more to send when its last turn ended.
    pub(super) fn add(&mut self, channel: u32, bulk: bool) {
        if bulk {
            self.others.push_back(channel);
        } else {
            self.first.push_back(channel);
        }
    }

    /// Takes the channel whose turn it is.
    pub(super) fn next(&mut self) -> Option<u32> {
        let first = self.in_a_row < FIRST_IN_A_ROW || self.others.is_empty();
        if first && let Some(channel) = self.first.pop_front() {
            self.in_a_row = self.in_a_row.saturating_add(1);
            return Some(channel);
        }
        self.in_a_row = 0;
        self.others.pop_front()
    }

    /// `channel` wants no turn any more.
    pub(super) fn remove(&mut self, channel: u32) {
        self.first.retain(|one| *one != channel);
        self.others.retain(|one| *one != channel);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.others.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_that_had_nothing_to_send_waits_for_nobodys_turn() {
        let mut turns = Turns::default();
        for channel in 0..64 {
            turns.add(channel, true);
        }
        assert_eq!(turns.next(), Some(0));
        turns.add(100, false);
        assert_eq!(turns.next(), Some(100));
        assert_eq!(turns.next(), Some(1));
    }

    #[test]
    fn others_take_turns_and_are_never_starved() {
        let mut turns = Turns::default();
        for channel in 0..3 {
            turns.add(channel, true);
        }
        let mut had = [0; 3];
        for _ in 0..150 {
            // Somebody new always wants to go first.
            turns.add(100, false);
            let channel = turns.next().unwrap_or_default();
            if channel < 3 {
                had[channel as usize] += 1;
                turns.add(channel, true);
                turns.remove(100);
            }
        }
        assert_eq!(had, [10; 3]);
    }

    #[test]
    fn who_is_removed_gets_no_turn() {
        let mut turns = Turns::default();
        turns.add(1, true);
        turns.add(2, false);
        turns.remove(1);
        turns.remove(2);
        assert!(turns.is_empty());
        assert_eq!(turns.next(), None);
    }
}
