//! The channels of all relays, and one thread that watches them. It reports silent peers. It
//! detects vanished peers, and resets of connections that no thread reads or writes. It also
//! returns to the kernel the buffers of channels that have become idle or have ended.

use dunlin_lane::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Readiness;
use dunlin_linux::heap;

use super::channel::Channel;
use super::life::Life;
use crate::site::Site;
use crate::watched::WatchedSockets;

/// The number of checks during [`Limits::vanished`](crate::Limits::vanished).
const LOOKS: u32 = 16;
/// A check finds a peer stuck if bytes wait for the peer and nothing has moved since the check
/// before. After this number of consecutive checks that find it stuck, a peer counts as silent.
/// That takes about a fifth of [`Limits::vanished`](crate::Limits::vanished), as for the peer of a
/// trunk. After the same number of consecutive checks that do not find it stuck, it no longer
/// counts as silent. A program that reads slowly therefore causes only one report.
const SILENT: u32 = 3;

/// A peer's name and host. The checks assume that a single process on the peer's host has all
/// channels of the peer.
type PeerAt = (String, IpAddr);

/// What the checks have found about the channels of a peer.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// The bytes that the peer has acknowledged and sent.
    bytes: u64,
    /// Whether bytes wait for the peer.
    waits: bool,
    /// Whether an acknowledgement is overdue on any of the channels.
    is_overdue: bool,
    /// The number of consecutive checks that found bytes waiting and no progress.
    unchanged: u32,
    /// The number of consecutive checks that found progress, or no bytes waiting.
    changed: u32,
    is_reported: bool,
}

pub(super) struct Watch {
    sockets: WatchedSockets,
    /// Weak references, because the threads of a channel own the channel.
    channels: Mutex<Vec<Weak<Channel>>>,
    over: AtomicBool,
}

impl Watch {
    /// Starts the watch thread of a tunnel.
    ///
    /// # Errors
    /// The process has no free file descriptors, or cannot start a thread.
    pub(super) fn start(site: &Site) -> io::Result<Arc<Self>> {
        let made = Arc::new(Self {
            sockets: WatchedSockets::new()?,
            channels: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let own = Arc::clone(&made);
        let step = site.limits.vanished / LOOKS;
        // Two consecutive checks must find an overdue acknowledgement, so each check uses a limit
        // that is two steps shorter than `limits.vanished`.
        let vanished = site.limits.vanished - 2 * step;
        let body = move || own.run(step, vanished);
        if !site.spawn("dunlin-relay-watch".to_owned(), body) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(made)
    }

    /// Watches a channel from now on.
    pub(super) fn add(&self, channel: &Arc<Channel>) {
        let mut channels = lock(&self.channels);
        channels.retain(|one| one.strong_count() > 0);
        channels.push(Arc::downgrade(channel));
        drop(channels);
        let token = u64::from(channel.number) << 1;
        // If a socket cannot be added, only its next read or write detects a reset.
        if channel.plain.tells_resets() {
            let _ = self.sockets.add(&channel.plain, token, Readiness::Failure);
        }
        let _ = self
            .sockets
            .add(&channel.tls, token | 1, Readiness::Failure);
        self.sockets.wake();
    }

    /// The channels that have not ended.
    pub(super) fn channels(&self) -> Vec<Arc<Channel>> {
        let channels = lock(&self.channels);
        let upgraded = channels.iter().filter_map(Weak::upgrade);
        upgraded
            .filter(|one| !matches!(*one.life(), Life::Settled))
            .collect()
    }

    pub(super) fn stop(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.sockets.wake();
    }

    /// The body of the thread.
    fn run(&self, step: Duration, vanished: Duration) {
        let mut ready = Vec::new();
        let mut look = Instant::now() + step;
        let mut any = false;
        // Whether a channel may have freed buffers since the last check.
        let mut has_freed = false;
        // The channels with an overdue acknowledgement at the last check. One check is not enough:
        // after a long silence of both sides, data that was sent just before the check seems to be
        // overdue.
        let mut silent = BTreeSet::new();
        let mut progress = BTreeMap::new();
        while !self.over.load(Ordering::SeqCst) {
            let timeout = has_freed.then(|| look.saturating_duration_since(Instant::now()));
            self.sockets.wait(&mut ready, timeout);
            let channels = self.channels();
            let had_any = std::mem::replace(&mut any, !channels.is_empty());
            has_freed |= any || had_any;
            for one in ready.iter().filter(|one| one.failed) {
                let number = one.token >> 1;
                let channel = channels
                    .iter()
                    .find(|channel| u64::from(channel.number) == number);
                if let Some(channel) = channel {
                    channel.has_failed(one.token & 1 == 1);
                }
            }
            if Instant::now() >= look {
                look = Instant::now() + step;
                heap::give_back();
                has_freed = any || had_any;
                progress = report_silent(&channels, step, &progress);
                let before = std::mem::take(&mut silent);
                for channel in channels.iter().filter(|one| one.is_silent(vanished)) {
                    silent.insert(channel.number);
                    if before.contains(&channel.number) {
                        channel.has_vanished();
                    }
                }
            }
        }
    }
}

/// Reports each peer that has become silent: bytes wait for it, and it has acknowledged and sent
/// nothing on any of its channels. A relay sends no messages of its own, so it cannot detect silence
/// while the channels are idle, or while the peer's socket has room in its buffer.
fn report_silent(
    channels: &[Arc<Channel>],
    step: Duration,
    before: &BTreeMap<PeerAt, Progress>,
) -> BTreeMap<PeerAt, Progress> {
    let mut found: BTreeMap<PeerAt, (Progress, &Channel)> = BTreeMap::new();
    for channel in channels.iter().filter(|one| one.is_relaying()) {
        let (bytes, waits) = channel.progress();
        let key = (channel.peer.clone(), channel.at.ip());
        let (peer, _) = found.entry(key).or_insert((Progress::default(), channel));
        peer.bytes += bytes;
        peer.waits |= waits;
        peer.is_overdue |= channel.is_silent(step);
    }
    let judged = found.into_iter().map(|(key, (mut peer, channel))| {
        let old = before.get(&key).copied().unwrap_or_default();
        if old.waits && peer.waits && old.bytes == peer.bytes {
            peer.unchanged = old.unchanged.saturating_add(1);
        } else {
            peer.changed = old.changed.saturating_add(1);
        }
        peer.is_reported = old.is_reported && peer.changed < SILENT;
        if peer.unchanged >= SILENT && !peer.is_reported {
            peer.is_reported = true;
            // The peer's host counts as answering unless two checks in a row find an overdue
            // acknowledgement. One is not enough: after a long silence of both sides, data that was
            // sent just before the check seems to be overdue.
            channel.report_silence(!(peer.is_overdue && old.is_overdue));
        }
        (key, peer)
    });
    judged.collect()
}
