//! Receives memory and state.

use std::time::{Duration, Instant};

use dunlin_lane::accept::Arrival;
use dunlin_proto::control::{Digest, Final, Message, Section};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::switchover::{Destination, DestinationEvent as On};
use tracing::info_span;

use super::super::control::{FromPeer, unexpected};
use super::super::fault::{Fault, OrFault};
use super::super::journal::Role;
use super::super::memory::digest;
use super::arriving::Arriving;
use super::event::SessionEvent;
use super::phase::{Phase, begin, failed, next_event, take};
use super::prepared::Prepared;
use super::refusal::starved;
use super::settled::Settled;

/// How long acknowledgements are collected before they are sent. The delay limits them to a few
/// hundred messages per second.
const ACK_DELAY: Duration = Duration::from_millis(3);

/// The VM is accepted; memory arrives on data lanes, state on the control lane.
pub(super) struct Receiving<'a> {
    arriving: Arriving<'a>,
    sections: Vec<Section>,
    state_bytes: usize,
}

impl<'a> Phase<'a> for Receiving<'a> {
    fn arriving(&mut self) -> &mut Arriving<'a> {
        &mut self.arriving
    }
}

impl<'a> Receiving<'a> {
    /// Records *prepared* and accepts the VM.
    pub(super) fn begin(arriving: Arriving<'a>) -> Result<Self, Settled> {
        let mut receiving = Self {
            arriving,
            sections: Vec::new(),
            state_bytes: 0,
        };
        if let Err(fault) = begin(&mut receiving) {
            failed(&mut receiving, fault);
        }
        if receiving.arriving.attempt.state == Destination::Receiving {
            return Ok(receiving);
        }
        Err(Settled::arriving(receiving.arriving))
    }

    /// Receives lanes, memory and state until everything that *final* counts has arrived,
    /// and loads the state.
    pub(super) fn await_everything(mut self) -> Result<Prepared<'a>, Settled> {
        let received = info_span!("receive").in_scope(|| self.receive_all());
        let loaded = received.and_then(|()| info_span!("load").in_scope(|| self.load()));
        let digest = loaded.unwrap_or_else(|fault| {
            failed(&mut self, fault);
            None
        });
        if self.arriving.attempt.state == Destination::Loading {
            return Ok(Prepared::new(self.arriving, digest));
        }
        Err(Settled::arriving(self.arriving))
    }

    fn receive_all(&mut self) -> Result<(), Fault> {
        self.arriving.progressed = Instant::now();
        while !self.arriving.is_complete()? {
            let idle = self.arriving.idle_until();
            let due = self.arriving.lanes.acks_due;
            let event = next_event(self, due.map_or(idle, |due| due.min(idle)))?;
            let is_repeated = self.is_repeated(event.as_ref());
            self.arriving
                .progress(event.as_ref().filter(|_| !is_repeated))?;
            match event {
                Some(SessionEvent::Arrived(arrival)) => match *arrival {
                    Arrival::Lane { socket, opening } => self.arriving.admit(socket, &opening)?,
                    // The destination has no free descriptors or memory, so no lane will arrive.
                    // Fail the session, because the source would otherwise not learn the reason.
                    Arrival::Starved(error) if self.arriving.lanes.are_untouched() => {
                        return Err(starved(error));
                    }
                    other => {
                        let session = &self.arriving.session;
                        session.turn_away(other, "another session is in progress");
                    }
                },
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => match message {
                    Message::Section(section) => self.keep(section)?,
                    Message::Final(last) => self.finish(last)?,
                    other => return Err(unexpected(&other, Role::Source)),
                },
                Some(SessionEvent::Acks) => {
                    let due = Instant::now() + ACK_DELAY;
                    self.arriving.lanes.acks_due.get_or_insert(due);
                }
                Some(_) | None => {}
            }
            let due = self.arriving.lanes.acks_due;
            if due.is_some_and(|due| due <= Instant::now()) {
                self.arriving.acknowledge()?;
            }
        }
        self.arriving.acknowledge()
    }

    /// Whether the event is a repeated *final*. A source can repeat *final* without end, so it is
    /// not progress.
    fn is_repeated(&self, event: Option<&SessionEvent>) -> bool {
        let barrier = &self.arriving.lanes.barrier;
        matches!(
            event,
            Some(SessionEvent::Control(
                _,
                FromPeer::Message(Message::Final(_))
            ))
        ) && barrier.lanes(|lanes| lanes.last().is_some())
    }

    /// Loads the state. If verification was negotiated, returns the digest that the memory had
    /// before the load.
    fn load(&mut self) -> Result<Option<Digest>, Fault> {
        take(self, On::Complete)?;
        let Arriving {
            control, attempt, ..
        } = &self.arriving;
        if attempt.state != Destination::Loading {
            // The source has inquired in the meantime, which has ended the attempt.
            return Ok(None);
        }
        let digest = control
            .verifies()
            .then(|| digest(&*attempt.vm.memory(), 1))
            .transpose()
            .or_fault(FaultCode::VerificationFailed, "cannot read guest memory")?;
        attempt
            .vm
            .load(&self.sections)
            .or_fault(FaultCode::StateLoadFailed, "cannot load the state")?;
        Ok(digest)
    }

    fn keep(&mut self, section: Section) -> Result<(), Fault> {
        self.state_bytes += section.bytes.len() + section.name.len();
        let count = self.sections.len() + 1;
        if self.state_bytes > MAX_STATE_BYTES || count > MAX_SECTIONS as usize {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!(
                    "the VM's state is over the limit of {MAX_SECTIONS} sections and \
                     {MAX_STATE_BYTES} bytes"
                ),
            ));
        }
        self.sections.push(section);
        Ok(())
    }

    fn finish(&mut self, last: Final) -> Result<(), Fault> {
        let received = self.sections.len();
        if last.sections as usize != received {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!(
                    "{received} sections of the VM's state arrived, but the source announced {}",
                    last.sections
                ),
            ));
        }
        let lanes = &self.arriving.lanes;
        lanes.barrier.lanes(|lanes| lanes.finish(last));
        Ok(())
    }
}
