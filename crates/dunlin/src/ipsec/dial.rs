//! The side that asks for a session.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::ipsec::exchange::Exchange;
use dunlin_proto::ipsec::key::Role;
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, SessionId, VERSIONS,
};
use dunlin_sys::poll::{Wakeup, waker};
use dunlin_sys::socket::{Liveness, connect_unless, set_liveness};

use super::door::lock;
use super::error::{IpsecError, harmless};
use super::session::{Beginning, Session, clean_up, random_session};
use super::{Observer, Options};
use crate::lane::control::{self, ControlStream};
use crate::lane::identity::ClientTls;
use crate::lane::reach::first_of;

/// How often it is looked whether it is given up.
const LOOK: Duration = Duration::from_millis(100);

/// Connects to a [`Server`](super::Server) at `to`, and returns when the ports are
/// protected on both hosts.
///
/// # Errors
/// Why they are not. Nothing is left then, unless this side's traffic was protected
/// already: its ports stay blocked then.
pub fn up(
    to: &str,
    tls: &ClientTls,
    options: &Options,
    observer: &Observer,
) -> Result<Session, IpsecError> {
    up_unless(to, tls, options, observer, &mut || false)
}

/// As [`up`], and given up soon after `given_up` has said so for the first time.
///
/// # Errors
/// As [`up`]; [`IpsecError::Ended`] where it was given up.
pub fn up_unless(
    to: &str,
    tls: &ClientTls,
    options: &Options,
    observer: &Observer,
    given_up: &mut dyn FnMut() -> bool,
) -> Result<Session, IpsecError> {
    // Whatever cannot be taken back has been told.
    clean_up(options, observer)?;
    let session = random_session()?;
    let control = open_beside(to, tls, session, options.patience, given_up)?;
    begin(control, session, options, observer, given_up)
}

/// Opens the control connection on a thread of its own, which is not waited for where it comes
/// too late: nobody knows how long the resolver of names takes, and it cannot be interrupted.
/// Everything else ends at once when it is given up, and keeps to the limit by itself.
pub(super) fn open_beside(
    to: &str,
    tls: &ClientTls,
    session: SessionId,
    patience: Duration,
    given_up: &mut dyn FnMut() -> bool,
) -> Result<ControlStream, IpsecError> {
    let until = Instant::now() + patience + LOOK;
    let (made, opened) = channel();
    let (name, tls) = (to.to_owned(), tls.clone());
    let (waker, stop) = waker().map_err(|source| IpsecError::Resources {
        what: "a waker",
        source,
    })?;
    let reached = Arc::<Mutex<Reached>>::default();
    let own = Arc::clone(&reached);
    let body = move || {
        // What it has opened is closed where nobody takes it any more.
        let _ = made.send(open(&name, &tls, session, patience, &stop, &own));
    };
    let thread = thread::Builder::new().name("dunlin-ipsec-dial".to_owned());
    thread.spawn(body).map_err(|source| IpsecError::Resources {
        what: "a thread",
        source,
    })?;
    let why = loop {
        match opened.recv_timeout(LOOK) {
            Ok(control) => return control,
            Err(_) if given_up() => break IpsecError::Ended,
            Err(RecvTimeoutError::Timeout)
                if Instant::now() < until || lock(&reached).is_resolved => {}
            Err(_) => {
                break IpsecError::Unreachable {
                    to: to.to_owned(),
                    source: io::Error::new(
                        io::ErrorKind::TimedOut,
                        "its name was not resolved in time: give an address, or check the name \
                         servers",
                    ),
                };
            }
        }
    };
    waker.wake();
    let mut reached = lock(&reached);
    reached.is_given_up = true;
    if let Some(socket) = reached.socket.take() {
        // The peer may have ended it already.
        let _ = socket.shutdown(Shutdown::Both);
    }
    Err(why)
}

/// How far the opening of a control connection has come, for whoever gives it up.
#[derive(Default)]
struct Reached {
    is_resolved: bool,
    socket: Option<TcpStream>,
    is_given_up: bool,
}

/// Has a session over a control connection, and returns when the ports are protected on both
/// hosts, or it is given up.
pub(super) fn begin(
    control: ControlStream,
    session: SessionId,
    options: &Options,
    observer: &Observer,
    given_up: &mut dyn FnMut() -> bool,
) -> Result<Session, IpsecError> {
    let resources = |source| IpsecError::Resources {
        what: "the address of the control connection",
        source,
    };
    let socket = control.socket();
    let own = socket.local_addr().map_err(resources)?.ip().to_canonical();
    let other = socket.peer_addr().map_err(resources)?.ip().to_canonical();
    let terms = Terms {
        mode: options.mode,
        ports: options.ports,
        own,
        other,
        sas_max: options.sas_max,
        udp: options.udp,
    };
    let (session, up) = Session::begin(Beginning {
        control,
        session,
        role: Role::Initiator,
        exchange: Exchange::initiator(terms, options.senders(options.mode)),
        options: options.clone(),
        observer: observer.clone(),
        admits: |_, _| Ok(()),
    })?;
    loop {
        // Whoever does not answer is given up by the session itself.
        match up.recv_timeout(LOOK) {
            Ok(()) => return Ok(session),
            Err(RecvTimeoutError::Timeout) if !session.is_over() => {
                if given_up() {
                    return Err(IpsecError::Ended);
                }
            }
            Err(_) => {
                session.wait()?;
                return Err(IpsecError::Ended);
            }
        }
    }
}

/// Connects, and agrees that this is an IPsec session.
fn open(
    to: &str,
    tls: &ClientTls,
    session: SessionId,
    patience: Duration,
    stop: &Wakeup,
    reached: &Mutex<Reached>,
) -> Result<ControlStream, IpsecError> {
    let deadline = Instant::now() + patience;
    let unreachable = |source| IpsecError::Unreachable {
        to: to.to_owned(),
        source,
    };
    let connect = |address| {
        lock(reached).is_resolved = true;
        connect_unless(address, deadline, stop)
    };
    let stream = first_of(to, connect).map_err(unreachable)?;
    {
        let mut reached = lock(reached);
        if reached.is_given_up {
            return Err(IpsecError::Ended);
        }
        reached.socket = Some(stream.try_clone().map_err(unreachable)?);
    }
    set_liveness(&stream, &Liveness::default()).map_err(unreachable)?;
    let control = control::client(stream, tls, deadline).map_err(|source| {
        let to = to.to_owned();
        IpsecError::Handshake { to, source }
    })?;
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::IPSEC,
        security: LaneSecurity::Tls,
        session,
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes)?;
    control.send(&bytes)?;
    let mut prelude = [0; PRELUDE_BYTES];
    control.receive_exact(&mut prelude, deadline)?;
    let prelude = Prelude::decode(&prelude)?;
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact(&mut body, deadline)?;
    match Opening::decode(&prelude, &body)? {
        Opening::Select(selection) => {
            let confirmed = selection.confirm(&offer);
            confirmed.map_err(|error| IpsecError::Breach(error.to_string()))?;
            // From now on its owner is the only one who ends it.
            lock(reached).socket = None;
            Ok(control)
        }
        Opening::Refuse(_, refusal) => Err(IpsecError::EndedByPeer {
            fault: refusal.fault,
            text: harmless(&refusal.text),
        }),
        _ => Err(IpsecError::Breach(
            "it answered the offer with something else".to_owned(),
        )),
    }
}
