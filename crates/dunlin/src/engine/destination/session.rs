//! One session at the destination, on its own thread.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::poll::{Waker, waker};
use dunlin_proto::control::{Digest, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{
    Features, Offer, Opening, Refusal, Selection, SessionSecret, VERSIONS,
};
use dunlin_proto::switchover::Destination;

use super::super::control::{ControlLane, FromPeer, Sequences};
use super::super::error::MigrateError;
use super::super::fault::{Fault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::{RecordedPeer, SessionJournal, names_of};
use super::super::vmm::{Builder, DestinationVm, Offered, Section};
use super::answer::{Answering, Answers, Held, is_inquiry};
use super::barrier::IterationBarrier;
use super::lane::DestinationMemory;
use super::{DestinationEvent, Options, Received, SessionEvent};
use crate::lane::accept::{Arrival, accept};
use crate::lane::control::ControlStream;
use crate::lane::peers::PeerIdentity;
use crate::lane::policy::ServerTls;

/// How long the source may take to close the control lane at the end.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
/// Connections that may wait while the session's thread is busy, in the VMM
/// for example; those beyond are dropped. Plain lanes are not authenticated
/// by then, so that anybody can make them (I7).
const ARRIVALS_LIMIT: usize = 2 * MAX_LANES as usize;

pub(super) struct Session<'a> {
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a (dyn Fn(&DestinationEvent) + Send + Sync),
    pub(super) tls: &'a ServerTls,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) sender: Sender<SessionEvent>,
    pub(super) acceptor: Waker,
    pub(super) acceptor_thread: Option<JoinHandle<()>>,
    pub(super) control: Option<Arc<ControlLane>>,
    pub(super) selection: Option<Selection>,
    pub(super) secret: SessionSecret,
    pub(super) vm: Option<Arc<dyn DestinationVm>>,
    pub(super) shared: Option<Arc<IterationBarrier>>,
    pub(super) memory_at_destination: Option<Arc<DestinationMemory>>,
    pub(super) state: Destination,
    pub(super) journal: Option<SessionJournal>,
    /// Why the session ends other than well, as far as it is known.
    pub(super) fault: Option<Fault>,
    /// Whether an inquiry has come on the newest control lane.
    pub(super) asked: bool,
    /// What the reader of an older control lane had read.
    pub(super) drained: VecDeque<FromPeer>,
    /// Events that were passed over while draining.
    pub(super) passed_over: VecDeque<SessionEvent>,
    pub(super) digest: Option<Digest>,
    pub(super) ready_sent: bool,
    /// Whether *accept* has been sent.
    pub(super) accepted: bool,
    /// Whether the source has cancelled, and thus goes on by itself.
    pub(super) source_keeps: bool,
    pub(super) runs: bool,
    pub(super) guest_downtime: Option<Duration>,
    pub(super) cpu_before: Duration,
    pub(super) answers: Answers,
    pub(super) lane_threads: BTreeMap<u16, JoinHandle<()>>,
    /// Reads the newest control lane.
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) sequences: Arc<Sequences>,
    /// What the source offered for the newest control lane.
    pub(super) offer: Option<Offer>,
    /// Since the control lane is lost: until when a new one may come, and why
    /// it was lost.
    pub(super) orphaned: Option<(Instant, Fault)>,
    pub(super) wire_bytes: u64,
    pub(super) sections: Vec<Section>,
    pub(super) state_bytes: usize,
    pub(super) acks_due: Option<Instant>,
    /// When the source last did something for the migration.
    pub(super) progressed: Instant,
    /// Connections that wait for the session's thread.
    pub(super) arrivals: Arc<AtomicUsize>,
    /// Whether the end of the control lane has been heard of.
    pub(super) control_ended: Cell<bool>,
    pub(super) cpu: Arc<AtomicU64>,
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
    let tls = &tls.of_session();
    let (sender, events) = channel();
    let arrivals = Arc::<AtomicUsize>::default();
    let local = |what: &str, error: std::io::Error| {
        Fault::new(FaultCode::Kernel, what)
            .because(error)
            .into_error(VmIs::AtSource)
    };
    let listener = Arc::new(listener);
    let (acceptor, stop) = waker().map_err(|error| local("cannot create an eventfd", error))?;
    let acceptor_thread = {
        let (tls, sender) = (tls.clone(), sender.clone());
        let arrivals = Arc::clone(&arrivals);
        let listener = Arc::clone(&listener);
        let sealed = options.ipsec.clone();
        let body = move || {
            let ended = accept(&listener, &tls, &stop, |arrival| {
                // What protects lanes comes and goes apart from the session.
                let Some(arrival) = (match &sealed {
                    Some(lanes) => lanes.take(arrival),
                    None => Some(arrival),
                }) else {
                    return;
                };
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
            .map_err(|error| local("cannot start a thread", error))?
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
        memory_at_destination: None,
        state: Destination::Accepting,
        journal: None,
        fault: None,
        asked: false,
        drained: VecDeque::new(),
        passed_over: VecDeque::new(),
        digest: None,
        ready_sent: false,
        accepted: false,
        source_keeps: false,
        runs: false,
        guest_downtime: None,
        cpu_before,
        answers: Answers::default(),
        lane_threads: BTreeMap::new(),
        reader: None,
        sequences: Arc::default(),
        offer: None,
        orphaned: None,
        wire_bytes: 0,
        sections: Vec::new(),
        state_bytes: 0,
        acks_due: None,
        progressed: Instant::now(),
        arrivals,
        control_ended: Cell::new(false),
        cpu: Arc::default(),
    };
    let offered = session.take_in(builder);
    let offered = match offered {
        Ok(offered) => Some(offered),
        Err(fault) => {
            session.failed(fault);
            None
        }
    };
    cancel.unlisten();
    session.wind_up();
    session.settle(&listener, offered)
}

impl Session<'_> {
    fn take_in(&mut self, builder: &mut dyn Builder) -> Result<Offered, Fault> {
        self.await_source()?;
        let offered = self.build(builder)?;
        self.await_everything()?;
        self.switch_over()?;
        Ok(offered)
    }

    /// How it has ended.
    fn settle(
        mut self,
        listener: &Arc<TcpListener>,
        offered: Option<Offered>,
    ) -> Result<Received, MigrateError> {
        let (vm, offered) = match (self.state, self.vm.take(), offered) {
            (Destination::Running | Destination::Released, Some(vm), Some(offered)) => {
                (vm, offered)
            }
            (state, ..) => return Err(self.error(state)),
        };
        let answering = match (self.state, self.journal.take(), &self.offer) {
            (Destination::Running, journal, Some(offer)) => {
                let peer = journal
                    .as_ref()
                    .map_or(RecordedPeer::Unknown, |journal| journal.peer().clone());
                let held = Held {
                    session: offer.session,
                    peer,
                    state: self.state,
                    journal,
                    done: None,
                };
                let (listener, tls) = (Arc::clone(listener), self.tls.clone());
                let journal = self.options.journal.clone();
                let started = Answering::start(listener, tls, self.host, journal, held);
                started
                    .inspect_err(|error| {
                        self.warn(format!(
                            "inquiries about the VM cannot be answered: {error}"
                        ));
                    })
                    .ok()
            }
            _ => None,
        };
        let totals = |shared: &Arc<IterationBarrier>| shared.lanes(|lanes| lanes.totals());
        let (_, pages) = self.shared.as_ref().map(totals).unwrap_or_default();
        Ok(Received {
            vm,
            offered,
            runs: self.runs,
            guest_downtime: self.guest_downtime,
            wire_bytes: self.wire_bytes,
            pages,
            cpu: self.cpu_since(self.cpu_before),
            answering,
        })
    }

    fn error(&mut self, state: Destination) -> MigrateError {
        let fault = self.fault.take().unwrap_or_else(|| {
            let what = "the session has ended without a reason";
            Fault::new(FaultCode::Internal, what)
        });
        let vm = match state {
            Destination::Died => VmIs::RanThenDied,
            // Nobody was told, so that the source may be waiting.
            Destination::Unrecorded if self.ready_sent => VmIs::InDoubt,
            _ => VmIs::AtSource,
        };
        // A source that cancelled goes on, and one that was never accepted has
        // begun nothing: neither asks. Any other may, even if it was never
        // told *ready*: its process may have died just before, with the VM
        // paused elsewhere.
        let over = matches!(state, Destination::Aborted | Destination::Unrecorded);
        if over && (!self.accepted || self.source_keeps) {
            self.forget();
        }
        fault.into_error(vm)
    }

    pub(super) fn built(&self) -> Result<Arc<dyn DestinationVm>, Fault> {
        self.vm
            .clone()
            .ok_or_else(|| Fault::new(FaultCode::Internal, "no VM has been built"))
    }

    pub(super) fn verifies(&self) -> bool {
        self.selection
            .as_ref()
            .is_some_and(|selection| selection.features.contains(Features::VERIFY))
    }

    /// Waits for an event, and handles what is the same in every phase.
    /// `None` when the time is up.
    pub(super) fn next_event(
        &mut self,
        until: Option<Instant>,
    ) -> Result<Option<SessionEvent>, Fault> {
        let orphaned = self.orphaned.as_ref().map(|(until, _)| *until);
        let until_orphaned = match (until, orphaned) {
            (Some(until), Some(orphaned)) => Some(until.min(orphaned)),
            (until, orphaned) => until.or(orphaned),
        };
        match self.receive(until_orphaned) {
            Err(RecvTimeoutError::Timeout) => match self.orphaned.take() {
                Some((until, fault)) if until <= Instant::now() => Err(fault),
                orphaned => {
                    self.orphaned = orphaned;
                    Ok(None)
                }
            },
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::new(FaultCode::Internal, "every thread has ended"))
            }
            // What an earlier control lane left behind.
            Ok(SessionEvent::Control(epoch, _)) if epoch != self.epoch() => {
                Ok(Some(SessionEvent::Tended))
            }
            Ok(SessionEvent::Control(_, FromPeer::Lost(fault))) => {
                self.control_lost(fault)?;
                Ok(Some(SessionEvent::Tended))
            }
            Ok(SessionEvent::Control(_, FromPeer::Message(Message::Cancel { fault, text }))) => {
                Err(Fault::told(fault, text))
            }
            Ok(SessionEvent::Control(_, FromPeer::Message(Message::Inquire { attempt }))) => {
                self.inquired(attempt)?;
                Ok(Some(SessionEvent::Tended))
            }
            Ok(SessionEvent::Control(_, FromPeer::Message(Message::Fence { lane }))) => {
                self.fence(lane)?;
                Ok(Some(SessionEvent::Tended))
            }
            Ok(SessionEvent::Arrived(arrival)) => match *arrival {
                Arrival::Control {
                    stream,
                    opening: Opening::Offer(offer),
                } if self.is_ours(&offer) => {
                    self.resume_control(stream, offer)?;
                    Ok(Some(SessionEvent::Tended))
                }
                Arrival::Control {
                    stream,
                    opening: Opening::Offer(offer),
                } if is_inquiry(&offer) => {
                    let peer = peer_of(&stream);
                    (self.observer)(&DestinationEvent::Inquired { peer: peer.clone() });
                    let journal = &self.options.journal;
                    let begun = self.answers.begin(self.host, journal, None, stream, &offer);
                    if let Err(refusal) = begun {
                        self.reject(format!("an inquiry of {peer}: {refusal}"));
                    }
                    Ok(Some(SessionEvent::Tended))
                }
                other => {
                    self.give_way(&other)?;
                    Ok(Some(SessionEvent::Arrived(Box::new(other))))
                }
            },
            Ok(SessionEvent::AcceptorEnded(error)) => {
                Err(Fault::new(FaultCode::Kernel, "the listener failed").because(error))
            }
            Ok(SessionEvent::Cancelled) if self.state.may_cancel() => {
                Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"))
            }
            Ok(SessionEvent::LaneEnded {
                lane,
                result,
                wire_bytes,
                cpu,
            }) => {
                self.add_cpu(cpu);
                self.wire_bytes += wire_bytes;
                self.lane_ended(lane, result)?;
                Ok(Some(SessionEvent::Tended))
            }
            Ok(event) => Ok(Some(event)),
        }
    }

    pub(super) fn receive(
        &mut self,
        until: Option<Instant>,
    ) -> Result<SessionEvent, RecvTimeoutError> {
        let event = match (self.passed_over.pop_front(), until) {
            (Some(event), _) => event,
            (None, None) => self
                .events
                .recv()
                .map_err(|_| RecvTimeoutError::Disconnected)?,
            (None, Some(until)) => self
                .events
                .recv_timeout(until.saturating_duration_since(Instant::now()))?,
        };
        match (&event, &self.control) {
            (SessionEvent::Control(epoch, from_peer), Some(control))
                if *epoch == control.epoch() =>
            {
                match from_peer {
                    FromPeer::Message(_) => control.took(),
                    FromPeer::Lost(_) => self.control_ended.set(true),
                }
            }
            (SessionEvent::Arrived(_), _) => {
                self.arrivals.fetch_sub(1, Ordering::SeqCst);
            }
            _ => {}
        }
        Ok(event)
    }

    /// Until when the source may do nothing but answer.
    pub(super) fn idle_until(&self) -> Instant {
        self.progressed + self.options.idle_limit
    }

    /// Takes what came, or did not, for progress or a standstill.
    pub(super) fn progress(&mut self, came: Option<&SessionEvent>) -> Result<(), Fault> {
        match came {
            Some(SessionEvent::Control(_, FromPeer::Message(_)) | SessionEvent::Acks) => {
                self.progressed = Instant::now();
            }
            _ if self.idle_until() <= Instant::now() => {
                return Err(Fault::new(
                    FaultCode::Standstill,
                    format!(
                        "the source is there, and has sent neither pages nor anything else for {:?}",
                        self.options.idle_limit
                    ),
                ));
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn send(&self, message: &Message) -> Result<(), Fault> {
        match &self.control {
            Some(control) => control.send(message),
            None => Err(Fault::new(FaultCode::Internal, "there is no control lane")),
        }
    }

    pub(super) fn turn_away(&self, arrival: Arrival, why: &str) {
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
            Arrival::Starved(error) => starved(error).for_peer(),
        });
    }

    /// Whether `peer` is the one that the session began with.
    pub(super) fn is_with(&self, peer: &PeerIdentity) -> bool {
        let journal = self.journal.as_ref();
        journal.is_some_and(|journal| journal.is_with(peer))
    }

    pub(super) fn reject(&self, reason: String) {
        (self.observer)(&DestinationEvent::Rejected { reason });
    }

    /// Leaves nothing behind: listener, lanes, threads.
    fn wind_up(&mut self) {
        self.acceptor.wake();
        self.answers.end();
        if let Some(shared) = &self.shared {
            shared.stop();
        }
        if let Some(control) = self.control.clone() {
            // A peer that has gone needs no goodbye.
            let _ = control.stream().close();
            self.await_peers_end();
            control.shutdown();
        }
        let threads = std::mem::take(&mut self.lane_threads)
            .into_values()
            .chain(self.reader.take())
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
        // A peer that goes on talking gets no more than its time.
        while !self.control_ended.get() && Instant::now() < until {
            match self.receive(Some(until)) {
                Ok(SessionEvent::LaneEnded { cpu, .. }) => self.add_cpu(cpu),
                Ok(SessionEvent::Control(epoch, FromPeer::Lost(_))) if epoch == self.epoch() => {
                    return;
                }
                Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    pub(super) fn spawn_reader(&mut self, control: &Arc<ControlLane>) -> Result<(), Fault> {
        let control = Arc::clone(control);
        let events = self.sender.clone();
        let cpu = Arc::clone(&self.cpu);
        let body = move || {
            let epoch = control.epoch();
            control.read(
                |_| Ok(false),
                |from_peer| {
                    // A session that is gone reads no more.
                    let _ = events.send(SessionEvent::Control(epoch, from_peer));
                },
            );
            add(&cpu, thread_cpu_time());
        };
        let thread = self
            .host
            .spawn("dunlin-control".into(), Box::new(body))
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "cannot start a thread").because(error)
            })?;
        self.reader = Some(thread);
        Ok(())
    }

    pub(super) fn add_cpu(&self, used: Duration) {
        add(&self.cpu, used);
    }

    pub(super) fn cpu_since(&self, before: Duration) -> Duration {
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
pub(super) fn refuse(stream: &ControlStream, refusal: &Refusal) {
    let mut bytes = Vec::new();
    if refusal.encode(VERSIONS, &mut bytes).is_ok() {
        // A peer that has gone needs no refusal.
        let _ = stream.send(&bytes).and_then(|()| stream.close());
    }
}

/// Somebody waits to be accepted and cannot be.
pub(super) fn starved(error: std::io::Error) -> Fault {
    let what = "a connection waits here and cannot be accepted: raise this process's limit of \
                open files (`ulimit -n`)";
    Fault::new(FaultCode::Kernel, what).because(error)
}

pub(super) fn peer_of(stream: &ControlStream) -> String {
    names_of(stream.peer())
}

pub(super) fn unexpected(message: &Message) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        format!("the source sent {} out of turn", message.kind().name()),
    )
}
