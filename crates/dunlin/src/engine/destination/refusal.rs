//! Refuses offers and connections.

use dunlin_lane::accept::Arrival;
use dunlin_lane::control::ControlStream;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Opening, Refusal, VERSIONS};

use super::super::fault::Fault;
use super::super::journal::names_of;

/// Answers an unacceptable offer with `refusal`, and closes the connection. The refusal is this
/// side's first message there, so it fits the socket buffer, and the send does not block.
pub(super) fn refuse(stream: &ControlStream, refusal: &Refusal) {
    let mut bytes = Vec::new();
    let opening = Opening::Refuse(VERSIONS, refusal.clone());
    if opening.encode(&mut bytes).is_ok() {
        // A peer that has disconnected needs no refusal.
        let _ = stream.send(&bytes).and_then(|()| stream.close());
    }
}

/// Closes an arriving connection that is not accepted. If it is a control lane, first answers its
/// offer with a refusal, *busy*. Returns the text for the log, with the reason `why`.
pub(super) fn turn_away(arrival: Arrival, why: &str) -> String {
    match arrival {
        Arrival::Rejected { from, reason } => format!("{from}: {reason}"),
        Arrival::Control { stream, .. } => {
            let reason = format!("control lane from {}: {why}", peer_of(&stream));
            let (fault, text) = (FaultCode::Busy, "another VM is being received".into());
            refuse(&stream, &Refusal { fault, text });
            reason
        }
        Arrival::Lane { .. } => format!("data lane: {why}"),
        Arrival::Starved(error) => starved(error).for_peer(),
    }
}

/// The fault for a connection that waits but cannot be accepted.
pub(super) fn starved(error: std::io::Error) -> Fault {
    let what = "a connection is waiting but cannot be accepted: raise this process's limit of open \
     files (`ulimit -n`), or free memory";
    Fault::new(FaultCode::Kernel, what).because(error)
}

pub(super) fn peer_of(stream: &ControlStream) -> String {
    names_of(stream.peer())
}
