//! The checker's locks under the engine's names, a clock that only the checker
//! turns, and mistakes that a check must find.
//!
//! All of a run's threads are coroutines of one thread, so that what belongs to
//! the run is kept by that thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::{LockResult, PoisonError};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::yield_now;

/// The place of a notification in the engine: file and line.
pub(super) type Site = (&'static str, u32);

/// What is wrong with the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// This notification is not made.
    Silent(Site),
    /// Every notification wakes one of those that wait.
    NotifyOne,
    /// Whoever begins to wait has let the lock go since it looked.
    LateWait,
}

/// Whether waits with a time limit reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Timeouts {
    /// Never: what ends by its limit alone is then found as a deadlock.
    #[default]
    Never,
    /// Whenever the checker likes.
    Sometimes,
}

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
    static TIMEOUTS: Cell<Timeouts> = const { Cell::new(Timeouts::Never) };
    static SITES: RefCell<BTreeSet<Site>> = const { RefCell::new(BTreeSet::new()) };
}

/// The time since the run began.
pub(crate) fn now() -> Duration {
    NOW.get()
}

/// Time passes.
pub(super) fn pass(time: Duration) {
    NOW.set(NOW.get() + time);
}

/// A run begins.
pub(super) fn begin(timeouts: Timeouts) {
    NOW.set(Duration::ZERO);
    TIMEOUTS.set(timeouts);
}

/// Makes a mistake in all runs to come, or none.
pub(super) fn plant(mistake: Option<Mistake>) {
    MISTAKE.set(mistake);
}

/// Where the engine has notified somebody since the last call.
pub(super) fn take_sites() -> BTreeSet<Site> {
    SITES.take()
}

/// A lock of the engine.
#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

/// A lock that is held, which knows which one it is.
pub(crate) struct MutexGuard<'a, T> {
    held: shuttle::sync::MutexGuard<'a, T>,
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { held, mutex: self })
    }
}

impl<'a, T> MutexGuard<'a, T> {
    /// Lets others have the lock before going on with it.
    fn relock(self) -> Self {
        let mutex = self.mutex;
        drop(self);
        yield_now();
        let held = mutex.0.lock().unwrap_or_else(PoisonError::into_inner);
        Self { held, mutex }
    }

    fn wait(self, condition: &shuttle::sync::Condvar) -> Self {
        let Self { held, mutex } = self;
        let held = condition.wait(held).unwrap_or_else(PoisonError::into_inner);
        Self { held, mutex }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

/// A condition variable of the engine.
#[derive(Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let late = MISTAKE.get() == Some(Mistake::LateWait);
        let guard = if late { guard.relock() } else { guard };
        Ok(guard.wait(&self.0))
    }

    /// Says besides whether the time was up, as the standard library does.
    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        if TIMEOUTS.get() == Timeouts::Never {
            return Ok((guard.wait(&self.0), false));
        }
        // Woken for no reason, or after the whole time.
        let guard = guard.relock();
        let over = thread_rng().r#gen();
        if over {
            pass(time);
        }
        Ok((guard, over))
    }

    /// Wakes everybody who waits.
    #[track_caller]
    pub(crate) fn notify_all(&self) {
        let site = Location::caller();
        let site = (site.file(), site.line());
        SITES.with_borrow_mut(|sites| sites.insert(site));
        match MISTAKE.get() {
            Some(Mistake::Silent(silent)) if silent == site => {}
            Some(Mistake::NotifyOne) => self.0.notify_one(),
            _ => self.0.notify_all(),
        }
    }
}
