//! Lanes that the other side opens: with one opener ([`Config::one_opener`]) the connecting side
//! opens the lanes of both directions.
//!
//! ```text
//!   accepting side, which sends              connecting side, which opens
//!     │ lane wanted (number) ─────────────────▶ │ OpenLaneFor: dials, presents the number
//!     │ ◀════════════════════ lane open ═══════ │
//!     │ is_awaited, lane_established            │ opened_for
//!     │ frames ═══════════════════════════════▶ │
//!     │ ◀── lane refused, with the reason ───── │ or not_opened, if the lane cannot be opened
//! ```
//!
//! The accepting side numbers these lanes, times them out and replaces them, as it does with lanes
//! that it dials itself. A request repeats until the lane is up or lost. The connecting side uses
//! each number once and keeps at most [`Config::lanes_max`] of these lanes, including the lanes
//! that it is still dialling. If no lane comes while bytes wait, the accepting side aborts its
//! channels and ends the trunk.
//!
//! A side that cannot open a lane for its own bytes reports that too (*lane failed*), so that the
//! reason is known on both hosts.

use super::{Action, Trunk};
use crate::fault::FaultCode;
use crate::stripe::fault::PeerFault;
use crate::stripe::message::Message;

/// The first version with *lane failed*.
const REPORTS_FROM_VERSION: u16 = 2;

impl<T: Clone> Trunk<T> {
    /// Whether this side has requested the lane, and the lane has not come yet. If not, the caller
    /// closes the lane's connection before it allocates memory for the lane.
    #[must_use]
    pub fn is_awaited(&self, lane: u16) -> bool {
        self.asks() && !self.is_over() && self.lanes.is_opening(lane)
    }

    /// Records that a lane of [`Action::OpenLaneFor`] is open and *lane open* is sent. Returns
    /// false if the lane is not needed any more; in this case the caller closes the connection.
    #[must_use]
    pub fn opened_for(&mut self, lane: u16) -> bool {
        !self.is_over() && self.arriving.opened(lane)
    }

    /// Records that a lane of [`Action::OpenLaneFor`] could not be opened. The other side receives
    /// the reason.
    pub fn not_opened(&mut self, lane: u16, fault: FaultCode, text: String) {
        self.arriving.forget(lane);
        self.refuse_lane(lane, fault, text);
    }

    /// Records that a lane of [`Action::OpenLane`] could not be opened. From version 2 on the other
    /// side receives the reason.
    pub fn lane_failed(&mut self, lane: u16, fault: FaultCode, text: String, now_ns: u64) {
        self.lane_over(lane, now_ns);
        if self.config.version >= REPORTS_FROM_VERSION && !self.is_over() {
            // A later reason replaces an earlier one that has not been sent.
            self.agenda.failure = Some(Message::LaneFailed { lane, fault, text });
        }
    }

    /// Handles *lane wanted*.
    pub(super) fn wanted(&mut self, lane: u16) -> Result<(), PeerFault> {
        if !self.serves() {
            return Err(PeerFault::LaneNotOurs { lane });
        }
        match self.arriving.expect(lane) {
            Ok(true) => self.actions.push_back(Action::OpenLaneFor(lane)),
            // The message repeats an earlier one.
            Ok(false) => {}
            Err(fault) => {
                let text = "too many lanes are open or requested";
                self.refuse_lane(lane, fault, text.to_owned());
            }
        }
        Ok(())
    }

    /// Handles *lane refused*.
    pub(super) fn lane_refused(
        &mut self,
        lane: u16,
        fault: FaultCode,
        text: String,
        now_ns: u64,
    ) -> Result<(), PeerFault> {
        self.lanes.check(lane)?;
        // The reason may come after this side has stopped waiting for the lane. Each lane's reason
        // is reported once.
        let is_late = self.asks() && lane > self.last_refused;
        self.last_refused = self.last_refused.max(lane);
        self.agenda.wants.remove(&lane);
        if self.lanes.lose(lane, now_ns) || is_late {
            self.actions
                .push_back(Action::LaneRefused { lane, fault, text });
        }
        Ok(())
    }

    /// Handles *lane failed*. Lane numbers ascend, so a repeated report of a lane has no effect.
    pub(super) fn peer_lane_failed(&mut self, lane: u16, fault: FaultCode, text: String) {
        if lane > self.last_failed {
            self.last_failed = lane;
            self.actions
                .push_back(Action::LaneFailed { lane, fault, text });
        }
    }

    /// Repeats the request for each lane that has not come, because the earlier request may have
    /// been lost.
    pub(super) fn ask_again(&mut self) {
        if self.asks() {
            self.agenda.wants = self.lanes.opening().collect();
        }
    }
}
