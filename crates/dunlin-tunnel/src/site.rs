//! The state that the trunks and relays of a tunnel share: routes and their counters,
//! identities, limits, events and threads. It refers neither to trunks nor to relays.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard};

use dunlin_linux::local::FileAccess;
use dunlin_proto::fault::FaultCode;

use super::dials::Dials;
use super::event::Event;
use super::failure::{Failure, Lost, OrFailure};
use super::identities::Identities;
use super::meter::Meter;
use super::options::{Entrance, Exit, Limits, Routes};
use super::rate::{Pacer, Rates};
use super::reached::ReachedSockets;
use super::report::Reporter;
use super::route::Listen;
use super::status::RouteStatus;
use super::threads::Threads;
use dunlin_lane::dial::{Connector, StandardConnector};
use dunlin_lane::peers::{PeerIdentity, PeerRefused, Peers};
use dunlin_lane::policy::ClientTls;
use dunlin_lane::security::SealedLanes;

/// Separates the addresses of a route's peers in [`RouteStatus::to`].
pub(super) const SEPARATOR: &str = ", ";

pub(super) struct Site {
    pub(super) limits: Limits,
    /// The port on which this side accepts the peers' lanes; `None` if it accepts no peers.
    pub(super) port: Option<u16>,
    /// The implementation of lanes over IPsec.
    pub(super) sealed: Option<Arc<dyn SealedLanes>>,
    pub(super) connector: Arc<dyn Connector>,
    /// Makes the report for peers that ask.
    pub(super) reporter: Option<Reporter>,
    identities: Mutex<Identities>,
    routes: Mutex<Routes>,
    /// The rate limits in force.
    rates: Mutex<Rates>,
    /// The rate limit of each connected peer.
    peers: Mutex<Vec<(PeerIdentity, Arc<Pacer>)>>,
    /// Counters by route name, for all routes that are or were configured.
    meters: Mutex<BTreeMap<String, Arc<Meter>>>,
    /// The lane count for each peer address.
    lanes: Mutex<BTreeMap<String, u16>>,
    /// The unix sockets to which channels are connected.
    pub(super) reached: ReachedSockets,
    /// The listeners of [`super::Tunnel::open`] with a path.
    on_demand: OnDemand,
    draining: AtomicBool,
    events: SyncSender<Event>,
    /// The number of events that were dropped because the queue was full.
    dropped: AtomicUsize,
    /// The number of redirected connections that were refused, because no route takes them.
    pub(super) strays: AtomicU64,
    /// The number of lanes that were lost or could not be opened.
    pub(super) lanes_lost: AtomicU64,
    pub(super) threads: Threads,
    /// The dials and handshakes of control lanes and relays that are in progress.
    pub(super) dials: Dials,
}

/// The paths of on-demand listeners, and whether they listen there at present.
type OnDemand = Arc<Mutex<Vec<(PathBuf, Lost)>>>;

/// An on-demand listener with a path, listed in the [`Site`] until this value is dropped.
pub(super) struct Listed {
    all: OnDemand,
    lost: Lost,
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.all).retain(|(_, lost)| !Arc::ptr_eq(lost, &self.lost));
    }
}

impl Site {
    pub(super) fn new(
        limits: Limits,
        port: Option<u16>,
        sealed: Option<Arc<dyn SealedLanes>>,
        identities: Identities,
        routes: &Routes,
        events: SyncSender<Event>,
        reporter: Option<Reporter>,
    ) -> Self {
        Self {
            limits,
            port,
            sealed,
            connector: Arc::new(StandardConnector),
            reporter,
            identities: Mutex::new(identities),
            routes: Mutex::new(routes.clone()),
            rates: Mutex::new(routes.rates.clone()),
            peers: Mutex::default(),
            meters: Mutex::default(),
            lanes: Mutex::new(lanes(routes)),
            reached: ReachedSockets::default(),
            on_demand: Arc::default(),
            draining: AtomicBool::new(false),
            events,
            dropped: AtomicUsize::new(0),
            strays: AtomicU64::new(0),
            lanes_lost: AtomicU64::new(0),
            threads: Threads::default(),
            dials: Dials::default(),
        }
    }

    /// Replaces routes and identities for later connections.
    pub(super) fn replace(&self, identities: Identities, routes: &Routes) {
        *lock(&self.identities) = identities;
        *lock(&self.routes) = routes.clone();
        *lock(&self.lanes) = lanes(routes);
        self.change_rates(|rates| rates.clone_from(&routes.rates));
    }

    /// Changes the rate limits of routes and peers, also for open channels.
    pub(super) fn change_rates(&self, change: impl FnOnce(&mut Rates)) {
        let mut rates = lock(&self.rates);
        change(&mut rates);
        for (route, meter) in lock(&self.meters).iter() {
            meter.pacer.set_rate(rates.routes.get(route).copied());
        }
        for (peer, pacer) in lock(&self.peers).iter() {
            pacer.set_rate(rates.of_peer(peer));
        }
    }

    /// The rate limit that all channels of a peer share.
    pub(super) fn pacer_of(&self, peer: &PeerIdentity) -> Arc<Pacer> {
        let rates = lock(&self.rates);
        let mut peers = lock(&self.peers);
        // Remove peers that have neither a trunk nor a relay: only this list still refers to their
        // pacers.
        peers.retain(|(_, pacer)| Arc::strong_count(pacer) > 1);
        let principal = peer.principal();
        if let Some((_, pacer)) = peers.iter().find(|(one, _)| one.is(&principal)) {
            return Arc::clone(pacer);
        }
        let pacer = Arc::<Pacer>::default();
        pacer.set_rate(rates.of_peer(peer));
        peers.push((peer.clone(), Arc::clone(&pacer)));
        pacer
    }

    /// Lists an on-demand listener until the returned value is dropped. `None` if the listener has
    /// no path.
    pub(super) fn list_on_demand(&self, listen: &Listen, lost: Lost) -> Option<Listed> {
        let Listen::Unix(path) = listen else {
            return None;
        };
        lock(&self.on_demand).push((path.clone(), Arc::clone(&lost)));
        let all = Arc::clone(&self.on_demand);
        Some(Listed { all, lost })
    }

    /// Whether an on-demand listener listens at `path`. Through such a listener, connections of this
    /// host leave for a peer, under this host's identity.
    pub(super) fn is_on_demand(&self, path: &Path) -> bool {
        let file = |path: &Path| std::fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
        let found = file(path);
        let is_found = |(own, lost): &(PathBuf, Lost)| {
            found.is_some() && file(own) == found && lock(lost).is_none()
        };
        lock(&self.on_demand).iter().any(is_found)
    }

    pub(super) fn exit(&self, route: &str) -> Option<Exit> {
        let routes = lock(&self.routes);
        routes.exits.iter().find(|one| one.route == route).cloned()
    }

    /// Whether a peer may use any target of this side now.
    pub(super) fn has_exit_for(&self, peer: &PeerIdentity) -> bool {
        let routes = lock(&self.routes);
        let mut exits = routes.exits.iter();
        self.check_admitted(peer).is_ok()
            && exits.any(|exit| exit.allow.authorise_further(peer).is_ok())
    }

    /// The entrance of a route, unless its connections are redirected.
    pub(super) fn entrance(&self, route: &str) -> Option<Entrance> {
        let routes = lock(&self.routes);
        let mut entrances = routes.entrances.iter();
        let is_it = |one: &&Entrance| {
            one.route == route && !matches!(one.listen, Listen::Redirected { .. })
        };
        entrances.find(is_it).cloned()
    }

    /// The entrances of connections that are redirected to this port of loopback.
    pub(super) fn redirected_to(&self, port: u16) -> Vec<Entrance> {
        let routes = lock(&self.routes);
        let entrances = routes.entrances.iter();
        let is_there =
            |one: &&Entrance| matches!(one.listen, Listen::Redirected { at, .. } if at == port);
        entrances.filter(is_there).cloned().collect()
    }

    /// The entrance for redirected connections with this original destination.
    pub(super) fn redirected_entrance(&self, original: SocketAddr) -> Option<Entrance> {
        let routes = lock(&self.routes);
        let mut entrances = routes.entrances.iter();
        let found = entrances.find(|one| one.listen.is_redirected_from(original));
        found.cloned()
    }

    /// The owner, group and mode of a route's unix sockets.
    pub(super) fn access(&self, route: &str) -> FileAccess {
        lock(&self.routes).access(route)
    }

    /// Whether this side has an end of the route.
    pub(super) fn has_route(&self, route: &str) -> bool {
        let routes = lock(&self.routes);
        routes.entrances.iter().any(|one| one.route == route)
            || routes.exits.iter().any(|one| one.route == route)
            || routes.relays.iter().any(|one| one.route == route)
    }

    pub(super) fn meter(&self, route: &str) -> Arc<Meter> {
        let rates = lock(&self.rates);
        let mut meters = lock(&self.meters);
        let meter = meters.entry(route.to_owned()).or_default();
        meter.pacer.set_rate(rates.routes.get(route).copied());
        Arc::clone(meter)
    }

    /// The configured routes, and those that still have open connections.
    pub(super) fn routes(&self) -> Vec<RouteStatus> {
        let mut routes = BTreeMap::<String, RouteStatus>::new();
        let configured = lock(&self.routes).clone();
        let rates = lock(&self.rates).clone();
        for one in configured.entrances {
            let status = routes.entry(one.route).or_default();
            if matches!(one.listen, Listen::Redirected { .. }) {
                status.listens = Some(one.listen);
            }
            // A redirected route has an entrance for each address of its peers.
            let others = status.to.take().map(|others| others + SEPARATOR);
            status.to = Some(others.unwrap_or_default() + &one.to);
        }
        for exit in configured.exits {
            routes.entry(exit.route).or_default().target = Some(exit.target);
        }
        for exit in configured.relays {
            routes.entry(exit.route).or_default().target = Some(exit.target);
        }
        // Remove the counters of each route that is no longer configured and has no open
        // connections. If the route is added again, its counters start at zero.
        lock(&self.meters).retain(|route, meter| {
            let traffic = *lock(&meter.traffic);
            if traffic.open > 0 {
                routes.entry(route.clone()).or_default();
            }
            let status = routes.get_mut(route);
            status.map(|status| status.traffic = traffic).is_some()
        });
        for (route, status) in &mut routes {
            status.route.clone_from(route);
            status.rate = rates.routes.get(route).copied();
        }
        routes.into_values().collect()
    }

    /// Raises the lane count for a peer to at least `lanes`, until the routes are replaced.
    pub(super) fn raise_lanes(&self, to: &str, lanes: u16) {
        if let Some(most) = lock(&self.lanes).get_mut(to) {
            *most = (*most).max(lanes);
        }
    }

    /// The lane count of a trunk that this side dials to this address.
    pub(super) fn lanes_to(&self, to: &str) -> u16 {
        let lanes = lock(&self.lanes).get(to).copied();
        lanes.unwrap_or(self.limits.lanes)
    }

    pub(super) fn client_tls(&self, peers: Peers) -> Result<ClientTls, Failure> {
        self.identities().client(peers).or_failure(
            FaultCode::Unauthorised,
            "this side's identity cannot be used to connect",
        )
    }

    /// Checks a peer that has a trunk again: after the handshake, the peer's key may have been
    /// denied, its certificate or an intermediate revoked, or its authority removed. The two
    /// identities of this side may have different authorities; one of them has admitted the peer.
    ///
    /// # Errors
    /// The peer is refused and gets no new channel.
    pub(super) fn check_admitted(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        let identities = self.identities();
        identities.connecting.check_admitted(peer)?;
        identities.accepting.check_admitted(peer)?;
        let chain = identities.connecting.check_peer_chain(peer);
        chain.or_else(|_| identities.accepting.check_peer_chain(peer))
    }

    pub(super) fn identities(&self) -> MutexGuard<'_, Identities> {
        lock(&self.identities)
    }

    /// Reports an event. If the observer's queue is full, the event is dropped and counted, so that
    /// no thread waits for the observer.
    pub(super) fn report(&self, event: Event) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let text = format!("event queue full: dropped events: {dropped}");
            if self.events.try_send(Event::Warning(text)).is_err() {
                self.dropped.fetch_add(dropped, Ordering::Relaxed);
            }
        }
        if let Err(TrySendError::Full(_)) = self.events.try_send(event) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reports that a connection was rejected.
    pub(super) fn reject(&self, from: impl ToString, fault: FaultCode, why: impl ToString) {
        let (from, why) = (from.to_string(), why.to_string());
        self.report(Event::Rejected { from, fault, why });
    }

    /// Reports that `what` cannot accept connections because descriptors or memory ran out.
    pub(super) fn cannot_accept(&self, what: &str, error: &io::Error) {
        let text = format!(
            "{what} cannot accept connections ({error}): this process or host is out of file \
             descriptors or memory; raise the limit of open files (`ulimit -n`, LimitNOFILE= of \
             a service), or free descriptors and memory"
        );
        self.report(Event::Warning(text));
    }

    /// Starts a thread that is joined when the tunnel ends. Reports a failure as an event.
    pub(super) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> bool {
        self.spawn_in(&self.threads, name, body)
    }

    /// Like [`Site::spawn`], but adds the thread to `threads`, which the caller joins.
    pub(super) fn spawn_in(
        &self,
        threads: &Threads,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> bool {
        let started = threads.spawn(name, body);
        if let Err(error) = &started {
            self.report(Event::Warning(format!("cannot start a thread: {error}")));
        }
        started.is_ok()
    }

    /// Begins to drain: [`Site::is_draining`] is true from now on.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }
}

/// The largest lane count of the routes to each address.
fn lanes(routes: &Routes) -> BTreeMap<String, u16> {
    let mut lanes = BTreeMap::new();
    for entrance in &routes.entrances {
        let most = lanes.entry(entrance.to.clone()).or_default();
        *most = entrance.lanes.max(*most);
    }
    lanes
}
