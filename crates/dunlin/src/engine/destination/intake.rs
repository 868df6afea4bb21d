//! Taking in lanes, acknowledging what they bring, and collecting the state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::{ChunkSet, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_ACK_SETS, MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::negotiate::{LaneOpen, LaneSecurity, Opening, Selection};
use dunlin_sys::socket::{Liveness, set_liveness};

use super::super::control::{ControlLane, FromPeer};
use super::super::error::Fault;
use super::super::proof::is_proved;
use super::super::vmm::Section;
use super::lane::Lane;
use super::session::{Session, unexpected};
use super::{DestinationEvent, SessionEvent};
use crate::lane::accept::{Arrival, LaneSocket};
use crate::lane::data::{DataReceiver, PlainConsent, STALL_LIMIT};

/// Acknowledgements are collected for this long: some hundred messages a
/// second at most, and far below a round trip's worth of delay.
const ACK_DELAY: Duration = Duration::from_millis(3);
/// How long to look for the source's reason after a lane was cut.
const REASON_WAIT: Duration = Duration::from_millis(200);

impl Session<'_> {
    /// Takes in lanes, memory and state until *final* has come and every lane
    /// has ended.
    pub(super) fn await_everything(&mut self, control: &ControlLane) -> Result<(), Fault> {
        loop {
            if self.last.is_some() && self.lanes_running == 0 {
                return self.check_complete();
            }
            let due = self.acks_due;
            match self.next_event(due)? {
                Some(SessionEvent::Arrived(arrival)) => match *arrival {
                    Arrival::Lane { socket, opening } => self.admit(control, socket, &opening)?,
                    other => self.turn_away(other, "a session is under way"),
                },
                Some(SessionEvent::Control(FromPeer::Message(message))) => match message {
                    Message::Section(section) => self.keep(section)?,
                    Message::Final(last) if self.last.is_none() => self.last = Some(last),
                    other => return Err(unexpected(&other)),
                },
                Some(SessionEvent::LaneEnded { result, .. }) => {
                    let totals = match result {
                        Ok(totals) => totals,
                        Err(fault) => return Err(self.reason_of_peer(fault)),
                    };
                    self.totals.chunks += totals.chunks;
                    self.totals.pages += totals.pages;
                    self.totals.wire_bytes += totals.wire_bytes;
                }
                Some(SessionEvent::Acks) => {
                    self.acks_due.get_or_insert(Instant::now() + ACK_DELAY);
                }
                Some(_) => {}
                None => self.acknowledge()?,
            }
        }
    }

    /// Why a lane was cut, if the source says so within a moment: a source
    /// that gives up tells its reason and cuts its lanes, and the two come on
    /// different connections.
    pub(super) fn reason_of_peer(&mut self, fault: Fault) -> Fault {
        if fault.code != FaultCode::LaneLost {
            return fault;
        }
        let until = Instant::now() + REASON_WAIT;
        while Instant::now() < until {
            match self.receive(Some(until)) {
                Ok(SessionEvent::Control(FromPeer::Message(Message::Cancel { fault, text }))) => {
                    return Fault::told(fault, text);
                }
                Ok(SessionEvent::LaneEnded { cpu, .. }) => {
                    self.lanes_running -= 1;
                    self.add_cpu(cpu);
                }
                // Its last words would have come before its end.
                Ok(SessionEvent::Control(FromPeer::Lost(lost))) => return lost,
                Err(_) => break,
                Ok(_) => {}
            }
        }
        fault
    }

    /// Lets a lane in, if it proves that it belongs here.
    pub(super) fn admit(
        &mut self,
        control: &ControlLane,
        socket: LaneSocket,
        opening: &Opening,
    ) -> Result<(), Fault> {
        let (Some(shared), Some(selection)) = (&self.shared, &self.selection) else {
            return Ok(());
        };
        let shared = Arc::clone(shared);
        let Opening::Lane(open) = opening else {
            return Ok(());
        };
        let number = open.lane;
        if let Err((fault, text)) = self.check_lane(control, selection, &socket, open) {
            self.reject(format!("lane {number}: {text}"));
            if !is_proved(&self.secret, open) {
                // Whoever this is, it is not the source: nothing is told.
                return Ok(());
            }
            return self.send(&Message::LaneRefused {
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
            LaneSocket::Plain(stream) => {
                let theirs = selection.security == LaneSecurity::Plain;
                let Some(consent) = PlainConsent::both(self.options.allow_plain, theirs) else {
                    return Ok(());
                };
                DataReceiver::plain(stream, consent, STALL_LIMIT)
            }
        };
        let receiver = receiver.map_err(|error| {
            Fault::new(FaultCode::LaneLost, format!("lane {number} was lost")).because(error)
        })?;
        shared.open(number, receiver.canceller());
        let lane = Lane {
            number,
            receiver,
            shared,
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
        self.lane_threads.push(thread);
        self.lanes_seen.push(number);
        self.lanes_running += 1;
        (self.observer)(&DestinationEvent::LaneUp { lane: number });
        self.send(&Message::LaneUp { lane: number })
    }

    pub(super) fn check_lane(
        &self,
        control: &ControlLane,
        selection: &Selection,
        socket: &LaneSocket,
        open: &LaneOpen,
    ) -> Result<(), (FaultCode, String)> {
        if open.session != control.session() {
            let text = "it is of another session".to_owned();
            return Err((FaultCode::UnknownSession, text));
        }
        if !is_proved(&self.secret, open) {
            let text = "it does not know the session's secret".to_owned();
            return Err((FaultCode::WrongSecret, text));
        }
        match (socket, selection.security) {
            (LaneSocket::Tls(secured), LaneSecurity::Tls) => {
                if !secured.peer.same_certificate(control.stream().peer()) {
                    let text = "its peer has another certificate than the control lane's";
                    return Err((FaultCode::WrongIdentity, text.to_owned()));
                }
            }
            (LaneSocket::Plain(_), LaneSecurity::Plain) => {}
            _ => {
                let text = format!("{} lanes were agreed", selection.security);
                return Err((FaultCode::SecurityNotAgreed, text));
            }
        }
        if open.version != selection.version {
            let text = format!("it speaks version {}", open.version);
            return Err((FaultCode::VersionMismatch, text));
        }
        if self.lanes_seen.contains(&open.lane) {
            let text = "its number has been used before".to_owned();
            return Err((FaultCode::DuplicateLane, text));
        }
        if self.lanes_running >= usize::from(self.options.lanes_max) {
            let text = format!("{} lanes are open already", self.lanes_running);
            return Err((FaultCode::LaneLimit, text));
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

    /// Everything that *final* counts must have come.
    pub(super) fn check_complete(&mut self) -> Result<(), Fault> {
        self.acknowledge()?;
        self.join_lanes()?;
        let Some(last) = &self.last else {
            return Err(Fault::new(FaultCode::Internal, "nothing is final"));
        };
        let came = (self.totals.chunks, self.totals.pages, self.sections.len());
        let wanted = (last.chunks, last.pages, last.sections as usize);
        if came != wanted {
            return Err(Fault::new(
                FaultCode::Malformed,
                format!(
                    "{} chunks, {} pages and {} sections came where the source counts {}, {} and {}",
                    came.0, came.1, came.2, wanted.0, wanted.1, wanted.2
                ),
            ));
        }
        Ok(())
    }

    /// Every lane's thread is joined before *ready* (I4).
    pub(super) fn join_lanes(&mut self) -> Result<(), Fault> {
        for thread in self.lane_threads.drain(..) {
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
        shared.take_acks(&mut self.acks);
        let sets = sets_of(&mut self.acks);
        for sets in sets.chunks(MAX_ACK_SETS) {
            self.send(&Message::Ack {
                sets: sets.to_vec(),
                reached: Vec::new(),
            })?;
        }
        Ok(())
    }
}

/// Chunk numbers as sets, in ascending order.
fn sets_of(numbers: &mut [u64]) -> Vec<ChunkSet> {
    numbers.sort_unstable();
    let mut sets: Vec<ChunkSet> = Vec::new();
    for &mut number in numbers {
        match sets.last_mut() {
            Some(last) if last.first + u64::from(last.count) == number && last.count < u32::MAX => {
                last.count += 1;
            }
            _ => sets.push(ChunkSet {
                first: number,
                count: 1,
            }),
        }
    }
    sets
}
