//! A peer with a good certificate and bad intentions: what it says is checked, and
//! what it is not let in to stays closed (I7).
#![allow(clippy::unwrap_used)]

mod lane_support;
mod tunnel_support;

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use dunlin::lane::control::{self, ControlStream};
use dunlin::lane::data::{DataSender, STALL_LIMIT};
use dunlin::lane::handshake;
use dunlin::lane::identity::{ClientTls, Identity};
use dunlin::lane::provider::Crypto;
use dunlin::tunnel::{Event, Limits};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    Features, LaneOpen, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, SessionId,
    SessionSecret, VERSIONS, lane_mac_input,
};
use dunlin_proto::stripe::frame::{Data, Frame};
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message, Open};
use hmac::{Hmac, KeyInit, Mac};
use lane_support::{names, soon};
use sha2::Sha256;
use tunnel_support::{FAR, NEAR, OTHER, Pair, Setup, fill_backlog};

const SESSION: SessionId = [9; 16];

/// A peer that speaks the protocol as far as a test wants it to.
struct Peer {
    far: SocketAddr,
    tls: ClientTls,
    control: ControlStream,
    secret: SessionSecret,
}

fn tls(identity: &Identity) -> ClientTls {
    identity.client(&Crypto::auto(), names(&[FAR])).unwrap()
}

impl Peer {
    /// Makes an association with the far tunnel.
    fn associate(pair: &Pair) -> Self {
        Self::associate_as(pair, SESSION).unwrap()
    }

    fn associate_as(pair: &Pair, session: SessionId) -> Result<Self, Refusal> {
        let far = pair.far.as_ref().unwrap().address();
        let tls = tls(&pair.authority.identity(&[NEAR]));
        let control = control::client(TcpStream::connect(far).unwrap(), &tls, soon()).unwrap();
        let offer = Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::TUNNEL,
            security: LaneSecurity::Tls,
            session,
            attempt: 1,
            epoch: 1,
        };
        let mut bytes = Vec::new();
        offer.encode(&mut bytes).unwrap();
        let accept = Message::Accept {
            secret: SessionSecret([1; 32]),
            lanes_max: 2,
            port: 9,
        };
        accept.encode(1, &mut bytes).unwrap();
        control.send(&bytes).unwrap();
        let mut start = [0; PRELUDE_BYTES];
        control.receive_exact(&mut start, soon()).unwrap();
        let prelude = Prelude::decode(&start).unwrap();
        let mut body = vec![0; prelude.body_bytes];
        control.receive_exact(&mut body, soon()).unwrap();
        match Opening::decode(&prelude, &body).unwrap() {
            Opening::Select(_) => {}
            Opening::Refuse(_, refusal) => return Err(refusal),
            other => panic!("{other:?}"),
        }
        let mut peer = Self {
            far,
            tls,
            control,
            secret: SessionSecret([0; 32]),
        };
        let Some(Message::Accept { secret, .. }) = peer.hear() else {
            panic!("no accept")
        };
        peer.secret = secret;
        Ok(peer)
    }

    fn hear(&mut self) -> Option<Message> {
        let mut bytes = [0; MESSAGE_HEADER_BYTES];
        self.control.receive_exact(&mut bytes, soon()).unwrap();
        let header = Header::decode(&bytes).unwrap();
        let mut body = vec![0; header.body_bytes()];
        self.control.receive_exact(&mut body, soon()).unwrap();
        Message::decode(&header, &body).unwrap()
    }

    fn say(&self, message: &Message) {
        let mut bytes = Vec::new();
        message.encode(1, &mut bytes).unwrap();
        self.control.send(&bytes).unwrap();
    }

    /// Opens a lane with a proof under `secret`.
    fn lane(&self, tls: &ClientTls, lane: u16, session: SessionId, secret: &[u8]) -> DataSender {
        let stream = TcpStream::connect(self.far).unwrap();
        let secured = handshake::client(stream, tls, soon()).unwrap();
        let mut sender = DataSender::tls(secured, STALL_LIMIT).unwrap();
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret).unwrap();
        mac.update(&lane_mac_input(&session, lane));
        let open = LaneOpen {
            version: VERSIONS.max,
            session,
            lane,
            mac: mac.finalize().into_bytes().into(),
        };
        let mut bytes = Vec::new();
        open.encode(&mut bytes).unwrap();
        sender.send(&bytes).unwrap();
        sender
    }
}

fn rejected(pair: &Pair, words: &str) {
    pair.far_told.wait(
        words,
        |event| matches!(event, Event::Rejected { why, .. } if why.contains(words)),
    );
}

#[test]
fn i7_a_lane_needs_the_session_the_secret_and_the_same_peer() {
    let pair = Pair::start(&Setup::default());
    let peer = Peer::associate(&pair);
    let secret = peer.secret.0;
    let _stray = peer.lane(&peer.tls, 1, [8; 16], &secret);
    rejected(&pair, "no association");
    let _guessed = peer.lane(&peer.tls, 1, SESSION, &[0; 32]);
    rejected(&pair, "secret");
    // Allowed, but somebody else.
    let other = tls(&pair.authority.identity(&[OTHER]));
    let _other = peer.lane(&other, 1, SESSION, &secret);
    rejected(&pair, "another than the control lane's");
    // Of the same name: its certificate was renewed.
    let renewed = tls(&pair.authority.identity(&[NEAR]));
    let _good = peer.lane(&renewed, 1, SESSION, &secret);
    let until = std::time::Instant::now() + tunnel_support::PATIENCE;
    while pair.far.as_ref().unwrap().status()[0].lanes != 1 {
        assert!(
            std::time::Instant::now() < until,
            "the good lane is not let in"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Each breach ends that peer's association, and nobody else's channel.
#[test]
fn i7_who_breaks_the_protocol_is_cut_off_and_others_are_not() {
    let pair = Pair::start(&Setup::default());
    let (near, far) = pair.channel();
    type Breach = fn(&Peer);
    let breaches: [(&str, Breach); 4] = [
        ("never opened", |peer| {
            let data = Data::new(40, 0, 1).unwrap();
            let mut lane = peer.lane(&peer.tls, 1, SESSION, &peer.secret.0);
            let mut frame = lane.frame();
            frame.bytes(b"x");
            frame.finish(&Frame::Data(data).to_bytes()).unwrap();
        }),
        ("frames", |peer| {
            let mut lane = peer.lane(&peer.tls, 1, SESSION, &peer.secret.0);
            lane.send(&Frame::End { frames: 7 }.to_bytes()).unwrap();
        }),
        ("cannot be", |peer| {
            peer.say(&Message::LaneLost(dunlin_proto::stripe::message::LaneAck {
                lane: 77,
                frames: 1,
            }))
        }),
        ("never opened", |peer| {
            peer.say(&Message::Closed { channel: 1 })
        }),
    ];
    for (number, (words, breach)) in breaches.into_iter().enumerate() {
        let peer = Peer::associate(&pair);
        breach(&peer);
        let broken = |event: &Event| matches!(event, Event::ControlLost { failure, .. } if failure.text().contains(words));
        pair.far_told.wait(words, broken);
        let gone = |event: &Event| matches!(event, Event::Dissociated { .. });
        let until = std::time::Instant::now() + tunnel_support::PATIENCE;
        while pair.far_told.count(gone) <= number {
            assert!(
                std::time::Instant::now() < until,
                "{:#?}",
                pair.far_told.all()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
    tunnel_support::join(vec![
        tunnel_support::send(&near, 3, 1 << 20),
        tunnel_support::expect(&far, 3, 1 << 20),
    ]);
}

/// Threads of this process that connect to targets.
fn connecting() -> usize {
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(entry.unwrap().path().join("comm"));
        // One that has just ended has no name.
        name.is_ok_and(|name| name.starts_with("dunlin-target"))
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(of).filter(|is_one| *is_one).count()
}

/// A channel that is given up leaves a thread behind that still connects.
#[test]
fn i8_channels_that_are_given_up_at_once_are_bounded_while_their_target_is_silent() {
    let most = 3;
    let pair = Pair::start(&Setup {
        limits: Limits {
            channels: most,
            connect: Duration::from_secs(3),
            ..Limits::default()
        },
        ..Setup::default()
    });
    let _waiting = fill_backlog(&pair.target());
    let mut peer = Peer::associate(&pair);
    let last = 100;
    for channel in (0..=last).step_by(2) {
        peer.say(&Message::Open(Open {
            channel,
            limit: 1 << 20,
            route: "ram".to_owned(),
            parameter: String::new(),
            barrier: Vec::new(),
        }));
        if channel < last {
            let fault = FaultCode::Ended;
            peer.say(&Message::Reset { channel, fault });
        }
    }
    let (fault, text) = loop {
        match peer.hear() {
            Some(Message::Refused {
                channel,
                fault,
                text,
            }) if channel == last => break (fault, text),
            _ => {}
        }
    };
    assert_eq!(fault, FaultCode::Busy, "{text}");
    assert!(text.contains("are being made"), "{text}");
    assert!(connecting() <= most, "{} threads", connecting());
}

#[test]
fn i8_one_peer_has_so_many_associations_and_is_told_so() {
    let pair = Pair::start(&Setup::default());
    let (near, far) = pair.channel();
    let mut peers = Vec::new();
    let refusal = loop {
        let session = [100 + peers.len() as u8; 16];
        match Peer::associate_as(&pair, session) {
            Ok(peer) => peers.push(peer),
            Err(refusal) => break refusal,
        }
        assert!(peers.len() < 20, "nobody is refused");
    };
    assert_eq!(refusal.fault, FaultCode::Busy);
    assert!(refusal.text.contains("with this peer"), "{refusal}");
    tunnel_support::join(vec![
        tunnel_support::send(&near, 4, 1 << 20),
        tunnel_support::expect(&far, 4, 1 << 20),
    ]);
}
