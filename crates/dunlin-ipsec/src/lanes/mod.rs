//! Dunlin's own lanes over IPsec: plain TCP connections with packets that the kernel seals.
//!
//! [`IpsecLanes`] holds a process's sessions for lanes in both directions. The side that opens
//! lanes uses an [`IpsecDialer`], which starts a session when the first lane to a peer is dialled.
//! The side that accepts lanes passes each arrival to
//! [`SealedLanes::take`](dunlin_lane::security::SealedLanes::take), which takes the offers of
//! keying sessions. That side passes each plain lane to
//! [`LaneAcceptor::admit`](dunlin_lane::admit::LaneAcceptor::admit), which checks with
//! [`IpsecLanes::covers`] that the lane belongs to such a session.
//!
//! ```text
//!  opens lanes                                                       accepts
//!   IpsecDialer ─▶ TLS connection to the listener of the lanes, with the ═══▶ take
//!    │      offer of a keying session for 64 source ports
//!    ▼
//!   ProtectedLane: a lane ── from one of these ports, by ESP ────────────▶ covers
//!    ▲
//!   watch: bytes of lanes against bytes of SAs, once a second
//! ```
//!
//! Control lanes do not use IPsec. A session protects a block of *source* ports of the side that
//! opens lanes, not the port of the other side's listener. The listener therefore still accepts any
//! peer. The end of a control lane does not affect a session. Rekeying or the end of a session does
//! not affect a control lane.
//!
//! With an SA for each CPU, the thread of a lane is pinned to one CPU before it connects. The SA of
//! that CPU is requested for the CPU's first lane. If the peer's SA table is full, the lane uses
//! the fallback SA.

mod dialer;
mod sealed;
mod session;
mod watch;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_linux::affinity::{allowed, keep_to, pin_to};
use dunlin_linux::tcp::{incoming_cpu, is_established, send_window};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::{Mode, Sender};
use dunlin_proto::negotiate::Opening;
use thiserror::Error;

pub use dialer::IpsecDialer;
pub use session::{LaneError, LaneHold, ProtectedLane};

use super::acceptor::{Held, Site};
use super::error::IpsecError;
use super::session::clean_up_lanes;
use super::tables::Tables;
use super::{Observer, Options, PortRange, Status};
use dunlin_lane::control::ControlStream;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::sync::lock;
use session::{LaneSession, refresh_route};

/// The number of ports that a session protects. A session needs more ports than it has lanes,
/// because the side that closes a connection keeps the connection's port for a minute (TIME_WAIT).
/// If all ports are in use, another session starts. The number is a power of two, so that one
/// policy in each direction covers the block.
pub const BLOCK_PORTS: u16 = 64;
/// The maximum number of peers' offers that wait for an answer. Further offers are dropped. Only
/// authorised peers can make offers.
const OFFERS: usize = 8;
/// The maximum number of accepted lanes that wait for an SA for the packets that this side sends.
const ANSWERING: usize = 256;
/// How long an accepted lane waits for an SA for the packets that this side sends.
const ANSWERING_LIMIT: Duration = Duration::from_secs(10);
/// The interval at which the thread of [`Shared::keep`] removes ended sessions and moves accepted
/// lanes to their SAs.
const TICK: Duration = Duration::from_millis(100);
/// The interval at which the bytes of lanes are compared with those of SAs.
const WATCH: Duration = Duration::from_secs(1);
/// How long an accepted lane waits for a session that is being set up.
const SETTLING: Duration = Duration::from_secs(2);

/// The IPsec lanes that this process opens and accepts. Clones share one state. The drop of the
/// last clone ends the sessions that peers have started.
#[derive(Clone)]
pub struct IpsecLanes(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    offers: Option<SyncSender<Offered>>,
    keeper: Option<JoinHandle<()>>,
}

/// The state that all threads share.
struct Shared {
    /// The sessions that peers start, and the options of all sessions.
    site: Site,
    /// CPUs to which this side's lanes are pinned.
    cpus: Vec<u32>,
    /// Sessions that this side started.
    begun: Mutex<Vec<Weak<LaneSession>>>,
    answering: Mutex<Vec<Answering>>,
}

/// The control connection of a peer, and the peer's offer of a session.
type Offered = (ControlStream, Opening);

/// An accepted lane that this side has not moved to the SA of a CPU yet.
struct Answering {
    lane: TcpStream,
    cpu: u32,
    since: Instant,
}

/// Why a plain lane is not accepted as a lane of a keying session.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotProtected {
    /// The connection cannot be queried or duplicated.
    #[error("cannot query or duplicate the connection of the lane: {0}")]
    Socket(#[from] io::Error),
    /// The source port of the lane does not belong to a session with this peer.
    #[error("no keying session with this peer protects the lane's source port ({from})")]
    NoSession {
        /// The source address of the lane.
        from: SocketAddr,
    },
}

impl NotProtected {
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Socket(_) => FaultCode::Kernel,
            Self::NoSession { .. } => FaultCode::SecurityNotAgreed,
        }
    }
}

impl IpsecLanes {
    /// Prepares this process to open and to accept lanes over IPsec. The side that opens lanes
    /// takes blocks of source ports from `options.ports`; the other side allows only ports in its
    /// own `options.ports`. `options.cpus` are the CPUs to which this side's lanes are pinned. If
    /// `options.cpus` is empty in mode cpu, all lanes use one SA. Removes the policies and SAs that
    /// dead processes left, except policies that must still block ports.
    ///
    /// # Errors
    /// The kernel lacks a feature, this process lacks a privilege, the range contains no block of
    /// ports, or the directory of records or a thread is not available.
    pub fn new(options: Options, observer: Observer) -> Result<Self, IpsecError> {
        check(&options)?;
        clean_up_lanes(&options, &observer)?;
        let mut options = options;
        // A session requests an SA for each CPU in this list when it starts. Here the list is
        // empty, because the SA of a CPU is requested for the first lane of that CPU.
        let cpus = std::mem::take(&mut options.cpus);
        let shared = Arc::new(Shared {
            site: Site {
                held: Arc::default(),
                options,
                observer,
            },
            cpus,
            begun: Mutex::default(),
            answering: Mutex::default(),
        });
        let (offers, offered) = sync_channel(OFFERS);
        let own = Arc::clone(&shared);
        let keeper = thread::Builder::new()
            .name("dunlin-ipsec-lanes".to_owned())
            .spawn(move || own.keep(&offered))
            .map_err(IpsecError::resources("a thread"))?;
        Ok(Self(Arc::new(Inner {
            shared,
            offers: Some(offers),
            keeper: Some(keeper),
        })))
    }

    /// Checks that a plain lane uses the SAs of a keying session with the lane's peer, which
    /// `is_peer` recognises. If the lane uses these SAs, this host accepts no unprotected packet
    /// from the lane's source port (I6).
    ///
    /// # Errors
    /// The lane does not use such SAs, or its connection cannot be queried or duplicated.
    pub fn covers(
        &self,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
        lane: &TcpStream,
    ) -> Result<(), NotProtected> {
        let (local, from) = (lane.local_addr()?, lane.peer_addr()?);
        let until = Instant::now() + SETTLING;
        loop {
            match self.0.shared.is_covered(is_peer, local, from) {
                Some(true) => break,
                // The session may have become ready at the peer before it is ready here.
                None if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                _ => return Err(NotProtected::NoSession { from }),
            }
        }
        let mut answering = lock(&self.0.shared.answering);
        if answering.len() < ANSWERING {
            answering.push(Answering {
                lane: lane.try_clone()?,
                cpu: incoming_cpu(lane)?,
                since: Instant::now(),
            });
        }
        Ok(())
    }

    /// Returns the status of the sessions that this side started, for the lanes that it opens.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn sessions(&self) -> Result<Vec<Status>, IpsecError> {
        let begun = self.0.shared.begun();
        begun
            .iter()
            .filter_map(|one| one.session.status().transpose())
            .collect()
    }

    /// Returns the status of the sessions that peers started.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn peers(&self) -> Result<Vec<super::Peer>, IpsecError> {
        self.0.shared.site.peers()
    }

    /// Renews the keys of all SAs on which this side sends.
    pub fn rekey(&self) {
        self.0.shared.site.rekey();
        for begun in self.0.shared.begun() {
            begun.session.rekey();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.offers = None;
        if let Some(keeper) = self.keeper.take() {
            // The panic hook has printed the panic.
            let _ = keeper.join();
        }
    }
}

impl fmt::Debug for IpsecLanes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("IpsecLanes")
            .field("options", &self.0.shared.site.options)
            .field("cpus", &self.0.shared.cpus)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The body of the thread that serves the lanes. It answers offers, removes ended sessions and
    /// shuts down their lanes, and moves accepted lanes to the SA of their CPU. It also compares
    /// the bytes that lanes sent with the bytes that SAs carried.
    fn keep(&self, offered: &Receiver<Offered>) {
        let mut watched = Instant::now();
        loop {
            match offered.recv_timeout(TICK) {
                Ok((control, opening)) => self.site.begin_or_reject(control, &opening),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.site.remove_ended();
            self.move_answers();
            let begun = self.begun();
            for one in &begun {
                one.cut_if_over();
            }
            if watched.elapsed() >= WATCH {
                watched = Instant::now();
                begun.iter().for_each(|one| one.watch(&self.site.observer));
            }
        }
        self.site.end();
        while !lock(&self.site.held).is_empty() {
            thread::sleep(TICK);
            self.site.remove_ended();
        }
    }

    fn begun(&self) -> Vec<Arc<LaneSession>> {
        let mut begun = lock(&self.begun);
        begun.retain(|session| session.strong_count() > 0);
        begun.iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns whether a session covers the lane; `None` while a session that may cover the lane is
    /// being set up.
    fn is_covered(
        &self,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<bool> {
        let held = lock(&self.site.held);
        let mut is_agreed = true;
        for one in held.iter().filter(|one| is_peer(&one.identity)) {
            match one.session.covers(local, peer) {
                Some(true) if !one.session.is_over() => return Some(true),
                None => is_agreed = false,
                _ => {}
            }
        }
        is_agreed.then_some(false)
    }

    /// Makes each accepted lane send its packets through the SA of one CPU. It is the CPU on which
    /// the lane's last packet had arrived when [`IpsecLanes::covers`] accepted the lane. If that
    /// CPU has no SA, requests one; a later call moves the lane to it.
    fn move_answers(&self) {
        let held = lock(&self.site.held);
        lock(&self.answering).retain(|one| {
            let (Ok(local), Ok(peer)) = (one.lane.local_addr(), one.lane.peer_addr()) else {
                return false;
            };
            // At most one session covers the lane, because the ports of sessions do not overlap.
            let covers = |held: &&Held| held.session.covers(local, peer) == Some(true);
            let session = held.iter().find(covers);
            let Some(session) = session else {
                return false;
            };
            if session.session.has(Sender::Cpu(one.cpu)) {
                // If this fails, the lane continues to use the fallback SA.
                let _ = refresh_route_on(&one.lane, one.cpu);
                return false;
            }
            session.session.want_cpu(one.cpu);
            // Drop a lane that has ended, because this copy of the descriptor would keep the kernel
            // from closing the connection. The peer frees the ports only after the connection is
            // closed.
            one.since.elapsed() < ANSWERING_LIMIT && is_established(&one.lane).unwrap_or(false)
        });
    }

    /// Returns the blocks of ports that no session started by this process uses.
    fn free_blocks(&self) -> Vec<PortRange> {
        let used: Vec<PortRange> = self.begun().iter().map(|one| one.ports).collect();
        let pool = self.site.options.ports;
        pool.parts(BLOCK_PORTS)
            .filter(|part| !used.contains(part))
            .collect()
    }
}

/// Makes the kernel look up the route on `cpu` now. Otherwise the next acknowledgement would
/// trigger the lookup on the CPU of the reading thread. If that CPU has no SA, the connection would
/// stay on the fallback SA.
fn refresh_route_on(connection: &TcpStream, cpu: u32) -> io::Result<()> {
    let before = allowed()?;
    // The CPU that sends the next packet looks up the route, so send a packet from `cpu`. If this
    // process is not allowed to use `cpu`, send none: the next packet may come from any CPU.
    let there = pin_to(cpu as usize);
    let looked = refresh_route(connection).and_then(|()| match there {
        Ok(()) => send_window(connection),
        Err(_) => Ok(()),
    });
    keep_to(&before)?;
    looked
}

/// Checks for conditions that would make the first lane fail.
fn check(options: &Options) -> Result<(), IpsecError> {
    has_a_block(options.ports)?;
    let tables = Tables::open(None)?;
    tables.have_esp()?;
    match options.mode {
        Mode::Connection => tables.policies().map(drop),
        Mode::Cpu => tables.keeps_directions(Mode::Cpu).map(drop),
    }
}

fn has_a_block(ports: PortRange) -> Result<(), IpsecError> {
    match ports.parts(BLOCK_PORTS).next() {
        Some(_) => Ok(()),
        None => Err(IpsecError::TooFewPorts {
            ports: ports.to_string(),
            block: BLOCK_PORTS,
        }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_range_without_a_whole_block_is_refused() {
        let checked = |ports: &str| has_a_block(ports.parse().unwrap());
        checked("24577-24703").unwrap();
        let error = checked("24577-24702").unwrap_err();
        assert!(matches!(error, IpsecError::TooFewPorts { .. }), "{error}");
    }
}
