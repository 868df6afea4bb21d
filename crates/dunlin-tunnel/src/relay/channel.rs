//! A relay's channel: a hypervisor's connection, a TLS connection, and a thread for each direction
//! between them.
//!
//! Both threads share one TLS session of rustls, and its lock, only while records are sealed or
//! opened. Each waits in its socket's own read or write. A thread that finds the channel broken
//! shuts both sockets down, which wakes the other; the last to go closes them. Where the kernel
//! seals and opens, `splice` has the threads' bodies.

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

/// Bytes that are sealed and sent at once, and that are received at once. A relay is one thread
/// each way that is woken for each piece, so larger pieces cost less: docs/benchmarking.md has
/// the figures.
///
/// Drawback: a direction that is busy keeps twice as much, for the bytes and for their records.
const PIECE_BYTES: usize = 256 << 10;
/// After so long without a byte a direction gives its buffer back.
const IDLE: Duration = Duration::from_secs(1);
/// How often a direction whose consumer does not read looks whether the channel stands.
///
/// Drawback: an abort reaches a hypervisor that stalls so much later.
/// Alternative: a shutdown would wake the thread at once, and end the connection in order, which
/// is what an abort must not do.
pub(super) const STALL_LOOK: Duration = Duration::from_millis(20);

const _: () = assert!(PIECE_BYTES >= 2 * RECEIVED_RECORD_BYTES);
// A record is at most 29 bytes longer than its content, and rustls holds one more each way.
const _: () = assert!(CHANNEL_BYTES as usize >= 4 * PIECE_BYTES + 3 * RECEIVED_RECORD_BYTES);

/// What a channel is made of.
pub(super) struct Parts {
    pub(super) number: u32,
    pub(super) route: String,
    pub(super) socket: Socket,
    pub(super) relayed: Relayed,
    pub(super) counted: Counted,
}

impl Parts {
    /// Sets what its sockets are to do. Where the kernel moves the bytes, what stops it.
    ///
    /// # Errors
    /// What setsockopt(2) says, or no descriptors are left.
    pub(super) fn prepare(&self, vanished: Duration) -> io::Result<Option<[Stop; 2]>> {
        keep_alive(&self.relayed.stream, vanished)?;
        if let Records::Kernel(..) = self.relayed.records {
            // A hypervisor's socket never blocks unless it is told to.
            self.relayed.stream.set_nonblocking(true)?;
            return Ok(Some([Stop::new()?, Stop::new()?]));
        }
        self.relayed.stream.set_read_timeout(Some(IDLE))?;
        self.socket.block(IDLE, STALL_LOOK)?;
        Ok(None)
    }

    /// Gives both connections up.
    pub(super) fn refuse(self, failure: &Failure) {
        self.socket.fail(failure);
        // Fails only where it has gone.
        let _ = set_reset_on_close(&self.relayed.stream);
    }
}

/// The TLS connection of a channel whose records this process seals and opens.
struct Process {
    session: Session,
    /// Held from when records are sealed until they are sent, since they must be sent in the order
    /// of their numbers. The bytes are room for them.
    sending: Mutex<Vec<u8>>,
}

pub(super) struct Channel {
    pub(super) number: u32,
    route: String,
    peer: String,
    at: SocketAddr,
    pub(super) plain: Socket,
    pub(super) tls: TcpStream,
    /// Why it is given up; the first reason counts.
    broken: Mutex<Option<Failure>>,
    pub(super) is_broken: AtomicBool,
    /// The peer's connection was reset, which the thread that reads it may not know yet.
    pub(super) is_reset: AtomicBool,
    /// The peer has ended its direction in order.
    pub(super) has_closed: AtomicBool,
    /// Data was sent behind that.
    pub(super) has_sent_since: AtomicBool,
    /// This side has ended its direction.
    pub(super) has_said_closed: AtomicBool,
    /// At the last look something was due from the peer for longer than it may be.
    was_silent: AtomicBool,
    /// Threads that have not ended.
    threads: AtomicU8,
    /// Where the kernel moves the bytes: wakes the thread that carries them out, and in.
    pub(super) stops: Option<[Stop; 2]>,
    site: Arc<Site>,
    /// Until its threads have ended.
    counted: Mutex<Option<Counted>>,
}

impl Channel {
    /// A channel of parts that are prepared, and the records for its threads.
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

    /// Starts its threads.
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

    /// A thread has ended.
    fn done(&self, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.abort(failure);
        }
        if self.threads.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        // Before the end is reported: the next connection may follow at once.
        drop(lock(&self.counted).take());
        let (route, channel) = (self.route.clone(), self.number);
        self.site.tell(match self.lock_broken().take() {
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

    /// Gives the channel up. Both connections are reset when its threads are gone, which are woken.
    pub(super) fn abort(&self, failure: Failure) {
        let mut broken = self.lock_broken();
        if self.is_broken.swap(true, Ordering::SeqCst) {
            return;
        }
        self.plain.fail(&failure);
        *broken = Some(failure);
        drop(broken);
        // All of these fail only where a connection has gone.
        let _ = set_reset_on_close(&self.tls);
        let _ = self.tls.shutdown(Shutdown::Both);
        self.plain.stop_reading();
        for stop in self.stops.iter().flatten() {
            stop.tell();
        }
    }

    /// Whether its threads have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.threads.load(Ordering::SeqCst) == 0
    }

    fn lock_broken(&self) -> MutexGuard<'_, Option<Failure>> {
        lock(&self.broken)
    }

    /// The watch has found a socket that failed.
    pub(super) fn has_failed(&self, is_tls: bool) {
        if is_tls {
            // What came before it may be an end, so it is the reader's to find.
            self.is_reset.store(true, Ordering::SeqCst);
            if let Some([_, inward]) = &self.stops {
                inward.tell();
            }
            // Behind the end nobody reads any more.
            if self.has_closed.load(Ordering::SeqCst) {
                self.is_lost_behind_its_end();
            }
        } else {
            self.abort(of_hypervisor(&self.plain.error()));
        }
    }

    /// The peer's connection has failed when it had said its last: what is still to be sent, or is
    /// not acknowledged, does not arrive.
    fn is_lost_behind_its_end(&self) {
        if !self.has_said_closed.load(Ordering::SeqCst) {
            self.abort(self.lost("it was cut when this side had not ended"));
        }
    }

    /// Looks whether the peer is there. Two looks in a row must find it silent: what is due by
    /// the first may have been sent just before, after a long silence of both.
    pub(super) fn look(&self, vanished: Duration) {
        let Ok(silent) = silence(&self.tls) else {
            return;
        };
        let is_silent = silent.is_overdue(vanished);
        let was_silent = self.was_silent.swap(is_silent, Ordering::SeqCst);
        if is_silent && was_silent {
            self.abort(self.lost("it vanished: nothing that was sent is acknowledged"));
        }
    }

    pub(super) fn status(&self) -> Status {
        Status {
            peer: self.peer.clone(),
            at: self.at,
            channels: vec![self.route.clone()],
            lanes: 1,
            held_bytes: 0,
            // A socket that cannot tell has failed, and has nothing.
            unacknowledged_bytes: unacknowledged_bytes(&self.tls).unwrap_or(0),
        }
    }

    pub(super) fn lost(&self, why: &str) -> Failure {
        let text = format!(
            "the connection to {} at {} is lost: {why}",
            self.peer, self.at
        );
        Failure::new(FaultCode::LaneLost, text)
    }

    pub(super) fn of_io(&self, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::TimedOut => self.lost("it vanished: it answers no probe"),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                self.lost("it was cut, and not closed")
            }
            _ => self.lost(&error.to_string()),
        }
    }

    pub(super) fn of_tls(&self, error: &RelayError) -> Failure {
        // What servers say of a client's certificate, after its handshake is complete.
        let code = match error {
            RelayError::PeerAlert(Alert(40..=51 | 116)) => FaultCode::Unauthorised,
            _ => FaultCode::LaneLost,
        };
        let text = format!(
            "the connection to {} at {} is over: {error}",
            self.peer, self.at
        );
        Failure::new(code, text)
    }

    /// The hypervisor's bytes, to the peer.
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

    /// Ends the direction to the peer, for which `send` sends the end.
    pub(super) fn say_closed(
        &self,
        send: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.has_said_closed.store(true, Ordering::SeqCst);
        let has_missed_something = self.has_sent_since.load(Ordering::SeqCst);
        match send() {
            // Nothing is missed by a peer that has said its last and gone.
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

    /// Sends what TLS itself has to say, also while the hypervisor sends nothing. If the other
    /// thread is sending, or the peer is not reading, the next piece or the next call takes it:
    /// no thread that reads from the peer may wait until the peer reads.
    fn send_pending(&self, tls: &Process) -> Result<(), Failure> {
        if !tls.session.is_pending() {
            return Ok(());
        }
        let Some(_sending) = try_lock(&tls.sending) else {
            return Ok(());
        };
        match wait_writable(&self.tls, Instant::now()) {
            Ok(true) => self.write_tls(&tls.session.take_pending()),
            // Sending tells what is wrong, if something is.
            Ok(false) | Err(_) => Ok(()),
        }
    }

    fn write_tls(&self, records: &[u8]) -> Result<(), Failure> {
        match (&self.tls).write_all(records) {
            Ok(()) => Ok(()),
            Err(error) => self.unless_broken(self.of_io(&error)),
        }
    }

    /// The peer's bytes, to the hypervisor.
    fn carry_in(&self, tls: &Process) -> Result<(), Failure> {
        let mut records = vec![0; PIECE_BYTES];
        let mut content = Vec::with_capacity(PIECE_BYTES);
        let mut filled = 0;
        loop {
            match (&self.tls).read(&mut records[filled..]) {
                Ok(0) => return self.unless_broken(self.lost("it was cut, and not closed")),
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

    /// Writes all of it to the hypervisor, however long it takes to read it. Behind what the
    /// peer's end vouches for a reset changes nothing.
    fn write(&self, mut content: &[u8], is_over: bool) -> Result<(), Failure> {
        while !content.is_empty() {
            match self.plain.write(content) {
                Ok(count) => content = &content[count..],
                Err(error) if is_early(&error) => {
                    if self.is_broken.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                    if !is_over && self.is_reset.load(Ordering::SeqCst) {
                        return Err(self.lost("it was reset"));
                    }
                }
                Err(error) => return self.unless_broken(of_hypervisor(&error)),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, without end.
    fn wait(&self, socket: &impl AsFd) {
        let interest = Interest::read(&socket);
        // Reading tells what is wrong, if something is.
        let _ = poll(&[interest], None);
    }

    /// What was found by a thread that has been woken to end is no news.
    pub(super) fn unless_broken<T: Default>(&self, failure: Failure) -> Result<T, Failure> {
        if self.is_broken.load(Ordering::SeqCst) {
            Ok(T::default())
        } else {
            Err(failure)
        }
    }
}

/// The lock, unless another thread has it.
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

/// Whether a socket's time-out has passed; what has failed for want of answers says something else.
fn is_early(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// Keep-alive that notices within `vanished`. How long sent data may stay unacknowledged is for
/// `watch` to see: the kernel's own limit would also end the connection of a peer that is there
/// and does not read.
fn keep_alive(stream: &TcpStream, vanished: Duration) -> io::Result<()> {
    let liveness = Liveness {
        keepalive_idle: vanished / 2,
        keepalive_interval: vanished / 8,
        keepalive_probes: 3,
        user_timeout: Duration::ZERO,
    };
    set_liveness(stream, &liveness)
}
