//! The accepting side: one port for our names and for those of an old server.
//!
//! ```text
//!            ┌─ own name ──▶ handshake ──▶ kernel TLS ──▶ unix socket: a line, and the socket
//!  TCP ─▶ hello
//!            └─ any other, or none ─────▶ the old server, not a byte changed
//! ```
//!
//! - `acceptor`: the open port; `shared` is the state that all of its threads share.
//! - `accept_loop`: the accepting thread; it owns each client until its name is known.
//! - `client`: one of those clients. Its hello is peeked in the socket; the socket is reported again
//!   only when more bytes have arrived.
//! - `deliver`: passes sockets of our names to other programs.
//! - `forward`: splices the bytes of all other clients; `forwarded` is the state of one.
//! - `proxy`: tells the old server a client's address (PROXY protocol).
//!
//! No client has a thread before its hello is complete. The accepting thread also does the handshakes.

mod accept_loop;
mod acceptor;
mod alert;
mod client;
mod deliver;
mod forward;
mod forwarded;
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
use thiserror::Error;

pub use self::acceptor::Acceptor;
pub use self::proxy::ProxyHeader;
use super::connect::Facts;
use dunlin_lane::accept::RejectReason;
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::kernel::{Chosen, Inspector, Refused};

/// A name that this side answers for.
#[derive(Clone, Debug)]
pub struct Own {
    /// The SNI name, compared without case.
    pub name: String,
    /// The unix socket of the program that receives its connections.
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

/// The server for all other names.
#[derive(Clone, Debug)]
pub struct Other {
    /// Its address.
    pub to: Target,
    /// Whether it gets PROXY headers, and of which version.
    pub header: Option<ProxyHeader>,
}

/// Limits of number and time.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Clients before the end of their handshake.
    pub undecided: usize,
    /// Timeout from accepting a client to the end of its handshake.
    pub opening: Duration,
    /// Clients of the old server, with two threads each.
    pub forwarded: usize,
    /// Timeout for connecting to the old server.
    pub connect: Duration,
    /// Concurrent hand-overs of one name, with a thread each.
    pub handovers: usize,
}

impl Default for Limits {
    /// For a process with 1,024 descriptors: a client before its end of handshake has one, a forwarded
    /// client eight.
    fn default() -> Self {
        Self {
            undecided: 128,
            opening: Duration::from_secs(10),
            forwarded: 96,
            connect: Duration::from_secs(5),
            handovers: 16,
        }
    }
}

/// Builds the line that accompanies a socket, without its line break.
pub type Description = Box<dyn Fn(&Arrived) -> String + Send + Sync>;

/// Options of an acceptor.
pub struct Options {
    /// Our names. Their connections are handed over.
    pub names: Vec<Own>,
    /// The server for all other names. Without one their clients are refused.
    pub other: Option<Other>,
    /// Whether connections that do not begin with TLS are forwarded to that server too.
    pub forwards_plain: bool,
    /// Describes a socket to its receiver.
    pub describe: Description,
    /// Queries the kernel about a connection after it has the keys.
    pub inspector: Box<dyn Inspector>,
    /// Limits.
    pub limits: Limits,
}

/// A connection to one of our names.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The name.
    pub name: String,
    /// What the handshake established.
    pub facts: Facts,
    /// What the kernel chose for it.
    pub chosen: Chosen,
}

/// Why the acceptor did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The kernel has no TLS, and no old server is configured.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// No descriptors or threads are left.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a client was refused or ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Its first bytes are not a TLS ClientHello.
    #[error(transparent)]
    Hello(#[from] NoHello),
    /// It disconnected before the end of its hello or handshake.
    #[error("it closed the connection before its hello was whole")]
    Closed,
    /// It exceeded the time limit.
    #[error("it was not done with its handshake in time")]
    Deadline,
    /// Evicted for newer clients.
    #[error("{0} other connections wanted its place before it had shown who it is")]
    Evicted(usize),
    /// Evicted because descriptors or memory ran out.
    #[error(
        "its place was given to the next, since this process or host has no descriptor or memory \
         left: raise the limit of open files (`ulimit -n`), or end what holds them; {0}"
    )]
    Shortage(#[source] io::Error),
    /// Its name is unknown here.
    #[error("nobody has the name that it wants: give it with --sni, or a server for others")]
    Stranger,
    /// The handshake failed.
    #[error(transparent)]
    Tls(RejectReason),
    /// It supports no allowed version, cipher or curve.
    #[error(
        "it has no TLS parameters in common with this host ({0}): allow its version, or one of its \
         ciphers and curves"
    )]
    NothingInCommon(String),
    /// The kernel refused the connection's keys.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// The receiving program did not accept its socket.
    #[error("nobody takes its socket at {}: {source}; start the program that listens there", .to.display())]
    NoTaker {
        /// The receiver's path.
        to: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Too many sockets of this name wait for their receiver.
    #[error(
        "{0} sockets of that name wait to be taken already: see why whoever takes them does not"
    )]
    Busy(usize),
    /// The old server is unreachable.
    #[error("the server behind cannot be reached: {0}; see that it listens")]
    Unreachable(#[source] io::Error),
    /// Too many clients are forwarded.
    #[error("{0} clients are forwarded already: raise the limit")]
    Full(usize),
    /// It was forwarded, and one side failed.
    #[error("the connection, or that to the server behind, has failed: {0}")]
    Broken(#[source] io::Error),
    /// It was forwarded, and was ended with this process or evicted after a long silence.
    #[error("it was cut off while it was forwarded")]
    Cut,
    /// No descriptors or threads are left, or the connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<RejectReason> for Refusal {
    fn from(reason: RejectReason) -> Self {
        match reason {
            RejectReason::Handshake(HandshakeError::Incompatible(reason)) => {
                Self::NothingInCommon(reason)
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
    /// A socket was handed over.
    HandedOver {
        /// The connection.
        arrived: Box<Arrived>,
        /// The receiver's path.
        to: PathBuf,
    },
    /// A client is forwarded to the old server.
    Forwarded {
        /// Its address.
        from: SocketAddr,
        /// The requested name.
        name: Option<String>,
    },
    /// A client was refused or ended.
    Refused {
        /// Where it comes from.
        from: SocketAddr,
        /// The requested name, if known.
        name: Option<String>,
        /// The reason.
        refusal: Refusal,
    },
    /// The kernel has no TLS when the port opens: clients of hand-off names are refused, those of
    /// other names are forwarded.
    NoKernelTls(Refused),
    /// Descriptors or memory ran out, and there is no client to evict. Reported once, until accepting
    /// succeeds again.
    Starved(io::Error),
    /// Accepting has ended.
    Failed(io::Error),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = |from: &SocketAddr, name: &Option<String>| match name {
            Some(name) => format!("client {from} for {name}"),
            None => format!("client {from}"),
        };
        match self {
            Self::HandedOver { arrived, to } => {
                let Arrived { name, facts, .. } = &**arrived;
                write!(
                    f,
                    "client {} for {name} was handed over to {}: {} {}, {}",
                    facts.at,
                    to.display(),
                    facts.version,
                    facts.cipher,
                    arrived.chosen
                )
            }
            Self::Forwarded { from, name } => write!(f, "{} is forwarded", who(from, name)),
            Self::Refused {
                from,
                name,
                refusal,
            } => write!(f, "{} is refused: {refusal}", who(from, name)),
            Self::NoKernelTls(refused) => write!(
                f,
                "warning: clients of hand-off names are refused, all others are forwarded: {refused}"
            ),
            Self::Starved(error) => write!(
                f,
                "nobody can be accepted for want of descriptors or memory: {error}; raise the limit of open files (`ulimit -n`)"
            ),
            Self::Failed(error) => write!(f, "nobody is accepted any more: {error}"),
        }
    }
}
