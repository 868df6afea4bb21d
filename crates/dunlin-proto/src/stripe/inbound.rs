//! One direction of a channel where it arrives: put back in order, once.
//!
//! ```text
//!  0 ────────── delivered ────────── taken ──── kept ──── kept ──── limit
//!   with the        with whoever has the      waits for what       may be
//!   consumer        turn, or left over        is missing           sent
//! ```

use std::collections::BTreeMap;

use super::fault::PeerFault;
use super::frame::Data;
use super::window::Meter;
use crate::limits::MAX_CHANNEL_CHUNKS;
use crate::mistake::{Mistake, planted};

/// What becomes of a piece that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is next, and the turn to write to the channel's socket is the
    /// caller's: write it, then call `Trunk::wrote`.
    Deliver,
    /// It is too early, or somebody else writes: put it into a buffer of its
    /// own and call `Trunk::keep`.
    Keep,
    /// It has come before, or its channel is no more.
    Drop,
}

/// A piece to write to a channel's socket; the turn is the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery<T> {
    /// The channel.
    pub channel: u32,
    /// Bytes of it before the piece.
    pub offset: u64,
    /// Bytes of the piece.
    pub length: u32,
    /// What was kept.
    pub token: T,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Inbound<T> {
    delivered: u64,
    taken: u64,
    /// Whether somebody has the turn.
    writing: bool,
    /// What the socket did not take: from `delivered` to `taken`.
    rest: Option<T>,
    kept: BTreeMap<u64, (u32, T)>,
    kept_bytes: u64,
    pub(super) limit: u64,
    pub(super) eof: Option<u64>,
    /// Whether the consumer has been told of the end.
    pub(super) shut: bool,
    pub(super) meter: Meter,
    /// Pieces that were delivered and the sender has not been told of.
    pub(super) untold: usize,
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
            untold: 0,
        }
    }

    /// Bytes that the consumer has.
    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Bytes that may be here without being the consumer's.
    pub(super) fn granted(&self) -> u64 {
        self.limit - self.delivered
    }

    /// Bytes that are here.
    pub(super) fn held(&self) -> u64 {
        self.taken - self.delivered + self.kept_bytes
    }

    /// Bytes that the consumer has not: up to the end where that is known, else those that are
    /// here.
    pub(super) fn unread(&self) -> u64 {
        match self.eof {
            Some(eof) => eof - self.delivered,
            None => self.held(),
        }
    }

    /// Whether a thread is writing: its bytes count as unread until the write is over.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Whether the consumer shall be told of the end now.
    pub(super) fn at_end(&self) -> bool {
        if planted(Mistake::EndBeforeLastByte) {
            return !self.shut && self.eof.is_some() && !self.writing;
        }
        !self.shut && self.eof == Some(self.delivered)
    }

    /// The peer's direction ends at `offset`.
    pub(super) fn ends(&mut self, channel: u32, offset: u64) -> Result<(), PeerFault> {
        let kept_end = self.kept.last_key_value();
        let come = kept_end.map_or(self.taken, |(o, (length, _))| o + u64::from(*length));
        let again = self.eof.is_some_and(|eof| eof != offset);
        if again || offset > self.limit || offset < come {
            return Err(PeerFault::End { channel, offset });
        }
        self.eof = Some(offset);
        Ok(())
    }

    /// A piece is here.
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

    /// Keeps a piece, unless it has come since or is to be written at once.
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

    /// Whoever has the turn has written `bytes`, and `rest` holds what the
    /// socket did not take. Gives the turn back, or on with the next piece.
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
        self.untold += 1;
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

    /// The socket takes bytes again.
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

    /// Whether something waits for the socket to take it, or for a turn.
    pub(super) fn waits(&self) -> bool {
        self.delivered < self.taken || !self.kept.is_empty()
    }
}
