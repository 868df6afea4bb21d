//! The client side: requests a session.

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

/// The interval at which `given_up` is polled.
const LOOK: Duration = Duration::from_millis(100);
/// How long after the deadline the dialing thread may still run: every step keeps the deadline
/// except name resolution.
const RESOLVER_GRACE: Duration = Duration::from_secs(1);

/// Connects to a [`Server`](super::Server) at `to` and returns when the ports are protected on both
/// hosts.
///
/// # Errors
/// The reason why they are not. Nothing stays installed, unless this side's traffic was already
/// protected: then its ports stay blocked.
pub fn up(
    to: &str,
    tls: &ClientTls,
    options: &Options,
    observer: &Observer,
) -> Result<Session, IpsecError> {
    up_unless(to, tls, options, observer, &mut || false)
}

/// Like [`up`], but gives up soon after `given_up` first returns true.
///
/// # Errors
/// As [`up`]; [`IpsecError::Ended`] if `given_up` returned true.
pub fn up_unless(
    to: &str,
    tls: &ClientTls,
    options: &Options,
    observer: &Observer,
    given_up: &mut dyn FnMut() -> bool,
) -> Result<Session, IpsecError> {
    // The observer has been notified of anything that cannot be removed.
    clean_up_dead(options, observer)?;
    let session = random()?;
    let connector: Arc<dyn Connector> = Arc::new(StandardConnector);
    let to = (to, &connector);
    let control = open_beside(to, tls, session, options.timeout, given_up)?;
    begin(control, session, options, observer, given_up)
}

/// Opens the control connection on its own thread. The caller does not wait for a thread that
/// exceeds the deadline: name resolution takes arbitrarily long and cannot be interrupted.
/// Everything else stops at once on cancellation and keeps the deadline by itself.
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
        // If the caller no longer waits, the connection is dropped here and so closed.
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
                        "name resolution timed out: use an address, or check the name servers",
                    ),
                };
            }
        }
    };
    cancel.cancel();
    Err(why)
}

/// Starts a session on a control connection. Returns when the ports are protected on both hosts, or
/// `given_up` returns true.
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
        // The session itself times out a peer that does not answer.
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

/// Connects and negotiates an IPsec session.
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
            "unexpected answer to the offer".to_owned(),
        )),
    }
}
