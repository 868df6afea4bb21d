//! Setting a session up at the source: who is there, what is agreed on, what is
//! moved, over which lanes.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use dunlin_proto::control::{Accept, Describe, Message, RegionTable};
use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::lanes::{Sending, Timeouts};
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{Features, Offer, Opening, Selection, SessionId, VERSIONS};
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::Source;
use dunlin_proto::text::harmless;

use super::super::control::{ControlLane, FromPeer, Sequences, read_opening};
use super::super::error::{Fault, VmIs};
use super::super::host::{Cancel, FromHost, Host};
use super::super::journal::{Journal, JournalError, SessionJournal, SourceRecord, State};
use super::super::lock;
use super::super::report::{Downtime, Event, Observer};
use super::super::vmm::{RunState, SourceVm, VmDescription};
use super::lanes::LaneTerms;
use super::precopy::Window;
use super::session::{Session, nanos, unexpected};
use super::work_queue::WorkQueue;
use super::{Options, SessionEvent};
use crate::lane::control::{self as control_lane, ControlStream};
use crate::lane::dial::{DialCancel, dialer};
use crate::lane::identity::ClientTls;

impl Session<'_> {
    /// Describes the VM, and opens the lanes side by side.
    pub(super) fn set_up(
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
            // A certificate may bear anything.
            peer: harmless(
                &peer
                    .names
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
        });
        let dialer = dialer(self.selection.security, self.options.ipsec.as_ref());
        let dialer = dialer
            .ok_or_else(|| Fault::new(FaultCode::Internal, "IPsec was offered without a dialer"))?;
        self.terms = Some(LaneTerms {
            dialer,
            connector: Arc::new(FromHost(Arc::clone(self.host))),
            tls: tls.clone(),
            peer: peer.principal(),
            accept,
            to: to.to_owned(),
            events: events.clone(),
        });
        lock(&self.shared.state).lanes.want(self.options.lanes);
        self.await_lanes(Instant::now() + self.options.connect_limit)?;
        self.lanes_stood = true;
        Ok(())
    }

    pub(super) fn describe(&mut self) -> Result<(), Fault> {
        let Some(described) = self.described.take() else {
            return Err(Fault::new(FaultCode::Internal, "the VM is described twice"));
        };
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

    pub(super) fn await_accept(&mut self, deadline: Instant) -> Result<Accept, Fault> {
        match self.next_message(deadline)? {
            Some(Message::Accept(accept)) => Ok(accept),
            Some(other) => Err(unexpected(&other)),
            None => Err(Fault::new(
                FaultCode::ControlLost,
                "the destination kept us waiting for an answer to the VM's description",
            )),
        }
    }

    /// Waits until all lanes stand. One that cannot be had now is tried again
    /// later, as long as another stands.
    pub(super) fn await_lanes(&mut self, deadline: Instant) -> Result<(), Fault> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.next_event(left)?;
            if let Some(SessionEvent::Control(_, FromPeer::Message(message))) = event {
                return Err(unexpected(&message));
            }
            let state = lock(&self.shared.state);
            let (up, opening) = (state.lanes.up(), state.lanes.opening());
            drop(state);
            let all = up >= usize::from(self.options.lanes);
            if all || (up > 0 && (left.is_zero() || opening == 0)) {
                return Ok(());
            }
            if up == 0 && opening == 0 && self.first_fault.is_some() || left.is_zero() {
                let fault = self.reason_of_peer().or(self.first_fault.take());
                return Err(fault.unwrap_or_else(|| {
                    Fault::new(
                        FaultCode::LaneLost,
                        "no lane stood within the limit for connecting",
                    )
                }));
            }
        }
    }
}

/// Connects the control lane and agrees on version, features and security.
#[expect(
    clippy::too_many_arguments,
    reason = "what `migrate` is given, and the channel"
)]
pub(super) fn connect<'a>(
    vm: &'a Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &'a Options,
    host: &'a Arc<dyn Host>,
    observer: &'a dyn Observer,
    events: Receiver<SessionEvent>,
    cancel: &'a Cancel,
) -> Result<Session<'a>, Fault> {
    let started = Instant::now();
    let deadline = started + options.connect_limit;
    let paused_by_owner = match vm.run_state() {
        RunState::Running => false,
        RunState::Paused => true,
        RunState::PoweredOff => {
            return Err(Fault::new(
                FaultCode::GuestPoweredOff,
                "the guest is powered off",
            ));
        }
        RunState::Stopped(why) => {
            return Err(Fault::new(
                FaultCode::GuestStopped,
                format!("the guest has stopped: {why}"),
            ));
        }
    };
    let described = vm.describe().map_err(|error| {
        Fault::new(FaultCode::Internal, "the VM cannot be described").because(error)
    })?;
    let mut session: SessionId = [0; 16];
    tls.config()
        .crypto_provider()
        .secure_random
        .fill(&mut session)
        .map_err(|_| Fault::new(FaultCode::Internal, "the random number source failed"))?;
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
    let mut journal = begin_record(session, &described, to, options, observer)?;
    let opened = open_control(host, Some(cancel), to, tls, &offer, deadline);
    let opened = opened.and_then(|(stream, selection)| {
        let recorded = journal.write_peer(&stream.peer().principal());
        recorded.map_err(unrecorded)?;
        Ok((stream, selection))
    });
    let (stream, selection) = match opened {
        Ok(opened) => opened,
        Err(fault) => {
            // The destination promises nothing before it accepts the VM.
            if let Err(error) = journal.forget() {
                observer.event(&Event::Warning(error.to_string()));
            }
            if cancel.is_cancelled() {
                return Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"));
            }
            return Err(fault);
        }
    };
    let sequences = Arc::<Sequences>::default();
    let memory = vm.memory();
    let schedule = Schedule::new(
        memory
            .regions()
            .iter()
            .map(|region| (region.id, region.pages())),
    );
    Ok(Session {
        vm,
        memory,
        options,
        host,
        observer,
        control: Arc::new(ControlLane::new(
            stream,
            session,
            offer.epoch,
            Arc::clone(&sequences),
            options.silence_limit,
        )),
        sequences,
        offer,
        selection,
        events,
        shared: Arc::new(WorkQueue::new(
            Sending::new(schedule, patience(options)),
            Pace::new(options.rate),
        )),
        state: Source::Live,
        described: Some(described),
        journal,
        fault: None,
        vm_is: VmIs::AtSource,
        paused: None,
        committed: None,
        downtime: Downtime::default(),
        digest: None,
        digests_equal: None,
        destination_cpu: Duration::ZERO,
        total: Duration::ZERO,
        doubt_until: None,
        inquiries: 0,
        gave_up: false,
        paused_by_owner,
        relinquished: false,
        logs: Vec::new(),
        terms: None,
        lanes_stood: false,
        lane_threads: BTreeMap::new(),
        lane_faults: BTreeMap::new(),
        first_fault: None,
        lanes_lost: 0,
        pages_again: 0,
        control_resumed: 0,
        reader: None,
        cancel,
        threads: Vec::new(),
        cpu: Arc::default(),
        started,
        last: None,
        iterations: Vec::new(),
        bytes_per_s: 0,
        window: Window::new(started),
        dirty_pages_per_s: 0,
        throttle: 0,
        control_ended: Cell::new(false),
    })
}

/// Makes room for the session's records and writes the first: a full disk is
/// found here, while the guest runs.
fn begin_record(
    session: SessionId,
    described: &VmDescription,
    to: &str,
    options: &Options,
    observer: &dyn Observer,
) -> Result<SessionJournal, Fault> {
    let state = State::Source(SourceRecord::Migrating);
    let vm = (&described.uuid, described.name.as_str());
    let record = Journal::first_record(state, session, vm, to, &options.owner);
    let mut journal = options.journal.begin(record, None).map_err(unrecorded)?;
    match journal.write(state) {
        Ok(_) => {
            observer.event(&Event::Recorded(SourceRecord::Migrating));
            Ok(journal)
        }
        Err(error) => {
            // Best effort: an empty record says nothing.
            let _ = journal.forget();
            Err(unrecorded(error))
        }
    }
}

fn unrecorded(error: JournalError) -> Fault {
    let what = "the migration cannot be recorded, and does not begin";
    Fault::new(FaultCode::Journal, what).because(error)
}

/// Connects a control lane and agrees on what `offer` says. `cancel` ends it at any point.
pub(super) fn open_control(
    host: &Arc<dyn Host>,
    cancel: Option<&Cancel>,
    to: &str,
    tls: &ClientTls,
    offer: &Offer,
    deadline: Instant,
) -> Result<(ControlStream, Selection), Fault> {
    let dial = DialCancel::new().map_err(|error| {
        Fault::new(FaultCode::Kernel, "cannot create an eventfd").because(error)
    })?;
    let own = dial.clone();
    let _interrupting = cancel.map(|cancel| cancel.interrupts(Box::new(move || own.cancel())));
    let connected = host
        .connect(to, deadline, dial.wakeup())
        .and_then(|stream| dial.covers(&stream).map(|()| stream));
    let stream = connected.map_err(|error| {
        let mut fault = Fault::new(FaultCode::ControlLost, format!("{to} cannot be reached"));
        // No network was asked; EINVAL of a socket would have its number.
        if error.kind() == io::ErrorKind::InvalidInput && error.raw_os_error().is_none() {
            fault.at_fault = AtFault::Configuration;
        }
        fault.because(error)
    })?;
    let stream = control_lane::client(stream, tls, deadline).map_err(|error| {
        let what = format!("no secure control lane to {to}");
        Fault::new(error.of_control_lane(), what).because(error)
    })?;
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
    selection.confirm(offer).map_err(|error| {
        Fault::new(
            FaultCode::SecurityNotAgreed,
            "the destination's selection is not ours",
        )
        .because(error)
    })?;
    Ok((stream, selection))
}

/// Before the first attempt to replace a lost lane.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Between attempts, at most.
const RETRY_LAST: Duration = Duration::from_secs(2);

fn patience(options: &Options) -> Timeouts {
    Timeouts {
        progress_ns: nanos(options.lane_stall_limit),
        // The thread that connects has the same limit and tells more.
        open_ns: nanos(options.connect_limit * 2),
        retry_first_ns: nanos(RETRY_FIRST),
        retry_last_ns: nanos(RETRY_LAST),
        alone_ns: nanos(options.no_lane_limit),
    }
}
