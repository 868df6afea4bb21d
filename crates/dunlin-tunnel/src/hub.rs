//! What the threads of a trunk share: the core that decides, behind one
//! lock, and what carries its decisions out.
//!
//! ```text
//!   lane threads ──┐                       ┌──▶ sockets of channels, lanes' ends
//!   control lane ──┼─▶ core (one lock) ─▶ act ─▶ threads that connect
//!   poller, talker ┘        │
//!                           └─ has something to say ─▶ talker ─▶ control lane
//! ```
//!
//! Whoever has told the core something calls [`Hub::settle`] under the same lock;
//! what the core then wants done is done there, since none of it waits. What may
//! wait has a thread: a connection to be made, a message to be sent.

use dunlin_lane::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_linux::epoll::{Epoll, Readiness};
use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{LaneSecurity, SessionId, SessionSecret};
use dunlin_proto::stripe::{self, Config, Left, OpenError, Opening, Side};

use super::event::Event;
use super::failure::Failure;
use super::piece::{Piece, Pool};
use super::route::Destination;
use super::site::Site;
use super::socket::Socket;
use super::status::Status;
use dunlin_lane::control::ControlStream;
use dunlin_lane::dial::{DialCancel, LaneDialer};
use dunlin_lane::peers::{PeerIdentity, Peers, Principal};
use dunlin_lane::security::dialer;

/// The token of a set's own wake-up; channels have 32 bits.
pub(super) const WAKE: u64 = u64::MAX;

/// What both sides have agreed on.
pub(super) struct Terms {
    pub(super) side: Side,
    pub(super) session: SessionId,
    pub(super) version: u16,
    /// What protects the lanes.
    pub(super) security: LaneSecurity,
    pub(super) peer: PeerIdentity,
    /// The peers that a lane's handshake may admit. The peer's certificate may be
    /// renewed, and so may ours: either is looked for when a lane is made, and
    /// [`Terms::is_the_peer`] decides.
    pub(super) peers: Peers,
    /// The only peer that may be at the other end of a lane.
    pub(super) principal: Principal,
    /// Where our lanes go.
    pub(super) lanes_at: SocketAddr,
    /// Under which the peer's lanes prove themselves.
    pub(super) own_secret: SessionSecret,
    /// Under which ours do.
    pub(super) peer_secret: SessionSecret,
    /// Lanes that this side opens.
    pub(super) lanes: u16,
    /// The most that the peer takes.
    pub(super) peer_lanes: u16,
    /// Where a control lane is made anew; `None` waits for the peer's.
    pub(super) redial: Option<Destination>,
}

impl Terms {
    /// Whether that is who the trunk is with.
    pub(super) fn is_the_peer(&self, other: &PeerIdentity) -> bool {
        other.is(&self.principal)
    }
}

pub(super) struct Hub {
    pub(super) site: Arc<Site>,
    pub(super) terms: Terms,
    pub(super) pool: Arc<Pool>,
    /// Sockets that can be read, for the lanes' threads.
    pub(super) reads: Epoll,
    /// Sockets that take bytes again or have failed, for the poller.
    pub(super) writes: Epoll,
    read_waker: Waker,
    pub(super) read_wakeup: Wakeup,
    pub(super) write_waker: Waker,
    pub(super) write_wakeup: Wakeup,
    core: Mutex<Core>,
    /// The talker waits here.
    pub(super) talk: Condvar,
    /// The lanes' threads wait here, except the one that watches sockets.
    pub(super) idle: Condvar,
    /// Programs that run for this peer.
    pub(super) programs: Arc<AtomicUsize>,
    /// By which our lanes are opened, once one has been wanted.
    dialer: Mutex<Option<Arc<dyn LaneDialer>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    began: Instant,
}

pub(super) struct Core {
    pub(super) trunk: stripe::Trunk<Piece>,
    pub(super) channels: BTreeMap<u32, Channel>,
    pub(super) control: Option<Arc<ControlStream>>,
    pub(super) epoch: u32,
    /// Ends the lanes that are open, from another thread; ours and the peer's.
    pub(super) cutters: BTreeMap<(Way, u16), Box<dyn Fn() + Send>>,
    /// Ends those of ours that are being opened.
    pub(super) dials: BTreeMap<u16, DialCancel>,
    /// Threads of our lanes that send, or wait for something to send.
    pub(super) senders: usize,
    /// Threads that connect to targets. One goes on for a while behind a channel
    /// that the peer has given up.
    pub(super) connecting: usize,
    /// Whether one of them watches the sockets.
    pub(super) watched: bool,
    /// How many of them wait for another to do so.
    pub(super) followers: usize,
    /// Whether one has been woken and not come yet.
    pub(super) woken: bool,
    /// Lanes that have been woken because they are to end.
    told: BTreeSet<u16>,
    pub(super) talker_waits: bool,
    /// When it wakes by itself, if it waits.
    pub(super) talk_by_ns: Option<u64>,
    pub(super) over: Option<FaultCode>,
}

/// Which way a lane carries bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    Out,
    In,
}

pub(super) struct Channel {
    pub(super) socket: Arc<Socket>,
    pub(super) route: String,
    /// Why it is aborted if the end does not come behind its consumer, which is gone.
    pub(super) left: Option<Failure>,
}

impl Channel {
    pub(super) fn new(socket: Arc<Socket>, route: String) -> Self {
        Self {
            socket,
            route,
            left: None,
        }
    }
}

impl Hub {
    /// A trunk whose first control lane stands.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(super) fn new(
        site: &Arc<Site>,
        terms: Terms,
        lanes_max: u16,
        control: ControlStream,
    ) -> std::io::Result<Arc<Self>> {
        let limits = site.limits;
        let config = Config {
            channels: limits.channels,
            bytes: limits.peer_bytes,
            lanes: terms.lanes,
            lanes_max,
            patience: limits.patience(),
        };
        let mut trunk = stripe::Trunk::new(terms.side, config, 0);
        trunk.control_up(0);
        let (read_waker, read_wakeup) = waker()?;
        let (write_waker, write_wakeup) = waker()?;
        let (reads, writes) = (Epoll::new()?, Epoll::new()?);
        reads.add_always(&read_wakeup, WAKE)?;
        writes.add_always(&write_wakeup, WAKE)?;
        Ok(Arc::new(Self {
            site: Arc::clone(site),
            terms,
            pool: Pool::new(),
            reads,
            writes,
            read_waker,
            read_wakeup,
            write_waker,
            write_wakeup,
            core: Mutex::new(Core {
                trunk,
                channels: BTreeMap::new(),
                control: Some(Arc::new(control)),
                epoch: 1,
                cutters: BTreeMap::new(),
                dials: BTreeMap::new(),
                senders: 0,
                connecting: 0,
                watched: false,
                followers: 0,
                woken: false,
                told: BTreeSet::new(),
                talker_waits: false,
                talk_by_ns: None,
                over: None,
            }),
            talk: Condvar::new(),
            idle: Condvar::new(),
            programs: Arc::default(),
            dialer: Mutex::default(),
            threads: Mutex::default(),
            began: Instant::now(),
        }))
    }

    /// The core. A thread that panicked has left it whole: its calls are the
    /// smallest steps.
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Starts a thread that is joined before the trunk is forgotten.
    pub(super) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> bool {
        match std::thread::Builder::new().name(name).spawn(body) {
            Ok(thread) => {
                let mut threads = lock(&self.threads);
                threads.retain(|one| !one.is_finished());
                threads.push(thread);
                true
            }
            Err(error) => {
                self.site
                    .tell(Event::Warning(format!("cannot start a thread: {error}")));
                false
            }
        }
    }

    /// Waits for all threads but the calling one's; they have been told to end.
    pub(super) fn join(&self) {
        loop {
            let threads = std::mem::take(&mut *lock(&self.threads));
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                // A panic has been printed by its hook.
                let _ = thread.join();
            }
        }
    }

    /// By what our lanes are opened.
    ///
    /// # Errors
    /// IPsec was agreed on, and this tunnel is not prepared for it.
    pub(super) fn dialer(&self) -> Result<Arc<dyn LaneDialer>, Failure> {
        let mut own = lock(&self.dialer);
        if let Some(dialer) = &*own {
            return Ok(Arc::clone(dialer));
        }
        let Some(made) = dialer(self.terms.security, self.site.sealed.as_ref()) else {
            let text = "this tunnel is not prepared for IPsec";
            return Err(Failure::new(FaultCode::SecurityNotAgreed, text));
        };
        *own = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Takes down what our lanes were opened by; they are over.
    pub(super) fn leave_dialer(&self) {
        let own = lock(&self.dialer).take();
        drop(own);
    }

    /// A connection was accepted.
    ///
    /// # Errors
    /// Why it finds no other half; the caller closes it.
    pub(super) fn open(
        self: &Arc<Self>,
        socket: &Arc<Socket>,
        opening: Opening,
    ) -> Result<(), OpenError> {
        let mut core = self.lock();
        let route = opening.route.clone();
        let channel = core.trunk.open(opening)?;
        let socket = Arc::clone(socket);
        core.channels.insert(channel, Channel::new(socket, route));
        self.settle(&mut core);
        Ok(())
    }

    /// Does what the core wants done since it was last told something.
    pub(super) fn settle(self: &Arc<Self>, core: &mut Core) {
        let now_ns = self.now_ns();
        while let Some(action) = core.trunk.poll(now_ns) {
            self.act(core, action, now_ns);
        }
        if core.talker_waits {
            let due_ns = core.trunk.due_ns();
            let sooner = due_ns.is_some_and(|due| core.talk_by_ns.is_none_or(|by| due < by));
            if sooner || core.trunk.has_message(now_ns) || core.over.is_some() {
                core.talker_waits = false;
                self.talk.notify_one();
            }
        }
        self.wake_lanes(core);
    }

    /// Wakes a lane's thread if there is something to send, and those that are
    /// to end.
    pub(super) fn wake_lanes(&self, core: &mut Core) {
        if core.trunk.has_work() && !core.woken {
            if core.followers > 0 {
                core.woken = true;
                self.idle.notify_one();
            } else if core.watched {
                core.woken = true;
                self.read_waker.wake();
            }
        }
        let mut untold = false;
        for lane in core.trunk.leaving() {
            untold |= core.told.insert(lane);
        }
        if untold {
            self.wake_all_lanes();
        }
    }

    pub(super) fn wake_all_lanes(&self) {
        self.idle.notify_all();
        self.read_waker.wake();
    }

    /// A channel's other half is connected: its socket counts from now.
    pub(super) fn watch(self: &Arc<Self>, core: &mut Core, channel: u32, now_ns: u64) {
        let Some(one) = core.channels.get(&channel) else {
            return;
        };
        let token = u64::from(channel);
        let watched = self
            .reads
            .add(&*one.socket, token, Readiness::Read)
            .and_then(|()| self.writes.add(&*one.socket, token, Readiness::Failure));
        match watched {
            Ok(()) => {
                let route = one.route.clone();
                self.site.tell(Event::Opened { route, channel });
            }
            Err(error) => {
                core.trunk.fail(channel, FaultCode::ChannelBroken, now_ns);
                let what = "the hypervisor's connection cannot be watched";
                let failure = Failure::new(FaultCode::ChannelBroken, what).because(&error);
                self.close_badly(core, channel, failure);
            }
        }
    }

    /// A channel's connection on this side failed. True where the channel stays for a moment, in
    /// which its end may come.
    pub(super) fn fail(
        self: &Arc<Self>,
        core: &mut Core,
        channel: u32,
        error: &std::io::Error,
        now_ns: u64,
    ) -> bool {
        let code = FaultCode::ChannelBroken;
        let what = "the hypervisor's connection failed";
        let failure = Failure::new(code, what).because(error);
        let is_gone = matches!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe
        );
        if !is_gone {
            core.trunk.fail(channel, code, now_ns);
            self.close_badly(core, channel, failure);
            return false;
        }
        match core.trunk.left(channel, now_ns) {
            Left::Waits => {
                if let Some(one) = core.channels.get_mut(&channel) {
                    // A second one is a consequence of the first.
                    one.left.get_or_insert(failure);
                }
                return true;
            }
            Left::Unread => self.close_unread(core, channel, false),
            Left::Broken => self.close_badly(core, channel, failure),
        }
        false
    }

    /// The channel has ended, but for a few bytes before the end that its consumer did not want.
    pub(super) fn close_unread(&self, core: &mut Core, channel: u32, by_peer: bool) {
        if let Some(one) = core.channels.remove(&channel) {
            one.socket.left_unread();
            let route = one.route;
            self.site.tell(Event::LeftUnread {
                route,
                channel,
                by_peer,
            });
        }
    }

    pub(super) fn close_badly(&self, core: &mut Core, channel: u32, failure: Failure) {
        if let Some(one) = core.channels.remove(&channel) {
            one.socket.fail(&failure);
            self.site.tell(Event::Aborted {
                route: one.route,
                channel,
                failure,
            });
        }
    }

    /// The peer broke the protocol.
    pub(super) fn broken(self: &Arc<Self>, core: &mut Core, why: &dyn std::error::Error) {
        let failure = Failure::new(
            FaultCode::Malformed,
            "the peer's tunnel breaks the protocol",
        );
        let peer = self.peer_name();
        let failure = failure.because(why);
        self.site.tell(Event::ControlLost { peer, failure });
        core.trunk.end(FaultCode::Malformed);
        self.settle(core);
    }

    /// Ends everything.
    pub(super) fn end(self: &Arc<Self>, fault: FaultCode) {
        let mut core = self.lock();
        core.trunk.end(fault);
        self.settle(&mut core);
    }

    /// At least so many lanes from now on, or as many as the peer takes.
    pub(super) fn raise_lanes(self: &Arc<Self>, lanes: u16) {
        let mut core = self.lock();
        let lanes = lanes.min(self.terms.peer_lanes);
        core.trunk.raise_lanes(lanes);
        self.settle(&mut core);
    }

    pub(super) fn status(&self) -> Status {
        let core = self.lock();
        let usage = core.trunk.usage();
        Status {
            peer: self.peer_name(),
            at: self.terms.lanes_at,
            channels: core
                .channels
                .values()
                .map(|one| one.route.clone())
                .collect(),
            lanes: core.cutters.len(),
            held_bytes: usage.held,
            unacknowledged_bytes: usage.unacknowledged,
        }
    }

    /// The peer's name for a log.
    pub(super) fn peer_name(&self) -> String {
        dunlin_proto::text::harmless(&self.terms.peer.to_string())
    }
}
