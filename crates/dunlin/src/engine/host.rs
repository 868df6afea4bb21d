//! Services that the process provides to the engine, and cancellation.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use dunlin_lane::dial::{Connector, StandardConnector as StandardHost};

use super::sync::{Interrupt, Mutex, lock};

/// Opens connections and starts threads for the engine. A VMM that does not let a library open
/// sockets or start threads implements this trait.
pub trait Host: Connector {
    /// Runs `body` on a new thread.
    ///
    /// # Errors
    /// A thread cannot be started.
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;
}

impl Host for StandardHost {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body)
    }
}

/// Cancels a session from another thread. Clones cancel the same session.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Mutex<CancelState>>);

#[derive(Default)]
struct CancelState {
    cancelled: bool,
    /// Functions to call on cancellation, each under its number.
    listeners: BTreeMap<u64, Interrupt>,
    /// The number of the next function.
    next: u64,
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
    /// Creates a handle that is not cancelled yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the session to end. Before *commit* the session ends, and the VM stays at the source.
    /// After *commit* the session continues, and a warning reports that it is too late to cancel.
    /// Has no effect on a session that has ended.
    pub fn cancel(&self) {
        let mut state = lock(&self.0);
        state.cancelled = true;
        for listener in state.listeners.values() {
            listener();
        }
    }

    /// Whether [`Cancel::cancel`] has been called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        lock(&self.0).cancelled
    }

    /// Calls `listener` on cancellation, until the returned value is dropped. If already cancelled,
    /// calls `listener` immediately.
    pub(crate) fn listen(&self, listener: impl Fn() + Send + 'static) -> Listening<'_> {
        let mut state = lock(&self.0);
        if state.cancelled {
            listener();
        }
        let number = state.next;
        state.next += 1;
        state.listeners.insert(number, Box::new(listener));
        Listening {
            cancel: self,
            number,
        }
    }
}

/// Removes a listener of a [`Cancel`] when dropped.
#[must_use]
pub(crate) struct Listening<'a> {
    cancel: &'a Cancel,
    number: u64,
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        lock(&self.cancel.0).listeners.remove(&self.number);
    }
}
