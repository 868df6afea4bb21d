//! Adds advice for operators to errors and events of keying sessions, because the library does
//! not mention flags or commands.

use anyhow::Error;
use dunlin_ipsec::{Event, IpsecError};
use dunlin_proto::fault::FaultCode;
use tracing::{info, warn};

use crate::log::{is_started, say};

/// Logs an event with its peer and its fault code, if it has them.
pub(crate) fn log_event(event: &Event) {
    let text = event_text(event);
    if !is_started() {
        return say(&text);
    }
    let peer = match event {
        Event::Up(session) => Some(session.peer.to_string()),
        Event::Over { peer, .. } | Event::Rejected { from: peer, .. } => Some(peer.clone()),
        _ => None,
    };
    let fault = match event {
        Event::Rejected { fault, .. } => Some(fault.name()),
        _ => None,
    };
    match event {
        Event::Up(_) | Event::Over { why: None, .. } | Event::Cleaned { .. } => {
            info!(peer, "{text}")
        }
        _ => warn!(peer, fault, "{text}"),
    }
}

/// An event as one line for a log, with advice.
pub(crate) fn event_text(event: &Event) -> String {
    match event {
        Event::Left { .. } => format!(
            "{event}: the next session on these ports takes them over, or `dunlin ipsec clean` \
             frees them when no connection uses them"
        ),
        Event::StaysBlocked { .. } => format!("{event}, or `dunlin ipsec clean`"),
        event => event.to_string(),
    }
}

/// An error of `dunlin ipsec up`, with advice.
pub(super) fn with_advice(error: IpsecError) -> Error {
    let text = error.to_string();
    match &error {
        // Here, `FeatureMissing` means a lack of per-CPU SAs, because `up` needs no other feature
        // that the peer's kernel may lack.
        IpsecError::NoPerCpu
        | IpsecError::EndedByPeer {
            fault: FaultCode::FeatureMissing,
            ..
        } => {
            let advice = format!("{text}; `--mode connection` does not need per-CPU SAs");
            Error::new(error).context(advice)
        }
        _ => error.into(),
    }
}
