//! How a session reports events to the program that runs it.

/// Receives the events of a session, a tunnel, an acceptor or a server. The threads of these
/// objects call the observer, so it must return quickly. A closure that takes a reference to
/// an event is an observer.
pub trait Observer<E>: Send + Sync {
    /// Handles one event.
    fn event(&self, event: &E);
}

impl<E, F: Fn(&E) + Send + Sync> Observer<E> for F {
    fn event(&self, event: &E) {
        self(event);
    }
}
