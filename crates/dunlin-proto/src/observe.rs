//! How a session reports events to the program that runs it.

/// Receives the events of a session, a tunnel, an acceptor or a server. Their own threads
/// call it, so it must return quickly. Closures that take a reference to an event are
/// observers.
pub trait Observer<E>: Send + Sync {
    /// Handles one event.
    fn event(&self, event: &E);
}

impl<E, F: Fn(&E) + Send + Sync> Observer<E> for F {
    fn event(&self, event: &E) {
        self(event);
    }
}
