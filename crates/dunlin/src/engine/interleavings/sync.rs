//! The checker's locks, with the names that the engine uses; a clock that only the checker
//! advances; and mistakes that a check must find.
//!
//! All threads of a run are coroutines of one thread, so thread-local state belongs to
//! the run.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::{LockResult, PoisonError};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::yield_now;

/// The source location of a notification in the engine: file and line.
pub(super) type Site = (&'static str, u32);

/// An error that the checker plants in the locks, and that a check must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// This notification is omitted.
    Silent(Site),
    /// Every notification wakes only one waiting thread.
    NotifyOne,
    /// A thread releases the lock between its check and its wait.
    LateWait,
}

/// Whether timed waits expire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Timeouts {
    /// Timed waits never expire. If only the time limit could end a wait, the checker reports a
    /// deadlock.
    #[default]
    Never,
    /// Timed waits expire at the checker's choice.
    Sometimes,
}

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
    static TIMEOUTS: Cell<Timeouts> = const { Cell::new(Timeouts::Never) };
    static SITES: RefCell<BTreeSet<Site>> = const { RefCell::new(BTreeSet::new()) };
}

/// The time since the start of the run.
pub(crate) fn now() -> Duration {
    NOW.get()
}

/// Advances the clock.
pub(super) fn pass(time: Duration) {
    NOW.set(NOW.get() + time);
}

/// Starts a run.
pub(super) fn begin(timeouts: Timeouts) {
    NOW.set(Duration::ZERO);
    TIMEOUTS.set(timeouts);
}

/// Plants a mistake in all later runs, or removes it.
pub(super) fn plant(mistake: Option<Mistake>) {
    MISTAKE.set(mistake);
}

/// Returns the locations of the engine's notifications that have been executed since the last call.
pub(super) fn take_sites() -> BTreeSet<Site> {
    SITES.take()
}

/// A lock of the engine.
#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

/// A held lock, with a reference to its mutex.
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
    /// Releases the lock, lets other threads run, and takes it again.
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

    /// Waits for a notification for at most `time`. As in the standard library, also returns
    /// whether the time expired.
    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        if TIMEOUTS.get() == Timeouts::Never {
            return Ok((guard.wait(&self.0), false));
        }
        // The wait ends spuriously, or after the full time.
        let guard = guard.relock();
        let over = thread_rng().r#gen();
        if over {
            pass(time);
        }
        Ok((guard, over))
    }

    /// Wakes every waiting thread.
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
