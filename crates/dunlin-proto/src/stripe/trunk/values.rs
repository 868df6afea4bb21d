//! Inputs and outputs of a trunk.

use thiserror::Error;

use crate::fault::FaultCode;
use crate::limits::{DEFAULT_CHANNELS, DEFAULT_PEER_BYTES, MAX_LANES};
use crate::stripe::Timeouts;

/// The side of a trunk. It determines the numbers of the channels that this side opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that dialled the trunk. Its channels have even numbers.
    Connecting,
    /// The side that accepted the trunk. Its channels have odd numbers.
    Accepting,
}

/// The limits of a trunk on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The selected version of the tunnel's protocol.
    pub version: u16,
    /// Whether the connecting side opens the lanes of both directions. If not, each side opens the
    /// lanes on which it sends. Needs version 2.
    pub one_opener: bool,
    /// Channels that may be live at the same time, counting those of both sides; at most
    /// [`crate::limits::MAX_CHANNELS`].
    pub channels: usize,
    /// Limit for the bytes that wait on this side for consumers, in all channels together. The
    /// bytes that wait for an acknowledgement have a limit of the same size. At least `channels`
    /// times [`crate::limits::LEAST_WINDOW_BYTES`] (I8).
    pub bytes: u64,
    /// Lanes on which this side sends, at least 1.
    pub lanes: u16,
    /// Lanes of the other side that may be open at the same time, at least 1. While the other side
    /// replaces lanes, it has more lanes open than it uses for data.
    pub lanes_max: u16,
    /// Timeouts of lanes and of the control lane.
    pub timeouts: Timeouts,
    /// How long lanes stay open after the last channel, in nanoseconds.
    pub warm_ns: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            version: 1,
            one_opener: false,
            channels: DEFAULT_CHANNELS,
            bytes: DEFAULT_PEER_BYTES,
            lanes: 4,
            lanes_max: MAX_LANES,
            timeouts: Timeouts::default(),
            warm_ns: 30_000_000_000,
        }
    }
}

/// An accepted connection that needs a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The caller's number of the listener that accepted the connection. The channels of one
    /// listener are connected in the order in which their connections were accepted.
    pub listener: u64,
    /// The route, by its name in both configurations.
    pub route: String,
    /// The channel's parameter, for the placeholder in the route's target.
    pub parameter: String,
    /// The route's window: the largest window of the channel on this side, in bytes.
    pub window_bytes: u64,
}

/// Why a channel cannot be opened. The caller closes the accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The channel limit is reached.
    #[error("channel limit reached ({channels})")]
    TooMany {
        /// The limit.
        channels: usize,
    },
    /// One of the two sides is draining.
    #[error("the tunnel is shutting down and opens no more channels")]
    Draining,
    /// The trunk has ended, or all channel numbers are used.
    #[error("the trunk to the peer has ended or has used all channel numbers")]
    Over,
    /// The route's name or the parameter is longer than a message allows.
    #[error("route name or parameter is longer than 255 bytes")]
    Name,
}

/// What the caller does next. `channel` names a channel of the trunk. The channel may no longer
/// exist when a lane's thread reports about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connects the route's target, if the peer may use it, and calls [`super::Trunk::connected`]
    /// or [`super::Trunk::refuse`].
    Connect {
        /// The channel.
        channel: u32,
        /// The route's name, from the peer.
        route: String,
        /// The parameter, from the peer. The caller must check it before use.
        parameter: String,
    },
    /// Counts the bytes that can be read from this channel's socket now, and calls
    /// [`super::Trunk::counted`]. No lane is reading the socket.
    Count(u32),
    /// The other side has connected the channel. From now on, the caller watches the channel's
    /// socket and reports when it is readable.
    Opened(u32),
    /// Closes the accepted connection, because the other side did not connect the channel.
    Refused {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, from the peer. The caller must escape it.
        text: String,
    },
    /// Shuts down the direction to the consumer, because all bytes have been written.
    ShutWrite(u32),
    /// Closes the connection, because the channel has ended in both directions.
    Close(u32),
    /// Resets the connection and drops the bytes that wait for it.
    Abort {
        /// The channel.
        channel: u32,
        /// The reason as a code.
        fault: FaultCode,
        /// Whether the other side aborted the channel.
        by_peer: bool,
    },
    /// Dials the lane with this number, on which this side sends. Then calls
    /// [`super::Trunk::lane_established`] or [`super::Trunk::lane_failed`].
    OpenLane(u16),
    /// Dials the lane with this number, on which the other side sends. Then calls
    /// [`super::Trunk::opened_for`] or [`super::Trunk::not_opened`].
    OpenLaneFor(u16),
    /// Closes this lane's connection, which ends its thread.
    CutLane(u16),
    /// Logs that the other side refused this lane, or could not open it.
    LaneRefused {
        /// The lane.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, from the peer. The caller must escape it.
        text: String,
    },
    /// Logs that the other side could not open a lane on which it sends.
    LaneFailed {
        /// The lane.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, from the peer. The caller must escape it.
        text: String,
    },
    /// Ends the trunk, after all its channels were aborted.
    GiveUp(FaultCode),
}

/// The state of a channel after the hypervisor at this end closed its connection before the channel
/// had ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The channel is over. The other side had ended its direction, and at most
    /// [`crate::limits::MAX_UNREAD_BYTES`] were unread. The other side receives
    /// [`FaultCode::LeftUnread`].
    Unread,
    /// The channel will be aborted, but the fault code is not known yet. Either few bytes are
    /// unread and the channel's end may still arrive, or another thread is writing and will report
    /// how much is unread. [`Action::Abort`] follows, with [`FaultCode::LeftUnread`] or
    /// [`FaultCode::ChannelBroken`]. Until then the caller writes nothing.
    Waits,
    /// The channel is aborted, because too many bytes were unread or because this side had opened
    /// the channel. Only the side that did not open a channel may leave bytes unread. Also returned
    /// for a channel that no longer exists.
    Broken,
}

/// The bytes of one side, for tests, metrics and the status command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes granted to the other side and not delivered to a consumer.
    pub granted: u64,
    /// Bytes received and not delivered to a consumer.
    pub held: u64,
    /// Bytes sent and not acknowledged.
    pub unacknowledged: u64,
}
