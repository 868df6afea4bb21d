//! The end of a migration.

use std::thread::JoinHandle;
use std::time::Duration;

use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::switchover::Source;
use tracing::info_span;

use super::super::error::MigrateError;
use super::super::fault::Fault;
use super::super::lock;
use super::super::report::{Downtime, Event, Iteration, Report};
use super::doubt::{Doubt, NO_RECORD};
use super::guest::LoggedGuest;
use super::lanes::Transfer;
use super::session::{Session, join};

/// The report's figures about the iterations and the switchover.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) iterations: Vec<Iteration>,
    pub(super) downtime: Downtime,
    pub(super) digests_equal: Option<bool>,
    pub(super) destination_cpu: Duration,
    pub(super) total: Duration,
}

/// A migration that has ended: no thread, lane or dirty log remains.
pub(super) enum Settled {
    /// The destination has the VM.
    Moved(Box<Report>),
    /// The destination does not have the VM, or it is unknown whether the destination has it.
    NotMoved(MigrateError),
}

impl Settled {
    /// Ends a session before the destination has accepted the VM.
    pub(super) fn unaccepted(session: Session<'_>) -> Self {
        Self::NotMoved(error(session, std::iter::empty()))
    }

    /// Ends a session before *commit*.
    pub(super) fn kept(transfer: Transfer<'_>, guest: LoggedGuest) -> Self {
        end(&transfer, guest);
        Self::NotMoved(error(
            transfer.session,
            transfer.lanes.threads.into_values(),
        ))
    }

    /// Ends a session after *commit*.
    pub(super) fn committed(transfer: Transfer<'_>, guest: LoggedGuest, figures: Figures) -> Self {
        end(&transfer, guest);
        let Transfer { session, lanes } = transfer;
        let threads = lanes.threads.into_values();
        if session.state != Source::Released {
            return Self::NotMoved(error(session, threads));
        }
        let _close = info_span!("close").entered();
        session.close();
        let security = session.control.terms.selection.security;
        join(
            session.control,
            threads.chain(session.threads),
            session.observer,
        );
        // Keep a record that is not *released*: the source has not asked the destination to forget
        // such a session, and may still need the record.
        if session.journal.record().state == State::Source(SourceRecord::Released)
            && let Err(error) = session.journal.forget()
        {
            session.observer.event(&Event::Warning(error.to_string()));
        }
        let state = lock(&session.work_queue.state);
        Self::Moved(Box::new(Report {
            iterations: figures.iterations,
            traffic: state.traffic(),
            lanes: state.by_lane(),
            lanes_lost: lanes.lost,
            control_resumed: session.control_resumed,
            pages_again: lanes.pages_again,
            security,
            total: figures.total,
            downtime: figures.downtime,
            source_cpu: session.cpu.used(),
            destination_cpu: figures.destination_cpu,
            digests_equal: figures.digests_equal,
            runs: !session.paused_by_owner,
        }))
    }

    /// The result of the migration for its caller; `own_cpu` is the CPU time of the calling thread.
    pub(super) fn into_result(
        self,
        own_cpu: impl FnOnce() -> Duration,
    ) -> Result<Report, MigrateError> {
        match self {
            Self::NotMoved(error) => Err(error),
            Self::Moved(mut report) => {
                report.source_cpu += own_cpu();
                Ok(*report)
            }
        }
    }
}

/// Ends the lanes and the dirty logs, and lifts the throttle.
fn end(transfer: &Transfer<'_>, mut guest: LoggedGuest) {
    transfer.session.work_queue.stop();
    guest.release(&transfer.session);
}

/// Ends the session, and returns the reason why it failed.
fn error(session: Session<'_>, lanes: impl Iterator<Item = JoinHandle<()>>) -> MigrateError {
    let _close = info_span!("close").entered();
    session.close();
    join(
        session.control,
        lanes.chain(session.threads),
        session.observer,
    );
    let (state, journal) = (session.state, session.journal);
    let fault = session.fault.unwrap_or_else(|| match state {
        Source::RanThenDied => Fault {
            at_fault: AtFault::Peer,
            ..Fault::new(FaultCode::Internal, "the VM died at the destination")
        },
        Source::InDoubt => Fault::new(FaultCode::ControlLost, NO_RECORD),
        _ => Fault::new(FaultCode::Internal, "the migration ended without a reason"),
    });
    let mut error = fault.into_error(session.vm_is);
    if state.may_resolve() {
        error.doubt = Some(Box::new(Doubt {
            journal,
            state,
            paused_by_owner: session.paused_by_owner,
        }));
    } else if state == Source::Kept {
        // Ignore an error: a record that cannot be removed does no harm. It says *kept*, or it
        // makes a restarted process end in *kept*.
        let _ = journal.forget();
    }
    error
}
