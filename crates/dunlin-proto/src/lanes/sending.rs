//! The lanes at the source.

use std::collections::{BTreeMap, VecDeque};

use thiserror::Error;

use crate::control::{ChunkSet, Place, Reached};
use crate::mistake::{Mistake, planted};
use crate::schedule::{ChunkPlan, Schedule, UnknownChunk, Work};

/// How long the source waits for what; all in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the next confirmation of anything on a lane that has something
    /// under way.
    pub progress_ns: u64,
    /// For a new lane to stand.
    pub open_ns: u64,
    /// Before the first attempt to replace a lost lane; it doubles.
    pub retry_first_ns: u64,
    /// Between attempts, at most.
    pub retry_last_ns: u64,
    /// Without any lane, or for an answer to a fence, before the migration is
    /// given up.
    pub alone_ns: u64,
}

/// What the engine has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open a connection for a lane of this number.
    Open(u16),
    /// Cut this lane's connection, so that its thread ends.
    Cut(u16),
    /// Send *fence* for this lane.
    Fence(u16),
    /// No lane has stood, or a fence has not been answered, for too long: end
    /// the migration.
    GiveUp,
}

/// How much of its cipher's record limit a lane has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUsage {
    /// Enough is left.
    Fresh,
    /// Another should be opened in its place.
    Worn,
    /// It must carry nothing more but its end.
    Spent,
}

/// What the destination reported cannot be. The destination is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReportError {
    /// A chunk that was never sent.
    #[error(transparent)]
    Chunk(#[from] UnknownChunk),
    /// A lane that was never opened.
    #[error(
        "the destination names lane {lane}, which was never opened: the destination does not keep the protocol"
    )]
    Lane {
        /// The lane.
        lane: u16,
    },
    /// A mark or an end that was never sent on this lane.
    #[error(
        "the destination has read {place:?} on lane {lane}, which was not sent: the destination does not keep the protocol"
    )]
    Place {
        /// The lane.
        lane: u16,
        /// How far it claims to have read.
        place: Place,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Opening { since_ns: u64 },
    Up,
    Leaving,
    Fencing { since_ns: u64 },
}

#[derive(Debug)]
struct Lane {
    is: Is,
    /// Whether its thread is still there.
    thread: bool,
    worn: bool,
    confirmed: Place,
    acknowledged: u64,
    /// When something was last confirmed, or given to it when nothing was
    /// under way.
    progress_ns: u64,
    /// Until when the chunk that it was given last is held back.
    paced_ns: u64,
    /// Given up because no iteration comes for which it was opened.
    unwanted: bool,
}

impl Lane {
    fn is_fencing(&self) -> bool {
        matches!(self.is, Is::Fencing { .. })
    }
}

/// The lanes of one attempt and the schedule that feeds them.
///
/// Getters: [`Sending::schedule`], [`Sending::up`], [`Sending::fenced_count`],
/// [`Sending::complete`], [`Sending::due_ns`]. Commands: through
/// [`Sending::schedule_mut`], [`Sending::finish`], [`Sending::want`]. From the lanes' threads:
/// [`Sending::next`], [`Sending::paced`]. Events: [`Sending::lane_up`],
/// [`Sending::refused`], [`Sending::thread_ended`],
/// [`Sending::acknowledge`], [`Sending::fenced`],
/// [`Sending::unheard`], [`Sending::control_resumed`]; after each of them, and when
/// [`Sending::due_ns`] has come, [`Sending::poll`] until it has nothing more
/// to say. Time is the caller's, in nanoseconds from any beginning.
#[derive(Debug)]
pub struct Sending {
    schedule: Schedule,
    patience: Timeouts,
    wanted: u16,
    lanes: BTreeMap<u16, Lane>,
    actions: VecDeque<Action>,
    last_number: u16,
    fenced: u32,
    lost: u32,
    retry_ns: u64,
    retry_at_ns: u64,
    alone_since_ns: Option<u64>,
    given_up: bool,
    /// When the caller was told to come again.
    expected_ns: Option<u64>,
}

impl Sending {
    /// Lanes over `schedule`, none of which is wanted yet.
    #[must_use]
    pub fn new(schedule: Schedule, patience: Timeouts) -> Self {
        Self {
            schedule,
            patience,
            wanted: 0,
            lanes: BTreeMap::new(),
            actions: VecDeque::new(),
            last_number: 0,
            fenced: 0,
            lost: 0,
            retry_ns: patience.retry_first_ns,
            retry_at_ns: 0,
            alone_since_ns: None,
            given_up: false,
            expected_ns: None,
        }
    }

    /// The pages that wait and are under way.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The same, to add pages and begin iterations.
    pub fn schedule_mut(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// How many lanes carry chunks.
    #[must_use]
    pub fn up(&self) -> usize {
        self.count(|lane| lane.is == Is::Up)
    }

    /// How many lanes are being opened.
    #[must_use]
    pub fn opening(&self) -> usize {
        self.count(|lane| matches!(lane.is, Is::Opening { .. }))
    }

    /// Lanes that the destination has reported as fenced, for *final*.
    #[must_use]
    pub fn fenced_count(&self) -> u32 {
        self.fenced
    }

    /// Those of them that failed, and were not just given up because nothing
    /// was left for them to carry.
    #[must_use]
    pub fn lost_count(&self) -> u32 {
        self.lost
    }

    /// How many lanes shall carry chunks at the same time.
    pub fn want(&mut self, lanes: u16) {
        self.wanted = lanes;
    }

    /// The iteration that was begun last is the final one. Lanes that are
    /// still being opened are not waited for, where others stand.
    pub fn finish(&mut self, now_ns: u64) {
        self.schedule.finish();
        if self.up() > 0 {
            let opening = |lane: &Lane| matches!(lane.is, Is::Opening { .. });
            for lane in self.lanes.values_mut().filter(|lane| opening(lane)) {
                lane.unwanted = true;
            }
            self.fail_where(now_ns, opening);
        }
    }

    /// Whether everything has been sent and *final* can follow: each lane has
    /// ended, and of those that are lost it is known what they took along.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.schedule.finishing()
            && self.schedule.pending_pages() == 0
            && self.lanes.iter().all(|(number, lane)| match lane.is {
                Is::Opening { .. } | Is::Up => false,
                Is::Leaving => !lane.thread,
                Is::Fencing { .. } => self
                    .schedule
                    .course(*number)
                    .is_none_or(|course| course.chunks == course.acknowledged),
            })
    }

    /// What `lane` shall do now; see [`Schedule::next`].
    pub fn next(&mut self, number: u16, wear: KeyUsage, now_ns: u64, plan: &mut ChunkPlan) -> Work {
        let outstanding = self.outstanding(number);
        let since_ns = self.unconfirmed_since(number);
        let Some(lane) = self.lanes.get_mut(&number) else {
            return Work::Stop;
        };
        match lane.is {
            Is::Fencing { .. } => return Work::Stop,
            Is::Opening { .. } => return Work::Wait,
            Is::Up | Is::Leaving => {}
        }
        lane.worn |= wear != KeyUsage::Fresh;
        if wear == KeyUsage::Spent {
            lane.is = Is::Leaving;
            self.schedule.leave(number);
        }
        // What was held back has gone by now.
        lane.progress_ns = if outstanding {
            since_ns
        } else {
            lane.progress_ns.max(now_ns)
        };
        let work = self.schedule.next(number, plan);
        if matches!(work, Work::End { .. }) {
            lane.is = Is::Leaving;
        }
        work
    }

    /// `lane` holds the chunk that it was given back until `until_ns`, for a
    /// rate. What went before has its time nonetheless.
    pub fn paced(&mut self, number: u16, until_ns: u64) {
        if let Some(lane) = self.lanes.get_mut(&number) {
            lane.paced_ns = until_ns;
        }
    }

    /// The destination has let `lane` in. A repetition does no harm. Returns
    /// whether it is news.
    ///
    /// # Errors
    /// The lane was never opened.
    pub fn lane_up(&mut self, number: u16, now_ns: u64) -> Result<bool, ReportError> {
        self.known(number)?;
        let Some(lane) = self.lanes.get_mut(&number) else {
            return Ok(false);
        };
        if !matches!(lane.is, Is::Opening { .. }) {
            return Ok(false);
        }
        lane.is = Is::Up;
        lane.progress_ns = now_ns;
        self.retry_ns = self.patience.retry_first_ns;
        self.alone_since_ns = None;
        self.schedule.open_lane(number);
        let worn = |lane: &Lane| lane.is == Is::Up && lane.worn;
        if let Some((&old, lane)) = self.lanes.iter_mut().find(|(_, lane)| worn(lane)) {
            lane.is = Is::Leaving;
            self.schedule.leave(old);
        }
        Ok(true)
    }

    /// The destination has turned `lane` away: it never took part. Returns
    /// whether it was still wanted: one that has failed meanwhile may be refused
    /// only because it comes after its own fence.
    ///
    /// # Errors
    /// The lane was never opened.
    pub fn refused(&mut self, number: u16, now_ns: u64) -> Result<bool, ReportError> {
        self.known(number)?;
        let opening = |lane: &mut Lane| matches!(lane.is, Is::Opening { .. });
        let wanted = self.lanes.get_mut(&number).is_some_and(opening);
        if wanted {
            self.lanes.remove(&number);
            self.actions.push_back(Action::Cut(number));
            self.retry_later(now_ns);
        }
        Ok(wanted)
    }

    /// The lane's thread is over: after its *end* was sent and the connection
    /// closed, or because something failed.
    pub fn thread_ended(&mut self, number: u16, in_order: bool, now_ns: u64) {
        if let Some(lane) = self.lanes.get_mut(&number) {
            lane.thread = false;
            if in_order && lane.is == Is::Leaving {
                self.forget_if_confirmed(number);
            } else if !lane.is_fencing() {
                self.fail(number, now_ns);
            }
        }
    }

    /// The destination acknowledges chunks and tells how far lanes have come.
    /// Returns the pages that this acknowledged for the first time.
    ///
    /// # Errors
    /// It names what was never sent.
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
            place,
        } in reached
        {
            self.known(number)?;
            let Some(course) = self.schedule.course(number) else {
                continue;
            };
            let sent = match place {
                Place::Mark(iteration) => iteration <= course.mark,
                Place::End => course.ended,
            };
            if !sent {
                return Err(ReportError::Place {
                    lane: number,
                    place,
                });
            }
            if let Some(lane) = self.lanes.get_mut(&number)
                && lane.confirmed < place
            {
                lane.confirmed = place;
                lane.progress_ns = lane.progress_ns.max(now_ns);
            }
        }
        for (&number, lane) in &mut self.lanes {
            let now = self.schedule.course(number).unwrap_or_default();
            if now.acknowledged > lane.acknowledged {
                lane.acknowledged = now.acknowledged;
                lane.progress_ns = lane.progress_ns.max(now_ns);
            }
        }
        let leaving = |(_, lane): &(&u16, &Lane)| lane.is == Is::Leaving && !lane.thread;
        let left: Vec<u16> = self.lanes.iter().filter(leaving).map(|(n, _)| *n).collect();
        for number in left {
            self.forget_if_confirmed(number);
        }
        Ok(pages)
    }

    /// The destination can receive nothing more on `lane`, and `acks` are the
    /// last of it. What it was given and is not acknowledged waits again.
    /// Returns how many pages that is. A repetition does no harm.
    ///
    /// # Errors
    /// It names what was never sent.
    pub fn fenced(
        &mut self,
        number: u16,
        acks: &[ChunkSet],
        now_ns: u64,
    ) -> Result<u64, ReportError> {
        self.known(number)?;
        self.acknowledge(acks, &[], now_ns)?;
        let Some(lane) = self.lanes.remove(&number) else {
            return Ok(0);
        };
        if !lane.is_fencing() {
            if lane.thread {
                self.actions.push_back(Action::Cut(number));
            }
            self.retry_later(now_ns);
        }
        self.fenced += 1;
        self.lost += u32::from(!lane.unwanted);
        Ok(self.schedule.lose_lane(number))
    }

    /// A new control lane stands. What was said on the old one may be lost:
    /// fences are asked for again, and for lanes that have ended too, since
    /// nobody repeats their confirmation.
    pub fn control_resumed(&mut self, now_ns: u64) {
        for (&number, lane) in &self.lanes {
            if lane.is_fencing() && !self.actions.contains(&Action::Fence(number)) {
                self.actions.push_back(Action::Fence(number));
            }
        }
        self.fail_where(now_ns, |lane| lane.is == Is::Leaving && !lane.thread);
        self.unheard(now_ns);
    }

    /// Nothing can have been confirmed up to now, since the control lane is
    /// silent: no lane is to blame for the time that has passed.
    pub fn unheard(&mut self, now_ns: u64) {
        for lane in self.lanes.values_mut() {
            lane.progress_ns = lane.progress_ns.max(now_ns);
            if let Is::Opening { since_ns } | Is::Fencing { since_ns } = &mut lane.is {
                *since_ns = now_ns;
            }
        }
    }

    /// The next thing to do at `now_ns`.
    pub fn poll(&mut self, now_ns: u64) -> Option<Action> {
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        self.forgive(now_ns);
        let action = self.decide(now_ns);
        self.expected_ns = self.due_ns();
        action
    }

    fn decide(&mut self, now_ns: u64) -> Option<Action> {
        self.find_stalled(now_ns);
        if self.wants_another() && now_ns >= self.retry_at_ns {
            self.open(now_ns);
        }
        let alone = self.is_alone();
        match self.alone_since_ns {
            None if alone => self.alone_since_ns = Some(now_ns),
            Some(since_ns)
                if alone && now_ns.saturating_sub(since_ns) >= self.patience.alone_ns =>
            {
                self.give_up();
            }
            Some(_) if !alone => self.alone_since_ns = None,
            _ => {}
        }
        self.actions.pop_front()
    }

    /// When [`Sending::poll`] should be asked next, if nothing happens before.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        if self.given_up {
            return None;
        }
        let lanes = self
            .lanes
            .iter()
            .filter_map(|(number, lane)| match lane.is {
                Is::Opening { since_ns } => Some(since_ns + self.patience.open_ns),
                Is::Up | Is::Leaving if self.outstanding(*number) => {
                    Some(self.unconfirmed_since(*number) + self.patience.progress_ns)
                }
                Is::Fencing { since_ns } => Some(since_ns + self.patience.alone_ns),
                Is::Up | Is::Leaving => None,
            });
        let retry = self.wants_another().then_some(self.retry_at_ns);
        let alone = self
            .alone_since_ns
            .map(|since_ns| since_ns + self.patience.alone_ns);
        lanes.chain(retry).chain(alone).min()
    }

    fn count(&self, which: impl Fn(&Lane) -> bool) -> usize {
        self.lanes.values().filter(|lane| which(lane)).count()
    }

    fn known(&self, number: u16) -> Result<(), ReportError> {
        if number == 0 || number > self.last_number {
            return Err(ReportError::Lane { lane: number });
        }
        Ok(())
    }

    /// Whether something that the lane was given is not confirmed.
    fn outstanding(&self, number: u16) -> bool {
        let (Some(course), Some(lane)) = (self.schedule.course(number), self.lanes.get(&number))
        else {
            return false;
        };
        course.chunks > course.acknowledged
            || (course.ended && lane.confirmed != Place::End)
            || Place::Mark(course.mark) > lane.confirmed
    }

    /// Since when nothing of what the lane was given has been confirmed; a
    /// single chunk counts from when it might go.
    fn unconfirmed_since(&self, number: u16) -> u64 {
        let Some(lane) = self.lanes.get(&number) else {
            return 0;
        };
        let alone = self.schedule.course(number).is_some_and(|course| {
            course.chunks == course.acknowledged + 1
                && !course.ended
                && Place::Mark(course.mark) <= lane.confirmed
        });
        if alone {
            lane.progress_ns.max(lane.paced_ns)
        } else {
            lane.progress_ns
        }
    }

    fn forget_if_confirmed(&mut self, number: u16) {
        if !self.outstanding(number) {
            self.lanes.remove(&number);
            self.schedule.forget(number);
        }
    }

    /// A caller that comes much too late was stopped itself, or its host was:
    /// that time counts against nobody. What has come meanwhile may still be
    /// waiting for it.
    fn forgive(&mut self, now_ns: u64) {
        let Some(late_ns) = self.expected_ns.and_then(|at| now_ns.checked_sub(at)) else {
            return;
        };
        let grace_ns = self.patience.progress_ns / 4;
        if late_ns <= grace_ns {
            return;
        }
        let late_ns = late_ns + grace_ns;
        for lane in self.lanes.values_mut() {
            lane.progress_ns += late_ns;
            if let Is::Opening { since_ns } | Is::Fencing { since_ns } = &mut lane.is {
                *since_ns += late_ns;
            }
        }
        if let Some(since_ns) = &mut self.alone_since_ns {
            *since_ns += late_ns;
        }
    }

    /// Lanes that stand still, and not for another's sake, are given up. Those
    /// that may be waiting at a mark get their time from when it is passed.
    fn find_stalled(&mut self, now_ns: u64) {
        // One that is being fenced holds the others up until it is.
        let at_destination =
            |lane: &&Lane| !matches!(lane.is, Is::Opening { .. }) && lane.confirmed != Place::End;
        let last = self
            .lanes
            .values()
            .filter(at_destination)
            .map(|lane| lane.confirmed)
            .min();
        let mut stalled = Vec::new();
        let mut unanswered = false;
        let patience = self.patience;
        for number in self.lanes.keys().copied().collect::<Vec<_>>() {
            let outstanding = self.outstanding(number);
            let since_ns = self.unconfirmed_since(number);
            let Some(lane) = self.lanes.get_mut(&number) else {
                continue;
            };
            match lane.is {
                Is::Fencing { since_ns } => {
                    unanswered |= now_ns.saturating_sub(since_ns) >= patience.alone_ns;
                }
                Is::Opening { since_ns } => {
                    if now_ns.saturating_sub(since_ns) >= patience.open_ns {
                        stalled.push(number);
                    }
                }
                Is::Up | Is::Leaving => {
                    let waits = lane.confirmed != Place::End
                        && last.is_some_and(|last| last < lane.confirmed);
                    if !outstanding || waits {
                        lane.progress_ns = lane.progress_ns.max(now_ns);
                    } else if now_ns.saturating_sub(since_ns) >= patience.progress_ns {
                        stalled.push(number);
                    }
                }
            }
        }
        for number in stalled {
            self.fail(number, now_ns);
        }
        if unanswered {
            self.give_up();
        }
    }

    /// Says once that it is over.
    fn give_up(&mut self) {
        if !std::mem::replace(&mut self.given_up, true) {
            self.actions.push_back(Action::GiveUp);
        }
    }

    fn fail_where(&mut self, now_ns: u64, which: impl Fn(&Lane) -> bool) {
        let failed = self.lanes.iter().filter(|(_, lane)| which(lane));
        for number in failed.map(|(n, _)| *n).collect::<Vec<_>>() {
            self.fail(number, now_ns);
        }
    }

    fn fail(&mut self, number: u16, now_ns: u64) {
        let Some(lane) = self.lanes.get_mut(&number) else {
            return;
        };
        lane.is = Is::Fencing { since_ns: now_ns };
        if lane.thread {
            self.actions.push_back(Action::Cut(number));
        }
        self.actions.push_back(Action::Fence(number));
        self.retry_later(now_ns);
        if planted(Mistake::NoFence) {
            self.schedule.lose_lane(number);
        }
    }

    /// The next attempt to open lanes waits twice as long as the one before;
    /// lanes that are lost together count as one.
    fn retry_later(&mut self, now_ns: u64) {
        if now_ns >= self.retry_at_ns {
            self.retry_at_ns = now_ns + self.retry_ns;
            self.retry_ns = (self.retry_ns * 2).min(self.patience.retry_last_ns);
        }
    }

    fn wants_another(&self) -> bool {
        let useful = !self.schedule.finishing()
            || (self.schedule.pending_pages() > 0 && self.up() + self.opening() == 0);
        let counts = |lane: &Lane| match lane.is {
            Is::Opening { .. } => true,
            Is::Up => !lane.worn,
            Is::Leaving | Is::Fencing { .. } => false,
        };
        useful && self.last_number < u16::MAX && self.count(counts) < usize::from(self.wanted)
    }

    fn open(&mut self, now_ns: u64) {
        self.last_number += 1;
        self.lanes.insert(
            self.last_number,
            Lane {
                is: Is::Opening { since_ns: now_ns },
                thread: true,
                worn: false,
                confirmed: Place::Mark(0),
                acknowledged: 0,
                progress_ns: now_ns,
                paced_ns: 0,
                unwanted: false,
            },
        );
        self.actions.push_back(Action::Open(self.last_number));
        if self.wants_another() {
            self.open(now_ns);
        }
    }

    /// Whether there is work and no lane to carry it.
    fn is_alone(&self) -> bool {
        let done = self.schedule.finishing()
            && self.schedule.pending_pages() == 0
            && self.schedule.in_flight_pages() == 0;
        self.wanted > 0 && !done && self.count(|lane| matches!(lane.is, Is::Up | Is::Leaving)) == 0
    }
}

#[cfg(test)]
mod tests;
