//! Locks, and waits on them.
//!
//! The engine's threads share state behind these locks and through channels. In unit tests with the
//! feature `shuttle`, the locks of a checker replace them; this checker chooses at every step which
//! thread runs next (`engine/interleavings`). No other build replaces the locks.

use std::sync::PoisonError;
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use super::interleavings::sync::{Condvar, Mutex, MutexGuard};

/// A function that ends a thread's wait for something other than a [`Condvar`], usually for a
/// connection. It may be called from any thread and more than once.
pub(crate) type Interrupt = Box<dyn Fn() + Send>;

/// Locks `mutex`, even if a thread has panicked while it held the lock. Such a panic ends the
/// session, and the join of the thread reports it. The threads that clean up can still read the
/// guarded state.
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

/// The time since the start of the run on the checker's clock. With real time, a run could not be
/// repeated.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) fn since(_instant: Instant) -> Duration {
    super::interleavings::sync::now()
}
