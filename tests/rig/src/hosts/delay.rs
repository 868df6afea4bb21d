//! A link's delay: the time between the sending and the arrival of each packet.
//!
//! One thread has a TUN device at each end of the link and forwards whole packets. TCP runs only
//! on the two hosts, and sees the round-trip time of a long link.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::linux::tun::{PACKET_BYTES, Tun};
use dunlin_linux::poll::{Interest, Waker, poll, waker};
use rustix::process::setpriority_process;

/// The size of the ring of packets in flight in one direction. It is enough for 10 Gbit/s with a
/// delay of 50 ms. Packets for which it has no space are dropped.
const RING_BYTES: usize = 64 << 20;

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
                // A real link takes no CPU time from the hosts. Without this priority, packets are
                // late on a busy machine. Best effort: only root may raise the priority.
                let _ = setpriority_process(None, -20);
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

/// Packets in flight in one direction.
struct OneWay {
    delay: Duration,
    ring: Ring,
    /// When each packet of the ring is due.
    due: VecDeque<Instant>,
}

impl OneWay {
    fn new(delay: Duration) -> Self {
        Self {
            delay,
            ring: Ring::new(RING_BYTES),
            due: VecDeque::new(),
        }
    }

    fn due(&self) -> Option<Instant> {
        self.due.front().copied()
    }

    /// Reads the packets that the host has sent. Returns their number.
    fn take(&mut self, from: &Tun) -> usize {
        for count in 0..BURST {
            let received = match self.ring.space() {
                Some(space) => from.receive(space).inspect(|&length| {
                    self.ring.push(length);
                    self.due.push_back(Instant::now() + self.delay);
                }),
                None => from.receive(&mut [0; PACKET_BYTES]),
            };
            if received.is_err() {
                return count;
            }
        }
        BURST
    }

    /// Delivers packets that are due. If a host's interface is down, the packets are lost.
    fn deliver(&mut self, now: Instant, to: &Tun) {
        while self.due().is_some_and(|due| due <= now) {
            self.due.pop_front();
            let packet = self.ring.pop().expect("a packet is due");
            let _ = to.send(packet);
        }
    }
}

/// A queue of packets in one buffer. The thread reads packets into it and writes them from it, so
/// it does not copy them: what the thread costs is taken from the traffic that is measured.
struct Ring {
    buffer: Box<[u8]>,
    /// The places of the packets, the oldest first.
    packets: VecDeque<Range<usize>>,
}

impl Ring {
    fn new(bytes: usize) -> Self {
        Self {
            buffer: vec![0; bytes].into_boxed_slice(),
            packets: VecDeque::new(),
        }
    }

    /// Space for a packet, unless the ring is full.
    fn space(&mut self) -> Option<&mut [u8; PACKET_BYTES]> {
        let start = self.next()?;
        self.buffer[start..].first_chunk_mut()
    }

    /// Appends the packet of `length` bytes that was written into [`Self::space`].
    fn push(&mut self, length: usize) {
        let start = self.next().expect("the ring had space");
        self.packets.push_back(start..start + length);
    }

    /// Removes the oldest packet.
    fn pop(&mut self) -> Option<&[u8]> {
        let place = self.packets.pop_front()?;
        Some(&self.buffer[place])
    }

    /// Where the next packet starts; `None` if the ring is full.
    fn next(&self) -> Option<usize> {
        let (Some(oldest), Some(newest)) = (self.packets.front(), self.packets.back()) else {
            return Some(0);
        };
        let start = newest.end;
        if start > oldest.start {
            if start + PACKET_BYTES <= self.buffer.len() {
                return Some(start);
            }
            return (PACKET_BYTES <= oldest.start).then_some(0);
        }
        (start + PACKET_BYTES <= oldest.start).then_some(start)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn push(ring: &mut Ring, byte: u8, length: usize) -> bool {
        let Some(space) = ring.space() else {
            return false;
        };
        space[..length].fill(byte);
        ring.push(length);
        true
    }

    #[test]
    fn packets_leave_the_ring_in_order_and_unchanged() {
        let mut ring = Ring::new(3 * PACKET_BYTES);
        let mut inside = VecDeque::new();
        let (mut was_full, mut wrapped) = (false, false);
        for number in 0..200_u8 {
            let length = 1 + usize::from(number) * 7919 % PACKET_BYTES;
            while !push(&mut ring, number, length) {
                was_full = true;
                let (oldest, length): (u8, usize) = inside.pop_front().unwrap();
                let packet = ring.pop().unwrap();
                assert_eq!(packet.len(), length);
                assert!(packet.iter().all(|byte| *byte == oldest));
            }
            inside.push_back((number, length));
            let first = ring.packets.front().unwrap().start;
            wrapped |= ring.packets.back().unwrap().start < first;
        }
        assert!(was_full && wrapped);
    }

    #[test]
    fn an_empty_ring_starts_at_the_beginning() {
        let mut ring = Ring::new(2 * PACKET_BYTES);
        for _ in 0..5 {
            assert!(push(&mut ring, 1, 10));
            assert_eq!(ring.packets.front(), Some(&(0..10)));
            assert_eq!(ring.pop(), Some([1; 10].as_slice()));
        }
        assert_eq!(ring.pop(), None);
    }
}
