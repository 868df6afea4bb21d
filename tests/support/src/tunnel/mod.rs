//! Two tunnels on loopback with real certificates. Ordinary sockets take the place of hypervisors.

pub mod peer;
pub mod relay;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_lane::identity::Identity;
use dunlin_lane::offload::Offload;
use dunlin_lane::provider::Crypto;
use dunlin_tunnel::{
    Entrance, Event, Exit, Identities, Limits, Listen, Mode, Routes, Target, Tunnel, WINDOW_BYTES,
};

use crate::lane::{Authority, load, names};
use dunlin_test_base::Scratch;
pub use dunlin_test_base::sockets::TIMEOUT;
use dunlin_test_base::sockets::{accepted, with_timeout};
use relay::Relay;

pub const NEAR: &str = "near.test";
/// The name of a second peer that the far side admits, in addition to [`NEAR`].
pub const OTHER: &str = "other.test";
pub const FAR: &str = "far.test";
pub fn identities(identity: Identity) -> Identities {
    identities_with(identity, offload())
}

/// Where records are sealed if a test does not specify it: the value of the variable
/// `DUNLIN_OFFLOAD`, or [`Offload::Auto`].
fn offload() -> Offload {
    match std::env::var("DUNLIN_OFFLOAD") {
        Ok(offload) => offload.parse().unwrap(),
        Err(_) => Offload::Auto,
    }
}

pub fn identities_with(identity: Identity, offload: Offload) -> Identities {
    let identity = Arc::new(identity);
    Identities {
        connecting: Arc::clone(&identity),
        accepting: identity,
        crypto: Crypto {
            offload,
            ..Crypto::auto()
        },
    }
}

/// The events that a tunnel has reported.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Event>>>);

impl Events {
    pub fn observer(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let events = self.clone();
        move |event: &Event| events.0.lock().unwrap().push(event.clone())
    }

    pub fn all(&self) -> Vec<String> {
        let events = self.0.lock().unwrap();
        events.iter().map(ToString::to_string).collect()
    }

    /// Waits for an event for which `which` returns true. A failure message calls it `what`.
    pub fn wait(&self, what: &str, which: impl Fn(&Event) -> bool) -> Event {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(event) = self.0.lock().unwrap().iter().find(|event| which(event)) {
                return event.clone();
            }
            assert!(Instant::now() < until, "no {what} in {:#?}", self.all());
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        let events = self.0.lock().unwrap();
        events.iter().filter(|event| which(event)).count()
    }
}

/// The settings of a pair of tunnels.
pub struct Setup {
    pub lanes: u16,
    pub window_bytes: u64,
    pub limits: Limits,
    /// Whether a [`Relay`] connects the tunnels.
    pub relayed: bool,
    /// Whether the near side connects from an address at which it does not listen, so that the far
    /// side cannot connect to the near side.
    pub is_walled: bool,
    /// Whether the test itself acts as the hypervisor on the far side.
    pub is_target: bool,
    /// Where records are sealed and opened on the near side and on the far side.
    pub offload: [Offload; 2],
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            lanes: 3,
            window_bytes: WINDOW_BYTES,
            limits: Limits::default(),
            relayed: false,
            is_walled: false,
            is_target: true,
            offload: [offload(); 2],
        }
    }
}

/// Two tunnels with one route, *ram*, from a unix socket to a unix socket.
pub struct Pair {
    pub near: Option<Tunnel>,
    pub far: Option<Tunnel>,
    pub near_events: Events,
    pub far_events: Events,
    pub relay: Option<Relay>,
    pub scratch: Scratch,
    pub authority: Authority,
    /// Another authority, which both sides trust.
    pub other: Authority,
    pub near_routes: Routes,
    pub far_routes: Routes,
    listener: Option<UnixListener>,
}

impl Pair {
    pub fn start(setup: &Setup) -> Self {
        let (authority, other) = (Authority::new(), Authority::named("another authority"));
        let host = |name| load(&authority.host_trusting(&[name], &[&other]));
        let scratch = Scratch::new();
        let path = |name: &str| scratch.join(name);
        let bind = || UnixListener::bind(path("target")).unwrap();
        let listener = setup.is_target.then(bind);
        let far_routes = Routes::new(
            Vec::new(),
            vec![Exit {
                route: "ram".to_owned(),
                allow: names(&[NEAR, OTHER]),
                target: Target::Unix(path("target")),
                window_bytes: setup.window_bytes,
            }],
        )
        .unwrap();
        let far_events = Events::default();
        let far = Tunnel::builder(
            TcpListener::bind("127.0.0.1:0").unwrap(),
            identities_with(host(FAR), setup.offload[1]),
            &far_routes,
        )
        .limits(Limits {
            lanes: setup.lanes,
            ..setup.limits
        })
        .observer(far_events.observer())
        .start()
        .unwrap();
        let relay = setup.relayed.then(|| Relay::start(far.address().unwrap()));
        let to = relay
            .as_ref()
            .map_or(far.address().unwrap(), |relay| relay.address);
        let near_routes = Routes::new(
            vec![Entrance {
                route: "ram".to_owned(),
                listen: Listen::Unix(path("entrance")),
                to: to.to_string(),
                peers: names(&[FAR]),
                lanes: setup.lanes,
                window_bytes: setup.window_bytes,
                mode: Mode::Stripe,
            }],
            Vec::new(),
        )
        .unwrap();
        let near_events = Events::default();
        let near_host = if setup.is_walled {
            "127.0.0.2"
        } else {
            "127.0.0.1"
        };
        let near = Tunnel::builder(
            TcpListener::bind((near_host, 0)).unwrap(),
            identities_with(host(NEAR), setup.offload[0]),
            &near_routes,
        )
        .limits(setup.limits)
        .observer(near_events.observer())
        .start()
        .unwrap();
        Self {
            near: Some(near),
            far: Some(far),
            near_events,
            far_events,
            relay,
            scratch,
            authority,
            other,
            near_routes,
            far_routes,
            listener,
        }
    }

    pub fn entrance(&self) -> PathBuf {
        self.scratch.join("entrance")
    }

    /// The path at which the hypervisor of the far side listens.
    pub fn target(&self) -> PathBuf {
        self.scratch.join("target")
    }

    pub fn connect(&self) -> UnixStream {
        with_timeout(UnixStream::connect(self.entrance()).unwrap())
    }

    /// The next connection at the target.
    pub fn accept(&self) -> UnixStream {
        accepted(self.listener.as_ref().unwrap())
    }

    /// Returns the identity of a host of this name from the other authority, which both
    /// sides trust.
    pub fn twin(&self, name: &str) -> Identity {
        load(&self.other.host_trusting(&[name], &[&self.authority]))
    }

    /// Both ends of a new channel.
    pub fn channel(&self) -> (UnixStream, UnixStream) {
        (self.connect(), self.accept())
    }
}

/// Fills the backlog of a unix socket on which the test accepts no connections; returns the
/// connections.
pub fn fill_backlog(path: &Path) -> Vec<OwnedFd> {
    let soon = || Instant::now() + Duration::from_millis(20);
    let (_waker, stop) = dunlin_linux::poll::waker().unwrap();
    let connect = || dunlin_linux::socket::connect_unix(path, soon(), &stop).ok();
    std::iter::from_fn(|| connect().map(OwnedFd::from)).collect()
}

/// Pseudo-random numbers from a seed.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, most: u64) -> u64 {
        self.number() % most.max(1)
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            let number = self.number().to_le_bytes();
            part.copy_from_slice(&number[..part.len()]);
        }
    }
}

/// Sends `bytes` bytes, which `seed` determines, in parts of random size. Then sends the end of
/// the stream.
pub fn send(stream: &UnixStream, seed: u64, bytes: usize) -> JoinHandle<()> {
    let mut stream = stream.try_clone().unwrap();
    thread::spawn(move || {
        let mut sizes = Random::new(seed + 1);
        let mut content = Random::new(seed);
        let mut all = vec![0; bytes];
        content.fill(&mut all);
        let mut left = &all[..];
        while !left.is_empty() {
            let most = [1, 100, 5000, 300_000][sizes.below(4) as usize];
            let count = (1 + sizes.below(most) as usize).min(left.len());
            stream.write_all(&left[..count]).unwrap();
            left = &left[count..];
        }
        stream.shutdown(Shutdown::Write).unwrap();
    })
}

/// Reads to the end and compares the bytes with those that [`send`] sends.
pub fn expect(stream: &UnixStream, seed: u64, bytes: usize) -> JoinHandle<()> {
    let mut stream = stream.try_clone().unwrap();
    thread::spawn(move || {
        let mut expected = vec![0; bytes];
        Random::new(seed).fill(&mut expected);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), expected.len(), "the number of bytes differs");
        let first = all.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(first, None, "a byte differs at this index");
    })
}

/// Joins threads and fails if one does not end in time.
pub fn join(threads: Vec<JoinHandle<()>>) {
    let (sender, done): (_, Receiver<Result<(), _>>) = channel();
    let count = threads.len();
    for one in threads {
        let sender = sender.clone();
        thread::spawn(move || sender.send(one.join()));
    }
    for _ in 0..count {
        let joined = done.recv_timeout(TIMEOUT * 4).expect("a thread hangs");
        if let Err(panic) = joined {
            std::panic::resume_unwind(panic);
        }
    }
}
