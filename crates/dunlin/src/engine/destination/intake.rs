//! Taking in lanes, acknowledging what they bring, and collecting the state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::{Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Fence, LaneRefusal, Receiving};
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::negotiate::{LaneOpen, Offer, Opening, Selection};

use super::super::control::FromPeer;
use super::super::fault::Fault;
use super::super::vmm::Section;
use super::lane::Lane;
use super::session::{Session, starved, unexpected};
use super::{DestinationEvent, SessionEvent};
use crate::lane::accept::{Arrival, LaneSocket};
use crate::lane::data::DataReceiver;
use crate::lane::peers::PeerIdentity;
use crate::lane::proof::is_proved;
use crate::lane::security::admit;

/// Acknowledgements are collected for this long: some hundred messages a
/// second at most, and far below a round trip's worth of delay.
const ACK_DELAY: Duration = Duration::from_millis(3);

impl Session<'_> {
    /// Takes in lanes, memory and state until everything that *final* counts
    /// has come.
    pub(super) fn await_everything(&mut self) -> Result<(), Fault> {
        self.progressed = Instant::now();
        while !self.is_complete()? {
            let idle = self.idle_until();
            let event = self.next_event(Some(self.acks_due.map_or(idle, |due| due.min(idle))))?;
            self.progress(event.as_ref())?;
            match event {
                Some(SessionEvent::Arrived(arrival)) => match *arrival {
                    Arrival::Lane { socket, opening } => self.admit(socket, &opening)?,
                    // Without a lane there will never be one, and the source
                    // cannot know why.
                    Arrival::Starved(error)
                        if self.lane_threads.is_empty() && self.wire_bytes == 0 =>
                    {
                        return Err(starved(error));
                    }
                    other => self.turn_away(other, "a session is under way"),
                },
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => match message {
                    Message::Section(section) => self.keep(section)?,
                    Message::Final(last) => self.finish(last)?,
                    other => return Err(unexpected(&other)),
                },
                Some(SessionEvent::Acks) => {
                    self.acks_due.get_or_insert(Instant::now() + ACK_DELAY);
                }
                Some(_) => {}
                None => {}
            }
            if self.acks_due.is_some_and(|due| due <= Instant::now()) {
                self.acknowledge()?;
            }
        }
        self.acknowledge()
    }

    /// Whether every lane is joined and everything has come (I4).
    fn is_complete(&mut self) -> Result<bool, Fault> {
        let (Some(shared), true) = (&self.shared, self.lane_threads.is_empty()) else {
            return Ok(false);
        };
        shared.lanes(Receiving::is_complete).map_err(|error| {
            Fault::new(FaultCode::Malformed, "not everything has come").because(error)
        })
    }

    fn finish(&mut self, last: Final) -> Result<(), Fault> {
        let came = self.sections.len();
        if last.sections as usize != came {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!(
                    "{came} sections came where the source counts {}",
                    last.sections
                ),
            ));
        }
        if let Some(shared) = &self.shared {
            shared.lanes(|lanes| lanes.finish(last));
        }
        Ok(())
    }

    /// The source wants to be sure that a lane writes nothing more.
    pub(super) fn fence(&mut self, lane: u16) -> Result<(), Fault> {
        let Some(shared) = &self.shared else {
            let what = "the source fences a lane before there are any";
            return Err(Fault::new(FaultCode::Malformed, what));
        };
        match shared.lanes(|lanes| lanes.fence(lane)) {
            // Its thread's end brings the answer.
            Fence::Close => shared.cut(lane),
            Fence::Answer => self.tell_fenced(lane)?,
        }
        Ok(())
    }

    /// A lane's thread is over.
    pub(super) fn lane_ended(&mut self, lane: u16, result: Result<(), Fault>) -> Result<(), Fault> {
        if let Some(thread) = self.lane_threads.remove(&lane)
            && thread.join().is_err()
        {
            return Err(Fault::new(FaultCode::Internal, "a lane's thread panicked"));
        }
        let fault = result.err();
        let Some(shared) = &self.shared else {
            return fault.map_or(Ok(()), Err);
        };
        // A lane that is lost can be replaced; whatever else was wrong would
        // be wrong on the next one too.
        match fault {
            Some(fault) if fault.code != FaultCode::LaneLost => return Err(fault),
            fault => {
                if shared.lanes(|lanes| lanes.gone(lane)) {
                    let why = fault.map_or_else(String::new, |fault| fault.for_peer());
                    (self.observer)(&DestinationEvent::LaneLost { lane, why });
                    self.tell_fenced(lane)?;
                }
            }
        }
        Ok(())
    }

    /// The lane's last acknowledgements, and that nothing more will come.
    fn tell_fenced(&mut self, lane: u16) -> Result<(), Fault> {
        self.acknowledge()?;
        self.say(&Message::Fenced {
            lane,
            acks: Vec::new(),
        })
    }

    /// Lets a lane in, if it proves that it belongs here.
    pub(super) fn admit(&mut self, socket: LaneSocket, opening: &Opening) -> Result<(), Fault> {
        let (Some(barrier), Some(memory_at_destination), Some(selection), Some(offer)) = (
            &self.shared,
            &self.memory_at_destination,
            &self.selection,
            &self.offer,
        ) else {
            return Ok(());
        };
        let (barrier, memory_at_destination) =
            (Arc::clone(barrier), Arc::clone(memory_at_destination));
        let Opening::Lane(open) = opening else {
            return Ok(());
        };
        let number = open.lane;
        let receiver = match self.check_lane(offer, selection, socket, open) {
            Ok(receiver) => receiver,
            Err((fault, text)) => {
                self.reject(format!("lane {number}: {text}"));
                if !is_proved(&self.secret, open) {
                    // Not the source of this session: close without an answer.
                    return Ok(());
                }
                return self.say(&Message::LaneRefused {
                    lane: number,
                    fault,
                    text,
                });
            }
        };
        let canceller = receiver.canceller();
        if let Err(refusal) = barrier.admit(number, Box::new(move || canceller.shutdown())) {
            self.reject(format!("lane {number}: {refusal}"));
            return self.say(&Message::LaneRefused {
                lane: number,
                fault: match refusal {
                    LaneRefusal::Limit { .. } => FaultCode::LaneLimit,
                    LaneRefusal::Used { .. } | LaneRefusal::Complete => FaultCode::DuplicateLane,
                },
                text: refusal.to_string(),
            });
        }
        let lane = Lane {
            number,
            receiver,
            memory_at_destination,
            barrier,
            events: self.sender.clone(),
        };
        let thread = self
            .host
            .spawn(
                format!("dunlin-lane-{number}"),
                Box::new(move || lane.run()),
            )
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "cannot start a thread").because(error)
            })?;
        self.lane_threads.insert(number, thread);
        (self.observer)(&DestinationEvent::LaneUp { lane: number });
        self.say(&Message::LaneUp { lane: number })
    }

    fn check_lane(
        &self,
        offer: &Offer,
        selection: &Selection,
        socket: LaneSocket,
        open: &LaneOpen,
    ) -> Result<DataReceiver, (FaultCode, String)> {
        if open.session != offer.session {
            let text = "it is of another session".to_owned();
            return Err((FaultCode::UnknownSession, text));
        }
        if !is_proved(&self.secret, open) {
            let text = "it does not know the session's secret".to_owned();
            return Err((FaultCode::WrongSecret, text));
        }
        let (plain, sealed) = (self.options.allow_plain, self.options.ipsec.as_ref());
        let is_peer = |peer: &PeerIdentity| self.is_with(peer);
        let receiver = admit(selection.security, plain, sealed, socket, &is_peer);
        let receiver = receiver.map_err(|error| (error.fault(), error.to_string()))?;
        if open.version != selection.version {
            let text = format!("it speaks version {}", open.version);
            return Err((FaultCode::VersionMismatch, text));
        }
        Ok(receiver)
    }

    pub(super) fn keep(&mut self, section: dunlin_proto::control::Section) -> Result<(), Fault> {
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

    /// Every lane's thread is joined before memory goes or is used (I4).
    pub(super) fn join_lanes(&mut self) -> Result<(), Fault> {
        for thread in std::mem::take(&mut self.lane_threads).into_values() {
            if thread.join().is_err() {
                return Err(Fault::new(FaultCode::Internal, "a lane's thread panicked"));
            }
        }
        Ok(())
    }

    /// Sends the acknowledgements that have gathered.
    pub(super) fn acknowledge(&mut self) -> Result<(), Fault> {
        self.acks_due = None;
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let (sets, reached) = shared.lanes(Receiving::take_reports);
        self.send_acks(&sets, &reached)
    }
}
