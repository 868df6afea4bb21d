//! The side that asks for a session.

use dunlin_proto::text::harmless;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::ipsec::exchange::Exchange;
use dunlin_proto::ipsec::key::Role;
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, SessionId, VERSIONS,
};

use super::error::IpsecError;
use super::session::{Beginning, Session, clean_up_dead, ends, random};
use super::{Observer, Options};
use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::dial::{Connector, DialCancel, StandardConnector};
use dunlin_lane::policy::ClientTls;

/// How often it is looked whether it is given up.
const LOOK: Duration = Duration::from_millis(100);
/// How much later than the limit the thread may end that opens a control connection: all that it
/// does keeps to the limit, except the resolver of names.
const RESOLVER_GRACE: Duration = Duration::from_secs(1);

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
    clean_up_dead(options, observer)?;
    let session = random()?;
    let connector: Arc<dyn Connector> = Arc::new(StandardConnector);
    let to = (to, &connector);
    let control = open_beside(to, tls, session, options.timeout, given_up)?;
    begin(control, session, options, observer, given_up)
}

/// Opens the control connection on a thread of its own, which is not waited for where it comes
/// too late: nobody knows how long the resolver of names takes, and it cannot be interrupted.
/// Everything else ends at once when it is given up, and keeps to the limit by itself.
pub(super) fn open_beside(
    (to, connector): (&str, &Arc<dyn Connector>),
    tls: &ClientTls,
    session: SessionId,
    timeout: Duration,
    given_up: &mut dyn FnMut() -> bool,
) -> Result<ControlStream, IpsecError> {
    let until = Instant::now() + timeout + RESOLVER_GRACE;
    let (made, opened) = channel();
    let (name, tls, connector) = (to.to_owned(), tls.clone(), Arc::clone(connector));
    let cancel = DialCancel::new().map_err(IpsecError::resources("a waker"))?;
    let own = cancel.clone();
    let body = move || {
        // What it has opened is closed where nobody takes it any more.
        let _ = made.send(open(&name, &*connector, &tls, session, timeout, &own));
    };
    let thread = thread::Builder::new().name("dunlin-ipsec-dial".to_owned());
    let started = thread.spawn(body);
    started.map_err(IpsecError::resources("a thread"))?;
    let why = loop {
        match opened.recv_timeout(LOOK) {
            Ok(control) => return control,
            Err(_) if given_up() => break IpsecError::Ended,
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
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
    cancel.cancel();
    Err(why)
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
    let (own, other) = ends(control.socket())?;
    let terms = Terms {
        mode: options.mode,
        ports: options.ports,
        own: own.ip().to_canonical(),
        other: other.ip().to_canonical(),
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
    connector: &dyn Connector,
    tls: &ClientTls,
    session: SessionId,
    timeout: Duration,
    cancel: &DialCancel,
) -> Result<ControlStream, IpsecError> {
    let deadline = Instant::now() + timeout;
    let unreachable = |source| IpsecError::Unreachable {
        to: to.to_owned(),
        source,
    };
    let connected = connector.connect(to, deadline, cancel.wakeup());
    let stream = connected.map_err(unreachable)?;
    cancel.covers(&stream).map_err(unreachable)?;
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
