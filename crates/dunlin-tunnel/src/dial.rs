//! How a trunk begins, on both sides, and how a control lane is resumed.
//!
//! ```text
//!  the side that makes it                 the side that takes it
//!    │ offer (requires *tunnel*) ───────────▶ │
//!    │ ◀──────────────────── select, or refuse│
//!    │ accept: secret, lanes, port ─────────▶ │ takes lanes from now on
//!    │ ◀──────────────── accept: secret, lanes│
//!    │ takes lanes from now on                │
//! ```
//!
//! Later control lanes bear the same session and a higher epoch, and begin behind
//! *select*.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use dunlin_linux::random;
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    Features, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection, SessionId, SessionSecret,
    Supported, VERSIONS, select,
};
use dunlin_proto::stripe::Side;
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};
use zeroize::Zeroize;

use super::event::Event;
use super::failure::Failure;
use super::hub::{Hub, Terms};
use super::route::Destination;
use super::site::{Dialling, Site};
use super::talk;
use dunlin_lane::control::{self, ControlStream};

/// Makes a trunk.
///
/// # Errors
/// Why there is none.
pub(super) fn dial(site: &Arc<Site>, to: Destination, lanes: u16) -> Result<Arc<Hub>, Failure> {
    let deadline = Instant::now() + site.limits.vanished;
    let session: SessionId = random()?;
    let dialling = site.dialling()?;
    let (control, selection) = open(site, &dialling, &to, session, 1, deadline)?;
    let own_secret = SessionSecret(random()?);
    say_accept(site, &control, &own_secret, site.port)?;
    let (peer_secret, peer_lanes, _) = hear_accept(&control, deadline)?;
    drop(dialling);
    let at = peer_address(&control)?;
    let side = Side::Connecting;
    let terms = Terms {
        side,
        session,
        version: selection.version,
        security: selection.security,
        peers: control.peer().alone(),
        principal: control.peer().principal(),
        peer: control.peer().clone(),
        lanes_at: at,
        own_secret,
        peer_secret,
        lanes: lanes.min(peer_lanes),
        peer_lanes,
        redial: Some(to),
    };
    begin(site, terms, control, at)
}

/// Takes the trunk that a control lane offers, or resumes one. Refusals are
/// told to the peer.
///
/// # Errors
/// Why there is none.
pub(super) fn take(
    site: &Arc<Site>,
    control: ControlStream,
    opening: &Opening,
) -> Result<(), Failure> {
    let deadline = Instant::now() + site.limits.vanished;
    let agreed = answer(site, &control, opening);
    let (offer, selection) = match agreed {
        Ok(agreed) => agreed,
        Err(refusal) => {
            let mut bytes = Vec::new();
            if refusal.encode(VERSIONS, &mut bytes).is_ok() {
                // The peer may have gone, and hears nothing then.
                let _ = control.send(&bytes).and_then(|()| control.close());
            }
            return Err(Failure::new(refusal.fault, refusal.text));
        }
    };
    let mut bytes = Vec::new();
    selection
        .encode(&mut bytes)
        .map_err(|error| Failure::new(FaultCode::Internal, "no selection").because(&error))?;
    control
        .send(&bytes)
        .map_err(|error| Failure::of_control(&error))?;
    if let Some(hub) = site.trunk(&offer.session) {
        talk::up(&hub, control, offer.epoch);
        return Ok(());
    }
    let dialling = site.dialling()?;
    let covered = dialling.cancel.covers(control.socket());
    covered.map_err(|error| {
        Failure::new(FaultCode::Kernel, "no descriptor is left").because(&error)
    })?;
    let (peer_secret, peer_lanes, port) = hear_accept(&control, deadline)?;
    drop(dialling);
    if port == 0 {
        let text = "the peer's tunnel says no port for lanes";
        return Err(Failure::new(FaultCode::Malformed, text));
    }
    let own_secret = SessionSecret(random()?);
    // With its scope, where that is an IPv6 address of one link.
    let mut lanes_at = peer_address(&control)?;
    lanes_at.set_port(port);
    let said = SessionSecret(own_secret.0);
    let terms = Terms {
        side: Side::Accepting,
        session: offer.session,
        version: selection.version,
        security: selection.security,
        peers: control.peer().alone(),
        principal: control.peer().principal(),
        peer: control.peer().clone(),
        lanes_at,
        own_secret,
        peer_secret,
        lanes: site.limits.lanes.min(peer_lanes),
        peer_lanes,
        redial: None,
    };
    // The peer's lanes may come as soon as it has heard of the secret.
    let hub = site.keep(terms, control)?;
    let control = hub.lock().control.clone();
    let told = control.map_or(Ok(()), |control| say_accept(site, &control, &said, 0));
    if let Err(failure) = told {
        hub.end(failure.code());
        talk::run(&hub);
        return Err(failure);
    }
    start(site, &hub, lanes_at);
    Ok(())
}

/// Makes the control lane of a trunk anew.
///
/// # Errors
/// Why there is none; the trunk may still have time for another attempt.
pub(super) fn resume(hub: &Arc<Hub>, epoch: u32) -> Result<ControlStream, Failure> {
    let site = &hub.site;
    let Some(to) = &hub.terms.redial else {
        return Err(Failure::new(FaultCode::Internal, "the peer makes it anew"));
    };
    let deadline = Instant::now() + site.limits.silence();
    let dialling = site.dialling()?;
    let (control, _) = open(site, &dialling, to, hub.terms.session, epoch, deadline)?;
    if !hub.terms.is_the_peer(control.peer()) {
        let text = "another peer answers than before";
        return Err(Failure::new(FaultCode::UnknownSession, text));
    }
    Ok(control)
}

/// What is answered to the first words of a control lane.
fn answer<'a>(
    site: &Arc<Site>,
    control: &ControlStream,
    opening: &'a Opening,
) -> Result<(&'a Offer, Selection), Refusal> {
    let refuse = |fault, text: &str| Refusal {
        fault,
        text: text.to_owned(),
    };
    let Opening::Offer(offer) = opening else {
        let text = "an offer comes first on a control lane";
        return Err(refuse(FaultCode::Malformed, text));
    };
    let supported = Supported {
        versions: VERSIONS,
        features: Features::TUNNEL,
        required: Features::TUNNEL,
        plain_allowed: false,
        ipsec: site.sealed.is_some(),
    };
    let selection = select(offer, &supported)?;
    match site.trunk(&offer.session) {
        Some(hub) if !hub.terms.is_the_peer(control.peer()) => {
            let text = "that trunk is with another peer";
            Err(refuse(FaultCode::WrongIdentity, text))
        }
        Some(hub) if hub.terms.security != selection.security => {
            let text = "the lanes of that trunk are secured otherwise";
            Err(refuse(FaultCode::SecurityNotAgreed, text))
        }
        Some(hub) if hub.lock().over.is_some() => {
            let text = "that trunk is over";
            Err(refuse(FaultCode::UnknownSession, text))
        }
        Some(hub) if offer.epoch <= hub.lock().epoch => {
            let text = "a later control lane of that trunk stands";
            Err(refuse(FaultCode::UnknownSession, text))
        }
        None if offer.epoch != 1 => {
            let text = "no such trunk is known here";
            Err(refuse(FaultCode::UnknownSession, text))
        }
        Some(_) => Ok((offer, selection)),
        // What would be found out behind *select*, where it could not be told.
        None => match site.room_for(control.peer()) {
            Ok(()) => Ok((offer, selection)),
            Err(failure) => Err(refuse(failure.code(), failure.text())),
        },
    }
}

fn begin(
    site: &Arc<Site>,
    terms: Terms,
    control: ControlStream,
    at: SocketAddr,
) -> Result<Arc<Hub>, Failure> {
    let hub = site.keep(terms, control)?;
    start(site, &hub, at);
    Ok(hub)
}

fn start(site: &Arc<Site>, hub: &Arc<Hub>, at: SocketAddr) {
    let peer = hub.peer_name();
    site.tell(Event::TrunkUp { peer, at });
    let own = Arc::clone(hub);
    if !site.spawn("dunlin-tunnel".to_owned(), move || talk::run(&own)) {
        hub.end(FaultCode::Kernel);
        site.forget(hub, FaultCode::Kernel);
    }
}

/// Connects a control lane and agrees on what is spoken.
fn open(
    site: &Site,
    dialling: &Dialling<'_>,
    to: &Destination,
    session: SessionId,
    epoch: u32,
    deadline: Instant,
) -> Result<(ControlStream, Selection), Failure> {
    let at = &to.to;
    let unreachable = |error: &std::io::Error| {
        Failure::new(FaultCode::ControlLost, format!("{at} cannot be reached")).because(error)
    };
    let tls = site.client_tls(to.peers.clone())?;
    let cancel = &dialling.cancel;
    let connected = site
        .connector
        .connect(at, deadline, cancel.wakeup())
        .and_then(|stream| cancel.covers(&stream).map(|()| stream));
    let stream = connected.map_err(|error| unreachable(&error))?;
    set_liveness(&stream, &Liveness::default()).map_err(|error| unreachable(&error))?;
    let control = control::client(stream, &tls, deadline).map_err(|error| {
        Failure::of_handshake(format!("no secure control lane to {at}"), &error)
    })?;
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::TUNNEL,
        security: to.security,
        session,
        attempt: 1,
        epoch,
    };
    let mut bytes = Vec::new();
    offer
        .encode(&mut bytes)
        .map_err(|error| Failure::new(FaultCode::Internal, "no offer").because(&error))?;
    control
        .send(&bytes)
        .map_err(|error| Failure::of_control(&error))?;
    let selection = match read_opening(&control, deadline)? {
        Opening::Select(selection) => selection,
        Opening::Refuse(_, refusal) => return Err(Failure::told(refusal.fault, &refusal.text)),
        _ => {
            let text = "the peer answered the offer with something else";
            return Err(Failure::new(FaultCode::Malformed, text));
        }
    };
    selection.confirm(&offer).map_err(|error| {
        let text = "the peer's selection is not ours";
        Failure::new(FaultCode::SecurityNotAgreed, text).because(&error)
    })?;
    Ok((control, selection))
}

fn read_opening(control: &ControlStream, deadline: Instant) -> Result<Opening, Failure> {
    let mut bytes = [0; PRELUDE_BYTES];
    let receive = |bytes: &mut [u8]| {
        control
            .receive_exact(bytes, deadline)
            .map_err(|error| Failure::of_control(&error))
    };
    receive(&mut bytes)?;
    let prelude = Prelude::decode(&bytes).map_err(|error| malformed(&error))?;
    let mut body = vec![0; prelude.body_bytes];
    receive(&mut body)?;
    Opening::decode(&prelude, &body).map_err(|error| malformed(&error))
}

fn malformed(error: &dunlin_proto::wire::DecodeError) -> Failure {
    Failure::new(error.fault(), "the peer's words make no sense").because(error)
}

fn say_accept(
    site: &Site,
    control: &ControlStream,
    secret: &SessionSecret,
    port: u16,
) -> Result<(), Failure> {
    let accept = Message::Accept {
        secret: SessionSecret(secret.0),
        lanes_max: site.lanes_max(),
        port,
    };
    let mut bytes = Vec::new();
    let encoded = accept.encode(1, &mut bytes);
    encoded.map_err(|error| Failure::new(FaultCode::Internal, "no accept").because(&error))?;
    let sent = control.send(&bytes);
    bytes.zeroize();
    sent.map_err(|error| Failure::of_control(&error))
}

fn hear_accept(
    control: &ControlStream,
    deadline: Instant,
) -> Result<(SessionSecret, u16, u16), Failure> {
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    let receive = |bytes: &mut [u8]| {
        control
            .receive_exact(bytes, deadline)
            .map_err(|error| Failure::of_control(&error))
    };
    receive(&mut bytes)?;
    let header = Header::decode(&bytes).map_err(|error| malformed(&error))?;
    let mut body = vec![0; header.body_bytes()];
    receive(&mut body)?;
    let message = Message::decode(&header, &body);
    body.zeroize();
    match message.map_err(|error| malformed(&error))? {
        Some(Message::Accept {
            secret,
            lanes_max,
            port,
        }) => Ok((secret, lanes_max, port)),
        _ => {
            let text = "the peer says something else before it accepts";
            Err(Failure::new(FaultCode::Malformed, text))
        }
    }
}

fn peer_address(control: &ControlStream) -> Result<SocketAddr, Failure> {
    control.socket().peer_addr().map_err(|error| {
        Failure::new(FaultCode::ControlLost, "the control lane is gone").because(&error)
    })
}

fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    random::fill(&mut bytes).map_err(|error| {
        Failure::new(FaultCode::Internal, "the random number source failed").because(&error)
    })?;
    Ok(bytes)
}
