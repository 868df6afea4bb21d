//! What all trunks of a tunnel share: routes, identity, limits, and who is
//! there.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{LaneSecurity, SessionId};
use dunlin_proto::stripe::{OpenError, Opening};

use super::dial;
use super::event::Event;
use super::failure::Failure;
use super::hub::{Hub, Terms};
use super::identities::Identities;
use super::meter::Meter;
use super::options::{Entrance, Exit, Limits, Routes};
use super::route::{Destination, RelayExit};
use super::socket::Socket;
use super::status::{RouteStatus, Status};
use dunlin_lane::control::ControlStream;
use dunlin_lane::dial::{Connector, DialCancel, StandardConnector};
use dunlin_lane::peers::{PeerIdentity, PeerRefused, Peers};
use dunlin_lane::policy::ClientTls;
use dunlin_lane::security::SealedLanes;

/// Connections that wait while their peer is being connected to; a hypervisor
/// with the most channels that it can have.
const WAITING: usize = 512;
/// Trunks with one peer: one for each of the other side's lists of who may
/// answer, in either direction, and those that have yet to notice that they are
/// over.
const OF_ONE_PEER: usize = 8;

pub(super) struct Site {
    pub(super) limits: Limits,
    /// Where the peers' lanes are taken.
    pub(super) port: u16,
    /// By what lanes go over IPsec.
    pub(super) sealed: Option<Arc<dyn SealedLanes>>,
    pub(super) connector: Arc<dyn Connector>,
    identities: Mutex<Identities>,
    exits: Mutex<BTreeMap<String, Exit>>,
    entrances: Mutex<Vec<Entrance>>,
    relay_exits: Mutex<Vec<RelayExit>>,
    /// By routes' names, of those that are or were in the configuration.
    meters: Mutex<BTreeMap<String, Arc<Meter>>>,
    /// Lanes to each peer, by where it is.
    lanes: Mutex<Vec<(String, u16)>>,
    trunks: Mutex<BTreeMap<SessionId, Arc<Hub>>>,
    peerings: Mutex<Vec<Peering>>,
    draining: AtomicBool,
    events: SyncSender<Event>,
    untold: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    dials: Mutex<Dials>,
}

/// Control lanes that are being agreed on, on either side.
#[derive(Default)]
struct Dials {
    /// The tunnel ends: none begins any more.
    is_over: bool,
    last: u64,
    under_way: BTreeMap<u64, DialCancel>,
}

/// A control lane that is being agreed on, until this is dropped.
pub(super) struct Dialling<'a> {
    site: &'a Site,
    number: u64,
    pub(super) cancel: DialCancel,
}

impl Drop for Dialling<'_> {
    fn drop(&mut self) {
        lock(&self.site.dials).under_way.remove(&self.number);
    }
}

/// A peer to which this side makes the trunk.
struct Peering {
    destination: Destination,
    state: State,
}

enum State {
    /// It is being made; these wait, in the order in which they were accepted.
    Dialling(Vec<(Arc<Socket>, Opening)>),
    Up(Arc<Hub>),
}

impl Site {
    pub(super) fn new(
        limits: Limits,
        port: u16,
        sealed: Option<Arc<dyn SealedLanes>>,
        identities: Identities,
        routes: &Routes,
        events: SyncSender<Event>,
    ) -> Self {
        Self {
            limits: limits.bounded(),
            port,
            sealed,
            connector: Arc::new(StandardConnector),
            identities: Mutex::new(identities),
            exits: Mutex::new(exits(routes)),
            entrances: Mutex::new(routes.entrances.clone()),
            relay_exits: Mutex::new(routes.relays.clone()),
            meters: Mutex::default(),
            lanes: Mutex::new(lanes(routes)),
            trunks: Mutex::default(),
            peerings: Mutex::default(),
            draining: AtomicBool::new(false),
            events,
            untold: AtomicUsize::new(0),
            threads: Mutex::default(),
            dials: Mutex::default(),
        }
    }

    /// Other routes and identities, for what comes from now on.
    pub(super) fn replace(&self, identities: Identities, routes: &Routes) {
        *lock(&self.identities) = identities;
        *lock(&self.exits) = exits(routes);
        lock(&self.entrances).clone_from(&routes.entrances);
        lock(&self.relay_exits).clone_from(&routes.relays);
        *lock(&self.lanes) = lanes(routes);
    }

    pub(super) fn exit(&self, route: &str) -> Option<Exit> {
        lock(&self.exits).get(route).cloned()
    }

    /// How connections of this route leave the host.
    pub(super) fn entrance(&self, route: &str) -> Option<Entrance> {
        let entrances = lock(&self.entrances);
        entrances.iter().find(|one| one.route == route).cloned()
    }

    /// The figures of a route of this side's configuration.
    pub(super) fn meter(&self, route: &str) -> Arc<Meter> {
        let mut meters = lock(&self.meters);
        if let Some(meter) = meters.get(route) {
            return Arc::clone(meter);
        }
        let meter = Arc::<Meter>::default();
        meters.insert(route.to_owned(), Arc::clone(&meter));
        meter
    }

    /// The routes that are configured, with those that carry something still.
    pub(super) fn routes(&self) -> Vec<RouteStatus> {
        let mut routes = BTreeMap::<String, RouteStatus>::new();
        let mut of = |route: &str, change: &dyn Fn(&mut RouteStatus)| {
            let named = routes.entry(route.to_owned());
            change(named.or_insert_with(|| RouteStatus::named(route)));
        };
        for one in lock(&self.entrances).iter() {
            of(&one.route, &|status| status.to = Some(one.to.clone()));
        }
        for exit in lock(&self.exits).values() {
            of(&exit.route, &|status| {
                status.target = Some(exit.target.clone());
            });
        }
        for exit in lock(&self.relay_exits).iter() {
            of(&exit.route, &|status| {
                status.target = Some(exit.target.clone());
            });
        }
        let mut meters = lock(&self.meters);
        for (route, meter) in meters.iter() {
            let traffic = meter.traffic();
            if traffic.open > 0 {
                of(route, &|_| {});
            }
        }
        // One that was taken out and carries nothing begins anew if it comes back.
        meters.retain(|route, _| routes.contains_key(route));
        for (route, meter) in meters.iter() {
            if let Some(status) = routes.get_mut(route) {
                status.traffic = meter.traffic();
            }
        }
        routes.into_values().collect()
    }

    /// At least so many lanes to a peer from now on, until routes are replaced.
    pub(super) fn raise_lanes(&self, to: &str, lanes: u16) {
        for (at, most) in lock(&self.lanes).iter_mut() {
            if at == to {
                *most = (*most).max(lanes);
            }
        }
        for peering in lock(&self.peerings).iter() {
            if let State::Up(hub) = &peering.state
                && peering.destination.to == to
            {
                hub.raise_lanes(lanes);
            }
        }
    }

    pub(super) fn client_tls(&self, peers: Peers) -> Result<ClientTls, Failure> {
        lock(&self.identities).client(peers).map_err(|error| {
            let text = "our identity cannot be used to connect";
            Failure::new(FaultCode::Unauthorised, text).because(&error)
        })
    }

    /// Looks a peer up whose trunk exists already: its key may have been denied, or its certificate
    /// revoked, since.
    ///
    /// # Errors
    /// It gets no new channel.
    pub(super) fn check_admitted(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        let identities = lock(&self.identities);
        identities.connecting.check_admitted(peer)?;
        identities.accepting.check_admitted(peer)
    }

    pub(super) fn with_identities<R>(&self, use_them: impl FnOnce(&Identities) -> R) -> R {
        use_them(&lock(&self.identities))
    }

    /// Lanes of a peer that are taken at the same time.
    pub(super) fn lanes_max(&self) -> u16 {
        MAX_LANES
    }

    /// Tells whoever runs the tunnel, unless he is too slow to listen: nothing
    /// waits for him.
    pub(super) fn tell(&self, event: Event) {
        let untold = self.untold.swap(0, Ordering::Relaxed);
        if untold > 0 {
            let text = format!("{untold} events were not told, since nobody took them");
            if self.events.try_send(Event::Warning(text)).is_err() {
                self.untold.fetch_add(untold, Ordering::Relaxed);
            }
        }
        if let Err(TrySendError::Full(_)) = self.events.try_send(event) {
            self.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Starts a thread that is joined when the tunnel ends.
    pub(super) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> bool {
        match std::thread::Builder::new().name(name).spawn(body) {
            Ok(thread) => {
                let mut threads = lock(&self.threads);
                threads.retain(|one| !one.is_finished());
                threads.push(thread);
                true
            }
            Err(error) => {
                self.tell(Event::Warning(format!("cannot start a thread: {error}")));
                false
            }
        }
    }

    pub(super) fn trunk(&self, session: &SessionId) -> Option<Arc<Hub>> {
        lock(&self.trunks).get(session).cloned()
    }

    /// Whether there is room for one more trunk with a peer.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn room_for(&self, peer: &PeerIdentity) -> Result<(), Failure> {
        self.room(&lock(&self.trunks), peer)
    }

    fn room(
        &self,
        trunks: &BTreeMap<SessionId, Arc<Hub>>,
        peer: &PeerIdentity,
    ) -> Result<(), Failure> {
        if self.draining.load(Ordering::SeqCst) {
            let text = "this tunnel is about to end";
            return Err(Failure::new(FaultCode::Ended, text));
        }
        let full = |count: usize, of: &str| {
            let text = format!("{count} trunks {of} stand already");
            Err(Failure::new(FaultCode::Busy, text))
        };
        if trunks.len() >= self.limits.trunks {
            return full(trunks.len(), "of this tunnel");
        }
        let theirs = trunks.values();
        match theirs.filter(|hub| hub.terms.is_the_peer(peer)).count() {
            OF_ONE_PEER.. => full(OF_ONE_PEER, "with this peer"),
            _ => Ok(()),
        }
    }

    /// Takes a new trunk in.
    pub(super) fn keep(
        self: &Arc<Self>,
        terms: Terms,
        control: ControlStream,
    ) -> Result<Arc<Hub>, Failure> {
        let session = terms.session;
        let mut trunks = lock(&self.trunks);
        self.room(&trunks, &terms.peer)?;
        if trunks.contains_key(&session) {
            let text = "the session's number is in use";
            return Err(Failure::new(FaultCode::UnknownSession, text));
        }
        let hub = Hub::new(self, terms, self.lanes_max(), control).map_err(|error| {
            let text = "no descriptors are left for a trunk";
            Failure::new(FaultCode::DescriptorLimit, text).because(&error)
        })?;
        trunks.insert(session, Arc::clone(&hub));
        Ok(hub)
    }

    /// A trunk is over, and its threads are joined.
    pub(super) fn forget(&self, hub: &Arc<Hub>, fault: FaultCode) {
        let gone = lock(&self.trunks).remove(&hub.terms.session);
        lock(&self.peerings)
            .retain(|one| !matches!(&one.state, State::Up(up) if Arc::ptr_eq(up, hub)));
        if gone.is_some() {
            let peer = hub.peer_name();
            self.tell(Event::TrunkEnded { peer, fault });
        }
    }

    /// A connection was accepted at an entrance. Connections of one entrance come
    /// here in the order in which they were accepted.
    pub(super) fn carry(
        self: &Arc<Self>,
        entrance: &Entrance,
        security: LaneSecurity,
        listener: u64,
        parameter: String,
        socket: Socket,
    ) {
        let destination = Destination {
            to: entrance.to.clone(),
            peers: entrance.peers.clone(),
            security,
        };
        let socket = Arc::new(socket);
        let opening = Opening {
            listener,
            route: entrance.route.clone(),
            parameter,
            window_bytes: entrance.window_bytes,
        };
        let mut peerings = lock(&self.peerings);
        let same = |one: &&mut Peering| one.destination == destination;
        let peering = peerings.iter_mut().find(same);
        let dead = match peering {
            Some(Peering {
                state: State::Dialling(waiting),
                ..
            }) => {
                if waiting.len() < WAITING {
                    waiting.push((socket, opening));
                } else {
                    drop(peerings);
                    let text = format!("{WAITING} connections wait for {} already", entrance.to);
                    self.refuse(&socket, &opening, Failure::new(FaultCode::Busy, text));
                }
                return;
            }
            Some(Peering {
                state: State::Up(hub),
                ..
            }) if self.check_admitted(&hub.terms.peer).is_err() => Arc::clone(hub),
            Some(Peering {
                state: State::Up(hub),
                ..
            }) => match hub.open(&socket, opening.clone()) {
                Ok(()) => return,
                Err(OpenError::Over) => Arc::clone(hub),
                Err(error) => {
                    drop(peerings);
                    return self.refuse(&socket, &opening, of_open(&error));
                }
            },
            None => {
                peerings.push(Peering {
                    destination: destination.clone(),
                    state: State::Dialling(vec![(socket, opening)]),
                });
                drop(peerings);
                return self.dial(destination);
            }
        };
        // The one that stood is over, or its peer is refused by now. Make another; if the peer is
        // refused still, that says why.
        for one in peerings.iter_mut() {
            if matches!(&one.state, State::Up(up) if Arc::ptr_eq(up, &dead)) {
                one.state = State::Dialling(vec![(Arc::clone(&socket), opening.clone())]);
            }
        }
        drop(peerings);
        self.dial(destination);
    }

    fn dial(self: &Arc<Self>, to: Destination) {
        let site = Arc::clone(self);
        let there = to.clone();
        let body = move || site.make(&there);
        if !self.spawn("dunlin-dial".to_owned(), body) {
            let text = "cannot start a thread";
            let failure = Failure::new(FaultCode::Kernel, text);
            self.dialled(&to, Err(failure));
        }
    }

    fn make(self: &Arc<Self>, to: &Destination) {
        let lanes = || {
            let lanes = lock(&self.lanes);
            let found = lanes.iter().find(|(at, _)| *at == to.to);
            found.map_or(self.limits.lanes, |(_, lanes)| *lanes)
        };
        let made = dial::dial(self, to.clone(), lanes());
        let up = made.as_ref().ok().cloned();
        self.dialled(to, made);
        // More may have been asked for meanwhile.
        if let Some(hub) = up {
            hub.raise_lanes(lanes());
        }
    }

    /// Opens the channels that have waited, or closes them.
    fn dialled(&self, to: &Destination, made: Result<Arc<Hub>, Failure>) {
        let mut peerings = lock(&self.peerings);
        let same =
            |one: &Peering| one.destination == *to && matches!(one.state, State::Dialling(_));
        let Some(at) = peerings.iter().position(same) else {
            return;
        };
        let mut refused = Vec::new();
        match made {
            Ok(hub) => {
                let up = State::Up(Arc::clone(&hub));
                if let State::Dialling(waiting) = std::mem::replace(&mut peerings[at].state, up) {
                    for (socket, opening) in waiting {
                        if let Err(error) = hub.open(&socket, opening.clone()) {
                            refused.push((socket, opening, of_open(&error)));
                        }
                    }
                }
            }
            Err(failure) => {
                if let State::Dialling(waiting) = peerings.remove(at).state {
                    for (socket, opening) in waiting {
                        refused.push((socket, opening, failure.clone()));
                    }
                }
                let to = to.to.clone();
                self.tell(Event::TrunkFailed { to, failure });
            }
        }
        drop(peerings);
        for (socket, opening, failure) in refused {
            self.refuse(&socket, &opening, failure);
        }
    }

    fn refuse(&self, socket: &Socket, opening: &Opening, failure: Failure) {
        socket.fail(&failure);
        let route = opening.route.clone();
        self.tell(Event::Refused { route, failure });
    }

    /// A control lane is being agreed on, which ends with the tunnel.
    ///
    /// # Errors
    /// The tunnel ends already, or no descriptors are left.
    pub(super) fn dialling(&self) -> Result<Dialling<'_>, Failure> {
        let cancel = DialCancel::new().map_err(|error| {
            Failure::new(FaultCode::Kernel, "cannot create an eventfd").because(&error)
        })?;
        let mut dials = lock(&self.dials);
        if dials.is_over {
            return Err(Failure::new(FaultCode::Ended, "this tunnel ends"));
        }
        dials.last += 1;
        let number = dials.last;
        dials.under_way.insert(number, cancel.clone());
        Ok(Dialling {
            site: self,
            number,
            cancel,
        })
    }

    /// Ends what [`Site::dialling`] has begun, and begins nothing any more.
    pub(super) fn end_dials(&self) {
        let mut dials = lock(&self.dials);
        dials.is_over = true;
        dials.under_way.values().for_each(DialCancel::cancel);
    }

    /// From now on [`Site::is_draining`].
    pub(super) fn is_to_drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// No channel is opened or taken any more.
    pub(super) fn drain(&self) {
        self.is_to_drain();
        for hub in self.all() {
            let mut core = hub.lock();
            core.trunk.drain();
            hub.settle(&mut core);
        }
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Connections that are carried, or are about to be.
    pub(super) fn channels(&self) -> usize {
        let waiting = |one: &Peering| match &one.state {
            State::Dialling(waiting) => waiting.len(),
            State::Up(_) => 0,
        };
        let waiting: usize = lock(&self.peerings).iter().map(waiting).sum();
        let all = self.all();
        let carried = all.iter().map(|hub| hub.lock().trunk.channels());
        waiting + carried.sum::<usize>()
    }

    pub(super) fn all(&self) -> Vec<Arc<Hub>> {
        lock(&self.trunks).values().cloned().collect()
    }

    pub(super) fn status(&self) -> Vec<Status> {
        self.all().iter().map(|hub| hub.status()).collect()
    }

    /// Waits for all threads; they have been told to end.
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
}

fn exits(routes: &Routes) -> BTreeMap<String, Exit> {
    let named = |exit: &Exit| (exit.route.clone(), exit.clone());
    routes.exits.iter().map(named).collect()
}

/// The most lanes that any route wants to each place.
fn lanes(routes: &Routes) -> Vec<(String, u16)> {
    let mut lanes = BTreeMap::<&str, u16>::new();
    for entrance in &routes.entrances {
        let most = lanes.entry(&entrance.to).or_default();
        *most = (*most).max(entrance.lanes);
    }
    let owned = |(to, lanes): (&str, u16)| (to.to_owned(), lanes);
    lanes.into_iter().map(owned).collect()
}

fn of_open(error: &OpenError) -> Failure {
    let code = match error {
        OpenError::TooMany { .. } => FaultCode::Busy,
        OpenError::Draining | OpenError::Over => FaultCode::Ended,
        OpenError::Name => FaultCode::UnknownRoute,
    };
    Failure::new(code, error.to_string())
}
