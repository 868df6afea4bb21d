//! One direction of a channel where it begins: what was read from its socket,
//! and whether more may be.

use std::collections::VecDeque;

use super::fault::PeerFault;
use super::frame::Data;
use crate::limits::{MAX_CHANNEL_CHUNKS, MAX_CHANNEL_OFFSET, MAX_STRIPE_CHUNK_BYTES};

/// Who may read the channel's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nobody: it has nothing to read.
    Idle,
    /// Nobody, although there may be something: the window is full, or the
    /// socket's bytes are being counted.
    Held,
    /// The next lane.
    Waits,
    /// A lane that has been told to.
    Taken,
    /// Nobody any more: it has been read to its end.
    Ended,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbound {
    /// Bytes that were read.
    pub(super) sent: u64,
    pub(super) limit: u64,
    /// Bytes that the consumer is known to have.
    pub(super) delivered: u64,
    /// Where the pieces end that it is not known to have.
    ends: VecDeque<u64>,
    pub(super) turn: Turn,
    /// Whether there was more to read when the last turn ended.
    pub(super) bulk: bool,
    /// How many channels that are being opened want its bytes counted.
    pub(super) counted_for: u32,
    /// Whether it is connected at the other side.
    pub(super) open: bool,
    pub(super) eof: Option<u64>,
    /// Whether the other side has said *closed*.
    pub(super) closed: bool,
}

impl Outbound {
    pub(super) fn new(limit: u64, open: bool) -> Self {
        Self {
            sent: 0,
            limit,
            delivered: 0,
            ends: VecDeque::new(),
            turn: Turn::Idle,
            bulk: false,
            counted_for: 0,
            open,
            eof: None,
            closed: false,
        }
    }

    /// Bytes that may be read now; 0 while nothing may.
    pub(super) fn room(&self) -> u32 {
        if !self.open || self.counted_for > 0 || self.ends.len() >= MAX_CHANNEL_CHUNKS {
            return 0;
        }
        let window = self.limit.min(MAX_CHANNEL_OFFSET).saturating_sub(self.sent);
        window.min(u64::from(MAX_STRIPE_CHUNK_BYTES)) as u32
    }

    /// `length` bytes were read.
    pub(super) fn cut(&mut self, channel: u32, length: u32) -> Option<Data> {
        let data = Data::new(channel, self.sent, length)?;
        self.sent = data.end();
        self.ends.push_back(data.end());
        Some(data)
    }

    /// What the other side says of it.
    pub(super) fn told(
        &mut self,
        channel: u32,
        delivered: u64,
        limit: u64,
    ) -> Result<(), PeerFault> {
        if delivered > self.sent {
            return Err(PeerFault::Impossible { channel });
        }
        self.limit = self.limit.max(limit);
        self.delivered = self.delivered.max(delivered);
        while self.ends.front().is_some_and(|end| *end <= self.delivered) {
            self.ends.pop_front();
        }
        Ok(())
    }
}
