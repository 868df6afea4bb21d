//! When each VM starts, at which rate, and when its migration is cancelled.
//!
//! ```text
//!  waiting ──start──▶ copying ──▶ switchover ──▶ ended
//!                       │  ▲          │
//!                       ▼  └──────────┘
//!                    post-copy ──────────────────▶ ended
//! ```
//!
//! A VM in switchover frees its place for the next VM, because the link has little left to carry. A
//! VM in post-copy keeps its place, because its guest waits for pages. A migration that is already
//! under way takes a place at once, even if none is free.

use std::time::Duration;

use super::shares::{Budgets, shares};

/// What the source says about a VM that moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Copying,
    /// Copying, with the guest paused because the time limit has passed.
    Paused,
    Switchover,
    Postcopy,
}

/// What happens to a VM that exceeds its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLimit {
    Cancel,
    Postcopy,
    Pause,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Number of VMs that copy at the same time.
    pub(super) parallel: usize,
    pub(super) budgets: Budgets,
    /// Time limit for each VM.
    pub(super) time: Option<Duration>,
    pub(super) on_limit: OnLimit,
}

/// An event. VMs are identified by their numbers in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Time has passed.
    Tick,
    Seen(usize, Phase),
    Ended {
        vm: usize,
        /// Whether an operator has to find out where the VM is. If so, this evacuation starts no
        /// further migration.
        is_doubtful: bool,
    },
    /// The operator ends the evacuation early.
    Interrupt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Starts the migration at this rate, in MiB/s; `None` is unlimited.
    Start(usize, Option<u64>),
    Rate(usize, Option<u64>),
    Cancel(usize),
    Postcopy(usize),
    Pause(usize),
}

/// Time between two requests of the same kind for a VM. A request must be repeated if, for example,
/// libvirt refused it because the migration had not begun.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
enum State {
    Waiting,
    Moving(Moving),
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Moving {
    since: Duration,
    phase: Phase,
    rate: Option<u64>,
    /// The last request to libvirt, and its time.
    wanted: Option<(OnLimit, Duration)>,
}

/// Times are measured from an arbitrary fixed moment.
#[derive(Debug)]
pub(super) struct Schedule {
    rules: Rules,
    /// The destination of each VM, and whether its migration is already under way.
    to: Vec<(usize, bool)>,
    vms: Vec<State>,
    /// Whether the evacuation starts no further migration. It still adopts migrations that are
    /// already under way.
    is_halted: bool,
    is_interrupted: bool,
}

impl Schedule {
    /// If `is_halted`, the evacuation starts no migration. It only adopts migrations that are
    /// already under way.
    pub(super) fn new(rules: Rules, to: Vec<(usize, bool)>, is_halted: bool) -> Self {
        Self {
            rules,
            vms: vec![State::Waiting; to.len()],
            to,
            is_halted,
            is_interrupted: false,
        }
    }

    /// Whether no VM moves, and no further migration starts.
    pub(super) fn is_over(&self) -> bool {
        let is_open = |state: &State| match state {
            State::Waiting => !self.is_halted,
            State::Moving(_) => true,
            State::Ended => false,
        };
        !self.vms.iter().any(is_open)
    }

    /// The VMs in switchover or post-copy. An interrupt does not cancel their migrations.
    pub(super) fn finishing(&self) -> Vec<usize> {
        let is_finishing = |vm: &usize| {
            matches!(self.vms[*vm], State::Moving(moving)
                if matches!(moving.phase, Phase::Switchover | Phase::Postcopy))
        };
        (0..self.vms.len()).filter(is_finishing).collect()
    }

    pub(super) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::Seen(vm, phase) => {
                if let State::Moving(moving) = &mut self.vms[vm] {
                    moving.phase = phase;
                }
            }
            Event::Ended { vm, is_doubtful } => {
                self.vms[vm] = State::Ended;
                self.is_halted |= is_doubtful;
            }
            Event::Interrupt => {
                self.is_halted = true;
                self.is_interrupted = true;
            }
        }
        let mut actions = self.requests(now);
        let started = self.start(now);
        let rates = self.rates();
        // First lower rates, then start VMs, then raise rates, to stay within the budgets.
        let (fall, rise): (Vec<_>, Vec<_>) = rates.into_iter().partition(|(falls, _)| *falls);
        actions.extend(fall.into_iter().map(|(_, action)| action));
        for vm in started {
            if let State::Moving(moving) = self.vms[vm] {
                actions.push(Action::Start(vm, moving.rate));
            }
        }
        actions.extend(rise.into_iter().map(|(_, action)| action));
        actions
    }

    /// The requests for copying VMs that have exceeded the time limit, or for all copying VMs after
    /// an interrupt.
    fn requests(&mut self, now: Duration) -> Vec<Action> {
        let (rules, is_interrupted) = (self.rules, self.is_interrupted);
        let mut actions = Vec::new();
        for (vm, state) in self.vms.iter_mut().enumerate() {
            let State::Moving(moving) = state else {
                continue;
            };
            let is_late = rules.time.is_some_and(|time| now - moving.since >= time);
            let wanted = match is_interrupted {
                true => Some(OnLimit::Cancel),
                false => is_late.then_some(rules.on_limit),
            };
            let is_possible = |wanted: &OnLimit| match moving.phase {
                Phase::Copying => true,
                Phase::Paused => *wanted == OnLimit::Cancel,
                Phase::Switchover | Phase::Postcopy => false,
            };
            let Some(wanted) = wanted.filter(is_possible) else {
                continue;
            };
            let is_recent = |(before, at)| before == wanted && now - at < AGAIN;
            if moving.wanted.is_some_and(is_recent) {
                continue;
            }
            moving.wanted = Some((wanted, now));
            actions.push(match wanted {
                OnLimit::Cancel => Action::Cancel(vm),
                OnLimit::Postcopy => Action::Postcopy(vm),
                OnLimit::Pause => Action::Pause(vm),
            });
        }
        actions
    }

    /// Starts as many VMs as there is room for, and returns them.
    fn start(&mut self, now: Duration) -> Vec<usize> {
        let mut started = Vec::new();
        while let Some(next) = self.next() {
            self.vms[next] = State::Moving(Moving {
                since: now,
                phase: Phase::Copying,
                rate: None,
                wanted: None,
            });
            started.push(next);
        }
        let all = self.sharing();
        for (vm, rate) in all.iter().zip(self.shares_of(&all)) {
            if let State::Moving(moving) = &mut self.vms[*vm]
                && started.contains(vm)
            {
                moving.rate = rate;
            }
        }
        started
    }

    /// The VM that starts next, if there is one that may start now.
    fn next(&self) -> Option<usize> {
        let is_waiting = |vm: &usize| matches!(self.vms[*vm], State::Waiting);
        let mut waiting = (0..self.vms.len()).filter(is_waiting);
        if let Some(under_way) = waiting.clone().find(|vm| self.to[*vm].1) {
            return Some(under_way);
        }
        let mut with = self.sharing();
        let next = waiting.next()?;
        let has_place = !self.is_halted && with.len() < self.rules.parallel;
        with.push(next);
        // virsh has no rate below 1 MiB/s, so start no VM if a share would be less.
        let is_enough = || !self.shares_of(&with).contains(&Some(0));
        (has_place && is_enough()).then_some(next)
    }

    /// The VMs that share the budgets. A VM in switchover has no share, because QEMU does not limit
    /// the rate of a switchover.
    fn sharing(&self) -> Vec<usize> {
        let is_sharing = |vm: &usize| matches!(self.vms[*vm], State::Moving(moving) if moving.phase != Phase::Switchover);
        (0..self.vms.len()).filter(is_sharing).collect()
    }

    fn shares_of(&self, vms: &[usize]) -> Vec<Option<u64>> {
        let to: Vec<usize> = vms.iter().map(|vm| self.to[*vm].0).collect();
        shares(&to, self.rules.budgets)
    }

    /// The rates that change, and whether each falls.
    fn rates(&mut self) -> Vec<(bool, Action)> {
        let sharing = self.sharing();
        let mut changed = Vec::new();
        for (vm, rate) in sharing.iter().zip(self.shares_of(&sharing)) {
            if let State::Moving(moving) = &mut self.vms[*vm]
                && moving.rate != rate
            {
                changed.push((rate < moving.rate, Action::Rate(*vm, rate)));
                moving.rate = rate;
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests;
