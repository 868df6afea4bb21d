//! Opening lanes: the trait through which engine and tunnel open lanes, and the dialers for TLS and
//! plain lanes.
//!
//! A [`LaneDialer`] turns a [`LaneRequest`] into a lane that is ready to send. It gets its TCP
//! connections from a [`Connector`], so a process that may not open sockets can have another
//! process supply them. The request's [`DialCancel`] interrupts connecting and the handshake; it
//! cannot interrupt name resolution.

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
    /// No connection was established by `deadline` or before `stop` became readable.
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream>;

    /// Connects from the address and port `local` to `remote`.
    ///
    /// # Errors
    /// As [`Connector::connect`]. `AddrInUse` if the local port is in use.
    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream>;
}

/// Opens sockets of this process and connects to the first reachable address of a name.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardConnector;

impl Connector for StandardConnector {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        let mut last = io::Error::new(
            io::ErrorKind::NotFound,
            format!("{endpoint} has no address"),
        );
        // Without brackets, the last group of an IPv6 address would be parsed as the port.
        let is_bare = endpoint.matches(':').count() > 1 && !endpoint.starts_with('[');
        let addresses = if is_bare {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "no brackets"))
        } else {
            endpoint.to_socket_addrs()
        };
        let addresses = addresses.map_err(|error| {
            // The standard library's message does not say which part is missing.
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

/// A request to open one lane.
#[derive(Clone, Copy)]
pub struct LaneRequest<'a> {
    /// Host and port of the peer's listener.
    pub endpoint: &'a str,
    /// The only peer that may answer. `tls` may allow others.
    pub peer: &'a Principal,
    /// This side's certificate and the peers that it accepts.
    pub tls: &'a ClientTls,
    /// The dial fails at this time.
    pub deadline: Instant,
    /// Cancels the dial from another thread.
    pub cancel: &'a DialCancel,
    /// Opens the TCP connection.
    pub connector: &'a Arc<dyn Connector>,
}

/// Opens lanes of one kind: TLS, plain, or sealed below TCP.
pub trait LaneDialer: Send + Sync {
    /// Opens one lane to an authenticated peer, without sending on it. Call this on the thread that
    /// will send on the lane: the dialer may bind that thread to one CPU.
    ///
    /// # Errors
    /// The deadline passed, another peer answered, or the request was cancelled.
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError>;
}

/// Why a lane could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The TCP connection failed.
    #[error("{endpoint} cannot be reached")]
    Connect {
        /// Host and port.
        endpoint: String,
        /// The cause.
        source: io::Error,
    },
    /// A socket cannot be set up, or the process has no free file descriptor.
    #[error("cannot set up the lane's socket")]
    Socket(#[from] io::Error),
    /// The TLS handshake failed.
    #[error("TLS handshake with {endpoint} failed")]
    Handshake {
        /// Host and port.
        endpoint: String,
        /// The cause.
        source: HandshakeError,
    },
    /// Another allowed peer answered, not the peer of the control lane.
    #[error("{endpoint} is not the peer of the control lane")]
    OtherPeer {
        /// Host and port.
        endpoint: String,
    },
    /// The lane failed before its first use.
    #[error(transparent)]
    Send(#[from] SendError),
    /// A dialer that seals below TCP failed.
    #[error("cannot open a lane protected below TCP to {endpoint}")]
    Sealed {
        /// Host and port.
        endpoint: String,
        /// The fault code if a retry would fail in the same way.
        permanent: Option<FaultCode>,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl DialError {
    /// Returns the fault code if a retry would fail in the same way; `None` if a retry may succeed.
    #[must_use]
    pub fn permanent(&self) -> Option<FaultCode> {
        match self {
            Self::OtherPeer { .. } => Some(FaultCode::WrongIdentity),
            Self::Sealed { permanent, .. } => *permanent,
            Self::Connect { .. } | Self::Socket(_) | Self::Handshake { .. } | Self::Send(_) => None,
        }
    }
}

/// Cancels a dial from another thread. All clones cancel the same dial.
#[derive(Clone, Debug)]
pub struct DialCancel(Arc<State>);

#[derive(Debug)]
struct State {
    stop: Stop,
    stream: Mutex<Option<TcpStream>>,
}

impl DialCancel {
    /// Returns a handle that is not cancelled.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(State {
            stop: Stop::new()?,
            stream: Mutex::default(),
        })))
    }

    /// Cancels the dial: interrupts connecting, and shuts down the connection during the handshake.
    pub fn cancel(&self) {
        let stream = lock(&self.0.stream);
        self.0.stop.request();
        if let Some(stream) = &*stream {
            // Fails only if the connection has already closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether [`DialCancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.stop.is_requested()
    }

    /// Becomes readable, and stays readable, when the dial is cancelled.
    #[must_use]
    pub fn wakeup(&self) -> &Wakeup {
        self.0.stop.wakeup()
    }

    /// Shuts down `stream` on cancellation, immediately if that has already happened. Replaces the
    /// connection of an earlier call.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn covers(&self, stream: &TcpStream) -> io::Result<()> {
        let same = stream.try_clone()?;
        let mut covered = lock(&self.0.stream);
        if self.is_cancelled() {
            // Fails only if the connection has already closed.
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

/// Opens unencrypted lanes. Both sides have consented to them.
#[derive(Clone, Copy, Debug)]
pub struct PlainDialer(PlainConsent);

impl PlainDialer {
    /// Returns a dialer that acts on `consent`.
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

/// Connects, and enables the kernel's detection of a dead peer.
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

/// What a lane's first message needs: the session that the lane belongs to.
#[derive(Debug)]
pub struct LaneTicket<'a> {
    /// The selected wire version.
    pub version: u16,
    /// The session.
    pub session: SessionId,
    /// The session's secret, which keys the lane's proof.
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
        // Cannot fail: every field has a fixed length.
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
    fn an_invalid_endpoint_is_an_error_that_names_the_format() {
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
    fn a_cancellation_shuts_down_connections_covered_before_or_after_it() {
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
