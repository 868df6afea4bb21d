//! What the engine asks of the process around it, and how it is stopped.

use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_sys::poll::{Wakeup, waker};
use dunlin_sys::socket;

use super::sync::{Interrupt, Mutex, lock};
use crate::lane::reach::first_of;

/// Connections and threads, so that the engine fits a VMM that may open
/// neither by itself.
pub trait Host: Send + Sync {
    /// Opens a TCP connection to `endpoint`, a host and port.
    ///
    /// # Errors
    /// No connection by `deadline`.
    fn connect(&self, endpoint: &str, deadline: Instant) -> io::Result<TcpStream>;

    /// The same, given up as soon as `stop` is woken. A host that cannot wait
    /// for both keeps a cancellation waiting until its connection stands.
    /// `stop` is a descriptor ([`AsFd`](std::os::fd::AsFd)) that becomes
    /// readable; nobody has to read from it.
    ///
    /// # Errors
    /// No connection by `deadline`, or `stop` was woken before.
    fn connect_unless(
        &self,
        endpoint: &str,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        let _ = stop;
        self.connect(endpoint, deadline)
    }

    /// Runs `body` on a thread of its own.
    ///
    /// # Errors
    /// No thread can be had.
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;
}

/// Ordinary sockets and ordinary threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardHost;

impl Host for StandardHost {
    fn connect(&self, endpoint: &str, deadline: Instant) -> io::Result<TcpStream> {
        first_of(endpoint, |address| socket::connect(address, deadline))
    }

    fn connect_unless(
        &self,
        endpoint: &str,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        first_of(endpoint, |address| {
            socket::connect_unless(address, deadline, stop)
        })
    }

    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body)
    }
}

/// A host whose connection ends when the session is cancelled: while it is
/// being made, and until this is dropped while it is being secured. For control
/// lanes before *commit*; data lanes have their own way.
pub(crate) struct CancellableHost {
    host: Arc<dyn Host>,
    cancel: Cancel,
}

impl CancellableHost {
    pub(crate) fn over(host: &Arc<dyn Host>, cancel: &Cancel) -> Arc<dyn Host> {
        Arc::new(Self {
            host: Arc::clone(host),
            cancel: cancel.clone(),
        })
    }
}

impl Host for CancellableHost {
    fn connect(&self, endpoint: &str, deadline: Instant) -> io::Result<TcpStream> {
        let (waker, stop) = waker()?;
        self.cancel.interrupts(Box::new(move || waker.wake()));
        let stream = self.host.connect_unless(endpoint, deadline, &stop)?;
        let same = stream.try_clone()?;
        // Fails only where the connection has gone already.
        self.cancel
            .interrupts(Box::new(move || drop(same.shutdown(Shutdown::Both))));
        Ok(stream)
    }

    fn connect_unless(
        &self,
        endpoint: &str,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        self.host.connect_unless(endpoint, deadline, stop)
    }

    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        self.host.spawn(name, body)
    }
}

impl Drop for CancellableHost {
    fn drop(&mut self) {
        self.cancel.spares();
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

    /// Interrupts this at the cancellation, and nothing else any more.
    pub(in crate::engine) fn interrupts(&self, interrupt: Interrupt) {
        let mut state = lock(&self.0);
        if state.cancelled {
            interrupt();
        }
        state.interrupt = Some(interrupt);
    }

    /// Interrupts nothing any more.
    pub(in crate::engine) fn spares(&self) {
        lock(&self.0).interrupt = None;
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
