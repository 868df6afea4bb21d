//! Pre-copy: iterations over what is dirty while the guest runs.

use std::time::{Duration, Instant};

use dunlin_proto::bitmap::Run;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::precopy::{Decision, Goals, Pass, Precopy};
use dunlin_proto::schedule::Schedule;

use super::super::control::FromPeer;
use super::super::error::Fault;
use super::super::lock;
use super::super::report::{Event, Iteration, Progress, Traffic};
use super::super::vmm::RunState;
use super::SessionEvent;
use super::session::{Session, nanos, unexpected};

/// Between two progress events.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);
/// What the switchover costs besides the last pages and round trips: pausing,
/// saving and loading the state, starting the guest. `dunlin demo` shows them:
/// about 0.1, up to 3 and 0.7 ms with the reference VMM; the rest is room for
/// a VMM with devices.
const STATE_COST: Duration = Duration::from_millis(6);
/// Bytes per second at which digests are made, for the prediction alone.
const DIGEST_BYTES_PER_S: u64 = 3 << 30;
/// A pass shorter than this says nothing about the bandwidth.
const MEASURABLE: Duration = Duration::from_millis(20);
/// A pass lasts at least this long, so that a guest whose few dirty pages go
/// by in no time is not asked for its dirty log thousands of times a second.
const SHORTEST_PASS: Duration = Duration::from_millis(5);
/// What is still under way when a pass ends, as time on the link: enough that
/// the link never falls idle between two passes, and no more. What is asked of
/// the dirty log later is less, and what lies in the buffers of many lanes on a
/// slow link would count as a remainder that no pass makes smaller.
const KEPT_UNDER_WAY: Duration = Duration::from_millis(10);
/// How often it is looked at whether that much has been acknowledged.
const DRAIN_EVERY: Duration = Duration::from_millis(2);
/// From so many zero pages to one that is not, a pass says nothing about the
/// bandwidth, unless the one before was like that too.
const MOSTLY_ZERO: u64 = 4;

/// What the bandwidth is being measured over: one pass, or several that are too short to tell.
pub(super) struct Window {
    since: Instant,
    /// Acknowledged pages beyond so many are this window's; and pages that had gone out by then.
    acked_pages: u64,
    raw_pages: u64,
    zero_pages: u64,
    /// Whether the window before was mostly of zero pages.
    mostly_zero: bool,
}

impl Window {
    pub(super) fn new(since: Instant) -> Self {
        Self {
            since,
            acked_pages: 0,
            raw_pages: 0,
            zero_pages: 0,
            mostly_zero: false,
        }
    }

    /// Pages that count for this window. What a lost lane had sent goes out twice, so that there may
    /// be fewer than it began with.
    fn acked_since(&self, acked_pages: u64) -> u64 {
        acked_pages.saturating_sub(self.acked_pages)
    }

    /// Ends after `measured`, with so many pages acknowledged and `traffic` gone out; the next
    /// begins. Returns bytes per second, or none if this says nothing.
    ///
    /// Zero pages go by much faster than those that a guest works on, and would promise a
    /// bandwidth that is not there: in untouched memory, in huge pages that were touched once,
    /// in what a guest clears before it uses it. A guest that goes on like that is believed.
    fn end(&mut self, measured: Duration, acked_pages: u64, traffic: &Traffic) -> Option<u64> {
        let raw_pages = traffic.raw_pages - self.raw_pages;
        let zero_pages = traffic.zero_pages - self.zero_pages;
        let mostly_zero = zero_pages > raw_pages * MOSTLY_ZERO;
        let acked = self.acked_since(acked_pages);
        let tells = acked > 0 && (!mostly_zero || self.mostly_zero);
        *self = Self {
            since: Instant::now(),
            // Zero pages that are still under way are not the next window's.
            acked_pages: if mostly_zero {
                traffic.raw_pages + traffic.zero_pages
            } else {
                acked_pages
            },
            raw_pages: traffic.raw_pages,
            zero_pages: traffic.zero_pages,
            mostly_zero,
        };
        tells.then(|| per_second(acked * PAGE_BYTES, measured))
    }
}

impl Session<'_> {
    /// Iterations until the switchover is due.
    pub(super) fn pre_copy(&mut self) -> Result<(), Fault> {
        self.start_logs()?;
        self.mark_everything()?;
        let mut precopy = Precopy::new(
            Goals {
                downtime_limit_ns: nanos(self.options.downtime_limit),
                time_limit_ns: self.options.time_limit.map(nanos),
                at_time_limit: self.options.at_time_limit,
                throttle: self.options.throttle,
            },
            PAGE_BYTES,
        );
        loop {
            self.ask_anew()?;
            let (iteration, waiting) = self.shared.begin_iteration(false);
            let began = Instant::now();
            let bytes_before = lock(&self.shared.state).traffic().wire_bytes;
            self.await_cut(iteration, began)?;
            self.check_guest()?;
            let duration = began.elapsed();
            let dirtied_pages = self.fetch_logs()?;
            let now = lock(&self.shared.state).traffic();
            let wire_bytes = now.wire_bytes - bytes_before;
            self.measure(&now, dirtied_pages, duration);
            let pass = Pass {
                since_start_ns: nanos(self.started.elapsed()),
                bytes_per_s: self.bytes_per_s,
                remaining_bytes: remaining_bytes(lock(&self.shared.state).lanes.schedule()),
                dirtied_pages,
                fixed_ns: nanos(self.fixed_cost()),
            };
            let ended = Iteration {
                number: iteration,
                duration,
                pages: waiting,
                dirtied_pages,
                wire_bytes,
                predicted_downtime: Duration::from_nanos(Precopy::predict_ns(&pass))
                    + self.digest_cost(),
                throttle: self.throttle,
            };
            self.observer.event(&Event::Iterated(ended.clone()));
            self.iterations.push(ended);
            match precopy.after_iteration(&pass) {
                Decision::SwitchOver => return Ok(()),
                Decision::GiveUp => {
                    return Err(Fault::new(
                        FaultCode::TimeLimit,
                        "the migration did not converge within its time limit",
                    ));
                }
                Decision::OutOfReach => {
                    return Err(Fault::new(
                        FaultCode::NotConverging,
                        format!(
                            "nothing is left to send, and the switchover alone takes {:?}: more \
                             than the downtime limit of {:?}",
                            self.fixed_cost(),
                            self.options.downtime_limit
                        ),
                    ));
                }
                Decision::Iterate { throttle } => self.throttle(throttle),
            }
        }
    }

    /// Marks what is worth sending: the first iteration's pages.
    pub(super) fn mark_everything(&mut self) -> Result<(), Fault> {
        let mut state = lock(&self.shared.state);
        for (index, region) in self.memory.regions().iter().enumerate() {
            let schedule = state.lanes.schedule_mut();
            let found = self.memory.ranges_to_send(index, &mut |range| {
                let first = range.start / PAGE_BYTES;
                let count = range.end.div_ceil(PAGE_BYTES) - first;
                schedule.mark_run(index, Run { first, count });
            });
            if let Err(error) = found {
                self.observer.event(&Event::Warning(format!(
                    "holes in guest memory cannot be found ({error}): all of {} is read",
                    region.name
                )));
                let count = region.pages();
                let schedule = state.lanes.schedule_mut();
                schedule.mark_run(index, Run { first: 0, count });
            }
        }
        Ok(())
    }

    /// Waits until the last chunk of `iteration` has been given to a lane and
    /// most of what was given has arrived, or the time limit has come. A pass
    /// that is over in no time is stretched: the guest gets the processor for
    /// longer than the engine does.
    pub(super) fn await_cut(&mut self, iteration: u32, began: Instant) -> Result<(), Fault> {
        let mut cut_yet = false;
        let mut progress_at = Instant::now() + PROGRESS_EVERY;
        loop {
            let mut wait = progress_at.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                self.check_guest()?;
                self.report_progress();
                progress_at = Instant::now() + PROGRESS_EVERY;
                wait = PROGRESS_EVERY;
            }
            if cut_yet {
                let stretched = SHORTEST_PASS.saturating_sub(began.elapsed());
                if stretched.is_zero() && self.is_drained() {
                    return Ok(());
                }
                wait = wait.min(if stretched.is_zero() {
                    DRAIN_EVERY
                } else {
                    stretched
                });
            }
            if let Some(limit) = self.options.time_limit {
                let left = limit.saturating_sub(self.started.elapsed());
                if left.is_zero() {
                    return Ok(());
                }
                wait = wait.min(left);
            }
            match self.next_event(wait)? {
                Some(SessionEvent::Cut { iteration: cut }) => cut_yet |= cut == iteration,
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => {
                    return Err(unexpected(&message));
                }
                Some(_) | None => {}
            }
        }
    }

    /// Whether little enough is under way to ask the dirty logs again.
    fn is_drained(&self) -> bool {
        let state = lock(&self.shared.state);
        let under_way = state.lanes.schedule().in_flight_pages();
        let acked = self.window.acked_since(state.acked_pages);
        drop(state);
        let bytes_per_s = match self.bytes_per_s {
            0 => per_second(acked * PAGE_BYTES, self.window.since.elapsed()),
            known => known,
        };
        let kept = KEPT_UNDER_WAY + self.control.round_trip();
        let kept_bytes = u128::from(bytes_per_s) * kept.as_nanos() / 1_000_000_000;
        u128::from(under_way * PAGE_BYTES) <= kept_bytes
    }

    /// Ends the migration when the guest has ended.
    pub(super) fn check_guest(&self) -> Result<(), Fault> {
        match self.vm.run_state() {
            RunState::Running | RunState::Paused => Ok(()),
            RunState::PoweredOff => Err(Fault::new(
                FaultCode::GuestPoweredOff,
                "the guest powered itself off while it was being migrated",
            )),
            RunState::Stopped(why) => Err(Fault::new(
                FaultCode::GuestStopped,
                format!("the guest stopped while it was being migrated: {why}"),
            )),
        }
    }

    pub(super) fn start_logs(&mut self) -> Result<(), Fault> {
        self.logs = self.vm.dirty_logs();
        for log in &mut self.logs {
            log.start().map_err(|error| {
                Fault::new(FaultCode::Kernel, "a dirty log cannot be started").because(error)
            })?;
        }
        Ok(())
    }

    /// Adds what has been dirtied since the last time to the pages that wait.
    pub(super) fn fetch_logs(&mut self) -> Result<u64, Fault> {
        let mut named = 0;
        for log in &mut self.logs {
            let shared = &self.shared;
            log.fetch(&mut |index, words| {
                let mut state = lock(&shared.state);
                named += state.lanes.schedule_mut().mark_dirty(index, words);
            })
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "a dirty log cannot be read").because(error)
            })?;
        }
        Ok(named)
    }

    /// The bandwidth is what the destination has acknowledged: what stands in
    /// the sockets' buffers still has to travel. Passes too short to tell are
    /// taken together.
    pub(super) fn measure(&mut self, now: &Traffic, dirtied: u64, duration: Duration) {
        self.dirty_pages_per_s = per_second(dirtied, duration);
        let acked_pages = lock(&self.shared.state).acked_pages;
        let measured = self.window.since.elapsed();
        if measured < MEASURABLE && self.bytes_per_s != 0 {
            return;
        }
        if let Some(bytes_per_s) = self.window.end(measured, acked_pages, now) {
            self.bytes_per_s = bytes_per_s;
        }
    }

    /// The switchover's cost besides the last pages. The digests are no part
    /// of it: they are asked for by hand, and no further pass shortens them.
    pub(super) fn fixed_cost(&self) -> Duration {
        STATE_COST + self.control.round_trip() * 3 / 2
    }

    pub(super) fn digest_cost(&self) -> Duration {
        if !self.options.verify {
            return Duration::ZERO;
        }
        let bytes = self.iterations.first().map_or(0, |first| first.pages) * PAGE_BYTES;
        Duration::from_millis(bytes * 1000 / DIGEST_BYTES_PER_S)
    }

    pub(super) fn throttle(&mut self, percent: u8) {
        if percent == self.throttle {
            return;
        }
        match self.vm.throttle(percent) {
            Ok(true) => {
                self.throttle = percent;
                self.observer.event(&Event::Throttled { percent });
            }
            Ok(false) => {}
            Err(error) => self.observer.event(&Event::Warning(format!(
                "the guest cannot be slowed down: {error}"
            ))),
        }
    }

    pub(super) fn report_progress(&self) {
        let state = lock(&self.shared.state);
        let wire_bytes = state.traffic().wire_bytes;
        let sent_before: u64 = self.iterations.iter().map(|one| one.wire_bytes).sum();
        let bytes_per_s = if self.bytes_per_s == 0 {
            let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(1);
            (wire_bytes - sent_before.min(wire_bytes)) * 1000 / millis.max(1)
        } else {
            self.bytes_per_s
        };
        let schedule = state.lanes.schedule();
        let remaining_bytes = schedule.pending_pages() * PAGE_BYTES;
        let progress = Progress {
            iteration: schedule.iteration(),
            bytes_per_s,
            remaining_bytes,
            dirty_pages_per_s: self.dirty_pages_per_s,
            predicted_downtime: self
                .iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            lanes: state.by_lane(),
        };
        drop(state);
        self.observer.event(&Event::Progress(progress));
    }
}

/// What a switchover now would have to wait for: the pages that are dirty, and
/// those that were given to a lane and have not arrived.
fn remaining_bytes(schedule: &Schedule) -> u64 {
    schedule.remaining_pages() * PAGE_BYTES
}

pub(super) fn per_second(amount: u64, duration: Duration) -> u64 {
    let nanos = duration.as_nanos().max(1);
    u64::try_from(u128::from(amount) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_proto::limits::CHUNK_PAGES;
    use dunlin_proto::precopy::AtTimeLimit;
    use dunlin_proto::schedule::{ChunkPlan, Work};

    use super::*;

    /// Passes of 100 ms over a link of 100 MiB/s, which zero pages do not load: 2560 pages that
    /// are not zero go by in each, or forty times as many that are.
    #[test]
    fn a_pass_mostly_of_zeros_is_believed_only_after_another() {
        const BYTES_PER_S: u64 = 100 << 20;
        const RAW: u64 = 2560;
        const ZERO: u64 = 40 * RAW;
        let mut window = Window::new(Instant::now());
        let mut traffic = Traffic::default();
        let mut pass = |raw_pages, zero_pages| {
            traffic.raw_pages += raw_pages;
            traffic.zero_pages += zero_pages;
            let acked = traffic.raw_pages + traffic.zero_pages;
            window.end(Duration::from_millis(100), acked, &traffic)
        };
        // Untouched memory first; and a guest of which all is like that must come to an end.
        assert_eq!(pass(0, ZERO), None);
        assert_eq!(pass(0, ZERO), Some(40 * BYTES_PER_S));
        // What the guest works on, and in between what it has only touched.
        assert_eq!(pass(RAW, 0), Some(BYTES_PER_S));
        assert_eq!(pass(RAW / 100, ZERO), None);
        assert_eq!(pass(RAW, RAW), Some(2 * BYTES_PER_S));
        assert_eq!(pass(0, 0), None);
    }

    /// The end of a pass of zero pages is acknowledged in the next one.
    #[test]
    fn zero_pages_under_way_are_not_the_next_passs() {
        const RAW: u64 = 2560;
        const ZERO: u64 = 40 * RAW;
        const LATE: u64 = RAW;
        let tenth = Duration::from_millis(100);
        let mut window = Window::new(Instant::now());
        let mut traffic = Traffic {
            zero_pages: ZERO,
            ..Traffic::default()
        };
        assert_eq!(window.end(tenth, ZERO - LATE, &traffic), None);
        // A lost lane's pages are acknowledged once and go out twice.
        assert_eq!(window.acked_since(ZERO - 1), 0);
        traffic.raw_pages += RAW;
        let bytes_per_s = window.end(tenth, ZERO + RAW, &traffic);
        assert_eq!(bytes_per_s, Some(100 << 20));
    }

    /// A link of 100 MiB/s carries one chunk of 256 KiB in 2.5 ms. With 10 ms of
    /// them under way and nothing dirty, the last byte arrives too late for a
    /// limit of 15 ms, of which the rest of the switchover takes 6 ms; once half
    /// of it has been acknowledged, in time.
    #[test]
    fn what_is_under_way_counts_against_the_downtime_limit() {
        const BYTES_PER_S: u64 = 100 << 20;
        let chunks = 4;
        let mut schedule = Schedule::new([(0, chunks * CHUNK_PAGES)]);
        schedule.open_lane(1);
        let count = chunks * CHUNK_PAGES;
        schedule.mark_run(0, Run { first: 0, count });
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        while schedule.next(1, &mut plan) == Work::Chunk {}
        assert_eq!(schedule.pending_pages(), 0);
        let goals = Goals {
            downtime_limit_ns: nanos(Duration::from_millis(15)),
            time_limit_ns: None,
            at_time_limit: AtTimeLimit::Cancel,
            throttle: true,
        };
        let decide = |schedule: &Schedule| {
            let pass = Pass {
                since_start_ns: 0,
                bytes_per_s: BYTES_PER_S,
                remaining_bytes: remaining_bytes(schedule),
                dirtied_pages: 0,
                fixed_ns: nanos(STATE_COST),
            };
            Precopy::new(goals, PAGE_BYTES).after_iteration(&pass)
        };
        assert_eq!(remaining_bytes(&schedule), BYTES_PER_S / 100);
        assert_eq!(decide(&schedule), Decision::Iterate { throttle: 0 });
        schedule.acknowledge(0, chunks / 2).unwrap();
        assert_eq!(decide(&schedule), Decision::SwitchOver);
    }
}
