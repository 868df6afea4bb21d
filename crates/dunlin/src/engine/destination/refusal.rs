//! Refusing what cannot be taken in.

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Refusal, VERSIONS};

use super::super::fault::Fault;
use super::super::journal::names_of;
use crate::lane::control::ControlStream;

/// Answers an offer that cannot be met, and closes. It is the first thing on
/// its connection, so that it fits the socket's buffer and nothing waits.
pub(super) fn refuse(stream: &ControlStream, refusal: &Refusal) {
    let mut bytes = Vec::new();
    if refusal.encode(VERSIONS, &mut bytes).is_ok() {
        // A peer that has gone needs no refusal.
        let _ = stream.send(&bytes).and_then(|()| stream.close());
    }
}

/// A connection waits to be accepted and cannot be.
pub(super) fn starved(error: std::io::Error) -> Fault {
    let what = "a connection waits here and cannot be accepted: raise this process's limit of \
                open files (`ulimit -n`)";
    Fault::new(FaultCode::Kernel, what).because(error)
}

pub(super) fn peer_of(stream: &ControlStream) -> String {
    names_of(stream.peer())
}

pub(super) fn unexpected(message: &Message) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        format!("the source sent {} out of turn", message.kind().name()),
    )
}
