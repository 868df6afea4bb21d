//! Opens a control lane: the first one, a replacement, or one for an inquiry.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_lane::control::{self as control_lane, ControlStream, OpenError};
use dunlin_lane::dial::{DialCancel, DialError};
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::ClientTls;
use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::negotiate::{Offer, Selection};
use dunlin_proto::text::harmless;

use super::super::fault::{Fault, OrFault};
use super::super::host::{Cancel, Host};
use super::super::journal::{RecordedPeer, Role};

/// Connects a control lane and negotiates the terms of `offer`. `cancel` aborts it at
/// any point.
pub(super) fn open_control(
    host: &Arc<dyn Host>,
    cancel: Option<&Cancel>,
    to: &str,
    tls: &ClientTls,
    offer: &Offer,
    deadline: Instant,
) -> Result<(ControlStream, Selection), Fault> {
    let dial = DialCancel::new().or_fault(FaultCode::Kernel, "cannot create a socket pair")?;
    let own = dial.clone();
    let _listening = cancel.map(|cancel| cancel.listen(move || own.cancel()));
    control_lane::open(to, &**host, tls, offer, deadline, &dial)
        .map_err(|error| not_opened(to, error))
}

fn not_opened(to: &str, error: OpenError) -> Fault {
    let mut fault = Fault::new(error.fault(), error.to_string());
    match error {
        OpenError::Refused(refusal) => reported(refusal.fault, &refusal.text),
        OpenError::Dial(DialError::Connect { source, .. }) => {
            // `InvalidInput` without an errno means a malformed address, which is not an error of
            // the network. An EINVAL from a socket call would carry an errno.
            if source.kind() == io::ErrorKind::InvalidInput && source.raw_os_error().is_none() {
                fault.at_fault = AtFault::Configuration;
            }
            fault.because(source)
        }
        OpenError::Dial(DialError::Handshake { source, .. }) => {
            fault.what = format!("cannot secure the control lane to {to}");
            fault.because(source)
        }
        OpenError::Dial(DialError::Socket(source)) => fault.because(source),
        OpenError::Control(source) => fault.because(source),
        OpenError::Malformed(source) => fault.because(source),
        OpenError::NotOffered(source) => fault.because(source),
        _ => fault,
    }
}

/// A fault that the destination reports.
pub(super) fn reported(code: FaultCode, text: &str) -> Fault {
    Fault::from_peer(Role::Destination, code, text)
}

/// The fault if a trusted host other than the session's destination `peer` answers.
pub(super) fn another_peer(answers: &PeerIdentity, peer: &RecordedPeer) -> Fault {
    let RecordedPeer::Known(peer) = peer else {
        let what = "the session's record does not name its destination";
        return Fault::new(FaultCode::Journal, what);
    };
    Fault::new(
        FaultCode::WrongIdentity,
        format!(
            "a different host answers at the destination's address: {}; the destination is {}",
            harmless(&answers.to_string()),
            harmless(&peer.to_string())
        ),
    )
}

/// The fault with which the session ends if the control lane could not be replaced. `last` is the
/// fault of the last attempt.
pub(super) fn given_up(last: Fault, limit: Duration) -> Fault {
    let what = format!("the control lane was lost and could not be replaced within {limit:?}");
    let cause = last.source.as_ref();
    let refused = cause
        .and_then(|cause| cause.downcast_ref::<io::Error>())
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if !refused {
        return Fault { what, ..last };
    }
    Fault {
        what: format!(
            "{what}; nothing listens at the destination's address: its process has ended, or the \
             kernel there has killed it for lack of memory"
        ),
        at_fault: AtFault::Peer,
        ..last
    }
}
