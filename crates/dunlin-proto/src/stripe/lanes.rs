//! The lanes that this side sends on: opened where they are wanted, replaced
//! before they are worn, and what each carries until it is acknowledged.
//!
//! ```text
//!  Opening ── up ──▶ Up ── worn and another stands, or none is wanted ──▶ Leaving
//!     │               │                                         end said, all acknowledged
//!     ▼               ▼                                                     ▼
//!   tried again     lost: what it carried goes first on the others        gone
//! ```
//!
//! TCP keeps the frames of a lane in order, so that one number acknowledges
//! them. A lost lane needs no fence: its frames may still arrive, and say the
//! same as those that were sent again.

use std::collections::{BTreeMap, VecDeque};

use super::fault::PeerFault;
use super::frame::Data;
use crate::limits::MAX_LANES;
use crate::mistake::{Mistake, planted};

/// How long a side waits for what; all in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For the next acknowledgement on a lane that carries something.
    pub progress_ns: u64,
    /// For a new lane to stand.
    pub open_ns: u64,
    /// Before the first attempt to replace a lost lane; it doubles.
    pub retry_first_ns: u64,
    /// Between attempts, at most.
    pub retry_last_ns: u64,
    /// Without any lane for what waits, or without a control lane, before
    /// channels are given up.
    pub alone_ns: u64,
    /// Lanes are kept after the last channel for this long.
    pub warm_ns: u64,
}

impl Default for Timeouts {
    /// What fits hosts of one site: a hypervisor hears of a vanished peer
    /// after ten seconds.
    fn default() -> Self {
        const SECOND_NS: u64 = 1_000_000_000;
        Self {
            progress_ns: 5 * SECOND_NS,
            open_ns: 5 * SECOND_NS,
            retry_first_ns: SECOND_NS / 10,
            retry_last_ns: 2 * SECOND_NS,
            alone_ns: 10 * SECOND_NS,
            warm_ns: 30 * SECOND_NS,
        }
    }
}

/// What is to be done about a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneAction {
    Open(u16),
    Cut(u16),
    /// None has stood for too long, and something waits for one.
    Alone,
    /// There are no numbers left.
    Exhausted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Opening { since_ns: u64 },
    Up,
    Leaving { ended: bool },
}

#[derive(Debug)]
struct Lane<T> {
    is: Is,
    worn: bool,
    /// Frames that it was given.
    given: u64,
    acknowledged: u64,
    /// The frames behind those; `None` is one whose channel is no more.
    under_way: VecDeque<Option<(u64, Data, T)>>,
    /// When something was last acknowledged, or given to it when nothing was
    /// under way.
    progress_ns: u64,
}

/// The lanes of one side.
#[derive(Debug)]
pub(super) struct SendingLanes<T> {
    patience: Timeouts,
    wanted: u16,
    last_number: u16,
    lanes: BTreeMap<u16, Lane<T>>,
    /// What lost lanes carried, in the order in which it was first sent.
    again: BTreeMap<u64, (Data, T)>,
    next_order: u64,
    /// Bytes that are held because they are not acknowledged.
    held_bytes: u64,
    retry_ns: u64,
    retry_at_ns: u64,
    alone_since_ns: Option<u64>,
}

impl<T: Clone> SendingLanes<T> {
    pub(super) fn new(patience: Timeouts) -> Self {
        Self {
            patience,
            wanted: 0,
            last_number: 0,
            lanes: BTreeMap::new(),
            again: BTreeMap::new(),
            next_order: 0,
            held_bytes: 0,
            retry_ns: patience.retry_first_ns,
            retry_at_ns: 0,
            alone_since_ns: None,
        }
    }

    /// Bytes that are held because they are not acknowledged.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// How many lanes carry frames.
    pub(super) fn up(&self) -> usize {
        self.count(|lane| lane.is == Is::Up)
    }

    /// Whether something waits to be sent again.
    pub(super) fn has_lost(&self) -> bool {
        !self.again.is_empty()
    }

    /// Whether a lane waits to be told to end.
    pub(super) fn has_leaving(&self) -> bool {
        self.leaving().next().is_some()
    }

    /// Those that wait to be told to end.
    pub(super) fn leaving(&self) -> impl Iterator<Item = u16> {
        self.numbers(|lane| lane.is == (Is::Leaving { ended: false }))
    }

    /// Whether any lane shall carry frames.
    pub(super) fn are_wanted(&self) -> bool {
        self.wanted > 0
    }

    /// How many lanes shall carry frames.
    pub(super) fn want(&mut self, lanes: u16) {
        self.wanted = lanes.min(MAX_LANES);
    }

    /// Whether this lane may be given frames.
    pub(super) fn carries(&self, number: u16) -> bool {
        let lane = self.lanes.get(&number);
        lane.is_some_and(|lane| matches!(lane.is, Is::Up | Is::Leaving { ended: false }))
    }

    /// Whether this lane shall be told to end, and after how many frames; said
    /// once.
    pub(super) fn end(&mut self, number: u16, now_ns: u64) -> Option<u64> {
        let lane = self.lanes.get_mut(&number)?;
        if lane.is != (Is::Leaving { ended: false }) {
            return None;
        }
        if lane.under_way.is_empty() {
            lane.progress_ns = now_ns;
        }
        lane.is = Is::Leaving { ended: true };
        Some(lane.given)
    }

    /// The lane's key has been used much, or too much.
    pub(super) fn worn(&mut self, number: u16, spent: bool) {
        if let Some(lane) = self.lanes.get_mut(&number)
            && lane.is == Is::Up
        {
            lane.worn = true;
            if spent {
                lane.is = Is::Leaving { ended: false };
            }
        }
    }

    /// A piece that was read is this lane's to carry. Where the lane has been
    /// lost since, the next one carries it, and this says so.
    pub(super) fn carry(&mut self, number: u16, data: Data, token: T, now_ns: u64) -> bool {
        self.held_bytes += u64::from(data.length());
        let order = self.next_order;
        self.next_order += 1;
        self.give(number, order, data, token, now_ns)
    }

    /// The next piece that a lost lane carried, for this lane.
    pub(super) fn carry_again(&mut self, number: u16, now_ns: u64) -> Option<(Data, T)> {
        let (order, (data, token)) = self.again.pop_first()?;
        let carried = self.give(number, order, data, token.clone(), now_ns);
        carried.then_some((data, token))
    }

    fn give(&mut self, number: u16, order: u64, data: Data, token: T, now_ns: u64) -> bool {
        let carries = self.carries(number);
        match self.lanes.get_mut(&number) {
            Some(lane) if carries => {
                if lane.under_way.is_empty() {
                    lane.progress_ns = now_ns;
                }
                lane.given += 1;
                lane.under_way.push_back(Some((order, data, token)));
            }
            _ => {
                self.again.insert(order, (data, token));
            }
        }
        carries
    }

    /// Drops what is under way of a channel that is no more.
    pub(super) fn forget(&mut self, channel: u32) {
        let mut freed = 0;
        for lane in self.lanes.values_mut() {
            for slot in &mut lane.under_way {
                if let Some((_, data, _)) = slot
                    && data.channel() == channel
                {
                    freed += u64::from(data.length());
                    *slot = None;
                }
            }
        }
        self.again.retain(|_, (data, _)| {
            let keep = data.channel() != channel;
            freed += if keep { 0 } else { u64::from(data.length()) };
            keep
        });
        self.held_bytes -= freed;
    }

    /// The other side has `frames` frames of the lane.
    pub(super) fn acknowledged(
        &mut self,
        number: u16,
        frames: u64,
        now_ns: u64,
    ) -> Result<(), PeerFault> {
        self.known(number)?;
        let Some(lane) = self.lanes.get_mut(&number) else {
            return Ok(());
        };
        if frames > lane.given {
            return Err(PeerFault::Lane { lane: number });
        }
        while lane.acknowledged < frames {
            lane.acknowledged += 1;
            lane.progress_ns = now_ns;
            if let Some(Some((_, data, _))) = lane.under_way.pop_front() {
                self.held_bytes -= u64::from(data.length());
            }
        }
        if lane.is == (Is::Leaving { ended: true }) && lane.under_way.is_empty() {
            self.lanes.remove(&number);
        }
        Ok(())
    }

    /// A number that was given to a lane.
    pub(super) fn known(&self, number: u16) -> Result<(), PeerFault> {
        if number == 0 || number > self.last_number {
            return Err(PeerFault::Lane { lane: number });
        }
        Ok(())
    }

    /// The lane's connection stands and *lane open* is on its way.
    pub(super) fn stands(&mut self, number: u16, now_ns: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&number) else {
            return false;
        };
        if !matches!(lane.is, Is::Opening { .. }) {
            return false;
        }
        lane.is = Is::Up;
        lane.progress_ns = now_ns;
        self.alone_since_ns = None;
        let worn = |lane: &Lane<T>| lane.is == Is::Up && lane.worn;
        if let Some(old) = self.lanes.values_mut().find(|lane| worn(lane)) {
            old.is = Is::Leaving { ended: false };
        }
        true
    }

    /// The lane's connection is over. One that has ended in order waits for
    /// its last acknowledgement; of any other the frames go out again.
    pub(super) fn over(&mut self, number: u16, now_ns: u64) {
        let lane = self.lanes.get(&number);
        if lane.is_some_and(|lane| lane.is != (Is::Leaving { ended: true })) {
            self.lost(number, now_ns);
        }
    }

    /// Nothing more arrives on this lane: its frames go out again.
    pub(super) fn lost(&mut self, number: u16, now_ns: u64) -> bool {
        let Some(lane) = self.lanes.remove(&number) else {
            return false;
        };
        for (order, data, token) in lane.under_way.into_iter().flatten() {
            if planted(Mistake::LostChunkForgotten) {
                self.held_bytes -= u64::from(data.length());
                continue;
            }
            self.again.insert(order, (data, token));
        }
        // One that stood is replaced at once, unless it stood for nothing.
        if lane.acknowledged > 0 {
            self.retry_ns = self.patience.retry_first_ns;
        }
        if lane.acknowledged == 0 || matches!(lane.is, Is::Opening { .. }) {
            self.retry_at_ns = now_ns.saturating_add(self.retry_ns);
            self.retry_ns = self
                .retry_ns
                .saturating_mul(2)
                .min(self.patience.retry_last_ns);
        }
        true
    }

    /// Nothing can have been heard up to now: no lane is to blame for the time
    /// that has passed. With `resumed`, what was said may be lost besides, and
    /// of lanes that have ended nobody will say it again.
    pub(super) fn unheard(&mut self, resumed: bool, now_ns: u64) {
        let ended = |lane: &Lane<T>| resumed && lane.is == (Is::Leaving { ended: true });
        let ended: Vec<u16> = self.numbers(ended).collect();
        for number in ended {
            self.lost(number, now_ns);
        }
        for lane in self.lanes.values_mut() {
            lane.progress_ns = lane.progress_ns.max(now_ns);
            if let Is::Opening { since_ns } = &mut lane.is {
                *since_ns = now_ns;
            }
        }
    }

    /// The next thing to do; `heard` says that acknowledgements can come,
    /// `waits` that something waits for a lane.
    pub(super) fn poll(&mut self, heard: bool, waits: bool, now_ns: u64) -> Option<LaneAction> {
        if let Some(late) = self.late(heard, now_ns) {
            self.lost(late, now_ns);
            return Some(LaneAction::Cut(late));
        }
        if self.wanted == 0 {
            self.alone_since_ns = None;
            for lane in self.lanes.values_mut().filter(|lane| lane.is == Is::Up) {
                lane.is = Is::Leaving { ended: false };
            }
            return None;
        }
        if self.up() > 0 || !waits {
            self.alone_since_ns = None;
        } else {
            let since_ns = *self.alone_since_ns.get_or_insert(now_ns);
            if now_ns.saturating_sub(since_ns) >= self.patience.alone_ns {
                self.alone_since_ns = Some(now_ns);
                return Some(LaneAction::Alone);
            }
        }
        if !self.wants_another() || now_ns < self.retry_at_ns {
            return None;
        }
        let Some(number) = self.last_number.checked_add(1) else {
            return Some(LaneAction::Exhausted);
        };
        self.last_number = number;
        let lane = Lane {
            is: Is::Opening { since_ns: now_ns },
            worn: false,
            given: 0,
            acknowledged: 0,
            under_way: VecDeque::new(),
            progress_ns: now_ns,
        };
        self.lanes.insert(number, lane);
        Some(LaneAction::Open(number))
    }

    /// When [`SendingLanes::poll`] may have something to say without anything
    /// else happening.
    pub(super) fn due_ns(&self, heard: bool) -> Option<u64> {
        let late = self
            .lanes
            .values()
            .filter_map(|lane| self.deadline_ns(lane, heard));
        let retry = self.wants_another().then_some(self.retry_at_ns);
        let alone = self.alone_since_ns;
        let alone = alone.map(|since_ns| since_ns.saturating_add(self.patience.alone_ns));
        late.chain(retry).chain(alone).min()
    }

    fn late(&self, heard: bool, now_ns: u64) -> Option<u16> {
        let late = |lane: &Lane<T>| {
            let deadline_ns = self.deadline_ns(lane, heard);
            deadline_ns.is_some_and(|deadline_ns| deadline_ns <= now_ns)
        };
        self.numbers(late).next()
    }

    fn deadline_ns(&self, lane: &Lane<T>, heard: bool) -> Option<u64> {
        match lane.is {
            Is::Opening { since_ns } => Some(since_ns.saturating_add(self.patience.open_ns)),
            _ if !heard => None,
            // Nothing is expected of it; an end, though, is acknowledged too.
            Is::Up | Is::Leaving { ended: false } if lane.under_way.is_empty() => None,
            _ => Some(lane.progress_ns.saturating_add(self.patience.progress_ns)),
        }
    }

    /// A lane that is worn wants another beside it, and so does a lane that
    /// leaves: the room of the other side is for both.
    fn wants_another(&self) -> bool {
        let fresh = |lane: &Lane<T>| {
            matches!(lane.is, Is::Opening { .. }) || (lane.is == Is::Up && !lane.worn)
        };
        self.wanted > 0
            && self.count(fresh) < usize::from(self.wanted)
            && self.lanes.len() < usize::from(MAX_LANES)
    }

    fn count(&self, which: impl Fn(&Lane<T>) -> bool) -> usize {
        self.lanes.values().filter(|lane| which(lane)).count()
    }

    fn numbers(&self, which: impl Fn(&Lane<T>) -> bool) -> impl Iterator<Item = u16> {
        let lanes = self.lanes.iter();
        lanes
            .filter(move |(_, lane)| which(lane))
            .map(|(number, _)| *number)
    }
}
