//! A VM that comes in, from its description on.

use std::sync::Arc;
use std::time::{Duration, Instant};

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
use crate::lane::peers::PeerIdentity;

/// What every phase from the first record on has.
pub(super) struct Arriving<'a> {
    pub(super) session: Session<'a>,
    pub(super) control: ControlLink,
    pub(super) link: Link,
    pub(super) attempt: Attempt,
    pub(super) lanes: Lanes,
    /// Whether an inquiry has come on the newest control lane.
    pub(super) asked: bool,
    /// What the reader of an older control lane had read.
    pub(super) drained: Vec<FromPeer>,
    /// When the source last did something for the migration.
    pub(super) progressed: Instant,
}

/// The state of the newest control lane.
pub(super) enum Link {
    Up,
    /// The source may replace it until then; if not, the session ends with the fault.
    Lost(Instant, Fault),
}

/// The VM and what has been decided about it.
pub(super) struct Attempt {
    pub(super) state: Destination,
    pub(super) journal: SessionJournal,
    pub(super) vm: Arc<dyn DestinationVm>,
    pub(super) offered: Offered,
    /// Whether the VM has been dropped.
    discarded: bool,
    /// Why the session fails, as far as it is known.
    pub(super) fault: Option<Fault>,
    pub(super) reached: Reached,
    /// Whether the source has cancelled, and thus goes on by itself.
    pub(super) source_keeps: bool,
    pub(super) guest_downtime: Option<Duration>,
}

/// How far the source and this side have agreed.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(super) enum Reached {
    Described,
    /// *accept* is sent.
    Accepted,
    /// *ready* is sent.
    Ready,
    /// *commit* is taken.
    Committed {
        /// Whether the guest runs here, or stays paused as its owner left it.
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

    /// Whether the source will never ask: it has cancelled and goes on, or it was never accepted
    /// and has begun nothing. Any other may ask, even if it was never told *ready*: its process
    /// may have died just before, with the VM paused elsewhere.
    pub(super) fn is_never_asked_about(&self) -> bool {
        self.reached < Reached::Accepted || self.source_keeps
    }

    /// Whether the guest runs here, once the VM lives here.
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

    /// Does an action that is the same in every phase; returns the event that it ends with, if it
    /// is one that does.
    pub(super) fn act(&mut self, action: Do) -> Option<On> {
        match action {
            Do::Record(record) => return Some(self.record(record)),
            Do::SendAccept => {
                self.attempt.reached = Reached::Accepted;
                self.control.tell(&Message::Accept(Accept {
                    secret: self.lanes.secret.clone(),
                    lanes_max: self.session.options.lanes_max,
                    endpoints: self.session.options.endpoints.clone(),
                }));
            }
            Do::Refuse => {
                let (fault, text) = self.attempt.reason();
                self.control.tell(&Message::Refuse { fault, text });
            }
            Do::Tell(verdict) => self.tell_verdict(verdict),
            Do::Close => self.control.lane.shutdown(),
            Do::Discard => self.discard(),
            Do::RefuseTooLate => {
                self.session
                    .warn("too late to cancel: the VM lives here".into());
            }
            // Old control lanes are closed when the newest is adopted (`resume_control`), `Settled`
            // forgets a session that is *released*, and the others belong to a phase.
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
                (self.session.observer)(&DestinationEvent::Recorded(record));
                On::Recorded
            }
            Err(error) => {
                let fault = Fault::new(
                    FaultCode::Journal,
                    format!("{record} could not be recorded"),
                );
                self.attempt.fault = Some(fault.because(error));
                On::RecordFailed
            }
        }
    }

    fn tell_verdict(&self, verdict: Verdict) {
        let attempt = self.control.offer.attempt;
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
        (self.session.observer)(&DestinationEvent::Told(verdict));
        self.control.tell(&message);
    }

    /// Drops the VM; no lane may write any more when its memory goes.
    fn discard(&mut self) {
        self.lanes.stop();
        if !std::mem::replace(&mut self.attempt.discarded, true) {
            self.attempt.vm.discard();
        }
    }

    /// Whether `peer` is the one that the session began with.
    pub(super) fn is_with(&self, peer: &PeerIdentity) -> bool {
        self.attempt.journal.is_with(peer)
    }

    /// Whether a lost control lane is waited for: everything else is still under way, and nothing
    /// was decided.
    pub(super) fn is_resumable(&self) -> bool {
        self.attempt.state == Destination::Receiving
    }

    /// Sends a message that is repeated on a new control lane: a control lane that cannot take it
    /// is lost, and the session goes on.
    pub(super) fn say(&self, message: &Message) -> Result<(), Fault> {
        match self.control.lane.send(message) {
            Err(fault) if fault.code == FaultCode::ControlLost && self.is_resumable() => {
                // The reader reports the loss.
                self.control.lane.shutdown();
                Ok(())
            }
            result => result,
        }
    }

    /// Until when the source may do nothing but answer.
    pub(super) fn idle_until(&self) -> Instant {
        self.progressed + self.session.options.idle_limit
    }
}
