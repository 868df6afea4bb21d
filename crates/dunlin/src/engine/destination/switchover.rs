//! The switchover at the destination: load, *ready*, and after *commit* the VM
//! lives here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::DestinationEvent as Step;

use super::super::control::FromPeer;
use super::super::error::Fault;
use super::super::memory::digest;
use super::super::vmm::DestinationVm;
use super::session::{Session, unexpected};
use super::{DestinationEvent, SessionEvent};

/// How long after *running* the source may take to let go.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);

impl Session<'_> {
    /// Loads the state, answers *ready*, and waits for *commit*. Returns
    /// whether the guest shall run.
    pub(super) fn switch_over(&mut self) -> Result<bool, Fault> {
        self.step(Step::Complete)?;
        let vm = self.built()?;
        let digest = if self.verifies() {
            let memory = vm.memory();
            Some(digest(&*memory, 1).map_err(|error| {
                Fault::new(FaultCode::VerificationFailed, "guest memory cannot be read")
                    .because(error)
            })?)
        } else {
            None
        };
        vm.load(&self.sections).map_err(|error| {
            Fault::new(FaultCode::StateLoadFailed, "the state cannot be loaded").because(error)
        })?;
        self.sections = Vec::new();
        self.step(Step::Loaded)?;
        (self.observer)(&DestinationEvent::Ready);
        self.send(&Message::Ready { digest })?;
        loop {
            match self.next_event(None)? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Commit { run }))) => {
                    self.step(Step::Commit { run })?;
                    self.step(Step::Acquired)?;
                    self.step(Step::Recorded)?;
                    if run {
                        self.step(Step::Resumed)?;
                    }
                    return Ok(run);
                }
                // It crossed a late fence: everything has come.
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Final(_)))) => {}
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "a session is under way");
                }
                Some(_) | None => {}
            }
        }
    }

    /// The source has committed: the VM lives here.
    pub(super) fn start(
        &mut self,
        runs: bool,
        cpu_before: Duration,
    ) -> Result<(Arc<dyn DestinationVm>, Option<Duration>), Fault> {
        let vm = self.built()?;
        vm.acquire().map_err(|error| {
            Fault::new(FaultCode::Internal, "disks and devices cannot be taken").because(error)
        })?;
        let guest_downtime = if runs {
            vm.resume().map_err(|error| {
                Fault::new(FaultCode::Internal, "the guest cannot be started").because(error)
            })?
        } else {
            None
        };
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // From here on the source changes nothing any more: it may have died.
        let told = self.send(&Message::Running {
            cpu_ns: nanos(self.cpu_since(cpu_before)),
            downtime_ns: guest_downtime.map_or(0, nanos),
        });
        if runs {
            vm.announce();
        }
        (self.observer)(&DestinationEvent::Running { runs });
        let released = told.and_then(|()| self.await_release());
        if let Err(fault) = released {
            (self.observer)(&DestinationEvent::Warning(format!(
                "the source did not confirm that it let go of the VM: {}",
                fault.for_peer()
            )));
        }
        Ok((vm, guest_downtime))
    }

    pub(super) fn await_release(&mut self) -> Result<(), Fault> {
        let until = Instant::now() + RELEASE_LIMIT;
        loop {
            match self.next_event(Some(until))? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Release))) => {
                    self.step(Step::Release)?;
                    return Ok(());
                }
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "a session is under way");
                }
                Some(_) => {}
                None => {
                    return Err(Fault::new(FaultCode::ControlLost, "no release came"));
                }
            }
        }
    }
}
