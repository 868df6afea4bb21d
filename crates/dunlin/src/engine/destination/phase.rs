//! Executes the decisions of the switchover's state machine, and handles the events
//! that all phases treat alike.
//!
//! [`Destination`] returns the actions that follow from an event. A phase executes them in
//! order and feeds resulting events back, until no events remain.

use std::time::Instant;

use dunlin_lane::accept::Arrival;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::Opening;
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::FromPeer;
use super::super::fault::{Fault, OrFault};
use super::super::journal::Role;
use super::arriving::{Arriving, Link, Reached};
use super::event::SessionEvent;
use super::received::DestinationEvent;

/// A phase in which a VM arrives.
pub(super) trait Phase<'a> {
    fn arriving(&mut self) -> &mut Arriving<'a>;

    /// Executes one action; returns the resulting event, if any.
    fn act(&mut self, action: Do) -> Option<On> {
        self.arriving().act(action)
    }
}

/// Applies an event and executes the actions that follow.
///
/// # Errors
/// The state does not accept the event: the peer violated the protocol.
pub(super) fn take<'a>(phase: &mut impl Phase<'a>, event: On) -> Result<(), Fault> {
    let attempt = &mut phase.arriving().attempt;
    let (state, actions) = attempt.state.on(event).or_fault(
        FaultCode::Malformed,
        "the source violated the order of the switchover",
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
        // An action that results in an event is the last action in `actions`.
        if let Some(event) = event {
            take(phase, event)?;
        }
    }
    Ok(())
}

/// Applies the messages that the reader of the old control lane had read before that lane ended.
fn drain<'a>(phase: &mut impl Phase<'a>) -> Result<(), Fault> {
    for message in std::mem::take(&mut phase.arriving().drained) {
        match message {
            FromPeer::Message(Message::Commit { run }) => take(phase, On::Commit { run })?,
            FromPeer::Message(Message::Cancel { .. }) => take(phase, On::PeerCancelled)?,
            // No other message affects the decision.
            FromPeer::Message(_) | FromPeer::Lost(_) => {}
        }
    }
    Ok(())
}

/// Applies a failure of this side or the peer, and executes the actions that follow.
pub(super) fn failed<'a>(phase: &mut impl Phase<'a>, fault: Fault) {
    let attempt = &mut phase.arriving().attempt;
    let event = match fault.code {
        _ if fault.from_peer && attempt.state.may_cancel() => {
            // The source keeps the VM and will not ask for the outcome.
            attempt.source_keeps = true;
            On::PeerCancelled
        }
        FaultCode::ControlLost if !fault.from_peer => On::ControlLost,
        FaultCode::Cancelled if attempt.state.may_cancel() => On::Cancelled,
        _ => On::Failed,
    };
    attempt.fault = Some(fault);
    if let Err(impossible) = take(phase, event) {
        // This is a bug, because every state that waits accepts a failure.
        let text = format!(
            "the state machine has no transition for this failure: {}",
            impossible.for_peer()
        );
        phase.arriving().session.warn(text);
    }
}

/// Waits for an event, and handles those that all phases treat alike. Returns
/// [`SessionEvent::Tended`] after such an event, and `None` at `until`.
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
            Message::Cancel { fault, text } => {
                return Err(Fault::from_peer(Role::Source, fault, &text));
            }
            Message::Inquire { attempt } => inquired(phase, attempt)?,
            Message::Fence { lane } => arriving.fence(lane)?,
            message => {
                let epoch = arriving.control.lane.epoch;
                let message = FromPeer::Message(message);
                return Ok(Some(SessionEvent::Control(epoch, message)));
            }
        },
        SessionEvent::Arrived(arrival) => match *arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } if offer.session == arriving.control.terms.offer.session => {
                arriving.resume_control(stream, offer)?;
            }
            other => {
                if let Some(other) = arriving.session.answer_inquiry(other) {
                    if let Arrival::Control { stream, .. } = &other {
                        arriving.give_way(stream.peer())?;
                    }
                    return Ok(Some(SessionEvent::Arrived(Box::new(other))));
                }
            }
        },
        SessionEvent::OfferedAgain(peer) => arriving.give_way(&peer)?,
        SessionEvent::Cancelled if arriving.attempt.state.may_cancel() => {
            return Err(Fault::cancelled());
        }
        SessionEvent::LaneEnded {
            lane,
            result,
            wire_bytes,
        } => {
            arriving.lanes.wire_bytes += wire_bytes;
            arriving.lane_ended(lane, result)?;
        }
        event => return Ok(Some(event)),
    }
    Ok(Some(SessionEvent::Tended))
}

/// Handles an inquiry on the newest control lane.
fn inquired<'a>(phase: &mut impl Phase<'a>, attempt: u32) -> Result<(), Fault> {
    let arriving = phase.arriving();
    if arriving.control.terms.offer.attempt != attempt {
        let what = "the source asked about a different attempt than it offered";
        return Err(Fault::new(FaultCode::Malformed, what));
    }
    arriving.asked = true;
    if arriving.attempt.state.may_cancel() {
        let what = "the source lost the control lane and asks for the outcome of its commit";
        arriving.attempt.fault = Some(Fault::new(FaultCode::ControlLost, what));
    }
    take(phase, On::Inquired)
}

impl Arriving<'_> {
    /// If `event` shows that the source makes progress, notes that. Otherwise fails if the source
    /// has made no progress for too long.
    pub(super) fn progress(&mut self, event: Option<&SessionEvent>) -> Result<(), Fault> {
        match event {
            Some(SessionEvent::Control(_, FromPeer::Message(_)) | SessionEvent::Acks) => {
                self.progressed = Instant::now();
            }
            _ if self.idle_until() <= Instant::now() => {
                return Err(Fault::new(
                    FaultCode::Standstill,
                    format!(
                        "the source answers pings but has sent no new pages or messages for {:?}",
                        self.session.options.idle_limit
                    ),
                ));
            }
            _ => {}
        }
        Ok(())
    }

    /// Handles the end of the newest control lane.
    fn control_lost(&mut self, fault: Fault) -> Result<(), Fault> {
        if fault.code != FaultCode::ControlLost || !self.is_resumable() {
            return Err(fault);
        }
        self.session.notify(DestinationEvent::ControlLost {
            why: fault.for_peer(),
        });
        self.link = Link::Lost(Instant::now() + self.session.options.control_limit, fault);
        Ok(())
    }
}
