//! The lanes on which this side receives. Records which lane numbers were used, and how many frames
//! of each lane this side has delivered or keeps in memory.

use std::collections::BTreeMap;

use super::fault::PeerFault;
use super::message::LaneAck;
use crate::fault::FaultCode;
use crate::mistake::{Mistake, planted};

/// If the lanes together have this many unacknowledged frames, acknowledgements are due
/// immediately.
const ACK_FRAMES: u64 = 32;
/// If the lanes together have this many unacknowledged bytes, acknowledgements are due immediately.
///
/// Formula: at 2 GiB/s a message each millisecond. Drawback: the sender keeps up to this many bytes
/// for longer than necessary. If the sender may keep at most this many bytes for a peer, it stops
/// for [`ACK_DELAY_NS`] at a time. Alternative: half as many bytes. This doubles the number of
/// messages, and each message wakes a thread on both sides.
const ACK_BYTES: u64 = 2 * 1024 * 1024;
/// How long an acknowledgement may be delayed, so that it is sent together with other
/// acknowledgements. An acknowledgement frees the sender's memory and shows that the lane works.
/// The delay is much shorter than the timeout for a lane without progress, which is 5 s by default.
pub const ACK_DELAY_NS: u64 = 100_000_000;

#[derive(Debug, Default)]
struct Lane {
    /// Whether this side is still opening the lane, at the other side's request.
    opening: bool,
    frames: u64,
    acknowledged: u64,
    unacknowledged_bytes: u64,
    /// The arrival time of the oldest unacknowledged frame.
    since_ns: u64,
    /// Whether the lane's end has arrived.
    ended: bool,
    /// Whether the lane's connection is closed.
    over: bool,
}

impl Lane {
    fn unacknowledged(&self) -> u64 {
        self.frames - self.acknowledged
    }

    fn due_ns(&self) -> Option<u64> {
        if self.ended || self.over {
            return Some(0);
        }
        (self.unacknowledged() > 0).then(|| self.since_ns.saturating_add(ACK_DELAY_NS))
    }
}

/// The lanes on which the other side sends and this side receives.
#[derive(Debug)]
pub(super) struct ReceivingLanes {
    most: usize,
    lanes: BTreeMap<u16, Lane>,
    /// One bit per lane number, set when the number is used, because a number is used only once.
    used: Box<[u64; 1024]>,
    /// Whether another message is being sent, so that acknowledgements can be sent with it.
    along: bool,
}

impl ReceivingLanes {
    pub(super) fn new(most: u16) -> Self {
        Self {
            most: usize::from(most),
            lanes: BTreeMap::new(),
            used: Box::new([0; 1024]),
            along: false,
        }
    }

    /// Admits a lane with a valid proof.
    pub(super) fn admit(&mut self, number: u16) -> Result<(), FaultCode> {
        self.add(number, Lane::default())
    }

    /// Adds a lane that this side must open for the other side. Returns false if the number was
    /// used before.
    pub(super) fn expect(&mut self, number: u16) -> Result<bool, FaultCode> {
        let lane = Lane {
            opening: true,
            ..Lane::default()
        };
        match self.add(number, lane) {
            Ok(()) => Ok(true),
            Err(FaultCode::DuplicateLane) if !planted(Mistake::LaneOpenedTwice) => Ok(false),
            Err(FaultCode::DuplicateLane) => Ok(true),
            Err(fault) => Err(fault),
        }
    }

    /// Records that this side has opened a lane for the other side. Returns false if the lane does
    /// not exist any more.
    pub(super) fn opened(&mut self, number: u16) -> bool {
        let lane = self.lanes.get_mut(&number);
        lane.is_some_and(|lane| std::mem::take(&mut lane.opening))
    }

    /// Removes a lane that this side could not open.
    pub(super) fn forget(&mut self, number: u16) {
        if self.lanes.get(&number).is_some_and(|lane| lane.opening) {
            self.lanes.remove(&number);
        }
    }

    fn add(&mut self, number: u16, lane: Lane) -> Result<(), FaultCode> {
        let word = &mut self.used[usize::from(number / 64)];
        let bit = 1 << (number % 64);
        if number == 0 || *word & bit != 0 {
            return Err(FaultCode::DuplicateLane);
        }
        // A lane counts against the limit until its last acknowledgement is sent. Otherwise a peer
        // that opens and closes lanes could make this map grow without limit.
        if self.lanes.len() >= self.most {
            return Err(FaultCode::LaneLimit);
        }
        *word |= bit;
        self.lanes.insert(number, lane);
        Ok(())
    }

    /// Whether frames can arrive on this lane.
    pub(super) fn is_open(&self, number: u16) -> bool {
        let lane = self.lanes.get(&number);
        lane.is_some_and(|lane| !lane.opening && !lane.ended && !lane.over)
    }

    /// Records that the lane's next frame arrived completely, so that the other side need not send
    /// it again.
    pub(super) fn safe(&mut self, number: u16, bytes: u64, now_ns: u64) {
        if let Some(lane) = self.lanes.get_mut(&number)
            && !lane.over
        {
            if lane.frames == lane.acknowledged {
                lane.since_ns = now_ns;
            }
            lane.frames += 1;
            lane.unacknowledged_bytes += bytes;
        }
    }

    /// Records that the lane's end arrived, with the number of frames that the lane carried.
    pub(super) fn ended(&mut self, number: u16, frames: u64) -> Result<(), PeerFault> {
        let Some(lane) = self.lanes.get_mut(&number) else {
            return Ok(());
        };
        if lane.frames != frames {
            return Err(PeerFault::LaneEnd {
                lane: number,
                sent: frames,
                arrived: lane.frames,
            });
        }
        lane.ended = true;
        Ok(())
    }

    /// Records that the lane's connection closed.
    pub(super) fn over(&mut self, number: u16) {
        if let Some(lane) = self.lanes.get_mut(&number) {
            lane.over = true;
        }
    }

    /// Makes all acknowledgements due again, because a new control lane came up.
    pub(super) fn resend_all(&mut self) {
        for lane in self.lanes.values_mut() {
            lane.acknowledged = 0;
        }
    }

    /// When the next acknowledgement is due; 0 means immediately.
    pub(super) fn due_ns(&self) -> Option<u64> {
        let lanes = || self.lanes.values();
        let frames: u64 = lanes().map(Lane::unacknowledged).sum();
        let bytes: u64 = lanes().map(|lane| lane.unacknowledged_bytes).sum();
        if frames >= ACK_FRAMES || bytes >= ACK_BYTES {
            return Some(0);
        }
        lanes().filter_map(Lane::due_ns).min()
    }

    /// Makes acknowledgements due, because another message is sent in any case.
    pub(super) fn send_along(&mut self) {
        self.along = true;
    }

    /// Removes and returns a lost lane for which *lane lost* has not been sent.
    pub(super) fn take_lost(&mut self) -> Option<LaneAck> {
        let lost = |lane: &Lane| lane.over && !lane.ended;
        let (&number, _) = self.lanes.iter().find(|(_, lane)| lost(lane))?;
        let lane = self.lanes.remove(&number)?;
        Some(LaneAck {
            lane: number,
            frames: lane.frames,
        })
    }

    /// Returns the acknowledgements of all lanes, if one of them is due or another message is sent
    /// too.
    pub(super) fn take_acks(&mut self, now_ns: u64) -> Option<Vec<LaneAck>> {
        let along = std::mem::take(&mut self.along);
        if self.due_ns()? > now_ns && !along {
            return None;
        }
        let mut acks = Vec::new();
        self.lanes.retain(|&number, lane| {
            if lane.ended || lane.unacknowledged() > 0 {
                acks.push(LaneAck {
                    lane: number,
                    frames: lane.frames,
                });
                lane.acknowledged = lane.frames;
                lane.unacknowledged_bytes = 0;
            }
            // A lane that has ended is removed with its last acknowledgement.
            !lane.ended
        });
        Some(acks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_lane_number_is_used_once_and_open_lanes_are_limited() {
        let mut lanes = ReceivingLanes::new(2);
        assert_eq!(lanes.admit(0), Err(FaultCode::DuplicateLane));
        assert_eq!(lanes.admit(65_535), Ok(()));
        assert_eq!(lanes.admit(65_535), Err(FaultCode::DuplicateLane));
        assert_eq!(lanes.admit(7), Ok(()));
        assert_eq!(lanes.admit(8), Err(FaultCode::LaneLimit));
        lanes.over(7);
        assert_eq!(lanes.admit(8), Err(FaultCode::LaneLimit));
        assert_eq!(lanes.take_lost(), Some(LaneAck { lane: 7, frames: 0 }));
        assert_eq!(lanes.admit(8), Ok(()));
        assert_eq!(lanes.admit(7), Err(FaultCode::DuplicateLane));
    }

    #[test]
    fn an_acknowledgement_is_delayed_for_others_up_to_a_limit() {
        let mut lanes = ReceivingLanes::new(4);
        assert_eq!(lanes.admit(1), Ok(()));
        assert_eq!(lanes.due_ns(), None, "an idle lane costs nothing");
        lanes.safe(1, 1, 50);
        assert_eq!(lanes.take_acks(50), None);
        assert_eq!(lanes.due_ns(), Some(50 + ACK_DELAY_NS));
        let ack = |frames| Some(vec![LaneAck { lane: 1, frames }]);
        assert_eq!(lanes.take_acks(50 + ACK_DELAY_NS), ack(1));
        assert_eq!(lanes.due_ns(), None);
        for _ in 0..ACK_FRAMES {
            assert_eq!(lanes.take_acks(60), None);
            lanes.safe(1, 1, 60);
        }
        assert_eq!(lanes.take_acks(60), ack(1 + ACK_FRAMES));
        lanes.safe(1, ACK_BYTES, 70);
        assert_eq!(lanes.take_acks(70), ack(2 + ACK_FRAMES));
    }

    #[test]
    fn i8_the_limit_of_unacknowledged_bytes_is_for_all_lanes_together() {
        let mut lanes = ReceivingLanes::new(2);
        assert_eq!((lanes.admit(1), lanes.admit(2)), (Ok(()), Ok(())));
        lanes.safe(1, ACK_BYTES / 2, 0);
        assert_eq!(lanes.take_acks(0), None);
        lanes.safe(2, ACK_BYTES / 2, 0);
        let acks = lanes.take_acks(0).unwrap_or_default();
        let lanes: Vec<_> = acks.iter().map(|ack| (ack.lane, ack.frames)).collect();
        assert_eq!(lanes, [(1, 1), (2, 1)]);
    }

    #[test]
    fn acknowledgements_are_sent_along_with_another_message() {
        let mut lanes = ReceivingLanes::new(1);
        assert_eq!(lanes.admit(1), Ok(()));
        lanes.send_along();
        assert_eq!(lanes.take_acks(0), None, "nothing has arrived");
        lanes.safe(1, 1, 0);
        assert_eq!(
            lanes.take_acks(0),
            None,
            "the other message was sent before"
        );
        lanes.send_along();
        assert_eq!(
            lanes.take_acks(0),
            Some(vec![LaneAck { lane: 1, frames: 1 }])
        );
    }

    #[test]
    fn a_lanes_end_is_checked_and_acknowledged_last() {
        let mut lanes = ReceivingLanes::new(4);
        assert_eq!(lanes.admit(1), Ok(()));
        lanes.safe(1, 1, 0);
        assert!(lanes.ended(1, 2).is_err());
        assert_eq!(lanes.ended(1, 1), Ok(()));
        lanes.over(1);
        assert_eq!(lanes.take_lost(), None);
        assert_eq!(
            lanes.take_acks(0),
            Some(vec![LaneAck { lane: 1, frames: 1 }])
        );
        assert_eq!(lanes.due_ns(), None);
    }
}
