//! A channel of a relay: the hypervisor's connection, a TLS connection, and one thread per
//! direction.
//!
//! Both threads share one TLS session, and hold its lock only while they seal or open records. Each
//! blocks in the read or write of a socket. A thread that finds the channel broken shuts both
//! sockets down, which wakes the other; the last thread to end closes them. If the kernel seals and
//! opens the records, `splice` has the bodies of the threads.

use dunlin_lane::sync::lock;
use dunlin_proto::text::harmless;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::socket::{Liveness, set_liveness, set_reset_on_close, wait_writable};
use dunlin_linux::tcp::{silence, unacknowledged_bytes};
use dunlin_proto::fault::FaultCode;

use super::CHANNEL_BYTES;
use crate::counted::Counted;
use crate::event::Event;
use crate::failure::Failure;
use crate::site::Site;
use crate::socket::Socket;
use crate::status::Status;
use dunlin_lane::handshake::relay::Relayed;
use dunlin_lane::record::{Alert, RECEIVED_RECORD_BYTES};
use dunlin_lane::relayed::session::Session;
use dunlin_lane::relayed::{Records, RelayError};
use dunlin_lane::splice::Stop;

/// Bytes that are sealed and sent at once, and bytes that are received at once. Each piece wakes a
/// thread, so larger pieces cost less CPU: docs/benchmarking.md has the figures.
///
/// Drawback: a busy direction holds twice as much, for the bytes and for their records.
const PIECE_BYTES: usize = 256 << 10;
/// After this time without a byte a direction frees its buffer.
const IDLE: Duration = Duration::from_secs(1);
/// How often a direction with a consumer that does not read checks whether the channel is aborted.
///
/// Drawback: a hypervisor that stalls notices an abort this much later.
/// Alternative: a shutdown would wake the thread at once, but the hypervisor would read an orderly
/// end, which an abort must not be.
pub(super) const STALL_LOOK: Duration = Duration::from_millis(20);

const _: () = assert!(PIECE_BYTES >= 2 * RECEIVED_RECORD_BYTES);
// A record is at most 29 bytes longer than its content, and rustls buffers one more per direction.
const _: () = assert!(CHANNEL_BYTES as usize >= 4 * PIECE_BYTES + 3 * RECEIVED_RECORD_BYTES);

/// The parts of a channel.
pub(super) struct Parts {
    pub(super) number: u32,
    pub(super) route: String,
    pub(super) socket: Socket,
    pub(super) relayed: Relayed,
    pub(super) counted: Counted,
}

impl Parts {
    /// Sets the options of the sockets. If the kernel moves the bytes, returns what stops each
    /// thread.
    ///
    /// # Errors
    /// The error of setsockopt(2), or out of descriptors.
    pub(super) fn prepare(&self, vanished: Duration) -> io::Result<Option<[Stop; 2]>> {
        keep_alive(&self.relayed.stream, vanished)?;
        if let Records::Kernel(..) = self.relayed.records {
            // The hypervisor's socket is in non-blocking mode until [`Socket::block`].
            self.relayed.stream.set_nonblocking(true)?;
            return Ok(Some([Stop::new()?, Stop::new()?]));
        }
        self.relayed.stream.set_read_timeout(Some(IDLE))?;
        self.socket.block(IDLE, STALL_LOOK)?;
        Ok(None)
    }

    /// Aborts both connections.
    pub(super) fn refuse(self, failure: &Failure) {
        self.socket.fail(failure);
        // Fails only if the connection is closed.
        let _ = set_reset_on_close(&self.relayed.stream);
    }
}

/// The TLS connection of a channel, with records that this process seals and opens.
struct Process {
    session: Session,
    /// The buffer for sealed records. Its lock is held from sealing to sending, because records
    /// must be sent in the order of their numbers.
    sending: Mutex<Vec<u8>>,
}

pub(super) struct Channel {
    pub(super) number: u32,
    route: String,
    peer: String,
    at: SocketAddr,
    pub(super) plain: Socket,
    pub(super) tls: TcpStream,
    /// Why the channel is aborted; the first reason is kept.
    broken: Mutex<Option<Failure>>,
    pub(super) is_broken: AtomicBool,
    /// The peer's connection was reset; its reader may not have noticed.
    pub(super) is_reset: AtomicBool,
    /// The peer has ended its direction in order.
    pub(super) has_closed: AtomicBool,
    /// Data was sent after that.
    pub(super) has_sent_since: AtomicBool,
    /// This side has ended its direction.
    pub(super) has_said_closed: AtomicBool,
    /// At the last check, an answer of the peer was overdue.
    was_silent: AtomicBool,
    /// The number of threads that have not ended.
    threads: AtomicU8,
    /// If the kernel moves the bytes: wakes the outbound and the inbound thread.
    pub(super) stops: Option<[Stop; 2]>,
    site: Arc<Site>,
    /// Dropped when both threads have ended.
    counted: Mutex<Option<Counted>>,
}

impl Channel {
    /// Makes a channel of prepared parts. Returns it with the records for its threads.
    pub(super) fn new(
        site: &Arc<Site>,
        parts: Parts,
        stops: Option<[Stop; 2]>,
    ) -> (Arc<Self>, Records) {
        let Relayed {
            stream,
            at,
            peer,
            records,
        } = parts.relayed;
        match &records {
            Records::Process(session) => session.renew_after(site.limits.lane_records),
            Records::Kernel(sealing, _) => sealing.renew_after(site.limits.lane_records),
        }
        let channel = Self {
            number: parts.number,
            route: parts.route,
            peer: harmless(&peer.to_string()),
            at,
            plain: parts.socket,
            tls: stream,
            broken: Mutex::new(None),
            is_broken: AtomicBool::new(false),
            is_reset: AtomicBool::new(false),
            has_closed: AtomicBool::new(false),
            has_sent_since: AtomicBool::new(false),
            has_said_closed: AtomicBool::new(false),
            was_silent: AtomicBool::new(false),
            threads: AtomicU8::new(2),
            stops,
            site: Arc::clone(site),
            counted: Mutex::new(Some(parts.counted)),
        };
        (Arc::new(channel), records)
    }

    /// Starts the threads.
    pub(super) fn start(self: &Arc<Self>, records: Records) {
        let (outward, inward) = (Arc::clone(self), Arc::clone(self));
        match records {
            Records::Process(session) => {
                let tls = Arc::new(Process {
                    session,
                    sending: Mutex::default(),
                });
                let own = Arc::clone(&tls);
                self.spawn("out", move || outward.done(outward.carry_out(&own)));
                self.spawn("in", move || inward.done(inward.carry_in(&tls)));
            }
            Records::Kernel(sealing, opening) => {
                let sealing = Arc::new(Mutex::new(sealing));
                let own = Arc::clone(&sealing);
                self.spawn("out", move || outward.done(outward.splice_out(&own)));
                self.spawn("in", move || {
                    inward.done(inward.splice_in(&sealing, opening))
                });
            }
        }
    }

    fn spawn(&self, way: &str, body: impl FnOnce() + Send + 'static) {
        let name = format!("dunlin-relay-{}-{way}", self.number);
        if !self.site.spawn(name, body) {
            self.done(Err(Failure::new(
                FaultCode::Kernel,
                "cannot start a thread",
            )));
        }
    }

    /// A thread has ended. The last one reports the end of the channel.
    fn done(&self, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.abort(failure);
        }
        if self.threads.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        // Free the place before the end is reported: the next connection may follow at once.
        drop(lock(&self.counted).take());
        let (route, channel) = (self.route.clone(), self.number);
        self.site.report(match self.lock_broken().take() {
            Some(failure) => Event::Aborted {
                route,
                channel,
                failure,
            },
            None => {
                self.plain.ended_well();
                Event::Closed { route, channel }
            }
        });
    }

    /// Aborts the channel and wakes its threads. Both connections are reset when the threads have
    /// ended.
    pub(super) fn abort(&self, failure: Failure) {
        let mut broken = self.lock_broken();
        if self.is_broken.swap(true, Ordering::SeqCst) {
            return;
        }
        self.plain.fail(&failure);
        *broken = Some(failure);
        drop(broken);
        // All of these fail only if a connection is closed.
        let _ = set_reset_on_close(&self.tls);
        let _ = self.tls.shutdown(Shutdown::Both);
        self.plain.stop_reading();
        for stop in self.stops.iter().flatten() {
            stop.request();
        }
    }

    /// Whether both threads have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.threads.load(Ordering::SeqCst) == 0
    }

    fn lock_broken(&self) -> MutexGuard<'_, Option<Failure>> {
        lock(&self.broken)
    }

    /// The watch has found that a socket failed.
    pub(super) fn has_failed(&self, is_tls: bool) {
        if is_tls {
            // An end may have arrived before the reset, so the reader decides.
            self.is_reset.store(true, Ordering::SeqCst);
            if let Some([_, inward]) = &self.stops {
                inward.request();
            }
            // After the end no thread reads.
            if self.has_closed.load(Ordering::SeqCst) {
                self.is_lost_behind_its_end();
            }
        } else {
            self.abort(of_hypervisor(&self.plain.error()));
        }
    }

    /// The peer's connection failed after the peer's end. Aborts the channel if this side has not
    /// sent its own end: data that is unsent or unacknowledged is lost.
    fn is_lost_behind_its_end(&self) {
        if !self.has_said_closed.load(Ordering::SeqCst) {
            self.abort(self.lost("closed by the peer before this side's end"));
        }
    }

    /// Checks whether the peer answers. The channel is aborted if two checks in a row find it
    /// overdue: what is overdue at the first check may have been sent just before, after a long
    /// silence on both sides.
    pub(super) fn look(&self, vanished: Duration) {
        let Ok(silent) = silence(&self.tls) else {
            return;
        };
        let is_silent = silent.is_overdue(vanished);
        let was_silent = self.was_silent.swap(is_silent, Ordering::SeqCst);
        if is_silent && was_silent {
            self.abort(self.lost("peer vanished: sent data is not acknowledged"));
        }
    }

    pub(super) fn status(&self) -> Status {
        Status {
            peer: self.peer.clone(),
            at: self.at,
            channels: vec![self.route.clone()],
            lanes: 1,
            held_bytes: 0,
            // A socket that returns an error has failed and holds nothing.
            unacknowledged_bytes: unacknowledged_bytes(&self.tls).unwrap_or(0),
        }
    }

    pub(super) fn lost(&self, why: &str) -> Failure {
        let text = format!("connection to {} at {} lost: {why}", self.peer, self.at);
        Failure::new(FaultCode::LaneLost, text)
    }

    pub(super) fn of_io(&self, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::TimedOut => {
                self.lost("peer vanished: keep-alive probes are not answered")
            }
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                self.lost("closed without close_notify")
            }
            _ => self.lost(&error.to_string()),
        }
    }

    pub(super) fn of_tls(&self, error: &RelayError) -> Failure {
        // Alerts that servers send about a client's certificate after the handshake.
        let code = match error {
            RelayError::PeerAlert(Alert(40..=51 | 116)) => FaultCode::Unauthorised,
            _ => FaultCode::LaneLost,
        };
        let text = format!("connection to {} at {} failed: {error}", self.peer, self.at);
        Failure::new(code, text)
    }

    /// Carries the hypervisor's bytes to the peer.
    fn carry_out(&self, tls: &Process) -> Result<(), Failure> {
        let mut content = vec![0; PIECE_BYTES];
        loop {
            let count = match self.plain.read(&mut content) {
                Ok(count) => count,
                Err(error) if is_early(&error) => {
                    drop(std::mem::take(&mut content));
                    drop(std::mem::take(&mut *lock(&tls.sending)));
                    self.wait(&self.plain);
                    content = vec![0; PIECE_BYTES];
                    continue;
                }
                Err(error) => return self.unless_broken(of_hypervisor(&error)),
            };
            if self.is_broken.load(Ordering::SeqCst) {
                return Ok(());
            }
            if count == 0 {
                return self.say_closed(|| self.send(tls, None));
            }
            if self.has_closed.load(Ordering::SeqCst) {
                self.has_sent_since.store(true, Ordering::SeqCst);
            }
            self.send(tls, Some(&content[..count]))?;
            self.send_pending(tls)?;
        }
    }

    /// Ends the direction to the peer; `send` sends the end.
    pub(super) fn say_closed(
        &self,
        send: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.has_said_closed.store(true, Ordering::SeqCst);
        let has_missed_something = self.has_sent_since.load(Ordering::SeqCst);
        match send() {
            // A peer that has sent its end and closed misses nothing.
            Err(_) if self.has_closed.load(Ordering::SeqCst) && !has_missed_something => Ok(()),
            sent => sent,
        }
    }

    /// Seals and sends content, or the end of this direction.
    fn send(&self, tls: &Process, content: Option<&[u8]>) -> Result<(), Failure> {
        let mut records = lock(&tls.sending);
        let count = tls.session.seal(content, &mut records);
        let count = count.map_err(|error| self.of_tls(&error))?;
        self.write_tls(&records[..count])
    }

    /// Sends pending TLS messages, even while the hypervisor sends nothing. If the other thread is
    /// sending, or the peer is not reading, a later call sends them: a thread that reads from the
    /// peer must not wait until the peer reads.
    fn send_pending(&self, tls: &Process) -> Result<(), Failure> {
        if !tls.session.is_pending() {
            return Ok(());
        }
        let Some(_sending) = try_lock(&tls.sending) else {
            return Ok(());
        };
        match wait_writable(&self.tls, Instant::now()) {
            Ok(true) => self.write_tls(&tls.session.take_pending()),
            // The next write reports the error.
            Ok(false) | Err(_) => Ok(()),
        }
    }

    fn write_tls(&self, records: &[u8]) -> Result<(), Failure> {
        match (&self.tls).write_all(records) {
            Ok(()) => Ok(()),
            Err(error) => self.unless_broken(self.of_io(&error)),
        }
    }

    /// Carries the peer's bytes to the hypervisor.
    fn carry_in(&self, tls: &Process) -> Result<(), Failure> {
        let mut records = vec![0; PIECE_BYTES];
        let mut content = Vec::with_capacity(PIECE_BYTES);
        let mut filled = 0;
        loop {
            match (&self.tls).read(&mut records[filled..]) {
                Ok(0) => return self.unless_broken(self.lost("closed without close_notify")),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if is_early(&error) => {
                    if filled == 0 {
                        drop((std::mem::take(&mut records), std::mem::take(&mut content)));
                        self.wait(&self.tls);
                        records = vec![0; PIECE_BYTES];
                        content = Vec::with_capacity(PIECE_BYTES);
                    }
                    continue;
                }
                Err(error) => return self.unless_broken(self.of_io(&error)),
            }
            content.clear();
            let opened = tls.session.open(&mut records[..filled], &mut content);
            let opened = opened.map_err(|error| self.of_tls(&error))?;
            self.write(&content, opened.is_over)?;
            if opened.is_over {
                self.has_closed.store(true, Ordering::SeqCst);
                if self.is_broken.load(Ordering::SeqCst) {
                    return Ok(());
                }
                self.plain.end();
                return Ok(());
            }
            records.copy_within(opened.taken..filled, 0);
            filled -= opened.taken;
            self.send_pending(tls)?;
        }
    }

    /// Writes all bytes to the hypervisor, however long that takes. Once the peer's end vouches for
    /// the bytes, a reset does not abort the write.
    fn write(&self, mut content: &[u8], is_over: bool) -> Result<(), Failure> {
        while !content.is_empty() {
            match self.plain.write(content) {
                Ok(count) => content = &content[count..],
                Err(error) if is_early(&error) => {
                    if self.is_broken.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                    if !is_over && self.is_reset.load(Ordering::SeqCst) {
                        return Err(self.lost("connection reset"));
                    }
                }
                Err(error) => return self.unless_broken(of_hypervisor(&error)),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, without a timeout.
    fn wait(&self, socket: &impl AsFd) {
        let interest = Interest::read(&socket);
        // The next read reports the error.
        let _ = poll(&[interest], None);
    }

    /// Discards the failure of a thread that was woken because the channel is aborted.
    pub(super) fn unless_broken<T: Default>(&self, failure: Failure) -> Result<T, Failure> {
        if self.is_broken.load(Ordering::SeqCst) {
            Ok(T::default())
        } else {
            Err(failure)
        }
    }
}

/// Locks the mutex, unless another thread holds it.
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(super) fn of_hypervisor(error: &io::Error) -> Failure {
    let what = "the hypervisor's connection failed";
    Failure::new(FaultCode::ChannelBroken, what).because(error)
}

/// Whether the socket's timeout has passed. A connection that failed because its peer does not
/// answer has another error kind.
fn is_early(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// Sets keep-alive so that a vanished peer is noticed within `vanished`. `watch` limits how long
/// data may stay unacknowledged: the kernel's own limit would also end the connection of a peer
/// that answers but does not read.
fn keep_alive(stream: &TcpStream, vanished: Duration) -> io::Result<()> {
    let liveness = Liveness {
        keepalive_idle: vanished / 2,
        keepalive_interval: vanished / 8,
        keepalive_probes: 3,
        user_timeout: Duration::ZERO,
    };
    set_liveness(stream, &liveness)
}
