//! The accepting side: one port for the hand-off names and for a *backend*, the server for all
//! other names.
//!
//! ```text
//!            ┌─ hand-off name ──▶ handshake ──▶ kernel TLS ──▶ unix socket: a line, and the socket
//!  TCP ─▶ hello
//!            └─ other name, or none ─────────▶ backend: the bytes unchanged
//! ```
//!
//! - `acceptor`: the listener's handle; `shared` is the state that all of its threads share.
//! - `accept_loop`: the accepting thread. It owns each client until the client is forwarded or its
//!   handshake is complete.
//! - `client`: a client that the accepting thread owns. Its hello stays in the socket (MSG_PEEK);
//!   epoll reports the socket again only when enough bytes for the next step have arrived.
//! - `deliver`: passes the sockets of hand-off names to their receivers; `handovers` limits the
//!   sockets that a receiver has not read.
//! - `forward`: splices the bytes of all other clients; `forwarded` is the state of one forwarded
//!   client.
//! - `proxy`: encodes the header with the client's address for the backend (PROXY protocol).
//!
//! A client gets threads only after its hello is complete, or after its first bytes have shown that
//! it does not speak TLS.

mod accept_loop;
mod acceptor;
mod alert;
mod client;
mod deliver;
mod forward;
mod forwarded;
mod handovers;
mod proxy;
mod shared;
#[cfg(test)]
mod tests;
mod token;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use dunlin_proto::client_hello::NoHello;
use dunlin_proto::fault::FaultCode;
use thiserror::Error;

pub use self::acceptor::Acceptor;
pub use self::proxy::ProxyHeader;
use super::connect::ConnectionInfo;
use dunlin_lane::accept::RejectReason;
use dunlin_lane::fault::of_io;
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::kernel::{Chosen, Inspector, Refused};

/// A server name. Connections for it are handed over.
#[derive(Clone, Debug)]
pub struct HandoffName {
    /// The name in the client's SNI, compared without case.
    pub name: String,
    /// The unix socket of the receiver, the program that uses the connections.
    pub to: PathBuf,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `HOST:PORT`.
    Tcp(String),
    /// A path.
    Unix(PathBuf),
}

/// The server for clients that request no hand-off name.
#[derive(Clone, Debug)]
pub struct Backend {
    /// The server's address.
    pub to: Target,
    /// The version of the PROXY headers that the backend receives; `None` to send no headers.
    pub header: Option<ProxyHeader>,
}

/// Limits on clients and times.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of clients with an incomplete handshake.
    pub pending: usize,
    /// Timeout from accepting a client to the end of its handshake.
    pub handshake_timeout: Duration,
    /// Maximum number of forwarded clients; each takes two threads.
    pub forwarded: usize,
    /// Timeout for connecting to the backend.
    pub connect_timeout: Duration,
    /// Maximum number of unread hand-overs for one name. A hand-over counts from the end of the
    /// handshake until the receiver has read the line or has closed its connection. Each hand-over
    /// takes a thread and two descriptors until the line is sent, and after that one descriptor.
    pub handovers: usize,
}

/// The default of [`Limits::handovers`], the number of unread sockets for one name. The kernel
/// limits the unread sockets of one user, for all names together, to the process's limit of open
/// files, usually 1,024 (unix(7)). With 32 for each name, about 30 names fit even if no receiver
/// reads. QEMU with 16 multifd channels can stop reading for a while and still gets all 16 sockets.
/// The drawback: if more than 32 clients arrive while a receiver does not read, the others are
/// refused. A higher number would leave room for fewer names.
const HANDOVERS: usize = 32;

impl Default for Limits {
    /// Limits for a process with 1,024 descriptors. A pending client takes one descriptor, a
    /// forwarded client eight, and an unread hand-over one. At most 896 descriptors are in use for
    /// pending and forwarded clients. The others suffice for the unread hand-overs of three names.
    fn default() -> Self {
        Self {
            pending: 128,
            handshake_timeout: Duration::from_secs(10),
            forwarded: 96,
            connect_timeout: Duration::from_secs(5),
            handovers: HANDOVERS,
        }
    }
}

/// Returns the line of text that is sent with a socket, without its line break.
pub type Description = Box<dyn Fn(&Arrived) -> String + Send + Sync>;

/// Options of an acceptor.
pub struct Options {
    /// The server names of the connections to hand over. Other connections go to the backend.
    pub names: Vec<HandoffName>,
    /// The server for clients that request no hand-off name; `None` to refuse these clients.
    pub backend: Option<Backend>,
    /// Whether clients that do not speak TLS are forwarded to the backend instead of refused.
    pub forwards_plain: bool,
    /// Describes a socket to its receiver.
    pub describe: Description,
    /// Queries the kernel about a connection after its keys are installed.
    pub inspector: Box<dyn Inspector>,
    /// Limits on clients and times.
    pub limits: Limits,
}

/// A connection to a hand-off name, after its handshake.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The hand-off name, spelled as in [`Options::names`].
    pub name: String,
    /// The negotiated parameters and the client.
    pub info: ConnectionInfo,
    /// The cipher driver, network device and counters that the kernel reports for the connection.
    pub chosen: Chosen,
}

/// Why a client was refused, or why its connection was closed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The client's first bytes are not a TLS ClientHello.
    #[error(transparent)]
    Hello(#[from] NoHello),
    /// The client disconnected before its hello was complete.
    #[error("client disconnected before its ClientHello was complete")]
    Disconnected,
    /// The client did not complete its handshake in time.
    #[error("TLS handshake timed out: the client or the network was too slow")]
    Deadline,
    /// The client was evicted for a newer client, because the number of pending clients had reached
    /// [`Limits::pending`].
    #[error(
        "evicted for a newer client: limit of pending handshakes reached ({0}); look for clients that \
         connect without completing a handshake"
    )]
    Evicted(usize),
    /// The client was evicted because descriptors or memory ran out.
    #[error(
        "evicted because this process or host is out of descriptors or memory ({0}): raise the limit \
         of open files (`ulimit -n`), or stop other programs"
    )]
    Shortage(#[source] io::Error),
    /// The client requested no hand-off name, and there is no backend.
    #[error(
        "the client's SNI is missing or is not a hand-off name, and no backend is configured for other clients"
    )]
    UnknownName,
    /// The handshake failed.
    #[error(transparent)]
    Tls(RejectReason),
    /// The client supports no allowed version, cipher or curve.
    #[error(
        "no TLS parameters in common ({0}): allow the client's version, and one of its ciphers and \
         curves"
    )]
    Incompatible(String),
    /// The kernel refused the connection's keys.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// The receiver did not accept the socket.
    #[error("cannot pass the socket to {}: {source}; check that the receiver listens there", .to.display())]
    NoReceiver {
        /// The receiver's path.
        to: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// There are already [`Limits::handovers`] sockets of this name that the receiver has not read.
    #[error("limit of unread sockets reached ({0}): check why the receiver does not read them")]
    ReceiverBusy(usize),
    /// The backend cannot be reached.
    #[error("cannot reach the backend: {0}; check that it listens")]
    BackendUnreachable(#[source] io::Error),
    /// The number of forwarded clients has reached [`Limits::forwarded`], and none of them can be
    /// evicted.
    #[error("limit of forwarded clients reached ({0}): raise the limit")]
    TooManyForwarded(usize),
    /// The client was forwarded, and its connection or the connection to the backend
    /// failed.
    #[error("the connection to the client or to the backend failed: {0}")]
    Broken(#[source] io::Error),
    /// The acceptor ended, or it evicted an idle forwarded client.
    #[error("closed: this process is ending, or the forwarded client was idle and was evicted")]
    Aborted,
    /// A system call failed, for instance because no descriptors or threads are left.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl Refusal {
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Hello(_) => FaultCode::Malformed,
            Self::Disconnected | Self::Deadline => FaultCode::ControlLost,
            Self::Evicted(_) | Self::TooManyForwarded(_) => FaultCode::LaneLimit,
            Self::UnknownName => FaultCode::UnknownRoute,
            Self::Tls(reason) => reason.fault(),
            Self::Incompatible(_) => FaultCode::SecurityNotAgreed,
            Self::Kernel(refused) => refused.fault(),
            Self::NoReceiver { .. } | Self::ReceiverBusy(_) | Self::BackendUnreachable(_) => {
                FaultCode::TargetUnreachable
            }
            Self::Broken(_) => FaultCode::ChannelBroken,
            Self::Aborted => FaultCode::Ended,
            Self::Shortage(error) | Self::Io(error) => of_io(error),
        }
    }
}

impl From<RejectReason> for Refusal {
    fn from(reason: RejectReason) -> Self {
        match reason {
            RejectReason::Handshake(HandshakeError::Incompatible(reason)) => {
                Self::Incompatible(reason)
            }
            reason => Self::Tls(reason),
        }
    }
}

impl From<HandshakeError> for Refusal {
    fn from(error: HandshakeError) -> Self {
        RejectReason::from(error).into()
    }
}

/// An event for the log.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A socket was passed to its receiver.
    HandedOver {
        /// The connection.
        arrived: Box<Arrived>,
        /// The receiver's path.
        to: PathBuf,
    },
    /// A client is forwarded to the backend.
    Forwarded {
        /// The client's address.
        from: SocketAddr,
        /// The requested name.
        name: Option<String>,
    },
    /// A client was refused, or its connection ended with an error.
    Refused {
        /// The client's address.
        from: SocketAddr,
        /// The requested name, if known.
        name: Option<String>,
        /// The reason.
        refusal: Refusal,
    },
    /// The kernel has no TLS when the acceptor starts. Clients of hand-off names are therefore
    /// refused, and all other clients are forwarded.
    NoKernelTls(Refused),
    /// Descriptors or memory ran out, and there is no client to evict. The acceptor does not report
    /// this again until it has accepted a client.
    Starved(io::Error),
    /// The listener failed. Clients are no longer accepted.
    Failed(io::Error),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let client = |from: &SocketAddr, name: &Option<String>| match name {
            Some(name) => format!("client {from} for {name}"),
            None => format!("client {from}"),
        };
        match self {
            Self::HandedOver { arrived, to } => {
                let Arrived { name, info, .. } = &**arrived;
                write!(
                    f,
                    "client {} for {name} was handed over to {}: {} {}, {}",
                    info.at,
                    to.display(),
                    info.version,
                    info.cipher,
                    arrived.chosen
                )
            }
            Self::Forwarded { from, name } => write!(f, "{} is forwarded", client(from, name)),
            Self::Refused {
                from,
                name,
                refusal,
            } => write!(f, "{} is refused: {refusal}", client(from, name)),
            Self::NoKernelTls(refused) => write!(
                f,
                "warning: clients of hand-off names are refused, all others are forwarded: {refused}"
            ),
            Self::Starved(error) => write!(
                f,
                "cannot accept clients, out of descriptors or memory: {error}; raise the limit of open files (`ulimit -n`)"
            ),
            Self::Failed(error) => write!(
                f,
                "the listener failed, clients are no longer accepted: {error}"
            ),
        }
    }
}
