//! Locks, and the waits on them.

use std::sync::PoisonError;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

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
