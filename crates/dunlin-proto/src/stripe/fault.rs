//! Protocol violations of a tunnel's peer.

use thiserror::Error;

use crate::fault::FaultCode;

/// The peer violates the protocol. The caller ends the trunk, which aborts every channel. The peer
/// is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PeerFault {
    /// The peer names a channel that neither side has opened.
    #[error("channel {channel} was never opened")]
    UnknownChannel {
        /// The channel.
        channel: u32,
    },
    /// An *open* with a channel number that belongs to this side.
    #[error("peer opened channel {channel}, a number of this side")]
    WrongSide {
        /// The channel.
        channel: u32,
    },
    /// A barrier that names a channel other than an earlier channel of the peer.
    #[error("barrier of channel {channel} names channel {earlier}, which is not an earlier one")]
    Barrier {
        /// The channel.
        channel: u32,
        /// The channel in the barrier.
        earlier: u32,
    },
    /// More refused or unconfirmed channels than any peer can have.
    #[error("too many unconfirmed channels")]
    TooManyChannels,
    /// Bytes beyond what was granted (I8).
    #[error("channel {channel} sent up to byte {end}, over its limit {limit}")]
    OverLimit {
        /// The channel.
        channel: u32,
        /// The end of what it sent.
        end: u64,
        /// The limit that was granted.
        limit: u64,
    },
    /// Bytes after the end of a channel.
    #[error("channel {channel} sent up to byte {end}, after its end")]
    BehindEnd {
        /// The channel.
        channel: u32,
        /// The end of what it sent.
        end: u64,
    },
    /// A piece that partly overlaps another one.
    #[error("piece of channel {channel} at byte {offset} overlaps another one")]
    Overlap {
        /// The channel.
        channel: u32,
        /// The offset of the piece.
        offset: u64,
    },
    /// More pieces of a channel than may be in flight.
    #[error("too many pieces of channel {channel} in flight")]
    TooManyChunks {
        /// The channel.
        channel: u32,
    },
    /// An end offset over the limit, below bytes that have arrived, or different from an
    /// earlier end offset.
    #[error("invalid end of channel {channel} at byte {offset}")]
    End {
        /// The channel.
        channel: u32,
        /// The offset of the end.
        offset: u64,
    },
    /// The peer reports more than was sent, or answers a message that was not sent.
    #[error("impossible message about channel {channel}")]
    Impossible {
        /// The channel.
        channel: u32,
    },
    /// The peer names a lane that was never opened, or frames that the lane never carried.
    #[error("impossible message about lane {lane}")]
    Lane {
        /// The lane.
        lane: u16,
    },
    /// A lane ended with another number of frames than have arrived.
    #[error("the end of lane {lane} announces {sent} frames, but {arrived} arrived")]
    LaneEnd {
        /// The lane.
        lane: u16,
        /// The number of frames in the lane's end.
        sent: u64,
        /// The number of frames that have arrived.
        arrived: u64,
    },
}

impl PeerFault {
    /// The fault code for the peer.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        FaultCode::Malformed
    }
}
