//! Advice to operators on errors and events of IPsec sessions: the library names no flags and
//! commands.

use anyhow::{Error, anyhow};
use dunlin_ipsec::{Event, IpsecError};
use dunlin_proto::fault::FaultCode;

/// An event as one line for a log, with advice.
pub(crate) fn event_text(event: &Event) -> String {
    match event {
        Event::Left { .. } => format!(
            "{event}: the next session on them takes them over, or `dunlin ipsec clean` frees them \
             when no connection uses them"
        ),
        Event::StaysBlocked { .. } => format!("{event}, or `dunlin ipsec clean`"),
        event => event.to_string(),
    }
}

/// An error of `dunlin ipsec up`, with advice.
pub(super) fn with_advice(error: IpsecError) -> Error {
    match &error {
        // Only per-CPU SAs are a feature that a peer's kernel may lack for `up`.
        IpsecError::NoPerCpu
        | IpsecError::EndedByPeer {
            fault: FaultCode::FeatureMissing,
            ..
        } => anyhow!("{error} (`--mode connection`)"),
        _ => error.into(),
    }
}
