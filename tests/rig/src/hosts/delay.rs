//! Distance: packets that leave one host arrive at the other a while later.
//!
//! One thread holds both ends of a link, each a TUN device, and carries whole packets across.
//! TCP's windows are those of the two hosts, and see the round trip as on a long line.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::linux::tun::{PACKET_BYTES, Tun};
use dunlin_linux::poll::{Interest, Waker, poll, waker};

/// What may be under way in one direction; more is dropped. 10 Gbit/s over 50 ms.
const UNDER_WAY_BYTES: usize = 64 << 20;

/// Packets that are taken from one side before the other is looked at.
const BURST: usize = 64;

/// The thread; dropping it ends the thread, and with that both devices.
#[derive(Debug)]
pub(super) struct Delay {
    waker: Waker,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Delay {
    /// Carries packets between the two, in both directions. Each is late by `delay` and up to 2 ms
    /// more.
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
                    // A device that is down reports an error for ever; then wait a little.
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

/// Packets under way in one direction, the earliest first.
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

    /// Takes what the host has sent, and says how many packets that was.
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

    /// Hands over what is due; a host whose interface is down loses it.
    fn deliver(&mut self, now: Instant, to: &Tun) {
        while self.due().is_some_and(|due| due <= now) {
            let (_, packet) = self.packets.pop_front().expect("one is due");
            self.bytes -= packet.len();
            let _ = to.send(&packet);
        }
    }
}
