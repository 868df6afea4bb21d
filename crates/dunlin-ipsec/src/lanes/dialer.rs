//! The side that opens lanes: sessions to one peer, and connections from their ports.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::pin_to;
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_linux::tcp::sent_bytes;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::{Mode, Sender};
use dunlin_proto::negotiate::SessionId;
use thiserror::Error;

use super::watch::{Look, strays};
use super::{IpsecLanes, Shared, look_anew};
use crate::dial;
use crate::error::IpsecError;
use crate::event::{Event, Observer};
use crate::options::Options;
use crate::session::{Session, ends, random};
use crate::sockets::{Connection, connections};
use crate::{AssociationStatus, Direction, PortRange};
use dunlin_lane::data::LaneGuard;
use dunlin_lane::data::{DataSender, PlainConsent, STALL_LIMIT};
use dunlin_lane::dial::{DialError, LaneDialer, LaneRequest};
use dunlin_lane::peers::Principal;
use dunlin_lane::sync::lock;

/// Blocks of ports that are tried before none seems to be free.
const BLOCKS_TRIED: usize = 8;
/// Sessions that are tried for one lane, where the ports of one are used up.
const SESSIONS_TRIED: usize = 3;
/// How long an SA of its own is waited for before a lane goes by the fallback.
const SA_LIMIT: Duration = Duration::from_secs(2);
/// How often in a row no connection may be found before its last acknowledgement has come to the
/// other side, too: procfs may have left one out, and the network takes its time.
const LOOKS: u32 = 4;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// How often it is looked whether something has come.
const LOOK: Duration = Duration::from_millis(5);
/// How often a lane that waits for a session looks whether it is to stop.
const STEP: Duration = Duration::from_millis(50);

/// Why there is no lane.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// There is no IPsec session.
    #[error("no IPsec session for a lane")]
    Session(#[from] IpsecError),
    /// Somebody else answers where the lanes lead.
    #[error("{to} answers with another certificate than the control lane's")]
    OtherPeer {
        /// Where.
        to: String,
    },
    /// Every port of the session is taken.
    #[error("no port of {ports} is free for a lane: others use them on this host")]
    NoPort {
        /// The session's.
        ports: String,
    },
    /// The thread cannot be on its CPU.
    #[error("the lane's thread cannot be kept on CPU {cpu}: choose others with --cpus")]
    Cpu {
        /// Which.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// No connection.
    #[error("{to} cannot be reached from port {from} by IPsec")]
    Connect {
        /// From where.
        from: u16,
        /// Where.
        to: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// It was given up here.
    #[error("the lane was given up before it stood")]
    Stopped,
}

impl LaneError {
    /// The code if the next attempt would fail in the same way; `None` if it may succeed.
    #[must_use]
    pub fn permanent(&self) -> Option<FaultCode> {
        match self {
            Self::OtherPeer { .. } => Some(FaultCode::WrongIdentity),
            Self::Cpu { .. } => Some(FaultCode::Kernel),
            Self::Session(error) => {
                let code = error.fault();
                let lasts = matches!(
                    code,
                    FaultCode::FeatureMissing
                        | FaultCode::Unauthorised
                        | FaultCode::AddressTranslated
                        | FaultCode::Kernel
                        | FaultCode::Journal
                );
                lasts.then_some(code)
            }
            Self::NoPort { .. } | Self::Connect { .. } | Self::Stopped => None,
        }
    }
}

/// Opens lanes over IPsec. When it is dropped, its sessions end; that waits until their
/// connections are over, or for the options' `quiet_wait`.
pub struct IpsecDialer {
    lanes: IpsecLanes,
    /// By where they lead, and who has to be there: a session is between two addresses.
    toward: Mutex<HashMap<Destination, Toward>>,
    changed: Condvar,
}

/// An endpoint, and the peer that has to be there.
type Destination = (String, Principal);

#[derive(Default)]
struct Toward {
    /// Whether a thread is making a session.
    is_making: bool,
    /// The newest is the last; those before have no port left, or are over.
    sessions: Vec<Arc<LaneSession>>,
    /// Ports of sessions that are over. Their connections may still exist, so they are used again
    /// only when all others are in use.
    over: Vec<PortRange>,
}

impl Toward {
    /// Shuts the lanes of sessions that are over.
    fn retire(&mut self) {
        let over = self.sessions.extract_if(.., |one| one.cut_if_over());
        for session in over {
            if !self.over.contains(&session.ports) {
                self.over.push(session.ports);
            }
        }
    }
}

/// A session, and the lanes on it.
pub(super) struct LaneSession {
    pub(super) session: Session,
    pub(super) ports: PortRange,
    local: SocketAddr,
    peer: SocketAddr,
    mode: Mode,
    quiet_wait: Duration,
    is_full: AtomicBool,
    entries: Mutex<Vec<Weak<LaneEntry>>>,
    /// CPUs that have waited in vain for an SA of their own.
    unserved: Mutex<BTreeSet<u32>>,
    last: Mutex<Look>,
    /// Looks at which lanes had strayed.
    strayed: AtomicU64,
}

/// A lane's place among the others of its session.
struct LaneEntry {
    number: u64,
    /// None in mode connection.
    cpu: Option<u32>,
    stream: OnceLock<TcpStream>,
    has_strayed: AtomicBool,
}

/// A connection whose packets go by a session's SAs, and by nothing else.
#[derive(Debug)]
pub struct ProtectedLane {
    /// The connection. The calling thread is kept on the CPU whose SA it has.
    pub stream: TcpStream,
    /// Its entry in the session, which the lane's thread keeps as long as the lane.
    pub hold: LaneHold,
}

/// A lane's place among the others of its session; dropped with the lane.
pub struct LaneHold(Arc<LaneEntry>);

impl LaneDialer for IpsecDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let connected = self.connect(request).map_err(|error| DialError::Sealed {
            endpoint: request.endpoint.to_owned(),
            permanent: error.permanent(),
            source: Box::new(error),
        });
        let ProtectedLane { stream, hold } = connected?;
        set_liveness(&stream, &Liveness::default())?;
        let consent = PlainConsent::sealed_below();
        Ok(DataSender::plain(stream, consent, STALL_LIMIT)?.guarded_by(Box::new(hold)))
    }
}

impl LaneGuard for LaneHold {
    /// A lane that was seen to go by another CPU's SA has its route looked up anew, by what this
    /// thread sends next.
    fn before_send(&self) {
        if self.0.has_strayed.load(Ordering::Relaxed)
            && self.0.has_strayed.swap(false, Ordering::Relaxed)
            && let Some(stream) = self.0.stream.get()
        {
            // Where it fails the counters say so again.
            let _ = look_anew(stream);
        }
    }
}

impl LaneHold {
    /// The CPU on which the lane's thread is kept, and whose SA it has; none in mode connection.
    #[must_use]
    pub fn cpu(&self) -> Option<u32> {
        self.0.cpu
    }
}

impl fmt::Debug for LaneHold {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LaneHold")
            .field("cpu", &self.0.cpu)
            .finish()
    }
}

impl fmt::Debug for IpsecDialer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("IpsecDialer")
            .finish_non_exhaustive()
    }
}

impl IpsecDialer {
    /// A dialer without a session; the first lane starts one.
    #[must_use]
    pub fn new(lanes: IpsecLanes) -> Self {
        Self {
            lanes,
            toward: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// A connection to the request's endpoint, by a session with its peer that exists or is made
    /// for it. Called on the thread of the lane, which in mode cpu is kept on one CPU from now on.
    ///
    /// # Errors
    /// None by the deadline, or it was cancelled before: a session that is being agreed on is
    /// given up then.
    pub fn connect(&self, request: &LaneRequest<'_>) -> Result<ProtectedLane, LaneError> {
        let mut tried = 0;
        loop {
            let session = self.session(request)?;
            tried += 1;
            match session.connect(&self.shared().cpus, &self.shared().site.observer, request) {
                Err(LaneError::NoPort { .. }) if tried < SESSIONS_TRIED => {
                    session.is_full.store(true, Ordering::Relaxed);
                }
                other => return other,
            }
        }
    }

    /// Renews the keys of what this side sends.
    pub fn rekey(&self) {
        let toward = lock(&self.toward);
        let all = toward.values().flat_map(|one| &one.sessions);
        all.for_each(|one| one.session.rekey());
    }

    fn shared(&self) -> &Shared {
        &self.lanes.0.shared
    }

    /// One that can be used, made if there is none. Others wait meanwhile.
    fn session(&self, request: &LaneRequest<'_>) -> Result<Arc<LaneSession>, LaneError> {
        let to = || (request.endpoint.to_owned(), request.peer.clone());
        let mut toward = lock(&self.toward);
        let over = loop {
            let one = toward.entry(to()).or_default();
            one.retire();
            if let Some(newest) = one.sessions.last()
                && !newest.is_full.load(Ordering::Relaxed)
            {
                return Ok(Arc::clone(newest));
            }
            if !one.is_making {
                one.is_making = true;
                break one.over.clone();
            }
            let waited = self.changed.wait_timeout(toward, STEP);
            toward = waited.unwrap_or_else(PoisonError::into_inner).0;
            go_on(request)?;
        };
        drop(toward);
        let made = self.make(request, &over).map(Arc::new);
        let mut toward = lock(&self.toward);
        let one = toward.entry(to()).or_default();
        one.is_making = false;
        if let Ok(begun) = &made {
            one.sessions.push(Arc::clone(begun));
            lock(&self.shared().begun).push(Arc::downgrade(begun));
        }
        drop(toward);
        self.changed.notify_all();
        made
    }

    fn make(
        &self,
        request: &LaneRequest<'_>,
        over: &[PortRange],
    ) -> Result<LaneSession, LaneError> {
        let LaneRequest {
            endpoint: to,
            deadline,
            ..
        } = *request;
        let shared = self.shared();
        let (mut later, mut blocks) = shared
            .free_blocks()
            .into_iter()
            .partition::<Vec<_>, _>(|block| over.contains(block));
        let called_off = |error: IpsecError| match (go_on(request), error) {
            (Err(why), IpsecError::Ended) => why,
            (_, error) => error.into(),
        };
        for _ in 0..BLOCKS_TRIED {
            go_on(request)?;
            let session: SessionId = random()?;
            if blocks.is_empty() {
                mem::swap(&mut blocks, &mut later);
            }
            if blocks.is_empty() {
                break;
            }
            let chosen = u64::from_le_bytes(*session.last_chunk().unwrap_or(&[0; 8]));
            let ports = blocks.swap_remove((chosen % blocks.len() as u64) as usize);
            let options = Options {
                ports,
                timeout: shared
                    .site
                    .options
                    .timeout
                    .min(deadline.saturating_duration_since(Instant::now())),
                ..shared.site.options.clone()
            };
            let mut given_up = || go_on(request).is_err();
            let limit = options.timeout;
            let opened = dial::open_beside(
                (to, request.connector),
                request.tls,
                session,
                limit,
                &mut given_up,
            );
            let control = opened.map_err(called_off)?;
            if !control.peer().is(request.peer) {
                let to = to.to_owned();
                return Err(LaneError::OtherPeer { to });
            }
            let (local, peer) = ends(control.socket())?;
            let observer = &shared.site.observer;
            match dial::begin(control, session, &options, observer, &mut given_up) {
                Ok(session) => {
                    return Ok(LaneSession {
                        session,
                        ports,
                        local,
                        peer,
                        mode: options.mode,
                        quiet_wait: options.quiet_wait,
                        is_full: AtomicBool::new(false),
                        entries: Mutex::default(),
                        unserved: Mutex::default(),
                        last: Mutex::default(),
                        strayed: AtomicU64::new(0),
                    });
                }
                // On either host another session has them: the other side opens lanes too.
                Err(error) if error.fault() == FaultCode::PortsTaken => {}
                Err(error) => return Err(called_off(error)),
            }
        }
        let ports = shared.site.options.ports.to_string();
        Err(LaneError::NoPort { ports })
    }
}

impl LaneSession {
    fn connect(
        &self,
        cpus: &[u32],
        observer: &Observer,
        request: &LaneRequest<'_>,
    ) -> Result<ProtectedLane, LaneError> {
        let entry = self.enter(cpus);
        if let Some(cpu) = entry.cpu {
            // The SA is that of the CPU on which connect(2) looks up the route.
            pin_to(cpu as usize).map_err(|source| LaneError::Cpu { cpu, source })?;
            self.session.want_cpu(cpu);
            let is_served = self.await_own(Sender::Cpu(cpu), request)?;
            if !is_served && lock(&self.unserved).insert(cpu) {
                observer(&Event::NoOwnAssociation { cpu });
            }
        }
        let count = u32::from(self.ports.last() - self.ports.first()) + 1;
        // Not one after the other: a port that was used lately waits for a minute.
        let start = entry.number as u32 % count;
        for at in 0..count {
            let port = self.ports.first() + ((start + at) % count) as u16;
            let mut local = self.local;
            local.set_port(port);
            let connected = request.connector.connect_from(
                local,
                self.peer,
                request.deadline,
                request.cancel.wakeup(),
            );
            match connected {
                Ok(stream) => {
                    if self.mode == Mode::Connection {
                        let to = self.peer.port();
                        // Its first bytes may go by the fallback; the rest do not wait for it.
                        let own = Sender::Connection { from: port, to };
                        self.await_own(own, request)?;
                    }
                    let same = stream.try_clone().map_err(|source| LaneError::Connect {
                        from: port,
                        to: self.peer,
                        source,
                    })?;
                    let _ = entry.stream.set(same);
                    let hold = LaneHold(entry);
                    return Ok(ProtectedLane { stream, hold });
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable
                    ) => {}
                Err(source) if source.kind() == io::ErrorKind::ConnectionAborted => {
                    return Err(LaneError::Stopped);
                }
                Err(source) => {
                    return Err(LaneError::Connect {
                        from: port,
                        to: self.peer,
                        source,
                    });
                }
            }
        }
        let ports = self.ports.to_string();
        Err(LaneError::NoPort { ports })
    }

    /// Enters a lane on the CPU that has the fewest lanes.
    fn enter(&self, cpus: &[u32]) -> Arc<LaneEntry> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let mut entries = lock(&self.entries);
        entries.retain(|entry| entry.strong_count() > 0);
        let taken: Vec<Arc<LaneEntry>> = entries.iter().filter_map(Weak::upgrade).collect();
        let lanes = |cpu: &&u32| taken.iter().filter(|one| one.cpu == Some(**cpu)).count();
        let cpu = cpus.iter().min_by_key(lanes).copied();
        let entry = Arc::new(LaneEntry {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            cpu: cpu.filter(|_| self.mode == Mode::Cpu),
            stream: OnceLock::new(),
            has_strayed: AtomicBool::new(false),
        });
        entries.push(Arc::downgrade(&entry));
        entry
    }

    /// Whether what is sent for this has an SA of its own, which may take a moment.
    fn await_own(&self, sender: Sender, request: &LaneRequest<'_>) -> Result<bool, LaneError> {
        let until = Instant::now() + SA_LIMIT;
        loop {
            if self.session.has(sender) {
                return Ok(true);
            }
            let is_known =
                matches!(sender, Sender::Cpu(cpu) if lock(&self.unserved).contains(&cpu));
            if is_known || Instant::now() >= until {
                return Ok(false);
            }
            go_on(request)?;
            if self.session.is_over() {
                return Err(IpsecError::Ended.into());
            }
            thread::sleep(LOOK);
        }
    }

    fn has(&self, connection: &Connection) -> bool {
        connection.local.ip() == self.local.ip().to_canonical()
            && connection.peer.ip() == self.peer.ip().to_canonical()
            && self.ports.contains(connection.local.port())
    }

    fn entries(&self) -> Vec<Arc<LaneEntry>> {
        let entries = lock(&self.entries);
        entries.iter().filter_map(Weak::upgrade).collect()
    }

    /// The lanes of a session that is over are so, too: nothing leaves from their ports. Whether
    /// it is over.
    pub(super) fn cut_if_over(&self) -> bool {
        if !self.session.is_over() {
            return false;
        }
        for entry in self.entries() {
            if let Some(stream) = entry.stream.get() {
                // It may be over already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        true
    }

    /// Compares what lanes have sent with what SAs have carried since the last time.
    pub(super) fn watch(&self, observer: &Observer) {
        if self.mode != Mode::Cpu {
            return;
        }
        // Whoever takes the SAs away is found out by the session.
        let Some(now) = self.look() else {
            return;
        };
        let last = mem::replace(&mut *lock(&self.last), now.clone());
        let strays = strays(&last, &now);
        if strays.is_empty() {
            return;
        }
        for entry in self.entries() {
            if strays.iter().any(|stray| Some(stray.cpu) == entry.cpu) {
                entry.has_strayed.store(true, Ordering::Relaxed);
            }
        }
        // One that cannot be helped is not told every second.
        if (self.strayed.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two() {
            for stray in strays {
                observer(&Event::Strayed {
                    cpu: stray.cpu,
                    sent: stray.sent,
                    carried: stray.carried,
                });
            }
        }
    }

    fn look(&self) -> Option<Look> {
        let carried = || {
            let status = self.session.status().ok()??;
            let of = |one: &AssociationStatus| {
                let own = &one.association;
                let bytes = one.counters.as_ref()?.bytes;
                (own.direction == Direction::Out).then_some((own.slot.sender, (own.spi, bytes)))
            };
            Some(status.associations.iter().filter_map(of).collect())
        };
        let before = carried()?;
        let lanes = self.entries().into_iter().filter_map(|entry| {
            let bytes = sent_bytes(entry.stream.get()?).ok()?;
            Some((entry.number, (entry.cpu?, bytes)))
        });
        let lanes = lanes.collect();
        Some(Look {
            before,
            lanes,
            after: carried()?,
        })
    }
}

impl Drop for LaneSession {
    /// Lets connections that were closed come to their end while their packets still pass: what
    /// has to be said twice could not be, once the session is over, and its ports would stay
    /// blocked until TCP gives them up.
    fn drop(&mut self) {
        let until = Instant::now() + self.quiet_wait;
        let mut looks = 0;
        while looks < LOOKS && !self.session.is_over() && Instant::now() < until {
            // Where it cannot be asked the session finds out so itself.
            let is_used = connections().is_ok_and(|all| all.iter().any(|one| self.has(one)));
            looks = if is_used { 0 } else { looks + 1 };
            thread::sleep(BETWEEN_LOOKS);
        }
    }
}

/// Unless it is late, or was called off.
fn go_on(request: &LaneRequest<'_>) -> Result<(), LaneError> {
    if request.cancel.is_cancelled() {
        return Err(LaneError::Stopped);
    }
    if Instant::now() >= request.deadline {
        return Err(IpsecError::Silent("ready").into());
    }
    Ok(())
}
