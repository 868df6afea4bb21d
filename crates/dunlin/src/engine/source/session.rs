//! What every phase of a migration has, on the thread that called
//! [`migrate`](super::migrate).

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Offer, Selection};
use dunlin_proto::switchover::Source;

use super::super::control::{ControlLane, FromPeer, Sequences};
use super::super::fault::{Fault, OrFault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::SessionJournal;
use super::super::report::{Event, Observer};
use super::super::vmm::{GuestMemory, RunState, SourceVm};
use super::event::SessionEvent;
use super::options::Options;
use super::work_queue::WorkQueue;
use crate::lane::control::ControlStream;

/// How long the peer may take to close the control lane at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long to wait for the reason why the destination gave a lane up.
const REASON_LIMIT: Duration = Duration::from_millis(300);

/// What every phase has. The phases own it in turn:
/// *Connecting → PreCopy → Switchover → Committed → InDoubt*.
pub(super) struct Session<'a> {
    pub(super) vm: &'a Arc<dyn SourceVm>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer,
    pub(super) cancel: &'a Cancel,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) sender: Sender<SessionEvent>,
    pub(super) control: Control,
    pub(super) work_queue: Arc<WorkQueue>,
    pub(super) state: Source,
    pub(super) journal: SessionJournal,
    /// Why the migration fails, as far as it is known.
    pub(super) fault: Option<Fault>,
    /// Where the VM is, if the session ends now.
    pub(super) vm_is: VmIs,
    /// Whether the guest was paused by its owner, not by the migration.
    pub(super) paused_by_owner: bool,
    /// Joined at the end.
    pub(super) threads: Vec<JoinHandle<()>>,
    /// CPU time that the session's threads used, in nanoseconds.
    pub(super) cpu: Arc<AtomicU64>,
    pub(super) started: Instant,
}

/// The newest control lane, and what a next one is made with.
pub(super) struct Control {
    pub(super) lane: Arc<ControlLane>,
    /// The thread that reads `lane`; none once it has been joined.
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) sequences: Arc<Sequences>,
    /// What the source offered; only the epoch changes.
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    /// Whether `lane` has ended.
    pub(super) ended: Cell<bool>,
    /// How many were lost and replaced.
    pub(super) resumed: u32,
}

impl Session<'_> {
    /// The next message while nothing but messages is expected; `None` at the deadline.
    pub(super) fn next_message(&self, deadline: Instant) -> Result<Option<Message>, Fault> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.receive(left)? else {
                return Ok(None);
            };
            match self.sift(event)? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => {
                    return Ok(Some(message));
                }
                Some(SessionEvent::Control(_, FromPeer::Lost(fault))) => return Err(fault),
                Some(_) | None => {}
            }
        }
    }

    /// Handles what is the same in every phase, and returns any other event: messages of earlier
    /// control lanes are dropped; a refusal or a cancellation ends the migration.
    pub(super) fn sift(&self, event: SessionEvent) -> Result<Option<SessionEvent>, Fault> {
        match event {
            SessionEvent::Control(epoch, _) if epoch != self.control.lane.epoch() => Ok(None),
            SessionEvent::Control(_, FromPeer::Message(Message::Cancel { fault, text })) => {
                Err(Fault::told(fault, text))
            }
            // Nothing is left to refuse after *commit*.
            SessionEvent::Control(_, FromPeer::Message(Message::Refuse { fault, text }))
                if self.state.may_cancel() =>
            {
                Err(Fault::told(fault, text))
            }
            SessionEvent::Cancelled if !self.state.may_cancel() => {
                self.warn("too late to cancel: the VM is the destination's".into());
                Ok(None)
            }
            SessionEvent::Cancelled => {
                Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"))
            }
            event => Ok(Some(event)),
        }
    }

    /// The next event, or `None` after `wait`.
    pub(super) fn receive(&self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        let event = match self.events.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Fault::new(FaultCode::Internal, "every thread has ended"));
            }
        };
        if let SessionEvent::Control(epoch, from_peer) = &event
            && *epoch == self.control.lane.epoch()
        {
            match from_peer {
                FromPeer::Message(_) => self.control.lane.took(),
                FromPeer::Lost(_) => self.control.ended.set(true),
            }
        }
        Ok(Some(event))
    }

    /// Why the destination gave a lane up, if it says so within a moment.
    pub(super) fn reason_of_peer(&self) -> Option<Fault> {
        let until = Instant::now() + REASON_LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left).ok()?? {
                SessionEvent::Control(
                    _,
                    FromPeer::Message(
                        Message::Cancel { fault, text } | Message::Refuse { fault, text },
                    ),
                ) => return Some(Fault::told(fault, text)),
                SessionEvent::LaneEnded { cpu, .. } => self.add_cpu(cpu),
                // A reason would have come before the end of the control lane.
                SessionEvent::Control(_, FromPeer::Lost(_)) => return None,
                _ => {}
            }
        }
    }

    /// Fails when the guest has ended.
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

    pub(super) fn guest_has_ended(&self) -> bool {
        matches!(
            self.vm.run_state(),
            RunState::PoweredOff | RunState::Stopped(_)
        )
    }

    /// Ends the control lane, and joins every thread: `lanes`, the reader and the others.
    pub(super) fn close(&mut self, lanes: impl Iterator<Item = JoinHandle<()>>) {
        self.work_queue.stop();
        // Best effort: the peer may be gone.
        let _ = self.control.lane.stream().close();
        self.await_end_of_control();
        self.control.lane.shutdown();
        let threads = lanes
            .chain(self.control.reader.take())
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
    }

    /// Waits for the peer's last messages and its close, within a bound.
    fn await_end_of_control(&self) {
        let until = Instant::now() + CLOSE_LIMIT;
        // A peer that goes on sending gets no more than its time.
        while !self.control.ended.get() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            match self.receive(left) {
                Ok(Some(SessionEvent::LaneEnded { cpu, .. })) => self.add_cpu(cpu),
                Ok(Some(SessionEvent::Control(epoch, FromPeer::Lost(_))))
                    if epoch == self.control.lane.epoch() =>
                {
                    return;
                }
                Ok(None) | Err(_) => return,
                Ok(Some(_)) => {}
            }
        }
    }

    /// Starts the thread that reads the control lane.
    pub(super) fn spawn_reader(&mut self) -> Result<(), Fault> {
        let control = Arc::clone(&self.control.lane);
        let events = self.sender.clone();
        let (cpu, work_queue) = (Arc::clone(&self.cpu), Arc::clone(&self.work_queue));
        let body = move || {
            let epoch = control.epoch();
            control.read(
                |message| work_queue.acknowledge(message),
                |from_peer| {
                    // Fails once the session has ended.
                    let _ = events.send(SessionEvent::Control(epoch, from_peer));
                },
            );
            add(&cpu, thread_cpu_time());
        };
        let thread = spawn(&**self.host, "dunlin-control".into(), body)?;
        self.control.reader = Some(thread);
        Ok(())
    }

    /// The next control lane has a higher epoch than any before, in the journal too.
    pub(super) fn raise_epoch(&mut self) {
        self.control.offer.epoch += 1;
        if let Err(error) = self.journal.write_epoch(self.control.offer.epoch) {
            self.warn(format!(
                "the control lane's epoch could not be recorded: {error}"
            ));
        }
    }

    /// Ends the control lane, and joins its reader.
    pub(super) fn end_control(&mut self) {
        self.control.lane.shutdown();
        if let Some(reader) = self.control.reader.take() {
            // A panic there has been reported as the loss of the lane.
            let _ = reader.join();
        }
    }

    /// A control lane that was opened under the offer's epoch becomes the session's.
    pub(super) fn adopt_control(&mut self, stream: ControlStream) -> Result<(), Fault> {
        self.control.lane = Arc::new(ControlLane::new(
            stream,
            self.control.lane.session(),
            self.control.offer.epoch,
            Arc::clone(&self.control.sequences),
            self.options.silence_limit,
        ));
        self.control.ended.set(false);
        self.spawn_reader()
    }

    pub(super) fn add_cpu(&self, used: Duration) {
        add(&self.cpu, used);
    }

    /// CPU time that the session's threads have used.
    pub(super) fn cpu_used(&self) -> Duration {
        Duration::from_nanos(self.cpu.load(Ordering::Relaxed))
    }

    pub(super) fn warn(&self, text: String) {
        self.observer.event(&Event::Warning(text));
    }
}

/// Starts a thread of the session.
pub(super) fn spawn(
    host: &dyn Host,
    name: String,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Fault> {
    host.spawn(name, Box::new(body))
        .or_fault(FaultCode::Kernel, "cannot start a thread")
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
