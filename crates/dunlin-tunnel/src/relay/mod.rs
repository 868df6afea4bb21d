//! Relays: each connection of a hypervisor is carried on its own TLS connection, without framing,
//! so that the other end may be any TLS program.
//!
//! ```text
//!  hypervisor ─▶ entrance ─▶ queue ─▶ channel ══ TLS ══▶ any server
//!  hypervisor ◀── target ◀── queue ◀─ channel ◀═ TLS ═══ port ◀── any client
//! ```
//!
//! - `port`: accepts TLS clients, one port per route.
//! - `dial`: connects to a TLS server, and converts a target's port to a server name and back.
//! - this file: queues of connections that wait for the second connection of their channel. Each
//!   entrance and each port has one queue. The members of a queue are connected one after the
//!   other, so that they arrive in the order of acceptance.
//! - `ready`: how a channel with both connections starts.
//! - `channel`: what the two threads of a channel share; `life` has its states.
//! - `process`: the threads, one per direction, which seal and open the records.
//! - `splice`: the same threads when the kernel seals and opens the records.
//! - `watch`: a thread that detects resets and vanished peers.
//!
//! A clean end is passed on as a clean end: a shutdown by the hypervisor becomes a *close_notify*,
//! and a *close_notify* from the peer becomes a shutdown. Every other end is passed on as an abort,
//! for example a connection that ends without *close_notify*. An idle channel holds no buffer for
//! data.

mod channel;
mod dial;
mod life;
mod port;
mod process;
mod ready;
mod splice;
mod watch;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use dunlin_lane::peers::Principal;
use dunlin_lane::sync::lock;
use dunlin_linux::socket::set_reset_on_close;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::text::harmless;

use super::counted::Counted;
use super::error::TunnelError;
use super::event::Event;
use super::failure::Failure;
use super::identities::Identities;
use super::options::{Entrance, Routes};
use super::parameter::fill;
use super::route::{Listen, RelayExit, Target};
use super::site::Site;
use super::socket::Socket;
use super::status::Status;
use super::target;
use dunlin_lane::handshake::relay::Relayed;

use channel::Channel;
use dial::Dial;
use port::Port;
use process::CHANNEL_BYTES;
use ready::out_of_resources;
use watch::Watch;

/// The maximum number of connections that wait in one queue.
const WAITING: usize = 512;

/// One connection of a channel, while the second connection does not exist yet.
enum Half {
    Accepted(Box<Entrance>, Dial, Socket),
    Authenticated(Box<RelayExit>, Box<Relayed>),
}

/// The relays of a tunnel.
pub(super) struct Relays {
    site: Arc<Site>,
    /// The number of the next channel.
    next: AtomicU32,
    state: Mutex<State>,
    ports: Mutex<Vec<Port>>,
    /// The number of running target programs of all peers.
    programs: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    /// One queue for each entrance and each [`Port`]. The key is the internal number of the
    /// entrance or port, not a TCP port. Each queue has a thread that connects its members.
    queues: BTreeMap<u64, VecDeque<(Half, Counted)>>,
    /// The number of channels of each peer, including those that wait.
    peers: HashMap<CountedPeer, Arc<AtomicUsize>>,
    phase: Phase,
}

/// The key under which channels are counted.
#[derive(PartialEq, Eq, Hash)]
enum CountedPeer {
    /// The peer of an entrance, as its configuration names it.
    Server(String),
    /// A client. A client that a key pin allows can have any number of certificates, so its
    /// certificate does not identify it.
    Client(Principal),
}

/// The state of the watch thread, which starts with the first channel. No transition leads back.
#[derive(Default)]
enum Phase {
    #[default]
    Unwatched,
    Watched(Arc<Watch>),
    /// The tunnel has ended: no channel may start.
    Over,
}

impl Relays {
    pub(super) fn new(site: &Arc<Site>) -> Self {
        Self {
            site: Arc::clone(site),
            next: AtomicU32::new(0),
            state: Mutex::default(),
            ports: Mutex::default(),
            programs: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Opens new ports, updates those that remain, and closes those that the configuration no
    /// longer has.
    ///
    /// # Errors
    /// [`TunnelError`]; nothing has changed.
    pub(super) fn listen(
        self: &Arc<Self>,
        identities: &Identities,
        routes: &Routes,
    ) -> Result<(), TunnelError> {
        let mut ports = lock(&self.ports);
        let (mut fresh, mut stay) = (Vec::new(), Vec::new());
        for exit in &routes.relays {
            let (crypto, allow) = (&identities.crypto, exit.allow.clone());
            let accepting = &identities.accepting;
            let tls = accepting.relay_server(crypto, allow, exit.oldest_tls)?;
            if ports.iter().any(|port| port.is_at(exit)) {
                stay.push((exit, tls));
                continue;
            }
            let relays = Arc::clone(self);
            let secured = move |port, exit, relayed| relays.take(port, exit, relayed);
            let opened = Port::open(&self.site, exit.clone(), tls, secured);
            fresh.push(opened.map_err(|error| TunnelError::Listen {
                route: exit.route.clone(),
                listen: Listen::Tcp(exit.listen),
                error,
            })?);
        }
        ports.retain(|port| {
            let own = stay.iter().find(|(exit, _)| port.is_at(exit));
            if let Some((exit, tls)) = own {
                port.renew((*exit).clone(), tls);
            }
            own.is_some()
        });
        ports.extend(fresh);
        Ok(())
    }

    pub(super) fn close_ports(&self) {
        lock(&self.ports).clear();
    }

    /// The name of each route with a port, and the port's address.
    pub(super) fn ports(&self) -> Vec<(String, SocketAddr)> {
        let of = |port: &Port| (port.route(), port.address);
        lock(&self.ports).iter().map(of).collect()
    }

    /// Carries a connection that was accepted at an entrance. Callers pass the connections of one
    /// entrance in the order of acceptance.
    pub(super) fn carry(
        self: &Arc<Self>,
        entrance: &Entrance,
        listener: u64,
        parameter: &str,
        socket: Socket,
    ) {
        match Dial::of(entrance, parameter) {
            Ok(dial) => {
                let peer = dial.to.clone();
                let half = Half::Accepted(Box::new(entrance.clone()), dial, socket);
                self.wait(listener, CountedPeer::Server(peer.clone()), &peer, half);
            }
            Err(failure) => refuse_accepted(&self.site, entrance, &socket, failure),
        }
    }

    /// Tests the path to a relay's peer: connects without asking for a port.
    ///
    /// # Errors
    /// The peer does not answer, or is not a peer of the entrance.
    pub(super) fn test(&self, entrance: &Entrance) -> Result<(), Failure> {
        dial::reach(&self.site, entrance, &Dial::of(entrance, "")?).map(drop)
    }

    /// Carries the connection of a TLS client that a port has authenticated.
    fn take(self: &Arc<Self>, port: u64, mut exit: RelayExit, relayed: Box<Relayed>) {
        let counted = CountedPeer::Client(relayed.peer.principal());
        let peer = relayed.peer.to_string();
        if let Target::Ports { .. } = exit.target {
            let asked = dial::parameter(relayed.asked_for.as_deref());
            match (&*asked, fill(&exit.route, &exit.target, &asked)) {
                // A client that asks for no port only tests the path.
                ("", _) => return,
                (_, Ok(target)) => exit.target = target,
                (_, Err(failure)) => {
                    let half = Half::Authenticated(Box::new(exit), relayed);
                    return half.refuse(&self.site, failure);
                }
            }
        }
        let half = Half::Authenticated(Box::new(exit), relayed);
        self.wait(port, counted, &peer, half);
    }

    /// Puts the first connection of a channel into a queue, or refuses it.
    fn wait(self: &Arc<Self>, queue: u64, counted: CountedPeer, peer: &str, half: Half) {
        let site = &self.site;
        let mut state = self.lock();
        let counted = match self.admit(&mut state, queue, counted, peer) {
            Ok(counted) => counted,
            Err(failure) => {
                drop(state);
                return half.refuse(site, failure);
            }
        };
        let is_served = state.queues.contains_key(&queue);
        let waiting = state.queues.entry(queue).or_default();
        waiting.push_back((half, counted));
        drop(state);
        if is_served {
            return;
        }
        let own = Arc::clone(self);
        let serving = site.spawn("dunlin-relay-queue".to_owned(), move || {
            while let Some((half, counted)) = own.next(queue) {
                own.connect(half, counted);
            }
        });
        if !serving {
            let failure = Failure::new(FaultCode::Kernel, "cannot start a thread");
            while let Some((half, _)) = self.next(queue) {
                half.refuse(site, failure.clone());
            }
        }
    }

    /// Counts a channel that will wait in a queue, or refuses it if a limit is reached or the
    /// tunnel is draining.
    fn admit(
        &self,
        state: &mut State,
        queue: u64,
        counted: CountedPeer,
        peer: &str,
    ) -> Result<Counted, Failure> {
        let limits = &self.site.limits;
        let most = usize::try_from(limits.peer_bytes / CHANNEL_BYTES).unwrap_or(usize::MAX);
        let most = most.clamp(1, limits.channels);
        // This also refuses connections while the tunnel ends, because a tunnel drains before it
        // ends.
        if self.site.is_draining() {
            return Err(Failure::new(FaultCode::Ended, "tunnel is shutting down"));
        }
        let busy = |text| Failure::new(FaultCode::Busy, text);
        let (queues, peers) = (&state.queues, &mut state.peers);
        peers.retain(|_, count| count.load(Ordering::SeqCst) > 0);
        let counted = Counted::one_more(peers.entry(counted).or_default(), most);
        let peer = harmless(peer);
        let counted = counted.ok_or_else(|| {
            busy(format!(
                "too many channels of {peer} (at most {most}, by this tunnel's limits on channels \
                 and memory)"
            ))
        })?;
        if queues.get(&queue).is_some_and(|all| all.len() >= WAITING) {
            return Err(busy(format!(
                "too many connections are waiting for {peer} (at most {WAITING})"
            )));
        }
        Ok(counted)
    }

    /// Opens the second connection of a channel.
    fn connect(&self, half: Half, counted: Counted) {
        let site = &self.site;
        match half {
            Half::Accepted(entrance, dial, socket) => match dial::reach(site, &entrance, &dial) {
                Ok(relayed) => self.start(&entrance.route, socket, relayed, counted),
                Err(failure) => refuse_accepted(site, &entrance, &socket, failure),
            },
            Half::Authenticated(exit, relayed) => {
                let (route, target) = (&exit.route, &exit.target);
                let reached = site.dials.begin().and_then(|dialling| {
                    let stop = dialling.cancel.wakeup();
                    target::open(site, &self.programs, route, target, stop)
                });
                match reached {
                    Ok(socket) => self.start(route, socket, *relayed, counted),
                    Err(failure) => Half::Authenticated(exit, relayed).refuse(site, failure),
                }
            }
        }
    }

    /// Removes and returns the next member of a queue. If there is none, removes the queue.
    fn next(&self, queue: u64) -> Option<(Half, Counted)> {
        let mut state = self.lock();
        let next = state.queues.get_mut(&queue).and_then(VecDeque::pop_front);
        if next.is_none() {
            state.queues.remove(&queue);
        }
        next
    }

    /// Starts the threads of a channel that has both connections.
    fn start(&self, route: &str, socket: Socket, relayed: Relayed, counted: Counted) {
        let site = &self.site;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let made = Channel::new(site, number, route, socket, relayed);
        let watched = made.and_then(|channel| self.watch(&channel).map(|()| channel));
        match watched {
            Ok(ready) => {
                site.report(Event::Opened(ready.id()));
                ready.start(counted);
            }
            Err(failure) => {
                let route = route.to_owned();
                site.report(Event::Refused { route, failure });
            }
        }
    }

    /// Starts to watch a channel. If that fails, aborts the channel.
    fn watch(&self, channel: &Arc<Channel>) -> Result<(), Failure> {
        let mut state = self.lock();
        let watch = match &state.phase {
            Phase::Unwatched => Watch::start(&self.site).map_err(|error| out_of_resources(&error)),
            Phase::Watched(watch) => Ok(Arc::clone(watch)),
            Phase::Over => Err(ended()),
        };
        match watch {
            Ok(watch) => {
                watch.add(channel);
                state.phase = Phase::Watched(watch);
                Ok(())
            }
            Err(failure) => {
                drop(state);
                channel.abort(failure.clone());
                Err(failure)
            }
        }
    }

    /// The number of channels, including those that wait.
    pub(super) fn channels(&self) -> usize {
        let state = self.lock();
        let counts = state.peers.values();
        counts.map(|count| count.load(Ordering::SeqCst)).sum()
    }

    pub(super) fn status(&self) -> Vec<Status> {
        let channels = match &self.lock().phase {
            Phase::Watched(watch) => watch.channels(),
            Phase::Unwatched | Phase::Over => Vec::new(),
        };
        channels.iter().map(|one| one.status()).collect()
    }

    /// Ends all relays immediately.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        let waiting: Vec<_> = state.queues.values_mut().map(std::mem::take).collect();
        let phase = std::mem::replace(&mut state.phase, Phase::Over);
        drop(state);
        for (half, _) in waiting.into_iter().flatten() {
            half.refuse(&self.site, ended());
        }
        if let Phase::Watched(watch) = phase {
            for channel in watch.channels() {
                channel.abort(ended());
            }
            watch.stop();
        }
    }
}

impl Half {
    fn refuse(self, site: &Site, failure: Failure) {
        match self {
            Self::Accepted(entrance, _, socket) => {
                refuse_accepted(site, &entrance, &socket, failure);
            }
            Self::Authenticated(exit, relayed) => {
                // Fails only if the connection is closed.
                let _ = set_reset_on_close(&relayed.stream);
                let route = exit.route;
                site.report(Event::Refused { route, failure });
            }
        }
    }
}

fn refuse_accepted(site: &Site, entrance: &Entrance, socket: &Socket, failure: Failure) {
    socket.fail(&failure);
    let route = entrance.route.clone();
    site.report(Event::Refused { route, failure });
}

fn ended() -> Failure {
    let text = "tunnel ended before the channel had ended";
    Failure::new(FaultCode::Ended, text)
}
