//! The end of a migration.

use std::time::Duration;

use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::switchover::Source;

use super::super::error::MigrateError;

use super::super::fault::Fault;
use super::super::lock;
use super::super::report::{Downtime, Event, Iteration, Report};
use super::doubt::{Doubt, NO_RECORD};
use super::guest::LoggedGuest;
use super::lanes::Transfer;
use super::session::Session;

/// Figures of the report about the iterations and the switchover.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) iterations: Vec<Iteration>,
    pub(super) downtime: Downtime,
    pub(super) digests_equal: Option<bool>,
    pub(super) destination_cpu: Duration,
    pub(super) total: Duration,
}

/// A migration that has ended: no thread, lane or dirty log remains.
pub(super) enum Settled<'a> {
    /// The destination has the VM.
    Moved(Box<Session<'a>>, Box<Report>),
    /// The destination does not have the VM, or may not have it.
    NotMoved(Box<Session<'a>>),
}

impl<'a> Settled<'a> {
    /// Ended before the destination accepted the VM.
    pub(super) fn unaccepted(mut session: Session<'a>) -> Self {
        session.close(std::iter::empty());
        Self::NotMoved(Box::new(session))
    }

    /// Ended before *commit*.
    pub(super) fn kept(transfer: Transfer<'a>, guest: LoggedGuest) -> Self {
        Self::NotMoved(Box::new(end(transfer, guest)))
    }

    /// Ended after *commit*.
    pub(super) fn committed(transfer: Transfer<'a>, guest: LoggedGuest, figures: Figures) -> Self {
        let (lanes_lost, pages_again) = (transfer.lanes.lost, transfer.lanes.pages_again);
        let session = end(transfer, guest);
        if session.state != Source::Released {
            return Self::NotMoved(Box::new(session));
        }
        let state = lock(&session.work_queue.state);
        let report = Report {
            iterations: figures.iterations,
            traffic: state.traffic(),
            lanes: state.by_lane(),
            lanes_lost,
            control_resumed: session.control_resumed,
            pages_again,
            security: session.control.terms.selection.security,
            total: figures.total,
            downtime: figures.downtime,
            source_cpu: session.cpu.used(),
            destination_cpu: figures.destination_cpu,
            digests_equal: figures.digests_equal,
            runs: !session.paused_by_owner,
        };
        drop(state);
        Self::Moved(Box::new(session), Box::new(report))
    }

    /// The result; `own_cpu` is the CPU time of the calling thread.
    pub(super) fn into_result(
        self,
        own_cpu: impl FnOnce() -> Duration,
    ) -> Result<Report, MigrateError> {
        match self {
            Self::NotMoved(session) => Err(error(*session)),
            Self::Moved(session, mut report) => {
                report.source_cpu += own_cpu();
                // If *released* could not be recorded, the destination was not asked to
                // forget the session either, and the record may still be needed.
                if session.journal.record().state == State::Source(SourceRecord::Released) {
                    let Session {
                        journal, observer, ..
                    } = *session;
                    if let Err(error) = journal.forget() {
                        observer.event(&Event::Warning(error.to_string()));
                    }
                }
                Ok(*report)
            }
        }
    }
}

/// Ends lanes, dirty logs, throttle and threads.
fn end<'a>(transfer: Transfer<'a>, mut guest: LoggedGuest) -> Session<'a> {
    transfer.session.work_queue.stop();
    guest.release(&transfer.session);
    transfer.close()
}

fn error(session: Session<'_>) -> MigrateError {
    let Session {
        state,
        fault,
        vm_is,
        journal,
        paused_by_owner,
        ..
    } = session;
    let fault = fault.unwrap_or_else(|| match state {
        Source::RanThenDied => Fault {
            at_fault: AtFault::Peer,
            ..Fault::new(FaultCode::Internal, "the VM died at the destination")
        },
        Source::InDoubt => Fault::new(FaultCode::ControlLost, NO_RECORD),
        _ => Fault::new(FaultCode::Internal, "the migration ended without a reason"),
    });
    let mut error = fault.into_error(vm_is);
    if state.may_resolve() {
        error.doubt = Some(Box::new(Doubt {
            journal,
            state,
            paused_by_owner,
        }));
    } else if state == Source::Kept {
        // Best effort: a record that stays is *kept*, or leads a restarted process to
        // *kept*.
        let _ = journal.forget();
    }
    error
}
