//! The sending end of one direction of a channel: the bytes that were read from its socket, and the
//! number of bytes that may still be read.

use std::collections::VecDeque;

use super::fault::PeerFault;
use super::frame::Data;
use crate::limits::{MAX_CHANNEL_CHUNKS, MAX_CHANNEL_OFFSET, MAX_STRIPE_CHUNK_BYTES};

/// Which thread may read the channel's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Turn {
    /// No thread, because there is nothing to read.
    #[default]
    Idle,
    /// No thread, although there may be bytes to read, for example because the window is full or
    /// the socket's bytes are being counted.
    Held,
    /// The next lane that asks for work.
    Waits,
    /// The lane that has taken the turn.
    Taken,
    /// No thread, because the socket was read to its end.
    Ended,
}

/// The sending end of one direction of a channel.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    /// Bytes read from the socket.
    pub(super) sent: u64,
    pub(super) limit: u64,
    /// Bytes that the other side has reported as delivered.
    pub(super) delivered: u64,
    /// The end offset of each piece that is not reported as delivered.
    ends: VecDeque<u64>,
    pub(super) turn: Turn,
    /// Whether there was more to read at the end of the last turn.
    pub(super) bulk: bool,
    /// The number of newer channels that cannot open yet. Before they open, this channel's unread
    /// bytes must arrive, and these bytes are not counted yet.
    pub(super) counted_for: u32,
    /// Whether both ends of the channel are connected.
    pub(super) open: bool,
    pub(super) eof: Option<u64>,
    /// Whether the other side has sent *closed*.
    pub(super) closed: bool,
}

impl Outbound {
    pub(super) fn new(limit: u64, open: bool) -> Self {
        Self {
            limit,
            open,
            ..Self::default()
        }
    }

    /// The number of bytes that may be read now; 0 if reading is not permitted.
    pub(super) fn room(&self) -> u32 {
        if !self.open || self.counted_for > 0 || self.ends.len() >= MAX_CHANNEL_CHUNKS {
            return 0;
        }
        let window = self.limit.min(MAX_CHANNEL_OFFSET).saturating_sub(self.sent);
        window.min(u64::from(MAX_STRIPE_CHUNK_BYTES)) as u32
    }

    /// Returns the header for `length` bytes that were read from the socket.
    pub(super) fn cut(&mut self, channel: u32, length: u32) -> Option<Data> {
        let data = Data::new(channel, self.sent, length)?;
        self.sent = data.end();
        self.ends.push_back(data.end());
        Some(data)
    }

    /// Handles a credit of the other side.
    pub(super) fn credited(
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
