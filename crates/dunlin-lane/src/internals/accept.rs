//! Accepts connections on one thread, from the listener to an authenticated peer and its opening
//! message.
//!
//! Unauthenticated connections do not get a thread. One poll loop serves all connections in the
//! handshake. Each has a deadline, and their number is bounded. When a new connection exceeds the
//! bound, the loop evicts the one with the least progress among the older connections. A silent
//! client therefore delays no other client, and a thousand silent clients evict mainly each other
//! (invariant I7).
//!
//! ```text
//!   TCP ──▶ first byte ──▶ TLS handshake ──▶ opening ──▶ Arrival::Control
//!               │                               ├──────▶ Arrival::Lane
//!               └─ 'D' (plain lane) ── opening ─┘        Arrival::Rejected
//! ```
//!
//! Every TLS lane begins as rustls's buffered type, which gets exactly one record at a time. The
//! opening message decides what the connection becomes. A control lane keeps that type; for a data
//! lane, the keys are extracted for [`super::record`]. Nothing after the last record of the opening
//! message has been read.

mod arrival;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod pending;
pub(super) mod reading;

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_linux::socket::Accepted;

use super::policy::ServerTls;
pub use arrival::{Arrival, LaneSocket, RelayArrival};
use pending::{Outcome, Pending, Purpose, Step};
pub use reading::{OPENING_DEADLINE, PENDING_LIMIT, RejectReason, would_block};

/// Number of connections that are accepted before the pending ones are served again. Because
/// [`take_least`] never evicts the newer half of the pending connections, each connection is served
/// at least four times before the limit can evict it.
const ACCEPTS_PER_ROUND: usize = PENDING_LIMIT / 8;
/// How long to stop accepting after running out of descriptors or memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

/// Minimum age at which a connection may be evicted because descriptors or memory ran out. An
/// honest handshake usually finishes within this time, so simultaneous lanes of one session do not
/// evict each other.
const SHORTAGE_GRACE: Duration = Duration::from_millis(300);

/// Accepts connections on `listener` until `stop` is woken, and passes each result to `deliver`.
/// Runs on the calling thread.
///
/// # Errors
/// The listener or poll(2) failed; pending connections are dropped.
pub fn accept(
    listener: &TcpListener,
    tls: &ServerTls,
    stop: &Wakeup,
    mut deliver: impl FnMut(Arrival),
) -> io::Result<()> {
    accept_for(listener, Purpose::Lanes(tls), stop, |outcome| {
        deliver(match outcome {
            Outcome::Opened(one) => one.arrive(),
            Outcome::Rejected { from, reason } => Arrival::Rejected { from, reason },
            Outcome::Starved(error) => Arrival::Starved(error),
        });
    })
}

/// Like [`accept`], for a relay: its peers are arbitrary TLS clients, and a connection is delivered
/// when its handshake is complete.
pub fn accept_relayed(
    listener: &TcpListener,
    tls: &ServerTls,
    stop: &Wakeup,
    mut deliver: impl FnMut(RelayArrival),
) -> io::Result<()> {
    accept_for(listener, Purpose::Relay(tls), stop, |outcome| {
        deliver(match outcome {
            Outcome::Opened(one) => one.arrive_relayed(),
            Outcome::Rejected { from, reason } => RelayArrival::Rejected { from, reason },
            Outcome::Starved(error) => RelayArrival::Starved(error),
        });
    })
}

fn accept_for(
    listener: &TcpListener,
    purpose: Purpose<'_>,
    stop: &Wakeup,
    mut deliver: impl FnMut(Outcome),
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut pending: VecDeque<Pending> = VecDeque::new();
    let mut paused: Option<Instant> = None;
    let mut starved = false;
    loop {
        let now = Instant::now();
        paused = paused.filter(|&until| until > now);
        let mut interests = vec![Interest::read(stop), Interest::read(listener)];
        interests[1].read = paused.is_none();
        interests.extend(pending.iter().map(|one| Interest {
            fd: one.stream.as_fd(),
            read: true,
            write: one.wants_write(),
        }));
        let next = pending.iter().map(|one| one.deadline).chain(paused).min();
        let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
        let ready = poll(&interests, timeout)?;
        if ready[0] {
            return Ok(());
        }
        let now = Instant::now();
        // Iterate in reverse, so that indices stay valid when an entry leaves the queue.
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
                    deliver(Outcome::Rejected { from, reason });
                }
                Step::Gone => drop(pending.remove(index)),
                Step::Complete => {
                    if let Some(one) = pending.remove(index) {
                        deliver(Outcome::Opened(one));
                    }
                }
            }
        }
        if ready[1] && paused.is_none() {
            match accept_some(listener, &mut pending, &mut deliver)? {
                Round::All => starved = false,
                Round::Short(short) => {
                    paused = Some(Instant::now() + SHORTAGE_PAUSE);
                    if let Some(error) = short
                        && !std::mem::replace(&mut starved, true)
                    {
                        deliver(Outcome::Starved(error));
                    }
                }
            }
        }
    }
}

/// The result of one round of accepting.
enum Round {
    /// accept(2) returned no connection, or this round has accepted [`ACCEPTS_PER_ROUND`]
    /// connections.
    All,
    /// Descriptors or memory ran out. Holds the kernel's error if no connection is pending; `None`
    /// if a pending connection was evicted, or is still too young to be evicted.
    Short(Option<io::Error>),
}

/// Accepts some of the waiting connections.
fn accept_some(
    listener: &TcpListener,
    pending: &mut VecDeque<Pending>,
    deliver: &mut impl FnMut(Outcome),
) -> io::Result<Round> {
    for _ in 0..ACCEPTS_PER_ROUND {
        match Accepted::from(listener.accept()) {
            Accepted::Connection((stream, from)) => {
                if pending.len() >= PENDING_LIMIT
                    && let Some(least) = take_least(pending)
                    && !least.lingers()
                {
                    deliver(least.rejected(RejectReason::Evicted));
                }
                match Pending::new(stream, from) {
                    Ok(one) => pending.push_back(one),
                    Err(error) => deliver(Outcome::Rejected {
                        from,
                        reason: error.into(),
                    }),
                }
            }
            Accepted::Nothing => break,
            Accepted::Shortage(error) => {
                let Some(least) = take_least(pending) else {
                    return Ok(Round::Short(Some(error)));
                };
                if least.age() < SHORTAGE_GRACE && !least.lingers() {
                    // This connection is too young to be evicted, so put it back. The order in the
                    // older half hardly matters.
                    pending.push_front(least);
                } else if !least.lingers() {
                    deliver(least.rejected(RejectReason::Shortage(error)));
                }
                return Ok(Round::Short(None));
            }
            Accepted::Failed(error) => return Err(error),
        }
    }
    Ok(Round::All)
}

/// Removes the connection with the least progress from the older half; if several have the least
/// progress, the oldest of them. The newer half may have had too little time to make progress.
fn take_least(pending: &mut VecDeque<Pending>) -> Option<Pending> {
    let older = pending.len().div_ceil(2);
    let progress = pending.iter().take(older).map(Pending::progress);
    let (_, least) = progress.zip(0..).min()?;
    pending.remove(least)
}
