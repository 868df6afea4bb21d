//! Forwards clients to the backend, each on its own connection, with all bytes unchanged.
//!
//! Each forwarded client has two threads, and the number of clients is limited. At the limit, a new
//! client replaces a client that has been idle for a minimum time. If there are several such
//! clients, the client that has been idle for longest is replaced. The minimum is shorter for a
//! client that has sent only its hello. An active client is never evicted.

use dunlin_lane::sync::lock;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{connect_unix, set_reset_on_close};
use rustix::io::{ioctl_fionbio, retry_on_intr};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use super::forwarded::Forwarded;
use super::shared::Shared;
use super::token::{Side, token};
use super::{Backend, Event, Refusal, Target};
use crate::connect::keep_alive;
use dunlin_lane::dial::{Connector, StandardConnector};
use dunlin_lane::splice::{Pause, Stop, carry};
use dunlin_linux::splice::Conduit;

/// Idle time after which a client that has sent only its hello may be evicted. A well-behaved
/// client usually has answered the backend by then.
const GRACE: Duration = Duration::from_secs(1);
/// Idle time after which a client that has sent more than its hello may be evicted. A slow disk or
/// a busy backend usually makes a client wait for less than this time. A connection that a client
/// keeps open for later requests can be evicted.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum number of evicted clients that still have threads. They do not count towards the limit
/// of forwarded clients. Each has at most eight descriptors.
const LEAVING: usize = 8;

impl Forwarded {
    /// Forwards a client in new threads. Refuses the client and resets its connection if too many
    /// clients are forwarded, or if no descriptors or threads are left.
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
            false => Err(Refusal::TooManyForwarded(shared.options.limits.forwarded)),
        };
        let stop = match stop {
            Ok(stop) => stop,
            Err(refusal) => {
                reset(&client);
                return refused(refusal);
            }
        };
        let forwarded = Arc::new(Self {
            number,
            client,
            from,
            name: name.clone(),
            began: Instant::now(),
            hello_bytes: hello_bytes as u64,
            sent_bytes: AtomicU64::new(0),
            last_ms: AtomicU64::new(0),
            stop,
            is_broken: AtomicBool::new(false),
            has_failed: Default::default(),
            has_ended: Default::default(),
        });
        lock(&shared.state)
            .forwarded
            .insert(number, Arc::clone(&forwarded));
        let (on_thread, one) = (Arc::clone(shared), Arc::clone(&forwarded));
        let spawned = thread::Builder::new()
            .name(format!("dunlin-forward-{number}"))
            .spawn(move || one.run(&on_thread));
        if let Err(error) = spawned {
            forwarded.is_broken.store(true, Ordering::SeqCst);
            forwarded.remove(shared);
            refused(Refusal::Io(error));
        }
    }

    fn activity(&self) -> Activity {
        Activity {
            number: self.number,
            is_leaving: self.stop.is_requested(),
            has_sent_more: self.sent_bytes.load(Ordering::SeqCst) > self.hello_bytes,
            last: self.began + Duration::from_millis(self.last_ms.load(Ordering::SeqCst)),
        }
    }

    /// The body of the client's thread.
    fn run(&self, shared: &Arc<Shared>) {
        let result = match self.reach(shared) {
            Ok(backend) => {
                shared.report(&Event::Forwarded {
                    from: self.from,
                    name: self.name.clone(),
                });
                let result = self.carry(shared, &backend);
                if result.is_err() || self.is_broken.load(Ordering::SeqCst) {
                    self.is_broken.store(true, Ordering::SeqCst);
                    reset(&backend);
                }
                result
            }
            Err(error) => {
                self.is_broken.store(true, Ordering::SeqCst);
                Err(match self.stop.is_requested() {
                    true => Refusal::Aborted,
                    false => Refusal::BackendUnreachable(error),
                })
            }
        };
        self.remove(shared);
        if let Err(refusal) = result {
            shared.refused(self.from, self.name.clone(), refusal);
        }
    }

    /// Removes the client from the shared state, and resets its connection if forwarding has failed.
    fn remove(&self, shared: &Shared) {
        if self.is_broken.load(Ordering::SeqCst) {
            reset(&self.client);
        }
        lock(&shared.state).forwarded.remove(&self.number);
        shared.changed.notify_all();
    }

    /// Connects to the backend.
    fn reach(&self, shared: &Shared) -> io::Result<OwnedFd> {
        let Some(Backend { to, header }) = &shared.options.backend else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let deadline = Instant::now() + shared.options.limits.connect_timeout;
        let stop = self.stop.wakeup();
        let backend: OwnedFd = match to {
            Target::Tcp(to) => {
                let stream = StandardConnector.connect(to, deadline, stop)?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                stream.into()
            }
            Target::Unix(path) => connect_unix(path, deadline, stop)?.into(),
        };
        keep_alive(&self.client)?;
        if let Some(header) = header {
            let header = header.encode(self.from, self.client.local_addr()?);
            // The send buffer of a new socket has room for the whole header.
            retry_on_intr(|| send(&backend, &header, SendFlags::NOSIGNAL))?;
        }
        ioctl_fionbio(&backend, true)?;
        Ok(backend)
    }

    fn carry(&self, shared: &Arc<Shared>, backend: &OwnedFd) -> Result<(), Refusal> {
        let (mut out, mut back) = (Conduit::new()?, Conduit::new()?);
        // If this registration fails, a reset is reported only by the next read or write.
        let watched = |side| token(self.number, Some(side));
        let _ = shared
            .epoll
            .add_news(&self.client, watched(Side::Client), false);
        let _ = shared
            .epoll
            .add_news(backend, watched(Side::Backend), false);
        thread::scope(|scope| {
            let returning = thread::Builder::new()
                .name(format!("dunlin-return-{}", self.number))
                .spawn_scoped(scope, || {
                    let pause = carry(&mut back, backend, &self.client, &self.stop, |_| {
                        self.touch()
                    });
                    self.spliced(pause, Side::Backend, &self.client)
                });
            let going = match &returning {
                Ok(_) => {
                    let on_sent = |count| {
                        self.sent_bytes.fetch_add(count, Ordering::SeqCst);
                        self.touch();
                    };
                    let pause = carry(&mut out, &self.client, backend, &self.stop, on_sent);
                    self.spliced(pause, Side::Client, backend)
                }
                Err(_) => Ok(()),
            };
            let returned = returning?.join();
            going.and(returned.unwrap_or_else(|_| Err(Refusal::Disconnected)))
        })
    }

    /// Returns the outcome of splicing from `side` to `to`. `pause` is the reason why the splicing
    /// ended. If the stream from `side` has ended, shuts down the direction to `to`.
    fn spliced(&self, pause: Pause, side: Side, to: &impl AsFd) -> Result<(), Refusal> {
        let error = match pause {
            Pause::Ended => {
                // This fails only if the peer has disconnected.
                let _ = shutdown(to, Shutdown::Write);
                self.ends(side);
                return Ok(());
            }
            Pause::Stopped if self.is_broken.load(Ordering::SeqCst) => return Ok(()),
            Pause::Stopped => return Err(Refusal::Aborted),
            Pause::From(error) => {
                self.give_up();
                error
            }
            // `to` accepts no more bytes. The other direction still delivers the last bytes from
            // `to`, until the stream from `to` ends or fails.
            Pause::To(error) => {
                self.is_broken.store(true, Ordering::SeqCst);
                error
            }
        };
        // After a stream has ended, the client and the backend may close their connections in any
        // way, so errors are ignored.
        let mut ended = self.has_ended.iter();
        match ended.any(|ended| ended.load(Ordering::SeqCst)) {
            true => Ok(()),
            false => Err(Refusal::Broken(error)),
        }
    }
}

/// Returns whether one more client can be forwarded. Evicts another client if necessary. At most
/// [`LEAVING`] evicted clients may still have threads.
fn make_room(shared: &Shared, now: Instant) -> bool {
    let state = lock(&shared.state);
    let all: Vec<_> = state.forwarded.values().map(|one| one.activity()).collect();
    match room(shared.options.limits.forwarded, &all, now) {
        Room::Free => true,
        Room::Evict(number) => {
            if let Some(one) = state.forwarded.get(&number) {
                one.abort();
            }
            true
        }
        Room::Full => false,
    }
}

/// What decides whether a forwarded client is evicted.
#[derive(Clone, Copy, Debug)]
struct Activity {
    number: u64,
    /// Whether the client's threads have received the request to stop and have not ended yet.
    is_leaving: bool,
    /// Whether the client has sent more than its hello.
    has_sent_more: bool,
    /// When the client or the backend last sent bytes.
    last: Instant,
}

impl Activity {
    /// The idle time if the client may be evicted, otherwise `None`.
    fn idle(&self, now: Instant) -> Option<Duration> {
        let idle = now.saturating_duration_since(self.last);
        let limit = if self.has_sent_more { IDLE } else { GRACE };
        (!self.is_leaving && idle >= limit).then_some(idle)
    }
}

/// Whether a new client can be forwarded.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    Free,
    /// There is room after the client with this number is evicted.
    Evict(u64),
    Full,
}

/// Whether one more client can be forwarded, given `all` forwarded clients and the limit `most`.
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

/// Makes close(2) reset the connection (`SO_LINGER`). A unix socket ignores that option, but if it
/// is closed with unread bytes, its peer gets a reset.
fn reset(socket: impl AsFd) {
    // This fails only if the peer has disconnected.
    let _ = set_reset_on_close(socket);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
