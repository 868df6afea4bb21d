//! The lanes on which this side sends, and what each of them carries until it is acknowledged.
//! [`crate::lanes::lifecycle`] opens and replaces the lanes.
//!
//! TCP keeps the frames of a lane in order, so the number of frames that have arrived acknowledges
//! all of them. A lost lane needs no fence ([`Loss::Dropped`]): frames that still arrive are
//! identical to those that are sent again.

use std::collections::{BTreeMap, VecDeque};

use super::fault::PeerFault;
use super::frame::Data;
use crate::lanes::lifecycle::{Action, Lane, Lifecycle, Load, Loss, State, Timeouts};
use crate::mistake::{Mistake, planted};

/// The frames of one lane.
#[derive(Debug)]
pub(super) struct Frames<T> {
    acknowledged: u64,
    /// The frames that are not acknowledged; `None` for a frame of a channel that no longer exists.
    under_way: VecDeque<Option<(u64, Data, T)>>,
}

impl<T> Frames<T> {
    fn given(&self) -> u64 {
        self.acknowledged + self.under_way.len() as u64
    }
}

impl<T> Default for Frames<T> {
    fn default() -> Self {
        Self {
            acknowledged: 0,
            under_way: VecDeque::new(),
        }
    }
}

impl<T> Load for Frames<T> {
    /// A lane that has ended waits for a confirmation too, because the other side acknowledges the
    /// end.
    fn unconfirmed_since(lane: &Lane<Self>) -> Option<u64> {
        let is_owed = lane.is(State::Ended) || !lane.load.under_way.is_empty();
        is_owed.then_some(lane.clock_ns())
    }
}

/// The lanes of one side.
#[derive(Debug)]
pub(super) struct SendingLanes<T> {
    pub(super) life: Lifecycle<Frames<T>>,
    /// Pieces of lost lanes, in the order in which they were first sent.
    again: BTreeMap<u64, (Data, T)>,
    next_order: u64,
    /// Bytes that are kept because they are not acknowledged.
    held_bytes: u64,
}

impl<T: Clone> SendingLanes<T> {
    pub(super) fn new(timeouts: Timeouts) -> Self {
        Self {
            life: Lifecycle::new(Loss::Dropped, timeouts),
            again: BTreeMap::new(),
            next_order: 0,
            held_bytes: 0,
        }
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Whether pieces of lost lanes wait to be sent again.
    pub(super) fn has_lost(&self) -> bool {
        !self.again.is_empty()
    }

    /// The lanes that must end. A lane is included until its thread calls [`SendingLanes::end`].
    pub(super) fn leaving(&self) -> impl Iterator<Item = u16> {
        let lanes = self.life.iter();
        let leaving = lanes.filter(|(_, lane)| lane.is(State::Leaving));
        leaving.map(|(number, _)| number)
    }

    /// The lanes that are being opened.
    pub(super) fn opening(&self) -> impl Iterator<Item = u16> {
        let lanes = self.life.iter();
        let opening = lanes.filter(|(_, lane)| lane.is(State::Opening));
        opening.map(|(number, _)| number)
    }

    pub(super) fn is_opening(&self, number: u16) -> bool {
        self.opening().any(|opening| opening == number)
    }

    /// Sets how many lanes carry frames.
    pub(super) fn want(&mut self, lanes: u16) {
        self.life.want(lanes);
        if lanes == 0 {
            self.life.leave_all();
        }
    }

    /// Whether this lane may be given frames.
    pub(super) fn carries(&self, number: u16) -> bool {
        let lane = self.life.get(number);
        lane.is_some_and(|lane| lane.is_established() && !lane.is(State::Ended))
    }

    /// If the lane has to send its end, returns the number of its frames; later calls return
    /// `None`.
    pub(super) fn end(&mut self, number: u16, now_ns: u64) -> Option<u64> {
        let lane = self.life.get_mut(number);
        let lane = lane.filter(|lane| lane.is(State::Leaving))?;
        if lane.load.under_way.is_empty() {
            lane.restart(now_ns);
        }
        let frames = lane.load.given();
        self.life.end(number);
        Some(frames)
    }

    /// Assigns to this lane a piece that was read from a socket. If the lane was lost, returns
    /// false and keeps the piece for [`SendingLanes::carry_again`].
    pub(super) fn carry(&mut self, number: u16, data: Data, token: T, now_ns: u64) -> bool {
        self.held_bytes += u64::from(data.length());
        let order = self.next_order;
        self.next_order += 1;
        self.give(number, order, data, token, now_ns)
    }

    /// Assigns to this lane the next piece that a lost lane carried.
    pub(super) fn carry_again(&mut self, number: u16, now_ns: u64) -> Option<(Data, T)> {
        let (order, (data, token)) = self.again.pop_first()?;
        let carried = self.give(number, order, data, token.clone(), now_ns);
        carried.then_some((data, token))
    }

    fn give(&mut self, number: u16, order: u64, data: Data, token: T, now_ns: u64) -> bool {
        let carries = self.carries(number);
        match self.life.get_mut(number) {
            Some(lane) if carries => {
                if lane.load.under_way.is_empty() {
                    lane.restart(now_ns);
                }
                lane.load.under_way.push_back(Some((order, data, token)));
            }
            _ => {
                self.again.insert(order, (data, token));
            }
        }
        carries
    }

    /// Drops the pieces of a channel that no longer exists.
    pub(super) fn forget(&mut self, channel: u32) {
        let mut freed = 0;
        for (_, lane) in self.life.iter_mut() {
            for slot in &mut lane.load.under_way {
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

    /// Records that the other side acknowledged `frames` frames of the lane.
    pub(super) fn acknowledged(
        &mut self,
        number: u16,
        frames: u64,
        now_ns: u64,
    ) -> Result<(), PeerFault> {
        self.check(number)?;
        let Some(lane) = self.life.get_mut(number) else {
            return Ok(());
        };
        if frames > lane.load.given() {
            return Err(PeerFault::Lane { lane: number });
        }
        let is_first = lane.load.acknowledged == 0 && frames > 0;
        while lane.load.acknowledged < frames {
            lane.load.acknowledged += 1;
            lane.restart(now_ns);
            if let Some(Some((_, data, _))) = lane.load.under_way.pop_front() {
                self.held_bytes -= u64::from(data.length());
            }
        }
        if lane.load.under_way.is_empty() {
            self.life.forget(number);
        }
        // *lane open* has no answer, so the first acknowledgement is the first sign that the other
        // side has accepted the lane.
        if is_first {
            self.life.taken();
        }
        Ok(())
    }

    /// Checks that this side has used the lane number.
    pub(super) fn check(&self, number: u16) -> Result<(), PeerFault> {
        if self.life.was_opened(number) {
            return Ok(());
        }
        Err(PeerFault::Lane { lane: number })
    }

    /// Records that the lane's connection closed, or could not be established. If the lane has sent
    /// its end, it waits for its last acknowledgement. Otherwise its frames are sent again.
    pub(super) fn over(&mut self, number: u16, now_ns: u64) {
        self.life.over(number, true, now_ns);
        self.send_again();
    }

    /// Records the loss of a lane; its frames are sent again. Returns false if the lane was lost
    /// before.
    pub(super) fn lose(&mut self, number: u16, now_ns: u64) -> bool {
        let news = self.life.lose(number, now_ns);
        self.send_again();
        news
    }

    /// Handles a new control lane. Messages on the old one may be lost.
    pub(super) fn resumed(&mut self, now_ns: u64) {
        self.life.resumed(now_ns);
        self.send_again();
    }

    /// Returns the next action. `waits` is true if bytes wait for a lane.
    pub(super) fn poll(&mut self, waits: bool, now_ns: u64) -> Option<Action> {
        let action = self.life.poll(waits && self.life.wanted() > 0, now_ns);
        self.send_again();
        action
    }

    fn send_again(&mut self) {
        let dropped = self.life.take_dropped().into_iter();
        let frames = dropped.flat_map(|frames| frames.under_way);
        for (order, data, token) in frames.flatten() {
            if planted(Mistake::LostChunkForgotten) {
                self.held_bytes -= u64::from(data.length());
                continue;
            }
            self.again.insert(order, (data, token));
        }
    }
}
