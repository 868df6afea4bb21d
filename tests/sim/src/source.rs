//! The source's host: successive attempts to migrate the VM, and the process that makes them.

mod control;
mod lane;
mod precopy;
mod switchover;

use std::collections::{BTreeMap, VecDeque};

use dunlin_proto::bitmap::Run;
use dunlin_proto::control::{Final, Message};
use dunlin_proto::journal::SourceRecord;
use dunlin_proto::lanes::{Action, Sending, Timeouts};
use dunlin_proto::precopy::{AtTimeLimit, Goals, Precopy};
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::{Source, SourceAction, SourceEvent};

use crate::guest::Guest;
use crate::journal::Journal;
use crate::network::{Kind, Packet, Side};
use crate::plan::{MS, Moment};
use crate::tally::{End, FaultKind, Passage};
use crate::world::{Event, World};
use control::Link;
use lane::Lane;

const TIMEOUTS: Timeouts = Timeouts {
    progress_ns: 400 * MS,
    open_ns: 700 * MS,
    retry_first_ns: 20 * MS,
    retry_last_ns: 300 * MS,
    alone_ns: 3000 * MS,
};
/// Timeout from the pause to *ready*.
const READY_LIMIT_NS: u64 = 20_000 * MS;

/// The source's host.
#[derive(Debug)]
pub(crate) struct SourceHost {
    /// The source's copy of the VM; `None` after the copy was destroyed or has died.
    pub(crate) guest: Option<Guest>,
    pub(crate) killed: bool,
    pub(crate) journal: Journal<(u32, SourceRecord)>,
    pub(crate) attempt: Option<Attempt>,
    /// The next attempt's number.
    pub(crate) next: u32,
    lives: u32,
    /// The attempt in which the guest was paused, and its memory at that time.
    pub(crate) paused: Option<(u32, Vec<u32>)>,
    /// The epoch of the newest control lane.
    epoch: u32,
    /// How many fault-free attempts the destination refused, because the destination still had
    /// state of the previous attempt.
    turned_away: u32,
}

/// One migration attempt, or its continuation in a restarted process.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) life: u32,
    pub(crate) number: u32,
    pub(crate) machine: Source,
    todo: VecDeque<SourceAction>,
    /// The time until which the main thread is blocked in a call, and that call.
    doing: Option<(u64, Doing)>,
    main_ns: Option<u64>,
    inbox: VecDeque<(usize, Packet)>,
    pub(crate) link: Link,
    pub(crate) said: Vec<Message>,
    sending: Sending,
    lanes: BTreeMap<u16, Lane>,
    passes: Passes,
    closing: Option<u64>,
    last: Option<Final>,
    answer_ns: Option<u64>,
    asked: u32,
    pub(crate) cancelled: bool,
    end: End,
    /// Whether this attempt is free of faults. If so, it must succeed, or the destination must
    /// refuse it.
    clean: bool,
    refused: bool,
    /// Whether the lanes have been given up, so that the attempt must fail.
    gives_up: bool,
}

/// The iterations of an attempt.
#[derive(Debug)]
struct Passes {
    precopy: Precopy,
    began_ns: u64,
    /// When the newest iteration started; `None` before memory is sent.
    pass_ns: Option<u64>,
    acked_pages: u64,
    throttle: u8,
    /// Whether the next iteration has been decided but has not started.
    begins: bool,
}

#[derive(Clone, Copy, Debug)]
enum Doing {
    Begin,
    Record,
    Note,
}

impl SourceHost {
    pub(crate) fn new(guest: Guest) -> Self {
        Self {
            guest: Some(guest),
            killed: false,
            journal: Journal::default(),
            attempt: None,
            next: 0,
            lives: 0,
            paused: None,
            epoch: 0,
            turned_away: 0,
        }
    }

    pub(crate) fn throttle(&self) -> u64 {
        self.attempt
            .as_ref()
            .map_or(0, |attempt| u64::from(attempt.passes.throttle))
    }
}

impl World<'_> {
    fn attempt(&mut self) -> &mut Attempt {
        self.source
            .attempt
            .as_mut()
            .expect("only called while there is an attempt")
    }

    pub(crate) fn begin_attempt(&mut self) {
        if self.source.attempt.is_some() || self.source.guest.is_none() || self.over_ns.is_some() {
            return;
        }
        if self.source.next == 0 {
            self.source.next = self.plan.first_attempt;
            self.moment(Moment::Begun);
        }
        // After two attempts have ended, no further faults are injected, and the next attempt must
        // succeed.
        if self.ends.len() >= 2 {
            self.quiet = true;
            self.armed.clear();
            self.no_lanes_until_ns = 0;
            self.delayed_until_ns = 0;
            self.stalled_until_ns = [0; 2];
            self.destination.stalled_reader = None;
            self.destination_wakes(0);
            self.source.journal.fails = false;
            self.destination.journal.fails = false;
        }
        let number = self.source.next;
        self.source.next += 1;
        self.source.epoch = 1;
        let mut attempt = self.new_attempt(number, Source::Live);
        attempt.clean = self.quiet && self.destination.up;
        attempt.link = Link::connecting(self.now_ns, 3000 * MS);
        attempt.doing = Some((self.now_ns + 2 * MS, Doing::Begin));
        self.say(|| format!("source: attempt {number} begins"));
        self.source.attempt = Some(attempt);
        self.source.journal.begin((number, SourceRecord::Migrating));
        self.source_wakes(2 * MS);
    }

    fn new_attempt(&mut self, number: u32, machine: Source) -> Attempt {
        self.source.lives += 1;
        let pages = u64::from(self.plan.pages);
        let sending = Sending::new(Schedule::new([(0, pages)]), TIMEOUTS);
        let goals = Goals {
            downtime_limit_ns: 120 * MS,
            time_limit_ns: Some(self.plan.time_limit_ns),
            at_time_limit: if self.quiet {
                AtTimeLimit::Stop
            } else {
                self.plan.at_time_limit
            },
            throttle: true,
        };
        Attempt {
            life: self.source.lives,
            number,
            machine,
            todo: VecDeque::new(),
            doing: None,
            main_ns: None,
            inbox: VecDeque::new(),
            link: Link::Down,
            said: Vec::new(),
            sending,
            lanes: BTreeMap::new(),
            passes: Passes {
                precopy: Precopy::new(goals, dunlin_proto::limits::PAGE_BYTES),
                began_ns: self.now_ns,
                pass_ns: None,
                acked_pages: 0,
                throttle: 0,
                begins: false,
            },
            closing: None,
            last: None,
            answer_ns: None,
            asked: 0,
            cancelled: false,
            end: End::Failed,
            clean: false,
            refused: false,
            gives_up: false,
        }
    }

    /// Wakes the main thread after `after_ns`.
    pub(crate) fn source_wakes(&mut self, after_ns: u64) {
        let at_ns = self.now_ns + after_ns;
        let now_ns = self.now_ns;
        if let Some(attempt) = &mut self.source.attempt {
            let life = attempt.life;
            if attempt
                .main_ns
                .is_none_or(|main_ns| main_ns > at_ns || main_ns < now_ns)
            {
                attempt.main_ns = Some(at_ns);
                self.at(
                    at_ns,
                    Event::Main {
                        side: Side::Source,
                        life,
                    },
                );
            }
        }
    }

    /// One step of the main thread.
    pub(crate) fn source_main(&mut self, life: u32) {
        let now_ns = self.now_ns;
        let Some(attempt) = self.source.attempt.as_mut().filter(|a| a.life == life) else {
            return;
        };
        attempt.main_ns = None;
        let stalled_until_ns = self.stalled_until_ns[Side::Source as usize];
        if now_ns < stalled_until_ns {
            self.source_wakes(stalled_until_ns - now_ns);
            return;
        }
        if let Some((until_ns, doing)) = attempt.doing {
            if now_ns < until_ns {
                self.source_wakes(until_ns - now_ns);
                return;
            }
            attempt.doing = None;
            self.source_has_done(doing);
        } else if let Some(action) = attempt.todo.pop_front() {
            self.source_does(action);
        } else if std::mem::take(&mut attempt.passes.begins) {
            self.begin_iteration();
        } else if std::mem::take(&mut self.attempt().gives_up) && self.copies() {
            self.source_feeds(SourceEvent::Failed);
        } else if self
            .source
            .attempt
            .as_mut()
            .is_some_and(|a| std::mem::take(&mut a.cancelled))
        {
            self.source_cancelled();
        } else if let Some((connection, packet)) = self.attempt().inbox.pop_front() {
            self.source_takes(connection, packet);
        } else {
            self.source_waits();
        }
        self.poll_lanes();
        self.may_be_final();
        self.source_goes_on();
    }

    /// Ends the attempt, or schedules the main thread.
    fn source_goes_on(&mut self) {
        let Some(attempt) = &self.source.attempt else {
            return;
        };
        let idle = attempt.doing.is_none() && attempt.todo.is_empty();
        if idle && matches!(attempt.machine, Source::Kept | Source::Released) {
            self.attempt_ended();
            return;
        }
        let after_ns = match attempt.doing {
            Some((until_ns, _)) => until_ns.saturating_sub(self.now_ns),
            None if attempt.passes.begins
                || attempt.gives_up
                || !attempt.todo.is_empty()
                || !attempt.inbox.is_empty() =>
            {
                self.random.below(MS / 2)
            }
            None => match self.source_due_ns() {
                Some(due_ns) => due_ns.saturating_sub(self.now_ns).max(1000),
                None => return,
            },
        };
        self.source_wakes(after_ns);
    }

    /// Passes an event to the attempt's state machine.
    fn source_feeds(&mut self, event: SourceEvent) {
        let attempt = self.attempt();
        let before = attempt.machine;
        match before.on(event) {
            Ok((after, actions)) => {
                attempt.machine = after;
                attempt.todo.extend(actions);
                self.say(|| format!("source: {before:?} + {event:?} = {after:?} {actions:?}"));
            }
            Err(impossible) => self.violate("machine", impossible.to_string()),
        }
    }

    fn source_cancelled(&mut self) {
        self.struck.insert(FaultKind::SourceCancelled);
        if self.attempt().machine.may_cancel() {
            self.attempt().end = End::Cancelled;
        }
        self.source_feeds(SourceEvent::Cancelled);
    }

    /// Whether lanes are in use. This is true from *accept* until *commit* or the end of the
    /// attempt.
    fn copies(&self) -> bool {
        self.source.attempt.as_ref().is_some_and(|attempt| {
            attempt.passes.pass_ns.is_some()
                && matches!(
                    attempt.machine,
                    Source::Live | Source::Recording | Source::Paused | Source::AwaitingReady
                )
        })
    }

    fn poll_lanes(&mut self) {
        while self.copies() {
            let now_ns = self.now_ns;
            let Some(action) = self.attempt().sending.poll(now_ns) else {
                return;
            };
            self.say(|| format!("source: {action:?}"));
            match action {
                Action::Open(lane) => self.open_lane(lane),
                Action::Cut(lane) => self.cut_lane(lane),
                Action::Fence(lane) => {
                    self.moment(Moment::Fencing);
                    self.source_says(Message::Fence { lane });
                }
                Action::GiveUp => self.attempt().gives_up = true,
            }
        }
    }

    fn mark_everything(&mut self) {
        let count = u64::from(self.plan.pages);
        // Discard the dirty log, because the first iteration covers all earlier writes.
        if let Some(guest) = &mut self.source.guest {
            guest.fetch();
        }
        let schedule = self.attempt().sending.schedule_mut();
        schedule.mark_run(0, Run { first: 0, count });
        schedule.begin_iteration();
    }

    fn drop_lanes(&mut self) {
        let lanes = std::mem::take(&mut self.attempt().lanes);
        for lane in lanes.into_values() {
            if let Some(connection) = lane.connection {
                self.close(connection, Side::Source, true);
            }
        }
    }

    fn attempt_ended(&mut self) {
        let Some(attempt) = self.source.attempt.take() else {
            return;
        };
        for lane in attempt.lanes.values() {
            if let Some(connection) = lane.connection {
                self.close(connection, Side::Source, true);
            }
        }
        if let Some(connection) = attempt.link.connection() {
            self.close(connection, Side::Source, false);
        }
        let end = attempt.end;
        self.say(|| format!("source: attempt {} ended: {end}", attempt.number));
        if attempt.machine == Source::Released {
            if end == End::GivenUp {
                self.ends.push(end);
            }
            // At the end of the run, a check tests whether the VM is at the destination and records
            // the outcome. This mark tells the check whether the source was in doubt.
            self.marks.doubted = end == End::MovedAfterDoubt;
            self.settle();
            return;
        }
        self.ends.push(end);
        if end == End::TakenBack {
            self.settle();
            return;
        }
        if attempt.clean {
            self.source.turned_away += 1;
            if !attempt.refused || self.source.turned_away > 5 {
                self.violate("I5", format!("an attempt without faults ended: {end}"));
            }
        }
        let after_ns = self.random.between(20, 400) * MS;
        self.at(self.now_ns + after_ns, Event::Begin);
    }

    /// The source's process dies.
    pub(crate) fn source_crashes(&mut self, silently: bool) {
        let Some(attempt) = self.source.attempt.take() else {
            return;
        };
        self.say(|| format!("source: crashes{}", if silently { " silently" } else { "" }));
        self.source.journal.crash(&mut self.random);
        let connections: Vec<usize> = attempt
            .lanes
            .values()
            .filter_map(|lane| lane.connection)
            .chain(attempt.link.connection())
            .collect();
        for connection in connections {
            if silently {
                self.vanish(connection, Side::Source);
            } else {
                self.close(connection, Side::Source, true);
            }
        }
        if !self.plan.elsewhere && self.source.guest.take().is_some() {
            self.source.killed = true;
            self.settle();
        }
    }

    /// A new process continues from the journal.
    pub(crate) fn source_restarts(&mut self) {
        if self.source.attempt.is_some() || self.over_ns.is_some() {
            return;
        }
        let Some((number, record)) = self.source.journal.durable else {
            // The journal has no record, so the attempt had not sent anything yet.
            self.ends.push(End::TakenOver);
            self.at(self.now_ns + MS, Event::Begin);
            return;
        };
        let (machine, actions) = Source::restarted(record);
        self.say(|| format!("source: restarts, {record}: {machine:?} {actions:?}"));
        let mut attempt = self.new_attempt(number, machine);
        attempt.todo.extend(actions);
        attempt.end = if machine == Source::Kept {
            End::TakenOver
        } else {
            self.pass(Passage::AskedAfterRestart);
            End::KeptAfterDoubt
        };
        self.source.attempt = Some(attempt);
        self.source_wakes(0);
    }

    /// A reader at the source has read a packet on a control lane.
    pub(crate) fn source_reads(&mut self, connection: usize, packet: Packet) {
        // The reader processes acknowledgements itself, so that lanes continue
        // while the main thread is busy.
        let copies = self.copies();
        if let Some(attempt) = &mut self.source.attempt
            && attempt.link.connection() == Some(connection)
        {
            if copies
                && attempt.link.is_up()
                && let Packet::Message(Message::Ack { .. }) = &packet
            {
                self.source_takes(connection, packet);
                self.source_wakes(0);
                return;
            }
            attempt.inbox.push_back((connection, packet));
            self.source_wakes(self.plan.seed % 3 * MS / 10);
        }
    }

    fn open_control(&mut self) -> Option<usize> {
        if !self.destination.up {
            return None;
        }
        let connection = self.connect(Kind::Control);
        let (attempt, epoch) = (self.attempt().number, self.source.epoch);
        self.say(|| format!("source: offers attempt {attempt}, epoch {epoch}, on #{connection}"));
        self.send(
            connection,
            Side::Destination,
            Packet::Offer { attempt, epoch },
        );
        Some(connection)
    }
}
