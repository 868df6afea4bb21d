//! Locks that ignore poisoning. This is safe, because no thread panics between two dependent
//! changes while it holds a lock.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, even if a thread panicked while it held the mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `condition` is notified, or until `limit`, if given, has passed. May return early.
/// Works even if a thread panicked while it held the mutex.
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
