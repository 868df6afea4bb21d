//! One end of a session, message by message, so that a test can break rules of the protocol.

use std::net::{SocketAddr, TcpListener, TcpStream};

use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::data::{DataReceiver, DataSender, PlainConsent, STALL_LIMIT};
use dunlin_lane::handshake;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_proto::control::{
    Accept, CONTROL_HEADER_BYTES, Describe, Envelope, Header, Message, Region, RegionKind,
    RegionTable,
};
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::negotiate::{
    Features, LaneDirection, LaneOpen, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude,
    Selection, SessionSecret, VERSIONS,
};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::lane::soon;

pub const SESSION: [u8; 16] = [9; 16];

/// A control lane in either role.
pub struct Peer {
    pub stream: ControlStream,
    pub envelope: Envelope,
}

impl Peer {
    /// A source that has sent its offer and received the answer.
    pub fn source(to: SocketAddr, tls: &ClientTls, security: LaneSecurity) -> (Self, Opening) {
        Self::source_of(to, tls, security, SESSION)
    }

    /// Like [`Self::source`], for the session `session`.
    pub fn source_of(
        to: SocketAddr,
        tls: &ClientTls,
        security: LaneSecurity,
        session: [u8; 16],
    ) -> (Self, Opening) {
        let peer = Self::offering(to, tls, security, session);
        let answer = read_opening(&peer.stream);
        (peer, answer)
    }

    /// A source that has sent its offer.
    pub fn offering(
        to: SocketAddr,
        tls: &ClientTls,
        security: LaneSecurity,
        session: [u8; 16],
    ) -> Self {
        let stream = control::client(TcpStream::connect(to).unwrap(), tls, soon()).unwrap();
        let offer = Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security,
            session,
            attempt: 1,
            epoch: 1,
        };
        let mut bytes = Vec::new();
        offer.encode(&mut bytes).unwrap();
        stream.send(&bytes).unwrap();
        Self::new(stream, session)
    }

    /// A source that has received the destination's *accept*.
    pub fn accepted(to: SocketAddr, tls: &ClientTls) -> (Self, Accept) {
        let (peer, answer) = Self::describing(to, tls, SESSION, [1; 16]);
        match answer {
            Some(Message::Accept(accept)) => (peer, accept),
            other => panic!("{other:?}"),
        }
    }

    /// A source of the session `session` that has described a VM with the UUID `vm`, and the
    /// destination's answer.
    pub fn describing(
        to: SocketAddr,
        tls: &ClientTls,
        session: [u8; 16],
        vm: [u8; 16],
    ) -> (Self, Option<Message>) {
        let (mut peer, answer) = Self::source_of(to, tls, LaneSecurity::Tls, session);
        assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
        peer.send(&describe_as(vm));
        let answer = peer.receive();
        (peer, answer)
    }

    /// A destination that has received the offer and selected `security`, or the security in the
    /// offer if `security` is `None`.
    pub fn destination(
        listener: &TcpListener,
        tls: &ServerTls,
        security: Option<LaneSecurity>,
    ) -> Self {
        let stream = control::server(listener.accept().unwrap().0, tls, soon()).unwrap();
        let Opening::Offer(offer) = read_opening(&stream) else {
            panic!("the source sent no offer")
        };
        let mut bytes = Vec::new();
        Selection {
            version: VERSIONS.max,
            features: offer.required,
            security: security.unwrap_or(offer.security),
        }
        .encode(&mut bytes)
        .unwrap();
        stream.send(&bytes).unwrap();
        Self::new(stream, offer.session)
    }

    fn new(stream: ControlStream, session: [u8; 16]) -> Self {
        Self {
            stream,
            envelope: Envelope {
                session,
                epoch: 1,
                sequence: 0,
            },
        }
    }

    pub fn encode(&mut self, message: &Message) -> Vec<u8> {
        self.envelope.sequence += 1;
        let mut bytes = Vec::new();
        message.encode(&self.envelope, &mut bytes).unwrap();
        bytes
    }

    /// Sends a message. Returns false if the peer has closed the connection, which many tests
    /// expect.
    pub fn send(&mut self, message: &Message) -> bool {
        let bytes = self.encode(message);
        self.stream.send(&bytes).is_ok()
    }

    /// The next message other than ping and pong; `None` at the end of the connection.
    pub fn receive(&mut self) -> Option<Message> {
        loop {
            let mut bytes = [0; CONTROL_HEADER_BYTES];
            self.stream.receive_exact(&mut bytes, soon()).ok()?;
            let header = Header::decode(&bytes).unwrap();
            let mut body = vec![0; header.body_bytes()];
            self.stream.receive_exact(&mut body, soon()).ok()?;
            match Message::decode(&header, &body).unwrap() {
                Some(Message::Ping { token }) => {
                    self.send(&Message::Pong { token });
                }
                Some(Message::Pong { .. }) | None => {}
                Some(message) => return Some(message),
            }
        }
    }

    /// The next message for which `wanted` returns true; `None` at the end of the connection.
    pub fn await_message(&mut self, wanted: impl Fn(&Message) -> bool) -> Option<Message> {
        loop {
            let message = self.receive()?;
            if wanted(&message) {
                return Some(message);
            }
        }
    }
}

/// Receives the opening of the other side.
pub fn read_opening(stream: &ControlStream) -> Opening {
    let mut bytes = [0; PRELUDE_BYTES];
    stream.receive_exact(&mut bytes, soon()).unwrap();
    let prelude = Prelude::decode(&bytes).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    stream.receive_exact(&mut body, soon()).unwrap();
    Opening::decode(&prelude, &body).unwrap()
}

/// A *describe* of a VM of 4 MiB in one region.
pub fn describe() -> Message {
    describe_as([1; 16])
}

/// Like [`describe`], of a VM with this UUID.
pub fn describe_as(vm_uuid: [u8; 16]) -> Message {
    Message::Describe(Describe {
        vm_uuid,
        vm_name: "hostile".into(),
        page_bytes: 4096,
        paused: true,
        description: Vec::new(),
        regions: RegionTable::new(vec![Region {
            id: 0,
            kind: RegionKind::Ram,
            flags: 0,
            backing_page_bytes: 4096,
            length: 4 << 20,
            guest_physical: 0,
            name: "ram0".into(),
        }])
        .unwrap(),
    })
}

pub fn lane_open(session: [u8; 16], secret: &SessionSecret, lane: u16) -> LaneOpen {
    let open = LaneOpen::unproved(VERSIONS.max, session, lane, LaneDirection::FromDialer);
    proved(open, secret)
}

/// The message with its proof.
pub fn proved(open: LaneOpen, secret: &SessionSecret) -> LaneOpen {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&secret.0).unwrap();
    mac.update(&open.mac_input());
    LaneOpen {
        mac: mac.finalize().into_bytes().into(),
        ..open
    }
}

/// Opens a data lane and sends `open`.
pub fn open_lane(to: SocketAddr, tls: Option<&ClientTls>, open: &LaneOpen) -> DataSender {
    let stream = TcpStream::connect(to).unwrap();
    let mut sender = match tls {
        Some(tls) => {
            let secured = handshake::client(stream, tls, soon()).unwrap();
            DataSender::tls(secured, STALL_LIMIT).unwrap()
        }
        None => {
            let consent = PlainConsent::both(true, true).unwrap();
            DataSender::plain(stream, consent, STALL_LIMIT).unwrap()
        }
    };
    let mut bytes = Vec::new();
    open.encode(&mut bytes).unwrap();
    sender.send(&bytes).unwrap();
    sender
}

/// A chunk of one page of zeros.
pub fn zero_chunk(number: u64, region: u16, offset: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let range = Range {
        region,
        encoding: Encoding::Zero,
        page_count: 1,
        offset,
    };
    ChunkHeader::encode(number, 1, &[range], &mut bytes).unwrap();
    bytes
}

pub fn frame(frame: Frame) -> Vec<u8> {
    frame.to_bytes().to_vec()
}

/// Accepts a data lane of a source.
pub fn take_lane(listener: &TcpListener, tls: &ServerTls) -> (DataReceiver, LaneOpen) {
    let secured = handshake::server(listener.accept().unwrap().0, tls, soon()).unwrap();
    let mut receiver = DataReceiver::tls(secured, STALL_LIMIT).unwrap();
    let mut bytes = [0; PRELUDE_BYTES];
    receiver.read_exact(&mut bytes).unwrap();
    let prelude = Prelude::decode(&bytes).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    receiver.read_exact(&mut body).unwrap();
    match Opening::decode(&prelude, &body).unwrap() {
        Opening::Lane(open) => (receiver, open),
        other => panic!("{other:?}"),
    }
}
