//! The state of a run: the time, the scheduled events, and how the run ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::check::{Marks, Violation};
use crate::destination::DestinationHost;
use crate::guest::Guest;
use crate::network::{Connection, Side};
use crate::plan::{MS, Moment, Plan};
use crate::random::Random;
use crate::source::SourceHost;
use crate::tally::{End, FaultKind, Passage, Tally};

/// An event that is scheduled for a time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A packet may have arrived at an end of a connection.
    Arrive { connection: usize, to: Side },
    /// An end detects that its connection is dead.
    Dead { connection: usize },
    /// The guest writes.
    Write,
    /// A step of a process's main thread.
    Main { side: Side, life: u32 },
    /// A step of a lane's thread at the source.
    SourceLane { life: u32, lane: u16 },
    /// A step of a lane's thread at the destination.
    DestinationLane { session: u32, lane: u16 },
    /// The plan's fault of this index is injected.
    Fault(usize),
    /// A crashed process is restarted.
    Restart(Side),
    /// The next attempt starts.
    Begin,
    /// The operator decides.
    Operator { life: u32 },
}

#[derive(Debug)]
struct Due {
    at_ns: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.order).cmp(&(other.at_ns, other.order))
    }
}

/// Two hosts and the network between them.
pub(crate) struct World<'a> {
    pub(crate) plan: &'a Plan,
    line: Option<&'a mut dyn FnMut(&str)>,
    pub(crate) now_ns: u64,
    due: BinaryHeap<Reverse<Due>>,
    scheduled: u64,
    pub(crate) connections: Vec<Connection>,
    pub(crate) delayed_until_ns: u64,
    pub(crate) no_lanes_until_ns: u64,
    /// The time until which each side's main thread is stopped.
    pub(crate) stalled_until_ns: [u64; 2],
    /// When the last injected fault ends.
    pub(crate) disturbed_until_ns: u64,
    pub(crate) random: Random,
    pub(crate) source: SourceHost,
    pub(crate) destination: DestinationHost,
    /// The state of the invariants' checks.
    pub(crate) marks: Marks,
    pub(crate) failure: Option<Violation>,
    pub(crate) seen: BTreeSet<Moment>,
    pub(crate) armed: BTreeSet<FaultKind>,
    /// Whether the run is in its quiet phase, in which no further faults are injected.
    pub(crate) quiet: bool,
    pub(crate) struck: BTreeSet<FaultKind>,
    pub(crate) ends: Vec<End>,
    pub(crate) passages: BTreeSet<Passage>,
    /// When the run ends; `None` until its outcome is clear.
    pub(crate) over_ns: Option<u64>,
}

/// How long the run continues after its outcome is clear, so that packets in flight can arrive.
const GRACE_NS: u64 = 8000 * MS;
/// A time limit far above the virtual time of the longest run.
const LONGEST_NS: u64 = 300_000 * MS;
const STEPS_MAX: u64 = 400_000;

impl<'a> World<'a> {
    pub(crate) fn new(plan: &'a Plan, line: Option<&'a mut dyn FnMut(&str)>) -> Self {
        Self {
            plan,
            line,
            now_ns: 0,
            due: BinaryHeap::new(),
            scheduled: 0,
            connections: Vec::new(),
            delayed_until_ns: 0,
            no_lanes_until_ns: 0,
            stalled_until_ns: [0; 2],
            disturbed_until_ns: 0,
            random: Random::new(plan.seed, 2),
            source: SourceHost::new(Guest::new(plan.seed, plan.pages, plan.paused)),
            destination: DestinationHost::default(),
            marks: Marks::default(),
            failure: None,
            seen: BTreeSet::new(),
            armed: BTreeSet::new(),
            quiet: false,
            struck: BTreeSet::new(),
            ends: Vec::new(),
            passages: BTreeSet::new(),
            over_ns: None,
        }
    }

    pub(crate) fn play(mut self) -> Result<Tally, Violation> {
        self.at(0, Event::Begin);
        self.at(self.plan.write_every_ns, Event::Write);
        let mut steps = 0;
        while let Some(Reverse(due)) = self.due.pop() {
            if self.over_ns.is_some_and(|over_ns| due.at_ns > over_ns) {
                break;
            }
            self.now_ns = due.at_ns;
            steps += 1;
            self.step(due.event);
            self.check_step();
            if steps > STEPS_MAX || self.now_ns > LONGEST_NS {
                self.violate("liveness", "the run does not end".into());
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        self.conclude();
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(self.tally(steps)),
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrive { connection, to } => self.arrive(connection, to),
            Event::Dead { connection } => self.found_dead(connection),
            Event::Write => self.guest_writes(),
            Event::Main { side, life } => match side {
                Side::Source => self.source_main(life),
                Side::Destination => self.destination_main(life),
            },
            Event::SourceLane { life, lane } => self.source_lane(life, lane),
            Event::DestinationLane { session, lane } => self.destination_lane(session, lane),
            Event::Fault(index) => self.strike(index),
            Event::Restart(Side::Source) => self.source_restarts(),
            Event::Restart(Side::Destination) => self.destination_restarts(),
            Event::Begin => self.begin_attempt(),
            Event::Operator { life } => self.operator(life),
        }
    }

    fn guest_writes(&mut self) {
        let burst = self.plan.burst;
        let Some(guest) = &mut self.source.guest else {
            return;
        };
        if guest.running {
            guest.write(burst);
        }
        let slowed = 100 / (100 - self.source.throttle()).max(1);
        let next_ns = self.now_ns + self.plan.write_every_ns * slowed;
        self.at(next_ns, Event::Write);
    }

    pub(crate) fn at(&mut self, at_ns: u64, event: Event) {
        self.scheduled += 1;
        self.due.push(Reverse(Due {
            at_ns: at_ns.max(self.now_ns),
            order: self.scheduled,
            event,
        }));
    }

    /// Schedules an event after a short random time.
    pub(crate) fn soon(&mut self, event: Event) {
        let at_ns = self.now_ns + self.random.below(MS);
        self.at(at_ns, event);
    }

    /// The duration of a journal write.
    pub(crate) fn sync_ns(&mut self) -> u64 {
        let longest_ms = if self.plan.slow_disk { 60 } else { 6 };
        self.random.between(1, longest_ms) * MS
    }

    pub(crate) fn say(&mut self, line: impl FnOnce() -> String) {
        if let Some(write) = &mut self.line {
            let now_ns = self.now_ns;
            let (ms, us) = (now_ns / MS, now_ns / 1000 % 1000);
            write(&format!("{ms:6}.{us:03}  {}", line()));
        }
    }

    /// Schedules the faults that wait for `moment`.
    pub(crate) fn moment(&mut self, moment: Moment) {
        if !self.seen.insert(moment) {
            return;
        }
        for (index, fault) in self.plan.faults.iter().enumerate() {
            if fault.moment == moment {
                self.at(self.now_ns + fault.after_ns, Event::Fault(index));
            }
        }
    }

    pub(crate) fn pass(&mut self, passage: Passage) {
        self.passages.insert(passage);
    }

    /// Ends the run after [`GRACE_NS`]. Called when the outcome of the run is clear.
    pub(crate) fn settle(&mut self) {
        let over_ns = self.now_ns + GRACE_NS;
        self.over_ns.get_or_insert(over_ns);
    }

    fn tally(&self, steps: u64) -> Tally {
        fn once<K: Ord + Copy>(seen: impl IntoIterator<Item = K>) -> BTreeMap<K, u64> {
            seen.into_iter().map(|key| (key, 1)).collect()
        }
        Tally {
            runs: 1,
            steps,
            virtual_ns: u128::from(self.now_ns),
            faults: once(self.struck.iter().copied()),
            ends: once(self.ends.iter().copied()),
            passages: once(self.passages.iter().copied()),
        }
    }
}
