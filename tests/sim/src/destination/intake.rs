//! Opening and closing of lanes at the destination, and reports about them.

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::{Destination, DestinationEvent};

use super::Lane;
use crate::network::{Packet, Side};
use crate::plan::MS;
use crate::world::World;

/// How long the destination collects acknowledgements before it sends them.
const REPORT_DELAY_NS: u64 = 3 * MS;

impl World<'_> {
    /// Handles the first packet on a data lane's connection.
    pub(crate) fn lane_opening(&mut self, connection: usize, packet: Packet) {
        if let Packet::Open { attempt, lane } = packet {
            self.destination
                .arrivals
                .push_back((connection, attempt, lane));
            self.destination_wakes(MS / 10);
        } else {
            self.close(connection, Side::Destination, true);
        }
    }

    /// Admits or refuses a lane.
    pub(super) fn admit(&mut self, connection: usize, attempt: u32, number: u16) {
        let session = self.destination.session.as_mut().filter(|session| {
            // Simulated lanes have no proof. Comparing attempts suffices, because each attempt has
            // its own secret.
            session.attempt == attempt && session.copy.is_some()
        });
        let Some(session) = session else {
            self.close(connection, Side::Destination, true);
            return;
        };
        if session.machine != Destination::Receiving {
            self.close(connection, Side::Destination, true);
            return;
        }
        match session.receiving.admit(number) {
            Ok(()) => {
                session.opened.insert(number);
                session.lanes.insert(number, Lane::new(connection));
                self.destination_says(Message::LaneUp { lane: number });
                self.wake_receiver(number);
            }
            Err(refusal) => {
                self.close(connection, Side::Destination, true);
                self.destination_says(Message::LaneRefused {
                    lane: number,
                    fault: FaultCode::DuplicateLane,
                    text: refusal.to_string(),
                });
            }
        }
    }

    /// A lane's thread has ended and is joined.
    pub(super) fn lane_joined(&mut self, number: u16) {
        let session = self.session();
        if let Some(lane) = session.lanes.remove(&number) {
            self.close(lane.connection, Side::Destination, true);
        }
        if self.session().receiving.gone(number) {
            self.tell_fenced(number);
            self.wake_receivers();
        }
    }

    pub(super) fn tell_fenced(&mut self, number: u16) {
        self.session().fenced.insert(number);
        let (acks, reached) = self.session().receiving.take_reports();
        self.session().reports_ns = None;
        if !reached.is_empty() {
            let sets = Vec::new();
            self.destination_says(Message::Ack { sets, reached });
        }
        self.destination_says(Message::Fenced { lane: number, acks });
    }

    /// Schedules an acknowledgement.
    pub(super) fn report_soon(&mut self) {
        let at_ns = self.now_ns + REPORT_DELAY_NS;
        self.session().reports_ns.get_or_insert(at_ns);
        self.destination_wakes(REPORT_DELAY_NS);
    }

    /// Checks the deadlines. Called when there is no input to process.
    pub(super) fn destination_waits(&mut self) {
        let now_ns = self.now_ns;
        let Some(session) = &mut self.destination.session else {
            return;
        };
        if session.reports_ns.is_some_and(|at_ns| now_ns >= at_ns) {
            session.reports_ns = None;
            // Without a control lane, reports wait for the next one.
            if session.lost_until_ns.is_none() && session.receiving.has_reports() {
                let (sets, reached) = session.receiving.take_reports();
                self.destination_says(Message::Ack { sets, reached });
            }
        }
        let session = self.session();
        if session
            .lost_until_ns
            .is_some_and(|until_ns| now_ns >= until_ns)
        {
            session.lost_until_ns = None;
            self.destination_feeds(DestinationEvent::ControlLost);
        }
    }

    /// If everything has arrived, reports that to the state machine.
    pub(super) fn may_be_complete(&mut self) {
        let Some(session) = &mut self.destination.session else {
            return;
        };
        let idle = session.doing.is_none() && session.todo.is_empty();
        if session.machine != Destination::Receiving || !idle {
            return;
        }
        match session.receiving.is_complete() {
            Ok(true) if session.lanes.is_empty() && session.sections > 0 => {
                self.destination_feeds(DestinationEvent::Complete);
            }
            Ok(_) => {}
            Err(incomplete) => self.violate("accused", incomplete.to_string()),
        }
    }
}
