//! How a peer can break the tunnel's protocol.

use thiserror::Error;

use crate::fault::FaultCode;

/// The peer does not keep the protocol: end the trunk, which aborts
/// every channel. The peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PeerFault {
    /// A channel that it has never opened, or that was never opened to it.
    #[error("the peer names channel {channel}, which was never opened")]
    UnknownChannel {
        /// The channel.
        channel: u32,
    },
    /// An *open* with a number that is not the peer's to give.
    #[error("the peer opens channel {channel}, a number that is this side's to give")]
    WrongSide {
        /// The channel.
        channel: u32,
    },
    /// A barrier that names a channel which is not an earlier one of the
    /// peer's.
    #[error("the peer opens channel {channel} behind channel {earlier}, which is no earlier one")]
    Barrier {
        /// The channel.
        channel: u32,
        /// What it shall wait for.
        earlier: u32,
    },
    /// More refused or unconfirmed channels than any peer has.
    #[error("the peer leaves more channels unconfirmed than there can be")]
    TooManyChannels,
    /// Bytes beyond what was granted (I8).
    #[error("the peer sent channel {channel} up to byte {end}, and may up to {limit}")]
    OverLimit {
        /// The channel.
        channel: u32,
        /// The end of what it sent.
        end: u64,
        /// What was granted.
        limit: u64,
    },
    /// Bytes behind the end of a channel.
    #[error("the peer sent channel {channel} up to byte {end}, behind its end")]
    BehindEnd {
        /// The channel.
        channel: u32,
        /// The end of what it sent.
        end: u64,
    },
    /// A piece that shares some of its bytes with another.
    #[error("a piece of channel {channel} at byte {offset} overlaps another one")]
    Overlap {
        /// The channel.
        channel: u32,
        /// Where the piece begins.
        offset: u64,
    },
    /// More pieces than it may have under way.
    #[error("the peer cuts channel {channel} into too many pieces")]
    TooManyChunks {
        /// The channel.
        channel: u32,
    },
    /// An end beyond what was granted, before what has come, or another one
    /// than before.
    #[error("the peer ends channel {channel} at byte {offset}, where it cannot end")]
    End {
        /// The channel.
        channel: u32,
        /// Where it ends.
        offset: u64,
    },
    /// It has taken what was never sent, or answers what was never said.
    #[error("the peer says of channel {channel} what cannot be")]
    Impossible {
        /// The channel.
        channel: u32,
    },
    /// It names a lane that was never opened, or frames that it never carried.
    #[error("the peer says of lane {lane} what cannot be")]
    Lane {
        /// The lane.
        lane: u16,
    },
    /// A lane ended with another number of frames than have come.
    #[error("lane {lane} ended after {said} frames, and {come} have come")]
    LaneEnd {
        /// The lane.
        lane: u16,
        /// The frames that it says it carried.
        said: u64,
        /// Those that came.
        come: u64,
    },
}

impl PeerFault {
    /// The code for the peer.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        FaultCode::Malformed
    }
}
