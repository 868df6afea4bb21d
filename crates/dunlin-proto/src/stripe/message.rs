//! Messages on the tunnel's control lane after a version was selected.
//!
//! ```text
//!  the side that accepted a connection             the side that connects
//!    │ open (with the marks of earlier channels) ────▶ │ waits for the marks, connects
//!    │ ◀──────────────────────── opened, or refused    │
//!    │ credit, acknowledgements, eof, closed … from either side, for either direction
//!    │ reset ▶ ◀ gone   (either side, at any time)     │
//!
//!  either side: accept (once), lane refused, lane lost, lane failed, ping, pong, drain
//!  the side that accepted the trunk: lane wanted, if the other side opens all lanes
//! ```
//!
//! A message is a header of 16 bytes, the fixed part of its kind, and extension fields
//! ([`crate::wire`]). A message states a current value, never a change, so a message that arrives
//! twice or late is harmless, and the header needs no sequence number. To resume a control lane,
//! both sides send all current values again.

mod body;

pub use body::Kind;

use crate::fault::FaultCode;
use crate::limits::MAX_TUNNEL_BODY_BYTES;
use crate::negotiate::SessionSecret;
use crate::wire::{DecodeError, Reader, Start};

/// Bytes of a message's header.
pub const MESSAGE_HEADER_BYTES: usize = 16;

/// The header of a message, checked against its limits. The kind may be unknown.
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

    /// The length of the body, at most [`MAX_TUNNEL_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }

    /// The epoch of the control lane for which the message was written.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }
}

/// Requests the other half of a channel for a connection that the sender accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The channel. Its lowest bit is 0 if the side that dialled the trunk opens the channel,
    /// otherwise 1. The numbers of each side ascend.
    pub channel: u32,
    /// The offset up to which the receiver of this message may send.
    pub limit: u64,
    /// The route, by its name in both configurations; at most [`crate::limits::MAX_NAME_BYTES`].
    pub route: String,
    /// The channel's parameter, for the placeholder in the route's target; at most
    /// [`crate::limits::MAX_NAME_BYTES`].
    pub parameter: String,
    /// Positions in earlier channels. The receiver connects the target after it has delivered the
    /// bytes up to each position. It does not wait for a consumer that does not read. At most
    /// [`crate::limits::MAX_CHANNELS`] positions.
    pub barrier: Vec<Mark>,
}

/// A position in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The channel.
    pub channel: u32,
    /// The offset in bytes, at most [`crate::limits::MAX_CHANNEL_OFFSET`].
    pub offset: u64,
}

/// The number of bytes of a channel that were delivered, and the offset up to which bytes may be
/// sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// The channel.
    pub channel: u32,
    /// The number of bytes that the channel's consumer has taken.
    pub delivered: u64,
    /// The offset up to which the receiver of this message may send; it never decreases.
    pub limit: u64,
}

/// How many data frames of a lane have arrived completely. The receiver has delivered these frames
/// to a consumer or keeps them in a buffer, so the sender need not resend them if the lane is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneAck {
    /// The lane's number, never 0.
    pub lane: u16,
    /// The number of completely arrived data frames, counted from the lane's first frame.
    pub frames: u64,
}

/// A message of the tunnel's control lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Sent by both sides, as the first message of a trunk's first control lane.
    Accept {
        /// The secret with which the other side's lanes prove that they belong to the trunk.
        secret: SessionSecret,
        /// The maximum number of the other side's data lanes that are open at the same time, 1 to
        /// [`crate::limits::MAX_LANES`].
        lanes_max: u16,
        /// The side that dialled the control lane sends the port at which it accepts these lanes,
        /// or 0 if it opens all lanes itself. The port is at the source address of the control
        /// lane. The other side sends 0, because it accepts lanes where it accepted the control
        /// lane.
        port: u16,
    },
    /// See [`Open`].
    Open(Open),
    /// The other half of the channel is connected. Repeated on a later control lane.
    Opened {
        /// The channel.
        channel: u32,
        /// The offset up to which the receiver of this message may send.
        limit: u64,
    },
    /// The sender of this message could not connect its half of the channel. It repeats the message
    /// on later control lanes until *gone*.
    Refused {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// See [`Credit`]; at most [`crate::limits::MAX_CREDITS`].
    Credit(Vec<Credit>),
    /// See [`LaneAck`]; at most [`crate::limits::MAX_LANES`].
    Ack(Vec<LaneAck>),
    /// The sender closed a lane before reading a frame from the lane, or could not open a lane that
    /// the receiver had requested.
    LaneRefused {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// A lane's connection was lost before the lane's end arrived. The acknowledgement is the last
    /// one of this lane.
    LaneLost(LaneAck),
    /// The sender's direction of a channel ends at this position.
    Eof(Mark),
    /// Everything up to the other side's *eof* was delivered to the consumer.
    Closed {
        /// The channel.
        channel: u32,
    },
    /// The channel is aborted, immediately and in both directions. Repeated on later control lanes
    /// until *gone*.
    Reset {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
    },
    /// The channel is unknown or no longer exists.
    Gone {
        /// The channel.
        channel: u32,
    },
    /// Requests *pong* with the same token.
    Ping {
        /// Any number.
        token: u64,
    },
    /// The answer to *ping*.
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// The sender opens and accepts no more channels; the trunk ends with its last channel.
    Drain,
    /// Requests that the receiver opens a lane on which the sender sends. Repeated on a later
    /// control lane until the lane is open. Version 2.
    LaneWanted {
        /// The lane's number.
        lane: u16,
    },
    /// The sender could not open a lane on which it sends. The receiver only reports the reason.
    /// Version 2.
    LaneFailed {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
}
