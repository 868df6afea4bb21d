//! A TCP relay in front of the far tunnel. It can delay, hold, stall, cut, swallow or refuse
//! connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::TIMEOUT;

/// How long a delayed connection keeps the bytes that it has read before it forwards them.
const DELAY: Duration = Duration::from_millis(10);

/// Forwards connections until a test calls a method that delays, holds, stalls, cuts, swallows or
/// refuses them.
#[derive(Clone)]
pub struct Relay {
    pub address: SocketAddr,
    links: Arc<Mutex<Vec<Arc<Link>>>>,
    refuses: Arc<AtomicBool>,
    /// Whether the next connection ends the listener.
    ends: Arc<AtomicBool>,
    /// The number of the connection that is delayed.
    delayed: Arc<AtomicUsize>,
    /// Whether bytes from the far side are held.
    held: Arc<AtomicBool>,
    /// Bytes received from the far side.
    answered: Arc<AtomicU64>,
}

/// One connection; the first is the control lane.
struct Link {
    near: TcpStream,
    far: TcpStream,
    swallows: AtomicBool,
    /// Whether nothing more is read from the near side.
    stalls: AtomicBool,
    is_late: bool,
    held: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    forwarded: AtomicU64,
}

impl Relay {
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self {
            address: listener.local_addr().unwrap(),
            links: Arc::default(),
            refuses: Arc::default(),
            ends: Arc::default(),
            delayed: Arc::new(AtomicUsize::new(usize::MAX)),
            held: Arc::default(),
            answered: Arc::default(),
        };
        let own = relay.clone();
        // The thread ends with the process, or by `unlisten`.
        thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.unwrap();
                if own.ends.load(Ordering::SeqCst) {
                    return;
                }
                if own.refuses.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(to) else {
                    continue;
                };
                let link = Arc::new(Link {
                    near,
                    far,
                    swallows: AtomicBool::new(false),
                    stalls: AtomicBool::new(false),
                    is_late: own.count() == own.delayed.load(Ordering::SeqCst),
                    held: Arc::clone(&own.held),
                    answered: Arc::clone(&own.answered),
                    forwarded: AtomicU64::new(0),
                });
                own.links.lock().unwrap().push(Arc::clone(&link));
                for outward in [true, false] {
                    let link = Arc::clone(&link);
                    thread::spawn(move || link.forward(outward));
                }
            }
        });
        relay
    }

    /// The number of connections so far.
    pub fn count(&self) -> usize {
        self.links.lock().unwrap().len()
    }

    /// Bytes that a connection has carried to the far side.
    pub fn forwarded(&self, link: usize) -> Option<u64> {
        Some(self.link(link)?.forwarded.load(Ordering::SeqCst))
    }

    /// Waits until a connection has carried `bytes` bytes to the far side.
    pub fn wait_forwarded(&self, link: usize, bytes: u64) {
        let until = Instant::now() + TIMEOUT;
        while self.forwarded(link) < Some(bytes) {
            assert!(
                Instant::now() < until,
                "timeout: connection {link} has not carried {bytes} bytes"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a data lane other than `but` has carried `bytes` bytes to the far side, and
    /// returns its number. A lane on which the far side sends carries little in this direction.
    pub fn wait_busy(&self, bytes: u64, but: Option<usize>) -> usize {
        let until = Instant::now() + TIMEOUT;
        loop {
            let lanes = (1..self.count()).filter(|lane| Some(*lane) != but);
            let busy = |lane: &usize| self.forwarded(*lane) >= Some(bytes);
            if let Some(lane) = lanes.into_iter().find(busy) {
                return lane;
            }
            assert!(Instant::now() < until, "no lane has carried {bytes} bytes");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a data lane other than `but` carries `bytes` bytes more to the far side, and returns
    /// its number.
    pub fn wait_carrying(&self, bytes: u64, but: usize) -> usize {
        let until = Instant::now() + TIMEOUT;
        let mut before = Vec::new();
        loop {
            for lane in 1..self.count() {
                let carried = self.forwarded(lane).unwrap_or(0);
                if before.len() < lane {
                    before.push(carried);
                }
                if lane != but && carried >= before[lane - 1] + bytes {
                    return lane;
                }
            }
            assert!(Instant::now() < until, "no lane carries bytes");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The largest number of bytes that a data lane has carried to the far side.
    pub fn busiest(&self) -> u64 {
        let lanes = (1..self.count()).filter_map(|lane| self.forwarded(lane));
        lanes.max().unwrap_or(0)
    }

    /// Holds the bytes that the far side sends on every connection. Calls `begin`, waits
    /// until some bytes are held, calls `then`, and releases the bytes.
    pub fn hold(&self, begin: impl FnOnce(), then: impl FnOnce()) {
        self.held.store(true, Ordering::SeqCst);
        let before = self.answered.load(Ordering::SeqCst);
        begin();
        let until = Instant::now() + TIMEOUT;
        while self.answered.load(Ordering::SeqCst) == before {
            assert!(
                Instant::now() < until,
                "timeout: no bytes from the far side"
            );
            thread::sleep(Duration::from_millis(1));
        }
        then();
        self.held.store(false, Ordering::SeqCst);
    }

    /// Closes a connection.
    pub fn cut(&self, link: usize) {
        if let Some(link) = self.link(link) {
            let _ = link.near.shutdown(Shutdown::Both);
            let _ = link.far.shutdown(Shutdown::Both);
        }
    }

    /// Reads everything on a connection and forwards nothing.
    pub fn swallow(&self, link: usize) {
        self.link(link)
            .unwrap()
            .swallows
            .store(true, Ordering::SeqCst);
    }

    /// With `stalls`, forwards what was read from the near side on a connection, and reads nothing
    /// more from there, so that the connection becomes full. Otherwise reads again.
    pub fn stall(&self, link: usize, stalls: bool) {
        let link = self.link(link).unwrap();
        link.stalls.store(stalls, Ordering::SeqCst);
    }

    /// Delays everything by 10 ms on the connection that will have this number.
    pub fn delay(&self, link: usize) {
        self.delayed.store(link, Ordering::SeqCst);
    }

    /// With `refuses`, closes every later connection at once. Otherwise forwards later connections
    /// again.
    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }

    /// Closes the listener, so that the kernel refuses new connections.
    pub fn unlisten(&self) {
        self.ends.store(true, Ordering::SeqCst);
        while TcpStream::connect(self.address).is_ok() {}
    }

    /// Swallows everything on all connections, and refuses new ones.
    pub fn vanish(&self) {
        self.refuse(true);
        for link in &*self.links.lock().unwrap() {
            link.swallows.store(true, Ordering::SeqCst);
        }
    }

    fn link(&self, link: usize) -> Option<Arc<Link>> {
        self.links.lock().unwrap().get(link).cloned()
    }
}

impl Link {
    fn forward(&self, outward: bool) {
        let (mut from, mut to) = match outward {
            true => (&self.near, &self.far),
            false => (&self.far, &self.near),
        };
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if self.swallows.load(Ordering::SeqCst) {
                continue;
            }
            if !outward {
                self.answered.fetch_add(count as u64, Ordering::SeqCst);
                while self.held.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            if self.is_late {
                thread::sleep(DELAY);
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
            if outward {
                self.forwarded.fetch_add(count as u64, Ordering::SeqCst);
                while self.stalls.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        if !self.swallows.load(Ordering::SeqCst) {
            let _ = to.shutdown(Shutdown::Write);
        }
    }
}
