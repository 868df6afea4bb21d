//! The newest control lane of a session and the thread that reads it, in both roles.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dunlin_lane::control::ControlStream;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Features, Offer, Selection};

use super::control::{ControlLane, FromPeer, Sequences};
use super::fault::Fault;
use super::host::Host;
use super::threads::{CpuTime, spawn_counted};

/// How long to wait for the peer to close the control lane at the end of a session.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The newest control lane, and the values with which the next control lane is opened.
pub(super) struct ControlLink {
    pub(super) lane: Arc<ControlLane>,
    reader: JoinHandle<()>,
    pub(super) terms: ControlTerms,
    /// Whether the reader's report that `lane` has ended has reached the session.
    ended: Cell<bool>,
}

/// The parameters with which a control lane was opened.
#[derive(Clone)]
pub(super) struct ControlTerms {
    pub(super) sequences: Arc<Sequences>,
    /// The source's offer.
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    pub(super) silence_limit: Duration,
}

impl ControlLink {
    /// A control lane on `stream`, with a thread that reads it; see
    /// [`ControlLane::read`]. `deliver` also gets the lane's epoch.
    pub(super) fn start(
        stream: ControlStream,
        terms: ControlTerms,
        host: &dyn Host,
        cpu: &CpuTime,
        at_once: impl FnMut(&Message) -> Result<bool, Fault> + Send + 'static,
        mut deliver: impl FnMut(u32, FromPeer) + Send + 'static,
    ) -> Result<Self, Fault> {
        let (session, epoch) = (terms.offer.session, terms.offer.epoch);
        let sequences = Arc::clone(&terms.sequences);
        let lane = ControlLane::new(stream, session, epoch, sequences, terms.silence_limit);
        let lane = Arc::new(lane);
        let same = Arc::clone(&lane);
        let body = move || same.read(at_once, |from_peer| deliver(epoch, from_peer));
        let reader = spawn_counted(host, "dunlin-control", cpu, body)?;
        Ok(Self {
            lane,
            reader,
            terms,
            ended: Cell::new(false),
        })
    }

    /// Notes that the session has taken `from_peer`, which this lane's reader delivered.
    pub(super) fn took(&self, from_peer: &FromPeer) {
        match from_peer {
            FromPeer::Message(_) => self.lane.backlog.took(),
            FromPeer::Lost(_) => self.ended.set(true),
        }
    }

    /// Whether verification was negotiated.
    pub(super) fn verifies(&self) -> bool {
        self.terms.selection.features.contains(Features::VERIFY)
    }

    /// Whether the reader's report that the lane has ended has reached the session.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Ends the lane, and joins its reader.
    ///
    /// # Errors
    /// The reader panicked.
    pub(super) fn end(self) -> thread::Result<()> {
        self.lane.shutdown();
        self.reader.join()
    }

    /// Converts the result of a send. If this lane was lost and `is_resumable` is true, returns
    /// `Ok`: the session replaces the lane and continues.
    pub(super) fn unless_resumable(
        &self,
        sent: Result<(), Fault>,
        is_resumable: bool,
    ) -> Result<(), Fault> {
        match sent {
            Err(fault) if fault.code == FaultCode::ControlLost && is_resumable => {
                // End the lane. Its reader then reports the loss to the session.
                self.lane.shutdown();
                Ok(())
            }
            result => result,
        }
    }

    /// Sends a message. If that fails, ends the lane; its reader reports the loss.
    pub(super) fn notify(&self, message: &Message) {
        if self.lane.send(message).is_err() {
            self.lane.shutdown();
        }
    }
}
