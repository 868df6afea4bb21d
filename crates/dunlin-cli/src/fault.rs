//! Finds the fault code of an error that a command logs or with which it ends.

use std::error::Error;

use dunlin::engine::journal::{JournalError, Unreadable};
use dunlin::engine::source::ResolveError;
use dunlin::engine::{MigrateError, fault_behind};
use dunlin_handoff::HandoffError;
use dunlin_ipsec::IpsecError;
use dunlin_proto::fault::{AtFault, FaultCode, seen_by_peer};
use dunlin_tunnel::{DemandError, Failure, TunnelError};

type Cause = dyn Error + 'static;

/// The fault code of an error, and the party at fault. An error in a command's arguments has no
/// code. If a lack of descriptors or memory caused the error, the code names this lack, not the
/// step that failed.
pub(crate) fn fault_of(error: &anyhow::Error) -> Option<(FaultCode, AtFault)> {
    match fault_behind(error.as_ref()) {
        Some(code) => Some((code, code.at_fault())),
        None => error.chain().find_map(of_cause),
    }
}

/// The name of the fault code of an error.
pub(crate) fn fault_name(error: &anyhow::Error) -> Option<&'static str> {
    fault_of(error).map(|(code, _)| code.name())
}

fn of_cause(cause: &Cause) -> Option<(FaultCode, AtFault)> {
    // If the peer reported the fault, the party at fault is converted to this side's view.
    if let Some(error) = cause.downcast_ref::<MigrateError>() {
        return Some((error.code(), error.at_fault()));
    }
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some((failure.code(), failure.at_fault()));
    }
    if let Some(IpsecError::EndedByPeer { fault, .. }) = cause.downcast_ref() {
        return Some((*fault, seen_by_peer(fault.at_fault())));
    }
    let code = code_by(cause, IpsecError::code)
        .or_else(|| code_by(cause, HandoffError::code))
        .or_else(|| code_by(cause, TunnelError::code))
        .or_else(|| code_by(cause, DemandError::code))
        .or_else(|| code_by(cause, JournalError::code))
        .or_else(|| code_by(cause, |_: &Unreadable| FaultCode::Journal))
        .or_else(|| code_by(cause, ResolveError::code))?;
    Some((code, code.at_fault()))
}

/// The code that `code` returns, if the cause is an `E`.
fn code_by<E: Error + 'static>(cause: &Cause, code: fn(&E) -> FaultCode) -> Option<FaultCode> {
    cause.downcast_ref().map(code)
}
