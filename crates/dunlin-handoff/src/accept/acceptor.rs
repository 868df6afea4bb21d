//! The handle of a listener and its threads. Dropping the handle ends the threads.

use dunlin_lane::sync::{lock, wait};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Epoll;
use dunlin_linux::poll::waker;
use dunlin_proto::observe::Observer;

use super::accept_loop::AcceptLoop;
use super::shared::Shared;
use super::{Event, Options};
use crate::error::HandoffError;
use dunlin_lane::kernel::abilities;
use dunlin_lane::policy::ServerTls;
use dunlin_lane::provider::CipherSuite;
use dunlin_lane::splice::Stop;

/// A listener with its threads and clients. The drop closes the listener and the connections of
/// pending and forwarded clients, and refuses the clients that wait for their receiver to accept.
/// After that, the drop waits at most five seconds for the hand-overs that are in progress. Sockets
/// that were handed over stay open.
pub struct Acceptor {
    address: SocketAddr,
    pub(super) shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Accepts clients on `listener`, with the settings of
    /// [`Identity::handoff_server`](dunlin_lane::identity::Identity::handoff_server). The
    /// acceptor's threads report events to `observer`.
    ///
    /// # Errors
    /// [`HandoffError::Kernel`] if the kernel has no TLS and there is no backend, or
    /// [`HandoffError::Io`].
    pub fn start(
        listener: TcpListener,
        tls: ServerTls,
        options: Options,
        observer: impl Observer<Event> + 'static,
    ) -> Result<Self, HandoffError> {
        // One probe is enough: Linux 5.1 added both TLS 1.3 and this cipher to kernel TLS, which
        // had only TLS 1.2 with AES-128-GCM before.
        match abilities(CipherSuite::Aes256Gcm) {
            Err(refused) if options.backend.is_none() => return Err(refused.into()),
            Err(refused) => observer.event(&Event::NoKernelTls(refused)),
            Ok(_) => {}
        }
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (waker, wakeup) = waker()?;
        let shared = Arc::new(Shared {
            options,
            tls,
            epoll: Epoll::new()?,
            observer: Box::new(observer),
            state: Mutex::default(),
            changed: Condvar::new(),
            waker,
            wakeup,
            stop: Stop::new()?,
        });
        let accept_loop = AcceptLoop::new(&shared, &listener)?;
        let on_thread = Arc::clone(&shared);
        let accepting = thread::Builder::new()
            .name("dunlin-accept".to_owned())
            .spawn(move || {
                if let Err(error) = accept_loop.run(listener) {
                    on_thread.report(&Event::Failed(error));
                }
                lock(&on_thread.state).is_closed = true;
                on_thread.changed.notify_all();
            })?;
        Ok(Self {
            address,
            shared,
            accepting: Some(accepting),
        })
    }

    /// The listener's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, and waits for at most `limit` until no client is left: each was handed over
    /// or refused, or was forwarded and its connection has ended. Then closes the remaining
    /// connections. Returns the number of forwarded clients and hand-overs that remained.
    pub fn drain(self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        let mut state = lock(&self.shared.state);
        state.is_draining = true;
        self.shared.waker.wake();
        while !(state.is_closed && state.is_idle()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = wait(&self.shared.changed, state, Some(left));
        }
        let remaining = state.forwarded.len() + state.handover_threads();
        drop(state);
        remaining
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.stop.request();
        self.shared.waker.wake();
        if let Some(accepting) = self.accepting.take() {
            // The panic hook has printed the panic.
            let _ = accepting.join();
        }
        let mut state = lock(&self.shared.state);
        for one in state.forwarded.values() {
            one.abort();
        }
        // This loop ends: each forwarded client was stopped, and each hand-over takes at most a few
        // seconds.
        while !state.is_idle() {
            state = wait(&self.shared.changed, state, None);
        }
    }
}
