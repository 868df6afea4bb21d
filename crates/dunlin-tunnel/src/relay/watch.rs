//! The channels of all relays, and one thread that watches them. It detects vanished peers, and
//! resets of connections that no thread reads or writes. It also returns to the kernel the buffers
//! of channels that have become idle or have ended.

use dunlin_lane::sync::lock;
use std::collections::BTreeSet;
use std::io;
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
const LOOKS: u32 = 8;

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
