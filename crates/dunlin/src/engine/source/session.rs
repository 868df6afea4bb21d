//! Setting a session up, pre-copy, and winding it up again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_proto::bitmap::Run;
use dunlin_proto::control::{Accept, Describe, Message, RegionTable};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{
    Features, Offer, Opening, Selection, SessionId, VERSIONS,
};
use dunlin_proto::pace::Pace;
use dunlin_proto::precopy::{Decision, Goals, Pass, Precopy};
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::{Source, SourceAction, SourceEvent};
use dunlin_sys::affinity::thread_cpu_time;

use super::super::control::{ControlLane, FromPeer, read_opening};
use super::super::error::{Fault, MigrateError, VmIs};
use super::super::host::{Cancel, Host};
use super::super::lock;
use super::super::report::{Event, Iteration, Observer, Progress, Report, Traffic};
use super::super::vmm::{DirtyLog, GuestMemory, RunState, SourceVm};
use super::lane::{Lane, LaneShare, Shared};
use super::{Options, SessionEvent};
use crate::lane::control as control_lane;
use crate::lane::handshake::HandshakeError;
use crate::lane::identity::ClientTls;

/// Between two progress events.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);
/// What the switchover costs besides the last pages and round trips: pausing,
/// saving and loading the state. Measured on the reference VMM: 2 to 6 ms.
const STATE_COST: Duration = Duration::from_millis(6);
/// Bytes per second at which digests are made, for the prediction alone.
const DIGEST_BYTES_PER_S: u64 = 3 << 30;
/// How long the peer may take to close the control lane at the end.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
/// A pass shorter than this says nothing about the bandwidth.
const MEASURABLE: Duration = Duration::from_millis(20);
/// A pass lasts at least this long, so that a guest whose few dirty pages go
/// by in no time is not asked for its dirty log thousands of times a second.
const SHORTEST_PASS: Duration = Duration::from_millis(5);
/// From so many zero pages to one that is not, a first pass says nothing
/// about the bandwidth.
const MOSTLY_ZERO: u64 = 4;

/// Everything of one migration on the session's thread.
pub(super) struct Session<'a> {
    pub(super) vm: &'a Arc<dyn SourceVm>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer,
    pub(super) control: Arc<ControlLane>,
    pub(super) selection: Selection,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) shared: Arc<Shared>,
    pub(super) state: Source,
    /// Whether its owner had paused the guest before.
    pub(super) paused_by_owner: bool,
    /// Whether [`SourceVm::relinquish`] has been called.
    pub(super) relinquished: bool,
    pub(super) logs: Vec<Box<dyn DirtyLog>>,
    pub(super) lanes_running: usize,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) cpu: Arc<AtomicU64>,
    pub(super) started: Instant,
    pub(super) iterations: Vec<Iteration>,
    pub(super) bytes_per_s: u64,
    /// Since when, and from how many acknowledged pages, the bandwidth is
    /// being measured.
    window: (Instant, u64),
    dirty_pages_per_s: u64,
    throttle: u8,
}

pub(super) fn run(
    vm: &Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &Options,
    host: &Arc<dyn Host>,
    observer: &dyn Observer,
    cancel: &Cancel,
) -> Result<Report, MigrateError> {
    let cpu_before = thread_cpu_time();
    let (sender, events) = channel();
    let mut session = connect(vm, to, tls, options, host, observer, events)
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
    let on_cancel = sender.clone();
    cancel.listen(move || {
        let _ = on_cancel.send(SessionEvent::Cancelled);
    });
    let result = session
        .set_up(to, tls, &sender)
        .and_then(|()| session.pre_copy())
        .and_then(|()| session.switch_over());
    let result = match result {
        Ok(outcome) => Ok(outcome),
        Err(fault) => Err(session.fail(fault)),
    };
    cancel.unlisten();
    session.wind_up();
    let outcome = result?;
    let own = thread_cpu_time().saturating_sub(cpu_before);
    let state = lock(&session.shared.state);
    Ok(Report {
        iterations: std::mem::take(&mut session.iterations),
        traffic: state.traffic(),
        lanes: lane_bytes(&state.lanes),
        security: session.selection.security,
        total: outcome.total,
        downtime: outcome.downtime,
        source_cpu: own + Duration::from_nanos(session.cpu.load(Ordering::Relaxed)),
        destination_cpu: outcome.destination_cpu,
        digests_equal: outcome.digests_equal,
        runs: outcome.runs,
    })
}

/// Connects the control lane and agrees on version, features and security.
fn connect<'a>(
    vm: &'a Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &'a Options,
    host: &'a Arc<dyn Host>,
    observer: &'a dyn Observer,
    events: Receiver<SessionEvent>,
) -> Result<Session<'a>, Fault> {
    let started = Instant::now();
    let deadline = started + options.connect_limit;
    let paused_by_owner = match vm.run_state() {
        RunState::Running => false,
        RunState::Paused => true,
        RunState::PoweredOff => {
            return Err(Fault::new(FaultCode::GuestPoweredOff, "the guest is powered off"));
        }
        RunState::Stopped(why) => {
            return Err(Fault::new(FaultCode::GuestStopped, format!("the guest has stopped: {why}")));
        }
    };
    let stream = host.connect(to, deadline).map_err(|error| {
        Fault::new(FaultCode::ControlLost, format!("{to} cannot be reached")).because(error)
    })?;
    let stream = control_lane::client(stream, tls, deadline).map_err(|error| {
        let code = match &error {
            HandshakeError::Deadline | HandshakeError::Io(_) | HandshakeError::PeerClosed => {
                FaultCode::ControlLost
            }
            _ => FaultCode::Unauthorised,
        };
        Fault::new(code, format!("no secure control lane to {to}")).because(error)
    })?;
    let mut session: SessionId = [0; 16];
    tls.config()
        .crypto_provider()
        .secure_random
        .fill(&mut session)
        .map_err(|_| Fault::new(FaultCode::Internal, "no random numbers can be had"))?;
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: if options.verify {
            Features::VERIFY
        } else {
            Features::NONE
        },
        security: options.security,
        session,
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).map_err(|error| {
        Fault::new(FaultCode::Internal, "the offer cannot be sent").because(error)
    })?;
    stream.send(&bytes).map_err(|error| {
        Fault::new(FaultCode::ControlLost, "the control lane was lost").because(error)
    })?;
    let selection = match read_opening(&stream, deadline)? {
        Opening::Select(selection) => selection,
        Opening::Refuse(_, refusal) => return Err(Fault::told(refusal.fault, refusal.text)),
        _ => {
            return Err(Fault::new(
                FaultCode::Malformed,
                "the destination answered the offer with something else",
            ));
        }
    };
    selection.confirm(&offer).map_err(|error| {
        Fault::new(FaultCode::SecurityNotAgreed, "the destination's selection is not ours")
            .because(error)
    })?;
    let memory = vm.memory();
    let schedule = Schedule::new(memory.regions().iter().map(|region| (region.id, region.pages())));
    Ok(Session {
        vm,
        memory,
        options,
        host,
        observer,
        control: Arc::new(ControlLane::new(stream, session, offer.epoch)),
        selection,
        events,
        shared: Arc::new(Shared::new(schedule, Pace::new(options.rate))),
        state: Source::Live,
        paused_by_owner,
        relinquished: false,
        logs: Vec::new(),
        lanes_running: 0,
        threads: Vec::new(),
        cpu: Arc::default(),
        started,
        iterations: Vec::new(),
        bytes_per_s: 0,
        window: (started, 0),
        dirty_pages_per_s: 0,
        throttle: 0,
    })
}

impl Session<'_> {
    /// Describes the VM, and opens the lanes side by side.
    fn set_up(
        &mut self,
        to: &str,
        tls: &ClientTls,
        events: &Sender<SessionEvent>,
    ) -> Result<(), Fault> {
        let deadline = self.started + self.options.connect_limit;
        self.spawn_reader(events)?;
        self.control.ask()?;
        self.describe()?;
        let accept = self.await_accept(deadline)?;
        if self.options.lanes > accept.lanes_max {
            return Err(Fault::new(
                FaultCode::LaneLimit,
                format!(
                    "{} lanes were asked for and the destination takes {}",
                    self.options.lanes, accept.lanes_max
                ),
            ));
        }
        let peer = self.control.stream().peer();
        self.observer.event(&Event::Accepted {
            peer: peer
                .names
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        });
        let fingerprint = peer.fingerprint;
        {
            let mut state = lock(&self.shared.state);
            for number in 1..=self.options.lanes {
                state.schedule.open_lane(number);
                state.lanes.push(LaneShare {
                    lane: number,
                    ..LaneShare::default()
                });
            }
        }
        for number in 1..=self.options.lanes {
            let endpoint = match accept.endpoints.as_slice() {
                [] => to.to_owned(),
                some => some[usize::from(number - 1) % some.len()].clone(),
            };
            let lane = Lane {
                number,
                endpoint,
                tls: tls.clone(),
                security: self.selection.security,
                version: self.selection.version,
                session: self.control.session(),
                secret: accept.secret.clone(),
                peer_fingerprint: fingerprint,
                rate: self.options.lane_rate,
                deadline: Instant::now() + self.options.connect_limit,
                memory: Arc::clone(&self.memory),
                shared: Arc::clone(&self.shared),
                host: Arc::clone(self.host),
                events: events.clone(),
            };
            self.spawn(format!("dunlin-lane-{number}"), move || lane.run())?;
            self.lanes_running += 1;
        }
        self.await_lanes(Instant::now() + self.options.connect_limit)
    }

    fn describe(&self) -> Result<(), Fault> {
        let described = self.vm.describe().map_err(|error| {
            Fault::new(FaultCode::Internal, "the VM cannot be described").because(error)
        })?;
        let regions = RegionTable::new(self.memory.regions().to_vec()).map_err(|error| {
            Fault::new(FaultCode::Internal, "the VM's memory cannot be described").because(error)
        })?;
        self.control.send(&Message::Describe(Describe {
            vm_uuid: described.uuid,
            vm_name: described.name,
            page_bytes: u32::try_from(PAGE_BYTES).unwrap_or(u32::MAX),
            paused: self.paused_by_owner,
            description: described.description,
            regions,
        }))
    }

    fn await_accept(&mut self, deadline: Instant) -> Result<Accept, Fault> {
        match self.await_message(deadline, "an answer to the VM's description")? {
            Message::Accept(accept) => Ok(accept),
            other => Err(unexpected(&other)),
        }
    }

    fn await_lanes(&mut self, deadline: Instant) -> Result<(), Fault> {
        let mut waiting: BTreeSet<u16> = (1..=self.options.lanes).collect();
        while !waiting.is_empty() {
            let what = format!("lanes {waiting:?} to stand");
            match self.await_message(deadline, &what)? {
                Message::LaneUp { lane } if waiting.remove(&lane) => {
                    self.observer.event(&Event::LaneUp { lane });
                }
                Message::LaneUp { lane } => {
                    return Err(Fault::new(
                        FaultCode::Malformed,
                        format!("the destination names lane {lane}, which is not being opened"),
                    ));
                }
                Message::LaneRefused { lane, fault, text } => {
                    return Err(Fault::told(fault, format!("lane {lane} was refused: {text}")));
                }
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
    }

    /// The next message that is for the session's thread, while nothing else
    /// is expected to happen.
    fn await_message(&mut self, deadline: Instant, what: &str) -> Result<Message, Fault> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_event(left)? {
                Some(SessionEvent::Control(FromPeer::Message(message))) => return Ok(message),
                Some(_) => {}
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        format!("the destination kept us waiting for {what}"),
                    ));
                }
            }
        }
    }

    /// Waits for an event and handles what is the same in every phase: the
    /// end of the control lane, a lost lane, a cancellation, the peer's
    /// refusal. `None` when the time is up.
    pub(super) fn next_event(&mut self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        let until = Instant::now() + wait;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let event = match self.receive(left) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Fault::new(FaultCode::Internal, "every thread has ended"));
                }
            };
            match event {
                SessionEvent::Control(FromPeer::Message(
                    Message::Cancel { fault, text } | Message::Refuse { fault, text },
                )) => return Err(Fault::told(fault, text)),
                SessionEvent::Control(FromPeer::Lost(fault)) => return Err(fault),
                SessionEvent::LaneEnded { lane, result, cpu } => {
                    self.lanes_running -= 1;
                    self.add_cpu(cpu);
                    // The destination tells its reason on the control lane,
                    // and that is the better one; it is on its way.
                    if let Err(fault) = result {
                        return Err(self.reason_of_peer().unwrap_or(fault));
                    }
                    let result = Ok(());
                    return Ok(Some(SessionEvent::LaneEnded { lane, result, cpu }));
                }
                SessionEvent::Cancelled if !self.state.may_cancel() => {
                    self.observer.event(&Event::Warning(
                        "too late to cancel: the VM is the destination's".into(),
                    ));
                }
                SessionEvent::Cancelled => {
                    return Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"));
                }
                event => return Ok(Some(event)),
            }
        }
    }

    fn receive(&self, wait: Duration) -> Result<SessionEvent, RecvTimeoutError> {
        let event = self.events.recv_timeout(wait)?;
        if matches!(event, SessionEvent::Control(FromPeer::Message(_))) {
            self.control.took();
        }
        Ok(event)
    }

    /// Why the destination gave a lane up, if it says so within a moment.
    fn reason_of_peer(&mut self) -> Option<Fault> {
        let until = Instant::now() + Duration::from_millis(300);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left) {
                Ok(SessionEvent::Control(FromPeer::Message(
                    Message::Cancel { fault, text } | Message::Refuse { fault, text },
                ))) => return Some(Fault::told(fault, text)),
                Ok(SessionEvent::Control(FromPeer::Message(Message::LaneRefused {
                    lane,
                    fault,
                    text,
                }))) => {
                    return Some(Fault::told(fault, format!("lane {lane} was refused: {text}")));
                }
                Ok(SessionEvent::LaneEnded { cpu, .. }) => {
                    self.lanes_running -= 1;
                    self.add_cpu(cpu);
                }
                Ok(SessionEvent::Control(FromPeer::Lost(_))) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Iterations until the switchover is due.
    fn pre_copy(&mut self) -> Result<(), Fault> {
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
            let (iteration, waiting) = self.begin_iteration(false);
            let began = Instant::now();
            let before = lock(&self.shared.state).traffic();
            self.await_cut(iteration, began)?;
            self.check_guest()?;
            let duration = began.elapsed();
            let dirtied_pages = self.fetch_logs()?;
            let (now, remaining_pages) = {
                let state = lock(&self.shared.state);
                let remaining = state.schedule.pending_pages() + state.schedule.in_flight_pages();
                (state.traffic(), remaining)
            };
            let wire_bytes = now.wire_bytes - before.wire_bytes;
            self.measure(&before, &now, dirtied_pages, duration);
            let pass = Pass {
                since_start_ns: nanos(self.started.elapsed()),
                bytes_per_s: self.bytes_per_s,
                remaining_bytes: remaining_pages * PAGE_BYTES,
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
    fn mark_everything(&mut self) -> Result<(), Fault> {
        let mut state = lock(&self.shared.state);
        for (index, region) in self.memory.regions().iter().enumerate() {
            let schedule = &mut state.schedule;
            let found = self.memory.worth_sending(index, &mut |range| {
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
                state.schedule.mark_run(index, Run { first: 0, count });
            }
        }
        Ok(())
    }

    /// Begins an iteration with the pages that wait; returns its number and
    /// how many pages those are.
    pub(super) fn begin_iteration(&mut self, last: bool) -> (u32, u64) {
        let mut state = lock(&self.shared.state);
        state.schedule.begin_iteration();
        if last {
            state.schedule.finish();
        }
        let begun = (state.schedule.iteration(), state.schedule.pending_pages());
        drop(state);
        self.shared.changed.notify_all();
        begun
    }

    /// Waits until the last chunk of `iteration` has been given to a lane, or
    /// the time limit has come. A pass that is over in no time is stretched:
    /// the guest gets the processor for longer than the engine does.
    fn await_cut(&mut self, iteration: u32, began: Instant) -> Result<(), Fault> {
        let mut cut_yet = false;
        loop {
            let mut wait = PROGRESS_EVERY;
            if cut_yet {
                wait = SHORTEST_PASS.saturating_sub(began.elapsed());
                if wait.is_zero() {
                    return Ok(());
                }
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
                Some(SessionEvent::Control(FromPeer::Message(message))) => {
                    return Err(unexpected(&message));
                }
                Some(_) => {}
                None if cut_yet => {}
                None => {
                    self.check_guest()?;
                    self.report_progress();
                }
            }
        }
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

    fn start_logs(&mut self) -> Result<(), Fault> {
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
                named += lock(&shared.state).schedule.mark_dirty(index, words);
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
    fn measure(&mut self, before: &Traffic, now: &Traffic, dirtied: u64, duration: Duration) {
        self.dirty_pages_per_s = per_second(dirtied, duration);
        let acked_pages = lock(&self.shared.state).acked_pages;
        let (since, acked_before) = self.window;
        let measured = since.elapsed();
        if measured < MEASURABLE && self.bytes_per_s != 0 {
            return;
        }
        self.window = (Instant::now(), acked_pages);
        let raw_pages = now.raw_pages - before.raw_pages;
        let zero_pages = now.zero_pages - before.zero_pages;
        // A guest's untouched memory goes by much faster than the pages that
        // it works on, and would promise a bandwidth that is not there.
        if self.iterations.is_empty() && zero_pages > raw_pages * MOSTLY_ZERO {
            return;
        }
        if acked_pages > acked_before {
            self.bytes_per_s = per_second((acked_pages - acked_before) * PAGE_BYTES, measured);
        }
    }

    /// The switchover's cost besides the last pages. The digests are no part
    /// of it: they are asked for by hand, and no further pass shortens them.
    fn fixed_cost(&self) -> Duration {
        STATE_COST + self.control.round_trip() * 3 / 2
    }

    fn digest_cost(&self) -> Duration {
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
            Err(error) => self
                .observer
                .event(&Event::Warning(format!("the guest cannot be slowed down: {error}"))),
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
        let remaining_bytes = state.schedule.pending_pages() * PAGE_BYTES;
        let progress = Progress {
            iteration: state.schedule.iteration(),
            bytes_per_s,
            remaining_bytes,
            dirty_pages_per_s: self.dirty_pages_per_s,
            predicted_downtime: self
                .iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            lanes: lane_bytes(&state.lanes),
        };
        drop(state);
        self.observer.event(&Event::Progress(progress));
    }

    /// Moves the state machine; an event that it cannot take is a defect of
    /// ours, since the callers check the peer's messages first.
    pub(super) fn step(&mut self, event: SourceEvent) -> Result<SourceAction, Fault> {
        let (state, action) = self.state.on(event).map_err(|error| {
            Fault::new(FaultCode::Malformed, "the peer broke the order of the switchover")
                .because(error)
        })?;
        self.state = state;
        Ok(action)
    }

    /// Ends the session after a fault: tells the peer where it can be told,
    /// and lets the guest go on where it may.
    fn fail(&mut self, fault: Fault) -> MigrateError {
        let event = match fault.code {
            FaultCode::ControlLost => SourceEvent::ControlLost,
            _ => SourceEvent::Failed,
        };
        let (state, action) = self.state.on(event).unwrap_or((self.state, SourceAction::HoldInDoubt));
        self.state = state;
        // The guest itself is asked, and not the fault: a peer may name any.
        let ended = matches!(
            self.vm.run_state(),
            RunState::PoweredOff | RunState::Stopped(_)
        );
        let vm = match action {
            SourceAction::CancelPeer | SourceAction::CancelPeerAndResume => {
                // The peer may be gone; it drops its copy in either case.
                let _ = self.control.send(&Message::Cancel {
                    fault: fault.code,
                    text: fault.for_peer(),
                });
                if ended {
                    self.take_back();
                    VmIs::Gone
                } else if action == SourceAction::CancelPeerAndResume {
                    self.resume_here()
                } else {
                    VmIs::AtSource
                }
            }
            SourceAction::RefuseTooLate if self.state == Source::Released => VmIs::StuckAtDestination,
            _ => VmIs::InDoubt,
        };
        fault.into_error(vm)
    }

    /// After the pause and before *commit*: the guest goes on at the source.
    fn resume_here(&mut self) -> VmIs {
        if !self.take_back() {
            return VmIs::StuckAtSource;
        }
        if self.paused_by_owner {
            return VmIs::AtSource;
        }
        match self.vm.resume() {
            Ok(()) => VmIs::AtSource,
            Err(error) => {
                self.observer
                    .event(&Event::Warning(format!("the guest cannot be resumed: {error}")));
                VmIs::StuckAtSource
            }
        }
    }

    /// Takes disks and devices back, if they were let go. Returns whether the
    /// VM has them.
    fn take_back(&self) -> bool {
        if !self.relinquished {
            return true;
        }
        let result = self.vm.reacquire();
        if let Err(error) = &result {
            self.observer.event(&Event::Warning(format!(
                "disks and devices cannot be taken back: {error}"
            )));
        }
        result.is_ok()
    }

    /// Stops the dirty logs and lifts the throttle; doing it twice does no
    /// harm.
    pub(super) fn let_go_of_guest(&mut self) {
        for mut log in self.logs.drain(..) {
            if let Err(error) = log.stop() {
                self.observer
                    .event(&Event::Warning(format!("a dirty log cannot be stopped: {error}")));
            }
        }
        self.throttle(0);
    }

    /// Leaves nothing behind: lanes, logs, throttle, threads.
    fn wind_up(&mut self) {
        self.shared.stop();
        self.let_go_of_guest();
        // Best effort: a peer that has gone needs no goodbye.
        let _ = self.control.stream().close();
        self.await_peers_end();
        self.control.shutdown();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.observer
                    .event(&Event::Warning("a thread of the session panicked".into()));
            }
        }
        while let Ok(event) = self.events.try_recv() {
            if let SessionEvent::LaneEnded { cpu, .. } = event {
                self.add_cpu(cpu);
            }
        }
    }

    /// Lets the peer's last words and its close arrive, within a bound.
    fn await_peers_end(&mut self) {
        let until = Instant::now() + GOODBYE_LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left) {
                Ok(SessionEvent::LaneEnded { cpu, .. }) => self.add_cpu(cpu),
                Ok(SessionEvent::Control(FromPeer::Lost(_))) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn spawn_reader(&mut self, events: &Sender<SessionEvent>) -> Result<(), Fault> {
        let control = Arc::clone(&self.control);
        let events = events.clone();
        let (cpu, shared) = (Arc::clone(&self.cpu), Arc::clone(&self.shared));
        self.spawn("dunlin-control".into(), move || {
            control.read(
                |message| shared.acknowledge(message),
                |from_peer| {
                    // A session that is gone reads no more.
                    let _ = events.send(SessionEvent::Control(from_peer));
                },
            );
            add(&cpu, thread_cpu_time());
        })
    }

    pub(super) fn spawn(
        &mut self,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), Fault> {
        let thread = self.host.spawn(name, Box::new(body)).map_err(|error| {
            Fault::new(FaultCode::Kernel, "no thread can be had").because(error)
        })?;
        self.threads.push(thread);
        Ok(())
    }

    pub(super) fn add_cpu(&self, used: Duration) {
        add(&self.cpu, used);
    }
}

pub(super) fn add(cpu: &AtomicU64, used: Duration) {
    cpu.fetch_add(nanos(used), Ordering::Relaxed);
}

pub(super) fn unexpected(message: &Message) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        format!("the destination sent {} out of turn", message.kind().name()),
    )
}

fn per_second(amount: u64, duration: Duration) -> u64 {
    let nanos = duration.as_nanos().max(1);
    u64::try_from(u128::from(amount) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn lane_bytes(lanes: &[LaneShare]) -> Vec<(u16, u64)> {
    lanes
        .iter()
        .map(|share| (share.lane, share.traffic.raw_pages * PAGE_BYTES))
        .collect()
}
