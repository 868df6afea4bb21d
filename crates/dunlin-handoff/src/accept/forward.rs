//! Clients of the old server: one connection to it for each, all bytes unchanged.
//!
//! Each has two threads, and their number is bounded. When a client arrives at the limit, the client
//! with the longest silence on both sides is evicted, if the silence is long enough: a client that has
//! sent only its hello is evicted earlier. An idle client therefore never displaces an active one.

use dunlin_lane::sync::lock;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{connect_unix_unless, set_reset_on_close};

use super::forwarded::Forwarded;
use super::shared::Shared;
use super::token::{Side, token};
use super::{Event, Other, Refusal, Target};
use crate::connect::keep_alive;
use dunlin_lane::dial::{Connector, StandardConnector};
use dunlin_lane::splice::{Pause, Stop, carry};
use dunlin_linux::splice::Conduit;

/// Silence after which a client that has sent only its hello may be evicted: an honest client has
/// answered the server by then.
const GRACE: Duration = Duration::from_secs(1);
/// Silence after which any other client may be evicted. Longer than a disk or a busy server makes a
/// client wait; a connection that a client keeps open for later use is evicted.
const IDLE: Duration = Duration::from_secs(10);
/// Evicted clients that may still hold threads, beyond the limit, until their threads have noticed.
/// Each has at most six descriptors: a name lookup has two, and splicing has not begun.
const LEAVING: usize = 8;

/// The connection to the old server.
enum Server {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Forwarded {
    /// Forwards a client's connection, in its own threads.
    pub(super) fn start(
        shared: &Arc<Shared>,
        number: u64,
        (client, from): (TcpStream, SocketAddr),
        name: Option<String>,
        hello_bytes: usize,
    ) {
        let refused = |refusal| shared.refused(from, name.clone(), refusal);
        let stop = match make_room(shared, Instant::now()) {
            true => Stop::new().map_err(Refusal::Io),
            false => Err(Refusal::Full(shared.options.limits.forwarded)),
        };
        let stop = match stop {
            Ok(stop) => stop,
            Err(refusal) => {
                reset(&client);
                return refused(refusal);
            }
        };
        let own = Arc::new(Self {
            number,
            client,
            from,
            name: name.clone(),
            began: Instant::now(),
            hello_bytes: hello_bytes as u64,
            said_bytes: AtomicU64::new(0),
            last_ms: AtomicU64::new(0),
            stop,
            is_broken: AtomicBool::new(false),
            has_failed: Default::default(),
            has_ended: Default::default(),
        });
        lock(&shared.state)
            .forwarded
            .insert(number, Arc::clone(&own));
        let (on_thread, one) = (Arc::clone(shared), Arc::clone(&own));
        let spawned = thread::Builder::new()
            .name(format!("dunlin-forward-{number}"))
            .spawn(move || one.run(&on_thread));
        if let Err(error) = spawned {
            own.is_broken.store(true, Ordering::SeqCst);
            own.over(shared);
            refused(Refusal::Io(error));
        }
    }

    fn activity(&self) -> Activity {
        Activity {
            number: self.number,
            is_leaving: self.stop.is_requested(),
            has_said_more: self.said_bytes.load(Ordering::SeqCst) > self.hello_bytes,
            last: self.began + Duration::from_millis(self.last_ms.load(Ordering::SeqCst)),
        }
    }

    /// The body of the client's thread.
    fn run(&self, shared: &Arc<Shared>) {
        let told = match self.reach(shared) {
            Ok(server) => {
                shared.tell(Event::Forwarded {
                    from: self.from,
                    name: self.name.clone(),
                });
                let result = self.carry(shared, &server);
                if result.is_err() || self.is_broken.load(Ordering::SeqCst) {
                    self.is_broken.store(true, Ordering::SeqCst);
                    server.reset();
                }
                result
            }
            Err(error) => {
                self.is_broken.store(true, Ordering::SeqCst);
                Err(match self.stop.is_requested() {
                    true => Refusal::Cut,
                    false => Refusal::Unreachable(error),
                })
            }
        };
        self.over(shared);
        if let Err(refusal) = told {
            shared.refused(self.from, self.name.clone(), refusal);
        }
    }

    /// Frees its slot.
    fn over(&self, shared: &Shared) {
        if self.is_broken.load(Ordering::SeqCst) {
            reset(&self.client);
        }
        lock(&shared.state).forwarded.remove(&self.number);
        shared.changed.notify_all();
    }

    fn reach(&self, shared: &Shared) -> io::Result<Server> {
        let Some(Other { to, header }) = &shared.options.other else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let deadline = Instant::now() + shared.options.limits.connect;
        let stop = self.stop.wakeup();
        let server = match to {
            Target::Tcp(to) => {
                let stream = StandardConnector.connect(to, deadline, stop)?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                Server::Tcp(stream)
            }
            Target::Unix(path) => Server::Unix(connect_unix_unless(path, deadline, stop)?),
        };
        keep_alive(&self.client)?;
        if let Some(header) = header {
            let header = header.encode(self.from, self.client.local_addr()?);
            server.write_all(&header)?;
        }
        server.set_nonblocking()?;
        Ok(server)
    }

    fn carry(&self, shared: &Arc<Shared>, server: &Server) -> Result<(), Refusal> {
        let (mut out, mut back) = (Conduit::new()?, Conduit::new()?);
        // The next read or write finds a reset that is missed here.
        let watched = |side| token(self.number, Some(side));
        let _ = shared
            .epoll
            .add_news(&self.client, watched(Side::Client), false);
        let _ = shared.epoll.add_news(server, watched(Side::Server), false);
        thread::scope(|scope| {
            let returning = thread::Builder::new()
                .name(format!("dunlin-return-{}", self.number))
                .spawn_scoped(scope, || {
                    let pause = carry(&mut back, server, &self.client, &self.stop, |_| {
                        self.heard()
                    });
                    self.paused(pause, Side::Server, || {
                        self.client.shutdown(Shutdown::Write)
                    })
                });
            let going = match &returning {
                Ok(_) => {
                    let said = |count| {
                        self.said_bytes.fetch_add(count, Ordering::SeqCst);
                        self.heard();
                    };
                    let pause = carry(&mut out, &self.client, server, &self.stop, said);
                    self.paused(pause, Side::Client, || server.end())
                }
                Err(_) => Ok(()),
            };
            let returned = returning?.join();
            going.and(returned.unwrap_or_else(|_| Err(Refusal::Closed)))
        })
    }

    /// No bytes from `side` are in flight; `end` passes its end on.
    fn paused(
        &self,
        pause: Pause,
        side: Side,
        end: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), Refusal> {
        let error = match pause {
            Pause::Ended => {
                // Fails only if the peer has disconnected.
                let _ = end();
                self.ends(side);
                return Ok(());
            }
            Pause::Stopped if self.is_broken.load(Ordering::SeqCst) => return Ok(()),
            Pause::Stopped => return Err(Refusal::Cut),
            Pause::From(error) => {
                self.give_up();
                error
            }
            // Bytes of the receiver still arrive in the other direction, and then its end or failure.
            Pause::To(error) => {
                self.is_broken.store(true, Ordering::SeqCst);
                error
            }
        };
        // After both ends, either program may close in any way.
        let mut ended = self.has_ended.iter();
        match ended.any(|ended| ended.load(Ordering::SeqCst)) {
            true => Ok(()),
            false => Err(Refusal::Broken(error)),
        }
    }
}

/// Whether there is room for one more. Another client may be cut for it; the threads of that one
/// count until they have ended.
fn make_room(shared: &Shared, now: Instant) -> bool {
    let state = lock(&shared.state);
    let all: Vec<_> = state.forwarded.values().map(|one| one.activity()).collect();
    match room(shared.options.limits.forwarded, &all, now) {
        Room::Free => true,
        Room::Evict(number) => {
            if let Some(one) = state.forwarded.get(&number) {
                one.cut();
            }
            true
        }
        Room::Full => false,
    }
}

/// What the choice of a client to evict depends on.
#[derive(Clone, Copy, Debug)]
struct Activity {
    number: u64,
    /// It was cut, and its threads have not ended yet.
    is_leaving: bool,
    /// It has sent more than its hello.
    has_said_more: bool,
    /// When either side last sent something.
    last: Instant,
}

impl Activity {
    /// How long neither side has sent anything, if that is long enough to be evicted.
    fn idle(&self, now: Instant) -> Option<Duration> {
        let idle = now.saturating_duration_since(self.last);
        let limit = if self.has_said_more { IDLE } else { GRACE };
        (!self.is_leaving && idle >= limit).then_some(idle)
    }
}

/// Whether a new client has room.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    Free,
    /// There is room if the client with this number is cut.
    Evict(u64),
    Full,
}

/// Whether one more client has room among `all`, of which at most `most` stay.
fn room(most: usize, all: &[Activity], now: Instant) -> Room {
    if all.len() < most {
        return Room::Free;
    }
    let leaving = all.iter().filter(|one| one.is_leaving).count();
    if leaving >= LEAVING {
        return Room::Full;
    }
    if all.len() - leaving < most {
        return Room::Free;
    }
    let idle = |one: &Activity| Some((one.idle(now)?, one.number));
    match all.iter().filter_map(idle).max_by_key(|(idle, _)| *idle) {
        Some((_, number)) => Room::Evict(number),
        None => Room::Full,
    }
}

fn reset(stream: &TcpStream) {
    // Fails only if it has disconnected.
    let _ = set_reset_on_close(stream);
}

impl Server {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(true),
            Self::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    /// A socket that was just connected has room for a header.
    fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => { stream }.write_all(bytes),
            Self::Unix(stream) => { stream }.write_all(bytes),
        }
    }

    fn end(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    fn reset(&self) {
        match self {
            Self::Tcp(stream) => reset(stream),
            // A unix socket that is closed with unread bytes reports that to its peer (unix(7)).
            Self::Unix(_) => {}
        }
    }
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
