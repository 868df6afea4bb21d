//! Limits of the rates of routes and peers, measured by the counters of the sending side.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_lane::policy::OldestTls;
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::{accepted, with_timeout};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{FAR, NEAR, identities};
use dunlin_tunnel::{
    DemandError, Entrance, Exit, Identities, LEAST_RATE, Listen, Mode, RelayExit, Routes, Target,
    Tunnel, WINDOW_BYTES,
};

const MIB: u64 = 1 << 20;
/// The limit in these tests, in bytes per second.
const RATE: u64 = 16 * MIB;
/// The time over which a rate is measured.
const PERIOD: Duration = Duration::from_millis(1500);

/// Two tunnels with the routes `ram` and `disk`, which are stripes or relays. Threads write to
/// their channels without a pause.
struct Scene {
    near: Tunnel,
    _far: Tunnel,
    routes: Routes,
    identities: Identities,
    scratch: Scratch,
    targets: Vec<(&'static str, UnixListener)>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

fn any() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

impl Scene {
    fn start(is_relay: bool, limited: impl FnOnce(Routes) -> Routes) -> Self {
        let (authority, scratch) = (Authority::new(), Scratch::new());
        let ways = ["ram", "disk"];
        let target = |route: &str| scratch.join(format!("{route}.out"));
        let targets = ways.map(|route| (route, UnixListener::bind(target(route)).unwrap()));
        let exit = |route: &str| Exit {
            route: route.to_owned(),
            allow: names(&[NEAR]),
            target: Target::Unix(target(route)),
            window_bytes: WINDOW_BYTES,
        };
        let relay = |route: &str| RelayExit {
            route: route.to_owned(),
            listen: "127.0.0.1:0".parse().unwrap(),
            allow: names(&[NEAR]),
            target: Target::Unix(target(route)),
            oldest_tls: OldestTls::V1_3,
        };
        let (exits, relays) = match is_relay {
            true => (Vec::new(), ways.map(relay).to_vec()),
            false => (ways.map(exit).to_vec(), Vec::new()),
        };
        let routes = Routes::new(Vec::new(), exits).unwrap();
        let routes = routes.with_relays(relays).unwrap();
        let far = identities(authority.identity(&[FAR]));
        let far = Tunnel::builder(any(), far, &routes).start().unwrap();
        let ports = far.relay_ports();
        let entrance = |route: &str| {
            let port = ports.iter().find(|(name, _)| name == route);
            let to = port.map_or(far.address().unwrap(), |(_, port)| *port);
            Entrance {
                route: route.to_owned(),
                listen: Listen::Unix(scratch.join(route)),
                to: to.to_string(),
                peers: names(&[FAR]),
                lanes: 2,
                window_bytes: WINDOW_BYTES,
                mode: match is_relay {
                    true => Mode::Relay(OldestTls::V1_3),
                    false => Mode::Stripe,
                },
            }
        };
        let entrances = ways.map(entrance).to_vec();
        let routes = limited(Routes::new(entrances, Vec::new()).unwrap());
        let own = identities(authority.identity(&[NEAR]));
        let near = Tunnel::builder(any(), own.clone(), &routes).start();
        Self {
            near: near.unwrap(),
            _far: far,
            routes,
            identities: own,
            scratch,
            targets: targets.into(),
            stop: Arc::default(),
            threads: Vec::new(),
        }
    }

    /// Opens a channel of a route. Threads write to the channel and read from it until the test
    /// ends.
    fn fill(&mut self, route: &str) {
        let near = UnixStream::connect(self.scratch.join(route)).unwrap();
        let mut near = with_timeout(near);
        let (_, target) = self.targets.iter().find(|(one, _)| *one == route).unwrap();
        let mut far = accepted(target);
        let stop = Arc::clone(&self.stop);
        self.threads.push(thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) && near.write_all(&[7; 1 << 16]).is_ok() {}
        }));
        self.threads.push(thread::spawn(move || {
            let mut bytes = vec![0; 1 << 20];
            while matches!(far.read(&mut bytes), Ok(1..)) {}
        }));
    }

    /// Bytes that the near side has read from the connections of each route, *ram* first.
    fn sent(&self) -> [u64; 2] {
        let routes = self.near.routes();
        ["ram", "disk"].map(|route| {
            let status = routes.iter().find(|one| one.route == route).unwrap();
            status.traffic.read_bytes
        })
    }

    /// The rate of each route over [`PERIOD`], in bytes per second.
    fn rates(&self) -> [f64; 2] {
        // Do not measure the bytes of an earlier limit and of the first burst.
        thread::sleep(Duration::from_millis(100));
        let (begin, before) = (Instant::now(), self.sent());
        thread::sleep(PERIOD);
        let (seconds, after) = (begin.elapsed().as_secs_f64(), self.sent());
        let rates = [0, 1].map(|at| (after[at] - before[at]) as f64 / seconds);
        println!(
            "{:.1} MiB/s, {:.1} MiB/s",
            rates[0] / MIB as f64,
            rates[1] / MIB as f64
        );
        rates
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Remove the limit, so that the bytes in the kernel's buffers arrive soon.
        let _ = self.near.set_rate("ram", None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Asserts that a measured rate is about `limit`. The rate may be 20 % lower, because other
/// processes on the host may slow the channels down.
fn assert_rate(rate: f64, limit: u64) {
    let part = rate / limit as f64;
    assert!((0.8..1.05).contains(&part), "{part:.3} of the limit");
}

#[test]
fn a_routes_limit_holds_for_its_channels_together_and_for_no_other_route() {
    let mut scene = Scene::start(false, |routes| routes.with_rate("ram", RATE));
    for route in ["ram", "ram", "ram", "disk"] {
        scene.fill(route);
    }
    let [ram, disk] = scene.rates();
    assert_rate(ram, RATE);
    assert!(disk > 3.0 * RATE as f64, "{disk}");
}

#[test]
fn a_peers_limit_holds_for_all_routes_together() {
    let peer = FAR.parse().unwrap();
    let mut scene = Scene::start(false, |routes| routes.with_peer_rate(&peer, RATE));
    for route in ["ram", "disk"] {
        scene.fill(route);
    }
    let [ram, disk] = scene.rates();
    assert_rate(ram + disk, RATE);
    // Neither route is starved.
    assert!(ram.min(disk) > RATE as f64 / 8.0, "{ram} {disk}");
}

#[test]
fn a_limit_changes_at_once_and_a_reload_restores_the_configured_one() {
    let mut scene = Scene::start(false, |routes| routes.with_rate("ram", LEAST_RATE));
    scene.fill("ram");
    scene.near.set_rate("ram", Some(RATE)).unwrap();
    assert_rate(scene.rates()[0], RATE);
    let peer = FAR.parse().unwrap();
    scene.near.set_peer_rate(&peer, Some(RATE / 2));
    assert_rate(scene.rates()[0], RATE / 2);
    let status = scene.near.status();
    assert_eq!(status[0].rate, Some(RATE / 2));
    scene.near.set_rate("ram", None).unwrap();
    scene.near.set_peer_rate(&peer, None);
    assert!(scene.rates()[0] > 3.0 * RATE as f64);
    let routes = scene.routes.clone();
    scene
        .near
        .replace(scene.identities.clone(), &routes)
        .unwrap();
    assert_rate(scene.rates()[0], LEAST_RATE);
    assert_eq!(scene.near.routes()[1].rate, Some(LEAST_RATE));
    let unknown = scene.near.set_rate("none", None).unwrap_err();
    assert!(matches!(unknown, DemandError::Route { .. }));
}

#[test]
fn relays_keep_the_limits_of_their_route_and_of_the_peer() {
    let peer = FAR.parse().unwrap();
    let mut scene = Scene::start(true, |routes| {
        let routes = routes.with_rate("ram", RATE / 4);
        routes.with_peer_rate(&peer, RATE)
    });
    for route in ["ram", "disk"] {
        scene.fill(route);
    }
    let [ram, disk] = scene.rates();
    assert_rate(ram, RATE / 4);
    assert_rate(ram + disk, RATE);
}
