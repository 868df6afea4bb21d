//! What the engine asks of the process around it, and how it is stopped.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_linux::poll::Wakeup;

use super::sync::{Interrupt, Mutex, lock};
use crate::lane::dial::{Connector, StandardConnector};

/// Connections and threads, so that the engine fits a VMM that may open
/// neither by itself.
pub trait Host: Send + Sync {
    /// Opens a TCP connection to `endpoint`, a host and port, unless `stop`
    /// becomes readable before: a descriptor ([`AsFd`](std::os::fd::AsFd))
    /// that the migration makes readable when it is cancelled. Do not read
    /// from it. A host that ignores it delays the cancellation until its
    /// connection is there.
    ///
    /// # Errors
    /// No connection by `deadline`, or `stop` became readable before.
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream>;

    /// Opens a TCP connection to `remote` from a local address and port. Only
    /// lanes over IPsec need it.
    ///
    /// # Errors
    /// As [`Host::connect`]; `AddrInUse` where the local port is taken, and
    /// `Unsupported` where this is not implemented.
    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        let _ = (local, remote, deadline, stop);
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this VMM's Host cannot connect from a given port, which lanes over IPsec need: \
             implement Host::connect_from",
        ))
    }

    /// Runs `body` on a thread of its own.
    ///
    /// # Errors
    /// A thread cannot be started.
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;
}

/// Ordinary sockets and ordinary threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardHost;

impl Host for StandardHost {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        StandardConnector.connect(endpoint, deadline, stop)
    }

    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        StandardConnector.connect_from(local, remote, deadline, stop)
    }

    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body)
    }
}

/// What lanes' dialers get their connections from.
pub(crate) struct FromHost(pub(crate) Arc<dyn Host>);

impl Connector for FromHost {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        self.0.connect(endpoint, deadline, stop)
    }

    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        self.0.connect_from(local, remote, deadline, stop)
    }
}

type Listener = Box<dyn Fn() + Send>;

/// Cancels a session from another thread. Clones cancel the same one.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Mutex<CancelState>>);

#[derive(Default)]
struct CancelState {
    cancelled: bool,
    listener: Option<Listener>,
    interrupt: Option<Interrupt>,
}

impl fmt::Debug for Cancel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Cancel")
            .field("is_cancelled", &self.is_cancelled())
            .finish()
    }
}

impl Cancel {
    /// A handle that has not been used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the session to end. Before *commit* it does, and the VM goes on
    /// at the source; after that it is too late and the session says so.
    pub fn cancel(&self) {
        let mut state = lock(&self.0);
        state.cancelled = true;
        if let Some(interrupt) = &state.interrupt {
            interrupt();
        }
        if let Some(listener) = &state.listener {
            listener();
        }
    }

    /// Whether [`Cancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        lock(&self.0).cancelled
    }

    /// Has `interrupt` called at the cancellation, at once if that was
    /// before, until the result is dropped. It replaces an earlier one.
    pub(in crate::engine) fn interrupts(&self, interrupt: Interrupt) -> Interrupting<'_> {
        let mut state = lock(&self.0);
        if state.cancelled {
            interrupt();
        }
        state.interrupt = Some(interrupt);
        Interrupting(self)
    }

    /// Calls `listener` at the cancellation, at once if it has been already.
    pub(crate) fn listen(&self, listener: impl Fn() + Send + 'static) {
        let mut state = lock(&self.0);
        if state.cancelled {
            listener();
        }
        state.listener = Some(Box::new(listener));
    }

    pub(crate) fn unlisten(&self) {
        lock(&self.0).listener = None;
    }
}

/// A cancellation interrupts something until this is dropped.
pub(in crate::engine) struct Interrupting<'a>(&'a Cancel);

impl Drop for Interrupting<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).interrupt = None;
    }
}
