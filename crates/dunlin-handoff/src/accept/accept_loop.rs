//! The accepting thread. It owns each client until the client is forwarded or its handshake is
//! complete.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Readiness;
use dunlin_proto::limits::MAX_CLIENT_FLIGHT_BYTES;

use super::client::{Client, HelloBuffer, Step};
use super::forwarded::Forwarded;
use super::shared::Shared;
use super::token::{Side, token};
use super::{Event, Refusal, deliver};
use dunlin_linux::socket::Accepted;

/// The maximum number of connections to accept before pending clients are served again.
const ACCEPTS_PER_ROUND: usize = 16;
/// How long to stop accepting after descriptors or memory ran out.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// Minimum age of a client that is evicted because descriptors or memory ran out. A well-behaved
/// client usually completes its handshake within this time.
const SHORTAGE_GRACE: Duration = Duration::from_millis(300);
/// How often the acceptor checks whether receivers have read the lines of text that it sent with
/// sockets. No event reports that a line has been read. When a new client of a hand-off name
/// arrives, the acceptor checks that name's receiver immediately. The interval therefore delays
/// only the close of the acceptor's connections to receivers. A shorter interval would wake the
/// process more often.
const RECEIVERS_STEP: Duration = Duration::from_secs(1);

const WAKE: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

pub(super) struct AcceptLoop {
    shared: Arc<Shared>,
    /// The pending clients by number. A newer client has a higher number, so the clients are sorted
    /// by age.
    clients: BTreeMap<u64, Client>,
    next: u64,
    buffer: HelloBuffer,
    /// The end of a pause in accepting, after descriptors or memory ran out.
    paused_until: Option<Instant>,
    /// Whether [`Event::Starved`] was reported and no client has been accepted since then.
    is_starved: bool,
    /// When to query again whether receivers have read the lines that were sent with sockets.
    next_query: Instant,
}

impl AcceptLoop {
    /// Registers the listener.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub(super) fn new(shared: &Arc<Shared>, listener: &TcpListener) -> io::Result<Self> {
        shared.epoll.add_always(&shared.wakeup, WAKE)?;
        shared.epoll.add(listener, LISTENER, Readiness::Read)?;
        Ok(Self {
            shared: Arc::clone(shared),
            clients: BTreeMap::new(),
            next: 0,
            buffer: Box::new([0; MAX_CLIENT_FLIGHT_BYTES]),
            paused_until: None,
            is_starved: false,
            next_query: Instant::now(),
        })
    }

    /// Runs until the acceptor is stopped, or until it drains and has no pending clients left.
    /// Closes `listener` when the acceptor begins to drain, or at the end.
    ///
    /// # Errors
    /// The listener or epoll failed.
    pub(super) fn run(mut self, listener: TcpListener) -> io::Result<()> {
        while !lock(&self.shared.state).is_draining {
            if self.shared.stop.is_requested() {
                return Ok(());
            }
            if self.serve()? {
                self.accept_some(&listener)?;
            }
            let now = Instant::now();
            if self.paused_until.is_some_and(|until| until <= now) {
                self.paused_until = None;
                self.listen(&listener)?;
            }
        }
        drop(listener);
        self.paused_until = None;
        while !(self.clients.is_empty() || self.shared.stop.is_requested()) {
            self.serve()?;
        }
        Ok(())
    }

    /// Waits for events, and handles the events of clients. Returns whether the listener is ready.
    ///
    /// # Errors
    /// epoll failed.
    fn serve(&mut self) -> io::Result<bool> {
        let deadlines = self.clients.values().map(|client| client.deadline);
        // Only this thread begins hand-overs, so the result stays valid while the thread waits.
        let is_any_in_flight = !lock(&self.shared.state).handovers.is_empty();
        let query = is_any_in_flight.then_some(self.next_query);
        let next = deadlines.chain(self.paused_until).chain(query).min();
        let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
        let (mut ready, mut is_listener_ready) = (Vec::new(), false);
        self.shared.epoll.wait(&mut ready, timeout)?;
        for one in ready {
            let number = one.token >> 2;
            match (one.token, one.token & 3) {
                (WAKE, _) => self.shared.wakeup.clear(),
                (LISTENER, _) => is_listener_ready = true,
                (_, 0) => self.advance(number, one.ended),
                (_, 1) if one.failed => self.connection_failed(number, Side::Client),
                (_, _) if one.failed => self.connection_failed(number, Side::Backend),
                _ => {}
            }
        }
        let now = Instant::now();
        self.expire(now);
        if self.next_query <= now {
            self.next_query = now + RECEIVERS_STEP;
            self.shared.end_read_handovers();
        }
        Ok(is_listener_ready)
    }

    /// Makes epoll report the listener again (EPOLLONESHOT).
    fn listen(&self, listener: &TcpListener) -> io::Result<()> {
        self.shared.epoll.again(listener, LISTENER, Readiness::Read)
    }

    fn accept_some(&mut self, listener: &TcpListener) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_ROUND {
            match Accepted::from(listener.accept()) {
                Accepted::Connection((stream, from)) => {
                    self.is_starved = false;
                    let limits = self.shared.options.limits;
                    if self.clients.len() >= limits.pending {
                        self.evict(Refusal::Evicted(limits.pending));
                    }
                    let number = self.next;
                    self.next += 1;
                    let client =
                        Client::new(stream, from, limits.handshake_timeout).and_then(|client| {
                            let token = token(number, None);
                            self.shared.epoll.add_news(&client.stream, token, true)?;
                            Ok(client)
                        });
                    match client {
                        Ok(client) => drop(self.clients.insert(number, client)),
                        Err(error) => self.shared.refused(from, None, Refusal::Io(error)),
                    }
                }
                Accepted::Nothing => break,
                Accepted::Shortage(error) => {
                    let now = Instant::now();
                    self.paused_until = Some(now + SHORTAGE_PAUSE);
                    self.handle_shortage(error, now);
                    return Ok(());
                }
                Accepted::Failed(error) => return Err(error),
            }
        }
        self.listen(listener)
    }

    /// If the grace period of the client that [`least`] selects has passed, evicts that client. If
    /// no client is pending, reports [`Event::Starved`], and does not report it again until a
    /// client is accepted.
    fn handle_shortage(&mut self, error: io::Error, now: Instant) {
        match on_shortage(self.candidates(), now) {
            Shortage::Evict(number) => self.dismiss(number, Refusal::Shortage(error)),
            Shortage::Wait => {}
            Shortage::Starved if !std::mem::replace(&mut self.is_starved, true) => {
                self.shared.report(&Event::Starved(error));
            }
            Shortage::Starved => {}
        }
    }

    fn candidates(&self) -> impl ExactSizeIterator<Item = Candidate> {
        self.clients.iter().map(|(number, client)| Candidate {
            number: *number,
            progress: client.progress(),
            began: client.began,
        })
    }

    fn evict(&mut self, refusal: Refusal) {
        if let Some(least) = least(self.candidates()) {
            self.dismiss(least.number, refusal);
        }
    }

    fn dismiss(&mut self, number: u64, refusal: Refusal) {
        if let Some(client) = self.clients.remove(&number)
            && !client.lingers()
        {
            let name = client.name.clone();
            self.shared.refused(client.from, name, refusal);
        }
    }

    fn expire(&mut self, now: Instant) {
        let overdue =
            |(number, client): (&u64, &Client)| (client.deadline <= now).then_some(*number);
        let overdue: Vec<_> = self.clients.iter().filter_map(overdue).collect();
        for number in overdue {
            self.dismiss(number, Refusal::Deadline);
        }
    }

    fn advance(&mut self, number: u64, ended: bool) {
        let Some(client) = self.clients.get_mut(&number) else {
            return;
        };
        let shared = &self.shared;
        match client.advance(shared, &mut self.buffer, ended) {
            Step::Wait => {}
            Step::Gone => drop(self.clients.remove(&number)),
            Step::Refused(refusal) => {
                let name = client.name.clone();
                shared.refused(client.from, name, refusal);
            }
            step => {
                let Some(client) = self.clients.remove(&number) else {
                    return;
                };
                let (from, name) = (client.from, client.name.clone());
                // Remove the socket from epoll explicitly. Closing this process's descriptor would
                // not suffice: the receiver gets another descriptor of the socket, and epoll
                // reports the socket until all of its descriptors are closed.
                if let Err(error) = shared.epoll.remove(&client.stream) {
                    return shared.refused(from, name, Refusal::Io(error));
                }
                let handoff_name = client.handoff_name(shared);
                match (step, handoff_name) {
                    (Step::Forward(hello_bytes), _) => {
                        let client = (client.stream, from);
                        Forwarded::start(shared, number, client, name, hello_bytes);
                    }
                    (_, Some(index)) => match client.secured() {
                        Ok(secured) => deliver::start(shared, index, secured),
                        Err(refusal) => shared.refused(from, name, refusal),
                    },
                    (_, None) => {}
                }
            }
        }
    }

    /// Called when epoll has reported a failure of one connection of a forwarded client.
    fn connection_failed(&self, number: u64, side: Side) {
        let one = lock(&self.shared.state).forwarded.get(&number).cloned();
        if let Some(one) = one {
            one.fails(side);
        }
    }
}

/// A client that may be evicted.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    number: u64,
    progress: u8,
    began: Instant,
}

/// The reaction when accept(2) fails for lack of descriptors or memory.
#[derive(Debug, PartialEq, Eq)]
enum Shortage {
    /// Evict the client with this number.
    Evict(u64),
    /// Try again later: the grace period of the client to evict has not passed yet.
    Wait,
    /// There is no client to evict.
    Starved,
}

/// Decides what to do when accept(2) fails for lack of descriptors or memory. `all` is sorted by
/// age, the oldest first.
fn on_shortage(all: impl ExactSizeIterator<Item = Candidate>, now: Instant) -> Shortage {
    match least(all) {
        Some(one) if now.saturating_duration_since(one.began) >= SHORTAGE_GRACE => {
            Shortage::Evict(one.number)
        }
        Some(_) => Shortage::Wait,
        None => Shortage::Starved,
    }
}

/// The client with the least progress in the older half of `all`; if there are several, the oldest
/// of them. The younger half has had little time to send anything. `all` is sorted by age, the
/// oldest first.
fn least(all: impl ExactSizeIterator<Item = Candidate>) -> Option<Candidate> {
    let older = all.len().div_ceil(2);
    all.take(older).min_by_key(|one| (one.progress, one.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients with the given progress, the oldest first and one millisecond apart.
    fn clients(oldest: Instant, progress: &[u8]) -> Vec<Candidate> {
        let candidate = |(number, &progress): (u64, &u8)| Candidate {
            number,
            progress,
            began: oldest + Duration::from_millis(number),
        };
        (0..).zip(progress).map(candidate).collect()
    }

    #[test]
    fn i7_the_oldest_client_with_least_progress_in_the_older_half_is_evicted() {
        let begin = Instant::now();
        for (progress, evicted) in [
            (&[][..], None),
            (&[3], Some(0)),
            (&[2, 1], Some(0)),
            (&[2, 1, 1], Some(1)),
            (&[1, 1, 0, 0], Some(0)),
            (&[3, 2, 1, 0, 0], Some(2)),
            (&[3, 3, 3, 0, 0, 0], Some(0)),
        ] {
            let least = least(clients(begin, progress).into_iter());
            assert_eq!(least.map(|one| one.number), evicted, "{progress:?}");
        }
    }

    #[test]
    fn i7_a_shortage_evicts_only_clients_past_their_grace_period() {
        let begin = Instant::now();
        let at = |progress: &[u8], after: Duration| {
            on_shortage(clients(begin, progress).into_iter(), begin + after)
        };
        let before = SHORTAGE_GRACE - Duration::from_nanos(1);
        assert_eq!(at(&[], SHORTAGE_GRACE), Shortage::Starved);
        assert_eq!(at(&[1], Duration::ZERO), Shortage::Wait);
        assert_eq!(at(&[1], before), Shortage::Wait);
        assert_eq!(at(&[1], SHORTAGE_GRACE), Shortage::Evict(0));
        // The client with the least progress is younger than the oldest client, so its grace period
        // ends later.
        let younger = SHORTAGE_GRACE + Duration::from_millis(1);
        assert_eq!(at(&[2, 1, 1], SHORTAGE_GRACE), Shortage::Wait);
        assert_eq!(at(&[2, 1, 1], younger), Shortage::Evict(1));
    }
}
