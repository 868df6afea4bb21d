//! The accepting side: one port for our names and for those of an old server.
//!
//! ```text
//!            ┌─ own name ──▶ handshake ──▶ kernel TLS ──▶ unix socket: a line, and the socket
//!  TCP ─▶ hello
//!            └─ any other, or none ─────▶ the old server, not a byte changed
//! ```
//!
//! - `accept_loop`: the accepting thread; it owns each client until its name is known.
//! - `client`: one of those clients. Its hello is peeked in the socket; the socket is reported again
//!   only when more bytes have arrived.
//! - `deliver`: passes sockets of our names to other programs.
//! - `forward`: splices the bytes of all other clients.
//! - `proxy`: tells the old server a client's address (PROXY protocol).
//!
//! No client has a thread before its hello is complete. The accepting thread also does the handshakes.

mod accept_loop;
mod alert;
mod client;
mod deliver;
mod forward;
mod proxy;
#[cfg(test)]
mod tests;
mod token;

use dunlin_lane::sync::{lock, wait};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Epoll;
use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_proto::client_hello::NoHello;
use thiserror::Error;

pub use self::proxy::ProxyHeader;
use super::connect::Facts;
use accept_loop::AcceptLoop;
use dunlin_lane::accept::RejectReason;
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::kernel::{Chosen, Inspector, Refused, abilities};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::provider::CipherSuite;
use forward::Forwarded;

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

type Observer = Box<dyn Fn(Event) + Send + Sync>;

/// State shared by all threads.
struct Shared {
    options: Options,
    tls: ServerTls,
    epoll: Epoll,
    observer: Observer,
    state: Mutex<State>,
    /// Notified when a hand-over or a forwarded client ends.
    changed: Condvar,
    waker: Waker,
    wakeup: Wakeup,
}

#[derive(Default)]
struct State {
    /// By number, so by age.
    forwarded: BTreeMap<u64, Arc<Forwarded>>,
    /// By the index of their name.
    handovers: BTreeMap<usize, usize>,
    /// No new clients are accepted.
    is_draining: bool,
    /// Clients without a known name are dropped at once.
    is_over: bool,
    /// The accepting thread has ended.
    is_closed: bool,
}

/// An open port. Dropping it ends it and all forwarded clients at once. It waits for clients that are
/// being handed over; their receivers have five seconds to accept the sockets. Sockets that were
/// handed over stay open.
pub struct Acceptor {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Accepts clients on `listener`, with the settings of
    /// [`Identity::handoff_server`](dunlin_lane::identity::Identity::handoff_server).
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        listener: TcpListener,
        tls: ServerTls,
        options: Options,
        observer: impl Fn(Event) + Send + Sync + 'static,
    ) -> Result<Self, StartError> {
        // Every kernel with TLS supports this cipher.
        match abilities(CipherSuite::Aes256Gcm) {
            Err(refused) if options.other.is_none() => return Err(refused.into()),
            Err(refused) => observer(Event::NoKernelTls(refused)),
            Ok(_) => {}
        }
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (waker, wakeup) = waker()?;
        let shared = Arc::new(Shared {
            options,
            tls,
            epoll: Epoll::new()?,
            observer: Box::new(observer),
            state: Mutex::default(),
            changed: Condvar::new(),
            waker,
            wakeup,
        });
        let mut accept_loop = AcceptLoop::new(&shared, listener)?;
        let own = Arc::clone(&shared);
        let accepting = thread::Builder::new()
            .name("dunlin-accept".to_owned())
            .spawn(move || {
                if let Err(error) = accept_loop.run() {
                    own.tell(Event::Failed(error));
                }
                drop(accept_loop);
                lock(&own.state).is_closed = true;
                own.changed.notify_all();
            })?;
        Ok(Self {
            address,
            shared,
            accepting: Some(accepting),
        })
    }

    /// The listener's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, and waits for at most `limit` until all present clients are handed over or done
    /// with the old server. Returns the number of clients that were cut.
    pub fn drain(self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        let mut state = lock(&self.shared.state);
        state.is_draining = true;
        self.shared.waker.wake();
        while !(state.is_closed && state.is_idle()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = wait(&self.shared.changed, state, Some(left));
        }
        let cut = state.forwarded.len() + state.handovers.values().sum::<usize>();
        drop(state);
        cut
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.is_over = true;
        let all: Vec<_> = state.forwarded.values().cloned().collect();
        drop(state);
        self.shared.waker.wake();
        if let Some(accepting) = self.accepting.take() {
            // The panic hook has printed a panic.
            let _ = accepting.join();
        }
        for one in all {
            one.cut();
        }
        let mut state = lock(&self.shared.state);
        // Each was stopped, or has its own deadline.
        while !state.is_idle() {
            state = wait(&self.shared.changed, state, None);
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.forwarded.is_empty() && self.handovers.is_empty()
    }
}

impl Shared {
    fn tell(&self, event: Event) {
        (self.observer)(event);
    }

    fn refused(&self, from: SocketAddr, name: Option<String>, refusal: Refusal) {
        self.tell(Event::Refused {
            from,
            name,
            refusal,
        });
    }

    /// A hand-over has ended, in success or not.
    fn handed(&self, own: usize) {
        let mut state = lock(&self.state);
        if let Some(waiting) = state.handovers.get_mut(&own) {
            *waiting -= 1;
            if *waiting == 0 {
                state.handovers.remove(&own);
            }
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = |f: &mut fmt::Formatter<'_>, from: &SocketAddr, name: &Option<String>| {
            write!(f, "client {from}")?;
            match name {
                Some(name) => write!(f, " for {name}"),
                None => Ok(()),
            }
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
            Self::Forwarded { from, name } => {
                who(f, from, name)?;
                f.write_str(" is forwarded")
            }
            Self::Refused {
                from,
                name,
                refusal,
            } => {
                who(f, from, name)?;
                write!(f, " is refused: {refusal}")
            }
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
