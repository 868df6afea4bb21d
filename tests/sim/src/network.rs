//! The network: connections that guarantee only the order of packets.

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

/// Content of a connection, as values instead of encoded bytes.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    /// Opens a control lane.
    Offer {
        attempt: u32,
        epoch: u32,
    },
    /// The destination accepts the offer.
    Select,
    /// Describes the VM: from now on the connection belongs to an attempt.
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
        /// How many times the dirty log had been read when the chunk was built.
        readings: u32,
        pages: Vec<(u32, u32)>,
    },
    Mark(u32),
    End(u64),
    /// The other end has closed.
    Closed,
}

/// The purpose of a connection.
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
    /// Packets that were sent to each end and not taken yet.
    to: [Pipe; 2],
    cut: bool,
    /// The factor by which the connection multiplies the network's delay.
    slowness: u64,
    random: Random,
}

/// A time that is never reached.
const NEVER: u64 = u64::MAX;
/// The time after which an end usually detects that the other end is dead.
const LIVENESS_NS: u64 = 1500 * MS;
/// The number of frames that fit into the buffers of a lane.
const WINDOW: usize = 6;

impl Connection {
    pub(crate) fn is_open(&self, side: Side) -> bool {
        self.open[side as usize]
    }

    /// Whether the source must wait before it can send more.
    pub(crate) fn is_full(&self) -> bool {
        self.to[Side::Destination as usize].queue.len() >= WINDOW
    }

    fn pipe(&mut self, to: Side) -> &mut Pipe {
        &mut self.to[to as usize]
    }

    /// Takes the next packet for `to`, if it has arrived.
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
                // Lanes have different delays, so data on one lane can arrive before older data on
                // another lane.
                Kind::Lane(_) => slowness,
            },
            random,
        });
        id
    }

    /// Sends a packet.
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

    /// Closes one end. Packets that this end has sent may still arrive; if `torn` is set, some or
    /// all of them may be lost, the newest first.
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

    /// One end vanishes without a message; the other end detects that after a while.
    pub(crate) fn vanish(&mut self, id: usize, side: Side) {
        let connection = &mut self.connections[id];
        if std::mem::take(&mut connection.open[side as usize]) {
            connection.lose_tail(side.other());
            self.at(self.now_ns + LIVENESS_NS, Event::Dead { connection: id });
        }
    }

    /// The connection breaks, and the newest packets in flight may be lost.
    pub(crate) fn cut(&mut self, id: usize) {
        for to in [Side::Source, Side::Destination] {
            let connection = &mut self.connections[id];
            connection.lose_tail(to);
            // Sometimes one end detects the break much later than the other end.
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

    /// Delays all packets to `to`, both those in flight and those that are sent later.
    pub(crate) fn hold(&mut self, id: usize, to: Side, until_ns: u64) {
        let pipe = self.connections[id].pipe(to);
        pipe.held_until_ns = until_ns;
        pipe.last_ns = pipe.last_ns.max(until_ns);
        for (at_ns, _) in &mut pipe.queue {
            *at_ns = (*at_ns).max(until_ns);
        }
        self.at(until_ns, Event::Arrive { connection: id, to });
    }

    /// Drops all packets in flight and all further packets. After a while, both ends detect that
    /// the connection is dead.
    pub(crate) fn swallow(&mut self, id: usize) {
        for to in [Side::Source, Side::Destination] {
            let pipe = self.connections[id].pipe(to);
            pipe.swallows = true;
            for (at_ns, _) in &mut pipe.queue {
                *at_ns = NEVER;
            }
        }
        // On a data lane, the source must first detect that the lane stalls. Both ends detect the
        // dead connection after that.
        let periods = match self.connections[id].kind {
            Kind::Control => 1,
            Kind::Lane(_) => 3,
        };
        let at_ns = self.now_ns + periods * LIVENESS_NS;
        self.at(at_ns, Event::Dead { connection: id });
    }

    pub(crate) fn slow_down(&mut self, id: usize) {
        self.connections[id].slowness *= 10;
    }

    /// Lets each end that is still open detect that the connection is dead.
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

    /// Processes the packets that have arrived at the end `to` of a connection.
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
