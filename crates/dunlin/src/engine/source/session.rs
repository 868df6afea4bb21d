//! Setting a session up, pre-copy, and winding it up again.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_proto::control::{Digest, Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::negotiate::{Offer, Selection};
use dunlin_proto::switchover::Source;

use super::super::control::{ControlLane, FromPeer, Sequences};
use super::super::error::{Fault, MigrateError, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::SessionJournal;
use super::super::lock;
use super::super::report::{Downtime, Event, Iteration, Observer, Report};
use super::super::vmm::{DirtyLog, GuestMemory, SourceVm, VmDescription};
use super::lanes::LaneTerms;
use super::precopy::Window;
use super::set_up::connect;
use super::work_queue::WorkQueue;
use super::{Options, SessionEvent};
use crate::lane::identity::ClientTls;

/// How long the peer may take to close the control lane at the end.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// Everything of one migration on the session's thread.
pub(super) struct Session<'a> {
    pub(super) vm: &'a Arc<dyn SourceVm>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer,
    pub(super) control: Arc<ControlLane>,
    /// What the source offered; only the epoch changes.
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) shared: Arc<WorkQueue>,
    pub(super) state: Source,
    pub(super) described: Option<VmDescription>,
    pub(super) journal: SessionJournal,
    /// Why the migration ends other than well, as far as it is known.
    pub(super) fault: Option<Fault>,
    /// Where the VM is, if the session ends now.
    pub(super) vm_is: VmIs,
    /// When the guest was paused for the switchover, and *commit* sent.
    pub(super) paused: Option<Instant>,
    pub(super) committed: Option<Instant>,
    pub(super) downtime: Downtime,
    /// Where our digest will come from, and what came of the comparison.
    pub(super) digest: Option<Receiver<std::io::Result<Digest>>>,
    pub(super) digests_equal: Option<bool>,
    pub(super) destination_cpu: Duration,
    pub(super) total: Duration,
    /// Until when the destination is asked, once the VM is in doubt.
    pub(super) doubt_until: Option<Instant>,
    pub(super) inquiries: u32,
    /// Nobody is asked any more.
    pub(super) gave_up: bool,
    /// Whether its owner had paused the guest before.
    pub(super) paused_by_owner: bool,
    /// Whether [`SourceVm::deactivate`] has been called.
    pub(super) relinquished: bool,
    pub(super) logs: Vec<Box<dyn DirtyLog>>,
    /// What lanes are opened with; none before *accept*.
    pub(super) terms: Option<LaneTerms>,
    /// Whether pre-copy has begun.
    pub(super) lanes_stood: bool,
    pub(super) lane_threads: BTreeMap<u16, JoinHandle<()>>,
    /// Why a lane's thread failed, until the lane is fenced.
    pub(super) lane_faults: BTreeMap<u16, String>,
    /// The first failure of any lane.
    pub(super) first_fault: Option<Fault>,
    pub(super) lanes_lost: u32,
    pub(super) pages_again: u64,
    pub(super) control_resumed: u32,
    /// Reads the newest control lane.
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) sequences: Arc<Sequences>,
    pub(super) cancel: &'a Cancel,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) cpu: Arc<AtomicU64>,
    pub(super) started: Instant,
    /// The *final* that was sent last.
    pub(super) last: Option<Final>,
    pub(super) iterations: Vec<Iteration>,
    pub(super) bytes_per_s: u64,
    pub(super) window: Window,
    pub(super) dirty_pages_per_s: u64,
    pub(super) throttle: u8,
    /// Whether the end of the control lane has been heard of.
    pub(super) control_ended: Cell<bool>,
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
    let mut session = connect(vm, to, tls, options, host, observer, events, cancel)
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
    let on_cancel = sender.clone();
    cancel.listen(move || {
        let _ = on_cancel.send(SessionEvent::Cancelled);
    });
    let shared = Arc::clone(&session.shared);
    options.tune.attach(move |rate| shared.set_rate(rate));
    let result = session
        .set_up(to, tls, &sender)
        .and_then(|()| session.pre_copy())
        .and_then(|()| session.switch_over());
    if let Err(fault) = result {
        session.failed(fault);
    }
    cancel.unlisten();
    options.tune.detach();
    session.wind_up();
    if session.state != Source::Released {
        return Err(Session::error(
            session.state,
            session.fault,
            session.vm_is,
            session.journal,
            session.paused_by_owner,
        ));
    }
    let own = thread_cpu_time().saturating_sub(cpu_before);
    let state = lock(&session.shared.state);
    let report = Report {
        iterations: std::mem::take(&mut session.iterations),
        traffic: state.traffic(),
        lanes: state.by_lane(),
        lanes_lost: session.lanes_lost,
        control_resumed: session.control_resumed,
        pages_again: session.pages_again,
        security: session.selection.security,
        total: session.total,
        downtime: session.downtime,
        source_cpu: own + Duration::from_nanos(session.cpu.load(Ordering::Relaxed)),
        destination_cpu: session.destination_cpu,
        digests_equal: session.digests_equal,
        runs: !session.paused_by_owner,
    };
    drop(state);
    // Where *released* could not be recorded the destination has not been told
    // to forget either, and the record may still be asked about.
    if session.journal.record().state == State::Source(SourceRecord::Released)
        && let Err(error) = session.journal.forget()
    {
        observer.event(&Event::Warning(error.to_string()));
    }
    Ok(report)
}

impl Session<'_> {
    /// The next message that is for the session's thread, while nothing else
    /// is expected to happen; `None` at the deadline.
    pub(super) fn next_message(&mut self, deadline: Instant) -> Result<Option<Message>, Fault> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_event(left)? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => {
                    return Ok(Some(message));
                }
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Waits for an event and handles what is the same in every phase: the
    /// end of the control lane, whatever concerns lanes, a cancellation, the
    /// peer's refusal. `None` when the time is up.
    pub(super) fn next_event(&mut self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        let until = Instant::now() + wait;
        loop {
            self.tend()?;
            let until_tended = self.tend_at().map_or(until, |at| at.min(until));
            let left = until_tended.saturating_duration_since(Instant::now());
            let event = match self.receive(left) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => continue,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Fault::new(FaultCode::Internal, "every thread has ended"));
                }
            };
            match event {
                // What an earlier control lane left behind.
                SessionEvent::Control(epoch, _) if epoch != self.control.epoch() => {}
                SessionEvent::Control(_, FromPeer::Message(Message::Cancel { fault, text })) => {
                    return Err(Fault::told(fault, text));
                }
                // Nothing is left to refuse after *commit*.
                SessionEvent::Control(_, FromPeer::Message(Message::Refuse { fault, text }))
                    if self.state.may_cancel() =>
                {
                    return Err(Fault::told(fault, text));
                }
                SessionEvent::Control(_, FromPeer::Message(message))
                    if self.lane_message(&message)? =>
                {
                    return Ok(Some(SessionEvent::Tended));
                }
                SessionEvent::Control(_, FromPeer::Lost(fault))
                    if fault.code == FaultCode::ControlLost && self.is_resumable() =>
                {
                    self.resume_control(fault)?;
                    return Ok(Some(SessionEvent::Tended));
                }
                SessionEvent::Control(_, FromPeer::Lost(fault)) => return Err(fault),
                SessionEvent::LaneEnded { lane, result, cpu } => {
                    self.add_cpu(cpu);
                    self.lane_ended(lane, result)?;
                    return Ok(Some(SessionEvent::Tended));
                }
                SessionEvent::LaneWorn => return Ok(Some(SessionEvent::Tended)),
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
        match &event {
            SessionEvent::Control(epoch, from_peer) if *epoch == self.control.epoch() => {
                match from_peer {
                    FromPeer::Message(_) => self.control.took(),
                    FromPeer::Lost(_) => self.control_ended.set(true),
                }
            }
            _ => {}
        }
        Ok(event)
    }

    /// Why the destination gave a lane up, if it says so within a moment.
    pub(super) fn reason_of_peer(&mut self) -> Option<Fault> {
        let until = Instant::now() + Duration::from_millis(300);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left) {
                Ok(SessionEvent::Control(
                    _,
                    FromPeer::Message(
                        Message::Cancel { fault, text } | Message::Refuse { fault, text },
                    ),
                )) => return Some(Fault::told(fault, text)),
                Ok(SessionEvent::LaneEnded { cpu, .. }) => self.add_cpu(cpu),
                // Its last words would have come before its end.
                Ok(SessionEvent::Control(_, FromPeer::Lost(_))) => return None,
                Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Stops the dirty logs and lifts the throttle; doing it twice does no
    /// harm.
    pub(super) fn let_go_of_guest(&mut self) {
        for mut log in self.logs.drain(..) {
            if let Err(error) = log.stop() {
                self.observer.event(&Event::Warning(format!(
                    "a dirty log cannot be stopped: {error}"
                )));
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
        let lanes = std::mem::take(&mut self.lane_threads).into_values();
        let threads = lanes
            .chain(self.reader.take())
            .chain(self.threads.drain(..));
        for thread in threads {
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
        // An IPsec session of the lanes ends when none is left.
        self.terms = None;
    }

    /// Lets the peer's last words and its close arrive, within a bound.
    fn await_peers_end(&mut self) {
        let until = Instant::now() + GOODBYE_LIMIT;
        // A peer that goes on talking gets no more than its time.
        while !self.control_ended.get() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left) {
                Ok(SessionEvent::LaneEnded { cpu, .. }) => self.add_cpu(cpu),
                Ok(SessionEvent::Control(epoch, FromPeer::Lost(_)))
                    if epoch == self.control.epoch() =>
                {
                    return;
                }
                Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    pub(super) fn spawn_reader(&mut self, events: &Sender<SessionEvent>) -> Result<(), Fault> {
        let control = Arc::clone(&self.control);
        let events = events.clone();
        let (cpu, shared) = (Arc::clone(&self.cpu), Arc::clone(&self.shared));
        let body = move || {
            let epoch = control.epoch();
            control.read(
                |message| shared.acknowledge(message),
                |from_peer| {
                    // A session that is gone reads no more.
                    let _ = events.send(SessionEvent::Control(epoch, from_peer));
                },
            );
            add(&cpu, thread_cpu_time());
        };
        self.reader = Some(
            self.host
                .spawn("dunlin-control".into(), Box::new(body))
                .map_err(|error| {
                    Fault::new(FaultCode::Kernel, "cannot start a thread").because(error)
                })?,
        );
        Ok(())
    }

    pub(super) fn spawn(
        &mut self,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), Fault> {
        let thread = self.host.spawn(name, Box::new(body)).map_err(|error| {
            Fault::new(FaultCode::Kernel, "cannot start a thread").because(error)
        })?;
        self.threads.push(thread);
        Ok(())
    }

    fn add_cpu(&self, used: Duration) {
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

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
