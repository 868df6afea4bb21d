//! A session with a peer, and the lanes that use its SAs.

use std::collections::BTreeSet;
use std::io;
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::pin_to;
use dunlin_linux::tcp::{sent_bytes, set_traffic_class};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::{Mode, Sender};
use thiserror::Error;

use super::watch::{Look, strays};
use crate::error::IpsecError;
use crate::event::{Event, Observer};
use crate::options::Options;
use crate::session::Session;
use crate::sock_diag::TcpConnection;
use crate::sockets::connections;
use crate::{AssociationStatus, Direction, PortRange};
use dunlin_lane::data::LaneGuard;
use dunlin_lane::dial::LaneRequest;
use dunlin_lane::sync::lock;

/// How long to wait for a lane's own SA before the lane uses the fallback SA.
const SA_LIMIT: Duration = Duration::from_secs(2);
/// The number of consecutive checks that must find no connection before a session ends. One check
/// is not enough: the kernel's list may omit a connection, and the last acknowledgement needs time
/// to reach the other side.
const LOOKS: u32 = 4;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// The interval at which an expected SA is polled.
const LOOK: Duration = Duration::from_millis(5);

/// Why a lane was not opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The keying session failed.
    #[error("no keying session for a lane")]
    Session(#[from] IpsecError),
    /// Another peer answers at the endpoint of the lane.
    #[error("the peer at {to} is not the peer of the control lane: check this address")]
    OtherPeer {
        /// The endpoint.
        to: String,
    },
    /// No port of the session is free for a lane, or no range of ports is free for a new session.
    #[error(
        "no free port in {ports} for a lane: sessions or other programs use them, or used them in the \
         last minute; use a longer range"
    )]
    NoPort {
        /// The ports of the session, or the ports for all sessions.
        ports: String,
    },
    /// The lane's thread cannot be pinned to its CPU.
    #[error(
        "the lane's thread cannot be pinned to CPU {cpu}: choose CPUs that this process may use"
    )]
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
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Session(error) => error.code(),
            Self::OtherPeer { .. } => FaultCode::WrongIdentity,
            Self::NoPort { .. } => FaultCode::PortsTaken,
            Self::Cpu { .. } => FaultCode::Kernel,
            Self::Connect { .. } => FaultCode::LaneLost,
            Self::Stopped => FaultCode::Cancelled,
        }
    }

    /// Returns the fault code if the next attempt would fail in the same way; `None` if the next
    /// attempt may succeed.
    #[must_use]
    pub fn permanent(&self) -> Option<FaultCode> {
        let code = self.code();
        match self {
            Self::OtherPeer { .. } | Self::Cpu { .. } => Some(code),
            Self::Session(_) => {
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

/// A session and its lanes.
#[derive(Debug)]
pub(super) struct LaneSession {
    pub(super) session: Session,
    pub(super) ports: PortRange,
    local: SocketAddr,
    peer: SocketAddr,
    mode: Mode,
    quiet_wait: Duration,
    pub(super) is_full: AtomicBool,
    entries: Mutex<Vec<Weak<LaneEntry>>>,
    /// CPUs that did not get their own SA in time.
    unserved: Mutex<BTreeSet<u32>>,
    last: Mutex<Look>,
    /// The number of checks that found lanes which used an SA other than that of their CPU.
    strayed: AtomicU64,
}

/// The entry of a lane in its session.
#[derive(Debug)]
struct LaneEntry {
    number: u64,
    /// The CPU; `None` if each connection has an SA of its own, or if no CPUs are configured.
    cpu: Option<u32>,
    stream: OnceLock<TcpStream>,
    has_strayed: AtomicBool,
}

/// A connection that uses only the SAs of a session.
#[derive(Debug)]
pub struct ProtectedLane {
    /// The connection. If the lane has a CPU ([`LaneHold::cpu`]), the thread that opened the lane
    /// is pinned to that CPU.
    pub stream: TcpStream,
    /// The entry in the session; the lane's thread must keep it as long as the lane exists.
    pub hold: LaneHold,
}

/// The entry of a lane in its session; dropped with the lane.
#[derive(Debug)]
pub struct LaneHold(Arc<LaneEntry>);

impl LaneGuard for LaneHold {
    /// If a check found that lanes of this CPU do not use the CPU's SA, makes the kernel discard
    /// this lane's route. At the next send, the kernel then looks up the route and the SA again.
    fn before_send(&self) {
        if self.0.has_strayed.load(Ordering::Relaxed)
            && self.0.has_strayed.swap(false, Ordering::Relaxed)
            && let Some(stream) = self.0.stream.get()
        {
            // If this fails, the next comparison of counters marks the lane again.
            let _ = refresh_route(stream);
        }
    }
}

impl LaneHold {
    /// The CPU to which the lane's thread is pinned. `None` if each connection has an SA of its
    /// own, or if no CPUs are configured.
    #[must_use]
    pub fn cpu(&self) -> Option<u32> {
        self.0.cpu
    }
}

/// Makes the kernel look up the route of a connection, and with it the SA, at the next send.
pub(super) fn refresh_route(connection: &TcpStream) -> io::Result<()> {
    /// The traffic class CS1 (low priority), which lanes do not use. Each change of the class makes
    /// the kernel discard the route. The class is set only for a moment.
    const OTHER: u8 = 0x20;
    set_traffic_class(connection, OTHER)?;
    set_traffic_class(connection, 0)
}

impl LaneSession {
    /// Creates the state of `session`, which the dialer has begun with `options` between the
    /// addresses `local` and `peer`.
    pub(super) fn new(
        session: Session,
        options: &Options,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Self {
        Self {
            session,
            ports: options.ports,
            local,
            peer,
            mode: options.mode,
            quiet_wait: options.quiet_wait,
            is_full: AtomicBool::new(false),
            entries: Mutex::default(),
            unserved: Mutex::default(),
            last: Mutex::default(),
            strayed: AtomicU64::new(0),
        }
    }

    pub(super) fn connect(
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
                observer.event(&Event::NoOwnAssociation { cpu });
            }
        }
        let count = u32::from(self.ports.last() - self.ports.first()) + 1;
        // Rotate through the ports: a recently used port is unavailable for a minute (TIME_WAIT).
        let start = entry.number as u32 % count;
        for at in 0..count {
            let port = self.ports.first() + ((start + at) % count) as u16;
            let mut local = self.local;
            local.set_port(port);
            let failed = |source| LaneError::Connect {
                from: port,
                to: self.peer,
                source,
            };
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
                        // The first bytes may use the fallback SA. If the peer does not grant the
                        // connection its own SA, the fallback stays in use.
                        let own = Sender::Connection { from: port, to };
                        self.await_own(own, request)?;
                    }
                    let same = stream.try_clone().map_err(failed)?;
                    let _ = entry.stream.set(same);
                    let hold = LaneHold(entry);
                    return Ok(ProtectedLane { stream, hold });
                }
                Err(source) => match source.kind() {
                    io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable => {}
                    io::ErrorKind::ConnectionAborted => return Err(LaneError::Stopped),
                    _ => return Err(failed(source)),
                },
            }
        }
        let ports = self.ports.to_string();
        Err(LaneError::NoPort { ports })
    }

    /// Adds an entry for a lane. In mode cpu, the lane belongs to the CPU with the fewest lanes.
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

    /// Waits for the SA of `sender`. Returns whether the SA was installed in time. Does not wait if
    /// an earlier wait for the SA of the same CPU has timed out.
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

    fn has(&self, connection: &TcpConnection) -> bool {
        connection.local.ip() == self.local.ip().to_canonical()
            && connection.peer.ip() == self.peer.ip().to_canonical()
            && self.ports.contains(connection.local.port())
    }

    fn entries(&self) -> Vec<Arc<LaneEntry>> {
        let entries = lock(&self.entries);
        entries.iter().filter_map(Weak::upgrade).collect()
    }

    /// If the session has ended, shuts down its lanes, because packets from their ports are
    /// blocked. Returns whether the session has ended.
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

    /// In mode cpu, compares two byte counts for each CPU since the last call: the bytes that its
    /// lanes sent, and the bytes that its SA carried. If the SA carried fewer, some lanes used
    /// another SA. Reports such CPUs and marks their lanes.
    pub(super) fn watch(&self, observer: &Observer) {
        if self.mode != Mode::Cpu {
            return;
        }
        // Without counters, nothing can be compared. The session itself detects SAs that another
        // program removed.
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
        // If the lanes cannot be moved back, report them at increasing intervals instead of every
        // second.
        if (self.strayed.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two() {
            for stray in strays {
                observer.event(&Event::Strayed {
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
    /// Waits for at most `quiet_wait` until TCP has finished closing the connections, while the
    /// session still passes their packets. After the end of the session TCP could not retransmit,
    /// and the ports would stay blocked until TCP gives up.
    fn drop(&mut self) {
        let until = Instant::now() + self.quiet_wait;
        let mut looks = 0;
        while looks < LOOKS && !self.session.is_over() && Instant::now() < until {
            // If the connections cannot be listed, they count as closed.
            let is_used = connections().is_ok_and(|all| all.iter().any(|one| self.has(one)));
            looks = if is_used { 0 } else { looks + 1 };
            thread::sleep(BETWEEN_LOOKS);
        }
    }
}

/// Returns an error after the deadline or on cancellation.
pub(super) fn check_limits(request: &LaneRequest<'_>) -> Result<(), LaneError> {
    if request.cancel.is_cancelled() {
        return Err(LaneError::Stopped);
    }
    if Instant::now() >= request.deadline {
        return Err(IpsecError::Silent("ready").into());
    }
    Ok(())
}
