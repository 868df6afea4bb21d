//! The switchover at the destination: waits for *commit*, then for *release*.

use std::time::{Duration, Instant};

use dunlin_proto::control::{Digest, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};
use tracing::info_span;

use super::super::control::{FromPeer, unexpected};
use super::super::fault::{Fault, OrFault};
use super::super::journal::Role;
use super::arriving::{Arriving, Reached};
use super::event::SessionEvent;
use super::phase::{Phase, failed, next_event, take};
use super::received::DestinationEvent;
use super::settled::Settled;

/// How long the source may take to destroy its copy after *running*. The wait ends earlier if the
/// control lane is lost.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);

/// Everything has arrived and the state is loaded: this side sends *ready*, and waits
/// for *commit*.
pub(super) struct Prepared<'a> {
    arriving: Arriving<'a>,
    /// The digest of the memory, if verification was negotiated.
    digest: Option<Digest>,
}

impl<'a> Phase<'a> for Prepared<'a> {
    fn arriving(&mut self) -> &mut Arriving<'a> {
        &mut self.arriving
    }

    fn act(&mut self, action: Do) -> Option<On> {
        let attempt = &mut self.arriving.attempt;
        let (done, result) = match action {
            Do::Acquire => {
                self.arriving.session.notify(DestinationEvent::Committed);
                let acquired = attempt
                    .vm
                    .acquire()
                    .or_fault(FaultCode::Internal, "cannot acquire disks and devices");
                (On::Acquired, acquired)
            }
            Do::Resume => {
                let resumed = attempt
                    .vm
                    .resume()
                    .or_fault(FaultCode::Internal, "cannot start the guest");
                (
                    On::Resumed,
                    resumed.map(|downtime| attempt.guest_downtime = downtime),
                )
            }
            Do::SendReady => {
                self.arriving.session.notify(DestinationEvent::Ready);
                attempt.reached = Reached::Ready;
                let digest = self.digest;
                self.arriving.control.notify(&Message::Ready { digest });
                return None;
            }
            other => return self.arriving.act(other),
        };
        Some(match result {
            Ok(()) => done,
            Err(fault) => {
                self.arriving.attempt.fault = Some(fault);
                On::Failed
            }
        })
    }
}

impl<'a> Prepared<'a> {
    pub(super) fn new(arriving: Arriving<'a>, digest: Option<Digest>) -> Self {
        Self { arriving, digest }
    }

    /// Sends *ready*, and waits until it is decided which side has the VM.
    pub(super) fn decide(mut self) -> Result<Running<'a>, Settled> {
        if let Err(fault) = info_span!("commit").in_scope(|| self.await_decision()) {
            failed(&mut self, fault);
        }
        let arriving = self.arriving;
        if arriving.attempt.state != Destination::Running {
            return Err(Settled::arriving(arriving));
        }
        Ok(Running { arriving })
    }

    fn await_decision(&mut self) -> Result<(), Fault> {
        take(self, On::Loaded)?;
        self.arriving.progressed = Instant::now();
        while self.arriving.attempt.state == Destination::Prepared {
            let idle = self.arriving.idle_until();
            let event = next_event(self, idle)?;
            // Only *commit* is progress here, and it ends the loop.
            self.arriving.progress(None)?;
            match event {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => match message {
                    Message::Commit { run } => take(self, On::Commit { run })?,
                    // The source sent *final* again after a late fence. Everything has already
                    // arrived.
                    Message::Final(_) => {}
                    other => return Err(unexpected(&other, Role::Source)),
                },
                Some(SessionEvent::Arrived(arrival)) => {
                    let session = &self.arriving.session;
                    session.turn_away(*arrival, "another session is in progress");
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }
}

/// This side has the VM; the source has not confirmed yet that its copy is destroyed.
pub(super) struct Running<'a> {
    arriving: Arriving<'a>,
}

impl<'a> Phase<'a> for Running<'a> {
    fn arriving(&mut self) -> &mut Arriving<'a> {
        &mut self.arriving
    }
}

impl<'a> Running<'a> {
    /// Waits for *release*. This side has the VM whether or not *release* arrives.
    pub(super) fn await_release(mut self) -> Settled {
        let attempt = &self.arriving.attempt;
        let runs = attempt.runs();
        // From now on nothing depends on the source, which may have died.
        if runs {
            attempt.vm.announce();
        }
        self.arriving
            .session
            .notify(DestinationEvent::Running { runs });
        if let Err(fault) = info_span!("release").in_scope(|| self.released()) {
            self.arriving.session.warn(format!(
                "the source did not confirm that it released the VM: {}",
                fault.for_peer()
            ));
        }
        Settled::arriving(self.arriving)
    }

    fn released(&mut self) -> Result<(), Fault> {
        let until = Instant::now() + RELEASE_LIMIT;
        loop {
            match next_event(self, until)? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Release))) => {
                    return take(self, On::Release);
                }
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other, Role::Source));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    let session = &self.arriving.session;
                    session.turn_away(*arrival, "another session is in progress");
                }
                Some(SessionEvent::Cancelled) => take(self, On::Cancelled)?,
                Some(_) => {}
                None => return Err(Fault::new(FaultCode::ControlLost, "timeout")),
            }
        }
    }
}
