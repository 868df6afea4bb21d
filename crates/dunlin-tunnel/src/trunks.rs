//! The trunks of a tunnel. This side dials a trunk when it accepts the first connection for a peer,
//! or accepts a trunk that a peer has dialled. A trunk is removed when it has ended.
//!
//! ```text
//!   carry ─▶ Dialling ──── up ───────▶ Up ─── over, or peer or own certificate refused ─▶ Dialling
//!               └── no trunk ─▶ its connections are refused                 (next connection)
//!
//!   a peer's control lane ─▶ accept ─▶ a trunk, or the next control lane of one
//!   a peer's lane ─────────▶ accept_lane ─▶ its trunk
//! ```

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{self, LaneDirection, LaneSecurity, Refusal, SessionId};
use dunlin_proto::stripe::{OpenError, Opening};

use super::event::Event;
use super::failure::{Failure, OrFailure};
use super::handshake::{Agreed, Received, Selected, random, send_accept};
use super::hub::Hub;
use super::options::Entrance;
use super::route::Destination;
use super::site::Site;
use super::socket::Socket;
use super::status::Status;
use super::{receive, send, talk};
use dunlin_lane::accept::LaneSocket;
use dunlin_lane::control::ControlStream;
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::proof::is_proved;
use dunlin_lane::security::{acceptor, dialer};

/// The maximum number of connections that wait while their trunk is dialled. It is enough for one
/// hypervisor with the maximum number of channels.
const WAITING: usize = 512;
/// The maximum number of trunks with one peer. Routes that allow the same identities share a trunk,
/// but the trunks that this side dials are separate from those that the peer dials. A trunk also
/// counts if it has lost the peer but has not detected that yet.
const OF_ONE_PEER: usize = 8;

pub(super) struct Trunks {
    site: Arc<Site>,
    all: Mutex<BTreeMap<SessionId, Arc<Hub>>>,
    peerings: Mutex<Vec<Peering>>,
    /// For each address of a peer, why the last attempt to dial a trunk failed.
    failures: Mutex<BTreeMap<String, String>>,
}

/// A trunk that accepts lanes but has no threads yet. [`Trunks::run`] must be called even if the
/// trunk has already ended, because that call removes it.
struct Kept {
    hub: Arc<Hub>,
    control: Arc<ControlStream>,
    /// Opens this side's lanes. Dropping the dialer removes its IPsec state, if it has any.
    dialer: Arc<dyn LaneDialer>,
}

/// A peer to which this side dials the trunk.
struct Peering {
    destination: Destination,
    state: State,
}

enum State {
    /// A trunk is being dialled. These connections wait for it, in the order of acceptance.
    Dialling(Vec<Connection>),
    Up(Arc<Hub>),
}

#[derive(Clone)]
struct Connection {
    socket: Arc<Socket>,
    opening: Opening,
}

impl Trunks {
    pub(super) fn new(site: &Arc<Site>) -> Self {
        Self {
            site: Arc::clone(site),
            all: Mutex::default(),
            peerings: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// Carries a connection that was accepted at an entrance. Callers pass the connections of one
    /// entrance in the order of acceptance.
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
        let connection = Connection {
            socket: Arc::new(socket),
            opening: Opening {
                listener,
                route: entrance.route.clone(),
                parameter,
                window_bytes: entrance.window_bytes,
            },
        };
        let mut peerings = lock(&self.peerings);
        let same = |one: &&mut Peering| one.destination == destination;
        let Some(peering) = peerings.iter_mut().find(same) else {
            peerings.push(Peering {
                destination: destination.clone(),
                state: State::Dialling(vec![connection]),
            });
            drop(peerings);
            return self.dial(destination);
        };
        let failure = match &mut peering.state {
            State::Dialling(waiting) if waiting.len() < WAITING => {
                return waiting.push(connection);
            }
            State::Dialling(_) => {
                let text = format!(
                    "too many connections are waiting for {} (at most {WAITING})",
                    entrance.to
                );
                Failure::new(FaultCode::Busy, text)
            }
            State::Up(hub) => match self.open(hub, &connection) {
                Ok(()) => return,
                Err(OpenError::Over) => {
                    // The trunk has ended, or a certificate is no longer accepted. The new trunk
                    // uses the current certificates. If they are not accepted either, its handshake
                    // fails and reports the reason.
                    peering.state = State::Dialling(vec![connection]);
                    drop(peerings);
                    return self.dial(destination);
                }
                Err(error) => of_open(&error),
            },
        };
        drop(peerings);
        self.refuse(&connection, failure);
    }

    /// Returns the trunk that leads to a peer, or dials one if there is none. If the dial fails,
    /// reports an event only if connections wait for the trunk.
    ///
    /// # Errors
    /// The peer does not answer or refuses, or the trunk has lost its control lane; `Busy` if the
    /// trunk is being dialled.
    pub(super) fn keep_up(self: &Arc<Self>, to: Destination) -> Result<Arc<Hub>, Failure> {
        {
            let mut peerings = lock(&self.peerings);
            let same = |one: &Peering| one.destination == to;
            match peerings.iter_mut().find(|one| same(one)) {
                Some(peering) => match &peering.state {
                    State::Up(hub) if !self.is_usable(hub) => {
                        peering.state = State::Dialling(Vec::new());
                    }
                    State::Up(hub) if hub.has_control() => return Ok(Arc::clone(hub)),
                    State::Up(hub) if !hub.lock().control.is_over() => {
                        let text = format!("the control lane to {} is lost", to.to);
                        return Err(Failure::new(FaultCode::ControlLost, text));
                    }
                    State::Up(_) => peering.state = State::Dialling(Vec::new()),
                    State::Dialling(_) => {
                        let text = format!("a trunk to {} is being dialled", to.to);
                        return Err(Failure::new(FaultCode::Busy, text));
                    }
                },
                None => peerings.push(Peering {
                    destination: to.clone(),
                    state: State::Dialling(Vec::new()),
                }),
            }
        }
        let made = self.make(&to);
        self.dialled(&to, made.clone());
        made
    }

    /// Whether a trunk's peer is still admitted, and the certificate with which this side dialled
    /// the trunk is still valid.
    pub(super) fn is_usable(&self, hub: &Hub) -> bool {
        self.site.check_admitted(&hub.terms.peer).is_ok() && !hub.terms.is_own_expired()
    }

    /// Opens a channel on a trunk, if it is usable.
    fn open(&self, hub: &Hub, connection: &Connection) -> Result<(), OpenError> {
        if !self.is_usable(hub) {
            return Err(OpenError::Over);
        }
        hub.open(&connection.socket, connection.opening.clone())
    }

    fn dial(self: &Arc<Self>, to: Destination) {
        let (trunks, there) = (Arc::clone(self), to.clone());
        let body = move || {
            let made = trunks.make(&there);
            let hub = made.as_ref().ok().cloned();
            trunks.dialled(&there, made);
            // An on-demand listener may have raised the lane count during the dial.
            if let Some(hub) = hub {
                hub.raise_lanes(trunks.site.lanes_to(&there.to));
            }
        };
        if !self.site.spawn("dunlin-dial".to_owned(), body) {
            let failure = Failure::new(FaultCode::Kernel, "cannot start a thread");
            self.dialled(&to, Err(failure));
        }
    }

    /// Dials a trunk and starts it.
    fn make(self: &Arc<Self>, to: &Destination) -> Result<Arc<Hub>, Failure> {
        let site = &self.site;
        let deadline = Instant::now() + site.limits.vanished;
        let selected = Selected::dial(site, site.dials.begin()?, to, random()?, 1, deadline)?;
        let agreed = selected.agree(site, to.clone())?;
        let kept = self.keep(agreed)?;
        let hub = Arc::clone(&kept.hub);
        self.start(kept);
        Ok(hub)
    }

    /// Called when the dial has ended. Opens a channel for each connection that waits, or refuses
    /// the connection.
    fn dialled(&self, to: &Destination, made: Result<Arc<Hub>, Failure>) {
        let mut peerings = lock(&self.peerings);
        let same =
            |one: &mut Peering| one.destination == *to && matches!(one.state, State::Dialling(_));
        let Some(Peering {
            destination,
            state: State::Dialling(dialling),
        }) = peerings.extract_if(.., same).next()
        else {
            return;
        };
        let refused: Vec<_> = match made {
            Ok(hub) => {
                lock(&self.failures).remove(&to.to);
                let state = State::Up(Arc::clone(&hub));
                peerings.push(Peering { destination, state });
                let open = |one: Connection| {
                    let opened = hub.open(&one.socket, one.opening.clone());
                    opened.err().map(|error| (one, of_open(&error)))
                };
                dialling.into_iter().filter_map(open).collect()
            }
            Err(failure) => {
                let (to, why) = (to.to.clone(), failure.clone());
                let reason = format!("{} ({})", failure.text(), failure.code());
                lock(&self.failures).insert(to.clone(), reason);
                if !dialling.is_empty() {
                    self.site.report(Event::TrunkFailed { to, failure: why });
                }
                let refused = dialling.into_iter().map(|one| (one, failure.clone()));
                refused.collect()
            }
        };
        drop(peerings);
        for (connection, failure) in refused {
            self.refuse(&connection, failure);
        }
    }

    fn refuse(&self, connection: &Connection, failure: Failure) {
        connection.socket.fail(&failure);
        let route = connection.opening.route.clone();
        self.site.report(Event::Refused { route, failure });
    }

    /// Accepts the new trunk, or the later control lane of a trunk, that a peer offers.
    ///
    /// # Errors
    /// The reason why the connection is refused. If the peer waits for the answer to its offer, it
    /// receives the reason.
    pub(super) fn accept(
        self: &Arc<Self>,
        control: ControlStream,
        opening: &negotiate::Opening,
    ) -> Result<(), Failure> {
        let received = Received::new(&self.site, control, opening)?;
        let known = match self.trunk_of(&received) {
            Ok(known) => known,
            Err(refusal) => return Err(received.refuse(refusal)),
        };
        let answered = received.select()?;
        if let Some(hub) = known {
            let (control, epoch) = answered.resumed();
            talk::resume(&hub, control, epoch);
            return Ok(());
        }
        let agreed = answered.agree(&self.site)?;
        // The peer may open lanes as soon as it has the secret, so add the trunk before that.
        let kept = self.keep(agreed)?;
        if let Err(failure) = send_accept(&kept.control, &kept.hub.terms.own_secret, 0) {
            kept.hub.end(failure.code());
            self.run(kept);
            return Err(failure);
        }
        self.start(kept);
        Ok(())
    }

    /// The trunk that an offer belongs to, or `None` if the offer asks for a new one. An offer is
    /// refused here rather than later, if possible: the peer still waits for the answer to its
    /// offer, so it receives the reason.
    fn trunk_of(&self, received: &Received) -> Result<Option<Arc<Hub>>, Refusal> {
        let refuse = |fault, text: &str| {
            let text = text.to_owned();
            Err(Refusal { fault, text })
        };
        let (offer, peer) = (&received.offer, received.control.peer());
        let Some(hub) = self.find(&offer.session) else {
            if offer.epoch != 1 {
                let text = "unknown trunk";
                return refuse(FaultCode::UnknownSession, text);
            }
            return match self.check_room(&lock(&self.all), peer) {
                Ok(()) => Ok(None),
                Err(failure) => refuse(failure.code(), failure.text()),
            };
        };
        if !hub.terms.is_the_peer(peer) {
            let text = "the trunk belongs to another peer";
            return refuse(FaultCode::WrongIdentity, text);
        }
        if hub.terms.security != received.selection.security {
            let text = "the trunk's lanes use another security";
            return refuse(FaultCode::SecurityNotAgreed, text);
        }
        if !hub.lock().control.is_before(offer.epoch) {
            let text = "the trunk has ended, or has a later control lane";
            return refuse(FaultCode::UnknownSession, text);
        }
        Ok(Some(hub))
    }

    /// Accepts a connection that proves to be a lane of a trunk; a separate thread admits it.
    ///
    /// # Errors
    /// The reason why the connection is rejected.
    pub(super) fn accept_lane(
        &self,
        socket: LaneSocket,
        opening: &negotiate::Opening,
    ) -> Result<(), (FaultCode, &'static str)> {
        let negotiate::Opening::Lane(open) = opening else {
            return Err((FaultCode::Malformed, "its first message opens no lane"));
        };
        let unknown = (FaultCode::UnknownSession, "lane of an unknown trunk");
        let hub = self.find(&open.session).ok_or(unknown)?;
        let terms = &hub.terms;
        if !is_proved(&terms.own_secret, open) {
            let why = "lane without the proof of its trunk's secret";
            return Err((FaultCode::WrongSecret, why));
        }
        if open.version != terms.version {
            let why = "lane and control lane have different versions";
            return Err((FaultCode::VersionMismatch, why));
        }
        match (open.direction, terms.has_one_opener()) {
            (_, true) if terms.is_dialled() => {
                let why = "this side dialled the trunk and opens all of its lanes";
                Err((FaultCode::Malformed, why))
            }
            (LaneDirection::FromDialer, _) => receive::start(&hub, open.lane, socket),
            (LaneDirection::ToDialer, true) => send::start(&hub, open.lane, socket),
            (LaneDirection::ToDialer, false) => {
                let why = "on this trunk each side opens the lanes on which it sends";
                Err((FaultCode::Malformed, why))
            }
        }
    }

    fn find(&self, session: &SessionId) -> Option<Arc<Hub>> {
        lock(&self.all).get(session).cloned()
    }

    /// Checks the limits for one more trunk with a peer.
    ///
    /// # Errors
    /// A limit is reached, or the tunnel is ending.
    fn check_room(
        &self,
        trunks: &BTreeMap<SessionId, Arc<Hub>>,
        peer: &PeerIdentity,
    ) -> Result<(), Failure> {
        if self.site.is_draining() {
            let text = "tunnel is shutting down";
            return Err(Failure::new(FaultCode::Ended, text));
        }
        let full = |count: usize, of: &str| {
            let text = format!("too many trunks {of}: {count}");
            Err(Failure::new(FaultCode::Busy, text))
        };
        if trunks.len() >= self.site.limits.trunks {
            return full(trunks.len(), "in one tunnel");
        }
        let theirs = trunks.values();
        match theirs.filter(|hub| hub.terms.is_the_peer(peer)).count() {
            OF_ONE_PEER.. => full(OF_ONE_PEER, "with one peer"),
            _ => Ok(()),
        }
    }

    /// Adds an agreed trunk. Its lanes are accepted from now on.
    fn keep(&self, agreed: Agreed) -> Result<Kept, Failure> {
        let Agreed { terms, control } = agreed;
        let (security, sealed) = (terms.security, self.site.sealed.as_ref());
        let (code, text) = (
            FaultCode::SecurityNotAgreed,
            "cannot open lanes with the selected security",
        );
        let dialer = dialer(security, sealed).or_failure(code, text)?;
        let acceptor = acceptor(security, false, sealed).or_failure(code, text)?;
        let session = terms.session;
        let mut trunks = lock(&self.all);
        self.check_room(&trunks, &terms.peer)?;
        if trunks.contains_key(&session) {
            let text = "session identifier is in use";
            return Err(Failure::new(FaultCode::UnknownSession, text));
        }
        let control = Arc::new(control);
        let hub = Hub::new(&self.site, terms, acceptor, &control)
            .or_failure(FaultCode::DescriptorLimit, "out of descriptors for a trunk")?;
        trunks.insert(session, Arc::clone(&hub));
        Ok(Kept {
            hub,
            control,
            dialer,
        })
    }

    /// Starts the threads of a trunk.
    fn start(self: &Arc<Self>, kept: Kept) {
        let hub = Arc::clone(&kept.hub);
        let (peer, at) = (hub.terms.peer_name(), hub.terms.lanes_at);
        self.site.report(Event::TrunkUp { peer, at });
        let trunks = Arc::clone(self);
        let body = move || trunks.run(kept);
        if !self.site.spawn("dunlin-tunnel".to_owned(), body) {
            hub.end(FaultCode::Kernel);
            self.forget(&hub, FaultCode::Kernel);
        }
    }

    /// Runs a trunk until it has ended and all of its threads have ended.
    fn run(&self, kept: Kept) {
        let fault = talk::run(&kept.hub, &kept.dialer);
        drop(kept.dialer);
        self.forget(&kept.hub, fault);
    }

    fn forget(&self, hub: &Arc<Hub>, fault: FaultCode) {
        let why = hub
            .lock()
            .trouble()
            .filter(|_| fault == FaultCode::LaneLost);
        let gone = lock(&self.all).remove(&hub.terms.session);
        lock(&self.peerings)
            .retain(|one| !matches!(&one.state, State::Up(up) if Arc::ptr_eq(up, hub)));
        if gone.is_some() {
            let peer = hub.terms.peer_name();
            self.site.report(Event::TrunkEnded { peer, fault, why });
        }
    }

    /// Raises the number of lanes to a peer to at least `lanes`.
    pub(super) fn raise_lanes(&self, to: &str, lanes: u16) {
        for peering in lock(&self.peerings).iter() {
            if let State::Up(hub) = &peering.state
                && peering.destination.to == to
            {
                hub.raise_lanes(lanes);
            }
        }
    }

    /// Stops opening and accepting channels.
    pub(super) fn drain(&self) {
        self.hubs().iter().for_each(|hub| hub.drain());
    }

    /// The number of connections that are carried, or wait for their trunk.
    pub(super) fn channels(&self) -> usize {
        let waiting = |one: &Peering| match &one.state {
            State::Dialling(waiting) => waiting.len(),
            State::Up(_) => 0,
        };
        let waiting: usize = lock(&self.peerings).iter().map(waiting).sum();
        let hubs = self.hubs();
        let carried = hubs.iter().map(|hub| hub.lock().trunk.channels());
        waiting + carried.sum::<usize>()
    }

    /// Why the last attempt to dial a trunk to this address failed; `None` if that attempt did not
    /// fail, or if there was no attempt.
    pub(super) fn failure(&self, to: &str) -> Option<String> {
        lock(&self.failures).get(to).cloned()
    }

    pub(super) fn status(&self) -> Vec<Status> {
        self.hubs().iter().map(|hub| hub.status()).collect()
    }

    /// Ends all trunks.
    pub(super) fn end(&self) {
        self.hubs().iter().for_each(|hub| hub.end(FaultCode::Ended));
    }

    fn hubs(&self) -> Vec<Arc<Hub>> {
        lock(&self.all).values().cloned().collect()
    }
}

fn of_open(error: &OpenError) -> Failure {
    let code = match error {
        OpenError::TooMany { .. } => FaultCode::Busy,
        OpenError::Draining | OpenError::Over => FaultCode::Ended,
        OpenError::Name => FaultCode::UnknownRoute,
    };
    Failure::new(code, error.to_string())
}
