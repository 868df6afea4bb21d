//! Execution of faults.

use crate::network::{Kind, Packet, Side};
use crate::plan::Fault;
use crate::tally::FaultKind;
use crate::world::{Event, World};

impl World<'_> {
    /// Injects the fault with this index. Does nothing in the quiet phase at the end of a run.
    pub(crate) fn strike(&mut self, index: usize) {
        if self.quiet {
            return;
        }
        let fault = self.plan.faults[index];
        let spent_ns = self.now_ns + fault.for_ns;
        self.disturbed_until_ns = self.disturbed_until_ns.max(spent_ns);
        if self.strikes(fault) {
            self.say(|| format!("FAULT {}", fault.kind));
            self.struck.insert(fault.kind);
        }
    }

    /// Injects the fault. Returns whether it had an effect. A fault with a later effect is counted
    /// when the effect occurs.
    fn strikes(&mut self, fault: Fault) -> bool {
        let until_ns = self.now_ns + fault.for_ns;
        match fault.kind {
            FaultKind::LaneCut => self.on_lane(|world, lane| world.cut(lane)),
            FaultKind::LaneHeld => {
                self.on_lane(|world, lane| world.hold(lane, Side::Destination, until_ns))
            }
            FaultKind::LaneSwallowed => self.on_lane(|world, lane| world.swallow(lane)),
            FaultKind::LaneSlow => self.on_lane(|world, lane| world.slow_down(lane)),
            FaultKind::LaneReplayed => self.replay(),
            FaultKind::NoNewLanes => {
                self.no_lanes_until_ns = until_ns;
                false
            }
            FaultKind::ControlCut => self.on_control(|world, control| world.cut(control)),
            FaultKind::ControlHeld => {
                let to = if self.random.chance(50) {
                    Side::Source
                } else {
                    Side::Destination
                };
                self.on_control(|world, control| world.hold(control, to, until_ns))
            }
            FaultKind::ControlSwallowed => self.on_control(|world, control| world.swallow(control)),
            FaultKind::SourceStalled => {
                self.stalled_until_ns[Side::Source as usize] = until_ns;
                self.source.attempt.is_some()
            }
            FaultKind::DestinationStalled => {
                self.stalled_until_ns[Side::Destination as usize] = until_ns;
                self.destination.up
            }
            FaultKind::ReaderStalled => {
                let stalls = self.stall_reader(until_ns);
                self.destination_wakes(0);
                stalls
            }
            FaultKind::Delay => {
                self.delayed_until_ns = until_ns.min(self.now_ns + 500 * crate::MS);
                true
            }
            FaultKind::SourceCrash => {
                let crashes = self.source.attempt.is_some();
                if crashes {
                    let silently = self.random.chance(30);
                    self.source_crashes(silently);
                    self.at(until_ns, Event::Restart(Side::Source));
                }
                crashes
            }
            FaultKind::DestinationCrash => {
                let crashes = self.destination.up;
                if crashes {
                    let silently = self.random.chance(30);
                    self.destination_crashes(silently);
                    self.at(until_ns, Event::Restart(Side::Destination));
                }
                crashes
            }
            FaultKind::SourceCancelled => {
                if let Some(attempt) = &mut self.source.attempt {
                    attempt.cancelled = true;
                    self.source_wakes(0);
                }
                false
            }
            FaultKind::DestinationCancelled => {
                self.destination.cancelled = self.destination.up;
                self.destination_wakes(0);
                false
            }
            FaultKind::SourceJournalFails => {
                self.source.journal.fails = true;
                false
            }
            FaultKind::DestinationJournalFails => {
                self.destination.journal.fails = true;
                false
            }
            FaultKind::MessagesRepeated | FaultKind::VmmFails | FaultKind::InquiryMisrouted => {
                self.armed.insert(fault.kind);
                false
            }
        }
    }

    fn on_lane(&mut self, strike: impl FnOnce(&mut Self, usize)) -> bool {
        let lanes = self.connections.iter().enumerate().filter(|(_, one)| {
            matches!(one.kind, Kind::Lane(_))
                && one.is_open(Side::Source)
                && one.is_open(Side::Destination)
        });
        let lanes: Vec<usize> = lanes.map(|(id, _)| id).collect();
        if lanes.is_empty() {
            return false;
        }
        let lane = self.random.pick(&lanes);
        self.say(|| format!("the fault strikes connection #{lane}"));
        strike(self, lane);
        true
    }

    fn on_control(&mut self, strike: impl FnOnce(&mut Self, usize)) -> bool {
        let attempt = self.source.attempt.as_ref();
        let Some(control) = attempt.and_then(|attempt| attempt.link.connection()) else {
            return false;
        };
        self.say(|| format!("the fault strikes connection #{control}"));
        strike(self, control);
        true
    }

    /// An attacker on the path replays a lane's opening.
    fn replay(&mut self) -> bool {
        let Some(session) = &self.destination.session else {
            return false;
        };
        let lanes: Vec<u16> = session.opened.iter().copied().collect();
        let attempt = session.attempt;
        if lanes.is_empty() || !self.destination.up {
            return false;
        }
        let lane = self.random.pick(&lanes);
        let connection = self.connect(Kind::Lane(lane));
        self.send(
            connection,
            Side::Destination,
            Packet::Open { attempt, lane },
        );
        self.close(connection, Side::Source, false);
        true
    }
}
