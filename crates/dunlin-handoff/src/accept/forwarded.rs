//! The state of one forwarded client, shared by its threads and the accepting thread.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::token::Side;
use dunlin_lane::splice::Stop;

/// A forwarded client.
pub(super) struct Forwarded {
    pub(super) number: u64,
    pub(super) client: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) name: Option<String>,
    pub(super) began: Instant,
    /// The number of bytes of the client's hello that had arrived when forwarding began.
    pub(super) hello_bytes: u64,
    pub(super) sent_bytes: AtomicU64,
    /// When the client or the backend last sent bytes, in milliseconds since `began`.
    pub(super) last_ms: AtomicU64,
    pub(super) stop: Stop,
    /// Whether forwarding has failed. If so, both connections are reset.
    pub(super) is_broken: AtomicBool,
    /// Whether epoll has reported a failure, by side.
    pub(super) has_failed: [AtomicBool; 2],
    /// Whether the stream has ended, by side.
    pub(super) has_ended: [AtomicBool; 2],
}

impl Forwarded {
    /// Called when epoll has reported that the connection of `side` failed. A thread that reads
    /// from that connection delivers the remaining bytes and then gets the error. If the stream
    /// from `side` has already ended, no thread reads from the connection, so this function stops
    /// the thread that writes to it.
    pub(super) fn fails(&self, side: Side) {
        self.has_failed[side as usize].store(true, Ordering::SeqCst);
        self.settle(side);
    }

    pub(super) fn ends(&self, side: Side) {
        self.has_ended[side as usize].store(true, Ordering::SeqCst);
        self.settle(side);
    }

    fn settle(&self, side: Side) {
        let is = |all: &[AtomicBool; 2]| all[side as usize].load(Ordering::SeqCst);
        if is(&self.has_failed) && is(&self.has_ended) {
            self.give_up();
        }
    }

    pub(super) fn give_up(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
        self.stop.request();
    }

    /// Closes both connections without waiting for the bytes that have not been forwarded.
    pub(super) fn abort(&self) {
        self.stop.request();
    }

    /// Records activity, which delays the eviction of the client.
    pub(super) fn touch(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.fetch_max(now, Ordering::SeqCst);
    }
}
