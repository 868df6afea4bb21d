//! The results of accepting.

use std::io;
use std::net::{SocketAddr, TcpStream};

use dunlin_proto::negotiate::Opening;

use super::reading::RejectReason;
use crate::internals::control::ControlStream;
use crate::internals::handshake::Secured;
use crate::internals::handshake::relay::Relayed;

/// A result of accepting.
#[expect(
    clippy::large_enum_variant,
    reason = "few exist at a time, and each is matched immediately"
)]
#[derive(Debug)]
pub enum Arrival {
    /// A control lane. Its peer has sent the opening message.
    Control {
        /// The lane.
        stream: ControlStream,
        /// The opening message: an offer, unless the peer violates the protocol.
        opening: Opening,
    },
    /// A data lane.
    Lane {
        /// The lane.
        socket: LaneSocket,
        /// The opening message: a *lane open*, unless the peer violates the protocol.
        opening: Opening,
    },
    /// A connection that was rejected or failed.
    Rejected {
        /// The peer's address.
        from: SocketAddr,
        /// The reason.
        reason: RejectReason,
    },
    /// Descriptors or memory ran out while no connection was pending, so none could be evicted. Not
    /// reported again until accepting has worked.
    Starved(io::Error),
}

/// An accepted data lane. Its socket is in blocking mode, and nothing after the last record of the
/// opening message has been read from it.
#[derive(Debug)]
pub enum LaneSocket {
    /// The peer is authenticated.
    Tls(Box<Secured>),
    /// Only the proof in the opening message authenticates the peer.
    Plain(TcpStream),
}

impl LaneSocket {
    /// Returns the connection, to read or set its socket options.
    #[cfg(feature = "unstable-internals")]
    pub fn stream(&self) -> &TcpStream {
        match self {
            Self::Tls(secured) => &secured.stream,
            Self::Plain(stream) => stream,
        }
    }
}

/// A result of accepting for a relay.
pub enum RelayArrival {
    /// The peer is authenticated.
    Secured(Box<Relayed>),
    /// Like [`Arrival::Rejected`].
    Rejected {
        /// The peer's address.
        from: SocketAddr,
        /// The reason.
        reason: RejectReason,
    },
    /// Like [`Arrival::Starved`].
    Starved(io::Error),
}
