//! The destination's host: a process that receives sessions and answers inquiries about the
//! recorded ones.

mod control;
mod intake;
mod lane;
mod switchover;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use dunlin_proto::control::Message;
use dunlin_proto::journal::DestinationRecord;
use dunlin_proto::lanes::Receiving;
use dunlin_proto::switchover::{Destination, DestinationAction, DestinationEvent};

use crate::journal::Journal;
use crate::network::{Packet, Side};
use crate::plan::MS;
use crate::tally::{FaultKind, Passage};
use crate::world::{Event, World};
use lane::Lane;

/// The destination's host.
#[derive(Debug)]
pub(crate) struct DestinationHost {
    /// Whether the process is alive.
    pub(crate) up: bool,
    life: u32,
    main_ns: Option<u64>,
    pub(crate) journal: Journal<(u32, DestinationRecord)>,
    pub(crate) session: Option<Session>,
    /// Packets that the readers of control lanes have read and the main thread
    /// has not processed.
    inboxes: BTreeMap<usize, VecDeque<Packet>>,
    /// Control lanes on which only an offer has arrived, and for which no session exists yet. The
    /// key is the connection; the value is the offer's attempt and epoch.
    pending: BTreeMap<usize, (u32, u32)>,
    /// Data lanes that wait for admission: connection, attempt, lane.
    arrivals: VecDeque<(usize, u32, u16)>,
    sessions: u32,
    /// Whether the destination's process may have acquired disks and devices.
    pub(crate) holds: bool,
    pub(crate) cancelled: bool,
    /// The connection of a stalled reader, and the time until which the reader is stalled.
    pub(crate) stalled_reader: Option<(usize, u64)>,
    /// The attempt in which the VM ran at the destination and then died with its process.
    pub(crate) died: Option<u32>,
}

impl Default for DestinationHost {
    fn default() -> Self {
        Self {
            up: true,
            life: 1,
            main_ns: None,
            journal: Journal::default(),
            session: None,
            inboxes: BTreeMap::new(),
            pending: BTreeMap::new(),
            arrivals: VecDeque::new(),
            sessions: 0,
            holds: false,
            cancelled: false,
            stalled_reader: None,
            died: None,
        }
    }
}

/// The copy of the VM at the destination.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) pages: Vec<u32>,
    /// For each page: how many times the dirty log had been read when the chunk with the page's
    /// present content was built.
    pub(crate) writers: Vec<u32>,
    pub(crate) running: bool,
    /// Whether the destination has the VM: true as soon as *running* is recorded.
    pub(crate) lives: bool,
}

/// One migration attempt at the destination.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: u32,
    pub(crate) attempt: u32,
    pub(crate) machine: Destination,
    todo: VecDeque<DestinationAction>,
    doing: Option<(u64, Doing)>,
    pub(crate) copy: Option<Copy>,
    receiving: Receiving,
    lanes: BTreeMap<u16, Lane>,
    /// Threads that have ended and must be joined.
    ended: VecDeque<u16>,
    /// Lanes for which *fenced* was sent or is about to be sent.
    pub(crate) fenced: BTreeSet<u16>,
    /// Every lane that has opened.
    pub(crate) opened: BTreeSet<u16>,
    /// Control lanes, the newest last.
    pub(crate) controls: Vec<usize>,
    /// The epoch of the newest control lane.
    epoch: u32,
    asked_on: Option<usize>,
    draining: Option<VecDeque<Packet>>,
    /// Packets that were read from old control lanes but have not been processed.
    drained_later: VecDeque<Packet>,
    lost_until_ns: Option<u64>,
    reports_ns: Option<u64>,
    sections: u32,
    said: Vec<Message>,
    restarted: bool,
}

#[derive(Clone, Copy, Debug)]
enum Doing {
    Records,
    Loads,
    Acquires,
    Resumes,
}

impl World<'_> {
    fn session(&mut self) -> &mut Session {
        let session = self.destination.session.as_mut();
        session.expect("only called while there is a session")
    }

    fn new_session(&mut self, attempt: u32, machine: Destination) -> Session {
        self.destination.sessions += 1;
        Session {
            id: self.destination.sessions,
            attempt,
            machine,
            todo: VecDeque::new(),
            doing: None,
            copy: None,
            receiving: Receiving::new(self.plan.lanes + 2),
            lanes: BTreeMap::new(),
            ended: VecDeque::new(),
            fenced: BTreeSet::new(),
            opened: BTreeSet::new(),
            controls: Vec::new(),
            epoch: 0,
            asked_on: None,
            draining: None,
            drained_later: VecDeque::new(),
            lost_until_ns: None,
            reports_ns: None,
            sections: 0,
            said: Vec::new(),
            restarted: false,
        }
    }

    pub(crate) fn destination_wakes(&mut self, after_ns: u64) {
        let (at_ns, now_ns) = (self.now_ns + after_ns, self.now_ns);
        let host = &mut self.destination;
        if host.up
            && host
                .main_ns
                .is_none_or(|main_ns| main_ns > at_ns || main_ns < now_ns)
        {
            host.main_ns = Some(at_ns);
            let life = host.life;
            self.at(
                at_ns,
                Event::Main {
                    side: Side::Destination,
                    life,
                },
            );
        }
    }

    /// One step of the main thread.
    pub(crate) fn destination_main(&mut self, life: u32) {
        if !self.destination.up || self.destination.life != life {
            return;
        }
        self.destination.main_ns = None;
        let stalled_until_ns = self.stalled_until_ns[Side::Destination as usize];
        if self.now_ns < stalled_until_ns {
            self.destination_wakes(stalled_until_ns - self.now_ns);
            return;
        }
        if !self.session_goes_on() {
            self.take_input();
        }
        self.may_be_complete();
        self.destination_goes_on();
    }

    /// Continues the session's operation in progress, executes its next action, or continues to
    /// drain old control lanes. Returns false if none of these is pending.
    fn session_goes_on(&mut self) -> bool {
        let now_ns = self.now_ns;
        let Some(session) = &mut self.destination.session else {
            return false;
        };
        if let Some((until_ns, doing)) = session.doing {
            if now_ns >= until_ns {
                session.doing = None;
                self.destination_has_done(doing);
            }
            return true;
        }
        if let Some(action) = session.todo.pop_front() {
            self.destination_does(action);
            return true;
        }
        let Some(draining) = &mut session.draining else {
            return false;
        };
        match draining.pop_front() {
            Some(packet) => self.drained(packet),
            None => {
                session.draining = None;
                self.destination_feeds(DestinationEvent::Drained);
            }
        }
        true
    }

    /// Processes a cancellation, or one of the inputs that have arrived, chosen at random. If there
    /// is nothing to process, checks the deadlines.
    fn take_input(&mut self) {
        let host = &mut self.destination;
        if host.cancelled {
            host.cancelled = false;
            if host
                .session
                .as_ref()
                .is_some_and(|session| !session.restarted)
            {
                self.struck.insert(FaultKind::DestinationCancelled);
                if !self.session().machine.may_cancel() {
                    self.pass(Passage::TooLate);
                }
                self.destination_feeds(DestinationEvent::Cancelled);
            }
            return;
        }
        let ended = host
            .session
            .as_ref()
            .map_or(0, |session| session.ended.len());
        let inboxes = self.handed_over();
        let host = &self.destination;
        let sources =
            inboxes.len() + usize::from(!host.arrivals.is_empty()) + usize::from(ended > 0);
        if sources == 0 {
            self.destination_waits();
            return;
        }
        let which = self.random.below(sources as u64) as usize;
        let host = &mut self.destination;
        if let Some(&connection) = inboxes.get(which) {
            let inbox = host.inboxes.get_mut(&connection);
            let packet = inbox.and_then(VecDeque::pop_front);
            if host.inboxes.get(&connection).is_none_or(VecDeque::is_empty) {
                host.inboxes.remove(&connection);
            }
            if let Some(packet) = packet {
                self.destination_takes(connection, packet);
            }
        } else if which == inboxes.len() && !host.arrivals.is_empty() {
            if let Some((connection, attempt, lane)) = host.arrivals.pop_front() {
                self.admit(connection, attempt, lane);
            }
        } else if ended > 0
            && let Some(lane) = self.session().ended.pop_front()
        {
            self.lane_joined(lane);
        }
    }

    /// Connections with packets that their readers have passed to the main thread.
    fn handed_over(&self) -> Vec<usize> {
        let host = &self.destination;
        let stalled = |connection: usize| {
            host.stalled_reader
                .is_some_and(|(stalled, until_ns)| stalled == connection && self.now_ns < until_ns)
        };
        let all = host.inboxes.keys().copied();
        all.filter(|connection| !stalled(*connection)).collect()
    }

    /// Stalls the reader of the newest control lane. Returns false if there is no control lane.
    pub(crate) fn stall_reader(&mut self, until_ns: u64) -> bool {
        let session = self.destination.session.as_ref();
        let newest = session.and_then(|session| session.controls.last().copied());
        self.destination.stalled_reader = newest.map(|newest| (newest, until_ns));
        newest.is_some()
    }

    fn destination_goes_on(&mut self) {
        let now_ns = self.now_ns;
        let host = &self.destination;
        let session = host.session.as_ref();
        let doing = session.and_then(|session| session.doing);
        let busy = session.is_some_and(|session| {
            !session.todo.is_empty() || session.draining.is_some() || !session.ended.is_empty()
        });
        let after_ns = if let Some((until_ns, _)) = doing {
            until_ns.saturating_sub(now_ns)
        } else if busy
            || host.cancelled
            || !self.handed_over().is_empty()
            || !host.arrivals.is_empty()
        {
            self.random.below(MS / 2)
        } else {
            let dues = session.into_iter().flat_map(|session| {
                [session.lost_until_ns, session.reports_ns]
                    .into_iter()
                    .flatten()
            });
            let stalled = host.stalled_reader.map(|(_, until_ns)| until_ns);
            let stalled = stalled.filter(|until_ns| *until_ns > now_ns);
            match dues.chain(stalled).min() {
                Some(due_ns) => due_ns.saturating_sub(now_ns).max(1000),
                None => return,
            }
        };
        self.destination_wakes(after_ns);
    }

    /// Passes an event to the session's state machine.
    fn destination_feeds(&mut self, event: DestinationEvent) {
        let session = self.session();
        let before = session.machine;
        match before.on(event) {
            Ok((after, actions)) => {
                session.machine = after;
                session.todo.extend(actions);
                self.say(|| format!("destination: {before:?} + {event:?} = {after:?} {actions:?}"));
            }
            Err(impossible) => self.violate("machine", impossible.to_string()),
        }
    }

    /// Sends a message over the newest control lane.
    fn destination_says(&mut self, message: Message) {
        let Some(&connection) = self.session().controls.last() else {
            return;
        };
        self.say(|| format!("destination: says {message:?}"));
        let repeatable = matches!(
            message,
            Message::LaneUp { .. }
                | Message::LaneRefused { .. }
                | Message::Ack { .. }
                | Message::Fenced { .. }
        );
        if repeatable {
            self.session().said.push(message.clone());
        }
        self.send(connection, Side::Source, Packet::Message(message));
    }

    /// The destination's process dies.
    pub(crate) fn destination_crashes(&mut self, silently: bool) {
        self.say(|| {
            format!(
                "destination: crashes{}",
                if silently { " silently" } else { "" }
            )
        });
        let host = &mut self.destination;
        host.up = false;
        host.main_ns = None;
        host.journal.crash(&mut self.random);
        host.inboxes.clear();
        host.pending.clear();
        host.arrivals.clear();
        // The kernel releases the disks and devices of a dead process.
        host.holds = false;
        host.cancelled = false;
        if let Some(session) = host.session.take()
            && session.copy.is_some_and(|copy| copy.lives)
        {
            host.died = Some(session.attempt);
        }
        for connection in 0..self.connections.len() {
            if silently {
                self.vanish(connection, Side::Destination);
            } else {
                self.close(connection, Side::Destination, true);
            }
        }
    }

    /// A new process continues from the journal.
    pub(crate) fn destination_restarts(&mut self) {
        if self.destination.up {
            return;
        }
        self.destination.up = true;
        self.destination.life += 1;
        if let Some((attempt, record)) = self.destination.journal.durable {
            let (machine, actions) = Destination::restarted(Some(record));
            self.say(|| format!("destination: restarts, {record}: {machine:?} {actions:?}"));
            let mut session = self.new_session(attempt, machine);
            session.todo.extend(actions);
            session.restarted = true;
            self.destination.session = Some(session);
        }
        self.destination_wakes(0);
    }
}
