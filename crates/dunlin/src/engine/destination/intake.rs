//! Taking in lanes, acknowledging what they bring, and collecting the state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::{Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Fence, LaneRefusal, Receiving};
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::negotiate::{LaneOpen, LaneSecurity, Offer, Opening, Selection};
use dunlin_sys::socket::{Liveness, set_liveness};

use super::super::control::FromPeer;
use super::super::error::Fault;
use super::super::vmm::Section;
use super::lane::Lane;
use super::session::{Session, starved, unexpected};
use super::{DestinationEvent, SessionEvent};
use crate::lane::accept::{Arrival, LaneSocket};
use crate::lane::data::{DataReceiver, PlainConsent, STALL_LIMIT};
use crate::lane::proof::is_proved;

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
        let (Some(gate), Some(landing), Some(selection), Some(offer)) =
            (&self.shared, &self.landing, &self.selection, &self.offer)
        else {
            return Ok(());
        };
        let (gate, landing) = (Arc::clone(gate), Arc::clone(landing));
        let Opening::Lane(open) = opening else {
            return Ok(());
        };
        let number = open.lane;
        if let Err((fault, text)) = self.check_lane(offer, selection, &socket, open) {
            self.reject(format!("lane {number}: {text}"));
            if !is_proved(&self.secret, open) {
                // Whoever this is, it is not the source: nothing is told.
                return Ok(());
            }
            return self.say(&Message::LaneRefused {
                lane: number,
                fault,
                text,
            });
        }
        // A lane may be silent for long, while the guest dirties nothing; the
        // kernel finds out whether its peer is still there.
        if let Err(error) = set_liveness(socket.stream(), &Liveness::default()) {
            self.reject(format!("lane {number}: {error}"));
        }
        let receiver = match socket {
            LaneSocket::Tls(secured) => DataReceiver::tls(*secured, STALL_LIMIT),
            // It came by an SA of this peer's, or it would have been refused.
            LaneSocket::Plain(stream) if selection.security == LaneSecurity::Ipsec => {
                DataReceiver::plain(stream, PlainConsent::sealed_below(), STALL_LIMIT)
            }
            LaneSocket::Plain(stream) => {
                let theirs = selection.security == LaneSecurity::Plain;
                let Some(consent) = PlainConsent::both(self.options.allow_plain, theirs) else {
                    return Ok(());
                };
                DataReceiver::plain(stream, consent, STALL_LIMIT)
            }
        };
        let receiver = match receiver {
            Ok(receiver) => receiver,
            Err(error) => {
                self.reject(format!("lane {number}: {error}"));
                return self.say(&Message::LaneRefused {
                    lane: number,
                    fault: FaultCode::LaneLost,
                    text: error.to_string(),
                });
            }
        };
        let canceller = receiver.canceller();
        if let Err(refusal) = gate.admit(number, Box::new(move || canceller.shutdown())) {
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
            landing,
            gate,
            events: self.sender.clone(),
        };
        let thread = self
            .host
            .spawn(
                format!("dunlin-lane-{number}"),
                Box::new(move || lane.run()),
            )
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "no thread can be had").because(error)
            })?;
        self.lane_threads.insert(number, thread);
        (self.observer)(&DestinationEvent::LaneUp { lane: number });
        self.say(&Message::LaneUp { lane: number })
    }

    pub(super) fn check_lane(
        &self,
        offer: &Offer,
        selection: &Selection,
        socket: &LaneSocket,
        open: &LaneOpen,
    ) -> Result<(), (FaultCode, String)> {
        if open.session != offer.session {
            let text = "it is of another session".to_owned();
            return Err((FaultCode::UnknownSession, text));
        }
        if !is_proved(&self.secret, open) {
            let text = "it does not know the session's secret".to_owned();
            return Err((FaultCode::WrongSecret, text));
        }
        match (socket, selection.security) {
            (LaneSocket::Tls(secured), LaneSecurity::Tls) => {
                if !self.is_with(&secured.peer) {
                    let text = "it is not from the peer of this session";
                    return Err((FaultCode::WrongIdentity, text.to_owned()));
                }
            }
            (LaneSocket::Plain(_), LaneSecurity::Plain) => {}
            (LaneSocket::Plain(stream), LaneSecurity::Ipsec) => {
                let Some(shelter) = &self.options.ipsec else {
                    let text = "this side is not prepared for lanes over IPsec".to_owned();
                    return Err((FaultCode::SecurityNotAgreed, text));
                };
                let covered = shelter.covers_if(|peer| self.is_with(peer), stream);
                covered.map_err(|error| (FaultCode::SecurityNotAgreed, error.to_string()))?;
            }
            _ => {
                let text = format!("{} lanes were agreed", selection.security);
                return Err((FaultCode::SecurityNotAgreed, text));
            }
        }
        if open.version != selection.version {
            let text = format!("it speaks version {}", open.version);
            return Err((FaultCode::VersionMismatch, text));
        }
        Ok(())
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
