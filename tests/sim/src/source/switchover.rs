//! The actions that the source's state machine requests.

use dunlin_proto::control::Message;
use dunlin_proto::journal::SourceRecord;
use dunlin_proto::switchover::{Resolution, Source, SourceAction, SourceEvent};

use super::Doing;
use crate::plan::{MS, Moment};
use crate::tally::{End, FaultKind, Passage};
use crate::world::{Event, World};

/// How long the operator takes to decide.
const OPERATOR_NS: u64 = 200 * MS;
/// Timeout from *commit* to *running*.
const RUNNING_LIMIT_NS: u64 = 1200 * MS;

impl World<'_> {
    pub(super) fn source_does(&mut self, action: SourceAction) {
        self.say(|| format!("source: does {action:?}"));
        match action {
            SourceAction::Record(record) => self.source_records(record, Doing::Record),
            SourceAction::Note(record) => self.source_records(record, Doing::Note),
            SourceAction::PauseGuest => {
                if let Some(guest) = &mut self.source.guest {
                    guest.running = false;
                    let memory = guest.pages.clone();
                    self.source.paused = Some((self.attempt().number, memory));
                }
                self.moment(Moment::Paused);
                self.last_pages();
            }
            SourceAction::SendCommit => {
                let run = !self.plan.paused;
                self.source_says(Message::Commit { run });
                self.drop_lanes();
                self.attempt().closing = None;
                self.attempt().answer_ns = Some(self.now_ns + RUNNING_LIMIT_NS);
                self.moment(Moment::Commit);
            }
            SourceAction::ResumeGuest => self.guest_resumes(),
            SourceAction::CancelPeer => self.farewell(),
            SourceAction::HoldInDoubt => self.moment(Moment::Doubt),
            SourceAction::Inquire => self.inquire(),
            SourceAction::AskOperator => {
                let life = self.attempt().life;
                self.at(self.now_ns + OPERATOR_NS, Event::Operator { life });
            }
            SourceAction::DestroyCopy => {
                self.check_destroy();
                self.source.guest = None;
                self.moment(Moment::Destroyed);
            }
            SourceAction::SendRelease => {
                self.check_release();
                self.source_says(Message::Release);
            }
            SourceAction::RefuseTooLate => self.pass(Passage::TooLate),
        }
    }

    fn source_records(&mut self, record: SourceRecord, doing: Doing) {
        let number = self.attempt().number;
        self.source.journal.begin((number, record));
        let until_ns = self.now_ns + self.sync_ns();
        self.attempt().doing = Some((until_ns, doing));
    }

    /// Continues after the main thread's blocking call has returned.
    pub(super) fn source_has_done(&mut self, doing: Doing) {
        if self.source.journal.fails {
            self.struck.insert(FaultKind::SourceJournalFails);
        }
        let recorded = self.source.journal.end(&mut self.random);
        match doing {
            Doing::Begin if recorded => {}
            Doing::Begin => self.source_feeds(SourceEvent::Failed),
            Doing::Record if recorded => self.source_feeds(SourceEvent::Recorded),
            Doing::Record => {
                let resolved = matches!(
                    self.attempt().machine,
                    Source::TakingBack | Source::GivingUp
                );
                if resolved {
                    // The operator tries again.
                    let life = self.attempt().life;
                    self.at(self.now_ns + OPERATOR_NS, Event::Operator { life });
                }
                self.source_feeds(SourceEvent::RecordFailed);
            }
            Doing::Note => {}
        }
    }

    fn guest_resumes(&mut self) {
        self.check_resume();
        self.drop_lanes();
        let Some(guest) = &mut self.source.guest else {
            return;
        };
        guest.running = !guest.paused_by_owner;
    }

    pub(crate) fn operator(&mut self, life: u32) {
        let Some(attempt) = self.source.attempt.as_ref().filter(|a| a.life == life) else {
            return;
        };
        if attempt.doing.is_some() || !attempt.todo.is_empty() {
            self.at(self.now_ns + MS, Event::Operator { life });
            return;
        }
        if !attempt.machine.may_resolve() {
            return;
        }
        let (resolution, end) = if self.plan.takes_back {
            (Resolution::RunHere, End::TakenBack)
        } else {
            (Resolution::Destroy, End::GivenUp)
        };
        self.attempt().end = end;
        self.source_feeds(SourceEvent::Resolve(resolution));
        self.source_wakes(0);
    }
}
