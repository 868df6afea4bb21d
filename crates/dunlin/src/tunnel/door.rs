//! Where connections come in: a listener for each entrance, and the one port for
//! the peers' control lanes and lanes.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dunlin_proto::negotiate::Opening;
use dunlin_sys::poll::{Interest, Waker, Wakeup, poll, waker};

use super::dial;
use super::event::Event;
use super::failure::harmless;
use super::listener::{Listener, Place, Sockets, next_number};
use super::meter::Count;
use super::options::Entrance;
use super::site::Site;
use crate::lane::accept::{self, Arrival, LaneSocket};
use crate::lane::handshake::Secured;
use crate::lane::identity::ServerTls;
use crate::lane::proof::is_proved;

/// How long nobody is accepted when descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);
/// Control lanes that are being agreed on at the same time. Their peers are
/// authenticated; each costs a thread for a moment.
const GREETINGS: usize = 32;

/// An entrance that is open. It is closed when this is dropped; channels stay.
pub(super) struct Door {
    pub(super) entrance: Entrance,
    /// Removed when nobody listens any more.
    _place: Option<Place>,
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Opens an entrance.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(super) fn open(
        site: &Arc<Site>,
        mut entrance: Entrance,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let (listener, place) = Listener::open(&mut entrance.listen, passed)?;
        let (stop, stopped) = waker()?;
        let number = next_number();
        let (site, own) = (Arc::clone(site), entrance.clone());
        let name = format!("dunlin-entrance-{number}");
        let body = move || listen(&site, &own, number, &listener, &stopped);
        let thread = Some(thread::Builder::new().name(name).spawn(body)?);
        Ok(Self {
            entrance,
            _place: place,
            stop,
            thread,
        })
    }
}

impl Drop for Door {
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
    site: &Arc<Site>,
    entrance: &Entrance,
    number: u64,
    listener: &Listener,
    stopped: &Wakeup,
) {
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
                let route = &entrance.route;
                let text = format!("route {route} takes no connections any more: {error}");
                return site.tell(Event::Warning(text));
            }
        }
        match listener.accept() {
            Ok(socket) => {
                short = false;
                let route = &entrance.route;
                let socket = socket.counted(Count::new(site.meter(route), None));
                site.carry(entrance, number, String::new(), socket);
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => short = false,
                // For want of descriptors, which others may give back.
                _ => {
                    if !short {
                        let route = &entrance.route;
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
    let greetings = Arc::new(AtomicUsize::new(0));
    let result = accept::accept(listener, tls, stopped, |arrival| match arrival {
        Arrival::Control { stream, opening } => {
            let from = harmless(&stream.peer().to_string());
            let reject = |why: String| {
                let from = from.clone();
                site.tell(Event::Rejected { from, why });
            };
            if greetings.fetch_add(1, Ordering::SeqCst) >= GREETINGS {
                greetings.fetch_sub(1, Ordering::SeqCst);
                return reject("too many control lanes are being agreed on".to_owned());
            }
            let (own, count, from) = (Arc::clone(site), Arc::clone(&greetings), from.clone());
            let started = site.spawn("dunlin-greeting".to_owned(), move || {
                if let Err(failure) = dial::take(&own, stream, &opening) {
                    let why = failure.to_string();
                    own.tell(Event::Rejected { from, why });
                }
                count.fetch_sub(1, Ordering::SeqCst);
            });
            if !started {
                greetings.fetch_sub(1, Ordering::SeqCst);
            }
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
    });
    if let Err(error) = result {
        let text = format!("no peer can reach this tunnel any more: {error}");
        site.tell(Event::Warning(text));
    }
}

/// Lets a lane in, if it proves that it belongs to an association.
fn take_lane(site: &Arc<Site>, socket: LaneSocket, opening: &Opening) -> Result<(), &'static str> {
    let Opening::Lane(open) = opening else {
        return Err("it does not open as a lane");
    };
    let LaneSocket::Tls(secured) = socket else {
        return Err("it is not encrypted, and the tunnel takes no plain lanes");
    };
    let secured: Secured = *secured;
    let hub = site
        .association(&open.session)
        .ok_or("it belongs to no association of this tunnel")?;
    let terms = &hub.terms;
    if !is_proved(&terms.own_secret, open) {
        return Err("it does not know its association's secret");
    }
    if !secured.peer.same_certificate(&terms.peer) {
        return Err("its peer has another certificate than the control lane's");
    }
    if open.version != terms.version {
        return Err("it speaks another version than the control lane");
    }
    let mut core = hub.lock();
    let admitted = core.association.admit(open.lane);
    hub.settle(&mut core);
    drop(core);
    // The peer is told by the core why one is not.
    if admitted.is_ok() {
        hub.take_lane(open.lane, secured);
    }
    Ok(())
}
