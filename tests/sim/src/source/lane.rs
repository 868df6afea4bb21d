//! A lane's thread at the source.

use dunlin_proto::lanes::KeyUsage;
use dunlin_proto::schedule::{ChunkPlan, Work};

use crate::network::{Kind, Packet, Side};
use crate::plan::MS;
use crate::random::Random;
use crate::tally::{FaultKind, Passage};
use crate::world::{Event, World};

/// A lane's thread and its connection.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) connection: Option<usize>,
    does: Does,
    /// Whether the connection was cut, or detected as dead.
    broken: bool,
    /// Whether a step of the lane's thread is scheduled.
    awake: bool,
    frames: u64,
    plan: ChunkPlan,
    read: Vec<(u32, u32)>,
    readings: u32,
    random: Random,
}

#[derive(Debug)]
enum Does {
    Connects,
    Asks,
    Reads,
    Sends(Packet),
}

impl Lane {
    /// The pages of the lane's current chunk.
    fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.plan.ranges.iter().flat_map(|range| {
            let first = range.run.first as u32;
            first..first + range.run.count as u32
        })
    }
}

impl World<'_> {
    pub(super) fn open_lane(&mut self, number: u16) {
        let life = self.attempt().life;
        let stream = (u64::from(life) << 32) + (u64::from(number) << 8) + 3;
        let lane = Lane {
            connection: None,
            does: Does::Connects,
            broken: false,
            awake: true,
            frames: 0,
            plan: ChunkPlan::default(),
            read: Vec::new(),
            readings: 0,
            random: Random::new(self.plan.seed, stream),
        };
        self.attempt().lanes.insert(number, lane);
        let at_ns = self.now_ns + self.plan.latency_ns.1 + MS;
        self.at(at_ns, Event::SourceLane { life, lane: number });
    }

    /// The main thread closes the lane's connection, so that the lane's thread ends.
    pub(super) fn cut_lane(&mut self, number: u16) {
        let Some(lane) = self.attempt().lanes.get_mut(&number) else {
            return;
        };
        lane.broken = true;
        if let Some(connection) = lane.connection {
            // On every second connection, frames in flight can be lost.
            self.close(connection, Side::Source, connection % 2 == 0);
        }
        self.wake_lane(number);
    }

    pub(super) fn wake_lanes(&mut self) {
        let waiting = self.attempt().lanes.iter().filter(|(_, lane)| !lane.awake);
        for number in waiting.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.wake_lane(number);
        }
    }

    fn wake_lane(&mut self, number: u16) {
        let attempt = self.attempt();
        let life = attempt.life;
        if let Some(lane) = attempt.lanes.get_mut(&number) {
            lane.awake = true;
            let after_ns = lane.random.below(MS);
            self.at(
                self.now_ns + after_ns,
                Event::SourceLane { life, lane: number },
            );
        }
    }

    /// The lane's thread detects that its connection is dead.
    pub(crate) fn source_lane_broke(&mut self, connection: usize, number: u16) {
        if let Some(attempt) = &mut self.source.attempt
            && let Some(lane) = attempt.lanes.get_mut(&number)
            && lane.connection == Some(connection)
        {
            lane.broken = true;
            self.wake_lane(number);
        }
    }

    /// The lane's buffers have room again.
    pub(crate) fn source_lane_has_room(&mut self, connection: usize, number: u16) {
        if let Some(attempt) = &mut self.source.attempt
            && let Some(lane) = attempt.lanes.get_mut(&number)
            && lane.connection == Some(connection)
            && !lane.awake
        {
            self.wake_lane(number);
        }
    }

    /// One step of a lane's thread.
    pub(crate) fn source_lane(&mut self, life: u32, number: u16) {
        let Some(attempt) = self.source.attempt.as_mut().filter(|a| a.life == life) else {
            return;
        };
        let Some(lane) = attempt.lanes.get_mut(&number) else {
            return;
        };
        lane.awake = false;
        if lane.broken {
            self.lane_over(number, false);
            return;
        }
        match lane.does {
            Does::Connects => self.lane_connects(number),
            Does::Asks => self.lane_asks(number),
            Does::Reads => self.lane_reads(number),
            Does::Sends(_) => self.lane_sends(number),
        }
    }

    fn lane(&mut self, number: u16) -> &mut Lane {
        let lane = self.attempt().lanes.get_mut(&number);
        lane.expect("each step of a lane first checks that the lane exists")
    }

    /// The thread continues after `after_ns`.
    fn lane_goes_on(&mut self, number: u16, after_ns: u64) {
        let life = self.attempt().life;
        self.lane(number).awake = true;
        self.at(
            self.now_ns + after_ns,
            Event::SourceLane { life, lane: number },
        );
    }

    fn lane_connects(&mut self, number: u16) {
        let refused = self.now_ns < self.no_lanes_until_ns;
        if refused {
            self.struck.insert(FaultKind::NoNewLanes);
        }
        if refused || !self.destination.up {
            self.lane_over(number, false);
            return;
        }
        let connection = self.connect(Kind::Lane(number));
        let attempt = self.attempt().number;
        self.lane(number).connection = Some(connection);
        self.lane(number).does = Does::Asks;
        let open = Packet::Open {
            attempt,
            lane: number,
        };
        self.send(connection, Side::Destination, open);
        self.lane_goes_on(number, MS);
    }

    fn lane_asks(&mut self, number: u16) {
        let (now_ns, limit) = (self.now_ns, self.plan.record_limit);
        let guest = self.source.guest.as_ref();
        let readings = guest.map_or(0, |guest| guest.readings);
        let attempt = self.attempt();
        let Some(lane) = attempt.lanes.get_mut(&number) else {
            return;
        };
        let usage = match limit {
            Some(frames) if lane.frames >= frames => KeyUsage::Spent,
            Some(frames) if lane.frames >= frames / 2 => KeyUsage::NearLimit,
            _ => KeyUsage::Fresh,
        };
        let work = attempt.sending.next(number, usage, now_ns, &mut lane.plan);
        let cut = attempt.sending.schedule().pending_pages() == 0;
        match work {
            Work::Wait => return,
            Work::Stop => {
                self.lane_over(number, false);
                return;
            }
            Work::Chunk => {
                lane.read.clear();
                lane.readings = readings;
                lane.does = Does::Reads;
                let iteration = lane.plan.iteration;
                let pages: Vec<u32> = lane.pages().collect();
                self.check_cut(iteration, readings, &pages);
            }
            Work::Mark(iteration) => lane.does = Does::Sends(Packet::Mark(iteration)),
            Work::End { chunks } => {
                lane.does = Does::Sends(Packet::End(chunks));
                if usage != KeyUsage::Fresh {
                    self.pass(Passage::Replaced);
                }
            }
        }
        self.say(|| format!("source: lane {number}: {work:?}"));
        let after_ns = self.lane(number).random.between(MS / 10, 2 * MS);
        self.lane_goes_on(number, after_ns);
        if cut || self.attempt().sending.due_ns().is_some() {
            self.source_wakes(0);
        }
    }

    /// Reads half of a chunk's pages out of guest memory.
    fn lane_reads(&mut self, number: u16) {
        let (now_ns, paced) = (self.now_ns, self.plan.paced);
        let Some(guest) = self.source.guest.take() else {
            return;
        };
        let readings = guest.readings;
        let lane = self.lane(number);
        let half = lane.plan.pages.div_ceil(2) as usize;
        let next: Vec<u32> = lane.pages().skip(lane.read.len()).take(half).collect();
        let read = next
            .into_iter()
            .map(|page| (page, guest.pages[page as usize]));
        lane.read.extend(read);
        let is_read = lane.read.len() as u64 == lane.plan.pages;
        if is_read && lane.random.chance(25) {
            // Act as if some pages were zero, so that the chunk has room for further pages.
            self.extend_chunk(number, readings);
        }
        let lane = self.lane(number);
        if lane.read.len() as u64 == lane.plan.pages {
            lane.does = Does::Sends(Packet::Chunk {
                number: lane.plan.number,
                iteration: lane.plan.iteration,
                readings: lane.readings,
                pages: std::mem::take(&mut lane.read),
            });
        }
        let mut after_ns = lane.random.between(MS, 12 * MS);
        self.source.guest = Some(guest);
        let lane = self.lane(number);
        if matches!(lane.does, Does::Sends(_)) && paced && lane.random.chance(25) {
            after_ns = lane.random.between(100, 900) * MS;
            self.attempt().sending.paced(number, now_ns + after_ns);
        }
        self.lane_goes_on(number, after_ns);
    }

    fn extend_chunk(&mut self, number: u16, readings: u32) {
        let attempt = self.attempt();
        let Some(lane) = attempt.lanes.get_mut(&number) else {
            return;
        };
        let before = lane.plan.pages as usize;
        let room = lane.random.between(1, 16);
        if !attempt.sending.schedule_mut().extend(&mut lane.plan, room) {
            return;
        }
        let iteration = lane.plan.iteration;
        let at_cut = lane.readings;
        let added: Vec<u32> = lane.pages().skip(before).collect();
        self.check_cut(iteration, readings, &added);
        if readings != at_cut {
            let text = format!("a chunk of lane {number} gets pages after the dirty log was read");
            self.violate("I4", text);
        }
    }

    fn lane_sends(&mut self, number: u16) {
        let Some(connection) = self.lane(number).connection else {
            return;
        };
        if self.connections[connection].is_full() {
            // An event wakes the thread when there is room.
            return;
        }
        let lane = self.lane(number);
        let Does::Sends(packet) = std::mem::replace(&mut lane.does, Does::Asks) else {
            return;
        };
        lane.frames += 1;
        let ended = matches!(packet, Packet::End(_));
        self.send(connection, Side::Destination, packet);
        if ended {
            self.close(connection, Side::Source, false);
            self.lane_over(number, true);
        } else {
            self.lane_goes_on(number, MS / 10);
        }
    }

    fn lane_over(&mut self, number: u16, in_order: bool) {
        let now_ns = self.now_ns;
        let attempt = self.attempt();
        let lane = attempt.lanes.remove(&number);
        attempt.sending.thread_ended(number, in_order, now_ns);
        if let Some(connection) = lane.and_then(|lane| lane.connection) {
            self.close(connection, Side::Source, true);
        }
        self.say(|| format!("source: lane {number} is over, in order: {in_order}"));
        self.source_wakes(0);
    }
}
