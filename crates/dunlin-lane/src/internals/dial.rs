//! Opening lanes: the trait with which the engine and the tunnel open lanes, and the dialers for
//! TLS and plain lanes.
//!
//! A [`LaneDialer`] turns a [`LaneRequest`] into a lane that is ready to send. It gets its TCP
//! connections from a [`Connector`], so a process that is not allowed to open sockets can get them
//! from another process. The request's [`DialCancel`] interrupts name resolution, connecting and
//! the handshake.

use crate::internals::sync::lock;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::{self, Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use thiserror::Error;

use super::data::{DataSender, PlainConsent, STALL_LIMIT, SendError};
use super::handshake::{self, HandshakeError};
use super::peers::Principal;
use super::policy::ClientTls;
use super::resolve;
use super::splice::Stop;

/// The minimum time for connecting to one of a name's addresses. The addresses share the remaining
/// time equally, so that one unreachable address does not use all of it. A smaller share is raised
/// to this minimum, but not beyond the deadline.
const LEAST_SHARE: Duration = Duration::from_millis(200);

/// Opens TCP connections for lanes.
pub trait Connector: Send + Sync {
    /// Connects to `endpoint`, a host and a port. The caller makes the descriptor `stop`
    /// ([`AsFd`](std::os::fd::AsFd)) readable to cancel the attempt. A connector must not read from
    /// `stop`. If the connector ignores `stop`, a cancellation takes effect only after the
    /// connector has connected.
    ///
    /// # Errors
    /// No connection was established by `deadline` or before `stop` became readable.
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream>;

    /// Connects from the address and port `local` to `remote`. Only lanes over IPsec need this
    /// method.
    ///
    /// # Errors
    /// Same as [`Connector::connect`]. `AddrInUse` if the local port is in use, and `Unsupported`
    /// if this method is not implemented.
    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        let _ = (local, remote, deadline, stop);
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "cannot connect from a given local port, which lanes over IPsec need: implement \
             Connector::connect_from",
        ))
    }
}

/// Opens sockets of this process and connects to the first reachable address of a name. The thread
/// of an unfinished name lookup may outlive the call.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardConnector;

impl Connector for StandardConnector {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        let addresses = resolve::endpoint(endpoint, deadline, stop)?;
        connect_to_any(&addresses, deadline, stop)
    }

    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        socket::connect(Some(local), remote, deadline, stop)
    }
}

/// Connects to the first of `addresses` that answers.
///
/// # Errors
/// The error of the last address; `TimedOut` if the deadline passed, `ConnectionAborted` if `stop`
/// became readable, `NotFound` if `addresses` is empty.
pub fn connect_to_any(
    addresses: &[SocketAddr],
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::NotFound.into();
    for (address, others) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        let share = (left / others).max(LEAST_SHARE).min(left);
        match socket::connect(None, *address, now + share, stop) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A request to open one lane.
#[derive(Clone, Copy)]
pub struct LaneRequest<'a> {
    /// Host and port of the peer's listener.
    pub endpoint: &'a str,
    /// The only peer that may answer, even if `tls` allows other peers. A plain lane does not check
    /// its peer.
    pub peer: &'a Principal,
    /// This side's certificate and the peers that this side accepts.
    pub tls: &'a ClientTls,
    /// The time at which the dial fails if it has not completed.
    pub deadline: Instant,
    /// Cancels the dial from another thread.
    pub cancel: &'a DialCancel,
    /// Opens the TCP connection.
    pub connector: &'a Arc<dyn Connector>,
}

/// Opens lanes of one kind: TLS, plain, or protected by IPsec.
pub trait LaneDialer: Send + Sync {
    /// Opens one lane without sending data on it. Unless the lane is plain, the peer is
    /// authenticated. Call this on the thread that will send on the lane, because the dialer may
    /// bind that thread to one CPU.
    ///
    /// # Errors
    /// [`DialError`], for example after the deadline or a cancellation, or if another peer
    /// answered.
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError>;
}

/// Why a lane could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The TCP connection failed.
    #[error("cannot reach {endpoint}")]
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
    #[error("the peer at {endpoint} is not the peer of the control lane: check this address")]
    OtherPeer {
        /// Host and port.
        endpoint: String,
    },
    /// The lane failed before its first use.
    #[error(transparent)]
    Send(#[from] SendError),
    /// A dialer that protects lanes below TCP failed.
    #[error("cannot open a lane over IPsec to {endpoint}")]
    Sealed {
        /// Host and port.
        endpoint: String,
        /// The fault code if a retry would fail in the same way, otherwise `None`.
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

    /// Cancels the dial: interrupts connecting, and shuts down the connection
    /// ([`DialCancel::covers`]).
    pub fn cancel(&self) {
        let stream = lock(&self.0.stream);
        self.0.stop.request();
        if let Some(stream) = &*stream {
            // This fails only if the connection has already closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether [`DialCancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.stop.is_requested()
    }

    /// A descriptor that becomes readable, and stays readable, when the dial is cancelled.
    #[must_use]
    pub fn wakeup(&self) -> &Wakeup {
        self.0.stop.wakeup()
    }

    /// Shuts down `stream` when the dial is cancelled, or immediately if it is already cancelled.
    /// Replaces the connection of an earlier call. Keeps a duplicate of the stream's descriptor
    /// until [`DialCancel::release`] is called or the last clone of this handle is dropped.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn covers(&self, stream: &TcpStream) -> io::Result<()> {
        let same = stream.try_clone()?;
        let mut covered = lock(&self.0.stream);
        if self.is_cancelled() {
            // This fails only if the connection has already closed.
            let _ = same.shutdown(Shutdown::Both);
        }
        *covered = Some(same);
        Ok(())
    }

    /// Opens the dial's connection, makes cancellation shut it down ([`DialCancel::covers`]), and
    /// enables the kernel's detection of a dead peer.
    pub(super) fn connect(
        &self,
        connector: &dyn Connector,
        endpoint: &str,
        deadline: Instant,
    ) -> Result<TcpStream, DialError> {
        let connected = connector.connect(endpoint, deadline, self.wakeup());
        let stream = connected.map_err(|source| DialError::Connect {
            endpoint: endpoint.to_owned(),
            source,
        })?;
        self.covers(&stream)?;
        set_liveness(&stream, &Liveness::default())?;
        Ok(stream)
    }

    /// Ends the effect of [`DialCancel::covers`]: cancellation no longer shuts down the connection.
    /// Call it when the dial has ended.
    pub fn release(&self) {
        *lock(&self.0.stream) = None;
    }
}

/// Opens TLS lanes.
#[derive(Clone, Copy, Debug, Default)]
pub struct TlsDialer;

impl LaneDialer for TlsDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let cancel = request.cancel;
        let stream = cancel.connect(&**request.connector, request.endpoint, request.deadline)?;
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

/// Opens unencrypted lanes, to which both hosts have consented.
#[derive(Clone, Copy, Debug)]
pub struct PlainDialer(PlainConsent);

impl PlainDialer {
    /// Returns a dialer. `consent` proves that both hosts allow unencrypted lanes.
    #[must_use]
    pub fn new(consent: PlainConsent) -> Self {
        Self(consent)
    }
}

impl LaneDialer for PlainDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let cancel = request.cancel;
        let stream = cancel.connect(&**request.connector, request.endpoint, request.deadline)?;
        Ok(DataSender::plain(stream, self.0, STALL_LIMIT)?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::net::TcpListener;

    use dunlin_linux::poll::{Interest, poll};

    use super::*;

    #[test]
    fn an_invalid_endpoint_is_an_error_that_names_the_format() {
        let (_waker, stop) = dunlin_linux::poll::waker().unwrap();
        for endpoint in ["127.0.0.1", "::1:4444"] {
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

    #[test]
    fn a_cancellation_leaves_a_released_connection_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        let cancel = DialCancel::new().unwrap();
        cancel.covers(&stream).unwrap();
        cancel.release();
        cancel.cancel();
        stream.write_all(b"x").unwrap();
        drop(stream);
        let mut received = Vec::new();
        accepted.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"x");
    }

    #[test]
    fn an_address_that_refuses_leaves_the_others_their_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let refusing = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [&refusing, &listener].map(|one| one.local_addr().unwrap());
        drop(refusing);
        let (waker, stop) = dunlin_linux::poll::waker().unwrap();
        let connect =
            || connect_to_any(&addresses, Instant::now() + Duration::from_secs(60), &stop);
        assert_eq!(connect().unwrap().peer_addr().unwrap(), addresses[1]);
        waker.wake();
        let error = connect().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }
}
