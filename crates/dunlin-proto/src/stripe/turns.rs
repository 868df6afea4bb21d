//! Which channel is read next.
//!
//! Channels with many bytes to send take turns, one chunk each. A channel that had nothing to send
//! for a while goes first, so that a few bytes of a dialogue do not wait for a chunk of every other
//! channel. A limit ensures that the other channels get turns too.

use std::collections::VecDeque;

/// How many channels in a row may go first before one of the other channels gets a turn.
///
/// Drawback: if many channels send a few bytes now and then, these channels wait for a chunk of
/// another channel after every four turns. Without a limit, however, they could prevent all other
/// channels from ever getting a turn.
const FIRST_IN_A_ROW: u32 = 4;

/// The channels that have bytes to send and may send them.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns {
    first: VecDeque<u32>,
    others: VecDeque<u32>,
    in_a_row: u32,
}

impl Turns {
    /// Queues a channel that is not queued. `bulk` means that the channel had more to send at the
    /// end of its last turn.
    pub(super) fn add(&mut self, channel: u32, bulk: bool) {
        if bulk {
            self.others.push_back(channel);
        } else {
            self.first.push_back(channel);
        }
    }

    /// Removes and returns the channel with the next turn.
    pub(super) fn next(&mut self) -> Option<u32> {
        let first = self.in_a_row < FIRST_IN_A_ROW || self.others.is_empty();
        if first && let Some(channel) = self.first.pop_front() {
            self.in_a_row = self.in_a_row.saturating_add(1);
            return Some(channel);
        }
        self.in_a_row = 0;
        self.others.pop_front()
    }

    /// Removes a channel that needs no turn.
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
    fn a_channel_that_had_nothing_to_send_goes_first() {
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
            // Before each turn, a channel that may go first is queued.
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
    fn a_removed_channel_gets_no_turn() {
        let mut turns = Turns::default();
        turns.add(1, true);
        turns.add(2, false);
        turns.remove(1);
        turns.remove(2);
        assert!(turns.is_empty());
        assert_eq!(turns.next(), None);
    }
}
