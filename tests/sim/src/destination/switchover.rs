//! The actions that the destination's state machine requests.

use dunlin_proto::control::{Accept, Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::SessionSecret;
use dunlin_proto::switchover::{Destination, DestinationAction, DestinationEvent};

use super::Doing;
use crate::network::Side;
use crate::plan::{MS, Moment};
use crate::tally::FaultKind;
use crate::world::World;

impl World<'_> {
    pub(super) fn destination_does(&mut self, action: DestinationAction) {
        self.say(|| format!("destination: does {action:?}"));
        match action {
            DestinationAction::Record(record) => {
                let attempt = self.session().attempt;
                self.destination.journal.begin((attempt, record));
                let until_ns = self.now_ns + self.sync_ns();
                self.session().doing = Some((until_ns, Doing::Records));
            }
            DestinationAction::SendAccept => {
                let lanes_max = self.plan.lanes + 2;
                self.destination_says(Message::Accept(Accept {
                    secret: SessionSecret([0; 32]),
                    lanes_max,
                    endpoints: Vec::new(),
                }));
            }
            DestinationAction::Refuse => self.destination_says(Message::Refuse {
                fault: FaultCode::Kernel,
                text: String::new(),
            }),
            DestinationAction::LoadState => self.destination_starts(Doing::Loads, 10),
            DestinationAction::SendReady => {
                self.check_ready();
                self.destination_says(Message::Ready { digest: None });
                self.moment(Moment::Ready);
            }
            DestinationAction::Acquire => {
                self.moment(Moment::Taken);
                self.destination.holds = true;
                self.destination_starts(Doing::Acquires, 10);
            }
            DestinationAction::Resume => {
                let run = !self.plan.paused;
                if let Some(copy) = &mut self.session().copy {
                    copy.running = run;
                }
                self.marks.ran = Some(self.session().attempt);
                self.destination_starts(Doing::Resumes, 5);
            }
            DestinationAction::Tell(verdict) => self.tell(verdict),
            DestinationAction::CloseOld => {
                let read = self.close_old(true);
                self.session().draining = None;
                self.session().drained_later = read;
            }
            DestinationAction::Drain => {
                let read = std::mem::take(&mut self.session().drained_later);
                self.session().draining = Some(read);
            }
            DestinationAction::Close => {
                for connection in std::mem::take(&mut self.session().controls) {
                    self.close(connection, Side::Destination, false);
                }
            }
            DestinationAction::Discard => self.discard(),
            DestinationAction::Forget => self.destination.journal.durable = None,
            DestinationAction::RefuseTooLate => {}
        }
    }

    fn destination_starts(&mut self, doing: Doing, longest_ms: u64) {
        let until_ns = self.now_ns + self.random.between(1, longest_ms) * MS;
        self.session().doing = Some((until_ns, doing));
    }

    /// Continues after the main thread's blocking call has returned.
    pub(super) fn destination_has_done(&mut self, doing: Doing) {
        use DestinationEvent as On;
        let event = match doing {
            Doing::Records => {
                if self.destination.journal.fails {
                    self.struck.insert(FaultKind::DestinationJournalFails);
                }
                if self.destination.journal.end(&mut self.random) {
                    On::Recorded
                } else {
                    On::RecordFailed
                }
            }
            // With `VmmFails`, loading, acquiring or resuming fails; the seed selects which.
            Doing::Loads if self.vmm_fails(0) => On::Failed,
            Doing::Acquires if self.vmm_fails(1) => On::Failed,
            Doing::Resumes if self.vmm_fails(2) => {
                if let Some(copy) = &mut self.session().copy {
                    copy.running = false;
                }
                On::Failed
            }
            Doing::Loads => On::Loaded,
            Doing::Acquires => On::Acquired,
            Doing::Resumes => On::Resumed,
        };
        self.destination_feeds(event);
        if event == On::Recorded
            && matches!(
                self.session().machine,
                Destination::Starting | Destination::Running
            )
        {
            if let Some(copy) = &mut self.session().copy {
                copy.lives = true;
            }
            self.moment(Moment::Decided);
        }
    }

    fn vmm_fails(&mut self, step: u64) -> bool {
        let fails = self.armed.contains(&FaultKind::VmmFails) && self.plan.seed % 3 == step;
        if fails {
            self.armed.remove(&FaultKind::VmmFails);
            self.struck.insert(FaultKind::VmmFails);
        }
        fails
    }

    fn tell(&mut self, verdict: Verdict) {
        self.check_tell(verdict);
        let session = self.session();
        let attempt = session.attempt;
        let asked =
            session.asked_on.is_some() && session.asked_on == session.controls.last().copied();
        let message = match verdict {
            Verdict::Running if !asked => Message::Running {
                cpu_ns: 0,
                downtime_ns: 0,
            },
            Verdict::Aborted if !asked => Message::Cancel {
                fault: FaultCode::Cancelled,
                text: String::new(),
            },
            verdict => Message::Answer { attempt, verdict },
        };
        self.destination_says(message);
        if verdict == Verdict::Running {
            self.moment(Moment::Reported);
        }
    }

    /// Closes the lanes, joins their threads, drops the destination's copy and releases its disks
    /// and devices.
    fn discard(&mut self) {
        let session = self.session();
        session.copy = None;
        session.ended.clear();
        let lanes = std::mem::take(&mut session.lanes);
        for lane in lanes.into_values() {
            self.close(lane.connection, Side::Destination, true);
        }
        self.destination.holds = false;
    }
}
