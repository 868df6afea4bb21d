//! The sockets at both ends of a channel, and the programs that own them.

use super::plan::Talk;

/// Bytes that a socket buffers.
const SOCKET_BYTES: u64 = 200_000;

/// The true origin of a piece of data, independent of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) channel: usize,
    /// The side on which the tunnel read the piece.
    pub(super) from: usize,
    /// The number of bytes of the channel that the tunnel read on that side before the piece.
    pub(super) at: u64,
    pub(super) length: u32,
}

/// How a side's connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Closed,
    Aborted,
    Refused,
}

/// One side's connection.
#[derive(Clone, Debug)]
pub(super) struct Socket {
    pub(super) talk: Talk,
    /// Bytes sent by the program.
    pub(super) said: u64,
    /// Bytes read by the tunnel.
    pub(super) read: u64,
    /// Whether the tunnel has read the end of the stream.
    pub(super) ended: bool,
    /// Bytes written by the tunnel.
    pub(super) written: u64,
    /// Bytes received by the program.
    pub(super) taken: u64,
    pub(super) shut: bool,
    /// Whether the socket is connected, so that the tunnel may read it.
    pub(super) open: bool,
    pub(super) over: Option<Over>,
    /// Whether an event is scheduled in which the program receives more (`takes`) or sends more
    /// (`says`).
    pub(super) takes: bool,
    pub(super) says: bool,
}

impl Socket {
    pub(super) fn new(talk: Talk) -> Self {
        Self {
            talk,
            said: 0,
            read: 0,
            ended: false,
            written: 0,
            taken: 0,
            shut: false,
            open: false,
            over: None,
            takes: false,
            says: false,
        }
    }

    /// Bytes that the tunnel can read.
    pub(super) fn unread(&self) -> u64 {
        self.said - self.read
    }

    /// Whether the program has sent everything.
    pub(super) fn at_end(&self) -> bool {
        self.said == self.talk.bytes
    }

    pub(super) fn is_readable(&self) -> bool {
        self.open && !self.ended && (self.unread() > 0 || self.at_end())
    }

    /// The number of bytes that the program can send now.
    pub(super) fn says_now(&self) -> u64 {
        let room = SOCKET_BYTES.saturating_sub(self.unread());
        room.min(self.talk.burst).min(self.talk.bytes - self.said)
    }

    /// The number of bytes that the tunnel can write.
    pub(super) fn room(&self) -> u64 {
        SOCKET_BYTES - (self.written - self.taken)
    }
}

/// A channel as seen from outside the tunnel.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    /// The channel's number on the wire; `None` until the channel has a number.
    pub(super) number: Option<u32>,
    /// The connection of each side.
    pub(super) sockets: [Socket; 2],
    /// Earlier channels of the listener, each with the number of bytes that had been sent on it
    /// when this channel was accepted.
    pub(super) before: Vec<(usize, u64)>,
}

impl Channel {
    /// Whether the channel has ended on both sides. A side that was never connected counts as ended
    /// if the other side has ended, for example by an early reset.
    pub(super) fn is_over(&self) -> bool {
        let [one, other] = &self.sockets;
        let (over, far_over) = (one.over.is_some(), other.over.is_some());
        over && (far_over || !other.open) || far_over && !one.open
    }

    /// The number of bytes that the tunnel has read at the side `from` and not yet written at the
    /// other side.
    pub(super) fn inside(&self, from: usize) -> u64 {
        self.sockets[from]
            .read
            .saturating_sub(self.sockets[1 - from].written)
    }
}
