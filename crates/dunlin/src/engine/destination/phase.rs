//! What the switchover's state machine decides is done here, and events that are the same in
//! every phase are handled.
//!
//! [`Destination`] says what follows from an event. A phase does what it can of that, in order,
//! until nothing more follows by itself.

use std::time::Instant;

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::Opening;
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::FromPeer;
use super::super::fault::{Fault, OrFault};
use super::arriving::{Arriving, Link, Reached};
use super::event::SessionEvent;
use super::received::DestinationEvent;
use crate::lane::accept::Arrival;

/// A phase in which a VM comes in.
pub(super) trait Phase<'a> {
    fn arriving(&mut self) -> &mut Arriving<'a>;

    /// Does one action; returns the event that it ends with, if it is one that does.
    fn act(&mut self, action: Do) -> Option<On>;
}

/// Takes an event and does what follows.
///
/// # Errors
/// The state cannot take the event: the peer broke the protocol.
pub(super) fn take<'a>(phase: &mut impl Phase<'a>, event: On) -> Result<(), Fault> {
    let attempt = &mut phase.arriving().attempt;
    let (state, actions) = attempt.state.on(event).or_fault(
        FaultCode::Malformed,
        "the peer broke the order of the switchover",
    )?;
    attempt.state = state;
    if let Destination::Acquiring { run } = state {
        attempt.reached = Reached::Committed { run };
    }
    perform(phase, actions)
}

/// Begins the attempt: records *prepared* and accepts the VM.
pub(super) fn begin<'a>(phase: &mut impl Phase<'a>) -> Result<(), Fault> {
    let (state, actions) = Destination::begin();
    phase.arriving().attempt.state = state;
    perform(phase, actions)
}

fn perform<'a>(phase: &mut impl Phase<'a>, actions: &[Do]) -> Result<(), Fault> {
    for action in actions {
        let event = match action {
            Do::Drain => {
                drain(phase)?;
                Some(On::Drained)
            }
            action => phase.act(*action),
        };
        // The action is the last of its list, if an event follows it.
        if let Some(event) = event {
            take(phase, event)?;
        }
    }
    Ok(())
}

/// Takes what the reader of the old control lane had read.
fn drain<'a>(phase: &mut impl Phase<'a>) -> Result<(), Fault> {
    for message in std::mem::take(&mut phase.arriving().drained) {
        match message {
            FromPeer::Message(Message::Commit { run }) => take(phase, On::Commit { run })?,
            FromPeer::Message(Message::Cancel { .. }) => take(phase, On::PeerCancelled)?,
            // Nothing else decides anything.
            FromPeer::Message(_) | FromPeer::Lost(_) => {}
        }
    }
    Ok(())
}

/// Something failed, here or at the peer: does what follows from that.
pub(super) fn failed<'a>(phase: &mut impl Phase<'a>, fault: Fault) {
    let attempt = &mut phase.arriving().attempt;
    let event = match fault.code {
        _ if fault.told && attempt.state.may_cancel() => {
            // It goes on there, and will not ask.
            attempt.source_keeps = true;
            On::PeerCancelled
        }
        FaultCode::ControlLost if !fault.told => On::ControlLost,
        FaultCode::Cancelled if attempt.state.may_cancel() => On::Cancelled,
        _ => On::Failed,
    };
    attempt.fault = Some(fault);
    if let Err(impossible) = take(phase, event) {
        // Every state that waits for something takes a failure.
        let text = format!("a failure could not be taken: {}", impossible.for_peer());
        phase.arriving().session.warn(text);
    }
}

/// Waits for an event, and handles what is the same in every phase. `None` at `until`.
pub(super) fn next_event<'a>(
    phase: &mut impl Phase<'a>,
    until: Instant,
) -> Result<Option<SessionEvent>, Fault> {
    let arriving = phase.arriving();
    let until = match &arriving.link {
        Link::Up => until,
        Link::Lost(at, _) => until.min(*at),
    };
    let received = arriving
        .session
        .receive(Some(&arriving.control), Some(until))?;
    let Some(event) = received else {
        return match std::mem::replace(&mut arriving.link, Link::Up) {
            Link::Lost(at, fault) if at <= Instant::now() => Err(fault),
            link => {
                arriving.link = link;
                Ok(None)
            }
        };
    };
    match event {
        SessionEvent::Control(_, FromPeer::Lost(fault)) => arriving.control_lost(fault)?,
        SessionEvent::Control(_, FromPeer::Message(message)) => match message {
            Message::Cancel { fault, text } => return Err(Fault::told(fault, text)),
            Message::Inquire { attempt } => inquired(phase, attempt)?,
            Message::Fence { lane } => arriving.fence(lane)?,
            message => {
                let epoch = arriving.control.lane.epoch();
                let message = FromPeer::Message(message);
                return Ok(Some(SessionEvent::Control(epoch, message)));
            }
        },
        SessionEvent::Arrived(arrival) => match *arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } if offer.session == arriving.control.offer.session => {
                arriving.resume_control(stream, offer)?;
            }
            other => {
                if let Some(other) = arriving.session.answer_inquiry(other) {
                    arriving.give_way(&other)?;
                    return Ok(Some(SessionEvent::Arrived(Box::new(other))));
                }
            }
        },
        SessionEvent::Cancelled if arriving.attempt.state.may_cancel() => {
            return Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"));
        }
        SessionEvent::LaneEnded {
            lane,
            result,
            wire_bytes,
            cpu,
        } => {
            arriving.session.cpu.add(cpu);
            arriving.lanes.wire_bytes += wire_bytes;
            arriving.lane_ended(lane, result)?;
        }
        event => return Ok(Some(event)),
    }
    Ok(Some(SessionEvent::Tended))
}

/// The source asks, on the newest control lane.
fn inquired<'a>(phase: &mut impl Phase<'a>, attempt: u32) -> Result<(), Fault> {
    let arriving = phase.arriving();
    if arriving.control.offer.attempt != attempt {
        let what = "the source asks about another attempt than it offered";
        return Err(Fault::new(FaultCode::Malformed, what));
    }
    arriving.asked = true;
    if arriving.attempt.state.may_cancel() {
        let what = "the source lost the control lane and asks what became of its commit";
        arriving.attempt.fault = Some(Fault::new(FaultCode::ControlLost, what));
    }
    take(phase, On::Inquired)
}

impl Arriving<'_> {
    /// Takes what came, or did not, for progress or a standstill.
    pub(super) fn progress(&mut self, came: Option<&SessionEvent>) -> Result<(), Fault> {
        match came {
            Some(SessionEvent::Control(_, FromPeer::Message(_)) | SessionEvent::Acks) => {
                self.progressed = Instant::now();
            }
            _ if self.idle_until() <= Instant::now() => {
                return Err(Fault::new(
                    FaultCode::Standstill,
                    format!(
                        "the source is there, and has sent neither pages nor anything else for {:?}",
                        self.session.options.idle_limit
                    ),
                ));
            }
            _ => {}
        }
        Ok(())
    }

    /// The newest control lane has ended.
    fn control_lost(&mut self, fault: Fault) -> Result<(), Fault> {
        if fault.code != FaultCode::ControlLost || !self.is_resumable() {
            return Err(fault);
        }
        (self.session.observer)(&DestinationEvent::ControlLost {
            why: fault.for_peer(),
        });
        self.link = Link::Lost(Instant::now() + self.session.options.control_limit, fault);
        Ok(())
    }
}
