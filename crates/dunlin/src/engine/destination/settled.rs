//! The end of a session at the destination.

use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::Destination;

use super::super::error::MigrateError;
use super::super::fault::{Fault, VmIs};
use super::super::journal::SessionJournal;
use super::arriving::{Arriving, Reached};
use super::received::{DestinationEvent, Received};

/// A session that has ended: none of its threads or lanes remains.
pub(super) enum Settled {
    /// This host has the VM.
    Arrived(Box<Received>),
    /// This side does not have the VM, or no longer has it.
    Failed(Fault, VmIs),
}

impl Settled {
    /// Ends the lanes, control lane and threads of an arriving VM. Removes the record if
    /// the source will never ask about the session. If this side has the VM and the source
    /// may still ask, the VM comes with an [`Answering`].
    pub(super) fn arriving(arriving: Arriving<'_>) -> Self {
        let Arriving {
            session,
            control,
            attempt,
            lanes,
            ..
        } = arriving;
        let (runs, is_never_asked_about) = (attempt.runs(), attempt.is_never_asked_about());
        let observer = session.observer;
        let warn = |text| observer.event(&DestinationEvent::Warning(text));
        let forget = |journal: SessionJournal| {
            if let Err(error) = journal.forget() {
                warn(error.to_string());
            }
        };
        // A session that the source has released needs no record.
        let journal = match attempt.state {
            Destination::Released => {
                forget(attempt.journal);
                None
            }
            _ => Some(attempt.journal),
        };
        lanes.barrier.stop();
        let (record, journal) = match attempt.state {
            Destination::Running => (journal, None),
            _ => (None, journal),
        };
        let threads = lanes.threads.into_values();
        let (cpu, answering) = session.close(Some(control), threads, record);
        let vm = match attempt.state {
            Destination::Running | Destination::Released => {
                let answering = answering.and_then(|answering| {
                    answering
                        .inspect_err(|error| {
                            warn(format!("cannot answer inquiries about the VM: {error}"));
                        })
                        .ok()
                });
                let (_, pages) = lanes.barrier.lanes(|lanes| lanes.totals());
                return Self::Arrived(Box::new(Received {
                    vm: attempt.vm,
                    offered: attempt.offered,
                    runs,
                    guest_downtime: attempt.guest_downtime,
                    wire_bytes: lanes.wire_bytes,
                    pages,
                    cpu,
                    answering,
                }));
            }
            Destination::Died => VmIs::RanThenDied,
            // The source has received no verdict and may be waiting for one.
            Destination::Unrecorded if attempt.reached >= Reached::Ready => VmIs::InDoubt,
            _ => VmIs::AtSource,
        };
        let fault = attempt.fault.unwrap_or_else(|| {
            let what = "the session ended without a reason";
            Fault::new(FaultCode::Internal, what)
        });
        let over = matches!(
            attempt.state,
            Destination::Aborted | Destination::Unrecorded
        );
        if over
            && is_never_asked_about
            && let Some(journal) = journal
        {
            forget(journal);
        }
        Self::Failed(fault, vm)
    }

    pub(super) fn into_result(self) -> Result<Received, MigrateError> {
        match self {
            Self::Arrived(received) => Ok(*received),
            Self::Failed(fault, vm) => Err(fault.into_error(vm)),
        }
    }
}
