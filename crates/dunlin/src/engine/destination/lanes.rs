//! The data lanes of a session at the destination.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use dunlin_lane::admit::LaneAcceptor;
use dunlin_proto::negotiate::SessionSecret;

use super::barrier::IterationBarrier;
use super::lane::DestinationMemory;

pub(super) struct Lanes {
    /// The secret with which a lane proves that it belongs to the session.
    pub(super) secret: SessionSecret,
    /// Admits lanes of the selected security.
    pub(super) acceptor: Arc<dyn LaneAcceptor>,
    pub(super) memory: Arc<DestinationMemory>,
    pub(super) barrier: Arc<IterationBarrier>,
    pub(super) threads: BTreeMap<u16, JoinHandle<()>>,
    pub(super) wire_bytes: u64,
    /// When to send the collected acknowledgements, if any.
    pub(super) acks_due: Option<Instant>,
}

impl Lanes {
    pub(super) fn new(
        secret: SessionSecret,
        acceptor: Arc<dyn LaneAcceptor>,
        memory: DestinationMemory,
        lanes_max: u16,
    ) -> Self {
        Self {
            secret,
            acceptor,
            memory: Arc::new(memory),
            barrier: Arc::new(IterationBarrier::new(lanes_max)),
            threads: BTreeMap::new(),
            wire_bytes: 0,
            acks_due: None,
        }
    }

    /// Ends every lane and joins its thread, before the memory is unmapped (invariant I4).
    pub(super) fn stop(&mut self) {
        self.barrier.stop();
        for thread in std::mem::take(&mut self.threads).into_values() {
            // Ignore the result: only the end of the thread matters, and a panic ends it too.
            let _ = thread.join();
        }
    }

    /// Whether no lane runs and nothing has arrived on earlier lanes.
    pub(super) fn are_untouched(&self) -> bool {
        self.threads.is_empty() && self.wire_bytes == 0
    }
}
