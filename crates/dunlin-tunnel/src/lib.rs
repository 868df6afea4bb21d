//! The tunnel: carries TCP and unix socket connections of unmodified hypervisors, striped over
//! lanes.
//!
//! ```text
//!  hypervisor ─▶ entrance ─┐                                ┌─▶ target ─▶ hypervisor
//!  hypervisor ─▶ entrance ─┼─▶ trunk ═ lanes ═ trunk ─▶ target ─▶ …
//!                          └── control lane: open, credit ──┘
//! ```
//!
//! A [`Tunnel`] accepts connections at its *entrances*. For its peers it connects to the targets of
//! its *exits*. All channels to one peer share one *trunk*: a control lane, and data lanes that are
//! opened when a channel has bytes to send. [`dunlin_proto::stripe`] makes the decisions without
//! sockets, threads or a clock; this crate carries them out.
//!
//! ```text
//!   Tunnel ─▶ entrance, redirect, on_demand ─▶ carriers ─▶ trunks, relay
//!                                       trunks ─▶ talk ─▶ send, receive, exit ─▶ hub ─▶ site
//!                                          └─▶ handshake ────────────────────────────────▲
//! ```
//!
//! A file imports only files below it:
//!
//! - `options`: routes and limits, checked before anything is opened. `route`: the two ends of a
//!   route.
//! - `entrance`: the listeners of the configuration. `redirect`: the listeners for connections that
//!   the packet filter redirects. `on_demand`: listeners that are opened for one purpose while the
//!   tunnel runs. `listener`: the sockets of all these. `port`: where the peers connect.
//! - `probe`: sends bytes to a peer and back, to test the path, and asks for a peer's report.
//!   `echo` and `report`: the peer's side of these.
//! - `carriers`: passes an accepted connection to a trunk or a relay.
//! - `trunks`: dials, accepts, keeps and removes trunks. `handshake`: how a trunk begins. `terms`:
//!   what both sides have agreed on. `dials`: dials and handshakes, which the end of the tunnel
//!   cancels.
//! - `talk`: the talker and the control lane. `send` and `receive`: the lanes. `open`: dials a
//!   lane. `exit`: connects a channel of the peer. `target`: connects to a socket or starts a
//!   program. `reached`: which socket a path's channels are connected to. `parameter`: what a
//!   channel may choose in a target.
//! - `hub`: the core of a trunk, its lock, and the decisions that are carried out without waiting.
//!   `control`: the state of its control lane. `channels`: the connections of a trunk, and how each
//!   ends.
//! - `relay`: channels that are not striped; each has its own TLS connection, to any program.
//! - `site`: what trunks and relays share. `piece`, `socket` and `watched`: the bytes and their
//!   sockets. `meter` and `counted`: counters. `rate`: limits of rates. `threads`: threads that are
//!   joined.
//!
//! A trunk has these threads: the talker, the reader of the control lane, the poller for slow
//! consumers, and one per lane and direction.
#![forbid(unsafe_code)]

mod carriers;
mod channels;
mod control;
mod counted;
mod dials;
mod echo;
mod entrance;
mod error;
mod event;
mod exit;
mod failure;
mod handshake;
mod hub;
mod identities;
mod listener;
mod meter;
mod on_demand;
mod open;
mod options;
mod parameter;
mod piece;
mod port;
mod probe;
mod rate;
mod reached;
mod receive;
mod redirect;
mod relay;
mod report;
mod route;
mod send;
mod site;
mod socket;
mod status;
mod talk;
mod target;
mod terms;
mod threads;
mod trunks;
mod watched;

use dunlin_lane::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::observe::Observer;

use dunlin_lane::identity::Dated;
use dunlin_lane::peers::{Peer, Peers};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::security::SealedLanes;

pub use dunlin_linux::local::FileAccess;
pub use dunlin_proto::ipsec::ports::PortRange;
pub use echo::MAX_PROBE_BYTES;
pub use error::TunnelError;
pub use event::{ChannelId, Event};
pub use failure::Failure;
pub use identities::Identities;
pub use listener::Sockets;
pub use meter::Traffic;
pub use on_demand::{
    Demand, DemandError, ListenerStatus, MAX_ON_DEMAND_LISTENERS, OnDemandListener,
};
pub use options::{
    BadRoute, BadRouteReason, DEFAULT_LANES, Entrance, Exit, Limits, MAX_WINDOW_BYTES, Mode,
    Routes, WINDOW_BYTES,
};
pub use probe::{Probe, Report};
pub use rate::LEAST_RATE;
pub use report::MAX_REPORT_BYTES;
pub use route::{Listen, RelayExit, Target};
pub use status::{LaneStatus, RouteStatus, Status};

pub use parameter::{BadParameter, BadParameterTarget, Parameter};

use carriers::Carriers;
use entrance::EntranceListener;
use rate::Rates;
use redirect::Gate;
use relay::Relays;
use report::Reporter;
use site::{SEPARATOR, Site};
use threads::Worker;
use trunks::Trunks;

/// The maximum number of events that wait for the observer.
const EVENTS: usize = 1024;
/// How often [`Tunnel::drain`] checks whether all channels have ended.
const DRAIN_STEP: Duration = Duration::from_millis(20);

/// Starts a [`Tunnel`]; made by [`Tunnel::builder`].
#[must_use = "no tunnel runs before `start`"]
pub struct TunnelBuilder<'a> {
    listener: Option<TcpListener>,
    identities: Identities,
    routes: &'a Routes,
    limits: Limits,
    sockets: Sockets,
    sealed: Option<Arc<dyn SealedLanes>>,
    observer: Box<dyn Observer<Event>>,
    reporter: Option<Reporter>,
}

impl TunnelBuilder<'_> {
    /// Sets the limits.
    pub fn limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Passes sockets for routes that listen on [`Listen::Passed`].
    pub fn sockets(self, sockets: Sockets) -> Self {
        Self { sockets, ..self }
    }

    /// The implementation of lanes over IPsec, for routes with [`Mode::StripeOverIpsec`] and for
    /// peers that offer IPsec. If `sealed` is `None`, the tunnel refuses peers that offer IPsec. A
    /// tunnel without a listener ignores `sealed`, because peers could not open their lanes to such
    /// a tunnel.
    pub fn sealed(self, sealed: Option<Arc<dyn SealedLanes>>) -> Self {
        Self { sealed, ..self }
    }

    /// Reports events to `observer`, on a separate thread.
    pub fn observer(self, observer: impl Observer<Event> + 'static) -> Self {
        let observer = Box::new(observer);
        Self { observer, ..self }
    }

    /// Sets the answer to peers that call [`Tunnel::report`] and may use one of this side's
    /// targets. `reporter` makes a text of at most [`MAX_REPORT_BYTES`], at most once a second for
    /// each trunk. Without a reporter the tunnel refuses such requests.
    pub fn report(self, reporter: impl Fn() -> String + Send + Sync + 'static) -> Self {
        let reporter = Some(Box::new(reporter) as Reporter);
        Self { reporter, ..self }
    }

    /// Starts the tunnel.
    ///
    /// # Errors
    /// [`TunnelError`]; nothing is left running.
    pub fn start(self) -> Result<Tunnel, TunnelError> {
        Tunnel::start(self)
    }
}

/// A running tunnel. Dropping it ends the tunnel and aborts its channels.
pub struct Tunnel {
    site: Arc<Site>,
    carriers: Carriers,
    tls: ServerTls,
    entrances: Mutex<Vec<EntranceListener>>,
    /// The listeners for redirected connections, by their port on loopback.
    gates: Mutex<BTreeMap<u16, Gate>>,
    on_demand: Mutex<Vec<OnDemandListener>>,
    sockets: Sockets,
    address: Option<SocketAddr>,
    /// Accepts connections of the peers until the tunnel ends.
    port: Option<Worker>,
}

impl Tunnel {
    /// A tunnel that accepts its peers on `listener`, with default limits and no observer. A tunnel
    /// without a listener only connects, to peers of wire version 2 or later.
    pub fn builder(
        listener: impl Into<Option<TcpListener>>,
        identities: Identities,
        routes: &Routes,
    ) -> TunnelBuilder<'_> {
        TunnelBuilder {
            listener: listener.into(),
            identities,
            routes,
            limits: Limits::default(),
            sockets: Sockets::default(),
            sealed: None,
            observer: Box::new(|_: &Event| ()),
            reporter: None,
        }
    }

    fn start(builder: TunnelBuilder<'_>) -> Result<Self, TunnelError> {
        let TunnelBuilder {
            listener,
            identities,
            routes,
            limits,
            sockets,
            sealed,
            observer,
            reporter,
        } = builder;
        let sealed = sealed.filter(|_| listener.is_some());
        check_sealed(sealed.is_some(), routes)?;
        let address = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let tls = identities.server(routes)?;
        // Check now that the tunnel can connect with this identity. Otherwise, only the first
        // connection would show the error.
        identities.client(Peers::OneOf(Vec::new()))?;
        let (events, queue) = sync_channel(EVENTS);
        let (limits, own) = (limits.bounded(), identities.clone());
        let port = address.map(|address| address.port());
        let site = Site::new(limits, port, sealed, own, routes, events, reporter);
        let site = Arc::new(site);
        // The thread ends when the last sender of events is dropped.
        let body = move || queue.iter().for_each(|event| observer.event(&event));
        let observing = thread::Builder::new().name("dunlin-events".to_owned());
        drop(observing.spawn(body)?);
        let carriers = Carriers {
            site: Arc::clone(&site),
            trunks: Arc::new(Trunks::new(&site)),
            relays: Arc::new(Relays::new(&site)),
        };
        let (trunks, own, own_tls) = (Arc::clone(&carriers.trunks), Arc::clone(&site), tls.clone());
        let listen = |listener| {
            Worker::start("dunlin-port".to_owned(), move |stopped| {
                port::listen(&trunks, &own, &listener, &own_tls, stopped);
            })
        };
        let port = listener.map(listen).transpose()?;
        let tunnel = Self {
            site,
            carriers,
            tls,
            entrances: Mutex::default(),
            gates: Mutex::default(),
            on_demand: Mutex::default(),
            sockets,
            address,
            port,
        };
        tunnel.listen(&identities, routes)?;
        Ok(tunnel)
    }

    /// The address at which peers reach the tunnel, if it accepts peers.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The name of each route that has a listener, and the listener's address. A configured port of
    /// 0 is replaced with the port that the kernel chose.
    pub fn entrances(&self) -> Vec<(String, Listen)> {
        let of =
            |listener: &EntranceListener| (listener.entrance().route, listener.listens_on.clone());
        lock(&self.entrances).iter().map(of).collect()
    }

    /// The name of each relay route, and the address at which it accepts TLS clients.
    pub fn relay_ports(&self) -> Vec<(String, SocketAddr)> {
        self.carriers.relays.ports()
    }

    /// Replaces routes and identities. Channels that are already open keep the old ones.
    ///
    /// # Errors
    /// [`TunnelError`]; nothing has changed.
    pub fn replace(&self, identities: Identities, routes: &Routes) -> Result<(), TunnelError> {
        check_sealed(self.site.sealed.is_some(), routes)?;
        let tls = identities.server(routes)?;
        self.listen(&identities, routes)?;
        self.tls.replace(&tls);
        // Hold the lock, so that no listener is opened with the old configuration in the meantime.
        let on_demand = lock(&self.on_demand);
        self.site.replace(identities, routes);
        for listener in on_demand.iter() {
            if !routes.entrances.iter().any(|one| listener.is_of(one)) {
                listener.close();
            }
        }
        Ok(())
    }

    /// Opens a listener for one purpose, such as the migration of one VM. The listener closes when
    /// it has had channels and all of them have ended, or when [`OnDemandListener::close`] is
    /// called.
    ///
    /// # Errors
    /// [`DemandError`]; no listener is opened.
    pub fn open(&self, demand: &Demand) -> Result<OnDemandListener, DemandError> {
        let route = &demand.route;
        let mut on_demand = lock(&self.on_demand);
        let Some(entrance) = self.site.entrance(route) else {
            let route = route.clone();
            return Err(DemandError::Route { route });
        };
        let lanes = demand.lanes.unwrap_or(entrance.lanes);
        if !(1..=MAX_LANES).contains(&lanes) {
            return Err(DemandError::Lanes { lanes });
        }
        on_demand.retain(|listener| !listener.status().is_over());
        if self.site.is_draining() {
            return Err(DemandError::Ending);
        }
        if on_demand.len() >= MAX_ON_DEMAND_LISTENERS {
            return Err(DemandError::Busy);
        }
        let (to, listen) = (entrance.to.clone(), demand.listen.clone());
        let entrance = Entrance { listen, ..entrance };
        let access = self.site.access(route).replaced_by(&demand.access);
        let (carriers, sockets) = (&self.carriers, &self.sockets);
        let opened = OnDemandListener::open(carriers, entrance, demand, &access, sockets);
        let listener = opened.map_err(|error| DemandError::Listen {
            route: route.clone(),
            listen: demand.listen.clone(),
            error,
        })?;
        on_demand.push(listener.clone());
        drop(on_demand);
        self.site.raise_lanes(&to, lanes);
        self.carriers.trunks.raise_lanes(&to, lanes);
        Ok(listener)
    }

    /// Limits the rate at which this side sends on a route, in bytes per second, until the routes
    /// are replaced. `None` removes the limit.
    ///
    /// # Errors
    /// [`DemandError::Route`]: the configuration has no such route.
    pub fn set_rate(&self, route: &str, bytes_per_s: Option<u64>) -> Result<(), DemandError> {
        if !self.site.has_route(route) {
            let route = route.to_owned();
            return Err(DemandError::Route { route });
        }
        let change = |rates: &mut Rates| rates.set_route(route, bytes_per_s);
        self.site.change_rates(change);
        Ok(())
    }

    /// Limits the rate at which this side sends to a peer, as [`Tunnel::set_rate`] does for a
    /// route.
    pub fn set_peer_rate(&self, peer: &Peer, bytes_per_s: Option<u64>) {
        self.site
            .change_rates(|rates| rates.set_peer(peer, bytes_per_s));
    }

    /// The listeners that [`Tunnel::open`] opened and that have not ended.
    pub fn on_demand_listeners(&self) -> Vec<OnDemandListener> {
        let mut on_demand = lock(&self.on_demand);
        on_demand.retain(|listener| !listener.status().is_over());
        on_demand.clone()
    }

    /// Sends `bytes`, at most [`MAX_PROBE_BYTES`], through a channel to the peer of `entrance`, and
    /// reads them back. The channel is on a trunk with the entrance's settings. The peer's tunnel
    /// returns the bytes if this side may use one of its targets.
    ///
    /// # Errors
    /// [`Failure`]: the reason why the channel was refused or failed. The channels of other
    /// connections are not affected.
    pub fn probe(&self, entrance: &Entrance, bytes: u64) -> Result<Probe, Failure> {
        probe::run(&self.carriers, entrance, bytes)
    }

    /// Asks the peer of `entrance` for its report, over a trunk with the entrance's settings. The
    /// peer's tunnel answers if this side may use one of its targets.
    ///
    /// # Errors
    /// [`Failure`], with [`FaultCode::UnknownRoute`](dunlin_proto::fault::FaultCode::UnknownRoute)
    /// if the peer has no report or does not allow this side, and
    /// [`FaultCode::Malformed`](dunlin_proto::fault::FaultCode::Malformed) if the report is longer
    /// than [`MAX_REPORT_BYTES`] or is not text.
    pub fn report(&self, entrance: &Entrance) -> Result<Report, Failure> {
        probe::ask(&self.carriers, entrance)
    }

    /// The routes of this side and their traffic.
    pub fn routes(&self) -> Vec<RouteStatus> {
        let mut routes = self.site.routes();
        for listener in lock(&self.entrances).iter() {
            let entrance = listener.entrance();
            let of = |one: &&mut RouteStatus| one.route == entrance.route;
            if let Some(status) = routes.iter_mut().find(of) {
                status.listens = Some(listener.listens_on.clone());
                status.lost = listener.lost();
            }
        }
        for status in &mut routes {
            let mut peers = status.to.iter().flat_map(|to| to.split(SEPARATOR));
            status.trouble = peers.find_map(|to| self.carriers.trunks.failure(to));
        }
        routes
    }

    /// The number of redirected connections that were refused, because their original destination
    /// belongs to no route; `None` if no route's connections are redirected.
    pub fn refused_redirects(&self) -> Option<u64> {
        let refused = || self.site.strays.load(Ordering::Relaxed);
        (!lock(&self.gates).is_empty()).then(refused)
    }

    /// The number of lanes that were lost or could not be opened since the tunnel started.
    pub fn lanes_lost(&self) -> u64 {
        self.site.lanes_lost.load(Ordering::Relaxed)
    }

    /// The validity of each item in the tunnel's identities: first the items for connections that
    /// the tunnel dials, then the other items, for connections that it accepts.
    pub fn validity(&self) -> Vec<Dated> {
        let identities = self.site.identities();
        let (dialled, accepted) = (&identities.connecting, &identities.accepting);
        let mut dates = dialled.dates().to_vec();
        for one in accepted.dates() {
            let is_same = |other: &Dated| other.path == one.path && other.position == one.position;
            if !dates.iter().any(is_same) {
                dates.push(one.clone());
            }
        }
        dates
    }

    /// The status of each trunk and of each relay's channel.
    pub fn status(&self) -> Vec<Status> {
        let mut all = self.carriers.trunks.status();
        all.extend(self.carriers.relays.status());
        all
    }

    /// Stops accepting connections and waits until all channels have ended, for at most `limit`.
    /// Returns the number of remaining channels; dropping the tunnel aborts them.
    pub fn drain(&self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        {
            // While this lock is held, no listener can be opened. The existing listeners are closed
            // below.
            let _held = lock(&self.on_demand);
            self.site.drain();
        }
        self.close_all();
        self.carriers.trunks.drain();
        loop {
            let channels = self.carriers.channels();
            if channels == 0 || Instant::now() >= until {
                return channels;
            }
            thread::sleep(DRAIN_STEP);
        }
    }

    /// Opens new listeners and closes those that the configuration no longer has. A listener stays
    /// open while its address stays in the configuration, even if another route now uses the
    /// address.
    fn listen(&self, identities: &Identities, routes: &Routes) -> Result<(), TunnelError> {
        let mut entrances = lock(&self.entrances);
        let mut gates = lock(&self.gates);
        let (mut fresh, mut new_gates) = (Vec::new(), BTreeMap::new());
        let mut stay = Vec::new();
        for entrance in &routes.entrances {
            if matches!(
                entrance.listen,
                Listen::OnDemand | Listen::Redirected { .. }
            ) {
                continue;
            }
            if entrances.iter().any(|one| one.is_at(entrance)) {
                stay.push(entrance);
                continue;
            }
            let access = routes.access(&entrance.route);
            let (entrance_of, sockets) = (entrance.clone(), &self.sockets);
            let listener = EntranceListener::open(&self.carriers, entrance_of, &access, sockets);
            fresh.push(listener.map_err(|error| TunnelError::Listen {
                route: entrance.route.clone(),
                listen: entrance.listen.clone(),
                error,
            })?);
        }
        let redirected = routes.entrances.iter().filter_map(|one| match one.listen {
            Listen::Redirected { at, .. } => Some(at),
            _ => None,
        });
        let redirected: BTreeSet<u16> = redirected.collect();
        for at in redirected.iter().filter(|at| !gates.contains_key(at)) {
            new_gates.insert(*at, Gate::start(&self.carriers, *at)?);
        }
        self.carriers.relays.listen(identities, routes)?;
        gates.retain(|at, _| redirected.contains(at));
        gates.append(&mut new_gates);
        entrances.retain(|listener| {
            let own = stay.iter().find(|entrance| listener.is_at(entrance));
            if let Some(entrance) = own {
                listener.set_entrance(entrance, &routes.access(&entrance.route));
            }
            own.is_some()
        });
        entrances.extend(fresh);
        Ok(())
    }

    /// Closes all listeners.
    fn close_all(&self) {
        lock(&self.entrances).clear();
        lock(&self.gates).clear();
        self.carriers.relays.close_ports();
        for listener in lock(&self.on_demand).iter() {
            listener.close();
        }
    }
}

/// Returns an error if a route needs IPsec and `has_ipsec` is false.
fn check_sealed(has_ipsec: bool, routes: &Routes) -> Result<(), TunnelError> {
    let over_ipsec = |one: &&Entrance| one.mode == Mode::StripeOverIpsec;
    match routes.entrances.iter().find(over_ipsec) {
        Some(one) if !has_ipsec => {
            let route = one.route.clone();
            Err(TunnelError::NoIpsec { route })
        }
        _ => Ok(()),
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.close_all();
        self.port = None;
        self.site.drain();
        self.site.dials.end();
        let Carriers { trunks, relays, .. } = &self.carriers;
        trunks.drain();
        trunks.end();
        relays.end();
        self.site.threads.join();
    }
}
