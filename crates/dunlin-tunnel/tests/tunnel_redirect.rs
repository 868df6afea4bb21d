//! Targets with a range of ports, the listener for redirected connections, and probes of the path to
//! a peer. The redirect itself needs the packet filter; `tunnel_redirect.rs` of dunlin-cli tests it.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::policy::OldestTls;
use dunlin_proto::fault::FaultCode;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, with_timeout};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{Events, FAR, NEAR, OTHER, identities};
use dunlin_tunnel::{
    BadRouteReason, Demand, Entrance, Event, Exit, Limits, Listen, Mode, PortRange, RelayExit,
    Routes, Target, Tunnel, WINDOW_BYTES,
};

fn any_port() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// A free port at which nothing listens.
fn free_port() -> u16 {
    any_port().local_addr().unwrap().port()
}

fn entrance(listen: Listen, to: SocketAddr) -> Entrance {
    Entrance {
        route: "ram".to_owned(),
        listen,
        to: to.to_string(),
        peers: names(&[FAR]),
        lanes: 2,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    }
}

/// A far tunnel with a target of `ports` at `addresses`, for the peer `allow`.
fn far(authority: &Authority, allow: &str, addresses: &[&str], ports: PortRange) -> Tunnel {
    let addresses = addresses.iter().map(|one| one.parse().unwrap()).collect();
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[allow]),
        target: Target::Ports { addresses, ports },
        window_bytes: WINDOW_BYTES,
    };
    let routes = Routes::new(Vec::new(), vec![exit]).unwrap();
    let own = identities(authority.identity(&[FAR]));
    Tunnel::builder(any_port(), own, &routes).start().unwrap()
}

fn near(authority: &Authority, routes: &Routes) -> (Tunnel, Events) {
    let events = Events::default();
    let tunnel = Tunnel::builder(any_port(), identities(authority.identity(&[NEAR])), routes)
        .observer(events.observer())
        .start()
        .unwrap();
    (tunnel, events)
}

fn one(port: u16) -> PortRange {
    PortRange::new(port, port).unwrap()
}

/// Opens a listener with the parameter `port=PORT` and connects to it.
fn through(tunnel: &Tunnel, port: u16) -> TcpStream {
    let demand = Demand {
        route: "ram".to_owned(),
        parameter: Some(format!("port={port}").parse().unwrap()),
        listen: Listen::Tcp("127.0.0.1:0".parse().unwrap()),
        lanes: None,
        once: true,
        access: dunlin_tunnel::FileAccess::default(),
    };
    let listener = tunnel.open(&demand).unwrap();
    let Listen::Tcp(at) = listener.listen() else {
        panic!("{:?}", listener.listen())
    };
    with_timeout(TcpStream::connect(at).unwrap())
}

#[test]
fn a_channel_reaches_the_port_that_it_names_at_the_first_address_that_accepts() {
    let authority = Authority::new();
    // Nothing listens at the first address.
    let target = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let far = far(&authority, NEAR, &["127.0.0.3", "127.0.0.2"], one(port));
    let routes = vec![entrance(Listen::OnDemand, far.address().unwrap())];
    let (near, _) = near(&authority, &Routes::new(routes, Vec::new()).unwrap());
    let mut client = through(&near, port);
    let mut server = with_timeout(target.accept().unwrap().0);
    client.write_all(b"memory").unwrap();
    let mut read = [0; 6];
    server.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"memory");
}

/// Claim P22 of docs/security.
#[test]
fn i7_an_authorised_peer_reaches_no_port_outside_the_range() {
    let authority = Authority::new();
    let outside = any_port();
    let port = outside.local_addr().unwrap().port();
    let far = far(&authority, NEAR, &["127.0.0.1"], one(port + 1));
    let routes = vec![entrance(Listen::OnDemand, far.address().unwrap())];
    let (near, events) = near(&authority, &Routes::new(routes, Vec::new()).unwrap());
    assert!(!matches!(through(&near, port).read_once(&mut [0]), Ok(1..)));
    let refused = events.wait("refusal", |one| matches!(one, Event::Refused { .. }));
    assert_eq!(refused.fault(), Some(FaultCode::ParameterRefused));
    outside.set_nonblocking(true).unwrap();
    assert_eq!(outside.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// Waits until a program listens at the port or, if `expected` is false, until none does.
fn wait_until_listening(port: u16, expected: bool) {
    let until = Instant::now() + TIMEOUT;
    let listens = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
    while listens() != expected {
        assert!(Instant::now() < until, "port {port} open: not {expected}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// While the peer's tunnel does not answer, the port is closed. The kernel then refuses the
/// toolstack's connection. Without that, the tunnel would accept and reset the connection.
#[test]
fn the_redirect_port_is_open_only_while_the_peers_tunnel_answers() {
    let authority = Authority::new();
    let (port, there) = (free_port(), any_port());
    let address = there.local_addr().unwrap();
    drop(there);
    let listen = Listen::Redirected {
        address: "192.0.2.7".parse().unwrap(),
        ports: PortRange::new(49152, 49215).unwrap(),
        at: port,
    };
    let redirected = vec![entrance(listen, address)];
    let routes = Routes::default().with_redirected(redirected, Vec::new(), Vec::new());
    let (near, events) = near(&authority, &routes.unwrap());
    assert_eq!(near.refused_redirects(), Some(0));
    let failed = events.wait("failure", |one| matches!(one, Event::TrunkFailed { .. }));
    assert_eq!(failed.fault(), Some(FaultCode::ControlLost));
    wait_until_listening(port, false);
    assert_eq!(near.refused_redirects(), Some(0));

    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: Target::Ports {
            addresses: vec!["127.0.0.1".parse().unwrap()],
            ports: one(free_port()),
        },
        window_bytes: WINDOW_BYTES,
    };
    let exits = Routes::new(Vec::new(), vec![exit]).unwrap();
    let own = identities(authority.identity(&[FAR]));
    let there = TcpListener::bind(address).unwrap();
    let far = Tunnel::builder(there, own, &exits).start().unwrap();
    wait_until_listening(port, true);
    // `wait_until_listening` has connected directly, without a redirect, so no route matches.
    let rejected = events.wait("rejection", |one| matches!(one, Event::Rejected { .. }));
    assert_eq!(rejected.fault(), Some(FaultCode::UnknownRoute));
    assert!(near.refused_redirects().unwrap() >= 1);

    drop(far);
    wait_until_listening(port, false);
    // A reload without redirected routes removes the listener for redirected connections.
    let none = identities(authority.identity(&[NEAR]));
    near.replace(none, &Routes::default()).unwrap();
    assert_eq!(near.refused_redirects(), None);
}

/// A toolstack may connect at any time, so the port must not close because nothing has used it for
/// some time.
#[test]
fn the_redirect_port_stays_open_although_nothing_uses_it() {
    let authority = Authority::new();
    let far = far(&authority, NEAR, &["127.0.0.1"], one(free_port()));
    let port = free_port();
    let listen = Listen::Redirected {
        address: "192.0.2.7".parse().unwrap(),
        ports: PortRange::new(49152, 49215).unwrap(),
        at: port,
    };
    let redirected = vec![entrance(listen, far.address().unwrap())];
    let routes = Routes::default().with_redirected(redirected, Vec::new(), Vec::new());
    let limits = Limits {
        idle: Duration::from_millis(100),
        ..Limits::default()
    };
    let events = Events::default();
    let own = identities(authority.identity(&[NEAR]));
    let _near = Tunnel::builder(any_port(), own, &routes.unwrap())
        .limits(limits)
        .observer(events.observer())
        .start()
        .unwrap();
    wait_until_listening(port, true);
    let until = Instant::now() + 8 * limits.idle;
    while Instant::now() < until {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        thread::sleep(limits.idle / 10);
    }
    let up = |one: &Event| matches!(one, Event::TrunkUp { .. });
    assert_eq!(events.count(up), 1);
}

#[test]
fn two_routes_cannot_be_redirected_from_one_port_and_a_relay_cannot_be_redirected() {
    let redirected = |first, last| Listen::Redirected {
        address: "192.0.2.7".parse().unwrap(),
        ports: PortRange::new(first, last).unwrap(),
        at: 18301,
    };
    let to = "192.0.2.7:1".parse().unwrap();
    let routes = |others| {
        let entrances = vec![entrance(redirected(100, 200), to), entrance(others, to)];
        Routes::new(entrances, Vec::new()).map_err(|bad| bad.why)
    };
    for (first, last) in [(100, 200), (200, 300), (50, 100), (150, 160), (1, 999)] {
        let bad = routes(redirected(first, last)).unwrap_err();
        assert!(matches!(bad, BadRouteReason::SameListener(_)), "{bad:?}");
    }
    assert!(routes(redirected(201, 300)).is_ok());
    let mut relay = entrance(redirected(1, 2), to);
    relay.mode = Mode::Relay(OldestTls::default());
    let bad = Routes::new(vec![relay], Vec::new()).unwrap_err();
    assert_eq!(bad.why, BadRouteReason::RedirectedRelay);
}

/// A far tunnel that accepts trunks and relays. The target of both is a port of loopback in
/// `ports`.
fn far_relay(authority: &Authority, ports: PortRange) -> (Tunnel, Events, u16) {
    let target = Target::Ports {
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        ports,
    };
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: target.clone(),
        window_bytes: WINDOW_BYTES,
    };
    let relay = RelayExit {
        route: "ram".to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        allow: names(&[NEAR]),
        target,
        oldest_tls: OldestTls::V1_3,
    };
    let routes = Routes::default().with_redirected(Vec::new(), vec![exit], vec![relay]);
    let events = Events::default();
    let own = identities(authority.identity(&[FAR]));
    let far = Tunnel::builder(any_port(), own, &routes.unwrap())
        .observer(events.observer())
        .start()
        .unwrap();
    let (_, at) = far.relay_ports().remove(0);
    (far, events, at.port())
}

fn relayed(far: &Tunnel, at: u16) -> Entrance {
    Entrance {
        mode: Mode::RelayAt(at),
        ..entrance(Listen::OnDemand, far.address().unwrap())
    }
}

#[test]
fn a_relay_reaches_the_port_that_its_parameter_names() {
    let authority = Authority::new();
    let [target, other] = [any_port(), any_port()];
    let port = target.local_addr().unwrap().port();
    let ports = {
        let other = other.local_addr().unwrap().port();
        PortRange::new(port.min(other), port.max(other)).unwrap()
    };
    let (far, events, at) = far_relay(&authority, ports);
    let routes = Routes::new(vec![relayed(&far, at)], Vec::new()).unwrap();
    let (near, _) = near(&authority, &routes);
    for (to, word) in [
        (&target, b"memory"),
        (&other, b"device"),
        (&target, b"postcp"),
    ] {
        let mut client = through(&near, to.local_addr().unwrap().port());
        let mut server = with_timeout(to.accept().unwrap().0);
        client.write_all(word).unwrap();
        let mut read = [0; 6];
        server.read_exact(&mut read).unwrap();
        assert_eq!(&read, word);
        server.write_all(b"answer").unwrap();
        client.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"answer");
    }
    // Each connection has a TLS connection of its own; no trunk carries it.
    assert_eq!(events.count(|one| matches!(one, Event::TrunkUp { .. })), 0);
}

/// Claim P22 of docs/security.
#[test]
fn i7_a_relays_client_reaches_no_port_outside_the_range() {
    let authority = Authority::new();
    let outside = any_port();
    let port = outside.local_addr().unwrap().port();
    let (far, events, at) = far_relay(&authority, one(port + 1));
    let routes = Routes::new(vec![relayed(&far, at)], Vec::new()).unwrap();
    let (near, _) = near(&authority, &routes);
    assert!(!matches!(through(&near, port).read_once(&mut [0]), Ok(1..)));
    let refused = events.wait("refusal", |one| matches!(one, Event::Refused { .. }));
    assert_eq!(refused.fault(), Some(FaultCode::ParameterRefused));
    outside.set_nonblocking(true).unwrap();
    assert_eq!(outside.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// A probe names no target port, so the far side opens no connection to a hypervisor.
#[test]
fn a_probe_tests_the_port_of_a_relay() {
    let authority = Authority::new();
    let target = any_port();
    let (far, events, at) = far_relay(&authority, one(target.local_addr().unwrap().port()));
    let (near, _) = near(&authority, &Routes::default());
    assert_eq!(
        near.probe(&relayed(&far, at), 1 << 20).unwrap().bytes,
        1 << 20
    );
    target.set_nonblocking(true).unwrap();
    assert_eq!(target.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let is_refusal = |one: &Event| matches!(one, Event::Refused { .. } | Event::Rejected { .. });
    assert_eq!(events.count(is_refusal), 0, "{:?}", events.all());
    // The trunk works, but nothing listens at the relay's port.
    let failed = near.probe(&relayed(&far, free_port()), 1).unwrap_err();
    assert_eq!(failed.code(), FaultCode::TargetUnreachable, "{failed}");
}

/// A host that only connects needs no port for its peers: it opens the lanes of both directions.
#[test]
fn a_tunnel_without_a_listener_connects_and_carries_both_directions() {
    let authority = Authority::new();
    let target = any_port();
    let port = target.local_addr().unwrap().port();
    let far = far(&authority, NEAR, &["127.0.0.1"], one(port));
    let routes = vec![entrance(Listen::OnDemand, far.address().unwrap())];
    let routes = Routes::new(routes, Vec::new()).unwrap();
    let own = identities(authority.identity(&[NEAR]));
    let near = Tunnel::builder(None, own, &routes).start().unwrap();
    assert_eq!(near.address(), None);
    let mut client = through(&near, port);
    let mut server = with_timeout(target.accept().unwrap().0);
    let (there, back) = (vec![1; 1 << 20], vec![2; 1 << 20]);
    thread::scope(|scope| {
        scope.spawn(|| (&client).write_all(&there).unwrap());
        let mut read = vec![0; 1 << 20];
        server.read_exact(&mut read).unwrap();
        assert!(read == there);
    });
    thread::scope(|scope| {
        scope.spawn(|| (&server).write_all(&back).unwrap());
        let mut read = vec![0; 1 << 20];
        client.read_exact(&mut read).unwrap();
        assert!(read == back);
    });
}

#[test]
fn a_probe_sends_bytes_to_a_peer_and_back() {
    let authority = Authority::new();
    let far = far(&authority, NEAR, &["127.0.0.1"], one(free_port()));
    let to = entrance(Listen::OnDemand, far.address().unwrap());
    let routes = Routes::new(vec![to.clone()], Vec::new()).unwrap();
    let (near, _) = near(&authority, &routes);
    let bytes = (9 << 20) + 17;
    let probe = near.probe(&to, bytes).unwrap();
    assert_eq!(probe.bytes, bytes);
    assert_eq!(near.probe(&to, 1).unwrap().bytes, 1);
}

#[test]
fn a_probe_reports_why_a_peer_cannot_be_used() {
    let authority = Authority::new();
    let (near, _) = near(&authority, &Routes::default());
    // This peer does not allow this side any target.
    let stranger = far(&authority, OTHER, &["127.0.0.1"], one(free_port()));
    let refused = near.probe(&entrance(Listen::OnDemand, stranger.address().unwrap()), 1);
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), FaultCode::Unauthorised, "{refused}");
    // Nothing listens there.
    let nowhere = (Ipv4Addr::LOCALHOST, free_port()).into();
    let failed = near.probe(&entrance(Listen::OnDemand, nowhere), 1);
    let failed = failed.unwrap_err();
    assert_eq!(failed.code(), FaultCode::ControlLost, "{failed}");
}

/// The peer allows the probe, but is not the peer that the entrance expects.
#[test]
fn a_probe_accepts_no_other_peer() {
    let authority = Authority::new();
    let far = far(&authority, NEAR, &["127.0.0.1"], one(free_port()));
    let (near, _) = near(&authority, &Routes::default());
    let mut to = entrance(Listen::OnDemand, far.address().unwrap());
    to.peers = names(&[OTHER]);
    let refused = near.probe(&to, 1).unwrap_err();
    assert_eq!(refused.code(), FaultCode::Unauthorised, "{refused}");
}
