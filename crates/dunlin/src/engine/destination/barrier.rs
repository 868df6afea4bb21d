//! The iteration barrier: where the destination's lanes wait for each other.
//!
//! The session's thread and the lane threads share the state of the lanes: which lanes are open,
//! which marks they have reached, and what must be acknowledged. The barrier's lock guards that
//! state. A lane at a mark waits until every other lane has reached the mark, has ended or is
//! fenced. The wait also ends if the lane itself is fenced or the session ends.
//! `engine/interleavings` checks, in many orders of the threads, that no lane passes a mark too
//! early or misses its wake-up.

use std::collections::BTreeMap;

use dunlin_proto::lanes::{CourseError, LaneRefusal, Receiving};

use super::super::sync::{Condvar, Interrupt, Mutex, lock, wait};

/// State shared by the session's thread and its lanes.
pub(in crate::engine) struct IterationBarrier {
    state: Mutex<State>,
    changed: Condvar,
}

/// Guarded by [`IterationBarrier::state`].
struct State {
    lanes: Receiving,
    stop: bool,
    /// For each lane, a function that interrupts the blocking call of its thread.
    interrupts: BTreeMap<u16, Interrupt>,
}

/// Methods that the session's thread calls.
impl IterationBarrier {
    pub(in crate::engine) fn new(lanes_max: u16) -> Self {
        Self {
            state: Mutex::new(State {
                lanes: Receiving::new(lanes_max),
                stop: false,
                interrupts: BTreeMap::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// Accesses the state of the lanes, and then wakes the lanes that wait at a mark.
    pub(in crate::engine) fn lanes<T>(&self, access: impl FnOnce(&mut Receiving) -> T) -> T {
        let result = access(&mut lock(&self.state).lanes);
        self.changed.notify_all();
        result
    }

    /// Admits a lane; `interrupt` ends its blocking calls.
    pub(in crate::engine) fn admit(
        &self,
        lane: u16,
        interrupt: Interrupt,
    ) -> Result<(), LaneRefusal> {
        let mut state = lock(&self.state);
        state.lanes.admit(lane)?;
        state.interrupts.insert(lane, interrupt);
        Ok(())
    }

    /// Interrupts the blocking call of one lane's thread. If the lane waits at a mark instead, the
    /// wait has already ended, because the caller has recorded that the lane is closing.
    pub(in crate::engine) fn cut(&self, lane: u16) {
        if let Some(interrupt) = lock(&self.state).interrupts.get(&lane) {
            interrupt();
        }
    }

    /// Ends every lane: those that wait at a mark and those that wait for bytes.
    pub(in crate::engine) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stop = true;
        for interrupt in state.interrupts.values() {
            interrupt();
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Methods that the lane threads call. `notify` informs the session that something must be
/// acknowledged. It is called only if nothing was waiting to be acknowledged before.
impl IterationBarrier {
    /// Checks the header of a chunk on `lane`: whether the chunk may be written.
    pub(in crate::engine) fn check_chunk(
        &self,
        lane: u16,
        number: u64,
        iteration: u32,
    ) -> Result<(), CourseError> {
        lock(&self.state).lanes.check_chunk(lane, number, iteration)
    }

    /// Notes something that must be reported to the source.
    pub(in crate::engine) fn report<T>(
        &self,
        note: impl FnOnce(&mut Receiving) -> T,
        notify: impl FnOnce(),
    ) -> T {
        let mut state = lock(&self.state);
        let notified = state.lanes.has_reports();
        let noted = note(&mut state.lanes);
        if !notified && state.lanes.has_reports() {
            notify();
        }
        drop(state);
        self.changed.notify_all();
        noted
    }

    /// Handles the mark of `iteration` on `lane`: waits until no other lane is still before this
    /// mark. Returns false if `lane` is given up during the wait.
    pub(in crate::engine) fn pass(
        &self,
        lane: u16,
        iteration: u32,
        notify: impl FnOnce(),
    ) -> Result<bool, CourseError> {
        self.report(|lanes| lanes.mark(lane, iteration), notify)?;
        let mut state = lock(&self.state);
        while !state.lanes.may_pass(iteration) {
            if !state.wants(lane) {
                return Ok(false);
            }
            state = wait(&self.changed, state, None);
        }
        Ok(true)
    }

    /// Whether the thread of `lane` must continue to receive.
    pub(in crate::engine) fn wants(&self, lane: u16) -> bool {
        lock(&self.state).wants(lane)
    }

    /// Drops the handle to the lane's connection when the lane's thread ends. Otherwise a source
    /// that opens and ends one lane after another could exhaust descriptors (invariant I7).
    pub(in crate::engine) fn forget(&self, lane: u16) {
        lock(&self.state).interrupts.remove(&lane);
    }
}

impl State {
    fn wants(&self, lane: u16) -> bool {
        !self.stop && !self.lanes.is_closing(lane)
    }
}
