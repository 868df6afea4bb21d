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

/// How long the peer may take to close the control lane at the end.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The newest control lane, and what the next one is made with.
pub(super) struct ControlLink {
    pub(super) lane: Arc<ControlLane>,
    /// The thread that reads `lane`; none before it is started, and once it has been joined.
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) sequences: Arc<Sequences>,
    /// What the source offered for it.
    pub(super) offer: Offer,
    pub(super) selection: Selection,
    /// Whether `lane` has ended.
    ended: Cell<bool>,
}

impl ControlLink {
    /// A control lane on `stream`, which no thread reads yet.
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

    /// Starts the thread that reads the lane; see [`ControlLane::read`]. `deliver` gets the lane's
    /// epoch too.
    pub(super) fn start(
        &mut self,
        host: &dyn Host,
        cpu: &CpuTime,
        at_once: impl FnMut(&Message) -> Result<bool, Fault> + Send + 'static,
        mut deliver: impl FnMut(u32, FromPeer) + Send + 'static,
    ) -> Result<(), Fault> {
        let lane = Arc::clone(&self.lane);
        let body = move || {
            let epoch = lane.epoch();
            lane.read(at_once, |from_peer| deliver(epoch, from_peer));
        };
        self.reader = Some(spawn_counted(host, "dunlin-control", cpu, body)?);
        Ok(())
    }

    /// The session has taken what this lane's reader delivered.
    pub(super) fn took(&self, from_peer: &FromPeer) {
        match from_peer {
            FromPeer::Message(_) => self.lane.took(),
            FromPeer::Lost(_) => self.ended.set(true),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Whether both sides compare digests.
    pub(super) fn verifies(&self) -> bool {
        self.selection.features.contains(Features::VERIFY)
    }

    /// Ends the lane, and joins its reader.
    pub(super) fn end(&mut self) {
        self.lane.shutdown();
        if let Some(reader) = self.reader.take() {
            // A panic there has been reported as the loss of the lane.
            let _ = reader.join();
        }
    }

    /// Sends a message. If that fails, the lane ends, and its reader reports the loss.
    pub(super) fn tell(&self, message: &Message) {
        if self.lane.send(message).is_err() {
            self.lane.shutdown();
        }
    }
}
