//! The receiving end of one direction of a channel: puts pieces in order and drops duplicates.
//!
//! ```text
//!  0 ────────── delivered ────────── taken ──── kept ──── kept ──── limit
//!   with the       being written, or       waits for           may be
//!   consumer       not yet accepted        missing bytes       sent
//!                  by the socket
//! ```

use std::collections::BTreeMap;

use super::fault::PeerFault;
use super::frame::Data;
use super::window::Meter;
use crate::limits::MAX_CHANNEL_CHUNKS;
use crate::mistake::{Mistake, planted};

/// What the caller does with a piece that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The piece is the next one, and the caller has the turn to write. It writes the piece to the
    /// channel's socket and calls `Trunk::wrote`.
    Deliver,
    /// Earlier bytes are missing, or another thread is writing. The caller copies the piece into
    /// its own buffer and calls `Trunk::keep`.
    Keep,
    /// The piece is a duplicate, or its channel no longer exists. The caller drops the piece.
    Drop,
}

/// A piece that the caller must write to a channel's socket now. No other thread writes to that
/// socket meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery<T> {
    /// The channel.
    pub channel: u32,
    /// The offset of the piece in the channel.
    pub offset: u64,
    /// The length of the piece.
    pub length: u32,
    /// The caller's handle to the bytes.
    pub token: T,
}

/// The receiving end of one direction of a channel.
#[derive(Debug)]
pub(super) struct Inbound<T> {
    delivered: u64,
    taken: u64,
    /// Whether a thread has the turn to write to the socket.
    writing: bool,
    /// The bytes that the socket did not accept: from `delivered` to `taken`.
    rest: Option<T>,
    kept: BTreeMap<u64, (u32, T)>,
    kept_bytes: u64,
    pub(super) limit: u64,
    pub(super) eof: Option<u64>,
    /// Whether the consumer has received the end.
    pub(super) shut: bool,
    pub(super) meter: Meter,
    /// The number of delivered pieces that no credit has reported.
    pub(super) unreported: usize,
}

impl<T> Inbound<T> {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            delivered: 0,
            taken: 0,
            writing: false,
            rest: None,
            kept: BTreeMap::new(),
            kept_bytes: 0,
            limit,
            eof: None,
            shut: false,
            meter: Meter::default(),
            unreported: 0,
        }
    }

    /// Bytes delivered to the consumer.
    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Bytes that may be in flight or buffered here, not counting delivered bytes.
    pub(super) fn granted(&self) -> u64 {
        self.limit - self.delivered
    }

    /// Bytes received and not delivered.
    pub(super) fn held(&self) -> u64 {
        self.taken - self.delivered + self.kept_bytes
    }

    /// Bytes that the consumer has not read. If the end of the channel is known, these are all
    /// bytes up to the end; otherwise only the bytes that have arrived.
    pub(super) fn unread(&self) -> u64 {
        match self.eof {
            Some(eof) => eof - self.delivered,
            None => self.held(),
        }
    }

    /// Whether a thread is writing. The bytes that it writes count as unread until the write
    /// returns.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Whether the end can be passed to the consumer now.
    pub(super) fn at_end(&self) -> bool {
        if planted(Mistake::EndBeforeLastByte) {
            return !self.shut && self.eof.is_some() && !self.writing;
        }
        !self.shut && self.eof == Some(self.delivered)
    }

    /// Records *eof*: the peer's direction ends at `offset`.
    pub(super) fn ends(&mut self, channel: u32, offset: u64) -> Result<(), PeerFault> {
        let kept_end = self.kept.last_key_value();
        let arrived = kept_end.map_or(self.taken, |(o, (length, _))| o + u64::from(*length));
        let again = self.eof.is_some_and(|eof| eof != offset);
        if again || offset > self.limit || offset < arrived {
            return Err(PeerFault::End { channel, offset });
        }
        self.eof = Some(offset);
        Ok(())
    }

    /// Decides what the caller does with a piece that has arrived.
    pub(super) fn arrived(&mut self, data: &Data) -> Result<Arrival, PeerFault> {
        let (offset, end) = (data.offset(), data.end());
        let channel = data.channel();
        if end <= self.taken {
            if planted(Mistake::DuplicateDelivered) && !self.writing && self.rest.is_none() {
                self.writing = true;
                return Ok(Arrival::Deliver);
            }
            return Ok(Arrival::Drop);
        }
        if end > self.limit {
            let limit = self.limit;
            return Err(PeerFault::OverLimit {
                channel,
                end,
                limit,
            });
        }
        if self.eof.is_some_and(|eof| end > eof) {
            return Err(PeerFault::BehindEnd { channel, end });
        }
        if offset < self.taken {
            return Err(PeerFault::Overlap { channel, offset });
        }
        if let Some((&before, &(length, _))) = self.kept.range(..end).next_back() {
            if before == offset && length == data.length() {
                return Ok(Arrival::Drop);
            }
            if before + u64::from(length) > offset {
                return Err(PeerFault::Overlap { channel, offset });
            }
        }
        if offset == self.taken && !self.writing && self.rest.is_none() {
            self.writing = true;
            self.taken = end;
            return Ok(Arrival::Deliver);
        }
        if self.kept.len() >= MAX_CHANNEL_CHUNKS {
            return Err(PeerFault::TooManyChunks { channel });
        }
        Ok(Arrival::Keep)
    }

    /// Keeps a piece for later delivery. A duplicate is dropped instead. A piece that has become
    /// the next one is returned, for the caller to write.
    pub(super) fn keep(&mut self, data: &Data, token: T) -> Result<Option<Delivery<T>>, PeerFault> {
        match self.arrived(data)? {
            Arrival::Drop => Ok(None),
            Arrival::Deliver => Ok(Some(Delivery {
                channel: data.channel(),
                offset: data.offset(),
                length: data.length(),
                token,
            })),
            Arrival::Keep => {
                self.kept.insert(data.offset(), (data.length(), token));
                self.kept_bytes += u64::from(data.length());
                Ok(None)
            }
        }
    }

    /// Records that the thread with the turn wrote `bytes`; `rest` holds the bytes that the socket
    /// did not accept. Returns the next piece to write, or ends the turn.
    pub(super) fn wrote(
        &mut self,
        channel: u32,
        bytes: u32,
        rest: Option<T>,
    ) -> Option<Delivery<T>> {
        self.writing = false;
        self.delivered = (self.delivered + u64::from(bytes)).min(self.taken);
        self.rest = rest;
        if self.rest.is_some() {
            return None;
        }
        self.unreported += 1;
        let next = self.kept.first_entry()?;
        if *next.key() != self.taken {
            return None;
        }
        let (offset, (length, token)) = next.remove_entry();
        self.kept_bytes -= u64::from(length);
        self.taken = offset + u64::from(length);
        self.writing = true;
        Some(Delivery {
            channel,
            offset,
            length,
            token,
        })
    }

    /// Returns the bytes that the socket did not accept before, because it is writable again.
    pub(super) fn writable(&mut self, channel: u32) -> Option<Delivery<T>> {
        let token = self.rest.take()?;
        self.writing = true;
        Some(Delivery {
            channel,
            offset: self.delivered,
            length: (self.taken - self.delivered) as u32,
            token,
        })
    }

    /// Whether the consumer's socket is full.
    pub(super) fn is_stuck(&self) -> bool {
        self.rest.is_some()
    }

    /// Whether bytes have arrived that are not delivered.
    pub(super) fn waits(&self) -> bool {
        self.delivered < self.taken || !self.kept.is_empty()
    }
}
