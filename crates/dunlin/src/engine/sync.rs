//! Locks, and the waits on them.
//!
//! The engine's threads meet behind these, and in channels. The unit tests with
//! the feature `shuttle` get a checker's in their place, which chooses at every
//! step which thread goes on (`engine/interleavings`); nothing else is ever
//! built so.

use std::sync::PoisonError;
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use super::interleavings::sync::{Condvar, Mutex, MutexGuard};

/// Ends what a thread waits in that is no [`Condvar`]: a connection, most of
/// the time. It may be called from any thread and more than once.
pub(crate) type Interrupt = Box<dyn Fn() + Send>;

/// A thread that panicked while it held one of the engine's locks has ended
/// its session: the panic is reported when it is joined. What the lock guards
/// stays readable for the threads that wind up.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `changed` is notified.
pub(crate) fn wait<'a, T>(changed: &Condvar, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// The same, for `time` at most.
pub(crate) fn wait_for<'a, T>(
    changed: &Condvar,
    state: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    changed
        .wait_timeout(state, time)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}

/// How long ago `instant` was.
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn since(instant: Instant) -> Duration {
    instant.elapsed()
}

/// The same by the checker's clock: real time would make runs that cannot be
/// repeated.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) fn since(_instant: Instant) -> Duration {
    super::interleavings::sync::now()
}
