//! Relays: channels on their own TLS connections, between two tunnels. crates/dunlin-cli tests
//! them with the TLS of other programs.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::identity::Identity;
use dunlin_lane::peers::Peers;
use dunlin_lane::policy::OldestTls;
use dunlin_linux::socket::set_reset_on_close;
use dunlin_proto::fault::FaultCode;
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::{ReadOnce as _, accepted, with_timeout};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::relay::Relay;
use dunlin_test_support::tunnel::{Events, FAR, NEAR, TIMEOUT, expect, identities, join, send};
use dunlin_tunnel::{
    Entrance, Event, Limits, Listen, Mode, RelayExit, Routes, Target, Tunnel, WINDOW_BYTES,
};

/// The settings in which scenes differ.
struct Setup {
    near: Identity,
    far: Identity,
    peers: Peers,
    allow: Peers,
    near_tls: OldestTls,
    far_tls: OldestTls,
    limits: Limits,
    relayed: bool,
    /// The address that the near side dials, if it is not the far side's address.
    to: Option<SocketAddr>,
}

impl Setup {
    fn new() -> Self {
        let authority = Authority::new();
        Self {
            near: authority.identity(&[NEAR]),
            far: authority.identity(&[FAR]),
            peers: names(&[FAR]),
            allow: names(&[NEAR]),
            near_tls: OldestTls::V1_3,
            far_tls: OldestTls::V1_3,
            limits: Limits::default(),
            relayed: false,
            to: None,
        }
    }
}

/// Two tunnels with one relay, from a unix socket and a TCP port to a TCP port.
struct Scene {
    near: Option<Tunnel>,
    far: Option<Tunnel>,
    near_events: Events,
    far_events: Events,
    network: Option<Relay>,
    target: TcpListener,
    scratch: Scratch,
}

fn any() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

impl Scene {
    fn start(setup: Setup) -> Self {
        let target = any();
        let exit = RelayExit {
            route: "ram".to_owned(),
            listen: "127.0.0.1:0".parse().unwrap(),
            allow: setup.allow,
            target: Target::Tcp(target.local_addr().unwrap().to_string()),
            oldest_tls: setup.far_tls,
        };
        let none = Routes::new(Vec::new(), Vec::new()).unwrap();
        let routes = none.with_relays(vec![exit]).unwrap();
        let far_events = Events::default();
        let far = identities(setup.far);
        let far = Tunnel::builder(any(), far, &routes)
            .limits(setup.limits)
            .observer(far_events.observer())
            .start()
            .unwrap();
        let port = far.relay_ports()[0].1;
        let network = setup.relayed.then(|| Relay::start(port));
        let scratch = Scratch::new();
        let to = network.as_ref().map_or(port, |one| one.address);
        let to = setup.to.unwrap_or(to).to_string();
        let entrance = |route: &str, listen| Entrance {
            route: route.to_owned(),
            listen,
            to: to.clone(),
            peers: setup.peers.clone(),
            lanes: 1,
            window_bytes: WINDOW_BYTES,
            mode: Mode::Relay(setup.near_tls),
        };
        let entrances = vec![
            entrance("ram", Listen::Unix(scratch.join("in"))),
            entrance("tcp", Listen::Tcp("127.0.0.1:0".parse().unwrap())),
        ];
        let routes = Routes::new(entrances, Vec::new()).unwrap();
        let near_events = Events::default();
        let near = identities(setup.near);
        let near = Tunnel::builder(any(), near, &routes)
            .limits(setup.limits)
            .observer(near_events.observer())
            .start()
            .unwrap();
        Self {
            near: Some(near),
            far: Some(far),
            near_events,
            far_events,
            network,
            target,
            scratch,
        }
    }

    fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(self.scratch.join("in")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    fn tcp(&self) -> TcpStream {
        let entrances = self.near.as_ref().unwrap().entrances();
        let port = entrances.iter().find_map(|(_, listen)| match listen {
            Listen::Tcp(address) => Some(*address),
            _ => None,
        });
        with_timeout(TcpStream::connect(port.unwrap()).unwrap())
    }

    fn accept(&self) -> TcpStream {
        accepted(&self.target)
    }

    /// The near side's reason for refusing a connection.
    fn refused(&self) -> (FaultCode, String) {
        let mut stream = self.unix();
        assert!(!matches!(stream.read_once(&mut [0]), Ok(1..)));
        let failed = |event: &Event| matches!(event, Event::Refused { .. } | Event::Aborted { .. });
        match self.near_events.wait("refusal", failed) {
            Event::Refused { failure, .. } | Event::Aborted { failure, .. } => {
                (failure.code(), failure.to_string())
            }
            other => panic!("{other}"),
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("near: {:#?}", self.near_events.all());
            eprintln!("far: {:#?}", self.far_events.all());
        }
    }
}

fn is_closed(event: &Event) -> bool {
    matches!(event, Event::Closed { .. })
}

fn is_aborted(event: &Event) -> bool {
    matches!(event, Event::Aborted { .. })
}

/// Asserts that the connection ends with an error, not with an end of file.
fn assert_reset(stream: &mut impl Read) {
    let mut scrap = vec![0; 1 << 16];
    loop {
        match stream.read(&mut scrap) {
            Ok(0) => panic!("an abort was read as an end of file"),
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                return;
            }
        }
    }
}

/// Like `tunnel::expect`, for a TCP socket.
fn expect_all(mut stream: TcpStream, sent: Vec<u8>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut came = Vec::new();
        stream.read_to_end(&mut came).unwrap();
        assert_eq!(came.len(), sent.len());
        assert!(came == sent);
    })
}

#[test]
fn bytes_go_both_ways_and_each_end_by_itself_in_tls_1_3_and_1_2() {
    for (near_tls, far_tls) in [
        (OldestTls::V1_3, OldestTls::V1_3),
        (OldestTls::V1_2, OldestTls::V1_3),
        (OldestTls::V1_2, OldestTls::V1_2),
    ] {
        let scene = Scene::start(Setup {
            near_tls,
            far_tls,
            ..Setup::new()
        });
        let near = scene.unix();
        let mut far = scene.accept();
        let out = send(&near, 1, 5_000_000);
        let mut came = Vec::new();
        far.read_to_end(&mut came).unwrap();
        let mut sent = vec![0; 5_000_000];
        dunlin_test_support::tunnel::Random::new(1).fill(&mut sent);
        assert!(came == sent);
        // The inward direction stays open after the outward direction has ended.
        let inward = expect(&near, 2, 3_000_000);
        let mut back = vec![0; 3_000_000];
        dunlin_test_support::tunnel::Random::new(2).fill(&mut back);
        far.write_all(&back).unwrap();
        drop(far);
        join(vec![out, inward]);
        scene.near_events.wait("end", is_closed);
        scene.far_events.wait("end", is_closed);
        assert_eq!(scene.near.as_ref().unwrap().status(), []);
    }
}

/// Writes until the buffers have been full for a while, and then writes the rest of `sent`
/// while the other side reads.
fn stalls_and_goes_on(stream: &UnixStream, sent: &[u8], stalled: &Barrier) {
    stream
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let mut left = sent;
    while !left.is_empty() {
        match (&*stream).write(left) {
            Ok(count) => left = &left[count..],
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                break;
            }
        }
    }
    stalled.wait();
    assert!(!left.is_empty(), "all of it fits into the buffers");
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    (&*stream).write_all(left).unwrap();
}

/// Both peers write more than all buffers hold before either of them reads. Then one direction is
/// read to its end while the opposite direction stays full. No direction may wait for the opposite
/// one.
#[test]
fn i8_each_direction_flows_while_the_other_is_full() {
    const BYTES: usize = 48 << 20;
    let sent = |seed| {
        let mut bytes = vec![0; BYTES];
        dunlin_test_support::tunnel::Random::new(seed).fill(&mut bytes);
        bytes
    };
    let (there, back) = (sent(1), sent(2));
    for near_reads_first in [false, true] {
        let scene = Scene::start(Setup::new());
        let near = scene.unix();
        let far: UnixStream = OwnedFd::from(scene.accept()).into();
        let stalled = Barrier::new(3);
        thread::scope(|scope| {
            for (stream, sent) in [(&near, &there), (&far, &back)] {
                let stalled = &stalled;
                scope.spawn(move || {
                    stalls_and_goes_on(stream, sent, stalled);
                    stream.shutdown(Shutdown::Write).unwrap();
                });
            }
            stalled.wait();
            let mut ends = [(&far, &there), (&near, &back)];
            if near_reads_first {
                ends.reverse();
            }
            for (mut stream, sent) in ends {
                let mut came = Vec::new();
                stream.read_to_end(&mut came).unwrap();
                assert!(came == *sent, "{near_reads_first}");
            }
        });
        scene.near_events.wait("end", is_closed);
        scene.far_events.wait("end", is_closed);
    }
}

#[test]
fn many_channels_are_open_at_the_same_time_and_arrive_in_order() {
    let scene = Scene::start(Setup::new());
    let mut threads = Vec::new();
    for seed in 0..24_u8 {
        let near = scene.unix();
        (&near).write_all(&[seed]).unwrap();
        let mut far = scene.accept();
        let mut first = [0];
        far.read_exact(&mut first).unwrap();
        assert_eq!(first, [seed]);
        threads.push(send(&near, seed.into(), 700_000));
        let mut sent = vec![0; 700_000];
        dunlin_test_support::tunnel::Random::new(seed.into()).fill(&mut sent);
        threads.push(expect_all(far, sent));
    }
    // All of these are connected before the target accepts the first one.
    let waiting: Vec<_> = (0..8).map(|_| scene.unix()).collect();
    for (number, near) in waiting.iter().enumerate() {
        (&*near).write_all(&[number as u8]).unwrap();
    }
    for number in 0..8 {
        let mut first = [0];
        scene.accept().read_exact(&mut first).unwrap();
        assert_eq!(first, [number]);
    }
    join(threads);
}

/// Keys are renewed on the same connection, in both directions, although data flows in only one
/// direction at a time.
#[test]
fn keys_are_renewed_before_they_are_used_up() {
    let limits = Limits {
        lane_records: 1024,
        ..Limits::default()
    };
    let scene = Scene::start(Setup {
        limits,
        ..Setup::new()
    });
    let near = scene.unix();
    let far = scene.accept();
    let bytes = 80 << 20;
    let mut sent = vec![0; bytes];
    dunlin_test_support::tunnel::Random::new(7).fill(&mut sent);
    let out = send(&near, 7, bytes);
    let came = expect_all(far.try_clone().unwrap(), sent.clone());
    join(vec![out, came]);
    let back = thread::spawn(move || {
        (&far).write_all(&sent).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
    });
    join(vec![back, expect(&near, 7, bytes)]);
    scene.near_events.wait("end", is_closed);
}

#[test]
fn a_connection_that_is_cut_is_an_abort() {
    for oldest in [OldestTls::V1_3, OldestTls::V1_2] {
        let scene = Scene::start(Setup {
            near_tls: oldest,
            far_tls: oldest,
            relayed: true,
            ..Setup::new()
        });
        let mut near = scene.tcp();
        let mut far = scene.accept();
        near.write_all(&[7; 100_000]).unwrap();
        far.read_exact(&mut [0; 100_000]).unwrap();
        scene.network.as_ref().unwrap().cut(0);
        assert_reset(&mut near);
        assert_reset(&mut far);
        let Event::Aborted { failure, .. } = scene.near_events.wait("abort", is_aborted) else {
            panic!()
        };
        assert_eq!(failure.code(), FaultCode::LaneLost, "{failure}");
    }
}

/// A hypervisor that is cancelled resets its connection. The other hypervisor gets the abort
/// although it reads nothing, and long before any timeout.
#[test]
fn a_reset_is_passed_on_past_a_consumer_that_does_not_read() {
    let scene = Scene::start(Setup::new());
    let near = scene.tcp();
    let far = scene.accept();
    near.set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    while (&near).write_all(&[7; 100_000]).is_ok() {}
    set_reset_on_close(&near).unwrap();
    drop(near);
    scene.near_events.wait("abort", is_aborted);
    scene.far_events.wait("abort", is_aborted);
    let until = Instant::now() + TIMEOUT;
    let error = loop {
        match (&far).write_all(&[0; 4096]) {
            Ok(()) => assert!(Instant::now() < until),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_consumer_may_stall_for_longer_than_a_peer_may_be_gone() {
    let limits = Limits {
        vanished: Duration::from_secs(1),
        ..Limits::default()
    };
    let scene = Scene::start(Setup {
        limits,
        ..Setup::new()
    });
    let near = scene.unix();
    let far = scene.accept();
    let out = send(&near, 3, 40 << 20);
    // During the wait there must be no abort, because the peer's kernel answers. Keep-alive, which
    // the kernel counts in whole seconds, gives up a silent peer after four seconds: one second of
    // silence and one for each of three probes. The test takes real time, because only a real
    // kernel shows whether it counts an answered window probe as an answer.
    thread::sleep(Duration::from_secs(4));
    let mut sent = vec![0; 40 << 20];
    dunlin_test_support::tunnel::Random::new(3).fill(&mut sent);
    join(vec![out, expect_all(far, sent)]);
}

/// The tunnel reports a peer that takes no bytes on any channel, and does so only once. It reports
/// nothing if one hypervisor does not read while another channel of the peer carries bytes.
#[test]
fn a_peer_that_takes_no_bytes_of_any_channel_is_reported_once() {
    let limits = Limits {
        vanished: Duration::from_secs(4),
        ..Limits::default()
    };
    let scene = Scene::start(Setup {
        limits,
        ..Setup::new()
    });
    let silent = |event: &Event| matches!(event, Event::PeerSilent { .. });
    let (mut near, mut far) = (scene.tcp(), scene.accept());
    let (stalled, unread) = (scene.unix(), scene.accept());
    let out = send(&stalled, 3, 40 << 20);
    let until = Instant::now() + limits.vanished;
    while Instant::now() < until {
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
    assert_eq!(scene.near_events.count(silent), 0);
    let reported = scene.near_events.wait("silence", silent);
    let Event::PeerSilent { host_answers, .. } = reported else {
        panic!()
    };
    assert!(host_answers, "{reported}");
    assert_eq!(reported.fault(), Some(FaultCode::ControlLost));
    // In this time the tunnel checks the peer four more times. No event shows the checks, so sleep.
    thread::sleep(limits.vanished / 4);
    assert_eq!(scene.near_events.count(silent), 1);
    let mut sent = vec![0; 40 << 20];
    dunlin_test_support::tunnel::Random::new(3).fill(&mut sent);
    join(vec![out, expect_all(unread, sent)]);
    assert_eq!(scene.near_events.count(is_aborted), 0);
}

/// This process's resident memory, in bytes.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = pages.split(' ').nth(1).unwrap();
    pages.parse::<usize>().unwrap() * 4096
}

/// The tunnel returns freed memory to the kernel even if that memory lies between parts that stay
/// in use. After many channels, freed memory usually lies so. The C library alone does not return
/// it.
#[test]
#[cfg(target_env = "gnu")]
fn i8_free_memory_is_returned_after_the_last_channel() {
    const BYTES: usize = 128 << 20;
    let limits = Limits {
        vanished: Duration::from_secs(1),
        ..Limits::default()
    };
    let scene = Scene::start(Setup {
        limits,
        ..Setup::new()
    });
    let mut parts: Vec<Vec<u8>> = (0..BYTES >> 14).map(|_| vec![1; 1 << 14]).collect();
    let full = resident_bytes();
    let near = scene.unix();
    let far = scene.accept();
    let mut number = 0;
    parts.retain(|_| {
        number += 1;
        number % 64 == 0
    });
    drop((near, far));
    scene.near_events.wait("end", is_closed);
    let until = Instant::now() + TIMEOUT;
    while resident_bytes() > full - BYTES / 2 {
        assert!(Instant::now() < until, "{} of {full}", resident_bytes());
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!parts.is_empty());
}

#[test]
fn i6_an_untrusted_peer_carries_nothing() {
    let authority = Authority::new();
    let stranger = Authority::named("another authority");
    let pin = |of: &Identity| -> Peers {
        let pin = of.summary().unwrap().pin.to_string();
        names(&[&pin])
    };
    let with = |change: &dyn Fn(&mut Setup)| {
        let mut setup = Setup {
            near: authority.identity(&[NEAR]),
            far: authority.identity(&[FAR]),
            ..Setup::new()
        };
        change(&mut setup);
        let scene = Scene::start(setup);
        let (code, text) = scene.refused();
        scene.target.set_nonblocking(true).unwrap();
        assert!(scene.target.accept().is_err(), "{text}");
        (code, text)
    };
    let other = authority.identity(&["other.test"]);
    for (change, words) in [
        (
            &(|one: &mut Setup| one.peers = names(&["other.test"])) as &dyn Fn(&mut Setup),
            "none of the allowed names",
        ),
        (&|one| one.peers = pin(&other), "not the pinned one"),
        (
            &|one| one.far = stranger.identity(&[FAR]),
            "unknown authority",
        ),
        (
            &|one| one.allow = names(&["other.test"]),
            "compare this host's",
        ),
        (&|one| one.allow = pin(&other), "compare this host's"),
        (
            &|one| {
                one.near = stranger.identity(&[NEAR]);
                one.peers = pin(&one.far);
            },
            "does not trust",
        ),
    ] {
        let (code, text) = with(change);
        assert_eq!(code, FaultCode::Unauthorised, "{text}");
        assert!(text.contains(words), "{words}: {text}");
    }
    // A peer with the pinned key needs no authority.
    let far = stranger.identity(&[FAR]);
    let scene = Scene::start(Setup {
        peers: pin(&far),
        far,
        allow: pin(&other),
        near: other,
        ..Setup::new()
    });
    let mut near = scene.unix();
    near.write_all(b"x").unwrap();
    scene.accept().read_exact(&mut [0]).unwrap();
}

/// Clients that do not speak TLS, or that are silent, do not keep other clients out.
/// crates/dunlin-cli tests peers that only support TLS 1.2, and clients without a certificate, with
/// `openssl`.
#[test]
fn i7_clients_without_tls_and_silent_clients_keep_no_other_out() {
    let scene = Scene::start(Setup::new());
    let port = scene.far.as_ref().unwrap().relay_ports()[0].1;
    let silent: Vec<_> = (0..300)
        .map(|_| TcpStream::connect(port).unwrap())
        .collect();
    let mut loud = with_timeout(TcpStream::connect(port).unwrap());
    loud.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut near = scene.unix();
    near.write_all(b"x").unwrap();
    scene.accept().read_exact(&mut [0]).unwrap();
    let rejected = |event: &Event| {
        matches!(
            event,
            Event::Rejected {
                fault: FaultCode::NotDunlin,
                ..
            }
        )
    };
    scene.far_events.wait("rejection", rejected);
    drop(silent);
}

#[test]
fn i8_channels_beyond_the_limit_are_refused_and_the_others_stay() {
    let limits = Limits {
        channels: 3,
        ..Limits::default()
    };
    let scene = Scene::start(Setup {
        limits,
        ..Setup::new()
    });
    let mut open: Vec<_> = (0..3).map(|_| (scene.unix(), scene.accept())).collect();
    let (code, text) = scene.refused();
    assert_eq!(code, FaultCode::Busy, "{text}");
    for (near, far) in &mut open {
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
    // A channel that ends makes room for another channel.
    drop(open.pop());
    scene.near_events.wait("end", is_closed);
    scene.far_events.wait("end", is_closed);
    let mut near = scene.unix();
    near.write_all(b"x").unwrap();
    scene.accept().read_exact(&mut [0]).unwrap();
}

#[test]
fn a_drain_waits_for_channels_and_accepts_no_more() {
    let mut scene = Scene::start(Setup::new());
    let mut near = scene.unix();
    let mut far = scene.accept();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    let port = scene.far.as_ref().unwrap().relay_ports()[0].1;
    let tunnel = scene.far.take().unwrap();
    let draining = thread::spawn(move || tunnel.drain(TIMEOUT));
    let until = Instant::now() + TIMEOUT;
    while TcpStream::connect(port).is_ok() {
        assert!(Instant::now() < until, "connections are still taken");
        thread::sleep(Duration::from_millis(5));
    }
    near.write_all(b"last words").unwrap();
    drop(near);
    let mut last = String::new();
    far.read_to_string(&mut last).unwrap();
    assert_eq!(last, "last words");
    drop(far);
    assert_eq!(draining.join().unwrap(), 0);
}

#[test]
fn a_tunnel_that_ends_aborts_its_channels() {
    let mut scene = Scene::start(Setup::new());
    let mut near = scene.tcp();
    let mut far = scene.accept();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    assert_eq!(scene.far.take().unwrap().drain(Duration::ZERO), 1);
    assert_reset(&mut near);
    assert_reset(&mut far);
}

#[test]
fn a_reload_changes_the_peers_of_a_port_and_no_channel() {
    let authority = Authority::new();
    let scene = Scene::start(Setup {
        near: authority.identity(&[NEAR]),
        far: authority.identity(&[FAR]),
        ..Setup::new()
    });
    let mut near = scene.unix();
    let mut far = scene.accept();
    let target = scene.target.local_addr().unwrap();
    let changed = RelayExit {
        route: "ram".to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        allow: names(&["other.test"]),
        target: Target::Tcp(target.to_string()),
        oldest_tls: OldestTls::V1_3,
    };
    let tunnel = scene.far.as_ref().unwrap();
    let port: SocketAddr = tunnel.relay_ports()[0].1;
    let routes = Routes::new(Vec::new(), Vec::new()).unwrap();
    let routes = routes.with_relays(vec![changed]).unwrap();
    let renewed = identities(authority.identity(&[FAR]));
    tunnel.replace(renewed, &routes).unwrap();
    assert_eq!(tunnel.relay_ports()[0].1, port);
    let (code, text) = scene.refused();
    assert_eq!(code, FaultCode::Unauthorised, "{text}");
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

/// A client is checked against the configuration that is current when its handshake ends.
#[test]
fn i6_a_reload_during_a_handshake_admits_no_peer_that_is_no_longer_allowed() {
    let authority = Authority::new();
    let scene = Scene::start(Setup {
        near: authority.identity(&[NEAR]),
        far: authority.identity(&[FAR]),
        relayed: true,
        ..Setup::new()
    });
    let tunnel = scene.far.as_ref().unwrap();
    let changed = RelayExit {
        route: "ram".to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        allow: names(&["other.test"]),
        target: Target::Tcp(scene.target.local_addr().unwrap().to_string()),
        oldest_tls: OldestTls::V1_3,
    };
    let routes = Routes::new(Vec::new(), Vec::new()).unwrap();
    let routes = routes.with_relays(vec![changed]).unwrap();
    let renewed = identities(authority.identity(&[FAR]));
    let mut stream = None;
    scene.network.as_ref().unwrap().hold(
        || stream = Some(scene.unix()),
        || tunnel.replace(renewed, &routes).unwrap(),
    );
    assert!(!matches!(stream.unwrap().read_once(&mut [0]), Ok(1..)));
    let rejected = |event: &Event| matches!(event, Event::Rejected { .. });
    scene.far_events.wait("rejection", rejected);
    scene.target.set_nonblocking(true).unwrap();
    assert!(scene.target.accept().is_err());
}

/// A timeout that is longer than any test may take. If a wait ends earlier, it was cancelled.
const NEVER: Duration = Duration::from_secs(60);
const AT_ONCE: Duration = Duration::from_secs(20);

fn long_limits() -> Limits {
    Limits {
        connect: NEVER,
        ..Limits::default()
    }
}

/// Drops a tunnel, and asserts that this takes far less than [`NEVER`].
fn assert_ends_at_once(tunnel: Option<Tunnel>) {
    let begun = Instant::now();
    drop(tunnel.unwrap());
    let took = begun.elapsed();
    assert!(took < AT_ONCE, "{took:?}");
}

/// Connects to a listener that never accepts, until the kernel answers no more SYNs.
fn fill_backlog(listener: &TcpListener) -> Vec<TcpStream> {
    let to = listener.local_addr().unwrap();
    let connect = || TcpStream::connect_timeout(&to, Duration::from_millis(100)).ok();
    let waiting: Vec<_> = std::iter::from_fn(connect).take(10_000).collect();
    assert!(waiting.len() < 10_000, "the backlog has no end");
    waiting
}

/// Waits until a connection to an IPv4 address has sent a SYN that is not answered (proc(5)).
fn wait_for_unanswered_syn(to: SocketAddr) {
    let remote = format!(":{:04X} 02 ", to.port());
    let until = Instant::now() + TIMEOUT;
    let sent = || {
        let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        sockets.contains(&remote)
    };
    while !sent() {
        assert!(Instant::now() < until, "no connection to {to} is begun");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A relay's peer that accepts the connection and sends nothing does not delay the end of the
/// tunnel.
#[test]
fn a_relay_whose_handshake_is_under_way_ends_with_the_tunnel() {
    let mut scene = Scene::start(Setup {
        limits: long_limits(),
        relayed: true,
        ..Setup::new()
    });
    let near = scene.near.take();
    let (network, mut stream) = (scene.network.clone().unwrap(), None);
    let entrance = scene.scratch.join("in");
    network.hold(
        || stream = Some(UnixStream::connect(entrance).unwrap()),
        || assert_ends_at_once(near),
    );
    let refused = |event: &Event| matches!(event, Event::Refused { .. });
    scene.near_events.wait("refusal", refused);
}

/// A peer on a host that answers no SYN does not delay the end of the tunnel.
#[test]
fn a_relay_whose_peer_does_not_answer_ends_with_the_tunnel() {
    let silent = any();
    let address = silent.local_addr().unwrap();
    let mut scene = Scene::start(Setup {
        limits: long_limits(),
        to: Some(address),
        ..Setup::new()
    });
    let _waiting = fill_backlog(&silent);
    let _stream = scene.unix();
    wait_for_unanswered_syn(address);
    assert_ends_at_once(scene.near.take());
}

/// A target on a host that answers no SYN does not delay the end of the tunnel.
#[test]
fn a_relay_whose_target_does_not_answer_ends_with_the_tunnel() {
    let mut scene = Scene::start(Setup {
        limits: long_limits(),
        ..Setup::new()
    });
    let _waiting = fill_backlog(&scene.target);
    let _stream = scene.unix();
    wait_for_unanswered_syn(scene.target.local_addr().unwrap());
    assert_ends_at_once(scene.far.take());
}

#[test]
fn a_target_that_is_not_there_ends_the_connection_with_an_error() {
    let mut scene = Scene::start(Setup::new());
    let target = scene.target.local_addr().unwrap();
    drop(std::mem::replace(&mut scene.target, any()));
    let mut stream = scene.unix();
    assert!(!matches!(stream.read_once(&mut [0]), Ok(1..)));
    let refused = |event: &Event| matches!(event, Event::Refused { .. });
    let why = scene.far_events.wait("refusal", refused).to_string();
    assert!(why.contains(&target.to_string()), "{why}");
    // The near side detects the failure during or after its handshake.
    let ended = |event: &Event| is_aborted(event) || refused(event);
    scene.near_events.wait("abort", ended);
}
