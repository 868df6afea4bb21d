//! The source's lanes.

use thiserror::Error;

use super::lifecycle::{Action, KeyUsage, Lane, Lifecycle, Load, Loss, State, Timeouts};
use crate::control::{ChunkSet, Position, Reached};
use crate::mistake::{Mistake, planted};
use crate::schedule::{ChunkPlan, LaneCourse, Schedule, UnknownChunk, Work};

/// An invalid report from the destination. The destination is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReportError {
    /// The report names a chunk that was never sent.
    #[error(transparent)]
    Chunk(#[from] UnknownChunk),
    /// The report names a lane that was never opened.
    #[error("the destination reported lane {lane}, which was never opened")]
    Lane {
        /// The lane.
        lane: u16,
    },
    /// The report names a mark or an end that was never sent on this lane.
    #[error("the destination reported {position:?} on lane {lane}, but the lane has not sent it")]
    Position {
        /// The lane.
        lane: u16,
        /// The reported position.
        position: Position,
    },
}

/// What a lane has carried, and how much of it is confirmed.
#[derive(Debug)]
struct Progress {
    /// A copy of the schedule's record of the lane.
    course: LaneCourse,
    confirmed: Position,
    /// The time until which the rate cap delays the lane's newest chunk.
    paced_ns: u64,
    /// Whether the lane was given up before it was up, because the last iteration does not need it.
    unwanted: bool,
}

impl Progress {
    fn owes_chunks(&self) -> bool {
        self.course.chunks > self.course.acknowledged
    }

    fn owes_position(&self) -> bool {
        Position::Mark(self.course.mark) > self.confirmed
            || (self.course.ended && self.confirmed != Position::End)
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            course: LaneCourse::default(),
            confirmed: Position::Mark(0),
            paced_ns: 0,
            unwanted: false,
        }
    }
}

impl Load for Progress {
    /// When the timeout for the lane's next confirmation started. If only one chunk is unconfirmed,
    /// and every mark and end is confirmed, the rate cap may have delayed that chunk. The timeout
    /// then starts no earlier than the end of that delay.
    fn unconfirmed_since(lane: &Lane<Self>) -> Option<u64> {
        let progress = &lane.load;
        let course = &progress.course;
        if course.chunks == course.acknowledged + 1 && !progress.owes_position() {
            return Some(lane.clock_ns().max(progress.paced_ns));
        }
        (progress.owes_chunks() || progress.owes_position()).then_some(lane.clock_ns())
    }
}

/// The lanes of one attempt and the schedule that feeds them.
///
/// Getters: [`Sending::schedule`], [`Sending::up`], [`Sending::opening`],
/// [`Sending::fenced_count`], [`Sending::lost_count`], [`Sending::complete`], [`Sending::due_ns`].
/// Commands: [`Sending::finish`], [`Sending::want`], and those of [`Sending::schedule_mut`]. The
/// lanes' threads call [`Sending::next`] and [`Sending::paced`]. Events: [`Sending::lane_up`],
/// [`Sending::refused`], [`Sending::thread_ended`], [`Sending::acknowledge`], [`Sending::fenced`],
/// [`Sending::unheard`], [`Sending::control_resumed`]. After each event, and at
/// [`Sending::due_ns`], call [`Sending::poll`] until it returns `None`. The caller supplies the
/// time, in nanoseconds from any origin.
#[derive(Debug)]
pub struct Sending {
    schedule: Schedule,
    lanes: Lifecycle<Progress>,
    wanted: u16,
    fenced: u32,
    lost: u32,
    given_up: bool,
}

impl Sending {
    /// Creates the state without lanes. No lane is wanted until [`Sending::want`] is called.
    #[must_use]
    pub fn new(schedule: Schedule, timeouts: Timeouts) -> Self {
        Self {
            schedule,
            lanes: Lifecycle::new(Loss::Fenced, timeouts),
            wanted: 0,
            fenced: 0,
            lost: 0,
            given_up: false,
        }
    }

    /// The schedule, with the pending and in-flight pages.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The schedule, to add pages and start iterations.
    pub fn schedule_mut(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// Number of lanes that carry chunks.
    #[must_use]
    pub fn up(&self) -> usize {
        self.lanes.numbers(|lane| lane.is(State::Up)).len()
    }

    /// Number of lanes that are being opened.
    #[must_use]
    pub fn opening(&self) -> usize {
        self.lanes.numbers(|lane| lane.is(State::Opening)).len()
    }

    /// Number of lanes that the destination has reported as fenced. *final* carries this number.
    #[must_use]
    pub fn fenced_count(&self) -> u32 {
        self.fenced
    }

    /// The number of fenced lanes that failed; the other fenced lanes were given up because the
    /// last iteration did not need them.
    #[must_use]
    pub fn lost_count(&self) -> u32 {
        self.lost
    }

    /// Sets how many lanes should carry chunks at the same time.
    pub fn want(&mut self, lanes: u16) {
        self.wanted = lanes;
    }

    /// Makes the current iteration the final one. Gives up lanes that are still being opened if
    /// other lanes are up.
    pub fn finish(&mut self, now_ns: u64) {
        self.schedule.finish();
        if self.up() == 0 {
            return;
        }
        for number in self.lanes.numbers(|lane| lane.is(State::Opening)) {
            if let Some(lane) = self.lanes.get_mut(number) {
                lane.load.unwanted = true;
            }
            self.lanes.lose(number, now_ns);
        }
    }

    /// Whether everything has been sent, so *final* can follow: each lane has
    /// ended, or is lost and all its chunks are confirmed.
    #[must_use]
    pub fn complete(&self) -> bool {
        let is_done = |lane: &Lane<Progress>| {
            lane.has_left() || (lane.is(State::Fencing) && !lane.load.owes_chunks())
        };
        self.schedule.finishing()
            && self.schedule.pending_pages() == 0
            && self.lanes.iter().all(|(_, lane)| is_done(lane))
    }

    /// Returns the next task of lane `number`; see [`Schedule::next`].
    pub fn next(
        &mut self,
        number: u16,
        usage: KeyUsage,
        now_ns: u64,
        plan: &mut ChunkPlan,
    ) -> Work {
        self.lanes.record_usage(number, usage);
        let Some(lane) = self.lanes.get_mut(number) else {
            return Work::Stop;
        };
        if !lane.is_established() {
            return match lane.is(State::Opening) {
                true => Work::Wait,
                false => Work::Stop,
            };
        }
        if lane.is(State::Leaving) {
            self.schedule.leave(number);
        }
        // The lane asks for work, so its last chunk has been sent. If only that chunk is
        // unconfirmed, the timeout starts no earlier than the time at which the rate cap allowed
        // the chunk. If nothing is unconfirmed, the timeout starts now. Otherwise the timeout does
        // not change.
        lane.restart(Progress::unconfirmed_since(lane).unwrap_or(now_ns));
        let work = self.schedule.next(number, plan);
        lane.load.course = self.schedule.course(number).unwrap_or_default();
        if matches!(work, Work::End { .. }) {
            self.lanes.end(number);
        }
        work
    }

    /// Records that the rate cap delayed the last chunk of lane `number` until `until_ns`. The
    /// deadline of earlier chunks does not change.
    pub fn paced(&mut self, number: u16, until_ns: u64) {
        if let Some(lane) = self.lanes.get_mut(number) {
            lane.load.paced_ns = until_ns;
        }
    }

    /// Records that the destination admitted lane `number`. Returns false, without another effect,
    /// if the lane is no longer opening.
    ///
    /// # Errors
    /// The lane was never opened.
    pub fn lane_up(&mut self, number: u16, now_ns: u64) -> Result<bool, ReportError> {
        self.check(number)?;
        if !self.lanes.up(number, now_ns) {
            return Ok(false);
        }
        self.lanes.taken();
        self.schedule.open_lane(number);
        Ok(true)
    }

    /// Records that the destination refused lane `number`, so the lane carried nothing. Returns
    /// whether the lane was still opening. If not, the lane has failed in the meantime, and the
    /// destination may have refused the lane because its connection arrived after the fence.
    ///
    /// # Errors
    /// The lane was never opened.
    pub fn refused(&mut self, number: u16, now_ns: u64) -> Result<bool, ReportError> {
        self.check(number)?;
        let lane = self.lanes.get_mut(number);
        let wanted = lane.is_some_and(|lane| lane.is(State::Opening));
        if wanted {
            self.lanes.remove(number, now_ns);
        }
        Ok(wanted)
    }

    /// Records that the lane's thread ended. `in_order` means that the thread sent *end* and closed
    /// the connection without an error.
    pub fn thread_ended(&mut self, number: u16, in_order: bool, now_ns: u64) {
        self.lanes.over(number, in_order, now_ns);
        self.forget_confirmed();
    }

    /// Handles the chunks that the destination acknowledged and the positions of lanes that it
    /// reported. Returns the number of pages acknowledged for the first time.
    ///
    /// # Errors
    /// The report names a chunk, mark or end that was never sent, or a lane that was never opened.
    pub fn acknowledge(
        &mut self,
        sets: &[ChunkSet],
        reached: &[Reached],
        now_ns: u64,
    ) -> Result<u64, ReportError> {
        let mut pages = 0;
        for set in sets {
            pages += self.schedule.acknowledge(set.first, u64::from(set.count))?;
        }
        for &Reached {
            lane: number,
            position,
        } in reached
        {
            self.check(number)?;
            let Some(course) = self.schedule.course(number) else {
                continue;
            };
            let sent = match position {
                Position::Mark(iteration) => iteration <= course.mark,
                Position::End => course.ended,
            };
            if !sent {
                return Err(ReportError::Position {
                    lane: number,
                    position,
                });
            }
            if let Some(lane) = self.lanes.get_mut(number)
                && lane.load.confirmed < position
            {
                lane.load.confirmed = position;
                lane.restart(now_ns);
            }
        }
        for (number, lane) in self.lanes.iter_mut() {
            let course = self.schedule.course(number).unwrap_or_default();
            if course.acknowledged > lane.load.course.acknowledged {
                lane.restart(now_ns);
            }
            lane.load.course = course;
        }
        self.forget_confirmed();
        Ok(pages)
    }

    /// Records that the destination fenced lane `number` and receives nothing more on it; `acks`
    /// are the lane's last acknowledgements. The lane's unacknowledged pages become pending again.
    /// Returns their number. A repeated call has no effect.
    ///
    /// # Errors
    /// The lane was never opened, or `acks` names a chunk that was never sent.
    pub fn fenced(
        &mut self,
        number: u16,
        acks: &[ChunkSet],
        now_ns: u64,
    ) -> Result<u64, ReportError> {
        self.check(number)?;
        self.acknowledge(acks, &[], now_ns)?;
        let Some(progress) = self.lanes.remove(number, now_ns) else {
            return Ok(0);
        };
        self.fenced += 1;
        self.lost += u32::from(!progress.unwanted);
        Ok(self.schedule.lose_lane(number))
    }

    /// Handles a new control lane. Messages on the old one may be lost. Therefore fences are
    /// requested again, and lanes that have ended and closed are fenced too, because the
    /// destination does not repeat their confirmation.
    pub fn control_resumed(&mut self, now_ns: u64) {
        self.lanes.resumed(now_ns);
    }

    /// Restarts the timeouts of all lanes, because the control lane has carried nothing until now
    /// and the destination could confirm nothing.
    pub fn unheard(&mut self, now_ns: u64) {
        self.lanes.unheard(now_ns);
    }

    /// Returns the next action at `now_ns`. Returns [`Action::GiveUp`] at most once.
    pub fn poll(&mut self, now_ns: u64) -> Option<Action> {
        self.excuse_waiting(now_ns);
        self.lanes.want(self.wanted_now());
        let needed = self.wanted > 0 && !self.is_all_confirmed();
        let action = self.lanes.poll(needed, now_ns);
        match action {
            Some(Action::Fence(number)) if planted(Mistake::NoFence) => {
                self.schedule.lose_lane(number);
            }
            Some(Action::GiveUp) if std::mem::replace(&mut self.given_up, true) => {
                return self.poll(now_ns);
            }
            _ => {}
        }
        action
    }

    /// When [`Sending::poll`] should be called next, if no event occurs before; `None` if it need
    /// not be called.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        match self.given_up {
            true => None,
            false => self.lanes.due_ns(),
        }
    }

    fn check(&self, number: u16) -> Result<(), ReportError> {
        if self.lanes.was_opened(number) {
            return Ok(());
        }
        Err(ReportError::Lane { lane: number })
    }

    /// Removes the lanes that have ended and on which everything is confirmed.
    fn forget_confirmed(&mut self) {
        let is_done =
            |lane: &Lane<Progress>| lane.has_left() && Progress::unconfirmed_since(lane).is_none();
        for number in self.lanes.numbers(is_done) {
            self.lanes.forget(number);
            self.schedule.forget(number);
        }
    }

    /// Restarts the timeouts of the lanes that may be waiting at a mark for the slowest lane.
    /// [`Sending::poll`] calls this function each time, so the timeout of such a lane runs only
    /// after the slowest lane has reached the mark. The slowest lane may be one that is being
    /// fenced: it blocks the other lanes until the destination has fenced it.
    fn excuse_waiting(&mut self, now_ns: u64) {
        let at_destination = |lane: &Lane<Progress>| {
            !lane.is(State::Opening) && lane.load.confirmed != Position::End
        };
        let lanes = self.lanes.iter().filter(|(_, lane)| at_destination(lane));
        let Some(last) = lanes.map(|(_, lane)| lane.load.confirmed).min() else {
            return;
        };
        for (_, lane) in self.lanes.iter_mut() {
            if at_destination(lane) && lane.is_established() && last < lane.load.confirmed {
                lane.restart(now_ns);
            }
        }
    }

    fn is_all_confirmed(&self) -> bool {
        self.schedule.finishing()
            && self.schedule.pending_pages() == 0
            && self.schedule.in_flight_pages() == 0
    }

    /// The number of lanes wanted now. Before the last iteration, it is the number that the caller
    /// set. In the last iteration, it is at most one: a lane is wanted only while pages are pending
    /// and no lane is up.
    fn wanted_now(&self) -> u16 {
        if !self.schedule.finishing() {
            return self.wanted;
        }
        let stranded = self.schedule.pending_pages() > 0 && self.up() == 0;
        self.wanted.min(u16::from(stranded))
    }
}

#[cfg(test)]
mod tests;
