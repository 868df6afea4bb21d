//! Where connections come in: a listener for each entrance, and the one port for
//! the peers' control lanes and lanes.

use dunlin_lane::sync::lock;
use dunlin_proto::text::harmless;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_proto::negotiate::{LaneSecurity, Opening};

use super::carriers::Carriers;
use super::dial;
use super::event::Event;
use super::listener::{Listener, SocketFile, Sockets, next_number};
use super::meter::Count;
use super::options::Entrance;
use super::route::Listen;
use super::site::Site;
use dunlin_lane::accept::{self, Arrival, LaneSocket};
use dunlin_lane::peers::{PeerIdentity, Principal};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::proof::is_proved;

/// How long nobody is accepted when descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);
/// Control lanes that are being agreed on at the same time. Their peers are
/// authenticated; each costs a thread until it has said what it wants.
const GREETINGS: usize = 64;
/// And those of one peer, so that none keeps others out.
const OF_ONE_PEER: usize = 8;

/// An entrance that is open. It is closed when this is dropped; channels stay.
pub(super) struct EntranceListener {
    /// Where its connections go; a reload may change it.
    entrance: Arc<Mutex<Entrance>>,
    /// Where it listens: a port of 0 is the one that the kernel chose.
    listens_on: Listen,
    /// Removed when nobody listens any more.
    _place: Option<SocketFile>,
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl EntranceListener {
    /// Opens an entrance.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(super) fn open(
        carriers: &Carriers,
        entrance: Entrance,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let mut listens_on = entrance.listen.clone();
        let (listener, place) = Listener::open(&mut listens_on, passed)?;
        let (stop, stopped) = waker()?;
        let number = next_number();
        let entrance = Arc::new(Mutex::new(entrance));
        let (carriers, own) = (carriers.clone(), Arc::clone(&entrance));
        let name = format!("dunlin-entrance-{number}");
        let body = move || listen(&carriers, &own, number, &listener, &stopped);
        let thread = Some(thread::Builder::new().name(name).spawn(body)?);
        Ok(Self {
            entrance,
            listens_on,
            _place: place,
            stop,
            thread,
        })
    }

    pub(super) fn entrance(&self) -> Entrance {
        lock(&self.entrance).clone()
    }

    pub(super) fn listens_on(&self) -> &Listen {
        &self.listens_on
    }

    /// Whether it is where an entrance is to be. One that left its port to the
    /// kernel is known by its route.
    pub(super) fn is_at(&self, other: &Entrance) -> bool {
        let own = lock(&self.entrance);
        let chosen = matches!(&other.listen, Listen::Tcp(address) if address.port() == 0);
        own.listen == other.listen && (!chosen || own.route == other.route)
    }

    /// Has its next connections go where another entrance of the same place leads.
    pub(super) fn lead(&self, other: &Entrance) {
        *lock(&self.entrance) = other.clone();
    }
}

impl Drop for EntranceListener {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by its hook.
            let _ = thread.join();
        }
    }
}

/// The body of an entrance's thread.
fn listen(
    carriers: &Carriers,
    entrance: &Mutex<Entrance>,
    number: u64,
    listener: &Listener,
    stopped: &Wakeup,
) {
    let site = &carriers.site;
    let mut short = false;
    loop {
        let stop = Interest {
            fd: stopped.as_fd(),
            read: true,
            write: false,
        };
        let timeout = short.then_some(SHORTAGE_REST);
        let interests = [stop, listener.interest()];
        let watched = if short { 1 } else { 2 };
        match poll(&interests[..watched], timeout) {
            Ok(ready) if ready[0] => return,
            Ok(_) => {}
            Err(error) => {
                let route = &lock(entrance).route;
                let text = format!("route {route} takes no connections any more: {error}");
                return site.tell(Event::Warning(text));
            }
        }
        match listener.accept() {
            Ok(socket) => {
                short = false;
                let entrance = lock(entrance).clone();
                let count = Count::new(site.meter(&entrance.route), None);
                carriers.carry(&entrance, number, String::new(), socket.counted(count));
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => short = false,
                // For want of descriptors, which others may give back.
                _ => {
                    if !short {
                        let route = &lock(entrance).route;
                        let text = format!("route {route} cannot accept a connection: {error}");
                        site.tell(Event::Warning(text));
                    }
                    short = true;
                }
            },
        }
    }
}

/// The body of the port's thread.
pub(super) fn take_peers(
    site: &Arc<Site>,
    listener: &TcpListener,
    tls: &ServerTls,
    stopped: &Wakeup,
) {
    let greetings = Arc::<Mutex<Vec<Principal>>>::default();
    let result = accept::accept(listener, tls, stopped, |arrival| {
        // What protects lanes comes and goes apart from trunks.
        let arrival = match &site.sealed {
            Some(lanes) => lanes.take(arrival),
            None => Some(arrival),
        };
        if let Some(arrival) = arrival {
            take(site, &greetings, arrival);
        }
    });
    if let Err(error) = result {
        let text = format!("no peer can reach this tunnel any more: {error}");
        site.tell(Event::Warning(text));
    }
}

/// Somebody has come to the port.
fn take(site: &Arc<Site>, greetings: &Arc<Mutex<Vec<Principal>>>, arrival: Arrival) {
    match arrival {
        Arrival::Control { stream, opening } => {
            let from = harmless(&stream.peer().to_string());
            let reject = |why: String| {
                let from = from.clone();
                site.tell(Event::Rejected { from, why });
            };
            let Some(greeting) = Greeting::begin(greetings, stream.peer()) else {
                return reject("too many control lanes are being agreed on".to_owned());
            };
            let (own, from) = (Arc::clone(site), from.clone());
            // A thread that cannot be had is told, and takes all this along.
            site.spawn("dunlin-greeting".to_owned(), move || {
                let _greeting = greeting;
                if let Err(failure) = dial::take(&own, stream, &opening) {
                    let why = failure.to_string();
                    own.tell(Event::Rejected { from, why });
                }
            });
        }
        Arrival::Lane { socket, opening } => {
            if let Err(why) = take_lane(site, socket, &opening) {
                let from = "a lane".to_owned();
                let why = why.to_owned();
                site.tell(Event::Rejected { from, why });
            }
        }
        Arrival::Rejected { from, reason } => site.tell(Event::Rejected {
            from: from.to_string(),
            why: harmless(&reason.to_string()),
        }),
        Arrival::Starved(error) => {
            let text = format!("nobody can be accepted for want of descriptors: {error}");
            site.tell(Event::Warning(text));
        }
    }
}

/// A control lane that is being agreed on, by its peer.
struct Greeting {
    all: Arc<Mutex<Vec<Principal>>>,
    peer: Principal,
}

impl Greeting {
    /// One more, where there is room for it.
    fn begin(all: &Arc<Mutex<Vec<Principal>>>, peer: &PeerIdentity) -> Option<Self> {
        let mut greetings = lock(all);
        let theirs = greetings.iter().filter(|one| peer.is(one)).count();
        if greetings.len() >= GREETINGS || theirs >= OF_ONE_PEER {
            return None;
        }
        let peer = peer.principal();
        greetings.push(peer.clone());
        let all = Arc::clone(all);
        Some(Self { all, peer })
    }
}

impl Drop for Greeting {
    fn drop(&mut self) {
        let mut greetings = lock(&self.all);
        if let Some(at) = greetings.iter().position(|one| *one == self.peer) {
            greetings.swap_remove(at);
        }
    }
}

/// Lets a lane in, if it proves that it belongs to a trunk.
fn take_lane(site: &Arc<Site>, socket: LaneSocket, opening: &Opening) -> Result<(), &'static str> {
    let Opening::Lane(open) = opening else {
        return Err("it does not open as a lane");
    };
    let hub = site
        .trunk(&open.session)
        .ok_or("it belongs to no trunk of this tunnel")?;
    let terms = &hub.terms;
    if !is_proved(&terms.own_secret, open) {
        return Err("it does not know its trunk's secret");
    }
    match (&socket, terms.security) {
        (LaneSocket::Tls(secured), LaneSecurity::Tls) => {
            if !terms.is_the_peer(&secured.peer) {
                return Err("its peer is another than the control lane's");
            }
        }
        // Its own thread looks whether that is true.
        (LaneSocket::Plain(_), LaneSecurity::Ipsec) => {}
        (LaneSocket::Plain(_), _) => {
            return Err("it is not encrypted, and the tunnel takes no plain lanes");
        }
        (LaneSocket::Tls(_), _) => {
            return Err("it goes by TLS, and lanes over IPsec were agreed on");
        }
    }
    if open.version != terms.version {
        return Err("it speaks another version than the control lane");
    }
    let mut core = hub.lock();
    let admitted = core.trunk.admit(open.lane);
    hub.settle(&mut core);
    drop(core);
    // The peer is told by the core why one is not.
    if admitted.is_ok() {
        hub.take_lane(open.lane, socket);
    }
    Ok(())
}
