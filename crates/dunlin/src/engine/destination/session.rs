//! One session at the destination, on its own thread.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_proto::control::{Accept, ChunkSet, Describe, Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_ACK_SETS, MAX_LANES, MAX_SECTIONS, MAX_STATE_BYTES, PAGE_BYTES};
use dunlin_proto::negotiate::{
    Features, LaneOpen, LaneSecurity, Opening, Refusal, Selection, SessionSecret, Supported,
    VERSIONS, select,
};
use dunlin_proto::switchover::{Destination, DestinationAction, DestinationEvent as Step};
use dunlin_sys::affinity::thread_cpu_time;
use dunlin_sys::poll::{Waker, waker};
use dunlin_sys::socket::{Liveness, set_liveness};

use super::super::control::{ControlLane, FromPeer};
use super::super::error::{Fault, MigrateError, VmIs};
use super::super::host::{Cancel, Host};
use super::super::memory::digest;
use super::super::proof::is_proved;
use super::super::vmm::{Builder, DestinationVm, Offered, Section, VmDescription};
use super::lane::{Lane, Shared, Totals};
use super::{DestinationEvent, Options, Received, SessionEvent};
use crate::lane::accept::{Arrival, LaneSocket, accept};
use crate::lane::control::ControlStream;
use crate::lane::data::{DataReceiver, PlainConsent, STALL_LIMIT};
use crate::lane::identity::ServerTls;

/// Acknowledgements are collected for this long: some hundred messages a
/// second at most, and far below a round trip's worth of delay.
const ACK_DELAY: Duration = Duration::from_millis(3);
/// How long the source may take to describe its VM.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(10);
/// How long after *running* the source may take to let go.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);
/// How long the source may take to close the control lane at the end.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
/// Connections that may wait while the session's thread is busy, in the VMM
/// for example; those beyond are dropped. Plain lanes are not authenticated
/// by then, so that anybody can make them (I7).
const ARRIVALS_LIMIT: usize = 2 * MAX_LANES as usize;

struct Session<'a> {
    options: &'a Options,
    host: &'a Arc<dyn Host>,
    observer: &'a (dyn Fn(&DestinationEvent) + Send + Sync),
    tls: &'a ServerTls,
    events: Receiver<SessionEvent>,
    sender: Sender<SessionEvent>,
    acceptor: Waker,
    acceptor_thread: Option<JoinHandle<()>>,
    control: Option<Arc<ControlLane>>,
    selection: Option<Selection>,
    secret: SessionSecret,
    vm: Option<Arc<dyn DestinationVm>>,
    shared: Option<Arc<Shared>>,
    state: Destination,
    lanes_seen: Vec<u16>,
    lanes_running: usize,
    lane_threads: Vec<JoinHandle<()>>,
    threads: Vec<JoinHandle<()>>,
    totals: Totals,
    sections: Vec<Section>,
    state_bytes: usize,
    last: Option<Final>,
    acks_due: Option<Instant>,
    /// Chunk numbers on their way into an acknowledgement.
    acks: Vec<u64>,
    /// Connections that wait for the session's thread.
    arrivals: Arc<AtomicUsize>,
    cpu: Arc<AtomicU64>,
}

pub(super) fn run(
    listener: TcpListener,
    tls: &ServerTls,
    options: &Options,
    builder: &mut dyn Builder,
    host: &Arc<dyn Host>,
    observer: &(dyn Fn(&DestinationEvent) + Send + Sync),
    cancel: &Cancel,
) -> Result<Received, MigrateError> {
    let cpu_before = thread_cpu_time();
    let (sender, events) = channel();
    let arrivals = Arc::<AtomicUsize>::default();
    let local = |what: &str, error: std::io::Error| {
        Fault::new(FaultCode::Kernel, what)
            .because(error)
            .into_error(VmIs::AtSource)
    };
    let (acceptor, stop) =
        waker().map_err(|error| local("no descriptors can be had", error))?;
    let acceptor_thread = {
        let (tls, sender) = (tls.clone(), sender.clone());
        let arrivals = Arc::clone(&arrivals);
        let body = move || {
            let ended = accept(&listener, &tls, &stop, |arrival| {
                if arrivals.fetch_add(1, Ordering::SeqCst) >= ARRIVALS_LIMIT {
                    arrivals.fetch_sub(1, Ordering::SeqCst);
                    return;
                }
                // A session that is gone takes nobody in.
                let _ = sender.send(SessionEvent::Arrived(Box::new(arrival)));
            });
            if let Err(error) = ended {
                let _ = sender.send(SessionEvent::AcceptorEnded(error));
            }
        };
        host.spawn("dunlin-accept".into(), Box::new(body))
            .map_err(|error| local("no thread can be had", error))?
    };
    let on_cancel = sender.clone();
    cancel.listen(move || {
        let _ = on_cancel.send(SessionEvent::Cancelled);
    });
    let mut session = Session {
        options,
        host,
        observer,
        tls,
        events,
        sender,
        acceptor,
        acceptor_thread: Some(acceptor_thread),
        control: None,
        selection: None,
        secret: SessionSecret([0; 32]),
        vm: None,
        shared: None,
        state: Destination::Receiving,
        lanes_seen: Vec::new(),
        lanes_running: 0,
        lane_threads: Vec::new(),
        threads: Vec::new(),
        totals: Totals::default(),
        sections: Vec::new(),
        state_bytes: 0,
        last: None,
        acks_due: None,
        acks: Vec::new(),
        arrivals,
        cpu: Arc::default(),
    };
    let result = session.take_in(builder, cpu_before);
    let result = result.map_err(|fault| session.fail(fault));
    cancel.unlisten();
    session.wind_up();
    result.map(|mut received| {
        received.cpu = session.cpu_since(cpu_before);
        received
    })
}

impl Session<'_> {
    fn take_in(
        &mut self,
        builder: &mut dyn Builder,
        cpu_before: Duration,
    ) -> Result<Received, Fault> {
        let control = self.await_source()?;
        let offered = self.build(builder)?;
        self.await_everything(&control)?;
        let runs = self.switch_over(&control)?;
        let (vm, guest_downtime) = self.start(&control, runs, cpu_before)?;
        Ok(Received {
            vm,
            offered,
            runs,
            guest_downtime,
            wire_bytes: self.totals.wire_bytes,
            pages: self.totals.pages,
            cpu: Duration::ZERO,
        })
    }

    /// Waits for a control lane whose offer can be met.
    fn await_source(&mut self) -> Result<Arc<ControlLane>, Fault> {
        loop {
            match self.next_event(None)? {
                Some(SessionEvent::Arrived(arrival)) => match *arrival {
                    Arrival::Control { stream, opening } => {
                        if let Some(control) = self.negotiate(stream, &opening)? {
                            return Ok(control);
                        }
                    }
                    other => self.turn_away(other, "no session has begun"),
                },
                Some(_) | None => {}
            }
        }
    }

    fn negotiate(
        &mut self,
        stream: ControlStream,
        opening: &Opening,
    ) -> Result<Option<Arc<ControlLane>>, Fault> {
        let mut bytes = Vec::new();
        let answer = match opening {
            Opening::Offer(offer) => {
                let supported = Supported {
                    versions: VERSIONS,
                    features: Features::VERIFY,
                    required: Features::NONE,
                    plain_allowed: self.options.allow_plain,
                };
                select(offer, &supported).map(|selection| (offer, selection))
            }
            _ => Err(Refusal {
                fault: FaultCode::Malformed,
                text: "an offer comes first on a control lane".into(),
            }),
        };
        let (offer, selection) = match answer {
            Ok(agreed) => agreed,
            Err(refusal) => {
                self.reject(format!("the offer of {}: {refusal}", peer_of(&stream)));
                refuse(&stream, &refusal);
                return Ok(None);
            }
        };
        selection.encode(&mut bytes).map_err(|error| {
            Fault::new(FaultCode::Internal, "the selection cannot be sent").because(error)
        })?;
        if let Err(error) = stream.send(&bytes) {
            self.reject(format!("the control lane of {}: {error}", peer_of(&stream)));
            return Ok(None);
        }
        (self.observer)(&DestinationEvent::Connected {
            peer: peer_of(&stream),
        });
        self.tls
            .config()
            .crypto_provider()
            .secure_random
            .fill(&mut self.secret.0)
            .map_err(|_| Fault::new(FaultCode::Internal, "no random numbers can be had"))?;
        self.selection = Some(selection);
        let control = Arc::new(ControlLane::new(stream, offer.session, offer.epoch));
        self.control = Some(Arc::clone(&control));
        self.spawn_reader(&control)?;
        Ok(Some(control))
    }

    /// Builds the VM that the source describes, and accepts it.
    fn build(&mut self, builder: &mut dyn Builder) -> Result<Offered, Fault> {
        let until = Instant::now() + DESCRIBE_LIMIT;
        let described = loop {
            match self.next_event(Some(until))? {
                Some(SessionEvent::Control(FromPeer::Message(Message::Describe(described)))) => {
                    break described;
                }
                Some(SessionEvent::Control(FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "the VM is not described yet");
                }
                Some(_) => {}
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        "the source does not describe its VM",
                    ));
                }
            }
        };
        let Describe {
            vm_uuid,
            vm_name,
            page_bytes,
            paused,
            description,
            regions,
        } = described;
        if u64::from(page_bytes) != PAGE_BYTES {
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                format!("pages of {page_bytes} bytes are not supported: only {PAGE_BYTES}"),
            ));
        }
        let offered = Offered {
            vm: VmDescription {
                uuid: vm_uuid,
                name: vm_name,
                description,
            },
            regions: regions.regions().to_vec(),
            paused,
        };
        (self.observer)(&DestinationEvent::Offered(offered.clone()));
        let vm = builder
            .build(&offered)
            .map_err(|refusal| Fault::new(refusal.fault, refusal.text))?;
        let memory = vm.memory();
        let built = memory.regions().iter().map(|r| (r.id, r.length));
        let wanted = offered.regions.iter().map(|r| (r.id, r.length));
        self.vm = Some(Arc::clone(&vm));
        if !built.eq(wanted) {
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                "the VM that was built here has other memory regions than the source's",
            ));
        }
        self.shared = Some(Arc::new(Shared::new(memory, regions)));
        self.send(&Message::Accept(Accept {
            secret: self.secret.clone(),
            lanes_max: self.options.lanes_max,
            endpoints: self.options.endpoints.clone(),
        }))?;
        Ok(offered)
    }

    /// Takes in lanes, memory and state until *final* has come and every lane
    /// has ended.
    fn await_everything(&mut self, control: &ControlLane) -> Result<(), Fault> {
        loop {
            if self.last.is_some() && self.lanes_running == 0 {
                return self.check_complete();
            }
            let due = self.acks_due;
            match self.next_event(due)? {
                Some(SessionEvent::Arrived(arrival)) => match *arrival {
                    Arrival::Lane { socket, opening } => self.admit(control, socket, &opening)?,
                    other => self.turn_away(other, "a session is under way"),
                },
                Some(SessionEvent::Control(FromPeer::Message(message))) => match message {
                    Message::Section(section) => self.keep(section)?,
                    Message::Final(last) if self.last.is_none() => self.last = Some(last),
                    other => return Err(unexpected(&other)),
                },
                Some(SessionEvent::LaneEnded { result, .. }) => {
                    let totals = result?;
                    self.totals.chunks += totals.chunks;
                    self.totals.pages += totals.pages;
                    self.totals.wire_bytes += totals.wire_bytes;
                }
                Some(SessionEvent::Acks) => {
                    self.acks_due.get_or_insert(Instant::now() + ACK_DELAY);
                }
                Some(_) => {}
                None => self.acknowledge()?,
            }
        }
    }

    /// Lets a lane in, if it proves that it belongs here.
    fn admit(
        &mut self,
        control: &ControlLane,
        socket: LaneSocket,
        opening: &Opening,
    ) -> Result<(), Fault> {
        let (Some(shared), Some(selection)) = (&self.shared, &self.selection) else {
            return Ok(());
        };
        let shared = Arc::clone(shared);
        let Opening::Lane(open) = opening else {
            return Ok(());
        };
        let number = open.lane;
        if let Err((fault, text)) = self.check_lane(control, selection, &socket, open) {
            self.reject(format!("lane {number}: {text}"));
            if !is_proved(&self.secret, open) {
                // Whoever this is, it is not the source: nothing is told.
                return Ok(());
            }
            return self.send(&Message::LaneRefused {
                lane: number,
                fault,
                text,
            });
        }
        // A lane may be silent for long, while the guest dirties nothing; the
        // kernel finds out whether its peer is still there.
        if let Err(error) = set_liveness(socket.stream(), &Liveness::default()) {
            self.reject(format!("lane {number}: {error}"));
        }
        let receiver = match socket {
            LaneSocket::Tls(secured) => DataReceiver::tls(*secured, STALL_LIMIT),
            LaneSocket::Plain(stream) => {
                let theirs = selection.security == LaneSecurity::Plain;
                let Some(consent) = PlainConsent::both(self.options.allow_plain, theirs) else {
                    return Ok(());
                };
                DataReceiver::plain(stream, consent, STALL_LIMIT)
            }
        };
        let receiver = receiver.map_err(|error| {
            Fault::new(FaultCode::LaneLost, format!("lane {number} was lost")).because(error)
        })?;
        shared.open(number, receiver.canceller());
        let lane = Lane {
            number,
            receiver,
            shared,
            events: self.sender.clone(),
        };
        let thread = self
            .host
            .spawn(format!("dunlin-lane-{number}"), Box::new(move || lane.run()))
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "no thread can be had").because(error)
            })?;
        self.lane_threads.push(thread);
        self.lanes_seen.push(number);
        self.lanes_running += 1;
        (self.observer)(&DestinationEvent::LaneUp { lane: number });
        self.send(&Message::LaneUp { lane: number })
    }

    fn check_lane(
        &self,
        control: &ControlLane,
        selection: &Selection,
        socket: &LaneSocket,
        open: &LaneOpen,
    ) -> Result<(), (FaultCode, String)> {
        if open.session != control.session() {
            let text = "it is of another session".to_owned();
            return Err((FaultCode::UnknownSession, text));
        }
        if !is_proved(&self.secret, open) {
            let text = "it does not know the session's secret".to_owned();
            return Err((FaultCode::WrongSecret, text));
        }
        match (socket, selection.security) {
            (LaneSocket::Tls(secured), LaneSecurity::Tls) => {
                if !secured.peer.same_certificate(control.stream().peer()) {
                    let text = "its peer has another certificate than the control lane's";
                    return Err((FaultCode::WrongIdentity, text.to_owned()));
                }
            }
            (LaneSocket::Plain(_), LaneSecurity::Plain) => {}
            _ => {
                let text = format!("{} lanes were agreed", selection.security);
                return Err((FaultCode::SecurityNotAgreed, text));
            }
        }
        if open.version != selection.version {
            let text = format!("it speaks version {}", open.version);
            return Err((FaultCode::VersionMismatch, text));
        }
        if self.lanes_seen.contains(&open.lane) {
            let text = "its number has been used before".to_owned();
            return Err((FaultCode::DuplicateLane, text));
        }
        if self.lanes_running >= usize::from(self.options.lanes_max) {
            let text = format!("{} lanes are open already", self.lanes_running);
            return Err((FaultCode::LaneLimit, text));
        }
        Ok(())
    }

    fn keep(&mut self, section: dunlin_proto::control::Section) -> Result<(), Fault> {
        self.state_bytes += section.bytes.len() + section.name.len();
        let count = self.sections.len() + 1;
        if self.state_bytes > MAX_STATE_BYTES || count > MAX_SECTIONS as usize {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!("the source sent more state than {MAX_STATE_BYTES} bytes"),
            ));
        }
        self.sections.push(Section {
            name: section.name,
            instance: section.instance,
            version: section.version,
            required: section.required,
            bytes: section.bytes,
        });
        Ok(())
    }

    /// Everything that *final* counts must have come.
    fn check_complete(&mut self) -> Result<(), Fault> {
        self.acknowledge()?;
        self.join_lanes()?;
        let Some(last) = &self.last else {
            return Err(Fault::new(FaultCode::Internal, "nothing is final"));
        };
        let came = (self.totals.chunks, self.totals.pages, self.sections.len());
        let wanted = (last.chunks, last.pages, last.sections as usize);
        if came != wanted {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!(
                    "{} chunks, {} pages and {} sections came where the source counts {}, {} and {}",
                    came.0, came.1, came.2, wanted.0, wanted.1, wanted.2
                ),
            ));
        }
        Ok(())
    }

    /// Every lane's thread is joined before *ready* (I4).
    fn join_lanes(&mut self) -> Result<(), Fault> {
        for thread in self.lane_threads.drain(..) {
            if thread.join().is_err() {
                return Err(Fault::new(FaultCode::Internal, "a lane's thread panicked"));
            }
        }
        Ok(())
    }

    /// Loads the state, answers *ready*, and waits for *commit*. Returns
    /// whether the guest shall run.
    fn switch_over(&mut self, control: &ControlLane) -> Result<bool, Fault> {
        self.step(Step::Complete)?;
        let vm = self.built()?;
        let digest = if self.verifies() {
            let memory = vm.memory();
            Some(digest(&*memory, 1).map_err(|error| {
                Fault::new(FaultCode::VerificationFailed, "guest memory cannot be read")
                    .because(error)
            })?)
        } else {
            None
        };
        vm.load(&self.sections).map_err(|error| {
            Fault::new(FaultCode::StateLoadFailed, "the state cannot be loaded").because(error)
        })?;
        self.sections = Vec::new();
        self.step(Step::Loaded)?;
        (self.observer)(&DestinationEvent::Ready);
        control.send(&Message::Ready { digest })?;
        loop {
            match self.next_event(None)? {
                Some(SessionEvent::Control(FromPeer::Message(Message::Commit { run }))) => {
                    self.step(Step::Commit { run })?;
                    return Ok(run);
                }
                Some(SessionEvent::Control(FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "a session is under way");
                }
                Some(_) | None => {}
            }
        }
    }

    /// The source has committed: the VM lives here.
    fn start(
        &mut self,
        control: &ControlLane,
        runs: bool,
        cpu_before: Duration,
    ) -> Result<(Arc<dyn DestinationVm>, Option<Duration>), Fault> {
        let vm = self.built()?;
        vm.acquire().map_err(|error| {
            Fault::new(FaultCode::Internal, "disks and devices cannot be taken").because(error)
        })?;
        let guest_downtime = if runs {
            vm.resume().map_err(|error| {
                Fault::new(FaultCode::Internal, "the guest cannot be started").because(error)
            })?
        } else {
            None
        };
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // From here on the source changes nothing any more: it may have died.
        let told = control.send(&Message::Running {
            cpu_ns: nanos(self.cpu_since(cpu_before)),
            downtime_ns: guest_downtime.map_or(0, nanos),
        });
        if runs {
            vm.announce();
        }
        (self.observer)(&DestinationEvent::Running { runs });
        let released = told.and_then(|()| self.await_release());
        if let Err(fault) = released {
            (self.observer)(&DestinationEvent::Warning(format!(
                "the source did not confirm that it let go of the VM: {}",
                fault.for_peer()
            )));
        }
        Ok((vm, guest_downtime))
    }

    fn await_release(&mut self) -> Result<(), Fault> {
        let until = Instant::now() + RELEASE_LIMIT;
        loop {
            match self.next_event(Some(until))? {
                Some(SessionEvent::Control(FromPeer::Message(Message::Release))) => {
                    self.step(Step::Release)?;
                    return Ok(());
                }
                Some(SessionEvent::Control(FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "a session is under way");
                }
                Some(_) => {}
                None => {
                    return Err(Fault::new(FaultCode::ControlLost, "no release came"));
                }
            }
        }
    }

    fn built(&self) -> Result<Arc<dyn DestinationVm>, Fault> {
        self.vm
            .clone()
            .ok_or_else(|| Fault::new(FaultCode::Internal, "no VM has been built"))
    }

    fn verifies(&self) -> bool {
        self.selection
            .as_ref()
            .is_some_and(|selection| selection.features.contains(Features::VERIFY))
    }

    /// Waits for an event, and handles what is the same in every phase.
    /// `None` when the time is up.
    fn next_event(&mut self, until: Option<Instant>) -> Result<Option<SessionEvent>, Fault> {
        match self.receive(until) {
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::new(FaultCode::Internal, "every thread has ended"))
            }
            Ok(SessionEvent::Control(FromPeer::Lost(fault))) => Err(fault),
            Ok(SessionEvent::Control(FromPeer::Message(Message::Cancel { fault, text }))) => {
                Err(Fault::told(fault, text))
            }
            Ok(SessionEvent::AcceptorEnded(error)) => {
                Err(Fault::new(FaultCode::Kernel, "the listener failed").because(error))
            }
            Ok(SessionEvent::Cancelled) if !self.state.may_run() => {
                Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"))
            }
            Ok(SessionEvent::LaneEnded { lane, result, cpu }) => {
                self.lanes_running -= 1;
                self.add_cpu(cpu);
                Ok(Some(SessionEvent::LaneEnded { lane, result, cpu }))
            }
            Ok(event) => Ok(Some(event)),
        }
    }

    fn receive(&self, until: Option<Instant>) -> Result<SessionEvent, RecvTimeoutError> {
        let event = match until {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => self
                .events
                .recv_timeout(until.saturating_duration_since(Instant::now())),
        }?;
        match (&event, &self.control) {
            (SessionEvent::Control(FromPeer::Message(_)), Some(control)) => control.took(),
            (SessionEvent::Arrived(_), _) => {
                self.arrivals.fetch_sub(1, Ordering::SeqCst);
            }
            _ => {}
        }
        Ok(event)
    }

    /// Sends the acknowledgements that have gathered.
    fn acknowledge(&mut self) -> Result<(), Fault> {
        self.acks_due = None;
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        shared.take_acks(&mut self.acks);
        let sets = sets_of(&mut self.acks);
        for sets in sets.chunks(MAX_ACK_SETS) {
            self.send(&Message::Ack {
                sets: sets.to_vec(),
            })?;
        }
        Ok(())
    }

    fn send(&self, message: &Message) -> Result<(), Fault> {
        match &self.control {
            Some(control) => control.send(message),
            None => Err(Fault::new(FaultCode::Internal, "there is no control lane")),
        }
    }

    fn step(&mut self, event: Step) -> Result<DestinationAction, Fault> {
        let (state, action) = self.state.on(event).map_err(|error| {
            Fault::new(FaultCode::Malformed, "the peer broke the order of the switchover")
                .because(error)
        })?;
        self.state = state;
        Ok(action)
    }

    fn turn_away(&self, arrival: Arrival, why: &str) {
        self.reject(match arrival {
            Arrival::Rejected { from, reason } => format!("{from}: {reason}"),
            Arrival::Control { stream, .. } => {
                let reason = format!("a control lane of {}: {why}", peer_of(&stream));
                refuse(
                    &stream,
                    &Refusal {
                        fault: FaultCode::Busy,
                        text: "another VM is being taken in here".into(),
                    },
                );
                reason
            }
            Arrival::Lane { .. } => format!("a data lane: {why}"),
        });
    }

    fn reject(&self, reason: String) {
        (self.observer)(&DestinationEvent::Rejected { reason });
    }

    /// Ends the session after a fault: drops what was built, unless the VM
    /// lives here already.
    fn fail(&mut self, fault: Fault) -> MigrateError {
        let told = matches!(fault.code, FaultCode::ControlLost);
        let event = if told { Step::ControlLost } else { Step::Failed };
        let (state, action) = self
            .state
            .on(event)
            .unwrap_or((self.state, DestinationAction::KeepRunning));
        self.state = state;
        if let Some(shared) = &self.shared {
            shared.stop();
        }
        if action == DestinationAction::KeepRunning {
            return fault.into_error(VmIs::StuckAtDestination);
        }
        if action == DestinationAction::DiscardAndTell {
            // The source may be gone; it keeps its VM in either case.
            let _ = self.send(&Message::Cancel {
                fault: fault.code,
                text: fault.for_peer(),
            });
        }
        // No lane may write any more when the memory goes.
        let _ = self.join_lanes();
        if let Some(vm) = self.vm.take() {
            vm.discard();
        }
        fault.into_error(VmIs::AtSource)
    }

    /// Leaves nothing behind: listener, lanes, threads.
    fn wind_up(&mut self) {
        self.acceptor.wake();
        if let Some(shared) = &self.shared {
            shared.stop();
        }
        if let Some(control) = self.control.clone() {
            // A peer that has gone needs no goodbye.
            let _ = control.stream().close();
            self.await_peers_end();
            control.shutdown();
        }
        let threads = self
            .lane_threads
            .drain(..)
            .chain(self.threads.drain(..))
            .chain(self.acceptor_thread.take());
        for thread in threads {
            if thread.join().is_err() {
                (self.observer)(&DestinationEvent::Warning(
                    "a thread of the session panicked".into(),
                ));
            }
        }
    }

    /// Lets the peer's close arrive, within a bound.
    fn await_peers_end(&mut self) {
        let until = Instant::now() + GOODBYE_LIMIT;
        loop {
            match self.receive(Some(until)) {
                Ok(SessionEvent::LaneEnded { cpu, .. }) => self.add_cpu(cpu),
                Ok(SessionEvent::Control(FromPeer::Lost(_))) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn spawn_reader(&mut self, control: &Arc<ControlLane>) -> Result<(), Fault> {
        let control = Arc::clone(control);
        let events = self.sender.clone();
        let cpu = Arc::clone(&self.cpu);
        let body = move || {
            control.read(
                |_| Ok(false),
                |from_peer| {
                    // A session that is gone reads no more.
                    let _ = events.send(SessionEvent::Control(from_peer));
                },
            );
            add(&cpu, thread_cpu_time());
        };
        let thread = self
            .host
            .spawn("dunlin-control".into(), Box::new(body))
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "no thread can be had").because(error)
            })?;
        self.threads.push(thread);
        Ok(())
    }

    fn add_cpu(&self, used: Duration) {
        add(&self.cpu, used);
    }

    fn cpu_since(&self, before: Duration) -> Duration {
        let own = thread_cpu_time().saturating_sub(before);
        own + Duration::from_nanos(self.cpu.load(Ordering::Relaxed))
    }
}

fn add(cpu: &AtomicU64, used: Duration) {
    let nanos = u64::try_from(used.as_nanos()).unwrap_or(u64::MAX);
    cpu.fetch_add(nanos, Ordering::Relaxed);
}

/// Answers an offer that cannot be met, and closes. It is the first thing on
/// its connection, so that it fits the socket's buffer and nothing waits.
fn refuse(stream: &ControlStream, refusal: &Refusal) {
    let mut bytes = Vec::new();
    if refusal.encode(VERSIONS, &mut bytes).is_ok() {
        // A peer that has gone needs no refusal.
        let _ = stream.send(&bytes).and_then(|()| stream.close());
    }
}

fn peer_of(stream: &ControlStream) -> String {
    let names: Vec<String> = stream.peer().names.iter().map(ToString::to_string).collect();
    names.join(", ")
}

fn unexpected(message: &Message) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        format!("the source sent {} out of turn", message.kind().name()),
    )
}

/// Chunk numbers as sets, in ascending order.
fn sets_of(numbers: &mut [u64]) -> Vec<ChunkSet> {
    numbers.sort_unstable();
    let mut sets: Vec<ChunkSet> = Vec::new();
    for &mut number in numbers {
        match sets.last_mut() {
            Some(last)
                if last.first + u64::from(last.count) == number && last.count < u32::MAX =>
            {
                last.count += 1;
            }
            _ => sets.push(ChunkSet {
                first: number,
                count: 1,
            }),
        }
    }
    sets
}
