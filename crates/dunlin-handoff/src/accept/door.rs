//! The one thread that accepts, and that has every client until it is known who answers it.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Readiness;
use dunlin_proto::limits::MAX_CLIENT_FLIGHT_BYTES;

use super::client::{Client, HelloBuffer, Step};
use super::forward::Forwarded;
use super::token::{Of, Side, token};
use super::{Event, Refusal, Shared, deliver};
use dunlin_lane::accept::is_shortage;

/// Connections accepted before those that are there get their turn again.
const ACCEPTED_A_TURN: usize = 16;
/// How long nobody is accepted after descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);
/// How long a client keeps its place then: an honest handshake is over by that time.
const SHORTAGE_GRACE: Duration = Duration::from_millis(300);

const WAKE: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

pub(super) struct AcceptLoop {
    shared: Arc<Shared>,
    /// Gone when nobody is accepted any more.
    listener: Option<TcpListener>,
    /// By their numbers, hence by age.
    clients: BTreeMap<u64, Client>,
    next: u64,
    desk: HelloBuffer,
    resting: Option<Instant>,
    is_starved: bool,
}

impl AcceptLoop {
    /// A door that is open.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub(super) fn new(shared: &Arc<Shared>, listener: TcpListener) -> io::Result<Self> {
        shared.epoll.add_always(&shared.wakeup, WAKE)?;
        shared.epoll.add(&listener, LISTENER, Readiness::Read)?;
        Ok(Self {
            shared: Arc::clone(shared),
            listener: Some(listener),
            clients: BTreeMap::new(),
            next: 0,
            desk: Box::new([0; MAX_CLIENT_FLIGHT_BYTES]),
            resting: None,
            is_starved: false,
        })
    }

    /// Runs until nobody is accepted any more and nobody is left here.
    ///
    /// # Errors
    /// The listener fails.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            ready.clear();
            let deadlines = self.clients.values().map(|client| client.deadline);
            let next = deadlines.chain(self.resting).min();
            let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
            self.shared.epoll.wait(&mut ready, timeout)?;
            for &one in &ready {
                let number = one.token >> 2;
                match (one.token, one.token & 3) {
                    (WAKE, _) => self.shared.wakeup.clear(),
                    (LISTENER, _) => self.accept_some()?,
                    (_, 0) => self.advance(number, one.ended),
                    (_, 1) if one.failed => self.watched(number, Side::Client),
                    (_, _) if one.failed => self.watched(number, Side::Server),
                    _ => {}
                }
            }
            let now = Instant::now();
            self.expire(now);
            if self.resting.is_some_and(|until| until <= now) {
                self.resting = None;
                self.listen()?;
            }
            let state = self.shared.lock();
            let (is_draining, is_over) = (state.is_draining, state.is_over);
            drop(state);
            if is_draining {
                self.listener = None;
                self.resting = None;
            }
            if is_over || (is_draining && self.clients.is_empty()) {
                return Ok(());
            }
        }
    }

    /// Has the listener reported once more.
    fn listen(&self) -> io::Result<()> {
        match &self.listener {
            Some(listener) => self.shared.epoll.again(listener, LISTENER, Readiness::Read),
            None => Ok(()),
        }
    }

    fn accept_some(&mut self) -> io::Result<()> {
        for _ in 0..ACCEPTED_A_TURN {
            let Some(listener) = &self.listener else {
                return Ok(());
            };
            match listener.accept() {
                Ok((stream, from)) => {
                    self.is_starved = false;
                    let limits = self.shared.options.limits;
                    if self.clients.len() >= limits.undecided {
                        self.evict(Refusal::Evicted(limits.undecided));
                    }
                    let number = self.next;
                    self.next += 1;
                    let client = Client::new(stream, from, limits.opening).and_then(|client| {
                        let token = token(number, Of::Undecided);
                        self.shared.epoll.add_news(&client.stream, token, true)?;
                        Ok(client)
                    });
                    match client {
                        Ok(client) => drop(self.clients.insert(number, client)),
                        Err(error) => self.shared.refused(from, None, Refusal::Io(error)),
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    // A client that went away again, or a signal.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ if is_shortage(&error) => {
                        self.resting = Some(Instant::now() + SHORTAGE_REST);
                        self.make_do(error);
                        return Ok(());
                    }
                    _ => return Err(error),
                },
            }
        }
        self.listen()
    }

    /// The means are lacking for another connection: somebody who had his time goes for it.
    fn make_do(&mut self, error: io::Error) {
        let old = |client: &Client| client.began.elapsed() >= SHORTAGE_GRACE;
        let least = self.least();
        match least {
            Some(number) if self.clients.get(&number).is_some_and(old) => {
                self.dismiss(number, Refusal::Shortage(error));
            }
            Some(_) => {}
            None if !std::mem::replace(&mut self.is_starved, true) => {
                self.shared.tell(Event::Starved(error));
            }
            None => {}
        }
    }

    /// The oldest of those that have got least far, among the older half: the others have hardly
    /// had the time to say anything.
    fn least(&self) -> Option<u64> {
        let older = self.clients.len().div_ceil(2);
        let all = self.clients.iter().take(older);
        let (_, number) = all.map(|(number, one)| (one.progress(), *number)).min()?;
        Some(number)
    }

    fn evict(&mut self, refusal: Refusal) {
        if let Some(number) = self.least() {
            self.dismiss(number, refusal);
        }
    }

    fn dismiss(&mut self, number: u64, refusal: Refusal) {
        if let Some(client) = self.clients.remove(&number)
            && !client.lingers()
        {
            let name = client.name().map(str::to_owned);
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
        match client.advance(shared, &mut self.desk, ended) {
            Step::Wait => {}
            Step::Gone => drop(self.clients.remove(&number)),
            Step::Refused(refusal) => {
                let name = client.name().map(str::to_owned);
                shared.refused(client.from, name, refusal);
            }
            step => {
                let Some(client) = self.clients.remove(&number) else {
                    return;
                };
                let (from, name) = (client.from, client.name().map(str::to_owned));
                // The socket is reported as long as anybody has it, whoever that is.
                if let Err(error) = shared.epoll.remove(&client.stream) {
                    return shared.refused(from, name, Refusal::Io(error));
                }
                let own = client.own(shared);
                match (step, own) {
                    (Step::Forward(hello_bytes), _) => {
                        let client = (client.stream, from);
                        Forwarded::start(shared, number, client, name, hello_bytes);
                    }
                    (_, Some(own)) => match client.secured() {
                        Ok(secured) => deliver::start(shared, own, secured),
                        Err(refusal) => shared.refused(from, name, refusal),
                    },
                    (_, None) => {}
                }
            }
        }
    }

    /// A forwarded client's connection has failed, or its server's.
    fn watched(&self, number: u64, side: Side) {
        let one = self.shared.lock().forwarded.get(&number).cloned();
        if let Some(one) = one {
            one.fails(side);
        }
    }
}
