//! Replacement of a control lane that is lost while memory and state arrive.
//!
//! The source opens a new control lane with a higher epoch. On it, each side repeats the messages
//! that were possibly lost with the old lane: the destination its acknowledgements and *lane up*,
//! the source its unanswered *fence* requests.

use std::mem;

use dunlin_lane::control::ControlStream;
use dunlin_lane::peers::PeerIdentity;
use dunlin_proto::control::{ChunkSet, Message, Reached};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_ACK_SETS, MAX_LANES};
use dunlin_proto::negotiate::{Offer, Refusal, Selection, select};

use super::super::control_link::ControlTerms;
use super::super::fault::{Fault, OrFault};
use super::answer::INQUIRIES;
use super::arriving::{Arriving, Link};
use super::received::DestinationEvent;
use super::refusal::{peer_of, refuse};

impl Arriving<'_> {
    /// `peer` has started a new session. If `peer` is the source of this session and the control
    /// lane is lost, this session ends, because its source has given it up. The source's next
    /// attempt can then succeed.
    pub(super) fn give_way(&mut self, peer: &PeerIdentity) -> Result<(), Fault> {
        if !self.is_with(peer) {
            return Ok(());
        }
        match mem::replace(&mut self.link, Link::Up) {
            Link::Lost(_, fault) => Err(fault),
            Link::Up => Ok(()),
        }
    }

    /// Handles a new control lane that the source has opened for this session.
    pub(super) fn resume_control(
        &mut self,
        stream: ControlStream,
        offer: Offer,
    ) -> Result<(), Fault> {
        let selection = match self.check_resumed(&stream, &offer) {
            Ok(selection) => selection,
            Err(refusal) => {
                self.session.reject(format!(
                    "another control lane from {} is refused: {refusal}",
                    peer_of(&stream)
                ));
                refuse(&stream, &refusal);
                return Ok(());
            }
        };
        self.control.lane.shutdown();
        // Only the process that negotiated the session can resume it. An offer with different terms
        // comes from another process.
        let resumes = self.is_resumable() && self.control.terms.selection == selection;
        let mut bytes = Vec::new();
        selection
            .encode(&mut bytes)
            .or_fault(FaultCode::Internal, "cannot encode the selection")?;
        // If the send fails, the lane's reader reports it.
        let _ = stream.send(&bytes);
        // The session keeps its original selection.
        let terms = ControlTerms {
            offer,
            ..self.control.terms.clone()
        };
        let control = self.session.open_control(stream, terms)?;
        // Ignore a panic of the old lane's reader, because the new lane replaces that lane.
        let _ = mem::replace(&mut self.control, control).end();
        self.link = Link::Up;
        self.asked = false;
        if !resumes {
            // The lane is for an inquiry, which is the next message.
            let before = self.session.set_aside(self.control.lane.epoch);
            self.drained.extend(before);
            return Ok(());
        }
        self.session.notify(DestinationEvent::ControlResumed);
        self.repeat()
    }

    fn check_resumed(&self, stream: &ControlStream, offer: &Offer) -> Result<Selection, Refusal> {
        let refusal = |fault, text: &str| Refusal {
            fault,
            text: text.into(),
        };
        let ours = &self.control.terms.offer;
        if !self.is_with(stream.peer()) {
            let text = "the session's source has another identity";
            return Err(refusal(FaultCode::WrongIdentity, text));
        }
        if offer.attempt != ours.attempt || offer.epoch <= ours.epoch {
            let text = "the offer is for another attempt, or its epoch is not above the last one";
            return Err(refusal(FaultCode::Malformed, text));
        }
        // If the source's process has died, the process that asks has only the record, which does
        // not contain the negotiated terms. So accept any terms.
        select(offer, &INQUIRIES)
    }

    /// Repeats the messages that were possibly lost with the old control lane.
    fn repeat(&mut self) -> Result<(), Fault> {
        let (open, (sets, reached)) = self
            .lanes
            .barrier
            .lanes(|lanes| (lanes.open().collect::<Vec<_>>(), lanes.repeat()));
        self.lanes.acks_due = None;
        for lane in open {
            self.send_resumable(&Message::LaneUp { lane })?;
        }
        self.send_acks(&sets, &reached)
    }

    /// Sends acknowledgements, in as many messages as necessary.
    pub(super) fn send_acks(&self, sets: &[ChunkSet], reached: &[Reached]) -> Result<(), Fault> {
        let mut sets = sets.chunks(MAX_ACK_SETS);
        let mut reached = reached.chunks(usize::from(MAX_LANES));
        loop {
            let (sets, reached) = (sets.next(), reached.next());
            if sets.is_none() && reached.is_none() {
                return Ok(());
            }
            self.send_resumable(&Message::Ack {
                sets: sets.unwrap_or_default().to_vec(),
                reached: reached.unwrap_or_default().to_vec(),
            })?;
        }
    }
}
