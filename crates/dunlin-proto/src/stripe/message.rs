//! What the tunnel's control lane carries once a version is selected.
//!
//! ```text
//!  the side that took a connection                 the side that makes one
//!    │ open (where earlier channels stand) ──────────▶ │ waits for those, connects
//!    │ ◀──────────────────────── opened, or refused    │
//!    │ credit, acknowledgements, eof, closed … both ways, for both directions
//!    │ reset ▶ ◀ gone   (either side, at any time)     │
//!
//!  either side: accept (once), lane refused, lane lost, ping, pong, drain
//! ```
//!
//! A message is a header of 16 bytes, the kind's fixed part, and extension
//! fields ([`crate::wire`]). Every message says how something stands, never
//! what has changed, so that hearing it twice or late does no harm: a new
//! control lane is resumed by saying again how everything stands. That is why
//! the header needs no sequence number.

mod body;

use crate::fault::FaultCode;
use crate::limits::MAX_TUNNEL_BODY_BYTES;
use crate::negotiate::SessionSecret;
use crate::wire::message::kinds;
use crate::wire::{DecodeError, Reader, Start};

/// Bytes of a message's header.
pub const MESSAGE_HEADER_BYTES: usize = 16;

/// The header of a message: within its limits, the kind perhaps unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    start: Start,
    epoch: u32,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// A body over [`MAX_TUNNEL_BODY_BYTES`], or a reserved bit that is set.
    pub fn decode(bytes: &[u8; MESSAGE_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let start = Start::read(&mut reader, MAX_TUNNEL_BODY_BYTES)?;
        let epoch = reader.u32("epoch")?;
        reader.reserved::<4>("reserved")?;
        Ok(Self { start, epoch })
    }

    /// Bytes that follow, at most [`MAX_TUNNEL_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }

    /// The control lane that the message was written for.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }
}

/// A connection was taken and wants its other half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The channel: its lowest bit says which side opens it (0 the side that
    /// made the trunk), and each side's numbers ascend.
    pub channel: u32,
    /// Bytes that the other side may send on it.
    pub limit: u64,
    /// The route, by its name in both configurations; at most
    /// [`crate::limits::MAX_NAME_BYTES`].
    pub route: String,
    /// What the route's pattern is matched against; at most
    /// [`crate::limits::MAX_NAME_BYTES`].
    pub parameter: String,
    /// What must have been delivered before the connection is made; at most
    /// [`crate::limits::MAX_CHANNELS`].
    pub barrier: Vec<Mark>,
}

/// A place in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The channel.
    pub channel: u32,
    /// Bytes of it, at most [`crate::limits::MAX_CHANNEL_OFFSET`].
    pub offset: u64,
}

/// How far a channel has come, and may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// The channel.
    pub channel: u32,
    /// Bytes of it that its consumer has taken.
    pub delivered: u64,
    /// Bytes of it that may be sent; never less than said before.
    pub limit: u64,
}

/// How many frames of data of a lane are safe: with a consumer, or kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneAck {
    /// The lane's number, never 0.
    pub lane: u16,
    /// Frames from the lane's first on.
    pub frames: u64,
}

/// A message of the tunnel's control lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Either side, first on a trunk's first control lane.
    Accept {
        /// Under which the other side's lanes prove that they belong here.
        secret: SessionSecret,
        /// Data lanes of the other side that may be alive at the same time, 1
        /// to [`crate::limits::MAX_LANES`].
        lanes_max: u16,
        /// Where they are taken: a port at the address from which the control
        /// lane came. 0 is where the control lane was connected to.
        port: u16,
    },
    /// See [`Open`].
    Open(Open),
    /// The other half is connected.
    Opened {
        /// The channel.
        channel: u32,
        /// Bytes that may be sent on it.
        limit: u64,
    },
    /// There is no other half. Repeated until *gone*.
    Refused {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// See [`Credit`]; at most [`crate::limits::MAX_CREDITS`].
    Credit(Vec<Credit>),
    /// See [`LaneAck`]; at most [`crate::limits::MAX_LANES`].
    Ack(Vec<LaneAck>),
    /// A lane was closed and not read from.
    LaneRefused {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// A lane's connection is over before its end came, and this is all that
    /// will ever be acknowledged of it.
    LaneLost(LaneAck),
    /// The sender's direction of a channel ends here.
    Eof(Mark),
    /// Everything up to the other side's *eof* is with its consumer.
    Closed {
        /// The channel.
        channel: u32,
    },
    /// The channel is aborted, both ways and at once. Repeated until *gone*.
    Reset {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
    },
    /// The channel is not known, or no more.
    Gone {
        /// The channel.
        channel: u32,
    },
    /// Answer with the same token.
    Ping {
        /// Any number.
        token: u64,
    },
    /// The answer to a ping.
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// The sender opens no channel any more and takes none; the trunk
    /// ends with its last channel.
    Drain,
}

kinds! {
    Accept = 65, "accept";
    Open = 66, "open";
    Opened = 67, "opened";
    Refused = 68, "refused";
    Credit = 69, "credit";
    Ack = 70, "acknowledgements";
    LaneRefused = 71, "lane refused";
    LaneLost = 72, "lane lost";
    Eof = 73, "eof";
    Closed = 74, "closed";
    Reset = 75, "reset";
    Gone = 76, "gone";
    Ping = 77, "ping";
    Pong = 78, "pong";
    Drain = 79, "drain";
}
