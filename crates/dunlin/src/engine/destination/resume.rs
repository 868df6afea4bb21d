//! A control lane that is lost before everything has come is waited for.
//!
//! The source makes a new one with a higher epoch. Over it everything is
//! repeated that the old one may not have brought: what is acknowledged, and
//! which lanes stand.

use std::sync::Arc;
use std::time::Instant;

use dunlin_proto::control::{ChunkSet, Message, Reached};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_ACK_SETS, MAX_LANES};
use dunlin_proto::negotiate::{Offer, Refusal, Selection, select};
use dunlin_proto::switchover::Destination;

use super::super::control::ControlLane;
use super::super::fault::Fault;
use super::answer::INQUIRIES;
use super::session::{Session, peer_of, refuse};
use super::{DestinationEvent, SessionEvent};
use crate::lane::accept::Arrival;
use crate::lane::control::ControlStream;

impl Session<'_> {
    /// The epoch of the newest control lane; 0 before the first.
    pub(super) fn epoch(&self) -> u32 {
        self.control.as_ref().map_or(0, |control| control.epoch())
    }

    /// Whether a lost control lane is waited for: everything else is still
    /// under way, and nothing was decided.
    fn is_resumable(&self) -> bool {
        self.state == Destination::Receiving && self.shared.is_some()
    }

    /// Sends a message that a new control lane would bring about again: a
    /// control lane that cannot take it is lost, and nothing else.
    pub(super) fn say(&self, message: &Message) -> Result<(), Fault> {
        match self.send(message) {
            Err(fault) if fault.code == FaultCode::ControlLost && self.is_resumable() => {
                if let Some(control) = &self.control {
                    // Its reader reports the loss.
                    control.shutdown();
                }
                Ok(())
            }
            result => result,
        }
    }

    /// The newest control lane has ended.
    pub(super) fn control_lost(&mut self, fault: Fault) -> Result<(), Fault> {
        if fault.code != FaultCode::ControlLost || !self.is_resumable() {
            return Err(fault);
        }
        (self.observer)(&DestinationEvent::ControlLost {
            why: fault.for_peer(),
        });
        self.orphaned = Some((Instant::now() + self.options.control_limit, fault));
        Ok(())
    }

    /// Whether an offer is for this session.
    pub(super) fn is_ours(&self, offer: &Offer) -> bool {
        let ours = self.offer.as_ref();
        ours.is_some_and(|ours| ours.session == offer.session && self.shared.is_some())
    }

    /// A source that comes anew while we wait for its old control lane has
    /// given the old session up: so does this side, and the next try finds
    /// room.
    pub(super) fn give_way(&mut self, arrival: &Arrival) -> Result<(), Fault> {
        let Arrival::Control { stream, .. } = arrival else {
            return Ok(());
        };
        if !self.is_with(stream.peer()) {
            return Ok(());
        }
        match self.orphaned.take() {
            Some((_, fault)) => Err(fault),
            None => Ok(()),
        }
    }

    /// The source has made a new control lane for this session.
    pub(super) fn resume_control(
        &mut self,
        stream: ControlStream,
        offer: Offer,
    ) -> Result<(), Fault> {
        let selection = match self.check_resumed(&stream, &offer) {
            Ok(selection) => selection,
            Err(refusal) => {
                self.reject(format!(
                    "another control lane of {}: {refusal}",
                    peer_of(&stream)
                ));
                refuse(&stream, &refusal);
                return Ok(());
            }
        };
        if let Some(old) = self.control.take() {
            old.shutdown();
        }
        if let Some(reader) = self.reader.take() {
            // A panic there has been reported as the loss of the lane.
            let _ = reader.join();
        }
        // One that asks for other terms is not the process that began.
        let resumes = self.is_resumable() && self.selection.as_ref() == Some(&selection);
        if !resumes {
            self.set_aside();
        }
        let mut bytes = Vec::new();
        selection.encode(&mut bytes).map_err(|error| {
            Fault::new(FaultCode::Internal, "the selection cannot be sent").because(error)
        })?;
        // A lane that fails already is reported by its reader.
        let _ = stream.send(&bytes);
        let sequences = Arc::clone(&self.sequences);
        let silence = self.options.silence_limit;
        let control = ControlLane::new(stream, offer.session, offer.epoch, sequences, silence);
        let control = Arc::new(control);
        self.control = Some(Arc::clone(&control));
        self.offer = Some(offer);
        self.orphaned = None;
        self.control_ended.set(false);
        self.spawn_reader(&control)?;
        self.asked = false;
        if !resumes {
            // It is for an inquiry, which comes next.
            return Ok(());
        }
        (self.observer)(&DestinationEvent::ControlResumed);
        self.repeat()
    }

    /// Puts what the old control lane's reader had read where an inquiry finds
    /// it. The reader has been joined: nothing more comes from it.
    fn set_aside(&mut self) {
        let passed_over = std::mem::take(&mut self.passed_over);
        for event in passed_over.into_iter().chain(self.events.try_iter()) {
            match event {
                SessionEvent::Control(_, from_peer) => self.drained.push_back(from_peer),
                event => self.passed_over.push_back(event),
            }
        }
    }

    fn check_resumed(&self, stream: &ControlStream, offer: &Offer) -> Result<Selection, Refusal> {
        let refusal = |fault, text: &str| Refusal {
            fault,
            text: text.into(),
        };
        let Some(ours) = &self.offer else {
            let text = "there is no such session here";
            return Err(refusal(FaultCode::UnknownSession, text));
        };
        if !self.is_with(stream.peer()) {
            let text = "it is not the peer of this session";
            return Err(refusal(FaultCode::WrongIdentity, text));
        }
        if offer.attempt != ours.attempt || offer.epoch <= ours.epoch {
            let text = "it is about another attempt, or has been replaced itself";
            return Err(refusal(FaultCode::Malformed, text));
        }
        // The source's process may have died and left to the one that asks
        // now nothing but its record, which does not hold what was agreed.
        select(offer, &INQUIRIES)
    }

    /// Says again what the old control lane may not have brought.
    fn repeat(&mut self) -> Result<(), Fault> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let (open, (sets, reached)) =
            shared.lanes(|lanes| (lanes.open().collect::<Vec<_>>(), lanes.repeat()));
        self.acks_due = None;
        for lane in open {
            self.say(&Message::LaneUp { lane })?;
        }
        self.send_acks(&sets, &reached)
    }

    /// Sends acknowledgements, in as many messages as it takes.
    pub(super) fn send_acks(&self, sets: &[ChunkSet], reached: &[Reached]) -> Result<(), Fault> {
        let mut sets = sets.chunks(MAX_ACK_SETS);
        let mut reached = reached.chunks(usize::from(MAX_LANES));
        loop {
            let (sets, reached) = (sets.next(), reached.next());
            if sets.is_none() && reached.is_none() {
                return Ok(());
            }
            self.say(&Message::Ack {
                sets: sets.unwrap_or_default().to_vec(),
                reached: reached.unwrap_or_default().to_vec(),
            })?;
        }
    }
}
