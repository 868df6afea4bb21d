//! Messages on control lanes at the destination.

use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::Fence;
use dunlin_proto::switchover::{Destination, DestinationEvent};

use crate::network::{Packet, Side};
use crate::plan::MS;
use crate::tally::{FaultKind, Passage};
use crate::world::World;

/// How long the destination waits for a new control lane during pre-copy. The limit is longer than
/// the time for which the source tries to open one.
const RESUME_LIMIT_NS: u64 = 3000 * MS;

impl World<'_> {
    /// The reader of a control lane has read a packet.
    pub(crate) fn destination_reads(&mut self, connection: usize, packet: Packet) {
        self.destination
            .inboxes
            .entry(connection)
            .or_default()
            .push_back(packet);
        self.destination_wakes(MS / 10);
    }

    /// The main thread processes a packet that a reader had read.
    pub(super) fn destination_takes(&mut self, connection: usize, packet: Packet) {
        self.say(|| format!("destination: takes {packet:?} on #{connection}"));
        match packet {
            Packet::Offer { attempt, epoch } => self.offered(connection, attempt, epoch),
            Packet::Describe => self.described(connection),
            Packet::Message(message) => self.destination_hears(connection, message),
            Packet::Closed => self.control_closed(connection),
            other => self.violate(
                "sim",
                format!("the destination received {other:?} on a control lane"),
            ),
        }
    }

    fn offered(&mut self, connection: usize, attempt: u32, epoch: u32) {
        let known = self
            .destination
            .session
            .as_ref()
            .map(|s| (s.attempt, s.epoch));
        if known.is_some_and(|known| (attempt, epoch) <= known) {
            // This lane was delayed until another control lane had replaced it.
            self.close(connection, Side::Destination, true);
            return;
        }
        self.send(connection, Side::Source, Packet::Select);
        let Some(session) = self
            .destination
            .session
            .as_mut()
            .filter(|s| s.attempt == attempt)
        else {
            self.destination
                .pending
                .insert(connection, (attempt, epoch));
            return;
        };
        session.controls.push(connection);
        session.epoch = epoch;
        if session.machine == Destination::Receiving {
            session.lost_until_ns = None;
            self.close_old(false);
            self.resume();
        }
    }

    /// Repeats, on the new control lane, messages that the source has possibly not received.
    fn resume(&mut self) {
        if self.repeats() {
            for message in std::mem::take(&mut self.session().said) {
                self.destination_says(message);
            }
        }
        self.session().reports_ns = None;
        let (sets, reached) = self.session().receiving.repeat();
        self.destination_says(Message::Ack { sets, reached });
        for lane in self.session().receiving.open().collect::<Vec<_>>() {
            self.destination_says(Message::LaneUp { lane });
        }
    }

    /// Starts a new attempt, if the destination can accept one.
    fn described(&mut self, connection: usize) {
        let Some((attempt, epoch)) = self.destination.pending.remove(&connection) else {
            return;
        };
        let session = self.destination.session.as_ref();
        if session.is_some_and(|session| session.attempt >= attempt) {
            self.close(connection, Side::Destination, true);
            return;
        }
        match session.map(|session| session.machine) {
            None | Some(Destination::Aborted | Destination::Unrecorded | Destination::Unknown) => {
                self.destination.cancelled = false;
                let (machine, actions) = Destination::begin();
                let mut session = self.new_session(attempt, machine);
                session.controls.push(connection);
                session.epoch = epoch;
                session.todo.extend(actions);
                session.copy = Some(super::Copy {
                    pages: vec![0; self.plan.pages as usize],
                    writers: vec![0; self.plan.pages as usize],
                    running: false,
                    lives: false,
                });
                self.destination.session = Some(session);
                return;
            }
            // The source has given up the earlier attempt and starts another one.
            Some(Destination::Receiving | Destination::Loading | Destination::Prepared) => {
                self.destination_feeds(DestinationEvent::ControlLost);
            }
            Some(_) => {}
        }
        let refusal = Message::Refuse {
            fault: FaultCode::Cancelled,
            text: String::new(),
        };
        self.send(connection, Side::Source, Packet::Message(refusal));
    }

    /// Handles the end of a control lane.
    fn control_closed(&mut self, connection: usize) {
        self.close(connection, Side::Destination, false);
        self.destination.pending.remove(&connection);
        let now_ns = self.now_ns;
        let Some(session) = &mut self.destination.session else {
            return;
        };
        if session.controls.last() != Some(&connection) {
            return;
        }
        if session.machine == Destination::Receiving {
            session.lost_until_ns = Some(now_ns + RESUME_LIMIT_NS);
        } else {
            self.destination_feeds(DestinationEvent::ControlLost);
        }
    }

    fn destination_hears(&mut self, connection: usize, message: Message) {
        if let Message::Inquire { attempt } = message {
            self.asked(connection, attempt);
            return;
        }
        let Some(session) = &mut self.destination.session else {
            return;
        };
        if !session.controls.contains(&connection) {
            return;
        }
        if session.restarted && message != Message::Release {
            // The session's lanes and its copy of the VM died with the previous process.
            let refusal = Message::Refuse {
                fault: FaultCode::UnknownSession,
                text: String::new(),
            };
            self.send(connection, Side::Source, Packet::Message(refusal));
            self.close(connection, Side::Destination, false);
            return;
        }
        let receiving = session.machine == Destination::Receiving;
        match message {
            Message::Section(_) => session.sections += 1,
            Message::Final(last) if receiving => session.receiving.finish(last),
            Message::Fence { lane } => self.fence(lane),
            Message::Commit { run } => self.destination_feeds(DestinationEvent::Commit { run }),
            Message::Release => self.destination_feeds(DestinationEvent::Release),
            Message::Cancel { .. } => self.destination_feeds(DestinationEvent::PeerCancelled),
            _ => {}
        }
    }

    fn fence(&mut self, lane: u16) {
        match self.session().receiving.fence(lane) {
            Fence::Close => self.close_lane(lane),
            Fence::Answer => self.tell_fenced(lane),
        }
    }

    /// Answers an inquiry about which side runs the VM.
    fn asked(&mut self, connection: usize, attempt: u32) {
        let misrouted = FaultKind::InquiryMisrouted;
        if attempt > 1 && self.armed.remove(&misrouted) {
            // The connection arrived at the process of the previous attempt, which has only the
            // record of that attempt.
            self.struck.insert(misrouted);
            let answer = Message::Answer {
                attempt: attempt - 1,
                verdict: Verdict::Aborted,
            };
            self.send(connection, Side::Source, Packet::Message(answer));
            self.close(connection, Side::Destination, false);
            return;
        }
        self.destination.pending.remove(&connection);
        let known = self
            .destination
            .session
            .as_ref()
            .map(|session| session.attempt);
        if known.is_none() {
            let (machine, actions) = Destination::restarted(None);
            let mut session = self.new_session(attempt, machine);
            session.todo.extend(actions);
            session.controls.push(connection);
            self.destination.session = Some(session);
        }
        let session = self.session();
        if session.restarted {
            self.pass(Passage::AnsweredAfterRestart);
        }
        let session = self.session();
        if session.attempt == attempt && session.controls.last() == Some(&connection) {
            session.asked_on = Some(connection);
            self.destination_feeds(DestinationEvent::Inquired);
        }
    }

    /// Closes every control lane except the newest and joins their readers. Returns the
    /// packets that the readers had read, if `wanted`.
    pub(super) fn close_old(&mut self, wanted: bool) -> std::collections::VecDeque<Packet> {
        let mut read = std::collections::VecDeque::new();
        let controls = &mut self.session().controls;
        let newest = controls.pop();
        let old = std::mem::take(controls);
        controls.extend(newest);
        for connection in old {
            self.close(connection, Side::Destination, true);
            if let Some(packets) = self.destination.inboxes.remove(&connection)
                && wanted
            {
                read.extend(packets);
            }
        }
        read
    }

    /// Processes a packet that an old control lane's reader had read before the lane was closed.
    pub(super) fn drained(&mut self, packet: Packet) {
        self.say(|| format!("destination: drains {packet:?}"));
        match packet {
            Packet::Message(Message::Commit { run }) => {
                self.pass(Passage::CommitDrained);
                self.destination_feeds(DestinationEvent::Commit { run });
            }
            Packet::Message(Message::Cancel { .. }) => {
                self.destination_feeds(DestinationEvent::PeerCancelled);
            }
            Packet::Message(Message::Release) => {
                self.destination_feeds(DestinationEvent::Release);
            }
            _ => {}
        }
    }
}
