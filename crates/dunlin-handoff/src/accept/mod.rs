//! The side that accepts: one port for names that are ours and for those of the old server.
//!
//! ```text
//!            ┌─ own name ──▶ handshake ──▶ kernel TLS ──▶ unix socket: a line, and the socket
//!  TCP ─▶ hello
//!            └─ any other, or none ─────▶ the old server, not a byte changed
//! ```
//!
//! - `door`: the one thread that accepts, and has all clients of whom nothing is decided.
//! - `client`: one of them. Its hello is looked at where it lies, and wakes nobody again until
//!   there is more to see.
//! - `deliver`: an own name's socket, to whoever takes it.
//! - `forward`: any other client's bytes, by splice.
//! - `proxy`: where a client comes from, told to the old server.
//!
//! Nobody costs a thread before his hello is whole; a handshake is made at the door as well.

mod alert;
mod client;
mod deliver;
mod door;
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
use door::AcceptLoop;
use dunlin_lane::accept::RejectReason;
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::kernel::{Chosen, Inspector, Refused, abilities};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::provider::CipherSuite;
use forward::Forwarded;

/// A name that is ours.
#[derive(Clone, Debug)]
pub struct Own {
    /// As clients say it; upper and lower case are one.
    pub name: String,
    /// The unix socket at which its connections are taken.
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

/// The server that has all other names.
#[derive(Clone, Debug)]
pub struct Other {
    /// Where it listens.
    pub to: Target,
    /// Whether, and how, it is told where a client comes from.
    pub header: Option<ProxyHeader>,
}

/// How many, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Clients whose hello is not whole, or whose handshake is under way.
    pub undecided: usize,
    /// From accepting a client to the end of its handshake.
    pub opening: Duration,
    /// Clients of the old server, with two threads each.
    pub forwarded: usize,
    /// How long the old server may take to accept.
    pub connect: Duration,
    /// Sockets of one name that are being handed over, with a thread each.
    pub handovers: usize,
}

impl Default for Limits {
    /// For a process that may have 1,024 files: a client who is not decided has one, one who is
    /// forwarded eight.
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

/// Makes the line that goes with a socket, without its end.
pub type Description = Box<dyn Fn(&Arrived) -> String + Send + Sync>;

/// What is done with whom.
pub struct Options {
    /// The names that are ours; their connections are handed over.
    pub names: Vec<Own>,
    /// The server of all others; without one they are refused.
    pub other: Option<Other>,
    /// What does not begin as TLS does goes to that server too.
    pub forwards_plain: bool,
    /// What is said of a socket to whoever takes it.
    pub describe: Description,
    /// What asks the kernel about a connection that was given to it.
    pub inspector: Box<dyn Inspector>,
    /// Bounds.
    pub limits: Limits,
}

/// A connection of an own name.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The name.
    pub name: String,
    /// What its handshake has shown and agreed on.
    pub facts: Facts,
    /// What the kernel has chosen for it.
    pub chosen: Chosen,
}

/// Why no clients are accepted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The kernel has no TLS, and there is no server behind that clients could be forwarded to.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// No descriptors or threads are left.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a client came to nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It did not say what TLS clients say.
    #[error(transparent)]
    Hello(#[from] NoHello),
    /// It left in the middle of it.
    #[error("it closed the connection before its hello was whole")]
    Closed,
    /// Too slow.
    #[error("it was not done with its handshake in time")]
    Deadline,
    /// Too many others came after it.
    #[error("{0} other connections wanted its place before it had shown who it is")]
    Evicted(usize),
    /// Another wants to be accepted, and nothing else is left to do it with.
    #[error(
        "its place was given to the next, since this process or host has no descriptor or memory \
         left: raise the limit of open files (`ulimit -n`), or end what holds them; {0}"
    )]
    Shortage(#[source] io::Error),
    /// Its name is nobody's.
    #[error("nobody has the name that it wants: give it with --sni, or a server for others")]
    Stranger,
    /// The handshake has failed.
    #[error(transparent)]
    Tls(RejectReason),
    /// It takes none of what is allowed here.
    #[error(
        "it has no TLS parameters in common with this host ({0}): allow its version, or one of its \
         ciphers and curves"
    )]
    NothingInCommon(String),
    /// The kernel has no TLS for it.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// Whoever should take its socket does not.
    #[error("nobody takes its socket at {}: {source}; start the program that listens there", .to.display())]
    NoTaker {
        /// The path.
        to: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Sockets wait to be taken.
    #[error(
        "{0} sockets of that name wait to be taken already: see why whoever takes them does not"
    )]
    Busy(usize),
    /// The old server is not there.
    #[error("the server behind cannot be reached: {0}; see that it listens")]
    Unreachable(#[source] io::Error),
    /// The old server has enough of them.
    #[error("{0} clients are forwarded already: raise the limit")]
    Full(usize),
    /// It was forwarded, and one side has failed.
    #[error("the connection, or that to the server behind, has failed: {0}")]
    Broken(#[source] io::Error),
    /// It was forwarded when this process ended, or had been silent for long when others came.
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

/// What has happened, for the log.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A socket was handed over.
    HandedOver {
        /// What is known of it.
        arrived: Box<Arrived>,
        /// Where it was taken.
        to: PathBuf,
    },
    /// A client goes to the old server.
    Forwarded {
        /// Where it comes from.
        from: SocketAddr,
        /// The name that it wants.
        name: Option<String>,
    },
    /// A client came to nothing, or was given up.
    Refused {
        /// Where it comes from.
        from: SocketAddr,
        /// The name that it wants, if it has come so far.
        name: Option<String>,
        /// Why.
        refusal: Refusal,
    },
    /// The kernel has no TLS when the port opens: clients of hand-off names are refused, those of
    /// other names are forwarded.
    NoKernelTls(Refused),
    /// Nobody can be accepted for want of descriptors or memory. Told once, until somebody was.
    Starved(io::Error),
    /// Nobody is accepted any more.
    Failed(io::Error),
}

type Observer = Box<dyn Fn(Event) + Send + Sync>;

/// What all its threads share.
struct Shared {
    options: Options,
    tls: ServerTls,
    epoll: Epoll,
    observer: Observer,
    state: Mutex<State>,
    /// Something in it has ended.
    changed: Condvar,
    waker: Waker,
    wakeup: Wakeup,
}

#[derive(Default)]
struct State {
    /// By their numbers, hence by age.
    forwarded: BTreeMap<u64, Arc<Forwarded>>,
    /// By the numbers of their names.
    handovers: BTreeMap<usize, usize>,
    /// Nobody is accepted any more.
    is_draining: bool,
    /// Those who are not decided go at once.
    is_over: bool,
    /// The door's thread has ended.
    is_closed: bool,
}

/// A port that is open. Dropped, it ends at once, and with it all that it forwards, except for clients
/// that are being handed over: it waits for them, and their sockets have five seconds to be taken.
/// Sockets that were handed over stay.
pub struct Acceptor {
    address: SocketAddr,
    shared: Arc<Shared>,
    door: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Takes clients at `listener`, with the settings of
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
        // Every kernel that has TLS has it with this cipher.
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
        let mut door = AcceptLoop::new(&shared, listener)?;
        let own = Arc::clone(&shared);
        let door = thread::Builder::new()
            .name("dunlin-door".to_owned())
            .spawn(move || {
                if let Err(error) = door.run() {
                    own.tell(Event::Failed(error));
                }
                drop(door);
                lock(&own.state).is_closed = true;
                own.changed.notify_all();
            })?;
        Ok(Self {
            address,
            shared,
            door: Some(door),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes nobody any more, and waits until those who are there have been handed over, or are
    /// done with the old server, for `limit` at most. Returns how many were cut off.
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
        if let Some(door) = self.door.take() {
            // A panic has been printed by its hook.
            let _ = door.join();
        }
        for one in all {
            one.cut();
        }
        let mut state = lock(&self.shared.state);
        // Each of them was stopped, or has a deadline of its own.
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

    /// A socket of a name has been handed over, or not.
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
