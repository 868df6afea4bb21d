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

use super::policy::ServerTls;
pub use arrival::{Arrival, LaneSocket, RelayArrival};
use pending::{Came, Pending, Purpose, Step};
pub use reading::{OPENING_DEADLINE, PENDING_LIMIT, RejectReason, would_block};

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
        let mut interests = vec![Interest::read(stop), Interest::read(listener)];
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
