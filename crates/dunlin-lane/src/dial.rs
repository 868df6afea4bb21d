//! Opening a lane: the trait by which engine and tunnel open lanes, and the dialers for TLS and
//! plain lanes.
//!
//! A [`LaneDialer`] turns a [`LaneRequest`] into a lane that is ready to send. It takes its TCP
//! connections from a [`Connector`], so that a process that may not open sockets can supply them.
//! Connecting and the handshake end soon after the request's [`DialCancel`] is used; only the
//! resolver of names cannot be interrupted.

use crate::sync::lock;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::{self, Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{LaneOpen, SessionId, SessionSecret};
use thiserror::Error;

use super::data::{DataSender, PlainConsent, STALL_LIMIT, SendError};
use super::handshake::{self, HandshakeError};
use super::peers::Principal;
use super::policy::ClientTls;
use super::proof::prove;
use super::splice::Stop;

/// Opens TCP connections for lanes.
pub trait Connector: Send + Sync {
    /// Connects to `endpoint`, a host and a port.
    ///
    /// # Errors
    /// No connection by `deadline`, or `stop` became readable before.
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream>;

    /// Connects from a local address and port to `remote`.
    ///
    /// # Errors
    /// As [`Connector::connect`]. `AddrInUse` where the local port is taken.
    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream>;
}

/// Sockets of this process, to the first reachable address of a name.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardConnector;

impl Connector for StandardConnector {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        let mut last = io::Error::new(
            io::ErrorKind::NotFound,
            format!("{endpoint} has no address"),
        );
        // An IPv6 address without brackets would be a host and, by its last group, a port.
        let is_bare = endpoint.matches(':').count() > 1 && !endpoint.starts_with('[');
        let addresses = if is_bare {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "no brackets"))
        } else {
            endpoint.to_socket_addrs()
        };
        let addresses = addresses.map_err(|error| {
            // The standard library's own words do not say what is missing.
            if error.kind() == io::ErrorKind::InvalidInput {
                let wanted =
                    "give a host and a port, as in host-b.example:4444 or [2001:db8::7]:4444";
                return io::Error::new(error.kind(), format!("{error}: {wanted}"));
            }
            error
        })?;
        for address in addresses {
            match socket::connect_unless(address, deadline, stop) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        socket::connect_from_unless(local, remote, deadline, stop)
    }
}

/// One lane that is to be opened.
#[derive(Clone, Copy)]
pub struct LaneRequest<'a> {
    /// Host and port of the peer's listener.
    pub endpoint: &'a str,
    /// The only peer that may answer. `tls` may allow others.
    pub peer: &'a Principal,
    /// The certificate that this side shows, and the peers whose certificates it accepts.
    pub tls: &'a ClientTls,
    /// When it is too late.
    pub deadline: Instant,
    /// Ends it from another thread.
    pub cancel: &'a DialCancel,
    /// Opens the connections.
    pub connector: &'a Arc<dyn Connector>,
}

/// Opens lanes of one kind: TLS, plain, or sealed below TCP.
pub trait LaneDialer: Send + Sync {
    /// Opens one lane to an authenticated peer. Called on the thread that will send on the lane,
    /// which may be bound to one CPU by it. Nothing has been sent on the lane yet.
    ///
    /// # Errors
    /// There is no lane by the deadline, the peer is another one, or the request was cancelled.
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError>;
}

/// Why a lane could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// No TCP connection.
    #[error("{endpoint} cannot be reached")]
    Connect {
        /// Host and port.
        endpoint: String,
        /// Why.
        source: io::Error,
    },
    /// A socket cannot be set up, or this process has no descriptor left.
    #[error("the lane's socket cannot be set up")]
    Socket(#[from] io::Error),
    /// No TLS session.
    #[error("the connection to {endpoint} cannot be secured")]
    Handshake {
        /// Host and port.
        endpoint: String,
        /// Why.
        source: HandshakeError,
    },
    /// An allowed peer answered, but not the one of the control lane.
    #[error("{endpoint} is another peer than the control lane's")]
    OtherPeer {
        /// Host and port.
        endpoint: String,
    },
    /// The lane failed before it was used.
    #[error(transparent)]
    Send(#[from] SendError),
    /// A dialer that seals below TCP failed.
    #[error("{endpoint} cannot be reached by a sealed connection")]
    Sealed {
        /// Host and port.
        endpoint: String,
        /// The code if the next attempt would fail in the same way.
        permanent: Option<FaultCode>,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl DialError {
    /// The code if the next attempt would fail in the same way; `None` if it may succeed.
    #[must_use]
    pub fn permanent(&self) -> Option<FaultCode> {
        match self {
            Self::OtherPeer { .. } => Some(FaultCode::WrongIdentity),
            Self::Sealed { permanent, .. } => *permanent,
            Self::Connect { .. } | Self::Socket(_) | Self::Handshake { .. } | Self::Send(_) => None,
        }
    }
}

/// Ends a dial from another thread. Clones end the same one.
#[derive(Clone, Debug)]
pub struct DialCancel(Arc<State>);

#[derive(Debug)]
struct State {
    stop: Stop,
    stream: Mutex<Option<TcpStream>>,
}

impl DialCancel {
    /// One that has not been used.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(State {
            stop: Stop::new()?,
            stream: Mutex::default(),
        })))
    }

    /// Ends the dial: wakes it where it waits for a connection, and shuts the connection down
    /// where it waits for the peer.
    pub fn cancel(&self) {
        let stream = lock(&self.0.stream);
        self.0.stop.tell();
        if let Some(stream) = &*stream {
            // Fails only where the connection is gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether [`DialCancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.stop.is_told()
    }

    /// Becomes readable when the dial is cancelled, and stays so.
    #[must_use]
    pub fn wakeup(&self) -> &Wakeup {
        self.0.stop.wakeup()
    }

    /// Has `stream` shut down at the cancellation, at once if that was before. It replaces the
    /// connection of an earlier call.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn covers(&self, stream: &TcpStream) -> io::Result<()> {
        let same = stream.try_clone()?;
        let mut covered = lock(&self.0.stream);
        if self.is_cancelled() {
            // Fails only where the connection is gone already.
            let _ = same.shutdown(Shutdown::Both);
        }
        *covered = Some(same);
        Ok(())
    }
}

/// Opens TLS lanes.
#[derive(Clone, Copy, Debug, Default)]
pub struct TlsDialer;

impl LaneDialer for TlsDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let stream = connect(request)?;
        let endpoint = || request.endpoint.to_owned();
        let secured = handshake::client(stream, request.tls, request.deadline);
        let secured = secured.map_err(|source| DialError::Handshake {
            endpoint: endpoint(),
            source,
        })?;
        if !secured.peer.is(request.peer) {
            return Err(DialError::OtherPeer {
                endpoint: endpoint(),
            });
        }
        Ok(DataSender::tls(secured, STALL_LIMIT)?)
    }
}

/// Opens lanes in the clear, to which both sides have consented.
#[derive(Clone, Copy, Debug)]
pub struct PlainDialer(PlainConsent);

impl PlainDialer {
    /// A dialer under this consent.
    #[must_use]
    pub fn new(consent: PlainConsent) -> Self {
        Self(consent)
    }
}

impl LaneDialer for PlainDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let stream = connect(request)?;
        Ok(DataSender::plain(stream, self.0, STALL_LIMIT)?)
    }
}

/// A connection whose peer's disappearance the kernel will notice.
fn connect(request: &LaneRequest<'_>) -> Result<TcpStream, DialError> {
    let connected =
        request
            .connector
            .connect(request.endpoint, request.deadline, request.cancel.wakeup());
    let stream = connected.map_err(|source| DialError::Connect {
        endpoint: request.endpoint.to_owned(),
        source,
    })?;
    request.cancel.covers(&stream)?;
    set_liveness(&stream, &Liveness::default())?;
    Ok(stream)
}

/// The session that a lane belongs to, for its first message.
#[derive(Debug)]
pub struct LaneTicket<'a> {
    /// The wire version that was selected.
    pub version: u16,
    /// The session.
    pub session: SessionId,
    /// Its secret, with which the lane proves that it belongs to the session.
    pub secret: &'a SessionSecret,
    /// The lane's number.
    pub lane: u16,
}

impl LaneTicket<'_> {
    /// Sends the lane's first message.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn present(&self, sender: &mut DataSender) -> Result<(), SendError> {
        let open = LaneOpen {
            version: self.version,
            session: self.session,
            lane: self.lane,
            mac: prove(self.secret, &self.session, self.lane),
        };
        let mut bytes = Vec::new();
        // It has no part whose length varies.
        open.encode(&mut bytes)
            .map_err(|error| SendError::Io(io::Error::other(error)))?;
        sender.send(&bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;
    use std::time::Duration;

    use dunlin_linux::poll::{Interest, poll};

    use super::*;

    #[test]
    fn what_is_no_address_is_told_with_what_is_wanted() {
        let (_waker, stop) = dunlin_linux::poll::waker().unwrap();
        for endpoint in [
            "127.0.0.1",
            "host-b.example:",
            "host-b.example:65536",
            "::1:4444",
            "2001:db8::2",
            "[::1]",
        ] {
            let connected = StandardConnector.connect(endpoint, Instant::now(), &stop);
            let error = connected.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains("a host and a port"), "{error}");
        }
    }

    fn is_readable(wakeup: &Wakeup) -> bool {
        let interest = Interest::read(&wakeup);
        poll(&[interest], Some(Duration::ZERO)).unwrap()[0]
    }

    #[test]
    fn a_cancellation_shuts_the_connection_that_is_covered_then_or_later() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let cancel = DialCancel::new().unwrap();
        assert!(!cancel.is_cancelled() && !is_readable(cancel.wakeup()));
        let (replaced, covered, later) = (connect(), connect(), connect());
        cancel.covers(&replaced).unwrap();
        cancel.covers(&covered).unwrap();
        cancel.clone().cancel();
        assert!(cancel.is_cancelled() && is_readable(cancel.wakeup()));
        cancel.covers(&later).unwrap();
        let is_shut = |stream: &TcpStream| {
            stream.set_nonblocking(true).unwrap();
            matches!(stream.peek(&mut [0]), Ok(0))
        };
        assert!(is_shut(&covered) && is_shut(&later) && !is_shut(&replaced));
    }
}
