//! The network: connections that keep their order and nothing else.

use std::collections::VecDeque;

use dunlin_proto::control::Message;

use crate::plan::MS;
use crate::random::Random;
use crate::world::{Event, World};

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source = 0,
    Destination = 1,
}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// What a connection carries. Bytes are the codecs' matter; here it is their
/// meaning.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    /// Opens a control lane.
    Offer {
        attempt: u32,
        epoch: u32,
    },
    /// The destination takes it.
    Select,
    /// Describes the VM: from here on it is an attempt.
    Describe,
    Message(Message),
    /// Opens a data lane.
    Open {
        attempt: u32,
        lane: u16,
    },
    /// Pages with the version that each had when it was read.
    Chunk {
        number: u64,
        iteration: u32,
        /// How often the dirty log had been read when it was cut.
        readings: u32,
        pages: Vec<(u32, u32)>,
    },
    Mark(u32),
    End(u64),
    /// Nothing more comes from the other end.
    Closed,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Control,
    Lane(u16),
}

#[derive(Debug, Default)]
struct Pipe {
    queue: VecDeque<(u64, Packet)>,
    last_ns: u64,
    held_until_ns: u64,
    swallows: bool,
}

/// A connection between the two hosts.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) kind: Kind,
    /// Whether each end is open.
    open: [bool; 2],
    /// What is under way to each.
    to: [Pipe; 2],
    cut: bool,
    /// How many times longer than the shortest way its own is.
    slowness: u64,
    random: Random,
}

/// A time that never comes.
const NEVER: u64 = u64::MAX;
/// After this, a dead connection is noticed at the ends that send nothing.
const LIVENESS_NS: u64 = 1500 * MS;
/// Frames that fit into a lane's buffers.
const WINDOW: usize = 6;

impl Connection {
    pub(crate) fn is_open(&self, side: Side) -> bool {
        self.open[side as usize]
    }

    /// Whether the source has to wait before it can send more.
    pub(crate) fn is_full(&self) -> bool {
        self.to[Side::Destination as usize].queue.len() >= WINDOW
    }

    fn pipe(&mut self, to: Side) -> &mut Pipe {
        &mut self.to[to as usize]
    }

    /// Takes the next packet for `to`, if it has come.
    pub(crate) fn take(&mut self, to: Side, now_ns: u64) -> Option<Packet> {
        let queue = &mut self.pipe(to).queue;
        if queue.front()?.0 > now_ns {
            return None;
        }
        queue.pop_front().map(|(_, packet)| packet)
    }
}

impl World<'_> {
    /// A new connection; both ends are open.
    pub(crate) fn connect(&mut self, kind: Kind) -> usize {
        let id = self.connections.len();
        let mut random = Random::new(self.plan.seed, 1000 + id as u64);
        let slowness = random.pick(&[1, 1, 2, 5]);
        self.connections.push(Connection {
            kind,
            open: [true, true],
            to: [Pipe::default(), Pipe::default()],
            cut: false,
            slowness: match kind {
                Kind::Control => 1,
                // Lanes overtake each other.
                Kind::Lane(_) => slowness,
            },
            random,
        });
        id
    }

    /// Puts a packet on its way.
    pub(crate) fn send(&mut self, id: usize, to: Side, packet: Packet) {
        if self.connections[id].is_open(to.other()) && !self.connections[id].cut {
            self.put(id, to, packet, 0);
        }
    }

    fn put(&mut self, id: usize, to: Side, packet: Packet, extra_ns: u64) {
        let (least, most) = self.plan.latency_ns;
        let now_ns = self.now_ns;
        let spike_ns = if now_ns < self.delayed_until_ns {
            60 * MS
        } else {
            0
        };
        let connection = &mut self.connections[id];
        let way_ns = connection.random.between(least, most) * connection.slowness;
        let way_ns = way_ns + spike_ns + extra_ns;
        let pipe = connection.pipe(to);
        if pipe.swallows {
            pipe.queue.push_back((NEVER, packet));
            return;
        }
        let at_ns = (now_ns + way_ns).max(pipe.last_ns).max(pipe.held_until_ns);
        pipe.last_ns = at_ns;
        pipe.queue.push_back((at_ns, packet));
        self.at(at_ns, Event::Arrive { connection: id, to });
    }

    /// Closes one end. What it has sent may still come; if it is torn rather
    /// than closed, the last of it may not.
    pub(crate) fn close(&mut self, id: usize, side: Side, torn: bool) {
        let connection = &mut self.connections[id];
        if !std::mem::take(&mut connection.open[side as usize]) || connection.cut {
            return;
        }
        let to = side.other();
        if torn && !connection.pipe(to).swallows {
            connection.lose_tail(to);
        }
        self.put(id, to, Packet::Closed, 0);
    }

    /// One end is gone without a word; the other finds out in time.
    pub(crate) fn vanish(&mut self, id: usize, side: Side) {
        let connection = &mut self.connections[id];
        if std::mem::take(&mut connection.open[side as usize]) {
            connection.lose_tail(side.other());
            self.at(self.now_ns + LIVENESS_NS, Event::Dead { connection: id });
        }
    }

    /// The connection dies, and some of what is under way with it.
    pub(crate) fn cut(&mut self, id: usize) {
        for to in [Side::Source, Side::Destination] {
            let connection = &mut self.connections[id];
            connection.lose_tail(to);
            // Now and then one end hears nothing of it for long.
            let extra_ns = if connection.random.chance(15) {
                connection.random.between(0, LIVENESS_NS)
            } else {
                0
            };
            if connection.is_open(to) {
                self.put(id, to, Packet::Closed, extra_ns);
            }
        }
        self.connections[id].cut = true;
    }

    /// What is sent to `to` from now on, and what is under way, waits.
    pub(crate) fn hold(&mut self, id: usize, to: Side, until_ns: u64) {
        let pipe = self.connections[id].pipe(to);
        pipe.held_until_ns = until_ns;
        pipe.last_ns = pipe.last_ns.max(until_ns);
        for (at_ns, _) in &mut pipe.queue {
            *at_ns = (*at_ns).max(until_ns);
        }
        self.at(until_ns, Event::Arrive { connection: id, to });
    }

    /// Nothing comes through any more.
    pub(crate) fn swallow(&mut self, id: usize) {
        for to in [Side::Source, Side::Destination] {
            let pipe = self.connections[id].pipe(to);
            pipe.swallows = true;
            for (at_ns, _) in &mut pipe.queue {
                *at_ns = NEVER;
            }
        }
        // A data lane's dead peer is found out later than its standstill is.
        let patience = match self.connections[id].kind {
            Kind::Control => 1,
            Kind::Lane(_) => 3,
        };
        let at_ns = self.now_ns + patience * LIVENESS_NS;
        self.at(at_ns, Event::Dead { connection: id });
    }

    pub(crate) fn slow_down(&mut self, id: usize) {
        self.connections[id].slowness *= 10;
    }

    /// Each end that is left is told that the other is dead.
    pub(crate) fn found_dead(&mut self, id: usize) {
        self.connections[id].cut = true;
        for to in [Side::Source, Side::Destination] {
            let now_ns = self.now_ns;
            if self.connections[id].is_open(to) {
                let pipe = self.connections[id].pipe(to);
                pipe.queue.clear();
                pipe.swallows = false;
                pipe.queue.push_back((now_ns, Packet::Closed));
                self.at(now_ns, Event::Arrive { connection: id, to });
            }
        }
    }

    /// Something may have arrived.
    pub(crate) fn arrive(&mut self, id: usize, to: Side) {
        loop {
            let connection = &mut self.connections[id];
            let kind = connection.kind;
            if !connection.is_open(to) {
                let beyond = connection.take(to, self.now_ns);
                if let (Some(Packet::Chunk { .. }), Kind::Lane(lane)) = (&beyond, kind) {
                    self.late_chunk(lane);
                }
                if beyond.is_none() {
                    return;
                }
                continue;
            }
            match (kind, to) {
                (Kind::Control, _) => {
                    let Some(packet) = connection.take(to, self.now_ns) else {
                        return;
                    };
                    self.control_packet(id, to, packet);
                }
                (Kind::Lane(lane), Side::Source) => {
                    if connection.take(to, self.now_ns).is_none() {
                        return;
                    }
                    self.source_lane_broke(id, lane);
                }
                (Kind::Lane(lane), Side::Destination) => {
                    if self.destination_lane_has_news(id, lane) {
                        return;
                    }
                    let Some(packet) = self.connections[id].take(to, self.now_ns) else {
                        return;
                    };
                    self.lane_opening(id, packet);
                }
            }
        }
    }
}

impl Connection {
    fn lose_tail(&mut self, to: Side) {
        let kept = self
            .random
            .below(self.to[to as usize].queue.len() as u64 + 1);
        self.pipe(to).queue.truncate(kept as usize);
    }
}
