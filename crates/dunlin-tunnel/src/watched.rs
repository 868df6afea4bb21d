//! Sockets that several threads wait for together, and a waker for those threads.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use dunlin_linux::epoll::{Epoll, Readiness, Ready};
use dunlin_linux::poll::{Waker, Wakeup, waker};

/// The token of the waker; sockets have smaller tokens.
const WAKE: u64 = u64::MAX;

pub(super) struct WatchedSockets {
    sockets: Epoll,
    waker: Waker,
    wakeup: Wakeup,
}

impl WatchedSockets {
    /// Creates a set without sockets.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub(super) fn new() -> io::Result<Self> {
        let sockets = Epoll::new()?;
        let (waker, wakeup) = waker()?;
        sockets.add_always(&wakeup, WAKE)?;
        Ok(Self {
            sockets,
            waker,
            wakeup,
        })
    }

    /// Watches a socket until it is closed. Its readiness is reported once.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub(super) fn add(&self, socket: impl AsFd, token: u64, wanted: Readiness) -> io::Result<()> {
        self.sockets.add(socket, token, wanted)
    }

    /// Rearms a socket, so that its readiness is reported again.
    pub(super) fn again(&self, socket: impl AsFd, token: u64, wanted: Readiness) {
        // Fails only if the socket is closed.
        let _ = self.sockets.again(socket, token, wanted);
    }

    /// Waits until sockets are ready, [`WatchedSockets::wake`] is called, a signal arrives or
    /// `timeout` has passed. Fills `ready` with the ready sockets, but not the waker.
    pub(super) fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) {
        ready.clear();
        // Fails only for a descriptor that is not an epoll instance.
        let _ = self.sockets.wait(ready, timeout);
        let sockets = ready.len();
        ready.retain(|one| one.token != WAKE);
        if ready.len() < sockets {
            self.wakeup.clear();
        }
    }

    /// Ends the wait of at least one thread that waits now, or the next wait if no thread waits.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }
}
