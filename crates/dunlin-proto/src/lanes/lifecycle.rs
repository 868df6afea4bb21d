//! The life cycle of the lanes on which one side sends.
//!
//! ```text
//!  poll opens      up                   near its limit and replaced,
//!  ──────▶ Opening ──▶ Up ───────────── spent, or not wanted ──▶ Leaving
//!             │        │ └───────────── end ─────┐                 │ end
//!             │        │                         ▼                 ▼
//!             │        │                       Ended ◀─────────────┘
//!             │        │                         │ └── all confirmed: forget ──▶ (gone)
//!             └────────┴──── lose ───────────────┘
//!                              │
//!             Loss::Fenced     │     Loss::Dropped
//!             Fencing ◀────────┴───────────────────────────────────────────────▶ (gone)
//!                └── fenced: remove ───────────────────────────────────────────▶ (gone)
//! ```
//! A lane is lost in each of these cases:
//! - Its connection ends with an error, or before the lane is `Ended`.
//! - The peer reports the loss.
//! - The control lane is lost, and with it perhaps the last confirmation of this lane.
//! - A timeout expires.
//!
//! In `Opening`, the timeout is `open_ns`. In `Up`, `Leaving` and `Ended`, it is `progress_ns`, and
//! it runs only while a confirmation of the peer is outstanding. If a lane is `Fencing` for
//! `alone_ns` without an answer, the action is [`Action::GiveUp`].
//!
//! **Replacement.** A lane that is `Opening`, or `Up` and not near the limit of its key, counts
//! towards the wanted number of lanes. [`Lifecycle::poll`] opens lanes until this number is
//! reached. When a new lane is `Up`, one lane near its limit moves to `Leaving`. Lane numbers
//! ascend and are never reused (I4).
//!
//! **Back-off.** A loss delays the next attempt to open a lane. The delay doubles with each attempt
//! until the peer accepts a lane. Losses during a delay do not extend the delay, so lanes that are
//! lost together count as one attempt.
//!
//! **Late callers.** If a caller polls much later than [`Lifecycle::due_ns`], its
//! process was suspended, and confirmations of the peer may still be queued.
//! Therefore all timeouts restart.

use std::collections::{BTreeMap, VecDeque};

use crate::limits::MAX_LANES;

/// Timeouts and delays, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout for the next confirmation on a lane with unconfirmed frames.
    pub progress_ns: u64,
    /// Timeout for the opening of a lane.
    pub open_ns: u64,
    /// Delay before the first attempt to replace a lost lane. It doubles with each attempt.
    pub retry_first_ns: u64,
    /// Upper limit of the delay before an attempt to replace a lost lane.
    pub retry_last_ns: u64,
    /// Timeout after which the migration or the channels end. It runs while work is pending and no
    /// lane is up, and while a fence is not answered. For a trunk it also runs while the control
    /// lane is lost; a migration has a limit of its own for that.
    pub alone_ns: u64,
}

impl Default for Timeouts {
    /// The values for a tunnel between hosts of one site. After ten seconds without the peer, the
    /// tunnel closes the hypervisor's connections.
    fn default() -> Self {
        const SECOND_NS: u64 = 1_000_000_000;
        Self {
            progress_ns: 5 * SECOND_NS,
            open_ns: 5 * SECOND_NS,
            retry_first_ns: SECOND_NS / 10,
            retry_last_ns: 2 * SECOND_NS,
            alone_ns: 10 * SECOND_NS,
        }
    }
}

/// How much of its key's record limit a lane has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUsage {
    /// Far from the limit.
    Fresh,
    /// Near the limit, so another lane replaces this lane.
    NearLimit,
    /// At the limit, so the lane may send nothing but its *end*.
    Spent,
}

/// What the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Opens a connection for a lane with this number.
    Open(u16),
    /// Closes this lane's connection, which ends its thread.
    Cut(u16),
    /// Sends *fence* for this lane.
    Fence(u16),
    /// Ends the migration or the channels. One of two states has lasted for [`Timeouts::alone_ns`]:
    /// work was pending and no lane was up, or the peer did not answer a fence.
    GiveUp,
}

/// What happens to a lost lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The lane stays until the peer has answered a fence, because a late write on
    /// the lane could overwrite newer data.
    Fenced,
    /// The lane is removed immediately, because the peer drops data that arrives twice.
    Dropped,
}

/// See the diagram at the top of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Opening,
    Up,
    Leaving,
    Ended,
    Fencing,
}

/// The data that the owner of a [`Lifecycle`] keeps for each lane.
pub(crate) trait Load: Default {
    /// When the timeout for the next confirmation started; `None` if no confirmation
    /// is outstanding.
    fn unconfirmed_since(lane: &Lane<Self>) -> Option<u64>;
}

/// One lane.
#[derive(Debug)]
pub(crate) struct Lane<L> {
    state: State,
    /// Whether the lane's connection, or the attempt to open one, still exists.
    connected: bool,
    near_limit: bool,
    /// When the lane's current timeout started.
    clock_ns: u64,
    pub(crate) load: L,
}

impl<L> Lane<L> {
    pub(crate) fn is(&self, state: State) -> bool {
        self.state == state
    }

    /// Whether the lane has been up and is not lost.
    pub(crate) fn is_established(&self) -> bool {
        matches!(self.state, State::Up | State::Leaving | State::Ended)
    }

    /// Whether the lane has sent its end and its connection is closed.
    pub(crate) fn has_left(&self) -> bool {
        self.state == State::Ended && !self.connected
    }

    /// When the lane's current timeout started, for example at the peer's last confirmation.
    pub(crate) fn clock_ns(&self) -> u64 {
        self.clock_ns
    }

    /// Restarts the timeout, because the peer has confirmed something or because the time until now
    /// does not count.
    pub(crate) fn restart(&mut self, now_ns: u64) {
        self.clock_ns = self.clock_ns.max(now_ns);
    }
}

/// The lanes on which one side sends; see the module.
///
/// Events: [`Lifecycle::up`], [`Lifecycle::taken`], [`Lifecycle::record_usage`],
/// [`Lifecycle::end`], [`Lifecycle::forget`], [`Lifecycle::over`], [`Lifecycle::lose`],
/// [`Lifecycle::remove`], [`Lifecycle::resumed`], [`Lifecycle::unheard`]. Commands:
/// [`Lifecycle::want`], [`Lifecycle::leave_all`]. After each, and at [`Lifecycle::due_ns`], call
/// [`Lifecycle::poll`] until it returns `None`. After events that can lose a lane, call
/// [`Lifecycle::take_dropped`].
#[derive(Debug)]
pub(crate) struct Lifecycle<L> {
    loss: Loss,
    timeouts: Timeouts,
    wanted: u16,
    lanes: BTreeMap<u16, Lane<L>>,
    dropped: Vec<L>,
    actions: VecDeque<Action>,
    last_number: u16,
    retry_ns: u64,
    retry_at_ns: u64,
    alone_since_ns: Option<u64>,
    /// When the caller should poll again.
    expected_ns: Option<u64>,
}

impl<L: Load> Lifecycle<L> {
    /// Creates a life cycle without lanes. No lane is wanted until [`Lifecycle::want`] is called.
    pub(crate) fn new(loss: Loss, timeouts: Timeouts) -> Self {
        Self {
            loss,
            timeouts,
            wanted: 0,
            lanes: BTreeMap::new(),
            dropped: Vec::new(),
            actions: VecDeque::new(),
            last_number: 0,
            retry_ns: timeouts.retry_first_ns,
            retry_at_ns: 0,
            alone_since_ns: None,
            expected_ns: None,
        }
    }

    pub(crate) fn wanted(&self) -> u16 {
        self.wanted
    }

    /// Sets how many lanes should carry work at the same time.
    pub(crate) fn want(&mut self, lanes: u16) {
        self.wanted = lanes.min(MAX_LANES);
    }

    pub(crate) fn get(&self, number: u16) -> Option<&Lane<L>> {
        self.lanes.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u16) -> Option<&mut Lane<L>> {
        self.lanes.get_mut(&number)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Lane<L>)> {
        self.lanes.iter().map(|(number, lane)| (*number, lane))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Lane<L>)> {
        self.lanes.iter_mut().map(|(number, lane)| (*number, lane))
    }

    /// The numbers of the lanes for which `which` is true.
    pub(crate) fn numbers(&self, which: impl Fn(&Lane<L>) -> bool) -> Vec<u16> {
        let lanes = self.iter().filter(|(_, lane)| which(lane));
        lanes.map(|(number, _)| number).collect()
    }

    /// Whether a lane with this number was ever opened.
    pub(crate) fn was_opened(&self, number: u16) -> bool {
        (1..=self.last_number).contains(&number)
    }

    /// Whether another lane is wanted but no number is left.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.last_number == u16::MAX && self.lacks_one()
    }

    /// Records that the lane is up and can carry work. The lane replaces one lane that is near its
    /// key's limit, if there is any. Returns whether the lane was `Opening`.
    pub(crate) fn up(&mut self, number: u16, now_ns: u64) -> bool {
        let lane = self.lanes.get_mut(&number);
        let Some(lane) = lane.filter(|lane| lane.is(State::Opening)) else {
            return false;
        };
        lane.state = State::Up;
        lane.restart(now_ns);
        self.alone_since_ns = None;
        let mut lanes = self.lanes.values_mut();
        if let Some(leaving) = lanes.find(|lane| lane.is(State::Up) && lane.near_limit) {
            leaving.state = State::Leaving;
        }
        true
    }

    /// Resets the next delay to `retry_first_ns`, because the peer has accepted a new lane.
    pub(crate) fn taken(&mut self) {
        self.retry_ns = self.timeouts.retry_first_ns;
    }

    /// Records how much of its key the lane has used.
    pub(crate) fn record_usage(&mut self, number: u16, usage: KeyUsage) {
        if let Some(lane) = self.lanes.get_mut(&number)
            && lane.is(State::Up)
        {
            lane.near_limit |= usage != KeyUsage::Fresh;
            if usage == KeyUsage::Spent {
                lane.state = State::Leaving;
            }
        }
    }

    /// Makes every lane that is up leave, because no more work follows.
    pub(crate) fn leave_all(&mut self) {
        for lane in self.lanes.values_mut().filter(|lane| lane.is(State::Up)) {
            lane.state = State::Leaving;
        }
    }

    /// Records that the lane sends its *end*, and nothing after it.
    pub(crate) fn end(&mut self, number: u16) {
        if let Some(lane) = self.lanes.get_mut(&number)
            && matches!(lane.state, State::Up | State::Leaving)
        {
            lane.state = State::Ended;
        }
    }

    /// Records that the peer has confirmed everything on the lane. If the lane has ended, it is
    /// removed.
    pub(crate) fn forget(&mut self, number: u16) {
        let lane = self.lanes.get(&number);
        if lane.is_some_and(|lane| lane.is(State::Ended)) {
            self.lanes.remove(&number);
        }
    }

    /// Records that the lane's connection closed, or could not be opened. `in_order` means that it
    /// closed without an error. If it closed in order and the lane has sent its end, the lane waits
    /// for the last confirmation. In all other cases the lane is lost.
    pub(crate) fn over(&mut self, number: u16, in_order: bool, now_ns: u64) {
        if let Some(lane) = self.lanes.get_mut(&number) {
            lane.connected = false;
            if !in_order || !lane.is(State::Ended) {
                self.lose(number, now_ns);
            }
        }
    }

    /// Records the loss of a lane. Returns false if the lane is already lost or does not exist.
    pub(crate) fn lose(&mut self, number: u16, now_ns: u64) -> bool {
        let lane = self.lanes.get(&number);
        if lane.is_none_or(|lane| lane.is(State::Fencing)) {
            return false;
        }
        if self.loss == Loss::Dropped {
            let dropped = self.remove(number, now_ns);
            self.dropped.extend(dropped);
            return true;
        }
        self.cut(number, now_ns);
        self.actions.push_back(Action::Fence(number));
        if let Some(lane) = self.lanes.get_mut(&number) {
            lane.state = State::Fencing;
            lane.clock_ns = now_ns;
        }
        true
    }

    /// Removes a lane that was fenced, refused, or lost under [`Loss::Dropped`]. Returns the lane's
    /// load; `None` if the lane does not exist.
    pub(crate) fn remove(&mut self, number: u16, now_ns: u64) -> Option<L> {
        if !self.lanes.get(&number)?.is(State::Fencing) {
            self.cut(number, now_ns);
        }
        Some(self.lanes.remove(&number)?.load)
    }

    /// Closes the connection of a lost lane, and delays the next attempt to open a lane.
    fn cut(&mut self, number: u16, now_ns: u64) {
        if self.lanes.get(&number).is_some_and(|lane| lane.connected) {
            self.actions.push_back(Action::Cut(number));
        }
        if now_ns >= self.retry_at_ns {
            self.retry_at_ns = now_ns.saturating_add(self.retry_ns);
            let twice_ns = self.retry_ns.saturating_mul(2);
            self.retry_ns = twice_ns.min(self.timeouts.retry_last_ns);
        }
    }

    /// Returns the loads of the lanes that were lost since the last call, if the policy is
    /// [`Loss::Dropped`].
    pub(crate) fn take_dropped(&mut self) -> Vec<L> {
        std::mem::take(&mut self.dropped)
    }

    /// Handles a new control lane. Messages on the old one may be lost, so fences are requested
    /// again. A lane that has sent its end and is closed counts as lost, because the peer does not
    /// repeat the last confirmation of such a lane.
    pub(crate) fn resumed(&mut self, now_ns: u64) {
        for number in self.numbers(|lane| lane.is(State::Fencing)) {
            if !self.actions.contains(&Action::Fence(number)) {
                self.actions.push_back(Action::Fence(number));
            }
        }
        for number in self.numbers(Lane::has_left) {
            self.lose(number, now_ns);
        }
        self.unheard(now_ns);
    }

    /// Restarts the timeouts of all lanes, because until now this side could not receive a
    /// confirmation of the peer.
    pub(crate) fn unheard(&mut self, now_ns: u64) {
        for lane in self.lanes.values_mut() {
            lane.restart(now_ns);
        }
    }

    /// Returns the next action; `needed` means that pending work needs a lane.
    pub(crate) fn poll(&mut self, needed: bool, now_ns: u64) -> Option<Action> {
        if self.actions.is_empty() {
            self.decide(needed, now_ns);
            self.expected_ns = self.due_ns().map(|due_ns| due_ns.max(now_ns));
        }
        self.actions.pop_front()
    }

    fn decide(&mut self, needed: bool, now_ns: u64) {
        let late_ns = self.expected_ns.map_or(0, |at| now_ns.saturating_sub(at));
        if late_ns > self.timeouts.progress_ns / 4 {
            self.unheard(now_ns);
            self.alone_since_ns = self.alone_since_ns.map(|_| now_ns);
        }
        let mut unanswered = false;
        let is_late = |lane: &Lane<L>| self.deadline_ns(lane).is_some_and(|at| at <= now_ns);
        for number in self.numbers(is_late) {
            if !self.lose(number, now_ns)
                && let Some(fencing) = self.lanes.get_mut(&number)
            {
                fencing.restart(now_ns);
                unanswered = true;
            }
        }
        while self.wants_another() && now_ns >= self.retry_at_ns {
            self.open(now_ns);
        }
        if self.is_too_long_alone(needed, now_ns) || unanswered {
            self.actions.push_back(Action::GiveUp);
        }
    }

    /// The time at which [`Lifecycle::poll`] may return an action even if no event occurs.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let lanes = self.lanes.values();
        let lanes = lanes.filter_map(|lane| self.deadline_ns(lane));
        let retry = self.wants_another().then_some(self.retry_at_ns);
        let alone = self
            .alone_since_ns
            .map(|since_ns| since_ns.saturating_add(self.timeouts.alone_ns));
        lanes.chain(retry).chain(alone).min()
    }

    fn deadline_ns(&self, lane: &Lane<L>) -> Option<u64> {
        let (since_ns, limit_ns) = match lane.state {
            State::Opening => (lane.clock_ns, self.timeouts.open_ns),
            State::Fencing => (lane.clock_ns, self.timeouts.alone_ns),
            State::Up | State::Leaving | State::Ended => {
                (L::unconfirmed_since(lane)?, self.timeouts.progress_ns)
            }
        };
        Some(since_ns.saturating_add(limit_ns))
    }

    /// Whether pending work has waited for [`Timeouts::alone_ns`] without a lane. If so, the
    /// timeout starts again.
    fn is_too_long_alone(&mut self, needed: bool, now_ns: u64) -> bool {
        if !needed || self.lanes.values().any(Lane::is_established) {
            self.alone_since_ns = None;
            return false;
        }
        let since_ns = self.alone_since_ns.get_or_insert(now_ns);
        let too_long = now_ns.saturating_sub(*since_ns) >= self.timeouts.alone_ns;
        if too_long {
            *since_ns = now_ns;
        }
        too_long
    }

    /// Whether another lane is wanted and within the limit. A lane that is near its key's limit,
    /// leaving, ended or fencing does not count as a wanted lane, but it counts against
    /// [`MAX_LANES`] until it is removed.
    fn lacks_one(&self) -> bool {
        let is_fresh =
            |lane: &&Lane<L>| lane.is(State::Opening) || (lane.is(State::Up) && !lane.near_limit);
        let fresh = self.lanes.values().filter(is_fresh).count();
        fresh < usize::from(self.wanted) && self.lanes.len() < usize::from(MAX_LANES)
    }

    fn wants_another(&self) -> bool {
        self.last_number < u16::MAX && self.lacks_one()
    }

    fn open(&mut self, now_ns: u64) {
        self.last_number += 1;
        let lane = Lane {
            state: State::Opening,
            connected: true,
            near_limit: false,
            clock_ns: now_ns,
            load: L::default(),
        };
        self.lanes.insert(self.last_number, lane);
        self.actions.push_back(Action::Open(self.last_number));
    }
}

#[cfg(test)]
mod tests;
