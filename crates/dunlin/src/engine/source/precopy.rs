//! Pre-copy: iterations over dirty pages while the guest runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::bitmap::Run;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::precopy::{Decision, Goals, Pass, Precopy};
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::{Source, SourceAction, SourceEvent};
use tracing::info_span;

use super::super::fault::Fault;
use super::super::lock;
use super::super::report::{Event, Iteration, Progress, Traffic};
use super::super::threads::nanos;
use super::event::SessionEvent;
use super::guest::{LoggedGuest, check_guest};
use super::lanes::Transfer;
use super::phase::{Phase, failed, take};
use super::session::Session;
use super::settled::Settled;
use super::switchover::Switchover;
use super::window::{Window, per_second};

/// Interval between progress events.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);
/// Cost of the switchover besides the last pages and round trips: pausing, saving and loading
/// state, starting the guest. With the reference VMM, `dunlin demo` measures about 0.1 ms for
/// pausing, up to 3 ms for the state and 0.7 ms for starting; the remaining time is a reserve for a
/// VMM with devices.
const STATE_COST: Duration = Duration::from_millis(6);
/// Rate of hashing memory, in bytes per second; used only for the prediction.
const DIGEST_BYTES_PER_S: u64 = 3 << 30;
/// Minimum duration of a measurement of the bandwidth. The first measurement may be shorter.
const MEASURABLE: Duration = Duration::from_millis(20);
/// Shortest duration of a pass. Without it, a guest with few dirty pages would have its
/// dirty log fetched thousands of times a second.
const SHORTEST_PASS: Duration = Duration::from_millis(5);
/// Amount of data that may still be in flight when a pass ends, measured as time on the link, in
/// addition to one round trip. This data keeps the link busy between two passes. A larger value
/// would be worse for two reasons. The dirty log would be fetched earlier, and fewer repeated
/// writes to a page would be combined. And data in the socket buffers of many lanes on a slow link
/// would count as a remainder that no pass can reduce.
const KEPT_UNDER_WAY: Duration = Duration::from_millis(10);
/// Interval between checks of whether enough data has been acknowledged.
const DRAIN_EVERY: Duration = Duration::from_millis(2);

/// Iterations over dirty pages while the guest runs.
pub(super) struct PreCopy<'a> {
    transfer: Transfer<'a>,
    guest: LoggedGuest,
    iterations: Vec<Iteration>,
    /// Bandwidth in bytes per second; 0 before the first measurement.
    bytes_per_s: u64,
    window: Window,
    dirty_pages_per_s: u64,
}

impl<'a> Phase<'a> for PreCopy<'a> {
    fn session(&mut self) -> &mut Session<'a> {
        &mut self.transfer.session
    }
}

impl<'a> PreCopy<'a> {
    pub(super) fn new(transfer: Transfer<'a>) -> Self {
        Self {
            window: Window::new(transfer.session.started),
            transfer,
            guest: LoggedGuest::default(),
            iterations: Vec::new(),
            bytes_per_s: 0,
            dirty_pages_per_s: 0,
        }
    }

    /// Opens the lanes, iterates until the switchover is due, and records that the switchover
    /// begins.
    pub(super) fn converge(mut self) -> Result<Switchover<'a>, Settled> {
        let converged = info_span!("open-lanes")
            .in_scope(|| self.open_lanes())
            .and_then(|()| self.iterate())
            .and_then(|()| take(&mut self, SourceEvent::Converged));
        let rest = converged.unwrap_or_else(|fault| failed(&mut self, fault));
        if self.transfer.session.state != Source::Paused {
            return Err(Settled::kept(self.transfer, self.guest));
        }
        debug_assert_eq!(rest, [SourceAction::PauseGuest]);
        let Self {
            transfer,
            guest,
            iterations,
            ..
        } = self;
        Ok(Switchover::new(transfer, guest, iterations))
    }

    /// Opens the lanes concurrently and waits until each is up or has failed, at most for the
    /// connect limit. If at least one is up, the others are retried later.
    fn open_lanes(&mut self) -> Result<(), Fault> {
        let transfer = &mut self.transfer;
        let options = transfer.session.options;
        let deadline = Instant::now() + options.connect_limit;
        let work_queue = Arc::clone(&transfer.session.work_queue);
        lock(&work_queue.state).lanes.want(options.lanes);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            transfer.next_silent(left)?;
            let state = lock(&work_queue.state);
            let (up, opening) = (state.lanes.up(), state.lanes.opening());
            drop(state);
            if up >= usize::from(options.lanes) || (up > 0 && (left.is_zero() || opening == 0)) {
                break;
            }
            let lanes = &mut transfer.lanes;
            if up == 0 && opening == 0 && lanes.first_fault.is_some() || left.is_zero() {
                let fault = transfer.session.reason_of_peer();
                return Err(fault.or(lanes.first_fault.take()).unwrap_or_else(|| {
                    Fault::new(
                        FaultCode::LaneLost,
                        "no lane was established within the connect limit",
                    )
                }));
            }
        }
        transfer.lanes.established = true;
        Ok(())
    }

    fn iterate(&mut self) -> Result<(), Fault> {
        self.guest.start(&self.transfer.session)?;
        self.mark_everything();
        let options = self.transfer.session.options;
        let observer = self.transfer.session.observer;
        let work_queue = Arc::clone(&self.transfer.session.work_queue);
        let mut precopy = Precopy::new(
            Goals {
                downtime_limit_ns: nanos(options.downtime_limit),
                time_limit_ns: options.time_limit.map(nanos),
                at_time_limit: options.at_time_limit,
                throttle: options.throttle,
            },
            PAGE_BYTES,
        );
        loop {
            self.transfer.ping_again()?;
            let (iteration, waiting) = work_queue.begin_iteration(false);
            let _iteration = info_span!("iteration", iteration).entered();
            let began = Instant::now();
            let bytes_before = lock(&work_queue.state).traffic().wire_bytes;
            self.await_cut(iteration, began)?;
            check_guest(&**self.transfer.session.vm)?;
            let duration = began.elapsed();
            let dirtied_pages = self.guest.fetch(&self.transfer.session)?;
            let now = lock(&work_queue.state).traffic();
            let wire_bytes = now.wire_bytes - bytes_before;
            self.measure(&now, dirtied_pages, duration);
            let pass = Pass {
                since_start_ns: nanos(self.transfer.session.started.elapsed()),
                bytes_per_s: self.bytes_per_s,
                remaining_bytes: remaining_bytes(lock(&work_queue.state).lanes.schedule()),
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
                throttle: self.guest.throttle,
            };
            observer.event(&Event::Iterated(ended.clone()));
            self.iterations.push(ended);
            match precopy.after_iteration(&pass) {
                Decision::SwitchOver => return Ok(()),
                Decision::GiveUp => {
                    return Err(Fault::new(
                        FaultCode::TimeLimit,
                        "pre-copy did not converge within the time limit",
                    ));
                }
                Decision::OutOfReach => {
                    return Err(Fault::new(
                        FaultCode::NotConverging,
                        format!(
                            "almost all pages are sent, but the switchover alone takes {:?}, more \
                             than the downtime limit of {:?}",
                            self.fixed_cost(),
                            self.transfer.session.options.downtime_limit
                        ),
                    ));
                }
                Decision::Iterate { throttle } => {
                    self.guest.throttle(&self.transfer.session, throttle)
                }
            }
        }
    }

    /// Marks the pages of the first iteration.
    fn mark_everything(&mut self) {
        let session = &self.transfer.session;
        let mut state = lock(&session.work_queue.state);
        for (index, region) in session.memory.regions().iter().enumerate() {
            let schedule = state.lanes.schedule_mut();
            let found = session.memory.ranges_to_send(index, &mut |range| {
                let first = range.start / PAGE_BYTES;
                let count = range.end.div_ceil(PAGE_BYTES) - first;
                schedule.mark_run(index, Run { first, count });
            });
            if let Err(error) = found {
                session.warn(format!(
                    "cannot find holes in guest memory ({error}): reading all of {}",
                    region.name
                ));
                let count = region.pages();
                let schedule = state.lanes.schedule_mut();
                schedule.mark_run(index, Run { first: 0, count });
            }
        }
    }

    /// Waits until the last chunk of `iteration` has been given to a lane, most of the data in
    /// flight has arrived and [`SHORTEST_PASS`] has elapsed, or until the time limit.
    fn await_cut(&mut self, iteration: u32, began: Instant) -> Result<(), Fault> {
        let mut cut_yet = false;
        let mut progress_at = Instant::now() + PROGRESS_EVERY;
        loop {
            let mut wait = progress_at.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                check_guest(&**self.transfer.session.vm)?;
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
            if let Some(limit) = self.transfer.session.options.time_limit {
                let left = limit.saturating_sub(self.transfer.session.started.elapsed());
                if left.is_zero() {
                    return Ok(());
                }
                wait = wait.min(left);
            }
            if let Some(SessionEvent::Cut { iteration: cut }) = self.transfer.next_silent(wait)? {
                cut_yet |= cut == iteration;
            }
        }
    }

    /// Whether so little is in flight that the dirty logs can be fetched again.
    fn is_drained(&self) -> bool {
        let state = lock(&self.transfer.session.work_queue.state);
        let under_way = state.lanes.schedule().in_flight_pages();
        let acked = self.window.acked_since(state.acked_pages);
        drop(state);
        let bytes_per_s = match self.bytes_per_s {
            0 => per_second(acked * PAGE_BYTES, self.window.since.elapsed()),
            known => known,
        };
        let kept = KEPT_UNDER_WAY + self.transfer.session.control.lane.round_trip();
        let kept_bytes = u128::from(bytes_per_s) * kept.as_nanos() / 1_000_000_000;
        u128::from(under_way * PAGE_BYTES) <= kept_bytes
    }

    /// Measures the bandwidth from acknowledgements, because data in socket buffers still
    /// has to cross the link. Passes too short to measure are combined.
    fn measure(&mut self, now: &Traffic, dirtied: u64, duration: Duration) {
        self.dirty_pages_per_s = per_second(dirtied, duration);
        let acked_pages = lock(&self.transfer.session.work_queue.state).acked_pages;
        let measured = self.window.since.elapsed();
        if measured < MEASURABLE && self.bytes_per_s != 0 {
            return;
        }
        if let Some(bytes_per_s) = self.window.end(measured, acked_pages, now) {
            self.bytes_per_s = bytes_per_s;
        }
    }

    /// The switchover's cost besides the last pages. It excludes the comparison of digests, which
    /// the user has requested and which no further pass shortens.
    fn fixed_cost(&self) -> Duration {
        STATE_COST + self.transfer.session.control.lane.round_trip() * 3 / 2
    }

    fn digest_cost(&self) -> Duration {
        if !self.transfer.session.options.verify {
            return Duration::ZERO;
        }
        let bytes = self.iterations.first().map_or(0, |first| first.pages) * PAGE_BYTES;
        Duration::from_millis(bytes * 1000 / DIGEST_BYTES_PER_S)
    }

    fn report_progress(&self) {
        let state = lock(&self.transfer.session.work_queue.state);
        let wire_bytes = state.traffic().wire_bytes;
        let sent_before: u64 = self.iterations.iter().map(|one| one.wire_bytes).sum();
        let bytes_per_s = match self.bytes_per_s {
            0 => per_second(
                wire_bytes.saturating_sub(sent_before),
                self.transfer.session.started.elapsed(),
            ),
            known => known,
        };
        let schedule = state.lanes.schedule();
        let remaining_bytes = schedule.pending_pages() * PAGE_BYTES;
        let connections = state.connections();
        let mut progress = Progress {
            iteration: schedule.iteration(),
            bytes_per_s,
            remaining_bytes,
            dirty_pages_per_s: self.dirty_pages_per_s,
            predicted_downtime: self
                .iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            lanes: state.by_lane(),
            retransmits: Vec::new(),
        };
        drop(state);
        // Query the connections after the lock is released. A query waits while another thread
        // sends on the connection, and the lanes, which need the lock, must not wait with it.
        let connections = connections.into_iter();
        let counts = connections.map(|(lane, connection)| (lane, connection.traffic().retransmits));
        progress.retransmits = counts.collect();
        let observer = self.transfer.session.observer;
        observer.event(&Event::Progress(progress));
    }
}

/// Bytes for which a switchover would have to wait if it began now: dirty pages, and pages in
/// flight.
fn remaining_bytes(schedule: &Schedule) -> u64 {
    schedule.remaining_pages() * PAGE_BYTES
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_proto::limits::CHUNK_PAGES;
    use dunlin_proto::precopy::AtTimeLimit;
    use dunlin_proto::schedule::{ChunkPlan, Work};

    use super::*;

    /// A link of 100 MiB/s carries a chunk of 256 KiB in 2.5 ms. With 10 ms of chunks in flight and
    /// nothing dirty, the last byte arrives too late for a limit of 15 ms, because the rest of the
    /// switchover takes 6 ms. After half of these chunks are acknowledged, the last byte arrives in
    /// time.
    #[test]
    fn data_in_flight_counts_against_the_downtime_limit() {
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
