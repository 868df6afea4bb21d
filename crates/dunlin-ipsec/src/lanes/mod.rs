//! Lanes of Dunlin's own over IPsec: plain TCP connections whose packets the kernel seals.
//!
//! A [`IpsecLanes`] is what a process has for it, for lanes in both directions. Whoever opens
//! lanes has [`IpsecDialer`] to one peer, which make a session when the first lane is wanted; whoever
//! accepts hands the session's offer to [`SealedLanes::take`], and a lane that came in plain to
//! [`LaneAcceptor::admit`], which asks [`IpsecLanes::covers`] whether it is one of that session.
//!
//! ```text
//!  opens lanes                                                       accepts
//!   IpsecDialer ─▶ connection of its own (TLS): an IPsec session's ═════════▶ take
//!    │      offer, to the listener of the lanes, for 64 source ports
//!    ▼
//!   ProtectedLane: a lane ── from one of these ports, by ESP ────────────▶ covers
//!    ▲
//!   watch: bytes of lanes against bytes of SAs, once a second
//! ```
//!
//! Control lanes stay outside. A session protects a block of *source* ports of the side that
//! opens lanes, so that the other side's listener goes on taking everybody in. It is apart from
//! the control lane: new keys and the end of either do not meet.
//!
//! With an SA for each CPU, the thread of a lane is kept on one CPU before it connects, and the
//! SA of that CPU is asked for when its first lane comes. If the peer has no room
//! for another SA, the lane uses the fallback.

mod dialer;
mod watch;

use dunlin_proto::text::harmless;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_linux::affinity::{allowed, keep_to, pin_to};
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_linux::tcp::{incoming_cpu, send_window, set_traffic_class};
use dunlin_proto::ipsec::{Mode, Sender};
use dunlin_proto::negotiate::{Features, LaneSecurity, Opening};
use thiserror::Error;

pub use dialer::{IpsecDialer, LaneError, LaneHold, ProtectedLane};

use super::acceptor::{Held, Site};
use super::error::{IpsecError, in_words};
use super::session::clean_up_lanes;
use super::tables::Tables;
use super::{Event, Observer, Options, PortRange, Status};
use dialer::LaneSession;
use dunlin_lane::accept::{Arrival, LaneSocket};
use dunlin_lane::admit::{AdmitError, LaneAcceptor};
use dunlin_lane::control::ControlStream;
use dunlin_lane::data::{DataReceiver, PlainConsent, STALL_LIMIT};
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::{PeerIdentity, Principal};
use dunlin_lane::security::SealedLanes;
use dunlin_lane::sync::lock;

/// Ports that a session protects: twice the lanes of most, since whoever closes a connection
/// keeps its port for a minute. A power of two, so that it is one policy each way.
pub const BLOCK_PORTS: u16 = 64;
/// Offers that wait to be answered; they come from authorised peers, and more are dropped.
const OFFERS: usize = 8;
/// Accepted lanes that wait for the SA of what they answer with.
const ANSWERING: usize = 256;
/// How long they do.
const ANSWERING_LIMIT: Duration = Duration::from_secs(10);
/// How often offers, ends and accepted lanes are looked after.
const TICK: Duration = Duration::from_millis(100);
/// How often the bytes of lanes are compared with those of SAs.
const WATCH: Duration = Duration::from_secs(1);
/// How long a session that was just agreed on may take to stand.
const SETTLING: Duration = Duration::from_secs(2);

/// Lanes over IPsec, as this process opens and accepts them. Clones are the same one; when the
/// last is dropped, sessions that peers have begun end.
#[derive(Clone)]
pub struct IpsecLanes(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    offers: Option<SyncSender<Offered>>,
    keeper: Option<JoinHandle<()>>,
}

/// What the threads share.
struct Shared {
    /// Its options are those of sessions that peers begin.
    site: Site,
    /// CPUs on which this side's lanes are.
    cpus: Vec<u32>,
    /// Sessions that this side has begun.
    begun: Mutex<Vec<Weak<LaneSession>>>,
    answering: Mutex<Vec<Answering>>,
}

/// A session that a peer has asked for.
struct Offered {
    control: ControlStream,
    opening: Opening,
}

/// An accepted lane that answers by the fallback as yet.
struct Answering {
    lane: TcpStream,
    cpu: u32,
    since: Instant,
}

/// Why a lane that came in plain is not one of a session.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotProtected {
    /// Its ends are not known.
    #[error("its addresses are not known: {0}")]
    Socket(#[from] io::Error),
    /// It did not come by an SA of this peer's.
    #[error("it comes from {from}, which is no port of an IPsec session with this peer")]
    NoSession {
        /// Its source address.
        from: SocketAddr,
    },
}

impl IpsecLanes {
    /// Begins to open and accept such lanes, if the kernel can. `options.ports` are the source
    /// ports from which blocks are taken on either side, `options.cpus` those on which this
    /// side's lanes are: without any, all lanes go by one SA in mode cpu. What processes that have died left is taken back.
    ///
    /// # Errors
    /// What the kernel lacks, or this process; no block of ports.
    pub fn new(options: Options, observer: Observer) -> Result<Self, IpsecError> {
        check(&options)?;
        // Whatever cannot be taken back has been told.
        clean_up_lanes(&options, &observer)?;
        let cpus = options.cpus.clone();
        let options = Options {
            // As they turn out to be needed.
            cpus: Vec::new(),
            ..options
        };
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

    /// Takes the offer of an IPsec session out of what arrives at a listener of lanes; what else
    /// arrives is given back.
    fn take_in(&self, arrival: Arrival) -> Option<Arrival> {
        let Arrival::Control { stream, opening } = arrival else {
            return Some(arrival);
        };
        let is_ours =
            matches!(&opening, Opening::Offer(offer) if offer.required.contains(Features::IPSEC));
        if !is_ours {
            return Some(Arrival::Control { stream, opening });
        }
        let from = harmless(&stream.peer().to_string());
        let control = stream;
        let taken = self.0.offers.as_ref().map(|offers| {
            // Refused by silence: its connection is closed.
            offers.try_send(Offered { control, opening }).is_ok()
        });
        if taken != Some(true) {
            let why = "too many IPsec sessions are asked for at once".to_owned();
            self.0.shared.tell(&Event::Rejected { from, why });
        }
        None
    }

    /// Whether a lane that came in plain, of a session with this peer, goes by SAs of an IPsec
    /// session with the same peer: nothing else reaches this host from its port then (I6).
    ///
    /// # Errors
    /// It does not.
    pub fn covers(&self, peer: &Principal, lane: &TcpStream) -> Result<(), NotProtected> {
        self.covers_if(&|other| other.is(peer), lane)
    }

    /// The same for the peer that `is_peer` recognises.
    fn covers_if(
        &self,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
        lane: &TcpStream,
    ) -> Result<(), NotProtected> {
        let (local, from) = (lane.local_addr()?, lane.peer_addr()?);
        let until = Instant::now() + SETTLING;
        loop {
            match self.0.shared.is_covered(is_peer, local, from) {
                Some(true) => break,
                // The peer was up a moment earlier.
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

    /// How the sessions stand that this side has begun, for the lanes that it opens.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn sessions(&self) -> Result<Vec<Status>, IpsecError> {
        let begun = self.0.shared.begun();
        begun
            .iter()
            .filter_map(|one| one.session.status().transpose())
            .collect()
    }

    /// How the sessions stand that peers have begun.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn peers(&self) -> Result<Vec<super::Peer>, IpsecError> {
        self.0.shared.site.peers()
    }

    /// Renews the keys of everything that this side sends.
    pub fn rekey(&self) {
        let shared = &self.0.shared;
        lock(&shared.site.held)
            .iter()
            .for_each(|one| one.session.rekey());
        for begun in shared.begun() {
            begun.session.rekey();
        }
    }
}

impl LaneAcceptor for IpsecLanes {
    fn admit(
        &self,
        socket: LaneSocket,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError> {
        let LaneSocket::Plain(stream) = socket else {
            let agreed = LaneSecurity::Ipsec;
            return Err(AdmitError::OtherSecurity { agreed });
        };
        self.covers_if(is_peer, &stream)
            .map_err(|error| AdmitError::NotSealed(error.into()))?;
        set_liveness(&stream, &Liveness::default())?;
        let consent = PlainConsent::sealed_below();
        Ok(DataReceiver::plain(stream, consent, STALL_LIMIT)?)
    }
}

impl SealedLanes for IpsecLanes {
    fn dialer(&self) -> Arc<dyn LaneDialer> {
        Arc::new(IpsecDialer::new(self.clone()))
    }

    fn take(&self, arrival: Arrival) -> Option<Arrival> {
        self.take_in(arrival)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.offers = None;
        if let Some(keeper) = self.keeper.take() {
            // A panic has been printed by its hook.
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
    /// The body of the thread that looks after everything.
    fn keep(&self, offered: &Receiver<Offered>) {
        let mut watched = Instant::now();
        loop {
            match offered.recv_timeout(TICK) {
                Ok(Offered { control, opening }) => {
                    let from = harmless(&control.peer().to_string());
                    if let Err(error) = self.site.begin(control, &opening) {
                        let why = in_words(&error);
                        self.tell(&Event::Rejected { from, why });
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.site.bury();
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
        lock(&self.site.held)
            .iter()
            .for_each(|one| one.session.end());
        while !lock(&self.site.held).is_empty() {
            thread::sleep(TICK);
            self.site.bury();
        }
    }

    fn tell(&self, event: &Event) {
        (self.site.observer)(event);
    }

    fn begun(&self) -> Vec<Arc<LaneSession>> {
        let mut begun = lock(&self.begun);
        begun.retain(|session| session.strong_count() > 0);
        begun.iter().filter_map(Weak::upgrade).collect()
    }

    /// None where a session is being agreed on that may.
    fn is_covered(
        &self,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<bool> {
        let held = lock(&self.site.held);
        let mut is_known = true;
        for one in held.iter().filter(|one| is_peer(&one.identity)) {
            match one.session.covers(local, peer) {
                Some(true) if !one.session.is_over() => return Some(true),
                None => is_known = false,
                _ => {}
            }
        }
        is_known.then_some(false)
    }

    /// An accepted lane answers by the SA of the CPU that took in its handshake. Where there is
    /// none, one is asked for, and the lane goes over to it when it stands.
    fn move_answers(&self) {
        let held = lock(&self.site.held);
        lock(&self.answering).retain(|one| {
            let (Ok(local), Ok(peer)) = (one.lane.local_addr(), one.lane.peer_addr()) else {
                return false;
            };
            // Sessions have no port in common.
            let covers = |held: &&Held| held.session.covers(local, peer) == Some(true);
            let session = held.iter().find(covers);
            let Some(session) = session else {
                return false;
            };
            if session.session.has(Sender::Cpu(one.cpu)) {
                // If it fails, the lane goes on by the fallback.
                let _ = look_from(&one.lane, one.cpu);
                return false;
            }
            session.session.want_cpu(one.cpu);
            one.since.elapsed() < ANSWERING_LIMIT
        });
    }

    /// Blocks of ports that no session of this process's has.
    fn free_blocks(&self) -> Vec<PortRange> {
        let used: Vec<PortRange> = self.begun().iter().map(|one| one.ports).collect();
        let pool = self.site.options.ports;
        pool.parts(BLOCK_PORTS)
            .filter(|part| !used.contains(part))
            .collect()
    }
}

/// Has the kernel look for a connection's route, and with it for its SA, when it next sends.
fn look_anew(connection: &TcpStream) -> io::Result<()> {
    /// A class other than that of lanes: CS1, of low priority, for no packet at all.
    const OTHER: u8 = 0x20;
    set_traffic_class(connection, OTHER)?;
    set_traffic_class(connection, 0)
}

/// Has the kernel look on this CPU, at once. Else the next acknowledgement would look, which may
/// be that of whoever reads, on a CPU without an SA; nothing would lead the connection away from
/// the fallback again.
fn look_from(connection: &TcpStream, cpu: u32) -> io::Result<()> {
    let before = allowed()?;
    // Where this process may not use that CPU, it is left to whatever comes from there.
    let there = pin_to(cpu as usize);
    let looked = look_anew(connection).and_then(|()| match there {
        Ok(()) => send_window(connection),
        Err(_) => Ok(()),
    });
    keep_to(&before)?;
    looked
}

/// What would fail with the first lane.
fn check(options: &Options) -> Result<(), IpsecError> {
    has_a_block(options.ports)?;
    let kernel = |source| IpsecError::Kernel {
        doing: "the kernel's IPsec is looked at".to_owned(),
        source,
    };
    let tables = Tables::open(None)?;
    tables.have_esp()?;
    match options.mode {
        Mode::Connection => tables.xfrm.policies().map(drop).map_err(kernel),
        Mode::Cpu => tables.need_per_cpu_sas(),
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
        let looked_at = |ports: &str| has_a_block(ports.parse().unwrap());
        looked_at("24577-24703").unwrap();
        let error = looked_at("24577-24702").unwrap_err();
        assert!(matches!(error, IpsecError::TooFewPorts { .. }), "{error}");
    }
}
