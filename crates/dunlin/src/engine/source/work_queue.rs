//! The work queue: where the source's lanes ask for work, and where they wait.
//!
//! Everything that the session's thread, the control lane's reader and the
//! lanes' threads share stands behind its one lock. A wait ends when something
//! has changed that may concern it: a [`WorkQueue::change`] for whatever brings work,
//! [`WorkQueue::set_rate`] for one that is held back, [`WorkQueue::cut`] and
//! [`WorkQueue::stop`] for all. That no order of threads loses such a wake-up is
//! checked (`engine/interleavings`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{KeyUsage, Sending};
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Work};

use super::super::fault::{Fault, OrFault};
use super::super::report::Traffic;
use super::super::sync::{Condvar, Interrupt, Mutex, MutexGuard, lock, since, wait, wait_for};
use super::event::SessionEvent;

/// Between two looks at the connection of a lane that is not let in yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the session's thread and its lanes share.
pub(in crate::engine) struct WorkQueue {
    pub(in crate::engine) state: Mutex<State>,
    /// Something has changed for a lane that waits.
    changed: Condvar,
    started: Instant,
}

/// Guarded by [`WorkQueue::state`].
pub(in crate::engine) struct State {
    pub(in crate::engine) lanes: Sending,
    pace: Pace,
    /// How often the cap has been changed.
    rate_changes: u64,
    /// Every lane ends at once, whatever it does.
    stop: bool,
    /// The iteration whose last chunk has been reported as cut.
    reported: u32,
    /// What each lane has sent so far, by its number.
    shares: BTreeMap<u16, LaneShare>,
    /// Pages that the destination has acknowledged.
    pub(super) acked_pages: u64,
}

/// One lane's share of the work.
#[derive(Default)]
struct LaneShare {
    traffic: Traffic,
    /// Ends what its thread is blocked in, other than a wait at the work queue.
    interrupt: Option<Interrupt>,
    /// Its thread shall end.
    cut: bool,
    worn: bool,
}

impl LaneShare {
    fn cut(&mut self) {
        self.cut = true;
        if let Some(interrupt) = &self.interrupt {
            interrupt();
        }
    }
}

/// From the session's thread, and the one that reads the control lane.
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

    /// Changes what a lane may be waiting for.
    // Its callers' notifications are left out one by one in the tests.
    #[cfg_attr(all(test, feature = "shuttle"), track_caller)]
    pub(in crate::engine) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut lock(&self.state));
        self.changed.notify_all();
        changed
    }

    /// A thread for `lane` is about to begin.
    pub(in crate::engine) fn expect(&self, lane: u16) {
        lock(&self.state).shares.insert(lane, LaneShare::default());
    }

    /// Begins an iteration with the pages that wait; returns its number and
    /// how many pages those are.
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

    /// Ends every lane: those that wait and those that are blocked in a call.
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

    /// Changes the cap over all lanes. A lane that waits for its turn under the
    /// old cap asks again under the new one: it may have been told to wait for
    /// long, and in the last pass the guest would wait with it.
    pub(in crate::engine) fn set_rate(&self, bytes_per_s: Option<u64>) {
        self.change(|state| {
            state.pace = Pace::new(bytes_per_s);
            state.rate_changes += 1;
        });
    }

    /// Takes an acknowledgement, on the thread that reads the control lane:
    /// so that none waits in a queue while the session's thread is busy.
    /// Returns whether `message` was one.
    pub(in crate::engine) fn acknowledge(&self, message: &Message) -> Result<bool, Fault> {
        let Message::Ack { sets, reached } = message else {
            return Ok(false);
        };
        let now_ns = self.now_ns();
        self.change(|state| {
            state.acked_pages += state
                .lanes
                .acknowledge(sets, reached, now_ns)
                .or_fault(FaultCode::Malformed, "an acknowledgement is wrong")?;
            Ok(true)
        })
    }

    /// When `at_ns` is, of the time by which lanes and rates are measured.
    pub(super) fn instant(&self, at_ns: u64) -> Instant {
        self.started + Duration::from_nanos(at_ns)
    }

    /// The time by which lanes and rates are measured.
    pub(in crate::engine) fn now_ns(&self) -> u64 {
        u64::try_from(since(self.started).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// From the lanes' threads.
impl WorkQueue {
    /// Lets [`WorkQueue::cut`] and [`WorkQueue::stop`] end what `lane` does from now on,
    /// by `interrupt` alone.
    ///
    /// # Errors
    /// The lane was given up already.
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

    /// Waits for work for `lane`; [`Work::Stop`] when it has been cut. `tell`
    /// reaches the session, `has_ended` looks at the lane's connection.
    ///
    /// # Errors
    /// The connection has ended before the destination let the lane in.
    pub(in crate::engine) fn next(
        &self,
        lane: u16,
        wear: KeyUsage,
        plan: &mut ChunkPlan,
        tell: impl Fn(SessionEvent),
        has_ended: impl Fn() -> bool,
    ) -> Result<Work, Fault> {
        let mut state = lock(&self.state);
        loop {
            let now_ns = self.now_ns();
            let Some(share) = state.shares.get_mut(&lane) else {
                return Ok(Work::Stop);
            };
            let wears = wear != KeyUsage::Fresh && !std::mem::replace(&mut share.worn, true);
            if share.cut || state.stop {
                return Ok(Work::Stop);
            }
            let work = state.lanes.next(lane, wear, now_ns, plan);
            if wears {
                tell(SessionEvent::LaneWorn);
            }
            let schedule = state.lanes.schedule();
            let iteration = schedule.iteration();
            if state.reported < iteration && schedule.pending_pages() == 0 {
                state.reported = iteration;
                tell(SessionEvent::Cut { iteration });
            }
            if work != Work::Wait {
                return Ok(work);
            }
            if state.lanes.schedule().course(lane).is_some() {
                state = wait(&self.changed, state);
                continue;
            }
            // The destination has not let it in yet. If the connection ends
            // before, nobody there knows which lane it was.
            state = wait_for(&self.changed, state, LOOK_EVERY);
            if state.lanes.schedule().course(lane).is_none() && has_ended() {
                let what = format!("lane {lane} ended before it was let in");
                return Err(Fault::new(FaultCode::LaneLost, what));
            }
        }
    }

    /// Adds waiting pages to the chunk that `lane` was given last, as the schedule's `extend` does.
    pub(in crate::engine) fn extend(&self, lane: u16, plan: &mut ChunkPlan, room: u64) -> bool {
        let mut state = lock(&self.state);
        if state.stop || state.shares.get(&lane).is_none_or(|share| share.cut) {
            return false;
        }
        state.lanes.schedule_mut().extend(plan, room)
    }

    /// Waits until the session's rate cap lets `bytes` go on `lane`.
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
            if state.stop || state.shares.get(&lane).is_none_or(|share| share.cut) {
                return Err(given_up(lane));
            }
            if left == 0 {
                return Ok(());
            }
            state = wait_for(&self.changed, state, Duration::from_nanos(left));
        }
    }

    /// Adds to what `lane` has sent.
    pub(super) fn account(&self, lane: u16, update: impl FnOnce(&mut Traffic)) {
        if let Some(share) = lock(&self.state).shares.get_mut(&lane) {
            update(&mut share.traffic);
        }
    }
}

impl State {
    /// All lanes' traffic together.
    pub(super) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for share in self.shares.values() {
            sum.add(&share.traffic);
        }
        sum
    }

    /// Bytes of guest memory by lane.
    pub(super) fn by_lane(&self) -> Vec<(u16, u64)> {
        self.shares
            .iter()
            .filter(|(_, share)| share.traffic.wire_bytes > 0)
            .map(|(&lane, share)| (lane, share.traffic.raw_pages * PAGE_BYTES))
            .collect()
    }
}

/// The lane's thread shall end.
pub(super) fn given_up(lane: u16) -> Fault {
    Fault::new(FaultCode::LaneLost, format!("lane {lane} was given up"))
}
