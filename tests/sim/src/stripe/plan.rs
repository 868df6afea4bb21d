//! The plan: everything that a seed determines in advance.

use crate::plan::MS;
use crate::random::Random;

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrikeKind {
    /// A lane is cut; packets in flight may still arrive.
    LaneCut,
    /// A lane drops everything silently.
    LaneSwallowed,
    /// A lane delays everything for a while.
    LaneHeld,
    /// A lane drops to a thirtieth of its rate, but not below 100 kB/s.
    LaneSlow,
    /// The control lane is cut; messages in flight may still arrive.
    ControlCut,
    /// No lane can be opened for a while.
    NoNewLanes,
    /// The control lane is cut, and no control lane can be opened for a while.
    NoControl,
}

/// A fault.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// The kind.
    pub kind: StrikeKind,
    /// When the fault begins.
    pub at_ns: u64,
    /// How long the fault lasts, if its duration is limited.
    pub for_ns: u64,
}

/// How a channel ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Each direction ends when everything is sent.
    Well,
    /// One side resets its connection some time after the channel was accepted.
    Reset {
        /// 0 is the connecting program.
        side: usize,
        /// The time from the accept to the reset.
        after_ns: u64,
    },
    /// No program accepts the connection on the far side.
    Refused,
}

/// What one side sends on a channel, and how it receives.
#[derive(Clone, Copy, Debug)]
pub struct Talk {
    /// The number of bytes that the side sends.
    pub bytes: u64,
    /// The largest number of bytes that it sends at once.
    pub burst: u64,
    /// The time between two bursts.
    pub pause_ns: u64,
    /// The largest number of bytes that it receives with one read.
    pub bite: u64,
    /// The time between two reads.
    pub bite_ns: u64,
    /// Whether this side stalls: it reads nothing until all channels that have no stalling side
    /// have ended.
    pub stalls: bool,
}

/// A channel.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    /// The side that opens the channel, because a program connects to its listener.
    pub opener: usize,
    /// The number of the listener that accepts the connection.
    pub listener: u64,
    /// When the connection is accepted.
    pub at_ns: u64,
    /// The largest window of the channel.
    pub window_bytes: u64,
    /// What the program at `opener` does, and what the program at the other side does.
    pub talks: [Talk; 2],
    /// How the channel ends.
    pub ending: Ending,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The number of lanes on which each side sends.
    pub lanes: u16,
    /// The smallest delay in one direction.
    pub latency_ns: u64,
    /// The rate of a lane, in bytes per second.
    pub rate: u64,
    /// The bound on the bytes of all channels together.
    pub peer_bytes: u64,
    /// The number of frames after which a lane is near its key's record limit.
    pub lane_frames: u64,
    /// The channels.
    pub channels: Vec<Channel>,
    /// The faults.
    pub strikes: Vec<Strike>,
    /// Whether side 0 opens the lanes of both directions. If not, each side opens the lanes on
    /// which it sends.
    pub one_opener: bool,
}

/// The largest number of channels of a run.
pub(super) const CHANNELS: usize = 64;

impl Plan {
    /// The plan of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed, 100);
        let count = match random.below(8) {
            0 => CHANNELS as u64,
            1 | 2 => random.between(9, 40),
            _ => random.between(1, 8),
        };
        let latency_ns = match random.below(4) {
            0 => random.between(20_000, MS),
            1 => random.between(20 * MS, 60 * MS),
            _ => random.between(MS / 10, 10 * MS),
        };
        let channels = (0..count).map(|_| channel(&mut random, count)).collect();
        let strikes = match random.below(4) {
            0 => Vec::new(),
            _ => {
                let strikes = random.between(1, 6);
                (0..strikes).map(|_| strike(&mut random)).collect()
            }
        };
        let least = dunlin_proto::limits::LEAST_WINDOW_BYTES;
        Self {
            seed,
            lanes: random.between(1, 4) as u16,
            latency_ns,
            rate: random.between(1, 400) << 20,
            peer_bytes: least * (CHANNELS as u64 + random.between(0, 24)),
            lane_frames: match random.below(3) {
                0 => random.between(3, 40),
                _ => u64::MAX,
            },
            channels,
            strikes,
            one_opener: Random::new(seed, 102).chance(50),
        }
    }
}

fn channel(random: &mut Random, of: u64) -> Channel {
    let most = if of > 8 { 300_000 } else { 3_000_000 };
    let at_ns = match random.below(3) {
        0 => 0,
        _ => random.between(0, 300 * MS),
    };
    Channel {
        opener: random.below(2) as usize,
        listener: random.below(2),
        at_ns,
        window_bytes: random.between(200_000, 2_500_000),
        talks: [talk(random, most), talk(random, most / 2)],
        ending: match random.below(10) {
            0 | 1 => Ending::Reset {
                side: random.below(2) as usize,
                after_ns: random.between(0, 400 * MS),
            },
            2 => Ending::Refused,
            _ => Ending::Well,
        },
    }
}

fn talk(random: &mut Random, most: u64) -> Talk {
    let dialogue = random.chance(25);
    Talk {
        bytes: match random.below(6) {
            0 => 0,
            _ if dialogue => random.between(1, 200),
            1 => random.between(1, 20_000),
            _ => random.between(1, most),
        },
        burst: if dialogue {
            random.between(1, 20)
        } else {
            random.between(200, 200_000)
        },
        pause_ns: random.between(10_000, 5 * MS),
        bite: random.between(2_000, 300_000),
        bite_ns: random.between(10_000, 2 * MS),
        stalls: random.chance(8),
    }
}

fn strike(random: &mut Random) -> Strike {
    use StrikeKind::{
        ControlCut, LaneCut, LaneHeld, LaneSlow, LaneSwallowed, NoControl, NoNewLanes,
    };
    let kind = random.pick(&[
        LaneCut,
        LaneCut,
        LaneCut,
        LaneCut,
        LaneSwallowed,
        LaneHeld,
        LaneHeld,
        LaneSlow,
        ControlCut,
        ControlCut,
        ControlCut,
        NoNewLanes,
        NoControl,
    ]);
    let for_ns = match kind {
        NoNewLanes | NoControl if random.chance(30) => random.between(11_000 * MS, 30_000 * MS),
        NoNewLanes | NoControl => random.between(100 * MS, 6_000 * MS),
        LaneHeld => random.between(50 * MS, 9_000 * MS),
        _ => 0,
    };
    Strike {
        kind,
        at_ns: random.between(0, 500 * MS),
        for_ns,
    }
}
