//! What the engine asks of the process around it, and how it is stopped.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_sys::socket;

/// Connections and threads, so that the engine fits a VMM that may open
/// neither by itself.
pub trait Host: Send + Sync {
    /// Opens a TCP connection to `endpoint`, a host and port.
    ///
    /// # Errors
    /// No connection by `deadline`.
    fn connect(&self, endpoint: &str, deadline: Instant) -> io::Result<TcpStream>;

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
        let mut last = io::Error::new(
            io::ErrorKind::NotFound,
            format!("{endpoint} has no address"),
        );
        for address in endpoint.to_socket_addrs()?.collect::<Vec<SocketAddr>>() {
            match socket::connect(address, deadline) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body)
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
        let mut state = super::lock(&self.0);
        state.cancelled = true;
        if let Some(listener) = &state.listener {
            listener();
        }
    }

    /// Whether [`Cancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        super::lock(&self.0).cancelled
    }

    /// Calls `listener` at the cancellation, at once if it has been already.
    pub(crate) fn listen(&self, listener: impl Fn() + Send + 'static) {
        let mut state = super::lock(&self.0);
        if state.cancelled {
            listener();
        }
        state.listener = Some(Box::new(listener));
    }

    pub(crate) fn unlisten(&self) {
        super::lock(&self.0).listener = None;
    }
}
