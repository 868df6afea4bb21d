//! The state that the threads of a trunk share. The core, behind one lock, makes the decisions. The
//! hub carries out those that need no waiting.
//!
//! ```text
//!   lane threads ──┐                       ┌──▶ sockets of channels, lanes' ends
//!   control lane ──┼─▶ core (one lock) ─▶ settle
//!   poller, talker ┘        │              └──▶ starts ─▶ talker ─▶ threads
//!                           └─ messages ─▶ talker ─▶ control lane
//! ```
//!
//! A thread that has reported something to the core calls [`Hub::settle`] under the same lock, and
//! `settle` carries out the decisions that need no waiting. The talker starts threads and sends
//! messages, because only the talker calls the modules above this one.

use dunlin_lane::sync::{self, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Readiness;
use dunlin_linux::socket::unread_bytes;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::stripe::{self, Action, Config, Left, OpenError, Opening};

use super::channels::Channels;
use super::control::Control;
use super::counted::Counted;
use super::event::Event;
use super::failure::Failure;
use super::piece::{Piece, Pool};
use super::rate::Pacer;
use super::report::LastReport;
use super::site::Site;
use super::socket::Socket;
use super::status::{LaneStatus, Status};
use super::terms::Terms;
use super::threads::Threads;
use super::watched::WatchedSockets;
use dunlin_lane::admit::LaneAcceptor;
use dunlin_lane::control::ControlStream;
use dunlin_lane::data::Canceller;
use dunlin_lane::dial::DialCancel;
use dunlin_lane::splice::Stop;

pub(super) struct Hub {
    pub(super) site: Arc<Site>,
    pub(super) terms: Terms,
    /// Admits the peer's lanes.
    pub(super) acceptor: Arc<dyn LaneAcceptor>,
    admitting: Admitting,
    /// How many gates of redirects keep the trunk, although it may have no channel.
    keepers: Arc<AtomicUsize>,
    pub(super) pool: Arc<Pool>,
    /// The limit of the rate at which this side sends to the peer.
    pub(super) pacer: Arc<Pacer>,
    /// Sockets to read from, watched by the lanes' threads.
    pub(super) reads: WatchedSockets,
    /// The sockets of all channels. The poller watches each socket for a failure. While a socket's
    /// send buffer is full, the poller also watches for space in the buffer.
    pub(super) writes: WatchedSockets,
    core: Mutex<Core>,
    /// Wakes the talker.
    pub(super) talk: Condvar,
    /// Wakes the lanes' threads that wait for work, except the thread that watches the
    /// sockets.
    pub(super) idle: Condvar,
    /// The number of running target programs of this trunk.
    pub(super) programs: Arc<AtomicUsize>,
    /// The number of running echoes of this trunk.
    pub(super) echoes: Arc<AtomicUsize>,
    pub(super) last_report: LastReport,
    /// Cancels the dials of targets when the trunk has ended.
    pub(super) stop: Stop,
    pub(super) threads: Threads,
    began: Instant,
}

/// A lane that this side is opening.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Dial {
    /// The next control lane.
    Control,
    Lane(Direction, u16),
}

pub(super) struct Core {
    pub(super) trunk: stripe::Trunk<Piece>,
    pub(super) channels: Channels,
    pub(super) control: Control,
    /// Handles with which any thread can shut down the open lanes of both directions.
    pub(super) cutters: BTreeMap<(Direction, u16), Canceller>,
    /// Handles that cancel the dials of this side.
    pub(super) dials: BTreeMap<Dial, DialCancel>,
    /// For each direction, the address and the reason, if the most recent attempt to open a lane
    /// failed.
    troubles: BTreeMap<Direction, String>,
    pub(super) senders: Senders,
    /// Channels that a rate limit delays, each with the time at which it may be read again.
    pub(super) delayed: Vec<(Instant, u32)>,
    /// The number of threads that connect to targets. A thread may continue to connect for a while
    /// after the peer has aborted its channel.
    pub(super) connecting: usize,
    /// Threads for the talker to start.
    pub(super) starts: Vec<Start>,
    pub(super) talker: Talker,
    wakes: Wakes,
}

/// The threads to wake when the core is unlocked, or when the thread that holds the lock begins to
/// wait. A thread that is woken earlier would run only to wait for the lock.
#[derive(Clone, Copy, Default)]
struct Wakes {
    talker: bool,
    /// How many threads to wake, of the lanes' threads that wait for work.
    followers: usize,
    /// The thread that watches the sockets to read from.
    watcher: bool,
    /// All threads of lanes on which this side sends.
    senders: bool,
}

/// The locked core. Dropping it unlocks the core and then wakes threads.
pub(super) struct Locked<'a> {
    hub: &'a Hub,
    /// `None` only inside [`Locked::wait`] and `drop`.
    core: Option<MutexGuard<'a, Core>>,
}

/// The threads of this side's lanes. Some send, and some wait because their lane is full. The others
/// wait for work, and one of those watches the sockets.
pub(super) struct Senders {
    /// The number of threads.
    pub(super) count: usize,
    /// The maximum number of threads that send at the same time. A thread that waits for a full lane
    /// does not count.
    most: usize,
    /// Whether one of the threads watches the sockets.
    pub(super) watched: bool,
    /// The number of threads that wait for work while another one watches or sends.
    pub(super) followers: usize,
    /// The number of threads that have something to send and wait, because their lane is full.
    pub(super) blocked: usize,
    /// Whether a thread has been woken for work and has not run yet.
    pub(super) woken: bool,
    /// Lanes that have to end; their threads have been woken.
    ending: BTreeSet<u16>,
}

impl Senders {
    fn new(most: usize) -> Self {
        Self {
            count: 0,
            most,
            watched: false,
            followers: 0,
            blocked: 0,
            woken: false,
            ending: BTreeSet::new(),
        }
    }

    /// The number of threads that send, without those that wait for a full lane.
    fn sending(&self) -> usize {
        let others = usize::from(self.watched) + self.followers + self.blocked;
        self.count.saturating_sub(others)
    }

    /// Whether one more thread may send, in addition to `pending` threads that are about to be woken.
    /// This is an estimate: a thread that was woken and has not run yet still counts as waiting.
    fn may_grow(&self, pending: usize) -> bool {
        self.sending() + pending < self.most
    }
}

/// The state of the talker.
pub(super) enum Talker {
    /// The talker runs, and checks the core before it waits.
    Runs,
    /// The talker waits until there is a message to send or a thread to start, at most
    /// until the given time.
    Waits { until_ns: Option<u64> },
}

/// A thread to start.
pub(super) enum Start {
    /// Opens a lane and sends on it.
    Lane(u16),
    /// Opens a lane at the peer's request and receives on it.
    LaneFor(u16),
    /// Connects a channel of the peer to its target.
    Target {
        channel: u32,
        route: String,
        parameter: String,
    },
}

/// The direction in which a lane carries bytes, seen from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Direction {
    Out,
    In,
}

/// The number of lanes that are being admitted. Each direction has a limit of its own, so that many
/// lanes in one direction do not delay those in the other direction.
#[derive(Debug, Default)]
struct Admitting {
    outgoing: Arc<AtomicUsize>,
    incoming: Arc<AtomicUsize>,
}

impl Admitting {
    fn begin(&self, direction: Direction) -> Option<Counted> {
        let count = match direction {
            Direction::Out => &self.outgoing,
            Direction::In => &self.incoming,
        };
        Counted::one_more(count, usize::from(MAX_LANES))
    }
}

impl Core {
    /// Adds the handle that cancels the dial of a lane.
    pub(super) fn begin_dial(&mut self, direction: Direction, lane: u16, cancel: DialCancel) {
        self.dials.insert(Dial::Lane(direction, lane), cancel);
    }

    /// Adds the handle of an open lane.
    pub(super) fn lane_is_open(&mut self, direction: Direction, lane: u16, cut: Canceller) {
        self.dials.remove(&Dial::Lane(direction, lane));
        self.cutters.insert((direction, lane), cut);
        self.troubles.remove(&direction);
    }

    /// Removes the handles of a lane that has ended, or that could not be opened.
    pub(super) fn lane_is_over(&mut self, direction: Direction, lane: u16) {
        self.dials.remove(&Dial::Lane(direction, lane));
        self.cutters.remove(&(direction, lane));
    }

    /// Wakes a waiting thread to watch the sockets, if no thread watches them and another thread may
    /// send.
    pub(super) fn promote(&mut self) {
        let senders = &self.senders;
        if !senders.watched && senders.followers > 0 && senders.may_grow(self.wakes.followers) {
            self.wakes.followers += 1;
        }
    }

    /// Whether the thread of `lane` has to wait because too many threads send. This happens after a
    /// full lane has space again, when a thread finds a readable socket while others send, and when
    /// a lane starts.
    pub(super) fn has_to_follow(&self, lane: u16) -> bool {
        self.senders.sending() > self.senders.most && self.trunk.carries_on(lane)
    }

    /// Ends the wait of the thread that watches the sockets, if there is one.
    pub(super) fn wake_watcher(&mut self) {
        self.wakes.watcher |= self.senders.watched;
    }

    /// Wakes a lane's thread if there are bytes to send and another thread may send, and the threads
    /// of lanes that have to end.
    pub(super) fn wake_senders(&mut self) {
        let senders = &mut self.senders;
        if self.trunk.has_work() && !senders.woken && senders.may_grow(self.wakes.followers) {
            if senders.followers > 0 {
                senders.woken = true;
                self.wakes.followers += 1;
            } else if senders.watched {
                senders.woken = true;
                self.wakes.watcher = true;
            }
        }
        for lane in self.trunk.leaving() {
            self.wakes.senders |= senders.ending.insert(lane);
        }
    }

    /// The address and the reason, if the most recent attempt to open a lane failed.
    pub(super) fn trouble(&self) -> Option<String> {
        self.troubles.values().next().cloned()
    }
}

impl Locked<'_> {
    /// Wakes the threads that must run, and waits until `condition` is notified, at most for
    /// `limit`. May return early.
    pub(super) fn wait(mut self, condition: &Condvar, limit: Option<Duration>) -> Self {
        let hub = self.hub;
        hub.wake_now(&mut self);
        self.core = self
            .core
            .take()
            .map(|core| sync::wait(condition, core, limit));
        self
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        self.core.as_ref().expect("locked until it is dropped")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core.as_mut().expect("locked until it is dropped")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(mut core) = self.core.take() {
            let wakes = std::mem::take(&mut core.wakes);
            drop(core);
            self.hub.wake(wakes);
        }
    }
}

impl Hub {
    /// Creates a trunk. Its first control lane is up.
    ///
    /// # Errors
    /// The process has no free file descriptors.
    pub(super) fn new(
        site: &Arc<Site>,
        terms: Terms,
        acceptor: Arc<dyn LaneAcceptor>,
        control: &Arc<ControlStream>,
    ) -> io::Result<Arc<Self>> {
        let limits = site.limits;
        let config = Config {
            version: terms.version,
            one_opener: terms.has_one_opener(),
            channels: limits.channels,
            bytes: limits.peer_bytes,
            lanes: terms.lanes,
            lanes_max: MAX_LANES,
            timeouts: limits.timeouts(),
            ..Config::default()
        };
        let mut trunk = stripe::Trunk::new(terms.side(), config, 0);
        let channels = Channels::new(site, terms.peer_name());
        trunk.control_up(0);
        Ok(Arc::new(Self {
            site: Arc::clone(site),
            pacer: site.pacer_of(&terms.peer),
            terms,
            acceptor,
            admitting: Admitting::default(),
            keepers: Arc::default(),
            pool: Pool::new(),
            reads: WatchedSockets::new()?,
            writes: WatchedSockets::new()?,
            core: Mutex::new(Core {
                trunk,
                channels,
                control: Control::Up {
                    epoch: 1,
                    stream: Arc::clone(control),
                },
                cutters: BTreeMap::new(),
                dials: BTreeMap::new(),
                troubles: BTreeMap::new(),
                senders: Senders::new(limits.sending_threads),
                delayed: Vec::new(),
                connecting: 0,
                starts: Vec::new(),
                talker: Talker::Runs,
                wakes: Wakes::default(),
            }),
            talk: Condvar::new(),
            idle: Condvar::new(),
            programs: Arc::default(),
            echoes: Arc::default(),
            last_report: LastReport::default(),
            stop: Stop::new()?,
            threads: Threads::default(),
            began: Instant::now(),
        }))
    }

    /// Locks the core. Ignores poisoning, because every call leaves the core consistent.
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked {
            hub: self,
            core: Some(lock(&self.core)),
        }
    }

    /// Wakes threads now. Returns true if it wakes all threads of the lanes on which this side
    /// sends.
    pub(super) fn wake_now(&self, core: &mut Core) -> bool {
        let wakes = std::mem::take(&mut core.wakes);
        self.wake(wakes);
        wakes.senders
    }

    fn wake(&self, wakes: Wakes) {
        if wakes.talker {
            self.talk.notify_one();
        }
        if wakes.senders {
            self.idle.notify_all();
        } else {
            for _ in 0..wakes.followers {
                self.idle.notify_one();
            }
        }
        if wakes.senders || wakes.watcher {
            self.reads.wake();
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Begins the admission of a lane of this direction. Dropping the result ends the admission.
    ///
    /// # Errors
    /// Too many lanes are being admitted.
    pub(super) fn begin_admission(
        &self,
        direction: Direction,
    ) -> Result<Counted, (FaultCode, &'static str)> {
        let too_many = "too many lanes of the trunk are being admitted";
        let admission = self.admitting.begin(direction);
        admission.ok_or((FaultCode::LaneLimit, too_many))
    }

    /// Starts a thread that is joined before the trunk is removed.
    pub(super) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> bool {
        self.site.spawn_in(&self.threads, name, body)
    }

    /// Opens a channel for an accepted connection.
    ///
    /// # Errors
    /// The reason why no channel can be opened; the caller closes the connection.
    pub(super) fn open(&self, socket: &Arc<Socket>, opening: Opening) -> Result<(), OpenError> {
        let mut core = self.lock();
        let route = opening.route.clone();
        let channel = core.trunk.open(opening)?;
        core.channels.insert(channel, Arc::clone(socket), route);
        self.settle(&mut core);
        Ok(())
    }

    /// Carries out the decisions that the core has made since the last call, and wakes the threads
    /// that have work.
    pub(super) fn settle(&self, core: &mut Core) {
        let now_ns = self.now_ns();
        while let Some(action) = core.trunk.poll(now_ns) {
            self.act(core, action, now_ns);
        }
        if let Talker::Waits { until_ns } = core.talker {
            let due_ns = core.trunk.due_ns();
            let sooner = due_ns.is_some_and(|due| until_ns.is_none_or(|until| due < until));
            if sooner
                || core.trunk.has_message(now_ns)
                || !core.starts.is_empty()
                || core.control.is_over()
            {
                core.talker = Talker::Runs;
                core.wakes.talker = true;
            }
        }
        core.wake_senders();
    }

    fn act(&self, core: &mut Core, action: Action, now_ns: u64) {
        match action {
            Action::Connect {
                channel,
                route,
                parameter,
            } => {
                if core.connecting >= self.site.limits.channels {
                    let text = "too many connections to targets in progress".to_owned();
                    core.trunk.refuse(channel, FaultCode::Busy, text, now_ns);
                    return;
                }
                core.connecting += 1;
                core.starts.push(Start::Target {
                    channel,
                    route,
                    parameter,
                });
            }
            Action::Count(channel) => {
                if let Some(socket) = core.channels.socket(channel) {
                    // A socket that has failed has nothing to read.
                    let unread = unread_bytes(&*socket).unwrap_or(0);
                    core.trunk.counted(channel, unread);
                }
            }
            Action::Opened(channel) => self.watch(core, channel, now_ns),
            Action::Refused {
                channel,
                fault,
                text,
            } => core
                .channels
                .refused(channel, Failure::of_peer(fault, &text)),
            Action::ShutWrite(channel) => {
                if let Some(socket) = core.channels.socket(channel) {
                    socket.end();
                }
            }
            Action::Close(channel) => core.channels.closed(channel),
            Action::Abort {
                channel,
                fault,
                by_peer,
            } => core.channels.given_up(channel, fault, by_peer),
            Action::OpenLane(lane) => core.starts.push(Start::Lane(lane)),
            Action::OpenLaneFor(lane) => core.starts.push(Start::LaneFor(lane)),
            Action::CutLane(lane) => {
                if let Some(dial) = core.dials.remove(&Dial::Lane(Direction::Out, lane)) {
                    dial.cancel();
                }
                if let Some(cut) = core.cutters.remove(&(Direction::Out, lane)) {
                    cut.shutdown();
                }
                core.wakes.senders = true;
            }
            Action::LaneRefused { lane, fault, text } => {
                let failure = Failure::of_peer(fault, &text);
                self.not_opened(core, Direction::Out, lane, &failure);
            }
            Action::LaneFailed { lane, fault, text } => {
                let failure = Failure::of_peer(fault, &text);
                self.not_opened(core, Direction::In, lane, &failure);
            }
            Action::GiveUp(fault) => {
                core.control.give_up(fault);
                self.stop.request();
                for dial in std::mem::take(&mut core.dials).into_values() {
                    dial.cancel();
                }
                for cut in std::mem::take(&mut core.cutters).into_values() {
                    cut.shutdown();
                }
                core.wakes.senders = true;
                self.writes.wake();
            }
        }
    }

    /// Starts to watch a channel's socket. Called when the other end of the channel is connected.
    pub(super) fn watch(&self, core: &mut Core, channel: u32, now_ns: u64) {
        let Some(socket) = core.channels.socket(channel) else {
            return;
        };
        let token = u64::from(channel);
        let watched = self
            .reads
            .add(&*socket, token, Readiness::Read)
            .and_then(|()| self.writes.add(&*socket, token, Readiness::Failure));
        match watched {
            Ok(()) => core.channels.opened(channel),
            Err(error) => {
                core.trunk.fail(channel, FaultCode::ChannelBroken, now_ns);
                let what = "cannot watch the hypervisor's connection";
                let failure = Failure::new(FaultCode::ChannelBroken, what).because(&error);
                core.channels.aborted(channel, failure);
            }
        }
    }

    /// Handles the failure of a channel's connection on this side. Returns true if the channel is
    /// kept for a moment, because the peer may still end it cleanly.
    pub(super) fn fail(
        &self,
        core: &mut Core,
        channel: u32,
        error: &io::Error,
        now_ns: u64,
    ) -> bool {
        let code = FaultCode::ChannelBroken;
        let what = "the hypervisor's connection failed";
        let failure = Failure::new(code, what).because(error);
        let is_gone = matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        );
        if !is_gone {
            core.trunk.fail(channel, code, now_ns);
            core.channels.aborted(channel, failure);
            return false;
        }
        match core.trunk.left(channel, now_ns) {
            Left::Waits => {
                core.channels.consumer_gone(channel, failure);
                return true;
            }
            Left::Unread => core.channels.left_unread(channel, false),
            Left::Broken => core.channels.aborted(channel, failure),
        }
        false
    }

    /// Reports that a lane cannot be opened, and keeps the reason for the status.
    pub(super) fn not_opened(
        &self,
        core: &mut Core,
        direction: Direction,
        lane: u16,
        failure: &Failure,
    ) {
        let reason = format!("{} ({})", failure.text(), failure.code());
        core.troubles.insert(direction, reason);
        self.lane_lost(lane, failure.to_string());
    }

    /// Reports that a lane is lost or cannot be opened.
    pub(super) fn lane_lost(&self, lane: u16, why: String) {
        let peer = self.terms.peer_name();
        self.site.lanes_lost.fetch_add(1, Ordering::Relaxed);
        self.site.report(Event::LaneLost { lane, peer, why });
    }

    /// Ends the trunk because the peer broke the protocol.
    pub(super) fn broken(&self, core: &mut Core, why: &dyn std::error::Error) {
        let what = "protocol violation by the peer's tunnel";
        let failure = Failure::new(FaultCode::Malformed, what).because(why);
        let peer = self.terms.peer_name();
        self.site.report(Event::ControlLost { peer, failure });
        core.trunk.end(FaultCode::Malformed);
        self.settle(core);
    }

    /// Ends the trunk and all its channels.
    pub(super) fn end(&self, fault: FaultCode) {
        let mut core = self.lock();
        core.trunk.end(fault);
        self.settle(&mut core);
    }

    /// Keeps the trunk, although it has no channel, until the returned value is dropped.
    pub(super) fn keep(&self) -> Option<Counted> {
        Counted::one_more(&self.keepers, usize::MAX)
    }

    pub(super) fn is_kept(&self) -> bool {
        self.keepers.load(Ordering::SeqCst) > 0
    }

    pub(super) fn has_control(&self) -> bool {
        matches!(self.lock().control, Control::Up { .. })
    }

    /// Whether the connection of any lane is open. This asks the kernel, because an idle lane does
    /// not notice the end of its connection.
    pub(super) fn has_lane(&self) -> bool {
        let core = self.lock();
        core.cutters.values().any(Canceller::is_established)
    }

    /// Raises the number of lanes to `lanes`, or to the peer's limit if that is lower.
    pub(super) fn raise_lanes(&self, lanes: u16) {
        let mut core = self.lock();
        core.trunk.raise_lanes(lanes.min(self.terms.peer_lanes));
        self.settle(&mut core);
    }

    /// Stops opening channels.
    pub(super) fn drain(&self) {
        let mut core = self.lock();
        core.trunk.drain();
        self.settle(&mut core);
    }

    pub(super) fn status(&self) -> Status {
        let admitted = self.site.check_admitted(&self.terms.peer);
        let core = self.lock();
        let usage = core.trunk.usage();
        let cutters = core.cutters.clone();
        let mut status = Status {
            peer: self.terms.peer_name(),
            selector: self.terms.peer.selector(),
            at: self.terms.lanes_at,
            channels: core.channels.routes(),
            lanes: core.cutters.len(),
            by_lane: Vec::new(),
            held_bytes: usage.held,
            unacknowledged_bytes: usage.unacknowledged,
            rate: self.pacer.rate(),
            refused: admitted.err().map(|refused| refused.to_string()),
            trouble: core.trouble(),
        };
        // Unlock the core first: in the kernel, a query of a connection waits while another call
        // sends on the connection. Other threads must not wait for the core's lock meanwhile.
        drop(core);
        let lanes = cutters.into_iter();
        status.by_lane = lanes.map(|(key, cut)| lane_status(key, &cut)).collect();
        status
    }
}

fn lane_status((direction, lane): (Direction, u16), cut: &Canceller) -> LaneStatus {
    let traffic = cut.traffic();
    LaneStatus {
        lane,
        sends: direction == Direction::Out,
        bytes: match direction {
            Direction::Out => traffic.acknowledged_bytes,
            Direction::In => traffic.received_bytes,
        },
        retransmits: traffic.retransmits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i8_each_direction_has_its_own_limit_of_lanes_that_are_being_admitted() {
        let admitting = Admitting::default();
        let mut kept = Vec::new();
        for direction in [Direction::In, Direction::Out] {
            let mut all: Vec<_> = (0..MAX_LANES).map(|_| admitting.begin(direction)).collect();
            assert!(all.iter().all(Option::is_some), "{direction:?}");
            assert!(admitting.begin(direction).is_none(), "{direction:?}");
            all.pop();
            assert!(admitting.begin(direction).is_some(), "{direction:?}");
            kept.push(all);
        }
    }
}
