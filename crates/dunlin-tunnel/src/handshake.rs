//! The handshake on a control lane, on both sides. Each step consumes the one before.
//!
//! ```text
//!  dialling side                            accepting side
//!    dial      ── offer (requires *tunnel*) ─▶ Received
//!       │                   ◀─ select, refuse ─   │ select | refuse
//!       ▼                                         ▼
//!    Selected  ── accept: secret, lanes, port ▶ Answered
//!       │ agree                                   │ agree
//!       ▼                                         ▼
//!    Agreed    ◀──────── accept: secret, lanes ─ Agreed, once lanes are taken
//! ```
//!
//! A later control lane of a trunk has the same session and a higher epoch. It ends behind
//! *select*: [`Selected::resumed`] and [`Answered::resumed`].
//!
//! Dropping a step closes its connection, which is all that it has to undo; the peer then finds
//! the control lane lost. Only [`Received`] owes the peer an answer: [`Received::refuse`].

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use dunlin_linux::random;
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{
    Features, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection, SessionId, SessionSecret,
    Supported, VERSIONS, select,
};
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};
use zeroize::Zeroize;

use super::dials::Dialling;
use super::failure::{Failure, OrFailure};
use super::route::Destination;
use super::site::Site;
use super::terms::{Origin, Terms};
use dunlin_lane::control::{self, ControlStream};

/// The peer has selected from this side's offer on a control lane that this side dialled.
pub(super) struct Selected<'a> {
    dialling: Dialling<'a>,
    control: ControlStream,
    session: SessionId,
    selection: Selection,
    deadline: Instant,
}

/// The peer's offer can be met.
pub(super) struct Received {
    pub(super) control: ControlStream,
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    deadline: Instant,
}

/// This side has selected from the peer's offer.
pub(super) struct Answered(Received);

/// The terms are complete. The accepting side has yet to send *accept*.
pub(super) struct Agreed {
    pub(super) terms: Terms,
    pub(super) control: ControlStream,
}

impl<'a> Selected<'a> {
    /// Connects a control lane, sends the offer and reads what the peer has selected.
    ///
    /// # Errors
    /// There is no authenticated connection by `deadline`, the tunnel ends, or the peer refuses or
    /// selects what was not offered.
    pub(super) fn dial(
        site: &'a Site,
        to: &Destination,
        session: SessionId,
        epoch: u32,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let at = &to.to;
        let dialling = site.dials.begin()?;
        let tls = site.client_tls(to.peers.clone())?;
        let cancel = &dialling.cancel;
        let connect = || {
            let stream = site.connector.connect(at, deadline, cancel.wakeup())?;
            cancel.covers(&stream)?;
            set_liveness(&stream, &Liveness::default())?;
            Ok::<_, io::Error>(stream)
        };
        let unreachable = format!("{at} cannot be reached");
        let stream = connect().or_failure(FaultCode::ControlLost, unreachable)?;
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
            .or_failure(FaultCode::Internal, "no offer")?;
        control.send(&bytes)?;
        let selection = match read_opening(&control, deadline)? {
            Opening::Select(selection) => selection,
            Opening::Refuse(_, refusal) => {
                return Err(Failure::of_peer(refusal.fault, &refusal.text));
            }
            _ => {
                let text = "the peer answered the offer with something else";
                return Err(Failure::new(FaultCode::Malformed, text));
            }
        };
        selection.confirm(&offer).or_failure(
            FaultCode::SecurityNotAgreed,
            "the peer selected something that was not offered",
        )?;
        Ok(Self {
            dialling,
            control,
            session,
            selection,
            deadline,
        })
    }

    /// Exchanges *accept* for a new trunk.
    ///
    /// # Errors
    /// The control lane is lost, or the peer sends something else.
    pub(super) fn agree(self, site: &Site, to: Destination, lanes: u16) -> Result<Agreed, Failure> {
        let own_secret = SessionSecret(random()?);
        send_accept(&self.control, &own_secret, site.port)?;
        let accepted = read_accept(&self.control, self.deadline)?;
        drop(self.dialling);
        let control = self.control;
        let lanes_at = peer_address(&control)?;
        let terms = Terms {
            origin: Origin::Dialled(to),
            session: self.session,
            version: self.selection.version,
            security: self.selection.security,
            peer: control.peer().clone(),
            principal: control.peer().principal(),
            lanes_at,
            own_secret,
            peer_secret: accepted.secret,
            lanes: lanes.min(accepted.lanes_max),
            peer_lanes: accepted.lanes_max,
        };
        Ok(Agreed { terms, control })
    }

    /// The control lane of a trunk that exists.
    ///
    /// # Errors
    /// Another peer answers than before.
    pub(super) fn resumed(self, terms: &Terms) -> Result<ControlStream, Failure> {
        if !terms.is_the_peer(self.control.peer()) {
            let text = "another peer answers than before";
            return Err(Failure::new(FaultCode::UnknownSession, text));
        }
        Ok(self.control)
    }
}

impl Received {
    /// Checks what the peer sent first on a control lane.
    ///
    /// # Errors
    /// It is no offer, or cannot be met. The peer is told.
    pub(super) fn new(
        site: &Site,
        control: ControlStream,
        opening: &Opening,
    ) -> Result<Self, Failure> {
        let deadline = Instant::now() + site.limits.vanished;
        let supported = Supported {
            versions: VERSIONS,
            features: Features::TUNNEL,
            required: Features::TUNNEL,
            plain_allowed: false,
            ipsec: site.sealed.is_some(),
        };
        let met = match opening {
            Opening::Offer(offer) => select(offer, &supported).map(|selection| (offer, selection)),
            _ => Err(Refusal {
                fault: FaultCode::Malformed,
                text: "an offer comes first on a control lane".to_owned(),
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

    /// Refuses the offer, and returns why.
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
        encoded.or_failure(FaultCode::Internal, "no selection")?;
        self.control.send(&bytes)?;
        Ok(Answered(self))
    }
}

impl Answered {
    /// The control lane of a trunk that exists, and its epoch.
    pub(super) fn resumed(self) -> (ControlStream, u32) {
        (self.0.control, self.0.offer.epoch)
    }

    /// Reads the peer's *accept* for a new trunk.
    ///
    /// # Errors
    /// The control lane is lost, the peer sends something else, or the tunnel ends.
    pub(super) fn agree(self, site: &Site) -> Result<Agreed, Failure> {
        let Received {
            control,
            offer,
            selection,
            deadline,
        } = self.0;
        let dialling = site.dials.begin()?;
        let covered = dialling.cancel.covers(control.socket());
        covered.or_failure(FaultCode::Kernel, "no descriptor is left")?;
        let accepted = read_accept(&control, deadline)?;
        drop(dialling);
        if accepted.port == 0 {
            let text = "the peer's tunnel names no port for lanes";
            return Err(Failure::new(FaultCode::Malformed, text));
        }
        // With its scope, where that is an IPv6 address of one link.
        let mut lanes_at = peer_address(&control)?;
        lanes_at.set_port(accepted.port);
        let terms = Terms {
            origin: Origin::Accepted,
            session: offer.session,
            version: selection.version,
            security: selection.security,
            peer: control.peer().clone(),
            principal: control.peer().principal(),
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

/// Sends *accept*; the accepting side names no port.
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
        .or_failure(FaultCode::Internal, "no accept")?;
    let sent = control.send(&bytes);
    bytes.zeroize();
    Ok(sent?)
}

fn read_accept(control: &ControlStream, deadline: Instant) -> Result<Accepted, Failure> {
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    control.receive_exact(&mut bytes, deadline)?;
    let header = Header::decode(&bytes)?;
    let mut body = vec![0; header.body_bytes()];
    control.receive_exact(&mut body, deadline)?;
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
            let text = "the peer sends another message before it accepts";
            Err(Failure::new(FaultCode::Malformed, text))
        }
    }
}

fn read_opening(control: &ControlStream, deadline: Instant) -> Result<Opening, Failure> {
    let mut bytes = [0; PRELUDE_BYTES];
    control.receive_exact(&mut bytes, deadline)?;
    let prelude = Prelude::decode(&bytes)?;
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact(&mut body, deadline)?;
    Ok(Opening::decode(&prelude, &body)?)
}

/// Tells the peer why its control lane is refused.
fn refuse(control: &ControlStream, refusal: Refusal) -> Failure {
    let mut bytes = Vec::new();
    if refusal.encode(VERSIONS, &mut bytes).is_ok() {
        // The peer may have gone.
        let _ = control.send(&bytes).and_then(|()| control.close());
    }
    Failure::new(refusal.fault, refusal.text)
}

fn peer_address(control: &ControlStream) -> Result<SocketAddr, Failure> {
    let address = control.socket().peer_addr();
    address.or_failure(FaultCode::ControlLost, "the control lane is gone")
}

/// # Errors
/// What getrandom(2) returns.
pub(super) fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    random::fill(&mut bytes).or_failure(FaultCode::Internal, "the random number source failed")?;
    Ok(bytes)
}
