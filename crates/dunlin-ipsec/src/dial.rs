//! The client side: requests a session.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use dunlin_proto::ipsec::exchange::Exchange;
use dunlin_proto::ipsec::key::Role;
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::negotiate::{Features, LaneSecurity, Offer, SessionId, VERSIONS};
use dunlin_proto::text::harmless;

use super::error::IpsecError;
use super::session::{Beginning, Session, clean_up_dead, ends, random};
use super::{Observer, Options};
use dunlin_lane::control::{self, ControlStream, OpenError};
use dunlin_lane::dial::{Connector, DialCancel, StandardConnector};
use dunlin_lane::policy::ClientTls;

/// The interval at which a starting session checks whether its caller has given up.
const LOOK: Duration = Duration::from_millis(100);
/// Connects to a [`Server`](super::Server) at `to` and returns when the ports are protected on both
/// hosts. `cancel` ends the attempt.
///
/// # Errors
/// The reason why the ports are not protected; [`IpsecError::Ended`] on cancellation. The session's
/// policies and SAs are removed, but ports on which traffic was already protected may stay blocked.
pub fn up(
    to: &str,
    tls: &ClientTls,
    options: &Options,
    observer: &Observer,
    cancel: &DialCancel,
) -> Result<Session, IpsecError> {
    clean_up_dead(options, observer)?;
    let session = random()?;
    let (at, limit) = ((to, &StandardConnector as &dyn Connector), options.timeout);
    let control = open(at, tls, session, limit, cancel)?;
    let given_up = || cancel.is_cancelled();
    begin(control, session, options, observer, &given_up)
}

/// Connects and negotiates a keying session.
pub(super) fn open(
    (endpoint, connector): (&str, &dyn Connector),
    tls: &ClientTls,
    session: SessionId,
    timeout: Duration,
    cancel: &DialCancel,
) -> Result<ControlStream, IpsecError> {
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::IPSEC,
        security: LaneSecurity::Tls,
        session,
        attempt: 1,
        epoch: 1,
    };
    let deadline = Instant::now() + timeout;
    let opened = control::open(endpoint, connector, tls, &offer, deadline, cancel);
    // From now on `cancel` must not close the connection, because the session may serve other
    // callers too.
    cancel.release();
    if cancel.is_cancelled() {
        return Err(IpsecError::Ended);
    }
    match opened {
        Ok((control, _)) => Ok(control),
        Err(OpenError::Refused(refusal)) => Err(IpsecError::EndedByPeer {
            fault: refusal.fault,
            text: harmless(&refusal.text),
        }),
        Err(error) => Err(error.into()),
    }
}

/// Starts a session on a control connection. Returns when the ports are protected on both hosts,
/// when the session has ended, or when `given_up` returns true.
pub(super) fn begin(
    control: ControlStream,
    session: SessionId,
    options: &Options,
    observer: &Observer,
    given_up: &dyn Fn() -> bool,
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
        // This loop needs no time limit, because the session ends itself if the peer does not
        // answer.
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
