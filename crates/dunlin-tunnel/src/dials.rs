//! The dials and handshakes in progress, for control lanes and relays, on the dialling and on the
//! accepting side. When the tunnel ends, it cancels them.

use dunlin_lane::dial::DialCancel;
use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

use dunlin_proto::fault::FaultCode;

use super::failure::{Failure, OrFailure};

/// The dials of a tunnel.
#[derive(Default)]
pub(super) struct Dials(Mutex<State>);

#[derive(Default)]
struct State {
    /// Whether the tunnel is ending, so that no dial may begin.
    is_over: bool,
    last: u64,
    under_way: BTreeMap<u64, DialCancel>,
}

/// A dial in progress. Dropping it removes it from the set.
pub(super) struct Dialling<'a> {
    all: &'a Dials,
    number: u64,
    pub(super) cancel: DialCancel,
}

impl Dials {
    /// Adds a dial.
    ///
    /// # Errors
    /// The tunnel is ending, or the process has no free file descriptors.
    pub(super) fn begin(&self) -> Result<Dialling<'_>, Failure> {
        let cancel =
            DialCancel::new().or_failure(FaultCode::Kernel, "cannot create a socket pair")?;
        let mut state = lock(&self.0);
        if state.is_over {
            return Err(Failure::new(FaultCode::Ended, "tunnel is shutting down"));
        }
        state.last += 1;
        let number = state.last;
        state.under_way.insert(number, cancel.clone());
        Ok(Dialling {
            all: self,
            number,
            cancel,
        })
    }

    /// Cancels all dials and prevents new ones.
    pub(super) fn end(&self) {
        let mut state = lock(&self.0);
        state.is_over = true;
        state.under_way.values().for_each(DialCancel::cancel);
    }
}

impl Drop for Dialling<'_> {
    fn drop(&mut self) {
        lock(&self.all.0).under_way.remove(&self.number);
    }
}
