//! A link whose packets are taken in by one CPU, as from a network card with one queue, and bear
//! nothing from the sender's kernel: over a veth pair they keep the hash of the connection that
//! they are of, which no packet from a wire has.

use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};

use dunlin_linux::affinity::pin_to;
use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_rig::linux::tun::{PACKET_BYTES, Tun};

/// Carries packets between two TUN devices until it goes.
#[derive(Debug)]
pub(super) struct Line {
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    /// Carries them on one CPU.
    ///
    /// # Panics
    /// There is no such CPU, or the system is out of descriptors.
    #[must_use]
    pub(super) fn between(ends: [Tun; 2], cpu: u32) -> Self {
        let (stop, stopped) = waker().expect("there is a descriptor");
        let thread = thread::spawn(move || {
            pin_to(cpu as usize).expect("there is such a CPU");
            carry(&ends, &stopped);
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(ends: &[Tun; 2], stopped: &Wakeup) {
    let mut packet = Box::new([0; PACKET_BYTES]);
    loop {
        let readable = |fd| Interest {
            fd,
            read: true,
            write: false,
        };
        let [one, other] = ends;
        let all = [one.as_fd(), other.as_fd(), stopped.as_fd()].map(readable);
        let ready = poll(&all, None).expect("they can be polled");
        if ready[2] {
            return;
        }
        for (from, to) in [(one, other), (other, one)] {
            while let Ok(length) = from.receive(&mut packet) {
                // A device that is not up yet takes none, as a wire without an end.
                let _ = to.send(&packet[..length]);
            }
        }
    }
}
