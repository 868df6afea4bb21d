//! State common to all phases of a migration, on the thread that called
//! [`Migration::run`](super::Migration::run).

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_lane::control::ControlStream;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::Selection;
use dunlin_proto::observe::Observer;
use dunlin_proto::switchover::Source;
use tracing::Span;

use super::super::control::FromPeer;
use super::super::control_link::{CLOSE_LIMIT, ControlLink, ControlTerms};
use super::super::fault::{Fault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::SessionJournal;
use super::super::report::Event;
use super::super::threads::CpuTime;
use super::super::vmm::{GuestMemory, SourceVm};
use super::control::{another_peer, open_control, reported};
use super::event::SessionEvent;
use super::lane::LaneTerms;
use super::options::Options;
use super::work_queue::WorkQueue;

/// How long to wait for the destination's reason after a lane has failed.
const REASON_LIMIT: Duration = Duration::from_millis(300);

/// State common to all phases, which own it in turn: *Connecting → PreCopy → Switchover
/// → Committed → InDoubt*.
pub(super) struct Session<'a> {
    pub(super) vm: &'a Arc<dyn SourceVm>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer<Event>,
    pub(super) cancel: &'a Cancel,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) sender: Sender<SessionEvent>,
    pub(super) control: ControlLink,
    /// How many control lanes were lost and replaced while the guest ran.
    pub(super) control_resumed: u32,
    pub(super) work_queue: Arc<WorkQueue>,
    pub(super) state: Source,
    pub(super) journal: SessionJournal,
    /// Why the migration fails, if known.
    pub(super) fault: Option<Fault>,
    /// Where the VM is if the session ends now.
    pub(super) vm_is: VmIs,
    /// Whether the VM's owner, and not the migration, paused the guest.
    pub(super) paused_by_owner: bool,
    /// Threads to join at the end of the session.
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) cpu: CpuTime,
    pub(super) started: Instant,
    /// The `tracing` span that contains the lanes' spans.
    pub(super) span: Span,
}

impl Session<'_> {
    /// The next message, for a phase that expects only messages; `None` at the deadline.
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

    /// Drops what earlier control lanes deliver. Fails on the peer's *cancel*. Before *commit*,
    /// also fails on the peer's *refuse* and on the caller's cancellation. After *commit*, the
    /// caller's cancellation only causes a warning. Returns any other event.
    pub(super) fn sift(&self, event: SessionEvent) -> Result<Option<SessionEvent>, Fault> {
        match event {
            SessionEvent::Control(epoch, _) if epoch != self.control.lane.epoch => Ok(None),
            SessionEvent::Control(_, FromPeer::Message(Message::Cancel { fault, text })) => {
                Err(reported(fault, &text))
            }
            // The destination may refuse only before *commit*.
            SessionEvent::Control(_, FromPeer::Message(Message::Refuse { fault, text }))
                if self.state.may_cancel() =>
            {
                Err(reported(fault, &text))
            }
            SessionEvent::Cancelled if !self.state.may_cancel() => {
                self.warn(
                    "too late to cancel: commit may have been sent, so the destination may run \
                     the VM"
                        .into(),
                );
                Ok(None)
            }
            SessionEvent::Cancelled => Err(Fault::cancelled()),
            event => Ok(Some(event)),
        }
    }

    /// The next event, or `None` after `wait`.
    pub(super) fn receive(&self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        let event = match self.events.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Fault::new(FaultCode::Internal, "no session thread runs"));
            }
        };
        if let SessionEvent::Control(epoch, from_peer) = &event
            && *epoch == self.control.lane.epoch
        {
            self.control.took(from_peer);
        }
        Ok(Some(event))
    }

    /// The destination's reason for the failure of a lane, if *cancel* or *refuse* arrives within
    /// [`REASON_LIMIT`].
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
                ) => return Some(reported(fault, &text)),
                // The peer sends its reason before it closes the control lane, so no reason will
                // follow.
                SessionEvent::Control(_, FromPeer::Lost(_)) => return None,
                _ => {}
            }
        }
    }

    /// Ends the lanes, closes the control lane, and waits for the peer's last messages and its
    /// close, up to [`CLOSE_LIMIT`]. The caller calls [`join`] next.
    pub(super) fn close(&self) {
        self.work_queue.stop();
        // Best effort: the peer may have died.
        let _ = self.control.lane.stream.close();
        let until = Instant::now() + CLOSE_LIMIT;
        // The limit also ends the wait for a peer that keeps sending.
        while !self.control.has_ended() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            if !matches!(self.receive(left), Ok(Some(_))) {
                return;
            }
        }
    }

    /// Opens another control lane to the session's destination. Raises the epoch first,
    /// because the destination may have seen the epoch of the previous lane or attempt.
    ///
    /// If the epoch cannot be recorded, the session continues. Before *commit* it still has to write
    /// the record *committing*, and fails if it cannot. After *commit* only an answer resolves the
    /// doubt. A process that continues this session later can then ask with an epoch that the
    /// destination has already seen. The destination refuses that inquiry. The process asks again,
    /// with a higher epoch each time, until the destination accepts the epoch.
    pub(super) fn reopen_control(
        &mut self,
        cancel: Option<&Cancel>,
        lanes: &LaneTerms,
        until: Instant,
    ) -> Result<(ControlStream, Selection), Fault> {
        self.control.terms.offer.epoch += 1;
        let offer = &self.control.terms.offer;
        if let Err(error) = self.journal.write_epoch(offer.epoch) {
            self.warn(format!("cannot record the control lane's epoch: {error}"));
        }
        let deadline = until.min(Instant::now() + self.options.connect_limit);
        let LaneTerms { to, tls, peer, .. } = lanes;
        let (stream, selection) = open_control(self.host, cancel, to, tls, offer, deadline)?;
        if !stream.peer().is(peer) {
            return Err(another_peer(stream.peer(), self.journal.peer()));
        }
        Ok((stream, selection))
    }

    /// Makes `stream`, opened under the offer's epoch, the session's control lane.
    pub(super) fn adopt_control(&mut self, stream: ControlStream) -> Result<(), Fault> {
        let control = start_control(
            stream,
            self.control.terms.clone(),
            self.host,
            &self.cpu,
            &self.work_queue,
            &self.sender,
        )?;
        // Ignore a panic of the old lane's reader, because the new lane replaces that lane.
        let _ = mem::replace(&mut self.control, control).end();
        Ok(())
    }

    pub(super) fn warn(&self, text: String) {
        self.observer.event(&Event::Warning(text));
    }
}

/// Joins the threads of a session that is closed: the reader of its control lane and `threads`.
pub(super) fn join(
    control: ControlLink,
    threads: impl Iterator<Item = JoinHandle<()>>,
    observer: &dyn Observer<Event>,
) {
    let read = control.end();
    for joined in threads.map(JoinHandle::join).chain([read]) {
        if joined.is_err() {
            let text = "a thread of the session panicked".into();
            observer.event(&Event::Warning(text));
        }
    }
}

/// A control lane on `stream`, with a thread that reads it.
pub(super) fn start_control(
    stream: ControlStream,
    terms: ControlTerms,
    host: &Arc<dyn Host>,
    cpu: &CpuTime,
    work_queue: &Arc<WorkQueue>,
    events: &Sender<SessionEvent>,
) -> Result<ControlLink, Fault> {
    let (work_queue, events) = (Arc::clone(work_queue), events.clone());
    ControlLink::start(
        stream,
        terms,
        &**host,
        cpu,
        move |message| work_queue.acknowledge(message),
        move |epoch, from_peer| {
            // Sending fails only after the session has ended.
            let _ = events.send(SessionEvent::Control(epoch, from_peer));
        },
    )
}
