//! The lanes of both sides together, over lossy connections.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Choices;
use super::lanes::{PAGES, TIMEOUTS, key_usage};
use crate::bitmap::Run;
use crate::control::{ChunkSet, Final, Reached};
use crate::lanes::{Action, Fence, KeyUsage, Receiving, Sending};
use crate::schedule::{ChunkPlan, Schedule, Work};

/// A frame on a data lane.
enum Carried {
    /// A chunk: its number, its iteration, and pages with their versions.
    Chunk(u64, u32, Vec<(u64, u32)>),
    Mark(u32),
    End(u64),
}

/// A data lane between the two sides.
#[derive(Default)]
struct Connection {
    in_flight: VecDeque<Carried>,
    /// Whether the lane's thread at the source is running.
    sends: bool,
    /// Whether the lane's thread at the destination is running.
    receives: bool,
    /// Whether the connection is closed, so that nothing more can be sent.
    closed: bool,
    /// The mark at which the destination's thread waits.
    at_mark: Option<u32>,
}

/// A message on the control lane to the source.
enum Report {
    Up(u16),
    Refused(u16),
    Acks(Vec<ChunkSet>, Vec<Reached>),
    Fenced(u16),
}

/// Both sides and the memory of a running guest.
struct Pair {
    sending: Sending,
    receiving: Receiving,
    connections: BTreeMap<u16, Connection>,
    to_source: VecDeque<Report>,
    fences: VecDeque<u16>,
    /// The version of each page at the source.
    guest: Vec<u32>,
    /// The version of each page at the destination.
    copy: Vec<u32>,
    dirty: BTreeSet<u64>,
    finishing: bool,
    now_ns: u64,
}

/// Runs a migration in which the messages on the control lane are correct but arrive late. Checks
/// that no page goes back to an older version (I4), and that the two memories are equal after
/// everything has arrived (I3).
pub fn fuzz_lanes(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut sending = Sending::new(Schedule::new([(0, PAGES)]), TIMEOUTS);
    sending.want(choices.below(3) as u16 + 1);
    let run = Run {
        first: 0,
        count: PAGES,
    };
    sending.schedule_mut().mark_run(0, run);
    let mut pair = Pair {
        sending,
        receiving: Receiving::new(8),
        connections: BTreeMap::new(),
        to_source: VecDeque::new(),
        fences: VecDeque::new(),
        guest: vec![1; PAGES as usize],
        copy: vec![0; PAGES as usize],
        dirty: BTreeSet::new(),
        finishing: false,
        now_ns: 0,
    };
    pair.sending.schedule_mut().begin_iteration();
    pair.tend();
    while choices.more() {
        let chosen = choices.below(pair.connections.len() as u64);
        let lane = pair.connections.keys().nth(chosen as usize).copied();
        let lane = lane.unwrap_or_default();
        match choices.byte() % 16 {
            0 | 1 if !pair.finishing => {
                let page = choices.below(PAGES);
                pair.guest[page as usize] += 1;
                pair.dirty.insert(page);
            }
            2 if !pair.finishing => pair.fetch(),
            13 if !pair.finishing => pair.iterate(false),
            3 if choices.byte() < 32 && !pair.finishing => pair.iterate(true),
            4 => pair.now_ns += choices.below(4_000),
            5 if choices.byte() < 64 => {
                if let Some(connection) = pair.connections.get_mut(&lane) {
                    connection.closed = true;
                }
            }
            6 if choices.byte() < 32 => pair.resume(),
            7 | 8 => pair.hear(),
            9 => pair.fence(),
            10..=12 => pair.deliver(lane),
            _ => pair.work(lane, key_usage(&mut choices)),
        }
        pair.tend();
    }
    pair.settle();
}

impl Pair {
    /// Executes the actions of the source's lanes.
    fn tend(&mut self) {
        while let Some(action) = self.sending.poll(self.now_ns) {
            match action {
                Action::Open(lane) => {
                    let connection = Connection {
                        sends: true,
                        ..Connection::default()
                    };
                    self.connections.insert(lane, connection);
                    self.to_source.push_back(match self.receiving.admit(lane) {
                        Ok(()) => Report::Up(lane),
                        Err(_) => Report::Refused(lane),
                    });
                    let admitted = self.receiving.open().any(|open| open == lane);
                    if let Some(connection) = self.connections.get_mut(&lane) {
                        connection.receives = admitted;
                    }
                }
                Action::Cut(lane) => self.end_thread(lane, false),
                Action::Fence(lane) => self.fences.push_back(lane),
                Action::GiveUp => {}
            }
        }
    }

    /// Ends the lane's thread at the source.
    fn end_thread(&mut self, lane: u16, in_order: bool) {
        let Some(connection) = self.connections.get_mut(&lane) else {
            return;
        };
        connection.closed = true;
        if std::mem::replace(&mut connection.sends, false) {
            self.sending.thread_ended(lane, in_order, self.now_ns);
        }
    }

    /// Reads the dirty log, which clears it.
    fn fetch(&mut self) {
        let schedule = self.sending.schedule_mut();
        for page in std::mem::take(&mut self.dirty) {
            let run = Run {
                first: page,
                count: 1,
            };
            schedule.mark_run(0, run);
        }
    }

    fn iterate(&mut self, last: bool) {
        self.fetch();
        self.sending.schedule_mut().begin_iteration();
        if last {
            self.finishing = true;
            self.sending.finish(self.now_ns);
        }
    }

    /// The lane's thread at the source asks for work and executes it.
    fn work(&mut self, lane: u16, usage: KeyUsage) {
        let Some(connection) = self
            .connections
            .get_mut(&lane)
            .filter(|connection| connection.sends)
        else {
            return;
        };
        if connection.closed {
            self.end_thread(lane, false);
            return;
        }
        let mut plan = ChunkPlan::default();
        match self.sending.next(lane, usage, self.now_ns, &mut plan) {
            Work::Chunk => {
                let mut pages = Vec::new();
                for range in &plan.ranges {
                    let run = range.run;
                    pages.extend((run.first..run.first + run.count).map(|page| {
                        let version = self.guest[page as usize];
                        (page, version)
                    }));
                }
                connection
                    .in_flight
                    .push_back(Carried::Chunk(plan.number, plan.iteration, pages));
            }
            Work::Mark(mark) => connection.in_flight.push_back(Carried::Mark(mark)),
            Work::End { chunks } => {
                connection.in_flight.push_back(Carried::End(chunks));
                self.end_thread(lane, true);
            }
            Work::Wait => {}
            Work::Stop => self.end_thread(lane, false),
        }
    }

    /// The lane's thread at the destination takes the next frame.
    fn deliver(&mut self, lane: u16) {
        let Some(connection) = self
            .connections
            .get_mut(&lane)
            .filter(|connection| connection.receives)
        else {
            return;
        };
        if self.receiving.is_closing(lane) {
            self.gone(lane);
            return;
        }
        if let Some(mark) = connection.at_mark {
            if !self.receiving.may_pass(mark) {
                return;
            }
            connection.at_mark = None;
        }
        match connection.in_flight.pop_front() {
            None if connection.closed => self.gone(lane),
            None => {}
            Some(Carried::Chunk(number, iteration, pages)) => {
                let checked = self.receiving.check_chunk(lane, number, iteration);
                assert_eq!(checked, Ok(()));
                for &(page, version) in &pages {
                    let held = &mut self.copy[page as usize];
                    assert!(
                        *held <= version,
                        "page {page} goes back to an older version"
                    );
                    *held = version;
                }
                let count = pages.len() as u64;
                assert_eq!(self.receiving.written(lane, number, count), Ok(()));
            }
            Some(Carried::Mark(mark)) => {
                assert_eq!(self.receiving.mark(lane, mark), Ok(()));
                connection.at_mark = Some(mark);
            }
            Some(Carried::End(chunks)) => {
                assert_eq!(self.receiving.ended(lane, chunks), Ok(()));
                connection.receives = false;
                self.gone(lane);
            }
        }
    }

    /// Joins the lane's thread at the destination.
    fn gone(&mut self, lane: u16) {
        if let Some(connection) = self.connections.get_mut(&lane) {
            connection.receives = false;
            connection.closed = true;
            connection.in_flight.clear();
        }
        if self.receiving.gone(lane) {
            self.report_fenced(lane);
        }
    }

    fn report_fenced(&mut self, lane: u16) {
        self.acknowledge();
        self.to_source.push_back(Report::Fenced(lane));
    }

    fn acknowledge(&mut self) {
        let (sets, reached) = self.receiving.take_reports();
        self.to_source.push_back(Report::Acks(sets, reached));
    }

    /// The destination receives *fence*.
    fn fence(&mut self) {
        let Some(lane) = self.fences.pop_front() else {
            return;
        };
        match self.receiving.fence(lane) {
            Fence::Close => self.gone(lane),
            Fence::Answer => self.report_fenced(lane),
        }
    }

    /// The source receives a message. If there is none, the destination acknowledges chunks.
    fn hear(&mut self) {
        let now_ns = self.now_ns;
        match self.to_source.pop_front() {
            None if self.receiving.has_reports() => self.acknowledge(),
            None => {}
            Some(Report::Up(lane)) => assert!(self.sending.lane_up(lane, now_ns).is_ok()),
            Some(Report::Refused(lane)) => assert!(self.sending.refused(lane, now_ns).is_ok()),
            Some(Report::Acks(sets, reached)) => {
                let taken = self.sending.acknowledge(&sets, &reached, now_ns);
                assert!(taken.is_ok(), "{taken:?}");
            }
            Some(Report::Fenced(lane)) => {
                let again = self.sending.fenced(lane, &[], now_ns);
                assert!(again.is_ok(), "{again:?}");
            }
        }
    }

    /// Replaces the control lane. The messages in flight are lost, and the sides repeat them.
    fn resume(&mut self) {
        self.to_source.clear();
        self.fences.clear();
        let open: Vec<u16> = self.receiving.open().collect();
        let (sets, reached) = self.receiving.repeat();
        self.to_source.extend(open.into_iter().map(Report::Up));
        self.to_source.push_back(Report::Acks(sets, reached));
        self.sending.control_resumed(self.now_ns);
    }

    /// Ends the migration without further losses and compares the memories.
    fn settle(&mut self) {
        if !self.finishing {
            self.iterate(true);
        }
        for _ in 0..100_000 {
            self.tend();
            if self.sending.complete() && self.is_complete() {
                assert_eq!(self.copy, self.guest, "the memories differ");
                return;
            }
            for lane in self.connections.keys().copied().collect::<Vec<_>>() {
                self.work(lane, KeyUsage::Fresh);
                self.deliver(lane);
            }
            self.fence();
            self.hear();
            self.now_ns += 10;
        }
        panic!("the migration does not end");
    }

    /// Whether the memory would be complete if *final* were sent now.
    fn is_complete(&mut self) -> bool {
        let (chunks, pages) = self.sending.schedule().kept();
        let last = Final {
            chunks,
            iteration: self.sending.schedule().iteration(),
            sections: 0,
            pages,
            fenced: self.sending.fenced_count(),
            digest: None,
        };
        self.receiving.finish(last);
        let complete = self.receiving.is_complete();
        assert!(complete.is_ok(), "{complete:?}");
        complete == Ok(true)
    }
}
