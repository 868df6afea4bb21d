//! Locks whose holders do not panic between two steps that belong together.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, also after a thread that held it has panicked.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `condition` is notified, at most for `limit` if there is one, also after a thread
/// that held the mutex has panicked. May return early.
pub fn wait<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Option<Duration>,
) -> MutexGuard<'a, T> {
    match limit {
        Some(limit) => {
            let waited = condition.wait_timeout(guard, limit);
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
        None => condition
            .wait(guard)
            .unwrap_or_else(PoisonError::into_inner),
    }
}
