//! The side that opens lanes: sessions with a peer, and connections from their ports.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
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
use super::{IpsecLanes, Shared, refresh_route};
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
use dunlin_lane::sync::{lock, wait};

/// How many blocks of ports to try before giving up.
const BLOCKS_TRIED: usize = 8;
/// How many sessions to try for one lane if all ports of a session are in use.
const SESSIONS_TRIED: usize = 3;
/// How long to wait for a lane's own SA before the lane uses the fallback.
const SA_LIMIT: Duration = Duration::from_secs(2);
/// How many checks in a row must find no connection before its last acknowledgement is taken to
/// have reached the other side: procfs may omit one, and the network needs time.
const LOOKS: u32 = 4;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// The interval at which an expected SA is polled.
const LOOK: Duration = Duration::from_millis(5);
/// The interval at which a lane that waits for a session checks for cancellation.
const STEP: Duration = Duration::from_millis(50);

/// Why a lane was not opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The IPsec session failed.
    #[error("no IPsec session for a lane")]
    Session(#[from] IpsecError),
    /// Another peer answers at the endpoint of the lane.
    #[error("{to} presented a certificate other than that of the control lane")]
    OtherPeer {
        /// The endpoint.
        to: String,
    },
    /// All ports of the session are in use.
    #[error("no free port in {ports} for a lane: other programs on this host use them")]
    NoPort {
        /// The ports of the session.
        ports: String,
    },
    /// The lane's thread cannot be pinned to its CPU.
    #[error("the lane's thread cannot be pinned to CPU {cpu}")]
    Cpu {
        /// The CPU.
        cpu: u32,
        /// The system's error.
        source: io::Error,
    },
    /// The connection failed.
    #[error("connection from port {from} to {to} over IPsec failed")]
    Connect {
        /// The source port.
        from: u16,
        /// The address.
        to: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The lane was cancelled on this side.
    #[error("the lane was cancelled before it was open")]
    Stopped,
}

impl LaneError {
    /// Returns the fault code if the next attempt would fail in the same way; `None` if it may
    /// succeed.
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

/// Opens lanes over IPsec. Dropping it ends its sessions, which waits until their connections are
/// closed, or for the options' `quiet_wait`.
pub struct IpsecDialer {
    lanes: IpsecLanes,
    /// Keyed by endpoint and required peer: a session is between two addresses.
    toward: Mutex<HashMap<Destination, Toward>>,
    changed: Condvar,
}

/// An endpoint and the peer that must answer there.
type Destination = (String, Principal);

#[derive(Default)]
struct Toward {
    /// Whether a thread is setting up a session.
    is_making: bool,
    /// The newest session is last; earlier ones have no free port or have ended.
    sessions: Vec<Arc<LaneSession>>,
    /// Ports of ended sessions. Their connections may still exist, so these ports are reused only
    /// when all others are in use.
    over: Vec<PortRange>,
}

impl Toward {
    /// Removes ended sessions and shuts down their lanes.
    fn retire(&mut self) {
        let over = self.sessions.extract_if(.., |one| one.cut_if_over());
        for session in over {
            if !self.over.contains(&session.ports) {
                self.over.push(session.ports);
            }
        }
    }
}

/// A session and its lanes.
pub(super) struct LaneSession {
    pub(super) session: Session,
    pub(super) ports: PortRange,
    local: SocketAddr,
    peer: SocketAddr,
    mode: Mode,
    quiet_wait: Duration,
    is_full: AtomicBool,
    entries: Mutex<Vec<Weak<LaneEntry>>>,
    /// CPUs that did not get their own SA in time.
    unserved: Mutex<BTreeSet<u32>>,
    last: Mutex<Look>,
    /// The number of checks that found stray lanes.
    strayed: AtomicU64,
}

/// The entry of a lane in its session.
struct LaneEntry {
    number: u64,
    /// The CPU; `None` in mode connection.
    cpu: Option<u32>,
    stream: OnceLock<TcpStream>,
    has_strayed: AtomicBool,
}

/// A connection that uses a session's SAs and nothing else.
#[derive(Debug)]
pub struct ProtectedLane {
    /// The connection. The calling thread is pinned to the CPU that has its SA.
    pub stream: TcpStream,
    /// The entry in the session; the lane's thread must keep it as long as the lane exists.
    pub hold: LaneHold,
}

/// The entry of a lane in its session; dropped with the lane.
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
    /// If the lane was seen to use another CPU's SA, makes the kernel look up its route again at
    /// the next send of this thread.
    fn before_send(&self) {
        if self.0.has_strayed.load(Ordering::Relaxed)
            && self.0.has_strayed.swap(false, Ordering::Relaxed)
            && let Some(stream) = self.0.stream.get()
        {
            // If this fails, the next comparison of counters reports the lane again.
            let _ = refresh_route(stream);
        }
    }
}

impl LaneHold {
    /// The CPU to which the lane's thread is pinned and which has the lane's SA; `None` in mode
    /// connection.
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
    /// Creates a dialer without a session; the first lane starts one.
    #[must_use]
    pub fn new(lanes: IpsecLanes) -> Self {
        Self {
            lanes,
            toward: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Opens a connection to the request's endpoint, over an existing or a new session with its
    /// peer. Must be called on the thread of the lane: mode cpu pins the thread to one CPU.
    ///
    /// # Errors
    /// The deadline has passed, or the request was cancelled. A session that is being set up is
    /// then given up.
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

    /// Returns a session with free ports, and starts one if there is none. Other callers wait
    /// meanwhile.
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
            toward = wait(&self.changed, toward, Some(STEP));
            check_limits(request)?;
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
        let shared = self.shared();
        let (mut later, mut blocks) = shared
            .free_blocks()
            .into_iter()
            .partition::<Vec<_>, _>(|block| over.contains(block));
        let cancelled_or = |error: IpsecError| match (check_limits(request), error) {
            (Err(why), IpsecError::Ended) => why,
            (_, error) => error.into(),
        };
        for _ in 0..BLOCKS_TRIED {
            check_limits(request)?;
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
                    .min(request.deadline.saturating_duration_since(Instant::now())),
                ..shared.site.options.clone()
            };
            let (connector, limit) = (&**request.connector, options.timeout);
            let to = request.endpoint;
            let opened = dial::open((to, connector), request.tls, session, limit, request.cancel);
            let control = opened.map_err(cancelled_or)?;
            if !control.peer().is(request.peer) {
                let to = to.to_owned();
                return Err(LaneError::OtherPeer { to });
            }
            let (local, peer) = ends(control.socket())?;
            let observer = &shared.site.observer;
            let given_up = || check_limits(request).is_err();
            match dial::begin(control, session, &options, observer, &given_up) {
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
                // Another session on one of the hosts has the ports: the other side opens lanes
                // too.
                Err(error) if error.fault() == FaultCode::PortsTaken => {}
                Err(error) => return Err(cancelled_or(error)),
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
            // connect(2) looks up the route, and with it the SA, on the current CPU.
            pin_to(cpu as usize).map_err(|source| LaneError::Cpu { cpu, source })?;
            self.session.want_cpu(cpu);
            let is_served = self.await_own(Sender::Cpu(cpu), request)?;
            if !is_served && lock(&self.unserved).insert(cpu) {
                observer(&Event::NoOwnAssociation { cpu });
            }
        }
        let count = u32::from(self.ports.last() - self.ports.first()) + 1;
        // Rotate through the ports: a recently used port is unavailable for a minute (TIME_WAIT).
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
                        // The first bytes may use the fallback; a failure to get the SA is not an
                        // error.
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

    /// Adds an entry for a lane on the CPU with the fewest lanes.
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

    /// Waits for the SA of `sender`; returns whether it is installed in time.
    fn await_own(&self, sender: Sender, request: &LaneRequest<'_>) -> Result<bool, LaneError> {
        let until = Instant::now() + SA_LIMIT;
        loop {
            if self.session.has(sender) {
                return Ok(true);
            }
            let is_unserved =
                matches!(sender, Sender::Cpu(cpu) if lock(&self.unserved).contains(&cpu));
            if is_unserved || Instant::now() >= until {
                return Ok(false);
            }
            check_limits(request)?;
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

    /// If the session has ended, shuts down its lanes: nothing leaves from their ports any more.
    /// Returns whether it has ended.
    pub(super) fn cut_if_over(&self) -> bool {
        if !self.session.is_over() {
            return false;
        }
        for entry in self.entries() {
            if let Some(stream) = entry.stream.get() {
                // The connection may be closed already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        true
    }

    /// Compares the bytes that lanes sent with the bytes that SAs carried since the last call.
    pub(super) fn watch(&self, observer: &Observer) {
        if self.mode != Mode::Cpu {
            return;
        }
        // The session itself detects SAs that another program removed.
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
        // Do not report a permanent stray every second.
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
    /// Waits until closed connections have ended, while their packets still pass: once the session
    /// is over, TCP could not retransmit, and the ports would stay blocked until TCP gives up.
    fn drop(&mut self) {
        let until = Instant::now() + self.quiet_wait;
        let mut looks = 0;
        while looks < LOOKS && !self.session.is_over() && Instant::now() < until {
            // If the list is not available, the session itself reports that.
            let is_used = connections().is_ok_and(|all| all.iter().any(|one| self.has(one)));
            looks = if is_used { 0 } else { looks + 1 };
            thread::sleep(BETWEEN_LOOKS);
        }
    }
}

/// Returns an error after the deadline or on cancellation.
fn check_limits(request: &LaneRequest<'_>) -> Result<(), LaneError> {
    if request.cancel.is_cancelled() {
        return Err(LaneError::Stopped);
    }
    if Instant::now() >= request.deadline {
        return Err(IpsecError::Silent("ready").into());
    }
    Ok(())
}
