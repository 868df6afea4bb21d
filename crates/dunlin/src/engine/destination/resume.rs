//! A control lane that is lost before everything has come is waited for.
//!
//! The source opens a new one with a higher epoch. Over it everything is
//! repeated that the old one may not have brought: what is acknowledged, and
//! which lanes are up.

use std::sync::Arc;

use dunlin_proto::control::{ChunkSet, Message, Reached};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_ACK_SETS, MAX_LANES};
use dunlin_proto::negotiate::{Offer, Refusal, Selection, select};

use super::super::fault::{Fault, OrFault};
use super::answer::INQUIRIES;
use super::arriving::{Arriving, Link};
use super::received::DestinationEvent;
use super::refusal::{peer_of, refuse};
use crate::lane::accept::Arrival;
use crate::lane::control::ControlStream;

impl Arriving<'_> {
    /// A source that comes anew while its old control lane is waited for has
    /// given the old session up: so does this side, and the next try finds
    /// room.
    pub(super) fn give_way(&mut self, arrival: &Arrival) -> Result<(), Fault> {
        let Arrival::Control { stream, .. } = arrival else {
            return Ok(());
        };
        if !self.is_with(stream.peer()) {
            return Ok(());
        }
        match std::mem::replace(&mut self.link, Link::Up) {
            Link::Lost(_, fault) => Err(fault),
            Link::Up => Ok(()),
        }
    }

    /// The source has opened a new control lane for this session.
    pub(super) fn resume_control(
        &mut self,
        stream: ControlStream,
        offer: Offer,
    ) -> Result<(), Fault> {
        let selection = match self.check_resumed(&stream, &offer) {
            Ok(selection) => selection,
            Err(refusal) => {
                self.session.reject(format!(
                    "another control lane of {}: {refusal}",
                    peer_of(&stream)
                ));
                refuse(&stream, &refusal);
                return Ok(());
            }
        };
        self.control.end();
        // One that asks for other terms is not the process that began.
        let resumes = self.is_resumable() && self.control.selection == selection;
        if !resumes {
            self.drained.extend(self.session.set_aside());
        }
        let mut bytes = Vec::new();
        selection
            .encode(&mut bytes)
            .or_fault(FaultCode::Internal, "the selection cannot be sent")?;
        // A lane that fails already is reported by its reader.
        let _ = stream.send(&bytes);
        let sequences = Arc::clone(&self.control.sequences);
        // The terms of the session stay those that it began with.
        let selection = self.control.selection.clone();
        self.control = self
            .session
            .open_control(stream, sequences, offer, selection)?;
        self.link = Link::Up;
        self.asked = false;
        if !resumes {
            // It is for an inquiry, which comes next.
            return Ok(());
        }
        (self.session.observer)(&DestinationEvent::ControlResumed);
        self.repeat()
    }

    fn check_resumed(&self, stream: &ControlStream, offer: &Offer) -> Result<Selection, Refusal> {
        let refusal = |fault, text: &str| Refusal {
            fault,
            text: text.into(),
        };
        let ours = &self.control.offer;
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
        let (open, (sets, reached)) = self
            .lanes
            .barrier
            .lanes(|lanes| (lanes.open().collect::<Vec<_>>(), lanes.repeat()));
        self.lanes.acks_due = None;
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
