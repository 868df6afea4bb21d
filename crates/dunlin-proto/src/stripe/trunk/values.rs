//! What goes into a trunk and comes out of it.

use thiserror::Error;

use crate::fault::FaultCode;
use crate::limits::{DEFAULT_CHANNELS, DEFAULT_PEER_BYTES, MAX_LANES};
use crate::stripe::Timeouts;

/// Which side this is; it decides which numbers its channels have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It made the trunk: its channels have even numbers.
    Connecting,
    /// It took it: its channels have odd numbers.
    Accepting,
}

/// The bounds of a trunk on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Channels that are alive at the same time, those of both sides together;
    /// at most [`crate::limits::MAX_CHANNELS`].
    pub channels: usize,
    /// Bytes of all channels that wait here for their consumers, and those
    /// that wait to be acknowledged; at least `channels` times
    /// [`crate::limits::LEAST_WINDOW_BYTES`] (I8).
    pub bytes: u64,
    /// Lanes that this side opens, at least one.
    pub lanes: u16,
    /// Lanes of the other side that may be open at the same time, at least
    /// one; it needs some more than it uses while it replaces them.
    pub lanes_max: u16,
    /// How long it waits for what.
    pub timeouts: Timeouts,
    /// How long lanes are kept after the last channel, in nanoseconds.
    pub warm_ns: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            channels: DEFAULT_CHANNELS,
            bytes: DEFAULT_PEER_BYTES,
            lanes: 4,
            lanes_max: MAX_LANES,
            timeouts: Timeouts::default(),
            warm_ns: 30_000_000_000,
        }
    }
}

/// A connection that was accepted and wants its other half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The listener that accepted it, any number: the channels of one are
    /// connected in their order.
    pub listener: u64,
    /// The route, by its name in both configurations.
    pub route: String,
    /// What the route's pattern is matched against.
    pub parameter: String,
    /// The channel's largest window here, in bytes: the route's.
    pub window_bytes: u64,
}

/// Why a channel cannot be opened. It is closed to whoever has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// There are as many as there may be.
    #[error(
        "{channels} channels are open, as many as there may be: raise the limit, or wait until some are closed"
    )]
    TooMany {
        /// How many.
        channels: usize,
    },
    /// One of the two sides is about to end.
    #[error("the tunnel is about to end and opens no more channels: use another, or start it anew")]
    Draining,
    /// The trunk is over, or has given all its numbers.
    #[error("the trunk with the peer is over: it is made anew for the next connection")]
    Over,
    /// A name is longer than a peer takes.
    #[error("the name of a route and its parameter are at most 255 bytes each")]
    Name,
}

/// What the caller has to do. The channel is the one of that number, and no
/// more where a lane's thread reports about it later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make the connection that the route and its parameter stand for, if they
    /// may; then [`super::Trunk::connected`], or [`super::Trunk::refuse`].
    Connect {
        /// The channel.
        channel: u32,
        /// The route's name, as the peer gives it.
        route: String,
        /// The parameter, as the peer gives it: check it before it is used.
        parameter: String,
    },
    /// Say how many bytes can be read from this channel's socket now
    /// ([`super::Trunk::counted`]). No lane is reading it.
    Count(u32),
    /// The other half is connected: report when the socket is readable.
    Opened(u32),
    /// There is no other half: close the connection.
    Refused {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, the peer's: escape it.
        text: String,
    },
    /// Everything has been written: tell the consumer of the end.
    ShutWrite(u32),
    /// The channel has ended both ways: close the connection.
    Close(u32),
    /// Reset the connection now, whatever has not been written.
    Abort {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// Whether the other side decided it.
        by_peer: bool,
    },
    /// Open a connection for a lane of this number; then
    /// [`super::Trunk::lane_stands`], or [`super::Trunk::lane_over`].
    OpenLane(u16),
    /// Cut this lane's connection, so that its thread ends.
    CutLane(u16),
    /// For the log: the other side does not take this lane.
    LaneRefused {
        /// The lane.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, the peer's: escape it.
        text: String,
    },
    /// The trunk is over, and all its channels are aborted.
    GiveUp(FaultCode),
}

/// What it means that a channel's consumer has closed its connection before it had everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The other side had ended, and at most [`crate::limits::MAX_UNREAD_BYTES`] were left unread:
    /// the channel is over, and the other side hears [`FaultCode::LeftUnread`].
    Unread,
    /// No more than that is left and the end may be on its way, or another thread is writing and
    /// finds out how much is left: [`Action::Abort`] comes, with
    /// [`FaultCode::LeftUnread`] or [`FaultCode::ChannelBroken`]. Until then nothing is to be
    /// written.
    Waits,
    /// There was more to come: the channel is aborted.
    Broken,
}

/// What a side holds, in bytes; for tests, metrics and the status command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Granted to the other side and not with a consumer.
    pub granted: u64,
    /// Here, and not with a consumer.
    pub held: u64,
    /// Sent, and not acknowledged.
    pub unacknowledged: u64,
}
