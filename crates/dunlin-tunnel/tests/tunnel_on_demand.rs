//! Listeners that are opened while the tunnel runs, one per migration, and the parameters of their
//! channels.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::fault::FaultCode;
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::{ReadOnce as _, accepted, with_timeout};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{Events, FAR, NEAR, TIMEOUT, identities};
use dunlin_tunnel::{
    Demand, DemandError, Entrance, Event, Exit, FileAccess, Limits, Listen, ListenerStatus,
    MAX_ON_DEMAND_LISTENERS, Mode, OnDemandListener, Parameter, Routes, Target, Tunnel,
    WINDOW_BYTES,
};

/// Two tunnels with three routes without listeners: *ram* to `VM.sock`, *plain* to one fixed
/// socket, and *echo* to a program.
struct Scene {
    near: Tunnel,
    far: Tunnel,
    near_events: Events,
    scratch: Scratch,
    authority: Authority,
}

fn entrance(route: &str, to: &str) -> Entrance {
    Entrance {
        route: route.to_owned(),
        listen: Listen::OnDemand,
        to: to.to_owned(),
        peers: names(&[FAR]),
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    }
}

impl Scene {
    fn start() -> Self {
        let (authority, scratch) = (Authority::new(), Scratch::new());
        let any = || TcpListener::bind("127.0.0.1:0").unwrap();
        let exit = |route: &str, target| Exit {
            route: route.to_owned(),
            allow: names(&[NEAR]),
            target,
            window_bytes: WINDOW_BYTES,
        };
        let words = [
            "/bin/sh",
            "-c",
            "echo \"$1 $2\"; cat",
            "sh",
            "{vm}",
            "disk-{vm}",
        ];
        let exits = vec![
            exit("ram", Target::Unix(scratch.join("{vm}.sock"))),
            exit("plain", Target::Unix(scratch.join("plain.sock"))),
            exit("echo", Target::Exec(words.map(str::to_owned).to_vec())),
        ];
        let limits = Limits::default();
        let far = identities(authority.identity(&[FAR]));
        let routes = Routes::new(Vec::new(), exits).unwrap();
        let far = Tunnel::builder(any(), far, &routes)
            .limits(limits)
            .start()
            .unwrap();
        let near_events = Events::default();
        let near = identities(authority.identity(&[NEAR]));
        let to = far.address().unwrap().to_string();
        let entrances = ["ram", "plain", "echo"].map(|route| entrance(route, &to));
        let routes = Routes::new(entrances.to_vec(), Vec::new()).unwrap();
        let near = Tunnel::builder(any(), near, &routes)
            .limits(limits)
            .observer(near_events.observer())
            .start()
            .unwrap();
        Self {
            near,
            far,
            near_events,
            scratch,
            authority,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    fn target(&self, name: &str) -> UnixListener {
        UnixListener::bind(self.path(name)).unwrap()
    }

    fn demand(&self, route: &str, parameter: Option<&str>, socket: &str) -> Demand {
        Demand {
            route: route.to_owned(),
            parameter: parameter.map(|text| text.parse().unwrap()),
            listen: Listen::Unix(self.path(socket)),
            lanes: None,
            access: FileAccess::default(),
            once: false,
        }
    }

    fn open(&self, route: &str, parameter: Option<&str>, socket: &str) -> OnDemandListener {
        let demand = self.demand(route, parameter, socket);
        self.near.open(&demand).unwrap()
    }
}

fn connect(listener: &OnDemandListener) -> UnixStream {
    let Listen::Unix(path) = listener.listen() else {
        panic!("{}", listener.listen())
    };
    with_timeout(UnixStream::connect(path).unwrap())
}

fn over(listener: &OnDemandListener) -> ListenerStatus {
    let status = listener.wait(Some(Instant::now() + TIMEOUT));
    assert!(status.is_over(), "{status:?}");
    status
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

#[test]
fn each_migration_has_a_listener_that_closes_with_its_last_channel() {
    let scene = Scene::start();
    let (web, mail) = (scene.target("web.sock"), scene.target("mail.sock"));
    let first = scene.open("ram", Some("vm=web"), "first");
    let second = scene.open("ram", Some("vm=mail"), "second");
    assert_ne!(first.number(), second.number());
    // Two listeners are open at the same time, each for its own VM.
    let (mut near_web, mut near_mail) = (connect(&first), connect(&second));
    near_web.write_all(b"w").unwrap();
    near_mail.write_all(b"m").unwrap();
    let (mut far_web, mut far_mail) = (accepted(&web), accepted(&mail));
    let mut byte = [0];
    far_web.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"w");
    far_mail.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"m");
    // While a second channel is open, the listener stays open after the first channel has ended.
    let near_more = connect(&first);
    let far_more = accepted(&web);
    drop((near_web, far_web));
    let until = Instant::now() + TIMEOUT;
    while first.status().closed == 0 {
        assert!(Instant::now() < until, "{:?}", first.status());
        thread::sleep(Duration::from_millis(5));
    }
    assert!(first.status().listens);
    drop((near_more, far_more));
    let status = over(&first);
    assert_eq!((status.closed, status.failed), (2, 0), "{status:?}");
    assert!(!is_there(&scene.path("first")));
    // The other listener stays open.
    near_mail.write_all(b"m").unwrap();
    far_mail.read_exact(&mut byte).unwrap();
    let numbers: Vec<u64> = scene
        .near
        .on_demand_listeners()
        .iter()
        .map(OnDemandListener::number)
        .collect();
    assert_eq!(numbers, [second.number()]);
    let routes = scene.near.routes();
    let ram = routes.iter().find(|one| one.route == "ram").unwrap();
    assert_eq!((ram.traffic.open, ram.traffic.closed), (1, 2), "{ram:?}");
    assert_eq!(ram.traffic.read_bytes, 3, "{ram:?}");
    // The tunnel counts bytes after it has written them, so the reader may have the bytes before
    // they are counted.
    let written = || {
        let routes = scene.far.routes();
        let ram = routes.iter().find(|one| one.route == "ram").unwrap();
        ram.traffic.written_bytes
    };
    while written() != 3 {
        assert!(Instant::now() < until, "{}", written());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_closed_listener_accepts_no_more_and_its_channels_continue() {
    let scene = Scene::start();
    let plain = scene.target("plain.sock");
    let listener = scene.open("plain", None, "entrance");
    let mut near = connect(&listener);
    let mut far = accepted(&plain);
    listener.close();
    let until = Instant::now() + TIMEOUT;
    while is_there(&scene.path("entrance")) {
        assert!(Instant::now() < until, "the socket file stays");
        thread::sleep(Duration::from_millis(5));
    }
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    assert_eq!(listener.status().open, 1);
    drop((near, far));
    assert_eq!(over(&listener).closed, 1);

    let unused = scene.open("plain", None, "entrance");
    unused.close();
    assert_eq!(over(&unused), ListenerStatus::default());
}

#[test]
fn a_listener_for_one_connection_accepts_exactly_one() {
    let scene = Scene::start();
    let plain = scene.target("plain.sock");
    let demand = Demand {
        once: true,
        ..scene.demand("plain", None, "entrance")
    };
    let listener = scene.near.open(&demand).unwrap();
    let near = connect(&listener);
    let far = accepted(&plain);
    let until = Instant::now() + TIMEOUT;
    while listener.status().listens {
        assert!(Instant::now() < until, "the listener stays open");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(!is_there(&scene.path("entrance")));
    drop((near, far));
    assert_eq!(over(&listener).closed, 1);
}

#[test]
fn i7_an_invalid_parameter_is_refused_by_the_far_side_with_a_reason() {
    let scene = Scene::start();
    // Listen at all paths to which a mistake would lead, so that a connection to a wrong path would
    // succeed.
    let _all = [
        scene.target("web.sock"),
        scene.target(".sock"),
        scene.target("{vm}.sock"),
    ];
    let _plain = scene.target("plain.sock");
    for (route, parameter, word) in [
        ("plain", Some("vm=web"), "takes no parameter"),
        ("ram", None, "needs a parameter vm=VALUE"),
        ("ram", Some("disk=web"), "needs a parameter vm, not disk"),
    ] {
        let listener = scene.open(route, parameter, "entrance");
        let mut near = connect(&listener);
        // The connection is reset or closed, and no bytes arrive.
        assert!(!matches!(near.read_once(&mut [0]), Ok(1..)));
        let status = over(&listener);
        let why = status.why.unwrap();
        assert_eq!(
            (status.failed, why.code()),
            (1, FaultCode::ParameterRefused)
        );
        assert!(why.text().contains(word), "{why}");
        let refused = |event: &Event| matches!(event, Event::Refused { failure, .. } if failure.text().contains(word));
        scene.near_events.wait(word, refused);
    }
}

#[test]
fn a_parameter_is_part_of_a_programs_arguments() {
    let scene = Scene::start();
    let listener = scene.open("echo", Some("vm=web-1"), "entrance");
    let mut near = connect(&listener);
    near.write_all(b"and back").unwrap();
    near.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = String::new();
    near.read_to_string(&mut said).unwrap();
    assert_eq!(said, "web-1 disk-web-1\nand back");
    drop(near);
    assert_eq!(over(&listener).closed, 1);
}

#[test]
fn i7_an_invalid_demand_returns_an_error_and_opens_no_listener() {
    let scene = Scene::start();
    for bad in ["", "web", "vm=", "vm=..", "vm=a/b", "vm=a\0", "=x", "vm=-x"] {
        assert!(bad.parse::<Parameter>().is_err(), "{bad:?}");
    }
    let bad = |demand: &Demand| scene.near.open(demand).unwrap_err();
    let unknown = bad(&scene.demand("none", None, "entrance"));
    assert!(matches!(unknown, DemandError::Route { .. }), "{unknown}");
    let lanes = bad(&Demand {
        lanes: Some(129),
        ..scene.demand("plain", None, "entrance")
    });
    assert!(matches!(lanes, DemandError::Lanes { .. }), "{lanes}");
    fs::write(scene.path("file"), "").unwrap();
    let taken = bad(&scene.demand("plain", None, "file"));
    assert!(matches!(taken, DemandError::Listen { .. }), "{taken}");
    assert!(scene.near.on_demand_listeners().is_empty());
    let target = scene.near.routes();
    assert!(target.iter().all(|one| one.target.is_none()));
}

#[test]
fn i8_listeners_are_limited_and_closed_ones_make_room() {
    let scene = Scene::start();
    let opened: Vec<OnDemandListener> = (0..MAX_ON_DEMAND_LISTENERS)
        .map(|number| scene.open("plain", None, &number.to_string()))
        .collect();
    let surplus = scene.demand("plain", None, "surplus");
    let busy = scene.near.open(&surplus).unwrap_err();
    assert!(matches!(busy, DemandError::Busy), "{busy}");
    opened[7].close();
    over(&opened[7]);
    scene.near.open(&surplus).unwrap();
}

#[test]
fn removing_a_route_closes_its_listeners_and_no_channel() {
    let scene = Scene::start();
    let plain = scene.target("plain.sock");
    let listener = scene.open("plain", None, "entrance");
    let stays = scene.open("ram", Some("vm=web"), "other");
    let mut near = connect(&listener);
    let mut far = accepted(&plain);
    let to = scene.far.address().unwrap().to_string();
    let left = Routes::new(vec![entrance("ram", &to)], Vec::new()).unwrap();
    let identity = identities(scene.authority.identity(&[NEAR]));
    scene.near.replace(identity, &left).unwrap();
    let until = Instant::now() + TIMEOUT;
    while listener.status().listens {
        assert!(Instant::now() < until, "the listener stays open");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(stays.status().listens);
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    // A draining tunnel closes all listeners.
    drop((near, far));
    assert_eq!(scene.near.drain(TIMEOUT), 0);
    assert_eq!(over(&stays), ListenerStatus::default());
    let ending = scene.near.open(&scene.demand("ram", None, "late"));
    assert!(matches!(ending, Err(DemandError::Ending)));
}

/// At first each direction has one lane, because that is the route's lane count. More lanes are
/// opened when a demand asks for them, even if the tunnels are already connected.
#[test]
fn a_demand_raises_the_lane_count_of_connected_peers() {
    let scene = Scene::start();
    let plain = scene.target("plain.sock");
    // Sends until `wanted` lanes are open or `enough` bytes have arrived. Returns the largest
    // number of lanes seen.
    let lanes = |listener: &OnDemandListener, wanted: usize, enough: u64| {
        let near = connect(listener);
        let mut far = accepted(&plain);
        let mut out = near.try_clone().unwrap();
        let sent = thread::spawn(move || while out.write_all(&[7; 1 << 16]).is_ok() {});
        let (mut most, mut came) = (0, 0);
        let mut buffer = vec![0; 1 << 20];
        let until = Instant::now() + TIMEOUT;
        while most < wanted && came < enough {
            assert!(Instant::now() < until, "{most} lanes");
            came += far.read_once(&mut buffer).unwrap() as u64;
            let status = scene.near.status();
            most = most.max(status.iter().map(|one| one.lanes).max().unwrap_or(0));
        }
        drop((near, far));
        sent.join().unwrap();
        assert_eq!(over(listener).failed, 1);
        most
    };
    let first = scene.open("plain", None, "first");
    assert_eq!(lanes(&first, usize::MAX, 48 << 20), 2);
    let demand = Demand {
        lanes: Some(3),
        ..scene.demand("plain", None, "second")
    };
    let second = scene.near.open(&demand).unwrap();
    assert_eq!(lanes(&second, 4, u64::MAX), 4);
}

/// A listener for a VM that leaves may be in the directory of the targets. A peer that names it must
/// not send through it under this host's identity.
#[test]
fn i7_a_peer_does_not_reach_the_listener_of_a_vm_that_leaves() {
    let scene = Scene::start();
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: Target::Unix(scene.path("{vm}.sock")),
        window_bytes: WINDOW_BYTES,
    };
    let to = scene.near.address().unwrap().to_string();
    let routes = Routes::new(vec![entrance("leave", &to)], vec![exit]).unwrap();
    let own = identities(scene.authority.identity(&[FAR]));
    scene.far.replace(own, &routes).unwrap();
    let leaving = scene.demand("leave", None, "web.sock");
    let leaving = scene.far.open(&leaving).unwrap();
    let listener = scene.open("ram", Some("vm=web"), "in");
    let mut client = connect(&listener);
    assert!(!matches!(client.read_once(&mut [0]), Ok(1..)));
    let refused = scene
        .near_events
        .wait("refusal", |one| matches!(one, Event::Refused { .. }));
    assert_eq!(refused.fault(), Some(FaultCode::Unauthorised));
    assert_eq!(
        leaving.status(),
        ListenerStatus {
            listens: true,
            ..ListenerStatus::default()
        }
    );
}
