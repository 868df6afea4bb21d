//! Limits on the rate at which this side sends: one for each route, and one for each peer.
//!
//! A limit applies to reading: a channel that has used up its share is not read for a while, so its
//! hypervisor has to wait when the kernel's buffers are full. No thread waits for a limit while it
//! holds bytes of other channels.
//!
//! ```text
//!  hypervisor ─▶ read 50 ms' worth ─▶ pacer of the route, pacer of the peer ─▶ send
//!                      ▲                              │
//!                      └────── not read until ◀───────┘
//! ```

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dunlin_lane::peers::{Peer, PeerIdentity, Peers};
use dunlin_proto::pace::Pace;

/// The lowest rate, in bytes per second. It allows a read of 3 KiB every 50 ms.
pub const LEAST_RATE: u64 = 64 << 10;

/// A read returns at most the number of bytes that the limit allows in one second, divided by this
/// number.
///
/// Formula: a read of this size every 50 ms uses up the limit. After a read, a channel is not read
/// for up to 50 ms times the number of channels that share the limit, even if the limit is raised
/// in the meantime.
/// Drawback: below 5 MiB/s the pieces are smaller than a lane's frames, which costs more CPU time
/// per byte.
/// Alternative: wake the delayed channels when a limit is raised.
const READS_PER_S: u64 = 20;

/// The configured rates, in bytes per second.
#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    pub(super) routes: BTreeMap<String, u64>,
    pub(super) peers: Vec<(Peer, u64)>,
}

impl Rates {
    /// The lowest of the rates that apply to a peer. If a pin admitted the peer, only rates that
    /// are configured for pins apply.
    pub(super) fn of_peer(&self, identity: &PeerIdentity) -> Option<u64> {
        let applies = |peer: &Peer| {
            let one = Peers::OneOf(vec![peer.clone()]);
            one.authorise_further(identity).is_ok()
        };
        let rates = self.peers.iter().filter(|(peer, _)| applies(peer));
        rates.map(|(_, rate)| *rate).min()
    }

    pub(super) fn set_peer(&mut self, peer: &Peer, rate: Option<u64>) {
        self.peers.retain(|(one, _)| one != peer);
        let rate = rate.map(|rate| (peer.clone(), rate.max(LEAST_RATE)));
        self.peers.extend(rate);
    }

    pub(super) fn set_route(&mut self, route: &str, rate: Option<u64>) {
        match rate {
            Some(rate) => drop(self.routes.insert(route.to_owned(), rate.max(LEAST_RATE))),
            None => drop(self.routes.remove(route)),
        }
    }
}

/// A limit that the channels of one route, or of one peer, share.
#[derive(Debug)]
pub(super) struct Pacer {
    /// Bytes per second; 0 without a limit.
    rate: AtomicU64,
    pace: Mutex<Pace>,
    began: Instant,
}

impl Default for Pacer {
    fn default() -> Self {
        Self {
            rate: AtomicU64::new(0),
            pace: Mutex::new(Pace::new(None)),
            began: Instant::now(),
        }
    }
}

impl Pacer {
    pub(super) fn rate(&self) -> Option<u64> {
        match self.rate.load(Ordering::Relaxed) {
            0 => None,
            rate => Some(rate),
        }
    }

    /// Changes the limit. Bytes that were read under the old limit are not charged to the new one.
    pub(super) fn set_rate(&self, rate: Option<u64>) {
        if rate != self.rate() {
            self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
            *lock(&self.pace) = Pace::new(rate);
        }
    }

    /// The maximum number of bytes of the next read: `most`, or fewer if the limit requires it.
    pub(super) fn limited(&self, most: usize) -> usize {
        let piece = self.rate().map(|rate| rate.div_ceil(READS_PER_S));
        piece.map_or(most, |piece| {
            usize::try_from(piece).unwrap_or(most).min(most)
        })
    }

    /// Counts bytes that were read. Returns the time at which the channel may be read again; `None`
    /// if it may be read now. If the limit was lowered during the read, the bytes count as one
    /// piece of the new limit: the channel would otherwise stall for seconds.
    pub(super) fn spend(&self, bytes: usize) -> Option<Instant> {
        self.rate()?;
        let now = self.began.elapsed();
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let mut pace = lock(&self.pace);
        pace.reserve(now_ns, self.limited(bytes) as u64);
        // A reservation of 0 bytes returns the time from which the next byte is allowed.
        let next_ns = pace.reserve(now_ns, 0);
        (next_ns > now_ns).then(|| self.began + Duration::from_nanos(next_ns))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_waits_until_its_bytes_are_paid_for() {
        let pacer = Pacer::default();
        assert_eq!(pacer.spend(usize::MAX), None);
        assert_eq!(pacer.limited(7), 7);
        pacer.set_rate(Some(1 << 20));
        assert_eq!(pacer.limited(1 << 20), (1 << 20) / 20 + 1);
        let begin = Instant::now();
        // A read that began under a higher limit counts as one piece.
        let reads = [(1 << 20) / 20 + 1; 19].into_iter().chain([1 << 20]);
        let next = reads.map(|bytes| pacer.spend(bytes)).last().unwrap();
        let wait = next.unwrap() - begin;
        // The pacer allows one burst without a wait.
        let range = Duration::from_millis(980)..Duration::from_millis(1001);
        assert!(range.contains(&wait), "{wait:?}");
        // Bytes that were read before the limit was raised are not charged to the new limit.
        pacer.set_rate(Some(1 << 30));
        let next = pacer.spend(1 << 20);
        assert!(next.is_none_or(|next| next < begin + Duration::from_millis(100)));
        pacer.set_rate(None);
        assert_eq!(pacer.spend(usize::MAX), None);
    }
}
