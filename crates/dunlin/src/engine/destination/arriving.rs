//! The state of an arriving VM, after the source has described it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_lane::peers::PeerIdentity;
use dunlin_proto::control::{Accept, Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{DestinationRecord, State};
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::FromPeer;
use super::super::control_link::ControlLink;
use super::super::fault::Fault;
use super::super::journal::SessionJournal;
use super::super::threads::nanos;
use super::super::vmm::{DestinationVm, Offered};
use super::lanes::Lanes;
use super::received::DestinationEvent;
use super::session::Session;

/// State common to the phases *Receiving*, *Prepared* and *Running*.
pub(super) struct Arriving<'a> {
    pub(super) session: Session<'a>,
    pub(super) control: ControlLink,
    pub(super) link: Link,
    pub(super) attempt: Attempt,
    pub(super) lanes: Lanes,
    /// Whether an inquiry has arrived on the newest control lane.
    pub(super) asked: bool,
    /// Messages that the reader of an older control lane had read and the session has not applied
    /// yet.
    pub(super) drained: Vec<FromPeer>,
    /// When the source last made progress.
    pub(super) progressed: Instant,
}

/// The state of the newest control lane.
pub(super) enum Link {
    Up,
    /// The control lane is lost. The source may replace it until this time. If it does not, the
    /// session ends with the fault.
    Lost(Instant, Fault),
}

/// The VM and the decisions about it.
pub(super) struct Attempt {
    pub(super) state: Destination,
    pub(super) journal: SessionJournal,
    pub(super) vm: Arc<dyn DestinationVm>,
    pub(super) offered: Offered,
    /// Whether the VM has been dropped.
    discarded: bool,
    /// Why the session fails, if known.
    pub(super) fault: Option<Fault>,
    pub(super) reached: Reached,
    /// Whether the source has cancelled and therefore keeps the VM.
    pub(super) source_keeps: bool,
    pub(super) guest_downtime: Option<Duration>,
}

/// How far the agreement between the source and this side has progressed.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(super) enum Reached {
    Described,
    /// *accept* is sent.
    Accepted,
    /// *ready* is sent.
    Ready,
    /// *commit* has been applied.
    Committed {
        /// Whether the guest runs here. If not, it stays paused, because its owner had
        /// paused it.
        run: bool,
    },
}

impl Attempt {
    pub(super) fn new(
        journal: SessionJournal,
        vm: Arc<dyn DestinationVm>,
        offered: Offered,
    ) -> Self {
        Self {
            state: Destination::Accepting,
            journal,
            vm,
            offered,
            discarded: false,
            fault: None,
            reached: Reached::Described,
            source_keeps: false,
            guest_downtime: None,
        }
    }

    /// Whether the source will never ask about the session: it has cancelled and keeps the VM, or
    /// this side never accepted the VM. In all other cases a source may ask, even if it did not
    /// receive *ready*. If its process died before *ready* arrived, and the VM stays paused in
    /// another process, the restarted source asks.
    pub(super) fn is_never_asked_about(&self) -> bool {
        self.reached < Reached::Accepted || self.source_keeps
    }

    /// Whether the guest runs here; valid only if this side has the VM.
    pub(super) fn runs(&self) -> bool {
        self.reached == Reached::Committed { run: true }
    }

    fn reason(&self) -> (FaultCode, String) {
        match &self.fault {
            Some(fault) => (fault.kind(), fault.for_peer()),
            None => (FaultCode::Internal, String::new()),
        }
    }
}

impl<'a> Arriving<'a> {
    pub(super) fn new(
        session: Session<'a>,
        control: ControlLink,
        attempt: Attempt,
        lanes: Lanes,
    ) -> Self {
        Self {
            session,
            control,
            link: Link::Up,
            attempt,
            lanes,
            asked: false,
            drained: Vec::new(),
            progressed: Instant::now(),
        }
    }

    /// Executes an action that all phases execute alike; returns the resulting event,
    /// if any.
    pub(super) fn act(&mut self, action: Do) -> Option<On> {
        match action {
            Do::Record(record) => return Some(self.record(record)),
            Do::SendAccept => {
                self.attempt.reached = Reached::Accepted;
                self.control.notify(&Message::Accept(Accept {
                    secret: self.lanes.secret.clone(),
                    lanes_max: self.session.options.lanes_max,
                    endpoints: self.session.options.endpoints.clone(),
                }));
            }
            Do::Refuse => {
                let (fault, text) = self.attempt.reason();
                self.control.notify(&Message::Refuse { fault, text });
            }
            Do::Tell(verdict) => self.send_verdict(verdict),
            Do::Close => self.control.lane.shutdown(),
            Do::Discard => self.discard(),
            Do::RefuseTooLate => {
                self.session
                    .warn("too late to cancel: the VM is here".into());
            }
            // Other code executes these actions. `resume_control` closes old control lanes when it
            // adopts a new one. `Settled` removes the record of a *released* session. `perform`
            // applies the drained messages. Each phase executes its own of the remaining actions.
            Do::CloseOld
            | Do::Forget
            | Do::Drain
            | Do::LoadState
            | Do::SendReady
            | Do::Acquire
            | Do::Resume => {}
        }
        None
    }

    fn record(&mut self, record: DestinationRecord) -> On {
        match self.attempt.journal.write(State::Destination(record)) {
            Ok(_) => {
                self.session.notify(DestinationEvent::Recorded(record));
                On::Recorded
            }
            Err(error) => {
                let fault = Fault::new(FaultCode::Journal, format!("cannot record {record}"));
                self.attempt.fault = Some(fault.because(error));
                On::RecordFailed
            }
        }
    }

    fn send_verdict(&self, verdict: Verdict) {
        let attempt = self.control.terms.offer.attempt;
        let message = match verdict {
            Verdict::Running if !self.asked => Message::Running {
                cpu_ns: nanos(self.session.cpu_used()),
                downtime_ns: self.attempt.guest_downtime.map_or(0, nanos),
            },
            Verdict::Aborted if !self.asked => {
                let (fault, text) = self.attempt.reason();
                Message::Cancel { fault, text }
            }
            verdict => Message::Answer { attempt, verdict },
        };
        self.session.notify(DestinationEvent::Notified(verdict));
        self.control.notify(&message);
    }

    /// Drops the VM. Stops the lanes first, because no lane may write after the VM's memory is
    /// unmapped.
    fn discard(&mut self) {
        self.lanes.stop();
        if !std::mem::replace(&mut self.attempt.discarded, true) {
            self.attempt.vm.discard();
        }
    }

    /// Whether `peer` is the session's peer.
    pub(super) fn is_with(&self, peer: &PeerIdentity) -> bool {
        self.attempt.journal.is_with(peer)
    }

    /// Whether to wait for a replacement of a lost control lane: only while memory and
    /// state arrive, before anything is decided.
    pub(super) fn is_resumable(&self) -> bool {
        self.attempt.state == Destination::Receiving
    }

    /// Sends a message that the session repeats on a new control lane. If this control lane is lost
    /// but can be replaced, the session continues.
    pub(super) fn send_resumable(&self, message: &Message) -> Result<(), Fault> {
        let sent = self.control.lane.send(message);
        self.control.unless_resumable(sent, self.is_resumable())
    }

    /// The time at which the session ends if the source only answers pings.
    pub(super) fn idle_until(&self) -> Instant {
        self.progressed + self.session.options.idle_limit
    }
}
