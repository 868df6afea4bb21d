//! Locks, and waits on them.
//!
//! The engine's threads share state behind these locks and through channels. The unit tests
//! with the feature `shuttle` replace them with those of a checker that chooses at every
//! step which thread runs next (`engine/interleavings`). No other build does this.

use std::sync::PoisonError;
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use super::interleavings::sync::{Condvar, Mutex, MutexGuard};

/// Ends a thread's wait in something other than a [`Condvar`], usually a connection. It
/// may be called from any thread and more than once.
pub(crate) type Interrupt = Box<dyn Fn() + Send>;

/// A thread that panics while it holds one of the engine's locks has ended its session;
/// joining the thread reports the panic. The guarded state stays readable for the threads
/// that clean up.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `changed` is notified, for at most `limit` if given.
pub(crate) fn wait<'a, T>(
    changed: &Condvar,
    state: MutexGuard<'a, T>,
    limit: Option<Duration>,
) -> MutexGuard<'a, T> {
    match limit {
        Some(limit) => {
            let waited = changed.wait_timeout(state, limit);
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
        None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
    }
}

/// The time since `instant`.
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn since(instant: Instant) -> Duration {
    instant.elapsed()
}

/// The time on the checker's clock: real time would make runs unrepeatable.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) fn since(_instant: Instant) -> Duration {
    super::interleavings::sync::now()
}
