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
pub(crate) mod fuzz;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::negotiate::{MAGIC, Opening, PRELUDE_BYTES, Prelude};
use dunlin_proto::wire::DecodeError;
use dunlin_sys::poll::{Interest, Wakeup, poll};
use dunlin_sys::socket::set_backlog;
use rustls::{Connection, ServerConnection};
use thiserror::Error;

use super::control::ControlStream;
use super::handshake::relay::{Greeting, Relayed};
use super::handshake::{
    FLIGHT_LIMIT_BYTES, HandshakeError, Secured, halves, parameters, peer_identity,
};
use super::identity::ServerTls;
use super::peers::PeerIdentity;
use super::policy::ServerSettings;
use super::record::{HEADER_BYTES, RECEIVED_RECORD_BYTES};

/// Connections that are not authenticated yet, at the same time. Each costs
/// at most [`FLIGHT_LIMIT_BYTES`] and what rustls keeps, so that all of them
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
/// Connections that the kernel holds until they are accepted.
///
/// Formula: what Linux allows by default (`net.core.somaxconn`).
/// Drawback: behind so many who connect at once a peer waits for them all to be accepted,
/// which takes some tenths of a second.
/// Alternative: the standard library's 128, which a burst fills within milliseconds; whoever
/// comes then is told nothing and tries again after a second, then after two.
const BACKLOG: u16 = 4096;
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
pub(crate) enum RelayArrival {
    /// Its peer is authenticated.
    Secured(Box<Relayed>),
    /// As [`Arrival::Rejected`].
    Rejected {
        from: SocketAddr,
        reason: RejectReason,
    },
    /// As [`Arrival::Starved`].
    Starved(io::Error),
}

/// The same for a relay, whose peers are any TLS clients: they are accepted when their handshake
/// is complete.
pub(crate) fn accept_relayed(
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
    set_backlog(listener, BACKLOG)?;
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
fn is_shortage(error: &io::Error) -> bool {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    matches!(
        error.raw_os_error(),
        Some(ENOMEM | ENFILE | EMFILE | ENOBUFS)
    )
}

/// One connection whose opening is not complete.
struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    deadline: Instant,
    stage: Stage,
    opening: Vec<u8>,
    prelude: Option<Prelude>,
}

enum Stage {
    /// Nothing has come.
    Silent,
    /// TLS: the handshake, then the opening within it.
    Tls(Box<Handshake>),
    /// A plain lane's opening.
    Plain,
    /// The handshake of a relay's client.
    Relay(Box<Greeting>),
    /// Refused; waits for the peer to fetch the alert.
    Lingering,
}

struct Handshake {
    settings: Arc<ServerSettings>,
    connection: ServerConnection,
    reading: Reading,
    peer: Option<PeerIdentity>,
}

enum Step {
    Wait,
    Complete,
    Refused(RejectReason),
    Gone,
}

impl Pending {
    fn new(stream: TcpStream, from: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            from,
            deadline: Instant::now() + OPENING_DEADLINE,
            stage: Stage::Silent,
            opening: Vec::new(),
            prelude: None,
        })
    }

    /// How far it has got: refused, silent, with a first byte, with a first
    /// record of a handshake. An attacker who gets to the last has made us sign,
    /// and is the only one who competes with honest peers.
    fn progress(&self) -> u8 {
        match &self.stage {
            Stage::Lingering => 0,
            Stage::Silent => 1,
            Stage::Plain => 2,
            Stage::Tls(handshake) if handshake.reading.received == 0 => 2,
            Stage::Relay(greeting) if greeting.is_fresh() => 2,
            Stage::Tls(_) | Stage::Relay(_) => 3,
        }
    }

    /// Since it was accepted.
    fn age(&self) -> Duration {
        OPENING_DEADLINE.saturating_sub(self.deadline.saturating_duration_since(Instant::now()))
    }

    fn wants_write(&self) -> bool {
        match &self.stage {
            Stage::Tls(tls) => tls.connection.wants_write(),
            Stage::Relay(greeting) => greeting.wants_write(),
            Stage::Silent | Stage::Plain | Stage::Lingering => false,
        }
    }

    fn lingers(&self) -> bool {
        matches!(self.stage, Stage::Lingering)
    }

    fn rejected(self, reason: RejectReason) -> Came {
        Came::Rejected {
            from: self.from,
            reason,
        }
    }

    /// Waits a moment before closing: closing a socket with unread bytes in it
    /// resets the connection, and a reset destroys the alert on its way.
    fn linger(&mut self, now: Instant) {
        // A failure means that nobody is left to fetch the alert.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stage = Stage::Lingering;
        self.deadline = now + LINGER;
    }

    fn advance(&mut self, purpose: Purpose<'_>) -> Step {
        match self.try_advance(purpose) {
            Ok(true) => Step::Complete,
            Ok(false) => Step::Wait,
            Err(_) if self.lingers() => Step::Gone,
            Err(reason) => Step::Refused(reason),
        }
    }

    /// Goes on until the socket has no more or the opening is complete.
    fn try_advance(&mut self, purpose: Purpose<'_>) -> Result<bool, RejectReason> {
        loop {
            match &mut self.stage {
                Stage::Silent => {
                    let mut first = [0];
                    match self.stream.peek(&mut first) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        Ok(_) => {}
                        Err(error) => return would_block(error),
                    }
                    self.stage = match (first[0], purpose) {
                        // The content type of a handshake (RFC 8446, section 5.1).
                        (22, Purpose::Lanes(tls)) => Stage::Tls(Box::new(Handshake::new(tls)?)),
                        (22, Purpose::Relay(tls)) => Stage::Relay(Box::new(Greeting::new(tls)?)),
                        (byte, Purpose::Lanes(_)) if byte == MAGIC[0] => Stage::Plain,
                        (byte, _) => return Err(RejectReason::Unknown(byte)),
                    };
                }
                Stage::Plain => {
                    let wanted = wanted(&self.opening, &mut self.prelude)?;
                    if wanted == 0 {
                        return Ok(true);
                    }
                    let mut part = vec![0; wanted];
                    match self.stream.read(&mut part) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        Ok(count) => self.opening.extend_from_slice(&part[..count]),
                        Err(error) => return would_block(error),
                    }
                }
                Stage::Tls(handshake) => {
                    if let Err(error) = handshake.write(&self.stream) {
                        return would_block(error);
                    }
                    let handshaking = handshake.connection.is_handshaking();
                    if !handshaking {
                        let common: &rustls::CommonState = &handshake.connection;
                        if handshake.peer.is_none() {
                            let peers = &handshake.settings.peers;
                            handshake.peer = Some(peer_identity(common, peers)?);
                        }
                        let wanted = wanted(&self.opening, &mut self.prelude)?;
                        if wanted == 0 {
                            return Ok(true);
                        }
                        if handshake.take_plaintext(wanted, &mut self.opening)? {
                            continue;
                        }
                    }
                    if !handshake.reading.next(&self.stream)? {
                        return Ok(false);
                    }
                    if let Err(error) = handshake.process() {
                        // Best effort: the first error is the one to report.
                        let _ = handshake.write(&self.stream);
                        return Err(error.into());
                    }
                }
                Stage::Relay(greeting) => return greeting.advance(&self.stream),
                Stage::Lingering => {
                    let mut scrap = [0; 4096];
                    match self.stream.read(&mut scrap) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        // One read a turn: a peer that sends without end gets
                        // no more than its turn.
                        Ok(_) => return Ok(false),
                        Err(error) => return would_block(error),
                    }
                }
            }
        }
    }

    fn arrive_relayed(self) -> RelayArrival {
        let from = self.from;
        let Stage::Relay(greeting) = self.stage else {
            let reason = HandshakeError::PeerClosed.into();
            return RelayArrival::Rejected { from, reason };
        };
        match greeting.finish(self.stream, from) {
            Ok(relayed) => RelayArrival::Secured(Box::new(relayed)),
            Err(reason) => RelayArrival::Rejected { from, reason },
        }
    }

    fn arrive(self) -> Arrival {
        let from = self.from;
        self.try_arrive()
            .unwrap_or_else(|reason| Arrival::Rejected { from, reason })
    }

    fn try_arrive(self) -> Result<Arrival, RejectReason> {
        let prelude = self.prelude.ok_or(HandshakeError::PeerClosed)?;
        let opening = Opening::decode(&prelude, &self.opening[PRELUDE_BYTES..])?;
        self.stream.set_nonblocking(false)?;
        let Stage::Tls(handshake) = self.stage else {
            let socket = LaneSocket::Plain(self.stream);
            return Ok(Arrival::Lane { socket, opening });
        };
        if !matches!(opening, Opening::Lane(_)) {
            let stream = ControlStream::established(
                self.stream,
                Connection::from(handshake.connection),
                &handshake.settings.peers,
                handshake.settings.provider,
            )?
            .made_with(handshake.settings);
            return Ok(Arrival::Control { stream, opening });
        }
        let peer = handshake.peer.ok_or(HandshakeError::NoCertificate)?;
        let provider = handshake.settings.provider;
        let parameters = parameters(&handshake.connection, provider)?;
        let secrets = handshake
            .connection
            .dangerous_extract_secrets()
            .map_err(HandshakeError::from)?;
        let (seal, open) =
            halves(secrets, provider).map_err(|error| HandshakeError::Local(error.to_string()))?;
        let socket = LaneSocket::Tls(Box::new(Secured {
            stream: self.stream,
            peer,
            parameters,
            seal,
            open,
        }));
        Ok(Arrival::Lane { socket, opening })
    }
}

impl Handshake {
    fn new(tls: &ServerTls) -> Result<Self, HandshakeError> {
        let settings = tls.settings();
        Ok(Self {
            connection: ServerConnection::new(Arc::clone(&settings.config))?,
            settings,
            reading: Reading::default(),
            peer: None,
        })
    }

    fn write(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut stream)?;
        }
        stream.flush()
    }

    /// Gives the record to rustls.
    fn process(&mut self) -> Result<(), HandshakeError> {
        let mut unread = &self.reading.record[..];
        while !unread.is_empty() {
            self.connection
                .read_tls(&mut unread)
                .map_err(HandshakeError::Io)?;
            self.connection.process_new_packets()?;
        }
        self.reading.record.clear();
        Ok(())
    }

    /// Moves up to `wanted` bytes of plaintext to `opening`; whether there
    /// were any.
    fn take_plaintext(
        &mut self,
        wanted: usize,
        opening: &mut Vec<u8>,
    ) -> Result<bool, RejectReason> {
        let mut part = vec![0; wanted];
        match self.connection.reader().read(&mut part) {
            Ok(0) => Err(HandshakeError::PeerClosed.into()),
            Ok(count) => {
                opening.extend_from_slice(&part[..count]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Reads a handshake record by record, so that not a byte behind it is taken.
#[derive(Default)]
pub(super) struct Reading {
    /// The record that is being read, or has been; whoever takes it empties this.
    pub(super) record: Vec<u8>,
    /// Bytes of all whole records.
    pub(super) received: usize,
}

impl Reading {
    /// Reads on until one whole record is there; `false` when the socket has
    /// no more for now.
    pub(super) fn next(&mut self, mut stream: &TcpStream) -> Result<bool, RejectReason> {
        loop {
            let wanted = match self.record.first_chunk::<HEADER_BYTES>() {
                None => HEADER_BYTES - self.record.len(),
                Some(&[content_type, major, _, high, low]) => {
                    if !(20..=23).contains(&content_type) || major != 3 {
                        let start = [content_type, major, 0, high, low];
                        return Err(HandshakeError::NotTls { start }.into());
                    }
                    let whole = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
                    if whole > RECEIVED_RECORD_BYTES || self.received + whole > FLIGHT_LIMIT_BYTES {
                        return Err(HandshakeError::TooLong.into());
                    }
                    if self.record.len() == whole {
                        self.received += whole;
                        return Ok(true);
                    }
                    whole - self.record.len()
                }
            };
            let start = self.record.len();
            self.record.resize(start + wanted, 0);
            let result = stream.read(&mut self.record[start..]);
            self.record
                .truncate(start + result.as_ref().map_or(0, |&count| count));
            match result {
                Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                Ok(_) => {}
                Err(error) => return would_block(error),
            }
        }
    }
}

/// How many bytes of the opening are missing, as far as can be told.
fn wanted(opening: &[u8], prelude: &mut Option<Prelude>) -> Result<usize, DecodeError> {
    let Some(start) = opening.first_chunk::<PRELUDE_BYTES>() else {
        return Ok(PRELUDE_BYTES - opening.len());
    };
    let body_bytes = match prelude {
        Some(known) => known.body_bytes,
        None => prelude.insert(Prelude::decode(start)?).body_bytes,
    };
    Ok(PRELUDE_BYTES + body_bytes - opening.len())
}

pub(super) fn would_block(error: io::Error) -> Result<bool, RejectReason> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            Err(HandshakeError::PeerClosed.into())
        }
        _ => Err(error.into()),
    }
}
