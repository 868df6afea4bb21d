//! Counts the frames that leave two hosts under load, because a capture of all frames would
//! be too large.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dunlin_rig::linux::packet::Packets;

use super::wire::{Seen, seen};
use crate::sessions::{HOSTS, inside};

/// A running count of the frames that leave the two hosts of [`crate::sessions`].
#[derive(Debug)]
pub struct Tap {
    done: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Left>>,
}

/// The number of frames that left the hosts, by kind.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// Number of ESP frames, by SPI.
    pub sealed: BTreeMap<u32, u64>,
    /// Number of TCP and UDP frames in the clear, by the ports of sender and receiver.
    pub clear: BTreeMap<(u16, u16), u64>,
    /// Number of frames that were not counted because the buffer was full.
    pub lost: u64,
}

impl Tap {
    /// Starts counting.
    ///
    /// # Panics
    /// A host has no link.
    #[must_use]
    pub fn begin() -> Self {
        let done = Arc::<AtomicBool>::default();
        let threads = HOSTS.map(|(host, _)| {
            let packets = inside(host, || Packets::open(&format!("link-{host}")));
            let packets = packets.expect("the host has a link");
            let done = Arc::clone(&done);
            thread::spawn(move || count(&packets, &done))
        });
        Self {
            done,
            threads: threads.into(),
        }
    }

    /// Stops counting, and returns the counts of frames that have left either host.
    ///
    /// # Panics
    /// The frames cannot be read.
    #[must_use]
    pub fn end(self) -> Left {
        self.done.store(true, Ordering::SeqCst);
        let mut all = Left::default();
        for thread in self.threads {
            let one = thread.join().expect("frames can be read");
            all.sealed.extend(one.sealed);
            for (ports, frames) in one.clear {
                *all.clear.entry(ports).or_default() += frames;
            }
            all.lost += one.lost;
        }
        all
    }
}

impl Left {
    /// Returns true if all frames were counted, and none with one of these ports was in the clear.
    #[must_use]
    pub fn is_sealed(&self, ports: &RangeInclusive<u16>) -> bool {
        let leak = |(from, to): &(u16, u16)| ports.contains(from) || ports.contains(to);
        self.lost == 0 && !self.clear.keys().any(leak)
    }
}

fn count(packets: &Packets, done: &AtomicBool) -> Left {
    let mut left = Left::default();
    loop {
        let last = done.load(Ordering::SeqCst);
        while let Some(frame) = packets.next_frame().expect("the socket is readable") {
            if !frame.outgoing {
                continue;
            }
            match seen(&frame) {
                Seen::Esp { spi, .. } => *left.sealed.entry(spi).or_default() += 1,
                Seen::Clear {
                    source,
                    destination,
                } => *left.clear.entry((source, destination)).or_default() += 1,
                Seen::Other => {}
            }
        }
        left.lost += u64::from(packets.lost().expect("the socket counts lost frames"));
        if last {
            return left;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
