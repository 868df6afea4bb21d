//! The barrier: where the destination's lanes wait for each other.
//!
//! What the session's thread and the lanes' threads know of the lanes stands
//! behind its one lock: who is open, which marks are reached, what has to be
//! acknowledged. A lane at a mark waits until every other has reached it, or is
//! fenced, or everything ends. That no order of threads lets one through too
//! early or loses its wake-up is checked (`engine/interleavings`).

use std::collections::BTreeMap;

use dunlin_proto::lanes::{CourseError, LaneRefusal, Receiving};

use super::super::sync::{Condvar, Interrupt, Mutex, lock, wait};

/// What a session's thread and its lanes share.
pub(in crate::engine) struct IterationBarrier {
    state: Mutex<State>,
    changed: Condvar,
}

/// Guarded by [`IterationBarrier::state`].
struct State {
    lanes: Receiving,
    stop: bool,
    /// Ends what each lane's thread is blocked in.
    interrupts: BTreeMap<u16, Interrupt>,
}

/// From the session's thread.
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

    /// What is known of the lanes; those that wait at a mark are woken
    /// afterwards.
    pub(in crate::engine) fn lanes<T>(&self, ask: impl FnOnce(&mut Receiving) -> T) -> T {
        let answer = ask(&mut lock(&self.state).lanes);
        self.changed.notify_all();
        answer
    }

    /// A lane takes part from now on, until `interrupt` ends it.
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

    /// Ends one lane, whatever it waits for. It must be known as closing, so
    /// that one that waits at a mark has been woken already.
    pub(in crate::engine) fn cut(&self, lane: u16) {
        if let Some(interrupt) = lock(&self.state).interrupts.get(&lane) {
            interrupt();
        }
    }

    /// Ends every lane: those that wait at a mark and those that wait for
    /// bytes.
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

/// From the lanes' threads. `tell` lets the session know that there is
/// something to acknowledge, and is called for the first such thing only.
impl IterationBarrier {
    /// A chunk's header has come on `lane`: whether it may be written.
    pub(in crate::engine) fn check_chunk(
        &self,
        lane: u16,
        number: u64,
        iteration: u32,
    ) -> Result<(), CourseError> {
        lock(&self.state).lanes.check_chunk(lane, number, iteration)
    }

    /// Notes something that has to be told to the source.
    pub(in crate::engine) fn report<T>(
        &self,
        note: impl FnOnce(&mut Receiving) -> T,
        tell: impl FnOnce(),
    ) -> T {
        let mut state = lock(&self.state);
        let told = state.lanes.has_reports();
        let noted = note(&mut state.lanes);
        if !told && state.lanes.has_reports() {
            tell();
        }
        drop(state);
        self.changed.notify_all();
        noted
    }

    /// Waits at the mark of `iteration`, which has come on `lane`, for every
    /// other lane. False if the lane is given up meanwhile.
    pub(in crate::engine) fn pass(
        &self,
        lane: u16,
        iteration: u32,
        tell: impl FnOnce(),
    ) -> Result<bool, CourseError> {
        self.report(|lanes| lanes.mark(lane, iteration), tell)?;
        let mut state = lock(&self.state);
        while !state.lanes.may_pass(iteration) {
            if !state.wants(lane) {
                return Ok(false);
            }
            state = wait(&self.changed, state);
        }
        Ok(true)
    }

    /// Whether `lane` shall go on.
    pub(in crate::engine) fn wants(&self, lane: u16) -> bool {
        lock(&self.state).wants(lane)
    }

    /// The lane's connection goes with its thread: a source that opens and
    /// ends lane after lane uses up no descriptors here (I7).
    pub(in crate::engine) fn forget(&self, lane: u16) {
        lock(&self.state).interrupts.remove(&lane);
    }
}

impl State {
    fn wants(&self, lane: u16) -> bool {
        !self.stop && !self.lanes.is_closing(lane)
    }
}
