//! All trunks of a tunnel: dialled when the first connection for a peer is accepted, or accepted
//! from a peer, and forgotten when they are over.
//!
//! ```text
//!   carry ─▶ Dialling ──── up ───────▶ Up ─── over, or its peer is refused by now ─▶ Dialling
//!               └── no trunk ─▶ its connections are refused            (next connection)
//!
//!   a peer's control lane ─▶ accept ─▶ a trunk, or the next control lane of one
//!   a peer's lane ─────────▶ accept_lane ─▶ its trunk
//! ```

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{self, LaneSecurity, Refusal, SessionId};
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
use super::{receive, talk};
use dunlin_lane::accept::LaneSocket;
use dunlin_lane::control::ControlStream;
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::proof::is_proved;
use dunlin_lane::security::{acceptor, dialer};

/// Connections that wait while their peer is being connected to; a hypervisor
/// with the most channels that it can have.
const WAITING: usize = 512;
/// Trunks with one peer: one for each of the other side's lists of who may
/// answer, in either direction, and those that have yet to notice that they are
/// over.
const OF_ONE_PEER: usize = 8;

pub(super) struct Trunks {
    site: Arc<Site>,
    all: Mutex<BTreeMap<SessionId, Arc<Hub>>>,
    peerings: Mutex<Vec<Peering>>,
}

/// A trunk whose lanes are accepted and whose threads have not started. [`Trunks::run`] is its
/// unwind, also where it is over already.
struct Kept {
    hub: Arc<Hub>,
    control: Arc<ControlStream>,
    /// Opens this side's lanes. What it has set up is taken down when it is dropped.
    dialer: Arc<dyn LaneDialer>,
}

/// A peer to which this side makes the trunk.
struct Peering {
    destination: Destination,
    state: State,
}

enum State {
    /// A trunk is being made. These connections wait for it, in the order in which they were
    /// accepted.
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
        }
    }

    /// Carries a connection that was accepted at an entrance. Connections of one entrance come
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
        let failure = match peerings.iter_mut().find(same) {
            Some(peering) => match &mut peering.state {
                State::Dialling(waiting) if waiting.len() < WAITING => {
                    return waiting.push(connection);
                }
                State::Dialling(_) => {
                    let text = format!("{WAITING} connections wait for {} already", entrance.to);
                    Failure::new(FaultCode::Busy, text)
                }
                State::Up(hub) => match self.open(hub, &connection) {
                    Ok(()) => return,
                    Err(OpenError::Over) => {
                        // If the peer is still refused, the next handshake returns why.
                        peering.state = State::Dialling(vec![connection]);
                        drop(peerings);
                        return self.dial(destination);
                    }
                    Err(error) => of_open(&error),
                },
            },
            None => {
                peerings.push(Peering {
                    destination: destination.clone(),
                    state: State::Dialling(vec![connection]),
                });
                drop(peerings);
                return self.dial(destination);
            }
        };
        drop(peerings);
        self.refuse(&connection, failure);
    }

    /// Opens a channel on a trunk, unless its peer is refused by now.
    fn open(&self, hub: &Hub, connection: &Connection) -> Result<(), OpenError> {
        if self.site.check_admitted(&hub.terms.peer).is_err() {
            return Err(OpenError::Over);
        }
        hub.open(&connection.socket, connection.opening.clone())
    }

    fn dial(self: &Arc<Self>, to: Destination) {
        let (trunks, there) = (Arc::clone(self), to.clone());
        let body = move || {
            let lanes = trunks.site.lanes_to(&there.to);
            let made = trunks.make(&there, lanes);
            let hub = made.as_ref().ok().cloned();
            trunks.dialled(&there, made);
            // More may have been asked for meanwhile.
            if let Some(hub) = hub {
                hub.raise_lanes(trunks.site.lanes_to(&there.to));
            }
        };
        if !self.site.spawn("dunlin-dial".to_owned(), body) {
            let failure = Failure::new(FaultCode::Kernel, "cannot start a thread");
            self.dialled(&to, Err(failure));
        }
    }

    /// Makes a trunk.
    fn make(self: &Arc<Self>, to: &Destination, lanes: u16) -> Result<Arc<Hub>, Failure> {
        let site = &self.site;
        let deadline = Instant::now() + site.limits.vanished;
        let selected = Selected::dial(site, to, random()?, 1, deadline)?;
        let agreed = selected.agree(site, to.clone(), lanes)?;
        let kept = self.keep(agreed)?;
        let hub = Arc::clone(&kept.hub);
        self.start(kept);
        Ok(hub)
    }

    /// Opens the channels that have waited, or closes them.
    fn dialled(&self, to: &Destination, made: Result<Arc<Hub>, Failure>) {
        let mut peerings = lock(&self.peerings);
        let same =
            |one: &Peering| one.destination == *to && matches!(one.state, State::Dialling(_));
        let Some(at) = peerings.iter().position(same) else {
            return;
        };
        let Peering { destination, state } = peerings.swap_remove(at);
        let State::Dialling(dialling) = state else {
            return;
        };
        let refused: Vec<_> = match made {
            Ok(hub) => {
                let state = State::Up(Arc::clone(&hub));
                peerings.push(Peering { destination, state });
                let open = |one: Connection| {
                    let opened = hub.open(&one.socket, one.opening.clone());
                    opened.err().map(|error| (one, of_open(&error)))
                };
                dialling.into_iter().filter_map(open).collect()
            }
            Err(failure) => {
                let refused = dialling.into_iter().map(|one| (one, failure.clone()));
                let refused = refused.collect();
                let to = to.to.clone();
                self.site.tell(Event::TrunkFailed { to, failure });
                refused
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
        self.site.tell(Event::Refused { route, failure });
    }

    /// Accepts the trunk that a peer's control lane offers, or its next control lane.
    ///
    /// # Errors
    /// Why not. The peer is told, as long as it waits for the answer to its offer.
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
        // The peer's lanes may come as soon as it has the secret.
        let kept = self.keep(agreed)?;
        if let Err(failure) = send_accept(&kept.control, &kept.hub.terms.own_secret, 0) {
            kept.hub.end(failure.code());
            self.run(kept);
            return Err(failure);
        }
        self.start(kept);
        Ok(())
    }

    /// The trunk that an offer belongs to, or `None` if it asks for a new one. What cannot be
    /// met is found out here, as long as the peer can be told.
    fn trunk_of(&self, received: &Received) -> Result<Option<Arc<Hub>>, Refusal> {
        let refuse = |fault, text: &str| {
            let text = text.to_owned();
            Err(Refusal { fault, text })
        };
        let (offer, peer) = (&received.offer, received.control.peer());
        let Some(hub) = self.find(&offer.session) else {
            if offer.epoch != 1 {
                let text = "no such trunk is known here";
                return refuse(FaultCode::UnknownSession, text);
            }
            return match self.check_room(&lock(&self.all), peer) {
                Ok(()) => Ok(None),
                Err(failure) => refuse(failure.code(), failure.text()),
            };
        };
        if !hub.terms.is_the_peer(peer) {
            let text = "that trunk is with another peer";
            return refuse(FaultCode::WrongIdentity, text);
        }
        if hub.terms.security != received.selection.security {
            let text = "the lanes of that trunk are secured otherwise";
            return refuse(FaultCode::SecurityNotAgreed, text);
        }
        if !hub.lock().control.is_before(offer.epoch) {
            let text = "that trunk is over, or has a later control lane";
            return refuse(FaultCode::UnknownSession, text);
        }
        Ok(Some(hub))
    }

    /// Accepts a lane that proves that it belongs to a trunk; its own thread admits it.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn accept_lane(
        &self,
        socket: LaneSocket,
        opening: &negotiate::Opening,
    ) -> Result<(), &'static str> {
        let negotiate::Opening::Lane(open) = opening else {
            return Err("it does not open as a lane");
        };
        let hub = self
            .find(&open.session)
            .ok_or("it belongs to no trunk of this tunnel")?;
        let terms = &hub.terms;
        if !is_proved(&terms.own_secret, open) {
            return Err("it does not prove its trunk's secret");
        }
        if open.version != terms.version {
            return Err("it has another version than the control lane");
        }
        receive::start(&hub, open.lane, socket)
    }

    fn find(&self, session: &SessionId) -> Option<Arc<Hub>> {
        lock(&self.all).get(session).cloned()
    }

    /// Whether there is room for one more trunk with a peer.
    ///
    /// # Errors
    /// Why not.
    fn check_room(
        &self,
        trunks: &BTreeMap<SessionId, Arc<Hub>>,
        peer: &PeerIdentity,
    ) -> Result<(), Failure> {
        if self.site.is_draining() {
            let text = "this tunnel is about to end";
            return Err(Failure::new(FaultCode::Ended, text));
        }
        let full = |count: usize, of: &str| {
            let text = format!("{count} trunks {of} exist already");
            Err(Failure::new(FaultCode::Busy, text))
        };
        if trunks.len() >= self.site.limits.trunks {
            return full(trunks.len(), "of this tunnel");
        }
        let theirs = trunks.values();
        match theirs.filter(|hub| hub.terms.is_the_peer(peer)).count() {
            OF_ONE_PEER.. => full(OF_ONE_PEER, "with this peer"),
            _ => Ok(()),
        }
    }

    /// Makes an agreed trunk one of the tunnel's. Its lanes are accepted from now on.
    fn keep(&self, agreed: Agreed) -> Result<Kept, Failure> {
        let Agreed { terms, control } = agreed;
        let (security, sealed) = (terms.security, self.site.sealed.as_ref());
        let (Some(dialer), Some(acceptor)) =
            (dialer(security, sealed), acceptor(security, false, sealed))
        else {
            let text = "this tunnel is not prepared for IPsec";
            return Err(Failure::new(FaultCode::SecurityNotAgreed, text));
        };
        let session = terms.session;
        let mut trunks = lock(&self.all);
        self.check_room(&trunks, &terms.peer)?;
        if trunks.contains_key(&session) {
            let text = "the session's number is in use";
            return Err(Failure::new(FaultCode::UnknownSession, text));
        }
        let control = Arc::new(control);
        let hub = Hub::new(&self.site, terms, acceptor, &control).or_failure(
            FaultCode::DescriptorLimit,
            "no descriptors are left for a trunk",
        )?;
        trunks.insert(session, Arc::clone(&hub));
        Ok(Kept {
            hub,
            control,
            dialer,
        })
    }

    /// Starts a trunk's threads.
    fn start(self: &Arc<Self>, kept: Kept) {
        let hub = Arc::clone(&kept.hub);
        let (peer, at) = (hub.terms.peer_name(), hub.terms.lanes_at);
        self.site.tell(Event::TrunkUp { peer, at });
        let trunks = Arc::clone(self);
        let body = move || trunks.run(kept);
        if !self.site.spawn("dunlin-tunnel".to_owned(), body) {
            hub.end(FaultCode::Kernel);
            self.forget(&hub, FaultCode::Kernel);
        }
    }

    /// Runs a trunk to its end, which all its threads have reached then.
    fn run(&self, kept: Kept) {
        let fault = talk::run(&kept.hub, &kept.dialer);
        drop(kept.dialer);
        self.forget(&kept.hub, fault);
    }

    fn forget(&self, hub: &Arc<Hub>, fault: FaultCode) {
        let gone = lock(&self.all).remove(&hub.terms.session);
        lock(&self.peerings)
            .retain(|one| !matches!(&one.state, State::Up(up) if Arc::ptr_eq(up, hub)));
        if gone.is_some() {
            let peer = hub.terms.peer_name();
            self.site.tell(Event::TrunkEnded { peer, fault });
        }
    }

    /// At least so many lanes to a peer from now on.
    pub(super) fn raise_lanes(&self, to: &str, lanes: u16) {
        for peering in lock(&self.peerings).iter() {
            if let State::Up(hub) = &peering.state
                && peering.destination.to == to
            {
                hub.raise_lanes(lanes);
            }
        }
    }

    /// No channel is opened or accepted any more.
    pub(super) fn drain(&self) {
        self.hubs().iter().for_each(|hub| hub.drain());
    }

    /// Connections that are carried, or wait for their trunk.
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
