//! On a trunk of version 2, the side that dialled the trunk opens the lanes of both directions. The
//! tests use accepting sides that cannot connect back, peers of version 1, and hostile peers.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::data::{DataReceiver, DataSender};
use dunlin_lane::identity::Identity;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::proof::prove;
use dunlin_lane::provider::Crypto;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::LaneDirection::{FromDialer, ToDialer};
use dunlin_proto::negotiate::{LaneDirection, LaneOpen, SessionId, SessionSecret, VersionRange};
use dunlin_proto::stripe::frame::{Data, FRAME_HEADER_BYTES, Frame};
use dunlin_proto::stripe::message::{Message, Open};
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::with_timeout;
use dunlin_test_support::engine::peer::take_lane;
use dunlin_test_support::lane::{Authority, load, names, soon};
use dunlin_test_support::tunnel::peer::{self, open_lane, receive_accept, send_message};
use dunlin_test_support::tunnel::{
    Events, FAR, NEAR, Pair, Setup, TIMEOUT, expect, identities, join, send,
};
use dunlin_tunnel::{Entrance, Event, Limits, Listen, Mode, Routes, Status, Tunnel, WINDOW_BYTES};

const SESSION: SessionId = [9; 16];

/// Receives a message; `None` if the trunk has ended.
fn receive(control: &ControlStream) -> Option<Message> {
    peer::receive(control).ok().flatten()
}

/// Receives messages until one for which `which` returns a value.
fn receive_until<T>(control: &ControlStream, which: impl Fn(&Message) -> Option<T>) -> T {
    let until = Instant::now() + TIMEOUT;
    loop {
        let message = receive(control).expect("the trunk has ended");
        if let Some(found) = which(&message) {
            return found;
        }
        // The far side sends pings as long as the trunk lives.
        assert!(
            Instant::now() < until,
            "only other messages, such as {message:?}"
        );
    }
}

fn wanted(message: &Message) -> Option<u16> {
    match message {
        Message::LaneWanted { lane } => Some(*lane),
        _ => None,
    }
}

/// A peer that dials the far tunnel of a pair.
struct Dialer {
    far: SocketAddr,
    tls: ClientTls,
    control: ControlStream,
    secret: SessionSecret,
    version: u16,
}

impl Dialer {
    /// Makes a trunk. `port` is the one on which this peer accepts lanes.
    fn trunk(pair: &Pair, version: u16, port: u16) -> Self {
        let far = pair.far.as_ref().unwrap().address().unwrap();
        let near = pair.authority.identity(&[NEAR]);
        let tls = near.client(&Crypto::auto(), names(&[FAR])).unwrap();
        let versions = VersionRange {
            min: 1,
            max: version,
        };
        let offer = peer::offer(versions, SESSION, 1);
        let accept = peer::accept(MAX_LANES, port);
        let (control, selection) = peer::dial(far, &tls, &offer, Some(&accept)).unwrap();
        assert_eq!(selection.version, version);
        let (secret, port) = receive_accept(&control);
        assert_eq!(port, 0);
        Self {
            far,
            tls,
            control,
            secret,
            version,
        }
    }

    /// Opens channel 0. The far side then sends as soon as its target sends.
    fn channel(&self, pair: &Pair) -> UnixStream {
        send_message(
            &self.control,
            &Message::Open(Open {
                channel: 0,
                limit: 1 << 20,
                route: "ram".to_owned(),
                parameter: String::new(),
                barrier: Vec::new(),
            }),
        );
        pair.accept()
    }

    fn open(&self, lane: u16, direction: LaneDirection) -> LaneOpen {
        let open = LaneOpen::unproved(self.version, SESSION, lane, direction);
        LaneOpen {
            mac: prove(&self.secret, &open),
            ..open
        }
    }

    /// Opens a lane with these first bytes.
    fn lane(&self, open: &LaneOpen) -> DataSender {
        open_lane(self.far, &self.tls, open)
    }
}

fn is_rejected(code: FaultCode) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::Rejected { fault, .. } if *fault == code)
}

/// Waits until `count` connections have been rejected with this code.
fn rejected(events: &Events, code: FaultCode, count: usize) {
    wait_until(code.name(), || events.count(is_rejected(code)) >= count);
    assert_eq!(events.count(is_rejected(code)), count);
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "no {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads one data frame of a lane and returns its payload.
fn payload(receiver: &mut DataReceiver) -> Vec<u8> {
    let mut header = [0; FRAME_HEADER_BYTES];
    assert!(receiver.next(&mut header, None).unwrap());
    let Ok(Frame::Data(data)) = Frame::decode(&header) else {
        panic!("no data frame")
    };
    let mut bytes = vec![0; data.length() as usize];
    receiver.read_exact(&mut bytes).unwrap();
    bytes
}

fn only(tunnel: Option<&Tunnel>) -> Status {
    let mut all = tunnel.unwrap().status();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// A firewall or NAT lets the near host connect to the far host, but blocks connections to the near
/// host. Lanes are also replaced, because they reach their record limit.
#[test]
fn bytes_flow_both_ways_although_the_accepting_side_cannot_connect_to_the_opening_side() {
    let setup = Setup {
        is_walled: true,
        lanes: 1,
        limits: Limits {
            lane_records: 1024,
            ..Limits::default()
        },
        ..Setup::default()
    };
    let pair = Pair::start(&setup);
    let (near, far) = pair.channel();
    let bytes = 24 << 20;
    join(vec![
        send(&near, 1, bytes),
        send(&far, 2, bytes),
        expect(&far, 1, bytes),
        expect(&near, 2, bytes),
    ]);
    let lost = |event: &Event| matches!(event, Event::LaneLost { .. } | Event::Rejected { .. });
    assert_eq!(
        pair.near_events.count(lost),
        0,
        "{:#?}",
        pair.near_events.all()
    );
    assert_eq!(
        pair.far_events.count(lost),
        0,
        "{:#?}",
        pair.far_events.all()
    );
    for tunnel in [&pair.near, &pair.far] {
        assert_eq!(only(tunnel.as_ref()).trouble, None);
    }
}

/// The lanes of both directions are cut and replaced, again and again, while bytes flow.
#[test]
fn lanes_of_both_directions_are_replaced_by_the_opening_side_when_they_are_cut() {
    let setup = Setup {
        is_walled: true,
        relayed: true,
        ..Setup::default()
    };
    let pair = Pair::start(&setup);
    let (near, far) = pair.channel();
    let relay = pair.relay.clone().unwrap();
    let bytes = 16 << 20;
    let mut threads = vec![
        send(&near, 1, bytes),
        send(&far, 2, bytes),
        expect(&far, 1, bytes),
        expect(&near, 2, bytes),
    ];
    threads.push(std::thread::spawn(move || {
        // Connection 0 is the control lane.
        for link in 1..=8 {
            wait_until("lane", || relay.count() > link);
            relay.wait_forwarded(link, 1);
            relay.cut(link);
        }
    }));
    join(threads);
}

/// Claim A13 of docs/security.
#[test]
fn i7_a_replayed_reflected_or_unrequested_lane_is_refused_and_the_requested_one_works() {
    let pair = Pair::start(&Setup::default());
    let peer = Dialer::trunk(&pair, 2, 0);
    let mut target = peer.channel(&pair);
    let number = receive_until(&peer.control, wanted);
    let events = &pair.far_events;
    // For each direction: a lane with a proof for the opposite direction.
    for direction in [FromDialer, ToDialer] {
        let flipped = LaneOpen {
            direction,
            ..peer.open(
                number,
                if direction == ToDialer {
                    FromDialer
                } else {
                    ToDialer
                },
            )
        };
        let _lane = peer.lane(&flipped);
        rejected(
            events,
            FaultCode::WrongSecret,
            1 + usize::from(direction == ToDialer),
        );
    }
    // A lane of version 1 has no direction.
    let old = LaneOpen::unproved(1, SESSION, number, FromDialer);
    let old = LaneOpen {
        mac: prove(&peer.secret, &old),
        ..old
    };
    let _lane = peer.lane(&old);
    rejected(events, FaultCode::VersionMismatch, 1);
    // A lane that was not requested.
    let _lane = peer.lane(&peer.open(number + 7, ToDialer));
    rejected(events, FaultCode::DuplicateLane, 1);
    assert_eq!(only(pair.far.as_ref()).lanes, 0);
    let requested = peer.open(number, ToDialer);
    let mut lane = peer.lane(&requested).into_receiver().unwrap();
    wait_until("the lane", || only(pair.far.as_ref()).lanes == 1);
    // Send the same first bytes again, on another connection.
    let _lane = peer.lane(&requested);
    rejected(events, FaultCode::DuplicateLane, 2);
    // The lanes of the opposite direction have numbers of their own.
    let _other = peer.lane(&peer.open(number, FromDialer));
    wait_until("the other lane", || only(pair.far.as_ref()).lanes == 2);
    target.write_all(b"from the target").unwrap();
    assert_eq!(payload(&mut lane), b"from the target");
}

/// The number of a lane that has ended stays used: a recording of the lane's first bytes opens no
/// lane.
///
/// Claim A13 of docs/security.
#[test]
fn i4_i7_a_number_is_used_once_although_its_lane_has_ended() {
    let pair = Pair::start(&Setup::default());
    let peer = Dialer::trunk(&pair, 2, 0);
    let open = peer.open(1, FromDialer);
    let lane = peer.lane(&open);
    wait_until("the lane", || only(pair.far.as_ref()).lanes == 1);
    drop(lane);
    let lost = receive_until(&peer.control, |message| match message {
        Message::LaneLost(lost) => Some(lost.lane),
        _ => None,
    });
    assert_eq!(lost, 1);
    let _again = peer.lane(&open);
    let fault = receive_until(&peer.control, |message| match message {
        Message::LaneRefused { lane: 1, fault, .. } => Some(*fault),
        _ => None,
    });
    assert_eq!(fault, FaultCode::DuplicateLane);
    assert_eq!(only(pair.far.as_ref()).lanes, 0);
}

/// Claim A13 of docs/security.
#[test]
fn i7_i8_a_flood_of_unrequested_lanes_gets_no_thread() {
    let pair = Pair::start(&Setup::default());
    let peer = Dialer::trunk(&pair, 2, 0);
    let lanes: Vec<_> = (1..=20)
        .map(|lane| peer.lane(&peer.open(lane, ToDialer)))
        .collect();
    rejected(&pair.far_events, FaultCode::DuplicateLane, lanes.len());
    assert_eq!(only(pair.far.as_ref()).lanes, 0);
}

#[test]
fn a_trunk_ends_with_the_address_and_the_reason_if_the_opening_side_opens_no_lanes() {
    let pair = Pair::start(&Setup {
        limits: Limits {
            vanished: Duration::from_secs(2),
            ..Limits::default()
        },
        ..Setup::default()
    });
    let peer = Dialer::trunk(&pair, 2, 0);
    let mut target = peer.channel(&pair);
    target.write_all(b"x").unwrap();
    let reason = "cannot open lane 1 to 192.0.2.1:18300";
    let reset = loop {
        match receive(&peer.control) {
            Some(Message::LaneWanted { lane }) => send_message(
                &peer.control,
                &Message::LaneRefused {
                    lane,
                    fault: FaultCode::LaneLost,
                    text: reason.to_owned(),
                },
            ),
            Some(Message::Reset { channel: 0, fault }) => break fault,
            Some(_) => {}
            None => panic!("the trunk ended before the channel"),
        }
        if let Some(trouble) = &only(pair.far.as_ref()).trouble {
            assert!(trouble.contains(reason), "{trouble}");
        }
    };
    assert_eq!(reset, FaultCode::LaneLost);
    send_message(&peer.control, &Message::Gone { channel: 0 });
    let ended = pair
        .far_events
        .wait("end", |event| matches!(event, Event::TrunkEnded { .. }));
    let Event::TrunkEnded { fault, why, .. } = ended else {
        unreachable!()
    };
    assert_eq!(fault, FaultCode::LaneLost);
    assert!(
        why.as_ref().is_some_and(|why| why.contains(reason)),
        "{why:?}"
    );
    let lost = |event: &Event| matches!(event, Event::LaneLost { why, .. } if why.contains(reason));
    assert!(pair.far_events.count(lost) > 0);
}

/// The opening side cannot reach the address of the lanes. Both sides report the address.
#[test]
fn both_sides_name_the_address_that_lanes_cannot_reach() {
    let mut pair = Pair::start(&Setup {
        relayed: true,
        ..Setup::default()
    });
    let (mut near, mut far) = pair.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    let relay = pair.relay.take().unwrap();
    let at = relay.address.to_string();
    // From now on the control lane stays up, but new connections are closed at once.
    relay.refuse(true);
    for lane in 1..relay.count() {
        relay.cut(lane);
    }
    near.write_all(b"y").unwrap();
    far.write_all(b"z").unwrap();
    for events in [&pair.near_events, &pair.far_events] {
        let unreachable = |event: &Event| matches!(event, Event::LaneLost { why, .. } if why.contains("cannot open lane") && why.contains(&at));
        events.wait("reason", unreachable);
    }
    for tunnel in [&pair.near, &pair.far] {
        wait_until("trouble", || {
            let status = tunnel.as_ref().unwrap().status();
            let has_it = |one: &Status| one.trouble.as_ref().is_some_and(|why| why.contains(&at));
            status.iter().any(has_it)
        });
    }
}

/// A trunk that the near tunnel has dialled, with the secret and the port that the tunnel has sent.
struct Trunk {
    /// The connection that the near tunnel carries.
    channel: UnixStream,
    control: ControlStream,
    secret: SessionSecret,
    port: u16,
}

#[test]
fn the_status_of_a_route_has_the_reason_while_its_peer_cannot_be_reached() {
    let pair = Pair::start(&Setup {
        relayed: true,
        ..Setup::default()
    });
    let relay = pair.relay.as_ref().unwrap();
    let trouble = || pair.near.as_ref().unwrap().routes()[0].trouble.clone();
    relay.refuse(true);
    let mut refused = pair.connect();
    assert_eq!(refused.read(&mut [0]).unwrap(), 0);
    let why = trouble().unwrap();
    assert!(why.contains(&relay.address.to_string()), "{why}");
    relay.refuse(false);
    let _channel = pair.channel();
    assert_eq!(trouble(), None);
}

/// A near tunnel. This test is its far side.
struct Acceptor {
    near: Tunnel,
    events: Events,
    listener: TcpListener,
    scratch: Scratch,
    server: ServerTls,
    client: ClientTls,
}

impl Acceptor {
    fn start() -> Self {
        let authority = Authority::new();
        let host = |name: &str| -> Identity { load(&authority.host(&[name])) };
        let (near, far) = (host(NEAR), host(FAR));
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
        let near = Tunnel::builder(any(), identities(near), &routes)
            .observer(events.observer())
            .start();
        Self {
            near: near.unwrap(),
            events,
            listener,
            scratch,
            server: far.server(&Crypto::auto(), names(&[NEAR])).unwrap(),
            client: far.client(&Crypto::auto(), names(&[NEAR])).unwrap(),
        }
    }

    /// Connects to the near tunnel, which dials a trunk. Accepts the trunk in this version.
    fn trunk(&self, version: u16) -> Trunk {
        let channel = with_timeout(UnixStream::connect(self.scratch.join("in")).unwrap());
        let (stream, _) = self.listener.accept().unwrap();
        let control = control::server(stream, &self.server, soon()).unwrap();
        let offer = peer::answer(&control, version, &peer::accept(MAX_LANES, 0));
        assert_eq!(offer.versions, VersionRange { min: 1, max: 2 });
        let (secret, port) = receive_accept(&control);
        Trunk {
            channel,
            control,
            secret,
            port,
        }
    }

    /// Accepts the next lane and reads its first message.
    fn lane(&self) -> (DataReceiver, LaneOpen) {
        take_lane(&self.listener, &self.server)
    }

    /// Opens a lane to the near tunnel with these first bytes.
    fn opens(&self, open: &LaneOpen) -> DataSender {
        open_lane(self.near.address().unwrap(), &self.client, open)
    }
}

/// The accepting side tries to open lanes. First it replays the first bytes of a lane that the
/// opening side has opened. After that, it sends first bytes of its own.
///
/// Claim A13 of docs/security.
#[test]
fn i7_the_opening_side_takes_no_lanes_from_its_peer() {
    let peer = Acceptor::start();
    let trunk = peer.trunk(2);
    assert_eq!(trunk.port, 0, "the trunk names a port for lanes");
    let (_lane, own) = peer.lane();
    assert_eq!((own.version, own.direction), (2, FromDialer));
    // This proof was made with the peer's secret. The near tunnel requires a proof made with the
    // near tunnel's secret.
    let _reflected = peer.opens(&own);
    rejected(&peer.events, FaultCode::WrongSecret, 1);
    // The peer also has the near tunnel's secret, so it can make such a proof.
    for (count, direction) in [FromDialer, ToDialer].into_iter().enumerate() {
        let open = LaneOpen::unproved(2, own.session, 1, direction);
        let proved = LaneOpen {
            mac: prove(&trunk.secret, &open),
            ..open
        };
        let _lane = peer.opens(&proved);
        rejected(&peer.events, FaultCode::Malformed, count + 1);
    }
}

/// Claim A13 of docs/security.
#[test]
fn i7_i8_the_opening_side_limits_the_lanes_that_its_peer_requests() {
    let peer = Acceptor::start();
    let control = &peer.trunk(2).control;
    let _own = peer.lane();
    // Send each request twice. The connections of the requested lanes wait in the listener's
    // backlog.
    let most = MAX_LANES + 10;
    for lane in (1..=most).flat_map(|lane| [lane, lane]) {
        send_message(control, &Message::LaneWanted { lane });
    }
    let mut refused = Vec::new();
    while refused.len() < 2 * 10 {
        refused.push(receive_until(control, |message| match message {
            Message::LaneRefused { lane, fault, .. } => Some((*lane, *fault)),
            _ => None,
        }));
    }
    let over =
        |(lane, fault): &(u16, FaultCode)| *lane > MAX_LANES && *fault == FaultCode::LaneLimit;
    assert!(refused.iter().all(over), "{refused:?}");
}

/// On a trunk of version 1, each side opens the lanes on which it sends.
#[test]
fn a_peer_of_version_1_that_accepts_a_trunk_opens_its_own_lanes() {
    let peer = Acceptor::start();
    let trunk = peer.trunk(1);
    assert_eq!(trunk.port, peer.near.address().unwrap().port());
    let (_own, open) = peer.lane();
    assert_eq!((open.version, open.direction), (1, FromDialer));
    // Bytes in the other direction come on a lane that this peer opens.
    let channel = receive_until(&trunk.control, |message| match message {
        Message::Open(open) => Some(open.channel),
        _ => None,
    });
    let limit = 1 << 20;
    send_message(&trunk.control, &Message::Opened { channel, limit });
    let back = LaneOpen::unproved(1, open.session, 1, FromDialer);
    let mut back = peer.opens(&LaneOpen {
        mac: prove(&trunk.secret, &back),
        ..back
    });
    let mut answer = *b"answer";
    let data = Data::new(channel, 0, answer.len() as u32).unwrap();
    back.send_with(&Frame::Data(data).to_bytes(), &mut answer)
        .unwrap();
    let mut received = [0; 6];
    (&trunk.channel).read_exact(&mut received).unwrap();
    assert_eq!(&received, b"answer");
    // In version 1, the near side opens its lanes without requests. A request is a protocol error.
    send_message(&trunk.control, &Message::LaneWanted { lane: 1 });
    let ended = |event: &Event| matches!(event, Event::TrunkEnded { fault, .. } if *fault == FaultCode::Malformed);
    peer.events.wait("end", ended);
}

#[test]
fn a_peer_of_version_1_that_dials_a_trunk_is_sent_lanes_to_its_own_port() {
    let pair = Pair::start(&Setup::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = pair
        .authority
        .identity(&[NEAR])
        .server(&Crypto::auto(), names(&[FAR]));
    let server = server.unwrap();
    let peer = Dialer::trunk(&pair, 1, listener.local_addr().unwrap().port());
    let mut target = peer.channel(&pair);
    let own = peer.lane(&peer.open(1, FromDialer));
    let (mut lane, open) = take_lane(&listener, &server);
    assert_eq!((open.version, open.direction), (1, FromDialer));
    target.write_all(b"from the target").unwrap();
    assert_eq!(payload(&mut lane), b"from the target");
    drop(own);
}
