//! What accepting brings.

use std::io;
use std::net::{SocketAddr, TcpStream};

use dunlin_proto::negotiate::Opening;

use super::reading::RejectReason;
use crate::control::ControlStream;
use crate::handshake::Secured;
use crate::handshake::relay::Relayed;

/// What came out of a connection.
#[expect(
    clippy::large_enum_variant,
    reason = "there are few, and each is matched where it arrives"
)]
#[derive(Debug)]
pub enum Arrival {
    /// A control lane, whose peer has sent its offer.
    Control {
        /// The lane.
        stream: ControlStream,
        /// The first words: an offer, unless the peer breaks the protocol.
        opening: Opening,
    },
    /// A data lane.
    Lane {
        /// The lane.
        socket: LaneSocket,
        /// The first words: a lane open, unless the peer breaks the protocol.
        opening: Opening,
    },
    /// A connection that came to nothing.
    Rejected {
        /// Where it came from.
        from: SocketAddr,
        /// Why.
        reason: RejectReason,
    },
    /// Somebody waits to be accepted, and there is no descriptor or memory left to
    /// do it with, and nobody else whose place it could have. Told once, until
    /// a connection has been accepted again.
    Starved(io::Error),
}

/// An accepted data lane, blocking, with nothing read behind its opening.
#[derive(Debug)]
pub enum LaneSocket {
    /// Its peer is authenticated.
    Tls(Box<Secured>),
    /// Its peer is proved by nothing but what it says in its opening.
    Plain(TcpStream),
}

impl LaneSocket {
    /// The connection, for its options.
    pub fn stream(&self) -> &TcpStream {
        match self {
            Self::Tls(secured) => &secured.stream,
            Self::Plain(stream) => stream,
        }
    }
}

/// What came out of a connection that was to be relayed.
pub enum RelayArrival {
    /// Its peer is authenticated.
    Secured(Box<Relayed>),
    /// As [`Arrival::Rejected`].
    Rejected {
        /// Where it came from.
        from: SocketAddr,
        /// Why.
        reason: RejectReason,
    },
    /// As [`Arrival::Starved`].
    Starved(io::Error),
}
