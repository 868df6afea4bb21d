//! The plan of a run: everything that its seed determines in advance.

use dunlin_proto::precopy::AtTimeLimit;

use crate::random::Random;
use crate::tally::FaultKind;

/// A millisecond of virtual time, in nanoseconds, which is the unit of all times here.
pub const MS: u64 = 1_000_000;

/// One run: sizes, rates and faults. [`Plan::new`] draws it from a seed, and
/// [`crate::shrink`] makes it smaller.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Seed of all random choices outside the plan.
    pub seed: u64,
    /// The number of the guest's pages. Each represents [`crate::PAGES_EACH`] real pages, so that
    /// pre-copy takes a realistic time.
    pub pages: u32,
    /// The number of data lanes that the source requests.
    pub lanes: u16,
    /// The time between two bursts of guest writes.
    pub write_every_ns: u64,
    /// The number of writes in a burst.
    pub burst: u32,
    /// The smallest and the largest delay of a connection that is not slow.
    pub latency_ns: (u64, u64),
    /// The number of frames after which a lane must be replaced; `None` for no limit.
    pub record_limit: Option<u64>,
    /// Whether the rate cap sometimes delays lanes.
    pub paced: bool,
    /// Whether the guest survives the death of the process that migrates it.
    pub elsewhere: bool,
    /// Whether the guest's owner has paused it.
    pub paused: bool,
    /// What happens at the time limit of pre-copy.
    pub at_time_limit: AtTimeLimit,
    /// The time limit of pre-copy.
    pub time_limit_ns: u64,
    /// The number of the first attempt. Attempts with lower numbers were aborted before the run.
    pub first_attempt: u32,
    /// Whether the operator takes the VM back after it ran and died at the
    /// destination.
    pub takes_back: bool,
    /// Whether the disks under the journals are slow.
    pub slow_disk: bool,
    /// The faults.
    pub faults: Vec<Fault>,
}

/// A fault of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault.
    pub kind: FaultKind,
    /// The moment after which it is injected.
    pub moment: Moment,
    /// Delay after that moment.
    pub after_ns: u64,
    /// How long the fault lasts, if its duration is limited. For a crash, the time until the
    /// process is restarted.
    pub for_ns: u64,
}

/// A moment that triggers faults. Only its first occurrence in a run triggers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// The first attempt starts.
    Begun,
    /// The source starts to send the guest's memory.
    Copying,
    /// A control lane is lost during pre-copy.
    Lost,
    /// A new control lane has replaced the lost one.
    Resumed,
    /// The source sends *fence* for a lane.
    Fencing,
    /// Pre-copy has converged.
    Converged,
    /// The guest is paused.
    Paused,
    /// The source sends *final*.
    Final,
    /// The destination sends *ready*.
    Ready,
    /// The source sends *commit*.
    Commit,
    /// The destination processes *commit*.
    Taken,
    /// The destination records *running*.
    Decided,
    /// The destination sends *running*.
    Reported,
    /// The source is in doubt.
    Doubt,
    /// The source has destroyed its copy.
    Destroyed,
    /// The source starts to send memory in an attempt after the first.
    Again,
}

const SWITCHOVER: [Moment; 9] = [
    Moment::Converged,
    Moment::Paused,
    Moment::Final,
    Moment::Ready,
    Moment::Commit,
    Moment::Taken,
    Moment::Decided,
    Moment::Reported,
    Moment::Doubt,
];

impl Plan {
    /// The plan of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed, 0);
        let least = random.pick(&[0, MS / 2, 5 * MS]);
        let mut plan = Self {
            seed,
            pages: random.between(1, 10) as u32 * 64,
            lanes: random.between(1, 4) as u16,
            write_every_ns: random.between(1, 12) * MS,
            burst: random.between(1, 24) as u32,
            latency_ns: (least, least + random.between(1, 12) * MS),
            record_limit: random.chance(20).then(|| random.between(6, 20)),
            paced: random.chance(20),
            elsewhere: random.chance(55),
            paused: random.chance(5),
            at_time_limit: if random.chance(40) {
                AtTimeLimit::Stop
            } else {
                AtTimeLimit::Cancel
            },
            time_limit_ns: random.between(300, 2500) * MS,
            first_attempt: random.between(1, 4) as u32,
            takes_back: random.chance(50),
            slow_disk: random.chance(20),
            faults: Vec::new(),
        };
        if random.chance(96) {
            plan.faults = theme(&mut random);
            for _ in 0..random.between(0, 4) {
                let fault = any(&mut random);
                plan.faults.push(fault);
            }
        }
        plan
    }
}

fn fault(
    random: &mut Random,
    kind: FaultKind,
    moment: Moment,
    within_ns: u64,
    for_ms: (u64, u64),
) -> Fault {
    Fault {
        kind,
        moment,
        after_ns: random.between(0, within_ns),
        for_ns: random.between(for_ms.0, for_ms.1) * MS,
    }
}

/// A fault of any kind at a moment at which it can do harm. The kinds in [`RARE`] are drawn more
/// often than others, because they often have no effect.
fn any(random: &mut Random) -> Fault {
    let kind = random.pick(&FaultKind::ALL);
    let kind = if random.chance(45) {
        random.pick(&RARE)
    } else {
        kind
    };
    let (moment, within_ns) = match kind {
        FaultKind::LaneCut
        | FaultKind::LaneHeld
        | FaultKind::LaneSwallowed
        | FaultKind::LaneSlow
        | FaultKind::LaneReplayed
        | FaultKind::NoNewLanes => match random.below(10) {
            0 => (Moment::Again, 200 * MS),
            1 | 2 => (Moment::Paused, 60 * MS),
            _ => (Moment::Copying, 400 * MS),
        },
        FaultKind::SourceJournalFails => (
            random.pick(&[Moment::Commit, Moment::Copying, Moment::Copying]),
            0,
        ),
        FaultKind::DestinationJournalFails => (
            random.pick(&[Moment::Begun, Moment::Paused, Moment::Paused]),
            0,
        ),
        FaultKind::MessagesRepeated | FaultKind::VmmFails | FaultKind::InquiryMisrouted => {
            (Moment::Begun, 0)
        }
        _ => match random.below(10) {
            0..4 => (Moment::Copying, 400 * MS),
            4 => (Moment::Begun, 60 * MS),
            5 => (
                random.pick(&[Moment::Lost, Moment::Resumed, Moment::Fencing]),
                60 * MS,
            ),
            _ => (random.pick(&SWITCHOVER), 40 * MS),
        },
    };
    fault(random, kind, moment, within_ns, (20, 4000))
}

const RARE: [FaultKind; 12] = [
    FaultKind::LaneSlow,
    FaultKind::LaneSlow,
    FaultKind::NoNewLanes,
    FaultKind::LaneHeld,
    FaultKind::ControlHeld,
    FaultKind::SourceStalled,
    FaultKind::Delay,
    FaultKind::SourceCancelled,
    FaultKind::SourceCancelled,
    FaultKind::SourceJournalFails,
    FaultKind::DestinationJournalFails,
    FaultKind::DestinationCancelled,
];

/// Returns faults for one random scenario: they have an effect only together or at a certain
/// moment. Some draws return no fault.
fn theme(random: &mut Random) -> Vec<Fault> {
    use FaultKind as Kind;
    let mut faults = Vec::new();
    let mut add = |random: &mut Random, kind, moment, within_ns, for_ms| {
        faults.push(fault(random, kind, moment, within_ns, for_ms));
    };
    match random.below(25) {
        // The control lane fails shortly after *commit* is sent.
        0 | 1 | 16 | 22 => {
            let kind = random.pick(&[
                Kind::ControlCut,
                Kind::ControlHeld,
                Kind::ControlSwallowed,
                Kind::ControlCut,
            ]);
            let moment = random.pick(&[Moment::Commit, Moment::Taken, Moment::Decided]);
            add(random, kind, moment, 30 * MS, (800, 5000));
            if random.chance(85) {
                add(random, Kind::InquiryMisrouted, Moment::Begun, 0, (0, 0));
            }
        }
        // The destination processes *commit* slowly and may receive an inquiry in the meantime.
        12 | 13 => {
            let kind = random.pick(&[
                Kind::DestinationStalled,
                Kind::ReaderStalled,
                Kind::ReaderStalled,
            ]);
            let moment = random.pick(&[Moment::Ready, Moment::Commit]);
            add(random, kind, moment, 4 * MS, (1300, 4500));
        }
        // The destination dies shortly before or after its decision.
        2 | 3 | 17 | 19 | 23 => {
            let moment = random.pick(&[Moment::Decided, Moment::Decided, Moment::Taken]);
            add(random, Kind::DestinationCrash, moment, 6 * MS, (50, 3000));
            if random.chance(75) {
                let moment = random.pick(&[Moment::Commit, Moment::Taken]);
                add(random, Kind::ControlCut, moment, 10 * MS, (0, 0));
            }
        }
        // The source dies, in most cases before the guest is paused.
        4 | 18 | 20 | 21 => {
            let early = [Moment::Begun, Moment::Copying, Moment::Converged];
            let moment = if random.chance(85) {
                random.pick(&early)
            } else {
                random.pick(&SWITCHOVER)
            };
            add(random, Kind::SourceCrash, moment, 30 * MS, (50, 3000));
        }
        // The destination dies after the source has destroyed its copy.
        5 | 24 => add(
            random,
            Kind::DestinationCrash,
            Moment::Destroyed,
            200 * MS,
            (50, 500),
        ),
        // The control lane is lost during pre-copy, and data lanes are lost or replayed.
        6 | 7 | 14 => {
            let kind = random.pick(&[Kind::ControlCut, Kind::ControlCut, Kind::ControlSwallowed]);
            add(random, kind, Moment::Copying, 150 * MS, (0, 0));
            add(random, Kind::MessagesRepeated, Moment::Begun, 0, (0, 0));
            for _ in 0..random.between(1, 3) {
                let kind = random.pick(&[Kind::LaneCut, Kind::LaneReplayed, Kind::LaneSwallowed]);
                let moment =
                    random.pick(&[Moment::Copying, Moment::Lost, Moment::Lost, Moment::Resumed]);
                add(random, kind, moment, 60 * MS, (0, 0));
            }
        }
        // Several faults of lanes follow one another.
        8 | 15 => {
            for _ in 0..random.between(2, 5) {
                let kind = random.pick(&[
                    Kind::LaneCut,
                    Kind::LaneHeld,
                    Kind::LaneSwallowed,
                    Kind::LaneSlow,
                    Kind::NoNewLanes,
                ]);
                let moment = random.pick(&[Moment::Copying, Moment::Copying, Moment::Paused]);
                add(random, kind, moment, 300 * MS, (100, 5000));
            }
        }
        9 => {
            let moment = random.pick(&SWITCHOVER);
            let kind = random.pick(&[Kind::SourceCancelled, Kind::DestinationCancelled]);
            add(random, kind, moment, 30 * MS, (0, 0));
        }
        10 => add(random, Kind::VmmFails, Moment::Begun, 0, (0, 0)),
        _ => {}
    }
    faults
}
