//! A link with a single receiving CPU, like a network card with one queue. As on a real wire,
//! packets carry no state of the sender's kernel. Over a veth pair, they would keep the flow hash
//! of their connection.

use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};

use dunlin_linux::affinity::pin_to;
use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_rig::linux::tun::{PACKET_BYTES, Tun};

/// Forwards packets between two TUN devices until it is dropped.
#[derive(Debug)]
pub(super) struct Link {
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    /// Starts a thread on the given CPU that forwards packets.
    ///
    /// # Panics
    /// There is no such CPU, or the system is out of descriptors.
    #[must_use]
    pub(super) fn between(ends: [Tun; 2], cpu: u32) -> Self {
        let (stop, stopped) = waker().expect("there is a descriptor");
        let thread = thread::spawn(move || {
            pin_to(cpu as usize).expect("the CPU exists");
            carry(&ends, &stopped);
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Link {
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
        let ready = poll(&all, None).expect("the descriptors can be polled");
        if ready[2] {
            return;
        }
        for (from, to) in [(one, other), (other, one)] {
            while let Ok(length) = from.receive(&mut packet) {
                // A device that is not up yet drops packets, as a disconnected wire does.
                let _ = to.send(&packet[..length]);
            }
        }
    }
}
