//! A link's delay: the time between the sending and the arrival of each packet.
//!
//! One thread has a TUN device at each end of the link and forwards whole packets. TCP runs only
//! on the two hosts, and sees the round-trip time of a long link.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::linux::tun::{PACKET_BYTES, Tun};
use dunlin_linux::poll::{Interest, Waker, poll, waker};

/// The maximum number of bytes in flight in one direction. It is enough for 10 Gbit/s with a delay
/// of 50 ms. Further packets are dropped.
const UNDER_WAY_BYTES: usize = 64 << 20;

/// The number of packets that the thread reads in one direction before it serves the other
/// direction.
const BURST: usize = 64;

/// The forwarding thread. Dropping it ends the thread and removes both devices.
#[derive(Debug)]
pub(super) struct Delay {
    waker: Waker,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Delay {
    /// Starts to forward packets in both directions. Each packet is delayed by `delay` plus up to
    /// 2 ms.
    pub(super) fn start(near: Tun, far: Tun, delay: Duration) -> io::Result<Self> {
        let (waker, wakeup) = waker()?;
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        let thread = thread::Builder::new()
            .name("delay".to_owned())
            .spawn(move || {
                let mut there = OneWay::new(delay);
                let mut back = OneWay::new(delay);
                while !seen.load(Ordering::Acquire) {
                    let now = Instant::now();
                    there.deliver(now, &far);
                    back.deliver(now, &near);
                    let due = [there.due(), back.due()].into_iter().flatten().min();
                    let wait = due.map(|due| due.saturating_duration_since(now));
                    let read = |fd| Interest {
                        fd,
                        read: true,
                        write: false,
                    };
                    let interests = [
                        read(std::os::fd::AsFd::as_fd(&near)),
                        read(std::os::fd::AsFd::as_fd(&far)),
                        read(std::os::fd::AsFd::as_fd(&wakeup)),
                    ];
                    let Ok(ready) = poll(&interests, wait) else {
                        return;
                    };
                    // poll(2) reports a device that is down as ready, but no packet can be read
                    // from it. Wait briefly, so that the loop does not occupy a CPU.
                    let taken = usize::from(ready[0]) * there.take(&near)
                        + usize::from(ready[1]) * back.take(&far);
                    if taken == 0 && (ready[0] || ready[1]) {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            })?;
        Ok(Self {
            waker,
            ended,
            thread: Some(thread),
        })
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Packets in flight in one direction, the earliest first.
struct OneWay {
    delay: Duration,
    packets: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    buffer: Box<[u8; PACKET_BYTES]>,
}

impl OneWay {
    fn new(delay: Duration) -> Self {
        Self {
            delay,
            packets: VecDeque::new(),
            bytes: 0,
            buffer: Box::new([0; PACKET_BYTES]),
        }
    }

    fn due(&self) -> Option<Instant> {
        self.packets.front().map(|(due, _)| *due)
    }

    /// Reads the packets that the host has sent. Returns their number.
    fn take(&mut self, from: &Tun) -> usize {
        for count in 0..BURST {
            let Ok(length) = from.receive(&mut self.buffer) else {
                return count;
            };
            if self.bytes + length <= UNDER_WAY_BYTES {
                self.bytes += length;
                let due = Instant::now() + self.delay;
                self.packets
                    .push_back((due, self.buffer[..length].to_vec()));
            }
        }
        BURST
    }

    /// Delivers packets that are due. If a host's interface is down, the packets are lost.
    fn deliver(&mut self, now: Instant, to: &Tun) {
        while self.due().is_some_and(|due| due <= now) {
            let (_, packet) = self.packets.pop_front().expect("a packet is due");
            self.bytes -= packet.len();
            let _ = to.send(&packet);
        }
    }
}
