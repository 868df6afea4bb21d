//! Routes with TCP ports or programs as their ends: several routes over one port, the peers that may
//! use a route, and refusals.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use dunlin_lane::control;
use dunlin_lane::provider::Crypto;
use dunlin_linux::socket::{set_reset_on_close, unread_bytes};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, VERSIONS,
};
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::{ReadOnce as _, with_timeout};
use dunlin_test_support::lane::{Authority, names, soon};
use dunlin_test_support::tunnel::{
    Events, FAR, NEAR, Pair, Setup, TIMEOUT, fill_backlog, identities,
};
use dunlin_tunnel::{
    Entrance, Event, Exit, Limits, Listen, Mode, Routes, Target, Tunnel, TunnelError, WINDOW_BYTES,
};

/// Two tunnels with routes that are given by name and target. The entrances are TCP ports.
struct Scene {
    near: Tunnel,
    far: Tunnel,
    near_events: Events,
}

impl Scene {
    fn start(authority: &Authority, exits: &[(&str, Target, &str)], limits: Limits) -> Self {
        let any = || TcpListener::bind("127.0.0.1:0").unwrap();
        let exit = |(route, target, allow): &(&str, Target, &str)| Exit {
            route: (*route).to_owned(),
            allow: names(&[allow]),
            target: target.clone(),
            window_bytes: WINDOW_BYTES,
        };
        let routes = Routes::new(Vec::new(), exits.iter().map(exit).collect()).unwrap();
        let far = identities(authority.identity(&[FAR]));
        let far = Tunnel::builder(any(), far, &routes)
            .limits(limits)
            .start()
            .unwrap();
        let entrance = |(route, _, _): &(&str, Target, &str)| Entrance {
            route: (*route).to_owned(),
            listen: Listen::Tcp("127.0.0.1:0".parse().unwrap()),
            to: far.address().unwrap().to_string(),
            peers: names(&[FAR]),
            lanes: 2,
            window_bytes: WINDOW_BYTES,
            mode: Mode::Stripe,
        };
        let routes = Routes::new(exits.iter().map(entrance).collect(), Vec::new()).unwrap();
        let near_events = Events::default();
        let near = identities(authority.identity(&[NEAR]));
        let near = Tunnel::builder(any(), near, &routes)
            .limits(limits)
            .observer(near_events.observer())
            .start()
            .unwrap();
        Self {
            near,
            far,
            near_events,
        }
    }

    fn connect(&self, route: &str) -> TcpStream {
        with_timeout(TcpStream::connect(self.entrance(route)).unwrap())
    }

    fn entrance(&self, route: &str) -> SocketAddr {
        let entrances = self.near.entrances();
        let (_, listen) = entrances.iter().find(|(name, _)| name == route).unwrap();
        let Listen::Tcp(address) = listen else {
            panic!("{listen}")
        };
        *address
    }

    /// Connects to a route, and returns the reason why the connection is closed.
    fn refused(&self, route: &str) -> (FaultCode, String) {
        // A reset may arrive before connect(2) has returned. In that case connect(2) reports the
        // reset.
        let ended = TcpStream::connect(self.entrance(route))
            .and_then(|stream| with_timeout(stream).read_once(&mut [0]));
        assert!(!matches!(ended, Ok(1..)), "{ended:?}");
        let event = self.near_events.wait(
            "refusal",
            |event| matches!(event, Event::Refused { route: of, .. } if of == route),
        );
        match event {
            Event::Refused { failure, .. } => (failure.code(), failure.to_string()),
            other => panic!("{other}"),
        }
    }
}

fn listener() -> (TcpListener, Target) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = Target::Tcp(listener.local_addr().unwrap().to_string());
    (listener, target)
}

#[test]
fn ends_may_be_tcp_or_programs_and_all_routes_use_one_port() {
    let (listener, target) = listener();
    let cat = Target::Exec(vec!["/bin/cat".to_owned()]);
    let exits = [("tcp", target, NEAR), ("cat", cat, NEAR)];
    let scene = Scene::start(&Authority::new(), &exits, Limits::default());
    let mut near = scene.connect("tcp");
    let (mut far, _) = listener.accept().unwrap();
    let mut cat = scene.connect("cat");
    near.write_all(b"to the target").unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    cat.write_all(b"to the program and back").unwrap();
    cat.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    far.read_to_string(&mut said).unwrap();
    assert_eq!(said, "to the target");
    said.clear();
    cat.read_to_string(&mut said).unwrap();
    assert_eq!(said, "to the program and back");
    let up = |event: &Event| matches!(event, Event::TrunkUp { .. });
    assert_eq!(scene.near_events.count(up), 1);
}

/// A hypervisor that is cancelled resets its connection. The other hypervisor gets the abort
/// although it has not read the bytes sent before, and long before any timeout.
#[test]
fn a_reset_is_passed_on_at_once_past_a_full_window() {
    let (listener, target) = listener();
    let exits = [("tcp", target, NEAR)];
    let scene = Scene::start(&Authority::new(), &exits, Limits::default());
    let near = scene.connect("tcp");
    let (mut far, _) = listener.accept().unwrap();
    near.set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    while (&near).write_all(&[7; 100_000]).is_ok() {}
    set_reset_on_close(&near).unwrap();
    let begin = Instant::now();
    drop(near);
    let aborted = |event: &Event| matches!(event, Event::Aborted { .. });
    scene.near_events.wait("abort", aborted);
    let error = loop {
        match far.write_all(&[0; 4096]) {
            Ok(()) => assert!(begin.elapsed() < Duration::from_secs(2)),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(
        begin.elapsed() < Duration::from_secs(2),
        "{:?}",
        begin.elapsed()
    );
}

/// Waits until there is something to read.
fn wait_unread(stream: &UnixStream) {
    let until = Instant::now() + TIMEOUT;
    while unread_bytes(stream).unwrap() == 0 {
        assert!(Instant::now() < until, "no bytes arrive");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How a route's only channel ended on one side: the counts of clean ends, of ends with bytes
/// left unread, and of failures.
fn ended(tunnel: &Tunnel) -> [u64; 3] {
    let until = Instant::now() + TIMEOUT;
    loop {
        let traffic = tunnel.routes()[0].traffic;
        let ended = [traffic.closed, traffic.left_unread, traffic.failed];
        if ended.iter().sum::<u64>() > 0 {
            return ended;
        }
        assert!(Instant::now() < until, "the channel does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Tests a consumer that closes its connection without reading the last bytes. QEMU's destination
/// does this with its own TLS and multifd: when it has all pages, it closes the connection without
/// reading the source's *close_notify*, which arrives before or after the close.
#[test]
fn a_consumer_that_resets_after_the_others_end_aborts_nothing() {
    let goodbye = [21; 24];
    for comes_first in [true, false] {
        let (listener, target) = listener();
        let exits = [("tcp", target, NEAR)];
        let scene = Scene::start(&Authority::new(), &exits, Limits::default());
        let mut near = scene.connect("tcp");
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(&[7; 300_000]).unwrap();
        far.read_exact(&mut vec![0; 300_000]).unwrap();
        set_reset_on_close(&far).unwrap();
        if comes_first {
            near.write_all(&goodbye).unwrap();
            drop(near);
            far.peek(&mut [0]).unwrap();
            drop(far);
        } else {
            drop(far);
            near.write_all(&goodbye).unwrap();
            drop(near);
        }
        let left = |event: &Event| matches!(event, Event::LeftUnread { by_peer: true, .. });
        scene.near_events.wait("end", left);
        let events = scene.near_events.all();
        assert_eq!(ended(&scene.near), [0, 1, 0], "{comes_first}: {events:#?}");
        assert_eq!(ended(&scene.far), [0, 1, 0], "{comes_first}: {events:#?}");
    }
}

/// Like `a_consumer_that_resets_after_the_others_end_aborts_nothing`, but with unix sockets, which
/// report a reset only if bytes were unread.
#[test]
fn a_consumer_that_closes_a_unix_socket_after_the_others_end_aborts_nothing() {
    for goodbye in [&[][..], &[21; 24]] {
        for comes_first in [true, false] {
            let pair = Pair::start(&Setup::default());
            let (mut near, mut far) = pair.channel();
            near.write_all(&[7; 300_000]).unwrap();
            far.read_exact(&mut vec![0; 300_000]).unwrap();
            near.write_all(goodbye).unwrap();
            if comes_first {
                drop(near);
                if !goodbye.is_empty() {
                    wait_unread(&far);
                }
                drop(far);
            } else {
                drop((far, near));
            }
            // The channel ends cleanly if the consumer has read everything, and otherwise with
            // bytes left unread.
            let [near, far] = [&pair.near, &pair.far].map(|one| ended(one.as_ref().unwrap()));
            let events = (pair.near_events.all(), pair.far_events.all());
            let good = [[1, 0, 0], [0, 1, 0]];
            assert!(good.contains(&near) && good.contains(&far), "{events:#?}");
            assert_eq!(near, far, "{events:#?}");
            if comes_first && !goodbye.is_empty() {
                assert_eq!(near, [0, 1, 0], "{events:#?}");
            }
        }
    }
}

/// In each case the channel is not about to end: the source still sends, waits for an answer, or
/// has sent many bytes that are unread.
#[test]
fn a_consumer_that_resets_before_the_end_aborts_the_channel() {
    #[derive(Debug, PartialEq)]
    enum Source {
        Sends,
        Awaits,
        SentMuch,
    }
    for source in [Source::Sends, Source::Awaits, Source::SentMuch] {
        let pair = Pair::start(&Setup::default());
        let (mut near, far) = pair.channel();
        near.write_all(b"question").unwrap();
        let mut near = Some(near);
        match source {
            Source::Sends => near.as_mut().unwrap().write_all(&[7; 600_000]).unwrap(),
            Source::Awaits => near.as_ref().unwrap().shutdown(Shutdown::Write).unwrap(),
            // Send more than the sockets' buffers hold, because bytes in the buffers count as read.
            Source::SentMuch => {
                let mut much = near.take().unwrap();
                much.set_write_timeout(Some(Duration::from_millis(300)))
                    .unwrap();
                while much.write_all(&[7; 100_000]).is_ok() {}
            }
        }
        wait_unread(&far);
        let begin = Instant::now();
        drop(far);
        let events = pair
            .near_events
            .wait(&format!("abort: {source:?}"), |event| {
                matches!(event, Event::Aborted { .. })
            });
        let Event::Aborted { failure, .. } = events else {
            panic!("{events}");
        };
        assert_eq!(failure.code(), FaultCode::ChannelBroken, "{source:?}");
        assert_eq!(ended(pair.near.as_ref().unwrap()), [0, 0, 1], "{source:?}");
        if let Some(mut near) = near {
            // The source gets the abort soon, regardless of what else the tunnel waits for.
            assert!(!matches!(near.read_once(&mut [0]), Ok(1..)), "{source:?}");
        }
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(2), "{source:?}: {took:?}");
    }
}

/// A source that has nothing to send for now has not ended its direction, so it gets the abort.
#[test]
fn a_consumer_that_resets_while_the_source_is_idle_aborts_the_channel() {
    let (listener, target) = listener();
    let exits = [("tcp", target, NEAR)];
    let scene = Scene::start(&Authority::new(), &exits, Limits::default());
    let mut near = scene.connect("tcp");
    let (mut far, _) = listener.accept().unwrap();
    near.write_all(b"request").unwrap();
    far.read_exact(&mut [0; 7]).unwrap();
    set_reset_on_close(&far).unwrap();
    let begin = Instant::now();
    drop(far);
    assert!(!matches!(near.read_once(&mut [0]), Ok(1..)));
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(ended(&scene.near), [0, 0, 1]);
    assert_eq!(ended(&scene.far), [0, 0, 1]);
    let why = |event: &Event| matches!(event, Event::Aborted { failure, .. } if failure.code() == FaultCode::ChannelBroken);
    // The tunnel updates its counters before it reports the event.
    scene.near_events.wait("abort", why);
    assert_eq!(scene.near_events.count(why), 1);
}

#[test]
fn refusals_have_a_reason_and_other_channels_continue() {
    let scratch = Scratch::new();
    let full = scratch.join("full");
    // A listener that never accepts, with a full backlog.
    let silent = UnixListener::bind(&full).unwrap();
    let _waiting = fill_backlog(&full);
    let missing = Target::Unix(scratch.join("none"));
    let refusing = {
        let (listener, target) = listener();
        drop(listener);
        target
    };
    let (listener, good) = listener();
    let exits = [
        ("good", good.clone(), NEAR),
        ("forbidden", good, "other.test"),
        ("missing", missing, NEAR),
        ("refusing", refusing, NEAR),
        ("full", Target::Unix(full.clone()), NEAR),
        ("broken", Target::Exec(vec!["/none".to_owned()]), NEAR),
    ];
    let limits = Limits {
        connect: Duration::from_millis(300),
        ..Limits::default()
    };
    let scene = Scene::start(&Authority::new(), &exits, limits);
    let mut near = scene.connect("good");
    let (mut far, _) = listener.accept().unwrap();
    for (route, code, word) in [
        ("forbidden", FaultCode::Unauthorised, "other.test"),
        ("missing", FaultCode::TargetUnreachable, "none"),
        ("refusing", FaultCode::TargetUnreachable, "refused"),
        ("full", FaultCode::TargetUnreachable, "timed out"),
        ("broken", FaultCode::TargetUnreachable, "No such file"),
    ] {
        let (was, text) = scene.refused(route);
        assert_eq!(was, code, "{route}: {text}");
        assert!(text.contains(word), "{route}: {text}");
    }
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    drop(silent);

    // A route that the peer has removed.
    let other = Routes::new(
        Vec::new(),
        vec![Exit {
            route: "another".to_owned(),
            allow: names(&[NEAR]),
            target: exits[0].1.clone(),
            window_bytes: WINDOW_BYTES,
        }],
    );
    let identity = identities(Authority::new().identity(&[FAR]));
    scene.far.replace(identity, &other.unwrap()).unwrap();
    let (was, text) = scene.refused("good");
    assert_eq!(was, FaultCode::UnknownRoute, "{text}");
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

/// Sends the tunnel an offer that requires these features, and returns the tunnel's answer.
fn answer(to: SocketAddr, authority: &Authority, required: Features) -> Opening {
    answer_to(to, authority, required, LaneSecurity::Tls)
}

fn answer_to(
    to: SocketAddr,
    authority: &Authority,
    required: Features,
    security: LaneSecurity,
) -> Opening {
    let tls = authority
        .identity(&[NEAR])
        .client(&Crypto::auto(), names(&[FAR]))
        .unwrap();
    let stream = TcpStream::connect(to).unwrap();
    let control = control::client(stream, &tls, soon()).unwrap();
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::VERIFY,
        required,
        security,
        session: [3; 16],
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).unwrap();
    control.send(&bytes).unwrap();
    let mut start = [0; PRELUDE_BYTES];
    control.receive_exact(&mut start, soon()).unwrap();
    let prelude = Prelude::decode(&start).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact(&mut body, soon()).unwrap();
    Opening::decode(&prelude, &body).unwrap()
}

#[test]
fn a_migration_that_dials_a_tunnel_is_refused_with_a_reason() {
    let pair = Pair::start(&Setup::default());
    let far = pair.far.as_ref().unwrap().address().unwrap();
    let Opening::Refuse(_, refusal) = answer(far, &pair.authority, Features::NONE) else {
        panic!("a migration is accepted")
    };
    assert_eq!(refusal.fault, FaultCode::FeatureMissing);
    let taken = answer(far, &pair.authority, Features::TUNNEL);
    assert!(matches!(taken, Opening::Select(_)), "{taken:?}");
}

/// Claim K10 of docs/security.
#[test]
fn i6_lanes_over_ipsec_or_in_the_clear_are_refused_unless_enabled() {
    let pair = Pair::start(&Setup::default());
    let far = pair.far.as_ref().unwrap().address().unwrap();
    for (security, what) in [
        (LaneSecurity::Ipsec, "not prepared"),
        (LaneSecurity::Plain, "plain lanes"),
    ] {
        let answer = answer_to(far, &pair.authority, Features::TUNNEL, security);
        let Opening::Refuse(_, refusal) = answer else {
            panic!("{security} lanes are taken: {answer:?}")
        };
        assert_eq!(refusal.fault, FaultCode::SecurityNotAgreed);
        assert!(refusal.text.contains(what), "{refusal}");
    }
}

#[test]
fn a_route_over_ipsec_needs_a_tunnel_with_ipsec() {
    let authority = Authority::new();
    let any = || TcpListener::bind("127.0.0.1:0").unwrap();
    let routes = |mode| {
        let entrance = Entrance {
            route: "ram".to_owned(),
            listen: Listen::OnDemand,
            to: "127.0.0.1:1".to_owned(),
            peers: names(&[FAR]),
            lanes: 2,
            window_bytes: WINDOW_BYTES,
            mode,
        };
        Routes::new(vec![entrance], Vec::new()).unwrap()
    };
    let near = || identities(authority.identity(&[NEAR]));
    let limits = Limits::default();
    let over_ipsec = routes(Mode::StripeOverIpsec);
    let refused = Tunnel::builder(any(), near(), &over_ipsec)
        .limits(limits)
        .start();
    assert!(matches!(refused, Err(TunnelError::NoIpsec { route }) if route == "ram"));
    let tunnel = Tunnel::builder(any(), near(), &routes(Mode::Stripe))
        .limits(limits)
        .start()
        .unwrap();
    let refused = tunnel.replace(near(), &over_ipsec);
    assert!(matches!(refused, Err(TunnelError::NoIpsec { .. })));
    assert_eq!(tunnel.routes().len(), 1, "the routes have changed");
}

#[test]
fn i7_silent_connections_keep_no_other_out() {
    let pair = Pair::start(&Setup::default());
    let far = pair.far.as_ref().unwrap().address().unwrap();
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(far).unwrap()).collect();
    let begin = Instant::now();
    let (mut near, mut far) = pair.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
    drop(silent);
}

#[test]
fn i8_channels_beyond_the_limit_are_refused_and_the_others_stay() {
    let pair = Pair::start(&Setup {
        limits: Limits {
            channels: 3,
            ..Limits::default()
        },
        ..Setup::default()
    });
    let open: Vec<_> = (0..3).map(|_| pair.channel()).collect();
    let mut surplus = pair.connect();
    assert_eq!(surplus.read_once(&mut [0]).unwrap(), 0);
    let refused = |event: &Event| matches!(event, Event::Refused { .. });
    let Event::Refused { failure, .. } = pair.near_events.wait("refusal", refused) else {
        unreachable!()
    };
    assert_eq!(failure.code(), FaultCode::Busy, "{failure}");
    for (near, far) in open {
        let (mut near, mut far) = (near, far);
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
}

/// A reload is applied completely or not at all.
#[test]
fn a_reload_that_cannot_listen_everywhere_changes_nothing() {
    let (listener, target) = listener();
    let exits = [("good", target, NEAR)];
    let authority = Authority::new();
    let scene = Scene::start(&authority, &exits, Limits::default());
    let at = scene.entrance("good");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let entrance = |route: &str, listen: SocketAddr, to: &str| Entrance {
        route: route.to_owned(),
        listen: Listen::Tcp(listen),
        to: to.to_owned(),
        peers: names(&[FAR]),
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    };
    let free = "127.0.0.1:0".parse().unwrap();
    let far = scene.far.address().unwrap().to_string();
    let replace = |entrances: Vec<Entrance>| {
        let routes = Routes::new(entrances, Vec::new()).unwrap();
        let identity = identities(authority.identity(&[NEAR]));
        scene.near.replace(identity, &routes)
    };
    let refused = replace(vec![
        entrance("good", free, "127.0.0.1:9"),
        entrance("new", free, &far),
        entrance("bad", taken.local_addr().unwrap(), &far),
    ]);
    assert!(matches!(refused, Err(TunnelError::Listen { .. })));
    assert_eq!(scene.near.entrances().len(), 1);
    let mut near = scene.connect("good");
    near.write_all(b"x").unwrap();
    listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();

    // A listener that remains configured is never closed, and its connections are carried as
    // before.
    let entrances = vec![entrance("good", free, &far), entrance("new", free, &far)];
    replace(entrances).unwrap();
    assert_eq!(scene.entrance("good"), at);
    assert_eq!(scene.near.entrances().len(), 2);
    let mut near = scene.connect("good");
    near.write_all(b"x").unwrap();
    listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();
    replace(Vec::new()).unwrap();
    let gone = TcpStream::connect(at).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::ConnectionRefused);
}
