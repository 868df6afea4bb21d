//! Services that the engine takes from its process, and cancellation.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_linux::poll::Wakeup;

use super::sync::{Interrupt, Mutex, lock};
use crate::lane::dial::{Connector, StandardConnector};

/// Opens connections and starts threads for the engine, so that it fits a VMM that must
/// do neither by itself.
pub trait Host: Send + Sync {
    /// Opens a TCP connection to `endpoint`, a host and port. The migration makes the
    /// descriptor `stop` ([`AsFd`](std::os::fd::AsFd)) readable to cancel the attempt;
    /// do not read from it. A host that ignores `stop` delays the cancellation until it
    /// has connected.
    ///
    /// # Errors
    /// No connection by `deadline`, or `stop` became readable first.
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream>;

    /// Opens a TCP connection to `remote` from a local address and port. Only lanes
    /// over IPsec need it.
    ///
    /// # Errors
    /// As [`Host::connect`]; `AddrInUse` if the local port is in use, and `Unsupported`
    /// if this method is not implemented.
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
            "cannot connect from a given local port, which lanes over IPsec need: implement \
             Host::connect_from",
        ))
    }

    /// Runs `body` on a thread of its own.
    ///
    /// # Errors
    /// A thread cannot be started.
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;
}

/// Ordinary sockets and ordinary threads. A name is resolved on a thread that may outlive
/// the connection attempt ([`resolve`](crate::lane::resolve)).
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

/// Gives lane dialers connections from the VMM's [`Host`].
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

/// Cancels a session from another thread. Clones cancel the same session.
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
    /// A handle on which [`Cancel::cancel`] has not been called.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the session to end. Before *commit* it ends, and the VM continues at the
    /// source; after *commit* it reports that it is too late.
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

    /// Calls `interrupt` on cancellation, or at once if already cancelled, until the
    /// result is dropped. Replaces an earlier one.
    pub(in crate::engine) fn interrupts(&self, interrupt: Interrupt) -> Interrupting<'_> {
        let mut state = lock(&self.0);
        if state.cancelled {
            interrupt();
        }
        state.interrupt = Some(interrupt);
        Interrupting(self)
    }

    /// Calls `listener` on cancellation, or at once if already cancelled.
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

/// Removes the interrupt of a [`Cancel`] when dropped.
pub(in crate::engine) struct Interrupting<'a>(&'a Cancel);

impl Drop for Interrupting<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).interrupt = None;
    }
}
