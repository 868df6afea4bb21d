//! The handshake on a control lane, on both sides. Each step consumes the previous one.
//!
//! ```text
//!  dialling side                            accepting side
//!    dial      ── offer (requires *tunnel*) ─▶ Received
//!       │                   ◀─ select, refuse ─   │ select | refuse
//!       ▼                                         ▼
//!    Selected  ── accept: secret, lanes, port ▶ Answered
//!       │ agree                                   │ agree
//!       ▼                                         ▼
//!    Agreed    ◀──────── accept: secret, lanes ─ Agreed, ready to admit lanes
//! ```
//!
//! A later control lane of a trunk has the same session and a higher epoch. Its handshake ends
//! after *select*: [`Selected::resumed`] and [`Answered::resumed`].
//!
//! Dropping a step closes its connection, which the peer sees as a lost control lane. Nothing else
//! has to be undone. The exception is [`Received`]: [`Received::refuse`] must answer the peer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use dunlin_linux::random;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{
    Features, Offer, Opening, Refusal, Selection, SessionId, SessionSecret, Supported,
    TUNNEL_VERSIONS, VersionRange, select,
};
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};
use zeroize::Zeroize;

use super::dials::Dialling;
use super::failure::{Failure, OrFailure};
use super::route::Destination;
use super::site::Site;
use super::terms::{Origin, Terms, one_opener};
use dunlin_lane::control::{self, ControlStream};

/// The peer has selected a version and a security from this side's offer, on a control lane that
/// this side dialled.
pub(super) struct Selected<'a> {
    dialling: Dialling<'a>,
    control: ControlStream,
    session: SessionId,
    selection: Selection,
    deadline: Instant,
}

/// A control lane on which the peer has sent an acceptable offer.
pub(super) struct Received {
    pub(super) control: ControlStream,
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    deadline: Instant,
}

/// A control lane on which this side has sent its selection from the peer's offer.
pub(super) struct Answered(Received);

/// The two sides have agreed on all terms. On the accepting side, *accept* has not been
/// sent yet.
pub(super) struct Agreed {
    pub(super) terms: Terms,
    pub(super) control: ControlStream,
}

impl<'a> Selected<'a> {
    /// Connects a control lane, sends the offer and reads the peer's selection.
    ///
    /// # Errors
    /// There is no authenticated connection by `deadline`, `dialling` is cancelled, the peer
    /// refuses the offer, or the peer selects something that was not offered.
    pub(super) fn dial(
        site: &Site,
        dialling: Dialling<'a>,
        to: &Destination,
        session: SessionId,
        epoch: u32,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        // In version 1 the peer also connects to this side. So offer version 1 only if this side
        // has a port for peers.
        let oldest = if site.port.is_some() {
            TUNNEL_VERSIONS.min
        } else {
            2
        };
        let offer = Offer {
            versions: VersionRange {
                min: oldest,
                ..TUNNEL_VERSIONS
            },
            optional: Features::NONE,
            required: Features::TUNNEL,
            security: to.security,
            session,
            attempt: 1,
            epoch,
        };
        let tls = site.client_tls(to.peers.clone())?;
        let (connector, cancel) = (&*site.connector, &dialling.cancel);
        let opened = control::open(&to.to, connector, &tls, &offer, deadline, cancel);
        let (control, selection) = opened?;
        Ok(Self {
            dialling,
            control,
            session,
            selection,
            deadline,
        })
    }

    /// Exchanges *accept* messages with the peer, for a new trunk.
    ///
    /// # Errors
    /// The control lane is lost, the peer sends no valid *accept* by the deadline, or the random
    /// number source fails.
    pub(super) fn agree(self, site: &Site, to: Destination) -> Result<Agreed, Failure> {
        let lanes = site.lanes_to(&to.to);
        let own_secret = SessionSecret(random()?);
        // A side that opens all lanes needs no port for them.
        let accepts_none = one_opener(self.selection.version, self.selection.security);
        let port = if accepts_none { None } else { site.port };
        let port = port.unwrap_or(0);
        send_accept(&self.control, &own_secret, port)?;
        let accepted = read_accept(&self.control, self.deadline)?;
        drop(self.dialling);
        let control = self.control;
        let lanes_at = peer_address(&control)?;
        let own = Arc::clone(&site.identities().connecting);
        let terms = Terms {
            origin: Origin::Dialled(to),
            session: self.session,
            version: self.selection.version,
            security: self.selection.security,
            peer: control.peer().clone(),
            own_until: own.dates().first().map(|own| own.not_after),
            lanes_at,
            own_secret,
            peer_secret: accepted.secret,
            lanes: lanes.min(accepted.lanes_max),
            peer_lanes: accepted.lanes_max,
        };
        Ok(Agreed { terms, control })
    }

    /// Ends the handshake of a later control lane, for an existing trunk. Returns the control lane.
    ///
    /// # Errors
    /// The peer is not the peer of the trunk.
    pub(super) fn resumed(self, terms: &Terms) -> Result<ControlStream, Failure> {
        if !terms.is_the_peer(self.control.peer()) {
            let text = "the peer's address answers with another identity";
            return Err(Failure::new(FaultCode::UnknownSession, text));
        }
        Ok(self.control)
    }
}

impl Received {
    /// Checks the first message of the peer on a control lane.
    ///
    /// # Errors
    /// The message is not an offer, or the offer is not acceptable. The peer receives the refusal.
    pub(super) fn new(
        site: &Site,
        control: ControlStream,
        opening: &Opening,
    ) -> Result<Self, Failure> {
        let deadline = Instant::now() + site.limits.vanished;
        let supported = Supported {
            versions: TUNNEL_VERSIONS,
            features: Features::TUNNEL,
            required: Features::TUNNEL,
            plain_allowed: false,
            ipsec: site.sealed.is_some(),
        };
        let met = match opening {
            Opening::Offer(offer) => select(offer, &supported).map(|selection| (offer, selection)),
            _ => Err(Refusal {
                fault: FaultCode::Malformed,
                text: "expected an offer as the first message of a control lane".to_owned(),
            }),
        };
        match met {
            Ok((offer, selection)) => Ok(Self {
                control,
                offer: offer.clone(),
                selection,
                deadline,
            }),
            Err(refusal) => Err(refuse(&control, refusal)),
        }
    }

    /// Refuses the offer. Returns the refusal as a failure.
    pub(super) fn refuse(self, refusal: Refusal) -> Failure {
        refuse(&self.control, refusal)
    }

    /// Sends the selection.
    ///
    /// # Errors
    /// The control lane is lost.
    pub(super) fn select(self) -> Result<Answered, Failure> {
        let mut bytes = Vec::new();
        let encoded = self.selection.encode(&mut bytes);
        encoded.or_failure(FaultCode::Internal, "cannot encode the selection")?;
        self.control.send(&bytes)?;
        Ok(Answered(self))
    }
}

impl Answered {
    /// Ends the handshake of a later control lane, for an existing trunk. Returns the control lane
    /// and its epoch.
    pub(super) fn resumed(self) -> (ControlStream, u32) {
        (self.0.control, self.0.offer.epoch)
    }

    /// Reads the peer's *accept* for a new trunk.
    ///
    /// # Errors
    /// The control lane is lost, the peer sends no valid *accept* by the deadline, the tunnel ends,
    /// the process has no free file descriptors, or the random number source fails.
    pub(super) fn agree(self, site: &Site) -> Result<Agreed, Failure> {
        let Received {
            control,
            offer,
            selection,
            deadline,
        } = self.0;
        let dialling = site.dials.begin()?;
        let covered = dialling.cancel.covers(control.socket());
        covered.or_failure(FaultCode::Kernel, "out of descriptors")?;
        let accepted = read_accept(&control, deadline)?;
        drop(dialling);
        let opens_all = one_opener(selection.version, selection.security);
        if accepted.port == 0 && !opens_all {
            let text = "peer's accept message names no port for lanes";
            return Err(Failure::new(FaultCode::Malformed, text));
        }
        // Use the socket's address, because it includes the scope of a link-local IPv6 address.
        let mut lanes_at = peer_address(&control)?;
        if !opens_all {
            lanes_at.set_port(accepted.port);
        }
        let terms = Terms {
            origin: Origin::Accepted,
            session: offer.session,
            version: selection.version,
            security: selection.security,
            peer: control.peer().clone(),
            own_until: None,
            lanes_at,
            own_secret: SessionSecret(random()?),
            peer_secret: accepted.secret,
            lanes: site.limits.lanes.min(accepted.lanes_max),
            peer_lanes: accepted.lanes_max,
        };
        Ok(Agreed { terms, control })
    }
}

/// The content of the peer's *accept*.
struct Accepted {
    secret: SessionSecret,
    lanes_max: u16,
    port: u16,
}

/// Sends *accept*. The accepting side, and a side that opens all lanes, sends port 0.
///
/// # Errors
/// The control lane is lost.
pub(super) fn send_accept(
    control: &ControlStream,
    secret: &SessionSecret,
    port: u16,
) -> Result<(), Failure> {
    let accept = Message::Accept {
        secret: SessionSecret(secret.0),
        lanes_max: MAX_LANES,
        port,
    };
    let mut bytes = Vec::new();
    accept
        .encode(1, &mut bytes)
        .or_failure(FaultCode::Internal, "cannot encode the accept message")?;
    let sent = control.send(&bytes);
    bytes.zeroize();
    Ok(sent?)
}

fn read_accept(control: &ControlStream, deadline: Instant) -> Result<Accepted, Failure> {
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    control.receive_exact_by(&mut bytes, deadline)?;
    let header = Header::decode(&bytes)?;
    let mut body = vec![0; header.body_bytes()];
    control.receive_exact_by(&mut body, deadline)?;
    let message = Message::decode(&header, &body);
    body.zeroize();
    match message? {
        Some(Message::Accept {
            secret,
            lanes_max,
            port,
        }) => Ok(Accepted {
            secret,
            lanes_max,
            port,
        }),
        _ => {
            let text = "the peer sent another message instead of the accept message";
            Err(Failure::new(FaultCode::Malformed, text))
        }
    }
}

/// Sends the peer the reason why this side refuses its control lane.
fn refuse(control: &ControlStream, refusal: Refusal) -> Failure {
    let mut bytes = Vec::new();
    let opening = Opening::Refuse(TUNNEL_VERSIONS, refusal.clone());
    if opening.encode(&mut bytes).is_ok() {
        // The peer may have closed the connection.
        let _ = control.send(&bytes).and_then(|()| control.close());
    }
    Failure::new(refusal.fault, refusal.text)
}

fn peer_address(control: &ControlStream) -> Result<SocketAddr, Failure> {
    let address = control.socket().peer_addr();
    address.or_failure(FaultCode::ControlLost, "the control lane was lost")
}

pub(super) fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    random::fill(&mut bytes).or_failure(FaultCode::Internal, "the random number source failed")?;
    Ok(bytes)
}
