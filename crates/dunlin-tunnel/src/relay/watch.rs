//! The channels of all relays, and one thread that watches them. It reports silent peers. It detects
//! vanished peers, and resets of connections that no thread reads or writes. It also returns to the
//! kernel the buffers of channels that have become idle or have ended.

use dunlin_lane::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
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
/// A peer is silent if this number of consecutive checks have found no change: after a fifth of
/// [`Limits::vanished`](crate::Limits::vanished), when the peer of a trunk counts as silent, and at most
/// one check later.
const SILENT: u32 = 3;

/// What a check has found about the channels of one address, at which one process of a peer runs.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// The bytes that the peer has acknowledged and sent.
    bytes: u64,
    /// Whether bytes wait for the peer.
    waits: bool,
    /// The number of consecutive checks that found bytes waiting and no progress.
    unchanged: u32,
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
        // Two consecutive checks must find that the peer is overdue, so each check uses a limit
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
        // If this fails, only the next read or write detects a reset.
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
        // The channels with a peer that was silent at the last check. One check is not enough:
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

/// Reports each peer that has become silent: bytes wait for it, and it has neither acknowledged nor sent
/// any, on all of its channels. A relay sends no messages of its own, so a peer with an idle channel, or
/// with room in its socket's buffer, is not silent.
fn report_silent(
    channels: &[Arc<Channel>],
    step: Duration,
    before: &BTreeMap<SocketAddr, Progress>,
) -> BTreeMap<SocketAddr, Progress> {
    let mut found: BTreeMap<SocketAddr, Progress> = BTreeMap::new();
    for channel in channels.iter().filter(|one| one.is_relaying()) {
        let (bytes, waits) = channel.progress();
        let peer = found.entry(channel.at).or_default();
        peer.bytes += bytes;
        peer.waits |= waits;
    }
    for (at, peer) in &mut found {
        let same = before
            .get(at)
            .filter(|old| old.waits && peer.waits && old.bytes == peer.bytes);
        peer.unchanged = same.map_or(0, |old| old.unchanged.saturating_add(1));
        let mut own = channels.iter().filter(|one| one.at == *at);
        if peer.unchanged == SILENT
            && let Some(first) = own.clone().next()
        {
            first.report_silence(!own.any(|one| one.is_silent(step)));
        }
    }
    found
}
