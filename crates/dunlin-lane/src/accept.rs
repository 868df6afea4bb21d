//! Accepting connections: from the listener to an authenticated peer and its
//! first words, on one thread for all of them.
//!
//! Nobody who is not authenticated costs a thread. All connections whose
//! handshake is under way stand in one poll loop; each has a deadline, their
//! number is bounded, and when a new one comes that has no room, an older one
//! goes that has got less far than others. So a silent client delays nobody, and a
//! thousand of them only each other (I7): a peer whose handshake goes on is not
//! driven out by those who merely connect.
//!
//! ```text
//!   TCP ──▶ first byte ──▶ TLS handshake ──▶ opening ──▶ Arrival::Control
//!               │                               ├──────▶ Arrival::Lane
//!               └─ 'D' (plain lane) ── opening ─┘        Arrival::Rejected
//! ```
//!
//! Every connection begins on rustls's buffered kind, fed with exactly one
//! record at a time. Only the opening tells what it is: a control lane stays
//! on it, a data lane's keys are taken out of it for [`super::record`], with
//! not a byte read too many.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod pending;

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_proto::negotiate::Opening;
use dunlin_proto::wire::DecodeError;
use thiserror::Error;

use super::control::ControlStream;
use super::handshake::relay::Relayed;
use super::handshake::{HandshakeError, Secured};
use super::identity::ServerTls;
pub(super) use pending::Reading;
pub use pending::would_block;
use pending::{Pending, Step};

/// Connections that are not authenticated yet, at the same time. Each costs
/// at most [`FLIGHT_LIMIT_BYTES`](super::handshake::FLIGHT_LIMIT_BYTES) and what rustls keeps, so that all of them
/// stay under 8 MiB.
pub const PENDING_LIMIT: usize = 64;
/// From accepting a connection to the end of its opening.
pub const OPENING_DEADLINE: Duration = Duration::from_secs(10);
/// How long a refused peer may take to fetch its alert.
const LINGER: Duration = Duration::from_millis(500);
/// Connections accepted before those that are there get their turn again. With
/// the newer half never given up ([`take_least`]), each has had four turns to say
/// something before it can be driven out for its silence.
const ACCEPTED_A_TURN: usize = PENDING_LIMIT / 8;
/// How long nobody is accepted after descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);

/// How long a connection keeps its place when descriptors or memory ran out: an
/// honest handshake is over by then, and lanes of one session that come together
/// do not drive each other out.
const SHORTAGE_GRACE: Duration = Duration::from_millis(300);

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

/// Why a connection came to nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// The handshake failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// It took too long.
    #[error("the peer was not done with its opening after {} s", OPENING_DEADLINE.as_secs())]
    Deadline,
    /// Too many others came after it.
    #[error("{PENDING_LIMIT} other connections wanted its place before it was authenticated")]
    Evicted,
    /// Another wants to be accepted, and nothing else is left to do it with.
    #[error(
        "its place was given to the next, since this process or host has no descriptor or memory \
         left: raise the limit of open files (`ulimit -n`), or end what holds them; {0}"
    )]
    Shortage(io::Error),
    /// The first words make no sense.
    #[error("the peer's first words are not Dunlin's: {0}")]
    Opening(#[from] DecodeError),
    /// It neither began a TLS handshake nor a plain lane.
    #[error(
        "the peer's first byte is {0:#04x}: neither TLS nor a plain lane of Dunlin; find out who connects to this port"
    )]
    Unknown(u8),
    /// The connection broke.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// Accepts on `listener` until `stop` is woken, and hands each connection to
/// `deliver`. Runs on the calling thread.
///
/// # Errors
/// The listener fails; connections under way are dropped.
pub fn accept(
    listener: &TcpListener,
    tls: &ServerTls,
    stop: &Wakeup,
    mut deliver: impl FnMut(Arrival),
) -> io::Result<()> {
    accept_for(listener, Purpose::Lanes(tls), stop, |came| {
        deliver(match came {
            Came::Opened(one) => one.arrive(),
            Came::Rejected { from, reason } => Arrival::Rejected { from, reason },
            Came::Starved(error) => Arrival::Starved(error),
        });
    })
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

/// The same for a relay, whose peers are any TLS clients: they are accepted when their handshake
/// is complete.
pub fn accept_relayed(
    listener: &TcpListener,
    tls: &ServerTls,
    stop: &Wakeup,
    mut deliver: impl FnMut(RelayArrival),
) -> io::Result<()> {
    accept_for(listener, Purpose::Relay(tls), stop, |came| {
        deliver(match came {
            Came::Opened(one) => one.arrive_relayed(),
            Came::Rejected { from, reason } => RelayArrival::Rejected { from, reason },
            Came::Starved(error) => RelayArrival::Starved(error),
        });
    })
}

/// What connections are accepted for.
#[derive(Clone, Copy)]
enum Purpose<'a> {
    Lanes(&'a ServerTls),
    Relay(&'a ServerTls),
}

/// What has become of a connection.
enum Came {
    Opened(Pending),
    Rejected {
        from: SocketAddr,
        reason: RejectReason,
    },
    Starved(io::Error),
}

fn accept_for(
    listener: &TcpListener,
    purpose: Purpose<'_>,
    stop: &Wakeup,
    mut deliver: impl FnMut(Came),
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut pending: VecDeque<Pending> = VecDeque::new();
    let mut resting: Option<Instant> = None;
    let mut starved = false;
    loop {
        let now = Instant::now();
        resting = resting.filter(|&until| until > now);
        let mut interests = vec![read_interest(stop), read_interest(listener)];
        interests[1].read = resting.is_none();
        interests.extend(pending.iter().map(|one| Interest {
            fd: one.stream.as_fd(),
            read: true,
            write: one.wants_write(),
        }));
        let next = pending.iter().map(|one| one.deadline).chain(resting).min();
        let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
        let ready = poll(&interests, timeout)?;
        if ready[0] {
            return Ok(());
        }
        let now = Instant::now();
        // In place, by age: an entry that is done leaves the queue.
        for index in (0..pending.len()).rev() {
            let step = if ready[index + 2] {
                pending[index].advance(purpose)
            } else {
                Step::Wait
            };
            let overdue = pending[index].deadline <= now;
            match step {
                Step::Wait if !overdue => {}
                Step::Wait => {
                    if let Some(one) = pending.remove(index)
                        && !one.lingers()
                    {
                        deliver(one.rejected(RejectReason::Deadline));
                    }
                }
                Step::Refused(reason) => {
                    let from = pending[index].from;
                    pending[index].linger(now);
                    deliver(Came::Rejected { from, reason });
                }
                Step::Gone => drop(pending.remove(index)),
                Step::Complete => {
                    if let Some(one) = pending.remove(index) {
                        deliver(Came::Opened(one));
                    }
                }
            }
        }
        if ready[1] && resting.is_none() {
            match accept_some(listener, &mut pending, &mut deliver)? {
                Accepted::All => starved = false,
                Accepted::Short(short) => {
                    resting = Some(Instant::now() + SHORTAGE_REST);
                    if let Some(error) = short
                        && !std::mem::replace(&mut starved, true)
                    {
                        deliver(Came::Starved(error));
                    }
                }
            }
        }
    }
}

fn read_interest(descriptor: &impl AsFd) -> Interest<'_> {
    Interest {
        fd: descriptor.as_fd(),
        read: true,
        write: false,
    }
}

/// How accepting went.
enum Accepted {
    /// Nobody waits, or they have had their turn.
    All,
    /// The means are lacking for another connection. One has been given up for it; if
    /// there was none, this is what the kernel said.
    Short(Option<io::Error>),
}

/// Accepts some of those that wait.
fn accept_some(
    listener: &TcpListener,
    pending: &mut VecDeque<Pending>,
    deliver: &mut impl FnMut(Came),
) -> io::Result<Accepted> {
    for _ in 0..ACCEPTED_A_TURN {
        match listener.accept() {
            Ok((stream, from)) => {
                if pending.len() >= PENDING_LIMIT
                    && let Some(least) = take_least(pending)
                    && !least.lingers()
                {
                    deliver(least.rejected(RejectReason::Evicted));
                }
                match Pending::new(stream, from) {
                    Ok(one) => pending.push_back(one),
                    Err(error) => deliver(Came::Rejected {
                        from,
                        reason: error.into(),
                    }),
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(Accepted::All),
                // A peer that went away again, or a signal.
                io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                _ if is_shortage(&error) => {
                    let Some(least) = take_least(pending) else {
                        return Ok(Accepted::Short(Some(error)));
                    };
                    if least.age() < SHORTAGE_GRACE && !least.lingers() {
                        // Back to where the eldest are.
                        pending.push_front(least);
                    } else {
                        deliver(least.rejected(RejectReason::Shortage(error)));
                    }
                    return Ok(Accepted::Short(None));
                }
                _ => return Err(error),
            },
        }
    }
    Ok(Accepted::All)
}

/// Takes out the oldest of those that have got least far, among the older half:
/// the others have hardly had the time to say anything.
fn take_least(pending: &mut VecDeque<Pending>) -> Option<Pending> {
    let older = pending.len().div_ceil(2);
    let progress = pending.iter().take(older).map(Pending::progress);
    let (_, least) = progress.zip(0..).min()?;
    pending.remove(least)
}

/// Whether accept(2) failed for want of descriptors or memory: clients can
/// bring that about, so that it must not end the listener (I7).
pub fn is_shortage(error: &io::Error) -> bool {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    matches!(
        error.raw_os_error(),
        Some(ENOMEM | ENFILE | EMFILE | ENOBUFS)
    )
}
