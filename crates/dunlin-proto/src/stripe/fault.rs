//! Protocol violations of a tunnel's peer.

use thiserror::Error;

use crate::fault::FaultCode;

/// The peer violates the protocol. The caller ends the trunk, which aborts every channel. The peer
/// is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PeerFault {
    /// The peer names a channel that neither side has opened.
    #[error("the peer named channel {channel}, which was never opened")]
    UnknownChannel {
        /// The channel.
        channel: u32,
    },
    /// The peer opens a channel with a number that only this side may assign.
    #[error("peer opened channel {channel}, but this side assigns that number")]
    WrongSide {
        /// The channel.
        channel: u32,
    },
    /// A barrier lists the channels for which a new channel waits. This one lists a channel that is
    /// not an earlier channel of the peer.
    #[error(
        "peer's channel {channel} waits for channel {earlier}, which is not an earlier channel of the peer"
    )]
    Barrier {
        /// The channel.
        channel: u32,
        /// The channel in the barrier.
        earlier: u32,
    },
    /// The peer has more refused or unconfirmed channels than the limits allow.
    #[error("the peer has too many refused or unconfirmed channels")]
    TooManyChannels,
    /// The peer sends bytes beyond the granted limit (I8).
    #[error("peer sent bytes of channel {channel} up to offset {end}, over the limit {limit}")]
    OverLimit {
        /// The channel.
        channel: u32,
        /// The offset after the last byte that the peer sent.
        end: u64,
        /// The limit that was granted.
        limit: u64,
    },
    /// The peer sends bytes after the end of a channel.
    #[error(
        "peer sent bytes of channel {channel} up to offset {end}, after the end of the channel"
    )]
    BehindEnd {
        /// The channel.
        channel: u32,
        /// The offset after the last byte that the peer sent.
        end: u64,
    },
    /// The peer sends a piece that partly overlaps another piece.
    #[error(
        "peer sent a piece of channel {channel} at offset {offset} that overlaps another piece"
    )]
    Overlap {
        /// The channel.
        channel: u32,
        /// The offset of the piece.
        offset: u64,
    },
    /// The peer sends more pieces of a channel than may be in flight.
    #[error("peer has too many pieces of channel {channel} in flight")]
    TooManyChunks {
        /// The channel.
        channel: u32,
    },
    /// The peer announces an end offset that is over the limit, smaller than the offset of bytes
    /// that have arrived, or different from an earlier end offset.
    #[error("peer announced an invalid end of channel {channel} at offset {offset}")]
    End {
        /// The channel.
        channel: u32,
        /// The offset of the end.
        offset: u64,
    },
    /// The peer reports more bytes than this side has sent, or answers a message that this side
    /// has not sent.
    #[error("impossible message about channel {channel}: it does not match the channel's state")]
    Impossible {
        /// The channel.
        channel: u32,
    },
    /// The peer names a lane that was never opened, or names frames that the lane never carried.
    #[error(
        "impossible message about lane {lane}: the lane was never opened, or the message names frames that the lane did not carry"
    )]
    Lane {
        /// The lane.
        lane: u16,
    },
    /// The peer requests a lane although it has to open its lanes itself.
    #[error("peer requested lane {lane}, which it has to open itself")]
    LaneNotOurs {
        /// The lane.
        lane: u16,
    },
    /// The number of frames that a lane's end announces is not the number that has arrived.
    #[error("the end of lane {lane} announces {sent} frames, but {arrived} arrived")]
    LaneEnd {
        /// The lane.
        lane: u16,
        /// The number of frames that the lane's end announces.
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
