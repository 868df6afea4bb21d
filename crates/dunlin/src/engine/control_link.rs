//! The newest control lane of a session with the thread that reads it, in both roles.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dunlin_proto::control::Message;
use dunlin_proto::negotiate::{Features, Offer, Selection};

use super::control::{ControlLane, FromPeer, Sequences};
use super::fault::Fault;
use super::host::Host;
use super::threads::{CpuTime, spawn_counted};
use crate::lane::control::ControlStream;

/// How long to wait for the peer to close the control lane at the end.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The newest control lane, and the values that the next one needs.
pub(super) struct ControlLink {
    pub(super) lane: Arc<ControlLane>,
    /// The thread that reads `lane`; `None` before it starts and after it has been
    /// joined.
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) sequences: Arc<Sequences>,
    /// The source's offer for it.
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    /// Whether `lane` has ended.
    pub(super) ended: Cell<bool>,
}

impl ControlLink {
    /// A control lane on `stream`. No thread reads it yet.
    pub(super) fn new(
        stream: ControlStream,
        sequences: Arc<Sequences>,
        offer: Offer,
        selection: Selection,
        silence_limit: Duration,
    ) -> Self {
        let lane = ControlLane::new(
            stream,
            offer.session,
            offer.epoch,
            Arc::clone(&sequences),
            silence_limit,
        );
        Self {
            lane: Arc::new(lane),
            reader: None,
            sequences,
            offer,
            selection,
            ended: Cell::new(false),
        }
    }

    /// Starts the thread that reads the lane; see [`ControlLane::read`]. `deliver` also
    /// gets the lane's epoch.
    pub(super) fn start(
        &mut self,
        host: &dyn Host,
        cpu: &CpuTime,
        at_once: impl FnMut(&Message) -> Result<bool, Fault> + Send + 'static,
        mut deliver: impl FnMut(u32, FromPeer) + Send + 'static,
    ) -> Result<(), Fault> {
        let lane = Arc::clone(&self.lane);
        let body = move || {
            let epoch = lane.epoch;
            lane.read(at_once, |from_peer| deliver(epoch, from_peer));
        };
        self.reader = Some(spawn_counted(host, "dunlin-control", cpu, body)?);
        Ok(())
    }

    /// Notes that the session has taken what this lane's reader delivered.
    pub(super) fn took(&self, from_peer: &FromPeer) {
        match from_peer {
            FromPeer::Message(_) => self.lane.backlog.took(),
            FromPeer::Lost(_) => self.ended.set(true),
        }
    }

    /// Whether both sides compare digests.
    pub(super) fn verifies(&self) -> bool {
        self.selection.features.contains(Features::VERIFY)
    }

    /// Ends the lane, and joins its reader.
    pub(super) fn end(&mut self) {
        self.lane.shutdown();
        if let Some(reader) = self.reader.take() {
            // The loss of the lane has already reported a panic there.
            let _ = reader.join();
        }
    }

    /// Sends a message. If that fails, ends the lane; its reader reports the loss.
    pub(super) fn notify(&self, message: &Message) {
        if self.lane.send(message).is_err() {
            self.lane.shutdown();
        }
    }
}
