//! The control lane of a trunk, for tests that act as a tunnel's peer. The functions implement as
//! much of the protocol as the tests need.

use std::net::{SocketAddr, TcpStream};

use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::data::{DataSender, STALL_LIMIT};
use dunlin_lane::handshake;
use dunlin_lane::policy::ClientTls;
use dunlin_proto::negotiate::{
    Features, LaneOpen, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection,
    SessionId, SessionSecret, VersionRange,
};
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};

use crate::lane::soon;

/// The offer for a new trunk, or for a later control lane of a trunk, with this range of versions.
#[must_use]
pub fn offer(versions: VersionRange, session: SessionId, epoch: u32) -> Offer {
    Offer {
        versions,
        optional: Features::NONE,
        required: Features::TUNNEL,
        security: LaneSecurity::Tls,
        session,
        attempt: 1,
        epoch,
    }
}

/// *accept* with the secret of this side.
#[must_use]
pub fn accept(lanes_max: u16, port: u16) -> Message {
    Message::Accept {
        secret: SessionSecret([1; 32]),
        lanes_max,
        port,
    }
}

/// Dials a tunnel and sends `offer`, then `accept` if it is given. Returns what the tunnel has
/// selected, or why it refuses.
pub fn dial(
    far: SocketAddr,
    tls: &ClientTls,
    offer: &Offer,
    accept: Option<&Message>,
) -> Result<(ControlStream, Selection), Refusal> {
    let control = control::client(TcpStream::connect(far).unwrap(), tls, soon()).unwrap();
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).unwrap();
    if let Some(accept) = accept {
        accept.encode(offer.epoch, &mut bytes).unwrap();
    }
    control.send(&bytes).unwrap();
    match read_opening(&control) {
        Opening::Select(selection) => Ok((control, selection)),
        Opening::Refuse(_, refusal) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

/// Reads a tunnel's offer, and selects `version`, the required features and the offered security.
/// On the first control lane of a trunk it also sends *accept*.
pub fn answer(control: &ControlStream, version: u16, accept: &Message) -> Offer {
    let Opening::Offer(offer) = read_opening(control) else {
        panic!("no offer")
    };
    let selection = Selection {
        version,
        features: offer.required,
        security: offer.security,
    };
    let mut bytes = Vec::new();
    selection.encode(&mut bytes).unwrap();
    if offer.epoch == 1 {
        accept.encode(offer.epoch, &mut bytes).unwrap();
    }
    control.send(&bytes).unwrap();
    offer
}

/// Reads the first message on a control lane.
pub fn read_opening(control: &ControlStream) -> Opening {
    let mut start = [0; PRELUDE_BYTES];
    control.receive_exact(&mut start, soon()).unwrap();
    let prelude = Prelude::decode(&start).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact(&mut body, soon()).unwrap();
    Opening::decode(&prelude, &body).unwrap()
}

/// Receives a message, and answers it if it is a ping. Returns `None` for a message of an unknown
/// kind, and an error if the trunk has ended.
pub fn receive(control: &ControlStream) -> Result<Option<Message>, control::ControlError> {
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    control.receive_exact(&mut bytes, soon())?;
    let header = Header::decode(&bytes).unwrap();
    let mut body = vec![0; header.body_bytes()];
    control.receive_exact(&mut body, soon())?;
    let message = Message::decode(&header, &body).unwrap();
    if let Some(Message::Ping { token }) = message {
        send_message(control, &Message::Pong { token });
    }
    Ok(message)
}

/// Receives the other side's *accept*. Returns its secret and the port for lanes.
pub fn receive_accept(control: &ControlStream) -> (SessionSecret, u16) {
    let Some(Message::Accept { secret, port, .. }) = receive(control).unwrap() else {
        panic!("no accept")
    };
    (secret, port)
}

/// Sends a message.
pub fn send_message(control: &ControlStream, message: &Message) {
    let mut bytes = Vec::new();
    message.encode(1, &mut bytes).unwrap();
    control.send(&bytes).unwrap();
}

/// Connects to a tunnel over TLS and sends `open`, which opens a lane.
pub fn open_lane(to: SocketAddr, tls: &ClientTls, open: &LaneOpen) -> DataSender {
    let stream = TcpStream::connect(to).unwrap();
    let secured = handshake::client(stream, tls, soon()).unwrap();
    let mut sender = DataSender::tls(secured, STALL_LIMIT).unwrap();
    let mut bytes = Vec::new();
    open.encode(&mut bytes).unwrap();
    sender.send(&bytes).unwrap();
    sender
}
