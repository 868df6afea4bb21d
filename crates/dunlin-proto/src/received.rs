//! The chunks that have arrived, as intervals of their numbers.
//!
//! Chunks are numbered without gaps, and the chunks of several lanes arrive nearly in order, so a
//! few intervals cover a whole session. A lost lane leaves gaps that are never filled: its pages
//! are resent in chunks with new numbers. A peer that numbers its chunks differently is rejected
//! before the intervals cost much memory ([`MAX_CHUNK_GAPS`]).

use std::collections::BTreeMap;

use thiserror::Error;

use crate::control::ChunkSet;
use crate::limits::MAX_CHUNK_GAPS;

/// The numbers of the chunks that have arrived.
#[derive(Clone, Debug, Default)]
pub struct Received {
    /// Maps the first number of each interval to the number after the interval's last one.
    intervals: BTreeMap<u64, u64>,
    count: u64,
}

/// A chunk number is invalid. The source is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChunkError {
    /// The chunk has arrived before, or its number is `u64::MAX`, which no chunk has.
    #[error("chunk {number} arrived twice")]
    Twice {
        /// The chunk's number.
        number: u64,
    },
    /// The numbers have more gaps than lost lanes can explain.
    #[error("chunk {number} would leave more than {MAX_CHUNK_GAPS} gaps in the chunk numbers")]
    Scattered {
        /// The chunk's number.
        number: u64,
    },
}

impl Received {
    /// Number of chunks that have arrived.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether this chunk has arrived.
    #[must_use]
    pub fn contains(&self, number: u64) -> bool {
        let before = self.intervals.range(..=number).next_back();
        before.is_some_and(|(_, &end)| number < end)
    }

    /// Adds a chunk.
    ///
    /// # Errors
    /// [`ChunkError`]. After an error, nothing has changed.
    pub fn insert(&mut self, number: u64) -> Result<(), ChunkError> {
        if self.contains(number) || number == u64::MAX {
            return Err(ChunkError::Twice { number });
        }
        let before = self.intervals.range(..number).next_back();
        let joined = before.filter(|(_, end)| **end == number).map(|(&f, _)| f);
        let after = self.intervals.remove(&(number + 1));
        if joined.is_none() && after.is_none() && self.intervals.len() > MAX_CHUNK_GAPS {
            return Err(ChunkError::Scattered { number });
        }
        let first = joined.unwrap_or(number);
        self.intervals.insert(first, after.unwrap_or(number + 1));
        self.count += 1;
        Ok(())
    }

    /// All chunks that have arrived, in ascending order.
    pub fn sets(&self) -> impl Iterator<Item = ChunkSet> + '_ {
        self.intervals
            .iter()
            .flat_map(|(&first, &end)| sets_of(first, end))
    }
}

/// The numbers from `first` to `end - 1`, in sets with counts that fit the wire
/// format.
fn sets_of(first: u64, end: u64) -> impl Iterator<Item = ChunkSet> {
    let step = u64::from(u32::MAX);
    (0..(end - first).div_ceil(step)).map(move |index| {
        let first = first + index * step;
        let count = u32::try_from(end - first).unwrap_or(u32::MAX);
        ChunkSet { first, count }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn sets(received: &Received) -> Vec<(u64, u32)> {
        received.sets().map(|set| (set.first, set.count)).collect()
    }

    #[test]
    fn chunks_in_any_order_join_into_one_set() {
        let mut received = Received::default();
        for number in [5, 3, 4, 0, 2, 1] {
            received.insert(number).unwrap();
        }
        assert_eq!(sets(&received), [(0, 6)]);
        assert_eq!(received.count(), 6);
        received.insert(8).unwrap();
        assert_eq!(sets(&received), [(0, 6), (8, 1)]);
        assert!(received.contains(8) && !received.contains(7) && !received.contains(6));
    }

    #[test]
    fn i7_a_duplicate_chunk_is_rejected() {
        let mut received = Received::default();
        received.insert(3).unwrap();
        assert_eq!(received.insert(3), Err(ChunkError::Twice { number: 3 }));
        assert_eq!(received.count(), 1);
    }

    #[test]
    fn i8_numbers_with_too_many_gaps_are_rejected() {
        let mut received = Received::default();
        let mut refused = None;
        for number in 0..2 * MAX_CHUNK_GAPS as u64 {
            if let Err(error) = received.insert(2 * number) {
                refused = Some(error);
                break;
            }
        }
        assert!(matches!(refused, Some(ChunkError::Scattered { .. })));
        assert!(received.intervals.len() <= MAX_CHUNK_GAPS + 1);
        // A chunk that fills a gap is still accepted.
        received.insert(1).unwrap();
    }

    #[test]
    fn more_chunks_than_one_set_can_count_become_several_sets() {
        let step = u64::from(u32::MAX);
        let counts: Vec<u32> = sets_of(7, 7 + 2 * step + 5).map(|set| set.count).collect();
        assert_eq!(counts, [u32::MAX, u32::MAX, 5]);
    }
}
