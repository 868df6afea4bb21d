//! The tunnel: connections of hypervisors that know nothing of it, striped over
//! lanes.
//!
//! ```text
//!  hypervisor ─▶ entrance ─┐                                ┌─▶ target ─▶ hypervisor
//!  hypervisor ─▶ entrance ─┼─▶ trunk ═ lanes ═ trunk ─▶ target ─▶ …
//!                          └── control lane: who, how far ──┘
//! ```
//!
//! A [`Tunnel`] accepts connections at its *entrances* and, for its peers, connects to the targets
//! of its *exits*. All channels to one peer share one *trunk*: a control lane, and lanes that are
//! opened when there is something to carry. [`dunlin_proto::stripe`] makes the decisions without
//! sockets, threads or a clock; this crate carries them out.
//!
//! ```text
//!   Tunnel ─▶ entrance, on_demand ─▶ carriers ─▶ trunks, relay
//!                                       trunks ─▶ talk ─▶ send, receive, exit ─▶ hub ─▶ site
//!                                          └─▶ handshake ────────────────────────────────▲
//! ```
//!
//! Each file imports only files that are below it:
//!
//! - `options`: routes and limits, checked before anything is opened. `route`: their ends.
//! - `entrance`: listeners of the configuration; `on_demand`: those that are opened for one purpose
//!   while the tunnel runs; `listener`: what both listen on. `port`: where the peers connect.
//! - `carriers`: gives an accepted connection to a trunk or to a relay.
//! - `trunks`: dials, accepts, keeps and forgets trunks. `handshake`: how one begins; `terms`: what
//!   both sides have agreed on; `dials`: handshakes that end with the tunnel.
//! - `talk`: the talker and the control lane. `send` and `receive`: the lanes. `exit`: connects a
//!   peer's channel; `target`: to a socket or a program; `parameter`: what a channel may choose.
//! - `hub`: the core of a trunk under its lock, and its decisions that do not wait. `channels`: the
//!   connections of a trunk, and how each ends.
//! - `relay`: channels that are not striped, but carried on a TLS connection each, by any program.
//! - `site`: what trunks and relays share. `piece`, `socket` and `watched`: the bytes and their
//!   sockets; `meter` and `counted`: how many; `threads`: threads that are joined.
//!
//! Threads of a trunk: the talker, the reader of the control lane, the poller of slow consumers, and
//! one for each lane and direction.
#![forbid(unsafe_code)]

mod carriers;
mod channels;
mod counted;
mod dials;
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
mod options;
mod parameter;
mod piece;
mod port;
mod receive;
mod relay;
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
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::limits::MAX_LANES;

use dunlin_lane::peers::Peers;
use dunlin_lane::policy::ServerTls;
use dunlin_lane::security::SealedLanes;

pub use error::TunnelError;
pub use event::Event;
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
pub use route::{Listen, RelayExit, Target};
pub use status::{RouteStatus, Status};

pub use parameter::{BadParameter, BadParameterTarget, Parameter};

use carriers::Carriers;
use entrance::EntranceListener;
use relay::Relays;
use site::Site;
use threads::Worker;
use trunks::Trunks;

/// Events that wait for whoever runs the tunnel.
const EVENTS: usize = 1024;
/// How often a tunnel that drains looks whether it is done.
const DRAIN_STEP: Duration = Duration::from_millis(20);

/// What a tunnel has from its process.
#[derive(Debug, Default)]
pub struct Given {
    /// Sockets for routes that listen on [`Listen::Passed`].
    pub sockets: Sockets,
    /// By what lanes go over IPsec: those of [`Mode::StripeOverIpsec`], and those of peers that
    /// ask for it. Without, such peers are refused.
    pub sealed: Option<Arc<dyn SealedLanes>>,
}

/// A tunnel that runs. Dropped, it ends at once, and its channels with it.
pub struct Tunnel {
    site: Arc<Site>,
    carriers: Carriers,
    tls: ServerTls,
    entrances: Mutex<Vec<EntranceListener>>,
    on_demand: Mutex<Vec<OnDemandListener>>,
    sockets: Sockets,
    address: SocketAddr,
    /// Accepts the peers until the tunnel ends.
    port: Option<Worker>,
}

impl Tunnel {
    /// Starts a tunnel that takes its peers' connections from `listener`, and
    /// tells `observer`, on a thread of its own, what happens.
    ///
    /// # Errors
    /// [`TunnelError`]; nothing runs then.
    pub fn start(
        listener: TcpListener,
        identities: Identities,
        routes: &Routes,
        limits: Limits,
        observer: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, TunnelError> {
        let nothing = Given::default();
        Self::start_with(listener, nothing, identities, routes, limits, observer)
    }

    /// The same with what its process has for it.
    ///
    /// # Errors
    /// [`TunnelError`]; nothing runs then.
    pub fn start_with(
        listener: TcpListener,
        given: Given,
        identities: Identities,
        routes: &Routes,
        limits: Limits,
        mut observer: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, TunnelError> {
        let Given { sockets, sealed } = given;
        check_sealed(sealed.is_some(), routes)?;
        let address = listener.local_addr()?;
        let tls = identities.server(routes)?;
        // An identity that cannot connect is an error of the start, not of the first connection.
        identities.client(Peers::OneOf(Vec::new()))?;
        let (events, heard) = sync_channel(EVENTS);
        let site = Site::new(
            limits,
            address.port(),
            sealed,
            identities.clone(),
            routes,
            events,
        );
        let site = Arc::new(site);
        // It ends with the last thread that could report an event.
        let body = move || heard.iter().for_each(&mut observer);
        let observing = thread::Builder::new().name("dunlin-events".to_owned());
        drop(observing.spawn(body)?);
        let carriers = Carriers {
            site: Arc::clone(&site),
            trunks: Arc::new(Trunks::new(&site)),
            relays: Arc::new(Relays::new(&site)),
        };
        let (trunks, own, own_tls) = (Arc::clone(&carriers.trunks), Arc::clone(&site), tls.clone());
        let port = Worker::start("dunlin-port".to_owned(), move |stopped| {
            port::listen(&trunks, &own, &listener, &own_tls, stopped);
        })?;
        let tunnel = Self {
            site,
            carriers,
            tls,
            entrances: Mutex::default(),
            on_demand: Mutex::default(),
            sockets,
            address,
            port: Some(port),
        };
        tunnel.listen(&identities, routes)?;
        Ok(tunnel)
    }

    /// Where its peers reach it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where its entrances listen, by their routes' names; a port of 0 is the one
    /// that the kernel chose.
    pub fn entrances(&self) -> Vec<(String, Listen)> {
        let of = |listener: &EntranceListener| {
            (listener.entrance().route, listener.listens_on().clone())
        };
        lock(&self.entrances).iter().map(of).collect()
    }

    /// Where its relays take TLS clients, by their routes' names.
    pub fn relay_ports(&self) -> Vec<(String, SocketAddr)> {
        self.carriers.relays.ports()
    }

    /// Uses other routes and identities for all that comes from now on; channels
    /// that are open stay as they are.
    ///
    /// # Errors
    /// [`TunnelError`]; everything is as before then.
    pub fn replace(&self, identities: Identities, routes: &Routes) -> Result<(), TunnelError> {
        check_sealed(self.site.sealed.is_some(), routes)?;
        let tls = identities.server(routes)?;
        self.listen(&identities, routes)?;
        self.tls.replace(&tls);
        // None is opened by what was configured before.
        let on_demand = lock(&self.on_demand);
        self.site.replace(identities, routes);
        for listener in on_demand.iter() {
            if !routes.entrances.iter().any(|one| listener.is_of(one)) {
                listener.close();
            }
        }
        Ok(())
    }

    /// Opens a listener for one purpose, such as one VM's migration. It goes when
    /// its last channel has ended, or with [`OnDemandListener::close`].
    ///
    /// # Errors
    /// [`DemandError`]; nothing listens then.
    pub fn open(&self, demand: &Demand) -> Result<OnDemandListener, DemandError> {
        let route = &demand.route;
        let mut on_demand = lock(&self.on_demand);
        let Some(entrance) = self.site.entrance(route) else {
            let route = route.clone();
            return Err(DemandError::Route { route });
        };
        if let Some(lanes) = demand
            .lanes
            .filter(|lanes| !(1..=MAX_LANES).contains(lanes))
        {
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
        let lanes = demand.lanes.unwrap_or(entrance.lanes);
        let entrance = Entrance { listen, ..entrance };
        let opened = OnDemandListener::open(&self.carriers, entrance, demand, &self.sockets);
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

    /// The listeners that [`Tunnel::open`] has opened and that are not over.
    pub fn on_demand_listeners(&self) -> Vec<OnDemandListener> {
        let mut on_demand = lock(&self.on_demand);
        on_demand.retain(|listener| !listener.status().is_over());
        on_demand.clone()
    }

    /// The routes of this side, and what went over them.
    pub fn routes(&self) -> Vec<RouteStatus> {
        let mut routes = self.site.routes();
        for listener in lock(&self.entrances).iter() {
            let entrance = listener.entrance();
            let of = |one: &&mut RouteStatus| one.route == entrance.route;
            if let Some(status) = routes.iter_mut().find(of) {
                status.listens = Some(listener.listens_on().clone());
            }
        }
        routes
    }

    /// What is carried now.
    pub fn status(&self) -> Vec<Status> {
        let mut all = self.carriers.trunks.status();
        all.extend(self.carriers.relays.status());
        all
    }

    /// Takes no more connections and waits until all channels have ended, at most
    /// `limit`. Returns how many channels are left, which are cut off when this is
    /// dropped.
    pub fn drain(&self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        {
            // Those that are there are closed below, and no other is opened.
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

    /// Opens what is new and closes what is no more. A place that stays is
    /// listened at all the time, whoever's it becomes.
    fn listen(&self, identities: &Identities, routes: &Routes) -> Result<(), TunnelError> {
        let mut entrances = lock(&self.entrances);
        let mut fresh = Vec::new();
        let mut stay = Vec::new();
        for entrance in &routes.entrances {
            if entrance.listen == Listen::OnDemand {
                continue;
            }
            if let Some(at) = entrances.iter().position(|one| one.is_at(entrance)) {
                stay.push((at, entrance));
                continue;
            }
            let listener = EntranceListener::open(&self.carriers, entrance.clone(), &self.sockets);
            fresh.push(listener.map_err(|error| TunnelError::Listen {
                route: entrance.route.clone(),
                listen: entrance.listen.clone(),
                error,
            })?);
        }
        let relays = &self.carriers.relays;
        let ports = relays.prepare(identities, routes)?;
        relays.open(ports);
        for (at, entrance) in &stay {
            entrances[*at].lead(entrance);
        }
        let mut at = 0..;
        entrances.retain(|_| {
            let at = at.next();
            stay.iter().any(|(stays, _)| Some(*stays) == at)
        });
        entrances.extend(fresh);
        Ok(())
    }

    /// Nothing listens any more.
    fn close_all(&self) {
        lock(&self.entrances).clear();
        self.carriers.relays.close_ports();
        for listener in lock(&self.on_demand).iter() {
            listener.close();
        }
    }
}

/// Whether every route's lanes can go as they are to.
fn check_sealed(is_there: bool, routes: &Routes) -> Result<(), TunnelError> {
    let over_ipsec = |one: &&Entrance| one.mode == Mode::StripeOverIpsec;
    match routes.entrances.iter().find(over_ipsec) {
        Some(one) if !is_there => {
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
        self.site.join();
    }
}
