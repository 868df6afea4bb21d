//! The source's end of the control lane: reconnecting, and incoming messages.

use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::lanes::ReportError;
use dunlin_proto::switchover::{Source, SourceEvent};

use crate::network::{Packet, Side};
use crate::plan::{MS, Moment};
use crate::tally::{End, Passage};
use crate::world::World;

/// Timeout for the answer to an offer or an inquiry.
const ANSWER_LIMIT_NS: u64 = 900 * MS;
/// How long the source tries to open a new control lane before it gives up.
const RESUME_LIMIT_NS: u64 = 2000 * MS;

/// State of the control lane.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    /// The next attempt to connect is at `at_ns`; the source gives up at `until_ns`.
    Connecting {
        at_ns: u64,
        until_ns: u64,
    },
    /// An offer awaits its answer.
    Offered {
        connection: usize,
        answer_ns: u64,
        until_ns: u64,
    },
    Up(usize),
    Down,
}

impl Link {
    pub(crate) fn connecting(at_ns: u64, limit_ns: u64) -> Self {
        Self::Connecting {
            at_ns,
            until_ns: at_ns + limit_ns,
        }
    }

    pub(crate) fn connection(self) -> Option<usize> {
        match self {
            Self::Offered { connection, .. } | Self::Up(connection) => Some(connection),
            Self::Connecting { .. } | Self::Down => None,
        }
    }

    pub(super) fn due_ns(self) -> Option<u64> {
        match self {
            Self::Connecting { at_ns, .. } => Some(at_ns),
            Self::Offered { answer_ns, .. } => Some(answer_ns),
            Self::Up(_) | Self::Down => None,
        }
    }

    pub(super) fn is_up(self) -> bool {
        matches!(self, Self::Up(_))
    }
}

impl World<'_> {
    /// Sends a message, if a control lane is up.
    pub(super) fn source_says(&mut self, message: Message) {
        if let Link::Up(connection) = self.attempt().link {
            self.say(|| format!("source: says {message:?}"));
            if matches!(message, Message::Fence { .. }) {
                self.attempt().said.push(message.clone());
            }
            self.send(connection, Side::Destination, Packet::Message(message));
        }
    }

    /// Opens a control lane, tries again or gives up, whichever is due now.
    pub(super) fn link_waits(&mut self) {
        let now_ns = self.now_ns;
        match self.attempt().link {
            Link::Connecting { at_ns, until_ns } if now_ns >= at_ns => {
                if now_ns >= until_ns {
                    self.link_given_up();
                    return;
                }
                self.attempt().link = match self.open_control() {
                    Some(connection) => Link::Offered {
                        connection,
                        answer_ns: now_ns + ANSWER_LIMIT_NS,
                        until_ns,
                    },
                    None => Link::Connecting {
                        at_ns: now_ns + 150 * MS,
                        until_ns,
                    },
                };
            }
            Link::Offered {
                connection,
                answer_ns,
                until_ns,
            } if now_ns >= answer_ns => {
                self.close(connection, Side::Source, true);
                self.source.epoch += 1;
                self.attempt().link = Link::Connecting {
                    at_ns: now_ns + 50 * MS,
                    until_ns,
                };
            }
            _ => {}
        }
    }

    fn link_given_up(&mut self) {
        self.attempt().link = Link::Down;
        self.source_feeds(SourceEvent::ControlLost);
    }

    /// Handles the loss of the control lane.
    fn link_lost(&mut self) {
        let now_ns = self.now_ns;
        let link = self.attempt().link;
        if let Some(connection) = link.connection() {
            self.close(connection, Side::Source, true);
        }
        if let Link::Offered { until_ns, .. } = link {
            self.source.epoch += 1;
            self.attempt().link = Link::Connecting {
                at_ns: now_ns + 50 * MS,
                until_ns,
            };
            return;
        }
        if self.attempt().machine == Source::Live && self.attempt().passes.pass_ns.is_some() {
            self.source.epoch += 1;
            let at_ns = now_ns + self.random.below(30 * MS);
            self.attempt().link = Link::connecting(at_ns, RESUME_LIMIT_NS);
            self.moment(Moment::Lost);
            return;
        }
        self.link_given_up();
    }

    /// Closes the current control lane and inquires over a new one.
    pub(super) fn inquire(&mut self) {
        if let Some(connection) = self.attempt().link.connection() {
            self.close(connection, Side::Source, true);
        }
        self.source.epoch += 1;
        let attempt = self.attempt();
        attempt.inbox.clear();
        attempt.answer_ns = None;
        attempt.asked += 1;
        let wait_ns = (u64::from(attempt.asked) * 30).min(600) * MS;
        let at_ns = self.now_ns + wait_ns;
        self.attempt().link = Link::connecting(at_ns, RESUME_LIMIT_NS);
    }

    /// A message has arrived on the control lane.
    pub(super) fn source_takes(&mut self, connection: usize, packet: Packet) {
        if self.attempt().link.connection() != Some(connection) {
            return;
        }
        self.say(|| format!("source: takes {packet:?}"));
        match packet {
            Packet::Closed => self.link_lost(),
            Packet::Select => self.selected(connection),
            Packet::Message(message) => {
                if let Err(error) = self.source_hears(message) {
                    self.violate("accused", error.to_string());
                }
            }
            other => self.violate(
                "sim",
                format!("the source received {other:?} on a control lane"),
            ),
        }
    }

    fn selected(&mut self, connection: usize) {
        let now_ns = self.now_ns;
        let Link::Offered { .. } = self.attempt().link else {
            return;
        };
        self.attempt().link = Link::Up(connection);
        let copying = self.attempt().passes.pass_ns.is_some();
        match self.attempt().machine {
            Source::Live if !copying => {
                self.send(connection, Side::Destination, Packet::Describe);
                self.attempt().answer_ns = Some(now_ns + 2 * ANSWER_LIMIT_NS);
            }
            Source::Live => {
                self.pass(Passage::ControlResumed);
                self.moment(Moment::Resumed);
                self.attempt().sending.control_resumed(now_ns);
                if self.repeats() {
                    for message in std::mem::take(&mut self.attempt().said) {
                        self.source_says(message);
                    }
                }
                self.wake_lanes();
            }
            Source::InDoubt => {
                let attempt = self.attempt().number;
                self.source_says(Message::Inquire { attempt });
                self.attempt().answer_ns = Some(now_ns + ANSWER_LIMIT_NS);
            }
            _ => {}
        }
    }

    fn source_hears(&mut self, message: Message) -> Result<(), ReportError> {
        let now_ns = self.now_ns;
        let copies = self.copies();
        let attempt = self.attempt();
        match message {
            Message::Accept(_) => {
                attempt.answer_ns = None;
                self.begin_copying();
            }
            Message::Refuse { .. } => {
                attempt.refused = true;
                self.source_feeds(SourceEvent::PeerCancelled);
            }
            Message::LaneUp { lane } if copies => {
                attempt.sending.lane_up(lane, now_ns)?;
                self.wake_lanes();
            }
            Message::LaneRefused { lane, .. } if copies => {
                self.pass(Passage::LaneRefused);
                self.attempt().sending.refused(lane, now_ns)?;
                self.wake_lanes();
            }
            Message::Ack { sets, reached } if copies => {
                attempt.passes.acked_pages +=
                    attempt.sending.acknowledge(&sets, &reached, now_ns)?;
                self.wake_lanes();
            }
            Message::Fenced { lane, acks } if copies => {
                attempt.sending.fenced(lane, &acks, now_ns)?;
                self.pass(Passage::Fenced);
                self.wake_lanes();
            }
            Message::Ready { .. } => {
                self.source_feeds(SourceEvent::Ready { same_memory: true });
            }
            Message::Running { .. } => self.source_learns(Verdict::Running, SourceEvent::Running),
            Message::Cancel { .. } => {
                if matches!(attempt.machine, Source::Committed | Source::InDoubt) {
                    attempt.end = End::KeptAfterDoubt;
                }
                self.source_feeds(SourceEvent::PeerCancelled);
            }
            Message::Answer {
                attempt: about,
                verdict,
            } => {
                let asked = attempt.number;
                let event = SourceEvent::answer(asked, about, verdict);
                if about == asked {
                    self.source_learns(verdict, event);
                } else {
                    self.source_feeds(event);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn source_learns(&mut self, verdict: Verdict, event: SourceEvent) {
        let attempt = self.attempt();
        let doubted = attempt.machine == Source::InDoubt;
        attempt.answer_ns = None;
        attempt.end = match verdict {
            Verdict::Running if doubted => End::MovedAfterDoubt,
            Verdict::Running => End::Moved,
            _ => End::KeptAfterDoubt,
        };
        if verdict == Verdict::NoRecord && doubted {
            let text =
                "the destination has forgotten a session about which the source still asks".into();
            self.violate("I2", text);
        }
        self.source_feeds(event);
    }
}
