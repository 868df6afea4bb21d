//! A malicious peer with a valid certificate: its messages are checked, and it gets
//! nothing for which it is not authorised (I7).
#![allow(clippy::unwrap_used)]

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dunlin_lane::accept::{Arrival, LaneSocket};
use dunlin_lane::admit::{AdmitError, LaneAcceptor};
use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::data::{DataReceiver, DataSender, PlainConsent, STALL_LIMIT};
use dunlin_lane::dial::{LaneDialer, PlainDialer};
use dunlin_lane::handshake;
use dunlin_lane::identity::Identity;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::Crypto;
use dunlin_lane::security::SealedLanes;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{
    LaneDirection, LaneOpen, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal,
    SessionId, SessionSecret, VersionRange,
};
use dunlin_proto::stripe::frame::{Data, Frame};
use dunlin_proto::stripe::message::{Message, Open};
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::{Authority, load, names, soon};
use dunlin_test_support::tunnel::peer::{self, open_lane, receive_accept, send_message};
use dunlin_test_support::tunnel::{
    Events, FAR, NEAR, OTHER, Pair, Setup, fill_backlog, identities,
};
use dunlin_tunnel::{
    Entrance, Event, Exit, Limits, Listen, Mode, Routes, Target, Tunnel, WINDOW_BYTES,
};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

const SESSION: SessionId = [9; 16];

/// A peer that follows version 1 of the protocol as far as a test needs.
struct Peer {
    far: SocketAddr,
    tls: ClientTls,
    control: ControlStream,
    secret: SessionSecret,
}

fn tls(identity: &Identity) -> ClientTls {
    identity.client(&Crypto::auto(), names(&[FAR])).unwrap()
}

fn offer(session: SessionId, epoch: u32) -> Offer {
    peer::offer(VersionRange::only(1), session, epoch)
}

impl Peer {
    /// Makes a trunk with the far tunnel.
    fn trunk(pair: &Pair) -> Self {
        Self::trunk_as(pair, SESSION).unwrap()
    }

    fn trunk_as(pair: &Pair, session: SessionId) -> Result<Self, Refusal> {
        let far = pair.far.as_ref().unwrap().address().unwrap();
        let tls = tls(&pair.authority.identity(&[NEAR]));
        let control = Self::offer(far, &tls, session, 1)?;
        Ok(Self::on(far, tls, control))
    }

    /// Makes a trunk with lanes over IPsec.
    fn trunk_over_ipsec(
        far: SocketAddr,
        tls: ClientTls,
        versions: VersionRange,
        port: u16,
    ) -> Self {
        let offer = Offer {
            security: LaneSecurity::Ipsec,
            ..peer::offer(versions, SESSION, 1)
        };
        let accept = peer::accept(2, port);
        let (control, selection) = peer::dial(far, &tls, &offer, Some(&accept)).unwrap();
        assert_eq!(selection.version, versions.max);
        Self::on(far, tls, control)
    }

    /// Creates the peer of a trunk that was agreed on over `control`.
    fn on(far: SocketAddr, tls: ClientTls, control: ControlStream) -> Self {
        let (secret, _) = receive_accept(&control);
        Self {
            far,
            tls,
            control,
            secret,
        }
    }

    /// Opens a control lane for a trunk and returns it, or the reason why it was refused. On a
    /// trunk's first control lane this side also sends *accept*.
    fn offer(
        far: SocketAddr,
        tls: &ClientTls,
        session: SessionId,
        epoch: u32,
    ) -> Result<ControlStream, Refusal> {
        let lanes = (epoch == 1).then(|| peer::accept(2, 9));
        Self::offer_with(far, tls, session, epoch, lanes)
    }

    fn offer_with(
        far: SocketAddr,
        tls: &ClientTls,
        session: SessionId,
        epoch: u32,
        lanes: Option<Message>,
    ) -> Result<ControlStream, Refusal> {
        let dialled = peer::dial(far, tls, &offer(session, epoch), lanes.as_ref());
        dialled.map(|(control, _)| control)
    }

    fn receive(&self) -> Option<Message> {
        peer::receive(&self.control).unwrap()
    }

    fn send(&self, message: &Message) {
        send_message(&self.control, message);
    }

    /// Opens a lane with a proof made with `secret`.
    fn lane(&self, tls: &ClientTls, lane: u16, session: SessionId, secret: &[u8]) -> DataSender {
        open_lane(self.far, tls, &Self::prove(lane, session, secret))
    }

    /// Opens a lane without TLS.
    fn plain_lane(&self, lane: u16) -> DataSender {
        self.plain_lane_of(&Self::prove(lane, SESSION, &self.secret.0))
    }

    fn plain_lane_of(&self, open: &LaneOpen) -> DataSender {
        let stream = TcpStream::connect(self.far).unwrap();
        let consent = PlainConsent::sealed_below();
        let mut sender = DataSender::plain(stream, consent, STALL_LIMIT).unwrap();
        let mut bytes = Vec::new();
        open.encode(&mut bytes).unwrap();
        sender.send(&bytes).unwrap();
        sender
    }

    fn prove(lane: u16, session: SessionId, secret: &[u8]) -> LaneOpen {
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret).unwrap();
        let open = LaneOpen::unproved(1, session, lane, LaneDirection::FromDialer);
        mac.update(&open.mac_input());
        LaneOpen {
            mac: mac.finalize().into_bytes().into(),
            ..open
        }
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + dunlin_test_support::tunnel::TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "no {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn rejected(pair: &Pair, code: FaultCode) {
    let rejected = is_rejected(code);
    pair.far_events.wait(code.name(), rejected);
}

fn is_rejected(code: FaultCode) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::Rejected { fault, .. } if *fault == code)
}

#[test]
fn i7_a_lane_needs_the_session_the_secret_and_the_same_peer() {
    let pair = Pair::start(&Setup::default());
    let peer = Peer::trunk(&pair);
    let secret = peer.secret.0;
    let _stray = peer.lane(&peer.tls, 1, [8; 16], &secret);
    rejected(&pair, FaultCode::UnknownSession);
    let _guessed = peer.lane(&peer.tls, 1, SESSION, &[0; 32]);
    rejected(&pair, FaultCode::WrongSecret);
    // Two hosts that the tunnel admits, but that are not the trunk's peer: one with another name,
    // and one with the same name from another authority.
    let strangers = [pair.authority.identity(&[OTHER]), pair.twin(NEAR)];
    for (before, stranger) in strangers.iter().enumerate() {
        let _lane = peer.lane(&tls(stranger), 1, SESSION, &secret);
        let another = is_rejected(FaultCode::WrongIdentity);
        wait_until("a rejection", || pair.far_events.count(&another) > before);
    }
    // The trunk's peer, with a renewed certificate.
    let renewed = tls(&pair.authority.identity(&[NEAR]));
    let _good = peer.lane(&renewed, 1, SESSION, &secret);
    wait_until("the good lane", || {
        pair.far.as_ref().unwrap().status()[0].lanes == 1
    });
}

/// Takes the place of real lanes over IPsec, and does not use the kernel's ESP.
#[derive(Debug, Default)]
struct Ipsec {
    seals: AtomicBool,
    /// No lane is admitted while this is locked.
    admits: Mutex<()>,
}

impl LaneAcceptor for Ipsec {
    fn admit(
        &self,
        socket: LaneSocket,
        _: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError> {
        let _admits = self.admits.lock().unwrap();
        let LaneSocket::Plain(stream) = socket else {
            panic!("a lane over TLS")
        };
        if !self.seals.load(Ordering::SeqCst) {
            return Err(AdmitError::NotSealed("nothing seals it".into()));
        }
        let consent = PlainConsent::sealed_below();
        Ok(DataReceiver::plain(stream, consent, STALL_LIMIT)?)
    }
}

impl SealedLanes for Ipsec {
    fn dialer(&self) -> Arc<dyn LaneDialer> {
        Arc::new(PlainDialer::new(PlainConsent::sealed_below()))
    }

    fn take(&self, arrival: Arrival) -> Option<Arrival> {
        Some(arrival)
    }
}

/// Starts a tunnel with lanes over IPsec. Returns it with its events and the TLS settings of a
/// peer.
fn far_over_ipsec(ipsec: &Arc<Ipsec>) -> (Tunnel, Events, ClientTls) {
    let authority = Authority::new();
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: Target::Unix("/nowhere".into()),
        window_bytes: WINDOW_BYTES,
    };
    let routes = Routes::new(Vec::new(), vec![exit]).unwrap();
    let sealed: Arc<dyn SealedLanes> = ipsec.clone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (own, events) = (identities(authority.identity(&[FAR])), Events::default());
    let far = Tunnel::builder(listener, own, &routes)
        .sealed(Some(sealed))
        .observer(events.observer())
        .start()
        .unwrap();
    (far, events, tls(&authority.identity(&[NEAR])))
}

/// Starts a tunnel with lanes over IPsec, and a peer that has a trunk with that tunnel.
fn over_ipsec(ipsec: &Arc<Ipsec>) -> (Tunnel, Events, Peer) {
    let (far, events, tls) = far_over_ipsec(ipsec);
    let peer = Peer::trunk_over_ipsec(far.address().unwrap(), tls, VersionRange::only(1), 9);
    (far, events, peer)
}

/// Each side dials its own lanes, because a keying session protects the ports of the side that
/// begins the session.
#[test]
fn over_ipsec_each_side_opens_the_lanes_on_which_it_sends_in_version_2_too() {
    let (far, _events, tls) = far_over_ipsec(&Arc::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let versions = VersionRange { min: 1, max: 2 };
    let peer = Peer::trunk_over_ipsec(far.address().unwrap(), tls, versions, port);
    peer.send(&Message::Open(Open {
        channel: 0,
        limit: 1 << 20,
        route: "ram".to_owned(),
        parameter: String::new(),
        barrier: Vec::new(),
    }));
    let (mut lane, _) = listener.accept().unwrap();
    let mut start = [0; PRELUDE_BYTES];
    lane.read_exact(&mut start).unwrap();
    let prelude = Prelude::decode(&start).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    lane.read_exact(&mut body).unwrap();
    let Ok(Opening::Lane(open)) = Opening::decode(&prelude, &body) else {
        panic!("no lane open")
    };
    let from_there = LaneDirection::FromDialer;
    assert_eq!((open.version, open.direction), (2, from_there));
}

/// Over IPsec, a lane carries bytes only from the side that opens it.
#[test]
fn i7_over_ipsec_a_lane_for_the_other_direction_is_refused() {
    let ipsec = Arc::new(Ipsec::default());
    ipsec.seals.store(true, Ordering::SeqCst);
    let (far, events, tls) = far_over_ipsec(&ipsec);
    let versions = VersionRange { min: 1, max: 2 };
    let peer = Peer::trunk_over_ipsec(far.address().unwrap(), tls, versions, 9);
    let lane = |direction| {
        let open = LaneOpen::unproved(2, SESSION, 1, direction);
        peer.plain_lane_of(&LaneOpen {
            mac: dunlin_lane::proof::prove(&peer.secret, &open),
            ..open
        })
    };
    let _wrong = lane(LaneDirection::ToDialer);
    events.wait("rejection", is_rejected(FaultCode::Malformed));
    assert_eq!(far.status()[0].lanes, 0);
    let _right = lane(LaneDirection::FromDialer);
    wait_until("the lane", || far.status()[0].lanes == 1);
}

#[test]
fn i7_a_lane_that_is_not_protected_as_agreed_takes_no_number() {
    let ipsec = Arc::new(Ipsec::default());
    let (far, events, peer) = over_ipsec(&ipsec);
    let _bare = peer.plain_lane(1);
    let refused = loop {
        match peer.receive() {
            Some(Message::LaneRefused { lane, fault, .. }) => break (lane, fault),
            Some(Message::LaneLost(lost)) => panic!("the lane was admitted: {lost:?}"),
            _ => {}
        }
    };
    assert_eq!(refused, (1, FaultCode::SecurityNotAgreed));
    events.wait("rejection", is_rejected(FaultCode::SecurityNotAgreed));
    ipsec.seals.store(true, Ordering::SeqCst);
    let _sealed = peer.plain_lane(1);
    wait_until("the sealed lane", || far.status()[0].lanes == 1);
}

/// Claim P24 of docs/security.
#[test]
fn i8_a_trunk_admits_a_limited_number_of_lanes_at_a_time() {
    let ipsec = Arc::new(Ipsec::default());
    ipsec.seals.store(true, Ordering::SeqCst);
    let (far, events, peer) = over_ipsec(&ipsec);
    let held = ipsec.admits.lock().unwrap();
    let _lanes: Vec<_> = (0..=MAX_LANES)
        .map(|lane| peer.plain_lane(lane + 1))
        .collect();
    events.wait("rejection", is_rejected(FaultCode::LaneLimit));
    drop(held);
    let lanes = usize::from(MAX_LANES);
    wait_until("the others", || far.status()[0].lanes == lanes);
}

/// A host that the tunnel admits, but that is not the trunk's peer, sends the trunk's session
/// identifier and is refused.
#[test]
fn i6_a_trunk_is_resumed_by_its_own_peer_alone() {
    let pair = Pair::start(&Setup::default());
    let peer = Peer::trunk(&pair);
    for stranger in [pair.authority.identity(&[OTHER]), pair.twin(NEAR)] {
        let refusal = Peer::offer(peer.far, &tls(&stranger), SESSION, 2).unwrap_err();
        assert_eq!(refusal.fault, FaultCode::WrongIdentity, "{refusal}");
    }
    let resumed = |event: &Event| matches!(event, Event::ControlResumed { .. });
    assert_eq!(pair.far_events.count(resumed), 0);
    let renewed = tls(&pair.authority.identity(&[NEAR]));
    let _newest = Peer::offer(peer.far, &renewed, SESSION, 2).unwrap();
    pair.far_events.wait("resumption", resumed);
    // A late control lane of the peer does not replace a newer one.
    let refusal = Peer::offer(peer.far, &renewed, SESSION, 2).unwrap_err();
    assert_eq!(refusal.fault, FaultCode::UnknownSession, "{refusal}");
}

/// A far tunnel that follows the protocol as far as a test needs.
struct Far {
    near: Tunnel,
    events: Events,
    listener: TcpListener,
    scratch: Scratch,
}

impl Far {
    /// Starts a tunnel with `identity` and with a route to this peer.
    fn of(identity: Identity) -> Self {
        let any = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (listener, scratch, events) = (any(), Scratch::new(), Events::default());
        let entrance = Entrance {
            route: "ram".to_owned(),
            listen: Listen::Unix(scratch.join("in")),
            to: listener.local_addr().unwrap().to_string(),
            peers: names(&[FAR]),
            lanes: 1,
            window_bytes: WINDOW_BYTES,
            mode: Mode::Stripe,
        };
        let routes = Routes::new(vec![entrance], Vec::new()).unwrap();
        let own = identities(identity);
        let near = Tunnel::builder(any(), own, &routes)
            .observer(events.observer())
            .start();
        Self {
            near: near.unwrap(),
            events,
            listener,
            scratch,
        }
    }

    fn accept(&self) -> TcpStream {
        let until = Instant::now() + dunlin_test_support::tunnel::TIMEOUT;
        self.listener.set_nonblocking(true).unwrap();
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).unwrap();
                    return stream;
                }
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => panic!("no connection: {error}: {:#?}", self.events.all()),
            }
        }
    }

    /// Accepts the next control lane, as the host that has the certificate in `tls`.
    fn control(&self, tls: &ServerTls) -> ControlStream {
        let control = control::server(self.accept(), tls, soon()).unwrap();
        peer::answer(&control, 1, &peer::accept(2, 0));
        control
    }

    /// Accepts the next lane, as the host that has the certificate in `tls`. Returns whether the
    /// tunnel sends anything on this lane.
    fn lane(&self, tls: &ServerTls) -> bool {
        let secured = handshake::server(self.accept(), tls, soon()).unwrap();
        let mut lane = DataReceiver::tls(secured, STALL_LIMIT).unwrap();
        lane.read_exact(&mut [0; PRELUDE_BYTES]).is_ok()
    }
}

/// Returns three hosts with the name of the far host, and the near host. The first is the far host
/// itself, the second is the far host with a renewed certificate, and the third has a certificate
/// from another authority. All hosts trust both authorities.
fn far_hosts() -> ([ServerTls; 3], Identity) {
    let (ours, theirs) = (Authority::named("one"), Authority::named("two"));
    let host = |name| load(&ours.host_trusting(&[name], &[&theirs]));
    let twin = load(&theirs.host_trusting(&[FAR], &[&ours]));
    let server = |host: Identity| host.server(&Crypto::auto(), names(&[NEAR])).unwrap();
    ([host(FAR), host(FAR), twin].map(server), host(NEAR))
}

#[test]
fn i6_a_lane_goes_to_no_other_host_than_the_control_lane() {
    let ([itself, renewed, twin], near) = far_hosts();
    let far = Far::of(near);
    let _channel = UnixStream::connect(far.scratch.join("in")).unwrap();
    let _control = far.control(&itself);
    assert!(!far.lane(&twin), "a lane is opened to another host");
    far.events
        .wait("lost lane", |event| matches!(event, Event::LaneLost { .. }));
    assert!(far.lane(&renewed));
    drop(far.near);
}

#[test]
fn i6_a_control_lane_is_resumed_with_no_other_host() {
    let cut = || {
        let (hosts, near) = far_hosts();
        let far = Far::of(near);
        let channel = UnixStream::connect(far.scratch.join("in")).unwrap();
        let control = far.control(&hosts[0]);
        far.events
            .wait("trunk", |event| matches!(event, Event::TrunkUp { .. }));
        // Wait until the tunnel has begun to open the lane.
        drop(far.accept());
        control.shutdown();
        (hosts, far, channel)
    };
    let resumed = |event: &Event| matches!(event, Event::ControlResumed { .. });
    let ([_, renewed, _], far, _channel) = cut();
    let _control = far.control(&renewed);
    far.events.wait("resumption", resumed);
    let ([_, _, twin], far, _channel) = cut();
    let _control = far.control(&twin);
    far.events.wait("end", |event| {
        matches!(event, Event::TrunkEnded { fault, .. } if *fault == FaultCode::UnknownSession)
    });
    assert_eq!(far.events.count(resumed), 0);
}

/// Each violation ends the trunk of the peer that commits it, but no channel of another peer.
///
/// Claim P23 of docs/security.
#[test]
fn i7_a_protocol_violation_ends_the_trunk_of_that_peer_alone() {
    let pair = Pair::start(&Setup::default());
    let (near, far) = pair.channel();
    type Breach = fn(&Peer);
    let breaches: [(&str, Breach); 4] = [
        ("never opened", |peer| {
            let data = Data::new(40, 0, 1).unwrap();
            let mut lane = peer.lane(&peer.tls, 1, SESSION, &peer.secret.0);
            lane.send_with(&Frame::Data(data).to_bytes(), &mut b"x".to_vec())
                .unwrap();
        }),
        ("frames", |peer| {
            let mut lane = peer.lane(&peer.tls, 1, SESSION, &peer.secret.0);
            lane.send(&Frame::End { frames: 7 }.to_bytes()).unwrap();
        }),
        ("impossible message", |peer| {
            peer.send(&Message::LaneLost(dunlin_proto::stripe::message::LaneAck {
                lane: 77,
                frames: 1,
            }))
        }),
        ("never opened", |peer| {
            peer.send(&Message::Closed { channel: 1 })
        }),
    ];
    for (number, (words, breach)) in breaches.into_iter().enumerate() {
        let peer = Peer::trunk(&pair);
        breach(&peer);
        let broken = |event: &Event| matches!(event, Event::ControlLost { failure, .. } if failure.text().contains(words));
        pair.far_events.wait(words, broken);
        let gone = |event: &Event| matches!(event, Event::TrunkEnded { .. });
        let until = std::time::Instant::now() + dunlin_test_support::tunnel::TIMEOUT;
        while pair.far_events.count(gone) <= number {
            assert!(
                std::time::Instant::now() < until,
                "{:#?}",
                pair.far_events.all()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
    dunlin_test_support::tunnel::join(vec![
        dunlin_test_support::tunnel::send(&near, 3, 1 << 20),
        dunlin_test_support::tunnel::expect(&far, 3, 1 << 20),
    ]);
}

/// The number of threads of this process that connect to targets.
fn connecting() -> usize {
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(entry.unwrap().path().join("comm"));
        // A thread that has just ended has no name.
        name.is_ok_and(|name| name.starts_with("dunlin-target"))
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(of).filter(|is_one| *is_one).count()
}

/// After a channel is aborted, its thread continues to connect to the target for a while. The
/// number of these threads is limited.
#[test]
fn i8_threads_of_aborted_channels_are_limited_while_their_target_is_silent() {
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
    let peer = Peer::trunk(&pair);
    let last = 100;
    for channel in (0..=last).step_by(2) {
        peer.send(&Message::Open(Open {
            channel,
            limit: 1 << 20,
            route: "ram".to_owned(),
            parameter: String::new(),
            barrier: Vec::new(),
        }));
        if channel < last {
            let fault = FaultCode::Ended;
            peer.send(&Message::Reset { channel, fault });
        }
    }
    let (fault, text) = loop {
        match peer.receive() {
            Some(Message::Refused {
                channel,
                fault,
                text,
            }) if channel == last => break (fault, text),
            _ => {}
        }
    };
    assert_eq!(fault, FaultCode::Busy, "{text}");
    assert!(connecting() <= most, "{} threads", connecting());
}

/// Claim P24 of docs/security.
#[test]
fn i8_trunks_of_one_peer_are_limited_and_the_refusal_has_a_reason() {
    let pair = Pair::start(&Setup::default());
    let (near, far) = pair.channel();
    let mut peers = Vec::new();
    let refusal = loop {
        let session = [100 + peers.len() as u8; 16];
        match Peer::trunk_as(&pair, session) {
            Ok(peer) => peers.push(peer),
            Err(refusal) => break refusal,
        }
        assert!(peers.len() < 20, "no trunk is refused");
    };
    assert_eq!(refusal.fault, FaultCode::Busy);
    dunlin_test_support::tunnel::join(vec![
        dunlin_test_support::tunnel::send(&near, 4, 1 << 20),
        dunlin_test_support::tunnel::expect(&far, 4, 1 << 20),
    ]);
}

/// A control lane has a thread until its handshake has ended. A peer with too many handshakes is
/// refused, and other peers are not.
///
/// Claim P24 of docs/security.
#[test]
fn i8_handshakes_of_one_peer_are_limited_and_keep_no_other_out() {
    let pair = Pair::start(&Setup::default());
    let far = pair.far.as_ref().unwrap().address().unwrap();
    let own = tls(&pair.authority.identity(&[NEAR]));
    let silent = (0..8).map(|number| Peer::offer_with(far, &own, [number; 16], 1, None).unwrap());
    let _silent: Vec<_> = silent.collect();
    let offered = std::thread::spawn(move || {
        // The far tunnel closes the control lane without an answer.
        drop(
            control::client(TcpStream::connect(far).unwrap(), &own, soon()).map(|control| {
                let mut bytes = Vec::new();
                offer([8; 16], 1).encode(&mut bytes).unwrap();
                control.send(&bytes).unwrap();
                control.receive_exact(&mut [0], soon()).unwrap_err()
            }),
        );
    });
    dunlin_test_support::tunnel::join(vec![offered]);
    rejected(&pair, FaultCode::Busy);
    let other = tls(&pair.authority.identity(&[OTHER]));
    Peer::offer(far, &other, [9; 16], 1).unwrap();
}

/// A channel's parameter becomes part of the path of the far socket. A value that is not a plain
/// name is refused, and the next channel opens.
///
/// Claim P22 of docs/security.
#[test]
fn i7_a_parameter_from_the_wire_fills_its_placeholder_and_reaches_no_other_path() {
    let pair = Pair::start(&Setup::default());
    let directory = pair.scratch.path().to_owned();
    std::fs::create_dir(directory.join("vm")).unwrap();
    // A process listens at the target of another route, to which "vm=../target" would lead.
    let routes = Routes::new(
        Vec::new(),
        vec![Exit {
            route: "ram".to_owned(),
            allow: names(&[NEAR]),
            target: Target::Unix(directory.join("vm/{vm}")),
            window_bytes: WINDOW_BYTES,
        }],
    );
    let identity = dunlin_test_support::tunnel::identities(pair.authority.identity(&[FAR]));
    let far = pair.far.as_ref().unwrap();
    far.replace(identity, &routes.unwrap()).unwrap();
    let mut peer = Peer::trunk(&pair);
    let open = |channel, parameter: &str| {
        Message::Open(Open {
            channel,
            limit: 0,
            route: "ram".to_owned(),
            parameter: parameter.to_owned(),
            barrier: Vec::new(),
        })
    };
    let long = format!("vm={}", "a".repeat(129));
    let longest = format!("vm={}", "a".repeat(128));
    let whole = "v".repeat(255);
    let hostile = [
        "",
        "vm=",
        "vm=../target",
        "vm=..",
        "vm=.",
        "vm=/",
        "vm=a/b",
        "vm=\0",
        "vm=web\0",
        "\0",
        "vm=..\\target",
        "vm=-x",
        "disk=web",
        "web",
        "vm=web\n",
        &long,
        &longest,
        &whole,
    ];
    let mut channel = 0;
    let mut answer = |peer: &mut Peer, parameter: &str| {
        peer.send(&open(channel, parameter));
        let answered = channel;
        channel += 2;
        loop {
            match peer.receive() {
                Some(Message::Refused {
                    channel,
                    fault,
                    text,
                }) if channel == answered => {
                    return Err((fault, text));
                }
                Some(Message::Opened { channel, .. }) if channel == answered => return Ok(()),
                _ => {}
            }
        }
    };
    for parameter in hostile {
        let (fault, text) = answer(&mut peer, parameter).unwrap_err();
        assert_eq!(fault, FaultCode::ParameterRefused, "{parameter:?}: {text}");
        assert!(!text.contains(char::is_control), "{text:?}");
    }
    let (fault, text) = answer(&mut peer, "vm=web").unwrap_err();
    assert_eq!(fault, FaultCode::TargetUnreachable, "{text}");
    let _web = std::os::unix::net::UnixListener::bind(directory.join("vm/web")).unwrap();
    answer(&mut peer, "vm=web").unwrap();
}

/// A peer that accepts the connection of a lane and sends nothing does not delay the end of the
/// tunnel.
#[test]
fn a_lane_whose_handshake_is_under_way_ends_with_the_tunnel() {
    let mut pair = Pair::start(&Setup {
        lanes: 1,
        relayed: true,
        ..Setup::default()
    });
    let channel = pair.channel();
    let relay = pair.relay.clone().unwrap();
    wait_until("both lanes", || {
        pair.near.as_ref().unwrap().status()[0].lanes == 2
    });
    let before = relay.count();
    let near = pair.near.take();
    let mut took = Duration::ZERO;
    // The lane of each direction is lost, and the handshake of the next lane gets no answer.
    relay.hold(
        || (1..before).for_each(|lane| relay.cut(lane)),
        || {
            wait_until("another lane", || relay.count() > before);
            relay.wait_forwarded(before, 1);
            let begun = Instant::now();
            drop(near);
            took = begun.elapsed();
        },
    );
    drop(channel);
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// A first control lane that waits for the far tunnel's answer does not delay the end of
/// the tunnel.
#[test]
fn a_control_lane_whose_handshake_is_under_way_ends_with_the_tunnel() {
    let mut pair = Pair::start(&Setup {
        relayed: true,
        ..Setup::default()
    });
    let relay = pair.relay.clone().unwrap();
    let near = pair.near.take();
    let entrance = pair.entrance();
    let mut channel = None;
    let mut took = Duration::ZERO;
    relay.hold(
        || channel = Some(UnixStream::connect(entrance).unwrap()),
        || {
            let begun = Instant::now();
            drop(near);
            took = begun.elapsed();
        },
    );
    drop(channel);
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// An authorised peer that sends no *accept* after the selection does not delay the end of
/// the tunnel.
#[test]
fn a_peer_that_is_silent_after_the_selection_does_not_delay_the_end() {
    let mut pair = Pair::start(&Setup::default());
    let far = pair.far.take().unwrap();
    let tls = tls(&pair.authority.identity(&[NEAR]));
    let control = Peer::offer_with(far.address().unwrap(), &tls, SESSION, 1, None);
    let control = control.unwrap_or_else(|refusal| panic!("{refusal:?}"));
    let begun = Instant::now();
    drop(far);
    let took = begun.elapsed();
    drop(control);
    assert!(took < Duration::from_secs(2), "{took:?}");
}
