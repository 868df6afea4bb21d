//! The status of `dunlin handoff accept`: how many clients it handed over, forwarded and refused,
//! and when its certificates expire.

use std::sync::Mutex;

use dunlin::lane::identity::Dated;
use dunlin_handoff::accept::Event;
use dunlin_lane::sync::lock;

use crate::line::{HandoffLine, Line};
use crate::published::expiry;

/// Counts the clients of this process. All keys of its maps are fault codes, or server names from
/// the flags, so clients cannot add keys without limit.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<HandoffLine>);

impl Tally {
    /// Counts an event of the acceptor.
    pub(super) fn count(&self, event: &Event) {
        let line = &mut *lock(&self.0);
        let count = match event {
            Event::HandedOver { arrived, .. } => {
                line.handed_over.entry(arrived.name.clone()).or_default()
            }
            Event::Forwarded { .. } => &mut line.forwarded,
            Event::Refused { refusal, .. } => {
                let fault = refusal.code().name().to_owned();
                line.refused.entry(fault).or_default()
            }
            _ => return,
        };
        *count += 1;
    }

    /// Call this after the identity was loaded. Replaces the dates on which its certificates and
    /// revocation lists expire.
    pub(super) fn loaded(&self, dates: &[Dated]) {
        lock(&self.0).certificates = expiry(dates);
    }

    /// The status for the status socket of the process that listens at `address`.
    pub(super) fn report(&self, address: &str) -> String {
        let line = HandoffLine {
            pid: std::process::id(),
            address: address.to_owned(),
            ..lock(&self.0).clone()
        };
        Line::Handoff(line).to_json()
    }
}
