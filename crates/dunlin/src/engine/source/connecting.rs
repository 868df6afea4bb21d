//! The first phase: connects, negotiates, and describes the VM.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use dunlin_lane::policy::ClientTls;
use dunlin_lane::security::dialer;
use dunlin_linux::random;
use dunlin_proto::control::{Accept, Describe, Message, RegionTable};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Sending, Timeouts};
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{Features, Offer, SessionId, VERSIONS};
use dunlin_proto::observe::Observer;
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::Source;
use tracing::field::display;
use tracing::{Span, info_span};

use super::super::control::unexpected;
use super::super::control_link::ControlTerms;
use super::super::fault::{Fault, OrFault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::{JournalError, Role, SessionJournal, SourceRecord, State, names_of};
use super::super::report::Event;
use super::super::threads::{CpuTime, nanos};
use super::super::vmm::{RunState, SourceVm, VmDescription};
use super::control::open_control;
use super::guest::check_guest;
use super::lane::LaneTerms;
use super::lanes::{Lanes, Transfer};
use super::options::Options;
use super::phase::{Phase, failed};
use super::precopy::PreCopy;
use super::session::{Session, start_control};
use super::settled::Settled;
use super::work_queue::WorkQueue;

/// The control lane is established; the destination has not accepted the VM yet.
pub(super) struct Connecting<'a> {
    pub(super) session: Session<'a>,
    described: VmDescription,
    to: &'a str,
    tls: &'a ClientTls,
}

impl<'a> Phase<'a> for Connecting<'a> {
    fn session(&mut self) -> &mut Session<'a> {
        &mut self.session
    }
}

impl<'a> Connecting<'a> {
    /// Connects the control lane and negotiates version, features and security.
    pub(super) fn new(
        vm: &'a Arc<dyn SourceVm>,
        to: &'a str,
        tls: &'a ClientTls,
        options: &'a Options,
        host: &'a Arc<dyn Host>,
        observer: &'a dyn Observer<Event>,
        cancel: &'a Cancel,
    ) -> Result<Self, Fault> {
        let started = Instant::now();
        let deadline = started + options.connect_limit;
        let paused_by_owner = check_guest(&**vm)? == RunState::Paused;
        let described = vm
            .describe()
            .or_fault(FaultCode::Internal, "cannot describe the VM")?;
        let mut session: SessionId = [0; 16];
        random::fill(&mut session)
            .or_fault(FaultCode::Internal, "the random number source failed")?;
        let span = Span::current();
        let hex = format_args!("{:032x}", u128::from_be_bytes(session));
        span.record("session", display(hex));
        span.record("vm", &described.name);
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
        let memory = vm.memory();
        let schedule = Schedule::new(
            memory
                .regions()
                .iter()
                .map(|region| (region.id, region.pages())),
        );
        let work_queue = Arc::new(WorkQueue::new(
            Sending::new(schedule, timeouts(options)),
            Pace::new(options.rate),
        ));
        let cpu = CpuTime::default();
        let (sender, events) = channel();
        let opened = info_span!("connect")
            .in_scope(|| open_control(host, Some(cancel), to, tls, &offer, deadline));
        let opened = opened.and_then(|(stream, selection)| {
            let recorded = journal.write_peer(&stream.peer().principal());
            recorded.map_err(unrecorded)?;
            let terms = ControlTerms {
                sequences: Arc::default(),
                offer,
                selection,
                silence_limit: options.silence_limit,
            };
            start_control(stream, terms, host, &cpu, &work_queue, &sender)
        });
        let control = match opened {
            Ok(control) => control,
            Err(fault) => {
                // The destination keeps no record before it accepts the VM, so the source needs
                // none either.
                if let Err(error) = journal.forget() {
                    observer.event(&Event::Warning(error.to_string()));
                }
                if cancel.is_cancelled() {
                    return Err(Fault::cancelled());
                }
                return Err(fault);
            }
        };
        let session = Session {
            vm,
            memory,
            options,
            host,
            observer,
            cancel,
            events,
            sender,
            control,
            control_resumed: 0,
            work_queue,
            state: Source::Live,
            journal,
            fault: None,
            vm_is: VmIs::AtSource,
            paused_by_owner,
            threads: Vec::new(),
            cpu,
            started,
            span,
        };
        Ok(Self {
            session,
            described,
            to,
            tls,
        })
    }

    /// Describes the VM and waits until the destination accepts it.
    pub(super) fn describe(mut self) -> Result<PreCopy<'a>, Settled> {
        match info_span!("describe").in_scope(|| self.await_accept()) {
            Ok(terms) => Ok(PreCopy::new(Transfer {
                session: self.session,
                lanes: Lanes::new(terms),
            })),
            Err(fault) => {
                failed(&mut self, fault);
                Err(Settled::unaccepted(self.session))
            }
        }
    }

    fn await_accept(&mut self) -> Result<LaneTerms, Fault> {
        let session = &mut self.session;
        let deadline = session.started + session.options.connect_limit;
        session.control.lane.ping()?;
        let regions = RegionTable::new(session.memory.regions().to_vec())
            .or_fault(FaultCode::Internal, "cannot describe the VM's memory")?;
        let described = &mut self.described;
        session.control.lane.send(&Message::Describe(Describe {
            vm_uuid: described.uuid,
            vm_name: std::mem::take(&mut described.name),
            page_bytes: u32::try_from(PAGE_BYTES).unwrap_or(u32::MAX),
            paused: session.paused_by_owner,
            description: std::mem::take(&mut described.description),
            regions,
        }))?;
        let accept = match session.next_message(deadline)? {
            Some(Message::Accept(accept)) => accept,
            Some(other) => return Err(unexpected(&other, Role::Destination)),
            None => {
                return Err(Fault::new(
                    FaultCode::ControlLost,
                    "the destination did not answer the VM's description in time",
                ));
            }
        };
        self.agreed(accept)
    }

    fn agreed(&self, accept: Accept) -> Result<LaneTerms, Fault> {
        let session = &self.session;
        if session.options.lanes > accept.lanes_max {
            return Err(Fault::new(
                FaultCode::LaneLimit,
                format!(
                    "the options request {} lanes, which is over the destination's limit of {}",
                    session.options.lanes, accept.lanes_max
                ),
            ));
        }
        let peer = session.control.lane.stream.peer();
        session.observer.event(&Event::Accepted {
            peer: names_of(peer),
        });
        let selection = &session.control.terms.selection;
        let dialer = dialer(selection.security, session.options.ipsec.as_ref()).or_fault(
            FaultCode::Internal,
            "cannot open lanes with the selected security",
        )?;
        Ok(LaneTerms {
            dialer,
            connector: Arc::clone(session.host) as _,
            tls: self.tls.clone(),
            version: selection.version,
            session: session.control.terms.offer.session,
            accept,
            to: self.to.to_owned(),
            peer: peer.principal(),
            rate: session.options.lane_rate,
            records: session.options.records_per_lane,
            memory: Arc::clone(&session.memory),
        })
    }
}

/// Allocates the session's journal file and writes the first record, so that a full disk fails the
/// migration while the guest runs.
fn begin_record(
    session: SessionId,
    described: &VmDescription,
    to: &str,
    options: &Options,
    observer: &dyn Observer<Event>,
) -> Result<SessionJournal, Fault> {
    let state = State::Source(SourceRecord::Migrating);
    let vm = (&described.uuid, described.name.as_str());
    let record = SessionJournal::first_record(state, session, vm, to, &options.owner);
    let mut journal = SessionJournal::begin(&options.journal, record, None).map_err(unrecorded)?;
    match journal.write(state) {
        Ok(_) => {
            observer.event(&Event::Recorded(SourceRecord::Migrating));
            Ok(journal)
        }
        Err(error) => {
            // Best effort: neither a file without a record nor one with *migrating* prevents
            // another migration.
            let _ = journal.forget();
            Err(unrecorded(error))
        }
    }
}

fn unrecorded(error: JournalError) -> Fault {
    let what = "the migration cannot be recorded and does not start";
    Fault::new(FaultCode::Journal, what).because(error)
}

/// Delay before the first attempt to replace a lost lane.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Longest delay between attempts to replace a lost lane.
const RETRY_LAST: Duration = Duration::from_secs(2);

fn timeouts(options: &Options) -> Timeouts {
    Timeouts {
        progress_ns: nanos(options.lane_stall_limit),
        // Twice the limit of the thread that connects the lane, so that the thread reports its more
        // precise failure before this limit expires.
        open_ns: nanos(options.connect_limit * 2),
        retry_first_ns: nanos(RETRY_FIRST),
        retry_last_ns: nanos(RETRY_LAST),
        alone_ns: nanos(options.no_lane_limit),
    }
}
