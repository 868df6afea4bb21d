//! The work queue: the source's lanes take work from it, and wait until it has work.
//!
//! Its lock guards everything that the session's thread, the control lane's reader and the lane
//! threads share. A wait ends when something that it waits for may have changed:
//! [`WorkQueue::change`] signals new work, [`WorkQueue::set_rate`] wakes lanes held back by the
//! rate cap, [`WorkQueue::cut`] and [`WorkQueue::stop`] wake all. `engine/interleavings` checks, in
//! many orders of the threads, that no wake-up is lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dunlin_lane::data::Canceller;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{KeyUsage, Sending};
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Work};

use super::super::fault::{Fault, OrFault};
use super::super::report::Traffic;
use super::super::sync::{Condvar, Interrupt, Mutex, MutexGuard, lock, since, wait};
use super::event::SessionEvent;

/// Interval between checks of the connection of a lane that the destination has not
/// admitted yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// State shared by the session's thread and its lanes.
pub(in crate::engine) struct WorkQueue {
    pub(in crate::engine) state: Mutex<State>,
    /// Notified when something changes that a lane may wait for.
    changed: Condvar,
    started: Instant,
}

/// Guarded by [`WorkQueue::state`].
pub(in crate::engine) struct State {
    pub(in crate::engine) lanes: Sending,
    pace: Pace,
    /// How many times the rate cap has been changed.
    rate_changes: u64,
    /// Whether every lane must end immediately.
    stop: bool,
    /// The newest iteration for which `SessionEvent::Cut` has been sent.
    reported: u32,
    /// Traffic and status of each lane, by its number.
    shares: BTreeMap<u16, LaneShare>,
    /// Pages that the destination has acknowledged.
    pub(super) acked_pages: u64,
}

/// Traffic and status of one lane.
#[derive(Default)]
struct LaneShare {
    traffic: Traffic,
    /// Interrupts the thread's blocking calls, except a wait in the work queue.
    interrupt: Option<Interrupt>,
    /// The lane's connection; `None` before the connection is open.
    connection: Option<Canceller>,
    /// Whether the thread must end.
    cut: bool,
    key_used: bool,
}

impl LaneShare {
    fn cut(&mut self) {
        self.cut = true;
        if let Some(interrupt) = &self.interrupt {
            interrupt();
        }
    }
}

/// Methods called by the session's thread, by the thread that reads the control lane, and, for
/// [`WorkQueue::set_rate`], by the caller that changes the rate.
impl WorkQueue {
    pub(in crate::engine) fn new(lanes: Sending, pace: Pace) -> Self {
        Self {
            state: Mutex::new(State {
                lanes,
                pace,
                rate_changes: 0,
                stop: false,
                reported: 0,
                shares: BTreeMap::new(),
                acked_pages: 0,
            }),
            changed: Condvar::new(),
            started: Instant::now(),
        }
    }

    /// Changes the state with `change`, and wakes the lanes that wait.
    // The tests of `interleavings` omit this notification for one caller at a time. `track_caller`
    // lets them identify the caller.
    #[cfg_attr(all(test, feature = "shuttle"), track_caller)]
    pub(in crate::engine) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut lock(&self.state));
        self.changed.notify_all();
        changed
    }

    /// Registers `lane` before its thread starts.
    pub(in crate::engine) fn expect(&self, lane: u16) {
        lock(&self.state).shares.insert(lane, LaneShare::default());
    }

    /// Begins an iteration over the pending pages; returns its number and the number of
    /// these pages.
    pub(in crate::engine) fn begin_iteration(&self, last: bool) -> (u32, u64) {
        let now_ns = self.now_ns();
        self.change(|state| {
            state.lanes.schedule_mut().begin_iteration();
            if last {
                state.lanes.finish(now_ns);
            }
            let schedule = state.lanes.schedule();
            (schedule.iteration(), schedule.pending_pages())
        })
    }

    /// Ends every lane: those that wait and those blocked in a call.
    pub(in crate::engine) fn stop(&self) {
        self.change(|state| {
            state.stop = true;
            for share in state.shares.values_mut() {
                share.cut();
            }
        });
    }

    /// Ends one lane.
    pub(in crate::engine) fn cut(&self, lane: u16) {
        self.change(|state| {
            if let Some(share) = state.shares.get_mut(&lane) {
                share.cut();
            }
        });
    }

    /// Changes the rate cap of all lanes together. A lane that waits under the old cap wakes and
    /// reserves again under the new one. Otherwise it could wait for a long time under a low old
    /// cap, and in the last iteration the guest would stay paused for that time.
    pub(in crate::engine) fn set_rate(&self, bytes_per_s: Option<u64>) {
        self.change(|state| {
            state.pace = Pace::new(bytes_per_s);
            state.rate_changes += 1;
        });
    }

    /// Handles an acknowledgement on the thread that reads the control lane, so that an
    /// acknowledgement does not wait while the session's thread is busy. Returns whether `message`
    /// was an acknowledgement.
    pub(in crate::engine) fn acknowledge(&self, message: &Message) -> Result<bool, Fault> {
        let Message::Ack { sets, reached } = message else {
            return Ok(false);
        };
        let now_ns = self.now_ns();
        self.change(|state| {
            state.acked_pages += state
                .lanes
                .acknowledge(sets, reached, now_ns)
                .or_fault(FaultCode::Malformed, "invalid acknowledgement")?;
            Ok(true)
        })
    }

    /// Converts a time on the clock of [`WorkQueue::now_ns`].
    pub(super) fn instant(&self, at_ns: u64) -> Instant {
        self.started + Duration::from_nanos(at_ns)
    }

    /// The time on the clock that lanes and rates use, in nanoseconds.
    pub(in crate::engine) fn now_ns(&self) -> u64 {
        u64::try_from(since(self.started).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Methods that the lane threads call.
impl WorkQueue {
    /// Sets the function with which [`WorkQueue::cut`] and [`WorkQueue::stop`] interrupt
    /// `lane`. Replaces any earlier function.
    ///
    /// # Errors
    /// The lane has already been given up.
    pub(in crate::engine) fn interrupted_by(
        &self,
        lane: u16,
        interrupt: Interrupt,
    ) -> Result<(), Fault> {
        let mut state = lock(&self.state);
        let State { stop, shares, .. } = &mut *state;
        match shares.get_mut(&lane) {
            Some(share) if !share.cut && !*stop => share.interrupt = Some(interrupt),
            _ => return Err(given_up(lane)),
        }
        Ok(())
    }

    /// Keeps the connection of `lane` for queries of its state.
    pub(super) fn connected(&self, lane: u16, connection: Canceller) {
        if let Some(share) = lock(&self.state).shares.get_mut(&lane) {
            share.connection = Some(connection);
        }
    }

    /// Waits for work for `lane`. Returns [`Work::Stop`] after the lane has been cut. `report`
    /// sends an event to the session, and `has_ended` checks the lane's connection.
    ///
    /// # Errors
    /// The connection ended before the destination admitted the lane.
    pub(in crate::engine) fn next(
        &self,
        lane: u16,
        key_usage: KeyUsage,
        plan: &mut ChunkPlan,
        report: impl Fn(SessionEvent),
        has_ended: impl Fn() -> bool,
    ) -> Result<Work, Fault> {
        let mut state = lock(&self.state);
        loop {
            let now_ns = self.now_ns();
            let Some(share) = state.shares.get_mut(&lane) else {
                return Ok(Work::Stop);
            };
            let newly_used =
                key_usage != KeyUsage::Fresh && !std::mem::replace(&mut share.key_used, true);
            if share.cut || state.stop {
                return Ok(Work::Stop);
            }
            let work = state.lanes.next(lane, key_usage, now_ns, plan);
            if newly_used {
                report(SessionEvent::Tended);
            }
            let schedule = state.lanes.schedule();
            let iteration = schedule.iteration();
            if state.reported < iteration && schedule.pending_pages() == 0 {
                state.reported = iteration;
                report(SessionEvent::Cut { iteration });
            }
            if work != Work::Wait {
                return Ok(work);
            }
            if state.lanes.schedule().course(lane).is_some() {
                state = wait(&self.changed, state, None);
                continue;
            }
            // The destination has not admitted the lane yet. If the connection ends before that,
            // the destination cannot report which lane has ended, so this thread checks the
            // connection.
            state = wait(&self.changed, state, Some(LOOK_EVERY));
            if state.lanes.schedule().course(lane).is_none() && has_ended() {
                let what = format!("lane {lane} ended before it was admitted");
                return Err(Fault::new(FaultCode::LaneLost, what));
            }
        }
    }

    /// Adds up to `room` pending pages to `plan`, the newest chunk of `lane`, with the schedule's
    /// `extend`.
    pub(in crate::engine) fn extend(&self, lane: u16, plan: &mut ChunkPlan, room: u64) {
        let mut state = lock(&self.state);
        if !state.is_given_up(lane) {
            state.lanes.schedule_mut().extend(plan, room);
        }
    }

    /// Waits until the session's rate cap allows `bytes` on `lane`.
    ///
    /// # Errors
    /// The lane was given up.
    pub(in crate::engine) fn await_rate(&self, lane: u16, bytes: u64) -> Result<(), Fault> {
        let mut state = lock(&self.state);
        let reserve = |state: &mut MutexGuard<'_, State>| {
            let at_ns = state.pace.reserve(self.now_ns(), bytes);
            state.lanes.paced(lane, at_ns);
            (state.rate_changes, at_ns)
        };
        let (mut changes, mut at_ns) = reserve(&mut state);
        loop {
            if changes != state.rate_changes {
                (changes, at_ns) = reserve(&mut state);
            }
            let left = at_ns.saturating_sub(self.now_ns());
            if state.is_given_up(lane) {
                return Err(given_up(lane));
            }
            if left == 0 {
                return Ok(());
            }
            state = wait(&self.changed, state, Some(Duration::from_nanos(left)));
        }
    }

    /// Updates the traffic of `lane`.
    pub(super) fn account(&self, lane: u16, update: impl FnOnce(&mut Traffic)) {
        if let Some(share) = lock(&self.state).shares.get_mut(&lane) {
            update(&mut share.traffic);
        }
    }
}

impl State {
    /// Whether the thread of `lane` must end.
    fn is_given_up(&self, lane: u16) -> bool {
        self.stop || self.shares.get(&lane).is_none_or(|share| share.cut)
    }

    /// The traffic of all lanes.
    pub(super) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for share in self.shares.values() {
            sum.add(&share.traffic);
        }
        sum
    }

    /// Bytes of guest memory by lane, for each lane that has sent something.
    pub(super) fn by_lane(&self) -> Vec<(u16, u64)> {
        self.shares
            .iter()
            .filter(|(_, share)| share.traffic.wire_bytes > 0)
            .map(|(&lane, share)| (lane, share.traffic.raw_pages * PAGE_BYTES))
            .collect()
    }

    /// The connections by lane. That of a lost lane is kept until the session ends.
    pub(super) fn connections(&self) -> Vec<(u16, Canceller)> {
        let connections = self.shares.iter();
        connections
            .filter_map(|(&lane, share)| Some((lane, share.connection.clone()?)))
            .collect()
    }
}

/// The fault that the thread of a lane returns after the lane was given up.
pub(super) fn given_up(lane: u16) -> Fault {
    Fault::new(
        FaultCode::LaneLost,
        format!("lane {lane} was given up: it made no progress, or the destination lost it"),
    )
}
