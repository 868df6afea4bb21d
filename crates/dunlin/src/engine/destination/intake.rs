//! Admits lanes, acknowledges what they carry, and fences them.

use std::sync::Arc;

use dunlin_lane::accept::LaneSocket;
use dunlin_lane::data::DataReceiver;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::proof::is_proved;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Fence, LaneRefusal, Receiving};
use dunlin_proto::negotiate::{LaneOpen, Opening};

use super::super::fault::{Fault, OrFault};
use super::super::threads::spawn_counted;
use super::arriving::Arriving;
use super::lane::Lane;
use super::received::DestinationEvent;

impl Arriving<'_> {
    /// Whether every lane's thread is joined and everything has arrived (invariant I4).
    pub(super) fn is_complete(&self) -> Result<bool, Fault> {
        if !self.lanes.threads.is_empty() {
            return Ok(false);
        }
        let complete = self.lanes.barrier.lanes(Receiving::is_complete);
        complete.or_fault(FaultCode::Malformed, "memory or state is missing")
    }

    /// Fences a lane at the source's request: the lane must no longer write.
    pub(super) fn fence(&mut self, lane: u16) -> Result<(), Fault> {
        let barrier = &self.lanes.barrier;
        match barrier.lanes(|lanes| lanes.fence(lane)) {
            // When the lane's thread has ended, the destination reports that the lane is fenced.
            Fence::Close => barrier.cut(lane),
            Fence::Answer => self.send_fenced(lane)?,
        }
        Ok(())
    }

    /// Handles the end of a lane's thread.
    pub(super) fn lane_ended(&mut self, lane: u16, result: Result<(), Fault>) -> Result<(), Fault> {
        if let Some(thread) = self.lanes.threads.remove(&lane)
            && thread.join().is_err()
        {
            return Err(Fault::new(FaultCode::Internal, "a lane thread panicked"));
        }
        // A lost lane can be replaced. Any other failure ends the session, because it would also
        // occur on the replacement.
        match result.err() {
            Some(fault) if fault.code != FaultCode::LaneLost => return Err(fault),
            fault => {
                if self.lanes.barrier.lanes(|lanes| lanes.gone(lane)) {
                    let why = fault.map_or_else(String::new, |fault| fault.for_peer());
                    self.session
                        .notify(DestinationEvent::LaneLost { lane, why });
                    self.send_fenced(lane)?;
                }
            }
        }
        Ok(())
    }

    /// Sends the lane's last acknowledgements, and then the message that the lane is fenced.
    fn send_fenced(&mut self, lane: u16) -> Result<(), Fault> {
        self.acknowledge()?;
        self.send_resumable(&Message::Fenced {
            lane,
            acks: Vec::new(),
        })
    }

    /// Admits a lane that proves that it belongs to the session.
    pub(super) fn admit(&mut self, socket: LaneSocket, opening: &Opening) -> Result<(), Fault> {
        let Opening::Lane(open) = opening else {
            return Ok(());
        };
        let number = open.lane;
        let receiver = match self.check_lane(socket, open) {
            Ok(receiver) => receiver,
            Err((fault, text)) => {
                self.session.reject(format!("lane {number}: {text}"));
                if !is_proved(&self.lanes.secret, open) {
                    // The lane is not from the source of this session. Close it without an answer.
                    return Ok(());
                }
                return self.send_resumable(&Message::LaneRefused {
                    lane: number,
                    fault,
                    text,
                });
            }
        };
        let canceller = receiver.canceller();
        let barrier = Arc::clone(&self.lanes.barrier);
        if let Err(refusal) = barrier.admit(number, Box::new(move || canceller.shutdown())) {
            self.session.reject(format!("lane {number}: {refusal}"));
            return self.send_resumable(&Message::LaneRefused {
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
            memory: Arc::clone(&self.lanes.memory),
            barrier,
            events: self.session.sender.clone(),
            share: self.session.share.clone(),
            span: self.session.span.clone(),
        };
        let name = format!("dunlin-lane-{number}");
        let session = &self.session;
        let body = move || lane.run();
        let thread = spawn_counted(&**session.host, name, &session.cpu, body)?;
        self.lanes.threads.insert(number, thread);
        self.session
            .notify(DestinationEvent::LaneUp { lane: number });
        self.send_resumable(&Message::LaneUp { lane: number })
    }

    fn check_lane(
        &self,
        socket: LaneSocket,
        open: &LaneOpen,
    ) -> Result<DataReceiver, (FaultCode, String)> {
        let (offer, selection) = (&self.control.terms.offer, &self.control.terms.selection);
        if open.session != offer.session {
            let text = "the lane belongs to another session".to_owned();
            return Err((FaultCode::UnknownSession, text));
        }
        if !is_proved(&self.lanes.secret, open) {
            let text = "the lane's proof does not match the session's secret".to_owned();
            return Err((FaultCode::WrongSecret, text));
        }
        let is_peer = |peer: &PeerIdentity| self.is_with(peer);
        let admitted = self.lanes.acceptor.admit(socket, &is_peer);
        let receiver = admitted.map_err(|error| (error.fault(), error.to_string()))?;
        if open.version != selection.version {
            let text = format!(
                "the lane has protocol version {}, but the session has version {}",
                open.version, selection.version
            );
            return Err((FaultCode::VersionMismatch, text));
        }
        Ok(receiver)
    }

    /// Sends the collected acknowledgements.
    pub(super) fn acknowledge(&mut self) -> Result<(), Fault> {
        self.lanes.acks_due = None;
        let (sets, reached) = self.lanes.barrier.lanes(Receiving::take_reports);
        self.send_acks(&sets, &reached)
    }
}
