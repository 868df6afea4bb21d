//! How taking a VM in has ended.

use std::sync::Arc;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::Destination;

use super::super::error::MigrateError;
use super::super::fault::{Fault, VmIs};
use super::super::journal::RecordedPeer;
use super::answer::{Answering, Held};
use super::arriving::Arriving;
use super::received::Received;

/// A session that has ended: no thread or lane of it is left.
pub(super) enum Settled<'a> {
    /// The VM lives here.
    Arrived(Box<Arriving<'a>>),
    /// It does not, or not any more.
    Failed(Fault, VmIs),
}

impl<'a> Settled<'a> {
    pub(super) fn failed(fault: Fault, vm: VmIs) -> Self {
        Self::Failed(fault, vm)
    }

    /// Ends lanes, control lane and threads of a VM that was coming in.
    pub(super) fn arriving(mut arriving: Arriving<'a>) -> Self {
        arriving.lanes.barrier.stop();
        let lanes = std::mem::take(&mut arriving.lanes.threads).into_values();
        arriving.session.close(Some(&mut arriving.control), lanes);
        let attempt = &mut arriving.attempt;
        let vm = match attempt.state {
            Destination::Running | Destination::Released => {
                return Self::Arrived(Box::new(arriving));
            }
            Destination::Died => VmIs::RanThenDied,
            // The source was told nothing, and may be waiting.
            Destination::Unrecorded if attempt.ready_sent => VmIs::InDoubt,
            _ => VmIs::AtSource,
        };
        let fault = attempt.fault.take().unwrap_or_else(|| {
            let what = "the session has ended without a reason";
            Fault::new(FaultCode::Internal, what)
        });
        let over = matches!(
            attempt.state,
            Destination::Aborted | Destination::Unrecorded
        );
        if over && attempt.is_never_asked_about() {
            arriving.forget();
        }
        Self::Failed(fault, vm)
    }

    pub(super) fn into_result(self) -> Result<Received, MigrateError> {
        let arriving = match self {
            Self::Arrived(arriving) => *arriving,
            Self::Failed(fault, vm) => return Err(fault.into_error(vm)),
        };
        let Arriving {
            session,
            control,
            mut attempt,
            lanes,
            ..
        } = arriving;
        let answering = (attempt.state == Destination::Running)
            .then(|| {
                let journal = attempt.journal.take();
                let peer = journal
                    .as_ref()
                    .map_or(RecordedPeer::Unknown, |journal| journal.peer().clone());
                let held = Held {
                    session: control.offer.session,
                    peer,
                    state: attempt.state,
                    journal,
                    done: None,
                };
                let (listener, tls) = (Arc::clone(&session.listener), session.tls.clone());
                let journal = session.options.journal.clone();
                Answering::start(listener, tls, session.host, journal, held)
                    .inspect_err(|error| {
                        session.warn(format!(
                            "inquiries about the VM cannot be answered: {error}"
                        ));
                    })
                    .ok()
            })
            .flatten();
        let (_, pages) = lanes.barrier.lanes(|lanes| lanes.totals());
        Ok(Received {
            vm: attempt.vm,
            offered: attempt.offered,
            runs: attempt.runs,
            guest_downtime: attempt.guest_downtime,
            wire_bytes: lanes.wire_bytes,
            pages,
            cpu: session.cpu_used(),
            answering,
        })
    }
}
